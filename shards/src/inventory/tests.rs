use std::collections::{BTreeMap, BTreeSet, HashMap};

use proptest::prelude::*;

use super::*;

const OPTIONS: Options = Options { blocks_expected: 1_000 };

fn publish_all(writer: &mut Writer) {
    while writer.pending() > 0 {
        assert!(writer.try_publish(), "no guard is held");
    }
}

fn keys(numbers: impl IntoIterator<Item = u64>) -> Vec<BlockKey> {
    numbers.into_iter().map(BlockKey).collect()
}

/// Runs over all keys at once, by (endpoint, rank).
fn runs(guard: &Guard<'_>, keys: &[BlockKey]) -> BTreeMap<(u16, u8), u32> {
    let mut walk = Walk::default();
    guard.advance(&mut walk, keys);
    by_holder(&walk, guard)
}

fn by_holder(walk: &Walk, guard: &Guard<'_>) -> BTreeMap<(u16, u8), u32> {
    walk.runs(guard).map(|run| ((run.endpoint.0, run.rank.0), run.blocks)).collect()
}

fn dump(guard: &Guard<'_>, endpoint: u16) -> BTreeSet<u64> {
    let mut keys = BTreeSet::new();
    for segment in 0..guard.segments() {
        guard.segment_keys(segment, EndpointIndex(endpoint), &mut |key| {
            assert!(keys.insert(key.0), "a key is listed once");
        });
    }
    keys
}

#[test]
fn a_run_ends_at_the_first_block_that_is_missing() {
    let (mut writer, factory) = new(&OPTIONS);
    let first = writer.add_holder(EndpointIndex(0), Rank(0)).unwrap();
    let second = writer.add_holder(EndpointIndex(1), Rank(3)).unwrap();
    for key in [1, 2, 3, 5, 6] {
        writer.store(BlockKey(key), first);
    }
    for key in [1, 2] {
        writer.store(BlockKey(key), second);
    }
    writer.store(BlockKey(9), second);
    publish_all(&mut writer);
    let reader = factory.reader();
    let guard = reader.enter().unwrap();
    assert_eq!(runs(&guard, &keys(1..=6)), BTreeMap::from([((0, 0), 3), ((1, 3), 2)]));
    // Held later blocks without block 0 are no use.
    assert_eq!(runs(&guard, &keys([7, 1, 2])), BTreeMap::new());
    assert_eq!(runs(&guard, &keys([9, 1, 2])), BTreeMap::from([((1, 3), 3)]));
}

#[test]
fn a_walk_says_when_nobody_can_go_further_and_can_be_used_again() {
    let (mut writer, factory) = new(&OPTIONS);
    let holder = writer.add_holder(EndpointIndex(4), Rank(0)).unwrap();
    (0..40).for_each(|key| writer.store(BlockKey(key), holder));
    publish_all(&mut writer);
    let reader = factory.reader();
    let guard = reader.enter().unwrap();
    let mut walk = Walk::default();
    assert!(guard.advance(&mut walk, &[]), "nothing shown, nothing known");
    assert!(guard.advance(&mut walk, &keys(0..17)));
    assert!(guard.advance(&mut walk, &keys(17..40)));
    assert!(!guard.advance(&mut walk, &keys(40..60)));
    assert!(!guard.advance(&mut walk, &keys(0..40)), "a run that ended does not begin again");
    assert_eq!(by_holder(&walk, &guard), BTreeMap::from([((4, 0), 40)]));
    assert_eq!(walk.blocks_shown(), 100);

    walk.restart();
    assert_eq!((walk.blocks_shown(), by_holder(&walk, &guard)), (0, BTreeMap::new()));
    assert!(!guard.advance(&mut walk, &keys([99])));
    walk.restart();
    assert!(guard.advance(&mut walk, &keys(0..2)));
    assert_eq!(by_holder(&walk, &guard), BTreeMap::from([((4, 0), 2)]));
}

