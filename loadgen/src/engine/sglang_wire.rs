//! SGLang's KV events: arrays up to 0.5.19, maps without empty optional fields from 0.5.20. Block names are signed.

use std::str::FromStr;

use super::msgpack::Writer;

/// An SGLang release 0.5.x as far as formats and hashes depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SglangRelease(u16);

impl SglangRelease {
    /// Release 0.5.`patch`.
    #[must_use]
    pub const fn new(patch: u16) -> Self {
        Self(patch)
    }

    fn has_medium(self) -> bool {
        self.0 >= 9
    }

    /// A node's removals are one event.
    #[must_use]
    pub fn merges_removals(self) -> bool {
        self.0 >= 15
    }

    /// `cache_salt` enters the hash and the event, and adjacent stores are one event.
    #[must_use]
    pub fn salts_and_coalesces(self) -> bool {
        self.0 >= 18
    }

    fn is_map(self) -> bool {
        self.0 >= 20
    }

    /// Replies on the replay socket carry the topic, and its port is advertised.
    #[must_use]
    pub fn replay_has_topic(self) -> bool {
        self.0 >= 22
    }

    /// Blocks of a named adapter have names of their own.
    #[must_use]
    pub fn names_loras(self) -> bool {
        self.0 >= 23
    }

    /// `/server_info` describes the publisher.
    #[must_use]
    pub fn describes_events(self) -> bool {
        self.0 >= 13
    }
}

impl FromStr for SglangRelease {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let patch = text.strip_prefix("0.5.").and_then(|patch| patch.parse().ok());
        let known = patch.filter(|patch| (7..=23).contains(patch));
        known.map(Self).ok_or_else(|| format!("`{text}` is not an SGLang release from 0.5.7 to 0.5.23"))
    }
}

impl std::fmt::Display for SglangRelease {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "0.5.{}", self.0)
    }
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Consecutive pages were filled.
    Stored(Stored),
    /// Pages were evicted from a medium.
    Removed {
        /// Their names.
        hashes: Vec<i64>,
        /// `GPU` or `CPU_PINNED`; none: as an old release.
        medium: Option<String>,
    },
    /// Everything was dropped, on every medium.
    Cleared,
    /// What no engine says: a stored event whose hashes are a string.
    Malformed,
}

/// What `BlockStored` says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// The pages, in order.
    pub hashes: Vec<i64>,
    /// The page before the first.
    pub parent: Option<i64>,
    /// Tokens of all pages, with one more where pages hold pairs.
    pub tokens: Vec<u32>,
    /// Whether pages hold pairs of neighbours.
    pub bigrams: bool,
    /// Units in a page.
    pub block_tokens: u64,
    /// Where the pages lie.
    pub medium: Option<String>,
    /// The salt that entered the hash.
    pub cache_salt: Option<String>,
    /// The client's session.
    pub session_id: Option<String>,
    /// The adapter's name.
    pub lora_name: Option<String>,
}

/// The payload of one batch. `time` is in Unix seconds.
#[must_use]
pub fn encode_batch(release: SglangRelease, time: f64, events: &[Event], rank: Option<u64>) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.array(3);
    writer.float(time);
    writer.array(events.len());
    events.iter().for_each(|event| encode_event(&mut writer, release, event));
    match rank {
        Some(rank) => writer.unsigned(rank),
        None => writer.nil(),
    }
    writer.finish()
}

fn encode_event(writer: &mut Writer, release: SglangRelease, event: &Event) {
    match event {
        Event::Stored(stored) if release.is_map() => stored.encode_map(writer, release),
        Event::Stored(stored) => stored.encode_array(writer, release),
        Event::Removed { hashes, medium } => {
            let present = release.has_medium() && (medium.is_some() || !release.is_map());
            head(writer, release, "BlockRemoved", 1 + usize::from(present));
            name(writer, release, "block_hashes");
            encode_hashes(writer, hashes);
            if present {
                name(writer, release, "medium");
                text_or_nil(writer, medium.as_deref());
            }
        }
        Event::Cleared => head(writer, release, "AllBlocksCleared", 0),
        Event::Malformed => {
            head(writer, release, "BlockStored", 1);
            name(writer, release, "block_hashes");
            writer.text("no list");
        }
    }
}

/// Opens an event with `fields` fields besides its type.
fn head(writer: &mut Writer, release: SglangRelease, tag: &str, fields: usize) {
    if release.is_map() {
        writer.map(1 + fields as u8);
    } else {
        writer.array(1 + fields);
    }
    name(writer, release, "type");
    writer.text(tag);
}

fn name(writer: &mut Writer, release: SglangRelease, name: &str) {
    if release.is_map() {
        writer.text(name);
    }
}

fn text_or_nil(writer: &mut Writer, text: Option<&str>) {
    match text {
        Some(text) => writer.text(text),
        None => writer.nil(),
    }
}

fn encode_hashes(writer: &mut Writer, hashes: &[i64]) {
    writer.array(hashes.len());
    hashes.iter().for_each(|hash| writer.signed(*hash));
}

