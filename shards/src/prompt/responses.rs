//! `/v1/responses` as vLLM turns it into a chat, where the whole input is in the request.
//!
//! Where releases differ, the newest is followed: a call, a reasoning and a message of the assistant that follow one
//! another become one turn, as long as the turn has none of the kind yet.

use json::string;
use minijinja::Value;
use minijinja::value::ValueKind;

use super::body::BodyView;
use super::chat::ChatRequest;
use super::json;
use super::pyvalue::PyDict;
use super::request::{dict, dict_of, given, list, read};
use crate::service::{Engine, MissReason};

/// Reads the request.
///
/// # Errors
/// [`MissReason::Stored`] where a part of the prompt is stored in the engine, else what the gateway cannot know.
pub(super) fn chat(view: &BodyView<'_>, engine: Engine) -> Result<ChatRequest, MissReason> {
    if engine != Engine::Vllm {
        return Err(MissReason::Tokenize);
    }
    // `prompt` names a stored prompt here.
    if view.previous_response_id.is_some() || view.previous_input_messages.is_some() || view.prompt.is_some() {
        return Err(MissReason::Stored);
    }
    // Anything else cuts at a length that the gateway does not know.
    if view.truncation.is_some_and(|raw| raw != "\"disabled\"") {
        return Err(MissReason::Tokenize);
    }
    let mut items = Items::default();
    if let Some(raw) = view.instructions {
        let text = string(raw).map_err(|_| MissReason::Tokenize)?;
        if !text.is_empty() {
            items.plain("system", Value::from(text.as_ref()));
        }
    }
    let input = read(view.input.ok_or(MissReason::TextEmpty)?)?;
    if input.kind() == ValueKind::String {
        items.plain("user", input);
    } else {
        for item in list(&input)? {
            items.push(dict(&item)?)?;
        }
    }
    let continued = items.unfinished;
    let common = ChatRequest::of_common(view)?;
    Ok(ChatRequest {
        messages: items.messages.into_iter().map(Value::from_object).collect(),
        tools: common.tools.as_ref().map(tools).transpose()?.flatten(),
        effort: effort(view)?,
        no_generation_prompt: continued,
        continued,
        ..common
    })
}

/// `reasoning.effort`.
fn effort(view: &BodyView<'_>) -> Result<Option<String>, MissReason> {
    let Some(reasoning) = view.reasoning.map(read).transpose()? else { return Ok(None) };
    let effort = given(dict(&reasoning)?, "effort");
    effort.map(|effort| effort.as_str().map(str::to_owned).ok_or(MissReason::Tokenize)).transpose()
}

/// The function tools in the form of a chat's; none if there are none. Others have no form in a chat.
fn tools(tools: &Value) -> Result<Option<Value>, MissReason> {
    let mut out = Vec::new();
    for tool in list(tools)? {
        let tool = dict(&tool)?;
        if tool.get("type").and_then(Value::as_str) != Some("function") {
            return Err(MissReason::Tokenize);
        }
        let mut function = PyDict::default();
        for (key, value) in tool.entries() {
            if let Some(key) = key.as_str().filter(|key| *key != "type") {
                function.set(key, value.clone());
            }
        }
        out.push(Value::from_object(dict_of([
            ("type", "function".into()),
            ("function", Value::from_object(function)),
        ])));
    }
    Ok((!out.is_empty()).then(|| Value::from(out)))
}

#[derive(Default)]
struct Items {
    messages: Vec<PyDict>,
    /// The last item is to be continued.
    unfinished: bool,
}

impl Items {
    fn plain(&mut self, role: &str, content: Value) {
        self.messages.push(dict_of([("role", role.into()), ("content", content)]));
    }

    fn push(&mut self, item: &PyDict) -> Result<(), MissReason> {
        let kind = match given(item, "type") {
            Some(kind) => kind.as_str().ok_or(MissReason::Tokenize)?,
            None => "message",
        };
        let status = item.get("status").and_then(Value::as_str);
        self.unfinished = kind == "message" && matches!(status, Some("in_progress" | "incomplete"));
        match kind {
            "message" => self.push_message(item),
            "function_call" => self.push_call(item),
            "function_call_output" => {
                let output = item.get("output").cloned().ok_or(MissReason::Tokenize)?;
                let id = item.get("call_id").cloned().ok_or(MissReason::Tokenize)?;
                self.messages.push(dict_of([("role", "tool".into()), ("content", output), ("tool_call_id", id)]));
                Ok(())
            }
            // A reasoning that is to be continued has no place in a template that is known.
            "reasoning" if !matches!(status, Some("in_progress" | "incomplete")) => self.push_reasoning(item),
            _ => Err(MissReason::Tokenize),
        }
    }

    fn push_message(&mut self, item: &PyDict) -> Result<(), MissReason> {
        let role = item.get("role").and_then(Value::as_str).ok_or(MissReason::Tokenize)?;
        let content = given(item, "content").ok_or(MissReason::Tokenize)?;
        if role != "assistant" {
            self.plain(role, content.clone());
            return Ok(());
        }
        // Of an assistant's parts, the engine takes the first.
        let text = if content.kind() == ValueKind::String { content.clone() } else { first_text(content)? };
        self.join("content", text);
        Ok(())
    }

    fn push_call(&mut self, item: &PyDict) -> Result<(), MissReason> {
        if given(item, "namespace").is_some() {
            return Err(MissReason::Tokenize);
        }
        let member =
            |name| item.get(name).filter(|value| value.kind() == ValueKind::String).ok_or(MissReason::Tokenize);
        let function = dict_of([("name", member("name")?.clone()), ("arguments", member("arguments")?.clone())]);
        let call = Value::from_object(dict_of([
            ("id", member("call_id")?.clone()),
            ("function", Value::from_object(function)),
            ("type", "function".into()),
        ]));
        let assistant = self.assistant();
        let mut calls: Vec<Value> = match assistant.get("tool_calls") {
            Some(calls) => list(calls)?.collect(),
            None => Vec::new(),
        };
        calls.push(call);
        assistant.set("tool_calls", Value::from(calls));
        Ok(())
    }

    fn push_reasoning(&mut self, item: &PyDict) -> Result<(), MissReason> {
        if given(item, "encrypted_content").is_some_and(Value::is_true) {
            return Err(MissReason::Tokenize);
        }
        let source = ["content", "summary"].iter().filter_map(|name| given(item, name)).find(|list| list.is_true());
        let text = source.map_or(Ok(Value::from("")), first_text)?;
        self.join("reasoning", text);
        Ok(())
    }

    /// Sets a member of the assistant's turn, or of a new one if it has that already.
    fn join(&mut self, member: &str, value: Value) {
        if given(self.assistant(), member).is_some() {
            self.messages.push(dict_of([("role", "assistant".into())]));
        }
        self.assistant().set(member, value);
    }

    /// The assistant's turn that was begun last, or a new one.
    fn assistant(&mut self) -> &mut PyDict {
        let role = self.messages.last().and_then(|last| last.get("role")?.as_str());
        if role != Some("assistant") {
            self.messages.push(dict_of([("role", "assistant".into())]));
        }
        let last = self.messages.len() - 1;
        &mut self.messages[last]
    }
}

/// The text of the first part.
fn first_text(parts: &Value) -> Result<Value, MissReason> {
    let first = list(parts)?.next().ok_or(MissReason::Tokenize)?;
    let text = dict(&first)?.get("text").filter(|text| text.kind() == ValueKind::String);
    text.cloned().ok_or(MissReason::Tokenize)
}
