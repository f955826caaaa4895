//! Who may use the management API, over what, and what is never told.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::engines::StubEngine;
use crate::common::gateway::{Gateway, Options};
use crate::common::{Child, Scratch, client, free_address, free_port, wait_for};
use serde_json::json;

const LB: &str = "/netlox/v1/config/loadbalancer";

/// Runs the command line; what it printed.
fn kvlane(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kvlane")).args(arguments).output().expect("the binary was built");
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).trim().to_owned())
}

pub(super) fn new_token(file: &Path, name: &str, role: &str) -> String {
    let (code, token) = kvlane(&["token", name, "--role", role, "--file", file.to_str().expect("text")]);
    assert_eq!(code, Some(0), "{token}");
    token
}

fn ask(gateway: &Gateway, method: &str, path: &str, token: Option<&str>, body: &str) -> client::Answer {
    let mut connection = client::Connection::open(gateway.admin).expect("connected");
    let authorization = token.map(|token| format!("Bearer {token}"));
    let headers: Vec<(&str, &str)> = authorization.iter().map(|value| ("Authorization", value.as_str())).collect();
    connection.request(method, path, &headers, body.as_bytes()).expect("sent");
    connection.answer().expect("an answer")
}

#[test]
fn without_a_token_nobody_is_let_in_and_a_viewer_changes_nothing() {
    let scratch = Scratch::new("tokens");
    let file = scratch.path().join("tokens");
    let (admin, viewer) = (new_token(&file, "ops", "admin"), new_token(&file, "eyes", "viewer"));
    let config = format!("tokens = \"{}\"\n", file.display());
    let gateway = Gateway::start(Options { config, ..Options::default() });
    let engine = StubEngine::start();
    let rule = json!({"serviceArguments": {"externalIP": "127.0.0.1", "port": free_port(), "mode": 4},
        "endpoints": [{"endpointIP": "127.0.0.1", "targetPort": engine.address.port()}]})
    .to_string();
    let all = format!("{LB}/all");
    for token in [None, Some(""), Some("wrong"), Some(&admin[1..])] {
        for (method, path, body) in
            [("GET", all.as_str(), ""), ("POST", LB, rule.as_str()), ("DELETE", all.as_str(), "")]
        {
            let answer = ask(&gateway, method, path, token, body);
            assert_eq!(answer.status, 401, "{method} {path} {token:?}: {}", answer.text());
            assert_eq!(answer.json()["code"], 401);
            assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
        }
    }
    for open in ["/version", "/meta", "/metrics"] {
        assert_eq!(ask(&gateway, "GET", &format!("/netlox/v1{open}"), None, "").status, 200, "{open}");
    }
    assert_eq!(ask(&gateway, "GET", &all, Some(&viewer), "").status, 200);
    for (method, path) in [("POST", LB), ("DELETE", all.as_str()), ("POST", "/netlox/v1/config/params")] {
        let answer = ask(&gateway, method, path, Some(&viewer), &rule);
        assert_eq!(answer.status, 403, "{}", answer.text());
    }
    assert_eq!(ask(&gateway, "POST", LB, Some(&admin), &rule).status, 200);
    wait_for("the change is in the audit log, with who made it", || {
        let log = gateway.log();
        log.lines()
            .any(|line| line.contains("kvlane::audit") && line.contains("who=\"ops\"") && line.contains("POST"))
            .then_some(())
    });
    for status in ["status=401", "status=403"] {
        let refused = |line: &str| line.contains("kvlane::audit") && line.contains("POST") && line.contains(status);
        wait_for("changes that were refused are there too", || gateway.log().lines().any(refused).then_some(()));
    }
    // Our own client, with the token from a file.
    let secret = scratch.path().join("mine");
    std::fs::write(&secret, format!("{admin}\n")).expect("writable");
    let port = gateway.admin.port().to_string();
    let with = |more: &[&str]| kvlane(&[&["get", "lb", "--port", &port], more].concat());
    assert!(with(&[]).1.contains("--token-file FILE"));
    assert_eq!(with(&["--token-file", secret.to_str().expect("text")]).0, Some(0));
    assert_eq!(with(&["--token", &admin, "--bearer=false"]).0, Some(0), "the classic client sends it bare");
    assert_eq!(with(&[]).0, Some(3));

    // A token that is taken out of the file lets nobody in any more; a file that others may read changes nothing.
    let kept = std::fs::read_to_string(&file).expect("ours");
    std::fs::write(&file, kept.lines().next().expect("two lines")).expect("writable");
    wait_for("the viewer is gone", || (ask(&gateway, "GET", &all, Some(&viewer), "").status == 401).then_some(()));
    assert_eq!(ask(&gateway, "GET", &all, Some(&admin), "").status, 200);

    for text in [gateway.log(), std::fs::read_to_string(&file).expect("ours")] {
        assert!(!text.contains(&admin) && !text.contains(&viewer), "no token is told");
    }
}

