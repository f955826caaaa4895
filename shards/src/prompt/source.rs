//! The text of a template cut into its pieces, and the two changes made to it before it is compiled.

/// A piece of a template's text; together the pieces are the whole text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece<'t> {
    /// Text, comments and raw blocks, as they stand.
    Other(&'t str),
    /// A `{% … %}` with its delimiters.
    Block(&'t str),
    /// A `{{ … }}` with its delimiters.
    Print(&'t str),
}

/// Cuts a template into pieces. What is never closed is text: the compiler reports it.
pub(super) fn pieces(template: &str) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    let mut rest = template;
    while let Some((before, tag, after)) = next_tag(rest) {
        pieces.push(Piece::Other(before));
        match tag.as_bytes().get(1) {
            Some(b'{') => pieces.push(Piece::Print(tag)),
            Some(b'%') if inner(tag) == "raw" => {
                let end = end_of_raw(after);
                pieces.push(Piece::Other(&rest[before.len()..rest.len() - after.len() + end]));
                rest = &after[end..];
                continue;
            }
            Some(b'%') => pieces.push(Piece::Block(tag)),
            _ => pieces.push(Piece::Other(tag)),
        }
        rest = after;
    }
    pieces.push(Piece::Other(rest));
    pieces
}

/// The inside of a tag without delimiters, whitespace control and blanks.
pub(super) fn inner(tag: &str) -> &str {
    let inside = tag.get(2..tag.len().saturating_sub(2)).unwrap_or_default();
    let inside = inside.strip_prefix(['-', '+']).unwrap_or(inside);
    inside.strip_suffix(['-', '+']).unwrap_or(inside).trim()
}

/// Texts beyond which no further ones are collected.
const SOUGHT_MAX: usize = 16;

/// Quoted texts in tags that look into texts (`in`, `startswith`, `split` …): those with a sign in them, since plain
/// words are roles and names.
pub(super) fn sought(template: &str) -> Vec<Box<str>> {
    let mut found: Vec<Box<str>> = Vec::new();
    for piece in pieces(template) {
        let (Piece::Block(tag) | Piece::Print(tag)) = piece else { continue };
        if ![" in ", "startswith", "endswith", "split", "replace", "find"].iter().any(|word| tag.contains(word)) {
            continue;
        }
        for quote in ['\'', '"'] {
            for text in tag.split(quote).skip(1).step_by(2) {
                let sign = text.len() > 1 && text.contains(|c: char| c.is_ascii_punctuation() && c != '_');
                if sign && found.len() < SOUGHT_MAX && !found.iter().any(|known| **known == *text) {
                    found.push(text.into());
                }
            }
        }
    }
    found
}

/// Splits at the next tag or comment: text before, the tag, text after.
fn next_tag(text: &str) -> Option<(&str, &str, &str)> {
    let mut from = 0;
    loop {
        let open = from + text[from..].find('{')?;
        let body = open + 2;
        let length = match text.as_bytes().get(open + 1) {
            Some(b'#') => text.get(body..)?.find("#}").map(|n| n + 2),
            Some(b'%') => end_of_tag(text.get(body..)?, "%}"),
            Some(b'{') => end_of_tag(text.get(body..)?, "}}"),
            _ => {
                from = open + 1;
                continue;
            }
        };
        let close = body + length?;
        return Some((&text[..open], &text[open..close], &text[close..]));
    }
}

/// Where a tag ends, its closing delimiter included; one inside a string or inside brackets does not count.
fn end_of_tag(text: &str, close: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let (mut at, mut quote, mut braces) = (0, None, 0u32);
    while at < bytes.len() {
        match (quote, bytes[at]) {
            (Some(_), b'\\') => at += 1,
            (Some(q), byte) if q == byte => quote = None,
            (None, byte @ (b'"' | b'\'')) => quote = Some(byte),
            (None, _) if braces == 0 && bytes[at..].starts_with(close.as_bytes()) => return Some(at + close.len()),
            (None, b'{') => braces += 1,
            (None, b'}') => braces = braces.saturating_sub(1),
            _ => {}
        }
        at += 1;
    }
    None
}

/// Length of a raw block's rest, its end tag included.
fn end_of_raw(text: &str) -> usize {
    let mut from = 0;
    while let Some(open) = text[from..].find("{%").map(|n| from + n) {
        let Some(close) = text[open..].find("%}").map(|n| open + n + 2) else { break };
        if inner(&text[open..close]) == "endraw" {
            return close;
        }
        from = open + 2;
    }
    text.len()
}

/// Splits an expression at the first of the words that stands outside strings and brackets.
pub(super) fn split_at_word<'t>(text: &'t str, words: &[&str]) -> (&'t str, &'t str) {
    let bytes = text.as_bytes();
    let is_word = |byte: Option<&u8>| byte.is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_');
    let (mut at, mut quote, mut depth) = (0, None, 0u32);
    while at < bytes.len() {
        match (quote, bytes[at]) {
            (Some(_), b'\\') => at += 1,
            (Some(q), byte) if q == byte => quote = None,
            (None, byte @ (b'"' | b'\'')) => quote = Some(byte),
            (None, b'(' | b'[' | b'{') => depth += 1,
            (None, b')' | b']' | b'}') => depth = depth.saturating_sub(1),
            (None, _) if depth == 0 && (at == 0 || !is_word(bytes.get(at - 1))) => {
                let found =
                    words.iter().find(|w| bytes[at..].starts_with(w.as_bytes()) && !is_word(bytes.get(at + w.len())));
                if found.is_some() {
                    return (&text[..at], &text[at..]);
                }
            }
            _ => {}
        }
        at += 1;
    }
    (text, "")
}

