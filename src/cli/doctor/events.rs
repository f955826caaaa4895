//! Do events come, and do their keys say what the rule says? Listened to with the gateway's own ingest, for a while.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use shards::block::Contract;
use shards::inventory::SpaceIndex;
use shards::predictions::{Prediction, PromptKind};
use shards::prompt::{Api, Keying};
use shards::service::{Engine, Role};

use super::Case;
use super::at_once::at_once;
use super::engine::Checked;
use super::report::Report;
use crate::cli::inquiry::keys_of;
use crate::discovery::{Call, ServiceFacts};
use crate::ingest::{Finding, Leg, Reject, Replay, StreamStatus, Verdict};
use crate::rules::{EventPlace, KvRule};
use crate::supervise::{Entry, Rehearsal, events_option};

/// Pause between two looks at what was heard.
const LOOK: Duration = Duration::from_millis(20);
/// Time in which what a verdict changed is in the inventory: it is published at the end of the same cycle.
const PUBLISHED: Duration = Duration::from_millis(100);
/// Probes of a rule under way at once.
const PROBES_MAX: usize = 16;
/// Longest wait for the answer to a probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time after a probe within which its blocks are announced and judged.
const PROBE_JUDGED: Duration = Duration::from_secs(5);
/// Words of a probe per token of a block, and at most: it must fill two blocks.
const PROBE_WORDS_MAX: u32 = 2048;

/// How long to listen, and whether to make engines speak.
#[derive(Clone, Copy, Debug)]
pub(super) struct Listening {
    pub(super) time: Duration,
    pub(super) probe: bool,
    /// A running gateway is asked too.
    pub(super) asks: bool,
}

/// A rule that is listened to.
struct Heard {
    case: Case,
    entry: Arc<Entry>,
    /// By endpoint of the rule: what became of its probe.
    probes: Vec<Option<Result<(), String>>>,
}

/// Listens to all engines that answered, and reports.
pub(super) async fn check(cases: Vec<Case>, listening: Listening, report: &mut Report) {
    let mut rehearsal = match Rehearsal::start() {
        Ok(rehearsal) => rehearsal,
        Err(error) => {
            return report.unknown("events", "listen", error.to_string(), "events cannot be listened to from here");
        }
    };
    let mut heard = Vec::new();
    for case in cases.into_iter().filter(|case| case.rule.kv.is_some()) {
        let facts = ServiceFacts::of(case.checked.iter().map(|checked| &checked.facts));
        match rehearsal.add(case.rule.clone(), &case.addresses, facts) {
            Ok(entry) => {
                let probes = case.checked.iter().map(|_| None).collect();
                heard.push(Heard { case, entry, probes });
            }
            Err(error) => {
                report.unknown(&case.rule.key.to_string(), "events", error.to_string(), "it is not listened to")
            }
        }
    }
    let ready = |stream: &StreamStatus| {
        let replays = heard.iter().any(|one| one.has_replay(stream));
        stream.connected && (stream.replay != Replay::Untried || !replays)
    };
    wait(&rehearsal, &heard, listening.time, &ready).await;
    if listening.probe {
        for one in &mut heard {
            one.probe().await;
        }
        wait(&rehearsal, &heard, listening.time, &|stream| is_judged(stream)).await;
        tokio::time::sleep(PUBLISHED).await;
        heard.iter().for_each(Heard::predict);
        let by_use = |stream: &StreamStatus| stream.by_use.fulfilled + stream.by_use.missed > 0;
        wait(&rehearsal, &heard, PROBE_JUDGED, &by_use).await;
    } else {
        wait(&rehearsal, &heard, listening.time, &|stream| is_judged(stream)).await;
    }
    let streams = rehearsal.streams();
    for one in &heard {
        one.report(&streams, listening, report);
    }
}

/// Waits until every stream of an engine that answered is as wanted, or the time is over.
async fn wait(rehearsal: &Rehearsal, heard: &[Heard], time: Duration, wanted: &dyn Fn(&StreamStatus) -> bool) {
    let until = Instant::now() + time;
    let counts =
        |stream: &StreamStatus| heard.iter().any(|one| one.checked_of(stream).is_some_and(|checked| checked.reachable));
    while Instant::now() < until {
        // Streams are registered by the thread that opens them.
        let streams = rehearsal.streams();
        if streams.len() >= heard.iter().map(Heard::streams).sum()
            && streams.iter().filter(|stream| counts(stream)).all(wanted)
        {
            return;
        }
        tokio::time::sleep(LOOK).await;
    }
}

fn is_judged(stream: &StreamStatus) -> bool {
    stream.connected && stream.finding.as_ref().is_some_and(|finding| finding.verdict != Verdict::Believed)
}

