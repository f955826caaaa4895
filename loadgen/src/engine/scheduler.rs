//! The engine's scheduler, free of I/O and of clocks: requests in, steps out.
//!
//! ```text
//!            admit, room                 all tokens computed: a token is sampled
//!  waiting ───────────────▶ running ──────────────┐ until the answer ends ──▶ finished
//!     ▲                        │  ▲───────────────┘
//!     └──── no block is free ──┘   (preempted: its blocks are given back, it starts over from what is cached)
//! ```
//! A step computes at most `step_tokens` tokens: first one for each running request (or the next piece of its prompt),
//! then pieces of waiting prompts. Blocks that become full in a step are announced together, one event per request.
//! What is stored when, and how much of a prompt can hit, is the engine kind's: [`Policy`].

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::cache::{Change, Page, PagedCache, Run};
use super::hash::{Chain, Digest, Namespace};

/// Names a request inside one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(pub u64);

/// What the scheduler needs to know of a request.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its name; never used again.
    pub id: RequestId,
    /// The prompt, not empty. With the answer it fits the cache: see [`Scheduler::tokens_max`].
    pub prompt: Vec<u32>,
    /// The answer's tokens, in order, as long as the answer will be. At least one.
    pub answer: Vec<u32>,
    /// What else parts it from equal prompts.
    pub namespace: Arc<Namespace>,
    /// The prompt's KV came from another engine: only its last token is computed here.
    pub transferred: bool,
}

/// One token of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Output {
    /// Whose.
    pub id: RequestId,
    /// The token.
    pub token: u32,
    /// Prompt tokens that were found in the cache when the request was first admitted.
    pub cached_tokens: usize,
    /// Whether it is the answer's last.
    pub last: bool,
}

/// How fast the engine computes, and its limits.
#[derive(Clone, Debug)]
pub struct Model {
    /// Tokens in a block.
    pub block_tokens: usize,
    /// Tokens computed in one step at most.
    pub step_tokens: usize,
    /// Requests running at once at most; others wait.
    pub running_max: usize,
    /// Prompt tokens computed in a second, by all requests together.
    pub prefill_tokens_per_second: f64,
    /// Answer tokens made in a second, by each running request.
    pub decode_tokens_per_second: f64,
    /// Least duration of a step that computes prompt tokens.
    pub prefill_floor: Duration,
    /// How blocks are hashed.
    pub chain: Chain,
    /// What is stored when.
    pub policy: Policy,
}

/// What an engine kind caches of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Each block once it is full; a hit is at most all tokens but the last. `drop_last`: speculation by EAGLE before
    /// 0.33 gives up the last block found.
    Vllm {
        /// Whether a hit loses its last block.
        drop_last: bool,
    },
    /// The prompt's pages after each of its pieces, those of the answer when it ends; one block for each page.
    Sglang,
    /// As SGLang, when the whole prompt is computed; the last token is never stored, and the rest that fills no block
    /// is, as a partial block that nobody hits.
    Trtllm,
}

impl Policy {
    fn is_tree(self) -> bool {
        !matches!(self, Self::Vllm { .. })
    }

    /// Blocks of a prompt of `tokens` tokens that a hit may have at most.
    fn usable(self, tokens: usize, size: usize, reach: usize) -> usize {
        match self {
            Self::Vllm { .. } => ((tokens - 1) / size).min(tokens.saturating_sub(reach) / size),
            Self::Sglang | Self::Trtllm => (tokens - 1).saturating_sub(reach) / size,
        }
    }
}

impl Model {
    /// The digests of the blocks that `tokens` fill, after those `known` already.
    fn digests(&self, known: &[Digest], tokens: &[u32], namespace: &Namespace) -> Vec<Digest> {
        let (size, reach) = (self.block_tokens, self.chain.reach());
        let mut parent = known.last().copied().unwrap_or_else(|| self.chain.root(namespace));
        (known.len()..tokens.len().saturating_sub(reach) / size)
            .map(|block| {
                let window = &tokens[block * size..(block + 1) * size + reach];
                parent = self.chain.child(&parent, window, block == 0, namespace);
                parent
            })
            .collect()
    }
}

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Those of them that were found in the cache.
    pub cached_tokens: u64,
    /// Tokens of answers.
    pub answer_tokens: u64,
    /// Times a running request lost its blocks to another.
    pub preemptions: u64,
}

