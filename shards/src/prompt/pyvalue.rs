//! Values as Python has them: how they print, how they serialise, and the two kinds minijinja lacks.

use std::cmp::Ordering;
use std::fmt::{self, Write};
use std::sync::Arc;

use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::methods;

/// Deepest value that is printed or serialised. Beyond it the render fails.
const DEPTH_MAX: u32 = 128;

/// A dict with string keys in order of insertion: look-ups by scan, as the dicts of requests are small.
#[derive(Clone, Debug, Default)]
pub(super) struct PyDict {
    entries: Vec<(Value, Value)>,
    /// Key to place, kept only when there are so many keys that a scan would cost.
    index: Option<std::collections::HashMap<Box<str>, usize>>,
}

/// Keys beyond which a dict keeps an index.
const SCAN_MAX: usize = 24;

impl PyDict {
    /// Sets a key: a known key keeps its place.
    pub(super) fn set(&mut self, key: &str, value: Value) {
        match self.place(key) {
            Some(place) => self.entries[place].1 = value,
            None => {
                if let Some(index) = &mut self.index {
                    index.insert(key.into(), self.entries.len());
                }
                self.entries.push((Value::from(key), value));
                if self.index.is_none() && self.entries.len() > SCAN_MAX {
                    let keys = self.entries.iter().enumerate();
                    self.index = Some(keys.filter_map(|(n, (k, _))| Some((k.as_str()?.into(), n))).collect());
                }
            }
        }
    }

    /// The value of a key.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.place(key).map(|place| &self.entries[place].1)
    }

    /// Keys and values in order.
    pub(super) fn entries(&self) -> &[(Value, Value)] {
        &self.entries
    }

    fn place(&self, key: &str) -> Option<usize> {
        match &self.index {
            Some(index) => index.get(key).copied(),
            None => self.entries.iter().position(|(k, _)| k.as_str() == Some(key)),
        }
    }
}

impl Object for PyDict {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get(key.as_str()?).cloned()
    }

    /// `dict.name`; `dict['name']` goes through [`Object::get_value`]. Python finds a dict's methods before its keys.
    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        match methods::DICT_METHODS.iter().find(|method| **method == key) {
            Some(method) => Some(Value::from_object(BoundMethod { dict: Arc::clone(self), method })),
            None => self.get(key).cloned(),
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.entries.iter().map(|(key, _)| key.clone()).collect())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.entries.len())
    }

    /// Python looks for methods before keys: a dict with a key `items` still has the method.
    fn call_method(self: &Arc<Self>, state: &mut State, method: &str, args: &[Value]) -> Result<Value, Error> {
        methods::call(state, &Value::from_dyn_object(Arc::clone(self)), method, args)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // What was read from a body is spelled in full: its length and depth are bounded by the body's.
        let mut out = String::new();
        write_repr(&mut out, &Value::from_dyn_object(Arc::clone(self)), 0, usize::MAX).map_err(|_| fmt::Error)?;
        f.write_str(&out)
    }
}

/// A method of a dict that is not called at once: true, and without a text that could be predicted.
#[derive(Debug)]
struct BoundMethod {
    dict: Arc<PyDict>,
    method: &'static str,
}

impl Object for BoundMethod {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &mut State, args: &[Value]) -> Result<Value, Error> {
        methods::call(state, &Value::from_dyn_object(Arc::clone(&self.dict)), self.method, args)
    }

    fn render(self: &Arc<Self>, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        Err(fmt::Error)
    }
}

/// A float that Python spells with an exponent. As a plain number minijinja would spell it out where strings are
/// joined; as an object it prints right everywhere and refuses arithmetic.
#[derive(Debug)]
pub(super) struct PyFloat(f64);

impl Object for PyFloat {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn is_true(self: &Arc<Self>) -> bool {
        self.0 != 0.0
    }

    fn custom_cmp(self: &Arc<Self>, other: &DynObject) -> Option<Ordering> {
        Some(self.0.total_cmp(&other.downcast_ref::<Self>()?.0))
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&float_repr(self.0))
    }
}

