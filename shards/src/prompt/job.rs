//! The keys of one prompt, made in slices.
//!
//! **Invariant.** A slice is bounded by [`SLICE_BYTES`] of text wherever the tokenizer has a proved cut; the keys are
//! those of the whole prompt. A job may be dropped between any two slices.

use std::borrow::Cow;
use std::num::NonZeroU32;
use std::sync::Arc;

use tokenizers::pipeline::PipelineToken;

use super::body::BodyView;
use super::model::Model;
use super::request::{Prompt, Rendering, Source as PromptSource, Truncation};
use super::{Api, json};
use crate::block::{Contract, KeyStream, Lora, PromptExtras};
use crate::ids::BlockKey;
use crate::service::MissReason;

/// Text of one slice, bytes: well under 1 ms even for scripts that tokenize slowly (15 MB/s). Where the tokenizer has
/// no proved cut the piece, and with it the slice, is as long as it must be.
pub const SLICE_BYTES: usize = 8 * 1024;
/// Token ids read from a list in one slice.
const SLICE_IDS: usize = 4096;
/// Bytes per token assumed until the first slice has shown better.
const BYTES_PER_TOKEN_ASSUMED: u64 = 4;

/// The keys of one prompt, made in slices. Borrows the request's body.
#[derive(Debug)]
pub struct Job<'a> {
    model: Arc<Model>,
    source: Source<'a>,
    stream: KeyStream,
    /// What of the tokens the engine keeps.
    truncation: Option<Truncation>,
    /// The tokens of one slice; all of them while it is open which ones are kept.
    slice: Vec<u32>,
    scratch: Vec<PipelineToken>,
    keys: Vec<BlockKey>,
    taken: usize,
    tokens: u64,
    bytes_done: u64,
}

/// What is still to be done.
#[derive(Debug)]
enum Source<'a> {
    Text {
        text: Cow<'a, str>,
        at: usize,
        /// Special tokens go behind it.
        suffix: bool,
    },
    /// The rest of a JSON list of ids, after its bracket.
    Ids(&'a str),
    Done,
}

/// What one slice brought.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Work goes on: nothing new to look up yet, or the next keys.
    More,
    /// All keys are made.
    Done,
}

/// How the keys of a prompt are made.
#[derive(Clone, Copy, Debug)]
pub struct Keying<'a> {
    /// The engines' contract.
    pub contract: &'a Contract,
    /// Tokens per block.
    pub block_tokens: u32,
    /// The adapter that the request is served with.
    pub lora: Option<&'a Lora>,
}

impl<'a> Job<'a> {
    /// Begins with a body. A chat is rendered here, in one go.
    ///
    /// # Errors
    /// The reason why the prompt cannot be keyed.
    pub fn new(
        api: Api,
        body: &'a [u8],
        model: &Arc<Model>,
        rendering: Rendering<'_>,
        keying: Keying<'_>,
    ) -> Result<Self, MissReason> {
        let view = BodyView::parse(body).ok_or(MissReason::Tokenize)?;
        Job::of_view(api, &view, model, rendering, keying)
    }

    /// Begins with a body that is viewed already.
    ///
    /// # Errors
    /// The reason why the prompt cannot be keyed.
    pub fn of_view(
        api: Api,
        view: &BodyView<'a>,
        model: &Arc<Model>,
        rendering: Rendering<'_>,
        keying: Keying<'_>,
    ) -> Result<Self, MissReason> {
        let Prompt { source, truncation } = Prompt::of(api, view, model, rendering)?;
        let mut slice = Vec::new();
        let source = match source {
            PromptSource::Ids(list) => Source::Ids(list),
            PromptSource::Text { text, special, whole } => {
                if special {
                    slice = model.prefix(rendering.add_bos);
                }
                Source::Text { text, at: 0, suffix: special && whole }
            }
        };
        // Which of the special tokens are cut away is the engine's affair.
        if truncation.is_some() && !slice.is_empty() {
            return Err(MissReason::Tokenize);
        }
        let empty = match &source {
            Source::Text { text, .. } => text.is_empty() && slice.is_empty(),
            Source::Ids(rest) => rest.trim_start().starts_with(']'),
            Source::Done => true,
        };
        if empty {
            return Err(MissReason::TextEmpty);
        }
        let block_tokens = NonZeroU32::new(keying.block_tokens).ok_or(MissReason::Hashes)?;
        let stream = KeyStream::new(keying.contract, &extras(view, keying.lora)?, block_tokens).map_err(|error| {
            tracing::debug!(%error, "a request is routed without keys");
            MissReason::Extras
        })?;
        Ok(Job {
            model: Arc::clone(model),
            source,
            stream,
            truncation,
            tokens: slice.len() as u64,
            slice,
            scratch: Vec::new(),
            keys: Vec::new(),
            taken: 0,
            bytes_done: 0,
        })
    }

