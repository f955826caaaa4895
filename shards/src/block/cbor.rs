//! Canonical CBOR, as far as block preimages need it: shortest heads, definite lengths, no tags (contract vLLM §1.3).
//!
//! The hot path, a block of plain tokens, is encoded without branches into a chunk on the stack ([`PlainBlock`]); a
//! block with extra keys goes value by value into a buffer ([`Cbor`]). Tests hold the two equal.

use super::digest::{CHUNK_BYTES, ChunkWriter};
use super::emit::Emit;

/// Width of one store of the encoder; what lies past the value's own length is overwritten by the next.
const WORD_BYTES: usize = 8;
/// Longest head of a CBOR item whose argument is a u32.
const HEAD_BYTES_MAX: usize = 5;
const _: () = assert!(HEAD_BYTES_MAX < WORD_BYTES);

const MAJOR_UNSIGNED: u8 = 0x00;
const MAJOR_NEGATIVE: u8 = 0x20;
const MAJOR_BYTES: u8 = 0x40;
const MAJOR_TEXT: u8 = 0x60;
const MAJOR_ARRAY: u8 = 0x80;
const CBOR_NULL: u8 = 0xf6;

/// A block without extra keys: `83`, the parent's bytes, the array of tokens, `f6`.
pub(super) struct PlainBlock<'a> {
    /// The parent's whole digest.
    pub(super) parent: &'a [u8],
    /// The block's tokens.
    pub(super) tokens: &'a [u32],
}

impl ChunkWriter for PlainBlock<'_> {
    #[inline]
    fn write(self, chunk: &mut [u8; CHUNK_BYTES], mut full: impl FnMut(&[u8])) -> usize {
        let PlainBlock { parent, tokens } = self;
        let mut at = put_head(chunk, MAJOR_ARRAY, 3);
        at += put_head(&mut chunk[at..], MAJOR_BYTES, parent.len() as u32);
        chunk[at..at + parent.len()].copy_from_slice(parent);
        at += parent.len();
        // A block of more than u32::MAX tokens does not exist: the rule's size is a u32.
        at += put_head(&mut chunk[at..], MAJOR_ARRAY, tokens.len() as u32);
        for &token in tokens {
            if at > CHUNK_BYTES - WORD_BYTES {
                full(&chunk[..at]);
                at = 0;
            }
            at += put_head(&mut chunk[at..], MAJOR_UNSIGNED, token);
        }
        // There is room: the last head began at most WORD_BYTES before the end and took at most HEAD_BYTES_MAX.
        chunk[at] = CBOR_NULL;
        at + 1
    }
}

/// Writes a CBOR head in its shortest form and returns its length, 1 to 5. Writes [`WORD_BYTES`] bytes: without
/// branches, since the widths of a prompt's tokens follow no pattern a processor could predict.
fn put_head(out: &mut [u8], major: u8, argument: u32) -> usize {
    const INFO: [u8; 6] = [0, 0, 24, 25, 0, 26];
    let length =
        1 + usize::from(argument >= 24) + usize::from(argument >= 0x100) + 2 * usize::from(argument >= 0x1_0000);
    // Of a one-byte head the argument is the low part of the byte itself.
    let first = u64::from(major | INFO[length]) << 56;
    let word = first | u64::from(argument) << (8 * (8 - length));
    out[..WORD_BYTES].copy_from_slice(&word.to_be_bytes());
    length
}

/// Appends values to a buffer.
pub(super) struct Cbor<'a>(pub(super) &'a mut Vec<u8>);

impl Cbor<'_> {
    fn head(&mut self, major: u8, argument: u64) {
        match argument {
            0..24 => self.0.push(major | argument as u8),
            24..0x100 => self.0.extend([major | 24, argument as u8]),
            0x100..0x1_0000 => {
                self.0.push(major | 25);
                self.0.extend((argument as u16).to_be_bytes());
            }
            0x1_0000..0x1_0000_0000 => {
                self.0.push(major | 26);
                self.0.extend((argument as u32).to_be_bytes());
            }
            _ => {
                self.0.push(major | 27);
                self.0.extend(argument.to_be_bytes());
            }
        }
    }
}

impl Emit for Cbor<'_> {
    fn none(&mut self) {
        self.0.push(CBOR_NULL);
    }

    fn int(&mut self, value: i64) {
        match u64::try_from(value) {
            Ok(value) => self.head(MAJOR_UNSIGNED, value),
            // Of a negative n the argument is -1 - n, which is its complement.
            Err(_) => self.head(MAJOR_NEGATIVE, !value as u64),
        }
    }

    fn uint(&mut self, value: u64) {
        self.head(MAJOR_UNSIGNED, value);
    }

    fn bytes(&mut self, value: &[u8]) {
        self.head(MAJOR_BYTES, value.len() as u64);
        self.0.extend_from_slice(value);
    }

    fn text(&mut self, value: &str) {
        self.head(MAJOR_TEXT, value.len() as u64);
        self.0.extend_from_slice(value.as_bytes());
    }

    fn tag(&mut self, value: &'static str) {
        self.text(value);
    }

    fn open(&mut self, len: usize) {
        self.head(MAJOR_ARRAY, len as u64);
    }

    fn close(&mut self, _len: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_take_their_shortest_form_at_every_edge() {
        let check = |major, argument: u32, expected: &[u8]| {
            let mut out = [0xee; WORD_BYTES];
            let length = put_head(&mut out, major, argument);
            assert_eq!(&out[..length], expected, "argument {argument}, branch-free");
            let mut out = Vec::new();
            Cbor(&mut out).head(major, argument.into());
            assert_eq!(out, expected, "argument {argument}, obvious");
        };
        check(MAJOR_UNSIGNED, 0, &[0x00]);
        check(MAJOR_UNSIGNED, 23, &[0x17]);
        check(MAJOR_UNSIGNED, 24, &[0x18, 24]);
        check(MAJOR_UNSIGNED, 255, &[0x18, 255]);
        check(MAJOR_UNSIGNED, 256, &[0x19, 1, 0]);
        check(MAJOR_UNSIGNED, 65_535, &[0x19, 255, 255]);
        check(MAJOR_UNSIGNED, 65_536, &[0x1a, 0, 1, 0, 0]);
        check(MAJOR_UNSIGNED, u32::MAX, &[0x1a, 255, 255, 255, 255]);
        check(MAJOR_BYTES, 16, &[0x50]);
        check(MAJOR_BYTES, 32, &[0x58, 0x20]);
        check(MAJOR_ARRAY, 3, &[0x83]);
        check(MAJOR_ARRAY, 784, &[0x99, 0x03, 0x10]);
        check(MAJOR_TEXT, 0, &[0x60]);
    }

    #[test]
    fn integers_of_both_signs_are_canonical() {
        let check = |value: i64, expected: &[u8]| {
            let mut out = Vec::new();
            Cbor(&mut out).int(value);
            assert_eq!(out, expected, "{value}");
        };
        check(-1, &[0x20]);
        check(-24, &[0x37]);
        check(-25, &[0x38, 24]);
        check(-256, &[0x38, 255]);
        check(-257, &[0x39, 1, 0]);
        check(1 << 32, &[0x1b, 0, 0, 0, 1, 0, 0, 0, 0]);
        check(i64::MIN, &[0x3b, 0x7f, 255, 255, 255, 255, 255, 255, 255]);
        let mut out = Vec::new();
        Cbor(&mut out).uint(u64::MAX);
        assert_eq!(out, [0x1b, 255, 255, 255, 255, 255, 255, 255, 255]);
    }
}
