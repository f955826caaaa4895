//! What the control thread may know of every stream, without stopping ingest.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use shards::ids::{EndpointIndex, Rank, ServiceId};

use super::calibrate::Finding;
use super::events::Reject;
use super::parity::{UseStats, UseStatus};

/// Adds to a counter that only the calling thread writes.
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

/// Whether a rank's engine answers replay requests, as of the last try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replay {
    /// Not tried yet, or no address given.
    Untried,
    /// The last replay ran to its end.
    Works,
    /// Nothing listens there, or it did not answer: history before the connection is not known.
    Missing,
}

/// What a rank's inventory began with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Started {
    /// With nothing: what the engine announced before is not known.
    Cold,
    /// With what a state file says.
    Restored,
    /// With the engine's history.
    Replayed,
}

impl Started {
    /// The word in API and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Started::Cold => "cold",
            Started::Restored => "restored",
            Started::Replayed => "replayed",
        }
    }
}

/// Counters of one stream, written by its ingest thread alone.
#[derive(Debug, Default)]
pub(crate) struct StreamStats {
    pub(crate) connected: AtomicBool,
    pub(crate) eligible: AtomicBool,
    /// Last applied sequence number + 1; 0 = none.
    pub(crate) next_seq: AtomicU64,
    pub(crate) batches: AtomicU64,
    pub(crate) events: AtomicU64,
    pub(crate) blocks_stored: AtomicU64,
    pub(crate) blocks_removed: AtomicU64,
    pub(crate) duplicates: AtomicU64,
    pub(crate) unknown_removals: AtomicU64,
    pub(crate) other_medium: AtomicU64,
    pub(crate) other_group: AtomicU64,
    pub(crate) evicted: AtomicU64,
    pub(crate) orphans: AtomicU64,
    pub(crate) block_size_mismatches: AtomicU64,
    /// Block size of the last event that differed from the rule's; 0 = none did.
    pub(crate) engine_block_tokens: AtomicU32,
    pub(crate) reconnects: AtomicU64,
    pub(crate) gaps: AtomicU64,
    pub(crate) restarts: AtomicU64,
    pub(crate) replays: AtomicU64,
    pub(crate) incomplete: AtomicU64,
    pub(crate) overflows: AtomicU64,
    pub(crate) clears: AtomicU64,
    pub(crate) rejects: [AtomicU64; Reject::ALL.len()],
    pub(crate) held: AtomicU64,
    /// Unix milliseconds; 0 = never.
    pub(crate) last_event_ms: AtomicU64,
    /// Age of the last live batch when it was applied, by the engine's clock, µs.
    pub(crate) lag_us: AtomicU64,
    /// A [`Replay`] as its number.
    pub(crate) replay: AtomicU32,
    /// 0 = it has not begun, else a [`Started`] as its number + 1.
    pub(crate) started: AtomicU32,
    pub(crate) degraded: AtomicBool,
    pub(crate) whole: AtomicBool,
    pub(crate) restored: AtomicU64,
    pub(crate) withdrawn: AtomicU64,
    pub(crate) adopted: AtomicU64,
    /// Written by the helper thread of state files, and by the ingest thread.
    pub(crate) state_writes: AtomicU64,
    pub(crate) state_failures: AtomicU64,
    /// How the rank's blocks are keyed; written when that changes, which is rare.
    pub(crate) finding: Mutex<Option<Finding>>,
    /// Of the endpoint: all its ranks have the same.
    pub(crate) by_use: Arc<UseStats>,
}

impl StreamStats {
    pub(crate) fn reject(&self, why: Reject) {
        add(&self.rejects[why as usize], 1);
    }

    pub(crate) fn block_size_differs(&self, engine: u32) {
        add(&self.block_size_mismatches, 1);
        self.engine_block_tokens.store(engine, Ordering::Relaxed);
    }

    pub(crate) fn set_finding(&self, finding: Finding) {
        *self.finding.lock().unwrap_or_else(PoisonError::into_inner) = Some(finding);
    }

    pub(crate) fn set_replay(&self, replay: Replay) {
        self.replay.store(replay as u32, Ordering::Relaxed);
    }

