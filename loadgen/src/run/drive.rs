//! The load loops of one thread, written once for both runtimes.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use crate::client::{self, Client, ErrorKind, Runtime, Target};
use crate::report::Recorder;
use crate::workload::{Request, Workload};

/// Period of the timer whose lateness is a closed loop's lag.
const LAG_PERIOD: Duration = Duration::from_millis(10);

/// When requests are sent.
#[derive(Clone, Debug)]
pub(crate) enum Pace {
    /// That many clients, each sending its next request when it has its answer.
    Closed { clients: usize },
    /// At these offsets from the start, whatever the answers.
    Open { arrivals: Arc<[Duration]> },
}

/// What all threads share.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) target: Target,
    pub(crate) workload: Workload,
    pub(crate) pace: Pace,
    /// No request is begun after that long.
    pub(crate) duration: Duration,
    /// Requests of all threads together.
    pub(crate) requests_max: usize,
    /// Time for one request, connect included.
    pub(crate) timeout: Duration,
    /// Requests in flight per thread. When reached, an open loop waits, which its lag and its latencies show.
    pub(crate) in_flight_max: usize,
    pub(crate) threads: usize,
    pub(crate) progress: Progress,
}

/// What the progress bar reads while threads run.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    pub(crate) ended: AtomicU64,
    pub(crate) errors: AtomicU64,
    /// The next request of a closed loop.
    next: AtomicUsize,
}

/// One thread's state; tasks of the thread share it.
struct Thread<R: Runtime> {
    plan: Arc<Plan>,
    client: RefCell<Client<R>>,
    seen: Rc<RefCell<Recorder>>,
    gate: Rc<Gate>,
}

/// Runs the thread's part of the plan, which begins at `start`; `seen` is complete when the future ends.
pub(crate) async fn run<R: Runtime>(plan: Arc<Plan>, number: usize, start: Instant, seen: Rc<RefCell<Recorder>>) {
    let client = RefCell::new(Client::new(plan.target.clone()));
    let gate = Rc::new(Gate::new(plan.in_flight_max));
    let thread = Rc::new(Thread::<R> { client, seen, gate, plan });
    match &thread.plan.pace {
        Pace::Open { arrivals } => thread.open_loop(number, start, arrivals).await,
        Pace::Closed { clients } => thread.closed_loop(number, start, *clients).await,
    }
}

impl<R: Runtime> Thread<R> {
    async fn open_loop(self: &Rc<Self>, number: usize, start: Instant, arrivals: &[Duration]) {
        let count = arrivals.len().min(self.plan.requests_max);
        for index in (number..count).step_by(self.plan.threads) {
            if arrivals[index] >= self.plan.duration {
                break;
            }
            let intended = start + arrivals[index];
            // Made before it is due: making it must not make it late.
            let request = self.plan.workload.request(index);
            R::sleep_until(intended).await;
            let pass = self.gate.enter().await;
            self.seen.borrow_mut().lag.record(intended.elapsed());
            let thread = Rc::clone(self);
            R::spawn(async move {
                thread.send(&request, intended).await;
                drop(pass);
            });
        }
        self.gate.empty().await;
    }

    async fn closed_loop(self: &Rc<Self>, number: usize, start: Instant, clients: usize) {
        R::sleep_until(start).await;
        let mine = clients / self.plan.threads + usize::from(number < clients % self.plan.threads);
        for _ in 0..mine {
            let pass = self.gate.enter().await;
            let thread = Rc::clone(self);
            R::spawn(async move {
                thread.one_client(start).await;
                drop(pass);
            });
        }
        let mut empty = std::pin::pin!(self.gate.empty());
        loop {
            let due = Instant::now() + LAG_PERIOD;
            let timer = async {
                R::sleep_until(due).await;
                false
            };
            let ended = async {
                empty.as_mut().await;
                true
            };
            if futures_lite::future::or(ended, timer).await {
                return;
            }
            self.seen.borrow_mut().lag.record(due.elapsed());
        }
    }

    async fn one_client(&self, start: Instant) {
        while start.elapsed() < self.plan.duration {
            let index = self.plan.progress.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.plan.requests_max {
                return;
            }
            let request = self.plan.workload.request(index);
            self.send(&request, Instant::now()).await;
        }
    }

    /// Sends one request and records how it went.
    async fn send(&self, request: &Request, intended: Instant) {
        self.seen.borrow_mut().sent += 1;
        let deadline = Instant::now() + self.plan.timeout;
        let timeout = async {
            R::sleep_until(deadline).await;
            Err(ErrorKind::Timeout)
        };
        let outcome = futures_lite::future::or(self.attempt(request), timeout).await;
        let mut seen = self.seen.borrow_mut();
        match outcome {
            Ok(answer) => seen.answer(intended, &answer),
            Err(kind) => {
                seen.error(kind);
                self.plan.progress.errors.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.plan.progress.ended.fetch_add(1, Ordering::Relaxed);
    }

    async fn attempt(&self, request: &Request) -> Result<client::Answer, ErrorKind> {
        let (idle, address, bytes) = {
            let mut client = self.client.borrow_mut();
            (client.take_idle(), client.address(), client.encode(request.api, &request.body))
        };
        let stream = match idle {
            Some(stream) => stream,
            None => R::connect(address).await.map_err(|_| ErrorKind::Connect)?,
        };
        let exchange = client::exchange(stream, &bytes).await?;
        if let Some(stream) = exchange.reusable {
            self.client.borrow_mut().give_back(stream);
        }
        Ok(exchange.answer)
    }
}

/// Counts tasks in flight. One task at a time may wait for room or for the end.
struct Gate {
    limit: usize,
    inside: Cell<usize>,
    waiting: Cell<Option<Waker>>,
}

/// One task's place inside; dropping it gives the place back.
struct Pass(Rc<Gate>);

impl Gate {
    fn new(limit: usize) -> Self {
        Gate { limit, inside: Cell::new(0), waiting: Cell::new(None) }
    }

    async fn enter(self: &Rc<Self>) -> Pass {
        self.below(self.limit).await;
        self.inside.set(self.inside.get() + 1);
        Pass(Rc::clone(self))
    }

    fn empty(&self) -> impl Future<Output = ()> {
        self.below(1)
    }

    fn below(&self, count: usize) -> impl Future<Output = ()> {
        poll_fn(move |context| {
            if self.inside.get() < count {
                return Poll::Ready(());
            }
            self.waiting.set(Some(context.waker().clone()));
            Poll::Pending
        })
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.0.inside.set(self.0.inside.get() - 1);
        if let Some(waker) = self.0.waiting.take() {
            waker.wake();
        }
    }
}
