//! P/D rules as operators post them: one port for all engines' events, six endpoints whose roles alternate, and what is said
//! of hashing. One rule of each engine at once in one gateway.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use loadgen::engine::{Engine, EngineHandle, EngineKind, EngineOptions, LegEnd, LegKind, Role};
use serde_json::{Value, json};

use super::common::gateway::{Gateway, Options};
use super::common::pd::{end_of, events, said};
use super::common::{Scratch, client, fleet, free_address, free_port, free_ports, wait_for};
use super::{CHAT, alone, chat};

/// From an engine's event port to its replay port, where nothing else is said.
const REPLAY_OFFSET: u16 = 1000;

/// Six engines, each on a host of its own, as pods are.
struct Six {
    kind: EngineKind,
    engines: Vec<EngineHandle>,
    event_port: u16,
    side_port: u16,
    listen: SocketAddr,
}

impl Six {
    /// Starts them on six hosts, prefill and decode in turn.
    fn start(kind: EngineKind, first_host: u8, prefill: fn(&mut EngineOptions)) -> Self {
        let side_port = if kind == EngineKind::Sglang { free_port() } else { 0 };
        let publishes = kind != EngineKind::Trtllm;
        let event_port = if publishes { free_ports(1) } else { 0 };
        let engine = |place: u8| {
            let role = if place.is_multiple_of(2) { Role::Prefill } else { Role::Decode };
            let host = IpAddr::from(Ipv4Addr::new(127, 0, 0, first_host + place));
            let mut options = EngineOptions { kind, role, host, event_port, ..EngineOptions::ephemeral() };
            options.replay_port = publishes.then_some(event_port + REPLAY_OFFSET);
            if kind == EngineKind::Trtllm {
                options.block_size = 32;
            }
            if role == Role::Prefill {
                options.side_port = side_port;
                prefill(&mut options);
            }
            Engine::start(&options).expect("the ports are free on these hosts")
        };
        Six { kind, engines: (0..6).map(engine).collect(), event_port, side_port, listen: free_address() }
    }

    /// The body that is posted.
    fn rule(&self) -> Value {
        let mut arguments = json!({
            "externalIP": "127.0.0.1", "port": self.listen.port(), "protocol": "tcp", "sel": 0, "mode": 4,
            "pd_disagg_mode": true, "kvExactMode": 1,
        });
        let more = match self.kind {
            EngineKind::Vllm => json!({
                "kvZmqPort": self.event_port, "kvHashAlgo": "sha256_cbor", "kvWarmupSec": 30, "kvBlockSize": 16,
            }),
            EngineKind::Sglang => json!({
                "kvEngineType": "sglang", "kvZmqPort": self.event_port, "kvWarmupSec": 30, "kvBlockSize": 16,
                "pdBootstrapPort": self.side_port,
            }),
            _ => json!({"kvEngineType": "trtllm", "kvWarmupSec": 30, "kvBlockSize": 32}),
        };
        more.as_object().into_iter().flatten().for_each(|(name, value)| arguments[name] = value.clone());
        let endpoint = |(place, engine): (usize, &EngineHandle)| {
            let at = engine.http_addr;
            json!({"endpointIP": at.ip().to_string(), "targetPort": at.port(), "weight": 1, "ep_role": place % 2 + 1})
        };
        let endpoints: Vec<Value> = self.engines.iter().enumerate().map(endpoint).collect();
        json!({"serviceArguments": arguments, "endpoints": endpoints})
    }

    /// Streamed and plain requests go through one leg of each role each, and say what one engine alone says.
    fn serves(&self) {
        for (number, stream) in [true, false, true, false].into_iter().enumerate() {
            let text = format!("request {number} of {:?}: {}", self.kind, "the lake is deep and long. ".repeat(8));
            let body = chat(&text, &json!({"stream": stream}));
            let answer = client::call(self.listen, "POST", CHAT, &body).expect("an answer");
            assert_eq!(answer.status, 200, "{:?}: {}", self.kind, answer.text());
            assert_eq!(said(&answer), alone(self.kind, &body), "{:?}", self.kind);
            if stream {
                assert_eq!(events(&answer.body).last().map(String::as_str), Some("[DONE]"));
            }
        }
        for (place, role) in [(0, LegKind::Prefill), (1, LegKind::Decode)] {
            let engines = || self.engines.iter().skip(place).step_by(2);
            let legs = wait_for("all legs have ended", || {
                let legs: Vec<_> = engines().flat_map(EngineHandle::legs).collect();
                legs.iter().all(|leg| leg.ended.is_some()).then_some(legs)
            });
            assert_eq!(legs.len(), 4, "{:?}", self.kind);
            assert!(legs.iter().all(|leg| leg.kind == role && end_of(leg) == Some(LegEnd::Finished)), "{legs:?}");
        }
        for engine in &self.engines {
            assert_eq!((engine.stats().pd_violations, engine.stats().pd_held), (0, 0), "{}", engine.http_addr);
        }
    }

    /// The inventory knows of what prefill engines hold, and has no place for decode engines.
    fn is_followed(&self, gateway: &Gateway, service: usize) {
        for (place, engine) in self.engines.iter().enumerate() {
            let path = format!("/config/ai/kv/inventory?service_id={service}&ep_idx={place}");
            if place % 2 == 1 {
                assert_eq!(gateway.api(&path).status, 404, "{:?} {place}", self.kind);
                continue;
            }
            wait_for(&format!("the inventory of {:?} {place} follows its engine", self.kind), || {
                let held = engine.cached_keys()?.len();
                let answer = gateway.api(&path);
                assert_eq!(answer.status, 200, "{}", answer.text());
                let total = answer.json()["total"].as_u64()?;
                // TensorRT-LLM announces the begun block at a prompt's end too, which is nobody's to find.
                let begun = if self.kind == EngineKind::Trtllm { engine.stats().requests } else { 0 };
                (total + begun >= held as u64 && total <= held as u64 && (total > 0) == (held > 0)).then_some(())
            });
        }
        assert!(self.engines.iter().any(|engine| engine.cached_keys().is_some_and(|keys| !keys.is_empty())));
    }
}

#[test]
fn rules_as_they_are_written_serve_through_both_legs() {
    // LMCache on the first rule's prefill engines: nested parameters, and events of a host tier.
    let fleets = [
        Six::start(EngineKind::Vllm, 20, |options| (options.nested_params, options.cpu_blocks) = (true, 512)),
        Six::start(EngineKind::Sglang, 30, |_| ()),
        Six::start(EngineKind::Trtllm, 40, |_| ()),
    ];
    let tokenizers: Scratch = fleet::tokenizers();
    let config =
        format!("[limits]\nprompt_cache_bytes = 262144\n\n[tokenizers]\ndir = \"{}\"\n", tokenizers.path().display());
    let gateway = Gateway::start(Options { config, ..Options::default() });
    for fleet in &fleets {
        let answer = client::post(gateway.admin, "/netlox/v1/config/loadbalancer", &fleet.rule());
        assert!(answer.is_success(), "{}", answer.text());
    }
    for (service, fleet) in fleets.iter().enumerate() {
        wait_for("the rule is served", || client::call(fleet.listen, "GET", "/v1/models", b"").ok());
        fleet.serves();
        fleet.is_followed(&gateway, service);
    }
    assert_eq!(gateway.metric_sum("loxilb_ai_pd_kv_params_found_total"), 4.0, "vLLM's, nested as they are");
    assert_eq!(gateway.metric_sum("loxilb_ai_pd_kv_params_missing_total"), 0.0);
    assert_eq!(gateway.metric_sum("kvlane_endpoint_in_flight"), 0.0);
}
