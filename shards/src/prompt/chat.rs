//! A chat turned into the variables its template sees, field by field as the engine's front end does it, and rendered.
//!
//! **Invariant.** What the engine would render otherwise, in any version, is refused here: the request is then routed
//! without keys. Where versions differ, the newest (vLLM 0.33, SGLang 0.5.23) is followed.

use std::collections::BTreeMap;

use minijinja::Value;
use minijinja::value::ValueKind;

use super::body::{self, BodyView};
use super::conversation::{self, Fill};
use super::pyvalue::PyDict;
use super::request::{dict, dict_of, given, list, read};
use super::template::Template;
use super::{chat_sglang, json};
use crate::service::{Engine, MissReason};

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

/// Texts that stand where the engine puts something unknown: whatever two of them have in common is certain.
pub(super) const MARKS: [char; 2] = ['\u{F8FE}', '\u{F8FF}'];

/// A chat in the form of `/v1/chat/completions`, whichever API it came by.
#[derive(Debug, Default)]
pub(super) struct ChatRequest {
    /// Messages as dicts.
    pub messages: Vec<Value>,
    /// The list of tools as it was sent.
    pub tools: Option<Value>,
    pub tool_choice: Option<Value>,
    pub documents: Option<Value>,
    /// The request's template arguments.
    pub kwargs: Option<Value>,
    /// Template arguments of the rule, which everything in the request overrides.
    pub defaults: Option<Value>,
    pub effort: Option<String>,
    /// SGLang's `reasoning.enabled`.
    pub reasoning_enabled: bool,
    pub no_generation_prompt: bool,
    pub continued: bool,
    /// System messages that stand later move to the front if the template takes none there (`/v1/messages`).
    pub system_first_if_refused: bool,
}

/// How much of a prompt is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    Whole,
    /// The text goes on in a way that is not known: its last characters may share a token with what follows.
    Beginning,
    /// More tokens follow, and none is shared.
    Head,
}

/// The text of a chat.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rendered {
    pub text: String,
    pub extent: Extent,
}

impl ChatRequest {
    /// Reads a body of `/v1/chat/completions`.
    ///
    /// # Errors
    /// [`MissReason::TextEmpty`] without messages, [`MissReason::Tokenize`] for what the gateway cannot know.
    pub fn of_chat(view: &BodyView<'_>) -> Result<Self, MissReason> {
        let messages = read(view.messages.ok_or(MissReason::TextEmpty)?)?;
        let effort = view.reasoning_effort.map(|raw| json::string(raw).map_err(|_| MissReason::Tokenize));
        let reasoning = view.reasoning.map(read).transpose()?;
        let enabled = reasoning.as_ref().and_then(|r| r.downcast_object_ref::<PyDict>()?.get("enabled"));
        let chat = ChatRequest {
            effort: effort.transpose()?.map(std::borrow::Cow::into_owned),
            documents: view.documents.map(read).transpose()?,
            reasoning_enabled: enabled.is_some_and(Value::is_true),
            no_generation_prompt: !body::flag(view.add_generation_prompt, true).ok_or(MissReason::Tokenize)?,
            continued: body::flag(view.continue_final_message, false).ok_or(MissReason::Tokenize)?,
            ..ChatRequest::of_common(view)?
        };
        Ok(ChatRequest { messages: list(&messages)?.collect(), ..chat })
    }

    /// What the APIs have in common.
    ///
    /// # Errors
    /// [`MissReason::Tokenize`] for a member that cannot be read.
    pub fn of_common(view: &BodyView<'_>) -> Result<Self, MissReason> {
        Ok(ChatRequest {
            tools: view.tools.map(read).transpose()?,
            tool_choice: view.tool_choice.map(read).transpose()?,
            kwargs: view.chat_template_kwargs.map(read).transpose()?,
            ..ChatRequest::default()
        })
    }

    /// Whether the engine chooses its template for tools.
    pub fn has_tools(&self) -> bool {
        self.tools.is_some()
    }
}

