//! What one TensorRT-LLM engine holds, as its events tell it.
//!
//! The engine's keys link blocks and name removals; prompts are matched by the gateway's own keys of the same tokens
//! ([`shards::block::Contract::TrtllmTokens`]). No I/O and no clock: events go in, operations come out in order.
//!
//! **Told apart.** A block whose engine key is not that of its plain tokens after its parent belongs to an adapter, a
//! salt or an image, which the events may not say; so does all that follows it. Such blocks are linked and match no
//! prompt, unless the event tells a salt that makes just this key: then they match the prompts of that salt. `v1_block_key` can always be recomputed. Keys of the V2 manager differ between its builds, so blocks are
//! believed to be plain until one was recomputed; from then on those that differ are told apart too.
//!
//! **Pools.** A model with sliding windows announces a block once per window or layer group, under one key. Only the
//! pool with the largest window counts, since it alone keeps whole prefixes.
//!
//! **Continuity.** Each rank counts its events. A number that goes back is a restart: the rank is forgotten. A number
//! that is skipped is a loss, perhaps of removals: nothing of the rank counts any more, but its links stay, and a
//! block that comes again, or that a new block hangs below, counts again with all that it hangs below itself.
//!
//! **Silent removals.** Some releases announce the top of a removed subtree alone: what hangs below goes with it.
//!
//! **Bound.** At most `keys_max` blocks over all ranks are linked; beyond it the oldest ends of chains are given up.

#![forbid(unsafe_code)]

use shards::block::trtllm::{V1Block, salt_id, std_salt_id, tokens_root, v2_root};
use shards::ids::BlockKey;
use shards::inventory::Medium;
use shards::service::MediumWeights;

use super::super::events::Reject;
use super::json::{Body, EngineKey, Event, KeyAlgo, Pool, Stored};
use super::tree::{Kind, Node, NodeId, Tree};

/// An operation on the inventory, for one attention-DP rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// The rank has the block in device memory now.
    Store(u8, BlockKey),
    /// The rank no longer has the block in device memory.
    Remove(u8, BlockKey),
    /// The rank has nothing now.
    Clear(u8),
    /// The rank has the block in the medium or a nearer one now, or has it there no longer.
    Wide {
        rank: u8,
        /// Never device memory.
        medium: Medium,
        key: BlockKey,
        held: bool,
    },
}

/// Where an event stands in its rank's sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Continuity {
    /// The first of the rank; the number says how many came before we listened.
    First(u64),
    /// Next.
    Follows,
    /// The engine was restarted.
    Restart,
    /// So many before it are lost.
    Lost(u64),
}

/// What happened so far, for the status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Events understood.
    pub(crate) events: u64,
    /// Plain full blocks announced.
    pub(crate) stored: u64,
    /// Those of them that begin a prompt.
    pub(crate) first_blocks: u64,
    /// Blocks removed, those below a removed one included.
    pub(crate) removed: u64,
    /// Blocks whose parent is not known: they match nothing.
    pub(crate) orphans: u64,
    /// Blocks of an adapter, a salt or an image.
    pub(crate) foreign: u64,
    /// Blocks that are not full.
    pub(crate) partial: u64,
    /// Events of pools that do not count.
    pub(crate) other_pool: u64,
    /// Moves between device memory and the host's.
    pub(crate) moved: u64,
    /// Removals of keys that were not linked.
    pub(crate) unknown_removals: u64,
    /// Events whose loss showed in the numbers.
    pub(crate) lost: u64,
    /// Losses.
    pub(crate) gaps: u64,
    pub(crate) restarts: u64,
    /// Ranks whose history before us is not known.
    pub(crate) incomplete: u64,
    pub(crate) clears: u64,
    /// Blocks given up because of the bound.
    pub(crate) evicted: u64,
    /// Blocks of another size than the rule's.
    pub(crate) size_mismatches: u64,
    /// Size of the last such block, tokens; 0 = none.
    pub(crate) engine_block_tokens: u32,
    /// What was not taken, by reason.
    pub(crate) rejects: [u64; Reject::ALL.len()],
}

