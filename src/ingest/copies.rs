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
//! **Bound.** An endpoint keeps at most `blocks_max` (rank, group, key) entries; beyond it the oldest entry of the
//! group that grew is withdrawn, and counted.

#![forbid(unsafe_code)]

use shards::ids::BlockKey;

use super::counts::{Change, CopyCounts};
use super::events::{Batch, Event, Keys, Reject, Removed, Stored};
use super::status::{StreamStats, add};

/// Attention groups of one cache. Beyond it: the event is rejected.
const GROUPS_MAX: usize = 64;

/// An operation on the inventory, for one holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// The holder has the block now.
    Store(BlockKey),
    /// The holder no longer has the block.
    Remove(BlockKey),
    /// The holder has nothing now.
    Clear,
}

/// The cache of one rank: copies by group.
#[derive(Debug, Default)]
struct Cache {
    groups: Vec<(u32, CopyCounts)>,
}

impl Cache {
    fn contains(&self, key: BlockKey) -> bool {
        self.groups.iter().any(|(_, counts)| counts.contains(key))
    }

    fn is_empty(&self) -> bool {
        self.groups.iter().all(|(_, counts)| counts.len() == 0)
    }

    /// Every key once, whatever the number of groups that hold it.
    fn keys(&self) -> impl Iterator<Item = BlockKey> + '_ {
        self.groups.iter().enumerate().flat_map(move |(place, (_, counts))| {
            counts.keys().filter(move |key| !self.groups[..place].iter().any(|(_, before)| before.contains(*key)))
        })
    }
}

/// What the ranks of one endpoint hold.
#[derive(Debug)]
pub(crate) struct Copies {
    block_tokens: u32,
    blocks_max: usize,
    ranks: Vec<Cache>,
    /// (rank, group, key) entries over all ranks.
    entries: usize,
    /// Keys that at least one rank holds.
    distinct: u64,
}

impl Copies {
    /// Nothing held by `ranks` ranks. Blocks of another size than `block_tokens` do not enter.
    pub(crate) fn new(ranks: usize, block_tokens: u32, blocks_max: usize) -> Self {
        let ranks = (0..ranks).map(|_| Cache::default()).collect();
        Copies { block_tokens, blocks_max, ranks, entries: 0, distinct: 0 }
    }

    /// Keys the endpoint holds, each once whatever the number of ranks or copies.
    pub(crate) fn distinct(&self) -> u64 {
        self.distinct
    }

    /// Keys one rank holds.
    pub(crate) fn keys(&self, rank: usize) -> impl Iterator<Item = BlockKey> + '_ {
        self.ranks[rank].keys()
    }

    /// Forgets what one rank holds; nothing happens where it holds nothing.
    pub(crate) fn clear(&mut self, rank: usize, stats: &StreamStats, op: &mut impl FnMut(Op)) {
        let cache = std::mem::take(&mut self.ranks[rank]);
        if cache.is_empty() {
            return;
        }
        self.entries -= cache.groups.iter().map(|(_, counts)| counts.len()).sum::<usize>();
        self.distinct = if self.ranks.len() == 1 {
            0
        } else {
            let gone = cache.keys().filter(|key| !self.ranks.iter().any(|other| other.contains(*key))).count();
            self.distinct - gone as u64
        };
        add(&stats.clears, 1);
        stats.held.store(0, std::sync::atomic::Ordering::Relaxed);
        op(Op::Clear);
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
        let held = self.ranks[rank].groups.iter().map(|(_, counts)| counts.len()).sum::<usize>();
        stats.held.store(held as u64, std::sync::atomic::Ordering::Relaxed);
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
        if stored.block_tokens != self.block_tokens {
            stats.block_size_differs(stored.block_tokens);
            return Ok(());
        }
        let group = self.group(rank, stored.group).ok_or(Reject::Group)?;
        add(&stats.blocks_stored, u64::from(stored.keys.len()));
        for key in stored.keys.iter() {
            match self.ranks[rank].groups[group].1.add(key, again) {
                Change::First => self.first_copy(rank, group, key, stats, op),
                _ => add(&stats.duplicates, 1),
            }
        }
        Ok(())
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
        for key in Keys::iter(removed.keys) {
            match self.ranks[rank].groups[group].1.remove(key) {
                Change::Last => self.last_copy(rank, group, key, op),
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
