//! Real templates, tokenizers and engines: what Python rendered, and what a running vLLM made of recorded requests.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde_json::value::RawValue;

use super::template::{Template, TemplateError};
use super::{Api, Job, Keying, Model, ModelFiles, Rendering, Step, outside_data};
use crate::block::{Contract, HashAlgo, KeyStream, NoneHash, PromptExtras};
use crate::service::{Engine, MissReason};

#[derive(serde::Deserialize)]
struct Vectors {
    conversations: HashMap<String, HashMap<String, Box<RawValue>>>,
    templates: HashMap<String, TemplateVector>,
    cases: Vec<Case>,
}

#[derive(serde::Deserialize)]
struct TemplateVector {
    special_tokens: BTreeMap<String, String>,
    text: String,
}

#[derive(serde::Deserialize)]
struct Case {
    template_name: String,
    conversation: String,
    kwargs: HashMap<String, Box<RawValue>>,
    expected_text: Option<String>,
    expected_error: Option<ExpectedError>,
}

#[derive(serde::Deserialize)]
struct ExpectedError {
    kind: String,
    message: Option<String>,
}

fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_748_768_703)
}

/// What a case came to; the text says more where it went wrong.
enum Outcome {
    Exact,
    /// Python renders, we refuse: the request is routed without keys.
    Refused(String),
    /// A text that is not Python's.
    Wrong(String),
}

/// Members as the text of a JSON object.
fn object(members: &HashMap<String, Box<RawValue>>) -> String {
    serde_json::to_string(members).unwrap()
}

fn outcome(case: &Case, rendered: Result<String, TemplateError>) -> Outcome {
    match (rendered, &case.expected_text, &case.expected_error) {
        (Ok(text), Some(expected), _) if &text == expected => Outcome::Exact,
        (Ok(text), Some(expected), _) => {
            let same = text.bytes().zip(expected.bytes()).take_while(|(a, b)| a == b).count();
            let show =
                |text: &str| text.bytes().skip(same.saturating_sub(30)).take(90).map(char::from).collect::<String>();
            Outcome::Wrong(format!("at {same}: got {:?} wanted {:?}", show(&text), show(expected)))
        }
        (Ok(text), None, _) => {
            Outcome::Wrong(format!("Python raises, got {:?}", text.chars().take(80).collect::<String>()))
        }
        (Err(TemplateError::Raised(message)), None, Some(error)) if error.kind == "raise" => {
            if error.message.as_ref().is_none_or(|m| *m == message) {
                Outcome::Exact
            } else {
                Outcome::Refused(format!("raised {message:?} instead of {:?}", error.message))
            }
        }
        (Err(error), None, Some(expected)) if expected.kind == "raise" => {
            Outcome::Refused(format!("failed before it could raise: {error}"))
        }
        (Err(_), None, _) => Outcome::Exact,
        (Err(error), Some(_), _) => Outcome::Refused(error.to_string()),
    }
}

#[test]
fn templates_render_as_python_renders_them() {
    let Some(path) = outside_data::shared("templates_render_as_python_renders_them", "vectors/chat_templates.json")
    else {
        return;
    };
    let vectors: Vectors = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let compiled: HashMap<&str, _> = vectors
        .templates
        .iter()
        .map(|(name, t)| (name.as_str(), Template::compile(&t.text, &t.special_tokens, now)))
        .collect();
    let (mut exact, mut refused, mut wrong) = (0, 0, 0);
    let mut by_template: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for case in &vectors.cases {
        let verdict = match &compiled[case.template_name.as_str()] {
            Ok(template) => {
                let conversation = object(&vectors.conversations[&case.conversation]);
                outcome(case, template.render_json(&conversation, &object(&case.kwargs)))
            }
            Err(error) => Outcome::Refused(error.to_string()),
        };
        let (counter, kind, detail) = match verdict {
            Outcome::Exact => (&mut exact, "", String::new()),
            Outcome::Refused(why) => (&mut refused, "refused", why),
            Outcome::Wrong(why) => (&mut wrong, "WRONG", why),
        };
        *counter += 1;
        if !kind.is_empty() {
            let line = format!("{kind} {} {}", case.conversation, detail);
            by_template.entry(&case.template_name).or_default().push(line);
        }
    }
    for (name, lines) in &by_template {
        eprintln!("{name}: {} cases", lines.len());
        for line in lines.iter().take(if std::env::var_os("KVLANE_VERBOSE").is_some() { 99 } else { 3 }) {
            eprintln!("    {line}");
        }
    }
    eprintln!("chat templates: {exact} exact, {refused} refused, {wrong} wrong of {}", vectors.cases.len());
    assert_eq!(wrong, 0, "a wrong text is worse than none");
    assert!(exact * 200 >= vectors.cases.len() * 199, "fewer than 99.5 % exact");
}

