//! The members of a request body that the gateway reads, without a copy of the body.

use std::borrow::Cow;

use super::json;
use super::scan::{Member, Scan};

/// Top-level members of a request body that the gateway reads: raw JSON text inside the body, decoded when used.
///
/// A repeated member counts by its last value, as in Python. An explicit `null` is like an absent member.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BodyView<'a> {
    /// `model`, unescaped; none when it is no string.
    pub model: Option<Cow<'a, str>>,
    /// `stream` is true.
    pub stream: bool,
    /// `user`, unescaped; none when it is no string.
    pub user: Option<Cow<'a, str>>,
    /// The rank that is to serve the request, as it stands: `routed_dp_rank` or `data_parallel_rank`.
    pub rank: Option<&'a str>,
    /// What it asks for of probabilities.
    logprobs: Logprobs,
    /// All of it.
    pub(super) body: &'a [u8],
    pub(super) prompt: Option<&'a str>,
    pub(super) messages: Option<&'a str>,
    pub(super) tools: Option<&'a str>,
    pub(super) documents: Option<&'a str>,
    pub(super) chat_template_kwargs: Option<&'a str>,
    pub(super) reasoning_effort: Option<&'a str>,
    pub(super) add_generation_prompt: Option<&'a str>,
    pub(super) continue_final_message: Option<&'a str>,
    pub(super) add_special_tokens: Option<&'a str>,
    pub(super) truncate_prompt_tokens: Option<&'a str>,
    pub(super) truncation_side: Option<&'a str>,
    pub(super) tool_choice: Option<&'a str>,
    /// Of `/v1/responses`.
    pub(super) input: Option<&'a str>,
    pub(super) instructions: Option<&'a str>,
    pub(super) reasoning: Option<&'a str>,
    pub(super) previous_response_id: Option<&'a str>,
    pub(super) previous_input_messages: Option<&'a str>,
    pub(super) truncation: Option<&'a str>,
    /// Of `/v1/messages`.
    pub(super) system: Option<&'a str>,
    pub(super) thinking: Option<&'a str>,
    pub(super) output_config: Option<&'a str>,
    /// Of SGLang's `/generate`; `input_ids` of its chats as well.
    pub(super) text: Option<&'a str>,
    pub(super) input_ids: Option<&'a str>,
    pub(super) input_embeds: Option<&'a str>,
    pub(super) image_data: Option<&'a str>,
    pub(super) video_data: Option<&'a str>,
    pub(super) audio_data: Option<&'a str>,
    /// Of TensorRT-LLM's chats.
    pub(super) prompt_token_ids: Option<&'a str>,
    pub(super) cache_salt: Option<&'a str>,
    /// SGLang's; other engines do not know it.
    pub(super) extra_key: Option<&'a str>,
    /// The first member found that makes the engine's tokens or keys other than the ones we would make.
    pub(super) unkeyable: Option<&'static str>,
}

/// Members that ask for probabilities of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Logprobs {
    /// `prompt_logprobs` or `prompt_logprob_token_ids`.
    of_prompt: bool,
    echo: bool,
    /// `logprobs`.
    of_answer: bool,
    /// SGLang's `return_logprob`, and `logprob_start_len` of 0 or more.
    returned: bool,
    from_start: bool,
}

impl<'a> BodyView<'a> {
    /// Reads the members without copying the body; none when it is no JSON object in UTF-8.
    #[must_use]
    pub fn parse(body: &'a [u8]) -> Option<Self> {
        let mut scan = BodyScan::new(body);
        // Each byte is looked at twice: the second time it is still near.
        while !scan.step(STEP_BYTES)? {}
        Some(scan.view)
    }

    /// Whether the request asks for blocks of its own, which other requests with the same prompt do not share.
    #[must_use]
    pub fn is_salted(&self) -> bool {
        self.cache_salt.is_some()
    }

    /// Whether the engine looks up nothing of the prompt in its cache, because probabilities of the prompt's own tokens
    /// are asked for.
    #[must_use]
    pub fn skips_cache(&self) -> bool {
        let Logprobs { of_prompt, echo, of_answer, returned, from_start } = self.logprobs;
        of_prompt || (echo && of_answer) || (returned && from_start)
    }

