//! Faults on command: what `POST /debug/fault` and `--fault` accept.
//!
//! `{"fault": NAME, "value": …, "rank": N}`; a command line may say `NAME` or `NAME=VALUE`. Without a rank all ranks
//! are meant; `"mark": TEXT` says for which requests a `leg` goes wrong.

use std::str::FromStr;

use clap::ValueEnum as _;
use serde::Deserialize;
use serde_json::{Value, json};

use super::hash::vllm::Algo;

/// Tokens of a huge batch where no number is given.
const HUGE_TOKENS: u64 = 200_000;

/// How the health check behaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// 200 at once.
    #[default]
    Well,
    /// No answer.
    Stalled,
    /// 503.
    Failing,
}

/// Where in a request something goes wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Its body is read, nothing is done yet.
    #[default]
    Arrival,
    /// The prompt is computed, nothing of an answer is written.
    Computing,
    /// Some of the answer is written.
    Answering,
}

/// What goes wrong with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// It is answered with the status; once its answer is begun, this is [`Action::Die`].
    Status,
    /// Nothing more happens until the client leaves, or another order is given for requests of its mark.
    Hang,
    /// The connection breaks.
    Die,
    /// The answer ends in good order before its end.
    End,
    /// It pauses for `ms`; while it is answered, before every piece.
    Slow,
}

/// A fault of requests for answers, by `{"fault": "leg", "value": {"action": …, "phase": …}}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LegFault {
    /// What.
    pub action: Action,
    /// When.
    #[serde(default)]
    pub phase: Phase,
    /// The status of [`Action::Status`].
    #[serde(default = "internal_error")]
    pub status: u16,
    /// The pause of [`Action::Slow`].
    #[serde(default)]
    pub ms: u64,
    /// Pieces of the answer that are written before it goes wrong, in [`Phase::Answering`].
    #[serde(default = "one")]
    pub after: u64,
    /// How many requests suffer it; 0 for all.
    #[serde(default)]
    pub times: u64,
}

impl LegFault {
    /// What goes wrong when, with every request: a status is 500, an answer's first piece is written, pauses are none.
    #[must_use]
    pub const fn new(action: Action, phase: Phase) -> Self {
        LegFault { action, phase, status: 500, ms: 0, after: 1, times: 0 }
    }
}

fn internal_error() -> u16 {
    500
}

fn one() -> u64 {
    1
}

/// One thing that goes wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The next batches of events do not reach subscribers; `lost`: nor the replay buffer.
    Drop {
        /// Whose.
        rank: Option<u16>,
        /// How many.
        batches: u64,
        /// Whether replay lacks them too.
        lost: bool,
    },
    /// The rank starts over: empty cache, numbers from 0, running requests broken.
    Restart {
        /// Which.
        rank: Option<u16>,
    },
    /// The cache is dropped and that is told: by vLLM with its next step.
    Clear {
        /// Whose.
        rank: Option<u16>,
    },
    /// No event is published, as long as it is on.
    Silence {
        /// Whose.
        rank: Option<u16>,
        /// Whether it begins or ends.
        on: bool,
    },
    /// The next batch holds, between its events, one that cannot be read; `payload`: it is preceded by a batch that is
    /// no MessagePack at all.
    Malformed {
        /// Whose.
        rank: Option<u16>,
        /// Whether a whole payload is broken instead.
        payload: bool,
    },
    /// The engine says that its cache is empty, and it is not.
    PhantomClear {
        /// Which.
        rank: Option<u16>,
    },
    /// One batch of so many tokens, in blocks that the cache then holds.
    Huge {
        /// Whose.
        rank: Option<u16>,
        /// How many.
        tokens: usize,
    },
    /// The engine starts over with another block size.
    BlockSize(usize),
    /// The engine starts over with another seed.
    Seed(String),
    /// The engine starts over with another algorithm.
    Algorithm(Algo),
    /// Chats are rendered by another template.
    Template(String),
    /// The model has another name.
    Model(String),
    /// Somebody else drains the events too (TensorRT-LLM).
    SecondDrainer(bool),
    /// The health check stalls or fails.
    Health(Health),
    /// Requests for answers go wrong.
    Leg {
        /// Those with this mark; none: those that have no order of their own.
        mark: Option<String>,
        /// How; none: no longer.
        fault: Option<LegFault>,
    },
}

/// A fault as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Order {
    fault: String,
    #[serde(default)]
    value: Value,
    rank: Option<u16>,
    #[serde(default)]
    lost: bool,
    #[serde(default)]
    mark: Option<String>,
}

impl Fault {
    /// Reads the JSON form.
    ///
    /// # Errors
    /// What is wrong with which member.
    pub fn from_json(text: &[u8]) -> Result<Self, String> {
        let order: Order = serde_json::from_slice(text).map_err(|error| format!("not a fault: {error}"))?;
        order.read()
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with('{') {
            return Self::from_json(text.as_bytes());
        }
        let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
        let value = value.map_or(Value::Null, |value| serde_json::from_str(value).unwrap_or_else(|_| json!(value)));
        Order { fault: name.to_owned(), value, rank: None, lost: false, mark: None }.read()
    }
}

