//! `kvlane serve`: everything started in order, served, and drained.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context as _, bail};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tracing::{error, info, warn};
use tracing_subscriber::EnvFilter;

use crate::admin::Door;
use crate::config::Config;
use crate::cores::{self, Machine, Plan};
use crate::fields::Problem;
use crate::supervise::Supervisor;

use super::{Outcome, descriptors};

/// Where a gateway that serves can be reached.
#[derive(Clone, Copy, Debug)]
pub struct Ready {
    /// The management API.
    pub admin: SocketAddr,
    /// The second listener, if there is one.
    pub metrics: Option<SocketAddr>,
}

pub(super) fn serve(path: Option<&Path>) -> Outcome {
    match start(path) {
        Ok(()) => Outcome::Right,
        Err(error) => {
            eprintln!("kvlane: {error:#}");
            Outcome::No
        }
    }
}

fn start(path: Option<&Path>) -> anyhow::Result<()> {
    let defaults = super::kv_defaults().map_err(|problems| anyhow::anyhow!("environment: {}", joined(&problems)))?;
    let (config, warnings) = match path {
        Some(path) => Config::read(path, &defaults)?,
        None => (Config { kv_defaults: defaults, ..Config::default() }, Vec::new()),
    };
    log_to_stderr(&config);
    for warning in &warnings {
        warn!(%warning, "configuration");
    }
    let plan = plan(&config)?;
    match descriptors::raise() {
        Ok(limits) => {
            info!(descriptors = limits.soft, "open descriptors allowed");
            let needed = descriptors::needed(plan.shards.len(), config.limits.connections_max, 0);
            if limits.soft < needed {
                warn!(
                    needed,
                    allowed = limits.soft,
                    "raise the hard limit (ulimit -Hn) or lower limits.connections_max"
                );
            }
        }
        Err(error) => warn!(%error, "the limit on open descriptors could not be raised"),
    }
    pin(plan.control)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("control runtime")?;
    runtime.block_on(async {
        let stop = stop_signal()?;
        run(config, plan, stop, None).await
    })
}

fn plan(config: &Config) -> anyhow::Result<Plan> {
    let plan = cores::plan(&Machine::read(), &config.cores).map_err(|errors| {
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

fn log_to_stderr(config: &Config) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(&config.log));
    // A program that embeds the gateway may have its own subscriber already.
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).try_init();
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

/// Runs a gateway on the current thread and runtime until `stop` is done and everything is drained. Says through
/// `ready` where it can be reached, once the configuration's rules are in force.
///
/// # Errors
/// An address that is taken, a part that does not start, or a rule of the configuration that cannot be put in force.
pub async fn run(
    config: Config,
    plan: Plan,
    stop: impl Future<Output = ()>,
    ready: Option<oneshot::Sender<Ready>>,
) -> anyhow::Result<()> {
    let api = Door::open(config.admin_listen).await.context("[admin] listen")?;
    let metrics = match config.metrics_listen {
        Some(address) => Some(Door::open(address).await.context("[metrics] listen")?),
        None => None,
    };
    let mut supervisor = Supervisor::start(&config, &plan)?;
    let mut failures = Vec::new();
    for rule in config.rules {
        let key = rule.key.to_string();
        if let Err(error) = supervisor.apply(rule).await {
            failures.push(format!("rule {key}: {error}"));
        }
    }
    if !failures.is_empty() {
        supervisor.run(std::future::ready(())).await;
        bail!("{}", failures.join("\n"));
    }
    let control = supervisor.control();
    let reached = Ready { admin: api.address(), metrics: metrics.as_ref().map(Door::address) };
    let mut doors = JoinSet::new();
    if let Some(metrics) = metrics {
        doors.spawn(metrics.serve_metrics(control.clone()));
    }
    doors.spawn(api.serve_api(control, config.kv_defaults));
    if !reached.admin.ip().is_loopback() {
        warn!(address = %reached.admin, "the management API can be reached from other hosts, and asks nobody who they are");
    }
    info!(management = %reached.admin, "serving");
    if let Some(ready) = ready {
        // Whoever asked may have stopped waiting.
        let _ = ready.send(reached);
    }
    supervisor.run(stop).await;
    doors.shutdown().await;
    info!("stopped");
    Ok(())
}
