//! `loadgen run`: load against a URL.

pub(crate) mod drive;
pub(crate) mod threads;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};

use self::drive::{Pace, Plan, Progress};
pub use self::threads::RuntimeChoice;
use crate::client::{Api, Target};
use crate::report::{Report, Verdict};
use crate::workload::{ChatShape, ChatWorkload, Random, Request, Workload};

/// Requests of an open loop, whose times are listed before it starts. Beyond it the run is refused.
const ARRIVALS_MAX: usize = 10_000_000;

/// Kind of random arrival times.
const ARRIVAL: u64 = 6;

/// Load against a URL: multi-turn chats or one fixed body, open or closed loop
#[derive(Clone, Debug, clap::Args)]
pub struct RunArgs {
    /// How the load is made and told
    #[command(flatten)]
    pub common: CommonArgs,
    /// Open loop: requests per second, sent on time whatever the answers
    #[arg(long, value_name = "R", conflicts_with = "concurrency")]
    pub rate: Option<f64>,
    /// Open loop: equal gaps instead of Poisson arrivals
    #[arg(long, requires = "rate")]
    pub even: bool,
    /// Closed loop: that many clients, each waiting for its answer (8 where no --rate is given)
    #[arg(long, value_name = "C")]
    pub concurrency: Option<usize>,
    /// Seconds during which requests are begun
    #[arg(long, default_value_t = 10.0)]
    pub seconds: f64,
    /// At most that many requests
    #[arg(long, value_name = "N")]
    pub requests: Option<usize>,
    /// Send this file's bytes as the body of every request, instead of the chat
    #[arg(long, value_name = "FILE")]
    pub body: Option<PathBuf>,
    /// The body is for /v1/completions
    #[arg(long, requires = "body")]
    pub completions: bool,
    /// The chat's size
    #[command(flatten)]
    pub chat: ChatArgs,
}

/// What `run` and `replay` have in common.
#[derive(Clone, Debug, clap::Args)]
pub struct CommonArgs {
    /// Where requests go: http://HOST[:PORT][/PREFIX]
    #[arg(long)]
    pub url: String,
    /// Model named in the requests
    #[arg(long, default_value = "kvlane/demo")]
    pub model: String,
    /// Cores of the generator, one thread each, pinned (such as 0,2-3); default: the last one
    #[arg(long, value_name = "LIST")]
    pub cores: Option<String>,
    /// What generates the load
    #[arg(long, value_enum, default_value_t)]
    pub runtime: RuntimeChoice,
    /// Seconds for one request, connect included
    #[arg(long, default_value_t = 120.0)]
    pub timeout: f64,
    /// Requests in flight per thread; an open loop that reaches it waits, which its lag shows
    #[arg(long, value_name = "N", default_value_t = 4_096)]
    pub in_flight_max: usize,
    /// Seed of texts and times
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Also write the report as JSON; `-` = to standard output, instead of the text
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
}

/// The size of the built-in chat.
#[derive(Clone, Debug, clap::Args)]
pub struct ChatArgs {
    /// Conversations at once
    #[arg(long, default_value_t = 32)]
    pub sessions: usize,
    /// Turns of a conversation
    #[arg(long, default_value_t = 6)]
    pub turns: usize,
    /// Distinct system prompts
    #[arg(long, default_value_t = 4)]
    pub system_prompts: usize,
    /// Tokens of a system prompt, roughly
    #[arg(long, default_value_t = 400)]
    pub system_tokens: usize,
    /// Tokens of a question, roughly
    #[arg(long, default_value_t = 60)]
    pub user_tokens: usize,
    /// Tokens of an earlier reply in the prompt, roughly
    #[arg(long, default_value_t = 120)]
    pub reply_tokens: usize,
    /// Tokens to generate
    #[arg(long, default_value_t = 16)]
    pub max_tokens: u32,
}

impl ChatArgs {
    fn shape(&self, common: &CommonArgs) -> ChatShape {
        ChatShape {
            model: common.model.clone(),
            sessions: self.sessions,
            turns: self.turns,
            system_prompts: self.system_prompts,
            system_tokens: self.system_tokens,
            user_tokens: self.user_tokens,
            reply_tokens: self.reply_tokens,
            max_tokens: self.max_tokens,
            seed: common.seed,
        }
    }
}

