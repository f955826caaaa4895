//! The blocks of one rank by the engine's keys, linked to their parents.
//!
//! **Invariant.** A node's parent is in the tree, or it begins a chain. Leaves are in one list, oldest first; where the
//! last child of a node goes, the node becomes the oldest leaf, so that giving up leaves from the front takes chains off
//! one by one from their ends, and what many chains share goes last.

#![forbid(unsafe_code)]

use hashbrown::HashTable;
use shards::block::PageChain;
use shards::ids::BlockKey;
use shards::inventory::Medium;

use super::super::counts::hash;
use super::json::EngineKey;

const NONE: u32 = u32::MAX;

/// Place of a node; good until the node is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NodeId(u32);

/// What is known of one block.
#[derive(Clone, Debug)]
pub(super) struct Node {
    /// The engine's key.
    pub(super) key: EngineKey,
    /// The gateway's own chain after the block.
    pub(super) own: PageChain,
    /// The engine's chain after the block, where it is one of digests.
    pub(super) engine: Option<Box<PageChain>>,
    pub(super) kind: Kind,
    /// 0 is device memory.
    pub(super) level: u8,
    /// The engine is known to hold it.
    pub(super) present: bool,
}

/// What a block is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Full, of plain tokens after plain blocks, or of one salt's: prompts can match it.
    Plain,
    /// Full, of an adapter, an image or a salt that is not told, or after such a block.
    Foreign,
    /// Not full: remembered so that its removal surprises nobody.
    Partial,
}

impl Node {
    /// The gateway's own key.
    pub(super) fn own_key(&self) -> BlockKey {
        let head = self.own.as_bytes().first_chunk();
        BlockKey(head.map_or(0, |head| u64::from_be_bytes(*head)))
    }

    /// Where a prompt is served by it from; none where by nothing.
    pub(super) fn medium(&self) -> Option<Medium> {
        (self.present && self.kind == Kind::Plain).then_some(match self.level {
            0 => Medium::Device,
            1 => Medium::Cpu,
            _ => Medium::Storage,
        })
    }

    /// Whether a prompt is served by it from device memory.
    pub(super) fn counts(&self) -> bool {
        self.medium() == Some(Medium::Device)
    }
}

#[derive(Debug)]
struct Slot {
    node: Node,
    parent: u32,
    first_child: u32,
    /// Neighbours among the parent's children; of a free slot, `next` is the next free one.
    next: u32,
    prev: u32,
    /// Neighbours among the leaves.
    newer: u32,
    older: u32,
}

/// The tree.
#[derive(Debug)]
pub(super) struct Tree {
    slots: Vec<Slot>,
    free: u32,
    index: HashTable<u32>,
    oldest_leaf: u32,
    newest_leaf: u32,
}

impl Default for Tree {
    fn default() -> Self {
        Tree { slots: Vec::new(), free: NONE, index: HashTable::new(), oldest_leaf: NONE, newest_leaf: NONE }
    }
}

impl Tree {
    /// Nodes.
    pub(super) fn len(&self) -> usize {
        self.index.len()
    }

    pub(super) fn find(&self, key: EngineKey) -> Option<NodeId> {
        self.index.find(hash(key.0), |id| self.slots[*id as usize].node.key == key).copied().map(NodeId)
    }

    pub(super) fn node(&self, id: NodeId) -> &Node {
        &self.slots[id.0 as usize].node
    }

