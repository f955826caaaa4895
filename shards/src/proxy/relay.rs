//! One answer: its head read from the endpoint, then bytes passed on as they come.
//!
//! One buffer is held: it is read into, written out, and only then read into again, so a client that does not take its
//! bytes stops the reading of its endpoint.

use super::client::{Buffers, Client};
use super::upstream::Upstream;
use super::watch::Interrupt;
use crate::disagg::refusal::BrokenEvents;
use crate::executor::breathe;
use crate::http::response;
use crate::http::{BodyTracker, Dechunker, ResponseBody, ResponseHead, edit};
use crate::limits::Limits;
use crate::service::{EndpointStats, add};
use crate::usage::Tail;

/// What ends a head whose connection is closed after the answer.
pub const CLOSE_LINE: &[u8] = b"Connection: close\r\n";

/// Why an answer did not come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The client left, stalled, or was cut.
    Client(Interrupt),
    /// The endpoint ended the connection without a byte of an answer.
    Died,
    /// No byte of an answer came in time.
    FirstByteTimeout,
    /// What came is no answer; nothing of it was passed on.
    Malformed(&'static str),
    /// The answer broke after a part of it was passed on.
    Broken,
}

/// An answer's head with what came behind it.
pub struct Begun {
    buffer: Vec<u8>,
    /// Room in front of the head.
    headroom: usize,
    /// The head.
    pub head: ResponseHead,
}

/// Reads the answer's head; interim answers are passed over. `headroom` bytes are kept free in front of it, for the lines
/// that [`relay`] adds.
///
/// # Errors
/// Everything but [`Fault::Broken`]: nothing was passed on yet.
pub async fn begin(
    client: &mut Client,
    upstream: &mut Upstream,
    to_head: bool,
    headroom: usize,
    limits: &Limits,
    buffers: &Buffers,
) -> Result<Begun, Fault> {
    let mut buffer = buffers.relay();
    buffer.resize(headroom, 0);
    let mut searched = 0;
    let mut came = false;
    loop {
        if buffer.len() > headroom + limits.head_bytes_max {
            return Err(Fault::Malformed("the endpoint's answer has a head beyond the limit"));
        }
        if buffer.len() == buffer.capacity() {
            buffer.reserve(buffer.len());
        }
        let time = if came { Some(limits.stream_idle_timeout) } else { limits.first_byte_timeout };
        let result;
        (result, buffer) = client.guard(time, upstream.read(buffer)).await.map_err(|interrupt| match interrupt {
            Interrupt::TimedOut => Fault::FirstByteTimeout,
            interrupt => Fault::Client(interrupt),
        })?;
        match result {
            Ok(1..) => came = true,
            Ok(0) | Err(_) if came => return Err(Fault::Malformed("the endpoint's answer ended inside its head")),
            Ok(0) | Err(_) => return Err(Fault::Died),
        }
        while let Some(head) =
            response::parse(&buffer[headroom..], searched, to_head).map_err(|error| Fault::Malformed(error.0))?
        {
            match head.status {
                // Nobody asked for another protocol: the request's Upgrade was not passed on.
                101 => return Err(Fault::Malformed("the endpoint switches protocols unasked")),
                100..200 => drop(buffer.drain(headroom..headroom + head.len)),
                _ => return Ok(Begun { buffer, headroom, head }),
            }
            searched = 0;
        }
        searched = buffer.len() - headroom;
    }
}

/// What the client is to be told about its own connection.
#[derive(Clone, Copy, Debug)]
pub struct Terms<'a> {
    /// Lines added to the answer's head, [`CLOSE_LINE`] among them where the connection is closed after it; no more than
    /// the head room that the answer was begun with.
    pub added: &'a [u8],
    /// The client speaks HTTP/1.0: no chunks.
    pub is_http10: bool,
    /// What the client is told where a stream of events breaks.
    pub broken: BrokenEvents,
    /// A stream of events ends with `[DONE]`, or it was cut.
    pub wants_done: bool,
    /// The endpoint's counters: what the client is sent is added to them.
    pub stats: &'a EndpointStats,
}

