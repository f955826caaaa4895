//! What fleets go through: workers that come back empty, that are slow for a while, that fail; and the selections that go by
//! how a prompt begins.

mod common;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::asking::{ask, completion, evidence, local};
use common::client::{self, Answer, Connection};
use common::engines::{Gate, Persona, StubEngine};
use common::fleet::{self, EngineProcess};
use common::gateway::{Gateway, Options};
use common::pd::{Fleet as Pairs, Plan};
use common::{Scratch, free_port, wait_for};
use loadgen::engine::{Action, Engine, EngineHandle, EngineKind, EngineOptions, LegFault, Phase};
use serde_json::{Value, json};

#[test]
fn engine_process() {
    fleet::run_as_engine();
}

fn endpoint_of(answer: &Answer) -> usize {
    let place = evidence(answer, "ep_idx").expect("it was asked for");
    place.parse().unwrap_or_else(|_| panic!("{place} is no endpoint"))
}

fn wait_for_model(gateway: &Gateway) {
    wait_for("the model is loaded", || {
        let status = gateway.api("/status/ready").json();
        status["models"].as_array()?.iter().any(|model| model["state"] == "ready").then_some(())
    });
}

// ---- A worker that comes back empty.

/// Four engines that have the same long beginning, behind a rule that seeds each eighth hit.
struct Warm {
    engines: Vec<EngineProcess>,
    gateway: Gateway,
    port: u16,
    asked: usize,
    _tokenizers: Scratch,
}

const SEED_EVERY: usize = 8;

impl Warm {
    fn start(mode: &str) -> Self {
        let engines: Vec<_> = (0..4).map(|_| EngineProcess::start("--time-scale 0")).collect();
        for engine in &engines {
            assert_eq!(client::post(engine.address, "/v1/completions", &completion(&prompt(0))).status, 200);
        }
        let (tokenizers, port) = (fleet::tokenizers(), free_port());
        let options =
            format!("kvBlockSize = 16\nrouteHeader = true\nkvLbMode = \"{mode}\"\nkvColdstartSeedN = {SEED_EVERY}");
        let config = fleet::rule(port, &tokenizers, &engines).replace("kvBlockSize = 16", &options).replacen(
            "[limits]",
            "[shards]\ncores = [0, 1]\n\n[limits]",
            1,
        );
        let gateway = Gateway::start(Options { config, ..Options::default() });
        // The first request for a model asks for its tokenizer.
        ask(port, &[], &completion("Wake up."));
        wait_for_model(&gateway);
        let warm = Warm { engines, gateway, port, asked: 1, _tokenizers: tokenizers };
        warm.settle();
        warm
    }

    /// Waits until the gateway knows what each engine has.
    fn settle(&self) {
        for (place, engine) in self.engines.iter().enumerate() {
            wait_for("the inventory follows the engine", || {
                (self.gateway.inventory(0, place as u32) == engine.keys()).then_some(())
            });
        }
    }

    /// So many requests, one after the other, that begin alike and end each in its own way; how many each engine had.
    fn send(&mut self, requests: usize) -> [usize; 4] {
        let mut counts = [0; 4];
        for _ in 0..requests {
            self.asked += 1;
            counts[endpoint_of(&ask(self.port, &[], &completion(&prompt(self.asked))))] += 1;
            self.settle();
        }
        counts
    }
}

/// Forty sentences that are in every prompt, and one that is not.
fn prompt(number: usize) -> String {
    let common: String =
        (0..40).map(|line| format!("Rule {line} of the house is that nobody leaves the door open. ")).collect();
    format!("{common}This is question {number}, and nobody asked it before.")
}

