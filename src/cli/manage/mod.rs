//! The command line of a running gateway, with `loxicmd`'s grammar: `create`, `get`, `delete`, `save`, `apply`.
//!
//! Exit codes: 0 = done, 2 = the command was wrong, 3 = not let in, 5 = no gateway answers, 6 = it answers something
//! that is not understood, 7 = it refuses, 8 = a part was done.

mod client;
mod create;
mod files;
mod flags;
mod ports;
mod show;

use std::collections::BTreeSet;
use std::fmt;

use clap::{Args, Subcommand};

use super::Outcome;
use client::ServerArgs;
pub(super) use client::{Client, Credentials};
use ports::{Ports, each_port};

pub(super) use create::CreateLb;
pub(super) use files::{ApplyArgs, SaveArgs};
pub(super) use show::GetArgs;

/// `create lb` or `create endpoint`.
#[derive(Clone, Debug, Subcommand)]
pub(super) enum Create {
    /// A load-balancer rule.
    #[command(visible_alias = "loadbalancer")]
    Lb(Box<CreateLb>),
    /// A host of engines: shown again, and without effect.
    Endpoint(Box<CreateEndpoint>),
}

/// What `create endpoint` is told.
#[derive(Clone, Debug, Args)]
pub(super) struct CreateEndpoint {
    /// Address of the host.
    #[arg(value_name = "IP")]
    ip: String,
    /// Its name.
    #[arg(long, default_value = "")]
    name: String,
    /// How it is probed.
    #[arg(long, default_value = "ping")]
    probetype: String,
    /// What a probe asks for.
    #[arg(long, default_value = "")]
    probereq: String,
    /// What a probe expects.
    #[arg(long, default_value = "")]
    proberesp: String,
    /// Where it is probed.
    #[arg(long, default_value_t = 0)]
    probeport: u16,
    /// Seconds between probes.
    #[arg(long, default_value_t = 60)]
    period: u32,
    /// Probes that must fail.
    #[arg(long, default_value_t = 2)]
    retries: u32,
    #[command(flatten)]
    server: ServerArgs,
}

/// `delete lb`.
#[derive(Clone, Debug, Subcommand)]
pub(super) enum Delete {
    /// A load-balancer rule.
    #[command(visible_alias = "loadbalancer")]
    Lb(Box<DeleteLb>),
}

/// What `delete lb` is told.
#[derive(Clone, Debug, Args)]
pub(super) struct DeleteLb {
    /// Address that clients connect to.
    #[arg(value_name = "IP")]
    ip: Option<String>,
    #[command(flatten)]
    ports: Ports,
    /// Every rule of this name.
    #[arg(long)]
    name: Option<String>,
    /// Every rule.
    #[arg(long)]
    all: bool,
    /// The rule's host.
    #[arg(long)]
    host: Option<String>,
    /// The rule's mark.
    #[arg(long, default_value_t = 0)]
    mark: u32,
    /// Accepted and without effect.
    #[arg(long)]
    bgp: bool,
    /// The rule's path.
    #[arg(long)]
    path_prefix: Option<String>,
    /// How the rule's path is compared.
    #[arg(long)]
    path_match_mode: Option<String>,
    /// The rule's model.
    #[arg(long)]
    model_name: Option<String>,
    #[command(flatten)]
    server: ServerArgs,
}

/// Why a command was not carried out.
#[derive(Debug)]
pub(super) enum Ended {
    /// The command itself was wrong.
    Usage(String),
    /// The gateway wants to know who asks, or does not let them.
    Access(String),
    /// Nobody answers, or not now.
    Unavailable(String),
    /// The answer is not understood.
    Contract(String),
    /// The gateway refuses.
    Failed(String),
    /// A part was done.
    Partial(String),
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ended::Usage(text)
            | Ended::Access(text)
            | Ended::Unavailable(text)
            | Ended::Contract(text)
            | Ended::Failed(text)
            | Ended::Partial(text) => f.write_str(text),
        }
    }
}

