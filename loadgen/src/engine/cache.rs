//! A paged prefix cache as vLLM keeps one: physical blocks, a queue of free ones that still hold what they held, and a
//! map from digest to the blocks that have it.
//!
//! A block leaves the free queue when a request uses it again and is evicted only when it is handed out for other
//! tokens. Two blocks may hold the same digest: nothing is merged, and each eviction is announced by itself.

use std::collections::{BTreeMap, HashMap};

use super::hash::Digest;

/// Index of a physical block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Page(usize);

/// What happened to the cache, in order of occurrence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Consecutive blocks of one request became full.
    Stored {
        /// The block before the first, none at the start of a sequence.
        parent: Option<Digest>,
        /// The blocks.
        digests: Vec<Digest>,
        /// Tokens of all of them.
        tokens: Vec<u32>,
        /// The salt that entered the first one's hash.
        salt: Option<String>,
    },
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
    changes: Vec<Change>,
}

impl PagedCache {
    /// A cache of `blocks` empty blocks.
    #[must_use]
    pub fn new(blocks: usize) -> Self {
        let mut cache = Self {
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
        let block = &mut self.blocks[page.0];
        debug_assert_eq!(block.users, 0, "a free block has no users");
        block.users = 1;
        if let Some(digest) = block.digest.take() {
            if let Some(pages) = self.held.get_mut(&digest) {
                pages.retain(|other| *other != page);
                if pages.is_empty() {
                    self.held.remove(&digest);
                }
            }
            self.changes.push(Change::Removed(digest));
        }
        page
    }

    /// Records that blocks in use became full with consecutive tokens.
    pub fn store(&mut self, pages: &[Page], run: Change) {
        let Change::Stored { digests, .. } = &run else { return };
        assert_eq!(pages.len(), digests.len(), "one digest a block");
        for (page, digest) in pages.iter().zip(digests) {
            let block = &mut self.blocks[page.0];
            debug_assert!(block.users > 0 && block.digest.is_none(), "a block is stored once, by its user");
            block.digest = Some(*digest);
            self.held.entry(*digest).or_default().push(*page);
        }
        self.changes.push(run);
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
    use crate::engine::hash::{Algo, child, root};
    use crate::engine::testing::Random;
    use std::collections::VecDeque;

    fn digest(number: u32) -> Digest {
        child(Algo::XxhashCbor, &root(Algo::XxhashCbor, "0"), &[number], None)
    }

    fn run(numbers: &[u32]) -> Change {
        let digests = numbers.iter().map(|number| digest(*number)).collect();
        Change::Stored { parent: None, digests, tokens: numbers.to_vec(), salt: None }
    }

    fn store(cache: &mut PagedCache, numbers: &[u32]) -> Vec<Page> {
        let pages = cache.take(numbers.len());
        cache.store(&pages, run(numbers));
        pages
    }

    #[test]
    fn the_tail_of_the_oldest_request_is_evicted_first() {
        let mut cache = PagedCache::new(4);
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
        let mut cache = PagedCache::new(2);
        let first = store(&mut cache, &[1]);
        store(&mut cache, &[1]);
        cache.release(&first);
        cache.take(1);
        assert_eq!(cache.lookup(&[digest(1)]).len(), 1);
        assert_eq!(cache.contents().map(|(_, copies)| copies).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn nothing_is_cleared_while_a_block_is_in_use() {
        let mut cache = PagedCache::new(2);
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
            let mut cache = PagedCache::new(size);
            let mut model = Model { free: (0..size).collect(), holds: vec![None; size], users: vec![0; size] };
            let mut live: Vec<Vec<Page>> = Vec::new();
            for _ in 0..400 {
                if random.below(3) > 0 && !model.free.is_empty() {
                    let numbers: Vec<u32> =
                        (0..1 + random.below(model.free.len())).map(|_| random.below(9) as u32).collect();
                    // The last block may stay without a full content, as the end of a prompt does.
                    let full = numbers.len() - random.below(2);
                    let pages = cache.take(numbers.len());
                    let taken: Vec<_> = numbers.iter().map(|_| model.take()).collect();
                    let mut expected: Vec<_> =
                        taken.iter().filter_map(|(_, old)| *old).map(|old| Change::Removed(digest(old))).collect();
                    if full > 0 {
                        cache.store(&pages[..full], run(&numbers[..full]));
                        taken.iter().zip(&numbers[..full]).for_each(|((block, _), n)| model.holds[*block] = Some(*n));
                        expected.push(run(&numbers[..full]));
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
