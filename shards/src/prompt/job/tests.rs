use std::sync::OnceLock;

use proptest::prelude::*;

use super::ids::BLANKS_MAX;
use super::*;
use crate::block::{Chain, HashAlgo, NoneHash, Release, sglang, vllm};
use crate::prompt::model::tests::small_model;
use crate::service::Engine;

const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// One model for all tests of this file; none, named as skipped, where the tokenizer is absent.
fn model(test: &str) -> Option<Arc<Model>> {
    static MODEL: OnceLock<Option<Arc<Model>>> = OnceLock::new();
    MODEL.get_or_init(|| small_model(test, "small", Some("{}"), Some(CHATML)).map(Arc::new)).clone()
}

fn job<'a>(model: &Arc<Model>, api: Api, body: &'a str) -> Result<Job<'a>, MissReason> {
    job_under(model, api, body, &contract(), None)
}

fn contract() -> Contract {
    Contract::vllm(NoneHash::from_seed(HashAlgo::Sha256Cbor, "0"))
}

fn job_under<'a>(
    model: &Arc<Model>,
    api: Api,
    body: &'a str,
    contract: &Contract,
    lora: Option<&Lora>,
) -> Result<Job<'a>, MissReason> {
    Job::new(api, body.as_bytes(), model, Rendering::of(Engine::Vllm), Keying { contract, block_tokens: 16, lora })
}

/// Runs a job to its end: keys, tokens, slices.
fn run(mut job: Job) -> Result<(Vec<BlockKey>, u64, usize), MissReason> {
    let (mut keys, mut slices) = (Vec::new(), 0);
    loop {
        let step = job.step()?;
        slices += 1;
        keys.extend_from_slice(job.take_keys());
        if step == Step::Done {
            assert_eq!(keys, job.keys());
            assert!(job.take_keys().is_empty());
            return Ok((keys, job.prompt_tokens(), slices));
        }
    }
}

fn completion(model: &Arc<Model>, body: &str) -> Result<(Vec<BlockKey>, u64, usize), MissReason> {
    run(job(model, Api::Completions, body)?)
}

/// The keys of a text's ids, hashed in one go.
fn expected(model: &Model, text: &str) -> (Vec<BlockKey>, u64) {
    let mut ids = Vec::new();
    model.tokenizer().encode(text, &mut Vec::new(), &mut ids).unwrap();
    (keys_of(&ids), ids.len() as u64)
}

fn keys_of(ids: &[u32]) -> Vec<BlockKey> {
    let none_hash = NoneHash::from_seed(HashAlgo::Sha256Cbor, "0");
    let mut chain = Chain::new(HashAlgo::Sha256Cbor, &none_hash);
    ids.chunks_exact(16).map(|block| chain.push(block)).collect()
}

