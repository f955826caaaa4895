//! `kvlane check`: what is wrong with a file, or what would run.

use std::fmt;
use std::io::{self, Write as _};
use std::path::Path;

use serde_json::{Value, json};
use shards::executor::{Refusal, Ring};

use crate::config::{Config, ConfigError, Listing};
use crate::cores::{self, Machine, Plan};
use crate::fields::Problem;

use super::{Outcome, descriptors, outcome_of};

/// A file that is right, and what this machine gives it.
struct Report<'a> {
    config: &'a Config,
    warnings: &'a [Problem],
    /// Variables that are set and do nothing.
    unused: &'a [Problem],
    plan: &'a Plan,
}

pub(super) fn check(path: &Path, as_json: bool) -> Outcome {
    let read = super::kv_defaults().map_err(Failure::Environment).and_then(|defaults| {
        let machine = Machine::read();
        let (config, warnings) = Config::read(path, &defaults, Some(&machine)).map_err(Failure::File)?;
        let plan = cores::plan(&machine, &config.cores).expect("the configuration was read for this machine");
        Ok((config, warnings, plan))
    });
    match read {
        Ok((config, warnings, plan)) => {
            let unused = super::unused_variables();
            let report = Report { config: &config, warnings: &warnings, unused: &unused, plan: &plan };
            if as_json {
                return print(&report.json(), Outcome::Right);
            }
            if !warnings.is_empty() {
                complain(&Listing { path, problems: &warnings });
            }
            for variable in &unused {
                complain(&format_args!("environment: {variable}"));
            }
            print(&Text { report: &report, path }, Outcome::Right)
        }
        Err(failure) if as_json => print(&failure.json(), failure.outcome()),
        Err(failure) => {
            complain(&failure.text());
            failure.outcome()
        }
    }
}

/// Prints a result. A reader that has left has read what it wanted; any other failure turns the outcome into "no".
fn print(text: &impl fmt::Display, outcome: Outcome) -> Outcome {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            complain(&format_args!("kvlane check: the result cannot be printed: {error}"));
            Outcome::No
        }
        _ => outcome,
    }
}

/// Prints what is wrong, if there is anybody to tell.
fn complain(text: &impl fmt::Display) {
    let _ = writeln!(io::stderr(), "{text}");
}

enum Failure {
    Environment(Vec<Problem>),
    File(ConfigError),
}

impl Failure {
    fn outcome(&self) -> Outcome {
        match self {
            Failure::File(error) => outcome_of(error),
            Failure::Environment(_) => Outcome::No,
        }
    }

    fn text(&self) -> String {
        match self {
            Failure::File(error) => error.to_string(),
            Failure::Environment(problems) => {
                problems.iter().map(|problem| format!("environment: {problem}")).collect::<Vec<_>>().join("\n")
            }
        }
    }

    fn json(&self) -> Value {
        let problem = |p: &Problem| json!({"line": p.line, "key": p.key, "message": p.message});
        let problems: Vec<Value> = match self {
            Failure::File(ConfigError::Unreadable { source, .. }) => vec![json!({"message": source.to_string()})],
            Failure::File(ConfigError::Problems { problems, .. }) | Failure::Environment(problems) => {
                problems.iter().map(problem).collect()
            }
        };
        json!({"right": false, "problems": problems})
    }
}

impl Report<'_> {
    fn needed(&self) -> u64 {
        let streams = descriptors::streams(&self.config.rules);
        descriptors::needed(self.plan.shards.len(), self.config.limits.connections_max, streams)
    }

    fn json(&self) -> Value {
        let limits = descriptors::read().ok();
        let rules: Vec<Value> = self.config.rules.iter().map(|rule| json!(rule.key.to_string())).collect();
        json!({
            "right": true,
            "warnings": self.warnings.iter().chain(self.unused).map(ToString::to_string).collect::<Vec<_>>(),
            "rules": rules,
            "admin": self.config.admin_listen.to_string(),
            "metrics": self.config.metrics_listen.map(|address| address.to_string()),
            "tokenizers": self.config.tokenizers_dir,
            "tokenizers_found": self.config.tokenizers_dir.is_dir(),
            "cores": {"shards": self.plan.shards, "ingest": self.plan.ingest, "control": self.plan.control,
                      "notes": self.plan.notes},
            "descriptors": {"soft": limits.map(|l| l.soft), "hard": limits.map(|l| l.hard), "needed": self.needed()},
            "ring": ring(self.config),
        })
    }
}

/// The report as people read it.
struct Text<'a> {
    report: &'a Report<'a>,
    path: &'a Path,
}

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { config, plan, .. } = self.report;
        writeln!(f, "{}: right", self.path.display())?;
        for rule in &config.rules {
            let how = match &rule.kv {
                Some(kv) => {
                    format!("by KV cache, {} tokens per block, {}", kv.block_tokens, kv.algo.name())
                }
                None => "without KV cache".to_owned(),
            };
            writeln!(f, "rule        {}: {} endpoints, {how}", rule.key, rule.endpoints.len())?;
        }
        writeln!(f, "admin       {}", config.admin_listen)?;
        let metrics = config.metrics_listen.map_or_else(|| "off".to_owned(), |address| address.to_string());
        writeln!(f, "metrics     {metrics}")?;
        writeln!(f, "tokenizers  {}", config.tokenizers_dir.display())?;
        if !config.tokenizers_dir.is_dir() {
            writeln!(
                f,
                "            note: there is no such directory: without tokenizers nothing is routed by KV cache"
            )?;
        }
        writeln!(f, "cores       shards {:?}, ingest {:?}, control {}", plan.shards, plan.ingest, plan.control)?;
        for note in &plan.notes {
            writeln!(f, "            note: {note}")?;
        }
        self.descriptors(f)?;
        write!(f, "ring        {}", ring(config))
    }
}

impl Text<'_> {
    fn descriptors(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limits = match descriptors::read() {
            Ok(limits) => limits,
            Err(error) => return writeln!(f, "descriptors unknown: {error}"),
        };
        let raises = match limits.soft < limits.hard {
            true => format!(" (serve raises the present {} to that)", limits.soft),
            false => String::new(),
        };
        let needed = self.report.needed();
        writeln!(f, "descriptors {} may be open{raises}, {needed} may be needed", limits.hard)?;
        let Report { config, plan, .. } = self.report;
        let streams = descriptors::streams(&config.rules);
        let fits = descriptors::connections_that_fit(plan.shards.len(), limits.hard, streams);
        if fits < config.limits.connections_max {
            let asked = config.limits.connections_max;
            writeln!(
                f,
                "            note: serve lowers limits.connections_max from {asked} to {fits}: raise the hard limit \
                 (ulimit -Hn) for more"
            )?;
        }
        Ok(())
    }
}

/// Which driver a shard would get, and why no better one.
fn ring(config: &Config) -> String {
    match Ring::build(config.first_rung, config.ring_entries) {
        Ok((_, rung, refusals)) if refusals.is_empty() => rung.name().to_owned(),
        Ok((_, rung, refusals)) => format!("{} ({})", rung.name(), reasons(&refusals)),
        Err(refusals) => format!("none ({})", reasons(&refusals)),
    }
}

fn reasons(refusals: &[Refusal]) -> String {
    let each: Vec<_> = refusals.iter().map(|r| format!("{} refused: {}", r.rung.name(), r.reason)).collect();
    each.join("; ")
}
