//! Does an engine make its block keys as the rule says? Found out by its first root blocks: tokens and key stand side
//! by side in the event, and one block that fits settles it.
//!
//! Until a verdict is there the rule is believed. What does not fit is tried with every algorithm, the seeds that
//! people use, other block sizes under the same chain, and other ways to cut a digest down to a key, so that the leg at
//! fault gets its name; the gateway's own keys ([`super::derived`]) serve the rank meanwhile. A rank whose keys fit none
//! of it goes on being compared, since its first blocks may have been salted without a word about it.
//!
//! No I/O and no clock: a root block goes in, what is to change comes out.

#![forbid(unsafe_code)]

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use shards::block::vllm::{Algorithm, BlockExtras, ExtraKey, Tagging};
use shards::block::{Chain, Contract, FIXED_SEED, KeyStream, NoneHash, PromptExtras, sglang};
use shards::ids::BlockKey;
use shards::inventory::Space;

use super::events::{Marks, Stored};
use super::msgpack::{Head, Reader};
use super::tokens::Spelling;

/// Root blocks of one connection that everything is tried on; later ones are compared with the rule alone.
const FULL_TRIES: u32 = 16;
/// Different root blocks that must fit nothing before a release that says nothing of salts counts as fitting nothing.
const UNTOLD_TRIES: u32 = 3;
/// Largest number tried as a seed; people take small ones.
const SEED_NUMBER_MAX: u32 = 64;
/// Other seeds seen in deployment guides.
const SEED_TEXTS: [&str; 8] = ["", "random", "123", "1234", "12345", "1337", "2024", "2025"];

/// What a rule says of its engines' keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Believed {
    /// vLLM.
    Vllm {
        /// Algorithm of the chain.
        algorithm: Algorithm,
        /// The rule names the algorithm (`kvHashAlgo`); if not, the engine's own is taken over.
        algorithm_given: bool,
        /// Text of the seed.
        seed: String,
        /// Form of extra keys.
        tagging: Tagging,
    },
    /// SGLang.
    Sglang(sglang::Contract),
    /// TensorRT-LLM's stream: its keys, which differ between its builds, only link blocks; their tokens are hashed.
    Tokens,
}

/// What can be wrong between a rule and its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Leg {
    /// The seed of the first block's parent.
    Seed,
    /// The hash algorithm.
    Algorithm,
    /// Tokens per block.
    BlockSize,
    /// The form of extra keys (adapters, images, salts).
    Tagging,
    /// Which part of the digest the key is.
    KeyWidth,
}

impl Leg {
    /// The label value.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Leg::Seed => "seed",
            Leg::Algorithm => "algorithm",
            Leg::BlockSize => "block_size",
            Leg::Tagging => "extra_key_tagging",
            Leg::KeyWidth => "key_width",
        }
    }
}

/// How a rank's blocks are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verdict {
    /// No root block has been seen yet: the rule is believed.
    #[default]
    Believed,
    /// The engine's keys are reproduced.
    Exact,
    /// The announced tokens are hashed by the gateway's own rules.
    Derived,
    /// Neither is possible: the rank is not routed by its cache.
    Refused,
}

impl Verdict {
    /// The label value.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Believed => "believed",
            Verdict::Exact => "exact",
            Verdict::Derived => "derived",
            Verdict::Refused => "refused",
        }
    }
}

/// A verdict with its reasons.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Finding {
    /// The verdict.
    pub verdict: Verdict,
    /// Legs at fault.
    pub faults: Vec<Leg>,
    /// Legs that differ from the rule's defaults and are taken over.
    pub hints: Vec<Leg>,
    /// What was found and what to do, in a sentence; empty while nothing was.
    pub detail: String,
}

/// How the blocks of a rank are keyed from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// By the rule's contract.
    Rule,
    /// By the engine's own keys under another contract.
    Engine(Space),
    /// By our own keys of blocks of so many tokens.
    Derived(NonZeroU32),
    /// Not at all.
    Refused,
}

/// The first block of a sequence.
#[derive(Clone, Debug)]
struct Root<'a> {
    tokens: &'a [u32],
    ahead: Vec<u32>,
    key: BlockKey,
    digest: Option<&'a [u8]>,
    block_tokens: NonZeroU32,
    /// Its units are pairs of neighbours: there is one token more than units.
    bigrams: bool,
    /// SGLang: the salt that its chain begins with.
    salt: Option<&'a str>,
    told: bool,
}

