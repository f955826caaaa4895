//! `bench soak`: memory of the gateway over minutes of prompts never sent before.
//!
//! The gateway runs as a process of its own, KV-exact, before backends that answer at once. Clients send completions
//! and chats of many lengths, each unlike all before, and now and then the next turn of a conversation. Every few
//! seconds: resident memory, the bytes the gateway says it remembers, and their bound. Exit code 1 when the bytes exceed
//! the bound, or when resident memory goes on growing once the bound is reached.

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use loadgen::assets::DEMO_MODEL;
use loadgen::workload::{Random, words};
use serde_json::{Value, json};

use crate::e2e::proxies::{self, Place};
use crate::e2e::{BACKENDS, backend, start_engines, sum_of};

/// Setup of the run.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Seconds
    #[arg(long, default_value_t = 600.0)]
    pub seconds: f64,
    /// Seconds between two lines
    #[arg(long, default_value_t = 15.0)]
    pub every: f64,
    /// Clients, each with one request at a time
    #[arg(long, default_value_t = 8)]
    pub clients: usize,
    /// Longest prompt, bytes
    #[arg(long, default_value_t = 400_000)]
    pub longest: usize,
    /// Core of the gateway's shard
    #[arg(long, default_value_t = 0)]
    pub shard_core: usize,
    /// Core of everything else
    #[arg(long, default_value_t = 1)]
    pub load_core: usize,
    /// Directory with the model's tokenizer; default: the demo's
    #[arg(long, requires = "model", value_name = "DIR")]
    pub tokenizers: Option<PathBuf>,
    /// Model named in the requests
    #[arg(long, default_value = DEMO_MODEL)]
    pub model: String,
}

/// Growth of resident memory after the bound was reached that is taken for noise of the allocator.
const GROWTH_MAX: f64 = 0.15;

