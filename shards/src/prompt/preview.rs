//! A request's prompt shown whole: what `kvlane render` and `kvlane explain` print. Not for the hot path.

use super::Api;
use super::body::BodyView;
use super::job::PIECE;
use super::model::Model;
use super::request::{Prompt, Rendering, Source, whole_chat};
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
    /// Places in the text, in bytes, at which it may be cut: work on a prompt that begins alike goes on from there.
    pub cuts: Vec<usize>,
}

/// Reads, renders and tokenizes a request in one go.
///
/// # Errors
/// The reason why its prompt cannot be known.
pub fn preview(api: Api, body: &[u8], model: &Model, rendering: Rendering<'_>) -> Result<Preview, MissReason> {
    let view = BodyView::parse(body).ok_or(MissReason::Tokenize)?;
    let source = match Prompt::of(api, &view, model, rendering)?.source {
        Source::Chat { .. } => whole_chat(&view, model, rendering)?,
        source => source,
    };
    match source {
        // Rendered whole above.
        Source::Chat { .. } => Err(MissReason::Tokenize),
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
                let end = tokenizer.mark_after(&text, at, PIECE).unwrap_or(text.len());
                tokenizer.encode(&text[at..end], &mut scratch, &mut ids).map_err(|_| MissReason::Tokenize)?;
                at = end;
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
