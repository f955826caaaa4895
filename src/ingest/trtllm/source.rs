//! One engine's drain as the ingest thread sees it: batches in, operations on its service's inventory out.

#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};

use shards::ids::{BlockKey, EndpointIndex, HolderIndex, Rank};
use shards::inventory::{Medium, OPS_PER_PUBLISH_MAX, SpaceIndex, Writer};

use super::super::events::Reject;
use super::super::parity::{ByUse, UseStats, UseStatus};
use super::super::poller::Waker;
use super::super::status::StreamName;
use super::drain::{Drain, DrainBlocks, DrainFrom, Phase, Report};
use super::json::RANKS_MAX;
use super::state::Op;

/// Batches taken before the other sources have their turn.
const BATCHES_PER_VISIT: usize = 4;
/// Blocks given up that are remembered between two looks at predictions. Of more than these, one that was predicted may
/// count as a miss.
const EVICTED_MAX: usize = 1024;

/// What the control thread reads of a drain.
#[derive(Clone, Debug)]
pub(crate) struct DrainStats {
    report: Arc<Mutex<Report>>,
    by_use: Arc<UseStats>,
}

impl DrainStats {
    /// Whether both are of the same drain.
    pub(crate) fn is(&self, other: &DrainStats) -> bool {
        Arc::ptr_eq(&self.report, &other.report)
    }
}

/// State and counters of one engine's drain.
#[derive(Clone, Debug)]
pub struct DrainStatus {
    /// Which engine; its rank is always 0, and its address that of the drain.
    pub name: StreamName,
    /// Where it stands.
    pub phase: Phase,
    /// Why, where it is not well; what to do.
    pub detail: String,
    /// Answers with a list of events.
    pub answers: u64,
    /// Answers that never arrived whole.
    pub answers_lost: u64,
    /// Answers of another kind.
    pub errors: u64,
    /// Losses that only a second consumer explains.
    pub ownership_faults: u64,
    /// When the last list of events came, Unix milliseconds.
    pub last_poll_ms: Option<u64>,
    /// When the last event came, Unix milliseconds.
    pub last_event_ms: Option<u64>,
    /// Events understood.
    pub events: u64,
    /// Plain full blocks announced.
    pub blocks_stored: u64,
    /// Blocks removed, those below a removed one included.
    pub blocks_removed: u64,
    /// Blocks whose parent is not known: they match nothing.
    pub orphans: u64,
    /// Blocks of an adapter, a salt or an image: they match nothing.
    pub foreign: u64,
    /// Blocks that were not full.
    pub partial: u64,
    /// Events of smaller attention windows.
    pub other_pool: u64,
    /// Moves between device memory and the host's.
    pub moved: u64,
    /// Removals of keys that were not known.
    pub unknown_removals: u64,
    /// Events lost, as their numbers say.
    pub lost: u64,
    /// Losses.
    pub gaps: u64,
    /// Engine restarts.
    pub restarts: u64,
    /// Ranks whose history before us is not known.
    pub incomplete: u64,
    /// Times a rank was emptied.
    pub clears: u64,
    /// Blocks given up because of the bound.
    pub evicted: u64,
    /// Blocks of another size than the rule's.
    pub block_size_mismatches: u64,
    /// Size of the last such block.
    pub engine_block_tokens: Option<u32>,
    /// What was not taken, by reason.
    pub rejects: [(Reject, u64); Reject::ALL.len()],
    /// Whether the engine's prompts have the blocks they were predicted to have.
    pub by_use: UseStatus,
}

/// What is known of another consumer of an engine's events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecondDrainer {
    /// Nothing speaks for one.
    None = 0,
    /// Events are missing that only another consumer can have taken; the drain goes on for now.
    Suspected = 1,
    /// They went on missing: this gateway stopped to ask.
    Detected = 2,
}

impl SecondDrainer {
    /// The word in the API.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            SecondDrainer::None => "none",
            SecondDrainer::Suspected => "suspected",
            SecondDrainer::Detected => "detected",
        }
    }
}

