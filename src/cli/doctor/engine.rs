//! What the engines of a rule say of themselves, against what the rule says of them.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use shards::prompt::Model;
use shards::service::Engine;

use super::report::Report;
use super::tokens;
use crate::discovery::{self, Access, EndpointFacts, Found, Reply};
use crate::health::{self, Answer};
use crate::models;
use crate::models::names::{NameLeg, Names, Staged};
use crate::rules::{KvRule, Rule, unknowable};

/// Longest wait for one answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// One endpoint, as far as it answered.
pub(super) struct Checked {
    /// The endpoint as people know it.
    pub(super) subject: String,
    /// Whether its events are worth listening to.
    pub(super) reachable: bool,
    /// What it says of itself.
    pub(super) facts: EndpointFacts,
    /// The model that probes ask for, with its tokenizer.
    pub(super) model: Option<(String, Arc<Model>)>,
    /// The algorithm that it says it hashes by.
    pub(super) algorithm: Option<String>,
    /// Tokens per block, as it says.
    pub(super) block_tokens: Option<u32>,
}

/// Asks every endpoint of a rule, one after the other, and reports.
pub(super) async fn check(
    rule: &Rule,
    addresses: &[Option<SocketAddr>],
    directory: &Path,
    report: &mut Report,
) -> Vec<Checked> {
    let mut all = Vec::new();
    for (endpoint, address) in rule.endpoints.iter().zip(addresses) {
        let subject = format!("{} → {} {endpoint}", rule.key, rule.engine.name());
        let mut checked = Checked {
            subject,
            reachable: false,
            facts: EndpointFacts::default(),
            model: None,
            algorithm: None,
            block_tokens: None,
        };
        match address {
            None => {
                report.wrong(&checked.subject, "reach", "its name has no address", "correct endpointIP or the name")
            }
            Some(address) => ask(rule, *address, directory, &mut checked, report).await,
        }
        all.push(checked);
    }
    all
}

async fn ask(rule: &Rule, address: SocketAddr, directory: &Path, checked: &mut Checked, report: &mut Report) {
    let authorization = rule.engine_token.as_ref().map(|token| token.authorization());
    let authorization = authorization.as_deref();
    let subject = checked.subject.clone();
    match health::probe(address, authorization, TIMEOUT).await {
        Answer::Status(status @ (401 | 403)) => return report_denied(rule, &subject, "/health", status, report),
        Answer::Status(status) if status < 500 => report.right(&subject, "reach", format!("GET /health: {status}")),
        Answer::Status(status) => {
            let fix = "see the engine's log: it says itself that it is not well";
            report.wrong(&subject, "reach", format!("GET /health: {status}"), fix);
        }
        Answer::None => {
            let fix = "start the engine, or correct endpointIP and targetPort";
            return report.wrong(&subject, "reach", format!("no answer from {address}"), fix);
        }
        Answer::Unasked(why) => {
            return report.unknown(&subject, "reach", format!("not asked: {why}"), "free resources of this machine");
        }
    }
    checked.reachable = true;
    let Some(kv) = &rule.kv else {
        return report.right(&subject, "keys", "plain load balancing: no keys to compare");
    };
    let found = discovery::ask(rule.engine, address, authorization, Found::default()).await;
    match &found.access {
        Access::Denied(status) => report_denied(rule, &subject, "", *status, report),
        Access::Failed(why) => report.unknown(&subject, "describes", why.clone(), "what it does not say is believed"),
        Access::Untried | Access::Open => {}
    }
    checked.facts = found.facts;
    report_version(rule.engine, kv, &checked.facts, &subject, report);
    own_settings(rule.engine, address, authorization, checked).await;
    report_block_size(kv, checked, report);
    report_algorithm(kv, checked, report);
    report_models(rule, directory, checked, report);
    if let Some((name, model)) = &checked.model {
        let asking = tokens::Asking { engine: rule.engine, address, authorization, kv, name, model };
        tokens::check(&asking, &subject, report).await;
    }
}

fn report_denied(rule: &Rule, subject: &str, path: &str, status: u16, report: &mut Report) {
    let says = format!(
        "the engine answers {status} to the gateway's own calls{}{path}",
        if path.is_empty() { "" } else { ", GET " }
    );
    let fix = match &rule.engine_token {
        None => "it wants a token: write its file as engineTokenFile".to_owned(),
        Some(token) => format!("it refuses the token in {}: correct engineTokenFile", token.path().display()),
    };
    report.wrong(subject, "access", says, fix);
}

fn report_version(engine: Engine, kv: &KvRule, facts: &EndpointFacts, subject: &str, report: &mut Report) {
    let Some(version) = &facts.version else {
        return report.unknown(subject, "version", "it does not say", "the newest contract is believed");
    };
    match facts.release() {
        None => {
            report.unknown(subject, "version", format!("{version} is no release"), "the newest contract is believed")
        }
        Some(release) => match unknowable(kv, release) {
            Some(problem) => report.wrong(subject, "version", format!("{} {release}", engine.name()), problem),
            None => report.right(subject, "version", format!("{} {version}", engine.name())),
        },
    }
}

