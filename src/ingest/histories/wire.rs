//! What engines write: events as msgpack, in the forms that releases have had, written by hand from their description.

use super::chance::Chance;

/// The form of an engine's events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    /// vLLM before 0.17: arrays, and not a word on what a block is beyond its tokens.
    Arrays,
    /// vLLM since 0.24: maps, in any order.
    Maps,
    /// SGLang: arrays with keys as signed integers.
    Sglang,
}

/// A store.
#[derive(Clone, Debug)]
pub(super) struct Store {
    pub(super) keys: Vec<u64>,
    pub(super) parent: Option<u64>,
    pub(super) tokens: Vec<u32>,
    pub(super) block: u32,
    pub(super) group: u32,
    pub(super) kind: Option<&'static str>,
    pub(super) medium: &'static str,
    /// The salt of the first block.
    pub(super) salt: Option<&'static str>,
}

fn uint(bytes: &mut Vec<u8>, value: u64) {
    match value {
        0..=0x7f => bytes.push(value as u8),
        0x80..=0xffff => {
            bytes.push(0xcd);
            bytes.extend_from_slice(&(value as u16).to_be_bytes());
        }
        0x1_0000..=0xffff_ffff => {
            bytes.push(0xce);
            bytes.extend_from_slice(&(value as u32).to_be_bytes());
        }
        _ => {
            bytes.push(0xcf);
            bytes.extend_from_slice(&value.to_be_bytes());
        }
    }
}

fn text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend_from_slice(&[0xd9, text.len() as u8]);
    bytes.extend_from_slice(text.as_bytes());
}

fn array(bytes: &mut Vec<u8>, len: usize) {
    bytes.push(0xdc);
    bytes.extend_from_slice(&(len as u16).to_be_bytes());
}

const NIL: u8 = 0xc0;

impl Style {
    fn key(self, bytes: &mut Vec<u8>, key: u64) {
        match self {
            Style::Sglang => {
                bytes.push(0xd3);
                bytes.extend_from_slice(&key.cast_signed().to_be_bytes());
            }
            Style::Arrays => uint(bytes, key),
            // A digest, of which the last eight bytes count.
            Style::Maps => {
                bytes.extend_from_slice(&[0xc4, 32]);
                bytes.extend_from_slice(&[0xab; 24]);
                bytes.extend_from_slice(&key.to_be_bytes());
            }
        }
    }

    fn keys(self, bytes: &mut Vec<u8>, keys: &[u64]) {
        array(bytes, keys.len());
        keys.iter().for_each(|key| self.key(bytes, *key));
    }

    fn fields(self, fields: Vec<(&str, Vec<u8>)>, tag: &str, chance: &mut Chance) -> Vec<u8> {
        let mut bytes = Vec::new();
        if self != Style::Maps {
            array(&mut bytes, fields.len() + 1);
            text(&mut bytes, tag);
            fields.iter().for_each(|(_, value)| bytes.extend_from_slice(value));
            return bytes;
        }
        let mut fields = fields;
        let mut value = Vec::new();
        text(&mut value, tag);
        fields.push(("type", value));
        if chance.one_in(3) {
            fields.push(("of a later release", b"\x82\x01\x92\xc0\xc3\xa1x\x90".to_vec()));
        }
        let first = chance.below(fields.len());
        fields.rotate_left(first);
        bytes.push(0xde);
        bytes.extend_from_slice(&(fields.len() as u16).to_be_bytes());
        for (name, value) in fields {
            text(&mut bytes, name);
            bytes.extend_from_slice(&value);
        }
        bytes
    }

    /// The event of a store.
    pub(super) fn store(self, store: &Store, chance: &mut Chance) -> Vec<u8> {
        let built = |build: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = Vec::new();
            build(&mut bytes);
            bytes
        };
        let optional = |value: Option<&str>| {
            built(&|bytes| match value {
                Some(value) => text(bytes, value),
                None => bytes.push(NIL),
            })
        };
        let mut fields = vec![
            ("block_hashes", built(&|bytes| self.keys(bytes, &store.keys))),
            (
                "parent_block_hash",
                built(&|bytes| match store.parent {
                    Some(parent) => self.key(bytes, parent),
                    None => bytes.push(NIL),
                }),
            ),
            (
                "token_ids",
                built(&|bytes| {
                    array(bytes, store.tokens.len());
                    store.tokens.iter().for_each(|token| uint(bytes, u64::from(*token)));
                }),
            ),
            ("block_size", built(&|bytes| uint(bytes, u64::from(store.block)))),
            ("lora_id", vec![NIL]),
            ("medium", optional(Some(store.medium))),
        ];
        if self == Style::Maps {
            let extra_keys = built(&|bytes| {
                array(bytes, store.keys.len());
                for place in 0..store.keys.len() {
                    match store.salt.filter(|_| place == 0 && store.parent.is_none()) {
                        Some(salt) => {
                            bytes.push(0x91);
                            text(bytes, salt);
                        }
                        None => bytes.push(NIL),
                    }
                }
            });
            fields.push(("extra_keys", extra_keys));
            fields.push(("group_idx", built(&|bytes| uint(bytes, u64::from(store.group)))));
            fields.push(("kv_cache_spec_kind", optional(store.kind)));
        }
        self.fields(fields, "BlockStored", chance)
    }

    /// The event of a removal.
    pub(super) fn remove(self, keys: &[u64], group: u32, medium: &str, chance: &mut Chance) -> Vec<u8> {
        let (mut hashes, mut place, mut number) = (Vec::new(), Vec::new(), Vec::new());
        self.keys(&mut hashes, keys);
        text(&mut place, medium);
        uint(&mut number, u64::from(group));
        let mut fields = vec![("block_hashes", hashes), ("medium", place)];
        if self == Style::Maps {
            fields.push(("group_idx", number));
        }
        self.fields(fields, "BlockRemoved", chance)
    }

    /// The event of a clear.
    pub(super) fn cleared(self, chance: &mut Chance) -> Vec<u8> {
        self.fields(Vec::new(), "AllBlocksCleared", chance)
    }
}

/// Something that stands where an event should, and means nothing.
pub(super) fn nonsense(chance: &mut Chance) -> Vec<u8> {
    let kinds: [&[u8]; 9] = [
        b"\xc0",
        b"\x90",
        b"\x91\x05",
        b"\x92\xaeBlocksImagined\x01",
        b"\x81\xa4type\xabBlockStored",
        b"\x82\xa4type\xacBlockRemoved\xacblock_hashes\xa1x",
        b"\x95\xabBlockStored\x91\xa3key\xc0\x91\x01\x04",
        b"\x81\x91\x01\x02",
        b"\xc7\x02\x01ab",
    ];
    chance.of(&kinds).to_vec()
}

/// A batch of events, sent when the engine's clock stood there.
pub(super) fn batch(clock: u64, events: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = vec![0x93, 0xcb];
    bytes.extend_from_slice(&(clock as f64).to_be_bytes());
    array(&mut bytes, events.len());
    events.iter().for_each(|event| bytes.extend_from_slice(event));
    bytes.push(0);
    bytes
}
