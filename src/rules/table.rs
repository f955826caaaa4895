//! Every option of a rule and of an endpoint, as the documentation and the OpenAPI document show them.
//!
//! What becomes of an option is not written here: [`outcome`] posts a sample of it to the checks and looks.

use serde_json::{Value, json};

use crate::fields::from_json;

use super::ranges::{self, Range};
use super::{KvDefaults, check_request};

/// One option.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// Its name.
    pub name: &'static str,
    /// What it holds.
    pub kind: Kind,
    /// Its default, as people read it.
    pub default: &'static str,
    /// What it is for.
    pub says: &'static str,
    /// A value that asks for something, as JSON.
    sample: &'static str,
    /// The kind of rule in which the option means something.
    base: Base,
}

/// What an option holds.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// A whole number within a range.
    Int(i64, i64),
    /// One within another range where the engine is SGLang.
    IntOfEngine {
        /// Of other engines.
        usual: (i64, i64),
        /// Of SGLang.
        sglang: (i64, i64),
    },
    /// True or false.
    Flag,
    /// A text.
    Text,
    /// One of some texts.
    OneOf(&'static [&'static str]),
    /// A list.
    List,
    /// An object.
    Object,
}

/// A rule for an option to stand in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Base {
    /// Plain load balancing.
    Plain,
    /// Plain load balancing by the prompt's beginning.
    Hashed,
    /// A single pool of vLLM engines, routed by KV cache.
    Kv,
    /// Prefill and decode pools of vLLM engines.
    Pd,
    /// The same, with a tree of the texts that were sent.
    PdAware,
    /// Prefill and decode pools of vLLM engines, with requests that go straight to decode.
    PdBypass,
    /// Prefill and decode pools of SGLang engines.
    PdSglang,
    /// Prefill and decode pools of TensorRT-LLM engines.
    PdTrtllm,
    /// A single pool of TensorRT-LLM engines.
    Trtllm,
}

/// What becomes of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It does what it says.
    Implemented,
    /// It is accepted, shown again, and without effect, which a warning says where anybody could expect one.
    Inert,
    /// A value that asks for something is refused.
    Refused,
}

impl Status {
    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Status::Implemented => "implemented",
            Status::Inert => "accepted, without effect",
            Status::Refused => "refused",
        }
    }
}

const fn of(
    base: Base,
    name: &'static str,
    kind: Kind,
    default: &'static str,
    sample: &'static str,
    says: &'static str,
) -> Member {
    Member { name, kind, default, says, sample, base }
}

const fn plain(
    name: &'static str,
    kind: Kind,
    default: &'static str,
    sample: &'static str,
    says: &'static str,
) -> Member {
    of(Base::Plain, name, kind, default, sample, says)
}

use Base::{Hashed, Kv, Pd, PdAware, PdBypass, PdSglang, PdTrtllm, Trtllm};
use Kind::{Flag, Int, IntOfEngine, List, Object, OneOf, Text};

/// The range that the checks go by.
const fn int(range: &Range) -> Kind {
    Int(*range.start(), *range.end())
}

const PORT: Kind = int(&ranges::PORT);
const PORT_OR_NONE: Kind = int(&ranges::PORT_OR_NONE);
const U32: Kind = int(&ranges::U32);
const I32: Kind = int(&ranges::I32);
const BLOCK_TOKENS: Kind = IntOfEngine {
    usual: (*ranges::BLOCK_TOKENS.start(), *ranges::BLOCK_TOKENS.end()),
    sglang: (*ranges::BLOCK_TOKENS_SGLANG.start(), *ranges::BLOCK_TOKENS_SGLANG.end()),
};

/// Values of `probetype`.
pub(super) const PROBE_TYPES: &[&str] = &["tcp", "udp", "sctp", "http", "https", "ping", "none", ""];
/// Values of `sockMapMode`.
pub(super) const SOCK_MAP_MODES: &[&str] = &["off", "request", "response", "both", ""];
/// Values of `kvExactApiMode`.
pub(super) const API_MODES: &[&str] = &["completions", "chat", "both", ""];
/// Values of `backend_protocol`.
pub(super) const PROTOCOLS_BEHIND: &[&str] = &["http1", "http2", "both", ""];
/// Values of `api_key_auth`.
pub(super) const KEY_AUTHS: &[&str] = &["disabled", "required", "jwt", "apikey-or-jwt", ""];
/// Values of `kvLbMode`.
const BLENDS: &[&str] = &["off", "hard", "soft", "adaptive", "adaptive-soft", "ttft", ""];
/// Values of `fc_mode`.
pub(super) const FLOW_MODES: &[&str] = &["off", "observe", "enforce", "inherit", ""];

