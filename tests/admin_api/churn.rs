//! Rules made, changed and removed while streams run: no request fails that the change did not concern, and nothing is left
//! of what is gone.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use loadgen::assets::DEMO_MODEL;
use loadgen::engine::{Engine, EngineHandle, EngineOptions};
use serde_json::{Value, json};

use crate::common::client::{self, Connection};
use crate::common::gateway::{Gateway, Options};
use crate::common::{PATIENCE, Scratch, fleet, free_port, wait_for};

const LB: &str = "/netlox/v1/config/loadbalancer";
/// Clients, each with one stream at a time.
const CLIENTS: usize = 4;
/// Rules that come and go beside the one that stays.
const GUESTS: usize = 6;
/// Changes before the first look: allocators and lazily made descriptors are warm then.
const WARM_UP: usize = 24;
/// Growth of resident memory that is taken for noise of the allocator, bytes.
const GROWTH_MAX: u64 = 24 << 20;

struct Stage {
    gateway: Gateway,
    engines: Vec<EngineHandle>,
    listen: SocketAddr,
    guests: Vec<u16>,
    _tokenizers: Scratch,
}

/// What the gateway holds of the system.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Held {
    /// Open descriptors by what they are; TCP sockets by their state and the port at the other end.
    descriptors: BTreeMap<String, usize>,
    threads: usize,
    /// Event streams.
    streams: usize,
    resident: u64,
}

impl Held {
    /// Whether there is no more of anything than there was, memory aside.
    fn is_within(&self, before: &Held) -> bool {
        // A shard makes a pair of sockets when it first has to give way.
        let spare = |name: &str| if name == "socket" { 2 } else { 0 };
        let known = |name: &String| before.descriptors.get(name).copied().unwrap_or(0) + spare(name);
        self.descriptors.iter().all(|(name, count)| *count <= known(name))
            && self.threads <= before.threads
            && self.streams <= before.streams
    }
}

impl Stage {
    fn start() -> Self {
        // A token takes 2 ms: a stream lasts over several changes.
        let options = EngineOptions { time_scale: 0.1, ..EngineOptions::ephemeral() };
        let engines = (0..4).map(|_| Engine::start(&options).expect("free ports")).collect();
        let tokenizers = fleet::tokenizers();
        // What is remembered of prompts is no leak, and would hide one.
        let config = format!(
            "[limits]\nprompt_cache_bytes = 262144\n\n[tokenizers]\ndir = \"{}\"\n",
            tokenizers.path().display()
        );
        let gateway = Gateway::start(Options { config, ..Options::default() });
        // An address of this process alone: its ports are free whatever others do.
        let pid = std::process::id();
        let ip = Ipv4Addr::new(127, 32 + (pid >> 16) as u8 % 32, (pid >> 8) as u8, pid as u8);
        let guests = (0..GUESTS).map(|_| free_port()).collect();
        Stage { gateway, engines, listen: (ip, free_port()).into(), guests, _tokenizers: tokenizers }
    }

    fn endpoint(&self, engine: usize, weight: u32) -> Value {
        let engine = &self.engines[engine];
        let port = |address: Option<SocketAddr>| address.expect("it publishes and replays").port();
        json!({"endpointIP": engine.http_addr.ip(), "targetPort": engine.http_addr.port(), "weight": weight,
            "kvZmqPort": port(engine.event_addr), "kvReplayPort": port(engine.replay_addr)})
    }

    fn rule(&self, port: u16, model: &str, endpoints: &[Value], more: &Value) -> Value {
        let mut arguments = json!({"externalIP": self.listen.ip(), "port": port, "protocol": "tcp", "mode": 4,
            "kvExactMode": 3, "kvNoneHashSeed": "0", "model_name": model});
        more.as_object().into_iter().flatten().for_each(|(name, value)| arguments[name] = value.clone());
        json!({"serviceArguments": arguments, "endpoints": endpoints})
    }

    #[track_caller]
    fn post(&self, rule: &Value) {
        let answer = client::post(self.gateway.admin, LB, rule);
        assert_eq!(answer.status, 200, "{rule}: {}\n{}", answer.text(), self.gateway.log());
    }

    #[track_caller]
    fn delete(&self, port: u16, model: &str) {
        let path = format!(
            "{LB}/externalipaddress/{}/port/{port}/protocol/tcp?model_name={}",
            self.listen.ip(),
            model.replace('/', "%2F")
        );
        let answer = client::call(self.gateway.admin, "DELETE", &path, b"").expect("an answer");
        assert_eq!(answer.status, 200, "{}", answer.text());
    }

    /// The rule that stays, over the first three engines.
    fn resident(&self) -> Value {
        let endpoints: Vec<Value> = (0..3).map(|engine| self.endpoint(engine, 1)).collect();
        self.rule(self.listen.port(), DEMO_MODEL, &endpoints, &json!({}))
    }

