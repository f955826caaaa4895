//! Frames recorded from a real vLLM, through a real ZMQ socket, into the running gateway.

mod common;

use std::collections::{BTreeMap, HashMap};

use common::engines::{Publisher, StubEngine, unhex};
use common::gateway::{Gateway, Options};
use common::{client, free_port, required, shared_dir, tokenizers_dir, wait_for};
use serde_json::Value;

/// What an engine holds by its own account: every stored block is one physical copy, every removal takes one away.
/// Blocks re-announced by a request in report mode `full` are no new copies.
#[derive(Default)]
struct Truth {
    copies: HashMap<u64, u32>,
}

impl Truth {
    fn apply(&mut self, batch: &Value) {
        for event in batch[1].as_array().expect("a batch has events") {
            match event["type"].as_str().expect("an event has a type") {
                "BlockStored" => {
                    for hash in event["block_hashes"].as_array().expect("hashes") {
                        *self.copies.entry(key(hash)).or_default() += 1;
                    }
                }
                "BlockRemoved" => {
                    for hash in event["block_hashes"].as_array().expect("hashes") {
                        let copies = self.copies.get_mut(&key(hash)).expect("the engine removes what it stored");
                        *copies -= 1;
                        if *copies == 0 {
                            self.copies.remove(&key(hash));
                        }
                    }
                }
                "AllBlocksCleared" => self.copies.clear(),
                other => panic!("unknown event {other}"),
            }
        }
    }

    fn keys(&self) -> Vec<u64> {
        let mut keys: Vec<u64> = self.copies.keys().copied().collect();
        keys.sort_unstable();
        keys
    }
}

/// A key in either form: an unsigned integer, or the full digest, whose last eight bytes are the key.
fn key(hash: &Value) -> u64 {
    if let Some(number) = hash.as_u64() {
        return number;
    }
    let digest = unhex(hash["$hex"].as_str().expect("a hash is an integer or bytes"));
    u64::from_be_bytes(digest[digest.len() - 8..].try_into().expect("eight bytes"))
}

struct Step {
    name: String,
    frames: Vec<Vec<Vec<u8>>>,
    batches: Vec<Value>,
    request: Option<(String, Value)>,
    prompt: Vec<u64>,
}

struct Recording {
    engine: Value,
    steps: Vec<Step>,
}

impl Recording {
    fn read(test: &str, name: &str) -> Option<Self> {
        let path = required(test, shared_dir().join("recordings").join(name))?;
        let json: Value = serde_json::from_slice(&std::fs::read(path).expect("readable")).expect("JSON");
        let steps = json["steps"].as_array().expect("steps").iter().map(Step::read).collect();
        Some(Recording { engine: json["engine"].clone(), steps })
    }
}

impl Step {
    fn read(step: &Value) -> Self {
        let list = |name: &str| step[name].as_array().cloned().unwrap_or_default();
        let frames = list("frames")
            .iter()
            .map(|m| m["frames"].as_array().expect("frames").iter().map(|f| unhex(f.as_str().expect("hex"))).collect())
            .collect();
        let request = step["request"]["path"].as_str().map(|p| (p.to_owned(), step["request"]["body"].clone()));
        Step {
            name: step["name"].as_str().unwrap_or_default().to_owned(),
            frames,
            batches: list("decoded").iter().map(|m| m["batch"].clone()).collect(),
            request,
            prompt: list("prompt_token_ids").iter().filter_map(Value::as_u64).collect(),
        }
    }

    /// A request whose keys follow from what it says: an adapter's also need its path, which is not in the recording.
    fn is_plain(&self, model: &str) -> bool {
        self.request.as_ref().is_some_and(|(path, body)| path.starts_with("/v1/") && body["model"] == model)
    }
}

/// What the rule says of its engines.
#[derive(Clone, PartialEq)]
struct Stated {
    seed: String,
    block_tokens: u64,
}

