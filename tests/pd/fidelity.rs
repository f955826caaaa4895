//! What engines get is what clients sent, but for the members that make a leg of it.

use loadgen::engine::{EngineKind, EngineOptions, LegKind, LegView};
use serde_json::{Value, json};

use super::CHAT;
use super::common::client;
use super::common::pd::{Fleet, Plan, name_of};

/// Where a JSON value that begins a text ends.
fn value_end(text: &[u8]) -> usize {
    let (mut depth, mut in_text, mut escaped) = (0, false, false);
    for (at, &byte) in text.iter().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_text,
            b'"' => in_text = !in_text,
            _ if in_text => {}
            b'[' | b'{' => depth += 1,
            b']' | b'}' if depth == 0 => return at,
            b']' | b'}' => depth -= 1,
            b',' if depth == 0 => return at,
            _ => {}
        }
    }
    text.len()
}

/// The body without the members that a gateway adds behind the client's own.
fn without(body: &[u8], names: &[&str]) -> Vec<u8> {
    let mut body = body.to_vec();
    for name in names {
        let added = format!(",\"{name}\":");
        let found = body.windows(added.len()).rposition(|window| window == added.as_bytes());
        let Some(start) = found else { continue };
        let from = start + added.len();
        let end = from + value_end(&body[from..]);
        body.drain(start..end);
    }
    body
}

fn last_decode(fleet: &Fleet) -> LegView {
    fleet.legs(LegKind::Decode).pop().expect("a decode leg")
}

/// Bodies as no JSON writer would write them.
fn odd_bodies() -> Vec<Vec<u8>> {
    let model = loadgen::assets::DEMO_MODEL;
    let long = "the lake is deep ".repeat((8 << 20) / 17 + 1);
    let simple = |text: &str| {
        format!(
            "{{\"model\":\"{model}\",\"messages\":[{{\"role\":\"user\",\"content\":\"{text}\"}}],\"max_tokens\":3}}"
        )
    };
    vec![
        format!("  {{ \"model\" :  \"{model}\" ,\t\"messages\":[ {{\"role\":\"user\", \"content\" :\"a  b\"}} ],\r\n\"max_tokens\" : 3 , \"temperature\":1.50e0 }}  \n").into_bytes(),
        simple("caf\\u00e9 \\ud83d\\ude00 \\/ \\\"kv_transfer_params\\\":{}, bootstrap_room").into_bytes(),
        format!("{}\n", simple("a trailing newline")).into_bytes(),
        format!("{{\"kv\":{{\"nested\":[1,2,{{\"a\":null}}]}},{}", &simple("unknown members first")[1..]).into_bytes(),
        simple(&long[..8 << 20]).into_bytes(),
    ]
}

#[test]
fn a_decode_leg_differs_by_the_spliced_members_only() {
    for (kind, names) in [
        (EngineKind::Vllm, &["kv_transfer_params"][..]),
        (EngineKind::Sglang, &["bootstrap_room", "bootstrap_port", "bootstrap_host"]),
        (EngineKind::Trtllm, &["prompt_token_ids", "disaggregated_params"]),
    ] {
        let roomy = |options: &mut EngineOptions| {
            (options.blocks, options.max_model_len, options.max_batched_tokens) = (400_000, 6_000_000, 6_000_000);
        };
        let fleet = Fleet::start(&Plan { pairs: 1, engine: roomy, ..Plan::of(kind) });
        for body in odd_bodies() {
            let answer = fleet.ask(CHAT, &body);
            let begin = String::from_utf8_lossy(&body[..body.len().min(80)]).into_owned();
            assert_eq!(answer.status, 200, "{kind:?} {begin}: {}", answer.text());
            let leg = last_decode(&fleet);
            assert!(leg.body.len() > body.len(), "{kind:?} {begin}: something was spliced in");
            assert!(without(&leg.body, names) == body, "{kind:?} {begin}: every other byte is as it came");
            if kind == EngineKind::Sglang {
                let prefill = fleet.legs(LegKind::Prefill).pop().expect("a prefill leg");
                assert!(prefill.body == leg.body, "{begin}: both legs have one body");
            }
            fleet.assert_idle(name_of(kind));
        }
        fleet.assert_clean();
    }
}

#[test]
fn members_of_the_gateway_are_refused_from_clients() {
    for (kind, member) in [
        (EngineKind::Vllm, json!({"kv_transfer_params": {"do_remote_prefill": true}})),
        (EngineKind::Sglang, json!({"bootstrap_room": 7})),
        (EngineKind::Trtllm, json!({"disaggregated_params": {"request_type": "generation_only"}})),
    ] {
        let fleet = Fleet::start(&Plan { pairs: 1, ..Plan::of(kind) });
        let answer = fleet.ask(CHAT, &super::chat("the lake", &member));
        assert_eq!((answer.status, answer.json()["error"].as_str()), (400, Some("bad_request")));
        assert!(answer.text().contains("leave it out"), "{}", answer.text());
        let null: Value =
            member.as_object().into_iter().flatten().map(|(name, _)| (name.clone(), Value::Null)).collect();
        assert_eq!(fleet.ask(CHAT, &super::chat("the lake", &null)).status, 200, "null is absent");
        fleet.assert_clean();
    }
}

#[test]
fn a_body_that_cannot_be_spliced_is_refused_and_one_that_is_no_object_is_the_engines_to_refuse() {
    let fleet = Fleet::start(&Plan { pairs: 1, ..Plan::of(EngineKind::Sglang) });
    let mut body: Value = serde_json::from_slice(&super::chat("the lake", &json!({}))).expect("JSON");
    (0..5000).for_each(|number| body[format!("member{number}")] = json!(number));
    let answer = fleet.ask(CHAT, body.to_string().as_bytes());
    assert_eq!((answer.status, answer.json()["error"].as_str()), (503, Some("pd_sg_oversize_unroutable")));
    assert!(answer.text().contains("4096 members"), "{}", answer.text());
    assert_eq!(fleet.gateway.metric_sum("loxilb_pd_sg_oversize_reject_total"), 1.0);
    assert!(fleet.legs(LegKind::Prefill).is_empty(), "nothing was sent");
    let answer = fleet.ask(CHAT, b"[1, 2");
    assert_eq!(answer.status, 400, "the engine says what is wrong: {}", answer.text());
    assert!(answer.header("x-engine").is_some());
}

#[test]
fn a_nixl_port_puts_both_addresses_into_the_id_of_both_legs() {
    let fleet = Fleet::start(&Plan {
        pairs: 1,
        engine: |options| options.nixl_port = Some(5600),
        prefill_endpoint: |_| json!({"nixl_port": 5600}),
        ..Plan::of(EngineKind::Vllm)
    });
    let mut connection = client::Connection::open(fleet.listen).expect("it listens");
    connection.request("POST", CHAT, &[("X-Request-Id", "mine")], &super::chat("the lake", &json!({}))).expect("sent");
    let answer = connection.answer().expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    let ids: Vec<_> = [LegKind::Prefill, LegKind::Decode].map(|kind| fleet.legs(kind)[0].request_id.clone()).into();
    assert_eq!(ids[0], ids[1]);
    let id = ids[0].as_deref().expect("an id");
    assert!(id.starts_with("___prefill_addr_127.0.0.1:5600___decode_addr_127.0.0.1_"), "{id}");
    fleet.assert_clean();
}
