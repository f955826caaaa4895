//! The options of the reference that do nothing here: each accepted and inert, or refused, with the reason.
//!
//! Refused is what would be unsafe or wrong to ignore (access, encryption, a different way of routing); inert is
//! what a client may say without being misled by the outcome.

use serde_json::{Value as Json, json};

use crate::fields::{Fields, Report, Value};

use super::ranges::{self, Range};
use super::{Rule, table};

/// Types of an inert or refused option.
#[derive(Clone, Debug)]
enum Type {
    Int(Range),
    Flag,
    Text,
    /// One of some texts, or the empty one.
    OneOf(&'static [&'static str]),
    Any,
}

use Type::{Any, Flag, Int, OneOf, Text};

const U32: Type = Int(ranges::U32);
const I32: Type = Int(ranges::I32);

/// An option that is read, checked and shown again.
struct Inert {
    name: &'static str,
    kind: Type,
    /// Why it has no effect; empty where nobody could expect one.
    note: &'static str,
}

const fn inert(name: &'static str, kind: Type, note: &'static str) -> Inert {
    Inert { name, kind, note }
}

const PROBES: &str = "kvlane asks every endpoint GET /health each second";
const LAYER4: &str = "it belongs to packet forwarding, and kvlane proxies HTTP";
const SALT: &str = "a request's cache_salt counts where chwbl_prefix_hash_flags says so, with or without it";
const NOT_BUILT: &str = "it is not built yet";

const INERT: &[Inert] = &[
    inert("id", Text, ""),
    inert("projectId", Text, ""),
    inert("annotations", Any, ""),
    inert("connectionLimit", U32, NOT_BUILT),
    inert("privateIP", Text, LAYER4),
    inert("bgp", Flag, LAYER4),
    inert("monitor", Flag, ""),
    inert("managed", Flag, ""),
    inert("snat", Flag, LAYER4),
    inert("probetype", OneOf(table::PROBE_TYPES), PROBES),
    inert("probeport", Int(ranges::PORT_OR_NONE), PROBES),
    inert("probereq", Text, PROBES),
    inert("proberesp", Text, PROBES),
    inert("probeTimeout", U32, PROBES),
    inert("probeRetries", Int(ranges::PROBE_RETRIES), PROBES),
    inert("inactiveTimeOut", I32, NOT_BUILT),
    inert("timeoutMemberConnect", U32, NOT_BUILT),
    inert("timeoutMemberData", U32, NOT_BUILT),
    inert("timeoutTcpInspect", U32, LAYER4),
    inert("trace_type", Text, NOT_BUILT),
    inert("sse_mode", Flag, ""),
    inert("max_stream_duration_sec", I32, NOT_BUILT),
    inert("backend_keepalive_interval_sec", I32, NOT_BUILT),
    inert("chwbl_enable_cache_salt", Flag, SALT),
    inert("hsts_max_age", U32, "it concerns TLS"),
    inert("hsts_include_subdomains", Flag, "it concerns TLS"),
    inert("hsts_preload", Flag, "it concerns TLS"),
    inert("vip_qos_policy_id", Text, LAYER4),
    inert("sockMapMode", OneOf(table::SOCK_MAP_MODES), LAYER4),
    inert("kvExactApiMode", OneOf(table::API_MODES), "both completions and chats are routed by KV cache"),
];

/// An option whose only accepted value is the one that asks for nothing.
struct Refused {
    name: &'static str,
    kind: Type,
    /// The value that asks for nothing, besides an absent or empty one.
    nothing: Option<&'static str>,
    reason: &'static str,
}

const fn refused(name: &'static str, kind: Type, nothing: Option<&'static str>, reason: &'static str) -> Refused {
    Refused { name, kind, nothing, reason }
}

const TLS: &str = "TLS is not built yet";
const AUTH: &str = "checking clients' keys is not built yet";
const FLOW: &str = "admission control is not built yet";

