//! One cell: a request is sent, its legs are brought where they are to be, it happens, and everybody is asked what they saw.

use std::io::Read;
use std::time::{Duration, Instant};

use loadgen::engine::{Action, LegEnd, LegFault, LegView, Phase as At};
use serde_json::{Value, json};

use super::super::common::client::{Answer, Connection};
use super::super::common::pd::{end_of, ended_at, events};
use super::super::common::wait_for;
use super::super::{CHAT, chat};
use super::stage::{Lane, PATIENCE_SEC, Stage, endpoint, prefill_endpoint, refusing};
use super::table::{Beside, Cell, Client, Ends, Expected, Failure, Leg, Other, Phase, expected, refused};

/// Longest time that an engine hears nothing of what has ended its leg. No measurement, a machine may stand still: the
/// bench measures.
const HEARD_MAX: Duration = Duration::from_secs(5);

/// Times that a rule is posted anew whose dead endpoint was found dead by a probe, not by a request.
const REPOSTS: usize = 5;

/// The order that has a leg stand at a phase.
fn hold(phase: Phase) -> LegFault {
    match phase {
        Phase::Arrival => LegFault::new(Action::Hang, At::Arrival),
        Phase::Computing => LegFault::new(Action::Hang, At::Computing),
        Phase::Head => LegFault { after: 0, ..LegFault::new(Action::Hang, At::Answering) },
        Phase::Answering => LegFault::new(Action::Hang, At::Answering),
        Phase::Connect => unreachable!("what is not connected is not held"),
    }
}

/// The order by which it happens; none where it is the client's doing, or nothing more happens.
fn strike(cell: Cell) -> Option<LegFault> {
    let action = match cell.failure {
        Failure::Status(_) => Action::Status,
        Failure::Die => Action::Die,
        Failure::Cut => Action::End,
        Failure::Slow => Action::Slow,
        Failure::Hang | Failure::Leave | Failure::Refuse | Failure::RefuseOne => return None,
    };
    let status = if let Failure::Status(status) = cell.failure { status } else { 500 };
    Some(LegFault { action, status, ms: 40, ..hold(cell.phase) })
}

fn other_of(leg: Leg) -> Leg {
    if leg == Leg::Prefill { Leg::Decode } else { Leg::Prefill }
}

/// Plays a cell in a rule of its dialect.
pub fn play(lane: &mut Lane<'_>, cell: Cell, mark: &str) {
    let what = format!("{cell:?}");
    let expected = expected(cell);
    let slow = cell.failure == Failure::Slow;
    lane.order(cell.leg, mark, if slow { strike(cell) } else { Some(hold(cell.phase)) });
    lane.order(
        other_of(cell.leg),
        mark,
        match cell.other {
            Other::Free => None,
            Other::Computing => Some(hold(Phase::Computing)),
            Other::Midway => Some(hold(Phase::Answering)),
        },
    );
    let sent = Instant::now();
    let mut reading = Reading::of(lane, cell, mark);
    if !slow {
        bring_in_place(lane, cell, mark, &mut reading, &what);
    }
    let mut cause = Instant::now();
    if let Some(order) = strike(cell).filter(|_| !slow) {
        lane.order(cell.leg, mark, Some(order));
    }
    let got = if cell.failure == Failure::Leave {
        drop(reading);
        Client::Left
    } else {
        reading.outcome()
    };
    assert_eq!(got, expected.client, "{what}");
    if cell.failure == Failure::Hang {
        cause = sent + Duration::from_secs(PATIENCE_SEC);
    }
    assert_engines(lane, mark, &expected, cause, cell.failure == Failure::Hang, &what);
    for leg in [Leg::Prefill, Leg::Decode] {
        lane.order(leg, mark, None);
    }
    lane.settle(&expected.counted).unwrap_or_else(|error| panic!("{what}: {error}"));
}

