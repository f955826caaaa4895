//! JSON text to template values, as Python's `json.loads` would see it.
//!
//! Differences from a plain JSON reader that decide over single bytes of a prompt: whole numbers keep every digit,
//! floats are remembered so that they print as Python prints them, a repeated key keeps its first place and its last
//! value, and nesting is bounded so that a hostile body cannot use up the stack.

use std::borrow::Cow;

use minijinja::Value;

use super::pyvalue::{self, PyDict};

/// Deepest nesting that is read. Beyond it the value is refused, and the request is routed without keys.
pub(super) const DEPTH_MAX: u32 = 96;

/// Why a value could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum JsonError {
    /// Not JSON, or cut off.
    #[error("not valid JSON")]
    Syntax,
    /// Nested deeper than [`DEPTH_MAX`].
    #[error("nested deeper than {DEPTH_MAX} levels")]
    Depth,
    /// Half of a surrogate pair: Python keeps it, UTF-8 cannot.
    #[error("a string holds half of a surrogate pair")]
    Surrogate,
    /// A whole number beyond 128 bits: Python keeps it, we cannot print it.
    #[error("a whole number has more than 128 bits")]
    Number,
}

/// Reads one value that must fill the text.
pub(super) fn value(text: &str) -> Result<Value, JsonError> {
    let mut reader = Reader { text, at: 0 };
    let value = reader.value(0)?;
    reader.space();
    if reader.at == text.len() { Ok(value) } else { Err(JsonError::Syntax) }
}

/// Reads the elements of a list in order: from its begin (`from` 0), or from the end of an element on. `each` gets an
/// element and the place after it. The list must fill the text.
pub(super) fn elements<E: From<JsonError>>(
    text: &str,
    from: usize,
    mut each: impl FnMut(Value, std::ops::Range<usize>) -> Result<(), E>,
) -> Result<(), E> {
    let mut reader = Reader { text, at: from };
    if from == 0 {
        reader.space();
        reader.take(b'[')?;
        reader.space();
        if reader.peek() == Some(b']') {
            return reader.end_of_list().map_err(E::from);
        }
        reader.element(&mut each)?;
    }
    loop {
        reader.space();
        match reader.peek() {
            Some(b',') => reader.at += 1,
            _ => return reader.end_of_list().map_err(E::from),
        }
        reader.element(&mut each)?;
    }
}

/// Reads a JSON string, borrowing it where it has no escapes.
pub(super) fn string(text: &str) -> Result<Cow<'_, str>, JsonError> {
    let mut reader = Reader { text, at: 0 };
    reader.space();
    let value = reader.string()?;
    reader.space();
    if reader.at == text.len() { Ok(value) } else { Err(JsonError::Syntax) }
}

/// Reads the JSON string that the text begins with, whatever follows it.
pub(super) fn leading_string(text: &str) -> Result<Cow<'_, str>, JsonError> {
    Reader { text, at: 0 }.string()
}

/// The JSON string that a text begins with, read in steps.
#[derive(Debug)]
pub(super) struct LongString<'a> {
    reader: Reader<'a>,
}

impl<'a> LongString<'a> {
    /// Begins with a text whose first byte is the quote.
    pub(super) fn new(text: &'a str) -> Result<Self, JsonError> {
        let mut reader = Reader { text, at: 0 };
        reader.take(b'"')?;
        Ok(LongString { reader })
    }

    /// Appends what so many further bytes spell, at least; whether the string is over.
    pub(super) fn step(&mut self, bytes: usize, out: &mut String) -> Result<bool, JsonError> {
        let reader = &mut self.reader;
        let end = reader.text.ceil_char_boundary(reader.at.saturating_add(bytes));
        while reader.at < end {
            let rest = &reader.text.as_bytes()[reader.at..end];
            let run = match rest.first() {
                // Escapes often stand side by side.
                Some(b'"' | b'\\') => 0,
                _ => memchr::memchr2(b'"', b'\\', rest).unwrap_or(rest.len()),
            };
            out.push_str(&reader.text[reader.at..reader.at + run]);
            reader.at += run;
            if reader.at == end {
                break;
            }
            if reader.peek() == Some(b'"') {
                reader.at += 1;
                return Ok(true);
            }
            reader.escapes(end, out)?;
        }
        if reader.at >= reader.text.len() { Err(JsonError::Syntax) } else { Ok(false) }
    }
}

