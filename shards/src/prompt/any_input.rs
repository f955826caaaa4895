//! Any bytes as a request's body, and as a chat template with a chat: what holds of them, for fuzz targets and for tests
//! over their corpora.
//!
//! Work is counted, not timed: steps by bytes, and new keys by steps.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};
use std::time::SystemTime;

use super::chat::{self, ChatRequest, Extent};
use super::conversation;
use super::frame::Frame;
use super::splice::{Piece, Splice, SpliceError};
use super::template::Template;
use super::{
    Api, BodyScan, BodyView, Job, Keying, Model, ModelFiles, PrefixCache, Rendering, SLICE_BYTES, Step, preview,
};
use crate::block::{Contract, HashAlgo, NoneHash};
use crate::ids::BlockKey;
use crate::service::{Engine, MissReason};

const APIS: [Api; 5] = [Api::Completions, Api::ChatCompletions, Api::Responses, Api::Messages, Api::Generate];
const ENGINES: [Engine; 4] = [Engine::Vllm, Engine::Sglang, Engine::Trtllm, Engine::Llamacpp];

/// A tilde stands for so many bytes of words, so that short inputs make long prompts.
const WORDS_BYTES: usize = 6 * 1024;
/// Tildes that do.
const WORDS_MAX: usize = 8;
/// Bytes that the prompts of one input may be remembered in: few, so that they are forgotten as well.
const CACHE_BYTES: usize = 256 * 1024;
/// Most keys that one slice may bring where every token is a block: a slice is so many bytes of text, or ids.
const SLICE_KEYS_MAX: usize = SLICE_BYTES + 64;
/// Pieces of text shorter than this have a cut or an end in every slice.
const ALWAYS_CUT_BYTES: usize = 2048;
/// Fuel of one render: little, so that it is used up soon.
const FUEL: u64 = 50_000;
/// Bytes that it pays for.
const RENDERED_BYTES_MAX: usize = FUEL as usize * 64;

/// Goes by the parts that real templates have.
const TEMPLATE: &str = "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif -%}
{%- for d in documents or [] %}[{{ d.title }}] {{ d.text }}\n{% endfor -%}
{%- for m in messages %}<|im_start|>{{ m.role }}\n
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{%- if m.content is string %}{{ m.content }}{% elif m.content %}{{ m.content | tojson }}{% endif -%}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor -%}
<|im_end|>\n{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}";

