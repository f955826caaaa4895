//! Each `sel`.

use super::*;
use crate::service::{Select, SessionSource, Sessions};

impl Fleet {
    fn select(mut self, select: Select) -> Self {
        self.service.select = select;
        self.service = self.service.with_ring();
        self
    }

    fn weights(mut self, weights: &[u32]) -> Self {
        for (endpoint, weight) in self.service.endpoints.iter_mut().zip(weights) {
            endpoint.weight = *weight;
        }
        self
    }

    /// Where a request without any score goes.
    fn sent(&mut self, facts: Facts<'_>) -> u16 {
        let decision = self.with_facts(&facts).expect("there are candidates");
        assert_eq!((decision.tier, decision.rank, decision.hit_blocks), (Tier::Select, None, 0));
        decision.endpoint.0
    }
}

fn bare<'a>() -> Facts<'a> {
    Facts::of(Evidence::None(MissReason::ModelEmpty))
}

fn of_client<'a>(client: u64) -> Facts<'a> {
    Facts { client, ..bare() }
}

fn of_prefix<'a>(prefix: u64) -> Facts<'a> {
    Facts { prefix: Some(prefix), ..bare() }
}

#[test]
fn hashes_go_by_the_number_of_endpoints_and_those_of_a_failed_one_by_what_is_left() {
    let places = |fleet: &mut Fleet| (0..16).map(|client| fleet.sent(of_client(client))).collect::<Vec<_>>();
    let mut fleet = Fleet::new(4).select(Select::ClientHash);
    assert_eq!(places(&mut fleet), [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]);
    // 1, 5, 9 and 13 divided by 4 are 0 to 3: places among endpoints 0, 2 and 3.
    let mut fleet = fleet.down(&[1]);
    assert_eq!(places(&mut fleet), [0, 0, 2, 3, 0, 2, 2, 3, 0, 3, 2, 3, 0, 0, 2, 3]);
    // One that drains is no longer counted.
    let mut fleet = Fleet::new(4).select(Select::ClientHash).weights(&[1, 0, 1, 1]);
    assert_eq!(places(&mut fleet)[..6], [0, 2, 3, 0, 2, 3]);
}

#[test]
fn keys_are_the_prefix_then_the_conversation_then_nothing() {
    for select in [Select::PrefixHash, Select::WeightedHash] {
        let mut fleet = Fleet::new(4).select(select);
        let both = Facts { conversation: Some(3), ..of_prefix(6) };
        assert_eq!(fleet.sent(both), 2, "{select:?}");
        assert_eq!(fleet.sent(Facts { conversation: Some(3), ..bare() }), 3, "{select:?}");
        assert_eq!((0..5).map(|_| fleet.sent(bare())).collect::<Vec<_>>(), [0, 1, 2, 3, 0], "{select:?}");
    }
    let mut fleet = Fleet::new(4).select(Select::BoundedHash);
    let by_prefix = fleet.sent(of_prefix(1 << 60));
    assert_eq!(fleet.sent(Facts { conversation: Some(1 << 60), ..bare() }), by_prefix);
    assert_eq!((0..5).map(|_| fleet.sent(bare())).collect::<Vec<_>>(), [0, 1, 2, 3, 0]);
}

#[test]
fn weighted_turns_are_spread_as_evenly_as_they_can_be() {
    let mut fleet = Fleet::new(3).select(Select::Weighted).weights(&[5, 1, 1]);
    let order = |fleet: &mut Fleet| (0..7).map(|_| fleet.sent(bare())).collect::<Vec<_>>();
    // Owed after each turn: (-2 1 1) (-4 2 2) (1 -4 3) (-1 -3 4) (4 -2 -2) (2 -1 -1) (0 0 0).
    assert_eq!(order(&mut fleet), [0, 0, 1, 0, 2, 0, 0]);
    assert_eq!(order(&mut fleet), [0, 0, 1, 0, 2, 0, 0]);
    let mut drained = Fleet::new(3).select(Select::Weighted).weights(&[2, 0, 1]);
    assert_eq!(order(&mut drained), [0, 2, 0, 0, 2, 0, 0]);
    // Each shard begins a turn later than the one before it.
    let mut second = Fleet::new(3).select(Select::Weighted).weights(&[5, 1, 1]);
    second.turn = Turn::starting_at(ShardId(2));
    assert_eq!(order(&mut second), [1, 0, 2, 0, 0, 0, 0]);
}

