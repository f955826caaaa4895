//! Everything that can go wrong with either leg, at every phase, in every dialect, streamed and plain: what the client gets,
//! what both engines saw and when, what was counted of both legs, and that nothing is left.

mod play;
mod stage;
mod table;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread;

use loadgen::engine::{Action, LegEnd, LegFault, Phase};
use serde_json::json;

use super::common::client;
use super::common::pd::{Fleet, Plan, end_of};
use super::{CHAT, chat};
use stage::{Lane, Stage, sockets_of};
use table::{Cell, DIALECTS, Failure, impossible, product};

/// Rules of each dialect at the gateway that waits long, and at the one that does not.
const LANES: [usize; 2] = [3, 6];

/// Cells that wait to be played.
type Queue = Mutex<Vec<(usize, Cell)>>;

#[test]
fn whatever_happens_to_a_leg_is_told_to_everybody_and_nothing_is_left() {
    let stage = Stage::set();
    let sockets = [&stage.patient, &stage.hasty].map(sockets_of);
    let (cells, impossible): (Vec<Cell>, Vec<Cell>) = product().partition(|cell| impossible(*cell).is_none());
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    impossible.iter().filter_map(|cell| table::impossible(*cell)).for_each(|why| *reasons.entry(why).or_default() += 1);
    println!("{} cells; not there: {reasons:#?}", cells.len());
    let failed = Mutex::new(Vec::new());
    thread::scope(|scope| {
        let queue = |dialect, wanted: fn(Failure) -> bool| -> Queue {
            let mine = cells.iter().copied().enumerate().filter(|(_, cell)| cell.dialect == dialect);
            Mutex::new(mine.filter(|(_, cell)| wanted(cell.failure)).collect())
        };
        for dialect in DIALECTS {
            let refusals = queue(dialect, |failure| matches!(failure, Failure::Refuse | Failure::RefuseOne));
            let hangs = queue(dialect, |failure| failure == Failure::Hang);
            let others =
                queue(dialect, |failure| !matches!(failure, Failure::Hang | Failure::Refuse | Failure::RefuseOne));
            let (stage, failed) = (&stage, &failed);
            scope.spawn(move || {
                for (number, cell) in refusals.into_inner().expect("nobody panics here") {
                    try_cell(failed, cell, || play::play_refused(stage, cell, &format!("refused-{number}")));
                }
            });
            let queues: [(_, std::sync::Arc<Queue>, _); 2] =
                [(&stage.patient, others.into(), LANES[0]), (&stage.hasty, hangs.into(), LANES[1])];
            for (gateway, queue, lanes) in queues {
                for lane in 0..lanes {
                    let queue = std::sync::Arc::clone(&queue);
                    let name = format!("{dialect:?}-{lane}").to_lowercase();
                    scope.spawn(move || play_all(stage.lane(gateway, dialect, &name), &queue, failed));
                }
            }
        }
    });
    let failed = failed.into_inner().expect("nobody panics here");
    assert!(failed.is_empty(), "{} of {} cells: {failed:#?}", failed.len(), cells.len());
    stage.assert_nothing_is_left(sockets);
}

/// Plays cells in a lane until there are none.
fn play_all(mut lane: Lane<'_>, queue: &Queue, failed: &Mutex<Vec<Cell>>) {
    loop {
        let next = queue.lock().expect("nobody panics here").pop();
        let Some((number, cell)) = next else { return };
        if !try_cell(failed, cell, || play::play(&mut lane, cell, &format!("cell-{number}"))) {
            lane.forget();
        }
    }
}

/// Plays a cell; what fails is noted, and the others go on.
fn try_cell(failed: &Mutex<Vec<Cell>>, cell: Cell, play: impl FnOnce()) -> bool {
    let played = catch_unwind(AssertUnwindSafe(play)).is_ok();
    if !played {
        failed.lock().expect("nobody panics here").push(cell);
    }
    played
}

#[test]
fn a_prefill_leg_that_fails_is_tried_once_elsewhere() {
    for kind in super::KINDS {
        let fleet = Fleet::start(&Plan { pairs: 2, ..Plan::of(kind) });
        fleet.prefill[0].set_leg_fault(Some(LegFault::new(Action::Die, Phase::Computing)));
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

/// An engine closes a connection that was idle in the very moment in which the next request is sent on it.
#[test]
fn a_kept_connection_that_is_dead_costs_the_client_nothing() {
    for (kind, prefill) in super::KINDS.into_iter().flat_map(|kind| [(kind, true), (kind, false)]) {
        let config = "[shards]\ncores = [0]\n".to_owned();
        let fleet = Fleet::start(&Plan { pairs: 1, config, ..Plan::of(kind) });
        let mut connection = client::Connection::open(fleet.listen).expect("the gateway listens");
        let mut ask = |text: &str, stream: bool| {
            connection.request("POST", CHAT, &[], &chat(text, &json!({"stream": stream}))).expect("the gateway reads");
            connection.answer().expect("an answer")
        };
        assert_eq!(ask("connections are kept", false).status, 200);
        let engine = if prefill { &fleet.prefill[0] } else { &fleet.decode[0] };
        let once = LegFault { times: 1, ..LegFault::new(Action::Die, Phase::Arrival) };
        for stream in [true, false] {
            // A prefill leg may end after the answer: only then is its connection kept.
            fleet.assert_idle("both connections are kept");
            engine.set_leg_fault(Some(once));
            let answer = ask(&format!("one of them is dead, {stream}"), stream);
            assert_eq!(answer.status, 200, "{kind:?} prefill {prefill}: {}", answer.text());
        }
        assert_eq!(
            fleet.gateway.metric_sum("loxilb_pd_connect_retry_same_ep_total"),
            2.0,
            "{kind:?} prefill {prefill}"
        );
        assert_eq!(fleet.gateway.metric_sum("loxilb_pd_prefill_ep_died_total"), 0.0, "{kind:?} prefill {prefill}");
        assert_eq!(fleet.gateway.metric_sum("loxilb_pd_decode_ep_died_total"), 0.0, "{kind:?} prefill {prefill}");
        fleet.assert_idle("dead connections");
        assert!(fleet.engines().all(|engine| engine.stats().pd_violations == 0));
    }
}
