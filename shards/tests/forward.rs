//! What goes through a shard arrives as it was sent, in order, both ways.

mod support;

use support::*;

#[test]
fn a_request_is_forwarded_and_its_answer_relayed_and_connections_are_kept() {
    for rung in RUNGS {
        let engine = Engine::echo("a");
        let gateway = Gateway::start(rung, limits(), &[engine.address]);
        let mut client = gateway.connect();
        for length in [0, 1, 4_000, 100_000, 3_000_000] {
            let answer = client.ask(post("/x", &vec![b'x'; length]));
            assert_eq!((answer.status(), answer.body), (200, format!("a {length}").into_bytes()), "{rung:?}");
        }
        assert_eq!(
            engine.connections.load(std::sync::atomic::Ordering::SeqCst),
            1,
            "{rung:?}: one upstream connection"
        );
        gateway.stop();
    }
}

#[test]
fn a_body_with_odd_spelling_arrives_byte_for_byte_and_so_do_headers() {
    let body = b"{ \"temperature\" : 1.50,\r\n\t\"top_p\":1e3, \"model\": \"\\u0041\\/b\", \"x\":{\"y\":[1 , 2.0 ,{}]} ,\"x\":1}\n ";
    for rung in RUNGS {
        let engine = Engine::echo("a");
        let gateway = Gateway::start(rung, limits(), &[engine.address]);
        let mut client = gateway.connect();
        let headers = "Host: Odd.Example:81\r\nAuthorization:  Bearer  s3cret \r\nx-ODD:\tvalue\r\nX-Odd: again\r\n";
        let mut request = format!(
            "POST /v1/x?a=%20b HTTP/1.1\r\n{headers}Connection: keep-alive, X-Gone\r\nX-Gone: 1\r\nContent-Length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        request.extend_from_slice(body);
        client.ask(&request);
        // The same in chunks of one, two, three … bytes, with extensions and trailers.
        let mut chunked =
            format!("POST /v1/x?a=%20b HTTP/1.1\r\n{headers}Transfer-Encoding:chunked\r\n\r\n").into_bytes();
        let mut rest = &body[..];
        for size in 1.. {
            let (part, left) = rest.split_at(size.min(rest.len()));
            chunked.extend_from_slice(format!("{:x};ext=\"1\"\r\n", part.len()).as_bytes());
            chunked.extend_from_slice(part);
            chunked.extend_from_slice(b"\r\n");
            rest = left;
            if rest.is_empty() {
                break;
            }
        }
        chunked.extend_from_slice(b"0\r\nX-Trailer: 1\r\n\r\n");
        // Also split in the middle of everything.
        for split in [chunked.len(), 150, chunked.len() - 3] {
            client.send(&chunked[..split]);
            std::thread::yield_now();
            client.send(&chunked[split..]);
            assert_eq!(client.read_message().expect("an answer").status(), 200);
        }
        let bodies = engine.bodies.lock().expect("no panic");
        assert_eq!(bodies.len(), 4);
        assert!(bodies.iter().all(|arrived| arrived == body), "{rung:?}");
        for head in engine.heads.lock().expect("no panic").iter() {
            let length = format!("Content-Length: {}\r\n", body.len());
            // Behind them stands the id that the gateway gave the request.
            let expected = format!("POST /v1/x?a=%20b HTTP/1.1\r\n{headers}{length}x-request-id: ");
            let id = head.strip_prefix(&expected).and_then(|rest| rest.strip_suffix("\r\n\r\n"));
            assert!(id.is_some_and(|id| id.len() == 32), "{rung:?} {head}");
        }
        gateway.stop();
    }
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    for rung in RUNGS {
        let engine = Engine::echo("a");
        let gateway = Gateway::start(rung, limits(), &[engine.address]);
        let mut client = gateway.connect();
        let mut requests = Vec::new();
        for length in 0..50 {
            requests.extend_from_slice(&post("/x", &vec![b'x'; length * 40]));
        }
        client.send(&requests);
        for length in 0..50 {
            let answer = client.read_message().expect("an answer");
            assert_eq!(answer.body, format!("a {}", length * 40).into_bytes(), "{rung:?}");
        }
        gateway.stop();
    }
}

#[test]
fn a_client_that_waits_for_100_continue_gets_it_and_then_the_answer() {
    for rung in RUNGS {
        let engine = Engine::echo("a");
        let gateway = Gateway::start(rung, limits(), &[engine.address]);
        let mut client = gateway.connect();
        let request = post("/x", b"12345");
        let head_end = request.len() - 5;
        let head = String::from_utf8(request[..head_end].to_vec()).expect("text");
        let head = head.replace("\r\n\r\n", "\r\nExpect: 100-continue\r\n\r\n");
        let interim = client.ask(head);
        assert_eq!(interim.status(), 100, "{rung:?}");
        let answer = client.ask("12345");
        assert_eq!(answer.body, b"a 5", "{rung:?}");
        assert!(!engine.heads.lock().expect("no panic")[0].contains("100-continue"));
        gateway.stop();
    }
}

#[test]
fn a_chunked_answer_is_relayed_byte_for_byte_as_it_comes() {
    for rung in RUNGS {
        let (told, tell) = std::sync::mpsc::channel::<()>();
        let tell = std::sync::Mutex::new(tell);
        let engine = Engine::start(move |served| {
            served.client.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nKeep-Alive: timeout=5\r\nConnection: keep-alive\r\n\r\n");
            served.client.send("0a;x=y\r\ndata: one\n\r\n");
            // The rest comes only once the client has seen the beginning.
            tell.lock().expect("no panic").recv().expect("the client has seen it");
            served.client.send("0002\r\n\n\n\r\n0\r\nX-T: 1\r\n\r\n");
            true
        });
        let gateway = Gateway::start(rung, limits(), &[engine.address]);
        let mut client = gateway.connect();
        client.send(GET);
        let head = client.read_until(b"\r\n\r\n").expect("a head");
        let head = String::from_utf8_lossy(&head);
        let (answered, id) = head.split_once("x-request-id: ").expect("the gateway's own line");
        assert_eq!(answered, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n");
        assert!(id.len() > 4 && id.ends_with("\r\n\r\n"), "{id:?}");
        assert_eq!(client.read_until(b"one\n\r\n").expect("a chunk"), b"0a;x=y\r\ndata: one\n\r\n");
        told.send(()).expect("the engine waits");
        assert_eq!(client.read_until(b"1\r\n\r\n").expect("the rest"), b"0002\r\n\n\n\r\n0\r\nX-T: 1\r\n\r\n");
        // The connection serves on.
        client.send(GET);
        told.send(()).expect("the engine waits");
        assert_eq!(client.read_message().expect("an answer").body, b"data: one\n\n\n");
        gateway.stop();
    }
}

#[test]
fn answers_without_a_length_and_clients_of_http_1_0_end_with_the_connection() {
    for rung in RUNGS {
        let engine = Engine::start(|served| {
            if served.request.head.starts_with("GET /close") {
                served.client.send("HTTP/1.0 200 OK\r\n\r\nuntil the end");
                return false;
            }
            served.client.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n");
            true
        });
        let gateway = Gateway::start(rung, limits(), &[engine.address]);
        let answer = gateway.connect().ask("GET /close HTTP/1.1\r\nHost: a\r\n\r\n");
        assert_eq!(answer.header("connection"), Some("close"));
        assert!(answer.head.starts_with("HTTP/1.1 200"));
        assert_eq!(answer.body, b"until the end");
        let answer = gateway.connect().ask("GET /chunks HTTP/1.0\r\n\r\n");
        assert_eq!((answer.header("transfer-encoding"), &answer.body[..]), (None, &b"abcde"[..]), "{rung:?}");
        gateway.stop();
    }
}

#[test]
fn answers_to_head_and_without_content_have_no_body_and_leave_the_connection_usable() {
    for rung in RUNGS {
        let engine = Engine::start(|served| {
            if served.request.head.starts_with("HEAD") {
                served.client.send("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n");
            } else if served.request.head.starts_with("DELETE") {
                served.client.send("HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n");
            } else {
                served.client.send(answer("x"));
            }
            true
        });
        let gateway = Gateway::start(rung, limits(), &[engine.address]);
        let mut client = gateway.connect();
        client.send(
            "HEAD / HTTP/1.1\r\nHost: a\r\n\r\nDELETE / HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
        );
        for status in ["HTTP/1.1 200", "HTTP/1.1 204"] {
            let head = client.read_until(b"\r\n\r\n").expect("a head");
            assert!(head.starts_with(status.as_bytes()), "{rung:?}");
        }
        assert_eq!(client.read_message().expect("an answer").body, b"x");
        gateway.stop();
    }
}

#[test]
fn malformed_and_oversized_requests_are_refused_and_the_connection_is_closed() {
    for rung in RUNGS {
        let engine = Engine::echo("a");
        let mut small = limits();
        (small.head_bytes_max, small.body_bytes_max, small.headers_max) = (500, 1000, 10);
        small.head_timeout = std::time::Duration::from_millis(300);
        small.body_timeout = std::time::Duration::from_millis(300);
        let gateway = Gateway::start(rung, small, &[engine.address]);
        for (request, status) in [
            ("GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned(), 400),
            ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n".to_owned(), 400),
            (format!("GET / HTTP/1.1\r\nHost: a\r\nA: {}\r\n\r\n", "b".repeat(600)), 431),
            (format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "A: b\r\n".repeat(20)), 431),
            ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1001\r\n\r\n".to_owned(), 413),
            (
                format!("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n{}", "b".repeat(2000)),
                413,
            ),
            // At once: waiting for what was announced would end in a 408.
            ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n".to_owned(), 413),
            (
                "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\nffffffffffffffff\r\n"
                    .to_owned(),
                413,
            ),
            ("GET / HTTP/1.1\r\nHost: a b@/\r\n\r\n".to_owned(), 400),
            ("CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n".to_owned(), 501),
            ("GET / HTTP/3.0\r\nHost: a\r\n\r\n".to_owned(), 505),
            ("GET / HTTP/1.1\r\nHos".to_owned(), 408),
            ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n12345".to_owned(), 408),
            (String::new(), 408),
        ] {
            let mut client = gateway.connect();
            let answer = client.ask(&request);
            assert_eq!(answer.status(), status, "{rung:?} {request:?}");
            let json: serde_json::Value = serde_json::from_slice(&answer.body).expect("JSON");
            assert!(json["error"].is_string());
            assert!(client.ends(), "{rung:?} {request:?}");
        }
        assert!(engine.heads.lock().expect("no panic").is_empty(), "nothing of these reached the engine");
        gateway.stop();
    }
}
