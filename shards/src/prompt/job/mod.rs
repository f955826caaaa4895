//! The keys of one prompt, made in slices.
//!
//! **Invariant.** A slice is bounded by [`SLICE_BYTES`] of text wherever the tokenizer has a proved cut; the keys are
//! those of the whole prompt. A job may be dropped between any two slices.

mod ids;
mod opening;
mod pending;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokenizers::pipeline::PipelineToken;

use self::ids::{SLICE_IDS, read_ids};
use self::opening::Opening;
pub use self::pending::{Begun, Glimpse, Pending};
use super::Api;
use super::body::BodyView;
use super::large;
use super::memory::{Mark, Memory};
use super::model::Model;
use super::prefix_cache::{PrefixCache, Strides};
use super::request::{Prompt, Rendering, Source as PromptSource, Truncation};
use super::tokenizer::PieceLengths;
use crate::block::{Contract, ContractError, KeyStream, Lora, PromptExtras};
use crate::ids::BlockKey;
use crate::service::MissReason;

/// Text of one slice, bytes: under 1 ms for texts that tokenize slowly (14 MB/s). Where the tokenizer has no proved cut in
/// so many bytes the keys end.
pub const SLICE_BYTES: usize = 8 * 1024;
/// Piece of text that mostly repeats one byte after which the keys end: such pieces are the slowest (5 to 10 MB/s), and
/// encoding one cannot be interrupted.
const RUN_BYTES_MAX: usize = 4 * 1024;
/// Time after which a slice ends at the next mark: some texts tokenize ten times slower than others.
const SLICE_TIME: Duration = Duration::from_micros(150);
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
    /// The text was rendered by the model's own chat template.
    is_chat: bool,
    memory: Box<Memory>,
    strides: Strides,
    source: Source<'a>,
    /// What the request says beyond its tokens.
    extras: PromptExtras,
    stream: KeyStream,
    /// Streams beside the job's own that are fed the same tokens.
    others: Vec<Other>,
    /// Tokens before the text.
    prefix: Vec<u32>,
    /// Special tokens go around the text.
    special: bool,
    /// The first block with the other begin-of-text.
    other_bos: Option<OtherBos>,
    /// All tokens so far, where they are wanted.
    ids: Option<Vec<u32>>,
    /// What the engine cuts off.
    cut_off: Option<CutOff>,
    /// The tokens of one piece.
    piece: Vec<u32>,
    scratch: Vec<PipelineToken>,
    /// Keys that were taken, and that may be.
    taken: usize,
    offered: usize,
    tokens: u64,
    bytes_done: u64,
    /// The next slice is one long piece.
    long_next: bool,
}

/// A stream of keys under another contract, from the same tokens.
#[derive(Debug)]
struct Other {
    stream: KeyStream,
    keys: Vec<BlockKey>,
}

/// The first block of a prompt that begins with the begin-of-text token, or without it, unlike the job's own.
#[derive(Debug)]
struct OtherBos {
    adds: bool,
    stream: KeyStream,
    first: Option<BlockKey>,
}

impl OtherBos {
    fn feed(&mut self, mut tokens: &[u32]) {
        if self.first.is_none() {
            self.first = self.stream.next_key(&mut tokens);
        }
    }
}

impl Other {
    fn feed(&mut self, mut tokens: &[u32]) {
        self.keys.extend(std::iter::from_fn(|| self.stream.next_key(&mut tokens)));
    }
}

/// A prompt of which the engine keeps only some tokens.
#[derive(Debug)]
struct CutOff {
    kept: Truncation,
    /// Tokens of which it is not decided yet.
    open: Vec<u32>,
}

