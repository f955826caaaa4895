//! The clients: those that send long prompts, and the prober beside them.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use hdrhistogram::Histogram;
use loadgen::workload::Random;

use super::shard::{Shard, histogram};
use crate::e2e::bodies::{CONVERSATIONS, Conversations};

/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two probes of a kind.
const PACE: Duration = Duration::from_micros(500);

/// Lowers the calling thread's priority, and that of threads it starts.
pub fn give_way() {
    // SAFETY: touches no memory; 0 is the calling thread. A refusal leaves the priority as it was.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) };
}

/// A request with the body.
pub fn request(path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}")
        .into_bytes()
}

/// Starts a client that sends the request until it is told to stop; with a number, each time with another mark. Returns
/// how many were answered, and how many not.
pub fn spawn(
    proxy: SocketAddr,
    mut request: Vec<u8>,
    unlike: Option<u64>,
    stop: Arc<AtomicBool>,
) -> JoinHandle<(u64, u64)> {
    std::thread::spawn(move || {
        give_way();
        let (mut done, mut failed) = (0, 0);
        let mut stream = None;
        // Where sixteen digits stand that may be any.
        let mark = request.windows(15).position(|w| w == b"000000000000000");
        while !stop.load(Ordering::Relaxed) {
            if let (Some(number), Some(at)) = (unlike, mark) {
                let digits = format!("{:015}", number * 1_000_000 + done);
                request[at..at + 15].copy_from_slice(digits.as_bytes());
            }
            match exchange(proxy, &mut stream, &request) {
                Ok(()) => done += 1,
                Err(_) => {
                    stream = None;
                    failed += 1;
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        }
        (done, failed)
    })
}

/// Sends a request on the connection, or on a new one, and takes the whole answer.
///
/// # Errors
/// The answer is not 200, or did not come whole.
pub fn exchange(proxy: SocketAddr, kept: &mut Option<TcpStream>, request: &[u8]) -> anyhow::Result<()> {
    let stream = match kept {
        Some(stream) => stream,
        None => kept.insert(connect(proxy)?),
    };
    stream.write_all(request)?;
    let mut answer = Vec::new();
    let mut buffer = [0; 2048];
    loop {
        let read = stream.read(&mut buffer)?;
        answer.extend_from_slice(&buffer[..read]);
        // The engine's answer is a JSON object in one piece.
        if answer.ends_with(b"}}") {
            break;
        }
        if read == 0 {
            bail!("the answer is cut");
        }
    }
    if answer.starts_with(b"HTTP/1.1 200") { Ok(()) } else { bail!("{}", String::from_utf8_lossy(&answer)) }
}

fn connect(address: SocketAddr) -> anyhow::Result<TcpStream> {
    let stream = TcpStream::connect(address).context("the shard refused a connection")?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Latencies of the echo and of small chats, µs.
type Probed = (Histogram<u64>, Histogram<u64>);

/// Probes the echo and the proxy for that long, each from a thread of its own.
pub fn probe(shard: &Shard, small: &Conversations, time: Duration) -> anyhow::Result<Probed> {
    let (echo, proxy) = (shard.echo, shard.proxy);
    let end = Instant::now() + time;
    std::thread::scope(|scope| {
        let echo = scope.spawn(move || {
            let mut stream = connect(echo)?;
            paced(end, || {
                stream.write_all(&[7; 16])?;
                stream.read_exact(&mut [0; 16])?;
                Ok(())
            })
        });
        let mut stream = None;
        let mut random = Random::new(17);
        let small = paced(end, || {
            let request = small.request(random.below(CONVERSATIONS), &mut random);
            exchange(proxy, &mut stream, &request)
        })?;
        let echo = echo.join().map_err(|_| anyhow::anyhow!("the prober panicked"))??;
        Ok((echo, small))
    })
}

fn paced(end: Instant, mut once: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<Histogram<u64>> {
    let mut seen = histogram();
    while Instant::now() < end {
        let start = Instant::now();
        once()?;
        seen.saturating_record(start.elapsed().as_micros().max(1) as u64);
        std::thread::sleep(PACE);
    }
    Ok(seen)
}
