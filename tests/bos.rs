//! Engines that put a begin-of-text token before texts though the model's files say no, and the reverse: the setting is
//! corrected by what they store, that is said, and prompts hit from then on.

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

/// The demo model's files, with or without a begin-of-text token before texts.
fn files(bos: bool) -> Scratch {
    let scratch = fleet::tokenizers();
    let model = scratch.path().join("kvlane__demo");
    let edit = |name: &str, change: &dyn Fn(&mut Value)| {
        let text = std::fs::read_to_string(model.join(name)).expect("it is staged");
        let mut json: Value = serde_json::from_str(&text).expect("JSON");
        change(&mut json);
        std::fs::write(model.join(name), json.to_string()).expect("written");
    };
    edit("tokenizer_config.json", &|config| config["bos_token"] = "<|endoftext|>".into());
    edit("tokenizer.json", &|tokenizer| {
        let tokens = tokenizer["added_tokens"].as_array().expect("a list");
        let id = tokens.iter().find(|token| token["content"] == "<|endoftext|>").expect("it is there")["id"].clone();
        let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
        if bos {
            tokenizer["post_processor"] = json!({
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, sequence("A")],
                "pair": [sequence("A"), sequence("B")],
                "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [id], "tokens": ["<|endoftext|>"]}},
            });
        }
    });
    scratch
}

fn prompt(number: usize) -> Value {
    let text = format!("Letter number {number} about a harbour, a lamp and a ship that came in late. ").repeat(12);
    json!({"model": "kvlane/demo", "prompt": text, "max_tokens": 1})
}

struct Scene {
    gateway: Gateway,
    engines: Vec<EngineProcess>,
    address: SocketAddr,
    _files: [Scratch; 2],
}

impl Scene {
    /// Two engines of the one kind behind a gateway with files of the other.
    fn start(engines_add: bool, rule_says: &str) -> Self {
        let (own, theirs) = (files(!engines_add), files(engines_add));
        let arguments = format!("--time-scale 0 --seed 0 --tokenizers {}", theirs.path().display());
        let engines: Vec<_> = (0..2).map(|_| EngineProcess::start(&arguments)).collect();
        let port = free_port();
        let rule = fleet::rule(port, &own, &engines);
        let changed = format!("kvBlockSize = 16\nkvColdstartSeedN = 0\nkvSpillRelief = false{rule_says}");
        let rule = rule.replace("kvBlockSize = 16", &changed);
        let gateway = Gateway::start(Options { config: rule, ..Options::default() });
        let scene = Scene { gateway, engines, address: ([127, 0, 0, 1], port).into(), _files: [own, theirs] };
        wait_for("both event streams are connected", || {
            let connected = |ep: &str| scene.gateway.metric("loxilb_kv_subscriber_connected", &[("ep_idx", ep)]);
            (connected("0") == Some(1.0) && connected("1") == Some(1.0)).then_some(())
        });
        scene.ask(&json!({"model": "kvlane/demo", "prompt": "short", "max_tokens": 1}));
        wait_for("the tokenizer is loaded", || {
            let status = scene.gateway.api("/status/ready").json();
            status["models"].as_array()?.iter().any(|model| model["state"] == "ready").then_some(())
        });
        scene
    }

    fn ask(&self, body: &Value) -> Value {
        let answer = client::post(self.address, "/v1/completions", body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()
    }

    fn hits(&self) -> f64 {
        self.gateway.metric_sum("loxilb_pd_kv_tier15_hits_total")
    }

    /// What is wrong with the endpoints, each thing once.
    fn faults(&self) -> Vec<(String, String)> {
        let endpoints = self.gateway.api("/config/ai/kv/parity").json()["endpoints"].clone();
        let details = endpoints.as_array().expect("a list").iter().flat_map(|e| e["details"].as_array().cloned());
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let mut faults: Vec<_> = details.flatten().map(|fault| (text(&fault["leg"]), text(&fault["detail"]))).collect();
        faults.sort();
        faults.dedup();
        faults
    }

    /// Asks with new prompts until the setting is corrected, and then with one of them again.
    fn is_corrected(&self, words: &[&str]) {
        let mut number = 0;
        let detail = wait_for("the setting is corrected", || {
            self.ask(&prompt(number));
            number += 1;
            self.faults().into_iter().find_map(|(leg, detail)| (leg == "bos").then_some(detail))
        });
        words.iter().for_each(|word| assert!(detail.contains(word), "{word:?} in {detail:?}"));
        assert!(self.gateway.log().contains("kvAddBos is corrected"), "{}", self.gateway.log());
        let fault = self.gateway.metric("kvlane_parity_endpoint_fault", &[("ep_idx", "0"), ("leg", "bos")]);
        assert_eq!(fault, Some(1.0));
        let diagnosis = self.gateway.doctor(&["--url", &self.gateway.url()]);
        let wrong = diagnosis.lines("wrong");
        assert!(wrong.iter().any(|(_, says, fix)| says == "bos" && fix == &detail), "{:#}", diagnosis.report);
        // Each was stored once; whoever has it is found by keys that begin as the engines' do.
        for (index, engine) in self.engines.iter().enumerate() {
            wait_for(&format!("the gateway knows the blocks of engine {index}"), || {
                (self.gateway.inventory(0, index as u32).len() == engine.keys().len()).then_some(())
            });
        }
        let before = self.hits();
        for again in 0..number {
            let usage = self.ask(&prompt(again))["usage"].clone();
            let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
            let tokens = usage["prompt_tokens"].as_u64().expect("a usage");
            assert!(cached + 64 > tokens, "prompt {again} went where its blocks are: {usage}");
        }
        assert_eq!(self.hits() - before, number as f64, "every one was predicted");
    }
}

#[test]
fn an_engine_that_adds_a_token_though_the_files_do_not() {
    let scene = Scene::start(true, "");
    scene.is_corrected(&["put a begin-of-text token", "kvlane__demo", "set kvAddBos to true"]);
}

#[test]
fn an_engine_that_adds_no_token_though_the_files_do() {
    let scene = Scene::start(false, "");
    scene.is_corrected(&["put no begin-of-text token", "tokenizer.json does", "set kvAddBos to false"]);
}

#[test]
fn a_rule_that_says_otherwise_is_corrected_too() {
    let scene = Scene::start(true, "\nkvAddBos = false");
    scene.is_corrected(&["kvAddBos is false", "set kvAddBos to true"]);
}
