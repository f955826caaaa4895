//! What the template of a chat sees beside the messages, and the render itself, as vLLM's front end does it.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use minijinja::Value;
use minijinja::value::{Object, ObjectRepr, ValueKind};

use super::chat::ChatRequest;
use super::conversation::{self, Message};
use super::pyvalue::{self, PyDict};
use super::request::{dict, dict_of, given, list};
use super::template::Template;
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

/// What the template of a request sees beside the messages, and how its text ends.
#[derive(Debug)]
pub(super) struct Frame {
    variables: Arc<BTreeMap<String, Value>>,
    continued: bool,
    shape: u64,
}

impl Frame {
    /// Of a request, whose messages are not looked at.
    ///
    /// # Errors
    /// [`MissReason::Tokenize`] where the request has something the gateway cannot know.
    pub(super) fn of(request: &ChatRequest, engine: Engine) -> Result<Self, MissReason> {
        let impossible = request.continued && !request.no_generation_prompt;
        let unknown = engine != Engine::Vllm && (request.tools.is_some() || request.effort.is_some());
        if impossible || unknown {
            return Err(MissReason::Tokenize);
        }
        let mut shape = DefaultHasher::new();
        (request.no_generation_prompt, request.tools.is_some(), request.documents.is_some()).hash(&mut shape);
        for kwargs in [&request.defaults, &request.kwargs] {
            let repr = |kwargs| pyvalue::repr(kwargs, pyvalue::SPELLED_BYTES_MAX);
            let spelled = kwargs.as_ref().map(repr).transpose().map_err(|_| MissReason::Tokenize)?;
            spelled.hash(&mut shape);
        }
        request.effort.hash(&mut shape);
        let variables = Arc::new(variables(request)?);
        Ok(Frame { variables, continued: request.continued, shape: shape.finish() })
    }

    /// Hash of what a template may decide upon.
    pub(super) fn shape(&self) -> u64 {
        self.shape
    }

    /// Whether the text is what the template makes of the messages as they stand.
    pub(super) fn is_plain(&self, messages: &[Message], template: &Template) -> bool {
        !self.continued && !conversation::has_strange_developer(messages.iter().map(|m| &m.value), template)
    }

    /// Renders the text of messages, of which there must be some.
    ///
    /// # Errors
    /// As [`Frame::render_turns`].
    pub(super) fn render(&self, messages: &[Message], template: &Template) -> Result<String, MissReason> {
        self.render_turns(messages.iter().map(|message| message.value.clone()).collect(), template)
    }

    /// Renders the text of turns, of which there must be some.
    ///
    /// # Errors
    /// [`MissReason::Template`] where the template refuses, [`MissReason::Tokenize`] where the turns have something
    /// the gateway cannot know.
    pub(super) fn render_turns(&self, turns: Vec<Value>, template: &Template) -> Result<String, MissReason> {
        let turns = self.prepared(turns, template)?;
        let last = if self.continued { turns.last().cloned() } else { None };
        let text = self.render_as_they_stand(turns, template)?;
        if !self.continued {
            return Ok(text);
        }
        let content = last.as_ref().and_then(|turn| dict(turn).ok()?.get("content"));
        let last = content.and_then(final_text).ok_or(MissReason::Tokenize)?;
        cut_after(text, &last).ok_or(MissReason::Template)
    }

    /// Turns as the template can take them.
    ///
    /// # Errors
    /// As [`conversation::developer_as_system`].
    pub(super) fn prepared(&self, turns: Vec<Value>, template: &Template) -> Result<Vec<Value>, MissReason> {
        if conversation::has_strange_developer(turns.iter(), template) {
            return conversation::developer_as_system(turns, template.content_format());
        }
        Ok(turns)
    }

    /// Renders what the template makes of turns as they stand.
    ///
    /// # Errors
    /// [`MissReason::Template`].
    pub(super) fn render_as_they_stand(&self, turns: Vec<Value>, template: &Template) -> Result<String, MissReason> {
        let scope = Scope { frame: Arc::clone(&self.variables), messages: Value::from(turns) };
        run(template, Value::from_object(scope))
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

/// Whether logs may say what templates say of a conversation.
static QUOTES: AtomicBool = AtomicBool::new(false);

/// Has logs of this process quote what templates say of conversations, which may be parts of them: for commands that are
/// given one to say what is wrong with it, never for a gateway.
pub fn quote_conversations() {
    QUOTES.store(true, Ordering::Relaxed);
}

/// Runs the template.
///
/// # Errors
/// [`MissReason::Template`].
pub(super) fn run(template: &Template, variables: Value) -> Result<String, MissReason> {
    // The renderer is not ours: whatever a conversation makes it do must stay a reason.
    let rendered = catch_unwind(AssertUnwindSafe(|| template.render(variables)));
    rendered.map_err(|_| MissReason::Template)?.map_err(|error| {
        // A client can cause this at will: counted by reason, and in the log only on request.
        if QUOTES.load(Ordering::Relaxed) {
            tracing::debug!(%error, "a chat is routed without keys");
        } else {
            tracing::debug!(reason = error.kind(), "a chat is routed without keys");
        }
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

fn variables(request: &ChatRequest) -> Result<BTreeMap<String, Value>, MissReason> {
    let mut variables = BTreeMap::new();
    variables.insert("documents".to_owned(), Value::from(()));
    for kwargs in [&request.defaults, &request.kwargs] {
        for (key, value) in arguments(kwargs.as_ref())? {
            variables.insert(key.as_str().unwrap_or_default().to_owned(), value.clone());
        }
    }
    variables.insert("tools".to_owned(), request.tools.as_ref().map(tools).transpose()?.unwrap_or(Value::from(())));
    variables.insert("add_generation_prompt".to_owned(), Value::from(!request.no_generation_prompt));
    if let Some(documents) = &request.documents {
        variables.insert("documents".to_owned(), documents.clone());
    }
    if let Some(effort) = request.effort.as_deref().filter(|effort| *effort != "auto") {
        variables.insert("reasoning_effort".to_owned(), Value::from(effort));
        let own = request.kwargs.as_ref().and_then(|kwargs| kwargs.downcast_object_ref::<PyDict>());
        if own.is_none_or(|own| own.get("enable_thinking").is_none()) {
            variables.insert("enable_thinking".to_owned(), Value::from(effort != "none"));
        }
    }
    Ok(variables)
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
