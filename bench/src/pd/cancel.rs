//! Clients that leave: at random moments between the first and the last byte of a request's life, before and after its
//! prefill leg, before and after its answer's first byte, streamed and plain in turn.
//!
//! When an engine heard of it is what its own account says. A leg that was not cancelled counts too, with its end, if that
//! came after its client had left: nobody told its engine in time.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{ErrorKind, Read, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::bail;
use loadgen::engine::{EngineHandle, EngineOptions, LegView};
use loadgen::workload::Random;

use super::{Args, Way, request, start};

/// Tokens of an answer.
const TOKENS: usize = 16;
/// Requests that are let alone, for the length of a life.
const UNDISTURBED: u64 = 64;
/// Of every so many clients that leave one at least finds its request in each phase, or the moments were not random enough.
const SHARE_MIN: usize = 50;
/// How long a leg may go on that nobody waits for, before it counts as left to itself.
const LEFT_TO_ITSELF: Duration = Duration::from_secs(10);

/// A client that left before the end of its answer.
#[derive(Clone, Copy)]
struct Left {
    at: Instant,
    /// Bytes of the answer had come.
    had_bytes: bool,
}

/// When an engine heard of clients that left: by phase, the times since.
#[derive(Default)]
struct Heard {
    prefill: Vec<Duration>,
    decode_before: Vec<Duration>,
    decode_after: Vec<Duration>,
}

/// The slowest phase's 99th percentile.
pub fn measure(args: &Args, way: Way, directory: &Path, text: &mut String) -> anyhow::Result<Duration> {
    // A prompt takes some 30 ms, the first token 15 after it, the others 5 each.
    let speed = |options: &mut EngineOptions| {
        (options.time_scale, options.ttft_floor_ms, options.decode_tps) = (1.0, 15.0, 200.0);
        (options.prefill_tps, options.blocks) = (200_000.0, 65_536);
    };
    let setup = start(way, directory, speed)?;
    let life = life(args, setup.pd)?;
    let numbers = AtomicU64::new(UNDISTURBED);
    let left_so_far = AtomicU64::new(0);
    let left: HashMap<u64, Left> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..args.clients as u64)
            .map(|client| {
                let (numbers, left_so_far) = (&numbers, &left_so_far);
                let random = Random::of(args.seed, client, 0);
                scope.spawn(move || leave(args, setup.pd, life, random, numbers, left_so_far))
            })
            .collect();
        let joined =
            clients.into_iter().map(|client| client.join().map_err(|_| anyhow::anyhow!("a client panicked"))?);
        joined.collect::<anyhow::Result<Vec<_>>>().map(|all| all.into_iter().flatten().collect())
    })?;
    let mut heard = Heard::default();
    for leg in all_legs(&setup.prefill)? {
        heard.prefill.extend(after(&leg, &left).map(|(_, time)| time));
    }
    for leg in all_legs(&setup.decode)? {
        if let Some((left, time)) = after(&leg, &left) {
            if left.had_bytes { &mut heard.decode_after } else { &mut heard.decode_before }.push(time);
        }
    }
    writeln!(text, "cancelling: {} clients left, within {:.0} ms each", left.len(), life.as_secs_f64() * 1e3)?;
    let mut slowest = Duration::ZERO;
    for (phase, times) in [
        ("prefill legs", heard.prefill),
        ("decode legs before the first byte", heard.decode_before),
        ("decode legs after it", heard.decode_after),
    ] {
        slowest = slowest.max(say(text, phase, times, left.len())?);
    }
    Ok(slowest)
}

/// One line of a phase; its 99th percentile.
fn say(text: &mut String, phase: &str, mut times: Vec<Duration>, clients: usize) -> anyhow::Result<Duration> {
    if times.len() * SHARE_MIN < clients {
        bail!("only {} of {clients} clients left while there were {phase}", times.len());
    }
    times.sort_unstable();
    let at = |share: f64| times.get((times.len() as f64 * share) as usize).copied().unwrap_or_default();
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    writeln!(
        text,
        "{} {phase} heard of it after {:.1} ms (p50), {:.1} ms (p99), {:.1} ms (last)",
        times.len(),
        ms(at(0.5)),
        ms(at(0.99)),
        ms(times.last().copied().unwrap_or_default()),
    )?;
    Ok(at(0.99))
}

