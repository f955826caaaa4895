//! Where the keys of a segment stand: 8 bytes for each, in one array.
//!
//! A slot is taken at its home or behind it, with no free slot in between: finding a key is most often one access to
//! memory, at a place known beforehand, so that the accesses for many keys overlap when their homes are read first
//! ([`Slots::touch`]). A removal closes its gap, so there are no dead slots, however long keys come and go.
//!
//! A slot has a part of its key's hash, which tells its home, and where the key stands, for whoever looks for it to
//! compare.
//!
//! The room doubles up to [`ROOM_FULL`], which a segment of [`KEYS_EXPECTED`] keys fills to three quarters; beyond it
//! grows by half.

use std::marker::PhantomData;

use super::arena::Piece;

/// Keys a segment is made for.
pub(super) const KEYS_EXPECTED: usize = 5_000;
/// Room for them: a segment of the usual spread (5 times its deviation) above them does not ask for more.
const ROOM_FULL: usize = 6_656;
/// Least room of a segment that has any.
const ROOM_MIN: usize = 13;
/// Smaller segments grow as they please: moving 700 keys is not felt.
const RATIONED_ROOM_MIN: usize = ROOM_FULL >> 3;

const POSITION_BITS: u32 = 6;
const RUN_BITS: u32 = 19;
const SEGMENT_BITS: u32 = 16;
/// One more is set in every place.
const PLACE_BITS: u32 = POSITION_BITS + RUN_BITS + SEGMENT_BITS + 1;
/// What is left of 64.
const HASH_BITS: u32 = u64::BITS - PLACE_BITS;

/// Runs of a segment; a store that needs one more is dropped.
pub(super) const RUNS_MAX: usize = 1 << RUN_BITS;
/// Segments of a side.
pub(super) const SEGMENTS_MAX: usize = 1 << SEGMENT_BITS;

/// A position of a run of a segment; never 0. Meaningless on the other side and after the guard it was read through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(u64);

impl Place {
    pub(super) fn new(segment: usize, run: usize, position: usize) -> Self {
        debug_assert!(segment < SEGMENTS_MAX && run < RUNS_MAX && position < 1 << POSITION_BITS);
        Place(1 << (PLACE_BITS - 1) | ((segment << RUN_BITS | run) << POSITION_BITS | position) as u64)
    }

    pub(super) fn segment(self) -> usize {
        (self.0 >> (POSITION_BITS + RUN_BITS)) as usize % SEGMENTS_MAX
    }

    pub(super) fn run(self) -> usize {
        (self.0 >> POSITION_BITS) as usize % RUNS_MAX
    }

    pub(super) fn position(self) -> usize {
        (self.0 % (1 << POSITION_BITS)) as usize
    }

    /// Another position of the same run.
    pub(super) fn at(self, position: usize) -> Self {
        debug_assert!(position < 1 << POSITION_BITS);
        Place(self.0 >> POSITION_BITS << POSITION_BITS | position as u64)
    }
}

/// What a slot says of where its key stands.
pub(super) trait Whereabouts: Copy {
    /// No more than [`PLACE_BITS`], and not 0.
    fn to_bits(self) -> u64;
    /// What those bits are of.
    fn of_bits(bits: u64) -> Self;
}

impl Whereabouts for Place {
    fn to_bits(self) -> u64 {
        self.0
    }

    fn of_bits(bits: u64) -> Self {
        Place(bits)
    }
}

/// Of keys that a run begins with: the run's memory, at hand.
impl Whereabouts for Piece {
    fn to_bits(self) -> u64 {
        const { assert!(Piece::BITS < PLACE_BITS) };
        1 << (PLACE_BITS - 1) | u64::from(self.number())
    }

    fn of_bits(bits: u64) -> Self {
        Piece::of_number(bits as u32).expect("what a slot has came from a piece")
    }
}

/// A part of a hash and where its key stands; 0 is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot(u64);

impl Slot {
    const FREE: Slot = Slot(0);

    /// Bits 10 to 31 of the hash, which no choice of a segment looks at.
    fn new(hash: u64, place: impl Whereabouts) -> Self {
        Slot(part_of(hash) << PLACE_BITS | place.to_bits())
    }

    fn is_free(self) -> bool {
        self == Slot::FREE
    }

    fn hash(self) -> u64 {
        self.0 >> PLACE_BITS
    }

    fn place<W: Whereabouts>(self) -> W {
        W::of_bits(self.0 & ((1 << PLACE_BITS) - 1))
    }
}

