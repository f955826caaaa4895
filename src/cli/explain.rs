//! `kvlane explain`: what the gateway would make of one request, step by step.
//!
//! Where a gateway runs, its inventory is asked over the management API. The decision is then made by the gateway's own
//! code on that snapshot, with every endpoint idle.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use shards::ids::{BlockKey, EndpointIndex, Rank, ServiceId, ShardId};
use shards::inventory::{self, Medium, Run};
use shards::load::{LoadSlot, LoadTable};
use shards::prompt::{Api, BodyView, Job, Keying, Model, Preview, Question, Step, preview};
use shards::route::{Chooser, Decision, Evidence, Facts, Turn, decide};
use shards::service::{EndpointShared, MissReason, PathMatch, Service, ServiceShared};

use super::Outcome;
use super::inquiry::{Gateway, keys_of};
use super::manage::Credentials;
use super::render::{Failure, REQUEST_BYTES_MAX};
use crate::config::Config;
use crate::discovery::{Call, ServiceFacts};
use crate::models;
use crate::rules::compile::{Inventories, Place, compile};
use crate::rules::{Host, Rule};

/// Largest answer of an engine with ids, bytes.
const IDS_BYTES_MAX: usize = 8 << 20;
/// Longest wait for an engine.
const ENGINE_TIMEOUT: Duration = Duration::from_secs(5);

/// What `kvlane explain` is told on its command line.
#[derive(Debug, Args)]
pub(super) struct ExplainArgs {
    /// Configuration file (TOML) with the rules.
    #[arg(short, long, value_name = "FILE")]
    config: PathBuf,
    /// File with the request's body.
    request: PathBuf,
    /// Path of the request.
    #[arg(long, value_name = "PATH", default_value = "/v1/chat/completions")]
    path: String,
    /// Host the request names.
    #[arg(long, value_name = "HOST")]
    host: Option<String>,
    /// Management API of a running gateway, such as http://127.0.0.1:11111, to ask who holds what.
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// How that gateway lets one in.
    #[command(flatten)]
    credentials: Credentials,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Everything found out.
struct Story {
    rule: Rule,
    model: String,
    prompt: Result<Preview, MissReason>,
    keys: Vec<BlockKey>,
    block_tokens: Option<u32>,
    overlaps: Option<Vec<Overlap>>,
    decision: Option<Decision>,
    asked: bool,
    /// Where only an engine can render: which one told the ids, or why none did.
    engine: Option<Result<String, String>>,
}

/// What one endpoint holds of the prompt.
struct Overlap {
    endpoint: String,
    up: bool,
    blocks: u32,
    keys: u64,
}

pub(super) fn explain(args: &ExplainArgs) -> Outcome {
    super::say_why_prompts_are_refused();
    match story(args) {
        Ok(story) if args.json => {
            println!("{}", story.json());
            Outcome::Right
        }
        Ok(story) => {
            story.print();
            Outcome::Right
        }
        Err(Failure::Usage(message)) => {
            eprintln!("kvlane explain: {message}");
            Outcome::Usage
        }
        Err(Failure::No(message)) => {
            eprintln!("kvlane explain: {message}");
            Outcome::No
        }
    }
}

fn story(args: &ExplainArgs) -> Result<Story, Failure> {
    let gateway = args.url.as_deref().map(|url| Gateway::at(url, &args.credentials)).transpose();
    let gateway = gateway.map_err(|why| Failure::Usage(format!("--url: {why}")))?;
    let listed = |problems: &[crate::fields::Problem]| {
        problems.iter().map(|problem| format!("environment: {problem}")).collect::<Vec<_>>().join("\n")
    };
    let defaults = super::kv_defaults().map_err(|problems| Failure::No(listed(&problems)))?;
    let (config, _) = Config::read(&args.config, &defaults, None).map_err(|error| Failure::No(error.to_string()))?;
    let body = read_request(&args.request)?;
    let view = BodyView::parse(&body).ok_or_else(|| Failure::No("the request is no JSON object in UTF-8".into()))?;
    let asked_model = view.model.as_deref();
    let service = choose(&config.rules, args, asked_model)
        .ok_or_else(|| Failure::No("no rule takes such a request: host, path and model are compared".into()))?;
    let rule = service.rule.clone();
    let model = asked_model.map(str::to_owned).or_else(|| service.compiled.model.clone());
    let model = model.ok_or_else(|| Failure::No("neither the request nor the rule names a model".into()))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::No(format!("no runtime: {error}")))?;
    let Prompted { prompt, keys, engine } =
        runtime.block_on(prompt_of(args, &config, &service, &model, &body, &view))?;
    let overlaps = match &gateway {
        Some(gateway) => Some(overlaps(gateway, &rule, &service.compiled, &keys)?),
        None => None,
    };
    let decision = decision(&service.compiled, &prompt, overlaps.as_deref());
    Ok(Story {
        rule,
        model,
        prompt,
        keys,
        block_tokens: service.compiled.kv.as_ref().map(|kv| kv.block_tokens),
        overlaps,
        decision,
        asked: args.url.is_some(),
        engine,
    })
}

