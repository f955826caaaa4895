use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

/// What happens to a stream, in the tables below. Payloads are texts.
#[derive(Clone, Copy, Debug)]
enum In {
    Connected,
    Lost,
    Live(u64, &'static str),
    Replayed(u64, &'static str),
    Ended,
    TimedOut,
    Failed,
    Expired,
}

use In::*;

/// Runs the inputs and checks what comes out, spelled: `a` apply, `clear`, `ask N`, `stop`.
fn check(has_replay: bool, inputs: &[In], expected: &str, eligible: bool) -> Stream {
    check_from(Stream::new(has_replay), inputs, expected, eligible)
}

fn check_from(mut stream: Stream, inputs: &[In], expected: &str, eligible: bool) -> Stream {
    let mut out = Vec::new();
    let mut act = |action: Action<'_>| {
        out.push(match action {
            Action::Apply(_, payload) => String::from_utf8(payload.to_vec()).unwrap(),
            Action::Clear => "clear".to_owned(),
            Action::Replay(from) => format!("ask{from}"),
            Action::StopReplay => "stop".to_owned(),
            Action::Proven => "proven".to_owned(),
            Action::Doubt => "doubt".to_owned(),
        });
    };
    for input in inputs {
        match *input {
            Connected => stream.connected(&mut act),
            Lost => stream.lost(&mut act),
            Live(seq, payload) => stream.live(seq, payload.as_bytes(), &mut act),
            Replayed(seq, payload) => stream.replayed(seq, payload.as_bytes(), &mut act),
            Ended => stream.replay_ended(&mut act),
            TimedOut => stream.replay_timed_out(&mut act),
            Failed => stream.replay_failed(&mut act),
            Expired => stream.expired(&mut act),
        }
    }
    assert_eq!(out.join(" "), expected, "{inputs:?}");
    assert_eq!(stream.is_eligible(), eligible, "{inputs:?}");
    stream
}

#[test]
fn without_replay() {
    check(false, &[], "", false);
    check(false, &[Connected], "", true);
    check(false, &[Connected, Live(7, "a"), Live(8, "b")], "a b", true);
    // Lost for long: given up, once; who is there loses nothing.
    check(false, &[Connected, Live(7, "a"), Lost, Expired, Expired], "a clear", false);
    check(false, &[Connected, Live(7, "a"), Lost, Expired, Connected, Live(8, "b")], "a clear b", true);
    check(false, &[Connected, Live(7, "a"), Lost, Connected, Expired, Live(8, "b")], "a b", true);
    check(false, &[Expired, Connected, Live(7, "a"), Expired], "a", true);
    // Lost: kept aside. Back: continued, behind a gap, restarted.
    check(false, &[Connected, Live(7, "a"), Lost], "a", false);
    check(false, &[Connected, Live(7, "a"), Lost, Connected], "a", false);
    check(false, &[Connected, Live(7, "a"), Lost, Connected, Live(8, "b")], "a b", true);
    check(false, &[Connected, Live(7, "a"), Lost, Connected, Live(9, "b")], "a clear b", true);
    check(false, &[Connected, Live(7, "a"), Lost, Connected, Live(0, "b")], "a clear b", true);
    check(false, &[Connected, Live(7, "a"), Lost, Connected, Live(7, "b")], "a clear b", true);
    check(false, &[Connected, Live(7, "a"), Lost, Connected, Live(7, "a")], "a", true);
    // A gap and a restart on one connection.
    check(false, &[Connected, Live(0, "a"), Live(2, "b"), Live(3, "c")], "a clear b c", true);
    let stream = check(false, &[Connected, Live(4, "a"), Live(0, "b"), Live(1, "c")], "a clear b c", true);
    assert_eq!(stream.tally(), Tally { restarts: 1, ..Tally::default() });
    // What is still read after a loss belongs to the old connection and proves nothing.
    check(false, &[Connected, Live(0, "a"), Lost, Live(1, "b")], "a b", false);
    check(false, &[Connected, Live(0, "a"), Live(0, "a"), Live(1, "b")], "a b", true);
}

/// A stream that a file says has had "a" as number 7 last, and all before it.
fn resumed(has_replay: bool) -> Stream {
    Stream::resumed(has_replay, Some((7, Print::of(b"a"))), true, false)
}

#[test]
fn what_was_taken_up_counts_until_the_first_number_shows_a_restart() {
    check_from(resumed(false), &[], "", false);
    check_from(resumed(false), &[Connected], "", true);
    let whole = |inputs: &[In], expected: &str| check_from(resumed(false), inputs, expected, true).is_whole();
    assert!(whole(&[Connected, Live(8, "b"), Live(9, "c")], "proven b c"), "nothing was missed");
    assert!(whole(&[Connected, Live(7, "a"), Live(8, "b")], "proven b"));
    assert!(!whole(&[Connected, Live(10, "b"), Live(11, "c")], "doubt b c"), "it stays, in doubt");
    assert!(!whole(&[Connected, Live(10, "b"), Live(12, "c")], "doubt b doubt c"));
    assert!(whole(&[Connected, Live(0, "x"), Live(1, "y")], "clear x y"), "restarted");
    assert!(!whole(&[Connected, Live(7, "x")], "clear x"));
    assert!(!whole(&[Connected, Live(10, "b"), Live(3, "x")], "doubt b clear x"));
    // Another connection is no longer believed without proof.
    check_from(resumed(false), &[Connected, Lost, Connected], "", false);
    check_from(resumed(false), &[Connected, Lost, Connected, Live(8, "b")], "b", true);
    check_from(resumed(false), &[Connected, Lost, Connected, Live(9, "b")], "clear b", true);
    // What was unproven before is not proven by what follows.
    let unproven = || Stream::resumed(false, Some((7, Print::of(b"a"))), true, true);
    assert!(!check_from(unproven(), &[Connected, Live(8, "b")], "b", true).is_whole());
    check_from(unproven(), &[Connected, Live(9, "b")], "doubt b", true);
    // A clear left nothing in doubt: a gap clears again.
    let mut stream = check_from(resumed(false), &[Connected, Live(10, "b")], "doubt b", true);
    stream.settle();
    check_from(stream, &[Live(12, "c")], "clear c", true);
}

#[test]
fn a_replay_proves_what_was_taken_up_and_brings_what_was_missed() {
    check_from(resumed(true), &[Connected], "ask7", true);
    let whole = |inputs: &[In], expected: &str| check_from(resumed(true), inputs, expected, true).is_whole();
    let missed = [Connected, Replayed(7, "a"), Replayed(8, "b"), Ended, Live(9, "c")];
    assert!(whole(&missed, "ask7 proven b stop c"));
    assert!(whole(&[Connected, Replayed(7, "a")], "ask7 proven"), "it counts all the time");
    // Another process, which said something else under that number, or nothing.
    let restarted = "ask7 clear ask0 x stop";
    assert!(whole(&[Connected, Replayed(7, "x"), Replayed(0, "x"), Ended], restarted));
    assert!(whole(&[Connected, Ended, Replayed(0, "x"), Ended], restarted));
    // No replay after all, or one that begins too late.
    assert!(!whole(&[Connected, Live(9, "b"), Failed], "ask7 stop doubt b"));
    assert!(whole(&[Connected, Live(8, "b"), Failed], "ask7 stop proven b"));
    assert!(whole(&[Connected, Live(0, "x"), Live(1, "y"), Failed], "ask7 stop clear x y"), "restarted");
    assert!(whole(&[Connected, Failed, Live(0, "x"), Live(1, "y")], "ask7 stop clear x y"), "restarted");
    assert!(!whole(&[Connected, Replayed(9, "b"), Replayed(10, "c"), Ended], "ask7 doubt b c stop"));
}

#[test]
fn a_late_joiner_gets_the_history_first() {
    let begin = [Connected, Live(2, "c"), Replayed(0, "a"), Replayed(1, "b"), Replayed(2, "c"), Ended];
    check(true, &begin, "ask0 a b c stop", true);
    // The replay was ahead of the live stream.
    check(true, &[&begin[..], &[Live(2, "c"), Live(3, "d")]].concat(), "ask0 a b c stop d", true);
    check(
        true,
        &[Connected, Replayed(0, "a"), Replayed(1, "b"), Ended, Live(0, "a"), Live(1, "b"), Live(2, "c")],
        "ask0 a b stop c",
        true,
    );
    // Nothing happened yet, then something does.
    check(true, &[Connected, Ended, Live(0, "a")], "ask0 stop a", true);
    check(true, &[Connected, Live(0, "a"), Ended], "ask0 stop a", true);
    // It does before the subscription counts.
    check(true, &[Connected, Live(1, "b"), Ended], "ask0 stop ask0", true);
    let late = [Connected, Live(1, "b"), Ended, Replayed(0, "a"), Replayed(1, "b"), Ended];
    check(true, &late, "ask0 stop ask0 a b stop", true);
    // An engine that keeps nothing is not asked for ever.
    check(true, &[Connected, Live(1, "b"), Ended, Ended, Live(2, "c")], "ask0 stop ask0 stop clear b c", true);
    // The engine's ring is shorter than its history.
    let stream = check(true, &[Connected, Replayed(5, "a"), Ended], "ask0 a stop", true);
    assert_eq!((stream.tally().incomplete, stream.tally().replays), (1, 1));
}

#[test]
fn without_an_answer_the_live_batches_are_applied() {
    check(true, &[Connected, Live(4, "a"), Failed, Live(5, "b")], "ask0 stop a b", true);
    check(true, &[Connected, Live(4, "a"), TimedOut, TimedOut], "ask0 ask0 stop a", true);
    // A later gap asks again, and is a gap if that fails too.
    check(true, &[Connected, Failed, Live(0, "a"), Live(2, "b"), Failed], "ask0 stop a ask0 stop clear b", true);
    check(true, &[Connected, Failed, Live(0, "a"), Lost, Connected], "ask0 stop a ask0", false);
    // Back without replay: the first batch decides.
    check(true, &[Connected, Failed, Live(0, "a"), Lost, Connected, Failed], "ask0 stop a ask0 stop", false);
    check(
        true,
        &[Connected, Failed, Live(0, "a"), Lost, Connected, Failed, Live(1, "b")],
        "ask0 stop a ask0 stop b",
        true,
    );
    let gap = [Connected, Failed, Live(0, "a"), Lost, Connected, Failed, Live(4, "e")];
    check(true, &gap, "ask0 stop a ask0 stop ask0", false);
    check(true, &[&gap[..], &[Failed]].concat(), "ask0 stop a ask0 stop ask0 stop clear e", true);
}

const UP: [In; 4] = [Connected, Ended, Live(0, "a"), Live(1, "b")];

#[test]
fn a_gap_is_filled_by_replay() {
    let gap = [&UP[..], &[Live(4, "e")]].concat();
    check(true, &gap, "ask0 stop a b ask1", true);
    let filled = [&gap[..], &[Replayed(1, "b"), Replayed(2, "c"), Replayed(3, "d"), Replayed(4, "e"), Ended]].concat();
    check(true, &filled, "ask0 stop a b ask1 c d e stop", true);
    check(true, &[&filled[..], &[Live(5, "f")]].concat(), "ask0 stop a b ask1 c d e stop f", true);
    // The engine dropped the end of its answer, and some in the middle: asked again from where it broke off.
    let dropped = [&gap[..], &[Replayed(1, "b"), Replayed(2, "c"), Replayed(4, "e"), TimedOut]].concat();
    check(true, &dropped, "ask0 stop a b ask1 c ask2", true);
    let rest = [&dropped[..], &[Replayed(2, "c"), Replayed(3, "d"), Replayed(4, "e"), Ended]].concat();
    check(true, &rest, "ask0 stop a b ask1 c ask2 d e stop", true);
    // The missing batch is in the ring no more.
    check(
        true,
        &[&gap[..], &[Replayed(3, "d"), Replayed(4, "e"), Ended]].concat(),
        "ask0 stop a b ask1 clear d e stop",
        true,
    );
    // No answer: clear, and go on from the batch behind the gap.
    check(true, &[&gap[..], &[Failed]].concat(), "ask0 stop a b ask1 stop clear e", true);
    check(true, &[&gap[..], &[Lost]].concat(), "ask0 stop a b ask1 stop", false);
}

#[test]
fn an_engine_whose_replay_lags_behind_its_live_stream_is_not_asked_for_ever() {
    let lagging = [Live(4, "e"), Replayed(1, "b"), Ended];
    check(
        true,
        &[&UP[..], &lagging, &[Replayed(1, "b"), Ended]].concat(),
        "ask0 stop a b ask1 stop ask1 stop clear e",
        true,
    );
}

#[test]
fn a_return_is_proven_or_refuted_by_replay() {
    let back = [&UP[..], &[Lost, Connected]].concat();
    check(true, &back, "ask0 stop a b ask1", false);
    check(true, &[&back[..], &[Replayed(1, "b"), Replayed(2, "c"), Ended]].concat(), "ask0 stop a b ask1 c stop", true);
    // Restarted: another batch under the number, or none, although the numbers went on.
    let other =
        [&back[..], &[Live(2, "z"), Replayed(1, "y"), Replayed(0, "x"), Replayed(1, "y"), Replayed(2, "z"), Ended]]
            .concat();
    check(true, &other, "ask0 stop a b ask1 clear ask0 x y z stop", true);
    let stream = check(true, &[&back[..], &[Ended, Ended]].concat(), "ask0 stop a b ask1 clear ask0 stop", true);
    assert_eq!((stream.tally().restarts, stream.tally().reconnects), (1, 1));
    // Restarted, seen live on one connection: history from 0.
    check(true, &[&UP[..], &[Live(0, "x"), Live(1, "y")]].concat(), "ask0 stop a b clear x y", true);
    let late = [&UP[..], &[Live(2, "c"), Live(1, "y"), Replayed(0, "x"), Replayed(1, "y"), Ended]].concat();
    check(true, &late, "ask0 stop a b c clear ask0 x y stop", true);
}

#[test]
fn a_second_connection_beside_the_first_may_be_of_another_process() {
    let other = [&UP[..], &[Connected, Live(2, "z")]].concat();
    check(true, &other, "ask0 stop a b ask1", false);
    let whole = [&other[..], &[Replayed(1, "y"), Replayed(0, "x"), Replayed(1, "y"), Replayed(2, "z"), Ended]].concat();
    check(true, &whole, "ask0 stop a b ask1 clear ask0 x y z stop", true);
    check(false, &[Connected, Live(4, "a"), Connected], "a", false);
    check(false, &[Connected, Live(4, "a"), Connected, Live(0, "b")], "a clear b", true);
}

#[test]
fn what_is_read_after_a_loss_hides_nothing_from_the_next_replay() {
    let broken = [Connected, Live(7, "h"), Replayed(0, "a"), Replayed(1, "b"), Lost, Live(7, "h"), Live(8, "i")];
    check(true, &broken, "ask0 a b stop", false);
    check(true, &[&broken[..], &[Connected]].concat(), "ask0 a b stop ask1", false);
    check(true, &[Connected, Lost, Live(7, "h"), Connected], "ask0 stop ask0", true);
    check(true, &[Connected, Lost, Live(0, "a"), Live(1, "b"), Connected], "ask0 stop ask0", true);
    // What follows by its number alone may be of another process, where a replay was to tell.
    let twice = [&UP[..], &[Lost, Connected, Live(0, "x"), Lost, Live(2, "z"), Connected]].concat();
    check(true, &twice, "ask0 stop a b ask1 stop ask1", false);
    check(true, &[&UP[..], &[Lost, Live(2, "c"), Live(1, "b"), Connected]].concat(), "ask0 stop a b c ask2", false);
}

#[test]
fn quiet_returns_do_not_count_against_an_engine_that_has_everything() {
    let quiet = [Lost, Connected, Replayed(1, "b"), Ended];
    let gap = [Lost, Connected, Live(3, "d"), Replayed(1, "b"), Ended];
    let rest = [Replayed(1, "b"), Replayed(2, "c"), Replayed(3, "d"), Ended];
    let expected = "ask0 stop a b ask1 stop ask1 stop ask1 stop ask1 c d stop";
    check(true, &[&UP[..], &quiet, &quiet, &gap, &rest].concat(), expected, true);
}

#[test]
fn what_a_process_that_is_gone_left_under_way_is_not_taken_for_its_successor_s() {
    let batch = |clock: f64, name: &str| {
        let mut payload = vec![0x93, 0xcb];
        payload.extend_from_slice(&clock.to_be_bytes());
        payload.extend_from_slice(name.as_bytes());
        payload
    };
    for leftover in [2, 4] {
        // A batch of the new process that is read behind it was replayed already, and is no restart.
        let (mut stream, mut applied) = (Stream::new(true), Vec::new());
        let mut act = |action: Action<'_>| {
            if let Action::Apply(seq, payload) = action {
                applied.push((seq, payload[10]));
            }
        };
        stream.connected(&mut act);
        stream.live(leftover, &batch(1.0, "x"), &mut act);
        stream.live(1, &batch(3.0, "b"), &mut act);
        stream.live(1, &batch(3.0, "b"), &mut act);
        stream.replayed(0, &batch(2.0, "a"), &mut act);
        for _ in 0..3 {
            stream.replayed(1, &batch(3.0, "b"), &mut act);
            stream.replay_ended(&mut act);
            assert!(stream.is_eligible());
        }
        stream.live(2, &batch(4.0, "c"), &mut act);
        stream.live(3, &batch(3.5, "d"), &mut act);
        stream.replayed(2, &batch(4.0, "c"), &mut act);
        stream.replayed(3, &batch(3.5, "d"), &mut act);
        stream.replay_ended(&mut act);
        assert_eq!(applied, [(0, b'a'), (1, b'b'), (2, b'c'), (3, b'd')], "a clock that was set back costs a replay");
    }
}

