//! The blend `ttft`: costs by hand, who is chosen for them, and what stays as it is around it.

use std::time::Duration;

use super::*;
use crate::rates::FirstByte;
use crate::service::Select;

/// Before anything is learned: 20 ms per prompt, 100 µs per token.
const PER_TOKEN_US: f64 = 100.0;
const START_US: f64 = 20_000.0;

fn ttft_fleet(endpoints: u16) -> Fleet {
    let mut fleet = Fleet::new(endpoints).kv(|kv| kv.blend = Blend::Ttft);
    fleet.service.select = Select::Expected;
    fleet
}

/// Sends a request with so many uncached tokens to the endpoint; its answer has begun or not.
fn send(fleet: &mut Fleet, endpoint: u32, tokens: u64, began: bool) {
    let mut reservation = fleet.loads.reserve(SHARD, LoadSlot(endpoint), tokens);
    if began {
        reservation.first_byte();
    }
    fleet.in_flight.push(reservation);
}

/// An answer that took so many times as long as predicted.
fn answer(times: f32) -> FirstByte {
    let elapsed = Duration::from_secs_f32(times * (0.02 + 1e-4 * 10_000.0));
    FirstByte { uncached_tokens: 10_000, ahead: crate::load::Load::default(), elapsed }
}

/// A decision over (endpoint, blocks) runs at rank 0.
fn scored(fleet: &mut Fleet, prompt_tokens: u64, runs: &[(u16, u32)]) -> Decision {
    let runs: Vec<_> = runs.iter().map(|&(endpoint, blocks)| run(endpoint, 0, blocks)).collect();
    fleet.decide(Evidence::Scored { prompt_tokens, runs: &runs }, &[]).expect("there are candidates")
}

fn assert_cost(decision: &Decision, expected_us: f64) {
    let cost = decision.terms.cost as f64;
    assert!((cost - expected_us).abs() <= expected_us * 1e-3 + 2.0, "{cost} µs for {expected_us} µs");
}

#[test]
fn the_cost_of_an_idle_endpoint_is_its_start_and_the_tokens_it_has_not() {
    let mut fleet = ttft_fleet(2);
    // 1,601 tokens, of which 60 blocks of 16 are there: 641 are computed.
    let decision = scored(&mut fleet, LONG, &[(1, 60)]);
    assert_eq!((decision.endpoint, decision.reason), (EndpointIndex(1), Reason::Overlap));
    assert_cost(&decision, START_US + 641.0 * PER_TOKEN_US);
    // The last token is computed in any case.
    assert_cost(&scored(&mut fleet, 1_600, &[(0, 100)]), START_US + PER_TOKEN_US);
}

#[test]
fn what_stands_in_line_and_what_streams_is_waited_for() {
    let mut one = ttft_fleet(1).kv(|kv| kv.throughput = 0);
    send(&mut one, 0, 4_000, false);
    for _ in 0..512 {
        send(&mut one, 0, 9_000, true);
    }
    // 4,000 tokens in line and 641 of its own, half as slow again beside 512 answers.
    let waiting = 2.0 * START_US + 4_641.0 * 1.5 * PER_TOKEN_US;
    assert_cost(&scored(&mut one, LONG, &[(0, 60)]), waiting);
    // Of the prompts so far a 64th of 641 tokens was computed on average: each answer comes back with a quarter of that.
    let expected = waiting + 512.0 * 0.25 * (641.0 / 64.0) * PER_TOKEN_US;
    assert_cost(&scored(&mut one, LONG, &[(0, 60)]), expected);
}

#[test]
fn an_idle_endpoint_without_the_prompt_is_chosen_when_waiting_costs_more_than_computing() {
    let chosen = |waiting: u64| {
        let mut fleet = ttft_fleet(3).kv(|kv| kv.throughput = 0);
        send(&mut fleet, 1, waiting, false);
        scored(&mut fleet, LONG, &[(1, 60)])
    };
    // At 1: 40 ms and (waiting + 641) × 100 µs; elsewhere 20 ms and 1,601 × 100 µs: equal at 760 tokens.
    assert_eq!(chosen(720).endpoint, EndpointIndex(1));
    let moved = chosen(800);
    assert!(moved.endpoint == EndpointIndex(0) || moved.endpoint == EndpointIndex(2));
    assert_eq!((moved.spilled_from, moved.reason), (Some(EndpointIndex(1)), Reason::Blend));
    assert_eq!((moved.tier, moved.hit_blocks), (Tier::KvExact, 0));
}

