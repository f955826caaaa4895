//! The command line: `kvlane serve`, `check`, `doctor`, `events`, `render`, `explain`, `hash`, `token`, and those of a
//! running gateway (`create`, `get`, `delete`, `save`, `apply`).
//!
//! Exit codes: 0 = it went right, 1 = the answer is "no" (a file with problems, a gateway that cannot start),
//! 2 = the command itself was wrong; those of a running gateway are [`manage`]'s.

mod check;
mod descriptors;
mod doctor;
mod events;
mod explain;
mod inquiry;
mod manage;
mod reload;
mod render;
mod serve;
mod token;

use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

use crate::config::ConfigError;
use crate::fields::Problem;
use crate::hash_command::{self, HashArgs, HashError};
use crate::rules::KvDefaults;

pub use serve::{Ready, Surroundings, run};

/// A gateway that sends each LLM request to the engine that already holds its prompt prefix.
#[derive(Debug, Parser)]
#[command(name = "kvlane", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the gateway until SIGTERM or SIGINT, then let requests under way finish.
    Serve {
        /// Configuration file (TOML); without one, everything has its default and there are no rules.
        #[arg(short, long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Check a configuration file, and say what this machine gives the gateway.
    Check {
        /// Configuration file (TOML).
        file: PathBuf,
        /// Print the result as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Check a configuration against its live engines, and say what to do about what does not fit; reads only.
    Doctor(doctor::DoctorArgs),
    /// Print engines' cache events as JSON, a line each.
    Events(events::EventsArgs),
    /// Print the text or the token ids that an engine makes of the request on standard input.
    Render(render::RenderArgs),
    /// Print what the gateway makes of a request: service, text, ids, keys, who holds them, and the decision.
    Explain(explain::ExplainArgs),
    /// Print the block keys of token ids by an engine's contract; the ids come as a JSON array on standard input.
    Hash(HashArgs),
    /// Make or change a rule of a running gateway, as loxicmd does.
    #[command(subcommand)]
    Create(manage::Create),
    /// Show what a running gateway has, as loxicmd does.
    Get(manage::GetArgs),
    /// Remove a rule of a running gateway, as loxicmd does.
    #[command(subcommand)]
    Delete(manage::Delete),
    /// Write down the rules of a running gateway.
    Save(manage::SaveArgs),
    /// Put the rules of a file in force in a running gateway.
    Apply(manage::ApplyArgs),
    /// Make a token for the management API, and print it.
    Token(token::TokenArgs),
    /// Print a shell's completions.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Print a man page, or write all of them.
    Man {
        /// The command whose page is printed, such as create lb; without one, kvlane's own.
        #[arg(value_name = "COMMAND")]
        of: Vec<String>,
        /// Write the pages of all commands into this directory instead.
        #[arg(long, value_name = "DIR", conflicts_with = "of")]
        directory: Option<PathBuf>,
    },
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Right = 0,
    No = 1,
    Usage = 2,
    /// The gateway does not let one in.
    Access = 3,
    /// No gateway answers.
    Unavailable = 5,
    /// Its answer is not understood.
    Contract = 6,
    /// It refuses.
    Failed = 7,
    /// A part was done.
    Partial = 8,
}

/// Runs the command line; the first argument is the program's name. Other programs of this workspace start the
/// gateway by re-executing themselves into this.
pub fn main_from(args: impl Iterator<Item = OsString>) -> ExitCode {
    let outcome = match Arguments::try_parse_from(args) {
        Ok(arguments) => match arguments.command {
            Command::Serve { config } => serve::serve(config.as_deref()),
            Command::Check { file, json } => check::check(&file, json),
            Command::Doctor(arguments) => doctor::doctor(&arguments),
            Command::Events(arguments) => events::events(&arguments),
            Command::Render(arguments) => render::render(&arguments),
            Command::Explain(arguments) => explain::explain(&arguments),
            Command::Hash(arguments) => hash(&arguments),
            Command::Create(what) => manage::create(&what),
            Command::Get(arguments) => manage::get(&arguments),
            Command::Delete(what) => manage::delete(&what),
            Command::Save(arguments) => manage::save(&arguments),
            Command::Apply(arguments) => manage::apply(&arguments),
            Command::Token(arguments) => token::token(&arguments),
            Command::Completions { shell } => completions(shell),
            Command::Man { of, directory } => man(&of, directory.as_deref()),
        },
        Err(error) => {
            // Help and version come this way too; if they cannot be printed there is nobody to tell.
            let _ = error.print();
            if error.use_stderr() { Outcome::Usage } else { Outcome::Right }
        }
    };
    ExitCode::from(outcome as u8)
}

/// Prints a result. A reader that has left has read what it wanted.
fn print_line(text: &str) -> Outcome {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Outcome::No,
        _ => Outcome::Right,
    }
}

fn completions(shell: clap_complete::Shell) -> Outcome {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "kvlane", &mut text);
    print_line(String::from_utf8_lossy(&text).trim_end())
}

fn man(of: &[String], directory: Option<&Path>) -> Outcome {
    if let Some(directory) = directory {
        let written =
            std::fs::create_dir_all(directory).and_then(|()| clap_mangen::generate_to(Arguments::command(), directory));
        return written.map_or_else(
            |why| {
                eprintln!("kvlane man: {}: {why}", directory.display());
                Outcome::No
            },
            |()| Outcome::Right,
        );
    }
    let mut command = Arguments::command().disable_help_subcommand(true);
    command.build();
    for name in of {
        let Some(found) = command.find_subcommand(name) else {
            eprintln!("kvlane man: {} has no command {name:?}", command.get_bin_name().unwrap_or("kvlane"));
            return Outcome::Usage;
        };
        command = found.clone();
    }
    let mut text = Vec::new();
    match clap_mangen::Man::new(command).render(&mut text) {
        Ok(()) => print_line(String::from_utf8_lossy(&text).trim_end()),
        Err(_) => Outcome::No,
    }
}

/// How a command ends whose configuration cannot be used: that of a file that is not there is a wrong command.
fn outcome_of(error: &ConfigError) -> Outcome {
    match error {
        ConfigError::Unreadable { .. } => Outcome::Usage,
        ConfigError::Problems { .. } => Outcome::No,
    }
}

fn hash(arguments: &HashArgs) -> Outcome {
    match hash_command::run(arguments, std::io::stdin().lock(), std::io::stdout().lock()) {
        Ok(()) => Outcome::Right,
        Err(error) => {
            eprintln!("kvlane hash: {error}");
            if matches!(error, HashError::Io(_)) { Outcome::No } else { Outcome::Usage }
        }
    }
}

/// Lets the prompt path say on standard error why it refuses a request: the reason's name alone helps little.
fn say_why_prompts_are_refused() {
    shards::prompt::quote_conversations();
    let to_stderr = tracing_subscriber::fmt().with_writer(std::io::stderr).without_time().with_target(false);
    // A subscriber that is there already shows them in its own way.
    let _ = to_stderr.with_env_filter("off,shards::prompt=debug").try_init();
}

/// Variables that are set and do nothing.
fn unused_variables() -> Vec<Problem> {
    let set = std::env::vars_os().filter(|(_, value)| !value.is_empty());
    KvDefaults::unused(set.map(|(name, _)| name.to_string_lossy().into_owned()))
}

/// The environment's defaults of rules.
fn kv_defaults() -> Result<KvDefaults, Vec<Problem>> {
    KvDefaults::from_env(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
}