#[test]
fn what_comes_behind_a_leftover_is_asked_for() {
    let batch = |clock: f64| [&[0x93, 0xcb][..], &clock.to_be_bytes()].concat();
    let (mut stream, mut applied, mut cleared) = (Stream::new(true), Vec::new(), 0);
    let mut act = |action: Action<'_>| match action {
        Action::Apply(seq, _) => applied.push(seq),
        Action::Clear => cleared += 1,
        _ => {}
    };
    stream.connected(&mut act);
    stream.live(11, &batch(1.0), &mut act);
    stream.replayed(0, &batch(2.0), &mut act);
    stream.replay_ended(&mut act);
    stream.replayed(0, &batch(2.0), &mut act);
    stream.replay_ended(&mut act);
    stream.live(2, &batch(4.0), &mut act);
    stream.replayed(0, &batch(2.0), &mut act);
    stream.replay_ended(&mut act);
    for (seq, clock) in [(0, 2.0), (1, 3.0), (2, 4.0)] {
        stream.replayed(seq, &batch(clock), &mut act);
    }
    stream.replay_ended(&mut act);
    assert_eq!((applied, cleared), (vec![0, 1, 2], 0));
}

#[test]
fn live_batches_beyond_the_buffer_are_asked_for_again() {
    let mut stream = Stream::new(true);
    let mut asked = Vec::new();
    let mut applied = Vec::new();
    let mut act = |action: Action<'_>| match action {
        Action::Apply(seq, _) => applied.push(seq),
        Action::Replay(from) => asked.push(from),
        Action::Clear => panic!("nothing was lost"),
        Action::StopReplay => {}
        Action::Proven | Action::Doubt => panic!("nothing was taken up"),
    };
    stream.connected(&mut act);
    for seq in 0..=HELD_BATCHES_MAX as u64 {
        stream.live(seq, &seq.to_be_bytes(), &mut act);
    }
    stream.replay_ended(&mut act);
    let next = HELD_BATCHES_MAX as u64 + 1;
    stream.live(next, &next.to_be_bytes(), &mut act);
    let last = HELD_BATCHES_MAX as u64 - 1;
    assert_eq!((stream.tally().overflows, stream.tally().gaps), (1, 1));
    assert_eq!(asked, [0, last]);
    assert_eq!(applied.len(), HELD_BATCHES_MAX);
}

