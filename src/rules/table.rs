//! Every option of a rule and of an endpoint, as the documentation and the OpenAPI document show them.
//!
//! What becomes of an option is not written here: [`outcome`] posts a sample of it to the checks and looks.

use serde_json::{Value, json};

use crate::fields::from_json;

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
use Kind::{Flag, Int, List, Object, OneOf, Text};

const PORT: Kind = Int(0, 65_535);
const U32: Kind = Int(0, u32::MAX as i64);
const I32: Kind = Int(0, i32::MAX as i64);

/// Members of `serviceArguments`.
pub const SERVICE: &[Member] = &[
    plain("externalIP", Text, "", "\"127.0.0.1\"", "Address that clients connect to; the host need not hold it yet"),
    plain("port", Int(1, 65_535), "", "18080", "Port that clients connect to"),
    plain("portMax", PORT, "0", "18090", "Last port of a range"),
    plain("protocol", OneOf(&["tcp", "udp", "sctp", "icmp"]), "tcp", "\"tcp\"", "Kvlane proxies HTTP over tcp"),
    plain("mode", Int(0, 5), "0; 4 in files", "4", "Kvlane does 4, fullproxy"),
    plain("sel", Int(0, 10), "0", "4", "How an endpoint is chosen that no cache decides"),
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
    plain("oper", Int(0, 2), "0", "0", "0 makes or replaces the rule, 1 attaches its endpoints, 2 detaches them"),
    plain("id", Text, "made up", "\"an-id\"", "The rule's id in the API; it cannot be changed"),
    plain("adminStateUp", Flag, "true", "false", "False pauses the rule"),
    plain("projectId", Text, "", "\"p\"", "Shown again"),
    plain("annotations", Object, "", "{\"a\": \"b\"}", "Shown again"),
    plain("managed", Flag, "false", "true", "Shown again"),
    plain("monitor", Flag, "false", "true", "Shown again; every endpoint is probed"),
    plain("security", Int(0, 2), "0", "1", "TLS towards clients (1), and towards engines too (2)"),
    plain("connectionLimit", U32, "0", "10", "Most connections"),
    plain("privateIP", Text, "", "\"10.0.0.1\"", "Address inside"),
    plain("bgp", Flag, "false", "true", "Announce the address"),
    plain("snat", Flag, "false", "true", "Rewrite the source address"),
    plain("egress", Flag, "false", "true", "Traffic outwards"),
    plain("proxyprotocolv2", Flag, "false", "true", "Tell engines the client's address"),
    plain(
        "probetype",
        OneOf(&["tcp", "udp", "sctp", "http", "https", "ping", "none", ""]),
        "",
        "\"http\"",
        "How endpoints are probed",
    ),
    plain("probeport", PORT, "0", "80", "Where endpoints are probed"),
    plain("probereq", Text, "", "\"/x\"", "What a probe asks for"),
    plain("proberesp", Text, "", "\"x\"", "What a probe expects"),
    plain("probeTimeout", U32, "0", "5", "Seconds between probes"),
    plain("probeRetries", Int(0, 100), "0", "3", "Probes that must fail"),
    plain("inactiveTimeOut", I32, "0", "60", "Seconds of silence after which a connection ends"),
    plain("timeoutMemberConnect", U32, "0", "100", "Milliseconds to connect to an engine"),
    plain("timeoutMemberData", U32, "0", "100", "Milliseconds of an engine's silence"),
    plain("timeoutTcpInspect", U32, "0", "100", "Milliseconds to look at a request"),
    plain("trace_type", Text, "", "\"otel\"", "Tracing"),
    plain(
        "backend_protocol",
        OneOf(&["http1", "http2", "both", ""]),
        "http1",
        "\"http2\"",
        "HTTP version towards engines",
    ),
    plain("sse_mode", Flag, "false", "true", "Shown again; streams are recognized"),
    plain("max_stream_duration_sec", I32, "0", "60", "Longest stream"),
    plain("backend_keepalive_interval_sec", I32, "0", "60", "Keep-alive towards engines"),
    plain("cb_enable", Flag, "false", "true", "Circuit breaker"),
    plain("session_header_name", Text, "", "\"X-Session\"", "Where a request names its session"),
    of(Hashed, "chwbl_prefix_hash_level", Int(1, 3), "1", "2", "How much of a prompt sel 8 to 10 look at"),
    of(Hashed, "chwbl_prefix_hash_flags", Int(0, 255), "0", "1", "What else of a request they look at"),
    of(Hashed, "chwbl_mean_load_factor", Int(100, 300), "125", "150", "Load bound of sel 8, percent"),
    of(Hashed, "chwbl_replication", Int(1, 1024), "100", "64", "Points per endpoint on the ring of sel 8"),
    plain("chwbl_enable_cache_salt", Flag, "false", "true", "Whether salts are told apart"),
    of(Pd, "pd_disagg_mode", Flag, "false", "true", "Prefill and decode pools"),
    of(Pd, "pd_cache_aware_mode", Flag, "false", "true", "Remember which prefill endpoint saw which text"),
    of(Pd, "pd_session_ttl_sec", I32, "300", "60", "Seconds that a conversation stays with its endpoints"),
    of(Pd, "pd_session_max", Int(1, 1_048_576), "65536", "128", "Conversations that are remembered"),
    of(PdAware, "pd_cache_threshold", Int(0, 100), "20", "50", "Part of a prompt that must match, percent"),
    of(
        PdAware,
        "pd_balance_abs_threshold",
        Int(0, 255),
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
        Int(0, 1_048_576),
        "learned",
        "256",
        "Tokens that a decode engine may be left to compute",
    ),
    of(Pd, "pdNixlPush", Flag, "false", "true", "vLLM's prefill engines bring their blocks"),
    of(PdTrtllm, "pdAuthKeyFile", Text, "", "\"/dev/null/none\"", "File with the key that signs generation legs"),
    of(PdSglang, "pdBootstrapPort", PORT, "8998", "8999", "Port at which SGLang's prefill engines meet decode engines"),
    of(Kv, "kvExactMode", Int(0, 3), "0", "3", "Route by KV cache: 1 with P/D pools, 3 with one pool"),
    of(Kv, "kvBlockSize", Int(1, 65_536), "16", "32", "Tokens per block"),
    of(
        Kv,
        "kvHashAlgo",
        OneOf(&["sha256_cbor", "xxhash_cbor", "sha256_sglang", "blockhash_trtllm", ""]),
        "the engine's",
        "\"sha256_cbor\"",
        "How the engines hash blocks",
    ),
    of(Kv, "kvZmqPort", Int(1, 65_535), "5557", "5560", "The engines' event port; rank r is at this + r"),
    of(Kv, "kvWarmupSec", I32, "30", "10", "A block counts from the moment it is announced"),
    of(
        Kv,
        "kvEngineType",
        OneOf(&["vllm", "sglang", "trtllm", "llamacpp", ""]),
        "vllm",
        "\"vllm\"",
        "Kind of the engines",
    ),
    of(Kv, "kvDpRankCount", Int(0, 8), "1", "2", "Data-parallel ranks per endpoint"),
    of(
        Kv,
        "kvExactApiMode",
        OneOf(&["completions", "chat", "both", ""]),
        "both",
        "\"chat\"",
        "Both are routed by KV cache",
    ),
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
    of(Kv, "kvSendPromptIds", Flag, "false", "true", "Chats are sent on with the ids of their prompts"),
    of(Kv, "kvAdapters", Object, "", "{\"a\": {\"base\": \"m\"}}", "Adapters that the engines serve"),
    of(Kv, "kvMinMatchTokens", Int(0, 4096), "16", "32", "Shorter prompts are not scored"),
    of(
        Kv,
        "kvLbMode",
        Text,
        "hard",
        "\"soft\"",
        "How load is blended in: off, hard, soft, adaptive, adaptive-soft, ttft",
    ),
    plain("routeHeader", Flag, "false", "true", "Answers name the endpoint and why it was chosen"),
    plain("scrapeMetrics", Flag, "false", "true", "Read the engines' own metrics"),
    of(Pd, "pd_trie_nodes_max", Int(64, 65_536), "32768", "1024", "Places of the tree of texts"),
    of(Kv, "kvThroughput", Int(0, 1000), "200", "100", "Weight of an engine's speed in mode ttft, percent"),
    of(Kv, "kvClaimMs", U32, "2000", "500", "How long what a request will have stored counts ahead; 0 = not at all"),
    of(Kv, "kvLoadPenalty", Int(1, 100_000), "32", "64", "Weight of load in soft modes"),
    of(Kv, "kvCapSumMilli", U32, "15284310", "10000000", "Reference capacity of adaptive modes"),
    of(Kv, "kvZeroHitN", Int(1, 1_000_000), "50", "100", "Repeated prompts without a hit that are worth a warning"),
    of(Kv, "kvSpillRelief", Flag, "true", "false", "An overloaded winner gives way"),
    of(Kv, "kvColdstartSeedN", Int(0, 1_000_000), "16", "8", "Every how many hits a cold endpoint is seeded"),
    of(Kv, "kvColdstartMinBlocks", Int(0, 100_000_000), "16", "8", "An endpoint that holds fewer blocks is cold"),
    of(Kv, "kvMeanLoadFactor", Int(100, 1000), "175", "150", "Load bound of a winner, percent of the mean"),
    of(Kv, "kvReplayPortOffset", PORT, "1000", "0", "Replay port, counted from the event port"),
    of(Kv, "kvMediumWeights", Object, "0", "{\"cpu\": 50}", "Worth of blocks outside of device memory, percent"),
    of(Trtllm, "kvTrtllmPollMinMs", Int(1, 10_000), "5", "6", "Shortest pause between two drains"),
    of(Trtllm, "kvTrtllmPollMaxMs", Int(1, 10_000), "20", "30", "Longest pause between two drains"),
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
    plain(
        "api_key_auth",
        OneOf(&["disabled", "required", "jwt", "apikey-or-jwt", ""]),
        "disabled",
        "\"required\"",
        "Clients' keys",
    ),
    plain("jwt_auth_profile", Text, "", "\"x\"", "Clients' tokens"),
    plain(
        "sockMapMode",
        OneOf(&["off", "request", "response", "both", ""]),
        "off",
        "\"both\"",
        "Splicing in the kernel",
    ),
    plain("fc_mode", OneOf(&["off", "observe", "enforce", "inherit", ""]), "off", "\"enforce\"", "Admission control"),
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
    plain("targetPort", Int(1, 65_535), "", "8000", "Port that the engine listens at"),
    plain("weight", Int(0, 65_535), "1", "2", "Share of what no cache decides; 0 drains"),
    plain("backup", Flag, "false", "true", "Used only when no other endpoint is up"),
    of(Pd, "ep_role", Int(0, 2), "0", "1", "1 prefill, 2 decode, in P/D pools"),
    of(Pd, "nixl_port", PORT, "0", "5600", "Port that is named to decode engines"),
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
        let read_only = ["service_id", "source", "warnings", "ep_idx"];
        let besides = [&tables, &read_only, &super::super::stated::MARKS[..]].concat();
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
