//! The client's side of a connection: requests in, answers out.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use monoio::io::{OwnedWriteHalf, Splitable};
use monoio::net::TcpStream;

use super::answer::Refusal;
use super::upstream::write_all;
use super::watch::{Companion, Interrupt, Place, Watch, guarded};
use crate::executor::carry::{READ_BYTES_MAX, carry};
use crate::executor::{End, ReadAhead};
use crate::http::request::{self, HeadError, HeadLimits};
use crate::http::{Dechunker, RequestBody, RequestHead};
use crate::limits::Limits;

/// Bytes of pipelined requests that are kept while an answer is under way; beyond them the client is not read.
const READ_AHEAD_MAX: usize = 64 * 1024;
/// Room made for a body that was announced and of which nothing has come, bytes at most. Memory that nothing is written to
/// costs addresses only.
const BODY_ROOM_FIRST: usize = 1024 * 1024;
/// Room made for the rest of a body, at most, as a multiple of what has come.
const BODY_ROOM_FACTOR: usize = 3;
/// Largest decoded chunked body, bytes, whatever the configured limit: its length must fit in the line that announced
/// the chunks.
const CHUNKED_BYTES_MAX: usize = 999_999_999;
/// How long and for how many bytes a client that was refused is listened to, so that the answer reaches it.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES_MAX: usize = 4 * 1024 * 1024;

/// How long a client is listened to during a drain, when its last answer did not say that the connection would close.
const DRAIN_GRACE: Duration = Duration::from_secs(1);

/// Which request of a connection is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// The first: one must come.
    First,
    /// A further one, if any.
    Further,
    /// One that may be on its way in the middle of a drain; see [`DRAIN_GRACE`]. The connection does not count as idle.
    Last,
}

/// A request, complete.
#[derive(Debug)]
pub struct Request {
    /// Head and body in one piece, without chunk framing.
    pub bytes: Vec<u8>,
    /// The head.
    pub head: RequestHead,
    /// The id that the gateway gave it; none where the client's own stands in the head.
    pub made_id: Option<String>,
}

/// What came of waiting for a request.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one for each request, taken apart at once")]
pub enum Incoming {
    /// A request.
    Request(Request),
    /// One that is answered by the gateway, after which the connection is closed.
    Refused(Refusal),
    /// Nothing more comes, or nothing more is wanted.
    Closed,
}

/// A client connection.
pub struct Client {
    /// The next read, always in flight.
    pub reader: ReadAhead,
    /// The writing side.
    pub writer: OwnedWriteHalf<TcpStream>,
    /// Of the stream whose halves are above: open as long as they are.
    descriptor: RawFd,
    /// Where it comes from, if the kernel still knew.
    address: Option<IpAddr>,
    place: Place,
    /// The other leg of the request, while it is under way.
    companion: Option<Companion>,
}

/// Why more bytes of a request did not come.
enum Stop {
    End(End),
    Interrupt(Interrupt),
}

impl Client {
    /// Takes a connection over.
    #[must_use]
    pub fn new(stream: TcpStream, place: Place) -> Self {
        let descriptor = stream.as_raw_fd();
        let address = stream.peer_addr().ok().map(|peer| peer.ip());
        let (read, writer) = stream.into_split();
        Client { reader: ReadAhead::new(read, READ_AHEAD_MAX), writer, descriptor, address, place, companion: None }
    }

    /// Where the client comes from.
    #[must_use]
    pub fn address(&self) -> Option<IpAddr> {
        self.address
    }

    /// Has something go on beside whatever the connection waits for; nothing, to give up what does.
    pub fn set_companion(&mut self, companion: Option<Companion>) {
        self.companion = companion;
    }

    /// Whether something goes on beside.
    #[must_use]
    pub fn has_companion(&self) -> bool {
        self.companion.is_some()
    }

    /// Takes what goes on beside.
    pub fn take_companion(&mut self) -> Option<Companion> {
        self.companion.take()
    }

    /// The connection's supervision.
    #[must_use]
    pub fn watch(&self) -> &Rc<Watch> {
        &self.place.watch
    }

    /// Waits for a whole request.
    pub async fn next_request(&mut self, limits: &Limits, awaited: Awaited, buffers: &Buffers) -> Incoming {
        if let Err(incoming) = self.wait_for_first_byte(limits, awaited).await {
            return incoming;
        }
        let (bytes, head) = match self.read_head(limits).await {
            Ok(read) => read,
            Err(incoming) => return incoming,
        };
        match self.read_body(bytes, head, limits, buffers).await {
            Ok(request) => Incoming::Request(request),
            Err(incoming) => incoming,
        }
    }

