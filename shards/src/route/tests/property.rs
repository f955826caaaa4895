//! What holds of every decision, whatever is drawn.

use proptest::prelude::*;

use super::*;
use crate::service::{Disagg, Role, Select};

/// An endpoint as drawn.
#[derive(Clone, Copy, Debug)]
struct Drawn {
    up: bool,
    weight: u32,
    backup: bool,
    retired: bool,
    role: Role,
    load: u32,
    blocks: u64,
    capacity: u32,
    queued: Option<u32>,
}

/// How the rule chooses, as drawn.
#[derive(Clone, Copy, Debug)]
struct Ruled {
    select: Select,
    blend: Blend,
    relief: bool,
    every: u32,
    pd: bool,
}

/// A request as drawn: its tokens, runs, refusals, claims, and what else is known of it.
#[derive(Clone, Debug)]
struct Asked {
    tokens: u64,
    runs: Vec<(u16, u8, u32)>,
    tried: Vec<u16>,
    claims: Vec<(u16, u64)>,
    client: u64,
    prefix: Option<u64>,
    session: Option<u16>,
    trie: Option<(u16, u8)>,
}

fn endpoints() -> impl Strategy<Value = Vec<Drawn>> {
    let state = (any::<bool>(), 0..3_u32, proptest::bool::weighted(0.2), proptest::bool::weighted(0.1));
    let role = prop_oneof![Just(Role::Normal), Just(Role::Prefill), Just(Role::Decode)];
    let numbers = (0..5_u32, 0..40_u64, 0..3_u32, proptest::option::of(0..4_u32));
    let one = (state, role, numbers).prop_map(|(state, role, (load, blocks, capacity, queued))| {
        let (up, weight, backup, retired) = state;
        Drawn { up, weight, backup, retired, role, load, blocks, capacity: capacity * 1_000, queued }
    });
    proptest::collection::vec(one, 1..12)
}

fn rules() -> impl Strategy<Value = Ruled> {
    let choice = (proptest::sample::select(&Select::ALL[..]), proptest::sample::select(&Blend::ALL[..]));
    (choice, any::<bool>(), 0..4_u32, any::<bool>()).prop_map(|((select, blend), relief, every, pd)| Ruled {
        select,
        blend,
        relief,
        every,
        pd,
    })
}

fn requests() -> impl Strategy<Value = Vec<Asked>> {
    let prompt = (0..200_u64, proptest::collection::vec((0..14_u16, 0..4_u8, 0..9_u32), 0..10));
    let others = (proptest::collection::vec(0..12_u16, 0..3), proptest::collection::vec((0..14_u16, 0..300_u64), 0..3));
    let hashes = (any::<u64>(), proptest::option::of(any::<u64>()));
    let affinity = (proptest::option::of(0..14_u16), proptest::option::of((0..14_u16, 0..=100_u8)));
    let one = (prompt, others, hashes, affinity).prop_map(|((tokens, runs), (tried, claims), hashes, affinity)| {
        let ((client, prefix), (session, trie)) = (hashes, affinity);
        Asked { tokens, runs, tried, claims, client, prefix, session, trie }
    });
    proptest::collection::vec(one, 1..20)
}

fn fleet_of(drawn: &[Drawn], ruled: Ruled) -> Fleet {
    let mut fleet = Fleet::new(drawn.len() as u16)
        .kv(|kv| (kv.blend, kv.spill_relief, kv.seed_every) = (ruled.blend, ruled.relief, ruled.every));
    fleet.service.select = ruled.select;
    let pd = Disagg { cache_aware: true, ..Disagg::default() };
    fleet.service.pd = ruled.pd.then_some(pd);
    for (endpoint, drawn) in fleet.service.endpoints.iter_mut().zip(drawn) {
        (endpoint.weight, endpoint.backup, endpoint.retired) = (drawn.weight, drawn.backup, drawn.retired);
        endpoint.role = if ruled.pd { drawn.role } else { Role::Normal };
        endpoint.shared.set_kv_blocks(drawn.blocks);
        endpoint.shared.set_cache_blocks(Some(drawn.capacity));
        endpoint.shared.engine.set_queued(drawn.queued);
        if !drawn.up {
            endpoint.shared.mark_down();
        }
    }
    fleet.service = fleet.service.with_ring();
    fleet.set_loads(&drawn.iter().map(|drawn| drawn.load).collect::<Vec<_>>());
    fleet
}

/// Who of a role may be chosen, worked out one by one.
fn candidates(drawn: &[Drawn], role: Option<Role>, tried: &[u16]) -> Vec<usize> {
    let usable = |backup: bool| {
        let usable = drawn.iter().enumerate().filter(|(index, drawn)| {
            let fits = drawn.backup == backup && role.is_none_or(|role| drawn.role == role);
            drawn.up && drawn.weight > 0 && !drawn.retired && fits && !tried.contains(&(*index as u16))
        });
        usable.map(|(index, _)| index).collect::<Vec<_>>()
    };
    if usable(false).is_empty() { usable(true) } else { usable(false) }
}

