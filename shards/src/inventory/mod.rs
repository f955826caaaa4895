//! Which holder has which block: written by the ingest thread, read by every shard without a lock.
//!
//! **Invariant.** There are two sides, equal but for what the last publish has not reached yet. Readers see one of
//! them, whole, for as long as they hold a [`Guard`]; the writer changes the other and swaps them. The writer never
//! waits for a reader: where one still reads the side to be changed, [`Writer::try_publish`] says so and the queue
//! grows (to [`PENDING_MAX`]). A guard must not be held across an await: it would hold up every publish.
//!
//! A side is at least 256 segments, each a table from key to its place in a run: blocks that were stored one after the
//! other, with a row of bits per holder. A prompt is found by its first block and then compared with what stands behind
//! it, so that a look-up costs few accesses to memory for many blocks and holders. Segments grow one per publish, ahead
//! of need, because a table that grows stands still while it moves: one table of 4 M keys was measured at 126 ms.
//!
//! A holder is in one key space: the service's own (keys by the rule's contract), or another, whose contract and block
//! size stand in the table ([`Space`]) for as long as a holder is in it. A walk looks at the holders of one space, so
//! that equal keys of two spaces never mix.
//!
//! A holder is a slot number. Keys name slots, and slots name endpoint, rank and eligibility, so that masking or
//! clearing a cache of a million keys is one change of one slot. The keys of a retired slot are swept segment by
//! segment; only then may the slot name someone else.

#![forbid(unsafe_code)]

mod arena;
mod runs;
mod slots;
mod table;
#[cfg(test)]
mod tests;
mod walk;
mod writer;

use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroU32;

use crate::block::Contract;
use crate::ids::{BlockKey, EndpointIndex, HolderIndex, Rank};
use table::{SlotState, Table};
pub use walk::Walk;
pub use writer::{HOLDERS_MAX, OPS_PER_PUBLISH_MAX, PENDING_MAX, Writer};

/// Key spaces of one inventory, the service's own included. A holder beyond them finds no place and is not routed by.
pub const SPACES_MAX: usize = 4;

/// How the keys of some holders are made, where it is not the rule's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// What turns tokens into keys.
    pub contract: Contract,
    /// Tokens per block.
    pub block_tokens: NonZeroU32,
}

/// A key space inside an inventory; 0 is the service's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceIndex(u8);

impl SpaceIndex {
    /// The service's own: the rule's contract and block size.
    pub const OWN: SpaceIndex = SpaceIndex(0);
}

/// How far from the engine's computation a block may lie, nearest first.
///
/// Media that an engine keeps blocks in are kept apart by holders of their own: beside the holder of what lies in device
/// memory stands one of what lies there *or* in the host's memory, and one of what lies anywhere. So a run goes on
/// from medium to medium, and a walk need not know of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Medium {
    /// Device memory.
    #[default]
    Device,
    /// The host's memory.
    Cpu,
    /// Whatever lies behind it.
    Storage,
}

/// Sizes of one inventory.
#[derive(Clone, Debug)]
pub struct Options {
    /// Keys it is made for; segments are sized from it so that no publish rehashes more than one. More keys still
    /// work: segments double. Memory is taken as keys arrive, not ahead.
    pub blocks_expected: usize,
}

/// Makes reading ends; one per shard.
#[derive(Clone, Debug)]
pub struct ReaderFactory(left_right::ReadHandleFactory<Table>);

/// A reading end of one thread. Making or dropping one takes a lock; entering does not.
#[derive(Debug)]
pub struct Reader(left_right::ReadHandle<Table>);

/// A consistent view; must not be held across an await.
#[derive(Debug)]
pub struct Guard<'a>(left_right::ReadGuard<'a, Table>);

/// Who a holder is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HolderInfo {
    /// Endpoint of the holder.
    pub endpoint: EndpointIndex,
    /// Rank inside the endpoint.
    pub rank: Rank,
    /// The farthest medium that it counts.
    pub medium: Medium,
    /// False while its event stream is lost: its blocks do not count for routing.
    pub eligible: bool,
}

/// One holder's contiguous run from block 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Endpoint of the holder.
    pub endpoint: EndpointIndex,
    /// Rank of the holder.
    pub rank: Rank,
    /// The farthest medium that its blocks lie in.
    pub medium: Medium,
    /// Blocks held without a gap from block 0; at least 1.
    pub blocks: u32,
    /// Tokens per block, where the holder is in a key space of its own; none = the rule's.
    pub block_tokens: Option<NonZeroU32>,
}

/// A new, empty inventory.
#[must_use]
pub fn new(options: &Options) -> (Writer, ReaderFactory) {
    // Unforeseeable per process, and without influence on any answer but the order of a dump.
    let salt = RandomState::new().hash_one(options.blocks_expected);
    let table = Table::new(options.blocks_expected, salt);
    let segments = table.segments();
    let (mut handle, reader) = left_right::new_from_empty(table);
    // The first two publishes copy a side whole: done here, while both are empty.
    handle.publish();
    handle.publish();
    (Writer::new(handle, segments), ReaderFactory(reader.factory()))
}

impl ReaderFactory {
    /// A reading end for the calling thread.
    #[must_use]
    pub fn reader(&self) -> Reader {
        Reader(self.0.handle())
    }
}

impl Reader {
    /// A consistent view, or none when the writer is gone.
    #[must_use]
    pub fn enter(&self) -> Option<Guard<'_>> {
        self.0.enter().map(Guard)
    }
}

impl Guard<'_> {
    /// Shows the walk the next keys of the prompt; false once no eligible holder can go further.
    pub fn advance(&self, walk: &mut Walk, keys: &[BlockKey]) -> bool {
        walk.advance(&self.0, keys)
    }

    /// Who the holder is; none if the slot was never used or is retired.
    #[must_use]
    pub fn holder(&self, holder: HolderIndex) -> Option<HolderInfo> {
        self.0.slot(holder.0).map(|slot| HolderInfo {
            endpoint: slot.endpoint,
            rank: slot.rank,
            medium: slot.medium,
            eligible: slot.state == SlotState::Eligible,
        })
    }

    /// The spaces beside the service's own that have holders now: empty for most services.
    pub fn other_spaces(&self) -> impl Iterator<Item = (SpaceIndex, Space)> + '_ {
        self.0.other_spaces()
    }

    /// The key space of an endpoint's holders; none where it has none, or they are in several.
    #[must_use]
    pub fn space_of(&self, endpoint: EndpointIndex) -> Option<SpaceIndex> {
        self.0.space_of(endpoint)
    }

    /// Number of segments, for [`Guard::segment_keys`].
    #[must_use]
    pub fn segments(&self) -> usize {
        self.0.segments()
    }

    /// Calls `each` once for every key of one segment's runs (about 5,000) that the endpoint holds in device memory at any rank,
    /// eligible or not. A dump enters anew for every segment, so that it holds up no publish; it is not one point in time.
    pub fn segment_keys(&self, segment: usize, endpoint: EndpointIndex, each: &mut dyn FnMut(BlockKey)) {
        let is_there = |slot: &table::Slot| slot.endpoint == endpoint && slot.medium == Medium::Device;
        self.0.keys_of(segment, |holder| self.0.slot(holder).is_some_and(is_there)).for_each(each);
    }
}
