//! A shard that stands still: changes are refused, and nothing is left of them.

use std::time::Instant;

use serde_json::{Value, json};

use crate::common::engines::StubEngine;
use crate::common::gateway::{Gateway, Options};
use crate::common::{Scratch, client, free_port, wait_for};

const LB: &str = "/netlox/v1/config/loadbalancer";

/// A thread of another process that does not run until this is dropped, by the thread that made it.
struct Still(libc::pid_t);

impl Still {
    /// Stops the first shard of a gateway; none where the system does not let one.
    fn shard_of(gateway: &Gateway) -> Option<Self> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", gateway.pid())).expect("it runs");
        let is_shard = |path: &std::path::Path| {
            std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name.starts_with("shard"))
        };
        let task = tasks.flatten().map(|task| task.path()).find(|path| is_shard(path)).expect("it has a shard");
        let id: libc::pid_t = task.file_name()?.to_str()?.parse().ok()?;
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: the requests take no memory of ours, and concern a thread of our own child.
        if unsafe { libc::ptrace(libc::PTRACE_SEIZE, id, none, none) } != 0 {
            return None;
        }
        let still = Still(id);
        // SAFETY: as above.
        assert_eq!(unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, id, none, none) }, 0, "the thread is seized");
        let mut status = 0;
        // SAFETY: the status is written to a live integer.
        assert_eq!(unsafe { libc::waitpid(id, &raw mut status, libc::__WALL) }, id, "the thread stops");
        Some(still)
    }
}

impl Drop for Still {
    fn drop(&mut self) {
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: as in `shard_of`.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0, none, none) };
    }
}

#[test]
fn a_change_that_a_shard_does_not_confirm_is_answered_503_and_undone() {
    let state = Scratch::new("silent");
    let config = format!("[state]\ndirectory = \"{}\"\n", state.path().display());
    let gateway = Gateway::start(Options { config, ..Options::default() });
    let engine = StubEngine::start();
    let ports = [free_port(), free_port()];
    let rule = |port: u16| {
        json!({"serviceArguments": {"externalIP": "127.0.0.1", "port": port, "mode": 4},
            "endpoints": [{"endpointIP": "127.0.0.1", "targetPort": engine.address.port(), "weight": 1}]})
    };
    let rules = || gateway.api("/config/loadbalancer/all").json();
    assert_eq!(client::post(gateway.admin, LB, &rule(ports[0])).status, 200);
    let (before, kept) = (rules(), || std::fs::read(state.path().join("rules.json")).expect("it is written"));
    let written = kept();

    let Some(still) = Still::shard_of(&gateway) else {
        assert!(std::env::var_os("CI").is_none(), "CI lets a process trace its child");
        return eprintln!(
            "skipped: a_change_that_a_shard_does_not_confirm_…: this system lets no process trace its child"
        );
    };
    let path = format!("{LB}/externalipaddress/127.0.0.1/port/{}/protocol/tcp", ports[0]);
    let mut changed = rule(ports[0]);
    changed["endpoints"][0]["weight"] = json!(7);
    let at = Instant::now();
    for (method, path, body) in
        [("POST", LB, rule(ports[1])), ("POST", LB, changed.clone()), ("DELETE", path.as_str(), Value::Null)]
    {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let answer = client::call(gateway.admin, method, path, body.as_bytes()).expect("an answer");
        assert_eq!(answer.status, 503, "{method}: {}", answer.text());
        assert!(answer.text().contains("did not confirm") && answer.text().contains("nothing was changed"));
        assert_eq!(rules(), before, "{method}");
        assert!(kept() == written, "{method}: a restart brings back what is in force");
    }
    println!("three changes were refused in {:.2?}", at.elapsed());
    drop(still);

    let ask = |port: u16| client::call(([127, 0, 0, 1], port).into(), "GET", "/anything", b"").map(|a| a.status);
    wait_for("the shard is as it was", || (ask(ports[0]).ok() == Some(200)).then_some(()));
    assert!(ask(ports[1]).is_err(), "nobody listens for the rule that was refused");
    for (body, port) in [(rule(ports[1]), ports[1]), (changed, ports[0])] {
        let answer = client::post(gateway.admin, LB, &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(ask(port).expect("served"), 200);
    }
}
