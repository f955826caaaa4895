//! What is in flight per endpoint: requests, and the prompt tokens that wait to be computed, counted without a shared
//! cache line.
//!
//! **Invariant.** Row `s` of `own` is written by shard `s` alone; the `others` rows are written by the ingest thread
//! alone. A decision on shard `s` reads `others[s]` and its own row. Every [`Reservation`] gives back exactly what it
//! took, on every way out, because it does so when dropped.
//!
//! The load of an endpoint as shard `s` sees it is `own(s) + others(s)`: its own requests exactly, the other
//! shards' as of the last publication (200 µs).
//!
//! One word holds all of an endpoint's load in a row, so that it is read and changed whole:
//!
//! ```text
//! 63                40 39            20 19             0
//! | tokens, of 16 each | decoding      | in prefill     |
//! ```
//!
//! A request is in prefill, with its uncached tokens, from its dispatch to the first byte of its answer, and decoding
//! from there to its end. Words are added up field by field by adding them. A million requests at one endpoint are more
//! than a process has descriptors for; beyond 268 million waiting tokens (hours of work) the field of tokens, the
//! topmost, wraps alone, until enough of them are given back.
//!
//! While nothing changes the ingest thread sleeps: it says so before it looks a last time, and a shard looks whether it
//! said so after each change. One of the two sees the other. Answers that stream for minutes so cost no publication.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

use crate::ids::ShardId;

/// Place of an endpoint in every row of a [`LoadTable`]; process-wide, freed when the endpoint is gone for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LoadSlot(pub u32);

/// What is in flight at one endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests whose answer has not begun.
    pub prefill: u32,
    /// Requests whose answer has begun.
    pub decode: u32,
    /// Prompt tokens of the requests in prefill that were expected to hit no cache; each request's are rounded up to a
    /// multiple of [`UNIT_TOKENS`].
    pub tokens: u64,
}

/// Waiting tokens are counted in units of so many.
pub const UNIT_TOKENS: u64 = 16;

const REQUESTS_BITS: u32 = 20;
const REQUESTS_MASK: u64 = (1 << REQUESTS_BITS) - 1;
const ONE_PREFILL: u64 = 1;
const ONE_DECODE: u64 = 1 << REQUESTS_BITS;
const ONE_UNIT: u64 = 1 << (2 * REQUESTS_BITS);

impl Load {
    /// Requests in flight.
    #[must_use]
    pub fn requests(self) -> u32 {
        self.prefill + self.decode
    }
}

/// A load in one word, as the table has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packed(u64);

impl Packed {
    /// Nothing, unless it counts; without a branch.
    #[must_use]
    pub fn only_if(self, counts: bool) -> Self {
        Packed(self.0 & u64::from(counts).wrapping_neg())
    }

    /// Requests in flight.
    #[must_use]
    pub fn requests(self) -> u32 {
        ((self.0 & REQUESTS_MASK) + (self.0 >> REQUESTS_BITS & REQUESTS_MASK)) as u32
    }

    /// The whole of it.
    #[must_use]
    pub fn load(self) -> Load {
        Load {
            prefill: (self.0 & REQUESTS_MASK) as u32,
            decode: (self.0 >> REQUESTS_BITS & REQUESTS_MASK) as u32,
            tokens: (self.0 >> (2 * REQUESTS_BITS)) * UNIT_TOKENS,
        }
    }
}

/// What one shard has in flight, kept off its neighbours' cache lines.
#[repr(align(128))]
#[derive(Debug)]
struct Own {
    words: Words,
    /// Changes so far; says that there is something to publish.
    changes: AtomicU32,
}

/// What the other shards have in flight.
#[repr(align(128))]
#[derive(Debug)]
struct Others(Words);

type Words = Box<[AtomicU64]>;

fn words(slots: usize) -> Words {
    (0..slots).map(|_| AtomicU64::new(0)).collect()
}

