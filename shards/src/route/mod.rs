//! The route decision: values in, a decision with its reasons out. No I/O, no clock, no randomness of its own.
//!
//! **Invariant.** Only a candidate is ever chosen: an endpoint that is in the rule, up, not drained and not already
//! tried by this request; a backup only while no other endpoint is a candidate. Every load of one decision is read
//! once, so that its steps agree with each other.
//!
//! Order of Tier 1.5 (single pool): overlap → spill relief → cold seed.
//!
//! * **Overlap.** The winner is the candidate with the longest contiguous run at any of its ranks, in tokens: holders may
//!   have blocks of other sizes than the rule says. Where a rule gives weight to slower media, the tokens that they add to
//!   a run count as so much of a token in device memory. Among equals it is the least loaded; among those each in turn. One
//!   block is overlap, also in a prompt of exactly one block. The engine recomputes at least the last token, so the
//!   *predicted* saving is at most ⌊(tokens − 1) / block size⌋ blocks of the holder.
//! * **Spill relief.** `cap = max(1, ⌈factor × total / (100 × n)⌉)`, where `total` is the number of requests in flight
//!   at the `n` candidates before this one and `factor` is in percent. A winner with `cap` requests or more gives way
//!   to the least loaded candidate below the cap, the lowest index among equals. With nobody below, it stays.
//!   For n = 4, factor 175: total 0 to 2 → cap 1 (⌈0⌉, ⌈0.44⌉, ⌈0.88⌉), 3 and 4 → 2, 5 and 6 → 3, 100 → 44. A winner
//!   with nothing in flight never gives way.
//! * **Cold seed.** While a candidate other than the winner is cold, hits are counted, for the whole process; each
//!   N-th goes to the lowest-index one of them. A hit that spilled is counted, and diverted, like any other.
//!
//! What Tier 1.5 does not decide goes by the rule's own `sel`.

#![forbid(unsafe_code)]

use std::num::NonZeroU32;
use std::sync::atomic::Ordering;

use crate::ids::{EndpointIndex, Rank, ShardId};
use crate::inventory::{Medium, Run};
use crate::load::LoadTable;
use crate::service::{KvExact, MissReason, Select, Service};

/// What is known of a prompt when the decision is made.
#[derive(Clone, Copy, Debug)]
pub enum Evidence<'a> {
    /// Tier 1.5 cannot say anything, and why.
    None(MissReason),
    /// Runs of the holders, possibly none.
    Scored {
        /// Tokens in the prompt, exact or estimated.
        prompt_tokens: u64,
        /// Contiguous runs from block 0.
        runs: &'a [Run],
    },
}

/// The tier that decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Tier 1.5: KV-exact.
    KvExact,
    /// The rule's own `sel`.
    Select,
}

/// Where a request goes, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The endpoint.
    pub endpoint: EndpointIndex,
    /// The rank whose cache counts, where Tier 1.5 decided and did not divert.
    pub rank: Option<Rank>,
    /// The tier.
    pub tier: Tier,
    /// Blocks predicted to hit at the chosen endpoint, also where the request was diverted to it; of its own size.
    pub hit_blocks: u32,
    /// The tokens in them.
    pub hit_tokens: u64,
    /// Why Tier 1.5 did not decide.
    pub miss: Option<MissReason>,
    /// The winner that spill relief passed over.
    pub spilled_from: Option<EndpointIndex>,
    /// The winner that cold seeding passed over.
    pub seeded_from: Option<EndpointIndex>,
}

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

/// What one shard keeps for one service from decision to decision: whose turn it is, and memory to decide in.
#[derive(Debug, Default)]
pub struct Turn {
    /// Endpoint that round robin looks at next.
    next: usize,
    /// Ties broken so far.
    ties: u32,
    /// A row per endpoint, filled anew for each decision.
    rows: Vec<Row>,
}

/// An endpoint as one decision sees it.
#[derive(Clone, Copy, Debug)]
struct Row {
    candidate: bool,
    load: u32,
    /// Tokens of the run that is worth most, of any of its ranks, uncapped.
    run: u64,
    /// Tokens per block of that run.
    block_tokens: u64,
    /// What that run is worth, in hundredths of a token in device memory.
    worth: u64,
    rank: Rank,
}

impl Turn {
    /// Each shard starts at another endpoint.
    #[must_use]
    pub fn starting_at(shard: ShardId) -> Self {
        Turn { next: shard.index(), ties: u32::from(shard.0), rows: Vec::new() }
    }

    fn candidates(&self) -> impl Iterator<Item = (usize, &Row)> {
        self.rows.iter().enumerate().filter(|(_, row)| row.candidate)
    }