/// A free slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Vacant(usize);

/// The slots of one segment.
#[derive(Clone, Debug)]
pub(super) struct Slots<W> {
    slots: Box<[Slot]>,
    keys: usize,
    of: PhantomData<W>,
}

impl<W> Default for Slots<W> {
    fn default() -> Self {
        Slots { slots: Box::default(), keys: 0, of: PhantomData }
    }
}

impl<W: Whereabouts> Slots<W> {
    /// Slots it has.
    #[cfg(test)]
    pub(super) fn room(&self) -> usize {
        self.slots.len()
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.keys == 0 && self.slots.iter().all(|slot| slot.is_free())
    }

    /// The slot where a key with that part of a hash would best be.
    fn home(&self, part: u64) -> usize {
        ((part * self.slots.len() as u64) >> HASH_BITS) as usize
    }

    fn next(&self, at: usize) -> usize {
        if at + 1 == self.slots.len() { 0 } else { at + 1 }
    }

    /// Reads the home of a key of that hash. What comes back means nothing.
    pub(super) fn touch(&self, hash: u64) -> u64 {
        self.slots.get(self.home(part_of(hash))).map_or(0, |slot| slot.0)
    }

    /// The place of a key of that hash: the one that is looked for, unless another's hash looks like it.
    pub(super) fn guess(&self, hash: u64) -> Option<W> {
        self.find(hash, |_| true).ok()
    }

    /// The place of the key of that hash which `is_there`; else where its slot would be.
    pub(super) fn find(&self, hash: u64, is_there: impl Fn(W) -> bool) -> Result<W, Vacant> {
        let part = part_of(hash);
        let mut at = self.home(part);
        // There is always a free slot, unless there is none at all.
        while let Some(slot) = self.slots.get(at).filter(|slot| !slot.is_free()) {
            if slot.hash() == part && is_there(slot.place()) {
                return Ok(slot.place());
            }
            at = self.next(at);
        }
        Err(Vacant(at))
    }

    /// Takes up a key that was not found, and nothing has changed since.
    pub(super) fn insert(&mut self, vacant: Vacant, hash: u64, place: W) {
        self.keys += 1;
        if self.keys * 8 > self.slots.len() * 7 {
            self.resize(larger(self.slots.len()));
            self.take_free(Slot::new(hash, place));
        } else {
            self.slots[vacant.0] = Slot::new(hash, place);
        }
    }

    fn take_free(&mut self, slot: Slot) {
        let mut at = self.home(slot.hash());
        while !self.slots[at].is_free() {
            at = self.next(at);
        }
        self.slots[at] = slot;
    }

    /// Takes up a key that is not there.
    pub(super) fn add(&mut self, hash: u64, place: W) {
        let mut at = self.home(part_of(hash));
        while self.slots.get(at).is_some_and(|slot| !slot.is_free()) {
            at = self.next(at);
        }
        self.insert(Vacant(at), hash, place);
    }

    /// Where a slot is that somebody took up.
    fn where_is(&self, slot: Slot) -> Option<usize> {
        let mut at = self.home(slot.hash());
        while self.slots[at] != slot {
            debug_assert!(!self.slots[at].is_free(), "what is asked for is there");
            if self.slots[at].is_free() {
                return None;
            }
            at = self.next(at);
        }
        Some(at)
    }

    /// The key that is there stands elsewhere now.
    pub(super) fn moved(&mut self, hash: u64, from: W, to: W) {
        let Some(at) = self.where_is(Slot::new(hash, from)) else { return };
        self.slots[at] = Slot::new(hash, to);
    }

    /// Frees the slot of a key that is there, and moves up what stands behind it only because it was taken.
    pub(super) fn remove(&mut self, hash: u64, place: W) {
        let Some(mut at) = self.where_is(Slot::new(hash, place)) else { return };
        self.keys -= 1;
        let mut gap = at;
        loop {
            at = self.next(at);
            let slot = self.slots[at];
            if slot.is_free() {
                break;
            }
            let home = self.home(slot.hash());
            // Whether the home is not behind the gap, counted around the end.
            let stays = if gap <= at { gap < home && home <= at } else { gap < home || home <= at };
            if !stays {
                self.slots[gap] = slot;
                gap = at;
            }
        }
        self.slots[gap] = Slot::FREE;
    }

    /// Whether it is about to grow by itself, or has far too much room.
    pub(super) fn wants_resize(&self) -> bool {
        let room = self.slots.len();
        room >= RATIONED_ROOM_MIN && (self.keys > content(room) || self.keys * 5 < room)
    }

