//! The small integers that name things inside a gateway process.
//!
//! Each is a type of its own, because two plain integers swap silently and a wrong key looks like a cold cache.

/// Number of a service: rules count from 0 in order of creation and a number is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceId(pub u32);

/// Place of an endpoint in its service: the order of the rule's endpoint list, kept over updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointIndex(pub u16);

/// One data-parallel cache inside an endpoint, counted from 0 as the engine counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rank(pub u8);

/// One (endpoint, rank) cache inside a service's inventory. A slot may be retired; its number is then not used
/// again before every key that named it is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HolderIndex(pub u16);

/// One data-plane thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardId(pub u16);

/// A block's 64-bit chained key as the engine's events spell it (unsigned).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey(pub u64);

impl ServiceId {
    /// The number as an index into per-service tables.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl EndpointIndex {
    /// The number as an index into per-endpoint tables.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl HolderIndex {
    /// The number as an index into per-holder tables.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl ShardId {
    /// The number as an index into per-shard tables.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}
