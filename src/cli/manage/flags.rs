//! The flags of `create lb` that stand for one option each: one table for the command line and for the body.

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use serde_json::{Map, Value, json};

/// What a flag takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Takes {
    /// A whole number.
    Number,
    /// Nothing, or `=true` or `=false`.
    Switch,
    /// A text.
    Text,
}

/// One flag.
pub(super) struct Flag {
    /// Its name.
    name: &'static str,
    /// The option it stands for.
    option: &'static str,
    takes: Takes,
    help: &'static str,
}

const fn flag(name: &'static str, option: &'static str, takes: Takes, help: &'static str) -> Flag {
    Flag { name, option, takes, help }
}

use Takes::{Number, Switch, Text};

/// Flags that any rule may have.
pub(super) const ANY: &[Flag] = &[
    flag("bgp", "BGP", Switch, "Announce the address"),
    flag("monitor", "Monitor", Switch, "Watch the endpoints"),
    flag("inatimeout", "inactiveTimeOut", Number, "Seconds of silence after which a connection ends"),
    flag("mark", "block", Number, "Tells rules of one address apart"),
    flag("name", "name", Text, "Name of the rule"),
    flag("host", "host", Text, "Host that the rule is for"),
    flag("ppv2en", "proxyprotocolv2", Switch, "Tell engines the client's address"),
    flag("egress", "egress", Switch, "Traffic outwards"),
    flag("probetype", "probetype", Text, "How endpoints are probed"),
    flag("probeport", "probeport", Number, "Where endpoints are probed"),
    flag("probereq", "probereq", Text, "What a probe asks for"),
    flag("proberesp", "proberesp", Text, "What a probe expects"),
    flag("probetimeout", "probeTimeout", Number, "Seconds between probes"),
    flag("proberetries", "probeRetries", Number, "Probes that must fail"),
];

