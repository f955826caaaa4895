use std::sync::{Arc, OnceLock};

use super::*;
use crate::block::{Contract, HashAlgo, NoneHash};
use crate::ids::BlockKey;
use crate::prompt::outside_data::{self, Random};
use crate::prompt::{Api, BodyView, Job, Keying, Model, ModelFiles, Rendering, Step};
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

fn run(api: Api, body: &str, model: &Arc<Model>, cache: &mut PrefixCache) -> Result<(Vec<BlockKey>, u64), MissReason> {
    let contract = Contract::vllm(NoneHash::from_seed(HashAlgo::XxhashCbor, "0"));
    let keying = Keying { contract: &contract, block_tokens: 16, lora: None };
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
            serde_json::json!({"role": role, "content": format!("<think>\nhm\n</think>\n\n{content}")})
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

/// Texts that grow and part anywhere.
#[test]
fn a_text_has_the_keys_of_its_whole_wherever_it_parts() {
    let test = "a_text_has_the_keys_of_its_whole_wherever_it_parts";
    for (number, (name, _)) in MODELS.iter().enumerate() {
        let Some(model) = model(test, number) else { continue };
        let text = outside_data::mixed_text();
        let mut random = Random(0xBEEF + number as u64);
        let mut cache = PrefixCache::new(1_000_000);
        let mut prompts = vec![String::new(); 5];
        for turn in 0..rounds(400) {
            let pick = random.below(prompts.len());
            let prompt = &mut prompts[pick];
            if prompt.len() > 12_000 {
                prompt.clear();
            }
            let keep = if random.below(3) == 0 { random.below(prompt.len() + 1) } else { prompt.len() };
            prompt.truncate(prompt.floor_char_boundary(keep));
            let start = text.floor_char_boundary(random.below(text.len()));
            let end = text.floor_char_boundary(text.len().min(start + 1 + random.below(3000)));
            prompt.push_str(&text[start..end]);
            let body = serde_json::json!({"prompt": prompt}).to_string();
            same(Api::Completions, &body, &model, &mut cache, &format!("{name} turn {turn}"));
        }
        assert!(cache.stats().hits > 0);
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
