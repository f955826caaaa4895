use std::sync::{Arc, OnceLock};

use super::*;
use crate::block::{Contract, HashAlgo, KeyStream, NoneHash, PromptExtras};
use crate::ids::BlockKey;
use crate::prompt::outside_data::{self, Random};
use crate::prompt::{Api, Begun, BodyView, Glimpse, Job, Keying, Model, ModelFiles, Rendering, Step};
use crate::service::{Engine, MissReason};

/// Template of the vectors, tokenizer directory.
const MODELS: [(&str, &str); 4] = [
    ("npm/qwen3", "Qwen__Qwen3-0.6B"),
    ("llama.cpp/meta-llama-Llama-3.1-8B-Instruct", "meta-llama__Llama-3.1-8B-Instruct"),
    ("npm/gemma3", "google__gemma-3-4b-it"),
    ("npm/deepseek_v3", "deepseek-ai__DeepSeek-V3"),
];

fn model(test: &str, number: usize) -> Option<Arc<Model>> {
    static LOADED: [OnceLock<Option<Arc<Model>>>; 4] = [const { OnceLock::new() }; 4];
    let (wanted, slug) = MODELS[number];
    let load = || {
        let dir = outside_data::tokenizer(test, slug)?;
        let vectors = outside_data::shared(test, "vectors/chat_templates.json")?;
        let vectors: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(vectors).unwrap()).unwrap();
        let templates = vectors["templates"].as_object().unwrap();
        let name = templates.keys().find(|name| name.starts_with(wanted)).expect("the vectors have the template");
        let template = &templates[name];
        let config = template["special_tokens"].to_string();
        let tokenizer = std::fs::read_to_string(dir.join("tokenizer.json")).unwrap();
        let template = template["text"].as_str().map(str::to_owned);
        let files =
            ModelFiles { slug: slug.into(), tokenizer, config: Some(config), template, ..ModelFiles::default() };
        Some(Arc::new(Model::load(&files, || std::time::SystemTime::UNIX_EPOCH).unwrap()))
    };
    LOADED[number].get_or_init(load).clone()
}

type Keys = Result<(Vec<BlockKey>, u64), MissReason>;

fn run(api: Api, body: &str, model: &Arc<Model>, cache: &mut PrefixCache) -> Keys {
    run_in_blocks(16, api, body, model, cache)
}

/// In blocks of one token, equal keys are equal ids.
fn run_in_blocks(block_tokens: u32, api: Api, body: &str, model: &Arc<Model>, cache: &mut PrefixCache) -> Keys {
    let contract = Contract::vllm(NoneHash::from_seed(HashAlgo::XxhashCbor, "0"));
    let keying = Keying { contract: &contract, block_tokens, lora: None };
    let view = BodyView::parse(body.as_bytes()).ok_or(MissReason::Tokenize)?;
    let mut job = Job::of_view(api, &view, model, Rendering::of(Engine::Vllm), keying, cache)?;
    let mut keys = Vec::new();
    while job.step()? == Step::More {
        keys.extend_from_slice(job.take_keys());
    }
    keys.extend_from_slice(job.take_keys());
    assert_eq!(keys, job.keys());
    let tokens = job.prompt_tokens();
    job.remember(cache);
    Ok((keys, tokens))
}

/// The same through the cache and from nothing.
fn same(api: Api, body: &str, model: &Arc<Model>, cache: &mut PrefixCache, what: &str) -> bool {
    let through = run(api, body, model, cache);
    let plain = run(api, body, model, &mut PrefixCache::new(0));
    assert_eq!(through, plain, "{what}: {body}");
    plain.is_ok()
}