/// Waits until something of the body has come: engines send the head of a stream before they have anything to say, and
/// until then the request may still be answered otherwise.
///
/// # Errors
/// As [`begin`]; [`Fault::Died`] also where the answer ends without a byte of a body.
pub async fn first_of_body(
    client: &mut Client,
    upstream: &mut Upstream,
    begun: &mut Begun,
    limits: &Limits,
) -> Result<(), Fault> {
    loop {
        let come = &begun.buffer[begun.headroom + begun.head.len..];
        match begun.head.body {
            ResponseBody::None | ResponseBody::Length(0) => return Ok(()),
            ResponseBody::Chunked => {
                let zeros = come.iter().take_while(|byte| **byte == b'0').count();
                match come.get(zeros) {
                    Some(b'\r' | b';') if zeros > 0 => return Err(Fault::Died),
                    Some(_) => return Ok(()),
                    None => {}
                }
            }
            _ if !come.is_empty() => return Ok(()),
            _ => {}
        }
        begun.buffer.reserve(1);
        let buffer = std::mem::take(&mut begun.buffer);
        let read = client.guard(limits.first_byte_timeout, upstream.read(buffer)).await;
        let (result, buffer) = read.map_err(|interrupt| match interrupt {
            Interrupt::TimedOut => Fault::FirstByteTimeout,
            interrupt => Fault::Client(interrupt),
        })?;
        begun.buffer = buffer;
        if !matches!(result, Ok(1..)) {
            return Err(Fault::Died);
        }
    }
}

/// How far an answer's body has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Its first byte is here: engines send the head of a stream before they look at the prompt.
    Began,
    /// Its last byte is here, and not with the client yet: who hears of the end there finds the endpoint free.
    Ended,
}

/// What is made of an answer's body beside passing it on.
pub struct Heard<'a, F: FnMut(Progress)> {
    /// Called once for each step.
    pub progress: F,
    /// Keeps its end.
    pub tail: Option<&'a mut Tail>,
}

/// What ends a body in chunks.
const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// Whether the event that ends a stream has gone by.
struct DoneWatch {
    seen: bool,
    /// The last bytes that went by, in which it may have begun.
    carry: Vec<u8>,
}

const DONE: &[u8] = b"[DONE]";

impl DoneWatch {
    fn new(wanted: bool) -> Self {
        DoneWatch { seen: !wanted, carry: Vec::new() }
    }

    fn look(&mut self, bytes: &[u8]) {
        if self.seen {
            return;
        }
        // It stands near the end; what is in the middle of a long piece is an answer that quotes it.
        self.carry.extend_from_slice(&bytes[bytes.len().saturating_sub(256)..]);
        self.seen = memchr::memmem::find(&self.carry, DONE).is_some();
        self.carry.drain(..self.carry.len().saturating_sub(DONE.len() - 1));
    }
}

/// How the body goes by: as it is, or freed of its chunks.
enum Passage {
    AsIs(BodyTracker),
    Decoded(Dechunker),
}

/// Where the body stands after a look at a buffer.
struct Passed {
    done: bool,
    /// What comes next of the body is malformed; the buffer ends before it.
    faulty: bool,
    /// The endpoint sent more than its answer.
    excess: bool,
}

impl Passage {
    /// Leaves in the buffer, from `at` on, what the client is to get of the body.
    fn pass(&mut self, buffer: &mut Vec<u8>, at: usize) -> Passed {
        match self {
            Passage::AsIs(tracker) => {
                let taken = tracker.advance(&buffer[at..]);
                let (done, more) = (tracker.is_done(), at + taken < buffer.len());
                buffer.truncate(at + taken);
                Passed { done, faulty: more && !done, excess: more && done }
            }
            Passage::Decoded(decoder) => {
                decoder.rebase(at);
                let decoded = decoder.advance(buffer);
                let done = decoded == Ok(true);
                let excess = done && decoder.body_end() < buffer.len();
                buffer.truncate(decoder.data_end());
                Passed { done, faulty: decoded.is_err(), excess }
            }
        }
    }
}

