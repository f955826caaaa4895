//! Giving way: a task waits here until the driver has been visited.
//!
//! A visit must be *made* to happen and at once. A task that wakes itself is run again without one; so is one that is
//! woken by another task. A timer of no length works, but monoio rounds it up to the next millisecond, which a lone
//! slicer then sleeps through (measured: 1.1 to 1.6 ms per turn). So a byte is sent through a socket pair: its arrival
//! is an event like any other, which only the driver can bring. One task per shard does that for all who wait.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

use monoio::io::{AsyncReadRent, AsyncWriteRent};
use monoio::net::UnixStream;

use super::{spawn, visits};

/// Gives way to everything else on the shard: returns after the next visit to the driver.
pub async fn turn() {
    let Some(turnstile) = TURNSTILE.with(Turnstile::of_this_thread) else { return turn_by_timer().await };
    let before = visits();
    loop {
        let passed = Rc::new(Cell::new(false));
        let mut waits = false;
        poll_fn(|context| {
            if passed.get() {
                return Poll::Ready(());
            }
            if !std::mem::replace(&mut waits, true) {
                turnstile.waiting.borrow_mut().push((Rc::clone(&passed), context.waker().clone()));
                if let Some(keeper) = turnstile.keeper.take() {
                    keeper.wake();
                }
            }
            Poll::Pending
        })
        .await;
        if visits() != before {
            return;
        }
    }
}

async fn turn_by_timer() {
    let before = visits();
    loop {
        monoio::time::sleep(Duration::ZERO).await;
        // A timer can be due already when it is set; then it ends without a visit.
        if visits() != before {
            return;
        }
    }
}

thread_local! {
    static TURNSTILE: RefCell<Option<Rc<Turnstile>>> = const { RefCell::new(None) };
}

#[derive(Default)]
struct Turnstile {
    /// Those who wait, one entry per call of [`turn`]; all are let pass by the next visit.
    waiting: RefCell<Vec<(Rc<Cell<bool>>, Waker)>>,
    /// Wakes the task below when there is someone to wait for.
    keeper: Cell<Option<Waker>>,
    /// That task has ended, for want of a socket pair: timers must do.
    broken: Cell<bool>,
}

impl Turnstile {
    fn of_this_thread(slot: &RefCell<Option<Rc<Turnstile>>>) -> Option<Rc<Turnstile>> {
        let mut slot = slot.borrow_mut();
        let turnstile = slot.get_or_insert_with(|| {
            let turnstile = Rc::<Turnstile>::default();
            let kept = Rc::clone(&turnstile);
            spawn(async move {
                if let Err(error) = kept.keep().await {
                    tracing::warn!(%error, "no socket pair to give way with; a millisecond timer is used");
                }
                kept.broken.set(true);
                kept.let_pass();
            });
            turnstile
        });
        (!turnstile.broken.get()).then(|| Rc::clone(turnstile))
    }

    fn let_pass(&self) {
        for (passed, waker) in self.waiting.take() {
            passed.set(true);
            waker.wake();
        }
    }

    async fn keep(&self) -> io::Result<()> {
        let (near, far) = StdUnixStream::pair()?;
        if monoio::utils::is_legacy() {
            near.set_nonblocking(true)?;
            far.set_nonblocking(true)?;
        }
        let (mut near, mut far) = (UnixStream::from_std(near)?, UnixStream::from_std(far)?);
        let (mut sent, mut received) = (vec![0], vec![0]);
        loop {
            poll_fn(|context| {
                if !self.waiting.borrow().is_empty() {
                    return Poll::Ready(());
                }
                self.keeper.set(Some(context.waker().clone()));
                Poll::Pending
            })
            .await;
            // The read begins first and finds nothing, so that the byte's arrival is news to epoll as well.
            let mut read = pin!(near.read(received));
            let mut early = None;
            poll_fn(|context| {
                if let Poll::Ready(done) = read.as_mut().poll(context) {
                    early = Some(done);
                }
                Poll::Ready(())
            })
            .await;
            let result;
            (result, sent) = far.write(sent).await;
            result?;
            let result;
            (result, received) = match early {
                Some(done) => done,
                None => read.await,
            };
            result?;
            self.let_pass();
        }
    }
}
