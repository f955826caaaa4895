//! Reading engines' own metrics, where a rule asks for it (`scrapeMetrics`): how many requests wait in them, and how large
//! their caches are.
//!
//! **Invariant.** What is older than [`STALE_AFTER`] is taken back, so that nobody decides by it. TensorRT-LLM's metrics
//! are never read: reading empties them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shards::service::EndpointShared;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use crate::discovery::{self, Key, Reply};

use super::engines::{Target, targets};
use super::{Control, Entry};

/// How often metrics are read.
const PERIOD: Duration = Duration::from_secs(2);
/// Longest wait for them.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Age from which on they are not believed any more.
const STALE_AFTER: Duration = Duration::from_secs(30);
/// Engines read at once. Beyond it the others of that round wait for these.
const READ_MAX: usize = 64;

/// Reads the metrics of every engine whose rule asks for it, over and over.
pub(super) async fn scrape_all(control: Control) {
    // When each was read last; those that a rule no longer asks for are taken back like those that fell silent.
    let mut read_at: HashMap<Key, (Instant, Arc<EndpointShared>)> = HashMap::new();
    let mut tick = tokio::time::interval(PERIOD);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let view = control.view();
        let mut waiting = view.entries.iter().filter(|entry| is_wanted(entry)).flat_map(|entry| targets(entry));
        let mut reading = JoinSet::new();
        for target in waiting.by_ref().take(READ_MAX) {
            reading.spawn(read(target));
        }
        while let Some(done) = reading.join_next().await {
            if let Some(target) = waiting.next() {
                reading.spawn(read(target));
            }
            if let Ok(Some(target)) = done {
                read_at.insert(target.key, (Instant::now(), target.shared));
            }
        }
        read_at.retain(|_, (at, shared)| {
            let fresh = at.elapsed() < STALE_AFTER;
            if !fresh {
                shared.engine.set_queued(None);
            }
            fresh
        });
    }
}

fn is_wanted(entry: &Entry) -> bool {
    entry.rule.proxy.scrape && discovery::has_metrics(entry.rule.engine)
}

/// The target, if it could be read.
async fn read(target: Target) -> Option<Target> {
    let authorization = target.token.as_ref().map(|token| token.authorization());
    let reply = discovery::get(target.address, "/metrics", authorization.as_deref(), TIMEOUT).await.ok()?;
    let Reply { status: 200, body } = reply else { return None };
    let metrics = discovery::read_metrics(target.engine, &String::from_utf8_lossy(&body));
    target.shared.engine.set_queued(metrics.queued);
    // A cache does not change its size: what was known once stays.
    if metrics.blocks.is_some() {
        target.shared.set_cache_blocks(metrics.blocks);
    }
    metrics.queued.is_some().then_some(target)
}
