//! A model's chat template: Jinja with the behaviour that Hugging Face's renderer gives it.
//!
//! **Invariant.** A render either gives the text Python would give or an error; where minijinja is known to differ,
//! it is corrected or the construct is refused.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, UndefinedBehavior, Value};

use super::clock;
use super::content_format::{self, ContentFormat};
use super::json;
use super::methods;
use super::pyvalue::{self, JsonStyle, PyDict, PyGenerator};
use super::request::dict_of;
use super::source::{self, LOOP_FILTER};

/// Instructions and 64-byte pieces of data one render may cost. Beyond it the request is routed without keys.
const FUEL: u64 = 4_000_000;
/// Nesting of macros and includes in one render. Beyond it the request is routed without keys.
const RECURSION_MAX: usize = 300;
const NAME: &str = "chat";

/// A compiled chat template.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
    content_format: ContentFormat,
    sglang_format: ContentFormat,
    knows_developer: bool,
    sought: Vec<Box<str>>,
    mentions_tool_call_id: bool,
    /// Whether a later system message is rendered; found out when first asked.
    takes_later_system: OnceLock<bool>,
    /// Has a tag that only Hugging Face's renderer knows.
    has_generation_tag: bool,
    messages_in_place: usize,
}

/// Time that a render between two visits to the driver may take, about.
const IN_PLACE_TIME: Duration = Duration::from_micros(300);
/// Fewest and most messages rendered there, whatever they cost.
const IN_PLACE_MESSAGES: std::ops::RangeInclusive<usize> = 8..=128;

/// Why a template could not be used.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The text is no valid template.
    #[error("the chat template does not compile: {0}")]
    Compile(String),
    /// The variables cannot be used.
    #[error("the template's variables: {0}")]
    Variables(String),
    /// The template refused the conversation by `raise_exception`.
    #[error("the chat template refused the conversation: {0}")]
    Raised(String),
    /// The render failed.
    #[error("the chat template failed: {0}")]
    Render(String),
}

impl TemplateError {
    /// What went wrong, without what the template or the engine of templates say: that may quote the conversation.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            TemplateError::Compile(_) => "the chat template does not compile",
            TemplateError::Variables(_) => "the template's variables cannot be used",
            TemplateError::Raised(_) => "the chat template refused the conversation",
            TemplateError::Render(_) => "the chat template failed",
        }
    }
}

impl Template {
    /// Compiles a template. `special_tokens` become variables (`bos_token` …); `now` is the clock `strftime_now` reads.
    ///
    /// # Errors
    /// The text does not compile.
    pub fn compile(
        text: &str,
        special_tokens: &BTreeMap<String, String>,
        now: fn() -> SystemTime,
    ) -> Result<Self, TemplateError> {
        Template::compile_within(text, special_tokens, now, FUEL)
    }

    /// The same, for renders of so much fuel.
    ///
    /// # Errors
    /// The text does not compile.
    pub(super) fn compile_within(
        text: &str,
        special_tokens: &BTreeMap<String, String>,
        now: fn() -> SystemTime,
        fuel: u64,
    ) -> Result<Self, TemplateError> {
        let failed = |error: Error| TemplateError::Compile(describe(&error));
        let mut environment = environment(now, fuel).map_err(failed)?;
        for (name, token) in special_tokens {
            environment.add_global(name.clone(), token.as_str());
        }
        environment.add_template_owned(NAME, source::prepared(text)).map_err(failed)?;
        let mut template = Template {
            messages_in_place: *IN_PLACE_MESSAGES.start(),
            environment,
            content_format: content_format::detect(text),
            sglang_format: content_format::detect_sglang(text),
            knows_developer: text.contains("'developer'") || text.contains("\"developer\""),
            sought: source::sought(text),
            mentions_tool_call_id: text.contains("tool_call_id"),
            takes_later_system: OnceLock::new(),
            has_generation_tag: text.contains("endgeneration"),
        };
        template.messages_in_place = template.affordable_messages();
        Ok(template)
    }

