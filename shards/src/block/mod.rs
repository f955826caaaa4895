//! Contracts that turn tokens into an engine's block keys.
//!
//! **Invariant.** Keys are bit for bit those in the engine's events, or the inventory is blind: every case of
//! `tests/vectors/{vllm,sglang,trtllm}_hash.json`, which the engines' own code made, is a test here, or stands by name
//! in a list with the reason why no gateway can meet it.
//!
//! A caller says which [`Contract`] an engine follows and what a request carries beyond its tokens
//! ([`PromptExtras`]), and feeds tokens to a [`KeyStream`], which gives back one key per full block. Below it lie the
//! chains themselves, for those who hash the tokens of one event at a time: [`Chain`] (vLLM), [`PageChain`] (SGLang,
//! and our own keys for TensorRT-LLM), [`trtllm::V1Block`], [`DerivedChain`] (the gateway's
//! own keys for engines whose keys cannot be reproduced).
//!
//! | engine | reproduced | not reproducible, and recognised |
//! |---|---|---|
//! | vLLM | `sha256`, `sha256_cbor`, `xxhash`, `xxhash_cbor`; `sha256_cbor_64bit` of 0.10.0–0.10.1 | random seeds, `builtin`, raw prompt embeddings before 0.17 |
//! | SGLang | page chain since 0.5.6: salts, bigrams, wide tokens, namespaces | tuple hashes before 0.5.6, adapters (private ids) |
//! | TensorRT-LLM | `v1_block_key`, `v2_sha256`, `v2_sha256_64`, both ways to hash a salt | adapters (ids that events do not tell) |
//!
//! Not done here: which tokens a prompt has ([`crate::prompt`]), and which blocks an engine holds.

#![forbid(unsafe_code)]

mod cbor;
mod derived;
mod digest;
mod emit;
mod pages;
mod pickle;
mod prompt_extras;
mod release;
pub mod sglang;
mod stream;
pub mod trtllm;
#[cfg(test)]
mod vectors;
pub mod vllm;

pub use derived::DerivedChain;
pub use pages::PageChain;
pub use prompt_extras::{ContractError, EmbedRows, Lora, MmItem, PromptExtras};
pub use release::Release;
pub use stream::{Contract, KeyStream};
pub use vllm::{Chain, FIXED_SEED, NoneHash};

/// Hash contract that a rule may write for vLLM (`kvHashAlgo`). Engines have more ([`vllm::Algorithm`]), among them
/// their default; those are found by calibration, never written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HashAlgo {
    /// SHA-256 over canonical CBOR.
    Sha256Cbor,
    /// XXH3-128 over canonical CBOR.
    XxhashCbor,
}
