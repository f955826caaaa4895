//! The part of MessagePack that vLLM's events use, written as msgspec writes it: shortest integers and headers, with
//! one exception that the caller asks for ([`Writer::map_wide`]).

/// A payload under construction.
#[derive(Debug, Default)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// The finished payload.
    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }

    /// nil.
    pub fn nil(&mut self) {
        self.bytes.push(0xc0);
    }

    /// A 64-bit float.
    pub fn float(&mut self, value: f64) {
        self.bytes.push(0xcb);
        self.bytes.extend_from_slice(&value.to_be_bytes());
    }

    /// An unsigned integer in its shortest form.
    pub fn unsigned(&mut self, value: u64) {
        match value {
            0..=0x7f => self.bytes.push(value as u8),
            0x80..=0xff => self.tagged(0xcc, &[value as u8]),
            0x100..=0xffff => self.tagged(0xcd, &(value as u16).to_be_bytes()),
            0x1_0000..=0xffff_ffff => self.tagged(0xce, &(value as u32).to_be_bytes()),
            _ => self.tagged(0xcf, &value.to_be_bytes()),
        }
    }

    /// A signed integer in its shortest form.
    pub fn signed(&mut self, value: i64) {
        match value {
            0.. => self.unsigned(value.unsigned_abs()),
            -32..=-1 => self.bytes.push(value as i8 as u8),
            -128..=-33 => self.tagged(0xd0, &(value as i8).to_be_bytes()),
            -32768..=-129 => self.tagged(0xd1, &(value as i16).to_be_bytes()),
            -2_147_483_648..=-32769 => self.tagged(0xd2, &(value as i32).to_be_bytes()),
            _ => self.tagged(0xd3, &value.to_be_bytes()),
        }
    }

    /// A string.
    pub fn text(&mut self, value: &str) {
        match value.len() {
            length @ 0..=31 => self.bytes.push(0xa0 | length as u8),
            length @ 32..=0xff => self.tagged(0xd9, &[length as u8]),
            length @ 0x100..=0xffff => self.tagged(0xda, &(length as u16).to_be_bytes()),
            length => self.tagged(0xdb, &(length as u32).to_be_bytes()),
        }
        self.bytes.extend_from_slice(value.as_bytes());
    }

    /// A byte string.
    pub fn binary(&mut self, value: &[u8]) {
        match value.len() {
            length @ 0..=0xff => self.tagged(0xc4, &[length as u8]),
            length @ 0x100..=0xffff => self.tagged(0xc5, &(length as u16).to_be_bytes()),
            length => self.tagged(0xc6, &(length as u32).to_be_bytes()),
        }
        self.bytes.extend_from_slice(value);
    }

    /// The header of an array of `length` values, which follow.
    pub fn array(&mut self, length: usize) {
        match length {
            0..=15 => self.bytes.push(0x90 | length as u8),
            16..=0xffff => self.tagged(0xdc, &(length as u16).to_be_bytes()),
            _ => self.tagged(0xdd, &(length as u32).to_be_bytes()),
        }
    }

    /// The header of a map of `length` ≤ 15 pairs, which follow.
    pub fn map(&mut self, length: u8) {
        assert!(length <= 15, "an event has at most 15 pairs in the short form");
        self.bytes.push(0x80 | length);
    }

    /// A map header in its 16-bit form whatever the length: what msgspec writes where the length was not known before.
    pub fn map_wide(&mut self, length: u16) {
        self.tagged(0xde, &length.to_be_bytes());
    }

    fn tagged(&mut self, tag: u8, rest: &[u8]) {
        self.bytes.push(tag);
        self.bytes.extend_from_slice(rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(write: impl FnOnce(&mut Writer), expected: &[u8]) {
        let mut writer = Writer::default();
        write(&mut writer);
        let bytes = writer.finish();
        assert_eq!(&bytes[..expected.len().min(bytes.len())], expected);
    }

    #[test]
    fn every_width_has_its_shortest_form() {
        check(|w| w.unsigned(127), &[0x7f]);
        check(|w| w.unsigned(128), &[0xcc, 0x80]);
        check(|w| w.unsigned(256), &[0xcd, 1, 0]);
        check(|w| w.unsigned(65536), &[0xce, 0, 1, 0, 0]);
        check(|w| w.unsigned(1 << 32), &[0xcf, 0, 0, 0, 1, 0, 0, 0, 0]);
        check(|w| w.signed(-1), &[0xff]);
        check(|w| w.signed(-33), &[0xd0, 0xdf]);
        check(|w| w.signed(-129), &[0xd1, 0xff, 0x7f]);
        check(|w| w.signed(-32769), &[0xd2, 0xff, 0xff, 0x7f, 0xff]);
        check(|w| w.signed(-2_147_483_649), &[0xd3, 0xff, 0xff, 0xff, 0xff, 0x7f]);
        check(|w| w.text(&"x".repeat(31)), &[0xbf, b'x']);
        check(|w| w.text(&"x".repeat(32)), &[0xd9, 32, b'x']);
        check(|w| w.text(&"x".repeat(256)), &[0xda, 1, 0, b'x']);
        check(|w| w.text(&"x".repeat(65536)), &[0xdb, 0, 1, 0, 0, b'x']);
        check(|w| w.binary(&[7; 16]), &[0xc4, 16, 7]);
        check(|w| w.binary(&[7; 256]), &[0xc5, 1, 0, 7]);
        check(|w| w.binary(&[7; 65536]), &[0xc6, 0, 1, 0, 0, 7]);
        check(|w| w.array(15), &[0x9f]);
        check(|w| w.array(16), &[0xdc, 0, 16]);
        check(|w| w.array(65536), &[0xdd, 0, 1, 0, 0]);
        check(|w| w.map(15), &[0x8f]);
        check(|w| w.map_wide(11), &[0xde, 0, 11]);
    }
}
