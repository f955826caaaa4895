//! Members of a JSON object set, added or taken out, while every other byte stays as it came.
//!
//! **Invariant.** What is not named by an edit is kept byte for byte and in its order; the result is a JSON object
//! again. A name that stands twice is edited everywhere, so that it does not matter which of the two a reader takes.
//!
//! A member is found by its name as JSON spells it, escapes undone. A new member stands behind the last one: the bytes
//! before it, which are most of a body, need not be moved.

use std::borrow::Cow;
use std::ops::Range;

use super::json;
use super::scan::{Member, Scan};

/// Members of one object. An object with more is not edited: [`SpliceError::TooManyMembers`].
pub const MEMBERS_MAX: usize = 4096;
/// Bytes that the edits of one body may bring along, names included. Beyond it: [`SpliceError::TooLong`].
pub const ADDED_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Bytes of a member's name as it stands, beyond which it is none that anybody asks for.
const NAME_BYTES_MAX: usize = 256;

/// Why a body is not edited; it is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpliceError {
    /// The body, or the member that an edit goes into, is no JSON object in UTF-8.
    #[error("not a JSON object in UTF-8")]
    NotAnObject,
    /// More than [`MEMBERS_MAX`].
    #[error("the JSON object has more than {MEMBERS_MAX} members")]
    TooManyMembers,
    /// The edits have more than [`ADDED_BYTES_MAX`].
    #[error("more than {ADDED_BYTES_MAX} bytes would be added to the JSON object")]
    TooLong,
}

/// A look for the members of an object, in slices; becomes a [`Splice`].
#[derive(Debug)]
pub struct Outline<'a> {
    body: &'a [u8],
    scan: Scan<'a>,
    places: Vec<Place<'a>>,
    is_full: bool,
}

/// Edits of one JSON object.
#[derive(Clone, Debug)]
pub struct Splice<'a> {
    body: &'a [u8],
    places: Vec<Place<'a>>,
    /// Names and JSON texts of new members.
    added: Vec<(String, Cow<'a, [u8]>)>,
    added_bytes: usize,
}

/// A part of the edited body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Bytes of the body as it came.
    Kept(Range<usize>),
    /// Bytes of an edit.
    New(Cow<'a, [u8]>),
}

/// Where a member stands, and what becomes of it.
#[derive(Clone, Debug)]
struct Place<'a> {
    /// Its name in quotes, escapes as they stand.
    name: &'a str,
    /// From the name's first quote to the end of the value.
    whole: Range<usize>,
    value: Range<usize>,
    edit: Edit<'a>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Edit<'a> {
    Keep,
    Set(Cow<'a, [u8]>),
    Remove,
}

impl Place<'_> {
    fn is_named(&self, name: &str) -> bool {
        self.name.len() <= NAME_BYTES_MAX && json::string(self.name).is_ok_and(|own| own == name)
    }
}

impl<'a> Outline<'a> {
    /// Begins with a body that should be a JSON object, blanks around it allowed.
    #[must_use]
    pub fn new(body: &'a [u8]) -> Self {
        Outline { body, scan: Scan::new(body), places: Vec::new(), is_full: false }
    }

    /// Looks at so many further bytes, at least; whether the end is reached. Costs about 0.6 ns per byte.
    ///
    /// # Errors
    /// The body cannot be edited.
    pub fn step(&mut self, bytes: usize) -> Result<bool, SpliceError> {
        let Outline { body, scan, places, is_full } = self;
        let done = scan.step(bytes, |Member { name, value }| {
            if places.len() == MEMBERS_MAX {
                *is_full = true;
                return;
            }
            let (name_at, value_at) = (offset(body, name), offset(body, value));
            let value = value_at..value_at + value.len();
            places.push(Place { name, whole: name_at..value.end, value, edit: Edit::Keep });
        });
        match done {
            _ if self.is_full => Err(SpliceError::TooManyMembers),
            Ok(done) => Ok(done),
            Err(_) => Err(SpliceError::NotAnObject),
        }
    }

    /// The edits, none so far. To be called when [`Outline::step`] has reached the end.
    #[must_use]
    pub fn into_splice(self) -> Splice<'a> {
        Splice { body: self.body, places: self.places, added: Vec::new(), added_bytes: 0 }
    }
}

/// Where a part of the body begins.
fn offset(body: &[u8], part: &str) -> usize {
    part.as_ptr() as usize - body.as_ptr() as usize
}

impl<'a> Splice<'a> {
    /// Begins with a body, looked through in one go: for bodies that are known to be short. Long ones go through
    /// [`Outline`].
    ///
    /// # Errors
    /// The body cannot be edited.
    pub fn of(body: &'a [u8]) -> Result<Self, SpliceError> {
        let mut outline = Outline::new(body);
        while !outline.step(usize::MAX)? {}
        Ok(outline.into_splice())
    }

