//! What a user of the scheduler may rely on.

use super::*;
use crate::engine::hash::vllm::{self, Algo};
use crate::engine::testing::Random;
use crate::engine::wire::Release;

fn model() -> Model {
    Model {
        block_tokens: 4,
        step_tokens: 16,
        running_max: 4,
        prefill_tokens_per_second: 1000.0,
        decode_tokens_per_second: 100.0,
        prefill_floor: Duration::ZERO,
        chain: Chain::Vllm(vllm::Chain::new(Algo::XxhashCbor, "0", Release::new(33, 0), 4, 0)),
        policy: Policy::Vllm { drop_last: false },
    }
}

fn request(id: u64, prompt: impl IntoIterator<Item = u32>, answer: usize) -> Request {
    Request {
        id: RequestId(id),
        prompt: prompt.into_iter().collect(),
        answer: vec![7; answer],
        namespace: Arc::default(),
        transferred: false,
    }
}

/// Runs until nothing is left; outputs, changes and the simulated time.
fn drain(scheduler: &mut Scheduler) -> (Vec<Output>, Vec<Change>, Duration) {
    let (mut outputs, mut changes, mut time) = (Vec::new(), Vec::new(), Duration::ZERO);
    while let Some(duration) = scheduler.begin_step() {
        let (more, happened) = scheduler.end_step();
        outputs.extend(more);
        changes.extend(happened);
        time += duration;
    }
    (outputs, changes, time)
}

/// Lengths of the runs stored, and of the evictions between.
fn stored(changes: &[Change]) -> Vec<usize> {
    changes.iter().map(|change| if let Change::Stored(run) = change { run.digests.len() } else { 0 }).collect()
}

#[test]
fn a_cold_prompt_is_stored_in_pieces_and_then_block_by_block() {
    let mut scheduler = Scheduler::new(model(), 64);
    scheduler.add(request(1, 0..34, 12));
    let (outputs, changes, time) = drain(&mut scheduler);
    assert_eq!(outputs.len(), 12);
    assert!(outputs.iter().all(|output| output.cached_tokens == 0));
    // 34 prompt tokens in steps of 16, then 11 decoded tokens with KV: 45 tokens are 11 full blocks.
    assert_eq!(stored(&changes), [4, 4, 1, 1, 1]);
    let chained = changes.windows(2).all(|pair| match (&pair[0], &pair[1]) {
        (Change::Stored(run), Change::Stored(next)) => next.parent.as_ref() == run.digests.last(),
        _ => false,
    });
    assert!(chained, "each run's parent is the last block of the run before");
    assert_eq!(time, Duration::from_millis(34 + 11 * 10));
}

#[test]
fn hits_are_whole_blocks_of_all_but_the_last_token() {
    for (length, cached) in [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (31, 28), (32, 28), (33, 32)] {
        let mut scheduler = Scheduler::new(model(), 64);
        scheduler.add(request(1, 0..length, 1));
        drain(&mut scheduler);
        scheduler.add(request(2, 0..length, 1));
        let (outputs, changes, _) = drain(&mut scheduler);
        assert_eq!(outputs[0].cached_tokens, cached, "{length} tokens");
        // An exact multiple announces its last block again, as a copy; nothing else is announced.
        let expected: &[usize] = if length % 4 == 0 { &[1] } else { &[] };
        assert_eq!(stored(&changes), expected, "{length} tokens");
    }
}

#[test]
fn a_hit_costs_only_the_rest_of_the_prompt() {
    let mut scheduler = Scheduler::new(model(), 64);
    scheduler.add(request(1, 0..40, 1));
    assert_eq!(drain(&mut scheduler).2, Duration::from_millis(40));
    scheduler.add(request(2, 0..44, 1));
    assert_eq!(drain(&mut scheduler).2, Duration::from_millis(4));
}

#[test]
fn an_answer_is_a_hit_of_the_next_turn() {
    let mut scheduler = Scheduler::new(model(), 64);
    scheduler.add(request(1, 0..8, 9));
    drain(&mut scheduler);
    // The answer's last token has no KV: 16 of 17 tokens are cached.
    scheduler.add(request(2, (0..8).chain([7; 9]).chain(100..104), 1));
    assert_eq!(drain(&mut scheduler).0[0].cached_tokens, 16);
}

