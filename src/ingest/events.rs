//! Event batches of vLLM, SGLang and TensorRT-LLM's stream: bytes in, borrowed events out.
//!
//! A batch is `[ts, events, rank?]`. An event is an array (vLLM up to 0.23, SGLang up to 0.5.19: tag, then fields by
//! position, as many as that release had) or a map (later ones: fields by name, in any order); both may turn up in one
//! batch. What is missing counts as nil, what is unknown is skipped. The engines agree on names and positions; where
//! vLLM puts the adapter's name, SGLang 0.5.18 has a map with the salt.
//!
//! **Invariant.** Nothing is copied and no input panics. An event that cannot be understood is one
//! [`Reject`], and its neighbours are still read; only where the bytes no longer say where an event ends does the
//! rest of the batch go with it.

#![forbid(unsafe_code)]

use shards::ids::BlockKey;

use super::msgpack::{Head, Malformed, Reader};
use super::tokens::{Spelling, Tokens};

/// Why a frame, a batch or an event was not taken (label `reason` of `loxilb_kv_wire_reject_total`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reject {
    /// Not three frames, or a sequence number that is not eight bytes.
    Frames,
    /// The payload is not `[number, array, …]`.
    Batch,
    /// The payload ends inside an event, or is no msgpack: the rest of the batch is lost.
    Framing,
    /// An event that is neither array nor map, or has no tag.
    Event,
    /// An event whose tag we do not know; newer engines may have such.
    Tag,
    /// A field of another type than the engine's contract says, or a field that must be there and is not.
    Field,
    /// More attention groups than one cache may have.
    Group,
}

impl Reject {
    /// Every reason, in the order of the counters.
    pub const ALL: [Reject; 7] =
        [Reject::Frames, Reject::Batch, Reject::Framing, Reject::Event, Reject::Tag, Reject::Field, Reject::Group];

    /// The label value.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Reject::Frames => "frames",
            Reject::Batch => "batch",
            Reject::Framing => "framing",
            Reject::Event => "event",
            Reject::Tag => "tag",
            Reject::Field => "field",
            Reject::Group => "group",
        }
    }
}

impl From<Malformed> for Reject {
    fn from(malformed: Malformed) -> Self {
        match malformed {
            Malformed::Framing => Reject::Framing,
            Malformed::Type => Reject::Field,
        }
    }
}

/// One event.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event<'a> {
    Stored(Stored<'a>),
    Removed(Removed<'a>),
    Cleared,
}

/// Blocks that became full in one engine step, consecutive and in order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stored<'a> {
    pub(crate) keys: Keys<'a>,
    /// Key of the block before the first; none for the first of a sequence, and for placeholders.
    pub(crate) parent: Option<BlockKey>,
    /// The tokens that the event spans.
    pub(crate) tokens: Tokens<'a>,
    /// Tokens per block of the group; 0 in placeholders.
    pub(crate) block_tokens: u32,
    pub(crate) medium: Option<&'a str>,
    pub(crate) group: u32,
    /// The group's `kv_cache_spec_kind`.
    pub(crate) kind: Option<&'a str>,
    /// What the blocks are beyond their tokens.
    pub(crate) marks: Marks<'a>,
}

/// Blocks that were evicted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Removed<'a> {
    pub(crate) keys: Keys<'a>,
    pub(crate) medium: Option<&'a str>,
    pub(crate) group: u32,
}

/// Block keys still in their wire form, known to be well formed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Keys<'a> {
    wire: &'a [u8],
    len: u32,
    last: Option<BlockKey>,
}

impl<'a> Keys<'a> {
    fn read(reader: &mut Reader<'a>) -> Result<Self, Malformed> {
        let len = reader.array()?;
        let before = reader.rest();
        let mut last = None;
        for _ in 0..len {
            last = Some(key(reader.head()?)?);
        }
        Ok(Keys { wire: &before[..before.len() - reader.rest().len()], len, last })
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// The first key, and its whole digest where the engine sends bytes.
    pub(crate) fn first(&self) -> Option<(BlockKey, Option<&'a [u8]>)> {
        let head = Reader::new(self.wire).head().ok()?;
        let digest = if let Head::Bin(digest) = head { Some(digest) } else { None };
        Some((key(head).ok()?, digest))
    }

    pub(crate) fn last(&self) -> Option<BlockKey> {
        self.last
    }

    /// The keys as the engine sends them.
    pub(crate) fn heads(self) -> impl Iterator<Item = Head<'a>> {
        let mut reader = Reader::new(self.wire);
        std::iter::from_fn(move || reader.head().ok())
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = BlockKey> + 'a {
        let mut reader = Reader::new(self.wire);
        std::iter::from_fn(move || key(reader.head().ok()?).ok())
    }
}

