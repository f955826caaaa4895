//! What an answer of the OpenAI API says: when its tokens came, and its usage. No I/O; time is passed in.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::ErrorKind;

/// Bytes of one event, and of a whole answer that is not a stream. Beyond it the answer is bad.
const JSON_BYTES_MAX: usize = 16 * 1024 * 1024;

/// A whole answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// When the first text came; of an answer that is not a stream, or has no text, when it ended.
    pub(crate) first_token: Instant,
    /// Times between two events with text.
    pub(crate) gaps: Vec<Duration>,
    /// When the last byte came.
    pub(crate) end: Instant,
    /// The engine's count, where it sent one.
    pub(crate) usage: Option<Usage>,
}

/// The engine's count of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u64,
    #[serde(default)]
    pub(crate) completion_tokens: u64,
    #[serde(default)]
    prompt_tokens_details: Option<Details>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
struct Details {
    #[serde(default)]
    cached_tokens: Option<u64>,
}

impl Usage {
    /// Prompt tokens that the engine found in its cache.
    pub(crate) fn cached_tokens(&self) -> u64 {
        self.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0)
    }
}

/// One event of a stream, or a whole answer: they differ only in where the text stands.
#[derive(Deserialize)]
struct Event<'a> {
    #[serde(default, borrow)]
    choices: Vec<Choice<'a>>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    error: Option<serde::de::IgnoredAny>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(default, borrow)]
    delta: Option<Delta<'a>>,
    #[serde(default, borrow)]
    text: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(default, borrow)]
    content: Option<Cow<'a, str>>,
}

impl Event<'_> {
    fn has_text(&self) -> bool {
        self.choices.iter().any(|choice| {
            let delta = choice.delta.as_ref().and_then(|delta| delta.content.as_deref());
            !choice.text.as_deref().unwrap_or("").is_empty() || !delta.unwrap_or("").is_empty()
        })
    }
}

/// Reads an answer's plain bytes as they come.
#[derive(Debug)]
pub(super) struct AnswerParser {
    event_stream: bool,
    pending: Vec<u8>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    gaps: Vec<Duration>,
    usage: Option<Usage>,
    done: bool,
}

impl AnswerParser {
    pub(super) fn new(event_stream: bool) -> Self {
        AnswerParser {
            event_stream,
            pending: Vec::new(),
            first_token: None,
            last_token: None,
            gaps: Vec::new(),
            usage: None,
            done: false,
        }
    }

    /// Takes the bytes that came at `now`.
    pub(super) fn feed(&mut self, bytes: &[u8], now: Instant) -> Result<(), ErrorKind> {
        if self.pending.len() + bytes.len() > JSON_BYTES_MAX {
            return Err(ErrorKind::BadBody);
        }
        self.pending.extend_from_slice(bytes);
        if !self.event_stream {
            return Ok(());
        }
        let pending = std::mem::take(&mut self.pending);
        let mut at = 0;
        while let Some(length) = pending[at..].iter().position(|&byte| byte == b'\n') {
            self.line(&pending[at..at + length], now)?;
            at += length + 1;
        }
        self.pending = pending;
        self.pending.drain(..at);
        Ok(())
    }

    /// One line of a stream. Engines put each event on one `data:` line; other fields and comments are passed over.
    fn line(&mut self, line: &[u8], now: Instant) -> Result<(), ErrorKind> {
        let Some(data) = line.strip_prefix(b"data:") else { return Ok(()) };
        let data = data.trim_ascii();
        if data == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        let event: Event<'_> = serde_json::from_slice(data).map_err(|_| ErrorKind::BadBody)?;
        if event.error.is_some() {
            return Err(ErrorKind::StreamError);
        }
        if event.has_text() {
            self.first_token.get_or_insert(now);
            if let Some(last) = self.last_token.replace(now) {
                self.gaps.push(now - last);
            }
        }
        self.usage = event.usage.or(self.usage);
        Ok(())
    }

    /// The answer, whose last byte came by `now`.
    pub(super) fn finish(self, now: Instant) -> Result<Answer, ErrorKind> {
        let mut usage = self.usage;
        if self.event_stream {
            if !self.done {
                return Err(ErrorKind::StreamError);
            }
        } else {
            let event: Event<'_> = serde_json::from_slice(&self.pending).map_err(|_| ErrorKind::BadBody)?;
            if event.error.is_some() {
                return Err(ErrorKind::BadBody);
            }
            usage = event.usage;
        }
        Ok(Answer { first_token: self.first_token.unwrap_or(now), gaps: self.gaps, end: now, usage })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = concat!(
        ": ping\n\n",
        "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\r\n\r\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"a \\\"b\\\"\"}}],\"usage\":null}\n\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"c\"}}]}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":20,\"total_tokens\":22,\"completion_tokens\":2,",
        "\"prompt_tokens_details\":{\"cached_tokens\":16}}}\n\n",
        "data: [DONE]\n\n",
    );

    #[test]
    fn a_stream_gives_times_of_text_and_usage_however_it_is_cut() {
        for piece in [1, 7, 64, STREAM.len()] {
            let start = Instant::now();
            let mut parser = AnswerParser::new(true);
            for (number, part) in STREAM.as_bytes().chunks(piece).enumerate() {
                parser.feed(part, start + Duration::from_millis(number as u64)).unwrap();
            }
            let answer = parser.finish(start + Duration::from_secs(9)).unwrap();
            let text_ends = STREAM.find("\"usage\":null}\n").unwrap() + "\"usage\":null}\n".len() - 1;
            let expected = start + Duration::from_millis((text_ends / piece) as u64);
            assert_eq!(answer.first_token, expected, "the empty first delta is no token (pieces of {piece})");
            assert_eq!(answer.gaps.len(), 1);
            let usage = answer.usage.unwrap();
            assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens()), (20, 2, 16));
        }
    }

    #[test]
    fn a_stream_that_ends_early_or_reports_an_error_is_an_error() {
        let run = |text: &str| {
            let mut parser = AnswerParser::new(true);
            parser.feed(text.as_bytes(), Instant::now())?;
            parser.finish(Instant::now())
        };
        assert_eq!(run(&STREAM.replace("data: [DONE]\n", "")), Err(ErrorKind::StreamError));
        assert_eq!(run("data: {\"error\":{\"message\":\"x\"}}\n\n"), Err(ErrorKind::StreamError));
        assert_eq!(run("data: {\"choi\n\n"), Err(ErrorKind::BadBody));
        assert!(run(STREAM).is_ok());
    }

    #[test]
    fn a_plain_answer_has_its_first_token_at_its_end() {
        let body = br#"{"choices":[{"text":"hello","index":0}],"usage":{"prompt_tokens":3}}"#;
        let (mut parser, now) = (AnswerParser::new(false), Instant::now());
        parser.feed(body, now).unwrap();
        let answer = parser.finish(now).unwrap();
        assert_eq!((answer.first_token, answer.usage.unwrap().prompt_tokens), (now, 3));
        let mut parser = AnswerParser::new(false);
        parser.feed(b"<html>", now).unwrap();
        assert_eq!(parser.finish(now), Err(ErrorKind::BadBody));
    }
}
