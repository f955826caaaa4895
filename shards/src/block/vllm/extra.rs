//! What beyond its tokens makes a block of its own: adapter, images, salt, prompt embeddings (contract vLLM §1.6).
//!
//! Which blocks carry which key, and in which form, changed with the releases ([`Tagging`]). The order never did:
//! LoRA, multimodal items by offset, cache salt, prompt embeddings.

use sha2::{Digest as _, Sha256};

use crate::block::emit::{Emit, Value};
use crate::block::prompt_extras::{ContractError, EmbedRows, MmItem, PromptExtras};
use crate::block::release::Release;

/// The form of extra keys in the hash. Events publish them without tags in every release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tagging {
    /// Before 0.11.1: an adapter is its integer id, an image its identifier.
    LoraId,
    /// 0.11.1 to 0.16: an adapter is its name; prompt embeddings are their raw bytes, which no gateway has.
    LoraName,
    /// 0.17 and 0.18: prompt embeddings are a digest.
    EmbedsDigest,
    /// 0.19 to 0.30: an image is its identifier and its offset from the block's start.
    MmOffset,
    /// Since 0.31: every key is a tuple that begins with its kind, and an adapter's path is hashed with its name.
    Tagged,
}

impl Tagging {
    /// Every form, the newest first.
    pub const ALL: [Tagging; 5] =
        [Tagging::Tagged, Tagging::MmOffset, Tagging::EmbedsDigest, Tagging::LoraName, Tagging::LoraId];

    /// The form a release uses.
    #[must_use]
    pub fn of(release: Release) -> Self {
        let since = |minor, patch| release >= Release::new(0, minor, patch);
        match () {
            () if since(31, 0) => Tagging::Tagged,
            () if since(19, 0) => Tagging::MmOffset,
            () if since(17, 0) => Tagging::EmbedsDigest,
            () if since(11, 1) => Tagging::LoraName,
            () => Tagging::LoraId,
        }
    }
}

/// One extra key of one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtraKey<'a> {
    /// An adapter by the id that its server gave it ([`Tagging::LoraId`]).
    LoraId(u64),
    /// An adapter by name; the path is the literal one it was loaded from, and enters only when tagged.
    Lora {
        /// Name the request asks for.
        name: &'a str,
        /// `root` of the adapter's card in `/v1/models`.
        path: &'a str,
    },
    /// An image, video or sound that overlaps the block.
    Mm {
        /// The engine's identifier of the item.
        identifier: &'a str,
        /// First token of the item, counted from the block's start: negative when it began in an earlier block.
        offset: i64,
    },
    /// The request's `cache_salt`.
    CacheSalt(&'a str),
    /// SHA-256 of the block's rows of prompt embeddings.
    PromptEmbeds([u8; 32]),
}

impl ExtraKey<'_> {
    fn write_tagged(&self, out: &mut impl Emit) {
        match self {
            ExtraKey::LoraId(id) => out.uint(*id),
            ExtraKey::Lora { name, path } => {
                out.open(3);
                out.tag("lora");
                out.text(name);
                out.text(path);
                out.close(3);
            }
            ExtraKey::Mm { identifier, offset } => {
                out.open(3);
                out.tag("mm");
                out.text(identifier);
                out.int(*offset);
                out.close(3);
            }
            ExtraKey::CacheSalt(salt) => {
                out.open(2);
                out.tag("cache_salt");
                out.text(salt);
                out.close(2);
            }
            ExtraKey::PromptEmbeds(digest) => {
                out.open(2);
                out.tag("prompt_embeds");
                out.bytes(digest);
                out.close(2);
            }
        }
    }

    fn write_bare(&self, tagging: Tagging, out: &mut impl Emit) {
        match self {
            ExtraKey::LoraId(id) => out.uint(*id),
            ExtraKey::Lora { name, .. } => out.text(name),
            ExtraKey::Mm { identifier, offset } if tagging >= Tagging::MmOffset => {
                out.open(2);
                out.text(identifier);
                out.int(*offset);
                out.close(2);
            }
            ExtraKey::Mm { identifier, .. } => out.text(identifier),
            ExtraKey::CacheSalt(salt) => out.text(salt),
            ExtraKey::PromptEmbeds(digest) => out.bytes(digest),
        }
    }
}

