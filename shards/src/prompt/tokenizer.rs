//! Text to token ids, and where a text may be cut so that the pieces' ids are the whole text's.
//!
//! **Invariant.** A cut is used only where the ids of the pieces joined are the ids of the whole: by the shape of the
//! tokenizer, and tried on a built-in corpus when it is loaded. A kind of cut that fails there is not used at all.

use std::collections::HashSet;
use std::panic::AssertUnwindSafe;

use super::slices::{self, Joins};
use tokenizers::pipeline::{
    EncodeOptions, Override, PipelineModel, PipelineNormalizer, PipelinePreTokenizer, PipelineToken, PipelineTokenizer,
};
use tokenizers::tokenizer::SplitDelimiterBehavior;

/// A model's tokenizer.
pub struct Tokenizer {
    inner: PipelineTokenizer,
    cuts: Cuts,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("cuts", &self.cuts).finish_non_exhaustive()
    }
}

/// Lengths of pieces, bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct PieceLengths {
    /// Least length up to a special token.
    pub token: usize,
    /// The same near the end of the text.
    pub token_last: usize,
    /// What counts as near.
    pub last: usize,
    /// Length without a special token.
    pub plain: usize,
    /// Greatest length.
    pub max: usize,
}

/// Why a tokenizer could not be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file is not a tokenizer that can be read.
    #[error("not a usable tokenizer.json: {0}")]
    Unreadable(String),
    /// A text could not be encoded.
    #[error("the text could not be encoded: {0}")]
    Encode(String),
}

/// Which cuts are exact for a tokenizer.
#[derive(Debug, Default)]
struct Cuts {
    /// Before the space in `word word`.
    words: bool,
    /// Before these added tokens.
    tokens: HashSet<Box<str>>,
    /// Lengths that occur among them, longest first.
    lengths: Vec<usize>,
    /// Bytes that they begin with.
    first: [u64; 4],
    /// Between a Latin letter and a digit.
    digits: bool,
    /// Between ideographs that no token joins.
    ideographs: Option<Joins>,
}

