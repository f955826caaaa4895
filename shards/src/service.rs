//! What a shard routes with: rules compiled into services, and the state of services and endpoints that outlives
//! one compilation.
//!
//! **Invariant.** A [`Tables`] value never changes: every change of rules, addresses or models makes a new one and
//! hands it to all shards. What does change while requests run (health, counters, the seed tick) lives in the
//! `…Shared` values, which are carried over from one compilation to the next and hold nothing but atomics.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::bos::BosSettings;
use crate::disagg::Parting;
use crate::disagg::ladder::Gauge;
use crate::ids::{ServiceId, ShardId};
use crate::predictions::ZeroHits;
use crate::prompt::ModelTable;
use crate::rates::Rates;

mod endpoint;
mod endpoints;
mod kv;
mod policy;
mod ring;
mod stats;
mod vitals;

pub use endpoint::{Endpoint, EndpointShared, EngineLoad, Target};
pub use endpoints::{Edition, Endpoints};
pub use kv::{Adapter, EngineRender, KvExact, MediumWeights};
pub use policy::{Blend, Bypass, Disagg, PrefixHashing, Role, Select, SessionSource, Sessions};
pub use ring::Ring;
pub use stats::{EndpointStats, MissReason, ServiceStats, add, count};
pub(crate) use vitals::magnitude;
pub use vitals::{Board, Vitals};

/// Everything a shard needs to serve: handed over whole, swapped at once.
#[derive(Debug)]
pub struct Tables {
    /// Live services, in order of their number.
    pub services: Vec<Arc<Service>>,
    /// Tokenizers and chat templates by model slug.
    pub models: Arc<ModelTable>,
}

/// One compiled rule.
#[derive(Debug)]
pub struct Service {
    /// The rule's number.
    pub id: ServiceId,
    /// The rule's `name`, for logs; may be empty.
    pub name: String,
    /// Address clients connect to.
    pub listen: SocketAddr,
    /// Host the rule is for (lower case, without port); none = any.
    pub host: Option<String>,
    /// Path the rule is for; none = any.
    pub path: Option<PathMatch>,
    /// Model the rule is for (exact, case-sensitive); none = any.
    pub model: Option<String>,
    /// Which endpoint a request goes to that nothing else decides (`sel`).
    pub select: Select,
    /// How prompts' beginnings are hashed, where `select` asks for it.
    pub hashing: PrefixHashing,
    /// The ring of [`Select::BoundedHash`]; none for others.
    pub ring: Option<Ring>,
    /// Sessions that stay where they are; none = requests are on their own.
    pub sessions: Option<Sessions>,
    /// Prefill and decode on separate endpoints; none = one pool.
    pub pd: Option<Disagg>,
    /// Engine kind behind the rule.
    pub engine: Engine,
    /// KV-exact routing; none = plain load balancing.
    pub kv: Option<KvExact>,
    /// How requests are carried, beside where to.
    pub proxy: ProxyOptions,
    /// Endpoints by [`EndpointIndex`]. An endpoint taken out of the rule keeps its place with `retired` set.
    pub endpoints: Endpoints,
    /// State carried over updates of the rule.
    pub shared: Arc<ServiceShared>,
}

/// How a service's requests are carried, beside where to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyOptions {
    /// Every answer says why it came from where it came (`x-kvlane-route`), not only where a client asks for it
    /// (`routeHeader`).
    pub route_header: bool,
    /// Engines' own metrics are read (`scrapeMetrics`).
    pub scrape: bool,
    /// Nodes of a shard's tree of texts that were sent, at most (`pd_trie_nodes_max`); beyond it the texts that were sent
    /// longest ago are forgotten.
    pub trie_nodes_max: u32,
    /// So many connects in a row that fail open the breaker (`cb_enable`; on in P/D rules); 0 = it stays closed.
    pub breaker_failures: u32,
    /// So many answers of status 500 or more in a row open it (`LLB_PD_ORIGIN_ERR_THRESHOLD`, in P/D rules); 0 = none do.
    pub breaker_errors: u32,
}

impl Default for ProxyOptions {
    fn default() -> Self {
        ProxyOptions {
            route_header: false,
            scrape: false,
            trie_nodes_max: 32_768,
            breaker_failures: 0,
            breaker_errors: 0,
        }
    }
}

/// How a rule's `path_prefix` is compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathMatch {
    /// The path begins with the text.
    Prefix(String),
    /// The path, without query, is the text.
    Exact(String),
}

