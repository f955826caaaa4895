//! Events shown to people: `kvlane events` prints what comes out of here. Nothing of it is on the gateway's way.
//!
//! Messages are decoded by the gateway's own reader, so that what is printed is what the gateway would make of them: an
//! event that it rejects is shown with the gateway's reason and its bytes.

#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use shards::service::Engine;

use super::events::{Batch, Event, Keys, Reject, Removed, Stored};
use super::framing::{self, Framed};
use super::msgpack::{Head, Reader};
use super::poller::Poller;
use super::sockets::{Contexts, Error as SocketError, Frames, Link, Watched};
use super::tokens::Spelling;
use super::trtllm;

/// Bytes of a rejected event that are shown.
const REJECTED_BYTES_MAX: usize = 256;
/// Levels of a nested value that are shown as such; deeper ones are shown as bytes.
const DEPTH_MAX: u32 = 8;

/// One message of a publisher (`topic, sequence, payload`) or of a replay (with an empty frame before), as JSON.
#[must_use]
pub fn message(engine: Engine, frames: &[&[u8]], replayed: bool) -> Value {
    let framed = if replayed { framing::replayed(frames) } else { framing::published(frames) };
    match framed {
        Framed::Batch(seq, bytes) => {
            let topic = frames.len().checked_sub(3).and_then(|place| frames.get(place)).copied().unwrap_or_default();
            let mut shown = Map::new();
            shown.insert("seq".to_owned(), json!(seq));
            shown.insert("topic".to_owned(), json!(String::from_utf8_lossy(topic)));
            shown.extend(payload(engine, bytes));
            Value::Object(shown)
        }
        Framed::End => json!({"replay_end": true}),
        Framed::Malformed => {
            let shown: Vec<String> = frames.iter().map(|frame| hex(cut(frame))).collect();
            json!({"rejected": Reject::Frames.name(), "frames": shown})
        }
    }
}

/// A payload alone: its time, its rank where it names one, and its events.
#[must_use]
pub fn payload(engine: Engine, payload: &[u8]) -> Map<String, Value> {
    let mut shown = Map::new();
    let mut batch = match Batch::open(payload) {
        Ok(batch) => batch,
        Err(why) => {
            shown.insert("rejected".to_owned(), json!(why.name()));
            shown.insert("bytes".to_owned(), json!(hex(cut(payload))));
            return shown;
        }
    };
    shown.insert("time".to_owned(), json!(batch.time));
    let mut events = Vec::new();
    let mut whole = true;
    loop {
        let before = batch.rest();
        let Some(event) = batch.next() else { break };
        events.push(match event {
            Ok(event) => show(engine, &event),
            Err(why) => {
                whole &= why != Reject::Framing;
                let bytes = &before[..before.len() - batch.rest().len()];
                let bytes = if bytes.is_empty() { before } else { bytes };
                json!({"rejected": why.name(), "bytes": hex(cut(bytes))})
            }
        });
    }
    if let Some(rank) = batch.rank().filter(|_| whole) {
        shown.insert("rank".to_owned(), json!(rank));
    }
    shown.insert("events".to_owned(), Value::Array(events));
    shown
}

fn show(engine: Engine, event: &Event<'_>) -> Value {
    match event {
        Event::Stored(stored) => show_stored(engine, stored),
        Event::Removed(Removed { keys, medium, group }) => {
            json!({"type": "BlockRemoved", "keys": show_keys(engine, *keys), "medium": medium, "group": group})
        }
        Event::Cleared => json!({"type": "AllBlocksCleared"}),
    }
}

fn show_stored(engine: Engine, stored: &Stored<'_>) -> Value {
    let mut shown = json!({
        "type": "BlockStored",
        "keys": show_keys(engine, stored.keys),
        "parent": stored.parent.map(|key| show_key(key.0)),
        "block_size": stored.block_tokens,
        "medium": stored.medium,
        "group": stored.group,
        "kind": stored.kind,
    });
    match stored.tokens.spelling() {
        Spelling::Opaque => shown["tokens"] = json!(format!("{} units that are no plain ids", stored.tokens.len())),
        spelling => {
            shown["tokens"] = stored.tokens.ids().collect();
            if spelling == Spelling::Bigrams {
                shown["tokens_spelled"] = json!("bigrams");
            }
        }
    }
    for (name, value) in stored.marks.named() {
        if let Some(wire) = value {
            shown[name] = any(&mut Reader::new(wire), DEPTH_MAX).unwrap_or_else(|| json!({ "$hex": hex(wire) }));
        }
    }
    shown
}

fn show_key(key: u64) -> Value {
    // As text: readers that keep numbers as floating point would round it.
    json!({"u64": key.to_string(), "hex": format!("{key:016x}")})
}

fn show_keys(engine: Engine, keys: Keys<'_>) -> Vec<Value> {
    let show = |head: Head<'_>| match head {
        Head::Uint(key) => show_key(key),
        Head::Negative(key) => show_key(key.cast_unsigned()),
        Head::Bin(digest) => {
            // TensorRT-LLM's digests count by their first eight bytes, the others' by their last.
            let part = if engine == Engine::Trtllm { digest.first_chunk() } else { digest.last_chunk() };
            let mut shown = show_key(part.map_or(0, |part| u64::from_be_bytes(*part)));
            shown["digest"] = json!(hex(digest));
            shown
        }
        _ => Value::Null,
    };
    keys.heads().map(show).collect()
}

