//! Spills, seeds and watchdog counted by a whole gateway, against a model of a few lines that has seen the same requests.

mod common;

use std::net::SocketAddr;
use std::sync::Arc;

use common::client::{self, Connection};
use common::engines::{Gate, Persona, StubEngine};
use common::fleet::{self, EngineProcess};
use common::gateway::{Gateway, Options};
use common::{Scratch, free_port, wait_for};
use serde_json::{Value, json};

#[test]
fn engine_process() {
    fleet::run_as_engine();
}

const MODEL: &str = "kvlane/demo";

fn completion(text: &str) -> Value {
    json!({"model": MODEL, "prompt": text.repeat(40), "max_tokens": 1})
}

/// Three endpoints that hold their answers back. The events of the first are those of an engine that has one prompt; the
/// others have none.
struct Pool {
    gateway: Gateway,
    port: u16,
    stubs: Vec<StubEngine>,
    gates: Vec<Arc<Gate>>,
    engine: EngineProcess,
    _tokenizers: Scratch,
}

const HELD: &str = "What the engine has is this sentence, over and over again. ";

impl Pool {
    fn start(rule: &Value) -> Self {
        let engine = EngineProcess::start("--seed 0 --time-scale 0");
        assert_eq!(client::post(engine.address, "/v1/completions", &completion(HELD)).status, 200);
        let gates: Vec<Arc<Gate>> = (0..3).map(|_| Arc::default()).collect();
        let stub =
            |gate: &Arc<Gate>| StubEngine::start_as(Persona { gate: Some(Arc::clone(gate)), ..Persona::default() });
        let stubs: Vec<_> = gates.iter().map(stub).collect();
        let (port, tokenizers) = (free_port(), fleet::tokenizers());
        let config = format!("[shards]\ncount = 1\n\n[tokenizers]\ndir = \"{}\"\n", tokenizers.path().display());
        let gateway = Gateway::start(Options { config, ..Options::default() });
        let pool = Pool { gateway, port, stubs, gates, engine, _tokenizers: tokenizers };
        pool.post(rule);
        wait_for("the first endpoint's blocks are those of the engine", || {
            let keys = pool.engine.keys();
            (!keys.is_empty() && pool.gateway.inventory(0, 0) == keys).then_some(())
        });
        // The first request for a model asks for its tokenizer.
        let (_, first) = pool.open("warm up");
        pool.gates[first].release();
        wait_for("the tokenizer is loaded", || {
            let status = pool.gateway.api("/status/ready").json();
            status["models"].as_array()?.iter().any(|m| m["state"] == "ready").then_some(())
        });
        pool.settle(&[0; 3]);
        pool
    }

    /// Posts the rule with more options, or changes it.
    fn post(&self, more: &Value) {
        let endpoint = |(index, stub): (usize, &StubEngine)| {
            let (event, replay) = match index {
                0 => (self.engine.event_port, self.engine.replay_port),
                _ => (stub.event_port, stub.event_port + 1),
            };
            json!({"endpointIP": "127.0.0.1", "targetPort": stub.address.port(), "weight": 1, "kvZmqPort": event,
                "kvReplayPort": replay})
        };
        let endpoints: Vec<_> = self.stubs.iter().enumerate().map(endpoint).collect();
        let mut service = json!({"externalIP": "127.0.0.1", "port": self.port, "protocol": "tcp", "sel": 0, "mode": 4,
            "kvExactMode": 3, "kvNoneHashSeed": "0"});
        for (name, value) in more.as_object().expect("an object") {
            service[name] = value.clone();
        }
        let rule = json!({"serviceArguments": service, "endpoints": endpoints});
        let answer = client::post(self.gateway.admin, "/netlox/v1/config/loadbalancer", &rule);
        assert_eq!(answer.status, 200, "{}", answer.text());
    }

    /// Sends a request on a connection of its own; returns when its answer has begun, with the endpoint that has it.
    fn open(&self, text: &str) -> (Connection, usize) {
        let before = self.seen();
        let address: SocketAddr = ([127, 0, 0, 1], self.port).into();
        let mut connection = Connection::open(address).expect("the gateway accepts");
        let body = completion(text).to_string();
        connection.request("POST", "/v1/completions", &[("Connection", "close")], body.as_bytes()).expect("sent");
        assert_eq!(connection.head().expect("an answer").status, 200);
        let after = self.seen();
        let endpoint = (0..3).find(|endpoint| after[*endpoint] > before[*endpoint]).expect("some endpoint has it");
        (connection, endpoint)
    }

