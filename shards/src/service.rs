//! What a shard routes with: rules compiled into services, and the state of services and endpoints that outlives
//! one compilation.
//!
//! **Invariant.** A [`Tables`] value never changes: every change of rules, addresses or models makes a new one and
//! hands it to all shards. What does change while requests run (health, counters, the seed tick) lives in the
//! `…Shared` values, which are carried over from one compilation to the next and hold nothing but atomics.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::block::vllm::Tagging;
use crate::block::{Contract, Lora};
use crate::bos::{BosEvidence, BosSettings};
use crate::disagg::ladder::{Gauge, Places};
use crate::disagg::stats::PdStats;
use crate::feedback::Trust;
use crate::ids::{EndpointIndex, ServiceId, ShardId};
use crate::inventory;
use crate::load::LoadSlot;
use crate::predictions::{Predictions, ZeroHits};
use crate::prompt::ModelTable;
use crate::prompt::Rendering;
use crate::rates::{Rates, Slowness};
use crate::route::Tier;
use crate::usage::Statements;

mod policy;
mod ring;

pub use policy::{Blend, Disagg, PrefixHashing, Role, Select, SessionSource, Sessions};
pub use ring::Ring;

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
    pub endpoints: Vec<Endpoint>,
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
            endpoints,
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

/// KV-exact routing of one service.
#[derive(Debug)]
pub struct KvExact {
    /// Tokens per block (`kvBlockSize`).
    pub block_tokens: u32,
    /// Ranks of each endpoint (`kvDpRankCount`).
    pub ranks: u8,
    /// How tokens become keys (`kvEngineType`, `kvHashAlgo`, the seed, and what is known of the engines' release).
    pub contract: Contract,
    /// Whether the rule itself names the algorithm. Where it does not, engines that use another are followed; where it
    /// does, they are at fault.
    pub algo_given: bool,
    /// Forms of vLLM's extra keys beside the contract's that some of the engines use: requests with an adapter or a salt
    /// are keyed in each of them.
    pub other_forms: Vec<Tagging>,
    /// What blocks outside of device memory are worth.
    pub weights: MediumWeights,
    /// Adapters that the engines serve, by the name that requests ask for.
    pub adapters: HashMap<Box<str>, Adapter>,
    /// Chat template file's text that overrides the model's own (`kvChatTemplate`), if the rule names one.
    pub chat_template: Option<Arc<str>>,
    /// Template arguments the engines were started with (`kvChatTemplateKwargs`): a JSON object that has been checked.
    pub chat_template_kwargs: Option<Arc<str>>,
    /// Whether engines put a BOS token before texts (`kvAddBos`); none = as the model's files say.
    pub add_bos: Option<bool>,
    /// How engines are asked for the ids of chats that they render in code (`kvEngineRender`); none = they are not.
    pub engine_render: Option<EngineRender>,
    /// Chats are sent on with the ids of their prompts (`kvSendPromptIds`), where the engine takes them.
    pub send_ids: bool,
    /// How overlap is weighed against load (`LOXILB_KV_LB_MODE`).
    pub blend: Blend,
    /// What a request in flight costs in the soft blends, over the endpoint's blocks (`LOXILB_KV_LOAD_PENALTY`).
    pub load_penalty: u32,
    /// What the endpoints can do together, which the adaptive blends measure load by (`LOXILB_KV_CAP_SUM_MILLI`); none =
    /// as much as the fleet they were tuned on.
    pub capacity_sum_milli: Option<u32>,
    /// What work costs those that come later counts so many percent beside a request's own time (`LOXILB_KV_THROUGHPUT`);
    /// 0 = first-token time alone. Blend `ttft` only.
    pub throughput: u32,
    /// Shorter prompts, in tokens, are not scored (`LLB_KV_MIN_MATCH_TOKENS`); 0 = no such guard.
    pub min_match_tokens: u32,
    /// The winner at or over the fleet-wide cap gives way (`LOXILB_KV_SPILL_RELIEF`; on in mode 3 when unset).
    pub spill_relief: bool,
    /// Mean load factor of the cap, percent (`LOXILB_KV_MEAN_LOAD_FACTOR`).
    pub mean_load_factor: u32,
    /// Every how many hits a cold endpoint is seeded (`LOXILB_KV_COLDSTART_SEED_N`); 0 = never.
    pub seed_every: u32,
    /// An endpoint that holds fewer blocks is cold (`LOXILB_KV_COLDSTART_MIN_BLOCKS`); 0 = only an empty one is.
    pub seed_min_blocks: u32,
    /// So many repeated prompts in a row without a hit are worth a warning (`LOXILB_KV_ZERO_HIT_N`).
    pub zero_hit_every: u32,
    /// How long a request under way counts as what its endpoint will hold (`kvClaimMs`); zero = not at all.
    pub claim_for: Duration,
    /// The service's inventory, to be read.
    pub inventory: inventory::ReaderFactory,
}