/// Renders a chat.
///
/// # Errors
/// [`MissReason::TextEmpty`] without messages, [`MissReason::Template`] where the template refuses,
/// [`MissReason::Media`] where media come first, and [`MissReason::Tokenize`] where the request has something the
/// gateway cannot know.
pub(super) fn render(request: &ChatRequest, template: &Template, engine: Engine) -> Result<Rendered, MissReason> {
    if request.messages.is_empty() {
        return Err(MissReason::TextEmpty);
    }
    match engine {
        Engine::Vllm => vllm(request, template),
        Engine::Trtllm if is_plain(request) => vllm(request, template),
        Engine::Sglang => chat_sglang::render(request, template),
        Engine::Trtllm | Engine::Llamacpp => Err(MissReason::Tokenize),
    }
}

/// Whether the chat has nothing but texts, whose treatment all front ends share.
fn is_plain(request: &ChatRequest) -> bool {
    let plain = |message: &Value| {
        let Ok(message) = dict(message) else { return false };
        let role = message.get("role").and_then(Value::as_str);
        matches!(role, Some("system" | "user" | "assistant"))
            && message.get("content").is_some_and(|content| content.kind() == ValueKind::String)
            && message.entries().len() == 2
    };
    request.tools.is_none() && request.effort.is_none() && request.messages.iter().all(plain)
}

fn vllm(request: &ChatRequest, template: &Template) -> Result<Rendered, MissReason> {
    if request.continued && !request.no_generation_prompt {
        return Err(MissReason::Tokenize);
    }
    let messages = system_first(request, template)?;
    let (turns, media) = conversation::of(&messages, template, Fill::Engine)?;
    let last = turns.last().and_then(|turn| turn.get("content").cloned());
    let text = run(template, variables(request, turns)?)?;
    if media {
        // A string has the engine's placeholders first, in a spelling of the model's own.
        let marked =
            |mark| run(template, variables(request, conversation::of(&messages, template, Fill::Mark(mark))?.0)?);
        let known = if template.content_format() == super::ContentFormat::Parts { text } else { marked(MARKS[0])? };
        return Ok(beginning(known, &marked(MARKS[1])?));
    }
    if !request.continued {
        return Ok(Rendered { text, extent: Extent::Whole });
    }
    let last = last.as_ref().and_then(final_text).ok_or(MissReason::Tokenize)?;
    let text = cut_after(text, &last).ok_or(MissReason::Template)?;
    Ok(Rendered { text, extent: Extent::Whole })
}

/// What two renders with different marks have in common.
pub(super) fn beginning(mut text: String, other: &str) -> Rendered {
    let same = text.char_indices().zip(other.chars()).find(|((_, a), b)| a != b);
    let end = same.map_or(text.len().min(other.len()), |((at, _), _)| at);
    text.truncate(end);
    Rendered { text, extent: Extent::Beginning }
}

/// Runs the template.
///
/// # Errors
/// [`MissReason::Template`].
pub(super) fn run(template: &Template, variables: Value) -> Result<String, MissReason> {
    template.render(variables).map_err(|error| {
        // A client can cause this at will: counted by reason, and in the log only on request.
        tracing::debug!(%error, "a chat is routed without keys");
        MissReason::Template
    })
}

/// A template's scope; not a dict, so that its names are found before any method.
pub(super) fn scope(variables: &PyDict) -> Value {
    let named = |(name, value): &(Value, Value)| Some((name.as_str()?.to_owned(), value.clone()));
    Value::from(variables.entries().iter().filter_map(named).collect::<BTreeMap<String, Value>>())
}

/// The entries of template arguments.
///
/// # Errors
/// They are no dict, or one of them steers the renderer.
pub(super) fn arguments(kwargs: Option<&Value>) -> Result<&[(Value, Value)], MissReason> {
    let Some(kwargs) = kwargs else { return Ok(&[]) };
    let entries = dict(kwargs)?.entries();
    let reserved = |(key, _): &(Value, Value)| RESERVED_KWARGS.contains(&key.as_str().unwrap_or_default());
    if entries.iter().any(reserved) { Err(MissReason::Tokenize) } else { Ok(entries) }
}

