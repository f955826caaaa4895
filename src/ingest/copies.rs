//! What the engines of one service hold, as their events tell it: copies per (rank, group, key), and from them the
//! operations on the inventory.
//!
//! **What counts.** Blocks of groups that keep the whole prefix (full attention, MLA, sink-full, or no kind given with
//! as many tokens as the keys span), in device memory (medium `GPU` or none, whatever its case) and in the media that the
//! rule gives weight to. Other media and groups are counted in the status and otherwise left alone; a removal for
//! them finds nothing and does nothing.
//!
//! **Media** are counted apart. From the first block in a slower medium on, a rank has a second holder, of what lies there
//! or nearer ([`Op::Wide`]); it costs as much as the first. Engines announce such blocks as keys alone: under keys of the
//! gateway's own they count while what they are copies of is known.
//!
//! **Copies.** An engine may hold one key in several physical blocks and announces each, coming and going, so a key
//! is held while its count is above zero. The one announcement that is *not* a copy is a re-report
//! (`kv_cache_report_mode: full`): the hit prefix from block 0, sent again. It looks like a duplicate but for what
//! follows it: an engine sends one store per request and step, so a store from block 0 whose continuation (a
//! store whose parent is its last key) stands next in the same batch is a re-report, and its keys are held at least once instead of
//! once more. A re-report without continuation cannot be told from a duplicate and counts as one: a key then stays
//! until the rank is cleared or the bound reaches it, which costs a hit that was predicted in vain, while the
//! opposite mistake would hide blocks that the engine will never announce again.
//!
//! **Keys.** Copies are counted by the engine's own keys as long as these are what the rule says ([`super::calibrate`]),
//! else by the gateway's ([`super::derived`]). A verdict moves the rank from the ones to the others, copies and all.
//!
//! **Unproven** keys were taken up from a file, or adopted because the engine's `usage` reported them cached: a store
//! proves one and is no further copy, a denied hit withdraws it.
//!
//! **Bound.** An endpoint keeps at most `blocks_max` (rank, group, key) entries; beyond it the oldest entry of the
//! group that grew is withdrawn, and counted.

#![forbid(unsafe_code)]

mod cache;
mod kept;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use shards::block::Contract;
use shards::bos::BosEvidence;
use shards::ids::BlockKey;
use shards::inventory::{Medium, Space};
use shards::service::MediumWeights;

use super::calibrate::{Believed, Calibrator, Finding, Way};
use super::counts::{Change, CopyCounts};
use super::derived::{NotDerived, OwnKeys};
use super::events::{Batch, Event, Keys, Reject, Removed, Stored};
use super::parity::{ByUse, UseLeg, UseStats};
use super::status::{StreamStats, add};
use cache::Cache;

/// Attention groups of one cache. Beyond it: the event is rejected.
pub(crate) const GROUPS_MAX: usize = 64;

/// Keys whose places are read ahead of their turn.
const KEYS_AHEAD: usize = 32;

/// An operation on the inventory, for one holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// The holder has the block now.
    Store(BlockKey),
    /// The holder no longer has the block.
    Remove(BlockKey),
    /// The next block stored follows this one in prompts, or none.
    Follow(Option<BlockKey>),
    /// The holder has nothing now.
    Clear,
    /// The holder has nothing now, and what it has from now on is keyed so.
    Rekey(Keying),
    /// The holder of what lies in the medium or a nearer one has the block now, or has it no longer.
    Wide {
        /// Never device memory.
        medium: Medium,
        key: BlockKey,
        held: bool,
    },
}

/// What is counted apart in one cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) medium: Medium,
    pub(crate) group: u32,
}

/// How the keys of a holder are to be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Keying {
    /// By the rule's contract.
    #[default]
    Rule,
    /// By another contract.
    Space(Space),
    /// Not at all: nothing may be routed by them.
    Refused,
}

impl From<Way> for Keying {
    fn from(way: Way) -> Self {
        match way {
            Way::Rule => Keying::Rule,
            Way::Engine(space) => Keying::Space(space),
            Way::Derived(block_tokens) => Keying::Space(Space { contract: Contract::Derived, block_tokens }),
            Way::Refused => Keying::Refused,
        }
    }
}

