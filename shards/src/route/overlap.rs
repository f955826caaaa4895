//! What each candidate has of a prompt.

use std::num::NonZeroU32;

use super::rows::Rows;
use crate::inventory::{Medium, Run};
use crate::service::{KvExact, MissReason};

/// A token in device memory is worth as much.
pub(super) const DEVICE_WORTH: u64 = 100;

/// Notes in every row what the best of its runs is worth; returns the most, or why there is none.
pub(super) fn overlap(kv: &KvExact, prompt_tokens: u64, runs: &[Run], rows: &mut Rows) -> Result<u64, MissReason> {
    if prompt_tokens < u64::from(kv.min_match_tokens) {
        return Err(MissReason::Shallow);
    }
    let most = rows.note_overlap(runs, |run| worth_of(kv, run, runs));
    let held = || runs.iter().any(|run| run.blocks > 0);
    match most {
        0 if held() => Err(MissReason::Excluded),
        0 if prompt_tokens < u64::from(kv.block_tokens) => Err(MissReason::Hashes),
        0 => Err(MissReason::NoWorker),
        _ => Ok(most),
    }
}

/// What a run is worth, in hundredths of a token in device memory.
pub(super) fn worth_of(kv: &KvExact, run: &Run, runs: &[Run]) -> u64 {
    worth(kv, run, runs).saturating_mul(block_tokens(kv, run))
}

/// Tokens per block of a run.
pub(super) fn block_tokens(kv: &KvExact, run: &Run) -> u64 {
    u64::from(run.block_tokens.map_or(kv.block_tokens, NonZeroU32::get))
}

/// What a run is worth, in hundredths of one of its blocks in device memory.
fn worth(kv: &KvExact, run: &Run, runs: &[Run]) -> u64 {
    match run.medium {
        Medium::Device => u64::from(run.blocks) * DEVICE_WORTH,
        Medium::Cpu | Medium::Storage => worth_beyond_device(kv, run, runs),
    }
}

/// The same of a run that reaches into slower media: what lies nearer counts as what it is, and the rest by its medium's
/// weight.
#[cold]
fn worth_beyond_device(kv: &KvExact, run: &Run, runs: &[Run]) -> u64 {
    let within = |medium: Medium| {
        let same = |other: &&Run| (other.endpoint, other.rank, other.medium) == (run.endpoint, run.rank, medium);
        u64::from(runs.iter().find(same).map_or(0, |other| other.blocks))
    };
    let blocks = u64::from(run.blocks);
    let behind = |nearer: u64, weight: u8| blocks.saturating_sub(nearer) * u64::from(weight);
    let device = within(Medium::Device);
    if run.medium == Medium::Cpu {
        return device * DEVICE_WORTH + behind(device, kv.weights.cpu);
    }
    let cpu = within(Medium::Cpu).max(device);
    device * DEVICE_WORTH + (cpu - device) * u64::from(kv.weights.cpu) + behind(cpu, kv.weights.storage)
}