/// What a publication saw of one shard.
#[derive(Debug, Default)]
struct Published {
    /// Its changes.
    changes: AtomicU32,
    /// Its word of the slot that is being published.
    word: AtomicU64,
}

/// Wakes the ingest thread.
struct Wake(Box<dyn Fn() + Send + Sync>);

impl fmt::Debug for Wake {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Wake")
    }
}

/// The loads of all shards and endpoints of the process.
#[derive(Debug)]
pub struct LoadTable {
    own: Box<[Own]>,
    others: Box<[Others]>,
    /// What the last publication saw of each shard; the ingest thread's alone.
    published: Box<[Published]>,
    /// Nobody publishes until woken.
    asleep: AtomicBool,
    wake: OnceLock<Wake>,
}

impl LoadTable {
    /// A table of zeros for `shards` shards and `slots` endpoints.
    #[must_use]
    pub fn new(shards: usize, slots: usize) -> Self {
        LoadTable {
            own: (0..shards).map(|_| Own { words: words(slots), changes: AtomicU32::new(0) }).collect(),
            others: (0..shards).map(|_| Others(words(slots))).collect(),
            published: (0..shards).map(|_| Published::default()).collect(),
            asleep: AtomicBool::new(false),
            wake: OnceLock::new(),
        }
    }

    /// What a shard does with the first change after [`LoadTable::sleep`]; the first call counts.
    pub fn wake_with(&self, wake: impl Fn() + Send + Sync + 'static) {
        let _ = self.wake.set(Wake(Box::new(wake)));
    }

    /// The caller will not publish until it is woken. False, and nothing changes, where nobody would wake it or
    /// something changed since it published last.
    pub fn sleep(&self) -> bool {
        if self.wake.get().is_none() {
            return false;
        }
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let news = self.has_news();
        if news {
            self.asleep.store(false, Ordering::Relaxed);
        }
        !news
    }

