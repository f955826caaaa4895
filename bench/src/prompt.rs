//! `bench prompt`: what it costs from a request body to the keys of its prompt, part by part.
//!
//! Three kinds of requests of each size: *warm*, one of 64 conversations plus a last message never sent before; *grown*,
//! a conversation plus an answer and a question since last time; *cold*, nothing of it seen before. A second column
//! repeats identical bodies, which says little. Then turn n of one conversation, a cold prompt that nobody holds (its
//! first slice), and the longest slice of texts that are hard to cut. Median of the rounds, one thread.

use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;
use loadgen::assets::{self, DEMO_MODEL};
use loadgen::workload::Random;
use serde_json::{Value, json};
use shards::block::{Contract, FIXED_SEED, HashAlgo, NoneHash};
use shards::prompt::{Api, BodyView, Job, Keying, Model, ModelFiles, PrefixCache, Rendering, Step, slug};
use shards::service::Engine;

use crate::e2e::bodies::{CONVERSATIONS, Conversations};

/// Setup of the run.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Requests of each measurement
    #[arg(long, default_value_t = 640)]
    pub requests: usize,
    /// Bytes of a request's body
    #[arg(long, value_delimiter = ',', default_values_t = [16 * 1024, 128 * 1024, 500_000])]
    pub sizes: Vec<usize>,
    /// Directory with the model's tokenizer; default: the demo's
    #[arg(long, requires = "model", value_name = "DIR")]
    pub tokenizers: Option<PathBuf>,
    /// Model named in the requests
    #[arg(long, default_value = DEMO_MODEL)]
    pub model: String,
    /// Chat template that overrides the model's own
    #[arg(long, value_name = "FILE")]
    pub template: Option<PathBuf>,
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
    remember: u64,
    longest_slice: u64,
    keys: u64,
}

impl Parts {
    fn total(&self) -> u64 {
        self.view + self.begin + self.tokens + self.remember
    }
}

struct Bench {
    model: Arc<Model>,
    contract: Contract,
    cache: PrefixCache,
}

impl Bench {
    fn new(args: &Args) -> anyhow::Result<Self> {
        let slug = slug(&args.model).context("--model: not a model's name")?;
        let mut files = ModelFiles { slug: slug.clone(), ..ModelFiles::default() };
        match &args.tokenizers {
            None => {
                files.tokenizer = assets::DEMO_TOKENIZER.to_owned();
                files.config = Some(assets::DEMO_TOKENIZER_CONFIG.to_owned());
            }
            Some(directory) => {
                let path = directory.join(&slug);
                let read = |name: &str| std::fs::read_to_string(path.join(name));
                files.tokenizer = read("tokenizer.json").with_context(|| format!("{}", path.display()))?;
                files.config = read("tokenizer_config.json").ok();
                files.template = read("chat_template.jinja").ok();
            }
        }
        if let Some(path) = &args.template {
            files.template = Some(std::fs::read_to_string(path).with_context(|| format!("{}", path.display()))?);
        }
        let model = Arc::new(Model::load(&files, SystemTime::now)?);
        let contract = Contract::vllm(NoneHash::from_seed(HashAlgo::Sha256Cbor, FIXED_SEED));
        Ok(Bench { model, contract, cache: PrefixCache::new(args.cache_bytes) })
    }

    /// One request; `slices` bounds its slices, as when no endpoint holds its blocks.
    fn request(&mut self, api: Api, body: &[u8], slices: usize) -> anyhow::Result<Parts> {
        let keying = Keying { contract: &self.contract, block_tokens: 16, lora: None };
        let mut parts = Parts::default();
        let start = Instant::now();
        let view = BodyView::parse(body).context("a body of our own is JSON")?;
        let viewed = Instant::now();
        let job = Job::of_view(api, &view, &self.model, Rendering::of(Engine::Vllm), keying, &mut self.cache);
        let mut job = job.map_err(|reason| anyhow::anyhow!("the prompt has no keys: {reason:?}"))?;
        let begun = Instant::now();
        for _ in 0..slices {
            let slice = Instant::now();
            let step = job.step().map_err(|reason| anyhow::anyhow!("the prompt has no keys: {reason:?}"))?;
            parts.keys += std::hint::black_box(job.take_keys()).len() as u64;
            parts.longest_slice = parts.longest_slice.max(ns(slice.elapsed()));
            if step == Step::Done {
                break;
            }
        }
        let keyed = Instant::now();
        job.remember(&mut self.cache);
        parts.remember = ns(keyed.elapsed());
        (parts.view, parts.begin, parts.tokens) = (ns(viewed - start), ns(begun - viewed), ns(keyed - begun));
        Ok(parts)
    }
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
        "{what:<28} {:>9.1} {identical:>10} {:>8.1} {:>9.1} {:>9.1} {:>8.1} {:>8} {:>10.1}",
        us(parts.total()),
        us(parts.view),
        us(parts.begin),
        us(parts.tokens),
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
         {:<28} {:>9} {:>10} {:>8} {:>9} {:>9} {:>8} {:>8} {:>10}\n",
        args.model,
        args.requests,
        args.cache_bytes,
        "",
        "total",
        "identical",
        "view",
        "render",
        "tokens",
        "store",
        "keys",
        "slice max"
    );
    for &bytes in &args.sizes {
        sized(&mut bench, args, bytes, &mut text)?;
    }
    turns(&mut bench, args, &mut text)?;
    long(&mut bench, args, &mut text)?;
    let _ = writeln!(text, "{:?}", bench.cache.stats());
    Ok(text)
}

