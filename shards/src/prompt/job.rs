//! The keys of one prompt, made in slices.
//!
//! **Invariant.** A slice is bounded by [`SLICE_BYTES`] of text wherever the tokenizer has a proved cut; the keys are
//! those of the whole prompt. A job may be dropped between any two slices.

use std::borrow::Cow;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokenizers::pipeline::PipelineToken;

use super::body::{self, BodyView};
use super::memory::{Context, Mark, Memory, Start};
use super::model::Model;
use super::prefix_cache::{PrefixCache, Strides};
use super::recall::{self, Chat};
use super::tokenizer::PieceLengths;
use super::{Api, json};
use crate::block::{Contract, ContractError, KeyStream, Lora, PromptExtras};
use crate::ids::BlockKey;
use crate::service::MissReason;

/// Text of one slice, bytes: under 1 ms even for texts that tokenize slowly (9 MB/s). Where the tokenizer has no
/// proved cut in so many bytes the keys end.
pub const SLICE_BYTES: usize = 8 * 1024;
/// Time after which a slice ends at the next mark: some texts tokenize ten times slower than others.
const SLICE_TIME: Duration = Duration::from_micros(300);
/// Token ids read from a list in one slice.
const SLICE_IDS: usize = 4096;
/// Bytes per token assumed until the first slice has shown better.
const BYTES_PER_TOKEN_ASSUMED: u64 = 4;

/// Bytes of text that should lie between two marks, where there are cuts.
const MARK_BYTES: usize = 1024;
/// The same near the end of the text, where the next turn is likely to part from it.
const MARK_BYTES_LAST: usize = 48;
/// What counts as near.
const LAST_BYTES: usize = 4096;
/// Piece of text without a special token, after which a cut of another kind is taken.
const PLAIN_BYTES: usize = 2048;
/// Remembered keys shown in one slice.
const SLICE_KEYS: usize = 4096;

/// The keys of one prompt, made in slices. Borrows the request's body.
#[derive(Debug)]
pub struct Job<'a> {
    model: Arc<Model>,
    memory: Box<Memory>,
    strides: Strides,
    source: Source<'a>,
    /// What the request says beyond its tokens.
    extras: PromptExtras,
    stream: KeyStream,
    /// Streams beside the job's own that are fed the same tokens.
    others: Vec<Other>,
    /// The tokens of one piece.
    piece: Vec<u32>,
    scratch: Vec<PipelineToken>,
    /// Keys that were taken, and that may be.
    taken: usize,
    offered: usize,
    tokens: u64,
    bytes_done: u64,
}

/// A stream of keys under another contract, from the same tokens.
#[derive(Debug)]
struct Other {
    stream: KeyStream,
    keys: Vec<BlockKey>,
}

impl Other {
    fn feed(&mut self, mut tokens: &[u32]) {
        self.keys.extend(std::iter::from_fn(|| self.stream.next_key(&mut tokens)));
    }
}

