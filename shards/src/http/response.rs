//! Response heads.

use std::mem::MaybeUninit;

use super::Span;
use super::lines::{self, HEADERS_CEILING};
use super::request::drop_named;

/// Why an endpoint's answer cannot be relayed, a whole sentence; all of it is the endpoint's doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ResponseError(pub &'static str);

/// How the end of a response's body is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ResponseBody {
    /// There is none, whatever the headers say.
    #[default]
    None,
    /// So many bytes.
    Length(u64),
    /// Chunks.
    Chunked,
    /// The end of the connection.
    UntilClose,
}

/// A parsed response head; spans count from its first byte.
#[derive(Debug, Default)]
pub struct ResponseHead {
    /// Bytes of the head, the empty line included.
    pub len: usize,
    /// The status code, 100 to 599: others say nothing of where the answer ends, and are refused.
    pub status: u16,
    /// The endpoint spoke HTTP/1.0.
    pub is_http10: bool,
    /// Where the body ends.
    pub body: ResponseBody,
    /// The endpoint is ready for another request on the connection.
    pub keep_alive: bool,
    /// The content is a stream of server-sent events.
    pub event_stream: bool,
    /// The endpoint says the request's id itself.
    pub has_request_id: bool,
    /// Line of `Transfer-Encoding`.
    pub transfer_encoding: Option<Span>,
    /// Lines that concern the endpoint's connection only, in order: not to be relayed.
    pub dropped: Vec<Span>,
}

/// Parses the head at the front of `bytes`; none while it is incomplete. `to_head` says that the request was HEAD.
///
/// # Errors
/// What is wrong with it.
pub fn parse(bytes: &[u8], searched: usize, to_head: bool) -> Result<Option<ResponseHead>, ResponseError> {
    // An empty line in front belongs to no answer; passed on, it would stand in front of the client's.
    if matches!(bytes.first(), Some(b'\r' | b'\n')) {
        return Err(ResponseError("the endpoint's answer begins with an empty line"));
    }
    let Some(end) = lines::head_end(bytes, searched) else { return Ok(None) };
    let mut storage = [MaybeUninit::<httparse::Header<'_>>::uninit(); HEADERS_CEILING];
    let mut parsed = httparse::Response::new(&mut []);
    let config = httparse::ParserConfig::default();
    let len = match config.parse_response_with_uninit_headers(&mut parsed, &bytes[..end], &mut storage) {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) => {
            return Err(ResponseError("the endpoint's answer has an empty line inside its head"));
        }
        Err(_) => {
            return Err(ResponseError(
                "the endpoint's answer has a malformed status line or header, or too many headers",
            ));
        }
    };
    let head = &bytes[..len];
    if !head.ends_with(b"\r\n\r\n") {
        return Err(ResponseError("the endpoint's answer has a line that does not end in CR LF"));
    }
    let (Some(status), Some(version)) = (parsed.code, parsed.version) else {
        return Err(ResponseError("the endpoint's answer has an incomplete status line"));
    };
    if !(100..600).contains(&status) {
        return Err(ResponseError("the endpoint's answer has a status code outside 100 to 599"));
    }
    let mut response =
        ResponseHead { len, status, is_http10: version == 0, keep_alive: version == 1, ..ResponseHead::default() };
    let length = read_headers(head, parsed.headers, &mut response)?;
    response.body = if to_head || status < 200 || status == 204 || status == 304 {
        ResponseBody::None
    } else {
        match (length, response.transfer_encoding) {
            (Some(_), Some(_)) => {
                return Err(ResponseError("the endpoint's answer has both Content-Length and Transfer-Encoding"));
            }
            (_, Some(_)) => ResponseBody::Chunked,
            (Some(length), _) => ResponseBody::Length(length),
            (None, None) => ResponseBody::UntilClose,
        }
    };
    if response.body == ResponseBody::UntilClose {
        response.keep_alive = false;
    }
    Ok(Some(response))
}

