//! HTTP/1.1 heads and bodies, both ways, without I/O: bytes in, framing out.
//!
//! **Invariant.** Nothing is parsed twice in two ways: where a body ends is decided here alone, and a message whose end
//! two parties could see differently (two lengths, length and chunks, folded lines, bare CR or LF) is refused. Kept
//! header lines and body bytes are never changed; heads are edited in place, by leaving lines out.

#![forbid(unsafe_code)]

pub mod body;
pub mod chunked;
pub mod edit;
pub mod reply;
pub mod request;
pub mod response;

mod lines;

pub use body::{BodyTracker, Dechunker};
pub use chunked::{ChunkError, ChunkScanner};
pub use lines::{HEADERS_CEILING, header};
pub use reply::Reply;
pub use request::{HeadError, RequestBody, RequestHead};
pub use response::{ResponseBody, ResponseHead};

/// A part of a head, as offsets from the head's first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Span {
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
}

impl Span {
    /// The bytes of the span.
    ///
    /// # Panics
    /// When the span is of another head than `head`.
    #[must_use]
    pub fn of(self, head: &[u8]) -> &[u8] {
        &head[self.start..self.end]
    }
}
