//! What every decision reads of every endpoint, side by side in memory.
//!
//! A decision looks at all endpoints of a service. What stands a kilobyte apart for each of them does not stay in the
//! processor's nearest cache, however little of it is read; sixteen bytes each, in one piece, do.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::load::LoadSlot;

/// Counts the changes of all vitals of the process that what is kept of them may depend on; on a line of its own.
#[repr(align(128))]
struct Changes(AtomicU64);

static CHANGES: Changes = Changes(AtomicU64::new(0));

/// Counted after the change: who sees the count sees the change.
fn note_change() {
    CHANGES.0.fetch_add(1, Ordering::Release);
}

/// How often vitals of the process have changed. Who finds the same number later than it read some vitals would find the same
/// of them: whether they are up, the blocks of the cache, and the [`magnitude`] of what is held.
pub(super) fn changes() -> u64 {
    CHANGES.0.load(Ordering::Acquire)
}

/// Binary digits of a number of blocks: they seldom change where the number does all the time.
pub(crate) fn magnitude(blocks: u64) -> u32 {
    u64::BITS - blocks.leading_zeros()
}

/// Places for the vitals of a process's endpoints, one for each place of the load table.
#[derive(Clone, Debug)]
pub struct Board(Arc<[Cell]>);

/// The state of one endpoint that decisions read.
#[derive(Debug)]
pub(crate) struct Cell {
    kv_blocks: AtomicU64,
    /// 0 = not known.
    cache_blocks: AtomicU32,
    up: AtomicBool,
}

impl Cell {
    /// Keys that the endpoint's engine announced and has not withdrawn.
    pub(crate) fn kv_blocks(&self) -> u64 {
        self.kv_blocks.load(Ordering::Relaxed)
    }

    /// Blocks of its engine's cache; 0 = not known.
    pub(crate) fn cache_blocks(&self) -> u32 {
        self.cache_blocks.load(Ordering::Relaxed)
    }

    /// Whether requests may go there.
    pub(crate) fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    fn clear(&self) {
        self.kv_blocks.store(0, Ordering::Relaxed);
        self.cache_blocks.store(0, Ordering::Relaxed);
        self.up.store(true, Ordering::Relaxed);
        note_change();
    }
}

impl Board {
    /// Places for so many endpoints.
    #[must_use]
    pub fn new(slots: usize) -> Self {
        let cell = || Cell { kv_blocks: AtomicU64::new(0), cache_blocks: AtomicU32::new(0), up: AtomicBool::new(true) };
        Board((0..slots).map(|_| cell()).collect())
    }

    /// Fresh vitals at the place of that number, which nobody else may have.
    ///
    /// # Panics
    ///
    /// If the board has no such place.
    #[must_use]
    pub fn vitals(&self, slot: LoadSlot) -> Vitals {
        self.0[slot.0 as usize].clear();
        Vitals { board: Arc::clone(&self.0), at: slot.0, slot }
    }
}

/// The vitals of one endpoint; copies are the same endpoint's.
#[derive(Clone, Debug)]
pub struct Vitals {
    board: Arc<[Cell]>,
    /// Its place there.
    at: u32,
    slot: LoadSlot,
}

impl Vitals {
    /// Of an endpoint that no board has a place for.
    #[must_use]
    pub fn alone(slot: LoadSlot) -> Self {
        Vitals { board: Board::new(1).0, at: 0, slot }
    }

    /// The endpoint's place in the load table.
    #[must_use]
    pub fn slot(&self) -> LoadSlot {
        self.slot
    }

    pub(crate) fn cell(&self) -> &Cell {
        &self.board[self.at as usize]
    }

    /// Whether requests may go there.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.cell().is_up()
    }

    /// Says whether requests may go there; whether they might before.
    pub(super) fn set_up(&self, up: bool) -> bool {
        let before = self.cell().up.swap(up, Ordering::Relaxed);
        if before != up {
            note_change();
        }
        before
    }

    pub(super) fn set_kv_blocks(&self, blocks: u64) {
        let before = self.cell().kv_blocks.swap(blocks, Ordering::Relaxed);
        if magnitude(before) != magnitude(blocks) {
            note_change();
        }
    }

    pub(super) fn set_cache_blocks(&self, blocks: u32) {
        if self.cell().cache_blocks.swap(blocks, Ordering::Relaxed) != blocks {
            note_change();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_that_takes_over_a_place_begins_anew_and_leaves_others_alone() {
        assert_eq!(size_of::<Cell>(), 16);
        let board = Board::new(2);
        let [first, second] = [0, 1].map(|slot| board.vitals(LoadSlot(slot)));
        for vitals in [&first, &second] {
            vitals.set_kv_blocks(7);
            vitals.set_cache_blocks(9);
            assert!(vitals.set_up(false) && !vitals.is_up());
        }
        let again = board.vitals(LoadSlot(0));
        let seen = |vitals: &Vitals| (vitals.is_up(), vitals.cell().kv_blocks(), vitals.cell().cache_blocks());
        assert_eq!([seen(&again), seen(&second)], [(true, 0, 0), (false, 7, 9)]);
        assert_eq!(seen(&Vitals::alone(LoadSlot(5))), (true, 0, 0));
    }
}
