//! How a template wants message content: as one string, or as a list of parts.
//!
//! The engine looks whether the template loops over the content of a message, also through variables and macro
//! parameters it was given to. This reads the template's tags the same way.

use std::collections::BTreeSet;

use super::source::{self, Piece};

/// What message content is turned into before a render.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentFormat {
    /// One string: the text parts joined by newlines.
    String,
    /// A list of parts, as the OpenAI API has them.
    Parts,
}

/// Passes over the tags until no new name for content is found.
const PASSES_MAX: usize = 8;

/// Reads the format off the template's text.
pub(super) fn detect(template: &str) -> ContentFormat {
    let tags = tags(template);
    let mut content: BTreeSet<String> = BTreeSet::new();
    for _ in 0..PASSES_MAX {
        let known = content.len();
        for tag in &tags {
            if let Some((name, value)) = assignment(tag)
                && is_content(value, &content)
            {
                content.insert(name.to_owned());
            }
            for (macro_name, parameters) in tags.iter().filter_map(|t| macro_head(t)) {
                for (parameter, argument) in parameters.iter().zip(call_arguments(tag, macro_name)) {
                    if is_content(argument, &content) {
                        content.insert((*parameter).to_owned());
                    }
                }
            }
        }
        if content.len() == known {
            break;
        }
    }
    let loops = tags.iter().filter_map(|tag| loop_source(tag)).any(|source| is_content(source, &content));
    if loops { ContentFormat::Parts } else { ContentFormat::String }
}

/// Reads the format as SGLang does: by words for media anywhere in the text, and by loops over the content of a
/// message that is called so.
pub(super) fn detect_sglang(template: &str) -> ContentFormat {
    let media = ["image", "audio", "video", "vision"].iter().any(|word| template.contains(word));
    let of_message = |source: &str| {
        let root = source.split('|').next().unwrap_or(source).trim();
        let owner = ["['content']", "[\"content\"]", ".content"].iter().find_map(|access| root.strip_suffix(access));
        matches!(owner, Some("message" | "msg" | "m"))
    };
    if media || tags(template).iter().filter_map(|tag| loop_source(tag)).any(of_message) {
        ContentFormat::Parts
    } else {
        ContentFormat::String
    }
}

/// The insides of `{% … %}` and `{{ … }}`.
fn tags(template: &str) -> Vec<&str> {
    let pieces = source::pieces(template).into_iter();
    pieces
        .filter_map(|piece| match piece {
            Piece::Block(tag) | Piece::Print(tag) => Some(source::inner(tag)),
            Piece::Other(_) => None,
        })
        .collect()
}

/// `set NAME = VALUE`.
fn assignment(tag: &str) -> Option<(&str, &str)> {
    let (name, value) = tag.strip_prefix("set ")?.split_once('=')?;
    Some((name.trim(), value.trim()))
}

/// The source of `for … in SOURCE`.
fn loop_source(tag: &str) -> Option<&str> {
    let (_, source) = source::split_at_word(tag.strip_prefix("for ")?, &["in"]);
    Some(source::split_at_word(source.strip_prefix("in")?, &["if", "recursive"]).0.trim())
}

/// Name and parameters of `macro NAME(PARAMETERS)`.
fn macro_head(tag: &str) -> Option<(&str, Vec<&str>)> {
    let (name, parameters) = tag.strip_prefix("macro ")?.split_once('(')?;
    let parameters = parameters.split(')').next()?.split(',');
    Some((name.trim(), parameters.map(|p| p.split('=').next().unwrap_or(p).trim()).collect()))
}

/// The arguments of the first call of a macro in a tag.
fn call_arguments<'t>(tag: &'t str, name: &str) -> Vec<&'t str> {
    if tag.starts_with("macro ") {
        return Vec::new();
    }
    let mut rest = tag;
    while let Some(place) = rest.find(name) {
        let starts = !rest[..place].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '.');
        rest = &rest[place + name.len()..];
        if starts && let Some(arguments) = rest.strip_prefix('(') {
            return arguments.split([',', ')']).map(str::trim).collect();
        }
    }
    Vec::new()
}

/// Whether an expression is the content of a message, or a name it was given to, filters aside.
fn is_content(expression: &str, names: &BTreeSet<String>) -> bool {
    let root = expression.split('|').next().unwrap_or(expression).trim().trim_matches(['(', ')']).trim();
    if names.contains(root) {
        return true;
    }
    let Some(owner) = ["['content']", "[\"content\"]", ".content"].iter().find_map(|access| root.strip_suffix(access))
    else {
        return false;
    };
    !owner.is_empty() && owner.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '.' | '[' | ']' | '-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_over_content_are_found() {
        for (template, expected) in [
            ("{% for m in messages %}{{ m.content }}{% endfor %}", ContentFormat::String),
            (
                "{%- for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}",
                ContentFormat::Parts,
            ),
            ("{% for p in message.content | selectattr('type') %}{% endfor %}", ContentFormat::Parts),
            ("{% set c = m.content %}{% set d = c %}{% for p in d %}{% endfor %}", ContentFormat::Parts),
            (
                "{% macro r(c, n) %}{% for p in c %}{% endfor %}{% endmacro %}{{ r(message.content, 1) }}",
                ContentFormat::Parts,
            ),
            ("{% macro r(c) %}{% for p in c %}{% endfor %}{% endmacro %}{{ r(message.tools) }}", ContentFormat::String),
            ("{# {% for p in m.content %} #}{{ m.content }}", ContentFormat::String),
            ("{% for tool in tools %}{{ tool }}{% endfor %}", ContentFormat::String),
        ] {
            assert_eq!(detect(template), expected, "{template}");
        }
    }

    #[test]
    fn sglang_goes_by_words_and_by_the_names_of_loops() {
        for (template, expected) in [
            ("{% for m in messages %}{{ m.content }}{% endfor %}", ContentFormat::String),
            ("{% for p in message['content'] | list %}{% endfor %}", ContentFormat::Parts),
            ("{% for p in turn.content %}{% endfor %}", ContentFormat::String),
            ("{% set c = m.content %}{% for p in c %}{% endfor %}", ContentFormat::String),
            ("{{ '<|vision_start|>' }}", ContentFormat::Parts),
        ] {
            assert_eq!(detect_sglang(template), expected, "{template}");
        }
    }
}
