//! Histories of engines that make their keys in several ways, against a model that knows what each holds.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;

use proptest::prelude::*;
use shards::block::vllm::{Algorithm, Tagging};
use shards::block::{Chain, Contract, KeyStream, NoneHash, PromptExtras};
use shards::inventory::Space;

use super::super::calibrate::Believed;
use super::super::copies::tests::{Spec, Wire, batch_at, cleared, remove};
use super::super::copies::{Copies, Keying, Op};
use super::super::status::StreamStats;
use super::*;

/// The rule's block size.
const RULE_BLOCK: u32 = 4;
const RANKS: usize = 3;

/// A block by the choices that led to it: one per block from the first on.
type Path = Vec<u8>;

fn tokens(path: &[u8], size: u32) -> Vec<u32> {
    let block =
        |place: usize, choice: u8| (0..size).map(move |token| token + 100 * place as u32 + 10_000 * u32::from(choice));
    path.iter().enumerate().flat_map(|(place, choice)| block(place, *choice)).collect()
}

fn own_key(path: &[u8], size: u32) -> u64 {
    let mut chain = DerivedChain::root();
    tokens(path, size).chunks_exact(size as usize).map(|block| chain.push(block).0).last().expect("a block")
}

/// How an engine makes its keys.
#[derive(Clone, Debug)]
struct Manner {
    seed: String,
    algorithm: Algorithm,
    block: u32,
}

impl Manner {
    fn is_the_rules(&self) -> bool {
        self.seed == "0" && self.algorithm == Algorithm::Sha256Cbor && self.block == RULE_BLOCK
    }

    fn key(&self, path: &[u8]) -> u64 {
        let mut chain = Chain::new(self.algorithm, &NoneHash::from_seed(self.algorithm, &self.seed));
        let tokens = tokens(path, self.block);
        tokens.chunks_exact(self.block as usize).map(|block| chain.push(block).0).last().expect("a block")
    }
}

fn manner() -> impl Strategy<Value = Manner> {
    let seed = prop_oneof![3 => Just("0"), 1 => Just("42"), 1 => Just("nobody guesses this")];
    let algorithm = prop_oneof![3 => Just(Algorithm::Sha256Cbor), 1 => Just(Algorithm::Xxhash)];
    let block = prop_oneof![3 => Just(RULE_BLOCK), 1 => Just(8_u32), 1 => Just(3)];
    (seed, algorithm, block).prop_map(|(seed, algorithm, block)| Manner { seed: seed.to_owned(), algorithm, block })
}

#[derive(Clone, Debug)]
enum Fate {
    /// A prompt is computed: what the engine does not hold, from the first missing block on, is stored.
    Prompt(Path),
    /// One copy of some block is evicted.
    Evict(prop::sample::Index),
    Clear,
    /// Another process, of another manner perhaps, of whose first events so many are never seen.
    Restart(Manner, usize),
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        8 => prop::collection::vec(0_u8..3, 1..6).prop_map(Fate::Prompt),
        5 => any::<prop::sample::Index>().prop_map(Fate::Evict),
        1 => Just(Fate::Clear),
        1 => (manner(), prop_oneof![3 => Just(0_usize), 1 => 1..6_usize]).prop_map(|(m, n)| Fate::Restart(m, n)),
    ]
}

/// An engine and what is known of it by its events.
struct Engine {
    manner: Manner,
    /// Copies it holds.
    held: BTreeMap<Path, u32>,
    /// Copies that were announced to us and not withdrawn.
    told: BTreeMap<Path, u32>,
    /// Of these, copies whose whole prefix had been announced when they were.
    rooted: BTreeMap<Path, u32>,
    /// Events still to be missed.
    missed: usize,
    /// Its keys are counted by the rule.
    by_rule: bool,
    /// Block size of the blocks that enter.
    entering: u32,
}

fn take(copies: &mut BTreeMap<Path, u32>, path: &Path) {
    if let Some(count) = copies.get_mut(path) {
        *count -= 1;
        if *count == 0 {
            copies.remove(path);
        }
    }
}

impl Engine {
    fn new(manner: Manner) -> Self {
        let (held, told, rooted) = Default::default();
        Engine { manner, held, told, rooted, missed: 0, by_rule: true, entering: RULE_BLOCK }
    }

    fn restart(&mut self, manner: Manner, missed: usize) {
        let (by_rule, entering) = (self.by_rule, self.entering);
        *self = Engine { missed, by_rule, entering, ..Engine::new(manner) };
    }

    /// Whether an event gets through.
    fn gets_through(&mut self) -> bool {
        let through = self.missed == 0;
        self.missed = self.missed.saturating_sub(1);
        through
    }