#[test]
fn numbers_at_the_end_of_the_range_do_not_overflow() {
    check(false, &[Connected, Live(u64::MAX, "a"), Live(0, "b"), Live(1, "c")], "a clear b c", true);
    check(true, &[Connected, Replayed(u64::MAX, "a"), Replayed(u64::MAX, "b"), Ended], "ask0 a stop", true);
}

/// An engine with its network: what it holds, what it sent, what is still under way.
#[derive(Default)]
struct Engine {
    seq: u64,
    clock: u64,
    held: BTreeSet<u8>,
    ring: Vec<(u64, Vec<u8>)>,
    ring_max: usize,
    wire: Vec<(u64, Vec<u8>)>,
}

/// A batch: the clock, then (1, key) = stored, (0, key) = removed, (2, 0) = cleared.
impl Engine {
    fn send(&mut self, what: u8, key: u8) {
        match what {
            0 => _ = self.held.remove(&key),
            1 => _ = self.held.insert(key),
            _ => self.held.clear(),
        }
        self.clock += 1;
        let mut payload = self.clock.to_be_bytes().to_vec();
        payload.extend_from_slice(&[what, key]);
        self.ring.push((self.seq, payload.clone()));
        let excess = self.ring.len().saturating_sub(self.ring_max);
        self.ring.drain(..excess);
        self.wire.push((self.seq, payload));
        self.seq += 1;
    }

