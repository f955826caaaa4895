//! Requests that say more than their tokens (salts, adapters) go to the blocks that were made for them, and the
//! gateway's own calls show the engines' token.

mod common;

use std::num::NonZeroU32;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use common::engines::{Persona, Publisher, StubEngine};
use common::fleet::{self, EngineProcess};
use common::gateway::{Gateway, Options};
use common::{Scratch, client, free_port, wait_for};
use serde_json::{Value, json};
use shards::block::vllm::{Algorithm, Tagging};
use shards::block::{Contract, KeyStream, Lora, NoneHash, PromptExtras};

#[test]
fn engine_process() {
    fleet::run_as_engine();
}

fn completion(port: u16, body: &Value) -> client::Answer {
    let answer = client::post(([127, 0, 0, 1], port).into(), "/v1/completions", body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer
}

/// A metric summed over the endpoints.
fn total(gateway: &Gateway, name: &str) -> u64 {
    let one = |index: &str| gateway.metric(name, &[("ep_idx", index)]).unwrap_or(0.0) as u64;
    one("0") + one("1")
}

/// The state of an engine in the status.
fn engine(gateway: &Gateway, index: usize) -> Value {
    gateway.api("/status/ready").json()["engines"][index].clone()
}

/// Whether a tokenizer is loaded.
fn is_loaded(gateway: &Gateway) -> bool {
    let status = gateway.api("/status/ready").json();
    status["models"].as_array().is_some_and(|models| models.iter().any(|model| model["state"] == "ready"))
}

/// Releases of two engines, what else they are started with, and whether the rule names their algorithm.
const POOLS: [([&str; 2], &str, bool); 5] = [
    (["0.23.0", "0.23.0"], "--seed 0", true),
    (["0.33.0", "0.33.0"], "--seed 0", true),
    (["0.23.0", "0.33.0"], "--seed 0", true),
    // Keys that are taken over from the engine, and keys that nobody can make.
    (["0.23.0", "0.33.0"], "--seed 0 --algo sha256", false),
    (["0.23.0", "0.33.0"], "--seed f3b1c0ffee", true),
];

#[test]
fn salted_prompts_hit_the_blocks_of_their_salt_in_every_release() {
    for (wire, more, named) in POOLS {
        let engines = wire.map(|wire| EngineProcess::start(&format!("--wire {wire} --time-scale 0 {more}")));
        let tokenizers = fleet::tokenizers();
        let port = free_port();
        let mut config = fleet::rule(port, &tokenizers, &engines);
        if !named {
            config = config.replace("kvHashAlgo = \"sha256_cbor\"\n", "");
        }
        let environment = vec![("LOXILB_KV_COLDSTART_SEED_N", "0".to_owned())];
        let gateway = Gateway::start(Options { config, environment, ..Options::default() });
        wait_for("the engines have said their release, and their model is loaded", || {
            let known = |index: usize| engine(&gateway, index)["version"] == wire[index];
            (known(0) && known(1) && is_loaded(&gateway)).then_some(())
        });
        // A plain prompt each shows how they make their keys.
        let blocks = || gateway.inventory(0, 0).len() + gateway.inventory(0, 1).len();
        let made = || engines.iter().map(|engine| engine.keys().len()).sum::<usize>();
        for number in 0..2 {
            let plain = format!("Number {number} of the prompts that say nothing but what they ask. ").repeat(4);
            completion(port, &json!({"model": "kvlane/demo", "prompt": plain, "max_tokens": 1}));
        }
        wait_for("both have shown their keys", || {
            let shown = !gateway.inventory(0, 0).is_empty() && !gateway.inventory(0, 1).is_empty();
            (shown && blocks() == made()).then_some(())
        });
        let prompt = "Each tenant has a cache of its own, and may not learn what others have asked. ".repeat(12);
        let ask = |salt: Option<&str>| {
            let mut body = json!({"model": "kvlane/demo", "prompt": prompt, "max_tokens": 1});
            if let Some(salt) = salt {
                body["cache_salt"] = json!(salt);
            }
            let answer = completion(port, &body);
            let cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
            (answer.header("x-engine").expect("the engine says who it is").to_owned(), cached)
        };
        for salt in [Some("tenant-a"), None, Some("tenant-\u{fc}-b"), Some("tenant-c")] {
            let (hits, tokens) = ("loxilb_pd_kv_tier15_hits_total", "kvlane_endpoint_hit_tokens_total");
            let (held, before) = (blocks(), total(&gateway, hits));
            let (holder, cached) = ask(salt);
            assert_eq!(cached, 0, "{wire:?} {more} {salt:?}: nobody has asked this before");
            assert_eq!(
                total(&gateway, hits),
                before,
                "{wire:?} {more} {salt:?}: no other salt's blocks are taken for these"
            );
            wait_for("all blocks are announced", || (blocks() > held && blocks() == made()).then_some(()));
            let predicted = total(&gateway, tokens);
            let (again, cached) = ask(salt);
            assert_eq!(again, holder, "{wire:?} {more} {salt:?}");
            assert!(cached >= 64, "{wire:?} {more} {salt:?}: {cached}");
            assert_eq!(
                total(&gateway, tokens),
                predicted + cached,
                "{wire:?} {more} {salt:?}: the prediction is the engine's"
            );
        }
    }
}

/// One batch that stores a chain of blocks, as vLLM 0.10.2 to 0.13 encodes it.
fn stored(keys: &[u64], block_tokens: u8) -> Vec<u8> {
    let mut batch = vec![0x93, 0xcb];
    batch.extend(1.0f64.to_be_bytes());
    batch.extend([0x91, 0x97, 0xab]);
    batch.extend(b"BlockStored");
    batch.extend([0xdc, 0, keys.len() as u8]);
    for key in keys {
        batch.push(0xcf);
        batch.extend(key.to_be_bytes());
    }
    let tokens = keys.len() * usize::from(block_tokens);
    batch.extend([0xc0, 0xdc]);
    batch.extend((tokens as u16).to_be_bytes());
    batch.extend(std::iter::repeat_n(1, tokens));
    batch.extend([block_tokens, 0xc0, 0xa3]);
    batch.extend(b"GPU");
    batch.push(0);
    batch
}

/// Keys of 80 ids as an engine of that release makes them for the adapter.
fn adapter_keys(tagging: Tagging, ids: &[u32], lora: Option<Lora>) -> Vec<u64> {
    let none_hash = NoneHash::from_seed(Algorithm::Sha256Cbor, "0");
    let contract = Contract::Vllm { none_hash, tagging, lookahead: 0 };
    let extras = PromptExtras { lora, ..PromptExtras::default() };
    let size = NonZeroU32::new(16).expect("not zero");
    let mut stream = KeyStream::new(&contract, &extras, size).expect("the path is given");
    let mut rest = ids;
    std::iter::from_fn(|| stream.next_key(&mut rest)).map(|key| key.0).collect()
}

fn persona(version: &str) -> Persona {
    let models = json!({"object": "list", "data": [{"id": "kvlane/demo", "root": "/models/demo", "parent": null},
        {"id": "sql", "root": "/adapters/sql", "parent": "kvlane/demo"}]});
    let version = json!({"version": version});
    Persona {
        answers: vec![("/version", version.to_string()), ("/v1/models", models.to_string())],
        ..Persona::default()
    }
}

#[test]
fn an_adapters_requests_use_its_bases_tokenizer_and_its_own_keys() {
    for (version, tagging) in [("0.30.0", Tagging::MmOffset), ("0.32.0", Tagging::Tagged)] {
        let engines = [(); 2].map(|()| StubEngine::start_as(persona(version)));
        let publishers = [(); 2].map(|()| Publisher::start());
        let tokenizers = fleet::tokenizers();
        let port = free_port();
        let mut config = format!(
            "[tokenizers]\ndir = \"{}\"\n\n[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {port}\nkvExactMode = 3\n\
             kvNoneHashSeed = \"0\"\nkvColdstartSeedN = 0\n\n",
            tokenizers.path().display()
        );
        for (engine, publisher) in engines.iter().zip(&publishers) {
            config.push_str(&format!(
                "[[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = {}\nkvZmqPort = {}\n\n",
                engine.address.port(),
                publisher.port
            ));
        }
        let gateway = Gateway::start(Options { config, ..Options::default() });
        publishers.iter().for_each(Publisher::wait_for_subscriber);
        // The rule names no model: its engines do, before any request.
        wait_for("the engines' model is loaded", || {
            let known = |index| engine(&gateway, index)["adapters"][0]["name"] == "sql";
            (known(0) && known(1) && is_loaded(&gateway)).then_some(())
        });
        let ids: Vec<u32> = (1..=80).collect();
        let lora = Lora { name: "sql".into(), path: Some("/adapters/sql".into()), id: None };
        let keys = adapter_keys(tagging, &ids, Some(lora));
        assert_ne!(keys, adapter_keys(tagging, &ids, None));
        publishers[1].send(&[Vec::new(), 0u64.to_be_bytes().to_vec(), stored(&keys, 16)]);
        wait_for("the adapter's blocks are held", || (gateway.inventory(0, 1).len() == 5).then_some(()));
        let hits = || total(&gateway, "loxilb_pd_kv_tier15_hits_total");
        for _ in 0..6 {
            completion(port, &json!({"model": "sql", "prompt": ids}));
        }
        assert_eq!((hits(), engines[1].seen().len(), engines[0].seen().len()), (6, 6, 0), "{version}");
        completion(port, &json!({"model": "kvlane/demo", "prompt": ids}));
        assert_eq!(hits(), 6, "{version}: the base's requests do not hit the adapter's blocks");
    }
}

fn write_token(path: &Path, token: &str) {
    std::fs::write(path, token).expect("the scratch directory is writable");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).expect("the file is ours");
}

