//! `save` and `apply`: the rules of the API into a file, and rules out of one.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};

use super::client::{Client, ServerArgs};
use super::create::said_of;
use super::{Ended, show};

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
    /// JSON file: what `save` wrote, what `get lb -o json` printed, or one rule's body. Rules that are in force like that
    /// stay as they are; no rule is removed.
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    server: ServerArgs,
}

pub(super) fn save(args: &SaveArgs) -> Result<String, Ended> {
    let client = Client::new(&args.server)?;
    let saved = client.ask("GET", "/config/snapshot", None)?;
    let Some(rules) = saved["lbAttr"].as_array() else {
        return Err(Ended::Contract("the answer to /config/snapshot has no list lbAttr".to_owned()));
    };
    let all = client.ask("GET", "/config/loadbalancer/all", None)?;
    let by_file = |rule: &&Value| rule["serviceArguments"]["source"] == "file";
    let left = all["lbAttr"].as_array().into_iter().flatten().filter(by_file).count();
    let mut notes: Vec<String> = (left > 0).then(|| left_out(left)).into_iter().collect();
    notes.extend(remarks(&saved));
    let text = show::pretty(&json!({"lbAttr": rules}));
    let Some(path) = &args.file else {
        notes.iter().for_each(|note| eprintln!("{note}"));
        return Ok(text);
    };
    // Rules may have seeds, which are nobody else's.
    let file = std::fs::File::options().write(true).create(true).truncate(true).mode(0o600).open(path);
    let written = file.and_then(|mut file| file.write_all((text + "\n").as_bytes()));
    written.map_err(|why| Ended::Usage(format!("{}: {why}", path.display())))?;
    let mut said = vec![format!("{} saved in {}", counted(rules.len()), path.display())];
    said.extend(notes);
    Ok(said.join("\n"))
}

fn counted(rules: usize) -> String {
    format!("{rules} rule{}", if rules == 1 { "" } else { "s" })
}

fn left_out(rules: usize) -> String {
    format!("left out: {} of the configuration file, which keeps them", counted(rules))
}

/// What a snapshot lacks.
fn remarks(saved: &Value) -> impl Iterator<Item = String> {
    let waiting = saved["waiting"].as_array().map_or(0, Vec::len);
    let waiting = (waiting > 0)
        .then(|| format!("left out: {} that cannot be put in force now, see `kvlane get ready`", counted(waiting)));
    let withheld = saved["withheld"].as_array().is_some_and(|names| !names.is_empty());
    let withheld =
        withheld.then(|| "left out: seeds, which viewers are not shown: a rule made of this has none".to_owned());
    waiting.into_iter().chain(withheld)
}

/// Posts each rule of a file; a rule that is in force already, without any difference, is right.
pub(super) fn apply(args: &ApplyArgs) -> Result<String, Ended> {
    let rules = read(&args.file)?;
    let client = Client::new(&args.server)?;
    let (mut said, mut failed, mut told) = (Vec::new(), 0, BTreeSet::new());
    for rule in rules.iter().cloned() {
        let at = place_of(&rule);
        match put(&client, rule, &mut told) {
            Ok(what) => said.push(format!("{at}: {what}")),
            Err(Ended::Failed(why)) => {
                failed += 1;
                said.push(format!("{at}: {why}"));
            }
            Err(why) => return Err(why),
        }
    }
    said.extend(rules.is_empty().then(|| "no rule in the file".to_owned()));
    let said = said.join("\n");
    match failed {
        0 => Ok(said),
        _ if failed == rules.len() => Err(Ended::Failed(said)),
        _ => Err(Ended::Partial(said)),
    }
}

/// The rules of a file.
fn read(path: &Path) -> Result<Vec<Value>, Ended> {
    let usage = |why: String| Ended::Usage(format!("{}: {why}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|why| usage(why.to_string()))?;
    let document: Value = serde_json::from_str(&text).map_err(|why| {
        usage(match toml::from_str::<toml::Table>(&text) {
            Ok(_) => {
                "a configuration file (TOML), which a gateway is started with: kvlane serve -c. apply takes JSON: \
                what `kvlane save -f` wrote, or one rule's body"
                    .to_owned()
            }
            Err(_) => format!("not JSON: {why}. apply takes what `kvlane save -f` wrote, or one rule's body"),
        })
    })?;
    match (&document["lbAttr"], &document["serviceArguments"]) {
        (Value::Array(rules), _) => Ok(rules.clone()),
        (_, Value::Object(_)) => Ok(vec![document]),
        _ => Err(usage("neither a list lbAttr nor a rule (serviceArguments and endpoints)".to_owned())),
    }
}

/// Where a rule listens, as people write it.
fn place_of(rule: &Value) -> String {
    let service = &rule["serviceArguments"];
    let ip = service["externalIP"].as_str().unwrap_or("?");
    let ip = if ip.contains(':') { format!("[{ip}]") } else { ip.to_owned() };
    format!("{ip}:{}", service["port"])
}

/// Puts a rule in force; what that came to.
fn put(client: &Client, mut rule: Value, told: &mut BTreeSet<String>) -> Result<&'static str, Ended> {
    match client.ask("POST", "/config/loadbalancer", Some(&rule)) {
        Ok(answer) => {
            said_of(&answer, told);
            Ok("in force")
        }
        Err(Ended::Failed(why)) if why.contains("lbrule-exists") => Ok("unchanged"),
        // Of another gateway: the rule that is here keeps the id that it has.
        Err(Ended::Failed(why)) if why.contains("cant modify rule id") => {
            drop(rule["serviceArguments"].as_object_mut().and_then(|service| service.remove("id")));
            put(client, rule, told)
        }
        Err(why) => Err(why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_named_by_its_address_and_port() {
        let rule = |ip: &str| json!({"serviceArguments": {"externalIP": ip, "port": 80}});
        assert_eq!(place_of(&rule("10.0.0.1")), "10.0.0.1:80");
        assert_eq!(place_of(&rule("fd00::1")), "[fd00::1]:80");
    }
}
