//! The KV-exact part of a rule.

use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use shards::block::{FIXED_SEED, HashAlgo};
use shards::service::Engine;

use crate::fields::{Fields, Report};

use super::check::{ENGINE_DEFAULT, Facts};
use super::{ChatTemplate, KvDefaults, KvRule, RANKS_MAX, SEED_BYTES_MAX};

/// Fewest tokens per block. vLLM has no smaller page; with less, the index outgrows the cache it mirrors.
const BLOCK_TOKENS_MIN: i64 = 4;
/// Most tokens per block.
const BLOCK_TOKENS_MAX: i64 = 65_536;
/// Largest chat template file, bytes.
const TEMPLATE_BYTES_MAX: u64 = 1 << 20;

/// Engines by the names of `kvEngineType`, with the hash contract each has by default, and whether it is built.
const ENGINES: &[(&str, &str, Option<Engine>)] = &[
    ("vllm", "sha256_cbor", Some(Engine::Vllm)),
    ("sglang", "sha256_sglang", None),
    ("trtllm", "blockhash_trtllm", None),
    ("llamacpp", "", None),
];

/// Hash contracts by the names of `kvHashAlgo`, with the engine each belongs to, and whether it is built.
const ALGOS: &[(&str, &str, Option<HashAlgo>)] = &[
    ("sha256_cbor", "vllm", Some(HashAlgo::Sha256Cbor)),
    ("xxhash_cbor", "vllm", Some(HashAlgo::XxhashCbor)),
    ("sha256_sglang", "sglang", None),
    ("blockhash_trtllm", "trtllm", None),
];

/// The name of a hash contract in rules and answers.
#[must_use]
pub fn algo_name(algo: HashAlgo) -> &'static str {
    match algo {
        HashAlgo::Sha256Cbor => "sha256_cbor",
        HashAlgo::XxhashCbor => "xxhash_cbor",
    }
}

/// Reads every `kv…` option; the values of rules without KV-exact routing are checked and dropped.
pub(super) fn read(
    fields: &mut Fields<'_>,
    report: &mut Report,
    facts: &Facts,
    defaults: &KvDefaults,
) -> (Engine, Option<KvRule>) {
    let (engine_name, engine) = read_engine(fields, report);
    let algo = read_algo(fields, report, engine_name);
    let ranks = read_ranks(fields, report);
    let zmq_port = fields.int_in(report, "kvZmqPort", 1..=65_535).unwrap_or(5557);
    if zmq_port + ranks - 1 > 65_535 {
        let message = format!("{zmq_port} with {ranks} ranks ends beyond port 65535: rank r is at kvZmqPort + r");
        fields.invalid(report, "kvZmqPort", message);
    }
    check_engine_options(fields, report, engine_name, zmq_port, ranks, facts);
    let kv = KvRule {
        block_tokens: read_block_tokens(fields, report),
        algo,
        zmq_port: zmq_port as u16,
        warmup_sec: number(fields, report, "kvWarmupSec", 0, i32::MAX as i64, 30),
        ranks: ranks as u8,
        seed: read_seed(fields, report).or_else(|| defaults.seed.clone()).unwrap_or_else(|| FIXED_SEED.to_owned()),
        chat_template: read_template(fields, report),
        prompts: super::prompts::read(fields, report),
        min_match_tokens: number(fields, report, "kvMinMatchTokens", 0, 4096, defaults.min_match_tokens),
        spill_relief: fields.flag(report, "kvSpillRelief").or(defaults.spill_relief).unwrap_or(true),
        seed_every: number(fields, report, "kvColdstartSeedN", 0, 1_000_000, defaults.seed_every),
        seed_min_blocks: number(fields, report, "kvColdstartMinBlocks", 0, 100_000_000, defaults.seed_min_blocks),
        mean_load_factor: number(fields, report, "kvMeanLoadFactor", 100, 1000, defaults.mean_load_factor),
    };
    (engine, facts.single_pool().then_some(kv))
}

fn number(fields: &mut Fields<'_>, report: &mut Report, name: &str, min: i64, max: i64, default: u32) -> u32 {
    fields.int_in(report, name, min..=max).map_or(default, |value| value as u32)
}

fn read_engine(fields: &mut Fields<'_>, report: &mut Report) -> (&'static str, Engine) {
    let name = fields.text_set(report, "kvEngineType").unwrap_or(ENGINE_DEFAULT.name());
    match ENGINES.iter().find(|(known, ..)| *known == name) {
        Some((known, _, Some(engine))) => (*known, *engine),
        Some((known, _, None)) => {
            fields.not_yet(report, "kvEngineType", format!("{known:?} is not built yet: \"vllm\" is"));
            (*known, ENGINE_DEFAULT)
        }
        None => {
            let message =
                format!("kv-engine-type must be one of \"vllm\", \"sglang\", \"trtllm\", \"llamacpp\", not {name:?}");
            fields.invalid(report, "kvEngineType", message);
            (ENGINE_DEFAULT.name(), ENGINE_DEFAULT)
        }
    }
}

