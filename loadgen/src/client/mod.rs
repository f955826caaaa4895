//! A minimal HTTP/1.1 client: keep-alive, chunked bodies, server-sent events.
//!
//! It is written once over [`Runtime`], which has two implementors: glommio where io_uring is there, and an epoll
//! runtime where it is not. A connection is used by one request at a time and thrown away after anything but a clean
//! end, so no byte of one answer can be taken for another's.

mod answer;
mod framing;

use std::future::Future;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

pub(crate) use answer::Answer;
use answer::AnswerParser;
use framing::{Decoder, Head};

/// Age after which an idle connection is not used again: servers of this kind close theirs at 5 s, and a request
/// that races against such a close would count as an error that is nobody's fault.
const IDLE_MAX: Duration = Duration::from_secs(3);

/// Idle connections kept per thread. Beyond it the oldest is closed.
const IDLE_CONNECTIONS_MAX: usize = 4_096;

/// Bytes of one read.
const READ_BYTES: usize = 16 * 1024;

/// What the client and the load loops need of a single-threaded runtime.
pub(crate) trait Runtime: 'static {
    /// A connected socket.
    type Stream: ByteStream + 'static;

    /// Opens a connection with Nagle's algorithm off.
    fn connect(address: SocketAddr) -> impl Future<Output = io::Result<Self::Stream>>;

    /// Waits for the instant. Gives way to other tasks and to the driver at least once, also when it has passed.
    fn sleep_until(at: Instant) -> impl Future<Output = ()>;

    /// Runs a task on this thread.
    fn spawn(task: impl Future<Output = ()> + 'static);
}

/// The two operations on a connected socket.
pub(crate) trait ByteStream {
    /// Reads at least one byte, or 0 at the end.
    fn read(&mut self, into: &mut [u8]) -> impl Future<Output = io::Result<usize>>;

    /// Writes all bytes.
    fn write_all(&mut self, bytes: &[u8]) -> impl Future<Output = io::Result<()>>;
}

/// Where requests go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The resolved address.
    pub address: SocketAddr,
    /// Value of the Host header.
    pub host: String,
    /// Path before `/v1/…`; empty or beginning with a slash.
    pub prefix: String,
}

/// Why a URL cannot be a target.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// Not `http://HOST[:PORT][/PREFIX]`.
    #[error("`{0}` is not a usable URL: write http://HOST[:PORT][/PREFIX]")]
    Form(String),
    /// The host has no address.
    #[error("the host of `{url}` cannot be resolved")]
    Resolve {
        /// The URL as given.
        url: String,
        /// What the resolver said.
        #[source]
        source: io::Error,
    },
}

impl Target {
    /// Parses `http://HOST[:PORT][/PREFIX]` and resolves the host; the first address is used.
    ///
    /// # Errors
    /// Another form or scheme, and hosts without an address.
    pub fn parse(url: &str) -> Result<Self, TargetError> {
        let form = || TargetError::Form(url.to_owned());
        let rest = url.strip_prefix("http://").ok_or_else(form)?;
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        let unusable = |c: char| c.is_whitespace() || c.is_control() || c == '@';
        if host.is_empty() || url.contains(unusable) || path.contains(['?', '#']) {
            return Err(form());
        }
        let path = path.trim_end_matches('/');
        let prefix = if path.is_empty() { String::new() } else { format!("/{path}") };
        // A port stands after the last colon that is not inside the brackets of an IPv6 address.
        let has_port = host.rfind(':').is_some_and(|colon| host.rfind(']').is_none_or(|bracket| colon > bracket));
        let with_port = if has_port { host.to_owned() } else { format!("{host}:80") };
        let resolve = |source| TargetError::Resolve { url: url.to_owned(), source };
        let nothing = || resolve(io::Error::new(io::ErrorKind::NotFound, "no address"));
        let address = with_port.to_socket_addrs().map_err(resolve)?.next().ok_or_else(nothing)?;
        Ok(Target { address, host: host.to_owned(), prefix })
    }
}

/// The API a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

impl Api {
    /// The path after the target's prefix.
    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            Api::Chat => "/v1/chat/completions",
            Api::Completions => "/v1/completions",
        }
    }
}

/// Why a request did not end with a whole answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum ErrorKind {
    /// No connection.
    Connect,
    /// An answer with a 3xx status: redirects are not followed.
    Status3xx,
    /// An answer with a 4xx status.
    Status4xx,
    /// An answer with a 5xx status.
    Status5xx,
    /// The connection ended or failed before the answer was whole.
    Broken,
    /// The answer was not whole in time.
    Timeout,
    /// The answer is not what the API says: head, framing, JSON or event.
    BadBody,
    /// A well-formed stream that reports an error or ends without `[DONE]`.
    StreamError,
}

impl ErrorKind {
    /// Every kind, in the order of the counters.
    pub const ALL: [ErrorKind; 8] = [
        ErrorKind::Connect,
        ErrorKind::Status3xx,
        ErrorKind::Status4xx,
        ErrorKind::Status5xx,
        ErrorKind::Broken,
        ErrorKind::Timeout,
        ErrorKind::BadBody,
        ErrorKind::StreamError,
    ];