#[test]
fn a_holder_masked_between_two_slices_loses_its_run_even_if_it_comes_back() {
    let (mut writer, factory) = new(&OPTIONS);
    let stays = writer.add_holder(EndpointIndex(0), Rank(0)).unwrap();
    let flips = writer.add_holder(EndpointIndex(1), Rank(0)).unwrap();
    for key in 0..10 {
        writer.store(BlockKey(key), stays);
        writer.store(BlockKey(key), flips);
    }
    publish_all(&mut writer);
    let reader = factory.reader();
    let mut walk = Walk::default();
    assert!(reader.enter().unwrap().advance(&mut walk, &keys(0..5)));

    writer.set_eligible(flips, false);
    publish_all(&mut writer);
    let guard = reader.enter().unwrap();
    assert_eq!(by_holder(&walk, &guard), BTreeMap::from([((0, 0), 5)]), "masked after the last slice");
    drop(guard);
    writer.set_eligible(flips, true);
    publish_all(&mut writer);

    let guard = reader.enter().unwrap();
    assert!(guard.advance(&mut walk, &keys(5..10)));
    assert_eq!(by_holder(&walk, &guard), BTreeMap::from([((0, 0), 10)]));
    assert_eq!(runs(&guard, &keys(0..10)).len(), 2, "a new walk sees both");
}

#[test]
fn a_slot_given_to_a_new_holder_between_two_slices_does_not_continue_the_old_run() {
    let (mut writer, factory) = new(&OPTIONS);
    let old = writer.add_holder(EndpointIndex(1), Rank(0)).unwrap();
    (0..5).for_each(|key| writer.store(BlockKey(key), old));
    publish_all(&mut writer);
    let reader = factory.reader();
    let mut walk = Walk::default();
    assert!(reader.enter().unwrap().advance(&mut walk, &keys(0..5)));

    writer.retire_holder(old);
    publish_all(&mut writer);
    let new = writer.add_holder(EndpointIndex(2), Rank(1)).unwrap();
    assert_eq!(new, old, "the only slot was swept and is free");
    (5..10).for_each(|key| writer.store(BlockKey(key), new));
    publish_all(&mut writer);

    let guard = reader.enter().unwrap();
    assert_eq!(by_holder(&walk, &guard), BTreeMap::new());
    assert!(!guard.advance(&mut walk, &keys(5..10)));
    assert_eq!(by_holder(&walk, &guard), BTreeMap::new());
    assert_eq!((dump(&guard, 1), dump(&guard, 2)), (BTreeSet::new(), (5..10).collect()));
}

#[test]
fn a_masked_holder_stays_in_the_dump_and_a_retired_one_does_not() {
    let (mut writer, factory) = new(&OPTIONS);
    let masked = writer.add_holder(EndpointIndex(0), Rank(0)).unwrap();
    let other_rank = writer.add_holder(EndpointIndex(0), Rank(1)).unwrap();
    let retired = writer.add_holder(EndpointIndex(1), Rank(0)).unwrap();
    for holder in [masked, retired] {
        writer.store(BlockKey(1), holder);
        writer.store(BlockKey(2), holder);
    }
    writer.store(BlockKey(2), other_rank);
    writer.store(BlockKey(3), other_rank);
    publish_all(&mut writer);
    writer.set_eligible(masked, false);
    writer.retire_holder(retired);
    assert!(writer.try_publish());
    assert!(writer.pending() > 0, "one publish does not sweep everything");

    let reader = factory.reader();
    let guard = reader.enter().unwrap();
    assert_eq!(dump(&guard, 0), BTreeSet::from([1, 2, 3]), "ranks of an endpoint are listed together");
    assert_eq!(dump(&guard, 1), BTreeSet::new());
    assert_eq!(runs(&guard, &keys([2, 3])), BTreeMap::from([((0, 1), 2)]));
    assert_eq!(guard.holder(retired), None);
    assert_eq!(
        guard.holder(masked),
        Some(HolderInfo { endpoint: EndpointIndex(0), rank: Rank(0), medium: Medium::Device, eligible: false })
    );
    drop(guard);
    assert_ne!(writer.add_holder(EndpointIndex(2), Rank(0)), Some(retired), "not swept yet");
}

