//! The environment variables of KV-exact routing: read once, at the edge, and passed on as values.

use std::ops::RangeInclusive;
use std::time::Duration;

use shards::disagg::ladder::Ladder;
use shards::route::CAPACITY_REFERENCE_MILLI;
use shards::service::Blend;

use crate::fields::{Kind, Problem};

use super::{RuleFiles, SEED_BYTES_MAX};

/// What `LOXILB_KV_CAP_SUM_MILLI` may be: from an eighth to eight times of what the adaptive blends were tuned on.
pub(super) const CAPACITY_SUM: RangeInclusive<u32> =
    CAPACITY_REFERENCE_MILLI.div_ceil(8)..=8 * CAPACITY_REFERENCE_MILLI;

/// What a rule is read by: what it gets where it says nothing itself (the variable, else the default), and which files it
/// may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvDefaults {
    /// `LLB_KV_NONE_HASH_SEED`, at most 23 bytes; unset or empty = the fixed seed of vLLM 0.29 and later.
    pub seed: Option<String>,
    /// `LLB_KV_MIN_MATCH_TOKENS`, 0 to 4096.
    pub min_match_tokens: u32,
    /// `LOXILB_KV_LB_MODE`, else what `LOXILB_KV_UNIFIED_MODE` means.
    pub blend: Blend,
    /// `LOXILB_KV_THROUGHPUT`, 0 to 1000 percent.
    pub throughput: u32,
    /// `LOXILB_KV_LOAD_PENALTY`, 1 to 100,000.
    pub load_penalty: u32,
    /// `LOXILB_KV_CAP_SUM_MILLI`; unset = the fleet that the adaptive blends were tuned on.
    pub capacity_sum_milli: Option<u32>,
    /// `LOXILB_KV_SPILL_RELIEF`; unset = on in mode 3, off in mode 1.
    pub spill_relief: Option<bool>,
    /// `LOXILB_KV_COLDSTART_SEED_N`.
    pub seed_every: u32,
    /// `LOXILB_KV_COLDSTART_MIN_BLOCKS`.
    pub seed_min_blocks: u32,
    /// `LOXILB_KV_MEAN_LOAD_FACTOR`, 100 to 1000 percent.
    pub mean_load_factor: u32,
    /// `LOXILB_KV_ZERO_HIT_N`, 1 to 1,000,000 repeated prompts without a hit.
    pub zero_hit_every: u32,
    /// `LOXILB_KV_MAX_BLOCKS`, 1,000 to 100,000,000 per endpoint.
    pub max_blocks: u32,
    /// `LLB_PD_ORIGIN_ERR_THRESHOLD`, 0 to 1,000 answers of status 500 or more in a row; 0 = none open the breaker.
    pub origin_errors_max: u32,
    /// `LLB_KV_REPLAY_PORT_OFFSET`; 0 = no replay.
    pub replay_port_offset: u16,
    /// `LOXILB_KV_TRTLLM_POLL_MIN_MS` and `LOXILB_KV_TRTLLM_POLL_MAX_MS`.
    pub drain_poll: DrainPoll,
    /// What P/D rules go by.
    pub pd: PdDefaults,
    /// Where files lie that rules made over the API may name: from the configuration file.
    pub files: RuleFiles,
}

/// What P/D rules go by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PdDefaults {
    /// `LLB_PD_PREFILL_TIMEOUT_SEC`, 1 to 86,400: least time that a prefill leg is given.
    pub prefill_floor: Duration,
    /// `LLB_PD_MAX_INFLIGHT_PER_EP` below 100,000, `LLB_PD_QUEUE_DEPTH_PER_EP` up to 64, `LLB_PD_MAX_PARK_SEC` up to 3,600,
    /// `LLB_PD_MAX_TOTAL_INFLIGHT` below 1,000,000; 0 = off.
    pub ladder: Ladder,
}

impl Default for PdDefaults {
    fn default() -> Self {
        PdDefaults { prefill_floor: Duration::from_secs(30), ladder: Ladder::default() }
    }
}

/// Pauses between two drains of a TensorRT-LLM engine: the shorter while events come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainPoll {
    /// Shortest, 1 to 10,000 ms.
    pub min_ms: u16,
    /// Longest, 1 to 10,000 ms and no less than the shortest.
    pub max_ms: u16,
}

impl DrainPoll {
    /// What either may be, milliseconds.
    pub const RANGE: RangeInclusive<u16> = 1..=10_000;
}

impl Default for KvDefaults {
    fn default() -> Self {
        KvDefaults {
            seed: None,
            min_match_tokens: 16,
            blend: Blend::default(),
            throughput: 200,
            load_penalty: 32,
            capacity_sum_milli: None,
            spill_relief: None,
            seed_every: 16,
            seed_min_blocks: 16,
            mean_load_factor: 175,
            zero_hit_every: 50,
            max_blocks: 1_000_000,
            origin_errors_max: 3,
            replay_port_offset: 1000,
            drain_poll: DrainPoll { min_ms: 5, max_ms: 20 },
            pd: PdDefaults::default(),
            files: RuleFiles::default(),
        }
    }
}

