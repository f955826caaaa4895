//! What engines say of their caches in the `usage` of an answer, beside what was predicted: the evidence about blocks
//! that were announced while nobody listened.
//!
//! Answers are looked at only while the ingest thread wants it of an endpoint, and then only at their last
//! [`TAIL_BYTES`]: that is where `usage` stands, in one JSON object as in the last event of a stream. Both numbers are
//! found by their names; a name inside a text has a backslash before its closing quote, so no text is taken for one.

#![forbid(unsafe_code)]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crossbeam::queue::ArrayQueue;
use memchr::memmem;

use crate::ids::BlockKey;

/// Bytes of an answer's end that are kept.
const TAIL_BYTES: usize = 2048;
/// Keys of one prompt that are looked at. What is beyond stays as it is.
pub const KEYS_MAX: usize = 8192;
/// Answers of one endpoint that wait for the ingest thread. Beyond it new ones are dropped: a prompt comes again.
const WAITING_MAX: usize = 64;
/// Answers looked at for whether an endpoint tells cached tokens at all, while nobody wants to know how many.
const LOOKS_MAX: u32 = 256;

/// What an answer said of its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens of it that came from the cache; none where it is not said.
    pub cached_tokens: Option<u64>,
}

/// The end of an answer that goes by.
#[derive(Debug, Default)]
pub struct Tail(Vec<u8>);

impl Tail {
    /// Keeps the end of what has gone by.
    pub fn push(&mut self, bytes: &[u8]) {
        let bytes = &bytes[bytes.len().saturating_sub(TAIL_BYTES)..];
        let excess = (self.0.len() + bytes.len()).saturating_sub(TAIL_BYTES);
        self.0.drain(..excess.min(self.0.len()));
        self.0.extend_from_slice(bytes);
    }

    /// What it says, where it says something that can be true.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        let start = memmem::rfind(&self.0, b"\"usage\"").or_else(|| memmem::rfind(&self.0, b"\"meta_info\""))?;
        let usage = &self.0[start..];
        let prompt_tokens = number(usage, b"\"prompt_tokens\"")?;
        let cached_tokens = number(usage, b"\"cached_tokens\"");
        cached_tokens.is_none_or(|cached| cached <= prompt_tokens).then_some(Usage { prompt_tokens, cached_tokens })
    }
}

/// The number that follows a name.
fn number(text: &[u8], name: &[u8]) -> Option<u64> {
    let after = &text[memmem::find(text, name)? + name.len()..];
    let after = after.trim_ascii_start().strip_prefix(b":")?.trim_ascii_start();
    let digits = after.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&after[..digits]).ok()?.parse().ok()
}

/// A prompt whose `usage` is not what was predicted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// Keys of the prompt's first blocks, in the key space of the endpoint that answered.
    pub keys: Box<[BlockKey]>,
    /// How many of them the engine took from its cache, by its own word.
    pub cached: u32,
    /// Whether those behind are denied: they were predicted.
    pub denied: bool,
}

impl Statement {
    /// What follows from the usage of a prompt with these keys, of which `held` were predicted; nothing where both
    /// agree. A last block less than predicted is no denial: engines compute the last token of a prompt always, and
    /// with speculation the last block.
    #[must_use]
    pub fn new(keys: &[BlockKey], held: u32, block_tokens: u32, usage: Usage, tells: bool) -> Option<Self> {
        let block = u64::from(block_tokens.max(1));
        let cached = usage.cached_tokens.or(tells.then_some(0))? / block;
        let possible = usage.prompt_tokens.saturating_sub(1) / block;
        let predicted = u64::from(held).min(possible);
        let denied = if cached == 0 { predicted > 0 } else { cached + 1 < predicted };
        if !denied && cached <= u64::from(held) {
            return None;
        }
        let keys = &keys[..keys.len().min(KEYS_MAX)];
        let cached = u32::try_from(cached).unwrap_or(u32::MAX).min(keys.len() as u32);
        Some(Statement { keys: keys.into(), cached, denied })
    }
}

/// Statements about one endpoint, from all shards to the one ingest thread.
#[derive(Debug, Default)]
pub struct Statements {
    wanted: AtomicBool,
    /// The endpoint's engine has told cached tokens: where it tells none, there were none.
    tells: AtomicBool,
    looks: AtomicU32,
    queue: OnceLock<ArrayQueue<Statement>>,
}

impl Statements {
    /// Whether answers are to be looked at: somebody wants to know, or it is not known yet whether they tell anything.
    #[must_use]
    pub fn look(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
            || (!self.tells() && self.looks.load(Ordering::Relaxed) < LOOKS_MAX && {
                self.looks.fetch_add(1, Ordering::Relaxed);
                true
            })
    }

    /// Whether statements are wanted; for the ingest thread.
    pub fn want(&self, wanted: bool) {
        if self.wanted.load(Ordering::Relaxed) != wanted {
            self.wanted.store(wanted, Ordering::Relaxed);
        }
    }

