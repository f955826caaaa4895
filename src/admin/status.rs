//! Whether the process can do its work, and what keeps it from it.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::rules::KvAlgo;
use crate::supervise::Entry;

use super::Context;

/// Rules, shards and models. Always 200: the answer's `ready` says whether a rule has a usable endpoint.
pub(super) async fn ready(State(context): State<Context>) -> Response {
    let view = context.control.view();
    let rules: Vec<Value> = view.entries.iter().map(|entry| rule(entry)).collect();
    let waiting = view.kept.waiting.iter().map(|(rule, why)| json!({"rule": rule.to_string(), "why": why}));
    let shards: Vec<Value> = view.shards.iter().map(|shard| shard.report()).collect();
    Json(json!({
        "ready": view.is_ready(),
        "rules_kept": {
            "file": view.kept.file,
            "warning": view.kept.passing(),
            "waiting": waiting.collect::<Vec<_>>(),
            "damaged": view.kept.damaged,
        },
        "draining": view.draining,
        "rules": rules,
        "shards": shards,
        "models": context.control.models.report(),
        "engines": context.control.engines(),
    }))
    .into_response()
}

fn rule(entry: &Entry) -> Value {
    let endpoints = &entry.service.endpoints;
    let total = endpoints.iter().filter(|endpoint| !endpoint.retired).count();
    let (usable, untried) = (entry.usable(), entry.untried());
    let reason = match (usable, untried) {
        (0, 0) => "no endpoint is up with a weight above 0",
        (0, _) => "no endpoint has answered GET /health yet; requests are sent to those that were not asked",
        _ => "",
    };
    json!({
        "service_id": entry.id.0,
        "name": entry.rule.name,
        "listen": entry.rule.key.listen(),
        "ready": usable > 0,
        "reason": reason,
        "endpoints": total,
        "usable_endpoints": usable,
        "untried_endpoints": untried,
    })
}

pub(super) async fn models(State(context): State<Context>) -> Response {
    Json(json!({ "models": context.control.models.report() })).into_response()
}

pub(super) async fn streams(State(context): State<Context>) -> Response {
    Json(json!({ "streams": context.control.ingest.report() })).into_response()
}

pub(super) async fn version() -> Response {
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "buildInfo": format!("kvlane {} for {}", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH),
        "product": "kvlane",
    }))
    .into_response()
}

/// What this is, and how to talk to it.
pub(super) async fn meta(State(context): State<Context>) -> Response {
    let protected = context.access.as_ref().is_some_and(|access| access.tokens().is_some());
    Json(json!({
        "product": "kvlane",
        "version": env!("CARGO_PKG_VERSION"),
        "apiVersion": "netlox/v1",
        "authentication": if protected { "bearer" } else { "none" },
        "openapi": "/netlox/v1/openapi.json",
    }))
    .into_response()
}

/// Which kinds of engine rules can route by, and what keeps one from it.
pub(super) async fn capabilities() -> Response {
    // A seed that is too long keeps the process from starting, and one that is unset is vLLM's own fixed one.
    let engines = shards::service::Engine::ALL.into_iter().filter(|engine| KvAlgo::default_of(*engine).is_some());
    let shown = engines.map(
        |engine| json!({"name": format!("kv_exact_{}", engine.name()), "ready": true, "reason": "", "reason_code": ""}),
    );
    Json(json!({ "capabilities": shown.collect::<Vec<_>>() })).into_response()
}

pub(super) async fn healthz() -> &'static str {
    "ok\n"
}

pub(super) async fn readyz(State(context): State<Context>) -> Response {
    match context.control.view().is_ready() {
        true => "ready\n".into_response(),
        false => (StatusCode::SERVICE_UNAVAILABLE, "no rule has a usable endpoint\n").into_response(),
    }
}
