//! Messages turned into the turns a template sees, as vLLM's front end does it.

use std::hash::{DefaultHasher, Hash, Hasher};

use minijinja::Value;
use minijinja::value::ValueKind;

use super::content_format::ContentFormat;
use super::json;
use super::pyvalue::PyDict;
use super::request::{dict, dict_of, given, list};
use super::template::Template;
use crate::service::{Engine, MissReason};

/// What clients of one kind put into their system text, different in every request: the engine drops that line.
pub(super) const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// Members of parts that mean something to the engine; the others reach the template.
const KNOWN_MEMBERS: [&str; 18] = [
    "type",
    "text",
    "name",
    "uuid",
    "data",
    "file",
    "closed",
    "refusal",
    "thinking",
    "image_url",
    "image_pil",
    "image_embeds",
    "audio_url",
    "audio_embeds",
    "input_audio",
    "video_url",
    "video_embeds",
    "prompt_cache_breakpoint",
];

/// What stands in the place of media.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fill {
    /// A part of the kind, as the engine hands it to the template.
    Engine,
    /// A text.
    Mark(char),
}

/// One message of a conversation as its template sees it.
#[derive(Clone, Debug)]
pub(super) struct Message {
    /// The message.
    pub value: Value,
    /// Where it ends in the text of the list.
    pub end: usize,
    /// Whose it is.
    pub role: Role,
    /// Hash of what a template may decide upon: role, members and their kinds, and which of the texts it looks for occur.
    pub shape: u64,
}

/// Whose a message is, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// `system` or `developer`.
    System,
    /// `user`.
    User,
    /// `assistant`.
    Assistant,
    /// Any other.
    Other,
}

impl Role {
    fn of(turn: &PyDict) -> Self {
        match turn.get("role").and_then(Value::as_str) {
            Some("system" | "developer") => Role::System,
            Some("user") => Role::User,
            Some("assistant") => Role::Assistant,
            _ => Role::Other,
        }
    }
}

/// Reads a list of messages on from those that are known already.
///
/// # Errors
/// [`MissReason::TextEmpty`] without messages, [`MissReason::Media`] where media stand among them, and
/// [`MissReason::Tokenize`] for what the gateway cannot follow.
pub(super) fn read_messages(
    raw: &str,
    template: &Template,
    engine: Engine,
    known: &mut Vec<Message>,
) -> Result<(), MissReason> {
    let from = known.last().map_or(0, |message| message.end);
    let mut reader = Reader::new(template, engine, Fill::Engine);
    json::elements::<MissReason>(raw, from, |value, place| {
        let turn = reader.turn(dict(&value)?)?;
        if reader.media {
            return Err(MissReason::Media);
        }
        let shape = shape(&turn, &raw[place.clone()], template);
        known.push(Message { role: Role::of(&turn), value: Value::from_object(turn), end: place.end, shape });
        Ok(())
    })?;
    if known.is_empty() { Err(MissReason::TextEmpty) } else { Ok(()) }
}

/// Bytes at both ends of a message that are looked through for what its shape hangs on.
const SHAPE_BYTES: usize = 1024;

fn shape(turn: &PyDict, raw: &str, template: &Template) -> u64 {
    let mut hash = DefaultHasher::new();
    turn.get("role").and_then(Value::as_str).unwrap_or_default().hash(&mut hash);
    for (key, value) in turn.entries() {
        (key.as_str(), std::mem::discriminant(&value.kind()), value.is_true()).hash(&mut hash);
    }
    // Where markup stands in practice; the shape need not be complete, and a long text is not worth a scan for each.
    let head = &raw[..raw.floor_char_boundary(SHAPE_BYTES)];
    let tail = &raw[raw.floor_char_boundary(raw.len().saturating_sub(SHAPE_BYTES).max(head.len()))..];
    for text in template.sought() {
        (head.contains(&**text), tail.contains(&**text)).hash(&mut hash);
    }
    hash.finish()
}

/// The turns of messages that were read whole, and whether there are media among them.
///
/// # Errors
/// A message that the gateway cannot follow.
pub(super) fn turns(
    messages: &[Value],
    template: &Template,
    engine: Engine,
    fill: Fill,
) -> Result<(Vec<Value>, bool), MissReason> {
    let mut reader = Reader::new(template, engine, fill);
    let turns = messages.iter().map(|message| reader.turn(dict(message)?).map(Value::from_object));
    Ok((turns.collect::<Result<_, _>>()?, reader.media))
}

/// Whether the template has no place for one of the turns.
pub(super) fn has_strange_developer<'t>(mut turns: impl Iterator<Item = &'t Value>, template: &Template) -> bool {
    !template.knows_developer()
        && turns.any(|turn| dict(turn).is_ok_and(|turn| turn.get("role").and_then(Value::as_str) == Some("developer")))
}

struct Reader {
    format: ContentFormat,
    fill: Fill,
    media: bool,
    /// Only what all front ends treat alike is followed.
    plain: bool,
}

