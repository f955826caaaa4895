//! vLLM's block keys, releases 0.10 to 0.33 (contract vLLM §1).
//!
//! **Invariant.** A block's digest is a pure function of (algorithm, parent digest, tokens, extra keys): no model
//! name, position or block size enters.
//!
//! The preimage of a block is a Python tuple, in canonical CBOR or in pickle:
//!
//! ```text
//! (parent digest, (token, …), extra)    extra: None, (key, …), or (None | (key, …), token, …) with lookahead
//! ```
//!
//! The digest of that is the next block's parent; its last 8 bytes, big-endian, are the key that events carry. The
//! parent of block 0 is the digest of the seed's literal text, by the same algorithm.

mod extra;
mod group;
#[cfg(test)]
mod tests;

use super::cbor::{Cbor, PlainBlock};
use super::digest::{Digest, Function};
use super::emit::{Emit, Value};
use super::pickle::Pickle;
use super::release::Release;
use crate::ids::BlockKey;

pub(super) use extra::Extras;
pub use extra::{BlockExtras, ExtraKey, Tagging};
pub use group::{GroupView, KeyForm, WireKey};

/// Seed of engines that were given none (vLLM ≥ 0.29 with SHA-256; a fixed text, so that all processes agree).
pub const FIXED_SEED: &str = "vllm-none-hash";

/// First release that lets EAGLE and MTP look-ahead tokens into the hash.
pub const LOOKAHEAD_SINCE: Release = Release::new(0, 33, 0);

/// First release whose unset seed is [`FIXED_SEED`] instead of random bytes.
const FIXED_SEED_SINCE: Release = Release::new(0, 29, 0);

/// An algorithm of `--prefix-caching-hash-algo`. (`builtin`, the default before 0.10.2, is CPython's own hash of a
/// process: no key of it can be known outside.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// `sha256`, the default since 0.10.2: SHA-256 over pickle.
    Sha256,
    /// `sha256_cbor`: SHA-256 over canonical CBOR.
    Sha256Cbor,
    /// `xxhash`, since 0.13: XXH3-128 over pickle.
    Xxhash,
    /// `xxhash_cbor`, since 0.13: XXH3-128 over canonical CBOR.
    XxhashCbor,
    /// `sha256_cbor_64bit`, 0.10.0 and 0.10.1 only: the chain links 64-bit integers, not whole digests.
    Sha256Cbor64,
}

impl Algorithm {
    /// Every algorithm, the likeliest first: the order in which live keys are tried.
    pub const ALL: [Algorithm; 5] =
        [Algorithm::Sha256Cbor, Algorithm::Sha256, Algorithm::XxhashCbor, Algorithm::Xxhash, Algorithm::Sha256Cbor64];

    /// The engine's name of it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Sha256 => "sha256",
            Algorithm::Sha256Cbor => "sha256_cbor",
            Algorithm::Xxhash => "xxhash",
            Algorithm::XxhashCbor => "xxhash_cbor",
            Algorithm::Sha256Cbor64 => "sha256_cbor_64bit",
        }
    }

    /// The algorithm of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name)
    }

    /// Whether a release has it. Without any (before 0.10) its keys cannot be known.
    #[must_use]
    pub fn exists_in(self, release: Release) -> bool {
        let since = |minor, patch| release >= Release::new(0, minor, patch);
        match self {
            Algorithm::Sha256 | Algorithm::Sha256Cbor => since(10, 2),
            Algorithm::Xxhash | Algorithm::XxhashCbor => since(13, 0),
            Algorithm::Sha256Cbor64 => since(10, 0) && !since(10, 2),
        }
    }

    fn function(self) -> Function {
        match self {
            Algorithm::Sha256 | Algorithm::Sha256Cbor | Algorithm::Sha256Cbor64 => Function::Sha256,
            Algorithm::Xxhash | Algorithm::XxhashCbor => Function::Xxh3,
        }
    }

    /// Writes a value into `preimage` in the algorithm's serialisation; what was in it is gone.
    fn serialise(self, preimage: &mut Vec<u8>, value: impl Value) {
        preimage.clear();
        match self {
            Algorithm::Sha256 | Algorithm::Xxhash => {
                let mut pickle = Pickle::begin(preimage);
                value.write(&mut pickle);
                pickle.finish();
            }
            Algorithm::Sha256Cbor | Algorithm::XxhashCbor | Algorithm::Sha256Cbor64 => value.write(&mut Cbor(preimage)),
        }
    }
}

impl From<super::HashAlgo> for Algorithm {
    fn from(algo: super::HashAlgo) -> Self {
        match algo {
            super::HashAlgo::Sha256Cbor => Algorithm::Sha256Cbor,
            super::HashAlgo::XxhashCbor => Algorithm::XxhashCbor,
        }
    }
}

