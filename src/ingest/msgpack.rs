//! A reader of msgpack over borrowed bytes: just what engine events need.
//!
//! **Invariant.** Nothing is allocated, nothing recurses, and every step consumes at least one byte: any input of
//! n bytes is read or refused in O(n). A length that the remaining bytes cannot hold is refused before it is used.

#![forbid(unsafe_code)]

/// Why bytes could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Malformed {
    /// The bytes end inside a value, or use a code that msgpack does not have.
    Framing,
    /// A whole value is there, of another type than its place demands.
    Type,
}

/// One value's head; the elements of an array or map follow it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Head<'a> {
    Nil,
    Bool,
    Uint(u64),
    /// Below zero.
    Negative(i64),
    Float(f64),
    Str(&'a [u8]),
    Bin(&'a [u8]),
    Array(u32),
    Map(u32),
    Ext,
}

/// Reads values from the front of a slice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Reader { rest: bytes }
    }

    /// What has not been read.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.rest.split_at_checked(len).ok_or(Malformed::Framing)?;
        self.rest = rest;
        Ok(taken)
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.rest.split_first_chunk::<N>().ok_or(Malformed::Framing)?;
        self.rest = rest;
        Ok(*taken)
    }

    /// A big-endian length of `size` (1, 2 or 4) bytes.
    fn length(&mut self, size: usize) -> Result<u32, Malformed> {
        Ok(self.take(size)?.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte)))
    }

    fn bytes(&mut self, size: usize) -> Result<&'a [u8], Malformed> {
        let len = self.length(size)?;
        self.take(len as usize)
    }

    /// A container of `len` elements of at least `least` bytes each, which must be there.
    fn elements(&self, len: u32, least: usize) -> Result<u32, Malformed> {
        if len as usize * least > self.rest.len() { Err(Malformed::Framing) } else { Ok(len) }
    }

    fn signed(value: i64) -> Head<'a> {
        u64::try_from(value).map_or(Head::Negative(value), Head::Uint)
    }

    /// The next value's head, with the whole value where it is no container.
    pub(crate) fn head(&mut self) -> Result<Head<'a>, Malformed> {
        let [code] = self.fixed()?;
        Ok(match code {
            0x00..=0x7f => Head::Uint(u64::from(code)),
            0x80..=0x8f => Head::Map(self.elements(u32::from(code & 0x0f), 2)?),
            0x90..=0x9f => Head::Array(self.elements(u32::from(code & 0x0f), 1)?),
            0xa0..=0xbf => Head::Str(self.take(usize::from(code & 0x1f))?),
            0xc0 => Head::Nil,
            0xc1 => return Err(Malformed::Framing),
            0xc2 | 0xc3 => Head::Bool,
            0xc4..=0xc6 => Head::Bin(self.bytes(1 << (code - 0xc4))?),
            0xc7..=0xc9 => {
                let len = self.length(1 << (code - 0xc7))?;
                self.take(1)?;
                self.take(len as usize)?;
                Head::Ext
            }
            0xca => Head::Float(f64::from(f32::from_be_bytes(self.fixed()?))),
            0xcb => Head::Float(f64::from_be_bytes(self.fixed()?)),
            0xcc => Head::Uint(u64::from(u8::from_be_bytes(self.fixed()?))),
            0xcd => Head::Uint(u64::from(u16::from_be_bytes(self.fixed()?))),
            0xce => Head::Uint(u64::from(u32::from_be_bytes(self.fixed()?))),
            0xcf => Head::Uint(u64::from_be_bytes(self.fixed()?)),
            0xd0 => Self::signed(i64::from(i8::from_be_bytes(self.fixed()?))),
            0xd1 => Self::signed(i64::from(i16::from_be_bytes(self.fixed()?))),
            0xd2 => Self::signed(i64::from(i32::from_be_bytes(self.fixed()?))),
            0xd3 => Self::signed(i64::from_be_bytes(self.fixed()?)),
            0xd4..=0xd8 => {
                self.take(1 + (1 << (code - 0xd4)))?;
                Head::Ext
            }
            0xd9..=0xdb => Head::Str(self.bytes(1 << (code - 0xd9))?),
            0xdc | 0xdd => {
                let len = self.length(2 << (code - 0xdc))?;
                Head::Array(self.elements(len, 1)?)
            }
            0xde | 0xdf => {
                let len = self.length(2 << (code - 0xde))?;
                Head::Map(self.elements(len, 2)?)
            }
            0xe0..=0xff => Head::Negative(i64::from(i8::from_be_bytes([code]))),
        })
    }

    /// Skips one value with everything inside it; however deep it nests.
    pub(crate) fn skip(&mut self) -> Result<(), Malformed> {
        let mut left: u64 = 1;
        while left > 0 {
            left -= 1;
            left += match self.head()? {
                Head::Array(len) => u64::from(len),
                Head::Map(len) => 2 * u64::from(len),
                _ => 0,
            };
        }
        Ok(())
    }

    /// Skips `len` integers that are not negative: most of the bytes of a store are token ids.
    pub(crate) fn skip_unsigned(&mut self, len: u32) -> Result<(), Malformed> {
        for _ in 0..len {
            let size = match self.rest.first() {
                Some(0x00..=0x7f) => 1,
                Some(0xcc) => 2,
                Some(0xcd) => 3,
                Some(0xce) => 5,
                Some(0xcf) => 9,
                _ => match self.head()? {
                    Head::Uint(_) => continue,
                    _ => return Err(Malformed::Type),
                },
            };
            self.rest = self.rest.get(size..).ok_or(Malformed::Framing)?;
        }
        Ok(())
    }

    /// The length of the array that begins here.
    pub(crate) fn array(&mut self) -> Result<u32, Malformed> {
        match self.head()? {
            Head::Array(len) => Ok(len),
            _ => Err(Malformed::Type),
        }
    }

    /// An integer from 0 to 2³² − 1, or nil.
    pub(crate) fn optional_u32(&mut self) -> Result<Option<u32>, Malformed> {
        match self.head()? {
            Head::Nil => Ok(None),
            Head::Uint(value) => u32::try_from(value).map(Some).map_err(|_| Malformed::Type),
            _ => Err(Malformed::Type),
        }
    }

    /// Text, or nil.
    pub(crate) fn optional_str(&mut self) -> Result<Option<&'a str>, Malformed> {
        match self.head()? {
            Head::Nil => Ok(None),
            Head::Str(text) => std::str::from_utf8(text).map(Some).map_err(|_| Malformed::Type),
            _ => Err(Malformed::Type),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(bytes: &[u8], expected: Result<Head<'_>, Malformed>) {
        assert_eq!(Reader::new(bytes).head(), expected, "{bytes:02x?}");
    }

    #[test]
    fn every_code_is_read_as_its_value() {
        check(&[0x7f], Ok(Head::Uint(127)));
        check(&[0xe0], Ok(Head::Negative(-32)));
        check(&[0xcc, 200], Ok(Head::Uint(200)));
        check(&[0xcd, 1, 0], Ok(Head::Uint(256)));
        check(&[0xce, 0xff, 0xff, 0xff, 0xff], Ok(Head::Uint(u64::from(u32::MAX))));
        check(&[0xcf, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe], Ok(Head::Uint(u64::MAX - 1)));
        check(&[0xd0, 0x80], Ok(Head::Negative(-128)));
        check(&[0xd1, 0x00, 0x05], Ok(Head::Uint(5)));
        check(&[0xd2, 0xff, 0xff, 0xff, 0xff], Ok(Head::Negative(-1)));
        check(&[0xd3, 0x80, 0, 0, 0, 0, 0, 0, 0], Ok(Head::Negative(i64::MIN)));
        check(&[0xca, 0x3f, 0x80, 0, 0], Ok(Head::Float(1.0)));
        check(&[0xcb, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0], Ok(Head::Float(1.0)));
        check(&[0xc0], Ok(Head::Nil));
        check(&[0xc3], Ok(Head::Bool));
        check(&[0xa1, b'x'], Ok(Head::Str(b"x")));
        check(&[0xd9, 1, b'x'], Ok(Head::Str(b"x")));
        check(&[0xda, 0, 1, b'x'], Ok(Head::Str(b"x")));
        check(&[0xdb, 0, 0, 0, 1, b'x'], Ok(Head::Str(b"x")));
        check(&[0xc4, 1, 9], Ok(Head::Bin(&[9])));
        check(&[0xc5, 0, 1, 9], Ok(Head::Bin(&[9])));
        check(&[0xc6, 0, 0, 0, 1, 9], Ok(Head::Bin(&[9])));
        check(&[0x91, 0], Ok(Head::Array(1)));
        check(&[0xdc, 0, 1, 0], Ok(Head::Array(1)));
        check(&[0xdd, 0, 0, 0, 1, 0], Ok(Head::Array(1)));
        check(&[0x81, 0, 0], Ok(Head::Map(1)));
        check(&[0xde, 0, 1, 0, 0], Ok(Head::Map(1)));
        check(&[0xdf, 0, 0, 0, 1, 0, 0], Ok(Head::Map(1)));
        check(&[0xd4, 0, 0], Ok(Head::Ext));
        check(&[0xc7, 2, 0, 1, 2], Ok(Head::Ext));
    }

    #[test]
    fn lengths_beyond_the_bytes_are_refused_before_they_are_used() {
        check(&[], Err(Malformed::Framing));
        check(&[0xc1], Err(Malformed::Framing));
        check(&[0xdd, 0xff, 0xff, 0xff, 0xff, 0], Err(Malformed::Framing));
        check(&[0xdf, 0xff, 0xff, 0xff, 0xff, 0, 0], Err(Malformed::Framing));
        check(&[0xdb, 0xff, 0xff, 0xff, 0xff, 0], Err(Malformed::Framing));
        check(&[0xcf, 1, 2], Err(Malformed::Framing));
    }

    #[test]
    fn unsigned_integers_are_skipped_in_every_spelling() {
        let bytes = b"\x05\xcc\xff\xcd\0\x01\xce\0\0\0\x01\xcf\0\0\0\0\0\0\0\x01\xd0\x07\xd2\0\0\0\x01\xff";
        let mut reader = Reader::new(bytes);
        assert_eq!(reader.skip_unsigned(7), Ok(()));
        assert_eq!(reader.skip_unsigned(1), Err(Malformed::Type));
        for cut in 1..8 {
            assert_eq!(Reader::new(&bytes[11..11 + cut]).skip_unsigned(1), Err(Malformed::Framing));
        }
    }

    #[test]
    fn skipping_deep_nesting_needs_no_stack() {
        let mut bytes = vec![0x91; 1_000_000];
        bytes.push(0xc0);
        let mut reader = Reader::new(&bytes);
        assert_eq!(reader.skip(), Ok(()));
        assert!(reader.rest().is_empty());
    }
}
