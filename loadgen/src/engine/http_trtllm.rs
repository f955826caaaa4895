//! TensorRT-LLM's own paths. Reading `/metrics` or `/perf_metrics` takes what it tells away from others: that is counted.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::{Json, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};

use super::api;
use super::http::{Engine, tokenized};
use super::shared::Shared;
use super::trtllm_wire::TrtllmRelease;

/// The paths.
pub fn routes() -> Router<Arc<Shared>> {
    Router::new()
        .route("/kv_cache_events", post(kv_cache_events))
        .route("/v1/models", get(models))
        .route("/version", get(version))
        .route("/server_info", get(server_info))
        .route("/_internal/tokenize", post(tokenize))
        .route("/metrics", get(iteration_stats))
        .route("/perf_metrics", get(iteration_stats))
}

/// Destructive: gives every event once.
async fn kv_cache_events(State(shared): Engine) -> Json<Vec<Value>> {
    match &shared.drain {
        Some(drain) => Json(drain.drain().await),
        None => Json(Vec::new()),
    }
}

async fn models(State(shared): Engine) -> Json<Value> {
    let model = &shared.options().model;
    let card = json!({"id": model, "object": "model", "created": 0, "owned_by": "tensorrt_llm"});
    Json(json!({"object": "list", "data": [card]}))
}

async fn version(State(shared): Engine) -> Json<Value> {
    Json(json!({"version": shared.options().trtllm_release.name()}))
}

async fn server_info(State(shared): Engine) -> Json<Value> {
    let options = shared.options();
    let mut info = json!({"disaggregated_params": {}});
    if options.trtllm_release >= TrtllmRelease::V1_3 {
        info["max_batch_size"] = json!(options.max_running);
        info["kv_cache_hash_algo"] = json!("v1_block_key");
        info["tokens_per_block"] = json!(options.block_size);
    }
    Json(info)
}

async fn tokenize(State(shared): Engine, request: Request) -> Response {
    let read = |body: &[u8], shared: &Shared| api::tokenize(body, &shared.options(), &shared.text());
    tokenized(&shared, request, read, |tokens| json!({"count": tokens.len(), "tokens": tokens})).await
}

async fn iteration_stats(State(shared): Engine) -> Json<Value> {
    shared.counters.metrics_touched.fetch_add(1, Ordering::Relaxed);
    let (stats, options) = (shared.stats(), shared.options());
    Json(json!([{
        "numActiveRequests": stats.running, "numQueuedRequests": stats.waiting,
        "kvCacheStats": {"usedNumBlocks": stats.used_blocks, "maxNumBlocks": options.blocks},
    }]))
}
