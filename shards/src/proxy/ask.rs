//! Questions of the gateway's own to an endpoint, each on a connection of its own.

use std::net::SocketAddr;

use super::upstream::{Pool, Upstream};
pub use crate::http::Reply;
use crate::http::reply;

/// Room made for an answer at first.
const FIRST_READ_BYTES: usize = 16 * 1024;

/// A `GET`, or a `POST` of JSON. `authorization` is the value of that header; empty = none.
#[must_use]
pub fn request(address: SocketAddr, path: &str, authorization: &[u8], json: Option<&[u8]>) -> Vec<u8> {
    let method = if json.is_some() { "POST" } else { "GET" };
    let mut request =
        format!("{method} {path} HTTP/1.1\r\nHost: {address}\r\nAccept: application/json\r\n").into_bytes();
    if !authorization.is_empty() {
        request.extend_from_slice(b"Authorization: ");
        request.extend_from_slice(authorization);
        request.extend_from_slice(b"\r\n");
    }
    if let Some(json) = json {
        let head = format!("Content-Type: application/json\r\nContent-Length: {}\r\n", json.len());
        request.extend_from_slice(head.as_bytes());
    }
    request.extend_from_slice(b"Connection: close\r\n\r\n");
    request.extend_from_slice(json.unwrap_or_default());
    request
}

/// Sends a request and reads its answer; none if the endpoint cannot be reached, gives no whole answer, or one with
/// more than `bytes_max`. The connection is the question's own and ends with it: it may be dropped at any point.
pub async fn ask(pool: &Pool, request: Vec<u8>, bytes_max: usize) -> Option<Reply> {
    let mut upstream: Upstream = pool.connect().await.ok()?;
    upstream.write(request, 0).await.0.ok()?;
    let mut buffer = Vec::with_capacity(FIRST_READ_BYTES);
    let mut at_end = false;
    loop {
        if let Some(reply) = reply::complete(&buffer, at_end).ok().flatten() {
            return Some(reply);
        }
        if at_end || buffer.len() > bytes_max {
            return None;
        }
        if buffer.len() == buffer.capacity() {
            buffer.reserve(buffer.len());
        }
        let result;
        (result, buffer) = upstream.read(buffer).await;
        at_end = result.ok()? == 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complete(bytes: &[u8], at_end: bool) -> Option<Reply> {
        reply::complete(bytes, at_end).ok().flatten()
    }

    #[test]
    fn an_answer_is_complete_at_its_own_end() {
        let chunked: &[u8] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
        let sized: &[u8] = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\n{}";
        for (text, status) in [(chunked, 200), (sized, 403)] {
            for cut in 0..text.len() {
                assert!(complete(&text[..cut], false).is_none(), "{cut}");
            }
            let reply = complete(text, false).expect("complete");
            assert_eq!((reply.status, &reply.body[..]), (status, &b"{}"[..]));
        }
        let open = b"HTTP/1.1 200 OK\r\n\r\n{}";
        assert!(complete(open, false).is_none());
        assert_eq!(complete(open, true).expect("complete").body, b"{}");
    }

    #[test]
    fn a_question_says_how_long_its_body_is() {
        let address = ([127, 0, 0, 1], 8000).into();
        let text = |json| String::from_utf8(request(address, "/x", b"Bearer t", json)).expect("text");
        assert_eq!(
            text(Some(b"{}")),
            "POST /x HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nAccept: application/json\r\nAuthorization: Bearer t\r\n\
             Content-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
        );
        assert!(text(None).starts_with("GET /x ") && !text(None).contains("Content-"));
    }
}
