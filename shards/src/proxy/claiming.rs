//! What a request learns from the claims of others, and what it claims itself (see [`crate::claims`]).

use std::time::Instant;

use xxhash_rust::xxh3::xxh3_64;

use crate::claims::{Claimable, Claims, Holder};
use crate::ids::EndpointIndex;
use crate::route::{Claimed, Decision};
use crate::service::{KvExact, Service};

use super::score::Score;

/// Bytes at either end of a body that tell it from others: all of most bodies.
const BODY_END: usize = 256 * 1024;

/// A prompt on its way to a decision.
#[derive(Debug)]
pub struct Claiming<'a> {
    claims: &'a Claims,
    service: &'a Service,
    kv: &'a KvExact,
    score: &'a Score,
    prompt: Claimable<'a>,
    now: Instant,
}

impl<'a> Claiming<'a> {
    /// None where nothing of the request's prompt is known, or the rule makes no claims.
    #[must_use]
    pub fn of(claims: &'a Claims, service: &'a Service, score: &'a Score, body: &[u8]) -> Option<Self> {
        let kv = service.kv.as_ref().filter(|kv| !kv.claim_for.is_zero())?;
        let prompt = score.claimable(service.id, kv.block_tokens, || body_hash(body))?;
        Some(Claiming { claims, service, kv, score, prompt, now: Instant::now() })
    }

    /// What endpoints are about to have of the prompt, each at most once for a rank.
    #[must_use]
    pub fn found(&self) -> Vec<Claimed> {
        let mut found: Vec<Claimed> = Vec::new();
        self.claims.find(&self.prompt, self.score.held(None), self.now, self.kv.claim_for, |holder, tokens| {
            let Holder { endpoint, rank, epoch } = holder;
            // A rule that changed may have fewer endpoints; one that was emptied since has other claims.
            let valid = |endpoint: &&crate::service::Endpoint| endpoint.shared.epoch() as u8 == epoch as u8;
            if self.service.endpoints.get(endpoint.index()).filter(valid).is_none() {
                return;
            }
            match found.iter_mut().find(|claimed| claimed.endpoint == endpoint && claimed.rank == rank) {
                Some(claimed) => claimed.tokens = claimed.tokens.max(tokens),
                None => found.push(Claimed { endpoint, rank, tokens }),
            }
        });
        found
    }

    /// Claims the prompt for the endpoint that it goes to.
    pub fn claim(&self, decision: &Decision) {
        let endpoint = decision.endpoint;
        let epoch = self.service.endpoints[endpoint.index()].shared.epoch();
        let holder = Holder { endpoint, rank: decision.rank, epoch };
        self.claims.claim(&self.prompt, self.score.held(Some(endpoint)), holder, self.now, self.kv.claim_for);
    }
}

/// Equal for equal requests; of very large ones the ends are looked at.
fn body_hash(body: &[u8]) -> u64 {
    if body.len() <= 2 * BODY_END {
        return xxh3_64(body);
    }
    let ends = [xxh3_64(&body[..BODY_END]), xxh3_64(&body[body.len() - BODY_END..]), body.len() as u64];
    ends.iter().fold(0, |hash: u64, end| hash.rotate_left(23).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ end)
}

impl Score {
    /// Blocks of the rule's keys that the endpoint has of the prompt, or, without one, that somebody has.
    fn held(&self, endpoint: Option<EndpointIndex>) -> usize {
        let Score::Runs { runs, .. } = self else { return 0 };
        let of = runs.iter().filter(|run| run.block_tokens.is_none() && endpoint.is_none_or(|of| run.endpoint == of));
        of.map(|run| run.blocks as usize).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::block::{Contract, FIXED_SEED, HashAlgo, NoneHash};
    use crate::ids::{BlockKey, ServiceId, ShardId};
    use crate::inventory;
    use crate::load::{LoadSlot, LoadTable};
    use crate::proxy::score::PromptKeys;
    use crate::route::{Chooser, Facts, Turn, decide};
    use crate::service::{Blend, Endpoint, EndpointShared};

    /// Four endpoints that hold nothing.
    fn service() -> Service {
        let endpoint = |index: u16| {
            let shared = EndpointShared::new(EndpointIndex(index), LoadSlot(index.into()), 1);
            Endpoint::at(([127, 0, 0, 1], 9_000 + index).into(), shared)
        };
        let contract = Contract::vllm(NoneHash::from_seed(HashAlgo::Sha256Cbor, FIXED_SEED));
        let (_, inventory) = inventory::new(&inventory::Options { blocks_expected: 1 });
        let endpoints = (0..4).map(endpoint).collect();
        Service {
            kv: Some(KvExact { blend: Blend::Hard, ..KvExact::with_defaults(16, contract, inventory) }),
            ..Service::plain(ServiceId(0), ([127, 0, 0, 1], 8_000).into(), endpoints, 1)
        }
    }

    #[test]
    fn a_claim_is_found_until_its_endpoint_goes_down_or_is_emptied() {
        let (service, claims) = (service(), Claims::new());
        let keys = PromptKeys::of((1..=10).map(BlockKey).collect());
        let score = Score::Runs { prompt_tokens: 170, runs: Vec::new(), keys };
        let claiming = || Claiming::of(&claims, &service, &score, b"body").expect("the prompt has keys");
        let loads = Arc::new(LoadTable::new(1, 4));
        let mut turn = Turn::starting_at(ShardId(0));
        let mut dispatch = |claims: &[Claimed]| {
            let mut chooser = Chooser { shard: ShardId(0), loads: &loads, turn: &mut turn };
            let facts = Facts { claims, ..Facts::of(score.evidence()) };
            decide(&service, &facts, &mut chooser).expect("all are up")
        };
        assert_eq!(claiming().found(), []);
        let first = dispatch(&[]);
        claiming().claim(&first);
        let claimed = Claimed { endpoint: first.endpoint, rank: None, tokens: 160 };
        assert_eq!(claiming().found(), [claimed]);
        let second = dispatch(&claiming().found());
        assert_eq!((second.endpoint, second.claimed_tokens, second.hit_tokens), (first.endpoint, 160, 0));

        let shared = &service.endpoints[first.endpoint.index()].shared;
        shared.mark_down();
        shared.mark_up();
        assert_eq!(claiming().found(), [], "it comes back without what it was about to have");
        claiming().claim(&first);
        assert_eq!(claiming().found(), [claimed]);
        shared.emptied.store(1, Ordering::Relaxed);
        assert_eq!(claiming().found(), []);
    }

    #[test]
    fn bodies_that_differ_at_either_end_differ() {
        let long = vec![b'a'; 3 * BODY_END];
        let changed = |at: usize| {
            let mut body = long.clone();
            body[at] = b'b';
            body_hash(&body)
        };
        assert_eq!(body_hash(&long), body_hash(&long.clone()));
        assert_ne!(body_hash(&long), changed(0));
        assert_ne!(body_hash(&long), changed(long.len() - 1));
        assert_ne!(body_hash(&long), body_hash(&long[1..]));
        assert_ne!(body_hash(b"one"), body_hash(b"two"));
    }
}
