//! All prompts of a trace as paths through one tree of segments.
//!
//! A *segment* is a run of blocks that no prompt of the trace enters or leaves but at its ends, so a prompt is a list of
//! segments, and what happens to a block happens to all of its segment at once (a cache may give up a segment's last
//! blocks alone). A prompt of a thousand blocks in a long conversation is a path of a few dozen segments, which is what
//! makes the simulation fast.

use std::collections::HashMap;

/// A segment of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Segment(pub u32);

impl Segment {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Lengths of segments and the paths of prompts.
#[derive(Clone, Debug)]
pub struct Prefixes {
    /// Blocks of each segment, at least 1.
    blocks: Vec<u32>,
    /// Segments of all prompts, one prompt after the other.
    segments: Vec<Segment>,
    /// Where each prompt's segments begin, and where the last ones end.
    starts: Vec<u32>,
}

impl Prefixes {
    /// The tree of prompts given as block ids. Equal ids after equal beginnings are the same block.
    pub fn new<'a>(prompts: impl Iterator<Item = &'a [u64]>) -> Self {
        let mut nodes = Nodes::default();
        let leaves: Vec<Option<u32>> = prompts.map(|prompt| nodes.insert(prompt)).collect();
        let mut this = Prefixes { blocks: Vec::new(), segments: Vec::new(), starts: vec![0] };
        let segment_of = this.cut(&nodes);
        for leaf in leaves {
            let begin = this.segments.len();
            let mut at = leaf;
            while let Some(node) = at {
                let segment = segment_of[node as usize];
                if this.segments.len() == begin || this.segments.last() != Some(&segment) {
                    this.segments.push(segment);
                }
                at = nodes.parent(node);
            }
            this.segments[begin..].reverse();
            this.starts.push(this.segments.len() as u32);
        }
        this
    }

    /// Numbers the segments of the nodes: a node goes on its parent's segment if nothing else follows the parent.
    fn cut(&mut self, nodes: &Nodes) -> Vec<Segment> {
        let mut segment_of: Vec<Segment> = Vec::with_capacity(nodes.parents.len());
        for node in 0..nodes.parents.len() {
            let goes_on = nodes.parent(node as u32).filter(|&parent| !nodes.ends_segment(parent));
            let segment = match goes_on {
                Some(parent) => segment_of[parent as usize],
                None => {
                    self.blocks.push(0);
                    Segment(self.blocks.len() as u32 - 1)
                }
            };
            self.blocks[segment.index()] += 1;
            segment_of.push(segment);
        }
        segment_of
    }

    /// How many segments there are.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks of a segment.
    pub fn blocks(&self, segment: Segment) -> u32 {
        self.blocks[segment.index()]
    }

    /// Distinct blocks of the trace.
    pub fn distinct_blocks(&self) -> u64 {
        self.blocks.iter().map(|blocks| u64::from(*blocks)).sum()
    }

    /// The segments of a prompt, from its beginning on.
    pub fn path(&self, prompt: usize) -> &[Segment] {
        &self.segments[self.starts[prompt] as usize..self.starts[prompt + 1] as usize]
    }
}

/// The tree of single blocks; parents come before their children.
#[derive(Default)]
struct Nodes {
    /// Parent plus 1; 0 = none.
    parents: Vec<u32>,
    children: Vec<u32>,
    /// A prompt ends there.
    ends: Vec<bool>,
    by_id: HashMap<(u32, u64), u32>,
    /// The prompt put in last, by ids and nodes.
    last: Vec<(u64, u32)>,
}

impl Nodes {
    fn insert(&mut self, prompt: &[u64]) -> Option<u32> {
        // Most prompts go on where the one before them ended.
        let common = self.last.iter().zip(prompt).take_while(|((id, _), other)| id == *other).count();
        self.last.truncate(common);
        let mut above = self.last.last().map_or(0, |(_, node)| node + 1);
        for &id in &prompt[common..] {
            let next = self.parents.len() as u32;
            let node = *self.by_id.entry((above, id)).or_insert(next);
            if node == next {
                self.parents.push(above);
                self.children.push(0);
                self.ends.push(false);
                if let Some(parent) = above.checked_sub(1) {
                    self.children[parent as usize] += 1;
                }
            }
            self.last.push((id, node));
            above = node + 1;
        }
        let last = above.checked_sub(1)?;
        self.ends[last as usize] = true;
        Some(last)
    }

    fn parent(&self, node: u32) -> Option<u32> {
        self.parents[node as usize].checked_sub(1)
    }

    fn ends_segment(&self, node: u32) -> bool {
        self.ends[node as usize] || self.children[node as usize] != 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_share_the_segments_that_they_have_in_common_and_no_others() {
        let prompts: [&[u64]; 5] = [&[1, 2, 3, 4], &[1, 2], &[1, 2, 3, 9, 9], &[7, 2], &[]];
        let prefixes = Prefixes::new(prompts.into_iter());
        let lengths =
            |prompt| prefixes.path(prompt).iter().map(|segment| prefixes.blocks(*segment)).collect::<Vec<_>>();
        assert_eq!(lengths(0), [2, 1, 1]);
        assert_eq!(lengths(1), [2]);
        assert_eq!(lengths(2), [2, 1, 2]);
        assert_eq!(lengths(3), [2], "an equal id after another beginning is another block");
        assert_eq!(lengths(4), [0_u32; 0]);
        assert_eq!(prefixes.path(0)[..2], prefixes.path(2)[..2]);
        assert_ne!(prefixes.path(3)[0], prefixes.path(1)[0]);
        assert_eq!((prefixes.len(), prefixes.distinct_blocks()), (5, 8));
    }
}
