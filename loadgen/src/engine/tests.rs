//! Whole engines over real sockets, on loopback and free ports.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::Shutdown;

use serde_json::{Value, json};

use super::client::{PATIENCE, call, connect, decode_all, eventually, get, post, replay_of, send, start};
use super::testing::Random;
use super::*;

/// The objects of a stream; the last line must be the end marker.
fn events(body: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(body).expect("events are text");
    let mut data: Vec<&str> =
        text.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").expect("an event has data")).collect();
    assert_eq!(data.pop(), Some("[DONE]"));
    data.into_iter().map(|data| serde_json::from_str(data).expect("an event is JSON")).collect()
}

#[test]
fn a_stream_says_what_the_whole_answer_says() {
    let engine = start(|_| ());
    for (path, prompt) in [
        ("/v1/completions", json!({"prompt": "the server reads the queue"})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "the server reads the queue"}]})),
    ] {
        let ask = |members: Value| {
            let mut body = prompt.clone();
            body.as_object_mut().expect("an object").extend(members.as_object().expect("an object").clone());
            body
        };
        let whole = post(&engine, path, ask(json!({"max_tokens": 9})));
        let streamed = ask(json!({"max_tokens": 9, "stream": true, "stream_options": {"include_usage": true}}));
        let (status, body) = call(&engine, "POST", path, streamed.to_string().as_bytes());
        assert_eq!(status, 200);
        let events = events(&body);
        let text: String = events
            .iter()
            .filter_map(|event| {
                event["choices"][0]["text"].as_str().or(event["choices"][0]["delta"]["content"].as_str())
            })
            .collect();
        let choice = &whole["choices"][0];
        assert_eq!(choice["text"].as_str().or(choice["message"]["content"].as_str()), Some(&*text), "{path}");
        assert_eq!(text.split_whitespace().count(), 9, "{path}");
        assert_eq!(choice["finish_reason"], "length");
        let usage = &events.last().expect("there are events")["usage"];
        assert_eq!(usage["prompt_tokens"], whole["usage"]["prompt_tokens"]);
        assert_eq!(usage["completion_tokens"], 9);
    }
}

#[test]
fn usage_tells_hits_up_to_the_last_token() {
    let engine = start(|options| options.block_size = 4);
    let cached = |length: u32| {
        let prompt: Vec<u32> = (0..length).collect();
        let answer = post(&engine, "/v1/completions", json!({"prompt": prompt, "max_tokens": 1}));
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].clone()
    };
    assert_eq!(cached(8), 0);
    assert_eq!(cached(8), 4);
    assert_eq!(cached(9), 8);
    assert_eq!(engine.cached_keys().map(|keys| keys.values().sum()), Some(3), "the second block has two copies");
}

#[test]
fn tokenize_gives_the_ids_that_are_hashed() {
    let engine = start(|options| options.block_size = 4);
    let chat = json!({"messages": [{"role": "user", "content": "the lake is under the bridge"}]});
    let tokens: Vec<u32> =
        serde_json::from_value(post(&engine, "/tokenize", chat.clone())["tokens"].clone()).expect("ids");
    let mut chat = chat;
    chat["max_tokens"] = json!(1);
    post(&engine, "/v1/chat/completions", chat);
    let chain = hash::vllm::Chain::new(Algo::Sha256Cbor, "0", Release::new(33, 0), 4, 0);
    let mut parent = chain.root();
    let mut keys: Vec<u64> = Vec::new();
    for (index, block) in tokens.chunks_exact(4).enumerate() {
        parent = chain.child(&parent, block, index == 0, &hash::Namespace::default());
        keys.push(parent.key());
    }
    let held = engine.cached_keys().expect("the engine runs");
    assert_eq!(held.len(), keys.len());
    assert!(keys.iter().all(|key| held.contains_key(key)));
}

#[test]
fn the_last_body_is_told_byte_by_byte() {
    let engine = start(|_| ());
    let body = b"{ \"prompt\" : \"x\\u0041\" ,  \"max_tokens\":1, \"odd\": [1.50, 1e3] }";
    assert_eq!(call(&engine, "POST", "/v1/completions", body).0, 200);
    let last = get(&engine, "/debug/last");
    assert_eq!(last["length"], body.len());
    assert_eq!(last["content_length"], body.len().to_string());
    let expected: String =
        <sha2::Sha256 as sha2::Digest>::digest(body).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(last["sha256"], expected);
}

