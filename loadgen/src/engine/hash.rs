//! Block hashing of vLLM's `*_cbor` algorithms, through a general CBOR library.
//!
//! A block's digest is the hash of the CBOR array (parent digest, token ids, extra keys); the chain starts at the hash
//! of the seed as a string. Digests are never cut in the chain; only the key in an event is 64 bits.

use serde::{Serialize, Serializer};
use sha2::{Digest as _, Sha256};

/// `--prefix-caching-hash-algo`, as far as it is simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Algo {
    /// SHA-256 over CBOR.
    #[value(name = "sha256_cbor")]
    Sha256Cbor,
    /// XXH3-128 over CBOR.
    #[value(name = "xxhash_cbor")]
    XxhashCbor,
}

impl Algo {
    /// The name vLLM gives it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha256Cbor => "sha256_cbor",
            Self::XxhashCbor => "xxhash_cbor",
        }
    }
}

/// A full block digest: 32 bytes of SHA-256 or 16 of XXH3-128.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest {
    bytes: [u8; 32],
    length: u8,
}

impl Digest {
    /// The digest as it enters the next block's hash.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }

    /// The key an event carries: the last 8 bytes, big-endian.
    #[must_use]
    pub fn key(&self) -> u64 {
        self.as_bytes().iter().rev().take(8).rev().fold(0, |key, byte| key << 8 | u64::from(*byte))
    }
}

/// `cache_salt` of a request as it enters the hash of its first block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Salt {
    /// From 0.31: `("cache_salt", salt)`.
    Tagged(&'static str, String),
    /// Before: the salt alone.
    Plain(String),
}

impl Salt {
    /// The form of a release: tagged from 0.31.
    #[must_use]
    pub fn new(salt: String, tagged: bool) -> Self {
        if tagged { Self::Tagged("cache_salt", salt) } else { Self::Plain(salt) }
    }

    /// The salt as the client gave it; events publish it untagged.
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Self::Tagged(_, salt) | Self::Plain(salt) => salt,
        }
    }
}

/// The digest before block 0 (`NONE_HASH`).
#[must_use]
pub fn root(algo: Algo, seed: &str) -> Digest {
    digest(algo, &seed)
}

/// The digest of a block after `parent`. `salt` belongs to block 0 only.
#[must_use]
pub fn child(algo: Algo, parent: &Digest, tokens: &[u32], salt: Option<&Salt>) -> Digest {
    digest(algo, &(ByteString(parent.as_bytes()), tokens, salt.map(|salt| (salt,))))
}

fn digest(algo: Algo, value: &impl Serialize) -> Digest {
    let mut preimage = Vec::with_capacity(128);
    ciborium::into_writer(value, &mut preimage).expect("writing plain values to memory cannot fail");
    let mut bytes = [0; 32];
    let length = match algo {
        Algo::Sha256Cbor => {
            bytes.copy_from_slice(&Sha256::digest(&preimage));
            32
        }
        Algo::XxhashCbor => {
            bytes[..16].copy_from_slice(&xxhash_rust::xxh3::xxh3_128(&preimage).to_be_bytes());
            16
        }
    };
    Digest { bytes, length }
}

/// Bytes that serialize as a byte string, not as an array of integers.
struct ByteString<'a>(&'a [u8]);

impl Serialize for ByteString<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::vectors;
    use serde_json::Value;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn salt_of(block: &Value) -> Result<Option<Salt>, ()> {
        match block["extra_keys"].as_array().map(Vec::as_slice) {
            None => Ok(None),
            Some([Value::String(salt)]) if block["event_extra_keys"][0] == *salt => {
                Ok(Some(Salt::new(salt.clone(), false)))
            }
            Some([Value::Array(pair)]) if pair.len() == 2 && pair[0] == "cache_salt" => {
                Ok(Some(Salt::new(pair[1].as_str().unwrap_or_default().to_owned(), true)))
            }
            Some(_) => Err(()),
        }
    }

    /// Checks one vector; false where it uses what is not simulated (LoRA, images, embeddings, look-ahead, pickle).
    fn check(case: &Value) -> bool {
        let id = case["id"].as_str().unwrap_or_default();
        let algo = match case["algo"].as_str() {
            Some("sha256_cbor") => Algo::Sha256Cbor,
            Some("xxhash_cbor") => Algo::XxhashCbor,
            _ => return false,
        };
        let Some(blocks) = case["blocks"].as_array() else { return false };
        let Ok(salts) = blocks.iter().map(salt_of).collect::<Result<Vec<_>, _>>() else { return false };
        // Other strings stand in the same place: adapters' names, images' identifiers.
        if salts.iter().any(Option::is_some) && (id.contains("lora") || !id.contains("salt")) {
            return false;
        }
        let size = case["block_size"].as_u64().expect("a vector has a block size") as usize;
        let tokens: Vec<u32> = serde_json::from_value(case["token_ids"].clone()).expect("token ids fit 32 bits");
        let mut parent = root(algo, case["pythonhashseed"].as_str().unwrap_or("vllm-none-hash"));
        assert_eq!(hex(parent.as_bytes()), case["none_hash_hex"], "{id}");
        assert_eq!(tokens.len() / size, blocks.len(), "{id}");
        for ((block, salt), chunk) in blocks.iter().zip(&salts).zip(tokens.chunks_exact(size)) {
            parent = child(algo, &parent, chunk, salt.as_ref());
            assert_eq!(hex(parent.as_bytes()), block["digest_hex"], "{id}");
            assert_eq!(parent.key().to_string(), block["event_key_u64"], "{id}");
        }
        true
    }

    #[test]
    fn digests_are_those_of_the_vectors() {
        let vectors = vectors("vllm_hash.json");
        let cases = vectors["cases"].as_array().expect("the file has cases");
        let plain = cases.iter().filter(|case| check(case)).count();
        assert_eq!(plain, 25 + 4, "vectors without extra keys, and those with a salt alone");
    }
}
