//! `loadgen engine`.

use anyhow::Context as _;

use super::{Engine, EngineOptions};

/// Arguments of `loadgen engine`.
#[derive(Clone, Debug, clap::Args)]
pub struct EngineArgs {
    /// Engines to run; their HTTP ports follow each other.
    #[arg(long, default_value_t = 1)]
    pub count: u16,
    /// Distance between the event ports, and between the replay ports, of two engines.
    #[arg(long, default_value_t = 1)]
    pub event_stride: u16,
    /// What each engine is like.
    #[command(flatten)]
    pub options: EngineOptions,
}

/// Runs the engines until SIGINT or SIGTERM.
///
/// # Errors
/// An engine cannot start, or signals cannot be received.
pub fn run(arguments: &EngineArgs) -> anyhow::Result<()> {
    let engines = Engine::start_many(&arguments.options, arguments.count, arguments.event_stride)?;
    for engine in &engines {
        let show = |address: Option<std::net::SocketAddr>| address.map_or("none".to_owned(), |found| found.to_string());
        println!(
            "engine http={} events={} replay={}",
            engine.http_addr,
            show(engine.event_addr),
            show(engine.replay_addr)
        );
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("no signal handling")?;
    runtime.block_on(async {
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        tokio::select! {
            result = tokio::signal::ctrl_c() => result,
            _ = terminate.recv() => Ok(()),
        }
    })?;
    engines.into_iter().for_each(super::EngineHandle::stop);
    Ok(())
}
