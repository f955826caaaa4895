//! What an engine's parts share: options, model, the way to the scheduler, and counts.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use serde::Serialize;
use tokio::sync::mpsc::UnboundedSender;

use super::disagg::Plane;
use super::drain::Drain;
use super::driver::Command;
use super::fault::Health;
use super::legs::Legs;
use super::options::EngineOptions;
use super::orders::Orders;
use super::publisher::BoundAddresses;
use super::scheduler::RequestId;
use super::text::ModelText;

/// Counts since the start, as the tests and `GET /debug/stats` read them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EngineStats {
    /// Calls of the completion paths, refused ones included.
    pub requests: u64,
    /// Those of them that were answered to the end.
    pub completed: u64,
    /// Those of them whose client left before the end of the answer, or of its own body.
    pub disconnects: u64,
    /// Bytes of request bodies.
    pub bytes_in: u64,
    /// Bytes of answer bodies.
    pub bytes_out: u64,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Those of them found in the cache.
    pub cached_tokens: u64,
    /// Tokens of answers.
    pub answer_tokens: u64,
    /// Times a running request lost its blocks to another.
    pub preemptions: u64,
    /// Requests that have a slot now.
    pub running: u64,
    /// Requests that wait for one now.
    pub waiting: u64,
    /// Blocks in use by requests now.
    pub used_blocks: u64,
    /// Event batches made.
    pub batches: u64,
    /// Event batches that the publisher's full queue refused.
    pub lost_batches: u64,
    /// Calls of TensorRT-LLM's drain.
    pub drains: u64,
    /// Events that the fault `second_drainer` took.
    pub stolen_events: u64,
    /// Events that TensorRT-LLM's full buffer dropped.
    pub overflowed_events: u64,
    /// Reads of paths that a gateway must not read, because they are destructive.
    pub metrics_touched: u64,
    /// Legs of disaggregated requests that broke the dialect and were refused.
    pub pd_violations: u64,
    /// Prefilled prompts that wait for a decode leg.
    pub pd_held: u64,
}

impl std::ops::AddAssign for EngineStats {
    /// Adds what a rank counts.
    fn add_assign(&mut self, rank: Self) {
        self.prompt_tokens += rank.prompt_tokens;
        self.cached_tokens += rank.cached_tokens;
        self.answer_tokens += rank.answer_tokens;
        self.preemptions += rank.preemptions;
        self.running += rank.running;
        self.waiting += rank.waiting;
        self.used_blocks += rank.used_blocks;
        self.batches += rank.batches;
    }
}

/// The last prompt that arrived, for `GET /debug/last`.
#[derive(Clone, Debug, Serialize)]
pub struct LastRequest {
    /// Its path.
    pub path: String,
    /// SHA-256 of its body, in hex.
    pub sha256: String,
    /// Bytes of its body.
    pub length: usize,
    /// Its `content-length` as sent; none for a chunked body.
    pub content_length: Option<String>,
    /// Its headers in order, names in lower case.
    pub headers: Vec<(String, String)>,
}

/// Counts that the parts write.
#[derive(Debug, Default)]
pub struct Counters {
    pub requests: AtomicU64,
    pub completed: AtomicU64,
    pub disconnects: AtomicU64,
    pub bytes_in: AtomicU64,
    pub bytes_out: AtomicU64,
    pub lost_batches: Arc<AtomicU64>,
    pub metrics_touched: AtomicU64,
    pub pd_violations: AtomicU64,
}

/// What a rank's scheduler and the rest know of each other.
pub struct RankLink {
    /// To the scheduler. At most `max_requests` are open, and each sends at most two.
    pub commands: UnboundedSender<Command>,
    /// Requests given to the scheduler and not yet done.
    pub open: AtomicUsize,
    /// Its counts, as of the last step.
    pub scheduled: Mutex<EngineStats>,
    /// Where its events are published; none for kinds without a publisher.
    pub bound: Option<BoundAddresses>,
}

