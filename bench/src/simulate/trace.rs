//! The traces as the simulation replays them: when, how long, which blocks, what answer.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use super::prefixes::{Prefixes, Segment};
use crate::ingest::fleet::Rng;

/// Tokens of a block in Mooncake's traces.
const MOONCAKE_BLOCK_TOKENS: u32 = 512;
/// Steps of their timestamps, inside which requests are spread evenly here.
const MOONCAKE_STEP: f64 = 3.0;
/// Block size that prompts without ids are given; none of them shares a block with another.
const AZURE_BLOCK_TOKENS: u32 = 64;
/// Seconds of sessions that are replayed. When sessions start the source does not tell: at random here, evenly over this
/// time. What would come after it is left out.
const SESSIONS_WINDOW: f64 = 3_600.0;
/// Seconds that a session stands still at most.
const GAP_MAX: f64 = 60.0;
/// Prompt and answer tokens of one request. Beyond it the file is refused.
const TOKENS_MAX: u64 = 4_000_000;
/// Requests of a trace. Beyond it the file is refused.
const REQUESTS_MAX: usize = 4_000_000;

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Seconds from the trace's start.
    pub at: f64,
    /// What a session hash would hash.
    pub session: u64,
    /// Tokens of the prompt, at least 1.
    pub tokens: u32,
    /// Tokens of the answer.
    pub answer: u32,
    /// Its prompt in the trace's [`Prefixes`].
    pub prompt: usize,
}

/// A trace, in the order of its times.
#[derive(Clone, Debug)]
pub struct Trace {
    pub name: String,
    pub block_tokens: u32,
    pub requests: Vec<Request>,
    /// The full blocks of the requests' prompts.
    pub prefixes: Prefixes,
}

/// A request with its blocks.
pub struct Raw {
    pub request: Request,
    pub blocks: Vec<u64>,
}

impl Trace {
    pub fn new(name: &str, block_tokens: u32, mut raw: Vec<Raw>) -> anyhow::Result<Trace> {
        ensure!(!raw.is_empty(), "the trace has no requests");
        let prefixes = Prefixes::new(raw.iter().map(|raw| raw.blocks.as_slice()));
        raw.iter_mut().enumerate().for_each(|(prompt, raw)| raw.request.prompt = prompt);
        let mut requests: Vec<Request> = raw.into_iter().map(|raw| raw.request).collect();
        requests.sort_by(|a, b| a.at.total_cmp(&b.at));
        let start = requests[0].at;
        requests.iter_mut().for_each(|request| request.at -= start);
        Ok(Trace { name: name.to_owned(), block_tokens, requests, prefixes })
    }

    /// The segments of a request's prompt.
    pub fn path(&self, request: usize) -> &[Segment] {
        self.prefixes.path(self.requests[request].prompt)
    }

    /// Seconds from the first request to the last.
    pub fn duration(&self) -> f64 {
        self.requests.last().map_or(0.0, |last| last.at)
    }

    /// Blocks that all distinct prompts of the trace fill.
    pub fn working_set_blocks(&self) -> u64 {
        self.prefixes.distinct_blocks()
    }

    /// Blocks that its largest request needs.
    pub fn largest_blocks(&self) -> u64 {
        let needed = |request: &Request| u64::from((request.tokens + request.answer).div_ceil(self.block_tokens));
        self.requests.iter().map(needed).max().unwrap_or(0)
    }
}

/// Reads a trace of any of the formats, told by its first bytes; plain, or gzipped (by its name's end). Sessions are
/// repeated `copies` times, as sessions of their own that start as many times as often.
pub fn read(path: &Path, copies: u32, seed: u64) -> anyhow::Result<Trace> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("trace");
    let name = name.split('.').next().unwrap_or(name);
    let lines = lines(path).with_context(|| format!("the trace {} cannot be read", path.display()))?;
    let first = lines.first().map_or("", String::as_str);
    let trace = if first.starts_with("TIMESTAMP") {
        azure(name, &lines)
    } else if first.contains("\"session\"") && first.contains("\"requests\"") {
        sessions(name, &lines, copies, seed)
    } else {
        mooncake(name, &lines)
    };
    trace.with_context(|| format!("{}", path.display()))
}

