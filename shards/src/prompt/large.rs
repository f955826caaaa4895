//! Prompts that are too large to be read or rendered between two visits to the driver: that is done aside, on another
//! thread, from a copy of the body.
//!
//! **Invariant.** A [`Task`] has all it needs and may run anywhere; what comes of it is what would have come of doing the
//! same in place.

use std::sync::Arc;

use super::Api;
use super::body::BodyView;
use super::chat::ChatRequest;
use super::conversation::{self, Message};
use super::frame::Frame;
use super::model::Model;
use super::request::{self, Prompt, Rendering, Source, Truncation};
use crate::service::{Engine, MissReason};

/// Bytes of JSON that are read and rendered in place: about a quarter of a millisecond. Few in tests, so that both ways
/// are gone.
pub(super) const IN_PLACE_BYTES: usize = if cfg!(test) { 2 * 1024 } else { 32 * 1024 };
/// Bytes of a JSON string that are read in place, whatever its escapes.
const IN_PLACE_TEXT_BYTES: usize = if cfg!(test) { 4 * 1024 } else { 128 * 1024 };
/// Bytes of a prompt beyond which it is neither looked for among those remembered nor remembered.
pub(super) const REMEMBERED_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Bytes of the body copied in one go.
const COPY_BYTES: usize = if cfg!(test) { 1000 } else { 64 * 1024 };

/// Whether so much JSON is better not read in place, where so many objects may be: each message costs some microseconds
/// beside its text.
pub(super) fn is_large(raw: &str, objects_max: usize) -> bool {
    raw.len() > IN_PLACE_BYTES || memchr::memchr_iter(b'{', raw.as_bytes()).nth(objects_max).is_some()
}

/// Whether a text, or the first of several, is better not read in place.
pub(super) fn is_large_text(raw: &str) -> bool {
    raw.len() > IN_PLACE_TEXT_BYTES && raw.trim_start_matches('[').trim_start().starts_with('"')
}

/// The text that a request's prompt is read from, without its ids.
pub(super) fn raw_prompt<'a>(api: Api, view: &BodyView<'a>) -> Option<&'a str> {
    match api {
        Api::Completions => view.prompt,
        Api::ChatCompletions | Api::Messages => view.messages,
        Api::Responses => view.input,
        Api::Generate => view.text,
    }
}

/// Work that is done aside.
#[derive(Debug)]
pub struct Task {
    model: Arc<Model>,
    template: Option<Arc<str>>,
    engine: Engine,
    kwargs: Option<Box<str>>,
    add_bos: Option<bool>,
    work: Work,
}

#[derive(Debug)]
enum Work {
    /// Reads and renders the prompt of a body.
    Read { api: Api, body: Vec<u8> },
    /// Renders messages that are read already.
    Render { messages: Vec<Message>, frame: Arc<Frame>, tools: bool },
}

/// What comes of a task.
#[derive(Debug)]
pub struct Prepared {
    pub(super) made: Made,
    /// The memory of the body's copy, for another use.
    pub spare: Vec<u8>,
}

#[derive(Debug)]
pub(super) enum Made {
    /// A text, whole or only its beginning.
    Text { text: String, special: bool, whole: bool, truncation: Option<Truncation> },
    /// A conversation, with its source.
    Chat { raw: String, messages: Vec<Message>, frame: Arc<Frame>, text: String },
    /// The text of messages that were known.
    Rendered(String),
}

impl Task {
    fn new(model: &Arc<Model>, rendering: &Rendering<'_>, work: Work) -> Self {
        Task {
            model: Arc::clone(model),
            template: rendering.template.cloned(),
            engine: rendering.engine,
            kwargs: rendering.kwargs.map(Into::into),
            add_bos: rendering.add_bos,
            work,
        }
    }

    pub(super) fn render(
        model: &Arc<Model>,
        rendering: &Rendering<'_>,
        messages: Vec<Message>,
        frame: &Arc<Frame>,
        tools: bool,
    ) -> Self {
        Task::new(model, rendering, Work::Render { messages, frame: Arc::clone(frame), tools })
    }

    /// Does the work.
    ///
    /// # Errors
    /// The reason why the prompt cannot be known.
    pub fn run(self) -> Result<Prepared, MissReason> {
        let rendering = Rendering {
            engine: self.engine,
            template: self.template.as_ref(),
            kwargs: self.kwargs.as_deref(),
            add_bos: self.add_bos,
        };
        match self.work {
            Work::Read { api, body } => {
                let made = read(api, &body, &self.model, rendering)?;
                Ok(Prepared { made, spare: body })
            }
            Work::Render { messages, frame, tools } => {
                let template = self.model.template(rendering.template, tools, rendering.engine)?;
                Ok(Prepared { made: Made::Rendered(frame.render(&messages, template)?), spare: Vec::new() })
            }
        }
    }
}

/// The copy of a body, made in slices.
#[derive(Debug, Default)]
pub(super) struct Copying<'a> {
    body: &'a [u8],
    copy: Vec<u8>,
}

impl<'a> Copying<'a> {
    pub(super) fn new(body: &'a [u8]) -> Self {
        Copying { body, copy: Vec::new() }
    }

    /// Memory to copy to, instead of fresh one. Before the first step.
    pub(super) fn lend(&mut self, mut memory: Vec<u8>) {
        debug_assert!(self.copy.is_empty(), "nothing is copied yet");
        memory.clear();
        self.copy = memory;
    }

    /// Copies some more; whether all is copied.
    pub(super) fn step(&mut self) -> bool {
        self.copy.reserve_exact(self.body.len() - self.copy.len());
        let rest = &self.body[self.copy.len()..];
        self.copy.extend_from_slice(&rest[..rest.len().min(COPY_BYTES)]);
        self.copy.len() == self.body.len()
    }

    /// The task that reads the copy.
    pub(super) fn task(mut self, api: Api, model: &Arc<Model>, rendering: &Rendering<'_>) -> Task {
        while !self.step() {}
        Task::new(model, rendering, Work::Read { api, body: self.copy })
    }
}

fn read(api: Api, body: &[u8], model: &Arc<Model>, rendering: Rendering<'_>) -> Result<Made, MissReason> {
    let view = BodyView::parse(body).ok_or(MissReason::Tokenize)?;
    let Prompt { source, truncation } = Prompt::of(api, &view, model, rendering)?;
    let source = match source {
        Source::Chat { raw, .. } => match chat(raw, &view, model, rendering) {
            Err(MissReason::Media) => request::whole_chat(&view, model, rendering)?,
            made => return made,
        },
        source => source,
    };
    match source {
        Source::Text { text, special, whole } => Ok(Made::Text { text: text.into_owned(), special, whole, truncation }),
        // Neither comes here: ids are read in place, and a chat is rendered above.
        Source::Ids(_) | Source::Chat { .. } => Err(MissReason::Tokenize),
    }
}

fn chat(raw: &str, view: &BodyView<'_>, model: &Model, rendering: Rendering<'_>) -> Result<Made, MissReason> {
    let template = model.template(rendering.template, view.tools.is_some(), rendering.engine)?;
    let mut messages = Vec::new();
    conversation::read_messages(raw, template, rendering.engine, &mut messages)?;
    let request = ChatRequest { defaults: rendering.defaults(), ..ChatRequest::beside_messages(view)? };
    let frame = Arc::new(Frame::of(&request, rendering.engine)?);
    let text = frame.render(&messages, template)?;
    Ok(Made::Chat { raw: raw.to_owned(), messages, frame, text })
}
