//! Writes OpenAI answers, whole or as a stream of events, and notices clients that leave.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedReceiver;

use super::api::{Call, Kind};
use super::driver::Command;
use super::scheduler::{Output, RequestId};
use super::shared::Shared;

/// A request from its arrival to its end. Dropped before [`Self::complete`], it means that the client left: that is
/// counted and the request's slots are given back.
pub struct InFlight {
    shared: Arc<Shared>,
    ids: Vec<RequestId>,
    complete: bool,
}

impl InFlight {
    /// Counts a request that arrives.
    pub fn new(shared: Arc<Shared>) -> Self {
        shared.counters.requests.fetch_add(1, Ordering::Relaxed);
        Self { shared, ids: Vec::new(), complete: false }
    }

    /// Takes places for `count` prompts; false when the engine has no more.
    pub fn reserve(&mut self, count: usize) -> bool {
        let open = &self.shared.counters.open;
        if open.load(Ordering::Relaxed) + count > self.shared.options.max_requests {
            return false;
        }
        open.fetch_add(count, Ordering::Relaxed);
        self.ids = (0..count).map(|_| self.shared.new_id()).collect();
        true
    }

    /// Names of the reserved places.
    pub fn ids(&self) -> &[RequestId] {
        &self.ids
    }

    /// The answer is written, or the request refused: nobody left.
    pub fn complete(&mut self) {
        self.complete = true;
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let counters = &self.shared.counters;
        counters.open.fetch_sub(self.ids.len(), Ordering::Relaxed);
        if self.complete {
            counters.completed.fetch_add(1, Ordering::Relaxed);
            return;
        }
        counters.disconnects.fetch_add(1, Ordering::Relaxed);
        for id in &self.ids {
            // No scheduler is left when the engine stops.
            let _ = self.shared.commands.send(Command::Abort(*id));
        }
    }
}

/// An answer being made: what arrived of each prompt's tokens, and how its objects look.
pub struct Answer {
    flight: InFlight,
    tokens: UnboundedReceiver<Output>,
    call: Call,
    id: String,
    created: u64,
    choices: Vec<Choice>,
}

#[derive(Clone, Default)]
struct Choice {
    text: String,
    tokens: usize,
    cached_tokens: usize,
    done: bool,
}

impl Answer {
    /// An answer to `call`, whose tokens come over `tokens`. `id` is the client's name of the request.
    pub fn new(flight: InFlight, tokens: UnboundedReceiver<Output>, call: Call, id: Option<&str>) -> Self {
        let prefix = if call.kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        let number = flight.ids.first().map_or(0, |id| id.0);
        let id = id.map_or_else(|| format!("{prefix}-{number:016x}"), |id| format!("{prefix}-{id}"));
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let choices = vec![Choice::default(); call.prompts.len()];
        Self { flight, tokens, call, id, created, choices }
    }

    /// Waits for all tokens; the whole answer, or none when the engine stops before its end.
    pub async fn whole(mut self) -> Option<Bytes> {
        while self.choices.iter().any(|choice| !choice.done) {
            let output = self.tokens.recv().await?;
            let (index, word) = self.take(&output);
            self.choices[index].text.push_str(&word);
        }
        let choices: Vec<Value> = self.choices.iter().enumerate().map(|(i, choice)| self.choice(i, choice)).collect();
        let object = if self.call.kind == Kind::Chat { "chat.completion" } else { "text_completion" };
        let body = json!({
            "id": self.id, "object": object, "created": self.created, "model": self.flight.shared.options.model,
            "choices": choices, "usage": self.usage(),
        });
        let bytes = Bytes::from(body.to_string());
        self.count_out(bytes.len());
        self.flight.complete();
        Some(bytes)
    }

    /// The answer as server-sent events.
    pub fn stream(self) -> AnswerStream {
        AnswerStream { answer: self, ready: VecDeque::new(), ended: false }
    }

    /// Books one token: its prompt's place and its text.
    fn take(&mut self, output: &Output) -> (usize, String) {
        let index = self.flight.ids.iter().position(|id| *id == output.id).unwrap_or(0);
        let choice = &mut self.choices[index];
        choice.tokens += 1;
        choice.cached_tokens = output.cached_tokens;
        choice.done = output.last;
        (index, self.flight.shared.text.word(output.token).to_owned())
    }

    fn choice(&self, index: usize, choice: &Choice) -> Value {
        let reason = self.finish_reason(index);
        match self.call.kind {
            Kind::Chat => json!({
                "index": index, "message": {"role": "assistant", "content": choice.text},
                "logprobs": null, "finish_reason": reason,
            }),
            Kind::Completion => {
                json!({"index": index, "text": choice.text, "logprobs": null, "finish_reason": reason})
            }
        }
    }

    fn finish_reason(&self, index: usize) -> &'static str {
        if self.call.prompts[index].stops { "stop" } else { "length" }
    }

    fn usage(&self) -> Value {
        let prompt: usize = self.call.prompts.iter().map(|prompt| prompt.tokens.len()).sum();
        let completion: usize = self.choices.iter().map(|choice| choice.tokens).sum();
        let cached: usize = self.choices.iter().map(|choice| choice.cached_tokens).sum();
        json!({
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        })
    }

    fn chunk(&self, choices: Value) -> Value {
        let object = if self.call.kind == Kind::Chat { "chat.completion.chunk" } else { "text_completion" };
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.flight.shared.options.model,
            "choices": choices,
        })
    }

    fn count_out(&self, bytes: usize) {
        self.flight.shared.counters.bytes_out.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// An answer as the body of a response.
pub struct AnswerStream {
    answer: Answer,
    /// Events made and not yet sent: at most four.
    ready: VecDeque<Bytes>,
    ended: bool,
}

impl AnswerStream {
    fn push(&mut self, data: &str) {
        self.ready.push_back(Bytes::from(format!("data: {data}\n\n")));
    }

    /// Makes the events of one token, and those of the end after the last.
    fn take(&mut self, output: &Output) {
        let (index, word) = self.answer.take(output);
        let choice = &self.answer.choices[index];
        let reason = choice.done.then(|| self.answer.finish_reason(index));
        let first = choice.tokens == 1;
        let chunk = match self.answer.call.kind {
            Kind::Chat => {
                if first {
                    let role = json!([{"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null}]);
                    let role = self.answer.chunk(role).to_string();
                    self.push(&role);
                }
                json!([{"index": index, "delta": {"content": word}, "logprobs": null, "finish_reason": reason}])
            }
            Kind::Completion => json!([{"index": index, "text": word, "logprobs": null, "finish_reason": reason}]),
        };
        let chunk = self.answer.chunk(chunk).to_string();
        self.push(&chunk);
        if self.answer.choices.iter().all(|choice| choice.done) {
            if self.answer.call.include_usage {
                let mut last = self.answer.chunk(json!([]));
                last["usage"] = self.answer.usage();
                self.push(&last.to_string());
            }
            self.push("[DONE]");
            self.ended = true;
        }
    }
}

impl futures_core::Stream for AnswerStream {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            if let Some(event) = this.ready.pop_front() {
                this.answer.count_out(event.len());
                return Poll::Ready(Some(Ok(event)));
            }
            if this.ended {
                this.answer.flight.complete();
                return Poll::Ready(None);
            }
            match this.answer.tokens.poll_recv(context) {
                Poll::Ready(Some(output)) => this.take(&output),
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}
