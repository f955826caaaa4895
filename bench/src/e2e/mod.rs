//! CPU per request, end to end: kvlane (plain and KV-exact), nginx and HAProxy in the same run.
//!
//! Each proxy has one core, and stands between a closed-loop load on keep-alive connections and a backend that answers
//! at once, which share another core. A request is one of 64 warm conversations plus a new last message. Rounds are
//! interleaved, idle proxies are stopped, and the figure is the median over rounds of the proxy process's CPU time per
//! answer. For KV-exact routing the inventory is warm: simulated engines were sent the conversations once, and publish
//! the blocks as those of the backends.
//!
//! Ratios within one run are what counts; times differ from machine to machine.

pub(crate) mod backend;
pub(crate) mod bodies;
pub(crate) mod cpu;
pub(crate) mod proxies;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use loadgen::assets::DEMO_MODEL;
use loadgen::child::http_get;
use loadgen::engine::{Engine, EngineHandle, EngineOptions};
use loadgen::workload::Random;
use serde_json::{Value, json};

use self::backend::Counts;
use self::bodies::{CONVERSATIONS, Conversations};
use self::proxies::{Place, Proxy};

/// Backends behind each proxy.
pub(crate) const BACKENDS: usize = 4;

/// Load before a measurement begins: connections are open and caches filled by then.
const SETTLE: Duration = Duration::from_millis(400);

/// Time for the gateway to index the warm conversations.
const WARM_MAX: Duration = Duration::from_secs(60);

/// Least share of Tier 1.5 hits with which a KV-exact figure is one.
const HIT_SHARE_MIN: f64 = 0.95;

/// CPU per request of kvlane, nginx and HAProxy, end to end
#[derive(Clone, Debug, clap::Args)]
pub struct E2eArgs {
    /// Rounds; the median is shown
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 2.0)]
    pub seconds: f64,
    /// Clients, each with one request at a time
    #[arg(long, default_value_t = 32)]
    pub clients: usize,
    /// Bytes of a request's body
    #[arg(long, value_delimiter = ',', default_values_t = [200, 16 * 1024, 128 * 1024])]
    pub sizes: Vec<usize>,
    /// Core of the proxy
    #[arg(long, default_value_t = 0)]
    pub proxy_core: usize,
    /// Core of load and backend
    #[arg(long, default_value_t = 1)]
    pub load_core: usize,
    /// Directory with the model's tokenizer; default: the demo's
    #[arg(long, requires = "model", value_name = "DIR")]
    pub tokenizers: Option<PathBuf>,
    /// Model named in the requests
    #[arg(long, default_value = DEMO_MODEL)]
    pub model: String,
    /// Where the result is written
    #[arg(long, default_value = "bench/results", value_name = "DIR")]
    pub out: PathBuf,
}

/// One measurement.
#[derive(Clone, Debug)]
struct Sample {
    us_per_request: f64,
    requests_per_second: f64,
    errors: u64,
    /// Share of requests that Tier 1.5 decided, where the proxy has that tier.
    hit_share: Option<f64>,
    /// µs per request by thread name.
    threads: BTreeMap<String, f64>,
}

