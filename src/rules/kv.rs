//! The KV-exact part of a rule.

use std::sync::Arc;

use shards::block::FIXED_SEED;
use shards::service::{Blend, Engine, MediumWeights};

use crate::fields::{Fields, Report, Value};

use super::check::{ENGINE_DEFAULT, Facts};
use super::files::Purpose;
use super::ranges::{self, Range};
use super::{ChatTemplate, DrainPoll, KvAlgo, KvDefaults, KvRule, RANKS_MAX, RuleFile, SEED_BYTES_MAX};

/// `kvZmqPort` of rules that do not say.
const ZMQ_PORT: i64 = 5557;
/// `kvWarmupSec` of rules that do not say.
const WARMUP_SEC: u32 = 30;

/// `kvClaimMs` of rules that do not say.
const CLAIM_MS: u32 = 2_000;

/// Largest chat template file, bytes.
const TEMPLATE_BYTES_MAX: u64 = 1 << 20;

/// Options that say something only where cache events are followed.
pub(super) const KV_OPTIONS: [&str; 27] = [
    "kvBlockSize",
    "kvHashAlgo",
    "kvZmqPort",
    "kvWarmupSec",
    "kvDpRankCount",
    "kvNoneHashSeed",
    "kvChatTemplate",
    "kvChatTemplateKwargs",
    "kvAddBos",
    "kvEngineRender",
    "kvSendPromptIds",
    "kvAdapters",
    "kvMinMatchTokens",
    "kvLbMode",
    "kvThroughput",
    "kvLoadPenalty",
    "kvCapSumMilli",
    "kvZeroHitN",
    "kvClaimMs",
    "kvSpillRelief",
    "kvColdstartSeedN",
    "kvColdstartMinBlocks",
    "kvMeanLoadFactor",
    "kvReplayPortOffset",
    "kvTrtllmPollMinMs",
    "kvTrtllmPollMaxMs",
    "kvMediumWeights",
];

/// Options that ask for cache events, or for what goes with them, by themselves.
const KV_SWITCHES: [&str; 4] = ["kvExactMode", "kvHashAlgoDefault", "kvExactApiMode", "kvModelProfile"];

/// Options that only mean something for prefill and decode pools.
const PD_OPTIONS: [&str; 5] =
    ["pd_disagg_mode", "pd_cache_aware_mode", "pdBootstrapPort", "pd_cache_threshold", "pd_balance_abs_threshold"];

/// Reads every `kv…` option; the values of rules without KV-exact routing are checked and dropped.
pub(super) fn read(
    fields: &mut Fields<'_>,
    report: &mut Report,
    facts: &Facts,
    defaults: &KvDefaults,
) -> (Engine, Option<KvRule>) {
    let engine = read_engine(fields, report);
    let Some(default_algo) = KvAlgo::default_of(engine) else {
        refuse_options(fields, report, engine);
        return (engine, None);
    };
    let algo = read_algo(fields, report, engine);
    let ranks = read_ranks(fields, report, engine);
    let zmq_port = read_zmq_port(fields, report, engine, ranks);
    let kv = KvRule {
        block_tokens: read_block_tokens(fields, report, engine),
        algo: algo.unwrap_or(default_algo),
        algo_given: algo.is_some(),
        zmq_port: zmq_port as u16,
        warmup_sec: read_warmup(fields, report),
        ranks: ranks as u8,
        seed: read_seed(fields, report, engine, defaults),
        chat_template: read_template(fields, report, defaults),
        prompts: super::prompts::read(fields, report, engine),
        adapters: super::adapters::read(fields, report),
        min_match_tokens: number(fields, report, "kvMinMatchTokens", ranges::MIN_MATCH, defaults.min_match_tokens),
        blend: read_blend(fields, report, defaults),
        throughput: number(fields, report, "kvThroughput", ranges::THROUGHPUT, defaults.throughput),
        load_penalty: number(fields, report, "kvLoadPenalty", ranges::LOAD_PENALTY, defaults.load_penalty),
        capacity_sum_milli: fields
            .int_in(report, "kvCapSumMilli", ranges::CAPACITY_SUM)
            .map(|sum| sum as u32)
            .or(defaults.capacity_sum_milli),
        // A cold prompt that leaves its queue costs a pool of prefill endpoints more than it saves.
        spill_relief: fields.flag(report, "kvSpillRelief").or(defaults.spill_relief).unwrap_or(!facts.pd),
        seed_every: number(fields, report, "kvColdstartSeedN", ranges::SEED_EVERY, defaults.seed_every),
        seed_min_blocks: number(
            fields,
            report,
            "kvColdstartMinBlocks",
            ranges::SEED_MIN_BLOCKS,
            defaults.seed_min_blocks,
        ),
        zero_hit_every: number(fields, report, "kvZeroHitN", ranges::ZERO_HITS, defaults.zero_hit_every),
        claim_ms: number(fields, report, "kvClaimMs", ranges::CLAIM_MS, CLAIM_MS),
        mean_load_factor: number(
            fields,
            report,
            "kvMeanLoadFactor",
            ranges::MEAN_LOAD_FACTOR,
            defaults.mean_load_factor,
        ),
        replay_port_offset: read_replay_offset(fields, report, defaults),
        drain_poll: read_drain_poll(fields, report, engine, defaults),
        weights: read_weights(fields, report),
    };
    if kv.algo == KvAlgo::XxhashCbor && kv.seed.is_none() && facts.is_exact() {
        fields.warn(
            report,
            "kvHashAlgo",
            "xxhash_cbor: engines without PYTHONHASHSEED hash a random seed, so that their keys cannot be known: start \
             them with PYTHONHASHSEED=0 and write kvNoneHashSeed \"0\"",
        );
    }
    (engine, facts.is_exact().then_some(kv))
}