/// Reads the first so many seconds of one of Mooncake's traces.
pub fn read_beginning(path: &Path, seconds: f64) -> anyhow::Result<Trace> {
    let context = || format!("{}", path.display());
    let mut rows = lines(path).with_context(context)?;
    let at = |line: &String| -> anyhow::Result<f64> {
        let row: Value = serde_json::from_str(line)?;
        Ok(number(&row, "timestamp").context("--live needs one of Mooncake's traces")? as f64 / 1e3)
    };
    let first = rows.first().map(at).transpose().with_context(context)?.unwrap_or(0.0);
    let end = rows.iter().position(|line| at(line).is_ok_and(|at| at - first >= seconds)).unwrap_or(rows.len());
    rows.truncate(end);
    mooncake("mooncake_conversation, its beginning", &rows).with_context(context)
}

pub fn lines(path: &Path) -> std::io::Result<Vec<String>> {
    let file = File::open(path)?;
    let reader: Box<dyn Read> = if path.extension().is_some_and(|extension| extension == "gz") {
        Box::new(flate2::read::MultiGzDecoder::new(file))
    } else {
        Box::new(file)
    };
    BufReader::new(reader).lines().filter(|line| line.as_ref().map_or(true, |line| !line.trim().is_empty())).collect()
}

pub fn number(value: &Value, field: &str) -> anyhow::Result<u64> {
    let number = value[field].as_u64().with_context(|| format!("no number `{field}`"))?;
    ensure!(number <= TOKENS_MAX || field == "timestamp", "`{field}` is {number}, more than {TOKENS_MAX}");
    Ok(number)
}

pub fn each(lines: &[String]) -> anyhow::Result<Vec<Value>> {
    ensure!(lines.len() <= REQUESTS_MAX, "more than {REQUESTS_MAX} lines");
    let parse = |(n, line): (usize, &String)| serde_json::from_str(line).with_context(|| format!("line {}", n + 1));
    lines.iter().enumerate().map(parse).collect()
}

/// Mooncake: requests of one 3 s step are spread evenly inside it; the conversation is told by the second block, which
/// is the first that not all requests share.
fn mooncake(name: &str, lines: &[String]) -> anyhow::Result<Trace> {
    let mut raw = Vec::new();
    for (n, row) in each(lines)?.iter().enumerate() {
        let request = || -> anyhow::Result<Raw> {
            let tokens = number(row, "input_length")?.max(1) as u32;
            let ids = row["hash_ids"].as_array().context("no list `hash_ids`")?;
            let ids: Vec<u64> =
                ids.iter().map(|id| id.as_u64().context("`hash_ids`: not a number")).collect::<Result<_, _>>()?;
            ensure!(
                ids.len() as u32 == tokens.div_ceil(MOONCAKE_BLOCK_TOKENS),
                "{} hash_ids for {tokens} tokens",
                ids.len()
            );
            let full = (tokens / MOONCAKE_BLOCK_TOKENS) as usize;
            let request = Request {
                at: number(row, "timestamp")? as f64 / 1e3,
                session: ids.get(1).copied().unwrap_or(u64::MAX - n as u64),
                tokens,
                answer: number(row, "output_length")? as u32,
                prompt: 0,
            };
            Ok(Raw { request, blocks: ids[..full].to_vec() })
        };
        raw.push(request().with_context(|| format!("line {}", n + 1))?);
    }
    raw.sort_by(|a, b| a.request.at.total_cmp(&b.request.at));
    for group in raw.chunk_by_mut(|a, b| a.request.at == b.request.at) {
        let step = MOONCAKE_STEP / group.len() as f64;
        group.iter_mut().enumerate().for_each(|(place, raw)| raw.request.at += step * place as f64);
    }
    Trace::new(name, MOONCAKE_BLOCK_TOKENS, raw)
}

