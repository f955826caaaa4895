//! `bench pd`: requests with a prefill and a decode leg.
//!
//! Overhead: CPU of the gateway's shard per P/D request, beside that of two plain forwards of the same body to the same
//! engines. Cancelling: clients leave at random moments of their requests' lives, and both engines' own accounts say when
//! they heard of it ([`cancel`]). The engines are simulated in this process; the gateway is a process of its own.

mod cancel;

use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use loadgen::child::{Child, free_ports};
use loadgen::engine::{Engine, EngineHandle, EngineKind, EngineOptions, Role};
use serde_json::json;

use crate::e2e::cpu;

/// Setup of the run.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// How the engines share requests; all ways one after the other where none is given
    #[arg(long, value_enum)]
    pub dialect: Vec<Way>,
    /// P/D requests of the overhead's measurement, and as many plain pairs; 0 to measure none
    #[arg(long, default_value_t = 2_000)]
    pub requests: u64,
    /// Clients that leave before the end of their answer, for each way; 0 for none
    #[arg(long, default_value_t = 1_000)]
    pub disconnects: u64,
    /// Clients at once
    #[arg(long, default_value_t = 8)]
    pub clients: usize,
    /// Bytes of a prompt
    #[arg(long, default_value_t = 4_000)]
    pub prompt: usize,
    /// Seed of the moments at which clients leave
    #[arg(long, default_value_t = 17)]
    pub seed: u64,
}

/// How two engines share a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Way {
    /// vLLM, the decode engine comes for the blocks
    Pull,
    /// vLLM, the prefill engine brings them
    Push,
    /// SGLang's bootstrap rooms
    Sglang,
    /// TensorRT-LLM, context first
    Trtllm,
}

impl Way {
    fn kind(self) -> EngineKind {
        match self {
            Way::Pull | Way::Push => EngineKind::Vllm,
            Way::Sglang => EngineKind::Sglang,
            Way::Trtllm => EngineKind::Trtllm,
        }
    }
}

/// CPU of a P/D request beyond two plain forwards, at most.
const OVERHEAD_MAX: f64 = 0.30;
/// Time after which both engines have heard of a client that left, at the 99th percentile.
const CANCEL_MAX: Duration = Duration::from_millis(50);

/// Engines and a gateway with a P/D rule and a plain one over them.
struct Setup {
    prefill: Vec<EngineHandle>,
    decode: Vec<EngineHandle>,
    /// Engines without a part, which plain requests are sent to.
    _plain_engines: Vec<EngineHandle>,
    gateway: Child,
    pd: SocketAddr,
    plain: SocketAddr,
}

