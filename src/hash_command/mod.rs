//! `kvlane hash`: token ids in, the block keys of an engine's contract out.
//!
//! What it prints is what that engine's events carry for the same tokens, so that a mismatch can be found by eye: one
//! line per full block, the key as an unsigned decimal and in hexadecimal. Tokens that fill no block (or, with
//! lookahead, are not yet followed by what the hash needs) have no key and print nothing.

#[cfg(test)]
mod tests;

use std::io::{Read, Write};
use std::num::NonZeroU32;

use clap::{Args, ValueEnum};
use shards::block::vllm::{Algorithm, LOOKAHEAD_SINCE, NoneHash, Tagging};
use shards::block::{Contract, ContractError, KeyStream, Lora, PromptExtras, Release, sglang};

/// Bytes read from standard input at most. Beyond it: [`HashError::TooLong`]. Several million tokens fit.
const INPUT_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// Newest vLLM release whose contract is known.
const VLLM_NEWEST: Release = Release::new(0, 33, 0);
/// Newest SGLang release whose contract is known.
const SGLANG_NEWEST: Release = Release::new(0, 5, 23);

/// What `kvlane hash` is told on its command line.
#[derive(Clone, Debug, Args)]
pub struct HashArgs {
    /// Engine whose contract to follow.
    #[arg(long, value_enum)]
    pub engine: EngineName,
    /// Algorithm. vllm: sha256, sha256_cbor (default), xxhash, xxhash_cbor, sha256_cbor_64bit. sglang: sha256_sglang.
    /// trtllm: blockhash_trtllm (default; the gateway's own keys), v1_block_key (the engine's).
    #[arg(long, value_name = "NAME")]
    pub algo: Option<String>,
    /// Tokens per block.
    #[arg(long, value_name = "TOKENS")]
    pub block_size: NonZeroU32,
    /// Seed of the vLLM engines, the literal text of their PYTHONHASHSEED; without it, the seed counts as unset.
    #[arg(long, value_name = "TEXT")]
    pub seed: Option<String>,
    /// Release of the engine, as its /version or /server_info says; without it, the newest that is known.
    #[arg(long, value_name = "VERSION", value_parser = parse_release)]
    pub engine_version: Option<Release>,
    /// LoRA adapter; its path (root in /v1/models) is hashed by vLLM since 0.31.
    #[arg(long, value_name = "NAME[=PATH]", value_parser = parse_lora)]
    pub lora: Option<Lora>,
    /// The adapter's integer id: hashed by vLLM before 0.11.1, and by TensorRT-LLM as its task id.
    #[arg(long, value_name = "ID", requires = "lora")]
    pub lora_id: Option<u64>,
    /// The request's cache_salt.
    #[arg(long, value_name = "TEXT")]
    pub salt: Option<String>,
    /// Tokens that vLLM looks ahead with EAGLE or MTP speculation (since 0.33).
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub lookahead: u8,
    /// SGLang runs EAGLE speculation: its units are pairs of tokens.
    #[arg(long)]
    pub bigrams: bool,
    /// The request's extra_key (SGLang).
    #[arg(long, value_name = "TEXT")]
    pub extra_key: Option<String>,
    /// SGLang publishes with "format": "dynamo", in which extra_key and cache_salt make a namespace.
    #[arg(long)]
    pub dynamo: bool,
    /// Print one JSON object instead of lines.
    #[arg(long)]
    pub json: bool,
}

/// Engines that have a contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EngineName {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// TensorRT-LLM.
    Trtllm,
}

impl EngineName {
    fn name(self) -> &'static str {
        match self {
            EngineName::Vllm => "vLLM",
            EngineName::Sglang => "SGLang",
            EngineName::Trtllm => "TensorRT-LLM",
        }
    }
}

