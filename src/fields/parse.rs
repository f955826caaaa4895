//! TOML and JSON into one kind of tree.

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{Kind, Node, Problem, Value};

/// Deepest nesting of a JSON document that is read.
const DEPTH_MAX: usize = 32;

/// Reads a TOML document.
///
/// # Errors
/// Every place where the text is not TOML.
pub fn from_toml(text: &str) -> Result<Node, Vec<Problem>> {
    let lines = Lines::of(text);
    let (table, errors) = DeTable::parse_recoverable(text);
    if errors.is_empty() {
        return Ok(Node { value: toml_table(table.get_ref(), &lines), line: Some(1) });
    }
    let problem = |error: toml::de::Error| Problem {
        kind: Kind::Invalid,
        line: error.span().map(|span| lines.number(span.start)),
        key: String::new(),
        message: format!("not TOML: {}", error.message()),
    };
    Err(errors.into_iter().map(problem).collect())
}

/// Reads a JSON document.
///
/// # Errors
/// Where the bytes are not JSON, or nested deeper than 32 levels.
pub fn from_json(bytes: &[u8]) -> Result<Node, Problem> {
    let problem = |message: String| Problem { kind: Kind::Invalid, line: None, key: String::new(), message };
    let value: serde_json::Value =
        serde_json::from_slice(bytes).map_err(|error| problem(format!("not JSON: {error}")))?;
    json_node(&value, DEPTH_MAX).ok_or_else(|| problem(format!("nested deeper than {DEPTH_MAX} levels")))
}

/// Line numbers by byte offset.
struct Lines(Vec<usize>);

impl Lines {
    fn of(text: &str) -> Self {
        Lines(text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at).collect())
    }

    fn number(&self, offset: usize) -> u32 {
        u32::try_from(self.0.partition_point(|newline| *newline < offset) + 1).unwrap_or(u32::MAX)
    }
}

fn toml_table(table: &DeTable<'_>, lines: &Lines) -> Value {
    let mut entries: Vec<(usize, String, Node)> = table
        .iter()
        .map(|(key, value)| {
            let at = key.span().start;
            // A key is where the reader looks: `[[rule]]` begins there, and so does a value on the same line.
            let node = Node { line: Some(lines.number(at)), ..toml_node(value, lines) };
            (at, key.get_ref().to_string(), node)
        })
        .collect();
    entries.sort_by_key(|(at, ..)| *at);
    Value::Table(entries.into_iter().map(|(_, key, node)| (key, node)).collect())
}

fn toml_node(value: &Spanned<DeValue<'_>>, lines: &Lines) -> Node {
    let line = Some(lines.number(value.span().start));
    let value = match value.get_ref() {
        DeValue::String(text) => Value::Text(text.to_string()),
        DeValue::Integer(int) => i64::from_str_radix(int.as_str(), int.radix())
            .map_or_else(|_| Value::Other(int.as_str().to_owned()), Value::Int),
        DeValue::Float(float) => Value::Other(float.as_str().to_owned()),
        DeValue::Boolean(flag) => Value::Bool(*flag),
        DeValue::Datetime(date) => Value::Other(date.to_string()),
        DeValue::Array(items) => Value::List(items.iter().map(|item| toml_node(item, lines)).collect()),
        DeValue::Table(table) => toml_table(table, lines),
    };
    Node { value, line }
}

fn json_node(value: &serde_json::Value, depth: usize) -> Option<Node> {
    use serde_json::Value as Json;
    let deeper = depth.checked_sub(1)?;
    let value = match value {
        Json::Null => Value::Null,
        Json::Bool(flag) => Value::Bool(*flag),
        Json::Number(number) => json_number(number),
        Json::String(text) => Value::Text(text.clone()),
        Json::Array(items) => {
            Value::List(items.iter().map(|item| json_node(item, deeper)).collect::<Option<Vec<Node>>>()?)
        }
        Json::Object(members) => Value::Table(
            members
                .iter()
                .map(|(name, value)| Some((name.clone(), json_node(value, deeper)?)))
                .collect::<Option<Vec<_>>>()?,
        ),
    };
    Some(Node { value, line: None })
}

fn json_number(number: &serde_json::Number) -> Value {
    if let Some(int) = number.as_i64() {
        return Value::Int(int);
    }
    // `1.0` and `1e3` are whole numbers too; 2^53 bounds what a double says exactly.
    match number.as_f64() {
        Some(float) if float.fract() == 0.0 && float.abs() < 9.0e15 => Value::Int(float as i64),
        _ => Value::Other(number.to_string()),
    }
}
