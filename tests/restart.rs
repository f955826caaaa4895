//! The gateway is restarted before warm engines: what they hold is not forgotten.

mod common;

use std::net::SocketAddr;
use std::path::PathBuf;

use common::client;
use common::fleet::{self, EngineProcess};
use common::gateway::{Gateway, Options};
use common::{Scratch, free_port, wait_for};
use serde_json::{Value, json};

#[test]
fn engine_process() {
    fleet::run_as_engine();
}

fn prompt(number: usize) -> Value {
    let text =
        format!("Story number {number} about a river, a stone and a boat that nobody had seen before. ").repeat(20);
    json!({"model": "kvlane/demo", "prompt": text, "max_tokens": 1})
}

/// Stands for the rule's port in a configuration.
const PORT: &str = "@PORT@";

/// How a gateway ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// By SIGTERM.
    Told,
    /// By SIGKILL, after its state was written.
    Killed,
}

struct Fleet {
    gateway: Option<Gateway>,
    engines: Vec<EngineProcess>,
    config: String,
    address: SocketAddr,
    state: Scratch,
    _tokenizers: Scratch,
}

impl Fleet {
    /// Two engines behind a rule; without a replay nothing listens at its address.
    fn start(engine: &str, replay: bool) -> Self {
        let no_replay = if replay { "" } else { " --no-replay" };
        let arguments = format!("--time-scale 0 --seed 0{no_replay}{engine}");
        let engines: Vec<_> = (0..2).map(|_| EngineProcess::start(&arguments)).collect();
        let (tokenizers, state) = (fleet::tokenizers(), Scratch::new("state"));
        let rule = fleet::rule(0, &tokenizers, &engines)
            .replace("\nport = 0\n", &format!("\nport = {PORT}\n"))
            .replace("kvBlockSize = 16", "kvBlockSize = 16\nkvColdstartSeedN = 0\nkvSpillRelief = false");
        let config = format!("[state]\ndirectory = \"{}\"\nperiod_ms = 100\n\n{rule}", state.path().display());
        let address = ([127, 0, 0, 1], 0).into();
        let mut fleet = Fleet { gateway: None, engines, config, address, state, _tokenizers: tokenizers };
        fleet.start_gateway();
        fleet
    }

    fn start_gateway(&mut self) {
        // A port of its own for every gateway: the last one's may be in use again, by a connection of some other test.
        let port = free_port();
        self.address.set_port(port);
        let config = self.config.replace(PORT, &port.to_string());
        self.gateway = Some(Gateway::start(Options { config, ..Options::default() }));
        wait_for("both event streams have begun", || {
            self.parity().iter().all(|rank| rank["started"].is_string()).then_some(())
        });
        // The rule names no model: the first request for one asks for its tokenizer.
        self.ask(&json!({"model": "kvlane/demo", "prompt": "short", "max_tokens": 1}));
        wait_for("the tokenizer is loaded", || {
            let status = self.gateway().api("/status/ready").json();
            status["models"].as_array()?.iter().any(|model| model["state"] == "ready").then_some(())
        });
    }

    fn gateway(&self) -> &Gateway {
        self.gateway.as_ref().expect("it runs")
    }

    fn end(&mut self, end: End) {
        let mut gateway = self.gateway.take().expect("it runs");
        match end {
            End::Told => {
                gateway.signal(libc::SIGTERM);
                assert_eq!(gateway.wait().code(), Some(0), "{}", gateway.log());
            }
            End::Killed => drop(gateway),
        }
    }

    fn parity(&self) -> Vec<Value> {
        self.gateway().api("/config/ai/kv/parity").json()["parity"].as_array().expect("a list").clone()
    }

    fn of_both(&self, field: &str) -> Vec<Value> {
        self.parity().into_iter().map(|rank| rank[field].clone()).collect()
    }

    fn sum(&self, field: &str) -> u64 {
        self.of_both(field).iter().filter_map(Value::as_u64).sum()
    }

