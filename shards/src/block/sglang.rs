//! SGLang's page keys, releases 0.5.6 to 0.5.23 (contract SGLang §1).
//!
//! **Invariant.** Pages form the chain of [`PageChain`]; a salt (since 0.5.18) is its beginning. What events carry is
//! the chain's key, or, in a namespace, a digest of it. Events spell keys as signed 64-bit integers: the same bits.
//!
//! Before 0.5.6 keys are CPython's hash of the page's tuple: the same page anywhere in any prompt has the same key.
//! They are recognised ([`tuple_hash`]) so that the engine can be named as too old; they prove no prefix.

#[cfg(test)]
mod tests;

use sha2::{Digest as _, Sha256};

use super::pages::PageChain;
use super::prompt_extras::{ContractError, PromptExtras};
use super::release::Release;
use crate::ids::BlockKey;

/// How an SGLang server makes its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contract {
    /// Speculation with EAGLE, EAGLE3 or FROZEN_KV_MTP: a page's units are pairs of neighbouring tokens.
    pub bigrams: bool,
    /// `format` of its `--kv-events-config`.
    pub format: EventFormat,
    salted: bool,
    wide: bool,
}

/// `format` of `--kv-events-config` (since 0.5.22).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EventFormat {
    /// A request's `extra_key` is not in the published keys.
    #[default]
    Default,
    /// `extra_key` and `cache_salt` make a namespace for the published keys.
    Dynamo,
}

impl Contract {
    /// The contract of a release.
    ///
    /// # Errors
    /// [`ContractError::TupleHashes`] before 0.5.6.
    pub fn new(release: Release, bigrams: bool, format: EventFormat) -> Result<Self, ContractError> {
        let since = |patch| release >= Release::new(0, 5, patch);
        if !since(6) {
            return Err(ContractError::TupleHashes { release });
        }
        Ok(Contract { bigrams, format, salted: since(18), wide: since(23) })
    }

    /// The contract of a server of the same release that speculates, or publishes, in another way.
    #[must_use]
    pub fn with(self, bigrams: bool, format: EventFormat) -> Self {
        Contract { bigrams, format, ..self }
    }

    /// The chain of a request before its first page.
    pub(super) fn chain(&self, extras: &PromptExtras) -> PageChain {
        match extras.salt().filter(|_| self.salted) {
            Some(salt) => PageChain::after(salt_seed(salt)),
            None => PageChain::root(),
        }
    }

    /// The namespace of a request's published keys.
    ///
    /// # Errors
    /// What SGLang hashes and nobody outside knows.
    pub(super) fn namespace(&self, extras: &PromptExtras) -> Result<Option<Namespace>, ContractError> {
        if let Some(lora) = &extras.lora {
            return Err(ContractError::LoraPrivate { name: lora.name.clone() });
        }
        if !extras.mm.is_empty() {
            return Err(ContractError::Unkeyed { what: "multimodal items" });
        }
        if extras.embeds.is_some() {
            return Err(ContractError::Unkeyed { what: "prompt embeddings" });
        }
        let extra_key = extras.extra_key.as_deref().filter(|key| !key.is_empty());
        let salt = extras.salt().map(String::as_str);
        let named = self.format == EventFormat::Dynamo && (extra_key.is_some() || salt.is_some());
        Ok(named.then(|| Namespace::new(extra_key, salt)))
    }

    /// Appends one page of the tokens in an event, of which some may stand for images and exceed 32 bits, and
    /// returns its key. A page of n bigrams takes n + 1 tokens.
    ///
    /// # Errors
    /// [`ContractError::WideToken`] when a token is too large for the release; the chain is as before.
    pub fn push(&self, chain: &mut PageChain, tokens: &[u64]) -> Result<BlockKey, ContractError> {
        let max = if self.wide { i64::MAX as u64 } else { u32::MAX.into() };
        if let Some(&token) = tokens.iter().find(|token| **token > max) {
            return Err(ContractError::WideToken { token });
        }
        let narrow: Result<Vec<u32>, _> = tokens.iter().map(|token| u32::try_from(*token)).collect();
        Ok(match (narrow, self.bigrams) {
            (Ok(tokens), false) => chain.push(&tokens),
            (Ok(tokens), true) => chain.push_bigrams(&tokens),
            (Err(_), false) => chain.push_wide(tokens),
            (Err(_), true) => chain.push_wide_bigrams(tokens),
        })
    }
}

/// What a salted chain begins with.
#[must_use]
pub fn salt_seed(salt: &str) -> [u8; 32] {
    Sha256::new().chain_update(b"sglang-cache-salt-v1\0").chain_update(salt).finalize().into()
}

/// A namespace of published keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Namespace([u8; 32]);

impl Namespace {
    /// The namespace of an `extra_key` (an adapter's private id at its end, where one serves) and, in the `dynamo`
    /// format, a salt.
    #[must_use]
    pub fn new(extra_key: Option<&str>, salt: Option<&str>) -> Self {
        let mut hasher = Sha256::new_with_prefix(b"sglang-kv-event-namespace-v1");
        for part in [extra_key, salt] {
            match part {
                None => hasher.update([0]),
                Some(part) => {
                    hasher.update([1]);
                    hasher.update((part.len() as u64).to_le_bytes());
                    hasher.update(part);
                }
            }
        }
        Namespace(hasher.finalize().into())
    }

    /// What events carry for a key of the chain, parents included.
    #[must_use]
    pub fn published(&self, key: BlockKey) -> BlockKey {
        PageChain::after(self.0).push_pieces(std::iter::once(&key.0.to_be_bytes()[..]))
    }

    /// The namespace's digest, for reports.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// The key that SGLang before 0.5.6 gives a page: CPython's hash of a tuple of integers, or of pairs.
#[must_use]
pub fn tuple_hash(tokens: &[u32], bigrams: bool) -> BlockKey {
    // An integer of less than 61 bits is its own hash.
    let hash = if bigrams {
        cpython_tuple(tokens.windows(2).map(|pair| cpython_tuple(pair.iter().map(|&token| token.into()))))
    } else {
        cpython_tuple(tokens.iter().map(|&token| token.into()))
    };
    BlockKey(hash)
}

/// CPython's tuple hash (3.8 and later, 64-bit) of its items' hashes.
fn cpython_tuple(items: impl ExactSizeIterator<Item = u64>) -> u64 {
    const PRIME_1: u64 = 11_400_714_785_074_694_791;
    const PRIME_2: u64 = 14_029_467_366_897_019_727;
    const PRIME_5: u64 = 2_870_177_450_012_600_261;
    let length = items.len() as u64;
    let mixed = items
        .fold(PRIME_5, |acc, hash| acc.wrapping_add(hash.wrapping_mul(PRIME_2)).rotate_left(31).wrapping_mul(PRIME_1));
    match mixed.wrapping_add(length ^ (PRIME_5 ^ 3_527_539)) {
        // All ones would be Python's sign of an error.
        u64::MAX => 1_546_275_796,
        hash => hash,
    }
}
