//! A chat as SGLang's front end (0.5.23) hands it to a template.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::chat::{self, ChatRequest, Extent, MARKS, Rendered};
use super::content_format::ContentFormat;
use super::frame;
use super::json;
use super::pyvalue::PyDict;
use super::request::{dict, dict_of, given, list};
use super::template::Template;
use crate::service::MissReason;

/// Members of messages other than the user's that reach the template, in this order.
const MEMBERS: [&str; 7] = ["tool_call_id", "name", "phase", "reasoning_content", "tool_calls", "tools", "prefix"];
/// Roles that the engine takes.
const ROLES: [&str; 8] = ["system", "user", "assistant", "tool", "function", "developer", "root", "latest_reminder"];

/// Renders a chat.
///
/// # Errors
/// As [`chat::render`].
pub(super) fn render(request: &ChatRequest, template: &Template) -> Result<Rendered, MissReason> {
    let mut messages = request.messages.clone();
    let mut extent = Extent::Whole;
    if let Some(last) = messages.last().cloned() {
        let last = dict(&last)?;
        let is_assistant =
            last.get("role").and_then(Value::as_str).is_some_and(|r| r.eq_ignore_ascii_case("assistant"));
        if is_assistant && last.get("content").is_some_and(|content| content.kind() == ValueKind::String) {
            messages.pop();
            if request.continued {
                // Its text is encoded for itself and put behind the prompt: the prompt's own tokens do not change.
                extent = Extent::Head;
            } else {
                let content = last.get("content").cloned().unwrap_or_default();
                messages.push(Value::from_object(dict_of([("role", "user".into()), ("content", content)])));
            }
        }
    }
    let with = |mark: Option<char>| -> Result<(String, bool), MissReason> {
        let mut reader = Reader { format: template.sglang_format(), mark, media: false };
        let turns = messages.iter().map(|m| reader.turn(dict(m)?)).collect::<Result<Vec<_>, _>>()?;
        in_order(&turns, template)?;
        Ok((frame::run(template, variables(request, turns)?)?, reader.media))
    };
    let (text, media) = with(None)?;
    if media {
        return Ok(chat::beginning(text, &with(Some(MARKS[0]))?.0));
    }
    Ok(Rendered { text, extent })
}

struct Reader {
    format: ContentFormat,
    /// Stands in the place of media; none = the engine's own part.
    mark: Option<char>,
    media: bool,
}

impl Reader {
    fn turn(&mut self, message: &PyDict) -> Result<PyDict, MissReason> {
        let role = message.get("role").and_then(Value::as_str).ok_or(MissReason::Tokenize)?.to_lowercase();
        if !ROLES.contains(&role.as_str()) {
            return Err(MissReason::Tokenize);
        }
        let content = self.content(message.get("content"), &role)?;
        let mut turn = dict_of([("role", role.as_str().into()), ("content", content)]);
        if role == "user" {
            return Ok(turn);
        }
        for member in MEMBERS {
            let Some(value) = given(message, member) else { continue };
            let value = if member == "tool_calls" { tool_calls(value)? } else { value.clone() };
            turn.set(member, value);
        }
        Ok(turn)
    }

    fn content(&mut self, content: Option<&Value>, role: &str) -> Result<Value, MissReason> {
        let Some(content) = content.filter(|content| !content.is_none()) else { return Ok(Value::from("")) };
        if content.kind() == ValueKind::String {
            return Ok(content.clone());
        }
        let (mut texts, mut parts, mut others) = (Vec::new(), Vec::new(), 0);
        for part in list(content)? {
            let part = dict(&part)?;
            let media = match part.get("type").and_then(Value::as_str).ok_or(MissReason::Tokenize)? {
                "text" => {
                    let text =
                        part.get("text").filter(|t| t.kind() == ValueKind::String).ok_or(MissReason::Tokenize)?;
                    texts.push(text.as_str().unwrap_or_default().to_owned());
                    parts.push(Value::from_object(dict_of([("type", "text".into()), ("text", text.clone())])));
                    continue;
                }
                "image_url" => "image",
                "video_url" => "video",
                "audio_url" => "audio",
                _ => return Err(MissReason::Tokenize),
            };
            others += 1;
            let member = match self.mark {
                None => dict_of([("type", media.into())]),
                Some(mark) => dict_of([("type", "text".into()), ("text", mark.to_string().into())]),
            };
            parts.push(Value::from_object(member));
        }
        self.media |= others > 0;
        if self.format == ContentFormat::String && others > 0 {
            // The engine drops the part from the text, and what its processor makes of it is not known.
            return Err(MissReason::Media);
        }
        if self.format == ContentFormat::String || (role == "tool" && others == 0) {
            return Ok(Value::from(texts.join(" ")));
        }
        Ok(Value::from(parts))
    }
}