fn read_request(path: &std::path::Path) -> Result<Vec<u8>, Failure> {
    let failed = |error: String| Failure::Usage(format!("{}: {error}", path.display()));
    let length = std::fs::metadata(path).map_err(|error| failed(error.to_string()))?.len();
    if length > REQUEST_BYTES_MAX {
        return Err(failed(format!("more than {REQUEST_BYTES_MAX} bytes")));
    }
    std::fs::read(path).map_err(|error| failed(error.to_string()))
}

/// A rule and the service it becomes, with nothing known of its endpoints: names without an address count as up, at
/// no address, because nothing is sent.
struct Candidate<'a> {
    rule: &'a Rule,
    compiled: Arc<Service>,
}

/// The service that a shard would choose: the most specific one that fits.
fn choose<'a>(rules: &'a [Rule], args: &ExplainArgs, model: Option<&str>) -> Option<Candidate<'a>> {
    let candidates: Vec<Candidate<'_>> = rules.iter().enumerate().map(|(n, rule)| compiled(n, rule)).collect();
    let tables = shards::service::Tables {
        services: candidates.iter().map(|candidate| Arc::clone(&candidate.compiled)).collect(),
        models: Arc::default(),
    };
    let path = args.path.split('?').next().unwrap_or_default();
    let fits = |service: &Service| {
        let host = service
            .host
            .as_deref()
            .is_none_or(|host| args.host.as_deref().is_some_and(|h| h.eq_ignore_ascii_case(host)));
        let path = match &service.path {
            None => true,
            Some(PathMatch::Prefix(prefix)) => path.starts_with(prefix.as_str()),
            Some(PathMatch::Exact(exact)) => path == exact,
        };
        host && path && service.model.as_deref().is_none_or(|wanted| model == Some(wanted))
    };
    // The listener that has the first fitting rule of the file: the command is not told an address.
    let first = candidates.iter().find(|candidate| fits(&candidate.compiled))?;
    let chosen = tables.by_address().remove(&first.compiled.listen)?.into_iter().find(|service| fits(service))?;
    candidates.into_iter().find(|candidate| candidate.compiled.id == chosen.id)
}

fn compiled(number: usize, rule: &Rule) -> Candidate<'_> {
    let place = |index: usize| Place {
        address: match rule.endpoints[index].host {
            Host::Ip(ip) => Some((ip, rule.endpoints[index].port).into()),
            Host::Name(_) => Some((std::net::Ipv4Addr::UNSPECIFIED, 0).into()),
        },
        shared: Arc::new(EndpointShared::new(EndpointIndex(index as u16), LoadSlot(index as u32), 1)),
        in_rule: Some(index),
    };
    let places: Vec<Place> = (0..rule.endpoints.len()).map(place).collect();
    let prompts = rule.kv.as_ref().map(|_| inventory::new(&inventory::Options { blocks_expected: 1 }).1);
    let inventories = Inventories { prompts, decode: None };
    let id = ServiceId(u32::try_from(number).unwrap_or(u32::MAX));
    let shared = Arc::new(ServiceShared::new(1));
    let compiled = compile(rule, id, &places, shared, inventories, &ServiceFacts::default());
    Candidate { rule, compiled: Arc::new(compiled) }
}

