//! `bench prompt`: what it costs from a request body to the keys of its prompt, part by part.
//!
//! Three kinds of requests of each size: *warm*, one of 64 conversations plus a last message never sent before; *grown*,
//! a conversation plus an answer and a question since last time; *cold*, nothing of it seen before. A second column
//! repeats identical bodies, which says little. Then turn n of one conversation, a cold prompt that nobody holds (its
//! first slice), the longest slice of texts that are hard to cut, with the scan of each byte of their bodies, and chats of
//! tiny messages. Median of the rounds, one thread.

use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use loadgen::workload::Random;
use serde_json::{Value, json};
use shards::block::{Contract, FIXED_SEED, HashAlgo, NoneHash};
use shards::prompt::{Api, Begun, BodyView, Glimpse, Job, Keying, Model, PrefixCache, Rendering, Step};
use shards::service::{Engine, MissReason};

use crate::e2e::bodies::{CONVERSATIONS, Conversations};
use crate::files::ModelArgs;

/// Setup of the run.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Requests of each measurement
    #[arg(long, default_value_t = 640)]
    pub requests: usize,
    /// Bytes of a request's body
    #[arg(long, value_delimiter = ',', default_values_t = [16 * 1024, 128 * 1024, 500_000])]
    pub sizes: Vec<usize>,
    /// Tokenizer and template
    #[command(flatten)]
    pub model: ModelArgs,
    /// Bytes of the prefix cache
    #[arg(long, default_value_t = 256 * 1024 * 1024)]
    pub cache_bytes: usize,
    /// Bytes of the long prompts
    #[arg(long, default_value_t = 1_000_000)]
    pub long: usize,
}

/// Times of one request, ns.
#[derive(Clone, Copy, Debug, Default)]
struct Parts {
    view: u64,
    begin: u64,
    tokens: u64,
    /// On another thread.
    aside: u64,
    remember: u64,
    longest_slice: u64,
    keys: u64,
}

impl Parts {
    fn total(&self) -> u64 {
        self.view + self.begin + self.tokens + self.aside + self.remember
    }
}

struct Bench {
    model: Arc<Model>,
    contract: Contract,
    cache: PrefixCache,
}

impl Bench {
    fn new(args: &Args) -> anyhow::Result<Self> {
        let model = args.model.load()?;
        let contract = Contract::vllm(NoneHash::from_seed(HashAlgo::Sha256Cbor, FIXED_SEED));
        Ok(Bench { model, contract, cache: PrefixCache::new(args.cache_bytes) })
    }

    /// One request, held by some endpoint or by none.
    fn request(&mut self, api: Api, body: &[u8], held: bool) -> anyhow::Result<Parts> {
        let keying = Keying { contract: &self.contract, block_tokens: 16, lora: None };
        let mut parts = Parts::default();
        let start = Instant::now();
        let view = BodyView::parse(body).context("a body of our own is JSON")?;
        parts.view = ns(start.elapsed());
        let start = Instant::now();
        let rendering = Rendering::of(Engine::Vllm);
        let begun = Job::begin(api, &view, &self.model, rendering, keying, &mut self.cache).map_err(no_keys)?;
        let mut job = match begun {
            Begun::Job(job) => job,
            Begun::Pending(mut pending) => {
                let glimpse = pending.glimpse();
                parts.begin = ns(start.elapsed());
                if let Some(Glimpse { mut job, .. }) = glimpse {
                    drive(&mut job, held, &mut parts)?;
                    if !held {
                        return Ok(parts);
                    }
                }
                let start = Instant::now();
                while !pending.step() {}
                let task = pending.task();
                parts.begin += ns(start.elapsed());
                let start = Instant::now();
                let prepared = task.run().map_err(no_keys)?;
                parts.aside = ns(start.elapsed());
                let start = Instant::now();
                let job = pending.finish(prepared, &mut self.cache).map_err(no_keys)?;
                parts.begin += ns(start.elapsed());
                job
            }
        };
        if parts.begin == 0 {
            parts.begin = ns(start.elapsed());
        }
        drive(&mut job, held, &mut parts)?;
        let start = Instant::now();
        job.remember(&mut self.cache);
        drop(self.cache.take_garbage());
        parts.remember = ns(start.elapsed());
        Ok(parts)
    }
}

