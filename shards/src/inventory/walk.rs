//! The longest contiguous run of every holder over a prompt's keys, shown slice by slice.
//!
//! **Invariant.** A run never says more than was seen: a holder that is masked, retired or replaced between two slices
//! loses what it had, and one that becomes eligible after block 0 was shown is not taken up.
//!
//! All holders still in the run stand at the same depth, so only those that drop out are written down. A set equal to
//! the last one (see [`super::sets`]) changes nothing and costs one comparison.

use super::sets::{INLINE_MAX, SetRef};
use super::table::{SlotState, Table};
use super::{Guard, Run};
use crate::ids::BlockKey;

/// Keys looked up before their sets are looked at, so that the memory accesses overlap.
const BATCH: usize = 16;
/// `Member::blocks` of a holder that has all keys so far.
const ALL: u32 = u32::MAX;

/// Longest contiguous run per holder over the keys shown so far. Kept and restarted, it allocates only while it
/// meets more holders than ever before.
#[derive(Debug, Default)]
pub struct Walk {
    /// Holders that had block 0, by number.
    members: Vec<Member>,
    /// Those of them that have every key so far, by number.
    alive: Vec<u16>,
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

impl Walk {
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
            (valid && blocks > 0).then_some(Run { endpoint: slot.endpoint, rank: slot.rank, blocks })
        })
    }

    /// Shows the next keys; false once no eligible holder can go further.
    pub(super) fn advance(&mut self, table: &Table, keys: &[BlockKey]) -> bool {
        let first = self.shown == 0;
        self.shown = self.shown.saturating_add(u32::try_from(keys.len()).unwrap_or(u32::MAX));
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
        for batch in rest.chunks(BATCH) {
            let mut sets = [SetRef::EMPTY; BATCH];
            for (set, key) in sets.iter_mut().zip(batch) {
                *set = table.find(*key);
                if set.is_empty() {
                    break;
                }
            }
            for &set in &sets[..batch.len()] {
                if last != Some(set) {
                    self.keep(table.sets.holders(set, &mut [0; INLINE_MAX]));
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
            let Some(slot) = table.slot(holder).filter(|slot| slot.state == SlotState::Eligible) else { continue };
            self.members.push(Member { holder, generation: slot.generation, blocks: ALL });
            self.alive.push(holder);
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
        let alive = &mut self.alive;
        self.members.retain(|member| {
            let same = table.slot(member.holder).is_some_and(|slot| slot.generation == member.generation);
            if !same {
                alive.retain(|&holder| holder != member.holder);
            }
            same
        });
    }

    /// Ends the run of every holder that is not in the (sorted) set.
    fn keep(&mut self, set: &[u16]) {
        let (members, depth) = (&mut self.members, self.depth);
        let mut end = |holder: u16| {
            let place = members.binary_search_by_key(&holder, |member| member.holder);
            members[place.expect("who is alive is a member")].blocks = depth;
        };
        if self.alive.len() * 8 < set.len() {
            self.alive.retain(|holder| {
                let has = set.binary_search(holder).is_ok();
                if !has {
                    end(*holder);
                }
                has
            });
            return;
        }
        let mut rest = set;
        self.alive.retain(|holder| {
            while let Some((first, others)) = rest.split_first()
                && first < holder
            {
                rest = others;
            }
            let has = rest.first() == Some(holder);
            if !has {
                end(*holder);
            }
            has
        });
    }
}
