//! Prompts that a shard has seen lately, so that a prompt which begins like one of them costs its tail.
//!
//! **Invariant.** What is found is equal byte for byte, not by hash alone, as far as it is said to be; a memory is in
//! use by one job at a time; bytes held never exceed the bound once a memory is put back.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh3;

use super::memory::{Context, Memory, common_prefix};
use super::regrow::Trust;

/// Bytes a shard's cache may hold unless told otherwise.
pub const PREFIX_CACHE_BYTES: usize = 64 * 1024 * 1024;
/// A prompt is found by its first so many bytes, and by every further so many.
const STRIDE: usize = 2048;
/// Bytes at the end of a remembered prompt that a new one may replace instead of standing beside it.
const REPLACED_BYTES_MAX: usize = 4096;
/// Memories given up that wait for someone to drop them.
const GARBAGE_MAX: usize = 16;
/// Part of the bound that one prompt may take; longer ones are not remembered.
const LARGEST_PART: usize = 4;

/// Messages of a memory beyond which dropping it takes long.
const DROPPED_MESSAGES_MAX: usize = 256;

/// What a cache has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixStats {
    /// Bytes held.
    pub bytes: u64,
    /// Prompts held.
    pub prompts: u64,
    /// Prompts whose begin was remembered.
    pub hits: u64,
    /// Prompts of which nothing was remembered.
    pub misses: u64,
    /// Bytes of prompts that were found.
    pub hit_bytes: u64,
    /// Prompts dropped to stay within the bound.
    pub evictions: u64,
    /// Texts made from the last turn's by rendering only part of the conversation.
    pub regrown: u64,
    /// Such texts compared with the whole render.
    pub checked: u64,
    /// Comparisons that failed; each ends this way for its template.
    pub differences: u64,
    /// Prompts whose keys end early because no place to cut was found for too long.
    pub unbroken: u64,
    /// Bytes of such prompts that have no keys.
    pub unbroken_bytes: u64,
}

/// The same for other threads to see: written by the shard now and then, figure by figure.
#[derive(Debug, Default)]
pub struct SharedPrefixStats([AtomicU64; 11]);

impl SharedPrefixStats {
    /// Shows what a cache has done.
    pub fn store(&self, stats: PrefixStats) {
        // Every figure is named here, so that a new one cannot be forgotten.
        let PrefixStats {
            bytes,
            prompts,
            hits,
            misses,
            hit_bytes,
            evictions,
            regrown,
            checked,
            differences,
            unbroken,
            unbroken_bytes,
        } = stats;
        let figures = [
            bytes,
            prompts,
            hits,
            misses,
            hit_bytes,
            evictions,
            regrown,
            checked,
            differences,
            unbroken,
            unbroken_bytes,
        ];
        for (place, figure) in self.0.iter().zip(figures) {
            place.store(figure, Ordering::Relaxed);
        }
    }

    /// What was shown last.
    #[must_use]
    pub fn load(&self) -> PrefixStats {
        let [
            bytes,
            prompts,
            hits,
            misses,
            hit_bytes,
            evictions,
            regrown,
            checked,
            differences,
            unbroken,
            unbroken_bytes,
        ] = self.0.each_ref().map(|figure| figure.load(Ordering::Relaxed));
        PrefixStats {
            bytes,
            prompts,
            hits,
            misses,
            hit_bytes,
            evictions,
            regrown,
            checked,
            differences,
            unbroken,
            unbroken_bytes,
        }
    }
}

/// Prompts that a shard has seen lately, bounded in bytes. Beyond the bound those not used for longest go, about.
#[derive(Debug)]
pub struct PrefixCache {
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    /// Slot of a prompt by the hash of a begin of it; the latest prompt has it.
    index: HashMap<u64, u32, BuildPlain>,
    hand: usize,
    bytes_max: usize,
    stats: PrefixStats,
    pub(super) trust: Trust,
    /// Memories that take long to drop.
    #[expect(clippy::vec_box, reason = "they come in boxes, which are cheaper to move")]
    garbage: Vec<Box<Memory>>,
}

#[derive(Debug)]
struct Slot {
    memory: Box<Memory>,
    strides: Vec<u64>,
    bytes: usize,
    used: bool,
}

/// The hashes of a prompt's begins, to put it back with.
pub(super) type Strides = Vec<u64>;

/// What a look-up found.
pub(super) enum Found {
    /// Nothing.
    Nothing,
    /// The memory of a prompt that differs only near its end: it is handed over.
    Same { memory: Box<Memory>, bytes: usize },
    /// The memory of a prompt that shares so many bytes: it stays.
    Part { slot: u32, bytes: usize },
}

/// Keys are hashes already.
#[derive(Clone, Copy, Debug, Default)]
struct Plain(u64);

type BuildPlain = std::hash::BuildHasherDefault<Plain>;

impl std::hash::Hasher for Plain {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3::xxh3_64(bytes);
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

impl PrefixCache {
    /// A cache that holds up to so many bytes; 0 remembers nothing.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        PrefixCache {
            slots: Vec::new(),
            free: Vec::new(),
            index: HashMap::default(),
            hand: 0,
            bytes_max,
            stats: PrefixStats::default(),
            trust: Trust::default(),
            garbage: Vec::new(),
        }
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> PrefixStats {
        let prompts = (self.slots.len() - self.free.len()) as u64;
        let Trust { regrown, checked, differences, .. } = self.trust;
        PrefixStats { prompts, regrown, checked, differences, ..self.stats }
    }

