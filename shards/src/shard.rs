//! One data-plane thread: its ring, its listeners, its commands.
//!
//! **Invariant.** The ring is built, run and left on the shard's own thread. Other threads reach a shard through its
//! command queue alone, and see of it what its [`ShardStatus`] shows.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Poll, Waker};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded};
use crossbeam::queue::ArrayQueue;
use monoio::io::Canceller;

use crate::affinity::Affinity;
use crate::claims::Claims;
use crate::executor::{self, Aside, Meter, Refusal, Ring, Rung, pin, visit_ns};
use crate::ids::ShardId;
use crate::limits::Limits;
use crate::load::LoadTable;
use crate::prompt::SharedPrefixStats;
use crate::proxy::{Proxy, SWEEP_EVERY};
use crate::service::Tables;

/// Commands that may wait in a shard's queue; a further one is refused.
const COMMANDS_MAX: usize = 256;

/// How long connections that were cut have to end before the thread does.
const CUT_GRACE: Duration = Duration::from_secs(1);

/// Pause of a listener after accepting failed for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a shard is started with.
#[derive(Debug)]
pub struct ShardOptions {
    /// Its number.
    pub id: ShardId,
    /// The core it is pinned to; none = not pinned.
    pub core: Option<usize>,
    /// Entries of its ring.
    pub ring_entries: u32,
    /// The driver it tries first; those before it on the ladder are left out.
    pub first_rung: Rung,
    /// Its bounds.
    pub limits: Limits,
    /// In-flight counts of the process.
    pub loads: Arc<LoadTable>,
    /// What requests under way will have stored, of the process.
    pub claims: Arc<Claims>,
    /// Where the process's sessions were sent.
    pub affinity: Arc<Affinity>,
    /// The thread for work that cannot be sliced; without one the shard does it itself.
    pub aside: Option<Aside>,
}

/// What the control core tells a shard; each command is answered when it has taken effect.
#[derive(Debug)]
pub enum Command {
    /// Serve with these tables from now on.
    Tables(Arc<Tables>),
    /// Accept on this (listening) socket. The address names it, also where the socket is bound to a wildcard.
    Listen(SocketAddr, TcpListener),
    /// Stop accepting on the address; established connections go on.
    Unlisten(SocketAddr),
    /// Accept nothing new, finish what runs, then stop; cut what is left after the time.
    Drain(Duration),
}

/// Why a shard could not be started.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    /// The thread could not be made.
    #[error("the thread of shard {0} could not be started")]
    Thread(u16, #[source] io::Error),
    /// The core could not be had.
    #[error("shard {shard} could not be pinned to core {core}: check shards.cores against the process's cpuset")]
    Pin {
        /// The shard.
        shard: u16,
        /// The core.
        core: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// No driver could be had, not even epoll.
    #[error("shard {shard} has no driver: {}", list(refusals))]
    NoDriver {
        /// The shard.
        shard: u16,
        /// What refused each rung.
        refusals: Vec<Refusal>,
    },
    /// The thread ended before it said anything.
    #[error("the thread of shard {0} ended while it started")]
    Ended(u16),
}

/// Why a command had no effect.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// Too many commands are waiting: the shard does not come round.
    #[error("the shard has {COMMANDS_MAX} commands waiting and takes no more")]
    Busy,
    /// The shard ended or failed before it took the command.
    #[error("the shard has ended")]
    Ended,
    /// The shard did not answer in the time given; the command may still take effect.
    #[error("the shard did not answer in time")]
    TimedOut,
    /// The listening socket could not be taken over.
    #[error("shard cannot accept on {0}")]
    Listen(SocketAddr, #[source] io::Error),
    /// The address is already listened on.
    #[error("shard already accepts on {0}")]
    AlreadyListening(SocketAddr),
}

fn list(refusals: &[Refusal]) -> String {
    refusals.iter().map(|refusal| format!("{}: {}", refusal.rung.name(), refusal.reason)).collect::<Vec<_>>().join("; ")
}

/// What a shard shows to other threads.
#[derive(Debug)]
pub struct ShardStatus {
    /// The shard.
    pub id: ShardId,
    /// The driver it runs on; unset until it has one.
    pub rung: OnceLock<Rung>,
    /// Why it does not run on a better one; unset until it has one.
    pub refusals: OnceLock<Vec<Refusal>>,
    /// Visits to the driver and the gaps between them; the visits are its heartbeat, at least 10 a second.
    pub meter: Arc<Meter>,
    /// Client connections open.
    pub connections_open: AtomicU64,
    /// Client connections accepted so far.
    pub connections_accepted: AtomicU64,
    /// What it remembers of prompts, as of the last sweep.
    pub prompts: SharedPrefixStats,
    /// The thread's runtime unwound: the shard serves nothing any more and must be replaced.
    failed: AtomicBool,
}

/// A running shard, as the control core holds it.
#[derive(Debug)]
pub struct ShardHandle {
    queue: Arc<Queue>,
    status: Arc<ShardStatus>,
    thread: Option<JoinHandle<()>>,
}

/// The answer to one command, when it comes.
#[derive(Debug)]
pub struct Receipt(Receiver<Result<(), CommandError>>);

#[derive(Debug)]
struct Queue {
    commands: ArrayQueue<(Command, Sender<Result<(), CommandError>>)>,
    /// Wakes the task that takes commands; set by its first poll.
    waker: OnceLock<Waker>,
}

impl Receipt {
    /// The answer, if it has come; does not wait.
    pub fn poll(&self) -> Option<Result<(), CommandError>> {
        match self.0.try_recv() {
            Ok(answer) => Some(answer),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err(CommandError::Ended)),
        }
    }

    /// Waits for the answer, blocking the thread.
    ///
    /// # Errors
    /// Why the command had no effect, or that no answer came in time.
    pub fn wait(self, time: Duration) -> Result<(), CommandError> {
        match self.0.recv_timeout(time) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => Err(CommandError::TimedOut),
            Err(RecvTimeoutError::Disconnected) => Err(CommandError::Ended),
        }
    }
}