    /// The members that decide over a prompt's text or keys beside the prompt itself, in a fixed order.
    pub(super) fn members(&self) -> [Option<&'a str>; 11] {
        // Every member is named here, so that a new one cannot be forgotten.
        let BodyView {
            tools,
            documents,
            chat_template_kwargs,
            reasoning_effort,
            reasoning,
            tool_choice,
            add_generation_prompt,
            continue_final_message,
            add_special_tokens,
            cache_salt,
            extra_key,
            // These are the prompt, or decide over its text before it is looked for.
            model: _,
            stream: _,
            user: _,
            rank: _,
            logprobs: _,
            body: _,
            prompt: _,
            messages: _,
            truncate_prompt_tokens: _,
            truncation_side: _,
            input: _,
            instructions: _,
            previous_response_id: _,
            previous_input_messages: _,
            truncation: _,
            system: _,
            thinking: _,
            output_config: _,
            text: _,
            input_ids: _,
            input_embeds: _,
            image_data: _,
            video_data: _,
            audio_data: _,
            prompt_token_ids: _,
            unkeyable: _,
        } = *self;
        [
            tools,
            documents,
            chat_template_kwargs,
            reasoning_effort,
            reasoning,
            tool_choice,
            add_generation_prompt,
            continue_final_message,
            add_special_tokens,
            cache_salt,
            extra_key,
        ]
    }

    fn set(&mut self, name: &str, raw: &'a str) {
        let present = (raw != "null").then_some(raw);
        match name {
            "model" => {
                let short = present.filter(|raw| raw.len() <= MODEL_BYTES_MAX);
                self.model = short.and_then(|raw| json::string(raw).ok());
            }
            "stream" => self.stream = raw == "true",
            "user" => {
                let short = present.filter(|raw| raw.len() <= USER_BYTES_MAX);
                self.user = short.and_then(|raw| json::string(raw).ok());
            }
            "routed_dp_rank" | "data_parallel_rank" => self.rank = present,
            "prompt_logprobs" => self.logprobs.of_prompt |= present.is_some(),
            "prompt_logprob_token_ids" => self.logprobs.of_prompt |= present.is_some(),
            "echo" => self.logprobs.echo = raw == "true",
            "logprobs" => self.logprobs.of_answer = present.is_some_and(|raw| raw != "false"),
            "return_logprob" => self.logprobs.returned = raw == "true",
            "logprob_start_len" => self.logprobs.from_start = present.is_some_and(|raw| !raw.starts_with('-')),
            "prompt" => self.prompt = present,
            "messages" => self.messages = present,
            "tools" => self.tools = present,
            "documents" => self.documents = present,
            "chat_template_kwargs" => self.chat_template_kwargs = present,
            "reasoning_effort" => self.reasoning_effort = present,
            "truncate_prompt_tokens" => self.truncate_prompt_tokens = present,
            "truncation_side" => self.truncation_side = present,
            "tool_choice" => self.tool_choice = present,
            "input" => self.input = present,
            "instructions" => self.instructions = present,
            "reasoning" => self.reasoning = present,
            "previous_response_id" => self.previous_response_id = present,
            "previous_input_messages" => self.previous_input_messages = present,
            "truncation" => self.truncation = present,
            "system" => self.system = present,
            "thinking" => self.thinking = present,
            "output_config" => self.output_config = present,
            "text" => self.text = present,
            "input_ids" => self.input_ids = present,
            "input_embeds" => self.input_embeds = present,
            "image_data" => self.image_data = present,
            "video_data" => self.video_data = present,
            "audio_data" => self.audio_data = present,
            "prompt_token_ids" => self.prompt_token_ids = present,
            "cache_salt" => self.cache_salt = present,
            "extra_key" => self.extra_key = present,
            // These have defaults that null does not stand for: the engine refuses it.
            "add_generation_prompt" => self.add_generation_prompt = Some(raw),
            "continue_final_message" => self.continue_final_message = Some(raw),
            "add_special_tokens" => self.add_special_tokens = Some(raw),
            _ => {
                let member = UNKEYABLE.iter().find(|member| **member == name);
                if let (Some(member), Some(raw)) = (member, present) {
                    // Transfer parameters matter only where they bring the tokens along.
                    if *member != "kv_transfer_params"
                        || raw.len() > TRANSFER_BYTES_MAX
                        || raw.contains("prompt_token_ids")
                    {
                        self.unkeyable = Some(member);
                    }
                }
            }
        }
    }
}