/// What a block is like, and what follows from it.
struct Fit {
    way: Way,
    faults: Vec<Leg>,
    hints: Vec<Leg>,
    detail: String,
}

/// The calibration of one rank.
#[derive(Debug)]
pub(crate) struct Calibrator {
    believed: Arc<Believed>,
    rule_tokens: u32,
    way: Way,
    /// A root block fitted, or enough of them did not.
    settled: bool,
    tries: u32,
    last: Option<BlockKey>,
    /// What was found of extra keys; the verdict comes from plain blocks.
    tagging: Option<Tagging>,
    tagging_tries: u32,
    finding: Finding,
}

impl Calibrator {
    pub(crate) fn new(believed: Arc<Believed>, rule_tokens: u32) -> Self {
        Calibrator {
            believed,
            rule_tokens,
            way: Way::Rule,
            settled: false,
            tries: 0,
            last: None,
            tagging: None,
            tagging_tries: 0,
            finding: Finding::default(),
        }
    }

    /// The engine may be another now: what was found is believed until its blocks show otherwise.
    pub(crate) fn begin_again(&mut self) {
        self.settled = false;
        self.tries = 0;
        self.last = None;
        self.tagging = None;
        self.tagging_tries = 0;
    }

    /// How the rank's blocks are keyed now.
    pub(crate) fn way(&self) -> Way {
        self.way
    }

    /// A former gateway found this, and the rank begins so: the next root blocks show whether it is still true.
    pub(crate) fn resume(&mut self, way: Way) {
        self.way = way;
        self.finding = Finding {
            verdict: match way {
                Way::Derived(_) => Verdict::Derived,
                _ => Verdict::Believed,
            },
            detail: "as found before the gateway was restarted; the engine's next blocks are looked at anew".to_owned(),
            ..Finding::default()
        };
    }

    pub(crate) fn finding(&self) -> &Finding {
        &self.finding
    }

    /// Whether the engine's keys are proved: tokens need not be looked at.
    pub(crate) fn is_proved(&self) -> bool {
        self.settled && matches!(self.way, Way::Rule | Way::Engine(_))
    }

    /// Looks at a store in device memory; the way to go from now on, where it is another than before.
    pub(crate) fn observe(&mut self, stored: &Stored<'_>, scratch: &mut Vec<u32>) -> Option<Way> {
        if stored.parent.is_some() {
            return None;
        }
        let extra = stored.marks.extra_keys().next().flatten();
        if self.is_proved() && (extra.is_none() || !self.wants_extras()) {
            return None;
        }
        let block_tokens = NonZeroU32::new(stored.block_tokens)?;
        let (key, digest) = stored.keys.first()?;
        let size = block_tokens.get() as usize;
        let tokens = stored.tokens.first(block_tokens.get());
        if self.last == Some(key) || !tokens.decode(scratch) || scratch.len() < size {
            return None;
        }
        self.last = Some(key);
        let marks = &stored.marks;
        let salt = marks.salt_alone().filter(|_| matches!(*self.believed, Believed::Sglang(_)));
        if salt.is_none() && (extra.is_some() || marks.adapter().iter().any(|part| !part.is_empty())) {
            self.observe_extras(scratch, key, marks, extra);
            return None;
        }
        let (ahead, bigrams) = (marks.first_lookahead(), tokens.spelling() == Spelling::Bigrams);
        let told = marks.are_told();
        self.judge(&Root { tokens: scratch, ahead, key, digest, block_tokens, bigrams, salt, told })
    }

