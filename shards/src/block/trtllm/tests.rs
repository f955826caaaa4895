use std::num::NonZeroU32;

use serde_json::Value;

use super::*;
use crate::block::vectors::{self, hex, u64_text, unhex};
use crate::block::{Contract, ContractError, KeyStream, Lora, MmItem, PromptExtras};

/// Cases that are no block key that a gateway can make, with the reason.
const LISTED: [(&str, &str); 3] =
    [("disagg_auth_opaque_only", SIGNATURE), ("disagg_auth_endpoint_only", SIGNATURE), ("disagg_auth_both", SIGNATURE)];
const SIGNATURE: &str = "no block key: the signature of a prefill/decode request; rules with such pools are refused";

fn hash32(text: &Value) -> [u8; 32] {
    unhex(text.as_str().expect("hex")).try_into().expect("32 bytes")
}

fn mm_keys(inputs: &Value, block: usize) -> Vec<MmKey> {
    let keys = inputs["mm_keys_by_block"][block.to_string()].as_array().into_iter().flatten();
    keys.map(|key| MmKey {
        hash: hash32(&key["hash"]),
        start_offset: key["start_offset"].as_u64().expect("start_offset"),
    })
    .collect()
}

/// A chain of v1 keys over blocks of the case's size, the last of which may be partial. Returns how many.
fn check_v1(case: &Value, tokens: &[u32]) -> usize {
    let (name, inputs, expected) = (case["name"].as_str().expect("name"), &case["input"], &case["expected"]);
    let size = inputs["tokens_per_block"].as_u64().expect("tokens_per_block") as usize;
    let salt = inputs["cache_salt_id"].is_string().then(|| u64_text(&inputs["cache_salt_id"]));
    if let Some(text) = inputs["cache_salt"].as_str() {
        assert_eq!(Some(salt_id(text)), salt, "{name}: the salt's id");
    }
    let extra_ids: Option<Vec<u64>> =
        inputs["token_extra_ids"].as_array().map(|ids| ids.iter().map(u64_text).collect());
    let hashes = expected["block_hashes"].as_array().expect("block_hashes");
    assert_eq!(tokens.chunks(size).len(), hashes.len(), "{name}");
    let mut parent = 0;
    for (index, block) in tokens.chunks(size).enumerate() {
        let from = index * size;
        let mm = mm_keys(inputs, index);
        let block = V1Block {
            parent,
            tokens: block,
            extra_ids: extra_ids.as_ref().map(|ids| &ids[from..from + block.len()]),
            lora: inputs["lora_task_id"].as_u64(),
            salt,
            mm: &mm,
        };
        parent = block.key();
        assert_eq!(parent, u64_text(&hashes[index]), "{name} block {index}");
        assert_eq!(block.tokens.len() as u64, expected["block_lens"][index].as_u64().expect("length"), "{name}");
    }
    if extra_ids.is_none()
        && inputs.get("mm_keys_by_block").is_none()
        && (salt.is_none() || inputs["cache_salt"].is_string())
    {
        check_stream(case, tokens, size);
    }
    hashes.len()
}

/// A prompt's stream: the full blocks.
fn check_stream(case: &Value, tokens: &[u32], size: usize) {
    let inputs = &case["input"];
    let lora = inputs["lora_task_id"].as_u64().map(|id| Lora { name: "adapter".into(), path: None, id: Some(id) });
    let cache_salt = inputs["cache_salt"].as_str().map(str::to_owned);
    let extras = PromptExtras { lora, cache_salt, ..PromptExtras::default() };
    let block = NonZeroU32::new(size as u32).expect("not 0");
    let mut stream = KeyStream::new(&Contract::TrtllmV1, &extras, block).expect("all is said");
    let mut rest = tokens;
    let keys: Vec<u64> = std::iter::from_fn(|| stream.next_key(&mut rest)).map(|key| key.0).collect();
    let hashes = case["expected"]["block_hashes"].as_array().expect("block_hashes");
    let full: Vec<u64> = hashes[..tokens.len() / size].iter().map(u64_text).collect();
    assert_eq!(keys, full, "{}", case["name"]);
}

fn check_prompt(case: &Value) -> usize {
    let (inputs, expected) = (&case["input"], &case["expected"]);
    let prompt = vectors::tokens(&inputs["prompt_tokens"]);
    let (_, keyed) = prompt.split_last().expect("a prompt has tokens");
    let size = inputs["tokens_per_block"].as_u64().expect("tokens_per_block") as usize;
    assert_eq!((keyed.len() / size) as u64, expected["max_full_blocks"].as_u64().expect("max"), "{}", case["name"]);
    check_v1(case, keyed)
}

/// Salts through the C++ library's hash.
fn check_std(case: &Value) -> usize {
    let salt = case["input"]["cache_salt"].as_str().map(std_salt_id);
    let hashes = case["expected"]["block_hashes"].as_array().expect("block_hashes");
    let tokens = vectors::tokens(&case["input"]["tokens"]);
    let mut parent = 0;
    for (tokens, hash) in tokens.chunks(4).zip(hashes) {
        parent = V1Block { parent, tokens, salt, ..V1Block::default() }.key();
        assert_eq!(parent, u64_text(hash), "{}", case["name"]);
    }
    hashes.len()
}

