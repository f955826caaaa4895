//! Blocks that follow one another in prompts, with a row of bits for each holder.
//!
//! A run is made as blocks are stored one after the other: a prompt is then found by its first block, and compared with
//! what stands behind it. **That two keys stand side by side says nothing**: whoever reads compares every key. So a
//! wrong neighbour, from an engine that names a wrong parent, costs an access to memory and nothing else.
//!
//! All of a run lies in one piece of memory, keys from the front and rows from the back, so that a look-up waits for
//! memory once:
//!
//! ```text
//! | live, rows | key 0 | key 1 | … | room | … | row 0 | row 1 |
//! ```
//!
//! The first word has the number of rows above the positions that are alive; a row has its holder's number above the
//! positions that the holder has.
//!
//! **Invariant.** A position is alive while somebody holds its key, and a key is alive in one place of a side. What
//! stands at other positions means nothing; the last one is alive. Rows stand by number of their holder, and none is
//! without a position. A run without a living position is empty, and has no memory.

use crate::ids::BlockKey;

/// Blocks of a run: as many as a row has bits beside its holder.
pub(super) const RUN_MAX: usize = 48;
const POSITIONS: u64 = (1 << RUN_MAX) - 1;
const ONE_ROW: u64 = 1 << RUN_MAX;

/// One run.
#[derive(Clone, Debug, Default)]
pub(super) struct Run(Box<[u64]>);

/// What one holder holds of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row(u64);

impl Row {
    fn new(holder: u16, bits: u64) -> Self {
        Row(u64::from(holder) << RUN_MAX | bits)
    }

    pub(super) fn holder(self) -> u16 {
        (self.0 >> RUN_MAX) as u16
    }

    /// By position; never 0.
    pub(super) fn bits(self) -> u64 {
        self.0 & POSITIONS
    }

    /// Whether the holder has the key at the position.
    pub(super) fn has(self, position: usize) -> bool {
        self.bits() >> position & 1 == 1
    }

    /// How many keys the holder has from the position on without a gap.
    pub(super) fn from(self, position: usize) -> u32 {
        (self.bits() >> position).trailing_ones()
    }
}

/// The rows of a run, by number of their holder.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows<'a>(&'a [u64]);

impl Rows<'_> {
    pub(super) fn len(self) -> usize {
        self.0.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Row> + '_ {
        self.0.iter().map(|row| Row(*row))
    }

    /// Leaves out the rows of lower numbers than the holder's and its own; that one, without a position where there is
    /// none. Most often it is the next one: nothing here depends on more than that.
    pub(super) fn pass(&mut self, holder: u16) -> Row {
        let lower = |row: &u64| Row(*row).holder() < holder;
        if self.0.first().is_some_and(lower) {
            // Far more rows than are asked for are not gone through one by one.
            let skip = match self.0.len() {
                65.. => self.0.partition_point(lower),
                _ => self.0.iter().take_while(|row| lower(row)).count(),
            };
            self.0 = &self.0[skip..];
        }
        let next = Row(self.0.first().copied().unwrap_or(0));
        let own = next.0 != 0 && next.holder() == holder;
        self.0 = &self.0[usize::from(own)..];
        Row(if own { next.0 } else { 0 })
    }
}

impl Run {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Positions whose key somebody holds.
    fn live(&self) -> u64 {
        self.0.first().map_or(0, |first| first & POSITIONS)
    }

    /// How many keys stand here, up to the last that is alive.
    fn len(&self) -> usize {
        (u64::BITS - self.live().leading_zeros()) as usize
    }

    fn rows_len(&self) -> usize {
        self.0.first().map_or(0, |first| (first >> RUN_MAX) as usize)
    }

    /// Where the rows begin.
    fn rows_at(&self) -> usize {
        self.0.len() - self.rows_len()
    }

    /// Whether somebody holds the key, and it stands at the position.
    pub(super) fn is_at(&self, position: usize, key: BlockKey) -> bool {
        position < RUN_MAX && self.live() >> position & 1 == 1 && self.0[1 + position] == key.0
    }

    /// Whether another key can stand at the position.
    pub(super) fn is_free(&self, position: usize) -> bool {
        position <= self.len() && position < RUN_MAX && self.live() >> position & 1 == 0
    }

