//! What a rule says of how endpoints are chosen, compiled.

use std::time::Duration;

use crate::disagg::auth::AuthKey;
use crate::disagg::ladder::Ladder;

/// Selection of an endpoint where no tier above decides (`sel`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Select {
    /// Left out of the rule: by expected work where the blend is [`Blend::Ttft`], else as 0.
    #[default]
    Expected,
    /// 0: each shard goes round the candidates, starting at an offset of its own.
    RoundRobin,
    /// 1: by the client's address.
    ClientHash,
    /// 2: each in turn, as often as its weight says, as evenly spread as can be.
    Weighted,
    /// 3: a client's address, or its session where the rule names one, stays where it is.
    Persist,
    /// 4: the candidate with the fewest requests in flight.
    LeastConnections,
    /// 8: consistent hashing with bounded load on the prompt's beginning.
    BoundedHash,
    /// 9: the prompt's beginning modulo the number of endpoints.
    PrefixHash,
    /// 10: the prompt's beginning, shares as the weights say.
    WeightedHash,
}

impl Select {
    /// Every selection.
    pub const ALL: [Select; 9] = [
        Select::Expected,
        Select::RoundRobin,
        Select::ClientHash,
        Select::Weighted,
        Select::Persist,
        Select::LeastConnections,
        Select::BoundedHash,
        Select::PrefixHash,
        Select::WeightedHash,
    ];

    /// `sel` in rules; a rule that does not say shows the reference's default.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Select::Expected | Select::RoundRobin => 0,
            Select::ClientHash => 1,
            Select::Weighted => 2,
            Select::Persist => 3,
            Select::LeastConnections => 4,
            Select::BoundedHash => 8,
            Select::PrefixHash => 9,
            Select::WeightedHash => 10,
        }
    }

    /// The name that the reference's command line has for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Select::Expected => "expected",
            Select::RoundRobin => "rr",
            Select::ClientHash => "hash",
            Select::Weighted => "priority",
            Select::Persist => "persist",
            Select::LeastConnections => "lc",
            Select::BoundedHash => "chwbl",
            Select::PrefixHash => "gpuaware",
            Select::WeightedHash => "wrr-hash",
        }
    }

    /// Whether it goes by the hash of the prompt's beginning, else of the conversation.
    #[must_use]
    pub fn asks_prefix(self) -> bool {
        matches!(self, Select::BoundedHash | Select::PrefixHash | Select::WeightedHash)
    }
}

/// How the prompt's beginning is hashed for [`Select::asks_prefix`], and what bounds [`Select::BoundedHash`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixHashing {
    /// How much of the prompt counts, 1 to 3 (`chwbl_prefix_hash_level`).
    pub level: u8,
    /// What else counts, bit by bit: adapter, image, audio, cache_salt, tools, session, RAG template, RAG documents
    /// (`chwbl_prefix_hash_flags`).
    pub flags: u8,
    /// No endpoint gets more than so many percent of the mean load (`chwbl_mean_load_factor`), 100 to 300.
    pub mean_load_factor: u16,
    /// Points of one endpoint on the ring (`chwbl_replication`), 1 to 1,024.
    pub replication: u16,
    /// Bytes of a prompt, or of a user's first message, that count where there is no system prompt or the level is 2
    /// (`LLB_LLM_USER_PREFIX_FALLBACK_LEN`), 1 to 4,096.
    pub user_bytes: u16,
}

impl Default for PrefixHashing {
    fn default() -> Self {
        PrefixHashing { level: 1, flags: 0, mean_load_factor: 125, replication: 100, user_bytes: 256 }
    }
}

/// How Tier 1.5 weighs overlap against load (`LOXILB_KV_LB_MODE`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Blend {
    /// The longest overlap, whatever the load.
    Off,
    /// The longest overlap among holders below their share of the holders' load.
    #[default]
    Hard,
    /// The least sum of missing blocks and load.
    Soft,
    /// As `Hard`, with a factor that grows with load.
    Adaptive,
    /// As `Soft`, with a penalty that grows with load.
    AdaptiveSoft,
    /// The least expected time to first token, over all candidates.
    Ttft,
}

impl Blend {
    /// Every mode.
    pub const ALL: [Blend; 6] =
        [Blend::Off, Blend::Hard, Blend::Soft, Blend::Adaptive, Blend::AdaptiveSoft, Blend::Ttft];