impl DrainStatus {
    /// What is known of another consumer.
    #[must_use]
    pub fn second_drainer(&self) -> SecondDrainer {
        match self.phase {
            Phase::Contested => SecondDrainer::Suspected,
            Phase::SecondDrainer => SecondDrainer::Detected,
            Phase::Admitting | Phase::Unreachable | Phase::Refused | Phase::Draining => SecondDrainer::None,
        }
    }

    /// Whether the engine's blocks count for routing; else it is chosen by `sel`.
    #[must_use]
    pub fn is_routed_by_cache(&self) -> bool {
        matches!(self.phase, Phase::Draining | Phase::Contested)
    }

    pub(crate) fn new(name: &StreamName, stats: &DrainStats) -> Self {
        // A report that was being written when its writer panicked is still one.
        let report = stats.report.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let tally = report.tally;
        DrainStatus {
            name: name.clone(),
            phase: report.phase,
            detail: report.detail,
            answers: report.answers,
            answers_lost: report.answers_lost,
            errors: report.errors,
            ownership_faults: report.ownership_faults,
            last_poll_ms: Some(report.polled_ms).filter(|ms| *ms > 0),
            last_event_ms: Some(report.event_ms).filter(|ms| *ms > 0),
            events: tally.events,
            blocks_stored: tally.stored,
            blocks_removed: tally.removed,
            orphans: tally.orphans,
            foreign: tally.foreign,
            partial: tally.partial,
            other_pool: tally.other_pool,
            moved: tally.moved,
            unknown_removals: tally.unknown_removals,
            lost: tally.lost,
            gaps: tally.gaps,
            restarts: tally.restarts,
            incomplete: tally.incomplete,
            clears: tally.clears,
            evicted: tally.evicted,
            block_size_mismatches: tally.size_mismatches,
            engine_block_tokens: Some(tally.engine_block_tokens).filter(|tokens| *tokens > 0),
            rejects: Reject::ALL.map(|why| (why, tally.rejects[why as usize])),
            by_use: stats.by_use.status(),
        }
    }
}

/// The drain of one endpoint, with a holder per attention-DP rank.
#[derive(Debug)]
pub(crate) struct DrainSource {
    pub(crate) name: StreamName,
    pub(crate) from: DrainFrom,
    drain: Drain,
    endpoint: EndpointIndex,
    stats: DrainStats,
    holders: Vec<Holders>,
    eligible: bool,
    distinct: u64,
    /// First blocks announced, and those that parity by use was told of.
    first_blocks: u64,
    first_blocks_told: u64,
    /// Times a rank was emptied.
    clears: u64,
    /// Blocks given up since then, at most [`EVICTED_MAX`] of them.
    evicted: Vec<BlockKey>,
}

/// The holders of one rank by medium, device memory first.
type Holders = [Option<HolderIndex>; 3];

impl DrainSource {
    /// Starts the drain.
    ///
    /// # Errors
    /// Where no thread can be had.
    pub(crate) fn open(
        name: StreamName,
        from: DrainFrom,
        blocks: DrainBlocks,
        by_use: &Arc<UseStats>,
        waker: Waker,
    ) -> std::io::Result<Self> {
        let drain = Drain::start(&from, &name.label, blocks, waker)?;
        Ok(Self::new(name, from, drain, by_use))
    }

    /// What a drain brings.
    pub(crate) fn new(name: StreamName, from: DrainFrom, drain: Drain, by_use: &Arc<UseStats>) -> Self {
        DrainSource {
            endpoint: name.endpoint,
            name,
            from,
            stats: DrainStats { report: Arc::clone(&drain.report), by_use: Arc::clone(by_use) },
            drain,
            holders: Vec::new(),
            eligible: false,
            distinct: 0,
            first_blocks: 0,
            first_blocks_told: 0,
            clears: 0,
            evicted: Vec::new(),
        }
    }

    /// What the control thread reads.
    pub(crate) fn stats(&self) -> &DrainStats {
        &self.stats
    }

    /// Whether its blocks are what the engine has.
    pub(crate) fn is_eligible(&self) -> bool {
        self.eligible
    }

    /// Whether some rank has the block in device memory, as far as that is published.
    pub(crate) fn holds(&self, key: BlockKey, writer: &Writer) -> bool {
        writer.is_held(key, |holder| self.holders.iter().any(|of_rank| of_rank[0] == Some(holder)))
    }