    /// The least loaded candidate with a run of this worth; equals take turns. None if there is no such candidate.
    fn least_loaded(&mut self, worth: u64) -> Option<usize> {
        let eligible = |(_, row): &(usize, &Row)| row.worth == worth;
        let load = self.candidates().filter(eligible).map(|(_, row)| row.load).min()?;
        let equals = |row: &Row| row.candidate && row.worth == worth && row.load == load;
        let count = self.rows.iter().filter(|row| equals(row)).count();
        let turn = if count > 1 { self.break_tie(count) } else { 0 };
        self.rows.iter().enumerate().filter(|(_, row)| equals(row)).nth(turn).map(|(index, _)| index)
    }

    /// A number below `count`, evenly spread over any regular subsequence of the ties too: a plain counter would give
    /// every other tie (and so one of two alternating prompts) to the same endpoints again and again. The multiples of
    /// the golden ratio have that property.
    fn break_tie(&mut self, count: usize) -> usize {
        let fraction = self.ties.wrapping_mul(0x9e37_79b9);
        self.ties = self.ties.wrapping_add(1);
        ((u64::from(fraction) * count as u64) >> 32) as usize
    }

    /// The next candidate in order.
    fn round_robin(&mut self) -> Option<usize> {
        let endpoints = self.rows.len();
        let chosen = (self.next..self.next + endpoints)
            .map(|place| place % endpoints)
            .find(|&place| self.rows[place].candidate)?;
        self.next = (chosen + 1) % endpoints;
        Some(chosen)
    }
}

/// Chooses an endpoint; none when no endpoint is a candidate. `tried` are endpoints that already refused this
/// request. Counts nothing but the service's seed tick: the caller counts the decision it carries out.
pub fn decide(
    service: &Service,
    evidence: Evidence<'_>,
    tried: &[EndpointIndex],
    chooser: &mut Chooser<'_>,
) -> Option<Decision> {
    fill_rows(service, tried, chooser);
    let turn = &mut *chooser.turn;
    let miss = match (&service.kv, evidence) {
        (None, _) => MissReason::ModeOff,
        (Some(_), Evidence::None(reason)) => reason,
        (Some(kv), Evidence::Scored { prompt_tokens, runs }) => match overlap(kv, prompt_tokens, runs, turn) {
            Ok(winner) => return Some(exact(service, kv, prompt_tokens, winner, turn)),
            Err(reason) => reason,
        },
    };
    let chosen = match service.select {
        Select::RoundRobin => turn.round_robin(),
        Select::LeastConnections => {
            turn.rows.iter_mut().for_each(|row| row.worth = 0);
            turn.least_loaded(0)
        }
    }?;
    Some(Decision {
        endpoint: EndpointIndex(chosen as u16),
        rank: None,
        tier: Tier::Select,
        hit_blocks: 0,
        hit_tokens: 0,
        miss: Some(miss),
        spilled_from: None,
        seeded_from: None,
    })
}

/// Reads who is a candidate and what it is loaded with.
fn fill_rows(service: &Service, tried: &[EndpointIndex], chooser: &mut Chooser<'_>) {
    let usable = |index: usize| {
        service.endpoints[index].is_candidate() && !tried.iter().any(|endpoint| endpoint.index() == index)
    };
    let backups = !service.endpoints.iter().enumerate().any(|(index, endpoint)| !endpoint.backup && usable(index));
    let rows = service.endpoints.iter().enumerate().map(|(index, endpoint)| Row {
        candidate: endpoint.backup == backups && usable(index),
        load: chooser.loads.seen_by(chooser.shard, endpoint.shared.slot).requests(),
        run: 0,
        block_tokens: 1,
        worth: 0,
        rank: Rank(0),
    });
    chooser.turn.rows.clear();
    chooser.turn.rows.extend(rows);
}