impl Stated {
    fn of(recording: &Recording) -> Self {
        let seed = recording.engine["PYTHONHASHSEED"].as_str().expect("a seed").to_owned();
        Stated { seed, block_tokens: recording.engine["block_size"].as_u64().expect("a block size") }
    }
}

/// One service with two endpoints: the first is the recorded engine, the second never holds anything.
struct Fleet {
    /// Whether the rule says of the engine what is true.
    is_exact: bool,
    gateway: Gateway,
    publisher: Publisher,
    engines: [StubEngine; 2],
    port: u16,
}

impl Fleet {
    fn start(recording: &Recording, stated: &Stated, tokenizers: &std::path::Path) -> Self {
        let publisher = Publisher::start();
        let engines = [StubEngine::start(), StubEngine::start()];
        let port = free_port();
        let (algo, block) = (&recording.engine["prefix_caching_hash_algo"], stated.block_tokens);
        let endpoint = |engine: &StubEngine, zmq: u16| {
            format!(
                "[[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = {}\nweight = 1\nkvZmqPort = {zmq}\n\n",
                engine.address.port()
            )
        };
        let config = format!(
            "[tokenizers]\ndir = \"{}\"\n\n[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {port}\nprotocol = \"tcp\"\n\
             kvExactMode = 3\nkvEngineType = \"vllm\"\nkvBlockSize = {block}\nkvHashAlgo = {algo}\n\n{}{}",
            tokenizers.display(),
            endpoint(&engines[0], publisher.port),
            endpoint(&engines[1], free_port()),
        );
        // No seeding: a diverted request would say nothing about keys.
        let environment = vec![
            ("LLB_KV_NONE_HASH_SEED", stated.seed.clone()),
            ("LOXILB_KV_COLDSTART_SEED_N", "0".to_owned()),
            ("LLB_KV_MIN_MATCH_TOKENS", "0".to_owned()),
        ];
        let gateway = Gateway::start(Options { config, environment, refuse_io_uring: false });
        publisher.wait_for_subscriber();
        Fleet { is_exact: *stated == Stated::of(recording), gateway, publisher, engines, port }
    }

    fn feed(&self, step: &Step, truth: &mut Truth) {
        for (frames, batch) in step.frames.iter().zip(&step.batches) {
            self.publisher.send(frames);
            truth.apply(batch);
        }
        let expected = truth.keys();
        wait_for(&format!("the inventory equals the engine's blocks after step {:?}", step.name), || {
            let held = self.gateway.inventory(0, 0);
            // The gateway's own keys are others, as many.
            (if self.is_exact { held == expected } else { held.len() == expected.len() }).then_some(())
        });
        assert_eq!(self.gateway.inventory(0, 1), Vec::<u64>::new(), "the other endpoint holds nothing");
    }
}

/// Steps whose events re-announce blocks without a new copy, which the plain count of [`Truth`] would get wrong only
/// if they were evicted later; no recording does that.
fn replay(test: &str, file: &str) {
    let Some(recording) = Recording::read(test, file) else { return };
    let fleet = Fleet::start(&recording, &Stated::of(&recording), std::path::Path::new("/nonexistent"));
    let mut truth = Truth::default();
    let fed =
        recording.steps.iter().filter(|step| !step.frames.is_empty()).inspect(|step| fleet.feed(step, &mut truth));
    assert!(fed.count() >= 7, "the recording has steps with frames");
}

#[test]
fn basic_recording_gives_the_engines_inventory() {
    replay("basic_recording", "vllm_basic_sha256_cbor.json");
}

#[test]
fn evictions_are_followed() {
    replay("evict_recording", "vllm_evict_sha256_cbor.json");
}

#[test]
fn keys_published_as_bytes_are_the_same_keys() {
    replay("bytes_recording", "vllm_short_sha256_cbor_bytes.json");
}

#[test]
fn xxhash_recording_gives_the_engines_inventory() {
    replay("xxhash_recording", "vllm_short_xxhash_cbor.json");
}

