//! Everything that can go wrong with either leg, at every phase, in every dialect: what the client gets, what both engines
//! saw, what was counted, and that nothing is left.

use std::io::Read;
use std::time::{Duration, Instant};

use loadgen::engine::{Action, EngineHandle, EngineKind, LegEnd, LegFault, LegKind, Phase};
use serde_json::{Value, json};

use super::common::client::{Answer, Connection};
use super::common::pd::{Fleet, Plan, end_of, ended_at, events, name_of};
use super::common::wait_for;
use super::{CHAT, chat};

/// Least time of a prefill leg here, and the longest silence of an answer.
const PATIENCE_SEC: u64 = 2;

/// What is done to a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// The engine answers with this status.
    Status(u16),
    /// It says nothing more.
    Hang,
    /// Its connection breaks.
    Die,
    /// It ends its answer in good order, too early.
    Cut,
    /// It pauses, and goes on.
    Slow,
    /// It says nothing more, and the client leaves.
    Leave,
}

/// What the client sees.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    /// The whole answer.
    Whole,
    /// An engine's own refusal.
    Engine(u16),
    /// The gateway's refusal.
    Gateway(u16, String),
    /// A stream that begins and ends with this error.
    Ended(String),
    /// An answer that breaks off.
    Torn,
    /// It left.
    Left,
}

/// One cell.
#[derive(Clone, Copy, Debug)]
struct Cell {
    leg: LegKind,
    failure: Failure,
    phase: Phase,
    stream: bool,
}

fn fault(cell: Cell) -> LegFault {
    let action = match cell.failure {
        Failure::Status(_) => Action::Status,
        Failure::Hang | Failure::Leave => Action::Hang,
        Failure::Die => Action::Die,
        Failure::Cut => Action::End,
        Failure::Slow => Action::Slow,
    };
    let status = if let Failure::Status(status) = cell.failure { status } else { 500 };
    LegFault { action, phase: cell.phase, status, ms: 40, after: 1, times: 0 }
}

/// All cells of a dialect.
fn cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for leg in [LegKind::Prefill, LegKind::Decode] {
        for stream in [true, false] {
            for phase in [Phase::Arrival, Phase::Computing, Phase::Answering] {
                let late = phase == Phase::Answering;
                let failures = [
                    (Failure::Status(422), !late),
                    (Failure::Status(500), !late),
                    (Failure::Hang, true),
                    (Failure::Die, true),
                    (Failure::Cut, late && leg == LegKind::Decode && stream),
                    (Failure::Slow, true),
                    (Failure::Leave, true),
                ];
                let possible = failures.into_iter().filter(|(_, possible)| *possible);
                cells.extend(possible.map(|(failure, _)| Cell { leg, failure, phase, stream }));
            }
        }
    }
    cells
}

fn prefill_failed(kind: EngineKind) -> String {
    if kind == EngineKind::Sglang { "pd_sg_prefill_failed".to_owned() } else { "pd_prefill_failed".to_owned() }
}

/// What a client may see; several where it hangs on who is faster.
fn expected(kind: EngineKind, cell: Cell) -> Vec<Outcome> {
    use Failure::{Cut, Die, Hang, Leave, Slow, Status};
    let at_once = kind == EngineKind::Sglang;
    let gateway = |status: u16, error: &str| vec![Outcome::Gateway(status, error.to_owned())];
    let late = cell.phase == Phase::Answering;
    match (cell.leg, cell.failure) {
        (_, Slow) => vec![Outcome::Whole],
        (_, Leave) => vec![Outcome::Left],
        (_, Status(422)) => vec![Outcome::Engine(422)],
        (LegKind::Prefill, Status(_)) => gateway(502, &prefill_failed(kind)),
        // The decode leg has everything by then: it ends well, unless the other's death is heard of first.
        (LegKind::Prefill, Hang) if late && at_once => vec![Outcome::Whole],
        (LegKind::Prefill, Die) if late && at_once => {
            let mut any = gateway(502, &prefill_failed(kind));
            any.extend([Outcome::Whole, Outcome::Torn, Outcome::Ended(prefill_failed(kind))]);
            any
        }
        (LegKind::Prefill, Hang) => gateway(504, "pd_prefill_timeout"),
        (LegKind::Prefill, Die | Cut) => gateway(502, &prefill_failed(kind)),
        (_, Status(status)) => vec![Outcome::Engine(status)],
        (_, Hang) if late && cell.stream => vec![Outcome::Ended("pd_idle_timeout".to_owned())],
        // Where all of it comes at once, the client has nothing yet.
        (_, Die | Cut) if late && cell.stream => {
            let mut any = gateway(502, "pd_decode_backend_died");
            any.push(Outcome::Ended("pd_decode_backend_died".to_owned()));
            any
        }
        (_, Hang | Die | Cut) if late => vec![Outcome::Torn],
        // The prefill leg waits for a decode leg that never comes for it.
        (_, Hang) if at_once && cell.phase == Phase::Arrival => gateway(504, "pd_prefill_timeout"),
        (_, Hang) => gateway(504, "pd_decode_timeout"),
        (_, Die | Cut) => gateway(502, "pd_decode_backend_died"),
    }
}