/// Passes the answer on, head first, to its end; says whether the endpoint's connection can serve again.
///
/// # Errors
/// [`Fault::Client`]; [`Fault::Malformed`] when nothing was passed on; [`Fault::Broken`], with which the client's
/// connection has been dealt with and must be closed.
pub async fn relay(
    client: &mut Client,
    upstream: &mut Upstream,
    begun: Begun,
    terms: Terms<'_>,
    heard: Heard<'_, impl FnMut(Progress)>,
    limits: &Limits,
    buffers: &Buffers,
) -> Result<bool, Fault> {
    let Heard { mut progress, mut tail } = heard;
    let mut body_began = false;
    let Begun { mut buffer, headroom, mut head } = begun;
    let decode = terms.is_http10 && head.body == ResponseBody::Chunked;
    if decode && let Some(line) = head.transfer_encoding {
        head.dropped.push(line);
        head.dropped.sort_unstable_by_key(|span| span.start);
    }
    if head.is_http10 {
        // Said of this connection, not of the endpoint's: "HTTP/1.0" becomes "HTTP/1.1".
        buffer[headroom + b"HTTP/1.".len()] = b'1';
    }
    let mut from = edit::edit_head(&mut buffer, headroom, head.len, &head.dropped, terms.added);
    let mut at = headroom + head.len;
    let mut passage =
        if decode { Passage::Decoded(Dechunker::new(at)) } else { Passage::AsIs(BodyTracker::new(head.body)) };
    let until_close = head.body == ResponseBody::UntilClose;
    let mut began = false;
    let mut done = DoneWatch::new(terms.wants_done && head.event_stream && head.status == 200);
    loop {
        let mut passed = passage.pass(&mut buffer, at);
        done.look(buffer.get(at..).unwrap_or_default());
        if passed.done && !done.seen {
            // The endpoint ended it in good order before its end: the client must not take it for a whole answer.
            if !began {
                return Err(Fault::Died);
            }
            if !buffer.ends_with(LAST_CHUNK) {
                client.reset();
                return Err(Fault::Broken);
            }
            buffer.truncate(buffer.len() - LAST_CHUNK.len());
            passed.faulty = true;
        }
        if let Some(tail) = &mut tail {
            tail.push(buffer.get(at..).unwrap_or_default());
        }
        if at < buffer.len() && !body_began {
            body_began = true;
            progress(Progress::Began);
        }
        if passed.done && !passed.faulty {
            progress(Progress::Ended);
        }
        if passed.faulty && !began {
            return Err(Fault::Malformed("the chunks of the endpoint's answer are malformed"));
        }
        if from < buffer.len() {
            buffer = match client.write(buffer, from, limits.write_timeout).await {
                Ok(buffer) => {
                    add(&terms.stats.bytes_out, (buffer.len() - from) as u64);
                    buffer
                }
                Err(interrupt) => {
                    if interrupt == Interrupt::OtherLeg {
                        // How much of the write came through is not known: nothing can follow it.
                        client.reset();
                    }
                    return Err(Fault::Client(interrupt));
                }
            };
        }
        began = true;
        if passed.faulty {
            end_broken(client, &passage, head.event_stream, terms.broken.died, limits).await;
            return Err(Fault::Broken);
        }
        if passed.done {
            buffers.give_back(buffer);
            return Ok(head.keep_alive && !passed.excess);
        }
        if buffer.len() == buffer.capacity() && buffer.capacity() < limits.relay_bytes_max {
            buffer = Vec::with_capacity(limits.relay_bytes_max);
        }
        buffer.clear();
        (from, at) = (0, 0);
        breathe().await;
        let read = client.guard(Some(limits.stream_idle_timeout), upstream.read(buffer)).await;
        let result;
        (result, buffer) = match read {
            Ok(read) => read,
            Err(Interrupt::TimedOut) => {
                end_broken(client, &passage, head.event_stream, terms.broken.idle, limits).await;
                return Err(Fault::Broken);
            }
            Err(Interrupt::OtherLeg) => {
                end_broken(client, &passage, head.event_stream, terms.broken.other_leg, limits).await;
                return Err(Fault::Client(Interrupt::OtherLeg));
            }
            Err(interrupt) => return Err(Fault::Client(interrupt)),
        };
        match result {
            Ok(1..) => {}
            Ok(0) if until_close && done.seen => {
                buffers.give_back(buffer);
                return Ok(false);
            }
            Ok(0) | Err(_) => {
                end_broken(client, &passage, head.event_stream, terms.broken.died, limits).await;
                return Err(Fault::Broken);
            }
        }
    }
}

/// Ends an answer that broke, so that no client can take it for a whole one: chunks stay without their last, a length
/// unfulfilled; a stream of events gets an event that says so, where one can stand. All that the passage went over has
/// been written.
async fn end_broken(client: &mut Client, passage: &Passage, event_stream: bool, broken: &'static str, limits: &Limits) {
    let event = match passage {
        // Where the endpoint sent its last chunk too early, that was held back.
        Passage::AsIs(tracker @ BodyTracker::Chunked(scanner))
            if event_stream && (scanner.at_boundary() || tracker.is_done()) =>
        {
            format!("{:x}\r\n{broken}\r\n", broken.len())
        }
        Passage::AsIs(BodyTracker::Length(_) | BodyTracker::Chunked(_)) => return,
        Passage::AsIs(BodyTracker::UntilClose) | Passage::Decoded(_) if event_stream => broken.to_owned(),
        Passage::AsIs(BodyTracker::UntilClose) | Passage::Decoded(_) => return client.reset(),
    };
    // The client's connection is closed next, whatever comes of this.
    let _told = client.write(event.into_bytes(), 0, limits.write_timeout).await;
}
