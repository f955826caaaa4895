//! What the gateway would do with a request: `POST /config/ai/kv/explain`, its body the request's. Nothing is sent, and
//! nothing of the prompt is told again.
//!
//! The query may name the request's `path` (else `/v1/chat/completions`), its `host`, and the rule (`service_id`; else
//! the oldest that the request's model and host may use). Keys are those of the rule's own way of hashing; the decision
//! is the shards' own, on the loads and inventories of this moment.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use shards::ids::{BlockKey, EndpointIndex, ServiceId, ShardId};
use shards::inventory::{ReaderFactory, Run, Walk};
use shards::prompt::{Api, BodyView, Job, Keying, ModelTable, Step, preview};
use shards::route::{Chooser, Decision, Evidence, Facts, Turn, decide};
use shards::service::{KvExact, MissReason, Service, ServiceShared};

use crate::rules::compile::compile;
use crate::supervise::{Control, Entry, View};

use super::Context;
use super::answers::refusal;
use super::ask::{Asked, Whole};
use super::rule_path::{Names, no_rule};

/// Keys that are looked up under one guard.
const KEYS_PER_GUARD: usize = 512;

pub(super) async fn explain(State(context): State<Context>, Asked(query): Asked, Whole(body): Whole) -> Response {
    let view = context.control.view();
    let Some(request) = BodyView::parse(&body) else {
        return refusal(StatusCode::BAD_REQUEST, "the body is no JSON object in UTF-8: send the request's own body");
    };
    let model = request.model.as_deref().unwrap_or_default().to_owned();
    let entry = match choose(&view, &query, &model) {
        Ok(entry) => entry,
        Err(response) => return *response,
    };
    let path = query.get("path").cloned().unwrap_or_else(|| "/v1/chat/completions".to_owned());
    let (control, models) = (context.control.clone(), context.control.models.table());
    // Tokenizing a long prompt takes its time; only who asked waits for it.
    let story = tokio::task::spawn_blocking(move || tell(&control, &entry, &models, &path, &model, &body)).await;
    match story {
        Ok(story) => Json(story).into_response(),
        // Its text may quote the request.
        Err(_) => refusal(StatusCode::INTERNAL_SERVER_ERROR, "the request could not be looked at: see the log"),
    }
}

fn choose(view: &View, query: &Names, model: &str) -> Result<Arc<Entry>, Box<Response>> {
    if let Some(text) = query.get("service_id") {
        let id = text
            .parse()
            .map_err(|_| Box::new(refusal(StatusCode::BAD_REQUEST, &format!("service_id {text:?} is no number"))))?;
        return view.entry(ServiceId(id)).cloned().ok_or_else(|| Box::new(no_rule(&format!("service_id {id}"))));
    }
    let host = query.get("host").map_or("", String::as_str);
    let fits = |entry: &&Arc<Entry>| {
        let key = &entry.rule.key;
        (key.model.is_empty() || key.model == model) && (key.host.is_empty() || key.host.eq_ignore_ascii_case(host))
    };
    let found = view.entries.iter().find(fits).cloned();
    found.ok_or_else(|| Box::new(no_rule(&format!("a request of model {model:?} at host {host:?}"))))
}

/// What was made of the prompt.
struct Prompt {
    tokens: usize,
    keys: Vec<BlockKey>,
}

