//! What a request says beyond its tokens that an engine may mix into block keys.

/// A request's extras, as the gateway knows them. Empty for most prompts.
#[derive(Clone, Debug, Default)]
pub struct PromptExtras {
    /// The adapter the request is served with.
    pub lora: Option<Lora>,
    /// `cache_salt`; the empty text counts as none, as in the engines.
    pub cache_salt: Option<String>,
    /// SGLang's `extra_key`.
    pub extra_key: Option<String>,
    /// Images, videos and sounds, in any order.
    pub mm: Vec<MmItem>,
    /// Prompt embeddings, which stand for tokens of id 0.
    pub embeds: Option<EmbedRows>,
}

/// An adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lora {
    /// Name that requests ask for.
    pub name: String,
    /// Path or repository it was loaded from, literally: `root` of its card in `/v1/models`.
    pub path: Option<String>,
    /// Integer id: of the server process (vLLM before 0.11.1), or the client's task id (TensorRT-LLM).
    pub id: Option<u64>,
}

/// A multimodal item's place in the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MmItem {
    /// The engine's identifier of the item; only a render endpoint can tell it.
    pub identifier: String,
    /// Its first placeholder token.
    pub offset: u32,
    /// Its placeholder tokens.
    pub length: u32,
}

/// Raw prompt embeddings, one row per token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbedRows {
    /// All rows. Where they end, the rest of a block has none.
    pub bytes: Vec<u8>,
    /// Bytes of one row.
    pub row_bytes: usize,
}

impl PromptExtras {
    /// The salt, if there is one.
    pub(super) fn salt(&self) -> Option<&String> {
        self.cache_salt.as_ref().filter(|salt| !salt.is_empty())
    }
}

/// Why the keys of a prompt cannot be known under a contract.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContractError {
    /// Tagged keys hash the adapter's path.
    #[error("adapter {name:?}: this release hashes the path it was loaded from too; give it (root in /v1/models)")]
    LoraPath {
        /// The adapter.
        name: String,
    },
    /// Old keys hash the adapter's integer id.
    #[error("adapter {name:?}: this contract hashes its integer id; give it")]
    LoraId {
        /// The adapter.
        name: String,
    },
    /// SGLang hashes an adapter id that it makes up at load time.
    #[error("adapter {name:?}: SGLang hashes an id private to the server process; its blocks cannot be keyed")]
    LoraPrivate {
        /// The adapter.
        name: String,
    },
    /// Releases before 0.17 hash raw tensors.
    #[error("prompt embeddings: releases before 0.17 hash raw tensors; such prompts cannot be keyed")]
    RawEmbeds,
    /// The contract has no place for it.
    #[error("{what}: not part of this contract's keys; such prompts cannot be keyed")]
    Unkeyed {
        /// Which extra.
        what: &'static str,
    },
    /// The release's hashes are CPython's own, of the content alone.
    #[error("SGLang {release}: its event hashes are Python tuple hashes (before 0.5.6), not a chain; upgrade to 0.5.7")]
    TupleHashes {
        /// The release.
        release: super::Release,
    },
    /// The release's chain takes no token above u32.
    #[error("token {token}: this release hashes tokens of at most 32 bits (SGLang 0.5.23: 63 bits)")]
    WideToken {
        /// The token.
        token: u64,
    },
}
