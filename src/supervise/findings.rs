//! What is wrong with endpoints beyond the keys of their ranks: names that do not meet, engines that publish nothing,
//! calls that are refused.
//!
//! **Invariant.** One task looks, once a period, and keeps the outcome for API and metrics; the log hears of every change
//! once. Nothing here changes how requests are routed, but for the begin-of-text token: what endpoints have shown of it is
//! taken over here.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use shards::service::{EndpointStats, Engine, MissReason};
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};

use crate::discovery::{Access, Found, Key};
use crate::ingest::{DrainStatus, StreamStatus};
use crate::models::names::{NameLeg, Names, Staged};
use crate::models::{ModelState, ModelStatus};
use crate::rules::compile::Place;

use super::silence::{Seen, Silent, Watch};
use super::{Control, Entry, engines};

/// How often endpoints are looked at.
const PERIOD: Duration = Duration::from_millis(500);

/// What can be wrong with an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EndpointLeg {
    /// The names of rule, engine and tokenizers do not meet.
    Model,
    /// The model's tokenizer files cannot be used.
    TokenizerFiles,
    /// It answers requests and publishes no events.
    Silent,
    /// It refuses the gateway's own calls.
    Access,
    /// The blocks it tells of when drained are not of the rule's size.
    BlockSize,
    /// Its answers keep reporting fewer cached tokens than it announced.
    Usage,
    /// It puts a begin-of-text token before texts, or not, unlike the model's files or the rule say.
    Bos,
}

impl EndpointLeg {
    /// The label value.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            EndpointLeg::Model => "model",
            EndpointLeg::TokenizerFiles => "tokenizer_files",
            EndpointLeg::Silent => "silent",
            EndpointLeg::Access => "access",
            EndpointLeg::BlockSize => "block_size",
            EndpointLeg::Usage => "usage",
            EndpointLeg::Bos => "bos",
        }
    }
}

/// One thing that is wrong with an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointFinding {
    /// What.
    pub leg: EndpointLeg,
    /// What was found, and what to do.
    pub detail: String,
}

/// What was found of every endpoint that something is wrong with; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Findings(Arc<Mutex<BTreeMap<Key, Vec<EndpointFinding>>>>);

impl Findings {
    /// What is wrong with an endpoint.
    #[must_use]
    pub fn of(&self, key: Key) -> Vec<EndpointFinding> {
        // Every change replaces a whole value.
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned().unwrap_or_default()
    }

    fn replace(&self, all: BTreeMap<Key, Vec<EndpointFinding>>) -> BTreeMap<Key, Vec<EndpointFinding>> {
        std::mem::replace(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner), all)
    }
}

/// Looks at every endpoint, over and over.
pub(super) async fn watch_all(control: Control) {
    let mut watches: HashMap<Key, Watch> = HashMap::new();
    let mut tick = tokio::time::interval(PERIOD);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let view = control.view();
        let (streams, models) = (by_endpoint(control.ingest.streams()), control.models.status());
        let drains = control.ingest.drains();
        let mut all = BTreeMap::new();
        let mut present = Vec::new();
        for entry in view.entries.iter().filter(|entry| entry.rule.kv.is_some()) {
            for place in entry.in_rule() {
                let key = (entry.id, place.shared.index);
                present.push(key);
                let found = control.discovery.found(key);
                let mut findings = Vec::new();
                findings.extend(access(entry, &found));
                findings.extend(usage(place));
                findings.extend(model(&control, entry, &found, &models));
                findings
                    .extend(drains.iter().find(|drain| is_of(drain, key)).and_then(|drain| block_size(entry, drain)));
                findings.extend(bos(entry, place));
                findings.extend(silence(&mut watches, key, entry, place, streams.get(&key).map_or(&[], Vec::as_slice)));
                if !findings.is_empty() {
                    all.insert(key, findings);
                }
            }
        }
        watches.retain(|key, _| present.contains(key));
        let before = control.findings.replace(all.clone());
        tell(&view.entries, &before, &all);
    }
}

