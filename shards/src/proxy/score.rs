//! From a request to the evidence its routing decision stands on: prompt keys, made in slices, walked through the
//! inventory as they come.

use std::cell::RefCell;
use std::num::NonZeroU32;
use std::sync::Arc;

use crate::belief::NamedRank;
use crate::block::Contract;
use crate::block::vllm::Tagging;
use crate::bos::{ModelPlace, OtherBos};
use crate::claims::Claimable;
use crate::executor::{Aside, Ticket, TicketGuard, breathe, turn};
use crate::feedback::Compared;
use crate::ids::{BlockKey, EndpointIndex, Rank, ServiceId};
use crate::inventory::{Guard, Medium, Reader, Run, Space, SpaceIndex, Walk};
use crate::predictions::{Prediction, PromptKind};
use crate::prompt::{
    Api, Begun, BodyView, Glimpse, Job, Keying, Model, ModelTable, Pending, PrefixCache, Question, Rendering, Step,
    may_bring_ids,
};
use crate::route::Evidence;
use crate::service::{KvExact, MissReason, Service};
use crate::usage::{Statement, Usage};

use super::Proxy;
use super::client::Buffers;
use super::handed::{List, SLICE_IDS};
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

/// A prompt in the keys of one endpoint.
struct AtEndpoint<'a> {
    keys: &'a [BlockKey],
    /// Its blocks that the endpoint has, as far as is known.
    held: u32,
    /// Tokens per block; none = the rule's.
    block_tokens: Option<NonZeroU32>,
}

/// Keys of a prompt's first blocks, by key space: at least as many as the longest run.
#[derive(Debug)]
pub struct PromptKeys {
    own: Vec<BlockKey>,
    /// One per key space beside the service's own, or several where engines key extras in several forms.
    others: Vec<InSpace>,
    /// The first block with the other begin-of-text, in the service's own keys.
    other_bos: Option<OtherBos>,
    /// The ids of the whole prompt as a JSON list, where they are to be handed on.
    ids: Option<Box<[u8]>>,
}

#[cfg(test)]
impl PromptKeys {
    /// Keys of the service's own space alone.
    pub fn of(own: Vec<BlockKey>) -> Self {
        PromptKeys { own, others: Vec::new(), other_bos: None, ids: None }
    }
}

impl Score {
    /// The prompt's first block, in the service's own keys, and whether any of it is held.
    #[must_use]
    pub fn first_block(&self) -> Option<(BlockKey, bool)> {
        let Score::Runs { runs, keys, .. } = self else { return None };
        keys.own.first().map(|first| (*first, !runs.is_empty()))
    }

    /// The ids of the whole prompt as a JSON list; none where they are not handed on, or not certain.
    #[must_use]
    pub fn ids(&self) -> Option<&[u8]> {
        let Score::Runs { keys, .. } = self else { return None };
        keys.ids.as_deref()
    }

