//! Simulated vLLM engines: the OpenAI API in front of a scheduler with a paged prefix cache, and KV events over ZMQ.
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
//! Simulated as vLLM does it: prefix hits, eviction order, copies, chunked prefill, preemption, what is announced when,
//! both wire forms, both replay layouts, `cache_salt`, the reset's delay. Differs: time follows a model; answers are
//! random words; requests with `n` > 1, LoRA, images, tools' parsing, log probabilities, speculative decoding and data
//! parallel ranks other than 0 are not simulated; idle connections are not closed after 5 s.

mod api;
mod cache;
pub mod cli;
#[cfg(test)]
mod conformance_tests;
mod driver;
mod hash;
mod http;
mod msgpack;
mod options;
mod publisher;
mod reply;
mod scheduler;
mod shared;
mod template;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod text;
mod wire;

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::oneshot;

pub use hash::Algo;
pub use options::EngineOptions;
pub use shared::EngineStats;
pub use wire::Release;

use driver::{Command, Driver};
use publisher::{Publisher, PublisherOptions};
use shared::Shared;
use text::ModelText;

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
    options: EngineOptions,
    text: Arc<ModelText>,
) -> Result<EngineHandle, EngineError> {
    let address = SocketAddr::new(options.host, options.port);
    let listen_error = |source| EngineError::Listen { address, source };
    let listener = TcpListener::bind(address).map_err(listen_error)?;
    listener.set_nonblocking(true).map_err(listen_error)?;
    let http_addr = listener.local_addr().map_err(listen_error)?;

    let (commands, inbox) = tokio::sync::mpsc::unbounded_channel();
    let shared = Arc::new(Shared::new(options, text, commands));
    let options = &shared.options;
    let publishing = PublisherOptions {
        bind: SocketAddr::new(options.host, options.event_port),
        connect: options.event_connect.clone(),
        replay: options.replay_port.map(|port| SocketAddr::new(options.host, port)),
        topic: options.topic.clone().into_bytes(),
        release: options.wire,
    };
    let lost = Arc::clone(&shared.counters.lost_batches);
    let (publisher, bound) = Publisher::start(context, number, &publishing, lost)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(EngineError::Thread)?;
    let driver = Driver::new(Arc::clone(&shared), publisher, inbox);
    let (stop, stopped) = oneshot::channel();
    let router = http::router(Arc::clone(&shared));
    let thread = std::thread::Builder::new()
        .name(format!("engine-{number}"))
        .spawn(move || {
            runtime.block_on(async move {
                tokio::select! {
                    result = http::serve(listener, router) => result,
                    () = driver.run() => Ok(()),
                    _ = stopped => Ok(()),
                }
            })
            // Dropping the runtime closes every connection where it stands, as the end of an engine process does.
        })
        .map_err(EngineError::Thread)?;
    Ok(EngineHandle {
        http_addr,
        event_addr: bound.events,
        replay_addr: bound.replay,
        shared,
        stop: Some(stop),
        thread: Some(thread),
    })
}

/// A running engine; dropping it stops it.
pub struct EngineHandle {
    /// Where its API listens.
    pub http_addr: SocketAddr,
    /// Where its event publisher is bound; none where it connects to a collector.
    pub event_addr: Option<SocketAddr>,
    /// Where its replay socket is bound, where there is one.
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

    /// Keys in the engine's cache, with the number of blocks that hold each; none when the engine does not answer.
    #[must_use]
    pub fn cached_keys(&self) -> Option<HashMap<u64, usize>> {
        let (sender, receiver) = mpsc::channel();
        let reply = Box::new(move |copies| drop(sender.send(copies)));
        self.shared.commands.send(Command::Contents(reply)).ok()?;
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
