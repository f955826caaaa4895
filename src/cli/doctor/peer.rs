//! What both gateways of a pair must agree on, or one of them routes by keys that fit nothing.

use std::sync::Arc;

use serde_json::{Value, json};

use super::report::Report;
use crate::cli::inquiry::Gateway;
use crate::config::Config;
use crate::models;
use crate::rules::{Nonce, contract_of};

/// What a rule is found again by at the other gateway: its address may be another one there.
const IDENTITY: [&str; 4] = ["port", "host", "path_prefix", "model_name"];
/// What must be the same: member, word of the check, what to do.
const COMPARED: [(&str, &str, &str); 4] = [
    ("kvEngineType", "engine", "give both gateways the same kvEngineType"),
    ("kvHashAlgo", "algorithm", "give both gateways the same kvHashAlgo"),
    ("kvBlockSize", "block_size", "give both gateways the same kvBlockSize"),
    ("seed_seal", "seed", "give both gateways the same kvNoneHashSeed, or LLB_KV_NONE_HASH_SEED"),
];

/// Compares another gateway with ours: the one at `url`, else the configuration.
pub(super) fn check(peer: &Gateway, url: Option<&Gateway>, config: Option<&Config>, report: &mut Report) {
    let subject = format!("peer {}", peer.url);
    let nonce = match Nonce::draw() {
        Ok(nonce) => nonce,
        Err(error) => return report.unknown(&subject, "reach", error.to_string(), "no random numbers can be had"),
    };
    let path = format!("/config/ai/kv/contract?nonce={}", nonce.to_hex());
    let theirs = match peer.get(&path) {
        Ok(theirs) => theirs,
        Err(why) => {
            return report.wrong(
                &subject,
                "reach",
                why,
                "give the address of its [admin] listen, and --token-file and --cacert where it wants them",
            );
        }
    };
    let ours = match (url, config) {
        (Some(url), _) => match url.get(&path) {
            Ok(ours) => ours,
            // Said already, where it was asked for its parity.
            Err(_) => return,
        },
        (None, Some(config)) => of_config(config, nonce, &theirs),
        (None, None) => return,
    };
    report.right(&subject, "reach", "its management API answers");
    compare_rules(&ours, &theirs, &subject, report);
    compare_models(&ours, &theirs, &subject, report);
}

/// What a gateway of this configuration would answer; of the tokenizers, those that the other one has loaded.
fn of_config(config: &Config, nonce: Nonce, theirs: &Value) -> Value {
    let rules: Vec<Value> = config.rules.iter().filter_map(|rule| contract_of(rule, nonce)).collect();
    let digest = |model: &Value| {
        let name = model["model"].as_str()?;
        let read: Result<(_, Arc<str>), String> = models::read_now(&config.tokenizers_dir, name);
        let (_, digest) = read.ok()?;
        Some(json!({"model": name, "digest": *digest}))
    };
    let models: Vec<Value> = list(theirs, "models").iter().filter_map(digest).collect();
    json!({"rules": rules, "models": models})
}

fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().map_or(&[], Vec::as_slice)
}

fn compare_rules(ours: &Value, theirs: &Value, subject: &str, report: &mut Report) {
    for rule in list(ours, "rules") {
        let same = |other: &&Value| IDENTITY.iter().all(|name| rule[*name] == other[*name]);
        let at = format!("{subject}, rule at port {}", rule["port"]);
        let Some(other) = list(theirs, "rules").iter().find(same) else {
            report.wrong(&at, "rule", "the peer has no such KV rule", "give both gateways the same rules");
            continue;
        };
        for (name, check, fix) in COMPARED {
            let (here, there) = (&rule[name], &other[name]);
            match here == there {
                true if here.is_null() => {}
                true if name == "seed_seal" => report.right(&at, check, "the same"),
                true => report.right(&at, check, format!("{here} at both")),
                // Seals say nothing but that they differ.
                false if name == "seed_seal" => report.wrong(&at, check, "another seed than here", fix),
                false => report.wrong(&at, check, format!("{here} here, {there} there"), fix),
            }
        }
    }
}

fn compare_models(ours: &Value, theirs: &Value, subject: &str, report: &mut Report) {
    for model in list(theirs, "models") {
        let name = model["model"].as_str().unwrap_or_default();
        let own = list(ours, "models").iter().find(|own| own["model"] == model["model"]);
        match own {
            Some(own) if own["digest"] == model["digest"] => {
                report.right(subject, "tokenizer", format!("{name}: the same files"));
            }
            Some(_) => {
                let fix = format!("copy the directory {name} from one gateway to the other");
                report.wrong(subject, "tokenizer", format!("{name}: other files than here"), fix);
            }
            None => {
                let says = format!("{name}: loaded there, and not here");
                report.unknown(
                    subject,
                    "tokenizer",
                    says,
                    format!("stage {name} here too if its requests may come here"),
                );
            }
        }
    }
}