    /// The prompt as claims see it; none where nothing of it can be claimed. The request's hash stands for what was not
    /// keyed.
    #[must_use]
    pub fn claimable(
        &self,
        service: ServiceId,
        block_tokens: u32,
        request: impl FnOnce() -> u64,
    ) -> Option<Claimable<'_>> {
        let Score::Runs { prompt_tokens, keys, .. } = self else { return None };
        let keys = &keys.own[..];
        let is_cut = prompt_tokens / u64::from(block_tokens.max(1)) > keys.len() as u64;
        let whole = is_cut.then(|| (request(), *prompt_tokens));
        (whole.is_some() || !keys.is_empty()).then_some(Claimable { service, keys, block_tokens, whole })
    }

    /// What the endpoint's engine will hold once it has answered, beyond what it holds now. `rank` served it, where that is
    /// known.
    #[must_use]
    pub fn predict(
        &self,
        reader: &Reader,
        endpoint: EndpointIndex,
        rank: Option<Rank>,
        kind: PromptKind,
    ) -> Option<Prediction> {
        let at = self.at(reader, endpoint, rank)?;
        let mut prediction = Prediction::new(at.keys, at.held, kind)?;
        prediction.other_bos = match self {
            Score::Runs { keys, .. } if std::ptr::eq(at.keys, &keys.own[..]) => keys.other_bos,
            _ => None,
        };
        Some(prediction)
    }

    /// What follows from what the endpoint's engine said of its cache in its answer. Nothing does where it has several
    /// ranks and nobody knows which one answered.
    #[must_use]
    pub fn compare(
        &self,
        local: &LocalService,
        endpoint: EndpointIndex,
        rank: Option<Rank>,
        usage: Usage,
    ) -> Option<Statement> {
        let (kv, reader) = (local.service.kv.as_ref()?, local.reader.as_ref()?);
        if kv.ranks > 1 && rank.is_none() {
            return None;
        }
        let at = self.at(reader, endpoint, rank)?;
        let block_tokens = at.block_tokens.map_or(kv.block_tokens, NonZeroU32::get);
        let tells = local.service.endpoints[endpoint.index()].shared.usage.tells();
        Statement::new(at.keys, at.held, block_tokens, usage, tells)
    }

    /// What was predicted of an answer whose engine took `cached` tokens of the prompt's from its cache: of the rank that
    /// served it, or, where nobody knows which one did, of the mean of them. None where nothing is known.
    #[must_use]
    pub fn compared(
        &self,
        local: &LocalService,
        endpoint: EndpointIndex,
        rank: Option<Rank>,
        named: NamedRank,
        prompt_tokens: u64,
        cached: u64,
    ) -> Option<Compared> {
        let (kv, reader) = (local.service.kv.as_ref()?, local.reader.as_ref()?);
        let Score::Runs { runs, .. } = self else { return None };
        let named = match (rank, named) {
            (Some(rank), _) | (None, NamedRank::Yes(Some(rank))) => Some(rank),
            _ => None,
        };
        let at = self.at(reader, endpoint, named)?;
        let block = u64::from(at.block_tokens.map_or(kv.block_tokens, NonZeroU32::get)).max(1);
        let usable = |held: u32| u64::from(held).min(prompt_tokens.saturating_sub(1) / block) * block;
        let predicted = match named {
            None if kv.ranks > 1 => {
                let in_device = runs.iter().filter(|run| run.endpoint == endpoint && run.medium == Medium::Device);
                in_device.map(|run| usable(run.blocks)).sum::<u64>() / u64::from(kv.ranks)
            }
            _ => usable(at.held),
        };
        Some(Compared { predicted, cached, block_tokens: block })
    }

    /// The prompt in the keys of an endpoint, with what the rank, or the best of them, holds.
    fn at(&self, reader: &Reader, endpoint: EndpointIndex, rank: Option<Rank>) -> Option<AtEndpoint<'_>> {
        let Score::Runs { runs, keys, .. } = self else { return None };
        let held = |runs: &[Run]| {
            // What comes from slower media is announced in device memory then.
            let in_device = |run: &&Run| {
                run.endpoint == endpoint && run.medium == Medium::Device && rank.is_none_or(|rank| run.rank == rank)
            };
            let of_endpoint = runs.iter().filter(in_device);
            of_endpoint.map(|run| run.blocks).max().unwrap_or(0)
        };
        let own = AtEndpoint { keys: &keys.own, held: held(runs), block_tokens: None };
        if keys.others.is_empty() {
            return Some(own);
        }
        let space = reader.enter()?.space_of(endpoint)?;
        let others = keys.others.iter().filter(|other| other.space == space).map(|other| AtEndpoint {
            keys: &other.keys,
            held: held(&other.runs),
            block_tokens: other.block_tokens,
        });
        let own = (space == SpaceIndex::OWN).then_some(own);
        let mut streams = own.into_iter().chain(others);
        let first = streams.next()?;
        // Of several forms of extra keys the endpoint's is the one that it holds something of.
        match streams.next() {
            None => Some(first),
            Some(second) => [first, second].into_iter().chain(streams).find(|at| at.held > 0),
        }
    }
}