/// How the failing legs are counted: label `status`, and how many.
fn counted(kind: EngineKind, cell: Cell) -> Option<(&'static str, f64)> {
    let late_at_once = cell.phase == Phase::Answering && kind == EngineKind::Sglang && cell.leg == LegKind::Prefill;
    match cell.failure {
        _ if late_at_once => None,
        Failure::Slow => Some(("ok", 1.0)),
        Failure::Status(422) => Some(("rejected", 1.0)),
        Failure::Leave => Some(("cancelled", 1.0)),
        // A prefill leg is tried twice.
        Failure::Status(_) if cell.leg == LegKind::Prefill => Some(("failed", 2.0)),
        Failure::Status(_) => Some(("failed", 1.0)),
        Failure::Hang if cell.leg == LegKind::Prefill => Some(("timeout", 1.0)),
        Failure::Hang | Failure::Die | Failure::Cut => None,
    }
}

/// Reads an answer as far as it comes.
fn outcome(connection: &mut Connection) -> Outcome {
    let Ok(mut answer) = connection.head() else { return Outcome::Torn };
    let chunked = answer.header("transfer-encoding").is_some();
    let whole = if chunked {
        loop {
            match connection.chunk() {
                Ok(Some(mut chunk)) => answer.body.append(&mut chunk),
                Ok(None) => break true,
                Err(_) => break false,
            }
        }
    } else {
        let length: usize = answer.header("content-length").and_then(|length| length.parse().ok()).expect("a length");
        connection.read_some(length, &mut answer.body)
    };
    judge(&answer, whole)
}

fn judge(answer: &Answer, whole: bool) -> Outcome {
    let stream = answer.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
    let error_of = |text: &str| -> Option<String> {
        let json: Value = serde_json::from_str(text).ok()?;
        json["error"].as_str().map(str::to_owned)
    };
    if answer.status != 200 {
        assert!(whole, "a refusal is whole: {}", answer.text());
        return match error_of(&answer.text()) {
            Some(error) => Outcome::Gateway(answer.status, error),
            None => Outcome::Engine(answer.status),
        };
    }
    if !stream {
        return if whole { Outcome::Whole } else { Outcome::Torn };
    }
    let events = events(&answer.body);
    let last = events.last().map(String::as_str).unwrap_or_default();
    match (whole, last) {
        (true, "[DONE]") => Outcome::Whole,
        (true, _) => panic!("a stream ended in good order without its last event: {}", answer.text()),
        (false, _) => {
            assert!(!answer.text().contains("[DONE]"), "a broken stream says that it is done: {}", answer.text());
            error_of(last).map_or(Outcome::Torn, Outcome::Ended)
        }
    }
}

fn engines(fleet: &Fleet, leg: LegKind) -> &[EngineHandle] {
    if leg == LegKind::Prefill { &fleet.prefill } else { &fleet.decode }
}

fn count_of(fleet: &Fleet, leg: LegKind, status: &str) -> f64 {
    let phase = if leg == LegKind::Prefill { "prefill" } else { "decode" };
    fleet.gateway.metric("loxilb_ai_pd_requests_total", &[("phase", phase), ("status", status)]).expect("a series")
}