impl KvExact {
    /// Routing by KV cache with every other value as it is by default in a single pool.
    #[must_use]
    pub fn with_defaults(block_tokens: u32, contract: Contract, inventory: inventory::ReaderFactory) -> Self {
        KvExact {
            block_tokens,
            ranks: 1,
            contract,
            algo_given: true,
            other_forms: Vec::new(),
            weights: MediumWeights::default(),
            adapters: HashMap::new(),
            chat_template: None,
            chat_template_kwargs: None,
            add_bos: None,
            engine_render: None,
            send_ids: false,
            blend: Blend::default(),
            load_penalty: 32,
            capacity_sum_milli: None,
            throughput: 200,
            min_match_tokens: 16,
            spill_relief: true,
            mean_load_factor: 175,
            seed_every: 16,
            seed_min_blocks: 16,
            zero_hit_every: 50,
            claim_for: Duration::from_secs(2),
            inventory,
        }
    }

    /// How the service's engines turn requests into prompts.
    #[must_use]
    pub fn rendering(&self, engine: Engine) -> Rendering<'_> {
        Rendering {
            engine,
            template: self.chat_template.as_ref(),
            kwargs: self.chat_template_kwargs.as_deref(),
            add_bos: self.add_bos,
        }
    }
}

/// How engines are asked for the ids of a chat (`kvEngineRender`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineRender {
    /// `render`: vLLM's `/v1/…/render` paths, which take the whole request (0.30 and later: `--enable-scale-out`).
    Render,
    /// `tokenize`: `POST /tokenize` of vLLM and SGLang; requests with members it does not look at are not asked.
    Tokenize,
}

impl EngineRender {
    /// Both ways.
    pub const ALL: [EngineRender; 2] = [EngineRender::Render, EngineRender::Tokenize];

    /// The value in rules.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            EngineRender::Render => "render",
            EngineRender::Tokenize => "tokenize",
        }
    }
}

/// What a block is worth that lies in another medium than the engine's device memory, in percent of one that lies there
/// (`kvMediumWeights`). Media that are neither are worth nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediumWeights {
    /// The host's memory: `CPU`, `CPU_PINNED`, TensorRT-LLM's level 1.
    pub cpu: u8,
    /// Whatever lies behind it: `STORAGE`, `FS`, `OBJ`, `DISK`; no more than `cpu`.
    pub storage: u8,
}

/// An adapter that a service's engines serve beside their model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// Name of the model it adapts, whose tokenizer its requests use.
    pub base: String,
    /// What of it enters keys.
    pub lora: Lora,
}

/// One backend of one service.
#[derive(Debug)]
pub struct Endpoint {
    /// Where requests go.
    pub address: SocketAddr,
    /// Name it was resolved from, where the rule names it so.
    pub dns_name: Option<String>,
    /// Weight; 0 drains: nothing new is sent.
    pub weight: u32,
    /// Used only when no other endpoint is up.
    pub backup: bool,
    /// No longer in the rule.
    pub retired: bool,
    /// What it does for the rule.
    pub role: Role,
    /// Where its NIXL side channel listens (`nixl_port`); 0 = not said.
    pub nixl_port: u16,
    /// What its NIXL agent is called (`nixl_engine_id`), where prefill engines push.
    pub nixl_engine_id: Option<Box<str>>,
    /// State carried over updates.
    pub shared: Arc<EndpointShared>,
}