/// Makes all keys of a job that is held, the first slice's of one that is not.
fn drive(job: &mut Job<'_>, held: bool, parts: &mut Parts) -> anyhow::Result<()> {
    loop {
        let slice = Instant::now();
        let step = job.step().map_err(no_keys)?;
        parts.keys += std::hint::black_box(job.take_keys()).len() as u64;
        let time = ns(slice.elapsed());
        parts.tokens += time;
        parts.longest_slice = parts.longest_slice.max(time);
        if step == Step::Done || !held {
            return Ok(());
        }
    }
}

fn no_keys(reason: MissReason) -> anyhow::Error {
    anyhow::anyhow!("the prompt has no keys: {reason:?}")
}

fn ns(time: Duration) -> u64 {
    time.as_nanos() as u64
}

fn median(parts: &[Parts]) -> Parts {
    let of = |part: fn(&Parts) -> u64| {
        let mut all: Vec<u64> = parts.iter().map(part).collect();
        all.sort_unstable();
        all.get(all.len() / 2).copied().unwrap_or(0)
    };
    Parts {
        view: of(|p| p.view),
        begin: of(|p| p.begin),
        tokens: of(|p| p.tokens),
        aside: of(|p| p.aside),
        remember: of(|p| p.remember),
        longest_slice: parts.iter().map(|p| p.longest_slice).max().unwrap_or(0),
        keys: of(|p| p.keys),
    }
}

fn line(text: &mut String, what: &str, parts: &Parts, identical: Option<&Parts>) {
    let us = |ns: u64| ns as f64 / 1_000.0;
    let identical = identical.map_or("-".to_owned(), |parts| format!("{:.1}", us(parts.total())));
    // A string takes what is written to it.
    let _ = writeln!(
        text,
        "{what:<40} {:>9.1} {identical:>10} {:>8.1} {:>9.1} {:>9.1} {:>9.1} {:>8.1} {:>8} {:>10.1}",
        us(parts.total()),
        us(parts.view),
        us(parts.begin),
        us(parts.tokens),
        us(parts.aside),
        us(parts.remember),
        parts.keys,
        us(parts.longest_slice),
    );
}

/// Runs all measurements and returns their table.
///
/// # Errors
/// A model that cannot be loaded.
pub fn run(args: &Args) -> anyhow::Result<String> {
    let mut bench = Bench::new(args)?;
    let mut text = format!(
        "model {}, {} requests, cache {} bytes; µs, median (longest slice: of all)\n\
         {:<40} {:>9} {:>10} {:>8} {:>9} {:>9} {:>9} {:>8} {:>8} {:>10}\n",
        args.model.model,
        args.requests,
        args.cache_bytes,
        "",
        "total",
        "identical",
        "view",
        "render",
        "tokens",
        "aside",
        "store",
        "keys",
        "slice max"
    );
    for &bytes in &args.sizes {
        sized(&mut bench, args, bytes, &mut text)?;
    }
    turns(&mut bench, args, &mut text)?;
    long(&mut bench, args, &mut text)?;
    tiny(&mut bench, args, &mut text)?;
    let _ = writeln!(text, "{:?}", bench.cache.stats());
    Ok(text)
}

fn body_of(request: &[u8]) -> anyhow::Result<&[u8]> {
    let head = request.windows(4).position(|four| four == b"\r\n\r\n").context("a request has a head")?;
    Ok(&request[head + 4..])
}