    fn ask(&self, body: &Value) -> Value {
        let answer = client::post(self.address, "/v1/completions", body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()
    }

    /// Whether a prompt went to an engine that had it, by the engine's word.
    fn hits(&self, number: usize) -> bool {
        let usage = self.ask(&prompt(number))["usage"].clone();
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
        cached + 64 > usage["prompt_tokens"].as_u64().expect("a usage")
    }

    /// The share of these prompts that go where they are held.
    fn share(&self, prompts: impl Iterator<Item = usize>) -> f64 {
        let hits: Vec<_> = prompts.map(|number| f64::from(u8::from(self.hits(number)))).collect();
        hits.iter().sum::<f64>() / hits.len() as f64
    }

    fn knows_all(&self) -> bool {
        let knows = |(index, engine): (usize, &EngineProcess)| {
            self.gateway().inventory(0, index as u32).len() == engine.keys().len()
        };
        self.engines.iter().enumerate().all(knows)
    }

    /// Sends new prompts and waits until the gateway knows, and a file says, what became of them.
    fn warm(&self, prompts: std::ops::Range<usize>) {
        prompts.for_each(|number| _ = self.ask(&prompt(number)));
        wait_for("the gateway knows the engines' blocks", || self.knows_all().then_some(()));
        let writes = || self.gateway().metric_sum("kvlane_kv_state_writes_total");
        // A round under way may hold what was known before: after so many files both ranks had one that began later.
        for number in 0..5 {
            let before = writes();
            self.ask(&prompt(1_000_000 + number));
            wait_for("the state is written", || (writes() > before).then_some(()));
        }
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.state.path()).expect("the directory is there");
        let paths = entries.map(|entry| entry.expect("an entry").path());
        // The rules made over the API have a file of their own.
        paths.filter(|path| path.file_name().is_some_and(|name| name != "rules.json")).collect()
    }

    fn log_says(&self, words: &str) -> bool {
        self.gateway().log().contains(words)
    }
}

#[test]
fn with_a_replay_a_restarted_gateway_is_as_good_as_before() {
    for end in [End::Told, End::Killed] {
        let mut fleet = Fleet::start("", true);
        fleet.warm(0..8);
        assert_eq!(fleet.share(0..8), 1.0);
        fleet.end(end);
        // Meanwhile an engine gets something new, which only its replay tells.
        let missed = client::post(fleet.engines[0].address, "/v1/completions", &prompt(77));
        assert_eq!(missed.status, 200);
        fleet.start_gateway();
        assert_eq!(fleet.of_both("started"), ["restored", "restored"], "{end:?}");
        wait_for("the replay proves it", || (fleet.of_both("degraded") == [false, false]).then_some(()));
        assert_eq!(fleet.share((0..8).chain([77])), 1.0, "{end:?}");
        assert!(fleet.sum("restored") > 0);
        wait_for("all is known", || fleet.knows_all().then_some(()));
    }
}

#[test]
fn without_a_replay_repeated_prompts_go_to_their_holder_all_the_same() {
    for end in [End::Told, End::Killed] {
        let mut fleet = Fleet::start("", false);
        assert!(fleet.log_says("no replay endpoint"));
        fleet.warm(0..8);
        fleet.end(end);
        let missed = client::post(fleet.engines[0].address, "/v1/completions", &prompt(77));
        assert_eq!(missed.status, 200);
        fleet.start_gateway();
        assert_eq!(fleet.of_both("started"), ["restored", "restored"], "{end:?}");
        assert_eq!(fleet.of_both("degraded"), [true, true], "{end:?}");
        assert_eq!(fleet.share(0..8), 1.0, "{end:?}");
        // What was missed is taken in once the engine says that it has it.
        wait_for("the missed prompt goes to its holder", || fleet.hits(77).then_some(()));
        assert!(fleet.hits(77));
    }
}

#[test]
fn files_are_their_owners_alone() {
    use std::os::unix::fs::PermissionsExt as _;
    let fleet = Fleet::start("", false);
    fleet.warm(0..2);
    let files = fleet.files();
    assert!(!files.is_empty());
    for file in files {
        let mode = std::fs::metadata(&file).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{}", file.display());
    }
}

#[test]
fn an_engine_that_was_restarted_meanwhile_has_nothing_of_what_the_file_says() {
    for replay in [true, false] {
        let mut fleet = Fleet::start("", replay);
        // More batches than the new processes send until the gateway listens: fewer would look like a gap.
        fleet.warm(0..80);
        fleet.end(End::Told);
        fleet.engines.iter_mut().for_each(EngineProcess::restart);
        fleet.start_gateway();
        // Its first batch shows it: without a replay that takes a prompt.
        let mut number = 200;
        wait_for("the file's keys are dropped", || {
            number += 1;
            fleet.ask(&prompt(number));
            fleet.knows_all().then_some(())
        });
        assert_eq!(fleet.of_both("degraded"), [false, false]);
        assert!(!fleet.of_both("started").contains(&json!("restored")));
    }
}

