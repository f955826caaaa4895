//! One side of an inventory, and the operations that both sides go through in the same order.
//!
//! **Invariant.** A side changes only by [`Op`]s: what follows from an operation follows from the side's own content,
//! never from a clock or from the other side.

use super::arena::{Arena, Piece};
use super::runs::{RUN_MAX, Run, View, positions};
use super::slots::{KEYS_EXPECTED, Place, RUNS_MAX, SEGMENTS_MAX, Slots, Vacant};
use super::{Medium, SPACES_MAX, Space, SpaceIndex};
use crate::ids::{BlockKey, EndpointIndex, HolderIndex, Rank};

/// Fewest segments of a side.
pub(super) const SEGMENTS_MIN: usize = 256;
/// Keys whose places are read ahead of their turn, so that the accesses to memory overlap.
const AHEAD: usize = 32;

/// One step of what an engine stores and evicts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    pub(super) key: BlockKey,
    /// Nobody in particular where it is not said who has the key.
    pub(super) holder: HolderIndex,
    pub(super) what: What,
}

/// What a change is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// The holder has the key from now on. It follows the key of the change before, in prompts.
    Store,
    /// The holder no longer has the key.
    Remove,
    /// The next key stored follows this one.
    Follow,
    /// The next key stored follows none.
    Begin,
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

/// A part of one side: the slots of the keys whose hashes belong here, and the runs whose first key did.
#[derive(Clone, Debug, Default)]
struct Segment {
    /// Of all keys.
    slots: Slots<Place>,
    /// Once more of those that a run begins with, with the run's memory. There are few of them, and most look-ups need no
    /// others.
    heads: Slots<Piece>,
    runs: Vec<Run>,
    /// Empty runs.
    free: Vec<u32>,
}

/// Where a key stands, most likely: in which run's memory, at which position.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spot {
    piece: Piece,
    position: u8,
}

impl Spot {
    /// So many positions before; none where the run does not reach there.
    pub(super) fn before(self, positions: usize) -> Option<Self> {
        let position = self.position.checked_sub(u8::try_from(positions).ok()?)?;
        Some(Spot { position, ..self })
    }

    pub(super) fn position(self) -> usize {
        self.position.into()
    }
}

/// One side.
#[derive(Clone, Debug)]
pub(super) struct Table {
    /// Makes the places of keys unforeseeable: whoever can choose keys must not be able to pile them up.
    salt: u64,
    segments: Box<[Segment]>,
    /// What the segments' runs stand in.
    arena: Arena,
    slots: Vec<Slot>,
    /// By number; the first, the service's own, is unknown here.
    spaces: [SpaceSlot; SPACES_MAX],
    /// Changes with every change of a slot.
    pub(super) slots_version: u64,
    /// Where the key of the last change stood then.
    near: Option<Place>,
    /// The key that the next one stored follows; the last change's.
    before: Option<BlockKey>,
}

impl Table {
    pub(super) fn new(blocks_expected: usize, salt: u64) -> Self {
        let segments = blocks_expected.div_ceil(KEYS_EXPECTED).clamp(SEGMENTS_MIN, SEGMENTS_MAX);
        Table {
            salt: salt | 1,
            segments: (0..segments).map(|_| Segment::default()).collect(),
            arena: Arena::default(),
            slots: Vec::new(),
            spaces: [SpaceSlot::default(); SPACES_MAX],
            slots_version: 0,
            near: None,
            before: None,
        }
    }

    pub(super) fn segments(&self) -> usize {
        self.segments.len()
    }

    pub(super) fn slot(&self, holder: u16) -> Option<&Slot> {
        self.slots.get(usize::from(holder)).filter(|slot| slot.state != SlotState::Retired)
    }

    /// The slots by number, those of nobody included.
    pub(super) fn slots(&self) -> &[Slot] {
        &self.slots
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

    /// Where a key stands that somebody holds.
    pub(super) fn find(&self, key: BlockKey) -> Option<Place> {
        self.find_hashed(hash_of(self.salt, key), key).ok()
    }

    fn find_hashed(&self, hash: u64, key: BlockKey) -> Result<Place, Vacant> {
        let there = |place: Place| self.view(place).is_at(place.position(), key);
        self.segment(hash).slots.find(hash, there)
    }

    /// What stands in the run of a place.
    fn view(&self, place: Place) -> View<'_> {
        self.run(place).view(&self.arena)
    }

    fn run(&self, place: Place) -> Run {
        self.segments[place.segment()].runs[place.run()]
    }