    /// Whether statements are wanted.
    #[must_use]
    pub fn wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Whether the endpoint's engine is known to tell cached tokens.
    #[must_use]
    pub fn tells(&self) -> bool {
        self.tells.load(Ordering::Relaxed)
    }

    /// It tells cached tokens.
    pub fn set_tells(&self) {
        if !self.tells() {
            self.tells.store(true, Ordering::Relaxed);
        }
    }

    /// Offers a statement; dropped where none is wanted, or enough wait.
    pub fn offer(&self, statement: Statement) {
        if self.wanted() {
            let _ = self.queue.get_or_init(|| ArrayQueue::new(WAITING_MAX)).push(statement);
        }
    }

    /// The next statement, for the ingest thread.
    pub fn take(&self) -> Option<Statement> {
        self.queue.get()?.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage_of(pieces: &[&str]) -> Option<Usage> {
        let mut tail = Tail::default();
        pieces.iter().for_each(|piece| tail.push(piece.as_bytes()));
        tail.usage()
    }

    #[test]
    fn usage_is_found_at_the_end_of_every_kind_of_answer() {
        let told = |prompt_tokens, cached_tokens| Some(Usage { prompt_tokens, cached_tokens });
        let object = r#"{"choices":[{"text":"x"}],"usage":{"prompt_tokens":40,"total_tokens":41,"completion_tokens":1,
            "prompt_tokens_details":{"cached_tokens": 32}},"kv_transfer_params":null}"#;
        assert_eq!(usage_of(&[object]), told(40, Some(32)));
        assert_eq!(usage_of(&[&"x".repeat(100_000), object]), told(40, Some(32)));
        let (first, second) = object.split_at(70);
        assert_eq!(usage_of(&[first, second]), told(40, Some(32)));
        let none = r#"{"usage":{"prompt_tokens":40,"total_tokens":41,"prompt_tokens_details":null}}"#;
        assert_eq!(usage_of(&[none]), told(40, None));
        let stream = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"prompt_tokens_details\":{\"cached_tokens\":0}}}\n\n\
                      data: [DONE]\n\n";
        assert_eq!(usage_of(&["data: {\"usage\":{\"prompt_tokens\":5}}\n\n", stream]), told(9, Some(0)));
        assert_eq!(usage_of(&[r#"{"text":"x","meta_info":{"prompt_tokens":5,"cached_tokens":4}}"#]), told(5, Some(4)));
    }

    #[test]
    fn what_a_text_says_or_cannot_be_true_is_no_usage() {
        assert_eq!(usage_of(&[r#"{"text":"\"usage\":{\"prompt_tokens\":5}"}"#]), None);
        assert_eq!(usage_of(&[r#"{"usage":{"prompt_tokens":5,"cached_tokens":6}}"#]), None);
        assert_eq!(usage_of(&[r#"{"usage":null}"#]), None);
        assert_eq!(usage_of(&[]), None);
    }

    fn statement(blocks: u64, held: u32, usage: (u64, Option<u64>), tells: bool) -> Option<(usize, u32, bool)> {
        let keys: Vec<_> = (0..blocks).map(BlockKey).collect();
        let usage = Usage { prompt_tokens: usage.0, cached_tokens: usage.1 };
        Statement::new(&keys, held, 16, usage, tells).map(|said| (said.keys.len(), said.cached, said.denied))
    }

    #[test]
    fn only_what_differs_is_stated_and_a_last_block_less_denies_nothing() {
        assert_eq!(statement(10, 5, (165, Some(80)), true), None, "as predicted");
        assert_eq!(statement(10, 10, (160, Some(144)), true), None, "the last token is computed");
        assert_eq!(statement(10, 5, (165, Some(64)), true), None, "the last block may be");
        assert_eq!(statement(10, 5, (165, Some(48)), true), Some((10, 3, true)));
        assert_eq!(statement(10, 1, (165, Some(0)), true), Some((10, 0, true)));
        assert_eq!(statement(10, 5, (165, None), true), Some((10, 0, true)), "it would say so if there were some");
        assert_eq!(statement(10, 5, (165, None), false), None, "it may say nothing ever");
        assert_eq!(statement(10, 0, (165, None), true), None);
        assert_eq!(statement(10, 0, (165, Some(96)), true), Some((10, 6, false)), "more than was known");
        assert_eq!(statement(4, 0, (165, Some(96)), true), Some((4, 4, false)));
    }

    #[test]
    fn answers_are_looked_at_while_it_is_wanted_or_not_known_what_they_tell() {
        let statements = Statements::default();
        assert_eq!((0..1_000).filter(|_| statements.look()).count(), LOOKS_MAX as usize);
        let keys = [BlockKey(1)];
        let usage = Usage { prompt_tokens: 40, cached_tokens: Some(32) };
        let said = Statement::new(&keys, 0, 16, usage, false).expect("more than was known");
        statements.offer(said.clone());
        assert_eq!(statements.take(), None, "nobody wants it");
        statements.want(true);
        assert!(statements.look());
        (0..100).for_each(|_| statements.offer(said.clone()));
        assert_eq!(std::iter::from_fn(|| statements.take()).count(), WAITING_MAX);
    }
}