/// Runs it.
///
/// # Errors
/// A gateway that does not start or answer.
pub fn main(args: &Args) -> anyhow::Result<ExitCode> {
    if args.clients == 0 || !(args.every > 0.0 && args.seconds >= args.every) {
        bail!("--clients is at least 1, and --seconds at least --every");
    }
    let directory = std::env::temp_dir().join(format!("kvlane-soak-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let result = run(args, &directory, &mut std::io::stdout());
    let _ = std::fs::remove_dir_all(&directory);
    Ok(if result? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// One look at the gateway.
#[derive(Clone, Copy, Debug)]
struct Look {
    seconds: f64,
    rss: u64,
    held: f64,
    evictions: f64,
}

fn run(args: &Args, directory: &Path, out: &mut impl Write) -> anyhow::Result<bool> {
    let tokenizers = crate::files::tokenizers(args.tokenizers.as_deref(), directory)?;
    let backends = backend::start(BACKENDS, args.load_core)?;
    let place = Place {
        directory,
        backends: &backends,
        proxy_core: args.shard_core,
        load_core: args.load_core,
        tokenizers: &tokenizers,
    };
    let engines = start_engines(&args.model, &tokenizers)?;
    let (gateway, admin) = proxies::kvlane(&place, Some(&engines))?;
    let bound = shards::limits::Limits::default().prompt_cache_bytes as f64;
    let stop = Arc::new(AtomicBool::new(false));
    let sent = Arc::new(AtomicU64::new(0));
    let clients: Vec<_> = (0..args.clients as u64)
        .map(|number| {
            let (stop, sent, args, address) = (Arc::clone(&stop), Arc::clone(&sent), args.clone(), gateway.address);
            std::thread::spawn(move || client(address, &args, number, &stop, &sent))
        })
        .collect();
    writeln!(
        out,
        "{:>7} {:>9} {:>9} {:>11} {:>11} {:>9} {:>9}",
        "s", "prompts", "RSS MB", "held MB", "bound MB", "kept", "evicted"
    )?;
    let (start, mut looks) = (Instant::now(), Vec::new());
    while start.elapsed().as_secs_f64() < args.seconds {
        std::thread::sleep(Duration::from_secs_f64(args.every));
        let look = Look {
            seconds: start.elapsed().as_secs_f64(),
            rss: resident(gateway.id())?,
            held: sum_of(admin, "kvlane_prompt_cache_bytes")?,
            evictions: sum_of(admin, "kvlane_prompt_cache_evictions")?,
        };
        let kept = sum_of(admin, "kvlane_prompt_cache_prompts")?;
        let (rss, held) = (look.rss as f64 / 1e6, look.held / 1e6);
        let sent = sent.load(Ordering::Relaxed);
        writeln!(
            out,
            "{:>7.0} {sent:>9} {rss:>9.1} {held:>11.2} {:>11.2} {kept:>9} {:>9}",
            look.seconds,
            bound / 1e6,
            look.evictions
        )?;
        looks.push(look);
    }
    stop.store(true, Ordering::Relaxed);
    let mut failed = 0;
    for client in clients {
        failed += client.join().map_err(|_| anyhow::anyhow!("a client panicked"))?;
    }
    verdict(&looks, bound, failed, out)
}

fn verdict(looks: &[Look], bound: f64, failed: u64, out: &mut impl Write) -> anyhow::Result<bool> {
    let within = looks.iter().all(|look| look.held <= bound);
    let full: Vec<&Look> = looks.iter().filter(|look| look.evictions > 0.0).collect();
    let growth = match (full.get(full.len() / 4), full.last()) {
        (Some(early), Some(last)) => last.rss as f64 / early.rss as f64 - 1.0,
        _ => 0.0,
    };
    writeln!(
        out,
        "held bytes within their bound: {within}; resident memory since a quarter of the time at the bound: {:+.1} %; \
         {failed} requests failed; {}",
        growth * 100.0,
        if full.is_empty() { "THE BOUND WAS NOT REACHED" } else { "the bound was reached" }
    )?;
    Ok(within && growth <= GROWTH_MAX && failed == 0)
}

/// Resident memory of a process, bytes.
fn resident(process: u32) -> anyhow::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).context("the gateway has ended")?;
    let line =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("/proc/…/status has another form")?;
    let kilobytes: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kilobytes * 1024)
}

/// Sends prompts until told to stop; how many were not answered.
fn client(address: SocketAddr, args: &Args, number: u64, stop: &AtomicBool, sent: &AtomicU64) -> u64 {
    let mut random = Random::of(29, number, 0);
    let (mut stream, mut failed) = (None, 0);
    let mut chat: Vec<Value> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let (path, body) = body(&mut random, args, &mut chat);
        let request = crate::stall::request(path, &body);
        if crate::stall::exchange(address, &mut stream, &request).is_err() {
            stream = None;
            failed += 1;
            std::thread::sleep(Duration::from_millis(20));
        }
        sent.fetch_add(1, Ordering::Relaxed);
    }
    failed
}

/// Mostly short, sometimes long; a third are turns of a conversation that ends when it is long.
fn body(random: &mut Random, args: &Args, chat: &mut Vec<Value>) -> (&'static str, String) {
    let longest = if random.below(8) == 0 { args.longest } else { args.longest / 20 };
    let bytes = 200 + random.below(longest.max(1));
    let content = format!("{:016x} {}", random.next_u64(), words::text_of_bytes(random, bytes));
    if random.below(3) > 0 {
        return ("/v1/completions", json!({ "model": args.model, "prompt": content, "max_tokens": 1 }).to_string());
    }
    if chat.len() > 40 {
        chat.clear();
    }
    let role = if chat.len().is_multiple_of(2) { "user" } else { "assistant" };
    chat.push(json!({ "role": role, "content": content }));
    let body = json!({ "model": args.model, "messages": chat, "max_tokens": 1 });
    ("/v1/chat/completions", body.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_judged_once_the_bound_is_reached() {
        let looks = |rss: &[u64], held: f64, evictions: f64| -> Vec<Look> {
            rss.iter().map(|&rss| Look { seconds: 0.0, rss, held, evictions }).collect()
        };
        for (looks, good) in [
            (looks(&[100, 104, 103, 105], 64.0, 9.0), true),
            (looks(&[100, 110, 120, 140], 64.0, 9.0), false),
            // What is not full yet may grow.
            (looks(&[100, 150, 200, 250], 50.0, 0.0), true),
            (looks(&[100, 100, 100, 100], 65.0, 9.0), false),
        ] {
            assert_eq!(verdict(&looks, 64.0, 0, &mut Vec::new()).unwrap(), good, "{looks:?}");
        }
    }
}
