//! The longest contiguous run of every holder over a prompt's keys, shown slice by slice.
//!
//! **Invariant.** A run never says more than was seen: a holder that is masked, retired or replaced between two slices
//! loses what it had, and one that becomes eligible after block 0 was shown is not taken up.
//!
//! All holders still in the run stand at the same depth, so only those that drop out are written down. The table's runs
//! of blocks are passed one by one: a comparison of their keys with the prompt's, and one look at each holder's row.

use super::runs::{RUN_MAX, Rows};
use super::table::{Slot, SlotState, Spot, Table};
use super::{Guard, Medium, Run, SpaceIndex};
use crate::ids::{BlockKey, EndpointIndex, Rank};

/// `Member::blocks` of a holder that has all keys so far.
const ALL: u32 = u32::MAX;
/// Keys between two that are looked up ahead of their turn: one for each run of the table.
const STRIDE: usize = RUN_MAX;
/// Keys that are looked up at once, so that their accesses to memory overlap.
const AHEAD: usize = 8;
/// Pieces of runs are short below this many blocks.
const SHORT: usize = 4;
/// After so many short pieces one after the other every key is looked up.
const SHORTS: u32 = 2;

/// Longest contiguous run per holder over the keys shown so far. Kept and restarted, it allocates only while it
/// meets more holders than ever before.
#[derive(Debug, Default)]
pub struct Walk {
    /// Whose holders are looked at.
    space: SpaceIndex,
    /// Holders that had block 0, by number.
    members: Vec<Member>,
    /// Those of them that have every key so far, by number.
    alive: Vec<Alive>,
    /// Keys that those have.
    depth: u32,
    shown: u32,
    slots_version: u64,
}

/// A holder as it was when block 0 was shown: while its generation is the same, so is all else.
#[derive(Clone, Copy, Debug)]
struct Member {
    holder: u16,
    endpoint: EndpointIndex,
    rank: Rank,
    medium: Medium,
    generation: u32,
    blocks: u32,
}

#[derive(Clone, Copy, Debug)]
struct Alive {
    holder: u16,
    /// Its place in `members`.
    member: u16,
}

impl Walk {
    /// A walk among the holders of a key space; the default is the service's own.
    #[must_use]
    pub fn in_space(space: SpaceIndex) -> Self {
        Walk { space, ..Walk::default() }
    }

    /// Forgets everything but the memory: the next key shown is block 0.
    pub fn restart(&mut self) {
        self.members.clear();
        self.alive.clear();
        self.depth = 0;
        self.shown = 0;
    }

    /// Keys shown so far, those after the end of every run included.
    #[must_use]
    pub fn blocks_shown(&self) -> u32 {
        self.shown
    }

    /// The runs of all eligible holders that hold block 0, by holder. The guard should be the one that saw the last
    /// keys; a later one is safe too, and leaves out whoever was masked since.
    pub fn runs<'a>(&'a self, guard: &'a Guard<'_>) -> impl Iterator<Item = Run> + 'a {
        let table = &*guard.0;
        let unchanged = self.slots_version == table.slots_version;
        self.members.iter().filter_map(move |member| {
            let Member { endpoint, rank, medium, .. } = *member;
            let blocks = member.blocks.min(self.depth);
            let counts = blocks > 0 && (unchanged || member.counts_in(table));
            counts.then_some(Run { endpoint, rank, medium, blocks, block_tokens: None })
        })
    }

    /// Shows the next keys; false once no eligible holder can go further.
    pub(super) fn advance(&mut self, table: &Table, keys: &[BlockKey]) -> bool {
        let mut first = self.shown == 0;
        self.shown = self.shown.saturating_add(u32::try_from(keys.len()).unwrap_or(u32::MAX));
        if first && keys.is_empty() {
            return true;
        }
        if !first {
            self.forget_changed(table);
        }
        let mut ahead = Ahead::default();
        let mut at = 0;
        while at < keys.len() && (first || !self.alive.is_empty()) {
            let Some(spot) = ahead.spot(table, keys, at) else {
                self.alive.clear();
                return false;
            };
            let (blocks, position) = (table.view_at(spot), spot.position());
            let same = blocks.same(position, &keys[at..]);
            let rows = blocks.rows();
            if std::mem::take(&mut first) {
                self.begin(table, rows, position, same as u32);
            } else {
                self.keep(rows, position, same as u32);
            }
            self.depth += same as u32;
            at += same;
            ahead.passed(same);
        }
        !self.alive.is_empty()
    }

    /// Takes up the eligible holders of block 0, of the first so many blocks.
    fn begin(&mut self, table: &Table, rows: Rows<'_>, position: usize, blocks: u32) {
        self.slots_version = table.slots_version;
        let slots = table.slots();
        // Room for all, so that whether one is taken up is no branch: nobody can foresee who has how much.
        self.members.resize(rows.len(), Member::NONE);
        self.alive.resize(rows.len(), Alive::NONE);
        let (mut members, mut alive) = (0, 0);
        for row in rows.iter() {
            let (holder, has) = (row.holder(), row.from(position));
            let Some(slot) = slots.get(usize::from(holder)) else { continue };
            let counts = (slot.state == SlotState::Eligible) & (slot.space == self.space) & (has > 0);
            let is_alive = has >= blocks;
            let blocks = if is_alive { ALL } else { has };
            let Slot { endpoint, rank, medium, generation, .. } = *slot;
            self.members[members] = Member { holder, endpoint, rank, medium, generation, blocks };
            self.alive[alive] = Alive { holder, member: members as u16 };
            members += usize::from(counts);
            alive += usize::from(counts & is_alive);
        }
        self.members.truncate(members);
        self.alive.truncate(alive);
    }

    /// Drops what was seen of holders that are not what they were when it was seen.
    fn forget_changed(&mut self, table: &Table) {
        if self.slots_version == table.slots_version {
            return;
        }
        self.slots_version = table.slots_version;
        for (place, member) in self.members.iter_mut().enumerate() {
            if table.slot(member.holder).is_none_or(|slot| slot.generation != member.generation) {
                member.blocks = 0;
                self.alive.retain(|alive| usize::from(alive.member) != place);
            }
        }
    }

    /// Ends the run of every holder that has not all of so many blocks.
    fn keep(&mut self, mut rows: Rows<'_>, position: usize, blocks: u32) {
        let mut kept = 0;
        for at in 0..self.alive.len() {
            let alive = self.alive[at];
            let has = rows.pass(alive.holder).from(position);
            let ended = self.depth + has;
            self.members[usize::from(alive.member)].blocks = if has < blocks { ended } else { ALL };
            self.alive[kept] = alive;
            kept += usize::from(has >= blocks);
        }
        self.alive.truncate(kept);
    }
}

