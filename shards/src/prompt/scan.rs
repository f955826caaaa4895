//! The members of a JSON object, found in steps, so that a body of any length never holds up the shard.
//!
//! **Invariant.** What is accepted is a JSON object in UTF-8 that fills the text, by the grammar of RFC 8259; a step
//! takes time linear in the bytes it is given, and looks at every byte once.

use std::ops::Range;

use super::json;

/// Members found so far are handed out by [`Scan::step`].
#[derive(Debug)]
pub(super) struct Scan<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Bytes known to be UTF-8; never less than `at`.
    checked: usize,
    expects: Expects,
    /// What opens the whole.
    opening: u8,
    /// Where the text begins that is being looked at.
    text: usize,
    /// Objects (true) and lists that are open, the whole object first.
    open: Vec<bool>,
    /// The member's name, quotes included, and where its value begins.
    name: Range<usize>,
    value: usize,
}

/// One member of the object: raw JSON texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Member<'a> {
    /// Its name in quotes, escapes as they stand.
    pub name: &'a str,
    pub value: &'a str,
}

/// Why a text is no JSON object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("neither a JSON object nor a list, or not in UTF-8")]
pub(super) struct NotAnObject;

/// What may come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expects {
    /// The brace that opens the whole.
    Whole,
    /// A key, or the end of the object that was just opened.
    FirstKey,
    Key,
    Colon,
    Value,
    /// A value, or the end of the list that was just opened.
    FirstItem,
    /// A comma, or the end of what is open.
    Comma,
    /// The inside of a string, which is a key or not.
    Text {
        key: bool,
    },
    /// What follows a backslash.
    Escape {
        key: bool,
    },
    /// Hexadecimal digits of an escape.
    Hex {
        key: bool,
        left: u8,
    },
    /// The rest of `true`, `false` or `null`.
    Word(&'static [u8]),
    Number(Number),
    /// Nothing but blanks.
    End,
}

/// Where in a number the last byte stood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Digits,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

impl Number {
    /// Where the byte leads; none where it does not belong to the number.
    fn then(self, byte: u8) -> Option<Number> {
        use Number::{Digits, Exponent, ExponentDigits, ExponentSign, Fraction, Minus, Point, Zero};
        Some(match (self, byte) {
            (Minus, b'0') => Zero,
            (Minus, b'1'..=b'9') | (Digits, b'0'..=b'9') => Digits,
            (Zero | Digits, b'.') => Point,
            (Point | Fraction, b'0'..=b'9') => Fraction,
            (Zero | Digits | Fraction, b'e' | b'E') => Exponent,
            (Exponent, b'+' | b'-') => ExponentSign,
            (Exponent | ExponentSign | ExponentDigits, b'0'..=b'9') => ExponentDigits,
            _ => return None,
        })
    }

    fn may_end(self) -> bool {
        matches!(self, Number::Zero | Number::Digits | Number::Fraction | Number::ExponentDigits)
    }
}