fn read_headers(
    head: &[u8],
    headers: &[httparse::Header<'_>],
    response: &mut ResponseHead,
) -> Result<Option<u64>, ResponseError> {
    let mut length = None;
    let mut named_by_connection = false;
    for index in 0..headers.len() {
        let Some(line) = lines::line(head, headers, index, head.len()) else {
            return Err(ResponseError("the endpoint's answer has a header line that does not end in CR LF"));
        };
        let is = |name: &str| line.name.eq_ignore_ascii_case(name);
        if is("content-length") {
            let value = lines::parse_length(line.value)
                .ok_or(ResponseError("the endpoint's answer has a Content-Length that is not a plain number"))?;
            if length.is_some_and(|length| length != value) {
                return Err(ResponseError("the endpoint's answer has two different Content-Lengths"));
            }
            length = Some(value);
        } else if is("transfer-encoding") {
            if response.transfer_encoding.is_some() || !line.value.eq_ignore_ascii_case(b"chunked") {
                return Err(ResponseError("the endpoint's answer has a transfer coding other than chunked"));
            }
            response.transfer_encoding = Some(line.span);
        } else if is("connection") {
            for token in lines::tokens(line.value) {
                if token.eq_ignore_ascii_case(b"close") {
                    response.keep_alive = false;
                } else if token.eq_ignore_ascii_case(b"keep-alive") {
                    response.keep_alive = true;
                } else {
                    named_by_connection = true;
                }
            }
            response.dropped.push(line.span);
        } else if lines::is_hop_by_hop(line.name) {
            response.dropped.push(line.span);
        } else if is("content-type") {
            response.event_stream =
                line.value.get(..17).is_some_and(|kind| kind.eq_ignore_ascii_case(b"text/event-stream"));
        } else if is("x-request-id") {
            response.has_request_id = true;
        }
    }
    if named_by_connection {
        drop_named(head, headers, &mut response.dropped);
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complete(head: &str, to_head: bool) -> ResponseHead {
        parse(head.as_bytes(), 0, to_head).expect("good").expect("complete")
    }

    #[test]
    fn the_end_of_a_body_follows_status_method_and_headers() {
        for (head, to_head, body) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", false, ResponseBody::Length(5)),
            ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", true, ResponseBody::None),
            ("HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", false, ResponseBody::None),
            ("HTTP/1.1 204 No Content\r\n\r\n", false, ResponseBody::None),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n", false, ResponseBody::Chunked),
            ("HTTP/1.1 200 OK\r\n\r\n", false, ResponseBody::UntilClose),
        ] {
            assert_eq!(complete(head, to_head).body, body, "{head:?}");
        }
    }

    #[test]
    fn connections_are_kept_as_the_endpoint_says() {
        for (head, keep_alive) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", true),
            ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", false),
            ("HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", false),
            ("HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive\r\n\r\n", true),
            ("HTTP/1.1 200 OK\r\nConnection: keep-alive\r\n\r\n", false),
        ] {
            assert_eq!(complete(head, false).keep_alive, keep_alive, "{head:?}");
        }
    }

    #[test]
    fn malformed_answers_are_refused() {
        for head in [
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
            "HTTP/1.1 200 OK\nContent-Length: 5\n\n",
            "HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\n",
            "SSH-2.0-OpenSSH\r\n\r\n",
        ] {
            let error = parse(head.as_bytes(), 0, false).expect_err(head);
            assert!(error.0.starts_with("the endpoint's answer has "), "a sentence: {head:?}: {error}");
        }
    }

    #[test]
    fn answers_with_an_empty_line_in_front_are_refused() {
        for head in [
            "\nHTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n",
            "\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n",
            "\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n",
        ] {
            for end in 1..=head.len() {
                assert!(parse(&head.as_bytes()[..end], 0, false).is_err(), "{head:?} {end}");
            }
        }
    }

    #[test]
    fn status_codes_outside_100_to_599_are_refused() {
        for (status, good) in
            [("000", false), ("099", false), ("100", true), ("599", true), ("600", false), ("999", false)]
        {
            let head = format!("HTTP/1.1 {status} Weird\r\nContent-Length: 2\r\n\r\n");
            assert_eq!(parse(head.as_bytes(), 0, false).is_ok(), good, "{status}");
        }
    }

    #[test]
    fn event_streams_are_known_by_their_type() {
        let head =
            "HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert!(complete(head, false).event_stream);
        assert!(!complete("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n", false).event_stream);
    }
}
