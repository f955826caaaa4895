//! `bench stall`: how long a shard stands still beside long prompts.
//!
//! One shard on a core of its own: ring, proxy, an echo and a timer beside it. On the other core clients send long
//! prompts as fast as they are answered, by an engine that answers at once; a prober there sends single bytes to the
//! echo and small chats through the proxy. In *held* rows an endpoint holds every block of the prompts and the shard
//! remembers none, so that all of a prompt is looked through, tokenized and hashed each time. In *cold* rows each prompt
//! is new and nobody holds it. The gap is the time between two visits to the driver, from inside; echo, timer and small
//! chats are seen from outside. `!` marks what is over its bound: gap p99.9 1 ms, added p99 of small chats 2 ms.

mod inputs;
mod load;
mod shard;

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::ValueEnum;
use hdrhistogram::Histogram;
use loadgen::workload::Random;
use shards::block::{Contract, FIXED_SEED, HashAlgo, NoneHash};
use shards::executor::{Aside, Rung};
use shards::ids::{EndpointIndex, Rank};
use shards::inventory::{self, ReaderFactory, Writer};
use shards::prompt::{Api, Job, Keying, Model, Rendering, Step};
use shards::service::Engine;

use self::inputs::Input;
pub use self::load::{exchange, request};
use crate::e2e::backend;
use crate::e2e::bodies::Conversations;
use crate::e2e::cpu;
use crate::files::ModelArgs;

/// Tokens per block.
pub const BLOCK_TOKENS: u32 = 16;
/// Bytes of the small chats.
const SMALL_BYTES: usize = 200;

/// Setup of the run.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Tokenizer and template
    #[command(flatten)]
    pub model: ModelArgs,
    /// Bytes of a long prompt
    #[arg(long, default_value_t = 1_000_000)]
    pub bytes: usize,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 2.0)]
    pub seconds: f64,
    /// Long prompts under way at a time
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16])]
    pub concurrent: Vec<usize>,
    /// What the long prompts consist of; default: each kind
    #[arg(long, value_delimiter = ',')]
    pub inputs: Vec<Input>,
    /// Drivers
    #[arg(long, value_delimiter = ',', default_values = ["io-uring", "epoll"])]
    pub drivers: Vec<Driver>,
    /// Core of the shard
    #[arg(long, default_value_t = 0)]
    pub shard_core: usize,
    /// Core of everything else
    #[arg(long, default_value_t = 1)]
    pub load_core: usize,
}

/// What a shard waits with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Driver {
    /// The best io_uring there is
    IoUring,
    /// epoll
    Epoll,
}

/// What was seen in one measurement.
struct Seen {
    big: u64,
    errors: u64,
    gap_p999_us: u64,
    gap_max_us: u64,
    timer: Histogram<u64>,
    echo: Histogram<u64>,
    small: Histogram<u64>,
}

/// Runs all measurements and writes their table.
///
/// # Errors
/// Cores that cannot be used, a model that cannot be loaded, a driver that cannot be had.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<()> {
    let model = args.model.load()?;
    let inputs = if args.inputs.is_empty() { Input::value_variants() } else { &args.inputs };
    let core = args.load_core;
    cpu::pin(core).with_context(|| format!("core {core} cannot be used"))?;
    let backend = backend::start(1, core)?[0];
    writeln!(
        out,
        "model {}, prompts of {} B, {} s each; µs\n{:<9} {:<10} {:<5} {:>3} {:>8} | {:>8} {:>8} | {:>8} {:>8} | {:>7} {:>7} {:>7} | {:>7} {:>8}",
        args.model.model,
        args.bytes,
        args.seconds,
        "driver",
        "input",
        "mode",
        "n",
        "prompts",
        "gap99.9",
        "max",
        "tmr99.9",
        "max",
        "echo50",
        "99",
        "99.9",
        "small99",
        "added"
    )?;
    for driver in &args.drivers {
        let rung = if *driver == Driver::Epoll { Rung::Epoll } else { Rung::DeferTaskrun };
        let idle = measure(args, &model, rung, backend, &[], &Mode::cold(), 0)?;
        line(out, rung, "-", "idle", 0, &idle, None)?;
        for input in inputs {
            let most = args.concurrent.iter().copied().max().unwrap_or(1);
            let bodies: Vec<String> = (0..most as u64)
                .map(|n| {
                    let body = input.body(&args.model.model, &mut Random::of(5, n, 0), args.bytes);
                    body.replacen(inputs::MARK, &format!("{n:016}"), 1)
                })
                .collect();
            for held in [true, false] {
                let mode = if held { Mode::held(&model, *input, &bodies)? } else { Mode::cold() };
                let requests: Vec<Vec<u8>> = bodies.iter().map(|body| load::request(input.path(), body)).collect();
                for &n in &args.concurrent {
                    let seen = measure(args, &model, rung, backend, &requests, &mode, n)?;
                    let name = input.to_possible_value().map_or(String::new(), |v| v.get_name().to_owned());
                    line(out, rung, &name, if held { "held" } else { "cold" }, n, &seen, Some(&idle))?;
                }
            }
        }
    }
    Ok(())
}

/// Whether the prompts' blocks are held.
struct Mode {
    inventory: ReaderFactory,
    held: bool,
    _writer: Writer,
}

impl Mode {
    fn cold() -> Self {
        let (writer, inventory) = inventory::new(&inventory::Options { blocks_expected: 1 });
        Mode { inventory, held: false, _writer: writer }
    }