fn by_endpoint(streams: Vec<StreamStatus>) -> HashMap<Key, Vec<StreamStatus>> {
    let mut map: HashMap<Key, Vec<StreamStatus>> = HashMap::new();
    for stream in streams {
        map.entry((stream.name.service, stream.name.endpoint)).or_default().push(stream);
    }
    map
}

fn is_of(drain: &DrainStatus, key: Key) -> bool {
    (drain.name.service, drain.name.endpoint) == key
}

/// A drained engine's blocks of another size match no prompt.
fn block_size(entry: &Entry, drain: &DrainStatus) -> Option<EndpointFinding> {
    let engine = drain.engine_block_tokens.filter(|_| drain.blocks_stored == 0)?;
    let rule = entry.rule.kv.as_ref()?.block_tokens;
    let detail = format!(
        "its blocks have {engine} tokens, and kvBlockSize is {rule}: set kvBlockSize to {engine}; until then none of \
         them matches a prompt, and it is served by sel"
    );
    Some(EndpointFinding { leg: EndpointLeg::BlockSize, detail })
}

/// Takes over what an endpoint has shown of the begin-of-text token, and says what is corrected.
fn bos(entry: &Entry, place: &Place) -> Option<EndpointFinding> {
    let settings = &entry.shared.bos;
    for (model, adds) in settings.learn(&place.shared.bos) {
        let service_id = entry.id.0;
        info!(service_id, model, adds, "kvAddBos is corrected: an endpoint stores prompts as they begin this way");
    }
    let given = entry.rule.kv.as_ref().and_then(|kv| kv.prompts.add_bos);
    let says = |(model, adds): (&str, bool)| {
        let (does, source) = match (adds, given) {
            (true, Some(_)) => ("put a begin-of-text token before texts", "kvAddBos is false"),
            (true, None) => ("put a begin-of-text token before texts", "tokenizer.json does not"),
            (false, Some(_)) => ("put no begin-of-text token before texts", "kvAddBos is true"),
            (false, None) => ("put no begin-of-text token before texts", "tokenizer.json does"),
        };
        // A rule that says what is corrected is no fault any more.
        (given != Some(adds)).then(|| {
            format!("the engines {does} of {model}, and {source}: prompts are keyed as they do; set kvAddBos to {adds}")
        })
    };
    let detail = settings.all().filter_map(says).collect::<Vec<_>>().join("; ");
    (!detail.is_empty()).then_some(EndpointFinding { leg: EndpointLeg::Bos, detail })
}

fn access(entry: &Entry, found: &Found) -> Option<EndpointFinding> {
    let denied = [&found.access, &found.health].into_iter().find(|access| matches!(access, Access::Denied(_)))?;
    let detail = engines::why(denied, entry.rule.engine_token.as_deref());
    Some(EndpointFinding { leg: EndpointLeg::Access, detail })
}

/// An endpoint that has less than it announces.
fn usage(place: &Place) -> Option<EndpointFinding> {
    let trust = &place.shared.trust;
    let sum = |read: fn(&EndpointStats) -> &AtomicU64| -> u64 {
        place.shared.stats.iter().map(|stats| read(stats).load(Ordering::Relaxed)).sum()
    };
    let (wrong, compared) = (sum(|stats| &stats.compared_wrong), sum(|stats| &stats.compared));
    let detail = format!(
        "its answers keep reporting fewer cached tokens than it announced ({wrong} of {compared} so far), so what it \
         announces counts {} %: see that all events of this engine and no other's arrive, and that it evicts nothing \
         without saying so",
        trust.percent()
    );
    trust.is_demoted().then_some(EndpointFinding { leg: EndpointLeg::Usage, detail })
}

