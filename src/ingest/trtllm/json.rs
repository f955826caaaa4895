//! The answer of `POST /kv_cache_events`: bytes in, events out.
//!
//! An answer is an array of events, of which some releases nest one level and some entries are null or empty.
//!
//! **Invariant.** No input panics. An event that cannot be understood keeps its number, so that it is no gap, and costs
//! no neighbour; where the bytes end or are no JSON, what stands before is still read.

#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::super::events::Reject;

/// Attention-DP ranks of one engine. Beyond it: the event is rejected.
pub(super) const RANKS_MAX: usize = 64;

/// The engine's own key of a block. Digests count by their first eight bytes, as in its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct EngineKey(pub(crate) u64);

/// How the engine makes its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyAlgo {
    /// `v1_block_key`; absent means it too.
    V1,
    /// `v2_sha256` and `v2_sha256_64`.
    V2,
    /// One we do not know.
    Unknown,
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    /// Its number in the rank's sequence.
    pub(crate) id: u64,
    /// The attention-DP rank.
    pub(crate) rank: u8,
    /// Whose cache it is of; releases up to 1.0 do not say.
    pub(crate) pool: Pool,
    pub(crate) algo: KeyAlgo,
    pub(crate) body: Result<Body, Reject>,
}

/// The part of a cache that serves the same layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pool {
    /// Attention window, tokens.
    pub(crate) window: Option<u64>,
    /// Layer group (V2 manager).
    pub(crate) group: Option<u64>,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    /// The engine started; blocks by cache level.
    Created(Vec<u64>),
    Stored(Stored),
    Removed(Vec<EngineKey>),
    /// A block moved between levels: from, to.
    Updated(EngineKey, Option<(u64, u64)>),
}

/// Blocks in the order of their chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    /// None at the root.
    pub(crate) parent: Option<EngineKey>,
    pub(crate) blocks: Vec<Block>,
}

/// One block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) key: EngineKey,
    /// Its tokens; 0 where something that is no token stands.
    pub(crate) tokens: Vec<u32>,
    /// 0 is device memory, 1 the host's.
    pub(crate) level: u64,
    /// Text alone: no digests among the tokens, no extra ids, no multimodal keys.
    pub(crate) text_only: bool,
    /// `cache_salt`, or an adapter's id where a release says it.
    pub(crate) cache_salt: Option<String>,
    pub(crate) has_lora: bool,
}

/// What an answer held.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Drained {
    pub(crate) events: Vec<Event>,
    /// Entries without a number, and an end that could not be read.
    pub(crate) rejects: Vec<Reject>,
}

impl Drained {
    /// Reads an answer's body.
    pub(crate) fn read(body: &[u8]) -> Drained {
        let mut drained = Drained::default();
        let mut json = serde_json::Deserializer::from_slice(body);
        let read = Entries { drained: &mut drained, nested: false }.deserialize(&mut json).and_then(|()| json.end());
        if let Err(error) = read {
            // A body that is no array at all is an engine's `null` after a fatal error, or not such an engine.
            drained.rejects.push(if error.is_data() { Reject::Batch } else { Reject::Framing });
        }
        drained
    }

    fn entry(&mut self, raw: &RawValue) {
        match event(raw.get()) {
            Ok(Some(event)) => self.events.push(event),
            Ok(None) => {}
            Err(why) => self.rejects.push(why),
        }
    }
}

/// Takes entry after entry, so that those before an error stay.
struct Entries<'d> {
    drained: &'d mut Drained,
    nested: bool,
}

impl<'de> DeserializeSeed<'de> for Entries<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Entries<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        while let Some(raw) = entries.next_element::<&'de RawValue>()? {
            if !self.nested && raw.get().starts_with('[') {
                let mut inner = serde_json::Deserializer::from_str(raw.get());
                // The inner array is whole, or the outer one could not have been read.
                let nested = Entries { drained: self.drained, nested: true };
                nested.deserialize(&mut inner).map_err(de::Error::custom)?;
            } else {
                self.drained.entry(raw);
            }
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct WireEvent<'a> {
    event_id: Option<u64>,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
    window_size: Option<u64>,
    attention_dp_rank: Option<u64>,
    #[serde(borrow)]
    hash_algo: Option<Cow<'a, str>>,
    layer_group_id: Option<u64>,
}

#[derive(Deserialize)]
struct Tag<'a> {
    #[serde(borrow, rename = "type")]
    name: Cow<'a, str>,
}

#[derive(Deserialize)]
struct WireCreated {
    num_blocks_per_cache_level: Vec<u64>,
}

#[derive(Deserialize)]
struct WireStored {
    parent_hash: Option<EngineKey>,
    blocks: Vec<WireBlock>,
}

