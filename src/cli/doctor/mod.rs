//! `kvlane doctor`: does what the configuration says of its engines hold?
//!
//! The live engines are asked what they are ([`engine`]), their tokens are compared ([`tokens`]), and their events are listened
//! to by the gateway's own ingest ([`events`]); a running gateway is asked for what only it can know ([`gateway`]), another
//! one for what both must agree on ([`peer`]).
//!
//! **Invariant.** Nothing is changed or taken away: no drain, no `/metrics` of TensorRT-LLM, and no generation unless
//! `--probe` asks for one.

#![forbid(unsafe_code)]

mod at_once;
mod engine;
mod events;
mod gateway;
mod peer;
mod report;
mod tokens;

use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::inquiry::Gateway;
use super::manage::Credentials;
use super::{Outcome, outcome_of};
use crate::config::{Config, ConfigError};
use crate::rules::Rule;
use crate::supervise::Rehearsal;

use at_once::at_once;
use engine::Checked;
use report::Report;

/// Rules whose names are looked up at once.
const NAMES_MAX: usize = 64;

/// What `kvlane doctor` is told on its command line.
#[derive(Debug, Args)]
pub(super) struct DoctorArgs {
    /// Configuration file (TOML) whose rules' engines are asked.
    #[arg(short, long, value_name = "FILE", required_unless_present = "url")]
    config: Option<PathBuf>,
    /// Management API of the running gateway, http://HOST:PORT: it tells of rules made over the API, and of
    /// TensorRT-LLM's events.
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// Management API of the other gateway of a pair, to be compared with this configuration, or with --url's gateway.
    #[arg(long, value_name = "URL")]
    peer: Option<String>,
    /// How both of them let one in.
    #[command(flatten)]
    credentials: Credentials,
    /// Send one short generation to each engine, so that even an idle one shows its keys.
    #[arg(long, requires = "config")]
    probe: bool,
    /// Longest time to listen to events, seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=600))]
    wait: u64,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

/// A rule of the configuration with what its engines said.
struct Case {
    rule: Rule,
    addresses: Vec<Option<SocketAddr>>,
    /// By endpoint of the rule.
    checked: Vec<Checked>,
}

pub(super) fn doctor(args: &DoctorArgs) -> Outcome {
    let config = match args.config.as_deref().map(read).transpose() {
        Ok(config) => config,
        Err(outcome) => return outcome,
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return refuse(&format!("no runtime: {error}"), Outcome::No),
    };
    let mut report = Report::default();
    if let Err(why) = runtime.block_on(examine(args, config.as_ref(), &mut report)) {
        return refuse(&why, Outcome::Usage);
    }
    print(args, &report)
}

/// Reads the configuration; what is wrong with it is printed here.
fn read(path: &std::path::Path) -> Result<Config, Outcome> {
    let no = |text: &dyn std::fmt::Display, outcome| Err(refuse(&text.to_string(), outcome));
    let defaults = match super::kv_defaults() {
        Ok(defaults) => defaults,
        Err(problems) => {
            let texts: Vec<String> = problems.iter().map(ToString::to_string).collect();
            return no(&format!("environment: {}", texts.join("; ")), Outcome::No);
        }
    };
    // Cores are none of its business: it may run on another machine than the gateway.
    match Config::read(path, &defaults, None) {
        Ok((config, _)) => Ok(config),
        Err(error @ ConfigError::Problems { .. }) | Err(error @ ConfigError::Unreadable { .. }) => {
            let outcome = outcome_of(&error);
            no(&error, outcome)
        }
    }
}

fn refuse(why: &str, outcome: Outcome) -> Outcome {
    let _ = writeln!(io::stderr(), "kvlane doctor: {why}");
    outcome
}

fn print(args: &DoctorArgs, report: &Report) -> Outcome {
    let mut out = io::stdout().lock();
    let text = if args.json { report.json().to_string() } else { report.to_string() };
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            refuse(&format!("the result cannot be printed: {error}"), Outcome::No)
        }
        _ if report.is_right() => Outcome::Right,
        _ => Outcome::No,
    }
}

/// Makes all checks; the error is a wrong command.
async fn examine(args: &DoctorArgs, config: Option<&Config>, report: &mut Report) -> Result<(), String> {
    let at = |url: &str| Gateway::at(url, &args.credentials);
    let url = args.url.as_deref().map(at).transpose()?;
    let peer = args.peer.as_deref().map(at).transpose()?;
    if let Some(config) = config {
        let addresses = at_once(config.rules.iter().map(Rehearsal::resolve).collect(), NAMES_MAX).await;
        let rules: Vec<_> = config.rules.iter().cloned().zip(addresses).collect();
        let checked = engine::check(&rules, &config.tokenizers_dir, report).await;
        let case = |((rule, addresses), checked)| Case { rule, addresses, checked };
        let cases = rules.into_iter().zip(checked).map(case).collect();
        if config.rules.is_empty() {
            report.unknown(
                "configuration",
                "rules",
                "it has none: nothing can be asked",
                "rules made over the API: --url",
            );
        }
        let listen = events::Listening { time: Duration::from_secs(args.wait), probe: args.probe, asks: url.is_some() };
        events::check(cases, listen, report).await;
    }
    if let Some(url) = &url {
        gateway::check(url, report);
    }
    if let Some(peer) = &peer {
        peer::check(peer, url.as_ref(), config, report);
    }
    Ok(())
}