/// Members of `serviceArguments`.
pub const SERVICE: &[Member] = &[
    plain("externalIP", Text, "", "\"127.0.0.1\"", "Address that clients connect to; the host need not hold it yet"),
    plain("port", PORT, "", "18080", "Port that clients connect to"),
    plain("portMax", PORT_OR_NONE, "0", "18090", "Last port of a range"),
    plain("protocol", OneOf(&["tcp", "udp", "sctp", "icmp"]), "tcp", "\"tcp\"", "Kvlane proxies HTTP over tcp"),
    plain("mode", int(&ranges::MODE), "0; 4 in files", "4", "Kvlane does 4, fullproxy"),
    plain("sel", int(&ranges::SEL), "0", "4", "How an endpoint is chosen that no cache decides"),
    plain("name", Text, "", "\"n\"", "Name, for people and for DELETE"),
    plain("host", Text, "any", "\"a.example\"", "Host that the rule is for"),
    plain("path_prefix", Text, "any", "\"/v1\"", "Path that the rule is for"),
    plain(
        "path_match_mode",
        OneOf(&["disabled", "prefix", "exact"]),
        "disabled",
        "\"disabled\"",
        "How path_prefix is compared",
    ),
    plain("model_name", Text, "any", "\"m\"", "Model that the rule is for"),
    plain("block", U32, "0", "1", "Tells rules of one address apart"),
    plain(
        "oper",
        int(&ranges::OPER),
        "0",
        "0",
        "0 makes or replaces the rule, 1 attaches its endpoints, 2 detaches them",
    ),
    plain("id", Text, "made up", "\"an-id\"", "The rule's id in the API; it cannot be changed"),
    plain("adminStateUp", Flag, "true", "false", "False pauses the rule"),
    plain("projectId", Text, "", "\"p\"", "Shown again"),
    plain("annotations", Object, "", "{\"a\": \"b\"}", "Shown again"),
    plain("managed", Flag, "false", "true", "Shown again"),
    plain("monitor", Flag, "false", "true", "Shown again; every endpoint is probed"),
    plain("security", int(&ranges::SECURITY), "0", "1", "TLS towards clients (1), and towards engines too (2)"),
    plain("connectionLimit", U32, "0", "10", "Most connections"),
    plain("privateIP", Text, "", "\"10.0.0.1\"", "Address inside"),
    plain("bgp", Flag, "false", "true", "Announce the address"),
    plain("snat", Flag, "false", "true", "Rewrite the source address"),
    plain("egress", Flag, "false", "true", "Traffic outwards"),
    plain("proxyprotocolv2", Flag, "false", "true", "Tell engines the client's address"),
    plain("probetype", OneOf(PROBE_TYPES), "", "\"http\"", "How endpoints are probed"),
    plain("probeport", PORT_OR_NONE, "0", "80", "Where endpoints are probed"),
    plain("probereq", Text, "", "\"/x\"", "What a probe asks for"),
    plain("proberesp", Text, "", "\"x\"", "What a probe expects"),
    plain("probeTimeout", U32, "0", "5", "Seconds between probes"),
    plain("probeRetries", int(&ranges::PROBE_RETRIES), "0", "3", "Probes that must fail"),
    plain("inactiveTimeOut", I32, "0", "60", "Seconds of silence after which a connection ends"),
    plain("timeoutMemberConnect", U32, "0", "100", "Milliseconds to connect to an engine"),
    plain("timeoutMemberData", U32, "0", "100", "Milliseconds of an engine's silence"),
    plain("timeoutTcpInspect", U32, "0", "100", "Milliseconds to look at a request"),
    plain("trace_type", Text, "", "\"otel\"", "Tracing"),
    plain("backend_protocol", OneOf(PROTOCOLS_BEHIND), "http1", "\"http2\"", "HTTP version towards engines"),
    plain("sse_mode", Flag, "false", "true", "Shown again; streams are recognized"),
    plain("max_stream_duration_sec", I32, "0", "60", "Longest stream"),
    plain("backend_keepalive_interval_sec", I32, "0", "60", "Keep-alive towards engines"),
    plain("cb_enable", Flag, "false", "true", "Circuit breaker"),
    plain("session_header_name", Text, "", "\"X-Session\"", "Where a request names its session"),
    of(
        Hashed,
        "chwbl_prefix_hash_level",
        int(&ranges::HASH_LEVEL),
        "1",
        "2",
        "How much of a prompt sel 8 to 10 look at",
    ),
    of(Hashed, "chwbl_prefix_hash_flags", int(&ranges::HASH_FLAGS), "0", "1", "What else of a request they look at"),
    of(Hashed, "chwbl_mean_load_factor", int(&ranges::HASH_LOAD_FACTOR), "125", "150", "Load bound of sel 8, percent"),
    of(
        Hashed,
        "chwbl_replication",
        int(&ranges::HASH_REPLICATION),
        "100",
        "64",
        "Points per endpoint on the ring of sel 8",
    ),
    plain("chwbl_enable_cache_salt", Flag, "false", "true", "Whether salts are told apart"),
    of(Pd, "pd_disagg_mode", Flag, "false", "true", "Prefill and decode pools"),
    of(Pd, "pd_cache_aware_mode", Flag, "false", "true", "Remember which prefill endpoint saw which text"),
    of(Pd, "pd_session_ttl_sec", I32, "300", "60", "Seconds that a conversation stays with its endpoints"),
    of(Pd, "pd_session_max", int(&ranges::SESSIONS), "65536", "128", "Conversations that are remembered"),
    of(PdAware, "pd_cache_threshold", int(&ranges::PERCENT), "20", "50", "Part of a prompt that must match, percent"),
    of(
        PdAware,
        "pd_balance_abs_threshold",
        int(&ranges::BALANCE),
        "3",
        "5",
        "Difference in load beyond which a match is passed over",
    ),
    of(
        Pd,
        "pdBypass",
        OneOf(&["off", "short", "held"]),
        "off",
        "\"held\"",
        "Send what a decode engine does sooner alone straight there: short prompts, or those it holds nearly all of too",
    ),
    of(
        PdBypass,
        "pdBypassTokens",
        int(&ranges::BYPASS_TOKENS),
        "learned",
        "256",
        "Tokens that a decode engine may be left to compute",
    ),
    of(Pd, "pdNixlPush", Flag, "false", "true", "vLLM's prefill engines bring their blocks"),
    of(PdTrtllm, "pdAuthKeyFile", Text, "", "\"/dev/null/none\"", "File with the key that signs generation legs"),
    of(
        PdSglang,
        "pdBootstrapPort",
        PORT_OR_NONE,
        "8998",
        "8999",
        "Port at which SGLang's prefill engines meet decode engines",
    ),
    of(Kv, "kvExactMode", int(&ranges::EXACT_MODE), "0", "3", "Route by KV cache: 1 with P/D pools, 3 with one pool"),
    of(Kv, "kvBlockSize", BLOCK_TOKENS, "16", "32", "Tokens per block"),
    of(
        Kv,
        "kvHashAlgo",
        OneOf(&["sha256_cbor", "xxhash_cbor", "sha256_sglang", "blockhash_trtllm", ""]),
        "the engine's",
        "\"sha256_cbor\"",
        "How the engines hash blocks",
    ),
    of(Kv, "kvZmqPort", PORT, "5557", "5560", "The engines' event port; rank r is at this + r"),
    of(Kv, "kvWarmupSec", I32, "30", "10", "A block counts from the moment it is announced"),
    of(
        Kv,
        "kvEngineType",
        OneOf(&["vllm", "sglang", "trtllm", "llamacpp", ""]),
        "vllm",
        "\"vllm\"",
        "Kind of the engines",
    ),
    of(Kv, "kvDpRankCount", int(&ranges::RANKS), "1", "2", "Data-parallel ranks per endpoint"),
    of(Kv, "kvExactApiMode", OneOf(API_MODES), "both", "\"chat\"", "Both are routed by KV cache"),
    of(Kv, "kvModelProfile", Text, "", "\"p\"", "Named profile of a model"),
    of(Kv, "kvNoneHashSeed", Text, "unset", "\"0\"", "The engines' PYTHONHASHSEED"),
    of(Kv, "kvChatTemplate", Text, "the model's", "\"/dev/null/none\"", "File with the engines' chat template"),
    of(Kv, "kvChatTemplateKwargs", Object, "", "{\"x\": true}", "Template arguments the engines were started with"),
    of(Kv, "kvAddBos", Flag, "the model's", "true", "Whether engines put a BOS token before texts"),
    of(
        Kv,
        "kvEngineRender",
        OneOf(&["off", "render", "tokenize"]),
        "off",
        "\"tokenize\"",
        "How engines are asked for the ids of chats that they render in code",
    ),
    of(
        Kv,
        "kvSendPromptIds",
        Flag,
        "false",
        "true",
        "Hand a prompt's ids on to the engines, so that they need not tokenize it",
    ),
    of(Kv, "kvAdapters", Object, "", "{\"a\": {\"base\": \"m\"}}", "Adapters that the engines serve"),
    of(Kv, "kvMinMatchTokens", int(&ranges::MIN_MATCH), "16", "32", "Shorter prompts are not scored"),
    of(Kv, "kvLbMode", OneOf(BLENDS), "hard", "\"soft\"", "How load is blended in"),
    plain("routeHeader", Flag, "false", "true", "Answers name the endpoint and why it was chosen"),
    plain("scrapeMetrics", Flag, "false", "true", "Read the engines' own metrics"),
    of(Pd, "pd_trie_nodes_max", int(&ranges::TRIE_NODES), "32768", "1024", "Places of the tree of texts"),
    of(Kv, "kvThroughput", int(&ranges::THROUGHPUT), "200", "100", "Weight of an engine's speed in mode ttft, percent"),
    of(
        Kv,
        "kvClaimMs",
        int(&ranges::CLAIM_MS),
        "2000",
        "500",
        "How long what a request will have stored counts ahead; 0 = not at all",
    ),
    of(Kv, "kvLoadPenalty", int(&ranges::LOAD_PENALTY), "32", "64", "Weight of load in soft modes"),
    of(Kv, "kvCapSumMilli", int(&ranges::CAPACITY_SUM), "15284310", "10000000", "Reference capacity of adaptive modes"),
    of(
        Kv,
        "kvZeroHitN",
        int(&ranges::ZERO_HITS),
        "50",
        "100",
        "Repeated prompts without a hit that are worth a warning",
    ),
    of(Kv, "kvSpillRelief", Flag, "true", "false", "An overloaded winner gives way"),
    of(Kv, "kvColdstartSeedN", int(&ranges::SEED_EVERY), "16", "8", "Every how many hits a cold endpoint is seeded"),
    of(
        Kv,
        "kvColdstartMinBlocks",
        int(&ranges::SEED_MIN_BLOCKS),
        "16",
        "8",
        "An endpoint that holds fewer blocks is cold",
    ),
    of(
        Kv,
        "kvMeanLoadFactor",
        int(&ranges::MEAN_LOAD_FACTOR),
        "175",
        "150",
        "Load bound of a winner, percent of the mean",
    ),
    of(Kv, "kvReplayPortOffset", PORT_OR_NONE, "1000", "0", "Replay port, counted from the event port"),
    of(Kv, "kvMediumWeights", Object, "0", "{\"cpu\": 50}", "Worth of blocks outside of device memory, percent"),
    of(Trtllm, "kvTrtllmPollMinMs", int(&ranges::POLL_MS), "5", "6", "Shortest pause between two drains"),
    of(Trtllm, "kvTrtllmPollMaxMs", int(&ranges::POLL_MS), "20", "30", "Longest pause between two drains"),
    plain(
        "engineTokenFile",
        Text,
        "",
        "\"/dev/null/none\"",
        "File with what the gateway shows engines on its own calls",
    ),
    plain("mtls_frontend", Object, "", "{\"client_cert_mode\": \"required\"}", "Clients' certificates"),
    plain("mtls_backend", Object, "", "{\"verify_server_cert\": true}", "Engines' certificates"),
    plain("alpn_protocols", List, "", "[\"h2\"]", "TLS"),
    plain("tls_ciphers", Text, "", "\"x\"", "TLS"),
    plain("tls_versions", List, "", "[\"1.3\"]", "TLS"),
    plain("hsts_max_age", U32, "0", "60", "TLS"),
    plain("hsts_include_subdomains", Flag, "false", "true", "TLS"),
    plain("hsts_preload", Flag, "false", "true", "TLS"),
    plain("backend_ca_cert_id", Text, "", "\"x\"", "TLS"),
    plain("backend_client_cert_id", Text, "", "\"x\"", "TLS"),
    plain("vip_qos_policy_id", Text, "", "\"x\"", "Quality of service of the address"),
    plain("api_key_auth", OneOf(KEY_AUTHS), "disabled", "\"required\"", "Clients' keys"),
    plain("jwt_auth_profile", Text, "", "\"x\"", "Clients' tokens"),
    plain("sockMapMode", OneOf(SOCK_MAP_MODES), "off", "\"both\"", "Splicing in the kernel"),
    plain("fc_mode", OneOf(FLOW_MODES), "off", "\"enforce\"", "Admission control"),
    plain("fc_max_outstanding", U32, "0", "1", "Admission control"),
    plain("fc_ep_max_inflight", U32, "0", "1", "Admission control"),
    plain("fc_prefill_max_inflight", U32, "0", "1", "Admission control"),
    plain("fc_decode_max_inflight", U32, "0", "1", "Admission control"),
    plain("fc_max_queue_depth", U32, "0", "1", "Admission control"),
    plain("fc_max_queue_wait_ms", U32, "0", "1", "Admission control"),
    plain("fc_adaptive", Flag, "false", "true", "Admission control"),
    plain("fc_ttft_target_ms", U32, "0", "1", "Admission control"),
    plain("fc_telemetry_stale_ms", U32, "0", "1", "Admission control"),
    plain("fc_warmup_ms", U32, "0", "1", "Admission control"),
    plain("fc_tenant_max_share_pct", U32, "0", "1", "Admission control"),
    plain("fc_expose_headers", Flag, "false", "true", "Admission control"),
];