    /// Whether the last [`LoadTable::sleep`] lasts.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::Relaxed)
    }

    /// How many endpoints the table has room for.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.own.first().map_or(0, |own| own.words.len())
    }

    /// How many shards have a row: a single one has nobody to hear of.
    #[must_use]
    pub fn shards(&self) -> usize {
        self.own.len()
    }

    /// What is in flight at the endpoint, as `shard` sees it.
    #[must_use]
    pub fn seen_by(&self, shard: ShardId, slot: LoadSlot) -> Load {
        self.view(shard).packed(slot).load()
    }

    /// What is in flight at all endpoints, as `shard` sees it, for who looks at many of them.
    #[must_use]
    pub fn view(&self, shard: ShardId) -> View<'_> {
        View { table: self, own: &self.own[shard.index()].words, others: &self.others[shard.index()].0 }
    }

    /// What is in flight at the endpoint over all shards, exact when the shards stand still.
    #[must_use]
    pub fn total(&self, slot: LoadSlot) -> Load {
        self.packed_total(slot).load()
    }

    fn packed_total(&self, slot: LoadSlot) -> Packed {
        let words = self.own.iter().map(|own| own.words[slot.0 as usize].load(Ordering::Relaxed));
        Packed(words.fold(0, u64::wrapping_add))
    }

    /// Publishes every shard's view of the other shards, if any of them changed its row since the last time. Called by
    /// the ingest thread alone, every 200 µs, for the first `slots_used` slots. True if there was something to publish.
    pub fn publish(&self, slots_used: usize) -> bool {
        let mut news = false;
        for (own, published) in self.own.iter().zip(&self.published) {
            // Read before the words: a change that comes in between is published twice, never missed.
            let changes = own.changes.load(Ordering::Acquire);
            news |= changes != published.changes.load(Ordering::Relaxed);
            published.changes.store(changes, Ordering::Relaxed);
        }
        if news {
            (0..slots_used.min(self.slots())).for_each(|slot| self.publish_slot(slot));
        }
        news
    }

    fn publish_slot(&self, slot: usize) {
        // Each row is read once and subtracted as it was added, or a change in between would make the difference wrap.
        let mut total = 0_u64;
        for (own, published) in self.own.iter().zip(&self.published) {
            let word = own.words[slot].load(Ordering::Relaxed);
            published.word.store(word, Ordering::Relaxed);
            total = total.wrapping_add(word);
        }
        for (others, published) in self.others.iter().zip(&self.published) {
            let rest = total.wrapping_sub(published.word.load(Ordering::Relaxed));
            // A line that is not written stays where the shard has it.
            if others.0[slot].load(Ordering::Relaxed) != rest {
                others.0[slot].store(rest, Ordering::Relaxed);
            }
        }
    }

    /// Counts one request in prefill at the endpoint, with the tokens of its prompt that are expected to hit no cache,
    /// until the reservation says that its answer has begun or is dropped.
    pub fn reserve(self: &Arc<Self>, shard: ShardId, slot: LoadSlot, uncached_tokens: u64) -> Reservation {
        let ahead = self.seen_by(shard, slot);
        let units = uncached_tokens.div_ceil(UNIT_TOKENS).min(UNITS_MAX);
        let taken = ONE_PREFILL + units * ONE_UNIT;
        self.change(shard, slot, taken);
        Reservation { table: Arc::clone(self), shard, slot, taken, ahead }
    }

    /// Adds to a word of the shard's own row, modulo 2⁶⁴.
    fn change(&self, shard: ShardId, slot: LoadSlot, difference: u64) {
        let own = &self.own[shard.index()];
        own.words[slot.0 as usize].fetch_add(difference, Ordering::Relaxed);
        own.changes.store(own.changes.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
        // Against `sleep`; where read-modify-writes are barriers already it costs 5 ns.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed)
            && self.asleep.swap(false, Ordering::Relaxed)
            && let Some(Wake(wake)) = self.wake.get()
        {
            wake();
        }
    }

    fn has_news(&self) -> bool {
        let is_new = |(own, published): (&Own, &Published)| {
            own.changes.load(Ordering::Relaxed) != published.changes.load(Ordering::Relaxed)
        };
        self.own.iter().zip(&self.published).any(is_new)
    }
}

/// The loads as one shard sees them.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    table: &'a LoadTable,
    own: &'a [AtomicU64],
    others: &'a [AtomicU64],
}

impl View<'_> {
    /// What is in flight at the endpoint.
    #[must_use]
    pub fn packed(&self, slot: LoadSlot) -> Packed {
        let slot = slot.0 as usize;
        let own = self.own[slot].load(Ordering::Relaxed);
        Packed(own.wrapping_add(self.others[slot].load(Ordering::Relaxed)))
    }

    /// What is in flight at the endpoint now: other shards' requests too. It takes a line from each of them.
    #[must_use]
    pub fn exact(&self, slot: LoadSlot) -> Packed {
        self.table.packed_total(slot)
    }
}

/// Units that one request takes at most: 16 million tokens, more than any engine's context.
const UNITS_MAX: u64 = 1 << 20;

/// One request in flight at one endpoint; dropping it gives back all that it still has.
#[derive(Debug)]
#[must_use]
pub struct Reservation {
    table: Arc<LoadTable>,
    shard: ShardId,
    slot: LoadSlot,
    /// What it has in its word.
    taken: u64,
    ahead: Load,
}

impl Reservation {
    /// What was in flight at the endpoint before it, as its shard saw it.
    #[must_use]
    pub fn ahead(&self) -> Load {
        self.ahead
    }

    /// The answer has begun: the request decodes, and none of its tokens wait. Only the first call counts.
    pub fn first_byte(&mut self) {
        if self.taken != 0 {
            self.hold(ONE_DECODE);
        }
    }

    /// The endpoint has no more to do for the request; as dropping it, for who still has something to do with it.
    pub fn end(&mut self) {
        self.hold(0);
    }

