//! Simulated engines, each a process of its own, and a KV-exact rule over them.
//!
//! An engine process is the test binary again: a test file that uses this has a test named `engine_process` which
//! calls [`run_as_engine`].

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use clap::Parser;

use super::client;
use super::{Scratch, free_port, free_ports, wait_for};

const ENGINE_ARGUMENTS: &str = "KVLANE_TEST_ENGINE";

#[derive(Parser)]
struct EngineCommand {
    #[command(flatten)]
    engine: loadgen::engine::cli::EngineArgs,
}

/// Becomes an engine if this process was started as one; else does nothing.
pub fn run_as_engine() {
    let Ok(arguments) = std::env::var(ENGINE_ARGUMENTS) else { return };
    let command = EngineCommand::parse_from(std::iter::once("engine").chain(arguments.split(' ')));
    loadgen::engine::cli::run(&command.engine).expect("the engine runs");
}

/// One engine process on ports of its own.
pub struct EngineProcess {
    child: Option<Child>,
    arguments: String,
    /// Where it serves.
    pub address: SocketAddr,
    /// Where it publishes.
    pub event_port: u16,
    /// Where it replays.
    pub replay_port: u16,
}

impl EngineProcess {
    /// Starts one with more arguments of `loadgen engine`, and waits until it is healthy.
    pub fn start(more: &str) -> Self {
        Self::start_on(free_port(), free_port(), free_port(), more)
    }

    /// Starts one with so many ranks, whose ports follow each other.
    pub fn start_ranks(ranks: u16, more: &str) -> Self {
        let (events, replay) = (free_ports(ranks), free_ports(ranks));
        Self::start_on(free_port(), events, replay, &format!("--dp {ranks} {more}"))
    }

    fn start_on(http: u16, event_port: u16, replay_port: u16, more: &str) -> Self {
        let arguments = format!(
            "--port {http} --event-port {event_port} --replay-port {replay_port}{}{more}",
            if more.is_empty() { "" } else { " " }
        );
        let address = ([127, 0, 0, 1], http).into();
        let mut engine = EngineProcess { child: None, arguments, address, event_port, replay_port };
        engine.restart();
        engine
    }

    /// Ends it by SIGKILL, if it runs.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("the child is ours");
            child.wait().expect("the child is ours");
        }
    }

    /// Starts it again on the same ports.
    pub fn restart(&mut self) {
        self.kill();
        let binary = std::env::current_exe().expect("the test binary has a path");
        let child = Command::new(binary)
            .args(["--exact", "engine_process", "--nocapture"])
            .env(ENGINE_ARGUMENTS, &self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("the test binary can be started again");
        self.child = Some(child);
        let address = self.address;
        wait_for("the engine is healthy", || client::call(address, "GET", "/health", b"").ok());
    }

    /// Gives it another argument from its next start on.
    pub fn replace_argument(&mut self, old: &str, new: &str) {
        assert!(self.arguments.contains(old), "{old:?} is an argument of {:?}", self.arguments);
        self.arguments = self.arguments.replace(old, new);
    }

    /// A number from its `/debug/stats`.
    pub fn stat(&self, name: &str) -> u64 {
        client::get(self.address, "/debug/stats").json()[name].as_u64().unwrap_or_else(|| panic!("no {name}"))
    }

    /// Keys it holds by its own account, sorted.
    pub fn keys(&self) -> Vec<u64> {
        let answer = client::get(self.address, "/debug/blocks").json();
        let blocks = answer["blocks"].as_object().expect("blocks is an object");
        let mut keys: Vec<u64> = blocks.keys().map(|key| key.parse().expect("a key is a number")).collect();
        keys.sort_unstable();
        keys
    }
}

impl Drop for EngineProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The demo tokenizer, staged for a gateway.
pub fn tokenizers() -> Scratch {
    let scratch = Scratch::new("tokenizers");
    loadgen::assets::stage(scratch.path()).expect("the scratch directory is writable");
    scratch
}

/// Configuration of a KV-exact rule over the engines.
pub fn rule(port: u16, tokenizers: &Scratch, engines: &[EngineProcess]) -> String {
    let mut text = format!(
        "[limits]\nprompt_cache_bytes = 262144\n\n[tokenizers]\ndir = \"{}\"\n\n[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {port}\nprotocol = \"tcp\"\n\
         kvExactMode = 3\nkvEngineType = \"vllm\"\nkvBlockSize = 16\nkvHashAlgo = \"sha256_cbor\"\n\
         kvNoneHashSeed = \"0\"\n\n",
        tokenizers.path().display()
    );
    for engine in engines {
        text.push_str(&format!(
            "[[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = {}\nweight = 1\nkvZmqPort = {}\n\
             kvReplayPort = {}\n\n",
            engine.address.port(),
            engine.event_port,
            engine.replay_port
        ));
    }
    text
}
