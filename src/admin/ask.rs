//! What a request brings, taken in so that a refusal has the shape of every other.

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;

use super::BODY_BYTES_MAX;
use super::answers::refusal;
use super::guard::place_of;
use super::rule_path::Names;

/// A query's names and values; of a name given twice the last counts.
#[derive(Debug)]
pub(super) struct Asked(pub(super) Names);

impl<S: Sync> FromRequestParts<S> for Asked {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Response> {
        match Query::try_from_uri(&parts.uri) {
            Ok(Query(names)) => Ok(Asked(names)),
            Err(rejection) => Err(refusal(rejection.status(), &rejection.body_text())),
        }
    }
}

/// A whole body. One of more bytes than `MAX`, which the route's own limit is, is answered 413; one that does not come in
/// time 408, and its connection is closed.
#[derive(Debug)]
pub(super) struct Whole<const MAX: usize = BODY_BYTES_MAX>(pub(super) Bytes);

impl<S: Send + Sync, const MAX: usize> FromRequest<S> for Whole<MAX> {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        let place = place_of(request.extensions());
        let body = Bytes::from_request(request, state);
        let body = match place {
            Some(place) => place.body(body).await,
            None => Some(body.await),
        };
        match body {
            Some(Ok(bytes)) => Ok(Whole(bytes)),
            Some(Err(rejection)) if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE => Err(refusal(
                rejection.status(),
                &format!("the body is larger than {MAX} bytes, the most that is read here"),
            )),
            Some(Err(rejection)) => Err(refusal(rejection.status(), &rejection.body_text())),
            None => {
                let mut late = refusal(StatusCode::REQUEST_TIMEOUT, "the body of the request did not come in time");
                late.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
                Err(late)
            }
        }
    }
}
