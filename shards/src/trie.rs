//! Where the beginnings of texts were sent before (Tier 1): a compressed radix tree over prompts, on each shard for itself.
//!
//! It knows nothing of what engines hold: it only remembers where requests went. Texts are told apart in pieces of
//! [`PIECE_BYTES`], by a hash of each; what is left at a text's end is not looked at. So a node of 64 bytes of text costs 8,
//! and a long text is compared as fast as it is hashed.
//!
//! **Invariant.** A node's text is that of its path from the root; no two children of a node begin with the same piece.
//! Every node but the root has a text that was sent, or several children.

#![forbid(unsafe_code)]

use std::collections::HashMap;

use xxhash_rust::xxh3::xxh3_64;

use crate::ids::EndpointIndex;
use crate::route::TrieMatch;

/// Bytes of text that are told apart.
pub const PIECE_BYTES: usize = 64;
/// Bytes of a text that are looked at: a third of a millisecond. What is beyond is as if it were not there.
pub const TEXT_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Pieces that all nodes together hold, at most so many for each node of the bound. Beyond it the oldest texts go.
const PIECES_PER_NODE: usize = 64;
/// Of so many leaves one is dropped when a bound is reached: the search for the oldest pays for many.
const DROPPED_PART: usize = 16;
const ROOT: u32 = 0;

/// Hashes of a text's pieces.
#[must_use]
pub fn pieces(text: &[u8]) -> Vec<u64> {
    let text = &text[..text.len().min(TEXT_BYTES_MAX)];
    text.chunks_exact(PIECE_BYTES).map(xxh3_64).collect()
}

/// The tree.
#[derive(Debug)]
pub struct Trie {
    nodes: Vec<Node>,
    free: Vec<u32>,
    nodes_max: usize,
    /// Pieces in the labels of all nodes.
    pieces: usize,
    /// Counts insertions: what was used last has the highest number.
    tick: u64,
}

#[derive(Debug, Default)]
struct Node {
    parent: u32,
    /// Pieces between the parent and here; empty for the root and for free places.
    label: Vec<u64>,
    /// By the first piece of their labels.
    children: HashMap<u64, u32>,
    /// Where the last text that begins like this was sent; none once that endpoint was forgotten.
    endpoint: Option<EndpointIndex>,
    used: u64,
}

/// How far a text leads.
struct Walk {
    /// The last node of which some of the label fits.
    node: u32,
    /// Pieces of its label that fit; all of it, unless the text or the fit ends inside.
    inside: usize,
    /// Pieces that fit in all.
    depth: usize,
}

impl Trie {
    /// An empty tree of up to `nodes_max` nodes.
    #[must_use]
    pub fn new(nodes_max: usize) -> Self {
        Trie { nodes: vec![Node::default()], free: Vec::new(), nodes_max: nodes_max.max(2), pieces: 0, tick: 0 }
    }

