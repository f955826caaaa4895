//! Memory of one side's runs, in lines of the processor's cache.
//!
//! A run takes as many lines as it needs, and another piece of memory when it needs more or far fewer. Pieces of one size
//! are cut from pages, and a page all of whose pieces are free serves any size again, so that what grows one after the
//! other, as the blocks of a fleet do, leaves nothing behind. Pieces larger than [`CUT_MAX`] lines have a page of their own.
//!
//! A piece is a number: who has it reads it with two accesses to memory, of which the first is to the short list of pages.
//!
//! **Invariant.** A page is in the list of its size's open ones while it has pieces that are free, and all free ones of it
//! are in its chain; it is among the empty ones, and of no size, while all of them are.

use std::num::NonZeroU32;

/// Words of a line.
pub(super) const LINE: usize = 8;
/// Lines of a page, as a power of 2: 256 kB.
const PAGE_BITS: u32 = 12;
const PAGE_LINES: usize = 1 << PAGE_BITS;
/// Lines of the largest piece that is cut from a page.
const CUT_MAX: usize = 128;
/// Empty pages that keep their memory: more than come and go while a fleet's blocks do.
const EMPTY_KEPT: usize = 4;
/// The end of a page's chain of free pieces.
const NONE: u32 = u32::MAX;

/// A piece of memory: its page and line. Meaningless on the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece(NonZeroU32);

impl Piece {
    /// Bits of its number.
    pub(super) const BITS: u32 = u32::BITS;

    fn new(page: usize, line: usize) -> Self {
        let number = u32::try_from(page << PAGE_BITS | line).ok().and_then(|number| number.checked_add(1));
        Piece(number.and_then(NonZeroU32::new).expect("256 GB are more than anybody's inventory"))
    }

    fn page(self) -> usize {
        (self.0.get() - 1) as usize >> PAGE_BITS
    }

    fn line(self) -> usize {
        (self.0.get() - 1) as usize % PAGE_LINES
    }

    pub(super) fn number(self) -> u32 {
        self.0.get()
    }

    /// The piece of a number that [`number`](Piece::number) gave.
    pub(super) fn of_number(number: u32) -> Option<Self> {
        NonZeroU32::new(number).map(Piece)
    }
}

#[derive(Debug, Default)]
struct Page {
    words: Box<[u64]>,
    /// Words before the first line.
    first: u32,
    /// Lines of each of its pieces; 0 = it is empty.
    lines: u32,
    /// Pieces that are taken.
    used: u32,
    /// The line from which on no piece was ever taken.
    fresh: u32,
    /// The first free piece's line; its first word is the next one's.
    free: u32,
    /// Its place in the list of open pages, while it is there.
    open_at: u32,
}

impl Page {
    /// Makes it one of pieces of so many lines.
    fn begin(&mut self, lines: usize) {
        let room = if lines <= CUT_MAX { PAGE_LINES } else { lines };
        // Up to a line's beginning.
        let words = room * LINE + LINE - 1;
        if self.words.len() != words {
            self.words = vec![0; words].into_boxed_slice();
            self.first = first_line(&self.words);
        }
        (self.lines, self.used, self.fresh, self.free) = (lines as u32, 0, 0, NONE);
    }

    fn word(&self, line: usize) -> usize {
        self.first as usize + line * LINE
    }

    /// Whether all its pieces, which are cut from it, are taken.
    fn is_full(&self) -> bool {
        self.free == NONE && (self.fresh + self.lines) as usize > PAGE_LINES
    }

    fn take(&mut self) -> usize {
        self.used += 1;
        if self.free == NONE {
            self.fresh += self.lines;
            return (self.fresh - self.lines) as usize;
        }
        let line = self.free as usize;
        self.free = self.words[self.word(line)] as u32;
        line
    }

    fn give_back(&mut self, line: usize) {
        self.used -= 1;
        let at = self.word(line);
        self.words[at] = self.free.into();
        self.free = line as u32;
    }
}

