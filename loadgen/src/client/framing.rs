//! The head of an answer and the framing of its body, without I/O.

/// Bytes of a head. Beyond it the answer is bad.
const HEAD_BYTES_MAX: usize = 64 * 1024;
/// Headers of a head. Beyond it the answer is bad.
const HEADERS_MAX: usize = 100;
/// Bytes of a chunk's size line, and of a trailer line. Beyond it the answer is bad.
const LINE_BYTES_MAX: usize = 1_024;

/// The answer breaks HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// What the head says about the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    /// That many bytes.
    Length(u64),
    /// Chunks.
    Chunked,
    /// Until the server closes.
    UntilClose,
}

/// The parts of a head that matter here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) status: u16,
    pub(super) framing: Framing,
    pub(super) keep_alive: bool,
    pub(super) event_stream: bool,
}

impl Head {
    /// The head at the start of `bytes` and its length, or none if more bytes are needed.
    pub(super) fn parse(bytes: &[u8]) -> Result<Option<(Head, usize)>, Malformed> {
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut response = httparse::Response::new(&mut headers);
        let length = match response.parse(bytes).map_err(|_| Malformed)? {
            httparse::Status::Complete(length) => length,
            httparse::Status::Partial if bytes.len() > HEAD_BYTES_MAX => return Err(Malformed),
            httparse::Status::Partial => return Ok(None),
        };
        let status = response.code.ok_or(Malformed)?;
        let mut head =
            Head { status, framing: Framing::UntilClose, keep_alive: response.version == Some(1), event_stream: false };
        for header in response.headers.iter() {
            head.take(header.name, header.value)?;
        }
        if status < 200 || status == 204 || status == 304 {
            head.framing = Framing::Length(0);
        }
        Ok(Some((head, length)))
    }

    fn take(&mut self, name: &str, value: &[u8]) -> Result<(), Malformed> {
        let text = std::str::from_utf8(value).unwrap_or("").trim();
        if name.eq_ignore_ascii_case("content-length") {
            // Chunked framing wins over a length, whatever their order.
            if self.framing != Framing::Chunked {
                self.framing = Framing::Length(text.parse().map_err(|_| Malformed)?);
            }
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            if !text.eq_ignore_ascii_case("chunked") {
                return Err(Malformed);
            }
            self.framing = Framing::Chunked;
        } else if name.eq_ignore_ascii_case("connection") {
            self.keep_alive &= !text.eq_ignore_ascii_case("close");
        } else if name.eq_ignore_ascii_case("content-type") {
            self.event_stream = text.to_ascii_lowercase().starts_with("text/event-stream");
        }
        Ok(())
    }
}

/// Takes the framing off a body, read by read.
///
/// ```text
/// Length(n) ──n bytes──▶ Done        UntilClose (until the end of the connection)
/// Size ──size line──▶ Data(n) ──n bytes──▶ DataEnd ──CRLF──▶ Size
///   └──size 0──▶ Trailer ──empty line──▶ Done
/// ```
#[derive(Debug)]
pub(super) struct Decoder {
    state: State,
    line: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Length(u64),
    UntilClose,
    Size,
    Data(u64),
    DataEnd,
    Trailer,
    Done,
}

impl Decoder {
    pub(super) fn new(framing: Framing) -> Self {
        let state = match framing {
            Framing::Length(0) => State::Done,
            Framing::Length(bytes) => State::Length(bytes),
            Framing::UntilClose => State::UntilClose,
            Framing::Chunked => State::Size,
        };
        Decoder { state, line: Vec::new() }
    }

    /// Whether the body is whole.
    pub(super) fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Whether the end of the connection is the end of the body.
    pub(super) fn may_end_by_close(&self) -> bool {
        self.state == State::UntilClose
    }