    fn judge(&mut self, root: &Root<'_>) -> Option<Way> {
        self.tries = self.tries.saturating_add(1);
        let fit = match &*self.believed {
            Believed::Vllm { algorithm, algorithm_given, seed, .. } => {
                let rule = VllmRule { algorithm: *algorithm, given: *algorithm_given, seed, tokens: self.rule_tokens };
                if self.tries <= FULL_TRIES { rule.try_all(root) } else { rule.try_rule(root) }
            }
            Believed::Sglang(contract) => try_sglang(contract, self.rule_tokens, root),
            Believed::Tokens => Some(fit_tokens(self.rule_tokens, root)),
        };
        let fit = match fit {
            Some(fit) => fit,
            // What follows from no fit is known already, or a salt or a namespace may have been to blame.
            None if self.settled || root.salt.is_some() || !(root.told || self.tries >= UNTOLD_TRIES) => return None,
            None => self.nothing_fits(root),
        };
        self.settled = true;
        let verdict = match fit.way {
            Way::Rule | Way::Engine(_) => Verdict::Exact,
            Way::Derived(_) => Verdict::Derived,
            Way::Refused => Verdict::Refused,
        };
        self.finding = Finding { verdict, faults: fit.faults, hints: fit.hints, detail: fit.detail };
        let before = std::mem::replace(&mut self.way, fit.way);
        (before != fit.way).then_some(fit.way)
    }

    fn nothing_fits(&self, root: &Root<'_>) -> Fit {
        if let Believed::Sglang(_) = *self.believed {
            let (mut faults, mut detail) = (vec![Leg::Algorithm], NO_SGLANG_CHAIN.to_owned());
            note_block_size(self.rule_tokens, root, &mut faults, &mut detail);
            return Fit { way: Way::Derived(root.block_tokens), faults, hints: Vec::new(), detail };
        }
        let mut faults = vec![Leg::Seed];
        let mut detail = String::from(
            "no known algorithm and seed make the engine's keys: its PYTHONHASHSEED is most likely unset and so random \
             (vLLM before 0.29, and xxhash of any release); set it on the engine, and kvNoneHashSeed to the same text",
        );
        if let (Believed::Vllm { algorithm, .. }, Some(digest)) = (&*self.believed, root.digest)
            && digest.len() != digest_bytes(*algorithm)
        {
            faults.push(Leg::Algorithm);
            detail = format!(
                "kvHashAlgo is {}, whose digests have {} bytes; the engine's have {}. {detail}",
                algorithm.name(),
                digest_bytes(*algorithm),
                digest.len()
            );
        }
        note_block_size(self.rule_tokens, root, &mut faults, &mut detail);
        Fit { way: Way::Derived(root.block_tokens), faults, hints: Vec::new(), detail }
    }

    /// Extra keys are looked at until their form is known.
    fn wants_extras(&self) -> bool {
        self.tagging.is_none() && self.tagging_tries < FULL_TRIES && matches!(*self.believed, Believed::Vllm { .. })
    }

    /// Tries the forms of extra keys on a root block that has some. Says nothing before a plain block has fitted.
    fn observe_extras(&mut self, tokens: &[u32], key: BlockKey, marks: &Marks<'_>, extra: Option<&[u8]>) {
        let Believed::Vllm { seed, tagging: believed, .. } = &*self.believed else { return };
        let (true, Some(extra)) = (self.is_proved() && self.wants_extras(), extra) else { return };
        let algorithm = match self.way {
            Way::Engine(Space { contract: Contract::Vllm { none_hash, .. }, .. }) => none_hash.algorithm(),
            _ => match &*self.believed {
                Believed::Vllm { algorithm, .. } => *algorithm,
                Believed::Sglang(_) | Believed::Tokens => return,
            },
        };
        let Some(keys) = extra_keys(extra, marks.lora_name()) else { return };
        self.tagging_tries += 1;
        let none_hash = NoneHash::from_seed(algorithm, seed);
        let fits = |tagging: &Tagging| {
            let extras = BlockExtras { tagging: *tagging, keys: &keys, lookahead: &[] };
            Chain::new(algorithm, &none_hash).push_with(tokens, &extras, &mut Vec::new()) == key
        };
        let order = std::iter::once(*believed).chain(Tagging::ALL);
        self.tagging = order.into_iter().find(fits);
        match self.tagging {
            Some(found) if found != *believed && !self.finding.hints.contains(&Leg::Tagging) => {
                self.finding.hints.push(Leg::Tagging);
                self.finding.detail += &format!("; extra keys are of the form {found:?}, not {believed:?}");
            }
            // An adapter's path is in no event: nothing follows from it not fitting.
            None if marks.lora_name().is_none()
                && self.tagging_tries >= UNTOLD_TRIES
                && !self.finding.faults.contains(&Leg::Tagging) =>
            {
                self.finding.faults.push(Leg::Tagging);
                self.finding.detail += "; prompts with adapters, images or salts have keys of no known form, plain prompts have the right ones";
            }
            _ => {}
        }
    }
}

