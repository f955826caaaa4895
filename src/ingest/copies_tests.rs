use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

pub(in crate::ingest) const BLOCK: u32 = 4;

/// Events in today's map form, built by hand.
#[derive(Clone, Debug)]
pub(in crate::ingest) struct Wire(Vec<u8>);

impl Wire {
    /// An event that was encoded elsewhere.
    pub(in crate::ingest) fn of(bytes: Vec<u8>) -> Self {
        Wire(bytes)
    }
}

fn text(bytes: &mut Vec<u8>, text: &str) {
    bytes.push(0xa0 | text.len() as u8);
    bytes.extend_from_slice(text.as_bytes());
}

fn keys(bytes: &mut Vec<u8>, keys: &[u64]) {
    bytes.extend_from_slice(&[0xdc, (keys.len() >> 8) as u8, keys.len() as u8]);
    for key in keys {
        bytes.push(0xcf);
        bytes.extend_from_slice(&key.to_be_bytes());
    }
}

/// A store with whatever an engine may say of it.
#[derive(Clone, Debug)]
pub(in crate::ingest) struct Spec<'a> {
    pub(in crate::ingest) keys: &'a [u64],
    pub(in crate::ingest) parent: Option<u64>,
    pub(in crate::ingest) tokens: &'a [u32],
    pub(in crate::ingest) block: u32,
    pub(in crate::ingest) group: u8,
    pub(in crate::ingest) medium: &'a str,
    pub(in crate::ingest) kind: &'a str,
    /// One salt, or none, per block; no list at all for releases before 0.17.
    pub(in crate::ingest) salts: Option<&'a [Option<&'a str>]>,
}

impl Spec<'_> {
    pub(in crate::ingest) fn wire(&self) -> Wire {
        let mut bytes = vec![0x87];
        text(&mut bytes, "type");
        text(&mut bytes, "BlockStored");
        text(&mut bytes, "block_hashes");
        keys(&mut bytes, self.keys);
        text(&mut bytes, "parent_block_hash");
        match self.parent {
            None => bytes.push(0xc0),
            Some(parent) => {
                bytes.push(0xcf);
                bytes.extend_from_slice(&parent.to_be_bytes());
            }
        }
        text(&mut bytes, "token_ids");
        keys(&mut bytes, &self.tokens.iter().map(|token| u64::from(*token)).collect::<Vec<_>>());
        text(&mut bytes, "block_size");
        bytes.push(self.block as u8);
        text(&mut bytes, "group_idx");
        bytes.push(self.group);
        text(&mut bytes, "medium");
        text(&mut bytes, self.medium);
        if !self.kind.is_empty() {
            bytes[0] += 1;
            text(&mut bytes, "kv_cache_spec_kind");
            text(&mut bytes, self.kind);
        }
        if let Some(salts) = self.salts {
            bytes[0] += 1;
            text(&mut bytes, "extra_keys");
            bytes.push(0x90 | salts.len() as u8);
            for salt in salts {
                match salt {
                    None => bytes.push(0xc0),
                    Some(salt) => {
                        bytes.push(0x91);
                        text(&mut bytes, salt);
                    }
                }
            }
        }
        Wire(bytes)
    }
}

fn store_of(stored: &[u64], parent: Option<u64>, group: u8, medium: &str, kind: &str, block: u32) -> Wire {
    let tokens = vec![7; stored.len() * block as usize];
    Spec { keys: stored, parent, tokens: &tokens, block, group, medium, kind, salts: None }.wire()
}

pub(in crate::ingest) fn store(stored: &[u64], parent: Option<u64>) -> Wire {
    store_of(stored, parent, 0, "GPU", "full_attention", BLOCK)
}

fn remove_of(removed: &[u64], group: u8, medium: &str) -> Wire {
    let mut bytes = vec![0x84];
    text(&mut bytes, "type");
    text(&mut bytes, "BlockRemoved");
    text(&mut bytes, "block_hashes");
    keys(&mut bytes, removed);
    text(&mut bytes, "medium");
    text(&mut bytes, medium);
    text(&mut bytes, "group_idx");
    bytes.push(group);
    Wire(bytes)
}

pub(in crate::ingest) fn remove(removed: &[u64]) -> Wire {
    remove_of(removed, 0, "GPU")
}

pub(in crate::ingest) fn cleared() -> Wire {
    Wire(b"\x81\xa4type\xb0AllBlocksCleared".to_vec())
}

fn batch(events: &[Wire]) -> Vec<u8> {
    batch_at(0, events)
}

