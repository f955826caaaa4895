//! What each engine kind does in its own way, as a client and a consumer of its events see it.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};

use super::client::{call, connect, decode_all, eventually, get, post, receive, replay_of, send_with, start};
use super::testing::Random;
use super::{EngineHandle, EngineKind, EngineOptions, Release, SglangRelease, TrtllmRelease};

fn complete(engine: &EngineHandle, prompt: Vec<u32>, members: Value) -> Value {
    let mut body = json!({"prompt": prompt, "max_tokens": 1});
    body.as_object_mut().expect("an object").extend(members.as_object().expect("an object").clone());
    post(engine, "/v1/completions", body)
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("usage tells hits")
}

/// Events that a rank has published, once there are as many batches.
fn events(engine: &EngineHandle, rank: u16, batches: usize) -> Vec<Value> {
    let mut messages = Vec::new();
    eventually("all is published", || {
        messages = replay_of(engine, rank, 0);
        messages.len() > batches
    });
    messages.pop();
    let payloads = messages.iter().map(|frames| decode_all(frames.last().expect("a payload")));
    payloads
        .flat_map(|batch| {
            assert_eq!(batch[2], rank, "a batch tells its rank");
            batch[1].as_array().expect("events").clone()
        })
        .collect()
}

fn of<'a>(events: &'a [Value], name: &str, wanted: &Value) -> Vec<&'a Value> {
    events.iter().filter(|event| event[name] == *wanted).collect()
}

#[test]
fn vllm_s_adapters_have_cards_and_blocks_of_their_own() {
    let engine = start(|options| {
        options.loras = ["sql=/models/sql", "code=/models/code"].map(|text| text.parse().expect("a pair")).into();
    });
    let cards = get(&engine, "/v1/models")["data"].clone();
    assert_eq!((&cards[1]["id"], &cards[1]["root"]), (&json!("sql"), &json!("/models/sql")));
    assert_eq!(cards[1]["parent"], cards[0]["id"]);
    for (model, hits) in [("sql", 0), ("code", 0), ("sql", 32)] {
        let answer = complete(&engine, vec![1; 33], json!({"model": model}));
        assert_eq!((cached(&answer), &answer["model"]), (hits, &json!(model)));
    }
    let events = events(&engine, 0, 2);
    assert_eq!((&events[1]["lora_id"], &events[1]["lora_name"]), (&json!(2), &json!("code")));
    assert_eq!(events[1]["extra_keys"], json!([["code"], ["code"]]));
    assert_eq!(engine.cached_keys().map(|keys| keys.len()), Some(4));
}

#[test]
fn ranks_have_caches_and_streams_of_their_own() {
    let engine = start(|options| options.dp = 3);
    let ask = |header: &str| {
        let mut stream = connect(engine.http_addr);
        let body = json!({"prompt": vec![1; 33], "max_tokens": 1}).to_string();
        send_with(&mut stream, "POST", "/v1/completions", header, body.as_bytes());
        receive(stream)
    };
    assert_eq!(ask("X-data-parallel-rank: 1\r\n").0, 200);
    assert_eq!([0, 1, 2].map(|rank| engine.cached_keys_of(rank).map(|keys| keys.len())), [Some(0), Some(2), Some(0)]);
    assert_eq!(events(&engine, 1, 1).len(), 1);
    assert_eq!(ask("X-data-parallel-rank: 3\r\n").0, 400);
    assert_eq!(ask("X-data-parallel-rank: one\r\n").0, 400);
    (0..3).for_each(|_| assert_eq!(ask("").0, 200));
    let held = get(&engine, "/debug/blocks");
    assert_eq!(held["ranks"].as_array().map(Vec::len), Some(3));
    assert!([0, 1, 2].iter().all(|rank| engine.cached_keys_of(*rank).is_some_and(|keys| !keys.is_empty())));
    assert_eq!(get(&engine, "/kv_event_sources").as_object().map(serde_json::Map::len), Some(3));
}

