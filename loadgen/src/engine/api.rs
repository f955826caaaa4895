//! Reads OpenAI requests: from a body to token ids and to what the answer has to look like. No I/O.

use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use super::hash::{Lora, Namespace};
use super::options::{EngineKind, EngineOptions};
use super::talk;
use super::text::ModelText;

/// Prompts in one request at most.
const PROMPTS_MAX: usize = 2048;

/// Answer tokens of a completion that asks for no number, as the API says.
const COMPLETION_TOKENS_DEFAULT: usize = 16;

/// Answer tokens of SGLang's `/generate` that asks for no number.
const GENERATE_TOKENS_DEFAULT: usize = 128;

/// Why a request is refused.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The answer's status.
    pub status: StatusCode,
    /// What is wrong with which member.
    pub message: String,
}

impl Refusal {
    /// The client's fault.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, message: message.into() }
    }

    /// The body as the engine kind spells errors.
    pub fn body(&self, engine: EngineKind) -> Value {
        let kind = match self.status {
            StatusCode::NOT_FOUND => "NotFoundError",
            StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailableError",
            _ => "BadRequestError",
        };
        let mut error = json!({"message": self.message, "type": kind, "param": null, "code": self.status.as_u16()});
        if matches!(engine, EngineKind::Vllm | EngineKind::Llamacpp) {
            return json!({"error": error});
        }
        error["object"] = json!("error");
        error
    }
}

/// The paths that make answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `/v1/completions`
    Completion,
    /// `/v1/chat/completions`
    Chat,
    /// SGLang's `/generate`
    Generate,
    /// vLLM's `/v1/messages`
    Messages,
    /// vLLM's `/v1/responses`
    Responses,
}

/// One prompt with the answer it will get.
#[derive(Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The prompt's ids; not empty.
    pub tokens: Vec<u32>,
    /// The answer's ids; not empty.
    pub answer: Vec<u32>,
    /// Whether the answer ends by itself rather than at the limit.
    pub stops: bool,
}

/// A request that can be carried out.
#[derive(Debug, PartialEq, Eq)]
pub struct Call {
    /// Which path.
    pub kind: Kind,
    /// At least one.
    pub prompts: Vec<Prompt>,
    /// Whether the answer is a stream of events.
    pub stream: bool,
    /// Whether the stream ends with a chunk of usage.
    pub include_usage: bool,
    /// What else parts its prompts from equal ones.
    pub namespace: Arc<Namespace>,
    /// The model as the client named it.
    pub model: String,
    /// The rank that the body asks for (SGLang).
    pub rank: Option<u64>,
    /// Whether the prompts came as a list.
    pub is_list: bool,
}

/// Reads a completion request.
///
/// # Errors
/// The request is malformed, names another model, is too long, or asks for what is not simulated.
pub fn parse(kind: Kind, body: &[u8], options: &EngineOptions, text: &ModelText) -> Result<Call, Refusal> {
    let mut body = object(body)?;
    if kind == Kind::Generate {
        flatten_generate(&mut body);
    }
    talk::flatten(kind, &mut body);
    let lora = adapter(&body, options)?;
    if body.get("n").is_some_and(|n| !n.is_null() && *n != 1) {
        return Err(Refusal::bad_request("`n` other than 1 is not simulated"));
    }
    let ids = match kind {
        Kind::Completion | Kind::Generate => completion_prompts(&body, text)?,
        Kind::Chat | Kind::Messages | Kind::Responses => {
            vec![given_ids(&body, options, text)?.map_or_else(|| chat_ids(&body, options, text), Ok)?]
        }
    };
    let lengths = AnswerLengths::read(kind, &body, options)?;
    let prompts = ids.into_iter().map(|tokens| lengths.prompt(tokens, options, text)).collect::<Result<_, _>>()?;
    if options.kind == EngineKind::Trtllm && kind == Kind::Completion && body.contains_key("cache_salt") {
        return Err(Refusal::bad_request("`cache_salt`: extra inputs are not permitted"));
    }
    let salt = optional_text(&body, "cache_salt")?;
    let extra_key = optional_text(&body, "extra_key")?.filter(|_| options.kind == EngineKind::Sglang);
    let include_usage = body.get("stream_options").is_some_and(|stream| stream["include_usage"] == true);
    let rank = body.get("routed_dp_rank").or_else(|| body.get("data_parallel_rank")).and_then(Value::as_u64);
    Ok(Call {
        kind,
        prompts,
        stream: flag(&body, "stream", false)?,
        include_usage,
        namespace: Arc::new(Namespace { salt, lora, extra_key }),
        model: body.get("model").and_then(Value::as_str).unwrap_or(&options.model).to_owned(),
        rank: rank.filter(|_| options.kind == EngineKind::Sglang),
        is_list: body.get("prompt").is_some_and(|prompt| prompt[0].is_string() || prompt[0].is_array()),
    })
}