    /// Does one slice (well under 1 ms of work, see [`SLICE_BYTES`]).
    ///
    /// # Errors
    /// The reason why the prompt cannot be keyed after all.
    pub fn step(&mut self) -> Result<Step, MissReason> {
        let before = self.slice.len();
        match &mut self.source {
            Source::Done => return Ok(Step::Done),
            Source::Text { text, at, suffix } => {
                let tokenizer = self.model.tokenizer();
                let rest = &text[*at..];
                let length = tokenizer.piece(rest, SLICE_BYTES);
                let piece = &rest[..length];
                tokenizer.encode(piece, &mut self.scratch, &mut self.slice).map_err(|error| {
                    tracing::debug!(%error, "a prompt is routed without keys");
                    MissReason::Tokenize
                })?;
                *at += length;
                self.bytes_done += length as u64;
                if *at == text.len() {
                    if *suffix {
                        self.slice.extend(tokenizer.suffix());
                    }
                    self.source = Source::Done;
                }
            }
            Source::Ids(rest) => {
                let left = read_ids(rest, &mut self.slice)?;
                self.bytes_done += (rest.len() - left.unwrap_or_default().len()) as u64;
                self.source = left.map_or(Source::Done, Source::Ids);
            }
        }
        self.tokens += (self.slice.len() - before) as u64;
        self.truncate();
        self.hash_slice();
        Ok(if matches!(self.source, Source::Done) { Step::Done } else { Step::More })
    }

    /// Keys made since the last call.
    pub fn take_keys(&mut self) -> &[BlockKey] {
        let from = std::mem::replace(&mut self.taken, self.keys.len());
        &self.keys[from..]
    }

    /// All keys made so far, from block 0.
    #[must_use]
    pub fn keys(&self) -> &[BlockKey] {
        &self.keys
    }

    /// Tokens of the prompt: exact once done, else an estimate from bytes left.
    #[must_use]
    pub fn prompt_tokens(&self) -> u64 {
        let left = match &self.source {
            Source::Text { text, at, .. } => text.len() - at,
            Source::Ids(rest) => rest.len(),
            Source::Done => return self.tokens,
        } as u64;
        if self.bytes_done == 0 {
            return self.tokens + left / BYTES_PER_TOKEN_ASSUMED;
        }
        self.tokens + left.saturating_mul(self.tokens) / self.bytes_done
    }

    /// Takes away what the engine cuts off, as soon as that is known.
    fn truncate(&mut self) {
        let here = self.slice.len();
        match self.truncation {
            Some(Truncation::First(kept)) if self.tokens > kept as u64 => {
                let over = usize::try_from(self.tokens - kept as u64).unwrap_or(here);
                self.slice.truncate(here.saturating_sub(over));
                self.tokens = kept as u64;
                self.source = Source::Done;
            }
            Some(Truncation::Last(kept)) if matches!(self.source, Source::Done) => {
                self.slice.drain(..here.saturating_sub(kept));
                self.tokens = self.slice.len() as u64;
                self.truncation = None;
            }
            _ => {}
        }
    }

    fn hash_slice(&mut self) {
        if matches!(self.truncation, Some(Truncation::Last(_))) {
            return;
        }
        let mut tokens = &self.slice[..];
        while let Some(key) = self.stream.next_key(&mut tokens) {
            self.keys.push(key);
        }
        self.slice.clear();
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

/// Reads ids of a JSON list up to the slice's limit; the rest, or none when the list is over.
fn read_ids<'a>(list: &'a str, ids: &mut Vec<u32>) -> Result<Option<&'a str>, MissReason> {
    let mut rest = list;
    for _ in 0..SLICE_IDS {
        rest = rest.trim_start();
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        ids.push(rest[..digits].parse().map_err(|_| MissReason::Tokenize)?);
        rest = rest[digits..].trim_start();
        match rest.as_bytes().first() {
            Some(b',') => rest = &rest[1..],
            Some(b']') => return Ok(None),
            _ => return Err(MissReason::Tokenize),
        }
    }
    Ok(Some(rest))
}

#[cfg(test)]
#[path = "job_tests.rs"]
mod tests;
