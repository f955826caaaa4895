//! What happens when clients leave, endpoints die, and the shard is told to stop.

mod support;

use std::sync::atomic::Ordering;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use shards::shard::Command;
use support::*;

/// An engine that reports each request and then waits for a word before each step of its answer; no word = it dies.
fn stepwise(steps: &'static [&'static str]) -> (Engine, mpsc::Receiver<()>, mpsc::Sender<()>) {
    let (asked, was_asked) = mpsc::channel();
    let (go, may_go) = mpsc::channel::<()>();
    let (asked, may_go) = (Mutex::new(asked), Mutex::new(may_go));
    let engine = Engine::start(move |served| {
        asked.lock().expect("no panic").send(()).expect("the test listens");
        for step in steps {
            if may_go.lock().expect("no panic").recv().is_err() {
                return false;
            }
            served.client.send(step);
        }
        true
    });
    (engine, was_asked, go)
}

const STREAM: &[&str] = &[
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n",
    "9\r\ndata: 2\n\n\r\n0\r\n\r\n",
];

#[test]
fn a_client_that_leaves_takes_its_upstream_connection_with_it_whatever_the_phase() {
    for rung in RUNGS {
        let (engine, was_asked, go) = stepwise(STREAM);
        let gateway = Gateway::start(rung, limits(), &[engine.address]);
        // Before the first byte.
        let mut client = gateway.connect();
        client.send(GET);
        was_asked.recv_timeout(PATIENCE).expect("the engine is asked");
        drop(client);
        eventually("the client is seen to leave", || {
            gateway.service.shared.stats_of(shards::ids::ShardId(0)).client_gone.load(Ordering::Relaxed) == 1
        });
        // The engine's handler writes into the closed connection and then sees its end.
        go.send(()).expect("the engine waits");
        go.send(()).expect("the engine waits");
        eventually("the engine sees the close", || engine.left.load(Ordering::SeqCst) == 1);
        // In the middle of a stream, by closing and by closing one side only.
        for half in [false, true] {
            let mut client = gateway.connect();
            client.send(GET);
            was_asked.recv_timeout(PATIENCE).expect("the engine is asked");
            go.send(()).expect("the engine waits");
            assert!(client.read_until(b"data: 1\n\n\r\n").is_some());
            let how = if half { std::net::Shutdown::Write } else { std::net::Shutdown::Both };
            client.stream.shutdown(how).expect("the client leaves");
            eventually("load is given back before the answer ends", || gateway.in_flight() == 0);
            go.send(()).expect("the engine waits");
        }
        eventually("the engine sees each close", || engine.left.load(Ordering::SeqCst) == 3);
        gateway.stop();
    }
}

#[test]
fn a_refused_connection_takes_the_endpoint_out_and_moves_the_request() {
    for rung in RUNGS {
        let engine = Engine::echo("a");
        let gateway = Gateway::start(rung, limits(), &[dead_address(), engine.address]);
        for _ in 0..4 {
            assert_eq!(gateway.connect().ask(post("/x", b"12")).body, b"a 2", "{rung:?}");
        }
        let dead = &gateway.service.endpoints[0];
        assert!(!dead.shared.is_up() && gateway.service.endpoints[1].shared.is_up());
        let stats = dead.shared.stats_of(shards::ids::ShardId(0));
        assert_eq!((stats.connect_failures.load(Ordering::Relaxed), stats.requests.load(Ordering::Relaxed)), (1, 0));
        gateway.stop();
    }
}

