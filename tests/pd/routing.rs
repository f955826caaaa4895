//! Where the legs go: prefill by what is held, decode by load, and what is passed between them untouched.

use loadgen::engine::{EngineKind, EngineOptions, LegKind};
use serde_json::json;

use super::common::client;
use super::common::engines::StubEngine;
use super::common::pd::{Fleet, Plan, push_endpoint, said};
use super::common::wait_for;
use super::{CHAT, both_ways, chat};

/// LMCache under vLLM: nested parameters, and a host tier whose events weigh nothing.
fn with_lmcache(options: &mut EngineOptions) {
    options.nested_params = true;
    options.cpu_blocks = 512;
}

#[test]
fn nested_params_and_events_of_a_host_tier_change_nothing() {
    let fleet = Fleet::start(&Plan { engine: with_lmcache, ..Plan::of(EngineKind::Vllm) });
    both_ways(&fleet, EngineKind::Vllm);
    assert_eq!(fleet.gateway.metric_sum("loxilb_ai_pd_kv_params_found_total"), 2.0);
    assert_eq!(fleet.gateway.metric_sum("loxilb_ai_pd_kv_params_missing_total"), 0.0);
}

#[test]
fn pushed_blocks_are_met_under_one_id() {
    let fleet = Fleet::start(&Plan {
        engine: |options| options.nixl_push = true,
        rule: json!({"pdNixlPush": true}),
        prefill_endpoint: push_endpoint,
        ..Plan::of(EngineKind::Vllm)
    });
    both_ways(&fleet, EngineKind::Vllm);
}

#[test]
fn an_answer_without_params_is_decoded_plainly_and_counted() {
    let fleet = Fleet::start(&Plan { engine: |options| options.no_params = true, ..Plan::of(EngineKind::Vllm) });
    let body = chat("the lake is deep", &json!({"stream": true}));
    let answer = fleet.ask(CHAT, &body);
    assert_eq!((answer.status, said(&answer)), (200, super::alone(EngineKind::Vllm, &body)));
    assert_eq!(fleet.gateway.metric_sum("loxilb_ai_pd_kv_params_missing_total"), 1.0);
    let legs = fleet.legs(LegKind::Decode);
    assert_eq!(legs.iter().map(|leg| leg.kind).collect::<Vec<_>>(), [LegKind::Plain], "nothing was to be fetched");
}

#[test]
fn the_prefill_endpoint_is_the_one_that_holds_the_prefix() {
    let fleet = Fleet::start(&Plan::of(EngineKind::Vllm));
    let context = |group: usize| format!("group {group}: {}", "the lake is deep and the night is long ".repeat(40));
    let ask = |group: usize, turn: usize| {
        let body = chat(&format!("{} question {turn}", context(group)), &json!({"max_tokens": 2}));
        let answer = fleet.ask(CHAT, &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
    };
    wait_for("the model's files are loaded", || {
        ask(0, 0);
        let holds = fleet.gateway.metric_sum("loxilb_pd_kv_tier15_hits_total");
        (holds > 0.0).then_some(())
    });
    (1..6).for_each(|group| ask(group, 0));
    fleet.wait_for_inventory();
    let cached = || fleet.prefill.iter().map(|engine| engine.stats().cached_tokens).sum::<u64>();
    let asked = || fleet.prefill.iter().map(|engine| engine.stats().prompt_tokens).sum::<u64>();
    let (cached_before, asked_before) = (cached(), asked());
    let mut could_hit = 0;
    for turn in 1..9 {
        for group in 0..6 {
            ask(group, turn);
            could_hit += 1;
        }
        fleet.wait_for_inventory();
    }
    // What one engine alone would hit: every prompt but its last question and the begun block.
    let mean = (asked() - asked_before) as f64 / f64::from(could_hit);
    let possible = f64::from(could_hit) * (mean - 32.0);
    let hit = (cached() - cached_before) as f64;
    assert!(hit >= 0.95 * possible, "{hit} tokens hit of {possible} that could, of {mean} per prompt");
    let used = fleet.prefill.iter().filter(|engine| engine.stats().requests > 0).count();
    assert_eq!(used, 3, "the groups are spread over all prefill engines");
    assert!(fleet.decode.iter().all(|engine| engine.stats().requests > 0), "decode goes by load");
    fleet.assert_clean();
}

#[test]
fn a_context_that_ends_the_answer_needs_no_generation() {
    for stream in [true, false] {
        let fleet = Fleet::start(&Plan {
            pairs: 1,
            engine: |options| options.answer_tokens = 1,
            ..Plan::of(EngineKind::Trtllm)
        });
        let body = chat("the lake is deep", &json!({"stream": stream, "max_tokens": 40}));
        let answer = fleet.ask(CHAT, &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        let text = answer.text();
        assert!(!said(&answer).is_empty() && !text.contains("ctx_request_id") && !text.contains("prompt_token_ids"));
        assert_eq!(text.contains("[DONE]"), stream);
        assert!(fleet.legs(LegKind::Decode).is_empty());
        assert_eq!(fleet.gateway.metric_sum("loxilb_pd_trt_ctx_early_exit_total"), 1.0);
    }
}

#[test]
fn generation_legs_are_signed_where_the_rule_has_a_key() {
    let scratch = super::common::Scratch::new("auth-key");
    let path = scratch.path().join("key");
    std::fs::write(&path, "k3y\n").expect("the scratch directory is writable");
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&path, private).expect("the file is ours");
    let fleet = Fleet::start(&Plan {
        engine: |options| options.disagg_auth_key = Some("k3y".to_owned()),
        rule: json!({"pdAuthKeyFile": path}),
        ..Plan::of(EngineKind::Trtllm)
    });
    both_ways(&fleet, EngineKind::Trtllm);
}

#[test]
fn without_a_prefill_endpoint_whole_requests_go_to_whoever_does_those() {
    // A decode engine of SGLang refuses them.
    for kind in [EngineKind::Sglang, EngineKind::Vllm] {
        let fleet = Fleet::start(&Plan { prefill_endpoint: |_| json!({"weight": 0}), ..Plan::of(kind) });
        let whole = StubEngine::start();
        let (rule, at) = (fleet.listen, whole.address);
        let attach = json!({
            "serviceArguments": {"externalIP": rule.ip().to_string(), "port": rule.port(), "protocol": "tcp", "oper": 1},
            "endpoints": [{"endpointIP": at.ip().to_string(), "targetPort": at.port(), "weight": 1, "ep_role": 0}],
        });
        let attached = client::post(fleet.gateway.admin, "/netlox/v1/config/loadbalancer", &attach);
        assert_eq!(attached.status, 200, "{}", attached.text());
        let answer = fleet.ask(CHAT, &chat("the lake is deep", &json!({"max_tokens": 2})));
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert!(answer.header("x-kvlane-route").is_some_and(|route| route.contains("tier=rescue")), "{answer:?}");
        assert_eq!(whole.seen().len(), 1);
        assert!(fleet.engines().all(|engine| engine.legs().is_empty()));
        let rescued = fleet.gateway.metric("loxilb_ai_pd_tier_selected_total", &[("tier", "rescue")]);
        assert_eq!(rescued, Some(1.0));
    }
}
