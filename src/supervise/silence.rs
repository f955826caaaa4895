//! Is an engine busy and silent: does it answer requests, and announce nothing?
//!
//! An engine says nothing of blocks that it holds already, so requests alone prove nothing where somebody publishes:
//! prompts count whose blocks the endpoint was predicted to store and did not announce. Where nobody publishes at all,
//! every request counts.
//!
//! No I/O; the clock comes in.

use std::time::{Duration, Instant};

/// Time without a sign of life after which an engine may count as silent.
const SILENT_AFTER: Duration = Duration::from_secs(5);
/// Requests, or unannounced prompts, that show it to be busy.
const BUSY_MIN: u64 = 8;

/// What is seen of an endpoint, all its ranks together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// Whether every rank has a publisher.
    pub(super) connected: bool,
    /// Batches of events applied.
    pub(super) batches: u64,
    /// Prompts whose predicted blocks were not announced.
    pub(super) missed: u64,
    /// Prompts whose predicted blocks it had.
    pub(super) fulfilled: u64,
    /// Requests sent there.
    pub(super) requests: u64,
}

/// How an engine is silent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Silent {
    /// Nobody publishes.
    Unconnected,
    /// Somebody is connected and says nothing.
    Unannounced,
}

/// The watch over one endpoint.
#[derive(Debug)]
pub(super) struct Watch {
    /// When it last gave a sign of life, and what was seen then.
    since: Instant,
    then: Seen,
}

impl Watch {
    pub(super) fn new(now: Instant, seen: Seen) -> Self {
        Watch { since: now, then: seen }
    }

    /// Looks at what is seen now.
    pub(super) fn observe(&mut self, now: Instant, seen: Seen) -> Option<Silent> {
        let counters_went_back = seen.missed < self.then.missed || seen.requests < self.then.requests;
        if seen.batches != self.then.batches || seen.connected != self.then.connected || counters_went_back {
            *self = Watch::new(now, seen);
            return None;
        }
        if now.duration_since(self.since) < SILENT_AFTER {
            return None;
        }
        match seen.connected {
            false if seen.requests - self.then.requests >= BUSY_MIN => Some(Silent::Unconnected),
            // Who announced other blocks than predicted, and never those, is not silent: the predictions are wrong.
            true if seen.batches > 0 && seen.fulfilled == 0 => None,
            true if seen.missed - self.then.missed >= BUSY_MIN => Some(Silent::Unannounced),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn an_engine_that_announces_nothing_of_many_prompts_is_silent_until_it_announces_something() {
        let start = Instant::now();
        let mut seen = Seen { connected: true, ..Seen::default() };
        let mut watch = Watch::new(start, seen);
        (seen.missed, seen.requests) = (BUSY_MIN, BUSY_MIN);
        assert_eq!(watch.observe(start + at(1), seen), None, "too early to tell");
        assert_eq!(watch.observe(start + at(6), seen), Some(Silent::Unannounced));
        seen.batches = 1;
        assert_eq!(watch.observe(start + at(7), seen), None);
        seen.requests += 1_000;
        assert_eq!(watch.observe(start + at(60), seen), None, "prompts it holds are announced to nobody");
    }

    #[test]
    fn an_engine_whose_blocks_are_never_those_predicted_is_not_called_silent() {
        let start = Instant::now();
        let mut seen = Seen { connected: true, batches: 9, missed: 9, requests: 9, ..Seen::default() };
        let mut watch = Watch::new(start, seen);
        (seen.missed, seen.requests) = (9 + BUSY_MIN, 9 + BUSY_MIN);
        assert_eq!(watch.observe(start + at(60), seen), None, "repeated prompts are announced to nobody");
        seen.fulfilled = 1;
        assert_eq!(watch.observe(start + at(61), seen), Some(Silent::Unannounced));
    }

    #[test]
    fn an_engine_without_publisher_is_silent_once_it_is_busy() {
        let start = Instant::now();
        let mut seen = Seen::default();
        let mut watch = Watch::new(start, seen);
        assert_eq!(watch.observe(start + at(60), seen), None, "it is idle");
        seen.requests = BUSY_MIN;
        assert_eq!(watch.observe(start + at(61), seen), Some(Silent::Unconnected));
        seen.connected = true;
        assert_eq!(watch.observe(start + at(62), seen), None);
        seen.requests += BUSY_MIN;
        assert_eq!(watch.observe(start + at(90), seen), None);
    }
}
