//! The indexes that are compared, each used as its authors' own benchmarks use it.

use std::sync::Arc;
use std::time::Duration;

use dynamo_kv_router::indexer::ThreadPoolIndexer;
use dynamo_kv_router::protocols::{BlockHashOptions, LocalBlockHash, OverlapScores, RouterEvent, WorkerWithDpRank};
use dynamo_kv_router::zmq_wire::{ZmqEventNormalizer, decode_event_batch};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, SyncIndexer, compute_block_hash_for_seq};
use kv_index::{ChainBlockMap, ContentHash, SequenceHash, StoredBlock, compute_content_hash};
use kvlane::ingest::Verdict;
use shards::ids::{BlockKey, EndpointIndex, HolderIndex, Rank};
use shards::inventory::{self, OPS_PER_PUBLISH_MAX, Options, Reader, Run, Walk, Writer};

use crate::clock;
use crate::feed::Fed;
use crate::fleet::{BLOCK_TOKENS, Fleet, Part};

/// Messages that are made, and not timed, before they are applied, and timed.
const AHEAD: usize = 1_024;

/// CPU time of filling an index.
#[derive(Clone, Copy, Debug, Default)]
pub struct Filled {
    /// From the engines' frames; none where the crate leaves decoding to others.
    pub whole: Option<Duration>,
    /// From what decoding yields.
    pub index_only: Option<Duration>,
}

/// From a prompt to the caches that hold its beginning.
pub trait Index: Sized {
    const NAME: &'static str;
    /// What a prompt is asked for by.
    type Query;

    /// An index of all that the fleet holds.
    fn filled(fleet: &Fleet) -> anyhow::Result<(Self, Filled)>;
    fn query(&self, fleet: &Fleet, chain: u32) -> Self::Query;
    /// Appends (cache, blocks held from the first on) of every cache that holds the first block.
    fn runs(&mut self, query: &Self::Query, runs: &mut Vec<(u32, u32)>);
}

/// kvlane from the frames to the published inventory, copy counts included.
pub struct WholeIngest {
    /// Keeps what is read.
    _fed: Fed,
    reader: Reader,
    walk: Walk,
}

impl Index for WholeIngest {
    const NAME: &'static str = "kvlane ingest";
    type Query = Vec<BlockKey>;

    fn filled(fleet: &Fleet) -> anyhow::Result<(Self, Filled)> {
        let mut fed = Fed::new(&fleet.shape, fleet.chains() * fleet.shape.chain_blocks);
        let took = fed.fill(fleet);
        anyhow::ensure!(fed.check(Verdict::Exact)? == fleet.pairs() as u64, "not all pairs are held");
        let reader = fed.readers().reader();
        let filled = Filled { whole: Some(took.cpu), index_only: None };
        Ok((WholeIngest { _fed: fed, reader, walk: Walk::default() }, filled))
    }

    fn query(&self, fleet: &Fleet, chain: u32) -> Self::Query {
        fleet.keys(chain).to_vec()
    }

    fn runs(&mut self, query: &Self::Query, runs: &mut Vec<(u32, u32)>) {
        walk(&self.reader, &mut self.walk, query, runs);
    }
}

fn walk(reader: &Reader, walk: &mut Walk, keys: &[BlockKey], runs: &mut Vec<(u32, u32)>) {
    let Some(guard) = reader.enter() else { return };
    walk.restart();
    guard.advance(walk, keys);
    runs.extend(walk.runs(&guard).map(|run| (u32::from(run.endpoint.0), run.blocks)));
}

/// kvlane's inventory alone.
pub struct Inventory {
    /// None where another thread has it.
    pub writer: Option<Writer>,
    reader: Reader,
    walk: Walk,
}

impl Inventory {
    /// Appends the runs of a prompt's holders.
    pub fn walk(&mut self, keys: &[BlockKey], runs: &mut Vec<Run>) {
        let Some(guard) = self.reader.enter() else { return };
        self.walk.restart();
        guard.advance(&mut self.walk, keys);
        runs.extend(self.walk.runs(&guard));
    }
}

impl Index for Inventory {
    const NAME: &'static str = "kvlane inventory alone";
    type Query = Vec<BlockKey>;