/// Members of an element of `endpoints`.
pub const ENDPOINT: &[Member] = &[
    plain("endpointIP", Text, "", "\"10.0.0.9\"", "The engine's address, or its DNS name"),
    plain("targetPort", PORT, "", "8000", "Port that the engine listens at"),
    plain("weight", int(&ranges::WEIGHT), "1", "2", "Share of what no cache decides; 0 drains"),
    plain("backup", Flag, "false", "true", "Used only when no other endpoint is up"),
    of(Pd, "ep_role", int(&ranges::ROLE), "0", "1", "1 prefill, 2 decode, in P/D pools"),
    of(Pd, "nixl_port", PORT_OR_NONE, "0", "5600", "Port that is named to decode engines"),
    of(Pd, "nixl_engine_id", Text, "", "\"e\"", "Name of a prefill engine that pushes its blocks"),
    of(Kv, "kvZmqPort", PORT, "the rule's", "5570", "The engine's event port"),
    of(Kv, "kvReplayPort", PORT, "by kvReplayPortOffset", "6570", "The engine's replay port"),
    of(Kv, "kvZmqBind", Text, "", "\"tcp://127.0.0.1:6600\"", "Where the gateway listens, for engines that connect"),
    plain("subnetId", Text, "", "\"x\"", "The subnet"),
    plain("monitorAddress", Text, "", "\"10.0.0.9\"", "Where it is probed"),
    plain("httpMethod", Text, "", "\"GET\"", "How it is probed"),
    plain("urlPath", Text, "", "\"/x\"", "How it is probed"),
    plain("expectedCodes", Text, "", "\"200\"", "How it is probed"),
    plain("httpVersion", Text, "", "\"1.1\"", "How it is probed"),
    plain("domainName", Text, "", "\"x\"", "How it is probed"),
    plain("state", Text, "", "\"active\"", "Read only: active or inactive"),
    plain("counter", Text, "", "\"0:0\"", "Read only"),
];

