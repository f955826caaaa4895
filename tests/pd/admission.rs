//! The admission ladder: who is refused, who waits and in which order, and who leaves the queue.

use std::thread;
use std::time::{Duration, Instant};

use loadgen::engine::{Action, EngineKind, LegEnd, LegFault, LegKind, Phase};
use serde_json::json;

use super::common::client::{self, Answer, Connection};
use super::common::pd::{Fleet, Plan, end_of};
use super::common::wait_for;
use super::{CHAT, TWO_SHARDS, chat, connection_on};

/// One pair of engines behind a ladder.
fn fleet(settings: &[(&'static str, &str)]) -> Fleet {
    pairs(1, "", settings)
}

fn pairs(pairs: usize, config: &str, settings: &[(&'static str, &str)]) -> Fleet {
    let environment = settings.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    Fleet::start(&Plan { pairs, environment, config: config.to_owned(), ..Plan::of(EngineKind::Vllm) })
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
        client::call(listen, "POST", CHAT, &chat("another", &json!({}))).expect("an answer").status
    });
    let answer = waits.answer().expect("an answer");
    assert!([502, 503, 504].contains(&answer.status), "{}", answer.text());
    assert!([429, 502, 503, 504].contains(&another.join().expect("no panic")));
    assert_eq!(parked(&fleet), 0.0);
}

/// Sends a request on a connection of one shard.
fn begin_on(fleet: &Fleet, shard: usize, text: &str) -> Connection {
    let mut connection = connection_on(fleet, shard);
    connection.request("POST", CHAT, &[], &chat(text, &json!({}))).expect("the gateway reads");
    connection
}

#[test]
fn the_places_of_an_endpoint_are_counted_over_all_shards() {
    let fleet = pairs(1, TWO_SHARDS, &[("LLB_PD_MAX_INFLIGHT_PER_EP", "1")]);
    for held_by in [0, 1] {
        hold(&fleet);
        let held = begin_on(&fleet, held_by, "the one that is held");
        wait_for("it is at the engine", || {
            fleet.legs(LegKind::Prefill).iter().any(|leg| leg.held.is_some()).then_some(())
        });
        for shard in [0, 1] {
            let answer = begin_on(&fleet, shard, "too much").answer().expect("an answer");
            assert_eq!(error(&answer), (429, "pd_overloaded".to_owned()), "held by {held_by}, asked {shard}");
            assert_eq!(answer.header("retry-after"), Some("1"));
        }
        drop(held);
        fleet.assert_idle("the held one left");
    }
    assert_eq!(fleet.gateway.metric_sum("loxilb_pd_admission_shed_total"), 4.0);
}

#[test]
fn over_two_shards_the_queue_is_bounded_as_one_and_each_shard_keeps_its_order() {
    let fleet = pairs(
        1,
        TWO_SHARDS,
        &[
            ("LLB_PD_MAX_INFLIGHT_PER_EP", "1"),
            ("LLB_PD_QUEUE_DEPTH_PER_EP", "6"),
            // Nobody's patience ends here, however slow the machine.
            ("LLB_PD_MAX_PARK_SEC", "60"),
        ],
    );
    let held = hold_one(&fleet);
    let mut waiting = Vec::new();
    for number in 0..6 {
        let shard = number % 2;
        waiting.push((shard, begin_on(&fleet, shard, &format!("shard {shard} number {number};"))));
        wait_for("it waits", || (parked(&fleet) == (number + 1) as f64).then_some(()));
    }
    for shard in [0, 1] {
        let answer = begin_on(&fleet, shard, "one too many").answer().expect("an answer");
        assert_eq!((error(&answer), answer.header("retry-after")), ((429, "pd_overloaded".to_owned()), Some("1")));
    }
    assert_eq!(fleet.gateway.metric_sum("loxilb_pd_admission_overflow_shed_total"), 2.0);
    // The first of one shard leaves: those behind it move up.
    drop(waiting.remove(0));
    wait_for("it left the queue", || (parked(&fleet) == 5.0).then_some(()));
    drop(held);
    for (_, connection) in &mut waiting {
        assert_eq!(connection.answer().expect("an answer").status, 200);
    }
    let served: Vec<String> = fleet
        .legs(LegKind::Prefill)
        .iter()
        .filter(|leg| end_of(leg) == Some(LegEnd::Finished))
        .map(|leg| String::from_utf8_lossy(&leg.body).into_owned())
        .collect();
    assert_eq!(served.len(), 5);
    for (shard, numbers) in [(0, vec![2, 4]), (1, vec![1, 3, 5])] {
        let of_shard = |number: &usize| served.iter().position(|body| body.contains(&format!("number {number};")));
        let places: Vec<_> = numbers.iter().map(of_shard).collect();
        assert!(places.is_sorted() && places.iter().all(Option::is_some), "shard {shard}: {places:?}");
    }
    assert_eq!(parked(&fleet), 0.0);
    fleet.assert_idle("the queue is empty");
}

#[test]
fn whoever_waits_on_another_shard_is_told_when_its_time_is_up() {
    let fleet = pairs(
        1,
        TWO_SHARDS,
        &[("LLB_PD_MAX_INFLIGHT_PER_EP", "1"), ("LLB_PD_QUEUE_DEPTH_PER_EP", "8"), ("LLB_PD_MAX_PARK_SEC", "1")],
    );
    hold(&fleet);
    let held = begin_on(&fleet, 0, "the one that is held");
    wait_for("it is at the engine", || (fleet.legs(LegKind::Prefill).len() == 1).then_some(()));
    let mut waiting = [0, 1].map(|shard| (Instant::now(), begin_on(&fleet, shard, "patient")));
    for (begun, connection) in &mut waiting {
        let answer = connection.answer().expect("an answer");
        assert_eq!(error(&answer), (504, "pd_admission_park_timeout".to_owned()));
        assert!(begun.elapsed() >= Duration::from_secs(1));
    }
    assert_eq!(parked(&fleet), 0.0);
    assert_eq!(fleet.legs(LegKind::Prefill).len(), 1, "nothing was sent for them");
    drop(held);
    fleet.assert_idle("the held one left");
}

/// A request in the queue of an endpoint that is taken out does not stay there with those whose places it waits for.
#[test]
fn whoever_waits_for_an_endpoint_that_is_taken_out_waits_for_another() {
    let fleet = pairs(
        2,
        TWO_SHARDS,
        &[("LLB_PD_MAX_INFLIGHT_PER_EP", "1"), ("LLB_PD_QUEUE_DEPTH_PER_EP", "8"), ("LLB_PD_MAX_PARK_SEC", "60")],
    );
    let hang = LegFault::new(Action::Hang, Phase::Arrival);
    fleet.prefill.iter().for_each(|engine| engine.set_leg_fault(Some(hang)));
    let held = [0, 1].map(|shard| begin_on(&fleet, shard, "held"));
    wait_for("both engines are full", || {
        fleet.prefill.iter().all(|engine| engine.legs().iter().any(|leg| leg.held.is_some())).then_some(())
    });
    // One on each shard: they wait for one endpoint each.
    let mut waiting = [0, 1].map(|shard| begin_on(&fleet, shard, &format!("waits on {shard}")));
    wait_for("they wait", || (parked(&fleet) == 2.0).then_some(()));
    let failing =
        client::post(fleet.prefill[0].http_addr, "/debug/fault", &json!({"fault": "health", "value": "fail"}));
    assert_eq!(failing.status, 200);
    wait_for("the endpoint is out", || (fleet.gateway.metric_sum("loxilb_healthy_endpoints") == 3.0).then_some(()));
    // Only the other engine goes on; its held request is served first, then both that wait.
    fleet.prefill[1].set_leg_fault(None);
    for connection in &mut waiting {
        assert_eq!(connection.answer().expect("an answer").status, 200);
    }
    assert_eq!(fleet.prefill[0].legs().len(), 1, "the endpoint that is out got no more");
    assert_eq!(parked(&fleet), 0.0);
    drop(held);
    fleet.assert_idle("the held ones left");
}
