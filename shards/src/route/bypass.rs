//! Who could do a request of a P/D rule alone, sooner than its prompt's blocks would be moved there.
//!
//! A decode endpoint that lacks `missing` of a prompt's tokens has two ways to begin its answer, once it is its turn:
//!
//! ```text
//! alone = factor × (start + per_token × work(waiting + missing))      it computes them           (the service's pace)
//! moved = start' + per_token' × missing                               they are computed elsewhere and moved to it
//! ```
//!
//! It goes alone where `alone ≤ moved`: it has computed them before it would have had them. What the prefill endpoint
//! would have taken is left out, so that the answers under way at the decode endpoint wait no longer for the prompt than
//! they would have for its arrival; the request itself gains all of that time. At an idle endpoint of factor 1 that is
//! `missing ≤ (start' − start) / (per_token − per_token')` tokens, the *break-even*. A rule may name a number instead.

use super::rows::Turn;
use super::{Chooser, disagg};
use crate::ids::{EndpointIndex, Rank};
use crate::inventory::{Medium, Run};
use crate::rates::{Pace, Rates, Slowness};
use crate::service::{Bypass, Disagg, Role, Service};

/// Answers that both paces must have been learned from before anything is decided by them.
pub const LESSONS_MIN: u32 = 16;
/// Costs are compared in microseconds; none is more than a day.
const MICROS: f32 = 1e6;
const SECONDS_MOST: f32 = 86_400.0;

/// What is asked of a request that might do without a prefill endpoint.
#[derive(Clone, Copy, Debug)]
pub struct Alone<'a> {
    /// Tokens of its prompt, exact or guessed; 0 = nothing is known, and nothing is decided.
    pub prompt_tokens: u64,
    /// What decode endpoints hold of it.
    pub runs: &'a [Run],
    /// The decode endpoint of its session.
    pub pinned: Option<EndpointIndex>,
    /// The client says which rank is to serve it, or leaves it to the engine.
    pub names_rank: bool,
}

/// Why a request goes straight to a decode endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Why {
    /// Its prompt is short.
    Short,
    /// Nearly all of its prompt is there.
    Held,
}

impl Why {
    /// Both, in the order of the counters.
    pub const ALL: [Why; 2] = [Why::Short, Why::Held];

    /// The label value.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Why::Short => "short",
            Why::Held => "held",
        }
    }
}

/// A decode endpoint that does a request alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Straight {
    /// The endpoint.
    pub endpoint: EndpointIndex,
    /// Why.
    pub why: Why,
    /// The rank to be asked for, where a header chooses it and it holds something.
    pub rank: Option<Rank>,
    /// Tokens of the prompt that it holds.
    pub held: u64,
    /// Tokens that it has to compute.
    pub missing: u64,
}

/// Whether so many missing tokens are few enough, and what the endpoint costs.
struct Terms<'a> {
    service: &'a Service,
    /// The rule's own number; none = by what is learned.
    most: Option<u64>,
}

impl Terms<'_> {
    /// Seconds until the endpoint has computed them, what waits there before them.
    fn alone(&self, turn: &Turn, place: usize, missing: u64) -> f32 {
        let flight = turn.rows.flight(place);
        let slowness = &self.service.endpoints[place].shared.slowness;
        let rates = &self.service.shared.rates;
        rates.expected_seconds(slowness, flight.tokens.saturating_add(missing), flight.decode)
    }

    fn fits(&self, turn: &Turn, place: usize, missing: u64) -> bool {
        match self.most {
            Some(most) => missing <= most,
            None => {
                let moves = &self.service.shared.moves;
                self.alone(turn, place, missing) <= moves.expected_seconds(&Slowness::default(), missing, 0)
            }
        }
    }
}

/// The endpoint that would be done first, if it is done before the prompt would have been moved; none where the rule does
/// not ask for that, nothing is learned yet, or no decode endpoint is a candidate. A session stays where it is.
pub(super) fn choose(service: &Service, pd: &Disagg, alone: &Alone<'_>, chooser: &mut Chooser<'_>) -> Option<Straight> {
    let most = (pd.bypass_tokens > 0).then_some(u64::from(pd.bypass_tokens));
    let learned = || [&service.shared.rates, &service.shared.moves].iter().all(|rates| rates.lessons() >= LESSONS_MIN);
    if pd.bypass == Bypass::Off || alone.prompt_tokens == 0 || !(most.is_some() || learned()) {
        return None;
    }
    let loads = chooser.loads.view(chooser.shard);
    let turn = &mut *chooser.turn;
    turn.rows.fill(service, Role::Decode, &[], loads);
    let terms = Terms { service, most };
    let straight = |turn: &Turn, place: usize| {
        let (held, rank) = held_at(service, alone, place);
        let missing = alone.prompt_tokens - held;
        let why = if terms.fits(turn, place, alone.prompt_tokens) { Why::Short } else { Why::Held };
        let straight = Straight { endpoint: EndpointIndex(place as u16), why, rank, held, missing };
        terms.fits(turn, place, missing).then_some(straight)
    };
    let pinned = alone.pinned.filter(|pinned| turn.rows.is_candidate(*pinned));
    if let Some(straight) = pinned.and_then(|pinned| straight(turn, pinned.index())) {
        return Some(straight);
    }
    let micros = |turn: &Turn, place: usize| {
        let missing = alone.prompt_tokens - held_at(service, alone, place).0;
        (terms.alone(turn, place, missing).min(SECONDS_MOST) * MICROS) as u64
    };
    disagg::least(service, turn, micros).and_then(|place| straight(turn, place))
}

/// Tokens of the prompt in the endpoint's device memory, of which the last is always computed: those of its best rank,
/// and that, where a header chooses the rank; else the mean of its ranks.
fn held_at(service: &Service, alone: &Alone<'_>, place: usize) -> (u64, Option<Rank>) {
    let Some(kv) = &service.kv else { return (0, None) };
    let block = u64::from(kv.block_tokens.max(1));
    let tokens = |run: &Run| u64::from(run.blocks).min(alone.prompt_tokens.saturating_sub(1) / block) * block;
    let here = |run: &&Run| run.endpoint.index() == place && run.medium == Medium::Device;
    let runs = alone.runs.iter().filter(here);
    if kv.ranks > 1 && (alone.names_rank || !service.endpoints[place].shared.conveys_rank()) {
        return (runs.map(tokens).sum::<u64>() / u64::from(kv.ranks), None);
    }
    let best = runs.max_by_key(|run| run.blocks);
    best.map_or((0, None), |run| (tokens(run), Some(run.rank).filter(|_| kv.ranks > 1)))
}

/// Missing tokens up to which an idle endpoint of the service's pace goes alone; none while that is not learned.
#[must_use]
pub fn break_even(rates: &Rates, moves: &Rates) -> Option<u32> {
    if rates.lessons().min(moves.lessons()) < LESSONS_MIN {
        return None;
    }
    let (computing, moving): (Pace, Pace) = (rates.pace(), moves.pace());
    let (ahead, per_token) = (moving.start - computing.start, computing.per_token - moving.per_token);
    Some(match (ahead < 0.0, per_token > 0.0) {
        (true, _) => 0,
        (false, true) => (ahead / per_token).min(u32::MAX as f32) as u32,
        (false, false) => u32::MAX,
    })
}
