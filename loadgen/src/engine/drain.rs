//! TensorRT-LLM's event queue: every event is given to exactly one caller, and then gone.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::Notify;

use super::trtllm_wire::{Event, TrtllmRelease, encode};

/// How long an older release waits for an event when it has none.
const EMPTY_WAIT: Duration = Duration::from_secs(2);

/// The queue of all ranks.
#[derive(Debug)]
pub struct Drain {
    release: TrtllmRelease,
    /// Whether events tell their rank.
    ranked: bool,
    limit: usize,
    queue: Mutex<Queue>,
    filled: Notify,
    /// Calls of the drain.
    pub calls: AtomicU64,
    /// Events that a second drainer took.
    pub stolen: AtomicU64,
    /// Events that found the queue full.
    pub overflowed: AtomicU64,
}

#[derive(Debug, Default)]
struct Queue {
    events: VecDeque<Value>,
    /// The next number of each rank.
    next: Vec<u64>,
}

impl Drain {
    /// An empty queue for `ranks` ranks that keeps the newest `limit` events.
    #[must_use]
    pub fn new(release: TrtllmRelease, ranks: u16, limit: usize) -> Self {
        Self {
            release,
            ranked: ranks > 1,
            limit: limit * usize::from(ranks),
            queue: Mutex::new(Queue { events: VecDeque::new(), next: vec![0; usize::from(ranks)] }),
            filled: Notify::new(),
            calls: AtomicU64::new(0),
            stolen: AtomicU64::new(0),
            overflowed: AtomicU64::new(0),
        }
    }

    /// Queues a rank's event about the pool of `window` tokens. A `lost` one only uses up its number.
    pub fn push(&self, rank: u16, event: &Event, window: u64, lost: bool) {
        let Ok(mut queue) = self.queue.lock() else { return };
        let next = &mut queue.next[usize::from(rank)];
        let id = *next;
        *next += 1;
        if lost {
            return;
        }
        let ranked = self.ranked.then_some(u64::from(rank));
        queue.events.push_back(encode(self.release, event, id, window, ranked));
        if queue.events.len() > self.limit {
            queue.events.pop_front();
            self.overflowed.fetch_add(1, Ordering::Relaxed);
        }
        self.filled.notify_one();
    }

    /// Starts a rank's numbers over; what its former process had queued is gone with it.
    pub fn restart(&self, rank: u16) {
        let Ok(mut queue) = self.queue.lock() else { return };
        queue.next[usize::from(rank)] = 0;
        let ranked = u64::from(rank);
        queue.events.retain(|event| event["attention_dp_rank"].as_u64().unwrap_or(0) != ranked);
    }

    /// Takes everything.
    pub async fn drain(&self) -> Vec<Value> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let found = self.take();
        if !found.is_empty() || !self.release.drain_waits() {
            return found;
        }
        // Time-out or not: what is there now is the answer.
        let _ = tokio::time::timeout(EMPTY_WAIT, self.filled.notified()).await;
        self.take()
    }

    /// Takes everything for somebody else.
    pub fn steal(&self) {
        self.stolen.fetch_add(self.take().len() as u64, Ordering::Relaxed);
    }

    fn take(&self) -> Vec<Value> {
        self.queue.lock().map(|mut queue| std::mem::take(&mut queue.events).into()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(events: &[Value]) -> Vec<u64> {
        events.iter().filter_map(|event| event["event_id"].as_u64()).collect()
    }

    #[test]
    fn numbers_go_on_past_what_was_dropped_and_start_over_with_the_rank() {
        let drain = Drain::new(TrtllmRelease::V1_3, 2, 2);
        for number in 0..6 {
            drain.push(0, &Event::Removed(vec![number]), 8192, number == 1);
        }
        drain.push(1, &Event::Removed(vec![9]), 8192, false);
        let taken = drain.take();
        assert_eq!(ids(&taken), [3, 4, 5, 0], "the oldest were dropped for two ranks' limit of four");
        assert_eq!((&taken[0]["attention_dp_rank"], &taken[3]["attention_dp_rank"]), (&0.into(), &1.into()));
        assert!(drain.take().is_empty(), "an event is given once");
        drain.push(0, &Event::Removed(vec![1]), 8192, false);
        drain.push(1, &Event::Removed(vec![1]), 8192, false);
        drain.restart(0);
        drain.push(0, &Event::Removed(vec![1]), 8192, false);
        assert_eq!(ids(&drain.take()), [1, 0]);
    }
}
