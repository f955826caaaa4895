//! The event publisher: a thread of its own with a PUB socket and, if asked for, a replay socket over the last batches.
//!
//! Batches reach it over an in-process queue. Sequence numbers are given when a batch is queued: one that finds the
//! queue full is lost and leaves a gap, as on a real engine whose subscribers are too slow.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use super::EngineError;

/// Batches queued between scheduler and publisher, and messages queued per subscriber, at most; more are dropped.
const QUEUE_MAX: i32 = 100_000;

/// Batches kept for replay; older ones are forgotten.
const REPLAY_BATCHES_MAX: usize = 10_000;

/// The one frame that orders the thread to forget what it could replay.
const RESTART: &str = "restart";

/// The sequence number that ends a replay.
const REPLAY_END: u64 = u64::MAX;

/// Where and how a publisher offers its events.
#[derive(Clone, Debug)]
pub struct PublisherOptions {
    /// Address to bind, port 0 for any.
    pub bind: SocketAddr,
    /// A collector to connect to instead of binding, `tcp://ADDRESS:PORT`.
    pub connect: Option<String>,
    /// Address of the replay socket; none for no replay.
    pub replay: Option<SocketAddr>,
    /// First frame of every message.
    pub topic: Vec<u8>,
    /// Whether replies of the replay socket carry the topic.
    pub replay_has_topic: bool,
    /// Whether the replay socket queues a whole replay for a slow reader, or the library's default of 1,000 messages.
    pub replay_is_whole: bool,
}

/// Which way a batch takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// To subscribers and to the replay buffer.
    Whole,
    /// To the replay buffer only, as where the network loses a message.
    ReplayOnly,
    /// Nowhere: only its number is used up, as where an event cannot be encoded.
    Lost,
}

/// The scheduler's end of a running publisher; dropping it stops the thread and closes the sockets.
pub struct Publisher {
    queue: zmq::Socket,
    sequence: u64,
    lost: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

/// Addresses that were bound.
#[derive(Clone, Copy, Debug)]
pub struct BoundAddresses {
    /// Of the PUB socket; none where it connects.
    pub events: Option<SocketAddr>,
    /// Of the replay socket.
    pub replay: Option<SocketAddr>,
}

impl Publisher {
    /// Opens the sockets and starts the thread. `number` is unique in `context`.
    ///
    /// # Errors
    /// A socket cannot be made, bound or connected; the thread cannot be started.
    pub fn start(
        context: &zmq::Context,
        number: usize,
        options: &PublisherOptions,
        lost: Arc<AtomicU64>,
    ) -> Result<(Self, BoundAddresses), EngineError> {
        let inside = format!("inproc://batches-{number}");
        let receiver = context.socket(zmq::PULL)?;
        receiver.set_rcvhwm(0)?;
        receiver.bind(&inside)?;
        let queue = context.socket(zmq::PUSH)?;
        queue.set_sndhwm(QUEUE_MAX)?;
        queue.set_linger(0)?;
        queue.connect(&inside)?;

        let events = context.socket(zmq::PUB)?;
        events.set_sndhwm(QUEUE_MAX)?;
        events.set_linger(0)?;
        let bound_events = match &options.connect {
            Some(collector) => {
                events.connect(collector).map_err(|source| EngineError::events(collector, source))?;
                None
            }
            None => Some(bind(&events, options.bind)?),
        };
        let replay =
            options.replay.map(|address| open_replay(context, address, options.replay_is_whole)).transpose()?;
        let bound = BoundAddresses { events: bound_events, replay: replay.as_ref().map(|(_, address)| *address) };
        let worker = Worker {
            receiver,
            events,
            replay: replay.map(|(socket, _)| socket),
            topic: options.topic.clone(),
            replay_has_topic: options.replay_has_topic,
            buffer: VecDeque::new(),
        };
        let thread = std::thread::Builder::new()
            .name(format!("events-{number}"))
            .spawn(move || worker.run())
            .map_err(EngineError::Thread)?;
        Ok((Self { queue, sequence: 0, lost, thread: Some(thread) }, bound))
    }

