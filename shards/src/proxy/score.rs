//! From a request to the evidence its routing decision stands on: prompt keys, made in slices, walked through the
//! inventory as they come.

use crate::block::{KeyStream, PromptExtras};
use crate::executor::Ticket;
use crate::ids::BlockKey;
use crate::inventory::{Guard, Reader, Run, SpaceIndex, Walk};
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
    },
}

impl Score {
    /// As the decision takes it.
    #[must_use]
    pub fn evidence(&self) -> Evidence<'_> {
        match self {
            Score::NotAsked => Evidence::None(MissReason::ModeOff),
            Score::Miss(reason) => Evidence::None(*reason),
            Score::Runs { prompt_tokens, runs } => Evidence::Scored { prompt_tokens: *prompt_tokens, runs },
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
    let mut work = Work { job, own: InSpace::new(SpaceIndex::OWN, kv.block_tokens), others, keys: Vec::new() };
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
struct InSpace {
    walk: Walk,
    block_tokens: u32,
    /// Some holder may go further.
    open: bool,
}

impl InSpace {
    fn new(space: SpaceIndex, block_tokens: u32) -> Self {
        InSpace { walk: Walk::in_space(space), block_tokens, open: true }
    }

    fn advance(&mut self, guard: &Guard<'_>, keys: &[BlockKey]) {
        self.open = self.open && guard.advance(&mut self.walk, keys);
    }

    /// Adds its runs, counted in blocks of the rule's size; what is held is at least one.
    fn add_runs(&self, guard: &Guard<'_>, rule_block_tokens: u32, runs: &mut Vec<Run>) {
        let scaled = |blocks: u32| {
            let tokens = u64::from(blocks) * u64::from(self.block_tokens);
            u32::try_from(tokens / u64::from(rule_block_tokens)).unwrap_or(u32::MAX).max(1)
        };
        runs.extend(self.walk.runs(guard).map(|run| Run { blocks: scaled(run.blocks), ..run }));
    }
}

struct Work<'a> {
    job: Job<'a>,
    own: InSpace,
    others: Vec<InSpace>,
    /// Of one slice of one other space; kept for its memory.
    keys: Vec<BlockKey>,
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
        self.own.advance(&guard, keys);
        for (stream, other) in self.others.iter_mut().enumerate() {
            self.job.take_other_keys(stream, &mut self.keys);
            other.advance(&guard, &self.keys);
        }
        if step == Step::More && (self.own.open || self.others.iter().any(|other| other.open)) {
            return Ok(None);
        }
        let mut runs = Vec::new();
        for walked in std::iter::once(&self.own).chain(&self.others) {
            walked.add_runs(&guard, self.own.block_tokens, &mut runs);
        }
        Ok(Some(Score::Runs { prompt_tokens: self.job.prompt_tokens(), runs }))
    }
}
