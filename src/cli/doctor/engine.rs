//! What the engines of a rule say of themselves, against what the rule says of them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use shards::prompt::Model;
use shards::service::Engine;

use super::at_once::at_once;
use super::report::Report;
use super::tokens;
use crate::discovery::{self, Access, EndpointFacts, Found, Reply};
use crate::health::{self, Answer};
use crate::ingest::Leg;
use crate::models;
use crate::models::names::{NameLeg, Names, Staged};
use crate::rules::{KvRule, Rule, unknowable};

/// Longest wait for one answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Endpoints asked at once. Beyond it the others wait for these.
const ASKED_MAX: usize = 64;

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

impl Checked {
    /// Whether the engine itself has said something of the leg.
    pub(super) fn says(&self, leg: Leg) -> bool {
        match leg {
            Leg::BlockSize => self.block_tokens.is_some(),
            Leg::Algorithm => self.algorithm.is_some(),
            _ => false,
        }
    }

    /// Whether that was reported as wrong.
    pub(super) fn says_wrong(&self, leg: Leg, kv: &KvRule) -> bool {
        match leg {
            Leg::BlockSize => self.block_tokens.is_some_and(|tokens| tokens != kv.block_tokens),
            Leg::Algorithm => kv.algo_given && self.algorithm.as_deref().is_some_and(|name| name != kv.algo.name()),
            _ => false,
        }
    }
}

/// A model with the digest of its files, or what is wrong with them.
type ReadModel = Result<(Arc<Model>, Arc<str>), String>;

/// Tokenizers read so far: engines of one model share them.
#[derive(Default)]
struct Library(BTreeMap<String, ReadModel>);

impl Library {
    fn read(&mut self, directory: &Path, name: &str) -> ReadModel {
        self.0.entry(name.to_owned()).or_insert_with(|| models::read_now(directory, name)).clone()
    }
}

/// What an engine answered.
struct Told {
    health: Answer,
    found: Found,
    own: OwnSettings,
}

/// What an engine says of its cache.
#[derive(Debug, Default, PartialEq, Eq)]
struct OwnSettings {
    block_tokens: Option<u32>,
    algorithm: Option<String>,
    /// It says that it caches no prefixes.
    caches_nothing: bool,
}

/// Asks every endpoint of every rule, many at once, and reports; by rule and endpoint.
pub(super) async fn check(
    rules: &[(Rule, Vec<Option<SocketAddr>>)],
    directory: &Path,
    report: &mut Report,
) -> Vec<Vec<Checked>> {
    let mut told = interview_all(rules).await.into_iter();
    let mut library = Library::default();
    let mut found = Vec::new();
    for (rule, addresses) in rules {
        for (endpoint, address) in rule.endpoints.iter().zip(addresses) {
            let mut one = One {
                checked: Checked {
                    subject: format!("{} → {} {endpoint}", rule.key, rule.engine.name()),
                    reachable: false,
                    facts: EndpointFacts::default(),
                    model: None,
                    algorithm: None,
                    block_tokens: None,
                },
                report: Report::default(),
                asked: address.map(|address| Asked { rule, address, directory }),
            };
            match (&one.asked, told.next().flatten()) {
                (Some(asked), Some(told)) => asked.report(told, &mut library, &mut one.checked, &mut one.report),
                _ => {
                    let fix = "correct endpointIP or the name";
                    one.report.wrong(&one.checked.subject, "reach", "its name has no address", fix);
                }
            }
            found.push(one);
        }
    }
    at_once(found.iter_mut().map(One::compare_tokens).collect(), ASKED_MAX).await;
    let mut found = found.into_iter().map(|one| {
        report.append(one.report);
        one.checked
    });
    rules.iter().map(|(rule, _)| found.by_ref().take(rule.endpoints.len()).collect()).collect()
}

/// An endpoint with what was found of it.
struct One<'a> {
    checked: Checked,
    report: Report,
    /// None where its name has no address.
    asked: Option<Asked<'a>>,
}

impl One<'_> {
    async fn compare_tokens(&mut self) {
        let (Some(asked), Some((name, model))) = (&self.asked, &self.checked.model) else { return };
        let Some(kv) = &asked.rule.kv else { return };
        let authorization = asked.rule.engine_token.as_ref().map(|token| token.authorization());
        let (engine, address, authorization) = (asked.rule.engine, asked.address, authorization.as_deref());
        let asking = tokens::Asking { engine, address, authorization, kv, name, model };
        tokens::check(&asking, &self.checked.subject, &mut self.report).await;
    }
}