/// What becomes of an option, and what the checks say of it.
#[must_use]
pub fn outcome(member: &Member, of_endpoint: bool) -> (Status, String) {
    // Read only, or read where the request is taken in.
    match member.name {
        "state" | "counter" => return (Status::Inert, String::new()),
        "id" => return (Status::Implemented, String::new()),
        _ => {}
    }
    let body = sample_body(member, of_endpoint);
    let node = from_json(body.to_string().as_bytes()).expect("samples are written above");
    let about = |key: &str| key.rsplit('.').next().is_some_and(|last| last == member.name);
    let checked = check_request(&node, &KvDefaults::default());
    // Samples of files name none: that they are looked for shows that the option is there.
    let file_missing = |message: &str| message.contains("/dev/null/none");
    match &checked {
        Err(problems) => match problems.iter().find(|problem| about(&problem.key)) {
            Some(problem) if !file_missing(&problem.message) => (Status::Refused, problem.message.clone()),
            _ => (Status::Implemented, String::new()),
        },
        Ok((rule, warnings)) => {
            let warning = warnings.iter().find(|warning| about(&warning.key) && says_no_effect(&warning.message));
            let inert = !of_endpoint && rule.inert.contains_key(member.name);
            match warning {
                Some(warning) => (Status::Inert, warning.message.clone()),
                None if inert => (Status::Inert, String::new()),
                None => (Status::Implemented, String::new()),
            }
        }
    }
}