/// What is still to be done.
#[derive(Debug)]
enum Source<'a> {
    /// The memory's text.
    Text {
        at: usize,
        /// Special tokens go behind it.
        suffix: bool,
    },
    /// The rest of a JSON list of ids, after its bracket.
    Ids(&'a str),
    /// What is kept of a prompt that is cut off at its front, from this token on.
    Kept {
        at: usize,
    },
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
        rendering: Rendering<'_>,
        keying: Keying<'_>,
    ) -> Result<Self, MissReason> {
        let view = BodyView::parse(body).ok_or(MissReason::Tokenize)?;
        Job::of_view(api, &view, model, rendering, keying, &mut PrefixCache::new(0))
    }

    /// Begins with a body that is viewed already, whatever its size. A chat is rendered here, in one go, as far as the
    /// cache does not know its text.
    ///
    /// # Errors
    /// The reason why the prompt cannot be keyed.
    pub fn of_view(
        api: Api,
        view: &BodyView<'a>,
        model: &Arc<Model>,
        rendering: Rendering<'_>,
        keying: Keying<'_>,
        cache: &mut PrefixCache,
    ) -> Result<Self, MissReason> {
        match Job::begin(api, view, model, rendering, keying, cache)? {
            Begun::Job(job) => Ok(job),
            Begun::Pending(mut pending) => {
                let prepared = pending.task().run()?;
                pending.finish(prepared, cache)
            }
        }
    }

    /// The same, but what would take too long between two visits to the driver is left to be done elsewhere.
    ///
    /// # Errors
    /// The reason why the prompt cannot be keyed.
    pub fn begin<'o>(
        api: Api,
        view: &'o BodyView<'a>,
        model: &'o Arc<Model>,
        rendering: Rendering<'o>,
        keying: Keying<'o>,
        cache: &mut PrefixCache,
    ) -> Result<Begun<'o, 'a>, MissReason> {
        let mut opening = Opening::new(api, view, model, rendering, keying)?;
        let raw = large::raw_prompt(api, view).filter(|raw| view.unkeyable.is_none() && opening.is_large(raw));
        if let Some(raw) = raw
            && opening.is_read_whole()
        {
            return Ok(Begun::Pending(opening.pending(raw, Strides::new(), true)));
        }
        let Prompt { source, truncation } = Prompt::of(api, view, model, rendering)?;
        opening.truncation = truncation;
        if let (PromptSource::Chat { raw, special }, true) = (&source, raw.is_some()) {
            opening.surround(*special)?;
            return opening.open_large(raw, *special, cache);
        }
        let opened = opening.open(source, cache)?;
        opening.job(opened).map(Begun::Job)
    }

    /// Begins with ids that are the prompt of the request: a JSON list after its bracket. What the body says of its
    /// prompt is not looked at.
    ///
    /// # Errors
    /// The reason why the prompt cannot be keyed.
    pub fn of_ids(
        list: &'a str,
        view: &BodyView<'a>,
        model: &Arc<Model>,
        rendering: Rendering<'_>,
        keying: Keying<'_>,
    ) -> Result<Self, MissReason> {
        let mut opening = Opening::new(Api::Completions, view, model, rendering, keying)?;
        let opened = opening.open(PromptSource::Ids(list), &mut PrefixCache::new(0))?;
        opening.job(opened)
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
        other.feed(&self.prefix);
        self.others.push(other);
        Ok(())
    }

    /// Has the first block keyed with the other begin-of-text too: see [`Job::other_bos`]. For a job before its first
    /// slice; nothing comes of it where no special tokens go around the prompt, or where its begin was remembered.
    pub fn watch_bos(&mut self, keying: Keying<'_>) {
        let Some(block_tokens) = NonZeroU32::new(keying.block_tokens) else { return };
        if !self.special || self.bytes_done > 0 || self.cut_off.is_some() {
            return;
        }
        let ways = [true, false].map(|add| self.model.prefix(Some(add)));
        let Some(other) = ways.iter().find(|way| **way != self.prefix) else { return };
        let Ok(stream) = KeyStream::new(keying.contract, &self.extras, block_tokens) else { return };
        let mut other_bos = OtherBos { adds: other.len() > self.prefix.len(), stream, first: None };
        other_bos.feed(other);
        self.other_bos = Some(other_bos);
    }

    /// Keeps the ids of all tokens. Only for a job that began without a cache and before its first slice: tokens that
    /// were remembered are not known any more.
    pub fn keep_ids(&mut self) {
        debug_assert_eq!(self.bytes_done, 0, "every token is seen");
        self.ids = Some(self.prefix.clone());
    }

    /// The ids of the whole prompt; none before its end, where its end has none, or where they were not kept.
    #[must_use]
    pub fn ids(&self) -> Option<&[u32]> {
        let is_whole = matches!(self.source, Source::Done) && self.cut_off.is_none();
        self.ids.as_deref().filter(|_| is_whole)
    }

    /// The first block's key if the prompt began the other way, and whether that is with a begin-of-text token; none
    /// where nobody asked ([`Job::watch_bos`]) or no block is full yet.
    #[must_use]
    pub fn other_bos(&self) -> Option<(BlockKey, bool)> {
        self.other_bos.as_ref().and_then(|other| Some((other.first?, other.adds)))
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
            Source::Text { at, suffix } => self.text_slice(at, suffix)?,
            Source::Ids(rest) => {
                let left = read_ids(rest, &mut self.piece)?;
                self.bytes_done += (rest.len() - left.unwrap_or_default().len()) as u64;
                self.source = left.map_or(Source::Done, Source::Ids);
                self.finish_piece();
            }
            Source::Kept { at } => self.kept_slice(at),
        }
        self.cut_off();
        self.offered = self.memory.keys.len();
        Ok(if matches!(self.source, Source::Done | Source::Unbroken { .. }) { Step::Done } else { Step::More })
    }

    /// Whether the next slice is likely to take close to 1 ms: it should begin with a fresh visit to the driver.
    #[must_use]
    pub fn is_long_next(&self) -> bool {
        self.long_next
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
            Source::Kept { at } => {
                let open = self.cut_off.as_ref().map_or(0, |cut_off| cut_off.open.len());
                return self.tokens + (open - at) as u64;
            }
            Source::Done => return self.tokens,
        } as u64;
        if self.bytes_done == 0 {
            return self.tokens + left / BYTES_PER_TOKEN_ASSUMED;
        }
        self.tokens + left.saturating_mul(self.tokens) / self.bytes_done
    }

    /// Notes that an engine holds all blocks of the prompt: where it was rendered by a template that was assumed, the
    /// assumption is right.
    pub fn confirm_template(&self) {
        if self.is_chat && self.model.template_assumed() {
            tracing::info!(
                model = self.model.slug(),
                "an engine has the blocks that the assumed chat template leads to"
            );
            self.model.confirm_template();
        }
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

    fn text_slice(&mut self, from: usize, suffix: bool) -> Result<(), MissReason> {
        let model = Arc::clone(&self.model);
        let tokenizer = model.tokenizer();
        let mut at = from;
        let start = Instant::now();
        while at < self.memory.text.len()
            && at - from + PLAIN_BYTES <= SLICE_BYTES
            && (at == from || start.elapsed() < SLICE_TIME)
        {
            let end = tokenizer.mark_after(&self.memory.text, at, PIECE);
            let Some(end) = end.filter(|&end| !is_long_run(&self.memory.text.as_bytes()[at..end])) else {
                self.source = Source::Unbroken { bytes: self.memory.text.len() - at };
                return Ok(());
            };
            // A long piece is a slice of its own.
            self.long_next = end - at > PLAIN_BYTES && at > from;
            if self.long_next {
                break;
            }
            let piece = &self.memory.text[at..end];
            tokenizer.encode(piece, &mut self.scratch, &mut self.piece).map_err(|_| {
                // What the tokenizer says of it may quote it.
                tracing::debug!("a prompt cannot be encoded: it is routed without keys");
                MissReason::Tokenize
            })?;
            self.finish_piece();
            self.bytes_done += (end - at) as u64;
            at = end;
            if at < self.memory.text.len() {
                let keys = self.memory.keys.len();
                self.memory.marks.push(Mark { at, tokens: self.tokens, keys, stream: self.stream.clone() });
            }
        }
        self.source = Source::Text { at, suffix };
        if at == self.memory.text.len() {
            if suffix {
                self.piece.extend(tokenizer.suffix());
                self.finish_piece();
            }
            self.source = Source::Done;
        }
        Ok(())
    }

    /// Hashes some of the tokens that are kept.
    fn kept_slice(&mut self, at: usize) {
        let open = self.cut_off.as_ref().map_or(&[][..], |cut_off| &cut_off.open);
        let end = open.len().min(at + SLICE_IDS);
        self.piece.extend_from_slice(&open[at..end]);
        self.source = Source::Kept { at: end };
        if end == open.len() {
            self.source = Source::Done;
            self.cut_off = None;
        }
        self.hash_piece();
    }

    /// Hashes the piece; where tokens are cut off it waits until it is known which ones.
    fn finish_piece(&mut self) {
        match &mut self.cut_off {
            Some(cut_off) => cut_off.open.append(&mut self.piece),
            None => self.hash_piece(),
        }
    }

    /// Takes away what the engine cuts off, as soon as that is known, and hashes what stays.
    fn cut_off(&mut self) {
        let Some(CutOff { kept, open }) = &mut self.cut_off else { return };
        match *kept {
            Truncation::First(kept) => {
                let room = kept.saturating_sub(usize::try_from(self.tokens).unwrap_or(kept));
                if open.len() > room {
                    open.truncate(room);
                    self.source = Source::Done;
                }
            }
            Truncation::Last(kept) => {
                if matches!(self.source, Source::Done) {
                    self.source = Source::Kept { at: open.len().saturating_sub(kept) };
                }
                return;
            }
        }
        self.piece.append(open);
        self.hash_piece();
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
        if let Some(other) = &mut self.other_bos {
            other.feed(&self.piece);
        }
        if let Some(ids) = &mut self.ids {
            ids.extend_from_slice(&self.piece);
        }
        self.piece.clear();
    }
}

/// Lengths of pieces between marks.
pub(super) const PIECE: PieceLengths = PieceLengths {
    token: MARK_BYTES,
    token_last: MARK_BYTES_LAST,
    last: LAST_BYTES,
    plain: PLAIN_BYTES,
    max: SLICE_BYTES,
};

/// Whether a piece takes too long to encode: it mostly repeats one byte.
fn is_long_run(piece: &[u8]) -> bool {
    piece.len() > RUN_BYTES_MAX
        && piece.iter().zip(&piece[1..]).filter(|(byte, next)| byte == next).count() > piece.len() / 2
}

#[cfg(test)]
mod tests;
