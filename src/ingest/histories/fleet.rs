//! Engines of several kinds, ranks and endpoints with their network, what happens to them, and what must be so when
//! everything has arrived.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use loadgen::engine::hash::{Chain, sglang, vllm};
use loadgen::engine::{Algo, Release};
use shards::block::vllm::{Algorithm, Tagging};
use shards::block::{Contract, NoneHash, Release as SglangRelease, sglang as pages};

use super::super::calibrate::{Believed, Verdict};
use super::super::sockets::Link;
use super::chance::Chance;
use super::engine::{Copies, Group, Heard, Manner, Message, Prefix, Process, prompt, run};
use super::gateway::{Asked, Gateway, Rule};
use super::wire::Style;

const RULE_BLOCK: u32 = 4;
const SEED: &str = "0";

/// How an engine answers replay requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Replay {
    /// There is no such socket, and the rule names none.
    None,
    /// It has everything.
    Full,
    /// It has the last few batches, or does not answer.
    Poor,
}

/// A frame of an answer, or its end.
type Answer = Option<Message>;

/// One rank's engine and the way to it.
struct Line {
    process: Process,
    heard: Heard,
    replay: Replay,
    /// Replies carry a topic.
    topic: bool,
    wire: VecDeque<Message>,
    /// What is sent live gets on the wire.
    subscribed: bool,
    link: Option<i32>,
    /// A link of a process that is gone, whose end nobody has noticed.
    stale: Option<i32>,
    links: i32,
    answering: Option<Asked>,
    answers: VecDeque<Answer>,
    /// Another process was here, since the endpoint is part of the rule.
    restarted: bool,
    /// One of another manner was.
    changed: bool,
}

pub(super) struct Fleet {
    chance: Chance,
    clock: u64,
    lives: u64,
    gateway: Gateway,
    /// Says what happens.
    told: bool,
    bounded: bool,
    manners: Vec<Rc<Manner>>,
    /// Lines by endpoint and rank; an endpoint that is out of the rule has its engines all the same.
    endpoints: Vec<(bool, Vec<Line>)>,
}

fn attention(chance: &mut Chance) -> Vec<Group> {
    let one = Group { id: 0, kind: Some("full_attention"), counts: true };
    let sparse = Group { id: 1, kind: Some("sliding_window"), counts: false };
    let other = Group { id: 2, kind: Some("mla_attention"), counts: true };
    chance.of(&[vec![one], vec![one, sparse], vec![one, sparse, other]]).clone()
}

fn vllm_manner(algo: Algo, seed: &str, block: u32, style: Style, chance: &mut Chance) -> Manner {
    let groups = match style {
        Style::Maps => attention(chance),
        _ => vec![Group { id: 0, kind: None, counts: true }],
    };
    let chain = Chain::Vllm(vllm::Chain::new(algo, seed, Release::new(33, 0), block as usize, 0));
    Manner { chain, style, block, groups, exact: false, secret: false }
}

/// A rule for vLLM, and manners that its engines may have.
fn vllm_fleet(chance: &mut Chance) -> (Rule, Vec<Manner>) {
    let given = !chance.one_in(4);
    let believed = Believed::Vllm {
        algorithm: Algorithm::Sha256Cbor,
        algorithm_given: given,
        seed: SEED.to_owned(),
        tagging: Tagging::Tagged,
    };
    let contract = Contract::vllm(NoneHash::from_seed(Algorithm::Sha256Cbor, SEED));
    let rule = Rule { contract, block: RULE_BLOCK, believed: Some(Arc::new(believed)), blocks_max: usize::MAX };
    let style = |chance: &mut Chance| *chance.of(&[Style::Maps, Style::Maps, Style::Arrays]);
    let own = style(chance);
    let mut manners = vec![Manner { exact: true, ..vllm_manner(Algo::Sha256Cbor, SEED, RULE_BLOCK, own, chance) }];
    for _ in 0..chance.below(3) {
        let style = style(chance);
        let other = match chance.below(5) {
            0 => Manner { exact: true, ..vllm_manner(Algo::Sha256Cbor, SEED, RULE_BLOCK, style, chance) },
            1 => vllm_manner(Algo::Sha256Cbor, "42", RULE_BLOCK, style, chance),
            2 => Manner { secret: true, ..vllm_manner(Algo::Sha256, "nobody guesses", RULE_BLOCK, style, chance) },
            3 => Manner { exact: !given, ..vllm_manner(Algo::Xxhash, SEED, RULE_BLOCK, style, chance) },
            _ => {
                let (seed, secret) = *chance.of(&[(SEED, false), ("nobody guesses", true)]);
                Manner { secret, ..vllm_manner(Algo::Sha256Cbor, seed, 8, style, chance) }
            }
        };
        manners.push(other);
    }
    (rule, manners)
}

