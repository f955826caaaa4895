//! The gateway as a process: exit codes, a configuration file served, signals.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Longest wait for anything here.
const PATIENCE: Duration = Duration::from_secs(30);

fn kvlane() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvlane"));
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("LLB_") || name.starts_with("LOXILB_") || name == "RUST_LOG" {
            command.env_remove(name);
        }
    }
    command
}

fn run(args: &[&str], env: &[(&str, &str)]) -> Output {
    kvlane().args(args).envs(env.iter().copied()).output().expect("the program starts")
}

fn code(output: &Output) -> Option<i32> {
    output.status.code()
}

/// A file of this test process, removed at its end.
struct File(PathBuf);

impl File {
    fn new(name: &str, text: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvlane-cli-{}-{name}", std::process::id()));
        std::fs::write(&path, text).expect("written");
        File(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("text")
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port()
}

#[track_caller]
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "never came about: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn exit_codes_tell_right_no_and_usage_apart() {
    let right = File::new("right.toml", "[admin]\nlisten = \"127.0.0.1:0\"\n");
    let wrong = File::new("wrong.toml", "[admin]\nlistn = \"127.0.0.1:0\"\n[shards]\ncount = 0\n");
    assert_eq!(code(&run(&["check", right.path()], &[])), Some(0));
    assert_eq!(code(&run(&["--help"], &[])), Some(0));
    for usage in [vec![], vec!["servee"], vec!["check"], vec!["check", "/nonexistent/kvlane.toml"]] {
        assert_eq!(code(&run(&usage, &[])), Some(2), "{usage:?}");
    }
    // The same problem has the same code and is said once, whoever meets it.
    let output = run(&["serve", "-c", "/nonexistent/kvlane.toml"], &[]);
    assert_eq!(code(&output), Some(2));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.starts_with("kvlane: cannot read /nonexistent/kvlane.toml: No such file"), "{text}");
    assert_eq!(text.matches("No such file").count(), 1, "{text}");
    let output = run(&["check", wrong.path()], &[]);
    assert_eq!(code(&output), Some(1));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines,
        [
            format!("{}:2: admin.listn: unknown key", wrong.path()),
            format!("{}:4: shards.count: 0 is not within 1 to 1024", wrong.path()),
        ]
    );
    let output = run(&["serve", "-c", wrong.path()], &[]);
    assert_eq!(code(&output), Some(1), "a wrong file is not served");
    assert!(String::from_utf8_lossy(&output.stderr).contains("admin.listn: unknown key"));
}

#[test]
fn check_reports_rules_cores_descriptors_and_ring() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/vllm-single-pool.toml");
    let output = run(&["check", file.to_str().expect("text"), "--json"], &[]);
    assert_eq!(code(&output), Some(0));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["right"], true);
    assert_eq!(report["rules"][0], "0.0.0.0:8080");
    assert!(report["cores"]["shards"].as_array().is_some_and(|cores| !cores.is_empty()));
    assert!(report["descriptors"]["needed"].as_u64() > Some(32_768));
    assert!(report["ring"].as_str().is_some_and(|ring| ring.contains("io_uring") || ring.contains("epoll")));
}

#[test]
fn a_variable_out_of_range_stops_the_start_with_name_value_and_range() {
    let env = [
        ("LLB_KV_MIN_MATCH_TOKENS", "5000"),
        ("LOXILB_KV_MEAN_LOAD_FACTOR", "99"),
        ("LOXILB_KV_TRTLLM_POLL_MAX_MS", "0"),
    ];
    let output = run(&["serve"], &env);
    assert_eq!(code(&output), Some(1));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("LLB_KV_MIN_MATCH_TOKENS: \"5000\" is not a whole number within 0 to 4096"), "{text}");
    assert!(text.contains("LOXILB_KV_MEAN_LOAD_FACTOR: \"99\" is not a whole number within 100 to 1000"), "{text}");
    assert!(text.contains("LOXILB_KV_TRTLLM_POLL_MAX_MS: \"0\" is not a whole number within 1 to 10000"), "{text}");
}

#[test]
fn what_cannot_be_listened_at_or_run_on_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("bound");
    let file = File::new("busy.toml", &format!("[admin]\nlisten = \"{address}\"\n"));
    let output = run(&["serve", "-c", file.path()], &[]);
    assert_eq!(code(&output), Some(1));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("[admin] listen") && text.contains(&address.to_string()), "{text}");

    let rule = format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\n[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {}\n\
         [[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = 9\n",
        address.port()
    );
    let file = File::new("busy-rule.toml", &rule);
    let output = run(&["serve", "-c", file.path()], &[]);
    assert_eq!(code(&output), Some(1));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains(&format!("rule {address}: cannot listen at {address}")), "{text}");

    let file = File::new("core.toml", "[shards]\ncores = [4095]\n");
    let output = run(&["serve", "-c", file.path()], &[]);
    assert_eq!(code(&output), Some(1));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains(&format!("{}:2: shards.cores: core 4095 is not online", file.path())), "{text}");
}

