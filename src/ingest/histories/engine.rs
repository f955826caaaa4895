//! One engine process as it is: what it holds, what it said, what is still under way. Plain maps, and hashes that share
//! no code with the gateway.

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use loadgen::engine::hash::{Chain, Digest, Namespace};

use super::chance::Chance;
use super::wire::{Store, Style, batch, nonsense};

/// Blocks of a prompt from its first on: whose they are (0 = everybody's), and a choice per block.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Prefix {
    pub(super) salt: u8,
    pub(super) choices: Vec<u8>,
}

impl Prefix {
    pub(super) fn first(&self, blocks: usize) -> Prefix {
        Prefix { salt: self.salt, choices: self.choices[..blocks].to_vec() }
    }

    fn parent(&self) -> Option<Prefix> {
        (self.choices.len() > 1).then(|| self.first(self.choices.len() - 1))
    }

    /// The salt in a request.
    pub(super) fn salt(&self) -> Option<&'static str> {
        [None, Some("mine"), Some("yours")][usize::from(self.salt)]
    }

    /// The tokens of blocks of that size. Blocks of another size share none with them.
    pub(super) fn tokens(&self, block: u32) -> Vec<u32> {
        let of = |(place, choice): (usize, &u8)| {
            let base = 1_000_000 * block + 10_000 * u32::from(*choice) + 100 * place as u32;
            (0..block).map(move |token| base + token)
        };
        self.choices.iter().enumerate().flat_map(of).collect()
    }

    fn namespace(&self) -> Namespace {
        Namespace { salt: self.salt().map(str::to_owned), ..Namespace::default() }
    }
}

/// A group of layers of an engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub(super) id: u32,
    pub(super) kind: Option<&'static str>,
    /// It keeps whole prefixes.
    pub(super) counts: bool,
}

/// How a process makes and tells its blocks.
#[derive(Clone, Debug)]
pub(super) struct Manner {
    pub(super) chain: Chain,
    pub(super) style: Style,
    pub(super) block: u32,
    pub(super) groups: Vec<Group>,
    /// The gateway can make these keys: its own are not needed.
    pub(super) exact: bool,
    /// No table of seeds has the one it uses.
    pub(super) secret: bool,
}

impl Manner {
    /// What tells blocks that a prompt can match from those of salted prompts.
    pub(super) fn tells_salts(&self) -> bool {
        self.style == Style::Maps
    }
}

/// Copies by group and content.
pub(super) type Copies = HashMap<(u32, Prefix), u32>;

/// Leading blocks of a prompt that are held, in whatever group.
pub(super) fn run(copies: &Copies, groups: &[Group], prompt: &Prefix) -> usize {
    let held = |blocks: usize| {
        let prefix = prompt.first(blocks);
        groups.iter().any(|group| group.counts && copies.contains_key(&(group.id, prefix.clone())))
    };
    (1..=prompt.choices.len()).take_while(|blocks| held(*blocks)).count()
}

fn add(copies: &mut Copies, group: u32, prefix: &Prefix, at_least_one: bool) {
    let count = copies.entry((group, prefix.clone())).or_insert(0);
    if *count == 0 || !at_least_one {
        *count += 1;
    }
}

fn take(copies: &mut Copies, group: u32, prefix: &Prefix) {
    let place = (group, prefix.clone());
    if let Some(count) = copies.get_mut(&place) {
        *count -= 1;
        if *count == 0 {
            copies.remove(&place);
        }
    }
}

/// What a message means for blocks in device memory that count.
#[derive(Clone, Debug)]
pub(super) enum Deed {
    Store { group: u32, prefix: Prefix, again: bool },
    Remove { group: u32, prefix: Prefix },
    Clear,
}

/// A batch with its number, and what it means.
#[derive(Clone, Debug)]
pub(super) struct Message {
    /// The process that sent it.
    pub(super) life: u64,
    pub(super) seq: u64,
    pub(super) payload: Rc<[u8]>,
    pub(super) deeds: Rc<[Deed]>,
}

