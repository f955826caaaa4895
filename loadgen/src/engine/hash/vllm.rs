//! vLLM's block hash.
//!
//! A block's digest is the hash of the tuple (parent digest, token ids, extra keys), written as CBOR or pickle; the
//! chain starts at the hash of the seed as a string. Digests are never cut in the chain; only the key in an event is
//! 64 bits. What the extra keys look like depends on the release.

use serde::{Serialize, Serializer};
use sha2::{Digest as _, Sha256};

use super::{Digest, Namespace, pickle, random_bytes};
use crate::engine::wire::Release;

/// `--prefix-caching-hash-algo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Algo {
    /// SHA-256 over pickle: vLLM's default.
    #[value(name = "sha256")]
    Sha256,
    /// SHA-256 over CBOR.
    #[value(name = "sha256_cbor")]
    Sha256Cbor,
    /// XXH3-128 over pickle.
    #[value(name = "xxhash")]
    Xxhash,
    /// XXH3-128 over CBOR.
    #[value(name = "xxhash_cbor")]
    XxhashCbor,
}

impl Algo {
    /// The name vLLM gives it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha256Cbor => "sha256_cbor",
            Self::Xxhash => "xxhash",
            Self::XxhashCbor => "xxhash_cbor",
        }
    }

    /// Whether blocks are written as Python pickles.
    #[must_use]
    pub fn is_pickled(self) -> bool {
        matches!(self, Self::Sha256 | Self::Xxhash)
    }

    fn is_sha256(self) -> bool {
        matches!(self, Self::Sha256 | Self::Sha256Cbor)
    }

    fn hash(self, item: &Item<'_>) -> Digest {
        let preimage = if self.is_pickled() {
            pickle::pickle(item)
        } else {
            let mut bytes = Vec::with_capacity(128);
            ciborium::into_writer(item, &mut bytes).expect("writing plain values to memory cannot fail");
            bytes
        };
        if self.is_sha256() {
            named(&Sha256::digest(&preimage))
        } else {
            named(&xxhash_rust::xxh3::xxh3_128(&preimage).to_be_bytes())
        }
    }
}

/// A digest with vLLM's name for it: its last 8 bytes, big-endian.
fn named(bytes: &[u8]) -> Digest {
    Digest::new(bytes, super::first_u64(&bytes[bytes.len() - 8..]))
}

