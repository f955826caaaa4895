//! The right to do long work: one task of a shard slices at a time, first come first served.
//!
//! **Invariant.** At most one [`TicketGuard`] of a ticket lives at any time, and between the work of two holders the
//! driver is visited unless both together stay within the budget.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use super::{give_way, over_budget, turn};

/// Time of tasks since the last visit from which on a slicer gives way before it goes on, nanoseconds. A turn costs some
/// ten microseconds.
pub const SLICE_BUDGET_NS: u64 = 150_000;
/// Visits that a slicer lets go by to short work before each slice, at most.
const SLICE_TURNS_MAX: usize = 4;

/// The one CPU ticket of a shard.
#[derive(Clone, Default)]
pub struct Ticket(Rc<Inner>);

#[derive(Default)]
struct Inner {
    held: Cell<bool>,
    /// Waiting tasks, oldest first; at most one per open connection.
    waiting: RefCell<VecDeque<Rc<Place>>>,
}

#[derive(Default)]
struct Place {
    granted: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

/// The ticket, held; given to the next in line when dropped.
pub struct TicketGuard(Rc<Inner>);

impl Ticket {
    /// A free ticket.
    #[must_use]
    pub fn new() -> Self {
        Ticket::default()
    }

    /// Waits for the ticket. A task that stops waiting leaves the line.
    pub async fn take(&self) -> TicketGuard {
        let guard = if self.0.held.replace(true) { self.wait().await } else { TicketGuard(Rc::clone(&self.0)) };
        give_way(SLICE_BUDGET_NS, SLICE_TURNS_MAX).await;
        guard
    }

    async fn wait(&self) -> TicketGuard {
        /// Leaves the line, or passes a ticket on that was granted to a task that is gone.
        struct InLine<'a>(&'a Rc<Inner>, Rc<Place>);
        impl Drop for InLine<'_> {
            fn drop(&mut self) {
                if self.1.granted.get() {
                    pass_on(self.0);
                } else {
                    self.0.waiting.borrow_mut().retain(|place| !Rc::ptr_eq(place, &self.1));
                }
            }
        }
        let in_line = InLine(&self.0, Rc::default());
        self.0.waiting.borrow_mut().push_back(Rc::clone(&in_line.1));
        poll_fn(|context| {
            if in_line.1.granted.get() {
                return Poll::Ready(());
            }
            *in_line.1.waker.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
        // From here on the guard passes the ticket on, not the place in line.
        in_line.1.granted.set(false);
        TicketGuard(Rc::clone(&self.0))
    }

    /// Tasks waiting for the ticket.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.waiting.borrow().len()
    }
}

impl TicketGuard {
    /// Between two slices of long work: gives way once the shard has worked for its budget.
    pub async fn breathe(&self) {
        if over_budget(SLICE_BUDGET_NS) {
            // Twice: on a ring, passing a piece on takes a visit for its read and another for its write, and neither
            // should cost a neighbour a slice.
            turn().await;
            turn().await;
            give_way(SLICE_BUDGET_NS, SLICE_TURNS_MAX).await;
        }
    }
}

impl Drop for TicketGuard {
    fn drop(&mut self) {
        pass_on(&self.0);
    }
}

fn pass_on(inner: &Rc<Inner>) {
    let next = inner.waiting.borrow_mut().pop_front();
    match next {
        Some(place) => {
            place.granted.set(true);
            if let Some(waker) = place.waker.borrow_mut().take() {
                waker.wake();
            }
        }
        None => inner.held.set(false),
    }
}
