//! Who may begin a disaggregated request: places per prefill endpoint, places per service, and queues in front of full
//! endpoints.
//!
//! **Invariant.** Whatever was taken is given back when its guard is dropped, on every way out. The counts are shared by
//! all shards; a queue is first in, first out on its shard.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::ids::EndpointIndex;

/// The bounds; all off by default, since queueing in the gateway lowers what a saturated fleet serves and helps its
/// slowest requests only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ladder {
    /// Requests in prefill at one endpoint (`LLB_PD_MAX_INFLIGHT_PER_EP`). Beyond it another endpoint is chosen, else the
    /// request waits or is refused (429). 0 = no bound.
    pub per_endpoint: u32,
    /// Requests that wait for one endpoint (`LLB_PD_QUEUE_DEPTH_PER_EP`). Beyond it they are refused (429). 0 = none wait.
    pub queue: u32,
    /// Longest wait for a place (`LLB_PD_MAX_PARK_SEC`). Then: 504. Zero = [`PARK_DEFAULT`].
    pub park: Duration,
    /// Requests of the rule under way, both legs (`LLB_PD_MAX_TOTAL_INFLIGHT`). Beyond it: 429. 0 = no bound.
    pub total: u32,
}

/// Wait for a place where nothing is said of it.
pub const PARK_DEFAULT: Duration = Duration::from_secs(30);

impl Ladder {
    /// How long a request waits for a place at most.
    #[must_use]
    pub fn park_max(&self) -> Duration {
        if self.park.is_zero() { PARK_DEFAULT } else { self.park }
    }
}

/// A number of things in use, for all shards.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU32);

impl Gauge {
    /// Takes one, unless `max` are taken; 0 = there is no bound.
    #[must_use]
    pub fn take(self: &Arc<Self>, max: u32) -> Option<Taken> {
        let add = |count: u32| (max == 0 || count < max).then_some(count + 1);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        Some(Taken(Arc::clone(self)))
    }

    /// How many are taken.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

/// One thing in use; given back when dropped.
#[derive(Debug)]
pub struct Taken(Arc<Gauge>);

impl Drop for Taken {
    fn drop(&mut self) {
        let before = self.0.0.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "what is taken is given back once");
    }
}

/// What admission counts at one endpoint.
#[derive(Debug, Default)]
pub struct Places {
    /// Requests in prefill.
    pub inflight: Arc<Gauge>,
    /// Requests that wait.
    pub parked: Arc<Gauge>,
}

/// The queues of one shard in one service.
#[derive(Debug, Default)]
pub struct Queues(RefCell<State>);

#[derive(Debug, Default)]
struct State {
    next: u64,
    waiting: HashMap<EndpointIndex, VecDeque<u64>>,
}

/// A place in a queue; left when dropped.
#[derive(Debug)]
pub struct Waiting {
    queues: Rc<Queues>,
    endpoint: EndpointIndex,
    number: u64,
    _counted: Taken,
}

impl Queues {
    /// Stands behind those that wait for the endpoint.
    #[must_use]
    pub fn join(self: &Rc<Self>, endpoint: EndpointIndex, counted: Taken) -> Waiting {
        let mut state = self.0.borrow_mut();
        let number = state.next;
        state.next += 1;
        state.waiting.entry(endpoint).or_default().push_back(number);
        Waiting { queues: Rc::clone(self), endpoint, number, _counted: counted }
    }

    /// Whether somebody on this shard waits for the endpoint.
    #[must_use]
    pub fn is_waited_for(&self, endpoint: EndpointIndex) -> bool {
        self.0.borrow().waiting.get(&endpoint).is_some_and(|queue| !queue.is_empty())
    }
}

impl Waiting {
    /// Whether it is this one's turn.
    #[must_use]
    pub fn is_first(&self) -> bool {
        let state = self.queues.0.borrow();
        state.waiting.get(&self.endpoint).and_then(VecDeque::front) == Some(&self.number)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut state = self.queues.0.borrow_mut();
        if let Some(queue) = state.waiting.get_mut(&self.endpoint) {
            queue.retain(|number| *number != self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_bounded_and_come_back() {
        let places = Arc::new(Gauge::default());
        let first = places.take(2).expect("room");
        let second = places.take(2).expect("room");
        assert!(places.take(2).is_none());
        drop(first);
        let third = places.take(2).expect("room again");
        assert!(places.take(0).is_some(), "without a bound there is always room");
        drop((second, third));
        assert_eq!(places.count(), 0);
    }

    #[test]
    fn a_queue_is_first_in_first_out_and_whoever_leaves_makes_way() {
        let (queues, parked) = (Rc::new(Queues::default()), Arc::new(Gauge::default()));
        let join = |endpoint| queues.join(EndpointIndex(endpoint), parked.take(0).expect("no bound"));
        let (first, second, third, other) = (join(1), join(1), join(1), join(2));
        assert!(first.is_first() && !second.is_first() && other.is_first());
        drop(second);
        drop(first);
        assert!(third.is_first());
        assert_eq!(parked.count(), 2);
        drop((third, other));
        assert!(!queues.is_waited_for(EndpointIndex(1)) && parked.count() == 0);
    }

    #[test]
    fn the_wait_has_a_default() {
        assert_eq!(Ladder::default().park_max(), PARK_DEFAULT);
        assert_eq!(Ladder { park: Duration::from_secs(2), ..Ladder::default() }.park_max(), Duration::from_secs(2));
    }
}
