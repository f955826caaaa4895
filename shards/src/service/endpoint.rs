//! One backend, and what of its state outlives a compilation of the rules.

#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{EndpointStats, Role, Vitals};
use crate::bos::BosEvidence;
use crate::disagg::ladder::Places;
use crate::feedback::Trust;
use crate::ids::{EndpointIndex, ShardId};
use crate::load::LoadSlot;
use crate::predictions::Predictions;
use crate::rates::Slowness;
use crate::usage::Statements;

/// One backend of one service.
///
/// What every decision reads of every endpoint stands here, and all else behind a reference, so that hundreds of them stay
/// in the processor's nearest cache.
#[derive(Debug)]
pub struct Endpoint {
    /// State carried over updates.
    pub shared: Arc<EndpointShared>,
    /// The vitals of `shared`, at hand.
    pub vitals: Vitals,
    /// Weight; 0 drains: nothing new is sent.
    pub weight: u32,
    /// Used only when no other endpoint is up.
    pub backup: bool,
    /// No longer in the rule.
    pub retired: bool,
    /// What it does for the rule.
    pub role: Role,
    /// Where it is.
    pub target: Box<Target>,
}

/// Where an endpoint is: members of the [`Endpoint`] to all appearance.
#[derive(Clone, Debug)]
pub struct Target {
    /// Where requests go.
    pub address: SocketAddr,
    /// Name it was resolved from, where the rule names it so.
    pub dns_name: Option<String>,
    /// Where its NIXL side channel listens (`nixl_port`); 0 = not said.
    pub nixl_port: u16,
    /// What its NIXL agent is called (`nixl_engine_id`), where prefill engines push.
    pub nixl_engine_id: Option<Box<str>>,
}

impl Target {
    /// An address without anything special.
    #[must_use]
    pub fn at(address: SocketAddr) -> Self {
        Target { address, dns_name: None, nixl_port: 0, nixl_engine_id: None }
    }
}

impl Deref for Endpoint {
    type Target = Target;

    fn deref(&self) -> &Target {
        &self.target
    }
}

impl Endpoint {
    /// An endpoint without anything special, of weight 1.
    #[must_use]
    pub fn at(address: SocketAddr, shared: EndpointShared) -> Self {
        Endpoint::of(Target::at(address), Arc::new(shared))
    }

    /// The same with state that is there already.
    #[must_use]
    pub fn of(target: Target, shared: Arc<EndpointShared>) -> Self {
        Endpoint {
            vitals: shared.vitals.clone(),
            shared,
            weight: 1,
            backup: false,
            retired: false,
            role: Role::Normal,
            target: Box::new(target),
        }
    }

    /// Whether a tier may choose the endpoint: in the rule, up, not draining.
    #[must_use]
    pub fn is_candidate(&self) -> bool {
        !self.retired && self.weight > 0 && self.vitals.is_up()
    }
}

/// What an engine says of itself in its metrics: written by whoever scrapes them, which is also who takes back what is
/// too old to be believed.
#[derive(Debug, Default)]
pub struct EngineLoad {
    /// Requests that wait in the engine, plus 1; 0 = not known.
    queued: AtomicU32,
}

impl EngineLoad {
    /// Notes what the engine says of its queue; none where it says nothing, or long ago.
    pub fn set_queued(&self, requests: Option<u32>) {
        self.queued.store(requests.map_or(0, |requests| requests.saturating_add(1)), Ordering::Relaxed);
    }

    /// Requests that wait in the engine, as of the last scrape.
    #[must_use]
    pub fn queued(&self) -> Option<u32> {
        self.queued.load(Ordering::Relaxed).checked_sub(1)
    }
}

