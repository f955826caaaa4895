//! One side of an inventory, and the operations that both sides go through in the same order.
//!
//! **Invariant.** A side changes only by [`Op`]s: what follows from an operation follows from the side's own content,
//! never from a clock or from the other side.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry as TableEntry;

use super::sets::{SetRef, Sets};
use super::{Medium, SPACES_MAX, Space, SpaceIndex};
use crate::ids::{BlockKey, EndpointIndex, HolderIndex, Rank};

/// Fewest segments of a side.
pub(super) const SEGMENTS_MIN: usize = 256;
const SEGMENTS_MAX: usize = 65_536;
/// Keys a segment is made for: 70 % of what 8,192 buckets take, so that a full inventory neither grows nor wastes.
const SEGMENT_KEYS: usize = 5_000;
/// Smaller segments grow as they please: moving 448 keys is not felt.
const RATIONED_BUCKETS_MIN: usize = 512;

/// A change of both sides.
#[derive(Clone, Copy, Debug)]
pub(super) enum Op {
    /// The holder has the key.
    Store { key: BlockKey, holder: HolderIndex },
    /// The holder no longer has the key.
    Remove { key: BlockKey, holder: HolderIndex },
    /// The slot belongs to a new holder.
    Add { holder: HolderIndex, endpoint: EndpointIndex, rank: Rank, medium: Medium, space: SpaceIndex },
    /// What a space that nobody is in means from now on.
    Define { index: SpaceIndex, space: Space },
    /// The holder's blocks count, or do not.
    Eligible { holder: HolderIndex, eligible: bool },
    /// The holder is no more; its keys are swept later.
    Retire { holder: HolderIndex },
    /// Takes the retired holders out of one segment.
    Sweep { segment: u32 },
    /// Gives a segment the room its keys want.
    Rebuild { segment: u32 },
}

/// A holder's place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    pub(super) endpoint: EndpointIndex,
    pub(super) rank: Rank,
    pub(super) medium: Medium,
    pub(super) space: SpaceIndex,
    /// Changes whenever what a walk has seen of the holder stops being worth anything.
    pub(super) generation: u32,
    pub(super) state: SlotState,
}

/// ```text
/// Retired ──Add──▶ Eligible ◀──Eligible──▶ Masked
///    ▲                │                       │
///    └────────────────┴────────Retire─────────┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotState {
    /// In use, counts for routing.
    Eligible,
    /// In use, does not count for routing.
    Masked,
    /// Never used, or retired: nobody's, whatever keys still name it.
    Retired,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: BlockKey,
    set: SetRef,
}

/// A key space and how many slots in use are in it.
#[derive(Clone, Copy, Debug, Default)]
struct SpaceSlot {
    space: Option<Space>,
    holders: u32,
}

/// One side.
#[derive(Clone, Debug)]
pub(super) struct Table {
    /// Makes the places of keys unforeseeable: whoever can choose keys must not be able to pile them up.
    salt: u64,
    segments: Box<[HashTable<Entry>]>,
    pub(super) sets: Sets,
    slots: Vec<Slot>,
    /// By number; the first, the service's own, is unknown here.
    spaces: [SpaceSlot; SPACES_MAX],
    /// Changes with every change of a slot.
    pub(super) slots_version: u64,
}

impl Table {
    pub(super) fn new(blocks_expected: usize, salt: u64) -> Self {
        let segments = blocks_expected.div_ceil(SEGMENT_KEYS).clamp(SEGMENTS_MIN, SEGMENTS_MAX);
        Table {
            salt: salt | 1,
            segments: (0..segments).map(|_| HashTable::new()).collect(),
            sets: Sets::new(),
            slots: Vec::new(),
            spaces: [SpaceSlot::default(); SPACES_MAX],
            slots_version: 0,
        }
    }

    pub(super) fn segments(&self) -> usize {
        self.segments.len()
    }

    pub(super) fn slot(&self, holder: u16) -> Option<&Slot> {
        self.slots.get(usize::from(holder)).filter(|slot| slot.state != SlotState::Retired)
    }

