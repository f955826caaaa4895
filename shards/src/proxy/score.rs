//! From a request to the evidence its routing decision stands on: prompt keys, made in slices, walked through the
//! inventory as they come.

use crate::block::{KeyStream, PromptExtras};
use crate::executor::Ticket;
use crate::ids::{BlockKey, EndpointIndex};
use crate::inventory::{Guard, Reader, Run, SpaceIndex, Walk};
use crate::predictions::{Prediction, PromptKind};
use crate::prompt::{Api, BodyView, Job, Lookup, ModelTable, Step};
use crate::route::Evidence;
use crate::service::{KvExact, MissReason};

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
pub async fn score(local: &LocalService, models: &ModelTable, request: &RequestView<'_>, ticket: &Ticket) -> Score {
    let (Some(kv), Some(reader)) = (&local.service.kv, &local.reader) else { return Score::NotAsked };
    let Some(api) = Api::of(request.method(), request.path()) else { return Score::NotAsked };
    let ticket = ticket.take().await;
    // The whole body is looked through here, the whole chat rendered below; each is a slice of its own.
    let Some(body) = request.body() else { return Score::Miss(MissReason::Tokenize) };
    ticket.breathe().await;
    let mut job = match begin(api, kv, models, body, request) {
        Ok(job) => job,
        Err(reason) => return Score::Miss(reason),
    };
    ticket.breathe().await;
    let others = other_walks(&mut job, reader);
    let mut work = Work { job, own: InSpace::new(SpaceIndex::OWN, kv.block_tokens), others };
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
    kv: &KvExact,
    models: &ModelTable,
    body: &BodyView<'a>,
    request: &RequestView<'_>,
) -> Result<Job<'a>, MissReason> {
    // The engine reads the body's model; the header only chooses the rule.
    let model = body.model.as_deref().or_else(|| request.model()).ok_or(MissReason::ModelEmpty)?;
    let Lookup::Ready(model) = models.lookup(model) else { return Err(MissReason::Tokenizer) };
    Job::of_view(api, body, model, kv.chat_template.as_ref(), kv.algo, &kv.none_hash, kv.block_tokens)
}

/// Adds the key streams of holders that do not have the rule's keys; for most services there are none.
fn other_walks(job: &mut Job<'_>, reader: &Reader) -> Vec<InSpace> {
    let Some(guard) = reader.enter() else { return Vec::new() };
    let mut walks = Vec::new();
    for (index, space) in guard.other_spaces() {
        // Nothing in a prompt beyond its tokens is keyed, which every contract takes.
        let Ok(stream) = KeyStream::new(&space.contract, &PromptExtras::default(), space.block_tokens) else {
            continue;
        };
        job.also(stream);
        walks.push(InSpace::new(index, space.block_tokens.get()));
    }
    walks
}

/// A walk among the holders of one key space.
#[derive(Debug)]
struct InSpace {
    space: SpaceIndex,
    walk: Walk,
    block_tokens: u32,
    /// Some holder may go further.
    open: bool,
    /// Keys shown, in spaces beside the service's own.
    keys: Vec<BlockKey>,
    /// Runs in blocks of the space, known at the end.
    runs: Vec<Run>,
}

impl InSpace {
    fn new(space: SpaceIndex, block_tokens: u32) -> Self {
        let walk = Walk::in_space(space);
        InSpace { space, walk, block_tokens, open: true, keys: Vec::new(), runs: Vec::new() }
    }

    /// Adds its runs, counted in blocks of the rule's size; what is held is at least one.
    fn add_runs(&mut self, guard: &Guard<'_>, rule_block_tokens: u32, runs: &mut Vec<Run>) {
        self.runs.extend(self.walk.runs(guard));
        let scaled = |blocks: u32| {
            let tokens = u64::from(blocks) * u64::from(self.block_tokens);
            u32::try_from(tokens / u64::from(rule_block_tokens)).unwrap_or(u32::MAX).max(1)
        };
        runs.extend(self.runs.iter().map(|run| Run { blocks: scaled(run.blocks), ..*run }));
    }
}

struct Work<'a> {
    job: Job<'a>,
    own: InSpace,
    others: Vec<InSpace>,
}

impl Work<'_> {
    /// One slice: some keys, and how far the holders go along with them. The inventory is not held beyond it.
    fn slice(&mut self, reader: &Reader) -> Result<Option<Score>, MissReason> {
        let step = self.job.step()?;
        let keys = self.job.take_keys();
        if keys.is_empty() && self.others.is_empty() && step == Step::More {
            return Ok(None);
        }
        let Some(guard) = reader.enter() else { return Err(MissReason::NoWorker) };
        self.own.open = self.own.open && guard.advance(&mut self.own.walk, keys);
        for (stream, other) in self.others.iter_mut().enumerate() {
            let shown = other.keys.len();
            self.job.take_other_keys(stream, &mut other.keys);
            other.open = other.open && guard.advance(&mut other.walk, &other.keys[shown..]);
        }
        if step == Step::More && (self.own.open || self.others.iter().any(|other| other.open)) {
            return Ok(None);
        }
        let mut runs: Vec<Run> = self.own.walk.runs(&guard).collect();
        for other in &mut self.others {
            other.add_runs(&guard, self.own.block_tokens, &mut runs);
        }
        let keys = PromptKeys { own: self.job.give_keys(), others: std::mem::take(&mut self.others) };
        Ok(Some(Score::Runs { prompt_tokens: self.job.prompt_tokens(), runs, keys }))
    }
}
