//! KV cache events and how a vLLM release writes them: arrays of all fields up to 0.23, maps without empty optional
//! fields from 0.24. Which fields exist depends on the release.

use std::borrow::Cow;
use std::str::FromStr;

use super::msgpack::Writer;

/// A vLLM release as far as the event format depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release {
    minor: u16,
    patch: u16,
}

/// Oldest and newest release whose format is known.
const RELEASES: std::ops::RangeInclusive<u16> = 9..=33;

impl Release {
    /// Release 0.`minor`.`patch`.
    #[must_use]
    pub const fn new(minor: u16, patch: u16) -> Self {
        Self { minor, patch }
    }

    /// Replies on the replay socket carry the topic from 0.26.
    #[must_use]
    pub fn replay_has_topic(self) -> bool {
        self >= Self::new(26, 0)
    }

    /// Extra keys enter the hash with a tag from 0.31.
    #[must_use]
    pub fn tags_extra_keys(self) -> bool {
        self >= Self::new(31, 0)
    }

    fn is_map(self) -> bool {
        self >= Self::new(24, 0)
    }

    fn batch_has_rank(self) -> bool {
        self >= Self::new(9, 1)
    }

    /// How many of [`STORED_FIELDS`] exist.
    fn stored_fields(self) -> usize {
        self.fields(&[
            ((33, 0), 15),
            ((30, 0), 14),
            ((29, 0), 13),
            ((26, 0), 12),
            ((22, 0), 11),
            ((20, 0), 9),
            ((17, 0), 8),
            ((14, 0), 7),
            ((10, 2), 6),
            ((0, 0), 5),
        ])
    }

    /// How many of [`REMOVED_FIELDS`] exist.
    fn removed_fields(self) -> usize {
        self.fields(&[((29, 0), 5), ((26, 0), 4), ((20, 0), 3), ((10, 2), 2), ((0, 0), 1)])
    }

    fn fields(self, since: &[((u16, u16), usize)]) -> usize {
        let found = since.iter().find(|((minor, patch), _)| self >= Self::new(*minor, *patch));
        found.map_or(0, |(_, count)| *count)
    }
}

impl FromStr for Release {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut numbers = text.split('.').map(str::parse::<u16>);
        match (numbers.next(), numbers.next(), numbers.next(), numbers.next()) {
            (Some(Ok(0)), Some(Ok(minor)), None, None) if RELEASES.contains(&minor) => Ok(Self::new(minor, 0)),
            (Some(Ok(0)), Some(Ok(minor)), Some(Ok(patch)), None) if RELEASES.contains(&minor) => {
                Ok(Self::new(minor, patch))
            }
            _ => Err(format!("`{text}` is not a vLLM release from 0.9 to 0.33, such as 0.32 or 0.10.2")),
        }
    }
}

impl std::fmt::Display for Release {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "0.{}.{}", self.minor, self.patch)
    }
}

/// A block's name in an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockHash {
    /// The 64-bit key.
    Key(u64),
    /// The whole digest (`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`).
    Bytes(Vec<u8>),
}

/// One element of a block's `extra_keys`, as published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtraKey {
    /// LoRA name, salt, or an image's identifier before 0.19.
    Text(String),
    /// Digest of prompt embeddings.
    Bytes(Vec<u8>),
    /// An image's identifier and its offset from the block's start.
    Item(String, i64),
}

/// Where blocks lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// `GPU`, `CPU`, or a connector's name for a tier.
    pub medium: Cow<'static, str>,
    /// The group of layers; none where an old connector does not tell it.
    pub group: Option<u64>,
    /// What kind of attention the group has.
    pub kind: Option<Cow<'static, str>>,
    /// Tokens that a sliding window sees.
    pub window: Option<u64>,
    /// `LOCAL` or `REMOTE`.
    pub locality: Option<String>,
    /// Which tier owns the blocks.
    pub ownership: Option<String>,
}

impl Default for Place {
    /// The device cache of a full-attention model.
    fn default() -> Self {
        Self {
            medium: Cow::Borrowed("GPU"),
            group: Some(0),
            kind: Some(Cow::Borrowed("full_attention")),
            window: None,
            locality: None,
            ownership: None,
        }
    }
}