impl Order {
    fn read(self) -> Result<Fault, String> {
        let rank = self.rank;
        Ok(match self.fault.as_str() {
            "drop" => Fault::Drop { rank, batches: self.number(1)?, lost: self.lost },
            "restart" => Fault::Restart { rank },
            "clear" => Fault::Clear { rank },
            "silence" => Fault::Silence { rank, on: self.flag()? },
            "malformed" => Fault::Malformed { rank, payload: self.choice("event", &["event", "payload"])? == 1 },
            "phantom_clear" => Fault::PhantomClear { rank },
            "huge" => Fault::Huge { rank, tokens: self.number(HUGE_TOKENS)? as usize },
            "block_size" => Fault::BlockSize(self.number(0)? as usize),
            "seed" => Fault::Seed(self.text()?),
            "algorithm" => Fault::Algorithm(Algo::from_str(&self.text()?, false)?),
            "template" => Fault::Template(self.text()?),
            "model" => Fault::Model(self.text()?),
            "second_drainer" => Fault::SecondDrainer(self.flag()?),
            "health" => Fault::Health(match self.choice("stall", &["ok", "stall", "fail"])? {
                0 => Health::Well,
                1 => Health::Stalled,
                _ => Health::Failing,
            }),
            "leg" => {
                let fault: Result<Option<LegFault>, _> = serde_json::from_value(self.value.clone());
                let fault = fault.map_err(|error| self.wrong(&format!("an object with an action ({error})")))?;
                Fault::Leg { mark: self.mark.clone(), fault }
            }
            other => {
                return Err(format!(
                    "no fault `{other}`; there are drop, restart, clear, silence, malformed, phantom_clear, huge, \
                     block_size, seed, algorithm, template, model, second_drainer, health, leg"
                ));
            }
        })
    }

    fn wrong(&self, expected: &str) -> String {
        format!("`{}`: the value is {expected}, not {}", self.fault, self.value)
    }

    fn number(&self, default: u64) -> Result<u64, String> {
        match &self.value {
            Value::Null => Ok(default),
            value => value.as_u64().ok_or_else(|| self.wrong("a whole number")),
        }
    }

    fn flag(&self) -> Result<bool, String> {
        match self.value {
            Value::Null => Ok(true),
            Value::Bool(on) => Ok(on),
            _ => Err(self.wrong("true or false")),
        }
    }

    /// A string, or what a command line made a number of.
    fn text(&self) -> Result<String, String> {
        match &self.value {
            Value::String(text) => Ok(text.clone()),
            Value::Number(number) => Ok(number.to_string()),
            _ => Err(self.wrong("a string")),
        }
    }

    fn choice(&self, default: &str, of: &[&str]) -> Result<usize, String> {
        let asked = if self.value.is_null() { Some(default) } else { self.value.as_str() };
        let place = asked.and_then(|asked| of.iter().position(|name| *name == asked));
        place.ok_or_else(|| self.wrong(&format!("one of {}", of.join(", "))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Fault, String> {
        text.parse()
    }

    #[test]
    fn the_command_line_s_forms_are_those_of_the_request() {
        let same = [
            ("drop", r#"{"fault": "drop"}"#),
            ("drop=3", r#"{"fault": "drop", "value": 3}"#),
            ("seed=7", r#"{"fault": "seed", "value": "7"}"#),
            ("algorithm=xxhash", r#"{"fault": "algorithm", "value": "xxhash"}"#),
            ("silence=false", r#"{"fault": "silence", "value": false}"#),
        ];
        for (short, long) in same {
            assert_eq!(read(short), Fault::from_json(long.as_bytes()), "{short}");
            assert!(read(short).is_ok(), "{short}");
        }
        let ranked = r#"{"fault": "drop", "value": 2, "rank": 1, "lost": true}"#;
        assert_eq!(read(ranked), Ok(Fault::Drop { rank: Some(1), batches: 2, lost: true }));
        assert_eq!(read("huge"), Ok(Fault::Huge { rank: None, tokens: 200_000 }));
        let leg = r#"{"fault": "leg", "mark": "a", "value": {"action": "hang", "phase": "computing"}}"#;
        let hang = LegFault::new(Action::Hang, Phase::Computing);
        assert_eq!(read(leg), Ok(Fault::Leg { mark: Some("a".to_owned()), fault: Some(hang) }));
        assert_eq!(read("leg"), Ok(Fault::Leg { mark: None, fault: None }));
    }

    #[test]
    fn what_is_no_fault_is_refused_with_what_would_be() {
        for (text, named) in [
            ("fire", "phantom_clear"),
            ("drop=many", "whole number"),
            ("algorithm=md5", "md5"),
            ("health=ill", "ok, stall, fail"),
            ("silence=1", "true or false"),
            ("template", "a string"),
            (r#"{"fault": "drop", "extra": 1}"#, "extra"),
        ] {
            let error = read(text).expect_err(text);
            assert!(error.contains(named), "{error}");
        }
    }
}
