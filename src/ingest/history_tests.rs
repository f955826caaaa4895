//! Whole histories without I/O: several ranks of one endpoint, each an engine with its own stream, real payloads, one
//! set of copies; against a model that knows what every engine holds.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::copies::tests::{BLOCK, Wire, batch_at, cleared, remove, store};
use super::copies::{Copies, Op};
use super::status::StreamStats;
use super::stream::{Action, Stream};

const RANKS: usize = 3;

/// One rank's engine: the truth.
#[derive(Default)]
struct Engine {
    seq: u64,
    copies: BTreeMap<u64, u32>,
    ring: Vec<(u64, Vec<u8>)>,
    wire: Vec<(u64, Vec<u8>)>,
}

impl Engine {
    fn send(&mut self, clock: u64, event: Wire) {
        let payload = batch_at(clock, &[event]);
        self.ring.push((self.seq, payload.clone()));
        self.wire.push((self.seq, payload));
        self.seq += 1;
    }

    fn held(&self) -> BTreeSet<u64> {
        self.copies.iter().filter(|(_, copies)| **copies > 0).map(|(key, _)| *key).collect()
    }
}

#[derive(Clone, Debug)]
enum Fate {
    Stores(Vec<u64>),
    Removes(prop::sample::Index),
    Clears,
    Delivers(usize),
    Duplicates,
    Drops,
    LosesConnection,
    Restarts,
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        5 => prop::collection::vec(0_u64..16, 1..5).prop_map(Fate::Stores),
        5 => any::<prop::sample::Index>().prop_map(Fate::Removes),
        1 => Just(Fate::Clears),
        6 => (1_usize..5).prop_map(Fate::Delivers),
        1 => Just(Fate::Duplicates),
        1 => Just(Fate::Drops),
        1 => Just(Fate::LosesConnection),
        1 => Just(Fate::Restarts),
    ]
}

struct Run {
    engines: Vec<Engine>,
    streams: Vec<Stream>,
    /// The request under way, and how many there were before it.
    asked: Vec<Option<(u64, usize)>>,
    requests: usize,
    copies: Copies,
    holders: Vec<BTreeSet<u64>>,
    clock: u64,
}

impl Run {
    fn new() -> Self {
        let mut run = Run {
            engines: (0..RANKS).map(|_| Engine::default()).collect(),
            streams: (0..RANKS).map(|_| Stream::new(true)).collect(),
            asked: vec![None; RANKS],
            requests: 0,
            copies: Copies::new(RANKS, BLOCK, 10_000, None),
            holders: vec![BTreeSet::new(); RANKS],
            clock: 0,
        };
        (0..RANKS).for_each(|rank| run.with(rank, |stream, mut act| stream.connected(&mut act)));
        run
    }

    fn with(&mut self, rank: usize, input: impl FnOnce(&mut Stream, &mut dyn FnMut(Action<'_>))) {
        let Run { streams, asked, requests, copies, holders, .. } = self;
        let stats = StreamStats::default();
        let holder = &mut holders[rank];
        let mut op = |op| match op {
            Op::Store(key) => assert!(holder.insert(key.0), "a store is told once"),
            Op::Remove(key) => assert!(holder.remove(&key.0), "a removal is told once"),
            Op::Clear | Op::Rekey(_) => holder.clear(),
        };
        input(&mut streams[rank], &mut |action| match action {
            Action::Apply(_, payload) => copies.apply(rank, payload, &stats, &mut op),
            Action::Clear => copies.clear(rank, &stats, &mut op),
            Action::Replay(from) => {
                asked[rank] = Some((from, *requests));
                *requests += 1;
            }
            Action::StopReplay => asked[rank] = None,
            Action::Proven => copies.prove(rank),
            Action::Doubt => copies.doubt(rank),
        });
    }

    /// Answers one rank's requests until it has none.
    fn answer(&mut self, rank: usize) {
        for _ in 0..8 {
            let Some((from, number)) = self.asked[rank] else { return };
            let answers: Vec<_> = self.engines[rank].ring.iter().filter(|(seq, _)| *seq >= from).cloned().collect();
            let complete = answers.into_iter().all(|(seq, payload)| {
                self.with(rank, |stream, mut act| stream.replayed(seq, &payload, &mut act));
                self.asked[rank] == Some((from, number))
            });
            if complete {
                self.with(rank, |stream, mut act| stream.replay_ended(&mut act));
            }
        }
        assert_eq!(self.asked[rank], None, "a replay comes to an end");
    }

    fn deliver(&mut self, rank: usize, n: usize) {
        let n = n.min(self.engines[rank].wire.len());
        let messages: Vec<_> = self.engines[rank].wire.drain(..n).collect();
        for (seq, payload) in messages {
            self.with(rank, |stream, mut act| stream.live(seq, &payload, &mut act));
        }
    }

    fn reconnect(&mut self, rank: usize) {
        self.engines[rank].wire.clear();
        self.with(rank, |stream, mut act| stream.lost(&mut act));
        self.with(rank, |stream, mut act| stream.connected(&mut act));
    }

    fn meet(&mut self, rank: usize, fate: Fate) {
        self.clock += 1;
        let (clock, engine) = (self.clock, &mut self.engines[rank]);
        match fate {
            Fate::Stores(keys) => {
                keys.iter().for_each(|key| *engine.copies.entry(*key).or_insert(0) += 1);
                engine.send(clock, store(&keys, Some(99)));
            }
            Fate::Removes(which) => {
                let held: Vec<_> = engine.held().into_iter().collect();
                if !held.is_empty() {
                    let key = *which.get(&held);
                    *engine.copies.entry(key).or_insert(1) -= 1;
                    engine.send(clock, remove(&[key]));
                }
            }
            Fate::Clears => {
                engine.copies.clear();
                engine.send(clock, cleared());
            }
            Fate::Delivers(n) => {
                self.deliver(rank, n);
                self.answer(rank);
            }
            Fate::Duplicates => {
                if let Some(message) = engine.wire.last().cloned() {
                    engine.wire.push(message);
                }
            }
            Fate::Drops => _ = engine.wire.pop(),
            Fate::LosesConnection => self.reconnect(rank),
            Fate::Restarts => {
                *engine = Engine::default();
                self.reconnect(rank);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(5_000) })]

    #[test]
    fn any_history_of_several_ranks_ends_as_what_their_engines_hold(
        fates in prop::collection::vec((0..RANKS, fate()), 0..120)
    ) {
        let mut run = Run::new();
        for (rank, fate) in fates {
            run.meet(rank, fate);
        }
        for rank in 0..RANKS {
            // Everything under way arrives, and one more batch shows any gap that is left.
            run.answer(rank);
            run.deliver(rank, usize::MAX);
            run.meet(rank, Fate::Stores(vec![0]));
            run.deliver(rank, 1);
            run.answer(rank);
            prop_assert_eq!(&run.holders[rank], &run.engines[rank].held(), "rank {}", rank);
            prop_assert!(run.streams[rank].is_eligible());
        }
        let union: BTreeSet<u64> = run.engines.iter().flat_map(Engine::held).collect();
        prop_assert_eq!(run.copies.distinct(), union.len() as u64);
    }
}