/// Waits until both legs are where the cell wants them, and the client has what it is to have.
fn bring_in_place(lane: &Lane<'_>, cell: Cell, mark: &str, reading: &mut Reading, what: &str) {
    let held = |leg: Leg| lane.legs(leg, mark).iter().any(|leg| leg.held.is_some());
    let other = other_of(cell.leg);
    wait_for(&format!("{what}: the leg stands where it is to fail"), || held(cell.leg).then_some(()));
    match cell.beside() {
        Beside::Absent => {}
        Beside::Running if cell.other == Other::Free => {
            wait_for(&format!("{what}: the other leg has begun"), || {
                (!lane.legs(other, mark).is_empty()).then_some(())
            });
        }
        Beside::Running => {
            wait_for(&format!("{what}: the other leg stands"), || held(other).then_some(()));
        }
        Beside::Done => {
            let done = if other == Leg::Prefill { "prefill ok" } else { "decode ok" };
            if cell.client_has_all() {
                reading.rest();
            }
            wait_for(&format!("{what}: the other leg is done"), || {
                (lane.counted().get(done) == Some(&1)).then_some(())
            });
        }
    }
    if cell.client_has_some() {
        reading.begin();
    }
}

/// Both engines' view: which legs there were, how each ended, and when those did that were cut off.
fn assert_engines(lane: &Lane<'_>, mark: &str, expected: &Expected, cause: Instant, waited: bool, what: &str) {
    for (leg, ends) in [(Leg::Prefill, expected.prefill), (Leg::Decode, expected.decode)] {
        let legs = ended(lane, leg, mark, ends, what);
        for view in legs.iter().filter(|leg| end_of(leg) == Some(LegEnd::Cancelled)) {
            let at = ended_at(view).expect("it ended");
            assert!(at >= cause, "{what}: {leg:?} was cancelled {:?} before there was a reason", cause - at);
            let late = at - cause;
            assert!(waited || late < HEARD_MAX, "{what}: {leg:?} was cancelled {late:?} after the reason");
        }
    }
}

/// The legs of a role, once all have ended as they are to.
fn ended(lane: &Lane<'_>, leg: Leg, mark: &str, ends: Ends, what: &str) -> Vec<LegView> {
    let legs = wait_for(&format!("{what}: no leg goes on"), || {
        let legs = lane.legs(leg, mark);
        (legs.len() >= ends.least && legs.iter().all(|leg| leg.ended.is_some())).then_some(legs)
    });
    let as_expected = |leg: &LegView| end_of(leg).is_some_and(|end| ends.any_of.contains(&end));
    let right = (ends.least..=ends.count).contains(&legs.len()) && legs.iter().all(as_expected);
    let seen: Vec<_> = legs.iter().map(end_of).collect();
    assert!(right, "{what}: {leg:?} engines saw {seen:?}, not {ends:?}");
    legs
}

/// Plays a cell whose connections are refused, in a rule of its own.
pub fn play_refused(stage: &Stage, cell: Cell, mark: &str) {
    let what = format!("{cell:?}");
    let expected = refused(cell);
    let (pairs, dead) = (stage.pairs(cell.dialect), [refusing(), refusing()]);
    let mut endpoints = Vec::new();
    for place in 0..2 {
        for (leg, role) in [(Leg::Prefill, 1), (Leg::Decode, 2)] {
            let refuses = leg == cell.leg && (place == 0 || cell.failure == Failure::Refuse);
            endpoints.push(match leg {
                _ if refuses => {
                    let mut dead = endpoint(dead[place].1, role);
                    // It is never asked for it.
                    dead["nixl_port"] = json!(1);
                    dead
                }
                Leg::Prefill => prefill_endpoint(cell.dialect, &pairs.prefill[place]),
                Leg::Decode => endpoint(pairs.decode[place].http_addr, role),
            });
        }
    }
    for _ in 0..REPOSTS {
        let mut lane = stage.lane_over(&stage.patient, cell.dialect, mark, endpoints.clone());
        // Endpoints with nothing to do take turns.
        for turn in 0..4 {
            let mark = format!("{mark}-{turn}");
            lane.forget();
            let got = Reading::of(&lane, cell, &mark).outcome();
            assert_eq!(got, expected.client, "{what}");
            let struck = wait_for(&format!("{what}: it is counted"), || {
                let counted = lane.counted();
                let struck = counted.get("connect_failover").copied().unwrap_or(0);
                (got != Client::Whole || counted.contains_key("decode ok")).then_some(struck)
            });
            if struck == 0 {
                continue;
            }
            for (leg, ends) in [(Leg::Prefill, expected.prefill), (Leg::Decode, expected.decode)] {
                ended(&lane, leg, &mark, ends, &what);
            }
            lane.settle(&expected.counted).unwrap_or_else(|error| panic!("{what}: {error}"));
            return lane.close();
        }
        lane.close();
    }
    panic!("{what}: no connection was refused");
}