impl Stored {
    /// The five fields that every release has, with their names where events are maps.
    fn encode_common(&self, writer: &mut Writer, release: SglangRelease) {
        name(writer, release, "block_hashes");
        encode_hashes(writer, &self.hashes);
        name(writer, release, "parent_block_hash");
        match self.parent {
            Some(parent) => writer.signed(parent),
            None => writer.nil(),
        }
        name(writer, release, "token_ids");
        let token = |writer: &mut Writer, token: u32| writer.unsigned(u64::from(token));
        if self.bigrams {
            writer.array(self.tokens.len().saturating_sub(1));
            for pair in self.tokens.windows(2) {
                writer.array(2);
                pair.iter().for_each(|id| token(writer, *id));
            }
        } else {
            writer.array(self.tokens.len());
            self.tokens.iter().for_each(|id| token(writer, *id));
        }
        name(writer, release, "block_size");
        writer.unsigned(self.block_tokens);
        name(writer, release, "lora_id");
        writer.nil();
    }

    fn encode_array(&self, writer: &mut Writer, release: SglangRelease) {
        let salt = self.cache_salt.as_deref().filter(|_| release.salts_and_coalesces());
        head(writer, release, "BlockStored", 5 + usize::from(release.has_medium()) + usize::from(salt.is_some()));
        self.encode_common(writer, release);
        if release.has_medium() {
            text_or_nil(writer, self.medium.as_deref());
        }
        if let Some(salt) = salt {
            writer.map(1);
            writer.text("cache_salt");
            writer.text(salt);
        }
    }

    fn encode_map(&self, writer: &mut Writer, release: SglangRelease) {
        let optional = [
            ("medium", self.medium.as_deref()),
            ("cache_salt", self.cache_salt.as_deref()),
            ("session_id", self.session_id.as_deref()),
            ("lora_name", self.lora_name.as_deref().filter(|_| release.replay_has_topic())),
        ];
        head(writer, release, "BlockStored", 5 + optional.iter().filter(|(_, value)| value.is_some()).count());
        self.encode_common(writer, release);
        for (name, value) in optional {
            if let Some(value) = value {
                writer.text(name);
                writer.text(value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{hex, vectors};
    use serde_json::Value;

    fn event(value: &Value) -> Event {
        // Array events of old releases are told by place, map events by name.
        const FIELDS: [&str; 7] =
            ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"];
        let removed = value[0] == "BlockRemoved";
        let place = |name: &str| match (removed, name) {
            (true, "medium") => 2,
            _ => FIELDS.iter().position(|field| *field == name).unwrap_or(7),
        };
        let field = |name: &str| match value {
            Value::Array(items) if place(name) == 7 => items.get(7).map_or(Value::Null, |rest| rest[name].clone()),
            Value::Array(items) => items.get(place(name)).cloned().unwrap_or_default(),
            map => map[name].clone(),
        };
        let text = |name: &str| field(name).as_str().map(str::to_owned);
        let hashes = || serde_json::from_value(field("block_hashes")).expect("hashes fit 64 bits");
        match field("type").as_str() {
            Some("AllBlocksCleared") => Event::Cleared,
            Some("BlockRemoved") => Event::Removed { hashes: hashes(), medium: text("medium") },
            _ => {
                let units = field("token_ids");
                let pairs: Option<Vec<[u32; 2]>> = serde_json::from_value(units.clone()).ok();
                let tokens = match &pairs {
                    Some(pairs) => pairs.iter().map(|p| p[0]).chain(pairs.last().map(|p| p[1])).collect(),
                    None => serde_json::from_value(units).expect("token ids fit 32 bits"),
                };
                Event::Stored(Stored {
                    hashes: hashes(),
                    parent: field("parent_block_hash").as_i64(),
                    tokens,
                    bigrams: pairs.is_some(),
                    block_tokens: field("block_size").as_u64().expect("a size"),
                    medium: text("medium"),
                    cache_salt: text("cache_salt"),
                    session_id: text("session_id"),
                    lora_name: text("lora_name"),
                })
            }
        }
    }

    #[test]
    fn payloads_are_those_of_the_vectors() {
        let vectors = vectors("sglang_events.json");
        let mut checked = 0;
        for case in vectors["cases"].as_array().expect("the file has cases") {
            let id = case["id"].as_str().expect("a case has an id");
            // A range of releases reaches into those simulated exactly if its last one is.
            let until = case["sglang_until"].as_str().and_then(|until| until.parse::<SglangRelease>().ok());
            let (Some(release), "msgpack") = (until, case["kind"].as_str().unwrap_or_default()) else { continue };
            let decoded = &case["decoded_generic"];
            let payload = if id.starts_with("KVEventBatch") {
                let events: Vec<Event> = decoded[1].as_array().expect("events").iter().map(event).collect();
                encode_batch(release, decoded[0].as_f64().expect("a time"), &events, decoded[2].as_u64())
            } else if id.starts_with("LoadStat") {
                continue;
            } else {
                let mut writer = Writer::default();
                encode_event(&mut writer, release, &event(decoded));
                writer.finish()
            };
            assert_eq!(hex(&payload), case["payload_hex"], "{id}");
            checked += 1;
        }
        assert_eq!(checked, 73, "payloads of 0.5.7 and later");
    }

    #[test]
    fn releases_are_parsed_or_refused() {
        assert_eq!("0.5.23".parse(), Ok(SglangRelease::new(23)));
        for wrong in ["", "0.5", "0.5.6", "0.5.24", "0.4.9", "1.0"] {
            assert!(wrong.parse::<SglangRelease>().is_err(), "{wrong}");
        }
    }
}
