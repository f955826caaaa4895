//! `/v1/messages` (Anthropic's API) as vLLM 0.11.1 and later turn it into a chat.
//!
//! Where releases differ, 0.32 and 0.33 are followed: system messages inside the list stay where they are unless the
//! template refuses them there (before, they always moved to the front).

use minijinja::Value;
use minijinja::value::ValueKind;

use super::body::BodyView;
use super::chat::ChatRequest;
use super::conversation::BILLING_HEADER;
use super::pyvalue::PyDict;
use super::request::{dict, dict_of, given, list, read};
use crate::service::{Engine, MissReason};

/// Reads the request.
///
/// # Errors
/// The request has something the gateway cannot know, or the engine's conversion is not known.
pub(super) fn chat(view: &BodyView<'_>, engine: Engine) -> Result<ChatRequest, MissReason> {
    if engine != Engine::Vllm {
        return Err(MissReason::Tokenize);
    }
    let mut messages = Vec::new();
    if let Some(system) = view.system.map(read).transpose()?
        && let Some(text) = system_text(&system, false)?
    {
        messages.push(message("system", text.into()));
    }
    for item in list(&read(view.messages.ok_or(MissReason::TextEmpty)?)?)? {
        push_message(dict(&item)?, &mut messages)?;
    }
    let common = ChatRequest::of_common(view)?;
    Ok(ChatRequest {
        messages,
        tools: common.tools.as_ref().map(tools).transpose()?,
        effort: effort(view)?,
        system_first_if_refused: true,
        ..common
    })
}

fn message(role: &str, content: Value) -> Value {
    Value::from_object(dict_of([("role", role.into()), ("content", content)]))
}

/// The texts of a system prompt as one, without a line between them. The header that changes with every request goes;
/// at the top a plain string is kept as it is.
fn system_text(content: &Value, inline: bool) -> Result<Option<String>, MissReason> {
    if let Some(text) = content.as_str() {
        let dropped = if inline { text.starts_with(BILLING_HEADER) } else { text.is_empty() };
        return Ok((!dropped).then(|| text.to_owned()));
    }
    let (mut out, mut any) = (String::new(), false);
    for block in list(content)? {
        let block = dict(&block)?;
        if kind(block)? != "text" {
            continue;
        }
        if let Some(text) = text_of(block, "text")?.filter(|text| !text.is_empty() && !text.starts_with(BILLING_HEADER))
        {
            out.push_str(text);
            any = true;
        }
    }
    Ok(any.then_some(out))
}

fn kind(block: &PyDict) -> Result<&str, MissReason> {
    block.get("type").and_then(Value::as_str).ok_or(MissReason::Tokenize)
}

fn text_of<'b>(block: &'b PyDict, member: &str) -> Result<Option<&'b str>, MissReason> {
    given(block, member).map(|text| text.as_str().ok_or(MissReason::Tokenize)).transpose()
}

/// One message becomes one turn, and one more before it for each result of a tool.
fn push_message(item: &PyDict, out: &mut Vec<Value>) -> Result<(), MissReason> {
    let role = item.get("role").and_then(Value::as_str).ok_or(MissReason::Tokenize)?;
    let content = given(item, "content").ok_or(MissReason::Tokenize)?;
    match role {
        "system" => {
            if let Some(text) = system_text(content, true)? {
                out.push(message("system", text.into()));
            }
            return Ok(());
        }
        "user" | "assistant" => {}
        _ => return Err(MissReason::Tokenize),
    }
    if content.kind() == ValueKind::String {
        out.push(message(role, content.clone()));
        return Ok(());
    }
    let mut turn = Turn::default();
    for block in list(content)? {
        turn.push_block(dict(&block)?, role, out)?;
    }
    if let Some(turn) = turn.message(role) {
        out.push(turn);
    }
    Ok(())
}

#[derive(Default)]
struct Turn {
    parts: Vec<Value>,
    /// The only part is a text.
    calls: Vec<Value>,
    reasoning: Option<String>,
}

impl Turn {
    fn push_block(&mut self, block: &PyDict, role: &str, out: &mut Vec<Value>) -> Result<(), MissReason> {
        match kind(block)? {
            "text" => {
                if let Some(text) = text_of(block, "text")?.filter(|text| !text.is_empty()) {
                    self.parts.push(text_part(text));
                }
            }
            "image" => {
                if given(block, "source").is_some_and(Value::is_true) {
                    self.parts.push(image_part());
                }
            }
            "thinking" => {
                if let Some(text) = text_of(block, "thinking")? {
                    self.reasoning.get_or_insert_default().push_str(text);
                }
            }
            "redacted_thinking" | "tool_reference" => {}
            "tool_use" => self.calls.push(call(block)?),
            "tool_result" if role == "user" => push_result(block, out)?,
            // A result in an assistant's message is printed as Python prints it; tools that come and go change the
            // list of tools.
            _ => return Err(MissReason::Tokenize),
        }
        Ok(())
    }

