//! A chat turned into the variables its template sees, field by field as the engine's front end does it, and rendered.
//!
//! **Invariant.** What the engine would render otherwise, in any version, is refused here: the request is then routed
//! without keys. Where versions differ, the newest (vLLM 0.33, SGLang 0.5.23) is followed.

use minijinja::Value;

use super::body::{self, BodyView};
use super::content_format::ContentFormat;
use super::conversation::{self, Fill};
use super::frame::Frame;
use super::pyvalue::PyDict;
use super::request::{dict, dict_of, list, read};
use super::template::Template;
use super::{chat_sglang, json};
use crate::service::{Engine, MissReason};

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
        Ok(ChatRequest { messages: list(&messages)?.collect(), ..ChatRequest::beside_messages(view)? })
    }

    /// The same without the messages.
    ///
    /// # Errors
    /// [`MissReason::Tokenize`] for a member that cannot be read.
    pub fn beside_messages(view: &BodyView<'_>) -> Result<Self, MissReason> {
        let effort = view.reasoning_effort.map(|raw| json::string(raw).map_err(|_| MissReason::Tokenize));
        let reasoning = view.reasoning.map(read).transpose()?;
        let enabled = reasoning.as_ref().and_then(|r| r.downcast_object_ref::<PyDict>()?.get("enabled"));
        Ok(ChatRequest {
            effort: effort.transpose()?.map(std::borrow::Cow::into_owned),
            documents: view.documents.map(read).transpose()?,
            reasoning_enabled: enabled.is_some_and(Value::is_true),
            no_generation_prompt: !body::flag(view.add_generation_prompt, true).ok_or(MissReason::Tokenize)?,
            continued: body::flag(view.continue_final_message, false).ok_or(MissReason::Tokenize)?,
            ..ChatRequest::of_common(view)?
        })
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
        Engine::Vllm | Engine::Trtllm => vllm(request, template, engine),
        Engine::Sglang => chat_sglang::render(request, template),
        Engine::Llamacpp => Err(MissReason::Tokenize),
    }
}

fn vllm(request: &ChatRequest, template: &Template, engine: Engine) -> Result<Rendered, MissReason> {
    let frame = Frame::of(request, engine)?;
    let messages = system_first(request, template)?;
    let (turns, media) = conversation::turns(&messages, template, engine, Fill::Engine)?;
    if !media {
        return Ok(Rendered { text: frame.render_turns(turns, template)?, extent: Extent::Whole });
    }
    let marked = |mark| {
        let (turns, _) = conversation::turns(&messages, template, engine, Fill::Mark(mark))?;
        frame.render_as_they_stand(frame.prepared(turns, template)?, template)
    };
    // A string has the engine's placeholders first, in a spelling of the model's own.
    let known = if template.content_format() == ContentFormat::Parts {
        frame.render_as_they_stand(frame.prepared(turns, template)?, template)?
    } else {
        marked(MARKS[0])?
    };
    Ok(beginning(known, &marked(MARKS[1])?))
}

/// What two renders with different marks have in common.
pub(super) fn beginning(mut text: String, other: &str) -> Rendered {
    let same = text.char_indices().zip(other.chars()).find(|((_, a), b)| a != b);
    let end = same.map_or(text.len().min(other.len()), |((at, _), _)| at);
    text.truncate(end);
    Rendered { text, extent: Extent::Beginning }
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
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
        // The same with the messages read one by one.
        let mut messages = Vec::new();
        let rendered = view.messages.ok_or(MissReason::TextEmpty).and_then(|raw| {
            conversation::read_messages(raw, &template, Engine::Vllm, &mut messages)?;
            Frame::of(&ChatRequest::beside_messages(&view)?, Engine::Vllm)?.render(&messages, &template)
        });
        assert_eq!(rendered, expected.map(str::to_owned), "one by one: {body}");
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
