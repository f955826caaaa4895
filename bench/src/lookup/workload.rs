//! What is stored and what decides, all drawn from one seed.

use std::sync::Arc;

use shards::block::{Contract, FIXED_SEED, HashAlgo, NoneHash};
use shards::ids::{BlockKey, EndpointIndex, ServiceId, ShardId};
use shards::inventory::{self, Run};
use shards::load::{LoadSlot, LoadTable, Reservation};
use shards::route::{Chooser, Decision, Evidence, Facts, Turn, decide};
use shards::service::{Board, Endpoint, EndpointShared, KvExact, Service};

pub use crate::ingest::fleet::Rng;

const BLOCK_TOKENS: u32 = 16;

/// Sizes of a workload.
#[derive(Clone, Debug)]
pub struct Shape {
    pub blocks: usize,
    pub chain_blocks: usize,
    pub holders: usize,
    pub endpoints: u16,
    pub seed: u64,
}

/// One prompt and who holds how much of it.
pub struct Chain {
    pub keys: Vec<BlockKey>,
    /// Endpoint and blocks from block 0, at least 1.
    pub held: Vec<(u16, usize)>,
}

pub struct Workload {
    pub shape: Shape,
    pub chains: Vec<Chain>,
}

impl Workload {
    pub fn new(shape: &Shape) -> Self {
        let mut rng = Rng::new(shape.seed);
        let mut endpoints: Vec<u16> = (0..shape.endpoints).collect();
        let chains = (0..shape.blocks.div_ceil(shape.chain_blocks)).map(|_| {
            let keys = (0..shape.chain_blocks).map(|_| BlockKey(rng.next())).collect();
            let holders = shape.holders.min(endpoints.len());
            let held = (0..holders).map(|place| {
                let other = place + rng.below(endpoints.len() - place);
                endpoints.swap(place, other);
                let whole = place <= holders / 4;
                let blocks = if whole { shape.chain_blocks } else { 1 + rng.below(shape.chain_blocks) };
                (endpoints[place], blocks)
            });
            let held = held.collect();
            Chain { keys, held }
        });
        Workload { shape: shape.clone(), chains: chains.collect() }
    }

    pub fn blocks(&self) -> usize {
        self.chains.len() * self.shape.chain_blocks
    }

    pub fn pairs(&self) -> usize {
        self.chains.iter().flat_map(|chain| &chain.held).map(|(_, blocks)| blocks).sum()
    }
}

/// A service with all of mode 3's defaults, its endpoints warm and differently loaded.
pub struct Decider {
    service: Service,
    loads: Arc<LoadTable>,
    turn: Turn,
    _in_flight: Vec<Reservation>,
}

impl Decider {
    /// In a process of so many shards, of which it is the first.
    pub fn new(endpoints: u16, shards: usize, seed: u64) -> Self {
        let (_, inventory) = inventory::new(&inventory::Options { blocks_expected: 1 });
        let contract = Contract::vllm(NoneHash::from_seed(HashAlgo::Sha256Cbor, FIXED_SEED));
        let board = Board::new(usize::from(endpoints));
        let endpoints_of = (0..endpoints).map(|index| endpoint(&board, index)).collect();
        let service = Service {
            kv: Some(KvExact::with_defaults(BLOCK_TOKENS, contract, inventory)),
            ..Service::plain(ServiceId(0), ([127, 0, 0, 1], 8_000).into(), endpoints_of, 1)
        };
        let loads = Arc::new(LoadTable::new(shards, usize::from(endpoints)));
        let mut rng = Rng::new(seed ^ 0x10ad);
        let in_flight = (0..u32::from(endpoints) * 4)
            .map(|_| loads.reserve(ShardId(0), LoadSlot(rng.below(usize::from(endpoints)) as u32), 0))
            .collect();
        Decider { service, loads, turn: Turn::starting_at(ShardId(0)), _in_flight: in_flight }
    }

    /// What it sees of loads.
    pub fn loads(&self) -> Arc<LoadTable> {
        Arc::clone(&self.loads)
    }

    pub fn decide(&mut self, blocks: usize, runs: &[Run]) -> Option<Decision> {
        let mut chooser = Chooser { shard: ShardId(0), loads: &self.loads, turn: &mut self.turn };
        let prompt_tokens = blocks as u64 * u64::from(BLOCK_TOKENS) + 1;
        decide(&self.service, &Facts::of(Evidence::Scored { prompt_tokens, runs }), &mut chooser)
    }
}

fn endpoint(board: &Board, index: u16) -> Endpoint {
    let shared = EndpointShared::with(board.vitals(LoadSlot(u32::from(index))), EndpointIndex(index), 1);
    shared.set_kv_blocks(1_000);
    Endpoint::at(([127, 0, 0, 1], 9_000).into(), shared)
}
