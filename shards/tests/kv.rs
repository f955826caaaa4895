//! Prompts go to the endpoint that holds them, counted and without standing in anyone's way.

mod support;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use shards::block::{Contract, HashAlgo, NoneHash};
use shards::ids::{BlockKey, EndpointIndex, Rank, ShardId};
use shards::inventory::{self, Writer};
use shards::prompt::{Api, Entry, Job, Keying, Model, ModelFiles, ModelTable, Rendering, Step};
use shards::service::{self, KvExact, MissReason, Tables};
use shards::shard::Command;
use support::*;

const BLOCK_TOKENS: u32 = 16;

fn contract() -> Contract {
    Contract::vllm(NoneHash::from_seed(HashAlgo::Sha256Cbor, "0"))
}

/// The tokenizer of the demo, which is part of this repository.
fn model() -> Arc<Model> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../loadgen/assets/tokenizer/kvlane-demo");
    let files = ModelFiles {
        slug: "m".into(),
        tokenizer: std::fs::read_to_string(path.join("tokenizer.json")).expect("the demo's tokenizer"),
        path,
        config: None,
        template: None,
        tool_template: None,
    };
    Arc::new(Model::load(&files, SystemTime::now).expect("a usable tokenizer"))
}

fn completion(prompt: &str) -> Vec<u8> {
    serde_json::json!({"model": "m", "prompt": prompt}).to_string().into_bytes()
}

fn keys(model: &Arc<Model>, body: &[u8]) -> Vec<BlockKey> {
    let keying = Keying { contract: &contract(), block_tokens: BLOCK_TOKENS, lora: None };
    let mut job =
        Job::new(Api::Completions, body, model, Rendering::of(service::Engine::Vllm), keying).expect("a prompt");
    while job.step().expect("a good prompt") == Step::More {}
    job.take_keys().to_vec()
}

/// A gateway whose one rule routes by KV cache; the writer is its inventory's.
fn gateway(rung: shards::executor::Rung, model: &Arc<Model>, engines: &[&Engine]) -> (Gateway, Writer) {
    let (writer, factory) = inventory::new(&inventory::Options { blocks_expected: 100_000 });
    let addresses: Vec<_> = engines.iter().map(|engine| engine.address).collect();
    let mut gateway = Gateway::start(rung, limits(), &addresses);
    let mut service = service(0, gateway.address, &addresses);
    service.kv = Some(KvExact {
        block_tokens: BLOCK_TOKENS,
        contract: contract(),
        algo_given: true,
        adapters: HashMap::new(),
        chat_template: None,
        chat_template_kwargs: None,
        add_bos: None,
        min_match_tokens: 16,
        spill_relief: false,
        mean_load_factor: 175,
        seed_every: 0,
        seed_min_blocks: 16,
        zero_hit_every: 50,
        inventory: factory,
    });
    gateway.service = Arc::new(service);
    let models = ModelTable::new([("m".to_owned(), Entry::Ready(Arc::clone(model)))]);
    let tables = Tables { services: vec![Arc::clone(&gateway.service)], models: Arc::new(models) };
    send(&gateway.shard, Command::Tables(Arc::new(tables)));
    (gateway, writer)
}

fn hold(writer: &mut Writer, endpoint: u16, keys: &[BlockKey]) {
    let holder = writer.add_holder(EndpointIndex(endpoint), Rank(0)).expect("a slot");
    for key in keys {
        writer.store(*key, holder);
    }
    eventually("the inventory is published", || writer.try_publish() && writer.pending() == 0);
}

