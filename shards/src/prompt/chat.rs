//! A chat request turned into the variables its template sees, field by field as vLLM's front end does it.
//!
//! **Invariant.** What the engine would render otherwise, in any version, is refused here: the request is then routed
//! without keys. Where versions differ, the newest (0.33) is followed.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{Object, ObjectRepr, ValueKind};

use super::body::{self, BodyView};
use super::content_format::ContentFormat;
use super::json;
use super::pyvalue::PyDict;
use super::template::Template;
use crate::service::MissReason;

/// Template arguments that the engine refuses or that steer its renderer instead of the template.
const RESERVED_KWARGS: [&str; 12] = [
    "chat_template",
    "tokenize",
    "conversation",
    "messages",
    "tools",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
];

/// Renders the text of a chat request.
///
/// # Errors
/// [`MissReason::TextEmpty`] without messages, [`MissReason::Template`] where the template refuses, and
/// [`MissReason::Tokenize`] where the request has something the gateway cannot know.
#[cfg(test)]
pub(super) fn render(view: &BodyView, template: &Template) -> Result<String, MissReason> {
    let mut messages = Vec::new();
    read_messages(view.messages.ok_or(MissReason::TextEmpty)?, template, &mut messages)?;
    Frame::of(view)?.render(&messages, template)
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

impl From<json::JsonError> for MissReason {
    fn from(_: json::JsonError) -> Self {
        MissReason::Tokenize
    }
}

/// Reads a list of messages on from those that are known already.
///
/// # Errors
/// As [`Frame::render`].
pub(super) fn read_messages(raw: &str, template: &Template, known: &mut Vec<Message>) -> Result<(), MissReason> {
    let from = known.last().map_or(0, |message| message.end);
    json::elements::<MissReason>(raw, from, |value, place| {
        let dict = value.downcast_object_ref::<PyDict>().ok_or(MissReason::Tokenize)?;
        let dict = message(dict, template.content_format())?;
        let (role, shape) = shape(&dict, &raw[place.clone()], template);
        known.push(Message { value: Value::from_object(dict), end: place.end, role, shape });
        Ok(())
    })?;
    if known.is_empty() { Err(MissReason::TextEmpty) } else { Ok(()) }
}

/// Bytes at both ends of a message that are looked through for what its shape hangs on.
const SHAPE_BYTES: usize = 1024;

fn shape(message: &PyDict, raw: &str, template: &Template) -> (Role, u64) {
    let name = message.get("role").and_then(Value::as_str).unwrap_or_default();
    let role = match name {
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        _ => Role::Other,
    };
    let mut hash = DefaultHasher::new();
    name.hash(&mut hash);
    for (key, value) in message.entries() {
        (key.as_str(), std::mem::discriminant(&value.kind()), value.is_true()).hash(&mut hash);
    }
    // Where markup stands in practice; the shape need not be complete, and a long text is not worth a scan for each.
    let head = &raw[..raw.floor_char_boundary(SHAPE_BYTES)];
    let tail = &raw[raw.floor_char_boundary(raw.len().saturating_sub(SHAPE_BYTES).max(head.len()))..];
    for text in template.sought() {
        (head.contains(&**text), tail.contains(&**text)).hash(&mut hash);
    }
    (role, hash.finish())
}

/// What the template of a request sees beside the messages, and how its text ends.
#[derive(Debug)]
pub(super) struct Frame {
    variables: Arc<BTreeMap<String, Value>>,
    continued: bool,
    shape: u64,
}

impl Frame {
    /// Reads the members of a request.
    ///
    /// # Errors
    /// [`MissReason::Tokenize`] where the request has something the gateway cannot know.
    pub(super) fn of(view: &BodyView) -> Result<Self, MissReason> {
        let generation = body::flag(view.add_generation_prompt, true).ok_or(MissReason::Tokenize)?;
        let continued = body::flag(view.continue_final_message, false).ok_or(MissReason::Tokenize)?;
        if generation && continued {
            return Err(MissReason::Tokenize);
        }
        let mut shape = DefaultHasher::new();
        (generation, view.tools.is_some(), view.documents.is_some()).hash(&mut shape);
        (view.chat_template_kwargs, view.reasoning_effort).hash(&mut shape);
        Ok(Frame { variables: Arc::new(variables(view, generation)?), continued, shape: shape.finish() })
    }

    /// Hash of what a template may decide upon.
    pub(super) fn shape(&self) -> u64 {
        self.shape
    }

    /// Whether the text is what the template makes of the messages as they stand.
    pub(super) fn is_plain(&self, messages: &[Message], template: &Template) -> bool {
        !self.continued && (template.knows_developer() || !messages.iter().any(is_developer))
    }

    /// Renders the text of messages, of which there must be some.
    ///
    /// # Errors
    /// [`MissReason::Template`] where the template refuses, [`MissReason::Tokenize`] where the messages have something
    /// the gateway cannot know.
    pub(super) fn render(&self, messages: &[Message], template: &Template) -> Result<String, MissReason> {
        let values: Vec<Value> = if !template.knows_developer() && messages.iter().any(is_developer) {
            developer_as_system(messages, template.content_format())?
        } else {
            messages.iter().map(|message| message.value.clone()).collect()
        };
        let last = if self.continued { values.last().cloned() } else { None };
        let text = self.render_values(values, template)?;
        if !self.continued {
            return Ok(text);
        }
        let content = last.as_ref().and_then(dict).and_then(|message| message.get("content"));
        let last = content.and_then(final_text).ok_or(MissReason::Tokenize)?;
        cut_after(text, &last).ok_or(MissReason::Template)
    }

    /// Renders what the template makes of messages as they stand.
    pub(super) fn render_values(&self, messages: Vec<Value>, template: &Template) -> Result<String, MissReason> {
        let scope = Scope { frame: Arc::clone(&self.variables), messages: Value::from(messages) };
        // The renderer is not ours: whatever a conversation makes it do must stay a reason.
        let rendered = catch_unwind(AssertUnwindSafe(|| template.render(Value::from_object(scope))));
        rendered.map_err(|_| MissReason::Template)?.map_err(|error| {
            // A client can cause this at will: counted by reason, and in the log only on request.
            tracing::debug!(%error, "a chat is routed without keys");
            MissReason::Template
        })
    }
}

/// The names a template finds: a scope, not a dict, so that they are found before any method.
#[derive(Debug)]
struct Scope {
    frame: Arc<BTreeMap<String, Value>>,
    messages: Value,
}

impl Object for Scope {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        if key == "messages" { Some(self.messages.clone()) } else { self.frame.get(key).cloned() }
    }
}