    fn filled(fleet: &Fleet) -> anyhow::Result<(Self, Filled)> {
        let options = Options { blocks_expected: fleet.chains() * fleet.shape.chain_blocks };
        let (mut writer, readers) = inventory::new(&options);
        for endpoint in 0..fleet.shape.endpoints {
            let holder = writer.add_holder(EndpointIndex(endpoint), Rank(0));
            anyhow::ensure!(holder == Some(HolderIndex(endpoint)), "slots are given in order");
        }
        let start = clock::thread_cpu();
        for part in &fleet.parts {
            writer.follow(None);
            for key in &fleet.keys(part.chain)[..usize::from(part.blocks)] {
                writer.store(*key, HolderIndex(part.endpoint));
            }
            while writer.pending() >= OPS_PER_PUBLISH_MAX {
                anyhow::ensure!(writer.try_publish(), "nobody reads");
            }
        }
        while writer.pending() > 0 {
            anyhow::ensure!(writer.try_publish(), "nobody reads");
        }
        let filled = Filled { whole: None, index_only: Some(clock::thread_cpu() - start) };
        Ok((Inventory { writer: Some(writer), reader: readers.reader(), walk: Walk::default() }, filled))
    }

    fn query(&self, fleet: &Fleet, chain: u32) -> Self::Query {
        fleet.keys(chain).to_vec()
    }

    fn runs(&mut self, query: &Self::Query, runs: &mut Vec<(u32, u32)>) {
        walk(&self.reader, &mut self.walk, query, runs);
    }
}

/// SMG's index. Its crate has no decoder; hashing the tokens is its caller's part and counted as such.
pub struct ChainIndex {
    index: Arc<kv_index::ChainIndex>,
    /// What its caller keeps per cache, for removals.
    maps: Vec<ChainBlockMap>,
    /// Caches by their numbers in the index, and the other way round.
    caches: Vec<u32>,
    workers: Vec<u32>,
}

impl ChainIndex {
    /// The index, for another thread.
    pub fn shared(&self) -> Arc<kv_index::ChainIndex> {
        Arc::clone(&self.index)
    }

    /// Its numbers of the caches.
    pub fn workers(&self) -> Vec<u32> {
        self.workers.clone()
    }

    /// What is needed to change it, for whoever does.
    pub fn take_maps(&mut self) -> Vec<ChainBlockMap> {
        std::mem::take(&mut self.maps)
    }
}

impl Index for ChainIndex {
    const NAME: &'static str = "kv-index 2.0.0";
    type Query = Vec<ContentHash>;

    fn filled(fleet: &Fleet) -> anyhow::Result<(Self, Filled)> {
        let index = kv_index::ChainIndex::with_max_workers(usize::from(fleet.shape.endpoints).max(1_024));
        let mut maps: Vec<_> = (0..fleet.shape.endpoints).map(|_| ChainBlockMap::new()).collect();
        let workers: Vec<u32> = (0..fleet.shape.endpoints)
            .map(|endpoint| index.intern_worker(&format!("http://10.0.0.{endpoint}:8000")))
            .collect::<Result<_, _>>()?;
        let mut index_only = Duration::ZERO;
        for ahead in fleet.parts.chunks(AHEAD) {
            let stores: Vec<(&Part, Vec<StoredBlock>)> =
                ahead.iter().map(|part| (part, stored_blocks(fleet, part))).collect();
            let start = clock::thread_cpu();
            for (part, blocks) in &stores {
                let cache = usize::from(part.endpoint);
                index.apply_stored(workers[cache], blocks, None, &mut maps[cache])?;
            }
            index_only += clock::thread_cpu() - start;
        }
        let mut caches = vec![0; workers.iter().max().map_or(0, |last| *last as usize + 1)];
        workers.iter().enumerate().for_each(|(cache, worker)| caches[*worker as usize] = cache as u32);
        let index = Arc::new(index);
        Ok((ChainIndex { index, maps, caches, workers }, Filled { whole: None, index_only: Some(index_only) }))
    }

    fn query(&self, fleet: &Fleet, chain: u32) -> Self::Query {
        let mut tokens = Vec::new();
        fleet.tokens(chain, &mut tokens);
        tokens.chunks_exact(BLOCK_TOKENS).map(compute_content_hash).collect()
    }

