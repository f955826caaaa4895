//! How each engine kind names the blocks of a prompt: a chain of digests, each over the one before.
//!
//! `vllm`: a tuple of parent, tokens and extra keys, as CBOR or pickle, under SHA-256 or XXH3. `sglang`: SHA-256 over
//! parent and token bytes. `trtllm`: a 64-bit mix. Each is checked against vectors that the real engines' code made.

pub mod pickle;
pub mod sglang;
pub mod trtllm;
pub mod vllm;

use std::hash::{Hash, Hasher};

/// A block's place in its chain, and its name in events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest {
    bytes: [u8; 32],
    length: u8,
    key: u64,
    /// Parts equal names that an engine keeps in separate trees; 0 for the common one.
    space: u64,
}

impl Digest {
    /// A digest of at most 32 bytes that events call `key`.
    #[must_use]
    pub fn new(digest: &[u8], key: u64) -> Self {
        let mut bytes = [0; 32];
        bytes[..digest.len()].copy_from_slice(digest);
        Self { bytes, length: digest.len() as u8, key, space: 0 }
    }

    /// The digest as it enters the next block's hash.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }

    /// The key an event carries.
    #[must_use]
    pub fn key(&self) -> u64 {
        self.key
    }
}

/// The first 8 bytes of a digest as a big-endian number.
fn first_u64(bytes: &[u8]) -> u64 {
    bytes.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// An adapter that a request uses.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lora {
    /// Its number in the engine process, from 1.
    pub id: u64,
    /// Its name, which requests give as their model.
    pub name: String,
    /// Where it was loaded from.
    pub path: String,
}

/// What else parts equal prompts. Equal namespaces share blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Namespace {
    /// `cache_salt`, not empty.
    pub salt: Option<String>,
    /// The adapter.
    pub lora: Option<Lora>,
    /// SGLang's `extra_key`.
    pub extra_key: Option<String>,
}

/// An engine's way of hashing.
#[derive(Clone, Debug)]
pub enum Chain {
    /// vLLM's.
    Vllm(vllm::Chain),
    /// SGLang's.
    Sglang(sglang::Chain),
    /// TensorRT-LLM's `v1_block_key`.
    Trtllm(trtllm::Chain),
}

impl Chain {
    /// What stands before block 0 of a prompt in this namespace.
    #[must_use]
    pub fn root(&self, namespace: &Namespace) -> Digest {
        match self {
            Self::Vllm(chain) => chain.root(),
            Self::Sglang(chain) => chain.root(namespace),
            Self::Trtllm(_) => trtllm::root(),
        }
    }

    /// The block after `parent`: `tokens` are those of the block and the [`Self::reach`] tokens after it. `first` is
    /// true for block 0.
    #[must_use]
    pub fn child(&self, parent: &Digest, tokens: &[u32], first: bool, namespace: &Namespace) -> Digest {
        match self {
            Self::Vllm(chain) => chain.child(parent, tokens, first, namespace),
            Self::Sglang(chain) => Digest { space: space(namespace), ..chain.child(parent, tokens, namespace) },
            Self::Trtllm(chain) => chain.child(parent, tokens, namespace),
        }
    }

    /// Tokens after a block that its hash depends on.
    #[must_use]
    pub fn reach(&self) -> usize {
        match self {
            Self::Vllm(chain) => chain.lookahead,
            Self::Sglang(chain) => usize::from(chain.bigrams),
            Self::Trtllm(_) => 0,
        }
    }
}

/// SGLang keeps a tree for each `extra_key` and adapter, although its names of blocks may be equal in all of them.
fn space(namespace: &Namespace) -> u64 {
    if namespace.extra_key.is_none() && namespace.lora.is_none() {
        return 0;
    }
    let mut hasher = std::hash::DefaultHasher::new();
    (&namespace.extra_key, &namespace.lora).hash(&mut hasher);
    hasher.finish().max(1)
}

/// Bytes that nobody can predict, as an engine without a seed draws them.
#[must_use]
pub fn random_bytes() -> [u8; 32] {
    let mut bytes = [0; 32];
    for part in bytes.chunks_exact_mut(8) {
        // Each of these states is keyed from the system's randomness.
        let number = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u8);
        part.copy_from_slice(&number.to_be_bytes());
    }
    bytes
}