impl Heard {
    /// Streams that the rule's endpoints have here.
    fn streams(&self) -> usize {
        let connect = |events: &crate::rules::EventSource| matches!(events.live, EventPlace::Connect(_));
        let endpoints = self.case.rule.endpoints.iter().zip(&self.case.addresses);
        let with =
            endpoints.filter(|(endpoint, address)| address.is_some() && endpoint.events.as_ref().is_some_and(connect));
        with.count() * self.case.rule.kv.as_ref().map_or(0, |kv| usize::from(kv.ranks))
    }

    fn checked_of(&self, stream: &StreamStatus) -> Option<&Checked> {
        if stream.name.service != self.entry.id {
            return None;
        }
        // The rule was just made: its endpoints have their indices in its order.
        self.case.checked.get(usize::from(stream.name.endpoint.0))
    }

    /// Whether the stream's endpoint has a replay address.
    fn has_replay(&self, stream: &StreamStatus) -> bool {
        let endpoint = self.case.rule.endpoints.get(usize::from(stream.name.endpoint.0));
        let events = endpoint.filter(|_| stream.name.service == self.entry.id).and_then(|endpoint| endpoint.events);
        events.is_some_and(|events| events.replay_port.is_some())
    }

    /// Sends one short generation to each engine that answered, many at once.
    async fn probe(&mut self) {
        let probe = |place| self.probe_one(place);
        self.probes = at_once((0..self.case.checked.len()).map(probe).collect(), PROBES_MAX).await;
    }

    /// What became of a generation; none where there is nobody to be sent one.
    async fn probe_one(&self, place: usize) -> Option<Result<(), String>> {
        let (kv, checked) = (self.case.rule.kv.as_ref()?, &self.case.checked[place]);
        let (address, (name, _)) = (self.case.addresses[place]?, checked.model.as_ref()?);
        if !checked.reachable {
            return None;
        }
        let (path, body) = probe_of(name, checked, kv, place);
        let authorization = self.case.rule.engine_token.as_ref().map(|token| token.authorization());
        let call = Call {
            address,
            path,
            authorization: authorization.as_deref(),
            body: Some(body.as_bytes()),
            answer_bytes_max: 1 << 20,
            timeout: PROBE_TIMEOUT,
        };
        Some(match call.ask().await {
            Ok(reply) if reply.status == 200 => Ok(()),
            Ok(reply) => Err(format!("POST {path}: status {}", reply.status)),
            Err(error) => Err(format!("POST {path}: {error}")),
        })
    }

    /// Says what blocks the probes must have led to, under the keys that the engines turned out to have.
    fn predict(&self) {
        let Some(kv) = &self.case.rule.kv else { return };
        for (place, checked) in self.case.checked.iter().enumerate() {
            let (Some(Ok(())), Some((name, model))) = (&self.probes[place], &checked.model) else { continue };
            let Some((contract, block_tokens)) = self.keying(place, kv) else { continue };
            let (path, body) = probe_of(name, checked, kv, place);
            let api = if path == CHAT { Api::ChatCompletions } else { Api::Completions };
            let keying = Keying { contract: &contract, block_tokens, lora: None };
            let Ok(keys) = keys_of(api, body.as_bytes(), model, kv.rendering(self.case.rule.engine), keying) else {
                continue;
            };
            let kind = if api == Api::ChatCompletions { PromptKind::Chat } else { PromptKind::Completion };
            if let Some(prediction) = Prediction::new(&keys, 0, kind) {
                self.entry.places[place].shared.predictions.offer(prediction);
            }
        }
    }

    /// How the endpoint's blocks are keyed in the inventory; none where it holds none, or its ranks differ.
    fn keying(&self, place: usize, kv: &KvRule) -> Option<(Contract, u32)> {
        let of_decode = self.case.rule.endpoints.get(place)?.role == Role::Decode;
        let table = if of_decode { &self.entry.decode_inventory } else { &self.entry.inventory };
        let reader = table.as_ref()?.reader();
        let guard = reader.enter()?;
        let space = guard.space_of(self.entry.places.get(place)?.shared.index)?;
        match guard.other_spaces().find(|(other, _)| *other == space) {
            Some((_, other)) => Some((other.contract, other.block_tokens.get())),
            None if space == SpaceIndex::OWN => Some((self.entry.service.kv.as_ref()?.contract, kv.block_tokens)),
            None => None,
        }
    }

    fn is_of(&self, stream: &StreamStatus, place: usize) -> bool {
        stream.name.service == self.entry.id && usize::from(stream.name.endpoint.0) == place
    }

