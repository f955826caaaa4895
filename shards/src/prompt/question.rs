//! Chats whose ids an engine is asked for, because it renders them in code.
//!
//! **Invariant.** Only what the engine's answer covers wholly is asked: a member that the asked path does not look at,
//! media, or anything cut off afterwards makes the answer the ids of another prompt.

use memchr::memmem;
use xxhash_rust::xxh3::Xxh3;

use super::Api;
use super::body::BodyView;
use super::model::Model;
use crate::service::{Engine, EngineRender, MissReason};

/// Longest question, bytes of the request's messages. Longer chats are routed without keys.
const QUESTION_BYTES_MAX: usize = 4 * 1024 * 1024;

/// Longest messages whose ids are sent along, bytes of JSON: what is spliced takes well under a millisecond.
const IDS_BYTES_MAX: usize = 256 * 1024;

/// Beginnings of the kinds of parts that are no text.
const MEDIA: [&str; 5] = ["\"image", "\"video", "\"audio", "\"input_image", "\"input_audio"];

/// Where an engine is asked for the ids of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// The path that takes the request's own body.
    pub path: &'static str,
    /// Name of the answer's member with the list of ids.
    pub member: &'static str,
    /// Equal for requests with the same prompt: model, messages, and whatever else decides over the text.
    pub id: u128,
}

impl Question {
    /// The question for a request; none where the answer would not be the ids of the prompt.
    #[must_use]
    pub fn of(api: Api, view: &BodyView<'_>, engine: Engine, way: EngineRender) -> Option<Self> {
        let (path, member) = match (engine, way) {
            (Engine::Vllm, EngineRender::Render) => (render_path(api)?, "token_ids"),
            (Engine::Vllm, EngineRender::Tokenize) if api == Api::ChatCompletions && !exceeds_vllm(view) => {
                ("/tokenize", "tokens")
            }
            (Engine::Sglang, EngineRender::Tokenize) if api == Api::ChatCompletions && !exceeds_sglang(view) => {
                ("/tokenize", "tokens")
            }
            _ => return None,
        };
        let cut_off = view.truncate_prompt_tokens.is_some() || view.truncation.is_some();
        let stored = view.previous_response_id.is_some() || view.previous_input_messages.is_some();
        let list = view.messages.or(view.input).filter(|list| list.len() <= QUESTION_BYTES_MAX)?;
        if cut_off || stored || view.unkeyable.is_some() || has_media(list) {
            return None;
        }
        Some(Question { path, member, id: id(view, path) })
    }

    /// The question for a request whose text the gateway cannot know, for this reason; none where no engine is to be
    /// asked either.
    #[must_use]
    pub fn after(
        reason: MissReason,
        api: Api,
        view: &BodyView<'_>,
        model: &Model,
        engine: Engine,
        way: EngineRender,
    ) -> Option<Self> {
        if !matches!(reason, MissReason::EngineRendered | MissReason::TemplateMissing) {
            return None;
        }
        // Before vLLM 0.33 `/tokenize` renders them by a template, unlike its chats.
        if way == EngineRender::Tokenize && model.is_harmony() && engine == Engine::Vllm {
            return None;
        }
        Question::of(api, view, engine, way)
    }

    /// The list of ids in an answer, after its bracket; none if there is none.
    #[must_use]
    pub fn ids<'r>(&self, answer: &'r [u8]) -> Option<&'r str> {
        // Inside a string the quote at the name's end would be escaped: what is found is a member.
        let name = format!("\"{}\":", self.member);
        let after = memmem::find(answer, name.as_bytes())? + name.len();
        let list = answer[after..].trim_ascii_start().strip_prefix(b"[")?;
        let end = memchr::memchr(b']', list)?;
        // Each id is read when it is hashed; here the list must only be flat and hold something.
        let list = std::str::from_utf8(&list[..=end]).ok()?;
        (list.trim_start().starts_with(|c: char| c.is_ascii_digit())).then_some(list)
    }
}

