//! One GET to an engine, as small as HTTP allows.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use shards::http::{BodyTracker, Dechunker, ResponseBody, response};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Largest answer, bytes. A larger one is no answer.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// What an engine answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The status code.
    pub status: u16,
    /// The body, chunk framing removed.
    pub body: Vec<u8>,
}

/// Asks once, within `timeout` in all. `authorization` is the value of that header.
///
/// # Errors
/// No connection, no answer in time, or one that is no HTTP or too large.
pub async fn get(address: SocketAddr, path: &str, authorization: Option<&str>, timeout: Duration) -> io::Result<Reply> {
    tokio::time::timeout(timeout, ask(address, path, authorization))
        .await
        .unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer in {timeout:?}"))))
}

/// The request: its connection carries nothing else.
#[must_use]
pub fn request(address: SocketAddr, path: &str, authorization: Option<&str>) -> String {
    let authorization = authorization.map(|value| format!("Authorization: {value}\r\n")).unwrap_or_default();
    format!(
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nUser-Agent: kvlane\r\nAccept: application/json\r\n{authorization}\
         Connection: close\r\n\r\n"
    )
}

async fn ask(address: SocketAddr, path: &str, authorization: Option<&str>) -> io::Result<Reply> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(request(address, path, authorization).as_bytes()).await?;
    let mut answer = Vec::with_capacity(4096);
    loop {
        let at_end = stream.read_buf(&mut answer).await? == 0;
        if let Some(reply) = complete(&answer, at_end)? {
            return Ok(reply);
        }
        if at_end {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if answer.len() > ANSWER_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "the answer has more than 1 MiB"));
        }
    }
}

/// The answer, once it is all there.
fn complete(answer: &[u8], at_end: bool) -> io::Result<Option<Reply>> {
    let Some(head) = response::parse(answer, 0, false).map_err(io::Error::other)? else { return Ok(None) };
    let mut body = answer[head.len..].to_vec();
    let done = match head.body {
        ResponseBody::UntilClose => at_end,
        ResponseBody::Chunked => {
            let mut decoder = Dechunker::new(0);
            let done = decoder.advance(&mut body).map_err(io::Error::other)?;
            body.truncate(decoder.data_end());
            done
        }
        framing => {
            let mut tracker = BodyTracker::new(framing);
            let taken = tracker.advance(&body).map_err(io::Error::other)?;
            body.truncate(taken);
            tracker.is_done()
        }
    };
    Ok(done.then_some(Reply { status: head.status, body }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_complete_at_its_own_end_and_not_before() {
        let chunked: &[u8] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
        let sized: &[u8] = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\n{}";
        for (answer, status) in [(chunked, 200), (sized, 401)] {
            for cut in 0..answer.len() {
                assert_eq!(complete(&answer[..cut], false).expect("a good beginning"), None, "{cut}");
            }
            let reply = complete(answer, false).expect("HTTP").expect("complete");
            assert_eq!((reply.status, &reply.body[..]), (status, &b"{}"[..]));
        }
        let open = b"HTTP/1.0 200 OK\r\n\r\n{}";
        assert_eq!(complete(open, false).expect("HTTP"), None);
        assert_eq!(complete(open, true).expect("HTTP").expect("complete").body, b"{}");
        complete(b"SSH-2.0-x\r\n\r\n", false).expect_err("no HTTP");
    }

    #[test]
    fn a_token_stands_in_the_header_and_nowhere_else() {
        let address = ([127, 0, 0, 1], 8000).into();
        assert!(request(address, "/version", Some("Bearer t")).contains("\r\nAuthorization: Bearer t\r\n"));
        assert!(!request(address, "/version", None).contains("Authorization"));
    }
}
