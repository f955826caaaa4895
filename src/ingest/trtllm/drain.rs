//! The drain of one engine: a thread of its own that asks, understands and hands operations to the ingest thread.
//!
//! ```text
//!   Admitting ──refused──► Refused (asked again after 60 s)
//!     │    ▲ ▲
//!     │    │ └──────────── Unreachable (asked again after 5 s) ◄── no connection, from anywhere
//!     ▼    │
//!   Draining ◄──► Contested ──► SecondDrainer: stopped for good
//! ```
//!
//! **Invariant.** One request is under way at most, and only `POST /kv_cache_events` and `GET /server_info` are ever
//! asked: the engine's `/metrics` are destructive too. The thread holds no lock while it asks.
//!
//! **Limits.** An answer of more than 64 MiB, or one that takes longer than 30 s, is lost, and counted. Batches wait in
//! a channel of [`BATCHES_MAX`]; where it is full the engine is asked later, and its own buffer keeps what happens.

#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam::channel::{Receiver, SendTimeoutError, Sender, bounded};

use super::super::poller::Waker;
use super::admission::{Admission, judge, unauthorized};
use super::http::{Client, Failure, Question};
use super::json::Drained;
use super::ownership::{Owner, Ownership};
use super::state::{Continuity, Op, State, Tally};

/// Batches between a drain and its ingest thread.
const BATCHES_MAX: usize = 16;
const SERVER_INFO: Question =
    Question { method: "GET", path: "/server_info", deadline: Duration::from_secs(5), bytes_max: 1 << 20 };
pub(super) const EVENTS: Question =
    Question { method: "POST", path: "/kv_cache_events", deadline: Duration::from_secs(30), bytes_max: 64 << 20 };
const UNREACHABLE_RETRY: Duration = Duration::from_secs(5);
const REFUSED_RETRY: Duration = Duration::from_secs(60);
/// After an answer that is no list of events, such as a cold server's.
const ERROR_RETRY: Duration = Duration::from_secs(1);
/// Longest wait without a look at whether to stop.
const SLICE: Duration = Duration::from_millis(100);
const STACK_BYTES: usize = 256 * 1024;
/// Blocks linked per engine. Beyond it the oldest ends of chains are given up.
const KEYS_MAX: usize = 2_000_000;

/// What to drain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrainFrom {
    /// The engine's serving address.
    pub address: SocketAddr,
    /// Shortest pause between two calls (`LOXILB_KV_TRTLLM_POLL_MIN_MS`).
    pub poll_min: Duration,
    /// Longest pause, reached while nothing happens (`LOXILB_KV_TRTLLM_POLL_MAX_MS`).
    pub poll_max: Duration,
    /// Bearer token of the gateway's own calls.
    pub bearer: Option<Bearer>,
}

/// A bearer token, which is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Bearer(String);

impl Bearer {
    /// A token; none where it holds anything but visible ASCII, which no header can carry.
    #[must_use]
    pub fn new(token: &str) -> Option<Self> {
        token.bytes().all(|byte| byte.is_ascii_graphic()).then(|| Bearer(token.to_owned()))
    }
}

impl std::fmt::Debug for Bearer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Bearer(…)")
    }
}

impl DrainFrom {
    /// The defaults: 5 to 20 ms, no token.
    #[must_use]
    pub fn new(address: SocketAddr) -> Self {
        let (poll_min, poll_max) = (Duration::from_millis(5), Duration::from_millis(20));
        DrainFrom { address, poll_min, poll_max, bearer: None }
    }
}

/// Where a drain stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// The engine is asked what it is.
    #[default]
    Admitting,
    /// It does not answer.
    Unreachable,
    /// It must not be drained by us; the detail says why.
    Refused,
    /// Its events are ours alone.
    Draining,
    /// Another consumer takes events too; we were first and go on for now.
    Contested,
    /// Another consumer takes its events: we stopped, and its blocks do not count.
    SecondDrainer,
}

impl Phase {
    /// The word in status and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Phase::Admitting => "admitting",
            Phase::Unreachable => "unreachable",
            Phase::Refused => "refused",
            Phase::Draining => "draining",
            Phase::Contested => "contested",
            Phase::SecondDrainer => "second_drainer",
        }
    }
}

/// What the control thread may know of a drain.
#[derive(Clone, Debug, Default)]
pub(crate) struct Report {
    pub(crate) phase: Phase,
    /// Why, where it is not well.
    pub(crate) detail: String,
    pub(crate) tally: Tally,
    pub(crate) answers: u64,
    pub(crate) answers_lost: u64,
    /// Answers other than a list of events.
    pub(crate) errors: u64,
    /// Losses that a second consumer explains.
    pub(crate) ownership_faults: u64,
    /// When the last list of events came, Unix milliseconds; 0 = never.
    pub(crate) polled_ms: u64,
    /// When the last event came, Unix milliseconds; 0 = never.
    pub(crate) event_ms: u64,
}

