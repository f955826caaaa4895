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
