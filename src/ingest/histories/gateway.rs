//! The gateway's side of a history, all of it but the sockets: frames go in, and a reader of the inventory says who
//! holds how much of a prompt, by its tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use shards::block::{Contract, KeyStream, PromptExtras};
use shards::ids::{BlockKey, EndpointIndex, Rank, ServiceId};
use shards::inventory::{self, Guard, Reader, SpaceIndex, Walk, Writer};

use super::super::calibrate::{Believed, Verdict};
use super::super::copies::Copies;
use super::super::framing;
use super::super::poller::Poller;
use super::super::sockets::Link;
use super::super::source::{Request, Source};
use super::super::status::StreamName;
use super::super::{Mode, RankSource};
use super::engine::Prefix;

/// What a rule says of its engines.
#[derive(Clone, Debug)]
pub(super) struct Rule {
    pub(super) contract: Contract,
    pub(super) block: u32,
    pub(super) believed: Option<Arc<Believed>>,
    pub(super) blocks_max: usize,
}

struct Endpoint {
    copies: Copies,
    sources: Vec<Source>,
    /// The replay under way of each rank, with a number that no other request has.
    asked: Vec<Option<Asked>>,
}

/// A replay that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) from: u64,
    pub(super) number: u64,
}

pub(super) struct Gateway {
    rule: Rule,
    writer: Writer,
    reader: Reader,
    poller: Poller,
    endpoints: BTreeMap<u16, Endpoint>,
    requests: u64,
}

impl Gateway {
    pub(super) fn new(rule: Rule) -> Self {
        let (writer, readers) = inventory::new(&inventory::Options { blocks_expected: 1_000 });
        let poller = Poller::new().expect("a descriptor");
        Gateway { rule, writer, reader: readers.reader(), poller, endpoints: BTreeMap::new(), requests: 0 }
    }

    /// An endpoint is added; each rank says whether it has a replay address.
    pub(super) fn add(&mut self, index: u16, replays: &[bool]) {
        let Rule { block, believed, blocks_max, .. } = &self.rule;
        let copies = Copies::new(replays.len(), *block, *blocks_max, believed.as_ref());
        let source = |(place, replay): (usize, &bool)| {
            let rank = Rank(place as u8);
            let endpoint = EndpointIndex(index);
            let name =
                StreamName { service: ServiceId(0), endpoint, label: String::new(), rank, address: String::new() };
            let replay = replay.then(String::new);
            let from = RankSource { rank, mode: Mode::Connect(String::new()), replay };
            Source::new(name, from, place, 0, &Arc::default(), &mut self.writer)
        };
        let sources: Vec<_> = replays.iter().enumerate().map(source).collect();
        let asked = vec![None; sources.len()];
        assert!(self.endpoints.insert(index, Endpoint { copies, sources, asked }).is_none());
    }

    /// An endpoint is taken out of the rule.
    pub(super) fn remove(&mut self, index: u16) {
        let endpoint = self.endpoints.remove(&index).expect("it was added");
        endpoint.sources.into_iter().for_each(|source| source.close(&mut self.writer, &self.poller));
    }

    fn with(&mut self, at: (u16, usize), step: impl FnOnce(&mut Source, &mut Copies, &mut Writer) -> Request) {
        let endpoint = self.endpoints.get_mut(&at.0).expect("it was added");
        let source = &mut endpoint.sources[at.1];
        let request = step(source, &mut endpoint.copies, &mut self.writer);
        source.note(&endpoint.copies);
        if let Some(request) = request {
            self.requests += 1;
            let number = self.requests;
            endpoint.asked[at.1] = request.map(|from| Asked { from, number });
        }
    }

    pub(super) fn link(&mut self, at: (u16, usize), link: Link) {
        self.with(at, |source, copies, writer| source.linked(link, copies, writer));
    }

    pub(super) fn publishes(&mut self, at: (u16, usize), frames: &[&[u8]]) {
        self.with(at, |source, copies, writer| source.published(framing::published(frames), copies, writer));
    }

    pub(super) fn replays(&mut self, at: (u16, usize), frames: &[&[u8]]) {
        self.with(at, |source, copies, writer| source.replayed(framing::replayed(frames), copies, writer));
    }

