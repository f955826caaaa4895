//! With io_uring made unavailable by a seccomp filter, the gateway serves on epoll and says so.

mod common;

use common::engines::StubEngine;
use common::gateway::{Gateway, Options};
use common::{client, free_port};

/// `head` stands before the rule.
fn serve(head: &str, refuse_io_uring: bool) -> (Gateway, StubEngine) {
    let engine = StubEngine::start();
    let port = free_port();
    let config = format!(
        "{head}[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {port}\nprotocol = \"tcp\"\n\n\
         [[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = {}\nweight = 1\n",
        engine.address.port()
    );
    let gateway = Gateway::start(Options { config, refuse_io_uring, ..Options::default() });
    let body = serde_json::json!({"model": "m", "prompt": "x"});
    assert_eq!(client::post(([127, 0, 0, 1], port).into(), "/v1/completions", &body).status, 200);
    (gateway, engine)
}

#[test]
fn without_io_uring_epoll_serves_and_log_and_status_say_why() {
    let (gateway, engine) = serve("", true);
    let status = gateway.api("/status/ready").json();
    assert_eq!(status["shards"][0]["driver"], "epoll", "{status}");
    let log = gateway.log();
    assert!(log.contains("epoll") && log.contains("Operation not permitted"), "{log}");
    assert_eq!(engine.seen().len(), 1);
}

#[test]
fn shards_that_are_told_to_use_epoll_do_not_try_for_more() {
    let (gateway, engine) = serve("[shards]\ndriver = \"epoll\"\n", false);
    let status = gateway.api("/status/ready").json();
    assert_eq!(status["shards"][0]["driver"], "epoll", "{status}");
    assert_eq!(status["shards"][0]["refused"], serde_json::json!([]), "{status}");
    assert_eq!(engine.seen().len(), 1);
}

#[test]
fn where_the_kernel_has_it_io_uring_serves_and_the_status_says_so() {
    if !io_uring_works() {
        eprintln!("skipped: io_uring_serves: this kernel or container refuses io_uring");
        return;
    }
    let (gateway, _engine) = serve("", false);
    let status = gateway.api("/status/ready").json();
    let driver = status["shards"][0]["driver"].as_str().unwrap_or_default();
    assert!(driver.starts_with("io_uring"), "{status}");
}

/// Whether this process may set up a ring at all.
fn io_uring_works() -> bool {
    let mut parameters = [0_u8; 120];
    // SAFETY: io_uring_setup(2) with one entry and a zeroed io_uring_params (120 bytes), which the call fills in.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
    if ring >= 0 {
        // SAFETY: closes the descriptor that the call above returned.
        unsafe { libc::close(ring as i32) };
    }
    ring >= 0
}
