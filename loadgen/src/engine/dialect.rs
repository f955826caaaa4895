//! The legs of a disaggregated request in each engine's own words: what a prefill leg and a decode leg have to say, what
//! a prefill leg's answer says, and what is refused.

use std::net::{IpAddr, SocketAddr};

use axum::http::{HeaderMap, StatusCode};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::api::{Call, Refusal};
use super::disagg::Claim;
use super::options::{EngineKind, EngineOptions, Role};
use super::trtllm_wire::TrtllmRelease;

/// TensorRT-LLM's ids below this are its own.
const GLOBAL_ID_MIN: u64 = 1 << 42;

/// What a request is to this engine.
#[derive(Debug, PartialEq, Eq)]
pub enum Leg {
    /// Nobody else has a part in it.
    Plain,
    /// Its prompt is computed for another engine.
    Prefill(Prefill),
    /// It goes on where another engine computed.
    Decode(Decode),
}

/// A prefill leg.
#[derive(Debug, PartialEq, Eq)]
pub struct Prefill {
    /// One for each prompt; vLLM's pull and TensorRT-LLM name theirs when they are admitted.
    pub keys: Vec<String>,
    /// The `X-Request-Id` that the other leg must have too.
    pub request_id: Option<String>,
    /// What its answer says.
    pub form: Form,
}

/// What a prefill leg's answer says, and when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `kv_transfer_params` of NIXL, at once.
    Pull,
    /// Nothing, at once.
    Push,
    /// Nothing, once the other leg has everything.
    Bootstrap,
    /// `disaggregated_params` in the choice and the prompt's ids, at once.
    Context {
        /// The orchestrator's id, to be given back.
        id: Option<u64>,
    },
}

/// A decode leg.
#[derive(Debug, PartialEq, Eq)]
pub struct Decode {
    /// The prefill engine's side channel.
    pub at: SocketAddr,
    /// One for each prompt.
    pub claims: Vec<Claim>,
    /// Whether the prefill engine waits to hear that all has come.
    pub tells: bool,
}

/// The members that say what a leg is, as they are spelled.
#[derive(Deserialize)]
struct Members<'a> {
    #[serde(borrow)]
    kv_transfer_params: Option<&'a RawValue>,
    #[serde(borrow)]
    disaggregated_params: Option<&'a RawValue>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    stream_options: Option<Value>,
    #[serde(default)]
    max_tokens: Option<u64>,
    #[serde(default)]
    max_completion_tokens: Option<u64>,
    #[serde(default)]
    max_output_tokens: Option<u64>,
    #[serde(default)]
    min_tokens: Option<u64>,
    #[serde(default)]
    bootstrap_host: Option<Value>,
    #[serde(default)]
    bootstrap_port: Option<Value>,
    #[serde(default)]
    bootstrap_room: Option<Value>,
    #[serde(default)]
    disagg_prefill_dp_rank: Option<u64>,
}

/// Reads what a request is to an engine with these options, whose side channel listens at `side`.
///
/// # Errors
/// The leg breaks the dialect.
pub fn read(
    options: &EngineOptions,
    side: Option<SocketAddr>,
    headers: &HeaderMap,
    body: &[u8],
    call: &Call,
) -> Result<Leg, Refusal> {
    if options.role == Role::None {
        return Ok(Leg::Plain);
    }
    let members: Members<'_> =
        serde_json::from_slice(body).map_err(|error| Refusal::bad_request(format!("the body: {error}")))?;
    match (options.kind, options.role) {
        (_, Role::None) | (EngineKind::Llamacpp, _) => Ok(Leg::Plain),
        (EngineKind::Vllm, Role::Prefill) => vllm_prefill(options, headers, &members),
        (EngineKind::Vllm, Role::Decode) => vllm_decode(headers, &members),
        (EngineKind::Sglang, Role::Prefill) => sglang_prefill(options, side, &members, call),
        (EngineKind::Sglang, Role::Decode) => sglang_decode(options, &members, call),
        (EngineKind::Trtllm, Role::Prefill) => trtllm_context(options, &members, call),
        (EngineKind::Trtllm, Role::Decode) => trtllm_generation(options, headers, &members, call),
    }
}

fn wrong<T>(message: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal::bad_request(message))
}

