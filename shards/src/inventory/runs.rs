//! Blocks that follow one another in prompts, with a row of bits for each holder.
//!
//! A run is made as blocks are stored one after the other: a prompt is then found by its first block, and compared with
//! what stands behind it. **That two keys stand side by side says nothing**: whoever reads compares every key. So a
//! wrong neighbour, from an engine that names a wrong parent, costs an access to memory and nothing else.
//!
//! All of a run lies in one piece of memory, keys from the front and rows from the back, so that a look-up waits for
//! memory once (see `arena.rs`):
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

use super::arena::{Arena, LINE, Piece};
use crate::ids::BlockKey;

/// Blocks of a run: as many as a row has bits beside its holder.
pub(super) const RUN_MAX: usize = 48;
const POSITIONS: u64 = (1 << RUN_MAX) - 1;
const ONE_ROW: u64 = 1 << RUN_MAX;

/// One run: where it stands; nowhere while it is empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Run(Option<Piece>);

/// What stands in a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a>(&'a [u64]);

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

impl<'a> View<'a> {
    /// What stands in a piece that a run has.
    pub(super) fn of(arena: &'a Arena, piece: Piece) -> Self {
        View(arena.words(piece))
    }

    /// Positions whose key somebody holds.
    fn live(self) -> u64 {
        self.0.first().map_or(0, |first| first & POSITIONS)
    }

    /// How many keys stand here, up to the last that is alive.
    fn len(self) -> usize {
        (u64::BITS - self.live().leading_zeros()) as usize
    }

    fn rows_len(self) -> usize {
        self.0.first().map_or(0, |first| (first >> RUN_MAX) as usize)
    }

    /// Where the rows begin.
    fn rows_at(self) -> usize {
        self.0.len() - self.rows_len()
    }

    /// Whether somebody holds the key, and it stands at the position.
    pub(super) fn is_at(self, position: usize, key: BlockKey) -> bool {
        position < RUN_MAX && self.live() >> position & 1 == 1 && self.0[1 + position] == key.0
    }

    /// Whether another key can stand at the position.
    pub(super) fn is_free(self, position: usize) -> bool {
        position <= self.len() && position < RUN_MAX && self.live() >> position & 1 == 0
    }

    /// How many of the keys stand here from the position on, each held by somebody.
    pub(super) fn same(self, position: usize, keys: &[BlockKey]) -> usize {
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
    pub(super) fn rows(self) -> Rows<'a> {
        Rows(&self.0[self.rows_at()..])
    }

    /// The key that it begins with, if somebody holds that.
    fn head(self) -> Option<BlockKey> {
        (self.live() & 1 == 1).then(|| BlockKey(self.0[1]))
    }

    /// Keys that somebody holds, with their positions.
    pub(super) fn keys(self, among: u64) -> impl Iterator<Item = (usize, BlockKey)> + 'a {
        positions(self.live() & among).map(|position| (position, BlockKey(self.0[1 + position])))
    }

    /// Reads a part of every line of the cache that a look-up will. What comes back means nothing.
    pub(super) fn touch(self) -> u64 {
        self.0.chunks(LINE).fold(0, |seen, line| seen ^ line[0])
    }

    /// Where the holder's row stands; else where the next one's does.
    fn find(self, holder: u16) -> Result<usize, usize> {
        let first = self.rows_at();
        let found = self.0[first..].binary_search_by_key(&holder, |row| Row(*row).holder());
        found.map(|at| first + at).map_err(|at| first + at)
    }
}

impl Run {
    pub(super) fn is_empty(self) -> bool {
        self.0.is_none()
    }

    /// Where it stands.
    pub(super) fn piece(self) -> Option<Piece> {
        self.0
    }

