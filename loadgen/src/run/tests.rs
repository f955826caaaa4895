//! Both runtimes against a scripted server on loopback.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::report::RuntimeUsed;

const STREAM: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: {\"choices\":[{\"delta\":{\"content\":\"b\"}}]}\n\n\
    data: {\"choices\":[],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n";

/// Answers every request with `answer`; counts connections; ends with the process.
fn serve(answer: String) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let connections = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&connections);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            counter.fetch_add(1, Ordering::SeqCst);
            let answer = answer.clone();
            std::thread::spawn(move || answer_all(stream.unwrap(), &answer));
        }
    });
    (url, connections)
}

fn answer_all(mut stream: TcpStream, answer: &str) {
    let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
    while let Ok(read @ 1..) = stream.read(&mut buffer) {
        bytes.extend_from_slice(&buffer[..read]);
        let Some(head) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else { continue };
        let text = String::from_utf8_lossy(&bytes[..head]).to_ascii_lowercase();
        let length = text.split("content-length: ").nth(1).unwrap().lines().next().unwrap().parse::<usize>().unwrap();
        if bytes.len() < head + 4 + length {
            continue;
        }
        bytes.drain(..head + 4 + length);
        if stream.write_all(answer.as_bytes()).is_err() || !answer.contains("ontent-") {
            return;
        }
    }
}

fn chunked(body: &str) -> String {
    let half = body.len() / 2;
    let (a, b) = body.split_at(half);
    format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{a}\r\n{:x}\r\n{b}\r\n0\r\n\r\n",
        a.len(),
        b.len()
    )
}

fn args(url: &str, runtime: RuntimeChoice) -> CommonArgs {
    CommonArgs {
        url: url.to_owned(),
        model: "m".to_owned(),
        cores: None,
        runtime,
        timeout: 5.0,
        in_flight_max: 64,
        seed: 1,
        json: None,
    }
}

fn play(url: &str, runtime: RuntimeChoice, pace: Pace, requests: usize) -> Report {
    let chat = ChatArgs {
        sessions: 4,
        turns: 3,
        system_prompts: 1,
        system_tokens: 20,
        user_tokens: 5,
        reply_tokens: 5,
        max_tokens: 2,
    };
    let common = args(url, runtime);
    let workload = Workload::Chat(ChatWorkload::new(chat.shape(&common)));
    common.play(workload, pace, "test".to_owned(), Duration::from_secs(60), requests).unwrap()
}

#[test]
fn a_closed_loop_keeps_its_connections_and_counts_hits_on_both_runtimes() {
    for runtime in [RuntimeChoice::Auto, RuntimeChoice::Epoll] {
        let (url, connections) = serve(chunked(&format!("{STREAM}data: [DONE]\n\n")));
        let report = play(&url, runtime, Pace::Closed { clients: 3 }, 40);
        let seen = &report.seen;
        assert_eq!((seen.sent, seen.completed, seen.errors()), (40, 40, 0), "{}", report.to_text());
        assert_eq!((seen.prompt_tokens, seen.cached_tokens, seen.completion_tokens), (400, 160, 80));
        assert_eq!((seen.ttft.count(), seen.inter_token.count()), (40, 40));
        assert!(
            (1..=3).contains(&connections.load(Ordering::SeqCst)),
            "{} connections",
            connections.load(Ordering::SeqCst)
        );
        if runtime == RuntimeChoice::Epoll {
            assert!(matches!(report.runtime, RuntimeUsed::Epoll { .. }), "{:?}", report.runtime);
        }
    }
}

#[test]
fn an_open_loop_sends_every_request_once_and_measures_its_lag() {
    for runtime in [RuntimeChoice::Auto, RuntimeChoice::Epoll] {
        let (url, _) = serve(chunked(&format!("{STREAM}data: [DONE]\n\n")));
        let arrivals: Vec<Duration> = (0..30).map(Duration::from_millis).collect();
        let report = play(&url, runtime, Pace::Open { arrivals: arrivals.into() }, usize::MAX);
        assert_eq!((report.seen.completed, report.seen.lag.count()), (30, 30), "{}", report.to_text());
    }
}

#[test]
fn latency_counts_from_the_intended_time_when_the_generator_must_wait() {
    // One request at a time is allowed, and all are due at once: the last one's latency covers those before it.
    let answer = chunked(&format!("{STREAM}data: [DONE]\n\n"));
    let (url, _) = serve(answer);
    let mut common = args(&url, RuntimeChoice::Auto);
    common.in_flight_max = 1;
    let request = Request { api: Api::Chat, body: b"{}".to_vec() };
    let pace = Pace::Open { arrivals: vec![Duration::ZERO; 50].into() };
    let report =
        common.play(Workload::Fixed(request), pace, String::new(), Duration::from_secs(60), usize::MAX).unwrap();
    assert_eq!(report.seen.completed, 50);
    assert!(report.seen.lag.quantile_ms(1.0) > report.seen.lag.quantile_ms(0.0));
    assert!(report.seen.total.quantile_ms(1.0) >= report.seen.lag.quantile_ms(1.0));
}

#[test]
fn errors_are_told_apart_by_kind() {
    let (closed, _) = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        (format!("http://{}", listener.local_addr().unwrap()), ())
    };
    let cases = [
        ("status_5xx", serve("HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n".to_owned()).0),
        ("status_4xx", serve("HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n".to_owned()).0),
        ("broken_stream", serve("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab".to_owned()).0),
        ("bad_body", serve("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab".to_owned()).0),
        ("stream_error", serve(chunked(STREAM)).0),
        ("connect", closed),
    ];
    for (kind, url) in cases {
        let report = play(&url, RuntimeChoice::Auto, Pace::Closed { clients: 1 }, 3).to_json();
        assert_eq!(report["requests"]["errors_by_kind"], serde_json::json!({ kind: 3 }), "{report}");
    }
}

#[test]
fn a_server_that_says_nothing_is_a_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut common = args(&format!("http://{}", listener.local_addr().unwrap()), RuntimeChoice::Auto);
    common.timeout = 0.05;
    let workload = Workload::Fixed(Request { api: Api::Chat, body: b"{}".to_vec() });
    let report = common.play(workload, Pace::Closed { clients: 2 }, String::new(), Duration::from_secs(60), 4).unwrap();
    assert_eq!(report.to_json()["requests"]["errors_by_kind"], serde_json::json!({ "timeout": 4 }));
}

#[test]
fn poisson_and_even_arrivals_have_the_rate_asked_for() {
    let ten = Duration::from_secs(10);
    let even = arrivals(100.0, true, ten, usize::MAX, 1).unwrap();
    assert!((1000..=1001).contains(&even.len()));
    let poisson = arrivals(100.0, false, ten, usize::MAX, 1).unwrap();
    assert!((850..1150).contains(&poisson.len()), "{}", poisson.len());
    assert_eq!(poisson, arrivals(100.0, false, ten, usize::MAX, 1).unwrap());
    assert_eq!(arrivals(100.0, false, ten, 7, 1).unwrap().len(), 7);
    assert!(arrivals(0.0, true, ten, usize::MAX, 1).is_err());
    assert!(arrivals(1e9, true, ten, usize::MAX, 1).is_err());
}
