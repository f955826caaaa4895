//! The requests: one of 64 warm conversations plus a new last message.

use loadgen::workload::{Random, words};
use serde_json::{Value, json};

/// Conversations of each size.
pub const CONVERSATIONS: usize = 64;

/// Bytes of the new last message.
const NEW_BYTES: usize = 72;

/// Bytes of one message of a conversation, at most.
const MESSAGE_BYTES: usize = 1_024;

const SEED: u64 = 7;

/// One conversation as the bytes around its new last message.
#[derive(Clone, Debug)]
struct Conversation {
    before: Vec<u8>,
    after: Vec<u8>,
}

/// The conversations of one size.
#[derive(Clone, Debug)]
pub struct Conversations(Vec<Conversation>);

impl Conversations {
    /// Conversations whose requests have about `bytes` bytes.
    pub fn new(model: &str, bytes: usize) -> Self {
        let make = |number| Conversation::new(model, bytes, number as u64);
        Conversations((0..CONVERSATIONS).map(make).collect())
    }

    /// A request: HTTP head and body. Its last message is new each time, drawn from `random`.
    pub fn request(&self, conversation: usize, random: &mut Random) -> Vec<u8> {
        let Conversation { before, after } = &self.0[conversation];
        let length = before.len() + NEW_BYTES + after.len();
        let mut bytes = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n\
             content-length: {length}\r\n\r\n"
        )
        .into_bytes();
        bytes.reserve(length);
        bytes.extend_from_slice(before);
        bytes.extend_from_slice(text(random, NEW_BYTES).as_bytes());
        bytes.extend_from_slice(after);
        bytes
    }
}

impl Conversation {
    fn new(model: &str, bytes: usize, number: u64) -> Self {
        let mut random = Random::of(SEED, bytes as u64, number);
        let shell = body(model, vec![message(0, String::new()), message(1, "@".repeat(NEW_BYTES))]).to_string().len();
        let mut left = bytes.saturating_sub(shell).max(24);
        let mut messages = Vec::new();
        while left > 0 {
            // A message costs its quotes, braces and names beside its text.
            let size = left.min(MESSAGE_BYTES);
            messages.push(message(messages.len(), text(&mut random, size)));
            left = left.saturating_sub(size + 32);
        }
        // The last message is a question.
        if messages.len() % 2 == 0 {
            messages.pop();
        }
        messages.push(message(messages.len(), "@".to_owned()));
        let whole = body(model, messages).to_string();
        let (before, after) = whole.rsplit_once('@').expect("the last message is this sign");
        Conversation { before: before.into(), after: after.into() }
    }
}

fn body(model: &str, messages: Vec<Value>) -> Value {
    json!({ "model": model, "messages": messages, "max_tokens": 1 })
}

fn message(place: usize, text: String) -> Value {
    let role = if place == 0 {
        "system"
    } else if place % 2 == 1 {
        "user"
    } else {
        "assistant"
    };
    json!({ "role": role, "content": text })
}

/// That many bytes of words; nothing in them needs an escape.
fn text(random: &mut Random, bytes: usize) -> String {
    let mut text = words::text_of_bytes(random, bytes);
    text.truncate(bytes);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_their_size_and_differ_only_in_their_last_message() {
        for bytes in [200, 16 * 1024, 128 * 1024] {
            let conversations = Conversations::new("kvlane/demo", bytes);
            let mut random = Random::new(1);
            let bodies: Vec<Value> = (0..2)
                .map(|_| {
                    let request = conversations.request(3, &mut random);
                    let head = request.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
                    let body = &request[head + 4..];
                    let head = String::from_utf8_lossy(&request[..head]);
                    assert!(head.ends_with(&format!("content-length: {}", body.len())));
                    assert!((bytes * 9 / 10..bytes * 11 / 10 + 64).contains(&body.len()), "{} of {bytes}", body.len());
                    serde_json::from_slice(body).unwrap()
                })
                .collect();
            let messages: Vec<&Vec<Value>> = bodies.iter().map(|body| body["messages"].as_array().unwrap()).collect();
            let last = messages[0].len() - 1;
            assert_eq!(messages[0][..last], messages[1][..last]);
            assert_ne!(messages[0][last], messages[1][last]);
            assert_eq!(messages[0][last]["role"], "user");
        }
    }
}