    /// Nodes in use, the root left out.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.nodes.len() - self.free.len() - 1
    }

    /// Where the longest beginning of the text was sent; none where nothing of it is known, or it has no whole piece.
    #[must_use]
    pub fn find(&self, text: &[u64]) -> Option<TrieMatch> {
        let walk = self.walk(text);
        let (mut node, mut depth, mut inside) = (walk.node, walk.depth, walk.inside);
        while node != ROOT {
            let Node { parent, endpoint, .. } = &self.nodes[node as usize];
            if let Some(endpoint) = *endpoint {
                let matched_percent = (depth * 100 / text.len()) as u8;
                return Some(TrieMatch { endpoint, matched_percent });
            }
            depth -= inside;
            node = *parent;
            inside = self.nodes[node as usize].label.len();
        }
        None
    }

    fn walk(&self, text: &[u64]) -> Walk {
        let mut walk = Walk { node: ROOT, inside: 0, depth: 0 };
        while let Some(&child) = text.get(walk.depth).and_then(|next| self.nodes[walk.node as usize].children.get(next))
        {
            let label = &self.nodes[child as usize].label;
            let inside = label.iter().zip(&text[walk.depth..]).take_while(|(own, other)| own == other).count();
            walk = Walk { node: child, inside, depth: walk.depth + inside };
            if inside < label.len() {
                break;
            }
        }
        walk
    }

    /// Notes that a request with the text was sent to the endpoint.
    pub fn insert(&mut self, text: &[u64], endpoint: EndpointIndex) {
        if text.is_empty() || text.len() > self.pieces_max() {
            return;
        }
        self.tick += 1;
        let walk = self.walk(text);
        let mut node = walk.node;
        if walk.inside < self.nodes[node as usize].label.len() {
            node = self.split(node, walk.inside);
        }
        if walk.depth < text.len() {
            node = self.add_child(node, text[walk.depth..].to_vec());
        }
        while node != ROOT {
            let at = &mut self.nodes[node as usize];
            (at.endpoint, at.used) = (Some(endpoint), self.tick);
            node = at.parent;
        }
        while self.nodes() > self.nodes_max || self.pieces > self.pieces_max() {
            self.drop_oldest();
        }
    }

    /// Forgets what was sent to an endpoint: it is down, and may come back with an empty cache.
    pub fn forget(&mut self, endpoint: EndpointIndex) {
        for node in &mut self.nodes {
            if node.endpoint == Some(endpoint) {
                node.endpoint = None;
            }
        }
    }

    fn pieces_max(&self) -> usize {
        self.nodes_max.saturating_mul(PIECES_PER_NODE)
    }

    fn place(&mut self, node: Node) -> u32 {
        self.pieces += node.label.len();
        match self.free.pop() {
            Some(place) => {
                self.nodes[place as usize] = node;
                place
            }
            None => {
                self.nodes.push(node);
                u32::try_from(self.nodes.len() - 1).expect("bounds of trees are far below 4 billion nodes")
            }
        }
    }

    fn add_child(&mut self, parent: u32, label: Vec<u64>) -> u32 {
        let first = label[0];
        let child = self.place(Node { parent, label, ..Node::default() });
        self.nodes[parent as usize].children.insert(first, child);
        child
    }

    /// Puts a node in the middle of another's label; the new one comes first.
    fn split(&mut self, node: u32, at: usize) -> u32 {
        let Node { parent, label, endpoint, used, .. } = &mut self.nodes[node as usize];
        let lower = label.split_off(at);
        let (upper, parent, endpoint, used) = (std::mem::replace(label, lower), *parent, *endpoint, *used);
        // Counted again by `place`.
        self.pieces -= upper.len();
        let first = upper[0];
        let below = self.nodes[node as usize].label[0];
        let above = self.place(Node { parent, label: upper, children: HashMap::from([(below, node)]), endpoint, used });
        self.nodes[parent as usize].children.insert(first, above);
        self.nodes[node as usize].parent = above;
        above
    }

    /// Drops some of the leaves that were not used for longest, with what only led to them.
    fn drop_oldest(&mut self) {
        let is_leaf = |node: &Node| !node.label.is_empty() && node.children.is_empty();
        let leaves = self.nodes.iter().enumerate().filter(|(_, node)| is_leaf(node));
        let mut leaves: Vec<(u64, u32)> = leaves.map(|(place, node)| (node.used, place as u32)).collect();
        let count = (leaves.len() / DROPPED_PART).max(1).min(leaves.len());
        if count == 0 {
            return;
        }
        leaves.select_nth_unstable(count - 1);
        for (_, leaf) in &leaves[..count] {
            self.remove(*leaf);
        }
    }

    fn remove(&mut self, leaf: u32) {
        let Node { parent, label, .. } = std::mem::take(&mut self.nodes[leaf as usize]);
        self.pieces -= label.len();
        self.free.push(leaf);
        let above = &mut self.nodes[parent as usize];
        above.children.remove(&label[0]);
        if parent != ROOT && above.children.len() == 1 {
            self.merge_with_child(parent);
        }
    }

    /// Joins a node with its only child.
    fn merge_with_child(&mut self, node: u32) {
        let Some(child) = self.nodes[node as usize].children.values().next().copied() else { return };
        let Node { label, children, endpoint, used, .. } = std::mem::take(&mut self.nodes[child as usize]);
        self.free.push(child);
        for below in children.values() {
            self.nodes[*below as usize].parent = node;
        }
        let at = &mut self.nodes[node as usize];
        at.label.extend_from_slice(&label);
        at.children = children;
        (at.endpoint, at.used) = (endpoint, used);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn found(trie: &Trie, text: &[u64]) -> Option<(u16, u8)> {
        trie.find(text).map(|found| (found.endpoint.0, found.matched_percent))
    }

    #[test]
    fn the_deepest_beginning_counts_and_the_last_endpoint_it_was_sent_to() {
        let mut trie = Trie::new(100);
        assert_eq!(found(&trie, &[1, 2]), None);
        trie.insert(&[1, 2, 3, 4], EndpointIndex(0));
        trie.insert(&[1, 2, 5, 6], EndpointIndex(1));
        assert_eq!(trie.nodes(), 3);
        assert_eq!(found(&trie, &[1, 2, 3, 9]), Some((0, 75)));
        assert_eq!(found(&trie, &[1, 2, 5, 6, 7]), Some((1, 80)));
        assert_eq!(found(&trie, &[1, 2, 9, 9]), Some((1, 50)), "what both begin with was last sent to 1");
        assert_eq!(found(&trie, &[1, 9, 9, 9]), Some((1, 25)));
        assert_eq!(found(&trie, &[9]), None);
        assert_eq!(found(&trie, &[]), None);
        trie.insert(&[1, 2], EndpointIndex(2));
        assert_eq!((trie.nodes(), found(&trie, &[1, 2, 3])), (3, Some((0, 100))));
        assert_eq!(found(&trie, &[1, 2]), Some((2, 100)));
    }

    #[test]
    fn an_endpoint_that_is_forgotten_leaves_what_others_have() {
        let mut trie = Trie::new(100);
        trie.insert(&[1, 2, 3, 4], EndpointIndex(0));
        trie.insert(&[1, 2, 5, 6], EndpointIndex(1));
        trie.forget(EndpointIndex(0));
        assert_eq!(found(&trie, &[1, 2, 3, 4]), Some((1, 50)));
        trie.forget(EndpointIndex(1));
        assert_eq!(found(&trie, &[1, 2, 3, 4]), None);
    }

    #[test]
    fn the_bound_holds_and_the_texts_used_last_stay() {
        let mut trie = Trie::new(50);
        for text in 0..1_000_u64 {
            trie.insert(&[text % 7, text, text + 1], EndpointIndex((text % 5) as u16));
            assert!(trie.nodes() <= 50);
        }
        for text in 990..1_000_u64 {
            assert_eq!(found(&trie, &[text % 7, text, text + 1]), Some(((text % 5) as u16, 100)));
        }
        assert!(trie.nodes() > 25, "no more is dropped than has to be");
        trie.insert(&(0..10_000).collect::<Vec<_>>(), EndpointIndex(0));
        assert_eq!(found(&trie, &[999 % 7, 999, 1_000]), Some((4, 100)), "a text beyond the bound is passed over");
    }

    #[test]
    fn texts_are_told_apart_in_pieces() {
        let text = "a".repeat(PIECE_BYTES * 3 + 10);
        assert_eq!(pieces(text.as_bytes()).len(), 3);
        assert_eq!(pieces(&text.as_bytes()[..PIECE_BYTES - 1]).len(), 0);
        assert_eq!(pieces(&vec![b'a'; TEXT_BYTES_MAX + 1_000]).len(), TEXT_BYTES_MAX / PIECE_BYTES);
    }

    proptest! {
        /// Beside a list of all texts that were sent.
        #[test]
        fn it_finds_what_a_plain_list_finds(
            texts in proptest::collection::vec((proptest::collection::vec(0_u64..3, 1..8), 0_u16..4), 1..40),
            asked in proptest::collection::vec(0_u64..3, 1..8),
        ) {
            let mut trie = Trie::new(10_000);
            for (text, endpoint) in &texts {
                trie.insert(text, EndpointIndex(*endpoint));
            }
            let common = |text: &Vec<u64>| text.iter().zip(&asked).take_while(|(a, b)| a == b).count();
            let depth = texts.iter().map(|(text, _)| common(text)).max().unwrap_or(0);
            let last = texts.iter().rev().find(|(text, _)| common(text) == depth);
            let expected = last.filter(|_| depth > 0).map(|(_, endpoint)| (*endpoint, (depth * 100 / asked.len()) as u8));
            prop_assert_eq!(found(&trie, &asked), expected);
            let pieces: usize = trie.nodes.iter().map(|node| node.label.len()).sum();
            prop_assert_eq!(pieces, trie.pieces);
        }

        #[test]
        fn a_small_one_stays_whole(texts in proptest::collection::vec(proptest::collection::vec(0_u64..3, 1..8), 1..200)) {
            let mut trie = Trie::new(8);
            for text in &texts {
                trie.insert(text, EndpointIndex(0));
                prop_assert!(trie.nodes() <= 8);
                let pieces: usize = trie.nodes.iter().map(|node| node.label.len()).sum();
                prop_assert_eq!(pieces, trie.pieces);
                for (place, node) in trie.nodes.iter().enumerate() {
                    for (first, child) in &node.children {
                        let child = &trie.nodes[*child as usize];
                        prop_assert_eq!((child.parent as usize, child.label.first()), (place, Some(first)));
                    }
                }
            }
        }
    }
}