    fn report(&self, streams: &[StreamStatus], listening: Listening, report: &mut Report) {
        for (place, checked) in self.case.checked.iter().enumerate().filter(|(_, checked)| checked.reachable) {
            let subject = &checked.subject;
            match &self.probes[place] {
                Some(Err(why)) => report.wrong(subject, "probe", why.clone(), "see the engine's log"),
                Some(Ok(())) => report.right(subject, "probe", "one short prompt was answered"),
                None => {}
            }
            let own: Vec<&StreamStatus> = streams.iter().filter(|stream| self.is_of(stream, place)).collect();
            if own.is_empty() {
                self.report_elsewhere(place, subject, listening, report);
            }
            // A probe goes to one rank: it is enough that one of them announces it.
            let must_speak = matches!(self.probes[place], Some(Ok(()))) && own.iter().all(|stream| stream.events == 0);
            for stream in &own {
                self.report_rank(stream, checked, must_speak, report);
            }
            if matches!(self.probes[place], Some(Ok(()))) {
                report_by_use(&own, subject, report);
            }
        }
    }

    /// Events that only the running gateway has.
    fn report_elsewhere(&self, place: usize, subject: &str, listening: Listening, report: &mut Report) {
        let ask = if listening.asks { "see the gateway's lines below" } else { "ask the running gateway: --url" };
        let engine = self.case.rule.engine;
        let says = match &self.case.rule.endpoints[place].events {
            Some(events) if matches!(events.live, EventPlace::Bind(_)) => {
                "the engine connects to the gateway, which has its events"
            }
            None if engine == Engine::Trtllm => {
                "its events go to the one gateway that drains them: they are not touched here"
            }
            _ => "nothing is listened to",
        };
        report.unknown(subject, "events", says, ask);
    }

    fn report_rank(&self, stream: &StreamStatus, checked: &Checked, must_speak: bool, report: &mut Report) {
        let ranks = self.case.rule.kv.as_ref().map_or(1, |kv| kv.ranks);
        let subject = match ranks {
            1 => checked.subject.clone(),
            _ => format!("{} rank {}", checked.subject, stream.name.rank.0),
        };
        let address = &stream.name.address;
        if !stream.connected {
            let fix = format!("start the engine with {}, or correct kvZmqPort", events_option(self.case.rule.engine));
            return report.wrong(&subject, "events", format!("nobody publishes at {address}"), fix);
        }
        match stream.events {
            0 => {
                let says = format!("{address}: connected, and nothing published in this time");
                match must_speak {
                    true => {
                        let option = events_option(self.case.rule.engine);
                        let fix = format!("see that it caches prefixes and publishes events: {option}");
                        report.wrong(&subject, "events", says, fix);
                    }
                    false => report.unknown(&subject, "events", says, "send it a prompt, or give --probe"),
                }
            }
            events => report.right(&subject, "events", format!("{address}: {events} events, {} blocks", stream.held)),
        }
        report_rejects(stream, &subject, report);
        match stream.replay {
            Replay::Works => report.right(&subject, "replay", "the replay socket answers"),
            Replay::Missing => report.unknown(
                &subject,
                "replay",
                "no replay endpoint: cold start",
                "after a restart the gateway does not know what the engine holds; vLLM: \"replay_endpoint\" in --kv-events-config",
            ),
            Replay::Untried if self.has_replay(stream) => {
                let says = "its replay address was not asked in this time";
                report.unknown(&subject, "replay", says, "give it longer: --wait SECONDS");
            }
            Replay::Untried => {
                let fix = "kvReplayPort or kvReplayPortOffset names it";
                report.unknown(&subject, "replay", "the rule names no replay address", fix);
            }
        }
        let finding = stream.finding.clone().unwrap_or_default();
        self.report_finding(&finding, stream, checked, &subject, report);
    }

    /// One line per leg: those at fault, and those that the blocks prove.
    fn report_finding(
        &self,
        finding: &Finding,
        stream: &StreamStatus,
        checked: &Checked,
        subject: &str,
        report: &mut Report,
    ) {
        let Some(kv) = &self.case.rule.kv else { return };
        if self.case.rule.engine == Engine::Trtllm {
            // Its keys are made of tokens, whatever the engine's are: there is nothing to verify.
            return;
        }
        if finding.verdict == Verdict::Believed {
            let says = "no first block of a prompt was seen: the rule is believed";
            return report.unknown(subject, "keys", says, "send the engine a prompt, or give --probe");
        }
        // What the engine said of itself stands in a line already, and whether it is wrong.
        let (said, said_wrong) = (|leg: Leg| checked.says(leg), |leg: Leg| checked.says_wrong(leg, kv));
        for leg in finding.faults.iter().filter(|leg| !said_wrong(**leg)) {
            report.wrong(subject, leg.name(), finding.detail.clone(), fix_of(*leg, stream));
        }
        if finding.faults.is_empty() {
            for leg in [Leg::BlockSize, Leg::Algorithm, Leg::Seed].into_iter().filter(|leg| !said(*leg)) {
                match (leg, self.case.rule.engine) {
                    (Leg::Seed, Engine::Vllm) => {
                        report.right(subject, leg.name(), "the engine's blocks have the rule's seed")
                    }
                    (Leg::Seed, _) => {}
                    (Leg::BlockSize, _) => report.right(subject, leg.name(), format!("{} tokens", kv.block_tokens)),
                    _ => report.right(subject, leg.name(), finding.detail.clone()),
                }
            }
        }
        let keys = format!("{}: {}", finding.verdict.name(), finding.detail);
        match finding.verdict {
            Verdict::Exact => report.right(subject, "keys", keys),
            Verdict::Derived => {
                let note = "prompts go where their blocks are all the same, by keys of the gateway's own";
                report.unknown(subject, "keys", finding.verdict.name(), note);
            }
            Verdict::Refused => report.wrong(subject, "keys", keys, "until then the endpoint is chosen by sel"),
            Verdict::Believed => {}
        }
    }
}

