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
use super::regrow::{Grown, Growth};
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
    chat: Chat<'_, '_>,
) -> Result<(Box<Memory>, Strides), MissReason> {
    let (found, strides) = cache.find(&context, chat.raw.as_bytes());
    let memory = match found {
        Found::Same { memory, bytes } => grown(cache, memory, bytes, &chat)?,
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
    Ok((memory, strides))
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
) -> Result<Box<Memory>, MissReason> {
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
    };
    let kept = match growth.text(&mut cache.trust)? {
        Grown::Edit { keep, tail, excerpt } => {
            memory.text.truncate(keep);
            memory.text.push_str(&tail);
            memory.excerpt = Some(excerpt);
            keep
        }
        Grown::Whole(text) => {
            let same = super::memory::common_prefix(text.as_bytes(), memory.text.as_bytes());
            memory.text = text;
            same
        }
    };
    memory.forget_beyond(kept, chat.model.tokenizer());
    Ok(memory)
}
