//! `kvlane token`: a new token for the management API, and its line in the token file.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::access::{Role, line_of, mint};

use super::Outcome;

/// What `kvlane token` is told on its command line.
#[derive(Debug, Args)]
pub(super) struct TokenArgs {
    /// Whose token it is, for the audit log: a word.
    name: String,
    /// What its owner may do.
    #[arg(long, value_enum, default_value_t = Allowed::Viewer)]
    role: Allowed,
    /// Token file ([admin] tokens) to append the hash to; without it the line is printed on standard error.
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Allowed {
    /// Everything.
    Admin,
    /// GET only.
    Viewer,
}

pub(super) fn token(args: &TokenArgs) -> Outcome {
    match make(args) {
        Ok(token) => super::print_line(&token),
        Err(why) => {
            eprintln!("kvlane token: {why}");
            Outcome::Usage
        }
    }
}

fn make(args: &TokenArgs) -> Result<String, String> {
    let name = &args.name;
    if name.is_empty() || name.contains(|c: char| c.is_whitespace() || c.is_control() || c == '#') {
        return Err(format!("{name:?} is no single word"));
    }
    let token = mint().map_err(|why| format!("no random numbers: {why}"))?;
    let role = if args.role == Allowed::Admin { Role::Admin } else { Role::Viewer };
    let line = line_of(name, role, &token);
    match &args.file {
        None => eprintln!("{line}"),
        Some(path) => {
            let file = std::fs::OpenOptions::new().append(true).create(true).mode(0o600).open(path);
            let written = file.and_then(|mut file| writeln!(file, "{line}"));
            written.map_err(|why| format!("{}: {why}", path.display()))?;
        }
    }
    Ok(token)
}
