//! Engines that do not make their block keys as the rule says: the right diagnosis, and prompts that hit all the same.

mod common;

use std::net::SocketAddr;

use common::client;
use common::fleet::{self, EngineProcess};
use common::gateway::{Gateway, Options};
use common::{Scratch, free_port, wait_for};
use serde_json::{Value, json};

#[test]
fn engine_process() {
    fleet::run_as_engine();
}

/// Prompts of a test.
const PROMPTS: usize = 6;

fn prompt(number: usize) -> Value {
    let text =
        format!("Story number {number} about a river, a stone and a boat that nobody had seen before. ").repeat(20);
    json!({"model": "kvlane/demo", "prompt": text, "max_tokens": 1})
}

struct Fleet {
    gateway: Gateway,
    engines: Vec<EngineProcess>,
    address: SocketAddr,
    _tokenizers: Scratch,
}

impl Fleet {
    /// Two engines with these arguments behind the harness's rule (`sha256_cbor`, seed 0, blocks of 16), changed.
    fn start(engine: &str, change: impl FnOnce(String) -> String) -> Self {
        let engines: Vec<_> = (0..2).map(|_| EngineProcess::start(&format!("--time-scale 0 {engine}"))).collect();
        let tokenizers = fleet::tokenizers();
        let port = free_port();
        let rule = fleet::rule(port, &tokenizers, &engines);
        let rule = rule.replace("kvBlockSize = 16", "kvBlockSize = 16\nkvColdstartSeedN = 0\nkvSpillRelief = false");
        let gateway = Gateway::start(Options { config: change(rule), ..Options::default() });
        let fleet = Fleet { gateway, engines, address: ([127, 0, 0, 1], port).into(), _tokenizers: tokenizers };
        wait_for("both event streams are connected", || {
            (fleet.both("loxilb_kv_subscriber_connected") == 2.0).then_some(())
        });
        // The rule names no model: the first request for one asks for its tokenizer.
        fleet.ask(&json!({"model": "kvlane/demo", "prompt": "short", "max_tokens": 1}));
        wait_for("the tokenizer is loaded", || {
            let status = fleet.gateway.api("/status/ready").json();
            status["models"].as_array()?.iter().any(|model| model["state"] == "ready").then_some(())
        });
        fleet
    }

    fn metric(&self, name: &str, ep: &str) -> f64 {
        self.gateway.metric(name, &[("ep_idx", ep)]).unwrap_or(0.0)
    }

    fn both(&self, name: &str) -> f64 {
        self.metric(name, "0") + self.metric(name, "1")
    }

