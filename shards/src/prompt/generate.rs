//! SGLang's `/generate`: `input_ids`, else `text`; of several, the first.

use super::body::BodyView;
use super::completions;
use super::request::Source;
use crate::service::{Engine, MissReason};

/// Reads the prompt. Ids win over a text; a text is encoded with special tokens.
///
/// # Errors
/// There is no prompt, it is of media or embeddings, or the engine is another.
pub(super) fn source<'a>(view: &BodyView<'a>, engine: Engine) -> Result<Source<'a>, MissReason> {
    if engine != Engine::Sglang {
        return Err(MissReason::Tokenize);
    }
    // Where a text stands for media, its placeholders become other tokens.
    if [view.input_embeds, view.image_data, view.video_data, view.audio_data].iter().any(Option::is_some) {
        return Err(MissReason::Media);
    }
    completions::first(view.input_ids.or(view.text).ok_or(MissReason::TextEmpty)?, true)
}