/// Runs it.
///
/// # Errors
/// Engines or a gateway that do not start or answer.
pub fn main(args: &Args) -> anyhow::Result<ExitCode> {
    if args.clients == 0 {
        bail!("--clients is at least 1");
    }
    let directory = std::env::temp_dir().join(format!("kvlane-pd-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let result = run(args, &directory);
    let _ = std::fs::remove_dir_all(&directory);
    Ok(if result? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn run(args: &Args, directory: &Path) -> anyhow::Result<bool> {
    let all = [Way::Pull, Way::Push, Way::Sglang, Way::Trtllm];
    let ways = if args.dialect.is_empty() { &all[..] } else { &args.dialect };
    println!("{args:?}");
    let mut good = true;
    for way in ways {
        let mut text = String::new();
        if args.requests > 0 {
            good &= overhead(args, *way, directory, &mut text)? <= OVERHEAD_MAX;
        }
        if args.disconnects > 0 {
            good &= cancel::measure(args, *way, directory, &mut text)? <= CANCEL_MAX;
        }
        text.lines().for_each(|line| println!("{way:?}: {line}"));
    }
    Ok(good)
}

fn start(way: Way, directory: &Path, speed: fn(&mut EngineOptions)) -> anyhow::Result<Setup> {
    let side_port = free_ports(1)?[0];
    let engine = |role: Role, place: u8| {
        let mut options = EngineOptions { kind: way.kind(), role, ..EngineOptions::ephemeral() };
        options.nixl_push = way == Way::Push;
        if way == Way::Sglang {
            // Their bootstrap servers share a port.
            (options.host, options.side_port) = (Ipv4Addr::new(127, 0, 0, 2 + place).into(), side_port);
        }
        speed(&mut options);
        Engine::start(&options)
    };
    let prefill = (0..2).map(|place| engine(Role::Prefill, place)).collect::<Result<Vec<_>, _>>()?;
    let decode = (0..2).map(|place| engine(Role::Decode, place)).collect::<Result<Vec<_>, _>>()?;
    let plain_engines = (2..4).map(|place| engine(Role::None, place)).collect::<Result<Vec<_>, _>>()?;
    let ports = free_ports(3)?;
    let (admin, pd, plain) = (ports[0], ports[1], ports[2]);
    let kind = format!("{:?}", way.kind()).to_lowercase();
    let mut config = format!(
        "[admin]\nlisten = \"127.0.0.1:{admin}\"\n\n[shards]\ncores = [0]\n\n[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {pd}\n\
         protocol = \"tcp\"\npd_disagg_mode = true\nkvEngineType = \"{kind}\"\n"
    );
    match way {
        Way::Sglang => writeln!(config, "pdBootstrapPort = {side_port}")?,
        Way::Push => config.push_str("pdNixlPush = true\n"),
        Way::Pull | Way::Trtllm => {}
    }
    let endpoint = |config: &mut String, engine: &EngineHandle, role: u8| {
        let at = engine.http_addr;
        let (ip, port) = (at.ip(), at.port());
        writeln!(config, "[[rule.endpoints]]\nendpointIP = \"{ip}\"\ntargetPort = {port}\nweight = 1\nep_role = {role}")
    };
    for (first, second) in prefill.iter().zip(&decode) {
        endpoint(&mut config, first, 1)?;
        if let Some(side) = first.side_addr().filter(|_| way == Way::Push) {
            writeln!(config, "nixl_port = {}\nnixl_engine_id = \"engine-{side}\"", side.port())?;
        }
        endpoint(&mut config, second, 2)?;
    }
    let rule = format!(
        "\n[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {plain}\nprotocol = \"tcp\"\nkvEngineType = \"{kind}\"\n"
    );
    config.push_str(&rule);
    plain_engines.iter().try_for_each(|engine| endpoint(&mut config, engine, 0))?;
    let file = directory.join(format!("{pd}.toml"));
    std::fs::write(&file, config)?;
    let arguments = ["gateway", "serve", "-c", &file.display().to_string()].map(str::to_owned);
    let gateway = Child::start("gateway", &arguments, &directory.join(format!("{pd}.log")))?;
    let at = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
    let deadline = Instant::now() + Duration::from_secs(20);
    while TcpStream::connect(at(pd)).is_err() {
        if Instant::now() > deadline {
            bail!("the gateway does not listen: {}", std::fs::read_to_string(directory.join(format!("{pd}.log")))?);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(Setup { prefill, decode, _plain_engines: plain_engines, gateway, pd: at(pd), plain: at(plain) })
}

/// A request, which the engines' accounts know by its number.
fn request(number: u64, prompt: usize, tokens: usize, stream: bool) -> Vec<u8> {
    let text = format!("{number} {}", "the lake is deep ".repeat(prompt / 17));
    let body = json!({"prompt": text, "max_tokens": tokens, "stream": stream}).to_string();
    format!(
        "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nX-Mark: {number}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// CPU of the gateway's shard, ns.
fn shard_time(gateway: &Child) -> anyhow::Result<u64> {
    let time = cpu::time_of(gateway.id())?;
    Ok(time.threads.iter().filter(|(name, _)| name.starts_with("shard")).map(|(_, ns)| ns).sum())
}

fn overhead(args: &Args, way: Way, directory: &Path, text: &mut String) -> anyhow::Result<f64> {
    let setup = start(way, directory, |_| ())?;
    // Once unmeasured: connections, buffers and pages are there afterwards.
    for at in [setup.pd, setup.plain] {
        send_all(args, at, 200)?;
    }
    let mut per_request = [0.0_f64; 2];
    for (place, at, count) in [(0, setup.pd, args.requests), (1, setup.plain, 2 * args.requests)] {
        let before = shard_time(&setup.gateway)?;
        send_all(args, at, count)?;
        per_request[place] = (shard_time(&setup.gateway)? - before) as f64 / args.requests as f64 / 1000.0;
    }
    let [pd, plain] = per_request;
    let more = pd / plain - 1.0;
    writeln!(
        text,
        "overhead: {pd:.1} µs of CPU per P/D request, {plain:.1} µs per two plain forwards: {:+.0} % (at most {:.0} %)",
        more * 100.0,
        OVERHEAD_MAX * 100.0
    )?;
    Ok(more)
}

fn send_all(args: &Args, at: SocketAddr, count: u64) -> anyhow::Result<()> {
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..args.clients)
            .map(|_| {
                scope.spawn(|| -> anyhow::Result<()> {
                    let mut stream = TcpStream::connect(at)?;
                    stream.set_nodelay(true)?;
                    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
                    let mut answer = Vec::new();
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= count {
                            return Ok(());
                        }
                        stream.write_all(&request(number, args.prompt, 4, false))?;
                        read_answer(&mut stream, &mut answer)?;
                    }
                })
            })
            .collect();
        clients.into_iter().try_for_each(|client| client.join().map_err(|_| anyhow::anyhow!("a client panicked"))?)
    })
}

/// Reads an answer with a length.
fn read_answer(stream: &mut TcpStream, answer: &mut Vec<u8>) -> anyhow::Result<()> {
    answer.clear();
    let mut part = [0; 16 * 1024];
    loop {
        let count = stream.read(&mut part)?;
        if count == 0 {
            bail!("the gateway ended the connection: {}", String::from_utf8_lossy(answer));
        }
        answer.extend_from_slice(&part[..count]);
        let Some(end) = answer.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
        let head = String::from_utf8_lossy(&answer[..end]).to_lowercase();
        if !head.starts_with("http/1.1 200") {
            bail!("{}", String::from_utf8_lossy(answer));
        }
        let length = head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next());
        let length: usize = length.context("an answer without a length")?.trim().parse()?;
        if answer.len() >= end + 4 + length {
            return Ok(());
        }
    }
}
