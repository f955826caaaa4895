//! The endpoints as one decision sees them, and what one shard keeps from decision to decision.

use std::cell::Cell;

use super::ttft::Busy;
use crate::ids::{EndpointIndex, ShardId};
use crate::inventory::Run;
use crate::load::{Load, LoadSlot, Packed, View};
use crate::service::{Edition, Role, Service, magnitude};

/// Most blocks that an engine's cache counts as; more would only be a lie, or beyond what multiplies without overflow.
pub(super) const CAPACITY_MAX: u32 = 8_000_000;
/// Most requests that enter a cap, for the same reason.
const TOTAL_MAX: u64 = 1 << 30;

/// What one shard keeps for one service from decision to decision: whose turn it is, and memory to decide in.
#[derive(Debug, Default)]
pub struct Turn {
    /// Endpoint that round robin looks at next.
    pub(super) next: usize,
    /// Whose turn it is among equals.
    pub(super) ties: Ties,
    /// What weighted round robin owes each endpoint.
    pub(super) owed: Vec<i64>,
    /// Rounds of weighted round robin by which this shard is ahead at its first.
    pub(super) ahead: usize,
    /// How often prompts were found being computed.
    pub(super) busy: Busy,
    /// A row per endpoint, filled anew for each decision.
    pub(super) rows: Rows,
}

impl Turn {
    /// Each shard starts at another endpoint.
    #[must_use]
    pub fn starting_at(shard: ShardId) -> Self {
        let place = shard.index();
        Turn { next: place, ties: Ties(u32::from(shard.0)), ahead: place, ..Turn::default() }
    }
}

/// Breaks ties.
#[derive(Debug, Default)]
pub(super) struct Ties(u32);

impl Ties {
    /// A number below `count`, evenly spread over any regular subsequence of the ties too: a plain counter would give
    /// every other tie (and so one of two alternating prompts) to the same endpoints again and again. The multiples of
    /// the golden ratio have that property.
    fn next_below(&mut self, count: usize) -> usize {
        let fraction = self.0.wrapping_mul(0x9e37_79b9);
        self.0 = self.0.wrapping_add(1);
        ((u64::from(fraction) * count as u64) >> 32) as usize
    }

    /// The place with the least key; equals take turns. A key of one number is compared without a branch, which nobody
    /// could foresee: see [`pair`].
    pub(super) fn least<K: Ord + Copy>(
        &mut self,
        places: impl Iterator<Item = usize> + Clone,
        key: impl Fn(usize) -> K,
    ) -> Option<usize> {
        let mut rest = places.clone();
        let mut place = rest.next()?;
        let (mut least, mut equals) = (key(place), 1);
        for other in rest {
            let own = key(other);
            let (less, equal) = (own < least, own == least);
            equals = if less { 1 } else { equals + usize::from(equal) };
            place = if less { other } else { place };
            least = if less { own } else { least };
        }
        if equals == 1 {
            return Some(place);
        }
        let turn = self.next_below(equals);
        places.filter(|place| key(*place) == least).nth(turn)
    }
}

/// A key of two numbers, the first of which counts more.
pub(super) fn pair(first: impl Into<u64>, second: impl Into<u64>) -> u128 {
    u128::from(first.into()) << 64 | u128::from(second.into())
}

/// What says who is a candidate, but for what the request at hand has tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Standing {
    edition: Edition,
    role: Role,
    backups: bool,
    /// An endpoint that holds fewer blocks is cold.
    cold_below: u64,
}

