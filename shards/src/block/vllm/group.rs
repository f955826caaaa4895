//! Keys of a hybrid model's groups, whose blocks span several blocks of the hash chain (contract vLLM §1.9).

use crate::block::release::Release;
use crate::ids::BlockKey;

use super::Chain;

/// A block key as an event carries it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WireKey {
    /// `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=1`, the default: an unsigned integer.
    Int(u64),
    /// `=0`, and offload events before 0.24: a whole digest, or several, one after the other.
    Bytes(Vec<u8>),
}

impl WireKey {
    /// The key that the gateway files it under, the same for both forms; none for fewer than 8 bytes, which no
    /// engine sends.
    #[must_use]
    pub fn block_key(&self) -> Option<BlockKey> {
        match self {
            WireKey::Int(value) => Some(BlockKey(*value)),
            WireKey::Bytes(bytes) => bytes.last_chunk().map(|last| BlockKey(u64::from_be_bytes(*last))),
        }
    }
}

/// Which form of key an engine is set to send, and of which era.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyForm {
    /// Integers.
    Int,
    /// Bytes: the digest at the group block's end (since 0.24).
    Bytes,
    /// Bytes: the digests of all the chain's blocks within the group block (0.12 to 0.23).
    BytesConcatenated,
}

impl KeyForm {
    /// The bytes form of a release.
    #[must_use]
    pub fn bytes_of(release: Release) -> Self {
        if release >= Release::new(0, 24, 0) { KeyForm::Bytes } else { KeyForm::BytesConcatenated }
    }
}

/// Sees a chain as a group does whose blocks are `blocks` of the chain's. With 1 it is the chain itself, in the
/// form that events carry.
#[derive(Clone, Debug)]
pub struct GroupView {
    form: KeyForm,
    blocks: usize,
    seen: usize,
    digests: Vec<u8>,
}

impl GroupView {
    /// A view before the first block; `blocks` is the group's block size over the chain's, at least 1.
    #[must_use]
    pub fn new(form: KeyForm, blocks: std::num::NonZeroU32) -> Self {
        GroupView { form, blocks: blocks.get() as usize, seen: 0, digests: Vec::new() }
    }

    /// Takes the chain after each of its blocks; returns the group block's key when this one completes it.
    pub fn after(&mut self, chain: &Chain) -> Option<WireKey> {
        self.seen += 1;
        if self.form == KeyForm::BytesConcatenated {
            self.digests.extend_from_slice(chain.as_bytes());
        }
        if self.seen < self.blocks {
            return None;
        }
        self.seen = 0;
        Some(match self.form {
            KeyForm::Int => WireKey::Int(chain.key().0),
            KeyForm::Bytes => WireKey::Bytes(chain.as_bytes().to_vec()),
            KeyForm::BytesConcatenated => WireKey::Bytes(std::mem::take(&mut self.digests)),
        })
    }
}
