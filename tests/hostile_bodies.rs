//! Bodies that nobody means well, through the whole gateway: the engine gets the very bytes, or the client is told why
//! not, and the next request is served as if nothing had happened.

#[path = "common/byte_tokenizer.rs"]
mod byte_tokenizer;
mod common;

use std::net::SocketAddr;
use std::path::Path;

use common::client::{Answer, Connection};
use common::engines::StubEngine;
use common::gateway::{Gateway, Options};
use common::{Scratch, free_port, wait_for};

const PATHS: [&str; 5] = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"];

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}\
    {% endfor %}{{ tools | tojson if tools }}{% if add_generation_prompt %}<go>{% endif %}";

struct Scene {
    gateway: Gateway,
    engine: StubEngine,
    address: SocketAddr,
    _tokenizers: Scratch,
}

impl Scene {
    fn start(refuse_io_uring: bool) -> Self {
        let tokenizers = Scratch::new("hostile");
        let model = tokenizers.path().join("m");
        std::fs::create_dir_all(&model).expect("made");
        std::fs::write(model.join("tokenizer.json"), byte_tokenizer::tokenizer()).expect("written");
        std::fs::write(model.join("tokenizer_config.json"), r#"{"bos_token": "<s>"}"#).expect("written");
        std::fs::write(model.join("chat_template.jinja"), TEMPLATE).expect("written");
        let engine = StubEngine::start();
        let port = free_port();
        let config = format!(
            "[tokenizers]\ndir = {:?}\n[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {port}\nkvExactMode = 3\n\
             kvBlockSize = 4\nkvMinMatchTokens = 4\n[[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\n\
             targetPort = {}\nweight = 1\nkvZmqPort = {}\n",
            tokenizers.path(),
            engine.address.port(),
            engine.event_port,
        );
        let gateway = Gateway::start(Options { config, refuse_io_uring, ..Options::default() });
        let scene = Scene { gateway, engine, address: ([127, 0, 0, 1], port).into(), _tokenizers: tokenizers };
        scene.is_served();
        wait_for("the tokenizer is loaded", || {
            let status = scene.gateway.api("/status/ready").json();
            status["models"].as_array()?.iter().any(|model| model["state"] == "ready").then_some(())
        });
        scene
    }

    /// Sends a body as it is, by its length or in chunks.
    fn send(&self, path: &str, body: &[u8], chunked: bool) -> Answer {
        let mut connection = Connection::open(self.address).expect("the gateway takes connections");
        if chunked {
            let head = format!("POST {path} HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n");
            let mut bytes = head.into_bytes();
            for chunk in body.chunks(999) {
                bytes.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
                bytes.extend_from_slice(chunk);
                bytes.extend_from_slice(b"\r\n");
            }
            bytes.extend_from_slice(b"0\r\n\r\n");
            connection.send(&bytes).expect("the gateway reads");
        } else {
            connection.request("POST", path, &[], body).expect("the gateway reads");
        }
        connection.answer().unwrap_or_else(|error| panic!("{path}: {error}: {}", shown(body)))
    }

    fn is_served(&self) {
        let body = br#"{"model": "m", "messages": [{"role": "user", "content": "are you there?"}]}"#;
        self.arrives("/v1/chat/completions", body, false);
    }

    /// The engine gets the very bytes; or the client an error that says something.
    fn arrives(&self, path: &str, body: &[u8], chunked: bool) {
        let before = self.engine.seen().len();
        let answer = self.send(path, body, chunked);
        let seen = self.engine.seen();
        if answer.status == 200 {
            assert_eq!(seen.len(), before + 1, "{path}: it was sent once: {}", shown(body));
            assert!(seen[before].body == body, "{path}: another body arrived for {}", shown(body));
            assert!(seen[before].line.starts_with(&format!("POST {path} ")), "{}", seen[before].line);
        } else {
            assert!((400..500).contains(&answer.status), "{path}: {} for {}", answer.status, shown(body));
            assert!(answer.json()["error"].is_string(), "{}", answer.text());
            assert_eq!(seen.len(), before, "{path}: what was refused was not sent");
        }
    }
}

fn shown(body: &[u8]) -> String {
    String::from_utf8_lossy(&body[..body.len().min(300)]).into_owned()
}

/// Bodies too large for a corpus.
fn large() -> Vec<Vec<u8>> {
    let chat = |content: &str| format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{content}"}}]}}"#);
    let prompt = |prompt: &str| format!(r#"{{"model":"m","prompt":{prompt},"input_ids":{prompt},"input":{prompt}}}"#);
    let messages = r#"{"role":"user","content":"x"},"#.repeat(20_000);
    let blank = " ".repeat(400_000);
    [
        chat(&"a".repeat(1_000_000)),
        chat(&" ".repeat(700_000)),
        chat(&"\\n".repeat(300_000)),
        chat(&"\\u4f60\\ud83d\\ude00".repeat(40_000)),
        chat(&"你".repeat(200_000)),
        chat(&"words and words, ".repeat(60_000)),
        prompt(&format!("\"{}\"", "QUJD".repeat(200_000))),
        prompt(&format!("[{}1]", "1,".repeat(300_000))),
        prompt(&format!("[1{blank},{blank}2]")),
        prompt(&format!("[{}]", "9".repeat(500_000))),
        prompt(&format!("[{}]", "\"x\",".repeat(100_000) + "1")),
        format!(r#"{{"model":"m","messages":[{messages}{{"role":"user","content":"y"}}]}}"#),
        format!(r#"{{"model":"m","messages":{}"#, "[".repeat(800_000)),
        format!(r#"{{"model":"m","messages":{}1{}}}"#, "{\"a\":".repeat(100_000), "}".repeat(100_000)),
        format!(r#"{{"model":"m",{}"prompt":"p"}}"#, "\"prompt\":\"q\",\"messages\":[],".repeat(20_000)),
        format!(r#"{{"model":"{}","prompt":"p"}}"#, "m".repeat(300_000)),
        format!(r#"{{"{}":1,"model":"m","prompt":"p"}}"#, "n".repeat(300_000)),
        format!(r#"{{"model":"m","prompt":"p","truncate_prompt_tokens":{}}}"#, "9".repeat(5_000)),
        "{\"model\":\"m\",\"prompt\":\"cut".to_owned(),
    ]
    .into_iter()
    .map(String::into_bytes)
    .collect()
}

fn bodies_arrive(refuse_io_uring: bool) {
    let scene = Scene::start(refuse_io_uring);
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/request_body");
    let files = std::fs::read_dir(corpus).expect("the corpus is part of the repository");
    // The first three bytes steer the fuzz target.
    let small = files.map(|file| std::fs::read(file.expect("an entry").path()).expect("a file")[3..].to_vec());
    for (number, body) in small.chain(large()).enumerate() {
        for path in PATHS {
            scene.arrives(path, &body, number % 2 == 1 && !body.is_empty());
        }
        scene.is_served();
    }
    assert!(scene.gateway.metric_sum("loxilb_pd_kv_tier15_miss_reason_total") > 0.0, "prompts were looked at");
    assert!(!scene.gateway.log().contains("panicked"), "{}", scene.gateway.log());
}

#[test]
fn the_engine_gets_the_very_bytes_on_io_uring() {
    bodies_arrive(false);
}

#[test]
fn the_engine_gets_the_very_bytes_on_epoll() {
    bodies_arrive(true);
}
