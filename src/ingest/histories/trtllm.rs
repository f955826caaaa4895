//! Histories of TensorRT-LLM engines: their drains, from the bytes of answers to what a reader of the inventory is told,
//! against what each attention-DP rank really holds.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroU32;

use loadgen::engine::hash::{Chain, Namespace, trtllm};
use serde_json::{Value, json};
use shards::block::{Contract, KeyStream, PromptExtras};
use shards::ids::{EndpointIndex, Rank, ServiceId};
use shards::inventory::{self, Reader, Walk, Writer};

use super::super::poller::Poller;
use super::super::status::StreamName;
use super::super::trtllm::{Drain, DrainFrom, DrainSource, Drained, Phase, Runner};
use super::chance::Chance;
use super::engine::{Prefix, prompt};

const BLOCK: u32 = 4;
const WINDOW: u64 = 4_096;

/// A block that is not full, by the blocks before it and its first tokens.
type Partial = (Prefix, usize);

/// One attention-DP rank of one engine process.
#[derive(Default)]
struct RankTruth {
    id: u64,
    /// Level of every full block of the largest window: 0 is device memory.
    held: HashMap<Prefix, u64>,
    partial: Option<Partial>,
    /// Blocks of the small window.
    small: BTreeSet<Prefix>,
}

/// What a rank's events say, in the order in which they wait for a drain.
#[derive(Clone)]
struct Event {
    life: u64,
    rank: usize,
    id: u64,
    json: Value,
}

/// What can be known of a rank.
#[derive(Default)]
struct Seen {
    last: Option<(u64, u64)>,
    /// Everything since the process began.
    whole: bool,
    /// A restart that no number can show.
    mixed: bool,
}

struct Engine {
    life: u64,
    ranks: Vec<RankTruth>,
    seen: Vec<Seen>,
    waiting: Vec<Event>,
    windows: bool,
    /// Removals name the top of a subtree alone.
    silent: bool,
    /// Blocks tell their salt.
    tells_salts: bool,
    runner: Runner,
    source: DrainSource,
}

pub(super) struct Drains {
    chance: Chance,
    lives: u64,
    writer: Writer,
    reader: Reader,
    bounded: bool,
    engines: Vec<Engine>,
}

fn key(prefix: &Prefix, tokens: &[u32]) -> u64 {
    let namespace = Namespace { salt: prefix.salt().map(str::to_owned), ..Namespace::default() };
    let chain = Chain::Trtllm(trtllm::Chain { salted: true });
    let mut digest = chain.root(&namespace);
    for (place, block) in tokens.chunks(BLOCK as usize).enumerate() {
        digest = chain.child(&digest, block, place == 0, &namespace);
    }
    digest.key()
}

fn key_of(prefix: &Prefix) -> u64 {
    key(prefix, &prefix.tokens(BLOCK))
}

fn is_below(prefix: &Prefix, top: &Prefix) -> bool {
    prefix.salt == top.salt && prefix.choices.starts_with(&top.choices)
}

impl RankTruth {
    /// Leading blocks in device memory.
    fn run(&self, prompt: &Prefix) -> usize {
        let on_device = |blocks: &usize| self.held.get(&prompt.first(*blocks)) == Some(&0);
        if prompt.salt > 0 { 0 } else { (1..=prompt.choices.len()).take_while(on_device).count() }
    }

    fn sorted(&self) -> Vec<Prefix> {
        let mut held: Vec<_> = self.held.keys().cloned().collect();
        held.sort();
        held
    }
}

impl Engine {
    fn begin(&mut self, life: u64, chance: &mut Chance) {
        self.life = life;
        self.windows = chance.one_in(3);
        self.silent = chance.one_in(2);
        self.tells_salts = chance.one_in(2);
        self.waiting.clear();
        for rank in 0..self.ranks.len() {
            self.ranks[rank] = RankTruth::default();
            self.seen[rank].whole = true;
            if self.windows {
                self.event(rank, 512, json!({"type": "created", "num_blocks_per_cache_level": [8, 8]}));
            }
            self.event(rank, WINDOW, json!({"type": "created", "num_blocks_per_cache_level": [100, 100]}));
        }
    }

