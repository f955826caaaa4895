//! Who may begin a disaggregated request: places per prefill endpoint, places per service, and queues in front of full
//! endpoints.
//!
//! **Invariant.** Whatever was taken is given back when its guard is dropped, on every way out. Counts and queues are shared
//! by all shards, and nothing but atomics.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// The bounds; all off by default, since queueing in the gateway lowers what a saturated fleet serves and helps its
/// slowest requests only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ladder {
    /// Requests in prefill at one endpoint (`LLB_PD_MAX_INFLIGHT_PER_EP`). Beyond it another endpoint is chosen, else the
    /// request waits or is refused (429). 0 = no bound.
    pub per_endpoint: u32,
    /// Requests that wait for one endpoint (`LLB_PD_QUEUE_DEPTH_PER_EP`). Beyond it, or [`QUEUE_MAX`], they are refused (429). 0 = none
    /// wait.
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
    pub queue: Arc<Queue>,
}

/// Requests that may wait for one endpoint at once, whatever the ladder says: as many as the reference allows.
pub const QUEUE_MAX: usize = 64;

/// Those who wait for one endpoint, on all shards: first come, first served.
#[derive(Debug)]
pub struct Queue {
    next: AtomicU64,
    /// Numbers of those who wait, in any order; 0 = nobody.
    waiting: [AtomicU64; QUEUE_MAX],
}

impl Default for Queue {
    fn default() -> Self {
        Queue { next: AtomicU64::new(1), waiting: std::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

/// A place in a queue; left when dropped.
#[derive(Debug)]
pub struct Waiting {
    queue: Arc<Queue>,
    place: usize,
    number: u64,
}

impl Queue {
    /// Stands behind those that wait; none where `max` of them do.
    #[must_use]
    pub fn join(self: &Arc<Self>, max: u32) -> Option<Waiting> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let room = usize::try_from(max).map_or(QUEUE_MAX, |max| max.min(QUEUE_MAX));
        let enter = |place: &AtomicU64| place.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        let place = self.waiting[..room].iter().position(enter)?;
        Some(Waiting { queue: Arc::clone(self), place, number })
    }

    /// How many wait.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.numbers().count() as u32
    }

    fn numbers(&self) -> impl Iterator<Item = u64> {
        self.waiting.iter().map(|number| number.load(Ordering::Relaxed)).filter(|number| *number != 0)
    }
}

impl Waiting {
    /// Whether it is this one's turn.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.queue.numbers().all(|number| number >= self.number)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.queue.waiting[self.place].store(0, Ordering::Relaxed);
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
    fn a_queue_is_first_in_first_out_over_all_threads_and_whoever_leaves_makes_way() {
        let queue = Arc::new(Queue::default());
        let join = || {
            let queue = Arc::clone(&queue);
            let joined = std::thread::spawn(move || queue.join(3));
            joined.join().expect("no panic")
        };
        let [first, second, third] = [(); 3].map(|()| join().expect("room"));
        assert!(first.is_first() && !second.is_first() && !third.is_first());
        assert!(join().is_none(), "three wait");
        drop(second);
        // The place that was left is in front of the third's: its number counts.
        let fourth = join().expect("one has left");
        drop(first);
        assert!(third.is_first() && !fourth.is_first());
        drop(third);
        assert!(fourth.is_first() && queue.count() == 1);
        drop(fourth);
        assert_eq!(queue.count(), 0);
        assert!(queue.join(0).is_none());
        let all: Vec<_> = std::iter::from_fn(|| queue.join(u32::MAX)).collect();
        assert_eq!(all.len(), QUEUE_MAX);
    }

    #[test]
    fn the_wait_has_a_default() {
        assert_eq!(Ladder::default().park_max(), PARK_DEFAULT);
        assert_eq!(Ladder { park: Duration::from_secs(2), ..Ladder::default() }.park_max(), Duration::from_secs(2));
    }
}
