//! The engine's HTTP face.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::sync::{mpsc, oneshot};

use super::api::{self, Kind, Refusal};
use super::driver::Command;
use super::reply::{Answer, InFlight};
use super::scheduler;
use super::shared::{LastRequest, Shared};

/// Bytes of a request body at most; more is answered 413.
const BODY_BYTES_MAX: usize = 64 << 20;

type Engine = State<Arc<Shared>>;

/// The engine's paths.
pub fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/v1/completions", post(|state: Engine, request| answer(state, request, Kind::Completion)))
        .route("/v1/chat/completions", post(|state: Engine, request| answer(state, request, Kind::Chat)))
        .route("/tokenize", post(tokenize))
        .route("/v1/models", get(models))
        .route("/health", get(|| async {}))
        .route("/version", get(version))
        .route("/metrics", get(metrics))
        .route("/kv_event_sources", get(event_sources))
        .route("/reset_prefix_cache", post(reset_prefix_cache))
        .route("/debug/last", get(debug_last))
        .route("/debug/stats", get(|state: Engine| async move { Json(state.stats()) }))
        .route("/debug/blocks", get(debug_blocks))
        .with_state(shared)
}

/// Serves until the future is dropped.
pub async fn serve(listener: TcpListener, router: Router) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?.tap_io(|stream| {
        // A socket that is already closed cannot be set; its first read says so.
        let _ = stream.set_nodelay(true);
    });
    axum::serve(listener, router).await
}

