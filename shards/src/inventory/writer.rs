//! The writing end: what is queued, what goes into one publish, and how a retired holder's slot comes free.
//!
//! Order of operations:
//!
//! 1. Stores and removals take effect in the order they were given, and so does an eligibility regained.
//! 2. Additions, masks and retirements overtake them: a mask that waited behind a long queue would be no mask.
//!    An eligibility regained counts only if no later mask has overtaken it.
//! 3. What the queue still holds of a retired holder is dropped when its turn comes. The slot is free for a new holder
//!    once every segment was swept after the retirement *and* the queue of that time has drained.

use std::collections::VecDeque;

use super::table::{Change, Op, Table, What};
use super::{Medium, SPACES_MAX, Space, SpaceIndex};
use crate::ids::{BlockKey, EndpointIndex, HolderIndex, Rank};

/// Stores and removals that go into one publish; a segment must be able to take its share of them between the moment
/// it asks to be rebuilt and the moment it is full.
pub const OPS_PER_PUBLISH_MAX: usize = 1_500;
/// Segments swept per publish.
const SWEEPS_PER_PUBLISH: usize = 2;
/// Segments looked at per publish for one to rebuild.
const REBUILD_SCAN: usize = 256;
/// Operations queued. Beyond it new stores are dropped and counted: a block that is not in the inventory is a missed
/// hit, never a wrong one. Removals are always taken; there are no more of them than stored blocks.
pub const PENDING_MAX: usize = 1 << 21;
/// Holders of one inventory.
pub const HOLDERS_MAX: usize = 65_535;
/// No holder's number.
const NOBODY: HolderIndex = HolderIndex(u16::MAX);

/// The writing end; exactly one, owned by the ingest thread. Dropping it waits for the readers that hold a guard.
#[derive(Debug)]
pub struct Writer {
    handle: left_right::WriteHandle<Table, Op>,
    /// What goes into the next publish ahead of the queue.
    urgent: Vec<Op>,
    queue: VecDeque<Queued>,
    /// Queued operations ever taken in and ever let out.
    queued: u64,
    drained: u64,
    /// Operations given to `handle` and not yet published.
    staged: usize,
    slots: Vec<WriterSlot>,
    /// What each space beside the service's own means.
    spaces: [Option<Space>; SPACES_MAX],
    free: Vec<HolderIndex>,
    /// Retired holders whose slots are not free yet, oldest first.
    retiring: VecDeque<Retiring>,
    segments: u64,
    /// Sweeps ever staged; the next goes to segment `sweeps % segments`.
    sweeps: u64,
    rebuild_next: usize,
    /// The key last stored, where the next follows it.
    last: Option<BlockKey>,
    stores_dropped: u64,
    queue_max: usize,
}

#[derive(Clone, Copy, Debug)]
enum Queued {
    Change(Change),
    /// Valid only while the slot's `flips` is still this.
    Eligible {
        holder: HolderIndex,
        flips: u32,
    },
}

#[derive(Clone, Copy, Debug)]
struct WriterSlot {
    in_use: bool,
    eligible: bool,
    space: SpaceIndex,
    flips: u32,
}

#[derive(Clone, Copy, Debug)]
struct Retiring {
    holder: HolderIndex,
    /// Free when so many were drained and so many sweeps staged.
    drained: u64,
    sweeps: u64,
}

impl Writer {
    pub(super) fn new(handle: left_right::WriteHandle<Table, Op>, segments: usize) -> Self {
        Writer {
            handle,
            urgent: Vec::new(),
            queue: VecDeque::new(),
            queued: 0,
            drained: 0,
            staged: 0,
            slots: Vec::new(),
            spaces: [None; SPACES_MAX],
            free: Vec::new(),
            retiring: VecDeque::new(),
            segments: segments as u64,
            sweeps: 0,
            rebuild_next: 0,
            last: None,
            stores_dropped: 0,
            queue_max: PENDING_MAX,
        }
    }

    /// A slot for one (endpoint, rank) cache in the service's own key space, eligible, holding nothing; none when all
    /// 65,535 are taken.
    pub fn add_holder(&mut self, endpoint: EndpointIndex, rank: Rank) -> Option<HolderIndex> {
        self.add_holder_in(SpaceIndex::OWN, endpoint, rank)
    }

