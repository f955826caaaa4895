//! What goes on beside changes: probing endpoints and resolving their names.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use shards::ids::{EndpointIndex, ServiceId};
use shards::service::EndpointShared;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};

use crate::discovery::Access;
use crate::health::{self, Answer, Monitor, Seen, Verdict};
use crate::rules::{EngineToken, Host};

use super::{Control, engines, findings, resolve, scrape};

/// Probes under way at once. Beyond it the others of that second wait for these.
pub(crate) const PROBES_MAX: usize = 256;

/// Starts the tasks; dropping what is returned ends them.
pub(super) fn start(control: &Control) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    tasks.spawn(probe_all(control.clone()));
    tasks.spawn(resolve_all(control.clone()));
    tasks.spawn(engines::discover_all(control.clone()));
    tasks.spawn(findings::watch_all(control.clone()));
    tasks.spawn(scrape::scrape_all(control.clone()));
    tasks
}

struct Target {
    key: (ServiceId, EndpointIndex),
    address: SocketAddr,
    shared: Arc<EndpointShared>,
    /// Errors that open its breaker.
    breaker_errors: u32,
    token: Option<Arc<EngineToken>>,
}

async fn probe_all(control: Control) {
    let mut monitors: HashMap<(ServiceId, EndpointIndex), Monitor> = HashMap::new();
    let mut starved = false;
    let mut tick = tokio::time::interval(health::PERIOD);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let targets = targets(&control);
        let present: std::collections::HashSet<_> = targets.iter().map(|target| target.key).collect();
        monitors.retain(|key, _| present.contains(key));
        let mut waiting = targets.into_iter();
        let mut probes = JoinSet::new();
        let mut unasked = None;
        for target in waiting.by_ref().take(PROBES_MAX) {
            probes.spawn(ask(target));
        }
        while let Some(done) = probes.join_next().await {
            if let Some(target) = waiting.next() {
                probes.spawn(ask(target));
            }
            let Ok((target, answer)) = done else { continue };
            note_access(&control, &target, &answer);
            match answer {
                Answer::Unasked(reason) => unasked = Some(reason),
                // Someone said so, whatever it answers.
                _ if control.holds.has(target.address) => {
                    target.shared.mark_down();
                }
                answer => judge(monitors.entry(target.key).or_default(), &target, answer.is_alive()),
            }
        }
        // Said when it begins and when it ends, not every second.
        match &unasked {
            Some(reason) if !starved => {
                warn!(reason, "endpoints cannot be probed, for want of resources here: their states stay as they are");
            }
            None if starved => info!("all endpoints are probed again"),
            _ => {}
        }
        starved = unasked.is_some();
    }
}

fn targets(control: &Control) -> Vec<Target> {
    let view = control.view();
    let of_entry = |entry: &Arc<super::Entry>| {
        let id = entry.id;
        let target = |place: &crate::rules::compile::Place| {
            let shared = Arc::clone(&place.shared);
            let token = entry.rule.engine_token.clone();
            let breaker_errors = entry.rule.proxy.breaker_errors;
            place.address.map(|address| Target { key: (id, shared.index), address, shared, breaker_errors, token })
        };
        entry.in_rule().filter_map(target).collect::<Vec<_>>()
    };
    view.entries.iter().flat_map(of_entry).collect()
}

async fn ask(target: Target) -> (Target, Answer) {
    let authorization = target.token.as_ref().map(|token| token.authorization());
    let answer = health::probe(target.address, authorization.as_deref(), health::TIMEOUT).await;
    (target, answer)
}

/// Keeps whether the probe was let in: an engine that wants another token is alive, and says nothing of its health.
fn note_access(control: &Control, target: &Target, answer: &Answer) {
    let access = match answer {
        Answer::Status(status @ (401 | 403)) => Access::Denied(*status),
        Answer::Status(status) if *status < 500 => Access::Open,
        Answer::Status(status) => Access::Failed(format!("GET /health: status {status}")),
        // Nobody asked: what was known stays.
        Answer::Unasked(_) => return,
        Answer::None => Access::Failed("GET /health: no answer".to_owned()),
    };
    let denied = matches!(access, Access::Denied(_));
    if control.discovery.put_health(target.key, access) && denied {
        let (service_id, ep_idx) = (target.key.0.0, target.key.1.0);
        warn!(service_id, ep_idx, endpoint = %target.address, ?answer, "GET /health is refused: see engineTokenFile");
    }
}

fn judge(monitor: &mut Monitor, target: &Target, alive: bool) {
    let shared = &target.shared;
    let connect_failures = shared.connect_failures.load(std::sync::atomic::Ordering::Relaxed);
    let (service_id, ep_idx) = (target.key.0.0, target.key.1.0);
    match monitor
        .observe(Instant::now(), Seen { up: shared.is_up(), connect_failures, alive, tripped: shared.is_tripped() })
    {
        Verdict::Keep if alive && shared.is_up() => shared.note_alive(),
        Verdict::Keep => {}
        Verdict::TakeOut => {
            if shared.mark_down() {
                warn!(service_id, ep_idx, endpoint = %target.address, "endpoint taken out: it does not answer GET /health");
            }
        }
        Verdict::BringBack => {
            shared.half_close(target.breaker_errors);
            if shared.mark_up() {
                info!(service_id, ep_idx, endpoint = %target.address, "endpoint back: it answers GET /health");
            }
        }
    }
}

async fn resolve_all(control: Control) {
    let mut tick = tokio::time::interval(resolve::PERIOD);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        for entry in control.view().entries.clone() {
            if !entry.rule.endpoints.iter().any(|endpoint| matches!(endpoint.host, Host::Name(_))) {
                continue;
            }
            let known: Vec<Option<SocketAddr>> = entry.in_rule().map(|place| place.address).collect();
            let found = resolve::resolve(&entry.rule, &known, resolve::TIMEOUT).await;
            // A name that cannot be resolved just now keeps the address it had: the name server may be away.
            let addresses: Vec<_> = found.iter().zip(&known).map(|(found, known)| found.or(*known)).collect();
            if addresses != known {
                control.moved(entry, addresses).await;
            }
        }
    }
}
