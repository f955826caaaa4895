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
use super::fault::Phase;
use super::legs::{LegEnd, LegKind};
use super::orders::Ordered;
use super::scheduler::{Output, RequestId};
use super::shared::Shared;
use super::text::ModelText;

/// A request from its arrival to its end. Dropped before [`Self::complete`], it means that the client left: that is
/// counted and the request's slots are given back.
pub struct InFlight {
    shared: Arc<Shared>,
    ids: Vec<RequestId>,
    rank: usize,
    /// How it ended, once it has.
    end: Option<LegEnd>,
    /// Its place in the engine's own account, once its body has come.
    leg: Option<u64>,
    /// What it computes for other engines.
    transfers: Vec<String>,
}

impl InFlight {
    /// Counts a request that arrives.
    pub fn new(shared: Arc<Shared>) -> Self {
        shared.counters.requests.fetch_add(1, Ordering::Relaxed);
        Self { shared, ids: Vec::new(), rank: 0, end: None, leg: None, transfers: Vec::new() }
    }

    /// Its head and body have come.
    pub fn arrived(&mut self, request_id: Option<&str>, mark: Option<&str>, body: &Bytes) -> u64 {
        let number = self.shared.legs.begin(request_id.map(str::to_owned), mark.map(str::to_owned), body.clone());
        self.leg = Some(number);
        number
    }

    /// Says what it is, and what it computes for other engines: that is given up if it does not end well.
    pub fn describe(&mut self, kind: LegKind, keys: &[String]) {
        if let Some(leg) = self.leg {
            self.shared.legs.describe(leg, kind, &keys.join(","));
        }
        if kind == LegKind::Prefill {
            self.transfers = keys.to_vec();
        }
    }

    /// Takes places for `count` prompts at a rank; false when the engine has no more.
    pub fn reserve(&mut self, count: usize, rank: usize) -> bool {
        if self.shared.open() + count > self.shared.options().max_requests {
            return false;
        }
        self.rank = rank;
        self.shared.ranks[rank].open.fetch_add(count, Ordering::Relaxed);
        self.ids = (0..count).map(|_| self.shared.new_id()).collect();
        true
    }

    /// Names of the reserved places.
    pub fn ids(&self) -> &[RequestId] {
        &self.ids
    }

    /// The answer is written, or the request refused: nobody left.
    pub fn complete(&mut self) {
        self.end = Some(LegEnd::Finished);
    }

    /// The request is refused.
    pub fn refuse(&mut self) {
        self.end = Some(LegEnd::Refused);
    }

    /// The engine breaks it off.
    pub fn die(&mut self) {
        self.end = Some(LegEnd::Died);
    }

    /// Stands still at a phase until another order is given for it.
    pub async fn hold(&self, ordered: &mut Ordered, phase: Phase) {
        let note = |phase| self.leg.into_iter().for_each(|leg| self.shared.legs.hold(leg, phase));
        note(Some(phase));
        self.shared.orders.next(ordered).await;
        note(None);
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let counters = &self.shared.counters;
        let link = &self.shared.ranks[self.rank];
        link.open.fetch_sub(self.ids.len(), Ordering::Relaxed);
        if let Some(leg) = self.leg {
            self.shared.legs.end(leg, self.end.unwrap_or(LegEnd::Cancelled));
        }
        if self.end != Some(LegEnd::Finished) {
            self.transfers.iter().for_each(|key| self.shared.plane.abort(key));
        }
        match self.end {
            Some(LegEnd::Finished | LegEnd::Refused) => {
                counters.completed.fetch_add(1, Ordering::Relaxed);
                return;
            }
            Some(LegEnd::Died) => {}
            _ => _ = counters.disconnects.fetch_add(1, Ordering::Relaxed),
        }
        for id in &self.ids {
            // No scheduler is left when the engine stops.
            let _ = link.commands.send(Command::Abort(*id));
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
    text: Arc<ModelText>,
    choices: Vec<Choice>,
    /// What a prefill leg's answer carries, with where.
    issued: Option<(Place, String)>,
}

/// Where in an answer the parameters of a transfer stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// `kv_transfer_params` of the answer.
    Top,
    /// `disaggregated_params` of the first choice, with the prompt's ids beside the choices.
    Choice,
}

/// What stands in an answer until it is written, for parameters that are spelled as they are.
const ISSUED: &str = "@issued@";

#[derive(Clone, Default)]
struct Choice {
    text: String,
    ids: Vec<u32>,
    tokens: usize,
    cached_tokens: usize,
    done: bool,
}

impl Answer {
    /// An answer to `call`, whose tokens come over `tokens`. `id` is the client's name of the request.
    pub fn new(flight: InFlight, tokens: UnboundedReceiver<Output>, call: Call, id: Option<&str>) -> Self {
        let prefix = match call.kind {
            Kind::Chat => "chatcmpl",
            Kind::Completion => "cmpl",
            Kind::Generate => "gen",
        };
        let number = flight.ids.first().map_or(0, |id| id.0);
        let id = id.map_or_else(|| format!("{prefix}-{number:016x}"), |id| format!("{prefix}-{id}"));
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let choices = vec![Choice::default(); call.prompts.len()];
        let text = flight.shared.text();
        Self { flight, tokens, call, id, created, text, choices, issued: None }
    }