/// Parent of every first block: the hash of the seed's literal text, by the same algorithm as the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoneHash(Chain);

impl NoneHash {
    /// The parent for a seed's literal text (`PYTHONHASHSEED` of the engines): no trimming, no number parsing.
    #[must_use]
    pub fn from_seed(algorithm: impl Into<Algorithm>, seed: &str) -> Self {
        let algorithm = algorithm.into();
        let mut preimage = Vec::new();
        algorithm.serialise(&mut preimage, seed);
        NoneHash(Chain { algorithm, digest: Digest::of(algorithm.function(), &preimage) })
    }

    /// The parent in an engine of that release whose seed is `seed`, or was not set; none where an unset seed means
    /// random bytes, so that no key can be known outside the process.
    #[must_use]
    pub fn of_engine(algorithm: impl Into<Algorithm>, seed: Option<&str>, release: Release) -> Option<Self> {
        let algorithm = algorithm.into();
        let fixed = release >= FIXED_SEED_SINCE && algorithm.function() == Function::Sha256;
        let seed = seed.or(fixed.then_some(FIXED_SEED))?;
        Some(NoneHash::from_seed(algorithm, seed))
    }

    /// The algorithm it belongs to.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.0.algorithm
    }

    /// The digest, as many bytes as the algorithm links; for reports and comparison with an engine's.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// State of one hash chain: the full digest of the last block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain {
    algorithm: Algorithm,
    digest: Digest,
}

impl Chain {
    /// A chain before its first block. The parent must be of the same algorithm.
    #[must_use]
    pub fn new(algorithm: impl Into<Algorithm>, none_hash: &NoneHash) -> Self {
        assert_eq!(algorithm.into(), none_hash.algorithm(), "a rule's anchor is made with the rule's algorithm");
        none_hash.0
    }

    /// Appends one full block of tokens, of whatever size the rule has, without extra keys, and returns its key.
    /// Allocates nothing with `sha256_cbor` and `xxhash_cbor`; the others need a buffer, which
    /// [`push_with`](Chain::push_with) uses again.
    pub fn push(&mut self, tokens: &[u32]) -> BlockKey {
        match self.algorithm {
            Algorithm::Sha256Cbor | Algorithm::XxhashCbor => {
                let block = PlainBlock { parent: self.digest.as_bytes(), tokens };
                self.digest = Digest::of_chunks(self.digest.function(), block);
                self.key()
            }
            Algorithm::Sha256 | Algorithm::Xxhash | Algorithm::Sha256Cbor64 => {
                self.push_with(tokens, &BlockExtras::NONE, &mut Vec::new())
            }
        }
    }

    /// Appends one full block with its extra keys and returns its key. `preimage` is a buffer to be used again for
    /// the next block; it is left with the bytes that were hashed.
    pub fn push_with(&mut self, tokens: &[u32], extras: &BlockExtras<'_>, preimage: &mut Vec<u8>) -> BlockKey {
        self.algorithm.serialise(preimage, Block { parent: self, tokens, extras });
        self.digest = Digest::of(self.algorithm.function(), preimage);
        self.key()
    }

    /// As [`push_with`](Chain::push_with), by the shorter way where there is one; the buffer's content is then old.
    pub(super) fn push_any(&mut self, tokens: &[u32], extras: &BlockExtras<'_>, preimage: &mut Vec<u8>) -> BlockKey {
        match self.algorithm {
            Algorithm::Sha256Cbor | Algorithm::XxhashCbor if extras.is_none() => self.push(tokens),
            _ => self.push_with(tokens, extras, preimage),
        }
    }

    /// The last block's key, as events spell it by default.
    #[must_use]
    pub fn key(&self) -> BlockKey {
        BlockKey(self.digest.last_u64())
    }

    /// The digest of the last block, or the anchor before any: what links the next block, and what events carry in
    /// bytes mode. 32 or 16 bytes; 8 with `sha256_cbor_64bit`.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        let whole = self.digest.as_bytes();
        match self.algorithm {
            Algorithm::Sha256Cbor64 => &whole[whole.len() - 8..],
            _ => whole,
        }
    }
}

/// The tuple that is a block's preimage.
struct Block<'a> {
    parent: &'a Chain,
    tokens: &'a [u32],
    extras: &'a BlockExtras<'a>,
}

impl Value for Block<'_> {
    fn write(&self, out: &mut impl Emit) {
        out.open(3);
        match self.parent.algorithm {
            Algorithm::Sha256Cbor64 => out.uint(self.parent.digest.last_u64()),
            _ => out.bytes(self.parent.as_bytes()),
        }
        out.open(self.tokens.len());
        for &token in self.tokens {
            out.int(token.into());
        }
        out.close(self.tokens.len());
        self.extras.write(out);
        out.close(3);
    }
}