#[derive(Deserialize)]
struct WireBlock {
    block_hash: EngineKey,
    tokens: WireTokens,
    cache_level: Option<u64>,
    #[serde(default)]
    mm_keys: Option<Vec<IgnoredAny>>,
    #[serde(default)]
    cache_salt: Option<String>,
    #[serde(default)]
    lora_id: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct WireRemoved {
    block_hashes: Vec<EngineKey>,
}

#[derive(Deserialize)]
struct WireUpdated {
    block_hash: EngineKey,
    cache_level: Option<WireDiff>,
}

#[derive(Deserialize)]
struct WireDiff {
    new_value: u64,
    old_value: u64,
}

/// One entry; none where it is empty.
fn event(text: &str) -> Result<Option<Event>, Reject> {
    if text == "null" {
        return Ok(None);
    }
    let wire: WireEvent<'_> = serde_json::from_str(text).map_err(|_| Reject::Event)?;
    let id = match (wire.event_id, wire.data) {
        (Some(id), _) => id,
        (None, None) => return Ok(None),
        (None, Some(_)) => return Err(Reject::Event),
    };
    let rank = wire.attention_dp_rank.unwrap_or(0);
    let rank = u8::try_from(rank).ok().filter(|rank| usize::from(*rank) < RANKS_MAX).ok_or(Reject::Group)?;
    let algo = match wire.hash_algo.as_deref() {
        None | Some("v1_block_key") => KeyAlgo::V1,
        Some("v2_sha256" | "v2_sha256_64") => KeyAlgo::V2,
        Some(_) => KeyAlgo::Unknown,
    };
    // Some hold the body at the top level.
    let body = body(wire.data.map_or(text, RawValue::get));
    Ok(Some(Event { id, rank, pool: Pool { window: wire.window_size, group: wire.layer_group_id }, algo, body }))
}

fn body(text: &str) -> Result<Body, Reject> {
    fn read<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, Reject> {
        serde_json::from_str(text).map_err(|_| Reject::Field)
    }
    let tag: Tag<'_> = serde_json::from_str(text).map_err(|_| Reject::Event)?;
    match tag.name.as_ref() {
        "created" => read(text).map(|created: WireCreated| Body::Created(created.num_blocks_per_cache_level)),
        "stored" => read(text).map(|stored: WireStored| {
            // 0 is what the root's hash starts from.
            let parent = stored.parent_hash.filter(|parent| parent.0 != 0);
            Body::Stored(Stored { parent, blocks: stored.blocks.into_iter().map(Block::from).collect() })
        }),
        "removed" => read(text).map(|removed: WireRemoved| Body::Removed(removed.block_hashes)),
        "updated" => read(text).map(|updated: WireUpdated| {
            Body::Updated(updated.block_hash, updated.cache_level.map(|diff| (diff.old_value, diff.new_value)))
        }),
        _ => Err(Reject::Tag),
    }
}

impl From<WireBlock> for Block {
    fn from(wire: WireBlock) -> Self {
        Block {
            key: wire.block_hash,
            text_only: wire.tokens.text_only && wire.mm_keys.is_none_or(|keys| keys.is_empty()),
            tokens: wire.tokens.ids,
            level: wire.cache_level.unwrap_or(0),
            cache_salt: wire.cache_salt.filter(|salt| !salt.is_empty()),
            has_lora: wire.lora_id.is_some(),
        }
    }
}

impl<'de> Deserialize<'de> for EngineKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;
        impl Visitor<'_> for Read {
            type Value = EngineKey;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an unsigned 64-bit number or a digest of 64 hexadecimal digits")
            }

            fn visit_u64<E>(self, key: u64) -> Result<EngineKey, E> {
                Ok(EngineKey(key))
            }

            fn visit_str<E: de::Error>(self, digest: &str) -> Result<EngineKey, E> {
                let whole = digest.len() == 64 && digest.bytes().all(|digit| digit.is_ascii_hexdigit());
                let head = digest.get(..16).filter(|_| whole).and_then(|head| u64::from_str_radix(head, 16).ok());
                head.map(EngineKey).ok_or_else(|| E::invalid_value(de::Unexpected::Str(digest), &self))
            }
        }
        deserializer.deserialize_any(Read)
    }
}

/// The tokens of a block.
struct WireTokens {
    ids: Vec<u32>,
    text_only: bool,
}

impl<'de> Deserialize<'de> for WireTokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = WireTokens;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array of tokens")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut tokens: A) -> Result<WireTokens, A::Error> {
                let mut read = WireTokens { ids: Vec::new(), text_only: true };
                while let Some(token) = tokens.next_element::<WireToken>()? {
                    read.ids.push(token.id.unwrap_or(0));
                    read.text_only &= token.id.is_some() && !token.has_extra;
                }
                Ok(read)
            }
        }
        deserializer.deserialize_seq(Read)
    }
}

struct WireToken {
    /// None: a digest, or a number that is no token.
    id: Option<u32>,
    has_extra: bool,
}

impl<'de> Deserialize<'de> for WireToken {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = WireToken;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a token")
            }

            fn visit_u64<E>(self, id: u64) -> Result<WireToken, E> {
                Ok(WireToken { id: u32::try_from(id).ok(), has_extra: false })
            }

            fn visit_str<E>(self, _: &str) -> Result<WireToken, E> {
                Ok(WireToken { id: None, has_extra: false })
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<WireToken, A::Error> {
                let mut token: Option<WireToken> = None;
                let mut extra = None;
                while let Some(name) = fields.next_key::<Cow<'de, str>>()? {
                    match name.as_ref() {
                        "token_id" => token = Some(fields.next_value()?),
                        "token_extra_id" => extra = fields.next_value::<Option<u64>>()?,
                        _ => _ = fields.next_value::<IgnoredAny>()?,
                    }
                }
                let token = token.ok_or_else(|| de::Error::missing_field("token_id"))?;
                Ok(WireToken { has_extra: extra.is_some_and(|extra| extra != 0), ..token })
            }
        }
        deserializer.deserialize_any(Read)
    }
}

/// The property that any answer must have, for tests and fuzz targets: no panic in reading or applying it, and an answer
/// that is cut anywhere yields the same events up to the cut.
///
/// # Panics
/// Where the property does not hold.
pub fn check_any_json(body: &[u8]) {
    let whole = Drained::read(body);
    assert!(whole.events.len() + whole.rejects.len() <= body.len() + 1);
    super::state::check_any_events(&whole.events);
    for cut in [body.len() / 3, body.len() / 2, body.len().saturating_sub(1)] {
        let part = Drained::read(&body[..cut]);
        assert!(whole.events.starts_with(&part.events) || !whole.rejects.is_empty());
    }
}
