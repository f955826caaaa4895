//! The cascade of P/D rules.

use super::*;
use crate::service::{Disagg, Role};

/// Endpoints 0, 2, 4 compute prompts, 1, 3, 5 answers, 6 does whole requests.
pub(super) fn pools(cache_aware: bool) -> Fleet {
    let mut fleet = Fleet::new(7);
    for (index, endpoint) in fleet.service.endpoints.iter_mut().enumerate() {
        endpoint.role = if index == 6 { Role::Normal } else { [Role::Prefill, Role::Decode][index % 2] };
    }
    let pd = Disagg { cache_aware, cache_threshold: 20, balance_threshold: 3, ..Disagg::default() };
    fleet.service.pd = Some(pd);
    fleet
}

fn pinned(facts: Facts<'_>, prefill: u16) -> Facts<'_> {
    Facts { session: Some(Pin { prefill: EndpointIndex(prefill), decode: None }), ..facts }
}

fn matched(facts: Facts<'_>, endpoint: u16, matched_percent: u8) -> Facts<'_> {
    Facts { trie: Some(TrieMatch { endpoint: EndpointIndex(endpoint), matched_percent }), ..facts }
}

impl Fleet {
    #[track_caller]
    fn expect(&mut self, facts: &Facts<'_>, endpoint: u16, tier: Tier) {
        let decision = self.with_facts(facts).expect("there are candidates");
        assert_eq!((decision.endpoint.0, decision.tier), (endpoint, tier));
    }

    fn decode(&mut self, pinned: Option<u16>, tried: &[u16]) -> Option<u16> {
        let tried: Vec<_> = tried.iter().copied().map(EndpointIndex).collect();
        let mut chooser = Chooser { shard: SHARD, loads: &self.loads, turn: &mut self.turn };
        let pinned = pinned.map(EndpointIndex);
        choose_decode(&self.service, pinned, &tried, &mut chooser).map(|endpoint| endpoint.0)
    }
}

#[test]
fn each_tier_decides_before_the_next() {
    let runs = [run(2, 0, 5), run(1, 0, 9), run(6, 0, 9)];
    let scored = Facts::of(Evidence::Scored { prompt_tokens: LONG, runs: &runs });
    let mut fleet = pools(true).loads(&[1, 0, 1]);
    fleet.expect(&pinned(matched(scored, 0, 100), 4), 4, Tier::Session);
    fleet.expect(&matched(scored, 0, 100), 0, Tier::Trie);
    // Decode endpoints and those of whole requests are no candidates of Tier 1.5, whatever they hold.
    fleet.expect(&scored, 2, Tier::KvExact);
    let bare = Facts::of(Evidence::None(MissReason::TextEmpty));
    fleet.expect(&bare, 4, Tier::LeastLoad);
    let decision = fleet.with_facts(&bare).expect("candidates");
    assert_eq!((decision.miss, decision.reason), (Some(MissReason::TextEmpty), Reason::LeastLoad));
}

#[test]
fn a_session_yields_where_its_endpoint_has_more_than_its_share() {
    let bare = Facts::of(Evidence::None(MissReason::TextEmpty));
    let check = |loads: &[u32], stays: bool| {
        let decision = pools(false).loads(loads).with_facts(&pinned(bare, 0)).expect("candidates");
        assert_eq!(decision.tier == Tier::Session, stays, "loads {loads:?}");
    };
    // Loads of 0, 2 and 4. Caps ⌈175 × total / 300⌉: 1, 1, 2, 6.
    check(&[0, 0, 0, 0, 0], true);
    check(&[1, 0, 0, 0, 0], false);
    check(&[1, 9, 1, 0, 1], true);
    check(&[5, 0, 3, 0, 2], true);
    check(&[6, 0, 2, 0, 2], false);
    // A pin that is down, of another role, or of no endpoint at all, is passed over.
    pools(false).down(&[0]).loads(&[0, 0, 1]).expect(&pinned(bare, 0), 4, Tier::LeastLoad);
    pools(false).loads(&[1, 0, 1]).expect(&pinned(bare, 3), 4, Tier::LeastLoad);
    pools(false).loads(&[1, 0, 1]).expect(&pinned(bare, 99), 4, Tier::LeastLoad);
}

#[test]
fn the_trie_decides_where_it_knows_enough_and_the_loads_are_about_equal() {
    let bare = Facts::of(Evidence::None(MissReason::TextEmpty));
    let check = |cache_aware, percent, loads: &[u32], decides: bool| {
        let decision = pools(cache_aware).loads(loads).with_facts(&matched(bare, 0, percent)).expect("candidates");
        assert_eq!(decision.tier == Tier::Trie, decides, "{percent} %, loads {loads:?}");
    };
    check(true, 20, &[0, 0, 0, 0, 0], true);
    check(true, 19, &[0, 0, 0, 0, 0], false);
    check(false, 100, &[0, 0, 0, 0, 0], false);
    // Loads of 0, 2 and 4 differ by 3 at most; decode endpoints' play no part.
    check(true, 50, &[3, 9, 1, 0, 0], true);
    check(true, 50, &[4, 0, 1, 0, 0], false);
    pools(true).down(&[0]).loads(&[0, 0, 1]).expect(&matched(bare, 0, 100), 4, Tier::LeastLoad);
}

#[test]
fn least_load_counts_what_waits_in_the_engines_and_equals_take_turns() {
    let bare = Facts::of(Evidence::None(MissReason::TextEmpty));
    let mut fleet = pools(false).loads(&[1, 0, 2, 0, 3]);
    let queue = |fleet: &Fleet, index: usize, queued| fleet.service.endpoints[index].shared.engine.set_queued(queued);
    fleet.expect(&bare, 0, Tier::LeastLoad);
    // 1 + 5, 2 + 3, 3 + 0.
    [(0, 5), (2, 3), (4, 0)].iter().for_each(|(index, queued)| queue(&fleet, *index, Some(*queued)));
    fleet.expect(&bare, 4, Tier::LeastLoad);
    // What is too old counts as the mean of the others: 1 + 5, 2 + 3, 3 + 4.
    queue(&fleet, 4, None);
    fleet.expect(&bare, 2, Tier::LeastLoad);
    let mut even = pools(false);
    let mut shares = [0; 7];
    (0..300).for_each(|_| shares[even.with_facts(&bare).expect("candidates").endpoint.index()] += 1);
    assert!([0, 2, 4].iter().all(|index| (98..=102).contains(&shares[*index])), "{shares:?}");
}

#[test]
fn the_decode_endpoint_is_the_sessions_else_the_least_loaded_else_none() {
    let mut fleet = pools(false).loads(&[9, 2, 9, 1, 9, 3]);
    assert_eq!(fleet.decode(Some(5), &[]), Some(5));
    assert_eq!(fleet.decode(None, &[]), Some(3));
    assert_eq!(fleet.decode(Some(0), &[]), Some(3), "a prefill endpoint is none");
    assert_eq!(fleet.decode(Some(5), &[5, 3]), Some(1));
    assert_eq!(fleet.decode(None, &[1, 3, 5]), None);
    let mut fleet = pools(false);
    let mut shares = [0; 7];
    (0..300).for_each(|_| shares[usize::from(fleet.decode(None, &[]).expect("candidates"))] += 1);
    assert!([1, 3, 5].iter().all(|index| (98..=102).contains(&shares[*index])), "{shares:?}");
}

#[test]
fn without_a_pair_of_endpoints_whole_requests_go_to_one_of_role_0() {
    let bare = Facts::of(Evidence::None(MissReason::TextEmpty));
    let session = pinned(matched(bare, 0, 100), 0);
    pools(true).down(&[0, 2, 4]).expect(&session, 6, Tier::Rescue);
    pools(true).down(&[1, 3, 5]).expect(&session, 6, Tier::Rescue);
    assert_eq!(pools(true).down(&[1, 3, 5, 6]).with_facts(&session), None);
    let tried = [0, 2, 4].map(EndpointIndex);
    pools(true).expect(&Facts { tried: &tried, ..bare }, 6, Tier::Rescue);
    pools(true).expect(&Facts { tried: &tried[..2], ..bare }, 4, Tier::LeastLoad);
}

#[test]
fn relief_and_seed_stay_among_prefill_endpoints() {
    let runs = [run(0, 0, 5)];
    let scored = Facts::of(Evidence::Scored { prompt_tokens: LONG, runs: &runs });
    // Loads of 0, 2 and 4 are 3, 2 and 0; the cap is ⌈875 / 300⌉ = 3.
    let mut fleet = pools(false).loads(&[3, 0, 2, 0, 0]).kv(|kv| kv.spill_relief = true);
    fleet.expect(&scored, 4, Tier::KvExact);
    let mut cold = pools(false).cold(1, 0).cold(3, 0).cold(6, 0).kv(|kv| kv.seed_every = 1);
    cold.expect(&scored, 0, Tier::KvExact);
    let mut cold = cold.cold(2, 0);
    cold.expect(&scored, 2, Tier::KvExact);
}