/// Text and ids of a request, with a real model's files.
fn ids_of(model: &Model, path: &str, body: &str) -> Result<Vec<u32>, MissReason> {
    let api = Api::of("POST", path).ok_or(MissReason::ModeOff)?;
    Ok(super::preview(api, body.as_bytes(), model, Rendering::of(Engine::Vllm))?.ids)
}

#[test]
fn recorded_requests_have_the_ids_of_the_engine() {
    let test = "recorded_requests_have_the_ids_of_the_engine";
    let Some(path) = outside_data::shared(test, "recordings/vllm_basic_sha256_cbor.json") else { return };
    let Some(directory) = outside_data::tokenizer(test, "Qwen__Qwen3-0.6B") else { return };
    let read = |file: &str| std::fs::read_to_string(directory.join(file)).unwrap();
    let files = ModelFiles {
        tokenizer: read("tokenizer.json"),
        config: Some(read("tokenizer_config.json")),
        ..ModelFiles::default()
    };
    let model = Arc::new(Model::load(&files, now).unwrap());
    let recording: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let contract = Contract::vllm(NoneHash::from_seed(HashAlgo::Sha256Cbor, "0"));
    let (mut texts, mut chats, mut lists) = (0, 0, 0);
    for step in recording["steps"].as_array().unwrap() {
        // Steps of several requests have their ids in lists, and no single body.
        let Some(ids) = step["prompt_token_ids"].as_array().filter(|ids| ids.iter().all(|id| id.is_u64())) else {
            continue;
        };
        let ids: Vec<u32> = ids.iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect();
        let (path, body) = (step["request"]["path"].as_str().unwrap(), &step["request"]["body"]);
        let text = body.to_string();
        let api = Api::of("POST", path).unwrap();
        let keying = Keying { contract: &contract, block_tokens: 16, lora: None };
        let mut job = Job::new(api, text.as_bytes(), &model, Rendering::of(Engine::Vllm), keying).unwrap();
        while job.step().unwrap() == Step::More {}
        assert_eq!(job.prompt_tokens(), ids.len() as u64, "{}", step["name"]);
        let cache_salt = body["cache_salt"].as_str().map(str::to_owned);
        let extras = PromptExtras { cache_salt, ..PromptExtras::default() };
        let mut stream = KeyStream::new(&contract, &extras, std::num::NonZeroU32::new(16).unwrap()).unwrap();
        let mut rest = &ids[..];
        let keys: Vec<_> = std::iter::from_fn(|| stream.next_key(&mut rest)).collect();
        assert_eq!(job.keys(), keys, "{}", step["name"]);
        match (api, body["prompt"][0].is_number()) {
            (Api::Completions, true) => lists += 1,
            (Api::Completions, false) if body["prompt"].is_array() => texts += 1,
            (Api::Completions, false) => {
                assert_eq!(ids_of(&model, path, &text).unwrap(), ids, "{}", step["name"]);
                texts += 1;
            }
            (_, _) => {
                assert_eq!(ids_of(&model, path, &text).unwrap(), ids, "{}", step["name"]);
                chats += 1;
            }
        }
    }
    eprintln!("recorded requests: {texts} texts, {chats} chats, {lists} lists of ids");
    assert!(texts >= 5 && chats >= 3 && lists >= 5);
}