fn model(control: &Control, entry: &Entry, found: &Found, models: &[ModelStatus]) -> Option<EndpointFinding> {
    let missed = &entry.shared.stats;
    let missed = missed.iter().map(|stats| stats.misses[MissReason::Tokenizer as usize].load(Ordering::Relaxed)).sum();
    let directory = control.models.directory();
    let names = Names { rule: &entry.rule.key.model, engine: &found.facts, missed, directory };
    let staged = |slug: &str| match models.iter().find(|model| model.slug == slug) {
        // Not looked for yet.
        None => Staged::There,
        Some(model) => match &model.state {
            ModelState::Failed { .. } if !model.staged => Staged::Absent,
            ModelState::Failed { reason } => Staged::Unusable(format!("{}: {reason}", model.path.display())),
            ModelState::Ready { .. } | ModelState::Staged => Staged::There,
        },
    };
    let there: Vec<String> = models.iter().filter(|model| model.staged).map(|model| model.slug.clone()).collect();
    let fault = names.judge(staged, &there)?;
    let leg = match fault.leg {
        NameLeg::Model => EndpointLeg::Model,
        NameLeg::TokenizerFiles => EndpointLeg::TokenizerFiles,
    };
    Some(EndpointFinding { leg, detail: format!("{}: {}", fault.found, fault.fix) })
}

fn silence(
    watches: &mut HashMap<Key, Watch>,
    key: Key,
    entry: &Entry,
    place: &Place,
    streams: &[StreamStatus],
) -> Option<EndpointFinding> {
    // A drain says itself what is wrong with it; an endpoint without any source has none to say something.
    let first = streams.first()?;
    let requests = place.shared.stats.iter().map(|stats| stats.requests.load(Ordering::Relaxed)).sum();
    let seen = Seen {
        connected: streams.iter().all(|stream| stream.connected),
        batches: streams.iter().map(|stream| stream.batches).sum(),
        missed: first.by_use.missed,
        fulfilled: first.by_use.fulfilled,
        requests,
    };
    let now = Instant::now();
    let silent = watches.entry(key).or_insert_with(|| Watch::new(now, seen)).observe(now, seen)?;
    let address = &streams.iter().find(|stream| !stream.connected).unwrap_or(first).name.address;
    let detail = match silent {
        Silent::Unconnected => format!(
            "it answers requests, and nobody publishes KV events at {address}: start it with {}, or correct kvZmqPort",
            events_option(entry.rule.engine)
        ),
        Silent::Unannounced => format!(
            "it answers prompts, and announces none of their blocks at {address}: see that it caches prefixes and \
             publishes events ({}); if it held all of these prompts before the gateway began to listen, the first new \
             one ends this",
            events_option(entry.rule.engine)
        ),
    };
    Some(EndpointFinding { leg: EndpointLeg::Silent, detail })
}

/// What an engine is started with so that it publishes.
pub(crate) fn events_option(engine: Engine) -> &'static str {
    match engine {
        Engine::Vllm => {
            "--kv-events-config '{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\"}'"
        }
        Engine::Sglang => "--kv-events-config '{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\"}'",
        Engine::Trtllm => "kv_cache_config: {event_buffer_max_size: 65536}",
        Engine::Llamacpp => "another engine: llama.cpp publishes none",
    }
}

/// Says what began, changed or ended.
fn tell(
    entries: &[Arc<Entry>],
    before: &BTreeMap<Key, Vec<EndpointFinding>>,
    now: &BTreeMap<Key, Vec<EndpointFinding>>,
) {
    let none = Vec::new();
    for entry in entries {
        for (place, endpoint) in entry.in_rule().zip(&entry.rule.endpoints) {
            let key = (entry.id, place.shared.index);
            let (old, new) = (before.get(&key).unwrap_or(&none), now.get(&key).unwrap_or(&none));
            let (service_id, ep_idx) = (key.0.0, key.1.0);
            let had = |leg: EndpointLeg| old.iter().any(|finding| finding.leg == leg);
            let has = |leg: EndpointLeg| new.iter().any(|finding| finding.leg == leg);
            // Counts inside a text may change: that is no news.
            for EndpointFinding { leg, detail } in new.iter().filter(|finding| !had(finding.leg)) {
                warn!(service_id, ep_idx, %endpoint, leg = leg.name(), "parity: {detail}");
            }
            for EndpointFinding { leg, .. } in old.iter().filter(|finding| !has(finding.leg)) {
                info!(service_id, ep_idx, %endpoint, leg = leg.name(), "parity: this is over");
            }
        }
    }
}