/// Agentic sessions, in an open loop: sessions start at random and go on at their recorded times, gaps cut to 60 s. Sessions with tools and system prompts of equal sizes are taken to share them.
fn sessions(name: &str, lines: &[String], copies: u32, seed: u64) -> anyhow::Result<Trace> {
    let mut rng = Rng::new(seed);
    let rows = each(lines)?;
    let (mut raw, mut base, mut block_tokens) = (Vec::new(), 0_u64, 0);
    let mut groups: HashMap<(u64, u64), Vec<u64>> = HashMap::new();
    for (n, session) in (0..copies).flat_map(|_| rows.iter()).enumerate() {
        let start = unit(&mut rng) * SESSIONS_WINDOW;
        block_tokens = number(session, "block")?.max(1) as u32;
        let sizes = (number(session, "tool_tokens")?, number(session, "system_tokens")?);
        let shared = ((sizes.0 + sizes.1) / u64::from(block_tokens)) as usize;
        let of_session = session_requests(session, n as u64, start, base, block_tokens)
            .with_context(|| format!("line {}", n % lines.len() + 1))?;
        let highest = of_session.iter().flat_map(|raw| &raw.blocks).max().copied().unwrap_or(base);
        let group = groups.entry(sizes).or_default();
        let mut alias = HashMap::new();
        for (place, id) in of_session.iter().take(1).flat_map(|raw| &raw.blocks).take(shared).enumerate() {
            if place == group.len() {
                group.push(*id);
            }
            alias.insert(*id, group[place]);
        }
        raw.extend(of_session.into_iter().map(|mut one| {
            one.blocks.iter_mut().for_each(|id| *id = alias.get(id).copied().unwrap_or(*id));
            one
        }));
        ensure!(raw.len() <= REQUESTS_MAX, "more than {REQUESTS_MAX} requests");
        base = highest + 1;
    }
    raw.retain(|raw| raw.request.at < SESSIONS_WINDOW);
    Trace::new(name, block_tokens, raw)
}

fn session_requests(session: &Value, number_of: u64, start: f64, base: u64, block: u32) -> anyhow::Result<Vec<Raw>> {
    let rows = session["requests"].as_array().context("no list `requests`")?;
    let (mut at, mut before, mut raw) = (start, None, Vec::new());
    for row in rows {
        let time = row["t"].as_f64().context("no number `t`")?;
        at += (time - before.unwrap_or(time)).clamp(0.0, GAP_MAX);
        before = Some(time);
        let tokens = number(row, "in")?.max(1) as u32;
        let mut blocks = Vec::new();
        for run in row["h"].as_array().context("no list `h`")? {
            let (Some(first), Some(count)) = (run[0].as_u64(), run[1].as_u64()) else { bail!("`h`: not pairs") };
            ensure!(count <= TOKENS_MAX, "`h`: a run of {count} blocks");
            blocks.extend((0..count).map(|place| base + first + place));
        }
        ensure!(blocks.len() as u32 == tokens / block, "{} blocks for {tokens} tokens of {block}", blocks.len());
        raw.push(Raw {
            request: Request { at, session: number_of, tokens, answer: number(row, "out")? as u32, prompt: 0 },
            blocks,
        });
    }
    Ok(raw)
}

/// Azure: arrival times and sizes; every prompt is another.
fn azure(name: &str, lines: &[String]) -> anyhow::Result<Trace> {
    ensure!(lines.len() <= REQUESTS_MAX, "more than {REQUESTS_MAX} lines");
    let (mut raw, mut id) = (Vec::new(), 0_u64);
    for (n, line) in lines.iter().enumerate().skip(1) {
        let request = || -> anyhow::Result<Request> {
            let mut fields = line.split(',');
            let mut field = || fields.next().context("three fields are expected");
            let (time, tokens, answer) = (field()?, field()?, field()?);
            let at = seconds_of(time).with_context(|| format!("`{time}` is not a time"))?;
            let tokens: u32 = tokens.trim().parse().context("ContextTokens")?;
            let answer: u32 = answer.trim().parse().context("GeneratedTokens")?;
            ensure!(u64::from(tokens.max(answer)) <= TOKENS_MAX, "more than {TOKENS_MAX} tokens");
            Ok(Request { at, session: n as u64, tokens: tokens.max(1), answer, prompt: 0 })
        };
        let request = request().with_context(|| format!("line {}", n + 1))?;
        let full = u64::from(request.tokens / AZURE_BLOCK_TOKENS);
        raw.push(Raw { request, blocks: (id..id + full).collect() });
        id += full;
    }
    Trace::new(name, AZURE_BLOCK_TOKENS, raw)
}

