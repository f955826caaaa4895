//! The chain of SHA-256 over raw token bytes: SGLang's pages, and the gateway's own keys for TensorRT-LLM.
//!
//! ```text
//! digest = SHA256( prior ‖ tokens )    prior: the whole digest of the page before; nothing before the first page
//! key    = the first 8 bytes, big-endian
//! ```
//!
//! Tokens are 4 bytes each, little-endian. A page with a token above u32 is `ff` and 8 bytes for each instead.

use sha2::{Digest as _, Sha256};

use super::digest::{CHUNK_BYTES, ChunkWriter, Digest, Function};
use crate::ids::BlockKey;

/// State of one chain of pages: the digest of the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageChain(Option<Digest>);

impl PageChain {
    /// A chain before its first page, with nothing prepended.
    #[must_use]
    pub fn root() -> Self {
        PageChain(None)
    }

    /// A chain that goes on after a digest: a salt's seed, a root, or a page's.
    #[must_use]
    pub fn after(digest: [u8; 32]) -> Self {
        PageChain(Some(Digest::from_sha256(digest)))
    }

    /// Appends a page of tokens. Allocates nothing.
    pub fn push(&mut self, tokens: &[u32]) -> BlockKey {
        self.link(None, tokens.iter().map(|token| token.to_le_bytes()))
    }

    /// Appends a page of bigrams, whose units are pairs of neighbours: n + 1 tokens make a page of n. Allocates
    /// nothing.
    pub fn push_bigrams(&mut self, tokens: &[u32]) -> BlockKey {
        self.link(None, bigrams(tokens).map(u32::to_le_bytes))
    }

    /// Appends a page of tokens of which one is above u32.
    pub(super) fn push_wide(&mut self, tokens: &[u64]) -> BlockKey {
        self.link(Some(0xff), tokens.iter().map(|token| token.to_le_bytes()))
    }

    /// Appends a page of bigrams of which one token is above u32.
    pub(super) fn push_wide_bigrams(&mut self, tokens: &[u64]) -> BlockKey {
        self.link(Some(0xff), bigrams(tokens).map(u64::to_le_bytes))
    }

    /// Appends a page given as pieces of bytes.
    pub(super) fn push_pieces<'a>(&mut self, pieces: impl Iterator<Item = &'a [u8]>) -> BlockKey {
        let mut hasher = Sha256::new();
        hasher.update(self.as_bytes());
        pieces.for_each(|piece| hasher.update(piece));
        self.end_page(Digest::from_sha256(hasher.finalize().into()))
    }

    /// The whole digest of the last page, or the chain's beginning; empty at a root.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_ref().map_or(&[], Digest::as_bytes)
    }

    #[inline]
    fn link<const N: usize>(&mut self, mark: Option<u8>, elements: impl Iterator<Item = [u8; N]>) -> BlockKey {
        let page = Page { prior: self.as_bytes(), mark, elements };
        let digest = Digest::of_chunks(Function::Sha256, page);
        self.end_page(digest)
    }

    fn end_page(&mut self, digest: Digest) -> BlockKey {
        self.0 = Some(digest);
        BlockKey(digest.first_u64())
    }
}

/// Pairs of neighbours, one after the other.
fn bigrams<T: Copy>(tokens: &[T]) -> impl Iterator<Item = T> {
    tokens.windows(2).flat_map(|pair| [pair[0], pair[1]])
}

/// One page, encoded as it is hashed: what goes before it, its mark, its tokens.
pub(super) struct Page<'a, I> {
    pub(super) prior: &'a [u8],
    pub(super) mark: Option<u8>,
    pub(super) elements: I,
}

impl<const N: usize, I: Iterator<Item = [u8; N]>> ChunkWriter for Page<'_, I> {
    #[inline]
    fn write(self, chunk: &mut [u8; CHUNK_BYTES], mut full: impl FnMut(&[u8])) -> usize {
        let mut at = self.prior.len();
        chunk[..at].copy_from_slice(self.prior);
        if let Some(mark) = self.mark {
            chunk[at] = mark;
            at += 1;
        }
        for element in self.elements {
            if at > CHUNK_BYTES - N {
                full(&chunk[..at]);
                at = 0;
            }
            chunk[at..at + N].copy_from_slice(&element);
            at += N;
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_in_chunks_equals_the_page_in_one_piece_for_every_size() {
        for size in (0..300u32).chain([784, 4_096]) {
            let tokens: Vec<u32> = (0..=size).map(|i| i.wrapping_mul(2_654_435_761)).collect();
            let wide: Vec<u64> = tokens.iter().map(|&token| u64::from(token) << 20).collect();
            let pairs: Vec<u32> = tokens.windows(2).flatten().copied().collect();
            let wide_pairs: Vec<u64> = wide.windows(2).flatten().copied().collect();
            let narrow_bytes = |tokens: &[u32]| tokens.iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<u8>>();
            let wide_bytes = |tokens: &[u64]| {
                std::iter::once(0xff).chain(tokens.iter().flat_map(|t| t.to_le_bytes())).collect::<Vec<u8>>()
            };
            for start in [PageChain::root(), PageChain::after([7; 32])] {
                let check = |push: &dyn Fn(&mut PageChain) -> BlockKey, page: Vec<u8>| {
                    let mut chain = start;
                    let key = push(&mut chain);
                    let whole = Digest::of(Function::Sha256, &[start.as_bytes(), &page].concat());
                    assert_eq!((chain.0, key.0), (Some(whole), whole.first_u64()), "{size} units");
                };
                check(&|chain| chain.push(&tokens), narrow_bytes(&tokens));
                check(&|chain| chain.push_bigrams(&tokens), narrow_bytes(&pairs));
                check(&|chain| chain.push_wide(&wide), wide_bytes(&wide));
                check(&|chain| chain.push_wide_bigrams(&wide), wide_bytes(&wide_pairs));
                check(&|chain| chain.push_pieces(narrow_bytes(&tokens).chunks(5)), narrow_bytes(&tokens));
            }
        }
    }
}