/// Any msgpack value; none where it is nested too deep or cannot be shown.
fn any(reader: &mut Reader<'_>, depth: u32) -> Option<Value> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Some(match reader.head().ok()? {
        Head::Nil => Value::Null,
        Head::Uint(number) => json!(number),
        Head::Negative(number) => json!(number),
        Head::Float(number) => json!(number),
        Head::Str(bytes) => json!(text(bytes)),
        Head::Bin(bytes) => json!({ "$hex": hex(bytes) }),
        Head::Array(len) if depth > 0 => {
            (0..len).map(|_| any(reader, depth - 1)).collect::<Option<Vec<_>>>().map(Value::Array)?
        }
        Head::Map(len) if depth > 0 => {
            let mut map = Map::new();
            for _ in 0..len {
                let name = match reader.head().ok()? {
                    Head::Str(name) => text(name),
                    Head::Uint(name) => name.to_string(),
                    _ => return None,
                };
                map.insert(name, any(reader, depth - 1)?);
            }
            Value::Object(map)
        }
        Head::Bool | Head::Ext | Head::Array(_) | Head::Map(_) => return None,
    })
}

fn cut(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.len().min(REJECTED_BYTES_MAX)]
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Why nothing can be listened to.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The address cannot be used.
    #[error("{address}: {reason}")]
    Address {
        /// The address.
        address: String,
        /// What the system says.
        reason: String,
    },
}

/// What was heard.
#[derive(Clone, Debug, PartialEq)]
pub enum Heard {
    /// A live message.
    Live(Value),
    /// A message of the replay.
    Replayed(Value),
    /// The replay is over.
    ReplayEnded,
    /// A publisher is there.
    Connected,
    /// The publisher is gone.
    Lost,
}

/// A subscription of its own, beside the gateway's: publishers send to all subscribers alike.
pub struct Tap {
    engine: Engine,
    topic: Vec<u8>,
    live: Watched,
    replay: Option<Watched>,
    // After the sockets: a context ends once all of its sockets are closed.
    _contexts: Contexts,
    poller: Poller,
    frames: Frames,
}

/// What a [`Tap`] listens to.
#[derive(Clone, Debug)]
pub struct TapFrom<'a> {
    /// Whose events they are.
    pub engine: Engine,
    /// `tcp://HOST:PORT` of the publisher, or of ours.
    pub address: &'a str,
    /// Wait at the address instead of connecting to it.
    pub bind: bool,
    /// Only messages whose topic begins so.
    pub topic: &'a str,
    /// `tcp://HOST:PORT` of a replay socket, and the first sequence number wanted.
    pub replay: Option<(&'a str, u64)>,
}

impl Tap {
    /// Subscribes.
    ///
    /// # Errors
    /// [`TapError`]
    pub fn open(from: &TapFrom<'_>) -> Result<Self, TapError> {
        let failed = |address: &str, error: SocketError| TapError::Address {
            address: address.to_owned(),
            reason: format!("{error}; expected tcp://HOST:PORT"),
        };
        let mut contexts = Contexts::default();
        let live = contexts.subscriber(from.address, from.bind).map_err(|error| failed(from.address, error))?;
        let replay = match from.replay {
            Some((address, seq)) => Some(contexts.replay(&live, address, seq).map_err(|error| failed(address, error))?),
            None => None,
        };
        let poller = Poller::new().map_err(|error| failed(from.address, error.into()))?;
        for socket in [Some(&live), replay.as_ref()].into_iter().flatten() {
            for descriptor in socket.descriptors().map_err(|error| failed(from.address, error))? {
                poller.watch(descriptor, 0).map_err(|error| failed(from.address, error.into()))?;
            }
        }
        let (engine, topic) = (from.engine, from.topic.as_bytes().to_vec());
        Ok(Tap { engine, topic, live, replay, _contexts: contexts, poller, frames: Frames::new() })
    }

    /// What comes next, within a time.
    pub fn next(&mut self, within: Duration) -> Option<Heard> {
        let until = Instant::now() + within;
        self.poller.tick_every(Some(Duration::from_millis(10)));
        let mut ready = Vec::new();
        loop {
            if let Some(heard) = self.take() {
                return Some(heard);
            }
            if Instant::now() >= until {
                return None;
            }
            ready.clear();
            self.poller.wait(false, &mut ready);
        }
    }

    fn take(&mut self) -> Option<Heard> {
        while let Some(link) = self.live.link() {
            match link {
                Link::Ready => return Some(Heard::Connected),
                Link::Closed(_) => return Some(Heard::Lost),
                Link::Opened(_) | Link::Retried => {}
            }
        }
        if let Some(replay) = &self.replay {
            while replay.link().is_some() {}
            if replay.receive(&mut self.frames) {
                let shown = message(self.engine, &self.frames.parts().unwrap_or_default(), true);
                if shown["replay_end"] == true {
                    return Some(Heard::ReplayEnded);
                }
                return Some(Heard::Replayed(shown));
            }
        }
        while self.live.receive(&mut self.frames) {
            let parts = self.frames.parts().unwrap_or_default();
            if parts.first().is_some_and(|topic| topic.starts_with(&self.topic)) {
                return Some(Heard::Live(message(self.engine, &parts, false)));
            }
        }
        None
    }
}

/// Drains a TensorRT-LLM engine once: its events are gone for everybody else then.
///
/// # Errors
/// A text: no answer, or one that is no list of events.
pub fn drain_once(address: SocketAddr) -> Result<Vec<Value>, String> {
    trtllm::drain_once(address)
}

/// The events of a drain's answer.
#[must_use]
pub fn drained(body: &[u8]) -> Vec<Value> {
    trtllm::drained(body)
}

#[cfg(test)]
#[path = "inspect_tests.rs"]
mod tests;
