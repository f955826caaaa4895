//! How many copies of each block one cache group holds, in order of arrival.
//!
//! A hash table of 32-bit places into a queue of packed entries: measured 20–27 bytes per key at its usual fill,
//! the order of arrival included, which a bounded inventory needs to give up its oldest keys first.

#![forbid(unsafe_code)]

use std::collections::VecDeque;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry as Slot;
use shards::ids::BlockKey;

/// Entries kept in the queue beyond twice the live ones before the dead are swept out.
const DEAD_MIN: usize = 1024;

/// Least room that the queue grows by, in entries.
const GROWTH_MIN: usize = 64;

/// A key (in halves, so that an entry takes 12 bytes and not 16) and its copies; 0 copies = dead.
#[derive(Clone, Copy, Debug)]
struct Entry {
    low: u32,
    high: u32,
    copies: u32,
}

impl Entry {
    fn key(self) -> u64 {
        u64::from(self.high) << 32 | u64::from(self.low)
    }
}

/// What a store or a removal did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The first copy came.
    First,
    /// A further copy came, or one of several went.
    Copy,
    /// The last copy went.
    Last,
    /// A copy went that never came.
    Unknown,
}

/// Copies by key. Never more than 2³² − 1 live keys: the caller bounds it far below.
#[derive(Debug, Default)]
pub(crate) struct CopyCounts {
    /// Places, counted from the queue's very first entry (wrapping), of the live entries.
    places: HashTable<u32>,
    entries: VecDeque<Entry>,
    /// The place of the queue's front.
    front: u32,
    /// Times places were counted anew.
    renumbered: u32,
}

/// How far someone has read the keys, who goes on later.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor {
    place: u32,
    renumbered: u32,
}

/// What is left after some keys were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reading {
    /// More keys.
    More,
    /// Nothing.
    Done,
    /// Places were counted anew: what was read tells nothing of what is left.
    Moved,
}

/// Keys are digest bits already; the multiplication only spreads keys of simulated engines that count up.
pub(super) fn hash(key: u64) -> u64 {
    let mixed = u128::from(key ^ 0x9e37_79b9_7f4a_7c15) * 0xa076_1d64_78bd_642f;
    (mixed >> 64) as u64 ^ mixed as u64
}

fn at(entries: &VecDeque<Entry>, front: u32, place: u32) -> Entry {
    entries[place.wrapping_sub(front) as usize]
}

impl CopyCounts {
    /// Keys with at least one copy.
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    pub(crate) fn contains(&self, key: BlockKey) -> bool {
        let (entries, front) = (&self.entries, self.front);
        self.places.find(hash(key.0), |place| at(entries, front, *place).key() == key.0).is_some()
    }

    /// Reads what a look at the key will read. What comes back means nothing.
    pub(crate) fn touch(&self, key: BlockKey) -> u32 {
        let (entries, front) = (&self.entries, self.front);
        let mut seen = 0;
        let _ = self.places.find(hash(key.0), |place| {
            seen ^= at(entries, front, *place).low;
            false
        });
        seen
    }

