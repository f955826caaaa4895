use std::collections::HashMap;

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::*;
use crate::prompt::outside_data::{self, Random};

pub(in crate::prompt) const SLUGS: [&str; 7] = [
    "Qwen__Qwen3-0.6B",
    "meta-llama__Llama-3-8B",
    "meta-llama__Llama-3.1-8B-Instruct",
    "deepseek-ai__DeepSeek-V3",
    "openai__gpt-oss-20b",
    "google__gemma-3-4b-it",
    "qwen3-mini-8k",
];

/// Some of the added tokens that texts are cut at.
pub(in crate::prompt) fn cut_tokens(tokenizer: &Tokenizer) -> Vec<String> {
    let mut tokens: Vec<String> = tokenizer.cuts.tokens.iter().map(|t| t.to_string()).collect();
    // The set has no order, and a seed must repeat a run.
    tokens.sort_unstable();
    tokens.truncate(60);
    tokens
}

fn load(test: &str, slug: &str) -> Option<Tokenizer> {
    let dir = outside_data::tokenizer(test, slug)?;
    Some(Tokenizer::from_json(&std::fs::read_to_string(dir.join("tokenizer.json")).unwrap()).unwrap())
}

fn ids(tokenizer: &Tokenizer, text: &str, special: bool) -> Vec<u32> {
    let mut out: Vec<u32> = if special { tokenizer.prefix().collect() } else { Vec::new() };
    tokenizer.encode(text, &mut Vec::new(), &mut out).unwrap();
    if special {
        out.extend(tokenizer.suffix());
    }
    out
}

/// The ids of a vector: given whole, or by count, hash and both ends.
fn assert_ids(got: &[u32], expected: &Value, what: &str) {
    if let Some(ids) = expected["ids"].as_array() {
        let ids: Vec<u64> = ids.iter().filter_map(Value::as_u64).collect();
        assert_eq!(got.iter().map(|&id| u64::from(id)).collect::<Vec<_>>(), ids, "{what}");
        return;
    }
    assert_eq!(got.len() as u64, expected["n"].as_u64().unwrap(), "{what}");
    let bytes: Vec<u8> = got.iter().flat_map(|id| id.to_le_bytes()).collect();
    let digest: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(digest, expected["sha256"].as_str().unwrap(), "{what}");
}

#[test]
fn ids_are_those_of_the_reference() {
    let test = "ids_are_those_of_the_reference";
    let Some(path) = outside_data::shared(test, "vectors/tokenize.json") else { return };
    let vectors: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    for (slug, model) in vectors["models"].as_object().unwrap() {
        let Some(tokenizer) = load(test, slug) else { continue };
        let mut checked = 0;
        for case in model["cases"].as_array().unwrap() {
            let place = usize::try_from(case["s"].as_u64().unwrap()).unwrap();
            let text = match &vectors["strings"][place] {
                Value::String(text) => text.clone(),
                unit => unit[0].as_str().unwrap().repeat(usize::try_from(unit[1].as_u64().unwrap()).unwrap()),
            };
            let with = &case["with_special"];
            let without = if case["without_special"].is_null() { with } else { &case["without_special"] };
            assert_ids(&ids(&tokenizer, &text, true), with, &format!("{slug} string {place} with special tokens"));
            assert_ids(&ids(&tokenizer, &text, false), without, &format!("{slug} string {place}"));
            checked += 2;
        }
        for prompt in model["rendered_prompts"].as_array().unwrap() {
            let got = ids(&tokenizer, prompt["text"].as_str().unwrap(), false);
            assert_ids(&got, &prompt["without_special"], &format!("{slug} {}", prompt["prompt"]));
            checked += 1;
        }
        eprintln!("{slug}: {checked} encodings equal");
    }
}

