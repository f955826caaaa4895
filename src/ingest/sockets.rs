//! ZMQ sockets with the options that event streams need, and what becomes of their connections.
//!
//! Every socket here has a monitor: a SUB socket says nothing when its publisher dies. With the monitor's two ends
//! a stream takes three of its context's sockets, and three more while it asks for a replay; a context
//! (1,023 sockets at most, one I/O thread) serves [`STREAMS_PER_CONTEXT`] streams, so that even all of them asking at once
//! stay within it.

#![forbid(unsafe_code)]

use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use super::framing::{self, Framed};
use zmq::{DONTWAIT, Message, Socket, SocketEvent, SocketType};

/// 166 × 3 sockets ≤ 500 at rest, 166 × 6 < 1,023 at worst.
const STREAMS_PER_CONTEXT: usize = 166;
const _: () = assert!(STREAMS_PER_CONTEXT * 3 <= 500 && STREAMS_PER_CONTEXT * 6 < 1_023);
/// Messages the library keeps while we do not read; beyond it the publisher drops, and we see a gap.
const RECEIVE_QUEUE_MAX: i32 = 1_000_000;
/// A longer message ends the connection.
const MESSAGE_BYTES_MAX: i64 = 64 * 1024 * 1024;
const RECONNECT_MS_MIN: i32 = 250;
const RECONNECT_MS_MAX: i32 = 5_000;
const HEARTBEAT_MS: i32 = 1_000;
const HEARTBEAT_TIMEOUT_MS: i32 = 3_000;
/// A replay socket that is refused tries again so soon; how often counts, its owner decides.
const REPLAY_RETRY_MS: i32 = 100;
/// Frames kept of one message; a message of more is malformed, and its rest dropped.
const FRAMES_MAX: usize = 4;

/// Why a socket could not be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The library refused.
    #[error("{0}")]
    Zmq(#[from] zmq::Error),
    /// The descriptors cannot be waited for.
    #[error("{0}")]
    Poll(#[from] std::io::Error),
    /// The library met an error that its binding has no name for.
    #[error("the system refuses such an address")]
    Unknown,
}

/// What became of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Link {
    /// A connection was made; the number tells it from others of the socket.
    Opened(i32),
    /// Both ends speak ZMQ.
    Ready,
    /// It ended.
    Closed(i32),
    /// An attempt failed, and another is planned.
    Retried,
}

/// The contexts of one ingest thread; made on that thread, since I/O threads inherit its core.
#[derive(Default)]
pub(crate) struct Contexts {
    contexts: Vec<(zmq::Context, Rc<()>)>,
    monitors: u64,
}

/// One socket with its monitor.
pub(crate) struct Watched {
    socket: Socket,
    monitor: Socket,
    /// Counts the streams of the context.
    context: Rc<()>,
}

impl Contexts {
    /// A SUB socket for a stream, that connects to (or waits at) the address.
    pub(crate) fn subscriber(&mut self, address: &str, bind: bool) -> Result<Watched, Error> {
        let place = self.contexts.iter().position(|(_, users)| Rc::strong_count(users) <= STREAMS_PER_CONTEXT);
        let place = place.unwrap_or_else(|| {
            self.contexts.push((zmq::Context::new(), Rc::new(())));
            self.contexts.len() - 1
        });
        let (context, users) = &self.contexts[place];
        let (context, users) = (context.clone(), Rc::clone(users));
        let socket = context.socket(SocketType::SUB)?;
        socket.set_rcvhwm(RECEIVE_QUEUE_MAX)?;
        socket.set_reconnect_ivl(RECONNECT_MS_MIN)?;
        socket.set_reconnect_ivl_max(RECONNECT_MS_MAX)?;
        socket.set_heartbeat_ivl(HEARTBEAT_MS)?;
        socket.set_heartbeat_timeout(HEARTBEAT_TIMEOUT_MS)?;
        socket.set_subscribe(b"")?;
        self.open(context, users, socket, address, bind)
    }

    /// A DEALER socket in the context of `stream`, which asks the replay address for all batches from `seq` on.
    pub(crate) fn replay(&mut self, stream: &Watched, address: &str, seq: u64) -> Result<Watched, Error> {
        let place = self.contexts.iter().position(|(_, users)| Rc::ptr_eq(users, &stream.context));
        let (context, _) = &self.contexts[place.expect("contexts live as long as their thread")];
        let context = context.clone();
        let socket = context.socket(SocketType::DEALER)?;
        socket.set_rcvhwm(RECEIVE_QUEUE_MAX)?;
        socket.set_reconnect_ivl(REPLAY_RETRY_MS)?;
        let watched = self.open(context, Rc::new(()), socket, address, false)?;
        // The engine's ROUTER drops a request without the empty delimiter in silence.
        watched.socket.send_multipart([Vec::new(), seq.to_be_bytes().to_vec()], DONTWAIT)?;
        Ok(watched)
    }

