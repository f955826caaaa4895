//! `bench ingest`: what the engines' cache events cost: blocks per second and bytes per held block on the way from
//! frames to the published inventory, one very long batch, and thousands of streams that stand by.

use std::fmt::Write;

pub mod feed;
pub mod fleet;
mod held;
pub mod publishers;
mod streams;

use crate::clock;
use held::{Mode, Row};
use streams::Report;

/// Sizes of the run; the defaults are those of the project's targets.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// (cache, block) pairs held.
    #[arg(long, default_value_t = 10_000_000)]
    pub pairs: usize,
    /// Caches that share a block, in the second of two fleets; in the first each block is held once.
    #[arg(long, default_value_t = 20)]
    pub holders: usize,
    /// Tokens of the one batch.
    #[arg(long, default_value_t = 200_000)]
    pub batch_tokens: usize,
    /// The streams.
    #[command(flatten)]
    pub streams: streams::Args,
    /// Seed of everything drawn.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Runs everything and returns the report.
///
/// # Errors
/// If something announced is not held, or the machine does not allow so many descriptors.
pub fn run(args: &Args) -> anyhow::Result<String> {
    let mut text = String::new();
    if args.pairs > 0 {
        held_blocks(&mut text, args)?;
    }
    if args.streams.endpoints > 0 {
        let report = streams::measure(&args.streams, args.seed)?;
        standing_by(&mut text, args, &report)?;
    }
    Ok(text)
}

fn held_blocks(text: &mut String, args: &Args) -> anyhow::Result<()> {
    let mut rows = Vec::new();
    for mode in [Mode::Exact, Mode::Derived] {
        for holders in [1, args.holders] {
            rows.push(held::measure(mode, holders, args.pairs, args.seed)?);
        }
    }
    table(text, args, &rows)?;
    let long = held::long_prompt(args.batch_tokens, args.seed)?;
    writeln!(
        text,
        "one batch of {} tokens: {} blocks in {} kB, all visible after {:.2} ms",
        long.tokens,
        long.blocks,
        long.payload_bytes / 1_000,
        long.took.as_secs_f64() * 1e3
    )?;
    Ok(())
}

fn standing_by(text: &mut String, args: &Args, report: &Report) -> std::fmt::Result {
    let streams::Report { streams, connect, descriptors, connected, reconnects, delay, .. } = report;
    writeln!(
        text,
        "{streams} streams over loopback: connected after {:.1} s, {descriptors} descriptors; at the end {connected} \
         connected, {reconnects} reconnects and gaps",
        connect.as_secs_f64()
    )?;
    for (what, cpu) in
        [("at rest", report.rest), ("a request in flight", report.in_flight), ("publishing", report.busy)]
    {
        writeln!(
            text,
            "  {what:<20} ingest thread {:>5.2} % of a core, the library's threads {:>5.2} %",
            cpu.ingest, cpu.zmq
        )?;
    }
    let ms = |quantile| delay.value_at_quantile(quantile) as f64 / 1e6;
    writeln!(
        text,
        "  frame to visible at {} messages/s: p50 {:.2} ms, p99 {:.2} ms, p99.9 {:.2} ms ({} messages)",
        args.streams.messages_per_second,
        ms(0.5),
        ms(0.99),
        ms(0.999),
        delay.len()
    )
}

fn table(text: &mut String, args: &Args, rows: &[Row]) -> std::fmt::Result {
    writeln!(
        text,
        "ingest, frames of vLLM 0.32 to published, 32 streams, 88 blocks an event, seed {}\n\
         {:<10}{:>9}{:>12}{:>12}{:>14}{:>14}{:>9}{:>16}",
        args.seed, "keys", "holders", "pairs", "blocks", "M pairs/CPU s", "M pairs/s", "B/pair", "churn M/CPU s"
    )?;
    for row in rows {
        let millions = |count: usize, time: std::time::Duration| count as f64 / time.as_secs_f64() / 1e6;
        writeln!(
            text,
            "{:<10}{:>9}{:>12}{:>12}{:>14.2}{:>14.2}{:>9.1}{:>16.2}",
            row.mode.name(),
            row.holders,
            row.pairs,
            row.keys,
            millions(row.pairs, row.fill.cpu),
            millions(row.pairs, row.fill.wall),
            row.bytes_per_pair,
            millions(row.churned, row.churn.cpu)
        )?;
    }
    text.push_str(
        "B/pair: both sides of the inventory, copy counts, derived keys; churn: pairs removed plus stored again\n",
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_run_holds_all_it_announces_and_prints_every_row() {
        let args = Args {
            pairs: 20_000,
            holders: 5,
            batch_tokens: 3_200,
            streams: streams::Args {
                endpoints: 0,
                ranks: 1,
                window_seconds: 1,
                messages_per_second: 1,
                ingest_core: 0,
                other_core: 0,
                replay: false,
            },
            seed: 7,
        };
        let text = run(&args).expect("what is announced is held");
        let rows = |mode: &str| text.lines().filter(|line| line.starts_with(mode)).count();
        assert_eq!((rows("exact"), rows("derived")), (2, 2), "{text}");
        assert!(text.contains("one batch of 3200 tokens: 200 blocks"), "{text}");
    }
}