pub(in crate::ingest) fn batch_at(clock: u64, events: &[Wire]) -> Vec<u8> {
    let mut bytes = vec![0x93, 0xcb];
    bytes.extend_from_slice(&(clock as f64).to_be_bytes());
    bytes.push(0x90 | events.len() as u8);
    events.iter().for_each(|event| bytes.extend_from_slice(&event.0));
    bytes.push(0);
    bytes
}

/// Copies with the holders' sets that their operations build.
struct Bench {
    copies: Copies,
    stats: StreamStats,
    holders: Vec<BTreeSet<u64>>,
    /// What the holders of slower media have, by rank and medium.
    wide: BTreeMap<(usize, Medium), BTreeSet<u64>>,
}

impl Bench {
    fn new(ranks: usize, blocks_max: usize) -> Self {
        Bench {
            copies: Copies::new(ranks, BLOCK, blocks_max, None),
            stats: StreamStats::default(),
            holders: vec![BTreeSet::new(); ranks],
            wide: BTreeMap::new(),
        }
    }

    fn weighing(ranks: usize, cpu: u8, storage: u8) -> Self {
        let bench = Bench::new(ranks, 10_000);
        Bench { copies: bench.copies.weigh(MediumWeights { cpu, storage }), ..bench }
    }

    fn apply(&mut self, rank: usize, events: &[Wire]) {
        let (holder, wide) = (&mut self.holders[rank], &mut self.wide);
        self.copies.apply(rank, &batch(events), &self.stats, &mut |op| match op {
            Op::Store(key) => assert!(holder.insert(key.0), "a store is told once"),
            Op::Follow(_) => {}
            Op::Remove(key) => assert!(holder.remove(&key.0), "a removal is told once, of what is held"),
            Op::Clear | Op::Rekey(_) => {
                holder.clear();
                wide.retain(|(of, _), _| *of != rank);
            }
            Op::Wide { medium, key, held: true } => {
                assert!(wide.entry((rank, medium)).or_default().insert(key.0), "a store is told once");
            }
            Op::Wide { medium, key, held: false } => {
                assert!(wide.get_mut(&(rank, medium)).is_some_and(|held| held.remove(&key.0)), "told once");
            }
        });
        let union: BTreeSet<u64> = self.holders.iter().flatten().copied().collect();
        assert_eq!(self.copies.distinct(), union.len() as u64, "each key once per endpoint");
        for (rank, holder) in self.holders.iter().enumerate() {
            assert_eq!(&self.copies.keys(rank).map(|key| key.0).collect::<BTreeSet<_>>(), holder);
        }
    }

    fn held(&self, rank: usize) -> Vec<u64> {
        self.holders[rank].iter().copied().collect()
    }

    fn count(&self, counter: impl Fn(&StreamStats) -> &std::sync::atomic::AtomicU64) -> u64 {
        counter(&self.stats).load(std::sync::atomic::Ordering::Relaxed)
    }
}

#[test]
fn a_block_stays_until_every_copy_is_gone() {
    let mut bench = Bench::new(1, 100);
    bench.apply(0, &[store(&[1, 2], None)]);
    bench.apply(0, &[store(&[1, 2], None)]);
    bench.apply(0, &[remove(&[2])]);
    assert_eq!(bench.held(0), [1, 2]);
    bench.apply(0, &[remove(&[2]), remove(&[9])]);
    assert_eq!(bench.held(0), [1]);
    assert_eq!((bench.count(|s| &s.duplicates), bench.count(|s| &s.unknown_removals)), (2, 1));
}

#[test]
fn a_prefix_that_is_reported_again_is_no_further_copy() {
    let mut bench = Bench::new(1, 100);
    bench.apply(0, &[store(&[1, 2, 3], None), store(&[4], Some(3))]);
    bench.apply(0, &[store(&[1, 2, 3], None), store(&[4], Some(3))]);
    bench.apply(0, &[remove(&[1, 2, 3])]);
    assert_eq!(bench.held(0), [4], "the prefix was one copy, the recomputed last block two");
    bench.apply(0, &[remove(&[4]), remove(&[4])]);
    assert!(bench.held(0).is_empty());
}