/// What a shard keeps for the prompts of all its requests.
#[derive(Clone, Copy)]
struct Means<'a> {
    /// What it remembers of prompts.
    pub prefixes: &'a RefCell<PrefixCache>,
    /// The right to do long work.
    pub ticket: &'a Ticket,
    /// The thread for work that cannot be sliced; without one it is done here.
    pub aside: Option<&'a Aside>,
    /// Memory for copies of long bodies.
    pub buffers: &'a Buffers,
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

    async fn take(&mut self, ticket: &Ticket) {
        self.0 = Some(ticket.take().await);
    }

    async fn breathe(&self) {
        match &self.0 {
            Some(ticket) => ticket.breathe().await,
            None => breathe().await,
        }
    }
}

/// Scores the request's prompt, giving way between slices. Dropping it stops the work.
pub async fn score(proxy: &Proxy, local: &LocalService, models: &ModelTable, request: &RequestView<'_>) -> Score {
    let (Some(kv), Some(reader)) = (&local.service.kv, &local.reader) else { return Score::NotAsked };
    let Some(api) = Api::of(request.method(), request.path()) else { return Score::NotAsked };
    let means = Means {
        prefixes: &proxy.prefixes,
        ticket: &proxy.ticket,
        aside: proxy.aside.as_ref(),
        buffers: &proxy.buffers,
    };
    request.look_through(means.ticket).await;
    let mut ticket = Pace::of(request, means.ticket).await;
    let Some(body) = request.body() else { return Score::Miss(MissReason::Tokenize) };
    let prompt = match Prompt::of(api, &local.service, kv, models, body, request) {
        Ok(prompt) => prompt,
        Err(reason) => return Score::Miss(reason),
    };
    let forms = forms(kv, body, request);
    // Holders of other keys need every token: what is remembered of the prompt then is of no use.
    let others_hold = has_other_spaces(reader) || forms.len() > 1;
    // So do ids that are handed on.
    let hands_on =
        kv.send_ids && may_bring_ids(api, body) && local.service.endpoints.iter().any(|e| e.shared.takes_ids());
    let sees_all = others_hold || hands_on;
    let begun =
        if sees_all { prompt.begin(&mut PrefixCache::new(0)) } else { prompt.begin(&mut means.prefixes.borrow_mut()) };
    let made = match begun {
        Ok(Begun::Job(job)) => Ok(job),
        Ok(Begun::Pending(pending)) => {
            if !sees_all
                && let Some(glimpse) = pending.glimpse()
                && let Some(score) = of_glimpse(glimpse, reader, &ticket, means).await
            {
                return score;
            }
            prepare(pending, sees_all, &mut ticket, means).await
        }
        Err(reason) => Err(reason),
    };
    // What an engine renders in code may mean more to it than the ids.
    let hands_on = hands_on && made.is_ok();
    let list;
    let begun = match made.map_err(|reason| (reason, prompt.question(kv, reason))) {
        Ok(job) => Ok(job),
        Err((reason, None)) => Err(reason),
        Err((reason, Some(question))) => {
            // The engine is waited for without the right to work.
            ticket = Pace(None);
            let told = proxy.asked.ids(local, request, question).await;
            ticket.take(means.ticket).await;
            match told {
                Some(told) => {
                    list = told;
                    prompt.of_ids(&list)
                }
                None => Err(reason),
            }
        }
    };
    let mut job = match begun {
        Ok(job) => job,
        Err(reason) => return Score::Miss(reason),
    };
    ticket.breathe().await;
    let others = if others_hold { other_walks(&mut job, reader, kv, &forms) } else { Vec::new() };
    let own = InSpace::new(SpaceIndex::OWN, None);
    job.watch_bos(prompt.keying);
    if hands_on {
        job.keep_ids();
    }
    let bos = &local.service.shared.bos;
    let mut work = Work { job: Some(job), own, others, means };
    loop {
        match work.slice(reader) {
            Ok(None) if work.is_long_next() => turn().await,
            Ok(None) => ticket.breathe().await,
            Ok(Some(Score::Runs { prompt_tokens, runs, mut keys })) => {
                keys.other_bos = work.other_bos(|| bos.place(prompt.model.slug()));
                if hands_on {
                    keys.ids = work.ids(&ticket).await;
                }
                return Score::Runs { prompt_tokens, runs, keys };
            }
            Ok(Some(score)) => return score,
            Err(reason) => return Score::Miss(reason),
        }
    }
}