#[test]
fn what_is_computed_twice_costs_more_the_busier_the_fleet_is() {
    let mut fleet = ttft_fleet(2).kv(|kv| kv.throughput = 100);
    send(&mut fleet, 0, 1_600, false);
    send(&mut fleet, 1, 160, false);
    // 0 has the prompt. While the fleet was idle until now, that is not worth the wait; after it has been busy for long, it is.
    assert_eq!(scored(&mut fleet, LONG, &[(0, 60)]).endpoint, EndpointIndex(1));
    for _ in 0..400 {
        scored(&mut fleet, LONG, &[(0, 60)]);
    }
    assert_eq!(scored(&mut fleet, LONG, &[(0, 60)]).endpoint, EndpointIndex(0));
    let mut greedy = ttft_fleet(2).kv(|kv| kv.throughput = 0);
    send(&mut greedy, 0, 1_600, false);
    send(&mut greedy, 1, 160, false);
    for _ in 0..400 {
        assert_eq!(scored(&mut greedy, LONG, &[(0, 60)]).endpoint, EndpointIndex(1), "the request's own time alone");
    }
}

#[test]
fn a_slow_endpoint_is_passed_over_and_one_that_is_alike_is_not() {
    let mut fleet = ttft_fleet(2);
    for _ in 0..40 {
        let rates = &fleet.service.shared.rates;
        let endpoints = &fleet.service.endpoints;
        // The others' answers keep the service's pace where it is.
        for _ in 0..4 {
            rates.learn(&endpoints[1].shared.slowness, &answer(1.0));
        }
        rates.learn(&endpoints[0].shared.slowness, &answer(3.0));
    }
    let lessons = fleet.service.shared.rates.lessons();
    let factor = |fleet: &Fleet, endpoint: usize| fleet.service.endpoints[endpoint].shared.slowness.factor(lessons);
    assert_eq!(factor(&fleet, 1), 1.0);
    assert!(factor(&fleet, 0) > 2.0);
    // Half of the prompt is no reason to compute the rest three times as slowly.
    assert_eq!(scored(&mut fleet, LONG, &[(0, 50)]).endpoint, EndpointIndex(1));
    assert_eq!(scored(&mut fleet, LONG, &[(0, 95)]).endpoint, EndpointIndex(0));
}

#[test]
fn misses_go_by_work_only_where_the_rule_states_no_sel() {
    let mut fleet = ttft_fleet(3);
    send(&mut fleet, 0, 5_000, false);
    send(&mut fleet, 1, 100, false);
    let missed = |fleet: &mut Fleet| scored(fleet, LONG, &[]).endpoint.0;
    assert_eq!([(); 4].map(|()| missed(&mut fleet)), [2; 4], "the one with nothing to do");
    fleet.service.select = Select::RoundRobin;
    assert_eq!([(); 4].map(|()| missed(&mut fleet)), [0, 1, 2, 0]);
    // Equals take turns.
    let mut even = ttft_fleet(4);
    let mut shares = [0; 4];
    (0..400).for_each(|_| shares[usize::from(missed(&mut even))] += 1);
    assert!(shares.iter().all(|share| (95..=105).contains(share)), "{shares:?}");
}

#[test]
fn what_nobody_would_notice_decides_nothing() {
    let mut fleet = ttft_fleet(3);
    // An answer under way weighs a quarter of a prompt: 4 tokens, 0.4 ms.
    send(&mut fleet, 1, 0, true);
    let mut shares = [0; 3];
    (0..300).for_each(|_| shares[usize::from(scored(&mut fleet, 17, &[]).endpoint.0)] += 1);
    assert!(shares.iter().all(|share| (90..=110).contains(share)), "{shares:?}");
    // Of equals the one with more of the prompt.
    assert_eq!(scored(&mut fleet, LONG, &[(0, 99), (2, 100)]).endpoint.0, 2);
}

#[test]
fn every_choice_by_cost_tells_its_cost() {
    let mut fleet = ttft_fleet(2);
    let missed = scored(&mut fleet, LONG, &[]);
    assert_eq!(missed.tier, Tier::Select);
    assert_cost(&missed, START_US + LONG as f64 * PER_TOKEN_US);
    let claims = [Claimed { endpoint: EndpointIndex(1), rank: None, tokens: 1_600 }];
    let evidence = Evidence::Scored { prompt_tokens: LONG, runs: &[] };
    let claimed = fleet.with_facts(&Facts { claims: &claims, ..Facts::of(evidence) }).expect("a candidate");
    assert_eq!(claimed.tier, Tier::Claim);
    assert_cost(&claimed, START_US + PER_TOKEN_US);
}

