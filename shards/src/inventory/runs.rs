//! Blocks that follow one another in prompts, with a row of bits for each holder.
//!
//! A run is made as blocks are stored one after the other: a prompt is then found by its first block, and compared with
//! what stands behind it. **That two keys stand side by side says nothing**: whoever reads compares every key. So a
//! wrong neighbour, from an engine that names a wrong parent, costs an access to memory and nothing else.
//!
//! **Invariant.** A position is alive while somebody holds its key, and a key is alive in one place of a side. What
//! stands at other positions means nothing; the last one is alive. A run without a living position is empty.

use crate::ids::BlockKey;

/// Blocks of a run: as many as a row has bits.
pub(super) const RUN_MAX: usize = 64;

/// One run; a line of the cache.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(super) struct Run {
    /// Positions whose key somebody holds.
    live: u64,
    keys: Vec<BlockKey>,
    holders: Holders,
}

/// Who holds what of a run.
#[derive(Clone, Debug)]
enum Holders {
    /// One holds all that is alive; of an empty run it is nobody.
    One(u16),
    /// Two or more, by number.
    Many(Vec<Row>),
}

/// What one holder holds of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    /// By position; never 0.
    pub(super) bits: u64,
    pub(super) holder: u16,
}

impl Row {
    pub(super) const NONE: Row = Row { bits: 0, holder: 0 };
}

impl Default for Run {
    fn default() -> Self {
        Run { live: 0, keys: Vec::new(), holders: Holders::One(0) }
    }
}

impl Run {
    pub(super) fn is_empty(&self) -> bool {
        self.live == 0
    }

    /// Positions whose key somebody holds.
    pub(super) fn live(&self) -> u64 {
        self.live
    }

    /// Whether somebody holds the key, and it stands at the position.
    pub(super) fn is_at(&self, position: usize, key: BlockKey) -> bool {
        position < RUN_MAX && self.live >> position & 1 == 1 && self.keys[position] == key
    }

    /// Whether another key can stand at the position.
    pub(super) fn is_free(&self, position: usize) -> bool {
        position <= self.keys.len() && position < RUN_MAX && self.live >> position & 1 == 0
    }

    /// How many of the keys stand here from the position on, each held by somebody.
    pub(super) fn same(&self, position: usize, keys: &[BlockKey]) -> usize {
        let alive = (self.live >> position).trailing_ones() as usize;
        let here = self.keys.get(position..).unwrap_or_default();
        let most = alive.min(keys.len()).min(here.len());
        let mut same = 0;
        // Eights are compared without a branch between them.
        while same + 8 <= most && here[same..same + 8] == keys[same..same + 8] {
            same += 8;
        }
        same + here[same..most].iter().zip(&keys[same..most]).take_while(|(here, key)| here == key).count()
    }

    /// Who holds what, by number; `inline` is room for a single one.
    pub(super) fn rows<'a>(&'a self, inline: &'a mut [Row; 1]) -> &'a [Row] {
        match &self.holders {
            Holders::Many(rows) => rows,
            Holders::One(_) if self.is_empty() => &[],
            Holders::One(holder) => {
                *inline = [Row { bits: self.live, holder: *holder }];
                inline
            }
        }
    }

    /// Keys that somebody holds, with their positions.
    pub(super) fn keys(&self, among: u64) -> impl Iterator<Item = (usize, BlockKey)> + '_ {
        positions(self.live & among).map(|position| (position, self.keys[position]))
    }

    /// Reads a part of every line of the cache that a look-up will. What comes back means nothing.
    pub(super) fn touch(&self) -> u64 {
        let keys = self.keys.iter().step_by(8).fold(0, |seen, key| seen ^ key.0);
        match &self.holders {
            Holders::One(_) => keys,
            Holders::Many(rows) => rows.iter().step_by(4).fold(keys, |seen, row| seen ^ row.bits),
        }
    }

    /// Puts a key that nobody holds at a free position. Where room is made it is for as many keys as are expected in all.
    pub(super) fn put(&mut self, position: usize, key: BlockKey, holder: u16, expected: impl FnOnce() -> usize) {
        if let Some(place) = self.keys.get_mut(position) {
            *place = key;
        } else {
            if self.keys.len() == self.keys.capacity() {
                // By half beyond what is seen to come: most runs grow by one block at a time afterwards.
                let room = expected().max(self.keys.len() + self.keys.len() / 2).clamp(self.keys.len() + 1, RUN_MAX);
                self.keys.reserve_exact(room - self.keys.len());
            }
            self.keys.push(key);
        }
        self.give(position, holder);
    }

    /// The holder has the key at the position.
    pub(super) fn give(&mut self, position: usize, holder: u16) {
        let bits = 1 << position;
        match &mut self.holders {
            Holders::One(only) if *only == holder || self.live == 0 => *only = holder,
            Holders::One(other) => {
                let mut rows = vec![Row { bits: self.live, holder: *other }, Row { bits, holder }];
                rows.sort_unstable_by_key(|row| row.holder);
                self.holders = Holders::Many(rows);
            }
            Holders::Many(rows) => match rows.binary_search_by_key(&holder, |row| row.holder) {
                Ok(at) => rows[at].bits |= bits,
                Err(at) => rows.insert(at, Row { bits, holder }),
            },
        }
        self.live |= bits;
    }

    /// The holder does not have the key at the position; true if now nobody has it who had it.
    pub(super) fn take(&mut self, position: usize, holder: u16) -> bool {
        let bit = 1 << position;
        match &mut self.holders {
            Holders::One(only) if *only == holder => {}
            Holders::One(_) => return false,
            Holders::Many(rows) => {
                let Ok(at) = rows.binary_search_by_key(&holder, |row| row.holder) else { return false };
                if rows[at].bits & bit == 0 {
                    return false;
                }
                rows[at].bits &= !bit;
                if rows[at].bits == 0 {
                    rows.remove(at);
                }
                if rows.iter().any(|row| row.bits & bit != 0) {
                    self.settle();
                    return false;
                }
            }
        }
        let was = self.live & bit != 0;
        self.live &= !bit;
        self.settle();
        was
    }

    /// Keeps those holders; the positions that nobody holds any more.
    pub(super) fn retain(&mut self, keep: impl Fn(u16) -> bool) -> u64 {
        let before = self.live;
        match &mut self.holders {
            Holders::One(only) if keep(*only) => {}
            Holders::One(_) => self.live = 0,
            Holders::Many(rows) => {
                rows.retain(|row| keep(row.holder));
                self.live = rows.iter().fold(0, |live, row| live | row.bits);
            }
        }
        self.settle();
        before & !self.live
    }

    /// Restores the forms that the fields promise, and gives back room.
    fn settle(&mut self) {
        if let Holders::Many(rows) = &mut self.holders {
            match **rows {
                [] | [_] => self.holders = Holders::One(rows.first().map_or(0, |row| row.holder)),
                _ if rows.len() * 4 < rows.capacity() => rows.shrink_to(rows.len() * 2),
                _ => {}
            }
        }
        self.keys.truncate(RUN_MAX - self.live.leading_zeros() as usize);
        if self.keys.len() * 4 < self.keys.capacity() {
            self.keys.shrink_to(self.keys.len() * 2);
        }
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
    fn a_run_is_one_line_of_the_cache() {
        assert_eq!((size_of::<Run>(), align_of::<Run>()), (64, 64));
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
                let rows: Vec<_> = rows.into_iter().map(|(holder, bits)| Row { bits, holder }).collect();
                let mut inline = [Row::NONE];
                prop_assert_eq!(run.rows(&mut inline), rows);
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