#[test]
fn a_mask_overtakes_the_queue_and_an_eligibility_regained_waits_in_it() {
    let (mut writer, factory) = new(&OPTIONS);
    let holder = writer.add_holder(EndpointIndex(0), Rank(0)).unwrap();
    writer.store(BlockKey(1), holder);
    publish_all(&mut writer);
    // Two publishes' worth of work, then a flip in between.
    (10..10 + 2 * OPS_PER_PUBLISH_MAX as u64).for_each(|key| writer.store(BlockKey(key), holder));
    writer.set_eligible(holder, false);
    writer.remove(BlockKey(1), holder);
    writer.set_eligible(holder, true);

    let reader = factory.reader();
    assert!(writer.try_publish());
    assert_eq!(runs(&reader.enter().unwrap(), &keys([1])), BTreeMap::new(), "masked at once");
    assert!(writer.try_publish());
    assert_eq!(runs(&reader.enter().unwrap(), &keys([10])), BTreeMap::new());
    publish_all(&mut writer);
    let guard = reader.enter().unwrap();
    assert_eq!(runs(&guard, &keys([1])), BTreeMap::new());
    assert_eq!(runs(&guard, &keys([10, 11])), BTreeMap::from([((0, 0), 2)]));
    drop(guard);

    // A later mask makes the queued eligibility void.
    writer.set_eligible(holder, false);
    writer.set_eligible(holder, true);
    writer.set_eligible(holder, false);
    publish_all(&mut writer);
    assert!(!reader.enter().unwrap().holder(holder).unwrap().eligible);
}

#[test]
fn what_is_queued_of_a_retired_holder_never_reaches_the_next_holder_of_its_slot() {
    let (mut writer, factory) = new(&OPTIONS);
    let old = writer.add_holder(EndpointIndex(0), Rank(0)).unwrap();
    (0..10_000).for_each(|key| writer.store(BlockKey(key), old));
    assert!(writer.try_publish());
    writer.retire_holder(old);
    let mut taken = Vec::new();
    for _ in 0..200 {
        assert!(writer.try_publish());
        taken.push(writer.add_holder(EndpointIndex(1), Rank(0)).unwrap());
    }
    publish_all(&mut writer);
    assert_eq!(taken.iter().filter(|&&holder| holder == old).count(), 1, "the slot comes back once, when swept");
    let reader = factory.reader();
    let guard = reader.enter().unwrap();
    assert_eq!((dump(&guard, 0), dump(&guard, 1)), (BTreeSet::new(), BTreeSet::new()));
}

#[test]
fn publishing_is_refused_and_not_waited_for_while_a_guard_reads_the_other_side() {
    let (mut writer, factory) = new(&OPTIONS);
    let holder = writer.add_holder(EndpointIndex(0), Rank(0)).unwrap();
    writer.store(BlockKey(1), holder);
    publish_all(&mut writer);
    let reader = factory.reader();
    let guard = reader.enter().unwrap();
    writer.store(BlockKey(2), holder);
    assert!(writer.try_publish(), "the side that nobody reads");
    writer.store(BlockKey(3), holder);
    assert!(!writer.try_publish());
    writer.store(BlockKey(4), holder);
    writer.set_eligible(holder, false);
    assert!(!writer.try_publish());
    assert_eq!(dump(&guard, 0), BTreeSet::from([1]), "a guard's view does not change");
    drop(guard);
    assert!(writer.try_publish());
    assert!(!reader.enter().unwrap().holder(holder).unwrap().eligible, "a mask joins the part that was refused");
    publish_all(&mut writer);
    assert_eq!(dump(&reader.enter().unwrap(), 0), BTreeSet::from([1, 2, 3, 4]));
}

