//! One `GET /health`, as small as HTTP allows.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::discovery;

/// Longest status line that is read, bytes.
const LINE_BYTES_MAX: usize = 256;

/// What became of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// An answer with this status.
    Status(u16),
    /// No connection, no answer in time, or no HTTP.
    None,
}

impl Answer {
    /// Whether the endpoint is alive: any answer below 500, since not every engine has `/health`, and 401 or 403 only
    /// say that it wants another token.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        matches!(self, Answer::Status(status) if *status < 500)
    }
}

/// Asks once, within `timeout` in all. `authorization` is the value of that header.
pub async fn probe(address: SocketAddr, authorization: Option<&str>, timeout: Duration) -> Answer {
    match tokio::time::timeout(timeout, ask(address, authorization)).await {
        Ok(Some(status)) => Answer::Status(status),
        Ok(None) | Err(_) => Answer::None,
    }
}

async fn ask(address: SocketAddr, authorization: Option<&str>) -> Option<u16> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    stream.write_all(discovery::request(address, "/health", authorization).as_bytes()).await.ok()?;
    let mut line = [0; LINE_BYTES_MAX];
    let mut filled = 0;
    while filled < line.len() && !line[..filled].contains(&b'\n') {
        match stream.read(&mut line[filled..]).await.ok()? {
            0 => break,
            read => filled += read,
        }
    }
    status_of(&line[..filled])
}

/// The status of a line such as `HTTP/1.1 200 OK`.
fn status_of(line: &[u8]) -> Option<u16> {
    let rest = line.strip_prefix(b"HTTP/1.")?;
    let digits = rest.get(1..)?.strip_prefix(b" ")?.get(..3)?;
    std::str::from_utf8(digits).ok()?.parse().ok().filter(|status| (100..600).contains(status))
}
