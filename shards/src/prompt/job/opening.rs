//! From a viewed body to the job that its prompt begins with: what is remembered of the prompt, and what is too large to
//! be read in place.

use std::num::NonZeroU32;
use std::sync::Arc;

use super::pending::{Begun, Pending, Stage};
use super::{CutOff, Job, Keying, Source};
use crate::block::{KeyStream, Lora, PromptExtras};
use crate::ids::BlockKey;
use crate::prompt::body::BodyView;
use crate::prompt::large::{self, Copying, IN_PLACE_BYTES, REMEMBERED_BYTES_MAX};
use crate::prompt::memory::{Context, Mark, Memory, Start};
use crate::prompt::model::Model;
use crate::prompt::prefix_cache::{self, PrefixCache, Strides};
use crate::prompt::recall::{self, Chat, Recalled};
use crate::prompt::request::{self, Rendering, Source as PromptSource, Truncation};
use crate::prompt::template::Template;
use crate::prompt::{Api, json};
use crate::service::{Engine, MissReason};

/// Begin of a large prompt by which it is known or not.
const KNOWN_BEGIN_BYTES: usize = 32 * 1024;
/// What two prompts may share by chance.
const KNOWN_BYTES_MIN: usize = 1024;

/// A prompt on the way to its job.
#[derive(Debug)]
pub(super) struct Opening<'o, 'a> {
    pub(super) api: Api,
    pub(super) view: &'o BodyView<'a>,
    pub(super) model: &'o Arc<Model>,
    pub(super) rendering: Rendering<'o>,
    pub(super) keying: Keying<'o>,
    block_tokens: NonZeroU32,
    extras: PromptExtras,
    /// Tokens before the text.
    prefix: Vec<u32>,
    /// Special tokens go around the text.
    special: bool,
    pub(super) truncation: Option<Truncation>,
}

/// What a job begins with.
pub(super) struct Opened<'a> {
    memory: Box<Memory>,
    strides: Strides,
    source: Source<'a>,
}

impl<'o, 'a> Opening<'o, 'a> {
    pub(super) fn new(
        api: Api,
        view: &'o BodyView<'a>,
        model: &'o Arc<Model>,
        rendering: Rendering<'o>,
        keying: Keying<'o>,
    ) -> Result<Self, MissReason> {
        let block_tokens = NonZeroU32::new(keying.block_tokens).ok_or(MissReason::Hashes)?;
        let extras = extras(view, keying.lora)?;
        let (prefix, special, truncation) = (Vec::new(), false, None);
        Ok(Opening { api, view, model, rendering, keying, block_tokens, extras, prefix, special, truncation })
    }

    /// Puts special tokens before the text, or not.
    pub(super) fn surround(&mut self, special: bool) -> Result<(), MissReason> {
        self.special = special;
        if special {
            self.prefix = self.model.prefix(self.rendering.add_bos);
        }
        // Which of the special tokens are cut away is the engine's affair.
        if self.truncation.is_some() && !self.prefix.is_empty() { Err(MissReason::Tokenize) } else { Ok(()) }
    }

    /// Whether the prompt takes too long to be read in one go.
    pub(super) fn is_large(&self, raw: &str) -> bool {
        match self.api {
            Api::Completions | Api::Generate => large::is_large_text(raw),
            _ => large::is_large(raw, self.objects_in_place()) || self.has_large_members(),
        }
    }

    /// Objects of a chat that are rendered in place.
    fn objects_in_place(&self) -> usize {
        let Rendering { template, engine, .. } = self.rendering;
        // Where there is no template there is nothing to render.
        self.model.template(template, self.view.tools.is_some(), engine).map_or(usize::MAX, Template::messages_in_place)
    }

    fn has_large_members(&self) -> bool {
        let beside = self.view.members().into_iter().chain([self.view.system, self.view.instructions]);
        beside.flatten().map(str::len).sum::<usize>() > IN_PLACE_BYTES
    }

