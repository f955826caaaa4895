//! The environment variables of KV-exact routing: read once, at the edge, and passed on as values.

use std::cell::RefCell;
use std::time::Duration;

use shards::disagg::ladder::Ladder;
use shards::service::{Blend, PrefixHashing};

use crate::fields::{Kind, Problem};

use super::ranges::{self, Range};
use super::{RuleFiles, SEED_BYTES_MAX};

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
    /// `LLB_LLM_USER_PREFIX_FALLBACK_LEN`, 1 to 4,096 bytes.
    pub hash_bytes: u16,
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
            hash_bytes: PrefixHashing::default().user_bytes,
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
            min_match_tokens: env.number("LLB_KV_MIN_MATCH_TOKENS", ranges::MIN_MATCH, default.min_match_tokens),
            blend: env.blend(default.blend),
            throughput: env.number("LOXILB_KV_THROUGHPUT", ranges::THROUGHPUT, default.throughput),
            load_penalty: env.number("LOXILB_KV_LOAD_PENALTY", ranges::LOAD_PENALTY, default.load_penalty),
            capacity_sum_milli: env.optional("LOXILB_KV_CAP_SUM_MILLI", ranges::CAPACITY_SUM),
            spill_relief: env.switch("LOXILB_KV_SPILL_RELIEF"),
            seed_every: env.number("LOXILB_KV_COLDSTART_SEED_N", ranges::SEED_EVERY, default.seed_every),
            seed_min_blocks: env.number(
                "LOXILB_KV_COLDSTART_MIN_BLOCKS",
                ranges::SEED_MIN_BLOCKS,
                default.seed_min_blocks,
            ),
            mean_load_factor: env.number(
                "LOXILB_KV_MEAN_LOAD_FACTOR",
                ranges::MEAN_LOAD_FACTOR,
                default.mean_load_factor,
            ),
            zero_hit_every: env.number("LOXILB_KV_ZERO_HIT_N", ranges::ZERO_HITS, default.zero_hit_every),
            max_blocks: env.number("LOXILB_KV_MAX_BLOCKS", ranges::MAX_BLOCKS, default.max_blocks),
            origin_errors_max: env.number("LLB_PD_ORIGIN_ERR_THRESHOLD", 0..=1000, default.origin_errors_max),
            hash_bytes: env.short("LLB_LLM_USER_PREFIX_FALLBACK_LEN", ranges::HASH_BYTES, default.hash_bytes),
            replay_port_offset: env.short(
                "LLB_KV_REPLAY_PORT_OFFSET",
                ranges::PORT_OR_NONE,
                default.replay_port_offset,
            ),
            drain_poll: env.drain_poll(default.drain_poll),
            pd: env.pd(),
            files: default.files,
        };
        if env.problems.is_empty() { Ok(value) } else { Err(env.problems) }
    }
}

/// Beginnings of the names that the reference's variables have.
const FAMILIES: [&str; 2] = ["LLB_", "LOXILB_"];

/// Why variables of the reference do nothing here, by the beginnings of their names.
const WITHOUT_EFFECT: &[(&str, &str)] = &[
    ("LLB_FC_", "admission control is not built yet"),
    ("LOXILB_AI_CTRL_", "no controller outside of the gateway is asked"),
    ("LLB_KV_HASH_DEBUG", "`kvlane hash` and `kvlane explain` show a prompt's keys"),
    ("LLB_KV_LOADGUARD", "decisions say their loads: x-kvlane-explain, or routeHeader"),
    ("LOXILB_KV_TLOAD_LOG", "decisions say their loads: x-kvlane-explain, or routeHeader"),
];

impl KvDefaults {
    /// What is set among the names of all variables and looks as if a rule could go by it, while none does: what the
    /// reference has and this gateway has not, and what is misspelt.
    pub fn unused(names: impl Iterator<Item = String>) -> Vec<Problem> {
        let known = RefCell::new(Vec::new());
        // Without any of them all is in range.
        let _defaults = Self::from_env(|name| {
            known.borrow_mut().push(name.to_owned());
            None
        });
        let known = known.into_inner();
        let is_ours = |name: &String| FAMILIES.iter().any(|family| name.starts_with(family)) && !known.contains(name);
        let mut unused: Vec<Problem> = names
            .filter(is_ours)
            .map(|key| {
                let why = WITHOUT_EFFECT.iter().find(|(begin, _)| key.starts_with(begin));
                let message = match why {
                    Some((_, why)) => format!("is set and has no effect: {why}"),
                    None => "is set and has no effect: no variable of this name is known".to_owned(),
                };
                Problem { kind: Kind::Invalid, line: None, key, message }
            })
            .collect();
        unused.sort_by(|one, other| one.key.cmp(&other.key));
        unused
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

    fn number(&mut self, name: &str, range: Range, default: u32) -> u32 {
        self.optional(name, range).unwrap_or(default)
    }

    /// Numbers are of 32 bits, and no range goes beyond that.
    fn optional(&mut self, name: &str, range: Range) -> Option<u32> {
        let text = self.set(name)?;
        let value = text.parse().ok().filter(|value: &u32| range.contains(&i64::from(*value)));
        if value.is_none() {
            let (min, max) = range.into_inner();
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

    fn short(&mut self, name: &str, range: Range, default: u16) -> u16 {
        let value = self.number(name, range, default.into());
        u16::try_from(value).unwrap_or(default)
    }

    fn drain_poll(&mut self, default: DrainPoll) -> DrainPoll {
        const MIN: &str = "LOXILB_KV_TRTLLM_POLL_MIN_MS";
        let min_ms = self.short(MIN, ranges::POLL_MS, default.min_ms);
        // One that is given alone moves the other along.
        let max_ms = self.short("LOXILB_KV_TRTLLM_POLL_MAX_MS", ranges::POLL_MS, default.max_ms.max(min_ms));
        if min_ms > max_ms && min_ms != default.min_ms {
            self.problem(MIN, format!("{min_ms} is more than LOXILB_KV_TRTLLM_POLL_MAX_MS, {max_ms}"));
        }
        DrainPoll { min_ms: min_ms.min(max_ms), max_ms }
    }

    fn pd(&mut self) -> PdDefaults {
        let floor = self.number("LLB_PD_PREFILL_TIMEOUT_SEC", 1..=86_400, 30);
        let park = self.number("LLB_PD_MAX_PARK_SEC", 0..=3_600, 0);
        let ladder = Ladder {
            per_endpoint: self.number("LLB_PD_MAX_INFLIGHT_PER_EP", 0..=99_999, 0),
            queue: self.number("LLB_PD_QUEUE_DEPTH_PER_EP", 0..=64, 0),
            park: Duration::from_secs(park.into()),
            total: self.number("LLB_PD_MAX_TOTAL_INFLIGHT", 0..=999_999, 0),
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
