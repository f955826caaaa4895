//! Micro-benchmarks and side-by-side comparisons.

mod e2e;

use std::process::ExitCode;

use clap::Parser;

/// Micro-benchmarks and side-by-side comparisons of kvlane.
#[derive(Parser)]
#[command(name = "bench", version)]
enum Command {
    /// CPU per request of kvlane, nginx and HAProxy, end to end.
    E2e(e2e::E2eArgs),
    /// The gateway, as a child of a benchmark.
    #[command(hide = true)]
    Gateway {
        /// Its command line.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    let result = match Command::parse() {
        Command::E2e(args) => e2e::main(&args),
        Command::Gateway { arguments } => return loadgen::child::gateway(arguments),
    };
    result.unwrap_or_else(|error| {
        eprintln!("bench: {error:#}");
        ExitCode::from(2)
    })
}
