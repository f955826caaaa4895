//! Prompts go to the endpoint that holds them, counted and without standing in anyone's way.

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use shards::block::vllm::Tagging;
use shards::block::{Contract, HashAlgo, NoneHash};
use shards::ids::{BlockKey, EndpointIndex, Rank, ShardId};
use shards::inventory::{self, Writer};
use shards::prompt::{Api, Entry, Job, Keying, Model, ModelTable, Rendering, Step};
use shards::service::{self, EngineRender, KvExact, MissReason, Tables};
use shards::shard::Command;
use support::*;

const BLOCK_TOKENS: u32 = 16;

fn contract() -> Contract {
    Contract::vllm(NoneHash::from_seed(HashAlgo::Sha256Cbor, "0"))
}

fn completion(prompt: &str) -> Vec<u8> {
    serde_json::json!({"model": "m", "prompt": prompt}).to_string().into_bytes()
}

fn keys(model: &Arc<Model>, body: &[u8]) -> Vec<BlockKey> {
    keys_under(model, body, &contract())
}

fn keys_under(model: &Arc<Model>, body: &[u8], contract: &Contract) -> Vec<BlockKey> {
    let keying = Keying { contract, block_tokens: BLOCK_TOKENS, lora: None };
    let mut job =
        Job::new(Api::Completions, body, model, Rendering::of(service::Engine::Vllm), keying).expect("a prompt");
    while job.step().expect("a good prompt") == Step::More {}
    job.take_keys().to_vec()
}

/// A gateway whose one rule routes by KV cache; the writer is its inventory's.
fn gateway(rung: shards::executor::Rung, model: &Arc<Model>, engines: &[&Engine]) -> (Gateway, Writer) {
    gateway_asking(rung, model, engines, None)
}

