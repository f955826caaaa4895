//! A request's body turned into its prompt: text or ids, and what is known of them.
//!
//! **Invariant.** A prompt is the engine's own from its first token on. Where only a beginning is certain (media whose
//! tokens the gateway cannot know), the prompt is that beginning and says so.

use std::borrow::Cow;
use std::sync::Arc;

use minijinja::Value;

use super::body::{self, BodyView};
use super::chat::{self, ChatRequest};
use super::model::Model;
use super::pyvalue::PyDict;
use super::{Api, completions, generate, json, messages, responses};
use crate::service::{Engine, MissReason};

/// What a rule says of how its engines turn requests into prompts.
#[derive(Clone, Copy, Debug)]
pub struct Rendering<'a> {
    /// Whose front end reads the requests.
    pub engine: Engine,
    /// Chat template that overrides the model's own.
    pub template: Option<&'a Arc<str>>,
    /// Template arguments that the engines were started with: a JSON object. What is none is ignored.
    pub kwargs: Option<&'a str>,
    /// Whether a BOS token is put before texts; none = as the model's files say.
    pub add_bos: Option<bool>,
}

impl Rendering<'_> {
    /// An engine without settings of its own.
    #[must_use]
    pub fn of(engine: Engine) -> Self {
        Rendering { engine, template: None, kwargs: None, add_bos: None }
    }

    /// The template arguments of the engines.
    pub(super) fn defaults(&self) -> Option<Value> {
        self.kwargs.and_then(|raw| json::value(raw).ok())
    }
}

/// A request's prompt.
#[derive(Debug)]
pub(super) struct Prompt<'a> {
    pub source: Source<'a>,
    pub truncation: Option<Truncation>,
}

/// What the prompt's tokens are made of.
#[derive(Debug)]
pub(super) enum Source<'a> {
    Text {
        text: Cow<'a, str>,
        /// Special tokens go around it.
        special: bool,
        /// The text is all of the prompt. Else the prompt goes on in a way that is not known, and the text ends where
        /// its last token ends.
        whole: bool,
    },
    /// A JSON list of ids, after its bracket.
    Ids(&'a str),
    /// A list of messages, which [`recall`](super::recall) reads one by one as far as they are not known already.
    Chat { raw: &'a str, special: bool },
}

/// How many tokens of a prompt the engine keeps (`truncate_prompt_tokens`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Truncation {
    /// The first ones.
    First(usize),
    /// The last ones.
    Last(usize),
}

impl<'a> Prompt<'a> {
    /// Reads the prompt of a request.
    ///
    /// # Errors
    /// The reason why it cannot be known.
    pub fn of(api: Api, view: &BodyView<'a>, model: &Model, rendering: Rendering<'_>) -> Result<Self, MissReason> {
        if let Some(member) = view.unkeyable {
            tracing::debug!(member, "a request is routed without keys");
            return Err(if member == "prompt_embeds" { MissReason::Media } else { MissReason::Tokenize });
        }
        let engine = rendering.engine;
        let truncation = truncation(view)?;
        let source = match api {
            Api::Completions => completions::source(view)?,
            Api::Generate => generate::source(view, engine)?,
            Api::ChatCompletions => match ids_of_chat(view, engine)? {
                Some(ids) => ids,
                None if truncation.is_some() || engine == Engine::Sglang => whole_chat(view, model, rendering)?,
                None => Source::Chat {
                    raw: view.messages.ok_or(MissReason::TextEmpty)?,
                    special: special_of_chat(view, engine)?,
                },
            },
            Api::Responses => chat_text(view, model, rendering, || responses::chat(view, engine))?,
            Api::Messages => chat_text(view, model, rendering, || messages::chat(view, engine))?,
        };
        Ok(Prompt { source, truncation })
    }
}