    pub(super) fn view(self, arena: &Arena) -> View<'_> {
        View(self.0.map_or(&[], |piece| arena.words(piece)))
    }

    /// The key that it begins with, if somebody holds that.
    pub(super) fn head(self, arena: &Arena) -> Option<BlockKey> {
        self.view(arena).head()
    }

    fn words(self, arena: &mut Arena) -> &mut [u64] {
        match self.0 {
            Some(piece) => arena.words_mut(piece),
            None => &mut [],
        }
    }

    /// Puts a key that nobody holds at a free position. Where room is made it is for as many keys as are expected in all.
    pub(super) fn put(
        &mut self,
        arena: &mut Arena,
        position: usize,
        key: BlockKey,
        holder: u16,
        expected: impl FnOnce() -> usize,
    ) {
        let view = self.view(arena);
        let (keys, rows) = (view.len(), view.rows_len());
        if 1 + keys.max(position + 1) + rows.max(1) > view.0.len() {
            // By half beyond what is seen to come: most runs grow by one block at a time afterwards.
            let room = expected().max(keys + keys / 2).clamp(keys + 1, RUN_MAX);
            self.resize(arena, 1 + room + rows.max(1));
        }
        let words = self.words(arena);
        words[1 + position] = key.0;
        words[0] |= 1 << position;
        self.give(arena, position, holder);
    }

    /// The holder has the key at the position, which is alive.
    pub(super) fn give(&mut self, arena: &mut Arena, position: usize, holder: u16) {
        let bit = 1 << position;
        let words = self.words(arena);
        let (view, before) = (View(words), words.len());
        let (used, first) = (1 + view.len() + view.rows_len(), view.rows_at());
        match view.find(holder) {
            Ok(at) => words[at] |= bit,
            Err(at) if used < before => insert_row(words, first, at, Row::new(holder, bit)),
            Err(at) => {
                // Most runs take one line more; very wide ones are not moved for every eighth row.
                self.resize(arena, used + 1 + used / 32);
                let words = self.words(arena);
                let more = words.len() - before;
                insert_row(words, first + more, at + more, Row::new(holder, bit));
            }
        }
    }

    /// The holder does not have the key at the position; true if now nobody has it who had it.
    pub(super) fn take(&mut self, arena: &mut Arena, position: usize, holder: u16) -> bool {
        let (bit, view) = (1 << position, self.view(arena));
        let (Ok(at), first) = (view.find(holder), view.rows_at()) else { return false };
        let words = self.words(arena);
        if !Row(words[at]).has(position) {
            return false;
        }
        words[at] &= !bit;
        if Row(words[at]).bits() == 0 {
            words.copy_within(first..at, first + 1);
            words[0] -= ONE_ROW;
        }
        let gone = self.view(arena).rows().iter().fold(0, |held, row| held | row.bits()) & bit == 0;
        if gone {
            self.words(arena)[0] &= !bit;
        }
        self.settle(arena);
        gone
    }

    /// Keeps those holders; the positions that nobody holds any more.
    pub(super) fn retain(&mut self, arena: &mut Arena, keep: impl Fn(u16) -> bool) -> u64 {
        let view = self.view(arena);
        let (before, first) = (view.live(), view.rows_at());
        let words = self.words(arena);
        let (mut kept, mut live) = (words.len(), 0);
        for at in (first..words.len()).rev() {
            let row = Row(words[at]);
            if keep(row.holder()) {
                live |= row.bits();
                kept -= 1;
                words[kept] = row.0;
            }
        }
        let rows = words.len() - kept;
        if let Some(first) = words.first_mut() {
            *first = (rows as u64) << RUN_MAX | live;
        }
        self.settle(arena);
        before & !live
    }

    /// Gives back room; an empty run has none.
    fn settle(&mut self, arena: &mut Arena) {
        let Run(Some(piece)) = *self else { return };
        let view = self.view(arena);
        let used = 1 + view.len() + view.rows_len();
        if view.live() == 0 {
            arena.give_back(piece);
            *self = Run(None);
        } else if used.div_ceil(LINE) * 2 < view.0.len() / LINE {
            self.resize(arena, used);
        }
    }

    /// Takes room for so many words, no fewer than are used.
    fn resize(&mut self, arena: &mut Arena, words: usize) {
        let lines = words.div_ceil(LINE);
        let view = self.view(arena);
        let (front, back) = (1 + view.len(), view.rows_len());
        *self = Run(Some(match self.0 {
            Some(_) if view.0.len() == lines * LINE => return,
            Some(piece) => arena.move_to(piece, lines, (front, back)),
            None => {
                let piece = arena.take(lines);
                arena.words_mut(piece)[0] = 0;
                piece
            }
        }));
    }
}