/// A request on its way.
#[derive(Debug)]
struct Sequence {
    id: RequestId,
    namespace: Arc<Namespace>,
    /// Prompt, then the answer as far as it is made.
    tokens: Vec<u32>,
    prompt_tokens: usize,
    answer: VecDeque<u32>,
    /// Digests of the full blocks of `tokens`.
    digests: Vec<Digest>,
    /// Its blocks, in order.
    pages: Vec<Page>,
    /// Tokens whose KV is in `pages`.
    computed: usize,
    /// Blocks that are stored in the cache under their digest.
    stored_blocks: usize,
    /// Tokens that the current step computes.
    scheduled: usize,
    /// Known once it was admitted for the first time.
    cached_tokens: Option<usize>,
    /// See [`Request::transferred`]; lost with its blocks.
    transferred: bool,
}

/// The scheduler with its cache.
#[derive(Debug)]
pub struct Scheduler {
    model: Model,
    cache: PagedCache,
    /// In order of admission: the last is preempted first.
    running: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    totals: Totals,
}

impl Scheduler {
    /// A scheduler over an empty cache of `blocks` blocks.
    #[must_use]
    pub fn new(model: Model, blocks: usize) -> Self {
        let mut cache = PagedCache::new(blocks, model.policy.is_tree());
        if model.policy == Policy::Sglang {
            cache.announce_empty();
        }
        Self { model, cache, running: Vec::new(), waiting: VecDeque::new(), totals: Totals::default() }
    }

    /// Most tokens a request may have, answer included.
    #[must_use]
    pub fn tokens_max(&self) -> usize {
        self.cache.size() * self.model.block_tokens
    }

    /// Queues a request. The queue has no limit of its own: the caller refuses what is too much.
    pub fn add(&mut self, request: Request) {
        assert!(!request.prompt.is_empty() && !request.answer.is_empty(), "the caller checks the request");
        assert!(request.prompt.len() + request.answer.len() <= self.tokens_max(), "the caller checks the length");
        let mut sequence = Sequence {
            id: request.id,
            namespace: request.namespace,
            prompt_tokens: request.prompt.len(),
            tokens: request.prompt,
            answer: request.answer.into(),
            digests: Vec::new(),
            pages: Vec::new(),
            computed: 0,
            stored_blocks: 0,
            scheduled: 0,
            cached_tokens: None,
            transferred: request.transferred,
        };
        sequence.extend_digests(&self.model);
        self.waiting.push_back(sequence);
    }

    /// Forgets a request and gives its blocks back; what they hold stays cached. Unknown names are ignored.
    pub fn abort(&mut self, id: RequestId) {
        self.waiting.retain(|sequence| sequence.id != id);
        if let Some(place) = self.running.iter().position(|sequence| sequence.id == id) {
            let sequence = self.running.remove(place);
            self.cache.release(&sequence.pages);
        }
    }

    /// Drops the cache, unless requests run; announced with the next step.
    pub fn clear(&mut self) -> bool {
        self.cache.clear()
    }

    /// Puts the full blocks of `tokens` into the cache at once, as one run; false where it has no room for them.
    pub fn insert(&mut self, tokens: &[u32]) -> bool {
        let namespace = Arc::new(Namespace::default());
        let digests = self.model.digests(&[], tokens, &namespace);
        if digests.is_empty() || !self.cache.has_room(&[], digests.len()) {
            return false;
        }
        let mut pages = self.cache.take(digests.len());
        let end = digests.len() * self.model.block_tokens;
        let after = tokens[end..end + self.model.chain.reach()].to_vec();
        let run = Run { parent: None, digests, tokens: tokens[..end].to_vec(), after, namespace };
        self.cache.store(&mut pages, &run);
        self.cache.release(&pages);
        true
    }

    /// What happened to the cache between steps, for engines that tell it at once.
    pub fn take_changes(&mut self) -> Vec<Change> {
        self.cache.take_changes()
    }

