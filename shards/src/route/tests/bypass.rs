//! Requests that a decode endpoint does alone.

use super::disagg::pools;
use super::*;
use crate::rates::{Pace, Rates};
use crate::service::{Bypass, ServiceShared};

/// 20 ms and 0.1 ms for each token to compute, 60 ms and 0.02 ms for each to move: the break-even of an idle endpoint is
/// (60 − 20) / (0.1 − 0.02) = 500 tokens.
const COMPUTING: Pace = Pace { start: 0.02, per_token: 1e-4 };
const MOVING: Pace = Pace { start: 0.06, per_token: 2e-5 };

/// Decode endpoints are 1, 3 and 5.
fn fleet(bypass: Bypass, tokens: u32, lessons: u32) -> Fleet {
    let mut fleet = pools(false);
    let (rates, moves) = (Rates::known(COMPUTING, lessons), Rates::known(MOVING, lessons));
    fleet.service.shared = Arc::new(ServiceShared { rates, moves, ..ServiceShared::new(1) });
    let pd = fleet.service.pd.as_mut().expect("a P/D rule");
    (pd.bypass, pd.bypass_tokens) = (bypass, tokens);
    fleet
}

fn learned() -> Fleet {
    fleet(Bypass::Held, 0, LESSONS_MIN)
}

impl Fleet {
    fn straight(&mut self, prompt_tokens: u64, runs: &[Run], pinned: Option<u16>) -> Option<Straight> {
        let alone = Alone { prompt_tokens, runs, pinned: pinned.map(EndpointIndex), names_rank: false };
        let mut chooser = Chooser { shard: SHARD, loads: &self.loads, turn: &mut self.turn };
        choose_straight(&self.service, &alone, &mut chooser)
    }

    /// Why a prompt goes straight to a decode endpoint.
    fn why(&mut self, prompt_tokens: u64, runs: &[Run]) -> Option<(u16, Why, u64)> {
        let straight = self.straight(prompt_tokens, runs, None)?;
        Some((straight.endpoint.0, straight.why, straight.missing))
    }
}

#[test]
fn what_is_computed_before_it_would_be_moved_goes_straight() {
    let mut fleet = learned();
    assert!(
        (499..=500).contains(&break_even(&fleet.service.shared.rates, &fleet.service.shared.moves).expect("learned"))
    );
    let straight = fleet.straight(499, &[], None).expect("50 + 20 ms are less than 60 + 10 ms");
    assert_eq!((straight.why, straight.held, straight.missing), (Why::Short, 0, 499));
    assert_eq!(fleet.why(501, &[]), None);
    // 600 blocks of 16 are 9,600 tokens.
    assert_eq!(fleet.why(10_000, &[run(3, 0, 600)]), Some((3, Why::Held, 400)));
    assert_eq!(fleet.why(10_000, &[run(3, 0, 593)]), None, "512 tokens are missing");
    assert_eq!(fleet.why(10_000, &[run(0, 0, 600)]), None, "a prefill endpoint is none");
    // Of a prompt that is there as a whole the last token is computed, and with it its block.
    assert_eq!(fleet.why(9_600, &[run(3, 0, 600)]), Some((3, Why::Held, 16)));
}

#[test]
fn who_has_much_to_do_is_sooner_done_with_less() {
    let reserve = |fleet: &mut Fleet, tokens: u64, begun: bool| {
        let mut reservation = fleet.loads.reserve(SHARD, LoadSlot(3), tokens);
        if begun {
            reservation.first_byte();
        }
        fleet.in_flight.push(reservation);
    };
    let only_three = || learned().down(&[1, 5]);
    // 512 answers under way make each token cost half as much again: (60 − 20) / (0.15 − 0.02) = 307.7 tokens.
    let mut busy = only_three();
    (0..512).for_each(|_| reserve(&mut busy, 0, true));
    assert_eq!((busy.why(307, &[]).map(|found| found.0), busy.why(308, &[])), (Some(3), None));
    // 304 tokens that wait there are computed first: (60 − 20 − 30.4) / 0.08 = 120 tokens.
    let mut waiting = only_three();
    reserve(&mut waiting, 304, false);
    assert_eq!((waiting.why(119, &[]).map(|found| found.0), waiting.why(121, &[])), (Some(3), None));
}

#[test]
fn the_endpoint_that_is_done_first_does_it_unless_a_session_is_elsewhere() {
    let runs = [run(3, 0, 610), run(5, 0, 600)];
    let mut fleet = learned().loads(&[0, 1, 0, 1, 0, 0]);
    assert_eq!(fleet.why(10_000, &runs), Some((3, Why::Held, 240)));
    let pinned = fleet.straight(10_000, &runs, Some(5)).expect("it holds enough");
    assert_eq!((pinned.endpoint.0, pinned.missing), (5, 400));
    let elsewhere = fleet.straight(10_000, &runs, Some(1)).expect("another one holds enough");
    assert_eq!(elsewhere.endpoint.0, 3);
    // Where nobody holds anything, the least loaded.
    assert_eq!(fleet.why(100, &[]), Some((5, Why::Short, 100)));
}

#[test]
fn nothing_goes_straight_that_the_rule_or_what_was_learned_does_not_say() {
    assert_eq!(fleet(Bypass::Off, 1_000, LESSONS_MIN).why(1, &[]), None);
    let mut unlearned = fleet(Bypass::Held, 0, LESSONS_MIN - 1);
    assert_eq!(
        (unlearned.why(1, &[]), break_even(&unlearned.service.shared.rates, &unlearned.service.shared.moves)),
        (None, None)
    );
    assert_eq!(learned().why(0, &[]), None, "of how many tokens the prompt is, is not known");
    assert_eq!(learned().down(&[1, 3, 5]).why(100, &[]), None);
    // A number of the rule's own needs no learning.
    let mut given = fleet(Bypass::Held, 64, 0);
    assert_eq!(given.why(64, &[]).map(|found| found.1), Some(Why::Short));
    assert_eq!(given.why(65, &[]), None);
    assert_eq!(given.why(1_000, &[run(1, 0, 60)]), Some((1, Why::Held, 40)));
}

#[test]
fn of_several_ranks_the_best_counts_where_it_can_be_asked_for_and_else_their_mean() {
    let runs = [run(1, 0, 10), run(1, 1, 30)];
    let mut fleet = fleet(Bypass::Held, 200, 0).down(&[3, 5]).kv(|kv| kv.ranks = 2);
    // (160 + 480) / 2 of 512 tokens.
    let mean = fleet.straight(512, &runs, None).expect("192 tokens are missing");
    assert_eq!((mean.rank, mean.held, mean.missing), (None, 320, 192));
    fleet.service.endpoints[1].shared.set_conveys_rank(true);
    let best = fleet.straight(512, &runs, None).expect("32 tokens are missing");
    assert_eq!((best.rank, best.held, best.missing), (Some(Rank(1)), 480, 32));
}

#[test]
fn where_moving_costs_nothing_or_computing_does_the_break_even_is_none_or_all() {
    let even = |computing: (f32, f32), moving: (f32, f32)| {
        let known = |(start, per_token)| Rates::known(Pace { start, per_token }, LESSONS_MIN);
        break_even(&known(computing), &known(moving))
    };
    assert_eq!(even((0.02, 1e-4), (0.01, 1e-5)), Some(0));
    assert_eq!(even((0.02, 1e-5), (0.05, 1e-4)), Some(u32::MAX));
}