impl Ended {
    fn outcome(&self) -> Outcome {
        match self {
            Ended::Usage(_) => Outcome::Usage,
            Ended::Access(_) => Outcome::Access,
            Ended::Unavailable(_) => Outcome::Unavailable,
            Ended::Contract(_) => Outcome::Contract,
            Ended::Failed(_) => Outcome::Failed,
            Ended::Partial(_) => Outcome::Partial,
        }
    }
}

/// Prints what a command came to.
fn ended(result: Result<String, Ended>) -> Outcome {
    match result {
        Ok(text) => super::print_line(&text),
        Err(why) => {
            eprintln!("kvlane: {why}");
            why.outcome()
        }
    }
}

pub(super) fn create(what: &Create) -> Outcome {
    ended(match what {
        Create::Lb(args) => create::run(args),
        Create::Endpoint(args) => create_endpoint(args),
    })
}

pub(super) fn get(args: &GetArgs) -> Outcome {
    ended(show::run(args))
}

pub(super) fn delete(what: &Delete) -> Outcome {
    let Delete::Lb(args) = what;
    ended(delete_lb(args))
}

pub(super) fn save(args: &SaveArgs) -> Outcome {
    ended(files::save(args))
}

pub(super) fn apply(args: &ApplyArgs) -> Outcome {
    ended(files::apply(args))
}

fn create_endpoint(args: &CreateEndpoint) -> Result<String, Ended> {
    let body = serde_json::json!({
        "hostName": args.ip, "name": args.name, "inactiveReTries": args.retries, "probeType": args.probetype,
        "probeReq": args.probereq, "probeResp": args.proberesp, "probeDuration": args.period,
        "probePort": args.probeport,
    });
    let answer = Client::new(&args.server)?.ask("POST", "/config/endpoint", Some(&body))?;
    Ok(create::said_of(&answer, &mut BTreeSet::new()))
}

fn delete_lb(args: &DeleteLb) -> Result<String, Ended> {
    let client = Client::new(&args.server)?;
    let paths = paths_of(args)?;
    for (done, path) in paths.iter().enumerate() {
        match client.ask("DELETE", path, None) {
            Err(why) if done > 0 => return Err(Ended::Partial(format!("{done} of {} rules: {why}", paths.len()))),
            answer => answer?,
        };
    }
    Ok("Success".to_owned())
}

/// The paths that loxicmd asks for.
fn paths_of(args: &DeleteLb) -> Result<Vec<String>, Ended> {
    let base = "/config/loadbalancer";
    if args.all {
        return Ok(vec![format!("{base}/all")]);
    }
    if let Some(name) = &args.name {
        return Ok(vec![format!("{base}/name/{}", encoded(name))]);
    }
    let Some(ip) = &args.ip else {
        return Err(Ended::Usage("name a rule: IP and --tcp=PORT, --name=NAME, or --all".to_owned()));
    };
    let ports = each_port(&args.ports)?;
    if ports.is_empty() {
        return Err(Ended::Usage("give a port: --tcp=PORT".to_owned()));
    }
    let host = args.host.as_deref().filter(|host| !host.is_empty()).map_or_else(|| "any".to_owned(), encoded);
    let mut query = format!("bgp={}&block={}", args.bgp, args.mark);
    for (name, value) in [
        ("path_prefix", &args.path_prefix),
        ("path_match_mode", &args.path_match_mode),
        ("model_name", &args.model_name),
    ] {
        if let Some(value) = value {
            query.push_str(&format!("&{name}={}", encoded(value)));
        }
    }
    let path = |port: &ports::Port| {
        format!(
            "{base}/hosturl/{host}/externalipaddress/{}/port/{}/portmax/{}/protocol/{}?{query}",
            encoded(ip),
            port.first,
            port.last,
            port.protocol
        )
    };
    Ok(ports.iter().map(path).collect())
}

/// A text as a part of a path or a query.
fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~:".contains(&byte);
    text.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}