    /// Gives it the room its keys want.
    pub(super) fn fit(&mut self) {
        let mut room = 0;
        while self.keys > content(room) {
            room = larger(room);
        }
        self.resize(room);
    }

    fn resize(&mut self, room: usize) {
        let old = std::mem::replace(&mut self.slots, vec![Slot::FREE; room].into_boxed_slice());
        old.iter().filter(|slot| !slot.is_free()).for_each(|slot| self.take_free(*slot));
    }
}

fn part_of(hash: u64) -> u64 {
    u64::from(hash as u32) >> (u32::BITS - HASH_BITS)
}

/// Keys beyond which it should grow: early, since all segments grow at about the same time and one a publish is given
/// its turn; full ones are as large as they are meant to be.
fn content(room: usize) -> usize {
    room * if room < ROOM_FULL { 10 } else { 13 } / 16
}

/// The room after that one.
fn larger(room: usize) -> usize {
    if room >= ROOM_FULL {
        return room + room / 2;
    }
    let rooms = (0..).map(|halvings| ROOM_FULL >> halvings).take_while(|&room| room >= ROOM_MIN);
    rooms.filter(|&other| other > room).last().unwrap_or(ROOM_FULL)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::collections::hash_map::Entry;

    use proptest::prelude::*;

    use super::*;

    fn place(number: u64) -> Place {
        Place::new(number as usize % SEGMENTS_MAX, number as usize * 7 % RUNS_MAX, number as usize % 64)
    }

    fn insert(slots: &mut Slots<Place>, hash: u64, place: Place) {
        let vacant = slots.find(hash, |other| other == place).expect_err("it is not there");
        slots.insert(vacant, hash, place);
    }

    #[test]
    fn a_place_keeps_its_parts_apart() {
        for (segment, run, position) in [(0, 0, 0), (SEGMENTS_MAX - 1, RUNS_MAX - 1, 63), (258, 70_000, 5)] {
            let place = Place::new(segment, run, position);
            assert_eq!((place.segment(), place.run(), place.position()), (segment, run, position));
            assert_eq!(place.at(17), Place::new(segment, run, 17));
            let slot = Slot::new(u64::MAX, place);
            assert_eq!((slot.place::<Place>(), slot.hash()), (place, (1 << HASH_BITS) - 1));
        }
    }

    #[test]
    fn the_room_doubles_up_to_the_full_one_and_then_grows_by_half() {
        let rooms: Vec<_> = std::iter::successors(Some(0), |room| Some(larger(*room))).take(13).collect();
        assert_eq!(rooms, [0, 13, 26, 52, 104, 208, 416, 832, 1_664, 3_328, 6_656, 9_984, 14_976]);
    }

    #[test]
    fn a_segment_of_the_expected_keys_is_content_with_its_room() {
        let mut slots = Slots::default();
        for key in 0..KEYS_EXPECTED as u64 + 350 {
            insert(&mut slots, key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20, place(key));
        }
        assert_eq!((slots.room(), slots.wants_resize()), (ROOM_FULL, false));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Hashes of few bits, so that keys stand far from home and around the end of the array.
        #[test]
        fn it_behaves_like_a_map(steps in prop::collection::vec((0_u8..8, 0_u64..60), 0..600), bits in 0_u32..4) {
            let hash_of = |key: u64| (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60 << (28 + bits)) & 0xffff_ffff;
            let mut slots = Slots::default();
            let mut model = HashMap::new();
            for (step, key) in steps {
                match step {
                    0..2 => if let Entry::Vacant(entry) = model.entry(key) {
                        insert(&mut slots, hash_of(key), *entry.insert(place(key)));
                    },
                    2..4 => if let Entry::Vacant(entry) = model.entry(key) {
                        slots.add(hash_of(key), *entry.insert(place(key)));
                    },
                    4..6 => if let Some(place) = model.remove(&key) {
                        slots.remove(hash_of(key), place);
                    },
                    6 => if let Some(known) = model.get_mut(&key) {
                        let other = if *known == place(key) { place(key + 60) } else { place(key) };
                        slots.moved(hash_of(key), std::mem::replace(known, other), other);
                    },
                    _ => slots.fit(),
                }
                prop_assert_eq!(slots.keys, model.len());
                for key in 0..60 {
                    let own = |other| other == place(key) || other == place(key + 60);
                    prop_assert_eq!(slots.find(hash_of(key), own).ok(), model.get(&key).copied());
                }
            }
        }
    }
}
