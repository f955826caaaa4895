//! What a rule says of how its engines turn requests into prompts.

use std::fmt::Write as _;
use std::sync::Arc;

use shards::service::{Engine, EngineRender};

use crate::fields::{Fields, Node, Report, Value};

/// Longest template arguments, bytes of JSON. Longer ones are refused.
const KWARGS_BYTES_MAX: usize = 4096;
/// Deepest nesting of template arguments. Deeper ones are refused.
const KWARGS_DEPTH_MAX: u32 = 16;

/// How engines turn requests into prompts, beyond what the model's files tell.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptOptions {
    /// `kvChatTemplateKwargs`: the engines' `--default-chat-template-kwargs`, as the text of a JSON object.
    pub template_kwargs: Option<Arc<str>>,
    /// `kvAddBos`: whether engines put a BOS token before the texts of completions; none = as the model's files say.
    pub add_bos: Option<bool>,
    /// `kvEngineRender`: how engines are asked for the ids of chats that they render in code; none = they are not.
    pub engine_render: Option<EngineRender>,
    /// `kvSendPromptIds`: chats are sent on with the ids of their prompts, so that the engine need not make them again.
    pub send_ids: bool,
}

pub(super) fn read(fields: &mut Fields<'_>, report: &mut Report, engine: Engine) -> PromptOptions {
    PromptOptions {
        template_kwargs: read_kwargs(fields, report),
        add_bos: fields.flag(report, "kvAddBos"),
        engine_render: read_engine_render(fields, report, engine),
        send_ids: fields.flag(report, "kvSendPromptIds").unwrap_or(false),
    }
}

fn read_engine_render(fields: &mut Fields<'_>, report: &mut Report, engine: Engine) -> Option<EngineRender> {
    const NAME: &str = "kvEngineRender";
    let name = fields.text_set(report, NAME)?;
    if name == "off" {
        return None;
    }
    let way = EngineRender::ALL.into_iter().find(|way| way.name() == name);
    let instead = match (engine, way) {
        (Engine::Vllm, Some(_)) | (Engine::Sglang, Some(EngineRender::Tokenize)) => return way,
        (Engine::Vllm, None) => r#"expected "off", "render" or "tokenize""#,
        (Engine::Sglang, _) => r#"expected "off" or "tokenize": SGLang has no path that renders"#,
        (Engine::Trtllm | Engine::Llamacpp, _) => r#"expected "off": such engines cannot be asked for a chat's ids"#,
    };
    fields.invalid(report, NAME, format!("{instead}, not {name:?}"));
    None
}

/// A table, or a text with a JSON object as it stands on the engine's command line.
fn read_kwargs(fields: &mut Fields<'_>, report: &mut Report) -> Option<Arc<str>> {
    const NAME: &str = "kvChatTemplateKwargs";
    let mut json = String::new();
    let right = match &fields.take(NAME)?.value {
        Value::Text(text) => {
            json.push_str(text.trim());
            serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text).is_ok()
        }
        value @ Value::Table(_) => write_json(value, &mut json, 0).is_some(),
        _ => false,
    };
    if !right {
        fields.invalid(
            report,
            NAME,
            "expected a table, or a text with a JSON object, as --default-chat-template-kwargs has",
        );
        return None;
    }
    if json.len() > KWARGS_BYTES_MAX {
        fields.invalid(report, NAME, format!("has {} bytes, at most {KWARGS_BYTES_MAX} are taken", json.len()));
        return None;
    }
    Some(Arc::from(json))
}

/// Writes a value as JSON; none for what JSON has no form for.
fn write_json(value: &Value, out: &mut String, depth: u32) -> Option<()> {
    if depth > KWARGS_DEPTH_MAX {
        return None;
    }
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(flag) => out.push_str(if *flag { "true" } else { "false" }),
        Value::Int(number) => write!(out, "{number}").ok()?,
        Value::Other(text) => {
            serde_json::from_str::<serde_json::Number>(text).ok()?;
            out.push_str(text);
        }
        Value::Text(text) => out.push_str(&serde_json::to_string(text).ok()?),
        Value::List(items) => {
            out.push('[');
            for (n, item) in items.iter().enumerate() {
                write_member(None, item, n, out, depth)?;
            }
            out.push(']');
        }
        Value::Table(members) => {
            out.push('{');
            for (n, (name, item)) in members.iter().enumerate() {
                write_member(Some(name), item, n, out, depth)?;
            }
            out.push('}');
        }
    }
    Some(())
}

