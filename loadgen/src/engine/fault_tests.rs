//! Every fault, over HTTP, as a consumer of the events or a client sees it.

use serde_json::{Value, json};

use super::client::{Subscriber, call, connect, decode_all, eventually, get, post, replay_of, send, start};
use super::{Algo, EngineHandle, EngineKind, EngineOptions, Release};

fn order(engine: &EngineHandle, fault: Value) {
    assert_eq!(post(engine, "/debug/fault", fault)["ok"], true);
}

fn refused(engine: &EngineHandle, fault: Value) -> String {
    let (status, body) = call(engine, "POST", "/debug/fault", fault.to_string().as_bytes());
    assert_eq!(status, 400);
    String::from_utf8_lossy(&body).into_owned()
}

/// Sends a prompt of two blocks that no other number shares.
fn prompt(engine: &EngineHandle, number: u32) -> Value {
    post(engine, "/v1/completions", json!({"prompt": vec![number; 33], "max_tokens": 1}))
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("usage tells hits")
}

/// Every event the engine can replay, decoded, with its number. Replay shows what was published without a race.
fn told(engine: &EngineHandle, batches: usize) -> Vec<(u64, Value)> {
    let mut told = Vec::new();
    eventually("all is published", || {
        told = replay_of(engine, 0, 0);
        told.len() > batches
    });
    told.pop();
    let read = |frames: Vec<Vec<u8>>| {
        let payload = &frames[frames.len() - 1];
        let number: [u8; 8] = frames[frames.len() - 2].as_slice().try_into().expect("8 bytes");
        (u64::from_be_bytes(number), decode_all(payload))
    };
    told.into_iter().map(read).collect()
}

fn types(batch: &Value) -> Vec<&str> {
    batch[1].as_array().expect("events").iter().filter_map(|event| event["type"].as_str()).collect()
}

/// A subscriber that has seen the engine's first batches, so that it surely is connected.
fn listening(engine: &EngineHandle) -> (Subscriber, u64) {
    let subscriber = Subscriber::of(engine, 0);
    let mut number = 1000;
    loop {
        prompt(engine, number);
        number += 1;
        if subscriber.is_ready() {
            let mut last = subscriber.next().0;
            while last + 1 < engine.stats().batches {
                last = subscriber.next().0;
            }
            return (subscriber, last);
        }
        assert!(number < 1900, "the subscription reaches the engine");
    }
}

#[test]
fn a_dropped_batch_is_a_gap_that_replay_fills_unless_it_is_lost() {
    let engine = start(|_| ());
    let (subscriber, last) = listening(&engine);
    for (lost, first) in [(false, 1), (true, 11)] {
        order(&engine, json!({"fault": "drop", "value": 2, "lost": lost}));
        (first..first + 3).for_each(|number| drop(prompt(&engine, number)));
        let gap = if lost { last + 4 } else { last + 1 };
        assert_eq!(subscriber.next().0, gap + 2, "two numbers are missing");
        let numbers: Vec<u64> = told(&engine, 0).into_iter().map(|(number, _)| number).collect();
        assert_eq!(numbers.contains(&gap), !lost);
        assert_eq!(numbers.contains(&(gap + 1)), !lost);
    }
}

#[test]
fn a_restart_begins_at_0_with_an_empty_cache() {
    let engine = start(|_| ());
    prompt(&engine, 1);
    prompt(&engine, 2);
    order(&engine, json!({"fault": "restart"}));
    assert_eq!(engine.cached_keys().map(|keys| keys.len()), Some(0));
    assert_eq!(cached(&prompt(&engine, 1)), 0);
    eventually("replay knows the new process only", || {
        told(&engine, 1).iter().map(|(number, _)| *number).collect::<Vec<_>>() == [0]
    });
}

#[test]
fn a_clear_is_told_by_vllm_with_its_next_step() {
    let engine = start(|_| ());
    prompt(&engine, 1);
    order(&engine, json!({"fault": "clear"}));
    assert_eq!(engine.cached_keys().map(|keys| keys.len()), Some(0));
    assert_eq!(engine.stats().batches, 1);
    prompt(&engine, 1);
    assert_eq!(types(&told(&engine, 2)[1].1), ["AllBlocksCleared", "BlockStored"]);
}

#[test]
fn a_silent_engine_works_and_says_nothing() {
    let engine = start(|options| options.faults = vec!["silence".parse().expect("a fault")]);
    prompt(&engine, 1);
    assert_eq!(cached(&prompt(&engine, 1)), 32);
    assert_eq!(engine.stats().batches, 0);
    order(&engine, json!({"fault": "silence", "value": false}));
    prompt(&engine, 2);
    assert_eq!(engine.stats().batches, 1);
}

