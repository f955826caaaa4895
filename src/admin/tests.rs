//! The API of a gateway with real shards, ingest and models, asked over real sockets.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::cli::{Ready, Surroundings, run};
use crate::config::Config;
use crate::cores::{Machine, Wishes, plan};

/// Longest wait for anything here.
const PATIENCE: Duration = Duration::from_secs(20);

/// A running gateway; dropping it stops it.
struct Gateway {
    ready: Ready,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Gateway {
    fn start() -> Self {
        let loopback: SocketAddr = "127.0.0.1:0".parse().expect("an address");
        let config = Config {
            admin_listen: loopback,
            metrics_listen: Some(loopback),
            tokenizers_dir: std::env::temp_dir().join("kvlane-no-tokenizers"),
            drain_timeout: Duration::from_secs(5),
            ring_entries: 256,
            ..Config::default()
        };
        let plan = plan(&Machine::read(), &Wishes::default()).expect("auto always fits");
        let (stop, stopped) = oneshot::channel();
        let (say_ready, ready) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            let stop = async {
                let _ = stopped.await;
            };
            let surroundings = Surroundings::default();
            runtime.block_on(run(config, plan, surroundings, stop, Some(say_ready))).expect("the gateway starts");
        });
        let ready = ready.blocking_recv().expect("the gateway starts");
        Gateway { ready, stop: Some(stop), thread: Some(thread) }
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        http(self.ready.admin, method, &format!("/netlox/v1{path}"), body)
    }

    fn get(&self, path: &str) -> Value {
        let (status, body) = self.ask("GET", path, "");
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).expect("JSON")
    }

    fn post(&self, rule: &Value) -> (u16, String) {
        self.ask("POST", "/config/loadbalancer", &rule.to_string())
    }

    fn create(&self, rule: &Value) {
        let (status, answer) = self.post(rule);
        assert!(status == 200 && answer.contains(r#""result":"Success""#), "{answer}");
    }

    /// The samples of a metric.
    fn metric(&self, name: &str) -> Vec<String> {
        let (status, text) = self.ask("GET", "/metrics", "");
        assert_eq!(status, 200);
        text.lines().filter(|line| line.starts_with(name)).map(str::to_owned).collect()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        drop(self.stop.take());
        let result = self.thread.take().map(std::thread::JoinHandle::join);
        assert!(std::thread::panicking() || matches!(result, Some(Ok(()))), "the gateway ends in order");
    }
}

fn http(address: SocketAddr, method: &str, path: &str, body: &str) -> (u16, String) {
    try_http(address, method, path, body).expect("an answer")
}

fn try_http(address: SocketAddr, method: &str, path: &str, body: &str) -> std::io::Result<(u16, String)> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let length = body.len();
    let head =
        format!("{method} {path} HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
    stream.write_all(head.as_bytes())?;
    // The server may refuse a large body before it has all of it.
    let _ = stream.write_all(body.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let reply = shards::http::reply::complete(&answer, true).map_err(std::io::Error::other)?;
    let reply = reply.ok_or_else(|| std::io::Error::other("no whole answer"))?;
    Ok((reply.status, String::from_utf8_lossy(&reply.body).into_owned()))
}

#[track_caller]
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "never came about: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// An engine that answers everything with its name.
struct Engine {
    address: SocketAddr,
    asked: Arc<AtomicUsize>,
}

impl Engine {
    fn start(name: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound");
        let asked = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&asked);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let counter = Arc::clone(&counter);
                std::thread::spawn(move || {
                    let mut request = [0; 4096];
                    let Ok(read) = stream.read(&mut request) else { return };
                    if !request[..read].starts_with(b"GET /health") {
                        counter.fetch_add(1, Ordering::SeqCst);
                    }
                    let length = name.len();
                    let answer =
                        format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{name}");
                    let _ = stream.write_all(answer.as_bytes());
                });
            }
        });
        Engine { address, asked }
    }

    fn endpoint(&self) -> Value {
        json!({"endpointIP": "127.0.0.1", "targetPort": self.address.port(), "weight": 1})
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port()
}

