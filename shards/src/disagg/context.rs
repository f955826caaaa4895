//! TensorRT-LLM, context first: the context server computes the prompt and answers with parameters, from which the
//! generation server goes on. A context that ends the answer by itself needs no generation.

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

/// What a generation leg is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handover<'a> {
    /// `disaggregated_params`, a JSON text: the context's own but for its request type.
    pub params: Vec<u8>,
    /// The prompt's ids, a JSON text, where the context says them.
    pub prompt_ids: Option<&'a [u8]>,
}

/// Why a context server's answer cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the context server's answer {0}")]
pub struct ContextError(&'static str);

/// It is no JSON object.
pub const NO_OBJECT: ContextError = ContextError("is no JSON object with choices");
/// It has no choice, or several.
pub const NO_CHOICE: ContextError = ContextError("does not have exactly one choice");
/// Its parameters are something else.
pub const NO_PARAMS: ContextError = ContextError("has `disaggregated_params` that are no object");

/// The choice in an answer, a JSON object if the answer is right. Whoever asks looks through it in slices, as through the
/// answer: with a long prompt's ids or logits in them, both have megabytes.
///
/// # Errors
/// It is not what the protocol says.
pub fn choice<'a>(answer: &Splice<'a>) -> Result<&'a [u8], ContextError> {
    let choices = answer.value("choices").ok_or(NO_OBJECT)?;
    let inside = choices.strip_prefix(b"[").and_then(|rest| rest.strip_suffix(b"]")).ok_or(NO_OBJECT)?;
    Ok(inside.trim_ascii())
}

/// The parameters in a choice that a generation server goes on from; none where the answer is complete.
///
/// # Errors
/// It is not what the protocol says.
pub fn params<'a>(choice: &Splice<'a>) -> Result<Option<&'a [u8]>, ContextError> {
    if !matches!(choice.value("finish_reason"), Some(br#""length""# | br#""not_finished""#)) {
        return Ok(None);
    }
    let params = choice.value(MEMBER).filter(|params| params != b"null");
    params.map(Some).ok_or(ContextError("has no `disaggregated_params`"))
}

