//! From a request to the evidence its routing decision stands on: prompt keys, made in slices, walked through the
//! inventory as they come.

use std::cell::RefCell;
use std::num::NonZeroU32;

use crate::executor::Ticket;
use crate::ids::{BlockKey, EndpointIndex};
use crate::inventory::{Guard, Reader, Run, SpaceIndex, Walk};
use crate::predictions::{Prediction, PromptKind};
use crate::prompt::{Api, BodyView, Job, Keying, ModelTable, PrefixCache, Step};
use crate::route::Evidence;
use crate::service::{KvExact, MissReason, Service};

use super::routes::{LocalService, RequestView};

/// What is known of a request's prompt.
#[derive(Debug)]
pub enum Score {
    /// The request has no prompt, or its service does not look at prompts.
    NotAsked,
    /// The prompt could not be scored.
    Miss(MissReason),
    /// What the holders have of it.
    Runs {
        /// Tokens, exact or estimated.
        prompt_tokens: u64,
        /// Contiguous runs from block 0.
        runs: Vec<Run>,
        /// The keys that they are runs of.
        keys: PromptKeys,
    },
}

impl Score {
    /// As the decision takes it.
    #[must_use]
    pub fn evidence(&self) -> Evidence<'_> {
        match self {
            Score::NotAsked => Evidence::None(MissReason::ModeOff),
            Score::Miss(reason) => Evidence::None(*reason),
            Score::Runs { prompt_tokens, runs, .. } => Evidence::Scored { prompt_tokens: *prompt_tokens, runs },
        }
    }
}

/// Keys of a prompt's first blocks, by key space: at least as many as the longest run.
#[derive(Debug)]
pub struct PromptKeys {
    own: Vec<BlockKey>,
    others: Vec<InSpace>,
}

impl Score {
    /// The prompt's first block, in the service's own keys, and whether any of it is held.
    #[must_use]
    pub fn first_block(&self) -> Option<(BlockKey, bool)> {
        let Score::Runs { runs, keys, .. } = self else { return None };
        keys.own.first().map(|first| (*first, !runs.is_empty()))
    }

    /// What the endpoint's engine will hold once it has answered, beyond what it holds now.
    #[must_use]
    pub fn predict(&self, reader: &Reader, endpoint: EndpointIndex, kind: PromptKind) -> Option<Prediction> {
        let Score::Runs { runs, keys, .. } = self else { return None };
        let held = |runs: &[Run]| {
            let of_endpoint = runs.iter().filter(|run| run.endpoint == endpoint);
            of_endpoint.map(|run| run.blocks).max().unwrap_or(0)
        };
        if keys.others.is_empty() {
            return Prediction::new(&keys.own, held(runs), kind);
        }
        let space = reader.enter()?.space_of(endpoint)?;
        match keys.others.iter().find(|other| other.space == space) {
            Some(other) => Prediction::new(&other.keys, held(&other.runs), kind),
            None if space == SpaceIndex::OWN => Prediction::new(&keys.own, held(runs), kind),
            None => None,
        }
    }
}

/// Scores the request's prompt, giving way between slices. Dropping it stops the work.
pub async fn score(
    local: &LocalService,
    models: &ModelTable,
    prefixes: &RefCell<PrefixCache>,
    request: &RequestView<'_>,
    ticket: &Ticket,
) -> Score {
    let (Some(kv), Some(reader)) = (&local.service.kv, &local.reader) else { return Score::NotAsked };
    let Some(api) = Api::of(request.method(), request.path()) else { return Score::NotAsked };
    let ticket = ticket.take().await;
    // The whole body is looked through here, the whole chat rendered below; each is a slice of its own.
    let Some(body) = request.body() else { return Score::Miss(MissReason::Tokenize) };
    ticket.breathe().await;
    // Holders of other keys need every token: what is remembered of the prompt then is of no use.
    let others_hold = has_other_spaces(reader);
    let begun = if others_hold {
        begin(api, &local.service, kv, models, body, request, &mut PrefixCache::new(0))
    } else {
        begin(api, &local.service, kv, models, body, request, &mut prefixes.borrow_mut())
    };
    let mut job = match begun {
        Ok(job) => job,
        Err(reason) => return Score::Miss(reason),
    };
    ticket.breathe().await;
    let others = if others_hold { other_walks(&mut job, reader) } else { Vec::new() };
    let own = InSpace::new(SpaceIndex::OWN, None);
    let mut work = Work { job: Some(job), own, others, prefixes };
    loop {
        match work.slice(reader) {
            Ok(None) => ticket.breathe().await,
            Ok(Some(score)) => return score,
            Err(reason) => return Score::Miss(reason),
        }
    }
}