#[test]
fn a_full_queue_drops_stores_and_counts_them_but_takes_removals() {
    let (mut writer, factory) = new(&OPTIONS);
    let holder = writer.add_holder(EndpointIndex(0), Rank(0)).unwrap();
    (0..8).for_each(|key| writer.store(BlockKey(key), holder));
    publish_all(&mut writer);
    writer.limit_queue(4);
    (100..110).for_each(|key| writer.store(BlockKey(key), holder));
    (0..8).for_each(|key| writer.remove(BlockKey(key), holder));
    assert_eq!(writer.stores_dropped(), 6);
    publish_all(&mut writer);
    let reader = factory.reader();
    assert_eq!(dump(&reader.enter().unwrap(), 0), (100..104).collect());
}

#[test]
fn the_number_of_holders_is_bounded_by_the_slot_number_alone() {
    let (mut writer, factory) = new(&OPTIONS);
    for number in 0..HOLDERS_MAX {
        let holder = writer.add_holder(EndpointIndex((number / 8) as u16), Rank((number % 8) as u8)).unwrap();
        if number % 16 == 0 {
            writer.store(BlockKey(7), holder);
        }
    }
    assert_eq!(writer.add_holder(EndpointIndex(0), Rank(0)), None);
    publish_all(&mut writer);
    let reader = factory.reader();
    let guard = reader.enter().unwrap();
    assert_eq!(runs(&guard, &keys([7])).len(), HOLDERS_MAX.div_ceil(16));
}

#[test]
fn segments_grow_and_shrink_without_losing_a_key() {
    let (mut writer, factory) = new(&OPTIONS);
    let stays = writer.add_holder(EndpointIndex(0), Rank(0)).unwrap();
    let leaves = writer.add_holder(EndpointIndex(1), Rank(0)).unwrap();
    let total = 400_000_u64;
    for key in 0..total {
        writer.store(BlockKey(key), if key % 50 == 0 { stays } else { leaves });
        if writer.pending() >= OPS_PER_PUBLISH_MAX {
            assert!(writer.try_publish());
        }
    }
    publish_all(&mut writer);
    let reader = factory.reader();
    assert_eq!(dump(&reader.enter().unwrap(), 1).len() as u64, total - total / 50);
    writer.retire_holder(leaves);
    publish_all(&mut writer);
    // The sweep is done; further publishes give the room back.
    for round in 0..1_000 {
        writer.store(BlockKey(total + round), stays);
        publish_all(&mut writer);
    }
    let guard = reader.enter().unwrap();
    let expected = (0..total).filter(|key| key % 50 == 0).chain(total..total + 1_000);
    assert_eq!(dump(&guard, 0), expected.collect());
    let room: usize = (0..guard.segments()).map(|segment| guard.0.room(segment)).sum();
    assert!(room < 40_000, "room for {room} keys where 9,000 are");
}

#[derive(Clone, Debug)]
enum Action {
    Add(u16, u8),
    Store(u64, usize),
    Remove(u64, usize),
    Retire(usize),
    Eligible(usize, bool),
    Publish,
    Enter,
    Leave,
    Follow(Option<u64>),
    Check,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        3 => (0..6_u16, 0..3_u8).prop_map(|(endpoint, rank)| Action::Add(endpoint, rank)),
        30 => (0..12_u64, any::<usize>()).prop_map(|(key, holder)| Action::Store(key, holder)),
        12 => (0..12_u64, any::<usize>()).prop_map(|(key, holder)| Action::Remove(key, holder)),
        1 => any::<usize>().prop_map(Action::Retire),
        3 => (any::<usize>(), any::<bool>()).prop_map(|(holder, eligible)| Action::Eligible(holder, eligible)),
        6 => Just(Action::Publish),
        2 => Just(Action::Enter),
        2 => Just(Action::Leave),
        6 => proptest::option::of(0..12_u64).prop_map(Action::Follow),
        2 => Just(Action::Check),
    ]
}

