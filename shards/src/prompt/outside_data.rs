//! Where tests find data that is not in the repository, and how they say that it is absent.

use std::path::{Path, PathBuf};

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_path_buf).unwrap_or_default()
}

fn present(test: &str, path: PathBuf, remedy: &str) -> Option<PathBuf> {
    if path.exists() {
        return Some(path);
    }
    assert!(std::env::var_os("CI").is_none(), "{test}: {} is missing: {remedy}", path.display());
    eprintln!("skipped: {test}: {} is missing: {remedy}", path.display());
    None
}

/// A file of the shared material (`KVLANE_SHARED`, else `../shared` beside the workspace).
pub(crate) fn shared(test: &str, file: &str) -> Option<PathBuf> {
    let root = std::env::var_os("KVLANE_SHARED").map_or_else(|| workspace().join("../shared"), PathBuf::from);
    present(test, root.join(file), "set KVLANE_SHARED to the directory of the shared material")
}

/// The directory of a real tokenizer (`KVLANE_TOKENIZERS`, else `target/tokenizers`); the small one is shared material.
pub(crate) fn tokenizer(test: &str, slug: &str) -> Option<PathBuf> {
    if slug == "qwen3-mini-8k" {
        return shared(test, "data/tokenizers/qwen3-mini-8k");
    }
    let root =
        std::env::var_os("KVLANE_TOKENIZERS").map_or_else(|| workspace().join("target/tokenizers"), PathBuf::from);
    present(test, root.join(slug), "get it with shared/tools/get-tokenizers.sh, set KVLANE_TOKENIZERS")
}

/// A small generator so that a run can be repeated by its seed.
pub(crate) struct Random(pub u64);

impl Random {
    /// A number below the bound.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % bound as u64).unwrap()
    }
}

/// Code, several languages, emoji, blanks of every kind, long runs and the literals of special tokens.
pub(crate) fn mixed_text() -> String {
    const BITS: [&str; 14] = [
        "fn main() {\n    let x = 12345;\n\tfor (i, y) in z.iter().enumerate() { x += y[i]; }\n}\n\n\n",
        "The gateway reads a prompt, cuts it where nothing can reach across, and doesn't look back. It's 3.14159! ",
        "<|im_end|>\n<|im_start|>user\n<|eot_id|><end_of_turn><｜User｜><think></think>",
        "你好，世界今天天气很好我们去公园散步然后回家吃饭看书睡觉明天继续工作学习新的知识。",
        "日本語のテキスト、ひらがなとカタカナ。한국어 텍스트 입니다. ไทยคำ नमस्ते दुनिया مرحبا بالعالم Привет мир ",
        "😀👩\u{200d}👩\u{200d}👧 ☕\u{fe0f} 🇫🇷 e\u{301}a\u{30a} x\u{301}\u{323} \u{a0}\u{3000}\u{200b}",
        "                                                                            x\n\n\n\n\n\n\n\n\n\n\n\n\n y",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "VGhlIHF1aWNrIGJyb3duIGZveCBqdW1wcyBvdmVyIHRoZSBsYXp5IGRvZy4gMTIzNDU2Nzg5MCBhYmNkZWZnaGlqa2xtbm9w",
        "{\"k\": [1, 2.5, null], \"s\": \"a\\n\"} a=b c!=d e<=f g->h i::j https://example.org/a?b=1&c=2#d ",
        "Ærøskøbing straße naïve café İstanbul ΑΒΓ αβγ don't DON'T they'LL I'd he's ",
        "\r\n\r\n \t \n  \n word\n word . word , word 1,234 0xdead_beef ",
        "| a | b |\n|---|---|\n| 1 | 2 |\n# Head\n- item\n  - item\n```py\nprint('x')\n```\n",
        "................ -------- ======== ######## ________ //////// ",
    ];
    let mut random = Random(77);
    (0..600).map(|_| BITS[random.below(BITS.len())]).collect()
}
