//! Request heads.

use std::mem::MaybeUninit;

use super::Span;
use super::lines::{self, HEADERS_CEILING};

/// Why a request's head is refused; all of it is the client's doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeadError {
    /// 400.
    #[error("the request's head is malformed: {0}")]
    Malformed(&'static str),
    /// 431: head or number of headers beyond the limits.
    #[error("the request's head is larger than this gateway takes")]
    TooLarge,
    /// 501: a method or coding that this gateway does not do.
    #[error("not supported: {0}")]
    Unsupported(&'static str),
    /// 505: not HTTP/1.0 or 1.1.
    #[error("only HTTP/1.0 and HTTP/1.1 are spoken here")]
    Version,
}

/// How the end of a request's body is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum RequestBody {
    /// There is none.
    #[default]
    None,
    /// So many bytes.
    Length(u64),
    /// Chunks.
    Chunked,
}

/// A parsed request head; spans count from the first byte that was parsed.
#[derive(Debug, Default)]
pub struct RequestHead {
    /// Bytes of the head, the empty line included.
    pub len: usize,
    /// The method.
    pub method: Span,
    /// The request target.
    pub target: Span,
    /// The target's path: no scheme, authority or query.
    pub path: Span,
    /// The client speaks HTTP/1.0.
    pub is_http10: bool,
    /// Where the body ends.
    pub body: RequestBody,
    /// The client is ready for another request on the connection.
    pub keep_alive: bool,
    /// The client waits for `100 Continue` before it sends the body.
    pub expects_continue: bool,
    /// The method is HEAD: the answer has no body.
    pub is_head: bool,
    /// The client asks for a web socket. Offers of other protocols are passed over: the request stands without them.
    pub upgrade: bool,
    /// The host that is asked for: the authority of an absolute target, else the value of `Host`.
    pub host: Option<Span>,
    /// Value of `X-Model`.
    pub model: Option<Span>,
    /// Value of `Authorization`.
    pub authorization: Option<Span>,
    /// Value of `X-Request-Id`.
    pub request_id: Option<Span>,
    /// Value of `X-Conversation-Id`.
    pub conversation: Option<Span>,
    /// Value of `X-Session-Id`.
    pub session: Option<Span>,
    /// Value of `X-data-parallel-rank`, by which a client chooses a rank itself.
    pub rank: Option<Span>,
    /// The client wants to know why its request goes where it goes: `x-kvlane-explain: 1`.
    pub explain: bool,
    /// Line of `Transfer-Encoding`, one of `dropped`.
    pub transfer_encoding: Option<Span>,
    /// Lines that concern this connection only, in order: not to be forwarded.
    pub dropped: Vec<Span>,
}

/// The bounds of a head.
#[derive(Clone, Copy, Debug)]
pub struct HeadLimits {
    /// Bytes, the empty line included.
    pub bytes_max: usize,
    /// Headers.
    pub headers_max: usize,
}

/// Parses the head at the front of `bytes`; none while it is incomplete. `searched` are bytes already seen without an
/// empty line in them.
///
/// # Errors
/// Why the request must be refused and the connection closed.
pub fn parse(bytes: &[u8], searched: usize, limits: HeadLimits) -> Result<Option<RequestHead>, HeadError> {
    let Some(end) = lines::head_end(bytes, searched) else {
        return if bytes.len() > limits.bytes_max { Err(HeadError::TooLarge) } else { Ok(None) };
    };
    // Empty lines before a request belong to it; the search may have found them instead of the head's end.
    let end = if bytes[..end].iter().all(|byte| matches!(byte, b'\r' | b'\n')) {
        let skipped = bytes.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
        match lines::head_end(bytes, skipped + 3) {
            Some(end) => end,
            None if bytes.len() > limits.bytes_max => return Err(HeadError::TooLarge),
            None => return Ok(None),
        }
    } else {
        end
    };
    if end > limits.bytes_max {
        return Err(HeadError::TooLarge);
    }
    let mut storage = [MaybeUninit::<httparse::Header<'_>>::uninit(); HEADERS_CEILING];
    let mut parsed = httparse::Request::new(&mut []);
    let room = &mut storage[..limits.headers_max.min(HEADERS_CEILING)];
    let len = match parsed.parse_with_uninit_headers(&bytes[..end], room) {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) => return Err(HeadError::Malformed("an empty line inside the head")),
        Err(error) => return Err(refusal(error)),
    };
    read(&bytes[..len], &parsed).map(Some)
}