/// What is still to be done.
#[derive(Debug)]
enum Source<'a> {
    /// The memory's text.
    Text {
        at: usize,
        special: bool,
    },
    /// The rest of a JSON list of ids, after its bracket.
    Ids(&'a str),
    /// Nothing, but so many bytes have no keys, since nobody can tell cheaply where their tokens end.
    Unbroken {
        bytes: usize,
    },
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
    /// Begins with a body, and remembers nothing.
    ///
    /// # Errors
    /// The reason why the prompt cannot be keyed.
    pub fn new(
        api: Api,
        body: &'a [u8],
        model: &Arc<Model>,
        template: Option<&Arc<str>>,
        keying: Keying<'_>,
    ) -> Result<Self, MissReason> {
        let view = BodyView::parse(body).ok_or(MissReason::Tokenize)?;
        Job::of_view(api, &view, model, template, keying, &mut PrefixCache::new(0))
    }

    /// Begins with a body that is viewed already. A chat is rendered here, in one go, as far as the cache does not
    /// know its text.
    ///
    /// # Errors
    /// The reason why the prompt cannot be keyed.
    pub fn of_view(
        api: Api,
        view: &BodyView<'a>,
        model: &Arc<Model>,
        template: Option<&Arc<str>>,
        keying: Keying<'_>,
        cache: &mut PrefixCache,
    ) -> Result<Self, MissReason> {
        if let Some(member) = view.unkeyable {
            tracing::debug!(member, "a request is routed without keys");
            return Err(MissReason::Tokenize);
        }
        let (prompt, special) = match api {
            Api::Completions => (completion(view)?, body::flag(view.add_special_tokens, true)),
            Api::ChatCompletions => {
                (Prompt::Chat(view.messages.ok_or(MissReason::TextEmpty)?), body::flag(view.add_special_tokens, false))
            }
        };
        let special = special.ok_or(MissReason::Tokenize)? && !matches!(prompt, Prompt::Ids(_));
        let block_tokens = NonZeroU32::new(keying.block_tokens).ok_or(MissReason::Hashes)?;
        let start = start(view, model, &keying, block_tokens, special)?;
        let lora = keying.lora.map(|lora| format!("{lora:?}"));
        let mut members = view.members().to_vec();
        members.push(lora.as_deref());
        members.push(Some(if special { "special" } else { "plain" }));
        let context = Context::new(model, template, keying.contract, block_tokens, &members);
        let (memory, strides) = match &prompt {
            Prompt::Ids(_) => (Box::new(Memory::new(context, start)), Strides::new()),
            Prompt::Text(text) => recall::text(cache, context, start, text, model.tokenizer()),
            Prompt::Chat(raw) => {
                let template = model.template(template, view.tools.is_some())?;
                recall::chat(cache, context, start, Chat { raw, view, model, template })?
            }
        };
        let mark = memory.marks.last().cloned().ok_or(MissReason::Hashes)?;
        let source = match prompt {
            Prompt::Ids(rest) if rest.trim_start().starts_with(']') => return Err(MissReason::TextEmpty),
            Prompt::Ids(rest) => Source::Ids(rest),
            _ if memory.text.is_empty() && mark.tokens == 0 => return Err(MissReason::TextEmpty),
            _ => Source::Text { at: mark.at, special },
        };
        Ok(Job {
            model: Arc::clone(model),
            memory,
            strides,
            source,
            extras: extras(view, keying.lora)?,
            stream: mark.stream,
            others: Vec::new(),
            piece: Vec::new(),
            scratch: Vec::new(),
            taken: 0,
            offered: 0,
            tokens: mark.tokens,
            bytes_done: mark.at as u64,
        })
    }

    /// Makes the keys of another contract too. Only for a job that began without a cache and before its first slice:
    /// tokens that were remembered cannot be shown to another stream.
    ///
    /// # Errors
    /// What the contract cannot key of this request.
    pub fn also(&mut self, contract: &Contract, block_tokens: NonZeroU32) -> Result<(), ContractError> {
        debug_assert_eq!(self.bytes_done, 0, "other streams see every token");
        let stream = KeyStream::new(contract, &self.extras, block_tokens)?;
        let mut other = Other { stream, keys: Vec::new() };
        if matches!(self.source, Source::Text { special: true, .. }) {
            other.feed(&self.model.tokenizer().prefix().collect::<Vec<_>>());
        }
        self.others.push(other);
        Ok(())
    }

    /// Appends the keys made since the last call by the n-th stream that [`Job::also`] added.
    pub fn take_other_keys(&mut self, stream: usize, keys: &mut Vec<BlockKey>) {
        keys.append(&mut self.others[stream].keys);
    }

    /// Does one slice (well under 1 ms of work, see [`SLICE_BYTES`]).
    ///
    /// # Errors
    /// The reason why the prompt cannot be keyed after all.
    pub fn step(&mut self) -> Result<Step, MissReason> {
        if self.offered < self.memory.keys.len() {
            self.offered = self.memory.keys.len().min(self.offered + SLICE_KEYS);
            return Ok(Step::More);
        }
        match self.source {
            Source::Done | Source::Unbroken { .. } => return Ok(Step::Done),
            Source::Text { at, special } => self.text_slice(at, special)?,
            Source::Ids(rest) => {
                let left = read_ids(rest, &mut self.piece)?;
                self.bytes_done += (rest.len() - left.unwrap_or_default().len()) as u64;
                self.source = left.map_or(Source::Done, Source::Ids);
                self.hash_piece();
            }
        }
        self.offered = self.memory.keys.len();
        Ok(if matches!(self.source, Source::Done | Source::Unbroken { .. }) { Step::Done } else { Step::More })
    }

    /// Keys made since the last call.
    pub fn take_keys(&mut self) -> &[BlockKey] {
        let from = std::mem::replace(&mut self.taken, self.offered);
        &self.memory.keys[from..self.offered]
    }

    /// All keys made so far, from block 0, those remembered included.
    #[must_use]
    pub fn keys(&self) -> &[BlockKey] {
        &self.memory.keys
    }

    /// Tokens of the prompt: exact once done, else an estimate from bytes left.
    #[must_use]
    pub fn prompt_tokens(&self) -> u64 {
        let left = match &self.source {
            Source::Text { at, .. } => self.memory.text.len() - at,
            Source::Ids(rest) => rest.len(),
            Source::Unbroken { bytes } => *bytes,
            Source::Done => return self.tokens,
        } as u64;
        if self.bytes_done == 0 {
            return self.tokens + left / BYTES_PER_TOKEN_ASSUMED;
        }
        self.tokens + left.saturating_mul(self.tokens) / self.bytes_done
    }

    /// Ends the work and lets the cache remember what was done, finished or not.
    pub fn remember(self, cache: &mut PrefixCache) {
        if let Source::Unbroken { bytes } = self.source {
            cache.note_unbroken(bytes);
        }
        if !self.strides.is_empty() {
            cache.put(self.memory, self.strides);
        }
    }

    fn text_slice(&mut self, from: usize, special: bool) -> Result<(), MissReason> {
        let model = Arc::clone(&self.model);
        let tokenizer = model.tokenizer();
        let mut at = from;
        let start = Instant::now();
        while at < self.memory.text.len()
            && at - from + PLAIN_BYTES <= SLICE_BYTES
            && (at == from || start.elapsed() < SLICE_TIME)
        {
            let Some(end) = tokenizer.mark_after(&self.memory.text, at, PIECE) else {
                self.source = Source::Unbroken { bytes: self.memory.text.len() - at };
                return Ok(());
            };
            let piece = &self.memory.text[at..end];
            tokenizer.encode(piece, &mut self.scratch, &mut self.piece).map_err(|error| {
                tracing::debug!(%error, "a prompt is routed without keys");
                MissReason::Tokenize
            })?;
            self.hash_piece();
            self.bytes_done += (end - at) as u64;
            at = end;
            if at < self.memory.text.len() {
                let keys = self.memory.keys.len();
                self.memory.marks.push(Mark { at, tokens: self.tokens, keys, stream: self.stream.clone() });
            }
        }
        self.source = Source::Text { at, special };
        if at == self.memory.text.len() {
            if special {
                self.piece.extend(tokenizer.suffix());
                self.hash_piece();
            }
            self.source = Source::Done;
        }
        Ok(())
    }

    fn hash_piece(&mut self) {
        self.tokens += self.piece.len() as u64;
        let mut tokens = &self.piece[..];
        while let Some(key) = self.stream.next_key(&mut tokens) {
            self.memory.keys.push(key);
        }
        for other in &mut self.others {
            other.feed(&self.piece);
        }
        self.piece.clear();
    }
}

