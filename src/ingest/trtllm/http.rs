//! One request at a time to an engine, over one connection that is kept, from a thread that may wait.
//!
//! **Limits.** A request has one deadline for connecting, sending and the whole answer; an answer has a size beyond
//! which the connection is closed. Whoever asks may be stopped at any moment and notices within [`SLICE`].

#![forbid(unsafe_code)]

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use shards::http::{Dechunker, ResponseBody, response};

use crate::rules::EngineToken;

/// Longest wait without a look at whether to stop.
const SLICE: Duration = Duration::from_millis(100);
/// Bytes of an answer's head.
const HEAD_BYTES_MAX: usize = 64 * 1024;
/// Bytes read at once.
const READ_BYTES: usize = 64 * 1024;

/// What to ask.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question {
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    pub(super) deadline: Duration,
    /// Bytes of the body.
    pub(super) bytes_max: usize,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// The question did not leave us.
    #[error("cannot connect: {0}")]
    Connect(std::io::Error),
    /// The question may have been answered, and the answer is lost.
    #[error("the answer is lost: {0}")]
    Lost(#[from] Lost),
    /// We were told to stop; the answer, if there is one, is lost.
    #[error("stopped")]
    Stopped,
}

/// How an answer got lost.
#[derive(Debug, thiserror::Error)]
pub(super) enum Lost {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("it took longer than {} s", .0.as_secs())]
    Late(Duration),
    #[error("it is longer than {0} bytes")]
    Long(usize),
    #[error("it is malformed: {0}")]
    Malformed(&'static str),
}

/// An answer.
#[derive(Debug)]
pub(super) struct Answer<'a> {
    pub(super) status: u16,
    pub(super) body: &'a [u8],
}

/// The connection to one engine.
#[derive(Debug)]
pub(super) struct Client {
    address: SocketAddr,
    /// What is shown in every request, as it is then.
    token: Option<Arc<EngineToken>>,
    stream: Option<TcpStream>,
    buffer: Vec<u8>,
}

struct Limits<'a> {
    question: Question,
    until: Instant,
    stop: &'a AtomicBool,
}

impl Client {
    /// A client that is not connected yet.
    pub(super) fn new(address: SocketAddr, token: Option<Arc<EngineToken>>) -> Self {
        Client { address, token, stream: None, buffer: Vec::new() }
    }

    /// Asks and waits for the whole answer.
    pub(super) fn ask(&mut self, question: Question, stop: &AtomicBool) -> Result<Answer<'_>, Failure> {
        let limits = Limits { question, until: Instant::now() + question.deadline, stop };
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => connect(self.address, question.deadline).map_err(Failure::Connect)?,
        };
        let token = self.token.as_ref().map(|token| format!("Authorization: {}\r\n", token.authorization()));
        let request = format!(
            "{} {} HTTP/1.1\r\nHost: {}\r\nUser-Agent: kvlane\r\nAccept: application/json\r\n{}Content-Length: 0\r\n\r\n",
            question.method,
            question.path,
            self.address,
            token.unwrap_or_default()
        );
        stream.write_all(request.as_bytes()).map_err(Lost::Io)?;
        self.buffer.clear();
        self.buffer.shrink_to(1 << 20);
        let (status, body, keep) = read(&mut stream, &mut self.buffer, &limits)?;
        self.stream = keep.then_some(stream);
        Ok(Answer { status, body: &self.buffer[body] })
    }
}

fn connect(address: SocketAddr, deadline: Duration) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, deadline.min(Duration::from_secs(5)))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SLICE))?;
    stream.set_write_timeout(Some(Duration::from_secs(5)))?;
    Ok(stream)
}

/// Reads one answer: its status, where its body is, and whether the connection can be used again.
fn read(
    stream: &mut TcpStream,
    buffer: &mut Vec<u8>,
    limits: &Limits<'_>,
) -> Result<(u16, std::ops::Range<usize>, bool), Failure> {
    let head = loop {
        let searched = buffer.len().saturating_sub(3);
        if more(stream, buffer, limits)? == 0 {
            return Err(Lost::Io(ErrorKind::UnexpectedEof.into()).into());
        }
        match response::parse(buffer, searched, false).map_err(|error| Lost::Malformed(error.0))? {
            Some(head) => break head,
            None if buffer.len() > HEAD_BYTES_MAX => return Err(Lost::Malformed("the head is too long").into()),
            None => {}
        }
    };
    let start = head.len;
    let bytes_max = limits.question.bytes_max;
    let mut chunks = matches!(head.body, ResponseBody::Chunked).then(|| Dechunker::new(start));
    let end = loop {
        let held = match &mut chunks {
            Some(chunks) => {
                if chunks.advance(buffer).map_err(|error| Lost::Malformed(error.0))? {
                    break chunks.data_end();
                }
                chunks.data_end() - start
            }
            None => buffer.len() - start,
        };
        match head.body {
            ResponseBody::None => break start,
            ResponseBody::Length(length) if length > bytes_max as u64 => return Err(Lost::Long(bytes_max).into()),
            ResponseBody::Length(length) if held as u64 >= length => break start + length as usize,
            _ if held > bytes_max => return Err(Lost::Long(bytes_max).into()),
            _ => {}
        }
        if more(stream, buffer, limits)? == 0 {
            match head.body {
                ResponseBody::UntilClose => break buffer.len(),
                _ => return Err(Lost::Io(ErrorKind::UnexpectedEof.into()).into()),
            }
        }
    };
    Ok((head.status, start..end, head.keep_alive && !matches!(head.body, ResponseBody::UntilClose)))
}

/// Reads what comes next; 0 at the end of the connection.
fn more(stream: &mut TcpStream, buffer: &mut Vec<u8>, limits: &Limits<'_>) -> Result<usize, Failure> {
    let filled = buffer.len();
    buffer.resize(filled + READ_BYTES, 0);
    let read = loop {
        if limits.stop.load(Ordering::Relaxed) {
            break Err(Failure::Stopped);
        }
        if Instant::now() >= limits.until {
            break Err(Lost::Late(limits.question.deadline).into());
        }
        match stream.read(&mut buffer[filled..]) {
            Ok(read) => break Ok(read),
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {}
            Err(error) => break Err(Lost::Io(error).into()),
        }
    };
    buffer.truncate(filled + read.as_ref().copied().unwrap_or(0));
    read
}