#[test]
fn every_form_of_a_completion_gives_the_same_keys() {
    let Some(model) = model("every_form_of_a_completion_gives_the_same_keys") else { return };
    let text = "The first of several prompts decides where a request goes. ".repeat(8);
    let mut ids = Vec::new();
    model.tokenizer().encode(&text, &mut Vec::new(), &mut ids).unwrap();
    let (keys, tokens) = expected(&model, &text);
    assert!(keys.len() > 3);
    for prompt in [
        format!("\"{text}\""),
        format!("\"{}\"", text.replace('T', "\\u0054")),
        format!("[\"{text}\", \"another\"]"),
        format!("{ids:?}"),
        format!("[ {ids:?}, [1, 2]]"),
    ] {
        let body = format!(r#"{{"model":"m","prompt": {prompt} }}"#);
        let (got, count, _) = completion(&model, &body).unwrap();
        assert_eq!((got, count), (keys.clone(), tokens), "{body}");
    }
}

#[test]
fn a_long_prompt_takes_many_slices_and_the_same_keys() {
    let Some(model) = model("a_long_prompt_takes_many_slices_and_the_same_keys") else { return };
    let text: String = (0..6000).map(|n| format!("line {n} of a rather long prompt, ")).collect();
    let body = format!(r#"{{"prompt": "{text}"}}"#);
    let (keys, tokens) = expected(&model, &text);
    let mut first = job(&model, Api::Completions, &body).unwrap();
    assert_eq!(first.prompt_tokens(), text.len() as u64 / BYTES_PER_TOKEN_ASSUMED);
    assert_eq!(first.step(), Ok(Step::More));
    let estimate = first.prompt_tokens();
    assert!(estimate.abs_diff(tokens) < tokens / 5, "{estimate} for {tokens}");
    drop(first);
    let (got, count, slices) = completion(&model, &body).unwrap();
    assert_eq!((got, count), (keys, tokens));
    assert!(slices >= text.len() / SLICE_BYTES);
}

#[test]
fn a_long_list_of_ids_takes_many_slices() {
    let Some(model) = model("a_long_list_of_ids_takes_many_slices") else { return };
    let ids: Vec<u32> = (0..10_000).map(|n| n % 8000).collect();
    let (keys, tokens, slices) = completion(&model, &format!(r#"{{"prompt": {ids:?}}}"#)).unwrap();
    assert_eq!((keys, tokens, slices), (keys_of(&ids), 10_000, 3));
}

/// Found by `check_any_body`: what was cut off at the front was hashed in one go, and blanks cost nothing.
#[test]
fn no_slice_has_more_than_its_share_however_a_prompt_is_written() {
    let Some(model) = model("no_slice_has_more_than_its_share_however_a_prompt_is_written") else { return };
    let ids: Vec<u32> = (0..30_000).map(|n| n % 8000).collect();
    let cut_off = format!(r#"{{"prompt": {ids:?}, "truncate_prompt_tokens": 20000}}"#);
    let kept = (keys_of(&ids[10_000..]), 20_000, 13);
    assert_eq!(completion(&model, &cut_off).unwrap(), kept);
    let all = format!(r#"{{"prompt": {ids:?}, "truncate_prompt_tokens": 99999}}"#);
    assert_eq!(completion(&model, &all).unwrap(), (keys_of(&ids), 30_000, 16));
    let blank = " ".repeat(3 * BLANKS_MAX + 5);
    let blanks = format!(r#"{{"prompt": [{blank}1 ,2{} ]}}"#, format!(",{blank}3").repeat(30));
    let (keys, tokens, slices) = completion(&model, &blanks).unwrap();
    let ids = [&[1, 2][..], &[3; 30]].concat();
    assert_eq!((keys, tokens), (keys_of(&ids), 32));
    assert!(slices > 30 * 3, "{slices}");
    for list in [format!("[1{blank}, 2]"), format!("[1, {}]", "9".repeat(99)), "[4294967296]".to_owned()] {
        assert_eq!(completion(&model, &format!(r#"{{"prompt": {list}}}"#)), Err(MissReason::Tokenize));
    }
}

#[test]
fn a_chat_is_rendered_and_keyed() {
    let Some(model) = model("a_chat_is_rendered_and_keyed") else { return };
    let content = "Tell me about prefix caches, at some length please. ".repeat(6);
    let body = format!(r#"{{"messages":[{{"role":"user","content":"{content}"}}]}}"#);
    let (keys, tokens) = expected(&model, &format!("<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"));
    let (got, count, _) = run(job(&model, Api::ChatCompletions, &body).unwrap()).unwrap();
    assert_eq!((got, count), (keys, tokens));
}

#[test]
fn what_cannot_be_keyed_says_why() {
    let Some(model) = model("what_cannot_be_keyed_says_why") else { return };
    for (body, reason) in [
        ("not json", MissReason::Tokenize),
        ("{}", MissReason::TextEmpty),
        (r#"{"prompt": null}"#, MissReason::TextEmpty),
        (r#"{"prompt": ""}"#, MissReason::TextEmpty),
        (r#"{"prompt": []}"#, MissReason::TextEmpty),
        (r#"{"prompt": [[]]}"#, MissReason::TextEmpty),
        (r#"{"prompt": 5}"#, MissReason::Tokenize),
        (r#"{"prompt": [1, "x"]}"#, MissReason::Tokenize),
        (r#"{"prompt": [-1]}"#, MissReason::Tokenize),
        (r#"{"prompt": [1.0]}"#, MissReason::Tokenize),
        (r#"{"prompt": [4294967296]}"#, MissReason::Tokenize),
        (r#"{"prompt": "\ud800"}"#, MissReason::Tokenize),
        (r#"{"prompt": "x", "truncate_prompt_tokens": -1}"#, MissReason::Tokenize),
        (r#"{"prompt": "x", "truncate_prompt_tokens": 3, "truncation_side": "middle"}"#, MissReason::Tokenize),
        (r#"{"prompt": "x", "prompt_embeds": "AAAA"}"#, MissReason::Media),
        (r#"{"prompt": ["x", "y"], "cache_salt": ["s", "t"]}"#, MissReason::Extras),
        (r#"{"prompt": "x", "cache_salt": 5}"#, MissReason::Extras),
        (r#"{"prompt": "x", "add_special_tokens": "yes"}"#, MissReason::Tokenize),
    ] {
        assert_eq!(completion(&model, body).unwrap_err(), reason, "{body}");
    }
}

#[test]
fn a_truncated_prompt_has_the_keys_of_what_is_kept() {
    let Some(model) = model("a_truncated_prompt_has_the_keys_of_what_is_kept") else { return };
    let ids: Vec<u32> = (1..10_001).collect();
    let of = |ids: &[u32], more: &str| {
        let body = format!(r#"{{"prompt": {}{more}}}"#, serde_json::to_string(ids).unwrap());
        completion(&model, &body).unwrap()
    };
    for kept in [5, 16, 40, 4096, 4100, 9_999] {
        let (keys, tokens, _) = of(&ids, &format!(r#", "truncate_prompt_tokens": {kept}"#));
        assert_eq!((keys, tokens), (of(&ids[10_000 - kept..], "").0, kept as u64), "the last {kept}");
        let right = format!(r#", "truncate_prompt_tokens": {kept}, "truncation_side": "right""#);
        let (keys, tokens, _) = of(&ids, &right);
        assert_eq!((keys, tokens), (of(&ids[..kept], "").0, kept as u64), "the first {kept}");
    }
    for more in
        [r#", "truncate_prompt_tokens": 10000"#, r#", "truncate_prompt_tokens": 20000, "truncation_side": "right""#]
    {
        assert_eq!(of(&ids, more).0, of(&ids, "").0, "nothing is cut off: {more}");
    }
}

/// A request's extras as members of its body and as its adapter.
struct Extra<'a> {
    members: &'a str,
    lora: Option<Lora>,
}

/// The keys of 40 plain ids with extras, or why there are none.
fn keys_with(model: &Arc<Model>, contract: &Contract, extra: &Extra<'_>) -> Result<Vec<BlockKey>, MissReason> {
    let ids: Vec<u32> = (1..=40).collect();
    let body = format!(r#"{{"prompt": {ids:?}{}}}"#, extra.members);
    let job = job_under(model, Api::Completions, &body, contract, extra.lora.as_ref());
    Ok(run(job?)?.0)
}

/// The same, straight from the contract.
fn contract_keys(contract: &Contract, extras: &PromptExtras) -> Vec<BlockKey> {
    let ids: Vec<u32> = (1..=40).collect();
    let mut stream = KeyStream::new(contract, extras, NonZeroU32::new(16).unwrap()).unwrap();
    let mut rest = &ids[..];
    std::iter::from_fn(|| stream.next_key(&mut rest)).collect()
}

#[test]
fn extras_of_a_request_are_keyed_as_its_engine_does_or_not_at_all() {
    let Some(model) = model("extras_of_a_request_are_keyed_as_its_engine_does_or_not_at_all") else { return };
    let anchor = |tagging| Contract::Vllm {
        none_hash: NoneHash::from_seed(vllm::Algorithm::Sha256, "0"),
        tagging,
        lookahead: 1,
    };
    let sglang = |format| Contract::Sglang(sglang::Contract::new(Release::new(0, 5, 23), false, format).unwrap());
    let (tagged, bare) = (anchor(vllm::Tagging::Tagged), anchor(vllm::Tagging::MmOffset));
    let (default, dynamo) = (sglang(sglang::EventFormat::Default), sglang(sglang::EventFormat::Dynamo));
    let salted = r#", "cache_salt": "s3\u0063r3t""#;
    let both = r#", "cache_salt": "s3cr3t", "extra_key": "tenant""#;
    let (nothing, empty) = ("", r#", "cache_salt": "", "extra_key": null"#);
    let lora = |path: Option<&str>| Lora { name: "sql".into(), path: path.map(str::to_owned), id: None };
    let adapted = || Some(lora(Some("/models/sql")));
    let pathless = || Some(lora(None));
    let all = [&tagged, &bare, &default, &dynamo, &Contract::TrtllmTokens];
    for contract in all {
        let plain = contract_keys(contract, &PromptExtras::default());
        for members in [nothing, empty] {
            let keys = keys_with(&model, contract, &Extra { members, lora: None });
            assert_eq!(keys.as_ref(), Ok(&plain), "{contract:?} {members}");
        }
    }
    let cases = [
        (&tagged, salted, None, true),
        (&tagged, both, adapted(), true),
        (&tagged, nothing, pathless(), false),
        (&bare, salted, pathless(), true),
        (&default, salted, None, true),
        (&default, nothing, adapted(), false),
        (&dynamo, both, None, true),
        (&Contract::TrtllmTokens, salted, None, true),
        (&Contract::TrtllmTokens, nothing, adapted(), false),
    ];
    for (contract, members, lora, keyed) in cases {
        let extras = PromptExtras {
            lora: lora.clone(),
            cache_salt: members.contains("salt").then(|| "s3cr3t".to_owned()),
            extra_key: members.contains("tenant").then(|| "tenant".to_owned()),
            ..PromptExtras::default()
        };
        let keys = keys_with(&model, contract, &Extra { members, lora });
        if keyed {
            let expected = contract_keys(contract, &extras);
            assert_ne!(expected, contract_keys(contract, &PromptExtras::default()));
            assert_eq!(keys, Ok(expected), "{contract:?} {members}");
        } else {
            assert_eq!(keys, Err(MissReason::Extras), "{contract:?} {members}");
        }
    }
}

#[test]
fn special_tokens_surround_completions_but_not_chats() {
    let test = "special_tokens_surround_completions_but_not_chats";
    let Some(dir) = crate::prompt::outside_data::tokenizer(test, "meta-llama__Llama-3.1-8B-Instruct") else { return };
    let tokenizer = std::fs::read_to_string(dir.join("tokenizer.json")).unwrap();
    let files = crate::prompt::ModelFiles { tokenizer, template: Some("x".into()), ..Default::default() };
    let model = Arc::new(Model::load(&files, std::time::SystemTime::now).unwrap());
    for (api, body, tokens) in [
        (Api::Completions, r#"{"prompt": "x"}"#, 2),
        (Api::Completions, r#"{"prompt": "x", "add_special_tokens": false}"#, 1),
        (Api::ChatCompletions, r#"{"messages": [{"role": "user"}]}"#, 1),
        (Api::ChatCompletions, r#"{"messages": [{"role": "user"}], "add_special_tokens": true}"#, 2),
    ] {
        assert_eq!(run(job(&model, api, body).unwrap()).unwrap().1, tokens, "{body}");
    }
}

/// JSON-like texts around the members that are read.
fn body() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just("null".to_owned()),
        Just("true".to_owned()),
        Just("1e999".to_owned()),
        Just("\"\\ud83d\\ude00\"".to_owned()),
        "\"[a-z<|>\\\\nimendstar_ ]{0,20}\"",
        "-?[0-9]{1,40}",
    ];
    let value = leaf.prop_recursive(5, 60, 5, |inner| {
        let key = prop_oneof![
            Just("role"),
            Just("content"),
            Just("type"),
            Just("text"),
            Just("tool_calls"),
            Just("function"),
            Just("arguments"),
            Just("name"),
            Just("parameters"),
        ];
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..5).prop_map(|v| format!("[{}]", v.join(","))),
            proptest::collection::vec((key, inner), 0..6).prop_map(|v| format!(
                "{{{}}}",
                v.iter().map(|(k, x)| format!("\"{k}\":{x}")).collect::<Vec<_>>().join(",")
            )),
        ]
    });
    let member = prop_oneof![
        Just("prompt"),
        Just("messages"),
        Just("tools"),
        Just("documents"),
        Just("chat_template_kwargs"),
        Just("continue_final_message"),
        Just("add_generation_prompt"),
        Just("reasoning_effort"),
    ];
    let message = value.clone().prop_map(|v| format!("[{{\"role\":\"user\",\"content\":{v}}}]"));
    (proptest::collection::vec((member, value), 0..4), message).prop_map(|(members, messages)| {
        let members: String = members.iter().map(|(k, v)| format!("\"{k}\":{v},")).collect();
        format!("{{\"messages\":{messages},{members}\"x\":0}}")
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_body_ends_in_keys_or_a_reason(body in body(), chat in any::<bool>()) {
        if let Some(model) = model("any_body_ends_in_keys_or_a_reason") {
            let api = if chat { Api::ChatCompletions } else { Api::Completions };
            if let Ok((keys, tokens, _)) = job(&model, api, &body).and_then(run) {
                prop_assert_eq!(keys.len() as u64, tokens / 16);
            }
        }
    }

    #[test]
    fn any_bytes_end_in_keys_or_a_reason(body in proptest::collection::vec(any::<u8>(), 0..200)) {
        if let Some(model) = model("any_bytes_end_in_keys_or_a_reason") {
            let keying = Keying { contract: &contract(), block_tokens: 16, lora: None };
            let _ = Job::new(Api::Completions, &body, &model, Rendering::of(Engine::Vllm), keying).and_then(run);
        }
    }
}
