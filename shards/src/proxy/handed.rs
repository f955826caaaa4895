//! Ids of a chat's prompt, handed to the engine along with the chat so that it need not make them again.
//!
//! **Invariant.** One member is put into the client's bytes; everything else is sent as it came. Where the client has a member of that name, whatever it holds, nothing is put in.

#![forbid(unsafe_code)]

use crate::prompt::Splice;
use crate::service::Engine;

/// Ids written between two chances to give way.
pub const SLICE_IDS: usize = 16 * 1024;

/// The member that takes the ids.
const MEMBER: &str = "prompt_token_ids";

/// A list of ids as JSON, written in slices.
#[derive(Debug, Default)]
pub struct List(Vec<u8>);

impl List {
    /// Appends ids.
    pub fn push(&mut self, ids: &[u32]) {
        self.0.reserve(ids.len() * 7 + 2);
        for id in ids {
            self.0.push(if self.0.is_empty() { b'[' } else { b',' });
            push_number(*id, &mut self.0);
        }
    }

    /// The JSON text; none of no ids.
    #[must_use]
    pub fn finish(mut self) -> Option<Box<[u8]>> {
        if self.0.is_empty() {
            return None;
        }
        self.0.push(b']');
        Some(self.0.into())
    }
}

fn push_number(mut number: u32, out: &mut Vec<u8>) {
    let mut digits = [0; 10];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return out.extend_from_slice(&digits[at..]);
        }
    }
}

/// The body that is sent instead. None where the engine takes no ids, or where the client has a say in them.
#[must_use]
pub fn with_ids(engine: Engine, body: &[u8], list: &[u8]) -> Option<Vec<u8>> {
    const TRANSFER: &str = "kv_transfer_params";
    let mut splice = Splice::of(body).ok()?;
    match engine {
        Engine::Vllm => {
            let own = splice.value(TRANSFER);
            if own.is_some_and(|own| Splice::of(own).is_ok_and(|own| own.value(MEMBER).is_some())) {
                return None;
            }
            // What is no object is the client's affair, and the engine's.
            splice.set_inside(TRANSFER, MEMBER, list).ok()?;
        }
        Engine::Sglang | Engine::Trtllm => {
            let name = if engine == Engine::Sglang { "input_ids" } else { MEMBER };
            if splice.value(name).is_some() {
                return None;
            }
            splice.set_member(name, list).ok()?;
        }
        Engine::Llamacpp => return None,
    }
    Some(splice.into_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_member_is_put_in_where_the_engine_looks_for_it() {
        use Engine::{Llamacpp, Sglang, Trtllm, Vllm};
        for (engine, body, expected) in [
            (Vllm, r#"{"m" : 1}"#, Some(r#"{"m" : 1,"kv_transfer_params":{"prompt_token_ids":[1,20]}}"#)),
            (
                Vllm,
                r#"{"kv_transfer_params":{"a": 0}, "m":1}"#,
                Some(r#"{"kv_transfer_params":{"a": 0,"prompt_token_ids":[1,20]}, "m":1}"#),
            ),
            (Vllm, r#"{"kv_transfer_params":{"prompt_token_id\u0073":null}}"#, None),
            (Vllm, r#"{"kv_transfer_params":7}"#, None),
            (Sglang, r#"{"m":1}"#, Some(r#"{"m":1,"input_ids":[1,20]}"#)),
            (Sglang, r#"{"input_ids":null}"#, None),
            (Trtllm, r#"{"m":1}"#, Some(r#"{"m":1,"prompt_token_ids":[1,20]}"#)),
            (Trtllm, r#"{"prompt_token_ids":[]}"#, None),
            (Llamacpp, r#"{"m":1}"#, None),
            (Trtllm, "[]", None),
        ] {
            let edited = with_ids(engine, body.as_bytes(), b"[1,20]");
            let edited = edited.map(|edited| String::from_utf8(edited).expect("text"));
            assert_eq!(edited.as_deref(), expected, "{engine:?} {body}");
        }
    }

    #[test]
    fn lists_are_json_wherever_the_slices_end() {
        let ids = [0, 7, 10, 99_999, u32::MAX];
        for cut in 0..=ids.len() {
            let mut list = List::default();
            list.push(&ids[..cut]);
            list.push(&ids[cut..]);
            assert_eq!(list.finish().as_deref(), Some(&b"[0,7,10,99999,4294967295]"[..]), "cut at {cut}");
        }
        assert_eq!(List::default().finish(), None);
    }
}
