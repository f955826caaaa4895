//! `kvlane doctor` and `kvlane events` against simulated engines; the diagnoses of faulty ones are in `parity.rs`.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};

use common::client;
use common::engines::{Persona, StubEngine};
use common::fleet::{self, EngineProcess};
use common::gateway::{Diagnosis, Gateway, Options};
use common::{Scratch, free_port, required, shared_dir, wait_for};
use serde_json::{Value, json};

#[test]
fn engine_process() {
    fleet::run_as_engine();
}

/// A configuration file in a directory of its own.
fn config(text: &str) -> (Scratch, String) {
    let scratch = Scratch::new("doctor");
    let path = scratch.path().join("kvlane.toml");
    std::fs::write(&path, text).expect("the scratch directory is writable");
    let path = path.to_str().expect("a text").to_owned();
    (scratch, path)
}

#[test]
fn a_cold_fleet_is_right_and_a_probe_proves_every_leg() {
    let engines = [EngineProcess::start("--time-scale 0"), EngineProcess::start("--time-scale 0 --no-replay")];
    let tokenizers = fleet::tokenizers();
    let (_scratch, path) = config(&fleet::rule(free_port(), &tokenizers, &engines));

    let idle = Diagnosis::of(&["-c", &path, "--wait", "1"]);
    assert_eq!((idle.code, idle.wrong()), (Some(0), vec![]), "{:#}", idle.report);
    let unknown = idle.lines("unknown");
    let is = |check: &str, word: &str| unknown.iter().any(|(name, says, _)| name == check && says.contains(word));
    assert!(is("keys", "no first block") && is("replay", "no replay endpoint: cold start"), "{unknown:?}");
    let right: Vec<String> = idle.lines("right").into_iter().map(|(check, ..)| check).collect();
    for check in ["reach", "version", "model", "tokenizer", "tokens", "template", "block_size", "algorithm", "replay"] {
        assert!(right.iter().any(|name| name == check), "{check} in {right:?}");
    }
    let generated = |engine: &EngineProcess| client::get(engine.address, "/debug/last").json();
    assert!(engines.iter().all(|engine| generated(engine).is_null()), "nothing was generated");

    let probed = Diagnosis::of(&["-c", &path, "--probe"]);
    assert_eq!((probed.code, probed.wrong()), (Some(0), vec![]), "{:#}", probed.report);
    let right: Vec<String> = probed.lines("right").into_iter().map(|(check, ..)| check).collect();
    for check in ["probe", "events", "seed", "keys", "by_use"] {
        assert_eq!(right.iter().filter(|name| *name == check).count(), 2, "{check} in {right:?}");
    }
    assert!(engines.iter().all(|engine| generated(engine)["path"] == "/v1/chat/completions"));
}

#[test]
fn what_cannot_be_reached_or_refuses_the_token_is_named_with_its_fix() {
    let persona = Persona { token: Some("right"), ..Persona::default() };
    let locked = StubEngine::start_as(persona);
    let scratch = Scratch::new("token");
    let token = scratch.path().join("token");
    std::fs::write(&token, "wrong").expect("writable");
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).expect("it is ours");
    let nobody = free_port();
    let (_scratch, path) = config(&format!(
        "[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {}\nprotocol = \"tcp\"\nkvExactMode = 3\nengineTokenFile = \"{}\"\n\n\
         [[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = {}\nweight = 1\n\n\
         [[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = {nobody}\nweight = 1\nkvZmqPort = {}\n",
        free_port(),
        token.display(),
        locked.address.port(),
        free_port(),
    ));
    let found = Diagnosis::of(&["-c", &path, "--wait", "1"]);
    assert_eq!(
        (found.code, found.wrong()),
        (Some(1), vec!["access".to_owned(), "reach".to_owned()]),
        "{:#}",
        found.report
    );
    let wrong = found.lines("wrong");
    assert!(wrong.iter().any(|(_, says, fix)| says.contains("401") && fix.contains("engineTokenFile")), "{wrong:?}");
    assert!(wrong.iter().any(|(_, says, fix)| says.contains(&nobody.to_string()) && fix.contains("start the engine")));
    assert!(!found.report.to_string().contains("\"wrong token\""));
}

