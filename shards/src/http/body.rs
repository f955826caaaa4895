//! Where bodies end: of responses that pass by, and of chunked requests that are decoded in place.

use super::chunked::{ChunkError, ChunkScanner};
use super::response::ResponseBody;

/// Follows a response's body to its end.
#[derive(Debug)]
pub enum BodyTracker {
    /// So many bytes are still to come.
    Length(u64),
    /// Chunks.
    Chunked(ChunkScanner),
    /// Everything up to the end of the connection.
    UntilClose,
}

impl BodyTracker {
    /// At the start of a body.
    #[must_use]
    pub fn new(body: ResponseBody) -> Self {
        match body {
            ResponseBody::None => BodyTracker::Length(0),
            ResponseBody::Length(length) => BodyTracker::Length(length),
            ResponseBody::Chunked => BodyTracker::Chunked(ChunkScanner::default()),
            ResponseBody::UntilClose => BodyTracker::UntilClose,
        }
    }

    /// Goes over the input and says how much of it belongs to the body. Less than the input of a body that is not done
    /// is what comes before a fault of its chunks.
    pub fn advance(&mut self, input: &[u8]) -> usize {
        match self {
            BodyTracker::Length(left) => {
                let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len());
                *left -= taken as u64;
                taken
            }
            BodyTracker::Chunked(scanner) => scanner.advance(input),
            BodyTracker::UntilClose => input.len(),
        }
    }

    /// Whether the body's last byte was gone over; never true of one that ends with the connection.
    #[must_use]
    pub fn is_done(&self) -> bool {
        match self {
            BodyTracker::Length(left) => *left == 0,
            BodyTracker::Chunked(scanner) => scanner.is_done(),
            BodyTracker::UntilClose => false,
        }
    }
}

/// Decodes a chunked body in place, as it arrives: the data moves to the front, over the framing.
#[derive(Debug)]
pub struct Dechunker {
    scanner: ChunkScanner,
    /// Next byte to look at.
    read_at: usize,
    /// End of the decoded data.
    write_at: usize,
}

impl Dechunker {
    /// Begins at the first byte of the body, `start` bytes into the buffer.
    #[must_use]
    pub fn new(start: usize) -> Self {
        Dechunker { scanner: ChunkScanner::default(), read_at: start, write_at: start }
    }

    /// Goes on with another buffer, whose first byte of the body is at `start`.
    pub fn rebase(&mut self, start: usize) {
        self.read_at = start;
        self.write_at = start;
    }

    /// Decodes what has arrived; true once the body is complete.
    ///
    /// # Errors
    /// The chunks are malformed; what came before the fault is decoded.
    pub fn advance(&mut self, buffer: &mut Vec<u8>) -> Result<bool, ChunkError> {
        while self.read_at < buffer.len() && !self.scanner.is_done() {
            let piece = self.scanner.step(&buffer[self.read_at..])?;
            let end = self.read_at + piece.consumed;
            buffer.copy_within(end - piece.data..end, self.write_at);
            self.write_at += piece.data;
            self.read_at = end;
        }
        if !self.scanner.is_done() && self.read_at == buffer.len() {
            // All that is left is data: what arrives next can follow it directly.
            buffer.truncate(self.write_at);
            self.read_at = self.write_at;
        }
        Ok(self.scanner.is_done())
    }

    /// Bytes of data that the chunk begun still announces.
    #[must_use]
    pub fn announced(&self) -> u64 {
        self.scanner.announced()
    }

    /// End of the decoded data in the buffer.
    #[must_use]
    pub fn data_end(&self) -> usize {
        self.write_at
    }

    /// First byte after the body, once it is complete.
    #[must_use]
    pub fn body_end(&self) -> usize {
        self.read_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunked_body_is_decoded_in_place_however_it_arrives() {
        let encoded = b"3\r\nabc\r\n1\r\nd\r\n0\r\n\r\nGET /next";
        for step in 1..encoded.len() {
            let mut buffer = b"HEAD".to_vec();
            let mut decoder = Dechunker::new(4);
            let mut parts = encoded.chunks(step);
            while !decoder.advance(&mut buffer).expect("good") {
                buffer.extend_from_slice(parts.next().expect("the body ends"));
            }
            for rest in parts {
                buffer.extend_from_slice(rest);
            }
            assert_eq!(&buffer[..decoder.data_end()], b"HEADabcd", "{step}");
            assert_eq!(&buffer[decoder.body_end()..], b"GET /next", "{step}");
        }
    }

    #[test]
    fn a_tracker_takes_what_belongs_to_the_body_and_no_more() {
        for (body, input, taken, done) in [
            (ResponseBody::None, &b"next"[..], 0, true),
            (ResponseBody::Length(3), b"abcd", 3, true),
            (ResponseBody::Length(9), b"abcd", 4, false),
            (ResponseBody::Chunked, b"1\r\na\r\n0\r\n\r\nnext", 11, true),
            (ResponseBody::Chunked, b"1\r\na\r\n0\r\n", 9, false),
            (ResponseBody::Chunked, b"1\r\na\r\nZZ\r\n", 6, false),
            (ResponseBody::UntilClose, b"abcd", 4, false),
        ] {
            let mut tracker = BodyTracker::new(body);
            assert_eq!(tracker.advance(input), taken, "{body:?}");
            assert_eq!(tracker.is_done(), done, "{body:?}");
        }
    }
}
