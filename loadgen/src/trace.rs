//! Mooncake-format traces: one JSON object a line with `timestamp` (ms), `input_length`, `output_length` (tokens) and
//! `hash_ids`, one id per 512-token block of the prompt, the last block partial. An id stands for a block and
//! everything before it.
//!
//! There is no text in such a trace. The text of a block is made from its id alone, when the request is due, so equal
//! ids give equal prefixes; blocks may be scaled down so that small engines suffice.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;

use crate::workload::{Random, Request, chat_request, words};

/// Tokens of a block in the trace.
pub const TRACE_BLOCK_TOKENS: usize = 512;

/// Requests of a trace. Beyond it the file is refused.
const REQUESTS_MAX: usize = 4_000_000;

/// Blocks of one request. Beyond it the file is refused.
const BLOCKS_MAX: usize = 1 << 16;

/// Steps in which timestamps of such traces stand.
const STEP_MS: u64 = 3_000;

/// Kind of random texts.
const BLOCK: u64 = 5;

/// Why a trace cannot be played.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("the trace {} cannot be read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A line is not a request of the format.
    #[error("{}:{line}: {reason}: expected a JSON object with timestamp, input_length, output_length, hash_ids", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
}

/// One line of a trace.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct TraceRequest {
    /// Milliseconds from the trace's start.
    pub timestamp: u64,
    /// Prompt tokens.
    pub input_length: usize,
    /// Tokens to generate.
    pub output_length: u32,
    /// One id per block of the prompt.
    pub hash_ids: Vec<u64>,
}

/// Which part of a trace is read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Slice {
    /// At most that many requests.
    pub requests: Option<usize>,
    /// Only requests of the first so many seconds of the trace.
    pub seconds: Option<f64>,
}

/// Reads a trace, plain or gzipped (by its name's end), in the order of the timestamps.
///
/// # Errors
/// Files that cannot be read, lines of another form, numbers of blocks that do not fit the prompt's length, and more
/// than 4,000,000 requests.
pub fn read(path: &Path, slice: Slice) -> Result<Vec<TraceRequest>, TraceError> {
    let read_error = |source| TraceError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(read_error)?;
    let reader: Box<dyn Read> = if path.extension().is_some_and(|extension| extension == "gz") {
        Box::new(flate2::read::MultiGzDecoder::new(file))
    } else {
        Box::new(file)
    };
    let mut requests: Vec<TraceRequest> = Vec::new();
    for (number, line) in BufReader::new(reader).lines().enumerate() {
        let line = line.map_err(read_error)?;
        if line.trim().is_empty() {
            continue;
        }
        let refuse = |reason: String| TraceError::Line { path: path.to_owned(), line: number + 1, reason };
        let request: TraceRequest = serde_json::from_str(&line).map_err(|error| refuse(error.to_string()))?;
        check(&request).map_err(refuse)?;
        if requests.len() == REQUESTS_MAX {
            return Err(refuse(format!("more than {REQUESTS_MAX} requests")));
        }
        let first = requests.first().map_or(request.timestamp, |first| first.timestamp);
        let offset_ms = request.timestamp.saturating_sub(first) as f64;
        let full = slice.requests.is_some_and(|limit| requests.len() >= limit);
        if full || slice.seconds.is_some_and(|seconds| offset_ms >= seconds * 1e3) {
            break;
        }
        requests.push(request);
    }
    requests.sort_by_key(|request| request.timestamp);
    Ok(requests)
}

fn check(request: &TraceRequest) -> Result<(), String> {
    let blocks = request.input_length.div_ceil(TRACE_BLOCK_TOKENS);
    if blocks != request.hash_ids.len() || blocks == 0 || blocks > BLOCKS_MAX {
        let (ids, tokens) = (request.hash_ids.len(), request.input_length);
        return Err(format!("{ids} hash_ids for {tokens} tokens, {blocks} expected, 1 to {BLOCKS_MAX} possible"));
    }
    Ok(())
}

/// How a trace is turned into load.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceShape {
    /// Model named in the requests.
    pub model: String,
    /// How many times faster than recorded.
    pub time_factor: f64,
    /// Requests with one timestamp are spread evenly up to the next one, at most 3 s of the trace; otherwise they
    /// are sent as a burst.
    pub spread: bool,
    /// Tokens made for each block of 512, roughly; outputs are scaled alike.
    pub tokens_per_block: usize,
    /// Seed of the texts.
    pub seed: u64,
}

/// Requests of a trace.
#[derive(Debug)]
pub struct TraceWorkload {
    shape: TraceShape,
    requests: Vec<TraceRequest>,
}

impl TraceWorkload {
    /// The trace in this shape; requests are in the order of their timestamps.
    #[must_use]
    pub fn new(requests: Vec<TraceRequest>, shape: TraceShape) -> Self {
        TraceWorkload { shape, requests }
    }

    /// How many requests there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// When each request is due, from the start of the run.
    #[must_use]
    pub fn arrivals(&self) -> Vec<Duration> {
        let start = self.requests.first().map_or(0, |first| first.timestamp);
        let mut arrivals = Vec::with_capacity(self.requests.len());
        let mut groups = self.requests.chunk_by(|a, b| a.timestamp == b.timestamp).peekable();
        while let Some(group) = groups.next() {
            let at = group[0].timestamp;
            let next = groups.peek().map_or(at + STEP_MS, |next| next[0].timestamp);
            let step = if self.shape.spread { (next - at).min(STEP_MS) as f64 / group.len() as f64 } else { 0.0 };
            for place in 0..group.len() {
                let ms = (at - start) as f64 + step * place as f64;
                arrivals.push(Duration::from_secs_f64(ms / 1e3 / self.shape.time_factor));
            }
        }
        arrivals
    }