    fn prompt(&mut self, path: &Path) -> Option<Wire> {
        let prefixes: Vec<Path> = (1..=path.len()).map(|n| path[..n].to_vec()).collect();
        let first = prefixes.iter().position(|prefix| !self.held.contains_key(prefix))?;
        for prefix in &prefixes[first..] {
            *self.held.entry(prefix.clone()).or_insert(0) += 1;
        }
        let manner = &self.manner;
        let keys: Vec<u64> = prefixes[first..].iter().map(|prefix| manner.key(prefix)).collect();
        let parent = first.checked_sub(1).map(|last| manner.key(&prefixes[last]));
        let all = tokens(path, manner.block);
        let tokens = &all[first * manner.block as usize..];
        let salts = vec![None; keys.len()];
        let (block, group, medium, kind) = (manner.block, 0, "GPU", "full_attention");
        let wire = Spec { keys: &keys, parent, tokens, block, group, medium, kind, salts: Some(&salts) }.wire();
        if !self.gets_through() {
            return None;
        }
        if first == 0 {
            self.by_rule = self.manner.is_the_rules();
            if self.entering != self.manner.block {
                // What had entered had other blocks.
                self.told.clear();
                self.rooted.clear();
            }
            self.entering = self.manner.block;
            if !self.by_rule {
                self.told = self.rooted.clone();
            }
        }
        if self.manner.block == self.entering {
            let rooted = first == 0 || self.rooted.contains_key(&prefixes[first - 1]);
            for prefix in &prefixes[first..] {
                if rooted {
                    *self.rooted.entry(prefix.clone()).or_insert(0) += 1;
                }
                if rooted || self.by_rule {
                    *self.told.entry(prefix.clone()).or_insert(0) += 1;
                }
            }
        }
        Some(wire)
    }

    fn evict(&mut self, which: prop::sample::Index) -> Option<Wire> {
        if self.held.is_empty() {
            return None;
        }
        let paths: Vec<Path> = self.held.keys().cloned().collect();
        let path = which.get(&paths);
        take(&mut self.held, path);
        if !self.gets_through() {
            return None;
        }
        take(&mut self.told, path);
        take(&mut self.rooted, path);
        Some(remove(&[self.manner.key(path)]))
    }

    fn clear(&mut self) -> Option<Wire> {
        self.held.clear();
        if !self.gets_through() {
            return None;
        }
        self.told.clear();
        self.rooted.clear();
        Some(cleared())
    }

    /// What its holder must have: keys of the one kind or of the other.
    fn expected(&self) -> BTreeSet<u64> {
        let key = |path: &Path| if self.by_rule { self.manner.key(path) } else { own_key(path, self.manner.block) };
        self.told.keys().map(key).collect()
    }
}

struct Run {
    engines: Vec<Engine>,
    copies: Copies,
    holders: Vec<BTreeSet<u64>>,
    keyings: Vec<Keying>,
    clock: u64,
}

impl Run {
    fn new(manners: Vec<Manner>) -> Self {
        let believed = Believed::Vllm {
            algorithm: Algorithm::Sha256Cbor,
            algorithm_given: true,
            seed: "0".to_owned(),
            tagging: Tagging::Tagged,
        };
        Run {
            engines: manners.into_iter().map(Engine::new).collect(),
            copies: Copies::new(RANKS, RULE_BLOCK, 10_000, Some(&Arc::new(believed))),
            holders: vec![BTreeSet::new(); RANKS],
            keyings: vec![Keying::Rule; RANKS],
            clock: 0,
        }
    }