    /// How many of the keys stand here from the position on, each held by somebody.
    pub(super) fn same(&self, position: usize, keys: &[BlockKey]) -> usize {
        let alive = (self.live() >> position).trailing_ones() as usize;
        let most = alive.min(keys.len());
        let here = self.0.get(1 + position..1 + position + most).unwrap_or_default();
        // Eights are compared without a branch between them.
        let differ = |(here, keys): (&[u64], &[BlockKey])| {
            here.iter().zip(keys).fold(0, |differences, (here, key)| differences | (here ^ key.0)) != 0
        };
        let eights = here.chunks_exact(8).zip(keys.chunks_exact(8));
        let same = 8 * eights.take_while(|eights| !differ(*eights)).count();
        same + here[same..].iter().zip(&keys[same..]).take_while(|(here, key)| **here == key.0).count()
    }

    /// Who holds what.
    pub(super) fn rows(&self) -> Rows<'_> {
        Rows(&self.0[self.rows_at()..])
    }

    /// Keys that somebody holds, with their positions.
    pub(super) fn keys(&self, among: u64) -> impl Iterator<Item = (usize, BlockKey)> + '_ {
        positions(self.live() & among).map(|position| (position, BlockKey(self.0[1 + position])))
    }

    /// Words it takes: what is known without reading them.
    pub(super) fn words(&self) -> usize {
        self.0.len()
    }

    /// Reads a part of every line of the cache that a look-up will. What comes back means nothing.
    pub(super) fn touch(&self) -> u64 {
        self.0.chunks(8).fold(0, |seen, line| seen ^ line[0])
    }

    /// Puts a key that nobody holds at a free position. Where room is made it is for as many keys as are expected in all.
    pub(super) fn put(&mut self, position: usize, key: BlockKey, holder: u16, expected: impl FnOnce() -> usize) {
        let (keys, rows) = (self.len(), self.rows_len());
        if 1 + keys.max(position + 1) + rows > self.0.len() {
            // By half beyond what is seen to come: most runs grow by one block at a time afterwards.
            let room = expected().max(keys + keys / 2).clamp(keys + 1, RUN_MAX);
            self.resize(1 + room + rows.max(1));
        }
        self.0[1 + position] = key.0;
        self.0[0] |= 1 << position;
        self.give(position, holder);
    }

    /// The holder has the key at the position, which is alive.
    pub(super) fn give(&mut self, position: usize, holder: u16) {
        let bit = 1 << position;
        let Err(at) = self.find(holder).map(|at| self.0[at] |= bit) else { return };
        let (mut at, rows) = (at, self.rows_len());
        if 1 + self.len() + rows == self.0.len() {
            let before = self.0.len();
            self.resize(before + 1 + rows / 2);
            at += self.0.len() - before;
        }
        let first = self.rows_at();
        self.0.copy_within(first..at, first - 1);
        self.0[at - 1] = Row::new(holder, bit).0;
        self.0[0] += ONE_ROW;
    }

    /// Where the holder's row stands; else where the next one's does.
    fn find(&self, holder: u16) -> Result<usize, usize> {
        let first = self.rows_at();
        let found = self.0[first..].binary_search_by_key(&holder, |row| Row(*row).holder());
        found.map(|at| first + at).map_err(|at| first + at)
    }

    /// The holder does not have the key at the position; true if now nobody has it who had it.
    pub(super) fn take(&mut self, position: usize, holder: u16) -> bool {
        let bit = 1 << position;
        let Ok(at) = self.find(holder) else { return false };
        if !Row(self.0[at]).has(position) {
            return false;
        }
        self.0[at] &= !bit;
        if Row(self.0[at]).bits() == 0 {
            let first = self.rows_at();
            self.0.copy_within(first..at, first + 1);
            self.0[0] -= ONE_ROW;
        }
        let gone = self.rows().iter().fold(0, |held, row| held | row.bits()) & bit == 0;
        if gone {
            self.0[0] &= !bit;
        }
        self.settle();
        gone
    }

    /// Keeps those holders; the positions that nobody holds any more.
    pub(super) fn retain(&mut self, keep: impl Fn(u16) -> bool) -> u64 {
        let before = self.live();
        let (mut kept, mut live) = (self.0.len(), 0);
        for at in (self.rows_at()..self.0.len()).rev() {
            let row = Row(self.0[at]);
            if keep(row.holder()) {
                live |= row.bits();
                kept -= 1;
                self.0[kept] = row.0;
            }
        }
        if let Some(first) = self.0.len().checked_sub(1) {
            self.0[0] = ((first + 1 - kept) as u64) << RUN_MAX | live;
        }
        self.settle();
        before & !live
    }

    /// Gives back room; an empty run has none.
    fn settle(&mut self) {
        let used = 1 + self.len() + self.rows_len();
        if self.live() == 0 {
            self.0 = Box::default();
        } else if used * 4 < self.0.len() {
            self.resize(used * 2);
        }
    }

    /// Takes so many words, no fewer than are used.
    fn resize(&mut self, words: usize) {
        let mut new = vec![0; words].into_boxed_slice();
        let (front, back) = (if self.0.is_empty() { 0 } else { 1 + self.len() }, self.rows_len());
        new[..front].copy_from_slice(&self.0[..front]);
        new[words - back..].copy_from_slice(&self.0[self.rows_at()..]);
        self.0 = new;
    }
}