const REFUSED: &[Refused] = &[
    refused("egress", Flag, None, "kvlane proxies HTTP towards engines only"),
    refused("proxyprotocolv2", Flag, None, "the PROXY protocol is not built yet"),
    refused(
        "backend_protocol",
        OneOf(table::PROTOCOLS_BEHIND),
        Some("http1"),
        "HTTP/2 is not built yet: write \"http1\"",
    ),
    refused("mtls_frontend", Any, None, TLS),
    refused("mtls_backend", Any, None, TLS),
    refused("alpn_protocols", Any, None, TLS),
    refused("tls_ciphers", Any, None, TLS),
    refused("tls_versions", Any, None, TLS),
    refused("backend_ca_cert_id", Text, None, TLS),
    refused("backend_client_cert_id", Text, None, TLS),
    refused("api_key_auth", OneOf(table::KEY_AUTHS), Some("disabled"), AUTH),
    refused("jwt_auth_profile", Text, None, AUTH),
    refused("kvModelProfile", Text, None, "model profiles are not built yet"),
    refused("fc_mode", OneOf(table::FLOW_MODES), Some("off"), FLOW),
    refused("fc_max_outstanding", U32, None, FLOW),
    refused("fc_ep_max_inflight", U32, None, FLOW),
    refused("fc_prefill_max_inflight", U32, None, FLOW),
    refused("fc_decode_max_inflight", U32, None, FLOW),
    refused("fc_max_queue_depth", U32, None, FLOW),
    refused("fc_max_queue_wait_ms", U32, None, FLOW),
    refused("fc_adaptive", Flag, None, FLOW),
    refused("fc_ttft_target_ms", U32, None, FLOW),
    refused("fc_telemetry_stale_ms", U32, None, FLOW),
    refused("fc_warmup_ms", U32, None, FLOW),
    refused("fc_tenant_max_share_pct", U32, None, FLOW),
    refused("fc_expose_headers", Flag, None, FLOW),
];

/// Members beside `serviceArguments` and `endpoints` whose only accepted value is an empty list.
const REFUSED_LISTS: &[(&str, &str)] = &[
    ("secondaryIPs", "they are SCTP's, and kvlane proxies HTTP"),
    ("secondaryVIPs", "further addresses need rules of their own"),
    ("allowedSources", "filtering clients by address is not built yet"),
];

/// Read-only members of a readback, tolerated so that a readback can be posted again.
const READ_ONLY: &[&str] = &["service_id", "source", "warnings"];

/// Reads the options of `serviceArguments` that have no effect.
pub(super) fn read_others(fields: &mut Fields<'_>, report: &mut Report, rule: &mut Rule) {
    for option in INERT {
        let Some((value, asks)) = read(fields, report, option.name, &option.kind) else { continue };
        if asks && !option.note.is_empty() {
            fields.warn(report, option.name, format!("{value} is accepted and has no effect: {}", option.note));
        }
        rule.inert.insert(option.name, value);
    }
    for option in REFUSED {
        let Some((value, asks)) = read(fields, report, option.name, &option.kind) else { continue };
        if asks && option.nothing.is_none_or(|nothing| value != *nothing) {
            fields.not_yet(report, option.name, format!("{value} is refused: {}", option.reason));
        }
    }
    for name in READ_ONLY {
        fields.take(name);
    }
}

/// Reads the members beside `serviceArguments` that have no effect.
pub(super) fn read_lists(fields: &mut Fields<'_>, report: &mut Report) {
    for (name, reason) in REFUSED_LISTS {
        match fields.take(name).map(|node| &node.value) {
            None => {}
            Some(Value::List(items)) if items.is_empty() => {}
            Some(_) => fields.not_yet(report, name, format!("refused: {reason}")),
        }
    }
    for name in ["offload_state", "hw_pkts", "hw_bytes"] {
        fields.take(name);
    }
}

/// The option's value, and whether it asks for anything (is not zero, false or empty).
fn read(fields: &mut Fields<'_>, report: &mut Report, name: &str, kind: &Type) -> Option<(Json, bool)> {
    match kind {
        Int(range) => fields.int_in(report, name, range.clone()).map(|value| (json!(value), value != 0)),
        Flag => fields.flag(report, name).map(|value| (json!(value), value)),
        Text => fields.text(report, name).map(|value| (json!(value), !value.is_empty() && value != "none")),
        OneOf(texts) => {
            let value = fields.text(report, name)?;
            if !value.is_empty() && !texts.contains(&value) {
                let texts = texts.iter().filter(|text| !text.is_empty()).map(|text| format!("{text:?}"));
                let message = format!("{value:?} is none of {}", texts.collect::<Vec<_>>().join(", "));
                fields.invalid(report, name, message);
                return None;
            }
            Some((json!(value), !value.is_empty() && value != "none"))
        }
        Any => fields.take(name).map(|node| (plain(&node.value), !is_empty(&node.value))),
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::List(items) => items.is_empty(),
        Value::Table(entries) => entries.is_empty(),
        Value::Bool(_) | Value::Int(_) | Value::Other(_) | Value::Text(_) => false,
    }
}

fn plain(value: &Value) -> Json {
    match value {
        Value::Null => Json::Null,
        Value::Bool(flag) => json!(flag),
        Value::Int(int) => json!(int),
        Value::Other(text) | Value::Text(text) => json!(text),
        Value::List(items) => items.iter().map(|item| plain(&item.value)).collect(),
        Value::Table(entries) => {
            Json::Object(entries.iter().map(|(name, node)| (name.clone(), plain(&node.value))).collect())
        }
    }
}
