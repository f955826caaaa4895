//! From a stream of tokens to the keys of its blocks, under any engine's contract.

use std::num::NonZeroU32;

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
                no_items(extras)?;
                match (&extras.lora, extras.salt()) {
                    (None, None) => (State::TrtllmTokens(PageChain::ROOT), 0),
                    (Some(_), _) => return Err(ContractError::Unkeyed { what: "LoRA adapter" }),
                    (None, Some(_)) => return Err(ContractError::Unkeyed { what: "cache salt" }),
                }
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

/// Refuses what no TensorRT-LLM key can be made for from a prompt alone.
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
            State::TrtllmV1 { parent, lora, salt } => {
                let plain = trtllm::V1Block::default();
                let block = trtllm::V1Block { parent: *parent, tokens: window, lora: *lora, salt: *salt, ..plain };
                *parent = block.key();
                BlockKey(*parent)
            }
        }
    }
}