fn sized(bench: &mut Bench, args: &Args, bytes: usize, text: &mut String) -> anyhow::Result<()> {
    let conversations = Conversations::new(&args.model.model, bytes);
    let mut random = Random::new(11);
    let (mut cold, mut same) = (Vec::new(), Vec::new());
    bench.cache = PrefixCache::new(args.cache_bytes);
    for number in 0..CONVERSATIONS {
        let request = conversations.request(number, &mut random);
        cold.push(bench.request(Api::ChatCompletions, body_of(&request)?, true)?);
    }
    let mut warm = Vec::new();
    for number in 0..args.requests {
        let request = conversations.request(number % CONVERSATIONS, &mut random);
        warm.push(bench.request(Api::ChatCompletions, body_of(&request)?, true)?);
    }
    for number in 0..args.requests {
        let request = conversations.request(number % 8, &mut Random::new((number % 8) as u64));
        same.push(bench.request(Api::ChatCompletions, body_of(&request)?, true)?);
    }
    let mut grown = Vec::new();
    for number in 0..args.requests.min(CONVERSATIONS * 4) {
        let request = conversations.request(number % CONVERSATIONS, &mut random);
        let mut chat: Value = serde_json::from_slice(body_of(&request)?)?;
        bench.request(Api::ChatCompletions, chat.to_string().as_bytes(), true)?;
        push(&mut chat, "assistant", &mut random, 400);
        push(&mut chat, "user", &mut random, 100);
        grown.push(bench.request(Api::ChatCompletions, chat.to_string().as_bytes(), true)?);
    }
    line(text, &format!("{bytes} B warm"), &median(&warm), Some(&median(&same[same.len() / 2..])));
    line(text, &format!("{bytes} B grown"), &median(&grown), None);
    line(text, &format!("{bytes} B cold"), &median(&cold), None);
    Ok(())
}

fn push(chat: &mut Value, role: &str, random: &mut Random, bytes: usize) {
    let content = loadgen::workload::words::text_of_bytes(random, bytes);
    if let Some(messages) = chat["messages"].as_array_mut() {
        messages.push(json!({ "role": role, "content": content }));
    }
}

/// One conversation turn by turn; what is printed is the median of 16 turns around each size.
fn turns(bench: &mut Bench, args: &Args, text: &mut String) -> anyhow::Result<()> {
    let mut random = Random::new(5);
    let mut chat = json!({ "model": args.model.model, "messages": [] });
    push(&mut chat, "system", &mut random, 2_000);
    push(&mut chat, "user", &mut random, 200);
    let mut seen = Vec::new();
    let mut printed: Vec<(usize, Parts)> = Vec::new();
    let mut sizes = [8_000, 32_000, 125_000, 250_000, 500_000].into_iter().peekable();
    while let Some(&size) = sizes.peek() {
        let body = chat.to_string();
        seen.push(bench.request(Api::ChatCompletions, body.as_bytes(), true)?);
        if body.len() > size {
            let turns = seen.len();
            let parts = median(&seen[turns.saturating_sub(16)..]);
            line(text, &format!("turn {turns}, {} B", body.len()), &parts, None);
            printed.push((body.len(), parts));
            sizes.next();
        }
        push(&mut chat, "assistant", &mut random, 1_500);
        push(&mut chat, "user", &mut random, 300);
    }
    if let [(less, first), .., (more, last)] = printed[..] {
        let per_byte = |of: fn(&Parts) -> u64| (of(&last) as f64 - of(&first) as f64) / (more - less) as f64;
        let _ = writeln!(
            text,
            "per byte of history: scan {:.2} ns (bound 0.6), look-up and render {:.2} ns, tokens {:.3} ns, store {:.3} ns",
            per_byte(|p| p.view),
            per_byte(|p| p.begin + p.aside),
            per_byte(|p| p.tokens),
            per_byte(|p| p.remember),
        );
    }
    Ok(())
}