/// Gives SGLang's native request the names of a completion's.
fn flatten_generate(body: &mut Map<String, Value>) {
    if let Some(prompt) = body.remove("input_ids").or_else(|| body.remove("text")) {
        body.insert("prompt".to_owned(), prompt);
    }
    if let Some(Value::Object(sampling)) = body.remove("sampling_params") {
        for (name, member) in [
            ("max_new_tokens", "max_tokens"),
            ("min_new_tokens", "min_tokens"),
            ("ignore_eos", "ignore_eos"),
            ("n", "n"),
        ] {
            if let Some(value) = sampling.get(name) {
                body.insert(member.to_owned(), value.clone());
            }
        }
    }
}

/// A chat's ids where the client gives them instead of having them made: SGLang, TensorRT-LLM.
fn given_ids(
    body: &Map<String, Value>,
    options: &EngineOptions,
    text: &ModelText,
) -> Result<Option<Vec<u32>>, Refusal> {
    let name = match options.kind {
        EngineKind::Sglang => "input_ids",
        EngineKind::Trtllm => "prompt_token_ids",
        EngineKind::Vllm | EngineKind::Llamacpp => return Ok(None),
    };
    match body.get(name) {
        Some(Value::Array(items)) => ids(items, text).map(Some),
        _ => Ok(None),
    }
}

fn optional_text(body: &Map<String, Value>, name: &str) -> Result<Option<String>, Refusal> {
    match body.get(name).unwrap_or(&Value::Null) {
        Value::Null => Ok(None),
        Value::String(text) if !text.is_empty() => Ok(Some(text.clone())),
        _ => Err(Refusal::bad_request(format!("`{name}` is a non-empty string"))),
    }
}

/// Reads a `POST /tokenize` request: either form.
///
/// # Errors
/// As [`parse`].
pub fn tokenize(body: &[u8], options: &EngineOptions, text: &ModelText) -> Result<Vec<u32>, Refusal> {
    let body = object(body)?;
    adapter(&body, options)?;
    match body.get("prompt") {
        Some(Value::String(prompt)) => encode(text, prompt, flag(&body, "add_special_tokens", true)?),
        Some(_) => Err(Refusal::bad_request("`prompt` is a string here")),
        None => chat_ids(&body, options, text),
    }
}

/// Reads llama.cpp's form of `POST /tokenize`.
///
/// # Errors
/// There is no `content`.
pub fn tokenize_content(body: &[u8], text: &ModelText) -> Result<Vec<u32>, Refusal> {
    let body = object(body)?;
    match body.get("content") {
        Some(Value::String(content)) => encode(text, content, flag(&body, "add_special", false)?),
        _ => Err(Refusal::bad_request("`content` is a string")),
    }
}

fn object(body: &[u8]) -> Result<Map<String, Value>, Refusal> {
    serde_json::from_slice(body).map_err(|error| Refusal::bad_request(format!("the body is no JSON object: {error}")))
}