/// The endpoints of a service by index, a column per property.
///
/// **Invariant.** What `kept` names is what candidates, slots, capacities and their sums, and who may be cold, were read at:
/// while it is the same, so are they. It is none where one request's own view of them stands there.
#[derive(Debug, Default)]
pub(super) struct Rows {
    kept: Option<Standing>,
    /// Whether it may be chosen.
    pub(super) candidate: Vec<bool>,
    /// Requests in flight.
    pub(super) load: Vec<u32>,
    /// The same by what they wait for.
    flight: Vec<Packed>,
    /// Blocks of its engine's cache, at most `CAPACITY_MAX`; 0 = not known.
    capacity: Vec<u32>,
    /// Where its load stands.
    slot: Vec<LoadSlot>,
    /// Candidates that hold so little that they may be cold.
    maybe_cold: Vec<u16>,
    /// What the best of its runs is worth, in hundredths of a token in device memory.
    pub(super) worth: Vec<u64>,
    /// Place of that run among the request's runs.
    pub(super) run: Vec<u32>,
    /// Candidates whose `worth` is not 0.
    pub(super) holders: Vec<u16>,
    /// Those of them that have most.
    pub(super) best: Vec<u16>,
    /// Requests in flight at holders.
    pub(super) holders_load: u64,
    /// Capacity of holders.
    pub(super) holders_capacity: u64,
    /// How many are candidates.
    pub(super) candidates: u32,
    /// Requests in flight at all candidates.
    pub(super) total: u64,
    /// The two first cold candidates: one of them may be the winner.
    pub(super) cold: [Option<usize>; 2],
    /// The candidates are the backups.
    pub(super) backups: bool,
    /// The candidates' role.
    pub(super) role: Role,
    /// What the least of is looked for, where that is not a column of its own.
    pub(super) key: Vec<u64>,
    /// Capacity of candidates that do not tell theirs: the mean of those that do, else 1.
    capacity_else: u64,
    /// Capacity of all candidates.
    pub(super) capacity_sum: u64,
}

impl Rows {
    /// Reads who of a role is a candidate and what it is loaded with.
    pub(super) fn fill(&mut self, service: &Service, role: Role, tried: &[EndpointIndex], loads: View<'_>) {
        self.role = role;
        self.backups = false;
        self.read(service, tried, loads);
        if self.candidates == 0 && service.endpoints.iter().any(|endpoint| endpoint.backup) {
            self.backups = true;
            self.read(service, tried, loads);
        }
    }

    /// What every one of hundreds of endpoints costs is what counts here. Who is a candidate changes seldom, and is kept;
    /// loads are read anew, and added up afterwards, many at once.
    fn read(&mut self, service: &Service, tried: &[EndpointIndex], loads: View<'_>) {
        let standing = Standing {
            edition: service.endpoints.edition(),
            role: self.role,
            backups: self.backups,
            // A floor of 0 means that only an empty endpoint is cold.
            cold_below: service.kv.as_ref().map_or(0, |kv| u64::from(kv.seed_min_blocks.max(1))),
        };
        if self.kept != Some(standing) {
            self.read_standing(service, &standing);
        }
        // What one request has tried is left out for that request alone.
        self.kept = tried.is_empty().then_some(standing);
        self.leave_out(tried);
        self.worth.clear();
        self.worth.resize(self.candidate.len(), 0);
        self.holders.clear();
        self.best.clear();
        (self.holders_load, self.holders_capacity) = (0, 0);
        let flight = |(slot, candidate): (&LoadSlot, &bool)| loads.packed(*slot).only_if(*candidate);
        self.flight.clear();
        self.flight.extend(self.slot.iter().zip(&self.candidate).map(flight));
        self.load.clear();
        self.load.extend(self.flight.iter().map(|flight| flight.requests()));
        self.total = self.load.iter().map(|load| u64::from(*load)).sum();
        self.find_cold(service, standing.cold_below);
    }

    /// Who is a candidate, where its load stands, what its cache holds at most, and who may be cold.
    fn read_standing(&mut self, service: &Service, standing: &Standing) {
        let Standing { role, backups, cold_below, .. } = *standing;
        let count = service.endpoints.len();
        self.candidate.resize(count, false);
        self.capacity.resize(count, 0);
        self.slot.resize(count, LoadSlot(0));
        self.run.resize(count, 0);
        self.maybe_cold.clear();
        for (place, endpoint) in service.endpoints.iter().enumerate() {
            let cell = endpoint.vitals.cell();
            let candidate = endpoint.is_candidate() && endpoint.role == role && endpoint.backup == backups;
            self.candidate[place] = candidate;
            self.capacity[place] = if candidate { cell.cache_blocks().min(CAPACITY_MAX) } else { 0 };
            self.slot[place] = endpoint.vitals.slot();
            if candidate && magnitude(cell.kv_blocks()) <= magnitude(cold_below) {
                self.maybe_cold.push(place as u16);
            }
        }
        self.sum_up();
    }

    /// Takes out who has refused the request.
    fn leave_out(&mut self, tried: &[EndpointIndex]) {
        if tried.is_empty() {
            return;
        }
        let count = self.candidate.len();
        for place in tried.iter().map(|tried| tried.index()).filter(|place| *place < count) {
            (self.candidate[place], self.capacity[place]) = (false, 0);
        }
        self.maybe_cold.retain(|place| self.candidate[usize::from(*place)]);
        self.sum_up();
    }

