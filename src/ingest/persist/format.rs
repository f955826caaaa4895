//! A state file's bytes.
//!
//! | part | bytes |
//! |---|---|
//! | magic, version | 8, 4 |
//! | identity: engine, endpoint, source, rank, block size, contract, media | texts with a length of 2, and 1, 4, 8, 1 |
//! | key space, lookahead or SGLang's form, tokens per block, algorithm | 1, 1, 4, text |
//! | flags: has a last batch, history known from its beginning, tells cached tokens, unproven | 1 |
//! | last batch: sequence, length, first bytes | 8, 8, 16 |
//! | groups: how many, then each: id, medium, keys, and per key: key, copies | 4, 4, 1, 4, 8 + 4 |
//! | own keys of engine keys: how many, then each | 4, 8 + 8 |
//! | XXH3 of all before | 8 |
//!
//! Numbers are little-endian. A file is read whole or not at all.

#![forbid(unsafe_code)]

use std::num::NonZeroU32;

use shards::block::sglang::EventFormat;
use shards::block::vllm::Algorithm;
use shards::block::{Contract, NoneHash};
use shards::inventory::{Medium, Space};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use super::super::calibrate::{Believed, Way};
use super::super::copies::{GROUPS_MAX, Place};
use super::super::stream::Print;

const MAGIC: &[u8; 8] = b"KVLSTATE";
const VERSION: u32 = 2;
/// Media by their numbers.
const MEDIA: [Medium; 3] = [Medium::Device, Medium::Cpu, Medium::Storage];
/// Longest text of an identity.
const TEXT_MAX: usize = 1024;
/// What a file has beside its keys, at most.
const REST_MAX: usize = 64 * 1024;

/// Which cache a file is of, and how it is read. Another one in any part has other keys, or may have, and a file of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// The rule's `kvEngineType`.
    pub(crate) engine: String,
    /// `address:port`.
    pub(crate) endpoint: String,
    /// Where its events come from.
    pub(crate) source: String,
    pub(crate) rank: u8,
    /// The rule's `kvBlockSize`.
    pub(crate) block_tokens: u32,
    /// Digest of what the rule says of the engine's keys.
    pub(crate) contract: u64,
    /// Media whose blocks are kept beside device memory's: 1 the host's memory, 2 what lies behind it.
    pub(crate) media: u8,
}

/// The digest of an identity's contract.
pub(crate) fn digest(believed: Option<&Believed>) -> u64 {
    let text = match believed {
        None => String::new(),
        Some(Believed::Vllm { algorithm, seed, tagging, .. }) => {
            format!("vllm {} {tagging:?} {seed}", algorithm.name())
        }
        Some(Believed::Sglang(contract)) => format!("sglang {contract:?}"),
        Some(Believed::Tokens) => "tokens".to_owned(),
    };
    xxh3_64(text.as_bytes())
}

impl Identity {
    /// The name of its file.
    pub(super) fn file_name(&self) -> String {
        let mut bytes = Vec::new();
        self.put(&mut bytes);
        format!("kv-{:032x}.state", xxh3_128(&bytes))
    }

    fn put(&self, bytes: &mut Vec<u8>) {
        put_text(bytes, &self.engine);
        put_text(bytes, &self.endpoint);
        put_text(bytes, &self.source);
        bytes.push(self.rank);
        bytes.extend_from_slice(&self.block_tokens.to_le_bytes());
        bytes.extend_from_slice(&self.contract.to_le_bytes());
        bytes.push(self.media);
    }
}

/// How keys are read, as far as a file has to say it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum KeptWay {
    /// By the rule's contract.
    #[default]
    Rule,
    /// By vLLM's keys with the rule's seed and another algorithm or lookahead.
    Vllm { algorithm: Algorithm, lookahead: u8, block_tokens: NonZeroU32 },
    /// By SGLang's keys in another form.
    Sglang { bigrams: bool, dynamo: bool, block_tokens: NonZeroU32 },
    /// By our own.
    Derived(NonZeroU32),
}

impl KeptWay {
    /// What to keep of a way; none where nothing can be known by it.
    pub(crate) fn of(way: Way) -> Option<Self> {
        match way {
            Way::Rule => Some(KeptWay::Rule),
            Way::Derived(block_tokens) => Some(KeptWay::Derived(block_tokens)),
            Way::Engine(Space { contract: Contract::Sglang(contract), block_tokens }) => Some(KeptWay::Sglang {
                bigrams: contract.bigrams,
                dynamo: contract.format == EventFormat::Dynamo,
                block_tokens,
            }),
            Way::Engine(Space { contract: Contract::Vllm { none_hash, lookahead, .. }, block_tokens }) => {
                Some(KeptWay::Vllm { algorithm: none_hash.algorithm(), lookahead, block_tokens })
            }
            Way::Engine(_) | Way::Refused => None,
        }
    }

