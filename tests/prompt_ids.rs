//! `kvSendPromptIds`: chats are sent on with the ids of their prompts, to engines that take them, and with nothing else
//! changed.

#[path = "common/byte_tokenizer.rs"]
mod byte_tokenizer;
mod common;

use std::net::SocketAddr;

use common::client;
use common::engines::{Persona, StubEngine};
use common::gateway::{Gateway, Options};
use common::{Scratch, free_port, wait_for};
use serde_json::{Value, json};

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}\
    <go>{% endif %}";
const CHAT: &str = r#"{"model":"m", "stream" : false,"messages":[{"role":"user","content":"hi"}]}"#;

/// The ids of `CHAT`'s prompt.
fn ids() -> String {
    json!(b"<user>hi<go>".as_slice()).to_string()
}

struct Scene {
    gateway: Gateway,
    engine: StubEngine,
    address: SocketAddr,
    _tokenizers: Scratch,
}

impl Scene {
    /// One engine that tells its release.
    fn start(kind: &str, release: &str, option: &str) -> Self {
        let tokenizers = Scratch::new("prompt-ids");
        let model = tokenizers.path().join("m");
        std::fs::create_dir_all(&model).expect("made");
        std::fs::write(model.join("tokenizer.json"), byte_tokenizer::tokenizer()).expect("written");
        std::fs::write(model.join("tokenizer_config.json"), "{}").expect("written");
        std::fs::write(model.join("chat_template.jinja"), TEMPLATE).expect("written");
        let version = json!({ "version": release }).to_string();
        let answers = ["/version", "/server_info"].map(|path| (path, version.clone())).into();
        let engine = StubEngine::start_as(Persona { answers, ..Persona::default() });
        let port = free_port();
        let config = format!(
            "[tokenizers]\ndir = {:?}\n[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {port}\nkvExactMode = 3\n\
             kvEngineType = {kind:?}\nkvBlockSize = 4\n{option}\n[[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\n\
             targetPort = {}\nweight = 1\nkvZmqPort = {}\n",
            tokenizers.path(),
            engine.address.port(),
            engine.event_port,
        );
        let gateway = Gateway::start(Options { config, ..Options::default() });
        let scene = Scene { gateway, engine, address: ([127, 0, 0, 1], port).into(), _tokenizers: tokenizers };
        scene.arrives(CHAT);
        wait_for("the tokenizer is loaded and the release is known", || {
            let status = scene.gateway.api("/status/ready").json();
            let ready = status["models"].as_array()?.iter().any(|model| model["state"] == "ready");
            let endpoints = scene.gateway.api("/config/ai/kv/parity").json()["endpoints"].clone();
            let known = endpoints.as_array()?.iter().all(|endpoint| endpoint["version"] == release);
            (ready && known).then_some(())
        });
        scene
    }

    /// What the engine gets for a chat.
    fn arrives(&self, body: &str) -> String {
        self.arrives_at("/v1/chat/completions", body)
    }

    fn arrives_at(&self, path: &str, body: &str) -> String {
        let answer = client::call(self.address, "POST", path, body.as_bytes()).expect("an answer");
        assert_eq!(answer.status, 200, "{}", answer.text());
        let seen = self.engine.seen().pop().expect("it was sent");
        let lengths: Vec<_> =
            seen.headers.iter().filter(|h| h.to_ascii_lowercase().starts_with("content-length")).collect();
        assert_eq!(lengths.len(), 1, "{:?}", seen.headers);
        String::from_utf8(seen.body).expect("text")
    }
}

const ON: &str = "kvSendPromptIds = true";

#[test]
fn each_engine_gets_the_ids_where_it_looks_for_them() {
    for (kind, release, member) in [
        ("vllm", "0.33.0", format!(r#""kv_transfer_params":{{"prompt_token_ids":{}}}"#, ids())),
        ("sglang", "0.5.23", format!(r#""input_ids":{}"#, ids())),
    ] {
        let scene = Scene::start(kind, release, ON);
        let expected = format!("{},{member}}}", CHAT.strip_suffix('}').expect("an object"));
        assert_eq!(scene.arrives(CHAT), expected, "{kind}");
        assert_eq!(scene.arrives(CHAT), expected, "{kind}: again, when it is remembered");
    }
}

#[test]
fn what_the_client_says_itself_stays() {
    let scene = Scene::start("vllm", "0.33.0", ON);
    let chat = |more: &str| format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}],{more}}}"#);
    let params = |more: &str| chat(&format!(r#""kv_transfer_params" : {{"a":[ ]{more}}}, "n":1"#));
    let ids = format!(r#","prompt_token_ids":{}"#, ids());
    assert_eq!(scene.arrives(&params("")), params(&ids), "its other parameters stay");
    for untouched in [
        params(r#","prompt_token_ids":[1,2]"#),
        params(r#","prompt_token_ids":null"#),
        chat(r#""kv_transfer_params":[]"#),
        chat(r#""truncate_prompt_tokens":5"#),
        chat(r#""continue_final_message":true,"add_generation_prompt":false"#),
        chat(r#""messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]"#),
        chat(r#""messages":[]"#),
    ] {
        assert_eq!(scene.arrives(&untouched), untouched);
    }
    let completion = r#"{"model":"m","prompt":"the words of a completion"}"#;
    assert_eq!(scene.arrives_at("/v1/completions", completion), completion);
    let long = chat(&format!(r#""messages":[{{"role":"user","content":"{}"}}]"#, "words ".repeat(60_000)));
    assert_eq!(scene.arrives(&long), long, "ids of so long a prompt are not sent");
    let some = chat(&format!(r#""messages":[{{"role":"user","content":"{}"}}]"#, "words ".repeat(20_000)));
    let arrived: Value = serde_json::from_str(&scene.arrives(&some)).expect("JSON");
    let got = arrived["kv_transfer_params"]["prompt_token_ids"].as_array().expect("ids").len();
    assert_eq!(got, "<user><go>".len() + 120_000, "of one that is read aside they are");
}

#[test]
fn nothing_is_sent_where_it_is_not_wanted_or_not_understood() {
    for (kind, release, option) in [
        ("vllm", "0.33.0", ""),
        ("vllm", "0.33.0", "kvSendPromptIds = false"),
        ("vllm", "0.31.1", ON),
        ("sglang", "0.5.12", ON),
    ] {
        let scene = Scene::start(kind, release, option);
        assert_eq!(scene.arrives(CHAT), CHAT, "{kind} {release} {option}");
    }
}
