//! Visits to the driver, seen from the wakes they cause, and the time between them.
//!
//! A task is polled through [`Watched`], which hands the task's operations a waker of our own. When such a waker is
//! used while no task of the thread is running, the driver is at work: the first of these wakes after a task ran
//! marks a visit. The gap that is recorded runs from one visit to the end of the last task that ran before the next
//! one; time the shard slept does not count.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

/// Buckets of [`Meter::gaps`]: four to a power of two, up to 8 s.
pub const GAP_BUCKETS: usize = 4 * 22;

/// What one shard's executor shows to other threads; written by the shard alone.
#[derive(Debug)]
pub struct Meter {
    /// Visits to the driver so far: the heartbeat.
    pub visits: AtomicU64,
    /// Longest gap between two visits so far, nanoseconds.
    pub gap_max_ns: AtomicU64,
    /// Gaps by length: bucket `i` counts those below [`bucket_end_us`] of `i` (and not below that of the one before); the
    /// last one is open.
    pub gaps: [AtomicU64; GAP_BUCKETS],
    /// Tasks that ended by a panic.
    pub panics: AtomicU64,
}

impl Default for Meter {
    fn default() -> Self {
        Meter {
            visits: AtomicU64::new(0),
            gap_max_ns: AtomicU64::new(0),
            gaps: [const { AtomicU64::new(0) }; GAP_BUCKETS],
            panics: AtomicU64::new(0),
        }
    }
}