impl Service {
    /// A rule without anything special: round robin, for any host, path and model, with state of its own.
    #[must_use]
    pub fn plain(id: ServiceId, listen: SocketAddr, endpoints: Vec<Endpoint>, shards: usize) -> Self {
        Service {
            id,
            name: String::new(),
            listen,
            host: None,
            path: None,
            model: None,
            select: Select::RoundRobin,
            hashing: PrefixHashing::default(),
            ring: None,
            sessions: None,
            pd: None,
            engine: Engine::Vllm,
            proxy: ProxyOptions::default(),
            kv: None,
            endpoints: endpoints.into(),
            shared: Arc::new(ServiceShared::new(shards)),
        }
    }

    /// The ring that the rule's `sel` asks for; call it when `endpoints`, `select` and `hashing` are there.
    #[must_use]
    pub fn with_ring(self) -> Self {
        let wanted = self.select == Select::BoundedHash;
        let in_rule = self.endpoints.iter().filter(|endpoint| !endpoint.retired);
        let ring = wanted.then(|| {
            Ring::new(in_rule.map(|endpoint| (endpoint.shared.index, endpoint.address)), self.hashing.replication)
        });
        Service { ring, ..self }
    }
}

/// Engine kinds (`kvEngineType`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Engine {
    /// vLLM 0.9 to 0.33.
    Vllm,
    /// SGLang 0.5.6 to 0.5.23.
    Sglang,
    /// TensorRT-LLM (`trtllm-serve`).
    Trtllm,
    /// llama.cpp's server: it tells nothing of its cache, so it is balanced without keys.
    Llamacpp,
}

impl Engine {
    /// Every kind.
    pub const ALL: [Engine; 4] = [Engine::Vllm, Engine::Sglang, Engine::Trtllm, Engine::Llamacpp];

    /// The value in rules, metrics and answers.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Engine::Vllm => "vllm",
            Engine::Sglang => "sglang",
            Engine::Trtllm => "trtllm",
            Engine::Llamacpp => "llamacpp",
        }
    }
}

/// State of a service that outlives a compilation.
#[derive(Debug)]
pub struct ServiceShared {
    /// Tier 1.5 hits counted while another eligible endpoint was cold; one counter for all shards.
    pub seed_ticks: AtomicU64,
    /// Whether repeated prompts hit.
    pub zero_hits: ZeroHits,
    /// How soon its endpoints' answers begin.
    pub rates: Rates,
    /// How soon decode legs' answers begin, by the tokens that are moved for them: its pace is that of moving.
    pub moves: Rates,
    /// Disaggregated requests under way.
    pub pd_total: Arc<Gauge>,
    /// Which kinds of requests its engines part.
    pub pd_parting: Parting,
    /// Endpoints that are demoted; see [`Trust`](crate::feedback::Trust).
    pub demoted: AtomicU32,
    /// Begin-of-text tokens, where use has shown what files and rule do not say.
    pub bos: BosSettings,
    /// Counters, a row per shard.
    pub stats: Box<[ServiceStats]>,
}

impl ServiceShared {
    /// Fresh state for a process of `shards` shards.
    #[must_use]
    pub fn new(shards: usize) -> Self {
        ServiceShared {
            seed_ticks: AtomicU64::new(0),
            zero_hits: ZeroHits::default(),
            rates: Rates::default(),
            moves: Rates::default(),
            pd_total: Arc::default(),
            pd_parting: Parting::default(),
            demoted: AtomicU32::new(0),
            bos: BosSettings::default(),
            stats: (0..shards).map(|_| ServiceStats::default()).collect(),
        }
    }

    /// Takes back the number of a hit that was not carried out, unless a later one has been drawn already: then that one
    /// keeps its turn.
    pub fn undo_seed_tick(&self, tick: u64) {
        // Where it fails there is nothing to do.
        let _moved_on = self.seed_ticks.compare_exchange(tick, tick - 1, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The row that the shard alone writes.
    #[must_use]
    pub fn stats_of(&self, shard: ShardId) -> &ServiceStats {
        &self.stats[shard.index()]
    }
}

impl Tables {
    /// Tables without rules or models.
    #[must_use]
    pub fn empty() -> Self {
        Tables { services: Vec::new(), models: Arc::new(ModelTable::default()) }
    }

    /// Services by listening address, most specific first (host, path and model before none).
    #[must_use]
    pub fn by_address(&self) -> HashMap<SocketAddr, Vec<Arc<Service>>> {
        let mut map: HashMap<SocketAddr, Vec<Arc<Service>>> = HashMap::new();
        for service in &self.services {
            map.entry(service.listen).or_default().push(Arc::clone(service));
        }
        for services in map.values_mut() {
            services.sort_by_key(|s| {
                let path = s.path.as_ref().map_or(0, |p| match p {
                    PathMatch::Exact(text) => 1 + 2 * text.len(),
                    PathMatch::Prefix(text) => 2 * text.len(),
                });
                std::cmp::Reverse((s.host.is_some(), path, s.model.is_some()))
            });
        }
        map
    }
}