    /// Tells parity by use what has come and gone since it was told last.
    pub(crate) fn tell(&mut self, by_use: &mut ByUse) {
        let first_blocks = self.first_blocks - std::mem::replace(&mut self.first_blocks_told, self.first_blocks);
        (0..first_blocks).for_each(|_| by_use.first_block());
        self.evicted.drain(..).for_each(|key| by_use.evicted(key));
        // Another consumer has some of the blocks' events. Where the report is being read, the next look tells.
        let shares = |phase| matches!(phase, Phase::Contested | Phase::SecondDrainer);
        if self.stats.report.try_lock().is_ok_and(|report| shares(report.phase)) {
            by_use.suspend(&self.stats.by_use);
        }
    }

    /// Whether a batch waits.
    pub(crate) fn is_ready(&self) -> bool {
        !self.drain.batches.is_empty()
    }

    /// Times a rank was emptied.
    pub(crate) fn clears(&self) -> u64 {
        self.clears
    }

    /// Keys the engine has, each once whatever the number of its ranks.
    pub(crate) fn distinct(&self) -> u64 {
        self.distinct
    }

    /// Applies what has come, up to a bound.
    pub(crate) fn visit(&mut self, writer: &mut Writer) {
        for batch in self.drain.batches.try_iter().take(BATCHES_PER_VISIT).collect::<Vec<_>>() {
            let mut since_publish = 0;
            writer.follow(None);
            for op in batch.ops {
                self.apply(op, writer);
                since_publish += 1;
                if since_publish >= OPS_PER_PUBLISH_MAX {
                    since_publish = 0;
                    // Refused: the queue holds the rest for the end of the cycle.
                    let _ = writer.try_publish();
                }
            }
            (self.distinct, self.first_blocks) = (batch.distinct, batch.first_blocks);
            if batch.eligible != self.eligible {
                self.eligible = batch.eligible;
                for holder in self.holders.iter().flatten().flatten() {
                    writer.set_eligible(*holder, batch.eligible);
                }
            }
        }
    }

    fn apply(&mut self, op: Op, writer: &mut Writer) {
        match op {
            Op::Store(rank, key) => self.has(rank, Medium::Device, key, writer),
            Op::Wide { rank, medium, key, held: true } => self.has(rank, medium, key, writer),
            Op::Remove(rank, key) => {
                if self.evicted.len() < EVICTED_MAX {
                    self.evicted.push(key);
                }
                self.has_no_more(rank, Medium::Device, key, writer);
            }
            Op::Wide { rank, medium, key, held: false } => self.has_no_more(rank, medium, key, writer),
            Op::Clear(rank) => {
                self.clears += 1;
                if let Some(holders) = self.holders.get_mut(usize::from(rank)) {
                    std::mem::take(holders).into_iter().flatten().for_each(|holder| writer.retire_holder(holder));
                }
            }
        }
    }

    fn has(&mut self, rank: u8, medium: Medium, key: BlockKey, writer: &mut Writer) {
        let place = usize::from(rank);
        debug_assert!(place < RANKS_MAX);
        if self.holders.len() <= place {
            self.holders.resize(place + 1, Holders::default());
        }
        let slot = &mut self.holders[place][medium as usize];
        if slot.is_none() {
            *slot = writer.add_holder_to(medium, SpaceIndex::OWN, self.endpoint, Rank(rank));
            if let (Some(holder), false) = (*slot, self.eligible) {
                writer.set_eligible(holder, false);
            }
        }
        // Without a slot the block is not routed by; the next start of the engine asks again.
        if let Some(holder) = *slot {
            writer.store(key, holder);
        }
    }

    fn has_no_more(&self, rank: u8, medium: Medium, key: BlockKey, writer: &mut Writer) {
        let holder = self.holders.get(usize::from(rank)).and_then(|holders| holders[medium as usize]);
        if let Some(holder) = holder {
            writer.remove(key, holder);
        }
    }

    /// Ends the drain and gives its holders back.
    pub(crate) fn close(self, writer: &mut Writer) {
        self.holders.into_iter().flatten().flatten().for_each(|holder| writer.retire_holder(holder));
    }
}
