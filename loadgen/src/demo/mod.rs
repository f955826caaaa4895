//! `loadgen demo`: a whole fleet on this machine, once with round robin and once with KV-exact routing.

mod compare;
mod fleet;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;

use self::compare::{Comparison, Phase, Played};
use self::fleet::{ENGINES, Fleet, Routing};
use crate::assets::DEMO_MODEL;
use crate::client::Target;
use crate::run::drive::{Pace, Plan, Progress};
use crate::run::{self, RuntimeChoice, threads};
use crate::trace::{self, Slice, TraceShape, TraceWorkload};
use crate::workload::{ChatShape, ChatWorkload, Workload};

/// Seed of everything random in the demo.
const SEED: u64 = 1;

/// Longest wait for one answer.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Start 4 simulated engines and the gateway here, play one load with round robin and KV-exact routing, and compare
#[derive(Clone, Debug, clap::Args)]
pub struct DemoArgs {
    /// Play this Mooncake-format trace (JSON lines, plain or .gz) instead of the built-in chat
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Length of each of the two phases, seconds
    #[arg(long)]
    pub seconds: Option<f64>,
    /// The same load in a quarter of the time: for tests; on a busy machine too fast for good figures
    #[arg(long)]
    pub quick: bool,
    /// What generates the load
    #[arg(long, value_enum, default_value_t)]
    pub runtime: RuntimeChoice,
}

/// Sizes chosen so that the engines' simulated speed, not this machine, is what limits.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sizes {
    /// Blocks of each engine's cache.
    blocks: usize,
    /// Prompt tokens that each engine computes in a second.
    prefill_tps: f64,
    /// How fast requests come: per second in the chat, as a multiple of the recorded speed in a trace.
    speed: f64,
    /// Length of a phase.
    seconds: f64,
}

/// The chat: a cache holds a third of what the conversations need together, so a round robin, which takes each
/// conversation to every engine in turn, keeps little of it.
const CHAT: Sizes = Sizes { blocks: 760, prefill_tps: 5_000.0, speed: 12.0, seconds: 25.0 };

/// A trace, its blocks scaled from 512 tokens to one of 16: a cache holds about a minute of it.
const TRACE: Sizes = Sizes { blocks: 4_000, prefill_tps: 8_000.0, speed: 16.0, seconds: 27.0 };

/// Tokens for each block of a trace.
const TRACE_TOKENS_PER_BLOCK: usize = 16;

/// Tokens that each engine generates in a second for each request.
const DECODE_TPS: f64 = 200.0;

/// How many times faster the quick demo goes: the same load, in less time.
const QUICK: f64 = 4.0;

impl Sizes {
    fn of(args: &DemoArgs) -> Self {
        let mut sizes = if args.trace.is_some() { TRACE } else { CHAT };
        if args.quick {
            sizes.prefill_tps *= QUICK;
            sizes.speed *= QUICK;
            sizes.seconds /= QUICK;
        }
        sizes.seconds = args.seconds.unwrap_or(sizes.seconds);
        sizes
    }
}

/// The load of both phases.
struct Load {
    workload: Workload,
    pace: Pace,
    pace_in_words: String,
    duration: Duration,
    played: Played,
}

