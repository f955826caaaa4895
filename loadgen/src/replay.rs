//! `loadgen replay`: a Mooncake-format trace against a URL, open loop.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;

use crate::report::Report;
use crate::run::CommonArgs;
use crate::run::drive::Pace;
use crate::trace::{self, Slice, TRACE_BLOCK_TOKENS, TraceShape, TraceWorkload};
use crate::workload::Workload;

/// Play a Mooncake-format trace (timestamp, input_length, output_length, hash_ids) against a URL
#[derive(Clone, Debug, clap::Args)]
pub struct ReplayArgs {
    /// How the load is made and told
    #[command(flatten)]
    pub common: CommonArgs,
    /// The trace, JSON lines, plain or .gz
    #[arg(long, value_name = "FILE")]
    pub trace: PathBuf,
    /// How many times faster than recorded
    #[arg(long, default_value_t = 1.0)]
    pub time_factor: f64,
    /// At most the first N requests
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Only the first so many seconds of the trace, in its own time
    #[arg(long)]
    pub seconds: Option<f64>,
    /// Spread requests of one timestamp evenly up to the next (3 s steps) instead of keeping the bursts
    #[arg(long)]
    pub spread: bool,
    /// Tokens made for each block of 512, roughly; outputs are scaled alike
    #[arg(long, default_value_t = TRACE_BLOCK_TOKENS, value_name = "N")]
    pub tokens_per_block: usize,
}

/// Runs the command; exit code 0 when every request got its answer and the figures are worth a verdict, else 1.
///
/// # Errors
/// A trace that cannot be read or is not one, arguments out of range, an unusable URL or core.
pub fn main(args: &ReplayArgs) -> anyhow::Result<ExitCode> {
    args.common.tell(&play(args)?)
}

/// Plays the trace, and says what was seen.
///
/// # Errors
/// As [`main`].
pub fn play(args: &ReplayArgs) -> anyhow::Result<Report> {
    if !(args.time_factor > 0.0 && args.time_factor.is_finite()) {
        bail!("--time-factor {}: a number above 0 is needed", args.time_factor);
    }
    if !(1..=TRACE_BLOCK_TOKENS).contains(&args.tokens_per_block) {
        bail!("--tokens-per-block {}: 1 to {TRACE_BLOCK_TOKENS} are possible", args.tokens_per_block);
    }
    let requests = trace::read(&args.trace, Slice { requests: args.limit, seconds: args.seconds })?;
    if requests.is_empty() {
        bail!("{} has no request in the part asked for", args.trace.display());
    }
    let shape = TraceShape {
        model: args.common.model.clone(),
        time_factor: args.time_factor,
        spread: args.spread,
        tokens_per_block: args.tokens_per_block,
        seed: args.common.seed,
    };
    let trace = TraceWorkload::new(requests, shape);
    let pace = Pace::Open { arrivals: trace.arrivals().into() };
    let workload = Workload::Trace(Arc::new(trace));
    args.common.play(workload, pace, "open loop, at the trace's times".to_owned(), Duration::MAX, usize::MAX)
}