/// The truth.
pub(super) struct Process {
    pub(super) life: u64,
    pub(super) manner: Rc<Manner>,
    keys: HashMap<Prefix, Digest>,
    pub(super) device: Copies,
    elsewhere: HashMap<(&'static str, Prefix), u32>,
    /// Different first blocks of plain prompts that were announced since the process began.
    pub(super) roots: Vec<Prefix>,
    next: u64,
    ring_max: usize,
    pub(super) ring: VecDeque<Message>,
    /// Of the batch that is being made.
    events: Vec<Vec<u8>>,
    deeds: Vec<Deed>,
    /// The last event, if it stored again from block 0 what is held: its group and last block. No continuation
    /// may stand next to it, or it would be a report and no copy.
    second_copy: Option<(u32, Prefix)>,
}

const SALTS: usize = 3;
const CHOICES: usize = 3;

/// A prompt of a few blocks, of few kinds, so that prompts share beginnings.
pub(super) fn prompt(chance: &mut Chance, salted: bool) -> Prefix {
    let salt = if salted && chance.one_in(4) { 1 + chance.below(SALTS - 1) } else { 0 };
    let blocks = 1 + chance.below(6);
    Prefix { salt: salt as u8, choices: (0..blocks).map(|_| chance.below(CHOICES) as u8).collect() }
}

impl Process {
    pub(super) fn new(life: u64, manner: Rc<Manner>, ring_max: usize) -> Self {
        Process {
            life,
            manner,
            keys: HashMap::new(),
            device: Copies::new(),
            elsewhere: HashMap::new(),
            roots: Vec::new(),
            next: 0,
            ring_max,
            ring: VecDeque::new(),
            events: Vec::new(),
            deeds: Vec::new(),
            second_copy: None,
        }
    }

    /// The engine's own key of the last block.
    pub(super) fn key(&mut self, prefix: &Prefix) -> u64 {
        self.digest(prefix).key()
    }

    fn digest(&mut self, prefix: &Prefix) -> Digest {
        if let Some(known) = self.keys.get(prefix) {
            return *known;
        }
        let (manner, namespace) = (Rc::clone(&self.manner), prefix.namespace());
        let parent = match prefix.parent() {
            Some(parent) => self.digest(&parent),
            None => manner.chain.root(&namespace),
        };
        let tokens = prefix.tokens(manner.block);
        let last = &tokens[tokens.len() - manner.block as usize..];
        let digest = manner.chain.child(&parent, last, prefix.choices.len() == 1, &namespace);
        self.keys.insert(prefix.clone(), digest);
        digest
    }

    /// Tells of blocks `from..to` of a prompt.
    fn tell_store(
        &mut self,
        prompt: &Prefix,
        from: usize,
        to: usize,
        group: Group,
        medium: &'static str,
        c: &mut Chance,
    ) {
        let manner = Rc::clone(&self.manner);
        let keys = (from + 1..=to).map(|blocks| self.key(&prompt.first(blocks))).collect();
        let parent = (from > 0).then(|| self.key(&prompt.first(from)));
        let (size, all) = (manner.block as usize, prompt.tokens(manner.block));
        let tokens = all[from * size..to * size].to_vec();
        let store = Store {
            keys,
            parent,
            tokens,
            block: manner.block,
            group: group.id,
            kind: group.kind,
            medium,
            salt: prompt.salt(),
        };
        self.events.push(manner.style.store(&store, c));
        self.second_copy = None;
    }

    /// Blocks `from..to` of a prompt are computed and come into device memory.
    fn store(&mut self, prompt: &Prefix, from: usize, to: usize, group: Group, again: bool, c: &mut Chance) {
        if from > 0 && self.second_copy.as_ref() == Some(&(group.id, prompt.first(from))) {
            self.events.push(nonsense(c));
        }
        self.tell_store(prompt, from, to, group, "GPU", c);
        let held = |process: &Process, blocks| process.device.contains_key(&(group.id, prompt.first(blocks)));
        if from == 0 && !again && (1..=to).any(|blocks| held(self, blocks)) {
            self.second_copy = Some((group.id, prompt.first(to)));
        }
        for blocks in from + 1..=to {
            let prefix = prompt.first(blocks);
            add(&mut self.device, group.id, &prefix, again);
            if group.counts {
                self.deeds.push(Deed::Store { group: group.id, prefix, again });
            }
        }
        let root = prompt.first(1);
        if group.counts && from == 0 && root.salt == 0 && !self.roots.contains(&root) {
            self.roots.push(root);
        }
    }

    /// A request is served: what is not held is computed, sometimes more.
    pub(super) fn serve(&mut self, c: &mut Chance) {
        let manner = Rc::clone(&self.manner);
        let prompt = prompt(c, manner.tells_salts());
        let blocks = prompt.choices.len();
        let held = |process: &Process, group: Group, to: usize| {
            (1..=to).take_while(|to| process.device.contains_key(&(group.id, prompt.first(*to)))).count()
        };
        let hit = held(self, manner.groups[0], blocks);
        let start = if hit > 0 && c.one_in(5) { c.below(hit) } else { hit };
        let report = start > 0 && start < blocks && manner.style != Style::Sglang && c.one_in(6);
        if start == blocks {
            return;
        }
        for group in &manner.groups {
            if report && held(self, *group, start) == start {
                self.store(&prompt, 0, start, *group, true, c);
                self.store(&prompt, start, blocks, *group, false, c);
                continue;
            }
            let middle = start + c.below(blocks - start + 1);
            if middle > start && middle < blocks {
                self.store(&prompt, start, middle, *group, false, c);
                self.store(&prompt, middle, blocks, *group, false, c);
            } else {
                self.store(&prompt, start, blocks, *group, false, c);
            }
        }
    }

