//! The two rules that every page on such a gateway shows, as curl and as loxicmd make them, with one of each other engine
//! beside them: made, read back, used, and followed in their inventories.
//!
//! Engines have one event port in common, as in the examples, and addresses of their own, which are this process's alone.

use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;

use loadgen::engine::{Engine, EngineHandle, EngineKind, EngineOptions, Role};
use serde_json::{Value, json};

use crate::common::gateway::{Gateway, Options};
use crate::common::{Scratch, client, fleet, free_port, free_ports, wait_for};

const LB: &str = "/netlox/v1/config/loadbalancer";
const RANKS: u16 = 3;

/// Ports that stand for those of the examples.
struct Ports {
    /// 8080 and 9090 of the rules.
    pd: u16,
    pool: u16,
    /// 8080 of the engines.
    target: u16,
    /// 5557 and 5561, with 1,000 more free for replays.
    pd_events: u16,
    pool_events: u16,
}

/// Everything that one form of the examples is tried on.
struct Stage {
    gateway: Gateway,
    /// Prefill and decode in turn.
    pd: Vec<EngineHandle>,
    pool: Vec<EngineHandle>,
    trtllm: EngineHandle,
    llamacpp: Vec<EngineHandle>,
    vip: Ipv4Addr,
    ports: Ports,
    _tokenizers: Scratch,
}

/// The `n`-th address of a form, of this process alone.
fn address(form: u8, n: u8) -> Ipv4Addr {
    let pid = std::process::id();
    assert!(form < 2 && n < 16);
    Ipv4Addr::new(127, 64 + (pid >> 11) as u8 % 64, (pid >> 3) as u8, (pid % 8) as u8 * 32 + form * 16 + n)
}

impl Stage {
    fn start(form: u8) -> Self {
        let pool_events = free_ports(RANKS);
        let ports =
            Ports { pd: free_port(), pool: free_port(), target: free_port(), pd_events: free_ports(1), pool_events };
        let start = |n: u8, options: EngineOptions| {
            let host = IpAddr::V4(address(form, n));
            // Without PYTHONHASHSEED, as rules that name none believe.
            let options = EngineOptions { host, port: ports.target, seed: "none".to_owned(), ..options };
            Engine::start(&options).expect("the address is this process's alone")
        };
        let telling = |kind: EngineKind, events: u16, dp: u16, role: Role| EngineOptions {
            kind,
            dp,
            role,
            event_port: events,
            replay_port: Some(events + 1000),
            ..EngineOptions::ephemeral()
        };
        let silent =
            |kind: EngineKind, block_size: usize| EngineOptions { kind, block_size, ..EngineOptions::ephemeral() };
        let role = |n: u8| if n.is_multiple_of(2) { Role::Prefill } else { Role::Decode };
        let pd = (0..6).map(|n| start(n, telling(EngineKind::Vllm, ports.pd_events, 1, role(n)))).collect();
        let pool =
            (6..9).map(|n| start(n, telling(EngineKind::Sglang, ports.pool_events, RANKS, Role::None))).collect();
        let trtllm = start(9, silent(EngineKind::Trtllm, 32));
        let llamacpp = (10..12).map(|n| start(n, silent(EngineKind::Llamacpp, 16))).collect();
        let tokenizers = fleet::tokenizers();
        let config = format!("[tokenizers]\ndir = \"{}\"\n", tokenizers.path().display());
        let gateway = Gateway::start(Options { config, ..Options::default() });
        Stage { gateway, pd, pool, trtllm, llamacpp, vip: address(form, 15), ports, _tokenizers: tokenizers }
    }

    fn curl(&self, body: &str) {
        let answer = client::call(self.gateway.admin, "POST", LB, body.as_bytes()).expect("an answer");
        assert!(answer.is_success(), "{body}: {}", answer.text());
    }

