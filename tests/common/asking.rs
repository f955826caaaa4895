//! Completions of the demo's model, one connection each, and what the answers say of how they were routed.

use std::net::SocketAddr;

use serde_json::{Value, json};

use super::client::{Answer, Connection};

/// The model of the simulated engines.
pub const MODEL: &str = "kvlane/demo";

/// A port of this host.
pub fn local(port: u16) -> SocketAddr {
    ([127, 0, 0, 1], port).into()
}

/// The shortest completion of a prompt.
pub fn completion(prompt: &str) -> Value {
    json!({"model": MODEL, "prompt": prompt, "max_tokens": 1})
}

/// A completion with more headers, on a connection of its own.
pub fn ask(port: u16, headers: &[(&str, &str)], body: &Value) -> Answer {
    let mut connection = Connection::open(local(port)).expect("the gateway accepts");
    let headers = [&[("Content-Type", "application/json")], headers].concat();
    connection.request("POST", "/v1/completions", &headers, body.to_string().as_bytes()).expect("sent");
    let answer = connection.answer().expect("answered");
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer
}

/// Tokens of the prompt that the engine had.
pub fn cached(answer: &Answer) -> u64 {
    answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
}

/// A value of the evidence header.
pub fn evidence<'a>(answer: &'a Answer, name: &str) -> Option<&'a str> {
    let text = answer.header("x-kvlane-route")?;
    text.split("; ").find_map(|part| part.strip_prefix(name)?.strip_prefix('='))
}
