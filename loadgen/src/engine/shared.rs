//! What an engine's parts share: options, model, the way to the scheduler, and counts.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde::Serialize;
use tokio::sync::mpsc::UnboundedSender;

use super::driver::Command;
use super::options::EngineOptions;
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
    /// Requests given to the scheduler and not yet done.
    pub open: AtomicUsize,
}

/// The parts' common ground.
pub struct Shared {
    pub options: EngineOptions,
    pub text: Arc<ModelText>,
    /// To the scheduler. At most `max_requests` are open, and each sends at most two.
    pub commands: UnboundedSender<Command>,
    pub counters: Counters,
    /// The scheduler's counts, as of the last step.
    pub scheduled: Mutex<EngineStats>,
    pub last: Mutex<Option<LastRequest>>,
    next_id: AtomicU64,
}

impl Shared {
    /// At the start: nothing counted.
    pub fn new(options: EngineOptions, text: Arc<ModelText>, commands: UnboundedSender<Command>) -> Self {
        Self {
            options,
            text,
            commands,
            counters: Counters::default(),
            scheduled: Mutex::default(),
            last: Mutex::default(),
            next_id: AtomicU64::new(0),
        }
    }

    /// A name that no other request of this engine has.
    pub fn new_id(&self) -> RequestId {
        RequestId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// All counts.
    pub fn stats(&self) -> EngineStats {
        let scheduled = self.scheduled.lock().map(|stats| *stats).unwrap_or_default();
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        EngineStats {
            requests: read(&self.counters.requests),
            completed: read(&self.counters.completed),
            disconnects: read(&self.counters.disconnects),
            bytes_in: read(&self.counters.bytes_in),
            bytes_out: read(&self.counters.bytes_out),
            lost_batches: read(&self.counters.lost_batches),
            ..scheduled
        }
    }
}
