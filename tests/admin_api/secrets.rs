//! Planted secrets and a planted prompt: they go where they must, and are told nowhere.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;

use crate::common::engines::{Persona, StubEngine};
use crate::common::gateway::{Gateway, Options};
use crate::common::{Scratch, client, fleet, free_port, wait_for};
use serde_json::{Value, json};

use super::access::new_token;

const ENGINE_TOKEN: &str = "planted-engine-token-5f1c";
const AUTH_KEY: &str = "planted-auth-key-77d2";
const SEED: &str = "planted-seed-0b93";
const PROMPT: &str = "planted prompt about a violet giraffe";
/// What a client shows the engine.
const CLIENT_KEY: &str = "sk-planted-client-key-91aa";

/// A gateway with everything that must not be told, and who may ask it.
struct Planted {
    gateway: Gateway,
    engine: StubEngine,
    scratch: Scratch,
    admin: String,
    viewer: String,
    ports: [u16; 2],
    _tokenizers: Scratch,
}

impl Planted {
    fn start() -> Self {
        let (scratch, tokenizers) = (Scratch::new("planted"), fleet::tokenizers());
        let at = |name: &str| scratch.path().join(name).to_str().expect("text").to_owned();
        // A template that says what it was given when it refuses.
        let template = "{{ raise_exception('not ' ~ messages[0].content) }}";
        for (name, text) in [("engine-token", ENGINE_TOKEN), ("auth-key", AUTH_KEY), ("chat.jinja", template)] {
            std::fs::write(at(name), text).expect("writable");
            let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
            std::fs::set_permissions(at(name), private).expect("ours");
        }
        let tokens = scratch.path().join("tokens");
        let (admin, viewer) = (new_token(&tokens, "ops", "admin"), new_token(&tokens, "eyes", "viewer"));
        let config = format!(
            "tokens = \"{}\"\nfiles = [\"{}\"]\n[state]\ndirectory = \"{}\"\nperiod_ms = 100\n[tokenizers]\ndir = \"{}\"\n",
            at("tokens"),
            scratch.path().display(),
            at("state"),
            tokenizers.path().display()
        );
        let gateway = Gateway::start(Options { config, ..Options::default() });
        let answers = vec![("/health", String::new()), ("/version", r#"{"version":"0.32.0"}"#.to_owned())];
        let engine = StubEngine::start_as(Persona { token: Some(ENGINE_TOKEN), answers, ..Persona::default() });
        let ports = [free_port(), free_port()];
        let planted = Planted { gateway, engine, scratch, admin, viewer, ports, _tokenizers: tokenizers };
        planted.call("POST", "/config/params", &json!({"logLevel": "trace"}), 200);
        planted.post_rules();
        planted
    }

    fn at(&self, name: &str) -> String {
        self.scratch.path().join(name).to_str().expect("text").to_owned()
    }

    fn post_rules(&self) {
        let engine = |more: Value| {
            let mut endpoint = json!({"endpointIP": "127.0.0.1", "targetPort": self.engine.address.port()});
            more.as_object().into_iter().flatten().for_each(|(name, value)| endpoint[name] = value.clone());
            endpoint
        };
        let routed = json!({"serviceArguments": {"externalIP": "127.0.0.1", "port": self.ports[0], "mode": 4,
                "kvExactMode": 3, "kvNoneHashSeed": SEED, "engineTokenFile": self.at("engine-token"),
                "kvChatTemplate": self.at("chat.jinja"), "kvEngineRender": "off", "model_name": "kvlane/demo"},
            "endpoints": [engine(json!({"kvZmqPort": self.engine.event_port}))]});
        let split = json!({"serviceArguments": {"externalIP": "127.0.0.1", "port": self.ports[1], "mode": 4,
                "kvExactMode": 1, "pd_disagg_mode": true, "kvEngineType": "trtllm", "kvBlockSize": 32,
                "pdAuthKeyFile": self.at("auth-key"), "engineTokenFile": self.at("engine-token")},
            "endpoints": [engine(json!({"ep_role": 1})),
                {"endpointIP": "127.0.0.1", "targetPort": StubEngine::start().address.port(), "ep_role": 2}]});
        for rule in [routed, split] {
            self.call("POST", "/config/loadbalancer", &rule, 200);
        }
        wait_for("the tokenizer is loaded", || {
            let status = self.ask("GET", "/status/ready", &self.admin, b"").json();
            status["models"].as_array()?.iter().any(|model| model["state"] == "ready").then_some(())
        });
    }

    fn ask(&self, method: &str, path: &str, token: &str, body: &[u8]) -> client::Answer {
        let authorization = format!("Bearer {token}");
        send(self.gateway.admin, method, &format!("/netlox/v1{path}"), &[("Authorization", &authorization)], body)
    }

    /// What an admin is answered.
    fn call(&self, method: &str, path: &str, body: &Value, status: u16) -> String {
        let answer = self.ask(method, path, &self.admin, body.to_string().as_bytes());
        assert_eq!(answer.status, status, "{method} {path}: {}", answer.text());
        answer.text()
    }

    /// Requests with the prompt, right and wrong ones, through both rules.
    fn ask_engines(&self) {
        let bodies = [
            ("/v1/completions", json!({"model": "kvlane/demo", "prompt": PROMPT}).to_string()),
            ("/v1/completions", format!("{{\"model\": \"kvlane/demo\", \"prompt\": \"{PROMPT}")),
            ("/v1/completions", json!({"model": "kvlane/demo", "prompt": [PROMPT, 1, {"x": PROMPT}]}).to_string()),
            ("/v1/completions", json!({"model": PROMPT, "prompt": PROMPT}).to_string()),
            ("/v1/chat/completions", chat(&json!({"role": "user", "content": PROMPT}))),
            ("/v1/chat/completions", chat(&json!({"role": PROMPT, "content": [{"type": PROMPT, "text": PROMPT}]}))),
            ("/v1/chat/completions", chat(&json!(PROMPT))),
            ("/v1/chat/completions", json!({"model": "kvlane/demo", "messages": PROMPT}).to_string()),
        ];
        let headers = [("Authorization", &*format!("Bearer {CLIENT_KEY}")), ("Content-Type", "application/json")];
        for port in self.ports {
            for (path, body) in &bodies {
                send(([127, 0, 0, 1], port).into(), "POST", path, &headers, body.as_bytes());
            }
        }
    }

    /// Everything that is told, by where.
    fn told(&self, token: &str) -> BTreeMap<String, String> {
        let mut told = BTreeMap::new();
        let id = self.ask("GET", "/config/loadbalancer/all", token, b"").json()["lbAttr"][0]["serviceArguments"]["id"]
            .clone();
        let rule = format!("/config/loadbalancer/externalipaddress/127.0.0.1/port/{}/protocol/tcp", self.ports[0]);
        for path in [
            "/metrics",
            "/config/loadbalancer/all",
            &format!("/config/loadbalancer/id/{}", id.as_str().expect("an id")),
            &format!("{rule}?model_name=kvlane/demo"),
            "/config/loadbalancer/name/",
            "/config/snapshot",
            "/status/ready",
            "/status/capabilities",
            "/status/process",
            "/config/ai/kv/parity",
            "/config/ai/kv/contract?nonce=0101010101010101010101010101010101010101010101010101010101010101",
            "/config/ai/kv/inventory?service_id=0&ep_idx=0",
            "/config/ai/kv/streams",
            "/config/ai/kv/models",
            "/config/endpoint/all",
            "/config/params",
            "/openapi.json",
            "/meta",
        ] {
            told.insert(path.to_owned(), self.ask("GET", path, token, b"").text());
        }
        told.insert("log".to_owned(), self.gateway.log());
        told
    }
}

fn chat(message: &Value) -> String {
    json!({"model": "kvlane/demo", "messages": [message]}).to_string()
}

fn send(address: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> client::Answer {
    let mut connection = client::Connection::open(address).expect("connected");
    connection.request(method, path, headers, body).expect("sent");
    connection.answer().expect("an answer")
}

fn tells_none_of(place: &str, text: &str, planted: &[&str]) {
    for secret in planted {
        // The text before it shows where it comes from.
        if let Some(at) = text.find(secret) {
            let from = text[..at].rfind('\n').unwrap_or(0);
            panic!("{secret:?} is in {place}: {}", &text[from..at + secret.len()]);
        }
    }
}

/// Contents of the files below a directory.
fn contents(directory: &Path) -> Vec<(String, String)> {
    let entries = std::fs::read_dir(directory).expect("the directory is there");
    let read = |entry: std::fs::DirEntry| {
        let bytes = std::fs::read(entry.path()).expect("readable");
        (entry.file_name().to_string_lossy().into_owned(), String::from_utf8_lossy(&bytes).into_owned())
    };
    entries.map(|entry| read(entry.expect("an entry"))).collect()
}

#[test]
fn planted_secrets_and_a_planted_prompt_appear_nowhere() {
    let planted = Planted::start();
    wait_for("the gateway's own calls show the token", || {
        let engines = planted.ask("GET", "/status/ready", &planted.admin, b"").json();
        engines["engines"].as_array()?.iter().any(|engine| engine["access"] == "open").then_some(())
    });
    planted.ask_engines();
    let seen = planted.engine.seen();
    assert!(
        seen.iter().any(|seen| seen.headers.iter().any(|header| header.contains(CLIENT_KEY))),
        "it goes where it must"
    );
    let mut answers = vec![planted.call(
        "POST",
        "/config/ai/kv/explain?path=/v1/completions",
        &json!({"model": "kvlane/demo", "prompt": PROMPT}),
        200,
    )];
    let chat = json!({"model": "kvlane/demo", "messages": [{"role": "user", "content": PROMPT}]});
    answers.push(planted.call("POST", "/config/ai/kv/explain", &chat, 200));
    for wrong in [json!(format!("{SEED}-which-is-too-long")), json!({ SEED: SEED }), json!([SEED])] {
        let rule = json!({"serviceArguments": {"externalIP": "127.0.0.1", "port": 1, "mode": 4, "kvExactMode": 3,
            "kvNoneHashSeed": wrong}, "endpoints": []});
        answers.push(planted.call("POST", "/config/loadbalancer", &rule, 400));
    }
    wait_for("a refused chat is in the log", || {
        planted.gateway.log().contains("refused the conversation").then_some(())
    });
    let everywhere = [ENGINE_TOKEN, AUTH_KEY, CLIENT_KEY, &planted.admin, &planted.viewer, PROMPT, "violet giraffe"];
    answers.iter().for_each(|text| tells_none_of("an answer", text, &[&everywhere[..], &[SEED]].concat()));
    for (place, text) in planted.told(&planted.viewer) {
        tells_none_of(&place, &text, &[&everywhere[..], &[SEED]].concat());
    }
    for (place, text) in planted.told(&planted.admin) {
        tells_none_of(&place, &text, &everywhere);
        // Who made the rule gets it back to post it again.
        let is_rule = place.contains("loadbalancer") || place == "/config/snapshot";
        assert!(is_rule || !text.contains(SEED), "{place}");
    }
    assert!(planted.told(&planted.admin)["/config/snapshot"].contains(SEED));
    wait_for("the rules are kept", || planted.scratch.path().join("state/rules.json").exists().then_some(()));
    for (place, text) in contents(&planted.scratch.path().join("state")) {
        tells_none_of(&place, &text, &everywhere);
    }
}
