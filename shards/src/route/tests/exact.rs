//! Tier 1.5: overlap, relief, seed, and why it does not decide.

use std::num::NonZeroU32;

use super::*;
use crate::service::{MediumWeights, Select};

#[test]
fn the_longest_run_wins_whatever_the_loads_and_the_least_loaded_of_equals() {
    let check = |loads: &[u32], runs: &[(u16, u32)], expected: Brief| {
        assert_eq!(Fleet::new(4).loads(loads).scored(LONG, runs), expected, "loads {loads:?}, runs {runs:?}");
    };
    check(&[0, 0, 0, 0], &[(2, 1)], hit(2, 1));
    check(&[0, 9, 0, 0], &[(0, 4), (1, 5), (3, 1)], hit(1, 5));
    check(&[3, 2, 0, 2], &[(0, 5), (1, 5), (2, 4)], hit(1, 5));
    check(&[3, 2, 1, 2], &[(3, 7), (2, 7), (0, 7)], hit(2, 7));
}

#[test]
fn the_best_rank_stands_for_its_endpoint_and_is_conveyed() {
    let mut fleet = Fleet::new(4);
    let runs = [run(1, 0, 3), run(1, 2, 8), run(1, 3, 5), run(2, 1, 7)];
    let decision = fleet.decide(Evidence::Scored { prompt_tokens: LONG, runs: &runs }, &[]).unwrap();
    assert_eq!(Brief::of(&decision), Brief { rank: Some(Rank(2)), ..hit(1, 8) });
}

#[test]
fn ranks_that_have_as_much_take_turns() {
    let mut fleet = Fleet::new(2).kv(|kv| kv.ranks = 4);
    let runs = [run(1, 0, 9), run(1, 1, 10), run(1, 2, 10), run(1, 3, 10), run(0, 0, 3)];
    let mut shares = [0; 4];
    for _ in 0..300 {
        let decision = fleet.decide(Evidence::Scored { prompt_tokens: LONG, runs: &runs }, &[]).expect("a candidate");
        assert_eq!((decision.endpoint.0, decision.hit_blocks), (1, 10));
        shares[usize::from(decision.rank.expect("of the run").0)] += 1;
    }
    assert!(shares[0] == 0 && shares[1..].iter().all(|share| (90..=110).contains(share)), "{shares:?}");
}

#[test]
fn what_lies_in_slower_media_counts_by_its_weight_behind_what_lies_in_device_memory() {
    let reach = |endpoint, medium, blocks| Run { medium, ..run(endpoint, 0, blocks) };
    let winner = |cpu, storage, runs: &[Run]| {
        let mut fleet = Fleet::new(3).kv(|kv| kv.weights = MediumWeights { cpu, storage });
        let decision = fleet.decide(Evidence::Scored { prompt_tokens: LONG, runs }, &[]).expect("candidates");
        (decision.endpoint.0, decision.hit_blocks)
    };
    // Endpoint 0 has 4 blocks in device memory and 6 more behind; endpoint 1 has 6 in device memory.
    let runs = [reach(0, Medium::Device, 4), reach(0, Medium::Cpu, 10), reach(1, Medium::Device, 6)];
    assert_eq!(winner(50, 0, &runs), (0, 10), "4 + 6/2 > 6");
    assert_eq!(winner(30, 0, &runs), (1, 6), "4 + 6 × 0.3 < 6");
    let storage = [reach(0, Medium::Cpu, 2), reach(0, Medium::Storage, 12), reach(2, Medium::Device, 3)];
    assert_eq!(winner(50, 25, &storage), (0, 12), "2/2 + 10/4 > 3");
    assert_eq!(winner(50, 10, &storage), (2, 3), "2/2 + 10/10 < 3");
    // Ranks do not add up.
    let ranks = [run(0, 0, 5), Run { medium: Medium::Cpu, ..run(0, 1, 8) }, reach(1, Medium::Device, 6)];
    assert_eq!(winner(50, 0, &ranks), (1, 6), "8/2 at one rank and 5 at another are less than 6");
}