    fn event(&mut self, rank: usize, window: u64, data: Value) {
        let id = self.ranks[rank].id;
        self.ranks[rank].id += 1;
        let mut json = json!({"event_id": id, "data": data, "window_size": window, "hash_algo": "v1_block_key"});
        if self.ranks.len() > 1 {
            json["attention_dp_rank"] = json!(rank);
        }
        self.waiting.push(Event { life: self.life, rank, id, json });
    }

    fn block(&self, prefix: &Prefix, tokens: &[u32], key: u64) -> Value {
        let tokens: Vec<_> =
            tokens.iter().map(|id| json!({"type": "unique_token", "token_id": id, "token_extra_id": 0})).collect();
        let mut block = json!({"type": "stored_block", "block_hash": key, "tokens": tokens, "cache_level": 0});
        if let Some(salt) = prefix.salt().filter(|_| self.tells_salts) {
            block["cache_salt"] = json!(salt);
        }
        block
    }

    fn store(&mut self, rank: usize, prompt: &Prefix, from: usize, to: usize, window: u64, rest: Option<usize>) {
        let parent = (from > 0).then(|| key_of(&prompt.first(from)));
        let tokens = prompt.tokens(BLOCK);
        let size = BLOCK as usize;
        let mut blocks: Vec<_> = (from..to)
            .map(|place| {
                let prefix = prompt.first(place + 1);
                self.block(&prefix, &tokens[place * size..(place + 1) * size], key_of(&prefix))
            })
            .collect();
        if let Some(rest) = rest {
            let cut = &tokens[..to * size + rest];
            blocks.push(self.block(prompt, &cut[to * size..], key(prompt, cut)));
        }
        self.event(rank, window, json!({"type": "stored", "parent_hash": parent, "blocks": blocks}));
    }

    fn updated(&mut self, rank: usize, prefix: &Prefix, to: u64) {
        let from = self.ranks[rank].held.insert(prefix.clone(), to).expect("it is held");
        let diff = json!({"type": "event_diff", "old_value": from, "new_value": to});
        self.event(rank, WINDOW, json!({"type": "updated", "block_hash": key_of(prefix), "cache_level": diff}));
    }

    /// A request is served: what is held is taken up, on the device, and the rest stored.
    fn serve(&mut self, rank: usize, chance: &mut Chance) {
        let prompt = prompt(chance, true);
        let blocks = prompt.choices.len();
        let hit = (1..=blocks).take_while(|n| self.ranks[rank].held.contains_key(&prompt.first(*n))).count();
        for n in 1..=hit {
            let prefix = prompt.first(n);
            if self.ranks[rank].held[&prefix] > 0 {
                self.updated(rank, &prefix, 0);
            }
        }
        if hit == blocks {
            return;
        }
        self.forget_partial(rank);
        let rest = (blocks - hit > 1 && chance.one_in(3)).then(|| 1 + chance.below(BLOCK as usize - 1));
        let to = blocks - usize::from(rest.is_some());
        self.store(rank, &prompt, hit, to, WINDOW, rest);
        (hit + 1..=to).for_each(|n| _ = self.ranks[rank].held.insert(prompt.first(n), 0));
        self.ranks[rank].partial = rest.map(|rest| (prompt.clone(), to * BLOCK as usize + rest));
        if self.windows && chance.one_in(2) {
            // Under the same keys, but not as long.
            self.store(rank, &prompt, hit, to, 512, None);
            self.ranks[rank].small.extend((hit + 1..=to).map(|n| prompt.first(n)));
        }
    }

    fn forget_partial(&mut self, rank: usize) {
        if let Some((prompt, len)) = self.ranks[rank].partial.take() {
            let tokens = prompt.tokens(BLOCK);
            self.event(rank, WINDOW, json!({"type": "removed", "block_hashes": [key(&prompt, &tokens[..len])]}));
        }
    }