impl ShardHandle {
    /// Hands the shard a command; the receipt tells when it has taken effect.
    ///
    /// # Errors
    /// The shard has failed or has too many commands waiting.
    pub fn send(&self, command: Command) -> Result<Receipt, CommandError> {
        if self.ended() {
            return Err(CommandError::Ended);
        }
        let (answer, receipt) = bounded(1);
        self.queue.commands.push((command, answer)).map_err(|_| CommandError::Busy)?;
        if let Some(waker) = self.queue.waker.get() {
            waker.wake_by_ref();
        }
        Ok(Receipt(receipt))
    }

    /// What the shard shows.
    #[must_use]
    pub fn status(&self) -> &Arc<ShardStatus> {
        &self.status
    }

    /// Whether the shard failed: its thread serves nothing any more and another must take its place.
    #[must_use]
    pub fn failed(&self) -> bool {
        self.status.failed.load(Ordering::Acquire)
    }

    /// Whether the thread has ended, after a drain or a failure.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the thread to end. It ends after [`Command::Drain`] or a failure, not by itself.
    pub fn join(mut self) {
        if let Some(thread) = self.thread.take() {
            // The thread catches its panics; what it has to say is in the status.
            let _ended = thread.join();
        }
    }
}

/// Starts a shard; returns once it runs.
///
/// # Errors
/// The thread, the core or the driver could not be had.
pub fn spawn(options: ShardOptions) -> Result<ShardHandle, ShardError> {
    let id = options.id;
    let status = Arc::new(ShardStatus {
        id,
        rung: OnceLock::new(),
        refusals: OnceLock::new(),
        meter: Arc::default(),
        connections_open: AtomicU64::new(0),
        connections_accepted: AtomicU64::new(0),
        prompts: SharedPrefixStats::default(),
        failed: AtomicBool::new(false),
    });
    let queue = Arc::new(Queue { commands: ArrayQueue::new(COMMANDS_MAX), waker: OnceLock::new() });
    let (started, start) = bounded(1);
    let (thread_status, thread_queue) = (Arc::clone(&status), Arc::clone(&queue));
    let thread = std::thread::Builder::new()
        .name(format!("shard-{}", id.0))
        .spawn(move || run(options, &thread_status, thread_queue, &started))
        .map_err(|error| ShardError::Thread(id.0, error))?;
    match start.recv() {
        Ok(Ok(())) => Ok(ShardHandle { queue, status, thread: Some(thread) }),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(ShardError::Ended(id.0)),
    }
}