    /// Keys with at least one copy, oldest first.
    pub(crate) fn keys(&self) -> impl Iterator<Item = BlockKey> + '_ {
        self.entries.iter().filter(|entry| entry.copies > 0).map(|entry| BlockKey(entry.key()))
    }

    /// Copies of a key.
    pub(crate) fn copies(&self, key: BlockKey) -> u32 {
        let (entries, front) = (&self.entries, self.front);
        let place = self.places.find(hash(key.0), |place| at(entries, front, *place).key() == key.0);
        place.map_or(0, |place| at(entries, front, *place).copies)
    }

    /// Where reading begins.
    pub(crate) fn begin(&self) -> Cursor {
        Cursor { place: self.front, renumbered: self.renumbered }
    }

    /// Reads on, oldest first, over at most `most` places.
    pub(crate) fn read(&self, cursor: &mut Cursor, most: usize, mut each: impl FnMut(BlockKey, u32)) -> Reading {
        if cursor.renumbered != self.renumbered {
            return Reading::Moved;
        }
        // The front may have gone beyond the cursor: what was there is dead.
        let passed = self.front.wrapping_sub(cursor.place);
        let ahead = cursor.place.wrapping_sub(self.front);
        let from = if passed > 0 && passed < ahead { 0 } else { ahead as usize };
        let to = self.entries.len().min(from.saturating_add(most));
        self.entries.range(from.min(to)..to).filter(|entry| entry.copies > 0).for_each(|entry| {
            each(BlockKey(entry.key()), entry.copies);
        });
        cursor.place = self.front.wrapping_add(to as u32);
        if to == self.entries.len() { Reading::Done } else { Reading::More }
    }

    /// So many copies of a key that has none.
    pub(crate) fn set(&mut self, key: BlockKey, copies: u32) {
        if copies > 0
            && self.add(key, false) == Change::First
            && let Some(last) = self.entries.back_mut()
        {
            last.copies = copies;
        }
    }

    /// Forgets a key, however many copies it has; whether it had any.
    pub(crate) fn forget(&mut self, key: BlockKey) -> bool {
        let (entries, front) = (&mut self.entries, self.front);
        let Ok(slot) = self.places.find_entry(hash(key.0), |place| at(entries, front, *place).key() == key.0) else {
            return false;
        };
        entries[slot.get().wrapping_sub(front) as usize].copies = 0;
        slot.remove();
        self.sweep();
        true
    }

    /// One more copy; with `at_least_one`, only if there is none.
    pub(crate) fn add(&mut self, key: BlockKey, at_least_one: bool) -> Change {
        let (entries, front) = (&mut self.entries, self.front);
        let same = |place: &u32| at(entries, front, *place).key() == key.0;
        match self.places.entry(hash(key.0), same, |place| hash(at(entries, front, *place).key())) {
            Slot::Occupied(slot) => {
                let entry = &mut entries[slot.get().wrapping_sub(front) as usize];
                entry.copies = entry.copies.saturating_add(u32::from(!at_least_one));
                Change::Copy
            }
            Slot::Vacant(slot) => {
                slot.insert(front.wrapping_add(entries.len() as u32));
                if entries.len() == entries.capacity() {
                    // Doubling would leave a third of the room unused in the mean.
                    entries.reserve_exact(entries.len() / 8 + GROWTH_MIN);
                }
                entries.push_back(Entry { low: key.0 as u32, high: (key.0 >> 32) as u32, copies: 1 });
                Change::First
            }
        }
    }

    /// One copy less.
    pub(crate) fn remove(&mut self, key: BlockKey) -> Change {
        let (entries, front) = (&mut self.entries, self.front);
        let Ok(slot) = self.places.find_entry(hash(key.0), |place| at(entries, front, *place).key() == key.0) else {
            return Change::Unknown;
        };
        let entry = &mut entries[slot.get().wrapping_sub(front) as usize];
        debug_assert!(entry.copies > 0, "a dead entry has no place");
        entry.copies -= 1;
        if entry.copies > 0 {
            return Change::Copy;
        }
        slot.remove();
        self.sweep();
        Change::Last
    }

    /// Forgets the oldest key, however many copies it has.
    pub(crate) fn remove_oldest(&mut self) -> Option<BlockKey> {
        let key = self.keys().next()?;
        self.forget(key).then_some(key)
    }

    /// The same copies, in the same order, under other keys; what has none is left out.
    pub(crate) fn rekeyed(&self, other: impl Fn(BlockKey) -> Option<BlockKey>) -> CopyCounts {
        let mut counts = CopyCounts::default();
        for entry in self.entries.iter().filter(|entry| entry.copies > 0) {
            let Some(key) = other(BlockKey(entry.key())) else { continue };
            counts.set(key, entry.copies);
        }
        counts
    }

    /// Drops dead entries at the front, and all of them once they outnumber the live ones.
    fn sweep(&mut self) {
        while self.entries.front().is_some_and(|entry| entry.copies == 0) {
            self.entries.pop_front();
            self.front = self.front.wrapping_add(1);
        }
        if self.entries.len() <= 2 * self.places.len() + DEAD_MIN {
            return;
        }
        self.entries.retain(|entry| entry.copies > 0);
        self.entries.shrink_to(2 * self.entries.len());
        self.front = 0;
        self.renumbered = self.renumbered.wrapping_add(1);
        self.places.clear();
        for (place, entry) in self.entries.iter().enumerate() {
            let entries = &self.entries;
            self.places.insert_unique(hash(entry.key()), place as u32, |place| hash(at(entries, 0, *place).key()));
        }
    }

    /// Bytes allocated.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.places.allocation_size() + self.entries.capacity() * size_of::<Entry>()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_key_is_held_until_as_many_copies_went_as_came() {
        let mut counts = CopyCounts::default();
        let key = BlockKey(7);
        assert_eq!(counts.remove(key), Change::Unknown);
        assert_eq!(counts.add(key, false), Change::First);
        assert_eq!(counts.add(key, false), Change::Copy);
        assert_eq!(counts.add(key, true), Change::Copy);
        assert_eq!(counts.remove(key), Change::Copy);
        assert!(counts.contains(key));
        assert_eq!(counts.remove(key), Change::Last);
        assert!(!counts.contains(key));
    }

    #[test]
    fn the_oldest_key_goes_first_and_memory_follows_what_is_held() {
        let mut counts = CopyCounts::default();
        for round in 0..50_u64 {
            for key in 0..1_000 {
                assert_eq!(counts.add(BlockKey(round * 1_000 + key), false), Change::First);
            }
            let expected: Vec<_> = (0..900).map(|key| Some(BlockKey(round * 1_000 + key))).collect();
            let gone: Vec<_> = (0..900).map(|_| counts.remove_oldest()).collect();
            if round == 0 {
                assert_eq!(gone, expected);
            }
        }
        assert_eq!(counts.len(), 5_000);
        assert!(counts.entries.len() <= 2 * counts.len() + DEAD_MIN);
    }

    #[test]
    fn a_key_that_comes_and_goes_for_ever_takes_no_memory() {
        let mut counts = CopyCounts::default();
        counts.add(BlockKey(1), false);
        for _ in 0..100_000 {
            counts.add(BlockKey(2), false);
            counts.remove(BlockKey(2));
        }
        assert!(counts.entries.len() <= 2 + DEAD_MIN + 1, "{}", counts.entries.len());
    }

    #[test]
    fn a_million_keys_take_less_than_thirty_bytes_each() {
        let mut counts = CopyCounts::default();
        for key in 0..1_000_000_u64 {
            counts.add(BlockKey(key.wrapping_mul(0x9e37_79b9_7f4a_7c15)), false);
        }
        let per_key = counts.bytes() as f64 / 1e6;
        eprintln!("copy counts: {per_key:.1} bytes per key at a million keys");
        assert!(per_key <= 30.0, "{per_key}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn behaves_like_a_map_of_counts(steps in prop::collection::vec((0_u8..4, 0_u64..40), 0..4_000)) {
            let mut counts = CopyCounts::default();
            let mut model: HashMap<u64, u32> = HashMap::new();
            for (step, key) in steps {
                match step {
                    0 | 1 => {
                        counts.add(BlockKey(key), step == 1);
                        let copies = model.entry(key).or_insert(0);
                        if step == 0 || *copies == 0 {
                            *copies += 1;
                        }
                    }
                    2 => {
                        counts.remove(BlockKey(key));
                        if let Some(copies) = model.get_mut(&key) {
                            *copies -= 1;
                            if *copies == 0 {
                                model.remove(&key);
                            }
                        }
                    }
                    _ if key == 0 => {
                        let gone = counts.remove_oldest().map(|key| key.0);
                        prop_assert_eq!(gone.is_none(), model.is_empty());
                        if let Some(gone) = gone {
                            prop_assert!(model.remove(&gone).is_some());
                        }
                    }
                    _ => {}
                }
                prop_assert_eq!(counts.len(), model.len());
            }
            let mut held: Vec<u64> = counts.keys().map(|key| key.0).collect();
            let mut expected: Vec<u64> = model.into_keys().collect();
            held.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(held, expected);
        }
    }
}