#[test]
fn a_wrong_leg_changes_the_names_of_blocks() {
    let held = |faults: &[Value]| {
        let engine = start(|_| ());
        faults.iter().for_each(|fault| order(&engine, fault.clone()));
        prompt(&engine, 1);
        let mut keys: Vec<u64> = engine.cached_keys().expect("it runs").into_keys().collect();
        keys.sort_unstable();
        keys
    };
    let same = |change: fn(&mut EngineOptions)| {
        let engine = start(change);
        prompt(&engine, 1);
        let mut keys: Vec<u64> = engine.cached_keys().expect("it runs").into_keys().collect();
        keys.sort_unstable();
        keys
    };
    assert_eq!(held(&[]), same(|_| ()));
    assert_eq!(held(&[json!({"fault": "block_size", "value": 8})]), same(|o| o.block_size = 8));
    assert_eq!(held(&[json!({"fault": "seed", "value": "7"})]), same(|o| o.seed = "7".to_owned()));
    for (name, change) in [
        ("sha256", (|o| o.algo = Algo::Sha256) as fn(&mut EngineOptions)),
        ("xxhash", |o| o.algo = Algo::Xxhash),
        ("xxhash_cbor", |o| o.algo = Algo::XxhashCbor),
    ] {
        let keys = held(&[json!({"fault": "algorithm", "value": name})]);
        assert_eq!(keys, same(change), "{name}");
        assert_ne!(keys, held(&[]), "{name}");
    }
}

#[test]
fn another_template_gives_other_tokens_and_another_model_another_name() {
    let engine = start(|_| ());
    let chat = json!({"messages": [{"role": "user", "content": "the lake"}]});
    let before = post(&engine, "/tokenize", chat.clone());
    order(&engine, json!({"fault": "template", "value": "{{ messages[0].content }}"}));
    let after = post(&engine, "/tokenize", chat);
    assert!(after["count"].as_u64() < before["count"].as_u64());
    assert_eq!(
        after["tokens"],
        post(&engine, "/tokenize", json!({"prompt": "the lake", "add_special_tokens": false}))["tokens"]
    );
    assert!(refused(&engine, json!({"fault": "template", "value": "{% if"})).contains("syntax"));
    order(&engine, json!({"fault": "model", "value": "other/model"}));
    assert_eq!(get(&engine, "/v1/models")["data"][0]["id"], "other/model");
    let body = json!({"prompt": "x", "model": crate::assets::DEMO_MODEL}).to_string();
    assert_eq!(call(&engine, "POST", "/v1/completions", body.as_bytes()).0, 404);
}

#[test]
fn a_malformed_event_stands_between_good_ones_and_a_malformed_payload_before_them() {
    for wire in [Release::new(23, 0), Release::new(33, 0)] {
        let engine = start(|options| (options.wire, options.blocks) = (wire, 3));
        prompt(&engine, 1);
        order(&engine, json!({"fault": "malformed"}));
        prompt(&engine, 2);
        let batch = &told(&engine, 2)[1].1;
        let events = batch[1].as_array().expect("events");
        let hashes = |event: &Value| if event.is_array() { event[1].clone() } else { event["block_hashes"].clone() };
        let odd: Vec<usize> = (0..events.len()).filter(|place| hashes(&events[*place]).is_string()).collect();
        assert_eq!(odd.len(), 1, "{batch}");
        assert!(odd[0] > 0 && odd[0] + 1 < events.len(), "{batch}");
    }
    let engine = start(|_| ());
    order(&engine, json!({"fault": "malformed", "value": "payload"}));
    prompt(&engine, 1);
    let mut messages = Vec::new();
    eventually("both are published", || {
        messages = replay_of(&engine, 0, 0);
        messages.len() == 3
    });
    assert_eq!(messages[0].last().map(|payload| payload[0]), Some(0xc1));
    assert_eq!(types(&decode_all(messages[1].last().expect("a payload"))), ["BlockStored"]);
}

#[test]
fn a_phantom_clear_is_told_and_not_done() {
    let engine = start(|_| ());
    prompt(&engine, 1);
    order(&engine, json!({"fault": "phantom_clear"}));
    assert_eq!(types(&told(&engine, 2)[1].1), ["AllBlocksCleared"]);
    assert_eq!(cached(&prompt(&engine, 1)), 32);
}