/// Asks all endpoints, many at once; in the order of the rules, none where there is no address.
async fn interview_all(rules: &[(Rule, Vec<Option<SocketAddr>>)]) -> Vec<Option<Told>> {
    let all = rules.iter().flat_map(|(rule, addresses)| addresses.iter().map(move |address| (rule, *address)));
    let ask = |(rule, address): (&Rule, Option<SocketAddr>)| {
        let authorization = rule.engine_token.as_ref().map(|token| token.authorization());
        let (engine, with_keys) = (rule.engine, rule.kv.is_some());
        async move { Some(interview(engine, with_keys, address?, authorization.as_deref()).await) }
    };
    at_once(all.map(ask).collect(), ASKED_MAX).await
}

async fn interview(engine: Engine, with_keys: bool, address: SocketAddr, authorization: Option<&str>) -> Told {
    let health = health::probe(address, authorization, TIMEOUT).await;
    let mut told = Told { health, found: Found::default(), own: OwnSettings::default() };
    let speaks = matches!(told.health, Answer::Status(status) if !matches!(status, 401 | 403));
    if speaks && with_keys {
        told.found = discovery::ask(engine, address, authorization, Found::default()).await;
        told.own = own_settings(engine, address, authorization).await;
    }
    told
}

/// One endpoint of a rule.
struct Asked<'a> {
    rule: &'a Rule,
    address: SocketAddr,
    directory: &'a Path,
}

impl Asked<'_> {
    /// Whether the engine may be asked further.
    fn report_health(&self, health: &Answer, subject: &str, report: &mut Report) -> bool {
        match health {
            Answer::Status(status @ (401 | 403)) => report_denied(self.rule, subject, *status, report),
            Answer::Status(status) if *status < 500 => {
                report.right(subject, "reach", format!("GET /health: {status}"));
                return true;
            }
            Answer::Status(status) => {
                let fix = "see the engine's log: it says itself that it is not well";
                report.wrong(subject, "reach", format!("GET /health: {status}"), fix);
                return true;
            }
            Answer::None => {
                let fix = "start the engine, or correct endpointIP and targetPort";
                report.wrong(subject, "reach", format!("no answer from {}", self.address), fix);
            }
            Answer::Unasked(why) => {
                report.unknown(subject, "reach", format!("not asked: {why}"), "free resources of this machine");
            }
        }
        false
    }

    fn report(&self, told: Told, library: &mut Library, checked: &mut Checked, report: &mut Report) {
        let (rule, subject) = (self.rule, checked.subject.clone());
        if !self.report_health(&told.health, &subject, report) {
            return;
        }
        checked.reachable = true;
        let Some(kv) = &rule.kv else {
            return report.right(&subject, "keys", "plain load balancing: no keys to compare");
        };
        match &told.found.access {
            Access::Denied(status) => report_denied(rule, &subject, *status, report),
            Access::Failed(why) => {
                report.unknown(&subject, "describes", why.clone(), "what it does not say is believed")
            }
            Access::Untried | Access::Open => {}
        }
        checked.facts = told.found.facts;
        (checked.block_tokens, checked.algorithm) = (told.own.block_tokens, told.own.algorithm);
        if told.own.caches_nothing {
            let (option, switch) = match rule.engine {
                Engine::Vllm => ("enable_prefix_caching is False", "start it with --enable-prefix-caching"),
                _ => ("disable_radix_cache is true", "start it without --disable-radix-cache"),
            };
            report.wrong(&subject, "cache", format!("{option}: it keeps no prefixes, and announces none"), switch);
        }
        report_version(rule.engine, kv, &checked.facts, &subject, report);
        report_block_size(kv, checked, report);
        report_algorithm(kv, checked, report);
        self.report_models(library, checked, report);
    }

    /// Compares names, and reads the tokenizers that requests will need.
    fn report_models(&self, library: &mut Library, checked: &mut Checked, report: &mut Report) {
        let (facts, subject, directory) = (&checked.facts, &checked.subject, self.directory);
        if facts.models.is_empty() {
            let fix = "GET /v1/models must answer";
            return report.unknown(subject, "model", "it does not say which models it serves", fix);
        }
        let there = models::staged_now(directory);
        let names = Names { rule: &self.rule.key.model, engine: facts, missed: 0, directory };
        let requested: BTreeSet<&str> = names.requested();
        let read: Vec<_> = requested.iter().map(|name| (*name, library.read(directory, name))).collect();
        let staged = |slug: &str| {
            let this = read.iter().find(|(name, _)| shards::prompt::slug(name).as_deref() == Some(slug));
            match this {
                _ if !there.iter().any(|known| known == slug) => Staged::Absent,
                Some((_, Err(why))) => Staged::Unusable(why.clone()),
                _ => Staged::There,
            }
        };
        if let Some(fault) = names.judge(staged, &there) {
            let check = match fault.leg {
                NameLeg::Model => "model",
                NameLeg::TokenizerFiles => "tokenizer",
            };
            return report.wrong(subject, check, fault.found, fault.fix);
        }
        report.right(subject, "model", requested.iter().copied().collect::<Vec<_>>().join(", "));
        let own_template = self.rule.kv.as_ref().is_none_or(|kv| kv.chat_template.is_none());
        for (name, outcome) in &read {
            match outcome {
                Ok((model, digest)) => {
                    let (template, digest) = (model.template_origin().name(), &digest[..12]);
                    let says = format!("{}: template {template}, digest {digest}", model.path().display());
                    match model.template_problem().filter(|_| own_template) {
                        Some(problem) => report.wrong(subject, "tokenizer", says, problem),
                        None => report.right(subject, "tokenizer", says),
                    }
                }
                Err(why) => {
                    let fix = format!("requests for {name} are routed without keys");
                    report.unknown(subject, "tokenizer", why.clone(), fix);
                }
            }
        }
        checked.model = read.into_iter().find_map(|(name, outcome)| Some((name.to_owned(), outcome.ok()?.0)));
    }
}

