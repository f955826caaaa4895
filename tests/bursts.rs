//! Equal cold prompts that come at once: what requests under way will have stored places those that follow.

mod common;

use std::net::SocketAddr;
use std::sync::{Arc, Barrier};

use common::engines::{Gate, Persona, StubEngine};
use common::gateway::{Gateway, Options};
use common::{client, fleet, free_port, wait_for};
use serde_json::json;

const ENGINES: usize = 8;
const PROMPTS: usize = 32;
/// Requests in flight up to which an endpoint gets more of what it is about to have.
const CLAIM_LOAD: usize = 8;
const HARD: &str = "sel = 4\nkvLbMode = \"hard\"\n";
/// What is in flight counts ahead for longer than the test takes.
const TTFT: &str = "kvLbMode = \"ttft\"\nkvClaimMs = 60000\n";
/// What `ttft` assumes before any answer has come: microseconds per prompt and per token.
const START_US: f64 = 20_000.0;
const TOKEN_US: f64 = 100.0;

/// A gateway of two shards over engines that answer nobody before the gate lets them, and have no cache events.
struct Burst {
    gateway: Gateway,
    engines: Vec<StubEngine>,
    gate: Arc<Gate>,
    address: SocketAddr,
    _tokenizers: common::Scratch,
}

impl Burst {
    fn start(options: &str) -> Self {
        let gate = Arc::new(Gate::default());
        let persona = || Persona { gate: Some(Arc::clone(&gate)), silent: true, ..Persona::default() };
        let engines: Vec<_> = (0..ENGINES).map(|_| StubEngine::start_as(persona())).collect();
        let tokenizers = fleet::tokenizers();
        let port = free_port();
        let mut config = format!(
            "[shards]\ncores = [0, 1]\n\n[tokenizers]\ndir = \"{}\"\n\n[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {port}\n\
             protocol = \"tcp\"\nkvExactMode = 3\nkvEngineType = \"vllm\"\nkvBlockSize = 16\n\
             kvNoneHashSeed = \"0\"\n{options}\n",
            tokenizers.path().display()
        );
        for StubEngine { address, event_port, .. } in &engines {
            config.push_str(&format!(
                "[[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = {}\nweight = 1\nkvZmqPort = {event_port}\n",
                address.port()
            ));
        }
        let gateway = Gateway::start(Options { config, ..Options::default() });
        let burst = Burst { gateway, engines, gate, address: ([127, 0, 0, 1], port).into(), _tokenizers: tokenizers };
        burst.wait_for_model();
        burst
    }

    /// The first request asks for the tokenizer; nobody waits for its answer.
    fn wait_for_model(&self) {
        let mut first = client::Connection::open(self.address).expect("the gateway accepts");
        let body = json!({"model": "kvlane/demo", "prompt": "Wake up."}).to_string();
        first.request("POST", "/v1/completions", &[], body.as_bytes()).expect("sent");
        wait_for("the model is loaded", || {
            let status = self.gateway.api("/status/ready").json();
            status["models"].as_array()?.iter().any(|model| model["state"] == "ready").then_some(())
        });
        wait_for("an engine has it", || (self.counts().iter().sum::<usize>() == 1).then_some(()));
    }

    /// Requests by engine.
    fn counts(&self) -> Vec<usize> {
        self.engines.iter().map(|engine| engine.seen().len()).collect()
    }

    /// Sends equal long prompts from as many connections at one instant; what each engine had of them before any was
    /// answered, and why each went where it went.
    fn send(&self) -> (Vec<usize>, Vec<String>) {
        let before = self.counts();
        // Far longer than a slice; the words differ, so that no block is like another.
        let words: Vec<String> = (0..9_000).map(|number| format!("stone-{number}")).collect();
        let body = json!({"model": "kvlane/demo", "prompt": words.join(" "), "max_tokens": 1}).to_string();
        let barrier = Barrier::new(PROMPTS);
        std::thread::scope(|scope| {
            let answers: Vec<_> = (0..PROMPTS)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        ask(self.address, &body)
                    })
                })
                .collect();
            let placed = wait_for("every prompt is at an engine", || {
                let counts: Vec<_> = self.counts().iter().zip(&before).map(|(now, before)| now - before).collect();
                (counts.iter().sum::<usize>() == PROMPTS).then_some(counts)
            });
            // One for the request that asked for the model.
            (0..=PROMPTS).for_each(|_| self.gate.release());
            (placed, answers.into_iter().map(|answer| answer.join().expect("no panic")).collect())
        })
    }
}

/// The evidence of one completion.
fn ask(address: SocketAddr, body: &str) -> String {
    let mut connection = client::Connection::open(address).expect("the gateway accepts");
    let headers = [("x-kvlane-explain", "1"), ("Connection", "close")];
    connection.request("POST", "/v1/completions", &headers, body.as_bytes()).expect("sent");
    let answer = connection.answer().expect("answered");
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.header("x-kvlane-route").expect("it was asked for").to_owned()
}

/// A value of the evidence.
fn value<'a>(evidence: &'a str, name: &str) -> &'a str {
    let value = evidence.split("; ").find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
    value.unwrap_or_else(|| panic!("no {name} in {evidence}"))
}

