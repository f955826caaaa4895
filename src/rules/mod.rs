//! Load-balancer rules: from a file's `[[rule]]` or an API body to what a shard routes with.
//!
//! One definition serves both doors: [`check`] reads either, reports everything that is wrong with it, and returns
//! a [`Rule`] in which every value is in force (the rule's own, else the environment's, else the default). What
//! follows sees no raw input: [`readback`] shows a rule, [`compile`] makes the [`shards::service::Service`].
//!
//! Names are those of the reference's `serviceArguments` and `endpoints`; beyond them a rule may carry
//! `kvNoneHashSeed`, `engineTokenFile`, `kvChatTemplate`, `kvChatTemplateKwargs`, `kvAddBos`, `kvEngineRender`,
//! `kvSendPromptIds`, `kvAdapters`, `kvMinMatchTokens`, `kvLbMode`, `kvThroughput`, `kvLoadPenalty`, `kvCapSumMilli`, `kvSpillRelief`,
//! `kvColdstartSeedN`, `kvColdstartMinBlocks`, `kvMeanLoadFactor`, `kvZeroHitN`, `kvClaimMs`, `pd_session_max`,
//! `kvReplayPortOffset`, `kvTrtllmPollMinMs`, `kvTrtllmPollMaxMs`, `kvMediumWeights`, `routeHeader` and
//! `scrapeMetrics`, and an endpoint `kvZmqPort`,
//! `kvReplayPort` and `kvZmqBind`.

#![forbid(unsafe_code)]

mod adapters;
mod algo;
mod check;
pub mod compile;
mod defaults;
mod endpoints;
mod files;
mod kv;
mod legs;
mod others;
mod pools;
mod prompts;
mod proxy;
mod ranges;
mod readback;
mod request;
mod seal;
mod stated;
pub mod table;
mod token;

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use shards::prompt::Rendering;
use shards::service::{
    Adapter, Blend, Bypass, Disagg, Engine, MediumWeights, PathMatch, PrefixHashing, ProxyOptions, Role, Select,
    Sessions,
};

pub use algo::{KvAlgo, contract, unknowable};
pub use check::{check, check_file, check_request};
pub use defaults::{DrainPoll, KvDefaults, PdDefaults};
pub use files::{FileError, RuleFile, RuleFiles, TOKENIZERS_DIR};
pub use prompts::PromptOptions;
pub use readback::{contract_of, readback};
pub use request::{Oper, Purpose, purpose_of};
pub use seal::Nonce;
pub use stated::stated;
pub use token::{EngineToken, TokenError};

/// Most endpoints of one rule. A rule with more is refused.
pub const ENDPOINTS_MAX: usize = 1024;
/// Most data-parallel ranks of one endpoint (`kvDpRankCount`). A rule with more is refused.
pub const RANKS_MAX: i64 = 8;
/// Longest seed, bytes, as the reference bounds it. A longer one is refused.
pub const SEED_BYTES_MAX: usize = 23;
/// Longest text of a rule (name, host, path, model), bytes. A rule with a longer one is refused.
pub const TEXT_BYTES_MAX: usize = 255;

/// A checked rule; every value is in force.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// What tells it from other rules.
    pub key: RuleKey,
    /// `name`; may be empty.
    pub name: String,
    /// `sel`.
    pub select: Select,
    /// `chwbl_prefix_hash_level`, `chwbl_prefix_hash_flags`, `chwbl_mean_load_factor` and `chwbl_replication`.
    pub hashing: PrefixHashing,
    /// `session_header_name`, `pd_session_ttl_sec` and `pd_session_max`, where something of the rule keeps sessions.
    pub sessions: Option<Sessions>,
    /// `pd_disagg_mode` and what goes with it; none = one pool.
    pub pd: Option<Disagg>,
    /// `pdAuthKeyFile`: where its key was read from.
    pub pd_auth_key_file: Option<PathBuf>,
    /// `kvEngineType`.
    pub engine: Engine,
    /// How requests are carried, beside where to.
    pub proxy: ProxyOptions,
    /// KV-exact routing (`kvExactMode` 3, or 1 in P/D rules); none = without.
    pub kv: Option<KvRule>,
    /// `engineTokenFile`: what the gateway shows on its own calls.
    pub engine_token: Option<Arc<EngineToken>>,
    /// Endpoints in the order of the rule.
    pub endpoints: Vec<RuleEndpoint>,
    /// Options that are accepted, have no effect, and are shown again, by name.
    pub inert: BTreeMap<&'static str, serde_json::Value>,
}