    fn seen(&self) -> Vec<usize> {
        self.stubs.iter().map(|stub| stub.seen().len()).collect()
    }

    fn of_endpoint(&self, metric: &str, endpoint: usize) -> u64 {
        let value = self.gateway.metric(metric, &[("service", "0"), ("ep_idx", &endpoint.to_string())]);
        value.unwrap_or_else(|| panic!("{metric} of {endpoint}")) as u64
    }

    fn all_of(&self, metric: &str) -> [u64; 3] {
        [0, 1, 2].map(|endpoint| self.of_endpoint(metric, endpoint))
    }

    /// Waits until so many requests are in flight.
    fn settle(&self, loads: &[u64; 3]) {
        wait_for("the gateway's loads are the requests under way", || {
            (self.all_of("kvlane_endpoint_in_flight") == *loads).then_some(())
        });
    }
}

/// What a gateway must do with hits of the first endpoint, beside two that have nothing.
#[derive(Default)]
struct Truth {
    loads: [u64; 3],
    ticks: u64,
    hits: [u64; 3],
    spills: [u64; 3],
    seeds: [u64; 3],
}

impl Truth {
    fn hit(&mut self, factor: u64, every: u64) -> usize {
        let cap = (factor * self.loads.iter().sum::<u64>()).div_ceil(300).max(1);
        let below = (0..3).filter(|endpoint| self.loads[*endpoint] < cap);
        let relieving = below.min_by_key(|endpoint| (self.loads[*endpoint], *endpoint));
        let spilled = relieving.filter(|_| self.loads[0] >= cap);
        self.ticks += 1;
        // The first of the cold ones.
        let seeded = self.ticks.is_multiple_of(every).then_some(1);
        let chosen = seeded.or(spilled).unwrap_or(0);
        self.hits[chosen] += 1;
        self.spills[chosen] += u64::from(spilled.is_some());
        self.seeds[chosen] += u64::from(seeded.is_some());
        self.loads[chosen] += 1;
        chosen
    }
}

#[test]
fn spills_and_seeds_are_those_of_the_model_request_by_request() {
    let pool = Pool::start(&json!({"kvColdstartSeedN": 4, "kvMeanLoadFactor": 150, "kvLbMode": "hard"}));
    let mut truth = Truth::default();
    let mut open: [Vec<Connection>; 3] = Default::default();
    for number in 0..48 {
        let expected = truth.hit(150, 4);
        let (connection, endpoint) = pool.open(HELD);
        assert_eq!(endpoint, expected, "request {number}, loads {:?}", truth.loads);
        open[endpoint].push(connection);
        // Answers end in an order of their own: one at the busiest, then two at whoever comes round.
        let ends = match number % 4 {
            1 => vec![(0..3).max_by_key(|endpoint| truth.loads[*endpoint]).expect("three")],
            3 => vec![number % 3, (number / 4) % 3],
            _ => Vec::new(),
        };
        for endpoint in ends {
            if truth.loads[endpoint] > 0 {
                pool.gates[endpoint].release();
                truth.loads[endpoint] -= 1;
            }
        }
        pool.settle(&truth.loads);
    }
    assert!(truth.spills.iter().sum::<u64>() > 5 && truth.seeds[1] == 12, "the run shows both");
    assert_eq!(pool.all_of("loxilb_pd_kv_tier15_hits_total"), truth.hits);
    assert_eq!(pool.all_of("loxilb_pd_kv_tier15_spills_total"), truth.spills);
    assert_eq!(pool.all_of("loxilb_pd_kv_tier15_cold_seeds_total"), truth.seeds);
    for (endpoint, load) in truth.loads.iter().enumerate() {
        (0..*load).for_each(|_| pool.gates[endpoint].release());
    }
    pool.settle(&[0; 3]);
}

#[test]
fn the_watchdog_counts_each_run_of_repeated_prompts_without_a_hit() {
    let pool =
        Pool::start(&json!({"kvZeroHitN": 5, "kvColdstartSeedN": 0, "kvSpillRelief": false, "kvLbMode": "hard"}));
    let fired =
        || pool.gateway.metric("loxilb_pd_kv_zero_hit_watchdog_total", &[("service_id", "0")]).expect("a series");
    let missed = || {
        let labels = [("service", "0"), ("reason", "no_worker")];
        pool.gateway.metric("loxilb_pd_kv_tier15_miss_reason_total", &labels).expect("a series")
    };
    let ask = |text: &str| {
        let (mut connection, endpoint) = pool.open(text);
        pool.gates[endpoint].release();
        while connection.chunk().expect("the answer goes on").is_some() {}
        endpoint
    };
    assert_eq!((fired(), missed()), (0.0, 0.0));
    // The first proves nothing; the 5th, 10th, 15th and 20th repetition end a run each.
    (0..24).for_each(|_| _ = ask("Nobody has this one, however often it comes. "));
    assert_eq!((fired(), missed()), (4.0, 24.0));
    // A hit ends the run of three.
    assert_eq!(ask(HELD), 0);
    (0..4).for_each(|_| _ = ask("Nobody has this one, however often it comes. "));
    assert_eq!((fired(), missed()), (4.0, 28.0));
    ask("Nobody has this one, however often it comes. ");
    assert_eq!((fired(), missed()), (5.0, 29.0));
    // Prompts that come once say nothing.
    (0..9).for_each(|number| _ = ask(&format!("Number {number} comes once and never again. ")));
    assert_eq!((fired(), missed()), (5.0, 38.0));
}