    /// A block goes with all below it.
    fn evict(&mut self, rank: usize, chance: &mut Chance) {
        let held = self.ranks[rank].sorted();
        if held.is_empty() {
            return;
        }
        let top = chance.of(&held).clone();
        self.forget_partial(rank);
        let mut gone: Vec<_> = held.into_iter().filter(|prefix| is_below(prefix, &top)).collect();
        gone.iter().for_each(|prefix| _ = self.ranks[rank].held.remove(prefix));
        gone.sort_by_key(|prefix| std::cmp::Reverse(prefix.choices.len()));
        if self.silent {
            gone = vec![top];
        }
        let keys: Vec<_> = gone.iter().map(key_of).collect();
        if chance.one_in(2) {
            keys.iter().for_each(|key| self.event(rank, WINDOW, json!({"type": "removed", "block_hashes": [key]})));
        } else {
            self.event(rank, WINDOW, json!({"type": "removed", "block_hashes": keys}));
        }
    }

    fn evict_small(&mut self, rank: usize) {
        if let Some(prefix) = self.ranks[rank].small.pop_first() {
            self.event(rank, 512, json!({"type": "removed", "block_hashes": [key_of(&prefix)]}));
        }
    }

    fn moves(&mut self, rank: usize, chance: &mut Chance) {
        let held = self.ranks[rank].sorted();
        if !held.is_empty() {
            let prefix = chance.of(&held).clone();
            let to = 1 - self.ranks[rank].held[&prefix].min(1);
            self.updated(rank, &prefix, to);
        }
    }

    /// What happened is asked for; the answer may get lost.
    fn drain(&mut self, chance: &mut Chance, lost: bool, writer: &mut Writer) {
        let events = std::mem::take(&mut self.waiting);
        if lost {
            self.runner.lost(true, "the answer is lost").expect("it is not stopped");
        } else {
            let body = body(&events, chance);
            let phase = self.runner.answered(&Drained::read(body.as_bytes())).expect("it is not stopped");
            assert_eq!(phase, Phase::Draining, "nobody else asks");
            events.iter().for_each(|event| self.seen[event.rank].see(event));
        }
        self.source.visit(writer);
    }
}

impl Seen {
    fn see(&mut self, event: &Event) {
        match self.last.replace((event.life, event.id)) {
            None => self.whole = event.id == 0,
            Some((life, id)) if event.id == id + 1 => self.mixed |= life != event.life,
            Some((_, id)) if event.id <= id => (self.whole, self.mixed) = (event.id == 0, false),
            Some(_) => (self.whole, self.mixed) = (false, false),
        }
    }
}

/// An answer, with what releases put among events.
fn body(events: &[Event], chance: &mut Chance) -> String {
    let mut list = Vec::new();
    for event in events {
        match chance.below(20) {
            0 => list.push(json!(null)),
            1 => list.push(json!({})),
            2 => list.push(json!("not an event")),
            _ => {}
        }
        list.push(if chance.one_in(10) { json!([event.json]) } else { event.json.clone() });
    }
    Value::Array(list).to_string()
}