/// Words before the first that begins a line.
fn first_line(words: &[u64]) -> u32 {
    let bytes = LINE * size_of::<u64>();
    let beyond = words.as_ptr().addr() % bytes;
    ((bytes - beyond) % bytes / size_of::<u64>()) as u32
}

/// A copy lies elsewhere, and its lines begin elsewhere in it.
impl Clone for Page {
    fn clone(&self) -> Self {
        let mut words = vec![0; self.words.len()].into_boxed_slice();
        let first = if words.is_empty() { 0 } else { first_line(&words) };
        if !words.is_empty() {
            let lines = self.words.len() + 1 - LINE;
            let (from, to) = (self.first as usize, first as usize);
            words[to..to + lines].copy_from_slice(&self.words[from..from + lines]);
        }
        Page { words, first, ..*self }
    }
}

/// The memory.
#[derive(Clone, Debug)]
pub(super) struct Arena {
    pages: Vec<Page>,
    /// Pages with free pieces of so many lines and one.
    open: Box<[Vec<u32>; CUT_MAX]>,
    /// Pages of no size.
    empty: Vec<u32>,
}

impl Default for Arena {
    fn default() -> Self {
        Arena { pages: Vec::new(), open: Box::new([const { Vec::new() }; CUT_MAX]), empty: Vec::new() }
    }
}

impl Arena {
    /// All of a piece.
    pub(super) fn words(&self, piece: Piece) -> &[u64] {
        let page = &self.pages[piece.page()];
        let at = page.word(piece.line());
        &page.words[at..at + page.lines as usize * LINE]
    }

    /// The same to be changed.
    pub(super) fn words_mut(&mut self, piece: Piece) -> &mut [u64] {
        let page = &mut self.pages[piece.page()];
        let at = page.word(piece.line());
        &mut page.words[at..at + page.lines as usize * LINE]
    }

    /// A piece of so many lines, at least 1; what stands in it means nothing.
    pub(super) fn take(&mut self, lines: usize) -> Piece {
        let number = match self.open.get(lines - 1).and_then(|open| open.last()) {
            Some(number) => *number as usize,
            None => self.open_page(lines),
        };
        let page = &mut self.pages[number];
        let line = page.take();
        if lines <= CUT_MAX && page.is_full() {
            self.open[lines - 1].pop();
        }
        Piece::new(number, line)
    }

    /// An empty page, for pieces of so many lines.
    fn open_page(&mut self, lines: usize) -> usize {
        let number = self.empty.pop().map_or(self.pages.len(), |number| number as usize);
        if number == self.pages.len() {
            self.pages.push(Page::default());
        }
        self.pages[number].begin(lines);
        if lines <= CUT_MAX {
            self.list(number);
        }
        number
    }

    /// Puts a page into the list of those that are open.
    fn list(&mut self, number: usize) {
        let page = &mut self.pages[number];
        let open = &mut self.open[page.lines as usize - 1];
        page.open_at = open.len() as u32;
        open.push(number as u32);
    }

    /// Takes a page out of that list.
    fn unlist(&mut self, number: usize) {
        let page = &self.pages[number];
        let (open, at) = (&mut self.open[page.lines as usize - 1], page.open_at as usize);
        open.swap_remove(at);
        if let Some(moved) = open.get(at) {
            self.pages[*moved as usize].open_at = at as u32;
        }
    }

    /// The piece is free from now on.
    pub(super) fn give_back(&mut self, piece: Piece) {
        let number = piece.page();
        let page = &mut self.pages[number];
        let (was_full, is_cut) = (page.is_full(), page.lines as usize <= CUT_MAX);
        page.give_back(piece.line());
        let is_unused = page.used == 0;
        if was_full && is_cut && !is_unused {
            self.list(number);
        }
        if is_unused {
            if is_cut && !was_full {
                self.unlist(number);
            }
            let page = &mut self.pages[number];
            page.lines = 0;
            if !is_cut || self.empty.len() >= EMPTY_KEPT {
                page.words = Box::default();
            }
            self.empty.push(number as u32);
        }
    }