impl Endpoint {
    /// An endpoint without anything special, of weight 1.
    #[must_use]
    pub fn at(address: SocketAddr, shared: EndpointShared) -> Self {
        Endpoint {
            address,
            dns_name: None,
            weight: 1,
            backup: false,
            retired: false,
            role: Role::Normal,
            nixl_port: 0,
            nixl_engine_id: None,
            shared: Arc::new(shared),
        }
    }

    /// Whether a tier may choose the endpoint: in the rule, up, not draining.
    #[must_use]
    pub fn is_candidate(&self) -> bool {
        !self.retired && self.weight > 0 && self.shared.is_up()
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
    /// Disaggregated requests under way.
    pub pd_total: Arc<Gauge>,
    /// Endpoints that are demoted; see [`Trust`].
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
            pd_total: Arc::default(),
            demoted: AtomicU32::new(0),
            bos: BosSettings::default(),
            stats: (0..shards).map(|_| ServiceStats::default()).collect(),
        }
    }

    /// The row that the shard alone writes.
    #[must_use]
    pub fn stats_of(&self, shard: ShardId) -> &ServiceStats {
        &self.stats[shard.index()]
    }
}

/// Why Tier 1.5 did not decide (label `reason` of `loxilb_pd_kv_tier15_miss_reason_total`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum MissReason {
    /// The rule does not route by KV cache.
    ModeOff,
    /// The request has no prompt text or ids.
    TextEmpty,
    /// The request names no model.
    ModelEmpty,
    /// No tokenizer is staged for the model, or it could not be read.
    Tokenizer,
    /// The model's tokenizer is staged and not loaded yet: its first requests asked for it.
    TokenizerLoading,
    /// The model has no chat template: the file to add is in the log and the API.
    TemplateMissing,
    /// The chat template refused the conversation, or rendering failed.
    Template,
    /// The prompt could not be understood (shape, encoding).
    Tokenize,
    /// Engines render this model's chats in code, not by a template.
    EngineRendered,
    /// Media or embeddings stand before the first certain block.
    Media,
    /// The prompt continues something that only the engine has stored.
    Stored,
    /// The prompt is too large to be read in slices, and the thread that reads such prompts is busy.
    Busy,
    /// The request's adapter, salt or other extra cannot be keyed under the engines' contract.
    Extras,
    /// The prompt has no full block.
    Hashes,
    /// No endpoint holds the first block.
    NoWorker,
    /// Every endpoint that holds blocks is down, draining or masked.
    Excluded,
    /// The prompt is shorter than the minimum match.
    Shallow,
}

impl MissReason {
    /// Every reason, in the order of the counters.
    pub const ALL: [MissReason; 17] = [
        MissReason::ModeOff,
        MissReason::TextEmpty,
        MissReason::ModelEmpty,
        MissReason::Tokenizer,
        MissReason::TokenizerLoading,
        MissReason::TemplateMissing,
        MissReason::Template,
        MissReason::Tokenize,
        MissReason::EngineRendered,
        MissReason::Media,
        MissReason::Stored,
        MissReason::Busy,
        MissReason::Extras,
        MissReason::Hashes,
        MissReason::NoWorker,
        MissReason::Excluded,
        MissReason::Shallow,
    ];

