//! Framing of chunked bodies: tells data from framing and finds the end, and changes nothing.
//!
//! ```text
//!  Size ─digits─▶ Size ─";"─▶ Extension ─CR─▶ SizeLf ─LF─▶ Data ─size bytes─▶ DataCr ─▶ DataLf ─▶ Size
//!                                                  ╲ size 0 ─▶ TrailerStart ─CR─▶ EndLf ─LF─▶ Done
//!                                                                 ╲ Trailer ─CR─▶ TrailerLf ─▶ TrailerStart
//! ```

/// What is wrong with a chunked body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the chunked body is malformed: {0}")]
pub struct ChunkError(pub &'static str);

/// Bytes of one chunk's size line, extensions included.
const SIZE_LINE_MAX: u32 = 4 * 1024;
/// Bytes of the trailer section.
const TRAILERS_MAX: u32 = 16 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Size,
    Extension,
    SizeLf,
    Data,
    DataCr,
    DataLf,
    TrailerStart,
    Trailer,
    TrailerLf,
    EndLf,
    Done,
}

/// Where a chunked body stands.
#[derive(Clone, Debug)]
pub struct ChunkScanner {
    state: State,
    /// Size being read, then data bytes left.
    size: u64,
    digits: u32,
    /// Bytes of the size line or the trailers so far.
    line: u32,
}

/// What one step went over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Bytes gone over.
    pub consumed: usize,
    /// How many of them, at their end, are data.
    pub data: usize,
}

impl Default for ChunkScanner {
    fn default() -> Self {
        ChunkScanner { state: State::Size, size: 0, digits: 0, line: 0 }
    }
}

impl ChunkScanner {
    /// Whether the body's last byte was gone over.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Whether a new chunk could begin here.
    #[must_use]
    pub fn at_boundary(&self) -> bool {
        self.state == State::Size && self.digits == 0
    }

    /// Bytes of data that the chunk begun still announces.
    #[must_use]
    pub fn announced(&self) -> u64 {
        if self.state == State::Data { self.size } else { 0 }
    }

    /// Goes over framing up to data, or over data up to framing, as far as the input goes and is good.
    ///
    /// # Errors
    /// The input's first byte is not what RFC 9112 allows, or exceeds its limits; the scanner stands before it.
    pub fn step(&mut self, input: &[u8]) -> Result<Piece, ChunkError> {
        let mut at = 0;
        while at < input.len() {
            match self.state {
                State::Data => {
                    let data = usize::try_from(self.size).unwrap_or(usize::MAX).min(input.len() - at);
                    self.size -= data as u64;
                    if self.size == 0 {
                        self.state = State::DataCr;
                    }
                    return Ok(Piece { consumed: at + data, data });
                }
                State::Done => break,
                _ => match self.framing(input[at]) {
                    Ok(()) => {}
                    // What is good before the fault is told first; the next step begins with the fault.
                    Err(_) if at > 0 => break,
                    Err(error) => return Err(error),
                },
            }
            at += 1;
        }
        Ok(Piece { consumed: at, data: 0 })
    }

    /// Goes over as much of the input as belongs to the body and is good, and says how much that is. Less than the
    /// input of a body that is not done is what comes before a fault.
    pub fn advance(&mut self, input: &[u8]) -> usize {
        let mut at = 0;
        while at < input.len() && !self.is_done() {
            match self.step(&input[at..]) {
                Ok(piece) => at += piece.consumed,
                Err(_) => break,
            }
        }
        at
    }