    fn message(self, role: &str) -> Option<Value> {
        let mut turn = dict_of([("role", role.into())]);
        if let Some(reasoning) = self.reasoning {
            turn.set("reasoning", reasoning.into());
        }
        if !self.calls.is_empty() {
            turn.set("tool_calls", Value::from(self.calls));
        }
        let sole_text = match self.parts.as_slice() {
            [part] => dict(part).ok().and_then(|part| part.get("text").cloned()),
            _ => None,
        };
        if let Some(text) = sole_text {
            turn.set("content", text);
        } else if !self.parts.is_empty() {
            turn.set("content", Value::from(self.parts));
        } else if role == "user" {
            return None;
        }
        Some(Value::from_object(turn))
    }
}

fn text_part(text: &str) -> Value {
    Value::from_object(dict_of([("type", "text".into()), ("text", text.into())]))
}

fn image_part() -> Value {
    Value::from_object(dict_of([("type", "image_url".into())]))
}

fn call(block: &PyDict) -> Result<Value, MissReason> {
    // Without an id, the engine makes one up from the time.
    let id = text_of(block, "id")?.filter(|id| !id.is_empty()).ok_or(MissReason::Tokenize)?;
    let name = text_of(block, "name")?.unwrap_or_default();
    // The engine writes the object as JSON and reads it back, which changes nothing.
    let input = match given(block, "input") {
        Some(input) => Value::from_object(dict(input)?.clone()),
        None => Value::from_object(PyDict::default()),
    };
    let function = dict_of([("name", name.into()), ("arguments", input)]);
    Ok(Value::from_object(dict_of([
        ("id", id.into()),
        ("type", "function".into()),
        ("function", Value::from_object(function)),
    ])))
}

/// A result of a tool: a message of its own, then one with its images, then one with the tools it refers to.
fn push_result(block: &PyDict, out: &mut Vec<Value>) -> Result<(), MissReason> {
    let id = text_of(block, "tool_use_id")?.unwrap_or_default();
    let (mut texts, mut images, mut tools) = (Vec::new(), Vec::new(), Vec::new());
    match given(block, "content") {
        None => {}
        Some(content) if content.kind() == ValueKind::String => {
            texts.push(content.as_str().unwrap_or_default().to_owned())
        }
        Some(content) => {
            for item in list(content)? {
                let item = dict(&item)?;
                match item.get("type").and_then(Value::as_str) {
                    Some("text") => texts.push(text_of(item, "text")?.unwrap_or_default().to_owned()),
                    Some("image") => images.push(image_part()),
                    Some("tool_reference") => {
                        let name =
                            text_of(item, "tool_name")?.or(text_of(item, "name")?).ok_or(MissReason::Tokenize)?;
                        let reference = dict_of([("type", "tool_reference".into()), ("name", name.into())]);
                        tools.push(Value::from_object(reference));
                    }
                    _ => {}
                }
            }
        }
    }
    let result = |content: Value| {
        Value::from_object(dict_of([("role", "tool".into()), ("tool_call_id", id.into()), ("content", content)]))
    };
    out.push(result(texts.join("\n").into()));
    if !images.is_empty() {
        out.push(message("user", Value::from(images)));
    }
    if !tools.is_empty() {
        out.push(result(Value::from(tools)));
    }
    Ok(())
}

/// The effort: what `thinking` switches off wins over `output_config`.
fn effort(view: &BodyView<'_>) -> Result<Option<String>, MissReason> {
    let mut effort = None;
    if let Some(config) = view.output_config.map(read).transpose()? {
        effort = text_of(dict(&config)?, "effort")?.map(str::to_owned);
    }
    if let Some(thinking) = view.thinking.map(read).transpose()? {
        match kind(dict(&thinking)?)? {
            "disabled" => effort = Some("none".to_owned()),
            "enabled" | "adaptive" => {}
            _ => return Err(MissReason::Tokenize),
        }
    }
    Ok(effort)
}

/// The tools in the form of a chat's.
fn tools(tools: &Value) -> Result<Value, MissReason> {
    let mut out = Vec::new();
    for tool in list(tools)? {
        let tool = dict(&tool)?;
        let mut schema = dict(given(tool, "input_schema").ok_or(MissReason::Tokenize)?)?.clone();
        if schema.get("type").is_none() {
            schema.set("type", "object".into());
        }
        let mut function = PyDict::default();
        for member in ["name", "description", "strict", "defer_loading"] {
            if let Some(value) = given(tool, member) {
                function.set(member, value.clone());
            }
        }
        function.set("parameters", Value::from_object(schema));
        out.push(Value::from_object(dict_of([
            ("type", "function".into()),
            ("function", Value::from_object(function)),
        ])));
    }
    Ok(Value::from(out))
}
