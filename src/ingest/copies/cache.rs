//! The cache of one rank: copies by medium and group, and the keys that they are counted by.

#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::hash::BuildHasherDefault;

use shards::ids::BlockKey;
use shards::inventory::Medium;

use super::super::calibrate::{Calibrator, Way};
use super::super::counts::{Change, CopyCounts};
use super::super::derived::{KeyHasher, OwnKeys};
use super::super::persist::Capture;
use super::Place;

/// The cache of one rank: copies by medium and group.
#[derive(Debug, Default)]
pub(super) struct Cache {
    pub(super) groups: Vec<(Place, CopyCounts)>,
    /// Media beside device memory that it has had blocks in: each has a holder.
    pub(super) media: Vec<Medium>,
    /// Tokens per block of the blocks that enter.
    pub(super) block_tokens: u32,
    /// Finds out how the engine makes its keys; none where the rule is simply believed.
    pub(super) calibrator: Option<Calibrator>,
    /// The gateway's own keys, kept until the engine's are proved.
    pub(super) own: OwnKeys,
    /// Copies are counted by own keys, not by the engine's.
    pub(super) derived: bool,
    /// Keys that the engine may hold no more.
    pub(super) unproven: HashSet<u64, BuildHasherDefault<KeyHasher>>,
    /// The copying of its keys for a file, while it is under way.
    pub(super) capture: Option<Box<Capture>>,
}

impl Cache {
    /// Whether the key lies anywhere.
    pub(super) fn contains(&self, key: BlockKey) -> bool {
        self.groups.iter().any(|(_, counts)| counts.contains(key))
    }

    /// Whether the key lies in the medium or a nearer one.
    pub(super) fn has(&self, key: BlockKey, medium: Medium) -> bool {
        self.groups.iter().any(|(place, counts)| place.medium <= medium && counts.contains(key))
    }

    pub(super) fn entries(&self) -> usize {
        self.groups.iter().map(|(_, counts)| counts.len()).sum()
    }

    /// Every key in the medium or a nearer one once, whatever the number of groups that hold it.
    pub(super) fn keys(&self, medium: Medium) -> impl Iterator<Item = BlockKey> + '_ {
        let counts = move |(place, _): &&(Place, CopyCounts)| place.medium <= medium;
        self.groups.iter().enumerate().filter(move |(_, group)| counts(group)).flat_map(move |(at, (_, held))| {
            let before =
                move |key: BlockKey| self.groups[..at].iter().filter(counts).any(|(_, held)| held.contains(key));
            held.keys().filter(move |key| !before(*key))
        })
    }

    /// Whether own keys are needed, now or should the engine's turn out not to be what the rule says.
    pub(super) fn keeps_own_keys(&self) -> bool {
        self.calibrator.as_ref().is_some_and(|calibrator| !calibrator.is_proved())
    }

    /// One more copy; with `at_least_one`, only if there is none.
    pub(super) fn add(&mut self, group: usize, key: BlockKey, at_least_one: bool) -> Change {
        // An engine does not announce again what it has: the copy that was unproven is gone.
        let in_device = self.groups[group].0.medium == Medium::Device;
        let anew = in_device && !self.unproven.is_empty() && self.unproven.remove(&key.0);
        let change = self.groups[group].1.add(key, at_least_one || anew);
        self.note(group, key);
        change
    }

    /// One copy less.
    pub(super) fn remove(&mut self, group: usize, key: BlockKey) -> Change {
        let change = self.groups[group].1.remove(key);
        self.note(group, key);
        change
    }

    /// Tells a capture under way of a change.
    pub(super) fn note(&mut self, group: usize, key: BlockKey) {
        if let Some(capture) = &mut self.capture {
            let (id, counts) = &self.groups[group];
            capture.changed(*id, key, counts.copies(key));
        }
    }

    /// The key that copies are counted by.
    pub(super) fn counted(&self, engine: BlockKey) -> Option<BlockKey> {
        if self.derived { self.own.get(engine) } else { Some(engine) }
    }

    /// Counts by other keys from now on; what has none is given up.
    pub(super) fn rekey(&mut self, way: Way, rule_tokens: u32) {
        let (derived, block_tokens) = match way {
            Way::Derived(block_tokens) => (true, block_tokens.get()),
            Way::Engine(space) => (false, space.block_tokens.get()),
            Way::Rule | Way::Refused => (false, rule_tokens),
        };
        let fits = self.block_tokens == block_tokens;
        self.block_tokens = block_tokens;
        self.capture = None;
        let was_unproven = !std::mem::take(&mut self.unproven).is_empty();
        let groups = std::mem::take(&mut self.groups);
        let was_derived = std::mem::replace(&mut self.derived, derived);
        self.groups = match (was_derived, derived) {
            _ if !fits || way == Way::Refused => Vec::new(),
            (false, true) => groups.iter().map(|(id, counts)| (*id, counts.rekeyed(|key| self.own.get(key)))).collect(),
            (true, false) => {
                let engine = self.own.inverted();
                let other = |key: BlockKey| engine.get(&key.0).map(|key| BlockKey(*key));
                groups.iter().map(|(id, counts)| (*id, counts.rekeyed(other))).collect()
            }
            _ => groups,
        };
        if !derived {
            self.own = OwnKeys::default();
        }
        if was_unproven {
            self.doubt();
        }
    }

    /// All that is held may be gone.
    pub(super) fn doubt(&mut self) {
        let Cache { groups, unproven, .. } = self;
        unproven.extend(groups.iter().flat_map(|(_, counts)| counts.keys()).map(|key| key.0));
    }
}