#[test]
fn check_ends_in_order_when_its_reader_has_left() {
    let file = File::new("pipe.toml", "[admin]\nlisten = \"127.0.0.1:0\"\n");
    for flag in [None, Some("--json")] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = kvlane()
            .args(["check", file.path()])
            .args(flag)
            .stdout(writer)
            .stderr(Stdio::piped())
            .spawn()
            .and_then(Child::wait_with_output)
            .expect("the program runs");
        assert_eq!(code(&output), Some(0));
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    }
}

#[test]
fn check_names_variables_that_do_nothing() {
    let file = File::new("variables.toml", "");
    let env = [("LLB_KV_MIN_MATCH_TOKEN", "9"), ("LLB_KV_MIN_MATCH_TOKENS", "9"), ("LLB_KV_LOADGUARD", "")];
    let output = run(&["check", file.path()], &env);
    assert_eq!(code(&output), Some(0));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let named: Vec<_> = said.lines().filter(|line| line.contains("LLB_")).collect();
    assert_eq!(
        named,
        ["environment: LLB_KV_MIN_MATCH_TOKEN: is set and has no effect: no variable of this name is known"],
        "{said}"
    );
}

#[test]
fn check_notes_a_missing_tokenizer_directory() {
    let text = |dir: &str| format!("[admin]\nlisten = \"127.0.0.1:0\"\n[tokenizers]\ndir = \"{dir}\"\n");
    let (absent, present) = (File::new("absent.toml", &text("/nonexistent")), File::new("present.toml", &text("/tmp")));
    for (file, noted) in [(&absent, true), (&present, false)] {
        let output = run(&["check", file.path()], &[]);
        assert_eq!(code(&output), Some(0));
        assert_eq!(String::from_utf8_lossy(&output.stdout).contains("note: there is no such directory"), noted);
    }
}

#[test]
fn few_descriptors_lower_the_bound_on_connections_and_say_so() {
    let file = File::new("few.toml", "[admin]\nlisten = \"127.0.0.1:0\"\n[shards]\ncount = 1\n");
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -n 1024; exec \"$0\" check \"$1\"", env!("CARGO_BIN_EXE_kvlane"), file.path()]);
    let output = shell.output().expect("a shell");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("descriptors 1024 may be open, "), "nothing is raised: {text}");
    assert!(text.contains("note: serve lowers limits.connections_max from 16384 to 256: "), "{text}");
}

/// A gateway process; killed if the test fails.
struct Process(Child);

impl Process {
    fn terminate(&self) {
        let status = Command::new("kill").arg(self.0.id().to_string()).status().expect("kill runs");
        assert!(status.success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn get(address: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// SIGTERM: no new connections, what streams is finished, exit 0.
#[test]
fn a_termination_lets_a_stream_finish_and_takes_nothing_new() {
    let engine = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let engine_port = engine.local_addr().expect("bound").port();
    let (finish, finished) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        let mut finished = Some(finished);
        for stream in engine.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut request = [0; 4096];
            let Ok(read) = stream.read(&mut request) else { continue };
            if request[..read].starts_with(b"GET /health") {
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
                continue;
            }
            let Some(finished) = finished.take() else { continue };
            std::thread::spawn(move || {
                let head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
                let _ = stream.write_all(head);
                let _ = stream.write_all(b"5\r\nfirst\r\n");
                let _ = finished.recv_timeout(PATIENCE);
                let _ = stream.write_all(b"4\r\nlast\r\n0\r\n\r\n");
            });
        }
    });
    let (admin, port) = (free_port(), free_port());
    let file = File::new(
        "serve.toml",
        &format!(
            "[admin]\nlisten = \"127.0.0.1:{admin}\"\n[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {port}\n\
             [[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = {engine_port}\n"
        ),
    );
    let child = kvlane().args(["serve", "-c", file.path()]).stderr(Stdio::null()).spawn().expect("it starts");
    let mut process = Process(child);
    let (admin, client) = (SocketAddr::from(([127, 0, 0, 1], admin)), SocketAddr::from(([127, 0, 0, 1], port)));
    eventually("the API answers", || get(admin, "/netlox/v1/status/ready").is_ok());

    let mut stream = TcpStream::connect(client).expect("the rule of the file is served");
    stream.set_read_timeout(Some(PATIENCE)).expect("set");
    write!(stream, "GET /stream HTTP/1.1\r\nHost: gateway\r\n\r\n").expect("sent");
    let mut seen = Vec::new();
    let mut buffer = [0; 4096];
    while !String::from_utf8_lossy(&seen).contains("first") {
        let read = stream.read(&mut buffer).expect("the stream begins");
        assert!(read > 0, "the stream ended early");
        seen.extend_from_slice(&buffer[..read]);
    }
    process.terminate();
    eventually("nothing new is taken", || TcpStream::connect(client).is_err());
    assert_eq!(process.0.try_wait().expect("ours"), None, "it waits for the stream");
    finish.send(()).expect("the engine waits");
    stream.read_to_end(&mut seen).expect("the stream ends");
    assert!(String::from_utf8_lossy(&seen).contains("4\r\nlast\r\n0\r\n\r\n"), "{}", String::from_utf8_lossy(&seen));
    let status = process.0.wait().expect("ours");
    assert_eq!(status.code(), Some(0));
}