#[test]
fn of_ranks_with_as_long_runs_the_one_that_has_more_in_device_memory_is_named() {
    let reach = |rank, medium, blocks| Run { medium, ..run(0, rank, blocks) };
    let runs = [
        reach(0, Medium::Device, 9),
        reach(0, Medium::Cpu, 10),
        reach(1, Medium::Device, 1),
        reach(1, Medium::Cpu, 10),
    ];
    let mut fleet = Fleet::new(1).kv(|kv| (kv.ranks, kv.weights) = (2, MediumWeights { cpu: 50, storage: 20 }));
    for _ in 0..32 {
        let decision = fleet.decide(Evidence::Scored { prompt_tokens: LONG, runs: &runs }, &[]).expect("a candidate");
        assert_eq!((decision.rank, decision.hit_blocks), (Some(Rank(0)), 10));
    }
}

#[test]
fn the_last_token_is_always_computed_so_the_predicted_saving_is_capped() {
    let check = |tokens, blocks, predicted| {
        assert_eq!(Fleet::new(2).scored(tokens, &[(1, blocks)]), hit(1, predicted), "{tokens} tokens, {blocks} blocks");
    };
    check(16, 1, 0);
    check(17, 1, 1);
    check(32, 2, 1);
    check(33, 2, 2);
    check(1_601, 7, 7);
}

#[test]
fn holders_with_blocks_of_other_sizes_are_compared_and_predicted_in_tokens() {
    let of = |endpoint, blocks, size| Run { block_tokens: NonZeroU32::new(size), ..run(endpoint, 0, blocks) };
    let check = |tokens, runs: &[Run], endpoint, blocks, size| {
        let decision = Fleet::new(3).decide(Evidence::Scored { prompt_tokens: tokens, runs }, &[]).unwrap();
        let expected = Brief { hit_tokens: u64::from(blocks) * size, ..hit(endpoint, blocks) };
        assert_eq!(Brief::of(&decision), expected, "{tokens} tokens, {runs:?}");
    };
    // 5 × 16 = 80 tokens are less than 2 × 64, and more than 9 × 8.
    check(LONG, &[run(0, 0, 5), of(1, 2, 64)], 1, 2, 64);
    check(LONG, &[run(0, 0, 5), of(1, 9, 8)], 0, 5, 16);
    // Of 129 tokens 128 may be saved, of 128 one block less.
    check(129, &[of(2, 2, 64)], 2, 2, 64);
    check(128, &[of(2, 2, 64)], 2, 1, 64);
    // Less than one block of the rule is a whole block of an engine with smaller ones.
    let mut fleet = Fleet::new(2).kv(|kv| kv.block_tokens = 128);
    let decision = fleet.decide(Evidence::Scored { prompt_tokens: 40, runs: &[of(1, 2, 16)] }, &[]).unwrap();
    assert_eq!(Brief::of(&decision), Brief { hit_tokens: 32, ..hit(1, 2) });
    assert_eq!(fleet.scored(40, &[]).miss, Some(MissReason::Hashes));
}

#[test]
fn every_reason_of_a_miss() {
    let check = |fleet: &mut Fleet, tokens, runs: &[(u16, u32)], expected| {
        let decision = fleet.scored(tokens, runs);
        assert_eq!((decision.tier, decision.miss), (Tier::Select, Some(expected)), "{tokens} tokens, runs {runs:?}");
        assert_eq!((decision.hit_blocks, decision.hit_tokens, decision.rank), (0, 0, None));
    };
    let mut fleet = Fleet::new(4);
    check(&mut fleet, 15, &[], MissReason::Shallow);
    check(&mut fleet, LONG, &[], MissReason::NoWorker);
    check(&mut fleet, LONG, &[(9, 3)], MissReason::Excluded);
    assert!(fleet.service.endpoints[2].shared.mark_down());
    fleet.service.endpoints[3].weight = 0;
    check(&mut fleet, LONG, &[(2, 5), (3, 5)], MissReason::Excluded);
    assert_eq!(fleet.scored(LONG, &[(2, 5), (3, 5), (0, 1)]), hit(0, 1), "who is left decides");
    fleet.service.endpoints[1].retired = true;
    check(&mut fleet, LONG, &[(1, 5)], MissReason::Excluded);

    check(&mut Fleet::new(2).kv(|kv| kv.min_match_tokens = 64), 63, &[(0, 3)], MissReason::Shallow);
    check(&mut Fleet::new(2).kv(|kv| kv.min_match_tokens = 0), 15, &[], MissReason::Hashes);
    assert_eq!(Fleet::new(2).kv(|kv| kv.min_match_tokens = 64).scored(64, &[(0, 3)]), hit(0, 3));
    assert_eq!(Fleet::new(2).kv(|kv| kv.min_match_tokens = 0).scored(16, &[(0, 1)]), hit(0, 0));

    let mut plain = Fleet::new(2);
    plain.service.kv = None;
    check(&mut plain, LONG, &[(0, 3)], MissReason::ModeOff);

    // The others are found out before there is anything to decide by, and are passed on.
    let decided =
        [MissReason::ModeOff, MissReason::Hashes, MissReason::NoWorker, MissReason::Excluded, MissReason::Shallow];
    for reason in MissReason::ALL.into_iter().filter(|reason| !decided.contains(reason)) {
        let told = Fleet::new(2).decide(Evidence::None(reason), &[]).expect("candidates");
        assert_eq!((told.tier, told.miss), (Tier::Select, Some(reason)));
    }
}