fn rounds(least: usize) -> usize {
    std::env::var("KVLANE_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(least)
}

fn message(random: &mut Random, role: &str, text: &str) -> serde_json::Value {
    let start = text.floor_char_boundary(random.below(text.len()));
    let end = text.floor_char_boundary(text.len().min(start + random.below(900)));
    let content = &text[start..end];
    match (role, random.below(8)) {
        ("assistant", 0) => {
            serde_json::json!({"role": role, "content": "", "tool_calls": [{"id": "c1", "type": "function",
            "function": {"name": "find", "arguments": format!("{{\"q\": {}}}", random.below(99))}}]})
        }
        ("assistant", 1) => serde_json::json!({"role": role, "content": content, "reasoning_content": "let me see"}),
        ("assistant", 2) => {
            let thought = if random.below(2) == 0 { "hm" } else { content };
            serde_json::json!({"role": role, "content": format!("<think>\n{thought}\n</think>\n\n{content}")})
        }
        ("user", 0) => serde_json::json!({"role": role, "content": format!("<tool_response>\n{content}")}),
        ("user", 1) => serde_json::json!({"role": role, "content": [{"type": "text", "text": content}]}),
        ("tool", _) => serde_json::json!({"role": role, "content": content, "tool_call_id": "c1"}),
        _ => serde_json::json!({"role": role, "content": content}),
    }
}

/// Conversations that grow, part, shrink and come back, many at once in a small cache.
#[test]
fn a_conversation_has_the_keys_of_its_whole_render_at_every_turn() {
    let test = "a_conversation_has_the_keys_of_its_whole_render_at_every_turn";
    for (number, (name, _)) in MODELS.iter().enumerate() {
        let Some(model) = model(test, number) else { continue };
        let text = outside_data::mixed_text();
        let mut random = Random(0x5EED + number as u64);
        let mut cache = PrefixCache::new(2_000_000);
        let mut conversations: Vec<Vec<serde_json::Value>> = vec![Vec::new(); 6];
        let (mut keyed, turns) = (0, rounds(300));
        for turn in 0..turns {
            let pick = random.below(conversations.len());
            match random.below(20) {
                0 => conversations[pick].clear(),
                1 | 2 => {
                    let kept = random.below(conversations[pick].len() + 1);
                    conversations[pick].truncate(kept);
                }
                3 => conversations[pick] = conversations[random.below(6)].clone(),
                _ => {}
            }
            let conversation = &mut conversations[pick];
            if conversation.is_empty() && random.below(3) > 0 {
                conversation.push(message(&mut random, "system", &text));
            }
            for _ in 0..=random.below(3) {
                let last = conversation.last().map(|m| m["role"].as_str().unwrap().to_owned());
                let calls = conversation.last().is_some_and(|m| m.get("tool_calls").is_some());
                let role = match last.as_deref() {
                    Some("user") | Some("tool") => "assistant",
                    Some("assistant") if calls => "tool",
                    _ => "user",
                };
                conversation.push(message(&mut random, role, &text));
            }
            let mut body = serde_json::json!({"messages": conversation});
            if pick % 3 == 1 {
                body["tools"] =
                    serde_json::json!([{"type": "function", "function": {"name": "find", "parameters": {}}}]);
            }
            if pick % 3 == 2 {
                body["chat_template_kwargs"] = serde_json::json!({"enable_thinking": false});
            }
            keyed +=
                usize::from(same(Api::ChatCompletions, &body.to_string(), &model, &mut cache, &format!("turn {turn}")));
        }
        let stats = cache.stats();
        eprintln!("{name}: {keyed} of {turns} keyed, {stats:?}");
        assert!(keyed > turns / 3, "hardly any conversation could be rendered");
        assert!(stats.hits > 0 && stats.bytes <= 2_000_000);
    }
}

/// Of large prompts only the begin is looked at first: its keys are those of the whole.
#[test]
fn a_glimpse_has_the_first_keys_of_the_whole() {
    let test = "a_glimpse_has_the_first_keys_of_the_whole";
    for (number, (name, _)) in MODELS.iter().enumerate() {
        let Some(model) = model(test, number) else { continue };
        let text = outside_data::mixed_text();
        let mut random = Random(0x611 + number as u64);
        let (mut seen, mut wrong) = (0, 0);
        for _ in 0..rounds(60) {
            let mut messages = vec![message(&mut random, "system", &text)];
            for turn in 0..2 + random.below(14) {
                messages.push(message(&mut random, if turn % 2 == 0 { "user" } else { "assistant" }, &text));
            }
            let chat = serde_json::json!({"messages": messages}).to_string();
            let start = text.floor_char_boundary(random.below(text.len() / 2));
            let completion = serde_json::json!({"prompt": &text[start..]}).to_string();
            for (api, body) in [(Api::ChatCompletions, chat), (Api::Completions, completion)] {
                let Ok((whole, tokens)) = run(api, &body, &model, &mut PrefixCache::new(0)) else { continue };
                let contract = Contract::vllm(NoneHash::from_seed(HashAlgo::XxhashCbor, "0"));
                let keying = Keying { contract: &contract, block_tokens: 16, lora: None };
                let view = BodyView::parse(body.as_bytes()).unwrap();
                let rendering = Rendering::of(Engine::Vllm);
                let begun = Job::begin(api, &view, &model, rendering, keying, &mut PrefixCache::new(0)).unwrap();
                let Begun::Pending(pending) = begun else { continue };
                let Some(Glimpse { mut job, certain, part }) = pending.glimpse() else { continue };
                while job.step().unwrap() == Step::More {}
                seen += usize::from(!job.keys().is_empty());
                let same = whole.starts_with(job.keys());
                assert!(same || !certain, "{name}: {body}");
                wrong += usize::from(!same);
                let estimate = job.prompt_tokens() as f64 * part;
                assert!(estimate > tokens as f64 / 6.0 && estimate < tokens as f64 * 6.0, "{estimate} of {tokens}");
            }
        }
        eprintln!("{name}: {seen} glimpses, {wrong} of them wrong");
        assert!(seen > 20 && wrong == 0);
    }
}

/// The keys of a text's whole tokenization, without the job: in blocks of one token.
fn whole_keys(text: &str, model: &Model) -> (Vec<BlockKey>, u64) {
    let contract = Contract::vllm(NoneHash::from_seed(HashAlgo::XxhashCbor, "0"));
    let block_tokens = std::num::NonZeroU32::MIN;
    let mut stream = KeyStream::new(&contract, &PromptExtras::default(), block_tokens).unwrap();
    let tokenizer = model.tokenizer();
    let mut ids: Vec<u32> = tokenizer.prefix().collect();
    tokenizer.encode(text, &mut Vec::new(), &mut ids).unwrap();
    ids.extend(tokenizer.suffix());
    let (count, mut rest) = (ids.len() as u64, &ids[..]);
    (std::iter::from_fn(|| stream.next_key(&mut rest)).collect(), count)
}

/// Real texts: code of this repository, languages, questions, and what is hard to cut.
fn corpus(test: &str) -> Vec<String> {
    let mut texts: Vec<String> = vec![
        outside_data::mixed_text(),
        include_str!("../../../tests/vectors/languages.txt").to_owned(),
        include_str!("pyvalue.rs").to_owned(),
        include_str!("../../../ARCHITECTURE.md").to_owned(),
        include_str!("../../../Cargo.lock").to_owned(),
    ];
    for file in ["data/mt_bench_questions.jsonl", "vectors/tokenize.json"] {
        texts.extend(outside_data::shared(test, file).map(|path| std::fs::read_to_string(path).unwrap()));
    }
    texts
}

/// A further piece of a prompt: part of a text, a special token's literal, or a run of one sign.
fn piece(random: &mut Random, texts: &[String], specials: &[String]) -> String {
    match random.below(12) {
        0 | 1 if !specials.is_empty() => specials[random.below(specials.len())].clone(),
        2 => [" ", "\n", "\t", "a", "\u{3000}", "\r\n", "😀", "1", "-", "好"][random.below(10)]
            .repeat(1 + random.below(200)),
        _ => {
            let text = &texts[random.below(texts.len())];
            let start = text.floor_char_boundary(random.below(text.len()));
            text[start..text.floor_char_boundary(text.len().min(start + 1 + random.below(3000)))].to_owned()
        }
    }
}

/// Texts that grow and part anywhere, against a whole tokenization that no code of the job takes part in. By default a
/// few thousand; `KVLANE_ROUNDS=100000` is the full run, `KVLANE_SEED` chooses another.
#[test]
fn a_text_has_the_ids_of_its_whole_wherever_it_parts() {
    let test = "a_text_has_the_ids_of_its_whole_wherever_it_parts";
    let seed = std::env::var("KVLANE_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(0xBEEF);
    let rounds = rounds(500);
    let texts = corpus(test);
    for slug in crate::prompt::tokenizer::tests::SLUGS {
        let Some(dir) = outside_data::tokenizer(test, slug) else { continue };
        let tokenizer = std::fs::read_to_string(dir.join("tokenizer.json")).unwrap();
        let files = ModelFiles { slug: slug.into(), tokenizer, ..ModelFiles::default() };
        let model = Arc::new(Model::load(&files, || std::time::SystemTime::UNIX_EPOCH).unwrap());
        let specials = crate::prompt::tokenizer::tests::cut_tokens(model.tokenizer());
        let mut random = Random(seed);
        let mut cache = PrefixCache::new(2_000_000);
        let mut prompts = vec![String::new(); 5];
        let (mut bytes, mut unbroken) = (0, 0);
        for round in 0..rounds {
            let pick = random.below(prompts.len());
            if random.below(16) == 0 {
                prompts[pick] = prompts[random.below(5)].clone();
            }
            let prompt = &mut prompts[pick];
            if prompt.len() > 12_000 {
                prompt.clear();
            }
            let keep = if random.below(3) == 0 { random.below(prompt.len() + 1) } else { prompt.len() };
            prompt.truncate(prompt.floor_char_boundary(keep));
            for _ in 0..=random.below(3) {
                prompt.push_str(&piece(&mut random, &texts, &specials));
            }
            if prompt.is_empty() {
                continue;
            }
            let body = serde_json::json!({"prompt": prompt}).to_string();
            let (keys, count) = run_in_blocks(1, Api::Completions, &body, &model, &mut cache).unwrap();
            let (whole, whole_count) = whole_keys(prompt, &model);
            let what = format!("{slug}, seed {seed}, round {round}");
            // Where no cut was found for too long the keys end early, and are right as far as they go.
            assert!(whole.starts_with(&keys), "{what}: the ids differ: {prompt:?}");
            if keys.len() == whole.len() {
                assert_eq!(count, whole_count, "{what}");
            } else {
                unbroken += 1;
            }
            bytes += prompt.len();
        }
        let stats = cache.stats();
        eprintln!("{slug}: {rounds} splits and growths, {bytes} B, all equal; {unbroken} ended early; {stats:?}");
        assert!(stats.hits > 0 && unbroken < rounds / 20);
    }
}

#[test]
fn bytes_held_stay_within_the_bound_and_the_latest_stay() {
    let Some(model) = model("bytes_held_stay_within_the_bound_and_the_latest_stay", 0) else { return };
    let mut cache = PrefixCache::new(200_000);
    let body = |n: usize| {
        let text: String = (0..400).map(|word| format!("{n} word {word} ")).collect();
        serde_json::json!({"prompt": text}).to_string()
    };
    for n in 0..100 {
        run(Api::Completions, &body(n), &model, &mut cache).unwrap();
        let stats = cache.stats();
        assert!(stats.bytes <= 200_000 && stats.prompts > 0, "{stats:?}");
    }
    assert!(cache.stats().evictions > 50);
    let before = cache.stats().hit_bytes;
    run(Api::Completions, &body(99), &model, &mut cache).unwrap();
    assert!(cache.stats().hit_bytes - before > 4_000, "the last prompt is known whole");
}