fn dict(value: &Value) -> Option<&PyDict> {
    value.downcast_object_ref::<PyDict>()
}

fn is_developer(message: &Message) -> bool {
    message.role == Role::System
        && dict(&message.value).and_then(|message| message.get("role")).and_then(Value::as_str) == Some("developer")
}

fn variables(view: &BodyView, generation: bool) -> Result<BTreeMap<String, Value>, MissReason> {
    let read = |raw: &str| json::value(raw).map_err(|_| MissReason::Tokenize);
    let mut variables = BTreeMap::new();
    variables.insert("documents".to_owned(), Value::from(()));
    let mut thinking_given = false;
    if let Some(raw) = view.chat_template_kwargs {
        let kwargs = read(raw)?;
        let kwargs = kwargs.downcast_object_ref::<PyDict>().ok_or(MissReason::Tokenize)?;
        for (key, value) in kwargs.entries() {
            let key = key.as_str().unwrap_or_default();
            if RESERVED_KWARGS.contains(&key) {
                return Err(MissReason::Tokenize);
            }
            thinking_given |= key == "enable_thinking";
            variables.insert(key.to_owned(), value.clone());
        }
    }
    variables.insert("tools".to_owned(), view.tools.map(tools).transpose()?.unwrap_or(Value::from(())));
    variables.insert("add_generation_prompt".to_owned(), Value::from(generation));
    if let Some(raw) = view.documents {
        variables.insert("documents".to_owned(), read(raw)?);
    }
    if let Some(raw) = view.reasoning_effort {
        let effort = json::string(raw).map_err(|_| MissReason::Tokenize)?;
        if effort != "auto" {
            variables.insert("reasoning_effort".to_owned(), Value::from(effort.as_ref()));
            if !thinking_given {
                variables.insert("enable_thinking".to_owned(), Value::from(effort != "none"));
            }
        }
    }
    Ok(variables)
}

