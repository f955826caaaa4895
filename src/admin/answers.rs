//! Answers in the reference's shapes: clients take their text from `result`, `message` or `error`.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::fields::Problem;
use crate::supervise::{ApplyError, PartError, RegistryError};

/// The answer that clients insist on; warnings stand beside it where there are any.
pub(super) fn success(warnings: &[Problem]) -> Response {
    done(&warnings.iter().map(Problem::to_string).collect::<Vec<_>>())
}

/// As [`success`], with warnings of any origin.
pub(super) fn done(warnings: &[String]) -> Response {
    let mut body = json!({"result": "Success"});
    if !warnings.is_empty() {
        body["warnings"] = json!(warnings);
    }
    (StatusCode::OK, Json(body)).into_response()
}

/// An error: its fixed text by status, and what happened.
pub(super) fn refusal(status: StatusCode, result: &str) -> Response {
    let message = match status {
        StatusCode::BAD_REQUEST => "Malformed arguments for API call",
        StatusCode::FORBIDDEN => "Capacity insufficient",
        StatusCode::NOT_FOUND => "Resource not found",
        StatusCode::CONFLICT => "Resource conflict: Resource already exists OR dependency not found",
        StatusCode::SERVICE_UNAVAILABLE => "Maintenance mode",
        _ => status.canonical_reason().unwrap_or("Error"),
    };
    (status, Json(json!({"code": status.as_u16(), "message": message, "result": result}))).into_response()
}

/// A body that cannot be used. What is not built yet is refused like what is wrong: it is the client that must change.
pub(super) fn problems(problems: &[Problem]) -> Response {
    let texts: Vec<String> = problems.iter().map(ToString::to_string).collect();
    refusal(StatusCode::BAD_REQUEST, &texts.join("; "))
}

/// A rule that was right and could not be put in force.
pub(super) fn not_applied(error: &ApplyError) -> Response {
    let status = match error {
        ApplyError::Registry(RegistryError::Full) => StatusCode::FORBIDDEN,
        ApplyError::Registry(_) => StatusCode::CONFLICT,
        ApplyError::Bind(bind) if bind.is_busy() => StatusCode::CONFLICT,
        ApplyError::Bind(_) | ApplyError::Collision(_) => StatusCode::BAD_REQUEST,
        ApplyError::Part(PartError::ShardSilent { .. } | PartError::ShardCommand { .. })
        | ApplyError::Keep(_)
        | ApplyError::Stopping => StatusCode::SERVICE_UNAVAILABLE,
        ApplyError::Part(_) => StatusCode::INTERNAL_SERVER_ERROR,
    };
    refusal(status, &error.to_string())
}

pub(super) async fn no_such_path() -> Response {
    refusal(StatusCode::NOT_FOUND, "no such path: the API is under /netlox/v1")
}

pub(super) async fn no_such_method() -> Response {
    refusal(StatusCode::METHOD_NOT_ALLOWED, "the path does not know this method")
}
