//! What holds of every decision.

use proptest::prelude::*;

use super::*;
use crate::service::Select;

/// An endpoint as drawn: up, weight, backup, retired, load, blocks.
type Drawn = (bool, u32, bool, bool, u32, u64);

fn drawn_fleet(drawn: &[Drawn], select: Select, relief: bool, every: u32) -> Fleet {
    let mut fleet = Fleet::new(drawn.len() as u16).kv(|kv| (kv.spill_relief, kv.seed_every) = (relief, every));
    fleet.service.select = select;
    for (index, &(up, weight, backup, retired, _, blocks)) in drawn.iter().enumerate() {
        let endpoint = &mut fleet.service.endpoints[index];
        (endpoint.weight, endpoint.backup, endpoint.retired) = (weight, backup, retired);
        endpoint.shared.kv_blocks.store(blocks, Ordering::Relaxed);
        if !up {
            endpoint.shared.mark_down();
        }
    }
    fleet.set_loads(&drawn.iter().map(|drawn| drawn.4).collect::<Vec<_>>());
    fleet
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn equal_inputs_give_equal_decisions_and_only_a_candidate_is_chosen(
        drawn in proptest::collection::vec(
            (any::<bool>(), 0..3_u32, any::<bool>(), proptest::bool::weighted(0.1), 0..5_u32, 0..40_u64), 1..12),
        least in any::<bool>(),
        relief in any::<bool>(),
        every in 0..4_u32,
        requests in proptest::collection::vec(
            (0..200_u64, proptest::collection::vec((0..14_u16, 0..4_u8, 0..9_u32), 0..10),
             proptest::collection::vec(0..12_u16, 0..3)), 1..20),
    ) {
        let select = if least { Select::LeastConnections } else { Select::RoundRobin };
        let mut fleets = [0, 1].map(|_| drawn_fleet(&drawn, select, relief, every));
        for (prompt_tokens, runs, tried) in requests {
            let runs: Vec<_> = runs.into_iter().map(|(endpoint, rank, blocks)| run(endpoint, rank, blocks)).collect();
            let evidence = Evidence::Scored { prompt_tokens, runs: &runs };
            let [first, second] = fleets.each_mut().map(|fleet| fleet.decide(evidence, &tried));
            prop_assert_eq!(&first, &second);
            let usable = |backup: bool| {
                let tried = &tried;
                drawn.iter().enumerate().filter(move |(index, drawn)| {
                    drawn.0 && drawn.1 > 0 && drawn.2 == backup && !drawn.3 && !tried.contains(&(*index as u16))
                }).map(|(index, _)| index).collect::<Vec<_>>()
            };
            let candidates = if usable(false).is_empty() { usable(true) } else { usable(false) };
            let Some(decision) = first else {
                prop_assert!(candidates.is_empty(), "who could have taken it was not asked");
                continue;
            };
            prop_assert!(candidates.contains(&decision.endpoint.index()));
            let best = |index: usize| {
                runs.iter().filter(|run| run.endpoint.index() == index).map(|run| run.blocks).max().unwrap_or(0)
            };
            let usable_blocks = (prompt_tokens.saturating_sub(1) / 16) as u32;
            prop_assert_eq!(decision.miss.is_some(), decision.tier == Tier::Select);
            if decision.tier == Tier::KvExact {
                prop_assert_eq!(decision.hit_blocks, best(decision.endpoint.index()).min(usable_blocks));
                prop_assert_eq!(decision.hit_tokens, u64::from(decision.hit_blocks) * 16);
                let winner = decision.seeded_from.or(decision.spilled_from).unwrap_or(decision.endpoint);
                let longest = candidates.iter().map(|&index| best(index)).max();
                prop_assert_eq!(Some(best(winner.index())), longest);
            }
        }
    }
}