    /// The label value.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            MissReason::ModeOff => "mode_off",
            MissReason::TextEmpty => "text_empty",
            MissReason::ModelEmpty => "model_empty",
            MissReason::Tokenizer => "tokenizer_missing",
            MissReason::TokenizerLoading => "tokenizer_loading",
            MissReason::TemplateMissing => "template_missing",
            MissReason::Template => "template",
            MissReason::Tokenize => "tokenize",
            MissReason::EngineRendered => "engine_rendered",
            MissReason::Media => "media",
            MissReason::Stored => "stored",
            MissReason::Busy => "busy",
            MissReason::Extras => "extras",
            MissReason::Hashes => "hashes",
            MissReason::NoWorker => "no_worker",
            MissReason::Excluded => "excluded",
            MissReason::Shallow => "shallow",
        }
    }
}

/// Counters of one service on one shard.
#[repr(align(128))]
#[derive(Debug, Default)]
pub struct ServiceStats {
    /// Misses by [`MissReason`].
    pub misses: [AtomicU64; MissReason::ALL.len()],
    /// Answers by status class: index 1 = 1xx … 5 = 5xx, 0 = ended without a head.
    pub responses: [AtomicU64; 6],
    /// Requests the gateway refused itself because no endpoint was a candidate.
    pub no_healthy_backend: AtomicU64,
    /// Requests that moved to another endpoint because nothing had been sent to the first.
    pub connect_failovers: AtomicU64,
    /// Answers that broke after their first byte.
    pub broken_answers: AtomicU64,
    /// Requests whose client left before the end of the answer.
    pub client_gone: AtomicU64,
    /// Requests with a prefill and a decode leg.
    pub pd: PdStats,
    /// Decisions by [`Tier`].
    pub tiers: [AtomicU64; Tier::ALL.len()],
    /// Decisions of Tier 1.5 that a claim made: the endpoint will have stored the prompt's beginning soon.
    pub claims: AtomicU64,
    /// Nodes of the shard's tree of texts.
    pub trie_nodes: AtomicU64,
    /// Prompt tokens that would have hit at the best candidate and do not where the request went.
    pub regret_tokens: AtomicU64,
    /// Prompt tokens that some endpoint holds, candidate or not, and that do not hit where the request went.
    pub oracle_gap_tokens: AtomicU64,
}

/// What an engine says of itself in its metrics: written by whoever scrapes them, which is also who takes back what is
/// too old to be believed.
#[derive(Debug, Default)]
pub struct EngineLoad {
    /// Requests that wait in the engine, plus 1; 0 = not known.
    queued: AtomicU32,
    /// Blocks of its cache (`num_gpu_blocks`); 0 = not known.
    blocks: AtomicU32,
}

impl EngineLoad {
    /// Notes what the engine says of its queue; none where it says nothing, or long ago.
    pub fn set_queued(&self, requests: Option<u32>) {
        self.queued.store(requests.map_or(0, |requests| requests.saturating_add(1)), Ordering::Relaxed);
    }

    /// Notes how many blocks the engine's cache has.
    pub fn set_blocks(&self, blocks: Option<u32>) {
        self.blocks.store(blocks.unwrap_or(0), Ordering::Relaxed);
    }

    /// Requests that wait in the engine, as of the last scrape.
    #[must_use]
    pub fn queued(&self) -> Option<u32> {
        self.queued.load(Ordering::Relaxed).checked_sub(1)
    }

    /// Blocks of the engine's cache.
    #[must_use]
    pub fn blocks(&self) -> Option<u32> {
        Some(self.blocks.load(Ordering::Relaxed)).filter(|blocks| *blocks > 0)
    }
}