/// Both completion paths.
async fn answer(State(shared): Engine, request: Request, kind: Kind) -> Response {
    let mut flight = InFlight::new(Arc::clone(&shared));
    let (head, body) = request.into_parts();
    let Some(body) = read_body(body, &mut flight).await else {
        return StatusCode::PAYLOAD_TOO_LARGE.into_response();
    };
    shared.counters.bytes_in.fetch_add(body.len() as u64, Ordering::Relaxed);
    remember(&shared, &head, &body);
    let call = match api::parse(kind, &body, &shared.options, &shared.text) {
        Ok(call) => call,
        Err(refusal) => return refuse(flight, &refusal),
    };
    if !flight.reserve(call.prompts.len()) {
        let message = format!("the engine has {} requests; try another", shared.options.max_requests);
        return refuse(flight, &Refusal { status: StatusCode::SERVICE_UNAVAILABLE, message });
    }
    let (sender, tokens) = mpsc::unbounded_channel();
    for (id, prompt) in flight.ids().iter().zip(&call.prompts) {
        let (prompt, answer) = (prompt.tokens.clone(), prompt.answer.clone());
        let request = scheduler::Request { id: *id, prompt, answer, salt: call.salt.clone() };
        // Without a scheduler the engine is stopping, and this connection with it.
        let _ = shared.commands.send(Command::Add(request, sender.clone()));
    }
    drop(sender);
    let stream = call.stream;
    let id = head.headers.get("x-request-id").and_then(|id| id.to_str().ok());
    let answer = Answer::new(flight, tokens, call, id);
    if stream {
        let body = Body::from_stream(answer.stream());
        return ([(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")], body).into_response();
    }
    match answer.whole().await {
        Some(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        None => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// The whole body; none when it is too long. A client that leaves in its middle counts as one that left.
async fn read_body(body: Body, flight: &mut InFlight) -> Option<Bytes> {
    match to_bytes(body, BODY_BYTES_MAX).await {
        Ok(bytes) => Some(bytes),
        Err(error) => {
            let mut cause: Option<&dyn std::error::Error> = Some(&error);
            while let Some(error) = cause {
                if error.to_string().contains("length limit") {
                    flight.complete();
                }
                cause = error.source();
            }
            None
        }
    }
}

fn refuse(mut flight: InFlight, refusal: &Refusal) -> Response {
    flight.complete();
    (refusal.status, Json(refusal.body())).into_response()
}

/// Keeps what `GET /debug/last` shows.
fn remember(shared: &Shared, head: &axum::http::request::Parts, body: &[u8]) {
    let text = |value: &header::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    let last = LastRequest {
        path: head.uri.path().to_owned(),
        sha256: Sha256::digest(body).iter().map(|byte| format!("{byte:02x}")).collect(),
        length: body.len(),
        content_length: head.headers.get(header::CONTENT_LENGTH).map(text),
        headers: head.headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect(),
    };
    if let Ok(mut kept) = shared.last.lock() {
        *kept = Some(last);
    }
}

async fn tokenize(State(shared): Engine, request: Request) -> Response {
    let Ok(body) = to_bytes(request.into_body(), BODY_BYTES_MAX).await else {
        return StatusCode::PAYLOAD_TOO_LARGE.into_response();
    };
    match api::tokenize(&body, &shared.options, &shared.text) {
        Ok(tokens) => Json(json!({
            "count": tokens.len(), "max_model_len": shared.options.tokens_max(), "tokens": tokens, "token_strs": null,
        }))
        .into_response(),
        Err(refusal) => (refusal.status, Json(refusal.body())).into_response(),
    }
}

async fn models(State(shared): Engine) -> Json<Value> {
    let model = &shared.options.model;
    Json(json!({"object": "list", "data": [{
        "id": model, "object": "model", "created": 0, "owned_by": "vllm", "root": model, "parent": null,
        "max_model_len": shared.options.tokens_max(),
    }]}))
}

async fn version(State(shared): Engine) -> Json<Value> {
    Json(json!({"version": shared.options.wire.to_string()}))
}

/// What `GET /kv_event_sources` says from 0.31; the ports are those asked for, as on a real engine.
async fn event_sources(State(shared): Engine) -> Json<Value> {
    let options = &shared.options;
    let bound = format!("tcp://{}:{}", options.host, options.event_port);
    let replay = options.replay_port.map(|port| format!("tcp://{}:{port}", options.host));
    Json(json!({"0": {
        "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": options.event_connect.as_ref().unwrap_or(&bound),
        "replay_endpoint": replay, "buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000,
        "topic": options.topic,
    }}))
}

async fn reset_prefix_cache(State(shared): Engine) -> Response {
    let (sender, receiver) = oneshot::channel();
    let _ = shared.commands.send(Command::Clear(sender));
    match receiver.await {
        Ok(success) => Json(json!({"success": success})).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn debug_last(State(shared): Engine) -> Json<Option<LastRequest>> {
    Json(shared.last.lock().ok().and_then(|last| last.clone()))
}

/// `{"blocks": {"<key>": copies}}`: what a perfect consumer of the events would hold now.
async fn debug_blocks(State(shared): Engine) -> Response {
    let (sender, receiver) = oneshot::channel();
    let reply = Box::new(move |copies| drop(sender.send(copies)));
    let _ = shared.commands.send(Command::Contents(reply));
    match receiver.await {
        Ok(copies) => {
            let copies: serde_json::Map<String, Value> =
                copies.into_iter().map(|(key, count)| (key.to_string(), json!(count))).collect();
            Json(json!({"blocks": copies})).into_response()
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn metrics(State(shared): Engine) -> Response {
    let (stats, options) = (shared.stats(), &shared.options);
    let label = format!("engine=\"0\",model_name=\"{}\"", options.model.replace('\\', "\\\\").replace('"', "\\\""));
    let usage = stats.used_blocks as f64 / options.blocks as f64;
    let mut text = String::new();
    for (name, kind, value) in [
        ("num_requests_running", "gauge", stats.running as f64),
        ("num_requests_waiting", "gauge", stats.waiting as f64),
        ("kv_cache_usage_perc", "gauge", usage),
        ("prefix_cache_queries_total", "counter", stats.prompt_tokens as f64),
        ("prefix_cache_hits_total", "counter", stats.cached_tokens as f64),
        ("prompt_tokens_total", "counter", stats.prompt_tokens as f64),
        ("prompt_tokens_cached_total", "counter", stats.cached_tokens as f64),
        ("generation_tokens_total", "counter", stats.answer_tokens as f64),
        ("num_preemptions_total", "counter", stats.preemptions as f64),
    ] {
        text += &format!("# TYPE vllm:{name} {kind}\nvllm:{name}{{{label}}} {value}\n");
    }
    let (size, blocks, algo) = (options.block_size, options.blocks, options.algo.name());
    text += &format!(
        "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{block_size=\"{size}\",enable_prefix_caching=\"True\",\
         engine=\"0\",hash_block_size=\"{size}\",num_gpu_blocks=\"{blocks}\",prefix_caching_hash_algo=\"{algo}\"}} 1.0\n"
    );
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}
