//! A chat request turned into the variables its template sees, field by field as vLLM's front end does it.
//!
//! **Invariant.** What the engine would render otherwise, in any version, is refused here: the request is then routed
//! without keys. Where versions differ, the newest (0.33) is followed.

use std::collections::BTreeMap;

use minijinja::Value;
use minijinja::value::ValueKind;

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
pub(super) fn render(view: &BodyView, template: &Template) -> Result<String, MissReason> {
    let messages = json::value(view.messages.ok_or(MissReason::TextEmpty)?).map_err(|_| MissReason::Tokenize)?;
    let messages = conversation(&messages, template)?;
    let last_content = messages.last().and_then(|m| m.get("content").cloned());
    let generation = body::flag(view.add_generation_prompt, true).ok_or(MissReason::Tokenize)?;
    let continued = body::flag(view.continue_final_message, false).ok_or(MissReason::Tokenize)?;
    if generation && continued {
        return Err(MissReason::Tokenize);
    }
    let messages = messages.into_iter().map(Value::from_object).collect::<Vec<_>>();
    let variables = variables(view, messages, generation)?;
    let text = template.render(variables).map_err(|error| {
        // A client can cause this at will: counted by reason, and in the log only on request.
        tracing::debug!(%error, "a chat is routed without keys");
        MissReason::Template
    })?;
    if !continued {
        return Ok(text);
    }
    let last = last_content.as_ref().and_then(final_text).ok_or(MissReason::Tokenize)?;
    cut_after(text, &last).ok_or(MissReason::Template)
}

fn variables(view: &BodyView, messages: Vec<Value>, generation: bool) -> Result<Value, MissReason> {
    let read = |raw: &str| json::value(raw).map_err(|_| MissReason::Tokenize);
    let mut variables = PyDict::default();
    variables.set("documents", Value::from(()));
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
            variables.set(key, value.clone());
        }
    }
    variables.set("messages", Value::from(messages));
    variables.set("tools", view.tools.map(tools).transpose()?.unwrap_or(Value::from(())));
    variables.set("add_generation_prompt", Value::from(generation));
    if let Some(raw) = view.documents {
        variables.set("documents", read(raw)?);
    }
    if let Some(raw) = view.reasoning_effort {
        let effort = json::string(raw).map_err(|_| MissReason::Tokenize)?;
        if effort != "auto" {
            variables.set("reasoning_effort", Value::from(effort.as_ref()));
            if !thinking_given {
                variables.set("enable_thinking", Value::from(effort != "none"));
            }
        }
    }
    // A scope, not a dict: its names are found before any method.
    let named = |(name, value): &(Value, Value)| Some((name.as_str()?.to_owned(), value.clone()));
    Ok(Value::from(variables.entries().iter().filter_map(named).collect::<BTreeMap<String, Value>>()))
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

fn conversation(messages: &Value, template: &Template) -> Result<Vec<PyDict>, MissReason> {
    let mut out = Vec::new();
    let mut developer = false;
    for message in list(messages)? {
        let message = message.downcast_object_ref::<PyDict>().ok_or(MissReason::Tokenize)?;
        let message = self::message(message, template.content_format())?;
        developer |= message.get("role").and_then(Value::as_str) == Some("developer");
        out.push(message);
    }
    if out.is_empty() {
        return Err(MissReason::TextEmpty);
    }
    if developer && !template.knows_developer() {
        return developer_as_system(out, template.content_format());
    }
    Ok(out)
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
fn developer_as_system(messages: Vec<PyDict>, format: ContentFormat) -> Result<Vec<PyDict>, MissReason> {
    if format != ContentFormat::String {
        return Err(MissReason::Tokenize);
    }
    let is_system = |m: &PyDict| matches!(m.get("role").and_then(Value::as_str), Some("system" | "developer"));
    let (system, rest): (Vec<PyDict>, Vec<PyDict>) = messages.into_iter().partition(is_system);
    let texts: Vec<&str> = system.iter().filter_map(|m| m.get("content").and_then(Value::as_str)).collect();
    let mut first = PyDict::default();
    first.set("role", Value::from("system"));
    first.set("content", Value::from(texts.join("\n\n")));
    Ok(std::iter::once(first).chain(rest).collect())
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