/// State of an endpoint that outlives a compilation: found again by service and address.
#[derive(Debug)]
pub struct EndpointShared {
    /// Place in its service.
    pub index: EndpointIndex,
    /// Place in the load table.
    pub slot: LoadSlot,
    /// False after a refused or timed-out connect or failed probes, until a probe succeeds.
    up: AtomicBool,
    /// Its engine's release takes the ids of a chat's prompt along with it.
    takes_ids: AtomicBool,
    /// Connect failures since the last request that got an answer; sets the back-off.
    pub connect_failures: AtomicU32,
    /// Times it was taken out.
    downs: AtomicU32,
    /// Times its caches were emptied; written by the ingest thread.
    pub emptied: AtomicU32,
    /// Answers of status 500 or more since the last one below 400.
    origin_errors: AtomicU32,
    /// The breaker is open: the endpoint is out, and stays so for longer than one that was not there for a moment.
    tripped: AtomicBool,
    /// Times the breaker was closed again because the endpoint answers probes.
    pub heals: AtomicU64,
    /// Whether the engine takes a request to the rank that a header names, by its release. Written by the control core.
    conveys_rank: AtomicBool,
    /// Keys the endpoint's engine announced and has not withdrawn, each once whatever the number of ranks or
    /// copies: the inventory's `total`. Written by the ingest thread.
    pub kv_blocks: AtomicU64,
    /// Its places for requests in prefill, where they are bounded.
    pub places: Places,
    /// What its engine says of its load, as far as somebody asks.
    pub engine: EngineLoad,
    /// How slow it is among the service's endpoints.
    pub slowness: Slowness,
    /// What shards expect its engine to hold, for the ingest thread.
    pub predictions: Predictions,
    /// Which begin-of-text its engine puts before texts, where it is another than expected.
    pub bos: BosEvidence,
    /// What its engine says of its cache, for the ingest thread.
    pub usage: Statements,
    /// How far predictions for it are believed.
    pub trust: Trust,
    /// Counters, a row per shard.
    pub stats: Box<[EndpointStats]>,
}

impl EndpointShared {
    /// Fresh state: up until something shows otherwise.
    #[must_use]
    pub fn new(index: EndpointIndex, slot: LoadSlot, shards: usize) -> Self {
        EndpointShared {
            index,
            slot,
            up: AtomicBool::new(true),
            takes_ids: AtomicBool::new(false),
            connect_failures: AtomicU32::new(0),
            downs: AtomicU32::new(0),
            emptied: AtomicU32::new(0),
            origin_errors: AtomicU32::new(0),
            tripped: AtomicBool::new(false),
            heals: AtomicU64::new(0),
            conveys_rank: AtomicBool::new(false),
            kv_blocks: AtomicU64::new(0),
            places: Places::default(),
            engine: EngineLoad::default(),
            slowness: Slowness::default(),
            predictions: Predictions::default(),
            bos: BosEvidence::default(),
            usage: Statements::default(),
            trust: Trust::default(),
            stats: (0..shards).map(|_| EndpointStats::default()).collect(),
        }
    }

    /// Whether requests may go there.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    /// Whether the ids of a chat's prompt may be sent along with it; not before its engine has told its release.
    #[must_use]
    pub fn takes_ids(&self) -> bool {
        self.takes_ids.load(Ordering::Relaxed)
    }

    /// Notes what follows from the release that its engine has told.
    pub fn set_takes_ids(&self, takes: bool) {
        self.takes_ids.store(takes, Ordering::Relaxed);
    }

    /// Whether the breaker is open.
    #[must_use]
    pub fn is_tripped(&self) -> bool {
        self.tripped.load(Ordering::Relaxed)
    }

    /// Opens the breaker, which takes the endpoint out; true if it was closed.
    pub fn trip(&self) -> bool {
        let news = !self.tripped.swap(true, Ordering::Relaxed);
        self.mark_down();
        news
    }

