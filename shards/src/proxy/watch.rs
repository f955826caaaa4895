//! Deadlines and signals of client connections: what may interrupt a connection's task while it waits.
//!
//! Setting a deadline is one store; a sweep every [`SWEEP_EVERY`] finds those that have passed. Deadlines are therefore
//! kept to within that time, which is little beside any limit of a connection.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::executor::{ReadAhead, visit_ns};

/// Time between two sweeps over all connections.
pub const SWEEP_EVERY: Duration = Duration::from_millis(50);

/// Connections looked at in one slice of a sweep.
const SWEEP_SLICE: usize = 2_048;

/// What ended a wait other than what was waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupt {
    /// The client closed its connection, or it broke.
    ClientGone,
    /// The deadline passed.
    TimedOut,
    /// The shard gives the connection up: it was idle and is not wanted any more.
    CloseIdle,
    /// The shard's time to drain is over.
    Cut,
    /// The request's other leg failed: see [`Companion`].
    OtherLeg,
}

/// What goes on beside whatever else the connection's task waits for: the other leg of its request. What it owns is given
/// up with it.
pub type Companion = Pin<Box<dyn Future<Output = Verdict>>>;

/// How a companion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Well: the task's own wait goes on.
    Well,
    /// The task's own wait is of no use any more: it ends with [`Interrupt::OtherLeg`].
    Interrupts,
}

/// The supervision of one connection, seen by its task and by the shard.
#[derive(Debug)]
pub struct Watch {
    deadline_ns: Cell<u64>,
    signal: Cell<Option<Interrupt>>,
    /// When the connection became idle; 0 = it is not.
    idle_since_ns: Cell<u64>,
    waker: RefCell<Option<Waker>>,
}

impl Watch {
    fn new() -> Self {
        Watch {
            deadline_ns: Cell::new(u64::MAX),
            signal: Cell::new(None),
            idle_since_ns: Cell::new(0),
            waker: RefCell::new(None),
        }
    }

    /// From now on the task may wait for the given time; without one, for ever.
    pub fn arm(&self, time: Option<Duration>) {
        let deadline = time.map_or(u64::MAX, |time| visit_ns().saturating_add(time.as_nanos() as u64));
        self.deadline_ns.set(deadline);
        if self.signal.get() == Some(Interrupt::TimedOut) {
            self.signal.set(None);
        }
    }

    /// Marks the connection as idle: nothing of a request has come. Only then may it be closed to make room.
    pub fn set_idle(&self, idle: bool) {
        self.idle_since_ns.set(if idle { visit_ns().max(1) } else { 0 });
        if !idle && self.signal.get() == Some(Interrupt::CloseIdle) {
            self.signal.set(None);
        }
    }

    /// The interrupt that is due, if any; otherwise the task is woken when there is one.
    pub fn poll(&self, context: &Context<'_>) -> Option<Interrupt> {
        if let Some(signal) = self.signal.get() {
            return Some(signal);
        }
        let mut waker = self.waker.borrow_mut();
        if !waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            *waker = Some(context.waker().clone());
        }
        None
    }

    fn send(&self, signal: Interrupt) {
        // A cut is final; everything else gives way to it.
        if self.signal.get() != Some(Interrupt::Cut) {
            self.signal.set(Some(signal));
        }
        if let Some(waker) = self.waker.borrow().as_ref() {
            waker.wake_by_ref();
        }
    }
}

/// Waits for `future`, for the deadline, for the companion to fail, and for the client to leave, whichever is first.
///
/// # Errors
/// What interrupted the wait. The future is dropped then: the connection it reads or writes must be given up with it.
pub async fn guarded<F: Future>(
    reader: &mut ReadAhead,
    watch: &Watch,
    companion: &mut Option<Companion>,
    future: F,
) -> Result<F::Output, Interrupt> {
    let mut future = pin!(future);
    std::future::poll_fn(|context| {
        if let Poll::Ready(output) = future.as_mut().poll(context) {
            return Poll::Ready(Ok(output));
        }
        if let Some(interrupt) = watch.poll(context) {
            return Poll::Ready(Err(interrupt));
        }
        if let Some(beside) = companion
            && let Poll::Ready(verdict) = beside.as_mut().poll(context)
        {
            *companion = None;
            if verdict == Verdict::Interrupts {
                return Poll::Ready(Err(Interrupt::OtherLeg));
            }
        }
        reader.poll_watch(context).map(|_| Err(Interrupt::ClientGone))
    })
    .await
}