/// Everything that all others have is a hit at one of them; each eighth of those goes to the empty one, so that it has the
/// common beginning after eight hits at most, and an even part of what follows.
#[test]
fn a_worker_that_comes_back_empty_has_its_fair_share_after_one_seed() {
    for mode in ["hard", "ttft"] {
        let mut warm = Warm::start(mode);
        let fair = warm.send(32);
        assert!(fair.iter().all(|count| (6..=10).contains(count)), "{mode}: {fair:?}");
        warm.engines[0].restart();
        wait_for("it is back and has nothing", || {
            let up = warm.gateway.metric("kvlane_endpoint_up", &[("ep_idx", "0")])? == 1.0;
            (up && warm.gateway.inventory(0, 0).is_empty()).then_some(())
        });
        let seeds =
            || warm.gateway.metric("loxilb_pd_kv_tier15_cold_seeds_total", &[("ep_idx", "0")]).expect("a series");
        assert_eq!(seeds(), 0.0);
        let seeded = warm.send(SEED_EVERY);
        assert_eq!(seeded[0], 1, "{mode}: {seeded:?}");
        let seeds = warm.gateway.metric("loxilb_pd_kv_tier15_cold_seeds_total", &[("ep_idx", "0")]);
        assert_eq!(seeds, Some(1.0), "{mode}");
        let after = warm.send(80);
        assert!(after[0] * 10 >= 80 / 4 * 9, "{mode}: 90 % of a fair part of 80 is 18: {after:?}");
    }
}

// ---- A worker that is slow for a while.

/// Four engines in this process behind a rule of the blend `ttft`, and clients that ask one thing after the other.
struct Pool {
    engines: Vec<EngineHandle>,
    _gateway: Gateway,
    port: u16,
    asked: AtomicUsize,
    _tokenizers: Scratch,
}

/// Milliseconds that an engine takes for each prompt, about, and that a slow one adds.
const PROMPT_MS: f64 = 40.0;
const SLOW_MS: u64 = 80;

impl Pool {
    fn start() -> Self {
        let options = EngineOptions { time_scale: 1.0, ttft_floor_ms: PROMPT_MS, ..EngineOptions::ephemeral() };
        let engines: Vec<_> = (0..4).map(|_| Engine::start(&options).expect("free ports")).collect();
        let (tokenizers, port) = (fleet::tokenizers(), free_port());
        let mut config = format!(
            "[tokenizers]\ndir = \"{}\"\n\n[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {port}\nprotocol = \"tcp\"\n\
             kvExactMode = 3\nkvEngineType = \"vllm\"\nkvBlockSize = 16\nkvNoneHashSeed = \"0\"\nkvLbMode = \"ttft\"\n\
             routeHeader = true\n",
            tokenizers.path().display()
        );
        for engine in &engines {
            let port_of = |address: Option<SocketAddr>| address.expect("engines publish and replay").port();
            config += &format!(
                "\n[[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = {}\nweight = 1\nkvZmqPort = {}\nkvReplayPort = {}\n",
                engine.http_addr.port(),
                port_of(engine.event_addr),
                port_of(engine.replay_addr)
            );
        }
        let gateway = Gateway::start(Options { config, ..Options::default() });
        ask(port, &[], &completion("Wake up."));
        wait_for_model(&gateway);
        Pool { engines, _gateway: gateway, port, asked: AtomicUsize::new(0), _tokenizers: tokenizers }
    }

    /// So many prompts that nobody has, six at a time; which part of a fair one the first engine had.
    fn share(&self, requests: usize) -> f64 {
        let counts = Mutex::new([0_usize; 4]);
        let left = AtomicUsize::new(requests);
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
                        let number = self.asked.fetch_add(1, Ordering::Relaxed);
                        let text = format!("{number} is what nobody has asked before. ").repeat(20);
                        let place = endpoint_of(&ask(self.port, &[], &completion(&text)));
                        counts.lock().expect("no client panics")[place] += 1;
                    }
                });
            }
        });
        let counts = counts.into_inner().expect("no client panics");
        counts[0] as f64 * 4.0 / requests as f64
    }
}

/// Only shares decide: nothing is said of how long anything takes, but that one takes three times as long as the others.
#[test]
fn a_worker_that_is_three_times_slower_gets_less_and_its_part_once_it_is_as_fast() {
    let pool = Pool::start();
    let slow = LegFault { action: Action::Slow, phase: Phase::Computing, status: 500, ms: SLOW_MS, after: 1, times: 0 };
    pool.engines[0].set_leg_fault(Some(slow));
    wait_for("the slow worker has clearly less than a fair part", || (pool.share(100) < 0.7).then_some(()));
    pool.engines[0].set_leg_fault(None);
    wait_for("it has its fair part again", || (pool.share(100) > 0.8).then_some(()));
}

// ---- Selections that go by how a prompt begins.

