//! `bench lookup`: what a route decision costs, and what the inventory costs that it is made from.
//!
//! Chains of blocks, each held by some endpoints: a quarter of them hold it whole, the others a prefix of drawn
//! length. A look-up takes a chain at random (so from cold memory), walks it, collects the runs and decides among all
//! endpoints. *Under churn* a second thread takes the ends of chains away and gives them back as fast as it can,
//! publishing after every 32 of them. *While loads are written* a second thread takes load at the endpoints for 15 other
//! shards, and publishes the sums, as fast as it can.

mod store;
mod workload;

use std::collections::VecDeque;
use std::fmt::Write;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use hdrhistogram::Histogram;
use shards::ids::{HolderIndex, ShardId};
use shards::inventory::Run;
use shards::load::LoadSlot;

use crate::memory;
use store::{EvmapStore, InventoryStore, Store, publish_all};
use workload::{Decider, Rng, Shape, Workload};

/// Sizes of the run; the defaults are those of the project's target.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Blocks in the inventory.
    #[arg(long, default_value_t = 1_000_000)]
    pub blocks: usize,
    /// Blocks in the comparison with evmap.
    #[arg(long, default_value_t = 100_000)]
    pub compare_blocks: usize,
    /// Blocks of a prompt.
    #[arg(long, default_value_t = 88)]
    pub chain_blocks: usize,
    /// Endpoints that hold block 0 of a prompt.
    #[arg(long, default_value_t = 20)]
    pub holders: usize,
    /// Endpoints of the service.
    #[arg(long, default_value_t = 64)]
    pub endpoints: u16,
    /// Endpoints of the service of the row in which loads are written.
    #[arg(long, default_value_t = 512)]
    pub many_endpoints: u16,
    /// Look-ups measured per row.
    #[arg(long, default_value_t = 200_000)]
    pub lookups: u64,
    /// Seed of everything drawn.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Rows of load that are written.
const SHARDS: u16 = 16;

/// One line of the report.
struct Row {
    name: &'static str,
    blocks: usize,
    pairs: usize,
    adds_per_second: f64,
    bytes_per_pair: f64,
    /// Nanoseconds.
    lookup: Histogram<u64>,
    /// Sum over what the look-ups found; equal for equal stores.
    digest: u64,
}

/// Runs everything and returns the report.
///
/// # Errors
///
/// If two stores with the same content answer differently.
pub fn run(args: &Args) -> anyhow::Result<String> {
    let shape = |blocks, holders| Shape {
        blocks,
        chain_blocks: args.chain_blocks,
        holders,
        endpoints: args.endpoints,
        seed: args.seed,
    };
    let single = Workload::new(&shape(args.blocks, 1));
    let alone = measure::<InventoryStore>("inventory, 1 holder", &single, args).0;
    drop(single);

    let large = Workload::new(&shape(args.blocks, args.holders));
    let (quiet, store) = measure::<InventoryStore>("inventory", &large, args);
    let churned = under_churn(store, &large, args);
    drop(large);

    let endpoints = args.many_endpoints;
    let wide = Workload::new(&Shape { endpoints, ..shape(args.blocks, args.holders) });
    let (_, store) = measure::<InventoryStore>("inventory", &wide, args);
    let loaded = under_loads(store, &wide, args);
    drop(wide);

    let small = Workload::new(&shape(args.compare_blocks, args.holders));
    let ours = measure::<InventoryStore>("inventory, smaller", &small, args).0;
    let evmap = measure::<EvmapStore>("evmap 11, smaller", &small, args).0;
    anyhow::ensure!(
        ours.digest == evmap.digest,
        "inventory and evmap hold the same blocks and found different runs (seed {}): {} and {}",
        args.seed,
        ours.digest,
        evmap.digest
    );
    Ok(report(args, &[alone, quiet, churned, loaded, ours, evmap]))
}

/// Fills a store, then looks up in it while nothing changes.
fn measure<S: Store>(name: &'static str, workload: &Workload, args: &Args) -> (Row, S) {
    let before = memory::in_use();
    let mut store = S::new(workload);
    let start = Instant::now();
    for chain in &workload.chains {
        for &(holder, blocks) in &chain.held {
            store.begin();
            chain.keys[..blocks].iter().for_each(|&key| store.add(key, holder));
        }
    }
    store.settle();
    let seconds = start.elapsed().as_secs_f64();
    let bytes = memory::in_use().saturating_sub(before);
    let pairs = workload.pairs();
    let mut decider = Decider::new(workload.shape.endpoints, 1, args.seed);
    let (lookup, digest) = look_up(&mut store, workload, &mut decider, args);
    let row = Row {
        name,
        blocks: workload.blocks(),
        pairs,
        adds_per_second: pairs as f64 / seconds,
        bytes_per_pair: bytes as f64 / pairs as f64,
        lookup,
        digest,
    };
    (row, store)
}

fn look_up<S: Store>(store: &mut S, workload: &Workload, decider: &mut Decider, args: &Args) -> (Histogram<u64>, u64) {
    let mut histogram = Histogram::new_with_bounds(1, 1_000_000_000, 3).expect("1 ns to 1 s in 3 digits is allowed");
    let mut rng = Rng::new(args.seed ^ 0x10_0c);
    let mut runs: Vec<Run> = Vec::new();
    let mut keys = Vec::new();
    let mut digest = 0_u64;
    for _ in 0..args.lookups {
        let chain = &workload.chains[rng.below(workload.chains.len())];
        // A prompt's keys were made a moment ago.
        keys.clear();
        keys.extend_from_slice(&chain.keys);
        let start = Instant::now();
        runs.clear();
        store.runs(&keys, &mut runs);
        black_box(decider.decide(keys.len(), &runs));
        histogram.saturating_record(start.elapsed().as_nanos() as u64);
        digest = runs
            .iter()
            .fold(digest, |digest, run| digest.wrapping_add(u64::from(run.blocks) * (u64::from(run.endpoint.0) + 1)));
    }
    (histogram, digest)
}

