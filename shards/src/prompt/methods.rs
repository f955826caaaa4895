//! Python's methods of strings, dicts and lists, as far as chat templates use them.
//!
//! What is not here is an error of the template: the request is then routed without keys, never with a wrong text.

use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use super::pyvalue::{self, PyDict};

/// Bytes of data that one unit of a render's fuel pays for.
const BYTES_PER_FUEL: usize = 64;
/// Most digits of a width or a precision in a format. Beyond it the render fails.
const FORMAT_DIGITS_MAX: usize = 4;

/// Takes fuel for bytes that are made or looked at, before they are.
///
/// # Errors
/// The render's fuel is used up.
pub(super) fn pay_for(state: &State, bytes: usize) -> Result<(), Error> {
    state.consume_fuel((bytes / BYTES_PER_FUEL) as u64)
}

/// Bytes to be paid for each byte of a container's text: it is made part by part.
const SPELLED_COST: usize = 4;

/// Most bytes that a container may be spelled in with the fuel that is left.
pub(super) fn payable(state: &State) -> usize {
    let left = state.fuel_levels().map_or(u64::MAX, |(_, left)| left);
    let bytes = left.saturating_mul((BYTES_PER_FUEL / SPELLED_COST) as u64);
    usize::try_from(bytes).unwrap_or(usize::MAX).min(pyvalue::SPELLED_BYTES_MAX)
}

/// Python's `str` of a value, paid for.
///
/// # Errors
/// The render's fuel does not suffice, or the value is nested too deep.
pub(super) fn spelled(state: &State, value: &Value) -> Result<String, Error> {
    let text = pyvalue::str(value, payable(state))?;
    if value.as_str().is_none() {
        pay_for(state, text.len() * SPELLED_COST)?;
    }
    Ok(text)
}

/// Calls a method on a value.
pub(super) fn call(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (args, kwargs): (&[Value], Kwargs) = from_args(args)?;
    let args = Args { args, kwargs };
    let looked_at = match value.as_str() {
        Some(text) => text.len(),
        None => value.len().unwrap_or(0).saturating_mul(size_of::<Value>()),
    };
    pay_for(state, looked_at)?;
    let result = match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            pay_for(state, made(text, method, &args)?)?;
            string(text, method, &args)?
        }
        ValueKind::Map => dict(value, method, &args)?,
        ValueKind::Seq => list(value, method, &args)?,
        _ => None,
    };
    args.kwargs.assert_all_used()?;
    result.ok_or_else(|| Error::new(ErrorKind::UnknownMethod, format!("no method {method} on {}", value.kind())))
}

/// Bytes that a method makes of a text, where they may be many times what it is given.
fn made(text: &str, method: &str, args: &Args) -> Result<usize, Error> {
    Ok(match method {
        "replace" => {
            let (old, new) = (args.text(0, "old")?, args.text(1, "new")?);
            text.matches(&old).count().saturating_mul(new.len())
        }
        "join" => match args.args.first().map(Value::try_iter) {
            Some(Ok(items)) => {
                let lengths = items.map(|item| item.as_str().map_or(0, str::len).saturating_add(text.len()));
                lengths.fold(0, usize::saturating_add)
            }
            _ => 0,
        },
        "format" => {
            let is_long = |run: &[u8]| run.len() > FORMAT_DIGITS_MAX && run.iter().all(u8::is_ascii_digit);
            if text.as_bytes().windows(FORMAT_DIGITS_MAX + 1).any(is_long) {
                return Err(type_error("a format of such a width"));
            }
            text.len()
        }
        _ => 0,
    })
}

struct Args<'a> {
    args: &'a [Value],
    kwargs: Kwargs,
}

fn type_error(what: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.to_owned())
}

impl Args<'_> {
    /// The argument by place or name; none when absent or None.
    fn optional(&self, place: usize, name: &str) -> Result<Option<Value>, Error> {
        let value = match self.args.get(place) {
            Some(value) => Some(value.clone()),
            None => self.kwargs.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|v| !v.is_none()))
    }

    fn text(&self, place: usize, name: &str) -> Result<String, Error> {
        let value = self.optional(place, name)?.ok_or_else(|| type_error("an argument is missing"))?;
        value.as_str().map(str::to_owned).ok_or_else(|| type_error("an argument is no string"))
    }

    fn optional_text(&self, place: usize, name: &str) -> Result<Option<String>, Error> {
        self.optional(place, name)?
            .map(|v| v.as_str().map(str::to_owned).ok_or_else(|| type_error("no string")))
            .transpose()
    }

    fn number(&self, place: usize, name: &str) -> Result<Option<i64>, Error> {
        self.optional(place, name)?.map(i64::try_from).transpose()
    }

    fn at_most(&self, count: usize) -> Result<(), Error> {
        if self.args.len() > count { Err(Error::from(ErrorKind::TooManyArguments)) } else { Ok(()) }
    }
}

