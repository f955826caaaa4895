//! Contracts that turn tokens into an engine's block keys.

use crate::ids::BlockKey;

/// Hash contract of a rule (`kvHashAlgo`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HashAlgo {
    /// SHA-256 over canonical CBOR.
    Sha256Cbor,
    /// XXH3-128 over canonical CBOR.
    XxhashCbor,
}

/// Parent of every first block: the hash of the seed's literal text, by the same algorithm as the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoneHash;

impl NoneHash {
    /// The parent for a seed's literal text (`PYTHONHASHSEED` of the engines).
    #[must_use]
    pub fn from_seed(_algo: HashAlgo, _seed: &str) -> Self {
        NoneHash
    }
}

/// State of one hash chain: the full digest of the last block.
#[derive(Clone, Debug)]
pub struct Chain;

impl Chain {
    /// A chain before its first block.
    #[must_use]
    pub fn new(_algo: HashAlgo, _none_hash: &NoneHash) -> Self {
        Chain
    }

    /// Appends one full block of tokens and returns its key.
    pub fn push(&mut self, _tokens: &[u32]) -> BlockKey {
        BlockKey(0)
    }
}
