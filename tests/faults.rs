//! Nothing lost under faults: an engine killed under load, clients that leave, a gateway told to stop.

mod common;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::client::{self, Connection};
use common::fleet::{self, EngineProcess};
use common::gateway::{Gateway, Options};
use common::{Scratch, free_port, wait_for};
use serde_json::{Value, json};

#[test]
fn engine_process() {
    fleet::run_as_engine();
}

/// How one streamed answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    /// `[DONE]`, then the end of the body.
    Complete,
    /// The body's end without `[DONE]`: what must never be.
    CleanButIncomplete,
    /// An SSE error event, or a broken connection, after the answer had begun.
    Broken,
    /// No answer: a status that is not 200, or a connection that ended before the head.
    Refused(String),
}

struct Outcome {
    end: End,
    /// The engine that answered, by its own header.
    engine: Option<String>,
    finished: Instant,
}

fn chat(conversation: u64, turns: u64, tokens: u32) -> Value {
    let mut messages =
        vec![json!({"role": "system", "content": format!("You are helper number {conversation}. ").repeat(12)})];
    for turn in 0..turns {
        messages.push(json!({"role": "user", "content": format!("Question {turn} about the river and the stone.")}));
    }
    json!({"model": "kvlane/demo", "messages": messages, "stream": true, "max_tokens": tokens, "ignore_eos": true})
}

/// Streams one answer to its end.
fn stream(address: SocketAddr, body: &Value) -> Outcome {
    let mut engine = None;
    let end = stream_to_end(address, body, &mut engine).unwrap_or_else(|error| match &engine {
        Some(_) => End::Broken,
        None => End::Refused(error.to_string()),
    });
    Outcome { end, engine, finished: Instant::now() }
}

fn stream_to_end(address: SocketAddr, body: &Value, engine: &mut Option<String>) -> std::io::Result<End> {
    let mut connection = Connection::open(address)?;
    connection.request("POST", "/v1/chat/completions", &[("Connection", "close")], body.to_string().as_bytes())?;
    let head = connection.head()?;
    if head.status != 200 {
        return Ok(End::Refused(format!("status {}", head.status)));
    }
    *engine = Some(head.header("x-engine").expect("the simulated engine says who it is").to_owned());
    let mut text = Vec::new();
    while let Some(chunk) = connection.chunk()? {
        text.extend_from_slice(&chunk);
    }
    let text = String::from_utf8_lossy(&text);
    Ok(if text.contains("\"error\"") {
        End::Broken
    } else if text.trim_end().ends_with("data: [DONE]") {
        End::Complete
    } else {
        End::CleanButIncomplete
    })
}

/// Runs `clients` closed loops until told to stop; returns how every request ended.
fn load(address: SocketAddr, clients: u64, tokens: u32, stop: &AtomicBool, outcomes: &Mutex<Vec<Outcome>>) {
    std::thread::scope(|scope| {
        for client in 0..clients {
            std::thread::Builder::new()
                .stack_size(256 * 1024)
                .spawn_scoped(scope, move || {
                    let mut request = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let outcome = stream(address, &chat((client + request) % 48, 1 + request % 4, tokens));
                        outcomes.lock().expect("no holder panics").push(outcome);
                        request += 1;
                    }
                })
                .expect("the machine has threads");
        }
    });
}

/// Descriptors and resident bytes of a process.
fn footprint(pid: u32) -> (usize, u64) {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("our child").count();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("our child");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("every process has one");
    let kilobytes: u64 = line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number");
    (descriptors, kilobytes * 1024)
}