    fn restart(&mut self) {
        *self = Engine { clock: self.clock, ring_max: self.ring_max, ..Engine::default() };
    }
}

#[derive(Clone, Debug)]
enum Fate {
    Sends(u8, u8),
    Delivers(usize),
    Drops,
    LosesConnection,
    Restarts,
    /// Answers of a replay are cut after so many.
    Answers(usize),
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        6 => (0_u8..20, 0_u8..12).prop_map(|(what, key)| Fate::Sends(if what == 0 { 2 } else { 1 - what % 2 }, key)),
        4 => (1_usize..6).prop_map(Fate::Delivers),
        1 => Just(Fate::Drops),
        1 => Just(Fate::LosesConnection),
        1 => Just(Fate::Restarts),
        3 => (0_usize..8).prop_map(Fate::Answers),
    ]
}

/// The gateway's side: a stream and the set its actions build.
struct Gateway {
    stream: Stream,
    held: BTreeSet<u8>,
    asked: Option<u64>,
}

impl Gateway {
    fn with(&mut self, input: impl FnOnce(&mut Stream, &mut dyn FnMut(Action<'_>))) {
        let (held, asked) = (&mut self.held, &mut self.asked);
        input(&mut self.stream, &mut |action| match action {
            Action::Apply(_, payload) => match payload[8..] {
                [0, key] => _ = held.remove(&key),
                [1, key] => _ = held.insert(key),
                _ => held.clear(),
            },
            Action::Clear => held.clear(),
            Action::Replay(from) => *asked = Some(from),
            Action::StopReplay => *asked = None,
            Action::Proven | Action::Doubt => panic!("nothing was taken up"),
        });
    }

    fn answer(&mut self, engine: &Engine, answers_max: usize) {
        let Some(from) = self.asked else { return };
        let answers: Vec<_> = engine.ring.iter().filter(|(seq, _)| *seq >= from).collect();
        for (seq, payload) in answers.iter().take(answers_max) {
            self.with(|stream, mut act| stream.replayed(*seq, payload, &mut act));
            if self.asked != Some(from) {
                return;
            }
        }
        match answers.len() > answers_max {
            true => self.with(|stream, mut act| stream.replay_timed_out(&mut act)),
            false => self.with(|stream, mut act| stream.replay_ended(&mut act)),
        }
    }

    fn deliver(&mut self, engine: &mut Engine, n: usize) {
        let n = n.min(engine.wire.len());
        for (seq, payload) in engine.wire.drain(..n) {
            self.with(|stream, mut act| stream.live(seq, &payload, &mut act));
        }
    }

    fn reconnect(&mut self, engine: &mut Engine) {
        engine.wire.clear();
        self.with(|stream, mut act| stream.lost(&mut act));
        assert!(!self.stream.is_eligible());
        self.with(|stream, mut act| stream.connected(&mut act));
    }
}

fn run(has_replay: bool, ring_max: usize, fates: &[Fate]) -> (Gateway, Engine) {
    let mut gateway = Gateway { stream: Stream::new(has_replay), held: BTreeSet::new(), asked: None };
    let mut engine = Engine { ring_max, ..Engine::default() };
    gateway.with(|stream, mut act| stream.connected(&mut act));
    for fate in fates {
        match *fate {
            Fate::Sends(what, key) => engine.send(what, key),
            Fate::Delivers(n) => gateway.deliver(&mut engine, n),
            Fate::Drops => _ = engine.wire.pop(),
            Fate::LosesConnection => gateway.reconnect(&mut engine),
            Fate::Restarts => {
                engine.restart();
                gateway.reconnect(&mut engine);
            }
            Fate::Answers(n) => gateway.answer(&engine, n),
        }
    }
    // A quiet end: everything sent arrives, and one more batch shows any gap that is left.
    let wire = engine.wire.len();
    gateway.deliver(&mut engine, wire);
    engine.send(1, 0);
    gateway.deliver(&mut engine, 1);
    for _ in 0..8 {
        gateway.answer(&engine, usize::MAX);
    }
    (gateway, engine)
}

/// With all of the history, the truth. Without (no replay, or one that was given up), nothing that is not true; but
/// for the one thing that no gateway can see then: a restarted engine whose count has just reached the number that
/// was expected.
fn check_end(gateway: &Gateway, engine: &Engine, fates: &[Fate]) -> Result<(), TestCaseError> {
    let tally = gateway.stream.tally();
    let whole = gateway.stream.has_replay && tally.incomplete == 0;
    if whole {
        prop_assert_eq!(&gateway.held, &engine.held);
    }
    if whole || !fates.iter().any(|fate| matches!(fate, Fate::Restarts)) {
        prop_assert!(gateway.held.is_subset(&engine.held), "{:?} {:?}", gateway.held, engine.held);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(10_000) })]

    #[test]
    fn with_replay_any_history_ends_as_the_truth(fates in prop::collection::vec(fate(), 0..80)) {
        let (gateway, engine) = run(true, usize::MAX, &fates);
        check_end(&gateway, &engine, &fates)?;
        prop_assert!(gateway.stream.is_eligible());
    }

    #[test]
    fn without_replay_or_with_a_short_ring_nothing_is_held_that_the_engine_has_not(
        has_replay: bool, fates in prop::collection::vec(fate(), 0..80)
    ) {
        let (gateway, engine) = run(has_replay, 3, &fates);
        check_end(&gateway, &engine, &fates)?;
        prop_assert!(gateway.stream.is_eligible());
    }
}