/// The adapter a request asks for; none for the model itself, and an error for what is neither.
fn adapter(body: &Map<String, Value>, options: &EngineOptions) -> Result<Option<Lora>, Refusal> {
    if options.kind == EngineKind::Trtllm
        && let Some(asked @ Value::Object(_)) = body.get("lora_request")
    {
        let text = |name: &str| asked[name].as_str().unwrap_or_default().to_owned();
        let id = asked["lora_int_id"].as_u64().ok_or_else(|| Refusal::bad_request("`lora_request.lora_int_id`"))?;
        return Ok(Some(Lora { id, name: text("lora_name"), path: text("lora_path") }));
    }
    let model = match body.get("model").unwrap_or(&Value::Null) {
        Value::Null => return Ok(None),
        Value::String(model) if *model == options.model => return Ok(None),
        model => model,
    };
    let name = model.as_str().unwrap_or_default();
    let name = match options.kind {
        EngineKind::Sglang => name.strip_prefix(&options.model).and_then(|n| n.strip_prefix(':')).unwrap_or(name),
        _ => name,
    };
    options.lora(name).map(Some).ok_or_else(|| {
        let message = format!("The model {model} does not exist; this engine serves `{}`.", options.model);
        Refusal { status: StatusCode::NOT_FOUND, message }
    })
}

fn flag(body: &Map<String, Value>, name: &str, default: bool) -> Result<bool, Refusal> {
    match body.get(name) {
        None | Some(Value::Null) => Ok(default),
        Some(Value::Bool(value)) => Ok(*value),
        Some(other) => Err(Refusal::bad_request(format!("`{name}` is true or false, not {other}"))),
    }
}

fn count(body: &Map<String, Value>, name: &str) -> Result<Option<usize>, Refusal> {
    match body.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64().and_then(|number| usize::try_from(number).ok()) {
            Some(number) => Ok(Some(number)),
            None => Err(Refusal::bad_request(format!("`{name}` is a whole number, not {value}"))),
        },
    }
}

fn encode(text: &ModelText, prompt: &str, add_special_tokens: bool) -> Result<Vec<u32>, Refusal> {
    text.encode(prompt, add_special_tokens).map_err(|error| Refusal::bad_request(format!("tokenizing failed: {error}")))
}

/// `prompt`: a string, an array of strings, an array of ids, or an array of such arrays.
fn completion_prompts(body: &Map<String, Value>, text: &ModelText) -> Result<Vec<Vec<u32>>, Refusal> {
    let add_special_tokens = flag(body, "add_special_tokens", true)?;
    let prompts = match body.get("prompt") {
        Some(Value::String(prompt)) => vec![encode(text, prompt, add_special_tokens)?],
        Some(Value::Array(items)) if items.first().is_some_and(Value::is_u64) => vec![ids(items, text)?],
        Some(Value::Array(items)) if (1..=PROMPTS_MAX).contains(&items.len()) => items
            .iter()
            .map(|item| match item {
                Value::String(prompt) => encode(text, prompt, add_special_tokens),
                Value::Array(items) => ids(items, text),
                _ => Err(Refusal::bad_request("`prompt` holds strings or lists of token ids")),
            })
            .collect::<Result<_, _>>()?,
        _ => return Err(Refusal::bad_request("`prompt` is a string or a non-empty array")),
    };
    Ok(prompts)
}

fn ids(items: &[Value], text: &ModelText) -> Result<Vec<u32>, Refusal> {
    let id = |item: &Value| item.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| *id <= text.id_max());
    items
        .iter()
        .map(|item| id(item).ok_or_else(|| Refusal::bad_request(format!("token id {item} is out of vocabulary"))))
        .collect()
}