    /// Finds the prompt that shares the longest begin.
    pub(super) fn find(&mut self, context: &Context, subject: &[u8]) -> (Found, Strides) {
        let strides = strides(context, subject);
        (self.find_at(context, &strides, subject), strides)
    }

    /// The same with the strides at hand.
    pub(super) fn find_at(&mut self, context: &Context, strides: &Strides, subject: &[u8]) -> Found {
        let Some((slot, bytes)) = self.longest(context, strides, subject) else {
            self.stats.misses += 1;
            return Found::Nothing;
        };
        self.stats.hits += 1;
        self.stats.hit_bytes += bytes as u64;
        let held = self.slots[slot as usize].as_mut();
        let rest = held.as_ref().map_or(0, |held| held.memory.subject().len() - bytes);
        if rest <= REPLACED_BYTES_MAX.min(bytes) || rest <= bytes / 8 {
            if let Some(memory) = self.remove(slot) {
                return Found::Same { memory, bytes };
            }
        } else if let Some(held) = held {
            held.used = true;
        }
        Found::Part { slot, bytes }
    }

    /// How many bytes of the prompt are remembered. Changes nothing.
    pub(super) fn known(&self, context: &Context, strides: &Strides, subject: &[u8]) -> usize {
        self.longest(context, strides, subject).map_or(0, |(_, bytes)| bytes)
    }

    fn longest(&self, context: &Context, strides: &Strides, subject: &[u8]) -> Option<(u32, usize)> {
        strides.iter().rev().find_map(|hash| {
            let slot = *self.index.get(hash)?;
            let memory = &self.slots.get(slot as usize)?.as_ref()?.memory;
            memory.context.is(context).then(|| (slot, common_prefix(memory.subject(), subject)))
        })
    }

    /// The memory in a slot that was just found.
    pub(super) fn at(&self, slot: u32) -> Option<&Memory> {
        self.slots.get(slot as usize)?.as_ref().map(|slot| &*slot.memory)
    }

    /// Gives a memory up.
    pub(super) fn discard(&mut self, memory: Box<Memory>) {
        self.garbage.push(memory);
    }

    /// Memories that were given up and take long to drop, for someone who has the time. Beyond some that nobody takes they
    /// are dropped when the next are collected.
    pub fn take_garbage(&mut self) -> Option<impl Send + use<>> {
        (!self.garbage.is_empty()).then(|| std::mem::take(&mut self.garbage))
    }

    /// Counts a prompt of which so many bytes have no keys, because no place to cut was found for too long.
    pub(super) fn note_unbroken(&mut self, bytes: usize) {
        self.stats.unbroken += 1;
        self.stats.unbroken_bytes += bytes as u64;
    }

    /// Remembers a prompt.
    pub(super) fn put(&mut self, memory: Box<Memory>, strides: Strides) {
        if self.garbage.len() > GARBAGE_MAX {
            self.garbage.clear();
        }
        let bytes = memory.bytes() + strides.len() * 24;
        if bytes > self.bytes_max / LARGEST_PART {
            self.garbage.push(memory);
            return;
        }
        while self.stats.bytes as usize + bytes > self.bytes_max && self.evict() {}
        let slot = self.free.pop().unwrap_or(self.slots.len() as u32);
        for hash in &strides {
            self.index.insert(*hash, slot);
        }
        let held = Some(Slot { memory, strides, bytes, used: true });
        match self.slots.get_mut(slot as usize) {
            Some(place) => *place = held,
            None => self.slots.push(held),
        }
        self.stats.bytes += bytes as u64;
    }

    fn remove(&mut self, slot: u32) -> Option<Box<Memory>> {
        let held = self.slots.get_mut(slot as usize)?.take()?;
        self.free.push(slot);
        for hash in &held.strides {
            if self.index.get(hash) == Some(&slot) {
                self.index.remove(hash);
            }
        }
        self.stats.bytes -= held.bytes as u64;
        Some(held.memory)
    }

    /// Drops one prompt not used since the hand came by; false when there is none.
    fn evict(&mut self) -> bool {
        for _ in 0..self.slots.len() * 2 {
            self.hand = (self.hand + 1) % self.slots.len();
            match &mut self.slots[self.hand] {
                Some(held) if held.used => held.used = false,
                Some(_) => {
                    let dropped = self.remove(self.hand as u32);
                    self.garbage.extend(dropped.filter(|memory| memory.messages.len() > DROPPED_MESSAGES_MAX));
                    self.stats.evictions += 1;
                    return true;
                }
                None => {}
            }
        }
        false
    }
}

/// Hashes of the empty begin and of every further [`STRIDE`] bytes.
pub(super) fn strides(context: &Context, subject: &[u8]) -> Strides {
    let start = context.hash();
    let mut hash = start;
    let chained = subject.chunks_exact(STRIDE).map(|chunk| {
        hash = xxh3::xxh3_64_with_seed(chunk, hash);
        hash
    });
    std::iter::once(start).chain(chained).collect()
}

#[cfg(test)]
#[path = "prefix_cache_tests.rs"]
mod tests;
