//! Chat templates as Hugging Face renders them: Jinja with trimmed blocks, Python's JSON and Python's string methods.

use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// A compiled chat template.
pub struct Template {
    environment: Environment<'static>,
    /// Names a template may use besides the request's: `eos_token` and the like.
    constants: serde_json::Map<String, serde_json::Value>,
}

const NAME: &str = "chat";

impl Template {
    /// Compiles `source`.
    ///
    /// # Errors
    /// The template's syntax is wrong.
    pub fn new(source: String, constants: serde_json::Map<String, serde_json::Value>) -> Result<Self, Error> {
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.set_unknown_method_callback(python_method);
        environment.add_template_owned(NAME, source)?;
        Ok(Self { environment, constants })
    }

    /// Renders the template with the request's variables, which go before the constants.
    ///
    /// # Errors
    /// The template refuses the messages, or uses what is not there.
    pub fn render(&self, mut variables: serde_json::Map<String, serde_json::Value>) -> Result<String, Error> {
        for (name, value) in &self.constants {
            variables.entry(name.clone()).or_insert_with(|| value.clone());
        }
        self.environment.get_template(NAME)?.render(Value::from(Serde(&variables)))
    }
}

/// `json.dumps(value, ensure_ascii=False, indent=indent)`.
fn to_json(value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let mut bytes = Vec::new();
    let written = match indent {
        Some(width) => {
            let spaces = " ".repeat(width.min(64));
            value
                .serialize(&mut Serializer::with_formatter(&mut bytes, PrettyFormatter::with_indent(spaces.as_bytes())))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut bytes, PythonFormatter)),
    };
    written.map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    let text = String::from_utf8(bytes).map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(Value::from_safe_string(text))
}

/// Python's default separators: `", "` and `": "`.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }

    /// Plain from 0.0001 to 1e16, else with an exponent of a sign and at least two digits.
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        let shortest = format!("{value:e}");
        match shortest.split_once('e').and_then(|(digits, exponent)| Some((digits, exponent.parse::<i32>().ok()?))) {
            Some((digits, exponent)) if !(-4..16).contains(&exponent) => {
                let sign = if exponent < 0 { '-' } else { '+' };
                write!(writer, "{digits}e{sign}{:02}", exponent.abs())
            }
            _ => write!(writer, "{value:?}"),
        }
    }
}

