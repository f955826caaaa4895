//! `kvlane render` and `kvlane explain` as processes.

#[path = "common/byte_tokenizer.rs"]
mod byte_tokenizer;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ style }}{% if tools %}{{ \
    raise_exception('no tools') }}{% endif %}{% if add_generation_prompt %}<go>{% endif %}";

/// A directory of this test process, removed at its end.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvlane-prompts-{}-{name}", std::process::id()));
        let model = path.join("tokenizers/org__m");
        std::fs::create_dir_all(&model).expect("made");
        std::fs::write(model.join("tokenizer.json"), byte_tokenizer::tokenizer()).expect("written");
        std::fs::write(model.join("tokenizer_config.json"), r#"{"bos_token": "<s>"}"#).expect("written");
        std::fs::write(model.join("chat_template.jinja"), TEMPLATE).expect("written");
        Directory(path)
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, text).expect("written");
        text_of(&path)
    }

    fn tokenizers(&self) -> String {
        text_of(&self.0.join("tokenizers"))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn text_of(path: &Path) -> String {
    path.to_str().expect("text").to_owned()
}

fn kvlane(args: &[&str], input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvlane"));
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("LLB_") || name.starts_with("LOXILB_") || name == "RUST_LOG" {
            command.env_remove(name);
        }
    }
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program starts");
    // A command that fails early does not read its input.
    let _ = child.stdin.take().expect("piped").write_all(input.as_bytes());
    child.wait_with_output().expect("the program ends")
}

fn out(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).expect("text")
}

const CHAT: &str = r#"{"model": "org/m", "messages": [{"role": "user", "content": "hi"}]}"#;