#[test]
fn the_gateways_own_calls_show_the_engines_token_and_a_wrong_one_is_no_dead_engine() {
    let stub = StubEngine::start_as(Persona { token: Some("s3cr3t-1"), ..persona("0.32.0") });
    let scratch = Scratch::new("token");
    let (file, port) = (scratch.path().join("token"), free_port());
    write_token(&file, "s3cr3t-1\n");
    let config = format!(
        "[[rule]]\nexternalIP = \"127.0.0.1\"\nport = {port}\nkvExactMode = 3\nengineTokenFile = \"{}\"\n\n\
         [[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = {}\nkvZmqPort = {}\n",
        file.display(),
        stub.address.port(),
        stub.event_port
    );
    let gateway = Gateway::start(Options { config, ..Options::default() });
    let reaches = |access: &str| {
        wait_for(&format!("access and health are {access}"), || {
            let engine = engine(&gateway, 0);
            (engine["access"] == access && engine["health"] == access).then_some(engine)
        })
    };
    assert_eq!(reaches("open")["version"], "0.32.0");
    write_token(&file, "s3cr3t-2");
    let denied = reaches("denied");
    let reason = denied["access_reason"].as_str().expect("a text");
    assert!(reason.contains("401") && reason.contains("refuses the token in"), "{reason}");
    assert_eq!(denied["version"], "0.32.0", "what was known stays known");
    let ready = gateway.api("/status/ready").json();
    assert_eq!(ready["rules"][0]["usable_endpoints"], 1, "the engine is alive");
    completion(port, &json!({"model": "kvlane/demo", "prompt": "x"}));
    let seen = stub.seen();
    assert!(!seen[0].headers.iter().any(|header| header.contains("s3cr3t")), "clients show their own credentials");
    write_token(&file, "s3cr3t-1");
    reaches("open");
    let readback = gateway.api("/config/loadbalancer/all").text();
    assert!(readback.contains(&*file.to_string_lossy()));
    assert!(![readback, gateway.log(), ready.to_string()].iter().any(|text| text.contains("s3cr3t")));
}
