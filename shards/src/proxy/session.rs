//! Which conversation or session a request belongs to.

use crate::affinity::session_key;
use crate::http::{Span, header};
use crate::service::{Service, SessionSource};

use super::routes::RequestView;

/// Conversations whose id begins like this were named by the client's library, one for each request.
const AUTOMATIC: &[u8] = b"auto-";

/// The key of the request's conversation: of what the rule's `session_header_name` names; in rules without it of
/// `X-Conversation-Id`, else `X-Session-Id`, else the body's `user`, as far as something has looked into the body. None where
/// that says nothing, or an id that is too long.
#[must_use]
pub fn conversation(service: &Service, view: &RequestView<'_>) -> Option<u64> {
    if let Some(source) = service.sessions.as_ref().and_then(|sessions| sessions.source.as_ref()) {
        return session_key(service.id, named(source, view)?);
    }
    let key = |span: Option<Span>| session_key(service.id, span?.of(view.bytes));
    let own = view.head.conversation.filter(|span| !span.of(view.bytes).starts_with(AUTOMATIC));
    let by_header = key(own).or_else(|| key(view.head.session));
    by_header.or_else(|| session_key(service.id, view.user()?.as_bytes()))
}

/// The id at the place that a rule names.
fn named<'a>(source: &SessionSource, view: &RequestView<'a>) -> Option<&'a [u8]> {
    let head = &view.bytes[..view.head.len];
    match source {
        SessionSource::Header(name) => header(head, name),
        SessionSource::Cookie(name) => {
            let pairs = header(head, "cookie")?.split(|byte| *byte == b';');
            value_of(pairs.map(<[u8]>::trim_ascii), name)
        }
        SessionSource::Query(name) => {
            let target = view.head.target.of(head);
            let query = target.splitn(2, |byte| *byte == b'?').nth(1)?;
            value_of(query.split(|byte| *byte == b'&'), name)
        }
        // The user's name is not decoded: equal spellings are equal users, and the password stays out of sight.
        SessionSource::BasicAuth => header(head, "authorization")?.strip_prefix(b"Basic "),
    }
}

/// The value of the first `name=value` of that name.
fn value_of<'a>(mut pairs: impl Iterator<Item = &'a [u8]>, name: &str) -> Option<&'a [u8]> {
    pairs.find_map(|pair| pair.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::http::request::{HeadLimits, parse};
    use crate::ids::ServiceId;
    use crate::service::Sessions;

    /// The key of a request with more header lines, in a rule that names the place.
    fn of(source: Option<SessionSource>, target: &str, lines: &str, body: &str) -> Option<u64> {
        let plain = Service::plain(ServiceId(7), ([127, 0, 0, 1], 80).into(), Vec::new(), 1);
        let service = Service { sessions: Some(Sessions { source, ttl: Duration::from_secs(9), max: 9 }), ..plain };
        let bytes = format!("POST {target} HTTP/1.1\r\nHost: h\r\nContent-Length: 99\r\n{lines}\r\n{body}");
        let limits = HeadLimits { bytes_max: 4096, headers_max: 16 };
        let head = parse(bytes.as_bytes(), 0, limits).expect("a good head").expect("a whole head");
        let view = RequestView::new(&head, bytes.as_bytes());
        let _looked_into = view.body();
        conversation(&service, &view)
    }

    fn id(text: &str) -> Option<u64> {
        session_key(ServiceId(7), text.as_bytes())
    }

    #[test]
    fn the_conversation_is_named_by_headers_before_the_user() {
        let user = r#"{"user":"u"}"#;
        let (conversation, session) = ("X-Conversation-Id: c\r\n", "X-Session-Id: s\r\n");
        for (lines, body, expected) in [
            (format!("{session}{conversation}"), user, id("c")),
            (session.to_owned(), user, id("s")),
            (String::new(), user, id("u")),
            ("X-Conversation-Id: auto-17\r\n".to_owned(), user, id("u")),
            ("X-Conversation-Id: auto-17\r\n".to_owned(), "{}", None),
            (format!("X-Conversation-Id: {}\r\n{session}", "x".repeat(200)), "{}", id("s")),
            (String::new(), "no JSON", None),
        ] {
            assert_eq!(of(None, "/", &lines, body), expected, "{lines} {body}");
        }
    }

    #[test]
    fn a_rule_may_say_where_the_session_stands() {
        let name = |name: &str| name.into();
        let lines = "Cookie: a=1; sid=c; sid=d\r\nMy-Session: h\r\nAuthorization: Basic dTpw\r\n";
        let target = "/v1/x?a=1&sid=q#f";
        for (source, expected) in [
            (SessionSource::Header(name("my-session")), "h"),
            (SessionSource::Cookie(name("sid")), "c"),
            (SessionSource::Query(name("sid")), "q#f"),
            (SessionSource::BasicAuth, "dTpw"),
        ] {
            assert_eq!(of(Some(source.clone()), target, lines, "{}"), id(expected), "{source:?}");
            assert_eq!(of(Some(source.clone()), "/", "X-Session-Id: s\r\n", "{}"), None, "{source:?}");
        }
    }
}
