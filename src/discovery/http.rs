//! One call to an engine, or to a gateway's management API, as small as HTTP allows.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

pub use shards::http::Reply;
use shards::http::reply::complete;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Largest answer of an engine about itself, bytes. A larger one is no answer.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Bytes read at once.
const READ_BYTES: usize = 64 * 1024;

/// A call, which has a connection of its own.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// Whom to ask.
    pub address: SocketAddr,
    /// Path and query.
    pub path: &'a str,
    /// Value of the `Authorization` header.
    pub authorization: Option<&'a str>,
    /// A JSON body makes it a POST; without one it is a GET.
    pub body: Option<&'a [u8]>,
    /// Largest answer, bytes. A larger one is an error.
    pub answer_bytes_max: usize,
    /// Longest wait for the whole answer.
    pub timeout: Duration,
}

/// Asks once, within `timeout` in all. `authorization` is the value of that header.
///
/// # Errors
/// As [`Call::ask`].
pub async fn get(address: SocketAddr, path: &str, authorization: Option<&str>, timeout: Duration) -> io::Result<Reply> {
    Call { address, path, authorization, body: None, answer_bytes_max: ANSWER_BYTES_MAX, timeout }.ask().await
}

/// A GET: its connection carries nothing else.
#[must_use]
pub fn request(address: SocketAddr, path: &str, authorization: Option<&str>) -> String {
    head(address, path, authorization, None)
}

fn head(address: SocketAddr, path: &str, authorization: Option<&str>, body: Option<&[u8]>) -> String {
    let authorization = authorization.map(|value| format!("Authorization: {value}\r\n")).unwrap_or_default();
    let (method, length) = match body {
        None => ("GET", String::new()),
        Some(body) => ("POST", format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len())),
    };
    format!(
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nUser-Agent: kvlane\r\nAccept: application/json\r\n\
         {authorization}{length}Connection: close\r\n\r\n"
    )
}

impl Call<'_> {
    /// Asks once.
    ///
    /// # Errors
    /// No connection, no answer in time, or one that is no HTTP or too large.
    pub async fn ask(self) -> io::Result<Reply> {
        let late = || io::Error::new(io::ErrorKind::TimedOut, format!("no answer in {:?}", self.timeout));
        tokio::time::timeout(self.timeout, self.exchange()).await.unwrap_or_else(|_| Err(late()))
    }

    async fn exchange(self) -> io::Result<Reply> {
        let mut stream = TcpStream::connect(self.address).await?;
        let mut request = head(self.address, self.path, self.authorization, self.body).into_bytes();
        request.extend_from_slice(self.body.unwrap_or_default());
        stream.write_all(&request).await?;
        let mut answer = Vec::with_capacity(4096);
        loop {
            if answer.len() > 4096 {
                answer.reserve(READ_BYTES);
            }
            let at_end = stream.read_buf(&mut answer).await? == 0;
            if let Some(reply) = complete(&answer, at_end).map_err(io::Error::other)? {
                return Ok(reply);
            }
            if at_end {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if answer.len() > self.answer_bytes_max {
                let text = format!("the answer has more than {} bytes", self.answer_bytes_max);
                return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
            }
        }
    }
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
        let post = head(address, "/tokenize", None, Some(b"{}"));
        assert!(
            post.starts_with("POST /tokenize HTTP/1.1\r\n") && post.contains("\r\nContent-Length: 2\r\n"),
            "{post}"
        );
    }
}
