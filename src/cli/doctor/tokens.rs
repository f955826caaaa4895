//! Does the gateway make the same tokens of prompts as the engine?
//!
//! A few texts and chats are tokenized by both. What is compared are keys over blocks of one token: the first key that
//! differs is the first token that does, and it is the prompt path of the gateway that made ours.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use shards::block::Contract;
use shards::ids::BlockKey;
use shards::prompt::{Api, Keying, Model};
use shards::service::{Engine, MissReason};

use super::report::Report;
use crate::cli::inquiry::keys_of;
use crate::discovery::{Call, Reply};
use crate::rules::KvRule;

/// Longest wait for one answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Largest answer, bytes: a few hundred ids.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// Texts in which tokenizers show their differences: plain words, numbers and signs, blanks, other scripts.
const TEXTS: [&str; 3] = [
    "The quick brown fox jumps over the lazy dog, 12345 times in 2026; it didn't stop.",
    "  def f(x):\n\treturn x**2  # ¿qué? 你好，世界 🚀 — naïve\n\n\n",
    "a",
];

/// How an engine is asked.
pub(super) struct Asking<'a> {
    pub(super) engine: Engine,
    pub(super) address: SocketAddr,
    pub(super) authorization: Option<&'a str>,
    pub(super) kv: &'a KvRule,
    /// The model's name, as the engine serves it.
    pub(super) name: &'a str,
    pub(super) model: &'a Arc<Model>,
}

/// What a comparison came to.
enum Compared {
    /// The same so many tokens.
    Same(usize),
    /// The token at this place is another; the engine's token there, if it has one.
    Differs { place: usize, engine: Option<u64>, lengths: (usize, usize) },
    /// The gateway makes no keys of such a prompt.
    Refused(MissReason),
    /// The engine cannot be asked.
    Unasked(String),
}

