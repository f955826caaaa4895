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
//! | `orphans`, `complete` | blocks whose beginning was never announced to us; complete = there are none |
//!
//! Beside it stand `endpoints`, one object per endpoint of a KV rule, and `drains`, one per TensorRT-LLM endpoint; see
//! `docs/parity.md`.

use std::collections::HashMap;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use shards::ids::ServiceId;

use crate::ingest::{DrainStatus, Leg, StreamStatus};
use crate::rules::RuleEndpoint;
use crate::rules::compile::Place;
use crate::supervise::{Control, Entry, View};

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
    let entries = view.entries.iter().filter(|entry| service.is_none_or(|service| entry.id == service));
    let endpoints: Vec<Value> = entries.flat_map(|entry| show_endpoints(&context.control, entry, &streams)).collect();
    let drains = context.control.ingest.drains();
    let wanted = drains.iter().filter(|drain| service.is_none_or(|service| drain.name.service == service));
    let drains: Vec<Value> = wanted.map(|drain| show_drain(drain, &view)).collect();
    Json(json!({ "parity": parity, "endpoints": endpoints, "drains": drains })).into_response()
}

/// What is known of the endpoints of a KV rule as wholes.
fn show_endpoints(control: &Control, entry: &Entry, streams: &[StreamStatus]) -> Vec<Value> {
    let wanted = entry.rule.kv.is_some();
    let endpoints = entry.in_rule().zip(&entry.rule.endpoints).filter(|_| wanted);
    let show = |(place, endpoint): (&Place, &RuleEndpoint)| {
        let key = (entry.id, place.shared.index);
        let mut faults: Vec<(&str, String)> = Vec::new();
        faults.extend(control.findings.of(key).into_iter().map(|finding| (finding.leg.name(), finding.detail)));
        let own = streams.iter().find(|stream| (stream.name.service, stream.name.endpoint) == key);
        let alarm = own.and_then(|stream| stream.by_use.alarm);
        faults.extend(alarm.map(|leg| (leg.name(), leg.detail().to_owned())));
        let facts = control.discovery.found(key).facts;
        json!({
            "service_id": entry.id.0,
            "name": entry.rule.name,
            "ep_idx": place.shared.index.0,
            "endpoint": endpoint.to_string(),
            "engine": entry.rule.engine.name(),
            "version": facts.version,
            "serves": facts.models,
            "up": place.shared.is_up(),
            "faults": faults.iter().map(|(leg, _)| *leg).collect::<Vec<_>>(),
            "details": faults.iter().map(|(leg, detail)| json!({"leg": leg, "detail": detail})).collect::<Vec<_>>(),
        })
    };
    endpoints.map(show).collect()
}

fn show_drain(drain: &DrainStatus, view: &View) -> Value {
    let rejects = drain.rejects.iter().map(|(why, count)| (why.name().to_owned(), json!(count)));
    json!({
        "service_id": drain.name.service.0,
        "name": view.entry(drain.name.service).map(|entry| entry.rule.name.as_str()),
        "ep_idx": drain.name.endpoint.0,
        "endpoint": drain.name.label,
        "address": drain.name.address,
        "phase": drain.phase.name(),
        "second_drainer": drain.second_drainer().name(),
        "routed_by": if drain.is_routed_by_cache() { "cache" } else { "sel" },
        "detail": drain.detail,
        "last_poll_ms": drain.last_poll_ms,
        "last_event_ms": drain.last_event_ms,
        "answers": drain.answers,
        "answers_lost": drain.answers_lost,
        "errors": drain.errors,
        "ownership_faults": drain.ownership_faults,
        "events": drain.events,
        "lost": drain.lost,
        "gaps": drain.gaps,
        "restarts": drain.restarts,
        "incomplete": drain.incomplete,
        "clears": drain.clears,
        "blocks_stored": drain.blocks_stored,
        "blocks_removed": drain.blocks_removed,
        "orphans": drain.orphans,
        "foreign": drain.foreign,
        "partial": drain.partial,
        "other_pool": drain.other_pool,
        "moved": drain.moved,
        "unknown_removals": drain.unknown_removals,
        "evicted": drain.evicted,
        "block_size_mismatches": drain.block_size_mismatches,
        "engine_block_tokens": drain.engine_block_tokens,
        "rejects": rejects.collect::<serde_json::Map<_, _>>(),
    })
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
        "orphans": stream.orphans,
        "complete": stream.orphans == 0,
    })
}