fn render_path(api: Api) -> Option<&'static str> {
    match api {
        Api::ChatCompletions => Some("/v1/chat/completions/render"),
        Api::Responses => Some("/v1/responses/render"),
        Api::Messages => Some("/v1/messages/render"),
        Api::Completions | Api::Generate => None,
    }
}

/// Whether a request has what vLLM's `/tokenize` does not look at.
fn exceeds_vllm(view: &BodyView<'_>) -> bool {
    view.documents.is_some() || view.reasoning_effort.is_some()
}

/// Whether a request has what SGLang's `/tokenize` does not look at, or reads otherwise than its chats do.
fn exceeds_sglang(view: &BodyView<'_>) -> bool {
    let chosen = view.tool_choice.is_some_and(|choice| !matches!(choice, "\"auto\"" | "\"required\""));
    chosen || view.reasoning.is_some() || view.add_generation_prompt.is_some() || view.input_ids.is_some()
}

/// Whether the ids that the gateway makes of a request may be sent along with it: a chat of nothing but text, of which the
/// engine cuts nothing off, which ends where its last message ends, and which brings no ids of its own.
#[must_use]
pub fn may_bring_ids(api: Api, view: &BodyView<'_>) -> bool {
    let BodyView { messages, unkeyable, truncate_prompt_tokens, input_ids, prompt_token_ids, .. } = view;
    let continued = view.continue_final_message.is_some_and(|raw| raw != "false");
    let own = unkeyable.is_some() || input_ids.is_some() || prompt_token_ids.is_some();
    let text = messages.is_some_and(|list| list.len() <= IDS_BYTES_MAX && !has_media(list));
    api == Api::ChatCompletions && text && !own && !continued && truncate_prompt_tokens.is_none()
}

/// Whether there may be parts that are no text: their blocks have more in their keys than tokens.
fn has_media(list: &str) -> bool {
    MEDIA.iter().any(|kind| memmem::find(list.as_bytes(), kind.as_bytes()).is_some())
}

