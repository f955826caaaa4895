//! A service of endpoints with loads and caches that tests set.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::*;
use crate::block::{Contract, FIXED_SEED, HashAlgo, NoneHash};
use crate::ids::{Rank, ServiceId};
use crate::inventory::{self, Medium, Run};
use crate::load::{LoadSlot, Reservation};
use crate::service::{Blend, Endpoint, EndpointShared, KvExact, MissReason};

mod blend;
mod bypass;
mod disagg;
mod exact;
mod property;
mod select;
mod ttft;

const SHARD: ShardId = ShardId(0);
/// Enough tokens that the cap of the saving plays no part: 100 blocks and one token.
const LONG: u64 = 1_601;

/// A service of warm endpoints without blend, relief or seeding, with loads that tests set.
struct Fleet {
    service: Service,
    loads: Arc<LoadTable>,
    turn: Turn,
    in_flight: Vec<Reservation>,
}

impl Fleet {
    fn new(endpoints: u16) -> Self {
        let (_, inventory) = inventory::new(&inventory::Options { blocks_expected: 1 });
        let contract = Contract::vllm(NoneHash::from_seed(HashAlgo::Sha256Cbor, FIXED_SEED));
        let kv = KvExact {
            blend: Blend::Off,
            spill_relief: false,
            seed_every: 0,
            ..KvExact::with_defaults(16, contract, inventory)
        };
        let endpoint = |index: u16| {
            let shared = EndpointShared::new(EndpointIndex(index), LoadSlot(u32::from(index)), 1);
            shared.set_kv_blocks(1_000);
            Endpoint::at(([127, 0, 0, 1], 9_000 + index).into(), shared)
        };
        let endpoints_of = (0..endpoints).map(endpoint).collect();
        let service =
            Service { kv: Some(kv), ..Service::plain(ServiceId(0), ([127, 0, 0, 1], 8_000).into(), endpoints_of, 1) };
        let loads = Arc::new(LoadTable::new(1, usize::from(endpoints)));
        Fleet { service, loads, turn: Turn::starting_at(SHARD), in_flight: Vec::new() }
    }

    fn kv(mut self, edit: impl FnOnce(&mut KvExact)) -> Self {
        edit(self.service.kv.as_mut().expect("a KV rule"));
        self
    }

    fn loads(mut self, loads: &[u32]) -> Self {
        self.set_loads(loads);
        self
    }

    fn set_loads(&mut self, loads: &[u32]) {
        self.in_flight.clear();
        for (index, &load) in loads.iter().enumerate() {
            self.in_flight.extend((0..load).map(|_| self.loads.reserve(SHARD, LoadSlot(index as u32), 0)));
        }
    }

    fn down(self, indices: &[usize]) -> Self {
        indices.iter().for_each(|index| assert!(self.service.endpoints[*index].shared.mark_down()));
        self
    }

    fn cold(self, index: usize, blocks: u64) -> Self {
        self.service.endpoints[index].shared.set_kv_blocks(blocks);
        self
    }

    fn with_facts(&mut self, facts: &Facts<'_>) -> Option<Decision> {
        let mut chooser = Chooser { shard: SHARD, loads: &self.loads, turn: &mut self.turn };
        decide(&self.service, facts, &mut chooser)
    }

    fn decide(&mut self, evidence: Evidence<'_>, tried: &[u16]) -> Option<Decision> {
        let tried: Vec<_> = tried.iter().copied().map(EndpointIndex).collect();
        self.with_facts(&Facts { tried: &tried, ..Facts::of(evidence) })
    }

    /// A decision over (endpoint, blocks) runs at rank 0.
    fn scored(&mut self, prompt_tokens: u64, runs: &[(u16, u32)]) -> Brief {
        let runs: Vec<_> = runs.iter().map(|&(endpoint, blocks)| run(endpoint, 0, blocks)).collect();
        let decision = self.decide(Evidence::Scored { prompt_tokens, runs: &runs }, &[]);
        Brief::of(&decision.expect("there are candidates"))
    }

    fn missed(&mut self, reason: MissReason) -> Option<u16> {
        self.decide(Evidence::None(reason), &[]).map(|decision| decision.endpoint.0)
    }
}

/// A decision without what it saw.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Brief {
    endpoint: EndpointIndex,
    rank: Option<Rank>,
    tier: Tier,
    hit_blocks: u32,
    hit_tokens: u64,
    miss: Option<MissReason>,
    spilled_from: Option<EndpointIndex>,
    seeded_from: Option<EndpointIndex>,
}

impl Brief {
    fn of(decision: &Decision) -> Self {
        let Decision { endpoint, rank, tier, hit_blocks, hit_tokens, miss, spilled_from, seeded_from, .. } = *decision;
        Brief { endpoint, rank, tier, hit_blocks, hit_tokens, miss, spilled_from, seeded_from }
    }
}

fn run(endpoint: u16, rank: u8, blocks: u32) -> Run {
    Run { endpoint: EndpointIndex(endpoint), rank: Rank(rank), medium: Medium::Device, blocks, block_tokens: None }
}

/// A hit without diversion at rank 0; without blocks, one of an endpoint that has nothing.
fn hit(endpoint: u16, hit_blocks: u32) -> Brief {
    Brief {
        endpoint: EndpointIndex(endpoint),
        rank: Some(Rank(0)),
        tier: Tier::KvExact,
        hit_blocks,
        hit_tokens: u64::from(hit_blocks) * 16,
        miss: None,
        spilled_from: None,
        seeded_from: None,
    }
}