/// The thread.
fn run(options: ShardOptions, status: &Arc<ShardStatus>, queue: Arc<Queue>, started: &Sender<Result<(), ShardError>>) {
    let mut ring = match prepare(&options, status) {
        Ok(ring) => ring,
        Err(error) => {
            // Whoever started the shard is waiting for this.
            let _heard = started.send(Err(error));
            return;
        }
    };
    let _heard = started.send(Ok(()));
    let proxy = Rc::new(Proxy::new(
        options.id,
        options.limits,
        options.loads,
        options.claims,
        &options.affinity,
        options.aside,
    ));
    let shard = Rc::new(Shard { proxy, status: Arc::clone(status), listeners: RefCell::default() });
    let main = serve(Rc::clone(&shard), Arc::clone(&queue));
    let ended = executor::run(&mut ring, Arc::clone(&status.meter), main);
    // Leaked, not dropped: the kernel may still own buffers of operations that have not completed.
    std::mem::forget(ring);
    if ended.is_err() {
        // Tasks of the leaked ring may still hold these; they never run again.
        std::mem::forget(shard);
        status.failed.store(true, Ordering::Release);
        tracing::error!(shard = options.id.0, "a shard's runtime failed; it serves nothing any more");
    }
    // Commands that came too late: dropping their answers tells the senders.
    while queue.commands.pop().is_some() {}
}

fn prepare(options: &ShardOptions, status: &ShardStatus) -> Result<Ring, ShardError> {
    let shard = options.id.0;
    if let Some(core) = options.core {
        pin::pin_current(core).map_err(|source| ShardError::Pin { shard, core, source })?;
    }
    let (ring, rung, refusals) = Ring::build(options.first_rung, options.ring_entries)
        .map_err(|refusals| ShardError::NoDriver { shard, refusals })?;
    for refusal in &refusals {
        tracing::warn!(shard, driver = refusal.rung.name(), reason = refusal.reason, "driver refused");
    }
    tracing::info!(shard, driver = rung.name(), core = options.core, "shard runs");
    // Set once, here, by the only thread that does.
    let _first = status.rung.set(rung);
    let _first = status.refusals.set(refusals);
    Ok(ring)
}

/// What the shard's own tasks share.
struct Shard {
    proxy: Rc<Proxy>,
    status: Arc<ShardStatus>,
    listeners: RefCell<Vec<Rc<Listener>>>,
}

struct Listener {
    address: SocketAddr,
    socket: monoio::net::TcpListener,
    canceller: RefCell<Canceller>,
    stopped: std::cell::Cell<bool>,
}

/// The main future: takes commands until a drain is over.
async fn serve(shard: Rc<Shard>, queue: Arc<Queue>) {
    let sweeper = Rc::clone(&shard);
    executor::spawn(async move {
        loop {
            monoio::time::sleep(SWEEP_EVERY).await;
            sweeper.proxy.sweep().await;
            sweeper.status.connections_open.store(sweeper.proxy.connections() as u64, Ordering::Relaxed);
            sweeper.status.prompts.store(sweeper.proxy.prompt_stats());
        }
    });
    loop {
        let (command, answer) = next_command(&queue).await;
        // The sender may have stopped waiting; the command holds all the same.
        match command {
            Command::Tables(tables) => {
                shard.proxy.set_tables(&tables);
                let _heard = answer.send(Ok(()));
            }
            Command::Listen(address, socket) => {
                let _heard = answer.send(shard.listen(address, socket));
            }
            Command::Unlisten(address) => {
                shard.unlisten(|at| at == address);
                let _heard = answer.send(Ok(()));
            }
            Command::Drain(time) => {
                shard.drain(time).await;
                let _heard = answer.send(Ok(()));
                return;
            }
        }
    }
}