    /// Adds up the columns, in which what is no candidate has nothing.
    fn sum_up(&mut self) {
        self.candidates = self.candidate.iter().map(|candidate| u32::from(*candidate)).sum();
        let known: u32 = self.capacity.iter().map(|blocks| u32::from(*blocks > 0)).sum();
        let known_sum: u64 = self.capacity.iter().map(|blocks| u64::from(*blocks)).sum();
        self.capacity_else = known_sum.checked_div(known.into()).unwrap_or(1);
        self.capacity_sum = known_sum + u64::from(self.candidates - known) * self.capacity_else;
    }

    /// Who of those that may be cold is.
    fn find_cold(&mut self, service: &Service, below: u64) {
        let places = self.maybe_cold.iter().map(|place| usize::from(*place));
        let mut cold = places.filter(|place| service.endpoints[*place].vitals.cell().kv_blocks() < below);
        self.cold = [cold.next(), cold.next()];
    }

    /// Notes what each run is worth in its endpoint's row, where it is the best there and that is a candidate: an endpoint
    /// that the tables do not know yet, or no longer, is nobody's. Returns the most.
    pub(super) fn note_overlap<'a>(&mut self, runs: &'a [Run], worth: impl Fn(&'a Run) -> u64) -> u64 {
        let Rows { candidate, worth: best, run: best_run, holders, .. } = self;
        // Known to be of one length, so that one comparison is enough for all of them.
        let count = candidate.len();
        let (best, best_run) = (&mut best[..count], &mut best_run[..count]);
        // Written without a look at the room that is left.
        holders.resize(runs.len(), 0);
        let (mut most, mut found) = (0, 0);
        for (number, run) in runs.iter().enumerate() {
            let place = run.endpoint.index();
            if place >= count || !candidate[place] {
                continue;
            }
            let worth = worth(run);
            let before = best[place];
            if worth > before {
                holders[found] = run.endpoint.0;
                found += usize::from(before == 0);
                (best[place], best_run[place]) = (worth, number as u32);
                most = most.max(worth);
            }
        }
        holders.truncate(found);
        self.sum_up_holders(most);
        most
    }

    /// Adds up what holders have in flight and hold, and finds those with the most.
    fn sum_up_holders(&mut self, most: u64) {
        self.best.resize(self.holders.len(), 0);
        let (mut best, mut load, mut capacity) = (0, 0, 0);
        for holder in &self.holders {
            let place = usize::from(*holder);
            // No branch: nobody can foresee who has most.
            self.best[best] = *holder;
            best += usize::from(self.worth[place] == most);
            load += u64::from(self.load[place]);
            capacity += self.capacity(place);
        }
        self.best.truncate(best);
        (self.holders_load, self.holders_capacity) = (load, capacity);
    }

    /// What is in flight at a candidate, by what it waits for.
    pub(super) fn flight(&self, place: usize) -> Load {
        self.flight[place].load()
    }

    /// Looks at a candidate's load again, other shards' included: what they publish is a moment old, and a winner is not
    /// passed over for a request that has ended. True if it is another one.
    pub(super) fn look_again(&mut self, service: &Service, place: usize, loads: View<'_>) -> bool {
        let flight = loads.exact(service.endpoints[place].shared.slot);
        let load = flight.requests();
        self.flight[place] = flight;
        let before = std::mem::replace(&mut self.load[place], load);
        let again = |sum: u64| sum - u64::from(before) + u64::from(load);
        self.total = again(self.total);
        if self.worth[place] > 0 {
            self.holders_load = again(self.holders_load);
        }
        load != before
    }

    /// The candidates' places.
    pub(super) fn candidates(&self) -> impl Iterator<Item = usize> + Clone {
        self.candidate.iter().enumerate().filter(|(_, candidate)| **candidate).map(|(place, _)| place)
    }

    /// Whether the endpoint may be chosen.
    pub(super) fn is_candidate(&self, index: EndpointIndex) -> bool {
        self.candidate.get(index.index()).copied().unwrap_or(false)
    }

    /// Blocks that the candidate's cache counts as.
    pub(super) fn capacity(&self, place: usize) -> u64 {
        match self.capacity[place] {
            0 => self.capacity_else,
            blocks => u64::from(blocks),
        }
    }

    /// Requests from which on a candidate has its share of the load of all.
    pub(super) fn fleet_cap(&self, place: usize, factor: u32) -> u64 {
        self.fleet_caps(factor).of(self.capacity(place))
    }