/// Has a large prompt read or rendered elsewhere, while others have the ticket.
async fn prepare<'a>(
    mut pending: Pending<'_, 'a>,
    sees_all: bool,
    ticket: &mut Pace,
    means: Means<'_>,
) -> Result<Job<'a>, MissReason> {
    let copied = pending.copied_bytes();
    if copied > 0
        && let Some(memory) = means.buffers.large(copied)
    {
        pending.lend(memory);
    }
    while !pending.step() {
        ticket.breathe().await;
    }
    let task = pending.task();
    *ticket = Pace(None);
    let prepared = match means.aside {
        Some(aside) => aside.run(|| task.run()).await.map_err(|_| MissReason::Busy).flatten(),
        None => task.run(),
    };
    ticket.take(means.ticket).await;
    let mut prepared = prepared?;
    means.buffers.give_back(std::mem::take(&mut prepared.spare));
    if sees_all {
        pending.finish(prepared, &mut PrefixCache::new(0))
    } else {
        pending.finish(prepared, &mut means.prefixes.borrow_mut())
    }
}

/// Blocks before the end of a glimpse from which on it does not tell where a run ends.
const GLIMPSE_MARGIN: usize = 8;

/// The score of a large prompt whose begin shows that nobody holds more of it; none where the whole must be looked at.
async fn of_glimpse(glimpse: Glimpse<'_>, reader: &Reader, ticket: &Pace, means: Means<'_>) -> Option<Score> {
    let Glimpse { job, certain, part } = glimpse;
    let own = InSpace::new(SpaceIndex::OWN, None);
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

/// A request's prompt before work on it begins.
struct Prompt<'a> {
    api: Api,
    body: &'a BodyView<'a>,
    model: &'a Arc<Model>,
    rendering: Rendering<'a>,
    keying: Keying<'a>,
}

impl<'a> Prompt<'a> {
    fn of(
        api: Api,
        service: &'a Service,
        kv: &'a KvExact,
        models: &'a ModelTable,
        body: &'a BodyView<'a>,
        request: &RequestView<'_>,
    ) -> Result<Self, MissReason> {
        // The engine reads the body's model; the header only chooses the rule.
        let named = body.model.as_deref().or_else(|| request.model());
        // `/generate` names none: then it is the rule's, or the only one that the engines serve.
        let served = service.model.as_deref().or(kv.only_model.as_deref());
        let model = named.or(served).ok_or(MissReason::ModelEmpty)?;
        let adapter = kv.adapters.get(model);
        let base = adapter.map_or(model, |adapter| &adapter.base);
        let model = models.lookup(base).ready()?;
        let lora = adapter.map(|adapter| &adapter.lora);
        let mut rendering = kv.rendering(service.engine);
        // What use has shown wins over what rule and files say.
        rendering.add_bos = service.shared.bos.corrected(model.slug()).or(rendering.add_bos);
        let keying = Keying { contract: &kv.contract, block_tokens: kv.block_tokens, lora };
        Ok(Prompt { api, body, model, rendering, keying })
    }

    fn begin(&self, prefixes: &mut PrefixCache) -> Result<Begun<'a, 'a>, MissReason> {
        Job::begin(self.api, self.body, self.model, self.rendering, self.keying, prefixes)
    }

    /// Begins with the ids that an engine made.
    fn of_ids<'i>(&self, list: &'i str) -> Result<Job<'i>, MissReason>
    where
        'a: 'i,
    {
        Job::of_ids(list, self.body, self.model, self.rendering, self.keying)
    }

    /// What an engine may be asked instead, where only it knows the text.
    fn question(&self, kv: &KvExact, reason: MissReason) -> Option<Question> {
        Question::after(reason, self.api, self.body, self.model, self.rendering.engine, kv.engine_render?)
    }
}

/// Whether some holder's keys are not the rule's.
fn has_other_spaces(reader: &Reader) -> bool {
    reader.enter().is_some_and(|guard| guard.other_spaces().next().is_some())
}

