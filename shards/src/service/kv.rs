//! How a service routes by its engines' caches.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::{Blend, Engine};
use crate::block::vllm::Tagging;
use crate::block::{Contract, Lora};
use crate::inventory;
use crate::prompt::Rendering;

/// KV-exact routing of one service.
#[derive(Debug)]
pub struct KvExact {
    /// Tokens per block (`kvBlockSize`).
    pub block_tokens: u32,
    /// Ranks of each endpoint (`kvDpRankCount`).
    pub ranks: u8,
    /// How tokens become keys (`kvEngineType`, `kvHashAlgo`, the seed, and what is known of the engines' release).
    pub contract: Contract,
    /// Whether the rule itself names the algorithm. Where it does not, engines that use another are followed; where it
    /// does, they are at fault.
    pub algo_given: bool,
    /// Forms of vLLM's extra keys beside the contract's that some of the engines use: requests with an adapter or a salt
    /// are keyed in each of them.
    pub other_forms: Vec<Tagging>,
    /// What blocks outside of device memory are worth.
    pub weights: MediumWeights,
    /// Adapters that the engines serve, by the name that requests ask for.
    pub adapters: HashMap<Box<str>, Adapter>,
    /// The model that every endpoint serves, where it is the same one: that of requests that name none.
    pub only_model: Option<Box<str>>,
    /// Chat template file's text that overrides the model's own (`kvChatTemplate`), if the rule names one.
    pub chat_template: Option<Arc<str>>,
    /// Template arguments the engines were started with (`kvChatTemplateKwargs`): a JSON object that has been checked.
    pub chat_template_kwargs: Option<Arc<str>>,
    /// Whether engines put a BOS token before texts (`kvAddBos`); none = as the model's files say.
    pub add_bos: Option<bool>,
    /// How engines are asked for the ids of chats that they render in code (`kvEngineRender`); none = they are not.
    pub engine_render: Option<EngineRender>,
    /// Chats are sent on with the ids of their prompts (`kvSendPromptIds`), where the engine takes them.
    pub send_ids: bool,
    /// How overlap is weighed against load (`LOXILB_KV_LB_MODE`).
    pub blend: Blend,
    /// What a request in flight costs in the soft blends, over the endpoint's blocks (`LOXILB_KV_LOAD_PENALTY`).
    pub load_penalty: u32,
    /// What the endpoints can do together, which the adaptive blends measure load by (`LOXILB_KV_CAP_SUM_MILLI`); none =
    /// as much as the fleet they were tuned on.
    pub capacity_sum_milli: Option<u32>,
    /// What work costs those that come later counts so many percent beside a request's own time (`LOXILB_KV_THROUGHPUT`);
    /// 0 = first-token time alone. Blend `ttft` only.
    pub throughput: u32,
    /// Shorter prompts, in tokens, are not scored (`LLB_KV_MIN_MATCH_TOKENS`); 0 = no such guard.
    pub min_match_tokens: u32,
    /// The winner at or over the fleet-wide cap gives way (`LOXILB_KV_SPILL_RELIEF`; on in mode 3 when unset).
    pub spill_relief: bool,
    /// Mean load factor of the cap, percent (`LOXILB_KV_MEAN_LOAD_FACTOR`).
    pub mean_load_factor: u32,
    /// Every how many hits a cold endpoint is seeded (`LOXILB_KV_COLDSTART_SEED_N`); 0 = never.
    pub seed_every: u32,
    /// An endpoint that holds fewer blocks is cold (`LOXILB_KV_COLDSTART_MIN_BLOCKS`); 0 = only an empty one is.
    pub seed_min_blocks: u32,
    /// So many repeated prompts in a row without a hit are worth a warning (`LOXILB_KV_ZERO_HIT_N`).
    pub zero_hit_every: u32,
    /// How long a request under way counts as what its endpoint will hold (`kvClaimMs`); zero = not at all.
    pub claim_for: Duration,
    /// The service's inventory, to be read.
    pub inventory: inventory::ReaderFactory,
}

impl KvExact {
    /// Routing by KV cache with every other value as it is by default in a single pool.
    #[must_use]
    pub fn with_defaults(block_tokens: u32, contract: Contract, inventory: inventory::ReaderFactory) -> Self {
        KvExact {
            block_tokens,
            ranks: 1,
            contract,
            algo_given: true,
            other_forms: Vec::new(),
            weights: MediumWeights::default(),
            adapters: HashMap::new(),
            only_model: None,
            chat_template: None,
            chat_template_kwargs: None,
            add_bos: None,
            engine_render: None,
            send_ids: false,
            blend: Blend::default(),
            load_penalty: 32,
            capacity_sum_milli: None,
            throughput: 200,
            min_match_tokens: 16,
            spill_relief: true,
            mean_load_factor: 175,
            seed_every: 16,
            seed_min_blocks: 16,
            zero_hit_every: 50,
            claim_for: Duration::from_secs(2),
            inventory,
        }
    }

    /// How the service's engines turn requests into prompts.
    #[must_use]
    pub fn rendering(&self, engine: Engine) -> Rendering<'_> {
        Rendering {
            engine,
            template: self.chat_template.as_ref(),
            kwargs: self.chat_template_kwargs.as_deref(),
            add_bos: self.add_bos,
        }
    }
}

/// How engines are asked for the ids of a chat (`kvEngineRender`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineRender {
    /// `render`: vLLM's `/v1/…/render` paths, which take the whole request (0.30 and later: `--enable-scale-out`).
    Render,
    /// `tokenize`: `POST /tokenize` of vLLM and SGLang; requests with members it does not look at are not asked.
    Tokenize,
}

impl EngineRender {
    /// Both ways.
    pub const ALL: [EngineRender; 2] = [EngineRender::Render, EngineRender::Tokenize];

    /// The value in rules.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            EngineRender::Render => "render",
            EngineRender::Tokenize => "tokenize",
        }
    }
}

/// What a block is worth that lies in another medium than the engine's device memory, in percent of one that lies there
/// (`kvMediumWeights`). Media that are neither are worth nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediumWeights {
    /// The host's memory: `CPU`, `CPU_PINNED`, TensorRT-LLM's level 1.
    pub cpu: u8,
    /// Whatever lies behind it: `STORAGE`, `FS`, `OBJ`, `DISK`; no more than `cpu`.
    pub storage: u8,
}

/// An adapter that a service's engines serve beside their model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// Name of the model it adapts, whose tokenizer its requests use.
    pub base: String,
    /// What of it enters keys.
    pub lora: Lora,
}
