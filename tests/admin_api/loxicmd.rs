//! Both command-line clients of the reference, as a gateway sees them: their requests byte for byte, and what they
//! accept as an answer; and our own command line, which sends the same.

use std::process::{Command, Output};

use crate::common::client::{Answer, Connection};
use crate::common::engines::StubEngine;
use crate::common::gateway::{Gateway, Options};
use crate::common::{client, free_port};
use serde_json::{Value, json};

/// A request as Go's HTTP client writes it.
fn exchange(gateway: &Gateway, method: &str, path: &str, authorization: Option<&str>, body: &str) -> Answer {
    let mut head =
        format!("{method} /netlox/v1{path} HTTP/1.1\r\nHost: {}\r\nUser-Agent: Go-http-client/1.1\r\n", gateway.admin);
    if !body.is_empty() {
        head.push_str(&format!("Content-Length: {}\r\n", body.len()));
    }
    if let Some(value) = authorization {
        head.push_str(&format!("Authorization: {value}\r\n"));
    }
    head.push_str("Content-Type: application/json\r\nAccept-Encoding: gzip\r\n\r\n");
    let mut connection = Connection::open(gateway.admin).expect("connected");
    connection.send(format!("{head}{body}").as_bytes()).expect("sent");
    connection.answer().expect("an answer")
}

/// What a client that insists on status 200 and a `result` takes from an answer.
#[track_caller]
fn result_of(answer: &Answer) -> String {
    assert_eq!(answer.status, 200, "the client takes nothing else: {}", answer.text());
    answer.json()["result"].as_str().expect("the client prints `result`").to_owned()
}