/// Refuses whatever asks for cache events or for pools of an engine that has neither.
fn refuse_options(fields: &mut Fields<'_>, report: &mut Report, engine: Engine) {
    let engine = engine.name();
    let no_events = "it publishes no cache events, so its endpoints are chosen by sel alone";
    let why = [
        (&KV_SWITCHES[..], no_events),
        (&KV_OPTIONS[..], no_events),
        (&PD_OPTIONS[..], "it has no prefill and decode roles"),
    ];
    for (options, reason) in why {
        for name in options {
            let Some(node) = fields.take(name) else { continue };
            if !matches!(node.value, Value::Int(0) | Value::Bool(false)) && node.value != Value::Text(String::new()) {
                let message = format!("is refused for kv-engine-type {engine}: {reason}; leave {name} out");
                fields.invalid(report, name, message);
            }
        }
    }
}

fn read_blend(fields: &mut Fields<'_>, report: &mut Report, defaults: &KvDefaults) -> Blend {
    let Some(name) = fields.text_set(report, "kvLbMode") else { return defaults.blend };
    Blend::ALL.into_iter().find(|blend| blend.name() == name).unwrap_or_else(|| {
        let names = Blend::ALL.map(|blend| format!("{:?}", blend.name())).join(", ");
        fields.invalid(report, "kvLbMode", format!("{name:?} is none of {names}"));
        defaults.blend
    })
}

fn number(fields: &mut Fields<'_>, report: &mut Report, name: &str, range: Range, default: u32) -> u32 {
    fields.int_in(report, name, range).map_or(default, |value| value as u32)
}

fn read_engine(fields: &mut Fields<'_>, report: &mut Report) -> Engine {
    let name = fields.text_set(report, "kvEngineType").unwrap_or(ENGINE_DEFAULT.name());
    Engine::ALL.into_iter().find(|engine| engine.name() == name).unwrap_or_else(|| {
        let message =
            format!("kv-engine-type must be one of \"vllm\", \"sglang\", \"trtllm\", \"llamacpp\", not {name:?}");
        fields.invalid(report, "kvEngineType", message);
        ENGINE_DEFAULT
    })
}

