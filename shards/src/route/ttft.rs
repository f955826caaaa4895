//! The blend `ttft`: the endpoint where the request and those after it wait least for their first tokens.
//!
//! For each candidate, in seconds, with what is learned of the service's pace and the endpoint's factor (see
//! [`crate::rates`]):
//!
//! ```text
//! cost = factor × (waiting + own + others + answers + crowding)
//! waiting  = start × (prompts + 1) + per_token × work(tokens)     what stands in line there, and the request's own start
//! own      = per_token × work(uncached)                           its tokens that the endpoint does not have
//! others   = per_token × uncached × throughput × ρ / (1 − ρ)      what these cost whoever comes after it
//! answers  = per_token × computed / 4 × answers                   what answers under way will come back with
//! crowding = per_token × held × CROWDING × ((load + 1) / cap)²    whom relief will send away for it
//! ```
//!
//! `prompts`, `tokens` and `answers` are what is in flight at the endpoint, `uncached` what neither its own run covers
//! nor the beginning that a request under way will have stored there. `computed` is how much of a prompt its endpoint had
//! to compute, and `held` how much of it somebody had, both averaged over the last decisions.
//!
//! ρ is how often a decision finds prompts being computed at an endpoint, averaged over candidates and the last
//! decisions. A token that is computed although another endpoint has it delays all that stand in line behind it: in the
//! long run `ρ / (1 − ρ)` of them. Without the term, a busy fleet computes everything everywhere, is busier for it, and
//! does not come out of that again; with it, nothing has to be tuned: an idle fleet goes by the request's own time, a
//! full one by the work it saves. `throughput` (percent) is the one knob: 0 for the request's own time alone, more for fewer
//! computed tokens at the price of later first ones. It is 200 by default: a token that is computed again also takes the
//! place of another one in a cache.
//!
//! Where relief is on, whoever takes the last place below the fleet-wide cap of an endpoint sends the next one away, and
//! with it as much work as its cache saves. *Crowding* lets a request that loses little elsewhere leave the place to one
//! that would lose much. Where an endpoint is at its cap already, `tier15.rs` foresees what relief would do.
//!
//! Of equals the one that has more of the prompt now; what is equal in that too takes turns. Costs within [`ALIKE_US`] of
//! the least are equal: nobody notices such times, and what is learned of two fast endpoints differs by chance.

use super::facts::Claimed;
use super::overlap::DEVICE_WORTH;
use super::rows::{Rows, Ties};
use super::tier15::{best_claim, whole_blocks};
use crate::rates::{Pace, work};
use crate::service::{KvExact, Service};

/// What an answer under way counts for: a part of what prompts come with, as its conversation goes on some time later.
const ANSWER_PART: f32 = 0.25;
/// What the last place below a cap is worth, over what a prompt's endpoint has of it.
const CROWDING: f32 = 1.5;
/// Decisions over which is averaged.
const DECISIONS: f32 = 64.0;
/// ρ counts as no more: beyond it the queue's length is the guide.
const BUSY_MOST: f32 = 0.98;
/// Costs that differ by no more are equal, in microseconds.
pub(super) const ALIKE_US: u64 = 2_000;
/// Costs are counted in millionths of a second; none is more than a day.
const UNITS: f32 = 1e6;
const COST_MOST: f32 = 86_400.0;

/// What one shard remembers of its last decisions, averaged.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Busy {
    /// How often prompts were found being computed (ρ).
    computing: f32,
    /// Tokens of a prompt that the endpoint with most of it had.
    held: f32,
    /// Tokens of a prompt that the chosen endpoint had not.
    computed: f32,
}

impl Busy {
    /// Takes note of what the candidates do now, and of what they have of the prompt.
    fn note(&mut self, rows: &Rows) {
        let busy = rows.candidates().filter(|place| rows.flight(*place).prefill > 0).count();
        drift(&mut self.computing, busy as f32 / rows.candidates.max(1) as f32);
        let most = rows.holders.iter().map(|place| rows.worth[usize::from(*place)]).max().unwrap_or(0);
        drift(&mut self.held, (most / DEVICE_WORTH) as f32);
    }
}