    /// The request of this number, which is below [`len`](Self::len).
    #[must_use]
    pub fn request(&self, number: usize) -> Request {
        let request = &self.requests[number];
        let scale = self.shape.tokens_per_block as f64 / TRACE_BLOCK_TOKENS as f64;
        let output = (f64::from(request.output_length) * scale).round().max(1.0);
        let messages = json!([{ "role": "user", "content": self.text(request) }]);
        chat_request(&self.shape.model, &messages, output as u32)
    }

    fn text(&self, request: &TraceRequest) -> String {
        let mut text = String::new();
        let mut left = request.input_length;
        for &id in &request.hash_ids {
            let part = left.min(TRACE_BLOCK_TOKENS);
            left -= part;
            let tokens = (part * self.shape.tokens_per_block).div_ceil(TRACE_BLOCK_TOKENS);
            words::append(&mut text, &mut Random::of(self.shape.seed, BLOCK, id), words::words_for(tokens));
        }
        text
    }

    pub(crate) fn describe(&self) -> String {
        let s = &self.shape;
        let spread = if s.spread { "spread inside their 3 s steps" } else { "in bursts as recorded" };
        format!(
            "trace of {} requests, {} × as fast as recorded, {spread}, ~{} tokens for each block of {TRACE_BLOCK_TOKENS}",
            self.len(),
            s.time_factor,
            s.tokens_per_block
        )
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn request(timestamp: u64, input_length: usize, hash_ids: &[u64]) -> TraceRequest {
        TraceRequest { timestamp, input_length, output_length: 100, hash_ids: hash_ids.to_vec() }
    }

    fn shape(spread: bool) -> TraceShape {
        TraceShape { model: "m".to_owned(), time_factor: 2.0, spread, tokens_per_block: 64, seed: 1 }
    }

    fn content(workload: &TraceWorkload, number: usize) -> String {
        let body: serde_json::Value = serde_json::from_slice(&workload.request(number).body).unwrap();
        body["messages"][0]["content"].as_str().unwrap().to_owned()
    }

    #[test]
    fn equal_ids_give_equal_prefixes_and_the_last_block_is_cut() {
        let requests = vec![request(0, 1536, &[0, 1, 2]), request(0, 1100, &[0, 1, 2]), request(0, 1536, &[0, 3, 4])];
        let workload = TraceWorkload::new(requests, shape(false));
        let texts: Vec<_> = (0..3).map(|number| content(&workload, number)).collect();
        assert!(texts[0].starts_with(&texts[1]) && texts[1].len() < texts[0].len());
        let common = texts[0].bytes().zip(texts[2].bytes()).take_while(|(a, b)| a == b).count();
        let one_block = content(&TraceWorkload::new(vec![request(0, 512, &[0])], shape(false)), 0).len();
        assert!((one_block..one_block + 12).contains(&common), "{common} bytes in common, a block has {one_block}");
        let body: serde_json::Value = serde_json::from_slice(&workload.request(0).body).unwrap();
        assert_eq!(body["max_tokens"], 13, "100 output tokens at 64 of 512");
    }

    #[test]
    fn steps_are_kept_as_bursts_or_spread_and_time_runs_faster() {
        let requests = || vec![request(3000, 1, &[0]), request(3000, 1, &[0]), request(6000, 1, &[0])];
        let ms = |spread| {
            let arrivals = TraceWorkload::new(requests(), shape(spread)).arrivals();
            arrivals.into_iter().map(|at| at.as_millis()).collect::<Vec<_>>()
        };
        assert_eq!(ms(false), [0, 0, 1500]);
        assert_eq!(ms(true), [0, 750, 1500]);
    }

    #[test]
    fn files_are_read_plain_and_gzipped_and_in_slices() {
        let directory = std::env::temp_dir().join(format!("loadgen-trace-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let lines: String = (0..10)
            .map(|n| {
                format!(
                    "{{\"timestamp\":{},\"input_length\":600,\"output_length\":5,\"hash_ids\":[0,{n}]}}\n",
                    n * 1000
                )
            })
            .collect();
        let (plain, gz) = (directory.join("t.jsonl"), directory.join("t.jsonl.gz"));
        std::fs::write(&plain, &lines).unwrap();
        let mut encoder = flate2::write::GzEncoder::new(File::create(&gz).unwrap(), flate2::Compression::fast());
        encoder.write_all(lines.as_bytes()).unwrap();
        encoder.finish().unwrap();
        let all = read(&plain, Slice::default()).unwrap();
        assert_eq!((all.len(), &all), (10, &read(&gz, Slice::default()).unwrap()));
        assert_eq!(read(&gz, Slice { requests: Some(3), seconds: None }).unwrap().len(), 3);
        assert_eq!(read(&gz, Slice { requests: None, seconds: Some(4.5) }).unwrap().len(), 5);

        std::fs::write(&plain, "{\"timestamp\":0,\"input_length\":600,\"output_length\":5,\"hash_ids\":[0]}\n")
            .unwrap();
        let error = read(&plain, Slice::default()).unwrap_err().to_string();
        assert!(error.contains(":1:") && error.contains("2 expected"), "{error}");
        std::fs::write(&plain, "\n[]\n").unwrap();
        assert!(read(&plain, Slice::default()).unwrap_err().to_string().contains(":2:"));
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
