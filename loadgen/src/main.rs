//! The `loadgen` command line.

#![forbid(unsafe_code)]

use std::process::ExitCode;

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
    /// A whole fleet on this machine: 4 simulated engines, the gateway, one load with two kinds of routing, compared.
    Demo(loadgen::demo::DemoArgs),
    /// Load against a URL: multi-turn chats or one fixed body, open or closed loop.
    Run(loadgen::run::RunArgs),
    /// A Mooncake-format trace against a URL, open loop.
    Replay(loadgen::replay::ReplayArgs),
    /// Run one or many simulated vLLM engines until SIGINT or SIGTERM.
    Engine(loadgen::engine::cli::EngineArgs),
    /// The gateway, as a child of the demo.
    #[command(hide = true)]
    Gateway {
        /// Its command line.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Demo(arguments) => loadgen::demo::main(&arguments),
        Command::Run(arguments) => loadgen::run::main(&arguments),
        Command::Replay(arguments) => loadgen::replay::main(&arguments),
        Command::Engine(arguments) => loadgen::engine::cli::run(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Gateway { arguments } => return loadgen::child::gateway(arguments),
    };
    result.unwrap_or_else(|error| {
        eprintln!("loadgen: {error:#}");
        ExitCode::from(2)
    })
}