#[derive(Debug, Default)]
struct RankState {
    last: Option<u64>,
    pool: Option<Pool>,
    tree: Tree,
    /// Slower media that it has had blocks in, of those that have weight.
    media: Vec<Medium>,
}

/// The state of one engine.
#[derive(Debug)]
pub(crate) struct State {
    block_tokens: usize,
    weights: MediumWeights,
    keys_max: usize,
    ranks: Vec<RankState>,
    /// A key of the V2 manager was recomputed.
    v2_proven: bool,
    /// Blocks linked, over all ranks.
    linked: usize,
    /// Own keys that some rank has.
    distinct: u64,
    tally: Tally,
}

/// Why a block counts as plain or not.
struct Signs<'a> {
    marked: bool,
    salt: Option<&'a str>,
    algo: KeyAlgo,
}

impl State {
    /// Nothing known. Blocks of another size than `block_tokens` do not count.
    pub(crate) fn new(block_tokens: u32, keys_max: usize) -> Self {
        State {
            block_tokens: block_tokens as usize,
            weights: MediumWeights::default(),
            keys_max,
            ranks: Vec::new(),
            v2_proven: false,
            linked: 0,
            distinct: 0,
            tally: Tally::default(),
        }
    }

    /// Counts blocks in the media that have weight, from now on.
    pub(crate) fn weigh(self, weights: MediumWeights) -> Self {
        State { weights, ..self }
    }

    pub(crate) fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Own keys that the engine has in device memory, each once whatever the number of ranks.
    pub(crate) fn distinct(&self) -> u64 {
        self.distinct
    }

    /// Something was not taken before it became an event.
    pub(crate) fn reject(&mut self, why: Reject) {
        self.tally.rejects[why as usize] += 1;
    }

    /// Takes the next event of the drain.
    pub(crate) fn apply(&mut self, event: &Event, op: &mut impl FnMut(Op)) -> Continuity {
        let continuity = self.follow(event.rank, event.id, op);
        match &event.body {
            Ok(body) => {
                self.tally.events += 1;
                self.body(event, body, op);
            }
            Err(why) => self.reject(*why),
        }
        continuity
    }

    /// Forgets what a rank holds.
    pub(crate) fn forget(&mut self, rank: u8, op: &mut impl FnMut(Op)) {
        let mut tree = std::mem::take(&mut self.rank(rank).tree);
        self.linked -= tree.len();
        self.withdraw(rank, &mut tree, op);
    }

    fn rank(&mut self, rank: u8) -> &mut RankState {
        let place = usize::from(rank);
        if self.ranks.len() <= place {
            self.ranks.resize_with(place + 1, RankState::default);
        }
        &mut self.ranks[place]
    }

    fn follow(&mut self, rank: u8, id: u64, op: &mut impl FnMut(Op)) -> Continuity {
        let Some(last) = self.rank(rank).last.replace(id) else {
            self.tally.incomplete += u64::from(id > 0);
            return Continuity::First(id);
        };
        if id <= last {
            self.tally.restarts += 1;
            self.rank(rank).pool = None;
            self.forget(rank, op);
            return Continuity::Restart;
        }
        match id - last - 1 {
            0 => Continuity::Follows,
            lost => {
                self.tally.gaps += 1;
                self.tally.lost += lost;
                self.doubt(rank, op);
                Continuity::Lost(lost)
            }
        }
    }

    /// Nothing of a rank counts any more; its links stay.
    pub(crate) fn doubt(&mut self, rank: u8, op: &mut impl FnMut(Op)) {
        let mut tree = std::mem::take(&mut self.rank(rank).tree);
        self.withdraw(rank, &mut tree, op);
        tree.nodes_mut().for_each(|node| node.present = false);
        self.rank(rank).tree = tree;
    }

