//! The admission ladder: who is refused, who waits and in which order, and who leaves the queue.

use std::thread;
use std::time::{Duration, Instant};

use loadgen::engine::{Action, EngineKind, LegEnd, LegFault, LegKind, Phase};
use serde_json::json;

use super::common::client::{Answer, Connection};
use super::common::pd::{Fleet, Plan, end_of};
use super::common::wait_for;
use super::{CHAT, chat};

/// One pair of engines behind a ladder.
fn fleet(settings: &[(&'static str, &str)]) -> Fleet {
    let environment = settings.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    Fleet::start(&Plan { pairs: 1, environment, ..Plan::of(EngineKind::Vllm) })
}

/// Has prefill legs stand still until they are let go.
fn hold(fleet: &Fleet) {
    let hang = LegFault { action: Action::Hang, phase: Phase::Arrival, status: 0, ms: 0, after: 1, times: 1 };
    fleet.prefill[0].set_leg_fault(Some(hang));
}

/// Sends a request whose answer is not waited for.
fn begin(fleet: &Fleet, text: &str) -> Connection {
    let mut connection = Connection::open(fleet.listen).expect("the gateway listens");
    connection.request("POST", CHAT, &[], &chat(text, &json!({}))).expect("the gateway reads");
    connection
}

fn error(answer: &Answer) -> (u16, String) {
    (answer.status, answer.json()["error"].as_str().unwrap_or_default().to_owned())
}

fn parked(fleet: &Fleet) -> f64 {
    fleet.gateway.metric_sum("kvlane_pd_parked")
}

fn hold_one(fleet: &Fleet) -> Connection {
    hold(fleet);
    let held = begin(fleet, "the one that is held");
    wait_for("it is at the engine", || (fleet.legs(LegKind::Prefill).len() == 1).then_some(()));
    held
}

#[test]
fn beyond_its_places_an_endpoint_gets_nothing_and_the_client_is_told_when_to_come_again() {
    let fleet = fleet(&[("LLB_PD_MAX_INFLIGHT_PER_EP", "1")]);
    let held = hold_one(&fleet);
    let answer = fleet.ask(CHAT, &chat("too much", &json!({})));
    assert_eq!(error(&answer), (429, "pd_overloaded".to_owned()));
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(fleet.gateway.metric_sum("loxilb_pd_admission_shed_total"), 1.0);
    drop(held);
    fleet.assert_idle("the held one left");
    assert_eq!(fleet.ask(CHAT, &chat("there is room again", &json!({}))).status, 200);
}

#[test]
fn the_rule_s_own_bound_counts_both_legs() {
    let fleet = fleet(&[("LLB_PD_MAX_TOTAL_INFLIGHT", "1")]);
    let hang = LegFault { action: Action::Hang, phase: Phase::Answering, status: 0, ms: 0, after: 1, times: 1 };
    fleet.decode[0].set_leg_fault(Some(hang));
    let held = begin(&fleet, "its decode leg is held");
    wait_for("it decodes", || (fleet.legs(LegKind::Decode).len() == 1).then_some(()));
    assert_eq!(error(&fleet.ask(CHAT, &chat("too much", &json!({})))), (429, "pd_overloaded".to_owned()));
    drop(held);
    fleet.assert_idle("the held one left");
    assert_eq!(fleet.ask(CHAT, &chat("there is room again", &json!({}))).status, 200);
}

#[test]
fn those_who_wait_are_served_in_order_and_a_full_queue_refuses() {
    let fleet = fleet(&[("LLB_PD_MAX_INFLIGHT_PER_EP", "1"), ("LLB_PD_QUEUE_DEPTH_PER_EP", "3")]);
    let held = hold_one(&fleet);
    let mut waiting = Vec::new();
    for number in 0..3 {
        waiting.push(begin(&fleet, &format!("waiting {number}")));
        wait_for("it waits", || (parked(&fleet) == f64::from(number + 1)).then_some(()));
    }
    assert_eq!(error(&fleet.ask(CHAT, &chat("one too many", &json!({})))), (429, "pd_overloaded".to_owned()));
    assert_eq!(fleet.gateway.metric_sum("loxilb_pd_admission_overflow_shed_total"), 1.0);
    // One of those that wait leaves, and nobody is held up by it.
    drop(waiting.remove(1));
    wait_for("it left the queue", || (parked(&fleet) == 2.0).then_some(()));
    drop(held);
    for mut connection in waiting {
        assert_eq!(connection.answer().expect("an answer").status, 200);
    }
    let order: Vec<String> = fleet
        .legs(LegKind::Prefill)
        .iter()
        .filter(|leg| end_of(leg) == Some(LegEnd::Finished))
        .map(|leg| String::from_utf8_lossy(&leg.body).into_owned())
        .collect();
    assert_eq!(order.len(), 2);
    assert!(order[0].contains("waiting 0") && order[1].contains("waiting 2"), "{order:?}");
    assert_eq!(parked(&fleet), 0.0);
    fleet.assert_idle("the queue is empty");
}

#[test]
fn nobody_waits_for_ever_and_whoever_waits_for_a_dead_endpoint_is_told() {
    let mut fleet =
        fleet(&[("LLB_PD_MAX_INFLIGHT_PER_EP", "1"), ("LLB_PD_QUEUE_DEPTH_PER_EP", "8"), ("LLB_PD_MAX_PARK_SEC", "1")]);
    let held = hold_one(&fleet);
    let begun = Instant::now();
    assert_eq!(error(&fleet.ask(CHAT, &chat("patient", &json!({})))), (504, "pd_admission_park_timeout".to_owned()));
    assert!(begun.elapsed() >= Duration::from_secs(1));
    assert_eq!(parked(&fleet), 0.0);
    let mut waits = begin(&fleet, "its endpoint dies");
    wait_for("it waits", || (parked(&fleet) == 1.0).then_some(()));
    let listen = fleet.listen;
    fleet.prefill.remove(0).stop();
    // The held one finds its connection broken and no other endpoint; the waiting one hears of it.
    drop(held);
    let another = thread::spawn(move || {
        super::common::client::call(listen, "POST", CHAT, &chat("another", &json!({}))).expect("an answer").status
    });
    let answer = waits.answer().expect("an answer");
    assert!([502, 503, 504].contains(&answer.status), "{}", answer.text());
    assert!([429, 502, 503, 504].contains(&another.join().expect("no panic")));
    assert_eq!(parked(&fleet), 0.0);
}
