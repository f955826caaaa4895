//! A rank's keys, copied in slices while they change, as they are at the moment of the last slice.
//!
//! What was read of a key may be old by the end; so every change meanwhile is remembered with its outcome, and the
//! last one counts. Putting both together is the work of whoever has the time: not of the ingest thread.

#![forbid(unsafe_code)]

use std::collections::HashMap;

use shards::ids::BlockKey;

use super::super::copies::Place;
use super::super::counts::{CopyCounts, Cursor, Reading};
use super::CHANGES_MAX;

/// What a slice came to.
#[derive(Debug)]
pub(crate) enum Progress {
    /// There is more.
    More,
    /// Too much changed meanwhile, or places moved too often.
    GivenUp,
    /// All was read.
    Done(Captured),
}

/// A copy under way.
#[derive(Debug, Default)]
pub(crate) struct Capture {
    read: Captured,
    /// How far the last group was read.
    cursor: Option<Cursor>,
    /// Times a group's places moved.
    moved: u32,
}

/// A group's keys and copies.
pub(super) type Group = (Place, Vec<(u64, u32)>);

/// What was read, and what changed meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Captured {
    groups: Vec<Group>,
    /// Group, key and its copies from then on.
    changes: Vec<(Place, u64, u32)>,
}

impl Capture {
    /// A key's copies changed.
    pub(crate) fn changed(&mut self, group: Place, key: BlockKey, copies: u32) {
        // One more than allowed says that there were too many.
        if self.read.changes.len() <= CHANGES_MAX {
            self.read.changes.push((group, key.0, copies));
        }
    }

    /// Reads on over at most `most` places.
    pub(crate) fn slice(&mut self, groups: &[(Place, CopyCounts)], most: usize) -> Progress {
        const MOVED_MAX: u32 = 8;
        if self.read.changes.len() > CHANGES_MAX || self.moved > MOVED_MAX {
            return Progress::GivenUp;
        }
        let at = match self.cursor {
            Some(_) => self.read.groups.len() - 1,
            None => self.read.groups.len(),
        };
        // Groups are only ever added while a copy is under way: what ends them ends it.
        let Some((id, counts)) = groups.get(at) else { return Progress::Done(std::mem::take(&mut self.read)) };
        if self.cursor.is_none() {
            self.read.groups.push((*id, Vec::new()));
        }
        let cursor = self.cursor.get_or_insert_with(|| counts.begin());
        let keys = &mut self.read.groups[at].1;
        match counts.read(cursor, most, |key, copies| keys.push((key.0, copies))) {
            Reading::More => {}
            Reading::Done => self.cursor = None,
            Reading::Moved => {
                self.moved += 1;
                keys.clear();
                *cursor = counts.begin();
            }
        }
        Progress::More
    }
}

impl Captured {
    /// Keys and copies as they were at the last slice: oldest first, and what changed during the copy last.
    pub(crate) fn into_groups(self) -> Vec<Group> {
        let mut last: HashMap<(Place, u64), (usize, u32)> = HashMap::new();
        for (place, (group, key, copies)) in self.changes.into_iter().enumerate() {
            last.insert((group, key), (place, copies));
        }
        let mut groups = self.groups;
        for (id, keys) in &mut groups {
            keys.retain(|(key, _)| !last.contains_key(&(*id, *key)));
        }
        let mut changed: Vec<_> = last.into_iter().filter(|(_, (_, copies))| *copies > 0).collect();
        changed.sort_unstable_by_key(|(_, (place, _))| *place);
        for ((group, key), (_, copies)) in changed {
            match groups.iter_mut().find(|(id, _)| *id == group) {
                Some((_, keys)) => keys.push((key, copies)),
                None => groups.push((group, vec![(key, copies)])),
            }
        }
        groups
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use shards::inventory::Medium;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

        #[test]
        fn a_copy_made_in_slices_is_what_is_held_at_its_end(
            before in prop::collection::vec((0_u8..3, 0_u64..60), 0..300),
            during in prop::collection::vec((0_u8..6, 0_u64..60), 0..3_000),
            most in 1_usize..40,
        ) {
            let place = |group| Place { medium: Medium::Device, group };
            let mut groups = vec![(place(0), CopyCounts::default()), (place(7), CopyCounts::default())];
            let apply = |groups: &mut Vec<(Place, CopyCounts)>, step: u8, key: u64| {
                let (id, counts) = &mut groups[key as usize % 2];
                let key = BlockKey(key);
                if step % 3 == 2 { counts.remove(key) } else { counts.add(key, step % 3 == 1) };
                (*id, key, counts.copies(key))
            };
            before.into_iter().for_each(|(step, key)| _ = apply(&mut groups, step, key));
            let mut capture = Capture::default();
            for (step, key) in during {
                if step > 3 {
                    match capture.slice(&groups, most) {
                        Progress::Done(captured) => {
                            let expected: BTreeMap<_, _> = groups
                                .iter()
                                .flat_map(|(id, counts)| counts.keys().map(|key| ((id.group, key.0), counts.copies(key))))
                                .collect();
                            let found: Vec<_> = captured.into_groups();
                            let entries = found.iter().map(|(_, keys)| keys.len()).sum::<usize>();
                            let found: BTreeMap<_, _> = found
                                .into_iter()
                                .flat_map(|(id, keys)| keys.into_iter().map(move |(key, copies)| ((id.group, key), copies)))
                                .collect();
                            prop_assert_eq!(entries, found.len(), "each key once");
                            prop_assert_eq!(found, expected);
                            capture = Capture::default();
                        }
                        Progress::GivenUp => capture = Capture::default(),
                        Progress::More => {}
                    }
                } else {
                    let (group, key, copies) = apply(&mut groups, step, key);
                    capture.changed(group, key, copies);
                }
            }
        }
    }

    #[test]
    fn too_many_changes_end_a_copy() {
        let place = Place { medium: Medium::Device, group: 0 };
        let groups = [(place, CopyCounts::default())];
        let mut capture = Capture::default();
        for key in 0..=CHANGES_MAX as u64 {
            capture.changed(place, BlockKey(key), 1);
        }
        assert!(matches!(capture.slice(&groups, 1), Progress::GivenUp));
    }
}
