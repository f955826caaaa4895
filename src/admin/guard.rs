//! What every request passes before its handler: how many there may be, who asks, what they may do; and what is written
//! down of changes.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use axum::extract::connect_info::{ConnectInfo, Connected};
use axum::extract::{Request, State};
use axum::http::{Extensions, HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use axum::serve::IncomingStream;
use tracing::info;

use crate::access::{Role, Tokens};

use super::accept::Bounded;
use super::answers::refusal;
use super::places::{Place, Turn};
use super::{BASE, Context};

/// Requests per second that are answered in the long run, from all clients together; where there are tokens, those who
/// show one and those who show none have as much each. Beyond it: 429.
pub(super) const REQUESTS_PER_SECOND_MAX: f64 = 1000.0;
/// Requests that may come at once.
const BURST_MAX: f64 = 2000.0;

/// What anybody may ask for, as in the reference.
const OPEN: [&str; 3] = ["/version", "/meta", "/metrics"];

/// Who asks where nobody is asked who they are.
const NOBODY: &str = "-";

/// Who is at the other end, and the place of their connection.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    address: SocketAddr,
    place: Arc<Place>,
}

impl Connected<IncomingStream<'_, Bounded>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Bounded>) -> Self {
        Peer { address: *stream.remote_addr(), place: Arc::clone(stream.io().place()) }
    }
}

/// The place of the connection that a request came over; none where it came over none.
pub(super) fn place_of(extensions: &Extensions) -> Option<Arc<Place>> {
    extensions.get::<ConnectInfo<Peer>>().map(|ConnectInfo(peer)| Arc::clone(&peer.place))
}

/// Notes that a request's head has come, before anything else is done with it.
pub(super) async fn heard(request: Request, next: Next) -> Response {
    if let Some(place) = place_of(request.extensions()) {
        place.now(Turn::Work);
    }
    // A client that sends many requests at once waits for everybody else's next one before each of them.
    tokio::task::yield_now().await;
    next.run(request).await
}

/// How many requests are still allowed. Those who may not come in cannot use up what those have who may.
#[derive(Debug, Default)]
pub(super) struct Rates {
    known: Rate,
    strangers: Rate,
}

/// Requests still allowed, refilled with time.
#[derive(Debug)]
struct Rate(Mutex<(f64, Instant)>);

impl Default for Rate {
    fn default() -> Self {
        Rate(Mutex::new((BURST_MAX, Instant::now())))
    }
}

impl Rate {
    /// Takes one; false where there is none left.
    fn take(&self, now: Instant) -> bool {
        // Two numbers are read and written under the lock.
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (left, since) = *state;
        let refilled = left + now.saturating_duration_since(since).as_secs_f64() * REQUESTS_PER_SECOND_MAX;
        let left = refilled.min(BURST_MAX);
        let allowed = left >= 1.0;
        *state = (if allowed { left - 1.0 } else { left }, now);
        allowed
    }
}

/// Lets a request through, or answers it; every change that is asked for is written down with what became of it, without
/// its body.
pub(super) async fn guard(State(context): State<Context>, request: Request, next: Next) -> Response {
    let changes = !matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    let tokens = context.access.as_ref().and_then(|access| access.tokens());
    let allowed = allowed(tokens.as_deref(), &request, changes);
    let is_known = allowed.as_ref().is_ok_and(|who| who != NOBODY) || tokens.is_none();
    let rate = if is_known { &context.rates.known } else { &context.rates.strangers };
    if !rate.take(Instant::now()) {
        let mut response = refusal(StatusCode::TOO_MANY_REQUESTS, "too many requests to the management API");
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        return response;
    }
    if !changes {
        return match allowed {
            Ok(_) => next.run(request).await,
            Err(response) => *response,
        };
    }
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let peer = request.extensions().get::<ConnectInfo<Peer>>().map(|ConnectInfo(peer)| peer.address);
    let (who, response) = match allowed {
        Ok(who) => (who, next.run(request).await),
        Err(response) => (NOBODY.to_owned(), *response),
    };
    let status = response.status().as_u16();
    info!(target: "kvlane::audit", %method, path, status, who, peer = ?peer, "management API");
    response
}

/// Who asks, if they may.
fn allowed(tokens: Option<&Tokens>, request: &Request, changes: bool) -> Result<String, Box<Response>> {
    let Some(tokens) = tokens else {
        // Nobody is asked who they are: a page in a browser of this host could ask as well as anybody.
        return match changes && request.headers().contains_key(header::ORIGIN) {
            true => {
                let what = "pages in browsers may change nothing while there is no token file ([admin] tokens)";
                Err(Box::new(refusal(StatusCode::FORBIDDEN, what)))
            }
            false => Ok(NOBODY.to_owned()),
        };
    };
    let open = |path: &str| OPEN.contains(&path);
    if !changes && request.uri().path().strip_prefix(BASE).is_some_and(open) {
        return Ok(NOBODY.to_owned());
    }
    match token_of(request.headers()).and_then(|token| tokens.who(token)) {
        None => {
            let what = "a token is needed: send \"Authorization: Bearer TOKEN\"";
            let mut response = refusal(StatusCode::UNAUTHORIZED, what);
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            Err(Box::new(response))
        }
        Some((name, Role::Viewer)) if changes => {
            Err(Box::new(refusal(StatusCode::FORBIDDEN, &format!("{name} is a viewer: only GET is allowed"))))
        }
        Some((name, _)) => Ok(name.to_owned()),
    }
}

/// The token of a request, with or without the word before it: the reference's older client sends it bare.
pub(super) fn token_of(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?.trim();
    let (word, rest) = value.split_once(' ').unwrap_or((value, ""));
    let token = if word.eq_ignore_ascii_case("bearer") { rest.trim() } else { value };
    (!token.is_empty()).then_some(token)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn requests_beyond_the_burst_are_refused_until_time_has_passed() {
        let rate = Rate::default();
        let start = Instant::now();
        let taken = (0..).take_while(|_| rate.take(start)).count();
        assert_eq!(taken, BURST_MAX as usize);
        assert!(!rate.take(start));
        let second = start + Duration::from_secs(1);
        assert_eq!((0..).take_while(|_| rate.take(second)).count(), REQUESTS_PER_SECOND_MAX as usize);
    }

    #[test]
    fn a_token_comes_with_or_without_bearer() {
        for (value, token) in [
            ("Bearer abc", Some("abc")),
            ("bearer  abc ", Some("abc")),
            ("abc", Some("abc")),
            ("", None),
            ("Bearer ", None),
            ("é", None),
        ] {
            let mut headers = HeaderMap::new();
            if let Ok(value) = HeaderValue::from_str(value) {
                headers.insert(header::AUTHORIZATION, value);
            }
            assert_eq!(token_of(&headers), token, "{value:?}");
        }
    }
}