    /// Messages of a chat that may be rendered between two visits to the driver: templates differ tenfold in what a message
    /// costs, so it is tried when the template is compiled.
    pub(super) fn messages_in_place(&self) -> usize {
        self.messages_in_place
    }

    fn affordable_messages(&self) -> usize {
        const TRIED: usize = 15;
        // What a test sees must not hang on how fast it runs.
        if cfg!(test) {
            return *IN_PLACE_MESSAGES.end();
        }
        let turn = |n: usize| {
            let role = if n.is_multiple_of(2) { "user" } else { "assistant" };
            Value::from_object(dict_of([("role", role.into()), ("content", "t".into())]))
        };
        let mut best = Duration::MAX;
        for _ in 0..3 {
            // The last one is a question, as templates like it.
            let messages: Vec<Value> = (0..TRIED).map(turn).collect();
            let variables = dict_of([("messages", messages.into()), ("add_generation_prompt", true.into())]);
            let start = Instant::now();
            // One that refuses such a chat is taken for what it cost until then.
            let _refused = self.render(Value::from_object(variables)).is_err();
            best = best.min(start.elapsed());
        }
        affordable(best / TRIED as u32)
    }

    /// How the template wants message content.
    #[must_use]
    pub fn content_format(&self) -> ContentFormat {
        self.content_format
    }

    /// Whether the template has a place for the role `developer`.
    #[must_use]
    pub fn knows_developer(&self) -> bool {
        self.knows_developer
    }

    /// Texts that the template looks for inside others, as far as they can be told: what a message's treatment may
    /// hang on beside its members.
    pub(super) fn sought(&self) -> &[Box<str>] {
        &self.sought
    }

    /// How SGLang finds that the template wants message content.
    #[must_use]
    pub fn sglang_format(&self) -> ContentFormat {
        self.sglang_format
    }

    /// Whether the template looks at the ids of tool results.
    #[must_use]
    pub fn mentions_tool_call_id(&self) -> bool {
        self.mentions_tool_call_id
    }

    /// Whether a system message may stand behind a user's: tried with a chat of four messages, as vLLM tries it, in a
    /// plain Jinja that knows no `generation` tag.
    #[must_use]
    pub fn takes_later_system(&self) -> bool {
        *self.takes_later_system.get_or_init(|| {
            let turn = |role: &str| Value::from_object(dict_of([("role", role.into()), ("content", "t".into())]));
            let messages: Vec<Value> = ["system", "user", "system", "user"].map(turn).into();
            let variables = dict_of([("messages", messages.into()), ("add_generation_prompt", false.into())]);
            let variables = Value::from_object(variables);
            !self.has_generation_tag && self.render(variables).is_ok()
        })
    }

    /// Renders for the variables of a JSON object, as Hugging Face's `apply_chat_template` would for them: what
    /// `kvlane render --api template` prints. `kwargs` is a second object, whose members win.
    ///
    /// # Errors
    /// As [`Template::render`]; or one of the texts is no JSON object that can be kept exactly.
    pub fn render_json(&self, variables: &str, kwargs: &str) -> Result<String, TemplateError> {
        let mut scope = dict_of([("documents", ().into()), ("add_generation_prompt", true.into())]);
        for text in [variables, kwargs] {
            let value = json::value(text).map_err(|error| TemplateError::Variables(error.to_string()))?;
            let Some(dict) = value.downcast_object_ref::<PyDict>() else {
                return Err(TemplateError::Variables("not an object".into()));
            };
            for (name, value) in dict.entries() {
                scope.set(name.as_str().unwrap_or_default(), value.clone());
            }
        }
        self.render(Value::from_object(scope))
    }

    /// Renders the text for the variables given.
    ///
    /// # Errors
    /// The template raised, failed, or cost more than its limits.
    pub fn render(&self, variables: Value) -> Result<String, TemplateError> {
        let template = self.environment.get_template(NAME).map_err(|e| TemplateError::Compile(describe(&e)))?;
        template.render(variables).map_err(|error| {
            let mut cause: Option<&dyn std::error::Error> = Some(&error);
            while let Some(error) = cause {
                if let Some(Raised(message)) = error.downcast_ref::<Raised>() {
                    return TemplateError::Raised(message.clone());
                }
                cause = error.source();
            }
            TemplateError::Render(describe(&error))
        })
    }
}

