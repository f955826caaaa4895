//! x
mod body;
mod chat;
mod clock;
mod content_format;
mod json;
mod methods;
mod pyvalue;
mod source;
pub mod tokenizer;
pub mod template;
#[cfg(test)]
mod outside_data;
#[cfg(test)]
mod vectors;

use std::sync::Arc;

use crate::block::{HashAlgo, NoneHash};
use crate::ids::BlockKey;
use crate::service::MissReason;

/// Tokenizer and chat template of one model, shared by all shards.
#[derive(Debug)]
pub struct Model;

/// Models by slug, as of the last look at the tokenizer directory.
#[derive(Debug, Default)]
pub struct ModelTable;

/// What the table knows of a model name.
#[derive(Debug)]
pub enum Lookup<'a> {
    /// Loaded.
    Ready(&'a Arc<Model>),
    /// Staged on disk, not loaded yet: the look-up has asked for it.
    Loading,
    /// Not staged, or its files are unreadable or damaged.
    Missing,
}

impl ModelTable {
    /// Looks the model up by the name a client gave: no file-system call, no growth.
    #[must_use]
    pub fn lookup(&self, _model: &str) -> Lookup<'_> {
        Lookup::Missing
    }
}

/// Request kinds that carry a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// `POST /v1/completions`.
    Completions,
    /// `POST /v1/chat/completions`.
    ChatCompletions,
}

impl Api {
    /// The kind of a request, by method and path (query ignored); none for paths without a prompt.
    #[must_use]
    pub fn of(_method: &str, _path: &str) -> Option<Self> {
        None
    }
}

pub use body::BodyView;

/// The keys of one prompt, made in slices.
#[derive(Debug)]
pub struct Job;

/// What one slice brought.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Work goes on: nothing new to look up yet, or the next keys.
    More,
    /// All keys are made.
    Done,
}

impl Job {
    /// Begins with a body.
    ///
    /// # Errors
    /// The reason why the prompt cannot be keyed.
    pub fn new(
        _api: Api,
        _body: &[u8],
        _model: &Arc<Model>,
        _template: Option<&Arc<str>>,
        _algo: HashAlgo,
        _none_hash: &NoneHash,
        _block_tokens: u32,
    ) -> Result<Self, MissReason> {
        Err(MissReason::TextEmpty)
    }

    /// Does one slice (well under 1 ms of work).
    ///
    /// # Errors
    /// The reason why the prompt cannot be keyed after all.
    pub fn step(&mut self) -> Result<Step, MissReason> {
        Ok(Step::Done)
    }

    /// Keys made since the last call.
    pub fn take_keys(&mut self) -> &[BlockKey] {
        &[]
    }

    /// Tokens of the prompt: exact once done, else an estimate from bytes left.
    #[must_use]
    pub fn prompt_tokens(&self) -> u64 {
        0
    }
}