/// The parts' common ground.
pub struct Shared {
    /// Replaced as a whole by faults.
    options: RwLock<Arc<EngineOptions>>,
    /// Replaced as a whole by the fault `template`.
    text: RwLock<Arc<ModelText>>,
    pub ranks: Vec<RankLink>,
    pub counters: Counters,
    pub last: Mutex<Option<LastRequest>>,
    /// TensorRT-LLM's queue of events.
    pub drain: Option<Drain>,
    pub second_drainer: AtomicBool,
    pub health: Mutex<Health>,
    /// What a prefill engine has for decode engines.
    pub plane: Plane,
    /// Its requests for answers, as it sees them.
    pub legs: Legs,
    /// What goes wrong with them.
    pub orders: Orders,
    next_id: AtomicU64,
    next_rank: AtomicUsize,
}

impl Shared {
    /// At the start: nothing counted. There is at least one rank.
    pub fn new(
        options: EngineOptions,
        text: Arc<ModelText>,
        ranks: Vec<RankLink>,
        drain: Option<Drain>,
        plane: Plane,
    ) -> Self {
        assert!(!ranks.is_empty(), "an engine has a rank");
        Self {
            options: RwLock::new(Arc::new(options)),
            text: RwLock::new(text),
            ranks,
            counters: Counters::default(),
            last: Mutex::default(),
            drain,
            second_drainer: AtomicBool::new(false),
            health: Mutex::default(),
            plane,
            legs: Legs::default(),
            orders: Orders::default(),
            next_id: AtomicU64::new(0),
            next_rank: AtomicUsize::new(0),
        }
    }

    /// The options as they are now.
    pub fn options(&self) -> Arc<EngineOptions> {
        Arc::clone(&self.options.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the options; a scheduler takes them up when it starts over.
    pub fn set_options(&self, options: EngineOptions) {
        *self.options.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(options);
    }

    /// The model's text side as it is now.
    pub fn text(&self) -> Arc<ModelText> {
        Arc::clone(&self.text.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the model's text side.
    pub fn set_text(&self, text: ModelText) {
        *self.text.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(text);
    }

    /// A name that no other request of this engine has.
    pub fn new_id(&self) -> RequestId {
        RequestId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Requests that are not done.
    pub fn open(&self) -> usize {
        self.ranks.iter().map(|rank| rank.open.load(Ordering::Relaxed)).sum()
    }

    /// The rank that the engine's own balancing chooses: one with the fewest open requests, in turn among equals.
    pub fn balance(&self) -> usize {
        let count = self.ranks.len();
        let turn = self.next_rank.fetch_add(1, Ordering::Relaxed);
        let order = (0..count).map(|step| (turn + step) % count);
        order.min_by_key(|rank| self.ranks[*rank].open.load(Ordering::Relaxed)).unwrap_or(0)
    }

    /// A rank's counts.
    pub fn rank_stats(&self, rank: usize) -> EngineStats {
        self.ranks[rank].scheduled.lock().map(|stats| *stats).unwrap_or_default()
    }

    /// All counts.
    pub fn stats(&self) -> EngineStats {
        let mut sum = EngineStats::default();
        (0..self.ranks.len()).for_each(|rank| sum += self.rank_stats(rank));
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let drained = |pick: fn(&Drain) -> &AtomicU64| self.drain.as_ref().map_or(0, |drain| read(pick(drain)));
        EngineStats {
            requests: read(&self.counters.requests),
            completed: read(&self.counters.completed),
            disconnects: read(&self.counters.disconnects),
            bytes_in: read(&self.counters.bytes_in),
            bytes_out: read(&self.counters.bytes_out),
            lost_batches: read(&self.counters.lost_batches),
            drains: drained(|drain| &drain.calls),
            stolen_events: drained(|drain| &drain.stolen),
            overflowed_events: drained(|drain| &drain.overflowed),
            metrics_touched: read(&self.counters.metrics_touched),
            pd_violations: read(&self.counters.pd_violations),
            pd_held: self.plane.held(),
            ..sum
        }
    }
}
