//! The routing cascade through a whole gateway: evidence, ids, models, trust, sessions.

mod common;

use common::asking::{ask, cached, completion, evidence, local};
use common::engines::StubEngine;
use common::fleet::{self, EngineProcess};
use common::gateway::{Gateway, Options};
use common::{client, free_port, wait_for};
use serde_json::json;

#[test]
fn engine_process() {
    fleet::run_as_engine();
}

/// The `turn`-th prompt of a conversation: each begins with the one before.
fn turn_of(conversation: usize, turn: usize) -> String {
    let sentence = |turn: usize| {
        format!("Conversation {conversation} has come to its turn {turn}, in which nobody says anything new at all. ")
    };
    (0..=turn).map(|turn| sentence(turn).repeat(3)).collect()
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