/// What Python's lazy filters give: it can be looped over, is always true, has no length and does not serialise.
#[derive(Debug)]
pub(super) struct PyGenerator(pub(super) Vec<Value>);

impl Object for PyGenerator {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        // The filter hides the length, as a generator has none.
        Enumerator::Iter(Box::new(self.0.clone().into_iter().filter(|_| true)))
    }

    fn render(self: &Arc<Self>, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        Err(fmt::Error)
    }
}

/// A float from a request.
pub(super) fn float(number: f64) -> Value {
    let plain = number == 0.0 || (number.is_finite() && number.abs() >= 1e-4 && number.abs() < 1e16);
    if plain { Value::from(number) } else { Value::from_object(PyFloat(number)) }
}

/// The number behind a value, floats spelled with an exponent included.
pub(super) fn as_float(value: &Value) -> Option<f64> {
    if let Some(float) = value.downcast_object_ref::<PyFloat>() {
        return Some(float.0);
    }
    (value.kind() == ValueKind::Number).then(|| f64::try_from(value.clone()).ok()).flatten()
}

/// Python's `repr` of a float: shortest digits, exponent form below 1e-4 and from 1e16.
pub(super) fn float_repr(number: f64) -> String {
    if number.is_nan() {
        return "nan".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.unsigned_abs());
    }
    let mut plain = format!("{number}");
    if !plain.contains('.') {
        plain.push_str(".0");
    }
    plain
}

/// Most bytes that a container may be spelled in: a list that holds another twice, which holds a third twice, and so on,
/// costs a template little and its text much. Beyond it the render fails.
pub(super) const SPELLED_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Python's `str` of a value.
///
/// # Errors
/// As [`repr`].
pub(super) fn str(value: &Value, bytes_max: usize) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None if value.is_undefined() => Ok(String::new()),
        None => repr(value, bytes_max),
    }
}

/// Python's `repr` of a value.
///
/// # Errors
/// It is nested too deep, or its text would be longer than that.
pub(super) fn repr(value: &Value, bytes_max: usize) -> Result<String, Error> {
    let mut out = String::new();
    write_repr(&mut out, value, 0, bytes_max)?;
    Ok(out)
}

/// Whether so much may be nested, and spelled so far.
fn is_within_limits(out: &str, depth: u32, bytes_max: usize) -> Result<(), Error> {
    let refuse = |what: &str| Err(Error::new(ErrorKind::InvalidOperation, format!("a value {what} cannot be spelled")));
    match (depth > DEPTH_MAX, out.len() > bytes_max) {
        (true, _) => refuse("nested this deep"),
        (_, true) => refuse("of so many parts"),
        _ => Ok(()),
    }
}

