//! The engines' end of the streams, in a process of its own: thousands of PUB sockets, and a clock.
//!
//! Standard output first carries the sockets' ports, two bytes each, little-endian; afterwards a [`Sent`] for every
//! message, written just before the message is sent. Standard input carries one [`Order`] a line; its end ends the process.

use std::io::{self, BufRead, Write};
use std::time::Duration;

use shards::block::{Chain, HashAlgo, NoneHash};
use shards::ids::BlockKey;

use super::feed::RULE_SEED;
use super::fleet::{self, BLOCK_TOKENS, Rng};
use crate::clock;
use crate::e2e::cpu;

/// A context takes 1,023 sockets at most.
const SOCKETS_PER_CONTEXT: usize = 500;

/// What the child is started with.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// PUB sockets.
    #[arg(long)]
    pub streams: usize,
    /// Core that its threads stay on.
    #[arg(long)]
    pub core: usize,
    /// Seed of the blocks.
    #[arg(long)]
    pub seed: u64,
}

/// Messages to send: so many, so many a second, from streams in turn.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    pub messages: u32,
    pub per_second: u32,
}

impl Order {
    pub fn line(self) -> String {
        format!("{} {}\n", self.messages, self.per_second)
    }

    fn parse(line: &str) -> Option<Self> {
        let (messages, per_second) = line.trim().split_once(' ')?;
        Some(Order { messages: messages.parse().ok()?, per_second: per_second.parse().ok()? })
    }
}

/// One message: the number of its block, and when it was sent.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    pub block: u32,
    pub at: Duration,
}

impl Sent {
    pub const BYTES: usize = 12;

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.block.to_le_bytes());
        bytes[4..].copy_from_slice(&(self.at.as_nanos() as u64).to_le_bytes());
        bytes
    }

    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let (block, at) = bytes.split_first_chunk().expect("twelve bytes begin with four");
        let at = at.first_chunk().expect("twelve bytes less four are eight");
        Sent { block: u32::from_le_bytes(*block), at: Duration::from_nanos(u64::from_le_bytes(*at)) }
    }
}

/// The first block of some prompt, as an engine with the rule's seed keys it.
pub fn block(seed: u64, number: u32, tokens: &mut Vec<u32>) -> BlockKey {
    let mut rng = Rng::new(seed ^ u64::from(number) << 32);
    tokens.clear();
    tokens.extend((0..BLOCK_TOKENS).map(|_| rng.below(128_000) as u32));
    Chain::new(HashAlgo::Sha256Cbor, &NoneHash::from_seed(HashAlgo::Sha256Cbor, RULE_SEED)).push(tokens)
}

/// Opens the sockets and carries out orders until the parent closes the pipe.
pub fn run(args: &Args) -> anyhow::Result<()> {
    cpu::pin(args.core)?;
    let sockets = open(args.streams)?;
    let (mut output, mut next, mut tokens) = (io::stdout().lock(), 0_u32, Vec::new());
    for (_, port) in &sockets {
        output.write_all(&port.to_le_bytes())?;
    }
    output.flush()?;
    for line in io::stdin().lock().lines() {
        let Some(order) = Order::parse(&line?) else { anyhow::bail!("an order is two numbers") };
        let start = clock::since_boot();
        for message in 0..order.messages {
            let due = start + Duration::from_secs(1) * message / order.per_second;
            std::thread::sleep(due.saturating_sub(clock::since_boot()));
            let stream = next as usize % sockets.len();
            let key = block(args.seed, next, &mut tokens);
            let payload = fleet::store(&[key], &tokens, 0);
            let seq = (u64::from(next) / sockets.len() as u64).to_be_bytes();
            output.write_all(&Sent { block: next, at: clock::since_boot() }.to_bytes())?;
            output.flush()?;
            sockets[stream].0.send_multipart([b"kv-events".as_slice(), &seq, &payload], 0)?;
            next += 1;
        }
    }
    Ok(())
}

fn open(streams: usize) -> anyhow::Result<Vec<(zmq::Socket, u16)>> {
    let mut sockets: Vec<(zmq::Socket, u16)> = Vec::with_capacity(streams);
    while sockets.len() < streams {
        let context = zmq::Context::new();
        for _ in sockets.len()..streams.min(sockets.len() + SOCKETS_PER_CONTEXT) {
            let socket = context.socket(zmq::PUB)?;
            socket.set_linger(0)?;
            socket.bind("tcp://127.0.0.1:*")?;
            let address = socket.get_last_endpoint()?.unwrap_or_default();
            let port = address.rsplit(':').next().and_then(|port| port.parse().ok());
            sockets.push((socket, port.ok_or_else(|| anyhow::anyhow!("{address} has no port"))?));
        }
    }
    Ok(sockets)
}
