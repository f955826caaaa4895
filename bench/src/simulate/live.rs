//! One cell of the table again, with nothing simulated but the engines' computing: the gateway as a process of its own,
//! engines of `loadgen` as another, and requests over sockets.
//!
//! The beginning of Mooncake's trace is played at the pace that the cell has in the simulation. To fit on two cores all is
//! made smaller and faster, in proportion: a block of 512 tokens has [`BLOCK_TOKENS`], an engine's step and rates too, and
//! every time is [`FASTER`] times as short. Times are told as they would be without that.
//!
//! These engines are others than those of the simulation: steps are gone through one by one, later tokens cost no more,
//! answers have fewer tokens and end sooner, and service has no noise but the machine's. What has to agree is the order of the policies, where the simulation tells them
//! apart by a tenth or more.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use loadgen::child::{Child, free_ports, http_get};
use loadgen::replay::{self, ReplayArgs};
use loadgen::run::{CommonArgs, RuntimeChoice};
use shards::service::Blend;

use super::engine::Speed;
use super::fleet::{self, Setup};
use super::policy::{Kind, Policy};
use super::report::{Row, seconds};
use super::trace::{self, Trace};
use super::{Args, set_up};

/// Seconds of the trace, unless asked otherwise.
pub const SECONDS: f64 = 900.0;
/// Tokens that stand for a block of the trace.
const BLOCK_TOKENS: usize = 32;
/// Tokens of the gateway's and the engines' blocks.
const KV_BLOCK_TOKENS: usize = 16;
/// How many times as fast everything is.
const FASTER: f64 = 10.0;
/// The cell: size of the fleet, caches over the working set, load.
const CELL: (usize, f64, f64) = (8, 1.0, 0.6);
/// What the simulation must tell two policies apart by, for their order to count.
const APART: f64 = 1.1;
/// Longest wait for a process to be ready.
const START_MAX: Duration = Duration::from_secs(60);

/// A policy and the options of a rule that follows it.
const POLICIES: [(Kind, &str); 4] = [
    (Kind::RoundRobin, "sel = 0\n"),
    (Kind::SessionHash, "sel = 9\n"),
    (Kind::Blend(Blend::Hard), "kvExactMode = 3\nkvLbMode = \"hard\"\n"),
    (Kind::Blend(Blend::Ttft), "kvExactMode = 3\nkvLbMode = \"ttft\"\n"),
];

/// What one policy came to: seconds to the first token on average and for nine of ten, part of the tokens that hit.
#[derive(Clone, Copy, Debug)]
struct Figures {
    mean: f64,
    p90: f64,
    hits: f64,
}

/// Plays the cell in both ways, and says whether they agree; an error where they do not.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<()> {
    ensure!(args.live_seconds >= 60.0, "--live-seconds: at least 60");
    let path = args.path_of("mooncake_conversation.jsonl.gz");
    let trace = trace::read_beginning(&path, args.live_seconds)?;
    let (workers, caches, load) = CELL;
    let setup = set_up(&trace, workers, caches, load, args.seed, args.throughput);
    let directory = std::env::temp_dir().join(format!("kvlane-live-{}", std::process::id()));
    std::fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    writeln!(
        out,
        "{}: {} requests, {:.2} times as fast as recorded; {workers} workers, caches {caches} ×, load {:.0} %; live: 1/{} \
         of the size, {FASTER} times as fast\n\n\
         | policy | simulated: TTFT mean | p90 | hit tokens | live: TTFT mean | p90 | hit tokens |\n\
         |---|---:|---:|---:|---:|---:|---:|",
        trace.name,
        trace.requests.len(),
        setup.pace,
        load * 100.0,
        512 / BLOCK_TOKENS,
    )?;
    let mut found = Vec::new();
    for (kind, options) in POLICIES {
        let simulated = simulate(args, &trace, &setup, kind);
        let live = Fleet::start(&directory, &setup, options)?.play(&path, args, &setup)?;
        let told = |figures: &Figures| {
            format!("{} | {} | {:.1} %", seconds(figures.mean), seconds(figures.p90), figures.hits * 100.0)
        };
        writeln!(out, "| {} | {} | {} |", kind.name(), told(&simulated), told(&live))?;
        out.flush()?;
        found.push((kind, simulated, live));
    }
    // It holds nothing but what this run wrote.
    let _ = std::fs::remove_dir_all(&directory);
    let means: Vec<_> = found.iter().map(|(kind, simulated, live)| (kind.name(), simulated.mean, live.mean)).collect();
    let against = disagreements(&means);
    if against.is_empty() {
        writeln!(out, "\nThe ranking agrees.")?;
        return Ok(());
    }
    bail!("the ranking differs: {}", against.join("; "))
}