/// A small byte-level tokenizer with words, special tokens and a BOS.
static MODEL: LazyLock<Arc<Model>> = LazyLock::new(|| {
    let files = ModelFiles {
        slug: "any".to_owned(),
        tokenizer: include_str!("any_input/tokenizer.json").to_owned(),
        config: Some(r#"{"bos_token": "<s>", "eos_token": "<|im_end|>"}"#.to_owned()),
        template: Some(TEMPLATE.to_owned()),
        ..ModelFiles::default()
    };
    Arc::new(Model::load(&files, epoch).expect("the files are part of the source"))
});

fn epoch() -> SystemTime {
    SystemTime::UNIX_EPOCH
}

/// The property of any bytes as a request: API and engine (first byte), bytes of a slice of the scan (second), the place
/// that an earlier request differs in (third), then the body, tildes grown into words.
///
/// No panic. The view is the same however the scan is sliced, and a slice looks at its bytes alone; what another parser
/// takes for an object has the same model there. Edits keep every other byte. The keys are those of the ids of the whole
/// prompt, with other requests remembered or nothing; a slice brings no more keys than it may.
///
/// # Panics
/// Where the property does not hold.
pub fn check_any_body(input: &[u8]) {
    let [choice, slice, place, body @ ..] = input else { return };
    let body = &grown(body)[..];
    let view = BodyView::parse(body);
    check_scan(body, view.as_ref(), 1 + usize::from(*slice));
    check_splice(body, view.as_ref());
    let Some(view) = view else { return };
    let api = APIS[usize::from(*choice) % APIS.len()];
    let engine = ENGINES[usize::from(*choice) / APIS.len() % ENGINES.len()];
    let cold = keys(api, engine, &view, &mut PrefixCache::new(0));
    let mut cache = PrefixCache::new(CACHE_BYTES);
    let mut other = body.to_vec();
    other[usize::from(*place) * body.len() / 256] = b'x';
    if let Some(view) = BodyView::parse(&other) {
        let _ = keys(api, engine, &view, &mut cache);
    }
    for time in 0..3 {
        assert_eq!(keys(api, engine, &view, &mut cache), cold, "asked for the {time}th time");
    }
    if let Ok(keys) = cold
        && view.truncate_prompt_tokens.is_none()
    {
        check_ids(api, engine, body, &view, &keys);
    }
}

/// The body with tildes grown into words.
fn grown(body: &[u8]) -> Vec<u8> {
    const WORDS: &[u8] = b" the engine holds the blocks of a prompt and nobody had seen it, 12 times;";
    let mut out = Vec::with_capacity(body.len());
    let mut tildes = 0;
    for &byte in body {
        if byte == b'~' && tildes < WORDS_MAX {
            tildes += 1;
            out.extend(WORDS.iter().cycle().take(WORDS_BYTES));
        } else {
            out.push(byte);
        }
    }
    out
}

fn check_scan(body: &[u8], whole: Option<&BodyView<'_>>, slice: usize) {
    let mut scan = BodyScan::new(body);
    let mut steps = 0;
    let sliced = loop {
        steps += 1;
        match scan.step(slice) {
            None => break None,
            Some(true) => break Some(scan.into_view()),
            Some(false) => {}
        }
    };
    assert_eq!(sliced.as_ref(), whole, "slices of {slice} bytes");
    assert!(steps <= body.len().div_ceil(slice).max(1), "{steps} slices of {slice} bytes for {}", body.len());
    if let Ok(plain) = serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(body) {
        let view = whole.expect("another parser takes it for an object");
        if body.len() <= SLICE_BYTES {
            assert_eq!(view.model.as_deref(), plain.get("model").and_then(|model| model.as_str()));
        }
    }
}

fn check_splice(body: &[u8], view: Option<&BodyView<'_>>) {
    let splice = match Splice::of(body) {
        Ok(splice) => splice,
        Err(error) => return assert!(view.is_none() || error == SpliceError::TooManyMembers, "{error}"),
    };
    let view = view.expect("both scan alike");
    assert_eq!(splice.into_vec(), body, "without an edit");
    let mut splice = Splice::of(body).expect("as before");
    let stands = splice.value("prompt_token_ids").is_some() || splice.value("kv_transfer_params").is_some();
    splice.set_member("prompt_token_ids", b"[1,2]").expect("it is short");
    let transfers = splice.set_inside("kv_transfer_params", "prompt_token_ids", b"[3]").is_ok();
    let pieces = splice.pieces();
    let kept: Vec<u8> =
        pieces.iter().flat_map(|p| if let Piece::Kept(at) = p { &body[at.clone()] } else { &[] }).copied().collect();
    assert!(stands || kept == body, "only new bytes come in");
    let edited: Vec<u8> = pieces
        .into_iter()
        .flat_map(|p| match p {
            Piece::Kept(at) => body[at].to_vec(),
            Piece::New(bytes) => bytes.into_owned(),
        })
        .collect();
    let after = BodyView::parse(&edited).expect("an object again");
    assert_eq!(after.prompt_token_ids, Some("[1,2]"));
    assert!(!transfers || after.unkeyable.is_some(), "the ids are found where engines look for them");
    assert_eq!((&after.model, after.messages, after.prompt), (&view.model, view.messages, view.prompt));
    let mut splice = Splice::of(&edited).expect("an object");
    splice.remove_member("prompt_token_ids");
    let removed = splice.into_vec();
    let after = BodyView::parse(&removed).expect("an object again");
    assert_eq!((after.prompt_token_ids, &after.model, after.messages), (None, &view.model, view.messages));
}

fn keying(contract: &Contract) -> Keying<'_> {
    // In blocks of one token, equal keys are equal ids.
    Keying { contract, block_tokens: 1, lora: None }
}

fn contract() -> Contract {
    Contract::vllm(NoneHash::from_seed(HashAlgo::XxhashCbor, "0"))
}

fn keys(api: Api, engine: Engine, view: &BodyView<'_>, cache: &mut PrefixCache) -> Result<Vec<BlockKey>, MissReason> {
    let contract = contract();
    let job = Job::of_view(api, view, &MODEL, Rendering::of(engine), keying(&contract), cache)?;
    let (keys, job) = run(job)?;
    job.remember(cache);
    Ok(keys)
}

