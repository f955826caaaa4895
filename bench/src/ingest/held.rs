//! Blocks per second and bytes per held block, without sockets; and one very long prompt.

use std::time::Duration;

use kvlane::ingest::Verdict;
use shards::block::{Chain, HashAlgo, NoneHash};
use shards::inventory::Walk;

use super::feed::{Fed, RULE_SEED, Took};
use super::fleet::{self, BLOCK_TOKENS, Fleet, Part, Rng, Shape};
use crate::memory;

/// How the engines' keys relate to the rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// They are what the rule says.
    Exact,
    /// They cannot be known: the ingest makes its own.
    Derived,
}

impl Mode {
    fn engine_seed(self) -> &'static str {
        match self {
            Mode::Exact => RULE_SEED,
            Mode::Derived => "no one guesses this seed",
        }
    }

    fn verdict(self) -> Verdict {
        match self {
            Mode::Exact => Verdict::Exact,
            Mode::Derived => Verdict::Derived,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Mode::Exact => "exact",
            Mode::Derived => "derived",
        }
    }
}

/// One line of the report.
pub struct Row {
    pub mode: Mode,
    pub holders: usize,
    pub pairs: usize,
    pub keys: usize,
    pub fill: Took,
    pub bytes_per_pair: f64,
    /// Pairs removed and stored again, each counted once per direction.
    pub churned: usize,
    pub churn: Took,
}

/// Fills an inventory, weighs it, and then takes parts away and gives them back, as full caches do.
///
/// # Errors
/// If what is held at the end is not what was announced.
pub fn measure(mode: Mode, holders: usize, pairs: usize, seed: u64) -> anyhow::Result<Row> {
    let engine_seed = mode.engine_seed().to_owned();
    let shape = Shape { pairs, chain_blocks: 88, holders, endpoints: 16, ranks: 2, engine_seed, seed };
    let fleet = Fleet::new(&shape);
    let keys = fleet.chains() * shape.chain_blocks;
    let before = memory::in_use();
    let mut fed = Fed::new(&shape, keys);
    let fill = fed.fill(&fleet);
    // What others in the process give back meanwhile is not ours to count.
    let bytes = memory::in_use().saturating_sub(before);
    let held = fed.check(mode.verdict())?;
    anyhow::ensure!(held == fleet.pairs() as u64, "{held} pairs are held, {} were announced", fleet.pairs());

    let parts = churned(&fleet, pairs / 10);
    let mut churn = Took::default();
    for some in parts.chunks(512) {
        for payload in [Fleet::removal, Fleet::store] {
            let took = fed.apply_all(some, |part| payload(&fleet, part));
            churn.wall += took.wall;
            churn.cpu += took.cpu;
        }
    }
    let held = fed.check(mode.verdict())?;
    anyhow::ensure!(held == fleet.pairs() as u64, "{held} pairs are held after as much came back as went");
    Ok(Row {
        mode,
        holders,
        pairs: fleet.pairs(),
        keys,
        fill,
        bytes_per_pair: bytes as f64 / fleet.pairs() as f64,
        churned: 2 * parts.iter().map(|part| usize::from(part.blocks)).sum::<usize>(),
        churn,
    })
}

/// Different parts of about so many pairs.
fn churned(fleet: &Fleet, pairs: usize) -> Vec<Part> {
    let start = Rng::new(fleet.shape.seed ^ 0xc4).below(fleet.parts.len());
    let (mut parts, mut left) = (Vec::new(), pairs);
    for part in fleet.parts[start..].iter().chain(&fleet.parts[..start]) {
        if left == 0 {
            break;
        }
        left = left.saturating_sub(part.blocks.into());
        parts.push(*part);
    }
    parts
}

/// What one batch of a very long prompt took.
pub struct LongPrompt {
    pub tokens: usize,
    pub blocks: usize,
    pub payload_bytes: usize,
    pub took: Duration,
}

/// One store event of so many tokens, until readers see all of it.
///
/// # Errors
/// If not the whole of it is seen.
pub fn long_prompt(tokens: usize, seed: u64) -> anyhow::Result<LongPrompt> {
    let blocks = tokens / BLOCK_TOKENS;
    let engine_seed = RULE_SEED.to_owned();
    let shape = Shape { pairs: 0, chain_blocks: blocks, holders: 1, endpoints: 1, ranks: 1, engine_seed, seed };
    let mut rng = Rng::new(seed);
    let ids: Vec<u32> = (0..blocks * BLOCK_TOKENS).map(|_| rng.below(128_000) as u32).collect();
    let mut chain = Chain::new(HashAlgo::Sha256Cbor, &NoneHash::from_seed(HashAlgo::Sha256Cbor, RULE_SEED));
    let keys: Vec<_> = ids.chunks_exact(BLOCK_TOKENS).map(|block| chain.push(block)).collect();
    let payload = fleet::store(&keys, &ids, 0);
    let payload_bytes = payload.len();
    let mut fed = Fed::new(&shape, 1_000_000);
    let part = Part { chain: 0, blocks: 0, endpoint: 0, rank: 0 };
    let took = fed.apply(&[(part, payload)]).wall;
    anyhow::ensure!(fed.check(Verdict::Exact)? == blocks as u64, "not all blocks are held");
    let reader = fed.readers().reader();
    let guard = reader.enter().ok_or_else(|| anyhow::anyhow!("the inventory has no writer"))?;
    let mut walk = Walk::default();
    guard.advance(&mut walk, &keys);
    let seen = walk.runs(&guard).next().map_or(0, |run| run.blocks as usize);
    anyhow::ensure!(seen == blocks, "readers see {seen} of {blocks} blocks");
    Ok(LongPrompt { tokens, blocks, payload_bytes, took })
}