/// All legs of some engines, once none runs.
fn all_legs(engines: &[EngineHandle]) -> anyhow::Result<Vec<LegView>> {
    let deadline = Instant::now() + LEFT_TO_ITSELF;
    loop {
        let legs: Vec<LegView> = engines.iter().flat_map(EngineHandle::legs).collect();
        let running = legs.iter().filter(|leg| leg.ended.is_none()).count();
        if running == 0 {
            return Ok(legs);
        }
        if Instant::now() > deadline {
            bail!("{running} legs were left to themselves");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The client of a leg and how long after its leaving the leg went on, if it did.
fn after(leg: &LegView, left: &HashMap<u64, Left>) -> Option<(Left, Duration)> {
    let (ended, _) = leg.ended?;
    let left = left.get(&leg.mark.as_deref()?.parse().ok()?)?;
    Some((*left, ended.checked_duration_since(left.at)?))
}

/// How long a request takes that is let alone, beside as many others as there will be: the mean.
fn life(args: &Args, at: SocketAddr) -> anyhow::Result<Duration> {
    let next = AtomicU64::new(0);
    let lives = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..args.clients)
            .map(|_| {
                scope.spawn(|| -> anyhow::Result<Vec<Duration>> {
                    let mut lives = Vec::new();
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= UNDISTURBED {
                            return Ok(lives);
                        }
                        let began = Instant::now();
                        let mut stream = send(args, at, number)?;
                        let mut answer = Vec::new();
                        let mut part = [0; 16 * 1024];
                        while !is_whole(&answer) {
                            match stream.read(&mut part)? {
                                0 => bail!("the gateway ended the connection: {}", String::from_utf8_lossy(&answer)),
                                count => answer.extend_from_slice(&part[..count]),
                            }
                        }
                        lives.push(began.elapsed());
                    }
                })
            })
            .collect();
        let joined =
            clients.into_iter().map(|client| client.join().map_err(|_| anyhow::anyhow!("a client panicked"))?);
        joined.collect::<anyhow::Result<Vec<_>>>()
    })?;
    let lives = lives.concat();
    Ok(lives.iter().sum::<Duration>() / lives.len().max(1) as u32)
}

fn send(args: &Args, at: SocketAddr, number: u64) -> anyhow::Result<TcpStream> {
    let mut stream = TcpStream::connect(at)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    stream.write_all(&request(number, args.prompt, TOKENS, number.is_multiple_of(2)))?;
    Ok(stream)
}

/// Whether an answer has come to its end: a plain one comes in one piece, as far as anybody could tell.
fn is_whole(answer: &[u8]) -> bool {
    let Some(end) = answer.windows(4).position(|window| window == b"\r\n\r\n") else { return false };
    let head = String::from_utf8_lossy(&answer[..end]).to_lowercase();
    match head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next()?.trim().parse::<usize>().ok())
    {
        Some(length) => answer.len() >= end + 4 + length,
        None => answer.ends_with(b"\r\n0\r\n\r\n"),
    }
}

/// Sends requests and leaves each at a random moment of its life, until enough clients have left before its end.
fn leave(
    args: &Args,
    at: SocketAddr,
    life: Duration,
    mut random: Random,
    numbers: &AtomicU64,
    left_so_far: &AtomicU64,
) -> anyhow::Result<Vec<(u64, Left)>> {
    let mut left = Vec::new();
    while left_so_far.load(Ordering::Relaxed) < args.disconnects {
        let number = numbers.fetch_add(1, Ordering::Relaxed);
        let stream = send(args, at, number)?;
        std::thread::sleep(life.mul_f64(random.unit()));
        stream.set_nonblocking(true)?;
        let answer = what_came(&stream)?;
        if is_whole(&answer) {
            continue;
        }
        let had_bytes = !answer.is_empty();
        left.push((number, Left { at: Instant::now(), had_bytes }));
        left_so_far.fetch_add(1, Ordering::Relaxed);
        drop(stream);
    }
    Ok(left)
}

/// What has come so far.
fn what_came(mut stream: &TcpStream) -> anyhow::Result<Vec<u8>> {
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(answer),
        Err(error) => Err(error.into()),
        Ok(_) => bail!("the gateway ended the connection: {}", String::from_utf8_lossy(&answer)),
    }
}
