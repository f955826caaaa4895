//! The routing cascade through a whole gateway: ranks, evidence, ids, models.

mod common;

use std::net::SocketAddr;

use common::client::{Answer, Connection};
use common::engines::StubEngine;
use common::fleet::{self, EngineProcess};
use common::gateway::{Gateway, Options};
use common::{client, free_port, wait_for};
use serde_json::{Value, json};

#[test]
fn engine_process() {
    fleet::run_as_engine();
}

const MODEL: &str = "kvlane/demo";

fn local(port: u16) -> SocketAddr {
    ([127, 0, 0, 1], port).into()
}

/// A completion with more headers, on a connection of its own.
fn ask(port: u16, headers: &[(&str, &str)], body: &Value) -> Answer {
    let mut connection = Connection::open(local(port)).expect("the gateway accepts");
    let headers = [&[("Content-Type", "application/json")], headers].concat();
    connection.request("POST", "/v1/completions", &headers, body.to_string().as_bytes()).expect("sent");
    let answer = connection.answer().expect("answered");
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer
}

fn completion(prompt: &str) -> Value {
    json!({"model": MODEL, "prompt": prompt, "max_tokens": 1})
}

fn cached(answer: &Answer) -> u64 {
    answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
}

/// A value of the evidence header.
fn evidence<'a>(answer: &'a Answer, name: &str) -> Option<&'a str> {
    let text = answer.header("x-kvlane-route")?;
    text.split("; ").find_map(|part| part.strip_prefix(name)?.strip_prefix('='))
}

/// Engines with four ranks each, and a gateway over them that knows their release and has their model.
struct Ranks {
    engines: Vec<EngineProcess>,
    gateway: Gateway,
    port: u16,
    _tokenizers: common::Scratch,
}

impl Ranks {
    fn start(wire: &str) -> Self {
        let engines: Vec<_> =
            (0..2).map(|_| EngineProcess::start_ranks(4, &format!("--wire {wire} --time-scale 0"))).collect();
        let tokenizers = fleet::tokenizers();
        let port = free_port();
        let config = fleet::rule(port, &tokenizers, &engines)
            .replace("kvBlockSize = 16", "kvBlockSize = 16\nkvDpRankCount = 4\nrouteHeader = true");
        let environment = vec![("LOXILB_KV_COLDSTART_SEED_N", "0".to_owned())];
        let gateway = Gateway::start(Options { config, environment, ..Options::default() });
        let ranks = Ranks { engines, gateway, port, _tokenizers: tokenizers };
        wait_for("the engines have said their release, and their model is loaded", || {
            let status = ranks.gateway.api("/status/ready").json();
            let known =
                |index: usize| status["engines"][index]["version"].as_str().is_some_and(|v| v.starts_with(wire));
            let loaded = status["models"].as_array()?.iter().any(|model| model["state"] == "ready");
            (known(0) && known(1) && loaded).then_some(())
        });
        ranks
    }

    fn blocks(&self) -> usize {
        (0..2).map(|index| self.gateway.inventory(0, index).len()).sum()
    }

    /// Waits until the gateway knows of every block that the engines hold.
    fn settle(&self) {
        let made = || self.engines.iter().map(|engine| engine.keys().len()).sum::<usize>();
        wait_for("all blocks are announced", || (self.blocks() == made()).then_some(()));
    }
}

/// The `turn`-th prompt of a conversation: each begins with the one before.
fn turn_of(conversation: usize, turn: usize) -> String {
    let sentence = |turn: usize| {
        format!("Conversation {conversation} has come to its turn {turn}, in which nobody says anything new at all. ")
    };
    (0..=turn).map(|turn| sentence(turn).repeat(3)).collect()
}

#[test]
fn with_a_cache_for_each_rank_what_could_hit_does_because_the_engine_is_told_the_rank() {
    let ranks = Ranks::start("0.33.0");
    let (mut hit, mut could) = (0, 0);
    for turn in 0..4 {
        for conversation in 0..12 {
            let answer = ask(ranks.port, &[], &completion(&turn_of(conversation, turn)));
            hit += cached(&answer);
            if turn > 0 {
                let (_, prompt) = evidence(&answer, "tokens").and_then(|t| t.split_once('/')).expect("it was scored");
                let before = ask_tokens(&ranks, &turn_of(conversation, turn - 1));
                could += before / 16 * 16;
                assert!(before < prompt.parse().expect("a number"));
                assert_eq!(evidence(&answer, "tier"), Some("tier15"), "{:?}", answer.header("x-kvlane-route"));
                assert!(evidence(&answer, "rank").is_some(), "{:?}", answer.header("x-kvlane-route"));
            }
            ranks.settle();
        }
    }
    assert!(hit * 100 >= could * 95, "{hit} of {could} tokens hit");
    let chosen = ask(ranks.port, &[("X-data-parallel-rank", "2")], &completion(&turn_of(0, 3)));
    assert_eq!(evidence(&chosen, "rank"), None, "a client's own rank is left alone");
}

/// Tokens of a prompt, as an engine counts them.
fn ask_tokens(ranks: &Ranks, prompt: &str) -> u64 {
    let body = json!({"model": MODEL, "prompt": prompt});
    client::post(ranks.engines[0].address, "/tokenize", &body).json()["count"].as_u64().expect("a count")
}

#[test]
fn a_request_has_one_id_on_both_sides_and_the_answer_says_why_on_request() {
    let engine = StubEngine::start();
    let port = free_port();
    let config = format!(
        "[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {port}\nprotocol = \"tcp\"\nmodel_name = \"m\"\n\n\
         [[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = {}\nweight = 1\n",
        engine.address.port()
    );
    let _gateway = Gateway::start(Options { config, ..Options::default() });
    let body = json!({"model": "m", "prompt": "p"});
    let id_at_engine = |number: usize| {
        let seen = engine.seen();
        let header = |line: &String| {
            Some(line.strip_prefix("x-request-id: ").or(line.strip_prefix("X-Request-Id: "))?.to_owned())
        };
        let ids: Vec<String> = seen[number].headers.iter().filter_map(header).collect();
        assert_eq!(ids.len(), 1, "{:?}", seen[number].headers);
        ids[0].clone()
    };
    let answer = ask(port, &[], &body);
    assert_eq!(answer.header("x-request-id"), Some(id_at_engine(0).as_str()));
    assert_eq!(answer.header("x-kvlane-route"), None);
    let answer = ask(port, &[("X-Request-Id", "mine-1"), ("x-kvlane-explain", "1")], &body);
    assert_eq!((answer.header("x-request-id"), id_at_engine(1).as_str()), (Some("mine-1"), "mine-1"));
    assert_eq!((evidence(&answer, "tier"), evidence(&answer, "reason")), (Some("sel"), Some("mode_off")));
    assert_eq!(evidence(&answer, "ep"), Some(engine.address.to_string().as_str()));
    // The gateway's own answers have one too.
    let refused = client::post(local(port), "/v1/completions", &json!({"model": "other", "prompt": "p"}));
    assert!(refused.header("x-request-id").is_some_and(|id| id.len() == 32));
    let json = refused.json();
    assert_eq!((refused.status, &json["error"], &json["model"]), (503, &json!("model_unavailable"), &json!("other")));
}
