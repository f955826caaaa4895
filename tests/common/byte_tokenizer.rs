//! A tokenizer whose ids can be written by hand.

use serde_json::{Value, json};

/// A tokenizer without merges: an id per byte, some special tokens, and a BOS before texts.
pub fn tokenizer() -> String {
    let mut vocabulary = serde_json::Map::new();
    let mut spare = 256;
    for byte in 0..=255u32 {
        // How byte-level tokenizers spell bytes: printable ones as themselves, the others beyond U+0100.
        let plain = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let spelled = if plain { byte } else { spare };
        spare += u32::from(!plain);
        let spelled = char::from_u32(spelled).expect("a character");
        vocabulary.insert(spelled.to_string(), json!(byte));
    }
    let added = ["<s>", "<|im_start|>", "<|im_end|>", "<|image|>"];
    let added: Vec<Value> = added.iter().enumerate().map(|(n, text)| added_token(256 + n, text)).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}}
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary, "merges": []
        }
    })
    .to_string()
}

fn added_token(id: usize, text: &str) -> Value {
    json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
           "special": true})
}
