//! TensorRT-LLM, context first: the context server computes the prompt and answers with parameters, from which the
//! generation server goes on. A context that ends the answer by itself needs no generation.

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::ids::ShardId;
use crate::prompt::{Api, Splice, SpliceError};

const MEMBER: &str = "disaggregated_params";

/// Makes a context leg of a body: not streamed, otherwise as the client wants it.
///
/// # Errors
/// The limits of splicing.
pub fn prefill(body: &mut Splice<'_>, request_id: u64) -> Result<(), SpliceError> {
    let ask = format!(r#"{{"request_type":"context_only","disagg_request_id":{request_id}}}"#);
    body.set_member(MEMBER, ask.as_bytes())?;
    body.set_member("stream", b"false")?;
    body.remove_member("stream_options");
    Ok(())
}

/// What a context server's answer means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Context {
    /// The generation server goes on.
    Generate(Handover),
    /// The answer is complete.
    Finished,
}

/// What a generation leg is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handover {
    /// `disaggregated_params`, a JSON text: the context's own but for its request type.
    pub params: Vec<u8>,
    /// The prompt's ids, a JSON text, where the context says them.
    pub prompt_ids: Option<Vec<u8>>,
}

/// Why a context server's answer cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the context server's answer {0}")]
pub struct ContextError(&'static str);

#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow)]
    choices: Vec<Choice<'a>>,
    #[serde(borrow, default)]
    prompt_token_ids: Option<&'a RawValue>,
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default)]
    disaggregated_params: Option<&'a RawValue>,
    #[serde(default)]
    finish_reason: Option<String>,
}

