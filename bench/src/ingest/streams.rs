//! Thousands of real streams over loopback: do they stay connected, what do they cost at rest, and how long does a
//! frame take until readers see it.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use kvlane::ingest::{Believed, EndpointSources, Ingest, IngestOptions, Mode, RankSource, ServiceSources};
use shards::block::vllm::{Algorithm, Tagging};
use shards::ids::{EndpointIndex, Rank, ServiceId, ShardId};
use shards::inventory::{self, Options, Reader, Walk};
use shards::load::{LoadSlot, LoadTable};
use shards::service::{EndpointShared, Engine};

use super::feed::RULE_SEED;
use super::fleet::BLOCK_TOKENS;
use super::publishers::{self, Order, Sent};
use crate::clock;
use crate::e2e::cpu;

/// How long connecting may take, and a message may be on its way.
const PATIENCE: Duration = Duration::from_secs(120);
/// Rest between connecting and measuring.
const SETTLE: Duration = Duration::from_secs(3);
/// Pause of the reader between two looks: what a measured delay may be too long.
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// Sizes of the run.
#[derive(Clone, Debug, clap::Args)]
#[group(id = "streams")]
pub struct Args {
    /// Endpoints of the service; 0 leaves the streams out.
    #[arg(long, default_value_t = 512)]
    pub endpoints: u16,
    /// Streams per endpoint.
    #[arg(long, default_value_t = 8)]
    pub ranks: u8,
    /// Seconds of each window.
    #[arg(long, default_value_t = 20)]
    pub window_seconds: u32,
    /// Messages a second over all streams while the delay is measured.
    #[arg(long, default_value_t = 2_000)]
    pub messages_per_second: u32,
    /// Core of the ingest thread; readers and publishers are on the other.
    #[arg(long, default_value_t = 1)]
    pub ingest_core: usize,
    /// Core of everything else.
    #[arg(long, default_value_t = 0)]
    pub other_core: usize,
    /// Every stream names a replay address, where nothing listens, as of an engine that was given none.
    #[arg(long)]
    pub replay: bool,
}

/// CPU per second of wall time, per cent of a core.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu {
    pub ingest: f64,
    pub zmq: f64,
}

/// What was measured.
pub struct Report {
    pub streams: usize,
    pub connect: Duration,
    pub descriptors: usize,
    pub rest: Cpu,
    pub in_flight: Cpu,
    pub busy: Cpu,
    pub connected: usize,
    pub reconnects: u64,
    /// Nanoseconds from just before a message is sent until a reader finds its block.
    pub delay: Histogram<u64>,
}

