//! Whether endpoints answer: `GET /health` every second, and when one that was taken out comes back.
//!
//! A shard takes an endpoint out at once when a connect fails; [`Monitor`] takes it out after two probes in a row
//! that fail, and alone brings it back. An endpoint that fails again before it answered anything waits longer each
//! time, 1 to 30 s, however well it answers probes; one whose breaker opened waits 30 s.

#![forbid(unsafe_code)]

mod probe;

use std::time::{Duration, Instant};

pub use probe::{Answer, probe};

/// How often every endpoint is probed.
pub const PERIOD: Duration = Duration::from_secs(1);
/// Longest wait for a probe's answer. Then the probe has failed.
pub const TIMEOUT: Duration = Duration::from_secs(1);
/// Probes in a row that must fail to take an endpoint out.
const FAILURES_TO_TAKE_OUT: u32 = 2;
/// Longest time an endpoint is kept out although it answers probes.
const BACK_OFF_MAX: Duration = Duration::from_secs(30);

/// How long an endpoint is kept out whose breaker opened.
const BREAKER_OPEN: Duration = Duration::from_secs(30);

/// What a monitor wants done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Keep,
    /// Take the endpoint out.
    TakeOut,
    /// Bring the endpoint back.
    BringBack,
}

/// What is known of an endpoint after one probe.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Whether requests go there.
    pub up: bool,
    /// Connect failures since the last request that got an answer.
    pub connect_failures: u32,
    /// Whether the probe was answered.
    pub alive: bool,
    /// The breaker took it out.
    pub tripped: bool,
}

/// The history of one endpoint.
///
/// ```text
///            two probes fail, or a shard's connect fails
///       in ───────────────────────────────────────────▶ out until `held_until`
///        ◀───────────────────────────────────────────
///            a probe succeeds after `held_until`
/// ```
#[derive(Debug, Default)]
pub struct Monitor {
    /// Probes in a row that failed.
    failures: u32,
    /// Times in a row that the endpoint failed again without having answered; the back-off is 2^relapses s.
    relapses: u32,
    /// Set while the endpoint is out: when it may come back.
    held_until: Option<Instant>,
    /// Connect failures when the endpoint was last brought back; more of them now, with none forgotten in between,
    /// mean that it answered nothing since.
    connect_failures_at_return: u32,
}

impl Monitor {
    /// Takes one probe's outcome into account.
    pub fn observe(&mut self, now: Instant, seen: Seen) -> Verdict {
        if seen.alive {
            self.failures = 0;
        } else {
            self.failures += 1;
        }
        if seen.up {
            self.held_until = None;
            if self.failures < FAILURES_TO_TAKE_OUT {
                return Verdict::Keep;
            }
            self.hold(now, seen);
            return Verdict::TakeOut;
        }
        let until = match self.held_until {
            Some(until) => until,
            None => self.hold(now, seen),
        };
        if !seen.alive || now < until {
            return Verdict::Keep;
        }
        self.held_until = None;
        self.connect_failures_at_return = seen.connect_failures;
        Verdict::BringBack
    }

    fn hold(&mut self, now: Instant, seen: Seen) -> Instant {
        let answered_since =
            self.connect_failures_at_return == 0 || seen.connect_failures <= self.connect_failures_at_return;
        self.relapses = if answered_since { 0 } else { self.relapses.saturating_add(1) };
        let back_off = if seen.tripped {
            BREAKER_OPEN
        } else {
            Duration::from_secs(1u64 << self.relapses.min(5)).min(BACK_OFF_MAX)
        };
        let until = now + back_off;
        self.held_until = Some(until);
        until
    }
}

#[cfg(test)]
mod tests;