/// Reads a context server's answer.
///
/// # Errors
/// It is not what the protocol says.
pub fn read(answer: &[u8]) -> Result<Context, ContextError> {
    let answer: Answer<'_> =
        serde_json::from_slice(answer).map_err(|_| ContextError("is no JSON object with choices"))?;
    let [choice] = &answer.choices[..] else { return Err(ContextError("does not have exactly one choice")) };
    if !matches!(choice.finish_reason.as_deref(), Some("length" | "not_finished")) {
        return Ok(Context::Finished);
    }
    let params = choice.disaggregated_params.ok_or(ContextError("has no `disaggregated_params`"))?;
    let mut params = Splice::of(params.get().as_bytes())
        .map_err(|_| ContextError("has `disaggregated_params` that are no object"))?;
    if params.value("ctx_request_id").is_none_or(|id| id == b"null") {
        return Err(ContextError("names no `ctx_request_id`"));
    }
    let too_long = |_| ContextError("is too long");
    params.set_member("request_type", br#""generation_only""#).map_err(too_long)?;
    // Only versions that know the member show it.
    if params.value("ctx_usage") == Some(b"null")
        && let Some(usage) = answer.usage
    {
        params.set_member("ctx_usage", usage.get().as_bytes()).map_err(too_long)?;
    }
    let prompt_ids = answer.prompt_token_ids.map(|ids| ids.get().as_bytes().to_vec());
    let prompt_ids = prompt_ids.filter(|ids| ids.starts_with(b"["));
    Ok(Context::Generate(Handover { params: params.into_vec(), prompt_ids }))
}

/// Makes a generation leg of a body.
///
/// # Errors
/// The limits of splicing.
pub fn decode(body: &mut Splice<'_>, api: Api, handover: &Handover) -> Result<(), SpliceError> {
    body.set_member(MEMBER, &handover.params)?;
    if let Some(ids) = &handover.prompt_ids {
        let name = if api == Api::Completions { "prompt" } else { "prompt_token_ids" };
        body.set_member(name, ids)?;
    }
    Ok(())
}

/// Whether `stream_options` ask for usage.
#[must_use]
pub fn asks_usage(options: &[u8]) -> bool {
    Splice::of(options).is_ok_and(|options| options.value("include_usage") == Some(b"true"))
}

/// The answer of a context server that needs no generation, as the client gets it: without what is between servers, and
/// as a stream of events where it asked for one.
#[must_use]
pub fn finished(answer: &[u8], api: Api, stream: bool, include_usage: bool) -> Option<Vec<u8>> {
    if !stream {
        return without_internals(answer);
    }
    let answer: Map<String, Value> = serde_json::from_slice(answer).ok()?;
    let mut head = Map::new();
    for name in ["id", "object", "created", "model", "system_fingerprint"] {
        if let Some(value) = answer.get(name) {
            head.insert(name.to_owned(), value.clone());
        }
    }
    if api == Api::ChatCompletions {
        head.insert("object".to_owned(), json!("chat.completion.chunk"));
    }
    let choices = answer.get("choices")?.as_array()?.iter().cloned().map(|choice| chunk_of(choice, api));
    let mut first = head.clone();
    first.insert("choices".to_owned(), Value::Array(choices.collect()));
    let mut events = format!("data: {}\n\n", Value::Object(first));
    if include_usage && let Some(usage) = answer.get("usage") {
        head.insert("choices".to_owned(), json!([]));
        head.insert("usage".to_owned(), usage.clone());
        events.push_str(&format!("data: {}\n\n", Value::Object(head)));
    }
    events.push_str("data: [DONE]\n\n");
    Some(events.into_bytes())
}

/// A choice of a whole answer as one of a stream.
fn chunk_of(mut choice: Value, api: Api) -> Value {
    if let Some(members) = choice.as_object_mut() {
        members.remove(MEMBER);
        if api == Api::ChatCompletions
            && let Some(message) = members.remove("message")
        {
            members.insert("delta".to_owned(), message);
        }
    }
    choice
}

/// A whole answer without what is between servers; every other byte is as it came.
fn without_internals(answer: &[u8]) -> Option<Vec<u8>> {
    let mut outer = Splice::of(answer).ok()?;
    outer.remove_member("prompt_token_ids");
    let choices: Vec<&RawValue> = serde_json::from_slice(outer.value("choices")?).ok()?;
    let strip = |choice: &&RawValue| {
        let mut inner = Splice::of(choice.get().as_bytes()).ok()?;
        inner.remove_member(MEMBER);
        String::from_utf8(inner.into_vec()).ok()
    };
    let choices: Option<Vec<String>> = choices.iter().map(strip).collect();
    outer.set_member("choices", format!("[{}]", choices?.join(",")).as_bytes()).ok()?;
    Some(outer.into_vec())
}

/// Ids of disaggregated requests: positive, unlike any other of this process and, by time and a random part, of others.
///
/// ```text
/// 62           24 23         16 15    10 9        0
/// | milliseconds | process salt | shard  | counter |
/// ```
#[derive(Debug)]
pub struct RequestNumbers {
    low: u64,
    last: std::cell::Cell<u64>,
}

impl RequestNumbers {
    /// Those of a shard in a process with this random salt.
    #[must_use]
    pub fn new(shard: ShardId, salt: u8) -> Self {
        RequestNumbers { low: u64::from(salt) << 16 | (u64::from(shard.0) & 63) << 10, last: std::cell::Cell::new(0) }
    }

    /// The next number, `unix_ms` being the time.
    #[must_use]
    pub fn next(&self, unix_ms: u64) -> u64 {
        // Ids below 2^42 are the servers' own; the counter goes on within a millisecond, and beyond 1,024 in it the time
        // runs ahead.
        let ticks = (unix_ms & ((1 << 39) - 1)).max(1 << 18) << 10;
        let next = ticks.max(self.last.get() + 1);
        self.last.set(next);
        (next >> 10) << 24 | self.low | (next & 1023)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spliced(body: &str, make: impl FnOnce(&mut Splice<'_>) -> Result<(), SpliceError>) -> String {
        let mut splice = Splice::of(body.as_bytes()).expect("an object");
        make(&mut splice).expect("short edits");
        String::from_utf8(splice.into_vec()).expect("text")
    }

    const PARAMS: &str = r#"{"request_type" : "context_only", "ctx_request_id": 9223372036854775806,"first_gen_tokens":[ 7 ],"encoded_opaque_state":"YQ=="}"#;

    fn answer(reason: &str) -> String {
        format!(
            r#"{{"id":"a","object":"chat.completion","created":1,"model":"m","choices":[{{"index":0,"message":{{"role":"assistant","content":"Hi"}},"disaggregated_params":{PARAMS},"finish_reason":"{reason}"}}],"usage":{{"prompt_tokens":3}},"prompt_token_ids":[1, 2,3]}}"#
        )
    }

    #[test]
    fn a_context_leg_is_not_streamed_and_nothing_else_changes() {
        let body = r#"{"messages":[ ],"max_tokens":9,"stream_options":{},"stream":true}"#;
        let expected = r#"{"messages":[ ],"max_tokens":9,"stream":false,"disaggregated_params":{"request_type":"context_only","disagg_request_id":4398046511104}}"#;
        assert_eq!(spliced(body, |body| prefill(body, 1 << 42)), expected);
    }

    #[test]
    fn a_generation_leg_gets_the_contexts_params_and_ids_as_they_are_spelled() {
        for reason in ["length", "not_finished"] {
            let Ok(Context::Generate(handover)) = read(answer(reason).as_bytes()) else { panic!("it goes on") };
            let params = PARAMS.replace("context_only", "generation_only");
            assert_eq!(String::from_utf8_lossy(&handover.params), params);
            let chat = spliced(r#"{"messages":[]}"#, |body| decode(body, Api::ChatCompletions, &handover));
            assert_eq!(
                chat,
                format!(r#"{{"messages":[],"disaggregated_params":{params},"prompt_token_ids":[1, 2,3]}}"#)
            );
            let text = spliced(r#"{"prompt" : "x" }"#, |body| decode(body, Api::Completions, &handover));
            assert_eq!(text, format!(r#"{{"prompt" : [1, 2,3],"disaggregated_params":{params} }}"#));
        }
    }

    #[test]
    fn a_context_that_finished_is_the_answer() {
        let answer = answer("stop");
        assert_eq!(read(answer.as_bytes()), Ok(Context::Finished));
        let whole = finished(answer.as_bytes(), Api::ChatCompletions, false, false).expect("an answer");
        let expected = answer.replace(&format!(r#""disaggregated_params":{PARAMS},"#), "");
        assert_eq!(String::from_utf8_lossy(&whole), expected.replace(r#","prompt_token_ids":[1, 2,3]"#, ""));
        let events = finished(answer.as_bytes(), Api::ChatCompletions, true, true).expect("events");
        let events = String::from_utf8(events).expect("text");
        let data: Vec<&str> = events.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        assert_eq!((data.len(), data[2]), (3, "[DONE]"), "{events}");
        let chunk: Value = serde_json::from_str(data[0]).expect("JSON");
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["choices"][0]["delta"]["content"], "Hi");
        assert_eq!(chunk["choices"][0]["finish_reason"], "stop");
        assert!(!events.contains("ctx_request_id") && data[1].contains(r#""usage":{"prompt_tokens":3}"#));
    }

    #[test]
    fn an_answer_that_breaks_the_protocol_is_named() {
        for (answer, named) in [
            ("{}", "no JSON object with choices"),
            (r#"{"choices":[]}"#, "exactly one choice"),
            (r#"{"choices":[{"finish_reason":"length"}]}"#, "no `disaggregated_params`"),
            (
                r#"{"choices":[{"finish_reason":"length","disaggregated_params":{"ctx_request_id":null}}]}"#,
                "ctx_request_id",
            ),
        ] {
            assert!(read(answer.as_bytes()).expect_err(answer).to_string().contains(named), "{answer}");
        }
    }

    #[test]
    fn numbers_are_positive_above_the_servers_own_and_never_twice() {
        let numbers = RequestNumbers::new(ShardId(3), 0xa5);
        let mut seen = std::collections::HashSet::new();
        for ms in [0, 0, 1_790_000_000_000, 1_790_000_000_000, 1_789_999_999_999] {
            for _ in 0..2000 {
                let number = numbers.next(ms);
                assert!((1 << 42..1 << 63).contains(&number), "{number}");
                assert!(seen.insert(number));
            }
        }
        assert_ne!(RequestNumbers::new(ShardId(4), 0xa5).next(0), RequestNumbers::new(ShardId(3), 0xa5).next(0));
    }
}