fn tell(control: &Control, entry: &Entry, models: &ModelTable, path: &str, model: &str, body: &[u8]) -> Value {
    // A copy with a seed tick of its own, so that asking changes no later decision.
    let shared = Arc::new(ServiceShared::new(control.view().shards.len().max(1)));
    shared.seed_ticks.store(entry.shared.seed_ticks.load(Ordering::Relaxed), Ordering::Relaxed);
    let service = compile(&entry.rule, entry.id, &entry.places, shared, entry.inventories(), &entry.facts);
    let prompt = match &service.kv {
        Some(kv) => read(kv, &service, models, path, model, body),
        None => Err(MissReason::ModeOff),
    };
    let keys = prompt.as_ref().map_or(&[][..], |prompt| &prompt.keys);
    let runs = entry.inventory.as_ref().map_or_else(Vec::new, |inventory| runs(inventory, keys));
    let evidence = match &prompt {
        Ok(prompt) => Evidence::Scored { prompt_tokens: prompt.tokens as u64, runs: &runs },
        Err(reason) => Evidence::None(*reason),
    };
    let mut turn = Turn::starting_at(ShardId(0));
    let mut chooser = Chooser { shard: ShardId(0), loads: &control.loads, turn: &mut turn };
    let decision = decide(&service, &Facts::of(evidence), &mut chooser);
    json!({
        "service_id": entry.id.0,
        "rule": entry.rule.key.to_string(),
        "name": entry.rule.name,
        "model": model,
        "prompt": match &prompt {
            Ok(prompt) => json!({"tokens": prompt.tokens, "blocks": prompt.keys.len()}),
            Err(reason) => json!({"miss": reason.name()}),
        },
        "block_tokens": service.kv.as_ref().map(|kv| kv.block_tokens),
        "keys": keys.iter().map(|key| key.0.to_string()).collect::<Vec<_>>(),
        "endpoints": endpoints(control, &service, &runs),
        "decision": decision.map(|decision| show(&service, &decision)),
    })
}

fn read(
    kv: &KvExact,
    service: &Service,
    models: &ModelTable,
    path: &str,
    model: &str,
    body: &[u8],
) -> Result<Prompt, MissReason> {
    let api = Api::of("POST", path).ok_or(MissReason::ModeOff)?;
    let name = if model.is_empty() { service.model.as_deref().unwrap_or_default() } else { model };
    if name.is_empty() {
        return Err(MissReason::ModelEmpty);
    }
    let adapter = kv.adapters.get(name);
    let model = models.lookup(adapter.map_or(name, |adapter| &adapter.base)).ready()?;
    let rendering = kv.rendering(service.engine);
    let lora = adapter.map(|adapter| &adapter.lora);
    let tokens = preview(api, body, model, rendering)?.ids.len();
    let keying = Keying { contract: &kv.contract, block_tokens: kv.block_tokens, lora };
    let mut job = Job::new(api, body, model, rendering, keying)?;
    while job.step()? == Step::More {}
    Ok(Prompt { tokens, keys: job.keys().to_vec() })
}

/// Who holds how much of the prompt.
fn runs(inventory: &ReaderFactory, keys: &[BlockKey]) -> Vec<Run> {
    let reader = inventory.reader();
    let mut walk = Walk::default();
    for part in keys.chunks(KEYS_PER_GUARD) {
        // A guard each, so that no publish waits.
        match reader.enter() {
            Some(guard) if guard.advance(&mut walk, part) => {}
            _ => break,
        }
    }
    reader.enter().map_or_else(Vec::new, |guard| walk.runs(&guard).collect())
}

fn endpoints(control: &Control, service: &Service, runs: &[Run]) -> Vec<Value> {
    let blocks = |index: EndpointIndex| runs.iter().filter(|run| run.endpoint == index).map(|run| run.blocks).max();
    let shown = service.endpoints.iter().filter(|endpoint| !endpoint.retired).map(|endpoint| {
        let shared = &endpoint.shared;
        json!({
            "ep_idx": shared.index.0,
            "endpoint": name(service, shared.index),
            "up": shared.is_up(),
            "candidate": endpoint.is_candidate(),
            "blocks": blocks(shared.index).unwrap_or(0),
            "keys": shared.kv_blocks(),
            "in_flight": control.loads.total(shared.slot).requests(),
        })
    });
    shown.collect()
}

fn name(service: &Service, index: EndpointIndex) -> String {
    service.endpoints.get(index.index()).map_or_else(String::new, |endpoint| endpoint.address.to_string())
}

fn show(service: &Service, decision: &Decision) -> Value {
    let named = |index: EndpointIndex| json!({"ep_idx": index.0, "endpoint": name(service, index)});
    json!({
        "ep_idx": decision.endpoint.0,
        "endpoint": name(service, decision.endpoint),
        "tier": decision.tier.name(),
        "reason": decision.reason.name(),
        "hit_blocks": decision.hit_blocks,
        "hit_tokens": decision.hit_tokens,
        "miss": decision.miss.map(MissReason::name),
        "spilled_from": decision.spilled_from.map(named),
        "seeded_from": decision.seeded_from.map(named),
    })
}