    /// Queues a batch for publication; never waits.
    pub fn publish(&mut self, payload: Vec<u8>, delivery: Delivery) {
        let sequence = self.sequence.to_be_bytes().to_vec();
        self.sequence += 1;
        let sent = match delivery {
            Delivery::Whole => self.queue.send_multipart([sequence, payload], zmq::DONTWAIT),
            Delivery::ReplayOnly => self.queue.send_multipart([sequence, payload, Vec::new()], zmq::DONTWAIT),
            Delivery::Lost => return,
        };
        if sent.is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Starts over as a new process does: numbers from 0, nothing to replay.
    pub fn restart(&mut self) {
        self.sequence = 0;
        let _ = self.queue.send(RESTART, 0);
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        // An empty frame is the order to stop. Where even that cannot be queued the thread is left behind.
        let told = self.queue.send("", 0).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| told) {
            let _ = thread.join();
        }
    }
}

fn bind(socket: &zmq::Socket, address: SocketAddr) -> Result<SocketAddr, EngineError> {
    let port = if address.port() == 0 { "*".to_owned() } else { address.port().to_string() };
    let host = if address.is_ipv6() { format!("[{}]", address.ip()) } else { address.ip().to_string() };
    let endpoint = format!("tcp://{host}:{port}");
    socket.set_ipv6(address.is_ipv6())?;
    socket.bind(&endpoint).map_err(|source| EngineError::events(&endpoint, source))?;
    let bound = socket.get_last_endpoint()?.unwrap_or_default();
    let parsed = bound.strip_prefix("tcp://").and_then(|text| text.parse().ok());
    parsed.ok_or_else(|| EngineError::events(&bound, zmq::Error::EINVAL))
}

fn open_replay(
    context: &zmq::Context,
    address: SocketAddr,
    whole: bool,
) -> Result<(zmq::Socket, SocketAddr), EngineError> {
    let socket = context.socket(zmq::ROUTER)?;
    socket.set_linger(0)?;
    // With the library's default of 1,000 messages a slow reader loses the rest, end marker included.
    if whole {
        socket.set_sndhwm(2 * (REPLAY_BATCHES_MAX as i32 + 1))?;
    }
    let bound = bind(&socket, address)?;
    Ok((socket, bound))
}

struct Worker {
    receiver: zmq::Socket,
    events: zmq::Socket,
    replay: Option<zmq::Socket>,
    topic: Vec<u8>,
    replay_has_topic: bool,
    /// The last batches, oldest first: sequence number and payload.
    buffer: VecDeque<(u64, Vec<u8>)>,
}

impl Worker {
    fn run(mut self) {
        loop {
            let mut items = vec![self.receiver.as_poll_item(zmq::POLLIN)];
            items.extend(self.replay.as_ref().map(|socket| socket.as_poll_item(zmq::POLLIN)));
            match zmq::poll(&mut items, -1) {
                Ok(_) => {}
                Err(zmq::Error::EINTR) => continue,
                Err(_) => return,
            }
            let (batch, request) = (items[0].is_readable(), items.get(1).is_some_and(zmq::PollItem::is_readable));
            if batch && !self.forward() {
                return;
            }
            if request {
                self.answer();
            }
        }
    }

    /// Publishes one batch; false when told to stop.
    fn forward(&mut self) -> bool {
        let Ok(frames) = self.receiver.recv_multipart(0) else { return false };
        let (sequence, payload, live) = match <[Vec<u8>; 2]>::try_from(frames) {
            Ok([sequence, payload]) => (sequence, payload, true),
            Err(frames) => match <[Vec<u8>; 3]>::try_from(frames) {
                Ok([sequence, payload, _]) => (sequence, payload, false),
                Err(frames) => {
                    self.buffer.clear();
                    return frames.first().is_some_and(|order| order == RESTART.as_bytes());
                }
            },
        };
        if live {
            // A PUB socket drops what a slow subscriber cannot take; that is not an error.
            let _ = self.events.send_multipart([&self.topic, &sequence, &payload], 0);
        }
        if self.buffer.len() == REPLAY_BATCHES_MAX {
            self.buffer.pop_front();
        }
        self.buffer.push_back((big_endian(&sequence), payload));
        true
    }

    /// Answers one replay request with every buffered batch from the sequence number asked for.
    fn answer(&self) {
        let Some(replay) = &self.replay else { return };
        let Ok(frames) = replay.recv_multipart(zmq::DONTWAIT) else { return };
        let Ok([identity, delimiter, start]) = <[Vec<u8>; 3]>::try_from(frames) else { return };
        if !delimiter.is_empty() {
            return;
        }
        let start = big_endian(&start);
        for (sequence, payload) in self.buffer.iter().filter(|(sequence, _)| *sequence >= start) {
            self.reply(replay, &identity, &self.topic, *sequence, payload);
        }
        self.reply(replay, &identity, b"", REPLAY_END, b"");
    }

    fn reply(&self, replay: &zmq::Socket, identity: &[u8], topic: &[u8], sequence: u64, payload: &[u8]) {
        let sequence = sequence.to_be_bytes();
        let frames: &[&[u8]] = if self.replay_has_topic {
            &[identity, b"", topic, &sequence, payload]
        } else {
            &[identity, b"", &sequence, payload]
        };
        // A ROUTER drops replies to a client that left or reads too slowly, as the engine's does.
        let _ = replay.send_multipart(frames, 0);
    }
}

/// An unsigned big-endian number of any length, as the engine reads it: empty is 0, and only the last 8 bytes count.
fn big_endian(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