/// What an inventory is, said in the plainest way.
#[derive(Default)]
struct Model {
    holders: HashMap<HolderIndex, HolderInfo>,
    /// Holders of other key spaces than the service's own.
    elsewhere: BTreeSet<HolderIndex>,
    keys: HashMap<u64, BTreeSet<HolderIndex>>,
}

impl Model {
    fn pick(&self, number: usize) -> Option<HolderIndex> {
        let mut holders: Vec<_> = self.holders.keys().copied().collect();
        holders.sort_unstable();
        (!holders.is_empty()).then(|| holders[number % holders.len()])
    }

    fn dump(&self, endpoint: u16) -> BTreeSet<u64> {
        let held = self.keys.iter().filter(|(_, holders)| {
            let of = |info: &HolderInfo| info.endpoint == EndpointIndex(endpoint) && info.medium == Medium::Device;
            holders.iter().any(|holder| of(&self.holders[holder]))
        });
        held.map(|(key, _)| *key).collect()
    }

    fn runs(&self, prompt: &[BlockKey]) -> Vec<Run> {
        let mut runs = Vec::new();
        let seen = |(holder, info): &(&HolderIndex, &HolderInfo)| info.eligible && !self.elsewhere.contains(holder);
        for (holder, info) in self.holders.iter().filter(seen) {
            let has = |key: &&BlockKey| self.keys.get(&key.0).is_some_and(|holders| holders.contains(holder));
            let blocks = prompt.iter().take_while(has).count() as u32;
            if blocks > 0 {
                let medium = info.medium;
                runs.push(Run { endpoint: info.endpoint, rank: info.rank, medium, blocks, block_tokens: None });
            }
        }
        runs
    }
}

/// What engines do to whole prompts.
#[derive(Clone, Debug)]
enum Deed {
    /// An engine stores a piece of a prompt, and says rightly, wrongly or not at all what it follows.
    Store {
        holder: usize,
        prompt: usize,
        from: usize,
        to: usize,
        follows: u8,
    },
    /// An engine evicts a piece of a prompt: from its end, from its beginning, or every third block.
    Evict {
        holder: usize,
        prompt: usize,
        from: usize,
        to: usize,
        manner: u8,
    },
    /// A rank comes, in a key space of its own or in a slower medium now and then.
    Come {
        endpoint: u16,
        rank: u8,
        manner: u8,
    },
    Clear(usize),
    Eligible(usize, bool),
    Publish,
    Check,
}

/// Prompts of some length, each of which begins like the one before.
const PROMPTS: [(u64, usize); 6] = [(0, 200), (150, 180), (20, 300), (20, 64), (1, 130), (0, 65)];

fn prompt_keys() -> Vec<Vec<u64>> {
    let mut prompts: Vec<Vec<u64>> = Vec::new();
    for (number, (shared, blocks)) in PROMPTS.into_iter().enumerate() {
        let before = prompts.last().cloned().unwrap_or_default();
        let own = |block| 1_000 * (number as u64 + 1) + block;
        let keys = (0..blocks as u64).map(|block| if block < shared { before[block as usize] } else { own(block) });
        prompts.push(keys.collect());
    }
    prompts
}

fn deed() -> impl Strategy<Value = Deed> {
    let piece = || (any::<usize>(), 0..PROMPTS.len(), 0..300_usize, 0..300_usize, 0..6_u8);
    prop_oneof![
        3 => (0..6_u16, 0..3_u8, 0..6_u8).prop_map(|(endpoint, rank, manner)| Deed::Come { endpoint, rank, manner }),
        20 => piece().prop_map(|(holder, prompt, from, to, follows)| {
            // Most often from the beginning.
            let from = if follows < 3 { 0 } else { from };
            Deed::Store { holder, prompt, from, to, follows }
        }),
        8 => piece().prop_map(|(holder, prompt, from, to, manner)| Deed::Evict { holder, prompt, from, to, manner }),
        1 => any::<usize>().prop_map(Deed::Clear),
        2 => (any::<usize>(), any::<bool>()).prop_map(|(holder, eligible)| Deed::Eligible(holder, eligible)),
        6 => Just(Deed::Publish),
        1 => Just(Deed::Check),
    ]
}

