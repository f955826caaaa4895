//! A rule as the API shows it: the names it was posted with, and the values in force.

use serde_json::{Map, Value, json};
use shards::block::FIXED_SEED;
use shards::ids::ServiceId;
use shards::service::{Bypass, Disagg, Engine, PrefixHashing, Select, Sessions};

use super::{EventPlace, KvRule, Nonce, PathMatchMode, Rule, RuleEndpoint};

/// The rule as one element of `lbAttr`. `up` tells for each endpoint of the rule whether it is up.
#[must_use]
pub fn readback(rule: &Rule, id: ServiceId, up: &[bool]) -> Value {
    let endpoints: Vec<Value> = rule
        .endpoints
        .iter()
        .enumerate()
        .map(|(i, endpoint)| show_endpoint(endpoint, up.get(i).copied().unwrap_or(false)))
        .collect();
    json!({ "serviceArguments": show_service(rule, id), "endpoints": endpoints })
}

/// What a KV rule says of its engines' keys, its seed sealed; none for rules that look at no keys.
#[must_use]
pub fn contract_of(rule: &Rule, nonce: Nonce) -> Option<Value> {
    let kv = rule.kv.as_ref()?;
    Some(json!({
        "name": rule.name,
        "externalIP": rule.key.ip,
        "port": rule.key.port,
        "host": rule.key.host,
        "path_prefix": rule.key.path_prefix,
        "model_name": rule.key.model,
        "kvEngineType": rule.engine.name(),
        "kvHashAlgo": kv.algo.name(),
        "kvBlockSize": kv.block_tokens,
        "seed_seal": (rule.engine == Engine::Vllm).then(|| nonce.seal(kv.seed.as_deref().unwrap_or(FIXED_SEED))),
    }))
}

fn show_service(rule: &Rule, id: ServiceId) -> Value {
    let mut map = Map::new();
    let mut put = |name: &str, value: Value| {
        map.insert(name.to_owned(), value);
    };
    put("service_id", json!(id.0));
    put("externalIP", json!(rule.key.ip));
    put("port", json!(rule.key.port));
    put("protocol", json!("tcp"));
    put("sel", json!(rule.select.number()));
    if rule.select == Select::Expected {
        put("selDefault", json!(true));
    }
    put("mode", json!(4));
    put("security", json!(0));
    put("block", json!(rule.key.block));
    put("name", json!(rule.name));
    for (name, value) in
        [("host", &rule.key.host), ("path_prefix", &rule.key.path_prefix), ("model_name", &rule.key.model)]
    {
        if !value.is_empty() {
            put(name, json!(value));
        }
    }
    if rule.key.path_match != PathMatchMode::Disabled {
        put("path_match_mode", json!(rule.key.path_match.name()));
    }
    show_hashing(rule.hashing, rule.select, &mut put);
    if let Some(sessions) = &rule.sessions {
        show_sessions(sessions, &mut put);
    }
    if let Some(pd) = &rule.pd {
        show_disagg(pd, rule.engine, &mut put);
        if let Some(path) = &rule.pd_auth_key_file {
            put("pdAuthKeyFile", json!(path));
        }
    }
    let mode = match (&rule.kv, &rule.pd) {
        (None, _) => 0,
        (Some(_), Some(_)) => 1,
        (Some(_), None) => 3,
    };
    put("kvExactMode", json!(mode));
    put("kvEngineType", json!(rule.engine.name()));
    if let Some(kv) = &rule.kv {
        show_kv(rule.engine, kv, &mut put);
    }
    if let Some(token) = &rule.engine_token {
        put("engineTokenFile", json!(token.path()));
    }
    super::proxy::show(&rule.proxy, &mut put);
    for (name, value) in &rule.inert {
        put(name, value.clone());
    }
    Value::Object(map)
}

fn show_hashing(hashing: PrefixHashing, select: Select, put: &mut impl FnMut(&str, Value)) {
    let default = PrefixHashing::default();
    let asked = select.asks_prefix();
    if asked || hashing.level != default.level {
        put("chwbl_prefix_hash_level", json!(hashing.level));
    }
    if asked || hashing.flags != default.flags {
        put("chwbl_prefix_hash_flags", json!(hashing.flags));
    }
    let bounded = select == Select::BoundedHash;
    if bounded || hashing.mean_load_factor != default.mean_load_factor {
        put("chwbl_mean_load_factor", json!(hashing.mean_load_factor));
    }
    if bounded || hashing.replication != default.replication {
        put("chwbl_replication", json!(hashing.replication));
    }
}

fn show_sessions(sessions: &Sessions, put: &mut impl FnMut(&str, Value)) {
    if let Some(source) = &sessions.source {
        put("session_header_name", json!(super::pools::show_source(source)));
    }
    put("pd_session_ttl_sec", json!(sessions.ttl.as_secs()));
    put("pd_session_max", json!(sessions.max));
}