fn drift(mean: &mut f32, now: f32) {
    *mean += (now - *mean) / DECISIONS;
}

/// What work costs at the moment, whichever endpoint does it.
struct Prices {
    pace: Pace,
    /// How much the pace was learned from.
    lessons: u32,
    /// Of an uncached token, for whoever comes after: so many times itself.
    others: f32,
    /// Of an answer under way, in tokens.
    answer: f32,
    /// Of the last place below the cap, in tokens; 0 = nobody is sent away.
    crowding: f32,
    /// Requests below the cap per block of a candidate's cache.
    places: f32,
}

impl Prices {
    fn now(service: &Service, kv: &KvExact, rows: &Rows, busy: &Busy) -> Self {
        let computing = busy.computing.min(BUSY_MOST);
        Prices {
            pace: service.shared.rates.pace(),
            lessons: service.shared.rates.lessons(),
            others: kv.throughput as f32 / 100.0 * computing / (1.0 - computing),
            answer: ANSWER_PART * busy.computed,
            crowding: if kv.spill_relief { CROWDING * busy.held } else { 0.0 },
            places: kv.mean_load_factor as f32 / 100.0 * rows.total as f32 / rows.capacity_sum.max(1) as f32,
        }
    }

    /// The cost of so many uncached tokens at a candidate, at the service's pace, in seconds.
    fn cost(&self, rows: &Rows, place: usize, uncached: u64) -> f32 {
        let flight = rows.flight(place);
        let mut tokens = work(flight.tokens.saturating_add(uncached), flight.decode)
            + uncached as f32 * self.others
            + flight.decode as f32 * self.answer;
        if self.crowding > 0.0 {
            let cap = (self.places * rows.capacity(place) as f32).ceil().max(1.0);
            let crowded = ((rows.load[place] + 1) as f32 / cap).min(1.0);
            tokens += self.crowding * crowded * crowded;
        }
        self.pace.start * (flight.prefill + 1) as f32 + self.pace.per_token * tokens
    }
}

/// The candidate with the least cost for a prompt of so many tokens, of which requests under way will have stored what
/// they claim; and the cost in microseconds. None if there are no candidates. Leaves the costs in the rows' keys.
pub(super) fn choose(
    service: &Service,
    kv: &KvExact,
    tokens: u64,
    claims: &[Claimed],
    rows: &mut Rows,
    (ties, busy): (&mut Ties, &mut Busy),
) -> Option<(usize, u64)> {
    // The last token is always computed.
    let most = tokens.saturating_sub(1);
    rows.key.clear();
    rows.key.extend(rows.worth.iter().map(|worth| worth / DEVICE_WORTH));
    for claim in claims {
        if let Some(held) = rows.key.get_mut(claim.endpoint.index()) {
            *held = (*held).max(whole_blocks(kv, *claim));
        }
    }
    busy.note(rows);
    let prices = Prices::now(service, kv, rows, busy);
    for place in 0..rows.key.len() {
        if rows.candidate[place] {
            let uncached = tokens - rows.key[place].min(most);
            let factor = service.endpoints[place].shared.slowness.factor(prices.lessons);
            let seconds = factor * prices.cost(rows, place, uncached);
            rows.key[place] = (seconds.min(COST_MOST) * UNITS) as u64;
        }
    }
    let least = rows.candidates().map(|place| rows.key[place]).min()?;
    // Of equals the one that has more of the prompt now: what is only on its way may not come.
    let equals = rows.candidates().filter(|place| rows.key[*place] <= least + ALIKE_US);
    let place = ties.least(equals, |place| u64::MAX - rows.worth[place])?;
    let held = best_claim(claims, place).map_or(0, |claim| whole_blocks(kv, claim));
    let held = held.max(rows.worth[place] / DEVICE_WORTH);
    drift(&mut busy.computed, (tokens - held.min(most)) as f32);
    Some((place, rows.key[place]))
}
