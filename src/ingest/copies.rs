//! What the engines of one service hold, as their events tell it: copies per (rank, group, key), and from them the
//! operations on the inventory.
//!
//! **What counts.** Blocks in device memory (medium `GPU` or none, whatever its case) of groups that keep the whole
//! prefix (full attention, MLA, sink-full, or no kind given with as many tokens as the keys span). Other media and
//! groups are counted in the status and otherwise left alone; a removal for them finds nothing and does nothing.
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
//! **Bound.** An endpoint keeps at most `blocks_max` (rank, group, key) entries; beyond it the oldest entry of the
//! group that grew is withdrawn, and counted.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use shards::block::Contract;
use shards::ids::BlockKey;
use shards::inventory::Space;

use super::calibrate::{Believed, Calibrator, Finding, Way};
use super::counts::{Change, CopyCounts};
use super::derived::{NotDerived, OwnKeys};
use super::events::{Batch, Event, Keys, Reject, Removed, Stored};
use super::parity::{ByUse, UseLeg, UseStats};
use super::status::{StreamStats, add};

/// Attention groups of one cache. Beyond it: the event is rejected.
const GROUPS_MAX: usize = 64;

/// Keys whose places are read ahead of their turn.
const KEYS_AHEAD: usize = 32;

/// An operation on the inventory, for one holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// The holder has the block now.
    Store(BlockKey),
    /// The holder no longer has the block.
    Remove(BlockKey),
    /// The holder has nothing now.
    Clear,
    /// The holder has nothing now, and what it has from now on is keyed so.
    Rekey(Keying),
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

/// The cache of one rank: copies by group.
#[derive(Debug, Default)]
struct Cache {
    groups: Vec<(u32, CopyCounts)>,
    /// Tokens per block of the blocks that enter.
    block_tokens: u32,
    /// Finds out how the engine makes its keys; none where the rule is simply believed.
    calibrator: Option<Calibrator>,
    /// The gateway's own keys, kept until the engine's are proved.
    own: OwnKeys,
    /// Copies are counted by own keys, not by the engine's.
    derived: bool,
}

impl Cache {
    fn contains(&self, key: BlockKey) -> bool {
        self.groups.iter().any(|(_, counts)| counts.contains(key))
    }

    fn entries(&self) -> usize {
        self.groups.iter().map(|(_, counts)| counts.len()).sum()
    }

    /// Every key once, whatever the number of groups that hold it.
    fn keys(&self) -> impl Iterator<Item = BlockKey> + '_ {
        self.groups.iter().enumerate().flat_map(move |(place, (_, counts))| {
            counts.keys().filter(move |key| !self.groups[..place].iter().any(|(_, before)| before.contains(*key)))
        })
    }

    /// Whether own keys are needed, now or should the engine's turn out not to be what the rule says.
    fn keeps_own_keys(&self) -> bool {
        self.calibrator.as_ref().is_some_and(|calibrator| !calibrator.is_proved())
    }

    /// The key that copies are counted by.
    fn counted(&self, engine: BlockKey) -> Option<BlockKey> {
        if self.derived { self.own.get(engine) } else { Some(engine) }
    }

    /// Counts by other keys from now on; what has none is given up.
    fn rekey(&mut self, way: Way, rule_tokens: u32) {
        let (derived, block_tokens) = match way {
            Way::Derived(block_tokens) => (true, block_tokens.get()),
            Way::Engine(space) => (false, space.block_tokens.get()),
            Way::Rule | Way::Refused => (false, rule_tokens),
        };
        let fits = self.block_tokens == block_tokens;
        self.block_tokens = block_tokens;
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
    }
}

