//! What an endpoint is sent: the client's head without the lines of its own connection, a few lines of the gateway's,
//! and the body as it came.
//!
//! **Invariant.** The client's bytes are never changed here, so that the request can be sent again with other lines.

use std::cell::Cell;
use std::fmt::Display;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};

use super::client::Request;
use super::upstream::Upstream;
use crate::http::{RequestBody, edit};

/// A body of up to so many bytes is copied behind its head, so that the request is one write. Of a longer one only the
/// first [`BEGIN_BYTES`] are, and the rest is written from where it lies.
const COPIED_BYTES_MAX: usize = 48 * 1024;
/// See [`COPIED_BYTES_MAX`].
const BEGIN_BYTES: usize = 16 * 1024;
/// Longest id of a client's that is said again in the answer, bytes. A longer one goes to the endpoint alone.
const ID_BYTES_MAX: usize = 256;

/// Appends a header line.
pub fn push_line(lines: &mut Vec<u8>, name: &str, value: impl Display) {
    // A vector takes every byte.
    let _whole = write!(lines, "{name}: {value}\r\n");
}

/// Ids for requests that come without one.
pub struct RequestIds(Cell<u64>);

impl Default for RequestIds {
    fn default() -> Self {
        RequestIds(Cell::new(RandomState::new().hash_one(0)))
    }
}

impl RequestIds {
    /// Random bits that are not met again for long.
    #[must_use]
    pub fn random(&self) -> u64 {
        mix(self.advance())
    }

    /// The next id: 32 hexadecimal digits, not to be foreseen from outside and, over a fleet's life, not met again.
    #[must_use]
    pub fn next(&self) -> String {
        let state = self.advance();
        format!("{:016x}{:016x}", mix(state), mix(state ^ 0xd6e8_feb8_6659_fd93))
    }

    fn advance(&self) -> u64 {
        let state = self.0.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.0.set(state);
        state
    }
}