impl Meter {
    fn record(&self, gap_ns: u64) {
        self.visits.store(self.visits.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        if gap_ns > self.gap_max_ns.load(Ordering::Relaxed) {
            self.gap_max_ns.store(gap_ns, Ordering::Relaxed);
        }
        let bucket = &self.gaps[bucket_of(gap_ns)];
        bucket.store(bucket.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Upper bound, in µs, of the bucket that holds the given share (0 to 1) of all gaps; 0 when there are none.
    #[must_use]
    pub fn gap_us_at(&self, share: f64) -> u64 {
        let counts: Vec<u64> = self.gaps.iter().map(|c| c.load(Ordering::Relaxed)).collect();
        let total: u64 = counts.iter().sum();
        if total == 0 {
            return 0;
        }
        let wanted = (share * total as f64).ceil() as u64;
        let mut seen = 0;
        for (bucket, count) in counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return bucket_end_us(bucket);
            }
        }
        bucket_end_us(GAP_BUCKETS - 1)
    }

    /// Forgets the gaps so far. For measurements: a gap recorded at the same moment may be lost or kept.
    pub fn reset(&self) {
        self.gap_max_ns.store(0, Ordering::Relaxed);
        self.gaps.iter().for_each(|gap| gap.store(0, Ordering::Relaxed));
    }
}

/// Where a bucket ends, µs: 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20 …
#[must_use]
pub fn bucket_end_us(bucket: usize) -> u64 {
    let (octave, quarter) = (bucket / 4, bucket as u64 % 4);
    if octave == 0 { quarter + 1 } else { (5 + quarter) << (octave - 1) }
}

fn bucket_of(gap_ns: u64) -> usize {
    let us = gap_ns / 1_000;
    let octave = us.max(4).ilog2() as usize - 2;
    if us < 4 {
        return us as usize;
    }
    (4 * (octave + 1) + (us >> octave) as usize - 4).min(GAP_BUCKETS - 1)
}

struct Local {
    /// A task of this thread is being polled.
    in_task: Cell<bool>,
    /// A task ran since the last visit.
    ran: Cell<bool>,
    visits: Cell<u64>,
    visit_ns: Cell<u64>,
    last_end_ns: Cell<u64>,
    meter: RefCell<Option<Arc<Meter>>>,
}

thread_local! {
    static LOCAL: Local = const {
        Local {
            in_task: Cell::new(false),
            ran: Cell::new(false),
            visits: Cell::new(0),
            visit_ns: Cell::new(0),
            last_end_ns: Cell::new(0),
            meter: RefCell::new(None),
        }
    };
}

/// Nanoseconds of a monotonic clock since the process first asked.
#[must_use]
pub fn now_ns() -> u64 {
    static BASE: OnceLock<Instant> = OnceLock::new();
    BASE.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// Time of the last visit on this thread, on the clock of [`now_ns`]: a clock that costs nothing to read.
#[must_use]
pub fn visit_ns() -> u64 {
    LOCAL.with(|local| local.visit_ns.get())
}

/// Visits on this thread so far.
#[must_use]
pub fn visits() -> u64 {
    LOCAL.with(|local| local.visits.get())
}

/// Whether tasks have been running for longer than `budget_ns` since the last visit.
#[must_use]
pub fn over_budget(budget_ns: u64) -> bool {
    now_ns().saturating_sub(visit_ns()) > budget_ns
}

pub(super) fn enter(meter: Arc<Meter>) {
    LOCAL.with(|local| {
        *local.meter.borrow_mut() = Some(meter);
        local.ran.set(false);
        local.in_task.set(false);
        let now = now_ns();
        local.visit_ns.set(now);
        local.last_end_ns.set(now);
    });
}

pub(super) fn leave() {
    LOCAL.with(|local| {
        *local.meter.borrow_mut() = None;
        local.in_task.set(false);
    });
}

pub(super) fn report_panic(panic: &(dyn Any + Send)) {
    // A text that was put together may quote a request.
    let text = panic.downcast_ref::<&'static str>().copied().unwrap_or("its text may quote a request and is not told");
    tracing::error!(panic = text, "a task panicked and was ended; its connection is closed, the shard goes on");
    LOCAL.with(|local| {
        if let Some(meter) = local.meter.borrow().as_ref() {
            meter.panics.fetch_add(1, Ordering::Relaxed);
        }
    });
}

/// Notes a visit, if the wake comes from the driver; whether it comes from a thread that is no shard.
fn note_wake() -> bool {
    // A thread that ends has no locals left; its wakes are none of ours.
    let foreign = LOCAL.try_with(|local| {
        if local.meter.borrow().is_none() {
            return true;
        }
        if !local.in_task.get() && local.ran.get() {
            note_visit(local);
        }
        false
    });
    foreign.unwrap_or(true)
}

fn note_visit(local: &Local) {
    if let Some(meter) = local.meter.borrow().as_ref() {
        meter.record(local.last_end_ns.get().saturating_sub(local.visit_ns.get()));
    }
    local.visits.set(local.visits.get() + 1);
    local.visit_ns.set(now_ns());
    local.ran.set(false);
}

/// The waker that operations of a watched task are given.
struct Hook {
    task: OnceLock<Waker>,
    /// Woken by another thread: the shard may have slept until then, and only the driver sees such a wake.
    foreign: AtomicBool,
}

impl Wake for Hook {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if note_wake() {
            self.foreign.store(true, Ordering::Release);
        }
        if let Some(task) = self.task.get() {
            task.wake_by_ref();
        }
    }
}

/// A future whose polls are timed and whose panics are caught.
pub(super) struct Watched<F> {
    future: Pin<Box<F>>,
    hook: Arc<Hook>,
    waker: Waker,
}

impl<F: Future> Watched<F> {
    pub(super) fn new(future: F) -> Self {
        let hook = Arc::new(Hook { task: OnceLock::new(), foreign: AtomicBool::new(false) });
        let waker = Waker::from(Arc::clone(&hook));
        Watched { future: Box::pin(future), hook, waker }
    }
}

impl<F: Future> Future for Watched<F> {
    type Output = std::thread::Result<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        // A task keeps one waker for life, so the first one is the only one.
        this.hook.task.get_or_init(|| context.waker().clone());
        LOCAL.with(|local| {
            if this.hook.foreign.load(Ordering::Relaxed)
                && this.hook.foreign.swap(false, Ordering::Acquire)
                && local.ran.get()
            {
                note_visit(local);
            }
            local.in_task.set(true);
        });
        let mut context = Context::from_waker(&this.waker);
        let polled = catch_unwind(AssertUnwindSafe(|| this.future.as_mut().poll(&mut context)));
        LOCAL.with(|local| {
            local.in_task.set(false);
            local.ran.set(true);
            local.last_end_ns.set(now_ns());
        });
        match polled {
            Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
            Ok(Poll::Pending) => Poll::Pending,
            Err(panic) => Poll::Ready(Err(panic)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_fall_into_quarters_of_powers_of_two_of_microseconds() {
        for us in (0..5_000).chain([65_535, 65_536, 999_999, 7_000_000]) {
            let bucket = bucket_of(us * 1_000 + 999);
            assert!(us < bucket_end_us(bucket), "{us}");
            assert!(bucket == 0 || us >= bucket_end_us(bucket - 1), "{us}");
            assert!(bucket_end_us(bucket) <= us + us / 4 + 1, "{us}: bucket ends at {}", bucket_end_us(bucket));
        }
        assert_eq!(bucket_of(u64::MAX), GAP_BUCKETS - 1);
    }

    #[test]
    fn a_share_of_gaps_is_bounded_by_its_bucket() {
        let meter = Meter::default();
        assert_eq!(meter.gap_us_at(0.999), 0);
        for _ in 0..999 {
            meter.record(10_000);
        }
        meter.record(5_000_000);
        assert_eq!(meter.gap_us_at(0.5), 12);
        assert_eq!(meter.gap_us_at(0.999), 12);
        assert_eq!(meter.gap_us_at(1.0), 5_120);
        assert_eq!(meter.gap_max_ns.load(Ordering::Relaxed), 5_000_000);
    }
}
