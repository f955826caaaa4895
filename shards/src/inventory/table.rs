//! One side of an inventory, and the operations that both sides go through in the same order.
//!
//! **Invariant.** A side changes only by [`Op`]s: what follows from an operation follows from the side's own content,
//! never from a clock or from the other side.

use super::segment::{KEYS_EXPECTED, Segment};
use super::sets::{SetRef, Sets};
use super::{Medium, SPACES_MAX, Space, SpaceIndex};
use crate::ids::{BlockKey, EndpointIndex, HolderIndex, Rank};

/// Fewest segments of a side.
pub(super) const SEGMENTS_MIN: usize = 256;
const SEGMENTS_MAX: usize = 65_536;
/// Keys whose places are read ahead of their turn, so that the accesses to memory overlap.
const AHEAD: usize = 32;

/// A store or a removal.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    pub(super) key: BlockKey,
    pub(super) holder: HolderIndex,
    /// The holder has the key from now on; else it no longer has it.
    pub(super) held: bool,
}

/// A change of both sides.
#[derive(Clone, Debug)]
pub(super) enum Op {
    /// Stores and removals, in order.
    Changes(Box<[Change]>),
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
    segments: Box<[Segment]>,
    pub(super) sets: Sets,
    slots: Vec<Slot>,
    /// By number; the first, the service's own, is unknown here.
    spaces: [SpaceSlot; SPACES_MAX],
    /// Changes with every change of a slot.
    pub(super) slots_version: u64,
}

impl Table {
    pub(super) fn new(blocks_expected: usize, salt: u64) -> Self {
        let segments = blocks_expected.div_ceil(KEYS_EXPECTED).clamp(SEGMENTS_MIN, SEGMENTS_MAX);
        Table {
            salt: salt | 1,
            segments: (0..segments).map(|_| Segment::default()).collect(),
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
        self.segments[segment_of(hash, self.segments.len())].find(hash, key)
    }

    /// Reads the places of keys that are about to be looked up or changed.
    pub(super) fn touch(&self, keys: impl Iterator<Item = BlockKey>) {
        let touch = |sum: u32, key| {
            let hash = hash_of(self.salt, key);
            sum ^ self.segments[segment_of(hash, self.segments.len())].touch(hash)
        };
        std::hint::black_box(keys.fold(0, touch));
    }

    /// Keys of a segment with their holders, those of retired ones included.
    pub(super) fn segment(&self, segment: usize) -> impl Iterator<Item = (BlockKey, SetRef)> {
        self.segments[segment].iter()
    }

    /// Whether the segment is about to grow by itself, or holds far too much room.
    pub(super) fn wants_rebuild(&self, segment: usize) -> bool {
        self.segments[segment].wants_resize()
    }

    /// Room of a segment; for tests.
    #[cfg(test)]
    pub(super) fn room(&self, segment: usize) -> usize {
        self.segments[segment].room()
    }

    pub(super) fn apply(&mut self, op: &Op) {
        match *op {
            Op::Changes(ref changes) => self.change(changes),
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

    fn change(&mut self, changes: &[Change]) {
        for some in changes.chunks(AHEAD) {
            self.touch(some.iter().map(|change| change.key));
            for Change { key, holder, held } in some {
                let Table { salt, segments, sets, .. } = self;
                let hash = hash_of(*salt, *key);
                let set = |set| if *held { sets.with(set, holder.0) } else { sets.without(set, holder.0) };
                segments[segment_of(hash, segments.len())].change(hash, *key, set, |key| hash_of(*salt, key));
            }
        }
    }

    fn sweep(&mut self, segment: usize) {
        let Table { salt, segments, sets, slots, .. } = self;
        let kept = |set| sets.retain(set, |holder| slots[usize::from(holder)].state != SlotState::Retired);
        segments[segment].change_all(kept, |key| hash_of(*salt, key));
    }

    fn rebuild(&mut self, segment: usize) {
        self.segments[segment].fit(|key| hash_of(self.salt, key));
    }
}

impl left_right::Absorb<Op> for Table {
    fn absorb_first(&mut self, op: &mut Op, _: &Self) {
        self.apply(op);
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

/// The upper half of the hash: a segment takes a key's home from the lower one.
fn segment_of(hash: u64, segments: usize) -> usize {
    (((hash >> 32) * segments as u64) >> 32) as usize
}
