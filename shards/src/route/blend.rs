//! Overlap against load: which of the holders a request goes to.
//!
//! The holders are the candidates with any overlap; `total` and `sum` here are the load and the capacity of the holders
//! alone, and capacity is what an engine says of its cache (`num_gpu_blocks`), from 1 to 8,000,000.
//!
//! * `off`: the most overlap; of equals the least loaded.
//! * `hard`: the most overlap among holders with fewer requests than `cap = max(1, ⌈factor × total × capacity / (100 ×
//!   sum)⌉)`; of equals the least loaded. With all of them at their caps: the least loaded, then the most overlap.
//! * `soft`: the least `1000 × missing + ⌊penalty × load / capacity⌋`, where `missing` is how many blocks fewer it has
//!   than the best; of equals the one with more overlap, then the least loaded.
//! * `adaptive`: as `hard` with the factor `175 + ⌊125 × (L − 16) / 10⌋`, at least 175 and at most 300, for `L = total`.
//! * `adaptive-soft`: as `soft` with the penalty `50,000 + 5,000 × (L − 16)`, at least 50,000 and at most 100,000.
//!
//! The adaptive laws were found by the reference's authors on one fleet. Where the operator says what his can do, `L` is
//! measured by it: `L = ⌊total × 15,284,310 / LOXILB_KV_CAP_SUM_MILLI⌋`.
//!
//! What is equal in all of that takes turns. A choice with less overlap than the best is a spill.

use super::overlap::DEVICE_WORTH;
use super::rows::{Caps, Rows, Ties, pair};
use crate::service::{Blend, KvExact};

/// What the fleet of the adaptive laws could do, in thousandths of a prompt token per second.
pub const CAPACITY_REFERENCE_MILLI: u32 = 15_284_310;
/// The load up to which the adaptive laws are at their floors.
const LOAD_ANCHOR: u64 = 16;
/// The load from which on they are at their ceilings.
const LOAD_SATURATED: u64 = 26;

/// Which holder was chosen, and by what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) place: usize,
    /// The bound that the holder with most overlap was measured by; 0 = none.
    pub(super) cap: u64,
    /// What the choice costs; 0 = no cost is counted.
    pub(super) cost: u64,
}

/// Chooses among the holders, of which the best has `most`; none if there are no holders. [`Blend::Ttft`] is not
/// chosen by here: it looks at all candidates, and counts as `off` among the holders.
pub(super) fn choose(kv: &KvExact, most: u64, rows: &Rows, ties: &mut Ties) -> Option<Choice> {
    match kv.blend {
        Blend::Off | Blend::Ttft => longest(rows, ties),
        Blend::Hard | Blend::Adaptive => bounded(factor(kv, rows), rows, ties),
        Blend::Soft | Blend::AdaptiveSoft => cheapest(kv, most, rows, ties),
    }
}

/// The mean load factor in force, percent.
pub(super) fn factor(kv: &KvExact, rows: &Rows) -> u32 {
    match kv.blend {
        Blend::Adaptive => {
            let load = adaptive_load(kv, rows.holders_load).clamp(LOAD_ANCHOR, LOAD_SATURATED);
            (175 + 125 * (load - LOAD_ANCHOR) / 10) as u32
        }
        Blend::Off | Blend::Hard | Blend::Soft | Blend::AdaptiveSoft | Blend::Ttft => kv.mean_load_factor,
    }
}

fn penalty(kv: &KvExact, rows: &Rows) -> u64 {
    match kv.blend {
        Blend::AdaptiveSoft => {
            let load = adaptive_load(kv, rows.holders_load).clamp(LOAD_ANCHOR, LOAD_SATURATED);
            50_000 + 5_000 * (load - LOAD_ANCHOR)
        }
        Blend::Off | Blend::Hard | Blend::Soft | Blend::Adaptive | Blend::Ttft => u64::from(kv.load_penalty),
    }
}

fn adaptive_load(kv: &KvExact, total: u64) -> u64 {
    kv.capacity_sum_milli.map_or(total, |own| total * u64::from(CAPACITY_REFERENCE_MILLI) / u64::from(own.max(1)))
}

fn of(places: &[u16]) -> impl Iterator<Item = usize> + Clone {
    places.iter().map(|place| usize::from(*place))
}

fn longest(rows: &Rows, ties: &mut Ties) -> Option<Choice> {
    ties.least(of(&rows.best), |place| rows.load[place]).map(|place| Choice { place, cap: 0, cost: 0 })
}

fn bounded(factor: u32, rows: &Rows, ties: &mut Ties) -> Option<Choice> {
    let caps = Caps::new(factor, rows.holders_load, rows.holders_capacity);
    let cap_of = |place: usize| caps.of(rows.capacity(place));
    let below = |place: &usize| u64::from(rows.load[*place]) < cap_of(*place);
    // Most often one of those with most is below its cap.
    let of_best = ties.least(of(&rows.best).filter(below), |place| rows.load[place]);
    let by_overlap = |place: usize| pair(u64::MAX - rows.worth[place], rows.load[place]);
    let by_load = |place: usize| pair(rows.load[place], u64::MAX - rows.worth[place]);
    let place = of_best
        .or_else(|| ties.least(of(&rows.holders).filter(below), by_overlap))
        .or_else(|| ties.least(of(&rows.holders), by_load))?;
    let winner = if of_best.is_some() { place } else { best_or(place, rows) };
    Some(Choice { place, cap: cap_of(winner), cost: 0 })
}

/// The place if it is of one with most overlap, else the first such.
fn best_or(place: usize, rows: &Rows) -> usize {
    if of(&rows.best).any(|best| best == place) { place } else { best(rows).unwrap_or(place) }
}

fn cheapest(kv: &KvExact, most: u64, rows: &Rows, ties: &mut Ties) -> Option<Choice> {
    let penalty = penalty(kv, rows);
    let block_worth = DEVICE_WORTH * u64::from(kv.block_tokens.max(1));
    let cost = |place: usize| {
        let missing = (most - rows.worth[place]).saturating_mul(1000) / block_worth;
        missing.saturating_add(penalty * u64::from(rows.load[place]) / rows.capacity(place))
    };
    let key = |place: usize| (cost(place), u64::MAX - rows.worth[place], rows.load[place]);
    ties.least(of(&rows.holders), key).map(|place| Choice { place, cap: 0, cost: cost(place) })
}

/// The holder with most overlap, the first of equals.
pub(super) fn best(rows: &Rows) -> Option<usize> {
    of(&rows.best).min()
}