impl Tokenizer {
    /// Reads the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// The text is no tokenizer, is damaged, or needs a component that is not built in.
    pub fn from_json(json: &str) -> Result<Self, TokenizerError> {
        // The parser is not ours: whatever a damaged file makes it do must stay an error.
        let parsed = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let canonical = tokenizers::canonicalize_str(json).map_err(|e| e.to_string())?;
            tokenizers::from_json(&canonical).map_err(|e| e.to_string())
        }));
        let inner = match parsed {
            Ok(parsed) => parsed.map_err(TokenizerError::Unreadable)?,
            Err(_) => return Err(TokenizerError::Unreadable("its reader gave up".into())),
        };
        let mut tokenizer = Tokenizer { inner, cuts: Cuts::default() };
        tokenizer.cuts = tokenizer.proved_cuts(Joins::read(json).unwrap_or_default());
        Ok(tokenizer)
    }

    /// Appends the ids of a text without special tokens around it.
    ///
    /// # Errors
    /// The text cannot be expressed in the vocabulary.
    pub fn encode(
        &self,
        text: &str,
        scratch: &mut Vec<PipelineToken>,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        scratch.clear();
        let options = EncodeOptions {
            add_special_tokens: false,
            encode_special_tokens: false,
            padding: Override::Off,
            truncation: Override::Off,
        };
        let encoded = std::panic::catch_unwind(AssertUnwindSafe(|| self.inner.encode_into(text, &options, scratch)));
        match encoded {
            Ok(result) => result.map_err(|e| TokenizerError::Encode(e.to_string()))?,
            Err(_) => return Err(TokenizerError::Encode("the encoder gave up".into())),
        }
        ids.extend(scratch.iter().map(|token| token.id()));
        Ok(())
    }

    /// Ids that special tokens put before every text.
    pub fn prefix(&self) -> impl Iterator<Item = u32> {
        self.inner.get_post_processor().single.prefix.iter().map(|(token, _)| token.id())
    }

    /// Ids that special tokens put after every text.
    pub fn suffix(&self) -> impl Iterator<Item = u32> {
        self.inner.get_post_processor().single.suffix.iter().map(|(token, _)| token.id())
    }

    /// Whether the vocabulary has an added token of this text.
    #[must_use]
    pub fn has_added_token(&self, text: &str) -> bool {
        self.inner.get_added_vocabulary().token_to_id(text).is_some()
    }

    /// Where the piece of text that begins at the place ends: at a token that may be cut at and is far enough, else
    /// where words may be cut, else at the end of the text. None where the text has no cut within the longest piece.
    #[must_use]
    pub(super) fn mark_after(&self, text: &str, at: usize, lengths: PieceLengths) -> Option<usize> {
        let plain = text.len().min(at + lengths.plain);
        let near_end = text.len().saturating_sub(lengths.last);
        let first = (at + lengths.token).min(near_end.max(at + lengths.token_last));
        let token =
            (first..plain).find(|&place| self.cuts.may_begin(text.as_bytes()[place]) && self.is_cut(text, place));
        if token.is_some() || plain == text.len() {
            return token.or(Some(plain));
        }
        let max = text.len().min(at + lengths.max);
        let before = (at + 1..=plain).rev().find(|&place| self.is_cut(text, place));
        let after = || (plain + 1..max).find(|&place| self.is_cut(text, place));
        before.or_else(after).or((max == text.len()).then_some(max))
    }

    /// The id of an added token.
    #[must_use]
    pub fn added_token(&self, text: &str) -> Option<u32> {
        self.inner.get_added_vocabulary().token_to_id(text)
    }

    /// Length of the text's first piece: about `wanted` bytes where there is a cut near, else up to the next cut, else
    /// the whole text.
    fn piece(&self, text: &str, wanted: usize) -> usize {
        if text.len() <= wanted {
            return text.len();
        }
        let before = (1..=wanted).rev().find(|&at| self.is_cut(text, at));
        before.or_else(|| (wanted + 1..text.len()).find(|&at| self.is_cut(text, at))).unwrap_or(text.len())
    }

    /// The last place of a text at which its tokens cannot reach across, whatever follows the text; 0 if there is none.
    #[must_use]
    pub fn last_cut(&self, text: &str) -> usize {
        (1..text.len()).rev().find(|&at| self.is_cut(text, at)).unwrap_or(0)
    }

    /// Whether the text may be cut before the byte.
    pub(super) fn is_cut(&self, text: &str, at: usize) -> bool {
        let bytes = text.as_bytes();
        let byte = bytes[at];
        if byte == b' ' {
            return self.cuts.words && is_word_end(text, at) && bytes.get(at + 1).is_some_and(u8::is_ascii_alphabetic);
        }
        if byte.is_ascii_digit() {
            return self.cuts.digits && at > 0 && bytes[at - 1].is_ascii_alphabetic();
        }
        if slices::begins_ideograph(byte)
            && self.cuts.ideographs.as_ref().is_some_and(|j| j.parts_ideographs(bytes, at))
        {
            return true;
        }
        self.cuts.may_begin(byte) && self.cuts.token_at(text, at)
    }

    /// The cuts that the tokenizer's shape allows and that the corpus confirms.
    fn proved_cuts(&self, joins: Joins) -> Cuts {
        let added: Vec<_> = self.inner.get_added_vocabulary().get_added_tokens_decoder().into_values().collect();
        let mut cuts = Cuts::default();
        for token in &added {
            let plain = !(token.normalized || token.lstrip || token.rstrip || token.single_word);
            let begins =
                token.content.chars().next().is_some_and(|c| !c.is_whitespace() && !c.is_alphanumeric() && c != '_');
            if plain && begins {
                cuts.tokens.insert(token.content.as_str().into());
            }
        }
        // Quadratic in the few tokens that could overlap; a vocabulary with more than this has no token cuts.
        if added.len() <= ADDED_TOKENS_MAX {
            let contents: Vec<&str> = added.iter().map(|t| t.content.as_str()).collect();
            cuts.tokens.retain(|token| !contents.iter().any(|other| can_swallow(other, token)));
        } else {
            cuts.tokens.clear();
        }
        cuts.index();
        let splits_words = |text: &str| text.contains(' ');
        let byte_level = self.is_byte_level();
        let merged_whole =
            matches!(self.inner.get_model(), PipelineModel::BPE(_)) && joins.spelled_spaces && !joins.words;
        cuts.words = (byte_level || merged_whole)
            && !added.iter().any(|t| {
                splits_words(&t.content) || t.lstrip || (t.rstrip && t.content.ends_with(char::is_alphanumeric))
            });
        // An added token could reach across these.
        cuts.digits = byte_level && !added.iter().any(|t| t.single_word || is_joined(&t.content));
        let han = |c: char| ('\u{4E00}'..='\u{9FFF}').contains(&c);
        cuts.ideographs = (byte_level && !added.iter().any(|t| t.content.contains(han))).then_some(joins);
        let mut tried = Tokenizer { inner: self.inner.clone(), cuts };
        if !tried.holds_on_corpus(true) {
            tried.cuts.ideographs = None;
            tried.cuts.digits = false;
        }
        if !tried.holds_on_corpus(true) {
            tried.cuts.words = false;
            if !tried.holds_on_corpus(false) {
                return Cuts::default();
            }
        }
        tried.cuts
    }

    /// Byte-level BPE with no normalizer but NFC and a split pattern of a known family (GPT-2, Qwen, Llama 3, o200k,
    /// DeepSeek). In all of these a single space between a visible character and a letter begins a pre-token, whatever
    /// stands before it, and no pattern looks behind.
    fn is_byte_level(&self) -> bool {
        matches!(self.inner.get_model(), PipelineModel::BPE(model) if model.is_byte_level())
            && self.inner.get_normalizers().iter().all(|n| matches!(n, PipelineNormalizer::NFC(_)))
            && is_known_family(self.inner.get_pre_tokenizer())
    }

    /// Whether small pieces of the corpus give the ids of the whole.
    fn holds_on_corpus(&self, words: bool) -> bool {
        let mut text = CORPUS.to_owned();
        let tokens: Vec<&str> = self.cuts.tokens.iter().map(|t| &**t).take(64).collect();
        for (n, line) in CORPUS.lines().enumerate() {
            for token in tokens.iter().skip(n % 8).step_by(8) {
                text.push_str(line.get(..line.len() / 2).unwrap_or(line));
                text.push_str(token);
                text.push_str(if n % 2 == 0 { " and" } else { "\n" });
            }
        }
        if !words && tokens.is_empty() {
            return true;
        }
        [1, 7, 40, 200].iter().all(|&wanted| self.same_in_pieces(&text, wanted))
    }

    fn same_in_pieces(&self, text: &str, wanted: usize) -> bool {
        let (mut scratch, mut whole, mut pieces) = (Vec::new(), Vec::new(), Vec::new());
        let mut rest = text;
        while !rest.is_empty() {
            let length = self.piece(rest, wanted);
            if self.encode(&rest[..length], &mut scratch, &mut pieces).is_err() {
                return false;
            }
            rest = &rest[length..];
        }
        self.encode(text, &mut scratch, &mut whole).is_ok() && whole == pieces
    }
}

