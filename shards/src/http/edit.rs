//! Editing a head: lines are left out, a few bytes are put before the empty line. In place, everything that stays is moved
//! towards the body, so that head and body remain one piece; a copy leaves the original as it is.

use super::Span;

/// Appends the head to `out` without its `dropped` lines (in order), and with `added` before its empty line.
pub fn copy_head(head: &[u8], dropped: &[Span], added: &[u8], out: &mut Vec<u8>) {
    let end = head.len() - 2;
    let mut from = 0;
    for span in dropped {
        out.extend_from_slice(&head[from..span.start]);
        from = span.end;
    }
    out.extend_from_slice(&head[from..end]);
    out.extend_from_slice(added);
    out.extend_from_slice(&head[end..]);
}

/// Leaves the `dropped` lines (in order) out of the head at `buffer[at..at + len]` and puts `added` before its empty
/// line. Returns where the head now starts: `at + dropped bytes - added bytes`. What is in front of it is of no use.
///
/// # Panics
/// When the head grows by more than the `at` bytes in front of it.
pub fn edit_head(buffer: &mut [u8], at: usize, len: usize, dropped: &[Span], added: &[u8]) -> usize {
    let end = at + len - 2;
    let mut start = end;
    let mut from = end;
    // Kept parts move right, over the dropped lines, last first.
    for span in dropped.iter().rev() {
        move_part(buffer, at + span.end, from, &mut start);
        from = at + span.start;
    }
    move_part(buffer, at, from, &mut start);
    if !added.is_empty() {
        assert!(start >= added.len(), "there is room in front of the head for what is added");
        buffer.copy_within(start..end, start - added.len());
        start -= added.len();
        buffer[end - added.len()..end].copy_from_slice(added);
    }
    start
}

/// Appends a head with the length of another body: in place of what it says of the length stands one line at its end.
/// The head is one that was parsed, of a body that is not chunked.
pub fn with_length(head: &[u8], body_bytes: usize, out: &mut Vec<u8>) {
    const NAME: &[u8] = b"content-length:";
    let is_length = |line: &[u8]| line.get(..NAME.len()).is_some_and(|name| name.eq_ignore_ascii_case(NAME));
    let lines = head[..head.len() - 2].split_inclusive(|&byte| byte == b'\n');
    lines.filter(|line| !is_length(line)).for_each(|line| out.extend_from_slice(line));
    out.extend_from_slice(format!("Content-Length: {body_bytes}\r\n\r\n").as_bytes());
}

/// Moves `buffer[start..end]` so that it ends at `*to`, which then becomes its new start.
fn move_part(buffer: &mut [u8], start: usize, end: usize, to: &mut usize) {
    *to -= end - start;
    if *to != start {
        buffer.copy_within(start..end, *to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(head: &[u8], lines: &[&str]) -> Vec<Span> {
        let mut spans: Vec<Span> = lines
            .iter()
            .map(|line| {
                let start = head.windows(line.len()).position(|w| w == line.as_bytes()).expect("the line is there");
                Span { start, end: start + line.len() }
            })
            .collect();
        spans.sort_by_key(|span| span.start);
        spans
    }

    #[test]
    fn another_length_stands_alone() {
        for (head, expected) in [
            ("POST / HTTP/1.1\r\nA: 1\r\ncontent-LENGTH: 7\r\nB: 2\r\n\r\n", "POST / HTTP/1.1\r\nA: 1\r\nB: 2\r\n"),
            ("POST / HTTP/1.1\r\nContent-Length:7\r\n\r\n", "POST / HTTP/1.1\r\n"),
            ("POST / HTTP/1.1\r\nX: content-length: 7\r\n\r\n", "POST / HTTP/1.1\r\nX: content-length: 7\r\n"),
        ] {
            let mut out = Vec::new();
            with_length(head.as_bytes(), 123, &mut out);
            assert_eq!(String::from_utf8(out), Ok(format!("{expected}Content-Length: 123\r\n\r\n")), "{head}");
        }
    }

    #[test]
    fn kept_lines_stay_in_order_and_the_body_stays_in_place() {
        let head = b"GET / HTTP/1.1\r\nA: 1\r\nB: 22\r\nC: 333\r\n\r\n";
        for (dropped, added, expected) in [
            (&[][..], "", "GET / HTTP/1.1\r\nA: 1\r\nB: 22\r\nC: 333\r\n\r\n"),
            (&["A: 1\r\n"][..], "", "GET / HTTP/1.1\r\nB: 22\r\nC: 333\r\n\r\n"),
            (&["A: 1\r\n", "C: 333\r\n"][..], "", "GET / HTTP/1.1\r\nB: 22\r\n\r\n"),
            (&["B: 22\r\n"][..], "X: 1\r\n", "GET / HTTP/1.1\r\nA: 1\r\nC: 333\r\nX: 1\r\n\r\n"),
            (&["A: 1\r\n"][..], "Long: yes yes\r\n", "GET / HTTP/1.1\r\nB: 22\r\nC: 333\r\nLong: yes yes\r\n\r\n"),
            (&[][..], "Z: 9\r\n", "GET / HTTP/1.1\r\nA: 1\r\nB: 22\r\nC: 333\r\nZ: 9\r\n\r\n"),
            (&["B: 22\r\n", "A: 1\r\n"][..], "Long: y\r\n", "GET / HTTP/1.1\r\nC: 333\r\nLong: y\r\n\r\n"),
            (&["A: 1\r\n", "B: 22\r\n", "C: 333\r\n"][..], "", "GET / HTTP/1.1\r\n\r\n"),
        ] {
            let at = 20;
            let mut buffer = vec![b'.'; at];
            buffer.extend_from_slice(head);
            buffer.extend_from_slice(b"BODY");
            let start = edit_head(&mut buffer, at, head.len(), &spans(head, dropped), added.as_bytes());
            let text = String::from_utf8(buffer[start..].to_vec()).expect("text");
            assert_eq!(text, format!("{expected}BODY"), "{dropped:?} {added}");
            let mut copy = b"before ".to_vec();
            copy_head(head, &spans(head, dropped), added.as_bytes(), &mut copy);
            assert_eq!(String::from_utf8(copy).expect("text"), format!("before {expected}"), "{dropped:?} {added}");
        }
    }
}