/// Why no keys were printed. All but [`HashError::Io`] are mistakes of the command (exit code 2).
#[derive(Debug, thiserror::Error)]
pub enum HashError {
    /// An option that the engine has no use for: the caller expects keys that would be others.
    #[error("{option}: {} has no such thing; leave it out", engine.name())]
    Option {
        /// The option.
        option: &'static str,
        /// The engine asked for.
        engine: EngineName,
    },
    /// An algorithm that the engine does not have.
    #[error("--algo {algo}: not an algorithm of this engine; it has {known}")]
    Algorithm {
        /// What was asked for.
        algo: String,
        /// What there is.
        known: &'static str,
    },
    /// An algorithm that this release does not have.
    #[error("--algo {algo}: vLLM {release} has no such algorithm; give the engine's own --engine-version")]
    Release {
        /// What was asked for.
        algo: &'static str,
        /// The release.
        release: Release,
    },
    /// The seed is random in the engine process.
    #[error("--seed: without PYTHONHASHSEED, vLLM {release} draws a random seed for {algo}: its keys cannot be known")]
    RandomSeed {
        /// The algorithm.
        algo: &'static str,
        /// The release.
        release: Release,
    },
    /// Lookahead before it existed.
    #[error("--lookahead: vLLM {release} does not hash tokens ahead (since {LOOKAHEAD_SINCE}); leave it out")]
    Lookahead {
        /// The release.
        release: Release,
    },
    /// The contract cannot key such a prompt.
    #[error(transparent)]
    Contract(#[from] ContractError),
    /// Standard input is no list of tokens.
    #[error("standard input: {0}; expected a JSON array of token ids, each from 0 to 4294967295")]
    Tokens(#[source] serde_json::Error),
    /// Standard input is too long.
    #[error("standard input: more than {INPUT_BYTES_MAX} bytes; give the head of the prompt")]
    TooLong,
    /// Reading or writing failed.
    #[error("standard input or output: {0}")]
    Io(#[from] std::io::Error),
}

/// Reads a JSON array of token ids and prints the key of each full block.
///
/// # Errors
/// [`HashError`]; nothing is printed then, unless writing itself failed.
pub fn run(args: &HashArgs, input: impl Read, mut output: impl Write) -> Result<(), HashError> {
    let (algo, contract) = contract(args)?;
    let extras = PromptExtras {
        lora: args.lora.clone().map(|lora| Lora { id: args.lora_id, ..lora }),
        cache_salt: args.salt.clone(),
        extra_key: args.extra_key.clone(),
        ..PromptExtras::default()
    };
    let mut stream = KeyStream::new(&contract, &extras, args.block_size)?;

    let mut text = Vec::new();
    input.take(INPUT_BYTES_MAX + 1).read_to_end(&mut text)?;
    if text.len() as u64 > INPUT_BYTES_MAX {
        return Err(HashError::TooLong);
    }
    let tokens: Vec<u32> = serde_json::from_slice(&text).map_err(HashError::Tokens)?;
    let mut rest = &tokens[..];
    let keys = std::iter::from_fn(|| stream.next_key(&mut rest)).map(|key| key.0);
    if args.json {
        let keys: Vec<_> =
            keys.map(|key| serde_json::json!({"u64": key.to_string(), "hex": format!("{key:016x}")})).collect();
        let answer = serde_json::json!({
            "algo": algo,
            "block_size": args.block_size,
            "tokens": tokens.len(),
            "keys": keys,
        });
        writeln!(output, "{answer}")?;
    } else {
        for key in keys {
            writeln!(output, "{key} {key:016x}")?;
        }
    }
    output.flush()?;
    Ok(())
}

/// The contract that the options name, and its algorithm's name.
fn contract(args: &HashArgs) -> Result<(&'static str, Contract), HashError> {
    refuse_foreign_options(args)?;
    let unknown = |known| HashError::Algorithm { algo: args.algo.clone().unwrap_or_default(), known };
    match args.engine {
        EngineName::Vllm => vllm(args),
        EngineName::Sglang => match args.algo.as_deref() {
            None | Some("sha256_sglang") => {
                let format = if args.dynamo { sglang::EventFormat::Dynamo } else { sglang::EventFormat::Default };
                let release = args.engine_version.unwrap_or(SGLANG_NEWEST);
                let contract = sglang::Contract::new(release, args.bigrams, format)?;
                Ok(("sha256_sglang", Contract::Sglang(contract)))
            }
            Some(_) => Err(unknown("sha256_sglang")),
        },
        EngineName::Trtllm => match args.algo.as_deref() {
            None | Some("blockhash_trtllm") => Ok(("blockhash_trtllm", Contract::TrtllmTokens)),
            Some("v1_block_key") => Ok(("v1_block_key", Contract::TrtllmV1)),
            Some(_) => Err(unknown("blockhash_trtllm and v1_block_key")),
        },
    }
}

fn vllm(args: &HashArgs) -> Result<(&'static str, Contract), HashError> {
    let release = args.engine_version.unwrap_or(VLLM_NEWEST);
    let algorithm = match &args.algo {
        None => Algorithm::Sha256Cbor,
        Some(name) => Algorithm::parse(name).ok_or_else(|| HashError::Algorithm {
            algo: name.clone(),
            known: "sha256, sha256_cbor, xxhash, xxhash_cbor and sha256_cbor_64bit",
        })?,
    };
    let algo = algorithm.name();
    if !algorithm.exists_in(release) {
        return Err(HashError::Release { algo, release });
    }
    if args.lookahead > 0 && release < LOOKAHEAD_SINCE {
        return Err(HashError::Lookahead { release });
    }
    let none_hash =
        NoneHash::of_engine(algorithm, args.seed.as_deref(), release).ok_or(HashError::RandomSeed { algo, release })?;
    Ok((algo, Contract::Vllm { none_hash, tagging: Tagging::of(release), lookahead: args.lookahead }))
}

/// An option that an engine would ignore is a mistake of the caller's.
fn refuse_foreign_options(args: &HashArgs) -> Result<(), HashError> {
    use EngineName::{Sglang, Trtllm, Vllm};
    let options: [(&'static str, bool, &[EngineName]); 7] = [
        ("--seed", args.seed.is_some(), &[Vllm]),
        ("--lookahead", args.lookahead > 0, &[Vllm]),
        ("--lora-id", args.lora_id.is_some(), &[Vllm, Trtllm]),
        ("--bigrams", args.bigrams, &[Sglang]),
        ("--extra-key", args.extra_key.is_some(), &[Sglang]),
        ("--dynamo", args.dynamo, &[Sglang]),
        ("--engine-version", args.engine_version.is_some(), &[Vllm, Sglang]),
    ];
    match options.iter().find(|(_, given, takers)| *given && !takers.contains(&args.engine)) {
        Some((option, ..)) => Err(HashError::Option { option, engine: args.engine }),
        None => Ok(()),
    }
}

fn parse_release(text: &str) -> Result<Release, String> {
    Release::parse(text).ok_or_else(|| "expected a version such as 0.32.0 or 0.5.6.post2".to_owned())
}

fn parse_lora(text: &str) -> Result<Lora, String> {
    let (name, path) = match text.split_once('=') {
        Some((name, path)) => (name, Some(path.to_owned())),
        None => (text, None),
    };
    if name.is_empty() || path.as_deref() == Some("") {
        return Err("expected NAME or NAME=PATH, neither of them empty".to_owned());
    }
    Ok(Lora { name: name.to_owned(), path, id: None })
}
