//! The route decision: values in, a decision with its reasons out. No I/O, no clock, no randomness of its own.
//!
//! **Invariant.** Only a candidate is ever chosen: an endpoint that is in the rule, in the role asked for, up, not drained
//! and not already tried by this request; a backup only while no other endpoint is a candidate. Every load of one decision
//! is read once, so that its steps agree with each other. Nothing is allocated but rows, once per service and shard.
//!
//! **One pool** ([`decide`]): Tier 1.5 → the rule's `sel`. **Prefill and decode** ([`decide`], then [`choose_decode`]):
//! session → tree of texts → Tier 1.5 → least load, among the prefill endpoints; then a decode endpoint.
//!
//! **Tier 1.5**, in this order: overlap → blend → spill relief → cold seed.
//!
//! * **Overlap.** What counts is the longest contiguous run at any rank of an endpoint, in tokens: holders may have blocks
//!   of other sizes than the rule says. Where a rule gives weight to slower media, the tokens that they add to a run count
//!   as so much of a token in device memory. One block is overlap, also in a prompt of exactly one block. The engine
//!   recomputes at least the last token, so the *predicted* saving is at most ⌊(tokens − 1) / block size⌋ blocks of the
//!   holder.
//! * **Blend.** Overlap against the load of the holders: `blend.rs`. Its choice is the *winner*.
//! * **Spill relief.** `cap = max(1, ⌈factor × total × capacity / (100 × sum)⌉)`, where `total` is the number of requests
//!   in flight at all candidates before this one, `capacity / sum` the winner's part in what their caches hold (1/n where
//!   engines do not tell), and `factor` is in percent. A winner with `cap` requests or more gives way to the least loaded
//!   candidate below its own cap, the lowest index among equals. With nobody below, it stays. Where the blend has passed
//!   over the longest overlap already, there is no relief; `ttft` foresees it, and passes over a holder at its cap for one
//!   with a part of the prompt where that is sooner than what relief would choose.
//!   For n = 4, factor 175: total 0 to 2 → cap 1 (⌈0⌉, ⌈0.44⌉, ⌈0.88⌉), 3 and 4 → 2, 5 and 6 → 3, 100 → 44. A winner
//!   with nothing in flight never gives way.
//! * **Cold seed.** While a candidate other than the winner is cold, hits are counted, for the whole process; each
//!   N-th goes to the lowest-index one of them. A hit that spilled is counted, and diverted, like any other.
//!
//! **Claims.** What a request under way will have stored soon draws others with the same beginning to its endpoint, while
//! that has fewer requests than the fleet-wide cap, or than 8. Such a placement is a hit only for what the endpoint has
//! already.

#![forbid(unsafe_code)]

mod blend;
mod decision;
mod disagg;
mod facts;
mod overlap;
mod relief;
mod rows;
mod select;
mod tier15;
mod ttft;

use crate::ids::{EndpointIndex, ShardId};
use crate::load::LoadTable;
use crate::service::{Role, Service};

pub use blend::CAPACITY_REFERENCE_MILLI;
pub use decision::{Decision, Reason, Terms, Tier};
pub use facts::{Claimed, Evidence, Facts, Pin, TrieMatch};
pub use rows::Turn;

/// What a shard brings to its decisions.
#[derive(Debug)]
pub struct Chooser<'a> {
    /// The shard.
    pub shard: ShardId,
    /// In-flight counts.
    pub loads: &'a LoadTable,
    /// Whose turn it is, on this shard in this service.
    pub turn: &'a mut Turn,
}

/// Chooses an endpoint, in P/D rules for the prompt; none when no endpoint is a candidate. Counts nothing but the
/// service's seed tick: the caller counts the decision it carries out.
pub fn decide(service: &Service, facts: &Facts<'_>, chooser: &mut Chooser<'_>) -> Option<Decision> {
    if let Some(pd) = &service.pd {
        return disagg::choose_prefill(service, pd, facts, chooser);
    }
    let loads = chooser.loads.view(chooser.shard);
    let turn = &mut *chooser.turn;
    turn.rows.fill(service, Role::Normal, facts.tried, loads);
    let miss = match tier15::decide(service, facts, turn, loads) {
        Ok(decision) => return Some(decision),
        Err(miss) => miss,
    };
    let (place, reason, cost) = select::choose(service, facts, turn)?;
    let rows = &turn.rows;
    let terms = Terms { load: rows.load[place], total: rows.total, candidates: rows.candidates, cap: 0, cost };
    Some(Decision { miss: Some(miss), terms, ..Decision::new(place, Tier::Select, reason) })
}

/// Chooses the decode endpoint of a P/D rule: the pinned one while it is a candidate, else the least loaded, equals in
/// turn; none when no decode endpoint is a candidate.
pub fn choose_decode(
    service: &Service,
    pinned: Option<EndpointIndex>,
    tried: &[EndpointIndex],
    chooser: &mut Chooser<'_>,
) -> Option<EndpointIndex> {
    disagg::choose_decode(service, pinned, tried, chooser)
}

#[cfg(test)]
mod tests;