#[test]
fn operators_paths_answer() {
    let engine = start(|options| options.wire = Release::new(23, 0));
    assert_eq!(call(&engine, "GET", "/health", b"").0, 200);
    assert_eq!(get(&engine, "/version")["version"], "0.23.0");
    assert_eq!(get(&engine, "/v1/models")["data"][0]["id"], crate::assets::DEMO_MODEL);
    let (_, metrics) = call(&engine, "GET", "/metrics", b"");
    let metrics = String::from_utf8(metrics).expect("metrics are text");
    for name in ["vllm:num_requests_running{", "vllm:kv_cache_usage_perc{", "prefix_caching_hash_algo=\"sha256_cbor\""]
    {
        assert!(metrics.contains(name), "{name} in {metrics}");
    }
    assert_eq!(call(&engine, "POST", "/v1/completions", b"{").0, 400);
}

#[test]
fn a_client_that_leaves_is_counted_and_its_slot_freed() {
    let slow = |options: &mut EngineOptions| {
        options.time_scale = 1.0;
        options.decode_tps = 10.0;
        options.max_running = 1;
    };
    let engine = start(slow);
    for (left, stream_answer) in [(1, true), (2, false)] {
        let body = json!({"prompt": "the queue", "max_tokens": 10_000, "ignore_eos": true, "stream": stream_answer})
            .to_string();
        let mut stream = connect(engine.http_addr);
        send(&mut stream, "POST", "/v1/completions", body.as_bytes());
        eventually("running", || engine.stats().running == 1);
        if stream_answer {
            stream.read_exact(&mut [0; 64]).expect("the answer begins");
        }
        stream.shutdown(Shutdown::Both).expect("the connection is open");
        drop(stream);
        eventually("the disconnect is counted", || engine.stats().disconnects == left);
        eventually("the slot is freed", || engine.stats().running == 0 && engine.stats().used_blocks == 0);
    }
    assert_eq!(engine.stats().completed, 0);
}

