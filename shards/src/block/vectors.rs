//! Reads the golden data of `tests/vectors` for the tests of the contracts.

use serde_json::Value;

/// A file of the repository's vectors.
pub(super) fn load(name: &str) -> Value {
    let path = format!("{}/../tests/vectors/{name}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).expect("the vectors are part of the repository");
    serde_json::from_str(&text).expect("the vectors are JSON")
}

/// A list of tokens of 32 bits.
pub(super) fn tokens(value: &Value) -> Vec<u32> {
    wide_tokens(value).into_iter().map(|token| u32::try_from(token).expect("a token of 32 bits")).collect()
}

/// A list of tokens.
pub(super) fn wide_tokens(value: &Value) -> Vec<u64> {
    value.as_array().expect("tokens").iter().map(|token| token.as_u64().expect("a token")).collect()
}

/// A number that is written as text, since it exceeds what JSON readers keep.
pub(super) fn u64_text(value: &Value) -> u64 {
    value.as_str().expect("a number as text").parse().expect("a u64")
}

/// Bytes as lower-case hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes of hexadecimal digits.
pub(super) fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().map(|c| c.to_digit(16).expect("a hexadecimal digit")).collect();
    digits.chunks(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect()
}
