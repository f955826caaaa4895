//! Engines that do not make their block keys as the rule says: the right diagnosis, and prompts that hit all the same.

mod common;

use std::net::SocketAddr;

use common::client;
use common::fleet::{self, EngineProcess};
use common::gateway::{Diagnosis, Gateway, Options};
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
        let environment = vec![("LOXILB_KV_ZERO_HIT_N", "5".to_owned())];
        let gateway = Gateway::start(Options { config: change(rule), environment, ..Options::default() });
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

    /// What is wrong with the endpoints as wholes, in the API and the metrics.
    fn endpoint_faults(&self) -> Vec<Value> {
        let endpoints = self.gateway.api("/config/ai/kv/parity").json()["endpoints"].clone();
        let faults: Vec<Value> = endpoints.as_array().expect("a list").iter().map(|e| e["faults"].clone()).collect();
        for (ep, fault) in faults.iter().enumerate() {
            let ep = ep.to_string();
            for leg in fault.as_array().expect("a list").iter().filter_map(Value::as_str) {
                let shown = self.gateway.metric("kvlane_parity_endpoint_fault", &[("ep_idx", &ep), ("leg", leg)]);
                // Between the two answers the state may change: then the next look finds both.
                if shown != Some(1.0) {
                    return Vec::new();
                }
            }
        }
        faults
    }

    fn metric(&self, name: &str, ep: &str) -> f64 {
        self.gateway.metric(name, &[("ep_idx", ep)]).unwrap_or(0.0)
    }

    fn both(&self, name: &str) -> f64 {
        self.metric(name, "0") + self.metric(name, "1")
    }

    fn ask(&self, body: &Value) -> Value {
        let path = if body.get("messages").is_some() { "/v1/chat/completions" } else { "/v1/completions" };
        let answer = client::post(self.address, path, body);
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
    let found = fleet.gateway.doctor(&["--url", &fleet.gateway.url()]);
    assert_eq!((found.code, found.wrong()), (Some(0), vec![]), "{:#}", found.report);
    for (index, engine) in fleet.engines.iter().enumerate() {
        assert_eq!(fleet.gateway.inventory(0, index as u32), engine.keys(), "these are the engine's own keys");
    }
}

