//! vLLM's own paths.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};

use super::api::{self, Kind};
use super::http::{Engine, answer, clear_all, tokenized};
use super::shared::{EngineStats, Shared};
use super::wire::Release;

/// The paths.
pub fn routes() -> Router<Arc<Shared>> {
    let routes = Router::new()
        .route("/v1/messages", post(|state: Engine, request| answer(state, request, Kind::Messages)))
        .route("/v1/responses", post(|state: Engine, request| answer(state, request, Kind::Responses)))
        .route("/tokenize", post(tokenize))
        .route("/v1/models", get(models))
        .route("/version", get(version))
        .route("/metrics", get(metrics))
        .route("/kv_event_sources", get(event_sources));
    routes.route("/reset_prefix_cache", post(reset_prefix_cache))
}

async fn tokenize(State(shared): Engine, request: Request) -> Response {
    let max = shared.options().tokens_max();
    let read = |body: &[u8], shared: &Shared| api::tokenize(body, &shared.options(), &shared.text());
    tokenized(
        &shared,
        request,
        read,
        |tokens| json!({"count": tokens.len(), "max_model_len": max, "tokens": tokens, "token_strs": null}),
    )
    .await
}

/// The model's card, then one for each adapter.
async fn models(State(shared): Engine) -> Json<Value> {
    let options = shared.options();
    let card = |id: &str, root: &str, parent: Option<&str>| {
        json!({
            "id": id, "object": "model", "created": 0, "owned_by": "vllm", "root": root, "parent": parent,
            "max_model_len": options.tokens_max(),
        })
    };
    let mut cards = vec![card(&options.model, &options.model, None)];
    cards.extend(options.loras.iter().map(|lora| card(&lora.name, &lora.path, Some(&options.model))));
    Json(json!({"object": "list", "data": cards}))
}

async fn version(State(shared): Engine) -> Json<Value> {
    Json(json!({"version": shared.options().wire.to_string()}))
}

/// What `GET /kv_event_sources` says from 0.31; where any port was asked for, the one that was bound.
async fn event_sources(State(shared): Engine) -> Response {
    let options = shared.options();
    if options.wire < Release::new(31, 0) {
        return axum::http::StatusCode::NOT_FOUND.into_response();
    }
    let source = |rank: usize| {
        let bound = shared.ranks[rank].bound;
        let tcp = |address: std::net::SocketAddr| format!("tcp://{address}");
        let endpoint = bound.and_then(|bound| bound.events).map(tcp).or_else(|| options.event_connect.clone());
        let value = json!({
            "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": endpoint,
            "replay_endpoint": bound.and_then(|bound| bound.replay).map(tcp), "buffer_steps": 10_000, "hwm": 100_000,
            "max_queue_size": 100_000, "topic": options.topic,
        });
        (rank.to_string(), value)
    };
    Json(Value::Object((0..shared.ranks.len()).map(source).collect())).into_response()
}

async fn reset_prefix_cache(State(shared): Engine) -> Json<Value> {
    Json(json!({"success": clear_all(&shared).await}))
}

/// A metric's name, its kind, and its value of a rank's counts.
type Metric = (&'static str, &'static str, fn(&EngineStats) -> u64);

const METRICS: [Metric; 8] = [
    ("num_requests_running", "gauge", |stats| stats.running),
    ("num_requests_waiting", "gauge", |stats| stats.waiting),
    ("prefix_cache_queries_total", "counter", |stats| stats.prompt_tokens),
    ("prefix_cache_hits_total", "counter", |stats| stats.cached_tokens),
    ("prompt_tokens_total", "counter", |stats| stats.prompt_tokens),
    ("prompt_tokens_cached_total", "counter", |stats| stats.cached_tokens),
    ("generation_tokens_total", "counter", |stats| stats.answer_tokens),
    ("num_preemptions_total", "counter", |stats| stats.preemptions),
];

async fn metrics(State(shared): Engine) -> Response {
    let options = shared.options();
    let model = options.model.replace('\\', "\\\\").replace('"', "\\\"");
    let ranks: Vec<EngineStats> = (0..shared.ranks.len()).map(|rank| shared.rank_stats(rank)).collect();
    let mut text = String::new();
    for (name, kind, value) in METRICS {
        text += &format!("# TYPE vllm:{name} {kind}\n");
        for (rank, stats) in ranks.iter().enumerate() {
            text += &format!("vllm:{name}{{engine=\"{rank}\",model_name=\"{model}\"}} {}\n", value(stats));
        }
    }
    text += "# TYPE vllm:kv_cache_usage_perc gauge\n";
    for (rank, stats) in ranks.iter().enumerate() {
        let usage = stats.used_blocks as f64 / options.blocks as f64;
        text += &format!("vllm:kv_cache_usage_perc{{engine=\"{rank}\",model_name=\"{model}\"}} {usage}\n");
    }
    let (size, blocks, algo) = (options.block_size, options.blocks, options.algo.name());
    text += "# TYPE vllm:cache_config_info gauge\n";
    for rank in 0..ranks.len() {
        text += &format!(
            "vllm:cache_config_info{{block_size=\"{size}\",enable_prefix_caching=\"True\",engine=\"{rank}\",\
             hash_block_size=\"{size}\",num_gpu_blocks=\"{blocks}\",prefix_caching_hash_algo=\"{algo}\"}} 1.0\n"
        );
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}
