//! What a fleet holds and how it says so: chains of blocks, each held by some caches, as the events of vLLM 0.32.
//!
//! All is drawn from one seed. Who stores what comes in an order without any locality: caches fill independently.
//! (`bench/peers` reads this file too.)

use loadgen::engine::wire::{BlockHash, Event, Release, Stored, encode_batch};
use shards::block::{Chain, HashAlgo, NoneHash};
use shards::ids::BlockKey;

/// Tokens per block.
pub const BLOCK_TOKENS: usize = 16;
/// The release whose wire form is written.
const RELEASE: Release = Release::new(32, 0);

/// Splitmix64: one addition and two multiplications, any seed.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ value >> 31
    }

    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }
}

/// Sizes of a fleet.
#[derive(Clone, Debug)]
pub struct Shape {
    /// (cache, block) pairs, about.
    pub pairs: usize,
    /// Blocks of a chain, which is one store event.
    pub chain_blocks: usize,
    /// Caches that hold a chain: a quarter of them whole, the others a prefix of drawn length; a single one whole.
    pub holders: usize,
    /// Endpoints of the service.
    pub endpoints: u16,
    /// Caches of an endpoint.
    pub ranks: u8,
    /// Text of the engines' seed.
    pub engine_seed: String,
    /// Seed of everything drawn.
    pub seed: u64,
}

/// One cache's part of one chain.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    pub chain: u32,
    pub blocks: u16,
    pub endpoint: u16,
    pub rank: u8,
}

/// The content of a fleet.
pub struct Fleet {
    pub shape: Shape,
    /// Keys of every chain, one after the other.
    keys: Vec<BlockKey>,
    /// In order of arrival.
    pub parts: Vec<Part>,
}

impl Fleet {
    pub fn new(shape: &Shape) -> Self {
        let mut rng = Rng::new(shape.seed);
        let none = NoneHash::from_seed(HashAlgo::Sha256Cbor, &shape.engine_seed);
        let caches = usize::from(shape.endpoints) * usize::from(shape.ranks);
        let holders = shape.holders.min(caches);
        let mut order: Vec<usize> = (0..caches).collect();
        let (mut keys, mut parts, mut pairs) = (Vec::new(), Vec::new(), 0);
        let mut tokens = Vec::new();
        while pairs < shape.pairs {
            let chain = (keys.len() / shape.chain_blocks) as u32;
            chain_tokens(shape, chain, &mut tokens);
            let mut hashes = Chain::new(HashAlgo::Sha256Cbor, &none);
            keys.extend(tokens.chunks_exact(BLOCK_TOKENS).map(|block| hashes.push(block)));
            for place in 0..holders {
                let other = place + rng.below(caches - place);
                order.swap(place, other);
                let whole = place <= holders / 4;
                let blocks = if whole { shape.chain_blocks } else { 1 + rng.below(shape.chain_blocks) };
                let (endpoint, rank) =
                    (order[place] / usize::from(shape.ranks), order[place] % usize::from(shape.ranks));
                parts.push(Part { chain, blocks: blocks as u16, endpoint: endpoint as u16, rank: rank as u8 });
                pairs += blocks;
            }
        }
        for place in (1..parts.len()).rev() {
            parts.swap(place, rng.below(place + 1));
        }
        Fleet { shape: shape.clone(), keys, parts }
    }

    /// Chains of the fleet.
    pub fn chains(&self) -> usize {
        self.keys.len() / self.shape.chain_blocks
    }

    /// Keys of a chain.
    pub fn keys(&self, chain: u32) -> &[BlockKey] {
        let start = chain as usize * self.shape.chain_blocks;
        &self.keys[start..start + self.shape.chain_blocks]
    }

    /// Tokens of a chain.
    pub fn tokens(&self, chain: u32, tokens: &mut Vec<u32>) {
        chain_tokens(&self.shape, chain, tokens);
    }

    /// (cache, block) pairs.
    pub fn pairs(&self) -> usize {
        self.parts.iter().map(|part| usize::from(part.blocks)).sum()
    }

    /// The payload in which a cache announces its part of a chain.
    pub fn store(&self, part: &Part) -> Vec<u8> {
        let mut tokens = Vec::new();
        self.tokens(part.chain, &mut tokens);
        let blocks = usize::from(part.blocks);
        store(&self.keys(part.chain)[..blocks], &tokens[..blocks * BLOCK_TOKENS], part.rank)
    }

    /// The payload in which a cache says that its part of a chain is gone: one event a block, the last first.
    pub fn removal(&self, part: &Part) -> Vec<u8> {
        let keys = &self.keys(part.chain)[..usize::from(part.blocks)];
        let events: Vec<_> =
            keys.iter().rev().map(|key| Event::Removed(BlockHash::Key(key.0), Default::default())).collect();
        encode_batch(RELEASE, 0.0, &events, Some(u64::from(part.rank)))
    }
}

/// The payload of one store of a whole sequence.
pub fn store(keys: &[BlockKey], tokens: &[u32], rank: u8) -> Vec<u8> {
    let stored = Stored {
        hashes: keys.iter().map(|key| BlockHash::Key(key.0)).collect(),
        tokens: tokens.to_vec(),
        block_tokens: BLOCK_TOKENS as u64,
        ..Stored::default()
    };
    encode_batch(RELEASE, 0.0, &[Event::Stored(stored)], Some(u64::from(rank)))
}

/// Tokens of a vocabulary of 128,000, the same for the same chain.
fn chain_tokens(shape: &Shape, chain: u32, tokens: &mut Vec<u32>) {
    let mut rng = Rng::new(shape.seed ^ u64::from(chain).wrapping_mul(0xd6e8_feb8_6659_fd93));
    tokens.clear();
    tokens.extend((0..shape.chain_blocks * BLOCK_TOKENS).map(|_| rng.below(128_000) as u32));
}
