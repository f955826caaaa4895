//! What follows a choice by overlap: relief for a winner that is too busy, and a share for endpoints that have nothing.

use std::sync::atomic::Ordering;

use super::rows::Rows;
use super::ttft::ALIKE_US;
use crate::service::{KvExact, ServiceShared};

/// Who takes the request over from a winner at or over the fleet-wide cap: the least loaded below its own, the lowest
/// index among equals.
pub(super) fn relief(factor: u32, winner: usize, rows: &Rows) -> Option<usize> {
    let caps = rows.fleet_caps(factor);
    let below = |place: &usize| u64::from(rows.load[*place]) < caps.of(rows.capacity(*place));
    if below(&winner) {
        return None;
    }
    // The first of several minima is the one with the lowest index.
    rows.candidates().filter(below).min_by_key(|place| rows.load[*place])
}

/// The winner for a blend that knows what relief will do, and has left each candidate's cost in the rows' keys: where its
/// own winner would be relieved, and somebody else would not be and costs clearly less than who relieves it, the cheapest
/// of those.
/// Relief leaves alone who has less than the most: then the blend has passed over that already.
pub(super) fn foreseen(factor: u32, winner: usize, most: u64, rows: &Rows) -> usize {
    if rows.worth[winner] < most {
        return winner;
    }
    let Some(relieving) = relief(factor, winner, rows) else { return winner };
    let caps = rows.fleet_caps(factor);
    let stays =
        |place: &usize| rows.worth[*place] < most || u64::from(rows.load[*place]) < caps.of(rows.capacity(*place));
    let cheapest = rows.candidates().filter(stays).min_by_key(|place| rows.key[*place]);
    cheapest.filter(|place| rows.key[*place] + ALIKE_US < rows.key[relieving]).unwrap_or(winner)
}

/// The number of this hit among those while a candidate other than the winner is cold, and the first such candidate where
/// it is its turn. The hit is counted, unless an earlier decision for the same request has `drawn` its number.
pub(super) fn seed(
    shared: &ServiceShared,
    kv: &KvExact,
    winner: usize,
    drawn: Option<u64>,
    rows: &Rows,
) -> Option<(u64, Option<usize>)> {
    if kv.seed_every == 0 {
        return None;
    }
    let cold = rows.cold.into_iter().flatten().find(|place| *place != winner)?;
    let tick = drawn.unwrap_or_else(|| shared.seed_ticks.fetch_add(1, Ordering::Relaxed) + 1);
    Some((tick, tick.is_multiple_of(u64::from(kv.seed_every)).then_some(cold)))
}