/// How many messages of such a cost are rendered in place.
fn affordable(each: Duration) -> usize {
    let messages = IN_PLACE_TIME.as_nanos() / each.as_nanos().max(1);
    usize::try_from(messages).unwrap_or(usize::MAX).clamp(*IN_PLACE_MESSAGES.start(), *IN_PLACE_MESSAGES.end())
}

fn describe(error: &Error) -> String {
    match error.line() {
        Some(line) => format!("{error} (line {line})"),
        None => error.to_string(),
    }
}

/// The message of a `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn environment(now: fn() -> SystemTime, fuel: u64) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_recursion_limit(RECURSION_MAX);
    environment.set_fuel(Some(fuel));
    environment.set_unknown_method_callback(methods::call);
    environment.set_formatter(|out, state, value| match value.as_str() {
        Some(text) => out.write_str(text).map_err(Error::from),
        None => out.write_str(&methods::spelled(state, value)?).map_err(Error::from),
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(message)))
    });
    environment.add_function("strftime_now", move |format: String| {
        clock::format(now(), &format)
            .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?})")))
    });
    add_filters(&mut environment);
    add_tests(&mut environment);
    Ok(environment)
}

fn add_filters(environment: &mut Environment<'static>) {
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", |state: &mut State, value: &Value| methods::spelled(state, value));
    environment.add_filter("trim", |state: &mut State, value: &Value, chars: Option<String>| {
        let text = methods::spelled(state, value)?;
        Ok::<String, Error>(match chars {
            Some(chars) => text.trim_matches(|c| chars.contains(c)).to_owned(),
            None => text.trim_matches(methods::is_space).to_owned(),
        })
    });
    environment.add_filter("join", |state: &mut State, value: &Value, separator: Option<String>, kwargs: Kwargs| {
        let attribute: Option<String> = kwargs.get("attribute")?;
        kwargs.assert_all_used()?;
        let separator = separator.unwrap_or_default();
        let mut parts = Vec::new();
        for item in value.try_iter()? {
            let item = match &attribute {
                Some(name) => item.get_attr(name)?,
                None => item,
            };
            let part = methods::spelled(state, &item)?;
            // The same text may stand there many times.
            methods::pay_for(state, part.len() + separator.len())?;
            parts.push(part);
        }
        Ok::<String, Error>(parts.join(&separator))
    });
    add_lazy_filters(environment);
    environment.add_filter("indent", indent);
    environment.add_filter(LOOP_FILTER, |state: &mut State, value: Value| match value.kind() {
        ValueKind::String => {
            methods::pay_for(state, value.len().unwrap_or(0) * size_of::<Value>())?;
            Ok(Value::from(value.as_str().unwrap_or_default().chars().map(Value::from).collect::<Vec<_>>()))
        }
        ValueKind::Undefined | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => Ok(value),
        kind => Err(Error::new(ErrorKind::InvalidOperation, format!("a loop over {kind}"))),
    });
    for name in ["upper", "lower", "capitalize", "title"] {
        environment.add_filter(name, move |state: &mut State, value: &Value| {
            methods::call(state, &Value::from(methods::spelled(state, value)?), name, &[])
        });
    }
}

