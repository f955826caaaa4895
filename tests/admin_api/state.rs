//! Rules that outlive the process, and the configuration file taken up while it runs.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::common::engines::StubEngine;
use crate::common::gateway::{Gateway, Options};
use crate::common::{Scratch, client, free_port, wait_for};
use serde_json::{Value, json};

const LB: &str = "/netlox/v1/config/loadbalancer";

fn start(state: &Scratch, more: &str) -> Gateway {
    let config = format!("[state]\ndirectory = \"{}\"\n\n{more}", state.path().display());
    Gateway::start(Options { config, ..Options::default() })
}

/// A loopback address of this process alone: its ports are free whatever others do, also while no gateway runs.
fn ip() -> String {
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    format!("127.{}.{middle}.{low}", 128 + (high & 63))
}

fn body(port: u16, weight: u32) -> Value {
    json!({"serviceArguments": {"externalIP": ip(), "port": port, "mode": 4, "name": format!("rule {port}")},
        "endpoints": [{"endpointIP": "127.0.0.1", "targetPort": 9, "weight": weight}]})
}

fn delete_path(port: u16) -> String {
    format!("{LB}/externalipaddress/{}/port/{port}/protocol/tcp", ip())
}

fn rules(gateway: &Gateway) -> Vec<Value> {
    gateway.api("/config/loadbalancer/all").json()["lbAttr"].as_array().expect("a list").clone()
}

/// Number, id and port of every rule.
fn told(gateway: &Gateway) -> Vec<(Value, Value, Value)> {
    let of = |rule: &Value| {
        let service = &rule["serviceArguments"];
        (service["service_id"].clone(), service["id"].clone(), service["port"].clone())
    };
    rules(gateway).iter().map(of).collect()
}

/// Weights by port: what the storm changes.
fn weights(gateway: &Gateway) -> BTreeMap<u16, u64> {
    let weight = |rule: &Value| {
        let port = rule["serviceArguments"]["port"].as_u64().and_then(|port| u16::try_from(port).ok()).expect("a port");
        (port, rule["endpoints"][0]["weight"].as_u64().expect("a weight"))
    };
    rules(gateway).iter().map(weight).collect()
}

/// A small generator; the seed is printed with every failure.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Changes rules until the gateway is killed; what was acknowledged is in `acknowledged` then, and what came of the one
/// change that was not is returned.
fn storm(
    gateway: &Gateway,
    chance: &mut Chance,
    ports: &[u16],
    acknowledged: &mut BTreeMap<u16, u64>,
) -> BTreeMap<u16, u64> {
    loop {
        let port = ports[chance.below(ports.len() as u64) as usize];
        let mut next = acknowledged.clone();
        let asked = if next.contains_key(&port) && chance.below(3) == 0 {
            next.remove(&port);
            client::call(gateway.admin, "DELETE", &delete_path(port), b"")
        } else {
            let weight = 1 + chance.below(60_000);
            next.insert(port, weight);
            client::call(gateway.admin, "POST", LB, body(port, weight as u32).to_string().as_bytes())
        };
        match asked {
            Ok(answer) if answer.status == 200 => *acknowledged = next,
            // The same weight again, or a shard that was too busy to confirm in time: nothing was changed.
            Ok(answer) if matches!(answer.status, 409 | 503) => {}
            Ok(answer) => panic!("{}: {}", answer.status, answer.text()),
            Err(_) => return next,
        }
    }
}

