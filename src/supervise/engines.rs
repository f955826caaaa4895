//! Asking engines about themselves, and what follows from their answers.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shards::ids::ServiceId;
use shards::service::{EndpointShared, Engine};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};

use crate::discovery::{self, Access, Found, Key, ServiceFacts};
use crate::rules::compile::Place;
use crate::rules::{EngineToken, unknowable};

use super::{Control, Entry};

/// How often new endpoints are looked for.
const LOOK_PERIOD: Duration = Duration::from_millis(250);
/// Endpoints asked at once. Beyond it the others of that round wait for these.
const ASKED_MAX: usize = 64;

/// An endpoint to be asked.
pub(super) struct Target {
    pub(super) key: Key,
    pub(super) engine: Engine,
    pub(super) address: SocketAddr,
    pub(super) shared: Arc<EndpointShared>,
    pub(super) token: Option<Arc<EngineToken>>,
}

/// Asks every endpoint of a KV rule, over and over, and hands on what is new.
pub(super) async fn discover_all(control: Control) {
    let mut asked_at: HashMap<(Key, SocketAddr), Instant> = HashMap::new();
    let mut spoiled = HashSet::new();
    let mut tokens_at = Instant::now();
    let mut tick = tokio::time::interval(LOOK_PERIOD);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let view = control.view();
        if tokens_at.elapsed() >= discovery::PERIOD {
            tokens_at = Instant::now();
            refresh_tokens(&view.entries, &mut spoiled);
        }
        let targets: Vec<Target> = {
            let of_kv = view.entries.iter().filter(|entry| entry.rule.kv.is_some());
            of_kv.flat_map(|entry| targets(entry)).collect()
        };
        let present: HashSet<_> = targets.iter().map(|target| (target.key, target.address)).collect();
        asked_at.retain(|place, _| present.contains(place));
        let kept: HashSet<Key> = view.entries.iter().flat_map(|entry| keys(entry)).collect();
        control.discovery.retain(|key| kept.contains(key));
        let due = |target: &Target| {
            asked_at.get(&(target.key, target.address)).is_none_or(|at| at.elapsed() >= discovery::PERIOD)
        };
        let due: Vec<Target> = targets.into_iter().filter(due).collect();
        if due.is_empty() {
            continue;
        }
        asked_at.extend(due.iter().map(|target| ((target.key, target.address), Instant::now())));
        ask_all(&control, due).await;
        for entry in &view.entries {
            let found: Vec<Found> = keys(entry).map(|key| control.discovery.found(key)).collect();
            let facts = ServiceFacts::of(found.iter().map(|found| &found.facts));
            if entry.rule.kv.is_some() && facts != *entry.facts {
                control.learned(entry.id, facts).await;
            }
        }
    }
}

fn keys(entry: &Entry) -> impl Iterator<Item = Key> {
    entry.in_rule().map(|place| (entry.id, place.shared.index))
}

/// The endpoints of a rule that are up. One that is down is asked when it comes back.
pub(super) fn targets(entry: &Entry) -> Vec<Target> {
    let target = |place: &Place| {
        let address = place.address.filter(|_| place.shared.is_up())?;
        let token = entry.rule.engine_token.clone();
        let shared = Arc::clone(&place.shared);
        Some(Target { key: (entry.id, place.shared.index), engine: entry.rule.engine, address, shared, token })
    };
    entry.in_rule().filter_map(target).collect()
}

/// Takes over changed token files; says once what is wrong with one that cannot be used any more.
fn refresh_tokens(entries: &[Arc<Entry>], spoiled: &mut HashSet<String>) {
    for token in entries.iter().filter_map(|entry| entry.rule.engine_token.as_ref()) {
        let path = token.path().display().to_string();
        match token.refresh() {
            Ok(changed) => {
                if spoiled.remove(&path) || changed {
                    info!(file = path, changed, "engine token read again");
                }
            }
            Err(error) => {
                if spoiled.insert(path) {
                    warn!(%error, "engineTokenFile cannot be used any more: the token stays as it was");
                }
            }
        }
    }
}

