//! Traces replayed against the gateway's own decision, in virtual time, with simulated engines.
//!
//! The engines are not what `ttft` takes them for: their service times vary by ±20 %, a prompt's later tokens cost more
//! than its first, prompts and answers slow each other down, caches give blocks up, and events come 50 to 500 ms late.
//! See the modules for each.
//!
//! **Load.** Of each cell the trace is replayed as many times faster or slower as it takes until engines compute prompts
//! for the given part of the time under `ttft` (measured over the second half). All policies of the cell get that pace.
//! Sessions, which cannot be made faster at will, are repeated under other ids instead, so that the pace is near 1.
//!
//! **Oracle bound.** Every worker has every cached block of the fleet, as if all caches were one of their size, and a
//! request goes where the work that really stands in line is least. No policy can know that much; a policy can be a
//! little better all the same, as the oracle does not look into the future.

mod cache;
mod engine;
mod fleet;
mod incidents;
mod live;
mod log;
mod plot;
mod policy;
mod prefixes;
mod report;
mod trace;

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use serde_json::json;
use shards::service::Blend;

use engine::Speed;
use fleet::{Outcome, Setup};
use policy::{Kind, Policy};
use report::{Cell, Row, Slo};
use trace::Trace;

/// Seconds by which events come late.
const DELAY: (f64, f64) = (0.05, 0.5);
/// Runs that look for the pace of a cell.
const PACE_RUNS: usize = 11;
/// Between what it is looked for.
const PACES: (f64, f64) = (0.02, 50.0);
/// The gateway's default.
const THROUGHPUT: u32 = 200;
/// Times that sessions are repeated, per worker.
const COPIES_PER_WORKER: f64 = 0.75;

#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Directory of the traces; default: `data` in the environment's KVLANE_SHARED, else in `../shared`
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Traces: files in the directory, or any path
    #[arg(long, value_delimiter = ',', default_values_t = default_traces())]
    traces: Vec<String>,
    /// Sizes of the fleet
    #[arg(long, value_delimiter = ',', default_values_t = [8, 32])]
    workers: Vec<usize>,
    /// The fleet's caches over the trace's distinct blocks
    #[arg(long, value_delimiter = ',', default_values_t = [0.5, 1.0, 3.0])]
    caches: Vec<f64>,
    /// Part of the time that engines compute prompts, percent
    #[arg(long, value_delimiter = ',', default_values_t = [60.0, 90.0])]
    loads: Vec<f64>,
    /// Policies; default: all
    #[arg(long, value_delimiter = ',', value_parser = policy::parse)]
    policies: Vec<Kind>,
    /// Runs per policy and cell, of as many seeds; figures are their means
    #[arg(long, default_value_t = 2)]
    runs: u64,
    /// The first seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Goodput: seconds to the first token at most
    #[arg(long, default_value_t = 5.0)]
    slo_first_token: f64,
    /// Goodput: milliseconds per further token at most
    #[arg(long, default_value_t = 100.0)]
    slo_token_ms: f64,
    /// `kvThroughput`, percent, of `ttft`: what work costs later requests counts so much beside the request's own time
    #[arg(long, default_value_t = THROUGHPUT)]
    throughput: u32,
    /// One cell again, live: the beginning of Mooncake's trace against simulated engines behind the gateway itself, in
    /// reduced size and faster; exit code 1 where the policies do not come in the same order
    #[arg(long, conflicts_with_all = ["incidents", "write_log", "replay_log", "json", "svg"])]
    live: bool,
    /// With --live: seconds of the trace, at its own pace
    #[arg(long, default_value_t = live::SECONDS, requires = "live")]
    live_seconds: f64,
    /// Print each cell's table, not only the summary
    #[arg(long)]
    tables: bool,
    /// One worker slow and then fast, and one restarted, on the first trace, workers, caches and load
    #[arg(long)]
    incidents: bool,
    /// Write everything as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the table
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write the decisions of `ttft` in the first cell, as recorded decisions are written
    #[arg(long, value_name = "FILE")]
    write_log: Option<PathBuf>,
    /// What if: recorded decisions, against what each policy would have made of the same requests
    #[arg(long, value_name = "FILE", conflicts_with_all = ["traces", "caches", "loads", "incidents"])]
    replay_log: Option<PathBuf>,
    /// With --replay-log: tokens of each worker's cache
    #[arg(long, default_value_t = 1_000_000, requires = "replay_log")]
    cache_tokens: u64,
}

