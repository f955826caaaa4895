//! Look-up and choice of an endpoint while the index changes: what a router does for each prompt.
//!
//! Every crate chooses by what it offers for that: ours by its decision with all defaults of mode 3, `dynamo-kv-router` by
//! its default selector. `kv-index` has none: the most blocks less the load is the least that a choice can be.

use std::collections::{HashMap, HashSet};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, RoutingConstraints, WorkerConfigLike, WorkerId, WorkerWithDpRank,
};
use dynamo_kv_router::scheduling::{OverlapSignals, ScheduleMode};
use dynamo_kv_router::{
    DefaultWorkerSelector, KvRouterConfig, RouterEvent, SchedulingRequest, WorkerLoadProjection, WorkerSelectionInput,
    WorkerSelector, compute_block_hash_for_seq,
};
use hdrhistogram::Histogram;
use kv_index::SequenceHash;
use shards::ids::HolderIndex;
use shards::inventory::Run;

use crate::fleet::{BLOCK_TOKENS, Fleet, Part, Rng};
use crate::index::{ChainIndex, CompressedTree, Index, Inventory, stored_blocks};
use crate::workload::Decider;

/// Blocks that go and come back with each change.
const CHANGED: usize = 8;
/// Changes between two publishes, where an index publishes.
const BATCH: usize = 32;
/// Requests in flight at each endpoint, in the mean.
const LOAD: usize = 4;

/// What changes an index on another thread: the last blocks of each cache's part go, and come back.
pub type Change<'a> = Box<dyn FnMut(&Fleet, &[Part]) -> anyhow::Result<()> + Send + 'a>;

/// What chooses by an index.
pub trait Chooser<I: Index> {
    fn new(fleet: &Fleet, seed: u64) -> Self;
    /// The endpoint for a prompt.
    fn choose(&mut self, index: &mut I, query: &I::Query) -> anyhow::Result<u64>;
}

/// An index that can change while it is asked.
pub trait Changing: Index {
    /// Takes the changing end out of it, once.
    fn changes(&mut self) -> anyhow::Result<Change<'static>>;
}

/// Prints one line.
pub fn row<I: Changing, C: Chooser<I>>(fleet: &Fleet, lookups: u64, seed: u64) -> anyhow::Result<()> {
    let (mut index, _) = I::filled(fleet)?;
    let (mut chooser, mut change) = (C::new(fleet, seed), index.changes()?);
    let done = AtomicBool::new(false);
    let mut histogram = Histogram::<u64>::new_with_bounds(1, 1_000_000_000, 3)?;
    let changed = std::thread::scope(|scope| {
        let churn = scope.spawn(|| -> anyhow::Result<f64> {
            let (mut rng, start, mut blocks) = (Rng::new(seed ^ 0xc4), Instant::now(), 0);
            while !done.load(Ordering::Relaxed) {
                let parts: Vec<Part> = (0..BATCH).map(|_| fleet.parts[rng.below(fleet.parts.len())]).collect();
                change(fleet, &parts)?;
                blocks += parts.iter().map(|part| usize::from(part.blocks).min(CHANGED)).sum::<usize>();
            }
            Ok(blocks as f64 / start.elapsed().as_secs_f64())
        });
        let mut rng = Rng::new(seed ^ 0x10_0c);
        let mut asked = || -> anyhow::Result<()> {
            for _ in 0..lookups {
                let query = index.query(fleet, rng.below(fleet.chains()) as u32);
                let start = Instant::now();
                black_box(chooser.choose(&mut index, &query)?);
                histogram.saturating_record(start.elapsed().as_nanos() as u64);
            }
            Ok(())
        };
        let asked = asked();
        done.store(true, Ordering::Relaxed);
        asked.and(churn.join().expect("the churning thread does not panic"))
    })?;
    let micros = |quantile| histogram.value_at_quantile(quantile) as f64 / 1e3;
    println!("  {:<28}{:>10.2}{:>10.2}{:>22.2}", I::NAME, micros(0.5), micros(0.99), changed / 1e6);
    Ok(())
}

/// Where a part's changed end begins.
fn end(part: &Part) -> usize {
    usize::from(part.blocks).saturating_sub(CHANGED)
}

/// kvlane's decision.
pub struct Ours {
    decider: Decider,
    runs: Vec<Run>,
}

