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
    assert_eq!((evidence(&answer, "tier"), evidence(&answer, "miss")), (Some("sel"), Some("mode_off")));
    assert_eq!(evidence(&answer, "ep"), Some(engine.address.to_string().as_str()));
    // The gateway's own answers have one too.
    let refused = client::post(local(port), "/v1/completions", &json!({"model": "other", "prompt": "p"}));
    assert!(refused.header("x-request-id").is_some_and(|id| id.len() == 32));
    let json = refused.json();
    assert_eq!((refused.status, &json["error"], &json["model"]), (503, &json!("model_unavailable"), &json!("other")));
}

#[test]
fn where_no_rank_can_be_named_as_much_hits_as_was_predicted() {
    let ranks = Ranks::start("0.10.2");
    let mut random = 1_u64;
    // The engine's choice of a rank is chance: so many conversations that it evens out.
    let mut turns = [0; 36];
    while turns.iter().min() < Some(&8) {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let conversation = (random >> 33) as usize % turns.len();
        ask(ranks.port, &[], &completion(&turn_of(conversation, turns[conversation])));
        turns[conversation] += 1;
        ranks.settle();
    }
    let sum = |name: &str| ranks.gateway.metric_sum(name);
    let (predicted, cached) =
        (sum("kvlane_prediction_predicted_tokens_total"), sum("kvlane_prediction_cached_tokens_total"));
    assert!(cached > 10_000.0 && (predicted - cached).abs() <= cached * 0.05, "{predicted} predicted, {cached} cached");
    for engine in &ranks.engines {
        let last = client::get(engine.address, "/debug/last").text();
        assert!(!last.contains("data-parallel-rank"), "{last}");
    }
}

#[test]
fn an_engine_that_keeps_having_less_than_it_announced_is_demoted_and_named() {
    let engines = [EngineProcess::start("--time-scale 0")];
    let tokenizers = fleet::tokenizers();
    let port = free_port();
    let config =
        fleet::rule(port, &tokenizers, &engines).replace("kvBlockSize = 16", "kvBlockSize = 16\nscrapeMetrics = true");
    let gateway = Gateway::start(Options { config, ..Options::default() });
    wait_for("its metrics are read", || {
        let blocks = gateway.metric("kvlane_engine_cache_blocks", &[("ep_idx", "0")])?;
        (blocks == 4096.0).then_some(())
    });
    wait_for("the model is loaded", || {
        let status = gateway.api("/status/ready").json();
        status["models"].as_array()?.iter().any(|model| model["state"] == "ready").then_some(())
    });
    let prompts: Vec<String> = (0..20).map(|number| turn_of(number, 2)).collect();
    for prompt in prompts.iter().chain(&prompts) {
        ask(port, &[], &completion(prompt));
        wait_for("all blocks are announced", || {
            (gateway.inventory(0, 0).len() == engines[0].keys().len()).then_some(())
        });
    }
    let trust = || gateway.metric("kvlane_endpoint_trust_percent", &[("ep_idx", "0")]);
    for fault in [json!({"fault": "silence", "value": true}), json!({"fault": "clear"})] {
        assert_eq!(client::post(engines[0].address, "/debug/fault", &fault).status, 200);
    }
    // Probabilities of the prompt are computed without the cache: that nothing is cached is no lie.
    let (probed, plain) = prompts.split_at(10);
    for prompt in probed {
        let mut body = completion(prompt);
        body["prompt_logprobs"] = json!(1);
        assert_eq!(cached(&ask(port, &[], &body)), 0);
    }
    assert_eq!(trust(), Some(100.0));
    for prompt in plain {
        assert_eq!(cached(&ask(port, &[], &completion(prompt))), 0);
    }
    wait_for("it is demoted", || (trust()? < 100.0).then_some(()));
    wait_for("it is named", || {
        (gateway.metric("kvlane_parity_endpoint_fault", &[("leg", "usage")])? == 1.0).then_some(())
    });
    assert!(gateway.metric_sum("kvlane_prediction_wrong_total") >= 8.0);
    assert!(gateway.log().contains("fewer cached tokens than predicted"));
}

#[test]
fn a_session_stays_where_it_was_whichever_shard_it_comes_to() {
    let engines: Vec<StubEngine> = (0..3).map(|_| StubEngine::start()).collect();
    let port = free_port();
    let mut config = format!(
        "[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {port}\nprotocol = \"tcp\"\nsel = 0\n\
         session_header_name = \"cookie:sid\"\nrouteHeader = true\n"
    );
    for engine in &engines {
        config += &format!(
            "\n[[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = {}\nweight = 1\n",
            engine.address.port()
        );
    }
    let gateway = Gateway::start(Options { config, ..Options::default() });
    let endpoint_of = |cookie: &str| {
        let answer = ask(port, &[("Cookie", cookie)], &json!({"prompt": "p"}));
        evidence(&answer, "ep_idx").expect("evidence was asked for").to_owned()
    };
    let sessions = ["a=1; sid=one", "sid=two; b=2", "sid=three"];
    // Every connection may come to another shard.
    let homes: Vec<String> = sessions
        .iter()
        .map(|cookie| {
            wait_for("the shards agree on the session", || {
                let first = endpoint_of(cookie);
                (0..12).all(|_| endpoint_of(cookie) == first).then_some(first)
            })
        })
        .collect();
    for (cookie, home) in sessions.iter().zip(&homes) {
        assert_eq!(endpoint_of(cookie), *home, "{cookie}");
    }
    let others: std::collections::HashSet<String> = (0..12).map(|_| endpoint_of("a=1")).collect();
    assert_eq!(others.len(), 3, "requests without a session go round");
    wait_for("they are counted", || (gateway.metric("loxilb_pd_sessions_active", &[])? == 3.0).then_some(()));
}
