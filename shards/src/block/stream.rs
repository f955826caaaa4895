//! From a stream of tokens to the keys of its blocks, under any engine's contract.

use std::num::NonZeroU32;

use super::derived::DerivedChain;
use super::pages::PageChain;
use super::prompt_extras::{ContractError, PromptExtras};
use super::vllm::{BlockExtras, Chain, Extras, NoneHash, Tagging};
use super::{sglang, trtllm};
use crate::ids::BlockKey;

/// The rules that turn tokens into one engine's block keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contract {
    /// vLLM.
    Vllm {
        /// The chain's anchor, with its algorithm.
        none_hash: NoneHash,
        /// The form of extra keys in the engine's release.
        tagging: Tagging,
        /// Tokens after a block that enter its hash: 0, or since 0.33 with EAGLE and MTP speculation 1 or more.
        lookahead: u8,
    },
    /// SGLang.
    Sglang(sglang::Contract),
    /// The gateway's own keys for TensorRT-LLM's blocks (`blockhash_trtllm`).
    TrtllmTokens,
    /// TensorRT-LLM's own keys (`v1_block_key`).
    TrtllmV1,
    /// The gateway's own keys for any engine whose keys cannot be reproduced.
    Derived,
}

impl Contract {
    /// The contract of vLLM's newest release without speculation, under this anchor.
    #[must_use]
    pub const fn vllm(none_hash: NoneHash) -> Self {
        Contract::Vllm { none_hash, tagging: Tagging::Tagged, lookahead: 0 }
    }
}

/// The keys of one prompt, made block by block as its tokens come in, in pieces of whatever length.
///
/// A key comes as soon as its block is full and the tokens that its hash looks ahead to are there. A block that never
/// fills has no key, in any engine. With plain tokens under `sha256_cbor`, `xxhash_cbor`, SGLang's and the token keys
/// nothing is allocated once a block's worth of tokens was held.
#[derive(Clone, Debug)]
pub struct KeyStream {
    state: State,
    /// Tokens per block.
    block: usize,
    /// Tokens that must follow a block before it has a key.
    ahead: usize,
    /// Tokens taken and not yet in a block with a key: fewer than `block + ahead`.
    held: Vec<u32>,
}

#[derive(Clone, Debug)]
enum State {
    Vllm { chain: Chain, extras: Extras, start: u64, preimage: Vec<u8> },
    Sglang { chain: PageChain, bigrams: bool, namespace: Option<sglang::Namespace> },
    TrtllmTokens(PageChain),
    TrtllmV1 { parent: u64, lora: Option<u64>, salt: Option<u64> },
    Derived(DerivedChain),
}

impl KeyStream {
    /// A stream before its first token.
    ///
    /// # Errors
    /// Why the keys of a prompt with these extras cannot be known.
    pub fn new(contract: &Contract, extras: &PromptExtras, block_tokens: NonZeroU32) -> Result<Self, ContractError> {
        let (state, ahead) = match contract {
            Contract::Vllm { none_hash, tagging, lookahead } => {
                let chain = Chain::new(none_hash.algorithm(), none_hash);
                let extras = Extras::new(*tagging, extras)?;
                (State::Vllm { chain, extras, start: 0, preimage: Vec::new() }, usize::from(*lookahead))
            }
            Contract::Sglang(contract) => {
                let (chain, bigrams) = (contract.chain(extras), contract.bigrams);
                (State::Sglang { chain, bigrams, namespace: contract.namespace(extras)? }, usize::from(bigrams))
            }
            Contract::TrtllmTokens => {
                tokens_alone(extras)?;
                (State::TrtllmTokens(PageChain::root()), 0)
            }
            Contract::Derived => {
                no_items(extras)?;
                let adapter = extras.lora.as_ref().map(|lora| lora.name.as_str());
                (State::Derived(DerivedChain::root_of(adapter, extras.salt().map(String::as_str))), 0)
            }
            Contract::TrtllmV1 => {
                no_items(extras)?;
                let lora = extras.lora.as_ref().map(|lora| match lora.id {
                    Some(id) => Ok(id),
                    None => Err(ContractError::LoraId { name: lora.name.clone() }),
                });
                let salt = extras.salt().map(|salt| trtllm::salt_id(salt));
                (State::TrtllmV1 { parent: 0, lora: lora.transpose()?, salt }, 0)
            }
        };
        Ok(KeyStream { state, block: block_tokens.get() as usize, ahead, held: Vec::new() })
    }