#[test]
fn a_prompt_goes_to_its_holder_and_each_miss_is_counted_by_its_reason() {
    let model = model();
    for rung in RUNGS {
        let engines = [Engine::echo("first"), Engine::echo("holder"), Engine::echo("third")];
        let (gateway, mut writer) = gateway(rung, &model, &engines.each_ref());
        let body = completion(&"The quick brown fox jumps over the lazy dog. ".repeat(200));
        let held = keys(&model, &body);
        hold(&mut writer, 1, &held);
        let mut client = gateway.connect();
        for _ in 0..10 {
            let answer = client.ask(post("/v1/completions", &body));
            assert!(answer.body.starts_with(b"holder"), "{rung:?}");
        }
        let shard = ShardId(0);
        let stats = gateway.service.endpoints[1].shared.stats_of(shard);
        let hit_tokens = 10 * held.len() as u64 * u64::from(BLOCK_TOKENS);
        assert_eq!(stats.hits.load(Ordering::Relaxed), 10, "{rung:?}");
        // The last block of a prompt is never taken from the cache whole.
        let counted = stats.hit_tokens.load(Ordering::Relaxed);
        assert!(counted <= hit_tokens && counted + 10 * u64::from(BLOCK_TOKENS) >= hit_tokens, "{rung:?}: {counted}");
        for (body, reason) in [
            (completion(&"Something else entirely, never seen. ".repeat(20)), MissReason::NoWorker),
            (br#"{"model":"unknown","prompt":"x"}"#.to_vec(), MissReason::Tokenizer),
            (br#"{"prompt":"x"}"#.to_vec(), MissReason::ModelEmpty),
            (br#"{"model":"m","prompt":""}"#.to_vec(), MissReason::TextEmpty),
            (b"not JSON".to_vec(), MissReason::Tokenize),
        ] {
            let misses = &gateway.service.shared.stats_of(shard).misses[reason as usize];
            let before = misses.load(Ordering::Relaxed);
            assert_eq!(client.ask(post("/v1/completions", &body)).status(), 200, "{rung:?} {reason:?}");
            assert_eq!(misses.load(Ordering::Relaxed), before + 1, "{rung:?} {reason:?}");
        }
        // Paths without a prompt are neither hits nor misses.
        let all =
            || gateway.service.shared.stats_of(shard).misses.iter().map(|m| m.load(Ordering::Relaxed)).sum::<u64>();
        let before = all();
        assert_eq!(client.ask(post("/tokenize", &body)).status(), 200);
        assert_eq!(all(), before, "{rung:?}");
        gateway.stop();
    }
}

#[test]
fn long_prompts_neither_stop_their_neighbours_nor_outlive_their_clients() {
    let model = model();
    for rung in RUNGS {
        let engine = Engine::echo("a");
        let (gateway, mut writer) = gateway(rung, &model, &[&engine]);
        let long = completion(&"Lorem ipsum dolor sit amet, consectetur adipiscing elit. ".repeat(20_000));
        hold(&mut writer, 0, &keys(&model, &long));
        let address = gateway.address;
        // Some stay for their answers; some leave as soon as the body is out, while it is looked at.
        let stay: Vec<_> = (0..4)
            .map(|_| {
                let request = post("/v1/completions", &long);
                std::thread::spawn(move || Client::connect(address).ask(request).status())
            })
            .collect();
        for _ in 0..4 {
            let mut client = gateway.connect();
            client.send(post("/v1/completions", &long));
            leave(client);
        }
        let mut neighbour = gateway.connect();
        let mut served = 0;
        while stay.iter().any(|thread| !thread.is_finished()) {
            assert_eq!(neighbour.ask(GET).status(), 200);
            served += 1;
        }
        for thread in stay {
            assert_eq!(thread.join().expect("no panic"), 200, "{rung:?}");
        }
        let meter = &gateway.shard.status().meter;
        eprintln!(
            "{rung:?}: {served} requests served beside 8 prompts of {} kB; gap p50 ≤ {} µs, p99.9 ≤ {} µs, longest {} µs",
            long.len() / 1000,
            meter.gap_us_at(0.5),
            meter.gap_us_at(0.999),
            meter.gap_max_ns.load(Ordering::Relaxed) / 1000
        );
        eventually("the load of those who left is given back", || gateway.in_flight() == 0);
        gateway.stop();
    }
}