/// Stand-ins for engines behind a rule without KV routing.
struct Plain {
    stubs: Vec<StubEngine>,
    gate: Arc<Gate>,
    gateway: Gateway,
    port: u16,
}

impl Plain {
    /// With a weight for each engine. Answers end when the gate lets them, if they are held.
    fn start(options: &str, weights: &[u32], held: bool) -> Self {
        Self::over(options, &weights.iter().map(|weight| Some(*weight)).collect::<Vec<_>>(), held)
    }

    /// The same, where nobody listens in place of an engine without weight.
    fn over(options: &str, weights: &[Option<u32>], held: bool) -> Self {
        let gate = Arc::new(Gate::default());
        let persona = || Persona { gate: held.then(|| Arc::clone(&gate)), ..Persona::default() };
        let stubs: Vec<_> = weights.iter().map(|_| StubEngine::start_as(persona())).collect();
        let port = free_port();
        let mut config = format!(
            "[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {port}\nprotocol = \"tcp\"\nrouteHeader = true\n{options}\n"
        );
        for (stub, weight) in stubs.iter().zip(weights) {
            let (port, weight) = weight.map_or_else(|| (free_port(), 1), |weight| (stub.address.port(), weight));
            config +=
                &format!("\n[[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = {port}\nweight = {weight}\n");
        }
        let gateway = Gateway::start(Options { config, ..Options::default() });
        Plain { stubs, gate, gateway, port }
    }

    /// Where a prompt with this system message goes.
    fn place_of(&self, system: &str, question: &str) -> usize {
        endpoint_of(&ask(self.port, &[], &chat(system, question)))
    }

    /// Sends one and returns when its answer has begun; it stays under way.
    fn open(&self, system: &str) -> (Connection, usize) {
        let mut connection = Connection::open(local(self.port)).expect("the gateway accepts");
        let body = chat(system, "and?").to_string();
        connection.request("POST", "/v1/chat/completions", &[], body.as_bytes()).expect("sent");
        let head = connection.head().expect("an answer begins");
        let place = endpoint_of(&head);
        (connection, place)
    }

    /// Waits until nothing is under way.
    fn wait_until_idle(&self) {
        wait_for("nothing is in flight", || {
            (self.gateway.metric_sum("kvlane_endpoint_in_flight") == 0.0).then_some(())
        });
    }
}

