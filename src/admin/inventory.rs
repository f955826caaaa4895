//! What blocks an endpoint's engine has announced.

use std::collections::HashMap;
use std::fmt::Write as _;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use shards::ids::{EndpointIndex, ServiceId};
use shards::inventory::ReaderFactory;
use shards::service::Role;

use super::Context;

/// Keys written between two moments at which other tasks get their turn.
const KEYS_PER_TURN: usize = 4096;

pub(super) async fn dump(State(context): State<Context>, Query(query): Query<HashMap<String, String>>) -> Response {
    let service = match number(&query, "service_id") {
        Ok(number) => ServiceId(number),
        Err(text) => return error(StatusCode::BAD_REQUEST, text),
    };
    let ep_idx = match number(&query, "ep_idx") {
        Ok(number) => number,
        Err(text) => return error(StatusCode::BAD_REQUEST, text),
    };
    let view = context.control.view();
    let found = view.entry(service).and_then(|entry| {
        let index = EndpointIndex(u16::try_from(ep_idx).ok()?);
        let endpoint = &entry.rule.endpoints[entry.places.get(index.index())?.in_rule?];
        // Decode endpoints have none.
        if endpoint.role == Role::Decode {
            return None;
        }
        Some((index, entry.inventory.clone()?, entry.rule.kv.as_ref()?.algo))
    });
    let Some((endpoint, readers, algo)) = found else {
        return error(StatusCode::NOT_FOUND, "service or endpoint not found".to_owned());
    };
    let keys = keys_of(&readers, endpoint).await;
    let mut body =
        format!("{{\"service_id\":{},\"ep_idx\":{ep_idx},\"hash_algo\":\"{}\",\"blocks\":[", service.0, algo.name());
    for (i, key) in keys.iter().enumerate() {
        let comma = if i == 0 { "" } else { "," };
        // Writing to a text cannot fail.
        let _ = write!(body, "{comma}{{\"block_idx\":{i},\"hash_uint64\":{key}}}");
        if i % KEYS_PER_TURN == KEYS_PER_TURN - 1 {
            tokio::task::yield_now().await;
        }
    }
    let _ = write!(body, "],\"total\":{}}}", keys.len());
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// All keys of an endpoint in ascending order. Each segment is read through a guard of its own, so that the dump
/// holds up no publish; it is therefore not one point in time.
async fn keys_of(readers: &ReaderFactory, endpoint: EndpointIndex) -> Vec<u64> {
    let reader = readers.reader();
    let mut keys = Vec::new();
    let segments = reader.enter().map_or(0, |guard| guard.segments());
    for segment in 0..segments {
        if let Some(guard) = reader.enter() {
            guard.segment_keys(segment, endpoint, &mut |key| keys.push(key.0));
        }
        tokio::task::yield_now().await;
    }
    keys.sort_unstable();
    keys
}

fn number(query: &HashMap<String, String>, name: &str) -> Result<u32, String> {
    let text = query.get(name).map_or("", String::as_str);
    text.parse().map_err(|why| format!("invalid {name}: {text:?}: {why}"))
}

fn error(status: StatusCode, text: String) -> Response {
    (status, Json(json!({ "error": text }))).into_response()
}