impl Chooser<Inventory> for Ours {
    fn new(fleet: &Fleet, seed: u64) -> Self {
        Ours { decider: Decider::new(fleet.shape.endpoints, 1, seed), runs: Vec::new() }
    }

    fn choose(&mut self, index: &mut Inventory, query: &<Inventory as Index>::Query) -> anyhow::Result<u64> {
        self.runs.clear();
        index.walk(query, &mut self.runs);
        let decision = self.decider.decide(query.len(), &self.runs);
        Ok(decision.ok_or_else(|| anyhow::anyhow!("nobody is chosen"))?.endpoint.0.into())
    }
}

impl Changing for Inventory {
    fn changes(&mut self) -> anyhow::Result<Change<'static>> {
        let mut writer = self.writer.take().ok_or_else(|| anyhow::anyhow!("the writing end is taken once"))?;
        Ok(Box::new(move |fleet, parts| {
            for part in parts {
                let keys = &fleet.keys(part.chain)[..usize::from(part.blocks)];
                let (before, end) = keys.split_at(end(part));
                end.iter().for_each(|key| writer.remove(*key, HolderIndex(part.endpoint)));
                writer.follow(before.last().copied());
                end.iter().for_each(|key| writer.store(*key, HolderIndex(part.endpoint)));
            }
            while writer.pending() > 0 {
                if !writer.try_publish() {
                    std::thread::yield_now();
                }
            }
            Ok(())
        }))
    }
}

/// The most blocks less the load.
pub struct MostLessLoad {
    load: Vec<i64>,
    value: Vec<i64>,
    runs: Vec<(u32, u32)>,
}

impl Chooser<ChainIndex> for MostLessLoad {
    fn new(fleet: &Fleet, seed: u64) -> Self {
        MostLessLoad { load: drawn_loads(fleet, seed), value: Vec::new(), runs: Vec::new() }
    }

    fn choose(&mut self, index: &mut ChainIndex, query: &<ChainIndex as Index>::Query) -> anyhow::Result<u64> {
        self.runs.clear();
        index.runs(query, &mut self.runs);
        self.value.clear();
        self.value.extend(self.load.iter().map(|load| -load));
        self.runs.iter().for_each(|(cache, blocks)| self.value[*cache as usize] += i64::from(*blocks));
        let best = (0..self.value.len()).max_by_key(|cache| self.value[*cache]);
        Ok(best.ok_or_else(|| anyhow::anyhow!("nobody is chosen"))? as u64)
    }
}

fn drawn_loads(fleet: &Fleet, seed: u64) -> Vec<i64> {
    let endpoints = usize::from(fleet.shape.endpoints);
    let (mut load, mut rng) = (vec![0; endpoints], Rng::new(seed ^ 0x10ad));
    (0..endpoints * LOAD).for_each(|_| load[rng.below(endpoints)] += 1);
    load
}

impl Changing for ChainIndex {
    fn changes(&mut self) -> anyhow::Result<Change<'static>> {
        let (index, workers) = (self.shared(), self.workers());
        let mut maps = self.take_maps();
        Ok(Box::new(move |fleet, parts| {
            for part in parts {
                let blocks = stored_blocks(fleet, part);
                let (before, end) = blocks.split_at(end(part));
                let cache = usize::from(part.endpoint);
                let hashes: Vec<SequenceHash> = end.iter().map(|block| block.seq_hash).collect();
                index.apply_removed(workers[cache], &hashes, &mut maps[cache]);
                let parent = before.last().map(|block| block.seq_hash);
                index.apply_stored(workers[cache], end, parent, &mut maps[cache])?;
            }
            Ok(())
        }))
    }
}

/// A worker without anything special.
#[derive(Default)]
struct Worker(HashSet<String>);

impl WorkerConfigLike for Worker {
    fn data_parallel_start_rank(&self) -> u32 {
        0
    }

    fn data_parallel_size(&self) -> u32 {
        1
    }

    fn max_num_batched_tokens(&self) -> Option<u64> {
        None
    }

    fn total_kv_blocks(&self) -> Option<u64> {
        None
    }

    fn taints(&self) -> &HashSet<String> {
        &self.0
    }
}

/// Dynamo's default selector, at temperature 0.
pub struct DefaultSelector {
    workers: HashMap<WorkerId, Worker>,
    selector: DefaultWorkerSelector,
    /// All of it but the overlap is the same for every prompt.
    request: SchedulingRequest,
}

