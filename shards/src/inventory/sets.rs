//! Sets of holders in 4 bytes each.
//!
//! **Invariant.** Within one side, two [`SetRef`]s are equal exactly when their sets are: a single holder stands in
//! the value itself; a larger set is stored once however many keys have it. So a walk sees at a glance that
//! the next block is held by the same holders as the last, which is the usual case inside a shared prefix.
//!
//! Large sets are counted and given back with their last key. They are spread over [`PARTS`] tables by content, so that
//! no single table grows large enough for its growth to be felt.

use hashbrown::HashTable;

/// A set, or the empty one. Meaningless on the other side and after the guard it was read through.
///
/// 0 is empty, 1 to 65,535 a single holder (its number and 1), anything above part and index of a stored set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SetRef(u32);

/// Holders that fit into the value itself.
pub(super) const INLINE_MAX: usize = 1;
/// Tables that larger sets are spread over.
const PARTS: usize = 256;
/// References from here on are to stored sets.
const LARGE: u32 = 1 << 16;
/// Sets that a part has room for: 2²⁴ less those whose references would be taken for holders.
const PART_SETS_MAX: usize = (1 << 24) - (LARGE as usize / PARTS);

impl SetRef {
    /// The set of no holder.
    pub(super) const EMPTY: SetRef = SetRef(0);

    pub(super) fn is_empty(self) -> bool {
        self == SetRef::EMPTY
    }

    /// The set of one holder, of which there are at most 65,535.
    pub(super) fn of_one(holder: u16) -> Self {
        debug_assert!(usize::from(holder) < super::HOLDERS_MAX);
        SetRef(u32::from(holder) + 1)
    }

    fn large(part: usize, index: u32) -> Self {
        SetRef(LARGE + (index << 8 | part as u32))
    }

    /// Part and index of a stored set.
    fn place(self) -> Option<(usize, usize)> {
        let place = self.0.checked_sub(LARGE)?;
        Some((place as usize % PARTS, (place >> 8) as usize))
    }
}

/// The large sets of one side.
#[derive(Clone, Debug)]
pub(super) struct Sets {
    parts: Box<[Part]>,
    /// The set being made; kept for its memory.
    scratch: Vec<u16>,
    /// The last change of each kind: an engine stores and evicts runs of blocks, and all of a run go from one set to
    /// another. Never mentions a set that is not in use.
    grown: Option<Change>,
    shrunk: Option<Change>,
}

#[derive(Clone, Copy, Debug)]
struct Change {
    from: SetRef,
    holder: u16,
    to: SetRef,
}

impl Change {
    fn mentions(&self, set: SetRef) -> bool {
        self.from == set || self.to == set
    }
}

#[derive(Clone, Debug, Default)]
struct Part {
    sets: Vec<Large>,
    /// Places in `sets` that are not in use.
    free: Vec<u32>,
    /// Places in `sets` by content.
    index: HashTable<Place>,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    hash: u32,
    index: u32,
}

#[derive(Clone, Debug, Default)]
struct Large {
    /// Sorted.
    holders: Box<[u16]>,
    /// Keys that have the set.
    keys: u32,
    hash: u32,
}

impl Sets {
    pub(super) fn new() -> Self {
        Sets { parts: (0..PARTS).map(|_| Part::default()).collect(), scratch: Vec::new(), grown: None, shrunk: None }
    }

    /// The holders of the set, sorted; `inline` is room for those that stand in the reference.
    pub(super) fn holders<'a>(&'a self, set: SetRef, inline: &'a mut [u16; INLINE_MAX]) -> &'a [u16] {
        match set.place() {
            Some((part, index)) => &self.parts[part].sets[index].holders,
            None => {
                *inline = [set.0.wrapping_sub(1) as u16];
                &inline[..usize::from(!set.is_empty())]
            }
        }
    }

