use std::io::{Read, Write};
use std::net::TcpListener;

use super::*;

const OUT: bool = false;
const IN: bool = true;

/// Steps of (second, up, connect failures, alive, expected verdict) through one monitor.
fn check(steps: &[(u64, bool, u32, bool, Verdict)]) {
    let start = Instant::now();
    let mut monitor = Monitor::default();
    for (second, up, connect_failures, alive, expected) in steps {
        let seen = Seen { up: *up, connect_failures: *connect_failures, alive: *alive, tripped: false };
        assert_eq!(monitor.observe(start + Duration::from_secs(*second), seen), *expected, "at {second} s");
    }
}

use Verdict::{BringBack, Keep, TakeOut};

#[test]
fn two_failed_probes_in_a_row_take_an_endpoint_out_and_one_does_not() {
    check(&[
        (0, IN, 0, true, Keep),
        (1, IN, 0, false, Keep),
        (2, IN, 0, true, Keep),
        (3, IN, 0, false, Keep),
        (4, IN, 0, false, TakeOut),
        (5, OUT, 0, false, Keep),
        (6, OUT, 0, true, BringBack),
    ]);
}

#[test]
fn an_endpoint_that_a_shard_took_out_comes_back_a_second_later_if_it_answers() {
    check(&[(0, OUT, 3, true, Keep), (1, OUT, 3, true, BringBack), (2, IN, 0, true, Keep)]);
}

#[test]
fn an_endpoint_whose_breaker_opened_is_out_for_half_a_minute() {
    let (start, mut monitor) = (Instant::now(), Monitor::default());
    let seen = Seen { up: false, connect_failures: 0, alive: true, tripped: true };
    for (second, expected) in [(0, Keep), (1, Keep), (29, Keep), (30, BringBack)] {
        assert_eq!(monitor.observe(start + Duration::from_secs(second), seen), expected, "at {second} s");
    }
}

#[test]
fn an_endpoint_that_answers_probes_but_no_requests_waits_longer_each_time() {
    check(&[
        (0, OUT, 1, true, Keep),
        (1, OUT, 1, true, BringBack),
        // It failed again with nothing answered: 2 s, then 4, to 30.
        (2, OUT, 2, true, Keep),
        (3, OUT, 2, true, Keep),
        (4, OUT, 2, true, BringBack),
        (5, OUT, 5, true, Keep),
        (8, OUT, 5, true, Keep),
        (9, OUT, 5, true, BringBack),
        (10, OUT, 6, true, Keep),
        (18, OUT, 6, true, BringBack),
        (19, OUT, 7, true, Keep),
        (35, OUT, 7, true, BringBack),
        (36, OUT, 8, true, Keep),
        (65, OUT, 8, true, Keep),
        (66, OUT, 8, true, BringBack),
        // A request was answered (the count began again): the next failure is a first one.
        (67, OUT, 1, true, Keep),
        (68, OUT, 1, true, BringBack),
    ]);
}

fn answer_once(bytes: &'static [u8]) -> SocketAddrOf {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        let mut request = [0; 1024];
        let read = stream.read(&mut request).expect("a request");
        assert!(request[..read].starts_with(b"GET /health HTTP/1.1\r\n"));
        stream.write_all(bytes).expect("the prober reads");
    });
    (address, thread)
}

type SocketAddrOf = (std::net::SocketAddr, std::thread::JoinHandle<()>);

#[test]
fn any_answer_below_500_is_alive() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    for (bytes, expected, alive) in [
        (b"HTTP/1.1 200 OK\r\n\r\n".as_slice(), Answer::Status(200), true),
        (b"HTTP/1.0 404 Not Found\r\n\r\n", Answer::Status(404), true),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", Answer::Status(503), false),
        (b"SSH-2.0-OpenSSH\r\n", Answer::None, false),
        (b"", Answer::None, false),
    ] {
        let (address, thread) = answer_once(bytes);
        let answer = runtime.block_on(probe(address, None, Duration::from_secs(10)));
        assert_eq!((answer.is_alive(), answer), (alive, expected));
        thread.join().expect("the server ends");
    }
    let gone = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port");
    assert_eq!(runtime.block_on(probe(gone, None, Duration::from_secs(10))), Answer::None);
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = silent.local_addr().expect("bound");
    assert_eq!(runtime.block_on(probe(address, None, Duration::from_millis(20))), Answer::None);
}