#[test]
fn a_clear_empties_one_rank_and_hides_no_other() {
    let mut bench = Bench::new(3, 100);
    bench.apply(0, &[store(&[1, 2], None)]);
    bench.apply(2, &[store(&[2, 3], None)]);
    assert_eq!(bench.copies.distinct(), 3);
    bench.apply(0, &[cleared(), store(&[5], None)]);
    assert_eq!((bench.held(0), bench.held(2)), (vec![5], vec![2, 3]));
    bench.apply(2, &[cleared(), cleared()]);
    assert_eq!((bench.count(|s| &s.clears), bench.copies.distinct()), (2, 1));
}

#[test]
fn other_media_and_sparse_groups_disturb_nothing() {
    let mut bench = Bench::new(1, 100);
    bench.apply(0, &[store_of(&[1, 2], None, 0, "gpu", "mla_attention", BLOCK)]);
    bench.apply(0, &[store_of(&[1, 3], None, 0, "CPU", "full_attention", BLOCK)]);
    bench.apply(0, &[store_of(&[1, 4], None, 1, "GPU", "sliding_window", BLOCK)]);
    bench.apply(0, &[remove_of(&[1], 0, "CPU"), remove_of(&[1], 1, "GPU"), remove_of(&[1], 0, "STORAGE")]);
    assert_eq!(bench.held(0), [1, 2]);
    bench.apply(0, &[store_of(&[6], None, 0, "GPU", "", BLOCK)]);
    assert_eq!(bench.held(0), [1, 2, 6]);
    assert_eq!((bench.count(|s| &s.other_medium), bench.count(|s| &s.other_group)), (3, 1));
}

/// A store as vLLM's connectors tell it: keys alone.
fn offloaded(stored: &[u64], medium: &str) -> Wire {
    Spec { keys: stored, parent: None, tokens: &[], block: 0, group: 0, medium, kind: "", salts: None }.wire()
}

#[test]
fn blocks_in_slower_media_are_kept_apart_and_only_where_they_have_weight() {
    let of = |bench: &Bench, medium| bench.wide.get(&(0, medium)).map(|held| held.iter().copied().collect::<Vec<_>>());
    let mut bench = Bench::weighing(2, 50, 0);
    bench.apply(0, &[store(&[1, 2, 3], None)]);
    assert_eq!(bench.wide.len(), 0, "a rank without slower media has one holder");
    bench.apply(0, &[offloaded(&[1, 2, 3], "CPU"), offloaded(&[1], "STORAGE"), offloaded(&[1], "a tape")]);
    bench.apply(0, &[remove(&[3]), store(&[4], Some(3))]);
    assert_eq!(bench.held(0), [1, 2, 4]);
    assert_eq!(of(&bench, Medium::Cpu), Some(vec![1, 2, 3, 4]), "what lies in the host's memory or nearer");
    assert_eq!((of(&bench, Medium::Storage), bench.count(|s| &s.other_medium)), (None, 2));
    bench.apply(0, &[remove_of(&[2, 3], 0, "cpu_pinned"), remove(&[1])]);
    assert_eq!((bench.held(0), of(&bench, Medium::Cpu)), (vec![2, 4], Some(vec![1, 2, 4])));
    bench.apply(1, &[store(&[9], None)]);
    assert_eq!(bench.wide.len(), 1, "ranks are apart");
    bench.apply(0, &[cleared(), store(&[5], None)]);
    assert_eq!((bench.held(0), of(&bench, Medium::Cpu)), (vec![5], None));

    let mut bench = Bench::weighing(1, 80, 20);
    bench.apply(0, &[offloaded(&[1], "FS"), offloaded(&[2], "CPU"), store(&[3], None)]);
    assert_eq!(bench.held(0), [3]);
    assert_eq!(of(&bench, Medium::Cpu), Some(vec![2, 3]));
    assert_eq!(of(&bench, Medium::Storage), Some(vec![1, 2, 3]));
}

#[test]
fn a_key_in_two_attention_groups_is_held_until_both_let_go() {
    let mut bench = Bench::new(1, 100);
    bench.apply(0, &[store_of(&[1], None, 0, "GPU", "full_attention", BLOCK)]);
    bench.apply(0, &[store_of(&[1], None, 3, "GPU", "full_attention", BLOCK), remove_of(&[1], 0, "GPU")]);
    assert_eq!(bench.held(0), [1]);
    bench.apply(0, &[remove_of(&[1], 3, "GPU")]);
    assert!(bench.held(0).is_empty());
    for group in 0..=GROUPS_MAX as u8 {
        bench.apply(0, &[store_of(&[u64::from(group)], None, group, "GPU", "full_attention", BLOCK)]);
    }
    assert_eq!(bench.stats.rejects[Reject::Group as usize].load(std::sync::atomic::Ordering::Relaxed), 1);
}