    fn ask(&self, body: &Value) -> Value {
        let answer = client::post(self.address, "/v1/completions", body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()
    }

    /// Waits until the gateway knows as many blocks of each engine as it holds.
    fn settle(&self) {
        for (index, engine) in self.engines.iter().enumerate() {
            wait_for(&format!("the gateway knows the blocks of engine {index}"), || {
                (self.gateway.inventory(0, index as u32).len() == engine.keys().len()).then_some(())
            });
        }
    }

    /// Sends all prompts, which are new, and then again; the second time each must be predicted to hit, and hit.
    fn prompts_hit_when_they_come_again(&self, numbers: std::ops::Range<usize>) {
        for number in numbers.clone() {
            self.ask(&prompt(number));
        }
        self.settle();
        let before = self.both("loxilb_pd_kv_tier15_hits_total");
        for number in numbers.clone() {
            let usage = self.ask(&prompt(number))["usage"].clone();
            let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
            let tokens = usage["prompt_tokens"].as_u64().expect("a usage");
            assert!(cached + 64 > tokens, "prompt {number} went where its blocks are: {usage}");
        }
        let hits = self.both("loxilb_pd_kv_tier15_hits_total") - before;
        assert_eq!(hits, numbers.len() as f64, "every one was predicted");
    }

    fn parity(&self) -> Vec<Value> {
        self.gateway.api("/config/ai/kv/parity").json()["parity"].as_array().expect("a list").clone()
    }

    /// Checks the verdict on every rank that has one, in the API, the metrics and the log.
    fn verdict_is(&self, verdict: &str, faults: &[&str], hints: &[&str], words: &[&str]) {
        let judged: Vec<_> = self.parity().into_iter().filter(|rank| rank["verdict"] != "believed").collect();
        assert!(!judged.is_empty(), "somebody has stored something");
        for rank in &judged {
            assert_eq!(rank["verdict"], verdict, "{rank}");
            assert_eq!((&rank["faults"], &rank["hints"]), (&json!(faults), &json!(hints)), "{rank}");
            let detail = rank["detail"].as_str().expect("a sentence");
            words.iter().for_each(|word| assert!(detail.contains(word), "{word:?} in {detail:?}"));
            assert_eq!((&rank["orphans"], &rank["complete"]), (&json!(0), &json!(true)), "{rank}");
            let ep = rank["ep_idx"].to_string();
            let series = [("ep_idx", ep.as_str()), ("verdict", verdict)];
            assert_eq!(self.gateway.metric("kvlane_parity_verdict", &series), Some(1.0));
            for fault in faults {
                assert_eq!(self.gateway.metric("kvlane_parity_fault", &[("ep_idx", &ep), ("leg", fault)]), Some(1.0));
            }
        }
        let said = self.gateway.log().lines().filter(|line| line.contains(&format!("finding={verdict}"))).count();
        assert_eq!(said, judged.len(), "the log says it once for each:\n{}", self.gateway.log());
    }
}

#[test]
fn an_engine_as_the_rule_says_is_exact() {
    let fleet = Fleet::start("--seed 0", |rule| rule);
    fleet.prompts_hit_when_they_come_again(0..PROMPTS);
    fleet.verdict_is("exact", &[], &[], &["sha256_cbor"]);
    for (index, engine) in fleet.engines.iter().enumerate() {
        assert_eq!(fleet.gateway.inventory(0, index as u32), engine.keys(), "these are the engine's own keys");
    }
}

#[test]
fn another_seed_is_named_and_prompts_hit_all_the_same() {
    let fleet = Fleet::start("--seed 42", |rule| rule);
    fleet.prompts_hit_when_they_come_again(0..PROMPTS);
    fleet.verdict_is("derived", &["seed"], &[], &["\"42\"", "kvNoneHashSeed"]);
}

#[test]
fn a_random_seed_is_named_and_prompts_hit_all_the_same() {
    let fleet = Fleet::start("--seed f3b1c0ffee --bytes-hashes", |rule| rule);
    fleet.prompts_hit_when_they_come_again(0..PROMPTS);
    fleet.verdict_is("derived", &["seed"], &[], &["PYTHONHASHSEED", "random"]);
}

#[test]
fn another_algorithm_is_named_where_the_rule_names_one_and_prompts_hit_all_the_same() {
    let fleet = Fleet::start("--seed 0 --algo xxhash_cbor", |rule| rule);
    fleet.prompts_hit_when_they_come_again(0..PROMPTS);
    fleet.verdict_is("derived", &["algorithm"], &[], &["kvHashAlgo is sha256_cbor", "xxhash_cbor"]);
}

#[test]
fn another_algorithm_is_taken_over_where_the_rule_names_none() {
    let fleet = Fleet::start("--seed 0 --algo xxhash_cbor", |rule| rule.replace("kvHashAlgo = \"sha256_cbor\"\n", ""));
    fleet.prompts_hit_when_they_come_again(0..PROMPTS);
    fleet.verdict_is("exact", &[], &["algorithm"], &["xxhash_cbor"]);
    for (index, engine) in fleet.engines.iter().enumerate() {
        assert_eq!(fleet.gateway.inventory(0, index as u32), engine.keys(), "these are the engine's own keys");
    }
}

#[test]
fn another_block_size_is_named_with_both_numbers_and_prompts_hit_all_the_same() {
    for (size, word) in [(32, "32 tokens"), (8, "8 tokens")] {
        let fleet = Fleet::start(&format!("--seed 0 --block-size {size}"), |rule| rule);
        fleet.prompts_hit_when_they_come_again(0..PROMPTS);
        fleet.verdict_is("derived", &["block_size"], &[], &["kvBlockSize is 16", word, "block_size_mismatch"]);
        assert!(fleet.parity().iter().any(|rank| rank["engine_block_tokens"] == size));
    }
}

#[test]
fn an_engine_that_comes_back_with_another_seed_is_judged_anew() {
    let mut fleet = Fleet::start("--seed 0", |rule| rule);
    fleet.prompts_hit_when_they_come_again(0..PROMPTS);
    for engine in &mut fleet.engines {
        engine.replace_argument("--seed 0", "--seed 7");
        engine.restart();
    }
    wait_for("the gateway has forgotten the old processes' blocks", || {
        (0..2).all(|index| fleet.gateway.inventory(0, index).is_empty()).then_some(())
    });
    wait_for("both endpoints are back", || {
        (fleet.both("kvlane_endpoint_up") == 2.0 && fleet.both("loxilb_kv_subscriber_connected") == 2.0).then_some(())
    });
    fleet.prompts_hit_when_they_come_again(PROMPTS..2 * PROMPTS);
    let judged = fleet.parity();
    assert!(judged.iter().all(|rank| rank["verdict"] == "derived" && rank["faults"] == json!(["seed"])), "{judged:?}");
}
