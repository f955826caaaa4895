//! The configuration file, read again while the gateway runs: when it changes, and at SIGHUP.
//!
//! All or nothing: a file with a problem, or rules that cannot be put in force, change nothing. What only a start can
//! change is named in the log.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, info, warn};

use crate::access::Mark;
use crate::config::{Config, ConfigError};
use crate::fields::Problem;
use crate::logs::LogSwitch;
use crate::supervise::{Control, Difference, Origin, Scope};

/// How often the file is looked at.
const PERIOD: Duration = Duration::from_secs(1);

/// Reads the file again whenever it may be another, until dropped. `now` is what it was at the start.
pub(super) async fn watch(path: PathBuf, mut now: Config, control: Control, log: LogSwitch) {
    let Ok(mut hangup) = signal(SignalKind::hangup()) else {
        return error!("SIGHUP cannot be received: the configuration file is read at the start only");
    };
    let mut seen = Mark::of(&path);
    let mut tick = tokio::time::interval(PERIOD);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let asked = tokio::select! {
            _ = hangup.recv() => true,
            _ = tick.tick() => false,
        };
        let mark = Mark::of(&path);
        if asked || mark != seen {
            seen = mark;
            read_again(&path, &mut now, &control, &log).await;
        }
    }
}

/// Without a file SIGHUP asks for nothing, and must not end the process.
pub(super) async fn nothing_to_read() {
    if let Ok(mut hangup) = signal(SignalKind::hangup()) {
        while hangup.recv().await.is_some() {
            info!("SIGHUP: there is no configuration file to read again");
        }
    }
}

async fn read_again(path: &Path, now: &mut Config, control: &Control, log: &LogSwitch) {
    let (file, defaults) = (path.to_owned(), now.kv_defaults.clone());
    let read = tokio::task::spawn_blocking(move || Config::read(&file, &defaults, None)).await;
    let Ok(read) = read else { return };
    let (config, warnings) = match read {
        Ok(read) => read,
        Err(problem) => return refused(&problem),
    };
    let rules = config.rules.iter().map(|rule| (rule.clone(), Origin::File)).collect();
    let difference = match control.replace(rules, Scope::File, false).await {
        Ok(difference) => difference,
        Err(why) => {
            return error!(file = %path.display(), %why, "the configuration file is not taken up: nothing was changed");
        }
    };
    for warning in &warnings {
        warn!(%warning, "configuration");
    }
    if config.log != now.log
        && let Err(why) = log.set(&config.log)
    {
        warn!(%why, "log");
    }
    tell(path, &difference, &for_a_start(now, &config));
    now.rules = config.rules;
    now.log = config.log;
}

fn refused(problem: &ConfigError) {
    let problems: Vec<String> = match problem {
        ConfigError::Unreadable { .. } => vec![problem.to_string()],
        ConfigError::Problems { problems, .. } => problems.iter().map(Problem::to_string).collect(),
    };
    for problem in &problems {
        error!(%problem, "configuration");
    }
    error!(problems = problems.len(), "the configuration file is not taken up: nothing was changed");
}

fn tell(path: &Path, difference: &Difference, for_a_start: &[&str]) {
    for key in &difference.added {
        info!(rule = %key, "rule added by the configuration file");
    }
    for (key, members) in &difference.changed {
        info!(rule = %key, members = members.join(", "), "rule changed by the configuration file");
    }
    for key in &difference.removed {
        info!(rule = %key, "rule removed by the configuration file");
    }
    for table in for_a_start {
        warn!(table, "what the configuration file says differently here counts from the next start on");
    }
    let (added, changed, removed) = (difference.added.len(), difference.changed.len(), difference.removed.len());
    info!(file = %path.display(), added, changed, removed, "configuration file read again");
}

/// Tables whose new values only a start takes up.
fn for_a_start(old: &Config, new: &Config) -> Vec<&'static str> {
    let admin = |config: &Config| (config.admin_listen, config.access.clone(), config.kv_defaults.files.clone());
    let differs = [
        (old.cores != new.cores, "shards.cores, ingest.cores, control.core"),
        (
            (old.listen_backlog, old.ring_entries, old.first_rung, old.drain_timeout)
                != (new.listen_backlog, new.ring_entries, new.first_rung, new.drain_timeout),
            "shards",
        ),
        (format!("{:?}", old.limits) != format!("{:?}", new.limits), "limits"),
        (old.tokenizers_dir != new.tokenizers_dir, "tokenizers"),
        ((&old.state_directory, old.state_period) != (&new.state_directory, new.state_period), "state"),
        (admin(old) != admin(new), "admin"),
        (old.metrics_listen != new.metrics_listen, "metrics"),
    ];
    differs.into_iter().filter(|(differs, _)| *differs).map(|(_, table)| table).collect()
}