#[test]
fn what_an_engine_gave_up_meanwhile_is_withdrawn_after_one_denied_hit() {
    // A cache of so many blocks that it cannot keep all prompts.
    let mut fleet = Fleet::start(" --blocks 200", false);
    fleet.warm(0..2);
    fleet.end(End::Told);
    for engine in &fleet.engines {
        (300..330).for_each(|number| _ = client::post(engine.address, "/v1/completions", &prompt(number)));
        // What it computes again it does not tell: only its usage does.
        let silence = json!({"fault": "silence", "value": true});
        assert_eq!(client::post(engine.address, "/debug/fault", &silence).status, 200);
    }
    fleet.start_gateway();
    assert_eq!(fleet.of_both("degraded"), [true, true]);
    let held = |fleet: &Fleet| (0..2).map(|index| fleet.gateway().inventory(0, index).len()).sum::<usize>();
    let before = held(&fleet);
    assert!(!fleet.hits(0), "the file lies");
    // The first may have come before the gateway looked at answers; each is asked for once, since then it is held.
    let mut others = (1..2).chain(1_000_000..1_000_005);
    wait_for("its keys are withdrawn", || {
        others.next().into_iter().for_each(|number| _ = fleet.ask(&prompt(number)));
        (fleet.sum("withdrawn_by_usage") > 0).then_some(())
    });
    wait_for("nobody is routed by them", || (held(&fleet) < before).then_some(()));
}

#[test]
fn a_damaged_file_is_told_and_costs_no_more_than_itself() {
    let mut fleet = Fleet::start("", false);
    fleet.warm(0..8);
    fleet.end(End::Told);
    let files = fleet.files();
    let file = &files[0];
    let mut bytes = std::fs::read(file).expect("readable");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(file, bytes).expect("writable");
    fleet.start_gateway();
    assert!(fleet.log_says("damaged or truncated"));
    let mut started = fleet.of_both("started");
    started.sort_by_key(Value::to_string);
    assert_eq!(started, ["cold", "restored"]);
    assert!(fleet.log_says("no replay endpoint: cold start"));
    assert!(fleet.files().iter().any(|file| file.extension().is_some_and(|end| end == "damaged")));
}

#[test]
fn what_is_no_file_is_moved_aside_and_holds_nobody_up() {
    let mut fleet = Fleet::start("", false);
    fleet.warm(0..2);
    fleet.end(End::Told);
    for file in fleet.files() {
        std::fs::remove_file(&file).expect("writable");
        let made = std::process::Command::new("mkfifo").arg(&file).status().expect("a program of every system");
        assert!(made.success());
    }
    fleet.start_gateway();
    assert_eq!(fleet.of_both("started"), ["cold", "cold"]);
    assert!(fleet.log_says("it is no file"));
    assert!(fleet.files().iter().all(|file| file.extension().is_some_and(|end| end == "damaged")));
    fleet.end(End::Told);
}

#[test]
fn with_neither_file_nor_replay_blocks_are_taken_in_as_usage_reports_them() {
    let mut fleet = Fleet::start("", false);
    fleet.warm(0..8);
    fleet.end(End::Told);
    fleet.files().iter().for_each(|file| std::fs::remove_file(file).expect("writable"));
    fleet.start_gateway();
    assert_eq!(fleet.of_both("started"), ["cold", "cold"]);
    assert!(
        fleet
            .of_both("start")
            .iter()
            .all(|text| text.as_str().is_some_and(|text| text.contains("no replay endpoint: cold start")))
    );
    (0..8).for_each(|number| wait_for("the prompt goes to a holder", || fleet.hits(number).then_some(())));
    wait_for("some are taken in", || {
        fleet.share(0..8);
        (fleet.sum("adopted_by_usage") > 0).then_some(())
    });
    wait_for("all prompts go to a holder", || (fleet.share(0..8) == 1.0).then_some(()));
}

#[test]
fn derived_keys_go_on_being_translated() {
    let mut fleet = Fleet::start(" --algo xxhash_cbor", false);
    fleet.warm(0..8);
    assert!(fleet.of_both("verdict").contains(&json!("derived")));
    assert_eq!(fleet.share(0..8), 1.0);
    fleet.end(End::Told);
    fleet.start_gateway();
    assert_eq!(fleet.of_both("started"), ["restored", "restored"]);
    assert_eq!(fleet.share(0..8), 1.0);
    // A longer prompt goes on where an old one ends: its parent is an engine key of before.
    let mut longer = prompt(3);
    longer["prompt"] = json!(longer["prompt"].as_str().expect("text").to_owned() + &"And then it rained. ".repeat(20));
    fleet.ask(&longer);
    wait_for("its end is known too", || fleet.knows_all().then_some(()));
    assert_eq!(fleet.sum("orphans"), 0);
}