fn sglang_fleet(chance: &mut Chance) -> (Rule, Vec<Manner>) {
    let newest = pages::Contract::new(SglangRelease::new(0, 5, 23), false, pages::EventFormat::Default);
    let contract = newest.expect("the newest release has a chain");
    let believed = Some(Arc::new(Believed::Sglang(contract)));
    let rule = Rule { contract: Contract::Sglang(contract), block: RULE_BLOCK, believed, blocks_max: usize::MAX };
    let chain = Chain::Sglang(sglang::Chain { bigrams: false, salted: true, lora_names: true });
    let groups = vec![Group { id: 0, kind: None, counts: true }];
    let manner = Manner { chain, style: Style::Sglang, block: RULE_BLOCK, groups, exact: true, secret: false };
    let mut manners = vec![manner.clone()];
    if chance.one_in(3) {
        manners.push(Manner { block: 8, exact: false, ..manner });
    }
    (rule, manners)
}

impl Line {
    fn new(process: Process, replay: Replay, topic: bool) -> Self {
        Line {
            process,
            heard: Heard::default(),
            replay,
            topic,
            wire: VecDeque::new(),
            subscribed: false,
            link: None,
            stale: None,
            links: 0,
            answering: None,
            answers: VecDeque::new(),
            restarted: false,
            changed: false,
        }
    }

    fn ring_max(&self) -> usize {
        if self.replay == Replay::Poor { 3 } else { usize::MAX }
    }

    fn new_link(&mut self) -> i32 {
        self.links += 1;
        self.links
    }

    fn send(&mut self, clock: u64) {
        let message = self.process.send(clock);
        if self.subscribed && self.link.is_some() {
            self.wire.push_back(message);
        }
    }
}

impl Fleet {
    pub(super) fn new(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let (mut rule, manners) = if chance.one_in(4) { sglang_fleet(&mut chance) } else { vllm_fleet(&mut chance) };
        let bounded = chance.one_in(6);
        if bounded {
            rule.blocks_max = 4 + chance.below(30);
        }
        let manners: Vec<_> = manners.into_iter().map(Rc::new).collect();
        let told = std::env::var_os("KVLANE_HISTORY_TOLD").is_some();
        let (gateway, endpoints) = (Gateway::new(rule), Vec::new());
        let mut fleet = Fleet { chance, clock: 0, lives: 0, gateway, told, bounded, manners, endpoints };
        for _ in 0..1 + fleet.chance.below(3) {
            let ranks = 1 + fleet.chance.below(3);
            let lines = (0..ranks).map(|_| fleet.line()).collect();
            fleet.endpoints.push((false, lines));
            fleet.join(fleet.endpoints.len() - 1);
        }
        fleet
    }

    fn process(&mut self, ring_max: usize) -> Process {
        self.lives += 1;
        let manner = Rc::clone(self.chance.of(&self.manners));
        Process::new(self.lives, manner, ring_max)
    }

    fn line(&mut self) -> Line {
        let replay = *self.chance.of(&[Replay::None, Replay::Full, Replay::Full, Replay::Poor]);
        let topic = self.chance.one_in(2);
        let process = self.process(usize::MAX);
        let mut line = Line::new(process, replay, topic);
        line.process = self.process(line.ring_max());
        line
    }

    /// An endpoint becomes part of the rule.
    fn join(&mut self, endpoint: usize) {
        let (there, lines) = &mut self.endpoints[endpoint];
        *there = true;
        let replays: Vec<_> = lines.iter().map(|line| line.replay != Replay::None).collect();
        for line in lines {
            line.heard = Heard::default();
            (line.link, line.stale, line.answering) = (None, None, None);
            (line.subscribed, line.restarted, line.changed) = (false, false, false);
            line.wire.clear();
        }
        self.gateway.add(endpoint as u16, &replays);
    }

    /// Lives through so many steps, and to a quiet end.
    pub(super) fn live(mut self, steps: usize) {
        let steps = self.chance.below(super::STEPS_MAX + 1).min(steps);
        for _ in 0..steps {
            self.step();
        }
        self.settle();
        self.check();
        for endpoint in 0..self.endpoints.len() {
            if self.endpoints[endpoint].0 {
                self.leave(endpoint);
            }
        }
        self.gateway.settle();
        for endpoint in 0..self.endpoints.len() {
            assert_eq!(self.gateway.keys(endpoint as u16), (0, [].into()), "an endpoint that went left nothing");
        }
    }