/// The tools as the engine hands them on: known members in their fixed order, absent ones as null, others dropped.
fn tools(raw: &str) -> Result<Value, MissReason> {
    let tools = json::value(raw).map_err(|_| MissReason::Tokenize)?;
    let mut out = Vec::new();
    for tool in list(&tools)? {
        let tool = tool.downcast_object_ref::<PyDict>().ok_or(MissReason::Tokenize)?;
        let function = tool.get("function").ok_or(MissReason::Tokenize)?;
        let function = function.downcast_object_ref::<PyDict>().ok_or(MissReason::Tokenize)?;
        // Its place among the members is not known.
        if tool.get("defer_loading").is_some() || function.get("defer_loading").is_some() {
            return Err(MissReason::Tokenize);
        }
        let name = function.get("name").filter(|name| name.kind() == ValueKind::String).ok_or(MissReason::Tokenize)?;
        let mut outer = PyDict::default();
        outer.set("type", tool.get("type").cloned().unwrap_or_else(|| Value::from("function")));
        let mut inner = PyDict::default();
        inner.set("name", name.clone());
        for member in ["description", "parameters"] {
            inner.set(member, function.get(member).cloned().unwrap_or_else(|| Value::from(())));
        }
        if let Some(strict) = function.get("strict").filter(|v| !v.is_none()) {
            inner.set("strict", strict.clone());
        }
        outer.set("function", Value::from_object(inner));
        out.push(Value::from_object(outer));
    }
    if out.is_empty() { Err(MissReason::Tokenize) } else { Ok(Value::from(out)) }
}

fn list(value: &Value) -> Result<impl Iterator<Item = Value>, MissReason> {
    if value.kind() != ValueKind::Seq {
        return Err(MissReason::Tokenize);
    }
    value.try_iter().map_err(|_| MissReason::Tokenize)
}

fn message(message: &PyDict, format: ContentFormat) -> Result<PyDict, MissReason> {
    let role = message.get("role").and_then(Value::as_str).ok_or(MissReason::Tokenize)?;
    let content = content(message.get("content"), role, format)?;
    let mut out = PyDict::default();
    out.set("role", Value::from(role));
    out.set("content", content);
    let given = |name: &str| message.get(name).filter(|v| !v.is_none());
    match role {
        "assistant" => {
            if let Some(calls) = given("tool_calls") {
                let calls = list(calls)?.map(|call| tool_call(&call)).collect::<Result<Vec<_>, _>>()?;
                if !calls.is_empty() {
                    out.set("tool_calls", Value::from(calls));
                }
            }
            if let Some(reasoning) = given("reasoning").or_else(|| given("reasoning_content")) {
                out.set("reasoning", reasoning.clone());
                out.set("reasoning_content", reasoning.clone());
            }
        }
        "tool" => {
            if let Some(id) = message.get("tool_call_id") {
                out.set("tool_call_id", id.clone());
            }
        }
        "developer" if given("tools").is_some() => return Err(MissReason::Tokenize),
        _ => {}
    }
    if let Some(name) = given("name").filter(|name| name.kind() == ValueKind::String) {
        out.set("name", name.clone());
    }
    Ok(out)
}