/// What happened in an engine, for the ingest thread.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) ops: Vec<Op>,
    /// Whether the engine's blocks may be routed by.
    pub(crate) eligible: bool,
    /// Keys it has, each once.
    pub(crate) distinct: u64,
}

/// A running drain. Dropping it ends its thread, soon.
#[derive(Debug)]
pub(crate) struct Drain {
    pub(crate) batches: Receiver<Batch>,
    pub(crate) report: Arc<Mutex<Report>>,
    stop: Arc<AtomicBool>,
    thread: Thread,
}

impl Drop for Drain {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.unpark();
    }
}

impl Drain {
    /// Starts the thread, which inherits the core of the calling one.
    ///
    /// # Errors
    /// Where no thread can be had.
    pub(crate) fn start(from: &DrainFrom, label: &str, block_tokens: u32, waker: Waker) -> std::io::Result<Self> {
        let (batches, receiver) = bounded(BATCHES_MAX);
        let runner = Runner::new(from, label, block_tokens, KEYS_MAX, (batches, waker));
        let (report, stop) = (Arc::clone(&runner.report), Arc::clone(&runner.stop));
        let builder = std::thread::Builder::new().name("drain".to_owned()).stack_size(STACK_BYTES);
        let thread = builder.spawn(move || runner.run())?.thread().clone();
        Ok(Drain { batches: receiver, report, stop, thread })
    }

    /// A drain without a thread: its runner is told what engines answer.
    #[cfg(test)]
    pub(crate) fn idle(from: &DrainFrom, block_tokens: u32, keys_max: usize, waker: Waker) -> (Self, Runner) {
        let (batches, receiver) = bounded(BATCHES_MAX);
        let runner = Runner::new(from, "", block_tokens, keys_max, (batches, waker));
        let (report, stop) = (Arc::clone(&runner.report), Arc::clone(&runner.stop));
        (Drain { batches: receiver, report, stop, thread: std::thread::current() }, runner)
    }
}

pub(crate) struct Runner {
    client: Client,
    from: DrainFrom,
    label: String,
    block_tokens: u32,
    state: State,
    ownership: Ownership,
    started: Instant,
    batches: Sender<Batch>,
    waker: Waker,
    report: Arc<Mutex<Report>>,
    stop: Arc<AtomicBool>,
    /// What the ingest thread was told.
    eligible: bool,
}

/// The thread is to end.
#[derive(Debug)]
pub(crate) struct Stop;

impl Runner {
    fn new(
        from: &DrainFrom,
        label: &str,
        block_tokens: u32,
        keys_max: usize,
        (batches, waker): (Sender<Batch>, Waker),
    ) -> Self {
        Runner {
            client: Client::new(from.address, from.bearer.as_ref().map(|bearer| bearer.0.as_str())),
            from: from.clone(),
            label: label.to_owned(),
            block_tokens,
            state: State::new(block_tokens, keys_max),
            ownership: Ownership::new(RandomState::new().hash_one(from.address)),
            started: Instant::now(),
            batches,
            waker,
            report: Arc::default(),
            stop: Arc::default(),
            eligible: false,
        }
    }

    fn run(mut self) {
        // Told to stop, or gone for good: either way nothing is left to do.
        let _ = self.serve();
    }

    fn serve(&mut self) -> Result<(), Stop> {
        loop {
            self.admit()?;
            if self.drain()? == Phase::SecondDrainer {
                return Ok(());
            }
        }
    }

    /// Returns once the engine may be drained.
    fn admit(&mut self) -> Result<(), Stop> {
        loop {
            let admission = match self.client.ask(SERVER_INFO, &self.stop) {
                Ok(answer) => judge(answer.status, answer.body, self.block_tokens),
                Err(Failure::Stopped) => return Err(Stop),
                Err(failure) => Admission::Later(format!("GET /server_info: {failure}")),
            };
            match admission {
                Admission::Admitted => return Ok(()),
                Admission::Later(why) => {
                    self.enter(Phase::Unreachable, &why)?;
                    self.pause(UNREACHABLE_RETRY)?;
                }
                Admission::Refused(why) => {
                    self.enter(Phase::Refused, &why)?;
                    self.pause(REFUSED_RETRY)?;
                }
            }
        }
    }

    /// Drains until the engine is gone or somebody else's.
    fn drain(&mut self) -> Result<Phase, Stop> {
        let mut wait = self.from.poll_min;
        loop {
            let (status, drained) = match self.client.ask(EVENTS, &self.stop) {
                Ok(answer) => (answer.status, Drained::read(answer.body)),
                Err(Failure::Stopped) => return Err(Stop),
                Err(failure) => {
                    let connected = !matches!(failure, Failure::Connect(_));
                    self.lost(connected, &format!("POST /kv_cache_events: {failure}"))?;
                    self.pause(if connected { ERROR_RETRY } else { UNREACHABLE_RETRY })?;
                    return Ok(Phase::Unreachable);
                }
            };
            match status {
                200 => {}
                401 | 403 => {
                    self.enter(Phase::Refused, &unauthorized(status))?;
                    self.pause(REFUSED_RETRY)?;
                    continue;
                }
                _ => {
                    self.note(|report| {
                        report.errors += 1;
                        report.detail = format!("POST /kv_cache_events: {status}");
                    });
                    self.pause(ERROR_RETRY)?;
                    continue;
                }
            }
            let busy = !drained.events.is_empty();
            if self.answered(&drained)? == Phase::SecondDrainer {
                return Ok(Phase::SecondDrainer);
            }
            wait = if busy { self.from.poll_min } else { (wait * 3 / 2).min(self.from.poll_max) };
            self.pause(wait)?;
        }
    }