/// What the blocks of a store are beyond their tokens (adapter, images, salt, embeddings), still in its wire form and
/// of any shape.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Marks<'a> {
    lora_id: Option<&'a [u8]>,
    lora_name: Option<&'a [u8]>,
    extra_keys: Option<&'a [u8]>,
    lookahead: Option<&'a [u8]>,
    cache_salt: Option<&'a [u8]>,
    mm_keys: Option<&'a [u8]>,
}

impl<'a> Marks<'a> {
    /// Whether the engine says of every block what it is beyond its tokens (since 0.17): if not, a plain block and
    /// a salted one look alike.
    pub(crate) fn are_told(&self) -> bool {
        self.extra_keys.is_some()
    }

    /// The adapter's name, where it has one.
    pub(crate) fn lora_name(&self) -> Option<&'a str> {
        text(self.lora_name)
    }

    /// The extra keys of each block in turn, as msgpack; none for a plain block. After the end of the list, blocks
    /// are plain.
    pub(crate) fn extra_keys(self) -> impl Iterator<Item = Option<&'a [u8]>> + 'a {
        let mut reader = Reader::new(self.extra_keys.unwrap_or_default());
        let mut left = reader.array().unwrap_or(0);
        std::iter::from_fn(move || {
            left = left.checked_sub(1)?;
            raw(&mut reader).ok()
        })
    }

    /// The salt of the requests that may share the blocks (SGLang since 0.5.18).
    pub(crate) fn cache_salt(&self) -> Option<&'a str> {
        text(self.cache_salt).or_else(|| {
            let mut reader = Reader::new(self.lora_name?);
            let Head::Map(len) = reader.head().ok()? else { return None };
            for _ in 0..len {
                let is_salt = Reader::new(reader.rest()).head() == Ok(Head::Str(b"cache_salt"));
                raw(&mut reader).ok()?;
                let value = raw(&mut reader).ok()?;
                if is_salt {
                    return text(value);
                }
            }
            None
        })
    }

    /// What all the blocks have in common, as bytes; all empty for plain blocks.
    pub(crate) fn adapter(&self) -> [&'a [u8]; 4] {
        [self.lora_id, self.lora_name, self.cache_salt, self.mm_keys].map(Option::unwrap_or_default)
    }

    /// The adapter's name and the salt that all the blocks have in common; none where they have more in common than
    /// these. The adapter's id, where its name stands beside it, says nothing more.
    pub(crate) fn names(&self) -> Option<(Option<&'a str>, Option<&'a str>)> {
        let adapter = self.lora_name();
        let is_named = adapter.is_some() || (self.lora_id.is_none() && self.lora_name.is_none());
        let is_salted = self.cache_salt.is_none() || text(self.cache_salt).is_some();
        (is_named && is_salted && self.mm_keys.is_none()).then(|| (adapter, text(self.cache_salt)))
    }

    /// All of them by the engine's names, as msgpack; none where it says nil or nothing.
    pub(crate) fn named(self) -> [(&'static str, Option<&'a [u8]>); 6] {
        [
            ("lora_id", self.lora_id),
            ("lora_name", self.lora_name),
            ("extra_keys", self.extra_keys),
            ("lookahead_token_ids", self.lookahead),
            ("cache_salt", self.cache_salt),
            ("mm_keys", self.mm_keys),
        ]
    }

    /// The tokens that the first block's hash looks ahead to.
    pub(crate) fn first_lookahead(&self) -> Vec<u32> {
        let mut ids = Vec::new();
        let first = self.lookahead.and_then(|wire| {
            let mut reader = Reader::new(wire);
            reader.array().ok().filter(|len| *len > 0)?;
            Tokens::read(&mut reader).ok()
        });
        if first.is_some_and(|tokens| tokens.decode(&mut ids)) { ids } else { Vec::new() }
    }
}

/// One value of whatever kind, as it is; none for nil.
fn raw<'a>(reader: &mut Reader<'a>) -> Result<Option<&'a [u8]>, Malformed> {
    let before = reader.rest();
    reader.skip()?;
    let value = &before[..before.len() - reader.rest().len()];
    Ok((value != [NIL]).then_some(value))
}

/// The text that a value is.
fn text(value: Option<&[u8]>) -> Option<&str> {
    match Reader::new(value?).head() {
        Ok(Head::Str(text)) => std::str::from_utf8(text).ok(),
        _ => None,
    }
}

/// msgpack's nil.
const NIL: u8 = 0xc0;