fn default_traces() -> [String; 3] {
    ["mooncake_conversation.jsonl.gz", "agentic_sessions.jsonl.gz", "azure_llm_2023_code.csv.gz"].map(str::to_owned)
}

impl Args {
    fn slo(&self) -> Slo {
        Slo { first_token: self.slo_first_token, per_token: self.slo_token_ms / 1e3 }
    }

    fn kinds(&self) -> Vec<Kind> {
        if self.policies.is_empty() { Kind::ALL.to_vec() } else { self.policies.clone() }
    }

    fn path_of(&self, name: &str) -> PathBuf {
        let shared = || std::env::var_os("KVLANE_SHARED").map_or_else(|| PathBuf::from("../shared"), PathBuf::from);
        let given = Path::new(name);
        if given.exists() {
            given.to_owned()
        } else {
            self.data.clone().unwrap_or_else(|| shared().join("data")).join(name)
        }
    }
}

/// Runs what was asked for, printing as it goes.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<()> {
    ensure!(args.runs > 0, "--runs: at least 1");
    ensure!(args.workers.iter().all(|workers| (1..=1_024).contains(workers)), "--workers: 1 to 1024");
    ensure!(args.loads.iter().all(|load| (1.0..=95.0).contains(load)), "--loads: 1 to 95 percent");
    ensure!(args.caches.iter().all(|caches| *caches > 0.0), "--caches: more than 0");
    if let Some(path) = &args.replay_log {
        return what_if(args, path, out);
    }
    if args.live {
        return live::run(args, out);
    }
    writeln!(out, "seed {}, {} runs per cell and policy", args.seed, args.runs)?;
    let (mut cells, mut first) = (Vec::new(), true);
    for name in &args.traces {
        for &workers in &args.workers {
            let copies = (workers as f64 * COPIES_PER_WORKER).ceil() as u32;
            let trace = trace::read(&args.path_of(name), copies, args.seed)?;
            for &caches in &args.caches {
                for &load in &args.loads {
                    let setup = set_up(&trace, workers, caches, load / 100.0, args.seed, args.throughput);
                    if std::mem::take(&mut first) {
                        first_cell(args, &trace, &setup, out)?;
                    }
                    let cell = cell(args, &trace, &setup, caches, load / 100.0);
                    if args.tables {
                        writeln!(out, "{}", cell.table())?;
                    }
                    out.flush()?;
                    cells.push(cell);
                }
            }
        }
    }
    finish(args, &cells, out)
}

fn first_cell(args: &Args, trace: &Trace, setup: &Setup, out: &mut impl Write) -> anyhow::Result<()> {
    if args.incidents {
        write!(out, "{}", incidents::report(trace, setup, args.slo()))?;
    }
    if let Some(path) = &args.write_log {
        let outcome = fleet::run(trace, setup, &mut Policy::new(Kind::Blend(Blend::Ttft), &[]));
        let create = || std::fs::File::create(path).with_context(|| format!("--write-log: {}", path.display()));
        let mut file = std::io::BufWriter::new(create()?);
        log::write(&mut file, trace, &outcome)?;
        file.flush()?;
    }
    Ok(())
}

fn finish(args: &Args, cells: &[Cell], out: &mut impl Write) -> anyhow::Result<()> {
    writeln!(out, "{}", report::summary(cells))?;
    let shortfalls = report::shortfalls(cells);
    writeln!(out, "{} figures beyond 3 % of the best of the others, or worse than round robin:", shortfalls.len())?;
    for shortfall in &shortfalls {
        writeln!(out, "- {shortfall}")?;
    }
    if let Some(path) = &args.json {
        let value =
            json!({ "seed": args.seed, "runs": args.runs, "cells": cells.iter().map(Cell::json).collect::<Vec<_>>() });
        std::fs::write(path, format!("{value:#}\n")).with_context(|| format!("--json: {}", path.display()))?;
    }
    args.svg.as_ref().map_or(Ok(()), |path| plot::draw(cells, path))
}