/// A call whose arguments are an object: text is parsed, and what is no object becomes an empty one.
fn tool_call(call: &Value) -> Result<Value, MissReason> {
    let call = call.downcast_object_ref::<PyDict>().ok_or(MissReason::Tokenize)?;
    let function = call.get("function").ok_or(MissReason::Tokenize)?;
    let function = function.downcast_object_ref::<PyDict>().ok_or(MissReason::Tokenize)?;
    let arguments = match function.get("arguments") {
        Some(value) if value.kind() == ValueKind::Map => value.clone(),
        Some(value) if value.kind() == ValueKind::String => parsed_arguments(value.as_str().unwrap_or_default())?,
        None => empty(),
        Some(value) if value.is_none() => empty(),
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

fn content(content: Option<&Value>, role: &str, format: ContentFormat) -> Result<Value, MissReason> {
    // The usual case, without the detour that copies the text.
    if let Some(value) = content.filter(|c| c.kind() == ValueKind::String && format == ContentFormat::String)
        && role != "system"
    {
        return Ok(value.clone());
    }
    let parts = match content {
        None => Vec::new(),
        Some(value) if value.is_none() => Vec::new(),
        Some(value) if value.kind() == ValueKind::String => {
            let mut part = PyDict::default();
            part.set("type", Value::from("text"));
            part.set("text", value.clone());
            vec![part]
        }
        Some(value) => list(value)?.map(|part| text_part(&part)).collect::<Result<Vec<_>, _>>()?,
    };
    let texts: Vec<&str> = parts.iter().filter_map(|p| p.get("text").and_then(Value::as_str)).collect();
    if role == "system" && texts.iter().any(|t| t.starts_with("x-anthropic-billing-header")) {
        return Err(MissReason::Tokenize);
    }
    let joined_for_tool = role == "tool" && content.is_some_and(|c| c.kind() == ValueKind::Seq);
    if format == ContentFormat::String || joined_for_tool {
        return Ok(Value::from(texts.join("\n")));
    }
    Ok(Value::from(parts.into_iter().map(Value::from_object).collect::<Vec<_>>()))
}

/// A text part; media and whatever else cannot be known is refused.
fn text_part(part: &Value) -> Result<PyDict, MissReason> {
    let mut out = PyDict::default();
    out.set("type", Value::from("text"));
    if part.kind() == ValueKind::String {
        out.set("text", part.clone());
        return Ok(out);
    }
    let part = part.downcast_object_ref::<PyDict>().ok_or(MissReason::Tokenize)?;
    let kind = part.get("type").and_then(Value::as_str);
    let text = part.get("text").filter(|text| text.kind() == ValueKind::String);
    let (Some("text" | "input_text" | "output_text"), Some(text)) = (kind, text) else {
        return Err(MissReason::Tokenize);
    };
    out.set("text", text.clone());
    for (key, value) in part.entries() {
        if let Some(key) = key.as_str().filter(|key| !matches!(*key, "type" | "text")) {
            out.set(key, value.clone());
        }
    }
    Ok(out)
}

/// For templates without a place for `developer`: it becomes `system`, and all system texts move to the front as one.
fn developer_as_system(messages: &[Message], format: ContentFormat) -> Result<Vec<Value>, MissReason> {
    if format != ContentFormat::String {
        return Err(MissReason::Tokenize);
    }
    let (system, rest): (Vec<&Message>, Vec<&Message>) = messages.iter().partition(|m| m.role == Role::System);
    let texts = system.iter().filter_map(|m| dict(&m.value)?.get("content")?.as_str());
    let mut first = PyDict::default();
    first.set("role", Value::from("system"));
    first.set("content", Value::from(texts.collect::<Vec<_>>().join("\n\n")));
    Ok(std::iter::once(Value::from_object(first)).chain(rest.into_iter().map(|m| m.value.clone())).collect())
}

/// The text of a message's content: the last part's where it is a list.
fn final_text(content: &Value) -> Option<String> {
    match content.kind() {
        ValueKind::String => content.as_str().map(str::to_owned),
        ValueKind::Seq => {
            let last = content.try_iter().ok()?.last()?;
            last.downcast_object_ref::<PyDict>()?.get("text")?.as_str().map(str::to_owned)
        }
        _ => None,
    }
}

/// Cuts the text after the last place of the final message; spaces at its end stay if the template kept all of it.
fn cut_after(mut text: String, last: &str) -> Option<String> {
    let is_space = super::methods::is_space;
    let trimmed = last.trim_matches(is_space);
    let place = text.rfind(trimmed)?;
    let kept = last.trim_start_matches(is_space);
    let whole = kept == last && text[place..].starts_with(last);
    text.truncate(place + if whole { kept.len() } else { trimmed.len() });
    Some(text)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    const PLAIN: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\
        {% if m.reasoning %}[{{ m.reasoning_content }}]{% endif %}{% endfor %}{% if add_generation_prompt %}<go>{% endif %}";
    const PARTS: &str =
        "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}({{ p | tojson }}){% endfor %}{% endfor %}";

    fn check(template: &str, body: &str, expected: Result<&str, MissReason>) {
        let template = Template::compile(template, &BTreeMap::new(), SystemTime::now).unwrap();
        let view = BodyView::parse(body.as_bytes()).unwrap();
        assert_eq!(render(&view, &template), expected.map(str::to_owned), "{body}");
    }

    #[test]
    fn content_takes_the_form_the_template_wants() {
        let parts = r#"{"messages":[{"role":"user","content":[{"type":"text","text":"a"},"b"]},{"role":"assistant","content":null}]}"#;
        check(PLAIN, parts, Ok("<user>a\nb<assistant><go>"));
        check(PARTS, parts, Ok(r#"<user>({"type": "text", "text": "a"})({"type": "text", "text": "b"})<assistant>"#));
        let text = r#"{"messages":[{"role":"user","content":"a"},{"role":"tool","content":[{"type":"text","text":"x"},{"type":"text","text":"y"}]}]}"#;
        check(
            PARTS.replace("p | tojson", "p").as_str(),
            text,
            Ok("<user>({'type': 'text', 'text': 'a'})<tool>(x)(\n)(y)"),
        );
    }

    #[test]
    fn tool_calls_get_their_arguments_as_objects() {
        for (arguments, expected) in [
            (r#""{\"b\": 1.50,  \"a\":1e3}""#, r#"{"b": 1.5, "a": 1000.0}"#),
            (r#""""#, "{}"),
            ("null", "{}"),
            (r#""[1]""#, "{}"),
            (r#""{broken""#, "{}"),
            (r#"{"x": 1}"#, r#"{"x": 1}"#),
        ] {
            let body = format!(
                r#"{{"messages":[{{"role":"assistant","tool_calls":[{{"id":"1","type":"function","function":{{"name":"f","arguments":{arguments}}}}}]}}]}}"#
            );
            let expected = format!(
                r#"<assistant>[{{"id": "1", "type": "function", "function": {{"name": "f", "arguments": {expected}}}}}]<go>"#
            );
            check(PLAIN, &body, Ok(&expected));
        }
    }

    #[test]
    fn reasoning_goes_by_both_names() {
        check(
            PLAIN,
            r#"{"messages":[{"role":"assistant","content":"x","reasoning_content":"why"}]}"#,
            Ok("<assistant>x[why]<go>"),
        );
    }

    #[test]
    fn tools_are_spelled_as_the_engine_spells_them() {
        check(
            "{{ tools | tojson }}",
            r#"{"messages":[{"role":"user","content":"x"}],"tools":[{"function":{"x":1,"parameters":{"b":1},"name":"f"},"type":"function"}]}"#,
            Ok(r#"[{"type": "function", "function": {"name": "f", "description": null, "parameters": {"b": 1}}}]"#),
        );
    }

    #[test]
    fn a_developer_speaks_as_system_where_the_template_knows_no_developer() {
        let body = r#"{"messages":[{"role":"user","content":"u"},{"role":"developer","content":"d"},{"role":"system","content":"s"}]}"#;
        check(PLAIN, body, Ok("<system>d\n\ns<user>u<go>"));
        check(&format!("{PLAIN}{{# 'developer' #}}"), body, Ok("<user>u<developer>d<system>s<go>"));
    }

    #[test]
    fn arguments_of_the_template_follow_their_order_of_precedence() {
        let show = "{{ enable_thinking }}|{{ reasoning_effort }}|{{ documents }}|{{ add_generation_prompt }}";
        for (fields, expected) in [
            ("", "||None|True"),
            (r#","reasoning_effort":"none""#, "False|none|None|True"),
            (r#","reasoning_effort":"high","chat_template_kwargs":{"enable_thinking":false}"#, "False|high|None|True"),
            (
                r#","chat_template_kwargs":{"reasoning_effort":"low","documents":[1]},"reasoning_effort":null"#,
                "|low|[1]|True",
            ),
            (r#","documents":[{"a":1}],"add_generation_prompt":false"#, "||[{'a': 1}]|False"),
        ] {
            let body = format!(r#"{{"messages":[{{"role":"user","content":"x"}}]{fields}}}"#);
            check(show, &body, Ok(expected));
        }
    }

    #[test]
    fn a_continued_message_ends_the_text() {
        let template = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}";
        let body = |content: &str, generation: &str| {
            format!(
                r#"{{"messages":[{{"role":"assistant","content":"{content}"}}],"continue_final_message":true{generation}}}"#
            )
        };
        check(template, &body("Once upon ", r#","add_generation_prompt":false"#), Ok("<assistant>Once upon"));
        check(PLAIN, &body("Once upon ", r#","add_generation_prompt":false"#), Ok("<assistant>Once upon "));
        check(template, &body("x", ""), Err(MissReason::Tokenize));
    }

    #[test]
    fn what_cannot_be_known_is_refused() {
        for (body, reason) in [
            (r#"{"prompt":"x"}"#, MissReason::TextEmpty),
            (r#"{"messages":[]}"#, MissReason::TextEmpty),
            (r#"{"messages":"x"}"#, MissReason::Tokenize),
            (r#"{"messages":[{"content":"x"}]}"#, MissReason::Tokenize),
            (
                r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}"#,
                MissReason::Tokenize,
            ),
            (r#"{"messages":[{"role":"user","content":"x"}],"tools":[]}"#, MissReason::Tokenize),
            (
                r#"{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"tokenize":true}}"#,
                MissReason::Tokenize,
            ),
            (r#"{"messages":[{"role":"user","content":"x"}],"add_generation_prompt":null}"#, MissReason::Tokenize),
        ] {
            check(PLAIN, body, Err(reason));
        }
        check(
            "{{ raise_exception('no') }}",
            r#"{"messages":[{"role":"user","content":"x"}]}"#,
            Err(MissReason::Template),
        );
    }
}