/// Pairs of policies (name, simulated, live) that the simulation tells apart, and that come live in the other order.
fn disagreements(means: &[(&str, f64, f64)]) -> Vec<String> {
    let mut against = Vec::new();
    for (better, simulated, live) in means {
        for (worse, other_simulated, other_live) in means {
            if simulated * APART <= *other_simulated && live >= other_live {
                against.push(format!("{better} is before {worse} simulated, and live it is not"));
            }
        }
    }
    against
}

fn simulate(args: &Args, trace: &Trace, setup: &Setup, kind: Kind) -> Figures {
    let outcome = fleet::run(trace, setup, &mut Policy::new(kind, &[]));
    let row = Row::new(kind, trace, setup.workers, &outcome, args.slo());
    Figures { mean: row.mean, p90: row.p90, hits: row.hits }
}

/// Engines and a gateway in front of them; dropping it stops all.
struct Fleet {
    // Dropped in this order: the gateway first, or it would see its engines die.
    _gateway: Child,
    _engines: Child,
    address: SocketAddr,
}

impl Fleet {
    fn start(directory: &Path, setup: &Setup, options: &str) -> anyhow::Result<Self> {
        let (engines, addresses) = start_engines(directory, setup)?;
        let ports = free_ports(2)?;
        let [address, admin] = [ports[0], ports[1]].map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        let file = directory.join("gateway.toml");
        std::fs::write(&file, configuration(directory, options, address, admin, &addresses)?)?;
        let log = directory.join("gateway.log");
        let arguments = ["gateway", "serve", "-c"].map(str::to_owned).into_iter().chain([file.display().to_string()]);
        let mut gateway = Child::start("the gateway", &arguments.collect::<Vec<_>>(), &log)?;
        let answers = || http_get(address, "/v1/models").is_ok_and(|(status, _)| status == 200);
        let started = gateway.wait_until("answering /v1/models", START_MAX, answers);
        started.with_context(|| format!("its log:\n{}", std::fs::read_to_string(&log).unwrap_or_default()))?;
        Ok(Fleet { _gateway: gateway, _engines: engines, address })
    }

    fn play(self, trace: &Path, args: &Args, setup: &Setup) -> anyhow::Result<Figures> {
        let common = CommonArgs {
            url: format!("http://{}", self.address),
            model: loadgen::assets::DEMO_MODEL.to_owned(),
            cores: None,
            runtime: RuntimeChoice::default(),
            timeout: 600.0,
            in_flight_max: 100_000,
            seed: args.seed,
            json: None,
        };
        let report = replay::play(&ReplayArgs {
            common,
            trace: trace.to_owned(),
            time_factor: setup.pace * FASTER,
            limit: None,
            seconds: Some(args.live_seconds),
            spread: true,
            tokens_per_block: BLOCK_TOKENS,
        })?;
        let seen = &report.seen;
        ensure!(seen.errors() == 0, "{} of {} requests got no answer", seen.errors(), seen.sent);
        let of_trace = |ms: f64| ms / 1e3 * FASTER;
        Ok(Figures {
            mean: of_trace(seen.ttft.mean_ms()),
            p90: of_trace(seen.ttft.quantile_ms(0.9)),
            hits: seen.hit_ratio(),
        })
    }
}

/// Where an engine serves, publishes and replays.
type Addresses = [SocketAddr; 3];

