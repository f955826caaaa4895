//! What is counted: a row per shard, written by that shard alone.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use crate::disagg::stats::PdStats;
use crate::route::Tier;

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

/// Counters of one endpoint on one shard.
#[repr(align(128))]
#[derive(Debug, Default)]
pub struct EndpointStats {
    /// Requests sent.
    pub requests: AtomicU64,
    /// Bytes of requests that it answered, heads included.
    pub bytes_in: AtomicU64,
    /// Bytes of its answers that clients were sent, heads included.
    pub bytes_out: AtomicU64,
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