#[test]
fn round_robin_goes_round_the_candidates_from_the_shards_own_start() {
    let mut fleet = Fleet::new(4);
    let order: Vec<_> = (0..6).filter_map(|_| fleet.missed(MissReason::ModelEmpty)).collect();
    assert_eq!(order, [0, 1, 2, 3, 0, 1]);
    // A masked endpoint's share goes to all others, not to its neighbour.
    assert!(fleet.service.endpoints[3].shared.mark_down());
    let order: Vec<_> = (0..6).filter_map(|_| fleet.missed(MissReason::ModelEmpty)).collect();
    assert_eq!(order, [2, 0, 1, 2, 0, 1]);
    fleet.turn = Turn::starting_at(ShardId(9));
    assert_eq!(fleet.missed(MissReason::ModelEmpty), Some(1));
    // Hits in between do not disturb it.
    fleet.scored(LONG, &[(0, 1), (1, 1)]);
    assert_eq!(fleet.missed(MissReason::ModelEmpty), Some(2));
}

#[test]
fn least_connections_takes_the_least_loaded_and_equals_in_turn() {
    let mut fleet = Fleet::new(4).loads(&[2, 1, 3, 1]);
    fleet.service.select = Select::LeastConnections;
    let mut shares = [0; 4];
    for _ in 0..100 {
        shares[usize::from(fleet.missed(MissReason::TextEmpty).unwrap())] += 1;
    }
    assert_eq!((shares[0], shares[2]), (0, 0));
    assert!((48..=52).contains(&shares[1]), "{shares:?}");
    // The runs of a request that is not scored play no part.
    let decision = fleet.scored(LONG, &[]);
    assert_eq!(decision.miss, Some(MissReason::NoWorker));
}

#[test]
fn equals_are_spread_evenly_also_when_two_kinds_of_request_alternate() {
    let mut fleet = Fleet::new(8);
    let all: Vec<_> = (0..8).map(|endpoint| (endpoint, 3)).collect();
    let mut shares = [0_u32; 8];
    for _ in 0..800 {
        shares[fleet.scored(LONG, &all).endpoint.index()] += 1;
    }
    assert!(shares.iter().all(|share| (95..=105).contains(share)), "{shares:?}");

    let mut shares = [0_u32; 8];
    for _ in 0..200 {
        for runs in [[(0, 3), (1, 3)], [(6, 2), (7, 2)]] {
            shares[fleet.scored(LONG, &runs).endpoint.index()] += 1;
        }
    }
    assert!([0, 1, 6, 7].iter().all(|&index| (90..=110).contains(&shares[index])), "{shares:?}");
}

