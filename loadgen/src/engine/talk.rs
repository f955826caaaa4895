//! vLLM's younger ways to ask for a chat: `/v1/messages` and `/v1/responses`.
//!
//! Simulated: texts, limits, streams, and the members that disaggregation needs. Differs: no tools, nothing is stored.

use serde_json::{Map, Value, json};

use super::api::Kind;

/// Gives a body of another form the names of a chat's.
pub fn flatten(kind: Kind, body: &mut Map<String, Value>) {
    let mut messages = Vec::new();
    let mut take = |name: &str| body.remove(name);
    match kind {
        Kind::Messages => {
            if let Some(system) = take("system") {
                messages.push(json!({"role": "system", "content": system}));
            }
            messages.extend(take("messages").and_then(|list| list.as_array().cloned()).unwrap_or_default());
        }
        Kind::Responses => {
            if let Some(system) = take("instructions") {
                messages.push(json!({"role": "system", "content": system}));
            }
            match take("input") {
                Some(Value::Array(list)) => messages.extend(list),
                Some(text) => messages.push(json!({"role": "user", "content": text})),
                None => {}
            }
            if let Some(most) = take("max_output_tokens") {
                body.insert("max_tokens".to_owned(), most);
            }
        }
        Kind::Completion | Kind::Chat | Kind::Generate => return,
    }
    body.insert("messages".to_owned(), Value::Array(messages));
}

/// What an answer says so far.
#[derive(Clone, Copy, Debug)]
pub struct Said<'a> {
    /// The answer's id.
    pub id: &'a str,
    /// The model as the client named it.
    pub model: &'a str,
    /// Its text.
    pub text: &'a str,
    /// Whether it ended by itself.
    pub stops: bool,
    /// Tokens of the prompt, those of them from the cache, tokens of the answer.
    pub tokens: (usize, usize, usize),
}

impl Said<'_> {
    /// The whole answer.
    #[must_use]
    pub fn whole(&self, kind: Kind) -> Value {
        let (prompt, cached, made) = self.tokens;
        if kind == Kind::Messages {
            let usage = json!({
                "input_tokens": prompt - cached, "cache_read_input_tokens": cached, "output_tokens": made,
            });
            let reason = if self.stops { "end_turn" } else { "max_tokens" };
            return json!({
                "id": self.id, "type": "message", "role": "assistant", "model": self.model,
                "content": [{"type": "text", "text": self.text}], "stop_reason": reason, "stop_sequence": null,
                "usage": usage,
            });
        }
        let usage = json!({
            "input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached}, "output_tokens": made,
            "total_tokens": prompt + made,
        });
        let part = json!({"type": "output_text", "text": self.text, "annotations": []});
        json!({
            "id": self.id, "object": "response", "created_at": 0, "model": self.model,
            "status": if self.stops { "completed" } else { "incomplete" },
            "output": [{"type": "message", "role": "assistant", "status": "completed", "content": [part]}],
            "usage": usage,
        })
    }

    /// The events of the next word, `first` before it and `last` behind it.
    #[must_use]
    pub fn events(&self, kind: Kind, word: &str, first: bool, last: bool) -> Vec<(&'static str, Value)> {
        let mut events = Vec::new();
        let whole = || self.whole(kind);
        if kind == Kind::Messages {
            if first {
                events.push(("message_start", json!({"type": "message_start", "message": whole()})));
                let block = json!({"type": "text", "text": ""});
                events.push((
                    "content_block_start",
                    json!({"type": "content_block_start", "index": 0, "content_block": block}),
                ));
            }
            let delta = json!({"type": "text_delta", "text": word});
            events.push(("content_block_delta", json!({"type": "content_block_delta", "index": 0, "delta": delta})));
            if last {
                events.push(("content_block_stop", json!({"type": "content_block_stop", "index": 0})));
                let delta = json!({"stop_reason": whole()["stop_reason"]});
                events.push((
                    "message_delta",
                    json!({"type": "message_delta", "delta": delta, "usage": whole()["usage"]}),
                ));
                events.push(("message_stop", json!({"type": "message_stop"})));
            }
            return events;
        }
        if first {
            events.push(("response.created", json!({"type": "response.created", "response": whole()})));
        }
        events.push(("response.output_text.delta", json!({"type": "response.output_text.delta", "delta": word})));
        if last {
            let name = if self.stops { "response.completed" } else { "response.incomplete" };
            events.push((name, json!({"type": name, "response": whole()})));
        }
        events
    }
}