impl Member {
    const NONE: Member = Member {
        holder: 0,
        endpoint: EndpointIndex(0),
        rank: Rank(0),
        medium: Medium::Device,
        generation: 0,
        blocks: 0,
    };

    /// Whether the holder is who it was, and counts.
    fn counts_in(&self, table: &Table) -> bool {
        let same = |slot: &Slot| slot.state == SlotState::Eligible && slot.generation == self.generation;
        table.slot(self.holder).is_some_and(same)
    }
}

impl Alive {
    const NONE: Alive = Alive { holder: 0, member: 0 };
}

/// Where keys stand that have not had their turn.
#[derive(Debug, Default)]
struct Ahead {
    spots: [Option<Spot>; AHEAD],
    /// Which key the first of them is of, and how many keys lie between two.
    from: usize,
    stride: usize,
    /// Pieces passed in a row that were short.
    short: u32,
}

impl Ahead {
    /// Where a key stands; none where nobody holds it.
    fn spot(&mut self, table: &Table, keys: &[BlockKey], at: usize) -> Option<Spot> {
        let stride = if self.short < SHORTS { STRIDE } else { 1 };
        if self.stride == 0 || self.stride > stride || at >= self.from + AHEAD * self.stride {
            self.look(table, keys, at, stride);
        }
        let there = |spot: &Spot| table.view_at(*spot).is_at(spot.position(), keys[at]);
        self.known(at).filter(there).or_else(|| table.find_spot(keys[at]))
    }

    /// Where a key stands if it stands in one run with the next that was looked up.
    fn known(&self, at: usize) -> Option<Spot> {
        let steps = (at - self.from).div_ceil(self.stride);
        (*self.spots.get(steps)?)?.before(self.from + steps * self.stride - at)
    }

    /// Looks up every so many keys from one on. Each step reads what it needs of all of them before the next: a branch
    /// that waits for memory keeps what comes after it from being read.
    fn look(&mut self, table: &Table, keys: &[BlockKey], from: usize, stride: usize) {
        (self.spots, self.from, self.stride) = ([None; AHEAD], from, stride);
        let chosen = || keys[from..].iter().step_by(stride).take(AHEAD).copied();
        let mut missing = false;
        for (spot, key) in self.spots.iter_mut().zip(chosen()) {
            *spot = table.guess_head(key);
            missing |= spot.is_none();
        }
        if missing {
            self.look_inside(table, chosen());
        }
        let touch = |seen, spot: &Spot| seen ^ table.view_at(*spot).touch();
        std::hint::black_box(self.spots.iter().flatten().fold(0, touch));
    }

    /// Looks up those of the keys that no run begins with.
    fn look_inside(&mut self, table: &Table, keys: impl Iterator<Item = BlockKey> + Clone) {
        table.touch(keys.clone());
        let mut places = [None; AHEAD];
        let missing = self.spots.iter().zip(&mut places).zip(keys).filter(|((spot, _), _)| spot.is_none());
        missing.for_each(|((_, place), key)| *place = table.guess(key));
        for (spot, place) in self.spots.iter_mut().zip(places) {
            *spot = spot.or_else(|| table.spot(place?));
        }
    }

    /// Notes how long the piece of a run was that was passed.
    fn passed(&mut self, blocks: usize) {
        self.short = if blocks < SHORT { self.short + 1 } else { 0 };
    }
}