impl KvDefaults {
    /// Reads the variables through `lookup`, which returns a variable's value.
    ///
    /// # Errors
    /// Every variable whose value cannot be used, with its value and its range.
    pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, Vec<Problem>> {
        let mut env = Env { lookup, problems: Vec::new() };
        let default = KvDefaults::default();
        let value = KvDefaults {
            seed: env.seed("LLB_KV_NONE_HASH_SEED"),
            min_match_tokens: env.number("LLB_KV_MIN_MATCH_TOKENS", 0, 4096, default.min_match_tokens),
            blend: env.blend(default.blend),
            throughput: env.number("LOXILB_KV_THROUGHPUT", 0, 1000, default.throughput),
            load_penalty: env.number("LOXILB_KV_LOAD_PENALTY", 1, 100_000, default.load_penalty),
            capacity_sum_milli: env.optional("LOXILB_KV_CAP_SUM_MILLI", CAPACITY_SUM),
            spill_relief: env.switch("LOXILB_KV_SPILL_RELIEF"),
            seed_every: env.number("LOXILB_KV_COLDSTART_SEED_N", 0, 1_000_000, default.seed_every),
            seed_min_blocks: env.number("LOXILB_KV_COLDSTART_MIN_BLOCKS", 0, 100_000_000, default.seed_min_blocks),
            mean_load_factor: env.number("LOXILB_KV_MEAN_LOAD_FACTOR", 100, 1000, default.mean_load_factor),
            zero_hit_every: env.number("LOXILB_KV_ZERO_HIT_N", 1, 1_000_000, default.zero_hit_every),
            max_blocks: env.number("LOXILB_KV_MAX_BLOCKS", 1000, 100_000_000, default.max_blocks),
            origin_errors_max: env.number("LLB_PD_ORIGIN_ERR_THRESHOLD", 0, 1000, default.origin_errors_max),
            replay_port_offset: env.short("LLB_KV_REPLAY_PORT_OFFSET", 0..=65_535, default.replay_port_offset),
            drain_poll: env.drain_poll(default.drain_poll),
            pd: env.pd(),
            files: default.files,
        };
        if env.problems.is_empty() { Ok(value) } else { Err(env.problems) }
    }
}

struct Env<F> {
    lookup: F,
    problems: Vec<Problem>,
}

impl<F: Fn(&str) -> Option<String>> Env<F> {
    fn problem(&mut self, name: &str, message: String) {
        self.problems.push(Problem { kind: Kind::Invalid, line: None, key: name.to_owned(), message });
    }

    fn set(&self, name: &str) -> Option<String> {
        (self.lookup)(name).filter(|text| !text.is_empty())
    }

    fn number(&mut self, name: &str, min: u32, max: u32, default: u32) -> u32 {
        self.optional(name, min..=max).unwrap_or(default)
    }

    fn optional(&mut self, name: &str, range: RangeInclusive<u32>) -> Option<u32> {
        let text = self.set(name)?;
        let value = text.parse().ok().filter(|value| range.contains(value));
        if value.is_none() {
            let (min, max) = (range.start(), range.end());
            self.problem(name, format!("{text:?} is not a whole number within {min} to {max}"));
        }
        value
    }

    /// The older switch counts only where the mode is not set.
    fn blend(&mut self, default: Blend) -> Blend {
        const NAME: &str = "LOXILB_KV_LB_MODE";
        let unified = self.switch("LOXILB_KV_UNIFIED_MODE");
        let Some(text) = self.set(NAME) else {
            return if unified == Some(false) { Blend::Off } else { default };
        };
        Blend::ALL.into_iter().find(|blend| blend.name() == text).unwrap_or_else(|| {
            let names = Blend::ALL.map(Blend::name).join(", ");
            self.problem(NAME, format!("{text:?} is none of {names}"));
            default
        })
    }

    fn short(&mut self, name: &str, range: RangeInclusive<u16>, default: u16) -> u16 {
        let value = self.number(name, (*range.start()).into(), (*range.end()).into(), default.into());
        u16::try_from(value).unwrap_or(default)
    }

    fn drain_poll(&mut self, default: DrainPoll) -> DrainPoll {
        const MIN: &str = "LOXILB_KV_TRTLLM_POLL_MIN_MS";
        let min_ms = self.short(MIN, DrainPoll::RANGE, default.min_ms);
        // One that is given alone moves the other along.
        let max_ms = self.short("LOXILB_KV_TRTLLM_POLL_MAX_MS", DrainPoll::RANGE, default.max_ms.max(min_ms));
        if min_ms > max_ms && min_ms != default.min_ms {
            self.problem(MIN, format!("{min_ms} is more than LOXILB_KV_TRTLLM_POLL_MAX_MS, {max_ms}"));
        }
        DrainPoll { min_ms: min_ms.min(max_ms), max_ms }
    }

    fn pd(&mut self) -> PdDefaults {
        let floor = self.number("LLB_PD_PREFILL_TIMEOUT_SEC", 1, 86_400, 30);
        let park = self.number("LLB_PD_MAX_PARK_SEC", 0, 3_600, 0);
        let ladder = Ladder {
            per_endpoint: self.number("LLB_PD_MAX_INFLIGHT_PER_EP", 0, 99_999, 0),
            queue: self.number("LLB_PD_QUEUE_DEPTH_PER_EP", 0, 64, 0),
            park: Duration::from_secs(park.into()),
            total: self.number("LLB_PD_MAX_TOTAL_INFLIGHT", 0, 999_999, 0),
        };
        PdDefaults { prefill_floor: Duration::from_secs(floor.into()), ladder }
    }

    fn switch(&mut self, name: &str) -> Option<bool> {
        let text = self.set(name)?;
        match text.to_ascii_lowercase().as_str() {
            "1" | "true" | "on" | "yes" => Some(true),
            "0" | "false" | "off" | "no" => Some(false),
            _ => {
                self.problem(name, format!("{text:?} is none of 1, true, on, yes, 0, false, off, no"));
                None
            }
        }
    }

    fn seed(&mut self, name: &str) -> Option<String> {
        let text = self.set(name)?;
        if text.len() > SEED_BYTES_MAX {
            self.problem(name, format!("{text:?} has {} bytes, at most {SEED_BYTES_MAX} are taken", text.len()));
            return None;
        }
        Some(text)
    }
}
