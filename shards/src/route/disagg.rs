//! The cascade of P/D rules: who computes the prompt, and who the answer.
//!
//! Session → tree of texts → Tier 1.5 → least load, all over the prefill endpoints; then a decode endpoint; where there is
//! no usable pair of them, an endpoint that does whole requests.

use super::decision::{Decision, Reason, Terms, Tier};
use super::facts::Facts;
use super::rows::{Rows, Turn};
use super::{Chooser, select, tier15};
use crate::ids::EndpointIndex;
use crate::load::View;
use crate::service::{Disagg, Endpoint, MissReason, Role, Service};

/// Load factor of the cap at which a session's endpoint counts as overloaded, percent, where Tier 1.5 brings none.
const SESSION_LOAD_FACTOR: u32 = 175;

/// The prefill endpoint, or whoever does the whole request.
pub(super) fn choose_prefill(
    service: &Service,
    pd: &Disagg,
    facts: &Facts<'_>,
    chooser: &mut Chooser<'_>,
) -> Option<Decision> {
    let loads = chooser.loads.view(chooser.shard);
    let turn = &mut *chooser.turn;
    turn.rows.fill(service, Role::Prefill, facts.tried, loads);
    if turn.rows.candidates == 0 || !has_decode(service, facts) {
        turn.rows.fill(service, Role::Normal, facts.tried, loads);
        let place = select::least_connections(turn)?;
        return Some(plain(place, Tier::Rescue, Reason::Rescue, None, &turn.rows));
    }
    if let Some(place) = by_session(service, facts, &mut turn.rows, loads) {
        return Some(plain(place, Tier::Session, Reason::Session, None, &turn.rows));
    }
    if let Some(place) = by_trie(pd, facts, &turn.rows) {
        return Some(plain(place, Tier::Trie, Reason::Trie, None, &turn.rows));
    }
    match tier15::decide(service, facts, turn, loads) {
        Ok(decision) => Some(decision),
        Err(miss) => {
            let place = least_load(service, turn)?;
            Some(plain(place, Tier::LeastLoad, Reason::LeastLoad, Some(miss), &turn.rows))
        }
    }
}

/// The decode endpoint: the session's while it is a candidate, else the one with the least to do.
pub(super) fn choose_decode(
    service: &Service,
    pinned: Option<EndpointIndex>,
    tried: &[EndpointIndex],
    chooser: &mut Chooser<'_>,
) -> Option<EndpointIndex> {
    let loads = chooser.loads.view(chooser.shard);
    let turn = &mut *chooser.turn;
    turn.rows.fill(service, Role::Decode, tried, loads);
    let pinned = pinned.filter(|pinned| turn.rows.is_candidate(*pinned));
    pinned.or_else(|| least_load(service, turn).map(|place| EndpointIndex(place as u16)))
}

/// Whether somebody can compute the answer.
fn has_decode(service: &Service, facts: &Facts<'_>) -> bool {
    let decodes = |endpoint: &Endpoint| {
        endpoint.role == Role::Decode && endpoint.is_candidate() && !facts.tried.contains(&endpoint.shared.index)
    };
    service.endpoints.iter().any(decodes)
}

fn plain(place: usize, tier: Tier, reason: Reason, miss: Option<MissReason>, rows: &Rows) -> Decision {
    let terms = Terms { load: rows.load[place], total: rows.total, candidates: rows.candidates, cap: 0, cost: 0 };
    Decision { miss, terms, ..Decision::new(place, tier, reason) }
}

/// A session stays where it is, unless its endpoint has more than its share to do.
fn by_session(service: &Service, facts: &Facts<'_>, rows: &mut Rows, loads: View<'_>) -> Option<usize> {
    let place = facts.session.filter(|pin| rows.is_candidate(pin.prefill))?.prefill.index();
    let factor = service.kv.as_ref().map_or(SESSION_LOAD_FACTOR, |kv| kv.mean_load_factor);
    let stays = |rows: &Rows| u64::from(rows.load[place]) < rows.fleet_cap(place, factor);
    (stays(rows) || (rows.look_again(service, place, loads) && stays(rows))).then_some(place)
}

/// Where enough of the text was sent before, while the endpoints are about equally loaded.
fn by_trie(pd: &Disagg, facts: &Facts<'_>, rows: &Rows) -> Option<usize> {
    let found = facts.trie.filter(|found| pd.cache_aware && rows.is_candidate(found.endpoint))?;
    let loads = rows.candidates().map(|place| rows.load[place]);
    let spread = loads.clone().max()? - loads.min()?;
    let balanced = spread <= u32::from(pd.balance_threshold);
    (balanced && found.matched_percent >= pd.cache_threshold).then_some(found.endpoint.index())
}

/// The least requests in flight and waiting in the engine; whose queue is not known counts as the mean of the others.
fn least_load(service: &Service, turn: &mut Turn) -> Option<usize> {
    note_loads(service, turn);
    let Turn { rows, ties, .. } = turn;
    ties.least(rows.candidates(), |place| rows.key[place])
}

/// The least of something, and of equals the least loaded.
pub(super) fn least(service: &Service, turn: &mut Turn, of: impl Fn(&Turn, usize) -> u64) -> Option<usize> {
    note_loads(service, turn);
    for place in 0..turn.rows.worth.len() {
        if turn.rows.candidate[place] {
            turn.rows.worth[place] = of(turn, place);
        }
    }
    let Turn { rows, ties, .. } = turn;
    ties.least(rows.candidates(), |place| (rows.worth[place], rows.key[place]))
}

/// Notes the requests of each candidate, in flight and waiting in the engine.
fn note_loads(service: &Service, turn: &mut Turn) {
    let rows = &mut turn.rows;
    let queued = |place: usize| service.endpoints[place].shared.engine.queued().map(u64::from);
    let known = rows.candidates().filter_map(queued);
    let (count, sum) = known.fold((0_u64, 0_u64), |(count, sum), queued| (count + 1, sum + queued));
    let mean = sum.checked_div(count).unwrap_or(0);
    // Read once: the queue may change between two looks, and a tie must be found again.
    rows.key.clear();
    rows.key.resize(rows.load.len(), 0);
    for place in 0..rows.load.len() {
        rows.key[place] = u64::from(rows.load[place]) + queued(place).unwrap_or(mean);
    }
}