/// Seconds of a time of day, `… hh:mm:ss.fff`.
fn seconds_of(time: &str) -> Option<f64> {
    let (_, clock) = time.split_once(' ')?;
    let mut parts = clock.split(':');
    let (hours, minutes, seconds) = (parts.next()?, parts.next()?, parts.next()?);
    let seconds: f64 = seconds.parse().ok()?;
    Some(hours.parse::<f64>().ok()? * 3600.0 + minutes.parse::<f64>().ok()? * 60.0 + seconds)
}

/// A number from 0 up to 1.
pub fn unit(rng: &mut Rng) -> f64 {
    (rng.next() >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &[&str]) -> Vec<String> {
        text.iter().map(|line| (*line).to_owned()).collect()
    }

    #[test]
    fn mooncakes_steps_are_spread_and_partial_blocks_left_out() {
        let row = |at, tokens, ids: &str| {
            format!("{{\"timestamp\":{at},\"input_length\":{tokens},\"output_length\":9,\"hash_ids\":[{ids}]}}")
        };
        let trace = mooncake("m", &[row(3000, 1100, "0,1,2"), row(3000, 512, "0"), row(6000, 1024, "0,1")]).unwrap();
        let at: Vec<_> = trace.requests.iter().map(|request| request.at).collect();
        assert_eq!(at, [0.0, 1.5, 3.0]);
        assert_eq!(trace.prefixes.path(0), trace.prefixes.path(2), "the third of three blocks is not full");
        assert_eq!((trace.working_set_blocks(), trace.largest_blocks(), trace.duration()), (2, 3, 3.0));
        assert_eq!(trace.requests[0].session, trace.requests[2].session);
        let error = mooncake("m", &[row(0, 1100, "0,1")]).unwrap_err();
        assert!(format!("{error:#}").contains("line 1: 2 hash_ids for 1100 tokens"), "{error:#}");
    }

    #[test]
    fn sessions_share_their_system_prompts_and_nothing_else() {
        let session = |tools| {
            format!(
                "{{\"session\":\"s\",\"block\":64,\"tool_tokens\":{tools},\"system_tokens\":0,\"requests\":[\
                 {{\"t\":5.0,\"in\":200,\"out\":3,\"h\":[[1,3]]}},{{\"t\":500.0,\"in\":300,\"out\":3,\"h\":[[1,2],[9,2]]}}]}}"
            )
        };
        let trace = sessions("a", &[session(128), session(128), session(64)], 1, 1).unwrap();
        assert_eq!(trace.requests.len(), 6);
        // Two of three blocks shared by the first two sessions: 2 + 2 × (1 + 2); the third has 3 + 2 of its own.
        assert_eq!(trace.working_set_blocks(), 8 + 5);
        let of = |session| trace.requests.iter().filter(move |request| request.session == session);
        let times: Vec<_> = of(1).map(|request| request.at).collect();
        assert!((times[1] - times[0] - 60.0).abs() < 1e-9, "gaps are cut: {times:?}");
        assert!(sessions("a", &lines(&["{}"]), 1, 1).is_err());
    }

    #[test]
    fn azures_prompts_share_nothing() {
        let rows = lines(&[
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "2023-11-16 18:17:03.50,130,10",
            "2023-11-16 18:18:04.25,64,8",
        ]);
        let trace = azure("z", &rows).unwrap();
        assert_eq!((trace.requests[1].at, trace.requests[1].answer, trace.working_set_blocks()), (60.75, 8, 3));
        let error = azure("z", &lines(&["TIMESTAMP", "2023-11-16 18:17:03.50,x,10"])).unwrap_err();
        assert!(format!("{error:#}").contains("line 2: ContextTokens"), "{error:#}");
    }
}