#[test]
fn without_an_endpoint_the_answer_says_so() {
    for rung in RUNGS {
        let gateway = Gateway::start(rung, limits(), &[dead_address()]);
        let mut client = gateway.connect();
        // The first request finds out, the second knows.
        for path in ["/x", "/v1/models"] {
            let answer = client.ask(format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n"));
            assert_eq!(answer.status(), 503, "{rung:?}");
            assert!(answer.body.starts_with(br#"{"error":"no_healthy_backend""#), "{rung:?}");
        }
        gateway.stop();
    }
}

#[test]
fn an_engine_that_dies_before_a_byte_costs_nobody_an_answer_if_another_is_there() {
    for rung in RUNGS {
        let dying = Engine::start(|_| false);
        let engine = Engine::echo("a");
        let gateway = Gateway::start(rung, limits(), &[dying.address, engine.address]);
        for _ in 0..4 {
            assert_eq!(gateway.connect().ask(GET).body, b"a 0", "{rung:?}");
        }
        // What may change something at the engine is not sent twice.
        let mut statuses = [0, 0].map(|_| gateway.connect().ask(post("/admin", b"")).status());
        statuses.sort_unstable();
        assert_eq!(statuses, [200, 502], "{rung:?}");
        gateway.stop();
    }
}

#[test]
fn a_request_is_sent_at_most_three_times() {
    for rung in RUNGS {
        let dying: Vec<Engine> = (0..4).map(|_| Engine::start(|_| false)).collect();
        let addresses: Vec<_> = dying.iter().map(|engine| engine.address).collect();
        let gateway = Gateway::start(rung, limits(), &addresses);
        let answer = gateway.connect().ask(GET);
        assert_eq!(answer.status(), 502, "{rung:?}");
        assert!(answer.body.starts_with(br#"{"error":"backend_unreachable""#));
        let asked: usize = dying.iter().map(|engine| engine.heads.lock().expect("no panic").len()).sum();
        assert_eq!(asked, 3, "{rung:?}");
        gateway.stop();
    }
}

#[test]
fn a_kept_connection_that_the_engine_closed_is_not_used_again() {
    for rung in RUNGS {
        // Every connection serves one request and is closed although it was to be kept.
        let engine = Engine::start(|served| {
            served.client.send(answer("x"));
            false
        });
        let gateway = Gateway::start(rung, limits(), &[engine.address]);
        let mut client = gateway.connect();
        for round in 1..=20 {
            // Not to be sent twice: a dead connection that was used would show.
            assert_eq!(client.ask(post("/admin", b"1")).status(), 200, "{rung:?}");
            eventually("the engine has closed", || engine.closed.load(Ordering::SeqCst) == round);
        }
        gateway.stop();
    }
}

#[test]
fn an_answer_that_breaks_never_ends_cleanly() {
    const BROKEN: [(&str, &str); 4] = [
        ("length", "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345"),
        ("chunk", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n123"),
        ("chunks", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n"),
        (
            "events",
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n",
        ),
    ];
    for rung in RUNGS {
        let engine = Engine::start(|served| {
            let which = BROKEN.iter().find(|(name, _)| served.request.head.contains(&format!("/{name} ")));
            served.client.send(which.expect("one of them").1);
            false
        });
        let gateway = Gateway::start(rung, limits(), &[engine.address]);
        for (name, _) in BROKEN {
            let mut client = gateway.connect();
            client.send(format!("GET /{name} HTTP/1.1\r\nHost: a\r\n\r\n"));
            let answer = client.read_message().expect("an answer that began");
            assert!(answer.broken, "{rung:?} {name}: {answer:?}");
            let text = String::from_utf8_lossy(&answer.body).into_owned();
            assert_eq!(text.contains("data: {\"error\":"), name == "events", "{rung:?} {name}: {text}");
        }
        let stats = gateway.service.shared.stats_of(shards::ids::ShardId(0));
        assert_eq!(stats.broken_answers.load(Ordering::Relaxed), BROKEN.len() as u64);
        gateway.stop();
    }
}

#[test]
fn an_answer_that_is_nonsense_from_the_start_is_not_passed_on() {
    for rung in RUNGS {
        for nonsense in [
            "SSH-2.0-OpenSSH\r\n\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nwhat\r\n",
            "HTTP/1.1 101 Switching Protocols\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Le",
        ] {
            let engine = Engine::start(move |served| {
                served.client.send(nonsense);
                false
            });
            let gateway = Gateway::start(rung, limits(), &[engine.address]);
            assert_eq!(gateway.connect().ask(GET).status(), 502, "{rung:?} {nonsense:?}");
            gateway.stop();
        }
    }
}

#[test]
fn a_stream_without_a_length_that_breaks_is_reset() {
    for rung in RUNGS {
        let engine = Engine::start(|served| {
            served.client.send("HTTP/1.1 200 OK\r\n\r\nuntil");
            // A reset from the engine, not an end.
            let socket = socket2::SockRef::from(&served.client.stream);
            socket.set_linger(Some(Duration::ZERO)).expect("a socket option");
            false
        });
        let gateway = Gateway::start(rung, limits(), &[engine.address]);
        let mut client = gateway.connect();
        client.send(GET);
        let mut part = [0; 64];
        let error = loop {
            match std::io::Read::read(&mut client.stream, &mut part) {
                Ok(0) => panic!("{rung:?}: a clean end"),
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{rung:?}");
        gateway.stop();
    }
}

#[test]
fn a_drain_finishes_streams_closes_idle_connections_and_takes_no_new_ones() {
    for rung in RUNGS {
        let (engine, was_asked, go) = stepwise(STREAM);
        let gateway = Gateway::start(rung, limits(), &[engine.address]);
        let mut idle = gateway.connect();
        let mut busy = gateway.connect();
        busy.send(GET);
        was_asked.recv_timeout(PATIENCE).expect("the engine is asked");
        go.send(()).expect("the engine waits");
        assert!(busy.read_until(b"data: 1\n\n\r\n").is_some());
        let receipt = gateway.shard.send(Command::Drain(PATIENCE)).expect("the shard takes commands");
        assert!(idle.ends(), "{rung:?}");
        eventually("nobody listens", || std::net::TcpStream::connect(gateway.address).is_err());
        assert!(receipt.poll().is_none(), "{rung:?}: the stream is not over");
        go.send(()).expect("the engine waits");
        assert_eq!(busy.read_until(b"0\r\n\r\n").expect("the rest"), b"9\r\ndata: 2\n\n\r\n0\r\n\r\n");
        assert!(busy.ends(), "{rung:?}");
        receipt.wait(PATIENCE).expect("the drain is over");
        gateway.shard.join();
    }
}

#[test]
fn a_drain_cuts_what_is_left_after_its_time() {
    for rung in RUNGS {
        let (engine, was_asked, go) = stepwise(STREAM);
        let gateway = Gateway::start(rung, limits(), &[engine.address]);
        let mut busy = gateway.connect();
        busy.send(GET);
        was_asked.recv_timeout(PATIENCE).expect("the engine is asked");
        let receipt = gateway.shard.send(Command::Drain(Duration::from_millis(50))).expect("the shard takes commands");
        receipt.wait(PATIENCE).expect("the drain is over");
        assert!(busy.ends(), "{rung:?}");
        drop(go);
        eventually("load is given back", || gateway.in_flight() == 0);
        gateway.shard.join();
    }
}

#[test]
fn an_address_that_is_no_longer_listened_on_keeps_its_connections() {
    for rung in RUNGS {
        let engine = Engine::echo("a");
        let gateway = Gateway::start(rung, limits(), &[engine.address]);
        let mut client = gateway.connect();
        assert_eq!(client.ask(GET).status(), 200);
        send(&gateway.shard, Command::Unlisten(gateway.address));
        eventually("nobody listens", || std::net::TcpStream::connect(gateway.address).is_err());
        assert_eq!(client.ask(GET).status(), 200, "{rung:?}");
        let listener = std::net::TcpListener::bind(gateway.address).expect("the port is free again");
        send(&gateway.shard, Command::Listen(gateway.address, listener));
        assert_eq!(gateway.connect().ask(GET).status(), 200, "{rung:?}");
        gateway.stop();
    }
}

#[test]
fn a_full_shard_gives_up_an_idle_connection_and_refuses_when_all_are_busy() {
    for rung in RUNGS {
        let (engine, was_asked, go) = stepwise(&["HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]);
        let mut small = limits();
        small.connections_max = 2;
        let gateway = Gateway::start(rung, small, &[engine.address]);
        let mut idle = gateway.connect();
        let mut busy = gateway.connect();
        busy.send(GET);
        was_asked.recv_timeout(PATIENCE).expect("the engine is asked");
        let mut next = gateway.connect();
        assert!(idle.ends(), "{rung:?}: the idle one gives way");
        next.send(GET);
        was_asked.recv_timeout(PATIENCE).expect("the engine is asked");
        assert!(gateway.connect().ends(), "{rung:?}: all are busy");
        go.send(()).expect("the engine waits");
        go.send(()).expect("the engine waits");
        assert_eq!(busy.read_message().expect("an answer").status(), 200);
        assert_eq!(next.read_message().expect("an answer").status(), 200);
        gateway.stop();
    }
}

#[test]
fn an_answer_that_does_not_begin_in_time_is_given_up() {
    for rung in RUNGS {
        let (engine, was_asked, go) = stepwise(&["HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]);
        let mut small = limits();
        small.first_byte_timeout = Some(Duration::from_millis(100));
        let gateway = Gateway::start(rung, small, &[engine.address]);
        let mut client = gateway.connect();
        let answer = client.ask(GET);
        was_asked.recv_timeout(PATIENCE).expect("the engine was asked");
        assert_eq!(answer.status(), 504, "{rung:?}");
        go.send(()).expect("the engine waits");
        eventually("the engine sees the close", || engine.left.load(Ordering::SeqCst) == 1);
        gateway.stop();
    }
}
