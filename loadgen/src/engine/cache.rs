//! A paged prefix cache as vLLM keeps one: physical blocks, a queue of free ones that still hold what they held, and a
//! map from digest to the blocks that have it.
//!
//! A block leaves the free queue when a request uses it again and is evicted only when it is handed out for other
//! tokens. In vLLM two blocks may hold the same digest: nothing is merged, and each eviction is announced by itself.
//! SGLang and TensorRT-LLM keep a tree, in which a digest has one block: whoever computes it again is given the block
//! that is there, and gives its own back.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::hash::{Digest, Namespace};

/// Index of a physical block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Page(usize);

/// Consecutive blocks of one request that became full.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// The block before the first, none at the start of a sequence.
    pub parent: Option<Digest>,
    /// The blocks.
    pub digests: Vec<Digest>,
    /// Tokens of all of them, equally many in each; a partial block is alone.
    pub tokens: Vec<u32>,
    /// Tokens after the last that entered its hash, and those of the blocks before likewise.
    pub after: Vec<u32>,
    /// What else entered the hashes.
    pub namespace: Arc<Namespace>,
}

impl Run {
    /// Tokens in each block.
    #[must_use]
    pub fn block_tokens(&self) -> usize {
        self.tokens.len() / self.digests.len().max(1)
    }

    /// The blocks from one place to another as a run of their own.
    #[must_use]
    pub fn part(&self, from: usize, to: usize) -> Self {
        let size = self.block_tokens();
        let mut after: Vec<u32> = self.tokens[to * size..].to_vec();
        after.extend_from_slice(&self.after);
        after.truncate(self.after.len());
        Self {
            parent: from.checked_sub(1).map_or(self.parent, |before| Some(self.digests[before])),
            digests: self.digests[from..to].to_vec(),
            tokens: self.tokens[from * size..to * size].to_vec(),
            after,
            namespace: Arc::clone(&self.namespace),
        }
    }
}

/// What happened to the cache, in order of occurrence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Blocks became full.
    Stored(Run),
    /// One physical block was evicted.
    Removed(Digest),
    /// Everything was dropped.
    Cleared,
}

#[derive(Clone, Debug, Default)]
struct Block {
    /// Requests that use it now; zero: it is in the free queue.
    users: u32,
    /// What it holds, once full.
    digest: Option<Digest>,
    /// Its place in the free queue.
    place: i64,
}

/// The cache. Its size is fixed; a request that finds no free block has to wait.
#[derive(Debug)]
pub struct PagedCache {
    blocks: Vec<Block>,
    /// Free blocks by their place: the first is the next to be handed out.
    free: BTreeMap<i64, Page>,
    /// The place before the first and the one after the last.
    front: i64,
    back: i64,
    /// Blocks with a digest, each list in order of storing and never empty.
    held: HashMap<Digest, Vec<Page>>,
    /// Whether a digest has one block only.
    unique: bool,
    changes: Vec<Change>,
}

impl PagedCache {
    /// A cache of `blocks` empty blocks, in which a digest has one block only if it is `unique`.
    #[must_use]
    pub fn new(blocks: usize, unique: bool) -> Self {
        let mut cache = Self {
            unique,
            blocks: vec![Block::default(); blocks],
            free: BTreeMap::new(),
            front: -1,
            back: 0,
            held: HashMap::new(),
            changes: Vec::new(),
        };
        (0..blocks).rev().for_each(|index| cache.queue(Page(index)));
        cache
    }

    /// Puts a block that nobody uses into the free queue: at its end, or at its front where it holds nothing.
    fn queue(&mut self, page: Page) {
        let block = &mut self.blocks[page.0];
        let end = if block.digest.is_some() { &mut self.back } else { &mut self.front };
        block.place = *end;
        *end += if block.digest.is_some() { 1 } else { -1 };
        self.free.insert(block.place, page);
    }

    /// Blocks that hold the longest run of `digests` from the first.
    #[must_use]
    pub fn lookup(&self, digests: &[Digest]) -> Vec<Page> {
        digests.iter().map_while(|digest| self.held.get(digest).map(|pages| pages[0])).collect()
    }

    /// Whether `hits` can be used and `fresh` further blocks be handed out, without doing so.
    #[must_use]
    pub fn has_room(&self, hits: &[Page], fresh: usize) -> bool {
        let idle_hits = hits.iter().filter(|page| self.blocks[page.0].users == 0).count();
        self.free.len() >= idle_hits + fresh
    }

    /// Uses blocks that were found by [`Self::lookup`].
    pub fn hold(&mut self, hits: &[Page]) {
        for page in hits {
            let block = &mut self.blocks[page.0];
            if block.users == 0 {
                self.free.remove(&block.place);
            }
            block.users += 1;
        }
    }