impl Chooser<CompressedTree> for DefaultSelector {
    fn new(fleet: &Fleet, seed: u64) -> Self {
        let loads = drawn_loads(fleet, seed).into_iter().enumerate();
        let loads = loads.map(|(worker, load)| {
            let projection = WorkerLoadProjection { active_requests: load as usize, ..Default::default() };
            (WorkerWithDpRank::from_worker_id(worker as WorkerId), projection)
        });
        let request = SchedulingRequest {
            mode: ScheduleMode::QueryOnly { request_id: None },
            token_seq: None,
            isl_tokens: fleet.shape.chain_blocks * BLOCK_TOKENS,
            lora_name: None,
            expected_output_tokens: None,
            affinity_target: None,
            pinned_worker: None,
            allowed_worker_ids: None,
            routing_constraints: RoutingConstraints::default(),
            router_config_override: None,
            track_prefill_tokens: true,
            priority_jump: 0.0,
            strict_priority: 0,
            policy_class: None,
            session_context: None,
            overlap: OverlapSignals::default(),
            kv_transfer_candidates: None,
            retain_kv_transfer_chain: false,
            shared_cache_hits: None,
            worker_loads: loads.collect(),
            resp_tx: None,
        };
        let config = KvRouterConfig { router_temperature: 0.0, ..Default::default() };
        DefaultSelector {
            workers: (0..fleet.shape.endpoints).map(|worker| (worker.into(), Worker::default())).collect(),
            selector: DefaultWorkerSelector::new(Some(config), "prefill"),
            request,
        }
    }

    fn choose(&mut self, index: &mut CompressedTree, query: &<CompressedTree as Index>::Query) -> anyhow::Result<u64> {
        let overlap = &mut self.request.overlap;
        overlap.effective_overlap_blocks.clear();
        overlap.effective_cached_tokens.clear();
        for (worker, blocks) in &index.matches(query).scores {
            overlap.effective_overlap_blocks.insert(*worker, f64::from(*blocks));
            overlap.effective_cached_tokens.insert(*worker, *blocks as usize * BLOCK_TOKENS);
        }
        let (request, block) = (&self.request, BLOCK_TOKENS as u32);
        let input = WorkerSelectionInput::configured(&self.workers, request, request.eligibility(), block);
        Ok(self.selector.select_worker(input)?.worker.worker_id)
    }
}

impl Changing for CompressedTree {
    fn changes(&mut self) -> anyhow::Result<Change<'static>> {
        let pool = self.shared();
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let mut event_id = 1 << 40;
        Ok(Box::new(move |fleet, parts| {
            for part in parts {
                for data in [removed(fleet, part), stored(fleet, part)] {
                    event_id += 1;
                    let event = KvCacheEvent { event_id, data, dp_rank: 0 };
                    pool.enqueue_event(RouterEvent::new(part.endpoint.into(), event))?;
                }
            }
            Ok(runtime.block_on(pool.flush_and_wait())?)
        }))
    }
}

fn removed(fleet: &Fleet, part: &Part) -> KvCacheEventData {
    let keys = &fleet.keys(part.chain)[end(part)..usize::from(part.blocks)];
    let block_hashes = keys.iter().map(|key| ExternalSequenceBlockHash(key.0)).collect();
    KvCacheEventData::Removed(KvCacheRemoveData { block_hashes })
}

fn stored(fleet: &Fleet, part: &Part) -> KvCacheEventData {
    let mut tokens = Vec::new();
    fleet.tokens(part.chain, &mut tokens);
    let hashes: Vec<LocalBlockHash> = compute_block_hash_for_seq(&tokens, BLOCK_TOKENS as u32, Default::default());
    let keys = &fleet.keys(part.chain)[..usize::from(part.blocks)];
    let blocks = keys.iter().zip(hashes).skip(end(part)).map(|(key, tokens_hash)| KvCacheStoredBlockData {
        block_hash: ExternalSequenceBlockHash(key.0),
        tokens_hash,
        mm_extra_info: None,
    });
    let parent_hash = end(part).checked_sub(1).map(|before| ExternalSequenceBlockHash(keys[before].0));
    KvCacheEventData::Stored(KvCacheStoreData { parent_hash, start_position: None, blocks: blocks.collect() })
}