    /// The replay under way does not go on.
    pub(super) fn silence(&mut self, at: (u16, usize)) {
        self.with(at, Source::replay_silent);
    }

    /// Nobody listens at the replay address.
    pub(super) fn refuse(&mut self, at: (u16, usize)) {
        self.with(at, Source::replay_missing);
    }

    /// The replay under way.
    pub(super) fn asked(&self, at: (u16, usize)) -> Option<Asked> {
        self.endpoints[&at.0].asked[at.1]
    }

    /// Two publishes, of which a reader may refuse the second.
    pub(super) fn publish(&mut self, reading: bool) {
        let _guard = if reading { self.reader.enter() } else { None };
        let _ = self.writer.try_publish();
        let _ = self.writer.try_publish();
    }

    /// Publishes all there is.
    pub(super) fn settle(&mut self) {
        while self.writer.pending() > 0 {
            assert!(self.writer.try_publish(), "nobody reads");
        }
    }

    pub(super) fn is_eligible(&self, at: (u16, usize)) -> bool {
        self.endpoints[&at.0].sources[at.1].stats.eligible.load(Ordering::Relaxed)
    }

    /// Entries that the rank holds, as its status says.
    pub(super) fn held(&self, at: (u16, usize)) -> u64 {
        self.endpoints[&at.0].sources[at.1].stats.held.load(Ordering::Relaxed)
    }

    pub(super) fn verdict(&self, at: (u16, usize)) -> Verdict {
        self.endpoints[&at.0].copies.finding(at.1).map_or(Verdict::Believed, |finding| finding.verdict)
    }

    /// Keys of the endpoint, as its status and as the inventory says.
    pub(super) fn keys(&self, index: u16) -> (u64, BTreeSet<u64>) {
        let guard = self.reader.enter().expect("the writer is there");
        let mut keys = BTreeSet::new();
        for segment in 0..guard.segments() {
            guard.segment_keys(segment, EndpointIndex(index), &mut |key| {
                assert!(keys.insert(key.0), "a key is listed once");
            });
        }
        (self.endpoints.get(&index).map_or(0, |endpoint| endpoint.copies.distinct()), keys)
    }

    /// How many leading blocks of the prompt each (endpoint, rank) holds, as routing sees it. The prompt is made of
    /// blocks of that size.
    pub(super) fn holders(&self, prompt: &Prefix, block: u32) -> BTreeMap<(u16, usize), u32> {
        let guard = self.reader.enter().expect("the writer is there");
        let (tokens, extras) = (prompt.tokens(block), extras(prompt));
        let own = (SpaceIndex::OWN, self.rule.contract, self.rule.block);
        let others = guard.other_spaces().map(|(index, space)| (index, space.contract, space.block_tokens.get()));
        let mut holders = BTreeMap::new();
        for (space, contract, size) in std::iter::once(own).chain(others) {
            for (holder, blocks) in runs(&guard, space, &keys(&contract, &extras, size, &tokens)) {
                assert_eq!(holders.insert(holder, blocks), None, "a rank is in one key space");
            }
        }
        holders
    }
}

fn extras(prompt: &Prefix) -> PromptExtras {
    PromptExtras { cache_salt: prompt.salt().map(str::to_owned), ..PromptExtras::default() }
}

/// The keys of a prompt under a contract; none where it cannot key such prompts.
fn keys(contract: &Contract, extras: &PromptExtras, block: u32, tokens: &[u32]) -> Vec<BlockKey> {
    let size = NonZeroU32::new(block).expect("blocks have tokens");
    let Ok(mut stream) = KeyStream::new(contract, extras, size) else { return Vec::new() };
    let mut rest = tokens;
    std::iter::from_fn(|| stream.next_key(&mut rest)).collect()
}

fn runs(guard: &Guard<'_>, space: SpaceIndex, keys: &[BlockKey]) -> Vec<((u16, usize), u32)> {
    let mut walk = Walk::in_space(space);
    // In two slices, as requests come.
    let (head, tail) = keys.split_at(keys.len() / 2);
    guard.advance(&mut walk, head);
    guard.advance(&mut walk, tail);
    walk.runs(guard).map(|run| ((run.endpoint.0, usize::from(run.rank.0)), run.blocks)).collect()
}