fn refusal(error: httparse::Error) -> HeadError {
    match error {
        httparse::Error::TooManyHeaders => HeadError::TooLarge,
        httparse::Error::Version => HeadError::Version,
        httparse::Error::HeaderName => HeadError::Malformed("header name"),
        httparse::Error::HeaderValue => HeadError::Malformed("header value"),
        httparse::Error::NewLine => HeadError::Malformed("line end"),
        httparse::Error::Status | httparse::Error::Token => HeadError::Malformed("request line"),
    }
}

fn read(head: &[u8], parsed: &httparse::Request<'_, '_>) -> Result<RequestHead, HeadError> {
    let (Some(method), Some(target), Some(version)) = (parsed.method, parsed.path, parsed.version) else {
        return Err(HeadError::Malformed("request line"));
    };
    let span = |text: &str| {
        let start = lines::offset(head, text.as_ptr());
        Span { start, end: start + text.len() }
    };
    let mut request = RequestHead {
        len: head.len(),
        method: span(method),
        target: span(target),
        path: path_of(span(target), target),
        is_http10: version == 0,
        is_head: method == "HEAD",
        keep_alive: version == 1,
        ..RequestHead::default()
    };
    if request.method.start > 0 {
        // Empty lines before the request, which some clients send after a body.
        request.dropped.push(Span { start: 0, end: request.method.start });
    }
    if !head.ends_with(b"\r\n\r\n") {
        return Err(HeadError::Malformed("a line that does not end in CR LF"));
    }
    let line_end = parsed.headers.first().map_or(head.len() - 2, |first| lines::offset(head, first.name.as_ptr()));
    if !head[..line_end].ends_with(b"\r\n") || head[request.method.start..line_end - 2].contains(&b'\n') {
        return Err(HeadError::Malformed("a request line that does not end in CR LF"));
    }
    read_headers(head, parsed.headers, &mut request)?;
    if request.path.start > request.target.start {
        // "http://authority/path": the authority overrides `Host` (RFC 9112, 3.2.2).
        let scheme = target.find("://").map_or(0, |colon| colon + 3);
        let authority = Span { start: request.target.start + scheme, end: request.path.start };
        if authority.start == authority.end || !authority.of(head).iter().all(|byte| is_of_host(*byte)) {
            return Err(HeadError::Malformed("the target's authority is empty or has characters that no host has"));
        }
        request.host = Some(authority);
    }
    if method == "CONNECT" {
        return Err(HeadError::Unsupported("CONNECT: this gateway tunnels nothing"));
    }
    Ok(request)
}