fn read_algo(fields: &mut Fields<'_>, report: &mut Report, engine: &str) -> HashAlgo {
    let fallback = HashAlgo::Sha256Cbor;
    let Some(name) = fields.text_set(report, "kvHashAlgo") else { return fallback };
    let Some((_, owner, algo)) = ALGOS.iter().find(|(known, ..)| *known == name) else {
        let mut message = "kv-hash-algo must be one of \"sha256_cbor\", \"xxhash_cbor\", \"sha256_sglang\", \
                           \"blockhash_trtllm\""
            .to_owned();
        message += &match name {
            "sha256" | "xxhash" => format!(
                ", not {name:?}, which hashes Python pickles: start the engines with --prefix-caching-hash-algo \
                 {name}_cbor and write \"{name}_cbor\""
            ),
            _ => format!(", not {name:?}"),
        };
        fields.invalid(report, "kvHashAlgo", message);
        return fallback;
    };
    if *owner != engine {
        let default = ENGINES.iter().find(|(known, ..)| *known == engine).map_or("", |(_, default, _)| default);
        let message = format!(
            "kv-hash-algo {name:?} is incompatible with kv-engine-type {engine:?} (omit kvHashAlgo to get {default:?})"
        );
        fields.invalid(report, "kvHashAlgo", message);
    }
    // A contract that is not built belongs to an engine that is not, which has been reported.
    algo.unwrap_or(fallback)
}

fn read_ranks(fields: &mut Fields<'_>, report: &mut Report) -> i64 {
    match fields.int(report, "kvDpRankCount") {
        None | Some(0) => 1,
        Some(ranks) if (1..=RANKS_MAX).contains(&ranks) => ranks,
        Some(ranks) => {
            let message = format!("kv-dp-rank-count must be within 1..{RANKS_MAX} (0 = default 1), not {ranks}");
            fields.invalid(report, "kvDpRankCount", message);
            1
        }
    }
}

fn check_engine_options(
    fields: &mut Fields<'_>,
    report: &mut Report,
    engine: &str,
    zmq_port: i64,
    ranks: i64,
    facts: &Facts,
) {
    if engine == "trtllm" && zmq_port != 5557 {
        fields.invalid(report, "kvZmqPort", "kvZmqPort is meaningless for kv-engine-type trtllm: leave it out");
    }
    if engine == "trtllm" && ranks > 1 {
        fields.invalid(report, "kvDpRankCount", "kvDpRankCount is meaningless for kv-engine-type trtllm: leave it out");
    }
    if engine == "llamacpp" && facts.wants_events() {
        fields.invalid(report, "kvExactMode", "kv-engine-type llamacpp publishes no cache events: write kvExactMode 0");
    }
    let bootstrap = fields.int_in(report, "pdBootstrapPort", 0..=65_535).unwrap_or(0);
    if bootstrap != 0 && !(facts.pd && engine == "sglang") {
        let message = "pd-bootstrap-port requires pd_disagg_mode=true and kv-engine-type sglang";
        fields.invalid(report, "pdBootstrapPort", message);
    }
}

fn read_block_tokens(fields: &mut Fields<'_>, report: &mut Report) -> u32 {
    let Some(tokens) = fields.int(report, "kvBlockSize") else { return 16 };
    if (BLOCK_TOKENS_MIN..=BLOCK_TOKENS_MAX).contains(&tokens) {
        return tokens as u32;
    }
    let message = format!(
        "{tokens} is not within {BLOCK_TOKENS_MIN} to {BLOCK_TOKENS_MAX} tokens: write the engines' --block-size \
         (16 unless they were started with another)"
    );
    fields.invalid(report, "kvBlockSize", message);
    16
}

fn read_seed(fields: &mut Fields<'_>, report: &mut Report) -> Option<String> {
    // The empty text is a seed of its own: what vLLM hashes when PYTHONHASHSEED is set to nothing.
    let seed = fields.text(report, "kvNoneHashSeed")?;
    if seed.len() > SEED_BYTES_MAX {
        let message =
            format!("has {} bytes, at most {SEED_BYTES_MAX} are taken: the engines' PYTHONHASHSEED", seed.len());
        fields.invalid(report, "kvNoneHashSeed", message);
        return None;
    }
    Some(seed.to_owned())
}

fn read_template(fields: &mut Fields<'_>, report: &mut Report) -> Option<ChatTemplate> {
    let path = Path::new(fields.text_set(report, "kvChatTemplate")?);
    match read_bounded(path) {
        Ok(text) => Some(ChatTemplate { path: path.to_owned(), text: Arc::from(text) }),
        Err(error) => {
            fields.invalid(report, "kvChatTemplate", format!("cannot read {}: {error}", path.display()));
            None
        }
    }
}

/// The text of a regular file; devices and pipes would block or never end.
fn read_bounded(path: &Path) -> std::io::Result<String> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    let mut text = String::new();
    std::fs::File::open(path)?.take(TEMPLATE_BYTES_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > TEMPLATE_BYTES_MAX {
        let message = format!("it has more than {TEMPLATE_BYTES_MAX} bytes");
        return Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, message));
    }
    Ok(text)
}