fn says_no_effect(message: &str) -> bool {
    message.contains("has no effect") && !message.contains("while path_match_mode") || message == UNKNOWN
}

/// What is said of a name that no check asks for.
const UNKNOWN: &str = "unknown member, ignored";

fn sample_body(member: &Member, of_endpoint: bool) -> Value {
    let mut service = json!({"externalIP": "127.0.0.1", "port": 18_080, "mode": 4});
    let engine = |name: &str| json!({"kvExactMode": 3, "kvEngineType": name});
    let more = match member.base {
        Base::Plain => json!({}),
        Hashed => json!({"sel": 8}),
        Kv => engine("vllm"),
        Trtllm => engine("trtllm"),
        Pd => json!({"pd_disagg_mode": true, "kvExactMode": 1}),
        PdAware => json!({"pd_disagg_mode": true, "kvExactMode": 1, "pd_cache_aware_mode": true}),
        PdBypass => json!({"pd_disagg_mode": true, "kvExactMode": 1, "pdBypass": "short"}),
        PdSglang => json!({"pd_disagg_mode": true, "kvExactMode": 1, "kvEngineType": "sglang"}),
        PdTrtllm => json!({"pd_disagg_mode": true, "kvExactMode": 1, "kvEngineType": "trtllm"}),
    };
    for (name, value) in more.as_object().into_iter().flatten() {
        service[name] = value.clone();
    }
    let pd = matches!(member.base, Pd | PdAware | PdBypass | PdSglang | PdTrtllm);
    let mut endpoints: Vec<Value> =
        (1..=2).map(|number| json!({"endpointIP": format!("10.0.0.{number}"), "targetPort": 8000})).collect();
    if pd {
        endpoints[0]["ep_role"] = json!(1);
        endpoints[1]["ep_role"] = json!(2);
    }
    let sample: Value = serde_json::from_str(member.sample).expect("samples are JSON");
    let place = if of_endpoint { &mut endpoints[0] } else { &mut service };
    place[member.name] = sample;
    json!({"serviceArguments": service, "endpoints": endpoints})
}

