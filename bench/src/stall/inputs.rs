//! The long prompts: what is easy, and what is hard to cut.

use std::fmt::Write;

use clap::ValueEnum;
use loadgen::workload::{Random, words};
use serde_json::{Value, json};

/// What a long prompt consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Input {
    /// English words
    Prose,
    /// One letter
    Letter,
    /// Spaces
    Spaces,
    /// Newlines
    Newlines,
    /// Chinese characters without punctuation
    Cjk,
    /// Base64
    Base64,
    /// Chinese characters, each spelled as an escape
    Escapes,
    /// A list of token ids
    Ids,
    /// A chat of one message
    ChatOne,
    /// A chat of messages of 1 kB
    Chat,
    /// A chat of messages of one letter
    ChatTiny,
}

const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// In the place of these bytes stands what makes a body unlike all others.
pub const MARK: &str = "0000000000000000";

impl Input {
    /// Path of the request.
    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            Input::ChatOne | Input::Chat | Input::ChatTiny => "/v1/chat/completions",
            _ => "/v1/completions",
        }
    }

    /// A text of that many bytes.
    #[must_use]
    pub fn text(self, random: &mut Random, bytes: usize) -> String {
        match self {
            Input::Letter => "a".repeat(bytes),
            Input::Spaces => " ".repeat(bytes),
            Input::Newlines => "\n".repeat(bytes),
            Input::Cjk | Input::Escapes => {
                (0..bytes / 3).filter_map(|_| char::from_u32(0x4E00 + random.below(6_000) as u32)).collect()
            }
            Input::Base64 => (0..bytes).map(|_| char::from(BASE64[random.below(64)])).collect(),
            _ => words::text_of_bytes(random, bytes),
        }
    }

    /// A body of about that many bytes, [`MARK`] near its begin.
    #[must_use]
    pub fn body(self, model: &str, random: &mut Random, bytes: usize) -> String {
        let chat = |count: usize, each: usize, random: &mut Random| {
            let mut messages = vec![json!({ "role": "system", "content": format!("{MARK} you help.") })];
            messages.extend((0..count).map(|n| {
                let role = if n % 2 == 0 { "user" } else { "assistant" };
                let text = if each > 1 { words::text_of_bytes(random, each) } else { "a".to_owned() };
                json!({ "role": role, "content": text })
            }));
            json!({ "model": model, "messages": messages, "max_tokens": 1 }).to_string()
        };
        match self {
            Input::ChatOne => chat(1, bytes, random),
            Input::Chat => chat(bytes / 1_060, 1_024, random),
            Input::ChatTiny => chat(bytes / 35, 1, random),
            Input::Ids => {
                let ids: Vec<Value> = (0..bytes / 5).map(|_| (1_000 + random.below(8_000)).into()).collect();
                format!(r#"{{"model":{},"prompt":[1{MARK_ID},{}"#, json!(model), &Value::from(ids).to_string()[1..])
                    + r#","max_tokens":1}"#
            }
            Input::Escapes => {
                let mut escaped = String::with_capacity(bytes);
                for c in self.text(random, bytes / 2).chars() {
                    // A string takes what is written to it.
                    let _ = write!(escaped, "\\u{:04x}", u32::from(c));
                }
                format!(r#"{{"model":{},"prompt":"{MARK} {escaped}","max_tokens":1}}"#, json!(model))
            }
            _ => {
                let text = format!("{MARK} {}", self.text(random, bytes));
                json!({ "model": model, "prompt": text, "max_tokens": 1 }).to_string()
            }
        }
    }
}

/// What an id of [`Input::Ids`] has after its first digit.
const MARK_ID: &str = "000";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_input_is_a_body_of_about_its_size() {
        for input in Input::value_variants() {
            let body = input.body("m", &mut Random::new(1), 40_000);
            let parsed: Value = serde_json::from_str(&body).unwrap();
            assert!(parsed["prompt"].is_string() || parsed["prompt"].is_array() || parsed["messages"].is_array());
            assert!((30_000..90_000).contains(&body.len()), "{input:?}: {}", body.len());
        }
    }
}
