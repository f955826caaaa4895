//! What a file of a former gateway, and an engine's `usage`, say of what a rank holds: keys that are believed, not proved.

#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use shards::ids::BlockKey;
use shards::inventory::Medium;

use super::super::calibrate::{Calibrator, Way};
use super::super::counts::CopyCounts;
use super::super::persist::{Captured, KeptWay, Progress};
use super::super::status::{StreamStats, add};
use super::cache::Cache;
use super::{Copies, Op, Place};

/// What a file of a former gateway, and an engine's `usage`, say of what a rank holds.
impl Copies {
    /// How one rank's keys are to be read, for a file; none where nothing may be kept.
    pub(crate) fn kept_way(&self, rank: usize) -> Option<KeptWay> {
        let way = self.ranks[rank].calibrator.as_ref().map_or(Way::Rule, Calibrator::way);
        KeptWay::of(way)
    }

    /// Engine key → own key of a rank whose copies are counted by own keys; else nothing.
    pub(crate) fn own_pairs(&self, rank: usize) -> Vec<(u64, u64)> {
        let cache = &self.ranks[rank];
        if cache.derived { cache.own.pairs().collect() } else { Vec::new() }
    }

    /// Copies one rank's keys for a file, a slice of `most` places at a time. What is given up begins anew.
    pub(crate) fn capture(&mut self, rank: usize, most: usize) -> Progress {
        let Cache { groups, capture, .. } = &mut self.ranks[rank];
        let progress = capture.get_or_insert_default().slice(groups, most);
        if !matches!(progress, Progress::More) {
            *capture = None;
        }
        progress
    }

    /// One rank's keys, copied at once: for the end of the process.
    pub(crate) fn capture_whole(&mut self, rank: usize) -> Captured {
        self.ranks[rank].capture = None;
        loop {
            if let Progress::Done(captured) = self.capture(rank, usize::MAX) {
                return captured;
            }
        }
    }

    /// Begins to take up what a file says of a rank, which holds nothing yet.
    pub(crate) fn take_up(&mut self, rank: usize, way: Way, places: &[Place], op: &mut impl FnMut(Op)) {
        for Place { medium, .. } in places {
            if *medium != Medium::Device && self.counts(*medium) && !self.ranks[rank].media.contains(medium) {
                self.ranks[rank].media.push(*medium);
            }
        }
        if way != Way::Rule {
            self.rekey(rank, way, op);
            if let Some(calibrator) = &mut self.ranks[rank].calibrator {
                calibrator.resume(way);
            }
        }
    }

    /// The own key of an engine key.
    pub(crate) fn take_up_own(&mut self, rank: usize, engine: u64, own: u64) {
        self.ranks[rank].own.insert(engine, own);
    }

    /// A key with its copies; the oldest come first. False where it cannot be taken.
    pub(crate) fn take_up_key(
        &mut self,
        rank: usize,
        place: Place,
        (key, copies): (BlockKey, u32),
        stats: &StreamStats,
        op: &mut impl FnMut(Op),
    ) -> bool {
        if !self.counts(place.medium) {
            return false;
        }
        let Some(group) = self.group(rank, place) else { return false };
        let cache = &mut self.ranks[rank];
        if copies == 0 || cache.groups[group].1.contains(key) {
            return false;
        }
        cache.groups[group].1.set(key, copies);
        cache.note(group, key);
        cache.unproven.insert(key.0);
        self.first_copy(rank, group, key, stats, op);
        stats.held.store(self.ranks[rank].entries() as u64, Ordering::Relaxed);
        true
    }

    /// Whether a rank has keys that its engine may hold no more.
    pub(crate) fn is_unproven(&self, rank: usize) -> bool {
        !self.ranks[rank].unproven.is_empty()
    }

    /// What a rank holds is what its engine holds.
    pub(crate) fn prove(&mut self, rank: usize) {
        self.ranks[rank].unproven = HashSet::default();
    }

    /// All that a rank holds may be gone.
    pub(crate) fn doubt(&mut self, rank: usize) {
        self.ranks[rank].doubt();
    }

    /// The engine's `usage` says that it has these blocks of a prompt, and not those.
    pub(crate) fn usage_said(
        &mut self,
        rank: usize,
        cached: &[BlockKey],
        denied: &[BlockKey],
        stats: &StreamStats,
        op: &mut impl FnMut(Op),
    ) {
        let in_device = |(place, _): &&(Place, CopyCounts)| place.medium == Medium::Device;
        let place = self.ranks[rank].groups.iter().find(in_device).map(|(place, _)| *place);
        let place = place.unwrap_or(Place { medium: Medium::Device, group: 0 });
        for key in cached {
            if !self.ranks[rank].contains(*key) && self.take_up_key(rank, place, (*key, 1), stats, op) {
                add(&stats.adopted, 1);
            }
        }
        for key in denied {
            if self.ranks[rank].unproven.contains(&key.0) {
                self.withdraw(rank, *key, op);
                add(&stats.withdrawn, 1);
            }
        }
        stats.held.store(self.ranks[rank].entries() as u64, Ordering::Relaxed);
    }

    /// Takes back a key, however many copies it has in however many groups.
    fn withdraw(&mut self, rank: usize, key: BlockKey, op: &mut impl FnMut(Op)) {
        for group in 0..self.ranks[rank].groups.len() {
            let cache = &mut self.ranks[rank];
            if cache.groups[group].1.forget(key) {
                cache.note(group, key);
                self.last_copy(rank, group, key, op);
            }
        }
    }
}
