//! kvlane's ingest and inventory beside the indexes of two other gateways: the same blocks, the same caches, the same
//! order, in one run.
//!
//! `cargo run --release --manifest-path bench/peers/Cargo.toml`

mod choice;
#[path = "../../src/clock.rs"]
#[expect(dead_code, reason = "the benchmarks beside this one use all of it")]
mod clock;
#[path = "../../src/ingest/feed.rs"]
mod feed;
#[path = "../../src/ingest/fleet.rs"]
#[expect(dead_code, reason = "the benchmarks beside this one use all of it")]
mod fleet;
mod index;
/// Where the benchmarks beside this one have what they share.
mod ingest {
    pub(crate) use crate::fleet;
}
#[path = "../../src/memory.rs"]
mod memory;
#[path = "../../src/lookup/workload.rs"]
#[expect(dead_code, reason = "the benchmarks beside this one use all of it")]
mod workload;

use std::time::{Duration, Instant};

use clap::Parser;
use feed::RULE_SEED;
use fleet::{Fleet, Rng, Shape};
use hdrhistogram::Histogram;
use index::{ChainIndex, CompressedTree, Filled, Index, Inventory, WholeIngest};

/// Sizes of the run; the defaults are those of the project's targets.
#[derive(Debug, Parser)]
#[command(about = "kvlane beside kv-index (SMG) and dynamo-kv-router, in one run")]
struct Args {
    /// (cache, block) pairs of the fleet whose blocks are held once.
    #[arg(long, default_value_t = 10_000_000)]
    pairs: usize,
    /// Different blocks of the fleet whose blocks are shared.
    #[arg(long, default_value_t = 1_000_000)]
    shared_blocks: usize,
    /// Caches that hold the first block of a prompt, in the second fleet.
    #[arg(long, default_value_t = 20)]
    holders: usize,
    /// Blocks of a prompt.
    #[arg(long, default_value_t = 88)]
    chain_blocks: usize,
    /// Endpoints, each with one cache.
    #[arg(long, default_value_t = 64)]
    endpoints: u16,
    /// Look-ups measured per row.
    #[arg(long, default_value_t = 100_000)]
    lookups: u64,
    /// Seed of everything drawn.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    println!("{}", setup(&args));
    // A quarter of the holders and one more have a chain whole, the others half of it in the mean.
    let whole = args.holders / 4 + 1;
    let mean = (whole + args.holders) as f64 / 2.0;
    let shared = (args.shared_blocks as f64 * mean) as usize;
    for (holders, pairs) in [(1, args.pairs), (args.holders, shared)] {
        let shape = Shape {
            pairs,
            chain_blocks: args.chain_blocks,
            holders,
            endpoints: args.endpoints,
            ranks: 1,
            engine_seed: RULE_SEED.to_owned(),
            seed: args.seed,
        };
        let fleet = Fleet::new(&shape);
        println!("{} pairs, {} blocks, {holders} caches a chain", fleet.pairs(), fleet.chains() * args.chain_blocks);
        println!(
            "  {:<28}{:>18}{:>18}{:>9}{:>10}{:>10}",
            "index", "from frames M/s", "index only M/s", "B/pair", "p50 µs", "p99 µs"
        );
        let digests = [
            row::<WholeIngest>(&fleet, &args)?,
            row::<Inventory>(&fleet, &args)?,
            row::<ChainIndex>(&fleet, &args)?,
            row::<CompressedTree>(&fleet, &args)?,
        ];
        anyhow::ensure!(digests.iter().all(|digest| *digest == digests[0]), "the indexes disagree: {digests:?}");
        if holders > 1 {
            choices(&fleet, &args)?;
        }
    }
    Ok(())
}

/// Look-up and choice while the index changes.
fn choices(fleet: &Fleet, args: &Args) -> anyhow::Result<()> {
    println!("look-up and choice, while the ends of chains go and come back on another thread");
    println!("  {:<28}{:>10}{:>10}{:>22}", "index", "p50 µs", "p99 µs", "M blocks changed/s");
    choice::row::<Inventory, choice::Ours>(fleet, args.lookups, args.seed)?;
    choice::row::<ChainIndex, choice::MostLessLoad>(fleet, args.lookups, args.seed)?;
    choice::row::<CompressedTree, choice::DefaultSelector>(fleet, args.lookups, args.seed)?;
    println!("  kv-index has nothing that chooses: the most blocks less the requests in flight, over all endpoints");
    Ok(())
}

fn setup(args: &Args) -> String {
    format!(
        "{} blocks a prompt and a store event, {} endpoints, {} look-ups, seed {}\n\
         M/s: million pairs per CPU second; from frames: decoding and hashing of tokens included\n\
         B/pair: heap, both sides of ours, the peers' maps for removals included; look-up: runs of all holders of a prompt",
        args.chain_blocks, args.endpoints, args.lookups, args.seed
    )
}

/// Prints one line; what the look-ups found, as a number.
fn row<I: Index>(fleet: &Fleet, args: &Args) -> anyhow::Result<u64> {
    let before = memory::in_use();
    let (mut index, Filled { whole, index_only }) = I::filled(fleet)?;
    let bytes = memory::in_use().saturating_sub(before) as f64 / fleet.pairs() as f64;
    let (lookup, digest) = look_up(&mut index, fleet, args)?;
    let millions = |time: Option<Duration>| {
        time.map_or("-".to_owned(), |time| format!("{:.2}", fleet.pairs() as f64 / time.as_secs_f64() / 1e6))
    };
    let micros = |quantile| lookup.value_at_quantile(quantile) as f64 / 1e3;
    println!(
        "  {:<28}{:>18}{:>18}{bytes:>9.1}{:>10.2}{:>10.2}",
        I::NAME,
        millions(whole),
        millions(index_only),
        micros(0.5),
        micros(0.99)
    );
    Ok(digest)
}

fn look_up<I: Index>(index: &mut I, fleet: &Fleet, args: &Args) -> anyhow::Result<(Histogram<u64>, u64)> {
    let mut histogram = Histogram::new_with_bounds(1, 1_000_000_000, 3)?;
    let mut rng = Rng::new(args.seed ^ 0x10_0c);
    let mut runs = Vec::new();
    let mut digest = 0_u64;
    for _ in 0..args.lookups {
        let query = index.query(fleet, rng.below(fleet.chains()) as u32);
        runs.clear();
        let start = Instant::now();
        index.runs(&query, &mut runs);
        histogram.saturating_record(start.elapsed().as_nanos() as u64);
        digest = runs
            .iter()
            .fold(digest, |digest, (cache, blocks)| digest.wrapping_add(u64::from(*blocks) * (u64::from(*cache) + 1)));
    }
    Ok((histogram, digest))
}