/// Name of the filter that every loop's source goes through.
pub(super) const LOOP_FILTER: &str = "as_python_iterates";

/// The text to compile: `{% generation %}` blocks, which only mark tokens for training, become plain scopes; the
/// source of every loop goes through [`LOOP_FILTER`], because minijinja loops over None and Python does not.
pub(super) fn prepared(template: &str) -> String {
    let mut out = String::with_capacity(template.len() + 256);
    for piece in pieces(template) {
        match piece {
            Piece::Other(text) | Piece::Print(text) => out.push_str(text),
            Piece::Block(tag) => match inner(tag) {
                "generation" => out.push_str(&tag.replacen("generation", "with", 1)),
                "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endwith", 1)),
                inside => match inside.strip_prefix("for").filter(|rest| rest.starts_with(char::is_whitespace)) {
                    Some(head) => push_loop(&mut out, tag, head),
                    None => out.push_str(tag),
                },
            },
        }
    }
    out
}

fn push_loop(out: &mut String, tag: &str, head: &str) {
    let (target, rest) = split_at_word(head, &["in"]);
    let Some(rest) = rest.strip_prefix("in") else { return out.push_str(tag) };
    let (source, tail) = split_at_word(rest, &["if", "recursive"]);
    let control =
        |byte: Option<&u8>| if let Some(b @ (b'-' | b'+')) = byte { char::from(*b).to_string() } else { String::new() };
    let (open, close) = (control(tag.as_bytes().get(2)), control(tag.as_bytes().get(tag.len() - 3)));
    out.push_str(&format!("{{%{open} for{target} in ({})|{LOOP_FILTER} {tail} {close}%}}", source.trim()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_the_whole_text() {
        let text = "a{{ '}}' ~ {'a': {}} }}b{# {% #}{% raw %}{% for %}{%- endraw %}c{%- if x -%}{% 'never closed";
        let pieces = pieces(text);
        let whole: String = pieces
            .iter()
            .map(|p| match p {
                Piece::Other(t) | Piece::Block(t) | Piece::Print(t) => *t,
            })
            .collect();
        assert_eq!(whole, text);
        assert!(pieces.contains(&Piece::Print("{{ '}}' ~ {'a': {}} }}")));
        assert!(pieces.contains(&Piece::Block("{%- if x -%}")));
        assert_eq!(pieces.iter().filter(|p| matches!(p, Piece::Block(_))).count(), 1);
    }

    #[test]
    fn loops_and_generation_blocks_are_rewritten() {
        for (template, expected) in [
            ("{%- for a in b -%}", "{%- for a  in (b)|as_python_iterates  -%}"),
            (
                "{% for k, v in x.items() if ' if ' in k recursive %}",
                "{% for k, v  in (x.items())|as_python_iterates if ' if ' in k recursive %}",
            ),
            ("{% for x in [a if b else c] %}", "{% for x  in ([a if b else c])|as_python_iterates  %}"),
            ("{%- generation -%}x{% endgeneration %}", "{%- with -%}x{% endwith %}"),
            ("{% format %}{% set x = 'for a in b' %}", "{% format %}{% set x = 'for a in b' %}"),
        ] {
            assert_eq!(prepared(template), expected);
        }
    }
}