#[test]
fn ranks_without_a_seed_name_equal_blocks_differently() {
    let engine = start(|options| (options.dp, options.seed, options.wire) = (2, "none".into(), Release::new(28, 0)));
    (0..2).for_each(|_| drop(complete(&engine, vec![1; 33], json!({}))));
    assert_eq!(engine.cached_keys().map(|keys| keys.len()), Some(4));
}

#[test]
fn no_replay_is_none_whatever_the_port() {
    let engine = start(|options| options.no_replay = true);
    assert_eq!(engine.replay_addr, None);
    assert_eq!(get(&engine, "/kv_event_sources")["0"]["replay_endpoint"], Value::Null);
}

#[test]
fn a_host_tier_is_told_by_placeholders() {
    for wire in [Release::new(33, 0), Release::new(24, 0)] {
        let engine = start(|options| (options.wire, options.cpu_blocks) = (wire, 3));
        (1..=2).for_each(|number| drop(complete(&engine, vec![number; 33], json!({}))));
        let events = events(&engine, 0, 2);
        let host = of(&events, "medium", &json!("CPU"));
        let kinds: Vec<_> = host.iter().map(|event| event["type"].as_str().unwrap_or_default()).collect();
        assert_eq!(kinds.iter().filter(|kind| **kind == "BlockStored").count(), 4);
        assert_eq!(kinds.iter().filter(|kind| **kind == "BlockRemoved").count(), 1, "the fourth finds no room");
        assert_eq!((&host[0]["token_ids"], &host[0]["block_size"]), (&json!([]), &json!(0)));
    }
}

#[test]
fn a_hybrid_model_tells_its_window_as_a_second_group() {
    let engine = start(|options| (options.window, options.blocks) = (20, 6));
    complete(&engine, vec![1; 65], json!({}));
    complete(&engine, vec![2; 65], json!({}));
    let events = events(&engine, 0, 2);
    let second = of(&events, "group_idx", &json!(1));
    assert_eq!(second[0]["kv_cache_spec_kind"], "sliding_window");
    assert_eq!(second[0]["block_hashes"].as_array().map(Vec::len), Some(2), "20 tokens reach into two blocks");
    assert_eq!(second[0]["token_ids"].as_array().map(Vec::len), Some(64));
    let gone =
        |group: u64| of(&events, "group_idx", &json!(group)).iter().filter(|e| e["type"] == "BlockRemoved").count();
    assert!(gone(0) > 0 && gone(1) <= 2, "what was never told of the window is not removed from it");
}

#[test]
fn look_ahead_enters_hashes_from_0_33_and_costs_a_block_before() {
    let engine = start(|options| options.lookahead = 1);
    assert_eq!(cached(&complete(&engine, vec![1; 33], json!({}))), 0);
    assert_eq!(cached(&complete(&engine, vec![1; 33], json!({}))), 32);
    assert_eq!(events(&engine, 0, 1)[0]["lookahead_token_ids"], json!([[1], [1]]));
    let other = complete(&engine, [vec![1; 32], vec![2]].concat(), json!({}));
    assert_eq!(cached(&other), 16, "the token after the second block is another");
    let old = start(|options| (options.lookahead, options.wire) = (1, Release::new(32, 0)));
    (0..2).for_each(|_| drop(complete(&old, vec![1; 33], json!({}))));
    assert_eq!(cached(&complete(&old, vec![1; 33], json!({}))), 16);
}

fn sglang(change: impl FnOnce(&mut EngineOptions)) -> EngineHandle {
    start(|options| {
        (options.kind, options.block_size) = (EngineKind::Sglang, 4);
        change(options);
    })
}