/// State of an endpoint that outlives a compilation: found again by service and address.
#[derive(Debug)]
pub struct EndpointShared {
    /// Place in its service.
    pub index: EndpointIndex,
    /// Place in the load table.
    pub slot: LoadSlot,
    /// Whether it is up, and what it holds. It is not after a refused or timed-out connect or failed probes, until a probe
    /// succeeds.
    vitals: Vitals,
    /// Its engine's release takes the ids of a chat's prompt along with it.
    takes_ids: AtomicBool,
    /// Connect failures since the last request that got an answer; sets the back-off.
    pub connect_failures: AtomicU32,
    /// When its state last changed or was first known, milliseconds since 1970; 0 = nothing is known of it yet.
    known_since: AtomicU64,
    /// Times it was taken out.
    downs: AtomicU32,
    /// Times its caches were emptied; written by the ingest thread.
    pub emptied: AtomicU32,
    /// Answers of status 500 or more since the last one below 400.
    origin_errors: AtomicU32,
    /// The breaker is open: the endpoint is out, and stays so for longer than one that was not there for a moment.
    tripped: AtomicBool,
    /// Times the breaker was closed again because the endpoint answers probes.
    pub heals: AtomicU64,
    /// Whether the engine takes a request to the rank that a header names, by its release. Written by the control core.
    conveys_rank: AtomicBool,
    /// Its places for requests in prefill, where they are bounded.
    pub places: Places,
    /// What its engine says of its load, as far as somebody asks.
    pub engine: EngineLoad,
    /// How slow it is among the service's endpoints.
    pub slowness: Slowness,
    /// What shards expect its engine to hold, for the ingest thread.
    pub predictions: Predictions,
    /// Which begin-of-text its engine puts before texts, where it is another than expected.
    pub bos: BosEvidence,
    /// What its engine says of its cache, for the ingest thread.
    pub usage: Statements,
    /// How far predictions for it are believed.
    pub trust: Trust,
    /// Counters, a row per shard.
    pub stats: Box<[EndpointStats]>,
}

impl EndpointShared {
    /// Fresh state: up until something shows otherwise. Its vitals stand by themselves.
    #[must_use]
    pub fn new(index: EndpointIndex, slot: LoadSlot, shards: usize) -> Self {
        EndpointShared::with(Vitals::alone(slot), index, shards)
    }

    /// Fresh state with these vitals.
    #[must_use]
    pub fn with(vitals: Vitals, index: EndpointIndex, shards: usize) -> Self {
        EndpointShared {
            index,
            slot: vitals.slot(),
            engine: EngineLoad::default(),
            vitals,
            takes_ids: AtomicBool::new(false),
            connect_failures: AtomicU32::new(0),
            known_since: AtomicU64::new(0),
            downs: AtomicU32::new(0),
            emptied: AtomicU32::new(0),
            origin_errors: AtomicU32::new(0),
            tripped: AtomicBool::new(false),
            heals: AtomicU64::new(0),
            conveys_rank: AtomicBool::new(false),
            places: Places::default(),
            slowness: Slowness::default(),
            predictions: Predictions::default(),
            bos: BosEvidence::default(),
            usage: Statements::default(),
            trust: Trust::default(),
            stats: (0..shards).map(|_| EndpointStats::default()).collect(),
        }
    }