    /// Hands out `count` blocks, evicting what they held. The caller has asked [`Self::has_room`].
    pub fn take(&mut self, count: usize) -> Vec<Page> {
        assert!(self.free.len() >= count, "the caller asks for room first");
        (0..count).map_while(|_| self.free.pop_first().map(|(_, page)| self.evict(page))).collect()
    }

    fn evict(&mut self, page: Page) -> Page {
        debug_assert_eq!(self.blocks[page.0].users, 0, "a free block has no users");
        self.blocks[page.0].users = 1;
        self.forget(page);
        page
    }

    /// Drops what a block holds, if anything.
    fn forget(&mut self, page: Page) {
        if let Some(digest) = self.blocks[page.0].digest.take() {
            if let Some(pages) = self.held.get_mut(&digest) {
                pages.retain(|other| *other != page);
                if pages.is_empty() {
                    self.held.remove(&digest);
                }
            }
            self.changes.push(Change::Removed(digest));
        }
    }

    /// Records that blocks in use became full with consecutive tokens. Where a digest has one block only, `pages` of
    /// digests that are held already are replaced by those that hold them.
    pub fn store(&mut self, pages: &mut [Page], run: &Run) {
        assert_eq!(pages.len(), run.digests.len(), "one digest a block");
        let (count, mut from) = (pages.len(), 0);
        for (place, page) in pages.iter_mut().enumerate() {
            let digest = run.digests[place];
            if let Some(held) = self.held.get(&digest).filter(|_| self.unique).map(|found| found[0]) {
                self.announce(run, from, place);
                from = place + 1;
                if held != *page {
                    self.hold(&[held]);
                    self.release(&[std::mem::replace(page, held)]);
                }
                continue;
            }
            self.forget(*page);
            let block = &mut self.blocks[page.0];
            debug_assert!(block.users > 0, "a block is stored by its user");
            block.digest = Some(digest);
            self.held.entry(digest).or_default().push(*page);
        }
        self.announce(run, from, count);
    }

    fn announce(&mut self, run: &Run, from: usize, to: usize) {
        if from < to {
            self.changes.push(Change::Stored(run.part(from, to)));
        }
    }

    /// Gives a request's blocks back, its last first, so that the tail of a prompt is evicted before its head. Blocks
    /// that never became full are handed out again before anything is evicted.
    pub fn release(&mut self, pages: &[Page]) {
        for page in pages.iter().rev() {
            let block = &mut self.blocks[page.0];
            block.users -= 1;
            if block.users == 0 {
                self.queue(*page);
            }
        }
    }

    /// Drops everything, unless a request uses a block.
    pub fn clear(&mut self) -> bool {
        if self.used() > 0 {
            return false;
        }
        self.held.clear();
        self.blocks.iter_mut().for_each(|block| block.digest = None);
        self.changes.push(Change::Cleared);
        true
    }

    /// Notes that everything was dropped, as an engine does that says so when it starts.
    pub fn announce_empty(&mut self) {
        self.changes.push(Change::Cleared);
    }

    /// Whether a digest is held.
    #[must_use]
    pub fn holds(&self, digest: &Digest) -> bool {
        self.held.contains_key(digest)
    }

    /// Blocks in use by requests.
    #[must_use]
    pub fn used(&self) -> usize {
        self.blocks.len() - self.free.len()
    }

    /// Blocks in all.
    #[must_use]
    pub fn size(&self) -> usize {
        self.blocks.len()
    }

    /// The digests held, with how many blocks hold each.
    pub fn contents(&self) -> impl Iterator<Item = (&Digest, usize)> {
        self.held.iter().map(|(digest, pages)| (digest, pages.len()))
    }

    /// What happened since the last call. Grows until it is called: once a scheduler step.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::hash::trtllm;
    use crate::engine::testing::Random;
    use std::collections::VecDeque;

    fn digest(number: u32) -> Digest {
        trtllm::Chain { salted: true }.child(&trtllm::root(), &[number], &Namespace::default())
    }

    fn run(numbers: &[u32]) -> Run {
        let digests = numbers.iter().map(|number| digest(*number)).collect();
        Run { digests, tokens: numbers.to_vec(), ..Run::default() }
    }

    fn store(cache: &mut PagedCache, numbers: &[u32]) -> Vec<Page> {
        let mut pages = cache.take(numbers.len());
        cache.store(&mut pages, &run(numbers));
        pages
    }

    #[test]
    fn the_tail_of_the_oldest_request_is_evicted_first() {
        let mut cache = PagedCache::new(4, false);
        let first = store(&mut cache, &[1, 2]);
        let second = store(&mut cache, &[3, 4]);
        cache.release(&first);
        cache.release(&second);
        cache.take_changes();
        store(&mut cache, &[5, 6, 7]);
        let removed: Vec<_> =
            cache.take_changes().into_iter().filter(|change| matches!(change, Change::Removed(_))).collect();
        assert_eq!(removed, [2, 1, 4].map(|number| Change::Removed(digest(number))));
        assert_eq!(cache.lookup(&[digest(3), digest(4)]).len(), 1);
    }

