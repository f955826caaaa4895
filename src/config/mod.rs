//! The configuration file: TOML, read whole, with every problem reported at its line.
//!
//! Without a file everything has its default and there are no rules; they come over the management API.

#![forbid(unsafe_code)]

mod options;

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use shards::limits::Limits;

use crate::cores::Wishes;
use crate::fields::{Dialect, Fields, Problem, Report, from_toml};
use crate::rules::{self, KvDefaults, Rule};

/// Everything the process is started with.
#[derive(Clone, Debug)]
pub struct Config {
    /// `log`: least level that is logged, or a filter of the form `info,kvlane::ingest=debug`.
    pub log: String,
    /// Cores asked for.
    pub cores: Wishes,
    /// `[shards] listen_backlog`: connections the kernel holds per listening socket before it refuses more.
    pub listen_backlog: u32,
    /// `[shards] ring_entries`: submission entries of each shard's ring; a power of two.
    pub ring_entries: u32,
    /// `[shards] drain_timeout_ms`: time that requests under way get to finish at shutdown. Then they are cut.
    pub drain_timeout: Duration,
    /// `[limits]`.
    pub limits: Limits,
    /// `[tokenizers] dir`: holds `<model with / replaced by __>/tokenizer.json`.
    pub tokenizers_dir: PathBuf,
    /// `[admin] listen`: address of the management API.
    pub admin_listen: SocketAddr,
    /// `[metrics] listen`: address of the second listener; none = off.
    pub metrics_listen: Option<SocketAddr>,
    /// `[[rule]]`, in order.
    pub rules: Vec<Rule>,
    /// What rules get where they say nothing: from the environment.
    pub kv_defaults: KvDefaults,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            log: "info".to_owned(),
            cores: Wishes::default(),
            listen_backlog: 4096,
            ring_entries: 4096,
            drain_timeout: Duration::from_secs(30),
            limits: Limits::default(),
            tokenizers_dir: PathBuf::from("/etc/loxilb/tokenizers"),
            admin_listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 11111),
            metrics_listen: None,
            rules: Vec::new(),
            kv_defaults: KvDefaults::default(),
        }
    }
}

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file says something that cannot be used.
    #[error("{}", Listing { path, problems })]
    Problems {
        /// The file.
        path: PathBuf,
        /// What, in the order of the file.
        problems: Vec<Problem>,
    },
}

/// Problems of a file, one per line, each beginning with `FILE:LINE:`.
#[derive(Clone, Copy, Debug)]
pub struct Listing<'a> {
    /// The file.
    pub path: &'a Path,
    /// The problems.
    pub problems: &'a [Problem],
}

impl fmt::Display for Listing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.problems.iter().enumerate() {
            let newline = if i == 0 { "" } else { "\n" };
            write!(f, "{newline}{}:{}: {problem}", self.path.display(), problem.line.unwrap_or(1))?;
        }
        Ok(())
    }
}

impl Config {
    /// Reads and checks a file; what comes beside the configuration are warnings.
    ///
    /// # Errors
    /// [`ConfigError`]: the file is unreadable, or everything in it that cannot be used.
    pub fn read(path: &Path, kv_defaults: &KvDefaults) -> Result<(Config, Vec<Problem>), ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })?;
        Self::parse(&text, kv_defaults).map_err(|problems| ConfigError::Problems { path: path.to_owned(), problems })
    }

    /// Checks the text of a file.
    ///
    /// # Errors
    /// Everything in it that cannot be used.
    pub fn parse(text: &str, kv_defaults: &KvDefaults) -> Result<(Config, Vec<Problem>), Vec<Problem>> {
        let node = from_toml(text)?;
        let mut report = Report::new(Dialect::File);
        let mut root = Fields::root(&mut report, &node);
        let mut config = Config { kv_defaults: kv_defaults.clone(), ..Config::default() };
        options::read(&mut config, &mut root, &mut report);
        config.rules = read_rules(&mut root, &mut report, &config);
        root.finish(&mut report);
        report.problems.sort_by_key(|problem| problem.line);
        if report.is_usable() { Ok((config, report.warnings)) } else { Err(report.problems) }
    }
}

fn read_rules(root: &mut Fields<'_>, report: &mut Report, config: &Config) -> Vec<Rule> {
    let mut taken: HashMap<SocketAddr, &str> = HashMap::from([(config.admin_listen, "[admin] listen")]);
    if let Some(address) = config.metrics_listen {
        taken.insert(address, "[metrics] listen");
    }
    let mut rules: Vec<Rule> = Vec::new();
    for (index, fields) in root.tables(report, "rule").into_iter().enumerate() {
        let place = format!("rule[{index}]");
        let Some(rule) = rules::check_file(fields, report, &config.kv_defaults) else { continue };
        if let Some(owner) = taken.get(&rule.key.listen()) {
            let message = format!("{place}: {} is already that of {owner}", rule.key.listen());
            root.invalid(report, "rule", message);
        }
        if rules.iter().any(|other| other.key == rule.key) {
            root.invalid(report, "rule", format!("{place}: an earlier rule is for {} already", rule.key));
        }
        rules.push(rule);
    }
    rules
}

#[cfg(test)]
mod tests;
