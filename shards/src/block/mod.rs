//! Contracts that turn tokens into an engine's block keys.
//!
//! **Invariant.** A block's digest is a pure function of (algorithm, parent digest, tokens): no model name, position
//! or block size enters. Keys are bit for bit those in the engine's events, or the inventory is blind.
//!
//! The preimage of a block is the canonical CBOR of a triple (contract vLLM §1.2–1.3):
//!
//! ```text
//! 83                    array of 3
//! 58 20 <32 bytes>      parent digest, whole: 32 bytes of SHA-256, or `50 <16 bytes>` of XXH3-128
//! 90 <int>…             array of the block's tokens, each in its shortest form
//! f6                    extra keys: none
//! ```
//!
//! The digest of that is the next block's parent; its last 8 bytes, big-endian, are the key. The parent of block 0 is
//! the digest of the seed's literal text as a CBOR string.
//!
//! Two digests, one encoder: what differs between the contracts is the [`HashAlgo`] alone. Blocks with extra keys
//! (LoRA, salt, images) and the pickle serialisation are not built: nothing here is called for such prompts.

#![forbid(unsafe_code)]

use sha2::{Digest as _, Sha256};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::ids::BlockKey;

/// Seed of engines that were given none (vLLM ≥ 0.29 with SHA-256; a fixed text, so that all processes agree).
pub const FIXED_SEED: &str = "vllm-none-hash";

/// Hash contract of a rule (`kvHashAlgo`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HashAlgo {
    /// SHA-256 over canonical CBOR.
    Sha256Cbor,
    /// XXH3-128 over canonical CBOR.
    XxhashCbor,
}

impl HashAlgo {
    /// Bytes of a digest, all of which enter the next block's preimage.
    #[must_use]
    pub fn digest_bytes(self) -> usize {
        match self {
            HashAlgo::Sha256Cbor => 32,
            HashAlgo::XxhashCbor => 16,
        }
    }
}

/// Parent of every first block: the hash of the seed's literal text, by the same algorithm as the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoneHash(Digest);

impl NoneHash {
    /// The parent for a seed's literal text (`PYTHONHASHSEED` of the engines): no trimming, no number parsing.
    #[must_use]
    pub fn from_seed(algo: HashAlgo, seed: &str) -> Self {
        let text = seed.as_bytes();
        let mut preimage = Vec::with_capacity(text.len() + HEAD_BYTES_MAX);
        let mut head = [0; WORD_BYTES];
        let head_bytes = put_head(&mut head, MAJOR_TEXT, u32::try_from(text.len()).unwrap_or(u32::MAX));
        preimage.extend_from_slice(&head[..head_bytes]);
        preimage.extend_from_slice(text);
        NoneHash(Digest::of(algo, &preimage))
    }

    /// The digest, as many bytes as the algorithm has; for reports and comparison with an engine's.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// State of one hash chain: the full digest of the last block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain(Digest);

impl Chain {
    /// A chain before its first block. The parent must be of the same algorithm.
    #[must_use]
    pub fn new(algo: HashAlgo, none_hash: &NoneHash) -> Self {
        assert_eq!(algo, none_hash.0.algo, "a rule's anchor is made with the rule's algorithm");
        Chain(none_hash.0)
    }

    /// Appends one full block of tokens, of whatever size the rule has, and returns its key. Allocates nothing.
    pub fn push(&mut self, tokens: &[u32]) -> BlockKey {
        self.0 = self.0.child(tokens);
        self.0.key()
    }

    /// The digest of the last block, or the anchor before any.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// A whole digest with the algorithm it is of. Bytes past [`HashAlgo::digest_bytes`] are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Digest {
    algo: HashAlgo,
    bytes: [u8; 32],
}

impl Digest {
    /// Digest of a whole preimage.
    fn of(algo: HashAlgo, preimage: &[u8]) -> Self {
        match algo {
            HashAlgo::Sha256Cbor => Digest { algo, bytes: Sha256::digest(preimage).into() },
            HashAlgo::XxhashCbor => Digest::from_xxh3(xxh3_128(preimage)),
        }
    }

