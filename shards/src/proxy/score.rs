//! From a request to the evidence its routing decision stands on: prompt keys, made in slices, walked through the
//! inventory as they come.

use std::cell::RefCell;

use crate::executor::{Aside, Ticket, TicketGuard, breathe, turn};
use crate::ids::{BlockKey, EndpointIndex};
use crate::inventory::{Guard, Reader, Run, SpaceIndex, Walk};
use crate::predictions::{Prediction, PromptKind};
use crate::prompt::{Api, Begun, BodyView, Glimpse, Job, Keying, ModelTable, Pending, PrefixCache, Rendering, Step};
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

/// What a shard keeps for the prompts of all its requests.
#[derive(Clone, Copy)]
pub struct Means<'a> {
    /// What it remembers of prompts.
    pub prefixes: &'a RefCell<PrefixCache>,
    /// The right to do long work.
    pub ticket: &'a Ticket,
    /// The thread for work that cannot be sliced; without one it is done here.
    pub aside: Option<&'a Aside>,
}

/// Bytes of a request whose prompt is a slice or two: it does not stand in line behind long ones.
const SMALL_BYTES: usize = 32 * 1024;

/// How a prompt's work goes along with that of others: with the ticket, or, if it is small, between their slices.
struct Pace(Option<TicketGuard>);

impl Pace {
    async fn of(request: &RequestView<'_>, ticket: &Ticket) -> Self {
        if request.bytes.len() <= SMALL_BYTES {
            breathe().await;
            return Pace(None);
        }
        Pace(Some(ticket.take().await))
    }

    async fn breathe(&self) {
        match &self.0 {
            Some(ticket) => ticket.breathe().await,
            None => breathe().await,
        }
    }
}

/// Scores the request's prompt, giving way between slices. Dropping it stops the work.
pub async fn score(local: &LocalService, models: &ModelTable, request: &RequestView<'_>, means: Means<'_>) -> Score {
    let (Some(kv), Some(reader)) = (&local.service.kv, &local.reader) else { return Score::NotAsked };
    let Some(api) = Api::of(request.method(), request.path()) else { return Score::NotAsked };
    request.look_through(means.ticket).await;
    let ticket = Pace::of(request, means.ticket).await;
    let Some(body) = request.body() else { return Score::Miss(MissReason::Tokenize) };
    // Holders of other keys need every token: what is remembered of the prompt then is of no use.
    let others_hold = has_other_spaces(reader);
    let begun = if others_hold {
        begin(api, &local.service, kv, models, body, request, &mut PrefixCache::new(0))
    } else {
        begin(api, &local.service, kv, models, body, request, &mut means.prefixes.borrow_mut())
    };
    let (mut job, ticket) = match begun {
        Ok(Begun::Job(job)) => (job, ticket),
        Ok(Begun::Pending(pending)) => {
            if !others_hold
                && let Some(glimpse) = pending.glimpse()
                && let Some(score) = of_glimpse(glimpse, kv, reader, &ticket, means).await
            {
                return score;
            }
            match prepare(pending, others_hold, ticket, means).await {
                Ok(prepared) => prepared,
                Err(reason) => return Score::Miss(reason),
            }
        }
        Err(reason) => return Score::Miss(reason),
    };
    ticket.breathe().await;
    let others = if others_hold { other_walks(&mut job, reader) } else { Vec::new() };
    let own = InSpace::new(SpaceIndex::OWN, kv.block_tokens);
    let mut work = Work { job: Some(job), own, others, means };
    loop {
        match work.slice(reader) {
            Ok(None) if work.is_long_next() => turn().await,
            Ok(None) => ticket.breathe().await,
            Ok(Some(score)) => return score,
            Err(reason) => return Score::Miss(reason),
        }
    }
}