/// Members that change the engine's tokens or keys in a way the gateway does not follow: such a request is routed
/// without keys. Once seen they count, even if the member is repeated with null: Python's null would undo it, at the
/// cost of one missed hit for a body nobody sends.
const UNKEYABLE: [&str; 7] = [
    "prompt_embeds",
    "chat_template",
    "suffix",
    "kv_transfer_params",
    // SGLang: an adapter by path.
    "lora_path",
    // TensorRT-LLM: tokens in another spelling, and an adapter by path.
    "prompt_token_ids_b64",
    "lora_request",
];

/// A look through a body in slices.
#[derive(Debug)]
pub struct BodyScan<'a> {
    scan: Scan<'a>,
    view: BodyView<'a>,
}

impl<'a> BodyScan<'a> {
    /// Begins with a body.
    #[must_use]
    pub fn new(body: &'a [u8]) -> Self {
        BodyScan { scan: Scan::new(body), view: BodyView { body, ..BodyView::default() } }
    }

    /// Looks at so many further bytes, at least; whether the end is reached. None when the body is no JSON object in
    /// UTF-8.
    pub fn step(&mut self, bytes: usize) -> Option<bool> {
        let view = &mut self.view;
        let done = self.scan.step(bytes, |Member { name, value }| {
            // No name that is read is as long as this, whatever its escapes.
            if name.len() > NAME_BYTES_MAX {
                return;
            }
            if let Ok(name) = json::string(name)
                && is_read(&name)
            {
                view.set(&name, value);
            }
        });
        done.ok()
    }

    /// What was found.
    #[must_use]
    pub fn into_view(self) -> BodyView<'a> {
        self.view
    }
}

/// Bytes looked at in one step where nobody has to be let by.
const STEP_BYTES: usize = 16 * 1024;
/// Bytes of a member's name as it stands, beyond which it is none that is read.
const NAME_BYTES_MAX: usize = 256;
/// Bytes of a model's name as it stands in the body. A longer one is like none.
const MODEL_BYTES_MAX: usize = 8 * 1024;
/// Bytes of a user's name as it stands in the body. A longer one is like none.
const USER_BYTES_MAX: usize = 1024;
/// Bytes of transfer parameters that are looked through; longer ones are taken to bring tokens along.
const TRANSFER_BYTES_MAX: usize = 64 * 1024;

fn is_read(name: &str) -> bool {
    const READ: &[&str] = &[
        "model",
        "stream",
        "user",
        "routed_dp_rank",
        "data_parallel_rank",
        "prompt_logprobs",
        "prompt_logprob_token_ids",
        "echo",
        "logprobs",
        "return_logprob",
        "logprob_start_len",
        "prompt",
        "messages",
        "tools",
        "documents",
        "chat_template_kwargs",
        "reasoning_effort",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
        "tool_choice",
        "input",
        "instructions",
        "reasoning",
        "previous_response_id",
        "previous_input_messages",
        "truncation",
        "system",
        "thinking",
        "output_config",
        "text",
        "input_ids",
        "input_embeds",
        "image_data",
        "video_data",
        "audio_data",
        "prompt_token_ids",
        "cache_salt",
        "extra_key",
    ];
    READ.contains(&name) || UNKEYABLE.contains(&name)
}