/// Flags that need `--mode=fullproxy`.
pub(super) const FULLPROXY: &[Flag] = &[
    flag("model-name", "model_name", Text, "Model that the rule is for"),
    flag("path-prefix", "path_prefix", Text, "Path that the rule is for"),
    flag("path-match-mode", "path_match_mode", Text, "disabled, prefix or exact"),
    flag("session-header-name", "session_header_name", Text, "Where a request names its session"),
    flag("trace-type", "trace_type", Text, "Tracing"),
    flag("backend-protocol", "backend_protocol", Text, "http1, http2 or both"),
    flag("sse-mode", "sse_mode", Switch, "Answers are streams"),
    flag("api-key-auth", "api_key_auth", Text, "Clients' keys"),
    flag("max-stream-duration", "max_stream_duration_sec", Number, "Longest stream, seconds"),
    flag("backend-keepalive-interval", "backend_keepalive_interval_sec", Number, "Seconds"),
    flag("cb-enable", "cb_enable", Switch, "Circuit breaker"),
    flag("chwbl-hash-level", "chwbl_prefix_hash_level", Number, "How much of a prompt is looked at"),
    flag("chwbl-hash-flags", "chwbl_prefix_hash_flags", Number, "What else of a request is looked at"),
    flag("chwbl-load-factor", "chwbl_mean_load_factor", Number, "Load bound, percent"),
    flag("chwbl-replication", "chwbl_replication", Number, "Points per endpoint on the ring"),
    flag("chwbl-cache-salt", "chwbl_enable_cache_salt", Switch, "Tell salts apart"),
    flag("hsts-max-age", "hsts_max_age", Number, "TLS"),
    flag("hsts-include-subdomains", "hsts_include_subdomains", Switch, "TLS"),
    flag("hsts-preload", "hsts_preload", Switch, "TLS"),
    flag("pd-disagg", "pd_disagg_mode", Switch, "Prefill and decode pools"),
    flag("pd-cache-aware", "pd_cache_aware_mode", Switch, "Remember which prefill endpoint saw which text"),
    flag("pd-session-ttl", "pd_session_ttl_sec", Number, "Seconds that a conversation stays"),
    flag("pd-cache-threshold", "pd_cache_threshold", Number, "Part of a prompt that must match, percent"),
    flag("pd-balance-abs-threshold", "pd_balance_abs_threshold", Number, "Difference in load"),
    flag("pd-bootstrap-port", "pdBootstrapPort", Number, "Where SGLang's engines meet"),
    flag("pd-bypass", "pdBypass", Text, "off, short or held: what goes straight to a decode engine"),
    flag("pd-bypass-tokens", "pdBypassTokens", Number, "Tokens that a decode engine may be left to compute"),
    flag("pd-nixl-push", "pdNixlPush", Switch, "Prefill engines bring their blocks"),
    flag("pd-auth-key-file", "pdAuthKeyFile", Text, "File with the key that signs generation legs"),
    flag("kv-exact-mode", "kvExactMode", Number, "Route by KV cache: 1 with P/D pools, 3 with one pool"),
    flag("kv-block-size", "kvBlockSize", Number, "Tokens per block"),
    flag("kv-hash-algo", "kvHashAlgo", Text, "How the engines hash blocks"),
    flag("kv-zmq-port", "kvZmqPort", Number, "The engines' event port"),
    flag("kv-warmup", "kvWarmupSec", Number, "Accepted and without effect"),
    flag("kv-engine-type", "kvEngineType", Text, "vllm, sglang, trtllm or llamacpp"),
    flag("kv-dp-ranks", "kvDpRankCount", Number, "Data-parallel ranks per endpoint"),
    flag("fc-mode", "fc_mode", Text, "Admission control"),
    flag("fc-max-outstanding", "fc_max_outstanding", Number, "Admission control"),
    flag("fc-ep-max-inflight", "fc_ep_max_inflight", Number, "Admission control"),
    flag("fc-max-queue-depth", "fc_max_queue_depth", Number, "Admission control"),
    flag("fc-max-queue-wait-ms", "fc_max_queue_wait_ms", Number, "Admission control"),
    flag("fc-adaptive", "fc_adaptive", Switch, "Admission control"),
    flag("fc-ttft-target-ms", "fc_ttft_target_ms", Number, "Admission control"),
    flag("fc-telemetry-stale-ms", "fc_telemetry_stale_ms", Number, "Admission control"),
    flag("fc-warmup-ms", "fc_warmup_ms", Number, "Admission control"),
    flag("fc-tenant-max-share-pct", "fc_tenant_max_share_pct", Number, "Admission control"),
    flag("fc-expose-headers", "fc_expose_headers", Switch, "Admission control"),
    flag("sockmap-mode", "sockMapMode", Text, "Splicing in the kernel"),
];

/// The values that were given, by option, in the order of the tables.
#[derive(Clone, Debug, Default)]
pub(super) struct Given {
    pub(super) any: Map<String, Value>,
    pub(super) fullproxy: Map<String, Value>,
}

impl Flag {
    fn arg(&self) -> Arg {
        let arg = Arg::new(self.name).long(self.name).help(self.help);
        match self.takes {
            Number => arg.value_name("N").value_parser(value_parser!(i64)).allow_negative_numbers(true),
            Text => arg.value_name("TEXT"),
            Switch => arg
                .value_name("BOOL")
                .action(ArgAction::Set)
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value("true")
                .value_parser(value_parser!(bool)),
        }
    }

    fn value(&self, matches: &ArgMatches) -> Option<Value> {
        match self.takes {
            Number => matches.get_one::<i64>(self.name).map(|value| json!(value)),
            Text => matches.get_one::<String>(self.name).map(|value| json!(value)),
            Switch => matches.get_one::<bool>(self.name).map(|value| json!(value)),
        }
    }
}

fn values(flags: &[Flag], matches: &ArgMatches) -> Map<String, Value> {
    flags.iter().filter_map(|flag| Some((flag.option.to_owned(), flag.value(matches)?))).collect()
}

impl clap::FromArgMatches for Given {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Given { any: values(ANY, matches), fullproxy: values(FULLPROXY, matches) })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl clap::Args for Given {
    fn augment_args(command: Command) -> Command {
        ANY.iter().chain(FULLPROXY).fold(command, |command, flag| command.arg(flag.arg()))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}