    fn open(
        &mut self,
        context: zmq::Context,
        users: Rc<()>,
        socket: Socket,
        address: &str,
        bind: bool,
    ) -> Result<Watched, Error> {
        socket.set_maxmsgsize(MESSAGE_BYTES_MAX)?;
        socket.set_linger(0)?;
        socket.set_ipv6(address.contains('['))?;
        let events = [
            SocketEvent::CONNECTED,
            SocketEvent::ACCEPTED,
            SocketEvent::HANDSHAKE_SUCCEEDED,
            SocketEvent::DISCONNECTED,
            SocketEvent::CONNECT_RETRIED,
        ];
        self.monitors += 1;
        let inproc = format!("inproc://monitor-{}", self.monitors);
        socket.monitor(&inproc, events.map(|event| i32::from(event.to_raw())).iter().sum())?;
        let monitor = context.socket(SocketType::PAIR)?;
        monitor.set_linger(0)?;
        monitor.connect(&inproc)?;
        let watched = Watched { socket, monitor, context: users };
        let socket = &watched.socket;
        // The binding panics at error numbers it has no name for, and an address can lead to any of them.
        let opened =
            catch_unwind(AssertUnwindSafe(|| if bind { socket.bind(address) } else { socket.connect(address) }));
        opened.map_err(|_| Error::Unknown)??;
        Ok(watched)
    }
}

/// Where a socket's monitor is sent that nobody reads any more.
const UNWATCHED: &str = "inproc://unwatched";

impl Drop for Watched {
    /// Ends the monitor before its reading end goes: the library's I/O thread tells of a connection with a send that waits
    /// for a reader, so an event that comes in between would stop the thread for ever, and every stream of the context
    /// with it (libzmq 4.3.4: once in some ten thousand streams).
    fn drop(&mut self) {
        // The old monitor is gone whether or not there can be a new one, which hears of nothing.
        let _ = self.socket.monitor(UNWATCHED, 0);
    }
}

impl Watched {
    /// The descriptors to wait for.
    pub(crate) fn descriptors(&self) -> Result<[RawFd; 2], Error> {
        Ok([self.socket.get_fd()?, self.monitor.get_fd()?])
    }

    /// The next thing that happened to a connection, if any.
    pub(crate) fn link(&self) -> Option<Link> {
        loop {
            let event = self.monitor.recv_bytes(DONTWAIT).ok()?;
            while self.monitor.get_rcvmore().unwrap_or(false) {
                self.monitor.recv_bytes(DONTWAIT).ok()?;
            }
            let (kind, value) = event.split_first_chunk::<2>()?;
            let value = value.first_chunk::<4>().map_or(0, |value| i32::from_ne_bytes(*value));
            let kind = u16::from_ne_bytes(*kind);
            for (event, link) in [
                (SocketEvent::CONNECTED, Link::Opened(value)),
                (SocketEvent::ACCEPTED, Link::Opened(value)),
                (SocketEvent::HANDSHAKE_SUCCEEDED, Link::Ready),
                (SocketEvent::DISCONNECTED, Link::Closed(value)),
                (SocketEvent::CONNECT_RETRIED, Link::Retried),
            ] {
                if kind == event.to_raw() {
                    return Some(link);
                }
            }
        }
    }

    /// Receives the next message; false when there is none.
    pub(crate) fn receive(&self, frames: &mut Frames) -> bool {
        frames.count = 0;
        loop {
            let part = frames.parts.get_mut(frames.count).unwrap_or(&mut frames.excess);
            // Besides "nothing there" only an interruption is possible; then the descriptor is still ready.
            if self.socket.recv(part, DONTWAIT).is_err() {
                return false;
            }
            let more = part.get_more();
            frames.count += 1;
            if !more {
                return true;
            }
        }
    }
}

/// One message's frames, in buffers that are used again.
pub(crate) struct Frames {
    parts: [Message; FRAMES_MAX],
    excess: Message,
    count: usize,
}

impl Frames {
    pub(crate) fn new() -> Self {
        Frames { parts: std::array::from_fn(|_| Message::new()), excess: Message::new(), count: 0 }
    }

    /// A message of a publisher.
    pub(crate) fn published(&self) -> Framed<'_> {
        self.with(framing::published)
    }

    /// A message of a replay.
    pub(crate) fn replayed(&self) -> Framed<'_> {
        self.with(framing::replayed)
    }

    /// The frames as they came; none where there were more than any message has.
    pub(crate) fn parts(&self) -> Option<Vec<&[u8]>> {
        Some(self.parts.get(..self.count)?.iter().map(|part| &part[..]).collect())
    }

    fn with<'a>(&'a self, read: impl FnOnce(&[&'a [u8]]) -> Framed<'a>) -> Framed<'a> {
        let parts = self.parts.each_ref().map(|part| &part[..]);
        parts.get(..self.count).map_or(Framed::Malformed, read)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    use super::*;

    /// Streams that are closed while something happens to their connection.
    const CLOSED: u64 = 2_000;
    const PATIENCE: Duration = Duration::from_secs(20);

    /// A stream, as soon as those that were closed have given their sockets back.
    fn open(contexts: &mut Contexts, address: &str) -> Watched {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match contexts.subscriber(address, false) {
                Ok(stream) => return stream,
                Err(error) => assert!(Instant::now() < deadline, "{error}: closed streams keep their sockets"),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn streams_closed_while_their_connections_come_and_go_do_not_stop_their_context() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = format!("tcp://{}", listener.local_addr().expect("bound"));
        // Every connection ends at once.
        std::thread::spawn(move || listener.incoming().for_each(drop));
        let mut contexts = Contexts::default();
        for number in 0..CLOSED {
            let stream = open(&mut contexts, &address);
            // At another moment of its connection each time.
            let until = Instant::now() + Duration::from_micros(number % 300);
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            drop(stream);
        }
        let stream = open(&mut contexts, &address);
        let deadline = Instant::now() + PATIENCE;
        while !matches!(stream.link(), Some(Link::Opened(_))) {
            assert!(Instant::now() < deadline, "the context's thread stands still");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