fn show_disagg(pd: &Disagg, engine: Engine, put: &mut impl FnMut(&str, Value)) {
    put("pd_disagg_mode", json!(true));
    put("pd_cache_aware_mode", json!(pd.cache_aware));
    if pd.cache_aware {
        put("pd_cache_threshold", json!(pd.cache_threshold));
        put("pd_balance_abs_threshold", json!(pd.balance_threshold));
    }
    if engine == Engine::Sglang {
        put("pdBootstrapPort", json!(pd.bootstrap_port));
    }
    if pd.push {
        put("pdNixlPush", json!(true));
    }
    if pd.bypass != Bypass::Off {
        put("pdBypass", json!(pd.bypass.name()));
    }
    if pd.bypass_tokens != 0 {
        put("pdBypassTokens", json!(pd.bypass_tokens));
    }
}

fn show_kv(engine: Engine, kv: &KvRule, put: &mut impl FnMut(&str, Value)) {
    put("kvBlockSize", json!(kv.block_tokens));
    put("kvHashAlgo", json!(kv.algo.name()));
    if !kv.algo_given {
        put("kvHashAlgoDefault", json!(true));
    }
    put("kvZmqPort", json!(kv.zmq_port));
    put("kvWarmupSec", json!(kv.warmup_sec));
    put("kvDpRankCount", json!(kv.ranks));
    if engine == Engine::Vllm {
        put("kvNoneHashSeed", json!(kv.seed.as_deref().unwrap_or(FIXED_SEED)));
    }
    if let Some(template) = &kv.chat_template {
        put("kvChatTemplate", json!(template.path));
    }
    if let Some(kwargs) = &kv.prompts.template_kwargs {
        // It was read as an object when the rule was checked; a text shows it as well.
        put("kvChatTemplateKwargs", serde_json::from_str(kwargs).unwrap_or_else(|_| json!(&**kwargs)));
    }
    if let Some(add) = kv.prompts.add_bos {
        put("kvAddBos", json!(add));
    }
    if let Some(way) = kv.prompts.engine_render {
        put("kvEngineRender", json!(way.name()));
    }
    if kv.prompts.send_ids {
        put("kvSendPromptIds", json!(true));
    }
    if !kv.adapters.is_empty() {
        put("kvAdapters", super::adapters::show(&kv.adapters));
    }
    put("kvMinMatchTokens", json!(kv.min_match_tokens));
    put("kvLbMode", json!(kv.blend.name()));
    put("kvThroughput", json!(kv.throughput));
    put("kvLoadPenalty", json!(kv.load_penalty));
    if let Some(sum) = kv.capacity_sum_milli {
        put("kvCapSumMilli", json!(sum));
    }
    put("kvSpillRelief", json!(kv.spill_relief));
    put("kvColdstartSeedN", json!(kv.seed_every));
    put("kvColdstartMinBlocks", json!(kv.seed_min_blocks));
    put("kvMeanLoadFactor", json!(kv.mean_load_factor));
    put("kvZeroHitN", json!(kv.zero_hit_every));
    put("kvClaimMs", json!(kv.claim_ms));
    put("kvReplayPortOffset", json!(kv.replay_port_offset));
    if engine == Engine::Trtllm {
        put("kvTrtllmPollMinMs", json!(kv.drain_poll.min_ms));
        put("kvTrtllmPollMaxMs", json!(kv.drain_poll.max_ms));
    }
    put("kvMediumWeights", json!({"cpu": kv.weights.cpu, "storage": kv.weights.storage}));
}

fn show_endpoint(endpoint: &RuleEndpoint, up: bool) -> Value {
    let mut value = json!({
        "endpointIP": endpoint.host.to_string(),
        "targetPort": endpoint.port,
        "weight": endpoint.weight,
        "state": if up { "active" } else { "inactive" },
        "counter": "",
        "ep_role": endpoint.role.number(),
    });
    let map = value.as_object_mut().expect("the literal above is an object");
    if endpoint.backup {
        map.insert("backup".to_owned(), json!(true));
    }
    if !endpoint.nixl_engine_id.is_empty() {
        map.insert("nixl_engine_id".to_owned(), json!(endpoint.nixl_engine_id));
    }
    if endpoint.nixl_port != 0 {
        map.insert("nixl_port".to_owned(), json!(endpoint.nixl_port));
    }
    if let Some(events) = &endpoint.events {
        match events.live {
            EventPlace::Bind(address) => map.insert("kvZmqBind".to_owned(), json!(format!("tcp://{address}"))),
            EventPlace::Connect(port) if events.own => map.insert("kvZmqPort".to_owned(), json!(port)),
            EventPlace::Connect(_) => None,
        };
        if let Some(port) = events.replay_port.filter(|_| events.own_replay) {
            map.insert("kvReplayPort".to_owned(), json!(port));
        }
    }
    value
}
