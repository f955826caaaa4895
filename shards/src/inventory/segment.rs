//! A part of one side: keys and their sets, 12 bytes each, in one array.
//!
//! A key stands at its home or behind it, with no free slot in between: finding it is most often one access to memory,
//! at a place known beforehand, so that the accesses for many keys overlap when their homes are read first
//! ([`Segment::touch`]). A removal closes its gap, so there are no dead slots, however long keys come and go.
//!
//! The room doubles up to [`ROOM_FULL`], which a segment of [`KEYS_EXPECTED`] keys fills to three quarters; beyond it
//! grows by half.

use super::sets::SetRef;
use crate::ids::BlockKey;

/// Keys a segment is made for.
pub(super) const KEYS_EXPECTED: usize = 5_000;
/// Room for them: a segment of the usual spread (5 times its deviation) above them does not ask for more.
const ROOM_FULL: usize = 6_656;
/// Least room of a segment that has any.
const ROOM_MIN: usize = 13;
/// Smaller segments grow as they please: moving 700 keys is not felt.
const RATIONED_ROOM_MIN: usize = ROOM_FULL >> 3;

/// A key in halves, so that 12 bytes hold it with its set; an empty set marks a slot that is free.
#[derive(Clone, Copy, Debug)]
struct Slot {
    low: u32,
    high: u32,
    set: SetRef,
}

impl Slot {
    const FREE: Slot = Slot { low: 0, high: 0, set: SetRef::EMPTY };

    fn key(&self) -> BlockKey {
        BlockKey(u64::from(self.high) << 32 | u64::from(self.low))
    }
}

/// One segment.
#[derive(Clone, Debug, Default)]
pub(super) struct Segment {
    slots: Box<[Slot]>,
    keys: usize,
}

impl Segment {
    /// Number of keys.
    #[cfg(test)]
    pub(super) fn keys(&self) -> usize {
        self.keys
    }

    /// Slots it has.
    #[cfg(test)]
    pub(super) fn room(&self) -> usize {
        self.slots.len()
    }

    /// Keys with their sets, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (BlockKey, SetRef)> + '_ {
        self.slots.iter().filter(|slot| !slot.set.is_empty()).map(|slot| (slot.key(), slot.set))
    }

    /// The slot where a key of that hash would best be: bits 0 to 31 of it, which no choice of a segment looks at.
    fn home(&self, hash: u64) -> usize {
        ((u64::from(hash as u32) * self.slots.len() as u64) >> 32) as usize
    }

    /// Reads the home of a key of that hash. What comes back means nothing.
    pub(super) fn touch(&self, hash: u64) -> u32 {
        self.slots.get(self.home(hash)).map_or(0, |slot| slot.low)
    }

    /// The place of the key, or the free slot where it would go. There is always a free slot, unless there is none at all.
    fn place(&self, hash: u64, key: BlockKey) -> Option<usize> {
        let mut place = self.home(hash);
        let (low, high) = (key.0 as u32, (key.0 >> 32) as u32);
        loop {
            let slot = self.slots.get(place)?;
            if slot.set.is_empty() || (slot.low == low && slot.high == high) {
                return Some(place);
            }
            place = self.next(place);
        }
    }

    fn next(&self, place: usize) -> usize {
        if place + 1 == self.slots.len() { 0 } else { place + 1 }
    }

    /// The set of a key; the empty one where it is not there.
    pub(super) fn find(&self, hash: u64, key: BlockKey) -> SetRef {
        self.place(hash, key).map_or(SetRef::EMPTY, |place| self.slots[place].set)
    }

    /// Puts another set in the place of the key's; both may be empty. `hash_of` is asked for the hashes of other keys.
    pub(super) fn change(
        &mut self,
        hash: u64,
        key: BlockKey,
        change: impl FnOnce(SetRef) -> SetRef,
        hash_of: impl Fn(BlockKey) -> u64,
    ) {
        let place = self.place(hash, key);
        let old = place.map_or(SetRef::EMPTY, |place| self.slots[place].set);
        let new = change(old);
        match (old.is_empty(), new.is_empty()) {
            (true, true) => {}
            (true, false) => self.insert(place, hash, Slot { set: new, ..slot(key) }, hash_of),
            (false, false) => self.slots[place.expect("a set was found")].set = new,
            (false, true) => self.remove(place.expect("a set was found"), &hash_of),
        }
    }

    fn insert(&mut self, place: Option<usize>, hash: u64, slot: Slot, hash_of: impl Fn(BlockKey) -> u64) {
        let full = (self.keys + 1) * 8 > self.slots.len() * 7;
        let place = place.filter(|_| !full).or_else(|| {
            self.resize(larger(self.slots.len()), hash_of);
            self.place(hash, slot.key())
        });
        self.slots[place.expect("there is room now")] = slot;
        self.keys += 1;
    }

    /// Frees a slot, and moves up what stands behind it only because it was taken.
    fn remove(&mut self, place: usize, hash_of: &impl Fn(BlockKey) -> u64) {
        self.keys -= 1;
        let (mut gap, mut place) = (place, place);
        loop {
            place = self.next(place);
            let slot = self.slots[place];
            if slot.set.is_empty() {
                break;
            }
            let home = self.home(hash_of(slot.key()));
            // Whether the home is not behind the gap, counted around the end.
            let stays = if gap <= place { gap < home && home <= place } else { gap < home || home <= place };
            if !stays {
                self.slots[gap] = slot;
                gap = place;
            }
        }
        self.slots[gap] = Slot::FREE;
    }

    /// Puts another set in the place of every key's.
    pub(super) fn change_all(&mut self, mut change: impl FnMut(SetRef) -> SetRef, hash_of: impl Fn(BlockKey) -> u64) {
        let mut place = 0;
        while place < self.slots.len() {
            let old = self.slots[place].set;
            if !old.is_empty() {
                let new = change(old);
                if new.is_empty() {
                    // What moved here has its turn now; at the end of the array it may have had it before.
                    self.remove(place, &hash_of);
                    continue;
                }
                self.slots[place].set = new;
            }
            place += 1;
        }
    }

    /// Whether it is about to grow by itself, or has far too much room.
    pub(super) fn wants_resize(&self) -> bool {
        let room = self.slots.len();
        room >= RATIONED_ROOM_MIN && (self.keys > content(room) || self.keys * 5 < room)
    }

    /// Gives it the room its keys want.
    pub(super) fn fit(&mut self, hash_of: impl Fn(BlockKey) -> u64) {
        let mut room = 0;
        while self.keys > content(room) {
            room = larger(room);
        }
        self.resize(room, hash_of);
    }

    fn resize(&mut self, room: usize, hash_of: impl Fn(BlockKey) -> u64) {
        let old = std::mem::replace(&mut self.slots, vec![Slot::FREE; room].into_boxed_slice());
        for slot in old.iter().filter(|slot| !slot.set.is_empty()) {
            let place = self.place(hash_of(slot.key()), slot.key()).expect("there is room for all");
            self.slots[place] = *slot;
        }
    }
}