/// A part of a message's content.
enum Part {
    Text(PyDict),
    /// A reference to a tool: its name.
    Tool(Value),
    Media(PyDict),
}

impl Reader {
    fn new(template: &Template, engine: Engine, fill: Fill) -> Self {
        Reader { format: template.content_format(), fill, media: false, plain: engine != Engine::Vllm }
    }

    fn turn(&mut self, message: &PyDict) -> Result<PyDict, MissReason> {
        let role = message.get("role").and_then(Value::as_str).ok_or(MissReason::Tokenize)?;
        if self.plain && !is_plain(message, role) {
            return Err(MissReason::Tokenize);
        }
        let mut turn = dict_of([("role", role.into()), ("content", self.content(message.get("content"), role)?)]);
        match role {
            "assistant" => {
                if let Some(calls) = given(message, "tool_calls") {
                    let calls = list(calls)?.map(|call| tool_call(&call)).collect::<Result<Vec<_>, _>>()?;
                    if !calls.is_empty() {
                        turn.set("tool_calls", Value::from(calls));
                    }
                }
                if let Some(reasoning) = given(message, "reasoning").or_else(|| given(message, "reasoning_content")) {
                    turn.set("reasoning", reasoning.clone());
                    turn.set("reasoning_content", reasoning.clone());
                }
            }
            "tool" => {
                if let Some(id) = message.get("tool_call_id") {
                    turn.set("tool_call_id", id.clone());
                }
            }
            _ => {}
        }
        for member in ["name", "task"] {
            if let Some(text) = message.get(member).filter(|value| value.kind() == ValueKind::String) {
                turn.set(member, text.clone());
            }
        }
        if role == "developer" {
            turn.set("tools", message.get("tools").cloned().unwrap_or_else(|| Value::from(())));
        }
        Ok(turn)
    }

    fn content(&mut self, content: Option<&Value>, role: &str) -> Result<Value, MissReason> {
        // The usual case, without the detour that copies the text.
        if let Some(text) = content.filter(|content| content.kind() == ValueKind::String)
            && self.format == ContentFormat::String
            && role != "system"
        {
            return Ok(text.clone());
        }
        let mut parts = parts(content)?;
        if role == "system" {
            parts = without_billing_header(parts);
        }
        let media = parts.iter().any(|part| matches!(part, Part::Media(_)));
        self.media |= media;
        match self.format {
            ContentFormat::String => {
                let mut texts: Vec<&str> = parts.iter().map(Part::text).filter(|text| !text.is_empty()).collect();
                let mut mark = String::new();
                if media {
                    // Where placeholders go and how they are spelled is the model's affair: nothing of it is known.
                    mark.push(if let Fill::Mark(mark) = self.fill { mark } else { super::chat::MARKS[0] });
                    texts.insert(0, &mark);
                }
                Ok(Value::from(texts.join("\n")))
            }
            ContentFormat::Parts => {
                let texts_alone = parts.iter().all(|part| matches!(part, Part::Text(_)));
                if role == "tool" && texts_alone {
                    return Ok(Value::from(parts.iter().map(Part::text).collect::<Vec<_>>().join("\n")));
                }
                Ok(parts.into_iter().map(|part| part.value(self.fill)).collect())
            }
        }
    }
}

/// Whether a message has nothing but a text.
fn is_plain(message: &PyDict, role: &str) -> bool {
    matches!(role, "system" | "user" | "assistant")
        && message.get("content").is_some_and(|content| content.kind() == ValueKind::String)
        && message.entries().len() == 2
}

impl Part {
    fn text(&self) -> &str {
        match self {
            Part::Text(part) => part.get("text").and_then(Value::as_str).unwrap_or_default(),
            Part::Tool(name) => name.as_str().unwrap_or_default(),
            Part::Media(_) => "",
        }
    }

    fn value(self, fill: Fill) -> Value {
        match (self, fill) {
            (Part::Text(part), _) | (Part::Media(part), Fill::Engine) => Value::from_object(part),
            (Part::Tool(name), _) => Value::from_object(dict_of([("type", "tool_reference".into()), ("name", name)])),
            (Part::Media(_), Fill::Mark(mark)) => {
                Value::from_object(dict_of([("type", "text".into()), ("text", mark.to_string().into())]))
            }
        }
    }
}

fn parts(content: Option<&Value>) -> Result<Vec<Part>, MissReason> {
    match content {
        None => Ok(Vec::new()),
        Some(value) if value.is_none() => Ok(Vec::new()),
        Some(value) if value.kind() == ValueKind::String => Ok(vec![text_part(value)]),
        Some(value) => list(value)?.filter_map(|part| part_of(&part).transpose()).collect(),
    }
}

fn text_part(text: &Value) -> Part {
    Part::Text(dict_of([("type", "text".into()), ("text", text.clone())]))
}