    /// Whether a large prompt is read and rendered as a whole, not message by message.
    pub(super) fn is_read_whole(&self) -> bool {
        match self.api {
            Api::ChatCompletions => {
                let engine = self.rendering.engine;
                self.view.truncate_prompt_tokens.is_some()
                    || (engine == Engine::Sglang && self.view.input_ids.is_none())
            }
            _ => true,
        }
    }

    pub(super) fn pending(self, raw: &'a str, strides: Strides, unknown: bool) -> Pending<'o, 'a> {
        let stage = Stage::Read(Copying::new(self.view.body));
        Pending { opening: self, raw, strides, stage, unknown }
    }

    /// A large chat: from what is remembered of it where little is new, else by a task.
    pub(super) fn open_large(
        self,
        raw: &'a str,
        special: bool,
        cache: &mut PrefixCache,
    ) -> Result<Begun<'o, 'a>, MissReason> {
        if raw.len() > REMEMBERED_BYTES_MAX {
            return Ok(Begun::Pending(self.pending(raw, Strides::new(), true)));
        }
        let context = self.context("chat");
        // A prompt that was never seen is not worth a look at all of its bytes.
        let begin = &raw.as_bytes()[..raw.len().min(KNOWN_BEGIN_BYTES)];
        if cache.known(&context, &prefix_cache::strides(&context, begin), begin) < KNOWN_BYTES_MIN {
            return Ok(Begun::Pending(self.pending(raw, Strides::new(), true)));
        }
        let strides = prefix_cache::strides(&context, raw.as_bytes());
        let known = cache.known(&context, &strides, raw.as_bytes());
        // Large members are part of every excerpt.
        let new = &raw[raw.ceil_char_boundary(known)..];
        if known < KNOWN_BYTES_MIN || self.has_large_members() || large::is_large(new, self.objects_in_place()) {
            let unknown = known <= IN_PLACE_BYTES;
            return Ok(Begun::Pending(self.pending(raw, strides, unknown)));
        }
        let Opening { view, model, rendering, .. } = self;
        let template = model.template(rendering.template, view.tools.is_some(), rendering.engine)?;
        let chat = Chat { raw, view, model, template, rendering, large: true };
        match recall::chat(cache, context, self.start()?, &strides, chat) {
            Ok(Recalled::Ready(memory)) => {
                let opened = Opened::of_text(memory, strides, special)?;
                self.job(opened).map(Begun::Job)
            }
            Ok(Recalled::Growing(growing)) => {
                let stage = Stage::Render { growing, special };
                Ok(Begun::Pending(Pending { opening: self, raw, strides, stage, unknown: false }))
            }
            Err(MissReason::Media) => Ok(Begun::Pending(self.pending(raw, strides, false))),
            Err(reason) => Err(reason),
        }
    }

    /// The memory that the prompt begins with. Nothing is remembered of prompts of ids, nor of those that are cut off.
    pub(super) fn open(&mut self, source: PromptSource<'a>, cache: &mut PrefixCache) -> Result<Opened<'a>, MissReason> {
        if let PromptSource::Text { special, .. } | PromptSource::Chat { special, .. } = source {
            self.surround(special)?;
        }
        self.open_surrounded(source, cache)
    }

    pub(super) fn open_surrounded(
        &self,
        source: PromptSource<'a>,
        cache: &mut PrefixCache,
    ) -> Result<Opened<'a>, MissReason> {
        let start = self.start()?;
        match source {
            PromptSource::Ids(rest) if rest.trim_start().starts_with(']') => Err(MissReason::TextEmpty),
            PromptSource::Ids(rest) => {
                let memory = Box::new(Memory::new(self.context("ids"), start));
                Ok(Opened { memory, strides: Strides::new(), source: Source::Ids(rest) })
            }
            PromptSource::Text { text, special, whole } => {
                let is_cut_off = self.truncation.is_some();
                let mut nothing = PrefixCache::new(0);
                let cache = if is_cut_off { &mut nothing } else { cache };
                let (memory, strides) = recall::text(cache, self.context("text"), start, text, self.model.tokenizer());
                let strides = if is_cut_off { Strides::new() } else { strides };
                Opened::of_text(memory, strides, special && whole)
            }
            PromptSource::Chat { raw, special } => {
                let Opening { view, model, rendering, .. } = *self;
                let template = model.template(rendering.template, view.tools.is_some(), rendering.engine)?;
                let chat = Chat { raw, view, model, template, rendering, large: false };
                let context = self.context("chat");
                let strides = prefix_cache::strides(&context, raw.as_bytes());
                match recall::chat(cache, context, start, &strides, chat) {
                    Ok(Recalled::Ready(memory)) => Opened::of_text(memory, strides, special),
                    // Nothing is left to others where nothing is large.
                    Ok(Recalled::Growing(_)) => Err(MissReason::Tokenize),
                    Err(MissReason::Media) => self.open_surrounded(request::whole_chat(view, model, rendering)?, cache),
                    Err(reason) => Err(reason),
                }
            }
        }
    }