    /// What stands where a spot is.
    pub(super) fn view_at(&self, spot: Spot) -> View<'_> {
        View::of(&self.arena, spot.piece)
    }

    /// The spot of a place.
    pub(super) fn spot(&self, place: Place) -> Option<Spot> {
        Some(Spot { piece: self.run(place).piece()?, position: place.position() as u8 })
    }

    /// Where a key is that somebody holds.
    pub(super) fn find_spot(&self, key: BlockKey) -> Option<Spot> {
        self.spot(self.find(key)?)
    }

    /// Whether one of these holders has the key.
    pub(super) fn is_held(&self, key: BlockKey, by: impl Fn(u16) -> bool) -> bool {
        self.find(key).is_some_and(|place| {
            self.view(place).rows().iter().any(|row| row.has(place.position()) && by(row.holder()))
        })
    }

    /// The beginning of a run that most likely begins with the key: it may be another's. None where no run does.
    pub(super) fn guess_head(&self, key: BlockKey) -> Option<Spot> {
        let hash = hash_of(self.salt, key);
        self.segment(hash).heads.guess(hash).map(|piece| Spot { piece, position: 0 })
    }

    /// Where a key stands, most likely: it may be another's place. None where nobody holds it.
    pub(super) fn guess(&self, key: BlockKey) -> Option<Place> {
        let hash = hash_of(self.salt, key);
        self.segment(hash).slots.guess(hash)
    }

    /// Reads the slots of keys that are about to be looked up or changed, so that the accesses to memory overlap.
    pub(super) fn touch(&self, keys: impl Iterator<Item = BlockKey>) {
        let touch = |seen, key| {
            let hash = hash_of(self.salt, key);
            seen ^ self.segment(hash).slots.touch(hash)
        };
        std::hint::black_box(keys.fold(0, touch));
    }

    /// Keys of a segment's runs that one of these holders has, each once in all segments together.
    pub(super) fn keys_of(&self, segment: usize, by: impl Fn(u16) -> bool) -> impl Iterator<Item = BlockKey> {
        self.segments[segment].runs.iter().flat_map(move |run| {
            let run = run.view(&self.arena);
            let held = run.rows().iter().filter(|row| by(row.holder())).fold(0, |held, row| held | row.bits());
            run.keys(held).map(|(_, key)| key)
        })
    }

    /// Whether the segment is about to grow by itself, or holds far too much room.
    pub(super) fn wants_rebuild(&self, segment: usize) -> bool {
        let Segment { slots, heads, .. } = &self.segments[segment];
        slots.wants_resize() || heads.wants_resize()
    }

    /// Room of a segment; for tests.
    #[cfg(test)]
    pub(super) fn room(&self, segment: usize) -> usize {
        self.segments[segment].slots.room()
    }

    /// Whether no key is left in any slot or run; for tests.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        let empty = |segment: &Segment| {
            segment.slots.is_empty()
                && segment.heads.is_empty()
                && segment.runs.iter().all(|run| run.is_empty())
                && segment.runs.len() == segment.free.len()
        };
        self.segments.iter().all(empty) && self.arena.is_empty()
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
        for (at, change) in changes.iter().enumerate() {
            if at % AHEAD == 0 {
                self.touch(changes[at..].iter().take(AHEAD).map(|change| change.key));
            }
            match change.what {
                What::Store => self.store(change, &changes[at + 1..]),
                What::Remove => self.remove(change),
                What::Follow => (self.near, self.before) = (self.find(change.key), Some(change.key)),
                What::Begin => (self.near, self.before) = (None, None),
            }
        }
    }

    /// Where a key stands that is held: most often beside the one before. Else where its slot would be.
    fn find_near(&self, hash: u64, key: BlockKey) -> Result<Place, Vacant> {
        if let Some(near) = self.near {
            let (run, position) = (self.view(near), near.position());
            for beside in [position + 1, position, position.wrapping_sub(1)] {
                if run.is_at(beside, key) {
                    return Ok(near.at(beside));
                }
            }
        }
        self.find_hashed(hash, key)
    }

    fn store(&mut self, change: &Change, next: &[Change]) {
        let hash = hash_of(self.salt, change.key);
        let place = match self.find_near(hash, change.key) {
            Ok(place) => {
                self.give(place, change.holder.0);
                Some(place)
            }
            Err(vacant) => self.store_anew(hash, vacant, change, next),
        };
        (self.near, self.before) = (place, Some(change.key));
    }

    /// Places a key that nobody holds behind the one before, else in a run of its own. None, and the store is dropped,
    /// where there is no room for one more run.
    fn store_anew(&mut self, hash: u64, vacant: Vacant, change: &Change, next: &[Change]) -> Option<Place> {
        let Change { key, holder, .. } = *change;
        let place = match self.behind() {
            Some(place) => place,
            None => self.new_run(hash)?,
        };
        let more = || {
            let same = |next: &&Change| next.what == What::Store && next.holder == holder;
            place.position() + 1 + next.iter().take(RUN_MAX).take_while(same).count()
        };
        self.change_run(place, |run, arena| run.put(arena, place.position(), key, holder.0, more));
        self.segment_mut(hash).slots.insert(vacant, hash, place);
        Some(place)
    }

    /// One more holder has the key at a place. What a run begins with is not changed by that: most stores look no further.
    fn give(&mut self, place: Place, holder: u16) {
        let Table { segments, arena, .. } = self;
        let run = &mut segments[place.segment()].runs[place.run()];
        let before = run.piece();
        run.give(arena, place.position(), holder);
        if run.piece() != before {
            let (after, head) = (run.piece(), run.head(arena));
            self.note_head(head.zip(before), head.zip(after));
        }
    }

    /// Changes a run, and has its beginning found where it is from then on.
    fn change_run<R>(&mut self, place: Place, change: impl FnOnce(&mut Run, &mut Arena) -> R) -> R {
        let Table { segments, arena, .. } = self;
        let run = &mut segments[place.segment()].runs[place.run()];
        let (before, begun) = (run.piece(), run.head(arena));
        let result = change(run, arena);
        let (after, begins) = (run.piece(), run.head(arena));
        if (before, begun) != (after, begins) {
            self.note_head(begun.zip(before), begins.zip(after));
        }
        result
    }

    /// A run began with a key and stood somewhere, and now does so with the same key or none, or the other way round.
    fn note_head(&mut self, before: Option<(BlockKey, Piece)>, after: Option<(BlockKey, Piece)>) {
        let Some((key, _)) = before.or(after) else { return };
        let hash = hash_of(self.salt, key);
        let heads = &mut self.segment_mut(hash).heads;
        match (before, after) {
            (Some((_, from)), Some((_, to))) => heads.moved(hash, from, to),
            (Some((_, from)), None) => heads.remove(hash, from),
            (None, Some((_, to))) => heads.add(hash, to),
            (None, None) => {}
        }
    }

    /// The place behind the key of the change before, where that is held and the place is free.
    fn behind(&self) -> Option<Place> {
        let (before, place) = (self.before?, self.near?);
        let (run, position) = (self.view(place), place.position());
        (run.is_at(position, before) && run.is_free(position + 1)).then(|| place.at(position + 1))
    }

    fn new_run(&mut self, hash: u64) -> Option<Place> {
        let number = segment_of(hash, self.segments.len());
        let segment = &mut self.segments[number];
        let run = match segment.free.pop() {
            Some(run) => run as usize,
            None if segment.runs.len() < RUNS_MAX => {
                segment.runs.push(Run::default());
                segment.runs.len() - 1
            }
            None => return None,
        };
        Some(Place::new(number, run, 0))
    }

    fn remove(&mut self, Change { key, holder, .. }: &Change) {
        let hash = hash_of(self.salt, *key);
        let Ok(place) = self.find_near(hash, *key) else { return };
        (self.near, self.before) = (Some(place), None);
        if self.change_run(place, |run, arena| run.take(arena, place.position(), holder.0)) {
            self.segment_mut(hash).slots.remove(hash, place);
            self.reclaim(place);
        }
    }

    /// Gives a run back that is empty.
    fn reclaim(&mut self, place: Place) {
        if self.run(place).is_empty() {
            self.segments[place.segment()].free.push(place.run() as u32);
        }
    }

    fn segment(&self, hash: u64) -> &Segment {
        &self.segments[segment_of(hash, self.segments.len())]
    }

    fn segment_mut(&mut self, hash: u64) -> &mut Segment {
        &mut self.segments[segment_of(hash, self.segments.len())]
    }

    fn sweep(&mut self, segment: usize) {
        for run in 0..self.segments[segment].runs.len() {
            let place = Place::new(segment, run, 0);
            if self.run(place).is_empty() {
                continue;
            }
            let mut keys = [BlockKey(0); RUN_MAX];
            self.view(place).keys(u64::MAX).for_each(|(position, key)| keys[position] = key);
            // Out of the way while runs are changed by what it says.
            let slots = std::mem::take(&mut self.slots);
            let stays = |holder: u16| slots[usize::from(holder)].state != SlotState::Retired;
            let gone = self.change_run(place, |run, arena| run.retain(arena, stays));
            self.slots = slots;
            for position in positions(gone) {
                let hash = hash_of(self.salt, keys[position]);
                self.segment_mut(hash).slots.remove(hash, place.at(position));
            }
            self.reclaim(place);
        }
    }

    fn rebuild(&mut self, segment: usize) {
        let Segment { slots, heads, .. } = &mut self.segments[segment];
        if slots.wants_resize() {
            slots.fit();
        }
        if heads.wants_resize() {
            heads.fit();
        }
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