fn play(fleet: &Fleet, kind: EngineKind, cell: Cell, number: usize) {
    let what = format!("{} {cell:?}", name_of(kind));
    let expectation = counted(kind, cell);
    let before = expectation.map(|(status, _)| count_of(fleet, cell.leg, status));
    let seen: Vec<usize> = [LegKind::Prefill, LegKind::Decode].map(|leg| fleet.legs(leg).len()).into();
    engines(fleet, cell.leg).iter().for_each(|engine| engine.set_leg_fault(Some(fault(cell))));
    let mut connection = Connection::open(fleet.listen).expect("the gateway listens");
    let body = chat(&format!("the lake is deep, cell {number}"), &json!({"stream": cell.stream}));
    connection.request("POST", CHAT, &[], &body).expect("the gateway reads");
    let got = if cell.failure == Failure::Leave {
        let place = usize::from(cell.leg == LegKind::Decode);
        wait_for(&format!("{what}: the leg has begun"), || (fleet.legs(cell.leg).len() > seen[place]).then_some(()));
        let left = Instant::now();
        drop(connection);
        assert_left(fleet, kind, &seen, left, &what);
        Outcome::Left
    } else {
        outcome(&mut connection)
    };
    engines(fleet, cell.leg).iter().for_each(|engine| engine.set_leg_fault(None));
    assert!(expected(kind, cell).contains(&got), "{what}: {got:?}, expected one of {:?}", expected(kind, cell));
    fleet.assert_idle(&what);
    if let (Some((status, more)), Some(before)) = (expectation, before) {
        wait_for(&format!("{what}: {more} legs count as {status}"), || {
            (count_of(fleet, cell.leg, status) >= before + more).then_some(())
        });
    }
    assert_other_leg(fleet, kind, cell, &seen, &what);
}

/// Both engines see that the client left.
fn assert_left(fleet: &Fleet, kind: EngineKind, seen: &[usize], left: Instant, what: &str) {
    for (leg, before) in [LegKind::Prefill, LegKind::Decode].into_iter().zip(seen) {
        let legs = wait_for(&format!("{what}: no leg goes on"), || {
            let legs = fleet.legs(leg)[*before..].to_vec();
            legs.iter().all(|leg| leg.ended.is_some()).then_some(legs)
        });
        for leg in legs {
            let late = ended_at(&leg).expect("it ended").saturating_duration_since(left);
            // A decode engine may hear of its prefill engine's end first.
            assert!(end_of(&leg) != Some(LegEnd::Refused) || kind == EngineKind::Sglang, "{what}: {leg:?}");
            // Not a measurement: a machine may stand still. The bench measures.
            assert!(late < Duration::from_secs(5), "{what}: {late:?} after the client left");
        }
    }
}

/// The leg that did not fail is not begun, ended well, or was cancelled: never left to itself.
fn assert_other_leg(fleet: &Fleet, kind: EngineKind, cell: Cell, seen: &[usize], what: &str) {
    let (other, before) = match cell.leg {
        LegKind::Prefill => (LegKind::Decode, seen[1]),
        _ => (LegKind::Prefill, seen[0]),
    };
    let legs = wait_for(&format!("{what}: no leg goes on"), || {
        let legs = fleet.legs(other)[before..].to_vec();
        legs.iter().all(|leg| leg.ended.is_some()).then_some(legs)
    });
    let hurts = !matches!(cell.failure, Failure::Slow | Failure::Leave);
    if cell.leg == LegKind::Prefill && hurts && kind != EngineKind::Sglang {
        assert!(legs.is_empty(), "{what}: nothing is decoded that was not prefilled: {legs:?}");
    }
    for leg in &legs {
        let end = end_of(leg).expect("nothing runs");
        let may = [LegEnd::Finished, LegEnd::Cancelled];
        // A decode engine whose prefill engine failed says so, if it is heard.
        let refused = kind == EngineKind::Sglang && end == LegEnd::Refused;
        assert!(may.contains(&end) || refused, "{what}: {leg:?}");
    }
}

fn matrix(kind: EngineKind) {
    let fleet = Fleet::start(&Plan {
        pairs: 2,
        engine: |options| options.pd_wait_ms = 60_000,
        environment: vec![
            ("LLB_PD_PREFILL_TIMEOUT_SEC", PATIENCE_SEC.to_string()),
            // Engines fail here again and again, and are to be asked all the same.
            ("LLB_PD_ORIGIN_ERR_THRESHOLD", "0".to_owned()),
        ],
        config: format!("stream_idle_timeout_ms = {}\n", PATIENCE_SEC * 1000),
        ..Plan::of(kind)
    });
    for (number, cell) in cells().into_iter().enumerate() {
        play(&fleet, kind, cell, number);
    }
    assert_eq!(fleet.gateway.metric_sum("kvlane_pd_in_flight"), 0.0);
    assert_eq!(fleet.gateway.metric_sum("kvlane_pd_parked"), 0.0);
    wait_for("no client connection is left", || {
        (fleet.gateway.metric_sum("kvlane_shard_connections") == 0.0).then_some(())
    });
    assert_eq!(fleet.gateway.metric_sum("kvlane_shard_panics_total"), 0.0);
    refuse_connections(fleet, kind);
}