/// What the ranks of one endpoint hold.
#[derive(Debug)]
pub(crate) struct Copies {
    rule_tokens: u32,
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
        Copies { rule_tokens, blocks_max, ranks, entries: 0, distinct: 0, by_use, own_keys, tokens }
    }

    /// Keys the endpoint holds, each once whatever the number of ranks or copies.
    pub(crate) fn distinct(&self) -> u64 {
        self.distinct
    }

    /// Keys one rank holds.
    pub(crate) fn keys(&self, rank: usize) -> impl Iterator<Item = BlockKey> + '_ {
        self.ranks[rank].keys()
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
        self.ranks[rank].own = OwnKeys::default();
        if self.ranks[rank].entries() == 0 {
            return;
        }
        self.by_use.forget();
        self.forget(rank);
        self.ranks[rank].groups.clear();
        add(&stats.clears, 1);
        stats.held.store(0, Ordering::Relaxed);
        op(Op::Clear);
    }

    /// Judges what was predicted of the endpoint; a change of its alarm.
    pub(crate) fn judge(&mut self, now: Instant, stats: &UseStats) -> Option<Option<UseLeg>> {
        let ranks = &self.ranks;
        self.by_use.judge(now, stats, |key| ranks.iter().any(|rank| rank.contains(key)))
    }

    /// Takes what one rank holds out of the endpoint's sums.
    fn forget(&mut self, rank: usize) {
        self.entries -= self.ranks[rank].entries();
        self.distinct -= self.only_in(rank);
    }

    /// Keys that no other rank holds.
    fn only_in(&self, rank: usize) -> u64 {
        self.ranks[rank].keys().filter(|key| !self.in_other_rank(rank, *key)).count() as u64
    }

    /// Counts one rank's blocks by other keys from now on.
    fn rekey(&mut self, rank: usize, way: Way, op: &mut impl FnMut(Op)) {
        self.by_use.forget();
        self.forget(rank);
        self.ranks[rank].rekey(way, self.rule_tokens);
        self.entries += self.ranks[rank].entries();
        self.distinct += self.only_in(rank);
        op(Op::Rekey(way.into()));
        self.ranks[rank].keys().for_each(|key| op(Op::Store(key)));
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
        if !in_device_memory(stored.medium) {
            add(&stats.other_medium, 1);
            return Ok(());
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
        let group = self.group(rank, stored.group).ok_or(Reject::Group)?;
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
        for some in keys.chunks(KEYS_AHEAD) {
            self.touch(some);
            some.iter().for_each(|key| self.add(rank, group, *key, again, stats, op));
        }
        self.own_keys = keys;
        Ok(())
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
        match self.ranks[rank].groups[group].1.add(key, again) {
            Change::First => self.first_copy(rank, group, key, stats, op),
            _ => add(&stats.duplicates, 1),
        }
    }

    fn removed(&mut self, rank: usize, removed: &Removed<'_>, stats: &StreamStats, op: &mut impl FnMut(Op)) {
        if !in_device_memory(removed.medium) {
            add(&stats.other_medium, 1);
            return;
        }
        add(&stats.blocks_removed, u64::from(removed.keys.len()));
        let Some(group) = self.ranks[rank].groups.iter().position(|(id, _)| *id == removed.group) else {
            add(&stats.unknown_removals, u64::from(removed.keys.len()));
            return;
        };
        for engine in Keys::iter(removed.keys) {
            let cache = &mut self.ranks[rank];
            let Some(key) = cache.counted(engine) else {
                add(&stats.unknown_removals, 1);
                continue;
            };
            match cache.groups[group].1.remove(key) {
                Change::Last => {
                    if !cache.contains(key) {
                        cache.own.forget(engine);
                    }
                    self.by_use.evicted(key);
                    self.last_copy(rank, group, key, op);
                }
                Change::Unknown => add(&stats.unknown_removals, 1),
                _ => {}
            }
        }
    }

    /// The place of a group, made where it is new; none when there are too many.
    fn group(&mut self, rank: usize, id: u32) -> Option<usize> {
        let groups = &mut self.ranks[rank].groups;
        if let Some(place) = groups.iter().position(|(known, _)| *known == id) {
            return Some(place);
        }
        if groups.len() == GROUPS_MAX {
            return None;
        }
        groups.push((id, CopyCounts::default()));
        Some(groups.len() - 1)
    }

    fn in_other_group(&self, rank: usize, group: usize, key: BlockKey) -> bool {
        let groups = &self.ranks[rank].groups;
        groups.len() > 1 && groups.iter().enumerate().any(|(place, (_, held))| place != group && held.contains(key))
    }

    fn in_other_rank(&self, rank: usize, key: BlockKey) -> bool {
        self.ranks.len() > 1 && self.ranks.iter().enumerate().any(|(place, held)| place != rank && held.contains(key))
    }

    fn first_copy(&mut self, rank: usize, group: usize, key: BlockKey, stats: &StreamStats, op: &mut impl FnMut(Op)) {
        self.entries += 1;
        if !self.in_other_group(rank, group, key) {
            self.distinct += u64::from(!self.in_other_rank(rank, key));
            op(Op::Store(key));
        }
        while self.entries > self.blocks_max {
            let Some(oldest) = self.ranks[rank].groups[group].1.remove_oldest() else { break };
            add(&stats.evicted, 1);
            self.last_copy(rank, group, oldest, op);
        }
    }

    fn last_copy(&mut self, rank: usize, group: usize, key: BlockKey, op: &mut impl FnMut(Op)) {
        self.entries -= 1;
        if !self.in_other_group(rank, group, key) {
            self.distinct -= u64::from(!self.in_other_rank(rank, key));
            op(Op::Remove(key));
        }
    }
}

fn in_device_memory(medium: Option<&str>) -> bool {
    medium.is_none_or(|medium| medium.eq_ignore_ascii_case("GPU"))
}

fn keeps_the_whole_prefix(stored: &Stored<'_>) -> bool {
    match stored.kind {
        Some("full_attention" | "mla_attention" | "sink_full_attention") => true,
        Some(_) => false,
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
        && in_device_memory(next.medium) == in_device_memory(stored.medium)
}

#[cfg(test)]
#[path = "copies_tests.rs"]
pub(super) mod tests;