    /// Appends the plain bytes of `input` to `out`; returns how many bytes of `input` belong to the body.
    pub(super) fn decode(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<usize, Malformed> {
        let mut at = 0;
        while at < input.len() {
            let rest = &input[at..];
            match self.state {
                State::Done => break,
                State::UntilClose => {
                    out.extend_from_slice(rest);
                    at = input.len();
                }
                State::Length(left) | State::Data(left) => {
                    let take = left.min(rest.len() as u64);
                    // `take` is at most the length of a slice.
                    out.extend_from_slice(&rest[..take as usize]);
                    at += take as usize;
                    self.state = match (self.state, left - take) {
                        (State::Length(_), 0) => State::Done,
                        (State::Length(_), left) => State::Length(left),
                        (_, 0) => State::DataEnd,
                        (_, left) => State::Data(left),
                    };
                }
                State::Size | State::DataEnd | State::Trailer => at += self.take_line(rest)?,
            }
        }
        Ok(at)
    }

    /// Takes bytes up to the end of the line, if it is there, and moves on.
    fn take_line(&mut self, rest: &[u8]) -> Result<usize, Malformed> {
        let end = rest.iter().position(|&byte| byte == b'\n');
        let used = end.map_or(rest.len(), |end| end + 1);
        self.line.extend_from_slice(&rest[..used]);
        if self.line.len() > LINE_BYTES_MAX {
            return Err(Malformed);
        }
        if end.is_none() {
            return Ok(used);
        }
        let line = self.line.strip_suffix(b"\r\n").ok_or(Malformed)?;
        self.state = match self.state {
            State::Size => match chunk_size(line)? {
                0 => State::Trailer,
                size => State::Data(size),
            },
            State::DataEnd if line.is_empty() => State::Size,
            State::Trailer if line.is_empty() => State::Done,
            State::Trailer => State::Trailer,
            _ => return Err(Malformed),
        };
        self.line.clear();
        Ok(used)
    }
}

fn chunk_size(line: &[u8]) -> Result<u64, Malformed> {
    let digits = line.split(|&byte| byte == b';').next().unwrap_or(line);
    let text = std::str::from_utf8(digits).map_err(|_| Malformed)?.trim();
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(Malformed);
    }
    u64::from_str_radix(text, 16).map_err(|_| Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode_in_pieces(framing: Framing, bytes: &[u8], piece: usize) -> Result<(Vec<u8>, bool, usize), Malformed> {
        let (mut decoder, mut out, mut used) = (Decoder::new(framing), Vec::new(), 0);
        for part in bytes.chunks(piece) {
            used += decoder.decode(part, &mut out)?;
        }
        Ok((out, decoder.is_done(), used))
    }

    #[test]
    fn chunks_decode_the_same_however_they_are_cut() {
        let body = b"5\r\nhello\r\n1;ext=1\r\n \r\n00A\r\n0123456789\r\n0\r\nx-trailer: 1\r\n\r\nNEXT";
        for piece in 1..=body.len() {
            let (out, done, used) = decode_in_pieces(Framing::Chunked, body, piece).unwrap();
            assert_eq!((out.as_slice(), done), (&b"hello 0123456789"[..], true), "pieces of {piece}");
            assert_eq!(used, body.len() - 4, "what follows the answer is not part of it (pieces of {piece})");
        }
    }

    #[test]
    fn a_length_is_kept_to() {
        assert_eq!(decode_in_pieces(Framing::Length(3), b"abcd", 2).unwrap(), (b"abc".to_vec(), true, 3));
        assert_eq!(decode_in_pieces(Framing::Length(5), b"abcd", 9).unwrap(), (b"abcd".to_vec(), false, 4));
        assert!(Decoder::new(Framing::Length(0)).is_done());
    }

    #[test]
    fn broken_chunks_are_refused() {
        for bad in [&b"x\r\n"[..], b"\r\n", b"1\nab", b"1\r\nabc\r\n", b"-1\r\n", b"+1\r\n", b"11111111111111111\r\n"] {
            assert_eq!(decode_in_pieces(Framing::Chunked, bad, 64), Err(Malformed), "{bad:?}");
        }
        let long = [b'0'; LINE_BYTES_MAX + 1];
        assert_eq!(decode_in_pieces(Framing::Chunked, &long, 64), Err(Malformed));
    }

    #[test]
    fn a_head_says_how_its_body_ends() {
        let parse = |text: &str| Head::parse(text.as_bytes()).map(|found| found.map(|(head, _)| head));
        let head =
            parse("HTTP/1.1 200 OK\r\nContent-Length: 7\r\nTransfer-Encoding: chunked\r\n\r\n").unwrap().unwrap();
        assert_eq!((head.framing, head.keep_alive, head.event_stream), (Framing::Chunked, true, false));
        let head =
            parse("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: Close\r\n\r\n");
        let head = head.unwrap().unwrap();
        assert_eq!((head.framing, head.keep_alive, head.event_stream), (Framing::UntilClose, false, true));
        assert_eq!(parse("HTTP/1.1 204 No\r\n\r\n").unwrap().unwrap().framing, Framing::Length(0));
        assert_eq!(parse("HTTP/1.1 200 OK\r\ncontent-le"), Ok(None));
        assert_eq!(parse("HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n"), Err(Malformed));
        assert_eq!(parse(&format!("HTTP/1.1 200 OK\r\na: {}", "x".repeat(HEAD_BYTES_MAX))), Err(Malformed));
    }
}