/// Renders and encodes `messages`.
fn chat_ids(body: &Map<String, Value>, options: &EngineOptions, text: &ModelText) -> Result<Vec<u32>, Refusal> {
    let Some(Value::Array(messages)) = body.get("messages") else {
        return Err(Refusal::bad_request("`messages` is an array"));
    };
    if flag(body, "continue_final_message", false)? {
        return Err(Refusal::bad_request("`continue_final_message` is not simulated"));
    }
    let mut variables = match body.get("chat_template_kwargs") {
        Some(Value::Object(variables)) => variables.clone(),
        _ => Map::new(),
    };
    // SGLang joins the text parts of a message by a space, the others by a line end.
    let joint = if options.kind == EngineKind::Sglang { " " } else { "\n" };
    let messages = messages.iter().map(|entry| message(entry, joint)).collect::<Result<_, _>>()?;
    variables.insert("messages".to_owned(), Value::Array(messages));
    variables.insert("add_generation_prompt".to_owned(), json!(flag(body, "add_generation_prompt", true)?));
    if let Some(Value::Array(tools)) = body.get("tools") {
        variables.insert("tools".to_owned(), tools.iter().map(|one| tool(one, options.kind)).collect());
    }
    if let Some(documents @ Value::Array(_)) = body.get("documents") {
        variables.insert("documents".to_owned(), documents.clone());
    }
    if let Some(Value::String(effort)) = body.get("reasoning_effort") {
        variables.insert("reasoning_effort".to_owned(), json!(effort));
        variables.entry("enable_thinking").or_insert(json!(effort != "none"));
    }
    let rendered = text.render(variables).map_err(|e| Refusal::bad_request(format!("the chat template: {e}")))?;
    encode(text, &rendered, flag(body, "add_special_tokens", false)?)
}

/// A message as the template sees it: text parts joined, no content as the empty string, arguments of
/// calls as objects.
fn message(message: &Value, joint: &str) -> Result<Value, Refusal> {
    let Value::Object(message) = message else {
        return Err(Refusal::bad_request("a message is an object"));
    };
    let mut message = message.clone();
    let content = match message.get("content").unwrap_or(&Value::Null) {
        Value::Null => String::new(),
        Value::String(content) => content.clone(),
        Value::Array(parts) => parts.iter().map(text_part).collect::<Result<Vec<_>, _>>()?.join(joint),
        _ => return Err(Refusal::bad_request("`content` is a string or an array of parts")),
    };
    message.insert("content".to_owned(), Value::String(content));
    for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(arguments) = call.pointer_mut("/function/arguments") {
            let parsed = arguments.as_str().map(serde_json::from_str::<Map<String, Value>>);
            match parsed {
                Some(Ok(object)) => *arguments = Value::Object(object),
                Some(Err(_)) => *arguments = json!({}),
                None => {}
            }
        }
    }
    Ok(Value::Object(message))
}

fn text_part(part: &Value) -> Result<String, Refusal> {
    match part {
        Value::String(text) => Ok(text.clone()),
        part if part["type"] == "text" && part["text"].is_string() => {
            Ok(part["text"].as_str().unwrap_or_default().to_owned())
        }
        _ => Err(Refusal::bad_request("only parts of type `text` are simulated")),
    }
}

/// A tool with the members that the engine's model of it has, in its order.
fn tool(tool: &Value, kind: EngineKind) -> Value {
    let function = &tool["function"];
    if kind == EngineKind::Sglang {
        return sglang_tool(tool, function);
    }
    let mut members = Map::new();
    for name in ["name", "description", "parameters"] {
        members.insert(name.to_owned(), function[name].clone());
    }
    if !function["strict"].is_null() {
        members.insert("strict".to_owned(), function["strict"].clone());
    }
    json!({"type": tool.get("type").unwrap_or(&json!("function")), "function": members})
}

/// SGLang 0.5.23 keeps the client's order, and says null of what is not there.
fn sglang_tool(tool: &Value, function: &Value) -> Value {
    let known = |name: &&String| ["name", "description", "parameters", "strict"].contains(&name.as_str());
    let named = function.as_object().into_iter().flat_map(Map::keys).filter(known);
    let mut members: Map<String, Value> = named.map(|name| (name.clone(), function[name].clone())).collect();
    for name in ["description", "parameters"] {
        members.entry(name).or_insert(Value::Null);
    }
    json!({"type": tool.get("type").unwrap_or(&json!("function")), "function": members, "defer_loading": tool["defer_loading"]})
}

/// What a request says of its answers' length.
struct AnswerLengths {
    asked: Option<usize>,
    default: Option<usize>,
    least: usize,
    ignore_eos: bool,
}