/// The algorithm that the rule itself names.
fn read_algo(fields: &mut Fields<'_>, report: &mut Report, engine: Engine) -> Option<KvAlgo> {
    // A readback says so beside the default it shows, so that it can be posted again.
    let is_default = fields.flag(report, "kvHashAlgoDefault") == Some(true);
    let name = fields.text_set(report, "kvHashAlgo")?;
    let Some(algo) = KvAlgo::ALL.into_iter().find(|algo| algo.name() == name) else {
        let instead = match name {
            "sha256" => {
                ", which hashes Python pickles: start the engines with --prefix-caching-hash-algo sha256_cbor \
                         and write \"sha256_cbor\", or leave kvHashAlgo out and their own algorithm is followed"
            }
            "xxhash" => {
                ", which hashes Python pickles: start the engines with --prefix-caching-hash-algo xxhash_cbor \
                         and write \"xxhash_cbor\", or leave kvHashAlgo out and their own algorithm is followed"
            }
            "xxhash128" => ", which is the digest of vLLM's xxhash_cbor: write \"xxhash_cbor\"",
            _ => "",
        };
        let message = format!(
            "kv-hash-algo must be one of \"sha256_cbor\", \"xxhash_cbor\", \"sha256_sglang\", \"blockhash_trtllm\", \
             not {name:?}{instead}"
        );
        fields.invalid(report, "kvHashAlgo", message);
        return None;
    };
    if algo.engine() != engine {
        let (engine, default) = (engine.name(), KvAlgo::default_of(engine).map_or("", KvAlgo::name));
        let message = format!(
            "kv-hash-algo {name:?} is incompatible with kv-engine-type {engine:?} (omit kvHashAlgo to get {default:?})"
        );
        fields.invalid(report, "kvHashAlgo", message);
        return None;
    }
    (!is_default).then_some(algo)
}

fn read_ranks(fields: &mut Fields<'_>, report: &mut Report, engine: Engine) -> i64 {
    let ranks = match fields.int(report, "kvDpRankCount") {
        None | Some(0) => 1,
        Some(ranks) if (1..=RANKS_MAX).contains(&ranks) => ranks,
        Some(ranks) => {
            let message = format!("kv-dp-rank-count must be within 1..{RANKS_MAX} (0 = default 1), not {ranks}");
            fields.invalid(report, "kvDpRankCount", message);
            1
        }
    };
    if ranks > 1 && engine == Engine::Vllm {
        let message = format!(
            "{ranks}: rank r is expected at kvZmqPort + r, where vLLM's --data-parallel-size publishes; servers of one \
             rank each are endpoints of their own"
        );
        fields.warn(report, "kvDpRankCount", message);
    }
    if ranks > 1 && engine == Engine::Trtllm {
        let message =
            "kvDpRankCount is meaningless for kv-engine-type trtllm, whose events name their rank: leave it out";
        fields.invalid(report, "kvDpRankCount", message);
        return 1;
    }
    ranks
}

fn read_zmq_port(fields: &mut Fields<'_>, report: &mut Report, engine: Engine, ranks: i64) -> i64 {
    if engine == Engine::Trtllm {
        // The reference lets its own default pass.
        if !matches!(fields.int(report, "kvZmqPort"), None | Some(0 | ZMQ_PORT)) {
            let message = "kvZmqPort is meaningless for kv-engine-type trtllm, whose events come from its serving \
                           port: leave it out";
            fields.invalid(report, "kvZmqPort", message);
        }
        return ZMQ_PORT;
    }
    let port = fields.int_in(report, "kvZmqPort", ranges::PORT).unwrap_or(ZMQ_PORT);
    if port + ranks - 1 > 65_535 {
        let message = format!("{port} with {ranks} ranks ends beyond port 65535: rank r is at kvZmqPort + r");
        fields.invalid(report, "kvZmqPort", message);
    }
    port
}

fn read_replay_offset(fields: &mut Fields<'_>, report: &mut Report, defaults: &KvDefaults) -> u16 {
    number(fields, report, "kvReplayPortOffset", ranges::PORT_OR_NONE, defaults.replay_port_offset.into()) as u16
}

fn read_drain_poll(fields: &mut Fields<'_>, report: &mut Report, engine: Engine, defaults: &KvDefaults) -> DrainPoll {
    let [min, max] =
        ["kvTrtllmPollMinMs", "kvTrtllmPollMaxMs"].map(|name| fields.int_in(report, name, ranges::POLL_MS));
    if engine != Engine::Trtllm && (min.is_some() || max.is_some()) {
        let name = if min.is_some() { "kvTrtllmPollMinMs" } else { "kvTrtllmPollMaxMs" };
        let message = format!("is accepted and has no effect: kv-engine-type {} is not polled", engine.name());
        fields.warn(report, name, message);
    }
    let DrainPoll { min_ms, max_ms } = defaults.drain_poll;
    // One that is given alone moves the other along.
    match (min.map(|ms| ms as u16), max.map(|ms| ms as u16)) {
        (Some(min), Some(max)) if min > max => {
            fields.invalid(report, "kvTrtllmPollMinMs", format!("{min} is more than kvTrtllmPollMaxMs, {max}"));
            defaults.drain_poll
        }
        (min, max) => {
            let min_ms = min.unwrap_or(max.map_or(min_ms, |max| min_ms.min(max)));
            DrainPoll { min_ms, max_ms: max.unwrap_or(max_ms.max(min_ms)) }
        }
    }
}