    pub(crate) fn state_written(&self) {
        self.state_writes.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn state_failure(&self) {
        self.state_failures.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn set_started(&self, started: Option<Started>) {
        self.started.store(started.map_or(0, |started| started as u32 + 1), Ordering::Relaxed);
    }

    /// A copy of the counters under the stream's name. Counters are read one by one: they may be a batch apart.
    pub(crate) fn status(&self, name: &StreamName) -> StreamStatus {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        StreamStatus {
            name: name.clone(),
            connected: self.connected.load(Ordering::Relaxed),
            eligible: self.eligible.load(Ordering::Relaxed),
            last_seq: get(&self.next_seq).checked_sub(1),
            batches: get(&self.batches),
            events: get(&self.events),
            blocks_stored: get(&self.blocks_stored),
            blocks_removed: get(&self.blocks_removed),
            duplicates: get(&self.duplicates),
            unknown_removals: get(&self.unknown_removals),
            other_medium: get(&self.other_medium),
            other_group: get(&self.other_group),
            evicted: get(&self.evicted),
            orphans: get(&self.orphans),
            block_size_mismatches: get(&self.block_size_mismatches),
            engine_block_tokens: match self.engine_block_tokens.load(Ordering::Relaxed) {
                0 => None,
                tokens => Some(tokens),
            },
            reconnects: get(&self.reconnects),
            gaps: get(&self.gaps),
            restarts: get(&self.restarts),
            replays: get(&self.replays),
            incomplete: get(&self.incomplete),
            overflows: get(&self.overflows),
            clears: get(&self.clears),
            rejects: Reject::ALL.map(|why| (why, get(&self.rejects[why as usize]))),
            held: get(&self.held),
            last_event_ms: match get(&self.last_event_ms) {
                0 => None,
                ms => Some(ms),
            },
            lag_us: get(&self.lag_us),
            replay: match self.replay.load(Ordering::Relaxed) {
                0 => Replay::Untried,
                1 => Replay::Works,
                _ => Replay::Missing,
            },
            started: match self.started.load(Ordering::Relaxed) {
                0 => None,
                1 => Some(Started::Cold),
                2 => Some(Started::Restored),
                _ => Some(Started::Replayed),
            },
            degraded: self.degraded.load(Ordering::Relaxed),
            whole: self.whole.load(Ordering::Relaxed),
            restored: get(&self.restored),
            withdrawn: get(&self.withdrawn),
            adopted: get(&self.adopted),
            state_writes: get(&self.state_writes),
            state_failures: get(&self.state_failures),
            by_use: self.by_use.status(),
            finding: self.finding.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

/// Which stream a status is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamName {
    /// Service of the endpoint.
    pub service: ServiceId,
    /// Endpoint inside the service.
    pub endpoint: EndpointIndex,
    /// The endpoint as people know it (`address:port`).
    pub label: String,
    /// Rank inside the endpoint.
    pub rank: Rank,
    /// ZMQ address the stream is read from.
    pub address: String,
}

/// State and counters of one (endpoint, rank) stream.
#[derive(Clone, Debug)]
pub struct StreamStatus {
    /// Which stream.
    pub name: StreamName,
    /// Whether a publisher is connected.
    pub connected: bool,
    /// Whether the rank's blocks count for routing.
    pub eligible: bool,
    /// Sequence number of the last batch that was applied.
    pub last_seq: Option<u64>,
    /// Batches applied.
    pub batches: u64,
    /// Events understood.
    pub events: u64,
    /// Keys in stores that counted, duplicates included.
    pub blocks_stored: u64,
    /// Keys in removals from device memory.
    pub blocks_removed: u64,
    /// Stores of keys that were held already.
    pub duplicates: u64,
    /// Removals of keys that were not held.
    pub unknown_removals: u64,
    /// Events for other media than device memory.
    pub other_medium: u64,
    /// Stores of groups that do not keep the whole prefix.
    pub other_group: u64,
    /// Keys withdrawn because the endpoint's bound was reached.
    pub evicted: u64,
    /// Blocks without a key of our own, because what goes before them was announced before we listened, or not at
    /// all: what the rank holds is not known in full.
    pub orphans: u64,
    /// Stores whose block size is not the rule's.
    pub block_size_mismatches: u64,
    /// Block size of the last such store.
    pub engine_block_tokens: Option<u32>,
    /// Connections after the first.
    pub reconnects: u64,
    /// Sequence gaps.
    pub gaps: u64,
    /// Engine restarts seen in the sequence or by a replay.
    pub restarts: u64,
    /// Replays that ran to their end.
    pub replays: u64,
    /// Times the engine's history could not be had in full: what it held before is not known.
    pub incomplete: u64,
    /// Live batches not kept during a replay because the buffer was full; asked for again afterwards.
    pub overflows: u64,
    /// Times the rank was emptied.
    pub clears: u64,
    /// What was not taken, by reason.
    pub rejects: [(Reject, u64); Reject::ALL.len()],
    /// (group, key) entries held.
    pub held: u64,
    /// When the last batch was applied, Unix milliseconds.
    pub last_event_ms: Option<u64>,
    /// Age of the last live batch when it was applied, by the engine's clock, µs; 0 before the first, and where that clock
    /// is ahead of ours.
    pub lag_us: u64,
    /// Whether the engine answers replay requests.
    pub replay: Replay,
    /// What the rank's inventory began with; none before its engine was reached, or asked for its history.
    pub started: Option<Started>,
    /// Some of what it holds was taken up from a state file, or adopted, and is not proven: it is routed by, and
    /// withdrawn as soon as the engine's `usage` denies a predicted hit.
    pub degraded: bool,
    /// All that its engine ever announced was heard.
    pub whole: bool,
    /// Keys taken up from the state file.
    pub restored: u64,
    /// Unproven keys withdrawn because the engine's `usage` denied them.
    pub withdrawn: u64,
    /// Keys taken in because the engine's `usage` reported them cached.
    pub adopted: u64,
    /// State files written.
    pub state_writes: u64,
    /// State files that could not be written, or not be taken up.
    pub state_failures: u64,
    /// Whether the endpoint's prompts have the blocks they were predicted to have.
    pub by_use: UseStatus,
    /// How the rank's blocks are keyed, and why; none where nothing is verified.
    pub finding: Option<Finding>,
}
