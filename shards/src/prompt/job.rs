//! The keys of one prompt, made in slices.
//!
//! **Invariant.** A slice is bounded by [`SLICE_BYTES`] of text wherever the tokenizer has a proved cut; the keys are
//! those of the whole prompt. A job may be dropped between any two slices.

use std::borrow::Cow;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use tokenizers::pipeline::PipelineToken;

use super::body::{self, BodyView};
use super::model::Model;
use super::{Api, chat, json};
use crate::block::{Chain, HashAlgo, KeyStream, NoneHash};
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
    chain: Chain,
    block_tokens: usize,
    /// Tokens that do not fill a block yet.
    pending: Vec<u32>,
    scratch: Vec<PipelineToken>,
    keys: Vec<BlockKey>,
    taken: usize,
    /// Streams beside the job's own that are fed the same tokens.
    others: Vec<Other>,
    tokens: u64,
    bytes_done: u64,
}

/// A further stream of keys and what it made since it was last asked.
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
    Text {
        text: Cow<'a, str>,
        at: usize,
        special: bool,
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

impl<'a> Job<'a> {
    /// Begins with a body. A chat is rendered here, in one go.
    ///
    /// # Errors
    /// The reason why the prompt cannot be keyed.
    pub fn new(
        api: Api,
        body: &'a [u8],
        model: &Arc<Model>,
        template: Option<&Arc<str>>,
        algo: HashAlgo,
        none_hash: &NoneHash,
        block_tokens: u32,
    ) -> Result<Self, MissReason> {
        let view = BodyView::parse(body).ok_or(MissReason::Tokenize)?;
        Job::of_view(api, &view, model, template, algo, none_hash, block_tokens)
    }

    /// Begins with a body that is viewed already.
    ///
    /// # Errors
    /// The reason why the prompt cannot be keyed.
    pub fn of_view(
        api: Api,
        view: &BodyView<'a>,
        model: &Arc<Model>,
        template: Option<&Arc<str>>,
        algo: HashAlgo,
        none_hash: &NoneHash,
        block_tokens: u32,
    ) -> Result<Self, MissReason> {
        if let Some(member) = view.unkeyable {
            tracing::debug!(member, "a request is routed without keys");
            return Err(MissReason::Tokenize);
        }
        let source = match api {
            Api::Completions => completion(view)?,
            Api::ChatCompletions => chat_text(view, model, template)?,
        };
        let special = matches!(source, Source::Text { special: true, .. });
        let block_tokens = usize::try_from(block_tokens).ok().filter(|&n| n > 0).ok_or(MissReason::Hashes)?;
        let pending: Vec<u32> = if special { model.tokenizer().prefix().collect() } else { Vec::new() };
        let empty = match &source {
            Source::Text { text, .. } => text.is_empty() && pending.is_empty(),
            Source::Ids(rest) => rest.trim_start().starts_with(']'),
            Source::Done => true,
        };
        if empty {
            return Err(MissReason::TextEmpty);
        }
        Ok(Job {
            model: Arc::clone(model),
            source,
            chain: Chain::new(algo, none_hash),
            block_tokens,
            tokens: pending.len() as u64,
            pending,
            scratch: Vec::new(),
            keys: Vec::new(),
            taken: 0,
            others: Vec::new(),
            bytes_done: 0,
        })
    }

    /// Makes the keys of another stream too, from the first token on; to be asked for before the first step. Its
    /// keys come from [`take_other_keys`](Job::take_other_keys), the streams counted in this order.
    pub fn also(&mut self, stream: KeyStream) {
        let mut other = Other { stream, keys: Vec::new() };
        other.feed(&self.pending);
        self.others.push(other);
    }

    /// Keys that a stream beside the job's own made since the last call, appended to `keys`.
    pub fn take_other_keys(&mut self, stream: usize, keys: &mut Vec<BlockKey>) {
        keys.append(&mut self.others[stream].keys);
    }

    /// Does one slice (well under 1 ms of work, see [`SLICE_BYTES`]).
    ///
    /// # Errors
    /// The reason why the prompt cannot be keyed after all.
    pub fn step(&mut self) -> Result<Step, MissReason> {
        let before = self.pending.len();
        match &mut self.source {
            Source::Done => return Ok(Step::Done),
            Source::Text { text, at, special } => {
                let tokenizer = self.model.tokenizer();
                let rest = &text[*at..];
                let length = tokenizer.piece(rest, SLICE_BYTES);
                let piece = &rest[..length];
                tokenizer.encode(piece, &mut self.scratch, &mut self.pending).map_err(|error| {
                    tracing::debug!(%error, "a prompt is routed without keys");
                    MissReason::Tokenize
                })?;
                *at += length;
                self.bytes_done += length as u64;
                if *at == text.len() {
                    if *special {
                        self.pending.extend(tokenizer.suffix());
                    }
                    self.source = Source::Done;
                }
            }
            Source::Ids(rest) => {
                let left = read_ids(rest, &mut self.pending)?;
                self.bytes_done += (rest.len() - left.unwrap_or_default().len()) as u64;
                self.source = left.map_or(Source::Done, Source::Ids);
            }
        }
        self.tokens += (self.pending.len() - before) as u64;
        for other in &mut self.others {
            other.feed(&self.pending[before..]);
        }
        self.hash_full_blocks();
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

    /// All keys made so far, given away: the job is over.
    pub fn give_keys(&mut self) -> Vec<BlockKey> {
        self.taken = 0;
        std::mem::take(&mut self.keys)
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

    fn hash_full_blocks(&mut self) {
        let full = self.pending.len() / self.block_tokens * self.block_tokens;
        for block in self.pending[..full].chunks_exact(self.block_tokens) {
            self.keys.push(self.chain.push(block));
        }
        self.pending.drain(..full);
    }
}

/// The prompt of a completion: text, ids, or the first of several.
fn completion<'a>(view: &BodyView<'a>) -> Result<Source<'a>, MissReason> {
    let special = body::flag(view.add_special_tokens, true).ok_or(MissReason::Tokenize)?;
    let prompt = view.prompt.ok_or(MissReason::TextEmpty)?;
    let text = |raw: &'a str| {
        let text = json::leading_string(raw).map_err(|_| MissReason::Tokenize)?;
        Ok(Source::Text { text, at: 0, special })
    };
    match prompt.as_bytes().first() {
        Some(b'"') => text(prompt),
        Some(b'[') => {
            let inside = prompt[1..].trim_start();
            match inside.as_bytes().first() {
                Some(b'"') => text(inside),
                Some(b'[') => Ok(Source::Ids(&inside[1..])),
                _ => Ok(Source::Ids(inside)),
            }
        }
        _ => Err(MissReason::Tokenize),
    }
}

fn chat_text<'a>(view: &BodyView<'a>, model: &Model, rule: Option<&Arc<str>>) -> Result<Source<'a>, MissReason> {
    let special = body::flag(view.add_special_tokens, false).ok_or(MissReason::Tokenize)?;
    if view.messages.is_none() {
        return Err(MissReason::TextEmpty);
    }
    let template = model.template(rule, view.tools.is_some())?;
    // The renderer is not ours: whatever a conversation makes it do must stay a reason.
    let rendered = std::panic::catch_unwind(AssertUnwindSafe(|| chat::render(view, template)));
    let text = Cow::Owned(rendered.unwrap_or(Err(MissReason::Template))?);
    Ok(Source::Text { text, at: 0, special })
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
