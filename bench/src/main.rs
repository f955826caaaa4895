//! Micro-benchmarks and side-by-side comparisons of kvlane. Every run prints its seed and setup with its figures.

mod hash;
mod lookup;
mod memory;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(about = "Micro-benchmarks and side-by-side comparisons of kvlane")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Nanoseconds per block key.
    Hash(hash::Args),
    /// Inventory look-up and route decision, adds and bytes per pair, beside the same store in evmap.
    Lookup(lookup::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Hash(args) => print!("{}", hash::run(&args)),
        Command::Lookup(args) => print!("{}", lookup::run(&args)?),
    }
    Ok(())
}
