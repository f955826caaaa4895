//! What a request brings, taken in so that a refusal has the shape of every other.

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use axum::http::request::Parts;
use axum::response::{IntoResponse as _, Response};

use super::answers::refusal;
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

/// A whole body.
#[derive(Debug)]
pub(super) struct Whole(pub(super) Bytes);

impl<S: Send + Sync> FromRequest<S> for Whole {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        match Bytes::from_request(request, state).await {
            Ok(bytes) => Ok(Whole(bytes)),
            Err(rejection) => Err(refusal(rejection.status(), &rejection.body_text()).into_response()),
        }
    }
}