fn id(view: &BodyView<'_>, path: &str) -> u128 {
    let mut hash = Xxh3::new();
    let mut add = |text: Option<&str>| {
        hash.update(&text.map_or(u64::MAX, |text| text.len() as u64).to_le_bytes());
        hash.update(text.unwrap_or_default().as_bytes());
    };
    add(Some(path));
    add(view.model.as_deref());
    let prompt = [view.messages, view.input, view.instructions, view.system, view.thinking, view.output_config];
    prompt.into_iter().chain(view.members()).for_each(&mut add);
    hash.digest128()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(path: &str, body: &str, engine: Engine, way: EngineRender) -> Option<Question> {
        let view = BodyView::parse(body.as_bytes()).expect("JSON");
        Question::of(Api::of("POST", path).expect("a prompt"), &view, engine, way)
    }

    const CHAT: &str = "/v1/chat/completions";

    #[test]
    fn what_the_answer_would_not_cover_is_not_asked() {
        use EngineRender::{Render, Tokenize};
        let body = |more: &str| format!(r#"{{"model":"m","messages":[{{"role":"user","content":"u"}}]{more}}}"#);
        for (path, more, engine, way, asked) in [
            (CHAT, "", Engine::Vllm, Tokenize, Some("/tokenize")),
            (CHAT, "", Engine::Vllm, Render, Some("/v1/chat/completions/render")),
            ("/v1/messages", "", Engine::Vllm, Render, Some("/v1/messages/render")),
            ("/v1/messages", "", Engine::Vllm, Tokenize, None),
            (CHAT, r#","reasoning_effort":"low""#, Engine::Vllm, Tokenize, None),
            (CHAT, r#","reasoning_effort":"low""#, Engine::Vllm, Render, Some("/v1/chat/completions/render")),
            (CHAT, r#","documents":[]"#, Engine::Vllm, Tokenize, None),
            (CHAT, r#","truncate_prompt_tokens":5"#, Engine::Vllm, Render, None),
            (CHAT, r#","prompt_embeds":"A""#, Engine::Vllm, Render, None),
            (CHAT, "", Engine::Sglang, Tokenize, Some("/tokenize")),
            (CHAT, "", Engine::Sglang, Render, None),
            (CHAT, r#","reasoning_effort":"low""#, Engine::Sglang, Tokenize, Some("/tokenize")),
            (CHAT, r#","tool_choice":"auto""#, Engine::Sglang, Tokenize, Some("/tokenize")),
            (CHAT, r#","tool_choice":"none""#, Engine::Sglang, Tokenize, None),
            (CHAT, r#","add_generation_prompt":true"#, Engine::Sglang, Tokenize, None),
            (CHAT, "", Engine::Trtllm, Tokenize, None),
        ] {
            let told = question(path, &body(more), engine, way);
            assert_eq!(told.map(|question| question.path), asked, "{path} {more} {engine:?} {way:?}");
        }
        let image = r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}"#;
        assert_eq!(question(CHAT, image, Engine::Vllm, Render), None);
    }

    #[test]
    fn ids_go_only_with_whole_chats_of_text() {
        for (path, more, may) in [
            (CHAT, "", true),
            (CHAT, r#","stream":true,"tools":[],"continue_final_message":false,"kv_transfer_params":{"a":1}"#, true),
            (CHAT, r#","continue_final_message":true"#, false),
            (CHAT, r#","truncate_prompt_tokens":9"#, false),
            (CHAT, r#","input_ids":[1]"#, false),
            (CHAT, r#","prompt_token_ids":[1]"#, false),
            (CHAT, r#","kv_transfer_params":{"prompt_token_ids":[1]}"#, false),
            (CHAT, r#","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]"#, false),
            ("/v1/messages", "", false),
            ("/v1/completions", r#","prompt":"x""#, false),
        ] {
            let body = format!(r#"{{"messages":[{{"role":"user","content":"u"}}]{more}}}"#);
            let view = BodyView::parse(body.as_bytes()).expect("JSON");
            assert_eq!(may_bring_ids(Api::of("POST", path).expect("a prompt"), &view), may, "{path} {more}");
        }
    }

    #[test]
    fn requests_with_one_prompt_ask_one_question() {
        let id = |body: &str| question(CHAT, body, Engine::Vllm, EngineRender::Render).expect("asked").id;
        let first = id(r#"{"model":"m","messages":[1],"tools":[2],"temperature":0}"#);
        assert_eq!(first, id(r#"{"temperature":1,"tools":[2],"messages":[1],"model":"m"}"#));
        for other in [
            r#"{"model":"n","messages":[1],"tools":[2]}"#,
            r#"{"model":"m","messages":[2],"tools":[2]}"#,
            r#"{"model":"m","messages":[1]}"#,
            r#"{"model":"m","messages":[1],"tools":[2],"reasoning_effort":"low"}"#,
        ] {
            assert_ne!(first, id(other), "{other}");
        }
    }

    #[test]
    fn ids_are_found_in_an_answer_and_nowhere_else() {
        let body = r#"{"messages":[1]}"#;
        let tokenize = question(CHAT, body, Engine::Vllm, EngineRender::Tokenize).expect("asked");
        let render = question(CHAT, body, Engine::Vllm, EngineRender::Render).expect("asked");
        for (question, answer, ids) in [
            (tokenize, r#"{"count":2,"max_model_len":9,"tokens":[1,22],"token_strs":null}"#, Some("1,22]")),
            (tokenize, r#"{"count":2, "tokens": [ 1, 22 ]}"#, Some(" 1, 22 ]")),
            (tokenize, r#"{"tokens":[]}"#, None),
            (tokenize, r#"{"tokens":[[1]]}"#, None),
            (tokenize, r#"{"tokens":null}"#, None),
            (tokenize, r#"{"tokens":[1,2"#, None),
            (tokenize, r#"{"error":{"message":"\"tokens\":[1]"}}"#, None),
            (render, r#"{"request_id":"\"token_ids\":[9]","token_ids":[3]}"#, Some("3]")),
            (render, r#"{"tokens":[3]}"#, None),
        ] {
            assert_eq!(question.ids(answer.as_bytes()), ids, "{answer}");
        }
    }
}