/// Positions of the bits, lowest first.
pub(super) fn positions(mut bits: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let position = (bits != 0).then(|| bits.trailing_zeros() as usize);
        bits &= bits.wrapping_sub(1);
        position
    })
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_run_is_a_reference_and_takes_no_memory_while_it_is_empty() {
        assert_eq!(size_of::<Run>(), 16);
        let mut run = Run::default();
        run.put(0, BlockKey(7), 3, || 1);
        assert_eq!(run.words(), 3, "its first word, a key and a row");
        assert!(run.take(0, 3) && run.is_empty());
    }

    #[test]
    fn rows_are_passed_by_rising_numbers_however_many_there_are() {
        for holders in [3_u16, 200] {
            let mut run = Run::default();
            run.put(0, BlockKey(7), 0, || 1);
            (1..holders).for_each(|number| run.give(0, number * 2));
            let mut rows = run.rows();
            let found: Vec<_> = (0..holders * 3).filter(|number| rows.pass(*number).has(0)).collect();
            assert_eq!(found, (0..holders).map(|number| number * 2).collect::<Vec<_>>());
            let mut rows = run.rows();
            assert!(rows.pass(holders * 2 - 2).has(0) && rows.len() == 0 && !rows.pass(u16::MAX).has(0));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Few holders and positions, so that rows come and go, and the single holder changes.
        #[test]
        fn it_behaves_like_sets_of_holders(steps in prop::collection::vec((0_u8..8, 0_usize..RUN_MAX, 0_u16..4), 0..300), wide in any::<bool>()) {
            let mut run = Run::default();
            let mut model: BTreeMap<usize, (u64, BTreeSet<u16>)> = BTreeMap::new();
            for (number, (step, position, holder)) in steps.into_iter().enumerate() {
                let position = if wide { position } else { position % 5 };
                match step {
                    0..4 => {
                        if let Some((_, holders)) = model.get_mut(&position) {
                            run.give(position, holder);
                            holders.insert(holder);
                        } else if run.is_free(position) {
                            run.put(position, BlockKey(number as u64), holder, || position);
                            model.insert(position, (number as u64, BTreeSet::from([holder])));
                        } else {
                            prop_assert!(position > model.keys().next_back().map_or(0, |last| last + 1));
                        }
                    }
                    4..7 => {
                        let held = model.get_mut(&position).is_some_and(|(_, holders)| holders.remove(&holder));
                        let gone = held && model[&position].1.is_empty();
                        prop_assert_eq!(model.contains_key(&position) && run.take(position, holder), gone);
                    }
                    _ => {
                        model.values_mut().for_each(|(_, holders)| _ = holders.remove(&holder));
                        let gone = model.iter().filter(|(_, (_, holders))| holders.is_empty());
                        let gone = gone.fold(0, |gone, (position, _)| gone | 1 << position);
                        prop_assert_eq!(run.retain(|other| other != holder), gone);
                    }
                }
                model.retain(|_, (_, holders)| !holders.is_empty());
                prop_assert_eq!(run.is_empty(), model.is_empty());
                let expected: Vec<_> = model.iter().map(|(position, (key, _))| (*position, BlockKey(*key))).collect();
                prop_assert_eq!(run.keys(u64::MAX).collect::<Vec<_>>(), expected);
                let mut rows: BTreeMap<u16, u64> = BTreeMap::new();
                for (position, (_, holders)) in &model {
                    holders.iter().for_each(|holder| *rows.entry(*holder).or_default() |= 1 << position);
                }
                let rows: Vec<_> = rows.into_iter().map(|(holder, bits)| Row::new(holder, bits)).collect();
                prop_assert_eq!(run.rows().iter().collect::<Vec<_>>(), rows);
                for (position, (key, _)) in &model {
                    let keys: Vec<_> = (*position..RUN_MAX).map_while(|at| model.get(&at)).map(|(key, _)| BlockKey(*key)).collect();
                    prop_assert!(run.is_at(*position, BlockKey(*key)));
                    prop_assert_eq!(run.same(*position, &keys), keys.len());
                    let other = [&keys[..], &[BlockKey(u64::MAX)]].concat();
                    prop_assert_eq!(run.same(*position, &other), keys.len());
                    prop_assert_eq!(run.same(*position, &other[1..]), 0);
                }
            }
        }
    }
}