#[test]
fn a_damaged_file_is_an_error() {
    for text in ["", "{}", "null", "[1]", r#"{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}"#] {
        assert!(Tokenizer::from_json(text).is_err(), "{text}");
    }
    let Some(path) = outside_data::tokenizer("a_damaged_file_is_an_error", "qwen3-mini-8k") else { return };
    let good = std::fs::read_to_string(path.join("tokenizer.json")).unwrap();
    for part in 1..40 {
        let end = (1..=good.len() * part / 40).rev().find(|&n| good.is_char_boundary(n)).unwrap();
        assert!(Tokenizer::from_json(&good[..end]).is_err());
    }
    // A byte changed anywhere may leave a valid file; it must never end the process.
    for part in 1..20 {
        let mut bytes = good.clone().into_bytes();
        let place = bytes.len() * part / 20;
        bytes[place] = b'}';
        if let Ok(text) = String::from_utf8(bytes) {
            let _ = Tokenizer::from_json(&text);
        }
    }
}

#[test]
fn tokens_that_overlap_are_never_cut_at() {
    for (other, token, swallows) in [
        ("<|im_end|>", "<|im_start|>", false),
        ("<|im_start|>", "<|im_start|>", false),
        ("x<|a|>", "<|a|>", true),
        ("x<|", "<|a|>", true),
        ("<|a|>y", "<|a|>", false),
        ("<<", "<<", true),
        // Its end covers the begin of a second `<|a|>`.
        ("<|a|><|", "<|a|>", true),
    ] {
        assert_eq!(can_swallow(other, token), swallows, "{other} over {token}");
    }
}

fn random_text(random: &mut Random, specials: &[&str]) -> String {
    const BITS: [&str; 46] = [
        " ",
        " ",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        " \n",
        "a",
        "b",
        "the",
        "Word",
        "don't",
        "I'LL",
        "'s",
        "s",
        "é",
        "e\u{301}",
        "\u{301}",
        "ß",
        "ǅ",
        "мир",
        "你好",
        "，",
        "日本",
        "ひ",
        "한국",
        "नमस्ते",
        "\u{94d}",
        "😀",
        "\u{200d}",
        "\u{a0}",
        "\u{3000}",
        "\u{200b}",
        "1",
        "123",
        "4567",
        ".",
        ",",
        "!",
        "...",
        "(",
        ")",
        "_",
        "<|",
    ];
    let mut text = String::new();
    for _ in 0..random.below(120) {
        match random.below(10) {
            0 if !specials.is_empty() => text.push_str(specials[random.below(specials.len())]),
            1..=4 => {
                let start = random.below(CORPUS.len());
                let start = (start..=CORPUS.len()).find(|&n| CORPUS.is_char_boundary(n)).unwrap_or(0);
                text.extend(CORPUS[start..].chars().take(1 + random.below(12)));
            }
            5 => text.extend(
                (0..random.below(30))
                    .filter_map(|_| char::from_u32(0x4E00 + u32::try_from(random.below(3000)).unwrap())),
            ),
            6 => text.extend((0..random.below(40)).map(|_| char::from(b"aZb0c1X9"[random.below(8)]))),
            _ => text.push_str(BITS[random.below(BITS.len())]),
        }
    }
    text
}

#[test]
fn pieces_give_the_ids_of_the_whole() {
    let test = "pieces_give_the_ids_of_the_whole";
    let rounds = std::env::var("KVLANE_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(400);
    let seed = std::env::var("KVLANE_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(0x9E37_79B9_7F4A_7C15);
    eprintln!("seed {seed}, {rounds} texts a tokenizer");
    for slug in SLUGS {
        let Some(tokenizer) = load(test, slug) else { continue };
        let mut random = Random(seed);
        let specials: Vec<&str> = tokenizer.cuts.tokens.iter().map(|t| &**t).take(40).collect();
        let mut pieces = HashMap::new();
        for round in 0..rounds {
            let text = random_text(&mut random, &specials);
            let wanted = 1 + random.below(64);
            assert!(tokenizer.same_in_pieces(&text, wanted), "{slug} round {round} wanted {wanted}: {text:?}");
            *pieces.entry(tokenizer.piece(&text, wanted) < text.len()).or_insert(0) += 1;
        }
        eprintln!(
            "{slug}: words {}, tokens {}, cut or not {pieces:?}",
            tokenizer.cuts.words,
            tokenizer.cuts.tokens.len()
        );
        assert!(pieces.get(&true).copied().unwrap_or(0) > rounds / 10, "{slug}: hardly anything was cut");
    }
}
