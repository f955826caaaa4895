//! The longest contiguous run of every holder over a prompt's keys, shown slice by slice.
//!
//! **Invariant.** A run never says more than was seen: a holder that is masked, retired or replaced between two slices
//! loses what it had, and one that becomes eligible after block 0 was shown is not taken up.
//!
//! All holders still in the run stand at the same depth, so only those that drop out are written down. A set equal to
//! the last one (see [`super::sets`]) changes nothing and costs one comparison.

use super::sets::{INLINE_MAX, SetRef};
use super::table::{Slot, SlotState, Table};
use super::{Guard, Run, SpaceIndex};
use crate::ids::BlockKey;

/// Keys looked up before their sets are looked at, so that the memory accesses overlap.
const BATCH: usize = 32;
/// `Member::blocks` of a holder that has all keys so far.
const ALL: u32 = u32::MAX;

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

#[derive(Clone, Copy, Debug)]
struct Member {
    holder: u16,
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
        self.members.iter().filter_map(move |member| {
            let slot = table.slot(member.holder)?;
            let valid = slot.state == SlotState::Eligible && slot.generation == member.generation;
            let blocks = member.blocks.min(self.depth);
            let Slot { endpoint, rank, medium, .. } = *slot;
            (valid && blocks > 0).then_some(Run { endpoint, rank, medium, blocks, block_tokens: None })
        })
    }

    /// Shows the next keys; false once no eligible holder can go further.
    pub(super) fn advance(&mut self, table: &Table, keys: &[BlockKey]) -> bool {
        let first = self.shown == 0;
        self.shown = self.shown.saturating_add(u32::try_from(keys.len()).unwrap_or(u32::MAX));
        table.touch(keys.iter().take(BATCH + usize::from(first)).copied());
        let mut rest = keys;
        if first {
            let Some((key, others)) = keys.split_first() else { return true };
            if !self.begin(table, *key) {
                return false;
            }
            rest = others;
        } else {
            self.forget_changed(table);
        }
        if self.alive.is_empty() {
            return false;
        }
        let mut last = None;
        while !rest.is_empty() {
            let (batch, others) = rest.split_at(rest.len().min(BATCH));
            rest = others;
            table.touch(rest.iter().take(BATCH).copied());
            let mut sets = [SetRef::EMPTY; BATCH];
            for (set, key) in sets.iter_mut().zip(batch) {
                *set = table.find(*key);
                if set.is_empty() {
                    break;
                }
            }
            let mut inline = [[0; INLINE_MAX]; BATCH];
            let mut holders: [&[u16]; BATCH] = [&[]; BATCH];
            for ((holders, inline), set) in holders.iter_mut().zip(&mut inline).zip(sets) {
                *holders = table.sets.holders(set, inline);
            }
            std::hint::black_box(holders.iter().fold(0, |seen, set| seen ^ set.first().map_or(0, |holder| *holder)));
            for (set, holders) in sets.into_iter().zip(holders).take(batch.len()) {
                if last != Some(set) {
                    self.keep(holders);
                    if self.alive.is_empty() {
                        return false;
                    }
                    last = Some(set);
                }
                self.depth += 1;
            }
        }
        true
    }

    /// Takes up the eligible holders of block 0.
    fn begin(&mut self, table: &Table, key: BlockKey) -> bool {
        self.slots_version = table.slots_version;
        for &holder in table.sets.holders(table.find(key), &mut [0; INLINE_MAX]) {
            let counts = |slot: &&Slot| slot.state == SlotState::Eligible && slot.space == self.space;
            let Some(slot) = table.slot(holder).filter(counts) else { continue };
            self.alive.push(Alive { holder, member: self.members.len() as u16 });
            self.members.push(Member { holder, generation: slot.generation, blocks: ALL });
        }
        self.depth = 1;
        !self.alive.is_empty()
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

    /// Ends the run of every holder that is not in the (sorted) set. Most often all are, or all but one: what is equal
    /// is passed over together.
    fn keep(&mut self, set: &[u16]) {
        let (mut kept, mut next, mut rest) = (0, 0, set);
        while next < self.alive.len() {
            let same =
                self.alive[next..].iter().zip(rest).take_while(|(alive, holder)| alive.holder == **holder).count();
            self.alive.copy_within(next..next + same, kept);
            (kept, next, rest) = (kept + same, next + same, &rest[same..]);
            let Some(&Alive { holder, member }) = self.alive.get(next) else { break };
            // A set far larger than what is alive is not gone through one by one.
            let skip = if (self.alive.len() - next) * 8 < rest.len() {
                rest.partition_point(|&other| other < holder)
            } else {
                rest.iter().take_while(|&&other| other < holder).count()
            };
            rest = &rest[skip..];
            if rest.first() != Some(&holder) {
                self.members[usize::from(member)].blocks = self.depth;
                next += 1;
            }
        }
        self.alive.truncate(kept);
    }
}