    /// Takes back all that counts. The tree is out of its place: what other ranks have is what is left.
    fn withdraw(&mut self, rank: u8, tree: &mut Tree, op: &mut impl FnMut(Op)) {
        let mut any = !std::mem::take(&mut self.rank(rank).media).is_empty();
        for node in tree.nodes_mut().filter(|node| node.counts()) {
            any = true;
            self.distinct -= u64::from(!self.ranks.iter().any(|other| has(other, node.key)));
        }
        if any {
            self.tally.clears += 1;
            op(Op::Clear(rank));
        }
    }

    /// Whether events of a pool count; a larger one than before takes its place.
    fn pins(&mut self, rank: u8, pool: Pool, announces: bool, op: &mut impl FnMut(Op)) -> bool {
        let pinned = self.rank(rank).pool;
        if pinned == Some(pool) {
            return true;
        }
        let larger = pinned.is_none_or(|pinned| pool.window > pinned.window);
        if larger && announces {
            if pinned.is_some() {
                self.forget(rank, op);
            }
            self.rank(rank).pool = Some(pool);
        } else if !larger {
            self.tally.other_pool += 1;
        }
        larger
    }

    fn body(&mut self, event: &Event, body: &Body, op: &mut impl FnMut(Op)) {
        let rank = event.rank;
        let announces = matches!(body, Body::Created(_) | Body::Stored(_));
        if !self.pins(rank, event.pool, announces, op) {
            return;
        }
        match body {
            Body::Created(_) => self.forget(rank, op),
            Body::Stored(stored) => self.stored(rank, event.algo, stored, op),
            Body::Removed(keys) => keys.iter().for_each(|key| self.removed(rank, *key, op)),
            Body::Updated(key, Some((_, level))) => self.moved(rank, *key, *level, op),
            Body::Updated(_, None) => {}
        }
    }

    fn stored(&mut self, rank: u8, algo: KeyAlgo, stored: &Stored, op: &mut impl FnMut(Op)) {
        let mut parent = match self.anchor(rank, stored.parent, stored.blocks.len() as u64, op) {
            Ok(parent) => parent,
            Err(Orphan) => return,
        };
        let last = stored.blocks.len().saturating_sub(1);
        for (place, block) in stored.blocks.iter().enumerate() {
            let (marked, salt) = (!block.text_only || block.has_lora, block.cache_salt.as_deref());
            let size = block.tokens.len();
            if size > self.block_tokens || (size < self.block_tokens && place < last) {
                self.tally.size_mismatches += 1;
                self.tally.engine_block_tokens = u32::try_from(size).unwrap_or(u32::MAX);
                self.tally.orphans += (last - place) as u64;
                return;
            }
            let signs = Signs { marked, salt, algo };
            let node = self.linked(rank, parent, block.key, &block.tokens, &signs);
            let node = Node { level: level(block.level), ..node };
            parent = Some(self.hold(rank, node, parent, op));
        }
        self.bound(rank, op);
    }

    /// The node that a chain goes on from, which counts from now on with all it hangs below; none at the root.
    fn anchor(
        &mut self,
        rank: u8,
        parent: Option<EngineKey>,
        blocks: u64,
        op: &mut impl FnMut(Op),
    ) -> Result<Option<NodeId>, Orphan> {
        let Some(parent) = parent else { return Ok(None) };
        let tree = &self.rank(rank).tree;
        let found = tree.find(parent).filter(|id| tree.node(*id).kind != Kind::Partial);
        let Some(found) = found else {
            self.tally.orphans += blocks;
            return Err(Orphan);
        };
        let mut at = Some(found);
        while let Some(id) = at.filter(|id| !self.ranks[usize::from(rank)].tree.node(*id).present) {
            self.present(rank, id, op);
            at = self.ranks[usize::from(rank)].tree.parent(id);
        }
        Ok(Some(found))
    }

