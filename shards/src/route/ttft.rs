//! The blend `ttft`: the endpoint where the request and those after it wait least for their first tokens.
//!
//! For each candidate, in seconds, with what is learned of the service's pace and the endpoint's factor (see
//! [`crate::rates`]):
//!
//! ```text
//! cost = factor × (waiting + own + others + answers)
//! waiting = start × (prompts + 1) + per_token × work(tokens)     what stands in line there, and the request's own start
//! own     = per_token × work(uncached)                           its tokens that the endpoint does not have
//! others  = per_token × uncached × throughput × ρ / (1 − ρ)      what these cost whoever comes after it
//! answers = per_token × ANSWER_TOKENS × answers                  what answers under way will still ask for
//! ```
//!
//! `prompts`, `tokens` and `answers` are what is in flight at the endpoint, `uncached` what neither its own run covers
//! nor the beginning that a request under way will have stored there.
//!
//! ρ is how often a decision finds prompts being computed at an endpoint, averaged over candidates and the last
//! decisions. A token that is computed although another endpoint has it delays all that stand in line behind it: in the
//! long run `ρ / (1 − ρ)` of them. Without the term, a busy fleet computes everything everywhere, is busier for it, and
//! does not come out of that again; with it, nothing has to be tuned: an idle fleet goes by the request's own time, a
//! full one by the work it saves. `throughput` (percent) is the one knob: 0 for the request's own time alone, more for fewer
//! computed tokens at the price of later first ones. It is 200 by default: a token that is computed again also takes the
//! place of another one in a cache.
//!
//! Of equals the one that has more of the prompt now; what is equal in that too takes turns.

use super::facts::Claimed;
use super::overlap::DEVICE_WORTH;
use super::rows::{Rows, Ties, pair};
use super::tier15::whole_blocks;
use crate::rates::{Pace, work};
use crate::service::{KvExact, Service};

/// What an answer under way counts for, in prompt tokens.
const ANSWER_TOKENS: f32 = 128.0;
/// Decisions over which ρ is averaged.
const DECISIONS: f32 = 64.0;
/// ρ counts as no more: beyond it the queue's length is the guide.
const BUSY_MOST: f32 = 0.98;
/// Costs are compared in millionths of a second; none is more than a day.
const UNITS: f32 = 1e6;
const COST_MOST: f32 = 86_400.0;

/// How often prompts were found being computed (ρ), as one shard remembers it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Busy(f32);

impl Busy {
    /// Takes note of what the candidates do now. Returns the average.
    fn note(&mut self, rows: &Rows) -> f32 {
        let busy = rows.candidates().filter(|place| rows.flight(*place).prefill > 0).count();
        let now = busy as f32 / rows.candidates.max(1) as f32;
        self.0 += (now - self.0) / DECISIONS;
        self.0
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
    let busy = busy.note(rows).min(BUSY_MOST);
    let others = kv.throughput as f32 / 100.0 * busy / (1.0 - busy);
    let pace = service.shared.rates.pace();
    for place in 0..rows.key.len() {
        if rows.candidate[place] {
            let uncached = tokens - rows.key[place].min(most);
            let seconds = cost(&pace, rows, place, uncached, others);
            let factor = service.endpoints[place].shared.slowness.factor();
            rows.key[place] = ((factor * seconds).min(COST_MOST) * UNITS) as u64;
        }
    }
    // Of equals the one that has more of the prompt now: what is only on its way may not come.
    let place = ties.least(rows.candidates(), |place| pair(rows.key[place], u64::MAX - rows.worth[place]))?;
    Some((place, rows.key[place]))
}

/// The cost at the service's pace.
fn cost(pace: &Pace, rows: &Rows, place: usize, uncached: u64, others: f32) -> f32 {
    let flight = rows.flight(place);
    let computed = work(flight.tokens.saturating_add(uncached), flight.decode)
        + uncached as f32 * others
        + flight.decode as f32 * ANSWER_TOKENS;
    pace.start * (flight.prefill + 1) as f32 + pace.per_token * computed
}