/// Connects, rests, and publishes.
///
/// # Errors
/// If streams do not connect, a message is lost, or the machine does not allow so many descriptors.
pub fn measure(args: &Args, seed: u64) -> anyhow::Result<Report> {
    raise_descriptors()?;
    cpu::pin(args.other_core)?;
    let streams = usize::from(args.endpoints) * usize::from(args.ranks);
    let mut publishers = Publishers::start(streams, args.other_core, seed)?;
    let window = Duration::from_secs(args.window_seconds.into());

    let loads = Arc::new(LoadTable::new(2, args.endpoints.into()));
    let options = IngestOptions { cores: vec![args.ingest_core], ..IngestOptions::new(Arc::clone(&loads)) };
    let ingest = Ingest::start(options)?;
    let (writer, readers) = inventory::new(&Options { blocks_expected: 1_000_000 });
    let start = Instant::now();
    ingest.add_service(sources(args, &publishers.ports), writer)?;
    let ready = || ingest.status().iter().filter(|stream| stream.connected && stream.eligible).count();
    while ready() < streams {
        anyhow::ensure!(
            start.elapsed() < PATIENCE,
            "only {} of {streams} streams connected, with {} descriptors; `ulimit -Hn` bounds them",
            ready(),
            std::fs::read_dir("/proc/self/fd")?.count()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    let connect = start.elapsed();
    let descriptors = std::fs::read_dir("/proc/self/fd")?.count();
    std::thread::sleep(SETTLE);

    let rest = over(window, || std::thread::sleep(window))?;
    let one = loads.reserve(ShardId(0), LoadSlot(0), 0);
    let in_flight = over(window / 2, || std::thread::sleep(window / 2))?;
    drop(one);
    let mut delay = Histogram::new_with_bounds(1, 10_000_000_000, 3)?;
    let order =
        Order { messages: args.window_seconds * args.messages_per_second, per_second: args.messages_per_second };
    let mut outcome = Ok(());
    let busy = over(window, || outcome = publishers.publish(order, seed, &readers.reader(), &mut delay))?;
    let status = ingest.status();
    let lost: Vec<_> = status.iter().filter(|stream| !stream.connected || stream.reconnects > 0).collect();
    outcome.map_err(|error: anyhow::Error| error.context(format!("{} streams lost their connection", lost.len())))?;
    Ok(Report {
        streams,
        connect,
        descriptors,
        rest,
        in_flight,
        busy,
        connected: status.iter().filter(|stream| stream.connected).count(),
        reconnects: status.iter().map(|stream| stream.reconnects + stream.gaps).sum(),
        delay,
    })
}

fn sources(args: &Args, ports: &[u16]) -> ServiceSources {
    let endpoint = |index: u16| {
        let rank = |rank: u8| {
            let port = ports[usize::from(index) * usize::from(args.ranks) + usize::from(rank)];
            let replay = args.replay.then(|| "tcp://127.0.0.1:1".to_owned());
            RankSource { rank: Rank(rank), mode: Mode::Connect(format!("tcp://127.0.0.1:{port}")), replay }
        };
        EndpointSources {
            index: EndpointIndex(index),
            shared: Arc::new(EndpointShared::new(EndpointIndex(index), LoadSlot(index.into()), 2)),
            label: format!("engine {index}"),
            ranks: (0..args.ranks).map(rank).collect(),
            drain: None,
        }
    };
    ServiceSources {
        id: ServiceId(0),
        pool: kvlane::ingest::Pool::Prompts,
        engine: Engine::Vllm,
        block_tokens: BLOCK_TOKENS as u32,
        weights: Default::default(),
        believed: Some(Arc::new(Believed::Vllm {
            algorithm: Algorithm::Sha256Cbor,
            algorithm_given: true,
            seed: RULE_SEED.to_owned(),
            tagging: Tagging::Tagged,
        })),
        endpoints: (0..args.endpoints).map(endpoint).collect(),
    }
}

/// CPU of the ingest thread and of the library's threads while something runs that takes about `expected`.
fn over(expected: Duration, run: impl FnOnce()) -> anyhow::Result<Cpu> {
    let (before, start) = (used()?, Instant::now());
    run();
    let (after, wall) = (used()?, start.elapsed());
    anyhow::ensure!(wall >= expected / 2, "a window was cut short");
    let share = |place: usize| 100.0 * after[place].saturating_sub(before[place]) as f64 / wall.as_nanos() as f64;
    Ok(Cpu { ingest: share(0), zmq: share(1) })
}

/// Nanoseconds that the ingest thread and the library's threads have used. These bear the name of the thread that made
/// them, which is older and so listed first.
fn used() -> std::io::Result<[u64; 2]> {
    let time = cpu::time_of(std::process::id())?;
    let mut named = time.threads.iter().filter(|(name, _)| name == "ingest-0").map(|(_, ns)| *ns);
    let ingest = named.next().unwrap_or(0);
    Ok([ingest, named.sum()])
}

/// The child process.
struct Publishers {
    process: Child,
    output: ChildStdout,
    ports: Vec<u16>,
}

impl Publishers {
    fn start(streams: usize, core: usize, seed: u64) -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["ingest-publishers", "--streams", &streams.to_string()]);
        command.args(["--core", &core.to_string(), "--seed", &seed.to_string()]);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut output = process.stdout.take().ok_or_else(|| anyhow::anyhow!("the child has no output"))?;
        let mut ports = vec![0; streams * 2];
        output.read_exact(&mut ports)?;
        let ports = ports.chunks_exact(2).map(|port| u16::from_le_bytes([port[0], port[1]])).collect();
        Ok(Publishers { process, output, ports })
    }

    /// Has messages sent, and waits for the block of each.
    fn publish(&mut self, order: Order, seed: u64, reader: &Reader, delay: &mut Histogram<u64>) -> anyhow::Result<()> {
        let input = self.process.stdin.as_mut().ok_or_else(|| anyhow::anyhow!("the child has no input"))?;
        input.write_all(order.line().as_bytes())?;
        let (mut walk, mut tokens, mut left) = (Walk::default(), Vec::new(), order.messages);
        let mut waiting = VecDeque::new();
        let mut bytes = [0; Sent::BYTES];
        while left > 0 {
            while waiting.len() < left as usize && (waiting.is_empty() || self.has_output()) {
                self.output.read_exact(&mut bytes)?;
                let sent = Sent::from_bytes(&bytes);
                waiting.push_back((publishers::block(seed, sent.block, &mut tokens), sent));
            }
            let guard = reader.enter().ok_or_else(|| anyhow::anyhow!("the inventory has no writer"))?;
            waiting.retain(|(key, sent)| {
                walk.restart();
                if !guard.advance(&mut walk, &[*key]) {
                    return true;
                }
                delay.saturating_record(clock::since_boot().saturating_sub(sent.at).as_nanos() as u64);
                left -= 1;
                false
            });
            drop(guard);
            if let Some((_, sent)) = waiting.front() {
                anyhow::ensure!(clock::since_boot() < sent.at + PATIENCE, "block {} never came", sent.block);
                std::thread::sleep(LOOK_EVERY);
            }
        }
        Ok(())
    }

    /// Whether a read of the child's output would not wait.
    fn has_output(&self) -> bool {
        let mut entry = libc::pollfd { fd: self.output.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, which lives through the call.
        unsafe { libc::poll(&raw mut entry, 1, 0) > 0 }
    }
}

impl Drop for Publishers {
    fn drop(&mut self) {
        // It has nothing to lose.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Allows this process, and those it starts, as many descriptors as it may allow itself.
fn raise_descriptors() -> std::io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls take a pointer to a live rlimit, which the first writes and the second reads.
    let result = unsafe {
        let read = libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        limit.rlim_cur = limit.rlim_max;
        read | libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit)
    };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}
