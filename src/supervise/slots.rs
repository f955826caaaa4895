//! Places in the load table: handed out per endpoint, given to another only when nothing counts there any more.

use std::sync::{Arc, Weak};

use shards::load::{LoadSlot, LoadTable};
use shards::service::{Board, EndpointShared, Vitals};

/// Endpoints of all rules together, those of deleted rules with requests under way included. Beyond it a rule is
/// refused.
pub const LOAD_SLOTS: usize = 8192;

/// Which places are in use.
#[derive(Debug)]
pub(super) struct Slots {
    loads: Arc<LoadTable>,
    /// A place for each of them.
    board: Board,
    free: Vec<LoadSlot>,
    next: u32,
    /// Places of endpoints that are gone, while a compiled table or a request may still count there.
    leaving: Vec<(LoadSlot, Weak<EndpointShared>)>,
}

impl Slots {
    pub(super) fn new(loads: Arc<LoadTable>) -> Self {
        Slots { board: Board::new(loads.slots()), loads, free: Vec::new(), next: 0, leaving: Vec::new() }
    }

    /// A place; none when all are taken.
    pub(super) fn take(&mut self) -> Option<LoadSlot> {
        self.free.pop().or_else(|| {
            ((self.next as usize) < self.loads.slots()).then(|| {
                self.next += 1;
                LoadSlot(self.next - 1)
            })
        })
    }

    /// Fresh vitals at a place that was taken.
    pub(super) fn vitals(&self, slot: LoadSlot) -> Vitals {
        self.board.vitals(slot)
    }

    /// How many places were ever handed out: those in use are among the first so many.
    pub(super) fn used(&self) -> usize {
        self.next as usize
    }

    /// Gives back the place of an endpoint that no rule has any more.
    pub(super) fn give_back(&mut self, shared: &Arc<EndpointShared>) {
        self.leaving.push((shared.slot, Arc::downgrade(shared)));
    }

    /// Frees places that nothing counts at any more. Called now and then.
    pub(super) fn sweep(&mut self) {
        let (loads, free) = (&self.loads, &mut self.free);
        self.leaving.retain(|(slot, shared)| {
            let used = shared.strong_count() > 0 || loads.total(*slot).requests() > 0;
            if !used {
                free.push(*slot);
            }
            used
        });
    }
}

#[cfg(test)]
mod tests {
    use shards::ids::{EndpointIndex, ShardId};

    use super::*;

    #[test]
    fn a_place_is_given_away_again_only_when_nothing_counts_there() {
        let loads = Arc::new(LoadTable::new(1, 2));
        let mut slots = Slots::new(Arc::clone(&loads));
        let (first, second) = (slots.take().expect("free"), slots.take().expect("free"));
        assert_ne!(first, second);
        assert_eq!(slots.take(), None);
        let shared = Arc::new(EndpointShared::new(EndpointIndex(0), first, 1));
        let reservation = loads.reserve(ShardId(0), first, 0);
        slots.give_back(&shared);
        slots.sweep();
        assert_eq!(slots.take(), None, "a table still names the endpoint");
        drop(shared);
        slots.sweep();
        assert_eq!(slots.take(), None, "a request still counts there");
        drop(reservation);
        slots.sweep();
        assert_eq!(slots.take(), Some(first));
    }
}