fn slot(key: BlockKey) -> Slot {
    Slot { low: key.0 as u32, high: (key.0 >> 32) as u32, set: SetRef::EMPTY }
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

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_room_doubles_up_to_the_full_one_and_then_grows_by_half() {
        let rooms: Vec<_> = std::iter::successors(Some(0), |room| Some(larger(*room))).take(13).collect();
        assert_eq!(rooms, [0, 13, 26, 52, 104, 208, 416, 832, 1_664, 3_328, 6_656, 9_984, 14_976]);
    }

    #[test]
    fn a_segment_of_the_expected_keys_is_content_with_its_room() {
        let hash_of = |key: BlockKey| key.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        let mut segment = Segment::default();
        for key in 0..KEYS_EXPECTED as u64 + 350 {
            segment.change(hash_of(BlockKey(key)), BlockKey(key), |_| SetRef::of_one(7), hash_of);
        }
        assert_eq!((segment.room(), segment.wants_resize()), (ROOM_FULL, false));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Hashes of few bits, so that keys stand far from home and around the end of the array.
        #[test]
        fn it_behaves_like_a_map(steps in prop::collection::vec((0_u8..8, 0_u64..60, 1_u16..4), 0..600), bits in 0_u32..4) {
            let hash_of = |key: BlockKey| (key.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60 << (28 + bits)) & 0xffff_ffff;
            let mut segment = Segment::default();
            let mut model = HashMap::new();
            for (step, key, holder) in steps {
                let (set, key) = (SetRef::of_one(holder), BlockKey(key));
                match step {
                    0..4 => {
                        segment.change(hash_of(key), key, |_| set, hash_of);
                        model.insert(key.0, set);
                    }
                    4..7 => {
                        segment.change(hash_of(key), key, |_| SetRef::EMPTY, hash_of);
                        model.remove(&key.0);
                    }
                    _ if key.0 < 20 => segment.fit(hash_of),
                    _ => {
                        segment.change_all(|old| if old == set { SetRef::EMPTY } else { old }, hash_of);
                        model.retain(|_, old| *old != set);
                    }
                }
                prop_assert_eq!(segment.keys(), model.len());
                for key in 0..60 {
                    let expected = model.get(&key).copied().unwrap_or(SetRef::EMPTY);
                    prop_assert_eq!(segment.find(hash_of(BlockKey(key)), BlockKey(key)), expected);
                }
            }
            let mut listed: Vec<_> = segment.iter().map(|(key, set)| (key.0, set)).collect();
            let mut expected: Vec<_> = model.into_iter().collect();
            listed.sort_unstable_by_key(|(key, _)| *key);
            expected.sort_unstable_by_key(|(key, _)| *key);
            prop_assert_eq!(listed, expected);
        }
    }
}