/// What the client reads.
struct Reading {
    connection: Connection,
    answer: Option<Answer>,
    /// Whether the end of the answer came, once it is known.
    whole: Option<bool>,
}

impl Reading {
    /// Sends the cell's request.
    fn of(lane: &Lane<'_>, cell: Cell, mark: &str) -> Self {
        let mut connection = Connection::open(lane.listen).expect("the gateway listens");
        let body = chat(&format!("the lake is deep, {mark}"), &json!({"stream": cell.stream}));
        connection.request("POST", CHAT, &[("X-Mark", mark)], &body).expect("the gateway reads");
        Reading { connection, answer: None, whole: None }
    }

    /// Reads the head and a first part of the body.
    fn begin(&mut self) {
        let mut answer = self.connection.head().expect("an answer begins");
        if answer.header("transfer-encoding").is_some() {
            answer.body = self.connection.chunk().expect("a chunk comes").expect("it is not the last");
        } else {
            answer.body = vec![0];
            self.connection.reader().read_exact(&mut answer.body).expect("a byte comes");
        }
        self.answer = Some(answer);
    }

    /// Reads the rest, as far as it comes.
    fn rest(&mut self) {
        if self.whole.is_some() {
            return;
        }
        if self.answer.is_none() {
            self.answer = self.connection.head().ok();
        }
        let Some(answer) = &mut self.answer else {
            self.whole = Some(false);
            return;
        };
        self.whole = Some(self.connection.rest(answer));
    }

    fn outcome(mut self) -> Client {
        self.rest();
        match &self.answer {
            None => Client::Torn,
            Some(answer) => judge(answer, self.whole == Some(true)),
        }
    }
}

/// What an answer is to its client. What is never right, whatever goes wrong, fails here: a refusal that is not whole, a
/// stream that ends in good order without having been told to its end, a broken one that says that it is done.
fn judge(answer: &Answer, whole: bool) -> Client {
    let text = answer.text();
    let error_of = |text: &str| {
        let json: Value = serde_json::from_str(text).ok()?;
        json["detail"].as_str().filter(|detail| !detail.is_empty())?;
        json["error"].as_str().map(str::to_owned)
    };
    if answer.status != 200 {
        assert!(whole, "a refusal is whole: {text}");
        assert!(answer.header("content-type").is_some_and(|kind| kind.starts_with("application/json")), "{text}");
        return match error_of(&text) {
            Some(error) => Client::Gateway(answer.status, error),
            None => Client::Engine(answer.status),
        };
    }
    if !answer.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream")) {
        if whole {
            assert!(answer.json()["choices"][0]["message"]["content"].is_string(), "{text}");
        }
        return if whole { Client::Whole } else { Client::Torn };
    }
    let events = events(&answer.body);
    let last = events.last().map(String::as_str).unwrap_or_default();
    match (whole, last) {
        (true, "[DONE]") => Client::Whole,
        (true, _) => panic!("a stream ended in good order without its last event: {text}"),
        (false, _) => {
            assert!(!text.contains("[DONE]"), "a broken stream says that it is done: {text}");
            error_of(last).map_or(Client::Torn, Client::Ended)
        }
    }
}