/// What the generation leg is given, by the answer and its parameters.
///
/// # Errors
/// It is not what the protocol says.
pub fn handover<'a>(answer: &Splice<'a>, mut params: Splice<'a>) -> Result<Handover<'a>, ContextError> {
    if params.value("ctx_request_id").is_none_or(|id| id == b"null") {
        return Err(ContextError("names no `ctx_request_id`"));
    }
    let too_long = |_| ContextError("is too long");
    params.set_member("request_type", br#""generation_only""#).map_err(too_long)?;
    // Only versions that know the member show it.
    if params.value("ctx_usage") == Some(b"null")
        && let Some(usage) = answer.value("usage")
    {
        params.set_member("ctx_usage", usage).map_err(too_long)?;
    }
    let prompt_ids = answer.value("prompt_token_ids").filter(|ids| ids.starts_with(b"["));
    Ok(Handover { params: params.into_vec(), prompt_ids })
}

/// Makes a generation leg of a body.
///
/// # Errors
/// The limits of splicing.
pub fn decode<'a>(body: &mut Splice<'a>, api: Api, handover: &Handover<'a>) -> Result<(), SpliceError> {
    body.set_member(MEMBER, &handover.params)?;
    if let Some(ids) = handover.prompt_ids {
        let name = if api == Api::Completions { "prompt" } else { "prompt_token_ids" };
        body.put_member(name, ids)?;
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
pub fn finished(
    answer: Splice<'_>,
    choice: Splice<'_>,
    api: Api,
    stream: bool,
    include_usage: bool,
) -> Option<Vec<u8>> {
    if !stream {
        return without_internals(answer, choice);
    }
    let value = |name: &str| answer.value(name).and_then(|text| serde_json::from_slice::<Value>(text).ok());
    let mut head = Map::new();
    for name in ["id", "object", "created", "model", "system_fingerprint"] {
        if let Some(value) = value(name) {
            head.insert(name.to_owned(), value);
        }
    }
    if api == Api::ChatCompletions {
        head.insert("object".to_owned(), json!("chat.completion.chunk"));
    }
    let mut first = head.clone();
    first.insert("choices".to_owned(), json!([chunk_of(choice, api)?]));
    let mut events = format!("data: {}\n\n", Value::Object(first));
    if include_usage && let Some(usage) = value("usage") {
        head.insert("choices".to_owned(), json!([]));
        head.insert("usage".to_owned(), usage);
        events.push_str(&format!("data: {}\n\n", Value::Object(head)));
    }
    events.push_str("data: [DONE]\n\n");
    Some(events.into_bytes())
}

/// A choice of a whole answer as one of a stream.
fn chunk_of(mut choice: Splice<'_>, api: Api) -> Option<Value> {
    choice.remove_member(MEMBER);
    let mut choice: Value = serde_json::from_slice(&choice.into_vec()).ok()?;
    if let Some(members) = choice.as_object_mut()
        && api == Api::ChatCompletions
        && let Some(message) = members.remove("message")
    {
        members.insert("delta".to_owned(), message);
    }
    Some(choice)
}

/// A whole answer without what is between servers; every other byte is as it came.
fn without_internals(mut answer: Splice<'_>, mut choice: Splice<'_>) -> Option<Vec<u8>> {
    answer.remove_member("prompt_token_ids");
    choice.remove_member(MEMBER);
    let choices = [b"[", &choice.into_vec()[..], b"]"].concat();
    answer.set_member("choices", &choices).ok()?;
    Some(answer.into_vec())
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

    fn spliced<'a>(body: &'a str, make: impl FnOnce(&mut Splice<'a>) -> Result<(), SpliceError>) -> String {
        let mut splice = Splice::of(body.as_bytes()).expect("an object");
        make(&mut splice).expect("short edits");
        String::from_utf8(splice.into_vec()).expect("text")
    }

    /// The parameters, and the ids where there are some.
    type Read = (Vec<u8>, Option<Vec<u8>>);

    /// What an answer comes to: what is handed over, or none where it is complete.
    fn read(answer: &[u8]) -> Result<Option<Read>, ContextError> {
        let answer = Splice::of(answer).map_err(|_| NO_OBJECT)?;
        let choice = Splice::of(choice(&answer)?).map_err(|_| NO_CHOICE)?;
        let Some(found) = params(&choice)? else { return Ok(None) };
        let handover = handover(&answer, Splice::of(found).map_err(|_| NO_PARAMS)?)?;
        Ok(Some((handover.params, handover.prompt_ids.map(<[u8]>::to_vec))))
    }

    fn as_client_gets_it(answer: &[u8], stream: bool) -> Vec<u8> {
        let answer = Splice::of(answer).expect("an object");
        let choice = Splice::of(choice(&answer).expect("a choice")).expect("an object");
        finished(answer, choice, Api::ChatCompletions, stream, true).expect("an answer")
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
            let answer = answer(reason);
            let (handed, ids) = read(answer.as_bytes()).expect("right").expect("it goes on");
            let params = PARAMS.replace("context_only", "generation_only");
            assert_eq!(String::from_utf8_lossy(&handed), params);
            let handover = Handover { params: handed, prompt_ids: ids.as_deref() };
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
        assert_eq!(read(answer.as_bytes()), Ok(None));
        let whole = as_client_gets_it(answer.as_bytes(), false);
        let expected = answer.replace(&format!(r#""disaggregated_params":{PARAMS},"#), "");
        assert_eq!(String::from_utf8_lossy(&whole), expected.replace(r#","prompt_token_ids":[1, 2,3]"#, ""));
        let events = as_client_gets_it(answer.as_bytes(), true);
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
            (r#"{"choices":[{"finish_reason":"length"},{"finish_reason":"length"}]}"#, "exactly one choice"),
            (r#"{"choices":[{"finish_reason":"length","disaggregated_params":7}]}"#, "that are no object"),
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