/// Engines that are gone: another endpoint takes over, and without one the client is told.
fn refuse_connections(mut fleet: Fleet, kind: EngineKind) {
    fleet.prefill.remove(0).stop();
    fleet.decode.remove(0).stop();
    for stream in [true, false] {
        let body = chat("the lake is deep, one pair is left", &json!({"stream": stream}));
        assert_eq!(fleet.ask(CHAT, &body).status, 200, "{kind:?}: the pair that is left serves");
    }
    fleet.assert_idle("one pair");
    fleet.prefill.remove(0).stop();
    let answer = fleet.ask(CHAT, &chat("the lake is deep, nobody computes", &json!({})));
    assert_eq!((answer.status, answer.json()["error"].as_str()), (503, Some("pd_pool_unavailable")));
    fleet.decode.remove(0).stop();
    let answer = fleet.ask(CHAT, &chat("the lake is deep, nobody is there", &json!({"stream": true})));
    assert_eq!((answer.status, answer.json()["error"].as_str()), (503, Some("pd_pool_unavailable")));
    assert!(fleet.gateway.metric_sum("loxilb_pd_connect_failover_total") >= 2.0);
    assert_eq!(fleet.gateway.metric_sum("kvlane_endpoint_in_flight"), 0.0);
}

#[test]
fn whatever_happens_to_vllm_s_legs_is_told_and_nothing_is_left() {
    matrix(EngineKind::Vllm);
}

#[test]
fn whatever_happens_to_sglang_s_legs_is_told_and_nothing_is_left() {
    matrix(EngineKind::Sglang);
}

#[test]
fn whatever_happens_to_trtllm_s_legs_is_told_and_nothing_is_left() {
    matrix(EngineKind::Trtllm);
}

#[test]
fn a_prefill_leg_that_fails_is_tried_once_elsewhere() {
    for kind in super::KINDS {
        let fleet = Fleet::start(&Plan { pairs: 2, ..Plan::of(kind) });
        let die = LegFault { action: Action::Die, phase: Phase::Computing, status: 0, ms: 0, after: 1, times: 0 };
        fleet.prefill[0].set_leg_fault(Some(die));
        for number in 0..12 {
            let body = chat(&format!("number {number} of the lake"), &json!({"stream": number % 2 == 0}));
            let answer = fleet.ask(CHAT, &body);
            assert_eq!(answer.status, 200, "{kind:?}: {}", answer.text());
        }
        assert!(fleet.gateway.metric_sum("loxilb_pd_prefill_retry_total") >= 1.0, "{kind:?}");
        let legs = fleet.prefill[0].legs();
        assert!(!legs.is_empty() && legs.iter().all(|leg| end_of(leg) == Some(LegEnd::Died)), "{kind:?}: {legs:?}");
        fleet.assert_idle("a retry");
        assert_eq!(fleet.prefill[1].stats().pd_held, 0);
        for engine in fleet.engines() {
            assert_eq!(engine.stats().pd_violations, 0, "{kind:?}: each try has a name of its own");
        }
    }
}

#[test]
fn a_decode_answer_without_a_byte_is_no_answer() {
    let fleet = Fleet::start(&Plan { pairs: 1, ..Plan::of(EngineKind::Vllm) });
    let end = LegFault { action: Action::End, phase: Phase::Answering, status: 0, ms: 0, after: 0, times: 0 };
    fleet.decode[0].set_leg_fault(Some(end));
    let answer = fleet.ask(CHAT, &chat("the lake", &json!({"stream": true})));
    assert_eq!((answer.status, answer.json()["error"].as_str()), (502, Some("pd_decode_backend_died")));
    assert_eq!(fleet.gateway.metric_sum("loxilb_pd_decode_zero_byte_eof_total"), 1.0);
    fleet.assert_idle("no byte");
}

impl Connection {
    /// Reads a body of a known length; false when it ends early.
    fn read_some(&mut self, length: usize, body: &mut Vec<u8>) -> bool {
        let mut part = vec![0; length];
        let mut have = 0;
        while have < length {
            match self.reader().read(&mut part[have..]) {
                Ok(count @ 1..) => have += count,
                Ok(0) | Err(_) => break,
            }
        }
        body.extend_from_slice(&part[..have]);
        have == length
    }
}
