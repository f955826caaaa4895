//! The gateway's own keys, for caches whose engine's keys cannot be reproduced: the tokens that engines announce with
//! their blocks, chained by a hash of our own.
//!
//! ```text
//! key = last 8 bytes of XXH3-128( parent key ‖ [ff ‖ mark] ‖ tokens )    parent of the first block: a fixed number,
//!                                                                        or one of the prompt's adapter and salt
//! ```
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

    /// A chain before the first block of prompts with this adapter and this salt, whose blocks are theirs alone.
    #[must_use]
    pub fn root_of(adapter: Option<&str>, salt: Option<&str>) -> Self {
        if adapter.is_none() && salt.is_none() {
            return Self::root();
        }
        let mut names = Vec::new();
        for name in [adapter, salt] {
            names.push(u8::from(name.is_some()));
            let name = name.unwrap_or_default();
            names.extend_from_slice(&(name.len() as u64).to_le_bytes());
            names.extend_from_slice(name.as_bytes());
        }
        let mut root = Self::root();
        root.push_marked(&[], &names);
        root
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

    /// Appends a block that is more than its tokens (an image, say): whatever bytes say so, as announced. No prompt
    /// without them has its key, nor has what follows it.
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

    #[test]
    fn an_adapter_and_a_salt_make_another_chain_each() {
        let root_of = DerivedChain::root_of;
        let (a, b) = (Some("a"), Some("b"));
        let chains =
            [(None, None), (a, None), (None, a), (b, None), (a, a), (a, b), (Some("ab"), None), (None, Some(""))];
        let roots = chains.map(|(adapter, salt)| root_of(adapter, salt));
        for (index, root) in roots.iter().enumerate() {
            assert_eq!(roots.iter().position(|other| other == root), Some(index), "{:?}", chains[index]);
        }
        assert_eq!(roots[0], DerivedChain::root());
    }
}