/// Puts a row before the one that stands at a place, where the rows begin at `first` and there is room before them.
fn insert_row(words: &mut [u64], first: usize, at: usize, row: Row) {
    words.copy_within(first..at, first - 1);
    words[at - 1] = row.0;
    words[0] += ONE_ROW;
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
        assert_eq!(size_of::<Run>(), 4);
        let (mut arena, mut run) = (Arena::default(), Run::default());
        run.put(&mut arena, 0, BlockKey(7), 3, || 1);
        assert_eq!(run.view(&arena).0.len(), LINE);
        assert!(run.take(&mut arena, 0, 3) && run.is_empty() && arena.is_empty());
    }

    #[test]
    fn rows_are_passed_by_rising_numbers_however_many_there_are() {
        for holders in [3_u16, 200] {
            let (mut arena, mut run) = (Arena::default(), Run::default());
            run.put(&mut arena, 0, BlockKey(7), 0, || 1);
            (1..holders).for_each(|number| run.give(&mut arena, 0, number * 2));
            let mut rows = run.view(&arena).rows();
            let found: Vec<_> = (0..holders * 3).filter(|number| rows.pass(*number).has(0)).collect();
            assert_eq!(found, (0..holders).map(|number| number * 2).collect::<Vec<_>>());
            let mut rows = run.view(&arena).rows();
            assert!(rows.pass(holders * 2 - 2).has(0) && rows.len() == 0 && !rows.pass(u16::MAX).has(0));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Few holders and positions, so that rows come and go, and the single holder changes.
        #[test]
        fn it_behaves_like_sets_of_holders(steps in prop::collection::vec((0_u8..8, 0_usize..RUN_MAX, 0_u16..4), 0..300), wide in any::<bool>()) {
            let (mut arena, mut run) = (Arena::default(), Run::default());
            let mut model: BTreeMap<usize, (u64, BTreeSet<u16>)> = BTreeMap::new();
            for (number, (step, position, holder)) in steps.into_iter().enumerate() {
                let position = if wide { position } else { position % 5 };
                match step {
                    0..4 => {
                        if let Some((_, holders)) = model.get_mut(&position) {
                            run.give(&mut arena, position, holder);
                            holders.insert(holder);
                        } else if run.view(&arena).is_free(position) {
                            run.put(&mut arena, position, BlockKey(number as u64), holder, || position);
                            model.insert(position, (number as u64, BTreeSet::from([holder])));
                        } else {
                            prop_assert!(position > model.keys().next_back().map_or(0, |last| last + 1));
                        }
                    }
                    4..7 => {
                        let held = model.get_mut(&position).is_some_and(|(_, holders)| holders.remove(&holder));
                        let gone = held && model[&position].1.is_empty();
                        prop_assert_eq!(model.contains_key(&position) && run.take(&mut arena, position, holder), gone);
                    }
                    _ => {
                        model.values_mut().for_each(|(_, holders)| _ = holders.remove(&holder));
                        let gone = model.iter().filter(|(_, (_, holders))| holders.is_empty());
                        let gone = gone.fold(0, |gone, (position, _)| gone | 1 << position);
                        prop_assert_eq!(run.retain(&mut arena, |other| other != holder), gone);
                    }
                }
                model.retain(|_, (_, holders)| !holders.is_empty());
                prop_assert_eq!(run.is_empty(), model.is_empty());
                prop_assert_eq!(arena.is_empty(), model.is_empty());
                prop_assert_eq!(run.head(&arena), model.get(&0).map(|(key, _)| BlockKey(*key)));
                let expected: Vec<_> = model.iter().map(|(position, (key, _))| (*position, BlockKey(*key))).collect();
                prop_assert_eq!(run.view(&arena).keys(u64::MAX).collect::<Vec<_>>(), expected);
                let mut rows: BTreeMap<u16, u64> = BTreeMap::new();
                for (position, (_, holders)) in &model {
                    holders.iter().for_each(|holder| *rows.entry(*holder).or_default() |= 1 << position);
                }
                let rows: Vec<_> = rows.into_iter().map(|(holder, bits)| Row::new(holder, bits)).collect();
                prop_assert_eq!(run.view(&arena).rows().iter().collect::<Vec<_>>(), rows);
                for (position, (key, _)) in &model {
                    let keys: Vec<_> = (*position..RUN_MAX).map_while(|at| model.get(&at)).map(|(key, _)| BlockKey(*key)).collect();
                    prop_assert!(run.view(&arena).is_at(*position, BlockKey(*key)));
                    prop_assert_eq!(run.view(&arena).same(*position, &keys), keys.len());
                    let other = [&keys[..], &[BlockKey(u64::MAX)]].concat();
                    prop_assert_eq!(run.view(&arena).same(*position, &other), keys.len());
                    prop_assert_eq!(run.view(&arena).same(*position, &other[1..]), 0);
                }
            }
        }
    }
}
