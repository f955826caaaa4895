//! Whether the gateway's block keys are the engines'.
//!
//! `GET /netlox/v1/config/ai/kv/parity` answers `{"parity": […]}`, one object per (endpoint, rank) with an event
//! stream; `?service_id=N` leaves out other rules:
//!
//! | field | meaning |
//! |---|---|
//! | `service_id`, `name`, `ep_idx`, `endpoint`, `rank` | which cache |
//! | `verdict` | `believed` (no root block seen yet: the rule is believed), `exact` (the engine's own keys are reproduced), `derived` (the announced tokens are hashed by the gateway), `refused` (not routed by its cache) |
//! | `faults` | legs at fault: `seed`, `algorithm`, `block_size`, `extra_key_tagging`, `key_width` |
//! | `hints` | legs that differ from the rule's defaults and are taken over |
//! | `detail` | what was found and what to do, a sentence |
//! | `rule` | `kvHashAlgo` and `kvBlockSize` of the rule |
//! | `engine_block_tokens` | the engine's block size where it is not the rule's, else null |
//! | `by_use` | of the endpoint: predictions `fulfilled` and `missed` (after an answer, are the prompt's blocks there?), and `alarm`: null, or the `leg` that a run of misses points to (`template`, `template_input`, `tokenizer`) with its `detail` |
//! | `started` | null until the stream has begun, then `cold` (with nothing), `restored` (with what a state file says) or `replayed` (with the engine's history) |
//! | `degraded` | some of what is held was taken up from a state file or adopted and is not proven: it is routed by, and withdrawn as soon as the engine's `usage` denies it |
//! | `start` | a sentence on both; empty where nothing is amiss |
//! | `restored`, `withdrawn_by_usage`, `adopted_by_usage` | blocks |
//! | `orphans`, `complete` | blocks whose beginning was never announced to us; complete = there are none |

use std::collections::HashMap;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use shards::ids::ServiceId;

use crate::ingest::{Leg, Replay, Started, StreamStatus};
use crate::supervise::View;

use super::{Context, answers};

pub(super) async fn report(State(context): State<Context>, Query(query): Query<HashMap<String, String>>) -> Response {
    let service = match query.get("service_id").map(|text| text.parse().map(ServiceId)) {
        None => None,
        Some(Ok(service)) => Some(service),
        Some(Err(why)) => return answers::refusal(StatusCode::BAD_REQUEST, &format!("invalid service_id: {why}")),
    };
    let view = context.control.view();
    let streams = context.control.ingest.streams();
    let wanted = streams.iter().filter(|stream| service.is_none_or(|service| stream.name.service == service));
    let parity: Vec<Value> = wanted.map(|stream| show(stream, &view)).collect();
    Json(json!({ "parity": parity })).into_response()
}

fn show(stream: &StreamStatus, view: &View) -> Value {
    let entry = view.entry(stream.name.service);
    let kv = entry.and_then(|entry| entry.rule.kv.as_ref());
    let finding = stream.finding.clone().unwrap_or_default();
    let names = |legs: &[Leg]| legs.iter().map(|leg| leg.name()).collect::<Vec<_>>();
    json!({
        "service_id": stream.name.service.0,
        "name": entry.map(|entry| entry.rule.name.as_str()),
        "ep_idx": stream.name.endpoint.0,
        "endpoint": stream.name.label,
        "rank": stream.name.rank.0,
        "verdict": finding.verdict.name(),
        "faults": names(&finding.faults),
        "hints": names(&finding.hints),
        "detail": finding.detail,
        "rule": kv.map(|kv| json!({ "kvHashAlgo": kv.algo.name(), "kvBlockSize": kv.block_tokens })),
        "engine_block_tokens": stream.engine_block_tokens,
        "by_use": {
            "fulfilled": stream.by_use.fulfilled,
            "missed": stream.by_use.missed,
            "alarm": stream.by_use.alarm.map(|leg| json!({ "leg": leg.name(), "detail": leg.detail() })),
        },
        "started": stream.started.map(Started::name),
        "degraded": stream.degraded,
        "start": start(stream),
        "restored": stream.restored,
        "withdrawn_by_usage": stream.withdrawn,
        "adopted_by_usage": stream.adopted,
        "orphans": stream.orphans,
        "complete": stream.orphans == 0,
    })
}

/// What is to be known of how the inventory began.
fn start(stream: &StreamStatus) -> &'static str {
    match stream.started {
        Some(Started::Cold) if stream.replay != Replay::Works && !stream.whole => {
            "no replay endpoint: cold start; a prompt's blocks are taken in as the engine's usage reports them cached"
        }
        Some(Started::Restored) if stream.degraded => {
            "taken up from its state file, and no replay proves it: a prompt's blocks are withdrawn as soon as the engine's usage denies them"
        }
        _ => "",
    }
}