/// Python's `map`, `select` and the like give generators.
fn add_lazy_filters(environment: &mut Environment<'static>) {
    environment.add_filter("eager_map", minijinja::filters::map);
    environment.add_filter("eager_select", minijinja::filters::select);
    environment.add_filter("eager_reject", minijinja::filters::reject);
    environment.add_filter("eager_selectattr", minijinja::filters::selectattr);
    environment.add_filter("eager_rejectattr", minijinja::filters::rejectattr);
    for (name, eager) in [
        ("map", "eager_map"),
        ("select", "eager_select"),
        ("reject", "eager_reject"),
        ("selectattr", "eager_selectattr"),
        ("rejectattr", "eager_rejectattr"),
    ] {
        environment.add_filter(name, move |state: &mut State, args: Rest<Value>| {
            let items = state.apply_filter(eager, &args)?.try_iter()?.collect();
            Ok::<Value, Error>(Value::from_object(PyGenerator(items)))
        });
    }
}

fn add_tests(environment: &mut Environment<'static>) {
    let is_float =
        |value: &Value| value.kind() != ValueKind::Bool && !value.is_integer() && pyvalue::as_float(value).is_some();
    environment.add_test("number", move |value: &Value| {
        value.kind() == ValueKind::Bool || value.is_integer() || pyvalue::as_float(value).is_some()
    });
    environment.add_test("float", is_float);
    environment.add_test("integer", |value: &Value| value.kind() != ValueKind::Bool && value.is_integer());
    // In Python a string is iterable and a sequence, and so is a dict.
    let is_container = |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined)
    };
    environment.add_test("sequence", is_container);
    environment.add_test("iterable", move |value: &Value| is_container(value) || value.kind() == ValueKind::Iterable);
}

/// Python's `indent`: a newline at the end stays, and empty lines are not indented unless told so.
fn indent(state: &mut State, value: &Value, args: Rest<Value>) -> Result<String, Error> {
    let (width, first, blank, kwargs): (Option<Value>, Option<bool>, Option<bool>, Kwargs) = from_args(&args)?;
    let width = width.or(kwargs.get("width")?);
    let first = first.or(kwargs.get("first")?).unwrap_or(false);
    let blank = blank.or(kwargs.get("blank")?).unwrap_or(false);
    kwargs.assert_all_used()?;
    let indention = match width {
        Some(width) if width.kind() == ValueKind::String => methods::spelled(state, &width)?,
        Some(width) => " ".repeat(usize::try_from(i64::try_from(width)?.clamp(0, 256)).unwrap_or(0)),
        None => "    ".to_owned(),
    };
    let mut out = String::new();
    let text = methods::spelled(state, value)? + "\n";
    let lines = methods::lines(&text);
    methods::pay_for(state, text.len().saturating_add(lines.len().saturating_mul(indention.len())))?;
    for (n, line) in lines.into_iter().enumerate() {
        if n > 0 {
            out.push('\n');
        }
        if (n == 0 && first) || (n > 0 && (blank || !line.is_empty())) {
            out.push_str(&indention);
        }
        out.push_str(line);
    }
    Ok(out)
}