/// Has a large prompt read or rendered elsewhere, while others have the ticket.
async fn prepare<'a>(
    mut pending: Pending<'_, 'a>,
    others_hold: bool,
    ticket: Pace,
    means: Means<'_>,
) -> Result<(Job<'a>, Pace), MissReason> {
    while !pending.step() {
        ticket.breathe().await;
    }
    let task = pending.task();
    drop(ticket);
    let prepared = match means.aside {
        Some(aside) => aside.run(|| task.run()).await.map_err(|_| MissReason::Busy)??,
        None => task.run()?,
    };
    let ticket = Pace(Some(means.ticket.take().await));
    let job = if others_hold {
        pending.finish(prepared, &mut PrefixCache::new(0))?
    } else {
        pending.finish(prepared, &mut means.prefixes.borrow_mut())?
    };
    Ok((job, ticket))
}

/// Blocks before the end of a glimpse from which on it does not tell where a run ends.
const GLIMPSE_MARGIN: usize = 8;

/// The score of a large prompt whose begin shows that nobody holds more of it; none where the whole must be looked at.
async fn of_glimpse(
    glimpse: Glimpse<'_>,
    kv: &KvExact,
    reader: &Reader,
    ticket: &Pace,
    means: Means<'_>,
) -> Option<Score> {
    let Glimpse { job, certain, part } = glimpse;
    let own = InSpace::new(SpaceIndex::OWN, kv.block_tokens);
    let mut work = Work { job: Some(job), own, others: Vec::new(), means };
    ticket.breathe().await;
    loop {
        match work.slice(reader) {
            Ok(None) if work.is_long_next() => turn().await,
            Ok(None) => ticket.breathe().await,
            Ok(Some(Score::Runs { prompt_tokens, runs, mut keys })) => {
                let held = runs.iter().map(|run| run.blocks as usize).max().unwrap_or(0);
                if keys.own.is_empty() || (held > 0 && held + GLIMPSE_MARGIN > keys.own.len()) {
                    return None;
                }
                if !certain {
                    // Nothing may be expected of engines on its strength.
                    keys.own.clear();
                }
                let prompt_tokens = (prompt_tokens as f64 * part) as u64;
                return Some(Score::Runs { prompt_tokens, runs, keys });
            }
            Ok(Some(_)) | Err(_) => return None,
        }
    }
}

fn begin<'o, 'a>(
    api: Api,
    service: &'o Service,
    kv: &'o KvExact,
    models: &'o ModelTable,
    body: &'o BodyView<'a>,
    request: &RequestView<'_>,
    prefixes: &mut PrefixCache,
) -> Result<Begun<'o, 'a>, MissReason> {
    // The engine reads the body's model; the header only chooses the rule.
    let named = body.model.as_deref().or_else(|| request.model());
    // `/generate` names none: then it is the rule's.
    let model = named.or(service.model.as_deref()).ok_or(MissReason::ModelEmpty)?;
    let adapter = kv.adapters.get(model);
    let base = adapter.map_or(model, |adapter| &adapter.base);
    let model = models.lookup(base).ready()?;
    let lora = adapter.map(|adapter| &adapter.lora);
    let rendering = Rendering {
        engine: service.engine,
        template: kv.chat_template.as_ref(),
        kwargs: kv.chat_template_kwargs.as_deref(),
        add_bos: kv.add_bos,
    };
    let keying = Keying { contract: &kv.contract, block_tokens: kv.block_tokens, lora };
    Job::begin(api, body, model, rendering, keying, prefixes)
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
            walks.push(InSpace::new(index, space.block_tokens.get()));
        }
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
    /// Some until it is over.
    job: Option<Job<'a>>,
    own: InSpace,
    others: Vec<InSpace>,
    means: Means<'a>,
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        if let Some(job) = self.job.take() {
            let mut prefixes = self.means.prefixes.borrow_mut();
            job.remember(&mut prefixes);
            if let Some(aside) = self.means.aside
                && let Some(garbage) = prefixes.take_garbage()
            {
                aside.discard(garbage);
            }
        }
    }
}

impl Work<'_> {
    fn is_long_next(&self) -> bool {
        self.job.as_ref().is_some_and(Job::is_long_next)
    }

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
            other.add_runs(&guard, self.own.block_tokens, &mut runs);
        }
        let keys = PromptKeys { own: job.keys().to_vec(), others: std::mem::take(&mut self.others) };
        Ok(Some(Score::Runs { prompt_tokens: job.prompt_tokens(), runs, keys }))
    }
}
