//! TensorRT-LLM's destructive drain: what a gateway shows of it, and what becomes of two that drain one engine.

mod common;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use common::client;
use common::fleet::{self, EngineProcess};
use common::gateway::{Diagnosis, Gateway, Options};
use common::{Scratch, free_port, wait_for};
use serde_json::{Value, json};

#[test]
fn engine_process() {
    fleet::run_as_engine();
}

/// Time within which a second drainer must be detected.
const DETECTED_WITHIN: Duration = Duration::from_secs(5);

/// A gateway over one engine.
struct Site {
    gateway: Gateway,
    address: SocketAddr,
}

impl Site {
    fn start(engine: &EngineProcess, tokenizers: &Scratch) -> Self {
        let port = free_port();
        let config = format!(
            "[tokenizers]\ndir = \"{}\"\n\n[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {port}\nprotocol = \"tcp\"\n\
             name = \"trt\"\nkvExactMode = 3\nkvEngineType = \"trtllm\"\nkvBlockSize = 16\n\n\
             [[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = {}\nweight = 1\n",
            tokenizers.path().display(),
            engine.address.port()
        );
        let gateway = Gateway::start(Options { config, ..Options::default() });
        Site { gateway, address: ([127, 0, 0, 1], port).into() }
    }

    fn ask(&self, number: u64) {
        let text = format!("Story number {number} about a river, a stone and a boat. ").repeat(20);
        let body = json!({"model": "kvlane/demo", "prompt": text, "max_tokens": 1});
        let answer = client::post(self.address, "/v1/completions", &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
    }

    fn drain(&self) -> Value {
        let drain = self.gateway.api("/config/ai/kv/parity").json()["drains"][0].clone();
        let phase = drain["phase"].as_str().unwrap_or_default();
        // The metrics are asked a moment later: they may already be of the next phase.
        if let Some(shown) = self.gateway.metric("kvlane_drain_phase", &[("phase", phase)]) {
            assert_eq!(shown, 1.0);
        }
        drain
    }

    fn is_suspicious(&self) -> bool {
        self.drain()["second_drainer"] != "none"
    }
}

#[test]
fn a_drain_is_shown_and_doctor_takes_nothing_from_it() {
    let engine = EngineProcess::start("--time-scale 0 --kind trtllm");
    let tokenizers = fleet::tokenizers();
    let site = Site::start(&engine, &tokenizers);
    wait_for("the engine is drained", || (site.drain()["phase"] == "draining").then_some(()));
    let mut number = 0;
    let drain = wait_for("events came", || {
        site.ask(number);
        number += 1;
        Some(site.drain()).filter(|drain| drain["blocks_stored"].as_u64() > Some(20))
    });
    assert_eq!(
        (&drain["routed_by"], &drain["second_drainer"], &drain["lost"]),
        (&json!("cache"), &json!("none"), &json!(0))
    );
    assert!(
        drain["last_poll_ms"].as_u64() >= drain["last_event_ms"].as_u64() && drain["last_event_ms"].is_u64(),
        "{drain}"
    );
    assert!(site.gateway.metric("kvlane_drain_events_total", &[("service", "0")]) > Some(0.0));

    let drains = engine.stat("drains");
    let alone = site.gateway.doctor(&["--wait", "1"]);
    assert_eq!((alone.code, alone.wrong()), (Some(0), vec![]), "{:#}", alone.report);
    let unknown = alone.lines("unknown");
    assert!(unknown.iter().any(|(check, _, fix)| check == "events" && fix.contains("--url")), "{unknown:?}");
    let asked = site.gateway.doctor(&["--wait", "1", "--url", &site.gateway.url()]);
    assert_eq!((asked.code, asked.wrong()), (Some(0), vec![]), "{:#}", asked.report);
    assert!(asked.lines("right").iter().any(|(check, says, _)| check == "drain" && says.starts_with("draining")));
    assert_eq!(engine.stat("metrics_touched"), 0, "its metrics are destructive too");
    assert_eq!(site.drain()["ownership_faults"], 0, "after {drains} drains and doctor, nothing is missing");
}

#[test]
fn drained_blocks_of_another_size_are_named_with_both_numbers() {
    let engine = EngineProcess::start("--time-scale 0 --kind trtllm --block-size 32");
    let tokenizers = fleet::tokenizers();
    let site = Site::start(&engine, &tokenizers);
    let mut number = 0;
    let fault = wait_for("it is named", || {
        site.ask(number);
        number += 1;
        let endpoint = site.gateway.api("/config/ai/kv/parity").json()["endpoints"][0].clone();
        (endpoint["faults"] == json!(["block_size"])).then(|| endpoint["details"][0].clone())
    });
    let detail = fault["detail"].as_str().unwrap_or_default();
    assert!(detail.contains("have 32 tokens") && detail.contains("kvBlockSize is 16"), "{detail}");
    let labels = [("leg", "block_size"), ("ep_idx", "0")];
    assert_eq!(site.gateway.metric("kvlane_parity_endpoint_fault", &labels), Some(1.0));
    Diagnosis::of(&["--url", &site.gateway.url()]).only("endpoint", &["block_size", "set kvBlockSize to 32"]);
}

#[test]
fn a_second_drainer_is_detected_within_five_seconds_and_named() {
    let engine = EngineProcess::start("--time-scale 0 --kind trtllm");
    let tokenizers = fleet::tokenizers();
    let site = Site::start(&engine, &tokenizers);
    wait_for("the engine is drained", || (site.drain()["phase"] == "draining").then_some(()));
    site.ask(0);
    client::post(engine.address, "/debug/fault", &json!({"fault": "second_drainer", "value": true}));
    let began = Instant::now();
    let mut number = 1;
    wait_for("it is detected", || {
        site.ask(number);
        number += 1;
        site.is_suspicious().then_some(())
    });
    let took = began.elapsed();
    eprintln!("a second drainer was detected after {took:?}");
    assert!(took < DETECTED_WITHIN, "{took:?}");
    let drain = site.drain();
    assert_eq!(drain["endpoint"], engine.address.to_string(), "it is named");
    assert!(drain["detail"].as_str().is_some_and(|detail| detail.contains("second_drainer")), "{drain}");

    // The other one does not go: in the end this gateway stops, says so, and serves the engine by sel.
    wait_for("the gateway stops to drain", || {
        site.ask(number);
        number += 1;
        (site.drain()["phase"] == "second_drainer").then_some(())
    });
    let drain = site.drain();
    assert_eq!((&drain["second_drainer"], &drain["routed_by"]), (&json!("detected"), &json!("sel")));
    assert_eq!(site.gateway.metric("kvlane_drain_second_drainer", &[("service", "0")]), Some(2.0));
    assert!(site.gateway.log().contains("second_drainer: another consumer takes this engine's events"));
    let hits = || site.gateway.metric("loxilb_pd_kv_tier15_hits_total", &[("ep_idx", "0")]);
    let before = hits();
    site.ask(0);
    site.ask(0);
    assert_eq!(hits(), before, "served by sel");
    let found = Diagnosis::of(&["--url", &site.gateway.url()]);
    found.only("drain", &["second_drainer, routed by sel", "another consumer"]);
}

#[test]
fn of_two_gateways_on_one_engine_both_say_so_and_both_go_on_serving() {
    let engine = EngineProcess::start("--time-scale 0 --kind trtllm");
    let tokenizers = fleet::tokenizers();
    let first = Site::start(&engine, &tokenizers);
    wait_for("the first drains", || (first.drain()["phase"] == "draining").then_some(()));
    first.ask(0);
    let second = Site::start(&engine, &tokenizers);
    wait_for("the second drains", || (second.drain()["answers"].as_u64() > Some(0)).then_some(()));
    let began = Instant::now();
    let mut number = 1;
    let mut both = |what: &str, is: &dyn Fn() -> bool| {
        wait_for(what, || {
            first.ask(number);
            second.ask(number + 1_000);
            number += 1;
            is().then_some(())
        });
    };
    both("one of them names the other", &|| first.is_suspicious() || second.is_suspicious());
    let took = began.elapsed();
    eprintln!("two gateways on one engine: detected after {took:?}");
    assert!(took < DETECTED_WITHIN, "{took:?}");
    let stopped = |site: &Site| site.drain()["phase"] == "second_drainer";
    both("one of them stops", &|| stopped(&first) || stopped(&second));
    let gone = if stopped(&second) { &second } else { &first };
    assert_eq!(gone.drain()["routed_by"], "sel");
    assert!(gone.gateway.log().contains("serves the engine by the rule's sel"));
    gone.ask(1);
}