/// A part; none where the engine drops it.
fn part_of(part: &Value) -> Result<Option<Part>, MissReason> {
    if part.kind() == ValueKind::String {
        return Ok(Some(text_part(part)));
    }
    let part = dict(part)?;
    // With an identifier, a part counts by its members instead of its type.
    let uuid = given(part, "uuid").is_some();
    let kind = part.get("type").and_then(Value::as_str).ok_or(MissReason::Tokenize)?;
    let (kind, member) = match kind {
        "text" | "input_text" | "output_text" if !uuid => ("text", "text"),
        "refusal" | "thinking" if !uuid => ("text", kind),
        "tool_reference" if !uuid => {
            let name = part.get("name").filter(|name| name.kind() == ValueKind::String);
            return Ok(Some(Part::Tool(name.ok_or(MissReason::Tokenize)?.clone())));
        }
        "image_url" | "input_image" | "image_embeds" | "image_pil" => ("image", ""),
        "audio_url" | "input_audio" | "audio_embeds" => ("audio", ""),
        "video_url" | "video_embeds" => ("video", ""),
        _ => return Err(MissReason::Tokenize),
    };
    let mut out = dict_of([("type", kind.into())]);
    if kind == "text" {
        match given(part, member) {
            None if matches!(member, "text" | "refusal") => return Ok(None),
            Some(text) if text.kind() == ValueKind::String => out.set("text", text.clone()),
            _ => return Err(MissReason::Tokenize),
        }
    }
    for (key, value) in part.entries() {
        if let Some(key) = key.as_str().filter(|key| !KNOWN_MEMBERS.contains(key)) {
            out.set(key, value.clone());
        }
    }
    Ok(Some(if kind == "text" { Part::Text(out) } else { Part::Media(out) }))
}

/// Takes the line out of every text that begins with it; a text that is nothing else goes.
fn without_billing_header(parts: Vec<Part>) -> Vec<Part> {
    let mut out = Vec::new();
    for mut part in parts {
        if let Part::Text(part) = &mut part
            && let Some(text) = part.get("text").and_then(Value::as_str)
            && text.starts_with(BILLING_HEADER)
        {
            match text.split_once('\n') {
                Some((_, rest)) if !rest.is_empty() => {
                    let rest = Value::from(rest);
                    part.set("text", rest);
                }
                _ => continue,
            }
        }
        out.push(part);
    }
    out
}

/// A call whose arguments are an object: text is parsed, and what is no object becomes an empty one.
fn tool_call(call: &Value) -> Result<Value, MissReason> {
    let call = dict(call)?;
    let function = dict(call.get("function").ok_or(MissReason::Tokenize)?)?;
    if call.get("type").is_some_and(|kind| kind.as_str() != Some("function")) {
        return Err(MissReason::Tokenize);
    }
    let arguments = match given(function, "arguments") {
        Some(value) if value.kind() == ValueKind::Map => value.clone(),
        Some(value) if value.kind() == ValueKind::String => parsed_arguments(value.as_str().unwrap_or_default())?,
        None => empty(),
        Some(_) => return Err(MissReason::Tokenize),
    };
    let mut inner = function.clone();
    inner.set("arguments", arguments);
    let mut outer = call.clone();
    outer.set("function", Value::from_object(inner));
    Ok(Value::from_object(outer))
}

fn empty() -> Value {
    Value::from_object(PyDict::default())
}

fn parsed_arguments(text: &str) -> Result<Value, MissReason> {
    match json::value(text) {
        Ok(value) if value.kind() == ValueKind::Map => Ok(value),
        // Python reads NaN and Infinity where we see a mistake: what has them is not guessed.
        Err(json::JsonError::Syntax) if !text.contains("NaN") && !text.contains("Infinity") => Ok(empty()),
        Ok(_) => Ok(empty()),
        Err(_) => Err(MissReason::Tokenize),
    }
}

/// For templates without a place for `developer`: it becomes `system`, and all system texts move to the front as one.
///
/// # Errors
/// The template wants parts, or a developer brings tools.
pub(super) fn developer_as_system(turns: Vec<Value>, format: ContentFormat) -> Result<Vec<Value>, MissReason> {
    let tools = |turn: &Value| dict(turn).is_ok_and(|turn| given(turn, "tools").is_some());
    if format != ContentFormat::String || turns.iter().any(tools) {
        return Err(MissReason::Tokenize);
    }
    let is_system = |turn: &Value| dict(turn).is_ok_and(|turn| Role::of(turn) == Role::System);
    let (system, rest): (Vec<Value>, Vec<Value>) = turns.into_iter().partition(is_system);
    let texts = system.iter().filter_map(|turn| dict(turn).ok()?.get("content")?.as_str());
    let text = texts.collect::<Vec<_>>().join("\n\n");
    let first = Value::from_object(dict_of([("role", "system".into()), ("content", text.into())]));
    Ok(std::iter::once(first).chain(rest).collect())
}