fn report_rejects(stream: &StreamStatus, subject: &str, report: &mut Report) {
    let counted = |known: bool| {
        let rejects = stream.rejects.iter().filter(move |(why, count)| (*why == Reject::Tag) == known && *count > 0);
        rejects.map(|(why, count)| format!("{} {count}", why.name())).collect::<Vec<_>>().join(", ")
    };
    let (new, broken) = (counted(true), counted(false));
    if !broken.is_empty() {
        let fix = "kvlane events --connect shows them; kvEngineType must be the engine's kind";
        report.wrong(subject, "wire", format!("messages that are not understood: {broken}"), fix);
    }
    if !new.is_empty() {
        report.unknown(
            subject,
            "wire",
            format!("events of kinds that are not known: {new}"),
            "a newer engine may have such",
        );
    }
}

fn report_by_use(own: &[&StreamStatus], subject: &str, report: &mut Report) {
    let Some(by_use) = own.first().map(|stream| stream.by_use) else { return };
    // Of an engine that says nothing, no block can be expected: that is its events' line.
    let has_spoken = own.iter().any(|stream| stream.events > 0);
    match (by_use.last_missed.filter(|_| has_spoken), by_use.fulfilled) {
        (Some(leg), _) => {
            let says = format!("{}: the probe's blocks are not those that were predicted", leg.name());
            report.wrong(subject, "by_use", says, leg.detail());
        }
        (None, 0) => report.unknown(
            subject,
            "by_use",
            "the probe's blocks cannot be compared",
            "a running gateway compares all prompts",
        ),
        (None, _) => report.right(subject, "by_use", "the probe's blocks are those that were predicted"),
    }
}

/// What to do about a leg at fault.
fn fix_of(leg: Leg, stream: &StreamStatus) -> String {
    match leg {
        Leg::Seed => "set kvNoneHashSeed to the text of the engine's PYTHONHASHSEED; where it has none, start it with \
                      PYTHONHASHSEED=0 and write \"0\""
            .to_owned(),
        Leg::Algorithm => {
            "make kvHashAlgo and the engine's --prefix-caching-hash-algo the same, or leave kvHashAlgo out".to_owned()
        }
        Leg::BlockSize => match stream.engine_block_tokens {
            Some(tokens) => format!("set kvBlockSize to {tokens}"),
            None => "set kvBlockSize to the engine's".to_owned(),
        },
        Leg::Tagging => "let all engines of the rule be of one release".to_owned(),
        Leg::KeyWidth => "run an engine whose events carry its own keys".to_owned(),
    }
}

/// Path of a chat.
const CHAT: &str = "/v1/chat/completions";

/// The probe of an endpoint: a chat where the model has a template, else a text. Unlike any other prompt from its first
/// words on, and long enough for two blocks.
fn probe_of(name: &str, checked: &Checked, kv: &KvRule, place: usize) -> (&'static str, String) {
    let blocks = NonZeroU32::new(checked.block_tokens.unwrap_or(kv.block_tokens)).map_or(16, NonZeroU32::get);
    let words = (2 * blocks.max(kv.block_tokens)).min(PROBE_WORDS_MAX);
    let mut text = format!("kvlane doctor {} {place}:", std::process::id());
    (0..words).for_each(|word| text += &format!(" {word}"));
    let has_template = checked
        .model
        .as_ref()
        .is_some_and(|(_, model)| kv.chat_template.is_some() || model.template_problem().is_none());
    match has_template {
        true => {
            let messages = json!([{"role": "user", "content": text}]);
            (CHAT, json!({"model": name, "messages": messages, "max_tokens": 1}).to_string())
        }
        false => ("/v1/completions", json!({"model": name, "prompt": text, "max_tokens": 1}).to_string()),
    }
}
