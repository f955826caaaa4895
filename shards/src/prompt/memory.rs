//! What is remembered of one prompt: its source, its text, its keys, and the states between them.
//!
//! **Invariant.** A mark's state is that of the text before it alone: it is set at proved cuts of the tokenizer, and is
//! gone on from only where the new text is the same up to it and has the same cut there.

use std::num::NonZeroU32;
use std::sync::Arc;

use xxhash_rust::xxh3;

use super::conversation::Message;
use super::frame::Frame;
use super::model::Model;
use super::tokenizer::Tokenizer;
use crate::block::{Contract, KeyStream};
use crate::ids::BlockKey;

/// What decides over a prompt's text and keys beside the prompt itself.
#[derive(Clone, Debug)]
pub(super) struct Context {
    model: Arc<Model>,
    template: Option<Arc<str>>,
    contract: Contract,
    block_tokens: NonZeroU32,
    /// The request's other members, spelled so that equal ones are equal.
    members: Box<[u8]>,
    hash: u64,
}

impl Context {
    pub(super) fn new(
        model: &Arc<Model>,
        template: Option<&Arc<str>>,
        contract: &Contract,
        block_tokens: NonZeroU32,
        members: &[Option<&str>],
    ) -> Self {
        let mut spelled =
            Vec::with_capacity(members.iter().flatten().map(|m| m.len()).sum::<usize>() + 9 * members.len());
        for member in members {
            let length = member.map_or(u64::MAX, |member| member.len() as u64);
            spelled.extend_from_slice(&length.to_le_bytes());
            spelled.extend_from_slice(member.unwrap_or_default().as_bytes());
        }
        let hash = xxh3::xxh3_64_with_seed(&spelled, Arc::as_ptr(model) as usize as u64);
        Context {
            model: Arc::clone(model),
            template: template.cloned(),
            contract: *contract,
            block_tokens,
            members: spelled.into(),
            hash,
        }
    }

    /// Equal for equal contexts, for as long as the model is loaded.
    pub(super) fn hash(&self) -> u64 {
        self.hash
    }

    /// Whether prompts of both have the same text and keys.
    pub(super) fn is(&self, other: &Context) -> bool {
        self.hash == other.hash
            && Arc::ptr_eq(&self.model, &other.model)
            && self.members == other.members
            && self.contract == other.contract
            && self.block_tokens == other.block_tokens
            && self.template == other.template
    }
}

/// A place of the text that work can go on from.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    /// Bytes of text before it.
    pub at: usize,
    /// Tokens before it.
    pub tokens: u64,
    /// Keys made before it.
    pub keys: usize,
    /// The state of the keys.
    pub stream: KeyStream,
}

/// The state before the first byte of a text, with the keys that tokens before it have filled.
#[derive(Clone, Debug)]
pub(super) struct Start {
    pub mark: Mark,
    pub keys: Vec<BlockKey>,
}

/// A render of part of a conversation, to compare with a later one.
#[derive(Clone, Debug)]
pub(super) struct Excerpt {
    /// Which messages were rendered.
    pub chosen: Vec<u32>,
    /// Their text.
    pub text: String,
}

/// What is remembered of one prompt.
#[derive(Debug)]
pub(super) struct Memory {
    pub context: Context,
    /// The list of messages as sent; empty where the text itself was sent.
    pub raw: String,
    pub messages: Vec<Message>,
    pub frame: Option<Arc<Frame>>,
    pub text: String,
    pub excerpt: Option<Excerpt>,
    /// In order of place, the first at 0.
    pub marks: Vec<Mark>,
    pub keys: Vec<BlockKey>,
}

/// Bytes that an empty memory costs, about.
const FIXED_BYTES: usize = 1024;
/// Bytes that a byte of what stands beside the messages takes once it is read, about.
const FRAME_BYTES_A_BYTE: usize = 8;

impl Memory {
    /// Nothing remembered; `start` is the state before the first byte.
    pub(super) fn new(context: Context, start: Start) -> Self {
        Memory {
            context,
            raw: String::new(),
            messages: Vec::new(),
            frame: None,
            text: String::new(),
            excerpt: None,
            marks: vec![start.mark],
            keys: start.keys,
        }
    }

    /// What this prompt is found by.
    pub(super) fn subject(&self) -> &[u8] {
        if self.raw.is_empty() { self.text.as_bytes() } else { self.raw.as_bytes() }
    }

    /// Bytes held, about.
    pub(super) fn bytes(&self) -> usize {
        // A message's values are about as long as what they were read from.
        let messages = self.raw.len() + self.messages.capacity() * 256;
        let excerpt = self.excerpt.as_ref().map_or(0, |e| e.text.capacity() + e.chosen.capacity() * 4);
        let marks = self.marks.capacity() * (size_of::<Mark>() + 4 * self.context.block_tokens.get() as usize);
        // Tools and documents are kept as the template sees them, too: small values in tables.
        let frame = if self.frame.is_some() { self.context.members.len() * FRAME_BYTES_A_BYTE } else { 0 };
        FIXED_BYTES
            + self.context.members.len()
            + frame
            + self.raw.capacity()
            + messages
            + self.text.capacity()
            + excerpt
            + marks
            + self.keys.capacity() * size_of::<BlockKey>()
    }

    /// A part of this memory for a prompt that shares only a part: messages and keys, not the text.
    pub(super) fn branch(&self, subject_bytes: usize) -> Memory {
        let kept = self.messages.iter().take_while(|message| message.end <= subject_bytes);
        Memory {
            context: self.context.clone(),
            raw: String::new(),
            messages: kept.cloned().collect(),
            frame: self.frame.clone(),
            text: String::new(),
            excerpt: None,
            marks: Vec::new(),
            keys: Vec::new(),
        }
    }

    /// Takes over what another prompt's memory knows of this text.
    pub(super) fn learn(&mut self, other: &Memory, tokenizer: &Tokenizer) {
        let same = common_prefix(self.text.as_bytes(), other.text.as_bytes());
        let marks = other.marks.iter().take_while(|mark| mark.at <= same);
        self.marks = marks.cloned().collect();
        self.forget_beyond(same, tokenizer);
        let keys = self.marks.last().map_or(0, |mark| mark.keys);
        self.keys = other.keys[..keys.min(other.keys.len())].to_vec();
    }

    /// Takes another text and keeps the states that it has too.
    pub(super) fn replace_text(&mut self, text: String, tokenizer: &Tokenizer) {
        let same = common_prefix(text.as_bytes(), self.text.as_bytes());
        self.text = text;
        self.forget_beyond(same, tokenizer);
    }

    /// Forgets the states that a new text, equal to the old one for that many bytes, does not have.
    pub(super) fn forget_beyond(&mut self, same: usize, tokenizer: &Tokenizer) {
        let holds = |mark: &Mark| {
            mark.at == 0 || (mark.at <= same && mark.at < self.text.len() && tokenizer.is_cut(&self.text, mark.at))
        };
        while self.marks.last().is_some_and(|mark| !holds(mark)) {
            self.marks.pop();
        }
        self.keys.truncate(self.marks.last().map_or(0, |mark| mark.keys));
    }
}

/// Length of what both begin with.
pub(super) fn common_prefix(left: &[u8], right: &[u8]) -> usize {
    const WIDE: usize = 256;
    let same = left.chunks_exact(WIDE).zip(right.chunks_exact(WIDE)).take_while(|(l, r)| l == r).count() * WIDE;
    same + left[same..].iter().zip(&right[same..]).take_while(|(l, r)| l == r).count()
}