#[test]
fn the_classic_client_creates_lists_attaches_and_deletes() {
    let gateway = Gateway::start(Options::default());
    let (one, two) = (StubEngine::start(), StubEngine::start());
    let port = free_port();
    // An empty Authorization header is always there.
    let ask = |method: &str, path: &str, body: &str| exchange(&gateway, method, path, Some(""), body);
    let body = |oper: &str, engine: &StubEngine| {
        format!(
            r#"{{"serviceArguments":{{"externalIP":"127.0.0.1","port":{port},"protocol":"tcp","sel":0,"mode":4,"BGP":false,"Monitor":false,"inactiveTimeOut":0,"block":0,{oper}"proxyprotocolv2":false,"egress":false}},"secondaryIPs":null,"allowedSources":null,"endpoints":[{{"endpointIP":"127.0.0.1","targetPort":{},"weight":1,"state":"","counter":""}}]}}"#,
            engine.address.port()
        )
    };
    assert_eq!(result_of(&ask("POST", "/config/loadbalancer", &body("", &one))), "Success");
    assert_eq!(result_of(&ask("POST", "/config/loadbalancer", &body(r#""oper":1,"#, &two))), "Success");
    let listed = ask("GET", "/config/loadbalancer/all", "");
    assert_eq!(listed.status, 200);
    assert_eq!(listed.json()["lbAttr"][0]["endpoints"].as_array().map(Vec::len), Some(2));
    assert_eq!(result_of(&ask("POST", "/config/loadbalancer", &body(r#""oper":2,"#, &one))), "Success");
    assert_eq!(client::get(([127, 0, 0, 1], port).into(), "/anything").status, 200);
    let refused = ask("POST", "/config/loadbalancer", &body("", &two));
    assert_eq!(refused.status, 409);
    assert!(refused.json()["message"].is_string(), "the client prints `message`");
    let path = format!(
        "/config/loadbalancer/hosturl/any/externalipaddress/127.0.0.1/port/{port}/portmax/0/protocol/tcp?bgp=false&block=0"
    );
    assert_eq!(result_of(&ask("DELETE", &path, "")), "Success");
    assert_eq!(ask("GET", "/config/loadbalancer/all", "").json(), json!({"lbAttr": []}));
    assert_eq!(result_of(&ask("DELETE", "/config/loadbalancer/name/nobody", "")), "Success");
}

#[test]
fn the_inference_client_sends_its_own_members_and_no_empty_header() {
    let gateway = Gateway::start(Options::default());
    let port = free_port();
    let ask = |method: &str, path: &str, body: &str| exchange(&gateway, method, path, None, body);
    let body = format!(
        r#"{{"serviceArguments":{{"externalIP":"127.0.0.1","port":{port},"protocol":"tcp","sel":0,"mode":4,"BGP":false,"Monitor":false,"inactiveTimeOut":0,"block":0,"proxyprotocolv2":false,"egress":false,"kvExactMode":3,"kvEngineType":"sglang","kvDpRankCount":3,"kvZmqPort":5561,"kvWarmupSec":30,"kvBlockSize":16}},"secondaryIPs":null,"allowedSources":null,"endpoints":[{{"endpointIP":"127.0.0.1","targetPort":8080,"weight":1,"state":"","counter":""}},{{"endpointIP":"127.0.0.2","targetPort":8080,"weight":1,"state":"","counter":""}}]}}"#
    );
    assert_eq!(result_of(&ask("POST", "/config/loadbalancer", &body)), "Success");
    let listed = ask("GET", "/config/loadbalancer/all", "").json();
    let service = &listed["lbAttr"][0]["serviceArguments"];
    assert_eq!((&service["kvExactMode"], &service["kvDpRankCount"]), (&json!(3), &json!(3)));
    let path = format!(
        "/config/loadbalancer/hosturl/any/externalipaddress/127.0.0.1/port/{port}/portmax/0/protocol/tcp?bgp=false&block=0&model_name="
    );
    assert_eq!(result_of(&ask("DELETE", &path, "")), "Success");
}

fn kvlane(gateway: &Gateway, arguments: &[&str]) -> Output {
    let port = gateway.admin.port().to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvlane"));
    command.args(arguments).args(["--apiserver", "127.0.0.1", "--port", &port]).output().expect("the binary was built")
}

/// What a command prints that must go right.
#[track_caller]
fn right(gateway: &Gateway, arguments: &[&str]) -> String {
    let output = kvlane(gateway, arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[track_caller]
fn wrong(gateway: &Gateway, code: i32, arguments: &[&str]) -> String {
    let output = kvlane(gateway, arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
    said
}

#[test]
fn the_documented_command_lines_make_their_rules() {
    let gateway = Gateway::start(Options::default());
    let (pd, single) = (free_port(), free_port());
    let tcp = [format!("--tcp={pd}:8080"), format!("--tcp={single}:8080")];
    right(
        &gateway,
        &[
            "create",
            "lb",
            "127.0.0.1",
            &tcp[0],
            "--endpoints=127.0.0.1:1,127.0.0.2:1,127.0.0.3:1,127.0.0.4:1,127.0.0.5:1,127.0.0.6:1",
            "--mode=fullproxy",
            "--pd-disagg",
            "--kv-exact-mode=1",
            "--kv-zmq-port=5557",
            "--kv-hash-algo=sha256_cbor",
            "--kv-warmup=30",
            "--kv-block-size=16",
            "--ep-role=prefill,decode,prefill,decode,prefill,decode",
        ],
    );
    right(
        &gateway,
        &[
            "create",
            "lb",
            "127.0.0.1",
            &tcp[1],
            "--endpoints=127.0.0.1:1,127.0.0.2:1,127.0.0.3:1",
            "--mode=fullproxy",
            "--kv-exact-mode=3",
            "--kv-engine-type=sglang",
            "--kv-dp-ranks=3",
            "--kv-zmq-port=5561",
            "--kv-warmup=30",
            "--kv-block-size=16",
        ],
    );
    let shown: Value = serde_json::from_str(&right(&gateway, &["get", "lb", "-o", "json"])).expect("JSON");
    let rules = shown["lbAttr"].as_array().expect("a list");
    let roles: Vec<&Value> = rules[0]["endpoints"].as_array().expect("a list").iter().map(|e| &e["ep_role"]).collect();
    assert_eq!(roles, [1, 2, 1, 2, 1, 2]);
    assert_eq!(rules[1]["serviceArguments"]["kvEngineType"], "sglang");

    let table = right(&gateway, &["get", "lb"]);
    for column in ["EXT IP", "PORT", "PROTO", "NAME", "MARK", "SEL", "MODE", "# OF ENDPOINTS", "TIMEOUT", "MONITOR"] {
        assert!(table.lines().next().is_some_and(|head| head.contains(column)), "{table} lacks {column}");
    }
    assert_eq!(right(&gateway, &["get", "lb", "-o", "wide"]).lines().count(), 2 + 9, "a line per endpoint");
    let inventory = right(&gateway, &["get", "kvinventory", "--service-id", "0", "--ep-idx", "0"]);
    assert!(inventory.starts_with("service_id: 0, ep_idx: 0, hash_algo: sha256_cbor, total: 0"), "{inventory}");
    assert!(wrong(&gateway, 7, &["get", "kvinventory", "--service-id", "0", "--ep-idx", "1"]).contains("not found"));
    assert!(right(&gateway, &["get", "ep"]).contains("127.0.0.6"));
    right(&gateway, &["delete", "lb", "127.0.0.1", &format!("--tcp={pd}")]);
    assert!(wrong(&gateway, 7, &["delete", "lb", "127.0.0.1", &format!("--tcp={pd}")]).contains("no-rule"));
}

#[test]
fn commands_end_with_codes_that_tell_what_is_wrong() {
    let gateway = Gateway::start(Options::default());
    let lb = ["create", "lb", "127.0.0.1"];
    for (more, text) in [
        (vec!["--endpoints=127.0.0.1:1"], "give a port"),
        (vec!["--tcp=8080:1"], "give endpoints"),
        (vec!["--tcp=x:1", "--endpoints=127.0.0.1:1"], "--tcp x:1"),
        (vec!["--tcp=1:1", "--endpoints=127.0.0.1:1", "--kv-exact-mode=3"], "needs --mode=fullproxy"),
        (
            vec!["--tcp=1:1", "--endpoints=127.0.0.1:1", "--mode=fullproxy", "--kv-exact-mode=1"],
            "--kv-exact-mode=1 needs --pd-disagg",
        ),
        (
            vec!["--tcp=1:1", "--endpoints=127.0.0.1:1", "--mode=fullproxy", "--pd-disagg", "--kv-exact-mode=3"],
            "--kv-exact-mode=3 excludes --pd-disagg",
        ),
        (
            vec!["--tcp=1:1", "--endpoints=127.0.0.1:1", "--mode=fullproxy", "--kv-zmq-port=65535", "--kv-dp-ranks=2"],
            "beyond 65535",
        ),
        (
            vec!["--tcp=1:1", "--endpoints=127.0.0.1:1", "--mode=fullproxy", "--ep-role=prefill,decode"],
            "--ep-role names 2, and there are 1 endpoints",
        ),
    ] {
        let said = wrong(&gateway, 2, &[&lb[..], &more].concat());
        assert!(said.contains(text), "{said} lacks {text:?}");
    }
    let refused = [&lb[..], &["--tcp=8080:1", "--endpoints=127.0.0.1:1", "--mode=dsr"]].concat();
    assert!(wrong(&gateway, 7, &refused).contains("mode must be 4"));
    wrong(&gateway, 7, &["get", "ready"]);
    let nobody = free_port().to_string();
    let output = Command::new(env!("CARGO_BIN_EXE_kvlane")).args(["get", "lb", "--port", &nobody]).output();
    assert_eq!(output.expect("the binary was built").status.code(), Some(5));
}

#[test]
fn what_is_saved_can_be_applied_again() {
    let gateway = Gateway::start(Options::default());
    let port = free_port();
    right(
        &gateway,
        &[
            "create",
            "lb",
            "127.0.0.1",
            &format!("--tcp={port}:8080"),
            "--endpoints=127.0.0.1:1,127.0.0.2:2",
            "--mode=fullproxy",
            "--kv-exact-mode=3",
            "--name=saved",
        ],
    );
    let scratch = crate::common::Scratch::new("saved");
    let file = scratch.path().join("rules.json");
    let file = file.to_str().expect("text");
    right(&gateway, &["save", "--all", "-f", file]);
    assert!(right(&gateway, &["apply", "-f", file]).contains("unchanged"));
    right(&gateway, &["delete", "lb", "--name", "saved"]);
    assert!(right(&gateway, &["apply", "-f", file]).contains("in force"));
    let shown: Value = serde_json::from_str(&right(&gateway, &["get", "lb", "-o", "json"])).expect("JSON");
    assert_eq!(shown["lbAttr"][0]["endpoints"][1]["weight"], 2);
}

/// A rule of the configuration file and two of the API; the file where they are saved.
fn saved_of_a_gateway_with_rules_of_both_kinds(seed: &str, scratch: &crate::common::Scratch) -> (Gateway, String) {
    let config = format!(
        "[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {}\nkvExactMode = 3\nname = \"declared\"\n\n\
         [[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = 1\n",
        free_port()
    );
    let environment = vec![("LLB_KV_NONE_HASH_SEED", seed.to_owned())];
    let gateway = Gateway::start(Options { config, environment, ..Options::default() });
    for ip in ["127.0.0.1", "::1"] {
        let tcp = format!("--tcp={}:8080", free_port());
        let rule = ["--endpoints=127.0.0.1:1", "--mode=fullproxy", "--kv-exact-mode=3", "--name=saved"];
        right(&gateway, &[&["create", "lb", ip, &tcp], &rule[..]].concat());
    }
    let file = scratch.path().join("rules.json").to_str().expect("text").to_owned();
    let said = right(&gateway, &["save", "-f", &file]);
    assert!(said.contains("2 rules saved") && said.contains("left out: 1 rule of the configuration file"), "{said}");
    (gateway, file)
}

#[test]
fn rules_of_the_configuration_file_are_left_out_and_what_is_in_force_is_unchanged() {
    let scratch = crate::common::Scratch::new("saved");
    let (gateway, file) = saved_of_a_gateway_with_rules_of_both_kinds("42", &scratch);
    let said = right(&gateway, &["apply", "-f", &file]);
    assert_eq!(said.matches("unchanged").count(), 2, "{said}");
    assert!(said.contains("[::1]:"), "addresses of IPv6 stand in brackets: {said}");
    let text = std::fs::read_to_string(&file).expect("saved");
    assert!(!text.contains("kvNoneHashSeed") && !text.contains("42\""), "only what was stated is saved: {text}");

    // What the reference's clients print has the file's rule as well, which is in force as it stands there.
    let shown = right(&gateway, &["get", "lb", "-o", "json"]);
    std::fs::write(&file, &shown).expect("writable");
    assert_eq!(right(&gateway, &["apply", "-f", &file]).matches("unchanged").count(), 3);
    let changed: String = shown.replace("\"weight\": 1", "\"weight\": 2");
    std::fs::write(&file, changed).expect("writable");
    let said = wrong(&gateway, 8, &["apply", "-f", &file]);
    assert!(said.contains("the rule is the configuration file's") && said.matches("in force").count() == 2, "{said}");
}

#[test]
fn what_is_saved_makes_the_same_rules_on_another_gateway() {
    let scratch = crate::common::Scratch::new("saved");
    let (gateway, file) = saved_of_a_gateway_with_rules_of_both_kinds("42", &scratch);
    let ids = |gateway: &Gateway| {
        let rules = gateway.api("/config/snapshot").json();
        let rules = rules["lbAttr"].as_array().expect("a list");
        rules.iter().map(|rule| rule["serviceArguments"]["id"].clone()).collect::<Vec<_>>()
    };
    let before = ids(&gateway);
    drop(gateway);
    let empty = Gateway::start(Options::default());
    assert_eq!(right(&empty, &["apply", "-f", &file]).matches("in force").count(), 2);
    assert_eq!(ids(&empty), before);
    // On a third gateway that has one of them under another id it keeps that.
    right(&empty, &["delete", "lb", "--name", "saved"]);
    let one: Value = serde_json::from_str(&std::fs::read_to_string(&file).expect("saved")).expect("JSON");
    let mut one = one["lbAttr"][0].clone();
    one["serviceArguments"].as_object_mut().expect("an object").remove("id");
    one["endpoints"][0]["weight"] = json!(7);
    let other = scratch.path().join("one.json");
    std::fs::write(&other, one.to_string()).expect("writable");
    right(&empty, &["apply", "-f", other.to_str().expect("text")]);
    let kept = ids(&empty);
    assert_eq!(right(&empty, &["apply", "-f", &file]).matches("in force").count(), 2);
    assert_eq!(ids(&empty)[0], kept[0]);
    assert_ne!(kept[0], before[0]);
}

#[test]
fn a_file_that_apply_cannot_take_is_told_with_what_to_do() {
    let scratch = crate::common::Scratch::new("apply");
    let gateway = Gateway::start(Options::default());
    for (text, expected) in [
        ("[admin]\nlisten = \"127.0.0.1:1\"\n", "kvlane serve -c"),
        ("what", "kvlane save"),
        ("{}", "neither a list lbAttr nor a rule"),
    ] {
        let file = scratch.path().join("rules");
        std::fs::write(&file, text).expect("writable");
        let said = wrong(&gateway, 2, &["apply", "-f", file.to_str().expect("text")]);
        assert!(said.contains(expected), "{text:?}: {said}");
    }
}

#[test]
fn whoever_makes_a_rule_is_told_where_it_ends_with_the_process() {
    let state = crate::common::Scratch::new("kept");
    let config = format!("[state]\ndirectory = \"{}\"\n", state.path().display());
    for (config, is_told) in [(String::new(), true), (config, false)] {
        let gateway = Gateway::start(Options { config, ..Options::default() });
        let tcp = format!("--tcp={}:8080", free_port());
        let output =
            kvlane(&gateway, &["create", "lb", "127.0.0.1", &tcp, "--endpoints=127.0.0.1:1", "--mode=fullproxy"]);
        let said = String::from_utf8_lossy(&output.stderr);
        let told = said.contains("end with the process: name a [state] directory");
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "Success");
        let ready = &gateway.api("/status/ready").json()["rules_kept"]["warning"];
        assert_eq!((told, ready.is_string()), (is_told, is_told), "{said} {ready}");
    }
}

#[test]
fn completions_and_the_man_page_name_the_commands() {
    let of = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_kvlane")).args(arguments).output().expect("the binary was built");
        assert!(output.status.success());
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    for shell in ["bash", "zsh", "fish"] {
        let text = of(&["completions", shell]);
        assert!(text.contains("kv-exact-mode") && text.contains("kvinventory"), "{shell}");
    }
    assert!(of(&["man"]).contains(".TH kvlane"));
    assert!(of(&["man", "create", "lb"]).contains("kv\\-dp\\-ranks"));
    let output = Command::new(env!("CARGO_BIN_EXE_kvlane")).args(["man", "nothing"]).output();
    assert_eq!(output.expect("the binary was built").status.code(), Some(2));

    let scratch = crate::common::Scratch::new("man");
    of(&["man", "--directory", scratch.path().to_str().expect("text")]);
    for (page, says) in [
        ("kvlane", "kvlane\\-create(1)"),
        ("kvlane-serve", "Configuration file"),
        ("kvlane-create-lb", "kv\\-exact\\-mode"),
        ("kvlane-get-kvinventory", "ep\\-idx"),
        ("kvlane-delete-lb", "path\\-prefix"),
        ("kvlane-doctor", "token\\-file"),
    ] {
        let text = std::fs::read_to_string(scratch.path().join(format!("{page}.1"))).expect("every command has a page");
        assert!(text.contains(says), "{page} lacks {says:?}: {text}");
    }
}