    /// The way again, under the same rule.
    pub(crate) fn way(&self, believed: Option<&Believed>) -> Option<Way> {
        match (self, believed) {
            (KeptWay::Rule, _) => Some(Way::Rule),
            (KeptWay::Derived(block_tokens), Some(_)) => Some(Way::Derived(*block_tokens)),
            (KeptWay::Vllm { algorithm, lookahead, block_tokens }, Some(Believed::Vllm { seed, .. })) => {
                let none_hash = NoneHash::from_seed(*algorithm, seed);
                let Contract::Vllm { tagging, .. } = Contract::vllm(none_hash) else { return None };
                let contract = Contract::Vllm { none_hash, tagging, lookahead: *lookahead };
                Some(Way::Engine(Space { contract, block_tokens: *block_tokens }))
            }
            (KeptWay::Sglang { bigrams, dynamo, block_tokens }, Some(Believed::Sglang(rule))) => {
                let format = if *dynamo { EventFormat::Dynamo } else { EventFormat::Default };
                let live = rule.with(*bigrams, format);
                Some(Way::Engine(Space { contract: Contract::Sglang(live), block_tokens: *block_tokens }))
            }
            _ => None,
        }
    }
}

/// What is known of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Image {
    pub(crate) way: KeptWay,
    /// The last batch applied.
    pub(crate) last: Option<(u64, Print)>,
    /// All that the engine ever announced was heard.
    pub(crate) whole: bool,
    /// The engine's `usage` says how many tokens came from its cache.
    pub(crate) tells_cached: bool,
    /// Some of the keys were unproven already: what follows on the last batch proves nothing of them.
    pub(crate) unproven: bool,
    /// Keys and their copies by group, oldest first.
    pub(crate) groups: Vec<(Place, Vec<(u64, u32)>)>,
    /// Engine key → own key.
    pub(crate) own: Vec<(u64, u64)>,
}

impl Image {
    /// (group, key) entries.
    pub(crate) fn entries(&self) -> usize {
        self.groups.iter().map(|(_, keys)| keys.len()).sum()
    }
}

/// Bytes of a file with so many keys, at most.
pub(super) fn bytes_max(blocks_max: usize) -> usize {
    // Of own keys there are up to twice as many as keys, and some.
    REST_MAX.saturating_add(blocks_max.saturating_mul(12 + 2 * 16))
}

/// Why a file is not taken up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unusable {
    #[error("it is damaged or truncated: its checksum is wrong")]
    Checksum,
    #[error("it is no state file of this release")]
    Format,
    #[error("it is damaged: its parts do not fit together")]
    Parts,
    #[error("it was written for {0}")]
    Other(String),
}

/// The file of an image.
pub(super) fn encode(identity: &Identity, image: &Image) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(1024 + image.entries() * 12 + image.own.len() * 16);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    identity.put(&mut bytes);
    let (space, form, number, algorithm) = match &image.way {
        KeptWay::Rule => (0, 0, 0, ""),
        KeptWay::Derived(block_tokens) => (1, 0, block_tokens.get(), ""),
        KeptWay::Vllm { algorithm, lookahead, block_tokens } => (2, *lookahead, block_tokens.get(), algorithm.name()),
        KeptWay::Sglang { bigrams, dynamo, block_tokens } => {
            (3, u8::from(*bigrams) | u8::from(*dynamo) << 1, block_tokens.get(), "")
        }
    };
    bytes.extend_from_slice(&[space, form]);
    bytes.extend_from_slice(&number.to_le_bytes());
    put_text(&mut bytes, algorithm);
    let flags = [image.last.is_some(), image.whole, image.tells_cached, image.unproven];
    bytes.push(flags.iter().enumerate().map(|(bit, set)| u8::from(*set) << bit).sum());
    let (seq, print) = image.last.unwrap_or((0, Print::of(&[])));
    bytes.extend_from_slice(&seq.to_le_bytes());
    bytes.extend_from_slice(&(print.len as u64).to_le_bytes());
    bytes.extend_from_slice(&print.head);
    put_number(&mut bytes, image.groups.len());
    for (Place { medium, group }, keys) in &image.groups {
        bytes.extend_from_slice(&group.to_le_bytes());
        bytes.push(MEDIA.iter().position(|known| known == medium).map_or(0, |place| place as u8));
        put_number(&mut bytes, keys.len());
        for (key, copies) in keys {
            bytes.extend_from_slice(&key.to_le_bytes());
            bytes.extend_from_slice(&copies.to_le_bytes());
        }
    }
    put_number(&mut bytes, image.own.len());
    for (engine, own) in &image.own {
        bytes.extend_from_slice(&engine.to_le_bytes());
        bytes.extend_from_slice(&own.to_le_bytes());
    }
    let checksum = xxh3_64(&bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    bytes
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    let text = &text.as_bytes()[..text.len().min(TEXT_MAX)];
    bytes.extend_from_slice(&(text.len() as u16).to_le_bytes());
    bytes.extend_from_slice(text);
}

