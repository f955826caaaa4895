//! Simulated engines: the OpenAI API in front of a scheduler with a paged prefix cache, and KV events.
//!
//! ```text
//!  http ── requests, aborts ──▶ driver (scheduler, cache, clock) ── payloads ──▶ publisher thread ──▶ PUB, ROUTER
//!    ▲                             │
//!    └──────── tokens ─────────────┘
//! ```
//! One thread an engine runs `http` and `driver`; the publisher has a thread of its own.
//!
//! **Invariant.** Nothing here uses the gateway's code: see [`crate`].
//!
//! A rank of a data-parallel engine has a driver, a cache and a publisher of its own. TensorRT-LLM's ranks share a
//! queue that `POST /kv_cache_events` empties; llama.cpp tells nothing.
//!
//! Simulated: vLLM's prefix hits, eviction order, copies, chunked prefill, preemption, what is announced when, both wire
//! forms and replay layouts, all four hash algorithms, `cache_salt`, adapters, look-ahead hashes, the reset's delay, a
//! host tier's and a sliding-window group's events; the legs of disaggregated requests ([`dialect`], [`disagg`]); SGLang's page chain, tree, tiers and `/generate`; TensorRT-LLM's
//! block keys, partial blocks, windows, levels and drain; faults on command ([`fault`]). Differs: time follows a model;
//! answers are random words; requests with `n` > 1, images, tools' parsing, log probabilities and loads from a host tier
//! are not simulated; SGLang's newest tool format neither; what TensorRT-LLM pushes over ZMQ names blocks by its older
//! keys; idle connections are not closed after 5 s.

mod announce;
mod api;
mod cache;
pub mod cli;
#[cfg(test)]
mod client;
mod command;
#[cfg(test)]
mod conformance_tests;
mod dialect;
mod disagg;
#[cfg(test)]
mod disagg_tests;
mod drain;
mod driver;
mod fault;
#[cfg(test)]
mod fault_tests;
pub mod hash;
mod http;
mod http_llamacpp;
mod http_sglang;
mod http_trtllm;
mod http_vllm;
#[cfg(test)]
mod kind_tests;
mod legs;
mod msgpack;
mod options;
mod orders;
mod publisher;
mod reply;
mod scheduler;
mod script;
mod sglang_wire;
mod shared;
mod template;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod text;
mod trtllm_wire;
pub mod wire;

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::oneshot;

pub use fault::{Action, Fault, Health, LegFault, Phase};
pub use hash::vllm::Algo;
pub use legs::{LegEnd, LegKind, LegView};
pub use options::{EngineKind, EngineOptions, LoraOption, Role};
pub use sglang_wire::SglangRelease;
pub use shared::EngineStats;
pub use trtllm_wire::TrtllmRelease;
pub use wire::Release;

use disagg::Plane;
use drain::Drain;
use driver::{Command, Driver};
use publisher::{BoundAddresses, Publisher, PublisherOptions};
use shared::{RankLink, Shared};
use text::ModelText;

/// Times that neighbouring free ports are looked for.
const PORT_TRIES: usize = 32;

/// How long [`EngineHandle::cached_keys`] waits for the engine's thread.
const INSPECT_WAIT: Duration = Duration::from_secs(10);