/// A block key: an integer (vLLM 0.9's `builtin` hashes are signed), or a digest whose last eight bytes count.
fn key(head: Head<'_>) -> Result<BlockKey, Malformed> {
    match head {
        Head::Uint(key) => Ok(BlockKey(key)),
        Head::Negative(key) => Ok(BlockKey(key.cast_unsigned())),
        Head::Bin(digest) => digest.last_chunk().map(|tail| BlockKey(u64::from_be_bytes(*tail))).ok_or(Malformed::Type),
        _ => Err(Malformed::Type),
    }
}

/// The fields of any event, whichever wire form they came in.
#[derive(Default)]
struct Fields<'a> {
    tag: Option<&'a str>,
    keys: Option<Keys<'a>>,
    parent: Option<BlockKey>,
    tokens: Option<Tokens<'a>>,
    block_tokens: Option<u32>,
    medium: Option<&'a str>,
    group: Option<u32>,
    kind: Option<&'a str>,
    marks: Marks<'a>,
}

#[derive(Clone, Copy)]
enum Field {
    Tag,
    Keys,
    Parent,
    Tokens,
    BlockTokens,
    Medium,
    Group,
    Kind,
    LoraId,
    LoraName,
    ExtraKeys,
    Lookahead,
    CacheSalt,
    MmKeys,
    /// Known or unknown, but of no use here.
    Other,
}

const STORED: &str = "BlockStored";
const REMOVED: &str = "BlockRemoved";
const CLEARED: &str = "AllBlocksCleared";

/// Fields of an array-encoded store by position after the tag; the engine only ever appended to them.
const STORED_FIELDS: [Field; 10] = [
    Field::Keys,
    Field::Parent,
    Field::Tokens,
    Field::BlockTokens,
    Field::LoraId,
    Field::Medium,
    Field::LoraName,
    Field::ExtraKeys,
    Field::Group,
    Field::Kind,
];
const REMOVED_FIELDS: [Field; 3] = [Field::Keys, Field::Medium, Field::Group];

fn field_named(name: &[u8]) -> Field {
    match name {
        b"type" => Field::Tag,
        b"block_hashes" => Field::Keys,
        b"parent_block_hash" => Field::Parent,
        b"token_ids" => Field::Tokens,
        b"block_size" => Field::BlockTokens,
        b"medium" => Field::Medium,
        b"group_idx" => Field::Group,
        b"kv_cache_spec_kind" => Field::Kind,
        b"lora_id" => Field::LoraId,
        b"lora_name" => Field::LoraName,
        b"extra_keys" => Field::ExtraKeys,
        b"lookahead_token_ids" => Field::Lookahead,
        b"cache_salt" => Field::CacheSalt,
        b"mm_keys" => Field::MmKeys,
        _ => Field::Other,
    }
}

impl<'a> Fields<'a> {
    fn read(&mut self, field: Field, reader: &mut Reader<'a>) -> Result<(), Malformed> {
        match field {
            Field::Tag => self.tag = reader.optional_str()?,
            Field::Keys => self.keys = Some(Keys::read(reader)?),
            Field::Parent => {
                self.parent = match reader.head()? {
                    Head::Nil => None,
                    head => Some(key(head)?),
                }
            }
            Field::Tokens => self.tokens = Some(Tokens::read(reader)?),
            Field::BlockTokens => self.block_tokens = reader.optional_u32()?,
            Field::Medium => self.medium = reader.optional_str()?,
            Field::Group => self.group = reader.optional_u32()?,
            Field::Kind => self.kind = reader.optional_str()?,
            Field::LoraId => self.marks.lora_id = raw(reader)?,
            Field::LoraName => self.marks.lora_name = raw(reader)?,
            Field::ExtraKeys => self.marks.extra_keys = raw(reader)?,
            Field::Lookahead => self.marks.lookahead = raw(reader)?,
            Field::CacheSalt => self.marks.cache_salt = raw(reader)?,
            Field::MmKeys => self.marks.mm_keys = raw(reader)?,
            Field::Other => reader.skip()?,
        }
        Ok(())
    }

    fn event(self) -> Result<Event<'a>, Reject> {
        match self.tag.ok_or(Reject::Event)? {
            STORED => Ok(Event::Stored(Stored {
                keys: self.keys.ok_or(Reject::Field)?,
                parent: self.parent,
                tokens: self.tokens.ok_or(Reject::Field)?,
                block_tokens: self.block_tokens.ok_or(Reject::Field)?,
                medium: self.medium,
                group: self.group.unwrap_or(0),
                kind: self.kind,
                marks: self.marks,
            })),
            REMOVED => Ok(Event::Removed(Removed {
                keys: self.keys.ok_or(Reject::Field)?,
                medium: self.medium,
                group: self.group.unwrap_or(0),
            })),
            CLEARED => Ok(Event::Cleared),
            _ => Err(Reject::Tag),
        }
    }
}