    /// Whether requests may go there.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.vitals.is_up()
    }

    /// Keys the endpoint's engine announced and has not withdrawn, each once whatever the number of ranks or
    /// copies: the inventory's `total`.
    #[must_use]
    pub fn kv_blocks(&self) -> u64 {
        self.vitals.cell().kv_blocks()
    }

    /// Notes how many keys those are; for the ingest thread.
    pub fn set_kv_blocks(&self, blocks: u64) {
        self.vitals.set_kv_blocks(blocks);
    }

    /// Blocks of its engine's cache (`num_gpu_blocks`), as of the last scrape.
    #[must_use]
    pub fn cache_blocks(&self) -> Option<u32> {
        Some(self.vitals.cell().cache_blocks()).filter(|blocks| *blocks > 0)
    }

    /// Notes how many blocks the engine's cache has; for who scrapes it.
    pub fn set_cache_blocks(&self, blocks: Option<u32>) {
        self.vitals.set_cache_blocks(blocks.unwrap_or(0));
    }

    /// Whether the ids of a chat's prompt may be sent along with it; not before its engine has told its release.
    #[must_use]
    pub fn takes_ids(&self) -> bool {
        self.takes_ids.load(Ordering::Relaxed)
    }

    /// Notes what follows from the release that its engine has told.
    pub fn set_takes_ids(&self, takes: bool) {
        self.takes_ids.store(takes, Ordering::Relaxed);
    }

    /// Whether the breaker is open.
    #[must_use]
    pub fn is_tripped(&self) -> bool {
        self.tripped.load(Ordering::Relaxed)
    }

    /// Opens the breaker, which takes the endpoint out; true if it was closed.
    pub fn trip(&self) -> bool {
        let news = !self.tripped.swap(true, Ordering::Relaxed);
        self.mark_down();
        news
    }

    /// Closes the breaker half: one more answer of status 500 or more opens it again, one below 400 closes it.
    pub fn half_close(&self, breaker_errors: u32) {
        if self.tripped.swap(false, Ordering::Relaxed) {
            self.origin_errors.store(breaker_errors.saturating_sub(1), Ordering::Relaxed);
            self.heals.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Takes the status of an answer into account; true if it is one too many. A refusal (4xx) says nothing of the
    /// endpoint.
    pub fn answered(&self, status: u16, breaker_errors: u32) -> bool {
        match status {
            500.. if breaker_errors > 0 => self.origin_errors.fetch_add(1, Ordering::Relaxed) + 1 >= breaker_errors,
            400.. => false,
            _ => {
                // Read first: all is well most of the time, and a line that is not written stays where it is.
                if self.origin_errors.load(Ordering::Relaxed) != 0 {
                    self.origin_errors.store(0, Ordering::Relaxed);
                }
                false
            }
        }
    }

    /// Whether a header chooses the rank that serves a request.
    #[must_use]
    pub fn conveys_rank(&self) -> bool {
        self.conveys_rank.load(Ordering::Relaxed)
    }

    /// Says whether a header chooses the rank; true if that is news.
    pub fn set_conveys_rank(&self, conveys: bool) -> bool {
        self.conveys_rank.swap(conveys, Ordering::Relaxed) != conveys
    }

    /// Takes the endpoint out; true if it was in.
    pub fn mark_down(&self) -> bool {
        let was_up = self.vitals.set_up(false);
        if was_up {
            self.downs.fetch_add(1, Ordering::Relaxed);
            self.note_now();
        }
        was_up
    }

    /// Changes whenever what was claimed of its caches is void.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.downs.load(Ordering::Relaxed).wrapping_add(self.emptied.load(Ordering::Relaxed))
    }

    /// Takes the endpoint back in; true if it was out.
    pub fn mark_up(&self) -> bool {
        let was_out = !self.vitals.set_up(true);
        if was_out {
            self.note_now();
        }
        was_out
    }

    /// Notes that it answers: of a new endpoint that is not known, though requests may go there.
    pub fn note_alive(&self) {
        if self.known_since.load(Ordering::Relaxed) == 0 {
            self.note_now();
        }
    }

    /// When its state last changed or was first known; none while nothing is known of it.
    #[must_use]
    pub fn known_since(&self) -> Option<SystemTime> {
        let since = self.known_since.load(Ordering::Relaxed);
        (since > 0).then(|| UNIX_EPOCH + Duration::from_millis(since))
    }

    fn note_now(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.known_since.store(u64::try_from(now.as_millis()).unwrap_or(u64::MAX).max(1), Ordering::Relaxed);
    }

    /// The row that the shard alone writes.
    #[must_use]
    pub fn stats_of(&self, shard: ShardId) -> &EndpointStats {
        &self.stats[shard.index()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_in_a_row_open_the_breaker_and_after_it_closed_half_one_more_does() {
        let endpoint = EndpointShared::new(EndpointIndex(0), LoadSlot(0), 1);
        for (status, opens) in
            [(500, false), (503, false), (200, false), (500, false), (404, false), (500, false), (502, true)]
        {
            assert_eq!(endpoint.answered(status, 3), opens, "{status}");
        }
        assert!(endpoint.trip() && !endpoint.trip() && !endpoint.is_up() && endpoint.is_tripped());
        endpoint.half_close(3);
        assert!(endpoint.mark_up() && !endpoint.is_tripped());
        assert!(endpoint.answered(500, 3), "half closed");
        assert!(!endpoint.answered(200, 3) && !endpoint.answered(500, 3), "closed");
        assert!(!(0..10).any(|_| endpoint.answered(500, 0)), "there is none");
        endpoint.half_close(3);
        assert_eq!(endpoint.heals.load(Ordering::Relaxed), 1);
    }
}