/// The page of the documentation.
#[must_use]
pub fn page() -> String {
    let mut text = String::from(
        "# Options of a rule\n\nMade by the code (`KVLANE_WRITE_DOCS=1 cargo test --lib the_page_of_options`); do not edit.\n\
         What becomes of an option was found by posting it. Names match in any case over the API. Members that are not\n\
         here are passed over and named in the answer's `warnings`.\n",
    );
    for (title, members, of_endpoint) in [("serviceArguments", SERVICE, false), ("endpoints[]", ENDPOINT, true)] {
        text.push_str(&format!(
            "\n## `{title}`\n\n| option | holds | default | is for | state |\n|---|---|---|---|---|\n"
        ));
        for member in members {
            let (status, why) = outcome(member, of_endpoint);
            let why = if why.is_empty() { String::new() } else { format!(": {}", why.replace('|', "\\|")) };
            let Member { name, default, says, .. } = member;
            text.push_str(&format!(
                "| `{name}` | {} | {default} | {says} | {}{why} |\n",
                holds(member.kind),
                status.name()
            ));
        }
    }
    text
}

fn holds(kind: Kind) -> String {
    match kind {
        Int(min, max) => format!("{min} to {max}"),
        IntOfEngine { usual, sglang } => {
            format!("{} to {}; with sglang {} to {}", usual.0, usual.1, sglang.0, sglang.1)
        }
        Flag => "true or false".to_owned(),
        Text => "text".to_owned(),
        OneOf(values) => {
            values.iter().filter(|v| !v.is_empty()).map(|v| format!("`{v}`")).collect::<Vec<_>>().join(", ")
        }
        List => "list".to_owned(),
        Object => "object".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_options_is_what_the_code_does() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/options.md");
        let page = page();
        if std::env::var_os("KVLANE_WRITE_DOCS").is_some() {
            std::fs::write(&path, &page).expect("docs/ is writable");
        }
        let there = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(there == page, "docs/options.md is old: run this test with KVLANE_WRITE_DOCS=1");
    }

    /// What the checks say of the option with a value, and whether they let it pass.
    fn posted(member: &Member, of_endpoint: bool, value: &Value, engine: Option<&str>) -> Result<(), Vec<String>> {
        let mut body = sample_body(member, of_endpoint);
        if let Some(engine) = engine {
            body["serviceArguments"]["kvEngineType"] = json!(engine);
        }
        let place = if of_endpoint { &mut body["endpoints"][0] } else { &mut body["serviceArguments"] };
        place[member.name] = value.clone();
        let node = from_json(body.to_string().as_bytes()).expect("JSON");
        let about = |key: &str| key.rsplit('.').next().is_some_and(|last| last == member.name);
        let checked = check_request(&node, &KvDefaults::default());
        checked.map(|_| ()).map_err(|problems| {
            let about = problems.iter().filter(|problem| about(&problem.key));
            about.map(|problem| problem.message.clone()).collect()
        })
    }

    #[test]
    fn every_range_is_the_one_that_is_enforced() {
        // Within the range and refused all the same, for a reason of their own.
        let refused = |name: &str, value: i64| match name {
            "mode" => value != 4,
            "portMax" => value != 0,
            _ => false,
        };
        let mut ranged = 0;
        for (members, of_endpoint) in [(SERVICE, false), (ENDPOINT, true)] {
            for member in members {
                let ranges = match member.kind {
                    Int(min, max) => vec![(min, max, None)],
                    IntOfEngine { usual, sglang } => {
                        vec![(usual.0, usual.1, Some("vllm")), (sglang.0, sglang.1, Some("sglang"))]
                    }
                    _ => continue,
                };
                let is_refused = outcome(member, of_endpoint).0 == Status::Refused;
                for (min, max, engine) in ranges {
                    ranged += 1;
                    let of = |value: i64| posted(member, of_endpoint, &json!(value), engine);
                    for value in [min, max] {
                        let said = of(value).err().unwrap_or_default();
                        let allowed = said.is_empty() || is_refused || refused(member.name, value);
                        assert!(allowed, "{} {value}: {said:?}", member.name);
                        assert!(!said.iter().any(|said| said.contains("within")), "{} {value}: {said:?}", member.name);
                    }
                    for value in [min - 1, max + 1] {
                        let said = of(value).err().unwrap_or_default();
                        assert!(said.iter().any(|said| said.contains("within")), "{} {value}: {said:?}", member.name);
                    }
                }
            }
        }
        assert!(ranged > 50, "{ranged}");
    }

    #[test]
    fn every_list_of_texts_is_the_one_that_is_enforced() {
        for (members, of_endpoint) in [(SERVICE, false), (ENDPOINT, true)] {
            for member in members {
                let OneOf(texts) = member.kind else { continue };
                let is_refused = outcome(member, of_endpoint).0 == Status::Refused;
                let said = |text: &str| posted(member, of_endpoint, &json!(text), None).err().unwrap_or_default();
                for text in texts {
                    let said = said(text);
                    assert!(!said.iter().any(|said| said.contains("none of")), "{} {text:?}: {said:?}", member.name);
                    let of_another_engine = matches!(member.name, "kvHashAlgo" | "kvEngineType");
                    let of_another_kind = matches!(member.name, "protocol" | "path_match_mode");
                    let allowed = said.is_empty() || is_refused || of_another_engine || of_another_kind;
                    assert!(allowed, "{} {text:?}: {said:?}", member.name);
                }
                assert!(!said("neither").is_empty(), "{}", member.name);
            }
        }
        let blends: Vec<_> = shards::service::Blend::ALL.iter().map(|blend| blend.name()).chain([""]).collect();
        assert_eq!(BLENDS, blends);
    }

    #[test]
    fn every_outcome_is_found_by_posting() {
        let find = |name: &str| SERVICE.iter().find(|member| member.name == name).expect("in the table");
        assert_eq!(outcome(find("kvBlockSize"), false).0, Status::Implemented);
        assert_eq!(outcome(find("kvChatTemplate"), false).0, Status::Implemented);
        assert_eq!(outcome(find("snat"), false).0, Status::Inert);
        assert_eq!(outcome(find("projectId"), false).0, Status::Inert);
        assert_eq!(outcome(find("api_key_auth"), false).0, Status::Refused);
        let unknown = plain("colour", Text, "", "\"blue\"", "");
        assert_eq!(outcome(&unknown, false), (Status::Inert, UNKNOWN.to_owned()));
    }

    #[test]
    fn every_option_that_is_shown_is_in_the_table() {
        // Read only, or beside an option that says it.
        let besides = [&["service_id"], &super::super::stated::MARKS[..]].concat();
        for name in
            ["name", "pd_disagg_mode", "pdBootstrapPort", "pdNixlPush", "pdBypass", "kvBlockSize", "kvTrtllmPollMinMs"]
        {
            let member = SERVICE.iter().find(|member| member.name == name).expect("in the table");
            let node = from_json(sample_body(member, false).to_string().as_bytes()).expect("JSON");
            let (rule, _) = check_request(&node, &KvDefaults::default()).expect("a right rule");
            let shown = super::super::readback(&rule, shards::ids::ServiceId(0), &[]);
            for (members, shown) in [(SERVICE, &shown["serviceArguments"]), (ENDPOINT, &shown["endpoints"][0])] {
                for name in shown.as_object().expect("an object").keys() {
                    let known = members.iter().any(|member| member.name == name) || besides.contains(&name.as_str());
                    assert!(known, "{name}");
                }
            }
        }
    }

    #[test]
    fn every_option_that_the_checks_ask_for_is_in_the_table() {
        let bases = [Base::Plain, Hashed, Kv, Trtllm, Pd, PdAware, PdBypass, PdSglang, PdTrtllm];
        let tables = ["serviceArguments", "endpoints", "secondaryIPs", "secondaryVIPs", "allowedSources"];
        let read_only = ["service_id", "source", "warnings", "ep_idx", "offload_state", "hw_pkts", "hw_bytes"];
        let besides = [&tables[..], &read_only, &super::super::stated::MARKS].concat();
        for base in bases {
            let member = of(base, "name", Text, "", "\"n\"", "");
            let node = from_json(sample_body(&member, false).to_string().as_bytes()).expect("JSON");
            let (_, asked) = crate::fields::asked(|| check_request(&node, &KvDefaults::default()));
            assert!(asked.contains("kvBlockSize") && asked.contains("endpointIP"), "{asked:?}");
            for name in asked {
                let known = SERVICE.iter().chain(ENDPOINT).any(|member| member.name == name);
                assert!(known || besides.contains(&name.as_str()), "{base:?}: {name}");
            }
        }
    }

    #[test]
    fn every_option_of_the_table_is_known_to_the_checks() {
        for (members, of_endpoint) in [(SERVICE, false), (ENDPOINT, true)] {
            for member in members {
                let (_, why) = outcome(member, of_endpoint);
                assert_ne!(why, UNKNOWN, "{}", member.name);
            }
        }
    }
}
