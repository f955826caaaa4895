//! Recorded decisions: one JSON object a line, `{"at", "tokens", "answer", "block_tokens", "keys", "endpoint", "session"}`.
//!
//! `at` is in seconds, from any beginning; `tokens` and `answer` are the lengths of prompt and answer; `keys` are the keys
//! of the prompt's full blocks, each of which stands for its block and all before it; `endpoint` is the index of the
//! chosen endpoint; `session` is optional, a number. All lines have the same `block_tokens`.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use super::fleet::Outcome;
use super::trace::{self, Raw, Request, Trace};

/// Workers that a recording can speak of; one more and it is refused.
const ENDPOINTS_MAX: u64 = 4_096;

/// A recording as a trace, and who was chosen for each request.
pub struct Recording {
    pub trace: Trace,
    pub endpoints: Vec<u16>,
}

/// Reads a recording; plain, or gzipped (by its name's end).
pub fn read(path: &Path) -> anyhow::Result<Recording> {
    let lines = trace::lines(path).with_context(|| format!("the log {} cannot be read", path.display()))?;
    parse(&lines).with_context(|| format!("{}", path.display()))
}

fn parse(lines: &[String]) -> anyhow::Result<Recording> {
    let (mut raw, mut endpoints, mut block_tokens) = (Vec::new(), Vec::new(), None);
    for (n, row) in trace::each(lines)?.iter().enumerate() {
        let (one, endpoint, block) = decision(row).with_context(|| format!("line {}", n + 1))?;
        ensure!(*block_tokens.get_or_insert(block) == block, "line {}: another `block_tokens` than before", n + 1);
        raw.push(one);
        endpoints.push(endpoint);
    }
    let trace = Trace::new("recorded", block_tokens.unwrap_or(1), raw)?;
    // The trace is in the order of times, and says which line each request was.
    let endpoints = trace.requests.iter().map(|request| endpoints[request.prompt]).collect();
    Ok(Recording { trace, endpoints })
}

fn decision(row: &Value) -> anyhow::Result<(Raw, u16, u32)> {
    let endpoint = trace::number(row, "endpoint")?;
    ensure!(endpoint < ENDPOINTS_MAX, "`endpoint` is {endpoint}, {ENDPOINTS_MAX} or more");
    let block = trace::number(row, "block_tokens")?.max(1) as u32;
    let tokens = trace::number(row, "tokens")?.max(1) as u32;
    let keys = row["keys"].as_array().context("no list `keys`")?;
    let mut blocks =
        keys.iter().map(|key| key.as_u64().context("`keys`: not a number")).collect::<Result<Vec<_>, _>>()?;
    blocks.truncate((tokens / block) as usize);
    let request = Request {
        at: row["at"].as_f64().filter(|at| at.is_finite()).context("no number `at`")?,
        session: row["session"].as_u64().unwrap_or_else(|| blocks.first().copied().unwrap_or(0)),
        tokens,
        answer: trace::number(row, "answer")? as u32,
        prompt: 0,
    };
    Ok((Raw { request, blocks }, endpoint as u16, block))
}

/// Writes the decisions of a run.
pub fn write(to: &mut impl Write, trace: &Trace, outcome: &Outcome) -> anyhow::Result<()> {
    for (number, (request, served)) in trace.requests.iter().zip(&outcome.served).enumerate() {
        // A segment is below 2³² blocks, and its number below 2³²: each block has a number of its own.
        let keys = trace.path(number).iter().flat_map(|segment| {
            (0..trace.prefixes.blocks(*segment)).map(move |place| u64::from(segment.0) << 32 | u64::from(place))
        });
        let row = json!({
            "at": served.at, "tokens": request.tokens, "answer": request.answer, "block_tokens": trace.block_tokens,
            "keys": keys.collect::<Vec<_>>(), "endpoint": served.worker, "session": request.session,
        });
        writeln!(to, "{row}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(rows: &[Value]) -> Vec<String> {
        rows.iter().map(Value::to_string).collect()
    }

    #[test]
    fn lines_come_in_the_order_of_their_times_with_their_endpoints() {
        let row = |at: f64, endpoint: u16, keys: &[u64]| json!({"at": at, "tokens": 40, "answer": 3, "block_tokens": 16, "keys": keys, "endpoint": endpoint});
        let recording = parse(&lines(&[row(9.0, 3, &[1, 2, 3]), row(7.5, 1, &[1, 7])])).unwrap();
        assert_eq!(recording.endpoints, [1, 3]);
        let requests = &recording.trace.requests;
        assert_eq!([requests[0].at, requests[1].at], [0.0, 1.5]);
        assert_eq!(recording.trace.working_set_blocks(), 3, "1 is shared, and only two blocks of 40 tokens are full");
    }

    #[test]
    fn lines_that_say_too_little_are_named() {
        let check = |row: Value, expected: &str| {
            let error = format!("{:#}", parse(&lines(&[row])).err().expect("refused"));
            assert!(error.contains("line 1") && error.contains(expected), "{error}");
        };
        check(json!({"at": 0, "tokens": 1, "answer": 1, "block_tokens": 16, "keys": []}), "`endpoint`");
        check(json!({"tokens": 1, "answer": 1, "block_tokens": 16, "keys": [], "endpoint": 0}), "`at`");
        check(json!({"at": 0, "tokens": 1, "answer": 1, "block_tokens": 16, "endpoint": 0}), "`keys`");
    }
}