    /// The job that begins so.
    pub(super) fn job(self, opened: Opened<'a>) -> Result<Job<'a>, MissReason> {
        let Opened { memory, strides, source } = opened;
        let mark = memory.marks.last().cloned().ok_or(MissReason::Hashes)?;
        Ok(Job {
            model: Arc::clone(self.model),
            is_chat: matches!(self.api, Api::ChatCompletions | Api::Responses | Api::Messages)
                && self.rendering.template.is_none(),
            source,
            memory,
            strides,
            extras: self.extras,
            stream: mark.stream,
            others: Vec::new(),
            prefix: self.prefix,
            special: self.special,
            other_bos: None,
            ids: None,
            cut_off: self.truncation.map(|kept| CutOff { kept, open: Vec::new() }),
            piece: Vec::new(),
            scratch: Vec::new(),
            taken: 0,
            offered: 0,
            tokens: mark.tokens,
            bytes_done: mark.at as u64,
            long_next: false,
        })
    }

    /// The state before the first byte of a text.
    pub(super) fn start(&self) -> Result<Start, MissReason> {
        let mut stream = KeyStream::new(self.keying.contract, &self.extras, self.block_tokens).map_err(|error| {
            tracing::debug!(%error, "a request is routed without keys");
            MissReason::Extras
        })?;
        let mut rest = &self.prefix[..];
        let keys: Vec<BlockKey> = std::iter::from_fn(|| stream.next_key(&mut rest)).collect();
        Ok(Start { mark: Mark { at: 0, tokens: self.prefix.len() as u64, keys: keys.len(), stream }, keys })
    }

    /// What decides over text and keys beside the prompt, for prompts found by their text or by their messages.
    pub(super) fn context(&self, found_by: &str) -> Context {
        let Rendering { engine, template, kwargs, add_bos: _ } = self.rendering;
        let lora = self.keying.lora.map(|lora| format!("{lora:?}"));
        let front_end = format!("{engine:?} {found_by} {:?}", self.prefix);
        let mut members = self.view.members().to_vec();
        members.extend([lora.as_deref(), kwargs, Some(&front_end)]);
        Context::new(self.model, template, self.keying.contract, self.block_tokens, &members)
    }
}

impl Opened<'_> {
    pub(super) fn of_text(memory: Box<Memory>, strides: Strides, suffix: bool) -> Result<Self, MissReason> {
        let mark = memory.marks.last().ok_or(MissReason::Hashes)?;
        if memory.text.is_empty() && mark.tokens == 0 {
            return Err(MissReason::TextEmpty);
        }
        let source = Source::Text { at: mark.at, suffix };
        Ok(Opened { memory, strides, source })
    }
}

/// What the request says beyond its tokens, the adapter included. A text that is empty says nothing.
fn extras(view: &BodyView<'_>, lora: Option<&Lora>) -> Result<PromptExtras, MissReason> {
    let text = |raw: Option<&str>| match raw.map(json::string) {
        None => Ok(None),
        Some(Ok(text)) => Ok(Some(text.into_owned()).filter(|text| !text.is_empty())),
        // A list, one for each of several prompts.
        Some(Err(_)) => Err(MissReason::Extras),
    };
    Ok(PromptExtras {
        lora: lora.cloned(),
        cache_salt: text(view.cache_salt)?,
        extra_key: text(view.extra_key)?,
        ..PromptExtras::default()
    })
}