fn event<'a>(reader: &mut Reader<'a>) -> Result<Event<'a>, Reject> {
    let mut fields = Fields::default();
    match reader.head()? {
        Head::Map(len) => {
            for _ in 0..len {
                let field = match reader.head()? {
                    Head::Str(name) => field_named(name),
                    Head::Array(_) | Head::Map(_) => return Err(Reject::Event),
                    _ => Field::Other,
                };
                fields.read(field, reader)?;
            }
        }
        Head::Array(len) if len > 0 => {
            let Head::Str(tag) = reader.head()? else { return Err(Reject::Event) };
            fields.tag = std::str::from_utf8(tag).ok();
            let known: &[Field] = match fields.tag {
                Some(STORED) => &STORED_FIELDS,
                Some(REMOVED) => &REMOVED_FIELDS,
                _ => &[],
            };
            for place in 0..len as usize - 1 {
                fields.read(known.get(place).copied().unwrap_or(Field::Other), reader)?;
            }
        }
        _ => return Err(Reject::Event),
    }
    fields.event()
}

/// The events of one batch, in order; what cannot be understood comes as the reason why.
#[derive(Debug)]
pub(crate) struct Batch<'a> {
    reader: Reader<'a>,
    left: u32,
    /// The engine's clock, Unix seconds.
    pub(crate) time: f64,
    /// Values after the events.
    more: u32,
}

impl<'a> Batch<'a> {
    /// Opens a batch (the third ZMQ frame).
    pub(crate) fn open(payload: &'a [u8]) -> Result<Self, Reject> {
        let mut reader = Reader::new(payload);
        let opened = (|| {
            let len = reader.array()?;
            let more = len.checked_sub(2).ok_or(Malformed::Type)?;
            let time = match reader.head()? {
                Head::Float(time) => time,
                Head::Uint(time) => time as f64,
                Head::Negative(time) => time as f64,
                _ => return Err(Malformed::Type),
            };
            Ok((time, reader.array()?, more))
        })();
        opened.map(|(time, left, more)| Batch { reader, left, time, more }).map_err(|_: Malformed| Reject::Batch)
    }

    /// What has not been read.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.reader.rest()
    }

    /// The rank that the batch names after its events; only once all of them were read.
    pub(crate) fn rank(mut self) -> Option<u64> {
        match (self.left, self.more, self.reader.head().ok()?) {
            (0, 1.., Head::Uint(rank)) => Some(rank),
            _ => None,
        }
    }
}

impl<'a> Iterator for Batch<'a> {
    type Item = Result<Event<'a>, Reject>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        let start = self.reader;
        let decoded = event(&mut self.reader);
        if decoded.is_err() {
            // Where the next event begins does not depend on what this one means.
            self.reader = start;
            if self.reader.skip().is_err() {
                self.left = 0;
                return Some(Err(Reject::Framing));
            }
        }
        Some(decoded)
    }
}

/// The property that any payload must have, for tests and fuzz targets: no panic, no more events than bytes, keys as
/// many as announced, and a batch that is cut yields the same events up to the cut.
///
/// # Panics
/// Where the property does not hold.
pub fn check_any_bytes(payload: &[u8]) {
    let Ok(batch) = Batch::open(payload) else { return };
    let whole: Vec<String> = batch.map(|event| format!("{event:?}")).collect();
    assert!(whole.len() <= payload.len());
    for event in Batch::open(payload).into_iter().flatten().flatten() {
        if let Event::Stored(Stored { tokens, marks, .. }) = event {
            let expected = match tokens.spelling() {
                Spelling::Ids => tokens.len() as usize,
                Spelling::Bigrams => tokens.len() as usize + 1,
                Spelling::Opaque => 0,
            };
            assert_eq!(tokens.ids().count(), expected);
            assert!(marks.cache_salt().is_none() || marks.adapter().iter().any(|part| !part.is_empty()));
        }
        if let Event::Stored(Stored { keys, .. }) | Event::Removed(Removed { keys, .. }) = event {
            assert_eq!(keys.iter().count(), keys.len() as usize);
        }
    }
    // Everywhere in a short one, in 64 places of a long one: the time of all of them is quadratic.
    for cut in (0..payload.len()).step_by(payload.len() / 64 + 1) {
        let Ok(batch) = Batch::open(&payload[..cut]) else { continue };
        let part: Vec<_> = batch.collect();
        let understood = part.iter().take_while(|event| event.is_ok()).count();
        for (event, expected) in part.iter().zip(&whole).take(understood) {
            assert_eq!(&format!("{event:?}"), expected);
        }
    }
}

#[cfg(test)]
#[path = "events_tests.rs"]
mod tests;