#[test]
fn a_client_that_leaves_within_its_body_is_counted() {
    let engine = start(|_| ());
    let mut stream = connect(engine.http_addr);
    stream.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{").expect("it reads");
    eventually("the request is seen", || engine.stats().requests == 1);
    drop(stream);
    eventually("the disconnect is counted", || engine.stats().disconnects == 1);
}

#[test]
fn more_requests_than_allowed_are_told_to_go_elsewhere() {
    let engine = start(|options| options.max_requests = 1);
    let (status, _) = call(&engine, "POST", "/v1/completions", json!({"prompt": [[1], [2]]}).to_string().as_bytes());
    assert_eq!(status, 503);
    assert_eq!(call(&engine, "POST", "/v1/completions", json!({"prompt": [1]}).to_string().as_bytes()).0, 200);
}

#[test]
fn a_stopped_engine_leaves_its_ports_to_the_next() {
    let first = start(|_| ());
    let port = |address: Option<SocketAddr>| address.expect("it is bound").port();
    let options = EngineOptions {
        port: first.http_addr.port(),
        event_port: port(first.event_addr),
        replay_port: Some(port(first.replay_addr)),
        ..EngineOptions::ephemeral()
    };
    let mut open = connect(first.http_addr);
    first.stop();
    assert_eq!(open.read(&mut [0]).unwrap_or(0), 0, "an open connection ends with the engine");
    let second = Engine::start(&options).expect("the ports are free again");
    assert_eq!(call(&second, "GET", "/health", b"").0, 200);
}

/// Applies a payload to copies per key, whichever the wire form.
fn apply(copies: &mut HashMap<u64, usize>, payload: &[u8]) {
    let batch = decode_all(payload);
    assert_eq!(batch[2], 0, "a batch ends with rank 0");
    for event in batch[1].as_array().expect("a batch has events") {
        let field = |place: usize, name: &str| if event.is_array() { &event[place] } else { &event[name] };
        let hashes =
            || field(1, "block_hashes").as_array().into_iter().flatten().map(|hash| hash.as_u64().expect("a key"));
        match field(0, "type").as_str() {
            Some("BlockStored") => hashes().for_each(|key| *copies.entry(key).or_default() += 1),
            Some("BlockRemoved") => hashes().for_each(|key| {
                let left = copies.get_mut(&key).expect("what is removed was stored");
                *left -= 1;
                if *left == 0 {
                    copies.remove(&key);
                }
            }),
            Some("AllBlocksCleared") => copies.clear(),
            other => panic!("unknown event {other:?}"),
        }
    }
}

fn replay(engine: &EngineHandle, start: u64) -> Vec<Vec<Vec<u8>>> {
    replay_of(engine, 0, start)
}

#[test]
fn both_replay_layouts_give_the_batches_asked_for() {
    for (wire, topic) in [(Release::new(23, 0), false), (Release::new(24, 0), false), (Release::new(33, 0), true)] {
        let engine = start(|options| (options.wire, options.topic) = (wire, "kv".to_owned()));
        for prompt in 0..3 {
            post(&engine, "/v1/completions", json!({"prompt": vec![prompt; 40], "max_tokens": 1}));
        }
        let mut messages = Vec::new();
        eventually("all is published", || {
            messages = replay(&engine, 1);
            messages.len() == 3
        });
        let frames = if topic { 3 } else { 2 };
        assert!(messages.iter().all(|message| message.len() == frames), "{wire}");
        let sequences: Vec<&[u8]> = messages.iter().map(|message| &*message[frames - 2]).collect();
        assert_eq!(sequences, [&1u64.to_be_bytes()[..], &2u64.to_be_bytes(), &u64::MAX.to_be_bytes()], "{wire}");
        assert!(messages[2][frames - 1].is_empty(), "{wire}");
        if topic {
            assert_eq!((&*messages[0][0], &*messages[2][0]), (&b"kv"[..], &b""[..]));
        }
    }
}

#[test]
fn the_published_stream_replayed_is_the_cache() {
    for (seed, wire) in [(1, Release::new(23, 0)), (2, Release::new(24, 0)), (3, Release::new(33, 0))] {
        let engine = start(|options| {
            (options.wire, options.block_size, options.blocks, options.max_batched_tokens) = (wire, 4, 24, 32);
        });
        let context = zmq::Context::new();
        let socket = context.socket(zmq::SUB).expect("a socket");
        socket.set_linger(0).and_then(|()| socket.set_rcvtimeo(PATIENCE.as_millis() as i32)).expect("options");
        socket.set_subscribe(b"").expect("a subscription");
        let monitor = "inproc://monitor";
        socket.monitor(monitor, zmq::SocketEvent::HANDSHAKE_SUCCEEDED as i32).expect("a monitor");
        let watch = context.socket(zmq::PAIR).expect("a socket");
        watch.connect(monitor).expect("the monitor is there");
        socket.connect(&format!("tcp://{}", engine.event_addr.expect("it is bound"))).expect("the address is right");
        watch.recv_multipart(0).expect("the handshake is told");

        let mut random = Random::new(seed);
        for number in 0..60 {
            let family = random.below(3) as u32 * 100;
            let prompt: Vec<u32> = (family..family + 1 + random.below(40) as u32).collect();
            post(&engine, "/v1/completions", json!({"prompt": prompt, "max_tokens": 1 + random.below(12)}));
            if number % 20 == 19 {
                assert_eq!(post(&engine, "/reset_prefix_cache", json!({}))["success"], true);
            }
        }
        post(&engine, "/v1/completions", json!({"prompt": vec![9; 12], "max_tokens": 1}));
        let total = engine.stats().batches;
        let mut copies = HashMap::new();
        // The subscription may reach the publisher after the first batches: replay gives those.
        let mut next = 0;
        while next < total {
            let frames = socket.recv_multipart(0).expect("the stream goes on");
            let sequence = u64::from_be_bytes(frames[1].as_slice().try_into().expect("8 bytes"));
            for missed in replay(&engine, next).iter().take((sequence - next) as usize) {
                apply(&mut copies, &missed[missed.len() - 1]);
            }
            apply(&mut copies, &frames[2]);
            next = sequence + 1;
        }
        assert_eq!(Some(copies), engine.cached_keys(), "{wire}");
    }
}

#[test]
fn nothing_here_uses_the_gateway_s_code() {
    let mut open = vec![std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/engine")];
    let mut files = 0;
    while let Some(path) = open.pop() {
        if path.is_dir() {
            let entries = std::fs::read_dir(path).expect("our own source is here");
            open.extend(entries.map(|entry| entry.expect("our own source can be listed").path()));
            continue;
        }
        let source = std::fs::read_to_string(&path).expect("our own source can be read");
        files += 1;
        for krate in ["shards", "kvlane"] {
            let uses = |line: &str| line.contains(&format!("{krate}::")) || line.contains(&format!("use {krate}"));
            let found = source.lines().find(|line| uses(line));
            assert_eq!(found, None, "{} uses the gateway's code", path.display());
        }
    }
    assert!(files > 30, "only {files} files were read");
}
