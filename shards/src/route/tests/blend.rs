//! Each blend's formula, with numbers worked out by hand.

use super::*;

/// Two holders (9 and 5 blocks) and one without any overlap, in this blend.
fn two_holders(blend: Blend) -> Fleet {
    Fleet::new(3).kv(|kv| kv.blend = blend)
}

impl Fleet {
    fn capacities(self, blocks: &[u32]) -> Self {
        for (endpoint, blocks) in self.service.endpoints.iter().zip(blocks) {
            endpoint.shared.set_cache_blocks(Some(*blocks));
        }
        self
    }

    /// The decision among runs of 9 blocks at endpoint 0 and `other` blocks at endpoint 1.
    fn between(&mut self, other: u32) -> Decision {
        let runs = [run(0, 0, 9), run(1, 0, other)];
        self.decide(Evidence::Scored { prompt_tokens: LONG, runs: &runs }, &[]).expect("there are candidates")
    }
}

/// Where a request goes, whom it was taken from, and the winner's cap.
fn outcome(decision: &Decision) -> (u16, Option<u16>, u64) {
    (decision.endpoint.0, decision.spilled_from.map(|from| from.0), decision.terms.cap)
}

#[test]
fn off_looks_at_no_load_but_among_equals() {
    let mut fleet = two_holders(Blend::Off).loads(&[90, 0, 0]);
    assert_eq!(outcome(&fleet.between(5)), (0, None, 0));
    assert_eq!(outcome(&fleet.between(9)), (1, None, 0));
}

#[test]
fn hard_takes_the_longest_overlap_below_the_holders_own_cap() {
    let check = |factor, loads: &[u32], expected| {
        let mut fleet = two_holders(Blend::Hard).loads(loads).kv(|kv| kv.mean_load_factor = factor);
        let decision = fleet.between(5);
        assert_eq!(outcome(&decision), expected, "factor {factor}, loads {loads:?}");
        assert_eq!(decision.reason, if expected.1.is_some() { Reason::Blend } else { Reason::Overlap });
        assert_eq!(decision.hit_blocks, [9, 5][usize::from(expected.0)], "what the chosen one has");
    };
    // Load 0: cap max(1, 0) = 1.
    check(175, &[0, 0, 0], (0, None, 1));
    // The third endpoint has no overlap: neither its load nor its idleness counts.
    check(175, &[0, 0, 50], (0, None, 1));
    // Load 1: cap ⌈175 × 1 / 200⌉ = 1.
    check(175, &[1, 0, 0], (1, Some(0), 1));
    // Load 4: cap ⌈700 / 200⌉ = 4.
    check(175, &[3, 1, 0], (0, None, 4));
    check(175, &[4, 0, 0], (1, Some(0), 4));
    // Load 10: cap ⌈1750 / 200⌉ = 9.
    check(175, &[8, 2, 0], (0, None, 9));
    check(175, &[9, 1, 0], (1, Some(0), 9));
    // Factor 300, load 4: cap 6.
    check(300, &[4, 0, 0], (0, None, 6));
    // Factor 100, load 4: cap 2 for both, and both are at it: the least loaded, then the longer overlap.
    check(100, &[2, 2, 0], (0, None, 2));
}

#[test]
fn hard_gives_each_holder_its_part_by_what_its_cache_holds() {
    let check = |capacities: &[u32], loads: &[u32], expected| {
        let mut fleet = two_holders(Blend::Hard).loads(loads).capacities(capacities).kv(|kv| kv.mean_load_factor = 100);
        assert_eq!(outcome(&fleet.between(5)), expected, "capacities {capacities:?}, loads {loads:?}");
    };
    // Of 4 requests a quarter is 1 and three quarters are 3.
    check(&[1_000, 3_000], &[1, 3, 0], (0, None, 1));
    check(&[1_000, 3_000], &[3, 1, 0], (1, Some(0), 1));
    // Both are at their parts: the least loaded.
    check(&[3_000, 1_000], &[3, 1, 0], (1, Some(0), 3));
    check(&[3_000, 1_000], &[2, 2, 0], (0, None, 3));
    // Whoever does not tell counts as the mean of those that do: 4 / 2 = 2 each.
    check(&[1_000], &[2, 2, 0], (0, None, 2));
    check(&[1_000], &[1, 3, 0], (0, None, 2));
    // More than 8,000,000 blocks are no more than that: 2 each.
    check(&[u32::MAX, 8_000_000], &[1, 3, 0], (0, None, 2));
}