    /// The number of a key space; none when [`SPACES_MAX`] others have holders.
    pub fn space(&mut self, space: Space) -> Option<SpaceIndex> {
        if let Some(known) = self.spaces.iter().position(|known| *known == Some(space)) {
            return Some(SpaceIndex(known as u8));
        }
        let in_use = |index: usize| self.slots.iter().any(|slot| slot.in_use && usize::from(slot.space.0) == index);
        let index = (1..SPACES_MAX).find(|&index| !in_use(index))?;
        self.spaces[index] = Some(space);
        let index = SpaceIndex(index as u8);
        self.urgent.push(Op::Define { index, space });
        Some(index)
    }

    /// As [`add_holder`](Writer::add_holder), in a key space that [`space`](Writer::space) has given.
    pub fn add_holder_in(&mut self, space: SpaceIndex, endpoint: EndpointIndex, rank: Rank) -> Option<HolderIndex> {
        self.add_holder_to(Medium::Device, space, endpoint, rank)
    }

    /// As [`add_holder_in`](Writer::add_holder_in), for what lies in the medium or a nearer one.
    pub fn add_holder_to(
        &mut self,
        medium: Medium,
        space: SpaceIndex,
        endpoint: EndpointIndex,
        rank: Rank,
    ) -> Option<HolderIndex> {
        let slot = WriterSlot { in_use: true, eligible: true, space, flips: 0 };
        let holder = match self.free.pop() {
            Some(holder) => {
                self.slots[holder.index()] = slot;
                holder
            }
            None if self.slots.len() < HOLDERS_MAX => {
                self.slots.push(slot);
                HolderIndex((self.slots.len() - 1) as u16)
            }
            None => return None,
        };
        self.urgent.push(Op::Add { holder, endpoint, rank, medium, space });
        Some(holder)
    }

    /// Clears a holder in one operation: masked at once, swept in the background by later publishes. The holder is no
    /// more after this; its engine, if it lives, gets a new one.
    pub fn retire_holder(&mut self, holder: HolderIndex) {
        let slot = &mut self.slots[holder.index()];
        assert!(slot.in_use, "a holder is retired once");
        slot.in_use = false;
        self.urgent.push(Op::Retire { holder });
        self.retiring.push_back(Retiring { holder, drained: self.queued, sweeps: self.sweeps + self.segments });
    }

    /// Whether the holder's blocks count for routing.
    pub fn set_eligible(&mut self, holder: HolderIndex, eligible: bool) {
        let slot = &mut self.slots[holder.index()];
        debug_assert!(slot.in_use, "a retired holder has no eligibility");
        if !slot.in_use || slot.eligible == eligible {
            return;
        }
        slot.eligible = eligible;
        slot.flips += 1;
        let flips = slot.flips;
        if eligible {
            self.enqueue(Queued::Eligible { holder, flips });
        } else {
            self.urgent.push(Op::Eligible { holder, eligible: false });
        }
    }

    /// The block that the next one stored follows in prompts; none where it is the first. Without it a block follows the
    /// one stored before. A hint: who is wrong about it makes look-ups slower and nothing else.
    pub fn follow(&mut self, before: Option<BlockKey>) {
        if self.last == before || self.queue.len() >= self.queue_max {
            return;
        }
        self.last = before;
        let (key, what) = before.map_or((BlockKey(0), What::Begin), |key| (key, What::Follow));
        self.enqueue(Queued::Change(Change { key, holder: NOBODY, what }));
    }

    /// The holder has the block now (0→1 of its copies).
    pub fn store(&mut self, key: BlockKey, holder: HolderIndex) {
        debug_assert!(self.slots[holder.index()].in_use, "a retired holder stores nothing");
        if self.queue.len() >= self.queue_max {
            self.stores_dropped += 1;
        } else {
            self.last = Some(key);
            self.enqueue(Queued::Change(Change { key, holder, what: What::Store }));
        }
    }

    /// The holder no longer has the block (1→0 of its copies).
    pub fn remove(&mut self, key: BlockKey, holder: HolderIndex) {
        debug_assert!(self.slots[holder.index()].in_use, "a retired holder removes nothing");
        self.last = None;
        self.enqueue(Queued::Change(Change { key, holder, what: What::Remove }));
    }