#[derive(Debug)]
struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Reader<'a> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\n' | b'\r' | b'\t')) {
            self.at += 1;
        }
    }

    fn take(&mut self, byte: u8) -> Result<(), JsonError> {
        if self.peek() == Some(byte) {
            self.at += 1;
            return Ok(());
        }
        Err(JsonError::Syntax)
    }

    fn word(&mut self, word: &str, value: Value) -> Result<Value, JsonError> {
        if self.text.as_bytes()[self.at..].starts_with(word.as_bytes()) {
            self.at += word.len();
            return Ok(value);
        }
        Err(JsonError::Syntax)
    }

    fn value(&mut self, depth: u32) -> Result<Value, JsonError> {
        if depth > DEPTH_MAX {
            return Err(JsonError::Depth);
        }
        self.space();
        match self.peek().ok_or(JsonError::Syntax)? {
            b'{' => self.object(depth),
            b'[' => self.array(depth),
            b'"' => Ok(Value::from(self.string()?.as_ref())),
            b't' => self.word("true", Value::from(true)),
            b'f' => self.word("false", Value::from(false)),
            b'n' => self.word("null", Value::from(())),
            _ => self.number(),
        }
    }

    fn array(&mut self, depth: u32) -> Result<Value, JsonError> {
        self.take(b'[')?;
        let mut items = Vec::new();
        self.space();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(Value::from(items));
        }
        loop {
            items.push(self.value(depth + 1)?);
            self.space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b']') => break,
                _ => return Err(JsonError::Syntax),
            }
        }
        self.at += 1;
        Ok(Value::from(items))
    }

    fn object(&mut self, depth: u32) -> Result<Value, JsonError> {
        self.take(b'{')?;
        let mut dict = PyDict::default();
        self.space();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(Value::from_object(dict));
        }
        loop {
            self.space();
            let key = self.string()?;
            self.space();
            self.take(b':')?;
            let value = self.value(depth + 1)?;
            dict.set(&key, value);
            self.space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b'}') => break,
                _ => return Err(JsonError::Syntax),
            }
        }
        self.at += 1;
        Ok(Value::from_object(dict))
    }

    fn element<E: From<JsonError>>(
        &mut self,
        each: &mut impl FnMut(Value, std::ops::Range<usize>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.space();
        let start = self.at;
        let value = self.value(1)?;
        each(value, start..self.at)
    }

    fn end_of_list(&mut self) -> Result<(), JsonError> {
        self.take(b']')?;
        self.space();
        if self.at == self.text.len() { Ok(()) } else { Err(JsonError::Syntax) }
    }

    fn number(&mut self) -> Result<Value, JsonError> {
        let rest = &self.text.as_bytes()[self.at..];
        let end = rest
            .iter()
            .position(|b| !matches!(b, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E'))
            .unwrap_or(rest.len());
        let text = self.text.get(self.at..self.at + end).ok_or(JsonError::Syntax)?;
        self.at += end;
        if text.bytes().any(|b| matches!(b, b'.' | b'e' | b'E')) {
            return text.parse::<f64>().map(pyvalue::float).map_err(|_| JsonError::Syntax);
        }
        if let Ok(number) = text.parse::<i64>() {
            return Ok(Value::from(number));
        }
        let digits = text.strip_prefix('-').unwrap_or(text);
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(JsonError::Syntax);
        }
        text.parse::<i128>().map(Value::from).map_err(|_| JsonError::Number)
    }

    fn string(&mut self) -> Result<Cow<'a, str>, JsonError> {
        self.take(b'"')?;
        let start = self.at;
        let end = self.plain_run()?;
        if self.peek() == Some(b'"') {
            self.at += 1;
            return Ok(Cow::Borrowed(&self.text[start..end]));
        }
        let mut out = String::with_capacity((end - start) * 2);
        out.push_str(&self.text[start..end]);
        loop {
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(Cow::Owned(out));
                }
                Some(b'\\') => self.escapes(self.text.len(), &mut out)?,
                _ => return Err(JsonError::Syntax),
            }
            let start = self.at;
            let end = self.plain_run()?;
            out.push_str(&self.text[start..end]);
        }
    }

    /// Moves to the next quote or backslash and returns its place; both are ASCII, so it is a character boundary.
    fn plain_run(&mut self) -> Result<usize, JsonError> {
        let rest = &self.text.as_bytes()[self.at..];
        // Escapes often stand side by side.
        if let Some(b'"' | b'\\') = rest.first() {
            return Ok(self.at);
        }
        let run = memchr::memchr2(b'"', b'\\', rest).ok_or(JsonError::Syntax)?;
        self.at += run;
        Ok(self.at)
    }

    /// Appends what escapes side by side spell that begin before the end.
    fn escapes(&mut self, end: usize, out: &mut String) -> Result<(), JsonError> {
        let bytes = self.text.as_bytes();
        while self.at < end && bytes[self.at] == b'\\' {
            let second = *bytes.get(self.at + 1).ok_or(JsonError::Syntax)?;
            self.at += 2;
            out.push(match SHORT_ESCAPES[usize::from(second)] {
                0 if second == b'u' => self.code()?,
                0 => return Err(JsonError::Syntax),
                spelled => char::from(spelled),
            });
        }
        Ok(())
    }

    /// The character whose code follows, in one part or two.
    fn code(&mut self) -> Result<char, JsonError> {
        let first = self.hex()?;
        if !(0xD800..=0xDBFF).contains(&first) {
            return char::from_u32(first).ok_or(JsonError::Surrogate);
        }
        if !self.text.as_bytes()[self.at..].starts_with(b"\\u") {
            return Err(JsonError::Surrogate);
        }
        self.at += 2;
        let second = self.hex()?;
        if !(0xDC00..=0xDFFF).contains(&second) {
            return Err(JsonError::Surrogate);
        }
        let code = 0x1_0000 + ((first - 0xD800) << 10) + (second - 0xDC00);
        char::from_u32(code).ok_or(JsonError::Surrogate)
    }

    fn hex(&mut self) -> Result<u32, JsonError> {
        let digits = self.text.as_bytes().get(self.at..).and_then(|rest| rest.first_chunk::<4>());
        let digits = *digits.filter(|digits| are_hex(**digits)).ok_or(JsonError::Syntax)?;
        self.at += 4;
        Ok(digits.iter().fold(0, |sum, &digit| sum << 4 | u32::from(HEX[usize::from(digit)])))
    }
}