#[test]
fn a_single_holder_is_never_at_a_cap_of_its_own_and_relief_finds_it_all_the_same() {
    let runs = [run(0, 0, 9)];
    let mut fleet = two_holders(Blend::Hard).loads(&[50, 0, 0]);
    // ⌈175 × 50 / 100⌉ = 88.
    let decision = fleet.decide(Evidence::Scored { prompt_tokens: LONG, runs: &runs }, &[]).expect("candidates");
    assert_eq!((outcome(&decision), decision.terms.load, decision.terms.total), ((0, None, 88), 50, 50));
    // Over the fleet: ⌈175 × 50 / 300⌉ = 30.
    let mut fleet = fleet.kv(|kv| kv.spill_relief = true);
    let decision = fleet.decide(Evidence::Scored { prompt_tokens: LONG, runs: &runs }, &[]).expect("candidates");
    assert_eq!((outcome(&decision), decision.reason), ((1, Some(0), 30), Reason::Relief));
    assert_eq!((decision.hit_blocks, decision.best_tokens, decision.possible_blocks), (0, 9 * 16, 100));
}

#[test]
fn where_the_blend_has_spilled_there_is_no_relief_and_seeding_goes_on() {
    let mut fleet = two_holders(Blend::Hard).loads(&[4, 2, 0]).kv(|kv| kv.spill_relief = true);
    // Holders: load 6, cap ⌈1050 / 200⌉ = 6, so 4 stays; fleet: ⌈1050 / 300⌉ = 4, so it is relieved by the idle one.
    assert_eq!(outcome(&fleet.between(5)), (2, Some(0), 4));
    // Holders: load 4, cap 4: endpoint 1, which is not taken for being at the fleet-wide cap of 3 itself.
    fleet.set_loads(&[4, 0, 0]);
    assert_eq!(outcome(&fleet.between(5)), (1, Some(0), 4));
    let mut fleet = fleet.cold(2, 0).kv(|kv| kv.seed_every = 1);
    let decision = fleet.between(5);
    assert_eq!((decision.endpoint.0, decision.reason), (2, Reason::Seed));
    assert_eq!((decision.spilled_from, decision.seeded_from), (Some(EndpointIndex(0)), Some(EndpointIndex(1))));
}

#[test]
fn soft_weighs_missing_blocks_against_load() {
    let check = |penalty, loads: &[u32], other, expected: (u16, u64)| {
        let mut fleet = two_holders(Blend::Soft).loads(loads).capacities(&[10, 10]).kv(|kv| kv.load_penalty = penalty);
        let decision = fleet.between(other);
        let spilled = (expected.0 != 0).then_some(EndpointIndex(0));
        assert_eq!((decision.endpoint.0, decision.terms.cost), expected, "penalty {penalty}, loads {loads:?}");
        assert_eq!(decision.spilled_from, spilled);
    };
    // 9 and 8 blocks: 1,000 for the missing one, against ⌊32 × load / 10⌋.
    check(32, &[0, 0, 0], 8, (0, 0));
    check(32, &[312, 0, 0], 8, (0, 998));
    check(32, &[313, 0, 0], 8, (1, 1000));
    check(32, &[313, 1, 0], 8, (0, 1001));
    // Equal costs: the longer overlap.
    check(10_000, &[1, 0, 0], 8, (0, 1000));
    check(10_010, &[1, 0, 0], 8, (1, 1000));
    // Four missing blocks cost 4,000, and the idle endpoint without overlap is no holder.
    check(100_000, &[1, 0, 0], 5, (1, 4000));
    check(30_000, &[1, 0, 0], 5, (0, 3000));
}