#[test]
fn weighted_hashes_give_each_endpoint_its_part_of_all_keys() {
    let mut fleet = Fleet::new(3).select(Select::WeightedHash).weights(&[1, 3, 4]);
    let places = |fleet: &mut Fleet| (0..8).map(|key| fleet.sent(of_prefix(key))).collect::<Vec<_>>();
    assert_eq!(places(&mut fleet), [0, 1, 1, 1, 2, 2, 2, 2]);
    // 4 to 7 divided by 8 are 0: the first place among 1 + 3.
    assert_eq!(places(&mut fleet.down(&[2])), [0, 1, 1, 1, 0, 0, 0, 0]);
}

#[test]
fn bounded_hashing_keeps_a_key_at_its_owner_up_to_the_bound_and_gives_the_rest_to_the_next() {
    let mut fleet = Fleet::new(4).select(Select::BoundedHash);
    let key = 0x1234_5678_9abc_def0;
    let ring: Vec<usize> = fleet.service.ring.as_ref().expect("a ring").from(key).map(EndpointIndex::index).collect();
    let mut order: Vec<usize> = Vec::new();
    ring.iter().for_each(|place| {
        if !order.contains(place) {
            order.push(*place)
        }
    });
    let mut loads = [0; 4];
    let mut sent = Vec::new();
    for _ in 0..8 {
        let place = usize::from(fleet.sent(of_prefix(key)));
        loads[place] += 1;
        fleet.set_loads(&loads);
        sent.push(order.iter().position(|at| *at == place).expect("on the ring"));
    }
    // Factor 125, n = 4. Bounds ⌈125 × (total + 1) / 400⌉ for totals 0 to 7: 1, 1, 1, 2, 2, 2, 3, 3.
    assert_eq!(sent, [0, 1, 2, 0, 1, 2, 0, 1]);

    // A larger factor keeps more of it: ⌈300 × (total + 1) / 400⌉ is 1, 2, 3, 3.
    let mut fleet = Fleet::new(4);
    fleet.service.hashing.mean_load_factor = 300;
    let mut fleet = fleet.select(Select::BoundedHash);
    let mut sent = Vec::new();
    for total in 0..4 {
        let mut loads = [0; 4];
        loads[order[0]] = total;
        fleet.set_loads(&loads);
        sent.push(usize::from(fleet.sent(of_prefix(key))) == order[0]);
    }
    assert_eq!(sent, [true, true, true, false]);
    fleet.set_loads(&[]);
    let mut fleet = fleet.down(&[order[0]]);
    assert_eq!(usize::from(fleet.sent(of_prefix(key))), order[1]);
}

fn sessions(source: Option<SessionSource>) -> Option<Sessions> {
    Some(Sessions { source, ttl: std::time::Duration::from_secs(300), max: 16 })
}

#[test]
fn a_client_persists_and_only_those_of_a_failed_endpoint_move() {
    let mut fleet = Fleet::new(4).select(Select::Persist);
    fleet.service.sessions = sessions(None);
    let places = |fleet: &mut Fleet| (0..400).map(|client| fleet.sent(of_client(client))).collect::<Vec<_>>();
    let before = places(&mut fleet);
    assert_eq!(places(&mut fleet), before);
    for endpoint in 0..4 {
        let share = before.iter().filter(|place| **place == endpoint).count();
        assert!((70..=130).contains(&share), "{share} of 400");
    }
    let after = places(&mut fleet.down(&[2]));
    assert!(before.iter().zip(&after).all(|(before, after)| before == after || *before == 2));
    assert!(!after.contains(&2));
}