/// Whether all are hexadecimal digits. Without a branch for each: those of a text in escapes cannot be predicted.
pub(super) fn are_hex(digits: [u8; 4]) -> bool {
    digits.iter().fold(0, |all, &digit| all | HEX[usize::from(digit)]) <= 15
}

/// What a letter spells after a backslash; 0 = nothing, or more than one letter is needed.
const SHORT_ESCAPES: [u8; 256] = {
    let mut table = [0; 256];
    let spelled = *b"\"\"\\\\//b\x08f\x0cn\nr\rt\t";
    let mut at = 0;
    while at < spelled.len() {
        table[spelled[at] as usize] = spelled[at + 1];
        at += 2;
    }
    table
};

/// Values of hexadecimal digits; 255 = none.
const HEX: [u8; 256] = {
    let mut table = [255; 256];
    let mut value = 0;
    while value < 16 {
        table[b"0123456789abcdef"[value] as usize] = value as u8;
        table[b"0123456789ABCDEF"[value] as usize] = value as u8;
        value += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(text: &str) -> String {
        pyvalue::repr(&value(text).unwrap(), 99).unwrap()
    }

    #[test]
    fn values_print_as_python_prints_them() {
        for (json, python) in [
            ("1.50", "1.5"),
            ("1e3", "1000.0"),
            ("-0", "0"),
            ("-0.0", "-0.0"),
            ("1e16", "1e+16"),
            ("0.0000001", "1e-07"),
            ("9007199254740993", "9007199254740993"),
            ("123456789012345678901234567890", "123456789012345678901234567890"),
            ("1e999", "inf"),
            (r#"{"a":1,"b":[true,null,"x"],"a":2}"#, "{'a': 2, 'b': [True, None, 'x']}"),
            (r#""\ud83d\ude00 \u00e9 it's""#, "\"😀 é it's\""),
        ] {
            assert_eq!(printed(json), python, "{json}");
        }
    }

    #[test]
    fn what_cannot_be_kept_exactly_is_refused() {
        assert_eq!(value(r#""\ud83d""#).unwrap_err(), JsonError::Surrogate);
        assert_eq!(value(r#""\udc00x""#).unwrap_err(), JsonError::Surrogate);
        assert_eq!(value(&"9".repeat(60)).unwrap_err(), JsonError::Number);
        assert_eq!(value(&"[".repeat(100_000)).unwrap_err(), JsonError::Depth);
        for text in ["", "{", "[1,", "tru", "\"a", "1 2", "{\"a\" 1}", "-", "--1", "\"\\u12\"", "NaN"] {
            assert_eq!(value(text).unwrap_err(), JsonError::Syntax, "{text}");
        }
    }

    #[test]
    fn elements_go_on_after_any_of_them() {
        let text = r#" [ 1, {"a": "]"} ,[2],"x" ] "#;
        let read = |from| {
            let mut seen = Vec::new();
            elements::<JsonError>(text, from, |value, place| {
                seen.push((pyvalue::repr(&value, 99).unwrap(), place));
                Ok(())
            })
            .map(|()| seen)
        };
        let all = read(0).unwrap();
        assert_eq!(all.iter().map(|(v, _)| v.as_str()).collect::<Vec<_>>(), ["1", "{'a': ']'}", "[2]", "'x'"]);
        for (n, (_, place)) in all.iter().enumerate() {
            assert_eq!(read(place.end).unwrap(), all[n + 1..]);
        }
        for text in ["", "[", "[1", "[1,", "[1,]", "[1]x", "{}", "[,]"] {
            assert!(elements::<JsonError>(text, 0, |_, _| Ok(())).is_err(), "{text}");
        }
        assert!(elements::<JsonError>("[]", 0, |_, _| Ok(())).is_ok());
    }

    #[test]
    fn long_strings_are_the_same_wherever_the_steps_end() {
        let text = r#""plain é \n\" \ud83d\ude00 你好 \\ end" and what follows"#;
        let whole = leading_string(text).unwrap();
        for bytes in 1..text.len() {
            let (mut string, mut out) = (LongString::new(text).unwrap(), String::new());
            while !string.step(bytes, &mut out).unwrap() {}
            assert_eq!(out, whole, "steps of {bytes}");
            assert_eq!(&text[string.reader.at..], " and what follows");
        }
        for text in ["\"cut off", "\"\\", "\"\\x\"", "\"\\ud83d\""] {
            let (mut string, mut out) = (LongString::new(text).unwrap(), String::new());
            assert!((0..20).any(|_| string.step(1, &mut out).is_err()), "{text}");
        }
        assert!(LongString::new("x").is_err());
    }

    #[test]
    fn escapes_spell_what_another_parser_reads() {
        let escapes = [
            r#"\""#,
            r"\\",
            r"\/",
            r"\b",
            r"\f",
            r"\n",
            r"\r",
            r"\t",
            r"\u0000",
            r"\u00E9",
            r"\u4f60",
            r"\ud83D\uDe00",
        ];
        for first in escapes {
            for second in escapes.into_iter().chain(["", "x", "é"]) {
                let text = format!("\"{first}{second}{first}\"");
                let expected: String = serde_json::from_str(&text).unwrap();
                assert_eq!(string(&text).unwrap(), expected, "{text}");
            }
        }
        for text in [r#""\x""#, r#""\u12g4""#, r#""\u123"#, r#""\"#, r#""\u+123""#, r#""\ud83d\n""#] {
            assert!(string(text).is_err(), "{text}");
        }
    }

    #[test]
    fn strings_without_escapes_are_borrowed() {
        assert!(matches!(string(" \"plain é\" ").unwrap(), Cow::Borrowed("plain é")));
        assert!(matches!(string(r#""a\nb""#).unwrap(), Cow::Owned(text) if text == "a\nb"));
    }
}