    fn leave(&mut self, endpoint: usize) {
        self.endpoints[endpoint].0 = false;
        self.gateway.remove(endpoint as u16);
    }

    fn step(&mut self) {
        self.clock += 1;
        let endpoint = self.chance.below(self.endpoints.len());
        let rank = self.chance.below(self.endpoints[endpoint].1.len());
        if !self.endpoints[endpoint].0 {
            match self.chance.one_in(3) {
                true => self.join(endpoint),
                false => self.work(endpoint, rank),
            }
            return;
        }
        match self.chance.below(60) {
            0..22 => self.work(endpoint, rank),
            22..36 => {
                let n = 1 + self.chance.below(4);
                self.deliver(endpoint, rank, n);
            }
            36..46 => {
                let n = self.chance.below(5);
                self.answer(endpoint, rank, n, true);
            }
            46 => self.meddle(endpoint, rank),
            47 | 48 => self.connect(endpoint, rank),
            49..52 => self.endpoints[endpoint].1[rank].subscribed = true,
            52 => self.lose(endpoint, rank),
            53 => self.restart(endpoint, rank),
            54 => self.replace(endpoint, rank),
            55 => self.junk(endpoint, rank),
            56 | 57 => {
                let reading = self.chance.one_in(2);
                self.gateway.publish(reading);
            }
            58 if self.chance.one_in(6) => self.leave(endpoint),
            59 if self.chance.one_in(4) => {
                self.settle();
                self.check();
            }
            _ => {}
        }
    }

    /// Something happens in an engine.
    fn work(&mut self, endpoint: usize, rank: usize) {
        let Fleet { chance, endpoints, clock, .. } = self;
        let line = &mut endpoints[endpoint].1[rank];
        for _ in 0..1 + chance.below(3) {
            match chance.below(40) {
                0..24 => line.process.serve(chance),
                24..33 => line.process.evict(chance),
                33..36 => line.process.offload(chance),
                36 => line.process.clear(chance),
                _ => line.process.babble(chance),
            }
        }
        line.send(*clock);
    }

    /// What is under way arrives.
    fn deliver(&mut self, endpoint: usize, rank: usize, n: usize) {
        let line = &mut self.endpoints[endpoint].1[rank];
        for _ in 0..n {
            let Some(message) = line.wire.pop_front() else { return };
            if self.told {
                eprintln!("({endpoint}, {rank}) reads {message}");
            }
            line.heard.hear(&message);
            self.gateway.publishes((endpoint as u16, rank), &[b"kv", &message.seq.to_be_bytes(), &message.payload]);
        }
    }

    /// The replay that was asked for goes on by so many frames.
    fn answer(&mut self, endpoint: usize, rank: usize, n: usize, may_fail: bool) {
        let at = (endpoint as u16, rank);
        let line = &mut self.endpoints[endpoint].1[rank];
        let poor = line.replay == Replay::Poor && may_fail;
        for _ in 0..n {
            let Some(asked) = self.gateway.asked(at) else { return };
            if line.link.is_none() {
                return;
            }
            match self.chance.below(12) {
                0 if poor => return self.gateway.refuse(at),
                1 if poor => return self.gateway.silence(at),
                // Some frame gets lost.
                2 if poor => _ = line.answers.pop_front(),
                _ => {}
            }
            if line.answering != Some(asked) {
                line.answering = Some(asked);
                let ring = line.process.ring.iter().filter(|message| message.seq >= asked.from);
                line.answers = ring.cloned().map(Some).chain([None]).collect();
            }
            // All of it was lost.
            let Some(answer) = line.answers.pop_front() else { return self.gateway.silence(at) };
            if self.told {
                match &answer {
                    Some(message) => eprintln!("({endpoint}, {rank}) is replayed {message}"),
                    None => eprintln!("({endpoint}, {rank}) has the end of the replay"),
                }
            }
            let seq = answer.as_ref().map_or(u64::MAX, |message| message.seq).to_be_bytes();
            let payload: &[u8] = answer.as_ref().map_or(b"", |message| &message.payload);
            match line.topic {
                true => self.gateway.replays(at, &[b"", b"kv", &seq, payload]),
                false => self.gateway.replays(at, &[b"", &seq, payload]),
            }
        }
    }

    /// A batch under way is lost, or comes twice.
    fn meddle(&mut self, endpoint: usize, rank: usize) {
        let line = &mut self.endpoints[endpoint].1[rank];
        if line.wire.is_empty() {
            return;
        }
        let place = self.chance.below(line.wire.len());
        if self.chance.one_in(2) {
            line.wire.remove(place);
        } else {
            let to = place + self.chance.below(line.wire.len() - place + 1);
            let message = line.wire[place].clone();
            line.wire.insert(to, message);
        }
    }

