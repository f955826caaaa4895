//! The signature that TensorRT-LLM wants on requests with a context's parameters: HMAC-SHA-256 of two of them.

use serde::Deserialize;
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};

/// The header that carries it.
pub const HEADER: &str = "x-trtllm-disagg-auth";

/// The key that orchestrator and workers share (`internal_request_auth_key`). It shows in no log.
#[derive(Clone, PartialEq, Eq)]
pub struct AuthKey(Box<[u8]>);

impl std::fmt::Debug for AuthKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("AuthKey")
    }
}

/// The members that are signed, as they are spelled.
#[derive(Default, Deserialize)]
struct Signed<'a> {
    #[serde(borrow, default)]
    ctx_info_endpoint: Option<&'a RawValue>,
    #[serde(borrow, default)]
    encoded_opaque_state: Option<&'a RawValue>,
}

impl AuthKey {
    /// A key.
    #[must_use]
    pub fn new(key: &[u8]) -> Self {
        AuthKey(key.into())
    }

    /// The header's value for `disaggregated_params`, a JSON text.
    #[must_use]
    pub fn header_value(&self, params: &[u8]) -> String {
        let hex: String = self.hmac(payload(params).as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("sha256={hex}")
    }

    fn hmac(&self, message: &[u8]) -> [u8; 32] {
        let mut block = [0_u8; 64];
        if self.0.len() > block.len() {
            block[..32].copy_from_slice(&Sha256::digest(&self.0));
        } else {
            block[..self.0.len()].copy_from_slice(&self.0);
        }
        let inner = Sha256::new().chain_update(block.map(|byte| byte ^ 0x36)).chain_update(message).finalize();
        Sha256::new().chain_update(block.map(|byte| byte ^ 0x5c)).chain_update(inner).finalize().into()
    }
}

/// What is signed: compact JSON with sorted names; what is absent is null.
fn payload(params: &[u8]) -> String {
    let signed: Signed<'_> = serde_json::from_slice(params).unwrap_or_default();
    // Values are read and written again: the worker signs what it has parsed.
    let text = |raw: Option<&RawValue>| {
        let value: serde_json::Value = raw.and_then(|raw| serde_json::from_str(raw.get()).ok()).unwrap_or_default();
        ascii(&value.to_string())
    };
    format!(
        r#"{{"ctx_info_endpoint":{},"encoded_opaque_state":{}}}"#,
        text(signed.ctx_info_endpoint),
        text(signed.encoded_opaque_state)
    )
}

/// Letters beyond ASCII as Python's `json.dumps` spells them.
fn ascii(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        if letter.is_ascii() {
            out.push(letter);
        } else {
            letter.encode_utf16(&mut [0; 2]).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn signatures_are_those_of_the_vectors() {
        let text = include_str!("../../../tests/vectors/trtllm_hash.json");
        let vectors: Vec<Value> = serde_json::from_str(text).expect("the vectors are JSON");
        let signatures: Vec<&Value> = vectors.iter().filter(|v| v["algo"] == "disagg_auth_hmac_sha256").collect();
        assert_eq!(signatures.len(), 3);
        for vector in signatures {
            let (input, expected) = (&vector["input"], &vector["expected"]);
            let key = AuthKey::new(input["internal_request_auth_key"].as_str().expect("a text").as_bytes());
            let params = json!({
                "request_type": "generation_only", "encoded_opaque_state": input["encoded_opaque_state"],
                "ctx_info_endpoint": input["ctx_info_endpoint"], "ctx_request_id": 7,
            });
            let params = params.to_string();
            assert_eq!(payload(params.as_bytes()), expected["signed_payload"], "{}", vector["name"]);
            assert_eq!(key.header_value(params.as_bytes()), expected["header_value"], "{}", vector["name"]);
            assert_eq!(HEADER, expected["header_name"]);
        }
    }

    #[test]
    fn absent_members_count_as_null_and_a_long_key_is_hashed_first() {
        assert_eq!(payload(b"{}"), r#"{"ctx_info_endpoint":null,"encoded_opaque_state":null}"#);
        assert_eq!(payload(br#"{"ctx_info_endpoint":"\u00e9"}"#), payload("{\"ctx_info_endpoint\":\"é\"}".as_bytes()));
        // RFC 4231, test case 6.
        let key = AuthKey::new(&[0xaa; 131]);
        let hash = key.hmac(b"Test Using Larger Than Block-Size Key - Hash Key First");
        assert_eq!(hash[..4], [0x60, 0xe4, 0x31, 0x59]);
        assert_eq!(format!("{key:?}"), "AuthKey");
    }
}