/// Lengths of pieces between marks.
const PIECE: PieceLengths = PieceLengths {
    token: MARK_BYTES,
    token_last: MARK_BYTES_LAST,
    last: LAST_BYTES,
    plain: PLAIN_BYTES,
    max: SLICE_BYTES,
};

/// Where a prompt comes from.
enum Prompt<'a> {
    Text(Cow<'a, str>),
    /// A JSON list of ids, after its bracket.
    Ids(&'a str),
    /// The messages.
    Chat(&'a str),
}

/// The state before the first byte of a text.
fn start(
    view: &BodyView<'_>,
    model: &Model,
    keying: &Keying<'_>,
    block_tokens: NonZeroU32,
    special: bool,
) -> Result<Start, MissReason> {
    let extras = extras(view, keying.lora)?;
    let mut stream = KeyStream::new(keying.contract, &extras, block_tokens).map_err(|error| {
        tracing::debug!(%error, "a request is routed without keys");
        MissReason::Extras
    })?;
    let prefix: Vec<u32> = if special { model.tokenizer().prefix().collect() } else { Vec::new() };
    let mut rest = &prefix[..];
    let keys: Vec<BlockKey> = std::iter::from_fn(|| stream.next_key(&mut rest)).collect();
    Ok(Start { mark: Mark { at: 0, tokens: prefix.len() as u64, keys: keys.len(), stream }, keys })
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

/// The prompt of a completion: text, ids, or the first of several.
fn completion<'a>(view: &BodyView<'a>) -> Result<Prompt<'a>, MissReason> {
    let prompt = view.prompt.ok_or(MissReason::TextEmpty)?;
    let text = |raw: &'a str| json::leading_string(raw).map(Prompt::Text).map_err(MissReason::from);
    match prompt.as_bytes().first() {
        Some(b'"') => text(prompt),
        Some(b'[') => {
            let inside = prompt[1..].trim_start();
            match inside.as_bytes().first() {
                Some(b'"') => text(inside),
                Some(b'[') => Ok(Prompt::Ids(&inside[1..])),
                _ => Ok(Prompt::Ids(inside)),
            }
        }
        _ => Err(MissReason::Tokenize),
    }
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