/// Percent of a block in device memory, by medium. What a rule does not name is worth nothing.
fn read_weights(fields: &mut Fields<'_>, report: &mut Report) -> MediumWeights {
    let Some(mut table) = fields.table(report, "kvMediumWeights") else { return MediumWeights::default() };
    let [cpu, storage] =
        ["cpu", "storage"].map(|name| table.int_in(report, name, ranges::PERCENT).map_or(0, |percent| percent as u8));
    if storage > cpu {
        let message = format!("{storage} is more than cpu, {cpu}: what storage holds comes through the host's memory");
        table.invalid(report, "storage", message);
    }
    table.finish(report);
    MediumWeights { cpu, storage }
}

fn read_warmup(fields: &mut Fields<'_>, report: &mut Report) -> u32 {
    let seconds = number(fields, report, "kvWarmupSec", ranges::I32, WARMUP_SEC);
    if seconds != WARMUP_SEC {
        let message =
            format!("{seconds} is accepted and has no effect: a block counts from the moment it is announced");
        fields.warn(report, "kvWarmupSec", message);
    }
    seconds
}

fn read_block_tokens(fields: &mut Fields<'_>, report: &mut Report, engine: Engine) -> u32 {
    let Some(tokens) = fields.int(report, "kvBlockSize") else { return 16 };
    let (range, option) = match engine {
        Engine::Sglang => (ranges::BLOCK_TOKENS_SGLANG, "--page-size"),
        Engine::Trtllm => (ranges::BLOCK_TOKENS, "tokens_per_block"),
        Engine::Vllm | Engine::Llamacpp => (ranges::BLOCK_TOKENS, "--block-size"),
    };
    if range.contains(&tokens) {
        return tokens as u32;
    }
    let (min, max) = range.into_inner();
    let message = format!("{tokens} is not within {min} to {max} tokens: write the engines' {option} (default 16)");
    fields.invalid(report, "kvBlockSize", message);
    16
}

/// The seed in force; none = the engines were given none.
fn read_seed(fields: &mut Fields<'_>, report: &mut Report, engine: Engine, defaults: &KvDefaults) -> Option<String> {
    // The empty text is a seed of its own: what vLLM hashes when PYTHONHASHSEED is set to nothing.
    let own = fields.text(report, "kvNoneHashSeed");
    if engine != Engine::Vllm {
        if own.is_some_and(|seed| !seed.is_empty()) {
            let message = format!("is accepted and has no effect: kv-engine-type {} hashes no seed", engine.name());
            fields.warn(report, "kvNoneHashSeed", message);
        }
        return None;
    }
    if let Some(seed) = own.filter(|seed| seed.len() > SEED_BYTES_MAX) {
        let message =
            format!("has {} bytes, at most {SEED_BYTES_MAX} are taken: the engines' PYTHONHASHSEED", seed.len());
        fields.invalid(report, "kvNoneHashSeed", message);
        return None;
    }
    // No engine can be started with the fixed seed as its own, so whoever names it means none.
    own.map(str::to_owned).or_else(|| defaults.seed.clone()).filter(|seed| seed != FIXED_SEED)
}

fn read_template(fields: &mut Fields<'_>, report: &mut Report, defaults: &KvDefaults) -> Option<ChatTemplate> {
    let path = fields.text_set(report, "kvChatTemplate")?;
    let file = RuleFile::named(path, report.dialect, &defaults.files, Purpose::Template);
    let problem = match file.read(TEMPLATE_BYTES_MAX).map(String::from_utf8) {
        Ok(Ok(text)) => return Some(ChatTemplate { path: file.path().to_owned(), text: Arc::from(text) }),
        Ok(Err(_)) => format!("{} is not UTF-8", file.path().display()),
        Err(error) => error.to_string(),
    };
    fields.invalid(report, "kvChatTemplate", problem);
    None
}