/// `KVLANE_KILLS` rounds (200 by hand), each killed at a random instant.
#[test]
fn rules_are_those_last_acknowledged_or_one_change_more_after_a_kill_at_any_instant() {
    let rounds = std::env::var("KVLANE_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(6);
    let seed = u64::from(std::process::id());
    let mut chance = Chance(seed);
    let state = Scratch::new("state");
    let ports: Vec<u16> = (0..4).map(|_| free_port()).collect();
    let mut acknowledged = BTreeMap::new();
    let mut pending = acknowledged.clone();
    for round in 0..rounds {
        let mut gateway = start(&state, "");
        let found = weights(&gateway);
        assert!(
            found == acknowledged || found == pending,
            "seed {seed}, round {round}: {found:?} is neither {acknowledged:?} nor {pending:?}\n{}",
            gateway.log()
        );
        acknowledged = found;
        let instant = Duration::from_micros(chance.below(60_000));
        let pid = gateway.pid();
        let killer = std::thread::spawn(move || {
            std::thread::sleep(instant);
            // SAFETY: kill(2) with the number of our own child, which is reaped only after this thread is joined.
            unsafe { libc::kill(pid as i32, libc::SIGKILL) };
        });
        pending = storm(&gateway, &mut chance, &ports, &mut acknowledged);
        killer.join().expect("it only kills");
        gateway.wait();
    }
}

#[test]
fn numbers_and_ids_stay_over_a_restart_and_are_not_used_again() {
    let state = Scratch::new("state");
    let ports = [free_port(), free_port(), free_port()];
    let before = {
        let gateway = start(&state, "");
        for port in ports {
            assert_eq!(client::post(gateway.admin, LB, &body(port, 1)).status, 200);
        }
        assert_eq!(client::call(gateway.admin, "DELETE", &delete_path(ports[0]), b"").expect("answered").status, 200);
        assert_eq!(client::post(gateway.admin, "/netlox/v1/config/persist", &json!({})).status, 200);
        told(&gateway)
    };
    let gateway = start(&state, "");
    assert_eq!(told(&gateway), before);
    assert_eq!(client::post(gateway.admin, LB, &body(ports[0], 1)).status, 200);
    let after = told(&gateway);
    assert_eq!(after.last().map(|(id, ..)| id.clone()), Some(json!(3)), "{after:?}");
}

#[test]
fn a_rule_whose_port_is_busy_at_the_start_waits_and_is_in_force_once_it_is_free() {
    let state = Scratch::new("state");
    let ports = [free_port(), free_port()];
    let before = {
        let gateway = start(&state, "");
        for port in ports {
            assert_eq!(client::post(gateway.admin, LB, &body(port, 1)).status, 200);
        }
        told(&gateway)
    };
    let busy = wait_for("the last gateway is gone", || std::net::TcpListener::bind((ip(), ports[0])).ok());
    let mut gateway = start(&state, "");
    assert_eq!(told(&gateway), before[1..]);
    let waiting = |gateway: &Gateway| gateway.api("/status/ready").json()["rules_kept"]["waiting"].clone();
    let shown = waiting(&gateway);
    assert_eq!(shown[0]["rule"], format!("{}:{}", ip(), ports[0]), "{shown}");
    assert!(shown[0]["why"].as_str().is_some_and(|why| why.contains("cannot listen at")), "{shown}");

    let port = gateway.admin.port().to_string();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvlane"));
    let output = command.args(["get", "ready", "--port", &port]).output().expect("the binary was built");
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(table.contains("waits: cannot listen at"), "{table}");

    // It outlives another restart, and keeps its number.
    gateway.signal(libc::SIGTERM);
    gateway.wait();
    let gateway = start(&state, "");
    assert_eq!(told(&gateway), before[1..]);
    drop(busy);
    wait_for("it is in force", || (told(&gateway) == before).then_some(()));
    assert_eq!(waiting(&gateway), json!([]));
    assert!(gateway.log().contains("a rule that waited is in force"), "{}", gateway.log());
}

#[test]
fn a_damaged_state_file_is_kept_aside_and_named() {
    let state = Scratch::new("state");
    let port = free_port();
    {
        let gateway = start(&state, "");
        assert_eq!(client::post(gateway.admin, LB, &body(port, 1)).status, 200);
    }
    let file = state.path().join("rules.json");
    let mut bytes = std::fs::read(&file).expect("written");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, &bytes).expect("writable");
    let gateway = start(&state, "");
    assert_eq!(rules(&gateway), Vec::<Value>::new(), "nothing of it is used");
    let damaged = gateway.api("/status/ready").json()["rules_kept"]["damaged"].as_str().map(str::to_owned);
    assert_eq!(std::fs::read(damaged.expect("it is named")).expect("it is kept"), bytes);
    assert!(gateway.log().contains("its digest does not fit"), "{}", gateway.log());
    assert_eq!(client::post(gateway.admin, LB, &body(port, 1)).status, 200);
}

