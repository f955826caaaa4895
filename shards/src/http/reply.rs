//! A whole answer in one buffer, for calls of our own: nothing of it goes on to a client.

use super::{BodyTracker, ChunkError, Dechunker, ResponseBody, response};
use crate::http::response::ResponseError;

/// An answer that is all there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The status code.
    pub status: u16,
    /// The body, without framing.
    pub body: Vec<u8>,
}

/// Why bytes are no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    /// The head is wrong.
    #[error(transparent)]
    Head(#[from] ResponseError),
    /// The body's chunks are.
    #[error(transparent)]
    Chunk(#[from] ChunkError),
}

/// The answer in `bytes`, once it is all there; `at_end`: nothing more will come.
///
/// # Errors
/// Where the bytes are no HTTP/1.1 answer.
pub fn complete(bytes: &[u8], at_end: bool) -> Result<Option<Reply>, ReplyError> {
    let Some(head) = response::parse(bytes, 0, false)? else { return Ok(None) };
    let come = &bytes[head.len..];
    // A long answer is looked at once, not at every read.
    if matches!(head.body, ResponseBody::Length(length) if (come.len() as u64) < length) {
        return Ok(None);
    }
    let mut body = come.to_vec();
    let done = match head.body {
        ResponseBody::UntilClose => at_end,
        ResponseBody::Chunked => {
            let mut decoder = Dechunker::new(0);
            let done = decoder.advance(&mut body)?;
            body.truncate(decoder.data_end());
            done
        }
        framing => {
            let mut tracker = BodyTracker::new(framing);
            let taken = tracker.advance(&body);
            body.truncate(taken);
            tracker.is_done()
        }
    };
    Ok(done.then_some(Reply { status: head.status, body }))
}