#[test]
fn another_seed_is_named_and_prompts_hit_all_the_same() {
    let fleet = Fleet::start("--seed 42", |rule| rule);
    fleet.prompts_hit_when_they_come_again(0..PROMPTS);
    fleet.verdict_is("derived", &["seed"], &[], &["\"42\"", "kvNoneHashSeed"]);
    fleet.gateway.doctor(&[]).only("seed", &["\"42\"", "kvNoneHashSeed"]);
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
    fleet.gateway.doctor(&[]).only("algorithm", &["kvHashAlgo is sha256_cbor", "xxhash_cbor"]);
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
        fleet
            .gateway
            .doctor(&[])
            .only("block_size", &["kvBlockSize is 16", word, &format!("set kvBlockSize to {size}")]);
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

fn chat(number: usize) -> Value {
    let text = format!("Question number {number} about a river, a stone and a boat. ").repeat(20);
    let messages = json!([{"role": "user", "content": text}]);
    json!({"model": "kvlane/demo", "messages": messages, "max_tokens": 1})
}

#[test]
fn another_chat_template_shows_by_use_and_clears_by_itself() {
    let template = Scratch::new("template");
    let file = template.path().join("other.jinja");
    std::fs::write(&file, "{% for m in messages %}<other>{{ m.role }}: {{ m.content }}{% endfor %}").expect("writable");
    let line = format!("kvBlockSize = 16\nkvChatTemplate = \"{}\"", file.display());
    let fleet = Fleet::start("--seed 0", |rule| rule.replace("kvBlockSize = 16", &line));
    let alarms = |leg: &str| fleet.parity().iter().filter(|rank| rank["by_use"]["alarm"]["leg"] == leg).count();
    let sum = |name: &str| fleet.parity().iter().filter_map(|rank| rank["by_use"][name].as_u64()).sum::<u64>();
    for number in 0..24 {
        fleet.ask(&chat(number));
        if number % 4 == 3 {
            // A sample of predictions is taken: the next prompts wait until these are judged.
            wait_for("these are judged", || (sum("missed") > number as u64).then_some(()));
        }
    }
    wait_for("both endpoints have their alarm", || (alarms("template") == 2).then_some(()));
    assert_eq!(fleet.gateway.metric("kvlane_parity_alarm", &[("leg", "template")]), Some(1.0));
    let rank = fleet.parity().remove(0);
    assert_eq!((&rank["verdict"], &rank["faults"]), (&json!("exact"), &json!([])), "the keys themselves are right");
    assert!(fleet.gateway.log().contains("kvChatTemplate"), "the log says what to compare");
    let endpoint = fleet.gateway.api("/config/ai/kv/parity").json()["endpoints"][0].clone();
    assert_eq!(endpoint["faults"], json!(["template"]), "{endpoint}");
    fleet.gateway.doctor(&[]).only("template", &["template: token 0", "kvChatTemplate", "other.jinja"]);
    assert_eq!(sum("fulfilled"), 0);

    // Prompts that come again hit nothing, which the watchdog sees.
    assert_eq!(fleet.gateway.metric("loxilb_pd_kv_zero_hit_watchdog_total", &[]), Some(0.0), "each came once");
    (0..5).for_each(|number| _ = fleet.ask(&chat(number)));
    assert_eq!(fleet.gateway.metric("loxilb_pd_kv_zero_hit_watchdog_total", &[]), Some(1.0));

    // Prompts without a template are right: the first of them clears the alarm.
    for number in 0..4 {
        fleet.ask(&prompt(number));
    }
    wait_for("no alarm is left", || (alarms("template") == 0).then_some(()));
    assert!(sum("fulfilled") > 0);
}

#[test]
fn an_engine_that_serves_its_model_under_another_name_is_named_with_both_and_clears_by_itself() {
    let engines: Vec<_> = (0..2).map(|_| EngineProcess::start("--time-scale 0 --fault model=acme/renamed")).collect();
    let tokenizers = fleet::tokenizers();
    let port = free_port();
    let config = fleet::rule(port, &tokenizers, &engines);
    let gateway = Gateway::start(Options { config, ..Options::default() });
    let address = ([127, 0, 0, 1], port).into();
    let fleet = Fleet { gateway, engines, address, _tokenizers: tokenizers };
    let renamed = |number| json!({"model": "acme/renamed", "prompt": prompt(number)["prompt"], "max_tokens": 1});
    let named = json!(["model"]);
    wait_for("both endpoints have the fault", || {
        (fleet.endpoint_faults() == [named.clone(), named.clone()]).then_some(())
    });
    fleet.ask(&renamed(0));
    assert_eq!(
        fleet.gateway.metric("loxilb_pd_kv_tier15_miss_reason_total", &[("reason", "tokenizer_missing")]),
        Some(1.0)
    );
    let endpoint = fleet.gateway.api("/config/ai/kv/parity").json()["endpoints"][0].clone();
    let detail = endpoint["details"][0]["detail"].as_str().expect("a sentence").to_owned();
    for word in ["\"acme/renamed\"", "kvlane__demo", "acme__renamed", "--served-model-name kvlane/demo"] {
        assert!(detail.contains(word), "{word:?} in {detail:?}");
    }
    assert_eq!(fleet.gateway.log().matches("parity: the engine serves").count(), 2, "once for each");
    fleet.gateway.doctor(&[]).only("model", &["\"acme/renamed\"", "kvlane__demo", "acme__renamed"]);
    let asked = Diagnosis::of(&["--url", &fleet.gateway.url()]);
    asked.only("endpoint", &["model", "acme__renamed"]);

    let directory = fleet._tokenizers.path();
    std::os::unix::fs::symlink("kvlane__demo", directory.join("acme__renamed")).expect("the fix that is proposed");
    wait_for("the fault is over", || (fleet.endpoint_faults() == [json!([]), json!([])]).then_some(()));
    for number in 1..4 {
        fleet.ask(&renamed(number));
    }
    fleet.settle();
    (1..4).for_each(|number| _ = fleet.ask(&renamed(number)));
    assert!(fleet.both("loxilb_pd_kv_tier15_hits_total") >= 3.0, "prompts hit");
    let found = fleet.gateway.doctor(&["--url", &fleet.gateway.url()]);
    assert_eq!((found.code, found.wrong()), (Some(0), vec![]), "{:#}", found.report);
}

#[test]
fn an_engine_that_is_busy_and_announces_nothing_is_reported_until_it_does() {
    let fleet = Fleet::start("--seed 0 --fault silence", |rule| rule);
    assert!(fleet.endpoint_faults().iter().all(|faults| *faults == json!([])), "it may be idle");
    let silent = json!(["silent"]);
    let mut number = 0;
    wait_for("both endpoints are reported", || {
        fleet.ask(&prompt(number));
        number += 1;
        (fleet.endpoint_faults() == [silent.clone(), silent.clone()]).then_some(())
    });
    assert_eq!(fleet.gateway.log().matches("announces none of their blocks").count(), 2, "once for each");
    fleet.gateway.doctor(&["--probe", "--wait", "1"]).only("events", &["nothing published", "enable_kv_cache_events"]);
    for engine in &fleet.engines {
        client::post(engine.address, "/debug/fault", &json!({"fault": "silence", "value": false}));
    }
    wait_for("it is over", || {
        fleet.ask(&prompt(number));
        number += 1;
        (fleet.endpoint_faults() == [json!([]), json!([])]).then_some(())
    });
}