fn put_number(bytes: &mut Vec<u8>, number: usize) {
    debug_assert!(u32::try_from(number).is_ok(), "an endpoint has at most 100,000,000 blocks");
    bytes.extend_from_slice(&(number as u32).to_le_bytes());
}

/// The image in a file, where it is of that cache.
pub(super) fn decode(bytes: &[u8], identity: &Identity) -> Result<Image, Unusable> {
    let (found, image) = read(bytes)?;
    if found == *identity {
        return Ok(image);
    }
    let Identity { engine, endpoint, source, rank, block_tokens, .. } = &found;
    Err(Unusable::Other(format!("{engine} {endpoint}, rank {rank} at {source}, blocks of {block_tokens} tokens")))
}

fn read(bytes: &[u8]) -> Result<(Identity, Image), Unusable> {
    let Some((bytes, checksum)) = bytes.split_last_chunk::<8>() else { return Err(Unusable::Checksum) };
    let Some(rest) = bytes.strip_prefix(MAGIC) else { return Err(Unusable::Format) };
    if xxh3_64(bytes) != u64::from_le_bytes(*checksum) {
        return Err(Unusable::Checksum);
    }
    let mut bytes = Bytes(rest);
    if bytes.u32() != Some(VERSION) {
        return Err(Unusable::Format);
    }
    let read = bytes.identity().and_then(|identity| Some((identity, bytes.image()?)));
    read.filter(|_| bytes.0.is_empty()).ok_or(Unusable::Parts)
}

/// What is left to read.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Option<&'a str> {
        let len = usize::from(self.take().map(u16::from_le_bytes)?);
        let (text, rest) = self.0.split_at_checked(len).filter(|_| len <= TEXT_MAX)?;
        self.0 = rest;
        std::str::from_utf8(text).ok()
    }

    /// So many entries of `N` bytes.
    fn entries<const N: usize>(&mut self) -> Option<impl Iterator<Item = [u8; N]> + use<'a, N>> {
        let count = self.u32()? as usize;
        let (entries, rest) = self.0.split_at_checked(count.checked_mul(N)?)?;
        self.0 = rest;
        Some(entries.chunks_exact(N).filter_map(|entry| entry.try_into().ok()))
    }

    fn identity(&mut self) -> Option<Identity> {
        Some(Identity {
            engine: self.text()?.to_owned(),
            endpoint: self.text()?.to_owned(),
            source: self.text()?.to_owned(),
            rank: self.u8()?,
            block_tokens: self.u32()?,
            contract: self.u64()?,
            media: self.u8()?,
        })
    }

    fn way(&mut self) -> Option<KeptWay> {
        let (space, form, number, algorithm) = (self.u8()?, self.u8()?, self.u32()?, self.text()?);
        Some(match space {
            0 => KeptWay::Rule,
            1 => KeptWay::Derived(NonZeroU32::new(number)?),
            2 => KeptWay::Vllm {
                algorithm: Algorithm::parse(algorithm)?,
                lookahead: form,
                block_tokens: NonZeroU32::new(number)?,
            },
            3 if form < 4 => {
                KeptWay::Sglang { bigrams: form & 1 > 0, dynamo: form & 2 > 0, block_tokens: NonZeroU32::new(number)? }
            }
            _ => return None,
        })
    }

    fn image(&mut self) -> Option<Image> {
        let way = self.way()?;
        let flags = self.u8().filter(|flags| *flags < 16)?;
        let seq = self.u64()?;
        let print = Print { len: usize::try_from(self.u64()?).ok()?, head: self.take()? };
        let mut image = Image {
            way,
            last: (flags & 1 > 0).then_some((seq, print)),
            whole: flags & 2 > 0,
            tells_cached: flags & 4 > 0,
            unproven: flags & 8 > 0,
            ..Image::default()
        };
        for _ in 0..self.u32().filter(|groups| *groups as usize <= GROUPS_MAX)? {
            let group = self.u32()?;
            let medium = *MEDIA.get(usize::from(self.u8()?))?;
            let pair = |entry: [u8; 12]| {
                let (key, copies) = entry.split_first_chunk::<8>()?;
                Some((u64::from_le_bytes(*key), u32::from_le_bytes(copies.try_into().ok()?)))
            };
            image.groups.push((Place { medium, group }, self.entries()?.filter_map(pair).collect()));
        }
        let pair = |entry: [u8; 16]| {
            let (engine, own) = entry.split_first_chunk::<8>()?;
            Some((u64::from_le_bytes(*engine), u64::from_le_bytes(own.try_into().ok()?)))
        };
        image.own = self.entries()?.filter_map(pair).collect();
        Some(image)
    }
}

