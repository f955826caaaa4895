//! The text that a large prompt is sure to begin with, made from the begin of its source alone: enough to see whether
//! anyone holds it, without reading the rest.
//!
//! A long text begins with its first bytes. A long chat is cut inside the content of a message, closed again and
//! rendered; what stands before the cut is taken. Templates look into what an assistant said (for the end of its
//! thinking, which they take out), so nothing of a content is taken that may be an assistant's. That a template treats
//! the begin of a chat alike whatever follows is likely, not certain: so of such a glimpse only "nobody holds this" is
//! believed, at the cost of a missed hit.

use super::Api;
use super::body::BodyView;
use super::chat::{ChatRequest, MARKS};
use super::conversation;
use super::frame::Frame;
use super::json::LongString;
use super::large::IN_PLACE_BYTES;
use super::model::Model;
use super::request::Rendering;
use super::scan::Scan;
use crate::service::Engine;

/// Bytes of source that are looked at.
const GLIMPSE_BYTES: usize = if cfg!(test) { 1200 } else { 4 * 1024 };
/// Bytes that are looked at beyond them for a place inside a message's content.
const FURTHER_BYTES: usize = 4 * 1024;

/// The text and whether it is certain; none where a glimpse is not worth it or not possible.
pub(super) fn text(
    api: Api,
    view: &BodyView<'_>,
    raw: &str,
    model: &Model,
    rendering: Rendering<'_>,
) -> Option<(String, bool)> {
    let (mut text, certain) = match api {
        Api::Completions | Api::Generate => (leading_text(raw)?, true),
        Api::ChatCompletions if rendering.engine != Engine::Sglang => (chat(view, raw, model, rendering)?, false),
        _ => return None,
    };
    text.truncate(model.tokenizer().last_cut(&text));
    (!text.is_empty()).then_some((text, certain))
}

fn leading_text(raw: &str) -> Option<String> {
    // The first of several texts.
    let raw = raw.strip_prefix('[').map_or(raw, str::trim_start);
    let mut string = LongString::new(raw).ok()?;
    let mut text = String::new();
    let over = string.step(GLIMPSE_BYTES, &mut text).ok()?;
    (!over).then_some(text)
}

fn chat(view: &BodyView<'_>, raw: &str, model: &Model, rendering: Rendering<'_>) -> Option<String> {
    let members: usize = view.members().iter().flatten().map(|member| member.len()).sum();
    if members > IN_PLACE_BYTES || view.continue_final_message == Some("true") {
        return None;
    }
    let closed = closed(raw)?;
    let template = model.template(rendering.template, view.tools.is_some(), rendering.engine).ok()?;
    let mut messages = Vec::new();
    conversation::read_messages(&closed, template, rendering.engine, &mut messages).ok()?;
    let request = ChatRequest { defaults: rendering.defaults(), ..ChatRequest::beside_messages(view).ok()? };
    let mut text = Frame::of(&request, rendering.engine).ok()?.render(&messages, template).ok()?;
    text.truncate(text.find(MARKS[0])?);
    Some(text)
}

/// The begin of a list of messages, cut inside a content, with a mark where it is cut, and closed again.
fn closed(raw: &str) -> Option<String> {
    let mut scan = Scan::of_list(raw.as_bytes());
    scan.step(GLIMPSE_BYTES, |_| ()).ok().filter(|over| !over)?;
    let mut further = 0;
    let (cut, begin) = loop {
        if let Some((cut, begin)) = scan.inside_text()
            && is_content(&raw[..begin])
        {
            break (cut, begin);
        }
        further += 1;
        if further > FURTHER_BYTES || scan.step(1, |_| ()) != Ok(false) {
            return None;
        }
    };
    let message = raw[..begin].rfind("\"role\"").map_or(0, |at| at);
    let cut = if may_be_assistants(&raw[message..begin]) { begin + 1 } else { cut };
    if raw[..cut].contains(MARKS[0]) {
        return None;
    }
    let mut closed = String::with_capacity(cut + 64);
    closed.push_str(&raw[..cut]);
    closed.push(MARKS[0]);
    closed.push('"');
    let ends: Vec<char> = scan.ends().collect();
    closed.extend(&ends[..ends.len() - 1]);
    // Templates ask where the last question stands; there is one behind the cut if the rest names a user at all.
    let asks = |text: &str| memchr::memmem::find(text.as_bytes(), b"\"user\"");
    if asks(&raw[message..begin]).is_none() && asks(&raw[cut..]).is_some() {
        closed.push_str(r#",{"role":"user","content":"?"}"#);
    }
    closed.push(']');
    Some(closed)
}

/// Whether a content is or may be an assistant's, by what stands between the last role named before it and itself: a role
/// may also stand behind its content, and then the last one before it is another message's.
fn may_be_assistants(from_role: &str) -> bool {
    !from_role.starts_with("\"role\"") || from_role.contains('}') || from_role.contains("\"assistant\"")
}

/// Whether the text that follows is a message's content, or the text of a part of it.
fn is_content(before: &str) -> bool {
    let Some(before) = before.trim_end().strip_suffix(':') else { return false };
    let before = before.trim_end();
    before.ends_with("\"content\"") || before.ends_with("\"text\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chat_is_cut_inside_a_content_and_closed() {
        let word = "word ".repeat(4_000);
        let marked = |ends: &str| format!("{}\"{ends}", MARKS[0]);
        for (raw, ends) in [
            (format!(r#"[{{"role":"user","content":"{word}"}}]"#), marked("}]")),
            (format!(r#"[{{"role":"user","content": [{{"type":"text","text":"{word}"}}]}}]"#), marked("}]}]")),
            (
                format!(r#"[{{"role":"assistant","content":"{word}"}},{{"role":"user","content":"x"}}]"#),
                marked(r#"},{"role":"user","content":"?"}]"#),
            ),
        ] {
            let closed = closed(&raw).unwrap();
            assert!(closed.ends_with(&ends), "{}", &closed[closed.len() - 60..]);
            assert!(serde_json::from_str::<serde_json::Value>(&closed).is_ok());
            let cut = closed.find(MARKS[0]).unwrap();
            assert!(raw.starts_with(&closed[..cut]));
            assert!(cut >= GLIMPSE_BYTES || raw[..cut].ends_with("\"content\":\""), "{}", &closed[..cut]);
        }
        // Nothing is taken of what an assistant said, or may have said.
        for raw in [
            format!(r#"[{{"role":"assistant","content":"<think>{word}</think>"}},{{"role":"user","content":"x"}}]"#),
            format!(r#"[{{"content":"<think>{word}</think>","role":"assistant"}},{{"role":"user","content":"x"}}]"#),
            format!(
                r#"[{{"role":"user","content":"x"}},{{"content":"<think>{word}","role":"assistant"}},{{"role":"user"}}]"#
            ),
        ] {
            let closed = closed(&raw).unwrap();
            assert!(!closed.contains("think"), "{closed}");
        }
        // What is no content is not cut, and a short list is not worth it.
        assert!(closed(&format!(r#"[{{"role":"user","name":"{word}"}}]"#)).is_none());
        assert!(closed(r#"[{"role":"user","content":"x"}]"#).is_none());
        assert!(closed(&word).is_none());
    }
}