/// Whitespace as Python's `str` methods see it.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn string(text: &str, method: &str, args: &Args) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => {
            args.at_most(1)?;
            let chars = args.optional_text(0, "chars")?;
            let cut = |c: char| chars.as_ref().map_or_else(|| is_space(c), |set| set.contains(c));
            let text = if method == "rstrip" { text } else { text.trim_start_matches(cut) };
            let text = if method == "lstrip" { text } else { text.trim_end_matches(cut) };
            Value::from(text)
        }
        "startswith" | "endswith" => {
            args.at_most(1)?;
            let affix = args.args.first().ok_or_else(|| type_error("an argument is missing"))?;
            let matches = |affix: &Value| {
                let affix = affix.as_str().ok_or_else(|| type_error("an affix is no string"))?;
                Ok::<bool, Error>(if method == "startswith" { text.starts_with(affix) } else { text.ends_with(affix) })
            };
            let mut found = false;
            if affix.is_tuple() {
                for item in affix.try_iter()? {
                    found |= matches(&item)?;
                }
            } else {
                found = matches(affix)?;
            }
            Value::from(found)
        }
        "split" | "rsplit" => {
            args.at_most(2)?;
            split(text, args.optional_text(0, "sep")?.as_deref(), args.number(1, "maxsplit")?, method == "rsplit")?
        }
        "splitlines" => {
            args.at_most(0)?;
            Value::from(lines(text).into_iter().map(Value::from).collect::<Vec<_>>())
        }
        "replace" => {
            args.at_most(3)?;
            let (old, new) = (args.text(0, "old")?, args.text(1, "new")?);
            match args.number(2, "count")? {
                Some(count) if count >= 0 => {
                    Value::from(text.replacen(&old, &new, usize::try_from(count).unwrap_or(usize::MAX)))
                }
                _ => Value::from(text.replace(&old, &new)),
            }
        }
        "removeprefix" => Value::from(text.strip_prefix(args.text(0, "prefix")?.as_str()).unwrap_or(text)),
        "removesuffix" => Value::from(text.strip_suffix(args.text(0, "suffix")?.as_str()).unwrap_or(text)),
        "find" | "rfind" | "index" => {
            args.at_most(1)?;
            find(text, &args.text(0, "sub")?, method)?
        }
        "count" => {
            args.at_most(1)?;
            let part = args.text(0, "sub")?;
            Value::from(if part.is_empty() { text.chars().count() + 1 } else { text.matches(&part).count() })
        }
        "partition" | "rpartition" => partition(text, &args.text(0, "sep")?, method == "rpartition")?,
        "join" => {
            let items = args.args.first().ok_or_else(|| type_error("an argument is missing"))?;
            let mut parts = Vec::new();
            for item in items.try_iter()? {
                parts.push(item.as_str().ok_or_else(|| type_error("an item to join is no string"))?.to_owned());
            }
            Value::from(parts.join(text))
        }
        "zfill" => {
            let width = usize::try_from(args.number(0, "width")?.unwrap_or(0)).unwrap_or(0).min(4096);
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['-', '+'])));
            Value::from(format!("{sign}{}{digits}", "0".repeat(width.saturating_sub(text.chars().count()))))
        }
        "format" => {
            let text = minijinja::formatting::format(minijinja::formatting::FormatStyle::StrFormat, text, args.args)?;
            Value::from(text)
        }
        _ => return string_case(text, method, args),
    }))
}

fn string_case(text: &str, method: &str, args: &Args) -> Result<Option<Value>, Error> {
    let all = |test: fn(char) -> bool| Value::from(!text.is_empty() && text.chars().all(test));
    let value = match method {
        "upper" => Value::from(text.to_uppercase()),
        "lower" => Value::from(text.to_lowercase()),
        "title" => Value::from(title(text)?),
        "capitalize" => {
            let mut chars = text.chars();
            let first = chars.next().map(title_char).transpose()?;
            Value::from(first.into_iter().chain(chars.as_str().to_lowercase().chars()).collect::<String>())
        }
        // These differ from each other beyond ASCII, in tables that are not here.
        "isdigit" | "isdecimal" | "isnumeric" if text.chars().any(|c| c.is_numeric() && !c.is_ascii()) => {
            return Err(type_error("digits beyond ASCII"));
        }
        "isdigit" | "isdecimal" | "isnumeric" => all(|c| c.is_ascii_digit()),
        "isalpha" => all(char::is_alphabetic),
        "isalnum" => all(char::is_alphanumeric),
        "isspace" => all(is_space),
        "isupper" => Value::from(text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)),
        "islower" => Value::from(text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)),
        _ => return Ok(None),
    };
    args.at_most(0)?;
    Ok(Some(value))
}

/// The upper-case form of a first letter; letters whose title case differs from it are refused.
fn title_char(c: char) -> Result<char, Error> {
    let mut upper = c.to_uppercase();
    match (upper.next(), upper.next()) {
        (Some(first), None) => Ok(first),
        _ => Err(type_error("a letter without a plain title case")),
    }
}