#[test]
fn sessions_persist_where_the_rule_names_them_and_clients_elsewhere() {
    let persist = |source| {
        let mut fleet = Fleet::new(8).select(Select::Persist);
        fleet.service.sessions = sessions(source);
        fleet
    };
    let of = |client, conversation| Facts { conversation, ..of_client(client) };
    let mut named = persist(Some(SessionSource::Header("x-session".into())));
    let by_session: Vec<_> = (0..50).map(|client| named.sent(of(client, Some(7)))).collect();
    assert!(by_session.iter().all(|place| *place == by_session[0]), "one session of many clients");
    assert!((0..50).any(|client| named.sent(of(client, None)) != by_session[0]), "without a session, the client");
    let mut unnamed = persist(None);
    let by_client: Vec<_> = (0..50).map(|session| unnamed.sent(of(3, Some(session)))).collect();
    assert!(by_client.iter().all(|place| *place == by_client[0]), "one client of many conversations");
}

#[test]
fn a_pin_wins_in_sels_0_and_3_while_its_endpoint_is_a_candidate() {
    let pinned = Facts { session: Some(Pin { prefill: EndpointIndex(2), decode: None }), ..bare() };
    for select in [Select::RoundRobin, Select::Expected, Select::Persist] {
        let mut fleet = Fleet::new(4).select(select);
        assert!((0..5).all(|_| fleet.sent(pinned) == 2), "{select:?}");
        assert_ne!(fleet.down(&[2]).sent(pinned), 2, "{select:?}");
    }
    let mut fleet = Fleet::new(4).select(Select::LeastConnections);
    assert!((0..20).any(|_| fleet.sent(pinned) != 2));
    let gone = Facts { session: Some(Pin { prefill: EndpointIndex(77), decode: None }), ..bare() };
    assert_eq!(Fleet::new(4).select(Select::RoundRobin).sent(gone), 0);
}

#[test]
fn every_sel_finds_a_backup_and_passes_over_what_is_masked() {
    for select in Select::ALL {
        let facts = Facts { client: 77, conversation: Some(78), ..of_prefix(79) };
        let mut fleet = Fleet::new(5).select(select).weights(&[0, 3, 1, 1, 1]).down(&[1]).loads(&[0, 0, 1, 2, 0]);
        fleet.service.endpoints[4].backup = true;
        fleet.service.endpoints[3].retired = true;
        assert!((0..9).all(|_| fleet.sent(facts) == 2), "{select:?}: 0 drains, 1 is down, 3 is gone, 4 is a backup");
        let mut fleet = fleet.down(&[2]);
        assert!((0..9).all(|_| fleet.sent(facts) == 4), "{select:?}");
        assert_eq!(fleet.down(&[4]).with_facts(&facts), None, "{select:?}");
    }
}

/// Σ (share − expected)² / expected.
fn chi_squared(shares: &[u32]) -> f64 {
    let expected = f64::from(shares.iter().sum::<u32>()) / shares.len() as f64;
    shares.iter().map(|share| (f64::from(*share) - expected).powi(2) / expected).sum()
}

#[test]
fn requests_one_after_the_other_are_shared_evenly() {
    for select in [Select::Expected, Select::RoundRobin, Select::Weighted, Select::LeastConnections] {
        for endpoints in [2, 3, 8, 12] {
            let mut fleet = Fleet::new(endpoints).select(select);
            let mut shares = vec![0; usize::from(endpoints)];
            (0..1000).for_each(|_| shares[usize::from(fleet.sent(bare()))] += 1);
            // Drawn at random they would exceed the degrees of freedom half of the time.
            assert!(chi_squared(&shares) < 1.0, "{select:?}: {shares:?}");
        }
    }
    // So are those whose prefix everybody holds.
    for blend in [Blend::Off, Blend::Hard, Blend::Soft, Blend::Adaptive, Blend::AdaptiveSoft] {
        let mut fleet = Fleet::new(8).kv(|kv| (kv.blend, kv.spill_relief) = (blend, true));
        let mut shares = [0; 8];
        let all: Vec<_> = (0..8).map(|endpoint| (endpoint, 3)).collect();
        (0..1000).for_each(|_| shares[fleet.scored(LONG, &all).endpoint.index()] += 1);
        assert!(chi_squared(&shares) < 1.0, "{blend:?}: {shares:?}");
    }
}
