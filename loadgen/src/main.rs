//! The `loadgen` command line.

#![forbid(unsafe_code)]

use clap::{Parser, Subcommand};

/// Load generator, simulated engines and the kvlane demo.
#[derive(Parser)]
#[command(name = "loadgen", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run one or many simulated vLLM engines until SIGINT or SIGTERM.
    Engine(loadgen::engine::cli::EngineArgs),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Engine(arguments) => loadgen::engine::cli::run(&arguments),
    }
}