/// An inventory beside its model.
struct Twin {
    writer: Writer,
    model: Model,
    prompts: Vec<Vec<u64>>,
}

impl Twin {
    fn come(&mut self, endpoint: u16, rank: u8, manner: u8) {
        let (endpoint, rank) = (EndpointIndex(endpoint), Rank(rank));
        let space = if manner == 0 { self.writer.space(derived(16)).expect("there is room") } else { SpaceIndex::OWN };
        let medium = if manner == 1 { Medium::Cpu } else { Medium::Device };
        let holder = self.writer.add_holder_to(medium, space, endpoint, rank).expect("there is room");
        assert!(self.model.holders.insert(holder, HolderInfo { endpoint, rank, medium, eligible: true }).is_none());
        self.model.elsewhere.remove(&holder);
        if space != SpaceIndex::OWN {
            self.model.elsewhere.insert(holder);
        }
    }

    fn piece(&self, prompt: usize, from: usize, to: usize) -> std::ops::Range<usize> {
        let end = to.min(self.prompts[prompt].len());
        from.min(end)..end
    }

    fn store(&mut self, holder: HolderIndex, prompt: usize, piece: std::ops::Range<usize>, follows: u8) {
        let keys = &self.prompts[prompt];
        match follows {
            0..4 => self.writer.follow(piece.start.checked_sub(1).map(|before| BlockKey(keys[before]))),
            4 => self.writer.follow(Some(BlockKey(keys[keys.len() / 2]))),
            _ => {}
        }
        for key in &keys[piece] {
            self.writer.store(BlockKey(*key), holder);
            self.model.keys.entry(*key).or_default().insert(holder);
        }
    }

    fn evict(&mut self, holder: HolderIndex, prompt: usize, piece: std::ops::Range<usize>, manner: u8) {
        let mut keys: Vec<u64> = self.prompts[prompt][piece].to_vec();
        match manner {
            0..3 => keys.reverse(),
            3 => keys = keys.into_iter().step_by(3).collect(),
            _ => {}
        }
        for key in keys {
            self.writer.remove(BlockKey(key), holder);
            self.model.keys.entry(key).or_default().remove(&holder);
        }
    }

    fn check(&mut self, reader: &Reader, cut: usize) {
        let prompts: Vec<_> = self.prompts.iter().map(|prompt| (prompt.clone(), cut)).collect();
        check(&self.model, &mut self.writer, reader, &prompts);
    }
}

fn sorted(mut runs: Vec<Run>) -> Vec<Run> {
    runs.sort_unstable_by_key(|run| (run.endpoint, run.rank, run.medium, run.blocks));
    runs
}

/// Compares all that can be read, on the one side and on the other.
fn check(model: &Model, writer: &mut Writer, reader: &Reader, prompts: &[(Vec<u64>, usize)]) {
    publish_all(writer);
    check_side(model, reader, prompts);
    // Something to publish that changes nothing.
    writer.follow(Some(BlockKey(u64::MAX)));
    writer.follow(None);
    assert!(writer.pending() > 0 && writer.try_publish(), "the other side comes to the front");
    check_side(model, reader, prompts);
}