fn run(mut job: Job<'_>) -> Result<(Vec<BlockKey>, Job<'_>), MissReason> {
    let mut keys = Vec::new();
    let mut idle = 0;
    loop {
        let step = job.step()?;
        let new = job.take_keys();
        assert!(new.len() <= SLICE_KEYS_MAX, "{} keys in one slice", new.len());
        // A prompt that is cut off at its front has no keys before its end is known.
        idle = if new.is_empty() { idle + 1 } else { 0 };
        assert!(idle <= WORDS_BYTES * WORDS_MAX, "slices that bring nothing");
        keys.extend_from_slice(new);
        if step == Step::Done {
            assert_eq!(keys, job.keys());
            return Ok((keys, job));
        }
    }
}

/// The keys are those of the ids of the whole text.
fn check_ids(api: Api, engine: Engine, body: &[u8], view: &BodyView<'_>, keys: &[BlockKey]) {
    let Ok(preview) = preview(api, body, &MODEL, Rendering::of(engine)) else { return };
    let text = preview.text.as_deref();
    if let Some(text) = text {
        let whole = MODEL.ids(text).expect("every byte is a token");
        let around = preview.ids.len() - whole.len();
        assert!(around <= 1 && preview.ids[around..] == whole, "cuts do not change ids");
    }
    if preview.ids.is_empty() {
        return assert!(keys.is_empty());
    }
    let list: String = preview.ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",") + "]";
    let contract = contract();
    let job = Job::of_ids(&list, view, &MODEL, Rendering::of(engine), keying(&contract));
    let (expected, _) = job.and_then(run).expect("ids have keys where their text has");
    assert!(expected.starts_with(keys), "keys of {:?}", preview.ids);
    let always_cut = text.is_none_or(|text| text.len() <= ALWAYS_CUT_BYTES);
    assert!(!always_cut || keys.len() == expected.len(), "no key is left out");
}

/// A chat that has a bit of everything, for templates that come without one.
const CHAT: &str = r#"{"messages":[{"role":"system","content":"be kind"},{"role":"user","content":[{"type":"text",
    "text":"two  words\n"}]},{"role":"assistant","content":null,"reasoning_content":"hm","tool_calls":[{"id":"c1","type":
    "function","function":{"name":"f","arguments":"{\"a\": [1, 2.50, null]}"}}]},{"role":"tool","tool_call_id":"c1",
    "content":"é😀"}],"documents":[{"title":"t","text":"x"}],"chat_template_kwargs":{"n":3,"list":["b","a"],
    "enable_thinking":false}}"#;

/// The property of any bytes as a template: its text, then, behind a zero byte, the body of a chat.
///
/// No panic: the template does not compile, or a chat has a text within the limits, the same each time, or there is a
/// reason why it has none. Messages read one by one have the text of those read together.
///
/// # Panics
/// Where the property does not hold.
pub fn check_any_template(input: &[u8]) {
    let end = input.iter().position(|&byte| byte == 0).unwrap_or(input.len());
    let Ok(text) = std::str::from_utf8(&input[..end]) else { return };
    let tokens = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
    let Ok(template) = Template::compile_within(text, &tokens, epoch, FUEL) else { return };
    let body = input.get(end + 1..).filter(|body| !body.is_empty()).unwrap_or(CHAT.as_bytes());
    let Some(view) = BodyView::parse(body) else { return };
    let _ = template.takes_later_system();
    for engine in [Engine::Vllm, Engine::Sglang] {
        let render = || ChatRequest::of_chat(&view).and_then(|chat| chat::render(&chat, &template, engine));
        match render() {
            Ok(rendered) => {
                assert_eq!(render().as_ref(), Ok(&rendered), "a template renders alike each time");
                assert!(rendered.text.len() <= RENDERED_BYTES_MAX, "{} bytes", rendered.text.len());
                check_one_by_one(&view, &template, engine, &rendered);
            }
            Err(reason) => {
                use MissReason::{Media, TextEmpty, Tokenize};
                assert!(matches!(reason, MissReason::Template | Media | TextEmpty | Tokenize), "{reason:?}");
            }
        }
    }
}

fn check_one_by_one(view: &BodyView<'_>, template: &Template, engine: Engine, rendered: &chat::Rendered) {
    if engine != Engine::Vllm || rendered.extent != Extent::Whole {
        return;
    }
    let mut messages = Vec::new();
    let text = view.messages.ok_or(MissReason::TextEmpty).and_then(|raw| {
        conversation::read_messages(raw, template, engine, &mut messages)?;
        Frame::of(&ChatRequest::beside_messages(view)?, engine)?.render(&messages, template)
    });
    if let Ok(text) = text {
        assert_eq!(text, rendered.text, "read one by one");
    }
}