impl AnswerLengths {
    fn read(kind: Kind, body: &Map<String, Value>, options: &EngineOptions) -> Result<Self, Refusal> {
        let asked = match kind {
            Kind::Chat => count(body, "max_completion_tokens")?.or(count(body, "max_tokens")?),
            _ => count(body, "max_tokens")?,
        };
        if asked == Some(0) {
            return Err(Refusal::bad_request("`max_tokens` is at least 1"));
        }
        let default = match kind {
            Kind::Chat | Kind::Messages | Kind::Responses => None,
            Kind::Completion => Some(COMPLETION_TOKENS_DEFAULT),
            Kind::Generate => Some(GENERATE_TOKENS_DEFAULT),
        };
        let least = count(body, "min_tokens")?.unwrap_or(0);
        if asked.is_some_and(|asked| asked < least || asked > options.tokens_max()) {
            return Err(Refusal::bad_request("`max_tokens` is between `min_tokens` and the model's length"));
        }
        Ok(Self { asked, default, least, ignore_eos: flag(body, "ignore_eos", false)? })
    }

    /// Draws the answer of a prompt; equal prompts get equal answers.
    fn prompt(&self, tokens: Vec<u32>, options: &EngineOptions, text: &ModelText) -> Result<Prompt, Refusal> {
        let asked = self.asked.unwrap_or(1);
        if tokens.is_empty() || tokens.len() + asked > options.tokens_max() {
            return Err(Refusal::bad_request(format!(
                "{} prompt tokens and {asked} of the answer: a prompt has at least one token, and both at most {}",
                tokens.len(),
                options.tokens_max(),
            )));
        }
        let room = options.tokens_max() - tokens.len();
        let limit = self.asked.or(self.default).unwrap_or(room).min(room);
        let seed = seed_of(&tokens);
        let shortest = (options.answer_tokens / 8).max(1);
        let natural = shortest + (seed % (options.answer_tokens - shortest + 1) as u64) as usize;
        let natural = natural.max(self.least);
        let stops = !self.ignore_eos && natural <= limit;
        let answer = text.answer(seed, if stops { natural } else { limit });
        Ok(Prompt { tokens, answer, stops })
    }
}