async fn next_command(queue: &Queue) -> (Command, Sender<Result<(), CommandError>>) {
    poll_fn(|context| {
        // Before the look into the queue: a command pushed after the look finds the waker set.
        queue.waker.get_or_init(|| context.waker().clone());
        queue.commands.pop().map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

impl Shard {
    fn listen(self: &Rc<Self>, address: SocketAddr, socket: TcpListener) -> Result<(), CommandError> {
        if self.listeners.borrow().iter().any(|listener| listener.address == address) {
            return Err(CommandError::AlreadyListening(address));
        }
        let failed = |error| CommandError::Listen(address, error);
        // io_uring answers EAGAIN at once on a socket that is not to block; epoll needs one that is not.
        socket.set_nonblocking(self.is_epoll()).map_err(failed)?;
        let listener = Rc::new(Listener {
            address,
            socket: monoio::net::TcpListener::from_std(socket).map_err(failed)?,
            canceller: RefCell::default(),
            stopped: std::cell::Cell::new(false),
        });
        self.listeners.borrow_mut().push(Rc::clone(&listener));
        executor::spawn(accept(Rc::clone(self), listener));
        Ok(())
    }

    fn is_epoll(&self) -> bool {
        self.status.rung.get() == Some(&Rung::Epoll)
    }

    fn unlisten(&self, matches: impl Fn(SocketAddr) -> bool) {
        self.listeners.borrow_mut().retain(|listener| {
            if !matches(listener.address) {
                return true;
            }
            listener.stopped.set(true);
            let canceller = listener.canceller.take();
            listener.canceller.replace(canceller.cancel());
            false
        });
    }

    async fn drain(&self, time: Duration) {
        self.unlisten(|_| true);
        let deadline = visit_ns().saturating_add(time.as_nanos() as u64);
        let mut cut_ns = None;
        // Connections that were waiting to be accepted are being taken now; a look or two later they are counted.
        for look in 0_u64.. {
            self.proxy.drain();
            monoio::time::sleep(Duration::from_millis(5)).await;
            let open = self.proxy.connections();
            self.status.connections_open.store(open as u64, Ordering::Relaxed);
            let now = visit_ns();
            if open == 0 && look > 1 || cut_ns.is_some_and(|cut| now > cut + CUT_GRACE.as_nanos() as u64) {
                return;
            }
            if cut_ns.is_none() && now >= deadline {
                tracing::warn!(shard = self.status.id.0, connections = open, "time to drain is over; cutting the rest");
                self.proxy.cut();
                cut_ns = Some(now);
            }
        }
    }

    fn take(&self, stream: monoio::net::TcpStream, address: SocketAddr) {
        let accepted = &self.status.connections_accepted;
        accepted.store(accepted.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        executor::spawn(Rc::clone(&self.proxy).serve(stream, address));
    }
}

/// Takes connections from one listening socket until it is stopped.
async fn accept(shard: Rc<Shard>, listener: Rc<Listener>) {
    while !listener.stopped.get() {
        let handle = listener.canceller.borrow().handle();
        match listener.socket.cancelable_accept(handle).await {
            Ok((stream, _)) => shard.take(stream, listener.address),
            Err(_) if listener.stopped.get() => {}
            Err(error) if is_short_of_resources(&error) => {
                tracing::warn!(%error, address = %listener.address, "no connection could be accepted; trying again");
                monoio::time::sleep(ACCEPT_PAUSE).await;
            }
            // The client gave up while it was waiting to be accepted.
            Err(error) => tracing::debug!(%error, address = %listener.address, "a connection was lost at accept"),
        }
    }
    for stream in accepted_already(&listener.socket) {
        if stream.set_nonblocking(shard.is_epoll()).is_err() {
            continue;
        }
        match monoio::net::TcpStream::from_std(stream) {
            Ok(stream) => shard.take(stream, listener.address),
            Err(error) => tracing::debug!(%error, "a connection was lost at accept"),
        }
    }
}

/// The connections that the kernel has taken for a socket that is about to be closed: closing would reset them.
fn accepted_already(socket: &monoio::net::TcpListener) -> Vec<std::net::TcpStream> {
    use std::os::fd::BorrowedFd;
    // SAFETY: the descriptor is open: `socket` outlives the borrow.
    let descriptor = unsafe { BorrowedFd::borrow_raw(socket.as_raw_fd()) };
    let Ok(duplicate) = descriptor.try_clone_to_owned() else { return Vec::new() };
    let duplicate = TcpListener::from(duplicate);
    if duplicate.set_nonblocking(true).is_err() {
        return Vec::new();
    }
    std::iter::from_fn(|| duplicate.accept().ok()).map(|(stream, _)| stream).collect()
}

fn is_short_of_resources(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}