/// The third element of a block's tuple.
#[derive(Clone, Copy, Debug)]
pub struct BlockExtras<'a> {
    /// Form of the keys.
    pub tagging: Tagging,
    /// The block's keys, in the order of their enum.
    pub keys: &'a [ExtraKey<'a>],
    /// The tokens that follow the block, where the engine speculates with EAGLE or MTP (since 0.33): as many as it
    /// looks ahead, else none.
    pub lookahead: &'a [u32],
}

impl BlockExtras<'_> {
    /// A block of nothing but its tokens.
    pub const NONE: BlockExtras<'static> = BlockExtras { tagging: Tagging::Tagged, keys: &[], lookahead: &[] };

    /// Whether the block is nothing but its tokens.
    pub(super) fn is_none(&self) -> bool {
        self.keys.is_empty() && self.lookahead.is_empty()
    }
}

impl Value for BlockExtras<'_> {
    fn write(&self, out: &mut impl Emit) {
        let ahead = self.lookahead.len();
        if ahead > 0 {
            out.open(1 + ahead);
        }
        if self.keys.is_empty() {
            out.none();
        } else {
            out.open(self.keys.len());
            for key in self.keys {
                match self.tagging {
                    Tagging::Tagged => key.write_tagged(out),
                    bare => key.write_bare(bare, out),
                }
            }
            out.close(self.keys.len());
        }
        if ahead > 0 {
            self.lookahead.iter().for_each(|&token| out.int(token.into()));
            out.close(1 + ahead);
        }
    }
}

/// A prompt's extras in the form of one release, from which each block's keys follow.
#[derive(Clone, Debug)]
pub(in crate::block) struct Extras {
    pub(in crate::block) tagging: Tagging,
    /// No block has a key: the usual prompt.
    none: bool,
    lora: Option<Lora>,
    /// Sorted by offset.
    mm: Vec<MmItem>,
    salt: Option<String>,
    embeds: Option<EmbedRows>,
}

#[derive(Clone, Debug)]
enum Lora {
    Id(u64),
    Named { name: String, path: String },
}

impl Extras {
    /// # Errors
    /// What the release hashes and the prompt's extras do not say.
    pub(in crate::block) fn new(tagging: Tagging, extras: &PromptExtras) -> Result<Self, ContractError> {
        let lora = extras.lora.as_ref().map(|lora| match tagging {
            Tagging::LoraId => lora.id.map(Lora::Id).ok_or(ContractError::LoraId { name: lora.name.clone() }),
            Tagging::Tagged => match &lora.path {
                Some(path) => Ok(Lora::Named { name: lora.name.clone(), path: path.clone() }),
                None => Err(ContractError::LoraPath { name: lora.name.clone() }),
            },
            _ => Ok(Lora::Named { name: lora.name.clone(), path: String::new() }),
        });
        if extras.embeds.is_some() && tagging < Tagging::EmbedsDigest {
            return Err(ContractError::RawEmbeds);
        }
        let (lora, salt, embeds) = (lora.transpose()?, extras.salt().cloned(), extras.embeds.clone());
        let mut mm = extras.mm.clone();
        mm.sort_by_key(|item| item.offset);
        let none = lora.is_none() && mm.is_empty() && salt.is_none() && embeds.is_none();
        Ok(Extras { tagging, none, lora, mm, salt, embeds })
    }

    /// The keys of the block over tokens `[start, end)`.
    pub(in crate::block) fn keys(&self, start: u64, end: u64) -> Vec<ExtraKey<'_>> {
        if self.none {
            return Vec::new();
        }
        let lora = self.lora.iter().map(|lora| match lora {
            Lora::Id(id) => ExtraKey::LoraId(*id),
            Lora::Named { name, path } => ExtraKey::Lora { name, path },
        });
        let overlapping = self.mm.iter().filter(|item| {
            let first = u64::from(item.offset);
            end > first && start < first + u64::from(item.length)
        });
        let mm = overlapping
            .map(|item| ExtraKey::Mm { identifier: &item.identifier, offset: i64::from(item.offset) - start as i64 });
        let salt = self.salt.iter().filter(|_| start == 0).map(|salt| ExtraKey::CacheSalt(salt));
        let embeds = self.embeds.iter().map(|rows| {
            let row = |token: u64| rows.bytes.len().min((token as usize).saturating_mul(rows.row_bytes));
            ExtraKey::PromptEmbeds(Sha256::digest(&rows.bytes[row(start)..row(end)]).into())
        });
        lora.chain(mm).chain(salt).chain(embeds).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::Lora as Adapter;