    async fn wait_for_first_byte(&mut self, limits: &Limits, awaited: Awaited) -> Result<(), Incoming> {
        if self.reader.taken_along() > 0 && self.reader.cancel().await.is_err() {
            return Err(Incoming::Closed);
        }
        if self.reader.held() == 0 {
            self.watch().set_idle(awaited != Awaited::Last);
            self.watch().arm(Some(match awaited {
                Awaited::First => limits.head_timeout,
                Awaited::Further => limits.idle_timeout,
                Awaited::Last => DRAIN_GRACE,
            }));
            let stop = self.fill().await.err();
            self.watch().set_idle(false);
            match stop {
                None => {}
                Some(Stop::End(_)) => return Err(Incoming::Closed),
                Some(Stop::Interrupt(interrupt)) => match self.reader.cancel().await {
                    // A request that came this very moment is served, not lost.
                    Ok(1..) => {}
                    Ok(0) if awaited == Awaited::First && interrupt == Interrupt::TimedOut => {
                        return Err(Incoming::Refused(Refusal::RequestTimeout));
                    }
                    Ok(0) | Err(_) => return Err(Incoming::Closed),
                },
            }
        }
        self.watch().arm(Some(limits.head_timeout));
        Ok(())
    }

    async fn read_head(&mut self, limits: &Limits) -> Result<(Vec<u8>, RequestHead), Incoming> {
        let bounds = HeadLimits { bytes_max: limits.head_bytes_max, headers_max: limits.headers_max };
        let mut searched = 0;
        loop {
            if !self.reader.in_flight() {
                let bytes = self.reader.bytes();
                match request::parse(&bytes, searched, bounds) {
                    Ok(Some(head)) => return Ok((bytes, head)),
                    Ok(None) => {}
                    Err(error) => return Err(Incoming::Refused(refusal_of(error))),
                }
                searched = bytes.len();
                self.reader.put_back(bytes);
            }
            self.fill().await.map_err(Stop::incoming)?;
        }
    }

    async fn read_body(
        &mut self,
        mut bytes: Vec<u8>,
        head: RequestHead,
        limits: &Limits,
        buffers: &Buffers,
    ) -> Result<Request, Incoming> {
        let too_large = || Incoming::Refused(Refusal::BodyTooLarge(limits.body_bytes_max));
        let mut decoder = Dechunker::new(head.len);
        let wanted = match head.body {
            RequestBody::None => Some(head.len),
            RequestBody::Length(length) => match usize::try_from(length) {
                Ok(length) if length <= limits.body_bytes_max => Some(head.len + length),
                _ => return Err(too_large()),
            },
            RequestBody::Chunked => None,
        };
        let mut asked = !head.expects_continue;
        // Bytes of the last read: where it found little, little is waiting.
        let mut came = usize::MAX;
        loop {
            let complete = match wanted {
                Some(end) => (bytes.len() >= end).then_some((end, end)),
                None => match decoder.advance(&mut bytes) {
                    Ok(_) if is_beyond(&decoder, head.len, limits) => return Err(too_large()),
                    Ok(true) => Some((decoder.data_end(), decoder.body_end())),
                    Ok(false) => None,
                    Err(error) => return Err(Incoming::Refused(Refusal::BadRequest(error.to_string()))),
                },
            };
            if let Some((data_end, body_end)) = complete {
                let mut next = buffers.small();
                next.extend_from_slice(&bytes[body_end..]);
                bytes.truncate(data_end);
                self.reader.put_back(next);
                return Ok(Request { bytes, head, made_id: None });
            }
            if let Some(end) = wanted {
                bytes = with_room(bytes, end, buffers);
            }
            let (held, room) = (bytes.len(), bytes.capacity() - bytes.len());
            self.reader.put_back(bytes);
            if !asked {
                asked = true;
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n".to_vec(), 0, limits.write_timeout)
                    .await
                    .map_err(|_| Incoming::Closed)?;
                if !self.reader.in_flight() {
                    // The body may have come whole during the write; then there is nothing to wait for.
                    bytes = self.reader.bytes();
                    continue;
                }
            }
            carry(room.min(READ_BYTES_MAX).min(came)).await;
            self.watch().arm(Some(limits.body_timeout));
            self.fill().await.map_err(Stop::incoming)?;
            bytes = self.reader.bytes();
            came = bytes.len() - held;
        }
    }

