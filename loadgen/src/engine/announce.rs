//! From what happened to a rank's cache to what its engine kind says of it: tiers, groups of layers, names.

use std::collections::{HashMap, HashSet, VecDeque};

use super::cache::{Change, Run};
use super::hash::Digest;
use super::options::EngineOptions;
use super::wire::{BlockHash, ExtraKey, Place, Release};
use super::{sglang_wire, trtllm_wire, wire};

/// Window that TensorRT-LLM tells for layers that see everything.
const WHOLE_WINDOW: u64 = 8192;

/// A host tier: as many blocks as it has room for, the oldest dropped first. Loads from it are not simulated.
#[derive(Debug, Default)]
struct HostTier {
    room: usize,
    order: VecDeque<Digest>,
    held: HashSet<Digest>,
}

impl HostTier {
    /// Copies blocks to the tier: those that were not there, and those dropped for them.
    fn add(&mut self, digests: &[Digest]) -> (Vec<Digest>, Vec<Digest>) {
        let (mut fresh, mut dropped) = (Vec::new(), Vec::new());
        for digest in digests.iter().filter(|_| self.room > 0) {
            if !self.held.insert(*digest) {
                continue;
            }
            fresh.push(*digest);
            self.order.push_back(*digest);
            if self.order.len() > self.room
                && let Some(oldest) = self.order.pop_front()
            {
                self.held.remove(&oldest);
                dropped.push(oldest);
            }
        }
        (fresh, dropped)
    }

    /// Takes a block out; whether it was there.
    fn remove(&mut self, digest: &Digest) -> bool {
        let held = self.held.remove(digest);
        if held {
            self.order.retain(|other| other != digest);
        }
        held
    }

    fn clear(&mut self) {
        self.order.clear();
        self.held.clear();
    }
}

/// What a rank has announced besides its device cache.
#[derive(Debug, Default)]
pub struct Announcer {
    host: HostTier,
    /// Copies that the sliding-window group of a hybrid vLLM holds.
    sliding: HashMap<Digest, usize>,
    /// Blocks that are not full, of which a TensorRT-LLM that pushes says nothing.
    unsaid: HashSet<Digest>,
}

impl Announcer {
    /// Nothing is announced yet.
    #[must_use]
    pub fn new(options: &EngineOptions) -> Self {
        let host = HostTier { room: options.cpu_blocks, ..HostTier::default() };
        Self { host, sliding: HashMap::new(), unsaid: HashSet::new() }
    }

    /// What vLLM says: device events in order of occurrence, then those of the host tier.
    pub fn vllm(&mut self, changes: Vec<Change>, options: &EngineOptions) -> Vec<wire::Event> {
        let (mut events, mut host) = (Vec::new(), Vec::new());
        let name = |digest: &Digest| vllm_name(digest, options.bytes_hashes);
        // Before 0.24 a connector named blocks by their digests whatever the setting.
        let host_bytes = options.bytes_hashes || options.wire < Release::new(24, 0);
        let host_name = |digest: &Digest| vllm_name(digest, host_bytes);
        for change in changes {
            match change {
                Change::Cleared => {
                    // A reset leaves the connector's tier as it is.
                    self.sliding.clear();
                    events.push(wire::Event::Cleared);
                }
                Change::Removed(digest) => {
                    events.push(wire::Event::Removed(name(&digest), Place::default()));
                    if self.leaves_window(&digest) {
                        events.push(wire::Event::Removed(name(&digest), Place::sliding(options.window as u64)));
                    }
                }
                Change::Stored(run) => {
                    events.push(wire::Event::Stored(vllm_stored(&run, options)));
                    events.extend(self.sliding_stored(&run, options));
                    let (fresh, dropped) = self.host.add(&run.digests);
                    let place = Place::host(options.wire);
                    host.extend(dropped.iter().map(|digest| wire::Event::Removed(host_name(digest), place.clone())));
                    host.extend(fresh.iter().map(|digest| {
                        let hashes = vec![host_name(digest)];
                        let block_tokens =
                            if options.wire < Release::new(20, 0) { options.block_size as u64 } else { 0 };
                        wire::Event::Stored(wire::Stored {
                            hashes,
                            block_tokens,
                            place: place.clone(),
                            ..Default::default()
                        })
                    }));
                }
            }
        }
        events.extend(host);
        events
    }