    pub(super) fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.slots[id.0 as usize].node
    }

    pub(super) fn parent(&self, id: NodeId) -> Option<NodeId> {
        Some(self.slots[id.0 as usize].parent).filter(|parent| *parent != NONE).map(NodeId)
    }

    /// The leaf that became one first.
    pub(super) fn oldest_leaf(&self) -> Option<NodeId> {
        Some(self.oldest_leaf).filter(|leaf| *leaf != NONE).map(NodeId)
    }

    /// All nodes, in no order.
    pub(super) fn nodes_mut(&mut self) -> impl Iterator<Item = &mut Node> {
        let Tree { slots, index, .. } = self;
        // A free slot keeps its last node, which the index no longer names.
        slots.iter_mut().enumerate().filter_map(|(place, slot)| {
            let named = index.find(hash(slot.node.key.0), |id| *id as usize == place).is_some();
            named.then_some(&mut slot.node)
        })
    }

    /// Adds a node whose key is not in the tree.
    pub(super) fn insert(&mut self, node: Node, parent: Option<NodeId>) -> NodeId {
        debug_assert!(self.find(node.key).is_none());
        let parent = parent.map_or(NONE, |parent| parent.0);
        let key = node.key;
        let slot = Slot { node, parent, first_child: NONE, next: NONE, prev: NONE, newer: NONE, older: NONE };
        let id = match self.free {
            NONE => {
                self.slots.push(slot);
                (self.slots.len() - 1) as u32
            }
            free => {
                self.free = self.slots[free as usize].next;
                self.slots[free as usize] = slot;
                free
            }
        };
        if parent != NONE {
            let sibling = std::mem::replace(&mut self.slots[parent as usize].first_child, id);
            if sibling == NONE {
                self.unlist(parent);
            } else {
                self.slots[id as usize].next = sibling;
                self.slots[sibling as usize].prev = id;
            }
        }
        self.list_newest(id);
        let slots = &self.slots;
        self.index.insert_unique(hash(key.0), id, |id| hash(slots[*id as usize].node.key.0));
        NodeId(id)
    }

    /// Removes a node with all that hangs below it, children before parents.
    pub(super) fn remove(&mut self, top: NodeId, removed: &mut impl FnMut(&Node)) {
        let mut at = top.0;
        loop {
            while self.slots[at as usize].first_child != NONE {
                at = self.slots[at as usize].first_child;
            }
            let parent = self.slots[at as usize].parent;
            self.remove_leaf(at);
            removed(&self.slots[at as usize].node);
            if at == top.0 {
                return;
            }
            at = parent;
        }
    }

    fn remove_leaf(&mut self, id: u32) {
        self.unlist(id);
        let Slot { ref node, parent, next, prev, .. } = self.slots[id as usize];
        let key = node.key;
        if next != NONE {
            self.slots[next as usize].prev = prev;
        }
        if prev != NONE {
            self.slots[prev as usize].next = next;
        } else if parent != NONE {
            self.slots[parent as usize].first_child = next;
            if next == NONE {
                self.list_oldest(parent);
            }
        }
        if let Ok(entry) = self.index.find_entry(hash(key.0), |named| *named == id) {
            entry.remove();
        }
        self.slots[id as usize].next = self.free;
        self.free = id;
    }

    fn list_newest(&mut self, id: u32) {
        let older = std::mem::replace(&mut self.newest_leaf, id);
        self.slots[id as usize].older = older;
        self.slots[id as usize].newer = NONE;
        if older == NONE {
            self.oldest_leaf = id;
        } else {
            self.slots[older as usize].newer = id;
        }
    }

    fn list_oldest(&mut self, id: u32) {
        let newer = std::mem::replace(&mut self.oldest_leaf, id);
        self.slots[id as usize].newer = newer;
        self.slots[id as usize].older = NONE;
        if newer == NONE {
            self.newest_leaf = id;
        } else {
            self.slots[newer as usize].older = id;
        }
    }

    /// Takes a leaf out of their list.
    fn unlist(&mut self, id: u32) {
        let Slot { newer, older, .. } = self.slots[id as usize];
        if newer == NONE {
            self.newest_leaf = older;
        } else {
            self.slots[newer as usize].older = older;
        }
        if older == NONE {
            self.oldest_leaf = newer;
        } else {
            self.slots[older as usize].newer = newer;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn node(key: u64) -> Node {
        let kind = Kind::Plain;
        Node { key: EngineKey(key), own: PageChain::root(), engine: None, kind, level: 0, present: true }
    }

    #[test]
    fn chains_are_given_up_from_their_ends_and_what_they_share_goes_last() {
        let mut tree = Tree::default();
        let root = tree.insert(node(1), None);
        let old = tree.insert(node(2), Some(root));
        tree.insert(node(3), Some(old));
        tree.insert(node(4), Some(root));
        let mut order = Vec::new();
        while let Some(leaf) = tree.oldest_leaf() {
            tree.remove(leaf, &mut |node| order.push(node.key.0));
        }
        assert_eq!(order, [3, 2, 4, 1]);
        assert_eq!(tree.len(), 0);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn behaves_like_a_map_of_parents(steps in prop::collection::vec((0_u8..4, 1_u64..40, 0_u64..40), 0..400)) {
            let mut tree = Tree::default();
            let mut model: BTreeMap<u64, u64> = BTreeMap::new();
            for (step, key, parent) in steps {
                if step < 3 {
                    let parent = if model.contains_key(&parent) { parent } else { 0 };
                    if let std::collections::btree_map::Entry::Vacant(entry) = model.entry(key) {
                        entry.insert(parent);
                        tree.insert(node(key), tree.find(EngineKey(parent)));
                    }
                } else if let Some(id) = tree.find(EngineKey(key)) {
                    let below = |mut at: u64| std::iter::from_fn(|| {
                        let now = at;
                        at = *model.get(&at)?;
                        Some(now)
                    }).any(|above| above == key);
                    let mut expected: Vec<u64> = model.keys().copied().filter(|at| below(*at)).collect();
                    let mut gone = Vec::new();
                    tree.remove(id, &mut |node| gone.push(node.key.0));
                    prop_assert_eq!(gone.last(), Some(&key), "children before parents");
                    gone.sort_unstable();
                    expected.sort_unstable();
                    prop_assert_eq!(&gone, &expected);
                    model.retain(|key, _| !gone.contains(key));
                }
                prop_assert_eq!(tree.len(), model.len());
                let mut held: Vec<u64> = tree.nodes_mut().map(|node| node.key.0).collect();
                held.sort_unstable();
                prop_assert_eq!(held, model.keys().copied().collect::<Vec<_>>());
                let mut leaves = 0;
                let mut at = tree.oldest_leaf;
                while at != NONE {
                    leaves += 1;
                    prop_assert_eq!(tree.slots[at as usize].first_child, NONE);
                    at = tree.slots[at as usize].newer;
                }
                let expected = model.keys().filter(|key| !model.values().any(|parent| parent == *key)).count();
                prop_assert_eq!(leaves, expected);
            }
        }
    }
}