fn chat(system: &str, question: &str) -> Value {
    json!({"model": "m", "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}]})
}

/// What each of so many system prompts was given to, asked twice over connections of their own.
fn homes(plain: &Plain, prompts: usize) -> Vec<usize> {
    let of = |prompt: usize, question: &str| plain.place_of(&format!("You are helper number {prompt}."), question);
    let homes: Vec<usize> = (0..prompts).map(|prompt| of(prompt, "first?")).collect();
    for (prompt, home) in homes.iter().enumerate() {
        assert_eq!(of(prompt, "second?"), *home, "prompt {prompt} goes where it went");
    }
    homes
}

fn counts(homes: &[usize], places: usize) -> Vec<usize> {
    (0..places).map(|place| homes.iter().filter(|home| **home == place).count()).collect()
}

#[test]
fn sel_9_sends_equal_beginnings_to_one_worker_whichever_shard_they_come_to() {
    let plain = Plain::start("sel = 9", &[1; 4], false);
    let homes = homes(&plain, 64);
    let counts = counts(&homes, 4);
    assert!(counts.iter().all(|count| *count > 4), "{counts:?}");
    assert_eq!(plain.stubs.iter().map(|stub| stub.seen().len()).sum::<usize>(), 128);
}

#[test]
fn sel_10_gives_beginnings_by_weight_and_none_to_who_drains() {
    let plain = Plain::start("sel = 10", &[1, 4, 0, 1], false);
    let counts = counts(&homes(&plain, 120), 4);
    // 20, 80, 0 and 20 on average; the hash is fixed, so that the shares are too.
    assert!(counts[2] == 0 && counts[1] > 2 * counts[0] && counts[1] > 2 * counts[3], "{counts:?}");
    assert!(counts[0] > 6 && counts[3] > 6, "{counts:?}");
}

#[test]
fn sel_8_keeps_a_beginning_at_its_worker_up_to_the_bound_and_then_goes_on_along_the_ring() {
    let plain = Plain::start("sel = 8", &[1; 4], true);
    let mut places = Vec::new();
    let mut open = Vec::new();
    for under_way in 0..8_u64 {
        // So many are in flight, this one included, and each worker may have ⌈125 × that / 400⌉ of them.
        let bound = (125 * (under_way + 1)).div_ceil(400) as usize;
        let (connection, place) = plain.open("You answer in rhymes.");
        let held = places.iter().filter(|other| **other == place).count();
        assert!(held < bound, "{places:?}, then {place}: the bound is {bound}");
        places.push(place);
        open.push(connection);
        let sent = places.len() as f64;
        wait_for("it is counted", || (plain.gateway.metric_sum("kvlane_endpoint_in_flight") == sent).then_some(()));
    }
    // The first three may not share a worker.
    let used = counts(&places[..3], 4);
    assert!(used.iter().all(|count| *count <= 1), "{places:?}");
    (0..8).for_each(|_| plain.gate.release());
    plain.wait_until_idle();
    // With nothing in flight it is at home again, each time.
    for _ in 0..4 {
        let (connection, place) = plain.open("You answer in rhymes.");
        assert_eq!(place, places[0]);
        plain.gate.release();
        drop(connection);
        plain.wait_until_idle();
    }
}

#[test]
fn of_a_worker_that_does_not_answer_sel_9_moves_its_own_beginnings_alone() {
    let all = Plain::start("sel = 9", &[1; 3], false);
    let before = homes(&all, 48);
    // The same rule with nobody at the third place.
    let gone = Plain::over("sel = 9", &[Some(1), Some(1), None], false);
    let after = homes(&gone, 48);
    for (prompt, (before, after)) in before.iter().zip(&after).enumerate() {
        assert!(before == after || *before == 2, "prompt {prompt} moved from {before} to {after}");
    }
    let moved: Vec<usize> =
        before.iter().zip(&after).filter(|(before, _)| **before == 2).map(|(_, after)| *after).collect();
    let moved = counts(&moved, 3);
    assert!(moved[0] > 0 && moved[1] > 0 && moved[2] == 0, "{moved:?}");
}

// ---- The breaker.

/// Longest wait for a breaker to close: it stays open for 30 s.
const BREAKER_PATIENCE: Duration = Duration::from_secs(90);

#[test]
fn the_breaker_opens_after_errors_in_a_row_and_closes_again_and_both_are_counted() {
    let fleet = Pairs::start(&Plan { pairs: 2, ..Plan::of(EngineKind::Vllm) });
    let gateway = &fleet.gateway;
    let up = |place: &str| gateway.metric("kvlane_endpoint_up", &[("ep_idx", place)]).expect("a series");
    let (flips, heals) = ("loxilb_pd_cb_flips_total", "loxilb_pd_cb_proactive_heal_total");
    assert_eq!((gateway.metric_sum(flips), gateway.metric_sum(heals), up("0")), (0.0, 0.0, 1.0));
    let fault = LegFault { action: Action::Status, phase: Phase::Arrival, status: 500, ms: 0, after: 1, times: 0 };
    fleet.prefill[0].set_leg_fault(Some(fault));
    let mut asked = 0;
    let mut ask = || {
        asked += 1;
        let body = completion(&format!("Nobody has asked for number {asked} before, whatever the number is."));
        fleet.ask("/v1/completions", body.to_string().as_bytes())
    };
    wait_for("the breaker opens", || {
        ask();
        (gateway.metric_sum(flips) == 1.0).then_some(())
    });
    assert_eq!((up("0"), up("2")), (0.0, 1.0), "the first of the prefill engines is out");
    let legs = || fleet.prefill[0].legs().len();
    let before = legs();
    assert!((0..8).all(|_| ask().status == 200), "the others do its work");
    assert_eq!(legs(), before, "it gets nothing");
    fleet.prefill[0].set_leg_fault(None);
    let deadline = Instant::now() + BREAKER_PATIENCE;
    while gateway.metric_sum(heals) == 0.0 {
        assert!(Instant::now() < deadline, "the breaker did not close within {BREAKER_PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!((gateway.metric_sum(flips), gateway.metric_sum(heals), up("0")), (1.0, 1.0, 1.0));
    wait_for("it gets its part again", || {
        assert_eq!(ask().status, 200);
        (legs() > before).then_some(())
    });
}