/// An endpoint is left only for another once it has eight in flight, so that all but the last two are full: two, because
/// both shards can turn to a new one in the same instant. And a shard, which knows its own requests, never gives one more
/// than eight, so that none gets more than sixteen of the two.
#[test]
fn equal_cold_prompts_at_once_go_to_a_handful_of_workers_and_are_no_hits() {
    let burst = Burst::start(HARD);
    let (counts, evidence) = burst.send();
    let used = counts.iter().filter(|count| **count > 0).count();
    let most_used = PROMPTS / CLAIM_LOAD + 2;
    assert!((2..=most_used).contains(&used), "{counts:?}");
    assert!(counts.iter().all(|count| *count <= 2 * CLAIM_LOAD), "{counts:?}");
    let gateway = &burst.gateway;
    assert_eq!(gateway.metric_sum("loxilb_pd_kv_tier15_hits_total"), 0.0, "nobody holds anything");
    let claims = gateway.metric_sum("kvlane_claim_decisions_total") as usize;
    assert!((PROMPTS - 2 * used..PROMPTS).contains(&claims), "{claims} of {PROMPTS} claimed, at {counts:?}");
    let claimed: Vec<_> = evidence.iter().filter(|evidence| value(evidence, "tier") == "claim").collect();
    assert_eq!(claimed.len(), claims, "{evidence:?}");
    for evidence in claimed {
        let (hits, prompt) = value(evidence, "tokens").split_once('/').expect("two numbers");
        assert_eq!((hits, value(evidence, "claimed")), ("0", prompt), "all of it, far beyond the slice that was keyed");
    }
}

#[test]
fn without_claims_equal_cold_prompts_spread_over_all_workers() {
    let burst = Burst::start(&format!("{HARD}kvClaimMs = 0"));
    let (counts, _) = burst.send();
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    assert_eq!(burst.gateway.metric_sum("kvlane_claim_decisions_total"), 0.0);
}

/// A number of the evidence.
fn number(evidence: &str, name: &str) -> f64 {
    value(evidence, name).parse().unwrap_or_else(|_| panic!("{name} is no number in {evidence}"))
}

/// A prompt of tens of thousands of tokens takes seconds, and to wait behind others that find it computed takes 20 ms each:
/// so a few workers compute it, and all others wait at one of those.
#[test]
fn equal_cold_prompts_at_once_spread_as_cost_demands_under_ttft() {
    let burst = Burst::start(TTFT);
    let (counts, evidence) = burst.send();
    let used = counts.iter().filter(|count| **count > 0).count();
    assert!((2..=6).contains(&used), "{counts:?}");
    assert!(counts.iter().all(|count| *count <= PROMPTS * 3 / 4), "{counts:?}");
    let (claimed, cold): (Vec<&String>, Vec<_>) = evidence.iter().partition(|one| value(one, "tier") == "claim");
    assert!(cold.len() >= used && claimed.len() >= PROMPTS - ENGINES, "{evidence:#?}");
    for one in &cold {
        assert_eq!((value(one, "tier"), value(one, "miss")), ("sel", "no_worker"), "{one}");
        let (_, tokens) = value(one, "tokens").split_once('/').expect("two numbers");
        let tokens: f64 = tokens.parse().expect("a number");
        // Whoever computes it found nobody who would have been sooner.
        assert!(number(one, "cost") > 0.999 * (START_US + tokens * TOKEN_US), "{one}");
    }
    for one in claimed {
        let (hits, tokens) = value(one, "tokens").split_once('/').expect("two numbers");
        assert_eq!((hits, value(one, "claimed")), ("0", tokens), "all of it, far beyond the slice that was keyed");
        let prompt_us = tokens.parse::<f64>().expect("a number") * TOKEN_US;
        let (own, _) = value(one, "load").split_once('/').expect("two numbers");
        // 20 ms for each in line and itself, and the prompts in line there that are being computed: whole ones, whose
        // lengths are guessed from their first slices, each time a little differently.
        let computing = number(one, "cost") - START_US * (own.parse::<f64>().expect("a number") + 1.0);
        let prompts = (computing / prompt_us).round();
        let off = (computing - prompts * prompt_us).abs();
        assert!(off < 0.1 * prompt_us * prompts.max(1.0), "{prompts} prompts in line: {one}");
    }
    let gateway = &burst.gateway;
    assert_eq!(gateway.metric_sum("loxilb_pd_kv_tier15_hits_total"), 0.0, "nobody holds anything");
    assert_eq!(gateway.metric_sum("kvlane_claim_decisions_total") as usize, PROMPTS - cold.len());
}

/// One request after the other, each another prompt: no worker has more reason than another.
#[test]
fn sequential_requests_of_equal_load_have_even_shares() {
    const REQUESTS: usize = 400;
    for options in ["kvLbMode = \"ttft\"\n", "kvLbMode = \"hard\"\n"] {
        let burst = Burst::start(options);
        (0..=REQUESTS).for_each(|_| burst.gate.release());
        let before = burst.counts();
        for number in 0..REQUESTS {
            let words: Vec<String> = (0..20).map(|word| format!("{number}-{word}")).collect();
            let body = json!({"model": "kvlane/demo", "prompt": words.join(" "), "max_tokens": 1}).to_string();
            assert_eq!(value(&ask(burst.address, &body), "miss"), "no_worker");
        }
        let counts: Vec<usize> = burst.counts().iter().zip(&before).map(|(now, before)| now - before).collect();
        let fair = REQUESTS as f64 / ENGINES as f64;
        let chi_squared: f64 = counts.iter().map(|count| (*count as f64 - fair).powi(2) / fair).sum();
        // Of 7 degrees of freedom one in a thousand is beyond 24.3.
        assert!(chi_squared < 24.3, "{options}: {counts:?}");
    }
}
