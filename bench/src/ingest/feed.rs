//! kvlane's ingest, fed by hand with the frames of a fleet. (`bench/peers` reads this file too.)

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane::ingest::{Believed, Feed, FeedShape, Verdict};
use shards::block::vllm::{Algorithm, Tagging};
use shards::inventory::{self, Options, ReaderFactory};

use super::clock;
use super::fleet::{BLOCK_TOKENS, Fleet, Part, Shape};

/// Messages that an ingest thread takes from a stream before it publishes.
const MESSAGES_PER_PUBLISH: usize = 64;
/// Messages made ahead, outside of what is timed.
const MESSAGES_AHEAD: usize = 1_024;

/// Seed that the rule names.
pub const RULE_SEED: &str = "0";

/// Time that something took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Took {
    pub wall: Duration,
    /// CPU of the one thread that did it.
    pub cpu: Duration,
}

/// An ingest whose rule says vLLM with `sha256_cbor` and [`RULE_SEED`].
pub struct Fed {
    feed: Feed,
    readers: ReaderFactory,
    shape: Shape,
    /// Sequence number of each stream's next message.
    next: Vec<u64>,
}

impl Fed {
    /// Told how many keys will come, as a configured bound tells it.
    pub fn new(shape: &Shape, keys: usize) -> Self {
        let (writer, readers) = inventory::new(&Options { blocks_expected: keys });
        let feed = FeedShape {
            endpoints: shape.endpoints,
            ranks: shape.ranks,
            block_tokens: BLOCK_TOKENS as u32,
            max_blocks_per_endpoint: u32::MAX as usize,
            believed: Some(Arc::new(Believed::Vllm {
                algorithm: Algorithm::Sha256Cbor,
                algorithm_given: true,
                seed: RULE_SEED.to_owned(),
                tagging: Tagging::Tagged,
            })),
        };
        let streams = usize::from(shape.endpoints) * usize::from(shape.ranks);
        Fed { feed: Feed::new(&feed, writer), readers, shape: shape.clone(), next: vec![0; streams] }
    }

    pub fn readers(&self) -> &ReaderFactory {
        &self.readers
    }

    /// Applies payloads, each in a message of its own, and publishes as an ingest thread does.
    pub fn apply(&mut self, messages: &[(Part, Vec<u8>)]) -> Took {
        let (start, cpu) = (Instant::now(), clock::thread_cpu());
        for cycle in messages.chunks(MESSAGES_PER_PUBLISH) {
            for (part, payload) in cycle {
                let stream = usize::from(part.endpoint) * usize::from(self.shape.ranks) + usize::from(part.rank);
                let seq = self.next[stream].to_be_bytes();
                self.next[stream] += 1;
                self.feed.message(part.endpoint, part.rank, &[b"kv-events", &seq, payload]);
            }
            while !self.feed.publish() {
                std::hint::spin_loop();
            }
        }
        Took { wall: start.elapsed(), cpu: clock::thread_cpu() - cpu }
    }

    /// Applies the payload of every part; making them is not timed.
    pub fn apply_all(&mut self, parts: &[Part], payload: impl Fn(&Part) -> Vec<u8>) -> Took {
        let mut took = Took::default();
        for ahead in parts.chunks(MESSAGES_AHEAD) {
            let messages: Vec<_> = ahead.iter().map(|part| (*part, payload(part))).collect();
            let part = self.apply(&messages);
            took.wall += part.wall;
            took.cpu += part.cpu;
        }
        took
    }

    /// Fills the inventory with a fleet.
    pub fn fill(&mut self, fleet: &Fleet) -> Took {
        self.apply_all(&fleet.parts, |part| fleet.store(part))
    }

    /// Entries held over all streams.
    ///
    /// # Errors
    /// If an event was not taken, or a stream with events is not keyed as expected.
    pub fn check(&self, expected: Verdict) -> anyhow::Result<u64> {
        let mut held = 0;
        for endpoint in 0..self.shape.endpoints {
            for rank in 0..self.shape.ranks {
                let status = self.feed.status(endpoint, rank);
                let refused: u64 = status.rejects.iter().map(|(_, count)| count).sum();
                anyhow::ensure!(refused + status.orphans + status.gaps == 0, "events were not taken: {status:?}");
                let verdict = status.finding.map_or(Verdict::Believed, |finding| finding.verdict);
                anyhow::ensure!(status.batches == 0 || verdict == expected, "a stream is {verdict:?}");
                held += status.held;
            }
        }
        Ok(held)
    }
}