impl Drains {
    pub(super) fn new(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let (writer, readers) = inventory::new(&inventory::Options { blocks_expected: 1_000 });
        let bounded = chance.one_in(6);
        let keys_max = if bounded { 4 + chance.below(20) } else { usize::MAX };
        let mut drains = Drains { chance, lives: 0, writer, reader: readers.reader(), bounded, engines: Vec::new() };
        for index in 0..1 + drains.chance.below(2) {
            let ranks = 1 + drains.chance.below(3);
            let from = DrainFrom::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 1)));
            let waker = Poller::new().expect("a descriptor").waker();
            let (drain, runner) = Drain::idle(&from, BLOCK, keys_max, waker);
            let (label, address) = (String::new(), String::new());
            let endpoint = EndpointIndex(index as u16);
            let name = StreamName { service: ServiceId(0), endpoint, label, rank: Rank(0), address };
            drains.lives += 1;
            let mut engine = Engine {
                life: 0,
                ranks: (0..ranks).map(|_| RankTruth::default()).collect(),
                seen: (0..ranks).map(|_| Seen::default()).collect(),
                waiting: Vec::new(),
                windows: false,
                silent: false,
                tells_salts: false,
                runner,
                source: DrainSource::new(name, from, drain),
            };
            engine.begin(drains.lives, &mut drains.chance);
            drains.engines.push(engine);
        }
        drains
    }

    pub(super) fn live(mut self, steps: usize) {
        let steps = self.chance.below(super::STEPS_MAX + 1).min(steps);
        for _ in 0..steps {
            self.step();
        }
        self.settle();
        self.check();
        let engines = std::mem::take(&mut self.engines);
        for engine in engines {
            engine.source.close(&mut self.writer);
        }
        while self.writer.pending() > 0 {
            assert!(self.writer.try_publish(), "nobody reads");
        }
        assert_eq!(self.keys(0).len() + self.keys(1).len(), 0, "engines that went left nothing");
    }

    fn step(&mut self) {
        let Drains { chance, engines, writer, lives, .. } = self;
        let place = chance.below(engines.len());
        let engine = &mut engines[place];
        let rank = chance.below(engine.ranks.len());
        match chance.below(40) {
            0..16 => engine.serve(rank, chance),
            16..22 => engine.evict(rank, chance),
            22..26 => engine.moves(rank, chance),
            26 => engine.evict_small(rank),
            27..37 => engine.drain(chance, false, writer),
            37 if chance.one_in(3) => engine.drain(chance, true, writer),
            38 if chance.one_in(3) => {
                *lives += 1;
                engine.begin(*lives, chance);
            }
            39 => _ = writer.try_publish(),
            _ => {}
        }
    }

    /// All that waits is drained, with one more event of every rank.
    fn settle(&mut self) {
        let Drains { chance, engines, writer, .. } = self;
        for engine in engines {
            for rank in 0..engine.ranks.len() {
                engine.event(rank, WINDOW, json!({"type": "updated", "block_hash": 1, "cache_level": null}));
            }
            engine.drain(chance, false, writer);
        }
        while self.writer.pending() > 0 {
            assert!(self.writer.try_publish(), "nobody reads");
        }
    }

    fn keys(&self, endpoint: u16) -> BTreeSet<u64> {
        let guard = self.reader.enter().expect("the writer is there");
        let mut keys = BTreeSet::new();
        for segment in 0..guard.segments() {
            guard.segment_keys(segment, EndpointIndex(endpoint), &mut |key| assert!(keys.insert(key.0)));
        }
        keys
    }

    fn holders(&self, prompt: &Prefix) -> BTreeMap<(usize, usize), usize> {
        let size = NonZeroU32::new(BLOCK).expect("above 0");
        let stream = KeyStream::new(&Contract::TrtllmTokens, &PromptExtras::default(), size);
        let mut stream = stream.expect("nothing but tokens");
        let tokens = prompt.tokens(BLOCK);
        let mut rest = &tokens[..];
        let keys: Vec<_> = std::iter::from_fn(|| stream.next_key(&mut rest)).collect();
        let guard = self.reader.enter().expect("the writer is there");
        let mut walk = Walk::default();
        guard.advance(&mut walk, &keys);
        let of = |run: inventory::Run| ((run.endpoint.0 as usize, usize::from(run.rank.0)), run.blocks as usize);
        walk.runs(&guard).map(of).collect()
    }

    fn check(&mut self) {
        for (index, engine) in self.engines.iter().enumerate() {
            let keys = self.keys(index as u16);
            assert_eq!(engine.source.distinct(), keys.len() as u64, "engine {index}: its status counts what is there");
            let whole = engine.seen.iter().all(|seen| seen.whole && !seen.mixed);
            if whole && !self.bounded {
                let plain = engine.ranks.iter().flat_map(|rank| &rank.held);
                let plain: BTreeSet<_> = plain
                    .filter(|(prefix, level)| prefix.salt == 0 && **level == 0)
                    .map(|(prefix, _)| prefix)
                    .collect();
                assert_eq!(keys.len(), plain.len(), "engine {index}: nothing else is there");
            }
        }
        for _ in 0..8 {
            let prompt = prompt(&mut self.chance, false);
            let holders = self.holders(&prompt);
            for (index, engine) in self.engines.iter().enumerate() {
                for (rank, truth) in engine.ranks.iter().enumerate() {
                    let (seen, held) = (&engine.seen[rank], truth.run(&prompt));
                    let found = holders.get(&(index, rank)).copied().unwrap_or(0);
                    let least = if seen.whole && !self.bounded { held } else { 0 };
                    assert!(
                        seen.mixed || (least..=held).contains(&found),
                        "engine {index} rank {rank} holds {found} blocks of {prompt:?}, not {least}..={held}; silent {}, windows {}",
                        engine.silent,
                        engine.windows
                    );
                }
            }
        }
    }
}