    /// Waits for the read in flight, or for a new one.
    async fn fill(&mut self) -> Result<(), Stop> {
        let Client { reader, place, .. } = self;
        poll_fn(|context| {
            if let Poll::Ready(result) = reader.poll_fill(context) {
                return Poll::Ready(result.map(drop).map_err(Stop::End));
            }
            match place.watch.poll(context) {
                Some(interrupt) => Poll::Ready(Err(Stop::Interrupt(interrupt))),
                None => Poll::Pending,
            }
        })
        .await
    }

    /// Waits for something else than the client, within the time, unless the client leaves.
    ///
    /// # Errors
    /// What interrupted the wait; see [`guarded`].
    pub async fn guard<F: Future>(&mut self, time: Option<Duration>, future: F) -> Result<F::Output, Interrupt> {
        self.place.watch.arm(time);
        guarded(&mut self.reader, &self.place.watch, &mut self.companion, future).await
    }

    /// Breaks the connection off: the client sees a reset, never an end.
    pub fn reset(&self) {
        reset(self.descriptor);
    }

    /// Writes `bytes[from..]` within the time, unless the client leaves; gives the buffer back.
    ///
    /// # Errors
    /// The client is gone, does not take its bytes, or is to be cut: the connection must be closed.
    pub async fn write(&mut self, bytes: Vec<u8>, from: usize, time: Duration) -> Result<Vec<u8>, Interrupt> {
        self.place.watch.arm(Some(time));
        let write = write_all(&mut self.writer, bytes, from);
        let (result, bytes) = guarded(&mut self.reader, &self.place.watch, &mut self.companion, write).await?;
        result.map(|()| bytes).map_err(|_| Interrupt::ClientGone)
    }

    /// Answers a request that was refused, and listens on for a moment: a connection that is closed with bytes unread
    /// is reset, and the reset may overtake the answer.
    pub async fn refuse(&mut self, refusal: &Refusal, limits: &Limits) {
        let answer = refusal.to_bytes(false, false);
        if self.write(answer, 0, limits.write_timeout).await.is_err() {
            return;
        }
        let _sent = monoio::io::AsyncWriteRent::shutdown(&mut self.writer).await;
        self.watch().arm(Some(LINGER));
        let mut heard = 0;
        while heard < LINGER_BYTES_MAX && self.fill().await.is_ok() {
            let mut bytes = self.reader.bytes();
            heard += bytes.len();
            bytes.clear();
            self.reader.put_back(bytes);
        }
    }
}

impl Stop {
    fn incoming(self) -> Incoming {
        match self {
            Stop::Interrupt(Interrupt::TimedOut) => Incoming::Refused(Refusal::RequestTimeout),
            Stop::End(End::Closed | End::Failed(_)) | Stop::Interrupt(_) => Incoming::Closed,
        }
    }
}

/// The bytes, with room for a request that ends at the place, or for a good part of it: what is only announced costs
/// little memory, and what comes is moved once or twice.
fn with_room(mut bytes: Vec<u8>, end: usize, buffers: &Buffers) -> Vec<u8> {
    let left = end - bytes.len();
    if bytes.capacity() - bytes.len() >= left.min(READ_BYTES_MAX) {
        return bytes;
    }
    if let Some(mut large) = buffers.large(end) {
        large.extend_from_slice(&bytes);
        buffers.give_back(bytes);
        return large;
    }
    bytes.reserve_exact(left.min(BODY_ROOM_FIRST.max(BODY_ROOM_FACTOR * bytes.len())));
    bytes
}

/// Whether a chunked body, decoded so far and with the chunk begun, is beyond its limit.
fn is_beyond(decoder: &Dechunker, start: usize, limits: &Limits) -> bool {
    let bytes = ((decoder.data_end() - start) as u64).saturating_add(decoder.announced());
    bytes > limits.body_bytes_max.min(CHUNKED_BYTES_MAX) as u64
}

fn refusal_of(error: HeadError) -> Refusal {
    match error {
        HeadError::Malformed(_) => Refusal::BadRequest(error.to_string()),
        HeadError::TooLarge => Refusal::HeadTooLarge,
        HeadError::Unsupported(_) => Refusal::NotImplemented(error.to_string()),
        HeadError::Version => Refusal::Version,
    }
}

/// Whether this host lacks what a connection needs (descriptors, memory, ports), so that the error says nothing of the
/// peer.
#[must_use]
pub fn is_ours(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM | libc::EADDRNOTAVAIL)
    )
}

