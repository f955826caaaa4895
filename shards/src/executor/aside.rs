//! Work that cannot be cut into slices, done on a thread beside the shards.
//!
//! **Invariant.** A shard never waits for that thread: it hands the work over and is woken when it is done. The queue is
//! bounded; when it is full the work is not done at all. Handing over may take a lock for a moment, so it is for work of
//! milliseconds, not for what every request needs.

#![forbid(unsafe_code)]

use std::future::poll_fn;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::{Poll, Waker};

use crossbeam::channel::{Receiver, Sender, TryRecvError, bounded};

/// Pieces of work that may wait. A further one is refused: see [`Busy`].
pub const WAITING_MAX: usize = 64;

/// A thread that does long work for shards; it ends when the last of these is dropped.
#[derive(Clone, Debug)]
pub struct Aside(Sender<Task>);

type Task = Box<dyn FnOnce() + Send>;

/// The work was not done: too much was waiting, or it panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the thread for long work is busy")]
pub struct Busy;

impl Aside {
    /// Starts the thread. It runs where the calling thread may run.
    ///
    /// # Errors
    /// The thread could not be made.
    pub fn start() -> io::Result<Self> {
        let (sender, tasks) = bounded(WAITING_MAX);
        std::thread::Builder::new().name("aside".into()).spawn(move || work(&tasks))?;
        Ok(Aside(sender))
    }

    /// Does the work on the thread. A caller that stops waiting leaves it to be done for nothing.
    ///
    /// # Errors
    /// [`Busy`].
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Busy> {
        let (answer, done) = bounded(1);
        let mut begin = Some((work, answer));
        poll_fn(move |context| {
            if let Some((work, answer)) = begin.take() {
                let waker = OnDrop(context.waker().clone());
                let task = move || {
                    // Dropped in this order: first the answer's sender, then the waker, so that a panic is seen as well.
                    let _waker = waker;
                    let answer = answer;
                    // Whoever asked may be gone.
                    let _heard = answer.send(work());
                };
                if self.0.try_send(Box::new(task)).is_err() {
                    return Poll::Ready(Err(Busy));
                }
            }
            match done.try_recv() {
                Ok(result) => Poll::Ready(Ok(result)),
                Err(TryRecvError::Empty) => Poll::Pending,
                Err(TryRecvError::Disconnected) => Poll::Ready(Err(Busy)),
            }
        })
        .await
    }

    /// Lets the thread drop something large; if it is busy, that is done here.
    pub fn discard<T: Send + 'static>(&self, garbage: T) {
        // What is not taken over comes back in the error, and is dropped.
        let _dropped = self.0.try_send(Box::new(move || drop(garbage)));
    }
}

struct OnDrop(Waker);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.wake_by_ref();
    }
}

fn work(tasks: &Receiver<Task>) {
    for task in tasks {
        // Its answer is not sent then, which tells whoever waits.
        let _ended = catch_unwind(AssertUnwindSafe(task));
    }
}