#[test]
fn a_backup_is_chosen_only_while_no_other_endpoint_is_a_candidate() {
    let mut fleet = Fleet::new(3);
    fleet.service.endpoints[0].backup = true;
    let order: Vec<_> = (0..4).filter_map(|_| fleet.missed(MissReason::ModelEmpty)).collect();
    assert_eq!(order, [1, 2, 1, 2]);
    assert_eq!(fleet.scored(LONG, &[(0, 9)]).miss, Some(MissReason::Excluded));
    let evidence = Evidence::None(MissReason::ModelEmpty);
    assert_eq!(fleet.decide(evidence, &[1, 2]).unwrap().endpoint, EndpointIndex(0), "the others refused");
    assert_eq!(fleet.decide(evidence, &[0, 1, 2]), None);
    fleet.service.endpoints.iter().for_each(|endpoint| assert!(endpoint.shared.mark_down()));
    assert_eq!(fleet.decide(evidence, &[]), None);
}

#[test]
fn relief_moves_a_hit_from_a_winner_at_the_cap_to_the_least_loaded_below_it() {
    // Endpoint 0 has the long run, endpoint 2 a short one.
    let check = |factor, loads: &[u32], expected: u16| {
        let mut fleet = Fleet::new(4).loads(loads).kv(|kv| (kv.spill_relief, kv.mean_load_factor) = (true, factor));
        let decision = fleet.scored(LONG, &[(0, 9), (2, 4)]);
        let blocks = [9, 0, 4, 0][usize::from(expected)];
        let rank = (blocks > 0).then_some(Rank(0));
        let moved = Brief { rank, spilled_from: Some(EndpointIndex(0)), ..hit(expected, blocks) };
        let stayed = hit(0, 9);
        assert_eq!(decision, if expected == 0 { stayed } else { moved }, "factor {factor}, loads {loads:?}");
    };
    // total 0: cap max(1, 0) = 1; a winner with nothing in flight stays, whatever the others have.
    check(175, &[0, 0, 0, 0], 0);
    check(175, &[0, 0, 0, 9], 0);
    // total 1: cap ⌈175 / 400⌉ = 1.
    check(175, &[1, 0, 0, 0], 1);
    // total 2: cap ⌈350 / 400⌉ = 1; the lowest index of those with nothing.
    check(175, &[1, 1, 0, 0], 2);
    // total 3: cap ⌈525 / 400⌉ = 2; 1 < 2 stays.
    check(175, &[1, 1, 1, 0], 0);
    // total 4: cap ⌈700 / 400⌉ = 2; 2 ≥ 2.
    check(175, &[2, 1, 1, 0], 3);
    // total 8: cap ⌈1400 / 400⌉ = 4.
    check(175, &[4, 2, 1, 1], 2);
    check(175, &[3, 3, 1, 1], 0);
    // total 40: cap ⌈7000 / 400⌉ = 18.
    check(175, &[17, 8, 8, 7], 0);
    check(175, &[18, 8, 8, 6], 3);
    // factor 100, all equal, total 8: cap 2; nobody is below it, so the winner stays.
    check(100, &[2, 2, 2, 2], 0);
    // factor 1000, total 5: cap ⌈5000 / 400⌉ = 13.
    check(1_000, &[5, 0, 0, 0], 0);
}

#[test]
fn relief_counts_candidates_only_and_can_be_off() {
    let mut fleet = Fleet::new(4).loads(&[2, 9, 1, 0]).kv(|kv| kv.spill_relief = true);
    assert!(fleet.service.endpoints[1].shared.mark_down());
    assert!(fleet.service.endpoints[3].shared.mark_down());
    // Two candidates, total 3: cap ⌈525 / 200⌉ = 3; with the others it would be ⌈2100 / 400⌉ = 6.
    assert_eq!(fleet.scored(LONG, &[(0, 9)]), hit(0, 9));
    fleet.set_loads(&[3, 9, 0, 0]);
    assert_eq!(fleet.scored(LONG, &[(0, 9)]).spilled_from, Some(EndpointIndex(0)));
    let mut off = Fleet::new(4).loads(&[50, 0, 0, 0]);
    assert_eq!(off.scored(LONG, &[(0, 9)]), hit(0, 9));
}

