//! Tier 1.5: the endpoint by what it has of the prompt.

use super::blend::{self, Choice};
use super::decision::{Decision, Reason, Terms, Tier};
use super::facts::{Claimed, Evidence, Facts};
use super::overlap::{DEVICE_WORTH, block_tokens, overlap, worth_of};
use super::relief::{foreseen, relief, seed};
use super::rows::{Rows, Ties, Turn};
use super::ttft::{self, Busy};
use crate::ids::{EndpointIndex, Rank};
use crate::inventory::Run;
use crate::load::View;
use crate::service::{Blend, KvExact, MissReason, Service};

/// Requests in flight up to which an endpoint gets more of what it is about to have, also where the fleet-wide cap is
/// lower: so many cold prompts that come at once with the same beginning wait for one of them.
const CLAIM_LOAD: u64 = 8;

/// The decision by overlap or by what will be stored soon, or why there is none.
pub(super) fn decide(
    service: &Service,
    facts: &Facts<'_>,
    turn: &mut Turn,
    loads: View<'_>,
) -> Result<Decision, MissReason> {
    let Some(kv) = &service.kv else { return Err(MissReason::ModeOff) };
    let (prompt_tokens, runs) = match facts.evidence {
        Evidence::None(reason) => return Err(reason),
        Evidence::Scored { prompt_tokens, runs } => (prompt_tokens, runs),
    };
    let prompt = Prompt { kv, tokens: prompt_tokens, runs };
    let Turn { rows, ties, busy, .. } = turn;
    let most = match overlap(kv, prompt_tokens, runs, rows) {
        Ok(most) => most,
        Err(reason @ (MissReason::NoWorker | MissReason::Excluded)) => {
            let claim = match kv.blend {
                Blend::Ttft => cheapest_claim(service, &prompt, facts.claims, rows, (ties, busy)),
                _ => claimed(kv, facts.claims, 0, rows).map(|claim| (claim, 0)),
            };
            let (claim, cost) = claim.ok_or(reason)?;
            return Ok(Decision { miss: Some(reason), ..prompt.by_claim(claim, cost, rows) });
        }
        Err(reason) => return Err(reason),
    };
    let claim = (kv.blend != Blend::Ttft).then(|| claimed(kv, facts.claims, most, rows)).flatten();
    let of_blend = match claim {
        Some(claim) => Some((claim.endpoint.index(), prompt.by_claim(claim, 0, rows))),
        None => {
            let mut choose = |rows: &mut Rows| match kv.blend {
                Blend::Ttft => by_cost(service, &prompt, most, facts.claims, rows, (&mut *ties, &mut *busy)),
                _ => blend::choose(kv, most, rows, ties).map(|choice| by_overlap(&prompt, most, choice, rows)),
            };
            let found = choose(rows);
            let passed_over = found.as_ref().and_then(|(_, decision)| decision.spilled_from);
            if passed_over.is_some_and(|passed_over| rows.look_again(service, passed_over.index(), loads)) {
                choose(rows)
            } else {
                found
            }
        }
    };
    let (winner, mut decision) = of_blend.ok_or(MissReason::NoWorker)?;
    decision.best_tokens = blend::best(rows).map_or(0, |place| prompt.hit_at(place, rows).1);
    // What has nothing yet at the claimed endpoint is no hit, and is neither counted nor diverted.
    if decision.tier == Tier::KvExact
        && let Some((tick, turn_of)) = seed(&service.shared, kv, winner, facts.seed_tick, rows)
    {
        decision.seed_tick = Some(tick);
        if let Some(cold) = turn_of {
            let seeded_from = Some(EndpointIndex(winner as u16));
            decision = Decision { seeded_from, reason: Reason::Seed, ..prompt.moved(decision, cold, rows) };
        }
    }
    if kv.ranks > 1 && decision.reason != Reason::Claim {
        decision.rank = prompt.rank_in_turn(decision.endpoint.index(), rows, ties);
    }
    Ok(decision)
}

/// The candidate by expected time, and who relieves it: what it has now is a hit, and where it has nothing but what it
/// will have stored soon, it is placed by that.
fn by_cost(
    service: &Service,
    prompt: &Prompt<'_>,
    most: u64,
    claims: &[Claimed],
    rows: &mut Rows,
    means: (&mut Ties, &mut Busy),
) -> Option<(usize, Decision)> {
    let (chosen, _) = ttft::choose(service, prompt.kv, prompt.tokens, claims, rows, means)?;
    let claimed = |place: usize| {
        let own = best_claim(claims, place)?;
        (whole_blocks(prompt.kv, own).saturating_mul(DEVICE_WORTH) > rows.worth[place]).then_some(own)
    };
    let relieved = prompt.kv.spill_relief && claimed(chosen).is_none();
    let place = if relieved { foreseen(blend::factor(prompt.kv, rows), chosen, most, rows) } else { chosen };
    match claimed(place) {
        Some(claim) => Some((place, prompt.by_claim(claim, rows.key[place], rows))),
        None => Some(by_overlap(prompt, most, Choice { place, cap: 0, cost: rows.key[place] }, rows)),
    }
}

/// The claim of the candidate with the least expected time, where it has one, and that time; nobody has anything of the
/// prompt now.
fn cheapest_claim(
    service: &Service,
    prompt: &Prompt<'_>,
    claims: &[Claimed],
    rows: &mut Rows,
    means: (&mut Ties, &mut Busy),
) -> Option<(Claimed, u64)> {
    if claims.is_empty() {
        return None;
    }
    let (place, cost) = ttft::choose(service, prompt.kv, prompt.tokens, claims, rows, means)?;
    Some((best_claim(claims, place)?, cost))
}

