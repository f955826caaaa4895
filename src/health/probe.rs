//! One `GET /health`, as small as HTTP allows.

use std::net::SocketAddr;
use std::time::Duration;

use shards::proxy::is_ours;
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
    /// Never asked, for want of descriptors, memory or ports here: it says nothing of the endpoint. With the reason.
    Unasked(String),
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
        Ok(answer) => answer,
        Err(_) => Answer::None,
    }
}

async fn ask(address: SocketAddr, authorization: Option<&str>) -> Answer {
    match TcpStream::connect(address).await {
        Ok(stream) => talk(stream, address, authorization).await.map_or(Answer::None, Answer::Status),
        Err(error) => no_connection(&error),
    }
}

fn no_connection(error: &std::io::Error) -> Answer {
    if is_ours(error) { Answer::Unasked(error.to_string()) } else { Answer::None }
}

async fn talk(mut stream: TcpStream, address: SocketAddr, authorization: Option<&str>) -> Option<u16> {
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

#[cfg(test)]
mod tests {
    use std::io::Error;

    use super::*;

    #[test]
    fn a_want_of_resources_here_says_nothing_of_the_endpoint() {
        for errno in [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::ENOBUFS, libc::EADDRNOTAVAIL] {
            let error = Error::from_raw_os_error(errno);
            assert_eq!(no_connection(&error), Answer::Unasked(error.to_string()));
        }
        for errno in [libc::ECONNREFUSED, libc::ETIMEDOUT, libc::EHOSTUNREACH, libc::ENETUNREACH, libc::ECONNRESET] {
            assert_eq!(no_connection(&Error::from_raw_os_error(errno)), Answer::None);
        }
    }
}
