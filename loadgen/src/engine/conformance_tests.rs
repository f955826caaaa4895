//! Recordings of a real vLLM: the same requests, with the answers it gave, must make the same payloads, byte by byte.
//!
//! A recording is followed as long as its requests came one by one and use what is simulated; what changes the cache
//! otherwise (adapters, several requests at once) ends the comparison there.

use std::sync::Arc;

use serde_json::Value;

use super::announce::Announcer;
use super::hash::Namespace;
use super::scheduler::{Request, RequestId, Scheduler};
use super::testing::{shared, unhex};
use super::wire::encode_batch;
use super::{Algo, EngineOptions};

fn options_of(engine: &Value) -> EngineOptions {
    let text = |name: &str| engine[name].as_str().map(str::to_owned);
    let number = |name: &str| text(name).and_then(|text| text.parse().ok());
    EngineOptions {
        wire: text("version").and_then(|version| version.parse().ok()).expect("the version is known"),
        bytes_hashes: engine["int_block_hashes"] == "0",
        algo: if engine["prefix_caching_hash_algo"] == "xxhash_cbor" { Algo::XxhashCbor } else { Algo::Sha256Cbor },
        seed: text("PYTHONHASHSEED").expect("the recordings are seeded"),
        block_size: engine["block_size"].as_u64().expect("there is a block size") as usize,
        // One block of a real engine stands for "no block" and is never used.
        blocks: number("num_gpu_blocks").expect("the cache has a size") - 1,
        max_batched_tokens: number("max_num_batched_tokens").unwrap_or(2048),
        ..EngineOptions::ephemeral()
    }
}

/// The step's request; none where it is not simulated.
fn request(step: &Value, model: &Value, id: u64) -> Option<Request> {
    let body = &step["request"]["body"];
    let own = body["model"] == *model && body["vllm_xargs"].is_null() && body["n"].is_null();
    let session = body.get("session_id").is_some() || step["request"].get("headers").is_some();
    let ids = |name: &str| serde_json::from_value::<Vec<u32>>(step[name].clone()).ok();
    let salt = body["cache_salt"].as_str().map(str::to_owned);
    let namespace = Arc::new(Namespace { salt, ..Namespace::default() });
    let (prompt, answer) = (ids("prompt_token_ids")?, ids("output_token_ids")?);
    (own && !session).then_some(Request { id: RequestId(id), prompt, answer, namespace, transferred: false })
}

/// Follows a recording; how many payloads were equal.
fn check(name: &str, recording: &Value) -> usize {
    let options = options_of(&recording["engine"]);
    let mut scheduler = Scheduler::new(options.scheduler_model(), options.blocks);
    let mut announcer = Announcer::new(&options);
    let mut equal = 0;
    for (number, step) in recording["steps"].as_array().expect("a recording has steps").iter().enumerate() {
        let title = format!("{name}: {}", step["name"]);
        let frames = step["frames"].as_array().map_or(&[][..], Vec::as_slice);
        if step["name"] == "reset_prefix_cache" {
            assert_eq!(step["response"]["success"], scheduler.clear(), "{title}");
            continue;
        }
        let Some(request) = request(step, &recording["engine"]["model"], number as u64) else {
            if frames.is_empty() {
                continue;
            }
            break;
        };
        scheduler.add(request);
        let mut frames = frames.iter();
        while scheduler.begin_step().is_some() {
            let (outputs, changes) = scheduler.end_step();
            if let (Some(first), Some(cached)) = (outputs.first(), cached_tokens(step)) {
                assert_eq!(first.cached_tokens as u64, cached, "{title}");
            }
            if changes.is_empty() {
                continue;
            }
            let frame = frames.next().unwrap_or_else(|| panic!("{title}: the real engine published less"));
            let payload = unhex(frame["frames"][2].as_str().expect("a payload is hex"));
            let time = f64::from_be_bytes(payload[2..10].try_into().expect("a batch begins with its time"));
            let events = announcer.vllm(changes, &options);
            assert_eq!(encode_batch(options.wire, time, &events, Some(0)), payload, "{title}");
            equal += 1;
        }
        assert_eq!(frames.next(), None, "{title}: the real engine published more");
    }
    equal
}

fn cached_tokens(step: &Value) -> Option<u64> {
    step.pointer("/usage/prompt_tokens_details/cached_tokens")?.as_u64()
}

#[test]
fn the_simulated_engine_publishes_what_the_real_one_did() {
    for (file, expected) in [
        ("vllm_basic_sha256_cbor.json", 16),
        ("vllm_evict_sha256_cbor.json", 32),
        ("vllm_short_sha256_cbor_bytes.json", 9),
        ("vllm_short_xxhash_cbor.json", 8),
    ] {
        let test = "the_simulated_engine_publishes_what_the_real_one_did";
        let Some(recording) = shared(test, &format!("recordings/{file}")) else { return };
        assert_eq!(check(file, &recording), expected, "{file}: payloads that can be compared");
    }
}