    /// The same for many.
    pub(super) fn fleet_caps(&self, factor: u32) -> Caps {
        Caps::new(factor, self.total, self.capacity_sum)
    }
}

/// Requests from which on somebody has his share: ⌈factor × total × own / (100 × sum)⌉ for capacities `own` and `sum`,
/// and at least 1; the factor is in percent.
#[derive(Debug)]
pub(super) struct Caps {
    /// Factor × total.
    share: u64,
    /// 100 × sum.
    all: u64,
    /// The capacity asked for last, and its cap: most are like the one before, and a division takes longer than all else.
    last: Cell<(u64, u64)>,
}

impl Caps {
    pub(super) fn new(factor: u32, total: u64, sum: u64) -> Self {
        // Nobody's capacity is 0, and its cap would be 1.
        Caps { share: u64::from(factor) * total.min(TOTAL_MAX), all: 100 * sum.max(1), last: Cell::new((0, 1)) }
    }

    /// The cap of who has so much capacity.
    pub(super) fn of(&self, own: u64) -> u64 {
        let (last, cap) = self.last.get();
        if last == own {
            return cap;
        }
        let cap = (self.share * own).div_ceil(self.all).max(1);
        self.last.set((own, cap));
        cap
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::block::{Contract, FIXED_SEED, HashAlgo, NoneHash};
    use crate::ids::ServiceId;
    use crate::inventory;
    use crate::load::LoadTable;
    use crate::service::{Endpoint, EndpointShared, KvExact};

    const ENDPOINTS: u16 = 5;

    fn service() -> Service {
        let (_, readers) = inventory::new(&inventory::Options { blocks_expected: 1 });
        let contract = Contract::vllm(NoneHash::from_seed(HashAlgo::Sha256Cbor, FIXED_SEED));
        let endpoint = |index: u16| {
            let shared = EndpointShared::new(EndpointIndex(index), LoadSlot(u32::from(ENDPOINTS - 1 - index)), 1);
            Endpoint::at(([127, 0, 0, 1], 9_000 + index).into(), shared)
        };
        Service {
            kv: Some(KvExact::with_defaults(16, contract, readers)),
            ..Service::plain(ServiceId(0), ([127, 0, 0, 1], 80).into(), (0..ENDPOINTS).map(endpoint).collect(), 1)
        }
    }

    /// All that is read of the endpoints, but for what `kept` allows to be older.
    fn seen(rows: &Rows) -> impl PartialEq + std::fmt::Debug + use<> {
        let columns = (rows.candidate.clone(), rows.load.clone(), rows.flight.clone(), rows.capacity.clone());
        let sums = (rows.candidates, rows.total, rows.capacity_else, rows.capacity_sum);
        (columns, sums, rows.cold, rows.backups, rows.worth.clone())
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_is_kept_from_decision_to_decision_is_what_would_be_read_anew(
            steps in prop::collection::vec((0_u8..11, 0..ENDPOINTS, 0_u32..40), 1..60),
        ) {
            let mut service = service();
            let loads = Arc::new(LoadTable::new(1, ENDPOINTS.into()));
            let (mut kept, mut in_flight, mut role) = (Rows::default(), Vec::new(), Role::Normal);
            for (step, index, value) in steps {
                let mut tried = Vec::new();
                let place = usize::from(index);
                let shared = Arc::clone(&service.endpoints[place].shared);
                match step {
                    0 => _ = shared.mark_down(),
                    1 => _ = shared.mark_up(),
                    2 => shared.set_kv_blocks(value.into()),
                    3 => shared.set_cache_blocks(Some(value)),
                    4 => service.endpoints[place].weight = value % 2,
                    5 => service.endpoints[place].backup = value % 2 == 0,
                    6 => service.endpoints[place].retired = value % 2 == 0,
                    7 => role = if value % 2 == 0 { Role::Prefill } else { Role::Normal },
                    8 => in_flight.push(loads.reserve(ShardId(0), LoadSlot(index.into()), value.into())),
                    9 => service.kv.as_mut().expect("it has one").seed_min_blocks = value,
                    _ => tried = vec![EndpointIndex(index), EndpointIndex(ENDPOINTS + 1)],
                }
                let mut anew = Rows::default();
                for rows in [&mut kept, &mut anew] {
                    rows.fill(&service, role, &tried, loads.view(ShardId(0)));
                }
                prop_assert_eq!(seen(&kept), seen(&anew));
            }
        }
    }
}