/// Starts a gateway that must not start; what it says.
fn refused(config: &str) -> String {
    let scratch = Scratch::new("refused");
    let file = scratch.path().join("kvlane.toml");
    std::fs::write(&file, config).expect("writable");
    let (code, text) = kvlane(&["serve", "-c", file.to_str().expect("text")]);
    assert_eq!(code, Some(1), "{text}");
    text
}

#[test]
fn beyond_loopback_protection_is_needed_or_said_not_to_be() {
    let text = refused("[admin]\nlisten = \"0.0.0.0:11999\"\n");
    assert!(text.contains("can be reached from other hosts") && text.contains("insecure = true"), "{text}");
    let text = refused("[admin]\nlisten = \"0.0.0.0:11999\"\ntokens = \"/nowhere/tokens\"\n");
    assert!(text.contains("can be reached from other hosts"), "tokens in clear are no protection: {text}");
    let text = refused("[admin]\nlisten = \"127.0.0.1:0\"\ntokens = \"/nowhere/tokens\"\n");
    assert!(text.contains("[admin] tokens: cannot read /nowhere/tokens"), "{text}");
    let text = refused("[admin]\nlisten = \"127.0.0.1:0\"\ntls_key = \"/nowhere/key\"\n");
    assert!(text.contains("tls_certificate: missing"), "{text}");
    let scratch = Scratch::new("open");
    let open = scratch.path().join("tokens");
    std::fs::write(&open, "").expect("writable");
    std::fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o644)).expect("ours");
    let text = refused(&format!("[admin]\nlisten = \"127.0.0.1:0\"\ntokens = \"{}\"\n", open.display()));
    assert!(text.contains("chmod 600"), "{text}");
}

#[test]
fn a_page_in_a_browser_changes_nothing_where_nobody_is_asked_who_they_are() {
    let gateway = Gateway::start(Options::default());
    let mut connection = client::Connection::open(gateway.admin).expect("connected");
    let headers = [("Origin", "http://evil.example"), ("Content-Type", "text/plain")];
    connection.request("POST", LB, &headers, b"{}").expect("sent");
    assert_eq!(connection.answer().expect("an answer").status, 403);
}

#[test]
fn the_api_speaks_tls_with_a_certificate_that_is_read_again() {
    let vectors = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/tls");
    let scratch = Scratch::new("tls");
    let (certificate, key) = (scratch.path().join("server.crt"), scratch.path().join("server.key"));
    let stage = |number: u8| {
        std::fs::copy(vectors.join(format!("server{number}.crt")), &certificate).expect("writable");
        std::fs::copy(vectors.join(format!("server{number}.key")), &key).expect("writable");
    };
    stage(1);
    let admin = free_address();
    let config = scratch.path().join("kvlane.toml");
    let text = format!(
        "[admin]\nlisten = \"{admin}\"\ntls_certificate = \"{}\"\ntls_key = \"{}\"\n",
        certificate.display(),
        key.display()
    );
    std::fs::write(&config, text).expect("writable");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvlane"));
    let serve = ["serve", "-c", config.to_str().expect("text")];
    let mut child = command.args(serve).stderr(Stdio::null()).spawn().expect("the binary was built");
    let port = admin.port().to_string();
    let version = |authority: &str| {
        let authority = vectors.join(authority);
        let authority = authority.to_str().expect("text");
        kvlane(&["get", "lbversion", "--protocol", "https", "--cacert", authority, "--port", &port]).0
    };
    wait_for("the API answers over TLS", || (version("ca1.crt") == Some(0)).then_some(()));
    assert_eq!(version("ca2.crt"), Some(5), "another authority's certificate is not believed");
    let (code, told) = kvlane(&["get", "lbversion", "--port", &port]);
    assert!(code == Some(6) && told.contains("--protocol https"), "nothing is answered in clear: {told}");
    let (_, told) = kvlane(&["get", "lbversion", "--port", &port, "--protocol", "https"]);
    assert!(told.contains("--cacert"), "{told}");
    assert_eq!(kvlane(&["get", "lbversion", "--protocol", "https", "-k", "--port", &port]).0, Some(0));
    stage(2);
    wait_for("the new certificate is shown", || (version("ca2.crt") == Some(0)).then_some(()));
    child.kill().expect("ours");
    child.wait().expect("ours");
}

