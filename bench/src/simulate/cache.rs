//! A simulated engine's cache of blocks.
//!
//! **Invariant.** What is held of the segments is closed under prefixes: a segment is held only behind whole ones. So it
//! is as with engines: a request that ends gives its blocks back last block first, a block is given up when it was not
//! used for longest, and blocks of requests under way are not given up at all.

use super::prefixes::{Prefixes, Segment};

const NONE: u32 = u32::MAX;

/// A change of what a cache holds: so many blocks of the segment now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    pub segment: Segment,
    pub held: u32,
}

/// The cache of one engine.
#[derive(Clone, Debug)]
pub struct Cache {
    capacity: u64,
    /// Blocks held, being computed or set aside for answers.
    used: u64,
    /// Blocks that could be given up.
    idle: u64,
    slots: Vec<Slot>,
    /// Least and most recently used of the idle segments.
    oldest: u32,
    newest: u32,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    held: u32,
    /// Requests under way that use it.
    users: u32,
    older: u32,
    newer: u32,
}

/// What a request takes of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Blocks of its prompt that were there.
    pub hit_blocks: u32,
    /// Blocks for the rest of its prompt and its answer that nobody else can use.
    pub own_blocks: u64,
}

impl Cache {
    /// An empty cache of so many blocks.
    pub fn new(capacity: u64, segments: usize) -> Self {
        let slot = Slot { held: 0, users: 0, older: NONE, newer: NONE };
        Cache { capacity, used: 0, idle: 0, slots: vec![slot; segments], oldest: NONE, newest: NONE }
    }

    /// Blocks held, being computed or set aside for answers.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Blocks of the path that are held from its beginning on.
    pub fn matched(&self, prefixes: &Prefixes, path: &[Segment]) -> u32 {
        matched(prefixes, path, |segment| self.slots[segment.index()].held)
    }

    /// Lets a request in: its held blocks are kept, and room is made for the `more` blocks that it needs beside those of
    /// its path. None, and nothing changes, where there is no room.
    pub fn admit(
        &mut self,
        prefixes: &Prefixes,
        path: &[Segment],
        more: u64,
        changes: &mut Vec<Change>,
    ) -> Option<Taken> {
        let hit_blocks = self.matched(prefixes, path);
        let whole: u64 = path.iter().map(|segment| u64::from(prefixes.blocks(*segment))).sum();
        let wanted = whole - u64::from(hit_blocks) + more;
        path.iter().for_each(|segment| self.pin(*segment));
        if self.used + wanted > self.capacity + self.idle {
            path.iter().rev().for_each(|segment| self.unpin(*segment));
            return None;
        }
        while self.used + wanted > self.capacity {
            self.give_up(self.used + wanted - self.capacity, changes);
        }
        self.used += wanted;
        Some(Taken { hit_blocks, own_blocks: more })
    }

    /// The prompt of a request that was let in has been computed: all of its path is held.
    pub fn store(&mut self, prefixes: &Prefixes, path: &[Segment], changes: &mut Vec<Change>) {
        for &segment in path {
            let (slot, blocks) = (&mut self.slots[segment.index()], prefixes.blocks(segment));
            if slot.held < blocks {
                slot.held = blocks;
                changes.push(Change { segment, held: blocks });
            }
        }
    }

    /// The request has ended.
    pub fn finish(&mut self, path: &[Segment], taken: Taken) {
        path.iter().rev().for_each(|segment| self.unpin(*segment));
        self.used -= taken.own_blocks;
    }

    /// Forgets everything; nothing may be under way.
    pub fn clear(&mut self) {
        debug_assert!(self.slots.iter().all(|slot| slot.users == 0), "a request is under way");
        *self = Cache::new(self.capacity, self.slots.len());
    }

    fn give_up(&mut self, most: u64, changes: &mut Vec<Change>) {
        let at = self.oldest;
        let slot = &mut self.slots[at as usize];
        let blocks = u64::from(slot.held).min(most) as u32;
        slot.held -= blocks;
        let held = slot.held;
        self.used -= u64::from(blocks);
        self.idle -= u64::from(blocks);
        changes.push(Change { segment: Segment(at), held });
        if held == 0 {
            self.unlink(at);
        }
    }

    fn pin(&mut self, segment: Segment) {
        let slot = &mut self.slots[segment.index()];
        slot.users += 1;
        if slot.users == 1 && slot.held > 0 {
            self.idle -= u64::from(slot.held);
            self.unlink(segment.0);
        }
    }

    fn unpin(&mut self, segment: Segment) {
        let slot = &mut self.slots[segment.index()];
        slot.users -= 1;
        if slot.users == 0 && slot.held > 0 {
            self.idle += u64::from(slot.held);
            self.link(segment.0);
        }
    }

    fn link(&mut self, at: u32) {
        let newest = std::mem::replace(&mut self.newest, at);
        let slot = &mut self.slots[at as usize];
        (slot.older, slot.newer) = (newest, NONE);
        match newest {
            NONE => self.oldest = at,
            _ => self.slots[newest as usize].newer = at,
        }
    }