fn request_id(headers: &HeaderMap) -> Option<String> {
    headers.get("x-request-id").and_then(|id| id.to_str().ok()).map(str::to_owned)
}

fn value(raw: Option<&RawValue>) -> Result<Value, Refusal> {
    let Some(raw) = raw else { return Ok(Value::Null) };
    serde_json::from_str(raw.get()).map_err(|error| Refusal::bad_request(error.to_string()))
}

fn vllm_prefill(options: &EngineOptions, headers: &HeaderMap, members: &Members<'_>) -> Result<Leg, Refusal> {
    let params = value(members.kv_transfer_params)?;
    if params["do_remote_decode"] != true {
        return Ok(Leg::Plain);
    }
    let shape = [
        (params["do_remote_prefill"] == false, "`do_remote_prefill` is false on a prefill leg"),
        (members.stream != Some(true), "a prefill leg is not streamed"),
        (members.stream_options.is_none(), "`stream_options` without `stream`"),
        (
            members.max_tokens.or(members.max_output_tokens) == Some(1),
            "a prefill leg makes one token: `max_tokens` is 1",
        ),
        (members.max_completion_tokens.is_none_or(|max| max == 1), "`max_completion_tokens` is 1 on a prefill leg"),
        (members.min_tokens.is_none_or(|min| min <= 1), "`min_tokens` is at most 1 on a prefill leg"),
    ];
    if let Some((_, message)) = shape.iter().find(|(holds, _)| !holds) {
        return wrong(*message);
    }
    let Some(id) = request_id(headers) else { return wrong("a prefill leg has an X-Request-Id") };
    if let Some(port) = options.nixl_port {
        let named = format!("___prefill_addr_{}___decode_addr_", SocketAddr::new(options.host, port));
        let rest = id.strip_prefix(&named).and_then(|rest| rest.rsplit_once('_'));
        let hex = |text: &str| text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !rest.is_some_and(|(decode, unique)| !decode.is_empty() && hex(unique)) {
            return wrong(format!("X-Request-Id {id:?} is not {named}ADDRESS_<32 hex digits>"));
        }
    }
    let (keys, form) = if options.nixl_push { (vec![id.clone()], Form::Push) } else { (Vec::new(), Form::Pull) };
    Ok(Leg::Prefill(Prefill { keys, request_id: Some(id), form }))
}

fn vllm_decode(headers: &HeaderMap, members: &Members<'_>) -> Result<Leg, Refusal> {
    let params = value(members.kv_transfer_params)?;
    if params["do_remote_decode"] == true {
        return wrong("a decode leg with `do_remote_decode`");
    }
    let at = params["remote_host"].as_str().zip(params["remote_port"].as_u64());
    let at = at.and_then(|(host, port)| Some(SocketAddr::new(host.parse().ok()?, u16::try_from(port).ok()?)));
    let (Some(at), Some(key)) = (at, params["remote_request_id"].as_str()) else { return Ok(Leg::Plain) };
    if params["do_remote_prefill"] != true {
        return Ok(Leg::Plain);
    }
    let pulls = params["remote_block_ids"].as_array().is_some_and(|ids| !ids.is_empty());
    // A push names the transfer only: the prefill engine finds out where it goes by the id.
    let proof = match members.kv_transfer_params {
        Some(raw) if pulls => raw.get().to_owned(),
        _ => params["remote_engine_id"].as_str().unwrap_or_default().to_owned(),
    };
    let claim = Claim { key: key.to_owned(), proof, request_id: request_id(headers), concurrent: !pulls };
    Ok(Leg::Decode(Decode { at, claims: vec![claim], tells: false }))
}

