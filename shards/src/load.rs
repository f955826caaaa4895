//! In-flight requests per endpoint, counted without a shared cache line.
//!
//! **Invariant.** Row `s` is written by shard `s` alone; the `others` rows are written by the ingest thread alone.
//! A decision on shard `s` reads `others[s]` and its own row. Every [`Reservation`] gives back exactly what it took,
//! on every way out, because it does so when dropped.
//!
//! The load of an endpoint as shard `s` sees it is `own(s) + others(s)`: its own requests exactly, the other
//! shards' as of the last publication (200 µs).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

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

/// The in-flight counts of all shards and endpoints of the process.
#[derive(Debug)]
pub struct LoadTable {
    own: Box<[Row]>,
    others: Box<[Row]>,
}

impl LoadTable {
    /// A table of zeros for `shards` shards and `slots` endpoints.
    #[must_use]
    pub fn new(shards: usize, slots: usize) -> Self {
        LoadTable {
            own: (0..shards).map(|_| Row::new(slots)).collect(),
            others: (0..shards).map(|_| Row::new(slots)).collect(),
        }
    }

    /// How many endpoints the table has room for.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.own.first().map_or(0, |row| row.0.len())
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
}
