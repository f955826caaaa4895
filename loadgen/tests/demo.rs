//! The demo as a user starts it: a process of its own, the gateway another, all on loopback.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn demo(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_loadgen"));
    command.arg("demo").args(arguments);
    command
}

fn result(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(&text)
        .unwrap_or_else(|error| panic!("{error}: {text}{}", String::from_utf8_lossy(&output.stderr)))
}

/// The checks that did not pass, those apart that depend on how busy the machine is.
fn failed(result: &Value) -> Vec<String> {
    let checks = result["checks"].as_array().expect("the result has checks");
    let failed = checks.iter().filter(|check| check["passed"] == false);
    let names = failed.map(|check| check["name"].as_str().expect("a check has a name").to_owned());
    names.filter(|name| !name.contains("TTFT") && !name.contains("verdict")).collect()
}

fn phases(result: &Value) -> &Vec<Value> {
    let phases = result["phases"].as_array().expect("the result has phases");
    assert_eq!(phases.len(), 2);
    phases
}

#[test]
fn kv_exact_routing_hits_at_least_twice_as_often_as_round_robin() {
    let output = demo(&["--quick", "--json"]).output().unwrap();
    let result = result(&output);
    assert_eq!(failed(&result), [""; 0], "{result:#}");
    for phase in phases(&result) {
        assert!(phase["report"]["requests"]["completed"].as_u64().unwrap() > 100, "{phase:#}");
        assert!(phase["served"].as_array().unwrap().iter().all(|served| served.as_u64() > Some(0)), "{phase:#}");
        assert!(phase["report"]["lag_ms"]["count"].as_u64() > Some(0), "every report states the generator's lag");
    }
    assert_eq!(output.status.success(), result["passed"].as_bool().unwrap(), "the exit code is the result");
}

#[test]
fn a_recorded_trace_spreads_over_the_engines() {
    let name = "a_recorded_trace_spreads_over_the_engines";
    let Some(trace) = shared("data/mooncake_conversation.jsonl.gz", name) else { return };
    let output = demo(&["--quick", "--json", "--trace"]).arg(trace).output().unwrap();
    let result = result(&output);
    assert_eq!(failed(&result), [""; 0], "{result:#}");
}

#[test]
fn without_io_uring_the_demo_runs_on_epoll_and_says_so() {
    let mut command = demo(&["--quick", "--json"]);
    // SAFETY: the closure runs between fork and exec and makes two system calls on constants and its own stack.
    unsafe { command.pre_exec(refuse_io_uring) };
    let output = command.output().unwrap();
    let result = result(&output);
    assert_eq!(failed(&result), [""; 0], "{result:#}");
    for phase in phases(&result) {
        assert!(phase["gateway_driver"].as_str().unwrap().contains("epoll"), "{phase:#}");
        let runtime = &phase["report"]["runtime"];
        assert!(runtime["name"].as_str().unwrap().contains("epoll"), "{runtime}");
        assert!(!runtime["reason"].as_str().unwrap().is_empty(), "{runtime}");
    }
}

#[test]
fn a_killed_demo_leaves_no_gateway_behind() {
    let mut demo = demo(&["--seconds", "60"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let children = format!("/proc/{0}/task/{0}/children", demo.id());
    let child = wait(|| std::fs::read_to_string(&children).ok()?.split_whitespace().next()?.parse::<u32>().ok());
    demo.kill().unwrap();
    demo.wait().unwrap();
    // A process without a command line has ended, whether or not somebody has collected it.
    let command_line = format!("/proc/{child}/cmdline");
    wait(|| std::fs::read(&command_line).map_or(true, |line| line.is_empty()).then_some(()));
    let _ = std::fs::remove_dir_all(std::env::temp_dir().join(format!("kvlane-demo-{}", demo.id())));
}

/// Waits for something to be there, at most 30 s.
fn wait<T>(look: impl Fn() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "waited for 30 s");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A file of the data shared between projects; none, and said so, where it is absent.
fn shared(file: &str, test: &str) -> Option<PathBuf> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared");
    let directory = std::env::var_os("KVLANE_SHARED").map_or_else(beside, PathBuf::from);
    let path = directory.join(file);
    if path.is_file() {
        return Some(path);
    }
    assert!(std::env::var_os("CI").is_none(), "{} is needed where CI is set: set KVLANE_SHARED", path.display());
    eprintln!("skipped: {test}: {} is not there", path.display());
    None
}

/// Makes io_uring_setup fail with EPERM for this process and its children, as container runtimes do.
fn refuse_io_uring() -> std::io::Result<()> {
    let statement = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let number = libc::SYS_io_uring_setup as u32;
    let mut filter = [
        // The system call's number is the first word of what the filter sees.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, number),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: both calls read their arguments only; `program` and the filter it points to live until they return.
    let refused = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
            || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) != 0
    };
    if refused { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}
