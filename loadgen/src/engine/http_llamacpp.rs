//! llama.cpp's own paths: no events, no block hashes.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};

use super::api;
use super::http::{Engine, health, tokenized};
use super::shared::Shared;

/// The paths.
pub fn routes() -> Router<Arc<Shared>> {
    Router::new()
        .route("/v1/health", get(health))
        .route("/v1/models", get(models))
        .route("/props", get(props))
        .route("/slots", get(slots))
        .route("/tokenize", post(tokenize))
        .route("/metrics", get(metrics))
}

async fn models(State(shared): Engine) -> Json<Value> {
    let model = &shared.options().model;
    let card = json!({"id": model, "object": "model", "created": 0, "owned_by": "llamacpp", "meta": null});
    Json(json!({"object": "list", "data": [card]}))
}

async fn props(State(shared): Engine) -> Json<Value> {
    let options = shared.options();
    Json(json!({
        "default_generation_settings": {"n_ctx": options.tokens_max()}, "total_slots": options.max_running,
        "model_path": options.model, "modalities": {"vision": false, "audio": false}, "is_sleeping": false,
    }))
}

async fn slots(State(shared): Engine) -> Json<Value> {
    let (options, running) = (shared.options(), shared.stats().running as usize);
    let slot = |id: usize| json!({"id": id, "n_ctx": options.tokens_max(), "is_processing": id < running});
    Json((0..options.max_running).map(slot).collect())
}

async fn tokenize(State(shared): Engine, request: Request) -> Response {
    let read = |body: &[u8], shared: &Shared| api::tokenize_content(body, &shared.text());
    tokenized(&shared, request, read, |tokens| json!({"tokens": tokens})).await
}

async fn metrics(State(shared): Engine) -> Response {
    let stats = shared.stats();
    let mut text = String::new();
    for (name, kind, value) in [
        ("requests_processing", "gauge", stats.running),
        ("requests_deferred", "gauge", stats.waiting),
        ("prompt_tokens_cached_total", "counter", stats.cached_tokens),
    ] {
        text += &format!("# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value}\n");
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}