    /// Takes tokens from the front of `tokens` until the next block has its key. When it returns none, all tokens
    /// are taken and more are needed.
    pub fn next_key(&mut self, tokens: &mut &[u32]) -> Option<BlockKey> {
        let window = self.block + self.ahead;
        if self.held.is_empty() && tokens.len() >= window {
            let key = self.state.push(&tokens[..window], self.block);
            *tokens = &tokens[self.block..];
            return Some(key);
        }
        let (taken, rest) = tokens.split_at(tokens.len().min(window - self.held.len()));
        self.held.extend_from_slice(taken);
        *tokens = rest;
        if self.held.len() < window {
            return None;
        }
        let key = self.state.push(&self.held, self.block);
        self.held.drain(..self.block);
        Some(key)
    }

    /// Tokens that are in no block with a key yet.
    #[must_use]
    pub fn tail_tokens(&self) -> usize {
        self.held.len()
    }
}

/// Refuses whatever is more than tokens.
fn tokens_alone(extras: &PromptExtras) -> Result<(), ContractError> {
    no_items(extras)?;
    match (&extras.lora, extras.salt()) {
        (None, None) => Ok(()),
        (Some(_), _) => Err(ContractError::Unkeyed { what: "LoRA adapter" }),
        (None, Some(_)) => Err(ContractError::Unkeyed { what: "cache salt" }),
    }
}

/// Refuses what neither TensorRT-LLM's keys nor our own can be made for from a prompt alone.
fn no_items(extras: &PromptExtras) -> Result<(), ContractError> {
    match () {
        () if !extras.mm.is_empty() => Err(ContractError::Unkeyed { what: "multimodal items" }),
        () if extras.embeds.is_some() => Err(ContractError::Unkeyed { what: "prompt embeddings" }),
        () if extras.extra_key.is_some() => Err(ContractError::Unkeyed { what: "extra_key" }),
        () => Ok(()),
    }
}