/// The forms that the engines key the request's adapter or salt in, the contract's own first; none for a request that
/// says nothing of the kind, whose keys are the same in all of them.
fn forms(kv: &KvExact, body: &BodyView<'_>, request: &RequestView<'_>) -> Vec<Tagging> {
    let adapted = || {
        let model = body.model.as_deref().or_else(|| request.model());
        model.is_some_and(|model| kv.adapters.contains_key(model))
    };
    match kv.contract {
        Contract::Vllm { tagging, .. } if body.is_salted() || adapted() => {
            std::iter::once(tagging).chain(kv.other_forms.iter().copied()).collect()
        }
        _ => Vec::new(),
    }
}

/// Adds the key streams of holders that do not have the rule's keys; for most services there are none.
fn other_walks(job: &mut Job<'_>, reader: &Reader, kv: &KvExact, forms: &[Tagging]) -> Vec<InSpace> {
    let Some(guard) = reader.enter() else { return Vec::new() };
    let own = NonZeroU32::new(kv.block_tokens).map(|block_tokens| Space { contract: kv.contract, block_tokens });
    let own_forms = own.into_iter().flat_map(|space| in_forms(space, forms.get(1..).unwrap_or_default()));
    let mut walks: Vec<_> = own_forms.map(|space| (SpaceIndex::OWN, space)).collect();
    for (index, space) in guard.other_spaces() {
        match space.contract {
            Contract::Vllm { .. } if !forms.is_empty() => {
                walks.extend(in_forms(space, forms).map(|space| (index, space)));
            }
            _ => walks.push((index, space)),
        }
    }
    // A contract that cannot key what the request says has no holder for it.
    walks.retain(|(_, space)| job.also(&space.contract, space.block_tokens).is_ok());
    walks.into_iter().map(|(index, space)| InSpace::new(index, Some(space.block_tokens))).collect()
}

/// A key space as engines of releases with these forms of extra keys fill it.
fn in_forms(space: Space, forms: &[Tagging]) -> impl Iterator<Item = Space> {
    forms.iter().filter_map(move |tagging| match space.contract {
        Contract::Vllm { none_hash, lookahead, .. } => {
            Some(Space { contract: Contract::Vllm { none_hash, tagging: *tagging, lookahead }, ..space })
        }
        _ => None,
    })
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
    means: Means<'a>,
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        if let Some(job) = self.job.take() {
            let mut prefixes = self.means.prefixes.borrow_mut();
            job.remember(&mut prefixes);
            if let Some(garbage) = prefixes.take_garbage() {
                match self.means.aside {
                    Some(aside) => aside.discard(garbage),
                    None => drop(garbage),
                }
            }
        }
    }
}

impl Work<'_> {
    fn is_long_next(&self) -> bool {
        self.job.as_ref().is_some_and(Job::is_long_next)
    }

    /// The first block with the other begin-of-text, if the job made it.
    fn other_bos(&self, model: impl FnOnce() -> Option<ModelPlace>) -> Option<OtherBos> {
        let (first, adds) = self.job.as_ref()?.other_bos()?;
        Some(OtherBos { model: model()?, adds, first })
    }

    /// The ids of the whole prompt as a JSON list, its rest read for them alone; none where they are not certain.
    async fn ids(&mut self, pace: &Pace) -> Option<Box<[u8]>> {
        let job = self.job.as_mut()?;
        while job.step().ok()? == Step::More {
            if job.is_long_next() {
                turn().await;
            } else {
                pace.breathe().await;
            }
        }
        let mut list = List::default();
        for ids in job.ids()?.chunks(SLICE_IDS) {
            pace.breathe().await;
            list.push(ids);
        }
        list.finish()
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
            other.add_runs(&guard, &mut runs);
        }
        let all = u32::try_from(job.keys().len()).unwrap_or(u32::MAX);
        if step == Step::Done && all > 0 && self.own.walk.runs(&guard).any(|run| run.blocks >= all) {
            // An engine has stored the very blocks that the template led to.
            job.confirm_template();
        }
        let keys = PromptKeys {
            own: job.keys().to_vec(),
            others: std::mem::take(&mut self.others),
            other_bos: None,
            ids: None,
        };
        Ok(Some(Score::Runs { prompt_tokens: job.prompt_tokens(), runs, keys }))
    }
}