    /// Chooses what the next step computes and says how long that takes; none when there is nothing to do.
    pub fn begin_step(&mut self) -> Option<Duration> {
        let mut budget = self.model.step_tokens;
        let preempted = self.schedule_running(&mut budget);
        if !preempted {
            self.admit(&mut budget);
        }
        let mut prefill = 0;
        let mut decodes = false;
        for sequence in self.running.iter().filter(|sequence| sequence.scheduled > 0) {
            if sequence.scheduled == 1 && sequence.computed >= sequence.prompt_tokens {
                decodes = true;
            } else {
                prefill += sequence.scheduled;
            }
        }
        if prefill == 0 && !decodes {
            return None;
        }
        let mut duration = Duration::ZERO;
        if prefill > 0 {
            let computing = Duration::from_secs_f64(prefill as f64 / self.model.prefill_tokens_per_second);
            duration += computing.max(self.model.prefill_floor);
        }
        if decodes {
            duration += Duration::from_secs_f64(1.0 / self.model.decode_tokens_per_second);
        }
        Some(duration)
    }

    /// Ends the step that [`Self::begin_step`] began: the tokens it made, and what happened to the cache since.
    pub fn end_step(&mut self) -> (Vec<Output>, Vec<Change>) {
        let mut outputs = Vec::new();
        for sequence in &mut self.running {
            sequence.computed += std::mem::take(&mut sequence.scheduled);
            if sequence.computed < sequence.tokens.len() {
                continue;
            }
            let Some(token) = sequence.answer.pop_front() else { continue };
            sequence.tokens.push(token);
            sequence.extend_digests(&self.model);
            self.totals.answer_tokens += 1;
            let cached_tokens = sequence.cached_tokens.unwrap_or(0);
            outputs.push(Output { id: sequence.id, token, cached_tokens, last: sequence.answer.is_empty() });
        }
        let (finished, running) = std::mem::take(&mut self.running).into_iter().partition(|s| s.answer.is_empty());
        self.running = running;
        let mut finished: Vec<Sequence> = finished;
        for sequence in &mut finished {
            // The last token has no KV.
            if self.model.policy.is_tree() {
                sequence.store(&mut self.cache, &self.model, sequence.computed);
            }
            self.cache.release(&sequence.pages);
        }
        (outputs, self.cache.take_changes())
    }

    /// Gives every running request its share; true when one had to be preempted.
    fn schedule_running(&mut self, budget: &mut usize) -> bool {
        let mut preempted = false;
        let mut place = 0;
        while place < self.running.len() {
            let sequence = &self.running[place];
            let count = (sequence.tokens.len() - sequence.computed).min(*budget);
            let fresh = sequence.missing_pages(count, self.model.block_tokens);
            if self.cache.has_room(&[], fresh) {
                *budget -= count;
                self.schedule(place, count, fresh);
                place += 1;
                continue;
            }
            preempted = true;
            let Some(mut victim) = self.running.pop() else { break };
            victim.start_over(&mut self.cache);
            self.totals.preemptions += 1;
            self.waiting.push_front(victim);
        }
        preempted
    }

    /// Admits waiting requests in order, each from the end of what is cached of it.
    fn admit(&mut self, budget: &mut usize) {
        while self.running.len() < self.model.running_max && *budget > 0 {
            let Some(sequence) = self.waiting.front() else { break };
            // The last token is always computed: its result is what the answer's next token is drawn from.
            let model = &self.model;
            let usable = model.policy.usable(sequence.tokens.len(), model.block_tokens, model.chain.reach());
            let mut hits = self.cache.lookup(&sequence.digests[..usable]);
            if model.policy == (Policy::Vllm { drop_last: true }) {
                hits.pop();
            }
            let hit_tokens = match sequence.transferred {
                true => sequence.tokens.len() - 1,
                false => hits.len() * self.model.block_tokens,
            };
            let count = (sequence.tokens.len() - hit_tokens).min(*budget);
            let fresh = (hit_tokens + count).div_ceil(self.model.block_tokens) - hits.len();
            if !self.cache.has_room(&hits, fresh) {
                break;
            }
            let Some(mut sequence) = self.waiting.pop_front() else { break };
            self.cache.hold(&hits);
            sequence.stored_blocks = hits.len();
            sequence.computed = hit_tokens;
            sequence.pages = hits;
            if sequence.cached_tokens.is_none() {
                sequence.cached_tokens = Some(hit_tokens);
                self.totals.prompt_tokens += sequence.prompt_tokens as u64;
                self.totals.cached_tokens += hit_tokens as u64;
            }
            *budget -= count;
            self.running.push(sequence);
            self.schedule(self.running.len() - 1, count, fresh);
        }
    }