/// Calls with the members the engine's classes have, nulls kept, and their arguments as an object.
fn tool_calls(calls: &Value) -> Result<Value, MissReason> {
    let mut out = Vec::new();
    for call in list(calls)? {
        let call = dict(&call)?;
        let function = dict(call.get("function").ok_or(MissReason::Tokenize)?)?;
        let arguments = match given(function, "arguments") {
            Some(value) if value.kind() == ValueKind::Map => value.clone(),
            Some(value) if value.kind() == ValueKind::String => {
                json::value(value.as_str().unwrap_or_default()).map_err(|_| MissReason::Tokenize)?
            }
            _ => return Err(MissReason::Tokenize),
        };
        dict(&arguments)?;
        let member = |name: &str| call.get(name).cloned().unwrap_or_else(|| Value::from(()));
        let name = function.get("name").cloned().unwrap_or_else(|| Value::from(()));
        let inner = dict_of([("name", name), ("arguments", arguments)]);
        let kind = call.get("type").cloned().unwrap_or_else(|| Value::from("function"));
        out.push(Value::from_object(dict_of([
            ("id", member("id")),
            ("index", member("index")),
            ("type", kind),
            ("function", Value::from_object(inner)),
        ])));
    }
    Ok(Value::from(out))
}

/// Where a template looks at the ids of results, the engine sorts the results by their calls: others than sorted ones
/// are not followed.
fn in_order(turns: &[PyDict], template: &Template) -> Result<(), MissReason> {
    if !template.mentions_tool_call_id() {
        return Ok(());
    }
    let mut calls: Vec<Value> = Vec::new();
    let mut next = 0;
    for turn in turns {
        if let Some(given) = given(turn, "tool_calls") {
            calls = list(given)?
                .map(|call| dict(&call)?.get("id").cloned().ok_or(MissReason::Tokenize))
                .collect::<Result<_, _>>()?;
            next = 0;
        } else if turn.get("role").and_then(Value::as_str) == Some("tool") {
            let id = turn.get("tool_call_id");
            let place = calls.iter().position(|call| Some(call) == id).ok_or(MissReason::Tokenize)?;
            if place < next {
                return Err(MissReason::Tokenize);
            }
            next = place + 1;
        }
    }
    Ok(())
}

fn variables(request: &ChatRequest, turns: Vec<PyDict>) -> Result<Value, MissReason> {
    let mut kwargs = PyDict::default();
    for source in [&request.defaults, &request.kwargs] {
        for (key, value) in frame::arguments(source.as_ref())? {
            kwargs.set(key.as_str().unwrap_or_default(), value.clone());
        }
    }
    let moved = given(&kwargs, "reasoning_effort").map(|effort| effort.as_str().map(str::to_owned));
    let effort = match (&request.effort, moved) {
        (_, Some(None)) => return Err(MissReason::Tokenize),
        (Some(own), _) => Some(own.clone()),
        (None, moved) => moved.flatten(),
    };
    let thinking = match &effort {
        Some(effort) => Some(effort != "none"),
        None => request.reasoning_enabled.then_some(true),
    };
    let mut variables = dict_of([
        ("messages", turns.into_iter().map(Value::from_object).collect()),
        ("tools", tools(request)?),
        ("documents", Value::from(())),
        ("add_generation_prompt", Value::from(true)),
    ]);
    if let Some(effort) = effort {
        variables.set("reasoning_effort", effort.into());
    }
    if let Some(thinking) = thinking {
        for name in ["thinking", "enable_thinking"] {
            variables.set(name, thinking.into());
        }
    }
    for (key, value) in kwargs.entries() {
        match key.as_str().unwrap_or_default() {
            // The engine hands it over by its own argument.
            "add_generation_prompt" => return Err(MissReason::Tokenize),
            "reasoning_effort" => {}
            key => variables.set(key, value.clone()),
        }
    }
    Ok(frame::scope(&variables))
}

/// The tools that the choice leaves, in the client's order of members; missing ones are null.
fn tools(request: &ChatRequest) -> Result<Value, MissReason> {
    let Some(tools) = &request.tools else { return Ok(Value::from(())) };
    let mut only = None;
    match &request.tool_choice {
        Some(choice) if choice.as_str() == Some("none") => return Ok(Value::from(())),
        Some(choice) if choice.kind() == ValueKind::Map => {
            let function = dict(dict(choice)?.get("function").ok_or(MissReason::Tokenize)?)?;
            only = Some(function.get("name").cloned().ok_or(MissReason::Tokenize)?);
        }
        _ => {}
    }
    let mut out = Vec::new();
    for tool in list(tools)? {
        let tool = dict(&tool)?;
        let function = dict(tool.get("function").ok_or(MissReason::Tokenize)?)?;
        if only.as_ref().is_some_and(|only| function.get("name") != Some(only)) {
            continue;
        }
        let mut inner = PyDict::default();
        for (key, value) in function.entries() {
            if let Some(key @ ("name" | "description" | "parameters" | "strict")) = key.as_str() {
                inner.set(key, value.clone());
            }
        }
        for member in ["description", "parameters"] {
            if inner.get(member).is_none() {
                inner.set(member, Value::from(()));
            }
        }
        let kind = tool.get("type").cloned().unwrap_or_else(|| Value::from("function"));
        let deferred = tool.get("defer_loading").cloned().unwrap_or_else(|| Value::from(()));
        out.push(Value::from_object(dict_of([
            ("type", kind),
            ("function", Value::from_object(inner)),
            ("defer_loading", deferred),
        ])));
    }
    if out.is_empty() { Ok(Value::from(())) } else { Ok(Value::from(out)) }
}