    /// There is no answer; where we were connected, events may have gone with it.
    pub(crate) fn lost(&mut self, connected: bool, why: &str) -> Result<(), Stop> {
        self.note(|report| report.answers_lost += u64::from(connected));
        self.ownership.answer_lost();
        self.enter(Phase::Unreachable, why)
    }

    /// Takes an answer, and says where the drain stands after it.
    pub(crate) fn answered(&mut self, drained: &Drained) -> Result<Phase, Stop> {
        let (phase, detail) = match self.take(drained)? {
            Owner::We => (Phase::Draining, ""),
            Owner::Contested => (Phase::Contested, CONTESTED),
            Owner::Other => (Phase::SecondDrainer, SECOND),
        };
        self.enter(phase, detail)?;
        Ok(phase)
    }

    /// Applies an answer and hands over what follows from it.
    fn take(&mut self, drained: &Drained) -> Result<Owner, Stop> {
        let (mut ops, mut gap) = (Vec::new(), false);
        let mut ranks = HashSet::new();
        for event in &drained.events {
            let first = ranks.insert(event.rank);
            let continuity = self.state.apply(event, &mut |op| ops.push(op));
            gap |= first && matches!(continuity, Continuity::Lost(_));
        }
        drained.rejects.iter().for_each(|why| self.state.reject(*why));
        let owner = self.ownership.answered(self.started.elapsed(), drained.events.len(), gap);
        let tally = *self.state.tally();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        self.note(|report| {
            report.answers += 1;
            report.polled_ms = now;
            if !drained.events.is_empty() {
                report.event_ms = now;
            }
            report.ownership_faults += u64::from(gap && owner != Owner::We);
            report.tally = tally;
        });
        let eligible = owner != Owner::Other;
        if !ops.is_empty() || eligible != self.eligible {
            self.hand_over(ops, eligible)?;
        }
        Ok(owner)
    }

    fn hand_over(&mut self, ops: Vec<Op>, eligible: bool) -> Result<(), Stop> {
        self.eligible = eligible;
        let mut batch = Batch { ops, eligible, distinct: self.state.distinct() };
        loop {
            batch = match self.batches.send_timeout(batch, SLICE) {
                Ok(()) => {
                    self.waker.wake();
                    return Ok(());
                }
                Err(SendTimeoutError::Timeout(batch)) if !self.stop.load(Ordering::Relaxed) => batch,
                Err(_) => return Err(Stop),
            };
        }
    }

    /// Makes a phase known, in the log once per change; outside of draining the engine's blocks do not count.
    fn enter(&mut self, phase: Phase, detail: &str) -> Result<(), Stop> {
        let mut changed = false;
        self.note(|report| {
            changed = report.phase != phase;
            report.phase = phase;
            detail.clone_into(&mut report.detail);
        });
        if changed {
            let (endpoint, address) = (&self.label, self.from.address);
            match phase {
                Phase::Admitting | Phase::Draining => tracing::info!(endpoint, %address, "KV events: draining"),
                Phase::Unreachable | Phase::Refused => {
                    tracing::warn!(endpoint, %address, "KV events: {}: {detail}; its blocks do not count", phase.name());
                }
                Phase::Contested | Phase::SecondDrainer => {
                    tracing::error!(endpoint, %address, "KV events: {}: {detail}", phase.name());
                }
            }
        }
        let eligible = matches!(phase, Phase::Draining | Phase::Contested);
        if !eligible && self.eligible { self.hand_over(Vec::new(), false) } else { Ok(()) }
    }

    fn note(&self, change: impl FnOnce(&mut Report)) {
        // A report that was being written when its writer panicked is still one.
        change(&mut self.report.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn pause(&self, time: Duration) -> Result<(), Stop> {
        let until = Instant::now() + time;
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return Err(Stop);
            }
            match until.checked_duration_since(Instant::now()) {
                Some(left) if !left.is_zero() => std::thread::park_timeout(left),
                _ => return Ok(()),
            }
        }
    }
}

const CONTESTED: &str = "second_drainer: another consumer takes this engine's events too, each of which goes to one caller alone; \
     leave the drain to one gateway, or switch the engine to kv_events_config (ZMQ)";
const SECOND: &str = "second_drainer: another consumer takes this engine's events, so this gateway stopped to ask for them and serves \
     the engine by the rule's sel; remove the other consumer and restart the gateway or change the rule, or switch the \
     engine to kv_events_config (ZMQ)";

#[cfg(test)]
#[path = "drain_tests.rs"]
mod tests;