/// Host, port and rooms of a request with `count` prompts.
fn bootstrap(members: &Members<'_>, count: usize) -> Result<(IpAddr, Option<u16>, Vec<u64>), Refusal> {
    let list = |value: &Option<Value>| match value {
        None => Vec::new(),
        Some(Value::Array(items)) => items.clone(),
        Some(one) => vec![one.clone(); count],
    };
    let (hosts, ports, rooms) =
        (list(&members.bootstrap_host), list(&members.bootstrap_port), list(&members.bootstrap_room));
    let room = |room: &Value| room.as_u64().filter(|room| *room < 1 << 63);
    let rooms: Option<Vec<u64>> = rooms.iter().map(room).collect();
    let rooms = rooms.filter(|rooms| rooms.len() == count);
    let host = hosts.first().filter(|first| hosts.len() == count && hosts.iter().all(|host| host == *first));
    let host = host.and_then(Value::as_str).map(|host| host.trim_start_matches('[').trim_end_matches(']'));
    let (Some(host), Some(mut rooms)) = (host.and_then(|host| host.parse().ok()), rooms) else {
        return wrong("disaggregated: `bootstrap_host` and `bootstrap_room` are one, or one for each prompt");
    };
    if members.bootstrap_room.as_ref().is_some_and(Value::is_u64) {
        rooms.iter_mut().zip(0..).for_each(|(room, place)| *room += place);
    }
    let port = ports.first().and_then(Value::as_u64).and_then(|port| u16::try_from(port).ok());
    Ok((host, port, rooms))
}

fn sglang_prefill(
    options: &EngineOptions,
    side: Option<SocketAddr>,
    members: &Members<'_>,
    call: &Call,
) -> Result<Leg, Refusal> {
    let (host, port, rooms) = bootstrap(members, call.prompts.len())?;
    if host != options.host || port.is_some_and(|port| side.is_some_and(|side| side.port() != port)) {
        return wrong(format!("`bootstrap_host` and `_port` name {host} {port:?}, this bootstrap server is {side:?}"));
    }
    let keys = rooms.iter().map(u64::to_string).collect();
    Ok(Leg::Prefill(Prefill { keys, request_id: None, form: Form::Bootstrap }))
}

fn sglang_decode(options: &EngineOptions, members: &Members<'_>, call: &Call) -> Result<Leg, Refusal> {
    let (host, port, rooms) = bootstrap(members, call.prompts.len())?;
    if let Some(rank) = members.disagg_prefill_dp_rank
        && rooms.iter().any(|room| room % u64::from(options.dp) != rank % u64::from(options.dp))
    {
        return wrong("`disagg_prefill_dp_rank` is not the rank that the room names");
    }
    let claim = |room: u64| Claim { key: room.to_string(), proof: String::new(), request_id: None, concurrent: true };
    let at = SocketAddr::new(host, port.unwrap_or(8998));
    Ok(Leg::Decode(Decode { at, claims: rooms.into_iter().map(claim).collect(), tells: true }))
}

fn trtllm_context(options: &EngineOptions, members: &Members<'_>, call: &Call) -> Result<Leg, Refusal> {
    let Some(raw) = members.disaggregated_params else { return Ok(Leg::Plain) };
    let params = value(Some(raw))?;
    let known = |name: &String| ["request_type", "disagg_request_id"].contains(&name.as_str());
    if params["request_type"] != "context_only" || !params.as_object().is_some_and(|all| all.keys().all(known)) {
        return wrong(format!("a context leg says {raw}"));
    }
    if members.stream == Some(true) || members.stream_options.is_some() {
        return wrong("a context leg is not streamed and has no `stream_options`");
    }
    let id = params["disagg_request_id"].as_u64();
    if id.is_none_or(|id| !(GLOBAL_ID_MIN..1 << 63).contains(&id)) && options.trtllm_release > TrtllmRelease::V1_1 {
        return wrong("`disagg_request_id` is a positive number of 63 bits, at least 2^42");
    }
    if call.prompts.len() != 1 {
        return wrong("`prompt` is one string or one list of ids in disaggregated serving");
    }
    let keys = id.map(|id| id.to_string()).into_iter().collect();
    Ok(Leg::Prefill(Prefill { keys, request_id: None, form: Form::Context { id } }))
}

fn trtllm_generation(
    options: &EngineOptions,
    headers: &HeaderMap,
    members: &Members<'_>,
    call: &Call,
) -> Result<Leg, Refusal> {
    let Some(raw) = members.disaggregated_params else { return Ok(Leg::Plain) };
    let params = value(Some(raw))?;
    if params["request_type"] != "generation_only" {
        return wrong(format!("a generation leg says {raw}"));
    }
    if let Some(key) = &options.disagg_auth_key {
        let shown = headers.get("x-trtllm-disagg-auth").and_then(|value| value.to_str().ok());
        if shown != Some(signature(key, &params).as_str()) {
            return wrong("x-trtllm-disagg-auth is missing or wrong");
        }
    }
    let state = params["encoded_opaque_state"].as_str().and_then(|state| state.split_once('/'));
    let place = state.and_then(|(at, key)| Some((at.parse().ok()?, key.trim_end_matches("+=="))));
    let Some((at, key)) = place else { return wrong("`encoded_opaque_state` is not one that was issued") };
    let proof = format!("{} {:?}", raw.get(), call.prompts[0].tokens);
    let claim = Claim { key: key.to_owned(), proof, request_id: None, concurrent: false };
    Ok(Leg::Decode(Decode { at, claims: vec![claim], tells: false }))
}