    fn unlink(&mut self, at: u32) {
        let Slot { older, newer, .. } = self.slots[at as usize];
        match older {
            NONE => self.oldest = newer,
            _ => self.slots[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            _ => self.slots[newer as usize].older = older,
        }
    }
}

/// Blocks of a path held from its beginning on, where `held` says how many of a segment's are.
pub fn matched(prefixes: &Prefixes, path: &[Segment], held: impl Fn(Segment) -> u32) -> u32 {
    let mut blocks = 0;
    for &segment in path {
        let here = held(segment);
        blocks += here;
        if here < prefixes.blocks(segment) {
            break;
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::ingest::fleet::Rng;

    fn prefixes(prompts: &[&[u64]]) -> Prefixes {
        Prefixes::new(prompts.iter().copied())
    }

    /// Lets a request in, computes and ends it; its hits.
    fn serve(cache: &mut Cache, prefixes: &Prefixes, prompt: usize) -> Option<u32> {
        let mut changes = Vec::new();
        let path = prefixes.path(prompt);
        let taken = cache.admit(prefixes, path, 0, &mut changes)?;
        cache.store(prefixes, path, &mut changes);
        cache.finish(path, taken);
        Some(taken.hit_blocks)
    }

    #[test]
    fn what_was_not_used_for_longest_goes_first_and_last_blocks_before_first_ones() {
        let prefixes = prefixes(&[&[1, 2, 3, 4], &[5, 6, 7], &[1, 2], &[8, 9]]);
        let mut cache = Cache::new(8, prefixes.len());
        assert_eq!(serve(&mut cache, &prefixes, 0), Some(0));
        assert_eq!(serve(&mut cache, &prefixes, 1), Some(0));
        assert_eq!(serve(&mut cache, &prefixes, 2), Some(2), "1 2 are the newest now");
        // 7 of 8 are used: one has to go, the last of 1 2 3 4.
        assert_eq!(serve(&mut cache, &prefixes, 3), Some(0));
        assert_eq!([0, 1, 2].map(|prompt| cache.matched(&prefixes, prefixes.path(prompt))), [3, 3, 2]);
        // 4 needs one more: 3 is older than all, and it is the request's own; so one of 5 6 7 goes.
        assert_eq!(serve(&mut cache, &prefixes, 0), Some(3));
        assert_eq!([0, 1].map(|prompt| cache.matched(&prefixes, prefixes.path(prompt))), [4, 2]);
    }

    #[test]
    fn requests_under_way_keep_their_blocks_and_one_that_finds_no_room_changes_nothing() {
        let prefixes = prefixes(&[&[1, 2, 3], &[4, 5]]);
        let mut cache = Cache::new(6, prefixes.len());
        let mut changes = Vec::new();
        let taken = cache.admit(&prefixes, prefixes.path(0), 2, &mut changes).expect("room");
        assert_eq!(taken, Taken { hit_blocks: 0, own_blocks: 2 });
        cache.store(&prefixes, prefixes.path(0), &mut changes);
        assert_eq!(cache.admit(&prefixes, prefixes.path(1), 0, &mut changes), None);
        assert_eq!(changes.len(), 1);
        cache.finish(prefixes.path(0), taken);
        assert_eq!(serve(&mut cache, &prefixes, 1), Some(0));
        assert_eq!(cache.matched(&prefixes, prefixes.path(0)), 3, "3 + 2 of 6");
    }

    /// The same by block, obviously: time of last use, oldest and then last block first.
    #[test]
    fn it_is_an_lru_of_blocks() {
        let mut rng = Rng::new(7);
        let prompts: Vec<Vec<u64>> = (0..60)
            .map(|_| {
                let group = rng.below(4) as u64;
                (0..1 + rng.below(6) as u64).map(|place| if place < 2 { group } else { rng.below(2) as u64 }).collect()
            })
            .collect();
        let prefixes = Prefixes::new(prompts.iter().map(Vec::as_slice));
        let (capacity, mut cache) = (20, Cache::new(20, prefixes.len()));
        let mut model: BTreeMap<&[u64], (usize, usize)> = BTreeMap::new();
        for time in 0..2_000 {
            let prompt = rng.below(prompts.len());
            let blocks = &prompts[prompt];
            let hits = (1..=blocks.len()).take_while(|depth| model.contains_key(&blocks[..*depth])).count();
            for depth in 1..=blocks.len() {
                model.insert(&blocks[..depth], (time, usize::MAX - depth));
            }
            while model.len() > capacity {
                let oldest = model.iter().min_by_key(|(_, used)| **used).map(|(block, _)| *block).expect("one");
                model.remove(oldest);
            }
            assert_eq!(serve(&mut cache, &prefixes, prompt), Some(hits as u32), "request {time}");
        }
    }
}