    /// Gives a running request `fresh` blocks for `count` tokens and stores the blocks that these fill.
    fn schedule(&mut self, place: usize, count: usize, fresh: usize) {
        let sequence = &mut self.running[place];
        sequence.scheduled = count;
        let pages = self.cache.take(fresh);
        sequence.pages.extend(pages);
        let after = sequence.computed + count;
        let keyed = match self.model.policy {
            Policy::Vllm { .. } => after,
            Policy::Sglang if after <= sequence.prompt_tokens => after,
            Policy::Trtllm if sequence.computed < sequence.prompt_tokens && after >= sequence.prompt_tokens => {
                sequence.prompt_tokens - 1
            }
            Policy::Sglang | Policy::Trtllm => return,
        };
        sequence.store(&mut self.cache, &self.model, keyed);
    }

    /// Requests that have blocks.
    #[must_use]
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Requests that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The cache, to read.
    #[must_use]
    pub fn cache(&self) -> &PagedCache {
        &self.cache
    }

    /// Totals since the start.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals
    }
}

impl Sequence {
    fn missing_pages(&self, count: usize, block_tokens: usize) -> usize {
        (self.computed + count).div_ceil(block_tokens).saturating_sub(self.pages.len())
    }

    fn extend_digests(&mut self, model: &Model) {
        let more = model.digests(&self.digests, &self.tokens, &self.namespace);
        self.digests.extend(more);
    }

    /// Stores the blocks that the first `keyed` tokens fill, as far as they are not stored yet.
    fn store(&mut self, cache: &mut PagedCache, model: &Model, keyed: usize) {
        let (size, from) = (model.block_tokens, self.stored_blocks);
        let own = if model.policy.is_tree() { keyed.saturating_sub(model.chain.reach()) } else { keyed };
        let full = (own / size).min(self.digests.len());
        if full > from {
            let run = Run {
                parent: from.checked_sub(1).map(|before| self.digests[before]),
                digests: self.digests[from..full].to_vec(),
                tokens: self.tokens[from * size..full * size].to_vec(),
                after: self.tokens[full * size..full * size + model.chain.reach()].to_vec(),
                namespace: Arc::clone(&self.namespace),
            };
            cache.store(&mut self.pages[from..full], &run);
            self.stored_blocks = full;
        }
        if model.policy == Policy::Trtllm && keyed > full * size && full >= from {
            self.store_partial(cache, model, full, keyed);
        }
    }

    /// Stores the tokens up to `keyed` that do not fill block `place`, unless they are stored already.
    fn store_partial(&mut self, cache: &mut PagedCache, model: &Model, place: usize, keyed: usize) {
        let parent = place.checked_sub(1).map(|before| self.digests[before]);
        let root = model.chain.root(&self.namespace);
        let tokens = self.tokens[place * model.block_tokens..keyed].to_vec();
        let digest = model.chain.child(&parent.unwrap_or(root), &tokens, place == 0, &self.namespace);
        if cache.holds(&digest) {
            return;
        }
        let namespace = Arc::clone(&self.namespace);
        let run = Run { parent, digests: vec![digest], tokens, after: Vec::new(), namespace };
        cache.store(&mut self.pages[place..=place], &run);
    }

    fn start_over(&mut self, cache: &mut PagedCache) {
        cache.release(&std::mem::take(&mut self.pages));
        self.computed = 0;
        self.transferred = false;
        self.stored_blocks = 0;
        self.scheduled = 0;
    }
}

/// Copies per key, from [`PagedCache::contents`].
#[must_use]
pub fn copies_by_key(cache: &PagedCache) -> HashMap<u64, usize> {
    let mut copies = HashMap::new();
    for (digest, count) in cache.contents() {
        *copies.entry(digest.key()).or_default() += count;
    }
    copies
}

#[cfg(test)]
#[path = "scheduler_tests.rs"]
mod tests;