/// Methods of Python's `str` and `dict` that templates call.
fn python_method(_: &mut State, value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    match (value.as_str(), value.kind()) {
        (Some(text), _) => string_method(text, method, arguments),
        (None, ValueKind::Map) => map_method(value, method, arguments),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn string_method(text: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let set = |characters: Option<&str>| {
        let characters = characters.map(str::to_owned);
        move |c: char| characters.as_ref().map_or(c.is_whitespace(), |set| set.contains(c))
    };
    Ok(match method {
        "strip" | "lstrip" | "rstrip" => {
            let (characters,): (Option<&str>,) = from_args(arguments)?;
            let strip = set(characters);
            Value::from(match method {
                "strip" => text.trim_matches(strip),
                "lstrip" => text.trim_start_matches(strip),
                _ => text.trim_end_matches(strip),
            })
        }
        "startswith" | "endswith" => {
            let (affix,): (Value,) = from_args(arguments)?;
            let matches =
                |affix: &str| if method == "startswith" { text.starts_with(affix) } else { text.ends_with(affix) };
            Value::from(match affix.as_str() {
                Some(affix) => matches(affix),
                None => affix.try_iter()?.any(|affix| affix.as_str().is_some_and(matches)),
            })
        }
        "split" => {
            let (separator, limit): (Option<&str>, Option<usize>) = from_args(arguments)?;
            let parts: Vec<&str> = match (separator, limit) {
                (Some(separator), Some(limit)) => text.splitn(limit + 1, separator).collect(),
                (Some(separator), None) => text.split(separator).collect(),
                (None, _) => text.split_whitespace().collect(),
            };
            parts.into_iter().map(Value::from).collect::<Vec<_>>().into()
        }
        "replace" => {
            let (from, to): (&str, &str) = from_args(arguments)?;
            Value::from(text.replace(from, to))
        }
        "upper" => Value::from(text.to_uppercase()),
        "lower" => Value::from(text.to_lowercase()),
        _ => return Err(Error::from(ErrorKind::UnknownMethod)),
    })
}

fn map_method(map: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let pairs = || map.try_iter().map(|keys| keys.map(|key| (key.clone(), map.get_item(&key).unwrap_or_default())));
    Ok(match method {
        "items" => Value::from(pairs()?.map(|(key, value)| Value::from(vec![key, value])).collect::<Vec<_>>()),
        "keys" => Value::from(pairs()?.map(|(key, _)| key).collect::<Vec<_>>()),
        "values" => Value::from(pairs()?.map(|(_, value)| value).collect::<Vec<_>>()),
        "get" => {
            let (key, default): (Value, Option<Value>) = from_args(arguments)?;
            let found = map.get_item(&key).unwrap_or_default();
            if found.is_undefined() { default.unwrap_or_else(|| Value::from(())) } else { found }
        }
        _ => return Err(Error::from(ErrorKind::UnknownMethod)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(source: &str, variables: serde_json::Value, expected: &str) {
        let template = Template::new(source.to_owned(), serde_json::Map::new()).expect("the test's template is right");
        let variables = variables.as_object().expect("variables are an object").clone();
        assert_eq!(template.render(variables).expect(source), expected, "{source}");
    }

    #[test]
    fn json_is_python_s() {
        check("{{ x | tojson }}", json!({"x": {"b": [1, "<é'>"], "a": null}}), r#"{"b": [1, "<é'>"], "a": null}"#);
        check(
            "{{ x | tojson }}",
            json!({"x": [1.0, 1e-7, 1e16, 123.5e20, -0.0001]}),
            "[1.0, 1e-07, 1e+16, 1.235e+22, -0.0001]",
        );
        check("{{ x | tojson(indent=2) }}", json!({"x": {"b": [1]}}), "{\n  \"b\": [\n    1\n  ]\n}");
    }

    #[test]
    fn blocks_are_trimmed_and_python_methods_known() {
        check("a\n  {% if true %}\nb\n  {% endif %}\nc", json!({}), "a\nb\nc");
        check("{{ ' ab '.strip() }}|{{ 'xxa'.lstrip('x') }}|{{ 'axx'.rstrip('x') }}", json!({}), "ab|a|a");
        check(
            "{{ 'a,b,c'.split(',')[-1] }}|{{ 'a,b,c'.split(',', 1)[1] }}|{{ ' a  b '.split()[1] }}",
            json!({}),
            "c|b,c|b",
        );
        check("{{ 'abc'.startswith('ab') }}|{{ 'abc'.endswith(('x', 'c')) }}", json!({}), "True|True");
        check("{{ 'abc'.replace('b', 'x').upper() }}", json!({}), "AXC");
        check(
            "{% for k, v in x.items() %}{{ k }}={{ v }};{% endfor %}{{ x.get('q', 5) }}",
            json!({"x": {"b": 1, "a": 2}}),
            "b=1;a=2;5",
        );
    }

    #[test]
    fn a_template_can_refuse() {
        let template = Template::new("{{ raise_exception('no roles') }}".to_owned(), serde_json::Map::new());
        let error = template.expect("the template is right").render(serde_json::Map::new()).expect_err("it refuses");
        assert!(error.to_string().contains("no roles"));
    }

    /// One vector of another renderer's results: whether we render the same, or refuse as it did.
    fn agrees(file: &serde_json::Value, case: &serde_json::Value) -> bool {
        let template = &file["templates"][case["template_name"].as_str().unwrap_or_default()];
        let object = |value: &serde_json::Value| value.as_object().cloned().unwrap_or_default();
        let source = template["text"].as_str().unwrap_or_default().to_owned();
        let Ok(compiled) = Template::new(source, object(&template["special_tokens"])) else { return false };
        let mut variables = object(&file["conversations"][case["conversation"].as_str().unwrap_or_default()]);
        variables.insert("documents".to_owned(), json!(null));
        variables.insert("add_generation_prompt".to_owned(), json!(true));
        variables.extend(object(&case["kwargs"]));
        compiled.render(variables).ok().as_deref() == case["expected_text"].as_str()
    }

    #[test]
    fn templates_of_real_models_render_as_transformers_does() {
        let test = "templates_of_real_models_render_as_transformers_does";
        let Some(file) = crate::engine::testing::shared(test, "vectors/chat_templates.json") else { return };
        // Those whose conversations need nothing but what the simulated engine does with messages.
        let models =
            ["npm/qwen3", "npm/deepseek_v3", "npm/gemma3", "vllm/template_chatml", "llama.cpp/Kimi-K2-Instruct"];
        let mut checked = 0;
        for case in file["cases"].as_array().expect("the file has cases") {
            if models.iter().any(|model| case["template_name"] == *model) {
                assert!(agrees(&file, case), "{} of {}", case["conversation"], case["template_name"]);
                checked += 1;
            }
        }
        assert_eq!(checked, 94, "cases of the five templates");
    }
}