fn begin<'a>(
    api: Api,
    service: &Service,
    kv: &KvExact,
    models: &ModelTable,
    body: &BodyView<'a>,
    request: &RequestView<'_>,
    prefixes: &mut PrefixCache,
) -> Result<Job<'a>, MissReason> {
    // The engine reads the body's model; the header only chooses the rule.
    let named = body.model.as_deref().or_else(|| request.model());
    // `/generate` names none: then it is the rule's.
    let model = named.or(service.model.as_deref()).ok_or(MissReason::ModelEmpty)?;
    let adapter = kv.adapters.get(model);
    let base = adapter.map_or(model, |adapter| &adapter.base);
    let model = models.lookup(base).ready()?;
    let lora = adapter.map(|adapter| &adapter.lora);
    let rendering = kv.rendering(service.engine);
    let keying = Keying { contract: &kv.contract, block_tokens: kv.block_tokens, lora };
    Job::of_view(api, body, model, rendering, keying, prefixes)
}

/// Whether some holder's keys are not the rule's.
fn has_other_spaces(reader: &Reader) -> bool {
    reader.enter().is_some_and(|guard| guard.other_spaces().next().is_some())
}

/// Adds the key streams of holders that do not have the rule's keys; for most services there are none.
fn other_walks(job: &mut Job<'_>, reader: &Reader) -> Vec<InSpace> {
    let Some(guard) = reader.enter() else { return Vec::new() };
    let mut walks = Vec::new();
    for (index, space) in guard.other_spaces() {
        // A contract that cannot key what the request says has no holder for it.
        if job.also(&space.contract, space.block_tokens).is_ok() {
            walks.push(InSpace::new(index, Some(space.block_tokens)));
        }
    }
    walks
}

/// A walk among the holders of one key space.
#[derive(Debug)]
struct InSpace {
    space: SpaceIndex,
    walk: Walk,
    /// Tokens per block; none = the rule's.
    block_tokens: Option<NonZeroU32>,
    /// Some holder may go further.
    open: bool,
    /// Keys shown, in spaces beside the service's own.
    keys: Vec<BlockKey>,
    /// Runs in blocks of the space, known at the end.
    runs: Vec<Run>,
}

impl InSpace {
    fn new(space: SpaceIndex, block_tokens: Option<NonZeroU32>) -> Self {
        let walk = Walk::in_space(space);
        InSpace { space, walk, block_tokens, open: true, keys: Vec::new(), runs: Vec::new() }
    }

    /// Notes its runs, and adds them to those of all spaces.
    fn add_runs(&mut self, guard: &Guard<'_>, runs: &mut Vec<Run>) {
        let block_tokens = self.block_tokens;
        self.runs.extend(self.walk.runs(guard).map(|run| Run { block_tokens, ..run }));
        runs.extend_from_slice(&self.runs);
    }
}

struct Work<'a> {
    /// Some until it is over.
    job: Option<Job<'a>>,
    own: InSpace,
    others: Vec<InSpace>,
    prefixes: &'a RefCell<PrefixCache>,
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        if let Some(job) = self.job.take() {
            job.remember(&mut self.prefixes.borrow_mut());
        }
    }
}

impl Work<'_> {
    /// One slice: some keys, and how far the holders go along with them. The inventory is not held beyond it.
    fn slice(&mut self, reader: &Reader) -> Result<Option<Score>, MissReason> {
        let Some(job) = &mut self.job else { return Err(MissReason::Hashes) };
        let step = job.step()?;
        let keys = job.take_keys();
        if keys.is_empty() && self.others.is_empty() && step == Step::More {
            return Ok(None);
        }
        let Some(guard) = reader.enter() else { return Err(MissReason::NoWorker) };
        self.own.open = self.own.open && guard.advance(&mut self.own.walk, keys);
        for (stream, other) in self.others.iter_mut().enumerate() {
            let shown = other.keys.len();
            job.take_other_keys(stream, &mut other.keys);
            other.open = other.open && guard.advance(&mut other.walk, &other.keys[shown..]);
        }
        if step == Step::More && (self.own.open || self.others.iter().any(|other| other.open)) {
            return Ok(None);
        }
        let mut runs: Vec<Run> = self.own.walk.runs(&guard).collect();
        for other in &mut self.others {
            other.add_runs(&guard, &mut runs);
        }
        let keys = PromptKeys { own: job.keys().to_vec(), others: std::mem::take(&mut self.others) };
        Ok(Some(Score::Runs { prompt_tokens: job.prompt_tokens(), runs, keys }))
    }
}