#[test]
fn sglang_tells_pages_once_and_hits_all_but_the_last_token() {
    let engine = sglang(|_| ());
    let prompt: Vec<u32> = (1..=8).collect();
    assert_eq!(cached(&complete(&engine, prompt.clone(), json!({}))), 0);
    assert_eq!(cached(&complete(&engine, prompt, json!({}))), 4);
    complete(&engine, (1..=12).collect::<Vec<u32>>(), json!({}));
    let events = events(&engine, 0, 3);
    let kinds: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap_or_default()).collect();
    assert_eq!(kinds, ["AllBlocksCleared", "BlockStored", "BlockStored"]);
    // The contract's scenario of a real tree.
    assert_eq!(events[1]["block_hashes"], json!([-3_488_128_144_981_237_669_i64, 5_674_439_469_042_975_057_i64]));
    assert_eq!(events[2]["block_hashes"], json!([-1_307_369_107_475_853_156_i64]));
    assert_eq!(events[2]["parent_block_hash"], json!(5_674_439_469_042_975_057_i64));
}

#[test]
fn sglang_s_eagle_pages_are_pairs() {
    let engine = sglang(|options| options.lookahead = 1);
    complete(&engine, (1..=9).collect::<Vec<u32>>(), json!({}));
    let answer = complete(&engine, (1..=9).collect::<Vec<u32>>(), json!({}));
    assert_eq!(cached(&answer), 4, "floor((9 - 2) / 4) pages");
    let stored = &events(&engine, 0, 2)[1];
    assert_eq!(stored["block_hashes"], json!([-638_950_109_823_820_341_i64, -4_369_944_537_645_631_836_i64]));
    assert_eq!(stored["token_ids"][7], json!([8, 9]));
}

