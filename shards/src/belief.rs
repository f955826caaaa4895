//! What of the holders' runs a decision counts on.
//!
//! * **A rank that can be named** counts by what it holds itself, the best one for its endpoint. Equal ranks take turns:
//!   a prefix that all have must not always go to the same.
//! * **A rank that cannot be named** is the engine's choice, whose balancing knows nothing of caches: then the endpoint
//!   counts by the mean over its ranks, so that over many requests as many tokens hit as were predicted.
//! * **A rank that the client names** is the one that counts.
//! * **A demoted endpoint** ([`Trust`](crate::feedback::Trust)) counts as much as it was right lately.

#![forbid(unsafe_code)]

use std::num::NonZeroU32;
use std::sync::atomic::Ordering;

use crate::ids::{EndpointIndex, Rank};
use crate::inventory::{Medium, Run};
use crate::service::{KvExact, Service};

/// What the client says of the rank that is to serve its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamedRank {
    /// Nothing.
    No,
    /// This one; none = what it says is no rank.
    Yes(Option<Rank>),
}

/// The runs that count; none where all do as they are. `turn` is another number for each request.
#[must_use]
pub fn believed(service: &Service, prompt_tokens: u64, runs: &[Run], named: NamedRank, turn: u32) -> Option<Vec<Run>> {
    let kv = service.kv.as_ref()?;
    let demoted = service.shared.demoted.load(Ordering::Relaxed) > 0;
    if kv.ranks <= 1 && !demoted {
        return None;
    }
    let mut runs = runs.to_vec();
    if kv.ranks > 1 {
        let (first, ranks) = (turn % u32::from(kv.ranks), u32::from(kv.ranks));
        let order = |rank: Rank| (u32::from(rank.0) + ranks - first) % ranks;
        runs.sort_unstable_by_key(|run| (run.endpoint, run.medium, order(run.rank)));
        let conveys = |endpoint: EndpointIndex| {
            service.endpoints.get(endpoint.index()).is_some_and(|endpoint| endpoint.shared.conveys_rank())
        };
        if let NamedRank::Yes(Some(rank)) = named {
            runs.retain(|run| run.rank == rank || !conveys(run.endpoint));
        }
        let is_unsure = |endpoint: EndpointIndex| !conveys(endpoint) || named == NamedRank::Yes(None);
        runs = with_means(kv, prompt_tokens, &runs, is_unsure);
    }
    if demoted {
        for run in &mut runs {
            let percent = service.endpoints.get(run.endpoint.index()).map_or(100, |at| at.shared.trust.percent());
            run.blocks = (u64::from(run.blocks) * u64::from(percent) / 100) as u32;
        }
        runs.retain(|run| run.blocks > 0);
    }
    Some(runs)
}

/// Replaces the runs of each unsure endpoint by one for each medium: the mean over its ranks, in blocks of one token each,
/// so that no part of a block is lost. `runs` are in order of endpoint and medium.
fn with_means(kv: &KvExact, prompt_tokens: u64, runs: &[Run], is_unsure: impl Fn(EndpointIndex) -> bool) -> Vec<Run> {
    let same = |a: &Run, b: &Run| (a.endpoint, a.medium) == (b.endpoint, b.medium);
    let mut all = Vec::with_capacity(runs.len());
    for of_endpoint in runs.chunk_by(same) {
        let Run { endpoint, medium, .. } = of_endpoint[0];
        if !is_unsure(endpoint) {
            all.extend_from_slice(of_endpoint);
            continue;
        }
        let tokens: u64 = of_endpoint.iter().map(|run| usable_tokens(kv, prompt_tokens, run)).sum();
        let mean = tokens / u64::from(kv.ranks.max(1));
        let blocks = u32::try_from(mean).unwrap_or(u32::MAX);
        if blocks > 0 {
            all.push(Run { endpoint, rank: Rank(0), medium, blocks, block_tokens: Some(NonZeroU32::MIN) });
        }
    }
    all
}

/// Tokens of a run that an engine takes from its cache: never the prompt's last one.
fn usable_tokens(kv: &KvExact, prompt_tokens: u64, run: &Run) -> u64 {
    let block = u64::from(run.block_tokens.map_or(kv.block_tokens, NonZeroU32::get)).max(1);
    u64::from(run.blocks).min(prompt_tokens.saturating_sub(1) / block) * block
}