fn variables(request: &ChatRequest, messages: Vec<PyDict>) -> Result<Value, MissReason> {
    let mut variables = PyDict::default();
    variables.set("documents", Value::from(()));
    for kwargs in [&request.defaults, &request.kwargs] {
        for (key, value) in arguments(kwargs.as_ref())? {
            variables.set(key.as_str().unwrap_or_default(), value.clone());
        }
    }
    variables.set("messages", messages.into_iter().map(Value::from_object).collect());
    variables.set("tools", request.tools.as_ref().map(tools).transpose()?.unwrap_or(Value::from(())));
    variables.set("add_generation_prompt", Value::from(!request.no_generation_prompt));
    if let Some(documents) = &request.documents {
        variables.set("documents", documents.clone());
    }
    if let Some(effort) = request.effort.as_deref().filter(|effort| *effort != "auto") {
        variables.set("reasoning_effort", Value::from(effort));
        let own = request.kwargs.as_ref().and_then(|kwargs| kwargs.downcast_object_ref::<PyDict>());
        if own.is_none_or(|own| own.get("enable_thinking").is_none()) {
            variables.set("enable_thinking", Value::from(effort != "none"));
        }
    }
    Ok(scope(&variables))
}

/// The tools as vLLM hands them on: known members in their fixed order, absent ones as null, others dropped.
fn tools(tools: &Value) -> Result<Value, MissReason> {
    let mut out = Vec::new();
    for tool in list(tools)? {
        let tool = dict(&tool)?;
        let function = dict(tool.get("function").ok_or(MissReason::Tokenize)?)?;
        // Its place among the members is not known.
        if given(tool, "defer_loading").is_some() || given(function, "defer_loading").is_some() {
            return Err(MissReason::Tokenize);
        }
        let name = function.get("name").filter(|name| name.kind() == ValueKind::String).ok_or(MissReason::Tokenize)?;
        let mut inner = dict_of([("name", name.clone())]);
        for member in ["description", "parameters"] {
            inner.set(member, function.get(member).cloned().unwrap_or_else(|| Value::from(())));
        }
        if let Some(strict) = given(function, "strict") {
            inner.set("strict", strict.clone());
        }
        let kind = tool.get("type").cloned().unwrap_or_else(|| Value::from("function"));
        out.push(Value::from_object(dict_of([("type", kind), ("function", Value::from_object(inner))])));
    }
    if out.is_empty() { Err(MissReason::Tokenize) } else { Ok(Value::from(out)) }
}

/// Messages of `/v1/messages`, whose later system messages the engine moves into the first if the template refuses
/// them where they are.
fn system_first(request: &ChatRequest, template: &Template) -> Result<Vec<Value>, MissReason> {
    let role = |message: &Value| dict(message).ok().and_then(|m| m.get("role")?.as_str().map(str::to_owned));
    let is_system = |message: &Value| role(message).as_deref() == Some("system");
    let later = request.messages.iter().skip(1).any(is_system);
    if !request.system_first_if_refused || !later || template.takes_later_system() {
        return Ok(request.messages.clone());
    }
    let (system, mut rest): (Vec<Value>, Vec<Value>) = request.messages.iter().cloned().partition(is_system);
    let mut text = String::new();
    for message in &system {
        text.push_str(dict(message)?.get("content").and_then(Value::as_str).ok_or(MissReason::Tokenize)?);
    }
    rest.insert(0, Value::from_object(dict_of([("role", "system".into()), ("content", text.into())])));
    Ok(rest)
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
        let rendered = ChatRequest::of_chat(&view).and_then(|chat| render(&chat, &template, Engine::Vllm));
        assert_eq!(rendered.map(|r| r.text), expected.map(str::to_owned), "{body}");
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
                r#"{"messages":[{"role":"user","content":[{"type":"unheard_of","image_url":{"url":"x"}}]}]}"#,
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