impl State {
    /// Appends the block of the first `size` tokens of the window; the rest is what its hash looks ahead to.
    fn push(&mut self, window: &[u32], size: usize) -> BlockKey {
        match self {
            State::Vllm { chain, extras, start, preimage } => {
                let keys = extras.keys(*start, *start + window.len() as u64);
                *start += size as u64;
                let (block, lookahead) = window.split_at(size);
                let extras = BlockExtras { tagging: extras.tagging, keys: &keys, lookahead };
                chain.push_any(block, &extras, preimage)
            }
            State::Sglang { chain, bigrams, namespace } => {
                let key = if *bigrams { chain.push_bigrams(window) } else { chain.push(window) };
                namespace.map_or(key, |namespace| namespace.published(key))
            }
            State::TrtllmTokens(chain) => chain.push(window),
            State::Derived(chain) => chain.push(window),
            State::TrtllmV1 { parent, lora, salt } => {
                let plain = trtllm::V1Block::default();
                let block = trtllm::V1Block { parent: *parent, tokens: window, lora: *lora, salt: *salt, ..plain };
                *parent = block.key();
                BlockKey(*parent)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::block::vllm::Algorithm;
    use crate::block::{Lora, Release};

    /// All keys of a prompt that comes in pieces of the given lengths, over and over.
    fn keys(contract: &Contract, extras: &PromptExtras, size: u32, tokens: &[u32], pieces: &[usize]) -> Vec<BlockKey> {
        let size = NonZeroU32::new(size).expect("at least 1");
        let mut stream = KeyStream::new(contract, extras, size).expect("the contract keys these extras");
        let (mut keys, mut rest) = (Vec::new(), tokens);
        for piece in pieces.iter().cycle() {
            let (mut now, later) = rest.split_at(rest.len().min(*piece));
            rest = later;
            keys.extend(std::iter::from_fn(|| stream.next_key(&mut now)));
            assert!(now.is_empty(), "all is taken before more is asked for");
            if rest.is_empty() {
                break;
            }
        }
        let window = size.get() as usize + stream.ahead;
        assert!(stream.tail_tokens() < window);
        assert_eq!(stream.tail_tokens() + keys.len() * size.get() as usize, tokens.len(), "no token is lost");
        keys
    }

    fn contracts() -> impl Strategy<Value = (Contract, PromptExtras)> {
        let vllm = (0..5usize, 0..5usize, 0..4u8).prop_map(|(algorithm, tagging, lookahead)| Contract::Vllm {
            none_hash: NoneHash::from_seed(Algorithm::ALL[algorithm], "0"),
            tagging: Tagging::ALL[tagging],
            lookahead,
        });
        let sglang = (any::<bool>(), any::<bool>()).prop_map(|(bigrams, dynamo)| {
            let format = if dynamo { sglang::EventFormat::Dynamo } else { sglang::EventFormat::Default };
            Contract::Sglang(sglang::Contract::new(Release::new(0, 5, 23), bigrams, format).expect("a chain"))
        });
        let trtllm = prop_oneof![Just(Contract::TrtllmTokens), Just(Contract::TrtllmV1), Just(Contract::Derived)];
        (prop_oneof![vllm, sglang, trtllm], any::<bool>(), any::<bool>()).prop_map(|(contract, salted, adapted)| {
            let lora = Lora { name: "sql".into(), path: Some("/sql".into()), id: Some(3) };
            let adapted = adapted && matches!(contract, Contract::Vllm { .. } | Contract::TrtllmV1);
            let salted = salted && !matches!(contract, Contract::TrtllmTokens | Contract::Derived);
            let cache_salt = salted.then(|| "s3cr3t".to_owned());
            (contract, PromptExtras { lora: adapted.then_some(lora), cache_salt, ..PromptExtras::default() })
        })
    }

    proptest! {
        #[test]
        fn it_never_matters_how_a_stream_of_tokens_is_cut(
            (contract, extras) in contracts(),
            size in 1..20u32,
            tokens in proptest::collection::vec(any::<u32>(), 0..120),
            pieces in proptest::collection::vec(1..50usize, 1..6),
        ) {
            let whole = keys(&contract, &extras, size, &tokens, &[usize::MAX]);
            prop_assert_eq!(&keys(&contract, &extras, size, &tokens, &pieces), &whole);
            prop_assert_eq!(&keys(&contract, &extras, size, &tokens, &[1]), &whole);
            // A prefix has the keys of its blocks, whatever follows.
            let half = &tokens[..tokens.len() / 2];
            let prefix = keys(&contract, &extras, size, half, &pieces);
            prop_assert_eq!(&whole[..prefix.len()], &prefix[..]);
        }

        #[test]
        fn a_token_changes_the_key_of_its_block_and_of_all_that_follow(
            (contract, extras) in contracts(),
            size in 1..8u32,
            tokens in proptest::collection::vec(any::<u32>(), 40),
            place in 0..40usize,
        ) {
            let mut other = tokens.clone();
            other[place] ^= 1;
            let [left, right] = [&tokens, &other].map(|tokens| keys(&contract, &extras, size, tokens, &[usize::MAX]));
            for (index, (left, right)) in left.iter().zip(&right).enumerate() {
                let ends = (index + 1) * size as usize;
                if place < ends {
                    prop_assert_ne!(left, right);
                } else if !matches!(contract, Contract::Vllm { lookahead: 1.., .. } | Contract::Sglang(_)) {
                    prop_assert_eq!(left, right);
                }
            }
        }
    }

    #[test]
    fn a_block_waits_for_the_tokens_that_its_hash_looks_ahead_to() {
        let none_hash = NoneHash::from_seed(Algorithm::Sha256, "0");
        let ahead = |lookahead| Contract::Vllm { none_hash, tagging: Tagging::Tagged, lookahead };
        let count = |contract: &Contract, tokens: u32| {
            let tokens: Vec<u32> = (0..tokens).collect();
            keys(contract, &PromptExtras::default(), 16, &tokens, &[5]).len()
        };
        assert_eq!([31, 32, 33].map(|tokens| count(&ahead(0), tokens)), [1, 2, 2]);
        assert_eq!([32, 33, 34].map(|tokens| count(&ahead(1), tokens)), [1, 2, 2]);
        assert_eq!([33, 34, 35].map(|tokens| count(&ahead(2), tokens)), [1, 2, 2]);
        let eagle = sglang::Contract::new(Release::new(0, 5, 7), true, sglang::EventFormat::Default);
        let eagle = Contract::Sglang(eagle.expect("a chain"));
        assert_eq!([32, 33, 34].map(|tokens| count(&eagle, tokens)), [1, 2, 2]);
        assert_eq!([Contract::TrtllmTokens, Contract::Derived].map(|contract| count(&contract, 32)), [2, 2]);
    }

    #[test]
    fn what_a_request_says_makes_keys_of_its_own() {
        let tokens: Vec<u32> = (0..32).collect();
        let none_hash = NoneHash::from_seed(Algorithm::XxhashCbor, "0");
        let contract = Contract::Vllm { none_hash, tagging: Tagging::MmOffset, lookahead: 0 };
        let lora = Lora { name: "sql".into(), path: None, id: None };
        let plain = PromptExtras::default();
        let salted = PromptExtras { cache_salt: Some("s".into()), ..plain.clone() };
        let adapted = PromptExtras { lora: Some(lora), ..plain.clone() };
        let of = |extras| keys(&contract, extras, 16, &tokens, &[usize::MAX]);
        let all = [of(&plain), of(&salted), of(&adapted)];
        for ((plain, salted), adapted) in all[0].iter().zip(&all[1]).zip(&all[2]) {
            assert!(plain != salted && plain != adapted && salted != adapted);
        }
    }
}