/// The fleet of a cell, at the pace that gives the load.
fn set_up(trace: &Trace, workers: usize, caches: f64, load: f64, seed: u64, throughput: u32) -> Setup {
    let blocks = trace.working_set_blocks() as f64 * caches / workers as f64;
    let cache_blocks = (blocks as u64).max(trace.largest_blocks());
    let mut setup = Setup {
        workers,
        cache_blocks,
        pace: 1.0,
        speed: Speed::DEFAULT,
        delay: DELAY,
        incidents: Vec::new(),
        seed,
        throughput,
    };
    // The largest pace that is not too much: beyond some pace queues grow, hits get fewer, and the load jumps.
    let (mut least, mut most) = (PACES.0.ln(), PACES.1.ln());
    for _ in 0..PACE_RUNS {
        setup.pace = f64::midpoint(least, most).exp();
        let outcome = fleet::run(trace, &setup, &mut Policy::new(Kind::Blend(Blend::Ttft), &[]));
        if outcome.busy <= load {
            least = setup.pace.ln();
        } else {
            most = setup.pace.ln();
        }
    }
    setup.pace = least.exp();
    setup
}

fn cell(args: &Args, trace: &Trace, setup: &Setup, caches: f64, load: f64) -> Cell {
    let rows = args.kinds().into_iter().map(|kind| row(args, trace, setup, kind, &[]).0).collect();
    Cell {
        trace: trace.name.clone(),
        requests: trace.requests.len(),
        workers: setup.workers,
        caches,
        cache_tokens: setup.cache_blocks * u64::from(trace.block_tokens),
        load,
        pace: setup.pace,
        rows,
    }
}

/// A policy's figures over all seeds, and its last run.
fn row(args: &Args, trace: &Trace, setup: &Setup, kind: Kind, recorded: &[u16]) -> (Row, Option<Outcome>) {
    let (mut rows, mut last) = (Vec::new(), None);
    for seed in args.seed..args.seed + args.runs {
        let setup = Setup { seed, ..setup.clone() };
        let outcome = fleet::run(trace, &setup, &mut Policy::new(kind, recorded));
        rows.push(Row::new(kind, trace, setup.workers, &outcome, args.slo()));
        last = Some(outcome);
    }
    (Row::mean_of(&rows), last)
}

/// Recorded decisions beside those that each policy would have made.
fn what_if(args: &Args, path: &Path, out: &mut impl Write) -> anyhow::Result<()> {
    let recording = log::read(path)?;
    let trace = &recording.trace;
    let workers = recording.endpoints.iter().max().map_or(1, |most| usize::from(*most) + 1);
    let cache_blocks = (args.cache_tokens / u64::from(trace.block_tokens)).max(trace.largest_blocks());
    let setup = Setup {
        workers,
        cache_blocks,
        pace: 1.0,
        speed: Speed::DEFAULT,
        delay: DELAY,
        incidents: Vec::new(),
        seed: args.seed,
        throughput: args.throughput,
    };
    let kinds = std::iter::once(Kind::Recorded).chain(args.kinds());
    let rows: Vec<Row> = kinds.map(|kind| row(args, trace, &setup, kind, &recording.endpoints).0).collect();
    let cell = Cell {
        trace: trace.name.clone(),
        requests: trace.requests.len(),
        workers,
        caches: (cache_blocks * workers as u64) as f64 / trace.working_set_blocks().max(1) as f64,
        cache_tokens: cache_blocks * u64::from(trace.block_tokens),
        load: rows[0].busy,
        pace: 1.0,
        rows,
    };
    writeln!(out, "{}", cell.table())?;
    Ok(())
}

#[cfg(test)]
mod tests;
