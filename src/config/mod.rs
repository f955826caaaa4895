//! The configuration file: TOML, read whole, with every problem reported at its line.
//!
//! Without a file everything has its default and there are no rules; they come over the management API.

#![forbid(unsafe_code)]

mod options;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use shards::executor::Rung;
use shards::limits::Limits;

use crate::access::AccessOptions;
use crate::cores::{self, Machine, Wishes};
use crate::fields::{Dialect, Fields, Kind, Node, Problem, Report, from_toml};
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
    /// `[shards] driver`: the best driver that shards try for; `epoll` leaves io_uring out.
    pub first_rung: Rung,
    /// `[shards] drain_timeout_ms`: time that requests under way get to finish at shutdown. Then they are cut.
    pub drain_timeout: Duration,
    /// `[limits]`.
    pub limits: Limits,
    /// `[tokenizers] dir`: holds `<model with / replaced by __>/tokenizer.json`.
    pub tokenizers_dir: PathBuf,
    /// `[state] directory`: what engines hold is remembered there over a restart of the gateway; none = nowhere.
    pub state_directory: Option<PathBuf>,
    /// `[state] period_ms`: time between two writings of a rank that changed.
    pub state_period: Duration,
    /// `[admin] listen`: address of the management API.
    pub admin_listen: SocketAddr,
    /// `[admin]`: who may use the management API.
    pub access: AccessOptions,
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
            first_rung: Rung::DeferTaskrun,
            drain_timeout: Duration::from_secs(30),
            limits: Limits::default(),
            tokenizers_dir: PathBuf::from(rules::TOKENIZERS_DIR),
            state_directory: None,
            state_period: Duration::from_secs(30),
            admin_listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 11111),
            access: AccessOptions::default(),
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
    /// Reads and checks a file; what comes beside the configuration are warnings. `machine` is the one that must have
    /// the cores it names; none = any.
    ///
    /// # Errors
    /// [`ConfigError`]: the file is unreadable, or everything in it that cannot be used.
    pub fn read(
        path: &Path,
        kv_defaults: &KvDefaults,
        machine: Option<&Machine>,
    ) -> Result<(Config, Vec<Problem>), ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })?;
        Self::parse(&text, kv_defaults, machine)
            .map_err(|problems| ConfigError::Problems { path: path.to_owned(), problems })
    }

    /// Checks the text of a file, as [`Config::read`] does.
    ///
    /// # Errors
    /// Everything in it that cannot be used.
    pub fn parse(
        text: &str,
        kv_defaults: &KvDefaults,
        machine: Option<&Machine>,
    ) -> Result<(Config, Vec<Problem>), Vec<Problem>> {
        let node = from_toml(text)?;
        let mut report = Report::new(Dialect::File);
        let mut root = Fields::root(&mut report, &node);
        let mut config = Config { kv_defaults: kv_defaults.clone(), ..Config::default() };
        options::read(&mut config, &mut root, &mut report);
        if let Some(machine) = machine {
            check_cores(&mut report, &node, machine, &config.cores);
        }
        config.rules = read_rules(&mut root, &mut report, &config);
        root.finish(&mut report);
        report.problems.sort_by_key(|problem| problem.line);
        if report.is_usable() { Ok((config, report.warnings)) } else { Err(report.problems) }
    }
}

fn check_cores(report: &mut Report, document: &Node, machine: &Machine, wishes: &Wishes) {
    for error in cores::plan(machine, wishes).err().into_iter().flatten() {
        let key = error.option().to_owned();
        let line = document.find(&key).and_then(|node| node.line);
        report.problems.push(Problem { kind: Kind::Invalid, line, key, message: error.to_string() });
    }
}

fn read_rules(root: &mut Fields<'_>, report: &mut Report, config: &Config) -> Vec<Rule> {
    let doors = [("[admin] listen", Some(config.admin_listen)), ("[metrics] listen", config.metrics_listen)];
    let mut rules: Vec<Rule> = Vec::new();
    for (index, fields) in root.tables(report, "rule").into_iter().enumerate() {
        let line = fields.line();
        let invalid = |report: &mut Report, message| {
            let key = format!("rule[{index}]");
            report.problems.push(Problem { kind: Kind::Invalid, line, key, message });
        };
        let Some(rule) = rules::check_file(fields, report, &config.kv_defaults) else { continue };
        let listen = rule.key.listen();
        for (owner, address) in doors {
            if let Some(address) = address.filter(|address| overlaps(*address, listen)) {
                let message = if address == listen {
                    format!("{listen} is already that of {owner}")
                } else {
                    format!("{listen} is already part of {address}, that of {owner}, or the other way round")
                };
                invalid(report, message);
            }
        }
        if rules.iter().any(|other| other.key == rule.key) {
            invalid(report, format!("an earlier rule is for {} already", rule.key));
        }
        rules.push(rule);
    }
    rules
}

/// Whether a listener of the management plane keeps another from listening. Port 0 is a free one.
fn overlaps(door: SocketAddr, other: SocketAddr) -> bool {
    // A rule at `::` is for IPv6 alone, the management plane's is for both.
    let door_has_all = door.ip().is_unspecified() && (door.is_ipv6() || other.is_ipv4());
    let other_has_all = other.ip().is_unspecified() && door.is_ipv4() == other.is_ipv4();
    door.port() != 0 && door.port() == other.port() && (door.ip() == other.ip() || door_has_all || other_has_all)
}

#[cfg(test)]
mod tests;
