//! `kvlane serve`: everything started in order, served, and drained.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tracing::{error, info, warn};

use crate::access::Access;
use crate::admin::{Admin, Door};
use crate::config::Config;
use crate::cores::{self, Machine, Plan};
use crate::fields::Problem;
use crate::logs::{self, LogSwitch};
use crate::supervise::{Control, Origin, Supervisor};

use super::{Outcome, descriptors, outcome_of, reload};

/// How long addresses of rules may be busy at the start.
const BUSY_PATIENCE: Duration = Duration::from_secs(2);

/// Where a gateway that serves can be reached.
#[derive(Clone, Copy, Debug)]
pub struct Ready {
    /// The management API.
    pub admin: SocketAddr,
    /// The second listener, if there is one.
    pub metrics: Option<SocketAddr>,
}

/// What of its process a gateway may change, and where its configuration is.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// The log.
    pub log: LogSwitch,
    /// The configuration file, which is read again when it changes and at SIGHUP.
    pub file: Option<PathBuf>,
    /// Client connections that the file asks for, where fewer are in force.
    pub connections_asked: Option<usize>,
}

pub(super) fn serve(path: Option<&Path>) -> Outcome {
    match start(path) {
        Ok(()) => Outcome::Right,
        Err(error) => {
            eprintln!("kvlane: {}", text_of(&error));
            error.downcast_ref().map_or(Outcome::No, outcome_of)
        }
    }
}

/// An error and its causes, each said once: some errors name their cause themselves.
fn text_of(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.ends_with(&cause) {
            text += ": ";
            text += &cause;
        }
    }
    text
}

fn start(path: Option<&Path>) -> anyhow::Result<()> {
    let defaults = super::kv_defaults().map_err(|problems| anyhow::anyhow!("environment: {}", joined(&problems)))?;
    let machine = Machine::read();
    let (mut config, warnings) = match path {
        Some(path) => Config::read(path, &defaults, Some(&machine))?,
        None => (Config { kv_defaults: defaults, ..Config::default() }, Vec::new()),
    };
    let log = LogSwitch::start(&config.log);
    logs::tell_panics();
    for warning in super::unused_variables() {
        warn!(%warning, "environment");
    }
    for warning in &warnings {
        warn!(%warning, "configuration");
    }
    let plan = plan(&machine, &config)?;
    let connections_asked = Some(config.limits.connections_max);
    fit_descriptors(&mut config, plan.shards.len());
    pin(plan.control)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("control runtime")?;
    runtime.block_on(async {
        let stop = stop_signal()?;
        let surroundings = Surroundings { log, file: path.map(Path::to_owned), connections_asked };
        run(config, plan, surroundings, stop, None).await
    })
}

/// Takes all descriptors there are, and no more client connections than they are enough for: a process without
/// descriptors answers nobody.
fn fit_descriptors(config: &mut Config, shards: usize) {
    let limits = match descriptors::raise() {
        Ok(limits) => limits,
        Err(error) => return warn!(%error, "the limit on open descriptors could not be raised"),
    };
    info!(descriptors = limits.soft, "open descriptors allowed");
    let (asked, streams) = (config.limits.connections_max, descriptors::streams(&config.rules));
    let fits = descriptors::connections_that_fit(shards, limits.soft, streams);
    if fits < asked {
        config.limits.connections_max = fits;
        warn!(
            asked,
            in_force = fits,
            needed = descriptors::needed(shards, asked, streams),
            allowed = limits.soft,
            "limits.connections_max is lowered to what descriptors allow: raise the hard limit (ulimit -Hn)"
        );
    }
}

fn plan(machine: &Machine, config: &Config) -> anyhow::Result<Plan> {
    let plan = cores::plan(machine, &config.cores).map_err(|errors| {
        let texts: Vec<String> = errors.iter().map(|error| format!("{}: {error}", error.option())).collect();
        anyhow::anyhow!("{}", texts.join("\n"))
    })?;
    info!(shards = ?plan.shards, ingest = ?plan.ingest, control = plan.control, "cores");
    for note in &plan.notes {
        info!("{note}");
    }
    Ok(plan)
}

