//! What is sent: every workload is a pure function from a request's number to its bytes, so threads share it without
//! locks, and one seed gives one load.

mod chat;
mod random;
pub mod words;

use std::sync::Arc;

pub use chat::{ChatShape, ChatWorkload};
pub use random::Random;
use serde_json::json;

use crate::client::Api;
use crate::trace::TraceWorkload;

/// One request: where it goes and its body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The API.
    pub api: Api,
    /// The JSON body.
    pub body: Vec<u8>,
}

/// A source of requests.
#[derive(Clone, Debug)]
pub enum Workload {
    /// The built-in multi-turn chat; endless.
    Chat(ChatWorkload),
    /// One body for all requests; endless.
    Fixed(Request),
    /// A trace; as long as the trace.
    Trace(Arc<TraceWorkload>),
}

impl Workload {
    /// The request of this number.
    #[must_use]
    pub fn request(&self, number: usize) -> Request {
        match self {
            Workload::Chat(chat) => chat.request(number),
            Workload::Fixed(request) => request.clone(),
            Workload::Trace(trace) => trace.request(number),
        }
    }

    /// How many requests there are; none = endless.
    #[must_use]
    pub fn len(&self) -> Option<usize> {
        match self {
            Workload::Chat(_) | Workload::Fixed(_) => None,
            Workload::Trace(trace) => Some(trace.len()),
        }
    }

    /// Whether there is nothing to send.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == Some(0)
    }

    /// The workload in words, for the report.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Workload::Chat(chat) => chat.describe(),
            Workload::Fixed(request) => format!("one body of {} bytes for all requests", request.body.len()),
            Workload::Trace(trace) => trace.describe(),
        }
    }
}

/// A streaming chat request in the API's form that asks for usage and for exactly `max_tokens` tokens.
pub(crate) fn chat_request(model: &str, messages: &serde_json::Value, max_tokens: u32) -> Request {
    let body = json!({
        "model": model,
        "messages": messages,
        "stream": true,
        "stream_options": { "include_usage": true },
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": true,
    });
    Request { api: Api::Chat, body: body.to_string().into_bytes() }
}