/// What becomes of the request's prompt.
struct Prompted {
    prompt: Result<Preview, MissReason>,
    keys: Vec<BlockKey>,
    engine: Option<Result<String, String>>,
}

impl Prompted {
    fn miss(reason: MissReason) -> Self {
        Prompted { prompt: Err(reason), keys: Vec::new(), engine: None }
    }
}

async fn prompt_of(
    args: &ExplainArgs,
    config: &Config,
    service: &Candidate<'_>,
    name: &str,
    body: &[u8],
    view: &BodyView<'_>,
) -> Result<Prompted, Failure> {
    let Some(kv) = &service.compiled.kv else { return Ok(Prompted::miss(MissReason::ModeOff)) };
    let Some(api) = Api::of("POST", &args.path) else { return Ok(Prompted::miss(MissReason::ModeOff)) };
    let adapter = kv.adapters.get(name);
    let base = adapter.map_or(name, |adapter| &adapter.base);
    let model = match models::read_now(&config.tokenizers_dir, base) {
        Ok((model, _)) => model,
        Err(error) => {
            eprintln!("kvlane explain: {error}");
            return Ok(Prompted::miss(MissReason::Tokenizer));
        }
    };
    let rendering = kv.rendering(service.compiled.engine);
    let keying =
        Keying { contract: &kv.contract, block_tokens: kv.block_tokens, lora: adapter.map(|adapter| &adapter.lora) };
    match preview(api, body, &model, rendering) {
        Ok(prompt) => match keys_of(api, body, &model, rendering, keying) {
            Ok(keys) => Ok(Prompted { prompt: Ok(prompt), keys, engine: None }),
            Err(reason) => Ok(Prompted::miss(reason)),
        },
        Err(reason @ (MissReason::EngineRendered | MissReason::TemplateMissing)) => {
            let told = told_ids(service, api, body, view, &model, reason).await;
            let keyed =
                told.map(|(who, list)| (who, Job::of_ids(&list, view, &model, rendering, keying).and_then(all)));
            Ok(match keyed {
                Err(why) => Prompted { engine: Some(Err(why)), ..Prompted::miss(reason) },
                Ok((_, Err(reason))) => Prompted::miss(reason),
                Ok((who, Ok((ids, keys)))) => {
                    let prompt = Preview { text: None, ids, whole: true, cuts: Vec::new() };
                    Prompted { prompt: Ok(prompt), keys, engine: Some(Ok(who)) }
                }
            })
        }
        Err(reason) => Ok(Prompted::miss(reason)),
    }
}

/// Ids and keys of a prompt of ids.
fn all(mut job: Job<'_>) -> Result<(Vec<u32>, Vec<BlockKey>), MissReason> {
    job.keep_ids();
    while job.step()? == Step::More {}
    Ok((job.ids().unwrap_or_default().to_vec(), job.keys().to_vec()))
}