    fn hold(&mut self, word: u64) {
        if self.taken != word {
            self.table.change(self.shard, self.slot, word.wrapping_sub(self.taken));
            self.taken = word;
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: LoadSlot = LoadSlot(3);

    fn load(prefill: u32, decode: u32, tokens: u64) -> Load {
        Load { prefill, decode, tokens }
    }

    #[test]
    fn a_shard_sees_its_own_requests_at_once_and_the_others_after_publication() {
        let table = Arc::new(LoadTable::new(2, 4));
        let first = table.reserve(ShardId(0), SLOT, 100);
        let second = table.reserve(ShardId(1), SLOT, 16);
        assert_eq!((first.ahead(), second.ahead()), (load(0, 0, 0), load(0, 0, 0)));
        assert_eq!(table.seen_by(ShardId(0), SLOT), load(1, 0, 112));
        assert!(table.publish(4));
        assert_eq!(table.seen_by(ShardId(0), SLOT), load(2, 0, 128));
        assert_eq!(table.seen_by(ShardId(1), SLOT), load(2, 0, 128));
        assert_eq!(table.reserve(ShardId(1), SLOT, 0).ahead(), load(2, 0, 128));
        drop(first);
        assert_eq!(table.seen_by(ShardId(0), SLOT), load(1, 0, 16));
        drop(second);
        assert!(table.publish(4));
        assert!(!table.publish(4), "nothing changed");
        assert_eq!((table.seen_by(ShardId(0), SLOT), table.total(SLOT)), (Load::default(), Load::default()));
    }

    #[test]
    fn a_request_waits_with_its_tokens_until_its_first_byte_and_gives_back_what_it_has() {
        let table = Arc::new(LoadTable::new(1, 4));
        let mut first = table.reserve(ShardId(0), SLOT, 1_000);
        let second = table.reserve(ShardId(0), SLOT, 0);
        assert_eq!(table.total(SLOT), load(2, 0, 1_008));
        for _ in 0..2 {
            first.first_byte();
            assert_eq!((table.total(SLOT), table.total(SLOT).requests()), (load(1, 1, 0), 2));
        }
        drop(second);
        assert_eq!(table.total(SLOT), load(0, 1, 0));
        drop(first);
        assert_eq!(table.total(SLOT), Load::default());
        // One that never gets an answer, and one with more tokens than any context has.
        let endless = table.reserve(ShardId(0), SLOT, u64::MAX);
        assert_eq!(table.total(SLOT), load(1, 0, 16 << 20));
        drop((table.reserve(ShardId(0), SLOT, 5), endless));
        assert_eq!(table.total(SLOT), Load::default());
    }

    #[test]
    fn the_first_change_after_a_pause_wakes_the_publisher_and_news_keep_it_awake() {
        let table = Arc::new(LoadTable::new(2, 4));
        assert!(!table.sleep(), "nobody would wake it");
        let woken = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&woken);
        table.wake_with(move || _ = counter.fetch_add(1, Ordering::Relaxed));
        let mut first = table.reserve(ShardId(0), LoadSlot(1), 64);
        assert!(!table.sleep() && !table.is_asleep());
        assert_eq!(woken.load(Ordering::Relaxed), 0);
        table.publish(4);
        assert!(table.sleep() && table.is_asleep(), "a request that only waits is no news");
        first.first_byte();
        assert_eq!((woken.load(Ordering::Relaxed), table.is_asleep()), (1, false));
        table.publish(4);
        assert_eq!(table.seen_by(ShardId(1), LoadSlot(1)), load(0, 1, 0));
        assert!(table.sleep());
        drop(first);
        let requests = [0, 1].map(|shard| table.reserve(ShardId(shard), LoadSlot(2), 0));
        assert_eq!((woken.load(Ordering::Relaxed), table.is_asleep()), (2, false));
        drop(requests);
        table.publish(4);
        assert!(table.sleep());
    }
}