/// Who may be chosen by [`decide`].
fn eligible(drawn: &[Drawn], pd: bool, tried: &[u16]) -> Vec<usize> {
    if !pd {
        return candidates(drawn, None, tried);
    }
    let prefill = candidates(drawn, Some(Role::Prefill), tried);
    let decode = candidates(drawn, Some(Role::Decode), tried);
    if prefill.is_empty() || decode.is_empty() { candidates(drawn, Some(Role::Normal), tried) } else { prefill }
}

impl Asked {
    /// The longest run of an endpoint, in blocks.
    fn best(&self, index: usize) -> u32 {
        let runs = self.runs.iter().filter(|run| usize::from(run.0) == index);
        runs.map(|run| run.2).max().unwrap_or(0)
    }

    fn check(&self, decision: &Decision, ruled: Ruled, eligible: &[usize]) -> Result<(), TestCaseError> {
        let chosen = decision.endpoint.index();
        prop_assert!(eligible.contains(&chosen));
        let by_key = matches!(decision.tier, Tier::KvExact);
        let decided_above = matches!(decision.tier, Tier::Session | Tier::Trie | Tier::Rescue);
        // A claim may decide also where others have some of the prompt.
        prop_assert!(decision.tier == Tier::Claim || decision.miss.is_some() == (!by_key && !decided_above));
        prop_assert_eq!(decision.terms.candidates as usize, eligible.len());
        if !by_key {
            prop_assert_eq!((decision.hit_blocks, decision.spilled_from, decision.seeded_from), (0, None, None));
            return Ok(());
        }
        let usable = (self.tokens.saturating_sub(1) / 16) as u32;
        prop_assert_eq!(decision.hit_blocks, self.best(chosen).min(usable));
        prop_assert_eq!(decision.hit_tokens, u64::from(decision.hit_blocks) * 16);
        prop_assert!(decision.hit_tokens <= decision.best_tokens);
        let longest = eligible.iter().map(|index| self.best(*index)).max().unwrap_or(0);
        prop_assert!(longest > 0, "a hit without any overlap");
        let passed_over = decision.spilled_from.filter(|_| decision.reason != Reason::Claim);
        if let Some(winner) = passed_over.filter(|_| decision.seeded_from.is_none()) {
            prop_assert_ne!(winner, decision.endpoint);
        }
        if ruled.blend == Blend::Off && self.claims.is_empty() {
            let winner = decision.seeded_from.unwrap_or(passed_over.unwrap_or(decision.endpoint));
            prop_assert_eq!(self.best(winner.index()), longest);
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn equal_inputs_give_equal_decisions_only_a_candidate_is_chosen_and_loads_return_to_0(
        drawn in endpoints(),
        ruled in rules(),
        requests in requests(),
    ) {
        let mut fleets = [0, 1].map(|_| fleet_of(&drawn, ruled));
        let mut carried_out = Vec::new();
        for asked in requests {
            let runs: Vec<_> = asked.runs.iter().map(|&(endpoint, rank, blocks)| run(endpoint, rank, blocks)).collect();
            let tried: Vec<_> = asked.tried.iter().copied().map(EndpointIndex).collect();
            let claims = asked.claims.iter();
            let claims: Vec<_> = claims
                .map(|&(endpoint, tokens)| Claimed { endpoint: EndpointIndex(endpoint), rank: Some(Rank(0)), tokens })
                .collect();
            let pin = |prefill| Pin { prefill: EndpointIndex(prefill), decode: None };
            let found = |(endpoint, matched_percent)| TrieMatch { endpoint: EndpointIndex(endpoint), matched_percent };
            let facts = Facts {
                tried: &tried,
                client: asked.client,
                prefix: asked.prefix,
                session: asked.session.map(pin),
                trie: asked.trie.map(found),
                claims: &claims,
                ..Facts::of(Evidence::Scored { prompt_tokens: asked.tokens, runs: &runs })
            };
            let [first, second] = fleets.each_mut().map(|fleet| fleet.with_facts(&facts));
            prop_assert_eq!(&first, &second);
            let eligible = eligible(&drawn, ruled.pd, &asked.tried);
            match &first {
                None => prop_assert!(eligible.is_empty(), "who could have taken it was not asked"),
                Some(decision) => {
                    asked.check(decision, ruled, &eligible)?;
                    for fleet in &mut fleets {
                        let slot = LoadSlot(u32::from(decision.endpoint.0));
                        carried_out.push(fleet.loads.reserve(SHARD, slot, asked.tokens));
                    }
                }
            }
            if ruled.pd {
                let decode = candidates(&drawn, Some(Role::Decode), &asked.tried);
                let [first, second] = fleets.each_mut().map(|fleet| {
                    let mut chooser = Chooser { shard: SHARD, loads: &fleet.loads, turn: &mut fleet.turn };
                    choose_decode(&fleet.service, asked.session.map(EndpointIndex), &tried, &mut chooser)
                });
                prop_assert_eq!(first, second);
                prop_assert_eq!(first.is_none(), decode.is_empty());
                prop_assert!(first.is_none_or(|chosen| decode.contains(&chosen.index())));
            }
        }
        drop(carried_out);
        for fleet in &mut fleets {
            fleet.set_loads(&[]);
            let left = (0..drawn.len()).map(|slot| fleet.loads.total(LoadSlot(slot as u32)));
            prop_assert!(left.into_iter().all(|load| load == crate::load::Load::default()));
        }
    }
}