/// Why an engine cannot start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// An option is out of range.
    #[error("{0}")]
    Option(String),
    /// A model file is missing, unreadable or damaged.
    #[error("model file {path}: {reason}")]
    Model {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The HTTP port cannot be bound.
    #[error("cannot listen on {address}: is another process using it?")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's reason.
        source: io::Error,
    },
    /// An event socket cannot be bound or connected.
    #[error("cannot open the event socket {endpoint}: is another process using it?")]
    Events {
        /// The endpoint as ZMQ spells it.
        endpoint: String,
        /// ZMQ's reason.
        source: zmq::Error,
    },
    /// ZMQ refuses a socket or an option.
    #[error("ZMQ refused a socket")]
    Zmq(#[from] zmq::Error),
    /// A thread or its runtime cannot be started.
    #[error("cannot start an engine thread")]
    Thread(#[source] io::Error),
}

impl EngineError {
    fn model(path: &Path, reason: String) -> Self {
        Self::Model { path: path.display().to_string(), reason }
    }

    fn events(endpoint: &str, source: zmq::Error) -> Self {
        Self::Events { endpoint: endpoint.to_owned(), source }
    }
}

/// Starts engines.
pub struct Engine;

impl Engine {
    /// Starts one engine. It runs until its handle is stopped or dropped.
    ///
    /// # Errors
    /// An option cannot be used, a model file is wrong, a port is taken.
    pub fn start(options: &EngineOptions) -> Result<EngineHandle, EngineError> {
        let mut handles = Self::start_many(options, 1, 1)?;
        handles.pop().ok_or_else(|| EngineError::Option("no engine was asked for".to_owned()))
    }

    /// Starts `count` engines that share one copy of the tokenizer. HTTP ports follow each other; event and replay
    /// ports lie `event_stride` apart.
    ///
    /// # Errors
    /// As [`Self::start`]; the engines started so far are stopped.
    pub fn start_many(
        options: &EngineOptions,
        count: u16,
        event_stride: u16,
    ) -> Result<Vec<EngineHandle>, EngineError> {
        options.check()?;
        let text = Arc::new(ModelText::load(options.tokenizers.as_deref(), &options.model)?);
        let context = zmq::Context::new();
        (0..count)
            .map(|index| start_one(&context, usize::from(index), options.nth(index, event_stride)?, Arc::clone(&text)))
            .collect()
    }
}

fn start_one(
    context: &zmq::Context,
    number: usize,
    mut options: EngineOptions,
    text: Arc<ModelText>,
) -> Result<EngineHandle, EngineError> {
    let address = SocketAddr::new(options.host, options.port);
    let listen_error = |source| EngineError::Listen { address, source };
    let listener = TcpListener::bind(address).map_err(listen_error)?;
    listener.set_nonblocking(true).map_err(listen_error)?;
    let http_addr = listener.local_addr().map_err(listen_error)?;

    options.port = http_addr.port();
    let lost = Arc::new(AtomicU64::new(0));
    let publishers = open_publishers(context, number, &options, &lost)?;
    let drain = (options.kind == EngineKind::Trtllm)
        .then(|| Drain::new(options.trtllm_release, options.dp, options.event_buffer));
    let first = publishers.first().map(|(_, bound)| *bound);
    let (links, ends) = link(publishers, options.dp);
    let faults = options.faults.clone();
    let side = open_side_channel(&options)?;
    let plane = Plane::new(side.as_ref().map(TcpListener::local_addr).transpose().map_err(EngineError::Thread)?);
    let mut shared = Shared::new(options, text, links, drain, plane);
    shared.counters.lost_batches = lost;
    let shared = Arc::new(shared);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(EngineError::Thread)?;
    let drivers: Vec<Driver> = (0..)
        .zip(ends)
        .map(|(rank, (publisher, inbox))| Driver::new(Arc::clone(&shared), rank, publisher, inbox))
        .collect();
    let (stop, stopped) = oneshot::channel();
    let router = http::router(Arc::clone(&shared));
    let ordered = Arc::clone(&shared);
    let thread = std::thread::Builder::new()
        .name(format!("engine-{number}"))
        .spawn(move || {
            runtime.block_on(async move {
                for driver in drivers {
                    tokio::spawn(driver.run());
                }
                if let Some(side) = side {
                    // It ends with the runtime; what goes wrong with it shows at the decode engines.
                    tokio::spawn(http::serve(side, disagg::router(Arc::clone(&ordered))));
                }
                for fault in &faults {
                    if let Err(error) = command::carry_out(&ordered, fault).await {
                        eprintln!("engine: --fault {fault:?}: {error}");
                    }
                }
                tokio::select! {
                    result = http::serve(listener, router) => result,
                    _ = stopped => Ok(()),
                }
            })
            // Dropping the runtime closes every connection where it stands, as the end of an engine process does.
        })
        .map_err(EngineError::Thread)?;
    let event_addr = first.and_then(|bound| bound.events);
    let replay_addr = first.and_then(|bound| bound.replay);
    Ok(EngineHandle { http_addr, event_addr, replay_addr, shared, stop: Some(stop), thread: Some(thread) })
}

/// The side channel of a prefill engine.
fn open_side_channel(options: &EngineOptions) -> Result<Option<TcpListener>, EngineError> {
    if options.role != Role::Prefill {
        return Ok(None);
    }
    let address = SocketAddr::new(options.host, options.side_port);
    let listen_error = |source| EngineError::Listen { address, source };
    let listener = TcpListener::bind(address).map_err(listen_error)?;
    listener.set_nonblocking(true).map_err(listen_error)?;
    Ok(Some(listener))
}

/// A rank's end of what [`RankLink`] is the other end of.
type RankEnd = (Option<Publisher>, UnboundedReceiver<Command>);

/// Connects `ranks` ranks with the rest of the engine; kinds that do not publish have no publishers.
fn link(publishers: Vec<(Publisher, BoundAddresses)>, ranks: u16) -> (Vec<RankLink>, Vec<RankEnd>) {
    let mut publishers: Vec<_> = publishers.into_iter().map(Some).collect();
    publishers.resize_with(usize::from(ranks), || None);
    let pair = |published: Option<(Publisher, BoundAddresses)>| {
        let (commands, inbox) = unbounded_channel();
        let (publisher, bound) = published.unzip();
        let link = RankLink { commands, open: AtomicUsize::new(0), scheduled: Mutex::default(), bound };
        (link, (publisher, inbox))
    };
    publishers.into_iter().map(pair).unzip()
}

/// The publishers of all ranks, with their ports one after the other; none for kinds that do not publish.
fn open_publishers(
    context: &zmq::Context,
    number: usize,
    options: &EngineOptions,
    lost: &Arc<AtomicU64>,
) -> Result<Vec<(Publisher, BoundAddresses)>, EngineError> {
    if !options.publishes() {
        return Ok(Vec::new());
    }
    let free = options.event_port == 0 || options.replay() == Some(0);
    let mut tries = if free && options.dp > 1 { PORT_TRIES } else { 1 };
    loop {
        tries -= 1;
        match open_neighbours(context, number * PORT_TRIES + tries, options, lost) {
            // The port after a free one may be taken.
            Err(EngineError::Events { .. }) if tries > 0 => {}
            outcome => return outcome,
        }
    }
}

fn open_neighbours(
    context: &zmq::Context,
    number: usize,
    options: &EngineOptions,
    lost: &Arc<AtomicU64>,
) -> Result<Vec<(Publisher, BoundAddresses)>, EngineError> {
    let vllm = options.kind == EngineKind::Vllm;
    let mut opened: Vec<(Publisher, BoundAddresses)> = Vec::new();
    for rank in 0..options.dp {
        let first = opened.first().map(|(_, bound)| *bound);
        let port = |asked: u16, bound: Option<SocketAddr>| {
            let base = bound.map_or(asked, |bound| bound.port());
            base.checked_add(rank).ok_or_else(|| EngineError::Option(format!("port {base} + {rank} is above 65535")))
        };
        let event_port = port(options.event_port, first.and_then(|bound| bound.events))?;
        let replay = options.replay().map(|asked| port(asked, first.and_then(|bound| bound.replay))).transpose()?;
        let publishing = PublisherOptions {
            bind: SocketAddr::new(options.host, event_port),
            connect: options.event_connect.clone(),
            replay: replay.map(|port| SocketAddr::new(options.host, port)),
            topic: options.topic.clone().into_bytes(),
            replay_has_topic: if vllm {
                options.wire.replay_has_topic()
            } else {
                options.sglang_release.replay_has_topic()
            },
            replay_is_whole: vllm && options.wire >= Release::new(33, 0),
        };
        let name = number * usize::from(u8::MAX) + usize::from(rank);
        opened.push(Publisher::start(context, name, &publishing, Arc::clone(lost))?);
    }
    Ok(opened)
}

/// A running engine; dropping it stops it.
pub struct EngineHandle {
    /// Where its API listens.
    pub http_addr: SocketAddr,
    /// Where its first rank's event publisher is bound; none where it connects to a collector, or has none. Those of the
    /// other ranks follow.
    pub event_addr: Option<SocketAddr>,
    /// Where its first rank's replay socket is bound, where there is one.
    pub replay_addr: Option<SocketAddr>,
    shared: Arc<Shared>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl EngineHandle {
    /// Stops the engine at once, as if its process had been killed: connections break, ports are free again.
    pub fn stop(self) {
        drop(self);
    }

    /// Counts since the start.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        self.shared.stats()
    }

    /// Where its side channel listens, on a prefill engine.
    #[must_use]
    pub fn side_addr(&self) -> Option<SocketAddr> {
        self.shared.plane.address
    }

    /// Its newest requests for answers, oldest first, as it saw them.
    #[must_use]
    pub fn legs(&self) -> Vec<LegView> {
        self.shared.legs.all()
    }

    /// What goes wrong with its requests for answers that have no order of their own: those that come, and those that
    /// hang.
    pub fn set_leg_fault(&self, fault: Option<LegFault>) {
        // Only marks may be too many.
        let _ = self.shared.orders.give(None, fault);
    }

    /// The same of requests with this `x-mark`.
    ///
    /// # Errors
    /// There are orders for too many marks.
    pub fn set_leg_fault_of(&self, mark: &str, fault: Option<LegFault>) -> Result<(), String> {
        self.shared.orders.give(Some(mark), fault)
    }

    /// Keys in the engine's caches, with the number of blocks that hold each; none when the engine does not answer.
    #[must_use]
    pub fn cached_keys(&self) -> Option<HashMap<u64, usize>> {
        let mut sum = HashMap::new();
        for rank in 0..self.shared.ranks.len() {
            for (key, copies) in self.cached_keys_of(rank)? {
                *sum.entry(key).or_default() += copies;
            }
        }
        Some(sum)
    }

    /// Keys in one rank's cache, as [`Self::cached_keys`]; none for a rank that there is not.
    #[must_use]
    pub fn cached_keys_of(&self, rank: usize) -> Option<HashMap<u64, usize>> {
        let (sender, receiver) = mpsc::channel();
        let reply = Box::new(move |copies| drop(sender.send(copies)));
        self.shared.ranks.get(rank)?.commands.send(Command::Contents(reply)).ok()?;
        receiver.recv_timeout(INSPECT_WAIT).ok()
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
