//! What of the process can be changed beside its rules: the log's level, and whether metrics are shown.

use std::sync::atomic::Ordering;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use tracing::info;

use crate::fields::{Dialect, Fields, Problem, Report, from_json};
use crate::logs::LogError;

use super::Context;
use super::answers::{problems, refusal, success};
use super::ask::Whole;

pub(super) async fn params(State(context): State<Context>) -> Response {
    Json(json!({ "logLevel": context.log.level() })).into_response()
}

pub(super) async fn set_params(State(context): State<Context>, Whole(body): Whole) -> Response {
    let read = |fields: &mut Fields<'_>, report: &mut Report| {
        let level = fields.text_set(report, "logLevel").map(str::to_owned);
        if level.is_none() && report.is_usable() {
            fields.invalid(report, "logLevel", "missing: a level such as \"info\"");
        }
        level.unwrap_or_default()
    };
    let (level, warnings) = match parsed(&body, read) {
        Ok(read) => read,
        Err(found) => return problems(&found),
    };
    match context.log.set(&level) {
        Ok(()) => {
            info!(level, "log level");
            success(&warnings)
        }
        Err(error @ LogError::Unknown(_)) => refusal(StatusCode::BAD_REQUEST, &error.to_string()),
        Err(error @ LogError::Fixed(_)) => refusal(StatusCode::CONFLICT, &error.to_string()),
    }
}

pub(super) async fn metrics(State(context): State<Context>) -> Response {
    Json(json!({ "prometheus": context.shows_metrics.load(Ordering::Relaxed) })).into_response()
}

pub(super) async fn set_metrics(State(context): State<Context>, Whole(body): Whole) -> Response {
    let read = |fields: &mut Fields<'_>, report: &mut Report| {
        let shows = fields.flag(report, "prometheus");
        if shows.is_none() && report.is_usable() {
            fields.invalid(report, "prometheus", "missing: true or false");
        }
        shows.unwrap_or_default()
    };
    match parsed(&body, read) {
        Ok((shows, warnings)) => {
            context.shows_metrics.store(shows, Ordering::Relaxed);
            success(&warnings)
        }
        Err(found) => problems(&found),
    }
}

pub(super) async fn hide_metrics(State(context): State<Context>) -> Response {
    context.shows_metrics.store(false, Ordering::Relaxed);
    success(&[])
}

/// Reads a body with one table: its value, and what its author should know.
pub(super) fn parsed<T>(
    body: &[u8],
    read: impl FnOnce(&mut Fields<'_>, &mut Report) -> T,
) -> Result<(T, Vec<Problem>), Vec<Problem>> {
    let node = from_json(body).map_err(|problem| vec![problem])?;
    let mut report = Report::new(Dialect::Api);
    let mut fields = Fields::root(&mut report, &node);
    let value = read(&mut fields, &mut report);
    fields.finish(&mut report);
    if report.is_usable() { Ok((value, report.warnings)) } else { Err(report.problems) }
}
