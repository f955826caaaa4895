//! Requests that a decode engine does alone: short ones, and those of which it holds nearly all.

use loadgen::engine::{Action, EngineHandle, EngineKind, LegEnd, LegFault, LegKind, Phase};
use serde_json::{Value, json};

use super::common::client::Answer;
use super::common::pd::{Fleet, Plan, end_of, said};
use super::common::wait_for;
use super::{CHAT, chat};

/// Where a decode engine's events are.
fn events_of(engine: &EngineHandle) -> Value {
    let (events, replay) = (engine.event_addr.expect("it publishes"), engine.replay_addr.expect("it replays"));
    json!({"kvZmqPort": events.port(), "kvReplayPort": replay.port()})
}

fn bypassed(fleet: &Fleet, reason: &str) -> f64 {
    fleet.gateway.metric("kvlane_pd_bypassed_total", &[("reason", reason)]).expect("the rule has the series")
}

fn ask(fleet: &Fleet, text: &str, more: &Value) -> Answer {
    let answer = fleet.ask(CHAT, &chat(text, more));
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer
}

fn route(answer: &Answer) -> &str {
    answer.header("x-kvlane-route").expect("the route is told")
}

fn part<'a>(answer: &'a Answer, name: &str) -> Option<&'a str> {
    route(answer).split("; ").find_map(|part| part.strip_prefix(name)?.strip_prefix('='))
}

/// Some 300 tokens.
fn long(name: &str) -> String {
    format!("{name}: {}", "the lake is deep and the night is long ".repeat(30))
}

/// Waits until prompts are keyed, the first of a model only ask for its files, and events of decode engines come.
fn wait_for_keys(fleet: &Fleet) {
    wait_for("a prompt that was sent before goes straight to where it is", || {
        ask(fleet, &long("warm"), &json!({}));
        (bypassed(fleet, "held") > 0.0).then_some(())
    });
}

#[test]
fn short_prompts_go_straight_to_a_decode_engine_as_they_came() {
    for kind in [EngineKind::Vllm, EngineKind::Trtllm] {
        let rule = json!({"pdBypass": "short", "pdBypassTokens": 100});
        let fleet = Fleet::start(&Plan { pairs: 2, rule, ..Plan::of(kind) });
        for stream in [true, false] {
            let more = json!({"stream": stream});
            let body = chat("a short one", &more);
            let answer = ask(&fleet, "a short one", &more);
            assert_eq!(said(&answer), super::alone(kind, &body));
            assert_eq!((part(&answer, "tier"), part(&answer, "reason")), (Some("bypass"), Some("short")));
            let leg = fleet.legs(LegKind::Decode).pop().expect("it went there");
            assert!(
                leg.kind == LegKind::Plain && leg.body == body && end_of(&leg) == Some(LegEnd::Finished),
                "{leg:?}"
            );
            fleet.assert_idle("alone");
        }
        assert!(fleet.legs(LegKind::Prefill).is_empty());
        assert_eq!((bypassed(&fleet, "short"), bypassed(&fleet, "held")), (2.0, 0.0));
        let answer = ask(&fleet, &long("a long one"), &json!({}));
        assert_ne!(part(&answer, "tier"), Some("bypass"));
        assert_eq!(fleet.legs(LegKind::Prefill).len(), 1, "{kind:?}: {}", route(&answer));
        fleet.assert_idle("both legs");
        fleet.assert_clean();
    }
}

#[test]
fn by_default_every_prompt_goes_through_both_legs_and_nobody_listens_to_decode_engines() {
    let fleet = Fleet::start(&Plan { pairs: 1, ..Plan::of(EngineKind::Vllm) });
    ask(&fleet, "a short one", &json!({}));
    assert_eq!(fleet.legs(LegKind::Prefill).len(), 1);
    assert_eq!((bypassed(&fleet, "short"), bypassed(&fleet, "held")), (0.0, 0.0));
    let parity = fleet.gateway.api("/config/ai/kv/parity").json();
    let listened: Vec<_> = parity["parity"].as_array().expect("a list").iter().map(|one| &one["ep_idx"]).collect();
    assert_eq!(listened, [&json!(0)], "the prefill endpoint alone");
}

