//! Python's pickle, protocol 5, as far as a block's tuple needs it: what vLLM's default `sha256` hashes.
//!
//! Strings, bytes and tuples are numbered as they are written; an object met again is written as its number. Only
//! objects that are one and the same count as met again: the literal tags, and strings of one Latin-1 character, of
//! which CPython keeps one object each.

use std::collections::HashMap;

use super::vllm::Item;

/// A pickle under construction.
#[derive(Default)]
struct Pickler<'a> {
    body: Vec<u8>,
    /// Objects written so far.
    objects: u32,
    /// Number of those that may be met again.
    known: HashMap<&'a str, u32>,
}

/// The pickle of a value. Python cuts pickles of 64 KiB and more into frames, which is not done here.
#[must_use]
pub fn pickle(item: &Item<'_>) -> Vec<u8> {
    let mut pickler = Pickler::default();
    pickler.write(item);
    pickler.body.push(b'.');
    let mut bytes = vec![0x80, 5, 0x95];
    bytes.extend_from_slice(&(pickler.body.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&pickler.body);
    bytes
}

impl<'a> Pickler<'a> {
    fn write(&mut self, item: &Item<'a>) {
        match item {
            Item::None => self.body.push(b'N'),
            Item::Int(value) => self.int(*value),
            Item::Bytes(bytes) => {
                // Digests only: shorter than 256.
                self.body.extend_from_slice(&[b'C', bytes.len() as u8]);
                self.body.extend_from_slice(bytes);
                self.remember();
            }
            Item::Text(text) => self.text(text, text.chars().count() == 1 && text.chars().all(|c| c <= '\u{ff}')),
            Item::Tag(tag) => self.text(tag, true),
            Item::Tuple(items) => self.tuple(items.len(), |pickler, index| pickler.write(&items[index])),
            Item::Tokens(tokens) => {
                self.tuple(tokens.len(), |pickler, index| pickler.int(i64::from(tokens[index])));
            }
        }
    }

    fn int(&mut self, value: i64) {
        if let Ok(byte) = u8::try_from(value) {
            self.body.extend_from_slice(&[b'K', byte]);
        } else if let Ok(short) = u16::try_from(value) {
            self.body.push(b'M');
            self.body.extend_from_slice(&short.to_le_bytes());
        } else if let Ok(int) = i32::try_from(value) {
            self.body.push(b'J');
            self.body.extend_from_slice(&int.to_le_bytes());
        } else {
            let bytes = value.to_le_bytes();
            // As few bytes as keep the sign.
            let shortest = (1..8).find(|length| value << (64 - 8 * length) >> (64 - 8 * length) == value).unwrap_or(8);
            self.body.extend_from_slice(&[0x8a, shortest as u8]);
            self.body.extend_from_slice(&bytes[..shortest]);
        }
    }

    fn text(&mut self, text: &'a str, shared: bool) {
        if let Some(number) = self.known.get(text).filter(|_| shared) {
            self.body.extend_from_slice(&[b'h', *number as u8]);
            return;
        }
        match u8::try_from(text.len()) {
            Ok(length) => self.body.extend_from_slice(&[0x8c, length]),
            Err(_) => {
                self.body.push(b'X');
                self.body.extend_from_slice(&(text.len() as u32).to_le_bytes());
            }
        }
        self.body.extend_from_slice(text.as_bytes());
        if shared {
            self.known.insert(text, self.objects);
        }
        self.remember();
    }

    fn tuple(&mut self, length: usize, mut write: impl FnMut(&mut Self, usize)) {
        if length > 3 {
            self.body.push(b'(');
        }
        (0..length).for_each(|index| write(self, index));
        self.body.push(match length {
            0 => b')',
            1 => 0x85,
            2 => 0x86,
            3 => 0x87,
            _ => b't',
        });
        if length > 0 {
            self.remember();
        }
    }

    fn remember(&mut self) {
        self.body.push(0x94);
        self.objects += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::unhex;

    #[test]
    fn the_contract_s_examples() {
        assert_eq!(pickle(&Item::Text("0")), unhex("80059505000000000000008c0130942e"));
        let parent = unhex("1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c");
        let tokens: Vec<u32> = (1..=16).collect();
        let block = Item::Tuple(vec![Item::Bytes(&parent), Item::Tokens(&tokens), Item::None]);
        let expected = "8005954a0000000000000043201973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c9428\
                        4b014b024b034b044b054b064b074b084b094b0a4b0b4b0c4b0d4b0e4b0f4b1074944e87942e";
        assert_eq!(pickle(&block), unhex(expected));
    }

    #[test]
    fn wide_integers_keep_their_sign() {
        let body = |value: i64| pickle(&Item::Int(value))[11..].to_vec();
        assert_eq!(body(-1), unhex("4affffffff2e"));
        assert_eq!(body(2_147_483_647), unhex("4affffff7f2e"));
        assert_eq!(body(4_294_967_295), unhex("8a05ffffffff002e"));
        assert_eq!(body(-2_147_483_649), unhex("8a05ffffff7fff2e"));
    }

    #[test]
    fn a_one_character_string_is_one_object() {
        let pair = |a, b| pickle(&Item::Tuple(vec![Item::Text(a), Item::Text(b)]));
        assert_eq!(pair("x", "x")[11..], unhex("8c0178946800 86942e".replace(' ', "").as_str()));
        assert_eq!(pair("xy", "xy")[11..], unhex("8c027879948c0278799486942e"));
    }
}
