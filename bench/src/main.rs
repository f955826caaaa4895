//! Micro-benchmarks and side-by-side comparisons of kvlane. Every run prints its seed and setup with its figures.

mod clock;
mod dump;
mod e2e;
mod files;
mod hash;
mod ingest;
mod lookup;
mod memory;
mod pd;
mod prompt;
mod simulate;
mod soak;
mod stall;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(about = "Micro-benchmarks and side-by-side comparisons of kvlane")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// How long a dump of an inventory holds it, and what that costs publishing.
    Dump(dump::Args),
    /// CPU per request of kvlane, nginx and HAProxy, end to end.
    E2e(e2e::E2eArgs),
    /// Nanoseconds per block key.
    Hash(hash::Args),
    /// Cache events: blocks per second, bytes per held block, idle CPU and delay with thousands of streams.
    Ingest(ingest::Args),
    /// Inventory look-up and route decision, adds and bytes per pair, beside the same store in evmap.
    Lookup(lookup::Args),
    /// Requests with a prefill and a decode leg: CPU beyond two plain forwards, and how soon engines hear of clients that left.
    Pd(pd::Args),
    /// From a request body to block keys, part by part, through the prefix cache.
    Prompt(prompt::Args),
    /// Traces replayed against the route decision, with simulated engines.
    Simulate(simulate::Args),
    /// Memory of the gateway over minutes of prompts never sent before.
    Soak(soak::Args),
    /// How long a shard stands still beside long prompts, from inside and from outside.
    Stall(stall::Args),
    /// Engines' event sockets, as a child of a benchmark.
    #[command(hide = true)]
    IngestPublishers(ingest::publishers::Args),
    /// The gateway, as a child of a benchmark.
    #[command(hide = true)]
    Gateway {
        /// Its command line.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn main() -> anyhow::Result<ExitCode> {
    match Cli::parse().command {
        Command::Dump(args) => print!("{}", dump::run(&args)?),
        Command::E2e(args) => return e2e::main(&args),
        Command::Hash(args) => print!("{}", hash::run(&args)),
        Command::Ingest(args) => print!("{}", ingest::run(&args)?),
        Command::IngestPublishers(args) => ingest::publishers::run(&args)?,
        Command::Lookup(args) => print!("{}", lookup::run(&args)?),
        Command::Pd(args) => return pd::main(&args),
        Command::Prompt(args) => print!("{}", prompt::run(&args)?),
        Command::Simulate(args) => simulate::run(&args, &mut std::io::stdout())?,
        Command::Soak(args) => return soak::main(&args),
        Command::Stall(args) => stall::run(&args, &mut std::io::stdout())?,
        Command::Gateway { arguments } => return Ok(loadgen::child::gateway(arguments)),
    }
    Ok(ExitCode::SUCCESS)
}