    /// Closes the breaker half: one more answer of status 500 or more opens it again, one below 400 closes it.
    pub fn half_close(&self, breaker_errors: u32) {
        if self.tripped.swap(false, Ordering::Relaxed) {
            self.origin_errors.store(breaker_errors.saturating_sub(1), Ordering::Relaxed);
            self.heals.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Takes the status of an answer into account; true if it is one too many. A refusal (4xx) says nothing of the
    /// endpoint.
    pub fn answered(&self, status: u16, breaker_errors: u32) -> bool {
        match status {
            500.. if breaker_errors > 0 => self.origin_errors.fetch_add(1, Ordering::Relaxed) + 1 >= breaker_errors,
            400.. => false,
            _ => {
                // Read first: all is well most of the time, and a line that is not written stays where it is.
                if self.origin_errors.load(Ordering::Relaxed) != 0 {
                    self.origin_errors.store(0, Ordering::Relaxed);
                }
                false
            }
        }
    }

    /// Whether a header chooses the rank that serves a request.
    #[must_use]
    pub fn conveys_rank(&self) -> bool {
        self.conveys_rank.load(Ordering::Relaxed)
    }

    /// Says whether a header chooses the rank; true if that is news.
    pub fn set_conveys_rank(&self, conveys: bool) -> bool {
        self.conveys_rank.swap(conveys, Ordering::Relaxed) != conveys
    }

    /// Takes the endpoint out; true if it was in.
    pub fn mark_down(&self) -> bool {
        let was_up = self.up.swap(false, Ordering::Relaxed);
        if was_up {
            self.downs.fetch_add(1, Ordering::Relaxed);
        }
        was_up
    }

    /// Changes whenever what was claimed of its caches is void.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.downs.load(Ordering::Relaxed).wrapping_add(self.emptied.load(Ordering::Relaxed))
    }

    /// Takes the endpoint back in; true if it was out.
    pub fn mark_up(&self) -> bool {
        !self.up.swap(true, Ordering::Relaxed)
    }

    /// The row that the shard alone writes.
    #[must_use]
    pub fn stats_of(&self, shard: ShardId) -> &EndpointStats {
        &self.stats[shard.index()]
    }
}

/// Counters of one endpoint on one shard.
#[repr(align(128))]
#[derive(Debug, Default)]
pub struct EndpointStats {
    /// Requests sent.
    pub requests: AtomicU64,
    /// Tier 1.5 hits that ended here.
    pub hits: AtomicU64,
    /// Tier 1.5 hits that spill relief moved here.
    pub spills: AtomicU64,
    /// Tier 1.5 hits that cold seeding moved here.
    pub cold_seeds: AtomicU64,
    /// Prompt tokens predicted to hit.
    pub hit_tokens: AtomicU64,
    /// Connects refused or timed out.
    pub connect_failures: AtomicU64,
    /// Times the shard opened the breaker.
    pub trips: AtomicU64,
    /// Answers whose engine said what it took from its cache, and what was predicted to.
    pub compared: AtomicU64,
    /// Those of them that were wrong: more than one block less than predicted.
    pub compared_wrong: AtomicU64,
    /// Prompt tokens predicted to come from the cache, in the compared answers.
    pub compared_predicted: AtomicU64,
    /// Prompt tokens that came from it, in the compared answers.
    pub compared_cached: AtomicU64,
    /// Prompt tokens predicted to, and not come from it, in the compared answers.
    pub compared_missing: AtomicU64,
}

/// Adds one to a counter that only this thread writes.
pub fn count(counter: &AtomicU64) {
    add(counter, 1);
}

/// Adds to a counter that only this thread writes.
pub fn add(counter: &AtomicU64, more: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_in_a_row_open_the_breaker_and_after_it_closed_half_one_more_does() {
        let endpoint = EndpointShared::new(EndpointIndex(0), LoadSlot(0), 1);
        for (status, opens) in
            [(500, false), (503, false), (200, false), (500, false), (404, false), (500, false), (502, true)]
        {
            assert_eq!(endpoint.answered(status, 3), opens, "{status}");
        }
        assert!(endpoint.trip() && !endpoint.trip() && !endpoint.is_up() && endpoint.is_tripped());
        endpoint.half_close(3);
        assert!(endpoint.mark_up() && !endpoint.is_tripped());
        assert!(endpoint.answered(500, 3), "half closed");
        assert!(!endpoint.answered(200, 3) && !endpoint.answered(500, 3), "closed");
        assert!(!(0..10).any(|_| endpoint.answered(500, 0)), "there is none");
        endpoint.half_close(3);
        assert_eq!(endpoint.heals.load(Ordering::Relaxed), 1);
    }
}