    /// The answer carries these parameters.
    pub fn issue(&mut self, place: Place, params: String) {
        self.issued = Some((place, params));
    }

    /// The answer is written.
    pub fn complete(&mut self) {
        self.flight.complete();
    }

    /// The engine breaks the answer off.
    pub fn die(&mut self) {
        self.flight.die();
    }

    /// Stands still in its middle until another order is given for it.
    pub async fn hold(&self, ordered: &mut Ordered) {
        self.flight.hold(ordered, Phase::Answering).await;
    }

    /// Waits for all tokens; the whole answer, or none when the engine stops before its end.
    pub async fn whole(&mut self) -> Option<Bytes> {
        while self.choices.iter().any(|choice| !choice.done) {
            let output = self.tokens.recv().await?;
            self.take(&output);
        }
        if self.call.kind == Kind::Generate {
            let answers: Vec<Value> = (0..self.choices.len()).map(|index| self.generated(index)).collect();
            let body = if self.call.is_list { Value::Array(answers) } else { answers.into_iter().next()? };
            return Some(self.finish(&body));
        }
        let choices: Vec<Value> = self.choices.iter().enumerate().map(|(i, choice)| self.choice(i, choice)).collect();
        let object = if self.call.kind == Kind::Chat { "chat.completion" } else { "text_completion" };
        let mut body = json!({
            "id": self.id, "object": object, "created": self.created, "model": self.call.model,
            "choices": choices, "usage": self.usage(),
        });
        match &self.issued {
            Some((Place::Top, _)) => body["kv_transfer_params"] = json!(ISSUED),
            Some((Place::Choice, _)) => {
                body["choices"][0]["disaggregated_params"] = json!(ISSUED);
                body["prompt_token_ids"] = json!(self.call.prompts[0].tokens);
            }
            None => {}
        }
        Some(self.finish(&body))
    }

    fn finish(&mut self, body: &Value) -> Bytes {
        let mut text = body.to_string();
        if let Some((_, params)) = &self.issued {
            text = text.replacen(&format!("\"{ISSUED}\""), params, 1);
        }
        let bytes = Bytes::from(text);
        self.count_out(bytes.len());
        bytes
    }

    /// SGLang's native object: the whole text so far.
    fn generated(&self, index: usize) -> Value {
        let choice = &self.choices[index];
        let reason = match (choice.done, self.call.prompts[index].stops) {
            (false, _) => Value::Null,
            (true, true) => json!({"type": "stop", "matched": null}),
            (true, false) => json!({"type": "length", "length": choice.tokens}),
        };
        json!({"text": choice.text, "output_ids": choice.ids, "meta_info": {
            "id": self.id, "finish_reason": reason, "prompt_tokens": self.call.prompts[index].tokens.len(),
            "weight_version": "default", "completion_tokens": choice.tokens, "cached_tokens": choice.cached_tokens,
            "dp_rank": self.flight.rank,
        }})
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
        let word = self.text.word(output.token).to_owned();
        choice.text.push_str(&word);
        choice.ids.push(output.token);
        (index, word)
    }

    fn choice(&self, index: usize, choice: &Choice) -> Value {
        let reason = self.finish_reason(index);
        match self.call.kind {
            Kind::Chat => json!({
                "index": index, "message": {"role": "assistant", "content": choice.text},
                "logprobs": null, "finish_reason": reason,
            }),
            Kind::Completion | Kind::Generate => {
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
            "id": self.id, "object": object, "created": self.created, "model": self.call.model,
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
    /// The answer that is streamed.
    pub fn answer(&mut self) -> &mut Answer {
        &mut self.answer
    }

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
            Kind::Generate => {
                let chunk = self.answer.generated(index).to_string();
                self.push(&chunk);
                return self.end();
            }
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
        self.end();
    }

    /// Makes the events after the last token, once it is there.
    fn end(&mut self) {
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