    fn adapter(path: Option<&str>, id: Option<u64>) -> PromptExtras {
        let lora = Adapter { name: "sql".into(), path: path.map(str::to_owned), id };
        PromptExtras { lora: Some(lora), ..PromptExtras::default() }
    }

    #[test]
    fn releases_change_the_form_where_the_contract_says() {
        let check = |minor, patch, expected| {
            assert_eq!(Tagging::of(Release::new(0, minor, patch)), expected, "0.{minor}.{patch}");
        };
        check(10, 2, Tagging::LoraId);
        check(11, 0, Tagging::LoraId);
        check(11, 1, Tagging::LoraName);
        check(16, 0, Tagging::LoraName);
        check(17, 0, Tagging::EmbedsDigest);
        check(18, 1, Tagging::EmbedsDigest);
        check(19, 0, Tagging::MmOffset);
        check(30, 2, Tagging::MmOffset);
        check(31, 0, Tagging::Tagged);
        assert_eq!(Tagging::of(Release::new(1, 0, 0)), Tagging::Tagged);
    }

    #[test]
    fn an_adapter_is_refused_where_what_its_release_hashes_is_not_known() {
        let name = || "sql".to_owned();
        let refused = |tagging, extras: &PromptExtras| Extras::new(tagging, extras).err();
        let check =
            |tagging, path, id, expected| assert_eq!(refused(tagging, &adapter(path, id)), expected, "{tagging:?}");
        check(Tagging::Tagged, None, Some(1), Some(ContractError::LoraPath { name: name() }));
        check(Tagging::Tagged, Some("/sql"), None, None);
        check(Tagging::MmOffset, None, None, None);
        check(Tagging::LoraName, None, None, None);
        check(Tagging::LoraId, Some("/sql"), None, Some(ContractError::LoraId { name: name() }));
        check(Tagging::LoraId, None, Some(1), None);
        let text = ContractError::LoraPath { name: name() }.to_string();
        assert!(text.contains("\"sql\"") && text.contains("/v1/models"), "{text}");
    }

    #[test]
    fn raw_embeddings_are_refused_where_a_release_hashes_them() {
        let embeds = Some(EmbedRows { bytes: vec![0; 8], row_bytes: 4 });
        let extras = PromptExtras { embeds, ..PromptExtras::default() };
        assert_eq!(Extras::new(Tagging::LoraName, &extras).err(), Some(ContractError::RawEmbeds));
        let extras = Extras::new(Tagging::EmbedsDigest, &extras).expect("a digest");
        // Past the rows' end nothing is left to digest, and nothing breaks.
        assert_eq!(extras.keys(u64::MAX - 2, u64::MAX), [ExtraKey::PromptEmbeds(Sha256::digest([]).into())]);
    }

    #[test]
    fn items_overlap_blocks_by_tokens_and_come_in_order_of_offset() {
        let item = |identifier: &str, offset, length| MmItem { identifier: identifier.into(), offset, length };
        let mm = vec![item("b", 6, 2), item("a", 2, 3), item("c", u32::MAX, u32::MAX)];
        let extras = PromptExtras { mm, cache_salt: Some("s".into()), ..PromptExtras::default() };
        let extras = Extras::new(Tagging::Tagged, &extras).expect("no adapter");
        let mm = |identifier, offset| ExtraKey::Mm { identifier, offset };
        assert_eq!(extras.keys(0, 2), [ExtraKey::CacheSalt("s")], "an item that begins at the block's end is outside");
        assert_eq!(extras.keys(2, 4), [mm("a", 0)]);
        assert_eq!(extras.keys(4, 8), [mm("a", -2), mm("b", 2)]);
        assert_eq!(extras.keys(5, 6), [], "an item that ends at the block's start is outside");
        let end = u64::from(u32::MAX) + 1;
        assert_eq!(extras.keys(end, end + 4), [mm("c", -1)]);
    }

    #[test]
    fn an_empty_salt_is_none() {
        let extras = PromptExtras { cache_salt: Some(String::new()), ..PromptExtras::default() };
        assert_eq!(Extras::new(Tagging::Tagged, &extras).expect("nothing").keys(0, 16), []);
    }
}