    /// The JSON text of a member as it came, whatever the edits; of a name that stands twice, the last as in Python.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<&'a [u8]> {
        let place = self.places.iter().rev().find(|place| place.is_named(name))?;
        Some(&self.body[place.value.clone()])
    }

    /// Gives a member a value, which must be the text of one JSON value; adds the member where there is none.
    ///
    /// # Errors
    /// The limit of added bytes.
    pub fn set_member(&mut self, name: &str, value: &[u8]) -> Result<(), SpliceError> {
        self.put_member(name, value.to_vec())
    }

    /// As [`Splice::set_member`], without a copy: a value that is lent comes out of [`Splice::pieces`] as it is, however
    /// long.
    ///
    /// # Errors
    /// The limit of added bytes.
    pub fn put_member(&mut self, name: &str, value: impl Into<Cow<'a, [u8]>>) -> Result<(), SpliceError> {
        let value = value.into();
        let mut stands = false;
        for place in self.places.iter_mut().filter(|place| place.is_named(name)) {
            stands = true;
            self.added_bytes = self.added_bytes.saturating_add(value.len());
            if self.added_bytes > ADDED_BYTES_MAX {
                return Err(SpliceError::TooLong);
            }
            place.edit = Edit::Set(value.clone());
        }
        if stands {
            return Ok(());
        }
        self.added_bytes = self.added_bytes.saturating_add(name.len() + value.len());
        if self.added_bytes > ADDED_BYTES_MAX {
            return Err(SpliceError::TooLong);
        }
        self.added.retain(|(own, _)| own != name);
        self.added.push((name.to_owned(), value));
        Ok(())
    }

    /// Gives a member of the member `outer` a value. Where `outer` is absent or null it becomes an object with that
    /// one member; where it is an object its other members stay as they came.
    ///
    /// # Errors
    /// `outer` is something else than an object or null, or a limit is reached.
    pub fn set_inside(&mut self, outer: &str, name: &str, value: &[u8]) -> Result<(), SpliceError> {
        let added = self.added.iter().find(|(own, _)| own == outer);
        let edited = self.places.iter().rev().find(|place| place.is_named(outer)).map(|place| match &place.edit {
            Edit::Set(value) => &value[..],
            Edit::Remove => b"null",
            Edit::Keep => &self.body[place.value.clone()],
        });
        let before = match added.map_or(edited, |(_, value)| Some(&value[..])) {
            None | Some(b"null") => &b"{}"[..],
            Some(value) => value,
        };
        let mut inner = Splice::of(before)?;
        inner.set_member(name, value)?;
        let value = inner.into_vec();
        self.set_member(outer, &value)
    }

    /// Takes a member out, wherever it stands; nothing happens where it does not.
    pub fn remove_member(&mut self, name: &str) {
        for place in self.places.iter_mut().filter(|place| place.is_named(name)) {
            place.edit = Edit::Remove;
        }
        self.added.retain(|(own, _)| own != name);
    }

    /// The edited body, in pieces. Without edits it is the whole body.
    #[must_use]
    pub fn pieces(self) -> Vec<Piece<'a>> {
        let mut pieces = Pieces { done: Vec::new(), from: 0 };
        let mut keeps = false;
        for (n, place) in self.places.iter().enumerate() {
            match &place.edit {
                Edit::Keep => keeps = true,
                Edit::Set(value) => {
                    keeps = true;
                    pieces.put(place.value.clone(), Some(value.clone()));
                }
                // One comma goes with it: the one in front, or, of the first ones, the one behind.
                Edit::Remove if keeps => pieces.put(self.places[n - 1].whole.end..place.whole.end, None),
                Edit::Remove => {
                    let end = self.places.get(n + 1).map_or(place.whole.end, |next| next.whole.start);
                    pieces.put(place.whole.start..end, None);
                }
            }
        }
        if !self.added.is_empty() {
            let brace = || self.body.iter().rposition(|&byte| byte == b'}').unwrap_or(self.body.len());
            let at = self.places.last().map_or_else(brace, |last| last.whole.end);
            let mut members = Vec::new();
            for (name, value) in &self.added {
                if std::mem::replace(&mut keeps, true) {
                    members.push(b',');
                }
                write_string(name, &mut members);
                members.push(b':');
                match value {
                    Cow::Owned(value) => members.extend_from_slice(value),
                    Cow::Borrowed(_) => {
                        pieces.put(at..at, Some(Cow::Owned(std::mem::take(&mut members))));
                        pieces.put(at..at, Some(value.clone()));
                    }
                }
            }
            if !members.is_empty() {
                pieces.put(at..at, Some(Cow::Owned(members)));
            }
        }
        pieces.end(self.body.len())
    }

    /// The edited body in one piece.
    #[must_use]
    pub fn into_vec(self) -> Vec<u8> {
        let body = self.body;
        let mut out = Vec::with_capacity(body.len() + self.added_bytes);
        for piece in self.pieces() {
            match piece {
                Piece::Kept(range) => out.extend_from_slice(&body[range]),
                Piece::New(bytes) => out.extend_from_slice(&bytes),
            }
        }
        out
    }
}

