//! TensorRT-LLM's own block keys (contract TensorRT-LLM §3), as far as they can be known outside.
//!
//! The gateway never routes by them: their 64 bits are too weakly mixed to shard on, and JSON events do not say which
//! adapter a block belongs to. It files blocks under a [`PageChain`] of their tokens (`blockhash_trtllm`), and
//! recomputes the engine's key per block as a check: where it differs, the block belongs to an adapter or an image, or to
//! a salt that the event does not tell, and to a namespace of its own.
//!
//! The last token of a prompt is never part of a block: a prompt of n tokens matches at most (n - 1) / size blocks,
//! rounded down. Callers that predict hits leave it out.

#[cfg(test)]
mod tests;

use sha2::{Digest as _, Sha256};

use super::pages::PageChain;
use crate::ids::BlockKey;

/// One block as the engine keys it under `v1_block_key`.
#[derive(Clone, Copy, Debug, Default)]
pub struct V1Block<'a> {
    /// The parent's key; 0 at the root.
    pub parent: u64,
    /// The block's tokens: all of its size, or fewer at a chain's end.
    pub tokens: &'a [u32],
    /// An extra id for each token, where the request uses them (zeros count as use).
    pub extra_ids: Option<&'a [u64]>,
    /// The request's LoRA task id; 0 is an id.
    pub lora: Option<u64>,
    /// The request's salt id ([`salt_id`]). It enters the first block only.
    pub salt: Option<u64>,
    /// Multimodal items that overlap the block.
    pub mm: &'a [MmKey],
}

/// A multimodal item in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmKey {
    /// The item's hash.
    pub hash: [u8; 32],
    /// The part of the item that the block begins with.
    pub start_offset: u64,
}

impl V1Block<'_> {
    /// The block's key: unsigned, as in the events' JSON.
    #[must_use]
    pub fn key(&self) -> u64 {
        let mut seed = self.tokens.len() as u64 ^ self.parent.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        if let Some(salt) = self.salt.filter(|_| self.parent == 0) {
            seed = mix64(salt, seed);
        }
        for (index, &token) in self.tokens.iter().enumerate() {
            seed = mix32(token, seed);
            if let Some(extra) = self.extra_ids {
                seed = mix64(extra.get(index).copied().unwrap_or(0), seed);
            }
        }
        if let Some(lora) = self.lora {
            seed = mix64(lora, seed);
        }
        for item in self.mm {
            for word in item.hash.chunks_exact(4) {
                seed = mix32(u32::from_le_bytes(word.try_into().expect("chunks of 4")), seed);
            }
            seed = mix64(item.start_offset, seed);
        }
        seed
    }
}

/// What the newest V1 manager makes of a salt: `std::hash` of the text, as the C++ library of its Linux builds (libstdc++,
/// 64 bits) has it, a MurmurHash of eight bytes at a time.
#[must_use]
pub fn std_salt_id(salt: &str) -> u64 {
    const FACTOR: u64 = 0xc6a4_a793_5bd1_e995;
    const SEED: u64 = 0xc70f_6907;
    let fold = |value: u64| value ^ value >> 47;
    let (words, rest) = salt.as_bytes().as_chunks::<8>();
    let start = SEED ^ (salt.len() as u64).wrapping_mul(FACTOR);
    let mut hash = words.iter().fold(start, |hash, word| {
        let word = fold(u64::from_le_bytes(*word).wrapping_mul(FACTOR)).wrapping_mul(FACTOR);
        (hash ^ word).wrapping_mul(FACTOR)
    });
    if !rest.is_empty() {
        let last = rest.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        hash = (hash ^ last).wrapping_mul(FACTOR);
    }
    fold(fold(hash).wrapping_mul(FACTOR))
}

/// The gateway's own chain (`blockhash_trtllm`) before a prompt's first block: at the root, or for the blocks of one salt
/// at a digest of it.
#[must_use]
pub fn tokens_root(salt: Option<&str>) -> PageChain {
    salt.map_or_else(PageChain::root, |salt| {
        PageChain::after(Sha256::new().chain_update(b"kvlane-trtllm-salt\0").chain_update(salt).finalize().into())
    })
}

const GOLDEN: u32 = 0x9e37_79b9;

fn mix32(value: u32, seed: u64) -> u64 {
    const FACTOR: u32 = 0x045d_9f3b;
    let value = ((value >> 16) ^ value).wrapping_mul(FACTOR);
    let value = ((value >> 16) ^ value).wrapping_mul(FACTOR);
    let value = ((value >> 16) ^ value).wrapping_add(GOLDEN);
    spread(value.into(), seed)
}

fn mix64(value: u64, seed: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    spread((value ^ (value >> 31)).wrapping_add(GOLDEN.into()), seed)
}

fn spread(value: u64, seed: u64) -> u64 {
    seed ^ value.wrapping_add(seed << 6).wrapping_add(seed >> 2)
}

/// The number a salt becomes in the keys of 1.1 to 1.3, and under `v2_sha256`: the first 8 bytes of its SHA-256,
/// little-endian.
#[must_use]
pub fn salt_id(salt: &str) -> u64 {
    let digest = Sha256::digest(salt);
    u64::from_le_bytes(*digest.first_chunk().expect("a digest has 32 bytes"))
}

/// A token of a block under `v2_sha256`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum V2Token {
    /// An ordinary token.
    Id(u32),
    /// The digest of a multimodal item, which stands in its first token's place.
    Digest([u8; 32]),
}

/// The chain of `v2_sha256` and `v2_sha256_64` before its first block. Its pages' keys are the latter's, and those of
/// the ZMQ stream, which spells them signed; the former's are the whole digests.
#[must_use]
pub fn v2_root(lora: Option<u64>, salt: Option<u64>) -> PageChain {
    let mask = u8::from(lora.is_some()) | u8::from(salt.is_some()) << 1;
    let mut hasher = Sha256::new_with_prefix([mask]);
    for field in [lora, salt].into_iter().flatten() {
        hasher.update(field.to_le_bytes());
    }
    PageChain::after(hasher.finalize().into())
}

/// Appends a block that holds multimodal items to a `v2_sha256` chain. Of plain tokens, [`PageChain::push`] does.
pub fn v2_push(chain: &mut PageChain, tokens: &[V2Token]) -> BlockKey {
    let mut page = Vec::with_capacity(tokens.len() * 4);
    for token in tokens {
        match token {
            V2Token::Id(id) => page.extend(id.to_le_bytes()),
            V2Token::Digest(digest) => page.extend(digest),
        }
    }
    chain.push_pieces(std::iter::once(&page[..]))
}
