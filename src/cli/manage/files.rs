//! `save` and `apply`: all rules into a file, and rules out of one.

use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use super::client::{Client, ServerArgs};
use super::{Ended, show, without_moment};

/// What `save` is told.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct SaveArgs {
    /// File to write; without it the rules are printed.
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// As loxicmd has it: everything that is saved are rules.
    #[arg(short, long)]
    all: bool,
    /// As loxicmd has it.
    #[arg(short, long)]
    lb: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// What `apply` is told.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct ApplyArgs {
    /// JSON file: what `save` wrote, what `get lb -o json` printed, or one rule's body.
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    server: ServerArgs,
}

pub(super) fn save(args: &SaveArgs) -> Result<String, Ended> {
    let answer = Client::new(&args.server)?.ask("GET", "/config/loadbalancer/all", None)?;
    let rules = answer["lbAttr"].as_array().cloned().unwrap_or_default();
    let count = rules.len();
    let text = show::pretty(&json!({"lbAttr": rules.into_iter().map(without_moment).collect::<Vec<_>>()}));
    match &args.file {
        None => Ok(text),
        Some(path) => {
            let written = std::fs::write(path, text + "\n");
            written.map_err(|why| Ended::Usage(format!("{}: {why}", path.display())))?;
            Ok(format!("{count} rules saved in {}", path.display()))
        }
    }
}

/// Posts each rule of a file; a rule that is there already, without any difference, is right.
pub(super) fn apply(args: &ApplyArgs) -> Result<String, Ended> {
    let usage = |why: String| Ended::Usage(format!("{}: {why}", args.file.display()));
    let text = std::fs::read_to_string(&args.file).map_err(|why| usage(why.to_string()))?;
    let document: Value = serde_json::from_str(&text).map_err(|why| usage(format!("not JSON: {why}")))?;
    let rules = match (&document["lbAttr"], &document["serviceArguments"]) {
        (Value::Array(rules), _) => rules.clone(),
        (_, Value::Object(_)) => vec![document],
        _ => return Err(usage("neither a list lbAttr nor a rule".to_owned())),
    };
    let client = Client::new(&args.server)?;
    let (mut said, mut failed) = (Vec::new(), 0);
    for rule in &rules {
        let service = &rule["serviceArguments"];
        let at = format!("{}:{}", service["externalIP"].as_str().unwrap_or("?"), service["port"]);
        match client.ask("POST", "/config/loadbalancer", Some(rule)) {
            Ok(_) => said.push(format!("{at}: in force")),
            Err(Ended::Failed(why)) if why.contains("lbrule-exists") => said.push(format!("{at}: as it was")),
            Err(Ended::Failed(why)) => {
                failed += 1;
                said.push(format!("{at}: {why}"));
            }
            Err(why) => return Err(why),
        }
    }
    let said = said.join("\n");
    match failed {
        0 => Ok(said),
        _ if failed == rules.len() => Err(Ended::Failed(said)),
        _ => Err(Ended::Partial(said)),
    }
}
