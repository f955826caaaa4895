//! The `loadgen` command.
use std::process::ExitCode;

use clap::Parser;

#[derive(Parser)]
enum Command {
    Run(loadgen::run::RunArgs),
    Replay(loadgen::replay::ReplayArgs),
}

fn main() -> ExitCode {
    let result = match Command::parse() {
        Command::Run(args) => loadgen::run::main(&args),
        Command::Replay(args) => loadgen::replay::main(&args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("loadgen: {error:#}");
        ExitCode::from(2)
    })
}
