//! Rules made over the management API serve without a restart.

mod common;

use common::engines::StubEngine;
use common::gateway::{Gateway, Options};
use common::{client, free_port};
use serde_json::{Value, json};

fn rule(port: u16, engines: &[&StubEngine], more: &Value) -> Value {
    let mut arguments = json!({"externalIP": "127.0.0.1", "port": port, "protocol": "tcp", "sel": 0, "mode": 4,
        "BGP": false, "Monitor": false, "inactiveTimeOut": 0, "block": 0});
    for (name, value) in more.as_object().expect("an object") {
        arguments[name] = value.clone();
    }
    let endpoints: Vec<Value> = engines
        .iter()
        .map(|e| {
            json!({"endpointIP": "127.0.0.1", "targetPort": e.address.port(), "weight": 1,
            "state": "", "counter": "", "kvZmqPort": e.event_port})
        })
        .collect();
    json!({"serviceArguments": arguments, "secondaryIPs": null, "allowedSources": null, "endpoints": endpoints})
}

fn prompt(port: u16) -> std::io::Result<client::Answer> {
    client::call(([127, 0, 0, 1], port).into(), "POST", "/v1/completions", br#"{"model":"m","prompt":"x"}"#)
}

#[test]
fn a_rule_serves_from_its_post_to_its_delete() {
    let gateway = Gateway::start(Options::default());
    let base = "/netlox/v1/config/loadbalancer";
    let (first, second) = (StubEngine::start(), StubEngine::start());
    let port = free_port();
    let kv = json!({"kvExactMode": 3, "kvEngineType": "vllm"});

    assert_eq!(gateway.api("/config/loadbalancer/all").json(), json!({"lbAttr": []}));
    assert!(prompt(port).is_err(), "nothing listens yet");
    let answer = client::post(gateway.admin, base, &rule(port, &[&first], &kv));
    assert!(answer.is_success(), "{}", answer.text());
    assert_eq!(prompt(port).expect("served").status, 200);

    let answer = client::post(gateway.admin, base, &rule(port, &[&first], &kv));
    assert_eq!(answer.status, 409, "the same again: {}", answer.text());

    let readback = gateway.api("/config/loadbalancer/all").json();
    let arguments = &readback["lbAttr"][0]["serviceArguments"];
    for (name, value) in [
        ("kvExactMode", json!(3)),
        ("kvBlockSize", json!(16)),
        ("kvHashAlgo", json!("sha256_cbor")),
        ("kvZmqPort", json!(5557)),
        ("kvWarmupSec", json!(30)),
        ("kvEngineType", json!("vllm")),
        ("kvDpRankCount", json!(1)),
        ("service_id", json!(0)),
    ] {
        assert_eq!(arguments[name], value, "{name} in {arguments}");
    }

    let answer = client::post(gateway.admin, base, &rule(port, &[&first, &second], &kv));
    assert_eq!(answer.status, 200, "an endpoint more: {}", answer.text());
    for _ in 0..6 {
        assert_eq!(prompt(port).expect("served").status, 200);
    }
    assert!(second.seen().len() >= 2, "the new endpoint gets its share of the misses");
    assert_eq!(gateway.api("/config/ai/kv/inventory?service_id=0&ep_idx=1").status, 200);
    let missing = gateway.api("/config/ai/kv/inventory?service_id=0&ep_idx=7");
    assert_eq!((missing.status, missing.json()), (404, json!({"error": "service or endpoint not found"})));

    let path = format!("{base}/externalipaddress/127.0.0.1/port/{port}/protocol/tcp");
    let answer = client::call(gateway.admin, "DELETE", &path, b"").expect("answered");
    assert_eq!(answer.status, 200, "{}", answer.text());
    common::wait_for("the port is closed", || prompt(port).is_err().then_some(()));

    let answer = client::post(gateway.admin, base, &rule(port, &[&first], &kv));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let readback = gateway.api("/config/loadbalancer/all").json();
    assert_eq!(readback["lbAttr"][0]["serviceArguments"]["service_id"], 1, "a number is never used again");
}

#[test]
fn every_engine_is_served_and_none_turns_into_another() {
    let gateway = Gateway::start(Options::default());
    let base = "/netlox/v1/config/loadbalancer";
    let engine = StubEngine::start();
    for (name, algo) in [("sglang", "sha256_sglang"), ("trtllm", "blockhash_trtllm"), ("llamacpp", "")] {
        let port = free_port();
        let kv = if algo.is_empty() { json!({}) } else { json!({"kvExactMode": 3}) };
        let of = |engine_type: &str, kv: &Value| {
            let mut rule = rule(port, &[&engine], kv);
            rule["serviceArguments"]["kvEngineType"] = json!(engine_type);
            if name != "sglang" {
                // Its events have no port of their own.
                rule["endpoints"][0].as_object_mut().expect("an object").remove("kvZmqPort");
            }
            rule
        };
        let answer = client::post(gateway.admin, base, &of(name, &kv));
        assert!(answer.is_success(), "{name}: {}", answer.text());
        assert_eq!(prompt(port).expect("served").status, 200, "{name}");
        let shown = gateway.api("/config/loadbalancer/all").json();
        let rules = shown["lbAttr"].as_array().expect("a list").iter();
        let mut ours = rules.filter(|rule| rule["serviceArguments"]["port"] == port);
        let ours = &ours.next().expect("the rule is in force")["serviceArguments"];
        assert_eq!((&ours["kvEngineType"], ours["kvHashAlgo"].as_str().unwrap_or("")), (&json!(name), algo));
        let answer = client::post(gateway.admin, base, &of("vllm", &kv));
        assert_eq!(answer.status, 409, "{name}: {}", answer.text());
        let text = "cant modify rule kv engine type (delete and recreate)";
        assert!(answer.text().contains(text), "{name}: {}", answer.text());
    }
}

#[test]
fn what_cannot_be_served_is_refused_and_changes_nothing() {
    let gateway = Gateway::start(Options::default());
    let engine = StubEngine::start();
    let base = "/netlox/v1/config/loadbalancer";
    let post = |more: Value| client::post(gateway.admin, base, &rule(free_port(), &[&engine], &more));
    for (more, status, text) in [
        (json!({"mode": 0}), 400, "mode"),
        (json!({"mode": 0, "kvExactMode": 3}), 400, "kv-exact single-role mode requires mode=fullproxy"),
        (json!({"security": 1}), 400, "security"),
        (json!({"kvExactMode": 2}), 400, "kvExactMode"),
        (json!({"kvExactMode": 3, "kvHashAlgo": "sha256"}), 400, "sha256_cbor"),
        (json!({"kvExactMode": 3, "kvDpRankCount": 9}), 400, "kv-dp-rank-count must be within 1..8 (0 = default 1)"),
        (json!({"kvExactMode": 3, "kvEngineType": "nope"}), 400, "kv-engine-type must be one of"),
        (json!({"kvExactMode": 3, "kvZmqPort": 65535, "kvDpRankCount": 2}), 400, "65535"),
        (json!({"kvExactMode": 3, "kvEngineType": "trtllm", "kvZmqPort": 6000}), 400, "kvZmqPort is meaningless"),
        (json!({"kvExactMode": 3, "kvEngineType": "llamacpp"}), 400, "publishes no cache events"),
        (json!({"sel": 99}), 400, "sel"),
    ] {
        let answer = post(more.clone());
        assert_eq!(answer.status, status, "{more}: {}", answer.text());
        assert!(answer.text().contains(text), "{more}: {} lacks {text:?}", answer.text());
    }
    let busy = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
    let port = busy.local_addr().expect("bound").port();
    let answer = client::post(gateway.admin, base, &rule(port, &[&engine], &json!({})));
    assert!(answer.status >= 400 && answer.text().contains(&port.to_string()), "{}", answer.text());
    assert_eq!(gateway.api("/config/loadbalancer/all").json(), json!({"lbAttr": []}), "nothing was kept");
}
