//! Requests of every API that carries a prompt: the text or the ids the contract documents lead to, made by hand.

#[path = "common/byte_tokenizer.rs"]
mod byte_tokenizer;

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

use byte_tokenizer::tokenizer;
use proptest::prelude::*;
use serde_json::{Value, json};
use shards::block::{Contract, HashAlgo, KeyStream, NoneHash, PromptExtras};
use shards::ids::BlockKey;
use shards::prompt::{Api, BodyView, Job, Keying, Model, ModelFiles, PrefixCache, Rendering, Step, preview};
use shards::service::{Engine, MissReason};

fn model(slug: &str, template: &str) -> Model {
    let files = ModelFiles {
        slug: slug.to_owned(),
        tokenizer: tokenizer(),
        config: Some(r#"{"bos_token": "<s>"}"#.to_owned()),
        template: Some(template.to_owned()),
        ..ModelFiles::default()
    };
    Model::load(&files, SystemTime::now).expect("the test's tokenizer can be read")
}

fn vectors() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/api_shapes.json");
    serde_json::from_str(&std::fs::read_to_string(path).expect("the vectors are there")).expect("JSON")
}

fn engine_of(name: &str) -> Engine {
    Engine::ALL.into_iter().find(|engine| engine.name() == name).expect("an engine")
}

