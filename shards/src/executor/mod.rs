//! What every task of a shard stands on: the ring, giving way, cancelable read-ahead, panic isolation.
//!
//! **Invariant.** Nothing here blocks the thread or takes a lock while requests run. All tasks of a shard are started
//! with [`spawn`], so that a panic costs one task and every visit to the driver is seen. A future of a read or write
//! is dropped only together with its connection.
//!
//! A *visit* is one turn of the driver in which completions are reaped or timers fired. monoio has no hook for it, so
//! [`meter`] sees it from the wakes it causes: a wake that comes while no task runs comes from the driver.

pub mod aside;
pub mod carry;
pub mod meter;
pub mod pin;
pub mod read_ahead;
pub mod ring;
pub mod ticket;
mod turn;

use std::future::Future;
use std::sync::Arc;

pub use aside::Aside;
pub use carry::carry;
pub use meter::{Meter, now_ns, over_budget, visit_ns, visits};
pub use read_ahead::{End, ReadAhead};
pub use ring::{Refusal, Ring, Rung};
pub use ticket::{SLICE_BUDGET_NS, Ticket, TicketGuard};
pub use turn::turn;

/// Starts a task on the calling shard; a panic in it ends it, is counted in the shard's [`Meter`] and logged.
pub fn spawn<F>(future: F)
where
    F: Future<Output = ()> + 'static,
{
    drop(monoio::spawn(async move {
        if let Err(panic) = meter::Watched::new(future).await {
            meter::report_panic(panic.as_ref());
        }
    }));
}

/// Runs the shard's main future to its end, on the thread that built the ring.
///
/// # Errors
/// The panic that ended the main future. The ring must then be leaked: the kernel may still own buffers of it.
pub fn run<F>(ring: &mut Ring, meter: Arc<Meter>, main: F) -> std::thread::Result<F::Output>
where
    F: Future,
{
    meter::enter(meter);
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| ring.block_on(meter::Watched::new(main))));
    meter::leave();
    ended.and_then(|result| result)
}

/// Gives way once the shard has worked for [`BREATH_BUDGET_NS`]: for short work, and for loops over operations that may
/// each be done at once, as reads and writes are on epoll while the peer keeps up.
pub async fn breathe() {
    give_way(BREATH_BUDGET_NS, BREATH_TURNS_MAX).await;
}

/// Time of tasks since the last visit from which on short work gives way, nanoseconds. Long work has given way before,
/// see [`SLICE_BUDGET_NS`], so that short work beside it seldom waits for a further visit.
pub const BREATH_BUDGET_NS: u64 = 500_000;

/// Visits that one task lets go by to others at most.
const BREATH_TURNS_MAX: usize = 16;

/// Lets visits go by while tasks have been running for longer than the budget, but not more than so many.
async fn give_way(budget_ns: u64, turns_max: usize) {
    // Those who are let pass by the same visit share its budget: whoever comes too late waits for the next one.
    for _ in 0..turns_max {
        if !over_budget(budget_ns) {
            return;
        }
        turn().await;
    }
}