/// Length of the soak; 60 on request, for the figures that are quoted.
fn soak_seconds() -> u64 {
    std::env::var("KVLANE_SOAK_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(12)
}

struct Soak {
    gateway: Gateway,
    engines: Vec<EngineProcess>,
    address: SocketAddr,
    _tokenizers: Scratch,
}

impl Soak {
    fn start() -> Self {
        // Caches small enough to be full all the time: 400 blocks for 48 conversations.
        let engines: Vec<_> =
            (0..4).map(|_| EngineProcess::start("--blocks 400 --decode-tps 20 --seed 0 --max-running 128")).collect();
        let tokenizers = fleet::tokenizers();
        let port = free_port();
        let config = fleet::rule(port, &tokenizers, &engines);
        let gateway = Gateway::start(Options { config, ..Options::default() });
        let soak = Soak { gateway, engines, address: ([127, 0, 0, 1], port).into(), _tokenizers: tokenizers };
        wait_for("all event streams are connected", || (0..4).all(|e| soak.is_connected(e)).then_some(()));
        // The rule names no model: the first request for one asks for its tokenizer.
        assert_eq!(stream(soak.address, &chat(0, 1, 1)).end, End::Complete);
        wait_for("the tokenizer is loaded", || {
            let status = soak.gateway.api("/status/ready").json();
            status["models"].as_array()?.iter().any(|m| m["state"] == "ready").then_some(())
        });
        soak
    }

    fn is_connected(&self, engine: usize) -> bool {
        let label = self.engines[engine].address.to_string();
        self.gateway.metric("loxilb_kv_subscriber_connected", &[("ep", &label)]) == Some(1.0)
    }

    fn in_flight(&self) -> f64 {
        (0..4)
            .map(|e| self.gateway.metric("kvlane_endpoint_in_flight", &[("ep_idx", &e.to_string())]).expect("a series"))
            .sum()
    }

    /// Waits until every inventory equals what its engine holds.
    fn wait_until_inventories_are_true(&self) {
        for (index, engine) in self.engines.iter().enumerate() {
            wait_for(&format!("the inventory of engine {index} is what it holds"), || {
                (self.gateway.inventory(0, index as u32) == engine.keys()).then_some(())
            });
        }
    }
}

#[test]
fn an_engine_killed_under_load_costs_only_the_answers_it_had_begun() {
    let seconds = soak_seconds();
    let mut soak = Soak::start();
    let (stop, outcomes) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let part = Duration::from_secs(seconds) / 4;
    let address = soak.address;
    let victim = soak.engines[0].address.to_string();
    let (killed, mut footprints) = std::thread::scope(|scope| {
        scope.spawn(|| load(address, 200, 30, &stop, &outcomes));
        std::thread::sleep(part);
        let killed = Instant::now();
        soak.engines[0].kill();
        wait_for("the dead engine's blocks are ineligible", || (!soak.is_connected(0)).then_some(()));
        println!("blocks ineligible {:?} after the engine's death", killed.elapsed());
        std::thread::sleep(part);
        soak.engines[0].restart();
        wait_for("the engine is back in use", || (soak.engines[0].stat("requests") > 0).then_some(()));
        wait_for("its blocks are known again", || (!soak.gateway.inventory(0, 0).is_empty()).then_some(()));
        // Memory and descriptors over the last half.
        let mut footprints = Vec::new();
        let end = Instant::now() + part * 2;
        while Instant::now() < end {
            footprints.push(footprint(soak.gateway.pid()));
            std::thread::sleep(Duration::from_millis(250));
        }
        stop.store(true, Ordering::Relaxed);
        (killed, footprints)
    });
    let outcomes = outcomes.into_inner().expect("no holder panics");
    let mut counts: HashMap<String, usize> = HashMap::new();
    for outcome in &outcomes {
        *counts.entry(format!("{:?}", outcome.end)).or_default() += 1;
    }
    println!("{} answers: {counts:?}", outcomes.len());
    for outcome in outcomes.iter().filter(|o| o.end != End::Complete) {
        assert_eq!(outcome.end, End::Broken, "a fault shows, and only in an answer that had begun");
        assert_eq!(outcome.engine.as_deref(), Some(&*victim), "only the killed engine's answers break");
        assert!(outcome.finished >= killed, "nothing breaks before");
    }
    assert!(outcomes.len() > 200, "every client was served more than once");

    wait_for("in-flight counters return to 0", || (soak.in_flight() == 0.0).then_some(()));
    soak.wait_until_inventories_are_true();
    let half = footprints.split_off(footprints.len() / 2);
    let peak = |samples: &[(usize, u64)]| {
        (samples.iter().map(|s| s.0).max().unwrap_or(0), samples.iter().map(|s| s.1).max().unwrap_or(0))
    };
    let (early, late) = (peak(&footprints), peak(&half));
    println!("descriptors and resident bytes, peaks of two halves: {early:?}, {late:?}");
    assert!(late.0 <= early.0 + 40, "descriptors are flat: {early:?} then {late:?}");
    assert!(late.1 <= early.1 + early.1 / 20 + (2 << 20), "memory is flat: {early:?} then {late:?}");
}

#[test]
fn an_engine_sees_its_client_leave_before_the_first_byte_and_mid_stream() {
    let engines = vec![EngineProcess::start("--blocks 4000 --prefill-tps 500 --decode-tps 10 --seed 0")];
    let tokenizers = fleet::tokenizers();
    let port = free_port();
    let gateway = Gateway::start(Options { config: fleet::rule(port, &tokenizers, &engines), ..Options::default() });
    let address: SocketAddr = ([127, 0, 0, 1], port).into();
    let engine = &engines[0];
    let in_flight = || gateway.metric("kvlane_endpoint_in_flight", &[("ep_idx", "0")]);

    // Before the first byte: a long prefill is under way at the engine.
    let long =
        json!({"model": "kvlane/demo", "prompt": "river stone ".repeat(2000), "stream": true, "max_tokens": 500});
    let mut connection = Connection::open(address).expect("the gateway accepts");
    connection.request("POST", "/v1/completions", &[], long.to_string().as_bytes()).expect("sent");
    wait_for("the engine has the request", || (engine.stat("requests") == 1).then_some(()));
    drop(connection);
    wait_for("the engine saw the client leave", || (engine.stat("disconnects") == 1).then_some(()));

    // Mid-stream: after a chunk came.
    let body = chat(1, 1, 500);
    let mut connection = Connection::open(address).expect("the gateway accepts");
    connection.request("POST", "/v1/chat/completions", &[], body.to_string().as_bytes()).expect("sent");
    assert_eq!(connection.head().expect("an answer begins").status, 200);
    connection.chunk().expect("a chunk").expect("comes");
    drop(connection);
    wait_for("the engine saw the client leave", || (engine.stat("disconnects") == 2).then_some(()));
    wait_for("nothing is in flight", || (in_flight() == Some(0.0)).then_some(()));

    // While tokenizing: the engine never hears of it, or sees it leave at once.
    let huge = json!({"model": "kvlane/demo", "prompt": "q".repeat(8_000_000), "max_tokens": 500});
    let mut connection = Connection::open(address).expect("the gateway accepts");
    connection.request("POST", "/v1/completions", &[], huge.to_string().as_bytes()).expect("sent");
    drop(connection);
    wait_for("the client is counted as gone", || {
        (gateway.metric("kvlane_client_gone_total", &[]).unwrap_or(0.0) >= 3.0).then_some(())
    });
    assert_eq!(engine.stat("requests") - engine.stat("disconnects"), 0, "every request that arrived was cancelled");
    wait_for("nothing is in flight", || (in_flight() == Some(0.0)).then_some(()));
}

#[test]
fn sigterm_lets_streams_finish_and_takes_no_new_connection() {
    let engines = vec![EngineProcess::start("--decode-tps 20 --seed 0")];
    let tokenizers = fleet::tokenizers();
    let port = free_port();
    let mut gateway =
        Gateway::start(Options { config: fleet::rule(port, &tokenizers, &engines), ..Options::default() });
    let address: SocketAddr = ([127, 0, 0, 1], port).into();
    let mut connection = Connection::open(address).expect("the gateway accepts");
    connection.request("POST", "/v1/chat/completions", &[], chat(1, 1, 40).to_string().as_bytes()).expect("sent");
    assert_eq!(connection.head().expect("an answer begins").status, 200);
    let mut text = connection.chunk().expect("a chunk").expect("comes");
    gateway.signal(libc::SIGTERM);
    wait_for("new connections are refused", || client::call(address, "GET", "/v1/models", b"").is_err().then_some(()));
    while let Some(chunk) = connection.chunk().expect("the stream goes on to its end") {
        text.extend_from_slice(&chunk);
    }
    assert!(String::from_utf8_lossy(&text).trim_end().ends_with("data: [DONE]"), "the whole answer came");
    assert_eq!(gateway.wait().code(), Some(0), "{}", gateway.log());
}