#[test]
fn a_rule_is_changed_under_way_and_keeps_what_it_knows() {
    let options = |relief: bool| json!({"kvColdstartSeedN": 3, "kvSpillRelief": relief, "kvLbMode": "hard"});
    let pool = Pool::start(&options(false));
    let held = pool.gateway.inventory(0, 0);
    let mut open = Vec::new();
    let mut go = |loads: &[u64; 3]| {
        let (connection, endpoint) = pool.open(HELD);
        open.push(connection);
        pool.settle(loads);
        endpoint
    };
    assert_eq!([go(&[1, 0, 0]), go(&[2, 0, 0])], [0, 0], "without relief the winner stays");
    pool.post(&options(true));
    // The third hit of the rule: the count goes on.
    assert_eq!(go(&[2, 1, 0]), 1);
    assert_eq!(pool.all_of("loxilb_pd_kv_tier15_cold_seeds_total"), [0, 1, 0]);
    // Load 3: cap ⌈525 / 300⌉ = 2.
    assert_eq!(go(&[2, 1, 1]), 2);
    assert_eq!(pool.all_of("loxilb_pd_kv_tier15_hits_total"), [2, 1, 1]);
    assert_eq!(pool.gateway.inventory(0, 0), held);
    let shown = pool.gateway.api("/config/loadbalancer/all").json();
    let arguments = &shown["lbAttr"][0]["serviceArguments"];
    assert_eq!((&arguments["kvSpillRelief"], &arguments["service_id"]), (&json!(true), &json!(0)));
    for (endpoint, load) in [2, 1, 1].into_iter().enumerate() {
        (0..load).for_each(|_| pool.gates[endpoint].release());
    }
    pool.settle(&[0; 3]);
}

/// Two endpoints that have a prompt, the first one more of it, beside one that has nothing; one answer at a time.
struct Pair {
    gateway: Gateway,
    port: u16,
    stubs: [StubEngine; 3],
    _engines: [EngineProcess; 2],
    _tokenizers: Scratch,
}

impl Pair {
    fn start(cores: &str, options: &Value) -> Self {
        Pair::with([(); 3].map(|()| StubEngine::start()), cores, options)
    }

    fn with(stubs: [StubEngine; 3], cores: &str, options: &Value) -> Self {
        let engines = [40, 20].map(|sentences| {
            let engine = EngineProcess::start("--seed 0 --time-scale 0");
            let body = json!({"model": MODEL, "prompt": HELD.repeat(sentences), "max_tokens": 1});
            assert_eq!(client::post(engine.address, "/v1/completions", &body).status, 200);
            engine
        });
        let (port, tokenizers) = (free_port(), fleet::tokenizers());
        let config = format!("[shards]\ncores = {cores}\n\n[tokenizers]\ndir = \"{}\"\n", tokenizers.path().display());
        let gateway = Gateway::start(Options { config, ..Options::default() });
        let events = |index: usize| match engines.get(index) {
            Some(engine) => (engine.event_port, engine.replay_port),
            None => (stubs[index].event_port, stubs[index].event_port + 1),
        };
        let endpoint = |index: usize| {
            let (event, replay) = events(index);
            json!({"endpointIP": "127.0.0.1", "targetPort": stubs[index].address.port(), "weight": 1,
                "kvZmqPort": event, "kvReplayPort": replay})
        };
        let mut service = json!({"externalIP": "127.0.0.1", "port": port, "protocol": "tcp", "mode": 4, "sel": 0,
            "kvExactMode": 3, "kvNoneHashSeed": "0", "routeHeader": true});
        for (name, value) in options.as_object().expect("an object") {
            service[name] = value.clone();
        }
        let rule = json!({"serviceArguments": service, "endpoints": [endpoint(0), endpoint(1), endpoint(2)]});
        let answer = client::post(gateway.admin, "/netlox/v1/config/loadbalancer", &rule);
        assert_eq!(answer.status, 200, "{}", answer.text());
        for (index, engine) in engines.iter().enumerate() {
            wait_for("the blocks are those of the engine", || {
                let keys = engine.keys();
                (!keys.is_empty() && gateway.inventory(0, index as u32) == keys).then_some(())
            });
        }
        let pair = Pair { gateway, port, stubs, _engines: engines, _tokenizers: tokenizers };
        pair.ask("warm up");
        wait_for("the tokenizer is loaded", || {
            let status = pair.gateway.api("/status/ready").json();
            status["models"].as_array()?.iter().any(|m| m["state"] == "ready").then_some(())
        });
        pair
    }

