//! The stores that are compared, behind the least they have in common.

use shards::ids::{BlockKey, EndpointIndex, HolderIndex, Rank};
use shards::inventory::{self, Medium, Options, Reader, Run, Walk, Writer};

use super::workload::Workload;

/// Most additions between two publishes, for every store.
const PUBLISH_EVERY: usize = inventory::OPS_PER_PUBLISH_MAX;

/// From keys to sets of endpoints.
pub trait Store {
    /// An empty store that was told how much will come.
    fn new(workload: &Workload) -> Self;
    /// The next key added is the first of a prompt.
    fn begin(&mut self);
    /// The endpoint has the key; seen by look-ups some additions later.
    fn add(&mut self, key: BlockKey, endpoint: u16);
    /// Makes everything added visible.
    fn settle(&mut self);
    /// Appends the contiguous run of every endpoint that has the first key.
    fn runs(&mut self, keys: &[BlockKey], runs: &mut Vec<Run>);
}

/// Publishes until nothing is pending; readers come and go, so a refused publish is tried again.
pub fn publish_all(writer: &mut Writer) {
    while writer.pending() > 0 {
        if !writer.try_publish() {
            std::thread::yield_now();
        }
    }
}

/// kvlane's own.
pub struct InventoryStore {
    /// None at the reading end of a store that was split.
    writer: Option<Writer>,
    reader: Reader,
    walk: Walk,
}

impl InventoryStore {
    /// The writing end, for a thread of its own, and the rest.
    pub fn split(mut self) -> (Writer, InventoryStore) {
        let writer = self.writer.take().expect("a store is split once");
        (writer, self)
    }

    fn writer(&mut self) -> &mut Writer {
        self.writer.as_mut().expect("only a store that was not split is added to")
    }
}

impl Store for InventoryStore {
    fn new(workload: &Workload) -> Self {
        let (mut writer, factory) = inventory::new(&Options { blocks_expected: workload.blocks() });
        for endpoint in 0..workload.shape.endpoints {
            let holder = writer.add_holder(EndpointIndex(endpoint), Rank(0)).expect("there is room for u16 endpoints");
            assert_eq!(holder, HolderIndex(endpoint), "slots are given in order");
        }
        InventoryStore { writer: Some(writer), reader: factory.reader(), walk: Walk::default() }
    }

    fn begin(&mut self) {
        self.writer().follow(None);
    }

    fn add(&mut self, key: BlockKey, endpoint: u16) {
        let writer = self.writer();
        writer.store(key, HolderIndex(endpoint));
        if writer.pending() >= PUBLISH_EVERY {
            assert!(writer.try_publish(), "nobody reads while the store is filled");
        }
    }

    fn settle(&mut self) {
        publish_all(self.writer());
    }

    fn runs(&mut self, keys: &[BlockKey], runs: &mut Vec<Run>) {
        let Some(guard) = self.reader.enter() else { return };
        self.walk.restart();
        let _ = guard.advance(&mut self.walk, keys);
        runs.extend(self.walk.runs(&guard));
    }
}

/// evmap: a map from key to a bag of endpoints, built on left-right like ours.
pub struct EvmapStore {
    writer: evmap::handles::WriteHandle<u64, u16>,
    reader: evmap::handles::ReadHandle<u64, u16>,
    unpublished: usize,
    /// Run of each endpoint in the look-up under way.
    blocks: Vec<u32>,
}

impl Store for EvmapStore {
    fn new(workload: &Workload) -> Self {
        let (mut writer, reader) = evmap::new();
        writer.publish();
        EvmapStore { writer, reader, unpublished: 0, blocks: vec![0; usize::from(workload.shape.endpoints)] }
    }

    fn begin(&mut self) {}

    fn add(&mut self, key: BlockKey, endpoint: u16) {
        self.writer.insert(key.0, endpoint);
        self.unpublished += 1;
        if self.unpublished == PUBLISH_EVERY {
            self.settle();
        }
    }

    fn settle(&mut self) {
        self.writer.publish();
        self.unpublished = 0;
    }

    fn runs(&mut self, keys: &[BlockKey], runs: &mut Vec<Run>) {
        let Some(map) = self.reader.enter() else { return };
        let Some(first) = keys.first().and_then(|key| map.get(&key.0)) else { return };
        first.iter().for_each(|&endpoint| self.blocks[usize::from(endpoint)] = 1);
        for (depth, key) in keys.iter().enumerate().skip(1) {
            let Some(holders) = map.get(&key.0) else { break };
            let mut further = false;
            for &endpoint in holders {
                let blocks = &mut self.blocks[usize::from(endpoint)];
                if *blocks as usize == depth {
                    *blocks += 1;
                    further = true;
                }
            }
            if !further {
                break;
            }
        }
        for &endpoint in first {
            let blocks = std::mem::take(&mut self.blocks[usize::from(endpoint)]);
            runs.push(Run {
                endpoint: EndpointIndex(endpoint),
                rank: Rank(0),
                medium: Medium::Device,
                blocks,
                block_tokens: None,
            });
        }
    }
}