    /// The name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ErrorKind::Connect => "connect",
            ErrorKind::Status3xx => "status_3xx",
            ErrorKind::Status4xx => "status_4xx",
            ErrorKind::Status5xx => "status_5xx",
            ErrorKind::Broken => "broken_stream",
            ErrorKind::Timeout => "timeout",
            ErrorKind::BadBody => "bad_body",
            ErrorKind::StreamError => "stream_error",
        }
    }

    fn of_status(status: u16) -> Option<Self> {
        match status {
            200..=299 => None,
            300..=399 => Some(ErrorKind::Status3xx),
            400..=499 => Some(ErrorKind::Status4xx),
            500..=599 => Some(ErrorKind::Status5xx),
            _ => Some(ErrorKind::BadBody),
        }
    }
}

/// One thread's connections to one target.
pub(crate) struct Client<R: Runtime> {
    target: Target,
    idle: Vec<(R::Stream, Instant)>,
}

impl<R: Runtime> Client<R> {
    pub(crate) fn new(target: Target) -> Self {
        Client { target, idle: Vec::new() }
    }

    /// An idle connection young enough, the youngest first.
    pub(crate) fn take_idle(&mut self) -> Option<R::Stream> {
        let (stream, since) = self.idle.pop()?;
        if since.elapsed() <= IDLE_MAX {
            return Some(stream);
        }
        // The youngest is too old: so are all.
        self.idle.clear();
        None
    }

    /// Keeps a connection whose answer ended cleanly.
    pub(crate) fn give_back(&mut self, stream: R::Stream) {
        if self.idle.len() == IDLE_CONNECTIONS_MAX {
            self.idle.remove(0);
        }
        self.idle.push((stream, Instant::now()));
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.target.address
    }

    /// The bytes of a request.
    pub(crate) fn encode(&self, api: Api, body: &[u8]) -> Vec<u8> {
        let head = format!(
            "POST {}{} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\naccept: */*\r\ncontent-length: {}\r\n\r\n",
            self.target.prefix,
            api.path(),
            self.target.host,
            body.len()
        );
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(body);
        bytes
    }
}

/// A whole answer, and the connection if it can be used again.
pub(crate) struct Exchange<S> {
    pub(crate) answer: Answer,
    pub(crate) reusable: Option<S>,
}

/// Sends one request and reads its answer to the end. The caller bounds the time.
pub(crate) async fn exchange<S: ByteStream>(mut stream: S, request: &[u8]) -> Result<Exchange<S>, ErrorKind> {
    stream.write_all(request).await.map_err(|_| ErrorKind::Broken)?;
    let mut buffer = vec![0; READ_BYTES];
    let (head, rest) = read_head(&mut stream, &mut buffer).await?;
    if let Some(kind) = ErrorKind::of_status(head.status) {
        return Err(kind);
    }
    let mut decoder = Decoder::new(head.framing);
    let mut parser = AnswerParser::new(head.event_stream);
    let mut plain = Vec::with_capacity(READ_BYTES);
    let mut left_over = feed(&mut decoder, &mut parser, &rest, &mut plain)?;
    while !decoder.is_done() {
        let read = stream.read(&mut buffer).await.map_err(|_| ErrorKind::Broken)?;
        if read == 0 {
            if !decoder.may_end_by_close() {
                return Err(ErrorKind::Broken);
            }
            break;
        }
        left_over = feed(&mut decoder, &mut parser, &buffer[..read], &mut plain)?;
    }
    let answer = parser.finish(Instant::now())?;
    let reusable = (head.keep_alive && decoder.is_done() && left_over == 0).then_some(stream);
    Ok(Exchange { answer, reusable })
}

/// Status and body of a whole answer that the server ended by closing.
pub(crate) fn parse_whole(bytes: &[u8]) -> Option<(u16, String)> {
    let (head, length) = Head::parse(bytes).ok()??;
    let (mut decoder, mut plain) = (Decoder::new(head.framing), Vec::new());
    decoder.decode(&bytes[length..], &mut plain).ok()?;
    let whole = decoder.is_done() || decoder.may_end_by_close();
    whole.then(|| (head.status, String::from_utf8_lossy(&plain).into_owned()))
}

/// Decodes and parses one read; returns how many bytes stood after the answer's end.
fn feed(
    decoder: &mut Decoder,
    parser: &mut AnswerParser,
    bytes: &[u8],
    plain: &mut Vec<u8>,
) -> Result<usize, ErrorKind> {
    plain.clear();
    let used = decoder.decode(bytes, plain).map_err(|_| ErrorKind::BadBody)?;
    parser.feed(plain, Instant::now())?;
    Ok(bytes.len() - used)
}

/// Reads until the head is whole; returns it and what was read of the body. Interim (1xx) heads are skipped.
async fn read_head<S: ByteStream>(stream: &mut S, buffer: &mut [u8]) -> Result<(Head, Vec<u8>), ErrorKind> {
    let mut bytes = Vec::new();
    loop {
        while let Some((head, length)) = Head::parse(&bytes).map_err(|_| ErrorKind::BadBody)? {
            bytes.drain(..length);
            if head.status >= 200 {
                return Ok((head, bytes));
            }
        }
        let read = stream.read(buffer).await.map_err(|_| ErrorKind::Broken)?;
        if read == 0 {
            return Err(ErrorKind::Broken);
        }
        bytes.extend_from_slice(&buffer[..read]);
    }
}

#[cfg(test)]
mod tests;