impl Rule {
    /// Whether it matters what decode endpoints hold.
    #[must_use]
    pub fn looks_at_decode(&self) -> bool {
        self.kv.is_some() && self.pd.as_ref().is_some_and(|pd| pd.bypass == Bypass::Held)
    }
}

/// Identity of a rule: a second rule with the same key is a change of the first.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RuleKey {
    /// `externalIP`.
    pub ip: IpAddr,
    /// `port`.
    pub port: u16,
    /// `block`.
    pub block: u32,
    /// `host`, lower case; empty = any.
    pub host: String,
    /// `path_prefix`; empty = any.
    pub path_prefix: String,
    /// `path_match_mode`.
    pub path_match: PathMatchMode,
    /// `model_name`; empty = any.
    pub model: String,
}

/// `path_match_mode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PathMatchMode {
    /// Paths are not looked at.
    #[default]
    Disabled,
    /// The path begins with `path_prefix`.
    Prefix,
    /// The path is `path_prefix`.
    Exact,
}

impl PathMatchMode {
    /// The value in rules.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            PathMatchMode::Disabled => "disabled",
            PathMatchMode::Prefix => "prefix",
            PathMatchMode::Exact => "exact",
        }
    }

    /// The mode of a name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        [PathMatchMode::Disabled, PathMatchMode::Prefix, PathMatchMode::Exact].into_iter().find(|m| m.name() == name)
    }
}

impl RuleKey {
    /// Where clients connect to.
    #[must_use]
    pub fn listen(&self) -> SocketAddr {
        SocketAddr::new(self.ip, self.port)
    }

    /// The path the rule is for, as a shard compares it.
    #[must_use]
    pub fn path(&self) -> Option<PathMatch> {
        match self.path_match {
            PathMatchMode::Disabled => None,
            PathMatchMode::Prefix => Some(PathMatch::Prefix(self.path_prefix.clone())),
            PathMatchMode::Exact => Some(PathMatch::Exact(self.path_prefix.clone())),
        }
    }
}

impl fmt::Display for RuleKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.listen())?;
        for (name, value) in [("host", &self.host), ("path", &self.path_prefix), ("model", &self.model)] {
            if !value.is_empty() {
                write!(f, " {name} {value}")?;
            }
        }
        if self.block != 0 { write!(f, " block {}", self.block) } else { Ok(()) }
    }
}

/// KV-exact routing of a rule; every value is in force.
#[derive(Clone, Debug, PartialEq)]
pub struct KvRule {
    /// `kvBlockSize`, tokens.
    pub block_tokens: u32,
    /// `kvHashAlgo`.
    pub algo: KvAlgo,
    /// Whether the rule itself names it. Else engines that use another of theirs are followed.
    pub algo_given: bool,
    /// `kvZmqPort`: event port of endpoints that name none; rank r is at the port + r.
    pub zmq_port: u16,
    /// `kvWarmupSec`: shown again; a block counts from the moment it is announced.
    pub warmup_sec: u32,
    /// `kvDpRankCount`.
    pub ranks: u8,
    /// vLLM's `PYTHONHASHSEED`; none = unset: the fixed seed of vLLM 0.29 and later.
    pub seed: Option<String>,
    /// `kvChatTemplate`.
    pub chat_template: Option<ChatTemplate>,
    /// `kvChatTemplateKwargs`, `kvAddBos`, `kvEngineRender` and `kvSendPromptIds`.
    pub prompts: PromptOptions,
    /// `kvAdapters`: adapters by the name that requests ask for; they win over what engines list.
    pub adapters: BTreeMap<String, Adapter>,
    /// `kvMinMatchTokens`: shorter prompts are not scored; 0 = all are.
    pub min_match_tokens: u32,
    /// `kvLbMode`.
    pub blend: Blend,
    /// `kvThroughput`, percent.
    pub throughput: u32,
    /// `kvLoadPenalty`.
    pub load_penalty: u32,
    /// `kvCapSumMilli`; none = the fleet that the adaptive blends were tuned on.
    pub capacity_sum_milli: Option<u32>,
    /// `kvSpillRelief`.
    pub spill_relief: bool,
    /// `kvColdstartSeedN`; 0 = never.
    pub seed_every: u32,
    /// `kvColdstartMinBlocks`; 0 = only an empty endpoint is cold.
    pub seed_min_blocks: u32,
    /// `kvMeanLoadFactor`, percent.
    pub mean_load_factor: u32,
    /// `kvZeroHitN`.
    pub zero_hit_every: u32,
    /// `kvClaimMs`, how long a request under way counts as what its endpoint will hold; 0 = not at all.
    pub claim_ms: u32,
    /// `kvReplayPortOffset`: where endpoints that name no replay port have theirs, counted from the event port; 0 = they
    /// have none.
    pub replay_port_offset: u16,
    /// `kvTrtllmPollMinMs` and `kvTrtllmPollMaxMs`.
    pub drain_poll: DrainPoll,
    /// `kvMediumWeights`: what a block in another medium than device memory is worth.
    pub weights: MediumWeights,
}