/// Runs the command; exit code 0 when every request got its answer and the figures are worth a verdict, else 1.
///
/// # Errors
/// Arguments that do not fit together, an unusable URL or core, a file that cannot be read or written.
pub fn main(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let workload = match &args.body {
        Some(path) => Workload::Fixed(fixed_body(path, args.completions)?),
        None => {
            if args.chat.sessions > 100_000 || args.chat.turns > 10_000 {
                bail!("--sessions is at most 100000 and --turns at most 10000");
            }
            Workload::Chat(ChatWorkload::new(args.chat.shape(&args.common)))
        }
    };
    let seconds = seconds("--seconds", args.seconds)?;
    let requests_max = args.requests.unwrap_or(usize::MAX);
    let (pace, in_words) = match args.rate {
        Some(rate) => {
            let arrivals = arrivals(rate, args.even, seconds, requests_max, args.common.seed)?;
            let kind = if args.even { "even" } else { "Poisson" };
            (Pace::Open { arrivals: arrivals.into() }, format!("open loop, {rate} requests/s, {kind}"))
        }
        None => {
            let clients = args.concurrency.unwrap_or(8).max(1);
            (Pace::Closed { clients }, format!("closed loop, {clients} clients"))
        }
    };
    let report = args.common.play(workload, pace, in_words, seconds, requests_max)?;
    args.common.tell(&report)
}

fn fixed_body(path: &Path, completions: bool) -> anyhow::Result<Request> {
    let body = std::fs::read(path).with_context(|| format!("the body {} cannot be read", path.display()))?;
    Ok(Request { api: if completions { Api::Completions } else { Api::Chat }, body })
}

/// A positive number of seconds, at most a year.
pub(crate) fn seconds(option: &str, value: f64) -> anyhow::Result<Duration> {
    if !(value > 0.0 && value <= 31_536_000.0) {
        bail!("{option} {value}: a number of seconds above 0 is needed");
    }
    Ok(Duration::from_secs_f64(value))
}

/// When each request of an open loop is due.
pub(crate) fn arrivals(
    rate: f64,
    even: bool,
    length: Duration,
    most: usize,
    seed: u64,
) -> anyhow::Result<Vec<Duration>> {
    if !(rate > 0.0 && rate.is_finite()) {
        bail!("--rate {rate}: a number above 0 is needed");
    }
    let mut random = Random::of(seed, ARRIVAL, 0);
    let (mut arrivals, mut at) = (Vec::new(), 0.0);
    let length = length.as_secs_f64();
    while at < length && arrivals.len() < most {
        if arrivals.len() == ARRIVALS_MAX {
            bail!("--rate {rate} over {length} s is more than {ARRIVALS_MAX} requests: lower one of them");
        }
        arrivals.push(Duration::from_secs_f64(at));
        at += if even { 1.0 } else { -(1.0 - random.unit()).ln() } / rate;
    }
    Ok(arrivals)
}

impl CommonArgs {
    /// Plays the workload.
    pub(crate) fn play(
        &self,
        workload: Workload,
        pace: Pace,
        pace_in_words: String,
        duration: Duration,
        requests_max: usize,
    ) -> anyhow::Result<Report> {
        let cores = self.cores.as_deref().map_or_else(|| Ok(threads::default_cores()), threads::parse_cores)?;
        let plan = Plan {
            target: Target::parse(&self.url)?,
            requests_max: requests_max.min(workload.len().unwrap_or(usize::MAX)),
            workload,
            pace,
            duration,
            timeout: seconds("--timeout", self.timeout)?,
            in_flight_max: self.in_flight_max.max(1),
            threads: cores.len(),
            progress: Progress::default(),
        };
        threads::play(plan, cores, self.runtime, pace_in_words)
    }

    /// Prints the report as asked for, and gives the exit code it stands for.
    pub(crate) fn tell(&self, report: &Report) -> anyhow::Result<ExitCode> {
        let json = || serde_json::to_string_pretty(&report.to_json()).expect("a JSON value can be written");
        match &self.json {
            Some(path) if path.as_os_str() == "-" => println!("{}", json()),
            Some(path) => {
                let written = std::fs::write(path, json() + "\n");
                written.with_context(|| format!("the report {} cannot be written", path.display()))?;
                print!("{}", report.to_text());
            }
            None => print!("{}", report.to_text()),
        }
        let good = report.seen.errors() == 0 && report.verdict() == Verdict::Valid;
        Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

#[cfg(test)]
mod tests;
