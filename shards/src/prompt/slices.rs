//! Cuts that follow from a vocabulary: between two characters that no token joins, a merge cannot reach across.
//!
//! A byte-pair merge makes a token of the vocabulary. So where no token has the end of one character beside the begin
//! of the next, both sides are merged as if the other were not there.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt;

use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// What a vocabulary says about cuts.
#[derive(Clone, Debug, Default)]
pub(super) struct Joins {
    /// Ends and begins, up to three bytes each, that stand beside each other in a token where an ideograph may begin.
    ideographs: HashSet<([u8; 3], [u8; 3])>,
    /// Whether a token has a space, spelled `▁`, right after a letter, a digit or a sign that may end a word.
    pub words: bool,
    /// Whether nothing but a space spelled `▁` is done to a text before it is merged as one.
    pub spelled_spaces: bool,
}

#[derive(serde::Deserialize)]
struct File<'a> {
    normalizer: Option<serde_json::Value>,
    pre_tokenizer: Option<serde_json::Value>,
    #[serde(borrow)]
    model: ModelPart<'a>,
}

#[derive(serde::Deserialize)]
struct ModelPart<'a> {
    #[serde(borrow)]
    vocab: &'a RawValue,
}

impl Joins {
    /// Reads the text of a `tokenizer.json`; none where it has no vocabulary of byte pairs.
    pub(super) fn read(json: &str) -> Option<Self> {
        let file: File = serde_json::from_str(json).ok()?;
        let mut joins = Joins { spelled_spaces: is_spelled_spaces(&file), ..Joins::default() };
        let bytes = byte_of_char();
        let mut token = Vec::new();
        let mut add = |text: &str| {
            token.clear();
            token.extend(text.chars().map_while(|c| bytes.get(&c)));
            joins.add_ideographs(&token);
            joins.words |=
                text.char_indices().skip(1).any(|(at, c)| c == '▁' && super::tokenizer::is_word_end(text, at));
        };
        let mut reader = serde_json::Deserializer::from_str(file.model.vocab.get());
        reader.deserialize_map(Keys(&mut add)).ok()?;
        Some(joins)
    }

    fn add_ideographs(&mut self, token: &[u8]) {
        for at in 1..token.len() {
            if begins_ideograph(token[at]) {
                let before = &token[at.saturating_sub(3)..at];
                let after = &token[at..token.len().min(at + 3)];
                self.ideographs.insert((padded(before), padded(after)));
            }
        }
    }

    /// Whether the byte begins an ideograph that no token joins to the ideograph before it.
    pub(super) fn parts_ideographs(&self, text: &[u8], at: usize) -> bool {
        let (Some(before), Some(after)) = (at.checked_sub(3).and_then(|from| text.get(from..at)), text.get(at..at + 3))
        else {
            return false;
        };
        if !is_ideograph(before) || !is_ideograph(after) {
            return false;
        }
        let joined = |left: usize, right: usize| {
            self.ideographs.contains(&(padded(&before[3 - left..]), padded(&after[..right])))
        };
        !(1..=3).any(|left| (1..=3).any(|right| joined(left, right)))
    }
}

fn padded(part: &[u8]) -> [u8; 3] {
    let mut out = [0; 3];
    out[..part.len()].copy_from_slice(part);
    out
}

/// A lead byte of U+4000 to U+9FFF.
pub(super) fn begins_ideograph(byte: u8) -> bool {
    (0xE4..=0xE9).contains(&byte)
}

/// U+4E00 to U+9FFF: letters without case that no normal form changes or joins.
fn is_ideograph(bytes: &[u8]) -> bool {
    let text = std::str::from_utf8(bytes).ok();
    text.and_then(|text| text.chars().next()).is_some_and(|c| ('\u{4E00}'..='\u{9FFF}').contains(&c))
}

/// Spaces are replaced by `▁`, and nothing else happens before the merges (a split at spaces finds none by then).
fn is_spelled_spaces(file: &File) -> bool {
    let Some(normalizer) = &file.normalizer else { return false };
    let replaces =
        normalizer["type"] == "Replace" && normalizer["pattern"]["String"] == " " && normalizer["content"] == "▁";
    let splits_nothing =
        file.pre_tokenizer.as_ref().is_none_or(|p| p["type"] == "Split" && p["pattern"]["String"] == " ");
    replaces && splits_nothing
}

/// Byte-level vocabularies spell bytes as printable characters.
fn byte_of_char() -> HashMap<char, u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 256;
    (0..=255u8)
        .filter_map(|byte| {
            let code = if printable(byte) {
                u32::from(byte)
            } else {
                next += 1;
                next - 1
            };
            Some((char::from_u32(code)?, byte))
        })
        .collect()
}

/// Shows the keys of a map to a function.
struct Keys<F>(F);

impl<'de, F: FnMut(&str)> Visitor<'de> for Keys<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of tokens")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(Key(key)) = map.next_key::<Key<'de>>()? {
            (self.0)(&key);
            map.next_value::<IgnoredAny>()?;
        }
        Ok(())
    }
}

/// A key, borrowed where it has no escapes.
#[derive(serde::Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ideographs_are_parted_where_no_token_joins_them() {
        // 你 E4BDA0, 好 E5A5BD, 世 E4B896; a token of the last byte of one and the first two of the next joins too.
        let chars = byte_of_char();
        let spelled = |bytes: &[u8]| -> String {
            bytes.iter().map(|b| *chars.iter().find(|(_, byte)| *byte == b).unwrap().0).collect()
        };
        let vocab = [spelled("你好".as_bytes()), spelled(&[0xBD, 0xE4, 0xB8]), spelled("世".as_bytes()), "a".into()];
        let vocab: serde_json::Map<String, serde_json::Value> =
            vocab.into_iter().enumerate().map(|(n, token)| (token, n.into())).collect();
        let file = serde_json::json!({"model": {"vocab": vocab}}).to_string();
        let joins = Joins::read(&file).unwrap();
        for (text, parts) in [("你好", false), ("好世", false), ("好你", true), ("世好", true), ("a你你", false)]
        {
            assert_eq!(joins.parts_ideographs(text.as_bytes(), 3), parts, "{text}");
        }
        assert!(!joins.spelled_spaces && !joins.words);
        assert!(Joins::read("{}").is_none());
    }
}