fn gateway_asking(
    rung: shards::executor::Rung,
    model: &Arc<Model>,
    engines: &[&Engine],
    engine_render: Option<EngineRender>,
) -> (Gateway, Writer) {
    let (writer, factory) = inventory::new(&inventory::Options { blocks_expected: 100_000 });
    let addresses: Vec<_> = engines.iter().map(|engine| engine.address).collect();
    let mut gateway = Gateway::start(rung, limits(), &addresses);
    let mut service = service(0, gateway.address, &addresses);
    service.kv = Some(KvExact {
        other_forms: vec![Tagging::MmOffset],
        engine_render,
        spill_relief: false,
        seed_every: 0,
        ..KvExact::with_defaults(BLOCK_TOKENS, contract(), factory)
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
fn in_a_pool_of_several_releases_a_salted_prompt_is_keyed_in_each_ones_form() {
    let model = model();
    let text = "Each tenant has a cache of its own, and may not learn what others have asked. ".repeat(12);
    let ask =
        |salt: &str| serde_json::json!({"model": "m", "prompt": text, "cache_salt": salt}).to_string().into_bytes();
    let Contract::Vllm { none_hash, lookahead, .. } = contract() else { unreachable!("a contract of vLLM") };
    let older = Contract::Vllm { none_hash, tagging: Tagging::MmOffset, lookahead };
    for rung in RUNGS {
        let engines = [Engine::echo("newest"), Engine::echo("older"), Engine::echo("third")];
        let (gateway, mut writer) = gateway(rung, &model, &engines.each_ref());
        let salted = |salt: &str, contract: &Contract| keys_under(&model, &ask(salt), contract);
        hold(&mut writer, 0, &salted("a", &contract()));
        hold(&mut writer, 1, &salted("b", &older));
        let mut client = gateway.connect();
        for (salt, holder) in [("a", "newest"), ("b", "older"), ("a", "newest"), ("b", "older")] {
            let answer = client.ask(post("/v1/completions", &ask(salt)));
            assert!(answer.body.starts_with(holder.as_bytes()), "{rung:?} {salt}");
        }
        let hits =
            |index: usize| gateway.service.endpoints[index].shared.stats_of(ShardId(0)).hits.load(Ordering::Relaxed);
        assert_eq!([hits(0), hits(1), hits(2)], [2, 2, 0], "{rung:?}");
        assert_eq!(client.ask(post("/v1/completions", &ask("c"))).status(), 200);
        assert_eq!([hits(0), hits(1), hits(2)], [2, 2, 0], "{rung:?}: nobody has that salt's blocks");
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

/// An engine that answers questions with a status and a body, and everything else with its name. An empty body: the
/// question is never answered.
fn told(name: &'static str, status: u16, body: &'static str) -> Engine {
    Engine::start(move |served| {
        if !served.request.head.starts_with("POST /tokenize ") {
            served.client.send(answer(name));
            return true;
        }
        if body.is_empty() {
            return served.client.read_message().is_some();
        }
        let length = body.len();
        served.client.send(format!("HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n\r\n{body}"));
        false
    })
}

fn questions(engines: &[&Engine]) -> usize {
    let asked = |engine: &&Engine| {
        engine.heads.lock().expect("no panic").iter().filter(|head| head.starts_with("POST /tokenize ")).count()
    };
    engines.iter().map(asked).sum()
}

/// A chat of the demo's model, which has no template: only an engine knows its text.
fn chat(text: &str) -> Vec<u8> {
    serde_json::json!({"model": "m", "messages": [{"role": "user", "content": text}]}).to_string().into_bytes()
}

/// Forty ids, as an engine tells them.
const TOLD: &str = r#"{"count":40,"max_model_len":99,"tokens":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31,32,33,34,35,36,37,38,39,40],"token_strs":null}"#;

#[test]
fn a_chat_that_only_engines_can_render_is_keyed_by_the_ids_they_tell() {
    let model = model();
    for rung in RUNGS {
        let engines = [told("first", 200, TOLD), told("holder", 200, TOLD)];
        let (gateway, mut writer) = gateway_asking(rung, &model, &engines.each_ref(), Some(EngineRender::Tokenize));
        let ids: Vec<u32> = (1..41).collect();
        let list = serde_json::json!({"model": "m", "prompt": ids}).to_string();
        hold(&mut writer, 1, &keys(&model, list.as_bytes()));
        let mut client = gateway.connect();
        for _ in 0..5 {
            assert_eq!(client.ask(post("/v1/chat/completions", &chat("a"))).body, b"holder", "{rung:?}");
        }
        assert_eq!(questions(&engines.each_ref()), 1, "{rung:?}: equal prompts are one question");
        let other = chat("b");
        assert_eq!(client.ask(post("/v1/chat/completions", &other)).body, b"holder", "{rung:?}");
        assert_eq!(questions(&engines.each_ref()), 2, "{rung:?}");
        let asked = |engine: &Engine| engine.bodies.lock().expect("no panic").contains(&other);
        assert!(asked(&engines[0]) || asked(&engines[1]), "{rung:?}: the request itself is the question");
        let hits = &gateway.service.endpoints[1].shared.stats_of(ShardId(0)).hits;
        assert_eq!(hits.load(Ordering::Relaxed), 6, "{rung:?}");
        gateway.stop();
    }
}

#[test]
fn a_question_without_an_answer_costs_the_keys_and_nothing_else() {
    let model = model();
    for rung in RUNGS {
        let tokenize = Some(EngineRender::Tokenize);
        for (status, body, way, texts, asked) in [
            (403, "no such path", tokenize, "aabb", 1),
            (200, r#"{"tokens":[]}"#, tokenize, "aabb", 1),
            // Each request is refused for itself.
            (400, "no", tokenize, "aabb", 2),
            (200, "", tokenize, "aa", 1),
            (200, TOLD, None, "ab", 0),
        ] {
            let engine = told("a", status, body);
            let (gateway, _writer) = gateway_asking(rung, &model, &[&engine], way);
            let mut client = gateway.connect();
            for text in texts.chars() {
                let request = post("/v1/chat/completions", &chat(&text.to_string()));
                assert_eq!(client.ask(request).body, b"a", "{rung:?} {body}");
            }
            assert_eq!(questions(&[&engine]), asked, "{rung:?} {status} {body}");
            let misses = &gateway.service.shared.stats_of(ShardId(0)).misses;
            let missed = misses[MissReason::TemplateMissing as usize].load(Ordering::Relaxed);
            assert_eq!(missed, texts.len() as u64, "{rung:?} {status} {body}");
            gateway.stop();
        }
    }
}
