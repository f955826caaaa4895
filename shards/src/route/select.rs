//! The rule's own `sel`, for what no tier above decides.
//!
//! Hashes go by all endpoints of the rule that could be candidates, up or not, so that one that fails moves its own
//! keys alone: those are spread over the candidates by the rest of the hash.

use super::decision::Reason;
use super::facts::Facts;
use super::rows::{Caps, Rows, Turn};
use super::ttft;
use crate::ids::EndpointIndex;
use crate::service::{Blend, Endpoint, Select, Service};

/// Chooses a candidate, by what, and what it costs in microseconds where that decided, else 0; none if there are none.
pub(super) fn choose(service: &Service, facts: &Facts<'_>, turn: &mut Turn) -> Option<(usize, Reason, u64)> {
    let select = service.select;
    if matches!(select, Select::Persist | Select::RoundRobin | Select::Expected)
        && let Some(pin) = facts.session.filter(|pin| turn.rows.is_candidate(pin.prefill))
    {
        return Some((pin.prefill.index(), Reason::Session, 0));
    }
    let key = facts.prefix.or(facts.conversation);
    let place = match (select, key) {
        (Select::ClientHash, _) => by_hash(service, facts.client, &turn.rows, |_| 1),
        (Select::Weighted, _) => weighted(service, turn),
        (Select::Persist, _) => persistent(session_key(service, facts), &turn.rows),
        (Select::LeastConnections, _) => least_connections(turn),
        (Select::PrefixHash, Some(key)) => by_hash(service, key, &turn.rows, |_| 1),
        (Select::WeightedHash, Some(key)) => by_hash(service, key, &turn.rows, |endpoint| endpoint.weight),
        (Select::BoundedHash, Some(key)) => bounded(service, key, turn),
        (Select::Expected, _) if service.kv.as_ref().is_some_and(|kv| kv.blend == Blend::Ttft) => {
            return least_work(service, facts, turn).map(|(place, cost)| (place, Reason::Sel(select), cost));
        }
        (Select::Expected | Select::RoundRobin, _)
        | (Select::PrefixHash | Select::WeightedHash | Select::BoundedHash, None) => round_robin(turn),
    };
    place.map(|place| (place, Reason::Sel(select), 0))
}

/// The candidate with the least expected time, whatever any has of the prompt, and that time; equals in turn.
fn least_work(service: &Service, facts: &Facts<'_>, turn: &mut Turn) -> Option<(usize, u64)> {
    let Turn { rows, ties, busy, .. } = turn;
    let kv = service.kv.as_ref()?;
    rows.worth.fill(0);
    ttft::choose(service, kv, facts.prompt_tokens(), &[], rows, (ties, busy))
}

/// The next candidate in order.
fn round_robin(turn: &mut Turn) -> Option<usize> {
    let endpoints = turn.rows.candidate.len();
    let chosen =
        (turn.next..turn.next + endpoints).map(|place| place % endpoints).find(|&place| turn.rows.candidate[place])?;
    turn.next = (chosen + 1) % endpoints;
    Some(chosen)
}

pub(super) fn least_connections(turn: &mut Turn) -> Option<usize> {
    let Turn { rows, ties, .. } = turn;
    ties.least(rows.candidates(), |place| rows.load[place])
}

/// Everybody is owed its weight each round, and who is owed most pays the whole round for being chosen.
fn weighted(service: &Service, turn: &mut Turn) -> Option<usize> {
    turn.owed.resize(service.endpoints.len(), 0);
    let rounds = std::mem::take(&mut turn.ahead) % service.endpoints.len().max(1);
    let mut chosen = None;
    for _ in 0..=rounds {
        let mut round = 0;
        chosen = None;
        for place in turn.rows.candidates() {
            let weight = i64::from(service.endpoints[place].weight);
            round += weight;
            turn.owed[place] += weight;
            if chosen.is_none_or(|best: usize| turn.owed[place] > turn.owed[best]) {
                chosen = Some(place);
            }
        }
        if let Some(chosen) = chosen {
            turn.owed[chosen] -= round;
        }
    }
    chosen
}

/// The endpoint at the hash's place among all of them, each as wide as its share; where it is no candidate, the one at
/// the place of the rest of the hash among the candidates.
fn by_hash(service: &Service, key: u64, rows: &Rows, share: impl Fn(&Endpoint) -> u32) -> Option<usize> {
    let is_member = |endpoint: &Endpoint| {
        !endpoint.retired && endpoint.weight > 0 && endpoint.backup == rows.backups && endpoint.role == rows.role
    };
    let endpoints = service.endpoints.iter().enumerate();
    let members = endpoints.filter(|(_, endpoint)| is_member(endpoint)).map(|(place, _)| place);
    let share = |place: usize| u64::from(share(&service.endpoints[place]));
    let (place, rest) = at_point(key, members, share)?;
    if rows.candidate[place] {
        return Some(place);
    }
    at_point(rest, rows.candidates(), share).map(|(place, _)| place)
}

/// Who stands at the key modulo all shares, and the key divided by them.
fn at_point(
    key: u64,
    places: impl Iterator<Item = usize> + Clone,
    share: impl Fn(usize) -> u64,
) -> Option<(usize, u64)> {
    let sum: u64 = places.clone().map(&share).sum();
    let mut point = key.checked_rem(sum)?;
    for place in places {
        let own = share(place);
        if point < own {
            return Some((place, key / sum));
        }
        point -= own;
    }
    None
}

/// The first candidate on the ring from the key on with less than its bound of `⌈factor × (total + 1) / (100 × n)⌉`
/// requests, this one counted in the total.
fn bounded(service: &Service, key: u64, turn: &mut Turn) -> Option<usize> {
    let rows = &turn.rows;
    let bound = Caps::new(service.hashing.mean_load_factor.into(), rows.total + 1, rows.candidates.into()).of(1);
    let has_room =
        |endpoint: &EndpointIndex| rows.is_candidate(*endpoint) && u64::from(rows.load[endpoint.index()]) < bound;
    let on_ring = service.ring.as_ref().and_then(|ring| ring.from(key).find(has_room));
    on_ring.map(EndpointIndex::index).or_else(|| least_connections(turn))
}

fn session_key(service: &Service, facts: &Facts<'_>) -> u64 {
    let named = service.sessions.as_ref().is_some_and(|sessions| sessions.source.is_some());
    facts.conversation.filter(|_| named).unwrap_or(facts.client)
}

/// The candidate that the key ranks first. Whoever comes takes over only what ranks it first, and whoever goes leaves
/// only its own behind.
fn persistent(key: u64, rows: &Rows) -> Option<usize> {
    rows.candidates().max_by_key(|place| mix(key ^ mix(*place as u64 + 1)))
}

/// Mixes a number's bits: the finalizer of MurmurHash3.
fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    value = (value ^ (value >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    value ^ (value >> 33)
}
