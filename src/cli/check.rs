//! `kvlane check`: what is wrong with a file, or what would run.

use std::path::Path;

use serde_json::{Value, json};
use shards::executor::{Refusal, Ring, Rung};

use crate::config::{Config, ConfigError, Listing};
use crate::cores::{self, Machine, Plan};
use crate::fields::Problem;

use super::{Outcome, descriptors};

/// A file that is right, and what this machine gives it.
struct Report<'a> {
    config: &'a Config,
    warnings: &'a [Problem],
    plan: &'a Plan,
}

pub(super) fn check(path: &Path, as_json: bool) -> Outcome {
    let read = super::kv_defaults().map_err(Failure::Environment).and_then(|defaults| {
        let (config, warnings) = Config::read(path, &defaults).map_err(Failure::File)?;
        let plan = cores::plan(&Machine::read(), &config.cores).map_err(Failure::Cores)?;
        Ok((config, warnings, plan))
    });
    match read {
        Ok((config, warnings, plan)) => {
            let report = Report { config: &config, warnings: &warnings, plan: &plan };
            if as_json {
                println!("{}", report.json())
            } else {
                report.print(path)
            }
            Outcome::Right
        }
        Err(failure) => {
            if as_json {
                println!("{}", failure.json())
            } else {
                eprintln!("{}", failure.text(path))
            }
            failure.outcome()
        }
    }
}

enum Failure {
    Environment(Vec<Problem>),
    File(ConfigError),
    Cores(Vec<cores::CoreError>),
}

impl Failure {
    fn outcome(&self) -> Outcome {
        match self {
            Failure::File(ConfigError::Unreadable { .. }) => Outcome::Usage,
            Failure::File(ConfigError::Problems { .. }) | Failure::Environment(_) | Failure::Cores(_) => Outcome::No,
        }
    }

    fn text(&self, path: &Path) -> String {
        match self {
            Failure::File(error) => error.to_string(),
            Failure::Environment(problems) => {
                problems.iter().map(|problem| format!("environment: {problem}")).collect::<Vec<_>>().join("\n")
            }
            Failure::Cores(errors) => {
                let line = |error: &cores::CoreError| format!("{}: {}: {error}", path.display(), error.option());
                errors.iter().map(line).collect::<Vec<_>>().join("\n")
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
            Failure::Cores(errors) => {
                errors.iter().map(|e| json!({"key": e.option(), "message": e.to_string()})).collect()
            }
        };
        json!({"right": false, "problems": problems})
    }
}

impl Report<'_> {
    fn streams(&self) -> usize {
        let of_rule =
            |rule: &crate::rules::Rule| rule.kv.as_ref().map_or(0, |kv| usize::from(kv.ranks) * rule.endpoints.len());
        self.config.rules.iter().map(of_rule).sum()
    }

    fn needed(&self) -> u64 {
        descriptors::needed(self.plan.shards.len(), self.config.limits.connections_max, self.streams())
    }

    fn json(&self) -> Value {
        let limits = descriptors::read().ok();
        let rules: Vec<Value> = self.config.rules.iter().map(|rule| json!(rule.key.to_string())).collect();
        json!({
            "right": true,
            "warnings": self.warnings.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "rules": rules,
            "admin": self.config.admin_listen.to_string(),
            "metrics": self.config.metrics_listen.map(|address| address.to_string()),
            "tokenizers": self.config.tokenizers_dir,
            "cores": {"shards": self.plan.shards, "ingest": self.plan.ingest, "control": self.plan.control,
                      "notes": self.plan.notes},
            "descriptors": {"soft": limits.map(|l| l.soft), "hard": limits.map(|l| l.hard), "needed": self.needed()},
            "ring": ring(self.config.ring_entries),
        })
    }

    fn print(&self, path: &Path) {
        if !self.warnings.is_empty() {
            eprintln!("{}", Listing { path, problems: self.warnings });
        }
        println!("{}: right", path.display());
        for rule in &self.config.rules {
            let how = match &rule.kv {
                Some(kv) => {
                    format!("by KV cache, {} tokens per block, {}", kv.block_tokens, kv.algo.name())
                }
                None => "without KV cache".to_owned(),
            };
            println!("rule        {}: {} endpoints, {how}", rule.key, rule.endpoints.len());
        }
        println!("admin       {}", self.config.admin_listen);
        let metrics = self.config.metrics_listen.map_or_else(|| "off".to_owned(), |address| address.to_string());
        println!("metrics     {metrics}");
        println!("tokenizers  {}", self.config.tokenizers_dir.display());
        let plan = self.plan;
        println!("cores       shards {:?}, ingest {:?}, control {}", plan.shards, plan.ingest, plan.control);
        for note in &plan.notes {
            println!("            note: {note}");
        }
        match descriptors::read() {
            Ok(limits) => {
                println!(
                    "descriptors {} may be open (serve raises {} to that), {} may be needed",
                    limits.hard,
                    limits.soft,
                    self.needed()
                );
                if limits.hard < self.needed() {
                    println!("            note: raise the hard limit (ulimit -Hn), or lower limits.connections_max");
                }
            }
            Err(error) => println!("descriptors unknown: {error}"),
        }
        println!("ring        {}", ring(self.config.ring_entries));
    }
}

/// Which driver a shard would get, and why no better one.
fn ring(entries: u32) -> String {
    match Ring::build(Rung::DeferTaskrun, entries) {
        Ok((_, rung, refusals)) if refusals.is_empty() => rung.name().to_owned(),
        Ok((_, rung, refusals)) => format!("{} ({})", rung.name(), reasons(&refusals)),
        Err(refusals) => format!("none ({})", reasons(&refusals)),
    }
}

fn reasons(refusals: &[Refusal]) -> String {
    let each: Vec<_> = refusals.iter().map(|r| format!("{} refused: {}", r.rung.name(), r.reason)).collect();
    each.join("; ")
}