fn title(text: &str) -> Result<String, Error> {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        let cased = c.is_uppercase() || c.is_lowercase();
        if cased && !inside {
            out.push(title_char(c)?);
        } else {
            out.extend(c.to_lowercase());
        }
        inside = cased;
    }
    Ok(out)
}

fn split(text: &str, separator: Option<&str>, limit: Option<i64>, from_right: bool) -> Result<Value, Error> {
    let limit = limit.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX - 1);
    let parts: Vec<&str> = match separator {
        Some("") => return Err(type_error("an empty separator")),
        Some(separator) if from_right => {
            let mut parts: Vec<&str> = text.rsplitn(limit + 1, separator).collect();
            parts.reverse();
            parts
        }
        Some(separator) => text.splitn(limit + 1, separator).collect(),
        None if from_right && limit < usize::MAX - 1 => return Err(type_error("rsplit by whitespace with a limit")),
        None => {
            let mut parts = Vec::new();
            let mut rest = text.trim_start_matches(is_space);
            while !rest.is_empty() {
                if parts.len() == limit {
                    parts.push(rest.trim_end_matches(is_space));
                    break;
                }
                let end = rest.find(is_space).unwrap_or(rest.len());
                parts.push(&rest[..end]);
                rest = rest[end..].trim_start_matches(is_space);
            }
            parts
        }
    };
    Ok(Value::from(parts.into_iter().map(Value::from).collect::<Vec<_>>()))
}

/// Python's `splitlines`.
pub(super) fn lines(text: &str) -> Vec<&str> {
    let is_end = |c: char| {
        matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(is_end).unwrap_or(rest.len());
        lines.push(&rest[..end]);
        let mut chars = rest[end..].chars();
        if chars.next() == Some('\r') && chars.as_str().starts_with('\n') {
            chars.next();
        }
        rest = chars.as_str();
    }
    lines
}

fn find(text: &str, part: &str, method: &str) -> Result<Value, Error> {
    let place = if method == "rfind" { text.rfind(part) } else { text.find(part) };
    match place {
        Some(place) => Ok(Value::from(text[..place].chars().count())),
        None if method == "index" => Err(type_error("substring not found")),
        None => Ok(Value::from(-1)),
    }
}

fn partition(text: &str, separator: &str, from_right: bool) -> Result<Value, Error> {
    if separator.is_empty() {
        return Err(type_error("an empty separator"));
    }
    let split = if from_right { text.rsplit_once(separator) } else { text.split_once(separator) };
    let parts = match split {
        Some((before, after)) => [before, separator, after],
        None if from_right => ["", "", text],
        None => [text, "", ""],
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from).to_vec())))
}

/// Names that `dict.name` finds before any key.
pub(super) const DICT_METHODS: [&str; 11] =
    ["items", "keys", "values", "get", "copy", "clear", "fromkeys", "pop", "popitem", "setdefault", "update"];

fn dict(map: &Value, method: &str, args: &Args) -> Result<Option<Value>, Error> {
    let pairs = || pyvalue::pairs(map).into_iter();
    Ok(Some(match method {
        "items" => {
            args.at_most(0)?;
            Value::from(pairs().map(|(key, item)| Value::from(Tuple::from(vec![key, item]))).collect::<Vec<_>>())
        }
        "keys" => Value::from(pairs().map(|(key, _)| key).collect::<Vec<_>>()),
        "values" => Value::from(pairs().map(|(_, item)| item).collect::<Vec<_>>()),
        "copy" => map.clone(),
        "get" => {
            args.at_most(2)?;
            let key = args.args.first().ok_or_else(|| type_error("an argument is missing"))?;
            let found = match map.downcast_object_ref::<PyDict>() {
                Some(dict) => key.as_str().and_then(|key| dict.get(key)).cloned(),
                None => pairs().find(|(k, _)| k == key).map(|(_, item)| item),
            };
            match found {
                Some(item) => item,
                None => args.args.get(1).cloned().unwrap_or_else(|| Value::from(())),
            }
        }
        _ => return Ok(None),
    }))
}

fn list(items: &Value, method: &str, args: &Args) -> Result<Option<Value>, Error> {
    let wanted = || match args.args.first() {
        Some(wanted) if matches!(wanted.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) => {
            // What looking for one costs cannot be told in advance.
            Err(type_error("a list is searched for a container"))
        }
        wanted => wanted.ok_or_else(|| type_error("an argument is missing")),
    };
    Ok(Some(match method {
        "index" => {
            let wanted = wanted()?;
            let place = items.try_iter()?.position(|item| &item == wanted);
            Value::from(place.ok_or_else(|| type_error("the value is not in the list"))?)
        }
        "count" => {
            let wanted = wanted()?;
            Value::from(items.try_iter()?.filter(|item| item == wanted).count())
        }
        "copy" => items.clone(),
        _ => return Ok(None),
    }))
}