#[test]
fn relief_and_seed_come_after_it_as_in_every_mode() {
    let mut relieved = ttft_fleet(3).kv(|kv| kv.spill_relief = true);
    send(&mut relieved, 0, 16, false);
    let decision = scored(&mut relieved, LONG, &[(0, 100)]);
    assert_eq!((decision.reason, decision.spilled_from), (Reason::Relief, Some(EndpointIndex(0))));
    let mut seeded = ttft_fleet(3).cold(2, 0).kv(|kv| kv.seed_every = 2);
    let seeds: Vec<bool> = (0..4).map(|_| scored(&mut seeded, LONG, &[(0, 100)]).reason == Reason::Seed).collect();
    assert_eq!(seeds, [false, true, false, true]);
}

/// A fleet in which relief is on and 0 and 1 have the prompt, with so many requests in flight that have nothing left to
/// compute.
fn crowded(loads: &[u32], held: &[(u16, u32)]) -> (u16, Option<u16>, Reason) {
    let mut fleet = ttft_fleet(loads.len() as u16).kv(|kv| kv.spill_relief = true);
    for (endpoint, load) in loads.iter().enumerate() {
        (0..*load).for_each(|_| send(&mut fleet, endpoint as u32, 0, true));
    }
    let decision = scored(&mut fleet, LONG, held);
    (decision.endpoint.0, decision.spilled_from.map(|endpoint| endpoint.0), decision.reason)
}

#[test]
fn relief_is_foreseen_so_that_a_holder_of_a_little_less_takes_over() {
    // Of 4 in flight each of three has ⌈175 × 4 / 300⌉ = 3 places, and 0 has no more. 2 is the least loaded, and has nothing.
    assert_eq!(crowded(&[3, 1, 0], &[(0, 100), (1, 90)]), (1, Some(0), Reason::Blend));
    // Who has as much does so without a spill.
    assert_eq!(crowded(&[3, 1, 0], &[(0, 100), (1, 100)]), (1, None, Reason::Overlap));
    // Nobody has anything: relief, to the lowest index of the least loaded.
    assert_eq!(crowded(&[3, 0, 0], &[(0, 100)]), (1, Some(0), Reason::Relief));
    // One that has less than the most is not relieved, however busy.
    let mut loads = [0; 8];
    loads[..2].fill(2);
    assert_eq!(crowded(&loads, &[(0, 100), (1, 90)]), (1, Some(0), Reason::Blend), "each has one place");
}

#[test]
fn the_last_place_below_the_cap_is_left_to_who_would_lose_much() {
    let mut fleet = ttft_fleet(2).kv(|kv| kv.spill_relief = true);
    (0..2).for_each(|_| send(&mut fleet, 0, 0, true));
    send(&mut fleet, 1, 0, true);
    // Of 3 in flight each has 3 places: 0 has one left.
    let prompts = |fleet: &mut Fleet, tokens, run| scored(fleet, tokens, &[run]).endpoint.0;
    assert_eq!(prompts(&mut fleet, 100, (0, 6)), 0, "nothing is known to be lost by that");
    for _ in 0..200 {
        assert_eq!(prompts(&mut fleet, 30_000, (0, 1_800)), 0);
    }
    assert_eq!(prompts(&mut fleet, 100, (0, 6)), 1, "96 tokens are computed again for 29,000 that may have to be");
}

#[test]
fn what_will_be_stored_soon_counts_as_stored_and_is_no_hit() {
    let mut fleet = ttft_fleet(4);
    send(&mut fleet, 2, 800, false);
    let claims = [Claimed { endpoint: EndpointIndex(2), rank: Some(Rank(1)), tokens: 1_600 }];
    let evidence = Evidence::Scored { prompt_tokens: LONG, runs: &[] };
    let facts = Facts { claims: &claims, ..Facts::of(evidence) };
    let decision = fleet.with_facts(&facts).expect("a candidate");
    assert_eq!((decision.endpoint, decision.tier), (EndpointIndex(2), Tier::Claim));
    assert_eq!((decision.hit_tokens, decision.claimed_tokens), (0, 1_600));
    // Beyond what computing it anew costs, nobody waits for it.
    send(&mut fleet, 2, 8_000, false);
    let decision = fleet.with_facts(&facts).expect("a candidate");
    assert_eq!(decision.tier, Tier::Select);
    assert_ne!(decision.endpoint, EndpointIndex(2));
}

#[test]
fn what_is_held_wins_over_as_much_that_is_on_its_way() {
    let mut fleet = Fleet::new(2).kv(|kv| kv.blend = Blend::Ttft);
    let claims = [Claimed { endpoint: EndpointIndex(1), rank: None, tokens: LONG }];
    let runs = [run(0, 0, 100)];
    let evidence = Evidence::Scored { prompt_tokens: LONG, runs: &runs };
    for _ in 0..8 {
        let decision = fleet.with_facts(&Facts { claims: &claims, ..Facts::of(evidence) }).expect("candidates");
        assert_eq!((decision.endpoint.0, decision.tier), (0, Tier::KvExact));
    }
}