/// Cold prompts that nobody holds, and texts that are hard to cut.
fn long(bench: &mut Bench, args: &Args, text: &mut String) -> anyhow::Result<()> {
    let mut random = Random::new(3);
    let mut totals = Vec::new();
    for bytes in [16 * 1024, args.long] {
        for (api, what) in [(Api::Completions, "completion"), (Api::ChatCompletions, "chat")] {
            let mut seen = Vec::new();
            for _ in 0..20 {
                let prompt = loadgen::workload::words::text_of_bytes(&mut random, bytes);
                let body = match api {
                    Api::Completions => json!({ "model": args.model.model, "prompt": prompt }),
                    _ => {
                        json!({ "model": args.model.model, "messages": [{ "role": "user", "content": prompt }] })
                    }
                };
                seen.push(bench.request(api, body.to_string().as_bytes(), false)?);
            }
            line(text, &format!("{bytes} B {what}, not held"), &median(&seen), None);
            totals.push(median(&seen).total() as f64);
        }
    }
    let _ = writeln!(
        text,
        "{} B not held costs {:.1} (completion) and {:.1} (chat) times 16 kB (bound 3)",
        args.long,
        totals[2] / totals[0],
        totals[3] / totals[1],
    );
    let cjk: String = (0..args.long / 3).filter_map(|_| char::from_u32(0x4E00 + random.below(6_000) as u32)).collect();
    let base64: String = (0..args.long).map(|_| char::from(BASE64[random.below(64)])).collect();
    let prose = loadgen::workload::words::text_of_bytes(&mut random, args.long);
    let escaped: String = cjk.chars().map(|c| format!("\\u{:04x}", u32::from(c))).collect();
    for (what, prompt) in [
        ("prose", prose),
        ("one letter", "a".repeat(args.long)),
        ("spaces", " ".repeat(args.long)),
        ("newlines", "\n".repeat(args.long)),
        ("CJK, no punctuation", cjk),
        ("base64", base64),
    ] {
        let body = json!({ "model": args.model.model, "prompt": prompt }).to_string();
        long_text(bench, args, what, &body, text)?;
    }
    let body = format!(r#"{{"model":{},"prompt":"{escaped}"}}"#, json!(args.model.model));
    long_text(bench, args, "CJK as escapes", &body, text)
}

fn long_text(bench: &mut Bench, args: &Args, what: &str, body: &str, text: &mut String) -> anyhow::Result<()> {
    bench.cache = PrefixCache::new(args.cache_bytes);
    let parts = bench.request(Api::Completions, body.as_bytes(), true)?;
    line(text, &format!("{} B {what}, {:.2} ns/B", args.long, parts.view as f64 / body.len() as f64), &parts, None);
    Ok(())
}

/// Chats of many messages of one letter, which are rendered in place up to a number of them.
fn tiny(bench: &mut Bench, args: &Args, text: &mut String) -> anyhow::Result<()> {
    for count in [15, 63, 127, 255] {
        let mut seen = Vec::new();
        for number in 0..20 {
            let messages: Vec<Value> = (0..count)
                .map(|n| (if n % 2 == 0 { "user" } else { "assistant" }, (number * 1_000 + n).to_string()))
                .map(|(role, content)| json!({ "role": role, "content": content }))
                .collect();
            let body = json!({ "model": args.model.model, "messages": messages }).to_string();
            seen.push(bench.request(Api::ChatCompletions, body.as_bytes(), true)?);
        }
        line(text, &format!("{count} tiny messages"), &median(&seen), None);
    }
    Ok(())
}

const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_run_measures_every_kind_of_request() {
        let args =
            Args { requests: 8, sizes: vec![4_000], model: crate::files::demo(), cache_bytes: 16 << 20, long: 20_000 };
        let text = run(&args).unwrap();
        for what in [
            "4000 B warm",
            "4000 B grown",
            "4000 B cold",
            "20000 B chat, not held",
            "20000 B base64",
            "127 tiny messages",
        ] {
            assert!(text.contains(what), "{what} is missing:\n{text}");
        }
        assert!(text.contains("differences: 0"), "{text}");
    }
}