    /// What a block of these tokens after its parent is.
    fn linked(&mut self, rank: u8, parent: Option<NodeId>, key: EngineKey, tokens: &[u32], signs: &Signs<'_>) -> Node {
        let parent = parent.map(|parent| self.rank(rank).tree.node(parent).clone());
        let salt = signs.salt.map(salt_id);
        let mut node = Node {
            key,
            own: parent.as_ref().map_or_else(|| tokens_root(signs.salt), |parent| parent.own),
            engine: None,
            kind: Kind::Plain,
            level: 0,
            present: false,
        };
        if tokens.len() < self.block_tokens && !signs.marked {
            node.kind = Kind::Partial;
            return node;
        }
        node.own.push(tokens);
        let fits = match signs.algo {
            KeyAlgo::V1 => {
                let before = parent.as_ref().map_or(0, |parent| parent.key.0);
                // Builds differ in what they make of a salt.
                [salt, signs.salt.map(std_salt_id)]
                    .into_iter()
                    .any(|salt| V1Block { parent: before, tokens, salt, ..V1Block::default() }.key() == key.0)
            }
            KeyAlgo::V2 => {
                let before = match &parent {
                    None => Some(Box::new(v2_root(None, salt))),
                    Some(parent) => parent.engine.clone(),
                };
                let fits = before.is_some_and(|mut chain| {
                    let fits = chain.push(tokens).0 == key.0;
                    node.engine = fits.then_some(chain);
                    fits
                });
                self.v2_proven |= fits && !signs.marked;
                fits || (!self.v2_proven && salt.is_none())
            }
            KeyAlgo::Unknown => salt.is_none(),
        };
        if signs.marked || !fits || parent.is_some_and(|parent| parent.kind == Kind::Foreign) {
            node.kind = Kind::Foreign;
        }
        node
    }

    /// The rank has the block.
    fn hold(&mut self, rank: u8, node: Node, parent: Option<NodeId>, op: &mut impl FnMut(Op)) -> NodeId {
        let known = self.rank(rank).tree.find(node.key);
        let id = match known {
            Some(id) => {
                self.moved_to(rank, id, node.level, op);
                id
            }
            None => {
                self.linked += 1;
                self.rank(rank).tree.insert(node, parent)
            }
        };
        match self.ranks[usize::from(rank)].tree.node(id).kind {
            Kind::Plain => {
                self.tally.stored += 1;
                self.tally.first_blocks += u64::from(parent.is_none());
            }
            Kind::Foreign => self.tally.foreign += 1,
            Kind::Partial => self.tally.partial += 1,
        }
        self.present(rank, id, op);
        id
    }

    fn present(&mut self, rank: u8, id: NodeId, op: &mut impl FnMut(Op)) {
        let node = self.ranks[usize::from(rank)].tree.node_mut(id);
        if std::mem::replace(&mut node.present, true) {
            return;
        }
        let (medium, key, own) = (node.medium(), node.key, node.own_key());
        if medium == Some(Medium::Device) {
            self.counts(rank, key, own, op);
        }
        self.moved_between(rank, None, medium, own, op);
    }

    /// Tells the holders of slower media of a block that lies elsewhere now.
    fn moved_between(
        &mut self,
        rank: u8,
        before: Option<Medium>,
        now: Option<Medium>,
        own: BlockKey,
        op: &mut impl FnMut(Op),
    ) {
        let state = &mut self.ranks[usize::from(rank)];
        let within = |at: Option<Medium>, medium: Medium| at.is_some_and(|at| at <= medium);
        for medium in state.media.iter().copied() {
            let held = within(now, medium);
            if within(before, medium) != held {
                op(Op::Wide { rank, medium, key: own, held });
            }
        }
        let Some(medium) = now.filter(|medium| !state.media.contains(medium)) else { return };
        let weight = match medium {
            Medium::Device => 0,
            Medium::Cpu => self.weights.cpu,
            Medium::Storage => self.weights.storage,
        };
        if weight > 0 {
            state.media.push(medium);
            // What lies nearer counts there too.
            for node in state.tree.nodes_mut().filter(|node| within(node.medium(), medium)) {
                op(Op::Wide { rank, medium, key: node.own_key(), held: true });
            }
        }
    }

    fn counts(&mut self, rank: u8, key: EngineKey, own: BlockKey, op: &mut impl FnMut(Op)) {
        self.distinct += u64::from(!self.others_have(rank, key));
        op(Op::Store(rank, own));
    }