/// Rules made over the API before two engines without a replay; what they hold is written at the end, or every 100 ms.
struct Rules {
    gateway: Option<Gateway>,
    engines: Vec<EngineProcess>,
    config: String,
    state: Scratch,
    _tokenizers: Scratch,
}

const LB: &str = "/netlox/v1/config/loadbalancer";

impl Rules {
    fn start(period_ms: u32) -> Self {
        let engines: Vec<_> = (0..2).map(|_| EngineProcess::start("--time-scale 0 --seed 0 --no-replay")).collect();
        let (tokenizers, state) = (fleet::tokenizers(), Scratch::new("state"));
        let config = format!(
            "[state]\ndirectory = \"{}\"\nperiod_ms = {period_ms}\n[tokenizers]\ndir = \"{}\"\n",
            state.path().display(),
            tokenizers.path().display()
        );
        let mut rules = Rules { gateway: None, engines, config, state, _tokenizers: tokenizers };
        rules.restart(End::Killed);
        rules
    }

    fn gateway(&self) -> &Gateway {
        self.gateway.as_ref().expect("it runs")
    }

    fn restart(&mut self, end: End) {
        if let Some(mut gateway) = self.gateway.take()
            && end == End::Told
        {
            gateway.signal(libc::SIGTERM);
            gateway.wait();
        }
        self.gateway = Some(Gateway::start(Options { config: self.config.clone(), ..Options::default() }));
    }

    /// A rule over both engines, each with the event port of the one that `events` names.
    fn post(&self, port: u16, events: [usize; 2], block_tokens: u32) {
        let endpoint = |(engine, events): (&EngineProcess, usize)| {
            json!({"endpointIP": "127.0.0.1", "targetPort": engine.address.port(), "weight": 1,
                "kvZmqPort": self.engines[events].event_port})
        };
        let rule = json!({
            "serviceArguments": {"externalIP": "127.0.0.1", "port": port, "mode": 4, "kvExactMode": 3, "kvNoneHashSeed": "0",
                "kvBlockSize": block_tokens, "kvSpillRelief": false, "kvColdstartSeedN": 0, "kvReplayPortOffset": 0,
                "model_name": "kvlane/demo"},
            "endpoints": self.engines.iter().zip(events).map(endpoint).collect::<Vec<_>>(),
        });
        let answer = client::post(self.gateway().admin, LB, &rule);
        assert_eq!(answer.status, 200, "{}", answer.text());
    }

    fn delete(&self, port: u16) {
        let path = format!("{LB}/externalipaddress/127.0.0.1/port/{port}/protocol/tcp?model_name=kvlane/demo");
        let answer = client::call(self.gateway().admin, "DELETE", &path, b"").expect("answered");
        assert_eq!(answer.status, 200, "{}", answer.text());
    }

    /// With what each rank of so many began.
    fn started(&self, ranks: usize) -> Vec<String> {
        wait_for("every stream has begun", || {
            let parity = self.gateway().api("/config/ai/kv/parity").json()["parity"].as_array()?.clone();
            let started: Option<Vec<_>> =
                parity.iter().map(|rank| Some(rank["started"].as_str()?.to_owned())).collect();
            started.filter(|started| started.len() == ranks)
        })
    }

    /// Prompts that go where they are held, by the engine's word.
    fn hits(&self, port: u16, prompts: std::ops::Range<usize>) -> usize {
        let hits = |number: &usize| {
            let answer = client::post(([127, 0, 0, 1], port).into(), "/v1/completions", &prompt(*number));
            assert_eq!(answer.status, 200, "{}", answer.text());
            let usage = &answer.json()["usage"];
            let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
            cached + 64 > usage["prompt_tokens"].as_u64().expect("a usage")
        };
        prompts.filter(hits).count()
    }

    fn knows(&self, service: u32, holders: [usize; 2]) {
        wait_for("the gateway knows the engines' blocks", || {
            let known = |(index, holder): (usize, usize)| {
                self.gateway().inventory(service, index as u32) == self.engines[holder].keys()
            };
            holders.into_iter().enumerate().all(known).then_some(())
        });
    }

    fn ready(&self) {
        wait_for("the tokenizer is loaded", || {
            let status = self.gateway().api("/status/ready").json();
            status["models"].as_array()?.iter().any(|model| model["state"] == "ready").then_some(())
        });
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.state.path()).expect("the directory is there");
        let paths = entries.map(|entry| entry.expect("an entry").path());
        paths.filter(|path| path.extension().is_some_and(|end| end == "state")).collect()
    }
}