fn read_headers(head: &[u8], headers: &[httparse::Header<'_>], request: &mut RequestHead) -> Result<(), HeadError> {
    let mut length = None;
    let mut named_by_connection = false;
    for index in 0..headers.len() {
        let Some(line) = lines::line(head, headers, index, head.len()) else {
            return Err(HeadError::Malformed("a header line that does not end in CR LF"));
        };
        let is = |name: &str| line.name.eq_ignore_ascii_case(name);
        if is("content-length") {
            if length.is_some() {
                return Err(HeadError::Malformed("more than one Content-Length"));
            }
            length = Some(lines::parse_length(line.value).ok_or(HeadError::Malformed("Content-Length"))?);
        } else if is("transfer-encoding") {
            if request.transfer_encoding.is_some() {
                return Err(HeadError::Malformed("more than one Transfer-Encoding"));
            }
            if !line.value.eq_ignore_ascii_case(b"chunked") {
                return Err(HeadError::Unsupported("transfer codings other than chunked"));
            }
            request.transfer_encoding = Some(line.span);
            request.dropped.push(line.span);
        } else if is("host") {
            if request.host.is_some() {
                return Err(HeadError::Malformed("more than one Host"));
            }
            if !line.value.iter().all(|byte| is_of_host(*byte)) {
                return Err(HeadError::Malformed("Host has characters that no host has"));
            }
            request.host = Some(line.value_span);
        } else if is("expect") {
            if !line.value.eq_ignore_ascii_case(b"100-continue") {
                return Err(HeadError::Unsupported("expectations other than 100-continue"));
            }
            // Met here: the body is read whole before anything is forwarded.
            request.expects_continue = !request.is_http10;
            request.dropped.push(line.span);
        } else if is("connection") {
            for token in lines::tokens(line.value) {
                if token.eq_ignore_ascii_case(b"close") {
                    request.keep_alive = false;
                } else if !token.eq_ignore_ascii_case(b"keep-alive") {
                    named_by_connection = true;
                }
            }
            request.dropped.push(line.span);
        } else if is("upgrade") {
            request.upgrade = lines::tokens(line.value).any(|token| token.eq_ignore_ascii_case(b"websocket"));
            request.dropped.push(line.span);
        } else if lines::is_hop_by_hop(line.name) || is("trailer") {
            // The trailer section itself is not forwarded: the engine gets the decoded body with its length.
            request.dropped.push(line.span);
        } else if is("x-model") {
            request.model = request.model.or(Some(line.value_span));
        } else if is("authorization") {
            request.authorization = Some(line.value_span);
        } else if is("x-request-id") {
            request.request_id = request.request_id.or(Some(line.value_span));
        } else if is("x-conversation-id") {
            request.conversation = request.conversation.or(Some(line.value_span));
        } else if is("x-session-id") {
            request.session = request.session.or(Some(line.value_span));
        } else if is("x-data-parallel-rank") {
            request.rank = request.rank.or(Some(line.value_span));
        } else if is("x-kvlane-explain") {
            request.explain = line.value == b"1" || line.value.eq_ignore_ascii_case(b"true");
        }
    }
    if named_by_connection {
        drop_named(head, headers, &mut request.dropped);
    }
    request.body = match (length, request.transfer_encoding) {
        (Some(_), Some(_)) => return Err(HeadError::Malformed("both Content-Length and Transfer-Encoding")),
        (None, Some(_)) if request.is_http10 => return Err(HeadError::Malformed("Transfer-Encoding in HTTP/1.0")),
        (None, Some(_)) => RequestBody::Chunked,
        (Some(0) | None, None) => RequestBody::None,
        (Some(length), None) => RequestBody::Length(length),
    };
    if request.host.is_none() && !request.is_http10 {
        return Err(HeadError::Malformed("no Host"));
    }
    Ok(())
}

/// Whether a host or its port may contain the byte (RFC 3986, 3.2.2).
fn is_of_host(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~%!$&'()*+,;=:[]".contains(&byte)
}

/// Adds the lines that a `Connection` header names, keeping the order.
pub(super) fn drop_named(head: &[u8], headers: &[httparse::Header<'_>], dropped: &mut Vec<Span>) {
    for index in 0..headers.len() {
        let Some(line) = lines::line(head, headers, index, head.len()) else { continue };
        let named = headers
            .iter()
            .filter(|header| header.name.eq_ignore_ascii_case("connection"))
            .flat_map(|header| lines::tokens(header.value))
            .any(|token| token.eq_ignore_ascii_case(line.name.as_bytes()));
        if named && !lines::is_protected(line.name) && !dropped.contains(&line.span) {
            dropped.push(line.span);
        }
    }
    dropped.sort_unstable_by_key(|span| span.start);
}

fn path_of(span: Span, target: &str) -> Span {
    let mut start = 0;
    if !target.starts_with('/')
        && let Some(scheme) = target.find("://")
    {
        let authority = scheme + 3;
        start = target[authority..].find(['/', '?']).map_or(target.len(), |slash| authority + slash);
    }
    let end = target[start..].find('?').map_or(target.len(), |query| start + query);
    Span { start: span.start + start, end: span.start + end }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: HeadLimits = HeadLimits { bytes_max: 1024, headers_max: 8 };

    fn check(head: &str) -> Result<Option<RequestHead>, HeadError> {
        parse(head.as_bytes(), 0, LIMITS)
    }

    fn complete(head: &str) -> RequestHead {
        check(head).expect("the head is good").expect("the head is complete")
    }

    fn text(span: Span, head: &str) -> &str {
        std::str::from_utf8(span.of(head.as_bytes())).expect("text")
    }

    #[test]
    fn a_plain_head_is_read() {
        let head = "POST /v1/chat/completions?x=1 HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\nX-Model: m\r\n\r\nbody";
        let request = complete(head);
        assert_eq!(request.len, head.len() - 4);
        assert_eq!(text(request.method, head), "POST");
        assert_eq!(text(request.path, head), "/v1/chat/completions");
        assert_eq!(text(request.model.expect("a model"), head), "m");
        assert_eq!(request.body, RequestBody::Length(12));
        assert!(request.keep_alive && !request.is_http10 && request.dropped.is_empty());
    }

    #[test]
    fn hop_by_hop_lines_are_named_and_nothing_else() {
        let head = "GET / HTTP/1.1\r\nHost: a\r\nConnection: close, x-secret, host\r\nX-Secret: 1\r\nAccept: */*\r\nTE: trailers\r\n\r\n";
        let request = complete(head);
        let dropped: Vec<&str> = request.dropped.iter().map(|span| text(*span, head)).collect();
        assert_eq!(dropped, ["Connection: close, x-secret, host\r\n", "X-Secret: 1\r\n", "TE: trailers\r\n"]);
        assert!(!request.keep_alive);
    }

    #[test]
    fn smuggling_shapes_are_refused() {
        for (head, why) in [
            ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "both"),
            ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n", "two lengths"),
            ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1, 1\r\n\r\n", "list of lengths"),
            ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\n", "sign"),
            ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", "two"),
            ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "coding"),
            ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n", "unknown coding"),
            ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n", "space before the colon"),
            ("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", "chunks in 1.0"),
            ("GET / HTTP/1.1\r\nHost: a\r\nA: b\r\n folded\r\n\r\n", "folded line"),
            ("GET / HTTP/1.1\r\nHost: a\r\nA: b\rC: d\r\n\r\n", "bare CR"),
            ("GET / HTTP/1.1\nHost: a\n\n", "bare LF"),
            ("GET / HTTP/1.1\r\nHost: a\nA: b\r\n\r\n", "one bare LF"),
            ("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "two hosts"),
            ("GET / HTTP/1.1\r\n\r\n", "no host"),
            ("GET  / HTTP/1.1\r\nHost: a\r\n\r\n", "two spaces"),
            ("GET / HTTP/1.1\r\nHost: a\r\nA\0: b\r\n\r\n", "NUL"),
            ("CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", "tunnel"),
            ("GET / HTTP/2.0\r\nHost: a\r\n\r\n", "version"),
        ] {
            assert!(check(head).is_err(), "{why}: {head:?}");
        }
    }

    #[test]
    fn a_host_with_characters_that_no_host_has_is_refused() {
        for host in ["a b@/", "a/", "u@a", "a?b", "a#b", "\u{e4}", "a\tb", "<a>"] {
            assert!(check(&format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n")).is_err(), "{host:?}");
        }
        for host in ["", "a_b.example:80", "[::1]:80", "10.0.0.1", "xn--a-0fa"] {
            complete(&format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        }
        for target in ["http:///x", "http://u@a/x", "http://?x"] {
            assert!(check(&format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n")).is_err(), "{target}");
        }
    }

    #[test]
    fn the_authority_of_an_absolute_target_overrides_host() {
        for target in ["http://b:80/x", "http://b:80", "http://b:80?x"] {
            let head = format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n");
            assert_eq!(text(complete(&head).host.expect("a host"), &head), "b:80");
        }
        let head = "GET /http://b/ HTTP/1.1\r\nHost: a\r\n\r\n";
        assert_eq!(text(complete(head).host.expect("a host"), head), "a");
    }

    #[test]
    fn limits_are_kept() {
        let long = format!("GET / HTTP/1.1\r\nHost: a\r\nA: {}\r\n\r\n", "b".repeat(1024));
        assert_eq!(check(&long).expect_err("too large"), HeadError::TooLarge);
        assert_eq!(check(&long[..1030]).expect_err("too large before its end"), HeadError::TooLarge);
        let many = format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "A: b\r\n".repeat(8));
        assert_eq!(check(&many).expect_err("too many"), HeadError::TooLarge);
    }

    #[test]
    fn a_head_split_anywhere_is_incomplete_until_its_last_byte() {
        let head = "\r\nPOST http://h/v1/x?q HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n";
        for end in 0..head.len() {
            for searched in [0, end / 2, end] {
                assert!(matches!(parse(&head.as_bytes()[..end], searched, LIMITS), Ok(None)), "{end}");
            }
        }
        let request = complete(head);
        assert_eq!(text(request.path, head), "/v1/x");
        assert!(request.expects_continue);
        assert_eq!(request.len, head.len());
        assert_eq!(request.dropped[0], Span { start: 0, end: 2 });
    }

    #[test]
    fn any_bytes_give_an_answer() {
        use proptest::prelude::*;
        proptest!(|(bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in 0_usize..40)| {
            let mut head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n".to_vec();
            head.truncate(head.len() - cut);
            head.extend_from_slice(&bytes);
            if let Ok(Some(request)) = parse(&head, 0, LIMITS) {
                prop_assert!(request.len <= head.len());
                prop_assert!(head[..request.len].ends_with(b"\r\n\r\n"));
                prop_assert!(request.dropped.is_sorted_by_key(|span| span.start));
            }
        });
    }
}
