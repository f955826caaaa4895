//! KV event streams of the engines → inventories.
//!
//! An event's way: ZMQ frames (`sockets`) → sequence, gap, replay, restart (`stream`) → decoding (`events`) →
//! do the keys say what the rule says (`calibrate`), else keys of our own (`derived`) →
//! copies per (rank, group, key) (`copies`) → operations on the service's inventory → published at the end of the
//! cycle (`worker`).
//!
//! TensorRT-LLM's engines are asked instead, each by a thread of its own, which hands over operations (`trtllm`).
//!
//! **Invariant.** An ingest thread is the only writer of its services' inventories, and waits for nothing but its
//! poller: not for readers (a refused publish is repeated), not for the control thread (commands are queued). The
//! control thread reads counters that it does not have to ask for.
//!
//! Services are spread over the threads by their number; the first thread also publishes the shards' loads.

mod calibrate;
mod copies;
mod counts;
mod derived;
mod events;
mod feed;
mod framing;
pub mod inspect;
mod msgpack;
mod parity;
mod persist;
mod poller;
pub mod sglang;
mod sockets;
mod source;
mod status;
mod stream;
mod tokens;
mod trtllm;
mod worker;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam::channel::{Sender, bounded};
use shards::ids::{EndpointIndex, Rank, ServiceId};
use shards::inventory::Writer;
use shards::load::LoadTable;
use shards::service::{EndpointShared, Engine, MediumWeights};

pub use calibrate::{Believed, Finding, Leg, Verdict};
pub use events::{Reject, check_any_bytes as check_any_event_bytes};
pub use feed::{Feed, FeedShape};
pub use framing::check_any_framing;
pub use parity::{UseLeg, UseStatus};
use persist::Files;
pub use persist::{StateOptions, check_any_state_file};
use poller::{Poller, Waker};
use source::Source;
use status::StreamStats;
pub use status::{Replay, Started, StreamName, StreamStatus};
pub use trtllm::{DrainFrom, DrainStatus, Phase, SecondDrainer, check_any_json as check_any_trtllm_json};
use trtllm::{DrainSource, DrainStats};
use worker::{Command, Worker, WorkerOptions};

/// Commands under way to one thread. Beyond it, the sender waits.
const COMMANDS_MAX: usize = 1024;

/// What ingest is started with.
#[derive(Clone, Debug)]
pub struct IngestOptions {
    /// Cores to pin one thread each to; none = one thread, not pinned.
    pub cores: Vec<usize>,
    /// In-flight counts of the process, to be summed up every 200 µs while something is in flight and there are
    /// several shards.
    pub loads: Arc<LoadTable>,
    /// Most (rank, group, key) entries kept per endpoint (`LOXILB_KV_MAX_BLOCKS`); beyond it the oldest go.
    pub max_blocks_per_endpoint: usize,
    /// Longest silence of a replay before it is asked for again.
    pub replay_timeout: Duration,
    /// How long the blocks of an engine that is gone are kept aside, in case a replay proves them after all.
    pub aside: Duration,
    /// Where what engines hold is remembered over a restart; none = nowhere.
    pub state: Option<StateOptions>,
}

impl IngestOptions {
    /// The defaults: one thread, not pinned; 1,000,000 blocks; 2 s; 10 s; nothing is remembered.
    #[must_use]
    pub fn new(loads: Arc<LoadTable>) -> Self {
        IngestOptions {
            cores: Vec::new(),
            loads,
            max_blocks_per_endpoint: 1_000_000,
            replay_timeout: Duration::from_secs(2),
            aside: Duration::from_secs(10),
            state: None,
        }
    }
}

/// Which endpoints of a service a table of blocks is of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pool {
    /// Those that compute prompts: what Tier 1.5 routes by.
    #[default]
    Prompts,
    /// Decode endpoints of a P/D rule, in a table of their own: only whether a request goes straight to one hangs on it.
    Decode,
}

/// One table of blocks: a service has one for each pool that is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TableId {
    /// The service.
    pub service: ServiceId,
    /// Which of its endpoints.
    pub pool: Pool,
}

/// The event sources of one table.
#[derive(Clone, Debug)]
pub struct ServiceSources {
    /// The service.
    pub id: ServiceId,
    /// Which of its endpoints they are of.
    pub pool: Pool,
    /// The rule's `kvEngineType`: whose events they are.
    pub engine: Engine,
    /// The rule's `kvBlockSize`, tokens.
    pub block_tokens: u32,
    /// The rule's `kvMediumWeights`: blocks in media without weight are not kept.
    pub weights: MediumWeights,
    /// What the rule says of the engines' keys, to be verified; without it keys are taken as they come.
    pub believed: Option<Arc<Believed>>,
    /// Its endpoints.
    pub endpoints: Vec<EndpointSources>,
}

