//! From a request body to block keys: JSON view, chat template, tokens, keys, in slices that give way.
//!
//! **Invariant.** Either the keys are those of the engine's own tokens, or the request is routed without keys, with a
//! [`MissReason`](crate::service::MissReason). What the gateway cannot know it does not guess.

mod any_input;
mod beginning;
mod body;
mod chat;
mod chat_sglang;
mod clock;
mod completions;
mod content_format;
mod conversation;
mod frame;
mod generate;
mod glimpse;
mod job;
mod json;
mod large;
mod memory;
mod messages;
mod methods;
mod model;
#[cfg(test)]
mod outside_data;
mod prefix_cache;
mod preview;
mod pyvalue;
mod question;
mod recall;
mod regrow;
mod request;
mod responses;
mod scan;
mod slices;
mod source;
mod splice;
mod table;
mod template;
mod tokenizer;
#[cfg(test)]
mod vectors;

pub use any_input::{check_any_body, check_any_template};
pub use body::{BodyScan, BodyView};
pub use content_format::ContentFormat;
pub use frame::quote_conversations;
pub use job::{Begun, Glimpse, Job, Keying, Pending, SLICE_BYTES, Step};
pub use large::{Prepared, Task};
pub use model::{Model, ModelError, ModelFiles, TemplateOrigin};
pub use prefix_cache::{PREFIX_CACHE_BYTES, PrefixCache, PrefixStats, SharedPrefixStats};
pub use preview::{Preview, preview};
pub use question::{Question, may_bring_ids};
pub use request::Rendering;
pub use splice::{ADDED_BYTES_MAX, MEMBERS_MAX, Outline, Piece, Splice, SpliceError};
pub use table::{Entry, Lookup, ModelTable, SLUG_BYTES_MAX, slug};
pub use template::{Template, TemplateError};
pub use tokenizer::{Tokenizer, TokenizerError};

/// Request kinds that carry a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// `POST /v1/completions`.
    Completions,
    /// `POST /v1/chat/completions`.
    ChatCompletions,
    /// `POST /v1/responses`.
    Responses,
    /// `POST /v1/messages`.
    Messages,
    /// `POST /generate` (SGLang).
    Generate,
}

impl Api {
    /// The kind of a request, by method and path (query ignored); none for paths without a prompt.
    #[must_use]
    pub fn of(method: &str, path: &str) -> Option<Self> {
        if method != "POST" {
            return None;
        }
        match path.split('?').next() {
            Some("/v1/completions") => Some(Api::Completions),
            Some("/v1/chat/completions") => Some(Api::ChatCompletions),
            Some("/v1/responses") => Some(Api::Responses),
            Some("/v1/messages") => Some(Api::Messages),
            Some("/generate") => Some(Api::Generate),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exact_paths_have_a_prompt() {
        for (method, path, expected) in [
            ("POST", "/v1/completions", Some(Api::Completions)),
            ("POST", "/v1/chat/completions?x=/v1/completions", Some(Api::ChatCompletions)),
            ("GET", "/v1/completions", None),
            ("POST", "/v1/completions/", None),
            ("POST", "/v1/chat/completions/render", None),
            ("POST", "/v1/responses", Some(Api::Responses)),
            ("POST", "/v1/messages?beta=true", Some(Api::Messages)),
            ("POST", "/generate", Some(Api::Generate)),
            ("GET", "/v1/responses", None),
            ("POST", "/v1/responses/render", None),
            ("POST", "/v1/messages/count_tokens", None),
            ("POST", "/v1/embeddings", None),
            ("POST", "/tokenize", None),
        ] {
            assert_eq!(Api::of(method, path), expected, "{method} {path}");
        }
    }
}