/// The extra keys of one block as their event tells them; none where they are of a shape that is not known.
pub(super) fn extra_keys<'a>(wire: &'a [u8], lora_name: Option<&'a str>) -> Option<Vec<ExtraKey<'a>>> {
    let mut reader = Reader::new(wire);
    let text = |bytes: &'a [u8]| std::str::from_utf8(bytes).ok();
    let mut keys = Vec::new();
    for place in 0..reader.array().ok()? {
        keys.push(match reader.head().ok()? {
            Head::Str(name) if place == 0 && text(name) == lora_name => ExtraKey::Lora { name: text(name)?, path: "" },
            Head::Str(salt) => ExtraKey::CacheSalt(text(salt)?),
            Head::Array(2) => {
                let (Head::Str(identifier), offset) = (reader.head().ok()?, reader.head().ok()?) else { return None };
                let offset = match offset {
                    Head::Uint(offset) => i64::try_from(offset).ok()?,
                    Head::Negative(offset) => offset,
                    _ => return None,
                };
                ExtraKey::Mm { identifier: text(identifier)?, offset }
            }
            Head::Bin(digest) => ExtraKey::PromptEmbeds(digest.try_into().ok()?),
            _ => return None,
        });
    }
    Some(keys)
}

fn digest_bytes(algorithm: Algorithm) -> usize {
    match algorithm {
        Algorithm::Sha256 | Algorithm::Sha256Cbor => 32,
        Algorithm::Sha256Cbor64 => 8,
        Algorithm::Xxhash | Algorithm::XxhashCbor => 16,
    }
}

/// Says both block sizes where they differ.
fn note_block_size(rule_tokens: u32, root: &Root<'_>, faults: &mut Vec<Leg>, detail: &mut String) -> bool {
    let engine = root.block_tokens.get();
    if engine == rule_tokens {
        return false;
    }
    faults.insert(0, Leg::BlockSize);
    let both = format!("block_size_mismatch: kvBlockSize is {rule_tokens}, the engine's blocks have {engine} tokens");
    *detail =
        if detail.is_empty() { format!("{both}; set kvBlockSize to {engine}") } else { format!("{both}. {detail}") };
    true
}

/// A vLLM rule's contract, to be tried on blocks.
struct VllmRule<'a> {
    algorithm: Algorithm,
    given: bool,
    seed: &'a str,
    tokens: u32,
}