/// Looks up while a second thread changes the inventory; its adds are what it re-added per second meanwhile.
fn under_churn(store: InventoryStore, workload: &Workload, args: &Args) -> Row {
    let (mut writer, mut reading) = store.split();
    let done = AtomicBool::new(false);
    let (lookup, adds_per_second) = std::thread::scope(|scope| {
        let churn = scope.spawn(|| {
            let mut rng = Rng::new(args.seed ^ 0xc4);
            let start = Instant::now();
            let mut adds = 0_u64;
            while !done.load(Ordering::Relaxed) {
                for _ in 0..32 {
                    let chain = &workload.chains[rng.below(workload.chains.len())];
                    let (holder, blocks) = chain.held[rng.below(chain.held.len())];
                    let start = blocks - blocks.min(8);
                    let end = &chain.keys[start..blocks];
                    end.iter().for_each(|&key| writer.remove(key, HolderIndex(holder)));
                    writer.follow(start.checked_sub(1).map(|before| chain.keys[before]));
                    end.iter().for_each(|&key| writer.store(key, HolderIndex(holder)));
                    adds += end.len() as u64;
                }
                publish_all(&mut writer);
            }
            adds as f64 / start.elapsed().as_secs_f64()
        });
        let mut decider = Decider::new(workload.shape.endpoints, 1, args.seed);
        let (lookup, _) = look_up(&mut reading, workload, &mut decider, args);
        done.store(true, Ordering::Relaxed);
        (lookup, churn.join().expect("the churning thread does not panic"))
    });
    Row {
        name: "inventory, under churn",
        blocks: workload.blocks(),
        pairs: workload.pairs(),
        adds_per_second,
        bytes_per_pair: f64::NAN,
        lookup,
        digest: 0,
    }
}

/// Looks up and decides while a second thread writes the loads of the other shards; what it writes per second is in the
/// place of adds.
fn under_loads(mut store: InventoryStore, workload: &Workload, args: &Args) -> Row {
    let endpoints = workload.shape.endpoints;
    let mut decider = Decider::new(endpoints, SHARDS.into(), args.seed);
    let (loads, done) = (decider.loads(), AtomicBool::new(false));
    let (lookup, digest, adds_per_second) = std::thread::scope(|scope| {
        let written = scope.spawn(|| {
            let mut rng = Rng::new(args.seed ^ 0x1d);
            let mut taken = VecDeque::new();
            let start = Instant::now();
            let mut writes = 0_u64;
            while !done.load(Ordering::Relaxed) {
                for shard in 1..SHARDS {
                    let slot = LoadSlot(rng.below(endpoints.into()) as u32);
                    taken.push_back(loads.reserve(ShardId(shard), slot, 1_000));
                    // Of the oldest the load is given back.
                    taken.drain(..taken.len().saturating_sub(1_024));
                    writes += 1;
                }
                let _ = loads.publish(endpoints.into());
            }
            writes as f64 / start.elapsed().as_secs_f64()
        });
        let (lookup, digest) = look_up(&mut store, workload, &mut decider, args);
        done.store(true, Ordering::Relaxed);
        (lookup, digest, written.join().expect("the writing thread does not panic"))
    });
    Row {
        name: "inventory, loads written",
        blocks: workload.blocks(),
        pairs: workload.pairs(),
        adds_per_second,
        bytes_per_pair: f64::NAN,
        lookup,
        digest,
    }
}

fn report(args: &Args, rows: &[Row]) -> String {
    let mut text = format!(
        "look-up and decision: {} blocks × {} holders, {} endpoints, {} look-ups, seed {}\n\
         {:<24}{:>10}{:>12}{:>10}{:>8}{:>10}{:>10}{:>22}\n",
        args.chain_blocks,
        args.holders,
        args.endpoints,
        args.lookups,
        args.seed,
        "store",
        "blocks",
        "pairs",
        "M adds/s",
        "B/pair",
        "p50 µs",
        "p99 µs",
        "digest"
    );
    for row in rows {
        let micros = |quantile| row.lookup.value_at_quantile(quantile) as f64 / 1e3;
        let bytes = if row.bytes_per_pair.is_nan() { "-".into() } else { format!("{:.0}", row.bytes_per_pair) };
        writeln!(
            text,
            "{:<24}{:>10}{:>12}{:>10.2}{:>8}{:>10.2}{:>10.2}{:>22}",
            row.name,
            row.blocks,
            row.pairs,
            row.adds_per_second / 1e6,
            bytes,
            micros(0.5),
            micros(0.99),
            row.digest
        )
        .expect("a string takes what is written to it");
    }
    text.push_str("both sides counted, without the copy counts of the ingest; evmap with its default hasher\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_run_prints_every_row_and_both_stores_agree() {
        let args = Args {
            blocks: 4_000,
            compare_blocks: 2_000,
            chain_blocks: 40,
            holders: 5,
            endpoints: 8,
            many_endpoints: 24,
            lookups: 500,
            seed: 7,
        };
        let text = run(&args).expect("both stores agree");
        let names = ["1 holder", "under churn", "loads written", "smaller"].map(|name| format!("inventory, {name}"));
        for name in names.iter().map(String::as_str).chain(["evmap 11, smaller"]) {
            let row = text.lines().find(|line| line.starts_with(name)).expect(name);
            assert!(row.contains("000 "), "{row}");
        }
    }
}
