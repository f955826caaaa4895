//! P/D rules end to end: every request goes through a prefill and a decode engine, in each engine's dialect.

mod admission;
mod affinity;
#[path = "../common/mod.rs"]
mod common;
mod fidelity;
mod matrix;
mod routing;
mod written;

use common::pd::{Fleet, Plan, end_of, events, name_of, said};
use common::{client, wait_for};
use loadgen::engine::{Engine, EngineKind, EngineOptions, LegEnd, LegKind};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

const KINDS: [EngineKind; 3] = [EngineKind::Vllm, EngineKind::Sglang, EngineKind::Trtllm];

fn chat(text: &str, more: &Value) -> Vec<u8> {
    let mut body = json!({"model": loadgen::assets::DEMO_MODEL, "messages": [{"role": "user", "content": text}]});
    body["max_tokens"] = json!(12);
    more.as_object().into_iter().flatten().for_each(|(name, value)| body[name] = value.clone());
    body.to_string().into_bytes()
}

/// Two shards, whatever the machine.
const TWO_SHARDS: &str = "[shards]\ncores = [0, 1]\n";

/// A connection that this shard of two has accepted.
fn connection_on(fleet: &Fleet, shard: usize) -> client::Connection {
    let accepted = || {
        ["0", "1"].map(|shard| {
            let accepted = fleet.gateway.metric("kvlane_shard_connections_accepted_total", &[("shard", shard)]);
            accepted.expect("a series")
        })
    };
    wait_for("the shard accepts a connection", || {
        let before = accepted();
        let connection = client::Connection::open(fleet.listen).expect("the gateway listens");
        let after = wait_for("a shard has it", || {
            let after = accepted();
            (after != before).then_some(after)
        });
        (after[shard] > before[shard]).then_some(connection)
    })
}

/// What one engine says that does all of it.
fn alone(kind: EngineKind, body: &[u8]) -> String {
    let engine = Engine::start(&EngineOptions { kind, ..EngineOptions::ephemeral() }).expect("free ports");
    said(&client::call(engine.http_addr, "POST", CHAT, body).expect("it answers"))
}

/// Sends a streamed and a plain request, and checks that both went through one leg of each role and nothing else.
fn both_ways(fleet: &Fleet, kind: EngineKind) {
    for stream in [true, false] {
        let text = format!("the lake is deep and the night is long, stream {stream}");
        let body = chat(&text, &json!({"stream": stream}));
        let answer = fleet.ask(CHAT, &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(said(&answer), alone(kind, &body), "both legs say what one engine says");
        if stream {
            assert_eq!(events(&answer.body).last().map(String::as_str), Some("[DONE]"));
        }
        let route = answer.header("x-kvlane-route").expect("the route is told");
        for part in ["tier=tier", "ep_idx=", "decode_idx=", "decode_ms="] {
            assert!(route.contains(part), "{part} in {route}");
        }
        fleet.assert_idle(name_of(kind));
    }
    for kind in [LegKind::Prefill, LegKind::Decode] {
        let legs = fleet.legs(kind);
        assert_eq!(legs.len(), 2);
        assert!(legs.iter().all(|leg| leg.kind == kind && end_of(leg) == Some(LegEnd::Finished)), "{legs:?}");
    }
    fleet.assert_clean();
}

#[test]
fn streaming_and_plain_requests_go_through_both_legs_in_every_dialect() {
    for kind in KINDS {
        let fleet = Fleet::start(&Plan::of(kind));
        both_ways(&fleet, kind);
        for place in 0..6 {
            let path = format!("/config/ai/kv/inventory?service_id={}&ep_idx={place}", fleet.service);
            let expected = if place % 2 == 0 { 200 } else { 404 };
            assert_eq!(
                fleet.gateway.api(&path).status,
                expected,
                "{kind:?} {place}: decode endpoints have no inventory"
            );
        }
    }
}