/// Puts this thread, and with it every helper it starts, on the control core.
fn pin(core: usize) -> anyhow::Result<()> {
    if !core_affinity::set_for_current(core_affinity::CoreId { id: core }) {
        bail!("control.core: the control thread cannot be put on core {core}");
    }
    Ok(())
}

fn joined(problems: &[Problem]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Done at the first SIGTERM or SIGINT; a second one ends the process at once.
fn stop_signal() -> anyhow::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT")?;
    Ok(async move {
        let name = tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        };
        info!(signal = name, "stopping");
        tokio::spawn(async move {
            tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
            error!("second signal: requests under way are cut");
            std::process::exit(1);
        });
    })
}

/// What whoever starts a gateway for the first time may not expect.
fn say_what_is_missing(control: &Control) {
    let view = control.view();
    if view.entries.is_empty() {
        info!(
            "there is no rule yet: write [[rule]] into a configuration file (serve -c FILE), or make one: kvlane create lb"
        );
    }
    if let Some(passing) = view.kept.passing() {
        info!("{passing}");
    }
}

/// Runs a gateway on the current thread and runtime until `stop` is done and everything is drained. Says through
/// `ready` where it can be reached, once the configuration's rules are in force.
///
/// # Errors
/// An address that is taken, a part that does not start, or a rule of the configuration that cannot be put in force.
pub async fn run(
    config: Config,
    plan: Plan,
    surroundings: Surroundings,
    stop: impl Future<Output = ()>,
    ready: Option<oneshot::Sender<Ready>>,
) -> anyhow::Result<()> {
    let access = Access::open(config.access.clone())?;
    let api = Door::open(config.admin_listen).await.context("[admin] listen")?;
    let metrics = match config.metrics_listen {
        Some(address) => Some(Door::open(address).await.context("[metrics] listen")?),
        None => None,
    };
    let mut supervisor = Supervisor::start(&config, &plan)?;
    let mut failures = Vec::new();
    let patience = Instant::now() + BUSY_PATIENCE;
    for rule in &config.rules {
        let key = rule.key.to_string();
        if let Err(error) = supervisor.apply_at_start(rule, &Origin::File, patience).await {
            failures.push(format!("rule {key}: {error}"));
        }
    }
    if !failures.is_empty() {
        supervisor.run(std::future::ready(())).await;
        bail!("{}", failures.join("\n"));
    }
    supervisor.take_up(patience).await;
    let control = supervisor.control();
    let reached = Ready { admin: api.address(), metrics: metrics.as_ref().map(Door::address) };
    let mut doors = JoinSet::new();
    let Surroundings { log, file, connections_asked } = surroundings;
    let admin = Admin::new(control.clone(), config.kv_defaults.clone(), Some(access.clone()), log.clone());
    if let Some(metrics) = metrics {
        doors.spawn(metrics.serve_metrics(admin.clone()));
    }
    doors.spawn(api.serve_api(admin));
    if !reached.admin.ip().is_loopback() && access.tokens().is_none() {
        warn!(address = %reached.admin, "the management API can be reached from other hosts, and asks nobody who they are");
    }
    doors.spawn(access.watch());
    match file {
        Some(file) => {
            let mut as_written = config;
            as_written.limits.connections_max = connections_asked.unwrap_or(as_written.limits.connections_max);
            doors.spawn(reload::watch(file, as_written, control.clone(), log))
        }
        None => doors.spawn(reload::nothing_to_read()),
    };
    info!(management = %reached.admin, "serving");
    say_what_is_missing(&control);
    if let Some(ready) = ready {
        // Whoever asked may have stopped waiting.
        let _ = ready.send(reached);
    }
    supervisor.run(stop).await;
    doors.shutdown().await;
    info!("stopped");
    Ok(())
}