#[test]
fn blocks_of_another_size_do_not_enter_and_are_reported() {
    let mut bench = Bench::new(1, 100);
    bench.apply(0, &[store_of(&[1], None, 0, "GPU", "full_attention", 2 * BLOCK)]);
    assert!(bench.held(0).is_empty());
    assert_eq!(bench.count(|s| &s.block_size_mismatches), 1);
    assert_eq!(bench.stats.engine_block_tokens.load(std::sync::atomic::Ordering::Relaxed), 2 * BLOCK);
}

#[test]
fn at_the_bound_the_oldest_blocks_are_withdrawn() {
    let mut bench = Bench::new(1, 5);
    bench.apply(0, &[store(&[1, 2, 3, 4], None), store(&[5, 6, 7], Some(4))]);
    assert_eq!(bench.held(0), [3, 4, 5, 6, 7]);
    assert_eq!(bench.count(|s| &s.evicted), 2);
    bench.apply(0, &[remove(&[1, 3]), store(&[8], Some(7))]);
    assert_eq!(bench.held(0), [4, 5, 6, 7, 8]);
}

#[test]
fn a_payload_that_is_no_batch_changes_nothing() {
    let mut bench = Bench::new(1, 100);
    bench.apply(0, &[store(&[1], None)]);
    bench.copies.apply(0, b"\xc1", &bench.stats, &mut |op| panic!("{op:?}"));
    assert_eq!(bench.stats.rejects[Reject::Batch as usize].load(std::sync::atomic::Ordering::Relaxed), 1);
}

#[test]
fn a_long_stream_is_applied_and_its_rate_printed() {
    const BATCHES: u64 = 4_000;
    let payloads: Vec<_> = (0..BATCHES)
        .map(|batch_number| {
            let keys: Vec<u64> =
                (0..32).map(|key| (batch_number * 32 + key).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
            batch(&[store_of(&keys, Some(1), 0, "GPU", "full_attention", 16)])
        })
        .collect();
    let mut copies = Copies::new(1, 16, 1_000_000, None);
    let stats = StreamStats::default();
    let mut stores = 0;
    let start = std::time::Instant::now();
    for payload in &payloads {
        copies.apply(0, payload, &stats, &mut |op| stores += u64::from(matches!(op, Op::Store(_))));
    }
    let seconds = start.elapsed().as_secs_f64();
    assert_eq!((stores, copies.distinct()), (32 * BATCHES, 32 * BATCHES));
    eprintln!("decode and count: {:.2} M blocks/s (16 tokens each, 9 bytes per token)", stores as f64 / seconds / 1e6);
}

#[derive(Clone, Debug)]
enum Step {
    Store(u8, Vec<u64>),
    Remove(u8, u64),
    Clear,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0_u8..2, prop::collection::vec(0_u64..30, 1..6)).prop_map(|(group, keys)| Step::Store(group, keys)),
        4 => (0_u8..2, 0_u64..30).prop_map(|(group, key)| Step::Remove(group, key)),
        1 => Just(Step::Clear),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Against the obvious model: a map from (rank, group, key) to a number.
    #[test]
    fn any_history_ends_as_a_map_of_copies(steps in prop::collection::vec((0_usize..3, step()), 0..200)) {
        let mut bench = Bench::new(3, 10_000);
        let mut model: BTreeMap<(usize, u8, u64), u32> = BTreeMap::new();
        for (rank, step) in steps {
            match step {
                Step::Store(group, stored) => {
                    stored.iter().for_each(|key| *model.entry((rank, group, *key)).or_insert(0) += 1);
                    bench.apply(rank, &[store_of(&stored, Some(99), group, "GPU", "full_attention", BLOCK)]);
                }
                Step::Remove(group, key) => {
                    if let Some(copies) = model.get_mut(&(rank, group, key)) {
                        *copies = copies.saturating_sub(1);
                    }
                    bench.apply(rank, &[remove_of(&[key], group, "GPU")]);
                }
                Step::Clear => {
                    model.retain(|(of, _, _), _| *of != rank);
                    bench.apply(rank, &[cleared()]);
                }
            }
            for rank in 0..3 {
                let expected: BTreeSet<u64> =
                    model.iter().filter(|((of, _, _), n)| *of == rank && **n > 0).map(|((_, _, key), _)| *key).collect();
                prop_assert_eq!(&bench.holders[rank], &expected);
            }
        }
    }
}