    fn connect(&mut self, endpoint: usize, rank: usize) {
        let line = &mut self.endpoints[endpoint].1[rank];
        if line.link.is_none() {
            if self.told {
                eprintln!("({endpoint}, {rank}) is connected");
            }
            let link = line.new_link();
            line.link = Some(link);
            line.subscribed = false;
            self.gateway.link((endpoint as u16, rank), Link::Opened(link));
            self.gateway.link((endpoint as u16, rank), Link::Ready);
        }
        if let Some(stale) = self.endpoints[endpoint].1[rank].stale.take() {
            self.gateway.link((endpoint as u16, rank), Link::Closed(stale));
        }
    }

    /// The connection is lost, with some of what was under way; the rest has arrived and waits to be read.
    fn lose(&mut self, endpoint: usize, rank: usize) {
        let line = &mut self.endpoints[endpoint].1[rank];
        let Some(link) = line.link.take() else { return };
        if self.told {
            eprintln!("({endpoint}, {rank}) is lost");
        }
        let rest = self.chance.below(line.wire.len() + 1);
        line.wire.truncate(rest);
        line.answering = None;
        let at = (endpoint as u16, rank);
        if let Some(stale) = line.stale.take() {
            self.gateway.link(at, Link::Closed(stale));
        }
        self.gateway.link(at, Link::Closed(link));
        assert!(!self.gateway.is_eligible(at), "without a connection nothing counts");
    }

    fn restart(&mut self, endpoint: usize, rank: usize) {
        self.lose(endpoint, rank);
        self.begin(endpoint, rank);
    }

    /// Another process takes over, and connects before the end of the old one's connection is noticed.
    fn replace(&mut self, endpoint: usize, rank: usize) {
        let line = &mut self.endpoints[endpoint].1[rank];
        if line.link.is_none() || line.stale.is_some() {
            return;
        }
        line.stale = line.link.take();
        self.begin(endpoint, rank);
        let line = &mut self.endpoints[endpoint].1[rank];
        let link = line.new_link();
        line.link = Some(link);
        line.subscribed = false;
        line.answering = None;
        self.gateway.link((endpoint as u16, rank), Link::Opened(link));
        self.gateway.link((endpoint as u16, rank), Link::Ready);
    }

    fn begin(&mut self, endpoint: usize, rank: usize) {
        let ring_max = self.endpoints[endpoint].1[rank].ring_max();
        let process = self.process(ring_max);
        let line = &mut self.endpoints[endpoint].1[rank];
        if self.told {
            eprintln!("({endpoint}, {rank}) is process {} now", process.life);
        }
        line.restarted = true;
        line.changed |= !Rc::ptr_eq(&line.process.manner, &process.manner);
        line.process = process;
    }

    /// Frames that are no message.
    fn junk(&mut self, endpoint: usize, rank: usize) {
        let at = (endpoint as u16, rank);
        let seq = 7_u64.to_be_bytes();
        let kinds: [&[&[u8]]; 4] = [&[], &[b"kv", &seq], &[b"kv", &seq[1..], b"x"], &[b"", b"", b"", &seq, b"x"]];
        let frames = *self.chance.of(&kinds);
        self.gateway.publishes(at, frames);
        if self.gateway.asked(at).is_some() {
            self.gateway.replays(at, frames);
        }
    }

    /// Everything under way arrives, and batches after it that show any gap.
    fn settle(&mut self) {
        for endpoint in 0..self.endpoints.len() {
            if !self.endpoints[endpoint].0 {
                continue;
            }
            for rank in 0..self.endpoints[endpoint].1.len() {
                self.connect(endpoint, rank);
                self.endpoints[endpoint].1[rank].subscribed = true;
                for _ in 0..3 {
                    self.deliver(endpoint, rank, usize::MAX);
                    for _ in 0..10_000 {
                        if self.gateway.asked((endpoint as u16, rank)).is_none() {
                            break;
                        }
                        self.answer(endpoint, rank, 1, false);
                    }
                    assert_eq!(self.gateway.asked((endpoint as u16, rank)), None, "a replay comes to an end");
                    self.clock += 1;
                    self.endpoints[endpoint].1[rank].send(self.clock);
                }
                self.deliver(endpoint, rank, usize::MAX);
            }
        }
        self.gateway.settle();
    }

