//! The engine's HTTP face.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::{mpsc, oneshot};

use super::api::{self, Call, Kind, Refusal};
use super::dialect::{self, Form, Leg};
use super::driver::Command;
use super::fault::{Action, Fault, Health, Phase};
use super::legs::LegKind;
use super::options::EngineKind;
use super::orders::{MARK_HEADER, Ordered};
use super::reply::{Answer, InFlight, Place};
use super::scheduler::{self, Output};
use super::shared::{LastRequest, Shared};
use super::{command, disagg, http_llamacpp, http_sglang, http_trtllm, http_vllm, script};

/// Bytes of a request body at most; more is answered 413.
pub const BODY_BYTES_MAX: usize = 64 << 20;

/// The header that chooses a rank.
const RANK_HEADER: &str = "x-data-parallel-rank";

/// What a handler is given of the engine.
pub type Engine = State<Arc<Shared>>;

/// The engine's paths: those of its kind, and those for tests.
pub fn router(shared: Arc<Shared>) -> Router {
    let options = shared.options();
    // Every answer says which engine it comes from, as tests of a gateway want to know.
    let origin = format!("{}:{}", options.host, options.port);
    let origin = HeaderValue::from_str(&origin).unwrap_or(HeaderValue::from_static("unknown"));
    let common = Router::new()
        .route("/v1/completions", post(|state: Engine, request| answer(state, request, Kind::Completion)))
        .route("/v1/chat/completions", post(|state: Engine, request| answer(state, request, Kind::Chat)))
        .route("/health", get(health))
        .route("/debug/last", get(debug_last))
        .route("/debug/legs", get(|state: Engine| async move { Json(state.legs.show()) }))
        .route("/debug/stats", get(|state: Engine| async move { Json(state.stats()) }))
        .route("/debug/blocks", get(debug_blocks))
        .route("/debug/fault", post(debug_fault));
    let own = match options.kind {
        EngineKind::Vllm => http_vllm::routes(),
        EngineKind::Sglang => http_sglang::routes(),
        EngineKind::Trtllm => http_trtllm::routes(),
        EngineKind::Llamacpp => http_llamacpp::routes(),
    };
    common
        .merge(own)
        .layer(axum::middleware::map_response(move |mut response: Response| {
            response.headers_mut().insert("x-engine", origin.clone());
            std::future::ready(response)
        }))
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

/// The paths that make answers.
pub async fn answer(State(shared): Engine, request: Request, kind: Kind) -> Response {
    let mut flight = InFlight::new(Arc::clone(&shared));
    let (head, body) = request.into_parts();
    let Some(body) = read_body(body, &mut flight).await else {
        return StatusCode::PAYLOAD_TOO_LARGE.into_response();
    };
    shared.counters.bytes_in.fetch_add(body.len() as u64, Ordering::Relaxed);
    remember(&shared, &head, &body);
    let text = |name| head.headers.get(name).and_then(|value| value.to_str().ok());
    let (id, mark) = (text("x-request-id"), text(MARK_HEADER));
    let number = flight.arrived(id, mark, &body);
    let options = shared.options();
    let mut ordered = shared.orders.take(mark);
    if let Some(status) = suffer(&mut ordered, Phase::Arrival, &mut flight).await {
        return refuse(flight, &as_ordered(status), options.kind);
    }
    match begin(&shared, &mut flight, &head, &body, kind, number).await {
        Err(refusal) => refuse(flight, &refusal, options.kind),
        Ok(Begun { call, leg, rank }) => {
            if !flight.reserve(call.prompts.len(), rank) {
                let message = format!("the engine has {} requests; try another", options.max_requests);
                let refusal = Refusal { status: StatusCode::SERVICE_UNAVAILABLE, message };
                return refuse(flight, &refusal, options.kind);
            }
            let tokens = schedule(&shared, &flight, &call, &leg, rank);
            make(&shared, flight, call, leg, tokens, id, ordered).await
        }
    }
}

/// A request that has been read and, if it is a decode leg, has what it goes on from.
struct Begun {
    call: Call,
    leg: Leg,
    rank: usize,
}

async fn begin(
    shared: &Arc<Shared>,
    flight: &mut InFlight,
    head: &axum::http::request::Parts,
    body: &[u8],
    kind: Kind,
    number: u64,
) -> Result<Begun, Refusal> {
    let options = shared.options();
    let mut call = api::parse(kind, body, &options, &shared.text())?;
    let violation = |refusal| {
        shared.counters.pd_violations.fetch_add(1, Ordering::Relaxed);
        refusal
    };
    let mut leg = dialect::read(&options, shared.plane.address, &head.headers, body, &call).map_err(violation)?;
    let mut rank = choose_rank(shared, &head.headers, &call)?;
    match &mut leg {
        Leg::Plain => {}
        Leg::Prefill(prefill) => {
            if prefill.keys.is_empty() {
                prefill.keys.push(format!("{}-{number:08x}", prefill.request_id.as_deref().unwrap_or("ctx")));
            }
            for key in &prefill.keys {
                let begun = shared.plane.begin(key, prefill.request_id.clone());
                begun.map_err(|error| violation(Refusal::bad_request(error)))?;
            }
            flight.describe(LegKind::Prefill, &prefill.keys);
            if prefill.form == Form::Bootstrap {
                let room: u64 = prefill.keys[0].parse().unwrap_or(0);
                rank = (room % shared.ranks.len() as u64) as usize;
            }
            // It makes one token, whatever the client wants of the other leg.
            for prompt in &mut call.prompts {
                prompt.stops &= prompt.answer.len() == 1;
                prompt.answer.truncate(1);
            }
        }
        Leg::Decode(decode) => {
            let keys: Vec<String> = decode.claims.iter().map(|claim| claim.key.clone()).collect();
            flight.describe(LegKind::Decode, &keys);
            for claim in &decode.claims {
                let fetched = disagg::fetch(decode.at, claim).await;
                fetched.map_err(|error| match error.contains(disagg::ABORTED) {
                    true => dialect::broken(error),
                    false => violation(dialect::broken(error)),
                })?;
                if decode.tells {
                    disagg::tell_moved(decode.at, &claim.key).await.map_err(dialect::broken)?;
                }
            }
        }
    }
    Ok(Begun { call, leg, rank })
}

/// Gives the prompts to the scheduler; their tokens come over what is returned.
fn schedule(shared: &Shared, flight: &InFlight, call: &Call, leg: &Leg, rank: usize) -> UnboundedReceiver<Output> {
    let (sender, tokens) = mpsc::unbounded_channel();
    for (id, prompt) in flight.ids().iter().zip(&call.prompts) {
        let request = scheduler::Request {
            id: *id,
            prompt: prompt.tokens.clone(),
            answer: prompt.answer.clone(),
            namespace: Arc::clone(&call.namespace),
            transferred: matches!(leg, Leg::Decode(_)),
        };
        // Without a scheduler the engine is stopping, and this connection with it.
        let _ = shared.ranks[rank].commands.send(Command::Add(request, sender.clone()));
    }
    tokens
}

/// Makes the answer.
async fn make(
    shared: &Shared,
    mut flight: InFlight,
    call: Call,
    leg: Leg,
    tokens: UnboundedReceiver<Output>,
    id: Option<&str>,
    mut ordered: Ordered,
) -> Response {
    let options = shared.options();
    if ordered.at(Phase::Computing).is_some() || matches!(leg, Leg::Prefill(_)) {
        computed(&tokens, call.prompts.len()).await;
    }
    if let Some(status) = suffer(&mut ordered, Phase::Computing, &mut flight).await {
        return refuse(flight, &as_ordered(status), options.kind);
    }
    let first = call.prompts[0].answer.first().copied().unwrap_or(0);
    let (stream, prompt) = (call.stream, call.prompts[0].tokens.clone());
    let mut held = None;
    let mut issued = None;
    if let (Leg::Prefill(prefill), Some(side)) = (&leg, shared.plane.address) {
        match prefill.form {
            Form::Bootstrap => held = Some(prefill.keys.clone()),
            Form::Push => shared.plane.ready(&prefill.keys[0], &dialect::engine_name(side)),
            Form::Pull => {
                let blocks = prompt.len().div_ceil(options.block_size);
                let params = dialect::kv_transfer_params(&options, side, &prefill.keys[0], blocks);
                shared.plane.ready(&prefill.keys[0], &params.proof);
                issued = Some((Place::Top, params.params)).filter(|_| !options.no_params);
            }
            Form::Context { id } => {
                let params = dialect::disaggregated_params(&options, side, &prefill.keys[0], id, &prompt, first);
                shared.plane.ready(&prefill.keys[0], &params.proof);
                issued = Some((Place::Choice, params.params));
            }
        }
    }
    let wait = Duration::from_millis(options.pd_wait_ms);
    for key in held.iter().flatten() {
        shared.plane.ready(key, "");
        let handed = async {
            shared.plane.taken(key, wait).await?;
            shared.plane.moved(key, wait).await
        };
        if let Err(error) = handed.await {
            return refuse(flight, &dialect::broken(error), options.kind);
        }
    }
    let mut answer = Answer::new(flight, tokens, call, id);
    if let Some((place, params)) = issued {
        answer.issue(place, params);
    }
    script::respond(answer, stream, ordered).await
}

/// Waits until the first token of every prompt is made.
async fn computed(tokens: &UnboundedReceiver<Output>, prompts: usize) {
    for look in 0_u32.. {
        if tokens.len() >= prompts || tokens.is_closed() {
            return;
        }
        if look < 16 {
            tokio::task::yield_now().await;
        } else {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Does what goes wrong with a request now; the status it is refused with, if it is.
async fn suffer(ordered: &mut Ordered, phase: Phase, flight: &mut InFlight) -> Option<u16> {
    loop {
        let fault = ordered.at(phase)?;
        match fault.action {
            Action::Status => return Some(fault.status),
            Action::Hang => flight.hold(ordered, phase).await,
            Action::Die | Action::End => {
                flight.die();
                // Ends the connection's task, and with it the connection, without a message.
                std::panic::resume_unwind(Box::new("the engine was told to die"))
            }
            Action::Slow => {
                tokio::time::sleep(Duration::from_millis(fault.ms)).await;
                return None;
            }
        }
    }
}

/// The refusal that a fault orders.
fn as_ordered(status: u16) -> Refusal {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    Refusal { status, message: "refused, as ordered".to_owned() }
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

fn refuse(mut flight: InFlight, refusal: &Refusal, engine: EngineKind) -> Response {
    flight.refuse();
    (refusal.status, Json(refusal.body(engine))).into_response()
}

/// The rank that the client asks for, by the header before the body, or the engine's choice.
fn choose_rank(shared: &Shared, headers: &HeaderMap, call: &Call) -> Result<usize, Refusal> {
    if !matches!(shared.options().kind, EngineKind::Vllm | EngineKind::Sglang) {
        return Ok(shared.balance());
    }
    let asked = match headers.get(RANK_HEADER) {
        None => call.rank,
        Some(value) => {
            let rank = value.to_str().ok().and_then(|text| text.trim().parse().ok());
            Some(rank.ok_or_else(|| Refusal::bad_request("`X-data-parallel-rank` is a whole number"))?)
        }
    };
    match asked {
        None => Ok(shared.balance()),
        Some(rank) if rank < shared.ranks.len() as u64 => Ok(rank as usize),
        Some(rank) => Err(Refusal::bad_request(format!("rank {rank}: there are {}", shared.ranks.len()))),
    }
}

/// Keeps what `GET /debug/last` shows.
fn remember(shared: &Shared, head: &axum::http::request::Parts, body: &[u8]) {
    let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
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

/// The ids of a text or chat, for `POST /tokenize` of any kind.
pub async fn tokenized(
    shared: &Shared,
    request: Request,
    read: impl FnOnce(&[u8], &Shared) -> Result<Vec<u32>, Refusal>,
    show: impl FnOnce(Vec<u32>) -> Value,
) -> Response {
    let Ok(body) = to_bytes(request.into_body(), BODY_BYTES_MAX).await else {
        return StatusCode::PAYLOAD_TOO_LARGE.into_response();
    };
    match read(&body, shared) {
        Ok(tokens) => Json(show(tokens)).into_response(),
        Err(refusal) => (refusal.status, Json(refusal.body(shared.options().kind))).into_response(),
    }
}

/// 200, unless a fault was ordered.
pub async fn health(State(shared): Engine) -> StatusCode {
    match shared.health.lock().map(|health| *health).unwrap_or_default() {
        Health::Well => StatusCode::OK,
        Health::Failing => StatusCode::SERVICE_UNAVAILABLE,
        Health::Stalled => std::future::pending().await,
    }
}

/// Drops every rank's cache; whether all could be.
pub async fn clear_all(shared: &Shared) -> bool {
    let mut all = true;
    for rank in &shared.ranks {
        let (sender, receiver) = oneshot::channel();
        let _ = rank.commands.send(Command::Clear(sender));
        all &= receiver.await.unwrap_or(false);
    }
    all
}

async fn debug_fault(State(shared): Engine, body: Bytes) -> Response {
    let outcome = match Fault::from_json(&body) {
        Ok(fault) => command::carry_out(&shared, &fault).await,
        Err(error) => Err(error),
    };
    match outcome {
        Ok(()) => Json(json!({"ok": true})).into_response(),
        Err(error) => (StatusCode::BAD_REQUEST, Json(json!({"error": error}))).into_response(),
    }
}

async fn debug_last(State(shared): Engine) -> Json<Option<LastRequest>> {
    Json(shared.last.lock().ok().and_then(|last| last.clone()))
}

/// `{"blocks": {"<key>": copies}, "ranks": [{"<key>": copies}]}`: what a perfect consumer of the events would hold of
/// the device caches now, in all and by rank.
async fn debug_blocks(State(shared): Engine) -> Response {
    let mut ranks = Vec::new();
    let mut sum: Map<String, Value> = Map::new();
    for rank in &shared.ranks {
        let (sender, receiver) = oneshot::channel();
        let reply = Box::new(move |copies| drop(sender.send(copies)));
        let _ = rank.commands.send(Command::Contents(reply));
        let Ok(copies) = receiver.await else { return StatusCode::INTERNAL_SERVER_ERROR.into_response() };
        let mut own = Map::new();
        for (key, count) in copies {
            let before = sum.get(&key.to_string()).and_then(Value::as_u64).unwrap_or(0);
            sum.insert(key.to_string(), json!(before + count as u64));
            own.insert(key.to_string(), json!(count));
        }
        ranks.push(Value::Object(own));
    }
    Json(json!({"blocks": sum, "ranks": ranks})).into_response()
}