/// What an endpoint will have most of.
pub(super) fn best_claim(claims: &[Claimed], place: usize) -> Option<Claimed> {
    let own = claims.iter().filter(|claim| claim.endpoint.index() == place);
    own.max_by_key(|claim| claim.tokens).copied()
}

/// The blend's choice, and who relieves it. Returns the choice's place and the decision.
fn by_overlap(prompt: &Prompt<'_>, most: u64, choice: Choice, rows: &Rows) -> (usize, Decision) {
    let kv = prompt.kv;
    let winner = choice.place;
    let spilled = rows.worth[winner] < most;
    let reason = if spilled { Reason::Blend } else { Reason::Overlap };
    let mut decision = prompt.at(winner, Tier::KvExact, reason, rows);
    (decision.terms.cap, decision.terms.cost) = (choice.cap, choice.cost);
    if spilled {
        decision.spilled_from = blend::best(rows).map(|place| EndpointIndex(place as u16));
    } else if kv.spill_relief {
        let factor = blend::factor(kv, rows);
        decision.terms.cap = rows.fleet_cap(winner, factor);
        if let Some(relieving) = relief(factor, winner, rows) {
            decision.spilled_from = Some(EndpointIndex(winner as u16));
            decision = Decision { reason: Reason::Relief, ..prompt.moved(decision, relieving, rows) };
        }
    }
    (winner, decision)
}

/// The candidate that will have most of the prompt soon, where that is more than anybody has now, and where it is not too
/// busy for it: the least loaded of equals, the first of those.
fn claimed(kv: &KvExact, claims: &[Claimed], most: u64, rows: &Rows) -> Option<Claimed> {
    let bound = |claim: &Claimed| rows.fleet_cap(claim.endpoint.index(), kv.mean_load_factor).max(CLAIM_LOAD);
    let load = |claim: &Claimed| rows.load[claim.endpoint.index()];
    let more = |claim: &&Claimed| {
        whole_blocks(kv, **claim).saturating_mul(DEVICE_WORTH) > most
            && rows.is_candidate(claim.endpoint)
            && u64::from(load(claim)) < bound(claim)
    };
    claims.iter().filter(more).min_by_key(|claim| (u64::MAX - claim.tokens, load(claim))).copied()
}

/// A claim's tokens in whole blocks: the end of a prompt that fills none is never held.
pub(super) fn whole_blocks(kv: &KvExact, claim: Claimed) -> u64 {
    let block = u64::from(kv.block_tokens.max(1));
    claim.tokens / block * block
}

/// A prompt that was scored.
struct Prompt<'a> {
    kv: &'a KvExact,
    tokens: u64,
    runs: &'a [Run],
}

impl Prompt<'_> {
    /// Blocks and tokens that hit at a place. The engine recomputes at least the last token.
    fn hit_at(&self, place: usize, rows: &Rows) -> (u32, u64) {
        let Some(run) = self.run_at(place, rows) else { return (0, 0) };
        let block_tokens = block_tokens(self.kv, run);
        let usable = self.tokens.saturating_sub(1) / block_tokens;
        let blocks = u32::try_from(usable).map_or(run.blocks, |usable| usable.min(run.blocks));
        (blocks, u64::from(blocks) * block_tokens)
    }

    fn run_at(&self, place: usize, rows: &Rows) -> Option<&Run> {
        (rows.worth[place] > 0).then(|| &self.runs[rows.run[place] as usize])
    }

    /// The rank with the best run at a place; equals take turns.
    fn rank_in_turn(&self, place: usize, rows: &Rows, ties: &mut Ties) -> Option<Rank> {
        let best = self.run_at(place, rows)?;
        let is_equal = |number: &usize| {
            let run = &self.runs[*number];
            // As long a run can be worth less, where more of it lies in a slower medium.
            Run { rank: best.rank, ..*run } == *best && worth_of(self.kv, run, self.runs) == rows.worth[place]
        };
        ties.least((0..self.runs.len()).filter(is_equal), |_| 0).map(|number| self.runs[number].rank)
    }

    fn at(&self, place: usize, tier: Tier, reason: Reason, rows: &Rows) -> Decision {
        let possible = self.tokens / u64::from(self.kv.block_tokens.max(1));
        let decision = Decision {
            possible_blocks: u32::try_from(possible).unwrap_or(u32::MAX),
            terms: Terms { total: rows.total, candidates: rows.candidates, ..Terms::default() },
            ..Decision::new(place, tier, reason)
        };
        self.moved(decision, place, rows)
    }

    /// The decision for another place.
    fn moved(&self, decision: Decision, place: usize, rows: &Rows) -> Decision {
        let (hit_blocks, hit_tokens) = self.hit_at(place, rows);
        Decision {
            endpoint: EndpointIndex(place as u16),
            rank: self.run_at(place, rows).map(|run| run.rank),
            hit_blocks,
            hit_tokens,
            claimed_tokens: 0,
            terms: Terms { load: rows.load[place], ..decision.terms },
            ..decision
        }
    }

    /// The decision for an endpoint that will have the prompt's beginning soon. It is a hit where it has some already.
    fn by_claim(&self, claim: Claimed, cost: u64, rows: &Rows) -> Decision {
        let place = claim.endpoint.index();
        let tier = if rows.worth[place] > 0 { Tier::KvExact } else { Tier::Claim };
        let decision = self.at(place, tier, Reason::Claim, rows);
        Decision {
            rank: claim.rank,
            claimed_tokens: claim.tokens.min(self.tokens).saturating_sub(decision.hit_tokens),
            terms: Terms { cost, ..decision.terms },
            ..decision
        }
    }
}