/// Runs the comparison; exit code 1 when a measurement is not one (errors, or too few hits).
///
/// # Errors
/// Cores that cannot be used, a proxy that does not start, files that cannot be written.
pub fn main(args: &E2eArgs) -> anyhow::Result<ExitCode> {
    if args.rounds == 0 || args.clients == 0 || !(args.seconds > 0.0 && args.seconds < 3600.0) {
        bail!("--rounds and --clients are at least 1, --seconds is above 0");
    }
    for core in [args.proxy_core, args.load_core] {
        check_core(core)?;
    }
    let directory = std::env::temp_dir().join(format!("kvlane-bench-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let result = run(args, &directory);
    let _ = std::fs::remove_dir_all(&directory);
    result
}

/// On a thread of its own, since a pin stays.
fn check_core(core: usize) -> anyhow::Result<()> {
    let pinned = std::thread::spawn(move || cpu::pin(core)).join();
    pinned.map_err(|_| anyhow::anyhow!("the pinning thread panicked"))?.with_context(|| {
        format!("core {core} cannot be used: choose --proxy-core and --load-core among the cores of this machine")
    })
}

fn run(args: &E2eArgs, directory: &Path) -> anyhow::Result<ExitCode> {
    let tokenizers = crate::files::tokenizers(args.tokenizers.as_deref(), directory)?;
    let backends = backend::start(BACKENDS, args.load_core)?;
    let place = Place {
        directory,
        backends: &backends,
        proxy_core: args.proxy_core,
        load_core: args.load_core,
        tokenizers: &tokenizers,
    };
    let loads: Vec<(usize, Arc<Conversations>)> =
        args.sizes.iter().map(|&size| (size, Arc::new(Conversations::new(&args.model, size)))).collect();
    let engines = start_engines(&args.model, &tokenizers)?;
    let (exact, admin) = proxies::kvlane(&place, Some(&engines))?;
    warm(&engines, &loads, admin)?;
    let mut all = Vec::new();
    for (package, peer) in [("nginx", proxies::nginx(&place)?), ("haproxy", proxies::haproxy(&place)?)] {
        match peer {
            Some(proxy) => all.push(proxy),
            None => println!("missing: {package} is not installed (package `{package}`), its column is left out"),
        }
    }
    all.push(proxies::kvlane(&place, None)?.0);
    all.push(exact);
    let samples = measure_all(args, &all, &loads, admin)?;
    let names: Vec<&str> = all.iter().map(|proxy| proxy.name).collect();
    print!("{}", table(&names, &args.sizes, &samples));
    let file = write(args, &names, &samples)?;
    println!("\nwritten: {}", file.display());
    let bad = |sample: &Sample| sample.errors > 0 || sample.hit_share.is_some_and(|share| share < HIT_SHARE_MIN);
    let good = !samples.values().flatten().any(bad);
    if !good {
        println!("NOT VALID: a measurement had errors, or fewer than 95 % Tier 1.5 hits");
    }
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

type Samples = BTreeMap<(usize, usize), Vec<Sample>>;

/// Every size on every proxy, round by round.
fn measure_all(
    args: &E2eArgs,
    all: &[Proxy],
    loads: &[(usize, Arc<Conversations>)],
    admin: SocketAddr,
) -> anyhow::Result<Samples> {
    let mut samples = Samples::new();
    for proxy in all {
        proxy.run(false);
    }
    for round in 1..=args.rounds {
        eprintln!("round {round} of {}", args.rounds);
        for (size, conversations) in loads {
            for (column, proxy) in all.iter().enumerate() {
                let admin = (proxy.name == "kvlane KV-exact").then_some(admin);
                proxy.run(true);
                let sample = measure(args, proxy, conversations, admin);
                proxy.run(false);
                samples.entry((*size, column)).or_default().push(sample?);
            }
        }
    }
    for proxy in all {
        proxy.run(true);
    }
    Ok(samples)
}

fn measure(
    args: &E2eArgs,
    proxy: &Proxy,
    conversations: &Arc<Conversations>,
    admin: Option<SocketAddr>,
) -> anyhow::Result<Sample> {
    let counts = Arc::new(Counts::default());
    let load =
        backend::load(proxy.address, Arc::clone(conversations), args.clients, args.load_core, Arc::clone(&counts))?;
    std::thread::sleep(SETTLE);
    let hits_before = admin.map(hits).transpose()?;
    let (start, before, done_before) =
        (Instant::now(), cpu::time_of(proxy.id())?, counts.completed.load(Ordering::Relaxed));
    std::thread::sleep(Duration::from_secs_f64(args.seconds));
    let (after, done) = (cpu::time_of(proxy.id())?, counts.completed.load(Ordering::Relaxed) - done_before);
    let elapsed = start.elapsed().as_secs_f64();
    let hits_after = admin.map(hits).transpose()?;
    counts.stop.store(true, Ordering::Relaxed);
    load.join().map_err(|_| anyhow::anyhow!("the load's thread panicked"))?;
    if done == 0 {
        bail!("{} answered no request in {elapsed:.1} s", proxy.name);
    }
    let per_request = |ns: u64| ns as f64 / 1e3 / done as f64;
    let mut threads: BTreeMap<String, f64> = BTreeMap::new();
    for (name, ns) in &after.threads {
        *threads.entry(name.clone()).or_default() += per_request(*ns);
    }
    for (name, ns) in &before.threads {
        *threads.entry(name.clone()).or_default() -= per_request(*ns);
    }
    Ok(Sample {
        us_per_request: per_request(after.total_ns - before.total_ns),
        requests_per_second: done as f64 / elapsed,
        errors: counts.errors.load(Ordering::Relaxed),
        hit_share: hits_before.zip(hits_after).map(|(before, after)| (after - before) / done as f64),
        threads,
    })
}

/// Tier 1.5 hits so far.
fn hits(admin: SocketAddr) -> anyhow::Result<f64> {
    sum_of(admin, "loxilb_pd_kv_tier15_hits_total")
}

/// The sum over all labels of a metric of the gateway.
pub(crate) fn sum_of(admin: SocketAddr, name: &str) -> anyhow::Result<f64> {
    let (status, text) = http_get(admin, "/netlox/v1/metrics").context("the gateway's metrics cannot be read")?;
    if status != 200 {
        bail!("the gateway's metrics answer {status}");
    }
    let lines = text.lines().filter(|line| line.starts_with(name));
    Ok(lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
}

/// Engines that cache all conversations and never wait.
pub(crate) fn start_engines(model: &str, tokenizers: &Path) -> anyhow::Result<Vec<EngineHandle>> {
    let options = EngineOptions {
        port: 0,
        event_port: 0,
        replay_port: Some(0),
        time_scale: 0.0,
        blocks: 1 << 18,
        model: model.to_owned(),
        tokenizers: Some(tokenizers.to_owned()),
        ..EngineOptions::default()
    };
    Engine::start_many(&options, BACKENDS as u16, 1).context("the engines that publish the warm blocks cannot start")
}

/// Sends each conversation to one engine, and waits until the gateway has indexed all blocks.
fn warm(engines: &[EngineHandle], loads: &[(usize, Arc<Conversations>)], admin: SocketAddr) -> anyhow::Result<()> {
    let mut random = Random::new(3);
    for (_, conversations) in loads {
        for number in 0..CONVERSATIONS {
            let address = engines[number % engines.len()].http_addr;
            post(address, &conversations.request(number, &mut random)).context("warming an engine")?;
        }
    }
    let cached = |engine: &EngineHandle| engine.cached_keys().map_or(0, |keys| keys.len());
    let expected: usize = engines.iter().map(cached).sum();
    let start = Instant::now();
    loop {
        let indexed = sum_of(admin, "loxilb_pd_kv_blocks")? as usize;
        if indexed == expected && expected > 0 {
            println!("warm: {indexed} blocks of {} conversations indexed", CONVERSATIONS * loads.len());
            return Ok(());
        }
        if start.elapsed() > WARM_MAX {
            bail!("the gateway indexed {indexed} blocks of the {expected} that the engines hold");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn post(address: SocketAddr, request: &[u8]) -> anyhow::Result<()> {
    let mut stream = std::net::TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    stream.write_all(request)?;
    let mut answer = [0; 12];
    stream.read_exact(&mut answer)?;
    if answer != *b"HTTP/1.1 200" {
        bail!("the engine answered {}", String::from_utf8_lossy(&answer));
    }
    // The whole answer is taken: closing early would abort the request.
    let mut rest = vec![0; 64 * 1024];
    let read = stream.read(&mut rest)?;
    if read == 0 { bail!("the engine's answer is cut") } else { Ok(()) }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

fn median_of(samples: &[Sample], value: impl Fn(&Sample) -> f64) -> f64 {
    median(samples.iter().map(value).collect())
}

fn table(names: &[&str], sizes: &[usize], samples: &Samples) -> String {
    let mut text = format!("\nCPU per request, µs (× nginx), median of {} rounds\n", rounds(samples));
    text += &format!("{:<12}", "body");
    for name in names {
        text += &format!("{name:>22}");
    }
    text.push('\n');
    for &size in sizes {
        let nginx = names.iter().position(|name| *name == "nginx");
        let base = nginx.map(|column| median_of(&samples[&(size, column)], |sample| sample.us_per_request));
        text += &format!("{:<12}", format!("{size} B"));
        for column in 0..names.len() {
            let us = median_of(&samples[&(size, column)], |sample| sample.us_per_request);
            let ratio = base.map_or(String::new(), |base| format!(" ({:.2})", us / base));
            text += &format!("{:>22}", format!("{us:.1}{ratio}"));
        }
        text.push('\n');
    }
    text
}

fn rounds(samples: &Samples) -> usize {
    samples.values().next().map_or(0, Vec::len)
}

fn write(args: &E2eArgs, names: &[&str], samples: &Samples) -> anyhow::Result<PathBuf> {
    let cells = samples.iter().map(|(&(size, column), samples)| {
        json!({
            "body_bytes": size,
            "proxy": names[column],
            "us_per_request": median_of(samples, |sample| sample.us_per_request),
            "requests_per_second": median_of(samples, |sample| sample.requests_per_second),
            "rounds": samples.iter().map(to_json).collect::<Vec<_>>(),
        })
    });
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let result = json!({
        "format": "kvlane-bench-e2e-1",
        "kernel": kernel.trim(),
        "clients": args.clients,
        "seconds": args.seconds,
        "model": args.model,
        "cells": cells.collect::<Vec<_>>(),
    });
    std::fs::create_dir_all(&args.out).with_context(|| format!("{} cannot be made", args.out.display()))?;
    let file = args.out.join("e2e.json");
    let text = serde_json::to_string_pretty(&result)?;
    std::fs::write(&file, text + "\n").with_context(|| format!("{} cannot be written", file.display()))?;
    Ok(file)
}

fn to_json(sample: &Sample) -> Value {
    json!({
        "us_per_request": sample.us_per_request,
        "requests_per_second": sample.requests_per_second,
        "errors": sample.errors,
        "hit_share": sample.hit_share,
        "us_per_request_by_thread": sample.threads,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_shows_medians_and_ratios_to_nginx() {
        let sample = |us| Sample {
            us_per_request: us,
            requests_per_second: 1.0,
            errors: 0,
            hit_share: None,
            threads: BTreeMap::new(),
        };
        let samples = Samples::from([
            ((200, 0), vec![sample(10.0), sample(30.0), sample(20.0)]),
            ((200, 1), vec![sample(9.0), sample(10.0), sample(11.0)]),
        ]);
        let text = table(&["nginx", "kvlane plain"], &[200], &samples);
        assert!(text.contains("20.0 (1.00)") && text.contains("10.0 (0.50)"), "{text}");
        assert_eq!(median(vec![1.0, 2.0, 3.0, 10.0]), 2.5);
    }
}