    /// Asks on a connection of its own; returns the endpoint that answered, and what is said of that.
    fn ask(&self, text: &str) -> (usize, String) {
        let answer = client::post(([127, 0, 0, 1], self.port).into(), "/v1/completions", &completion(text));
        assert_eq!(answer.status, 200, "{}", answer.text());
        let said = answer.header("x-kvlane-route").expect("the rule shows it").to_owned();
        let place = said.split("; ").find_map(|part| part.strip_prefix("ep_idx=")?.parse().ok());
        (place.unwrap_or_else(|| panic!("{said}")), said)
    }

    fn of_each(&self, metric: &str) -> [u64; 3] {
        [0, 1, 2].map(|endpoint: usize| {
            let labels = [("service", "0"), ("ep_idx", &*endpoint.to_string())];
            self.gateway.metric(metric, &labels).unwrap_or_else(|| panic!("{metric} of {endpoint}")) as u64
        })
    }
}

#[test]
fn a_hit_whose_engine_has_gone_is_counted_once_where_it_was_answered() {
    for cores in ["[0]", "[0, 1]"] {
        let pair = Pair::start(cores, &json!({"kvColdstartSeedN": 4, "kvClaimMs": 0, "kvLbMode": "hard"}));
        let tier = || {
            let labels = [("service", "0"), ("tier", "tier15")];
            pair.gateway.metric("loxilb_ai_pd_tier_selected_total", &labels).expect("a series")
        };
        let answered = |asked: usize| (0..asked).map(|_| pair.ask(HELD).0).collect::<Vec<_>>();
        assert_eq!(answered(2), [0, 0]);
        let before = tier();
        pair.stubs[0].stop();
        // The third hit, which may find a dead connection, a refused one, or that a probe was sooner.
        let (place, said) = pair.ask(HELD);
        assert_eq!(place, 1, "{said}");
        assert!(said.contains("tier=tier15; reason=overlap"), "{said}");
        assert_eq!(pair.of_each("loxilb_pd_kv_tier15_hits_total"), [2, 1, 0]);
        assert_eq!(pair.of_each("loxilb_pd_kv_tier15_cold_seeds_total"), [0; 3]);
        assert_eq!(tier(), before + 1.0);
        // Every fourth is seeded, whatever became of those before it.
        assert_eq!(answered(6), [2, 1, 1, 1, 2, 1]);
        assert_eq!(pair.of_each("loxilb_pd_kv_tier15_hits_total"), [2, 5, 2]);
        assert_eq!(pair.of_each("loxilb_pd_kv_tier15_cold_seeds_total"), [0, 0, 2]);
        // Nobody of those that had it is left: no hit, and no number drawn.
        pair.stubs[1].stop();
        let (place, said) = pair.ask(HELD);
        assert!(place == 2 && said.contains("; miss="), "{said}");
        assert_eq!(pair.of_each("loxilb_pd_kv_tier15_hits_total"), [2, 5, 2]);
    }
}

#[test]
fn a_cold_endpoint_that_dies_of_its_request_has_had_its_turn() {
    let dying = StubEngine::start_as(Persona { dies: true, ..Persona::default() });
    let stubs = [StubEngine::start(), StubEngine::start(), dying];
    let pair = Pair::with(stubs, "[0]", &json!({"kvColdstartSeedN": 4, "kvClaimMs": 0, "kvLbMode": "hard"}));
    let before = pair.stubs[2].seen().len();
    for _ in 0..16 {
        assert_eq!(pair.ask(HELD).0, 0);
    }
    assert_eq!(pair.stubs[2].seen().len() - before, 4, "the fourth, eighth, twelfth and sixteenth");
    assert_eq!(pair.of_each("loxilb_pd_kv_tier15_hits_total"), [16, 0, 0]);
}