/// Added tokens beyond which no cuts at them are looked for.
const ADDED_TOKENS_MAX: usize = 8192;

impl Cuts {
    fn index(&mut self) {
        self.lengths = self.tokens.iter().map(|t| t.len()).collect::<HashSet<_>>().into_iter().collect();
        self.lengths.sort_unstable_by(|a, b| b.cmp(a));
        self.first = [0; 4];
        for token in &self.tokens {
            let byte = token.as_bytes()[0];
            self.first[usize::from(byte / 64)] |= 1 << (byte % 64);
        }
    }

    fn may_begin(&self, byte: u8) -> bool {
        self.first[usize::from(byte / 64)] & (1 << (byte % 64)) != 0
    }

    fn token_at(&self, text: &str, at: usize) -> bool {
        text.is_char_boundary(at)
            && self
                .lengths
                .iter()
                .any(|length| text.get(at..at + length).is_some_and(|part| self.tokens.contains(part)))
    }
}

/// Whether a match of `other` could cover the begin of `token`, so that a cut there would break it.
fn can_swallow(other: &str, token: &str) -> bool {
    if other != token && other.find(token).is_some_and(|place| place > 0) {
        return true;
    }
    other
        .char_indices()
        .skip(1)
        .any(|(at, _)| token.starts_with(&other[at..]) && (other != token || other.len() - at < token.len()))
}

