//! SGLang's page hash: SHA-256 over the digest before and the page's token bytes, from 0.5.7 on.

use sha2::{Digest as _, Sha256};

use super::{Digest, Lora, Namespace, first_u64};

/// How one engine hashes.
#[derive(Clone, Copy, Debug)]
pub struct Chain {
    /// Pages hold pairs of neighbouring tokens (speculation by EAGLE).
    pub bigrams: bool,
    /// `cache_salt` enters the hash (from 0.5.18).
    pub salted: bool,
    /// An adapter's blocks get names of their own (from 0.5.23).
    pub lora_names: bool,
}

impl Chain {
    /// What stands before page 0: nothing, or the salt's seed.
    #[must_use]
    pub fn root(&self, namespace: &Namespace) -> Digest {
        match namespace.salt.as_deref().filter(|salt| self.salted && !salt.is_empty()) {
            None => Digest::new(&[], 0),
            Some(salt) => {
                let seed = Sha256::new_with_prefix(b"sglang-cache-salt-v1\0").chain_update(salt).finalize();
                Digest::new(&seed, first_u64(&seed))
            }
        }
    }

    /// See [`super::Chain::child`].
    #[must_use]
    pub fn child(&self, parent: &Digest, tokens: &[u32], namespace: &Namespace) -> Digest {
        let mut hasher = Sha256::new_with_prefix(parent.as_bytes());
        if self.bigrams {
            tokens.windows(2).for_each(|pair| {
                hasher.update(pair[0].to_le_bytes());
                hasher.update(pair[1].to_le_bytes());
            });
        } else {
            tokens.iter().for_each(|token| hasher.update(token.to_le_bytes()));
        }
        let digest = hasher.finalize();
        let key = first_u64(&digest);
        let lora = namespace.lora.as_ref().filter(|_| self.lora_names);
        Digest::new(&digest, lora.map_or(key, |lora| renamed(key, &space_name(namespace, lora))))
    }
}

/// The name of an adapter's tree: the client's `extra_key`, then the adapter's number in this process.
fn space_name(namespace: &Namespace, lora: &Lora) -> String {
    let hidden = Sha256::digest(format!("{}\0{}", lora.name, lora.path));
    let id: String = hidden.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("{}{id}", namespace.extra_key.as_deref().unwrap_or_default())
}

/// A block's name in a tree of its own.
fn renamed(key: u64, space: &str) -> u64 {
    let seed = Sha256::new_with_prefix(b"sglang-kv-event-namespace-v1\x01")
        .chain_update((space.len() as u64).to_le_bytes())
        .chain_update(space)
        .chain_update([0])
        .finalize();
    first_u64(&Sha256::new_with_prefix(seed).chain_update(key.to_be_bytes()).finalize())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{hex, vectors};
    use serde_json::Value;

    /// Checks one vector; false where it uses what is not simulated.
    fn check(case: &Value) -> bool {
        let (id, input) = (case["id"].as_str().unwrap_or_default(), &case["inputs"]);
        let Ok(tokens) = serde_json::from_value::<Vec<u32>>(input["token_ids"].clone()) else { return false };
        // Dynamo's format, and what is no page chain.
        if case["contract"] != "sha256-chain" || input["event_format"] == "dynamo" {
            return false;
        }
        let bigrams = input["is_bigram"] == true;
        let chain = Chain { bigrams, salted: true, lora_names: false };
        let namespace = Namespace { salt: input["cache_salt"].as_str().map(str::to_owned), ..Namespace::default() };
        let size = input["page_size"].as_u64().expect("a vector has a page size") as usize;
        let mut parent = chain.root(&namespace);
        if !case["expected"]["seed_hex"].is_null() {
            assert_eq!(hex(parent.as_bytes()), case["expected"]["seed_hex"], "{id}");
        }
        let pages = case["expected"]["pages"].as_array().expect("a case has pages");
        for (index, page) in pages.iter().enumerate() {
            let end = ((index + 1) * size + usize::from(bigrams)).min(tokens.len());
            parent = chain.child(&parent, &tokens[index * size..end], &namespace);
            assert_eq!(hex(parent.as_bytes()), page["digest_hex"], "{id}");
            assert_eq!(parent.key().to_string(), page["u64"], "{id}");
            if !input["lora"].is_null() {
                let space = input["extra_key"].as_str().expect("an adapter has a name");
                assert_eq!(renamed(parent.key(), space).to_string(), case["expected"]["published_u64"][index], "{id}");
            }
        }
        true
    }

    #[test]
    fn digests_are_those_of_the_vectors() {
        let vectors = vectors("sglang_hash.json");
        let cases = vectors["cases"].as_array().expect("the file has cases");
        let checked = cases.iter().filter(|case| check(case)).count();
        assert_eq!(checked, 33, "chains of the default format with tokens below 2^32");
    }

    #[test]
    fn an_adapter_s_pages_chain_as_plain_ones_under_other_names() {
        let lora = Some(Lora { id: 1, name: "sql".to_owned(), path: "/sql".to_owned() });
        let chain = Chain { bigrams: false, salted: true, lora_names: true };
        let (plain, adapted) = (Namespace::default(), Namespace { lora, ..Namespace::default() });
        let page = |namespace| chain.child(&chain.root(namespace), &[1, 2, 3, 4], namespace);
        assert_eq!(page(&plain).as_bytes(), page(&adapted).as_bytes());
        assert_ne!(page(&plain).key(), page(&adapted).key());
        let old = Chain { lora_names: false, ..chain };
        assert_eq!(old.child(&old.root(&adapted), &[1, 2, 3, 4], &adapted).key(), page(&plain).key());
    }
}
