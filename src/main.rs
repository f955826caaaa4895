//! The gateway's program; everything is in the library, so that other programs can start it too.

use std::process::ExitCode;

fn main() -> ExitCode {
    kvlane::cli::main_from(std::env::args_os())
}
