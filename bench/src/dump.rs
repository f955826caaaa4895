//! `bench dump`: how long a dump of an inventory holds it, and what that costs publishing.
//!
//! The dump reads as the management API's does: a guard per segment, keys taken into a list of their own. Beside it a
//! writer publishes without pause.

use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use hdrhistogram::Histogram;
use shards::ids::{BlockKey, EndpointIndex, Rank};
use shards::inventory::{self, ReaderFactory, Writer};

/// Sizes of the run.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Keys of each endpoint
    #[arg(long, default_value_t = 1_000_000)]
    pub keys: u64,
    /// Endpoints with other keys; one of them is dumped
    #[arg(long, default_value_t = 4)]
    pub endpoints: u16,
    /// Dumps, one after the other
    #[arg(long, default_value_t = 20)]
    pub dumps: u32,
}

/// Blocks that follow each other, as prompts leave them.
const RUN_BLOCKS: u64 = 64;

/// Runs it.
///
/// # Errors
/// Sizes that cannot be used.
pub fn run(args: &Args) -> anyhow::Result<String> {
    if args.endpoints == 0 || args.dumps == 0 || args.keys == 0 {
        bail!("--keys, --endpoints and --dumps are at least 1");
    }
    let (mut writer, readers) = filled(args)?;
    let quiet = Duration::from_millis(500);
    let alone = publishing(&mut writer, || std::thread::sleep(quiet));
    let (mut holds, mut dumps, mut keys) = (histogram()?, histogram()?, 0);
    let beside = publishing(&mut writer, || {
        for _ in 0..args.dumps {
            let start = Instant::now();
            keys = dump(&readers, &mut holds);
            dumps.saturating_record(nanoseconds(start.elapsed()));
        }
    });
    let segments = readers.reader().enter().map_or(0, |guard| guard.segments());
    let mut text = String::new();
    writeln!(
        text,
        "{keys} keys dumped of {} pairs in {segments} segments, {} times; one dump {:.1} ms",
        args.keys * u64::from(args.endpoints),
        args.dumps,
        dumps.mean() / 1e6
    )?;
    let us = |value: u64| value as f64 / 1000.0;
    writeln!(
        text,
        "held for (us): p50 {:.1}, p99 {:.1}, p99.9 {:.1}, longest {:.1}",
        us(holds.value_at_quantile(0.5)),
        us(holds.value_at_quantile(0.99)),
        us(holds.value_at_quantile(0.999)),
        us(holds.max())
    )?;
    for (name, published) in [("alone", alone), ("beside dumps", beside)] {
        writeln!(
            text,
            "publishing {name}: {:.0}/s, refused {:.2} %, longest wait {:.1} us",
            published.done as f64 / published.elapsed.as_secs_f64(),
            100.0 * published.refused as f64 / (published.done + published.refused).max(1) as f64,
            published.longest.as_nanos() as f64 / 1000.0
        )?;
    }
    Ok(text)
}

fn histogram() -> anyhow::Result<Histogram<u64>> {
    Histogram::new(3).context("three digits are possible")
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn filled(args: &Args) -> anyhow::Result<(Writer, ReaderFactory)> {
    let pairs = usize::try_from(args.keys)?.saturating_mul(usize::from(args.endpoints));
    let (mut writer, readers) = inventory::new(&inventory::Options { blocks_expected: pairs });
    for endpoint in 0..args.endpoints {
        let holder = writer.add_holder(EndpointIndex(endpoint), Rank(0)).context("room for the endpoints")?;
        for key in 0..args.keys {
            // Runs begin at keys that lie anywhere; the blocks of a run are announced one after the other.
            let spread = ((u64::from(endpoint) << 40) | (key / RUN_BLOCKS)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            writer.store(BlockKey(spread.wrapping_add(key % RUN_BLOCKS)), holder);
            if key % 2000 == 1999 {
                while writer.pending() > 0 && writer.try_publish() {}
            }
        }
    }
    while writer.pending() > 0 {
        writer.try_publish();
    }
    Ok((writer, readers))
}

/// Reads all keys of the first endpoint, and notes how long each guard was held.
fn dump(readers: &ReaderFactory, holds: &mut Histogram<u64>) -> usize {
    let reader = readers.reader();
    let segments = reader.enter().map_or(0, |guard| guard.segments());
    let (mut part, mut keys) = (Vec::new(), Vec::new());
    for segment in 0..segments {
        let start = Instant::now();
        if let Some(guard) = reader.enter() {
            guard.segment_keys(segment, EndpointIndex(0), &mut |key| part.push(key.0));
        }
        holds.saturating_record(nanoseconds(start.elapsed()));
        keys.append(&mut part);
    }
    keys.sort_unstable();
    keys.dedup();
    keys.len()
}

/// What publishing came to.
#[derive(Clone, Copy, Debug, Default)]
struct Published {
    done: u64,
    refused: u64,
    /// From the first refusal to the next success.
    longest: Duration,
    elapsed: Duration,
}

/// Publishes small changes without pause while something is done.
fn publishing(writer: &mut Writer, act: impl FnOnce()) -> Published {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let publisher = scope.spawn(|| {
            let mut published = Published::default();
            let Some(holder) = writer.add_holder(EndpointIndex(u16::MAX), Rank(0)) else { return published };
            let (start, mut since) = (Instant::now(), None);
            for key in 0_u64.. {
                writer.store(BlockKey(key % 1024), holder);
                if writer.try_publish() {
                    published.done += 1;
                    let waited = since.take().map_or(Duration::ZERO, |since: Instant| since.elapsed());
                    published.longest = published.longest.max(waited);
                } else {
                    published.refused += 1;
                    since.get_or_insert_with(Instant::now);
                }
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
            published.elapsed = start.elapsed();
            published
        });
        act();
        stop.store(true, Ordering::Relaxed);
        publisher.join().unwrap_or_default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_run_finds_all_keys() {
        let text = run(&Args { keys: 3000, endpoints: 2, dumps: 2 }).expect("the sizes can be used");
        assert!(text.starts_with("3000 keys dumped of 6000 pairs"), "{text}");
        assert_eq!(text.lines().count(), 4);
    }
}
