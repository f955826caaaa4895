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
use super::large::{self, Copying, IN_PLACE_BYTES, Made, Prepared, REMEMBERED_BYTES_MAX, Task};
use super::memory::{Context, Mark, Memory, Start};
use super::model::Model;
use super::prefix_cache::{self, PrefixCache, Strides};
use super::recall::{self, Chat, Growing, Recalled};
use super::request::{self, Prompt, Rendering, Source as PromptSource, Truncation};
use super::tokenizer::PieceLengths;
use super::{Api, glimpse, json};
use crate::block::{Contract, ContractError, KeyStream, Lora, PromptExtras};
use crate::ids::BlockKey;
use crate::service::{Engine, MissReason};

/// Text of one slice, bytes: under 1 ms for texts that tokenize slowly (14 MB/s). Where the tokenizer has no proved cut in
/// so many bytes the keys end.
pub const SLICE_BYTES: usize = 8 * 1024;
/// Piece of text that mostly repeats one byte after which the keys end: such pieces are the slowest (5 to 10 MB/s), and
/// encoding one cannot be interrupted.
const RUN_BYTES_MAX: usize = 4 * 1024;
/// Time after which a slice ends at the next mark: some texts tokenize ten times slower than others.
const SLICE_TIME: Duration = Duration::from_micros(300);
/// Token ids read from a list in one slice.
const SLICE_IDS: usize = 4096;
/// Bytes of a list after which its slice ends, however few ids they spell.
const SLICE_LIST_BYTES: usize = 128 * 1024;
/// Blanks beside an id that are passed over in one slice.
const BLANKS_MAX: usize = 64 * 1024;
/// Bytes of an id that are looked at: one more than the largest has.
const ID_DIGITS_MAX: usize = 11;
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
/// Begin of a large prompt by which it is known or not.
const KNOWN_BEGIN_BYTES: usize = 32 * 1024;
/// What two prompts may share by chance.
const KNOWN_BYTES_MIN: usize = 1024;
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
            tokenizer.encode(piece, &mut self.scratch, &mut self.piece).map_err(|error| {
                tracing::debug!(%error, "a prompt is routed without keys");
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
    opening: Opening<'o, 'a>,
    raw: &'a str,
    strides: Strides,
    stage: Stage<'a>,
    unknown: bool,
}

#[derive(Debug)]
enum Stage<'a> {
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
        let opened = match (prepared.0, stage) {
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

/// A prompt on the way to its job.
#[derive(Debug)]
struct Opening<'o, 'a> {
    api: Api,
    view: &'o BodyView<'a>,
    model: &'o Arc<Model>,
    rendering: Rendering<'o>,
    keying: Keying<'o>,
    block_tokens: NonZeroU32,
    extras: PromptExtras,
    /// Tokens before the text.
    prefix: Vec<u32>,
    /// Special tokens go around the text.
    special: bool,
    truncation: Option<Truncation>,
}

/// What a job begins with.
struct Opened<'a> {
    memory: Box<Memory>,
    strides: Strides,
    source: Source<'a>,
}

impl<'o, 'a> Opening<'o, 'a> {
    fn new(
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
    fn surround(&mut self, special: bool) -> Result<(), MissReason> {
        self.special = special;
        if special {
            self.prefix = self.model.prefix(self.rendering.add_bos);
        }
        // Which of the special tokens are cut away is the engine's affair.
        if self.truncation.is_some() && !self.prefix.is_empty() { Err(MissReason::Tokenize) } else { Ok(()) }
    }

    /// Whether the prompt takes too long to be read in one go.
    fn is_large(&self, raw: &str) -> bool {
        match self.api {
            Api::Completions | Api::Generate => large::is_large_text(raw),
            _ => large::is_large(raw) || self.has_large_members(),
        }
    }

    fn has_large_members(&self) -> bool {
        let beside = self.view.members().into_iter().chain([self.view.system, self.view.instructions]);
        beside.flatten().map(str::len).sum::<usize>() > IN_PLACE_BYTES
    }

    /// Whether a large prompt is read and rendered as a whole, not message by message.
    fn is_read_whole(&self) -> bool {
        match self.api {
            Api::ChatCompletions => {
                let engine = self.rendering.engine;
                self.view.truncate_prompt_tokens.is_some()
                    || (engine == Engine::Sglang && self.view.input_ids.is_none())
            }
            _ => true,
        }
    }

    fn pending(self, raw: &'a str, strides: Strides, unknown: bool) -> Pending<'o, 'a> {
        let stage = Stage::Read(Copying::new(self.view.body));
        Pending { opening: self, raw, strides, stage, unknown }
    }

    /// A large chat: from what is remembered of it where little is new, else by a task.
    fn open_large(self, raw: &'a str, special: bool, cache: &mut PrefixCache) -> Result<Begun<'o, 'a>, MissReason> {
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
        if known < KNOWN_BYTES_MIN || self.has_large_members() || large::is_large(&raw[raw.ceil_char_boundary(known)..])
        {
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
    fn open(&mut self, source: PromptSource<'a>, cache: &mut PrefixCache) -> Result<Opened<'a>, MissReason> {
        if let PromptSource::Text { special, .. } | PromptSource::Chat { special, .. } = source {
            self.surround(special)?;
        }
        self.open_surrounded(source, cache)
    }

    fn open_surrounded(&self, source: PromptSource<'a>, cache: &mut PrefixCache) -> Result<Opened<'a>, MissReason> {
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
    fn job(self, opened: Opened<'a>) -> Result<Job<'a>, MissReason> {
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
    fn start(&self) -> Result<Start, MissReason> {
        let mut stream = KeyStream::new(self.keying.contract, &self.extras, self.block_tokens).map_err(|error| {
            tracing::debug!(%error, "a request is routed without keys");
            MissReason::Extras
        })?;
        let mut rest = &self.prefix[..];
        let keys: Vec<BlockKey> = std::iter::from_fn(|| stream.next_key(&mut rest)).collect();
        Ok(Start { mark: Mark { at: 0, tokens: self.prefix.len() as u64, keys: keys.len(), stream }, keys })
    }

    /// What decides over text and keys beside the prompt, for prompts found by their text or by their messages.
    fn context(&self, found_by: &str) -> Context {
        let Rendering { engine, template, kwargs, add_bos: _ } = self.rendering;
        let lora = self.keying.lora.map(|lora| format!("{lora:?}"));
        let front_end = format!("{engine:?} {found_by} {:?}", self.prefix);
        let mut members = self.view.members().to_vec();
        members.extend([lora.as_deref(), kwargs, Some(&front_end)]);
        Context::new(self.model, template, self.keying.contract, self.block_tokens, &members)
    }
}

impl Opened<'_> {
    fn of_text(memory: Box<Memory>, strides: Strides, suffix: bool) -> Result<Self, MissReason> {
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

/// Whether a piece takes too long to encode: it mostly repeats one byte.
fn is_long_run(piece: &[u8]) -> bool {
    piece.len() > RUN_BYTES_MAX
        && piece.iter().zip(&piece[1..]).filter(|(byte, next)| byte == next).count() > piece.len() / 2
}

/// Reads ids of a JSON list up to the slice's limit; the rest, or none when the list is over.
fn read_ids<'a>(list: &'a str, ids: &mut Vec<u32>) -> Result<Option<&'a str>, MissReason> {
    let mut rest = list;
    for _ in 0..SLICE_IDS {
        let blanks = blanks(rest);
        rest = &rest[blanks..];
        if blanks == BLANKS_MAX || list.len() - rest.len() > SLICE_LIST_BYTES {
            return Ok(Some(rest));
        }
        let digits = rest.bytes().take(ID_DIGITS_MAX).take_while(u8::is_ascii_digit).count();
        ids.push(rest[..digits].parse().map_err(|_| MissReason::Tokenize)?);
        rest = &rest[digits..];
        // So many blanks behind an id as are looked at in one slice: nobody writes more.
        rest = &rest[self::blanks(rest)..];
        match rest.as_bytes().first() {
            Some(b',') => rest = &rest[1..],
            Some(b']') => return Ok(None),
            _ => return Err(MissReason::Tokenize),
        }
    }
    Ok(Some(rest))
}

/// Blanks that the text begins with, up to [`BLANKS_MAX`].
fn blanks(text: &str) -> usize {
    let blanks = text.bytes().take(BLANKS_MAX);
    blanks.take_while(|byte| matches!(byte, b' ' | b'\n' | b'\r' | b'\t')).count()
}

#[cfg(test)]
#[path = "job_tests.rs"]
mod tests;
