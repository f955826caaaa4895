//! What the numbers of a rule and of the environment may be: once for the checks, for the page of options and for the
//! OpenAPI document.

use std::ops::RangeInclusive;
use std::time::Duration;

use shards::claims::CLAIM_MAX;
use shards::route::CAPACITY_REFERENCE_MILLI;

use super::RANKS_MAX;

/// Ends included.
pub type Range = RangeInclusive<i64>;

/// Any number that a field of the reference's 32 bits holds.
pub const U32: Range = 0..=u32::MAX as i64;
/// The same of those with a sign.
pub const I32: Range = 0..=i32::MAX as i64;
/// A port.
pub const PORT: Range = 1..=65_535;
/// A port, or 0 for none.
pub const PORT_OR_NONE: Range = 0..=65_535;
/// A part, percent.
pub const PERCENT: Range = 0..=100;

/// `mode`.
pub const MODE: Range = 0..=5;
/// `sel`.
pub const SEL: Range = 0..=10;
/// `oper`.
pub const OPER: Range = 0..=2;
/// `security`.
pub const SECURITY: Range = 0..=2;
/// `probeRetries`.
pub const PROBE_RETRIES: Range = 0..=100;
/// `weight`.
pub const WEIGHT: Range = 0..=65_535;
/// `ep_role`.
pub const ROLE: Range = 0..=2;
/// `chwbl_prefix_hash_level`.
pub const HASH_LEVEL: Range = 1..=3;
/// `chwbl_prefix_hash_flags`.
pub const HASH_FLAGS: Range = 0..=255;
/// `chwbl_mean_load_factor`, percent.
pub const HASH_LOAD_FACTOR: Range = 100..=300;
/// `chwbl_replication`.
pub const HASH_REPLICATION: Range = 1..=1024;
/// Bytes of a prompt that count for a hash (`LLB_LLM_USER_PREFIX_FALLBACK_LEN`).
pub const HASH_BYTES: Range = 1..=4096;
/// `pd_session_max`.
pub const SESSIONS: Range = 1..=1 << 20;
/// `pd_balance_abs_threshold`.
pub const BALANCE: Range = 0..=255;
/// Nodes that a tree of texts may have: with more, the search for the oldest would hold a shard up.
pub const TRIE_NODES: Range = 64..=65_536;
/// `pdBypassTokens`.
pub const BYPASS_TOKENS: Range = 0..=1 << 20;

/// `kvExactMode`.
pub const EXACT_MODE: Range = 0..=3;
/// `kvBlockSize`. vLLM has no smaller page; with less, the index outgrows the cache it mirrors.
pub const BLOCK_TOKENS: Range = 4..=65_536;
/// The same of SGLang, whose pages are single tokens unless something asks for more.
pub const BLOCK_TOKENS_SGLANG: Range = 1..=65_536;
/// `kvDpRankCount`; 0 means the default.
pub const RANKS: Range = 0..=RANKS_MAX;
/// `kvMinMatchTokens`.
pub const MIN_MATCH: Range = 0..=4096;
/// `kvThroughput`, percent.
pub const THROUGHPUT: Range = 0..=1000;
/// `kvLoadPenalty`.
pub const LOAD_PENALTY: Range = 1..=100_000;
/// `kvCapSumMilli`: from an eighth to eight times of what the adaptive blends were tuned on.
pub const CAPACITY_SUM: Range = CAPACITY_REFERENCE_MILLI.div_ceil(8) as i64..=8 * CAPACITY_REFERENCE_MILLI as i64;
/// `kvColdstartSeedN`.
pub const SEED_EVERY: Range = 0..=1_000_000;
/// `kvColdstartMinBlocks`.
pub const SEED_MIN_BLOCKS: Range = 0..=100_000_000;
/// `kvMeanLoadFactor`, percent.
pub const MEAN_LOAD_FACTOR: Range = 100..=1000;
/// `kvZeroHitN`.
pub const ZERO_HITS: Range = 1..=1_000_000;
/// `kvClaimMs`.
pub const CLAIM_MS: Range = 0..=millis(CLAIM_MAX);
/// `kvTrtllmPollMinMs` and `kvTrtllmPollMaxMs`.
pub const POLL_MS: Range = 1..=10_000;
/// `LOXILB_KV_MAX_BLOCKS`.
pub const MAX_BLOCKS: Range = 1000..=100_000_000;

const fn millis(time: Duration) -> i64 {
    time.as_millis() as i64
}