#[test]
fn a_conversation_that_its_decode_engine_holds_goes_on_there_alone() {
    let rule = json!({"pdBypass": "held", "pdBypassTokens": 100});
    let fleet = Fleet::start(&Plan { pairs: 2, rule, decode_endpoint: events_of, ..Plan::of(EngineKind::Vllm) });
    wait_for_keys(&fleet);
    let first = ask(&fleet, &long("a conversation"), &json!({}));
    assert!(part(&first, "prefill_ms").is_some(), "it goes through both legs: {}", route(&first));
    let decode = part(&first, "decode_idx").expect("a decode leg").to_owned();
    fleet.assert_idle("the first turn");
    let before = bypassed(&fleet, "held");
    let next = wait_for("the decode engine's events have come", || {
        let next = ask(&fleet, &(long("a conversation") + "and then?"), &json!({}));
        (part(&next, "tier") == Some("bypass")).then_some(next)
    });
    assert_eq!((part(&next, "reason"), part(&next, "decode_idx")), (Some("held"), Some(decode.as_str())));
    let tokens = part(&next, "tokens").and_then(|tokens| tokens.split_once('/')).expect("held of all");
    let [held, all] = [tokens.0, tokens.1].map(|count| count.parse::<u64>().expect("a number"));
    assert!(held > 200 && all - held <= 100 && all > held, "{tokens:?}");
    let cached = next.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert_eq!(cached, Some(held), "what was known is what the engine found");
    assert_eq!(next.json()["usage"]["prompt_tokens"], all);
    assert_eq!((bypassed(&fleet, "held") - before, bypassed(&fleet, "short")), (1.0, 0.0));
    assert_eq!(fleet.legs(LegKind::Decode).pop().expect("it went there").kind, LegKind::Plain);
    // For everything but this, a decode endpoint has no inventory and is nobody's target.
    assert!(fleet.gateway.metric_sum("kvlane_pd_decode_blocks") > 0.0);
    for endpoint in ["1", "3"] {
        let path = format!("/config/ai/kv/inventory?service_id={}&ep_idx={endpoint}", fleet.service);
        assert_eq!(fleet.gateway.api(&path).status, 404, "{path}");
        for series in ["loxilb_pd_kv_tier15_hits_total", "loxilb_pd_kv_tier15_spills_total", "loxilb_pd_kv_blocks"] {
            let value = fleet.gateway.metric(series, &[("ep_idx", endpoint)]).unwrap_or(0.0);
            assert_eq!(value, 0.0, "{series} of {endpoint}");
        }
    }
    fleet.assert_idle("the last turn");
    fleet.assert_clean();
}

#[test]
fn a_decode_engine_that_fails_before_a_word_costs_the_bypass_alone() {
    let rule = json!({"pdBypass": "short", "pdBypassTokens": 100});
    let fleet = Fleet::start(&Plan { pairs: 1, rule, ..Plan::of(EngineKind::Vllm) });
    let failed = || fleet.gateway.metric_sum("kvlane_pd_bypass_failed_total");
    for (number, (action, status)) in
        [(Action::Status, 500), (Action::Status, 503), (Action::Die, 0)].into_iter().enumerate()
    {
        let fault = LegFault { action, phase: Phase::Computing, status, ms: 0, after: 0, times: 1 };
        fleet.decode[0].set_leg_fault(Some(fault));
        let text = format!("number {number}");
        let answer = ask(&fleet, &text, &json!({"stream": number == 0}));
        assert_eq!(said(&answer), super::alone(EngineKind::Vllm, &chat(&text, &json!({"stream": number == 0}))));
        if action == Action::Status {
            assert!(part(&answer, "prefill_ms").is_some(), "both legs did it: {}", route(&answer));
        }
        fleet.assert_idle("after a failure");
    }
    // A connection that was kept and ended may just have been idle for too long: the same endpoint once more.
    let again = fleet.gateway.metric_sum("loxilb_pd_connect_retry_same_ep_ok_total");
    assert_eq!(failed() + again, 3.0);
    fleet.assert_clean();
}

#[test]
fn the_break_even_is_learned_from_what_goes_through_both_legs() {
    let rule = json!({"pdBypass": "short"});
    let fleet = Fleet::start(&Plan { pairs: 1, rule, ..Plan::of(EngineKind::Vllm) });
    // To be moved takes long here: as if the network were slow.
    let slow = LegFault { action: Action::Slow, phase: Phase::Arrival, status: 0, ms: 100, after: 0, times: 0 };
    fleet.decode[0].set_leg_fault(Some(slow));
    assert_eq!(fleet.gateway.metric_sum("kvlane_pd_break_even_tokens"), 0.0, "nothing is known yet");
    let mut asked = 0;
    wait_for("a short prompt goes straight", || {
        asked += 1;
        let answer = ask(&fleet, &format!("number {asked}"), &json!({"stream": true}));
        (part(&answer, "tier") == Some("bypass")).then_some(())
    });
    assert!(asked > 16, "{asked}: both ways are learned first");
    assert!(fleet.gateway.metric_sum("kvlane_pd_break_even_tokens") > 0.0);
    fleet.assert_idle("learned");
    fleet.assert_clean();
}