    /// The value in rules and in the environment.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Blend::Off => "off",
            Blend::Hard => "hard",
            Blend::Soft => "soft",
            Blend::Adaptive => "adaptive",
            Blend::AdaptiveSoft => "adaptive-soft",
            Blend::Ttft => "ttft",
        }
    }
}

/// What an endpoint does for its rule (`ep_role`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// 0: whole requests.
    #[default]
    Normal,
    /// 1: prompts.
    Prefill,
    /// 2: answers. It is no candidate of Tier 1.5 and has no inventory.
    Decode,
}

impl Role {
    /// `ep_role`.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Role::Normal => 0,
            Role::Prefill => 1,
            Role::Decode => 2,
        }
    }
}

/// Which requests of a P/D rule go straight to a decode endpoint, which does all of them (`pdBypass`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bypass {
    /// None.
    #[default]
    Off,
    /// Those with a short prompt.
    Short,
    /// These, and those of whose prompt a decode endpoint holds nearly all: events of decode endpoints are read then, into
    /// a table of their own.
    Held,
}

impl Bypass {
    /// Every value.
    pub const ALL: [Bypass; 3] = [Bypass::Off, Bypass::Short, Bypass::Held];

    /// The value in rules.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Bypass::Off => "off",
            Bypass::Short => "short",
            Bypass::Held => "held",
        }
    }
}

/// Prefill and decode on separate endpoints (`pd_disagg_mode`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disagg {
    /// Whether Tier 1, the tree of prompts that were sent, takes part (`pd_cache_aware_mode`).
    pub cache_aware: bool,
    /// Least part of a prompt that Tier 1 must know, percent (`pd_cache_threshold`).
    pub cache_threshold: u8,
    /// Most that the loads of prefill endpoints may differ for Tier 1 to decide, requests (`pd_balance_abs_threshold`).
    pub balance_threshold: u8,
    /// Where SGLang's prefill engines are met (`pdBootstrapPort`).
    pub bootstrap_port: u16,
    /// vLLM's prefill engines bring their blocks, instead of having them fetched (`pdNixlPush`).
    pub push: bool,
    /// Which requests go straight to a decode endpoint (`pdBypass`).
    pub bypass: Bypass,
    /// Tokens that a decode endpoint may be left to compute (`pdBypassTokens`); 0 = as many as it computes sooner than
    /// they would be moved to it, which is learned.
    pub bypass_tokens: u32,
    /// What signs TensorRT-LLM's generation legs (`pdAuthKeyFile`); none = they are not signed.
    pub auth_key: Option<AuthKey>,
    /// Least time that a prefill leg is given, whatever its prompt (`LLB_PD_PREFILL_TIMEOUT_SEC`).
    pub prefill_floor: Duration,
    /// How many requests are let in (`LLB_PD_MAX_INFLIGHT_PER_EP` and its like).
    pub ladder: Ladder,
}

impl Default for Disagg {
    /// As a rule has it that only says `pd_disagg_mode`.
    fn default() -> Self {
        Disagg {
            cache_aware: false,
            cache_threshold: 20,
            balance_threshold: 3,
            bootstrap_port: 8998,
            push: false,
            bypass: Bypass::Off,
            bypass_tokens: 0,
            auth_key: None,
            prefill_floor: Duration::from_secs(30),
            ladder: Ladder::default(),
        }
    }
}

/// Sessions of a service: their endpoints are remembered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sessions {
    /// Where a request names its session (`session_header_name`); none = `X-Conversation-Id`, `X-Session-Id`, the body's
    /// `user`.
    pub source: Option<SessionSource>,
    /// How long a session is remembered after its last request (`pd_session_ttl_sec`).
    pub ttl: Duration,
    /// Sessions that are remembered at once (`pd_session_max`). Beyond it the one that was not used for longest is
    /// forgotten.
    pub max: u32,
}

/// Where a request names its session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionSource {
    /// A header, by its name in lower case.
    Header(Box<str>),
    /// `cookie:NAME`.
    Cookie(Box<str>),
    /// `query:NAME`: a parameter of the path.
    Query(Box<str>),
    /// `basic-auth`: the user of the `Authorization` header.
    BasicAuth,
}
