//! Files that rules name: whoever may make rules over the API must not thereby read the gateway's host.

use std::path::Path;
use std::process::Command;

use crate::common::engines::{Persona, StubEngine};
use crate::common::gateway::{Gateway, Options};
use crate::common::{Scratch, client, free_port, wait_for};
use serde_json::{Value, json};

const LB: &str = "/netlox/v1/config/loadbalancer";
const PLANTED: &str = "planted-9d1e";

/// A directory that rules may name files in, one that they may not, and a secret in either.
struct Host {
    scratch: Scratch,
    engine: StubEngine,
}

impl Host {
    fn new() -> Self {
        let scratch = Scratch::new("host");
        for directory in ["rules.d", "tokenizers", "private", "state"] {
            std::fs::create_dir(scratch.path().join(directory)).expect("writable");
        }
        let persona = Persona {
            token: Some(PLANTED),
            answers: vec![("/health", String::new()), ("/version", r#"{"version":"0.32.0"}"#.to_owned())],
            ..Persona::default()
        };
        let host = Host { scratch, engine: StubEngine::start_as(persona) };
        for file in ["rules.d/token", "tokenizers/chat.jinja", "private/token"] {
            host.write(file, PLANTED);
        }
        host
    }

    fn at(&self, name: &str) -> String {
        self.scratch.path().join(name).to_str().expect("a text").to_owned()
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.at(name), text).expect("writable");
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(self.at(name), private).expect("ours");
    }

    /// With `rules.d` named, or without.
    fn start(&self, named: bool, more: &str) -> Gateway {
        let files = if named { format!("files = [\"{}\"]\n", self.at("rules.d")) } else { String::new() };
        let (state, tokenizers) = (self.at("state"), self.at("tokenizers"));
        let config = format!("{files}[state]\ndirectory = \"{state}\"\n[tokenizers]\ndir = \"{tokenizers}\"\n\n{more}");
        Gateway::start(Options { config, ..Options::default() })
    }

    /// A rule with one option that names a file.
    fn rule(&self, port: u16, option: &str, path: &str) -> Value {
        let mut service = json!({"externalIP": "127.0.0.1", "port": port, "mode": 4, "kvExactMode": 3});
        let endpoint = json!({"endpointIP": "127.0.0.1", "targetPort": self.engine.address.port(),
            "kvZmqPort": self.engine.event_port});
        let mut endpoints = vec![endpoint];
        if option == "pdAuthKeyFile" {
            service["kvExactMode"] = json!(1);
            service["kvEngineType"] = json!("trtllm");
            service["pd_disagg_mode"] = json!(true);
            endpoints[0] = json!({"endpointIP": "127.0.0.1", "targetPort": self.engine.address.port(), "ep_role": 1});
            endpoints.push(json!({"endpointIP": "127.0.0.2", "targetPort": free_port(), "ep_role": 2}));
        }
        service[option] = json!(path);
        json!({"serviceArguments": service, "endpoints": endpoints})
    }
}

fn rules(gateway: &Gateway) -> usize {
    gateway.api("/config/loadbalancer/all").json()["lbAttr"].as_array().map_or(0, Vec::len)
}

#[test]
fn a_rule_of_the_api_names_files_of_the_named_directories_alone() {
    let host = Host::new();
    let link = |target: &str, at: &str| std::os::unix::fs::symlink(target, host.at(at)).expect("writable");
    link(&host.at("private/token"), "rules.d/out");
    link(&host.at("private"), "rules.d/way");
    link("/proc/self/environ", "rules.d/environ");
    let gateway = host.start(true, "");
    let outside = [
        host.at("private/token"),
        host.at("private/none"),
        host.at("rules.d/out"),
        host.at("rules.d/way/token"),
        host.at("rules.d/way/none"),
        host.at("rules.d/environ"),
        host.at("rules.d/../private/token"),
        host.at("rules.d/../rules.d/token"),
        "/proc/self/environ".to_owned(),
        "/proc/self/root/etc/passwd".to_owned(),
        "/dev/zero".to_owned(),
        "/etc/passwd".to_owned(),
        "kvlane.toml".to_owned(),
        "../../etc/passwd".to_owned(),
    ];
    for option in ["engineTokenFile", "pdAuthKeyFile", "kvChatTemplate"] {
        for path in &outside {
            let rule = host.rule(free_port(), option, path);
            let whole = json!({"version": 1, "lbAttr": [rule]});
            let restored =
                |mode: &str| client::post(gateway.admin, &format!("/netlox/v1/config/restore{mode}"), &whole);
            let any_case = rule.to_string().replace(option, &option.to_uppercase());
            for answer in [
                client::post(gateway.admin, LB, &rule),
                client::call(gateway.admin, "POST", LB, any_case.as_bytes()).expect("answered"),
                restored(""),
                restored("?mode=dry-run"),
            ] {
                // The same of what is there and what is not.
                let text = answer.text();
                assert_eq!(answer.status, 400, "{option} {path}: {text}");
                assert!(text.contains("add its directory to files under [admin]"), "{option} {path}: {text}");
                assert!(!text.contains(PLANTED) && !text.contains("root:"), "{option} {path}: {text}");
            }
        }
        let answer = client::post(gateway.admin, LB, &host.rule(free_port(), option, &host.at("rules.d/token")));
        assert_eq!(answer.status, 200, "{option}: {}", answer.text());
    }
    let with_tokenizers = |option| host.rule(free_port(), option, &host.at("tokenizers/chat.jinja"));
    assert_eq!(client::post(gateway.admin, LB, &with_tokenizers("kvChatTemplate")).status, 200);
    assert_eq!(client::post(gateway.admin, LB, &with_tokenizers("engineTokenFile")).status, 400);
    assert_eq!(rules(&gateway), 4);
    assert!(!gateway.log().contains(PLANTED), "no secret is told");
}

#[test]
fn what_is_no_small_regular_file_is_refused_at_once() {
    let host = Host::new();
    let fifo = Command::new("mkfifo").arg(host.at("rules.d/fifo")).status().expect("a program of every system");
    assert!(fifo.success());
    std::fs::create_dir(host.at("rules.d/directory")).expect("writable");
    host.write("rules.d/huge", "");
    let huge = std::fs::File::options().write(true).open(host.at("rules.d/huge")).expect("ours");
    huge.set_len(1 << 40).expect("a sparse file");
    host.write("rules.d/bytes", "");
    std::fs::write(host.at("rules.d/bytes"), [0xff, 0xfe]).expect("ours");
    let gateway = host.start(true, "");
    for (name, text) in [
        ("fifo", "no regular file"),
        ("directory", "no regular file"),
        ("none", "cannot read"),
        ("huge", ""),
        ("bytes", ""),
    ] {
        for option in ["engineTokenFile", "pdAuthKeyFile", "kvChatTemplate"] {
            let rule = host.rule(free_port(), option, &host.at(&format!("rules.d/{name}")));
            let answer = client::post(gateway.admin, LB, &rule);
            assert_eq!(answer.status, 400, "{option} {name}: {}", answer.text());
            assert!(answer.text().contains(text), "{option} {name}: {}", answer.text());
        }
    }
    assert_eq!(rules(&gateway), 0);
}

#[test]
fn a_replayed_rule_is_held_to_the_same_and_waits_until_its_file_may_be_named() {
    let host = Host::new();
    let (port, option) = (free_port(), "engineTokenFile");
    let rule = host.rule(port, option, &host.at("rules.d/token"));
    {
        let gateway = host.start(true, "");
        assert_eq!(client::post(gateway.admin, LB, &rule).status, 200);
    }
    {
        let gateway = host.start(false, "");
        assert_eq!(rules(&gateway), 0);
        let waiting = gateway.api("/status/ready").json()["rules_kept"]["waiting"].clone();
        assert!(waiting[0]["why"].as_str().is_some_and(|why| why.contains("files under [admin]")), "{waiting}");
        // Nor does a client's file of rules get round it.
        let file = host.at("private/rules.json");
        std::fs::write(&file, json!({"lbAttr": [rule]}).to_string()).expect("writable");
        let admin = gateway.admin.port().to_string();
        let applied =
            Command::new(env!("CARGO_BIN_EXE_kvlane")).args(["apply", "-f", &file, "--port", &admin]).output();
        let applied = applied.expect("the binary was built");
        assert_eq!(applied.status.code(), Some(7), "{applied:?}");
        assert!(String::from_utf8_lossy(&applied.stderr).contains("files under [admin]"), "{applied:?}");
    }
    std::fs::rename(host.at("rules.d/token"), host.at("private/kept")).expect("ours");
    let gateway = host.start(true, "");
    assert_eq!(rules(&gateway), 0, "the file is gone");
    std::fs::rename(host.at("private/kept"), host.at("rules.d/token")).expect("ours");
    wait_for("the rule is in force once its file is there", || (rules(&gateway) == 1).then_some(()));
}

#[test]
fn a_token_file_that_becomes_a_way_out_is_read_no_more() {
    let host = Host::new();
    host.write("rules.d/token", "harmless");
    let gateway = host.start(true, "");
    let rule = host.rule(free_port(), "engineTokenFile", &host.at("rules.d/token"));
    assert_eq!(client::post(gateway.admin, LB, &rule).status, 200);
    let access = || gateway.api("/status/ready").json()["engines"][0]["access"].clone();
    wait_for("the engine refuses the token", || (access() == "denied").then_some(()));
    // What lies outside would be taken: it must not be shown.
    std::fs::remove_file(host.at("rules.d/token")).expect("ours");
    std::os::unix::fs::symlink(host.at("private/token"), host.at("rules.d/token")).expect("writable");
    wait_for("it is said", || gateway.log().contains("the token stays as it was").then_some(()));
    assert_eq!(access(), "denied");
    std::fs::remove_file(host.at("rules.d/token")).expect("ours");
    host.write("rules.d/token", PLANTED);
    wait_for("a token that lies where it must is read again", || (access() == "open").then_some(()));
}

#[test]
fn the_configuration_files_rules_name_any_file() {
    let host = Host::new();
    let port = free_port();
    let more = format!(
        "[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {port}\nkvExactMode = 3\nengineTokenFile = \"{}\"\n\
         kvChatTemplate = \"{}\"\n[[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = {}\nkvZmqPort = {}\n",
        host.at("private/token"),
        host.at("private/token"),
        host.engine.address.port(),
        host.engine.event_port,
    );
    let gateway = host.start(false, &more);
    assert_eq!(rules(&gateway), 1);
    // Such a rule's file is not the API's to use.
    let body = host.rule(port, "engineTokenFile", &host.at("private/token"));
    assert_eq!(client::post(gateway.admin, LB, &body).status, 400);
    let mut attach = host.rule(port, "oper", "");
    attach["serviceArguments"]["oper"] = json!(1);
    let answer = client::post(gateway.admin, LB, &attach);
    assert_eq!(answer.status, 409, "{}", answer.text());
    assert!(answer.text().contains("configuration file"), "{}", answer.text());
}

#[test]
fn directories_that_are_no_directories_of_files_are_refused_at_the_start() {
    let scratch = Scratch::new("wide");
    let file = scratch.path().join("kvlane.toml");
    for directories in
        ["[\"/\"]", "[\"/proc\"]", "[\"/proc/self\"]", "[\"rules.d\"]", "[\"/etc/../etc\"]", "\"/etc\"", "[1]"]
    {
        std::fs::write(&file, format!("[admin]\nfiles = {directories}\n")).expect("writable");
        let checked = Command::new(env!("CARGO_BIN_EXE_kvlane")).arg("check").arg(Path::new(&file)).output();
        let checked = checked.expect("the binary was built");
        assert_eq!(checked.status.code(), Some(1), "{directories}");
        let text = String::from_utf8_lossy(&checked.stderr).into_owned();
        assert!(text.contains("admin.files: expected a list of at most 64 directories"), "{text}");
    }
}

#[test]
fn a_tokenizer_that_is_half_written_takes_no_keys_away() {
    let tokenizers = crate::common::fleet::tokenizers();
    let (engine, port) = (StubEngine::start(), free_port());
    let config = format!("[tokenizers]\ndir = \"{}\"\n", tokenizers.path().display());
    let gateway = Gateway::start(Options { config, ..Options::default() });
    let rule = json!({"serviceArguments": {"externalIP": "127.0.0.1", "port": port, "mode": 4, "kvExactMode": 3,
            "model_name": "kvlane/demo"},
        "endpoints": [{"endpointIP": "127.0.0.1", "targetPort": engine.address.port(), "kvZmqPort": engine.event_port}]});
    assert_eq!(client::post(gateway.admin, LB, &rule).status, 200);
    let model = || gateway.api("/status/ready").json()["models"][0].clone();
    wait_for("the tokenizer is loaded", || (model()["state"] == "ready").then_some(()));
    let before = model();
    assert_eq!(before["files_problem"], Value::Null);
    // Whether the prompt has keys: else nobody can say who holds them.
    let keyed = || {
        let body = json!({"model": "kvlane/demo", "prompt": "a river, a stone and a boat ".repeat(9)});
        let told = client::post(gateway.admin, "/netlox/v1/config/ai/kv/explain?path=/v1/completions", &body).json();
        assert!(told["prompt"]["blocks"].as_u64().is_some_and(|blocks| blocks > 0), "{told}");
    };
    keyed();
    let file = tokenizers.path().join("kvlane__demo/tokenizer.json");
    let whole = std::fs::read(&file).expect("staged");
    std::fs::write(&file, &whole[..whole.len() / 2]).expect("writable");
    let problem = wait_for("it is said", || model()["files_problem"].as_str().map(str::to_owned));
    assert!(problem.contains("tokenizer.json: not a usable tokenizer.json"), "{problem}");
    assert_eq!((&model()["state"], &model()["digest"]), (&before["state"], &before["digest"]));
    let labels = [("model", "kvlane__demo"), ("in_use", "earlier")];
    assert_eq!(gateway.metric("kvlane_model_files_unusable", &labels), Some(1.0));
    assert!(gateway.log().contains("the model stays as it was loaded before"));
    keyed();
    std::fs::write(&file, &whole).expect("writable");
    wait_for("the repaired one is taken up", || (model()["files_problem"] == Value::Null).then_some(()));
    assert_eq!(gateway.metric("kvlane_model_files_unusable", &labels), None);
    keyed();
}