/// The open client connections of a shard.
#[derive(Debug, Default)]
pub struct Connections {
    places: RefCell<Vec<Option<Rc<Watch>>>>,
    free: RefCell<Vec<usize>>,
    open: Cell<usize>,
}

/// One open connection's place; given up when dropped.
#[derive(Debug)]
pub struct Place {
    connections: Rc<Connections>,
    index: usize,
    /// The connection's supervision.
    pub watch: Rc<Watch>,
}

impl Connections {
    /// A place for a new connection. With `max` taken, the connection that has been idle longest is told to close;
    /// none when no connection is idle: the new one must be refused.
    pub fn open(self: &Rc<Self>, max: usize) -> Option<Place> {
        if self.open.get() >= max && !self.close_longest_idle() {
            return None;
        }
        let watch = Rc::new(Watch::new());
        let mut places = self.places.borrow_mut();
        let index = self.free.borrow_mut().pop().unwrap_or_else(|| {
            places.push(None);
            places.len() - 1
        });
        places[index] = Some(Rc::clone(&watch));
        self.open.set(self.open.get() + 1);
        Some(Place { connections: Rc::clone(self), index, watch })
    }

    /// How many are open.
    #[must_use]
    pub fn count(&self) -> usize {
        self.open.get()
    }

    /// Tells every idle connection to close.
    pub fn close_idle(&self) {
        self.each(0, usize::MAX, |watch| {
            if watch.idle_since_ns.get() != 0 {
                watch.send(Interrupt::CloseIdle);
            }
        });
    }

    /// Ends every connection.
    pub fn cut(&self) {
        self.each(0, usize::MAX, |watch| watch.send(Interrupt::Cut));
    }

    /// Wakes the connections in one slice of places whose deadline has passed; returns where the next slice begins,
    /// none after the last one.
    pub fn sweep(&self, from: usize) -> Option<usize> {
        let now = visit_ns();
        self.each(from, SWEEP_SLICE, |watch| {
            if watch.deadline_ns.get() < now && watch.signal.get().is_none() {
                watch.send(Interrupt::TimedOut);
            }
        });
        let next = from + SWEEP_SLICE;
        (next < self.places.borrow().len()).then_some(next)
    }

    fn close_longest_idle(&self) -> bool {
        let places = self.places.borrow();
        let idle =
            places.iter().flatten().filter(|watch| watch.idle_since_ns.get() != 0 && watch.signal.get().is_none());
        match idle.min_by_key(|watch| watch.idle_since_ns.get()) {
            Some(watch) => {
                watch.send(Interrupt::CloseIdle);
                true
            }
            None => false,
        }
    }

    fn each(&self, from: usize, count: usize, mut act: impl FnMut(&Watch)) {
        self.places.borrow().iter().skip(from).take(count).flatten().for_each(|watch| act(watch));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.connections.places.borrow_mut()[self.index] = None;
        self.connections.free.borrow_mut().push(self.index);
        self.connections.open.set(self.connections.open.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signal(place: &Place) -> Option<Interrupt> {
        place.watch.signal.get()
    }

    #[test]
    fn a_full_shard_gives_up_its_longest_idle_connection_and_else_refuses() {
        let connections = Rc::new(Connections::default());
        let first = connections.open(2).expect("room");
        let second = connections.open(2).expect("room");
        assert!(connections.open(2).is_none(), "both are busy");
        second.watch.idle_since_ns.set(7);
        first.watch.idle_since_ns.set(9);
        let third = connections.open(2).expect("the longest idle one gives way");
        assert_eq!(signal(&second), Some(Interrupt::CloseIdle));
        assert_eq!(signal(&first), None);
        drop((second, third));
        assert_eq!(connections.count(), 1);
        let again = connections.open(2).expect("room");
        assert_eq!(connections.count(), 2);
        drop((first, again));
        assert_eq!(connections.count(), 0);
    }

    #[test]
    fn a_cut_is_final_and_a_deadline_is_not() {
        let connections = Rc::new(Connections::default());
        let place = connections.open(1).expect("room");
        place.watch.deadline_ns.set(0);
        place.watch.send(Interrupt::TimedOut);
        place.watch.arm(None);
        assert_eq!(signal(&place), None);
        connections.cut();
        place.watch.send(Interrupt::TimedOut);
        place.watch.arm(None);
        place.watch.set_idle(false);
        assert_eq!(signal(&place), Some(Interrupt::Cut));
    }
}