/// What signs a generation leg: HMAC-SHA-256 of two members of its parameters.
fn signature(key: &str, params: &Value) -> String {
    let payload = json!({
        "ctx_info_endpoint": params["ctx_info_endpoint"], "encoded_opaque_state": params["encoded_opaque_state"],
    });
    let mut block = [0_u8; 64];
    match key.len() {
        0..=64 => block[..key.len()].copy_from_slice(key.as_bytes()),
        _ => block[..32].copy_from_slice(&Sha256::digest(key)),
    }
    let padded = |with: u8| block.map(|byte| byte ^ with);
    let inner = Sha256::new().chain_update(padded(0x36)).chain_update(payload.to_string()).finalize();
    let outer = Sha256::new().chain_update(padded(0x5c)).chain_update(inner).finalize();
    let hex: String = outer.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256={hex}")
}

/// What a prefill leg's answer carries, spelled as no JSON writer of a gateway would.
pub struct Issued {
    /// The parameters.
    pub params: String,
    /// What the decode leg has to show.
    pub proof: String,
}

/// vLLM's parameters for a transfer of `blocks` blocks.
#[must_use]
pub fn kv_transfer_params(options: &EngineOptions, side: SocketAddr, key: &str, blocks: usize) -> Issued {
    let ids: Vec<usize> = (0..blocks.max(1)).collect();
    let flat = format!(
        "\"do_remote_prefill\" : true,  \"do_remote_decode\":false, \"remote_block_ids\": [{ids:?}], \
         \"remote_engine_id\":\"{}\", \"remote_request_id\":\"{key}\", \"remote_host\":\"{}\", \"remote_port\":{}, \
         \"tp_size\":1, \"remote_blocks_expiry_time\": 1.70e3, \"transfer_mode\":\"re\\u0061d\"",
        engine_name(side),
        side.ip(),
        side.port(),
    );
    let params = match options.nested_params {
        false => format!("{{{flat}}}"),
        true => format!(
            "{{{flat}, \"connectors\": [{{\"LMCacheConnectorV1\": {{\"ret_first_tok\": 1.50, \"note\": \"caf\\u00e9\"}}}}, \
             {{\"NixlConnector\": {{\"nested\": {{\"remote_block_ids\": [[0,1 , 2]], \"big\": 18446744073709551615}}}}}}]}}"
        ),
    };
    Issued { proof: params.clone(), params }
}

/// The name by which a push names the prefill engine.
#[must_use]
pub fn engine_name(side: SocketAddr) -> String {
    format!("engine-{side}")
}

/// TensorRT-LLM's parameters for a transfer.
#[must_use]
pub fn disaggregated_params(
    options: &EngineOptions,
    side: SocketAddr,
    key: &str,
    id: Option<u64>,
    prompt: &[u32],
    first: u32,
) -> Issued {
    let with_id = id.map_or_else(String::new, |id| format!("\"disagg_request_id\":{id}, "));
    let info = if options.trtllm_release >= TrtllmRelease::V1_3 {
        format!("\"ctx_info_endpoint\": \"tcp://{side}\", ")
    } else {
        String::new()
    };
    let of = |kind: &str| {
        format!(
            "{{\"request_type\" : \"{kind}\", \"first_gen_tokens\":[{first}], \"ctx_request_id\": 9223372036854775806, \
             \"encoded_opaque_state\":\"{side}/{key}+==\", {with_id}{info}\"draft_tokens\":null,  \"ctx_dp_rank\":0 }}"
        )
    };
    Issued { params: of("context_only"), proof: format!("{} {prompt:?}", of("generation_only")) }
}

/// The error of a leg whose other leg did not keep its part.
#[must_use]
pub fn broken(error: String) -> Refusal {
    Refusal { status: StatusCode::INTERNAL_SERVER_ERROR, message: error }
}
