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
use shards::block::vllm::ExtraKey;
use shards::ids::BlockKey;

use super::calibrate::extra_keys;
use super::counts;
use super::events::{Marks, Stored};

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
        let marks = stored.marks;
        let mut extras = marks.extra_keys().peekable();
        let mut chain = match stored.parent {
            None => root_of(&marks, extras.peek().copied().flatten()),
            Some(parent) => DerivedChain::after(self.get(parent).ok_or(NotDerived::Orphan)?),
        };
        for (tokens, engine) in self.tokens.chunks_exact(size).zip(stored.keys.iter()) {
            let extra = extras.next().flatten();
            let key = if names(&marks, extra).is_some() {
                chain.push(tokens)
            } else {
                self.mark.clear();
                for part in marks.adapter().into_iter().chain(extra) {
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

/// Where the chain of a first block begins, which says of all that follow whose they are.
fn root_of(marks: &Marks<'_>, extra: Option<&[u8]>) -> DerivedChain {
    names(marks, extra).map_or(DerivedChain::root(), |(adapter, salt)| DerivedChain::root_of(adapter, salt))
}

/// The adapter and the salt of a block, where these and its tokens are all that it is: a request says both, so that its
/// prompt can be given the same key. Otherwise none, and what is announced marks the block as it stands.
fn names<'a>(marks: &Marks<'a>, extra: Option<&'a [u8]>) -> Option<(Option<&'a str>, Option<&'a str>)> {
    let (mut adapter, mut salt) = marks.names()?;
    if let Some(extra) = extra {
        for key in extra_keys(extra, adapter)? {
            match key {
                ExtraKey::Lora { name, .. } => adapter = Some(name),
                ExtraKey::CacheSalt(text) => salt = Some(text),
                _ => return None,
            }
        }
    }
    Some((adapter, salt))
}

#[cfg(test)]
#[path = "derived_tests.rs"]
mod tests;