/// Engines as those of the simulation are, made smaller and faster, in a process of their own.
fn start_engines(directory: &Path, setup: &Setup) -> anyhow::Result<(Child, Vec<Addresses>)> {
    let smaller = BLOCK_TOKENS as f64 / 512.0;
    let Speed { step, rate, chunk, .. } = setup.speed;
    let blocks = setup.cache_blocks * (BLOCK_TOKENS / KV_BLOCK_TOKENS) as u64;
    let numbers = [
        ("--count", setup.workers as f64),
        ("--port", 0.0),
        ("--event-port", 0.0),
        ("--replay-port", 0.0),
        ("--block-size", KV_BLOCK_TOKENS as f64),
        ("--blocks", blocks as f64),
        ("--prefill-tps", (rate * smaller * FASTER).round()),
        // As long beside a piece of a prompt as there; so an answer, which has fewer tokens, ends sooner.
        ("--decode-tps", (FASTER / step).round()),
        ("--max-batched-tokens", (chunk * smaller).round()),
        ("--ttft-floor-ms", step * 1e3 / FASTER),
    ];
    let arguments = numbers.iter().flat_map(|(name, value)| [(*name).to_owned(), value.to_string()]);
    let arguments: Vec<String> = std::iter::once("engines".to_owned()).chain(arguments).collect();
    let log = directory.join("engines.log");
    let mut engines = Child::start("the engines", &arguments, &log)?;
    let addresses = || read_addresses(&std::fs::read_to_string(&log).unwrap_or_default());
    engines.wait_until("all engines", START_MAX, || addresses().len() == setup.workers)?;
    Ok((engines, addresses()))
}

/// Of lines like `engine http=127.0.0.1:1 events=127.0.0.1:2 replay=127.0.0.1:3`.
fn read_addresses(log: &str) -> Vec<Addresses> {
    let of_line = |line: &str| {
        let value = |name: &str| line.split(' ').find_map(|part| part.strip_prefix(name)?.parse().ok());
        Some([value("http=")?, value("events=")?, value("replay=")?])
    };
    log.lines().filter_map(of_line).collect()
}

fn configuration(
    directory: &Path,
    options: &str,
    address: SocketAddr,
    admin: SocketAddr,
    engines: &[Addresses],
) -> anyhow::Result<String> {
    let tokenizers: PathBuf = directory.join("tokenizers");
    loadgen::assets::stage(&tokenizers).context("the demo's tokenizer cannot be written")?;
    let dir = serde_json::Value::from(tokenizers.display().to_string());
    let claim_ms = (2_000.0 / FASTER).round();
    let exact = options.contains("kvExactMode");
    let mut text = format!(
        "[shards]\ncount = 1\n\n[tokenizers]\ndir = {dir}\n\n[admin]\nlisten = \"{admin}\"\n\n[[rule]]\n\
         externalIP = \"{}\"\nport = {}\nprotocol = \"tcp\"\nmode = 4\n{options}",
        address.ip(),
        address.port()
    );
    if exact {
        text += &format!(
            "kvEngineType = \"vllm\"\nkvBlockSize = {KV_BLOCK_TOKENS}\nkvHashAlgo = \"sha256_cbor\"\n\
             kvNoneHashSeed = \"0\"\nkvClaimMs = {claim_ms}\n"
        );
    }
    for [http, events, replay] in engines {
        text += &format!("\n[[rule.endpoints]]\nendpointIP = \"{}\"\ntargetPort = {}\n", http.ip(), http.port());
        if exact {
            text += &format!("kvZmqPort = {}\nkvReplayPort = {}\n", events.port(), replay.port());
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_count_where_the_simulation_tells_policies_apart() {
        let alike = [("a", 1.0, 3.0), ("b", 1.05, 2.0)];
        assert!(disagreements(&alike).is_empty());
        let same = [("a", 1.0, 1.5), ("b", 2.0, 2.5), ("c", 9.0, 3.0)];
        assert!(disagreements(&same).is_empty());
        let other = [("a", 1.0, 2.6), ("b", 2.0, 2.5), ("c", 9.0, 3.0)];
        assert_eq!(disagreements(&other), ["a is before b simulated, and live it is not"]);
    }

    #[test]
    fn addresses_are_read_from_what_engines_print() {
        let log = "starting\nengine http=127.0.0.1:8000 events=127.0.0.1:5557 replay=127.0.0.1:6557\nengine http=x";
        let ports: Vec<_> = read_addresses(log).iter().map(|found| found.map(|address| address.port())).collect();
        assert_eq!(ports, [[8000, 5557, 6557]]);
    }
}
