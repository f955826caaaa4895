//! Which rule a request is for, and what the rules answer themselves.

mod support;

use std::sync::Arc;

use shards::service::{PathMatch, Tables};
use shards::shard::Command;
use support::*;

fn get(path: &str, host: &str, more: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n")
}

#[test]
fn host_path_and_model_choose_the_rule_and_what_none_wants_is_named() {
    let engines = ["plain", "host", "path", "model"].map(Engine::echo);
    let gateway = Gateway::start_with(RUNGS[0], limits(), |listen| {
        let mut services: Vec<_> =
            (0..4).map(|index| service(index, listen, &[engines[index as usize].address])).collect();
        services[0].path = Some(PathMatch::Exact("/exact".into()));
        services[1].host = Some("a.example".into());
        services[2].path = Some(PathMatch::Prefix("/p/".into()));
        services[3].path = Some(PathMatch::Prefix("/m".into()));
        services[3].model = Some("org/m".into());
        services
    });
    let mut client = gateway.connect();
    for (request, expected) in [
        (get("/exact?x", "b", ""), "plain 0"),
        (get("/p/q", "A.Example:80", ""), "host 0"),
        (get("/p/q", "b", ""), "path 0"),
        (get("http://a.example:80/p/q", "b", ""), "host 0"),
        (get("http://b/p/q", "a.example", ""), "path 0"),
        (get("/m", "b", "X-Model: org/m\r\n"), "model 0"),
        (get("/none", "b", ""), "no_route"),
        (get("/m", "b", "X-Model: other\r\n"), "model_unavailable"),
    ] {
        let answer = client.ask(&request);
        let text = String::from_utf8(answer.body).expect("text");
        assert!(text.contains(expected), "{request:?}: {text}");
        assert_eq!(answer.head.starts_with("HTTP/1.1 503"), !expected.ends_with('0'));
    }
    // Rules are swapped under a live connection.
    send(&gateway.shard, Command::Tables(Arc::new(Tables::empty())));
    let answer = client.ask(get("/exact", "b", ""));
    assert!(answer.body.starts_with(br#"{"error":"no_rules""#));
    gateway.stop();
}

#[test]
fn the_list_of_models_is_the_union_over_healthy_endpoints() {
    for rung in RUNGS {
        let list = |text: &'static str| {
            Engine::start(move |served| {
                assert!(served.request.head.contains("Authorization: Bearer x\r\n"));
                served.client.send(answer(text));
                false
            })
        };
        let first = list(r#"{"object":"list","data":[{"id":"a","max":1.50},{"id":"b"}]}"#);
        let second = list(r#"{"object":"list","data":[{"id":"b"},{"id":"c"}]}"#);
        let gateway = Gateway::start(rung, limits(), &[first.address, dead_address(), second.address]);
        let mut client = gateway.connect();
        for _ in 0..3 {
            let answer = client.ask(get("/v1/models", "x", "Authorization: Bearer x\r\n"));
            assert_eq!(
                String::from_utf8_lossy(&answer.body),
                r#"{"object":"list","data":[{"id":"a","max":1.50},{"id":"b"},{"id":"c"}]}"#,
                "{rung:?}"
            );
        }
        // Asked once: the union is kept for a second.
        assert_eq!(first.heads.lock().expect("no panic").len(), 1);
        gateway.stop();
    }
}