fn write_repr(out: &mut String, value: &Value, depth: u32, bytes_max: usize) -> Result<(), Error> {
    is_within_limits(out, depth, bytes_max)?;
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::String => write_str_repr(out, value.as_str().unwrap_or_default()),
        ValueKind::Number if !value.is_integer() => out.push_str(&float_repr(as_float(value).unwrap_or_default())),
        ValueKind::Map => {
            out.push('{');
            for (n, (key, item)) in pairs(value).into_iter().enumerate() {
                out.push_str(if n > 0 { ", " } else { "" });
                write_repr(out, &key, depth + 1, bytes_max)?;
                out.push_str(": ");
                write_repr(out, &item, depth + 1, bytes_max)?;
            }
            out.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let tuple = value.is_tuple();
            out.push(if tuple { '(' } else { '[' });
            let mut count = 0;
            for item in value.try_iter().into_iter().flatten() {
                out.push_str(if count > 0 { ", " } else { "" });
                write_repr(out, &item, depth + 1, bytes_max)?;
                count += 1;
            }
            out.push_str(match (tuple, count) {
                (true, 1) => ",)",
                (true, _) => ")",
                (false, _) => "]",
            });
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
    Ok(())
}

fn write_str_repr(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            _ if c == quote => out.extend(['\\', c]),
            _ if is_printable(c) => out.push(c),
            _ => {
                let code = u32::from(c);
                let _ = match code {
                    0..=0xFF => write!(out, "\\x{code:02x}"),
                    0x100..=0xFFFF => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

/// Whether Python's `repr` leaves the character as it is: not a separator other than the space, not a control,
/// format or private-use character. Unassigned code points are taken as printable.
fn is_printable(c: char) -> bool {
    if c.is_control() {
        return false;
    }
    !matches!(u32::from(c),
        0xA0 | 0xAD | 0x600..=0x605 | 0x61C | 0x6DD | 0x70F | 0x890..=0x891 | 0x8E2 | 0x1680 | 0x180E
        | 0x2000..=0x200F | 0x2028..=0x202F | 0x205F..=0x206F | 0x3000 | 0xE000..=0xF8FF | 0xFEFF | 0xFFF0..=0xFFFB
        | 0xFFFE | 0xFFFF | 0x110BD | 0x110CD | 0x13430..=0x1343F | 0x1BCA0..=0x1BCA3 | 0x1D173..=0x1D17A
        | 0xE0000..=0xE007F | 0xF0000..=0x10FFFF)
}

/// Keys and values of a map value in order.
pub(super) fn pairs(map: &Value) -> Vec<(Value, Value)> {
    if let Some(dict) = map.downcast_object_ref::<PyDict>() {
        return dict.entries().to_vec();
    }
    let keys = map.try_iter().into_iter().flatten();
    keys.map(|key| {
        let item = map.get_item(&key).unwrap_or_default();
        (key, item)
    })
    .collect()
}

/// How [`to_json`] lays its text out.
#[derive(Clone, Debug)]
pub(super) struct JsonStyle {
    /// Most bytes of the text.
    pub bytes_max: usize,
    /// Spaces per level; none = one line.
    pub indent: Option<usize>,
    /// Between items.
    pub item_separator: String,
    /// Between key and value.
    pub key_separator: String,
    /// Non-ASCII characters as `\u` escapes.
    pub ensure_ascii: bool,
    /// Keys in order of their text.
    pub sort_keys: bool,
}

impl Default for JsonStyle {
    fn default() -> Self {
        let (item_separator, key_separator) = (", ".into(), ": ".into());
        JsonStyle {
            bytes_max: SPELLED_BYTES_MAX,
            indent: None,
            item_separator,
            key_separator,
            ensure_ascii: false,
            sort_keys: false,
        }
    }
}

/// Python's `json.dumps`.
pub(super) fn to_json(value: &Value, style: &JsonStyle) -> Result<String, Error> {
    let mut out = String::new();
    write_json(&mut out, value, style, 0)?;
    Ok(out)
}

fn write_json(out: &mut String, value: &Value, style: &JsonStyle, depth: u32) -> Result<(), Error> {
    let refuse = |what: &str| Err(Error::new(ErrorKind::InvalidOperation, format!("{what} cannot be written as JSON")));
    is_within_limits(out, depth, style.bytes_max)?;
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::String => write_json_string(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Number if value.is_integer() => {
            let _ = write!(out, "{value}");
        }
        ValueKind::Map => {
            let mut entries = pairs(value);
            if style.sort_keys {
                entries.sort_by(|a, b| a.0.cmp(&b.0));
            }
            write_json_items(out, ('{', '}'), entries.len(), style, depth, |out, n| {
                let (key, item) = &entries[n];
                match key.kind() {
                    ValueKind::String => write_json(out, key, style, depth + 1)?,
                    ValueKind::Number | ValueKind::Bool | ValueKind::None => {
                        let mut text = String::new();
                        write_json(&mut text, key, style, depth + 1)?;
                        write_json_string(out, &text, style.ensure_ascii);
                    }
                    _ => return Err(Error::new(ErrorKind::InvalidOperation, "a key is no string")),
                }
                out.push_str(&style.key_separator);
                write_json(out, item, style, depth + 1)
            })?;
        }
        ValueKind::Seq => {
            let items: Vec<Value> = value.try_iter()?.collect();
            write_json_items(out, ('[', ']'), items.len(), style, depth, |out, n| {
                write_json(out, &items[n], style, depth + 1)
            })?;
        }
        ValueKind::Undefined => return refuse("an undefined value"),
        _ => match as_float(value) {
            Some(number) if number.is_nan() => out.push_str("NaN"),
            Some(number) if number.is_infinite() => out.push_str(if number > 0.0 { "Infinity" } else { "-Infinity" }),
            Some(number) => out.push_str(&float_repr(number)),
            None => return refuse("this kind of value"),
        },
    }
    Ok(())
}

fn write_json_items(
    out: &mut String,
    brackets: (char, char),
    count: usize,
    style: &JsonStyle,
    depth: u32,
    mut item: impl FnMut(&mut String, usize) -> Result<(), Error>,
) -> Result<(), Error> {
    let line = |out: &mut String, level: usize| {
        if let Some(indent) = style.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * level));
        }
    };
    out.push(brackets.0);
    for n in 0..count {
        if n > 0 {
            out.push_str(&style.item_separator);
        }
        line(out, depth as usize + 1);
        item(out, n)?;
    }
    if count > 0 {
        line(out, depth as usize);
    }
    out.push(brackets.1);
    Ok(())
}

fn write_json_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    let mut units = [0; 2];
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            // Python escapes DEL only where it is told to write ASCII.
            '\0'..='\u{1f}' => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            _ if !ensure_ascii || (' '..='~').contains(&c) => out.push(c),
            _ => {
                for unit in c.encode_utf16(&mut units) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_spelled_as_python_spells_them() {
        for (number, python) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (123_456.789, "123456.789"),
            (5e-324, "5e-324"),
        ] {
            assert_eq!(float_repr(number), python);
        }
    }

    #[test]
    fn strings_are_quoted_as_python_quotes_them() {
        for (text, python) in [
            ("it's", "\"it's\""),
            ("\"it's\"", "'\"it\\'s\"'"),
            ("a\u{200b}\u{a0}b\n", "'a\\u200b\\xa0b\\n'"),
            ("é 你好 😀", "'é 你好 😀'"),
        ] {
            assert_eq!(repr(&Value::from(text), 99).unwrap(), python);
        }
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let value = super::super::json::value(r#"{"b":[1,2.0,1e-7,null],"a":"<é\u007f\u0001>"}"#).unwrap();
        assert_eq!(
            to_json(&value, &JsonStyle::default()).unwrap(),
            "{\"b\": [1, 2.0, 1e-07, null], \"a\": \"<é\u{7f}\\u0001>\"}"
        );
        let style = JsonStyle {
            indent: Some(2),
            item_separator: ",".into(),
            sort_keys: true,
            ensure_ascii: true,
            ..JsonStyle::default()
        };
        assert_eq!(
            to_json(&value, &style).unwrap(),
            "{\n  \"a\": \"<\\u00e9\\u007f\\u0001>\",\n  \"b\": [\n    1,\n    2.0,\n    1e-07,\n    null\n  ]\n}"
        );
        assert!(to_json(&Value::UNDEFINED, &style).is_err());
    }

    #[test]
    fn a_large_dict_finds_every_key() {
        let mut dict = PyDict::default();
        for n in 0..100 {
            dict.set(&format!("k{n}"), Value::from(n));
        }
        dict.set("k7", Value::from("seven"));
        assert_eq!(dict.get("k7").and_then(Value::as_str), Some("seven"));
        assert_eq!(dict.get("k99"), Some(&Value::from(99)));
        assert_eq!(dict.get("k100"), None);
        assert_eq!(dict.entries().len(), 100);
    }
}
