//! `bench hash`: what a block key costs.

use std::fmt::Write;
use std::time::Instant;

use shards::block::{Chain, FIXED_SEED, HashAlgo, NoneHash};

/// Sizes of the run.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Blocks hashed per contract.
    #[arg(long, default_value_t = 2_000_000)]
    pub blocks: u32,
    /// Tokens of a block.
    #[arg(long, default_value_t = 16)]
    pub block_tokens: usize,
}

/// Hashes one chain per contract and returns nanoseconds per block with the last key.
pub fn run(args: &Args) -> String {
    // Spread over a vocabulary of today, so that all widths of the encoding occur.
    let mut tokens: Vec<u32> = (0..args.block_tokens as u32).map(|i| i.wrapping_mul(2_654_435_761) % 151_936).collect();
    let mut text = String::new();
    for algo in [HashAlgo::Sha256Cbor, HashAlgo::XxhashCbor] {
        let mut chain = Chain::new(algo, &NoneHash::from_seed(algo, FIXED_SEED));
        let mut last = None;
        let start = Instant::now();
        for block in 0..args.blocks {
            tokens[0] = block % 151_936;
            last = Some(chain.push(&tokens));
        }
        let each = start.elapsed().as_nanos() as f64 / f64::from(args.blocks.max(1));
        let key = last.map_or(0, |key| key.0);
        writeln!(text, "{algo:?}: {each:.0} ns per block of {} tokens, last key {key}", args.block_tokens)
            .expect("a string takes what is written to it");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_run_prints_a_line_per_contract_with_the_same_keys_every_time() {
        let keys = || {
            let text = run(&Args { blocks: 100, block_tokens: 16 });
            text.lines().map(|line| line.rsplit(' ').next().map(str::to_owned)).collect::<Vec<_>>()
        };
        assert_eq!(keys(), keys());
        assert_eq!(keys().len(), 2);
    }
}
