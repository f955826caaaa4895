//! Answers of the gateway's own making: all errors are JSON with an `error` that scripts can match.

use crate::disagg::refusal::{BrokenEvents, LegRefusal};

/// Why the gateway answers in an engine's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// 400, the head or the framing is malformed.
    BadRequest(String),
    /// 408, the client was too slow.
    RequestTimeout,
    /// 413, the body is beyond the limit in bytes.
    BodyTooLarge(usize),
    /// 431, the head is beyond its limits.
    HeadTooLarge,
    /// 501, asked for something that a gateway for inference does not do.
    NotImplemented(String),
    /// 502, the endpoint took the request and ended the connection without an answer, or answered nonsense.
    BackendUnreachable(&'static str),
    /// 503, no endpoint of the rule is up.
    NoHealthyBackend,
    /// 503, there are no rules on the address.
    NoRules,
    /// 503, no rule has the host and path.
    NoRoute,
    /// 503, no rule has the model.
    ModelUnavailable(String),
    /// 504, no answer began within the limit.
    FirstByteTimeout,
    /// 505, another version of HTTP.
    Version,
    /// The request cannot go through its two legs.
    Legs(LegRefusal),
}

impl Refusal {
    /// The status code.
    #[must_use]
    pub fn status(&self) -> u16 {
        match self {
            Refusal::BadRequest(_) => 400,
            Refusal::RequestTimeout => 408,
            Refusal::BodyTooLarge(_) => 413,
            Refusal::HeadTooLarge => 431,
            Refusal::NotImplemented(_) => 501,
            Refusal::BackendUnreachable(_) => 502,
            Refusal::NoHealthyBackend | Refusal::NoRules | Refusal::NoRoute | Refusal::ModelUnavailable(_) => 503,
            Refusal::FirstByteTimeout => 504,
            Refusal::Version => 505,
            Refusal::Legs(refusal) => refusal.status(),
        }
    }

    fn error(&self) -> &'static str {
        match self {
            Refusal::BadRequest(_) => "bad_request",
            Refusal::RequestTimeout => "request_timeout",
            Refusal::BodyTooLarge(_) => "body_too_large",
            Refusal::HeadTooLarge => "head_too_large",
            Refusal::NotImplemented(_) => "not_implemented",
            Refusal::BackendUnreachable(_) => "backend_unreachable",
            Refusal::NoHealthyBackend => "no_healthy_backend",
            Refusal::NoRules => "no_rules",
            Refusal::NoRoute => "no_route",
            Refusal::ModelUnavailable(_) => "model_unavailable",
            Refusal::FirstByteTimeout => "backend_timeout",
            Refusal::Version => "http_version_not_supported",
            Refusal::Legs(refusal) => refusal.error(),
        }
    }

    fn detail(&self) -> String {
        match self {
            Refusal::BadRequest(detail) | Refusal::NotImplemented(detail) => detail.clone(),
            Refusal::RequestTimeout => "the request did not arrive in time".into(),
            Refusal::BodyTooLarge(max) => format!("the request's body is larger than {max} bytes"),
            Refusal::HeadTooLarge => "the request's head is larger than this gateway takes".into(),
            Refusal::BackendUnreachable(detail) => (*detail).into(),
            Refusal::NoHealthyBackend => "no endpoint of the rule is up".into(),
            Refusal::NoRules => "no rule listens here any more".into(),
            Refusal::NoRoute => "no rule is for this host and path".into(),
            Refusal::ModelUnavailable(_) => "no rule is for this model".into(),
            Refusal::FirstByteTimeout => "the endpoint did not begin to answer in time".into(),
            Refusal::Version => "only HTTP/1.0 and HTTP/1.1 are spoken here".into(),
            Refusal::Legs(refusal) => refusal.detail(),
        }
    }

    /// The whole answer.
    #[must_use]
    pub fn to_bytes(&self, keep_alive: bool, to_head: bool) -> Vec<u8> {
        self.to_bytes_with(keep_alive, to_head, b"")
    }

    /// The whole answer with more header lines.
    #[must_use]
    pub fn to_bytes_with(&self, keep_alive: bool, to_head: bool, lines: &[u8]) -> Vec<u8> {
        let mut body = serde_json::json!({ "error": self.error(), "detail": self.detail() });
        if let Refusal::ModelUnavailable(model) = self {
            body["model"] = model.as_str().into();
        }
        let mut lines = lines.to_vec();
        if let Refusal::Legs(refusal) = self
            && let Some(seconds) = refusal.retry_after()
        {
            lines.extend_from_slice(format!("Retry-After: {seconds}\r\n").as_bytes());
        }
        json_with(self.status(), &body.to_string(), keep_alive, to_head, &lines)
    }
}

/// An answer with a JSON body.
#[must_use]
pub fn json(status: u16, body: &str, keep_alive: bool, to_head: bool) -> Vec<u8> {
    json_with(status, body, keep_alive, to_head, b"")
}

/// An answer with a JSON body and more header lines.
fn json_with(status: u16, body: &str, keep_alive: bool, to_head: bool, lines: &[u8]) -> Vec<u8> {
    let connection = if keep_alive { "" } else { "Connection: close\r\n" };
    let mut answer = format!(
        "HTTP/1.1 {status} {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{connection}",
        reason(status),
        body.len(),
    )
    .into_bytes();
    answer.extend_from_slice(lines);
    answer.extend_from_slice(b"\r\n");
    if !to_head {
        answer.extend_from_slice(body.as_bytes());
    }
    answer
}

const BROKEN_STREAM_EVENT: &str =
    "\n\ndata: {\"error\":\"backend_died\",\"detail\":\"the endpoint ended the answer before its end\"}\n\n";

/// What ends a stream of events that broke: an event that says so, after whatever event was being written.
pub const BROKEN_EVENTS: BrokenEvents =
    BrokenEvents { died: BROKEN_STREAM_EVENT, idle: BROKEN_STREAM_EVENT, other_leg: BROKEN_STREAM_EVENT };

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        408 => "Request Timeout",
        413 => "Content Too Large",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        _ => "Error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_says_what_it_is_and_how_long() {
        let text = String::from_utf8(Refusal::ModelUnavailable("a\"b".into()).to_bytes(true, false)).expect("text");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        assert!(head.starts_with("HTTP/1.1 503 Service Unavailable\r\n"));
        assert!(head.contains(&format!("Content-Length: {}", body.len())));
        let json: serde_json::Value = serde_json::from_str(body).expect("JSON");
        assert_eq!((json["error"].as_str(), json["model"].as_str()), (Some("model_unavailable"), Some("a\"b")));
        let closed = String::from_utf8(Refusal::HeadTooLarge.to_bytes(false, true)).expect("text");
        assert!(closed.contains("Connection: close\r\n") && closed.ends_with("\r\n\r\n"));
    }
}