fn seed_of(tokens: &[u32]) -> u64 {
    let mut hasher = Sha256::new();
    tokens.iter().for_each(|token| hasher.update(token.to_be_bytes()));
    hasher.finalize().iter().take(8).fold(0, |seed, byte| seed << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assets::DEMO_MODEL;

    fn parse_json(kind: Kind, body: Value) -> Result<Call, Refusal> {
        let text = ModelText::load(None, DEMO_MODEL).expect("the embedded files are right");
        parse(kind, body.to_string().as_bytes(), &EngineOptions::default(), &text)
    }

    fn refused(kind: Kind, body: Value) -> Refusal {
        parse_json(kind, body).expect_err("the request cannot be carried out")
    }

    fn answer_length(body: Value) -> (usize, bool) {
        let call = parse_json(Kind::Completion, body).expect("the request is right");
        (call.prompts[0].answer.len(), call.prompts[0].stops)
    }

    #[test]
    fn every_form_of_prompt_is_read() {
        let tokens = |prompt: Value| {
            let call = parse_json(Kind::Completion, json!({"prompt": prompt})).expect("the prompt is right");
            call.prompts.into_iter().map(|prompt| prompt.tokens).collect::<Vec<_>>()
        };
        assert_eq!(tokens(json!([5, 6, 7])), [[5, 6, 7]]);
        assert_eq!(tokens(json!([[5, 6], [7, 8]])), [[5, 6], [7, 8]]);
        assert_eq!(
            tokens(json!(["the queue", "the lake"])).concat(),
            tokens(json!("the queue")).into_iter().chain(tokens(json!("the lake"))).collect::<Vec<_>>().concat()
        );
    }

    #[test]
    fn wrong_requests_are_refused_with_the_member_named() {
        for (body, named) in [
            (json!({}), "prompt"),
            (json!({"prompt": []}), "prompt"),
            (json!({"prompt": ""}), "at least one token"),
            (json!({"prompt": [1, 99_999_999]}), "99999999"),
            (json!({"prompt": [true]}), "prompt"),
            (json!({"prompt": "x", "max_tokens": 0}), "max_tokens"),
            (json!({"prompt": "x", "max_tokens": 1.5}), "max_tokens"),
            (json!({"prompt": "x", "max_tokens": 3, "min_tokens": 4}), "min_tokens"),
            (json!({"prompt": "x", "stream": "yes"}), "stream"),
            (json!({"prompt": "x", "n": 2}), "n"),
            (json!({"prompt": "x", "cache_salt": ""}), "cache_salt"),
        ] {
            let refusal = refused(Kind::Completion, body);
            assert!(refusal.message.contains(named), "{}", refusal.message);
        }
        assert_eq!(refused(Kind::Completion, json!({"prompt": "x", "model": "other"})).status, StatusCode::NOT_FOUND);
        assert!(refused(Kind::Chat, json!({"prompt": "x"})).message.contains("messages"));
    }

    #[test]
    fn answers_end_by_themselves_or_at_the_limit() {
        assert_eq!(answer_length(json!({"prompt": "x", "max_tokens": 3})), (3, false));
        assert_eq!(answer_length(json!({"prompt": "x", "max_tokens": 300, "ignore_eos": true})), (300, false));
        let (length, stops) = answer_length(json!({"prompt": "x", "max_tokens": 300}));
        assert!((16..=128).contains(&length) && stops);
        assert_eq!(answer_length(json!({"prompt": "x", "max_tokens": 300, "min_tokens": 200})), (200, true));
        assert_eq!(answer_length(json!({"prompt": "x", "ignore_eos": true})), (16, false));
    }

    #[test]
    fn an_adapter_is_asked_for_as_a_model() {
        let text = ModelText::load(None, DEMO_MODEL).expect("the embedded files are right");
        let loras = vec!["sql=/models/sql".parse().expect("a name and a path")];
        let options = EngineOptions { loras, ..EngineOptions::default() };
        let parse = |model: &str, options: &EngineOptions| {
            let body = json!({"prompt": "x", "model": model}).to_string();
            parse(Kind::Completion, body.as_bytes(), options, &text).map(|call| call.namespace.lora.clone())
        };
        let sql = Lora { id: 1, name: "sql".to_owned(), path: "/models/sql".to_owned() };
        assert_eq!(parse("sql", &options), Ok(Some(sql.clone())));
        assert_eq!(parse(DEMO_MODEL, &options), Ok(None));
        assert!(parse("other", &options).is_err());
        let sglang = EngineOptions { kind: EngineKind::Sglang, ..options };
        assert_eq!(parse(&format!("{DEMO_MODEL}:sql"), &sglang), Ok(Some(sql)));
    }

    #[test]
    fn a_chat_is_rendered_with_parts_joined_and_tools_in_order() {
        let chat = |messages: Value| parse_json(Kind::Chat, json!({"messages": messages})).map(|call| call.prompts);
        let parts =
            json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]);
        assert_eq!(chat(parts), chat(json!([{"role": "user", "content": "a\nb"}])));
        assert!(chat(json!([{"role": "user", "content": [{"type": "image_url"}]}])).is_err());
        let full = json!({"function": {"parameters": null, "name": "f", "extra": 1}});
        assert_eq!(
            tool(&full, EngineKind::Vllm).to_string(),
            r#"{"type":"function","function":{"name":"f","description":null,"parameters":null}}"#
        );
        assert_eq!(
            tool(&full, EngineKind::Sglang).to_string(),
            r#"{"type":"function","function":{"parameters":null,"name":"f","description":null},"defer_loading":null}"#
        );
        let called =
            message(&json!({"role": "assistant", "tool_calls": [{"function": {"arguments": "{\"a\": 1}"}}]}), "\n");
        assert_eq!(called.expect("the message is right")["tool_calls"][0]["function"]["arguments"], json!({"a": 1}));
    }
}
