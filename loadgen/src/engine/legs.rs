//! Requests for answers as the engine sees them: when each began, and when and how it ended.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use axum::body::Bytes;
use serde_json::{Value, json};

use super::fault::Phase;

/// Requests remembered; the oldest is forgotten for another.
const LEGS_MAX: usize = 4096;

/// Bodies remembered: those of the newest requests.
const BODIES_MAX: usize = 8;

/// What a request is to a disaggregated engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LegKind {
    /// One that no other engine has a part in.
    #[default]
    Plain,
    /// Its prompt is computed for another engine.
    Prefill,
    /// It goes on where another engine computed.
    Decode,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LegEnd {
    /// Its answer was written to the end.
    Finished,
    /// It was answered with an error.
    Refused,
    /// Its client left before that.
    Cancelled,
    /// The engine broke it off, as it was told to.
    Died,
}

/// One request for an answer.
#[derive(Clone, Debug)]
pub struct LegView {
    /// Counted from 0 in order of arrival.
    pub number: u64,
    /// What it is.
    pub kind: LegKind,
    /// Its `X-Request-Id`.
    pub request_id: Option<String>,
    /// Its `x-mark`, by which tests find their requests again.
    pub mark: Option<String>,
    /// What joins it with its other leg: the dialect's request id or room; empty where it has none.
    pub key: String,
    /// When its head and body had come.
    pub began: Instant,
    /// Where it is held, while it is.
    pub held: Option<Phase>,
    /// When and how it ended; none while it runs.
    pub ended: Option<(Instant, LegEnd)>,
    /// Its body, if it is one of the newest requests.
    pub body: Bytes,
}

/// The newest requests of an engine.
#[derive(Debug, Default)]
pub struct Legs(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    next: u64,
    legs: VecDeque<LegView>,
}

impl Legs {
    /// Notes one that arrived; the number names it.
    pub fn begin(&self, request_id: Option<String>, mark: Option<String>, body: Bytes) -> u64 {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let number = state.next;
        state.next += 1;
        if let Some(old) = state.legs.len().checked_sub(BODIES_MAX) {
            state.legs[old].body = Bytes::new();
        }
        if state.legs.len() == LEGS_MAX {
            state.legs.pop_front();
        }
        let (kind, key) = (LegKind::Plain, String::new());
        let (began, held, ended) = (Instant::now(), None, None);
        state.legs.push_back(LegView { number, kind, request_id, mark, key, began, held, ended, body });
        number
    }

    /// Says what it is.
    pub fn describe(&self, number: u64, kind: LegKind, key: &str) {
        self.change(number, |leg| (leg.kind, leg.key) = (kind, key.to_owned()));
    }

    /// Notes that it is held at a phase, or no longer.
    pub fn hold(&self, number: u64, phase: Option<Phase>) {
        self.change(number, |leg| leg.held = phase);
    }

    /// Notes its end.
    pub fn end(&self, number: u64, end: LegEnd) {
        self.change(number, |leg| (leg.held, leg.ended) = (None, Some((Instant::now(), end))));
    }

    fn change(&self, number: u64, change: impl FnOnce(&mut LegView)) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(leg) = state.legs.iter_mut().rev().find(|leg| leg.number == number) {
            change(leg);
        }
    }

    /// Those that are remembered, oldest first.
    #[must_use]
    pub fn all(&self) -> Vec<LegView> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).legs.iter().cloned().collect()
    }

    /// As `GET /debug/legs` shows them: times are milliseconds before now.
    #[must_use]
    pub fn show(&self) -> Value {
        let ago = |at: Instant| at.elapsed().as_secs_f64() * 1000.0;
        let one = |leg: &LegView| {
            json!({
                "number": leg.number, "kind": format!("{:?}", leg.kind).to_lowercase(), "key": leg.key,
                "request_id": leg.request_id, "mark": leg.mark, "began_ms_ago": ago(leg.began),
                "held": leg.held.map(|phase| format!("{phase:?}").to_lowercase()),
                "ended_ms_ago": leg.ended.map(|(at, _)| ago(at)),
                "end": leg.ended.map(|(_, end)| format!("{end:?}").to_lowercase()),
            })
        };
        self.all().iter().map(one).collect()
    }
}