/// A value as it stands in a block's tuple.
#[derive(Clone, Debug)]
pub enum Item<'a> {
    /// Nothing.
    None,
    /// A number.
    Int(i64),
    /// A digest.
    Bytes(&'a [u8]),
    /// A string of a client's or an operator's.
    Text(&'a str),
    /// A string of the engine's own code: one object wherever it stands.
    Tag(&'static str),
    /// Several.
    Tuple(Vec<Item<'a>>),
    /// Several small numbers.
    Tokens(&'a [u32]),
}

impl Serialize for Item<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => serializer.serialize_none(),
            Self::Int(value) => serializer.serialize_i64(*value),
            Self::Bytes(bytes) => serializer.serialize_bytes(bytes),
            Self::Text(text) => serializer.serialize_str(text),
            Self::Tag(tag) => serializer.serialize_str(tag),
            Self::Tuple(items) => items.serialize(serializer),
            Self::Tokens(tokens) => tokens.serialize(serializer),
        }
    }
}

/// `PYTHONHASHSEED` of an engine whose environment has none, from 0.29.
const UNSET_SEED: &str = "vllm-none-hash";

/// How `--seed` says that the variable is not set.
pub const SEED_NONE: &str = "none";

/// How one engine process hashes.
#[derive(Clone, Debug)]
pub struct Chain {
    algo: Algo,
    root: Digest,
    release: Release,
    block_tokens: usize,
    /// Tokens after a block that enter its hash.
    pub lookahead: usize,
}

impl Chain {
    /// A process's chain. The seed [`SEED_NONE`] is drawn anew for each, or fixed, as the release does it.
    #[must_use]
    pub fn new(algo: Algo, seed: &str, release: Release, block_tokens: usize, lookahead: usize) -> Self {
        let fixed = release >= Release::new(29, 0);
        let root = match seed {
            SEED_NONE if fixed && algo.is_sha256() => algo.hash(&Item::Text(UNSET_SEED)),
            SEED_NONE if fixed => {
                let drawn: String = random_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
                algo.hash(&Item::Text(&drawn))
            }
            SEED_NONE => named(&random_bytes()),
            seed => algo.hash(&Item::Text(seed)),
        };
        Self { algo, root, release, block_tokens, lookahead }
    }

    /// The digest before block 0 (`NONE_HASH`).
    #[must_use]
    pub fn root(&self) -> Digest {
        self.root
    }

    /// See [`super::Chain::child`].
    #[must_use]
    pub fn child(&self, parent: &Digest, tokens: &[u32], first: bool, namespace: &Namespace) -> Digest {
        let (block, after) = tokens.split_at(self.block_tokens);
        let mut extra = self.extra(first, namespace);
        if self.lookahead > 0 {
            let tail = after.iter().map(|token| Item::Int(i64::from(*token)));
            extra = Item::Tuple(std::iter::once(extra).chain(tail).collect());
        }
        self.algo.hash(&Item::Tuple(vec![Item::Bytes(parent.as_bytes()), Item::Tokens(block), extra]))
    }

    /// The extra keys of a block: nothing rather than an empty tuple.
    fn extra<'a>(&self, first: bool, namespace: &'a Namespace) -> Item<'a> {
        let tagged = self.release.tags_extra_keys();
        let mut keys = Vec::new();
        if let Some(lora) = &namespace.lora {
            keys.push(if tagged {
                Item::Tuple(vec![Item::Tag("lora"), Item::Text(&lora.name), Item::Text(&lora.path)])
            } else if self.release >= Release::new(11, 1) {
                Item::Text(&lora.name)
            } else {
                Item::Int(lora.id as i64)
            });
        }
        if let Some(salt) = namespace.salt.as_deref().filter(|_| first) {
            keys.push(if tagged {
                Item::Tuple(vec![Item::Tag("cache_salt"), Item::Text(salt)])
            } else {
                Item::Text(salt)
            });
        }
        if keys.is_empty() { Item::None } else { Item::Tuple(keys) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Lora;
    use super::*;
    use crate::engine::testing::{hex, unhex, vectors};
    use serde_json::Value;

    /// A chain of the case's algorithm and seed, and whether its root is as it should be.
    fn chain(case: &Value, release: Release) -> Chain {
        let algo = <Algo as clap::ValueEnum>::from_str(case["algo"].as_str().unwrap_or_default(), false);
        let size = case["block_size"].as_u64().expect("a vector has a block size") as usize;
        let lookahead = case["lookahead_tokens"].as_u64().unwrap_or(0) as usize;
        let seed = case["pythonhashseed"].as_str().unwrap_or(SEED_NONE);
        let chain = Chain::new(algo.expect("a known algorithm"), seed, release, size, lookahead);
        assert_eq!(hex(chain.root().as_bytes()), case["none_hash_hex"], "{}", case["id"]);
        chain
    }

    /// A JSON value as it stands in a block's tuple, whatever the engine does not simulate included.
    fn item(value: &Value) -> Item<'_> {
        const TAGS: [&str; 4] = ["lora", "mm", "cache_salt", "prompt_embeds"];
        match value {
            Value::Null => Item::None,
            Value::Number(number) => Item::Int(number.as_i64().expect("small")),
            Value::String(text) => Item::Text(text),
            Value::Array(items) => {
                let tag = |text: &str| TAGS.into_iter().find(|tag| *tag == text && items.len() > 1);
                let element = |(place, value): (usize, &'_ Value)| match value.as_str().and_then(tag) {
                    Some(tag) if place == 0 => Item::Tag(tag),
                    _ => Item::None,
                };
                let tags: Vec<_> = items.iter().enumerate().map(element).collect();
                let pick = |(tag, value)| if matches!(tag, Item::Tag(_)) { tag } else { item(value) };
                Item::Tuple(tags.into_iter().zip(items).map(pick).collect())
            }
            other => Item::Bytes(Vec::leak(unhex(other["bytes_hex"].as_str().expect("bytes")))),
        }
    }

    /// Every vector, whatever its extra keys: the serialization and the algorithms.
    #[test]
    fn digests_are_those_of_the_vectors() {
        let vectors = vectors("vllm_hash.json");
        let mut checked = 0;
        for case in vectors["cases"].as_array().expect("the file has cases") {
            let id = &case["id"];
            // Integer chains of 0.10.1 and views of blocks of several sizes are not simulated.
            if case["none_hash_hex"].is_null() || case["blocks"].is_null() {
                continue;
            }
            checked += 1;
            let chain = chain(case, Release::new(33, 0));
            let tokens: Vec<u32> = serde_json::from_value(case["token_ids"].clone()).expect("token ids fit 32 bits");
            let mut parent = chain.root();
            let blocks = case["blocks"].as_array().expect("a case has blocks");
            for (block, chunk) in blocks.iter().zip(tokens.chunks_exact(chain.block_tokens)) {
                let extra = item(&block["extra_keys"]);
                let tuple = Item::Tuple(vec![Item::Bytes(parent.as_bytes()), Item::Tokens(chunk), extra]);
                let digest = chain.algo.hash(&tuple);
                assert_eq!(hex(digest.as_bytes()), block["digest_hex"], "{id}");
                assert_eq!(digest.key().to_string(), block["event_key_u64"], "{id}");
                parent = digest;
            }
        }
        assert_eq!(checked, 104, "all but three of 107 cases");
    }

    /// The vectors of requests that can be simulated, through the way a request takes.
    #[test]
    fn salted_adapted_and_looking_ahead_requests_hash_as_the_vectors_say() {
        let vectors = vectors("vllm_hash.json");
        let mut checked = 0;
        for case in vectors["cases"].as_array().expect("the file has cases") {
            let other = ["mm", "prompt_embeds_rows_hex"].iter().any(|name| !case[*name].is_null());
            if other || case["none_hash_hex"].is_null() || case["blocks"].is_null() {
                continue;
            }
            let id = case["id"].as_str().unwrap_or_default();
            let release = match id {
                id if id.ends_with("011") => Release::new(11, 0),
                id if id.ends_with("untagged") => Release::new(30, 0),
                _ => Release::new(33, 0),
            };
            let chain = chain(case, release);
            let text = |value: &Value| value.as_str().map(str::to_owned);
            let lora = id.contains("lora").then(|| Lora {
                id: case["blocks"][0]["extra_keys"][0].as_u64().unwrap_or(1),
                name: text(&case["lora"]["name"]).unwrap_or_default(),
                path: text(&case["lora"]["path"]).unwrap_or_default(),
            });
            let namespace = Namespace { salt: text(&case["cache_salt"]), lora, extra_key: None };
            let tokens: Vec<u32> = serde_json::from_value(case["token_ids"].clone()).expect("token ids fit 32 bits");
            let mut parent = chain.root();
            for (index, block) in case["blocks"].as_array().expect("a case has blocks").iter().enumerate() {
                let start = index * chain.block_tokens;
                let window = &tokens[start..start + chain.block_tokens + chain.lookahead];
                parent = chain.child(&parent, window, index == 0, &namespace);
                assert_eq!(hex(parent.as_bytes()), block["digest_hex"], "{id}");
            }
            checked += 1;
        }
        assert_eq!(checked, 77, "cases without images and embeddings");
    }

    #[test]
    fn without_a_seed_old_releases_and_xxhash_draw_one_per_process() {
        let root = |algo, release| Chain::new(algo, SEED_NONE, release, 16, 0).root();
        let (old, new) = (Release::new(28, 0), Release::new(29, 0));
        assert_eq!(root(Algo::Sha256, new), root(Algo::Sha256, new));
        assert_ne!(root(Algo::Sha256, old), root(Algo::Sha256, old));
        assert_ne!(root(Algo::XxhashCbor, new), root(Algo::XxhashCbor, new));
    }
}