/// What the ranks of one endpoint hold.
#[derive(Debug)]
pub(crate) struct Copies {
    rule_tokens: u32,
    weights: MediumWeights,
    blocks_max: usize,
    ranks: Vec<Cache>,
    /// (rank, group, key) entries over all ranks.
    entries: usize,
    /// Keys that at least one rank holds.
    distinct: u64,
    /// Whether prompts have the blocks they were predicted to have.
    pub(crate) by_use: ByUse,
    /// Of the store at hand, the keys that are counted; kept for their memory.
    own_keys: Vec<BlockKey>,
    tokens: Vec<u32>,
}

impl Copies {
    /// Nothing held by `ranks` ranks, whose blocks have `rule_tokens` tokens. With something believed of the engine's
    /// keys it is verified; without, the keys are taken as they are and blocks of another size do not enter.
    pub(crate) fn new(ranks: usize, rule_tokens: u32, blocks_max: usize, believed: Option<&Arc<Believed>>) -> Self {
        let cache = || Cache {
            block_tokens: rule_tokens,
            calibrator: believed.map(|believed| Calibrator::new(Arc::clone(believed), rule_tokens)),
            ..Cache::default()
        };
        let ranks = (0..ranks).map(|_| cache()).collect();
        let (own_keys, tokens) = (Vec::new(), Vec::new());
        let by_use = ByUse::default();
        let weights = MediumWeights::default();
        Copies { rule_tokens, weights, blocks_max, ranks, entries: 0, distinct: 0, by_use, own_keys, tokens }
    }

    /// Counts blocks in the media that have weight, from now on.
    pub(crate) fn weigh(self, weights: MediumWeights) -> Self {
        Copies { weights, ..self }
    }

    /// Keys the endpoint holds, each once whatever the number of ranks or copies.
    pub(crate) fn distinct(&self) -> u64 {
        self.distinct
    }

