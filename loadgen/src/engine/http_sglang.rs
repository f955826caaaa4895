//! SGLang's own paths.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};

use super::api::{self, Kind};
use super::http::{Engine, answer, clear_all, health, tokenized};
use super::options::EngineOptions;
use super::shared::{EngineStats, Shared};

/// The paths.
pub fn routes() -> Router<Arc<Shared>> {
    Router::new()
        .route("/generate", post(|state: Engine, request| answer(state, request, Kind::Generate)))
        .route("/tokenize", post(tokenize))
        .route("/v1/tokenize", post(tokenize))
        .route("/v1/models", get(models))
        .route("/health_generate", get(health))
        .route("/ready", get(health))
        .route("/ping", get(health))
        .route("/model_info", get(model_info))
        .route("/get_model_info", get(model_info))
        .route("/server_info", get(server_info))
        .route("/get_server_info", get(server_info))
        .route("/flush_cache", post(flush_cache).get(flush_cache))
        .route("/metrics", get(metrics))
}

async fn tokenize(State(shared): Engine, request: Request) -> Response {
    let max = shared.options().tokens_max();
    let read = |body: &[u8], shared: &Shared| api::tokenize(body, &shared.options(), &shared.text());
    tokenized(&shared, request, read, |tokens| json!({"tokens": tokens, "count": tokens.len(), "max_model_len": max}))
        .await
}

async fn models(State(shared): Engine) -> Json<Value> {
    let options = shared.options();
    let card = |id: &str, parent: Option<&str>| {
        json!({
            "id": id, "object": "model", "created": 0, "owned_by": "sglang", "root": id, "parent": parent,
            "max_model_len": options.tokens_max(),
        })
    };
    let mut cards = vec![card(&options.model, None)];
    cards.extend(options.loras.iter().map(|lora| card(&lora.name, Some(&options.model))));
    Json(json!({"object": "list", "data": cards}))
}

async fn model_info(State(shared): Engine) -> Json<Value> {
    let options = shared.options();
    Json(json!({
        "model_path": options.model, "served_model_name": options.model, "tokenizer_path": options.model,
        "is_generation": true, "weight_version": "default", "disaggregation_mode": "null",
    }))
}

async fn server_info(State(shared): Engine) -> Json<Value> {
    let options = shared.options();
    let events = events(&shared, &options);
    let described = events.clone().filter(|_| options.sglang_release.describes_events());
    let config = events.map(|events| {
        let replay = events.get("replay_endpoint_port_base").map(|port| format!("tcp://*:{port}"));
        json!({
            "publisher": "zmq", "endpoint": format!("tcp://*:{}", events["endpoint_port_base"]),
            "replay_endpoint": replay, "topic": options.topic,
        })
        .to_string()
    });
    let speculative = (options.lookahead > 0).then_some("EAGLE");
    let states: Vec<Value> = (0..shared.ranks.len()).map(|rank| json!({"dp_rank": rank})).collect();
    Json(json!({
        "model_path": options.model, "served_model_name": options.model, "tokenizer_path": options.model,
        "page_size": options.block_size, "dp_size": options.dp, "tp_size": 1, "kv_events_config": config,
        "chat_template": null, "speculative_algorithm": speculative, "context_length": options.max_model_len,
        "disaggregation_mode": "null", "load_balance_method": "round_robin",
        "enable_hierarchical_cache": options.cpu_blocks > 0, "disable_radix_cache": false,
        "enable_cache_report": true, "max_total_num_tokens": options.blocks * options.block_size,
        "max_req_input_len": options.tokens_max(), "internal_states": states,
        "version": options.sglang_release.to_string(), "kv_events": described,
    }))
}

/// How the publisher describes itself; none where it connects to a collector.
fn events(shared: &Shared, options: &EngineOptions) -> Option<Value> {
    let bound = shared.ranks[0].bound?;
    let mut events = json!({
        "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": bound.events?.port(), "topic": options.topic,
        "block_size": options.block_size, "dp_size": options.dp,
    });
    if let Some(replay) = bound.replay.filter(|_| options.sglang_release.replay_has_topic()) {
        events["replay_endpoint_port_base"] = json!(replay.port());
    }
    Some(events)
}

async fn flush_cache(State(shared): Engine) -> Response {
    if clear_all(&shared).await {
        return "Cache flushed.\n".into_response();
    }
    (StatusCode::BAD_REQUEST, "Flush cache failed: requests are running.\n").into_response()
}

/// A metric's name, its kind, and its value of a rank's counts.
type Metric = (&'static str, &'static str, fn(&EngineStats) -> u64);

const METRICS: [Metric; 5] = [
    ("num_running_reqs", "gauge", |stats| stats.running),
    ("num_queue_reqs", "gauge", |stats| stats.waiting),
    ("prompt_tokens_total", "counter", |stats| stats.prompt_tokens),
    ("cached_tokens_total", "counter", |stats| stats.cached_tokens),
    ("generation_tokens_total", "counter", |stats| stats.answer_tokens),
];

async fn metrics(State(shared): Engine) -> Response {
    let options = shared.options();
    let mut text = String::new();
    let label = |rank: usize| format!("{{dp_rank=\"{rank}\",model_name=\"{}\"}}", options.model);
    for (name, kind, value) in METRICS {
        text += &format!("# TYPE sglang:{name} {kind}\n");
        for rank in 0..shared.ranks.len() {
            text += &format!("sglang:{name}{} {}\n", label(rank), value(&shared.rank_stats(rank)));
        }
    }
    text += "# TYPE sglang:token_usage gauge\n";
    for rank in 0..shared.ranks.len() {
        let usage = shared.rank_stats(rank).used_blocks as f64 / options.blocks as f64;
        text += &format!("sglang:token_usage{} {usage}\n", label(rank));
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}