/// Runs the demo; exit code 0 when everything that is promised held, else 1.
///
/// # Errors
/// The trace cannot be read, or the fleet cannot be started.
pub fn main(args: &DemoArgs) -> anyhow::Result<ExitCode> {
    let sizes = Sizes::of(args);
    let directory = TemporaryDirectory::new()?;
    let load = load(args, &sizes)?;
    let say = |text: &str| {
        if !args.json {
            println!("{text}");
        }
    };
    say(&format!("load       {}\npace       {}", load.workload.describe(), load.pace_in_words));
    say(&format!(
        "engines    {ENGINES} simulated, each with {} blocks of 16 tokens, {} prompt tokens/s, {} tokens/s per request\n",
        sizes.blocks, sizes.prefill_tps, DECODE_TPS
    ));
    let play = |routing: Routing| {
        say(&format!("playing with {} for {} s ...", routing.name(), load.duration.as_secs_f64()));
        phase(&directory.0, &sizes, &load, routing, args.runtime)
    };
    let round_robin = play(Routing::RoundRobin)?;
    let exact = play(Routing::KvExact)?;
    let comparison = Comparison::new(load.played, round_robin, exact);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&comparison.to_json())?);
    } else {
        print!("\n{}{}", comparison.to_text(), where_next(args));
    }
    Ok(if comparison.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn where_next(args: &DemoArgs) -> String {
    let other = match args.trace {
        None => "loadgen demo --trace FILE  a recorded production trace in place of the built-in chat",
        Some(_) => "loadgen demo               the built-in multi-turn chat in place of the trace",
    };
    format!(
        "\nWhere next: README.md (put kvlane in front of your own engines), ARCHITECTURE.md (how it works), and\n  \
         {other}\n  loadgen run --url URL      your own load against any OpenAI-style server\n"
    )
}

fn load(args: &DemoArgs, sizes: &Sizes) -> anyhow::Result<Load> {
    let duration = run::seconds("--seconds", sizes.seconds)?;
    let Some(path) = &args.trace else {
        let shape = ChatShape {
            model: DEMO_MODEL.to_owned(),
            sessions: 24,
            turns: 12,
            system_prompts: 4,
            system_tokens: 96,
            user_tokens: 80,
            reply_tokens: 160,
            max_tokens: 8,
            seed: SEED,
        };
        let arrivals = run::arrivals(sizes.speed, false, duration, usize::MAX, SEED)?;
        return Ok(Load {
            workload: Workload::Chat(ChatWorkload::new(shape)),
            pace: Pace::Open { arrivals: arrivals.into() },
            pace_in_words: format!("open loop, {} requests/s, Poisson", sizes.speed),
            duration,
            played: Played::Chat,
        });
    };
    let slice = Slice { requests: None, seconds: Some(sizes.seconds * sizes.speed) };
    let requests = trace::read(path, slice)?;
    if requests.is_empty() {
        bail!("{} has no request in its first {:.0} s", path.display(), sizes.seconds * sizes.speed);
    }
    let shape = TraceShape {
        model: DEMO_MODEL.to_owned(),
        time_factor: sizes.speed,
        spread: true,
        tokens_per_block: TRACE_TOKENS_PER_BLOCK,
        seed: SEED,
    };
    let trace = TraceWorkload::new(requests, shape);
    let pace = Pace::Open { arrivals: trace.arrivals().into() };
    let pace_in_words = "open loop, at the trace's times".to_owned();
    Ok(Load { workload: Workload::Trace(Arc::new(trace)), pace, pace_in_words, duration, played: Played::Trace })
}

/// Plays the load on a fresh fleet.
fn phase(
    directory: &Path,
    sizes: &Sizes,
    load: &Load,
    routing: Routing,
    runtime: RuntimeChoice,
) -> anyhow::Result<Phase> {
    let fleet = Fleet::start(directory, sizes, routing)?;
    let cores = threads::default_cores();
    let plan = Plan {
        target: Target::parse(&fleet.url)?,
        requests_max: load.workload.len().unwrap_or(usize::MAX),
        workload: load.workload.clone(),
        pace: load.pace.clone(),
        duration: load.duration,
        timeout: TIMEOUT,
        in_flight_max: 4_096,
        threads: cores.len(),
        progress: Progress::default(),
    };
    let report = threads::play(plan, cores, runtime, load.pace_in_words.clone())?;
    Ok(Phase { name: routing.name(), report, served: fleet.served(), driver: fleet.driver.clone() })
}

/// A directory that is removed when dropped.
struct TemporaryDirectory(PathBuf);

impl TemporaryDirectory {
    fn new() -> anyhow::Result<Self> {
        let path = std::env::temp_dir().join(format!("kvlane-demo-{}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        Ok(TemporaryDirectory(path))
    }
}

impl Drop for TemporaryDirectory {
    fn drop(&mut self) {
        // What is left lies in the system's temporary directory.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