    /// Keys one rank holds in device memory.
    pub(crate) fn keys(&self, rank: usize) -> impl Iterator<Item = BlockKey> + '_ {
        self.ranks[rank].keys(Medium::Device)
    }

    /// How one rank's blocks are keyed, and why.
    pub(crate) fn finding(&self, rank: usize) -> Option<&Finding> {
        self.ranks[rank].calibrator.as_ref().map(Calibrator::finding)
    }

    /// The engine behind one rank may be another now: its next blocks are verified again.
    pub(crate) fn verify_again(&mut self, rank: usize) {
        if let Some(calibrator) = &mut self.ranks[rank].calibrator {
            calibrator.begin_again();
        }
    }

    /// Forgets what one rank holds; nothing happens where it holds nothing.
    pub(crate) fn clear(&mut self, rank: usize, stats: &StreamStats, op: &mut impl FnMut(Op)) {
        let cache = &mut self.ranks[rank];
        cache.own = OwnKeys::default();
        cache.unproven = HashSet::default();
        cache.capture = None;
        if cache.entries() == 0 {
            return;
        }
        self.by_use.forget();
        self.forget(rank);
        self.ranks[rank].groups.clear();
        self.ranks[rank].media.clear();
        add(&stats.clears, 1);
        stats.held.store(0, Ordering::Relaxed);
        op(Op::Clear);
    }

    /// Judges what was predicted of the endpoint; a change of its alarm.
    pub(crate) fn judge(&mut self, now: Instant, stats: &UseStats, bos: &BosEvidence) -> Option<Option<UseLeg>> {
        let ranks = &self.ranks;
        self.by_use.judge(now, stats, bos, |key| ranks.iter().any(|rank| rank.has(key, Medium::Device)))
    }

    /// Takes what one rank holds out of the endpoint's sums.
    fn forget(&mut self, rank: usize) {
        self.entries -= self.ranks[rank].entries();
        self.distinct -= self.only_in(rank);
    }

    /// Keys in device memory that no other rank holds there.
    fn only_in(&self, rank: usize) -> u64 {
        self.keys(rank).filter(|key| !self.in_other_rank(rank, *key)).count() as u64
    }

    /// Counts one rank's blocks by other keys from now on.
    fn rekey(&mut self, rank: usize, way: Way, op: &mut impl FnMut(Op)) {
        self.by_use.forget();
        self.forget(rank);
        self.ranks[rank].rekey(way, self.rule_tokens);
        self.entries += self.ranks[rank].entries();
        self.distinct += self.only_in(rank);
        op(Op::Rekey(way.into()));
        self.keys(rank).for_each(|key| op(Op::Store(key)));
        self.wide_keys(rank, op);
    }

    /// Tells what the holders of slower media have.
    pub(crate) fn wide_keys(&self, rank: usize, op: &mut impl FnMut(Op)) {
        let cache = &self.ranks[rank];
        for medium in &cache.media {
            cache.keys(*medium).for_each(|key| op(Op::Wide { medium: *medium, key, held: true }));
        }
    }

    /// Applies one batch of one rank. What cannot be understood is counted, the rest takes effect.
    pub(crate) fn apply(&mut self, rank: usize, payload: &[u8], stats: &StreamStats, op: &mut impl FnMut(Op)) {
        let batch = match Batch::open(payload) {
            Ok(batch) => batch,
            Err(why) => return stats.reject(why),
        };
        let mut batch = batch.peekable();
        while let Some(event) = batch.next() {
            let outcome = event.and_then(|event| {
                add(&stats.events, 1);
                match event {
                    Event::Stored(stored) => {
                        let again = matches!(batch.peek(), Some(Ok(Event::Stored(next))) if continues(&stored, next));
                        self.stored(rank, &stored, again, stats, op)
                    }
                    Event::Removed(removed) => {
                        self.removed(rank, &removed, stats, op);
                        Ok(())
                    }
                    Event::Cleared => {
                        self.clear(rank, stats, op);
                        Ok(())
                    }
                }
            });
            if let Err(why) = outcome {
                stats.reject(why);
            }
        }
        let cache = &mut self.ranks[rank];
        let (held, groups) = (cache.entries(), &cache.groups);
        stats.held.store(held as u64, Ordering::Relaxed);
        let derived = cache.derived;
        cache.own.sweep(held, |engine, own| {
            let key = if derived { own } else { engine };
            groups.iter().any(|(_, counts)| counts.contains(key))
        });
    }

    fn stored(
        &mut self,
        rank: usize,
        stored: &Stored<'_>,
        again: bool,
        stats: &StreamStats,
        op: &mut impl FnMut(Op),
    ) -> Result<(), Reject> {
        let Some(medium) = self.counted_medium(stored.medium) else {
            add(&stats.other_medium, 1);
            return Ok(());
        };
        if medium != Medium::Device {
            return self.stored_behind(rank, medium, stored, stats, op);
        }
        if !keeps_the_whole_prefix(stored) {
            add(&stats.other_group, 1);
            return Ok(());
        }
        if stored.block_tokens != self.rule_tokens {
            stats.block_size_differs(stored.block_tokens);
        }
        let calibrator = self.ranks[rank].calibrator.as_mut();
        if let Some(way) = calibrator.and_then(|calibrator| calibrator.observe(stored, &mut self.tokens)) {
            self.rekey(rank, way, op);
        }
        if stored.block_tokens != self.ranks[rank].block_tokens {
            return Ok(());
        }
        let group = self.group(rank, Place { medium, group: stored.group }).ok_or(Reject::Group)?;
        let cache = &mut self.ranks[rank];
        let derived = if cache.keeps_own_keys() {
            cache.own.derive(stored, &mut self.own_keys)
        } else {
            Err(NotDerived::NoTokens)
        };
        if cache.derived && derived.is_err() {
            add(&stats.orphans, u64::from(stored.keys.len()));
            return Ok(());
        }
        add(&stats.blocks_stored, u64::from(stored.keys.len()));
        if stored.parent.is_none() {
            self.by_use.first_block();
        }
        let mut keys = std::mem::take(&mut self.own_keys);
        if !cache.derived {
            keys.clear();
            keys.extend(stored.keys.iter());
        }
        op(Op::Follow(stored.parent.and_then(|parent| self.ranks[rank].counted(parent))));
        for some in keys.chunks(KEYS_AHEAD) {
            self.touch(some);
            some.iter().for_each(|key| self.add(rank, group, *key, again, stats, op));
        }
        self.own_keys = keys;
        Ok(())
    }

    /// Blocks in a slower medium: most often keys alone, of blocks that were announced in device memory before.
    fn stored_behind(
        &mut self,
        rank: usize,
        medium: Medium,
        stored: &Stored<'_>,
        stats: &StreamStats,
        op: &mut impl FnMut(Op),
    ) -> Result<(), Reject> {
        let told = stored.tokens.len() > 0;
        if told && stored.block_tokens != self.ranks[rank].block_tokens {
            return Ok(());
        }
        if stored.kind.is_some_and(|kind| !keeps_all(kind)) {
            add(&stats.other_group, 1);
            return Ok(());
        }
        let group = self.group(rank, Place { medium, group: stored.group }).ok_or(Reject::Group)?;
        if !self.ranks[rank].media.contains(&medium) {
            self.ranks[rank].media.push(medium);
            // What lies nearer counts there too.
            let cache = &self.ranks[rank];
            cache.keys(medium).for_each(|key| op(Op::Wide { medium, key, held: true }));
        }
        let cache = &mut self.ranks[rank];
        if told && cache.keeps_own_keys() {
            // Remembered; a block whose beginning is not known has no key of our own.
            let _ = cache.own.derive(stored, &mut self.own_keys);
        }
        for engine in Keys::iter(stored.keys) {
            match self.ranks[rank].counted(engine) {
                Some(key) => self.add(rank, group, key, false, stats, op),
                None => add(&stats.other_medium, 1),
            }
        }
        Ok(())
    }

    /// The medium of an event, where it counts.
    fn counted_medium(&self, name: Option<&str>) -> Option<Medium> {
        medium(name).filter(|medium| self.counts(*medium))
    }

    /// Whether blocks in a medium count.
    fn counts(&self, medium: Medium) -> bool {
        match medium {
            Medium::Device => true,
            Medium::Cpu => self.weights.cpu > 0,
            Medium::Storage => self.weights.storage > 0,
        }
    }

    /// Reads the places of keys that are about to be counted, so that the accesses to memory overlap.
    fn touch(&self, keys: &[BlockKey]) {
        let counts = || self.ranks.iter().flat_map(|cache| cache.groups.iter().map(|(_, counts)| counts));
        let of_key = |key: &BlockKey| counts().fold(0, |sum, counts| sum ^ counts.touch(*key));
        std::hint::black_box(keys.iter().fold(0, |sum, key| sum ^ of_key(key)));
    }

    fn add(
        &mut self,
        rank: usize,
        group: usize,
        key: BlockKey,
        again: bool,
        stats: &StreamStats,
        op: &mut impl FnMut(Op),
    ) {
        match self.ranks[rank].add(group, key, again) {
            Change::First => self.first_copy(rank, group, key, stats, op),
            _ => {
                add(&stats.duplicates, 1);
                op(Op::Follow(Some(key)));
            }
        }
    }

    fn removed(&mut self, rank: usize, removed: &Removed<'_>, stats: &StreamStats, op: &mut impl FnMut(Op)) {
        let Some(medium) = self.counted_medium(removed.medium) else {
            add(&stats.other_medium, 1);
            return;
        };
        add(&stats.blocks_removed, u64::from(removed.keys.len()));
        let place = Place { medium, group: removed.group };
        let Some(group) = self.ranks[rank].groups.iter().position(|(known, _)| *known == place) else {
            add(&stats.unknown_removals, u64::from(removed.keys.len()));
            return;
        };
        for engine in Keys::iter(removed.keys) {
            let cache = &mut self.ranks[rank];
            let Some(key) = cache.counted(engine) else {
                add(&stats.unknown_removals, 1);
                continue;
            };
            match cache.remove(group, key) {
                Change::Last => {
                    if !cache.contains(key) {
                        cache.own.forget(engine);
                    }
                    if medium == Medium::Device {
                        self.by_use.evicted(key);
                    }
                    self.last_copy(rank, group, key, op);
                }
                Change::Unknown => add(&stats.unknown_removals, 1),
                _ => {}
            }
        }
    }

    /// The place of a group, made where it is new; none when there are too many.
    fn group(&mut self, rank: usize, place: Place) -> Option<usize> {
        let groups = &mut self.ranks[rank].groups;
        if let Some(known) = groups.iter().position(|(known, _)| *known == place) {
            return Some(known);
        }
        if groups.len() == GROUPS_MAX {
            return None;
        }
        groups.push((place, CopyCounts::default()));
        Some(groups.len() - 1)
    }

    /// Whether the key lies in the medium or a nearer one in another group than this.
    fn elsewhere(&self, rank: usize, group: usize, key: BlockKey, medium: Medium) -> bool {
        let groups = &self.ranks[rank].groups;
        let other = |(at, (place, held)): (usize, &(Place, CopyCounts))| {
            at != group && place.medium <= medium && held.contains(key)
        };
        groups.len() > 1 && groups.iter().enumerate().any(other)
    }

    fn in_other_rank(&self, rank: usize, key: BlockKey) -> bool {
        let has = |(place, held): (usize, &Cache)| place != rank && held.has(key, Medium::Device);
        self.ranks.len() > 1 && self.ranks.iter().enumerate().any(has)
    }

    /// Tells the holders of slower media of a key that came or went in a group.
    fn wide(&self, rank: usize, group: usize, key: BlockKey, held: bool, op: &mut impl FnMut(Op)) {
        let from = self.ranks[rank].groups[group].0.medium;
        for medium in self.ranks[rank].media.iter().copied().filter(|medium| *medium >= from) {
            if !self.elsewhere(rank, group, key, medium) {
                op(Op::Wide { medium, key, held });
            }
        }
    }

    fn is_in_device(&self, rank: usize, group: usize) -> bool {
        self.ranks[rank].groups[group].0.medium == Medium::Device
    }

    fn first_copy(&mut self, rank: usize, group: usize, key: BlockKey, stats: &StreamStats, op: &mut impl FnMut(Op)) {
        self.entries += 1;
        self.wide(rank, group, key, true, op);
        if self.is_in_device(rank, group) && !self.elsewhere(rank, group, key, Medium::Device) {
            self.distinct += u64::from(!self.in_other_rank(rank, key));
            op(Op::Store(key));
        }
        while self.entries > self.blocks_max {
            let cache = &mut self.ranks[rank];
            let Some(oldest) = cache.groups[group].1.remove_oldest() else { break };
            cache.note(group, oldest);
            add(&stats.evicted, 1);
            self.last_copy(rank, group, oldest, op);
        }
    }

    fn last_copy(&mut self, rank: usize, group: usize, key: BlockKey, op: &mut impl FnMut(Op)) {
        self.entries -= 1;
        self.wide(rank, group, key, false, op);
        let cache = &mut self.ranks[rank];
        if !cache.unproven.is_empty() && !cache.contains(key) {
            cache.unproven.remove(&key.0);
        }
        if self.is_in_device(rank, group) && !self.elsewhere(rank, group, key, Medium::Device) {
            self.distinct -= u64::from(!self.in_other_rank(rank, key));
            op(Op::Remove(key));
        }
    }
}