/// A gateway over TLS, whose files are replaced while it is asked without a pause.
#[test]
fn a_pair_that_is_half_there_or_does_not_fit_changes_nothing_and_no_request_fails() {
    let vectors = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/tls");
    let scratch = Scratch::new("tls-load");
    let at = |name: &str| scratch.path().join(name).to_str().expect("text").to_owned();
    let read = |name: &str| std::fs::read(vectors.join(name)).expect("a vector");
    let stage = |name: &str, bytes: &[u8]| std::fs::write(at(name), bytes).expect("writable");
    stage("server.crt", &read("server1.crt"));
    stage("server.key", &read("server1.key"));
    let admin = free_address();
    let text = format!(
        "[admin]\nlisten = \"{admin}\"\ntls_certificate = \"{}\"\ntls_key = \"{}\"\n",
        at("server.crt"),
        at("server.key")
    );
    stage("kvlane.toml", text.as_bytes());
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvlane"));
    let log = std::fs::File::create(at("log")).expect("writable");
    let serve = ["serve", "-c", &at("kvlane.toml")];
    let _child = Child(command.args(serve).stderr(log).spawn().expect("the binary was built"));
    let port = admin.port().to_string();
    let version = |trust: &[&str]| {
        let of = ["get", "lbversion", "--protocol", "https", "--port", &port];
        kvlane(&[&of[..], trust].concat())
    };
    let ca = |number: u8| vectors.join(format!("ca{number}.crt")).to_str().expect("text").to_owned();
    let believed = |number: u8| version(&["--cacert", &ca(number)]).0 == Some(0);
    wait_for("the API answers over TLS", || believed(1).then_some(()));

    let is_over = std::sync::atomic::AtomicBool::new(false);
    let order = std::sync::atomic::Ordering::Relaxed;
    std::thread::scope(|scope| {
        let asker = scope.spawn(|| {
            let mut asked = 0_u32;
            while !is_over.load(order) {
                let (code, said) = version(&["-k"]);
                assert_eq!(code, Some(0), "after {asked} requests: {said}");
                asked += 1;
            }
            asked
        });
        let refusals = || {
            let log = std::fs::read_to_string(at("log")).expect("readable");
            assert!(!log.contains("PRIVATE KEY") && !log.contains("MII"), "no key is told: {log}");
            log.matches("the certificate so far stays in force").count()
        };
        let (certificate, key) = (read("server2.crt"), read("server2.key"));
        let cuts: [(&str, &[u8]); 7] = [
            ("server.crt", &certificate),
            ("server.crt", &certificate[..certificate.len() / 2]),
            ("server.crt", b""),
            ("server.crt", b"-----BEGIN CERTIFICATE-----\nMII\n-----END CERTIFICATE-----\n"),
            ("server.key", &key),
            ("server.key", &key[..key.len() / 2]),
            ("server.key", b"-----BEGIN PRIVATE KEY-----MII"),
        ];
        for (file, bytes) in cuts {
            stage("server.crt", &read("server1.crt"));
            stage("server.key", &read("server1.key"));
            let before = refusals();
            stage(file, bytes);
            wait_for("the refusal is logged", || (refusals() > before).then_some(()));
            assert!(believed(1), "{file} of {} bytes", bytes.len());
        }
        // A pipe must not keep the gateway waiting for somebody to write.
        std::fs::remove_file(at("server.key")).expect("ours");
        let before = refusals();
        assert!(Command::new("mkfifo").arg(at("server.key")).status().expect("a program of every system").success());
        wait_for("a pipe is refused", || (refusals() > before).then_some(()));
        assert!(believed(1));
        std::fs::remove_file(at("server.key")).expect("ours");
        stage("server.key", &key);
        stage("server.crt", &certificate);
        wait_for("the repaired pair is shown", || believed(2).then_some(()));
        is_over.store(true, order);
        assert!(asker.join().expect("no request failed") > 10);
    });
}