async fn ask_all(control: &Control, targets: Vec<Target>) {
    let ask = |target: Target| {
        let known = control.discovery.found(target.key);
        async move {
            let authorization = target.token.as_ref().map(|token| token.authorization());
            let before = known.access.clone();
            let found = discovery::ask(target.engine, target.address, authorization.as_deref(), known).await;
            (target, before, found)
        }
    };
    let mut waiting = targets.into_iter();
    let mut asking = JoinSet::new();
    for target in waiting.by_ref().take(ASKED_MAX) {
        asking.spawn(ask(target));
    }
    while let Some(done) = asking.join_next().await {
        if let Some(target) = waiting.next() {
            asking.spawn(ask(target));
        }
        let Ok((target, before, found)) = done else { continue };
        if before != found.access {
            tell(&target, &found.access);
        }
        target.shared.set_takes_ids(found.facts.takes_ids(target.engine));
        let conveys = found.facts.conveys_rank(target.engine);
        if target.shared.set_conveys_rank(conveys) {
            let (service_id, ep_idx, endpoint) = (target.key.0.0, target.key.1.0, target.address);
            info!(service_id, ep_idx, %endpoint, conveys, "whether a header chooses the rank at the engine");
        }
        control.discovery.put(target.key, found);
    }
}

/// Says what changed about the gateway's access to an engine.
fn tell(target: &Target, access: &Access) {
    let (service_id, ep_idx, endpoint) = (target.key.0.0, target.key.1.0, target.address);
    match access {
        Access::Untried | Access::Open => {}
        Access::Denied(_) => {
            let reason = why(access, target.token.as_deref());
            warn!(service_id, ep_idx, %endpoint, reason, "the gateway's own calls are refused");
        }
        Access::Failed(reason) => info!(service_id, ep_idx, %endpoint, reason, "the engine does not describe itself"),
    }
}

/// Why there is no access; empty where there is.
pub(super) fn why(access: &Access, token: Option<&EngineToken>) -> String {
    match access {
        Access::Untried | Access::Open => String::new(),
        Access::Failed(reason) => reason.clone(),
        Access::Denied(status) => match token {
            None => format!("the engine answers {status}: it wants a token, write its file as engineTokenFile"),
            Some(token) => format!("the engine answers {status}: it refuses the token in {}", token.path().display()),
        },
    }
}

pub(super) fn state(access: &Access) -> &'static str {
    match access {
        Access::Untried => "untried",
        Access::Open => "open",
        Access::Denied(_) => "denied",
        Access::Failed(_) => "failed",
    }
}

impl Control {
    /// What is known of every engine, for the API.
    #[must_use]
    pub fn engines(&self) -> Vec<Value> {
        let view = self.view();
        let of_entry = |entry: &Arc<Entry>| {
            let endpoints = entry.in_rule().zip(&entry.rule.endpoints);
            endpoints
                .map(|(place, endpoint)| {
                    let found = self.discovery.found((entry.id, place.shared.index));
                    let mut value = show(entry, &found);
                    value["ep_idx"] = json!(place.shared.index.0);
                    value["endpoint"] = json!(endpoint.to_string());
                    value
                })
                .collect::<Vec<_>>()
        };
        view.entries.iter().flat_map(of_entry).collect()
    }

    pub(super) async fn learned(&self, id: ServiceId, facts: ServiceFacts) {
        // The supervisor is gone only when the process is about to be.
        let _ = self.requests.send(super::Request::Learned(id, facts)).await;
    }
}

fn show(entry: &Entry, found: &Found) -> Value {
    let token = entry.rule.engine_token.as_deref();
    let adapters = found.facts.adapters.iter();
    let adapters: Vec<Value> = adapters
        .map(|(name, adapter)| json!({"name": name, "base": adapter.base, "path": adapter.lora.path}))
        .collect();
    let problem = entry.rule.kv.as_ref().zip(found.facts.release()).and_then(|(kv, release)| unknowable(kv, release));
    json!({
        "service_id": entry.id.0,
        "engine": entry.rule.engine.name(),
        "version": found.facts.version,
        "models": found.facts.models,
        "adapters": adapters,
        "access": state(&found.access),
        "access_reason": why(&found.access, token),
        "health": state(&found.health),
        "health_reason": why(&found.health, token),
        "keys_problem": problem,
    })
}