/// A member that must be true or false; none = the default.
pub(super) fn flag(raw: Option<&str>, default: bool) -> Option<bool> {
    match raw {
        None => Some(default),
        Some("true") => Some(true),
        Some("false") => Some(false),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn members_are_found_wherever_they_stand() {
        let body =
            br#" {"x": {"model": "no", "deep": [[[{}]]]}, "mod\u0065l": "a\/b", "prompt": "p", "n": 1.50, "e": 1e3,
            "stream": true, "prompt" : [1, 2] , "user": "\u0061b", "routed_dp_rank": 3, "tools": null, "add_special_tokens": false} "#;
        let view = BodyView::parse(body).unwrap();
        assert_eq!(view.model.as_deref(), Some("a/b"));
        assert!(view.stream);
        assert_eq!((view.user.as_deref(), view.rank), (Some("ab"), Some("3")));
        assert_eq!(view.prompt, Some("[1, 2]"), "the last of two counts");
        assert_eq!(view.tools, None);
        assert_eq!(flag(view.add_special_tokens, true), Some(false));
        assert_eq!(view.unkeyable, None);
    }

    #[test]
    fn what_asks_for_probabilities_of_the_prompt_skips_the_cache() {
        for (members, skips) in [
            (r#""prompt_logprobs": 0"#, true),
            (r#""prompt_logprobs": null, "logprobs": true"#, false),
            (r#""echo": true, "logprobs": 1"#, true),
            (r#""echo": true, "logprobs": null"#, false),
            (r#""echo": false, "logprobs": 1"#, false),
            (r#""return_logprob": true, "logprob_start_len": 0"#, true),
            (r#""return_logprob": true, "logprob_start_len": -1"#, false),
            (r#""return_logprob": true"#, false),
        ] {
            let body = format!(r#"{{"prompt": "p", {members}}}"#);
            assert_eq!(BodyView::parse(body.as_bytes()).unwrap().skips_cache(), skips, "{members}");
        }
    }

    #[test]
    fn members_that_change_the_tokens_are_noticed() {
        for (member, expected) in [
            (r#""prompt_embeds": "AAAA""#, Some("prompt_embeds")),
            (r#""prompt_embeds": null"#, None),
            (r#""cache_salt": "x", "extra_key": "y""#, None),
            (r#""lora_request": {}"#, Some("lora_request")),
            (r#""kv_transfer_params": {"do_remote_decode": true}"#, None),
            (r#""kv_transfer_params": {"prompt_token_ids": [1]}"#, Some("kv_transfer_params")),
        ] {
            let body = format!(r#"{{"prompt": "p", {member}}}"#);
            assert_eq!(BodyView::parse(body.as_bytes()).unwrap().unkeyable, expected, "{member}");
        }
    }

    #[test]
    fn what_is_no_json_object_has_no_view() {
        for body in
            [&b""[..], b"[]", b"\"x\"", b"{", b"{\"a\":}", b"{\"a\":1}x", b"{\"a\":\"\xff\"}", b"{\"a\":1,}", b"nul"]
        {
            assert!(BodyView::parse(body).is_none(), "{body:?}");
        }
    }

    #[test]
    fn deep_nesting_does_not_use_up_the_stack() {
        for open in ["[", "{\"a\":"] {
            let body = format!("{{\"x\":{}", open.repeat(2_000_000));
            assert!(BodyView::parse(body.as_bytes()).is_none());
            let body = format!("{{\"messages\":{}", open.repeat(2_000_000));
            assert!(BodyView::parse(body.as_bytes()).is_none());
        }
        let body = format!("{{\"x\":{}{},\"model\":\"m\"}}", "[".repeat(500_000), "]".repeat(500_000));
        assert_eq!(BodyView::parse(body.as_bytes()).unwrap().model.as_deref(), Some("m"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(body in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = BodyView::parse(&body);
        }

        /// Whatever parses as an object in serde_json's own model agrees with it about the model's name.
        #[test]
        fn json_like_texts_agree_with_a_plain_parser(body in "\\{(\"(model|prompt|a)\":(\"[a-z\\\\n]{0,4}\"|1.5|null|\\[\\]|\\{\\}),?){0,4}\\}") {
            let plain: Option<serde_json::Value> = serde_json::from_str(&body).ok();
            let view = BodyView::parse(body.as_bytes());
            prop_assert_eq!(view.is_some(), plain.is_some());
            if let (Some(view), Some(plain)) = (view, plain) {
                prop_assert_eq!(view.model.as_deref(), plain.get("model").and_then(|m| m.as_str()));
            }
        }
    }
}
