//! `/v1/completions`: a text, ids, or the first of several.

use super::body::{self, BodyView};
use super::json;
use super::request::Source;
use crate::service::MissReason;

/// Reads the prompt.
///
/// # Errors
/// There is none, or it is neither text nor ids.
pub(super) fn source<'a>(view: &BodyView<'a>) -> Result<Source<'a>, MissReason> {
    let special = body::flag(view.add_special_tokens, true).ok_or(MissReason::Tokenize)?;
    first(view.prompt.ok_or(MissReason::TextEmpty)?, special)
}

/// A text, a list of ids, or the first of a list of either.
pub(super) fn first(raw: &str, special: bool) -> Result<Source<'_>, MissReason> {
    let text = |raw| {
        let text = json::leading_string(raw).map_err(|_| MissReason::Tokenize)?;
        Ok(Source::Text { text, special, whole: true })
    };
    match raw.as_bytes().first() {
        Some(b'"') => text(raw),
        Some(b'[') => {
            let inside = raw[1..].trim_start();
            match inside.as_bytes().first() {
                Some(b'"') => text(inside),
                Some(b'[') => Ok(Source::Ids(&inside[1..])),
                _ => Ok(Source::Ids(inside)),
            }
        }
        _ => Err(MissReason::Tokenize),
    }
}
