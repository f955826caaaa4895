//! A prompt that is too large to be read or rendered between two visits to the driver: what is done here, what elsewhere,
//! and the glimpse that may make both needless.

use std::borrow::Cow;

use super::Job;
use super::opening::{Opened, Opening};
use crate::prompt::body;
use crate::prompt::large::{Copying, Made, Prepared, REMEMBERED_BYTES_MAX, Task};
use crate::prompt::memory::Memory;
use crate::prompt::prefix_cache::{self, PrefixCache, Strides};
use crate::prompt::recall::{self, Growing};
use crate::prompt::request::Source as PromptSource;
use crate::prompt::{Api, glimpse};
use crate::service::MissReason;

/// What became of a prompt's begin.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one for each request, taken apart at once")]
pub enum Begun<'o, 'a> {
    /// Its job.
    Job(Job<'a>),
    /// Something has to be done first.
    Pending(Pending<'o, 'a>),
}

/// A prompt that is too large to be read or rendered in one go.
#[derive(Debug)]
pub struct Pending<'o, 'a> {
    pub(super) opening: Opening<'o, 'a>,
    pub(super) raw: &'a str,
    pub(super) strides: Strides,
    pub(super) stage: Stage<'a>,
    pub(super) unknown: bool,
}

#[derive(Debug)]
pub(super) enum Stage<'a> {
    Read(Copying<'a>),
    Render { growing: Growing, special: bool },
}

/// A glimpse of a large prompt: a job over the text that it begins with.
#[derive(Debug)]
pub struct Glimpse<'a> {
    /// Its keys.
    pub job: Job<'a>,
    /// Its text is sure to be the begin of the prompt's. Else only "nobody holds it" is to be believed.
    pub certain: bool,
    /// Bytes of the prompt's source for each byte of it, for an estimate of its tokens.
    pub part: f64,
}

impl<'a> Pending<'_, 'a> {
    /// The begin of the prompt, where nothing of it is remembered: if nobody holds it, the rest need not be read.
    pub fn glimpse(&self) -> Option<Glimpse<'a>> {
        if !self.unknown || self.opening.view.truncate_prompt_tokens.is_some() {
            return None;
        }
        let Opening { api, view, model, rendering, keying, .. } = self.opening;
        let (text, certain) = glimpse::text(api, view, self.raw, model, rendering)?;
        let special = match api {
            Api::ChatCompletions => body::flag(view.add_special_tokens, false)?,
            _ => body::flag(view.add_special_tokens, true)?,
        };
        let mut opening = Opening::new(api, view, model, rendering, keying).ok()?;
        opening.surround(special).ok()?;
        let part = self.raw.len() as f64 / text.len() as f64;
        let source = PromptSource::Text { text: Cow::Owned(text), special: false, whole: false };
        let opened = opening.open_surrounded(source, &mut PrefixCache::new(0)).ok()?;
        let mut job = opening.job(opened).ok()?;
        // It is no prompt of its own, to be found again.
        job.strides.clear();
        job.is_chat = false;
        Some(Glimpse { job, certain, part })
    }

    /// Bytes of memory that [`Pending::step`] copies to; 0 where it copies nothing.
    #[must_use]
    pub fn copied_bytes(&self) -> usize {
        if matches!(self.stage, Stage::Read(_)) { self.opening.view.body.len() } else { 0 }
    }

    /// Memory to copy to, instead of fresh one. Before the first step.
    pub fn lend(&mut self, memory: Vec<u8>) {
        if let Stage::Read(copying) = &mut self.stage {
            copying.lend(memory);
        }
    }

    /// Does a slice of what must be done here before the task; whether all is done.
    pub fn step(&mut self) -> bool {
        match &mut self.stage {
            Stage::Read(copying) => copying.step(),
            Stage::Render { .. } => true,
        }
    }

    /// What is to be done elsewhere.
    pub fn task(&mut self) -> Task {
        let Opening { api, view, model, rendering, .. } = self.opening;
        match &mut self.stage {
            Stage::Read(copying) => std::mem::take(copying).task(api, model, &rendering),
            Stage::Render { growing, .. } => {
                let messages = growing.memory.messages.clone();
                Task::render(model, &rendering, messages, &growing.frame, view.tools.is_some())
            }
        }
    }

    /// The job, once the task is done.
    ///
    /// # Errors
    /// The reason why the prompt cannot be keyed.
    pub fn finish(self, prepared: Prepared, cache: &mut PrefixCache) -> Result<Job<'a>, MissReason> {
        let Pending { mut opening, strides, stage, .. } = self;
        let Opening { view, model, rendering, .. } = opening;
        let opened = match (prepared.made, stage) {
            (Made::Text { text, special, whole, truncation }, _) => {
                opening.truncation = truncation;
                let mut nothing = PrefixCache::new(0);
                let cache = if text.len() > REMEMBERED_BYTES_MAX { &mut nothing } else { cache };
                opening.open(PromptSource::Text { text: Cow::Owned(text), special, whole }, cache)?
            }
            (Made::Chat { raw, messages, frame, text }, _) => {
                let special = body::flag(view.add_special_tokens, false).ok_or(MissReason::Tokenize)?;
                let mut memory = Box::new(Memory::new(opening.context("chat"), opening.start()?));
                memory.raw = raw;
                memory.messages = messages;
                memory.frame = Some(frame);
                memory.text = text;
                let strides = match memory.raw.len() {
                    0..=REMEMBERED_BYTES_MAX => prefix_cache::strides(&memory.context, memory.raw.as_bytes()),
                    _ => Strides::new(),
                };
                let memory = recall::made(cache, memory, &strides, model.tokenizer());
                Opened::of_text(memory, strides, special)?
            }
            (Made::Rendered(text), Stage::Render { growing, special }) => {
                let template = model.template(rendering.template, view.tools.is_some(), rendering.engine)?;
                Opened::of_text(growing.finish(cache, text, model, template), strides, special)?
            }
            (Made::Rendered(_), Stage::Read(_)) => return Err(MissReason::Tokenize),
        };
        opening.job(opened)
    }
}