    /// The same run as the sliding-window group tells it: its last blocks with the tokens of all.
    fn sliding_stored(&mut self, run: &Run, options: &EngineOptions) -> Option<wire::Event> {
        if options.window == 0 {
            return None;
        }
        let kept = options.window.div_ceil(options.block_size).min(run.digests.len());
        let skipped = run.digests.len() - kept;
        run.digests[skipped..].iter().for_each(|digest| *self.sliding.entry(*digest).or_default() += 1);
        let mut stored = vllm_stored(run, options);
        stored.hashes.drain(..skipped);
        if let Some(keys) = &mut stored.extra_keys {
            keys.drain(..skipped);
        }
        if let Some(lists) = &mut stored.lookahead {
            lists.drain(..skipped);
        }
        stored.place = Place::sliding(options.window as u64);
        Some(wire::Event::Stored(stored))
    }

    fn leaves_window(&mut self, digest: &Digest) -> bool {
        let Some(copies) = self.sliding.get_mut(digest) else { return false };
        *copies -= 1;
        if *copies == 0 {
            self.sliding.remove(digest);
        }
        true
    }

    /// What SGLang says: pages on the device, and their copies on the host.
    pub fn sglang(&mut self, changes: Vec<Change>, options: &EngineOptions) -> Vec<sglang_wire::Event> {
        let mut events = Vec::new();
        for change in changes {
            match change {
                Change::Cleared => {
                    self.host.clear();
                    events.push(sglang_wire::Event::Cleared);
                }
                Change::Removed(digest) => push_removed(&mut events, "GPU", &digest, options),
                Change::Stored(run) => {
                    push_stored(&mut events, "GPU", &run, options);
                    let (fresh, dropped) = self.host.add(&run.digests);
                    dropped.iter().for_each(|digest| push_removed(&mut events, "CPU_PINNED", digest, options));
                    for (from, to) in stretches(&run, |digest| fresh.contains(digest)) {
                        push_stored(&mut events, "CPU_PINNED", &run.part(from, to), options);
                    }
                }
            }
        }
        events
    }

    /// What TensorRT-LLM pushes: full blocks alone, encoded as SGLang's newest pages are.
    pub fn pushed(&mut self, mut changes: Vec<Change>, options: &EngineOptions) -> Vec<sglang_wire::Event> {
        changes.retain(|change| match change {
            Change::Stored(run) if run.block_tokens() < options.block_size => {
                self.unsaid.extend(run.digests.iter().copied());
                false
            }
            Change::Removed(digest) => !self.unsaid.remove(digest),
            _ => true,
        });
        self.sglang(changes, options)
    }

    /// What TensorRT-LLM says, with the windows it says it for.
    pub fn trtllm(&mut self, changes: Vec<Change>, options: &EngineOptions) -> Vec<(trtllm_wire::Event, u64)> {
        let mut events: Vec<trtllm_wire::Event> = Vec::new();
        for change in changes {
            match change {
                Change::Cleared => events.push(created(options)),
                Change::Removed(digest) if self.host.room == 0 => push_gone(&mut events, &digest),
                Change::Removed(digest) => {
                    let (_, dropped) = self.host.add(&[digest]);
                    events.push(trtllm_wire::Event::Moved { hash: digest.key(), from: 0, to: 1 });
                    dropped.iter().for_each(|digest| push_gone(&mut events, digest));
                }
                Change::Stored(run) => self.trtllm_stored(&mut events, &run),
            }
        }
        let windows = windows(options);
        events.into_iter().flat_map(|event| windows.clone().map(move |window| (event.clone(), window))).collect()
    }

    /// Blocks that are on the host come back; the others are stored.
    fn trtllm_stored(&mut self, events: &mut Vec<trtllm_wire::Event>, run: &Run) {
        let back: HashSet<Digest> = run.digests.iter().filter(|digest| self.host.remove(digest)).copied().collect();
        let moved = |digest: &Digest| trtllm_wire::Event::Moved { hash: digest.key(), from: 1, to: 0 };
        events.extend(run.digests.iter().filter(|digest| back.contains(digest)).map(moved));
        for (from, to) in stretches(run, |digest| !back.contains(digest)) {
            let part = run.part(from, to);
            let tokens = part.tokens.chunks(part.block_tokens()).map(<[u32]>::to_vec);
            events.push(trtllm_wire::Event::Stored {
                parent: part.parent.map(|digest| digest.key()),
                blocks: part.digests.iter().map(Digest::key).zip(tokens).collect(),
                salt: part.namespace.salt.clone(),
            });
        }
    }
}

