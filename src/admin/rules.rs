//! Load-balancer rules as they stand: shown, counted, removed. Making and changing them is [`super::post`].

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use shards::service::{EndpointShared, EndpointStats};

use crate::rules::{RuleKey, readback};
use crate::supervise::{Entry, Selector};

use super::Context;
use super::addresses::is_held;
use super::answers::{not_applied, refusal, success};
use super::ask::Asked;
use super::rule_path::{Names, Taken, named, no_rule, taken};
use super::secrets::Sees;
use super::time::rfc3339;

/// A rule as one element of `lbAttr`.
fn shown(entry: &Entry, sees: Sees) -> Value {
    let up: Vec<bool> = entry.in_rule().map(|place| place.address.is_some() && place.shared.is_up()).collect();
    let mut value = readback(&entry.rule, entry.id, &up);
    for (endpoint, place) in value["endpoints"].as_array_mut().into_iter().flatten().zip(entry.in_rule()) {
        let of = |read: fn(&EndpointStats) -> &AtomicU64| counted(&place.shared, read);
        let bytes = of(|stats| &stats.bytes_in) + of(|stats| &stats.bytes_out);
        // The reference has packets before the colon; here they are requests.
        endpoint["counter"] = json!(format!("{}:{bytes}", of(|stats| &stats.requests)));
    }
    value["serviceArguments"]["id"] = json!(*entry.uuid);
    value["serviceArguments"]["source"] = json!(if entry.origin.is_file() { "file" } else { "api" });
    if !is_held(entry.rule.key.ip) {
        value["serviceArguments"]["warnings"] = json!(["address not on host"]);
    }
    sees.of(value)
}

pub(super) async fn list(State(context): State<Context>, sees: Sees) -> Response {
    let rules: Vec<Value> = context.control.view().entries.iter().map(|entry| shown(entry, sees)).collect();
    Json(json!({ "lbAttr": rules })).into_response()
}

fn find(context: &Context, key: &RuleKey) -> Result<Arc<Entry>, Box<Response>> {
    let view = context.control.view();
    let found = view.entries.iter().find(|entry| entry.rule.key == *key).cloned();
    found.ok_or_else(|| Box::new(no_rule(&key.to_string())))
}

fn answer(result: Result<Value, Box<Response>>) -> Response {
    match result {
        Ok(value) => Json(value).into_response(),
        Err(response) => *response,
    }
}

pub(super) async fn get_key(
    State(context): State<Context>,
    sees: Sees,
    path: Taken<Names>,
    Asked(query): Asked,
) -> Response {
    answer(named(path, &query).and_then(|key| find(&context, &key)).map(|entry| shown(&entry, sees)))
}

pub(super) async fn get_id(State(context): State<Context>, sees: Sees, id: Taken<String>) -> Response {
    let find = |id: String| {
        let view = context.control.view();
        let found = view.entries.iter().find(|entry| *entry.uuid == *id).map(|entry| shown(entry, sees));
        found.ok_or_else(|| Box::new(no_rule(&format!("id {id}"))))
    };
    answer(taken(id).and_then(find))
}

/// Every rule of a name.
pub(super) async fn get_name(State(context): State<Context>, sees: Sees, name: Taken<String>) -> Response {
    answer(taken(name).map(|name| {
        let view = context.control.view();
        let named = view.entries.iter().filter(|entry| entry.rule.name == name);
        json!({"lbAttr": named.map(|entry| shown(entry, sees)).collect::<Vec<_>>()})
    }))
}

/// Whether the rule's endpoints can take requests, in the reference's words.
pub(super) async fn status(State(context): State<Context>, path: Taken<Names>, Asked(query): Asked) -> Response {
    answer(named(path, &query).and_then(|key| find(&context, &key)).map(|entry| {
        json!({
            "adminStateUp": true,
            "operatingStatus": operating_status(&entry),
            "lastUpdated": rfc3339(entry.updated()),
        })
    }))
}

fn operating_status(entry: &Entry) -> &'static str {
    let endpoints = entry.service.endpoints.iter().filter(|endpoint| !endpoint.retired && endpoint.weight > 0);
    let (up, all) = endpoints.fold((0, 0), |(up, all), e| (up + usize::from(e.is_candidate()), all + 1));
    match up {
        // Every endpoint drains; or none has been probed yet.
        0 if all == 0 => "OFFLINE",
        _ if entry.usable() == 0 && up > 0 => "NO_MONITOR",
        0 => "ERROR",
        _ if up < all => "DEGRADED",
        _ => "ONLINE",
    }
}

/// What a rule has had to do, endpoints that have left it included.
pub(super) async fn stats(State(context): State<Context>, path: Taken<Names>, Asked(query): Asked) -> Response {
    answer(named(path, &query).and_then(|key| find(&context, &key)).map(|entry| {
        let shared = || entry.places.iter().map(|place| &*place.shared);
        let active: u64 = shared().map(|shared| u64::from(context.control.loads.total(shared.slot).requests())).sum();
        let sum = |read: fn(&EndpointStats) -> &AtomicU64| shared().map(|shared| counted(shared, read)).sum::<u64>();
        json!({
            "activeConnections": active,
            "bytesIn": sum(|stats| &stats.bytes_in),
            "bytesOut": sum(|stats| &stats.bytes_out),
            "totalConnections": sum(|stats| &stats.requests),
        })
    }))
}

/// A counter of an endpoint over all shards.
fn counted(shared: &EndpointShared, read: fn(&EndpointStats) -> &AtomicU64) -> u64 {
    shared.stats.iter().map(|stats| super::metrics::read(read(stats))).sum()
}

pub(super) async fn delete_all(State(context): State<Context>) -> Response {
    removed(&context, Selector::All).await.unwrap_or_else(|_| success(&[]))
}

pub(super) async fn delete_name(State(context): State<Context>, name: Taken<String>) -> Response {
    match taken(name) {
        // As the reference has it, success does not depend on whether there was such a rule.
        Ok(name) => removed(&context, Selector::Name(name)).await.unwrap_or_else(|_| success(&[])),
        Err(response) => *response,
    }
}

pub(super) async fn delete_key(State(context): State<Context>, path: Taken<Names>, Asked(query): Asked) -> Response {
    let key = match named(path, &query) {
        Ok(key) => key,
        Err(response) => return *response,
    };
    let text = key.to_string();
    removed(&context, Selector::Key(key)).await.unwrap_or_else(|_| no_rule(&text))
}

/// The answer to a removal; nothing where there was nothing to remove.
async fn removed(context: &Context, selector: Selector) -> Result<Response, ()> {
    let _turn = context.changes.lock().await;
    match context.control.remove(selector).await {
        Ok(0) => Err(()),
        Ok(_) => Ok(success(&[])),
        Err(error) => Ok(not_applied(&error)),
    }
}

/// Rules of mode fullproxy, which all are here, take no merge patch in the reference either.
pub(super) async fn patch(State(context): State<Context>, path: Taken<Names>, Asked(query): Asked) -> Response {
    match named(path, &query).and_then(|key| find(&context, &key)) {
        Ok(_) => refusal(
            StatusCode::CONFLICT,
            "lbrule-exist error: cant modify fullproxy rules by PATCH: POST the whole rule to /config/loadbalancer \
             again, or its endpoints with oper 1 (attach) or 2 (detach)",
        ),
        Err(response) => *response,
    }
}