fn check_side(model: &Model, reader: &Reader, prompts: &[(Vec<u64>, usize)]) {
    let guard = reader.enter().unwrap();
    for endpoint in 0..6 {
        assert_eq!(dump(&guard, endpoint), model.dump(endpoint), "endpoint {endpoint}");
    }
    let mut walk = Walk::default();
    for (prompt, cut) in prompts {
        let prompt = keys(prompt.iter().copied());
        let (head, tail) = prompt.split_at(cut % (prompt.len() + 1));
        walk.restart();
        let _ = guard.advance(&mut walk, head);
        let further = guard.advance(&mut walk, tail);
        let expected = sorted(model.runs(&prompt));
        assert_eq!(further, prompt.is_empty() || expected.iter().any(|run| run.blocks as usize == prompt.len()));
        assert_eq!(sorted(walk.runs(&guard).collect()), expected, "{prompt:?} cut at {}", head.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_interleaving_equals_the_plain_model(
        actions in proptest::collection::vec(action(), 1..300),
        prompts in proptest::collection::vec((proptest::collection::vec(0..12_u64, 0..40), any::<usize>()), 8),
    ) {
        let (mut writer, factory) = new(&OPTIONS);
        let (reader, held_reader) = (factory.reader(), factory.reader());
        let mut held: Option<(Guard<'_>, Vec<BTreeSet<u64>>)> = None;
        let mut model = Model::default();
        for action in actions {
            let dumps = |guard: &Guard<'_>| -> Vec<_> { (0..6).map(|endpoint| dump(guard, endpoint)).collect() };
            match action {
                Action::Add(endpoint, rank) => {
                    let (endpoint, rank) = (EndpointIndex(endpoint), Rank(rank));
                    let holder = writer.add_holder(endpoint, rank).unwrap();
                    let info = HolderInfo { endpoint, rank, medium: Medium::Device, eligible: true };
                    prop_assert!(model.holders.insert(holder, info).is_none(), "a slot has one owner");
                }
                Action::Store(key, number) => if let Some(holder) = model.pick(number) {
                    writer.store(BlockKey(key), holder);
                    model.keys.entry(key).or_default().insert(holder);
                },
                Action::Remove(key, number) => if let Some(holder) = model.pick(number) {
                    writer.remove(BlockKey(key), holder);
                    model.keys.entry(key).or_default().remove(&holder);
                },
                Action::Retire(number) => if let Some(holder) = model.pick(number) {
                    writer.retire_holder(holder);
                    model.holders.remove(&holder);
                    model.keys.values_mut().for_each(|holders| { holders.remove(&holder); });
                },
                Action::Eligible(number, eligible) => if let Some(holder) = model.pick(number) {
                    writer.set_eligible(holder, eligible);
                    model.holders.get_mut(&holder).unwrap().eligible = eligible;
                },
                Action::Publish => {
                    let published = writer.try_publish();
                    prop_assert!(published || held.is_some(), "only a guard refuses a publish");
                    if let Some((guard, seen)) = &held {
                        prop_assert_eq!(&dumps(guard), seen, "a guard's view does not change");
                    }
                }
                Action::Enter => if held.is_none() {
                    let guard = held_reader.enter().unwrap();
                    let seen = dumps(&guard);
                    held = Some((guard, seen));
                },
                Action::Leave => held = None,
                Action::Follow(before) => writer.follow(before.map(BlockKey)),
                Action::Check => {
                    held = None;
                    check(&model, &mut writer, &reader, &prompts);
                }
            }
        }
        held = None;
        check(&model, &mut writer, &reader, &prompts);
        drop(held);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn prompts_stored_shared_and_evicted_in_pieces_equal_the_plain_model(
        deeds in proptest::collection::vec(deed(), 1..120),
        cut in any::<usize>(),
    ) {
        let (writer, factory) = new(&OPTIONS);
        let reader = factory.reader();
        let mut twin = Twin { writer, model: Model::default(), prompts: prompt_keys() };
        for deed in deeds {
            match deed {
                Deed::Come { endpoint, rank, manner } => twin.come(endpoint, rank, manner),
                Deed::Store { holder, prompt, from, to, follows } => if let Some(holder) = twin.model.pick(holder) {
                    twin.store(holder, prompt, twin.piece(prompt, from, to), follows);
                },
                Deed::Evict { holder, prompt, from, to, manner } => if let Some(holder) = twin.model.pick(holder) {
                    twin.evict(holder, prompt, twin.piece(prompt, from, to), manner);
                },
                Deed::Clear(number) => if let Some(holder) = twin.model.pick(number) {
                    twin.writer.retire_holder(holder);
                    twin.model.holders.remove(&holder);
                    twin.model.keys.values_mut().for_each(|holders| _ = holders.remove(&holder));
                },
                Deed::Eligible(number, eligible) => if let Some(holder) = twin.model.pick(number) {
                    twin.writer.set_eligible(holder, eligible);
                    twin.model.holders.get_mut(&holder).unwrap().eligible = eligible;
                },
                Deed::Publish => prop_assert!(twin.writer.try_publish()),
                Deed::Check => twin.check(&reader, cut),
            }
        }
        twin.check(&reader, cut);
        // Nothing is left of what nobody holds.
        for holder in twin.model.holders.keys() {
            twin.writer.retire_holder(*holder);
        }
        publish_all(&mut twin.writer);
        prop_assert!(reader.enter().unwrap().0.is_empty());
    }
}

fn derived(block_tokens: u32) -> Space {
    Space { contract: Contract::Derived, block_tokens: NonZeroU32::new(block_tokens).expect("above 0") }
}

#[test]
fn a_walk_sees_the_holders_of_its_own_key_space_alone() {
    let (mut writer, factory) = new(&OPTIONS);
    let own = writer.add_holder(EndpointIndex(0), Rank(0)).unwrap();
    let space = writer.space(derived(32)).expect("there is room");
    let other = writer.add_holder_in(space, EndpointIndex(1), Rank(0)).unwrap();
    for key in 0..4 {
        writer.store(BlockKey(key), own);
        writer.store(BlockKey(key), other);
    }
    publish_all(&mut writer);
    let reader = factory.reader();
    let guard = reader.enter().unwrap();
    assert_eq!(runs(&guard, &keys(0..4)), BTreeMap::from([((0, 0), 4)]));
    let mut walk = Walk::in_space(space);
    guard.advance(&mut walk, &keys(0..4));
    assert_eq!(by_holder(&walk, &guard), BTreeMap::from([((1, 0), 4)]));
    assert_eq!(guard.other_spaces().collect::<Vec<_>>(), [(space, derived(32))]);
    assert_eq!(dump(&guard, 1), (0..4).collect(), "the dump shows every endpoint's keys");
    assert_eq!([0, 1, 2].map(|index| guard.space_of(EndpointIndex(index))), [Some(SpaceIndex::OWN), Some(space), None]);
}

#[test]
fn a_key_space_is_there_while_somebody_is_in_it_and_its_number_is_used_again_afterwards() {
    let (mut writer, factory) = new(&OPTIONS);
    let reader = factory.reader();
    let spaces =
        || reader.enter().unwrap().other_spaces().map(|(_, space)| space.block_tokens.get()).collect::<Vec<_>>();
    let enter = |writer: &mut Writer, size| {
        let space = writer.space(derived(size))?;
        writer.add_holder_in(space, EndpointIndex(0), Rank(0))
    };
    let holders: Vec<_> = (1..SPACES_MAX as u32).map(|size| enter(&mut writer, size).expect("there is room")).collect();
    assert_eq!(enter(&mut writer, 99), None, "there is no room for another");
    assert_eq!(writer.space(derived(1)), writer.space(derived(1)), "a space that is there is found");
    publish_all(&mut writer);
    assert_eq!(spaces(), [1, 2, 3]);
    // Leaving and coming in one publish, without a moment between.
    writer.retire_holder(holders[1]);
    let again = enter(&mut writer, 99).expect("its room is free");
    publish_all(&mut writer);
    assert_eq!(spaces(), [1, 99, 3]);
    writer.retire_holder(again);
    holders.iter().step_by(2).for_each(|holder| writer.retire_holder(*holder));
    publish_all(&mut writer);
    assert_eq!(spaces(), [0; 0]);
}
