//! TensorRT-LLM's `v1_block_key`: a 64-bit mix of parent, tokens, salt and adapter. All arithmetic wraps.

use sha2::{Digest as _, Sha256};

use super::{Digest, Namespace};

const C1: u64 = 0xbf58_476d_1ce4_e5b9;
const C2: u64 = 0x94d0_49bb_1331_11eb;

/// How one engine hashes.
#[derive(Clone, Copy, Debug)]
pub struct Chain {
    /// `cache_salt` enters the hash (from 1.1).
    pub salted: bool,
}

/// What stands before block 0.
#[must_use]
pub fn root() -> Digest {
    named(0)
}

fn named(key: u64) -> Digest {
    Digest::new(&key.to_be_bytes(), key)
}

impl Chain {
    /// See [`super::Chain::child`]. Blocks may be shorter than a full one.
    #[must_use]
    pub fn child(&self, parent: &Digest, tokens: &[u32], namespace: &Namespace) -> Digest {
        let salt = namespace.salt.as_deref().filter(|_| self.salted).map(salt_id);
        named(key(parent.key(), tokens, salt, namespace.lora.as_ref().map(|lora| lora.id)))
    }
}

/// The number a salt becomes: the first 8 bytes of its SHA-256, little-endian.
fn salt_id(salt: &str) -> u64 {
    Sha256::digest(salt).iter().take(8).rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn key(parent: u64, tokens: &[u32], salt: Option<u64>, lora: Option<u64>) -> u64 {
    let mut seed = tokens.len() as u64 ^ parent.wrapping_mul(C1);
    if let Some(salt) = salt.filter(|_| parent == 0) {
        seed = mix64(salt, seed);
    }
    for token in tokens {
        seed = mix32(*token, seed);
    }
    lora.map_or(seed, |lora| mix64(lora, seed))
}

fn mix32(value: u32, seed: u64) -> u64 {
    let step = |a: u32| ((a >> 16) ^ a).wrapping_mul(0x045d_9f3b);
    let a = step(step(value));
    let a = ((a >> 16) ^ a).wrapping_add(0x9e37_79b9);
    combine(u64::from(a), seed)
}

fn mix64(value: u64, seed: u64) -> u64 {
    let a = (value ^ (value >> 30)).wrapping_mul(C1);
    let a = (a ^ (a >> 27)).wrapping_mul(C2);
    combine((a ^ (a >> 31)).wrapping_add(0x9e37_79b9), seed)
}

fn combine(value: u64, seed: u64) -> u64 {
    seed ^ value.wrapping_add(seed << 6).wrapping_add(seed >> 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::vectors;
    use serde_json::Value;

    fn number(value: &Value) -> Option<u64> {
        value.as_u64().or_else(|| value.as_str()?.parse().ok())
    }

    /// Checks one vector; false where it uses what is not simulated (extra ids, images, other algorithms).
    fn check(case: &Value) -> bool {
        let (name, input) = (case["name"].as_str().unwrap_or_default(), &case["input"]);
        let prompt = case["algo"] == "v1_block_key_prompt";
        if !(prompt || case["algo"] == "v1_block_key")
            || input.get("token_extra_ids").is_some()
            || input.get("mm_keys_by_block").is_some()
        {
            return false;
        }
        let tokens = if prompt { &input["prompt_tokens"] } else { &input["tokens"] };
        let mut tokens: Vec<u32> = serde_json::from_value(tokens.clone()).expect("token ids fit 32 bits");
        if prompt {
            // A prompt's last token is never part of a key.
            tokens.pop();
        }
        let salt = number(&input["cache_salt_id"]);
        if let Some(text) = input["cache_salt"].as_str() {
            assert_eq!(Some(salt_id(text)), salt, "{name}");
        }
        let size = input["tokens_per_block"].as_u64().expect("a vector has a block size") as usize;
        let mut parent = 0;
        let keys: Vec<String> = tokens
            .chunks(size)
            .map(|block| {
                parent = key(parent, block, salt, number(&input["lora_task_id"]));
                parent.to_string()
            })
            .collect();
        assert_eq!(serde_json::json!(keys), case["expected"]["block_hashes"], "{name}");
        true
    }

    #[test]
    fn keys_are_those_of_the_vectors() {
        let vectors = vectors("trtllm_hash.json");
        let checked = vectors.as_array().expect("a list of cases").iter().filter(|case| check(case)).count();
        assert_eq!(checked, 24 + 8, "chains of text, and prompts");
    }
}