    fn meet(&mut self, rank: usize, fate: Fate) {
        self.clock += 1;
        let Run { engines, copies, holders, keyings, clock } = self;
        let (engine, holder, keying) = (&mut engines[rank], &mut holders[rank], &mut keyings[rank]);
        let mut op = |op| match op {
            Op::Store(key) => assert!(holder.insert(key.0), "a store is told once"),
            Op::Follow(_) => {}
            Op::Remove(key) => assert!(holder.remove(&key.0), "a removal is told once"),
            Op::Clear => holder.clear(),
            Op::Wide { .. } => panic!("slower media have no weight here"),
            Op::Rekey(new) => {
                holder.clear();
                *keying = new;
            }
        };
        let stats = StreamStats::default();
        let event = match fate {
            Fate::Prompt(path) => engine.prompt(&path),
            Fate::Evict(which) => engine.evict(which),
            Fate::Clear => engine.clear(),
            Fate::Restart(manner, missed) => {
                engine.restart(manner, missed);
                copies.verify_again(rank);
                copies.clear(rank, &stats, &mut op);
                None
            }
        };
        if let Some(event) = event {
            copies.apply(rank, &batch_at(*clock, &[event]), &stats, &mut op);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(3_000) })]

    #[test]
    fn any_history_of_engines_of_any_manner_ends_as_what_was_announced_of_them(
        manners in prop::collection::vec(manner(), RANKS),
        fates in prop::collection::vec((0..RANKS, fate()), 0..80),
    ) {
        let mut run = Run::new(manners);
        for (rank, fate) in fates {
            run.meet(rank, fate);
            let engine = &run.engines[rank];
            prop_assert_eq!(&run.holders[rank], &engine.expected(), "rank {}", rank);
            let derived = Keying::Space(Space {
                contract: Contract::Derived,
                block_tokens: NonZeroU32::new(engine.entering).expect("above 0"),
            });
            prop_assert_eq!(run.keyings[rank], if engine.by_rule { Keying::Rule } else { derived });
        }
        let union: BTreeSet<u64> = run.holders.iter().flatten().copied().collect();
        prop_assert_eq!(run.copies.distinct(), union.len() as u64);
    }
}

#[test]
fn two_engines_with_random_seeds_have_equal_own_keys_for_equal_prompts() {
    let manner = |seed: &str| Manner { seed: seed.to_owned(), algorithm: Algorithm::Sha256, block: RULE_BLOCK };
    let mut run = Run::new(vec![manner("one secret"), manner("another"), manner("a third")]);
    run.meet(0, Fate::Prompt(vec![1, 2, 0]));
    run.meet(1, Fate::Prompt(vec![1, 2, 1]));
    assert_eq!(run.holders[0].intersection(&run.holders[1]).count(), 2, "two blocks in common");
    assert_eq!(run.copies.distinct(), 4);
}

#[test]
fn a_map_of_blocks_that_come_and_go_for_ever_stays_small() {
    let mut own = OwnKeys::default();
    let mut keys = Vec::new();
    for round in 0..20_000_u64 {
        let tokens = [round as u32; RULE_BLOCK as usize];
        let (block, group, medium, kind) = (RULE_BLOCK, 0, "GPU", "");
        let wire = Spec { keys: &[round], parent: None, tokens: &tokens, block, group, medium, kind, salts: None };
        let payload = batch_at(0, &[wire.wire()]);
        let event = super::super::events::Batch::open(&payload).expect("a batch").next().expect("an event");
        let Ok(super::super::events::Event::Stored(stored)) = event else { panic!("a store was built") };
        own.derive(&stored, &mut keys).expect("all is said");
        // None of them is held any more.
        own.sweep(0, |_, _| false);
        assert!(own.own.len() <= SWEEP_MIN + 1);
    }
}

#[test]
fn a_block_that_is_more_than_its_tokens_has_another_key_and_so_has_what_follows() {
    let tokens = [7; 2 * RULE_BLOCK as usize];
    let derive = |salts: &[Option<&str>]| {
        let (block, group, medium, kind, salts) = (RULE_BLOCK, 0, "GPU", "", Some(salts));
        let wire = Spec { keys: &[1, 2], parent: None, tokens: &tokens, block, group, medium, kind, salts }.wire();
        let payload = batch_at(0, &[wire]);
        let event = super::super::events::Batch::open(&payload).expect("a batch").next().expect("an event");
        let Ok(super::super::events::Event::Stored(stored)) = event else { panic!("a store was built") };
        let mut keys = Vec::new();
        OwnKeys::default().derive(&stored, &mut keys).expect("all is said");
        keys
    };
    let prompt = |salt: Option<&str>| {
        let extras = PromptExtras { cache_salt: salt.map(str::to_owned), ..PromptExtras::default() };
        let size = NonZeroU32::new(RULE_BLOCK).expect("above 0");
        let mut stream = KeyStream::new(&Contract::Derived, &extras, size).expect("own keys know salts");
        let mut rest = &tokens[..];
        std::iter::from_fn(|| stream.next_key(&mut rest)).collect::<Vec<_>>()
    };
    let (plain, salted, other) = (derive(&[None, None]), derive(&[Some("a"), None]), derive(&[Some("b"), None]));
    assert_eq!([prompt(None), prompt(Some("a")), prompt(Some("b"))], [&plain, &salted, &other].map(Clone::clone));
    for (left, right) in [(&plain, &salted), (&plain, &other), (&salted, &other)] {
        assert!(left[0] != right[0] && left[1] != right[1]);
    }
}