    fn framing(&mut self, byte: u8) -> Result<(), ChunkError> {
        self.state = match (self.state, byte) {
            (State::Size, _) if byte.is_ascii_hexdigit() => {
                if self.digits == 16 {
                    return Err(ChunkError("a chunk size of more than 16 digits"));
                }
                let digit = (byte as char).to_digit(16).unwrap_or(0);
                self.size = self.size << 4 | u64::from(digit);
                self.digits += 1;
                State::Size
            }
            (State::Size, _) if self.digits == 0 => return Err(ChunkError("a chunk without a size")),
            (State::Size | State::Extension, b'\r') => State::SizeLf,
            (State::Size, b';' | b' ' | b'\t') => self.in_line(SIZE_LINE_MAX, State::Extension)?,
            (State::Extension, b'\t' | b' '..=b'~' | 0x80..) => self.in_line(SIZE_LINE_MAX, State::Extension)?,
            (State::SizeLf, b'\n') => {
                self.line = 0;
                self.digits = 0;
                if self.size == 0 { State::TrailerStart } else { State::Data }
            }
            (State::DataCr, b'\r') => State::DataLf,
            (State::DataLf, b'\n') => State::Size,
            (State::TrailerStart, b'\r') => State::EndLf,
            (State::Trailer, b'\r') => State::TrailerLf,
            (State::TrailerStart, b'!'..=b'~') | (State::Trailer, b'\t' | b' '..=b'~' | 0x80..) => {
                self.in_line(TRAILERS_MAX, State::Trailer)?
            }
            (State::TrailerLf, b'\n') => State::TrailerStart,
            (State::EndLf, b'\n') => State::Done,
            _ => return Err(ChunkError("a byte that does not belong in the framing")),
        };
        Ok(())
    }

    fn in_line(&mut self, max: u32, next: State) -> Result<State, ChunkError> {
        self.line += 1;
        if self.line > max { Err(ChunkError("a size line or trailer section that is too long")) } else { Ok(next) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Data and length of a body, read with a cut at every given place.
    fn decode(body: &[u8], cuts: &[usize]) -> Result<(Vec<u8>, usize, bool), ChunkError> {
        let mut scanner = ChunkScanner::default();
        let mut data = Vec::new();
        let mut from = 0;
        let mut consumed = 0;
        for to in cuts.iter().copied().chain([body.len()]) {
            let mut part = &body[from..to.max(from)];
            from = to.max(from);
            while !part.is_empty() && !scanner.is_done() {
                let piece = scanner.step(part)?;
                data.extend_from_slice(&part[piece.consumed - piece.data..piece.consumed]);
                part = &part[piece.consumed..];
                consumed += piece.consumed;
            }
        }
        Ok((data, consumed, scanner.is_done()))
    }

    #[test]
    fn data_and_end_are_found_wherever_the_input_is_split() {
        let body = b"4;a=\"b\"\r\nWiki\r\n5 \r\npedia\r\n00\r\nX-T: 1\r\n\r\nNEXT";
        let whole = decode(body, &[]).expect("good");
        assert_eq!(whole, (b"Wikipedia".to_vec(), body.len() - 4, true));
        for first in 0..body.len() {
            for second in first..body.len() {
                assert_eq!(decode(body, &[first, second]).expect("good"), whole, "{first} {second}");
            }
        }
    }

    #[test]
    fn bad_framing_is_refused_wherever_it_is_split() {
        for body in [
            &b"\r\n"[..],
            b"-4\r\nabcd\r\n",
            b"0x4\r\nabcd\r\n",
            b"4\nabcd\r\n",
            b"4\rabcd\r\n",
            b"4\r\nabcde\r\n",
            b"4\r\nabcd\n",
            b"00000000000000004\r\nabcd\r\n",
            b"4;\0\r\nabcd\r\n",
            b"0\r\n folded\r\n\r\n",
            b"0\r\nA: b\n\r\n",
        ] {
            assert!(decode(body, &[]).is_err(), "{body:?}");
            for cut in 0..body.len() {
                assert!(decode(body, &[cut]).is_err(), "{body:?} {cut}");
            }
        }
        let mut long = b"4;".to_vec();
        long.resize(5000, b'x');
        assert!(decode(&long, &[]).is_err());
    }

    #[test]
    fn any_bytes_give_the_same_answer_however_they_are_split() {
        use proptest::prelude::*;
        let byte = prop_oneof![Just(b'\r'), Just(b'\n'), Just(b'0'), Just(b'2'), Just(b';'), Just(b'a'), any::<u8>()];
        proptest!(|(body in proptest::collection::vec(byte, 0..60), cut in 0_usize..60)| {
            let cut = cut.min(body.len());
            prop_assert_eq!(decode(&body, &[]), decode(&body, &[cut]));
        });
    }
}