fn to_json(state: &mut State, value: &Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    if !positional.is_empty() {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson takes its options by name"));
    }
    let mut style = JsonStyle {
        bytes_max: methods::payable(state),
        indent: kwargs.get("indent")?,
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ..JsonStyle::default()
    };
    if style.indent.is_some_and(|n| n > 64) {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson: indent beyond 64"));
    }
    if style.indent.is_some() {
        style.item_separator = ",".into();
    }
    if let Some(separators) = kwargs.get::<Option<Value>>("separators")? {
        let texts: Vec<Value> = separators.try_iter()?.collect();
        match texts.as_slice() {
            [item, key] => {
                style.item_separator = methods::spelled(state, item)?;
                style.key_separator = methods::spelled(state, key)?;
            }
            _ => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators must be two")),
        }
    }
    kwargs.assert_all_used()?;
    let text = pyvalue::to_json(value, &style)?;
    methods::pay_for(state, text.len())?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noon() -> SystemTime {
        SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_748_768_703)
    }

    fn render(text: &str, variables: &str) -> Result<String, TemplateError> {
        let tokens = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
        Template::compile(text, &tokens, noon)?.render(json::value(variables).unwrap())
    }

    #[test]
    fn what_a_message_costs_decides_how_many_are_rendered_in_place() {
        for (us, expected) in [(0, 128), (2, 128), (10, 30), (20, 15), (500, 8)] {
            assert_eq!(affordable(Duration::from_micros(us)), expected, "{us} µs");
        }
    }

    #[test]
    fn values_behave_as_in_python() {
        for (template, expected) in [
            ("{{ bos_token }}{{ eos_token }}", "<s>"),
            ("{{ x.none }} {{ x.t }} {{ x.f }} {{ x.i }}", "None True 1.0 3"),
            ("{{ x }}", "{'none': None, 't': True, 'f': 1.0, 'e': 1e-07, 'i': 3, 's': ' a<b ', 'items': [1, 'z']}"),
            ("{{ 'v=' ~ x.e ~ x['items'] }}", "v=1e-07[1, 'z']"),
            (
                "{{ x | tojson }}",
                r#"{"none": null, "t": true, "f": 1.0, "e": 1e-07, "i": 3, "s": " a<b ", "items": [1, "z"]}"#,
            ),
            ("{{ x['items'][1] }} {{ x.items.type is defined }}{% if x.items %} yes{% endif %}", "z False yes"),
            ("{% for k, v in x.items() %}{{ k }},{% endfor %}", "none,t,f,e,i,s,items,"),
            ("{{ x.s.strip() }}|{{ x.s | trim }}|{{ x.s.lstrip(' a') }}", "a<b|a<b|<b "),
            (
                "{{ x.s is iterable }} {{ x.s is sequence }} {{ x is mapping }} {{ x.e is number }}",
                "True True True True",
            ),
            ("{{ x.get('missing') }} {{ x.get('i', 4) }} {{ 'a,b,c'.split(',', 1)[-1] }}", "None 3 b,c"),
            ("{% for m in [1,2,3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
            ("{% generation %}in{%- endgeneration -%} out", "inout"),
            ("{{ strftime_now('%d %b %Y') }}", "01 Jun 2025"),
            ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
        ] {
            let variables = r#"{"x":{"none":null,"t":true,"f":1.0,"e":1e-7,"i":3,"s":" a<b ","items":[1,"z"]}}"#;
            assert_eq!(render(template, variables).unwrap(), expected, "{template}");
        }
    }

    #[test]
    fn refusals_are_told_apart() {
        assert!(matches!(render("{{ raise_exception('no') }}", "{}"), Err(TemplateError::Raised(m)) if m == "no"));
        assert!(matches!(render("{{ x.y.z }}", "{}"), Err(TemplateError::Render(_))));
        assert!(matches!(render("{% for", "{}"), Err(TemplateError::Compile(_))));
    }

    #[test]
    fn a_template_that_never_ends_is_stopped() {
        let text = "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}";
        assert!(matches!(render(text, "{}"), Err(TemplateError::Render(_))));
        let text = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
        assert!(matches!(render(text, "{}"), Err(TemplateError::Render(_))));
    }

    /// A few operations that double or square what they are given.
    #[test]
    fn a_template_whose_values_explode_is_stopped() {
        for grow in [
            "set ns.x = [ns.x, ns.x]",
            "set ns.x = ns.x ~ ns.x",
            "set ns.x = (ns.x | string).replace('a', 'aa' ~ ns.x)",
            "set ns.x = (ns.x | string).replace('', ns.x | string)",
            "set ns.x = [ns.x, ns.x] | join(ns.x | string)",
            "set ns.x = (ns.x | string).join([ns.x | string, ns.x | string, 'a'])",
            "set ns.x = '{:>99999999999}'.format(ns.x)",
            "set ns.x = (ns.x ~ '\n' ~ ns.x) | indent(ns.x | string, true)",
            "set ns.x = [ns.x, ns.x] | tojson",
        ] {
            let text = format!(
                "{{% set ns = namespace(x='aaaa') %}}{{% for n in range(60) %}}{{% {grow} %}}{{% endfor %}}{{{{ ns.x }}}}"
            );
            assert!(matches!(render(&text, "{}"), Err(TemplateError::Render(_))), "{grow}");
        }
    }
}