/// What an engine says of its cache where asking takes nothing away: vLLM in its metrics, the others in their server
/// info. TensorRT-LLM's metrics are destructive, and not asked.
async fn own_settings(engine: Engine, address: SocketAddr, authorization: Option<&str>, checked: &mut Checked) {
    let path = match engine {
        Engine::Vllm => "/metrics",
        Engine::Sglang | Engine::Trtllm => "/server_info",
        Engine::Llamacpp => return,
    };
    let Ok(Reply { status: 200, body }) = discovery::get(address, path, authorization, TIMEOUT).await else { return };
    let text = String::from_utf8_lossy(&body);
    if engine == Engine::Vllm {
        let Some(line) = text.lines().find(|line| line.starts_with("vllm:cache_config_info")) else { return };
        let label = |name: &str| Some(line.split_once(&format!("{name}=\""))?.1.split_once('"')?.0);
        checked.block_tokens = label(",block_size").or_else(|| label("{block_size")).and_then(|text| text.parse().ok());
        checked.algorithm = label("prefix_caching_hash_algo").map(str::to_owned);
        return;
    }
    let info: Value = serde_json::from_str(&text).unwrap_or_default();
    let size = if engine == Engine::Sglang { &info["page_size"] } else { &info["tokens_per_block"] };
    checked.block_tokens = size.as_u64().and_then(|tokens| u32::try_from(tokens).ok());
}

fn report_block_size(kv: &KvRule, checked: &Checked, report: &mut Report) {
    let (rule, subject) = (kv.block_tokens, &checked.subject);
    match checked.block_tokens {
        None => {}
        Some(engine) if engine == rule => report.right(subject, "block_size", format!("{engine} tokens")),
        Some(engine) => report.wrong(
            subject,
            "block_size",
            format!("kvBlockSize is {rule}, the engine says {engine} tokens"),
            format!("set kvBlockSize to {engine}"),
        ),
    }
}

fn report_algorithm(kv: &KvRule, checked: &Checked, report: &mut Report) {
    let Some(engine) = checked.algorithm.as_deref() else { return };
    let (rule, subject) = (kv.algo.name(), &checked.subject);
    if engine == rule {
        report.right(subject, "algorithm", engine);
    } else if kv.algo_given {
        let says = format!("kvHashAlgo is {rule}, the engine says {engine}");
        let fix = format!(
            "start the engine with --prefix-caching-hash-algo {rule}, or leave kvHashAlgo out: the engine's is followed then"
        );
        report.wrong(subject, "algorithm", says, fix);
    } else {
        report.right(subject, "algorithm", format!("{engine}, followed since the rule names no kvHashAlgo"));
    }
}

/// Compares names, and reads the tokenizers that requests will need.
fn report_models(rule: &Rule, directory: &Path, checked: &mut Checked, report: &mut Report) {
    let (facts, subject) = (&checked.facts, &checked.subject);
    if facts.models.is_empty() {
        return report.unknown(
            subject,
            "model",
            "it does not say which models it serves",
            "GET /v1/models must answer",
        );
    }
    let there = models::staged_now(directory);
    let names = Names { rule: &rule.key.model, engine: facts, missed: 0, directory };
    let requested: BTreeSet<&str> = names.requested();
    let read: Vec<(&str, Result<_, String>)> =
        requested.iter().map(|name| (*name, models::read_now(directory, name))).collect();
    let staged = |slug: &str| {
        let this = read.iter().find(|(name, _)| shards::prompt::slug(name).as_deref() == Some(slug));
        match this {
            _ if !there.iter().any(|known| known == slug) => Staged::Absent,
            Some((_, Err(why))) => Staged::Unusable(why.clone()),
            _ => Staged::There,
        }
    };
    match names.judge(staged, &there) {
        Some(fault) => {
            let check = match fault.leg {
                NameLeg::Model => "model",
                NameLeg::TokenizerFiles => "tokenizer",
            };
            return report.wrong(subject, check, fault.found, fault.fix);
        }
        None => report.right(subject, "model", requested.iter().copied().collect::<Vec<_>>().join(", ")),
    }
    for (name, outcome) in &read {
        match outcome {
            Ok((model, digest)) => {
                let (template, digest) = (model.template_origin().name(), &digest[..12]);
                let says = format!("{}: template {template}, digest {digest}", model.path().display());
                match model.template_problem().filter(|_| rule.kv.as_ref().is_some_and(|kv| kv.chat_template.is_none()))
                {
                    Some(problem) => report.wrong(subject, "tokenizer", says, problem),
                    None => report.right(subject, "tokenizer", says),
                }
            }
            Err(why) => report.unknown(
                subject,
                "tokenizer",
                why.clone(),
                format!("requests for {name} are routed without keys"),
            ),
        }
    }
    let usable = read.into_iter().find_map(|(name, outcome)| Some((name.to_owned(), outcome.ok()?.0)));
    checked.model = usable;
}