/// Asks the rule's engines for the ids of a prompt that they render in code, as the gateway would: which one told them,
/// and the list after its bracket.
async fn told_ids(
    service: &Candidate<'_>,
    api: Api,
    body: &[u8],
    view: &BodyView<'_>,
    model: &Model,
    reason: MissReason,
) -> Result<(String, String), String> {
    let way = service.compiled.kv.as_ref().and_then(|kv| kv.engine_render);
    let way = way.ok_or("the rule's kvEngineRender is off: engines are not asked")?;
    let question = Question::after(reason, api, view, model, service.compiled.engine, way);
    let question = question.ok_or("what an engine would tell are not the ids of such a request")?;
    let authorization = service.rule.engine_token.as_ref().map(|token| token.authorization());
    let mut why = "the rule has no endpoint with an address".to_owned();
    for endpoint in &service.rule.endpoints {
        let mut found = match endpoint.host {
            Host::Ip(ip) => vec![SocketAddr::from((ip, endpoint.port))].into_iter(),
            Host::Name(ref name) => match tokio::net::lookup_host((name.as_str(), endpoint.port)).await {
                Ok(found) => found.collect::<Vec<_>>().into_iter(),
                Err(error) => {
                    why = format!("{endpoint}: {error}");
                    continue;
                }
            },
        };
        let Some(address) = found.next() else { continue };
        let call = Call {
            address,
            path: question.path,
            authorization: authorization.as_deref(),
            body: Some(body),
            answer_bytes_max: IDS_BYTES_MAX,
            timeout: ENGINE_TIMEOUT,
        };
        match call.ask().await {
            Ok(reply) if reply.status == 200 => match question.ids(&reply.body) {
                Some(list) => return Ok((format!("{endpoint}{}", question.path), list.to_owned())),
                None => why = format!("{endpoint}{}: no ids in the answer", question.path),
            },
            Ok(reply) => why = format!("{endpoint}{}: status {}", question.path, reply.status),
            Err(error) => why = format!("{endpoint}{}: {error}", question.path),
        }
    }
    Err(why)
}

/// Asks the gateway what each endpoint holds, and brings the service's endpoints to the state it tells.
fn overlaps(gateway: &Gateway, rule: &Rule, service: &Service, keys: &[BlockKey]) -> Result<Vec<Overlap>, Failure> {
    let told = gateway.rule(rule).map_err(Failure::No)?;
    let mut overlaps = Vec::new();
    for (index, endpoint) in rule.endpoints.iter().enumerate() {
        let held: HashSet<u64> = gateway.keys(told.service, index).map_err(Failure::No)?.into_iter().collect();
        let blocks = keys.iter().take_while(|key| held.contains(&key.0)).count();
        let up = told.up.get(index).copied().unwrap_or(false);
        let shared = &service.endpoints[index].shared;
        shared.set_kv_blocks(held.len() as u64);
        if !up {
            shared.mark_down();
        }
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        overlaps.push(Overlap { endpoint: endpoint.to_string(), up, blocks, keys: held.len() as u64 });
    }
    Ok(overlaps)
}

fn decision(service: &Service, prompt: &Result<Preview, MissReason>, held: Option<&[Overlap]>) -> Option<Decision> {
    let run = |(index, overlap): (usize, &Overlap)| Run {
        endpoint: EndpointIndex(index as u16),
        rank: Rank(0),
        medium: Medium::Device,
        blocks: overlap.blocks,
        block_tokens: None,
    };
    let runs: Vec<Run> = held.unwrap_or_default().iter().enumerate().filter(|(_, o)| o.blocks > 0).map(run).collect();
    let evidence = match prompt {
        Ok(prompt) => Evidence::Scored { prompt_tokens: prompt.ids.len() as u64, runs: &runs },
        Err(reason) => Evidence::None(*reason),
    };
    let loads = LoadTable::new(1, service.endpoints.len());
    let mut turn = Turn::starting_at(ShardId(0));
    decide(service, &Facts::of(evidence), &mut Chooser { shard: ShardId(0), loads: &loads, turn: &mut turn })
}

impl Story {
    fn endpoint(&self, index: EndpointIndex) -> String {
        self.rule.endpoints.get(index.index()).map_or_else(String::new, ToString::to_string)
    }