    fn counts_no_more(&mut self, rank: u8, key: EngineKey, own: BlockKey, op: &mut impl FnMut(Op)) {
        self.distinct -= u64::from(!self.others_have(rank, key));
        op(Op::Remove(rank, own));
    }

    fn others_have(&self, rank: u8, key: EngineKey) -> bool {
        self.ranks.iter().enumerate().any(|(place, other)| place != usize::from(rank) && has(other, key))
    }

    fn removed(&mut self, rank: u8, key: EngineKey, op: &mut impl FnMut(Op)) {
        let Some(id) = self.rank(rank).tree.find(key) else {
            self.tally.unknown_removals += 1;
            return;
        };
        self.drop_from(rank, id, op);
    }

    /// Removes a block and all below it; how many.
    fn drop_from(&mut self, rank: u8, id: NodeId, op: &mut impl FnMut(Op)) -> u64 {
        let mut tree = std::mem::take(&mut self.rank(rank).tree);
        let mut gone = 0;
        tree.remove(id, &mut |node| {
            gone += 1;
            if node.counts() {
                self.counts_no_more(rank, node.key, node.own_key(), op);
            }
            self.moved_between(rank, node.medium(), None, node.own_key(), op);
        });
        self.rank(rank).tree = tree;
        self.linked -= gone as usize;
        self.tally.removed += gone;
        gone
    }

    fn moved(&mut self, rank: u8, key: EngineKey, to: u64, op: &mut impl FnMut(Op)) {
        if let Some(id) = self.rank(rank).tree.find(key) {
            self.moved_to(rank, id, level(to), op);
        }
    }

    fn moved_to(&mut self, rank: u8, id: NodeId, to: u8, op: &mut impl FnMut(Op)) {
        let node = self.ranks[usize::from(rank)].tree.node_mut(id);
        let before = node.medium();
        self.tally.moved += u64::from(std::mem::replace(&mut node.level, to) != to);
        let (now, key, own) = (node.medium(), node.key, node.own_key());
        let in_device = |medium| medium == Some(Medium::Device);
        match (in_device(before), in_device(now)) {
            (true, false) => self.counts_no_more(rank, key, own, op),
            (false, true) => self.counts(rank, key, own, op),
            _ => {}
        }
        self.moved_between(rank, before, now, own, op);
    }

    fn bound(&mut self, rank: u8, op: &mut impl FnMut(Op)) {
        while self.linked > self.keys_max {
            let Some(leaf) = self.rank(rank).tree.oldest_leaf() else { return };
            let gone = self.drop_from(rank, leaf, op);
            self.tally.removed -= gone;
            self.tally.evicted += gone;
        }
    }
}

/// A chain whose beginning is not known.
struct Orphan;

fn has(rank: &RankState, key: EngineKey) -> bool {
    rank.tree.find(key).is_some_and(|id| rank.tree.node(id).counts())
}

fn level(level: u64) -> u8 {
    u8::try_from(level).unwrap_or(u8::MAX)
}

/// The property that any events must have: operations never remove what was not stored nor store it twice, and the
/// count of distinct keys is that of the operations.
///
/// # Panics
/// Where it does not hold.
pub(super) fn check_any_events(events: &[Event]) {
    for (block_tokens, keys_max) in [(4, 1_000), (4, 3), (1, 1_000)] {
        let mut state = State::new(block_tokens, keys_max);
        let mut held: std::collections::BTreeSet<(u8, u64)> = std::collections::BTreeSet::new();
        for event in events {
            state.apply(event, &mut |op| match op {
                Op::Store(rank, key) => _ = held.insert((rank, key.0)),
                Op::Remove(rank, key) => _ = held.remove(&(rank, key.0)),
                Op::Clear(rank) => held.retain(|(holder, _)| *holder != rank),
                Op::Wide { .. } => unreachable!("slower media have no weight here"),
            });
            assert!(state.linked <= keys_max.max(1));
            assert_eq!(state.linked, state.ranks.iter().map(|rank| rank.tree.len()).sum::<usize>());
        }
        assert!(held.len() as u64 >= state.distinct.min(1));
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