impl KvRule {
    /// How the rule's engines turn requests into prompts.
    #[must_use]
    pub fn rendering(&self, engine: Engine) -> Rendering<'_> {
        Rendering {
            engine,
            template: self.chat_template.as_ref().map(|template| &template.text),
            kwargs: self.prompts.template_kwargs.as_deref(),
            add_bos: self.prompts.add_bos,
        }
    }
}

/// A chat template named by a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatTemplate {
    /// The file.
    pub path: PathBuf,
    /// Its text when the rule was checked.
    pub text: Arc<str>,
}

/// One backend as the rule names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleEndpoint {
    /// `endpointIP`.
    pub host: Host,
    /// `targetPort`.
    pub port: u16,
    /// `weight`; 0 drains.
    pub weight: u32,
    /// `backup`: used only when no other endpoint is up.
    pub backup: bool,
    /// `ep_role`.
    pub role: Role,
    /// `nixl_port`: used by P/D rules alone.
    pub nixl_port: u16,
    /// `nixl_engine_id`: used by P/D rules with `pdNixlPush` alone; empty = not said.
    pub nixl_engine_id: String,
    /// Where its cache events come from; none for rules without KV-exact routing, for decode endpoints (unless the rule
    /// [looks at them](Rule::looks_at_decode)), and for TensorRT-LLM endpoints that do not push theirs.
    pub events: Option<EventSource>,
}

impl RuleEndpoint {
    /// What the endpoint is found again by when its rule changes.
    #[must_use]
    pub fn identity(&self) -> (Host, u16) {
        (self.host.clone(), self.port)
    }
}

impl fmt::Display for RuleEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(ip) => write!(f, "{}", SocketAddr::new(*ip, self.port)),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

/// Address of an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Host {
    /// A literal address.
    Ip(IpAddr),
    /// A name, lower case, resolved again every 5 s.
    Name(String),
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Host::Ip(ip) => write!(f, "{ip}"),
            Host::Name(name) => f.write_str(name),
        }
    }
}

/// Where an endpoint's cache events come from. Rank r is at each port + r.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventSource {
    /// Which side of the event connection listens, and where.
    pub live: EventPlace,
    /// Port of the endpoint's replay socket; none = the engine is never asked for missed events.
    pub replay_port: Option<u16>,
    /// Whether the endpoint itself named the event port or address, so that the readback shows it.
    pub own: bool,
    /// Whether the endpoint itself named the replay port.
    pub own_replay: bool,
}

/// Which side of an event connection listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventPlace {
    /// The engine listens at this port of the endpoint's host: the usual case.
    Connect(u16),
    /// The gateway listens here, for engines whose publisher connects (`kvZmqBind`).
    Bind(SocketAddr),
}

#[cfg(test)]
mod pools_tests;
#[cfg(test)]
mod tests;