impl Place {
    /// The second group of a hybrid model, whose layers see `window` tokens.
    #[must_use]
    pub fn sliding(window: u64) -> Self {
        let kind = Some(Cow::Borrowed("sliding_window"));
        Self { group: Some(1), kind, window: Some(window), ..Self::default() }
    }

    /// The host tier as an offloading connector of a release names it.
    #[must_use]
    pub fn host(release: Release) -> Self {
        let group = release.is_map().then_some(0);
        Self { medium: Cow::Borrowed("CPU"), group, kind: None, ..Self::default() }
    }
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Consecutive blocks became full.
    Stored(Stored),
    /// One physical block was evicted.
    Removed(BlockHash, Place),
    /// The whole cache was dropped.
    Cleared,
    /// What no engine says: a stored event whose hashes are a string, well-formed MessagePack otherwise.
    Malformed,
}

/// What `BlockStored` says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// The blocks, in order.
    pub hashes: Vec<BlockHash>,
    /// The block before the first; none for the first block of a sequence, and for all of a host tier.
    pub parent: Option<BlockHash>,
    /// Tokens of all blocks; of the whole span where a group skips blocks; none of a host tier.
    pub tokens: Vec<u32>,
    /// Tokens in a block; 0 of a host tier.
    pub block_tokens: u64,
    /// The adapter's number in the engine process.
    pub lora_id: Option<u64>,
    /// Where the blocks lie.
    pub place: Place,
    /// The adapter's name.
    pub lora_name: Option<String>,
    /// Per block, what entered its hash besides tokens.
    pub extra_keys: Option<Vec<Option<Vec<ExtraKey>>>>,
    /// The client's session.
    pub session_id: Option<String>,
    /// Per block, the tokens after it that entered its hash.
    pub lookahead: Option<Vec<Vec<u32>>>,
}

/// Names of `BlockStored` fields in wire order.
const STORED_FIELDS: [&str; 15] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
    "lookahead_token_ids",
];

/// `BlockStored` fields from this one on are left out of a map where they are nil.
const STORED_OPTIONAL_FROM: usize = 7;

/// Names of `BlockRemoved` fields in wire order.
const REMOVED_FIELDS: [&str; 5] = ["block_hashes", "medium", "group_idx", "locality", "ownership"];

/// `BlockRemoved` fields from this one on are left out of a map where they are nil.
const REMOVED_OPTIONAL_FROM: usize = 2;

/// The payload of one batch as `release` writes it. `time` is in Unix seconds.
#[must_use]
pub fn encode_batch(release: Release, time: f64, events: &[Event], rank: Option<u64>) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.array(if release.batch_has_rank() { 3 } else { 2 });
    writer.float(time);
    writer.array(events.len());
    for event in events {
        encode_event(&mut writer, release, event);
    }
    if release.batch_has_rank() {
        match rank {
            Some(rank) => writer.unsigned(rank),
            None => writer.nil(),
        }
    }
    writer.finish()
}

fn encode_event(writer: &mut Writer, release: Release, event: &Event) {
    match event {
        Event::Stored(stored) => {
            let names = &STORED_FIELDS[..release.stored_fields()];
            let present = |field: usize| field < STORED_OPTIONAL_FROM || stored.has(field);
            encode_struct(writer, release, "BlockStored", names, present, |writer, field| stored.encode(writer, field));
        }
        Event::Removed(hash, place) => {
            let names = &REMOVED_FIELDS[..release.removed_fields()];
            let present = |field: usize| match field {
                REMOVED_OPTIONAL_FROM => place.group.is_some(),
                3 => place.locality.is_some(),
                4 => place.ownership.is_some(),
                _ => true,
            };
            encode_struct(writer, release, "BlockRemoved", names, present, |writer, field| match field {
                0 => encode_hashes(writer, std::slice::from_ref(hash)),
                1 => writer.text(&place.medium),
                2 => encode_option(writer, place.group, Writer::unsigned),
                3 => encode_option(writer, place.locality.as_deref(), Writer::text),
                _ => encode_option(writer, place.ownership.as_deref(), Writer::text),
            });
        }
        Event::Malformed => {
            let names = &STORED_FIELDS[..1];
            encode_struct(writer, release, "BlockStored", names, |_| true, |writer, _| writer.text("no list"));
        }
        Event::Cleared => {
            encode_struct(writer, release, "AllBlocksCleared", &[], |_| true, |writer, _| writer.nil());
        }
    }
}