/// A chat that brings its tokens along; the engine then reads no messages.
fn ids_of_chat<'a>(view: &BodyView<'a>, engine: Engine) -> Result<Option<Source<'a>>, MissReason> {
    let raw = match engine {
        Engine::Sglang => view.input_ids,
        Engine::Trtllm => view.prompt_token_ids,
        Engine::Vllm | Engine::Llamacpp => None,
    };
    raw.map(|raw| raw.strip_prefix('[').map(Source::Ids).ok_or(MissReason::Tokenize)).transpose()
}

/// The chat of a request of `/v1/chat/completions`, rendered in one go; of one with media, its beginning.
///
/// # Errors
/// The reason why the text cannot be known.
pub(super) fn whole_chat(
    view: &BodyView<'_>,
    model: &Model,
    rendering: Rendering<'_>,
) -> Result<Source<'static>, MissReason> {
    chat_text(view, model, rendering, || ChatRequest::of_chat(view))
}

fn chat_text(
    view: &BodyView<'_>,
    model: &Model,
    rendering: Rendering<'_>,
    request: impl FnOnce() -> Result<ChatRequest, MissReason>,
) -> Result<Source<'static>, MissReason> {
    let special = special_of_chat(view, rendering.engine)?;
    let request = ChatRequest { defaults: rendering.defaults(), ..request()? };
    let template = model.template(rendering.template, request.has_tools(), rendering.engine)?;
    let chat::Rendered { mut text, extent } = chat::render(&request, template, rendering.engine)?;
    if extent == chat::Extent::Beginning {
        text.truncate(model.tokenizer().last_cut(&text));
        if text.is_empty() {
            return Err(MissReason::Media);
        }
    }
    Ok(Source::Text { text: Cow::Owned(text), special, whole: extent == chat::Extent::Whole })
}

/// Whether special tokens go around a chat's text.
fn special_of_chat(view: &BodyView<'_>, engine: Engine) -> Result<bool, MissReason> {
    let special = body::flag(view.add_special_tokens, false).ok_or(MissReason::Tokenize)?;
    // SGLang has no such field: it encodes without special tokens.
    Ok(special && engine != Engine::Sglang)
}

/// Reads `truncate_prompt_tokens`. Its -1 (what the model can take) depends on a limit the gateway does not know.
fn truncation(view: &BodyView<'_>) -> Result<Option<Truncation>, MissReason> {
    let Some(raw) = view.truncate_prompt_tokens else { return Ok(None) };
    let tokens: usize = raw.parse().ok().filter(|&tokens| tokens > 0).ok_or(MissReason::Tokenize)?;
    match view.truncation_side {
        None | Some("\"left\"") => Ok(Some(Truncation::Last(tokens))),
        Some("\"right\"") => Ok(Some(Truncation::First(tokens))),
        Some(_) => Err(MissReason::Tokenize),
    }
}

impl From<json::JsonError> for MissReason {
    fn from(_: json::JsonError) -> Self {
        MissReason::Tokenize
    }
}

/// A dict of a request.
pub(super) fn dict(value: &Value) -> Result<&PyDict, MissReason> {
    value.downcast_object_ref::<PyDict>().ok_or(MissReason::Tokenize)
}

/// A list of a request.
pub(super) fn list(value: &Value) -> Result<impl Iterator<Item = Value> + use<>, MissReason> {
    if value.kind() != minijinja::value::ValueKind::Seq {
        return Err(MissReason::Tokenize);
    }
    value.try_iter().map_err(|_| MissReason::Tokenize)
}

/// A member that is neither absent nor null.
pub(super) fn given<'d>(dict: &'d PyDict, name: &str) -> Option<&'d Value> {
    dict.get(name).filter(|value| !value.is_none())
}

/// A dict of the members given.
pub(super) fn dict_of<const N: usize>(members: [(&str, Value); N]) -> PyDict {
    let mut dict = PyDict::default();
    for (name, value) in members {
        dict.set(name, value);
    }
    dict
}

/// Reads a member of the body.
pub(super) fn read(raw: &str) -> Result<Value, MissReason> {
    json::value(raw).map_err(|_| MissReason::Tokenize)
}
