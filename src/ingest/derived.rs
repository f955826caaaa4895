//! The gateway's own keys of the blocks that one rank's engine announces: engine key → own key.
//!
//! **Invariant.** Within the life of one engine process an engine key stands for the same tokens after the same
//! parent for ever, so an entry is never wrong; it is only no longer needed. Entries go with the last copy of their
//! block, and those of blocks that went in other ways (the bound, a second engine key of the same content) are swept
//! out before the map is twice as large as what is held.
//!
//! A block whose parent is unknown (announced before we listened) has no own key: it and what follows it are
//! *orphans*, counted and not routed by, until the engine announces the prefix anew.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use shards::block::DerivedChain;
use shards::ids::BlockKey;

use super::counts;
use super::events::Stored;

/// Entries kept beyond twice what is held before the unneeded ones are swept out.
const SWEEP_MIN: usize = 1024;

/// Why the blocks of a store have no own keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotDerived {
    /// Their parent was never seen.
    Orphan,
    /// The store does not say all their tokens.
    NoTokens,
}

/// Spreads keys, which are digest bits already.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = counts::hash(self.0 << 8 ^ u64::from(*byte)));
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = counts::hash(key);
    }
}

/// From keys of one kind to keys of the other.
pub(crate) type Keys = HashMap<u64, u64, BuildHasherDefault<KeyHasher>>;

/// Own keys of one rank.
#[derive(Debug, Default)]
pub(crate) struct OwnKeys {
    own: Keys,
    /// Of the store at hand; kept for their memory.
    tokens: Vec<u32>,
    mark: Vec<u8>,
}

impl OwnKeys {
    /// Works out the own keys of a store's blocks, in order, and remembers them.
    pub(crate) fn derive(&mut self, stored: &Stored<'_>, keys: &mut Vec<BlockKey>) -> Result<(), NotDerived> {
        keys.clear();
        let size = stored.block_tokens as usize;
        let whole = u64::from(stored.tokens.len()) == u64::from(stored.keys.len()) * u64::from(stored.block_tokens);
        if size == 0 || !whole || !stored.tokens.decode(&mut self.tokens) {
            return Err(NotDerived::NoTokens);
        }
        let mut chain = match stored.parent {
            None => DerivedChain::root(),
            Some(parent) => DerivedChain::after(self.get(parent).ok_or(NotDerived::Orphan)?),
        };
        let adapter = stored.marks.adapter();
        let mut extras = stored.marks.extra_keys();
        for (tokens, engine) in self.tokens.chunks_exact(size).zip(stored.keys.iter()) {
            let extra = extras.next().flatten();
            let key = if extra.is_none() && adapter.iter().all(|part| part.is_empty()) {
                chain.push(tokens)
            } else {
                self.mark.clear();
                for part in adapter.into_iter().chain(extra) {
                    self.mark.extend_from_slice(&(part.len() as u64).to_le_bytes());
                    self.mark.extend_from_slice(part);
                }
                chain.push_marked(tokens, &self.mark)
            };
            self.own.insert(engine.0, key.0);
            keys.push(key);
        }
        Ok(())
    }

    /// The own key of a block.
    pub(crate) fn get(&self, engine: BlockKey) -> Option<BlockKey> {
        self.own.get(&engine.0).map(|own| BlockKey(*own))
    }

    /// The last copy of the block is gone.
    pub(crate) fn forget(&mut self, engine: BlockKey) {
        self.own.remove(&engine.0);
    }

    /// Every engine key with its own key.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.own.iter().map(|(engine, own)| (*engine, *own))
    }

    /// Remembers an own key.
    pub(crate) fn insert(&mut self, engine: u64, own: u64) {
        self.own.insert(engine, own);
    }

    /// The engine keys of own keys, for a rank that turned out to be exact.
    pub(crate) fn inverted(&self) -> Keys {
        self.own.iter().map(|(engine, own)| (*own, *engine)).collect()
    }

    /// Keeps what is held, once much else is in it. `held` is the number of blocks held.
    pub(crate) fn sweep(&mut self, held: usize, is_held: impl Fn(BlockKey, BlockKey) -> bool) {
        if self.own.len() > 2 * held + SWEEP_MIN {
            self.own.retain(|engine, own| is_held(BlockKey(*engine), BlockKey(*own)));
            self.own.shrink_to(2 * self.own.len());
        }
    }
}

#[cfg(test)]
#[path = "derived_tests.rs"]
mod tests;