/// The medium that an engine names; none for one that is not known.
fn medium(name: Option<&str>) -> Option<Medium> {
    const NAMES: [(&str, Medium); 8] = [
        ("GPU", Medium::Device),
        ("CPU", Medium::Cpu),
        ("CPU_PINNED", Medium::Cpu),
        ("STORAGE", Medium::Storage),
        ("FS", Medium::Storage),
        ("OBJ", Medium::Storage),
        ("DISK", Medium::Storage),
        ("EXTERNAL", Medium::Storage),
    ];
    let Some(name) = name else { return Some(Medium::Device) };
    NAMES.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, medium)| *medium)
}

/// Whether groups of that kind keep the whole prefix.
fn keeps_all(kind: &str) -> bool {
    matches!(kind, "full_attention" | "mla_attention" | "sink_full_attention")
}

fn keeps_the_whole_prefix(stored: &Stored<'_>) -> bool {
    match stored.kind {
        Some(kind) => keeps_all(kind),
        // Releases that do not name the kind: a sparse group gives itself away by spanning more tokens than it keeps.
        None => u64::from(stored.tokens.len()) == u64::from(stored.keys.len()) * u64::from(stored.block_tokens),
    }
}

/// Whether `next` goes on where `stored`, a store from block 0, ends.
fn continues(stored: &Stored<'_>, next: &Stored<'_>) -> bool {
    stored.parent.is_none()
        && next.parent.is_some()
        && next.parent == stored.keys.last()
        && next.group == stored.group
        && medium(next.medium) == medium(stored.medium)
}

#[cfg(test)]
#[path = "copies_tests.rs"]
pub(super) mod tests;