#[test]
fn of_32_hits_beside_a_cold_endpoint_the_16th_and_the_32nd_are_diverted() {
    let mut fleet = Fleet::new(4).cold(3, 15).cold(2, 16).kv(|kv| kv.seed_every = 16);
    // Three more shards, whose hits the same counter counts.
    let mut turns = [1, 2, 3].map(|shard| Turn::starting_at(ShardId(shard)));
    let diverted: Vec<_> = (1..=32)
        .filter(|hit_number| {
            std::mem::swap(&mut fleet.turn, &mut turns[hit_number % 3]);
            let decision = fleet.scored(LONG, &[(0, 9), (3, 2)]);
            if decision.seeded_from.is_some() {
                let expected = Brief { seeded_from: Some(EndpointIndex(0)), ..hit(3, 2) };
                assert_eq!(decision, expected);
            }
            decision.seeded_from.is_some()
        })
        .collect();
    assert_eq!(diverted, [16, 32]);
}

#[test]
fn seeding_counts_hits_only_while_another_candidate_is_cold() {
    let ticks = |fleet: &Fleet| fleet.service.shared.seed_ticks.load(Ordering::Relaxed);
    let seeded = |fleet: &mut Fleet| fleet.scored(LONG, &[(0, 9)]).seeded_from.is_some();
    // Nobody cold; the winner itself cold; a cold endpoint that is down: none of these counts.
    let mut warm = Fleet::new(3).kv(|kv| kv.seed_every = 1);
    assert!(!seeded(&mut warm));
    let mut own = Fleet::new(3).cold(0, 3).kv(|kv| kv.seed_every = 1);
    assert!(!seeded(&mut own));
    let mut down = Fleet::new(3).cold(1, 0).kv(|kv| kv.seed_every = 1);
    assert!(down.service.endpoints[1].shared.mark_down());
    assert!(!seeded(&mut down));
    // Misses do not count either.
    let mut fleet = Fleet::new(3).cold(1, 0).kv(|kv| kv.seed_every = 1);
    fleet.missed(MissReason::NoWorker);
    assert_eq!([&warm, &own, &down, &fleet].map(ticks), [0; 4]);

    // Every hit, to the lowest index of the cold ones; never the winner.
    let mut all = Fleet::new(3).cold(0, 0).cold(1, 0).cold(2, 0).kv(|kv| kv.seed_every = 1);
    assert_eq!(all.scored(LONG, &[(0, 9)]).endpoint, EndpointIndex(1));
    assert_eq!(all.scored(LONG, &[(1, 9)]).endpoint, EndpointIndex(0));
    // A floor of 0 means empty; an interval of 0 means never.
    let floor = |blocks| Fleet::new(2).cold(1, blocks).kv(|kv| (kv.seed_every, kv.seed_min_blocks) = (1, 0));
    assert!(!seeded(&mut floor(1)));
    assert!(seeded(&mut floor(0)));
    assert!(!seeded(&mut Fleet::new(2).cold(1, 0)));
}

#[test]
fn a_request_that_decides_again_keeps_its_number_and_one_that_came_to_nothing_gives_it_back() {
    let mut fleet = Fleet::new(4).cold(2, 0).kv(|kv| kv.seed_every = 2);
    let runs = [run(0, 0, 9), run(1, 0, 9)];
    let evidence = Evidence::Scored { prompt_tokens: LONG, runs: &runs };
    let mut go = |tried: &[EndpointIndex], seed_tick| {
        let decision = fleet.with_facts(&Facts { tried, seed_tick, ..Facts::of(evidence) }).expect("candidates");
        let ticks = fleet.service.shared.seed_ticks.load(Ordering::Relaxed);
        (decision.endpoint.0, decision.seed_tick, ticks)
    };
    let (first, tick, _) = go(&[], None);
    assert_eq!(tick, Some(1));
    // The other holder refuses nothing: it is the first hit still, not the second.
    let tried = [EndpointIndex(first)];
    assert_eq!(go(&tried, tick), (1 - first, Some(1), 1));
    // The second is seeded, whoever refused it before; with nobody cold left it draws nothing and loses nothing.
    assert_eq!(go(&tried, None), (2, Some(2), 2));
    let (_, tick, ticks) = go(&[tried[0], EndpointIndex(2)], Some(2));
    assert_eq!((tick, ticks), (None, 2));
    let shared = &fleet.service.shared;
    shared.undo_seed_tick(1);
    assert_eq!(shared.seed_ticks.load(Ordering::Relaxed), 2, "a later one has been drawn");
    shared.undo_seed_tick(2);
    assert_eq!(shared.seed_ticks.load(Ordering::Relaxed), 1);
}