/// The finalizer of SplitMix64: every bit of the state reaches every bit of the result.
fn mix(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

/// The request's id as its answer repeats it; none where the client's own cannot be repeated.
#[must_use]
pub fn id_of(request: &Request) -> Option<&str> {
    if let Some(made) = &request.made_id {
        return Some(made);
    }
    let id = request.head.request_id?.of(&request.bytes);
    let fits = !id.is_empty() && id.len() <= ID_BYTES_MAX && id.iter().all(u8::is_ascii_graphic);
    std::str::from_utf8(id).ok().filter(|_| fits)
}

/// The name of the header that carries a request's id.
pub const ID_HEADER: &str = "x-request-id";

/// What is written first; the body from `rest_from` on lies in the request's own bytes.
#[derive(Debug)]
pub struct Outgoing {
    first: Vec<u8>,
    rest_from: usize,
}

impl Outgoing {
    /// The request with more lines in its head. `buffer` is empty.
    #[must_use]
    pub fn new(request: &Request, added: &[u8], mut buffer: Vec<u8>) -> Self {
        let Request { bytes, head, .. } = request;
        let body = bytes.len() - head.len;
        let copied = if body <= COPIED_BYTES_MAX { body } else { BEGIN_BYTES };
        buffer.reserve(head.len + added.len() + copied);
        edit::copy_head(&bytes[..head.len], &head.dropped, added, &mut buffer);
        let rest_from = head.len + copied;
        buffer.extend_from_slice(&bytes[head.len..rest_from]);
        Outgoing { first: buffer, rest_from }
    }

    /// The request with another body, which is announced by its own length. `buffer` is empty.
    #[must_use]
    pub fn with_body(request: &Request, added: &[u8], body: &[u8], mut buffer: Vec<u8>) -> Self {
        let Request { bytes, head, .. } = request;
        let mut lines = Vec::with_capacity(head.len + added.len());
        edit::copy_head(&bytes[..head.len], &head.dropped, added, &mut lines);
        buffer.reserve(lines.len() + 32 + body.len());
        edit::with_length(&lines, body.len(), &mut buffer);
        buffer.extend_from_slice(body);
        Outgoing { first: buffer, rest_from: bytes.len() }
    }

    /// Writes it. Gives back the buffer, and the request's bytes.
    pub async fn send(self, upstream: &mut Upstream, bytes: Vec<u8>) -> (io::Result<()>, Vec<u8>, Vec<u8>) {
        let (written, first) = upstream.write(self.first, 0).await;
        if written.is_err() || self.rest_from == bytes.len() {
            return (written, first, bytes);
        }
        let (written, bytes) = upstream.write(bytes, self.rest_from).await;
        (written, first, bytes)
    }
}

/// Has a body that came in chunks, decoded by now, announced by its length, in place of the line that announced the chunks.
pub fn announce_length(request: &mut Request) {
    let Request { bytes, head, .. } = request;
    let Some(line) = head.transfer_encoding.filter(|_| head.body == RequestBody::Chunked) else { return };
    let length = format!("Content-Length: {}\r\n", bytes.len() - head.len);
    // The shortest such line, "transfer-encoding:chunked", is as long as that of a length of nine digits.
    let start = line.end - length.len();
    assert!(start >= line.start, "a chunked body is below CHUNKED_BYTES_MAX");
    bytes[start..line.end].copy_from_slice(length.as_bytes());
    if let Some(dropped) = head.dropped.iter_mut().find(|dropped| dropped.start == line.start) {
        dropped.end = start;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::request::{HeadLimits, parse};

    fn request(head: &str, body: &[u8]) -> Request {
        let mut bytes = head.as_bytes().to_vec();
        let limits = HeadLimits { bytes_max: 4096, headers_max: 16 };
        let head = parse(&bytes, 0, limits).expect("a good head").expect("a whole head");
        bytes.extend_from_slice(body);
        Request { bytes, head, made_id: None }
    }

    #[test]
    fn lines_are_added_and_the_clients_bytes_stay_as_they_are() {
        for (length, copied) in [(0, 0), (5, 5), (COPIED_BYTES_MAX, COPIED_BYTES_MAX), (60_000, BEGIN_BYTES)] {
            let body = vec![b'x'; length];
            let text = format!("POST /a HTTP/1.1\r\nHost: h\r\nTE: trailers\r\nContent-Length: {length}\r\n\r\n");
            let request = request(&text, &body);
            let before = request.bytes.clone();
            let out = Outgoing::new(&request, b"A: 1\r\n", Vec::new());
            let expected = text.replace("TE: trailers\r\n", "").replace("\r\n\r\n", "\r\nA: 1\r\n\r\n");
            assert_eq!(&out.first[..expected.len()], expected.as_bytes());
            assert_eq!((out.first.len() - expected.len(), out.rest_from), (copied, text.len() + copied));
            assert_eq!(request.bytes, before);
        }
    }

    #[test]
    fn another_body_goes_with_its_own_length() {
        let request = request("POST /a HTTP/1.1\r\nHost: h\r\ncontent-length: 1\r\nTE: trailers\r\n\r\n", b"x");
        let out = Outgoing::with_body(&request, b"A: 1\r\n", b"other", Vec::new());
        let expected = "POST /a HTTP/1.1\r\nHost: h\r\nA: 1\r\nContent-Length: 5\r\n\r\nother";
        assert_eq!(String::from_utf8(out.first).as_deref(), Ok(expected));
        assert_eq!(out.rest_from, request.bytes.len(), "nothing of the client's body follows");
    }

    #[test]
    fn an_id_is_repeated_only_where_a_header_can_carry_it() {
        let id = |value: &str| {
            let request = request(&format!("GET / HTTP/1.1\r\nHost: h\r\nX-Request-Id: {value}\r\n\r\n"), b"");
            id_of(&request).map(str::to_owned)
        };
        assert_eq!(id("abc-1").as_deref(), Some("abc-1"));
        let long = "x".repeat(ID_BYTES_MAX + 1);
        for bad in ["", "a b", "\u{e4}", long.as_str()] {
            assert_eq!(id(bad), None, "{bad}");
        }
        let ids = RequestIds::default();
        let made: std::collections::HashSet<String> = (0..1000).map(|_| ids.next()).collect();
        assert_eq!(made.len(), 1000);
        assert!(made.iter().all(|id| id.len() == 32 && id.bytes().all(|digit| digit.is_ascii_hexdigit())));
    }
}