    #[test]
    fn a_copy_outlives_the_eviction_of_another() {
        let mut cache = PagedCache::new(2, false);
        let first = store(&mut cache, &[1]);
        store(&mut cache, &[1]);
        cache.release(&first);
        cache.take(1);
        assert_eq!(cache.lookup(&[digest(1)]).len(), 1);
        assert_eq!(cache.contents().map(|(_, copies)| copies).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn in_a_tree_a_digest_has_one_block() {
        let mut cache = PagedCache::new(4, true);
        let first = store(&mut cache, &[1, 2]);
        cache.take_changes();
        let second = store(&mut cache, &[1, 3]);
        let expected = Run { parent: Some(digest(1)), ..run(&[3]) };
        assert_eq!(cache.take_changes(), [Change::Stored(expected)], "what is there is not told again");
        assert_eq!(second[0], first[0]);
        assert_eq!(cache.used(), 3, "the block computed in vain is free again");
        cache.release(&first);
        cache.release(&second);
        assert_eq!(cache.used(), 0);
        store(&mut cache, &[4, 5, 6]);
        let removed = cache.take_changes().into_iter().filter(|change| matches!(change, Change::Removed(_)));
        assert_eq!(removed.collect::<Vec<_>>(), [2, 3].map(|n| Change::Removed(digest(n))), "leaves go first");
    }

    #[test]
    fn nothing_is_cleared_while_a_block_is_in_use() {
        let mut cache = PagedCache::new(2, false);
        let pages = store(&mut cache, &[1]);
        assert!(!cache.clear());
        cache.release(&pages);
        assert!(cache.clear());
        assert!(cache.lookup(&[digest(1)]).is_empty());
        assert_eq!(cache.take_changes().last(), Some(&Change::Cleared));
    }

    /// The cache as one would explain it: a list of free blocks, and what each block holds.
    struct Model {
        free: VecDeque<usize>,
        holds: Vec<Option<u32>>,
        users: Vec<u32>,
    }

    impl Model {
        fn take(&mut self) -> (usize, Option<u32>) {
            let block = self.free.pop_front().expect("the test asks for room first");
            self.users[block] = 1;
            (block, self.holds[block].take())
        }

        fn find(&self, number: u32) -> bool {
            self.holds.contains(&Some(number))
        }
    }

    #[test]
    fn random_use_agrees_with_the_obvious_model() {
        for seed in 0..20 {
            let mut random = Random::new(seed);
            let size = 2 + random.below(12);
            let mut cache = PagedCache::new(size, false);
            let mut model = Model { free: (0..size).collect(), holds: vec![None; size], users: vec![0; size] };
            let mut live: Vec<Vec<Page>> = Vec::new();
            for _ in 0..400 {
                if random.below(3) > 0 && !model.free.is_empty() {
                    let numbers: Vec<u32> =
                        (0..1 + random.below(model.free.len())).map(|_| random.below(9) as u32).collect();
                    // The last block may stay without a full content, as the end of a prompt does.
                    let full = numbers.len() - random.below(2);
                    let mut pages = cache.take(numbers.len());
                    let taken: Vec<_> = numbers.iter().map(|_| model.take()).collect();
                    let mut expected: Vec<_> =
                        taken.iter().filter_map(|(_, old)| *old).map(|old| Change::Removed(digest(old))).collect();
                    if full > 0 {
                        cache.store(&mut pages[..full], &run(&numbers[..full]));
                        taken.iter().zip(&numbers[..full]).for_each(|((block, _), n)| model.holds[*block] = Some(*n));
                        expected.push(Change::Stored(run(&numbers[..full])));
                    }
                    assert_eq!(cache.take_changes(), expected, "seed {seed}");
                    assert!(pages.iter().zip(&taken).all(|(page, (block, _))| page.0 == *block), "seed {seed}");
                    live.push(pages);
                } else if random.below(2) == 0 {
                    let number = random.below(9) as u32;
                    let hits = cache.lookup(&[digest(number)]);
                    assert_eq!(!hits.is_empty(), model.find(number), "seed {seed}");
                    cache.hold(&hits);
                    for page in &hits {
                        model.free.retain(|block| *block != page.0);
                        model.users[page.0] += 1;
                    }
                    live.push(hits);
                } else if !live.is_empty() {
                    let pages = live.swap_remove(random.below(live.len()));
                    cache.release(&pages);
                    for page in pages.iter().rev() {
                        model.users[page.0] -= 1;
                        if model.users[page.0] == 0 {
                            if model.holds[page.0].is_some() {
                                model.free.push_back(page.0);
                            } else {
                                model.free.push_front(page.0);
                            }
                        }
                    }
                }
                assert_eq!(cache.used(), size - model.free.len(), "seed {seed}");
            }
        }
    }
}
