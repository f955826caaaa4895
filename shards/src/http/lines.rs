//! What request and response heads have in common: header lines, lengths, tokens.

use super::Span;

/// Most headers any configuration may allow in one head.
pub const HEADERS_CEILING: usize = 256;

/// A header of a head, with the span of its whole line.
#[derive(Clone, Copy)]
pub(super) struct Line<'a> {
    pub name: &'a str,
    pub value: &'a [u8],
    pub value_span: Span,
    pub span: Span,
}

/// Offset of `part` in `whole`; both from one parse of `whole`.
pub(super) fn offset(whole: &[u8], part: *const u8) -> usize {
    (part as usize).wrapping_sub(whole.as_ptr() as usize)
}

/// Pairs each parsed header with its line. None when a line does not end in CR LF, or has anything httparse skipped.
pub(super) fn line<'a>(
    head: &'a [u8],
    headers: &[httparse::Header<'a>],
    index: usize,
    head_len: usize,
) -> Option<Line<'a>> {
    let header = headers[index];
    let start = offset(head, header.name.as_ptr());
    let end = match headers.get(index + 1) {
        Some(next) => offset(head, next.name.as_ptr()),
        None => head_len - 2,
    };
    let value_start = offset(head, header.value.as_ptr());
    let text = head.get(start..end)?;
    let tail = text.strip_suffix(b"\r\n")?;
    if tail.iter().any(|byte| matches!(byte, b'\r' | b'\n' | 0)) {
        return None;
    }
    Some(Line {
        name: header.name,
        value: header.value,
        value_span: Span { start: value_start, end: value_start + header.value.len() },
        span: Span { start, end },
    })
}

/// A length: digits only, no sign, no list.
pub(super) fn parse_length(value: &[u8]) -> Option<u64> {
    if value.is_empty() || value.len() > 19 || !value.iter().all(u8::is_ascii_digit) {
        return None;
    }
    Some(value.iter().fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0')))
}

/// The members of a comma-separated list, trimmed, empty ones left out.
pub(super) fn tokens(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii).filter(|token| !token.is_empty())
}

/// The value of the first header of that name, trimmed, in a head that was parsed before.
#[must_use]
pub fn header<'a>(head: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let lines = head.split(|byte| *byte == b'\n').skip(1);
    let mut values = lines.filter_map(|line| {
        let colon = line.iter().position(|byte| *byte == b':')?;
        line[..colon].eq_ignore_ascii_case(name.as_bytes()).then(|| line[colon + 1..].trim_ascii())
    });
    values.next()
}

/// Headers that concern one connection only, whatever `Connection` says.
pub(super) fn is_hop_by_hop(name: &str) -> bool {
    const NAMES: [&str; 7] =
        ["connection", "keep-alive", "proxy-connection", "te", "upgrade", "proxy-authenticate", "proxy-authorization"];
    NAMES.iter().any(|hop| name.eq_ignore_ascii_case(hop))
}

/// Headers that a `Connection` header may not take away, because the message's end or destination hangs on them.
pub(super) fn is_protected(name: &str) -> bool {
    const NAMES: [&str; 4] = ["host", "content-length", "transfer-encoding", "content-type"];
    NAMES.iter().any(|kept| name.eq_ignore_ascii_case(kept))
}

/// Whether the head may be complete: the position after an empty line, searched from `from`.
pub(super) fn head_end(bytes: &[u8], from: usize) -> Option<usize> {
    let from = from.saturating_sub(3);
    let mut at = from;
    while let Some(found) = bytes[at..].iter().position(|byte| *byte == b'\n') {
        let newline = at + found;
        match &bytes[newline + 1..] {
            [b'\n', ..] => return Some(newline + 2),
            [b'\r', b'\n', ..] => return Some(newline + 3),
            _ => at = newline + 1,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_plain_digits() {
        for (text, expected) in [
            ("0", Some(0)),
            ("007", Some(7)),
            ("18446744073", Some(18_446_744_073)),
            ("", None),
            ("+1", None),
            ("-1", None),
            ("1, 1", None),
            ("0x10", None),
            ("99999999999999999999", None),
        ] {
            assert_eq!(parse_length(text.as_bytes()), expected, "{text}");
        }
    }

    #[test]
    fn a_header_is_found_by_its_name_in_any_case() {
        let head = b"GET /x:y HTTP/1.1\r\nHost: a:80\r\nX-Two:  b \r\nx-two: c\r\n\r\n";
        for (name, value) in [("host", Some("a:80")), ("x-TWO", Some("b")), ("x", None), ("get /x", None), ("", None)] {
            assert_eq!(header(head, name), value.map(str::as_bytes), "{name}");
        }
    }

    #[test]
    fn the_end_of_a_head_is_found_from_any_point_of_search() {
        let head = b"GET / HTTP/1.1\r\nA: b\r\n\r\nrest";
        for from in 0..24 {
            assert_eq!(head_end(head, from), Some(24), "{from}");
        }
        assert_eq!(head_end(&head[..23], 0), None);
    }
}
