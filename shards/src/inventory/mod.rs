//! Which holder has which block: written by the ingest thread, read by every shard without a lock.

use crate::ids::{BlockKey, EndpointIndex, HolderIndex, Rank};

/// Sizes of one inventory.
#[derive(Clone, Debug)]
pub struct Options {
    /// Keys it is made for; segments are sized from it so that no publish rehashes more than one.
    pub blocks_expected: usize,
}

/// The writing end; exactly one, owned by the ingest thread.
#[derive(Debug)]
pub struct Writer;

/// Makes reading ends; one per shard.
#[derive(Clone, Debug)]
pub struct ReaderFactory;

/// A reading end of one thread.
#[derive(Debug)]
pub struct Reader;

/// A consistent view; must not be held across an await.
#[derive(Debug)]
pub struct Guard;

/// Who a holder is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HolderInfo {
    /// Endpoint of the holder.
    pub endpoint: EndpointIndex,
    /// Rank inside the endpoint.
    pub rank: Rank,
    /// False while its event stream is lost or it is being swept: its blocks do not count for routing.
    pub eligible: bool,
}

/// Longest contiguous run per holder over the keys shown so far.
#[derive(Debug, Default)]
pub struct Walk;

/// One holder's contiguous run from block 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Endpoint of the holder.
    pub endpoint: EndpointIndex,
    /// Rank of the holder.
    pub rank: Rank,
    /// Blocks held without a gap from block 0.
    pub blocks: u32,
}

/// A new, empty inventory.
#[must_use]
pub fn new(_options: &Options) -> (Writer, ReaderFactory) {
    (Writer, ReaderFactory)
}

impl ReaderFactory {
    /// A reading end for the calling thread.
    #[must_use]
    pub fn reader(&self) -> Reader {
        Reader
    }
}

impl Reader {
    /// A consistent view, or none when the writer is gone.
    #[must_use]
    pub fn enter(&self) -> Option<Guard> {
        Some(Guard)
    }
}

impl Guard {
    /// Shows the walk the next keys of the prompt; false once no eligible holder can go further.
    pub fn advance(&self, _walk: &mut Walk, _keys: &[BlockKey]) -> bool {
        false
    }

    /// Who the holder is.
    #[must_use]
    pub fn holder(&self, _holder: HolderIndex) -> Option<HolderInfo> {
        None
    }

    /// Number of segments, for [`Guard::segment_keys`].
    #[must_use]
    pub fn segments(&self) -> usize {
        0
    }

    /// Calls `each` for every key of one segment that the endpoint holds, whether or not it is eligible.
    pub fn segment_keys(&self, _segment: usize, _endpoint: EndpointIndex, _each: &mut dyn FnMut(BlockKey)) {}
}

impl Walk {
    /// The runs of all eligible holders that hold block 0, resolved through the same guard that saw the last keys.
    pub fn runs<'a>(&'a self, _guard: &'a Guard) -> impl Iterator<Item = Run> + 'a {
        std::iter::empty()
    }

    /// Keys shown so far.
    #[must_use]
    pub fn blocks_shown(&self) -> u32 {
        0
    }
}

impl Writer {
    /// A slot for one (endpoint, rank) cache, eligible, holding nothing; none when all 65,535 are taken.
    pub fn add_holder(&mut self, _endpoint: EndpointIndex, _rank: Rank) -> Option<HolderIndex> {
        None
    }

    /// Clears a holder in one operation: masked at once, swept in the background by later publishes.
    pub fn retire_holder(&mut self, _holder: HolderIndex) {}

    /// Whether the holder's blocks count for routing.
    pub fn set_eligible(&mut self, _holder: HolderIndex, _eligible: bool) {}

    /// The holder has the block now (0→1 of its copies).
    pub fn store(&mut self, _key: BlockKey, _holder: HolderIndex) {}

    /// The holder no longer has the block (1→0 of its copies).
    pub fn remove(&mut self, _key: BlockKey, _holder: HolderIndex) {}

    /// Operations not yet published.
    #[must_use]
    pub fn pending(&self) -> usize {
        0
    }

    /// Publishes what is pending without waiting for a reader; false when a reader still reads the other side, and
    /// the caller goes on draining.
    pub fn try_publish(&mut self) -> bool {
        true
    }
}