    /// One change; `there` says which guests there are, with the number of their last change.
    fn change(&self, number: usize, there: &mut HashMap<usize, usize>) {
        // The last two guests share the address of the rule that stays, and are told apart by their model.
        let guest = number * 5 % (GUESTS + 2);
        let (port, model) = match self.guests.get(guest) {
            Some(port) => (*port, String::new()),
            None => (self.listen.port(), format!("guest-{guest}")),
        };
        match (guest % 3, there.get(&guest).copied()) {
            // One more engine for the rule that stays, and away with it, while it answers.
            (0, _) if number.is_multiple_of(3) => {
                let oper = if there.remove(&usize::MAX).is_some() { 2 } else { 1 };
                let mut body = self.resident();
                body["serviceArguments"]["oper"] = json!(oper);
                body["endpoints"] = json!([self.endpoint(3, 1)]);
                self.post(&body);
                if oper == 1 {
                    there.insert(usize::MAX, number);
                }
            }
            (_, None) => {
                let endpoints = [self.endpoint(guest % 4, 1), self.endpoint((guest + 1) % 4, 2)];
                self.post(&self.rule(port, &model, &endpoints, &json!({"sel": 4})));
                there.insert(guest, number);
            }
            (_, Some(last)) if last % 2 == 0 => {
                let endpoints = [self.endpoint((guest + 2) % 4, number as u32 + 2)];
                self.post(&self.rule(port, &model, &endpoints, &json!({"sel": 0, "kvWarmupSec": number})));
                there.insert(guest, last + 1);
            }
            (_, Some(_)) => {
                self.delete(port, &model);
                there.remove(&guest);
            }
        }
    }

    /// Takes away all that is not the rule that stays.
    fn restore(&self, there: &mut HashMap<usize, usize>) {
        for (guest, _) in there.drain() {
            match self.guests.get(guest) {
                Some(port) => self.delete(*port, ""),
                None if guest == usize::MAX => {
                    let mut body = self.resident();
                    body["serviceArguments"]["oper"] = json!(2);
                    body["endpoints"] = json!([self.endpoint(3, 1)]);
                    self.post(&body);
                }
                None => self.delete(self.listen.port(), &format!("guest-{guest}")),
            }
        }
    }

    /// What is held once no connection to an engine's API is open.
    fn held(&self) -> Option<Held> {
        let process = format!("/proc/{}", self.gateway.pid());
        let mut kinds = Vec::new();
        for entry in std::fs::read_dir(format!("{process}/fd")).ok()?.flatten() {
            kinds.push(std::fs::read_link(entry.path()).ok()?.to_str()?.to_owned());
        }
        let engines: HashSet<u16> = self.engines.iter().map(|engine| engine.http_addr.port()).collect();
        let mut sockets = HashMap::new();
        for line in std::fs::read_to_string(format!("{process}/net/tcp")).ok()?.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let remote = u16::from_str_radix(fields.get(2)?.rsplit(':').next()?, 16).ok()?;
            sockets.insert(format!("socket:[{}]", fields.get(9)?), (fields[3].to_owned(), remote));
        }
        let mut descriptors = BTreeMap::new();
        for kind in kinds {
            let name = match sockets.get(&kind) {
                Some((_, remote)) if engines.contains(remote) => return None,
                Some((state, remote)) => format!("tcp state {state} to {remote}"),
                None => kind.split(['[', '(']).next()?.trim_end_matches(':').to_owned(),
            };
            *descriptors.entry(name).or_default() += 1;
        }
        let streams = self.gateway.api("/config/ai/kv/streams").json()["streams"].as_array()?.len();
        let pages = std::fs::read_to_string(format!("{process}/statm")).ok()?;
        let pages: u64 = pages.split_whitespace().nth(1)?.parse().ok()?;
        let threads = std::fs::read_dir(format!("{process}/task")).ok()?.count();
        Some(Held { descriptors, threads, streams, resident: pages * 4096 })
    }

    /// One stream through the rule that stays; why it is no whole one.
    fn stream(&self, connection: &mut Option<Connection>, number: u64) -> Result<(), String> {
        let text = format!("Story {} about a river and a boat. ", number % 40).repeat(8);
        let body = json!({"model": DEMO_MODEL, "prompt": text, "max_tokens": 20, "stream": true}).to_string();
        let say = |what: &str, error: std::io::Error| format!("{what}: {error}");
        if connection.is_none() {
            *connection = Some(Connection::open(self.listen).map_err(|error| say("connect", error))?);
        }
        let open = connection.as_mut().expect("it was opened");
        let headers = [("Content-Type", "application/json")];
        open.request("POST", "/v1/completions", &headers, body.as_bytes()).map_err(|error| say("send", error))?;
        let answer = open.answer().map_err(|error| say("answer", error))?;
        if answer.header("connection").is_some_and(|value| value.eq_ignore_ascii_case("close")) {
            *connection = None;
        }
        match answer.status {
            200 if answer.text().trim_end().ends_with("data: [DONE]") => Ok(()),
            status => Err(format!("status {status}: {}", answer.text())),
        }
    }
}