fn plain(port: u16, endpoints: Value) -> Value {
    json!({"serviceArguments": {"externalIP": "127.0.0.1", "port": port, "protocol": "tcp", "sel": 0, "mode": 4},
           "endpoints": endpoints})
}

#[test]
fn a_rule_serves_from_its_post_to_its_delete() {
    let gateway = Gateway::start();
    let (one, two) = (Engine::start("one"), Engine::start("two"));
    let port = free_port();
    let client = SocketAddr::from(([127, 0, 0, 1], port));
    assert_eq!(gateway.get("/config/loadbalancer/all"), json!({"lbAttr": []}));

    let rule = plain(port, json!([one.endpoint()]));
    gateway.create(&rule);
    assert_eq!(http(client, "GET", "/anything", ""), (200, "one".to_owned()));

    let (status, body) = gateway.post(&rule);
    assert_eq!(status, 409, "{body}");
    assert!(body.contains("lbrule-exists error"), "{body}");

    gateway.create(&plain(port, json!([one.endpoint(), two.endpoint()])));
    eventually("both engines are asked", || {
        http(client, "GET", "/anything", "");
        two.asked.load(Ordering::SeqCst) > 0
    });
    let shown = gateway.get("/config/loadbalancer/all");
    let rule = &shown["lbAttr"][0];
    assert_eq!(rule["serviceArguments"]["service_id"], 0);
    assert_eq!(rule["endpoints"][1]["targetPort"], two.address.port());
    assert_eq!(rule["endpoints"][1]["state"], "active");

    let path = format!("/config/loadbalancer/externalipaddress/127.0.0.1/port/{port}/protocol/tcp");
    assert_eq!(gateway.ask("DELETE", &path, ""), (200, r#"{"result":"Success"}"#.to_owned()));
    let (status, body) = gateway.ask("DELETE", &path, "");
    assert_eq!(status, 404, "{body}");
    eventually("nobody listens any more", || TcpStream::connect(client).is_err());
}

#[test]
fn every_form_of_delete_finds_its_rule() {
    let gateway = Gateway::start();
    let engine = Engine::start("one");
    let port = free_port();
    let forms = [
        format!("/config/loadbalancer/externalipaddress/127.0.0.1/port/{port}/protocol/tcp?bgp=false"),
        format!("/config/loadbalancer/externalipaddress/127.0.0.1/port/{port}/portmax/0/protocol/tcp"),
        format!(
            "/config/loadbalancer/hosturl/any/externalipaddress/127.0.0.1/port/{port}/portmax/0/protocol/tcp?bgp=false&block=0"
        ),
        format!("/config/loadbalancer/externalipaddress/127.0.0.1/port/{port}/portmax/{port}/protocol/tcp"),
        format!("/config/loadbalancer/hosturl/any/externalipaddress/127.0.0.1/port/{port}/protocol/tcp"),
        "/config/loadbalancer/name/".to_owned() + "mine",
        "/config/loadbalancer/all".to_owned(),
    ];
    for (number, form) in forms.iter().enumerate() {
        let mut rule = plain(port, json!([engine.endpoint()]));
        rule["serviceArguments"]["name"] = json!("mine");
        gateway.create(&rule);
        let shown = gateway.get("/config/loadbalancer/all");
        assert_eq!(shown["lbAttr"][0]["serviceArguments"]["service_id"], number, "numbers are not used again");
        assert_eq!(gateway.ask("DELETE", form, "").0, 200, "{form}");
        assert_eq!(gateway.get("/config/loadbalancer/all"), json!({"lbAttr": []}), "{form}");
    }
    // Rules of a host, a path and a model are told from the one without.
    let mut rule = plain(port, json!([engine.endpoint()]));
    rule["serviceArguments"]["host"] = json!("a.example");
    rule["serviceArguments"]["model_name"] = json!("m/x");
    gateway.create(&rule);
    let at = format!("externalipaddress/127.0.0.1/port/{port}/protocol/tcp");
    assert_eq!(gateway.ask("DELETE", &format!("/config/loadbalancer/{at}"), "").0, 404);
    // A range of ports is no rule here, whatever rule its first port has.
    for (last, status) in [("1", 404), ("65535", 404), ("70000", 400), ("x", 400)] {
        let at = format!("externalipaddress/127.0.0.1/port/{port}/portmax/{last}/protocol/tcp");
        let path = format!("/config/loadbalancer/hosturl/a.example/{at}?model_name=m%2Fx");
        assert_eq!(gateway.ask("DELETE", &path, "").0, status, "portmax {last}");
    }
    let path = format!("/config/loadbalancer/hosturl/a.example/{at}?model_name=m%2Fx");
    assert_eq!(gateway.ask("DELETE", &path, "").0, 200);
}

#[test]
fn what_cannot_be_done_changes_nothing_and_says_why() {
    let gateway = Gateway::start();
    let engine = Engine::start("one");
    let port = free_port();
    gateway.create(&plain(port, json!([engine.endpoint()])));
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let taken_port = taken.local_addr().expect("bound").port();
    let with = |name: &str, value: Value| {
        let mut rule = plain(free_port(), json!([engine.endpoint()]));
        rule["serviceArguments"][name] = value;
        rule.to_string()
    };
    let cases: Vec<(String, u16, &str)> = vec![
        ("{".to_owned(), 400, "not JSON"),
        ("[]".to_owned(), 400, "expected a table, found a list"),
        ("{}".to_owned(), 400, "serviceArguments: missing"),
        (with("mode", json!(null)), 400, "mode must be 4 (fullproxy)"),
        (with("kvBlockSize", json!(1)), 400, "kvBlockSize: 1 is not within 4 to 65536"),
        (with("sel", json!(7)), 400, "sel: 7"),
        (with("security", json!(1)), 400, "security: 1 is refused"),
        (with("kvEngineType", json!("llamacpp2")), 400, "kv-engine-type must be one of"),
        (plain(taken_port, json!([engine.endpoint()])).to_string(), 409, "cannot listen at 127.0.0.1"),
        (plain(gateway.ready.admin.port(), json!([engine.endpoint()])).to_string(), 409, "cannot listen at"),
        (format!("\"{}\"", "x".repeat(2 << 20)), 413, "larger than 1048576 bytes"),
    ];
    for (body, expected, text) in cases {
        let (status, answer) = gateway.ask("POST", "/config/loadbalancer", &body);
        assert_eq!(status, expected, "{answer}");
        let value: Value = serde_json::from_str(&answer).expect("JSON");
        assert_eq!(value["code"], expected);
        assert!(value["message"].is_string());
        assert!(value["result"].as_str().is_some_and(|result| result.contains(text)), "{answer} lacks {text:?}");
    }
    assert_eq!(gateway.get("/config/loadbalancer/all")["lbAttr"].as_array().map(Vec::len), Some(1));
    assert_eq!(http(SocketAddr::from(([127, 0, 0, 1], port)), "GET", "/", "").0, 200);
    assert_eq!(gateway.ask("GET", "/config/nothing", "").0, 404);
    for (method, path, expected) in [
        ("PUT", "/config/loadbalancer", 405),
        ("POST", "/metrics", 405),
        ("DELETE", "/config/loadbalancer/externalipaddress/%ff/port/1/protocol/tcp", 400),
        ("DELETE", "/config/loadbalancer/name/%ff", 400),
    ] {
        let (status, answer) = gateway.ask(method, path, "");
        assert_eq!(status, expected, "{path}: {answer}");
        let value: Value = serde_json::from_str(&answer).expect("JSON");
        assert_eq!(value["code"], expected);
        assert!(value["message"].is_string() && value["result"].is_string(), "{answer}");
    }
    let metrics = gateway.ready.metrics.expect("configured");
    let (status, answer) = http(metrics, "POST", "/readyz", "");
    assert!(status == 405 && answer.contains("does not know this method"), "{status} {answer}");
    assert_eq!(gateway.ask("DELETE", "/config/loadbalancer/externalipaddress/x/port/1/protocol/tcp", "").0, 400);
}

#[test]
fn an_endpoint_may_be_a_name_and_two_names_of_one_address_are_refused() {
    let gateway = Gateway::start();
    let engine = Engine::start("one");
    let port = free_port();
    let named = json!({"endpointIP": "localhost", "targetPort": engine.address.port()});
    gateway.create(&plain(port, json!([named.clone()])));
    assert_eq!(http(SocketAddr::from(([127, 0, 0, 1], port)), "GET", "/", ""), (200, "one".to_owned()));
    let (status, body) = gateway.post(&plain(free_port(), json!([named, engine.endpoint()])));
    assert_eq!(status, 400, "{body}");
    assert!(body.contains(&format!("two endpoints of the rule resolve to {}", engine.address)), "{body}");
    // A name without an address yet is taken in, and gets nothing.
    let unknown = json!([{"endpointIP": "engine.invalid", "targetPort": 8000}, engine.endpoint()]);
    let port = free_port();
    gateway.create(&plain(port, unknown));
    for _ in 0..4 {
        assert_eq!(http(SocketAddr::from(([127, 0, 0, 1], port)), "GET", "/", "").0, 200);
    }
    eventually("the other was probed", || gateway.get("/status/ready")["rules"][1]["usable_endpoints"] == 1);
}

#[test]
fn an_unknown_member_is_tolerated_and_named() {
    let gateway = Gateway::start();
    let engine = Engine::start("one");
    let mut rule = plain(free_port(), json!([engine.endpoint()]));
    rule["serviceArguments"]["colour"] = json!("blue");
    let (status, body) = gateway.post(&rule);
    assert_eq!(status, 200);
    let answer: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(answer["result"], "Success");
    assert_eq!(answer["warnings"][0], "serviceArguments.colour: unknown member, ignored");
}

/// A batch in vLLM's array form: two blocks of 16 tokens, stored.
fn stored(keys: [u64; 2]) -> Vec<u8> {
    let mut bytes = vec![0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x91, 0x96, 0xab];
    bytes.extend(b"BlockStored");
    bytes.push(0x92);
    for key in keys {
        bytes.push(0xcf);
        bytes.extend(key.to_be_bytes());
    }
    bytes.extend([0xc0, 0xdc, 0, 32]);
    bytes.extend(1..=32u8);
    bytes.extend([16, 0xc0, 0]);
    bytes
}

#[test]
fn events_of_a_posted_rules_engine_reach_the_inventory_and_the_metrics() {
    let gateway = Gateway::start();
    let engine = Engine::start("one");
    let publisher = zmq::Context::new().socket(zmq::PUB).expect("a socket");
    publisher.bind("tcp://127.0.0.1:*").expect("a free port");
    let bound = publisher.get_last_endpoint().expect("bound").expect("text");
    let events: u16 = bound.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port");

    let inventory = "/config/ai/kv/inventory";
    for (query, status, text) in [
        ("", 400, "invalid service_id: "),
        ("?service_id=x&ep_idx=0", 400, "invalid service_id: "),
        ("?service_id=0&ep_idx=-1", 400, "invalid ep_idx: "),
        ("?service_id=0&ep_idx=0", 404, "service or endpoint not found"),
    ] {
        let (found, body) = gateway.ask("GET", &format!("{inventory}{query}"), "");
        let answer: Value = serde_json::from_str(&body).expect("JSON");
        assert_eq!(found, status, "{query}");
        assert!(answer["error"].as_str().is_some_and(|error| error.starts_with(text)), "{body}");
    }
    assert_eq!(gateway.ask("POST", &format!("{inventory}?service_id=0&ep_idx=0"), "").0, 405);

    let mut rule = plain(free_port(), json!([engine.endpoint()]));
    rule["serviceArguments"]["kvExactMode"] = json!(3);
    rule["endpoints"][0]["kvZmqPort"] = json!(events);
    gateway.create(&rule);
    let at = format!("{inventory}?service_id=0&ep_idx=0");
    let empty = json!({"service_id": 0, "ep_idx": 0, "hash_algo": "sha256_cbor", "blocks": [], "total": 0});
    assert_eq!(gateway.get(&at), empty);

    // A subscriber joins late: the same keys again are the same blocks.
    let mut seq = 0u64;
    let key = u64::MAX - 1;
    eventually("both blocks are shown", || {
        let frames = [b"kv".to_vec(), seq.to_be_bytes().to_vec(), stored([key, 7])];
        publisher.send_multipart(frames, 0).expect("sent");
        seq += 1;
        gateway.get(&at)["total"] == 2
    });
    let shown = gateway.get(&at);
    assert_eq!(shown["blocks"], json!([{"block_idx": 0, "hash_uint64": 7}, {"block_idx": 1, "hash_uint64": key}]));
    let blocks = r#"loxilb_pd_kv_blocks{service="0",ep_idx="0"} 2"#;
    eventually("the gauge follows", || gateway.metric("loxilb_pd_kv_blocks") == [blocks]);
    let connected = gateway.metric("loxilb_kv_subscriber_connected");
    assert!(connected[0].contains(r#"rank="0""#) && connected[0].ends_with(" 1"), "{connected:?}");
    let streams = gateway.get("/config/ai/kv/streams");
    assert_eq!(streams["streams"][0]["connected"], true);

    // With the rule its inventory is gone.
    assert_eq!(gateway.ask("DELETE", "/config/loadbalancer/all", "").0, 200);
    assert_eq!(gateway.ask("GET", &at, "").0, 404);
    eventually("its stream is gone", || gateway.get("/config/ai/kv/streams") == json!({"streams": []}));
}

#[test]
fn readiness_names_drivers_rules_and_follows_the_engines() {
    let gateway = Gateway::start();
    let status = gateway.get("/status/ready");
    assert_eq!(status["ready"], false);
    let driver = status["shards"][0]["driver"].as_str().expect("a driver");
    assert!(driver.starts_with("io_uring") || driver == "epoll", "{driver}");
    assert_eq!(status["shards"][0]["refused"].as_array().map(Vec::is_empty), Some(driver == "io_uring defer-taskrun"));
    let doors = gateway.ready.metrics.expect("asked for");
    assert_eq!(http(doors, "GET", "/healthz", "").0, 200);
    assert_eq!(http(doors, "GET", "/readyz", "").0, 503);
    assert_eq!(http(doors, "GET", "/netlox/v1/config/loadbalancer/all", "").0, 404);

    let engine = Engine::start("one");
    gateway.create(&plain(free_port(), json!([engine.endpoint()])));
    eventually("the engine was probed", || gateway.get("/status/ready")["ready"] == true);
    assert_eq!(http(doors, "GET", "/readyz", "").0, 200);
    assert_eq!(gateway.metric("loxilb_healthy_endpoints"), [r#"loxilb_healthy_endpoints{service="0"} 1"#]);
    assert_eq!(gateway.metric("loxilb_lb_rules"), ["loxilb_lb_rules 1"]);
    assert!(http(doors, "GET", "/metrics", "").1.contains("kvlane_shard_info"));

    // An engine that is not there is taken out by probes, and its rule is no longer usable.
    gateway.ask("DELETE", "/config/loadbalancer/all", "");
    let nobody = json!([{"endpointIP": "127.0.0.1", "targetPort": free_port()}]);
    gateway.create(&plain(free_port(), nobody));
    // Before that nobody says that it is ready: nothing is known of it.
    assert_eq!(gateway.get("/status/ready")["ready"], false);
    let reason = || gateway.get("/status/ready")["rules"][0]["reason"].clone();
    eventually("the rule is unusable", || reason() == "no endpoint is up with a weight above 0");
    assert_eq!(gateway.get("/config/loadbalancer/all")["lbAttr"][0]["endpoints"][0]["state"], "inactive");
    assert_eq!(gateway.get("/version")["product"], "kvlane");
}