/// Writes one tagged struct; `present` says which fields a map keeps.
fn encode_struct(
    writer: &mut Writer,
    release: Release,
    tag: &str,
    names: &[&str],
    present: impl Fn(usize) -> bool,
    encode: impl Fn(&mut Writer, usize),
) {
    if !release.is_map() {
        writer.array(1 + names.len());
        writer.text(tag);
        (0..names.len()).for_each(|field| encode(writer, field));
        return;
    }
    let kept = 1 + (0..names.len()).filter(|field| present(*field)).count();
    // msgspec reserves the header for all fields before it knows how many it leaves out.
    if 1 + names.len() > 15 {
        writer.map_wide(kept as u16);
    } else {
        writer.map(kept as u8);
    }
    writer.text("type");
    writer.text(tag);
    for (field, name) in names.iter().enumerate().filter(|(field, _)| present(*field)) {
        writer.text(name);
        encode(writer, field);
    }
}

impl Stored {
    /// Whether the optional field at this place has a value.
    fn has(&self, field: usize) -> bool {
        match field {
            7 => self.extra_keys.is_some(),
            8 => self.place.group.is_some(),
            9 => self.place.kind.is_some(),
            10 => self.place.window.is_some(),
            11 => self.place.locality.is_some(),
            12 => self.place.ownership.is_some(),
            13 => self.session_id.is_some(),
            14 => self.lookahead.is_some(),
            _ => false,
        }
    }

    fn encode(&self, writer: &mut Writer, field: usize) {
        match field {
            0 => encode_hashes(writer, &self.hashes),
            1 => encode_option(writer, self.parent.as_ref(), encode_hash),
            2 => encode_tokens(writer, &self.tokens),
            3 => writer.unsigned(self.block_tokens),
            4 => encode_option(writer, self.lora_id, Writer::unsigned),
            5 => writer.text(&self.place.medium),
            6 => encode_option(writer, self.lora_name.as_deref(), Writer::text),
            7 => encode_option(writer, self.extra_keys.as_deref(), encode_extra_keys),
            8 => encode_option(writer, self.place.group, Writer::unsigned),
            9 => encode_option(writer, self.place.kind.as_deref(), Writer::text),
            10 => encode_option(writer, self.place.window, Writer::unsigned),
            11 => encode_option(writer, self.place.locality.as_deref(), Writer::text),
            12 => encode_option(writer, self.place.ownership.as_deref(), Writer::text),
            13 => encode_option(writer, self.session_id.as_deref(), Writer::text),
            14 => encode_option(writer, self.lookahead.as_deref(), |writer, lists| {
                writer.array(lists.len());
                lists.iter().for_each(|tokens| encode_tokens(writer, tokens));
            }),
            _ => writer.nil(),
        }
    }
}

fn encode_extra_keys(writer: &mut Writer, blocks: &[Option<Vec<ExtraKey>>]) {
    writer.array(blocks.len());
    for keys in blocks {
        encode_option(writer, keys.as_deref(), |writer, keys| {
            writer.array(keys.len());
            for key in keys {
                match key {
                    ExtraKey::Text(text) => writer.text(text),
                    ExtraKey::Bytes(bytes) => writer.binary(bytes),
                    ExtraKey::Item(name, offset) => {
                        writer.array(2);
                        writer.text(name);
                        writer.signed(*offset);
                    }
                }
            }
        });
    }
}

fn encode_option<T>(writer: &mut Writer, value: Option<T>, encode: impl FnOnce(&mut Writer, T)) {
    match value {
        Some(value) => encode(writer, value),
        None => writer.nil(),
    }
}

fn encode_hash(writer: &mut Writer, hash: &BlockHash) {
    match hash {
        BlockHash::Key(key) => writer.unsigned(*key),
        BlockHash::Bytes(bytes) => writer.binary(bytes),
    }
}