fn report_denied(rule: &Rule, subject: &str, status: u16, report: &mut Report) {
    let says = format!("the engine answers {status} to the gateway's own calls");
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
async fn own_settings(engine: Engine, address: SocketAddr, authorization: Option<&str>) -> OwnSettings {
    let path = match engine {
        Engine::Vllm => "/metrics",
        Engine::Sglang | Engine::Trtllm => "/server_info",
        Engine::Llamacpp => return OwnSettings::default(),
    };
    let Ok(Reply { status: 200, body }) = discovery::get(address, path, authorization, TIMEOUT).await else {
        return OwnSettings::default();
    };
    let text = String::from_utf8_lossy(&body);
    if engine == Engine::Vllm {
        return cache_config(&text);
    }
    let info: Value = serde_json::from_str(&text).unwrap_or_default();
    let size = if engine == Engine::Sglang { &info["page_size"] } else { &info["tokens_per_block"] };
    OwnSettings {
        block_tokens: size.as_u64().and_then(|tokens| u32::try_from(tokens).ok()),
        algorithm: None,
        caches_nothing: info["disable_radix_cache"] == true,
    }
}

/// What `vllm:cache_config_info` says.
fn cache_config(metrics: &str) -> OwnSettings {
    let Some(line) = metrics.lines().find(|line| line.starts_with("vllm:cache_config_info{")) else {
        return OwnSettings::default();
    };
    let label = |name: &str| {
        let begins = [format!(",{name}=\""), format!("{{{name}=\"")];
        let (_, rest) = begins.iter().find_map(|begin| line.split_once(begin.as_str()))?;
        Some(rest.split_once('"')?.0)
    };
    OwnSettings {
        block_tokens: label("block_size").and_then(|text| text.parse().ok()),
        algorithm: label("prefix_caching_hash_algo").map(str::to_owned),
        caches_nothing: label("enable_prefix_caching") == Some("False"),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vllm_s_own_settings_are_found_among_its_labels() {
        let metrics = "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size=\"16\",engine=\"0\",\
                       hash_block_size=\"32\",prefix_caching_hash_algo=\"xxhash\"} 1.0\n";
        let settings = |block_tokens, algorithm: Option<&str>, caches_nothing| OwnSettings {
            block_tokens,
            algorithm: algorithm.map(str::to_owned),
            caches_nothing,
        };
        assert_eq!(cache_config(metrics), settings(Some(16), Some("xxhash"), false));
        let other =
            "vllm:cache_config_info{hash_block_size=\"32\",block_size=\"None\",enable_prefix_caching=\"False\"} 1.0";
        assert_eq!(cache_config(other), settings(None, None, true));
        assert_eq!(cache_config("vllm:num_requests_running 0"), OwnSettings::default());
    }
}