impl VllmRule<'_> {
    /// The rule's own algorithm and seed.
    fn try_rule(&self, root: &Root<'_>) -> Option<Fit> {
        self.fits(self.algorithm, self.seed, root).then(|| self.fit(self.algorithm, self.seed, root))
    }

    fn try_all(&self, root: &Root<'_>) -> Option<Fit> {
        if let Some(fit) = self.try_rule(root) {
            return Some(fit);
        }
        let others = || Algorithm::ALL.into_iter().filter(|algorithm| *algorithm != self.algorithm);
        if let Some(algorithm) = others().find(|algorithm| self.fits(*algorithm, self.seed, root)) {
            return Some(self.fit(algorithm, self.seed, root));
        }
        for algorithm in std::iter::once(self.algorithm).chain(others()) {
            if let Some(seed) = seeds().find(|seed| self.fits(algorithm, seed, root)) {
                return Some(self.fit(algorithm, &seed, root));
            }
        }
        self.try_finer_chain(root).or_else(|| self.try_other_widths(root))
    }

    fn chain(&self, algorithm: Algorithm, seed: &str, root: &Root<'_>) -> Chain {
        let mut chain = Chain::new(algorithm, &NoneHash::from_seed(algorithm, seed));
        let extras = BlockExtras { lookahead: &root.ahead, ..BlockExtras::NONE };
        chain.push_with(root.tokens, &extras, &mut Vec::new());
        chain
    }

    fn fits(&self, algorithm: Algorithm, seed: &str, root: &Root<'_>) -> bool {
        self.chain(algorithm, seed, root).key() == root.key
    }

    /// What follows from keys by this algorithm and seed.
    fn fit(&self, algorithm: Algorithm, seed: &str, root: &Root<'_>) -> Fit {
        let (mut faults, mut hints, mut detail) = (Vec::new(), Vec::new(), String::new());
        if seed != self.seed {
            faults.push(Leg::Seed);
            detail = format!(
                "the engine's seed is {seed:?}, the rule has another: set kvNoneHashSeed to the engine's PYTHONHASHSEED"
            );
        }
        if algorithm != self.algorithm && self.given {
            faults.push(Leg::Algorithm);
            let rest = if detail.is_empty() { String::new() } else { format!("; {detail}") };
            detail = format!(
                "kvHashAlgo is {}, the engine hashes by {}: make them the same{rest}",
                self.algorithm.name(),
                algorithm.name()
            );
        }
        note_block_size(self.tokens, root, &mut faults, &mut detail);
        let lookahead = u8::try_from(root.ahead.len()).unwrap_or(0);
        let way = match faults.is_empty() {
            false => Way::Derived(root.block_tokens),
            true if algorithm == self.algorithm && lookahead == 0 => Way::Rule,
            true => {
                let none_hash = NoneHash::from_seed(algorithm, seed);
                let contract = Contract::Vllm { none_hash, tagging: Tagging::Tagged, lookahead };
                Way::Engine(Space { contract, block_tokens: root.block_tokens })
            }
        };
        if algorithm != self.algorithm && !self.given {
            hints.push(Leg::Algorithm);
        }
        if detail.is_empty() {
            detail = format!("the engine's keys are {} with the rule's seed", algorithm.name());
            if algorithm != self.algorithm {
                detail += ", taken over since the rule names no kvHashAlgo";
            }
            if lookahead > 0 {
                detail += &format!(", with {lookahead} tokens of lookahead");
            }
        }
        Fit { way, faults, hints, detail }
    }

    /// Groups of hybrid models announce blocks that span several of the chain's.
    fn try_finer_chain(&self, root: &Root<'_>) -> Option<Fit> {
        let whole = root.block_tokens.get();
        let finer = [self.tokens, 16, 32, 64, 128].into_iter().filter(|size| *size > 0 && *size < whole);
        let algorithms = Algorithm::ALL.into_iter().filter(|algorithm| !self.given || *algorithm == self.algorithm);
        let algorithms: Vec<_> = algorithms.collect();
        let size = finer.filter(|size| whole.is_multiple_of(*size)).find(|size| {
            algorithms.iter().any(|algorithm| {
                let mut chain = Chain::new(*algorithm, &NoneHash::from_seed(*algorithm, self.seed));
                root.tokens.chunks_exact(*size as usize).for_each(|block| _ = chain.push(block));
                chain.key() == root.key
            })
        })?;
        let (mut faults, mut detail) = (Vec::new(), format!("its chain is over blocks of {size} (a hybrid model)"));
        if !note_block_size(self.tokens, root, &mut faults, &mut detail) {
            faults.push(Leg::BlockSize);
        }
        Some(Fit { way: Way::Derived(root.block_tokens), faults, hints: Vec::new(), detail })
    }

    /// Keys that are another part of the right digest.
    fn try_other_widths(&self, root: &Root<'_>) -> Option<Fit> {
        let algorithms = std::iter::once(self.algorithm).chain(Algorithm::ALL);
        let (algorithm, part) = algorithms.into_iter().find_map(|algorithm| {
            let chain = self.chain(algorithm, self.seed, root);
            let digest = chain.as_bytes();
            let first = u64::from_be_bytes(*digest.first_chunk()?);
            let last: [u8; 8] = *digest.last_chunk()?;
            let parts = [
                ("the first 8 bytes of the digest", first),
                ("the last 8 bytes of the digest, little-endian", u64::from_le_bytes(last)),
                ("the last 4 bytes of the digest", u64::from_be_bytes(last) & 0xffff_ffff),
                ("63 bits of the digest", u64::from_be_bytes(last) >> 1),
            ];
            let part = parts.into_iter().find(|(_, key)| *key == root.key.0);
            part.map(|(part, _)| (algorithm, part))
        })?;
        let mut faults = vec![Leg::KeyWidth];
        let mut detail =
            format!("the engine's keys are {part} of {}, not its last 8 bytes: it is no stock vLLM", algorithm.name());
        note_block_size(self.tokens, root, &mut faults, &mut detail);
        Some(Fit { way: Way::Derived(root.block_tokens), faults, hints: Vec::new(), detail })
    }
}

