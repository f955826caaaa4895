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