#[test]
fn every_shape_leads_to_the_prompt_of_the_contract() {
    let vectors = vectors();
    let templates = vectors["templates"].as_object().expect("templates");
    let models: Vec<(&str, Model)> =
        templates.iter().map(|(name, text)| (name.as_str(), model("m", text.as_str().expect("a text")))).collect();
    let mut wrong = Vec::new();
    let cases = vectors["cases"].as_array().expect("cases");
    for case in cases {
        let (name, path) = (&case["name"], case["path"].as_str().expect("a path"));
        let (_, model) = models.iter().find(|(known, _)| case["template"] == *known).expect("a template");
        let kwargs = case.get("kwargs").map(Value::to_string);
        let rendering = Rendering {
            kwargs: kwargs.as_deref(),
            add_bos: case["add_bos"].as_bool(),
            ..Rendering::of(engine_of(case["engine"].as_str().expect("an engine")))
        };
        let api = Api::of("POST", path).expect("a path with a prompt");
        let told = match preview(api, case["body"].to_string().as_bytes(), model, rendering) {
            Err(reason) => json!({"miss": reason.name()}),
            Ok(prompt) if case.get("ids").is_some() => json!({"ids": prompt.ids}),
            Ok(prompt) if prompt.whole => json!({"text": prompt.text}),
            Ok(prompt) => json!({"text": prompt.text, "beginning": true}),
        };
        let wanted: Value = ["miss", "ids", "text", "beginning"]
            .iter()
            .filter_map(|member| Some((member.to_string(), case.get(*member)?.clone())))
            .collect();
        if told != wanted {
            wrong.push(format!("{path} {name}\n  got    {told}\n  wanted {wanted}"));
        }
    }
    assert!(cases.len() >= 80, "the vectors are whole");
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

/// Small blocks, so that most prompts fill some.
const BLOCK_TOKENS: NonZeroU32 = NonZeroU32::new(4).unwrap();

/// The keys a shard makes of a request, on the way that begins with what it remembers.
fn keys_of(
    api: Api,
    body: &str,
    model: &Arc<Model>,
    rendering: Rendering<'_>,
    contract: &Contract,
    cache: &mut PrefixCache,
) -> Result<Vec<BlockKey>, MissReason> {
    let keying = Keying { contract, block_tokens: BLOCK_TOKENS.get(), lora: None };
    let view = BodyView::parse(body.as_bytes()).expect("the vectors are JSON objects");
    let mut job = Job::of_view(api, &view, model, rendering, keying, cache)?;
    while job.step()? == Step::More {}
    let keys = job.keys().to_vec();
    job.remember(cache);
    Ok(keys)
}

#[test]
fn every_shape_is_keyed_as_its_prompt_remembered_or_not() {
    let vectors = vectors();
    let templates = vectors["templates"].as_object().expect("templates");
    let models: Vec<(&str, Arc<Model>)> = templates
        .iter()
        .map(|(name, text)| (name.as_str(), Arc::new(model("m", text.as_str().expect("a text")))))
        .collect();
    let contract = Contract::vllm(NoneHash::from_seed(HashAlgo::XxhashCbor, "0"));
    let mut cache = PrefixCache::new(1 << 20);
    let (mut keyed, mut missed) = (0, 0);
    for case in vectors["cases"].as_array().expect("cases") {
        let body = &case["body"];
        // Which tokens are kept, and what salts add, other tests tell.
        if ["truncate_prompt_tokens", "cache_salt", "extra_key"].iter().any(|member| body.get(*member).is_some()) {
            continue;
        }
        let (_, model) = models.iter().find(|(known, _)| case["template"] == *known).expect("a template");
        let kwargs = case.get("kwargs").map(Value::to_string);
        let rendering = Rendering {
            kwargs: kwargs.as_deref(),
            add_bos: case["add_bos"].as_bool(),
            ..Rendering::of(engine_of(case["engine"].as_str().expect("an engine")))
        };
        let api = Api::of("POST", case["path"].as_str().expect("a path")).expect("a path with a prompt");
        let body = body.to_string();
        let wanted = preview(api, body.as_bytes(), model, rendering).map(|prompt| {
            let extras = PromptExtras::default();
            let mut stream = KeyStream::new(&contract, &extras, BLOCK_TOKENS).expect("nothing but tokens");
            let mut ids = &prompt.ids[..];
            std::iter::from_fn(|| stream.next_key(&mut ids)).collect::<Vec<_>>()
        });
        for time in ["first", "second", "third"] {
            let told = keys_of(api, &body, model, rendering, &contract, &mut cache);
            assert_eq!(told, wanted, "{} {time}", case["name"]);
        }
        keyed += usize::from(wanted.as_ref().is_ok_and(|keys| !keys.is_empty()));
        missed += usize::from(wanted.is_err());
    }
    assert!(keyed >= 40 && missed >= 10, "{keyed} keyed, {missed} missed");
    assert!(cache.stats().hits > 40, "{:?}", cache.stats());
}

#[test]
fn chats_that_engines_render_in_code_are_left_to_them() {
    let body = br#"{"messages": [{"role": "user", "content": "u"}]}"#;
    let template = "{{ messages[0].content }}";
    for (slug, engine, left) in [
        ("deepseek-ai__DeepSeek-V3.2", Engine::Vllm, true),
        ("deepseek-ai__DeepSeek-V3.2", Engine::Sglang, true),
        ("deepseek-ai__DeepSeek-V3", Engine::Vllm, false),
        ("moonshotai__Kimi-K3", Engine::Vllm, true),
        ("mistralai__Ministral-8B", Engine::Vllm, true),
        ("mistralai__Ministral-8B", Engine::Sglang, false),
        ("lmsys__vicuna-7b", Engine::Sglang, true),
        ("lmsys__vicuna-7b", Engine::Vllm, false),
    ] {
        let model = model(slug, template);
        let told = preview(Api::ChatCompletions, body, &model, Rendering::of(engine)).map_err(|reason| reason.name());
        assert_eq!(told.err(), left.then_some("engine_rendered"), "{slug} {engine:?}");
        // A rule that names a template has decided.
        let rule = template.into();
        let rendering = Rendering { template: Some(&rule), ..Rendering::of(engine) };
        assert!(preview(Api::ChatCompletions, body, &model, rendering).is_ok(), "{slug} {engine:?}");
        assert!(preview(Api::Completions, br#"{"prompt": "u"}"#, &model, Rendering::of(engine)).is_ok(), "{slug}");
    }
}

const PATHS: [&str; 5] = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"];

/// A template that touches whatever a request may bring.
const GREEDY: &str = "{% for m in messages %}{{ m.role }}{% for p in m.content %}{{ p }}{% endfor %}{{ m.tool_calls }}\
    {{ m.reasoning }}{% endfor %}{{ tools }}{{ documents }}{{ reasoning_effort }}";

/// Shows the body to every API and engine. Panics on the way are caught by the gateway; here they are counted.
fn show(model: &Model, body: &[u8]) {
    for path in PATHS {
        let api = Api::of("POST", path).expect("a path with a prompt");
        for engine in Engine::ALL {
            // Any answer is right, as long as there is one.
            let _ = preview(api, body, model, Rendering::of(engine));
        }
    }
}

static PANICS: AtomicUsize = AtomicUsize::new(0);

fn count_panics() {
    std::panic::set_hook(Box::new(|info| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        eprintln!("{info}");
    }));
}

#[test]
fn nesting_and_repetition_are_survived() {
    let model = model("m", GREEDY);
    let members = ["messages", "input", "system", "tools", "prompt", "input_ids", "text", "chat_template_kwargs"];
    for member in members {
        for open in ["[", "{\"content\":", "[{\"role\":\"user\",\"content\":[", "[\""] {
            for times in [1, 90, 97, 100_000] {
                show(&model, format!("{{\"{member}\":{}", open.repeat(times)).as_bytes());
            }
        }
        let deep = format!("{{\"{member}\":{}{}}}", "[".repeat(5_000), "]".repeat(5_000));
        show(&model, deep.as_bytes());
        let twice = format!(
            "{{\"messages\":[{{\"role\":\"user\",\"role\":\"tool\",\"content\":\"a\"}}],\"{member}\":1,\"{member}\":null}}"
        );
        show(&model, twice.as_bytes());
    }
}

/// JSON in which the names and words of the APIs meet at random.
fn any_json() -> impl Strategy<Value = Value> {
    let words = prop::sample::select(vec![
        "user",
        "assistant",
        "system",
        "developer",
        "tool",
        "text",
        "input_text",
        "image_url",
        "image",
        "tool_use",
        "tool_result",
        "thinking",
        "function",
        "function_call",
        "function_call_output",
        "reasoning",
        "message",
        "none",
        "{\"a\":1}",
        "{",
        "",
        "x-anthropic-billing-header: a\nb",
        "disabled",
        "incomplete",
        "\u{f8ff}",
        "é😀<|im_start|>",
    ]);
    let leaf = prop_oneof![
        3 => words.prop_map(Value::from),
        1 => any::<i64>().prop_map(Value::from),
        1 => any::<f64>().prop_map(Value::from),
        1 => any::<bool>().prop_map(Value::from),
        1 => Just(Value::Null),
    ];
    let names = prop::sample::select(vec![
        "role",
        "content",
        "type",
        "text",
        "name",
        "id",
        "tool_calls",
        "function",
        "arguments",
        "tool_call_id",
        "input",
        "thinking",
        "tool_use_id",
        "call_id",
        "output",
        "summary",
        "status",
        "source",
        "parameters",
        "input_schema",
        "reasoning",
        "effort",
        "enabled",
        "tools",
    ]);
    leaf.prop_recursive(5, 60, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((names.clone(), inner), 0..6)
                .prop_map(|members| members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()),
        ]
    })
}

#[test]
fn bodies_of_any_shape_are_survived() {
    count_panics();
    let model = model("m", GREEDY);
    let names = prop::sample::select(vec![
        "messages",
        "input",
        "instructions",
        "system",
        "tools",
        "tool_choice",
        "prompt",
        "input_ids",
        "text",
        "thinking",
        "reasoning",
        "reasoning_effort",
        "output_config",
        "chat_template_kwargs",
        "documents",
        "continue_final_message",
        "add_generation_prompt",
        "truncate_prompt_tokens",
        "truncation",
        "prompt_token_ids",
        "image_data",
    ]);
    let body = prop::collection::vec((names, any_json()), 0..6);
    let config = ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let outcome = runner.run(&body, |members| {
        let text: Vec<String> = members.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
        show(&model, format!("{{{}}}", text.join(",")).as_bytes());
        prop_assert_eq!(PANICS.load(Ordering::Relaxed), 0);
        Ok(())
    });
    drop(std::panic::take_hook());
    outcome.expect("no panic");
}