/// Resets a connection whatever is still to be sent. Dropping the halves alone would say FIN first, which ends an
/// answer without a length cleanly.
fn reset(descriptor: RawFd) {
    let address = libc::sockaddr { sa_family: libc::AF_UNSPEC as libc::sa_family_t, sa_data: [0; 14] };
    // SAFETY: the address is live and of the size given; an unspecified family disconnects, touching no memory of ours.
    // A failure means that the connection is gone already.
    unsafe { libc::connect(descriptor, &raw const address, std::mem::size_of::<libc::sockaddr>() as libc::socklen_t) };
}

/// Buffers of a shard, used again.
#[derive(Debug, Default)]
pub struct Buffers {
    small: RefCell<Vec<Vec<u8>>>,
    relay: RefCell<Vec<Vec<u8>>>,
    large: RefCell<Vec<Vec<u8>>>,
}

/// Room of a small buffer, bytes: what an idle connection reads into.
const SMALL: usize = 4 * 1024;
/// Least room of a relay buffer, bytes.
const RELAY: usize = 16 * 1024;
/// Largest relay buffer kept for another use, bytes.
const KEPT_MAX: usize = 72 * 1024;
/// Buffers kept of each kind; beyond it they are freed.
const KEPT: usize = 256;
/// Bytes of all large buffers kept; beyond it they are freed. In fresh memory a long body costs the kernel a fault for
/// every page, several times what copying it costs.
const LARGE_BYTES_KEPT: usize = 16 * 1024 * 1024;
/// Largest of them, bytes.
const LARGE_MAX: usize = 4 * 1024 * 1024;

impl Buffers {
    /// An empty buffer for a client's next request.
    #[must_use]
    pub fn small(&self) -> Vec<u8> {
        self.small.borrow_mut().pop().unwrap_or_else(|| Vec::with_capacity(SMALL))
    }

    /// An empty buffer for an answer.
    #[must_use]
    pub fn relay(&self) -> Vec<u8> {
        self.relay.borrow_mut().pop().unwrap_or_else(|| Vec::with_capacity(RELAY))
    }

    /// An empty buffer for a long request of so many bytes; none where none is at hand.
    #[must_use]
    pub fn large(&self, bytes: usize) -> Option<Vec<u8>> {
        let mut large = self.large.borrow_mut();
        let fits = large.iter().position(|buffer| buffer.capacity() >= bytes)?;
        Some(large.swap_remove(fits))
    }

    /// Keeps a buffer for another use, if it is of a kind that is worth it.
    pub fn give_back(&self, mut buffer: Vec<u8>) {
        buffer.clear();
        let shelf = match buffer.capacity() {
            SMALL..RELAY => &self.small,
            RELAY..=KEPT_MAX => &self.relay,
            room if room <= LARGE_MAX && room > KEPT_MAX => {
                let kept: usize = self.large.borrow().iter().map(Vec::capacity).sum();
                if kept + room > LARGE_BYTES_KEPT {
                    return;
                }
                &self.large
            }
            _ => return,
        };
        let mut shelf = shelf.borrow_mut();
        if shelf.len() < KEPT {
            shelf.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_body_gets_a_used_buffer_or_room_by_what_has_come() {
        let buffers = Buffers::default();
        let head = || b"POST / HTTP/1.1\r\n\r\n".to_vec();
        let announced = 3 * BODY_ROOM_FIRST;
        let mut fresh = with_room(head(), announced, &buffers);
        assert!((BODY_ROOM_FIRST..2 * BODY_ROOM_FIRST).contains(&fresh.capacity()), "{}", fresh.capacity());
        fresh.resize(fresh.capacity(), 7);
        let fresh = with_room(fresh, announced, &buffers);
        assert!(fresh.capacity() >= announced && fresh.starts_with(b"P") && fresh.ends_with(&[7]));
        buffers.give_back(fresh);
        let used = with_room(head(), announced, &buffers);
        assert!(used.capacity() >= announced && used == head());
        // What has room enough stays.
        let place = used.as_ptr();
        let same = with_room(used, announced, &buffers);
        assert_eq!(same.as_ptr(), place);
    }

    #[test]
    fn large_buffers_are_kept_up_to_a_sum() {
        let buffers = Buffers::default();
        for _ in 0..40 {
            buffers.give_back(Vec::with_capacity(1 << 20));
        }
        buffers.give_back(Vec::with_capacity(LARGE_MAX + 1));
        let kept: Vec<Vec<u8>> = std::iter::from_fn(|| buffers.large(1000)).collect();
        assert_eq!(kept.len(), LARGE_BYTES_KEPT >> 20);
        assert!(buffers.large(1).is_none());
    }
}
