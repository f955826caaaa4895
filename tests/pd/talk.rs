//! `/v1/messages` and `/v1/responses` of vLLM go through both legs like chats.

use loadgen::engine::{Action, EngineKind, LegEnd, LegFault, LegKind, Phase};
use serde_json::{Value, json};

use super::common::client::{Answer, Connection};
use super::common::pd::{Fleet, Plan, end_of};

const PATHS: [&str; 2] = ["/v1/messages", "/v1/responses"];

/// A request of one of the two kinds.
fn body(path: &str, text: &str, more: &Value) -> Vec<u8> {
    let model = loadgen::assets::DEMO_MODEL;
    let mut body = match path {
        "/v1/messages" => json!({"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 12}),
        _ => json!({"model": model, "input": text, "max_output_tokens": 12}),
    };
    more.as_object().into_iter().flatten().for_each(|(name, value)| body[name] = value.clone());
    body.to_string().into_bytes()
}

/// The text of a whole answer, or of a stream's pieces.
fn said(answer: &Answer) -> String {
    let piece = |data: &str| {
        let json: Value = serde_json::from_str(data).unwrap_or_default();
        let delta = json["delta"]["text"].as_str().or_else(|| json["delta"].as_str());
        let whole = json["content"][0]["text"].as_str().or_else(|| json["output"][0]["content"][0]["text"].as_str());
        delta.or(whole).unwrap_or_default().to_owned()
    };
    if answer.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream")) {
        return answer.text().lines().filter_map(|line| line.strip_prefix("data: ")).map(piece).collect();
    }
    piece(&answer.text())
}

#[test]
fn messages_and_responses_go_through_both_legs() {
    let fleet = Fleet::start(&Plan { pairs: 1, ..Plan::of(EngineKind::Vllm) });
    for (number, path) in PATHS.into_iter().enumerate() {
        let mut texts = Vec::new();
        for stream in [true, false] {
            let answer = fleet.ask(path, &body(path, "the lake is deep", &json!({"stream": stream})));
            assert_eq!(answer.status, 200, "{}", answer.text());
            let route = answer.header("x-kvlane-route").expect("the route is told").to_owned();
            assert!(route.contains("prefill_ms=") && route.contains("decode_ms="), "{path}: {route}");
            assert!(!answer.text().contains("kv_transfer_params") && !answer.text().contains("\"error\""), "{path}");
            texts.push(said(&answer));
            fleet.assert_idle(path);
        }
        assert!(!texts[0].is_empty() && texts[0] == texts[1], "{path}: {texts:?}");
        for kind in [LegKind::Prefill, LegKind::Decode] {
            let legs = fleet.legs(kind);
            assert_eq!(legs.len(), 2 * (number + 1));
            assert!(legs.iter().all(|leg| leg.kind == kind && end_of(leg) == Some(LegEnd::Finished)), "{legs:?}");
        }
    }
    assert_eq!(fleet.gateway.metric_sum("loxilb_ai_pd_kv_params_found_total"), 4.0);
    assert_eq!(fleet.gateway.metric_sum("loxilb_pd_fallback_to_normal_total"), 0.0);
    fleet.assert_clean();
}

#[test]
fn a_stream_of_theirs_that_ends_early_is_told_to_be_broken() {
    let fleet = Fleet::start(&Plan { pairs: 1, ..Plan::of(EngineKind::Vllm) });
    for path in PATHS {
        let end = LegFault { action: Action::End, phase: Phase::Answering, status: 0, ms: 0, after: 3, times: 1 };
        fleet.decode[0].set_leg_fault(Some(end));
        let mut connection = Connection::open(fleet.listen).expect("the gateway listens");
        let posted = body(path, "the lake is deep", &json!({"stream": true}));
        connection.request("POST", path, &[], &posted).expect("the gateway reads");
        let mut answer = connection.head().expect("an answer begins");
        let whole = connection.rest(&mut answer);
        // Whether the client had a part of it by then is for the two connections to say; if so, it has no clean end.
        assert_eq!(whole, answer.status != 200, "{path}");
        assert!([200, 502].contains(&answer.status), "{path}: {}", answer.status);
        assert!(answer.text().contains("pd_decode_backend_died"), "{path}: {}", answer.text());
        fleet.assert_idle(path);
    }
}

#[test]
fn what_goes_on_from_a_stored_answer_or_is_answered_later_is_not_parted() {
    let fleet = Fleet::start(&Plan { pairs: 1, ..Plan::of(EngineKind::Vllm) });
    for more in [json!({"previous_response_id": "resp_1"}), json!({"background": true})] {
        let posted = body("/v1/responses", "the lake is deep", &more);
        assert_eq!(fleet.ask("/v1/responses", &posted).status, 200);
        let leg = fleet.legs(LegKind::Decode).pop().expect("it went to a decode engine");
        assert!(leg.kind == LegKind::Plain && leg.body == posted, "as it came");
    }
    assert!(fleet.legs(LegKind::Prefill).is_empty());
    assert_eq!(fleet.gateway.metric_sum("loxilb_pd_fallback_to_normal_total"), 2.0);
}

#[test]
fn engines_that_do_not_part_them_are_soon_asked_no_more() {
    let fleet =
        Fleet::start(&Plan { pairs: 1, engine: |options| options.no_params = true, ..Plan::of(EngineKind::Vllm) });
    for path in PATHS {
        let before = fleet.legs(LegKind::Prefill).len();
        for number in 0..6 {
            let answer = fleet.ask(path, &body(path, &format!("number {number}"), &json!({})));
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
        assert_eq!(fleet.legs(LegKind::Prefill).len() - before, 3, "{path}: three in a row are enough");
    }
}