#[test]
fn wrong_commands_are_usage() {
    for arguments in
        [&["doctor"][..], &["doctor", "-c", "/nonexistent.toml"], &["doctor", "--url", "nonsense"], &["events"]]
    {
        assert_eq!(kvlane(arguments).status.code(), Some(2), "{arguments:?}");
    }
    let unreachable = format!("http://127.0.0.1:{}", free_port());
    assert_eq!(kvlane(&["doctor", "--url", &unreachable]).status.code(), Some(1));
}

#[test]
fn gateways_of_a_pair_are_compared_without_telling_the_seed() {
    let engine = [EngineProcess::start("--time-scale 0")];
    let (tokenizers, others) = (fleet::tokenizers(), fleet::tokenizers());
    let port = free_port();
    let rule = fleet::rule(port, &tokenizers, &engine);
    let gateway = Gateway::start(Options { config: rule.clone(), ..Options::default() });
    wait_for("the engine's tokenizer is loaded", || {
        let models = gateway.api("/config/ai/kv/models").json();
        models["models"].as_array()?.iter().any(|model| model["state"] == "ready").then_some(())
    });
    let compared = |text: &str| {
        let (_scratch, path) = config(text);
        let found = Diagnosis::of(&["-c", &path, "--wait", "1", "--peer", &gateway.url()]);
        let of_peer = |line: &&Value| line["subject"].as_str().is_some_and(|subject| subject.starts_with("peer"));
        let checks = found.report["checks"].as_array().expect("a list");
        let wrong = checks.iter().filter(of_peer).filter(|line| line["mark"] == "wrong");
        wrong.map(|line| line["check"].as_str().expect("a text").to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(compared(&rule), Vec::<String>::new());
    assert_eq!(compared(&rule.replace("kvNoneHashSeed = \"0\"", "kvNoneHashSeed = \"1\"")), ["seed"]);
    assert_eq!(compared(&rule.replace("kvBlockSize = 16", "kvBlockSize = 32")), ["block_size"]);
    assert_eq!(compared(&rule.replace("\"sha256_cbor\"", "\"xxhash_cbor\"")), ["algorithm"]);
    let file = others.path().join("kvlane__demo/tokenizer_config.json");
    let text = std::fs::read_to_string(&file).expect("staged");
    std::fs::write(&file, text + " ").expect("writable");
    let (here, there) = (tokenizers.path().display().to_string(), others.path().display().to_string());
    assert_eq!(compared(&rule.replace(&here, &there)), ["tokenizer"]);

    assert_eq!(gateway.api("/config/ai/kv/contract").status, 400, "without a nonce there is no seal");
    let nonce = "5a".repeat(32);
    let answer = gateway.api(&format!("/config/ai/kv/contract?nonce={nonce}")).json();
    let other = gateway.api(&format!("/config/ai/kv/contract?nonce={}", "5b".repeat(32))).json();
    let seal = |answer: &Value| answer["rules"][0]["seed_seal"].as_str().expect("a seal").to_owned();
    assert_eq!(seal(&answer).len(), 64);
    assert_ne!(seal(&answer), seal(&other), "a seal is of no use for another nonce");
}

/// Runs the binary to its end.
fn kvlane(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvlane"));
    command.args(arguments).stdin(Stdio::null()).output().expect("the binary was built for this test")
}

fn lines(output: &Output) -> Vec<Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().map(|line| serde_json::from_str(line).expect("a JSON object a line")).collect()
}

fn ask(engine: &EngineProcess, number: u32) {
    let prompt = format!("Story number {number} about a river, a stone and a boat. ").repeat(10);
    let body = json!({"model": "kvlane/demo", "prompt": prompt, "max_tokens": 1});
    assert_eq!(client::post(engine.address, "/v1/completions", &body).status, 200);
}

/// Keys in the stores of these lines, sorted.
fn stored(lines: &[Value]) -> Vec<u64> {
    let events = lines.iter().flat_map(|line| line["events"].as_array().expect("a list"));
    let stores = events.filter(|event| event["type"] == "BlockStored");
    let keys = stores.flat_map(|event| event["keys"].as_array().expect("a list"));
    let mut keys: Vec<u64> = keys.map(|key| key["u64"].as_str().expect("digits").parse().expect("a number")).collect();
    keys.sort_unstable();
    keys
}

#[test]
fn events_of_a_live_engine_and_its_replay_are_printed_with_its_own_keys() {
    for kind in ["vllm --bytes-hashes", "sglang --topic kv-events"] {
        let engine = EngineProcess::start(&format!("--time-scale 0 --kind {kind}"));
        (0..3).for_each(|number| ask(&engine, number));
        let connect = format!("tcp://127.0.0.1:{}", engine.event_port);
        let replay = format!("tcp://127.0.0.1:{}", engine.replay_port);
        let name = kind.split(' ').next().expect("a kind");
        let batches = engine.stat("batches").to_string();
        let arguments = ["events", "--connect", &connect, "--replay", &replay, "--engine", name, "--count", &batches];
        let output = kvlane(&arguments);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let lines = lines(&output);
        let sequence: Vec<u64> = lines.iter().map(|line| line["seq"].as_u64().expect("a number")).collect();
        assert_eq!(sequence, (0..lines.len() as u64).collect::<Vec<_>>());
        assert!(lines.iter().all(|line| line["replayed"] == true && line["time"].is_f64()), "{lines:?}");
        assert_eq!(stored(&lines), engine.keys(), "{kind}");
    }
}

#[test]
fn live_events_are_filtered_by_topic_and_nothing_is_an_outcome() {
    let engine = EngineProcess::start("--time-scale 0 --topic kv-events");
    let connect = format!("tcp://127.0.0.1:{}", engine.event_port);
    let tail = |topic: &str, wait: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvlane"));
        command.args(["events", "--connect", &connect, "--topic", topic, "--count", "1", "--wait", wait]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary was built")
    };
    let mut matching = tail("kv-", "30");
    let mut number = 0;
    wait_for("a message is printed", || {
        ask(&engine, number);
        number += 1;
        matching.try_wait().expect("the child is ours")
    });
    let output = matching.wait_with_output().expect("the child is ours");
    assert_eq!(lines(&output)[0]["topic"], "kv-events");
    assert_eq!(
        tail("other", "1").wait_with_output().expect("the child is ours").status.code(),
        Some(1),
        "nothing came"
    );
}

#[test]
fn recordings_and_raw_payloads_are_read_from_files() {
    let scratch = Scratch::new("events");
    let file = scratch.path().join("payload");
    std::fs::write(&file, [0x92, 0x01, 0x92, 0x91, 0xb0]).expect("writable");
    let payload = ["events", "--file", file.to_str().expect("a text")];
    assert_eq!(lines(&kvlane(&payload)), [json!({"time": 1.0, "events": [{"rejected": "framing", "bytes": "91b0"}]})]);
    let test = "recordings_are_read";
    let Some(path) = required(test, shared_dir().join("recordings/vllm_short_sha256_cbor_bytes.json")) else { return };
    let output = kvlane(&["events", "--file", path.to_str().expect("a text")]);
    let lines = lines(&output);
    let recording: Value = serde_json::from_slice(&std::fs::read(&path).expect("readable")).expect("JSON");
    let steps = recording["steps"].as_array().expect("a list");
    let decoded: Vec<&Value> = steps.iter().flat_map(|step| step["decoded"].as_array().into_iter().flatten()).collect();
    assert_eq!(lines.len(), decoded.len());
    for (line, decoded) in lines.iter().zip(decoded) {
        let (shown, known) = (&line["events"][0], &decoded["batch"][1][0]);
        assert_eq!((&shown["type"], &shown["block_size"]), (&known["type"], &known["block_size"]));
        if known["type"] == "BlockStored" {
            assert_eq!(
                (&shown["tokens"], &shown["keys"][0]["digest"]),
                (&known["token_ids"], &known["block_hashes"][0]["$hex"])
            );
        }
    }
}

#[test]
fn a_drain_is_refused_unless_it_is_owned() {
    let engine = EngineProcess::start("--time-scale 0 --kind trtllm");
    ask(&engine, 0);
    let url = format!("http://{}", engine.address);
    let refused = kvlane(&["events", "--connect", &url, "--engine", "trtllm", "--count", "1"]);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2));
    assert!(why.contains("--i-own-this-drain") && why.contains("gives each event once"), "{why}");
    assert_eq!(engine.stat("drains"), 0);
    let drained = kvlane(&["events", "--connect", &url, "--engine", "trtllm", "--count", "1", "--i-own-this-drain"]);
    let lines = lines(&drained);
    assert!(lines.iter().any(|line| line["type"] == "stored"), "{lines:?}");
}