    fn check(&mut self) {
        for endpoint in 0..self.endpoints.len() {
            let (distinct, keys) = self.gateway.keys(endpoint as u16);
            assert_eq!(distinct, keys.len() as u64, "endpoint {endpoint}: its status counts what is there");
            for rank in 0..self.endpoints[endpoint].1.len() {
                if self.endpoints[endpoint].0 {
                    self.check_status(endpoint, rank);
                }
            }
        }
        for _ in 0..8 {
            let prompt = self.some_prompt();
            for block in [RULE_BLOCK, 8] {
                self.check_prompt(&prompt, block);
            }
        }
    }

    fn check_status(&mut self, endpoint: usize, rank: usize) {
        let at = (endpoint as u16, rank);
        let line = &self.endpoints[endpoint].1[rank];
        let manner = &line.process.manner;
        assert!(self.gateway.is_eligible(at), "{at:?}: all of it is proven");
        let verdict = self.gateway.verdict(at);
        let judged = !line.process.roots.is_empty() && (manner.tells_salts() || !manner.secret);
        if line.replay == Replay::Full && judged && !line.heard.mixed {
            let expected = if manner.exact { Verdict::Exact } else { Verdict::Derived };
            assert_eq!(verdict, expected, "{at:?}");
            if manner.exact && !line.changed && !self.bounded {
                let entries = line
                    .process
                    .device
                    .keys()
                    .filter(|(id, _)| manner.groups.iter().any(|group| group.id == *id && group.counts));
                assert_eq!(self.gateway.held(at), entries.count() as u64, "{at:?}: entries");
            }
        }
    }

    /// A prompt that some engine has blocks of, or any.
    fn some_prompt(&mut self) -> Prefix {
        let mut prompt = prompt(&mut self.chance, true);
        let endpoint = self.chance.below(self.endpoints.len());
        let line = self.chance.of(&self.endpoints[endpoint].1);
        if let Some((_, held)) = line.process.device.keys().max()
            && prompt.choices[0].is_multiple_of(2)
        {
            prompt = held.clone();
            prompt.choices.push(0);
        }
        prompt
    }

    fn check_prompt(&self, prompt: &Prefix, block: u32) {
        let holders = self.gateway.holders(prompt, block);
        for (endpoint, (there, lines)) in self.endpoints.iter().enumerate() {
            for (rank, line) in lines.iter().enumerate() {
                let at = (endpoint as u16, rank);
                let seen = holders.get(&at).copied().unwrap_or(0) as usize;
                let (least, most) = if *there { self.expected(at, line, prompt, block) } else { (0, 0) };
                assert!(
                    (least..=most).contains(&seen),
                    "{at:?} holds {seen} blocks of {prompt:?} by {block} tokens, not {least}..={most}: replay {:?}, manner {:?}, verdict {:?}",
                    line.replay,
                    line.process.manner,
                    self.gateway.verdict(at)
                );
            }
        }
    }

    /// The least and the most blocks of a prompt that the gateway may believe a rank to hold.
    fn expected(&self, at: (u16, usize), line: &Line, prompt: &Prefix, block: u32) -> (usize, usize) {
        let manner = &line.process.manner;
        let verdict = self.gateway.verdict(at);
        // A restart that no number showed: what is believed is of two processes.
        if line.heard.mixed || line.replay == Replay::Poor && line.restarted {
            return (0, usize::MAX);
        }
        if manner.block != block {
            return (0, 0);
        }
        let held = |copies: &Copies| run(copies, &manner.groups, prompt);
        let most = held(&line.process.device);
        // Salted blocks are found by the engine's keys, and by own ones where the engine says what is salted.
        let found = match verdict {
            Verdict::Exact => !line.changed,
            // Before the first plain block shows their size, blocks of another one than the rule's do not enter.
            Verdict::Derived => manner.tells_salts() && block == RULE_BLOCK && !line.changed,
            Verdict::Believed | Verdict::Refused => false,
        };
        let least = match line.replay {
            _ if self.bounded || (prompt.salt > 0 && !found) => 0,
            // Who says nothing of salts is judged by its third first block, and what was believed before it is kept.
            _ if manner.secret && !manner.tells_salts() && (verdict != Verdict::Derived || line.changed) => 0,
            _ if manner.secret && !manner.tells_salts() && block != RULE_BLOCK => 0,
            Replay::Full => most,
            Replay::Poor => 0,
            // A rank that was derived before keeps nothing of what has no known parent.
            Replay::None if manner.exact && verdict == Verdict::Exact && !line.changed => held(&line.heard.told),
            Replay::None => held(&line.heard.rooted),
        };
        (least.min(most), most)
    }
}