    fn json(&self) -> Value {
        let prompt = match &self.prompt {
            Ok(prompt) => json!({"text": prompt.text, "ids": prompt.ids, "whole": prompt.whole, "cuts": prompt.cuts}),
            Err(reason) => json!({"miss": reason.name()}),
        };
        let overlaps = self.overlaps.as_ref().map(|overlaps| {
            let one = |o: &Overlap| json!({"endpoint": o.endpoint, "up": o.up, "blocks": o.blocks, "keys": o.keys});
            overlaps.iter().map(one).collect::<Vec<_>>()
        });
        let decision = self.decision.as_ref().map(|decision| {
            json!({
                "tier": decision.tier.name(), "reason": decision.reason.name(), "endpoint": self.endpoint(decision.endpoint),
                "hit_blocks": decision.hit_blocks, "miss": decision.miss.map(MissReason::name),
                "spilled_from": decision.spilled_from.map(|index| self.endpoint(index)),
                "seeded_from": decision.seeded_from.map(|index| self.endpoint(index)),
            })
        });
        json!({
            "rule": self.rule.key.to_string(), "name": self.rule.name, "model": self.model, "prompt": prompt,
            "block_tokens": self.block_tokens,
            "keys": self.keys.iter().map(|key| key.0.to_string()).collect::<Vec<_>>(),
            "overlaps": overlaps, "decision": decision,
            "engine": self.engine.as_ref().map(|told| match told {
                Ok(who) => json!({"told_by": who}),
                Err(why) => json!({"not_asked_or_silent": why}),
            }),
        })
    }

    fn print(&self) {
        println!("rule      {} {}", self.rule.key, self.rule.name);
        println!("model     {}", self.model);
        match &self.prompt {
            Err(reason) => println!("prompt    routed without keys: {}", reason.name()),
            Ok(prompt) => self.print_prompt(prompt),
        }
        match &self.engine {
            None => {}
            Some(Ok(who)) => println!("engine    {who} told these ids: it renders in code"),
            Some(Err(why)) => println!("engine    only an engine knows this prompt's ids, and none told them: {why}"),
        }
        for overlap in self.overlaps.iter().flatten() {
            let state = if overlap.up { "up" } else { "down" };
            println!(
                "holds     {} ({state}): {} of {} blocks; {} keys in all",
                overlap.endpoint,
                overlap.blocks,
                self.keys.len(),
                overlap.keys
            );
        }
        if !self.asked {
            println!("holds     not asked: give the gateway's management API with --url");
        }
        let Some(decision) = &self.decision else {
            println!("decision  none: no endpoint is up with a weight above 0");
            return;
        };
        let why = match (decision.miss, decision.spilled_from, decision.seeded_from) {
            (Some(miss), ..) => format!("no overlap decides ({}), so the rule's sel does", miss.name()),
            (_, _, Some(winner)) => format!("its turn to be seeded, instead of {}", self.endpoint(winner)),
            (_, Some(winner), _) => format!("relief for {}", self.endpoint(winner)),
            _ => format!("the longest held prefix: {} blocks are predicted to hit", decision.hit_blocks),
        };
        println!(
            "decision  {} by tier {}: {why}; every endpoint counted as idle",
            self.endpoint(decision.endpoint),
            decision.tier.name()
        );
    }

    fn print_prompt(&self, prompt: &Preview) {
        match &prompt.text {
            Some(text) => println!("text      {} bytes\n{text}\n", text.len()),
            None if self.engine.is_some() => println!("text      known to the engine alone"),
            None => println!("text      none: the request brings ids"),
        }
        if !prompt.whole {
            println!("          this is the beginning; what follows cannot be known");
        }
        println!("ids       {} tokens: {}", prompt.ids.len(), json!(prompt.ids));
        println!("cuts      after bytes {}", json!(prompt.cuts));
        println!("keys      {} full blocks of {} tokens", self.keys.len(), self.block_tokens.unwrap_or(0));
        for (number, key) in self.keys.iter().enumerate() {
            println!("          {number} {} {:016x}", key.0, key.0);
        }
    }
}