#[test]
fn beyond_the_rate_requests_are_told_to_wait_and_clients_of_rules_are_served() {
    let gateway = Gateway::start(Options::default());
    let engine = StubEngine::start();
    let port = free_port();
    let rule = json!({"serviceArguments": {"externalIP": "127.0.0.1", "port": port, "mode": 4},
        "endpoints": [{"endpointIP": "127.0.0.1", "targetPort": engine.address.port()}]});
    assert_eq!(client::post(gateway.admin, LB, &rule).status, 200);
    let service = ([127, 0, 0, 1], port).into();
    // Many at once on one connection, again and again until the gateway has had enough.
    let many = "GET /netlox/v1/nothing HTTP/1.1\r\nHost: h\r\n\r\n".repeat(500);
    let refused = wait_for("it has had enough", || {
        let mut connection = client::Connection::open(gateway.admin).expect("connected");
        connection.send(many.as_bytes()).expect("sent");
        let answers: Vec<_> = (0..500).map(|_| connection.answer().expect("an answer")).collect();
        assert!(answers.iter().all(|answer| matches!(answer.status, 404 | 429)));
        answers.into_iter().find(|answer| answer.status == 429)
    });
    assert_eq!((refused.header("retry-after"), &refused.json()["code"]), (Some("1"), &json!(429)));
    assert_eq!(client::call(service, "GET", "/v1/models", b"").expect("answered").status, 200);
    wait_for("after a while it answers again", || (gateway.api("/version").status == 200).then_some(()));
}

#[test]
fn doctor_and_explain_show_a_token_and_know_the_certificate() {
    let vectors = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/tls");
    let scratch = Scratch::new("asked");
    let at = |name: &str| scratch.path().join(name).to_str().expect("text").to_owned();
    let token = new_token(Path::new(&at("tokens")), "eyes", "viewer");
    std::fs::write(at("token"), &token).expect("writable");
    std::fs::write(at("request.json"), r#"{"model": "m", "prompt": "x"}"#).expect("writable");
    let (engine, admin) = (StubEngine::start(), free_address());
    let of = |name: &str| vectors.join(name).to_str().expect("text").to_owned();
    let text = format!(
        "[admin]\nlisten = \"{admin}\"\ntokens = \"{}\"\ntls_certificate = \"{}\"\ntls_key = \"{}\"\n\n\
         [[rule]]\nexternalIP = \"127.0.0.1\"\nport = {}\nkvExactMode = 3\n\n\
         [[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = {}\nkvZmqPort = {}\n",
        at("tokens"),
        of("server1.crt"),
        of("server1.key"),
        free_port(),
        engine.address.port(),
        engine.event_port,
    );
    std::fs::write(at("kvlane.toml"), text).expect("writable");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvlane"));
    let serve = ["serve", "-c", &at("kvlane.toml")];
    let _child = Child(command.args(serve).stderr(Stdio::null()).spawn().expect("the binary was built"));

    let url = format!("https://{admin}");
    let trust = ["--cacert".to_owned(), of("ca1.crt")];
    let shown = ["--token-file".to_owned(), at("token")];
    let run = |command: &[&str], more: &[String]| {
        let more: Vec<&str> = more.iter().map(String::as_str).collect();
        kvlane(&[command, &["--url", &url, "--json"], &more].concat())
    };
    let (doctor, request) = (["doctor"], at("request.json"));
    let config = at("kvlane.toml");
    let explain = ["explain", "-c", &config, &request, "--path", "/v1/completions"];
    let all = [&trust[..], &shown[..]].concat();
    wait_for("explain is let in", || (run(&explain, &all).0 == Some(0)).then_some(()));
    let (_, told) = run(&explain, &all);
    assert!(told.contains(r#""overlaps":[{"endpoint":"#), "{told}");
    let (code, told) = run(&explain, &trust);
    assert!(code == Some(1) && told.contains("a token is needed"), "{told}");
    let (code, told) = run(&explain, &shown);
    assert!(code == Some(1) && told.contains("no gateway answers"), "{told}");

    let (_, told) = run(&doctor, &all);
    assert!(told.contains("its management API answers"), "{told}");
    let (code, told) = run(&doctor, &trust);
    assert!(code == Some(1) && told.contains("a token is needed") && told.contains("--token-file"), "{told}");
}