/// `KVLANE_RULE_CHANGES` changes (1,000 by hand).
#[test]
fn rules_come_and_go_under_streams_without_a_failed_request_or_a_leak() {
    let changes = std::env::var("KVLANE_RULE_CHANGES").ok().and_then(|text| text.parse().ok()).unwrap_or(60);
    let stage = Stage::start();
    stage.post(&stage.resident());
    wait_for("the rule has its tokenizer and its streams", || {
        let status = stage.gateway.api("/status/ready").json();
        let ready = status["models"].as_array()?.iter().any(|model| model["state"] == "ready");
        let started = stage.gateway.api("/config/ai/kv/parity").json()["parity"].clone();
        let started = started.as_array()?.iter().filter(|rank| rank["started"].is_string()).count();
        (ready && started == 3).then_some(())
    });
    let (failures, asked, stop) = (Mutex::new(Vec::new()), AtomicU64::new(0), AtomicBool::new(false));
    let mut there = HashMap::new();
    let mut slowest = std::time::Duration::ZERO;
    let run = |count: std::ops::Range<usize>, there: &mut HashMap<usize, usize>, slowest: &mut std::time::Duration| {
        stop.store(false, Ordering::SeqCst);
        std::thread::scope(|scope| {
            for _ in 0..CLIENTS {
                scope.spawn(|| {
                    let mut connection = None;
                    while !stop.load(Ordering::SeqCst) {
                        let number = asked.fetch_add(1, Ordering::SeqCst);
                        if let Err(why) = stage.stream(&mut connection, number) {
                            failures.lock().expect("no holder panics").push(why);
                            connection = None;
                        }
                    }
                });
            }
            // Streams run from before the first change on.
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let before = asked.load(Ordering::SeqCst);
                wait_for("streams run", || (asked.load(Ordering::SeqCst) > before + CLIENTS as u64).then_some(()));
                for number in count {
                    let at = Instant::now();
                    stage.change(number, there);
                    *slowest = (*slowest).max(at.elapsed());
                }
            }));
            stop.store(true, Ordering::SeqCst);
            if let Err(panic) = result {
                std::panic::resume_unwind(panic);
            }
        });
        stage.restore(there);
    };
    run(0..WARM_UP, &mut there, &mut slowest);
    let before = wait_for("nothing runs", || stage.held());
    let start = Instant::now();
    run(0..changes, &mut there, &mut slowest);
    let elapsed = start.elapsed();
    let deadline = Instant::now() + PATIENCE;
    let after = loop {
        let after = wait_for("nothing runs", || stage.held());
        if after.is_within(&before) {
            break after;
        }
        assert!(
            Instant::now() < deadline,
            "not all of what is gone was given back: \n{before:#?}\nnow {after:#?}\n{}",
            stage.gateway.log()
        );
        std::thread::sleep(std::time::Duration::from_millis(50));
    };
    let failures = failures.into_inner().expect("no holder panics");
    let asked = asked.into_inner();
    println!(
        "{changes} changes in {elapsed:.1?}, the slowest in {slowest:.1?}, beside {asked} streams of which {} failed\n\
         before: {before:?}\nafter:  {after:?}",
        failures.len()
    );
    assert!(failures.is_empty(), "{} of {asked}: {:?}", failures.len(), &failures[..failures.len().min(5)]);
    let grown = after.resident.saturating_sub(before.resident);
    assert!(grown <= GROWTH_MAX, "resident memory grew by {grown} bytes");

    // The rule that stayed has its number, its counters and what it knows of its engines.
    let path = format!(
        "/config/loadbalancer/externalipaddress/{}/port/{}/protocol/tcp/stats?model_name={}",
        stage.listen.ip(),
        stage.listen.port(),
        DEMO_MODEL.replace('/', "%2F")
    );
    assert_eq!(stage.gateway.api(&path).json()["totalConnections"], asked);
    for (place, engine) in stage.engines.iter().take(3).enumerate() {
        wait_for("the inventory is what the engine holds", || {
            let mut keys: Vec<u64> = engine.cached_keys()?.into_keys().collect();
            keys.sort_unstable();
            (stage.gateway.inventory(0, place as u32) == keys).then_some(())
        });
    }
}
