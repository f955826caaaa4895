//! A shard that has served many clients, well and badly behaved, holds what it held before. One test, in a process of
//! its own, because it counts the process's descriptors.

mod support;

use std::io::Write;
use std::sync::atomic::Ordering;

use support::*;

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("the process's descriptors").count()
}

fn resident_kb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("the process's status");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("a resident size");
    line.split_whitespace().nth(1).and_then(|kb| kb.parse().ok()).expect("a number")
}

/// One client of each kind.
fn clients(gateway: &Gateway) {
    // Well behaved, twice on one connection.
    let mut client = gateway.connect();
    for _ in 0..2 {
        assert_eq!(client.ask(post("/x", &[b'x'; 3_000])).status(), 200);
    }
    // Leaves in the middle of a head, of a body, before the answer, and in the middle of a stream.
    for request in ["GET / HTTP/1.1\r\nHo", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc", GET] {
        let _sent = gateway.connect().stream.write_all(request.as_bytes());
    }
    let mut client = gateway.connect();
    client.send("GET /stream HTTP/1.1\r\nHost: a\r\n\r\n");
    assert!(client.read_until(b"data: 1").is_some());
    // Is refused, and does not listen.
    let _sent = gateway.connect().stream.write_all(b"NONSENSE\r\n\r\n");
    // Leaves without a word.
    drop(gateway.connect());
}

#[test]
fn many_clients_leave_nothing_behind() {
    for rung in RUNGS {
        let engine = Engine::start(|served| {
            if served.request.head.starts_with("GET /stream") {
                served.client.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n7\r\ndata: 1\r\n");
            } else {
                served.client.send(answer("x"));
            }
            true
        });
        let gateway = Gateway::start(rung, limits(), &[engine.address]);
        let settled = |gateway: &Gateway| {
            // What the engine remembers for tests is not the shard's.
            engine.heads.lock().expect("no panic").clear();
            engine.bodies.lock().expect("no panic").clear();
            eventually("all connections are closed", || {
                gateway.shard.status().connections_open.load(Ordering::Relaxed) == 0
                    && gateway.in_flight() == 0
                    // Idle connections to the engine end after their time.
                    && engine.connections.load(Ordering::SeqCst) == engine.left.load(Ordering::SeqCst)
            });
        };
        (0..100).for_each(|_| clients(&gateway));
        settled(&gateway);
        let (held, resident) = (descriptors(), resident_kb());
        for _ in 0..4 {
            (0..100).for_each(|_| clients(&gateway));
            engine.heads.lock().expect("no panic").clear();
            engine.bodies.lock().expect("no panic").clear();
        }
        settled(&gateway);
        // Two more at most: the socket pair of giving way, made when it is first needed.
        eventually("descriptors are back", || descriptors() <= held + 2);
        let grown = resident_kb().saturating_sub(resident);
        eprintln!("{rung:?}: {held} descriptors, {resident} kB before, {grown} kB more after 2,800 connections");
        // What is left of each connection, were there anything, would be a buffer of 4 kB at least.
        assert!(grown < 4_000, "{rung:?}: memory grew by {grown} kB");
        gateway.stop();
    }
}