#[test]
fn what_one_rule_leaves_another_over_the_same_engines_still_has() {
    // Nothing is written but at the end: what is there after the removal was there before it.
    let mut rules = Rules::start(3_600_000);
    let (first, second, third) = (free_port(), free_port(), free_port());
    [first, second].into_iter().for_each(|port| rules.post(port, [0, 1], 16));
    rules.started(4);
    rules.ready();
    rules.hits(second, 0..8);
    [0, 1].into_iter().for_each(|service| rules.knows(service, [0, 1]));
    rules.restart(End::Told);
    assert_eq!(rules.started(4), ["restored"; 4]);
    assert_eq!(rules.files().len(), 2, "both read the same of the same ranks");
    rules.delete(first);
    // State files are seen to in order: when these ranks have begun, everything before is done.
    rules.post(third, [0, 1], 32);
    rules.started(4);
    rules.delete(third);
    rules.restart(End::Killed);
    assert_eq!(rules.started(2), ["restored"; 2]);
    rules.ready();
    assert_eq!(rules.hits(second, 0..8), 8);
    rules.delete(second);
    wait_for("nobody uses the files", || rules.files().is_empty().then_some(()));
}

#[test]
fn rules_over_one_address_with_different_event_ports_have_files_of_their_own() {
    let mut rules = Rules::start(3_600_000);
    let (first, second) = (free_port(), free_port());
    rules.post(first, [0, 1], 16);
    rules.post(second, [1, 0], 16);
    rules.started(4);
    rules.ready();
    rules.hits(first, 0..8);
    for _ in 0..2 {
        rules.knows(0, [0, 1]);
        rules.knows(1, [1, 0]);
        rules.restart(End::Told);
        assert_eq!((rules.started(4), rules.files().len()), (vec!["restored".to_owned(); 4], 4));
    }
    rules.delete(first);
    wait_for("the first rule's files are gone", || (rules.files().len() == 2).then_some(()));
}

#[test]
fn a_file_that_somebody_removed_is_written_again_and_those_of_an_earlier_release_go() {
    let mut rules = Rules::start(100);
    rules.post(free_port(), [0, 1], 16);
    rules.started(2);
    rules.ready();
    rules.engines.iter().for_each(|engine| _ = client::post(engine.address, "/v1/completions", &prompt(0)));
    rules.knows(0, [0, 1]);
    wait_for("both are written", || (rules.files().len() == 2).then_some(()));
    for file in rules.files() {
        // It may be being written at this moment.
        let _ = std::fs::remove_file(file);
    }
    wait_for("both are written again", || (rules.files().len() == 2).then_some(()));

    let old = rules.state.path().join("kv-0123456789abcdef.state");
    let half = rules.state.path().join(".kv-0123456789abcdef.state.4194305.new");
    [&old, &half].into_iter().for_each(|file| std::fs::write(file, "KVLSTATE").expect("writable"));
    rules.restart(End::Told);
    assert_eq!(rules.started(2), ["restored"; 2]);
    wait_for("it is said", || rules.gateway().log().contains("of an earlier release").then_some(()));
    assert!(!old.exists() && !half.exists());
}

/// Prompts of a fleet, and how often they are asked for.
const PROMPTS: usize = 25;
const REQUESTS: usize = 100;

/// The figures of a restart, for people: `cargo test --workspace --test restart -- --ignored --nocapture figures`.
#[test]
#[ignore = "prints figures"]
fn figures_of_a_restart() {
    println!("share of repeated prompts that go to their holder, first {REQUESTS} requests");
    println!("{:<22}{:<12}{:>8}{:>8}", "replay", "state file", "before", "after");
    for replay in [true, false] {
        for file in [true, false] {
            let mut fleet = Fleet::start("", replay);
            fleet.warm(0..PROMPTS);
            let requests = || (0..REQUESTS).map(|number| number * 7 % PROMPTS);
            let before = fleet.share(requests());
            fleet.end(End::Killed);
            // A tenth of the prompts' number is new to the engines meanwhile.
            for (number, engine) in fleet.engines.iter().enumerate() {
                client::post(engine.address, "/v1/completions", &prompt(500 + number));
            }
            if !file {
                fleet.files().iter().for_each(|file| std::fs::remove_file(file).expect("writable"));
            }
            fleet.start_gateway();
            let after = fleet.share(requests());
            println!("{:<22}{:<12}{:>7.0}%{:>7.0}%", replay, file, 100.0 * before, 100.0 * after);
            assert!(!replay || (before - after).abs() < f64::EPSILON, "with a replay it is the same");
        }
    }
}
