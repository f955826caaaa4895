//! A prompt that is a JSON list of token ids, read in slices.

use crate::service::MissReason;

/// Token ids read from a list in one slice.
pub(super) const SLICE_IDS: usize = 4096;
/// Bytes of a list after which its slice ends, however few ids they spell.
const SLICE_LIST_BYTES: usize = 128 * 1024;
/// Blanks beside an id that are passed over in one slice.
pub(super) const BLANKS_MAX: usize = 64 * 1024;
/// Bytes of an id that are looked at: one more than the largest has.
const ID_DIGITS_MAX: usize = 11;

/// Reads ids of a JSON list up to the slice's limit; the rest, or none when the list is over.
pub(super) fn read_ids<'a>(list: &'a str, ids: &mut Vec<u32>) -> Result<Option<&'a str>, MissReason> {
    let mut rest = list;
    for _ in 0..SLICE_IDS {
        let blanks = blanks(rest);
        rest = &rest[blanks..];
        if blanks == BLANKS_MAX || list.len() - rest.len() > SLICE_LIST_BYTES {
            return Ok(Some(rest));
        }
        let digits = rest.bytes().take(ID_DIGITS_MAX).take_while(u8::is_ascii_digit).count();
        ids.push(rest[..digits].parse().map_err(|_| MissReason::Tokenize)?);
        rest = &rest[digits..];
        // So many blanks behind an id as are looked at in one slice: nobody writes more.
        rest = &rest[self::blanks(rest)..];
        match rest.as_bytes().first() {
            Some(b',') => rest = &rest[1..],
            Some(b']') => return Ok(None),
            _ => return Err(MissReason::Tokenize),
        }
    }
    Ok(Some(rest))
}

/// Blanks that the text begins with, up to [`BLANKS_MAX`].
fn blanks(text: &str) -> usize {
    let blanks = text.bytes().take(BLANKS_MAX);
    blanks.take_while(|byte| matches!(byte, b' ' | b'\n' | b'\r' | b'\t')).count()
}