    /// The spaces beside the service's own that somebody is in.
    pub(super) fn other_spaces(&self) -> impl Iterator<Item = (SpaceIndex, Space)> + '_ {
        let used = self.spaces.iter().enumerate().filter(|(_, slot)| slot.holders > 0);
        used.filter_map(|(index, slot)| Some((SpaceIndex(index as u8), slot.space?)))
    }

    /// The space of all slots in use of an endpoint, where they agree.
    pub(super) fn space_of(&self, endpoint: EndpointIndex) -> Option<SpaceIndex> {
        let in_use = self.slots.iter().filter(|slot| slot.state != SlotState::Retired && slot.endpoint == endpoint);
        let mut spaces = in_use.map(|slot| slot.space);
        let first = spaces.next()?;
        spaces.all(|space| space == first).then_some(first)
    }

    /// The holders of a key.
    pub(super) fn find(&self, key: BlockKey) -> SetRef {
        let hash = hash_of(self.salt, key);
        let segment = &self.segments[segment_of(hash, self.segments.len())];
        segment.find(hash, |entry| entry.key == key).map_or(SetRef::EMPTY, |entry| entry.set)
    }

    /// Keys of a segment with their holders, those of retired ones included.
    pub(super) fn segment(&self, segment: usize) -> impl Iterator<Item = (BlockKey, SetRef)> {
        self.segments[segment].iter().map(|entry| (entry.key, entry.set))
    }

    /// Whether the segment is about to grow by itself, or holds far too much room.
    pub(super) fn wants_rebuild(&self, segment: usize) -> bool {
        let table = &self.segments[segment];
        let buckets = table.num_buckets();
        let room = buckets / 8 * 7;
        let left = table.capacity() - table.len();
        buckets >= RATIONED_BUCKETS_MIN && (left * 4 < room || table.len() * 8 < room)
    }

    /// Room of a segment; for tests.
    #[cfg(test)]
    pub(super) fn buckets(&self, segment: usize) -> usize {
        self.segments[segment].num_buckets()
    }

    pub(super) fn apply(&mut self, op: Op) {
        match op {
            Op::Store { key, holder } => self.store(key, holder.0),
            Op::Remove { key, holder } => self.remove(key, holder.0),
            Op::Define { index, space } => {
                let slot = &mut self.spaces[usize::from(index.0)];
                assert_eq!(slot.holders, 0, "a space in use keeps its meaning");
                slot.space = Some(space);
            }
            Op::Add { holder, endpoint, rank, medium, space } => {
                let unused = Slot { endpoint, rank, medium, space, generation: 0, state: SlotState::Retired };
                if self.slots.len() <= holder.index() {
                    self.slots.resize(holder.index() + 1, unused);
                }
                let slot = &mut self.slots[holder.index()];
                assert_eq!(slot.state, SlotState::Retired, "a slot in use is not given away");
                *slot = Slot { generation: slot.generation + 1, state: SlotState::Eligible, ..unused };
                self.spaces[usize::from(space.0)].holders += 1;
                self.slots_version += 1;
            }
            Op::Eligible { holder, eligible } => {
                self.set_state(holder, if eligible { SlotState::Eligible } else { SlotState::Masked });
            }
            Op::Retire { holder } => {
                self.set_state(holder, SlotState::Retired);
                self.spaces[usize::from(self.slots[holder.index()].space.0)].holders -= 1;
            }
            Op::Sweep { segment } => self.sweep(segment as usize),
            Op::Rebuild { segment } => self.rebuild(segment as usize),
        }
    }

    fn set_state(&mut self, holder: HolderIndex, state: SlotState) {
        let slot = &mut self.slots[holder.index()];
        assert_ne!(slot.state, SlotState::Retired, "a retired slot comes back by Add alone");
        slot.state = state;
        slot.generation += 1;
        self.slots_version += 1;
    }

    fn store(&mut self, key: BlockKey, holder: u16) {
        let salt = self.salt;
        let hash = hash_of(salt, key);
        let segment = &mut self.segments[segment_of(hash, self.segments.len())];
        match segment.entry(hash, |entry| entry.key == key, |entry| hash_of(salt, entry.key)) {
            TableEntry::Occupied(mut entry) => {
                let set = entry.get().set;
                entry.get_mut().set = self.sets.with(set, holder);
            }
            TableEntry::Vacant(entry) => {
                let set = self.sets.with(SetRef::EMPTY, holder);
                entry.insert(Entry { key, set });
            }
        }
    }

    fn remove(&mut self, key: BlockKey, holder: u16) {
        let hash = hash_of(self.salt, key);
        let segment = &mut self.segments[segment_of(hash, self.segments.len())];
        let Ok(mut entry) = segment.find_entry(hash, |entry| entry.key == key) else { return };
        let set = self.sets.without(entry.get().set, holder);
        if set.is_empty() {
            entry.remove();
        } else {
            entry.get_mut().set = set;
        }
    }

    fn sweep(&mut self, segment: usize) {
        let Table { segments, sets, slots, .. } = self;
        segments[segment].retain(|entry| {
            entry.set = sets.retain(entry.set, |holder| slots[usize::from(holder)].state != SlotState::Retired);
            !entry.set.is_empty()
        });
    }

    fn rebuild(&mut self, segment: usize) {
        let salt = self.salt;
        let old = &mut self.segments[segment];
        // Just under three quarters of the room stay as large, the rest doubles: see `wants_rebuild`.
        let mut new = HashTable::with_capacity(old.len() / 3 * 4 + old.len() % 3 + 1);
        for entry in old.drain() {
            new.insert_unique(hash_of(salt, entry.key), entry, |entry| hash_of(salt, entry.key));
        }
        *old = new;
    }
}

impl left_right::Absorb<Op> for Table {
    fn absorb_first(&mut self, op: &mut Op, _: &Self) {
        self.apply(*op);
    }

    fn sync_with(&mut self, first: &Self) {
        *self = first.clone();
    }
}

/// Keys are parts of digests already; one multiplication by a number nobody knows is enough on top.
fn hash_of(salt: u64, key: BlockKey) -> u64 {
    let product = u128::from(key.0) * u128::from(salt);
    (product as u64) ^ (product >> 64) as u64
}

/// Bits 25 to 56 of the hash: a table takes its tag from above them and its bucket from below.
fn segment_of(hash: u64, segments: usize) -> usize {
    (((hash >> 25 & 0xffff_ffff) * segments as u64) >> 32) as usize
}