/// Pieces so far, in the order of the body.
struct Pieces<'a> {
    done: Vec<Piece<'a>>,
    /// Where the body goes on.
    from: usize,
}

impl<'a> Pieces<'a> {
    /// Puts new bytes, or nothing, in the place of old ones.
    fn put(&mut self, old: Range<usize>, new: Option<Cow<'a, [u8]>>) {
        if self.from < old.start {
            self.done.push(Piece::Kept(self.from..old.start));
        }
        self.done.extend(new.map(Piece::New));
        self.from = old.end;
    }

    fn end(mut self, len: usize) -> Vec<Piece<'a>> {
        self.put(len..len, None);
        self.done
    }
}

/// Writes a name as a JSON string.
fn write_string(text: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    for character in text.chars() {
        let mut bytes = [0; 4];
        let escaped: Cow<'_, str> = match character {
            '"' => Cow::Borrowed("\\\""),
            '\\' => Cow::Borrowed("\\\\"),
            '\0'..='\u{1f}' => Cow::Owned(format!("\\u{:04x}", u32::from(character))),
            _ => Cow::Borrowed(character.encode_utf8(&mut bytes)),
        };
        out.extend_from_slice(escaped.as_bytes());
    }
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Edits in one word each: `+name=value`, `-name`, `>outer.name=value`.
    fn edited(body: &str, edits: &[&str]) -> Result<String, SpliceError> {
        let mut splice = Splice::of(body.as_bytes())?;
        for edit in edits {
            let (name, value) = edit[1..].split_once('=').unwrap_or((&edit[1..], ""));
            match (edit.as_bytes()[0], name.split_once('.')) {
                (b'+', _) => splice.set_member(name, value.as_bytes())?,
                (b'>', Some((outer, name))) => splice.set_inside(outer, name, value.as_bytes())?,
                _ => splice.remove_member(name),
            }
        }
        Ok(String::from_utf8(splice.into_vec()).expect("text stays text"))
    }

    #[test]
    fn only_what_is_named_changes() {
        for (body, edits, expected) in [
            (r#" { "a" : 1.50 , "b":[ ] } "#, &[][..], r#" { "a" : 1.50 , "b":[ ] } "#),
            ("{}", &["+x=1"], r#"{"x":1}"#),
            (" { } ", &["+x=1", "+y=2"], r#" { "x":1,"y":2} "#),
            (r#"{"a":1 }"#, &["+x=[1,2]"], r#"{"a":1,"x":[1,2] }"#),
            (r#"{"a":1,"b":2,"c":3}"#, &["-a"], r#"{"b":2,"c":3}"#),
            (r#"{"a":1, "b":2 ,"c":3}"#, &["-b"], r#"{"a":1 ,"c":3}"#),
            (r#"{"a":1,"b":2,"c":3 }"#, &["-c"], r#"{"a":1,"b":2 }"#),
            (r#"{ "a":1,"b":2 }"#, &["-a", "-b"], "{  }"),
            (r#"{"a":1,"b":2}"#, &["-a", "-b", "+x=0"], r#"{"x":0}"#),
            (r#"{"a":1,"b":2,"c":3}"#, &["-a", "-c", "+b=4", "+x=5"], r#"{"b":4,"x":5}"#),
            (r#"{"stream" : true,"m":[]}"#, &["+stream=false"], r#"{"stream" : false,"m":[]}"#),
            (r#"{"a":1,"a":2}"#, &["+a=3"], r#"{"a":3,"a":3}"#),
            (r#"{"a":1,"b":0,"\u0061":2}"#, &["-a"], r#"{"b":0}"#),
            (r#"{"a":1}"#, &["+x=1", "-x"], r#"{"a":1}"#),
            (r#"{"a":1}"#, &["+x=1", "+x=2"], r#"{"a":1,"x":2}"#),
            (r#"{"a":1}"#, &[r#"+q"\=1"#], r#"{"a":1,"q\"\\":1}"#),
            (r#"{"a":1}"#, &[">k.p=[7]"], r#"{"a":1,"k":{"p":[7]}}"#),
            (r#"{"k": {"o" : 1} ,"a":1}"#, &[">k.p=[7]"], r#"{"k": {"o" : 1,"p":[7]} ,"a":1}"#),
            (r#"{"k":{"p":0,"o":1}}"#, &[">k.p=[7]", ">k.q=8"], r#"{"k":{"p":[7],"o":1,"q":8}}"#),
            (r#"{"k":null}"#, &[">k.p=[7]"], r#"{"k":{"p":[7]}}"#),
            (r#"{"k":{"o":1}}"#, &["-k", ">k.p=[7]"], r#"{"k":{"p":[7]}}"#),
            ("{}", &[">k.p=1", ">k.q=2"], r#"{"k":{"p":1,"q":2}}"#),
        ] {
            assert_eq!(edited(body, edits).as_deref(), Ok(expected), "{body} {edits:?}");
        }
    }

    #[test]
    fn what_cannot_be_edited_says_why() {
        for body in ["", "[]", "{", r#"{"a":1,}"#, "{} {}", "\"x\""] {
            assert_eq!(edited(body, &["+x=1"]), Err(SpliceError::NotAnObject), "{body}");
        }
        assert!(Splice::of(b"{\"a\":\"\xff\"}").is_err());
        assert_eq!(edited(r#"{"k":[1]}"#, &[">k.p=1"]), Err(SpliceError::NotAnObject));
        let many = format!("{{{}\"z\":0}}", "\"a\":0,".repeat(MEMBERS_MAX));
        assert_eq!(edited(&many, &[]), Err(SpliceError::TooManyMembers));
        let mut splice = Splice::of(br#"{"a":1,"a":2}"#).unwrap();
        let long = vec![b'1'; ADDED_BYTES_MAX / 2 + 1];
        assert_eq!(splice.set_member("a", &long), Err(SpliceError::TooLong), "it would stand twice");
        assert_eq!(splice.set_member("b", &vec![b'1'; ADDED_BYTES_MAX]), Err(SpliceError::TooLong));
    }

    #[test]
    fn values_are_those_that_came() {
        let mut splice = Splice::of(br#"{"a": [1, 2] ,"\u0061":{"x":0},"b":null}"#).unwrap();
        splice.remove_member("a");
        assert_eq!(splice.value("a"), Some(&br#"{"x":0}"#[..]));
        assert_eq!(splice.value("b"), Some(&b"null"[..]));
        assert_eq!(splice.value("c"), None);
    }

    #[test]
    fn an_outline_is_the_same_wherever_its_steps_end() {
        let body = r#" {"a\u0031": "é😀\"}" ,"b":{"c":[1,{}]},"a1":-1.5e3} "#.as_bytes();
        for bytes in 1..=body.len() {
            let mut outline = Outline::new(body);
            while !outline.step(bytes).unwrap() {}
            let mut splice = outline.into_splice();
            splice.remove_member("a1");
            assert_eq!(splice.into_vec(), br#" {"b":{"c":[1,{}]}} "#, "steps of {bytes}");
        }
    }

    proptest! {
        /// Against a plain parser that builds the object: as many edits as wanted, in any order, on objects whose
        /// names repeat.
        #[test]
        fn edits_do_to_a_body_what_they_do_to_an_object(
            members in proptest::collection::vec((0..5u8, "(1|null|\"x,}\"|\\[1, \\{\\}\\]|\\{\"n\" : 0\\})", " ?"), 0..6),
            edits in proptest::collection::vec((0..3u8, 0..6u8, 0..9u8), 0..6),
        ) {
            let members: Vec<String> =
                members.iter().map(|(name, value, blank)| format!("{blank}\"m{name}\"{blank}:{value}{blank}")).collect();
            let body = format!("{{{}}}", members.join(","));
            let mut splice = Splice::of(body.as_bytes()).unwrap();
            let mut plain: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&body).unwrap();
            for (kind, name, value) in edits {
                let name = format!("m{name}");
                let text = value.to_string();
                match kind {
                    0 => {
                        splice.set_member(&name, text.as_bytes()).unwrap();
                        plain.insert(name, value.into());
                    }
                    1 => {
                        splice.remove_member(&name);
                        plain.remove(&name);
                    }
                    _ => {
                        let inner = plain.entry(name.clone()).or_insert(serde_json::Value::Null);
                        if inner.is_null() {
                            *inner = serde_json::json!({});
                        }
                        let result = splice.set_inside(&name, "n", text.as_bytes());
                        match inner.as_object_mut() {
                            Some(inner) => drop(inner.insert("n".into(), value.into())),
                            None => prop_assert_eq!(result, Err(SpliceError::NotAnObject)),
                        }
                    }
                }
            }
            let edited = splice.into_vec();
            let edited: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&edited).unwrap();
            prop_assert_eq!(edited, plain);
        }
    }
}