fn seeds() -> impl Iterator<Item = String> {
    let texts = std::iter::once(FIXED_SEED).chain(SEED_TEXTS).map(str::to_owned);
    texts.chain((0..=SEED_NUMBER_MAX).map(|number| number.to_string()))
}

/// Blocks whose tokens are hashed whatever their keys are.
fn fit_tokens(rule_tokens: u32, root: &Root<'_>) -> Fit {
    let (mut faults, mut detail) = (Vec::new(), String::new());
    if !note_block_size(rule_tokens, root, &mut faults, &mut detail) {
        detail = "the tokens of the engine's blocks are hashed, as the rule's blockhash_trtllm says".to_owned();
    }
    Fit { way: Way::Derived(root.block_tokens), faults, hints: Vec::new(), detail }
}

/// What is said of SGLang's keys that fit nothing known.
const NO_SGLANG_CHAIN: &str = "the engine's keys are no page chain of SGLang 0.5.6 to 0.5.23: it is another release or \
     build, or all it was asked so far was of adapters or an extra_key in the dynamo format";

/// Pairs of tokens show in how an event spells them, and its format in the key of a salted page alone: both are taken
/// from the engine. What it says of itself (`GET /server_info`) may come later than its first block.
fn try_sglang(rule: &sglang::Contract, rule_tokens: u32, root: &Root<'_>) -> Option<Fit> {
    use sglang::EventFormat::{Default, Dynamo};
    let formats = if rule.format == Default { [Default, Dynamo] } else { [Dynamo, Default] };
    let extras = PromptExtras { cache_salt: root.salt.map(str::to_owned), ..PromptExtras::default() };
    let fits = |live: &sglang::Contract| {
        let stream = KeyStream::new(&Contract::Sglang(*live), &extras, root.block_tokens);
        stream.is_ok_and(|mut stream| stream.next_key(&mut &*root.tokens) == Some(root.key))
    };
    if let Some(live) = formats.into_iter().map(|format| rule.with(root.bigrams, format)).find(fits) {
        return Some(fit_sglang(rule, live, rule_tokens, root));
    }
    (sglang::tuple_hash(root.tokens, root.bigrams) == root.key).then(|| {
        let detail = "the engine is SGLang before 0.5.6, whose keys say nothing of what goes before a page: upgrade it";
        let (faults, hints) = (vec![Leg::Algorithm], Vec::new());
        Fit { way: Way::Refused, faults, hints, detail: detail.to_owned() }
    })
}

/// What follows from pages of this chain.
fn fit_sglang(rule: &sglang::Contract, live: sglang::Contract, rule_tokens: u32, root: &Root<'_>) -> Fit {
    let (mut faults, mut hints, mut detail) = (Vec::new(), Vec::new(), String::new());
    if note_block_size(rule_tokens, root, &mut faults, &mut detail) {
        return Fit { way: Way::Derived(root.block_tokens), faults, hints, detail };
    }
    detail.push_str("the engine's keys are SGLang's page chain");
    if live.bigrams {
        detail.push_str(", over pairs of tokens (EAGLE)");
    }
    if live.bigrams != rule.bigrams {
        hints.push(Leg::Algorithm);
    }
    if live.format != rule.format {
        hints.push(Leg::Tagging);
        detail.push_str(", published in another event format than the engine said");
    }
    let space = Space { contract: Contract::Sglang(live), block_tokens: root.block_tokens };
    Fit { way: if live == *rule { Way::Rule } else { Way::Engine(space) }, faults, hints, detail }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.verdict.name())?;
        if !self.faults.is_empty() {
            let names: Vec<_> = self.faults.iter().map(|leg| leg.name()).collect();
            write!(f, " (at fault: {})", names.join(", "))?;
        }
        if !self.detail.is_empty() {
            write!(f, ": {}", self.detail)?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "calibrate_tests.rs"]
mod tests;