impl ServiceSources {
    /// The table that they fill.
    #[must_use]
    pub fn table(&self) -> TableId {
        TableId { service: self.id, pool: self.pool }
    }
}

/// The event sources of one endpoint.
#[derive(Clone, Debug)]
pub struct EndpointSources {
    /// Place in the service.
    pub index: EndpointIndex,
    /// Where the number of its blocks goes.
    pub shared: Arc<EndpointShared>,
    /// The endpoint as people know it, for log and status.
    pub label: String,
    /// One source per rank; none where the engine does not publish over ZMQ.
    pub ranks: Vec<RankSource>,
    /// TensorRT-LLM: the drain that all ranks' events come from, in the place of such sources.
    pub drain: Option<DrainFrom>,
}

/// The event source of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankSource {
    /// The rank.
    pub rank: Rank,
    /// Where its events come from.
    pub mode: Mode,
    /// `tcp://HOST:PORT` of its replay socket; nothing need listen there.
    pub replay: Option<String>,
}

/// Which side opens the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The engine waits at `tcp://HOST:PORT`, and we connect.
    Connect(String),
    /// We wait at `tcp://ADDR:PORT`, and the engine connects.
    Bind(String),
}

/// Why a command could not be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The thread is gone, which only a bug can cause: its inventories stand still.
    #[error("the ingest thread has ended: KV inventories stand still until the gateway is restarted")]
    Gone,
}

/// What the threads and the control thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Streams by name; taken when a stream opens or closes, and when the status is read.
    streams: Mutex<Vec<(StreamName, Arc<StreamStats>)>>,
    /// The same for drains.
    drains: Mutex<Vec<(StreamName, DrainStats)>>,
    /// Slots of the load table in use.
    load_slots: AtomicUsize,
}

impl Shared {
    fn streams(&self) -> MutexGuard<'_, Vec<(StreamName, Arc<StreamStats>)>> {
        // A push or retain that panicked leaves a list that is still one.
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn drains(&self) -> MutexGuard<'_, Vec<(StreamName, DrainStats)>> {
        self.drains.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn register_drain(&self, source: &DrainSource) {
        self.drains().push((source.name.clone(), source.stats().clone()));
    }

    pub(crate) fn unregister_drain(&self, source: &DrainSource) {
        self.drains().retain(|(_, stats)| !stats.is(source.stats()));
    }

    pub(crate) fn register(&self, source: &Source) {
        self.streams().push((source.name.clone(), Arc::clone(&source.stats)));
    }

    pub(crate) fn unregister(&self, source: &Source) {
        self.streams().retain(|(_, stats)| !Arc::ptr_eq(stats, &source.stats));
    }
}

/// The running ingest threads. Dropping it stops them.
#[derive(Debug)]
pub struct Ingest {
    threads: Vec<Thread>,
    shared: Arc<Shared>,
    /// The helper that writes state files; ends after the threads.
    helper: Mutex<Option<JoinHandle<()>>>,
    /// Whether state files that nobody uses stay.
    keeps_files: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Thread {
    commands: Sender<Command>,
    waker: Waker,
    handle: Mutex<Option<JoinHandle<()>>>,
}

impl Ingest {
    /// Starts the threads.
    ///
    /// # Errors
    /// Where a thread cannot be made or pinned, with the core in the message.
    pub fn start(options: IngestOptions) -> io::Result<Self> {
        let IngestOptions { cores, loads, max_blocks_per_endpoint, replay_timeout, aside, state } = options;
        let mut keeps_files = Arc::default();
        let (files, helper) = match state {
            Some(options) => {
                let period = options.period;
                let (files, helper) = Files::start(options, max_blocks_per_endpoint)?;
                keeps_files = files.keeps();
                (Some((files, period)), Some(helper))
            }
            None => (None, None),
        };
        let load_slots = AtomicUsize::new(loads.slots());
        let shared = Arc::new(Shared { streams: Mutex::default(), drains: Mutex::default(), load_slots });
        let mut ingest = Ingest { threads: Vec::new(), shared, helper: Mutex::new(helper), keeps_files };
        let cores = if cores.is_empty() { vec![None] } else { cores.into_iter().map(Some).collect() };
        for (number, core) in cores.into_iter().enumerate() {
            let poller = Poller::new()?;
            let waker = poller.waker();
            let (commands, receiver) = bounded(COMMANDS_MAX);
            let worker = WorkerOptions {
                poller,
                commands: receiver,
                shared: Arc::clone(&ingest.shared),
                loads: (number == 0 && loads.shards() > 1).then(|| Arc::clone(&loads)),
                blocks_max: max_blocks_per_endpoint,
                replay_timeout,
                aside,
                state: files.clone(),
            };
            let handle = spawn(number, core, worker)?;
            ingest.threads.push(Thread { commands, waker, handle: Mutex::new(Some(handle)) });
        }
        Ok(ingest)
    }