#[test]
fn requests_beyond_the_limit_wait_for_a_slot() {
    let mut scheduler = Scheduler::new(Model { running_max: 1, ..model() }, 64);
    scheduler.add(request(1, 0..4, 2));
    scheduler.add(request(2, 50..54, 1));
    scheduler.begin_step();
    assert_eq!((scheduler.running(), scheduler.waiting()), (1, 1));
    scheduler.abort(RequestId(1));
    let (outputs, _, _) = drain(&mut scheduler);
    assert_eq!(outputs.iter().map(|output| output.id).collect::<Vec<_>>(), [RequestId(2)]);
    assert_eq!(scheduler.cache().used(), 0);
}

#[test]
fn the_youngest_gives_its_blocks_to_an_older_one() {
    let mut scheduler = Scheduler::new(model(), 5);
    scheduler.add(request(1, 0..8, 8));
    scheduler.add(request(2, 50..58, 8));
    let (outputs, _, _) = drain(&mut scheduler);
    assert_eq!(outputs.len(), 16);
    assert!(scheduler.totals().preemptions > 0);
    let last = outputs.iter().filter(|output| output.last).map(|output| output.id).collect::<Vec<_>>();
    assert_eq!(last, [RequestId(1), RequestId(2)]);
}

#[test]
fn a_reset_is_announced_with_the_next_step() {
    let mut scheduler = Scheduler::new(model(), 8);
    scheduler.add(request(1, 0..8, 1));
    drain(&mut scheduler);
    assert!(scheduler.clear());
    assert!(scheduler.begin_step().is_none());
    scheduler.add(request(2, 0..8, 1));
    let (_, changes, _) = drain(&mut scheduler);
    assert_eq!(changes[0], Change::Cleared);
    assert_eq!(stored(&changes[1..]), [2]);
}

#[test]
fn a_salt_parts_equal_prompts() {
    let mut scheduler = Scheduler::new(model(), 64);
    for (id, salt, cached) in [(1, None, 0), (2, Some("a"), 0), (3, Some("b"), 0), (4, Some("a"), 8), (5, None, 8)] {
        let namespace = Arc::new(Namespace { salt: salt.map(str::to_owned), ..Namespace::default() });
        scheduler.add(Request { namespace, ..request(id, 0..10, 1) });
        assert_eq!(drain(&mut scheduler).0[0].cached_tokens, cached, "request {id}");
    }
}

/// Replays changes into copies per key, as a consumer of events does.
fn replay(copies: &mut HashMap<u64, usize>, changes: &[Change]) {
    for change in changes {
        match change {
            Change::Stored(run) => {
                run.digests.iter().for_each(|digest| *copies.entry(digest.key()).or_default() += 1);
            }
            Change::Removed(digest) => {
                let left = copies.get_mut(&digest.key()).expect("what is removed was stored");
                *left -= 1;
                if *left == 0 {
                    copies.remove(&digest.key());
                }
            }
            Change::Cleared => copies.clear(),
        }
    }
}

#[test]
fn changes_replayed_give_the_contents_after_random_work() {
    for seed in 0..30 {
        let mut random = Random::new(seed);
        let blocks = 8 + random.below(40);
        let mut scheduler = Scheduler::new(Model { step_tokens: 3 + random.below(30), ..model() }, blocks);
        let mut copies = HashMap::new();
        let mut open = HashMap::new();
        for id in 0..300 {
            if random.below(2) == 0 {
                let family = random.below(4) as u32 * 1000;
                let length = 1 + random.below(24) as u32;
                let answer = 1 + random.below(8);
                scheduler.add(request(id, family..family + length, answer));
                open.insert(RequestId(id), answer);
            }
            if random.below(12) == 0
                && let Some(id) = open.keys().next().copied()
            {
                scheduler.abort(id);
                open.remove(&id);
            }
            if random.below(40) == 0 {
                scheduler.clear();
            }
            if scheduler.begin_step().is_some() {
                let (outputs, changes) = scheduler.end_step();
                replay(&mut copies, &changes);
                for output in outputs {
                    let left = open.get_mut(&output.id).expect("only open requests get tokens");
                    *left -= 1;
                    assert_eq!(*left == 0, output.last, "seed {seed}");
                    if output.last {
                        open.remove(&output.id);
                    }
                }
                assert_eq!(copies, copies_by_key(scheduler.cache()), "seed {seed}");
            }
        }
        let (outputs, changes, _) = drain(&mut scheduler);
        replay(&mut copies, &changes);
        assert_eq!(outputs.len(), open.values().sum::<usize>(), "seed {seed}");
        if !changes.is_empty() {
            assert_eq!(copies, copies_by_key(scheduler.cache()), "seed {seed}");
        }
        assert_eq!(scheduler.cache().used(), 0, "seed {seed}");
    }
}