    fn runs(&mut self, query: &Self::Query, runs: &mut Vec<(u32, u32)>) {
        let caches = &self.caches;
        self.index.score_into(
            query,
            |content| content.0,
            false,
            |worker, blocks| {
                runs.push((caches[worker as usize], blocks));
            },
        );
    }
}

/// A cache's part of a chain as the index takes it.
pub fn stored_blocks(fleet: &Fleet, part: &Part) -> Vec<StoredBlock> {
    let mut tokens = Vec::new();
    fleet.tokens(part.chain, &mut tokens);
    let keys = &fleet.keys(part.chain)[..usize::from(part.blocks)];
    let blocks = keys.iter().zip(tokens.chunks_exact(BLOCK_TOKENS));
    blocks
        .map(|(key, tokens)| StoredBlock { seq_hash: SequenceHash(key.0), content_hash: compute_content_hash(tokens) })
        .collect()
}

/// Dynamo's compressed radix tree, behind its own decoder and a pool of one thread.
pub struct CompressedTree(Arc<ThreadPoolIndexer<ConcurrentRadixTreeCompressed>>);

impl CompressedTree {
    /// The indexer, for another thread.
    pub fn shared(&self) -> Arc<ThreadPoolIndexer<ConcurrentRadixTreeCompressed>> {
        Arc::clone(&self.0)
    }

    /// Who holds how much of a prompt.
    pub fn matches(&self, query: &[LocalBlockHash]) -> OverlapScores {
        self.0.backend().find_matches(query, false)
    }
}

impl Index for CompressedTree {
    const NAME: &'static str = "dynamo-kv-router 1.6.1";
    type Query = Vec<LocalBlockHash>;

    fn filled(fleet: &Fleet) -> anyhow::Result<(Self, Filled)> {
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let pool = ThreadPoolIndexer::new(ConcurrentRadixTreeCompressed::new(), 1, BLOCK_TOKENS as u32);
        let mut normalizers: Vec<_> =
            (0..fleet.shape.endpoints).map(|_| ZmqEventNormalizer::new(BLOCK_TOKENS as u32)).collect();
        let (mut decoding, mut applying) = (Duration::ZERO, Duration::ZERO);
        let mut event_id = 0;
        for ahead in fleet.parts.chunks(AHEAD) {
            let payloads: Vec<_> = ahead.iter().map(|part| (part, fleet.store(part))).collect();
            let mut events: Vec<RouterEvent> = Vec::with_capacity(payloads.len());
            let start = clock::thread_cpu();
            for (part, payload) in &payloads {
                let worker = WorkerWithDpRank::new(part.endpoint.into(), 0);
                for raw in decode_event_batch(payload)?.events {
                    event_id += 1;
                    let event = normalizers[usize::from(part.endpoint)].normalize(raw, event_id, worker);
                    events.extend(event.and_then(|event| event.into_router_event()));
                }
            }
            decoding += clock::thread_cpu() - start;
            anyhow::ensure!(events.len() == payloads.len(), "the decoder leaves events out");
            let (all, own) = (process_cpu(), clock::thread_cpu());
            events.into_iter().try_for_each(|event| pool.enqueue_event(event))?;
            runtime.block_on(pool.flush_and_wait())?;
            // The pool's thread alone: handing over is this thread's.
            applying += (process_cpu() - all).saturating_sub(clock::thread_cpu() - own);
        }
        let filled = Filled { whole: Some(decoding + applying), index_only: Some(applying) };
        Ok((CompressedTree(Arc::new(pool)), filled))
    }

    fn query(&self, fleet: &Fleet, chain: u32) -> Self::Query {
        let mut tokens = Vec::new();
        fleet.tokens(chain, &mut tokens);
        compute_block_hash_for_seq(&tokens, BLOCK_TOKENS as u32, BlockHashOptions::default())
    }

    fn runs(&mut self, query: &Self::Query, runs: &mut Vec<(u32, u32)>) {
        let found = self.matches(query);
        runs.extend(found.scores.iter().map(|(worker, blocks)| (worker.worker_id as u32, *blocks)));
    }
}

/// CPU time of all threads of the process.
fn process_cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a live, writable timespec; the clock exists on every Linux, so the call succeeds.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