/// The property that any bytes must have, for tests and fuzz targets: no panic; what is read, as a whole file or with
/// its checksum put right, is written and read again as the same.
///
/// # Panics
/// Where the property does not hold.
pub fn check_any_state_file(bytes: &[u8]) {
    let mut right = bytes.to_vec();
    let checksum = xxh3_64(&right).to_le_bytes();
    right.extend_from_slice(&checksum);
    for bytes in [bytes, &right] {
        let Ok((identity, image)) = read(bytes) else { continue };
        assert_eq!(decode(bytes, &identity), Ok(image.clone()));
        assert_eq!(read(&encode(&identity, &image)), Ok((identity, image)));
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(in crate::ingest::persist) fn identity() -> Identity {
        Identity {
            engine: "vllm".to_owned(),
            endpoint: "10.0.0.1:8000".to_owned(),
            source: "tcp://10.0.0.1:5557".to_owned(),
            rank: 1,
            block_tokens: 16,
            contract: 7,
            media: 0,
        }
    }

    fn image() -> impl Strategy<Value = Image> {
        let size = || (1_u32..9).prop_map(|size| NonZeroU32::new(size).expect("not 0"));
        let way = prop_oneof![
            Just(KeptWay::Rule),
            size().prop_map(KeptWay::Derived),
            (size(), any::<(bool, bool)>()).prop_map(|(block_tokens, (bigrams, dynamo))| KeptWay::Sglang {
                bigrams,
                dynamo,
                block_tokens
            }),
            (size(), any::<u8>(), prop::sample::select(Algorithm::ALL.to_vec()))
                .prop_map(|(block_tokens, lookahead, algorithm)| KeptWay::Vllm { algorithm, lookahead, block_tokens }),
        ];
        let keys = || prop::collection::vec((any::<u64>(), any::<u32>()), 0..20);
        let last = prop::option::of((any::<u64>(), prop::collection::vec(any::<u8>(), 0..40)));
        let place =
            (any::<u32>(), prop::sample::select(MEDIA.to_vec())).prop_map(|(group, medium)| Place { medium, group });
        let groups = prop::collection::vec((place, keys()), 0..4);
        let own = prop::collection::vec(any::<(u64, u64)>(), 0..9);
        (way, last, any::<(bool, bool, bool)>(), groups, own).prop_map(
            |(way, last, (whole, tells_cached, unproven), groups, own)| Image {
                way,
                last: last.map(|(seq, payload)| (seq, Print::of(&payload))),
                whole,
                tells_cached,
                unproven,
                groups,
                own,
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

        #[test]
        fn what_was_written_is_read_again_and_one_wrong_byte_costs_the_file(
            image in image(), place in any::<prop::sample::Index>(), bit in 0..8, cut in any::<prop::sample::Index>(),
        ) {
            let file = encode(&identity(), &image);
            prop_assert_eq!(decode(&file, &identity()), Ok(image));
            let mut damaged = file.clone();
            damaged[place.index(file.len())] ^= 1_u8 << bit;
            prop_assert!(decode(&damaged, &identity()).is_err());
            prop_assert!(decode(&file[..cut.index(file.len())], &identity()).is_err());
        }

        #[test]
        fn any_bytes_are_read_without_panic(
            image in image(), places in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 0..6),
            noise in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            check_any_state_file(&noise);
            let file = encode(&identity(), &image);
            let mut body = file[..file.len() - 8].to_vec();
            places.iter().for_each(|(place, byte)| body[place.index(file.len() - 8)] = *byte);
            check_any_state_file(&body);
        }
    }

    #[test]
    fn a_file_of_another_cache_is_told_and_has_another_name() {
        let file = encode(&identity(), &Image::default());
        let others = [
            Identity { engine: "sglang".to_owned(), ..identity() },
            Identity { endpoint: "10.0.0.1:8001".to_owned(), ..identity() },
            Identity { source: "tcp://10.0.0.1:5558".to_owned(), ..identity() },
            Identity { rank: 2, ..identity() },
            Identity { block_tokens: 32, ..identity() },
            Identity { contract: 8, ..identity() },
            Identity { media: 1, ..identity() },
        ];
        for other in others {
            assert_ne!(other.file_name(), identity().file_name(), "{other:?}");
            assert_eq!(
                decode(&file, &other).expect_err("another").to_string(),
                "it was written for vllm 10.0.0.1:8000, rank 1 at tcp://10.0.0.1:5557, blocks of 16 tokens"
            );
        }
    }
}