    /// The set with the holder. The key that had `set` has the result instead.
    pub(super) fn with(&mut self, set: SetRef, holder: u16) -> SetRef {
        if set.is_empty() {
            return SetRef::of_one(holder);
        }
        if let Some(to) = self.again(self.grown, set, holder) {
            return to;
        }
        self.load(set);
        let Err(place) = self.scratch.binary_search(&holder) else { return set };
        self.scratch.insert(place, holder);
        let to = self.made();
        self.grown = Some(Change { from: set, holder, to });
        self.release(set);
        to
    }

    /// The set without the holder. The key that had `set` has the result instead.
    pub(super) fn without(&mut self, set: SetRef, holder: u16) -> SetRef {
        if let Some(to) = self.again(self.shrunk, set, holder) {
            return to;
        }
        self.load(set);
        let Ok(place) = self.scratch.binary_search(&holder) else { return set };
        self.scratch.remove(place);
        let to = self.made();
        self.shrunk = Some(Change { from: set, holder, to });
        self.release(set);
        to
    }

    /// The set without those that are not to be kept. The key that had `set` has the result instead.
    pub(super) fn retain(&mut self, set: SetRef, keep: impl Fn(u16) -> bool) -> SetRef {
        if self.holders(set, &mut [0; INLINE_MAX]).iter().all(|&holder| keep(holder)) {
            return set;
        }
        self.load(set);
        self.scratch.retain(|&holder| keep(holder));
        let to = self.made();
        self.release(set);
        to
    }

    fn load(&mut self, set: SetRef) {
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        scratch.extend_from_slice(self.holders(set, &mut [0; INLINE_MAX]));
        self.scratch = scratch;
    }

    /// The result of a change, if it is one that was made last.
    fn again(&mut self, last: Option<Change>, set: SetRef, holder: u16) -> Option<SetRef> {
        let to = last.filter(|change| change.from == set && change.holder == holder)?.to;
        if let Some((part, index)) = to.place() {
            self.parts[part].sets[index].keys += 1;
        }
        self.release(set);
        Some(to)
    }

    /// The set in `scratch`, for one more key.
    fn made(&mut self) -> SetRef {
        match *self.scratch {
            [] => SetRef::EMPTY,
            [holder] => SetRef::of_one(holder),
            _ => self.take_large(),
        }
    }

    /// One key fewer has the set.
    fn release(&mut self, set: SetRef) {
        let Some((part, index)) = set.place() else { return };
        if self.give_back(part, index) {
            for last in [&mut self.grown, &mut self.shrunk] {
                *last = last.filter(|change| !change.mentions(set));
            }
        }
    }

    fn take_large(&mut self) -> SetRef {
        let (part_number, hash) = content_hash(&self.scratch);
        let part = &mut self.parts[part_number];
        let same = |place: &Place| place.hash == hash && *part.sets[place.index as usize].holders == *self.scratch;
        if let Some(place) = part.index.find(spread(hash), same) {
            let index = place.index;
            part.sets[index as usize].keys += 1;
            return SetRef::large(part_number, index);
        }
        let large = Large { holders: self.scratch.as_slice().into(), keys: 1, hash };
        let index = match part.free.pop() {
            Some(index) => {
                part.sets[index as usize] = large;
                index
            }
            None => {
                part.sets.push(large);
                // Sets are far fewer in any memory this could run in: 200 GB of them at the least.
                assert!(part.sets.len() <= PART_SETS_MAX, "no memory has room for so many sets");
                (part.sets.len() - 1) as u32
            }
        };
        part.index.insert_unique(spread(hash), Place { hash, index }, |place| spread(place.hash));
        SetRef::large(part_number, index)
    }

    /// True if it was the last key that had the set.
    fn give_back(&mut self, part: usize, index: usize) -> bool {
        let part = &mut self.parts[part];
        let large = &mut part.sets[index];
        large.keys -= 1;
        if large.keys > 0 {
            return false;
        }
        let hash = std::mem::take(large).hash;
        match part.index.find_entry(spread(hash), |place| place.index as usize == index) {
            Ok(entry) => drop(entry.remove()),
            Err(_) => unreachable!("a set in use is in the index"),
        }
        part.free.push(index as u32);
        true
    }