fn file_rule(port: u16, engine: &StubEngine, weight: u32) -> String {
    format!(
        "[[rule]]\nexternalIP = \"{}\"\nport = {port}\n[[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\n\
         targetPort = {}\nweight = {weight}\n\n",
        ip(),
        engine.address.port()
    )
}

#[test]
fn the_files_rules_win_and_only_the_file_changes_them() {
    let state = Scratch::new("state");
    let engine = StubEngine::start();
    let (ours, theirs) = (free_port(), free_port());
    {
        let gateway = start(&state, "");
        for port in [ours, theirs] {
            assert_eq!(client::post(gateway.admin, LB, &body(port, 7)).status, 200);
        }
    }
    let gateway = start(&state, &file_rule(theirs, &engine, 3));
    assert_eq!(weights(&gateway), BTreeMap::from([(ours, 7), (theirs, 3)]), "the file's rule is in force");
    for answer in [
        client::post(gateway.admin, LB, &body(theirs, 9)),
        client::call(gateway.admin, "DELETE", &delete_path(theirs), b"").expect("answered"),
    ] {
        assert_eq!(answer.status, 409, "{}", answer.text());
        assert!(answer.text().contains("configuration file"), "{}", answer.text());
    }
    assert_eq!(client::call(gateway.admin, "DELETE", &format!("{LB}/all"), b"").expect("answered").status, 200);
    assert_eq!(weights(&gateway), BTreeMap::from([(theirs, 3)]));
}

#[test]
fn a_changed_file_is_taken_up_whole_or_not_at_all() {
    let engine = StubEngine::start();
    let (first, second) = (free_port(), free_port());
    let gateway = Gateway::start(Options { config: file_rule(first, &engine, 1), ..Options::default() });
    let head = format!("[admin]\nlisten = \"{}\"\n\n", gateway.admin);
    let write = |rules: &str| std::fs::write(&gateway.config, format!("{head}{rules}")).expect("writable");
    let ask = |port: u16| {
        client::call(format!("{}:{port}", ip()).parse().expect("an address"), "GET", "/anything", b"").map(|a| a.status)
    };

    write(&(file_rule(first, &engine, 2) + &file_rule(second, &engine, 1)));
    wait_for("the file is taken up", || (weights(&gateway) == BTreeMap::from([(first, 2), (second, 1)])).then_some(()));
    assert_eq!(ask(second).expect("served"), 200);
    wait_for("the difference is logged", || {
        let log = gateway.log();
        (log.contains("rule added by the configuration file") && log.contains("members=\"endpoints\"")).then_some(())
    });

    // One rule is right and one is not; then one whose port is busy.
    let busy = std::net::TcpListener::bind((ip(), 0)).expect("a free port");
    let busy_port = busy.local_addr().expect("bound").port();
    for (rules, text) in [
        (file_rule(first, &engine, 9) + "[[rule]]\nport = 1\n", "externalIP: missing"),
        (file_rule(first, &engine, 9) + &file_rule(busy_port, &engine, 1), "cannot listen at"),
    ] {
        write(&rules);
        gateway.signal(libc::SIGHUP);
        wait_for("the refusal is logged", || {
            (gateway.log().contains(text) && gateway.log().contains("nothing was changed")).then_some(())
        });
        assert_eq!(weights(&gateway), BTreeMap::from([(first, 2), (second, 1)]), "{text}");
        assert_eq!(ask(first).expect("served"), 200);
    }
    write(&file_rule(second, &engine, 1));
    wait_for("the first rule is gone", || (weights(&gateway) == BTreeMap::from([(second, 1)])).then_some(()));
    wait_for("nobody listens for it", || ask(first).is_err().then_some(()));
}