/// Whether a digit follows a Latin letter somewhere.
fn is_joined(text: &str) -> bool {
    text.as_bytes().windows(2).any(|pair| pair[0].is_ascii_alphabetic() && pair[1].is_ascii_digit())
}

/// Whether a visible character that cannot join a following space ends before the byte.
pub(super) fn is_word_end(text: &str, at: usize) -> bool {
    text[..at]
        .chars()
        .next_back()
        .is_some_and(|c| c.is_alphanumeric() || matches!(c, '.' | ',' | ';' | ':' | '!' | '?' | ')'))
}

/// A regular expression of a known family, alone or followed by members that split nothing; or DeepSeek's three.
fn is_known_family(pre_tokenizer: &PipelinePreTokenizer) -> bool {
    let known = |member: &PipelinePreTokenizer| {
        matches!(member, PipelinePreTokenizer::Split(split)
            if split.grammar().is_some() && split.behavior == SplitDelimiterBehavior::Isolated && !split.invert)
    };
    match pre_tokenizer {
        PipelinePreTokenizer::Sequence(sequence) => match sequence.pre_tokenizers() {
            [first, rest @ ..] if known(first) => rest.iter().all(|m| matches!(m, PipelinePreTokenizer::None)),
            members => sequence.is_deepseek() && members[3..].iter().all(|m| matches!(m, PipelinePreTokenizer::None)),
        },
        member => known(member),
    }
}

/// Text on which cuts are tried: words, code, numbers, other scripts, blanks of every kind.
const CORPUS: &str = "The gateway reads a prompt, cuts it where nothing can reach across, and hashes what it finds. It's the\n\
    engine's tokens that count: we've 12 rules, 1,234 cases and 3.14159 reasons; don't DON'T they'LL I'd he's.\n\
    fn main() {\n    let mut total = 0u64;\n\tfor (i, x) in items.iter().enumerate() { total += x[i] as u64; }\n}\n\n\n\
    def f(x: int) -> str:\r\n        return f\"{x!r:>10}\"  # two  spaces   three    four\n \n  \n\t\n word\n word . word , word\n\
    naïve café Ærøskøbing straße ǅ ŉ İstanbul ΑΒΓ αβγ Привет мир добрый день שלום עולם مرحبا بالعالم नमस्ते दुनिया\n\
    你好，世界！今天天气 very 好 ok 日本語の テキスト と mixed words 한국어 텍스트 입니다 and more ไทย คำ a\n\
    e\u{301} a\u{30a} x\u{301}\u{323} y o\u{308} b \u{a0} nbsp\u{a0}word \u{3000}wide \u{200b}zero \u{2003}em x\u{200d}y z\n\
    😀 smile 👩\u{200d}👩\u{200d}👧 family ☕\u{fe0f} cup 🇫🇷 flag 👍🏽 thumb a😀b c😀 d 😀 e\n\
    camelCase SNAKE_CASE kebab-case https://example.org/a?b=1&c=2#d user@example.org A b C d 1 a 2b c3 d4e\n\
    <|not_a_token|> <tag attr='v'>text</tag> [INST] x [/INST] {\"k\": [1, 2.5, null]} a=b c!=d e<=f g->h i::j\n\
    iiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiii                                         x ................ y -------- z\n";

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
pub(super) mod tests;