/// The winner by overlap, or why there is none. Leaves every endpoint's own run in its row.
fn overlap(kv: &KvExact, prompt_tokens: u64, runs: &[Run], turn: &mut Turn) -> Result<usize, MissReason> {
    if prompt_tokens < u64::from(kv.min_match_tokens) {
        return Err(MissReason::Shallow);
    }
    let mut most = 0;
    let mut held = false;
    for run in runs.iter().filter(|run| run.blocks > 0) {
        held = true;
        // An endpoint that the tables do not know yet, or no longer, is nobody's candidate.
        let Some(row) = turn.rows.get_mut(run.endpoint.index()).filter(|row| row.candidate) else { continue };
        let block_tokens = u64::from(run.block_tokens.map_or(kv.block_tokens, NonZeroU32::get));
        let worth = worth(kv, run, runs).saturating_mul(block_tokens);
        if worth > row.worth {
            let tokens = u64::from(run.blocks) * block_tokens;
            (row.run, row.block_tokens, row.worth, row.rank) = (tokens, block_tokens, worth, run.rank);
            most = most.max(worth);
        }
    }
    match most {
        0 if held => Err(MissReason::Excluded),
        0 if prompt_tokens < u64::from(kv.block_tokens) => Err(MissReason::Hashes),
        0 => Err(MissReason::NoWorker),
        _ => turn.least_loaded(most).ok_or(MissReason::NoWorker),
    }
}

/// What a run is worth, in hundredths of one of its blocks in device memory: a run that reaches into slower media counts what lies
/// nearer as what it is, and the rest by its medium's weight.
fn worth(kv: &KvExact, run: &Run, runs: &[Run]) -> u64 {
    let within = |medium: Medium| {
        let same = |other: &&Run| (other.endpoint, other.rank, other.medium) == (run.endpoint, run.rank, medium);
        u64::from(runs.iter().find(same).map_or(0, |other| other.blocks))
    };
    let blocks = u64::from(run.blocks);
    let behind = |nearer: u64, weight: u8| blocks.saturating_sub(nearer) * u64::from(weight);
    match run.medium {
        Medium::Device => blocks * DEVICE_WORTH,
        Medium::Cpu => {
            let device = within(Medium::Device);
            device * DEVICE_WORTH + behind(device, kv.weights.cpu)
        }
        Medium::Storage => {
            let device = within(Medium::Device);
            let cpu = within(Medium::Cpu).max(device);
            device * DEVICE_WORTH + (cpu - device) * u64::from(kv.weights.cpu) + behind(cpu, kv.weights.storage)
        }
    }
}

/// A token in device memory is worth as much.
const DEVICE_WORTH: u64 = 100;

/// Relief and seed after the overlap was found.
fn exact(service: &Service, kv: &KvExact, prompt_tokens: u64, winner: usize, turn: &Turn) -> Decision {
    let spilled = if kv.spill_relief { relief(kv, winner, turn) } else { None };
    let seeded = seed(service, kv, winner, turn);
    let chosen = seeded.or(spilled).unwrap_or(winner);
    let row = &turn.rows[chosen];
    let usable = prompt_tokens.saturating_sub(1) / row.block_tokens;
    let hit_blocks = usable.min(row.run / row.block_tokens);
    let passed_over = |diverted: Option<usize>| diverted.map(|_| EndpointIndex(winner as u16));
    Decision {
        endpoint: EndpointIndex(chosen as u16),
        rank: (chosen == winner).then_some(row.rank),
        tier: Tier::KvExact,
        hit_blocks: u32::try_from(hit_blocks).unwrap_or(u32::MAX),
        hit_tokens: hit_blocks * row.block_tokens,
        miss: None,
        spilled_from: passed_over(spilled),
        seeded_from: passed_over(seeded),
    }
}

/// Who takes the request over from a winner at or over the cap.
fn relief(kv: &KvExact, winner: usize, turn: &Turn) -> Option<usize> {
    let (count, total) =
        turn.candidates().fold((0, 0), |(count, total), (_, row)| (count + 1, total + u64::from(row.load)));
    let cap = (u64::from(kv.mean_load_factor) * total).div_ceil(100 * count).max(1);
    if u64::from(turn.rows[winner].load) < cap {
        return None;
    }
    let below = turn.candidates().filter(|(_, row)| u64::from(row.load) < cap);
    // The first of several minima is the one with the lowest index.
    below.min_by_key(|(_, row)| row.load).map(|(index, _)| index)
}

/// The cold endpoint whose turn this hit is, if it is one's.
fn seed(service: &Service, kv: &KvExact, winner: usize, turn: &Turn) -> Option<usize> {
    if kv.seed_every == 0 {
        return None;
    }
    // A floor of 0 means that only an empty endpoint is cold.
    let floor = u64::from(kv.seed_min_blocks.max(1));
    let cold = |index: usize| service.endpoints[index].shared.kv_blocks.load(Ordering::Relaxed) < floor;
    let (first_cold, _) = turn.candidates().find(|&(index, _)| index != winner && cold(index))?;
    let tick = service.shared.seed_ticks.fetch_add(1, Ordering::Relaxed) + 1;
    tick.is_multiple_of(u64::from(kv.seed_every)).then_some(first_cold)
}

#[cfg(test)]
mod tests;
