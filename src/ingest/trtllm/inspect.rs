//! An answer of `POST /kv_cache_events` shown to people: see [`super::super::inspect`].

#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;

use serde_json::{Value, json};

use super::drain::EVENTS;
use super::http::Client;
use super::json::{Body, Drained, EngineKey, Event, Stored};

/// Drains an engine once.
///
/// # Errors
/// A text: no answer, or one of another status.
pub(crate) fn drain_once(address: SocketAddr) -> Result<Vec<Value>, String> {
    let mut client = Client::new(address, None);
    let asked = client.ask(EVENTS, &AtomicBool::new(false));
    let answer = asked.map_err(|failure| format!("{address}: POST /kv_cache_events: {failure}"))?;
    match answer.status {
        200 => Ok(drained(answer.body)),
        status => Err(format!("{address}: POST /kv_cache_events: status {status}")),
    }
}

/// The events of an answer, and what of it was not taken.
pub(crate) fn drained(body: &[u8]) -> Vec<Value> {
    let drained = Drained::read(body);
    let rejected = drained.rejects.iter().map(|why| json!({"rejected": why.name()}));
    drained.events.iter().map(show).chain(rejected).collect()
}

fn show(event: &Event) -> Value {
    let mut shown = match &event.body {
        Ok(Body::Created(levels)) => json!({"type": "created", "blocks_by_level": levels}),
        Ok(Body::Stored(stored)) => show_stored(stored),
        Ok(Body::Removed(keys)) => json!({"type": "removed", "keys": keys.iter().map(key).collect::<Vec<_>>()}),
        Ok(Body::Updated(of, levels)) => json!({"type": "updated", "key": key(of), "levels": levels}),
        Err(why) => json!({"rejected": why.name()}),
    };
    shown["event_id"] = json!(event.id);
    shown["rank"] = json!(event.rank);
    shown["window"] = json!(event.pool.window);
    shown["layer_group"] = json!(event.pool.group);
    shown
}

fn show_stored(stored: &Stored) -> Value {
    let block = |block: &super::json::Block| {
        json!({
            "key": key(&block.key), "tokens": block.tokens, "level": block.level, "text_only": block.text_only,
            "cache_salt": block.cache_salt, "has_lora": block.has_lora,
        })
    };
    let blocks: Vec<Value> = stored.blocks.iter().map(block).collect();
    json!({"type": "stored", "parent": stored.parent.as_ref().map(key), "blocks": blocks})
}

fn key(key: &EngineKey) -> Value {
    json!({"u64": key.0.to_string(), "hex": format!("{:016x}", key.0)})
}