    /// Whether one of these holders has the key, as far as that is published.
    #[must_use]
    pub fn is_held(&self, key: BlockKey, by: impl Fn(HolderIndex) -> bool) -> bool {
        self.handle.enter().is_some_and(|table| table.is_held(key, |holder| by(HolderIndex(holder))))
    }

    /// Work not yet published: operations, and segments still to be swept. Zero means that the next publish has
    /// nothing to do.
    #[must_use]
    pub fn pending(&self) -> usize {
        let sweeps = self.retiring.back().map_or(0, |last| last.sweeps.saturating_sub(self.sweeps));
        self.urgent.len() + self.queue.len() + self.staged + sweeps as usize
    }

    /// Stores dropped because [`PENDING_MAX`] operations were waiting.
    #[must_use]
    pub fn stores_dropped(&self) -> u64 {
        self.stores_dropped
    }

    /// Publishes the next part of what is pending, at most [`OPS_PER_PUBLISH_MAX`] of its stores and removals, without
    /// waiting for a reader; false when a reader still reads the other side, and the caller goes on draining.
    pub fn try_publish(&mut self) -> bool {
        if self.pending() == 0 {
            return true;
        }
        // Masks join a part that was refused before; the rest waits for its own.
        let waiting = self.staged > 0;
        self.staged += self.urgent.len();
        self.handle.extend(self.urgent.drain(..));
        if !waiting {
            self.stage_queue();
            self.stage_sweeps();
            self.stage_rebuild();
        }
        let published = self.handle.try_publish();
        if published {
            self.staged = 0;
        }
        published
    }

    fn enqueue(&mut self, op: Queued) {
        self.queue.push_back(op);
        self.queued += 1;
    }

    fn stage_queue(&mut self) {
        let Writer { handle, slots, queue, .. } = self;
        let take = queue.len().min(OPS_PER_PUBLISH_MAX);
        self.drained += take as u64;
        let mut changes = Vec::with_capacity(take);
        for queued in queue.drain(..take) {
            match queued {
                Queued::Change(change) if change.holder == NOBODY || slots[change.holder.index()].in_use => {
                    changes.push(change);
                }
                Queued::Eligible { holder, flips } => {
                    let slot = slots[holder.index()];
                    if slot.in_use && slot.flips == flips {
                        handle.append(Op::Changes(std::mem::take(&mut changes).into_boxed_slice()));
                        handle.append(Op::Eligible { holder, eligible: true });
                    }
                }
                Queued::Change(_) => {}
            }
        }
        if !changes.is_empty() {
            handle.append(Op::Changes(changes.into_boxed_slice()));
        }
        self.staged += take;
    }

    fn stage_sweeps(&mut self) {
        let Some(last) = self.retiring.back() else { return };
        let take = last.sweeps.saturating_sub(self.sweeps).min(SWEEPS_PER_PUBLISH as u64);
        for _ in 0..take {
            let segment = (self.sweeps % self.segments) as u32;
            self.handle.append(Op::Sweep { segment });
            self.sweeps += 1;
            self.staged += 1;
        }
        // Also when only the queue had been waited for.
        while let Some(first) = self.retiring.front()
            && first.drained <= self.drained
            && first.sweeps <= self.sweeps
        {
            self.free.push(first.holder);
            self.retiring.pop_front();
        }
    }

    /// Makes room in one segment before it must be made in many at once.
    fn stage_rebuild(&mut self) {
        let found = {
            let Some(table) = self.handle.enter() else { return };
            let segments = table.segments();
            let scan = (0..REBUILD_SCAN.min(segments)).map(|step| (self.rebuild_next + step) % segments);
            let mut last = self.rebuild_next;
            let found = scan.inspect(|&segment| last = segment).find(|&segment| table.wants_rebuild(segment));
            self.rebuild_next = (last + 1) % segments;
            found
        };
        if let Some(segment) = found {
            self.handle.append(Op::Rebuild { segment: segment as u32 });
            self.staged += 1;
        }
    }

    /// A queue that is full after so many operations; for tests.
    #[cfg(test)]
    pub(super) fn limit_queue(&mut self, operations: usize) {
        self.queue_max = operations;
    }
}
