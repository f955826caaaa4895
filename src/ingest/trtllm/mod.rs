//! TensorRT-LLM's cache events.
//!
//! Two ways lead here. The drain: `POST /kv_cache_events` hands out everything that happened since the last call, to
//! whoever calls ([`json`]). And the newer ZMQ stream, which is framed and encoded as vLLM's and can be replayed.
//! Either way [`state`] links blocks by the engine's keys and files them under keys of their tokens.

#![forbid(unsafe_code)]

mod admission;
mod drain;
mod http;
mod inspect;
mod json;
mod ownership;
mod source;
mod state;
mod tree;

pub use drain::{Bearer, DrainFrom, Phase};
pub(crate) use inspect::{drain_once, drained};
pub use json::check_any_json;
pub(crate) use source::{DrainSource, DrainStats};
pub use source::{DrainStatus, SecondDrainer};
#[cfg(test)]
pub(super) use {
    drain::{Drain, Runner},
    json::Drained,
};