    fn loxicmd(&self, line: &str) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvlane"));
        let port = self.gateway.admin.port().to_string();
        let output = command.args(line.split(' ')).args(["--port", &port]).output().expect("the binary was built");
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "Success");
    }

    /// One rule of each engine that the examples have none of.
    fn post_the_others(&self) {
        for (kind, engines, more) in [
            ("trtllm", std::slice::from_ref(&self.trtllm), json!({"kvExactMode": 3, "kvBlockSize": 32})),
            ("llamacpp", &self.llamacpp[..], json!({"sel": 8})),
        ] {
            let mut arguments = json!({"externalIP": self.vip, "port": free_port(), "protocol": "tcp", "mode": 4,
                "kvEngineType": kind});
            more.as_object().into_iter().flatten().for_each(|(name, value)| arguments[name] = value.clone());
            let endpoint = |engine: &EngineHandle| json!({"endpointIP": engine.http_addr.ip(), "targetPort": engine.http_addr.port(), "weight": 1});
            let endpoints: Vec<Value> = engines.iter().map(endpoint).collect();
            self.curl(&json!({"serviceArguments": arguments, "endpoints": endpoints}).to_string());
        }
    }

    /// One conversation through a rule; every number is another text.
    fn ask(&self, port: u16, number: usize) {
        let text = format!("Tale {number} of a river, a stone and a boat that nobody had seen before. ").repeat(12);
        let body = json!({"model": loadgen::assets::DEMO_MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": text}]});
        let answer = client::post((self.vip, port).into(), "/v1/chat/completions", &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
    }

    fn total(&self, service: u32, endpoint: usize) -> u64 {
        let path = format!("/config/ai/kv/inventory?service_id={service}&ep_idx={endpoint}&summary=1");
        self.gateway.api(&path).json()["total"].as_u64().expect("a number")
    }

    fn rules(&self) -> Vec<Value> {
        self.gateway.api("/config/loadbalancer/all").json()["lbAttr"].as_array().expect("a list").clone()
    }

    /// Both rules as they are shown.
    fn check_readback(&self) {
        let rules = self.rules();
        let pd = json!({"externalIP": self.vip, "port": self.ports.pd, "protocol": "tcp", "sel": 0, "mode": 4,
            "pd_disagg_mode": true, "kvExactMode": 1, "kvZmqPort": self.ports.pd_events, "kvHashAlgo": "sha256_cbor",
            "kvWarmupSec": 30, "kvBlockSize": 16, "service_id": 0});
        let pool = json!({"externalIP": self.vip, "port": self.ports.pool, "kvExactMode": 3, "kvEngineType": "sglang",
            "kvDpRankCount": RANKS, "kvZmqPort": self.ports.pool_events, "kvWarmupSec": 30, "kvBlockSize": 16,
            "service_id": 1});
        for (rule, expected) in rules.iter().zip([pd, pool]) {
            for (name, value) in expected.as_object().expect("an object") {
                assert_eq!(&rule["serviceArguments"][name], value, "{name}");
            }
        }
        let of = |rule: &Value, name: &str| -> Vec<Value> {
            rule["endpoints"].as_array().expect("a list").iter().map(|endpoint| endpoint[name].clone()).collect()
        };
        assert_eq!(of(&rules[0], "ep_role"), [1, 2, 1, 2, 1, 2]);
        let hosts = |engines: &[EngineHandle]| engines.iter().map(|e| json!(e.http_addr.ip())).collect::<Vec<_>>();
        assert_eq!(of(&rules[0], "endpointIP"), hosts(&self.pd));
        assert_eq!(of(&rules[1], "endpointIP"), hosts(&self.pool));
    }

    /// What prefill engines hold is what the gateway lists for them, and grows; decode engines have no inventory.
    fn check_pd(&self) {
        let kv = "/config/ai/kv";
        wait_for("the gateway listens to the prefill engines", || {
            let streams = self.gateway.api(&format!("{kv}/parity?service_id=0")).json()["parity"].clone();
            let streams = streams.as_array()?;
            (streams.len() == 3 && streams.iter().all(|stream| stream["started"].is_string())).then_some(())
        });
        let mut before = [0; 3];
        for round in 0..2 {
            (round * 12..(round + 1) * 12).for_each(|number| self.ask(self.ports.pd, number));
            for (place, engine) in self.pd.iter().step_by(2).enumerate() {
                wait_for("the inventory is what the engine holds", || {
                    let mut keys: Vec<u64> = engine.cached_keys()?.into_keys().collect();
                    keys.sort_unstable();
                    (self.gateway.inventory(0, 2 * place as u32) == keys).then_some(())
                });
                let total = self.total(0, 2 * place);
                assert!(total > before[place], "round {round}: endpoint {} does not grow: {total}", 2 * place);
                before[place] = total;
            }
        }
        for decode in [1, 3, 5] {
            let answer = self.gateway.api(&format!("{kv}/inventory?service_id=0&ep_idx={decode}"));
            assert_eq!((answer.status, answer.json()), (404, json!({"error": "service or endpoint not found"})));
        }
        let parity = self.gateway.api(&format!("{kv}/parity?service_id=0")).json();
        for rank in parity["parity"].as_array().expect("a list") {
            assert_eq!((&rank["verdict"], &rank["faults"]), (&json!("exact"), &json!([])), "{rank}");
        }
        self.check_hit(self.ports.pd, 3);
    }

    /// The same of every rank.
    fn check_pool(&self) {
        let ranks = || -> Vec<Value> {
            let streams = self.gateway.api("/config/ai/kv/streams").json()["streams"].clone();
            streams.as_array().into_iter().flatten().filter(|stream| stream["service_id"] == 1).cloned().collect()
        };
        let places = || ranks().iter().map(|s| (s["ep_idx"].clone(), s["rank"].clone())).collect::<Vec<_>>();
        let expected: Vec<_> = (0..3).flat_map(|at| (0..RANKS).map(move |rank| (json!(at), json!(rank)))).collect();
        wait_for("there is a stream of every rank", || {
            let started = ranks().iter().all(|stream| stream["started"].is_string());
            let mut places = places();
            places.sort_by_key(|(at, rank)| (at.as_u64(), rank.as_u64()));
            (places == expected && started).then_some(())
        });
        let stored = |at: usize, rank: usize| {
            let ranks = ranks();
            let stream = ranks.iter().find(|s| s["ep_idx"] == at && s["rank"] == rank).expect("it has a stream");
            stream["blocks_stored"].as_u64().unwrap_or(0) - stream["blocks_removed"].as_u64().unwrap_or(0)
        };
        let mut number = 100;
        for (at, engine) in self.pool.iter().enumerate() {
            for rank in 0..usize::from(RANKS) {
                wait_for("the rank grows by what its engine holds", || {
                    let held = engine.cached_keys_of(rank)?.len() as u64;
                    if held == 0 {
                        self.ask(self.ports.pool, number);
                        number += 1;
                    }
                    (held > 0 && stored(at, rank) == held).then_some(())
                });
            }
        }
        for (at, engine) in self.pool.iter().enumerate() {
            wait_for("the endpoint's inventory is that of its ranks", || {
                let mut keys: Vec<u64> = engine.cached_keys()?.into_keys().collect();
                keys.sort_unstable();
                (self.gateway.inventory(1, at as u32) == keys).then_some(())
            });
        }
        self.check_hit(self.ports.pool, 100);
    }

    /// A text that was asked for before goes to who holds it.
    fn check_hit(&self, port: u16, number: usize) {
        wait_for("the tokenizer is loaded, which the first request asked for", || {
            let status = self.gateway.api("/status/ready").json();
            status["models"].as_array()?.iter().any(|model| model["state"] == "ready").then_some(())
        });
        let hits = || self.gateway.metric_sum("loxilb_pd_kv_tier15_hits_total");
        let before = hits();
        self.ask(port, number);
        assert_eq!(hits(), before + 1.0);
    }

    fn check_the_others(&self) {
        let rules = self.rules();
        let port = |at: usize| rules[at]["serviceArguments"]["port"].as_u64().expect("a port") as u16;
        wait_for("the drain has begun", || {
            let drains = self.gateway.api("/config/ai/kv/parity?service_id=2").json()["drains"].clone();
            (drains[0]["phase"] == "draining").then_some(())
        });
        let mut number = 200;
        wait_for("TensorRT-LLM's inventory grows", || {
            number += 1;
            self.ask(port(2), number);
            (self.total(2, 0) > 0).then_some(())
        });
        (300..304).for_each(|number| self.ask(port(3), number));
        let asked: u64 = self.llamacpp.iter().map(|engine| engine.legs().len() as u64).sum();
        assert_eq!(asked, 4);
        assert_eq!(self.gateway.api("/config/ai/kv/inventory?service_id=3&ep_idx=0").status, 404, "it tells no events");
    }

    /// All of it, and the first rule still answers for service 0.
    fn check(&self) {
        self.post_the_others();
        self.check_readback();
        self.check_pd();
        self.check_pool();
        self.check_the_others();
        let first = self.gateway.api("/config/ai/kv/inventory?service_id=0&ep_idx=0").json();
        let told = |name: &str| first[name].clone();
        assert_eq!((told("service_id"), told("ep_idx"), told("hash_algo")), (json!(0), json!(0), json!("sha256_cbor")));
        assert!(told("total").as_u64().is_some_and(|total| total > 0), "{first}");
    }
}

#[test]
fn both_curl_bodies_make_rules_that_route_by_cache() {
    let stage = Stage::start(0);
    let endpoints = |engines: &[EngineHandle], role: fn(usize) -> String| {
        let each = engines.iter().enumerate().map(|(at, engine)| {
            let (ip, port) = (engine.http_addr.ip(), engine.http_addr.port());
            format!(r#"{{ "endpointIP": "{ip}", "targetPort": {port}, "weight": 1{} }}"#, role(at))
        });
        each.collect::<Vec<_>>().join(",\n    ")
    };
    let (vip, ports) = (stage.vip, &stage.ports);
    stage.curl(&format!(
        r#"{{
  "serviceArguments": {{
    "externalIP": "{vip}", "port": {}, "protocol": "tcp", "sel": 0, "mode": 4,
    "pd_disagg_mode": true, "kvExactMode": 1, "kvZmqPort": {}, "kvHashAlgo": "sha256_cbor",
    "kvWarmupSec": 30, "kvBlockSize": 16
  }},
  "endpoints": [
    {}
  ]
}}"#,
        ports.pd,
        ports.pd_events,
        endpoints(&stage.pd, |at| format!(r#", "ep_role": {}"#, 1 + at % 2)),
    ));
    stage.curl(&format!(
        r#"{{
  "serviceArguments": {{
    "externalIP": "{vip}", "port": {}, "protocol": "tcp", "sel": 0, "mode": 4,
    "kvExactMode": 3, "kvEngineType": "sglang", "kvDpRankCount": 3, "kvZmqPort": {},
    "kvWarmupSec": 30, "kvBlockSize": 16
  }},
  "endpoints": [
    {}
  ]
}}"#,
        ports.pool,
        ports.pool_events,
        endpoints(&stage.pool, |_| String::new()),
    ));
    stage.check();
}

#[test]
fn both_command_lines_make_rules_that_route_by_cache() {
    let stage = Stage::start(1);
    let hosts = |engines: &[EngineHandle]| {
        engines.iter().map(|engine| format!("{}:1", engine.http_addr.ip())).collect::<Vec<_>>().join(",")
    };
    let (vip, ports) = (stage.vip, &stage.ports);
    stage.loxicmd(&format!(
        "create lb {vip} --tcp={}:{} --endpoints={} --mode=fullproxy --pd-disagg --kv-exact-mode=1 --kv-zmq-port={} \
         --kv-hash-algo=sha256_cbor --kv-warmup=30 --kv-block-size=16 \
         --ep-role=prefill,decode,prefill,decode,prefill,decode",
        ports.pd,
        ports.target,
        hosts(&stage.pd),
        ports.pd_events,
    ));
    stage.loxicmd(&format!(
        "create lb {vip} --tcp={}:{} --endpoints={} --mode=fullproxy --kv-exact-mode=3 --kv-engine-type=sglang \
         --kv-dp-ranks=3 --kv-zmq-port={} --kv-warmup=30 --kv-block-size=16",
        ports.pool,
        ports.target,
        hosts(&stage.pool),
        ports.pool_events,
    ));
    stage.check();
}
