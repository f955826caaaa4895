//! One leg whose answer is read whole: the prefill leg of any dialect.

use std::ops::Range;

use crate::executor::breathe;
use crate::http::{Dechunker, ResponseBody, ResponseHead, Span, response};
use crate::proxy::relay::CLOSE_LINE;
use crate::proxy::upstream::Upstream;

/// Room of a fresh buffer for an answer, bytes.
const ROOM: usize = 16 * 1024;

/// An answer that is all there.
pub struct Whole {
    /// Its head.
    pub head: ResponseHead,
    bytes: Vec<u8>,
    body: Range<usize>,
    /// Whether the connection can serve again.
    pub reusable: bool,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LegFault {
    /// The endpoint ended the connection before the end of an answer.
    Died {
        /// Not a byte of it had come.
        without_a_byte: bool,
    },
    /// What came is no answer.
    Malformed(&'static str),
    /// It is longer than the limit.
    TooLong,
}

impl Whole {
    /// Its body, without framing.
    #[must_use]
    pub fn body(&self) -> &[u8] {
        &self.bytes[self.body.clone()]
    }

    /// The answer for a client: its own head and body, framed by length, with `added` lines.
    #[must_use]
    pub fn to_client(&self, added: &[u8], close: bool) -> Vec<u8> {
        let mut lines = added.to_vec();
        lines.extend_from_slice(format!("Content-Length: {}\r\n", self.body.len()).as_bytes());
        if close {
            lines.extend_from_slice(CLOSE_LINE);
        }
        let mut out = Vec::with_capacity(self.bytes.len() + lines.len());
        let skip: &[&str] = &["content-length", "transfer-encoding", "x-request-id"];
        copy_head(&self.bytes[..self.head.len], &self.head.dropped, skip, &lines, &mut out);
        if self.head.is_http10 {
            // Said of this connection, not of the endpoint's.
            out[b"HTTP/1.".len()] = b'1';
        }
        out.extend_from_slice(self.body());
        out
    }
}

/// Appends a head without its `dropped` lines and without those named, and with `added` before its empty line.
pub fn copy_head(head: &[u8], dropped: &[Span], names: &[&str], added: &[u8], out: &mut Vec<u8>) {
    let mut start = 0;
    while let Some(length) = memchr::memmem::find(&head[start..], b"\r\n") {
        let line = &head[start..start + length + 2];
        if length == 0 {
            // The empty line; one in front of the request line is among the dropped.
            if !dropped.iter().any(|span| span.start <= start && start < span.end) {
                break;
            }
        } else {
            let name = line.split(|byte| *byte == b':').next().unwrap_or_default();
            let named = names.iter().any(|skipped| name.eq_ignore_ascii_case(skipped.as_bytes()));
            if !named && !dropped.iter().any(|span| span.start <= start && start < span.end) {
                out.extend_from_slice(line);
            }
        }
        start += length + 2;
    }
    out.extend_from_slice(added);
    out.extend_from_slice(b"\r\n");
}

/// Sends a request and reads its answer to the end; interim answers are passed over. Dropping it gives the connection up.
///
/// # Errors
/// Why there is no answer; the connection must not be used again.
pub async fn whole(upstream: &mut Upstream, message: Vec<u8>, bytes_max: usize) -> Result<Whole, LegFault> {
    // An endpoint that stopped reading may have answered all the same: what comes decides, not the write.
    let (written, message) = upstream.write(message, 0).await;
    drop(message);
    let mut buffer: Vec<u8> = Vec::with_capacity(ROOM);
    let mut reading = Reading::Head { searched: 0 };
    loop {
        if buffer.len() == buffer.capacity() {
            buffer.reserve(buffer.len());
        }
        let result;
        (result, buffer) = upstream.read(buffer).await;
        let ended = !matches!(result, Ok(1..));
        reading = match reading.advance(&mut buffer, ended)? {
            Advanced::Done(mut answer) => {
                answer.reusable &= written.is_ok();
                return Ok(Whole { bytes: buffer, ..answer });
            }
            Advanced::More(reading) => reading,
        };
        if ended {
            return Err(LegFault::Died { without_a_byte: buffer.is_empty() });
        }
        if buffer.len() > bytes_max {
            return Err(LegFault::TooLong);
        }
        breathe().await;
    }
}

/// How far an answer has been read.
enum Reading {
    Head { searched: usize },
    Body(ResponseHead),
    Chunks(ResponseHead, Dechunker),
}

enum Advanced {
    More(Reading),
    /// Without its bytes, which are in the buffer.
    Done(Whole),
}

impl Reading {
    /// Goes over what has come.
    fn advance(self, buffer: &mut Vec<u8>, ended: bool) -> Result<Advanced, LegFault> {
        match self {
            Reading::Head { mut searched } => {
                while let Some(head) =
                    response::parse(buffer, searched, false).map_err(|error| LegFault::Malformed(error.0))?
                {
                    searched = 0;
                    match head.status {
                        101 => return Err(LegFault::Malformed("the endpoint switches protocols unasked")),
                        100..200 => drop(buffer.drain(..head.len)),
                        _ => {
                            let reading = match head.body {
                                ResponseBody::Chunked => {
                                    let decoder = Dechunker::new(head.len);
                                    Reading::Chunks(head, decoder)
                                }
                                _ => Reading::Body(head),
                            };
                            return reading.advance_fresh(buffer, ended);
                        }
                    }
                }
                Ok(Advanced::More(Reading::Head { searched: buffer.len() }))
            }
            reading => reading.advance_fresh(buffer, ended),
        }
    }

    /// Goes over a body.
    fn advance_fresh(self, buffer: &mut Vec<u8>, ended: bool) -> Result<Advanced, LegFault> {
        let done = |head: ResponseHead, body: Range<usize>, excess: bool| {
            let reusable = head.keep_alive && !excess && !ended;
            Advanced::Done(Whole { head, bytes: Vec::new(), body, reusable })
        };
        match self {
            Reading::Head { .. } => Ok(Advanced::More(self)),
            Reading::Body(head) => {
                let (from, come) = (head.len, buffer.len() - head.len);
                let end = match head.body {
                    ResponseBody::Length(length) => usize::try_from(length).ok().filter(|length| *length <= come),
                    ResponseBody::UntilClose => ended.then_some(come),
                    ResponseBody::None | ResponseBody::Chunked => Some(0),
                };
                match end {
                    Some(length) => Ok(done(head, from..from + length, length < come)),
                    None => Ok(Advanced::More(Reading::Body(head))),
                }
            }
            Reading::Chunks(head, mut decoder) => {
                let whole = decoder
                    .advance(buffer)
                    .map_err(|_| LegFault::Malformed("the chunks of the endpoint's answer are malformed"))?;
                if !whole {
                    return Ok(Advanced::More(Reading::Chunks(head, decoder)));
                }
                let body = head.len..decoder.data_end();
                Ok(done(head, body, decoder.body_end() < buffer.len()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(parts: &[&str], then_ends: bool) -> Result<(u16, String, bool), LegFault> {
        let mut buffer = Vec::new();
        let mut reading = Reading::Head { searched: 0 };
        let last = parts.len();
        for (n, part) in parts.iter().map(Some).chain(then_ends.then_some(None)).enumerate() {
            buffer.extend_from_slice(part.map_or("", |part| part).as_bytes());
            match reading.advance(&mut buffer, n == last)? {
                Advanced::Done(whole) => {
                    let whole = Whole { bytes: buffer, ..whole };
                    let body = String::from_utf8(whole.body().to_vec()).expect("text");
                    return Ok((whole.head.status, body, whole.reusable));
                }
                Advanced::More(more) => reading = more,
            }
        }
        Err(LegFault::Died { without_a_byte: buffer.is_empty() })
    }

    #[test]
    fn an_answer_is_whole_at_its_end_however_it_comes() {
        for (parts, ends, expected) in [
            (&["HTTP/1.1 200 OK\r\nContent-Le", "ngth: 5\r\n\r\nhel", "lo"][..], false, (200, "hello", true)),
            (
                &["HTTP/1.1 400 No\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n", "3\r\nllo\r\n0\r\n\r\n"],
                false,
                (400, "hello", true),
            ),
            (&["HTTP/1.1 200 OK\r\n\r\nhel", "lo"], true, (200, "hello", false)),
            (&["HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n"], false, (503, "", true)),
            (&["HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxy"], false, (200, "x", false)),
        ] {
            assert_eq!(read(parts, ends), Ok((expected.0, expected.1.to_owned(), expected.2)), "{parts:?}");
        }
    }

    #[test]
    fn an_answer_that_ends_early_is_none() {
        for (parts, without_a_byte) in
            [(&[""][..], true), (&["HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel"], false), (&["HTTP/1.1 2"], false)]
        {
            assert_eq!(read(parts, true), Err(LegFault::Died { without_a_byte }), "{parts:?}");
        }
        assert!(matches!(read(&["SSH-2.0\r\n\r\n"], false), Err(LegFault::Malformed(_))));
    }

    #[test]
    fn a_head_is_copied_without_the_lines_that_are_named() {
        let head = b"POST /v1 HTTP/1.1\r\nHost: a\r\ncontent-LENGTH: 7\r\nTE: x\r\nX: y: z\r\n\r\n";
        let dropped = Span { start: 47, end: 54 };
        assert_eq!(dropped.of(head), b"TE: x\r\n");
        let mut out = Vec::new();
        copy_head(head, &[dropped], &["content-length"], b"N: 1\r\n", &mut out);
        assert_eq!(String::from_utf8(out).expect("text"), "POST /v1 HTTP/1.1\r\nHost: a\r\nX: y: z\r\nN: 1\r\n\r\n");
    }

    #[test]
    fn a_client_gets_the_answer_framed_by_its_length() {
        let mut buffer = b"HTTP/1.0 422 No\r\nContent-Type: a/b\r\nConnection: close\r\n\r\nwhy".to_vec();
        let Ok(Advanced::Done(whole)) = (Reading::Head { searched: 0 }).advance(&mut buffer, true) else {
            panic!("it is whole")
        };
        let answer = Whole { bytes: buffer, ..whole }.to_client(b"x-request-id: 7\r\n", false);
        let expected = "HTTP/1.1 422 No\r\nContent-Type: a/b\r\nx-request-id: 7\r\nContent-Length: 3\r\n\r\nwhy";
        assert_eq!(String::from_utf8(answer).expect("text"), expected);
    }
}