    fn from_xxh3(value: u128) -> Self {
        let mut bytes = [0; 32];
        bytes[..16].copy_from_slice(&value.to_be_bytes());
        Digest { algo: HashAlgo::XxhashCbor, bytes }
    }

    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.algo.digest_bytes()]
    }

    fn key(&self) -> BlockKey {
        let end = self.algo.digest_bytes();
        let last = self.bytes[end - 8..end].try_into().expect("8 bytes were sliced");
        BlockKey(u64::from_be_bytes(last))
    }

    /// Digest of the block that follows.
    fn child(&self, tokens: &[u32]) -> Self {
        let mut chunk = [0; CHUNK_BYTES];
        match self.algo {
            HashAlgo::Sha256Cbor => {
                let mut hasher = Sha256::new();
                let rest = write_preimage(self.as_bytes(), tokens, &mut chunk, |full| hasher.update(full));
                hasher.update(&chunk[..rest]);
                Digest { algo: self.algo, bytes: hasher.finalize().into() }
            }
            HashAlgo::XxhashCbor => {
                // The incremental state is large; a usual block fits in one chunk and never makes it.
                let mut long: Option<Xxh3> = None;
                let rest = write_preimage(self.as_bytes(), tokens, &mut chunk, |full| {
                    long.get_or_insert_with(Xxh3::new).update(full);
                });
                let value = match long {
                    None => xxh3_128(&chunk[..rest]),
                    Some(mut state) => {
                        state.update(&chunk[..rest]);
                        state.digest128()
                    }
                };
                Digest::from_xxh3(value)
            }
        }
    }
}

/// Bytes encoded between two calls of the digest. A 16-token block takes at most 117.
const CHUNK_BYTES: usize = 256;
/// Width of one store of the encoder; what lies past the value's own length is overwritten by the next.
const WORD_BYTES: usize = 8;
/// Longest head of a CBOR item whose argument is a u32.
const HEAD_BYTES_MAX: usize = 5;
const _: () = assert!(HEAD_BYTES_MAX < WORD_BYTES);

const MAJOR_UNSIGNED: u8 = 0x00;
const MAJOR_BYTES: u8 = 0x40;
const MAJOR_TEXT: u8 = 0x60;
const MAJOR_ARRAY: u8 = 0x80;
const CBOR_NULL: u8 = 0xf6;

/// Encodes the triple into `chunk`, giving it to `full` whenever it fills up; returns how much of it is left to take.
fn write_preimage(parent: &[u8], tokens: &[u32], chunk: &mut [u8; CHUNK_BYTES], mut full: impl FnMut(&[u8])) -> usize {
    let mut at = put_head(chunk, MAJOR_ARRAY, 3);
    at += put_head(&mut chunk[at..], MAJOR_BYTES, parent.len() as u32);
    chunk[at..at + parent.len()].copy_from_slice(parent);
    at += parent.len();
    // A block of more than u32::MAX tokens does not exist: the rule's size is a u32.
    at += put_head(&mut chunk[at..], MAJOR_ARRAY, tokens.len() as u32);
    for &token in tokens {
        if at > CHUNK_BYTES - WORD_BYTES {
            full(&chunk[..at]);
            at = 0;
        }
        at += put_head(&mut chunk[at..], MAJOR_UNSIGNED, token);
    }
    // There is room: the last head began at most WORD_BYTES before the end and took at most HEAD_BYTES_MAX.
    chunk[at] = CBOR_NULL;
    at + 1
}

/// Writes a CBOR head in its shortest form and returns its length, 1 to 5. Writes [`WORD_BYTES`] bytes: without
/// branches, since the widths of a prompt's tokens follow no pattern a processor could predict.
fn put_head(out: &mut [u8], major: u8, argument: u32) -> usize {
    const INFO: [u8; 6] = [0, 0, 24, 25, 0, 26];
    let length =
        1 + usize::from(argument >= 24) + usize::from(argument >= 0x100) + 2 * usize::from(argument >= 0x1_0000);
    // Of a one-byte head the argument is the low part of the byte itself.
    let first = u64::from(major | INFO[length]) << 56;
    let word = first | u64::from(argument) << (8 * (8 - length));
    out[..WORD_BYTES].copy_from_slice(&word.to_be_bytes());
    length
}

#[cfg(test)]
mod tests;