#[test]
fn render_prints_the_text_or_the_ids() {
    let directory = Directory::new("render");
    let tokenizers = directory.tokenizers();
    let render = |more: &[&str], input: &str| {
        let args = [&["render", "--tokenizers", &tokenizers, "--model", "org/m"], more].concat();
        kvlane(&args, input)
    };
    assert_eq!(out(&render(&[], CHAT)), "<user>hi<go>");
    let ids: Vec<u32> = serde_json::from_str(&out(&render(&["--ids"], CHAT))).expect("a list");
    assert_eq!(ids, b"<user>hi<go>".map(u32::from));
    assert_eq!(out(&render(&["--kwargs", r#"{"style": "!"}"#], CHAT)), "<user>hi!<go>");
    assert_eq!(out(&render(&["--api", "completions", "--ids"], r#"{"prompt": "a"}"#)), "[256,97]\n");
    assert_eq!(out(&render(&["--api", "responses"], r#"{"input": "a"}"#)), "<user>a<go>");
    assert_eq!(out(&render(&["--api", "messages"], r#"{"system": "s", "messages": []}"#)), "<system>s<go>");
    let own = r#"{"messages": [{"role": "x", "content": "y"}], "add_generation_prompt": false, "style": 1.0}"#;
    assert_eq!(out(&render(&["--api", "template"], own)), "<x>y1.0");
    let template = directory.file("own.jinja", "{{ messages[0].content }}");
    assert_eq!(out(&render(&["--template", &template], CHAT)), "hi");
}

#[test]
fn render_says_why_there_is_no_text() {
    let directory = Directory::new("refuse");
    let tokenizers = directory.tokenizers();
    let tools = r#"{"messages": [{"role": "user", "content": "hi"}], "tools": [{"function": {"name": "f"}}]}"#;
    for (model, more, input, code, said) in [
        ("org/m", "--ids", tools, 1, "no tools"),
        ("org/m", "--ids", tools, 1, "cannot be known: template"),
        ("org/m", "--ids", "{", 1, "cannot be known: tokenize"),
        ("org/absent", "--ids", CHAT, 2, "org__absent"),
        ("org/m", "--kwargs=[]", CHAT, 2, "no JSON object"),
        ("org/m", "--template=/nonexistent", CHAT, 2, "/nonexistent"),
    ] {
        let output = kvlane(&["render", "--tokenizers", &tokenizers, "--model", model, more], input);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{said}: {error}");
        assert!(error.contains(said), "{said}: {error}");
        assert!(output.stdout.is_empty(), "{said}");
    }
}

fn config(directory: &Directory) -> String {
    directory.file(
        "kvlane.toml",
        &format!(
            "[tokenizers]\ndir = {:?}\n[[rule]]\nname = \"r\"\nexternalIP = \"127.0.0.1\"\nport = 8080\nkvExactMode = 3\n\
             kvBlockSize = 4\nkvMinMatchTokens = 4\nkvChatTemplateKwargs = {{ style = \"!\" }}\n\
             [[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = 9001\nweight = 1\n\
             [[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = 9002\nweight = 1\nkvZmqPort = 5559\n",
            directory.tokenizers()
        ),
    )
}

/// A management API that says: the second endpoint holds these keys.
fn gateway(keys: Vec<Value>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut request = [0; 4096];
            let read = stream.read(&mut request).unwrap_or(0);
            let request = String::from_utf8_lossy(&request[..read]).into_owned();
            let blocks =
                |keys: &[Value]| json!({"blocks": keys.iter().map(|k| json!({"hash_uint64": k})).collect::<Vec<_>>()});
            let answer = if request.contains("loadbalancer/all") {
                let service = json!({"service_id": 7, "externalIP": "127.0.0.1", "port": 8080});
                let endpoints = json!([{"state": "active"}, {"state": "active"}]);
                json!({"lbAttr": [{"serviceArguments": service, "endpoints": endpoints}]})
            } else if request.contains("service_id=7&ep_idx=1") {
                blocks(&keys)
            } else {
                blocks(&[])
            };
            let answer = answer.to_string();
            let _ = write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{answer}", answer.len());
        }
    });
    format!("http://{address}")
}

#[test]
fn explain_tells_every_step_up_to_the_decision() {
    let directory = Directory::new("explain");
    let (config, request) = (config(&directory), directory.file("request.json", CHAT));
    let told = out(&kvlane(&["explain", "-c", &config, &request, "--json"], ""));
    let told: Value = serde_json::from_str(&told).expect("JSON");
    assert_eq!(told["rule"], "127.0.0.1:8080");
    assert_eq!(told["prompt"]["text"], "<user>hi!<go>");
    assert_eq!(told["prompt"]["ids"].as_array().map(Vec::len), Some(13));
    assert_eq!(told["decision"]["tier"], "select");
    assert_eq!(told["decision"]["miss"], "no_worker");
    // The keys are those of `kvlane hash` for the same ids.
    let hash = ["hash", "--engine", "vllm", "--block-size", "4", "--json"];
    let hashed: Value = serde_json::from_str(&out(&kvlane(&hash, &told["prompt"]["ids"].to_string()))).expect("JSON");
    let keys: Vec<&Value> = hashed["keys"].as_array().expect("keys").iter().map(|key| &key["u64"]).collect();
    assert_eq!(told["keys"].as_array().expect("keys").iter().collect::<Vec<_>>(), keys);

    let held =
        keys[..2].iter().map(|key| json!(key.as_str().expect("a text").parse::<u64>().expect("a key"))).collect();
    let url = gateway(held);
    let told = out(&kvlane(&["explain", "-c", &config, &request, "--json", "--url", &url], ""));
    let told: Value = serde_json::from_str(&told).expect("JSON");
    assert_eq!(told["overlaps"][0]["blocks"], 0);
    assert_eq!(told["overlaps"][1]["blocks"], 2);
    assert_eq!(told["decision"]["tier"], "kv_exact");
    assert_eq!(told["decision"]["endpoint"], "127.0.0.1:9002");
    let printed = out(&kvlane(&["explain", "-c", &config, &request, "--url", &url], ""));
    for line in ["<user>hi!<go>", "2 of 3 blocks", "127.0.0.1:9002 by tier kv_exact"] {
        assert!(printed.contains(line), "{line}: {printed}");
    }
}

/// An engine that tells a chat's ids, if it is asked on the right path.
fn engine() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut request = [0; 4096];
            let read = stream.read(&mut request).unwrap_or(0);
            let asked = request[..read].starts_with(b"POST /tokenize ");
            let answer = if asked { r#"{"count":9,"tokens":[1,2,3,4,5,6,7,8,9]}"# } else { "{}" };
            let _ = write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{answer}", answer.len());
        }
    });
    port
}

#[test]
fn explain_asks_an_engine_where_the_rule_says_so_and_else_says_why_not() {
    let directory = Directory::new("engine");
    std::fs::remove_file(directory.0.join("tokenizers/org__m/chat_template.jinja")).expect("it was there");
    let (text, request) = (config(&directory), directory.file("request.json", CHAT));
    let text = std::fs::read_to_string(text)
        .expect("written")
        .replace("targetPort = 9001", &format!("targetPort = {}", engine()));
    let off = directory.file("off.toml", &text);
    let printed = out(&kvlane(&["explain", "-c", &off, &request], ""));
    assert!(printed.contains("none told them: the rule's kvEngineRender is off"), "{printed}");
    let on =
        directory.file("on.toml", &text.replace("kvBlockSize = 4", "kvBlockSize = 4\nkvEngineRender = \"tokenize\""));
    let told = out(&kvlane(&["explain", "-c", &on, &request, "--json"], ""));
    let told: Value = serde_json::from_str(&told).expect("JSON");
    assert_eq!(told["prompt"]["ids"], json!([1, 2, 3, 4, 5, 6, 7, 8, 9]));
    assert_eq!(told["keys"].as_array().map(Vec::len), Some(2));
    assert!(told["engine"]["told_by"].as_str().is_some_and(|who| who.ends_with("/tokenize")), "{told}");
    let path = ["explain", "-c", &on, &request, "--path", "/v1/responses"];
    let printed = out(&kvlane(&path, ""));
    assert!(printed.contains("routed without keys"), "{printed}");
}

#[test]
fn explain_keys_a_request_for_an_adapter_as_its_engine_does() {
    let directory = Directory::new("adapter");
    let text = std::fs::read_to_string(config(&directory)).expect("written");
    let text = text.replace(
        "kvBlockSize = 4",
        "kvBlockSize = 4\nkvAdapters = { tuned = { base = \"org/m\", path = \"/adapters/tuned\" } }",
    );
    let config = directory.file("adapters.toml", &text);
    let explain = |name: &str, model: &str| {
        let request = directory.file(name, &CHAT.replace("org/m", model));
        let told = out(&kvlane(&["explain", "-c", &config, &request, "--json"], ""));
        serde_json::from_str::<Value>(&told).expect("JSON")
    };
    let (base, tuned) = (explain("base.json", "org/m"), explain("tuned.json", "tuned"));
    assert_eq!(tuned["prompt"], base["prompt"], "the base's tokenizer and template");
    assert_eq!(tuned["keys"].as_array().map(Vec::len), Some(3));
    assert!(tuned["keys"] != base["keys"], "its blocks are its own");
}

#[test]
fn explain_says_what_is_wrong() {
    let directory = Directory::new("wrong");
    let config = config(&directory);
    let request = directory.file("request.json", CHAT);
    let list = directory.file("list.json", "[]");
    for (args, code, said) in [
        (vec!["explain", "-c", "/nonexistent", &request], 1, "/nonexistent"),
        (vec!["explain", "-c", &config, "/nonexistent"], 2, "/nonexistent"),
        (vec!["explain", "-c", &config, &list], 1, "no JSON object"),
        (vec!["explain", "-c", &config, &request, "--url", "x"], 2, "--url: x"),
        (vec!["explain", "-c", &config, &request, "--url", "127.0.0.1:1"], 1, "127.0.0.1:1"),
    ] {
        let output = kvlane(&args, "");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{said}: {error}");
        assert!(error.contains(said), "{said}: {error}");
    }
    let embeddings = kvlane(&["explain", "-c", &config, &request, "--path", "/v1/embeddings"], "");
    assert!(out(&embeddings).contains("routed without keys: mode_off"));
}
