//! A request's prompt shown whole: what `kvlane render` and `kvlane explain` print. Not for the hot path.

use super::body::BodyView;
use super::model::Model;
use super::request::{Prompt, Rendering, Source};
use super::{Api, SLICE_BYTES};
use crate::service::MissReason;

/// A request's prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preview {
    /// The text; none for requests that bring ids.
    pub text: Option<String>,
    /// The ids, special tokens included; before any truncation.
    pub ids: Vec<u32>,
    /// False if only this beginning of the prompt can be known.
    pub whole: bool,
    /// Places in the text, in bytes, at which it is cut into slices.
    pub cuts: Vec<usize>,
}

/// Reads, renders and tokenizes a request in one go.
///
/// # Errors
/// The reason why its prompt cannot be known.
pub fn preview(api: Api, body: &[u8], model: &Model, rendering: Rendering<'_>) -> Result<Preview, MissReason> {
    let view = BodyView::parse(body).ok_or(MissReason::Tokenize)?;
    match Prompt::of(api, &view, model, rendering)?.source {
        Source::Ids(list) => {
            let end = list.find(']').ok_or(MissReason::Tokenize)?;
            let ids = list[..end].split(',').filter(|id| !id.trim().is_empty());
            let ids = ids.map(|id| id.trim().parse().map_err(|_| MissReason::Tokenize)).collect::<Result<_, _>>()?;
            Ok(Preview { text: None, ids, whole: true, cuts: Vec::new() })
        }
        Source::Text { text, special, whole } => {
            let tokenizer = model.tokenizer();
            let mut ids = if special { model.prefix(rendering.add_bos) } else { Vec::new() };
            let (mut cuts, mut scratch, mut at) = (Vec::new(), Vec::new(), 0);
            while at < text.len() {
                let length = tokenizer.piece(&text[at..], SLICE_BYTES);
                let piece = &text[at..at + length];
                tokenizer.encode(piece, &mut scratch, &mut ids).map_err(|_| MissReason::Tokenize)?;
                at += length;
                cuts.push(at);
            }
            cuts.pop();
            if special && whole {
                ids.extend(tokenizer.suffix());
            }
            Ok(Preview { text: Some(text.into_owned()), ids, whole, cuts })
        }
    }
}