    /// One copy of some block goes, sometimes with more.
    pub(super) fn evict(&mut self, c: &mut Chance) {
        let manner = Rc::clone(&self.manner);
        let group = *c.of(&manner.groups);
        for _ in 0..1 + c.below(3) {
            let mut held: Vec<_> = self.device.keys().filter(|(id, _)| *id == group.id).cloned().collect();
            if held.is_empty() {
                return;
            }
            held.sort();
            let (_, prefix) = c.of(&held).clone();
            take(&mut self.device, group.id, &prefix);
            let key = self.key(&prefix);
            self.events.push(manner.style.remove(&[key], group.id, "GPU", c));
            self.second_copy = None;
            if group.counts {
                self.deeds.push(Deed::Remove { group: group.id, prefix });
            }
        }
    }

    /// Blocks are copied to another medium, or go from there.
    pub(super) fn offload(&mut self, c: &mut Chance) {
        let manner = Rc::clone(&self.manner);
        let medium = *c.of(&["CPU", "STORAGE"]);
        let mut there: Vec<_> = self.elsewhere.keys().filter(|(at, _)| *at == medium).cloned().collect();
        there.sort();
        if !there.is_empty() && c.one_in(2) {
            let place = c.of(&there).clone();
            self.elsewhere.remove(&place);
            let key = self.key(&place.1);
            self.events.push(manner.style.remove(&[key], 0, medium, c));
            self.second_copy = None;
            return;
        }
        let mut held: Vec<_> = self.device.keys().filter(|(id, _)| *id == 0).cloned().collect();
        held.sort();
        if held.is_empty() {
            return;
        }
        let (_, prefix) = c.of(&held).clone();
        let blocks = prefix.choices.len();
        *self.elsewhere.entry((medium, prefix.clone())).or_insert(0) += 1;
        self.tell_store(&prefix, blocks - 1, blocks, manner.groups[0], medium, c);
    }

    /// All blocks go.
    pub(super) fn clear(&mut self, c: &mut Chance) {
        self.device.clear();
        self.elsewhere.clear();
        self.events.push(self.manner.style.cleared(c));
        self.deeds.push(Deed::Clear);
        self.second_copy = None;
    }

    /// Something that nobody understands.
    pub(super) fn babble(&mut self, c: &mut Chance) {
        self.events.push(nonsense(c));
        self.second_copy = None;
    }

    /// Sends what has happened since the last batch, be it nothing.
    pub(super) fn send(&mut self, clock: u64) -> Message {
        self.second_copy = None;
        let payload = batch(clock, &std::mem::take(&mut self.events)).into();
        let deeds = std::mem::take(&mut self.deeds).into();
        let message = Message { life: self.life, seq: self.next, payload, deeds };
        self.next += 1;
        self.ring.push_back(message.clone());
        if self.ring.len() > self.ring_max {
            self.ring.pop_front();
        }
        message
    }
}

/// What can be known of a process by its live batches alone.
#[derive(Default)]
pub(super) struct Heard {
    last: Option<(u64, u64)>,
    /// Everything that was announced and not withdrawn.
    pub(super) told: Copies,
    /// Of it, what stands after a parent that was such itself.
    pub(super) rooted: Copies,
    /// A restart that no number can show: what was told is of two processes.
    pub(super) mixed: bool,
}

impl Heard {
    pub(super) fn hear(&mut self, message: &Message) {
        let (life, seq) = (message.life, message.seq);
        match self.last {
            Some((of, last)) if of == life && seq == last => return,
            Some((of, last)) if seq == last + 1 => self.mixed |= of != life,
            Some(_) => self.forget(),
            None => {}
        }
        self.last = Some((life, seq));
        message.deeds.iter().for_each(|deed| self.note(deed));
    }

    pub(super) fn forget(&mut self) {
        self.told.clear();
        self.rooted.clear();
        self.mixed = false;
    }

    fn note(&mut self, deed: &Deed) {
        match deed {
            Deed::Store { group, prefix, again } => {
                add(&mut self.told, *group, prefix, *again);
                let parent = prefix.parent();
                if parent.is_none_or(|parent| self.rooted.keys().any(|(_, rooted)| *rooted == parent)) {
                    add(&mut self.rooted, *group, prefix, *again);
                }
            }
            Deed::Remove { group, prefix } => {
                take(&mut self.told, *group, prefix);
                take(&mut self.rooted, *group, prefix);
            }
            Deed::Clear => self.forget(),
        }
    }
}
