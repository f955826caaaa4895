//! The token ids of a store, still in their wire form.
//!
//! Three spellings are known: ids one by one; pairs of neighbours, where speculation keys blocks by bigrams (SGLang
//! with EAGLE: n pairs stand for n + 1 ids); and ids among which digests stand for images (TensorRT-LLM's stream).
//!
//! **Invariant.** What was read is well formed: iterating never fails. Keys say all by themselves, so ids that cannot
//! be had cost their event nothing.

#![forbid(unsafe_code)]

use super::msgpack::{Head, Malformed, Reader};

/// How ids are spelled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Spelling {
    /// One by one.
    #[default]
    Ids,
    /// Pairs of neighbours.
    Bigrams,
    /// Something stands among them that is no id, or pairs do not join.
    Opaque,
}

/// The token ids of one store.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tokens<'a> {
    wire: &'a [u8],
    len: u32,
    spelling: Spelling,
}

impl<'a> Tokens<'a> {
    /// Reads an array of ids, of pairs, or of ids and digests.
    pub(crate) fn read(reader: &mut Reader<'a>) -> Result<Self, Malformed> {
        let len = reader.array()?;
        let start = *reader;
        let spelling = match reader.skip_unsigned(len) {
            Ok(()) => Spelling::Ids,
            Err(Malformed::Framing) => return Err(Malformed::Framing),
            Err(Malformed::Type) => {
                *reader = start;
                odd(reader, len)?
            }
        };
        let wire = &start.rest()[..start.rest().len() - reader.rest().len()];
        Ok(Tokens { wire, len, spelling })
    }

    /// Units: ids, or pairs. A block of n has n of them.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// How they are spelled.
    pub(crate) fn spelling(&self) -> Spelling {
        self.spelling
    }

    /// The first `n` units, or all there are.
    pub(crate) fn first(self, n: u32) -> Self {
        Tokens { len: self.len.min(n), ..self }
    }

    /// Puts the ids into `ids`; false where they are opaque, or one is no token of a text.
    pub(crate) fn decode(self, ids: &mut Vec<u32>) -> bool {
        ids.clear();
        ids.reserve(self.len as usize);
        let whole = self.ids().all(|id| u32::try_from(id).map(|id| ids.push(id)).is_ok());
        whole && self.spelling != Spelling::Opaque
    }

    /// The ids in order. What neighbouring pairs share comes once: of n bigrams, n + 1 ids. Empty where they are
    /// opaque.
    pub(crate) fn ids(self) -> impl Iterator<Item = u64> + 'a {
        let mut reader = Reader::new(if self.spelling == Spelling::Opaque { &[] } else { self.wire });
        let mut left = self.len;
        let mut second = None;
        let mut first = true;
        std::iter::from_fn(move || {
            if let Some(id) = second.take() {
                return Some(id);
            }
            left = left.checked_sub(1)?;
            match reader.head().ok()? {
                Head::Uint(id) => Some(id),
                Head::Array(2) => {
                    let pair = [id(reader.head().ok()?)?, id(reader.head().ok()?)?];
                    if std::mem::take(&mut first) {
                        second = Some(pair[1]);
                        Some(pair[0])
                    } else {
                        Some(pair[1])
                    }
                }
                _ => None,
            }
        })
    }
}

fn id(head: Head<'_>) -> Option<u64> {
    match head {
        Head::Uint(id) => Some(id),
        _ => None,
    }
}

/// Reads units that are not all ids.
fn odd(reader: &mut Reader<'_>, units: u32) -> Result<Spelling, Malformed> {
    let (mut pairs, mut joined) = (0, true);
    let mut before = None;
    for _ in 0..units {
        match reader.head()? {
            Head::Uint(_) | Head::Str(_) | Head::Bin(_) => {}
            Head::Array(2) => {
                let [first, second] = [id(reader.head()?), id(reader.head()?)];
                joined &= first.is_some() && second.is_some() && before.is_none_or(|before| Some(before) == first);
                before = second;
                pairs += 1;
            }
            _ => return Err(Malformed::Type),
        }
    }
    Ok(if pairs == units && joined { Spelling::Bigrams } else { Spelling::Opaque })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(bytes: &[u8], expected: Result<(Spelling, u32, &[u64]), Malformed>) {
        let read = Tokens::read(&mut Reader::new(bytes));
        let read = read.map(|tokens| (tokens.spelling(), tokens.len(), tokens.ids().collect::<Vec<_>>()));
        assert_eq!(read, expected.map(|(spelling, units, ids)| (spelling, units, ids.to_vec())), "{bytes:02x?}");
    }

    #[test]
    fn ids_come_out_of_every_spelling() {
        check(b"\x90", Ok((Spelling::Ids, 0, &[])));
        check(b"\x93\x01\xcd\x01\x00\xce\x00\x01\x00\x00", Ok((Spelling::Ids, 3, &[1, 256, 65_536])));
        check(b"\x91\xcf\x00\x00\x00\x01\x00\x00\x00\x00", Ok((Spelling::Ids, 1, &[1 << 32])));
        check(b"\x92\x92\x05\x06\x92\x06\x07", Ok((Spelling::Bigrams, 2, &[5, 6, 7])));
        check(b"\x91\xdc\x00\x02\x05\x06", Ok((Spelling::Bigrams, 1, &[5, 6])));
    }

    #[test]
    fn the_first_units_have_their_ids_alone() {
        let of = |bytes| Tokens::read(&mut Reader::new(bytes)).unwrap().first(2).ids().collect::<Vec<_>>();
        assert_eq!(of(b"\x93\x01\x02\x03"), [1, 2]);
        assert_eq!(of(b"\x93\x92\x01\x02\x92\x02\x03\x92\x03\x04"), [1, 2, 3]);
        assert_eq!(of(b"\x91\x07"), [7]);
    }

    #[test]
    fn what_cannot_be_ids_is_opaque_and_what_is_nothing_known_is_refused() {
        check(b"\x92\x01\xa1x", Ok((Spelling::Opaque, 2, &[])));
        check(b"\x92\x01\xc4\x01x", Ok((Spelling::Opaque, 2, &[])));
        check(b"\x92\x92\x05\x06\x92\x07\x08", Ok((Spelling::Opaque, 2, &[])));
        check(b"\x92\x92\x05\x06\x07", Ok((Spelling::Opaque, 2, &[])));
        check(b"\x91\x93\x01\x02\x03", Err(Malformed::Type));
        check(b"\x91\xff", Err(Malformed::Type));
        check(b"\x91\xc0", Err(Malformed::Type));
        check(b"\x92\x01", Err(Malformed::Framing));
        check(b"\x91\x92\x01", Err(Malformed::Framing));
    }
}