#[test]
fn adaptive_loosens_the_factor_as_load_grows() {
    let check = |blend, sum, loads: &[u32], expected| {
        let mut fleet = two_holders(blend).loads(loads).kv(|kv| kv.capacity_sum_milli = sum);
        assert_eq!(outcome(&fleet.between(5)), expected, "{blend:?}, loads {loads:?}");
    };
    let adaptive = |loads: &[u32], expected| check(Blend::Adaptive, None, loads, expected);
    // Up to 16 as `hard`: ⌈175 × 16 / 200⌉ = 14.
    adaptive(&[13, 3, 0], (0, None, 14));
    adaptive(&[14, 2, 0], (1, Some(0), 14));
    // 17: 175 + ⌊12.5⌋ = 187, ⌈187 × 17 / 200⌉ = 16.
    adaptive(&[15, 2, 0], (0, None, 16));
    // 20: 225, ⌈4500 / 200⌉ = 23; `hard` has ⌈3500 / 200⌉ = 18.
    adaptive(&[19, 1, 0], (0, None, 23));
    check(Blend::Hard, None, &[19, 1, 0], (1, Some(0), 18));
    // From 26 on 300: ⌈300 × 26 / 200⌉ = 39, ⌈300 × 40 / 200⌉ = 60.
    adaptive(&[26, 0, 0], (0, None, 39));
    adaptive(&[40, 0, 0], (0, None, 60));
    // A fleet that can do twice as much has half the load: 20 is as 10, and the cap as of `hard`.
    check(Blend::Adaptive, Some(2 * CAPACITY_REFERENCE_MILLI), &[19, 1, 0], (1, Some(0), 18));
    // 40 is as 20: ⌈225 × 40 / 200⌉ = 45.
    check(Blend::Adaptive, Some(2 * CAPACITY_REFERENCE_MILLI), &[40, 0, 0], (0, None, 45));
    // The factor of relief grows along: 20 requests, ⌈225 × 20 / 300⌉ = 15 and not ⌈175 × 20 / 300⌉ = 12.
    let mut fleet = two_holders(Blend::Adaptive).loads(&[14, 6, 0]).kv(|kv| kv.spill_relief = true);
    assert_eq!(outcome(&fleet.between(5)), (0, None, 15));
}

#[test]
fn adaptive_soft_raises_the_penalty_as_load_grows() {
    let check = |sum, loads: &[u32], expected: (u16, u64)| {
        let fleet = two_holders(Blend::AdaptiveSoft).loads(loads).capacities(&[1_000, 1_000]);
        let decision = fleet.kv(|kv| kv.capacity_sum_milli = sum).between(8);
        assert_eq!((decision.endpoint.0, decision.terms.cost), expected, "loads {loads:?}");
    };
    // Up to 16: ⌊50,000 × load / 1,000⌋.
    check(None, &[16, 0, 0], (0, 800));
    // 17: 55,000 × 17 / 1,000 = 935; 18: 60,000 × 18 / 1,000 = 1,080 > 1,000.
    check(None, &[17, 0, 0], (0, 935));
    check(None, &[18, 0, 0], (1, 1000));
    // From 26 on 100,000: 9 and 17 cost 900 and 1,000 + 1,700.
    check(None, &[9, 17, 0], (0, 900));
    check(None, &[11, 15, 0], (0, 1100));
    // On half the fleet 9 requests are as 18: 60,000 × 9 / 1,000 = 540.
    check(Some(CAPACITY_REFERENCE_MILLI / 2), &[9, 0, 0], (0, 540));
}