    fn held(model: &Arc<Model>, input: Input, bodies: &[String]) -> anyhow::Result<Self> {
        let (mut writer, inventory) = inventory::new(&inventory::Options { blocks_expected: 1 << 19 });
        let holder = writer.add_holder(EndpointIndex(0), Rank(0)).context("an inventory has a slot")?;
        let contract = contract();
        let keying = Keying { contract: &contract, block_tokens: BLOCK_TOKENS, lora: None };
        let api = Api::of("POST", input.path()).context("inputs are prompts")?;
        for body in bodies {
            let job = Job::new(api, body.as_bytes(), model, Rendering::of(Engine::Vllm), keying);
            let mut job = job.map_err(|reason| anyhow::anyhow!("{input:?} has no keys: {reason:?}"))?;
            while job.step().map_err(|reason| anyhow::anyhow!("{input:?} has no keys: {reason:?}"))? == Step::More {}
            for key in job.keys() {
                writer.store(*key, holder);
            }
        }
        while !(writer.try_publish() && writer.pending() == 0) {
            std::thread::yield_now();
        }
        Ok(Mode { inventory, held: true, _writer: writer })
    }
}

/// The contract of the shard's rule.
fn contract() -> Contract {
    Contract::vllm(NoneHash::from_seed(HashAlgo::Sha256Cbor, FIXED_SEED))
}

/// Starts the thread for long work. It gives way to the probes, as the load does, and to the backend that answers them:
/// all share a core, and none of them is what is measured.
fn start_aside() -> anyhow::Result<Aside> {
    let starting = std::thread::spawn(|| {
        // Threads inherit it.
        load::give_way();
        Aside::start()
    });
    let started = starting.join().map_err(|_| anyhow::anyhow!("the thread that starts another panicked"))?;
    started.context("no thread can be made")
}

fn measure(
    args: &Args,
    model: &Arc<Model>,
    rung: Rung,
    backend: std::net::SocketAddr,
    requests: &[Vec<u8>],
    mode: &Mode,
    concurrent: usize,
) -> anyhow::Result<Seen> {
    let setup = shard::Setup {
        rung,
        core: args.shard_core,
        backend,
        model: (args.model.model.clone(), Arc::clone(model)),
        inventory: mode.inventory.clone(),
        remembers: !mode.held,
        aside: start_aside()?,
    };
    let shard = shard::start(setup)?;
    let stop = Arc::new(AtomicBool::new(false));
    let unlike = !mode.held;
    let clients: Vec<_> = requests[..concurrent]
        .iter()
        .enumerate()
        .map(|(n, request)| {
            load::spawn(shard.proxy, request.clone(), unlike.then_some(n as u64 + 1), Arc::clone(&stop))
        })
        .collect();
    // What the first prompts cost (fresh memory, connections) is not what is measured.
    std::thread::sleep(Duration::from_millis(300));
    shard.begin();
    let small = Conversations::new(&args.model.model, SMALL_BYTES);
    let probed = load::probe(&shard, &small, Duration::from_secs_f64(args.seconds));
    stop.store(true, Ordering::Relaxed);
    let (mut big, mut errors) = (0, 0);
    for client in clients {
        let (done, failed) = client.join().map_err(|_| anyhow::anyhow!("a client panicked"))?;
        big += done;
        errors += failed;
    }
    let (timer, meter) = shard.end()?;
    let (echo, small) = probed?;
    if big == 0 && concurrent > 0 {
        bail!("no long prompt was answered");
    }
    Ok(Seen {
        big,
        errors,
        gap_p999_us: meter.gap_us_at(0.999),
        gap_max_us: meter.gap_max_ns.load(Ordering::Relaxed) / 1_000,
        timer,
        echo,
        small,
    })
}

fn line(
    out: &mut impl Write,
    rung: Rung,
    input: &str,
    mode: &str,
    n: usize,
    seen: &Seen,
    idle: Option<&Seen>,
) -> anyhow::Result<()> {
    let small = seen.small.value_at_quantile(0.99);
    let added = idle.map(|idle| small.saturating_sub(idle.small.value_at_quantile(0.99)));
    let marked = |value: u64, over: bool| format!("{value}{}", if over { "!" } else { "" });
    writeln!(
        out,
        "{:<9} {input:<10} {mode:<5} {n:>3} {:>8} | {:>8} {:>8} | {:>8} {:>8} | {:>7} {:>7} {:>7} | {small:>7} {:>8}{}",
        if rung == Rung::Epoll { "epoll" } else { "io_uring" },
        seen.big,
        marked(seen.gap_p999_us, seen.gap_p999_us > 1_000),
        seen.gap_max_us,
        seen.timer.value_at_quantile(0.999),
        seen.timer.max(),
        seen.echo.value_at_quantile(0.5),
        seen.echo.value_at_quantile(0.99),
        seen.echo.value_at_quantile(0.999),
        added.map_or("-".to_owned(), |added| marked(added, added > 2_000)),
        if seen.errors > 0 { format!("  {} ERRORS", seen.errors) } else { String::new() },
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_run_has_a_row_for_each_measurement() {
        let args = Args {
            model: crate::files::demo(),
            bytes: 30_000,
            seconds: 0.05,
            concurrent: vec![1],
            inputs: vec![Input::Prose, Input::ChatTiny],
            drivers: vec![Driver::Epoll],
            shard_core: 0,
            load_core: 0,
        };
        let mut out = Vec::new();
        // The pin of this thread must not outlive the test.
        let run = std::thread::spawn(move || run(&args, &mut out).map(|()| String::from_utf8_lossy(&out).into_owned()));
        let text = run.join().unwrap().unwrap();
        for row in ["idle", "prose      held", "prose      cold", "chat-tiny  held"] {
            assert!(text.contains(row), "{row} is missing:\n{text}");
        }
        assert!(!text.contains("ERRORS"), "{text}");
    }
}
