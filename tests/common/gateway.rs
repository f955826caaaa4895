//! A gateway process of one test.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

use super::client::{self, Answer};
use super::{Scratch, free_address, seccomp, wait_for};

/// What a gateway is started with.
#[derive(Default)]
pub struct Options {
    /// TOML after the `[admin]` table that the harness writes.
    pub config: String,
    /// Environment of the process.
    pub environment: Vec<(&'static str, String)>,
    /// Make io_uring unavailable to it.
    pub refuse_io_uring: bool,
}

/// A running gateway; killed when dropped.
pub struct Gateway {
    child: Child,
    /// Its management API.
    pub admin: SocketAddr,
    /// Its configuration file.
    pub config: PathBuf,
    log: PathBuf,
    _scratch: Scratch,
}

/// What `kvlane doctor` found: its exit code and its JSON.
pub struct Diagnosis {
    /// The exit code.
    pub code: Option<i32>,
    /// What it printed.
    pub report: serde_json::Value,
}

impl Diagnosis {
    /// Runs `kvlane doctor --json` with more arguments.
    pub fn of(arguments: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvlane"));
        let output = command.args(["doctor", "--json"]).args(arguments).output().expect("the binary was built");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let report = serde_json::from_str(&text)
            .unwrap_or_else(|e| panic!("no JSON ({e}): {text}{}", String::from_utf8_lossy(&output.stderr)));
        Diagnosis { code: output.status.code(), report }
    }

    /// Lines of a mark: check, what was found, and the fix.
    pub fn lines(&self, mark: &str) -> Vec<(String, String, String)> {
        let lines = self.report["checks"].as_array().expect("a list").iter().filter(|line| line["mark"] == mark);
        let text = |line: &serde_json::Value, name: &str| line[name].as_str().expect("a text").to_owned();
        lines.map(|line| (text(line, "check"), text(line, "says"), text(line, "fix"))).collect()
    }

    /// The checks that are wrong, each once, in order of their names.
    pub fn wrong(&self) -> Vec<String> {
        let mut checks: Vec<String> = self.lines("wrong").into_iter().map(|(check, ..)| check).collect();
        checks.sort_unstable();
        checks.dedup();
        checks
    }

    /// Checks that this one is wrong and nothing else, in words that name what was found and what to do.
    pub fn only(&self, check: &str, words: &[&str]) {
        assert_eq!((self.code, self.wrong()), (Some(1), vec![check.to_owned()]), "{:#}", self.report);
        for (_, says, fix) in self.lines("wrong") {
            let text = format!("{says} / {fix}");
            words.iter().for_each(|word| assert!(text.contains(word), "{word:?} in {text:?}"));
            assert!(!fix.is_empty(), "{says}");
        }
    }
}

impl Gateway {
    /// Starts the binary and waits until its management API answers.
    pub fn start(options: Options) -> Self {
        let scratch = Scratch::new("gateway");
        let admin = free_address();
        let config = scratch.path().join("kvlane.toml");
        let text = format!("[admin]\nlisten = \"{admin}\"\n\n{}", options.config);
        std::fs::write(&config, text).expect("the scratch directory is writable");
        let log = scratch.path().join("log");
        let log_file = std::fs::File::create(&log).expect("the scratch directory is writable");
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvlane"));
        command.args(["serve", "-c"]).arg(&config).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log_file);
        command.envs(options.environment);
        if options.refuse_io_uring {
            seccomp::refuse_io_uring(&mut command);
        }
        let child = command.spawn().expect("the gateway binary was built for this test");
        let mut gateway = Gateway { child, admin, config, log, _scratch: scratch };
        wait_for("the management API answers", || {
            if let Some(status) = gateway.child.try_wait().expect("the child is ours") {
                panic!("the gateway ended with {status}:\n{}", gateway.log());
            }
            client::call(admin, "GET", "/netlox/v1/version", b"").ok()
        });
        gateway
    }

    /// What it logged so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Its process number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// GET of a management path below the base.
    pub fn api(&self, path: &str) -> Answer {
        client::get(self.admin, &format!("/netlox/v1{path}"))
    }

    /// `kvlane doctor` over this gateway's configuration.
    pub fn doctor(&self, more: &[&str]) -> Diagnosis {
        let config = self.config.to_str().expect("a text");
        Diagnosis::of(&[&["-c", config], more].concat())
    }

    /// Its management API, as commands take it.
    pub fn url(&self) -> String {
        format!("http://{}", self.admin)
    }

    /// Keys of one endpoint as the inventory endpoint lists them, sorted.
    pub fn inventory(&self, service: u32, endpoint: u32) -> Vec<u64> {
        let answer = self.api(&format!("/config/ai/kv/inventory?service_id={service}&ep_idx={endpoint}"));
        assert_eq!(answer.status, 200, "{}", answer.text());
        let json = answer.json();
        let mut keys: Vec<u64> = json["blocks"]
            .as_array()
            .expect("blocks is a list")
            .iter()
            .map(|b| b["hash_uint64"].as_u64().expect("a key is an unsigned integer"))
            .collect();
        assert_eq!(json["total"].as_u64(), Some(keys.len() as u64), "total counts the blocks listed");
        keys.sort_unstable();
        keys
    }

    /// The value of one metric line: name and labels as printed, in any order of labels.
    pub fn metric(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let text = self.api("/metrics").text();
        text.lines().filter(|line| !line.starts_with('#')).find_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let (series_name, rest) = series.split_once('{').unwrap_or((series, ""));
            let wanted = labels.iter().all(|(k, v)| rest.contains(&format!("{k}=\"{v}\"")));
            (series_name == name && wanted).then(|| value.parse().ok())?
        })
    }

    /// Sends a signal.
    pub fn signal(&self, signal: i32) {
        // SAFETY: kill(2) with the number of our own child, which has not been reaped.
        unsafe { libc::kill(self.child.id() as i32, signal) };
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        wait_for("the gateway ends", || self.child.try_wait().expect("the child is ours"))
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- log of the gateway\n{}", self.log());
        }
    }
}
