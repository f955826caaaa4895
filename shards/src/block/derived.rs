//! The gateway's own keys, for caches whose engine's keys cannot be reproduced: the tokens that engines announce with
//! their blocks, chained by a hash of our own.
//!
//! ```text
//! key = last 8 bytes of XXH3-128( parent key ‖ [ff ‖ mark] ‖ tokens )    parent of the first block: a fixed number
//! ```
//!
//! A prompt of an adapter or a salt begins at a number of its own, made of their names: what follows is chained to it.
//!
//! **Invariant.** A block of other tokens, another parent or another mark has another key, short of a collision of 64
//! bits. The chain links keys and not digests, so that one key per block is all that needs to be kept.

use super::digest::{Digest, Function};
use super::pages::Page;
use crate::ids::BlockKey;

/// Parent of every first block: no engine's key but by chance.
const ROOT: BlockKey = BlockKey(u64::from_be_bytes(*b"kvlane-d"));

/// State of one chain: the key of its last block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DerivedChain(BlockKey);

impl DerivedChain {
    /// A chain before its first block.
    #[must_use]
    pub fn root() -> Self {
        DerivedChain(ROOT)
    }

    /// A chain before the first block of a prompt that is served with an adapter, or shares its blocks with those of one
    /// salt alone.
    #[must_use]
    pub fn root_of(adapter: Option<&str>, salt: Option<&str>) -> Self {
        if adapter.is_none() && salt.is_none() {
            return DerivedChain::root();
        }
        let mut preimage = ROOT.0.to_le_bytes().to_vec();
        for part in [adapter, salt] {
            preimage.push(u8::from(part.is_some()));
            let part = part.unwrap_or_default();
            preimage.extend_from_slice(&(part.len() as u64).to_le_bytes());
            preimage.extend_from_slice(part.as_bytes());
        }
        DerivedChain(BlockKey(Digest::of(Function::Xxh3, &preimage).last_u64()))
    }

    /// A chain that goes on after a block.
    #[must_use]
    pub fn after(key: BlockKey) -> Self {
        DerivedChain(key)
    }

    /// Appends a block of nothing but tokens. Allocates nothing.
    pub fn push(&mut self, tokens: &[u32]) -> BlockKey {
        let prior = self.0.0.to_le_bytes();
        let page = Page { prior: &prior, mark: None, elements: tokens.iter().map(|token| token.to_le_bytes()) };
        self.end(Digest::of_chunks(Function::Xxh3, page))
    }

    /// Appends a block that is more than its tokens (an adapter, an image, a salt): whatever bytes say so, as
    /// announced. No prompt without them has its key, nor has what follows it.
    pub fn push_marked(&mut self, tokens: &[u32], mark: &[u8]) -> BlockKey {
        let mut preimage = Vec::with_capacity(8 + 1 + 8 + mark.len() + 4 * tokens.len());
        preimage.extend_from_slice(&self.0.0.to_le_bytes());
        preimage.push(0xff);
        preimage.extend_from_slice(&(mark.len() as u64).to_le_bytes());
        preimage.extend_from_slice(mark);
        tokens.iter().for_each(|token| preimage.extend_from_slice(&token.to_le_bytes()));
        self.end(Digest::of(Function::Xxh3, &preimage))
    }

    fn end(&mut self, digest: Digest) -> BlockKey {
        self.0 = BlockKey(digest.last_u64());
        self.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn keys(tokens: &[u32], size: usize) -> Vec<BlockKey> {
        let mut chain = DerivedChain::root();
        tokens.chunks_exact(size).map(|block| chain.push(block)).collect()
    }

    proptest! {
        #[test]
        fn a_chain_goes_on_from_a_key_alone_and_every_token_counts(
            tokens in proptest::collection::vec(any::<u32>(), 1..200),
            size in 1..70_usize,
            at in any::<proptest::sample::Index>(),
        ) {
            let whole = keys(&tokens, size);
            for (index, block) in tokens.chunks_exact(size).enumerate().skip(1) {
                prop_assert_eq!(DerivedChain::after(whole[index - 1]).push(block), whole[index]);
            }
            let mut other = tokens.clone();
            let at = at.index(tokens.len());
            other[at] ^= 1;
            for (index, (left, right)) in whole.iter().zip(keys(&other, size)).enumerate() {
                prop_assert_eq!(*left == right, at >= (index + 1) * size);
            }
        }
    }

    #[test]
    fn adapters_and_salts_have_chains_of_their_own() {
        let parts = [None, Some(""), Some("a"), Some("b"), Some("ab")];
        let mut keys: Vec<_> = parts
            .iter()
            .flat_map(|adapter| parts.iter().map(|salt| DerivedChain::root_of(*adapter, *salt).push(&[1, 2, 3, 4])))
            .collect();
        assert_eq!(keys[0], DerivedChain::root().push(&[1, 2, 3, 4]));
        keys.sort_unstable_by_key(|key| key.0);
        keys.dedup();
        assert_eq!(keys.len(), parts.len() * parts.len());
    }

    #[test]
    fn a_mark_makes_another_block_and_another_chain() {
        let tokens = [1, 2, 3, 4];
        let marked = |mark: &[u8]| {
            let mut chain = DerivedChain::root();
            [chain.push_marked(&tokens, mark), chain.push(&tokens)]
        };
        let mut plain = DerivedChain::root();
        let plain = [plain.push(&tokens), plain.push(&tokens)];
        for (left, right) in [(plain, marked(b"")), (plain, marked(b"a")), (marked(b"a"), marked(b"b"))] {
            assert!(left[0] != right[0] && left[1] != right[1]);
        }
        assert_eq!(marked(b"a"), marked(b"a"));
    }
}
