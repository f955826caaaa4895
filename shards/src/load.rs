//! In-flight requests per endpoint, counted without a shared cache line.
//!
//! **Invariant.** Row `s` is written by shard `s` alone; the `others` rows are written by the ingest thread alone.
//! A decision on shard `s` reads `others[s]` and its own row. Every [`Reservation`] gives back exactly what it took,
//! on every way out, because it does so when dropped.
//!
//! The load of an endpoint as shard `s` sees it is `own(s) + others(s)`: its own requests exactly, the other
//! shards' as of the last publication (200 µs).
//!
//! While nothing is in flight the ingest thread sleeps: it says so before it looks a last time, and a shard looks
//! whether it said so after it has counted a request. One of the two sees the other.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, OnceLock};

use crate::ids::ShardId;

/// Place of an endpoint in every row of a [`LoadTable`]; process-wide, freed when the endpoint is gone for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LoadSlot(pub u32);

/// One row, kept off its neighbours' cache lines.
#[repr(align(128))]
#[derive(Debug)]
struct Row(Box<[AtomicU32]>);

impl Row {
    fn new(slots: usize) -> Self {
        Row((0..slots).map(|_| AtomicU32::new(0)).collect())
    }
}

/// Wakes the ingest thread.
struct Wake(Box<dyn Fn() + Send + Sync>);

impl fmt::Debug for Wake {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Wake")
    }
}

/// The in-flight counts of all shards and endpoints of the process.
#[derive(Debug)]
pub struct LoadTable {
    own: Box<[Row]>,
    others: Box<[Row]>,
    /// Nobody publishes until woken.
    asleep: AtomicBool,
    wake: OnceLock<Wake>,
}

impl LoadTable {
    /// A table of zeros for `shards` shards and `slots` endpoints.
    #[must_use]
    pub fn new(shards: usize, slots: usize) -> Self {
        LoadTable {
            own: (0..shards).map(|_| Row::new(slots)).collect(),
            others: (0..shards).map(|_| Row::new(slots)).collect(),
            asleep: AtomicBool::new(false),
            wake: OnceLock::new(),
        }
    }

    /// What a shard does with the first request after [`LoadTable::sleep`]; the first call counts.
    pub fn wake_with(&self, wake: impl Fn() + Send + Sync + 'static) {
        let _ = self.wake.set(Wake(Box::new(wake)));
    }

    /// The caller will not publish until it is woken. False, and nothing changes, where nobody would wake it or something
    /// is in flight at one of the first `slots_used` slots.
    pub fn sleep(&self, slots_used: usize) -> bool {
        if self.wake.get().is_none() {
            return false;
        }
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let busy = (0..slots_used.min(self.slots())).any(|slot| self.total(LoadSlot(slot as u32)) > 0);
        if busy {
            self.asleep.store(false, Ordering::Relaxed);
        }
        !busy
    }

    /// Whether the last [`LoadTable::sleep`] lasts.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::Relaxed)
    }

    /// How many endpoints the table has room for.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.own.first().map_or(0, |row| row.0.len())
    }

    /// How many shards have a row: a single one has nobody to hear of.
    #[must_use]
    pub fn shards(&self) -> usize {
        self.own.len()
    }

    /// Requests in flight at the endpoint, as `shard` sees it.
    #[must_use]
    pub fn seen_by(&self, shard: ShardId, slot: LoadSlot) -> u32 {
        let slot = slot.0 as usize;
        let own = self.own[shard.index()].0[slot].load(Ordering::Relaxed);
        own.wrapping_add(self.others[shard.index()].0[slot].load(Ordering::Relaxed))
    }

    /// Requests in flight at the endpoint over all shards, exact when the shards stand still.
    #[must_use]
    pub fn total(&self, slot: LoadSlot) -> u32 {
        self.own.iter().fold(0, |sum, row| sum.wrapping_add(row.0[slot.0 as usize].load(Ordering::Relaxed)))
    }

    /// Publishes every shard's view of the other shards. Called by the ingest thread alone, every 200 µs, for the
    /// first `slots_used` slots. True if anything is in flight at one of them.
    pub fn publish(&self, slots_used: usize) -> bool {
        let mut any = false;
        for slot in 0..slots_used.min(self.slots()) {
            let total = self.total(LoadSlot(slot as u32));
            any |= total > 0;
            for (own, others) in self.own.iter().zip(self.others.iter()) {
                let own = own.0[slot].load(Ordering::Relaxed);
                // A shard may have changed its row between the two reads: the difference must not wrap below zero.
                others.0[slot].store(total.saturating_sub(own), Ordering::Relaxed);
            }
        }
        any
    }

    /// Counts one request in flight at the endpoint until the reservation is dropped.
    pub fn reserve(self: &Arc<Self>, shard: ShardId, slot: LoadSlot) -> Reservation {
        self.own[shard.index()].0[slot.0 as usize].fetch_add(1, Ordering::Relaxed);
        // Against `sleep`; where read-modify-writes are barriers already it costs 5 ns.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed)
            && self.asleep.swap(false, Ordering::Relaxed)
            && let Some(Wake(wake)) = self.wake.get()
        {
            wake();
        }
        Reservation { table: Arc::clone(self), shard, slot }
    }
}

/// One request in flight at one endpoint; dropping it gives the count back.
#[derive(Debug)]
#[must_use]
pub struct Reservation {
    table: Arc<LoadTable>,
    shard: ShardId,
    slot: LoadSlot,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let before = self.table.own[self.shard.index()].0[self.slot.0 as usize].fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "a reservation is given back once");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_sees_its_own_requests_at_once_and_the_others_after_publication() {
        let table = Arc::new(LoadTable::new(2, 4));
        let slot = LoadSlot(3);
        let first = table.reserve(ShardId(0), slot);
        let second = table.reserve(ShardId(1), slot);
        assert_eq!(table.seen_by(ShardId(0), slot), 1);
        assert!(table.publish(4));
        assert_eq!(table.seen_by(ShardId(0), slot), 2);
        assert_eq!(table.seen_by(ShardId(1), slot), 2);
        drop(first);
        assert_eq!(table.seen_by(ShardId(0), slot), 1);
        drop(second);
        assert!(!table.publish(4));
        assert_eq!((table.seen_by(ShardId(0), slot), table.total(slot)), (0, 0));
    }

    #[test]
    fn the_first_request_after_a_pause_wakes_the_publisher_and_a_busy_table_does_not_sleep() {
        let table = Arc::new(LoadTable::new(2, 4));
        assert!(!table.sleep(4), "nobody would wake it");
        let woken = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&woken);
        table.wake_with(move || _ = counter.fetch_add(1, Ordering::Relaxed));
        let first = table.reserve(ShardId(0), LoadSlot(1));
        assert!(!table.sleep(4) && !table.is_asleep());
        assert_eq!(woken.load(Ordering::Relaxed), 0);
        drop(first);
        assert!(table.sleep(4) && table.is_asleep());
        let requests = [0, 1].map(|shard| table.reserve(ShardId(shard), LoadSlot(2)));
        assert_eq!((woken.load(Ordering::Relaxed), table.is_asleep()), (1, false));
        drop(requests);
        assert!(table.sleep(4));
    }
}
