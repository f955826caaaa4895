//! Which conversation or session a request belongs to.

use crate::affinity::{ID_BYTES_MAX, session_key};
use crate::http::header;
use crate::service::{Service, SessionSource};

use super::routes::RequestView;

/// Conversations whose id begins like this were named by the client's library, one for each request.
const AUTOMATIC: &[u8] = b"auto-";

/// The key of the request's conversation: what the rule's `session_header_name` names; else `X-Conversation-Id`, else
/// `X-Session-Id`, else the body's `user`, as far as something has looked into the body. None where it says nothing, or
/// an id that is too long.
#[must_use]
pub fn conversation(service: &Service, view: &RequestView<'_>) -> Option<u64> {
    let source = service.sessions.as_ref().and_then(|sessions| sessions.source.as_ref());
    let by_rule = source.and_then(|source| named(source, view)).and_then(|id| session_key(service.id, id));
    let of = |span: crate::http::Span| span.of(view.bytes);
    let by_header = || {
        let conversation = view.head.conversation.map(of).filter(|id| !id.starts_with(AUTOMATIC));
        let fits = |id: &&[u8]| (1..=ID_BYTES_MAX).contains(&id.len());
        conversation.filter(fits).or_else(|| view.head.session.map(of)).and_then(|id| session_key(service.id, id))
    };
    by_rule.or_else(by_header).or_else(|| session_key(service.id, view.user()?.as_bytes()))
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