    /// Whether what is remembered of ranks stays when the last rule over them goes: while rules wait to be put in force, they
    /// may be over the same.
    pub fn keep_files(&self, keep: bool) {
        self.keeps_files.store(keep, Ordering::Relaxed);
    }

    /// How many slots of the load table are in use, from the first on; all of them until this is called.
    pub fn set_load_slots(&self, slots: usize) {
        self.shared.load_slots.store(slots, Ordering::Relaxed);
    }

    /// Begins to read the events of a new table into its inventory.
    ///
    /// # Errors
    /// [`Error::Gone`]
    pub fn add_service(&self, sources: ServiceSources, inventory: Writer) -> Result<(), Error> {
        self.tell(sources.id, Command::Add(sources, Box::new(inventory)))
    }

    /// Changes the sources of a table. An endpoint whose sources are the same stays undisturbed; of one that
    /// is gone, or whose sources changed, everything known is forgotten.
    ///
    /// # Errors
    /// [`Error::Gone`]
    pub fn update_service(&self, sources: ServiceSources) -> Result<(), Error> {
        self.tell(sources.id, Command::Update(sources))
    }

    /// Ends a table and frees all it held.
    ///
    /// # Errors
    /// [`Error::Gone`]
    pub fn remove_service(&self, id: TableId) -> Result<(), Error> {
        self.tell(id.service, Command::Remove(id))
    }

    /// State and counters of every stream, by service, endpoint and rank.
    #[must_use]
    pub fn status(&self) -> Vec<StreamStatus> {
        let mut streams: Vec<_> = self.shared.streams().iter().map(|(name, stats)| stats.status(name)).collect();
        streams.sort_by_key(|stream| (stream.name.service, stream.name.endpoint, stream.name.rank));
        streams
    }

    /// State and counters of every drain, by service and endpoint.
    #[must_use]
    pub fn drains(&self) -> Vec<DrainStatus> {
        let mut drains: Vec<_> =
            self.shared.drains().iter().map(|(name, stats)| DrainStatus::new(name, stats)).collect();
        drains.sort_by_key(|drain| (drain.name.service, drain.name.endpoint));
        drains
    }

    fn tell(&self, id: ServiceId, command: Command) -> Result<(), Error> {
        let thread = &self.threads[id.index() % self.threads.len()];
        thread.commands.send(command).map_err(|_| Error::Gone)?;
        thread.waker.wake();
        Ok(())
    }
}

impl Ingest {
    /// Stops the threads, and waits until what engines hold is written.
    pub fn stop(&self) {
        for thread in &self.threads {
            // One that has ended wants no command.
            let _ = thread.commands.send(Command::Stop);
            thread.waker.wake();
        }
        for handle in self.threads.iter().map(|thread| &thread.handle).chain([&self.helper]) {
            if let Some(handle) = handle.lock().unwrap_or_else(PoisonError::into_inner).take() {
                // A thread that panicked has said so already.
                let _ = handle.join();
            }
        }
    }
}

impl Drop for Ingest {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Starts one thread and waits until it is pinned.
fn spawn(number: usize, core: Option<usize>, worker: WorkerOptions) -> io::Result<JoinHandle<()>> {
    let (report, pinned) = bounded(1);
    let handle = std::thread::Builder::new().name(format!("ingest-{number}")).spawn(move || {
        let ok = core.is_none_or(|id| {
            // core_affinity aborts the process at a number that its set has no room for.
            id < libc::CPU_SETSIZE as usize && core_affinity::set_for_current(core_affinity::CoreId { id })
        });
        let _ = report.send(ok);
        if ok {
            // Made here: its I/O threads inherit the core of the thread that makes the first socket.
            Worker::new(worker).run();
        }
    })?;
    match (pinned.recv(), core) {
        (Ok(true), _) => Ok(handle),
        (_, core) => Err(io::Error::other(format!(
            "ingest thread {number} cannot be pinned to core {}; name cores this process may use in ingest.cores",
            core.map_or_else(|| "-".to_owned(), |core| core.to_string())
        ))),
    }
}

#[cfg(test)]
mod histories;
#[cfg(test)]
mod wire_tests;