fn write_member(name: Option<&str>, item: &Node, place: usize, out: &mut String, depth: u32) -> Option<()> {
    if place > 0 {
        out.push(',');
    }
    if let Some(name) = name {
        out.push_str(&serde_json::to_string(name).ok()?);
        out.push(':');
    }
    write_json(&item.value, out, depth + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::{Dialect, from_toml};

    fn options(toml: &str) -> (PromptOptions, Vec<String>) {
        options_of(toml, Engine::Vllm)
    }

    fn options_of(toml: &str, engine: Engine) -> (PromptOptions, Vec<String>) {
        let mut report = Report::new(Dialect::File);
        let node = from_toml(toml).expect("the test's TOML is right");
        let mut fields = Fields::root(&mut report, &node);
        let options = read(&mut fields, &mut report, engine);
        (options, report.problems.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn template_arguments_are_a_table_or_the_text_of_an_object() {
        for (toml, expected) in [
            ("", None),
            (r#"kvChatTemplateKwargs = '{"enable_thinking": false}'"#, Some(r#"{"enable_thinking": false}"#)),
            (
                r#"kvChatTemplateKwargs = { a = true, "b\"" = [1, 2.5, "x"], c = { d = -1 } }"#,
                Some(r#"{"a":true,"b\"":[1,2.5,"x"],"c":{"d":-1}}"#),
            ),
        ] {
            let (options, problems) = options(toml);
            assert_eq!(problems, Vec::<String>::new(), "{toml}");
            assert_eq!(options.template_kwargs.as_deref(), expected, "{toml}");
        }
    }

    #[test]
    fn what_is_no_object_is_a_problem() {
        let long = format!("kvChatTemplateKwargs = {{ a = '{}' }}", "x".repeat(5000));
        for toml in [
            "kvChatTemplateKwargs = '[1]'",
            "kvChatTemplateKwargs = 1",
            "kvChatTemplateKwargs = { a = 1979-05-27 }",
            &long,
        ] {
            let (options, problems) = options(toml);
            assert_eq!((options.template_kwargs, problems.len()), (None, 1), "{toml}");
        }
    }

    #[test]
    fn a_bos_token_is_said_to_be_there_or_not() {
        assert_eq!(options("").0.add_bos, None);
        assert_eq!(options("kvAddBos = false").0.add_bos, Some(false));
    }

    #[test]
    fn ids_are_sent_only_where_the_rule_says_so() {
        for (toml, expected) in [("", false), ("kvSendPromptIds = false", false), ("kvSendPromptIds = true", true)] {
            let (options, problems) = options(toml);
            assert_eq!((options.send_ids, problems), (expected, Vec::new()), "{toml}");
        }
    }

    #[test]
    fn engines_are_asked_only_for_what_they_can_tell() {
        for (engine, value, expected) in [
            (Engine::Vllm, "render", Some(EngineRender::Render)),
            (Engine::Vllm, "tokenize", Some(EngineRender::Tokenize)),
            (Engine::Vllm, "off", None),
            (Engine::Sglang, "tokenize", Some(EngineRender::Tokenize)),
            (Engine::Trtllm, "off", None),
        ] {
            let (options, problems) = options_of(&format!("kvEngineRender = {value:?}"), engine);
            assert_eq!((options.engine_render, problems), (expected, Vec::new()), "{engine:?} {value}");
        }
        for (engine, value) in [(Engine::Vllm, "yes"), (Engine::Sglang, "render"), (Engine::Trtllm, "tokenize")] {
            let (options, problems) = options_of(&format!("kvEngineRender = {value:?}"), engine);
            assert_eq!((options.engine_render, problems.len()), (None, 1), "{engine:?} {value}");
        }
    }
}