    /// Large sets in use; for tests.
    #[cfg(test)]
    pub(super) fn large_sets(&self) -> usize {
        self.parts.iter().map(|part| part.index.len()).sum()
    }
}

/// Part that a set belongs to, and its hash inside the part.
fn content_hash(holders: &[u16]) -> (usize, u32) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for four in holders.chunks(4) {
        let word = four.iter().fold(0, |word, &holder| word << 16 | u64::from(holder));
        let product = u128::from(state ^ word) * 0xd1b5_4a32_d192_ed03_u128;
        state = (product as u64) ^ (product >> 64) as u64;
    }
    (((state >> 32) as usize) % PARTS, state as u32)
}

/// The 64 bits that a table wants: it takes its place from the low ones and its tag from the high ones.
fn spread(hash: u32) -> u64 {
    u64::from(hash) | u64::from(hash) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(sets: &mut Sets, holders: &[u16]) -> SetRef {
        holders.iter().fold(SetRef::EMPTY, |set, &holder| sets.with(set, holder))
    }

    fn list(sets: &Sets, set: SetRef) -> Vec<u16> {
        sets.holders(set, &mut [0; INLINE_MAX]).to_vec()
    }

    #[test]
    fn equal_sets_are_equal_references_whatever_the_order_they_grew_in() {
        let mut sets = Sets::new();
        for holders in [&[7][..], &[0, 65_534], &[3, 2, 1], &[9, 4, 65_534, 0], &[5, 4, 3, 2, 1, 0]] {
            let forward = of(&mut sets, holders);
            let mut backward: Vec<u16> = holders.to_vec();
            backward.reverse();
            assert_eq!(of(&mut sets, &backward), forward, "{holders:?}");
            backward.sort_unstable();
            assert_eq!(list(&sets, forward), backward);
        }
    }

    #[test]
    fn a_change_made_before_is_not_repeated_from_a_set_that_was_freed_since() {
        let mut sets = Sets::new();
        let (first, second) = (of(&mut sets, &[1, 2, 3, 4]), of(&mut sets, &[1, 2, 3, 4]));
        let (first, second) = (sets.with(first, 5), sets.with(second, 5));
        assert_eq!((first == second, sets.large_sets()), (true, 1));
        // The place of {1, 2, 3, 4} is free: whoever takes it must not be mistaken for it.
        let other = of(&mut sets, &[6, 7, 8, 9]);
        let other = sets.with(other, 5);
        assert_eq!(list(&sets, other), [5, 6, 7, 8, 9]);
        let (first, second) = (sets.without(first, 1), sets.without(second, 1));
        assert_eq!((list(&sets, first), list(&sets, second)), (vec![2, 3, 4, 5], vec![2, 3, 4, 5]));
        assert_eq!(sets.large_sets(), 2);
    }

    #[test]
    fn a_large_set_is_freed_with_its_last_key_and_shrinks_back_into_the_reference() {
        let mut sets = Sets::new();
        let first = of(&mut sets, &[1, 2, 3, 4]);
        let second = of(&mut sets, &[4, 3, 2, 1]);
        assert_eq!(sets.large_sets(), 1);
        let first = sets.without(first, 2);
        assert_eq!((list(&sets, first), sets.large_sets()), (vec![1, 3, 4], 2));
        let first = sets.without(first, 1);
        let first = sets.without(first, 4);
        assert_eq!((list(&sets, first), sets.large_sets()), (vec![3], 1));
        assert_eq!(sets.without(second, 9), second);
        let second = sets.retain(second, |holder| holder > 4);
        assert!(second.is_empty());
        assert_eq!(sets.large_sets(), 0);
    }
}