#[test]
fn a_huge_batch_is_one_event_whose_blocks_the_cache_holds() {
    let engine = start(|options| options.blocks = 12_600);
    order(&engine, json!({"fault": "huge"}));
    let batch = &told(&engine, 1)[0].1;
    assert_eq!(batch[1][0]["token_ids"].as_array().map(Vec::len), Some(200_000));
    assert_eq!(batch[1][0]["block_hashes"].as_array().map(Vec::len), Some(12_500));
    assert_eq!(engine.cached_keys().map(|keys| keys.len()), Some(12_500));
    assert!(refused(&start(|_| ()), json!({"fault": "huge"})).contains("--blocks"));
}

#[test]
fn the_health_check_fails_or_stalls() {
    let engine = start(|_| ());
    order(&engine, json!({"fault": "health", "value": "fail"}));
    assert_eq!(call(&engine, "GET", "/health", b"").0, 503);
    order(&engine, json!({"fault": "health"}));
    let mut stalled = connect(engine.http_addr);
    send(&mut stalled, "GET", "/health", b"");
    // Another request is answered meanwhile; the stalled one has nothing to read.
    prompt(&engine, 1);
    stalled.set_nonblocking(true).expect("an option");
    let nothing = std::io::Read::read(&mut stalled, &mut [0]).map_err(|error| error.kind());
    assert_eq!(nothing, Err(std::io::ErrorKind::WouldBlock));
    order(&engine, json!({"fault": "health", "value": "ok"}));
    assert_eq!(call(&engine, "GET", "/health", b"").0, 200);
}

#[test]
fn a_second_drainer_takes_events_from_the_first() {
    let engine = start(|options| options.kind = EngineKind::Trtllm);
    order(&engine, json!({"fault": "second_drainer"}));
    prompt(&engine, 1);
    eventually("the second drainer has events", || engine.stats().stolen_events >= 2);
    order(&engine, json!({"fault": "second_drainer", "value": false}));
    assert!(refused(&start(|_| ()), json!({"fault": "second_drainer"})).contains("TensorRT-LLM"));
}

#[test]
fn a_fault_may_be_one_rank_s() {
    let engine = start(|options| options.dp = 2);
    for rank in ["0", "1"] {
        let mut stream = connect(engine.http_addr);
        let body = json!({"prompt": vec![1; 33], "max_tokens": 1}).to_string();
        let header = format!("X-data-parallel-rank: {rank}\r\n");
        super::client::send_with(&mut stream, "POST", "/v1/completions", &header, body.as_bytes());
        assert_eq!(super::client::receive(stream).0, 200);
    }
    order(&engine, json!({"fault": "restart", "rank": 1}));
    assert_eq!(engine.cached_keys_of(0).map(|keys| keys.len()), Some(2));
    assert_eq!(engine.cached_keys_of(1).map(|keys| keys.len()), Some(0));
    assert!(refused(&engine, json!({"fault": "restart", "rank": 2})).contains("there are 2"));
}

#[test]
fn what_a_kind_cannot_suffer_is_refused() {
    for (kind, fault, named) in [
        (EngineKind::Llamacpp, "silence", "no events"),
        (EngineKind::Sglang, "seed", "only vLLM"),
        (EngineKind::Trtllm, "clear", "no event"),
        (EngineKind::Vllm, "second_drainer", "only TensorRT-LLM"),
    ] {
        let engine = start(|options| options.kind = kind);
        let value = if fault == "seed" { json!("7") } else { Value::Null };
        assert!(refused(&engine, json!({"fault": fault, "value": value})).contains(named), "{fault}");
    }
}

#[test]
fn dropped_events_of_the_drain_are_a_gap_in_their_numbers() {
    let engine = start(|options| options.kind = EngineKind::Trtllm);
    let ids = |engine: &EngineHandle| {
        let events = post(engine, "/kv_cache_events", json!({}));
        let ids = events.as_array().expect("a list").iter().filter_map(|event| event["event_id"].as_u64());
        ids.collect::<Vec<_>>()
    };
    assert_eq!(ids(&engine), [0]);
    order(&engine, json!({"fault": "drop"}));
    prompt(&engine, 1);
    prompt(&engine, 2);
    assert!(ids(&engine)[0] > 1, "the first prompt's events are missing");
    order(&engine, json!({"fault": "restart"}));
    assert_eq!(ids(&engine), [0], "a new process tells its pool first");
    order(&engine, json!({"fault": "malformed"}));
    prompt(&engine, 3);
    let events = post(&engine, "/kv_cache_events", json!({}));
    let odd = events.as_array().expect("a list").iter().filter(|event| event["data"]["blocks"].is_string());
    assert_eq!(odd.count(), 1);
}