    /// Moves what stands at the front and at the back of a piece to a new one of so many lines, another number than it has.
    pub(super) fn move_to(&mut self, piece: Piece, lines: usize, (front, back): (usize, usize)) -> Piece {
        let new = self.take(lines);
        // Pieces of two sizes are of two pages.
        let pages = self.pages.get_disjoint_mut([piece.page(), new.page()]);
        let [old_page, new_page] = pages.expect("a page's pieces are of one size");
        let (from, to) = (old_page.word(piece.line()), new_page.word(new.line()));
        let (from_end, to_end) = (from + old_page.lines as usize * LINE, to + lines * LINE);
        new_page.words[to..to + front].copy_from_slice(&old_page.words[from..from + front]);
        new_page.words[to_end - back..to_end].copy_from_slice(&old_page.words[from_end - back..from_end]);
        self.give_back(piece);
        new
    }

    /// Whether no piece is taken; for tests.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.empty.len() == self.pages.len() && self.open.iter().all(Vec::is_empty)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_piece_begins_with_a_line_and_so_does_a_copy_of_it() {
        let mut arena = Arena::default();
        let pieces: Vec<_> = [1, 7, 7, 300, 9].map(|lines| (lines, arena.take(lines))).into();
        for (number, (_, piece)) in pieces.iter().enumerate() {
            arena.words_mut(*piece).fill(number as u64);
        }
        for arena in [&arena, &arena.clone()] {
            for (number, (lines, piece)) in pieces.iter().enumerate() {
                let words = arena.words(*piece);
                assert_eq!((words.len(), words.as_ptr().addr() % 64), (lines * LINE, 0));
                assert!(words.iter().all(|word| *word == number as u64));
            }
        }
    }

    #[test]
    fn what_grows_one_after_the_other_leaves_nothing_behind() {
        let mut arena = Arena::default();
        let mut pieces: Vec<_> = (0..2_000).map(|_| arena.take(1)).collect();
        let mut most = 0;
        for lines in 2..20 {
            pieces.iter_mut().for_each(|piece| *piece = arena.move_to(*piece, lines, (1, 1)));
            let held: usize = arena.pages.iter().map(|page| page.words.len() / LINE).sum();
            most = most.max(held * 100 / (lines * pieces.len()));
        }
        assert!(most < 250, "{most} % of what is used is taken");
        pieces.into_iter().for_each(|piece| arena.give_back(piece));
        assert!(arena.is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn pieces_keep_what_is_written_to_them(steps in prop::collection::vec((0_u8..5, 0_usize..40, 1_usize..140), 0..300)) {
            // Few of the larger ones fill a page.
            let sizes = |lines: usize| if lines < 130 { lines.div_ceil(16) * 16 } else { lines };
            let mut arena = Arena::default();
            let mut model: Vec<(Piece, usize, u64)> = Vec::new();
            for (number, (step, at, lines)) in steps.into_iter().enumerate() {
                let (lines, number) = (sizes(lines), number as u64);
                match step {
                    0..3 => {
                        let piece = arena.take(lines);
                        arena.words_mut(piece).fill(number);
                        model.push((piece, lines, number));
                    }
                    3 if at < model.len() => arena.give_back(model.swap_remove(at).0),
                    _ if at < model.len() && model[at].1 != lines => {
                        let (piece, old, number) = model[at];
                        let back = old.min(lines) * LINE / 2;
                        let new = arena.move_to(piece, lines, (back, back));
                        let words = arena.words(new);
                        prop_assert!(words[..back].iter().chain(&words[words.len() - back..]).all(|word| *word == number));
                        arena.words_mut(new).fill(number);
                        model[at] = (new, lines, number);
                    }
                    _ => {}
                }
                for (piece, lines, number) in &model {
                    let words = arena.words(*piece);
                    prop_assert!(words.len() == lines * LINE && words.iter().all(|word| word == number));
                }
            }
            model.into_iter().for_each(|(piece, ..)| arena.give_back(piece));
            prop_assert!(arena.is_empty());
        }
    }
}