/// Chats: plain, with a system message, over several turns, with tools.
fn chats() -> [(&'static str, Value); 4] {
    let user = |text: &str| json!({"role": "user", "content": text});
    let tool = json!({"type": "function", "function": {"name": "weather", "description": "Weather of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}});
    [
        ("a question", json!({"messages": [user("What is the capital of France?")]})),
        ("a system message", json!({"messages": [{"role": "system", "content": "Be brief."}, user("Hello!")]})),
        (
            "several turns",
            json!({"messages": [user("Hi"), {"role": "assistant", "content": "Hello. What is it?"}, user("Nothing.")]}),
        ),
        ("tools", json!({"messages": [user("What is the weather in Rome?")], "tools": [tool]})),
    ]
}

/// Compares texts, then chats, and reports the first difference of each.
pub(super) async fn check(asking: &Asking<'_>, subject: &str, report: &mut Report) {
    let mut same = 0;
    let mut texts_agree = true;
    for text in TEXTS {
        match asking.compare(Api::Completions, &json!({ "prompt": text })).await {
            Compared::Same(tokens) => same += tokens,
            Compared::Differs { place, engine, lengths } => {
                texts_agree = false;
                let says = format!("{}; text {text:?}", difference(place, engine, lengths));
                let (leg, fix) = match place {
                    0 => (
                        "start",
                        "the begin-of-text token differs: compare add_bos_token and the post-processor of tokenizer.json with the engine's model",
                    ),
                    _ => ("tokenizer", "stage the tokenizer.json of the engine's model"),
                };
                report.wrong(subject, "tokens", format!("{leg}: {says}"), fix);
                break;
            }
            other => {
                texts_agree = false;
                report_other(other, subject, "tokens", report);
                break;
            }
        }
    }
    if texts_agree {
        report.right(subject, "tokens", format!("{same} tokens of {} texts are the engine's", TEXTS.len()));
    }
    check_chats(asking, texts_agree, subject, report).await;
}

async fn check_chats(asking: &Asking<'_>, texts_agree: bool, subject: &str, report: &mut Report) {
    let mut same = 0;
    let mut refused = Vec::new();
    let chats = chats();
    for (name, body) in &chats {
        match asking.compare(Api::ChatCompletions, body).await {
            Compared::Same(tokens) => same += tokens,
            Compared::Differs { place, engine, lengths } => {
                let says = format!("{}; chat with {name}", difference(place, engine, lengths));
                let template = match &asking.kv.chat_template {
                    Some(template) => format!("kvChatTemplate ({})", template.path.display()),
                    None => format!("the template in {}", asking.model.path().display()),
                };
                let fix = match texts_agree {
                    true => format!(
                        "texts agree, so the chat templates differ: make {template} that of the engine (its model's, or its \
                         --chat-template)"
                    ),
                    false => "texts differ too: stage the tokenizer's files of the engine's model first".to_owned(),
                };
                let leg = if texts_agree { "template" } else { "tokenizer" };
                return report.wrong(subject, "template", format!("{leg}: {says}"), fix);
            }
            // A template that knows no tools is no fault of anybody.
            Compared::Refused(reason) => refused.push(format!("{name} ({})", reason.name())),
            other => return report_other(other, subject, "template", report),
        }
    }
    if refused.len() == chats.len() {
        let says = format!("chats are routed without keys: {}", refused.join(", "));
        let fix = asking.model.template_problem().unwrap_or_else(|| "correct the chat template".to_owned());
        return report.wrong(subject, "template", says, fix);
    }
    let agreed = chats.len() - refused.len();
    let mut says = format!("{same} tokens of {agreed} chats are the engine's");
    if !refused.is_empty() {
        says += &format!("; without keys: {}", refused.join(", "));
    }
    report.right(subject, "template", says);
}

fn report_other(compared: Compared, subject: &str, check: &'static str, report: &mut Report) {
    match compared {
        Compared::Refused(reason) => {
            let fix = "see GET /netlox/v1/config/ai/kv/models of a running gateway";
            report.wrong(subject, check, format!("the gateway makes no keys of it: {}", reason.name()), fix);
        }
        Compared::Unasked(why) => {
            report.unknown(subject, check, why, "parity by use tells it in a running gateway, and --probe")
        }
        Compared::Same(_) | Compared::Differs { .. } => {}
    }
}

fn difference(place: usize, engine: Option<u64>, lengths: (usize, usize)) -> String {
    let (ours, theirs) = lengths;
    let at = match engine {
        Some(id) => format!("token {place} is {id} at the engine and another here"),
        None => format!("the engine's tokens end at {place}"),
    };
    format!("{at} ({ours} tokens here, {theirs} there)")
}

impl Asking<'_> {
    async fn compare(&self, api: Api, prompt: &Value) -> Compared {
        let mut body = prompt.clone();
        body["model"] = json!(self.name);
        let bytes = body.to_string();
        let ours = match self.keys(api, bytes.as_bytes()) {
            Ok(keys) => keys,
            Err(reason) => return Compared::Refused(reason),
        };
        let ids = match self.engine_ids(api, &body).await {
            Ok(ids) => ids,
            Err(why) => return Compared::Unasked(why),
        };
        let theirs = match self.keys(Api::Completions, json!({ "prompt": ids }).to_string().as_bytes()) {
            Ok(keys) => keys,
            Err(_) => return Compared::Unasked("the engine's ids are no token ids".to_owned()),
        };
        let place = ours.iter().zip(&theirs).take_while(|(ours, theirs)| ours == theirs).count();
        if place == ours.len() && place == theirs.len() {
            return Compared::Same(place);
        }
        Compared::Differs { place, engine: ids.get(place).copied(), lengths: (ours.len(), theirs.len()) }
    }

    /// A key for each token of a prompt.
    fn keys(&self, api: Api, body: &[u8]) -> Result<Vec<BlockKey>, MissReason> {
        let keying = Keying { contract: &Contract::Derived, block_tokens: 1, lora: None };
        keys_of(api, body, self.model, self.kv.rendering(self.engine), keying)
    }

    /// The engine's own ids of a prompt.
    async fn engine_ids(&self, api: Api, body: &Value) -> Result<Vec<u64>, String> {
        let path = match (self.engine, api) {
            (Engine::Vllm | Engine::Sglang, _) => "/tokenize",
            (Engine::Trtllm, Api::Completions) => "/_internal/tokenize",
            _ => return Err(format!("{} tokenizes no chats for others", self.engine.name())),
        };
        let first = self.post(path, body).await;
        let reply = match (&first, self.engine) {
            // Since 0.15; since 0.30 with --enable-scale-out.
            (Ok(Reply { status: 404 | 405, .. }), Engine::Vllm) => {
                let render = if api == Api::Completions { "/v1/completions" } else { "/v1/chat/completions" };
                self.post(&format!("{render}/render"), body).await
            }
            _ => first,
        };
        let reply = reply.map_err(|error| format!("POST {path}: {error}"))?;
        if reply.status != 200 {
            return Err(format!("POST {path}: status {}", reply.status));
        }
        let answer: Value = serde_json::from_slice(&reply.body).map_err(|error| format!("POST {path}: {error}"))?;
        // One for each prompt where completions are rendered.
        let rendered = if answer.is_array() { &answer[0] } else { &answer };
        let ids = rendered["tokens"].as_array().or_else(|| rendered["token_ids"].as_array());
        let ids = ids.ok_or_else(|| format!("POST {path}: an answer without tokens"))?;
        ids.iter().map(|id| id.as_u64().ok_or_else(|| format!("POST {path}: {id} is no token id"))).collect()
    }

    async fn post(&self, path: &str, body: &Value) -> std::io::Result<Reply> {
        let body = body.to_string();
        let call = Call {
            address: self.address,
            path,
            authorization: self.authorization,
            body: Some(body.as_bytes()),
            answer_bytes_max: ANSWER_BYTES_MAX,
            timeout: TIMEOUT,
        };
        call.ask().await
    }
}