fn encode_hashes(writer: &mut Writer, hashes: &[BlockHash]) {
    writer.array(hashes.len());
    hashes.iter().for_each(|hash| encode_hash(writer, hash));
}

fn encode_tokens(writer: &mut Writer, tokens: &[u32]) {
    writer.array(tokens.len());
    tokens.iter().for_each(|token| writer.unsigned(u64::from(*token)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{unhex, vectors};
    use serde_json::Value;

    fn number(value: &Value) -> Option<u64> {
        value.as_u64().or_else(|| value["u64"].as_str()?.parse().ok())
    }

    fn hash(value: &Value) -> Option<BlockHash> {
        if let Some(bytes) = value["bytes_hex"].as_str() {
            return Some(BlockHash::Bytes(unhex(bytes)));
        }
        number(value).map(BlockHash::Key)
    }

    fn extra_key(value: &Value) -> ExtraKey {
        if let Some(bytes) = value["bytes_hex"].as_str() {
            return ExtraKey::Bytes(unhex(bytes));
        }
        match value.as_array() {
            Some(item) => ExtraKey::Item(item[0].as_str().unwrap().to_owned(), item[1].as_i64().unwrap()),
            None => ExtraKey::Text(value.as_str().unwrap().to_owned()),
        }
    }

    fn event(value: &Value) -> Option<Event> {
        let strings = |name: &str| value[name].as_str().map(str::to_owned);
        let place = Place {
            medium: strings("medium").map_or(Cow::Borrowed("GPU"), Cow::Owned),
            group: value["group_idx"].as_u64(),
            kind: strings("kv_cache_spec_kind").map(Cow::Owned),
            window: value["kv_cache_spec_sliding_window"].as_u64(),
            locality: strings("locality"),
            ownership: strings("ownership"),
        };
        Some(match value["type"].as_str()? {
            "BlockRemoved" => Event::Removed(hash(&value["block_hashes"][0])?, place),
            "AllBlocksCleared" => Event::Cleared,
            "BlockStored" => Event::Stored(Stored {
                hashes: value["block_hashes"].as_array()?.iter().filter_map(hash).collect(),
                parent: hash(&value["parent_block_hash"]),
                tokens: serde_json::from_value(value["token_ids"].clone()).ok()?,
                block_tokens: value["block_size"].as_u64()?,
                lora_id: number(&value["lora_id"]),
                place,
                lora_name: strings("lora_name"),
                extra_keys: value["extra_keys"].as_array().map(|blocks| {
                    blocks.iter().map(|keys| keys.as_array().map(|keys| keys.iter().map(extra_key).collect())).collect()
                }),
                session_id: strings("session_id"),
                lookahead: serde_json::from_value(value["lookahead_token_ids"].clone()).ok()?,
            }),
            _ => return None,
        })
    }

    #[test]
    fn payloads_are_those_of_the_vectors() {
        let vectors = vectors("vllm_events.json");
        let mut checked = 0;
        for case in vectors["cases"].as_array().expect("the file has cases") {
            let id = case["id"].as_str().expect("a case has an id");
            let release: Release = id.split('/').next().unwrap_or_default().parse().expect("ids begin with a release");
            let input = &case["input"];
            let listed = input["events"].as_array().expect("a batch has events");
            let events: Vec<_> = listed.iter().map(|value| event(value).expect("the event is vLLM's")).collect();
            let time = input["ts"].as_f64().expect("a batch has a time");
            let payload = encode_batch(release, time, &events, input["data_parallel_rank"].as_u64());
            assert_eq!(payload, unhex(case["payload_hex"].as_str().expect("a case has a payload")), "{id}");
            checked += 1;
        }
        assert_eq!(checked, 191, "all payloads");
    }

    #[test]
    fn releases_are_parsed_or_refused() {
        assert_eq!("0.33".parse(), Ok(Release::new(33, 0)));
        assert_eq!("0.10.2".parse(), Ok(Release::new(10, 2)));
        for wrong in ["", "0", "1.2", "0.8", "0.34", "0.33.0.1", "0.x", "0.33.x"] {
            assert!(wrong.parse::<Release>().is_err(), "{wrong}");
        }
    }
}