fn body_of(request: &[u8]) -> anyhow::Result<&[u8]> {
    let head = request.windows(4).position(|four| four == b"\r\n\r\n").context("a request has a head")?;
    Ok(&request[head + 4..])
}

fn sized(bench: &mut Bench, args: &Args, bytes: usize, text: &mut String) -> anyhow::Result<()> {
    let conversations = Conversations::new(&args.model, bytes);
    let mut random = Random::new(11);
    let (mut cold, mut same) = (Vec::new(), Vec::new());
    bench.cache = PrefixCache::new(args.cache_bytes);
    for number in 0..CONVERSATIONS {
        let request = conversations.request(number, &mut random);
        cold.push(bench.request(Api::ChatCompletions, body_of(&request)?, usize::MAX)?);
    }
    let mut warm = Vec::new();
    for number in 0..args.requests {
        let request = conversations.request(number % CONVERSATIONS, &mut random);
        warm.push(bench.request(Api::ChatCompletions, body_of(&request)?, usize::MAX)?);
    }
    for number in 0..args.requests {
        let request = conversations.request(number % 8, &mut Random::new((number % 8) as u64));
        same.push(bench.request(Api::ChatCompletions, body_of(&request)?, usize::MAX)?);
    }
    let mut grown = Vec::new();
    for number in 0..args.requests.min(CONVERSATIONS * 4) {
        let request = conversations.request(number % CONVERSATIONS, &mut random);
        let mut chat: Value = serde_json::from_slice(body_of(&request)?)?;
        bench.request(Api::ChatCompletions, chat.to_string().as_bytes(), usize::MAX)?;
        push(&mut chat, "assistant", &mut random, 400);
        push(&mut chat, "user", &mut random, 100);
        grown.push(bench.request(Api::ChatCompletions, chat.to_string().as_bytes(), usize::MAX)?);
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
    let mut chat = json!({ "model": args.model, "messages": [] });
    push(&mut chat, "system", &mut random, 2_000);
    push(&mut chat, "user", &mut random, 200);
    let mut seen = Vec::new();
    let mut sizes = [8_000, 32_000, 125_000, 250_000, 500_000].into_iter().peekable();
    while let Some(&size) = sizes.peek() {
        let body = chat.to_string();
        seen.push(bench.request(Api::ChatCompletions, body.as_bytes(), usize::MAX)?);
        if body.len() > size {
            let turns = seen.len();
            line(text, &format!("turn {turns}, {} B", body.len()), &median(&seen[turns.saturating_sub(16)..]), None);
            sizes.next();
        }
        push(&mut chat, "assistant", &mut random, 1_500);
        push(&mut chat, "user", &mut random, 300);
    }
    Ok(())
}

/// Cold prompts that nobody holds, and texts that are hard to cut.
fn long(bench: &mut Bench, args: &Args, text: &mut String) -> anyhow::Result<()> {
    let mut random = Random::new(3);
    for bytes in [16 * 1024, args.long] {
        for (api, what) in [(Api::Completions, "completion"), (Api::ChatCompletions, "chat")] {
            let mut seen = Vec::new();
            for _ in 0..20 {
                let prompt = loadgen::workload::words::text_of_bytes(&mut random, bytes);
                let body = match api {
                    Api::Completions => json!({ "model": args.model, "prompt": prompt }),
                    _ => {
                        json!({ "model": args.model, "messages": [{ "role": "user", "content": prompt }] })
                    }
                };
                seen.push(bench.request(api, body.to_string().as_bytes(), 1)?);
            }
            line(text, &format!("{bytes} B {what}, not held"), &median(&seen), None);
        }
    }
    let cjk: String = (0..args.long / 3).filter_map(|_| char::from_u32(0x4E00 + random.below(6_000) as u32)).collect();
    let base64: String = (0..args.long).map(|_| char::from(BASE64[random.below(64)])).collect();
    let prose = loadgen::workload::words::text_of_bytes(&mut random, args.long);
    for (what, prompt) in [
        ("prose", prose),
        ("one letter", "a".repeat(args.long)),
        ("spaces", " ".repeat(args.long)),
        ("newlines", "\n".repeat(args.long)),
        ("CJK, no punctuation", cjk),
        ("base64", base64),
    ] {
        let body = json!({ "model": args.model, "prompt": prompt }).to_string();
        bench.cache = PrefixCache::new(args.cache_bytes);
        let parts = bench.request(Api::Completions, body.as_bytes(), usize::MAX)?;
        line(text, &format!("{} B {what}", args.long), &parts, None);
    }
    Ok(())
}

const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_run_measures_every_kind_of_request() {
        let args = Args {
            requests: 8,
            sizes: vec![4_000],
            tokenizers: None,
            model: DEMO_MODEL.into(),
            template: None,
            cache_bytes: 16 << 20,
            long: 20_000,
        };
        let text = run(&args).unwrap();
        for what in ["4000 B warm", "4000 B grown", "4000 B cold", "20000 B chat, not held", "20000 B base64"] {
            assert!(text.contains(what), "{what} is missing:\n{text}");
        }
        assert!(text.contains("differences: 0"), "{text}");
    }
}
