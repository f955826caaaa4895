//! What the engine receives is byte for byte what the client sent, through the real gateway process.

mod common;

use std::fmt::Write as _;

use common::client::Connection;
use common::engines::StubEngine;
use common::gateway::{Gateway, Options};
use common::{free_port, wait_for};

/// JSON that every re-serialiser changes: number spellings, escapes, white space, unknown members, a repeated key.
const ODD: &str = "{ \"model\":\"m\\u006fdel\" ,\n\t\"temperature\": 1.50, \"top_p\":1e3,  \"seed\" : -0.0,\r\n \
    \"prompt\":\"caf\\u00e9 \\/ \\ud83d\\ude00 \u{1F600} \\\"q\\\"\", \"kv_transfer_params\":{\"x\":[1.0,{\"y\":null}]}, \
    \"nested\":{\"unknown\":{\"deep\":[[],{},\"\"]}} , \"prompt\" : \"last one wins\", \"big\":123456789012345678901234567890 }";

fn gateway(engine: &StubEngine, mode: u8) -> (Gateway, u16) {
    let port = free_port();
    let config = format!(
        "[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {port}\nprotocol = \"tcp\"\nkvExactMode = {mode}\n\n\
         [[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = {}\nweight = 1\n",
        engine.address.port()
    );
    (Gateway::start(Options { config, ..Options::default() }), port)
}

#[test]
fn odd_spelling_arrives_unchanged_with_content_length_and_chunked() {
    for mode in [0, 3] {
        let engine = StubEngine::start();
        let (_gateway, port) = gateway(&engine, mode);
        let address = ([127, 0, 0, 1], port).into();
        for path in ["/v1/completions", "/v1/chat/completions", "/anything/else?x=%2F"] {
            let mut connection = Connection::open(address).expect("the gateway accepts");
            connection
                .request("POST", path, &[("Authorization", "Bearer s3cret"), ("X-Odd", "a  b")], ODD.as_bytes())
                .expect("sent");
            assert_eq!(connection.answer().expect("answered").status, 200);
            connection.send(chunked_request(path, ODD, 7).as_bytes()).expect("sent");
            assert_eq!(connection.answer().expect("answered").status, 200, "on the same connection");
        }
        let seen = wait_for("six requests arrive", || Some(engine.seen()).filter(|s| s.len() == 6));
        for request in seen {
            assert_eq!(String::from_utf8_lossy(&request.body), ODD, "{}", request.line);
            let has = |line: &str| request.headers.iter().any(|h| h == line);
            assert!(has("Host: test") && has("X-Odd: a  b"), "{:?}", request.headers);
            assert!(has("Authorization: Bearer s3cret"), "{:?}", request.headers);
        }
    }
}

/// The body in chunks of `size` bytes, the first with an extension.
fn chunked_request(path: &str, body: &str, size: usize) -> String {
    let mut text = format!(
        "POST {path} HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer s3cret\r\nX-Odd: a  b\r\n\
         Transfer-Encoding: chunked\r\n\r\n"
    );
    let mut rest = body;
    while !rest.is_empty() {
        let mut end = size.min(rest.len());
        while !rest.is_char_boundary(end) {
            end += 1;
        }
        let extension = if rest.len() == body.len() { ";odd=1" } else { "" };
        write!(text, "{end:x}{extension}\r\n{}\r\n", &rest[..end]).expect("a string takes all");
        rest = &rest[end..];
    }
    text + "0\r\n\r\n"
}

#[test]
fn large_bodies_pass_and_too_large_ones_are_refused() {
    let engine = StubEngine::start();
    let (_gateway, port) = gateway(&engine, 3);
    let address = ([127, 0, 0, 1], port).into();
    let body = format!("{{\"model\":\"m\",\"prompt\":\"{}\"}}", "lorem ipsum ".repeat(1_000_000));
    let mut connection = Connection::open(address).expect("the gateway accepts");
    connection.request("POST", "/v1/completions", &[], body.as_bytes()).expect("sent");
    assert_eq!(connection.answer().expect("answered").status, 200);
    assert_eq!(engine.seen()[0].body.len(), body.len());
    let mut connection = Connection::open(address).expect("the gateway accepts");
    let head = "POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: 67108865\r\n\r\n";
    connection.send(head.as_bytes()).expect("sent");
    assert_eq!(connection.answer().expect("refused before the body is sent").status, 413);
}