fn check_v2(case: &Value) -> usize {
    let (name, inputs, expected) = (case["name"].as_str().expect("name"), &case["input"], &case["expected"]);
    let salt = inputs["salt_id"].is_string().then(|| u64_text(&inputs["salt_id"]));
    if let Some(text) = inputs["cache_salt"].as_str() {
        assert_eq!(Some(salt_id(text)), salt, "{name}: the salt's id");
    }
    let tokens: Vec<V2Token> = inputs["tokens"].as_array().expect("tokens").iter().map(v2_token).collect();
    let size = inputs["tokens_per_block"].as_u64().expect("tokens_per_block") as usize;
    let mut chain = v2_root(inputs["lora_id"].as_u64(), salt);
    assert_eq!(hex(chain.as_bytes()), expected["root_key_hex"].as_str().expect("root_key_hex"), "{name}");
    for (index, block) in tokens.chunks(size).enumerate() {
        let mut plain = chain;
        let key = v2_push(&mut chain, block);
        assert_eq!(hex(chain.as_bytes()), expected["block_hashes_hex"][index].as_str().expect("hex"), "{name}");
        assert_eq!(key.0, u64_text(&expected["v2_sha256_64"][index]), "{name} block {index}");
        let signed = expected["streaming_signed_i64"][index].as_str().expect("signed");
        assert_eq!((key.0 as i64).to_string(), signed, "{name} block {index}: the same bits, signed");
        let ids: Option<Vec<u32>> = block
            .iter()
            .map(|token| match token {
                V2Token::Id(id) => Some(*id),
                V2Token::Digest(_) => None,
            })
            .collect();
        if let Some(ids) = ids {
            assert_eq!((plain.push(&ids), plain), (key, chain), "{name}: of plain tokens, the page chain's");
        }
    }
    let blocks = expected["block_hashes_hex"].as_array().expect("block_hashes_hex").len();
    assert_eq!(tokens.chunks(size).len(), blocks, "{name}");
    blocks
}

fn v2_token(value: &Value) -> V2Token {
    match value.as_u64() {
        Some(id) => V2Token::Id(id as u32),
        None => V2Token::Digest(hash32(value)),
    }
}

#[test]
fn every_vector_is_reproduced_or_listed() {
    let file = vectors::load("trtllm_hash.json");
    let cases = file.as_array().expect("cases");
    let (mut v1, mut prompts, mut v2, mut std) = ((0, 0), (0, 0), (0, 0), (0, 0));
    let mut listed = Vec::new();
    for case in cases {
        match case["algo"].as_str().expect("algo") {
            "v1_block_key" => v1 = (v1.0 + 1, v1.1 + check_v1(case, &vectors::tokens(&case["input"]["tokens"]))),
            "v1_block_key_prompt" => prompts = (prompts.0 + 1, prompts.1 + check_prompt(case)),
            "v1_block_key_std_hash_salt" => std = (std.0 + 1, std.1 + check_std(case)),
            "v2_sha256" => v2 = (v2.0 + 1, v2.1 + check_v2(case)),
            _ => listed.push(case["name"].as_str().expect("name")),
        }
    }
    assert_eq!(listed, LISTED.map(|(name, _)| name), "exactly the cases listed are left out");
    assert_eq!((v1, prompts, v2, std), ((29, 59), (8, 14), (9, 14), (2, 4)));
    assert_eq!(cases.len(), 51, "the file lost cases, or grew");
}

#[test]
fn the_gateways_own_keys_are_the_chain_of_tokens() {
    let tokens: Vec<u32> = (1..=50).collect();
    let block = NonZeroU32::new(16).expect("not 0");
    let mut stream = KeyStream::new(&Contract::TrtllmTokens, &PromptExtras::default(), block).expect("plain");
    let mut rest = &tokens[..];
    let keys: Vec<u64> = std::iter::from_fn(|| stream.next_key(&mut rest)).map(|key| key.0).collect();
    // Published for this form of key: reference notes §5.5.
    assert_eq!(keys, [8_635_429_971_592_222_890, 1_256_577_331_724_852_459, 5_689_809_685_380_680_247]);
    assert_eq!(stream.tail_tokens(), 2);
}

#[test]
fn prompts_that_tokens_and_a_salt_do_not_key_are_refused() {
    let block = NonZeroU32::new(4).expect("not 0");
    let refused = |contract: Contract, extras: PromptExtras| KeyStream::new(&contract, &extras, block).err();
    let lora = || Some(Lora { name: "sql".into(), path: None, id: None });
    let salt = || Some("s".to_owned());
    let plain = PromptExtras::default;
    let unkeyed = |what| Some(ContractError::Unkeyed { what });
    let tokens = Contract::TrtllmTokens;
    assert_eq!(refused(tokens, PromptExtras { lora: lora(), ..plain() }), unkeyed("LoRA adapter"));
    assert_eq!(refused(tokens, PromptExtras { cache_salt: salt(), ..plain() }), None);
    assert_eq!(refused(tokens, PromptExtras { cache_salt: Some(String::new()), ..plain() }), None);
    let v1 = Contract::TrtllmV1;
    let id_missing = Some(ContractError::LoraId { name: "sql".into() });
    assert_eq!(refused(v1, PromptExtras { lora: lora(), ..plain() }), id_missing);
    let item = MmItem { identifier: "a".into(), offset: 0, length: 1 };
    assert_eq!(refused(v1, PromptExtras { mm: vec![item], ..plain() }), unkeyed("multimodal items"));
    assert_eq!(refused(v1, PromptExtras { extra_key: salt(), ..plain() }), unkeyed("extra_key"));
    assert_eq!(refused(v1, PromptExtras { cache_salt: salt(), ..plain() }), None);
}
