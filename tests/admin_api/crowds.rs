//! Clients that open connections and keep the management API waiting: it answers everybody else all the same.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::json;

use crate::common::engines::StubEngine;
use crate::common::gateway::{Gateway, Options};
use crate::common::{Child, PATIENCE, Scratch, client, free_address, free_port, wait_for};

const LB: &str = "/netlox/v1/config/loadbalancer";
/// More than twice the connections that the API has at once.
const CROWD: usize = 300;
/// What each says, and then nothing more.
const NOTHING: &str = "";
const HALF_HEAD: &str = "GET /netlox/v1/version HTTP/1.1\r\nHost:";
const HALF_BODY: &str =
    "POST /netlox/v1/config/loadbalancer HTTP/1.1\r\nHost: h\r\nContent-Length: 500000\r\n\r\n{\"serviceArguments\":";

fn crowd(address: SocketAddr, said: &[&str]) -> Vec<TcpStream> {
    let one = |at: usize| {
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE).expect("connected");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        // One that was ended already cannot be written to.
        let _ = stream.write_all(said[at % said.len()].as_bytes());
        stream
    };
    (0..CROWD).map(one).collect()
}

/// What came until the end.
fn rest(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    // A reset is an end as well.
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn three_hundred_clients_that_say_half_of_what_they_should_shut_out_nobody() {
    let gateway = Gateway::start(Options::default());
    let engine = StubEngine::start();
    let mut crowd = crowd(gateway.admin, &[NOTHING, HALF_HEAD, HALF_BODY]);
    let at = Instant::now();
    for _ in 0..20 {
        assert_eq!(gateway.api("/version").status, 200);
    }
    let rule = json!({"serviceArguments": {"externalIP": "127.0.0.1", "port": free_port(), "mode": 4},
        "endpoints": [{"endpointIP": "127.0.0.1", "targetPort": engine.address.port()}]});
    assert_eq!(client::post(gateway.admin, LB, &rule).status, 200);
    println!("21 requests beside {CROWD} that keep the API waiting took {:.2?}", at.elapsed());

    // Those that came first had to make room at once; the last ones are told, or ended, when their time is over.
    for at in [0, 1, 2, CROWD - 3, CROWD - 2] {
        let begins = if at == CROWD - 2 { "HTTP/1.1 408 " } else { "" };
        let end = rest(&mut crowd[at]);
        assert!(end.starts_with(begins) && end.is_empty() == begins.is_empty(), "{at}: {end}");
    }
}

#[test]
fn handshakes_that_do_not_end_shut_out_nobody() {
    let vectors = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/tls");
    let of = |name: &str| vectors.join(name).to_str().expect("text").to_owned();
    let (scratch, admin) = (Scratch::new("handshakes"), free_address());
    let config = scratch.path().join("kvlane.toml");
    let text = format!(
        "[admin]\nlisten = \"{admin}\"\ntls_certificate = \"{}\"\ntls_key = \"{}\"\n",
        of("server1.crt"),
        of("server1.key"),
    );
    std::fs::write(&config, text).expect("writable");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvlane"));
    let _child = Child(command.args(["serve", "-c"]).arg(&config).stderr(Stdio::null()).spawn().expect("built"));
    let port = admin.port().to_string();
    let version = || {
        let arguments = ["get", "lbversion", "--port", &port, "--cacert", &of("ca1.crt")];
        Command::new(env!("CARGO_BIN_EXE_kvlane")).args(arguments).output().expect("built").status.success()
    };
    wait_for("the API answers over TLS", || version().then_some(()));
    let half_hello = "\u{16}\u{3}\u{1}\u{2}";
    let _crowd = crowd(admin, &[NOTHING, half_hello]);
    assert!(version(), "whoever does greet is answered at once");
}

#[test]
fn dumps_that_nobody_takes_shut_out_nobody() {
    let engine = StubEngine::start();
    let port = free_port();
    let gateway = Gateway::start(Options::default());
    let rule = json!({"serviceArguments": {"externalIP": "127.0.0.1", "port": port, "mode": 4, "kvExactMode": 3},
        "endpoints": [{"endpointIP": "127.0.0.1", "targetPort": engine.address.port(), "kvZmqPort": engine.event_port}]});
    assert_eq!(client::post(gateway.admin, LB, &rule).status, 200);
    let dump = "GET /netlox/v1/config/ai/kv/inventory?service_id=0&ep_idx=0 HTTP/1.1\r\nHost: h\r\n\r\n";
    let _crowd = crowd(gateway.admin, &[dump]);
    for _ in 0..20 {
        assert_eq!(gateway.api("/version").status, 200);
        assert!(gateway.inventory(0, 0).is_empty());
    }
}