#[test]
fn a_hit_that_spilled_can_still_be_the_seeded_one() {
    let mut fleet = Fleet::new(3).loads(&[4, 0, 1]).cold(2, 0).kv(|kv| (kv.spill_relief, kv.seed_every) = (true, 2));
    let spilled = Brief { rank: None, spilled_from: Some(EndpointIndex(0)), ..hit(1, 0) };
    assert_eq!(fleet.scored(LONG, &[(0, 9)]), spilled);
    let both = Brief { endpoint: EndpointIndex(2), seeded_from: Some(EndpointIndex(0)), ..spilled };
    assert_eq!(fleet.scored(LONG, &[(0, 9)]), both);
}

#[test]
fn what_will_be_stored_soon_draws_equal_prompts_to_it_up_to_a_bound_and_is_no_hit() {
    let claim = |endpoint, tokens| Claimed { endpoint: EndpointIndex(endpoint), rank: Some(Rank(3)), tokens };
    let with = |fleet: &mut Fleet, runs: &[Run], claims: &[Claimed]| {
        let evidence = Evidence::Scored { prompt_tokens: LONG, runs };
        fleet.with_facts(&Facts { claims, ..Facts::of(evidence) }).expect("candidates")
    };
    let decision = with(&mut Fleet::new(4).loads(&[0, 0, 3, 0]), &[], &[claim(2, LONG)]);
    assert_eq!((decision.endpoint.0, decision.tier, decision.reason), (2, Tier::Claim, Reason::Claim));
    assert_eq!((decision.rank, decision.hit_blocks, decision.claimed_tokens), (Some(Rank(3)), 0, LONG));
    assert_eq!(decision.miss, Some(MissReason::NoWorker), "nobody has anything");
    // Nobody waits behind more than 8, but for where all have as much to do: 8, and ⌈175 × 40 / 400⌉ = 18.
    assert_eq!(with(&mut Fleet::new(4).loads(&[0, 0, 7, 0]), &[], &[claim(2, LONG)]).endpoint.0, 2);
    assert_eq!(with(&mut Fleet::new(4).loads(&[0, 0, 8, 0]), &[], &[claim(2, LONG)]).tier, Tier::Select);
    assert_eq!(with(&mut Fleet::new(4).loads(&[8, 8, 16, 8]), &[], &[claim(2, LONG)]).endpoint.0, 2);
    assert_eq!(with(&mut Fleet::new(4).loads(&[7, 7, 18, 8]), &[], &[claim(2, LONG)]).tier, Tier::Select);
    // It decides against what is held where it is more of it: by a block, and not by the end of a prompt.
    let held = [run(1, 0, 5)];
    assert_eq!(with(&mut Fleet::new(4), &held, &[claim(2, 95)]).endpoint.0, 1);
    let decision = with(&mut Fleet::new(4), &held, &[claim(2, 96)]);
    assert_eq!((decision.endpoint.0, decision.tier, decision.best_tokens), (2, Tier::Claim, 80));
    // What the endpoint has already is a hit.
    let decision = with(&mut Fleet::new(4), &held, &[claim(1, 160)]);
    assert_eq!((decision.tier, decision.hit_tokens, decision.claimed_tokens), (Tier::KvExact, 80, 80));
    // An endpoint that cannot be chosen draws nobody.
    assert_eq!(with(&mut Fleet::new(4).down(&[2]), &held, &[claim(2, LONG), claim(9, LONG)]).endpoint.0, 1);
}

#[test]
fn a_claim_is_no_tick_of_the_seed() {
    let mut fleet = Fleet::new(3).cold(1, 0).kv(|kv| kv.seed_every = 1);
    let claims = [Claimed { endpoint: EndpointIndex(2), rank: None, tokens: LONG }];
    let evidence = Evidence::Scored { prompt_tokens: LONG, runs: &[] };
    assert_eq!(fleet.with_facts(&Facts { claims: &claims, ..Facts::of(evidence) }).expect("candidates").endpoint.0, 2);
    assert_eq!(fleet.service.shared.seed_ticks.load(Ordering::Relaxed), 0);
}