#[test]
fn sglang_s_generate_answers_whole_and_streamed() {
    let engine = sglang(|options| options.dp = 2);
    let body = json!({"input_ids": vec![1; 9], "sampling_params": {"max_new_tokens": 3, "ignore_eos": true},
        "data_parallel_rank": 1});
    let whole = post(&engine, "/generate", body.clone());
    let meta = &whole["meta_info"];
    assert_eq!(
        (&meta["dp_rank"], &meta["prompt_tokens"], &meta["completion_tokens"]),
        (&json!(1), &json!(9), &json!(3))
    );
    assert_eq!(meta["finish_reason"], json!({"type": "length", "length": 3}));
    assert_eq!(whole["output_ids"].as_array().map(Vec::len), Some(3));
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let (_, bytes) = call(&engine, "POST", "/generate", streamed.to_string().as_bytes());
    let text = String::from_utf8(bytes).expect("events are text");
    let data: Vec<&str> = text.split_terminator("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
    assert_eq!((data.len(), data.last()), (4, Some(&"[DONE]")));
    let last: Value = serde_json::from_str(data[2]).expect("an object");
    assert_eq!((&last["text"], &last["meta_info"]["cached_tokens"]), (&whole["text"], &json!(8)));
}

#[test]
fn sglang_describes_itself() {
    let engine = sglang(|options| options.dp = 2);
    let info = get(&engine, "/server_info");
    assert_eq!((&info["version"], &info["page_size"], &info["dp_size"]), (&json!("0.5.23"), &json!(4), &json!(2)));
    assert_eq!(info["kv_events"]["endpoint_port_base"], engine.event_addr.expect("it is bound").port());
    assert_eq!(info["kv_events"]["replay_endpoint_port_base"], engine.replay_addr.expect("it is bound").port());
    let old = sglang(|options| options.sglang_release = SglangRelease::new(12));
    assert_eq!(get(&old, "/server_info")["kv_events"], Value::Null);
    assert_eq!(get(&old, "/get_model_info")["served_model_name"], crate::assets::DEMO_MODEL);
}

#[test]
fn sglang_s_salt_and_extra_key_part_its_tree() {
    let engine = sglang(|_| ());
    for (members, hits) in [
        (json!({}), 0),
        (json!({"cache_salt": "a"}), 0),
        (json!({"extra_key": "x"}), 0),
        (json!({"extra_key": "x"}), 8),
        (json!({"cache_salt": "a"}), 8),
    ] {
        assert_eq!(cached(&complete(&engine, vec![1; 9], members.clone())), hits, "{members}");
    }
    let copies = engine.cached_keys().expect("it runs");
    assert_eq!((copies.len(), copies.values().sum::<usize>()), (4, 6), "an extra key is not in the name of a page");
}

#[test]
fn sglang_s_stream_replayed_is_its_tree_in_every_era() {
    for (seed, release) in [(1, 8), (2, 17), (3, 19), (4, 21), (5, 23)] {
        let engine = sglang(|options| {
            // The host tier is told from 0.5.11.
            options.cpu_blocks = if release >= 11 { 40 } else { 0 };
            (options.sglang_release, options.blocks) = (SglangRelease::new(release), 24);
        });
        let mut random = Random::new(seed);
        for number in 0..50 {
            let family = random.below(3) as u32 * 100;
            let prompt: Vec<u32> = (family..family + 1 + random.below(40) as u32).collect();
            complete(&engine, prompt, json!({"max_tokens": 1 + random.below(12)}));
            if number == 25 {
                assert_eq!(call(&engine, "POST", "/flush_cache", b"").0, 200);
            }
        }
        let batches = engine.stats().batches as usize;
        let mut tiers: HashMap<String, HashSet<i64>> = HashMap::new();
        for event in events(&engine, 0, batches) {
            let field =
                |place: usize, name: &str| if event.is_array() { event[place].clone() } else { event[name].clone() };
            let kind = field(0, "type");
            let place = if kind == "BlockRemoved" { 2 } else { 6 };
            let medium = field(place, "medium").as_str().unwrap_or("GPU").to_owned();
            let hashes = field(1, "block_hashes");
            let hashes: Vec<i64> = serde_json::from_value(hashes).unwrap_or_default();
            let tier = tiers.entry(medium).or_default();
            match kind.as_str() {
                Some("BlockStored") => tier.extend(hashes),
                Some("BlockRemoved") => hashes.iter().for_each(|hash| assert!(tier.remove(hash), "0.5.{release}")),
                _ => tiers.clear(),
            }
        }
        let held: HashSet<i64> = engine.cached_keys().expect("it runs").keys().map(|key| key.cast_signed()).collect();
        assert_eq!(tiers.get("GPU"), Some(&held), "0.5.{release}");
    }
}

fn trtllm(change: impl FnOnce(&mut EngineOptions)) -> EngineHandle {
    start(|options| {
        (options.kind, options.block_size, options.trtllm_release) = (EngineKind::Trtllm, 4, TrtllmRelease::V1_3);
        change(options);
    })
}

fn drain(engine: &EngineHandle) -> Vec<Value> {
    serde_json::from_value(post(engine, "/kv_cache_events", json!({}))).expect("a list")
}

#[test]
fn trtllm_gives_each_event_once() {
    let engine = trtllm(|_| ());
    complete(&engine, vec![1, 2, 3, 4, 5, 6, 7], json!({}));
    let first = drain(&engine);
    let data: Vec<&str> = first.iter().filter_map(|event| event["data"]["type"].as_str()).collect();
    // Created; the prompt without its last token, whose rest is a partial block; then the longer partial block.
    assert_eq!(data, ["created", "stored", "stored", "removed", "stored"]);
    assert_eq!(
        first.iter().map(|event| event["event_id"].as_u64()).collect::<Option<Vec<_>>>(),
        Some(vec![0, 1, 2, 3, 4])
    );
    assert_eq!(first[1]["data"]["blocks"][0]["block_hash"], json!(924_206_229_973_855_u64), "upstream's own constant");
    assert_eq!(first[2]["data"]["blocks"][0]["block_hash"], json!(6_875_034_662_206_558_884_u64));
    assert_eq!(first[2]["data"]["parent_hash"], first[1]["data"]["blocks"][0]["block_hash"]);
    assert_eq!(first[3]["data"]["block_hashes"][0], first[2]["data"]["blocks"][0]["block_hash"]);
    assert_eq!(first[4]["data"]["blocks"][0]["tokens"].as_array().map(Vec::len), Some(3));
    assert!(drain(&engine).is_empty());
    assert_eq!(engine.stats().drains, 2);
    assert_eq!(cached(&complete(&engine, vec![1, 2, 3, 4, 5, 6, 7], json!({}))), 4);
}

#[test]
fn trtllm_s_ranks_and_windows_share_the_drain() {
    let engine = trtllm(|options| (options.dp, options.window) = (2, 128));
    (0..2).for_each(|_| drop(complete(&engine, vec![1; 9], json!({}))));
    let events = drain(&engine);
    for rank in [0, 1] {
        let own = of(&events, "attention_dp_rank", &json!(rank));
        let ids: Vec<_> = own.iter().filter_map(|event| event["event_id"].as_u64()).collect();
        assert_eq!(ids, (0..ids.len() as u64).collect::<Vec<_>>(), "rank {rank}");
        let windows: Vec<_> = own.iter().map(|event| event["window_size"].as_u64().unwrap_or(0)).collect();
        assert!(windows.chunks(2).all(|pair| pair == [8192, 128]), "{windows:?}");
    }
}

#[test]
fn trtllm_s_stream_applied_is_its_tree() {
    for (seed, host) in [(1, 0), (2, 10)] {
        let engine = trtllm(|options| (options.blocks, options.cpu_blocks) = (24, host));
        let mut random = Random::new(seed);
        let mut device: HashSet<u64> = HashSet::new();
        for _ in 0..50 {
            let family = random.below(3) as u32 * 100;
            let prompt: Vec<u32> = (family..family + 1 + random.below(40) as u32).collect();
            complete(&engine, prompt, json!({"max_tokens": 1 + random.below(12)}));
            for event in drain(&engine) {
                let data = &event["data"];
                let hash = data["block_hash"].as_u64();
                match data["type"].as_str() {
                    Some("stored") => {
                        let blocks = data["blocks"].as_array().expect("blocks").iter();
                        device.extend(blocks.filter_map(|block| block["block_hash"].as_u64()));
                    }
                    Some("removed") => {
                        let gone: Vec<u64> = serde_json::from_value(data["block_hashes"].clone()).expect("hashes");
                        // With a host tier what is removed was on the host.
                        gone.iter()
                            .for_each(|hash| assert_eq!(device.remove(hash), host == 0 || device.contains(hash)));
                    }
                    Some("updated") if data["cache_level"]["new_value"] == 1 => {
                        assert!(hash.is_some_and(|hash| device.remove(&hash)));
                    }
                    Some("updated") => device.extend(hash),
                    _ => {}
                }
            }
            let held: HashSet<u64> = engine.cached_keys().expect("it runs").into_keys().collect();
            assert_eq!(device, held, "seed {seed}");
        }
    }
}

#[test]
fn trtllm_counts_who_reads_what_is_destructive() {
    let engine = trtllm(|_| ());
    assert_eq!(get(&engine, "/debug/stats")["metrics_touched"], 0);
    assert!(get(&engine, "/metrics").is_array());
    assert_eq!(get(&engine, "/debug/stats")["metrics_touched"], 1);
    assert_eq!(get(&engine, "/server_info")["tokens_per_block"], 4);
    assert_eq!(call(&engine, "GET", "/kv_cache_events", b"").0, 405);
    let salted = json!({"prompt": [1], "cache_salt": "a"}).to_string();
    assert_eq!(call(&engine, "POST", "/v1/completions", salted.as_bytes()).0, 400);
}

#[test]
fn llama_cpp_answers_and_says_nothing_of_its_cache() {
    let engine = start(|options| options.kind = EngineKind::Llamacpp);
    assert_eq!((engine.event_addr, engine.replay_addr), (None, None));
    assert_eq!(cached(&complete(&engine, vec![1; 33], json!({}))), 0);
    assert_eq!(cached(&complete(&engine, vec![1; 33], json!({}))), 32);
    assert_eq!(get(&engine, "/props")["total_slots"], 256);
    assert_eq!(get(&engine, "/v1/models")["data"][0]["owned_by"], "llamacpp");
    let tokens = post(&engine, "/tokenize", json!({"content": "the lake"}))["tokens"].clone();
    assert!(tokens.as_array().is_some_and(|ids| !ids.is_empty()));
    assert_eq!(call(&engine, "GET", "/kv_event_sources", b"").0, 404);
    assert_eq!(engine.stats().batches, 0);
}
