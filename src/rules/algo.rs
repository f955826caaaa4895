//! Hash contracts as rules name them.

use shards::block::{Contract, FIXED_SEED, HashAlgo, NoneHash, Release, sglang, vllm};
use shards::service::Engine;

use crate::discovery::ServiceFacts;

use super::KvRule;

/// Newest SGLang release whose contract is known; engines that have not said theirs are taken for it.
const SGLANG_NEWEST: Release = Release::new(0, 5, 23);

/// `kvHashAlgo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvAlgo {
    /// vLLM: SHA-256 over canonical CBOR.
    Sha256Cbor,
    /// vLLM: XXH3-128 over canonical CBOR.
    XxhashCbor,
    /// SGLang's page chain.
    Sha256Sglang,
    /// The gateway's own keys of TensorRT-LLM's tokens.
    BlockhashTrtllm,
}

impl KvAlgo {
    /// Every value.
    pub const ALL: [KvAlgo; 4] =
        [KvAlgo::Sha256Cbor, KvAlgo::XxhashCbor, KvAlgo::Sha256Sglang, KvAlgo::BlockhashTrtllm];

    /// The value in rules and answers.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            KvAlgo::Sha256Cbor => "sha256_cbor",
            KvAlgo::XxhashCbor => "xxhash_cbor",
            KvAlgo::Sha256Sglang => "sha256_sglang",
            KvAlgo::BlockhashTrtllm => "blockhash_trtllm",
        }
    }

    /// The only engine it fits.
    #[must_use]
    pub fn engine(self) -> Engine {
        match self {
            KvAlgo::Sha256Cbor | KvAlgo::XxhashCbor => Engine::Vllm,
            KvAlgo::Sha256Sglang => Engine::Sglang,
            KvAlgo::BlockhashTrtllm => Engine::Trtllm,
        }
    }

    /// What holds for an engine where the rule does not say; none for one that announces no blocks.
    #[must_use]
    pub fn default_of(engine: Engine) -> Option<Self> {
        KvAlgo::ALL.into_iter().find(|algo| algo.engine() == engine)
    }

    /// vLLM's own name of it; none where there is no choice of algorithms.
    #[must_use]
    pub fn vllm(self) -> Option<vllm::Algorithm> {
        match self {
            KvAlgo::Sha256Cbor => Some(HashAlgo::Sha256Cbor.into()),
            KvAlgo::XxhashCbor => Some(HashAlgo::XxhashCbor.into()),
            KvAlgo::Sha256Sglang | KvAlgo::BlockhashTrtllm => None,
        }
    }
}

/// The contract that a rule and what its engines say of themselves amount to.
#[must_use]
pub fn contract(kv: &KvRule, facts: &ServiceFacts) -> Contract {
    if let Some(algorithm) = kv.algo.vllm() {
        let none_hash = NoneHash::from_seed(algorithm, kv.seed.as_deref().unwrap_or(FIXED_SEED));
        let tagging = facts.release.map_or(vllm::Tagging::Tagged, vllm::Tagging::of);
        return Contract::Vllm { none_hash, tagging, lookahead: 0 };
    }
    if kv.algo == KvAlgo::BlockhashTrtllm {
        return Contract::TrtllmTokens;
    }
    let of = |release| sglang::Contract::new(release, facts.bigrams, facts.format);
    // Engines too old for any chain are told of in the status; under no contract would their keys match.
    let known = of(facts.release.unwrap_or(SGLANG_NEWEST)).or_else(|_| of(SGLANG_NEWEST));
    Contract::Sglang(known.expect("the newest release has a chain"))
}

/// Why the keys of engines of that release cannot be known under the rule, if they cannot.
#[must_use]
pub fn unknowable(kv: &KvRule, release: Release) -> Option<String> {
    let Some(algorithm) = kv.algo.vllm() else {
        let chain = sglang::Contract::new(release, false, sglang::EventFormat::Default);
        return (kv.algo == KvAlgo::Sha256Sglang).then(|| chain.err()).flatten().map(|error| error.to_string());
    };
    let name = algorithm.name();
    if kv.algo_given && !algorithm.exists_in(release) {
        return Some(format!("vLLM {release} has no {name}: upgrade the engine, or leave kvHashAlgo out"));
    }
    NoneHash::of_engine(algorithm, kv.seed.as_deref(), release).is_none().then(|| {
        format!(
            "without PYTHONHASHSEED, vLLM {release} draws a random seed for {name}: start the engines with \
             PYTHONHASHSEED=0 and write kvNoneHashSeed \"0\""
        )
    })
}
