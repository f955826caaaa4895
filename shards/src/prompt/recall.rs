//! The memory a prompt begins with: what the cache knows of its begin, and its text.

use std::borrow::Cow;
use std::sync::Arc;

use super::body::BodyView;
use super::chat::ChatRequest;
use super::conversation;
use super::frame::Frame;
use super::memory::{Context, Memory, Start};
use super::model::Model;
use super::prefix_cache::{Found, PrefixCache, Strides};
use super::regrow::{Expected, Grown, Growth};
use super::request::Rendering;
use super::template::Template;
use super::tokenizer::Tokenizer;
use crate::service::MissReason;

/// A chat whose text is wanted.
pub(super) struct Chat<'r, 'b> {
    /// The list of messages.
    pub raw: &'b str,
    pub view: &'r BodyView<'b>,
    pub model: &'r Arc<Model>,
    pub template: &'r Template,
    pub rendering: Rendering<'r>,
    /// Too large to be rendered whole here.
    pub large: bool,
}

/// The memory of a chat, or what it will be made of.
pub(super) enum Recalled {
    /// With its text.
    Ready(Box<Memory>),
    /// The whole text has to be rendered elsewhere.
    Growing(Growing),
}

/// A conversation whose text is not known yet.
#[derive(Debug)]
pub(super) struct Growing {
    /// With the messages of the new conversation and the text of the old one.
    pub memory: Box<Memory>,
    pub frame: Arc<Frame>,
    expected: Option<Expected>,
}

impl Growing {
    /// The memory, once the text is known.
    pub(super) fn finish(
        self,
        cache: &mut PrefixCache,
        text: String,
        model: &Arc<Model>,
        template: &Template,
    ) -> Box<Memory> {
        let Growing { mut memory, expected, .. } = self;
        if let Some(expected) = expected
            && cache.trust.judge(model, template, &expected, &text)
        {
            memory.excerpt = Some(expected.excerpt);
        }
        memory.replace_text(text, model.tokenizer());
        memory
    }
}

/// The memory of a conversation that was read and rendered elsewhere.
pub(super) fn made(
    cache: &mut PrefixCache,
    mut memory: Box<Memory>,
    strides: &Strides,
    tokenizer: &Tokenizer,
) -> Box<Memory> {
    if strides.is_empty() {
        return memory;
    }
    match cache.find_at(&memory.context, strides, memory.raw.as_bytes()) {
        Found::Same { memory: other, .. } => {
            memory.learn(&other, tokenizer);
            cache.discard(other);
        }
        Found::Part { slot, .. } => {
            if let Some(other) = cache.at(slot) {
                memory.learn(other, tokenizer);
            }
        }
        Found::Nothing => {}
    }
    memory
}

/// The memory of a prompt given as text.
pub(super) fn text(
    cache: &mut PrefixCache,
    context: Context,
    start: Start,
    text: Cow<'_, str>,
    tokenizer: &Tokenizer,
) -> (Box<Memory>, Strides) {
    let (found, strides) = cache.find(&context, text.as_bytes());
    let memory = match found {
        Found::Same { mut memory, bytes } => {
            let same = text.floor_char_boundary(bytes);
            memory.text.truncate(same);
            memory.text.push_str(&text[same..]);
            memory.forget_beyond(same, tokenizer);
            memory
        }
        Found::Part { slot, .. } => {
            let mut memory = Box::new(Memory::new(context, start));
            memory.text = text.into_owned();
            if let Some(other) = cache.at(slot) {
                memory.learn(other, tokenizer);
            }
            memory
        }
        Found::Nothing => {
            let mut memory = Box::new(Memory::new(context, start));
            memory.text = text.into_owned();
            memory
        }
    };
    (memory, strides)
}

/// The memory of a chat, with its text rendered.
///
/// # Errors
/// The reason why the text cannot be known.
pub(super) fn chat(
    cache: &mut PrefixCache,
    context: Context,
    start: Start,
    strides: &Strides,
    chat: Chat<'_, '_>,
) -> Result<Recalled, MissReason> {
    let memory = match cache.find_at(&context, strides, chat.raw.as_bytes()) {
        Found::Same { memory, bytes } => return grown(cache, memory, bytes, &chat),
        Found::Part { slot, bytes } => {
            let mut memory = match cache.at(slot) {
                Some(other) => Box::new(other.branch(bytes)),
                None => Box::new(Memory::new(context, start)),
            };
            whole(&mut memory, &chat)?;
            if let Some(other) = cache.at(slot) {
                memory.learn(other, chat.model.tokenizer());
            }
            memory
        }
        Found::Nothing => {
            let mut memory = Box::new(Memory::new(context, start));
            whole(&mut memory, &chat)?;
            memory
        }
    };
    Ok(Recalled::Ready(memory))
}

fn frame(memory: &mut Memory, chat: &Chat<'_, '_>) -> Result<Arc<Frame>, MissReason> {
    if let Some(frame) = &memory.frame {
        return Ok(Arc::clone(frame));
    }
    let request = ChatRequest { defaults: chat.rendering.defaults(), ..ChatRequest::beside_messages(chat.view)? };
    let frame = Arc::new(Frame::of(&request, chat.rendering.engine)?);
    memory.frame = Some(Arc::clone(&frame));
    Ok(frame)
}

/// Renders the whole conversation; messages that the memory has are not read again.
fn whole(memory: &mut Memory, chat: &Chat<'_, '_>) -> Result<(), MissReason> {
    conversation::read_messages(chat.raw, chat.template, chat.rendering.engine, &mut memory.messages)?;
    memory.text = frame(memory, chat)?.render(&memory.messages, chat.template)?;
    memory.raw = chat.raw.to_owned();
    Ok(())
}

/// Turns the memory of a conversation into that of one that begins alike for so many bytes.
fn grown(
    cache: &mut PrefixCache,
    mut memory: Box<Memory>,
    bytes: usize,
    chat: &Chat<'_, '_>,
) -> Result<Recalled, MissReason> {
    let same = chat.raw.floor_char_boundary(bytes);
    memory.raw.truncate(same);
    memory.raw.push_str(&chat.raw[same..]);
    let shared = memory.messages.iter().take_while(|message| message.end <= same).count();
    let dropped = memory.messages.split_off(shared);
    conversation::read_messages(chat.raw, chat.template, chat.rendering.engine, &mut memory.messages)?;
    let frame = frame(&mut memory, chat)?;
    let growth = Growth {
        model: chat.model,
        template: chat.template,
        frame: &frame,
        text: &memory.text,
        dropped: &dropped,
        messages: &memory.messages,
        shared,
        excerpt: memory.excerpt.take(),
        large: chat.large,
    };
    match growth.text(&mut cache.trust)? {
        Grown::Edit { keep, tail, excerpt } => {
            memory.text.truncate(keep);
            memory.text.push_str(&tail);
            memory.excerpt = Some(excerpt);
            memory.forget_beyond(keep, chat.model.tokenizer());
        }
        Grown::Whole(text) => memory.replace_text(text, chat.model.tokenizer()),
        Grown::Unknown(expected) => return Ok(Recalled::Growing(Growing { memory, frame, expected })),
    }
    Ok(Recalled::Ready(memory))
}
