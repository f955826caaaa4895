//! From a request to the evidence its routing decision stands on: prompt keys, made in slices, walked through the
//! inventory as they come.

use crate::executor::Ticket;
use crate::inventory::{Reader, Run, Walk};
use crate::prompt::{Api, BodyView, Job, Keying, Lookup, ModelTable, Rendering, Step};
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
    let job = match begin(api, &local.service, kv, models, body, request) {
        Ok(job) => job,
        Err(reason) => return Score::Miss(reason),
    };
    ticket.breathe().await;
    let mut work = Work { job, walk: Walk::default() };
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
) -> Result<Job<'a>, MissReason> {
    // The engine reads the body's model; the header only chooses the rule.
    let named = body.model.as_deref().or_else(|| request.model());
    // `/generate` names none: then it is the rule's.
    let model = named.or(service.model.as_deref()).ok_or(MissReason::ModelEmpty)?;
    let adapter = kv.adapters.get(model);
    let base = adapter.map_or(model, |adapter| &adapter.base);
    let Lookup::Ready(model) = models.lookup(base) else { return Err(MissReason::Tokenizer) };
    let lora = adapter.map(|adapter| &adapter.lora);
    let rendering = Rendering {
        engine: service.engine,
        template: kv.chat_template.as_ref(),
        kwargs: kv.chat_template_kwargs.as_deref(),
        add_bos: kv.add_bos,
    };
    let keying = Keying { contract: &kv.contract, block_tokens: kv.block_tokens, lora };
    Job::of_view(api, body, model, rendering, keying)
}

struct Work<'a> {
    job: Job<'a>,
    walk: Walk,
}

impl Work<'_> {
    /// One slice: some keys, and how far the holders go along with them. The inventory is not held beyond it.
    fn slice(&mut self, reader: &Reader) -> Result<Option<Score>, MissReason> {
        let step = self.job.step()?;
        let keys = self.job.take_keys();
        if keys.is_empty() && step == Step::More {
            return Ok(None);
        }
        let Some(guard) = reader.enter() else { return Err(MissReason::NoWorker) };
        let goes_on = guard.advance(&mut self.walk, keys);
        if goes_on && step == Step::More {
            return Ok(None);
        }
        let runs = self.walk.runs(&guard).collect();
        Ok(Some(Score::Runs { prompt_tokens: self.job.prompt_tokens(), runs }))
    }
}