/// TensorRT-LLM's first event of a process.
#[must_use]
pub fn created(options: &EngineOptions) -> trtllm_wire::Event {
    trtllm_wire::Event::Created(options.blocks as u64, options.cpu_blocks as u64)
}

/// Windows of TensorRT-LLM's pools.
pub fn windows(options: &EngineOptions) -> impl Iterator<Item = u64> + Clone + use<> {
    std::iter::once(WHOLE_WINDOW).chain((options.window > 0).then_some(options.window as u64))
}

fn vllm_name(digest: &Digest, bytes: bool) -> BlockHash {
    if bytes { BlockHash::Bytes(digest.as_bytes().to_vec()) } else { BlockHash::Key(digest.key()) }
}

fn vllm_stored(run: &Run, options: &EngineOptions) -> wire::Stored {
    let name = |digest: &Digest| vllm_name(digest, options.bytes_hashes);
    let (size, reach) = (run.block_tokens(), run.after.len());
    let all: Vec<u32> = run.tokens.iter().chain(&run.after).copied().collect();
    let lookahead = |block: usize| all[(block + 1) * size..(block + 1) * size + reach].to_vec();
    let lora = run.namespace.lora.as_ref();
    let extra_keys = (0..run.digests.len()).map(|block| {
        let salt = run.namespace.salt.as_ref().filter(|_| block == 0 && run.parent.is_none());
        let keys: Vec<ExtraKey> =
            lora.map(|lora| &lora.name).into_iter().chain(salt).cloned().map(ExtraKey::Text).collect();
        (!keys.is_empty()).then_some(keys)
    });
    wire::Stored {
        hashes: run.digests.iter().map(name).collect(),
        parent: run.parent.as_ref().map(name),
        block_tokens: size as u64,
        lora_id: lora.map(|lora| lora.id),
        place: Place::default(),
        lora_name: lora.map(|lora| lora.name.clone()),
        extra_keys: Some(extra_keys.collect()),
        session_id: None,
        lookahead: (reach > 0).then(|| (0..run.digests.len()).map(lookahead).collect()),
        tokens: run.tokens.clone(),
    }
}

/// The stretches of a run whose blocks are `wanted`, from and to.
fn stretches(run: &Run, wanted: impl Fn(&Digest) -> bool) -> Vec<(usize, usize)> {
    let mut found: Vec<(usize, usize)> = Vec::new();
    for (place, _) in run.digests.iter().enumerate().filter(|(_, digest)| wanted(digest)) {
        match found.last_mut() {
            Some((_, to)) if *to == place => *to += 1,
            _ => found.push((place, place + 1)),
        }
    }
    found
}

fn signed(digest: &Digest) -> i64 {
    digest.key().cast_signed()
}

fn push_stored(events: &mut Vec<sglang_wire::Event>, medium: &str, run: &Run, options: &EngineOptions) {
    // Before 0.5.18 each page is an event of its own.
    let whole = options.sglang_release.salts_and_coalesces();
    let step = if whole { run.digests.len().max(1) } else { 1 };
    for from in (0..run.digests.len()).step_by(step) {
        let part = run.part(from, from + step);
        let bigrams = options.lookahead > 0;
        let block_tokens = part.block_tokens() as u64;
        events.push(sglang_wire::Event::Stored(sglang_wire::Stored {
            hashes: part.digests.iter().map(signed).collect(),
            parent: part.parent.as_ref().map(signed),
            tokens: part.tokens.iter().chain(&part.after).copied().collect(),
            bigrams,
            block_tokens,
            medium: Some(medium.to_owned()),
            cache_salt: part.namespace.salt.clone().filter(|_| whole),
            session_id: None,
            lora_name: part.namespace.lora.as_ref().map(|lora| lora.name.clone()),
        }));
    }
}

fn push_removed(events: &mut Vec<sglang_wire::Event>, at: &str, digest: &Digest, options: &EngineOptions) {
    match events.last_mut() {
        Some(sglang_wire::Event::Removed { hashes, medium })
            if options.sglang_release.merges_removals() && medium.as_deref() == Some(at) =>
        {
            hashes.push(signed(digest));
        }
        _ => events.push(sglang_wire::Event::Removed { hashes: vec![signed(digest)], medium: Some(at.to_owned()) }),
    }
}

fn push_gone(events: &mut Vec<trtllm_wire::Event>, digest: &Digest) {
    match events.last_mut() {
        Some(trtllm_wire::Event::Removed(hashes)) => hashes.push(digest.key()),
        _ => events.push(trtllm_wire::Event::Removed(vec![digest.key()])),
    }
}