/// Every plain request of a recording, sent to the gateway before its own blocks are announced and again afterwards:
/// the prediction after is the number of whole blocks the engine published for its prompt.
fn predicted_block_for_block(test: &str, stated: impl Fn(Stated) -> Stated, verdict: &str, faults: &[&str]) {
    let Some(recording) = Recording::read(test, "vllm_basic_sha256_cbor.json") else { return };
    let Some(tokenizers) = required(test, tokenizers_dir().join("Qwen__Qwen3-0.6B"))
        .and_then(|p| p.parent().map(std::path::Path::to_path_buf))
    else {
        return;
    };
    let fleet = Fleet::start(&recording, &stated(Stated::of(&recording)), &tokenizers);
    wait_for("the tokenizer is loaded", || fleet.warm().then_some(()));
    let mut truth = Truth::default();
    let mut predicted = BTreeMap::new();
    for (number, step) in recording.steps.iter().enumerate() {
        if !step.frames.is_empty() {
            fleet.feed(step, &mut truth);
        }
        if step.is_plain("Qwen/Qwen3-0.6B") && !step.prompt.is_empty() && step.name != "two prompts in one request" {
            let (path, body) = step.request.as_ref().expect("a plain step has a request");
            let before = fleet.hit_tokens();
            let answer = client::post(([127, 0, 0, 1], fleet.port).into(), path, body);
            assert_eq!(answer.status, 200, "step {number} {:?}: {}", step.name, answer.text());
            let expected = (step.prompt.len() as u64 - 1) / 16 * 16;
            wait_for(&format!("step {number} {:?} is predicted to hit {expected} tokens", step.name), || {
                (fleet.hit_tokens() == before + expected).then_some(())
            });
            predicted.insert(number, expected);
        }
    }
    assert!(predicted.len() >= 15, "the recording has plain requests: {predicted:?}");
    let salted = |number: &&usize| recording.steps[**number].name.starts_with("cache_salt");
    assert_eq!(predicted.keys().filter(salted).count(), 3, "salted requests among them");
    assert!(predicted.values().filter(|tokens| **tokens > 0).count() >= 12, "and most have a whole block");
    assert!(fleet.engines[1].seen().len() < fleet.engines[0].seen().len(), "hits go to the holder");
    let parity = &fleet.gateway.api("/config/ai/kv/parity").json()["parity"][0];
    assert_eq!((&parity["verdict"], &parity["faults"]), (&verdict.into(), &serde_json::json!(faults)), "{parity}");
}

#[test]
fn plain_requests_are_predicted_block_for_block() {
    predicted_block_for_block("plain_requests", |stated| stated, "exact", &[]);
}

#[test]
fn salts_are_told_apart_under_own_keys_too() {
    let wrong = |stated| Stated { seed: "another".to_owned(), ..stated };
    predicted_block_for_block("own_keys", wrong, "derived", &["seed"]);
}

#[test]
fn predictions_are_in_the_engines_blocks_whatever_size_the_rule_says() {
    for block_tokens in [24, 64, 512] {
        let wrong = |stated| Stated { block_tokens, ..stated };
        predicted_block_for_block("block_sizes", wrong, "derived", &["block_size"]);
    }
}

impl Fleet {
    /// Prompt tokens predicted to hit at the recorded engine so far.
    fn hit_tokens(&self) -> u64 {
        self.gateway.metric("kvlane_endpoint_hit_tokens_total", &[("ep_idx", "0")]).unwrap_or(0.0) as u64
    }

    /// Whether the gateway tokenizes for the recorded model, which it is asked to by a request for it.
    fn warm(&self) -> bool {
        let body = serde_json::json!({"model": "Qwen/Qwen3-0.6B", "prompt": "Hello", "max_tokens": 1});
        client::post(([127, 0, 0, 1], self.port).into(), "/v1/completions", &body);
        let status = self.gateway.api("/status/ready").json();
        status["models"].as_array().is_some_and(|models| models.iter().any(|model| model["state"] == "ready"))
    }
}