impl<'a> Scan<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Scan {
            bytes,
            at: 0,
            checked: 0,
            expects: Expects::Whole,
            opening: b'{',
            text: 0,
            open: Vec::new(),
            name: 0..0,
            value: 0,
        }
    }

    /// Looks through a list instead, whose items are shown as members without a name.
    pub(super) fn of_list(bytes: &'a [u8]) -> Self {
        Scan { opening: b'[', ..Scan::new(bytes) }
    }

    /// Where inside a text (no key, and no escape) the scan stands, and where that text's quote is.
    pub(super) fn inside_text(&self) -> Option<(usize, usize)> {
        (self.expects == Expects::Text { key: false }).then_some((self.at.min(self.checked), self.text))
    }

    /// What closes all that is open, innermost first.
    pub(super) fn ends(&self) -> impl Iterator<Item = char> {
        self.open.iter().rev().map(|&object| if object { '}' } else { ']' })
    }

    /// Looks at so many further bytes; whether the end is reached. Each member of the object is shown once
    /// its value is over.
    ///
    /// # Errors
    /// The bytes are no object in UTF-8.
    pub(super) fn step(&mut self, bytes: usize, mut found: impl FnMut(Member<'a>)) -> Result<bool, NotAnObject> {
        let end = self.bytes.len().min(self.at.saturating_add(bytes));
        self.check_text(end)?;
        while self.at < end {
            self.advance(end, &mut found)?;
        }
        if self.at < self.bytes.len() {
            return Ok(false);
        }
        if self.expects == Expects::End { Ok(true) } else { Err(NotAnObject) }
    }

    /// Makes sure that the bytes up to the place are UTF-8, but for a character that goes on behind it.
    fn check_text(&mut self, end: usize) -> Result<(), NotAnObject> {
        let new = &self.bytes[self.checked..end];
        self.checked = match simdutf8::compat::from_utf8(new) {
            Ok(_) => end,
            Err(error) if error.error_len().is_none() && end < self.bytes.len() => self.checked + error.valid_up_to(),
            Err(_) => return Err(NotAnObject),
        };
        Ok(())
    }

    /// Takes one byte, or what is plain of a string or of a number, up to the place.
    fn advance(&mut self, end: usize, found: &mut impl FnMut(Member<'a>)) -> Result<(), NotAnObject> {
        let byte = self.bytes[self.at];
        match self.expects {
            Expects::Text { key } => {
                self.at += text_bytes(&self.bytes[self.at..end]);
                if self.at < end {
                    self.end_of_run(key, found)?;
                }
                return Ok(());
            }
            Expects::Escape { key } => {
                self.expects = match byte {
                    b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => Expects::Text { key },
                    b'u' => Expects::Hex { key, left: 4 },
                    _ => return Err(NotAnObject),
                };
            }
            Expects::Hex { key, left } if byte.is_ascii_hexdigit() => {
                self.expects = if left > 1 { Expects::Hex { key, left: left - 1 } } else { Expects::Text { key } };
            }
            Expects::Word(rest) if rest.first() == Some(&byte) => {
                self.expects = Expects::Word(&rest[1..]);
                if rest.len() == 1 {
                    self.end_of_value(self.at + 1, found);
                }
            }
            Expects::Number(Number::Digits) if byte.is_ascii_digit() => {
                let digits = self.bytes[self.at..end].iter().take_while(|byte| byte.is_ascii_digit());
                self.at += digits.count();
                return Ok(());
            }
            Expects::Number(number) => match number.then(byte) {
                Some(number) => self.expects = Expects::Number(number),
                None if number.may_end() => {
                    // The byte itself is looked at again.
                    self.end_of_value(self.at, found);
                    return Ok(());
                }
                None => return Err(NotAnObject),
            },
            Expects::Hex { .. } | Expects::Word(_) => return Err(NotAnObject),
            _ if matches!(byte, b' ' | b'\n' | b'\r' | b'\t') => {}
            _ => self.structure(byte, found)?,
        }
        self.at += 1;
        Ok(())
    }

    /// A quote, a backslash or a control character ends a run of plain bytes.
    fn end_of_run(&mut self, key: bool, found: &mut impl FnMut(Member<'a>)) -> Result<(), NotAnObject> {
        match self.bytes[self.at] {
            b'\\' => self.expects = Expects::Escape { key },
            b'"' if key => {
                self.expects = Expects::Colon;
                if self.open.len() == 1 {
                    self.name.end = self.at + 1;
                }
            }
            b'"' => self.end_of_value(self.at + 1, found),
            _ => return Err(NotAnObject),
        }
        self.at += 1;
        Ok(())
    }

    fn structure(&mut self, byte: u8, found: &mut impl FnMut(Member<'a>)) -> Result<(), NotAnObject> {
        match (self.expects, byte) {
            (Expects::Whole, byte) if byte == self.opening => self.begin(byte == b'{'),
            (Expects::FirstKey | Expects::Key, b'"') => {
                if self.open.len() == 1 {
                    self.name.start = self.at;
                }
                self.expects = Expects::Text { key: true };
            }
            (Expects::Colon, b':') => self.expects = Expects::Value,
            (Expects::Comma, b',') => {
                self.expects = if self.open.last() == Some(&true) { Expects::Key } else { Expects::Value };
            }
            (Expects::FirstKey, b'}') | (Expects::FirstItem, b']') => self.end_of_container(found),
            (Expects::Comma, b'}' | b']') if self.open.last() == Some(&(byte == b'}')) => self.end_of_container(found),
            (Expects::Value | Expects::FirstItem, byte) => {
                if self.open.len() == 1 {
                    self.value = self.at;
                }
                self.begin_value(byte)?;
            }
            _ => return Err(NotAnObject),
        }
        Ok(())
    }

    fn begin_value(&mut self, byte: u8) -> Result<(), NotAnObject> {
        self.expects = match byte {
            b'{' | b'[' => {
                self.begin(byte == b'{');
                return Ok(());
            }
            b'"' => {
                self.text = self.at;
                Expects::Text { key: false }
            }
            b't' => Expects::Word(b"rue"),
            b'f' => Expects::Word(b"alse"),
            b'n' => Expects::Word(b"ull"),
            b'-' => Expects::Number(Number::Minus),
            b'0' => Expects::Number(Number::Zero),
            b'1'..=b'9' => Expects::Number(Number::Digits),
            _ => return Err(NotAnObject),
        };
        Ok(())
    }

    fn begin(&mut self, object: bool) {
        self.open.push(object);
        self.expects = if object { Expects::FirstKey } else { Expects::FirstItem };
    }

    fn end_of_container(&mut self, found: &mut impl FnMut(Member<'a>)) {
        self.open.pop();
        if self.open.is_empty() { self.expects = Expects::End } else { self.end_of_value(self.at + 1, found) }
    }

    /// A value ended before the place.
    fn end_of_value(&mut self, end: usize, found: &mut impl FnMut(Member<'a>)) {
        self.expects = Expects::Comma;
        if self.open.len() != 1 {
            return;
        }
        let bytes = &self.bytes[..self.checked];
        // SAFETY: `check_text` has seen that the bytes before `checked` are whole characters of UTF-8, and nothing
        // writes to them. Checking a large member once more would cost as much as the whole scan.
        let text = unsafe { std::str::from_utf8_unchecked(bytes) };
        // Both begin and end beside a quote, a bracket or another ASCII sign, which `checked` has passed.
        if let (Some(name), Some(value)) = (text.get(self.name.clone()), text.get(self.value..end)) {
            found(Member { name, value });
        }
    }
}

/// Length of a string's inside that the bytes begin with: plain bytes and whole escapes. What ends it needs a state.
fn text_bytes(bytes: &[u8]) -> usize {
    let mut at = plain_bytes(bytes);
    while bytes.get(at) == Some(&b'\\') {
        let escapes = escape_bytes(&bytes[at..]);
        if escapes == 0 {
            break;
        }
        at += escapes;
        at += plain_bytes(&bytes[at..]);
    }
    at
}

/// Length of the whole escapes that stand side by side at the begin.
fn escape_bytes(bytes: &[u8]) -> usize {
    const WIDE: usize = 32;
    let (wide, _) = bytes.as_chunks::<WIDE>();
    let all_short = |chunk: &&[u8; WIDE]| {
        let (pairs, _) = chunk.as_chunks::<2>();
        // Without a branch inside, the compiler looks at many pairs at once.
        pairs.iter().fold(true, |all, pair| all & is_short_escape(*pair))
    };
    let mut at = wide.iter().take_while(all_short).count() * WIDE;
    loop {
        at += match bytes[at..] {
            [b'\\', b'u', a, b, c, d, ..] if json::are_hex([a, b, c, d]) => 6,
            [first, second, ..] if is_short_escape([first, second]) => 2,
            _ => return at,
        };
    }
}

/// Whether the bytes are a backslash and what it needs no digits after.
fn is_short_escape(pair: [u8; 2]) -> bool {
    let pair = u16::from_le_bytes(pair);
    let is = |second: u8| pair == u16::from_le_bytes([b'\\', second]);
    is(b'n') | is(b'"') | is(b'\\') | is(b't') | is(b'r') | is(b'/') | is(b'b') | is(b'f')
}

/// Bytes before the first quote, backslash or control character.
fn plain_bytes(bytes: &[u8]) -> usize {
    const WIDE: usize = 64;
    // Many strings are short, and many runs between escapes.
    let near = bytes.len().min(16) & !7;
    let first = first_end(&bytes[..near]);
    if first < near {
        return first;
    }
    let (wide, _) = bytes[near..].as_chunks::<WIDE>();
    // Without a branch inside, the compiler looks at many bytes at once.
    let plain = |chunk: &&[u8; WIDE]| !chunk.iter().fold(false, |any, &byte| any | is_end(byte));
    let passed = near + wide.iter().take_while(plain).count() * WIDE;
    passed + first_end(&bytes[passed..])
}

fn is_end(byte: u8) -> bool {
    (byte == b'"') | (byte == b'\\') | (byte < 0x20)
}

/// Place of the first byte that ends a plain run, or the length: eight bytes at a time.
fn first_end(bytes: &[u8]) -> usize {
    const EACH: u64 = u64::MAX / 255;
    const HIGH: u64 = EACH << 7;
    let (words, rest) = bytes.as_chunks::<8>();
    for (n, word) in words.iter().enumerate() {
        let word = u64::from_le_bytes(*word);
        // The high bit of each byte that is below the bound; a borrow can only add such bits behind the first.
        let below = |word: u64, bound: u8| word.wrapping_sub(EACH * u64::from(bound)) & !word & HIGH;
        let is = |byte: u8| below(word ^ (EACH * u64::from(byte)), 1);
        let ends = below(word, 0x20) | is(b'"') | is(b'\\');
        if ends != 0 {
            return 8 * n + ends.trailing_zeros() as usize / 8;
        }
    }
    let passed = bytes.len() - rest.len();
    passed + rest.iter().take_while(|&&byte| !is_end(byte)).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The members, or none, from steps of so many bytes.
    fn members(text: &[u8], step: usize) -> Option<Vec<(String, String)>> {
        let (mut scan, mut found) = (Scan::new(text), Vec::new());
        loop {
            match scan.step(step, |m| found.push((m.name.to_owned(), m.value.to_owned()))) {
                Ok(true) => return Some(found),
                Ok(false) => {}
                Err(NotAnObject) => return None,
            }
        }
    }

    #[test]
    fn members_are_raw_texts_wherever_the_steps_end() {
        let text = " {\"a\\\"é\" : {\"b\":[1,{}]} ,\"c\":\"x\\u00e9]}😀\", \"d\":-1.5e+3,\"e\":[ ],\"f\" : null\n} ";
        let expected = [
            ("\"a\\\"é\"", "{\"b\":[1,{}]}"),
            ("\"c\"", "\"x\\u00e9]}😀\""),
            ("\"d\"", "-1.5e+3"),
            ("\"e\"", "[ ]"),
            ("\"f\"", "null"),
        ];
        for step in 1..text.len() + 2 {
            let found = members(text.as_bytes(), step).unwrap();
            let found: Vec<_> = found.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            assert_eq!(found, expected, "steps of {step}");
        }
    }

    #[test]
    fn long_runs_end_at_the_first_sign_that_ends_them() {
        for length in [0, 1, 7, 8, 9, 63, 64, 65, 71, 72, 73, 200] {
            for end in [b'"', b'\\', 0x1F, b'\n', 0] {
                for plain in [b'x', b' ', b'!', b'#', 0x7F, 0xE4, 0xFF] {
                    let mut bytes = vec![plain; length];
                    assert_eq!(plain_bytes(&bytes), length);
                    bytes.push(end);
                    bytes.extend_from_slice(&[b'"'; 100]);
                    assert_eq!(plain_bytes(&bytes), length);
                }
            }
        }
    }

    #[test]
    fn escapes_side_by_side_are_taken_up_to_the_first_that_is_none() {
        for count in [0, 1, 15, 16, 17, 40] {
            for (escape, length) in [("\\n", 2), ("\\\\", 2), ("\\u00e9", 6)] {
                for end in ["", "x", "\\", "\\x", "\\u12", "\\u123x", "\"", "n\\"] {
                    let text = escape.repeat(count) + end;
                    assert_eq!(escape_bytes(text.as_bytes()), count * length, "{text}");
                }
            }
        }
    }

    /// As serde_json's own parser decides, which is another implementation of the grammar.
    fn agrees(text: &[u8], step: usize) -> Result<(), TestCaseError> {
        let plain: Option<serde_json::Map<String, serde_json::Value>> =
            std::str::from_utf8(text).ok().and_then(|text| serde_json::from_str(text).ok());
        let found = members(text, step);
        // Numbers beyond the range of a float are refused there alone.
        if plain.is_some() || !text.iter().any(|b| matches!(b, b'e' | b'E')) {
            prop_assert_eq!(found.is_some(), plain.is_some(), "{}", String::from_utf8_lossy(text));
        }
        if let (Some(found), Some(plain)) = (found, plain) {
            for (name, value) in &plain {
                let last =
                    found.iter().rev().find(|(n, _)| serde_json::from_str::<String>(n).ok().as_ref() == Some(name));
                let last: serde_json::Value = serde_json::from_str(&last.unwrap().1).unwrap();
                prop_assert_eq!(&last, value);
            }
        }
        Ok(())
    }

    fn object() -> impl Strategy<Value = String> {
        let leaf = prop_oneof![
            "-?(0|[1-9][0-9]{0,3})(\\.[0-9]{1,3})?",
            Just("true".to_owned()),
            Just("false".to_owned()),
            Just("null".to_owned()),
            "\"([a-z é😀你]|\\\\[nt\"/]|\\\\u00e[0-9]){0,80}\"",
        ];
        let value = leaf.prop_recursive(4, 40, 6, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..6).prop_map(|items| format!("[{}]", items.join(" ,"))),
                proptest::collection::vec(("\"[a-c]{0,2}\"", inner), 0..6).prop_map(|items| {
                    let items: Vec<String> = items.into_iter().map(|(k, v)| format!("{k}: {v}")).collect();
                    format!("{{{}}}", items.join(","))
                }),
            ]
        });
        proptest::collection::vec(("\"[a-c]{0,2}\"", value), 0..6).prop_map(|items| {
            let items: Vec<String> = items.into_iter().map(|(k, v)| format!("{k} :{v}")).collect();
            format!("{{ {} }}\n", items.join(", "))
        })
    }

    proptest! {
        #[test]
        fn objects_are_read_as_by_another_parser(text in object(), step in 1usize..90) {
            agrees(text.as_bytes(), step)?;
        }

        /// A byte changed, left out or doubled: mostly no JSON any more.
        #[test]
        fn damaged_objects_are_judged_as_by_another_parser(
            text in object(), place in any::<prop::sample::Index>(), byte in prop::sample::select(&b"{}[]\",:\\0-1.eEtnu \n\x01\xff\xc3"[..]),
            kind in 0..3, step in 1usize..90,
        ) {
            let mut bytes = text.into_bytes();
            let place = place.index(bytes.len());
            match kind {
                0 => bytes[place] = byte,
                1 => drop(bytes.remove(place)),
                _ => bytes.insert(place, byte),
            }
            agrees(&bytes, step)?;
        }
    }
}