/// Tokens of the prompt that the longest run in device memory has, whether or not a request may go there.
#[must_use]
pub fn held_anywhere(kv: &KvExact, prompt_tokens: u64, runs: &[Run]) -> u64 {
    let in_device = runs.iter().filter(|run| run.medium == Medium::Device);
    in_device.map(|run| usable_tokens(kv, prompt_tokens, run)).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::{Contract, FIXED_SEED, HashAlgo, NoneHash};
    use crate::feedback::Compared;
    use crate::ids::ServiceId;
    use crate::inventory;
    use crate::load::LoadSlot;
    use crate::service::{Endpoint, EndpointShared};

    /// Two endpoints of so many ranks; a header chooses the rank at the first.
    fn service(ranks: u8) -> Service {
        let (_, inventory) = inventory::new(&inventory::Options { blocks_expected: 1 });
        let contract = Contract::vllm(NoneHash::from_seed(HashAlgo::Sha256Cbor, FIXED_SEED));
        let endpoint = |index: u16| {
            let shared = EndpointShared::new(EndpointIndex(index), LoadSlot(u32::from(index)), 1);
            shared.set_conveys_rank(index == 0);
            Endpoint::at(([127, 0, 0, 1], 9_000 + index).into(), shared)
        };
        let listen = ([127, 0, 0, 1], 8_000).into();
        let plain = Service::plain(ServiceId(0), listen, (0..2).map(endpoint).collect(), 1);
        Service { kv: Some(KvExact { ranks, ..KvExact::with_defaults(16, contract, inventory) }), ..plain }
    }

    fn run(endpoint: u16, rank: u8, blocks: u32) -> Run {
        Run { endpoint: EndpointIndex(endpoint), rank: Rank(rank), medium: Medium::Device, blocks, block_tokens: None }
    }

    /// (endpoint, rank, tokens) of the runs that count.
    fn counts(service: &Service, runs: &[Run], named: NamedRank, turn: u32) -> Vec<(u16, u8, u64)> {
        let runs = believed(service, 1_601, runs, named, turn).unwrap_or_else(|| runs.to_vec());
        let tokens = |run: &Run| u64::from(run.blocks) * u64::from(run.block_tokens.map_or(16, NonZeroU32::get));
        runs.iter().map(|run| (run.endpoint.0, run.rank.0, tokens(run))).collect()
    }

    #[test]
    fn a_rank_that_can_be_named_counts_itself_and_one_that_cannot_as_the_mean_of_all() {
        let service = service(4);
        let runs = [run(0, 2, 10), run(1, 0, 7), run(1, 3, 4)];
        // 11 of 4 × 16 tokens.
        assert_eq!(counts(&service, &runs, NamedRank::No, 0), [(0, 2, 160), (1, 0, 44)]);
        let beyond = [run(1, 0, 400)];
        assert_eq!(counts(&service, &beyond, NamedRank::No, 0), [(1, 0, 400)], "100 blocks of the prompt can hit");
    }

    #[test]
    fn equal_ranks_take_turns() {
        let service = service(4);
        let runs: Vec<_> = (0..4).map(|rank| run(0, rank, 5)).collect();
        let first = |turn| counts(&service, &runs, NamedRank::No, turn)[0].1;
        assert_eq!((0..8).map(first).collect::<Vec<_>>(), [0, 1, 2, 3, 0, 1, 2, 3]);
    }

    #[test]
    fn the_rank_that_a_client_names_counts() {
        let service = service(4);
        let runs = [run(0, 1, 10), run(0, 2, 20), run(1, 1, 8)];
        let named = |rank| NamedRank::Yes(Some(Rank(rank)));
        assert_eq!(counts(&service, &runs, named(1), 0), [(0, 1, 160), (1, 0, 32)]);
        assert_eq!(counts(&service, &runs, named(3), 0), [(1, 0, 32)]);
        assert_eq!(counts(&service, &runs, NamedRank::Yes(None), 0), [(0, 0, 120), (1, 0, 32)]);
    }

    #[test]
    fn with_one_rank_each_runs_stay_as_they_are_unless_an_endpoint_is_demoted() {
        let service = service(1);
        let runs = [run(0, 0, 10), run(1, 0, 20)];
        assert_eq!(believed(&service, 1_601, &runs, NamedRank::No, 0), None);
        let wrong = Compared { predicted: 160, cached: 80, block_tokens: 16 };
        (0..100).for_each(|_| _ = service.endpoints[1].shared.trust.note(wrong));
        service.shared.demoted.store(1, Ordering::Relaxed);
        assert_eq!(counts(&service, &runs, NamedRank::No, 0), [(0, 0, 160), (1, 0, 160)]);
        let never = Compared { cached: 0, ..wrong };
        (0..100).for_each(|_| _ = service.endpoints[1].shared.trust.note(never));
        assert_eq!(counts(&service, &runs, NamedRank::No, 0), [(0, 0, 160)]);
    }

    #[test]
    fn what_anybody_holds_is_capped_by_what_can_hit() {
        let service = service(1);
        let kv = service.kv.as_ref().expect("a KV rule");
        assert_eq!(held_anywhere(kv, 1_601, &[run(0, 0, 10), run(1, 0, 20)]), 320);
        assert_eq!(held_anywhere(kv, 160, &[run(0, 0, 10)]), 144);
        assert_eq!(held_anywhere(kv, 160, &[]), 0);
    }
}
