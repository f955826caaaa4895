use clap::Parser;
use serde_json::Value;

use super::*;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    args: HashArgs,
}

fn hash(options: &str, input: &[u8]) -> Result<String, String> {
    let words = std::iter::once("hash").chain(options.split_whitespace());
    let command = Command::try_parse_from(words).map_err(|error| error.to_string())?;
    let mut output = Vec::new();
    run(&command.args, input, &mut output).map_err(|error| {
        assert!(output.is_empty(), "an error prints nothing else");
        error.to_string()
    })?;
    Ok(String::from_utf8(output).expect("text"))
}

/// Tokens `1..=last` as JSON.
fn tokens(last: u32) -> Vec<u8> {
    serde_json::to_vec(&(1..=last).collect::<Vec<u32>>()).expect("JSON")
}

#[test]
fn one_line_per_full_block_in_decimal_and_hexadecimal() {
    let vllm = "--engine vllm --algo sha256_cbor --seed 0 --block-size 16";
    // Vector sha256_cbor-seed0-bs16-1blk.
    assert_eq!(hash(vllm, &tokens(16)), Ok("3236607068019569386 2ceabcfae6d332ea\n".into()));
    assert_eq!(hash(vllm, &tokens(31)), hash(vllm, &tokens(16)), "a tail has no key");
    assert_eq!(hash(vllm, &tokens(15)), Ok(String::new()));
    assert_eq!(hash(vllm, b"[]"), Ok(String::new()));
    // Published for SGLang's form, which is also ours for TensorRT-LLM.
    let lines = "8635429971592222890 77d735ce838418aa\n\
                 1256577331724852459 1170426cf2449ceb\n\
                 5689809685380680247 4ef643c350b14a37\n";
    assert_eq!(hash("--engine sglang --block-size 16", &tokens(48)), Ok(lines.into()));
    assert_eq!(hash("--engine trtllm --block-size 16", &tokens(48)), Ok(lines.into()));
}

#[test]
fn leading_zeros_of_a_key_are_printed() {
    // Vector v1_upstream_constants_tpb4_partial_tail.
    let line = hash("--engine trtllm --algo v1_block_key --block-size 4", b" [1, 2,\n3, 4, 5, 6] ");
    assert_eq!(line, Ok("924206229973855 0003488f88096b5f\n".into()));
}

#[test]
fn json_carries_keys_as_text_since_they_exceed_what_readers_keep() {
    let text = hash("--engine vllm --seed 0 --block-size 16 --json", &tokens(20)).expect("keys");
    let answer: Value = serde_json::from_str(&text).expect("JSON");
    let expected = serde_json::json!({
        "algo": "sha256_cbor",
        "block_size": 16,
        "tokens": 20,
        "keys": [{"u64": "3236607068019569386", "hex": "2ceabcfae6d332ea"}],
    });
    assert_eq!(answer, expected);
}

/// Each vector that the options can say, through the command: the options reach the contract.
#[test]
fn options_give_the_keys_of_the_vectors() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/vllm_hash.json");
    let text = std::fs::read_to_string(path).expect("the vectors are part of the repository");
    let file: Value = serde_json::from_str(&text).expect("JSON");
    let mut checked = 0;
    for case in file["cases"].as_array().expect("cases") {
        let text = |value: &Value| value.as_str().expect("text").to_owned();
        let (Some(blocks), None, None) =
            (case["blocks"].as_array(), case.get("mm"), case.get("prompt_embeds_rows_hex"))
        else {
            continue;
        };
        let release = text(case["identical_in_releases"].as_array().expect("releases").last().expect("one"));
        let mut options = format!("--engine vllm --engine-version {release} --algo {}", text(&case["algo"]));
        options += &format!(" --block-size {}", case["block_size"]);
        match case["pythonhashseed"].as_str() {
            Some("") => continue, // An empty word does not survive this test's splitting.
            Some(seed) => options += &format!(" --seed {seed}"),
            None => {}
        }
        if let Some(lora) = case.get("lora") {
            options += &format!(" --lora {}={}", text(&lora["name"]), text(&lora["path"]));
            options += &format!(" --lora-id {}", lora["int_id"]);
        }
        if let Some(salt) = case.get("cache_salt") {
            options += &format!(" --salt {}", text(salt));
        }
        if let Some(lookahead) = case.get("lookahead_tokens") {
            options += &format!(" --lookahead {lookahead}");
        }
        let lines: String = blocks
            .iter()
            .map(|block| format!("{} {}\n", text(&block["event_key_u64"]), text(&block["event_key_hex"])))
            .collect();
        let input = serde_json::to_vec(&case["token_ids"]).expect("JSON");
        assert_eq!(hash(&options, &input), Ok(lines), "{}: {options}", case["id"]);
        checked += 1;
    }
    assert_eq!(checked, CHECKED, "a filter that lost cases would pass in silence");
}

/// Of the 104 cases with blocks, 21 have images, 6 embeddings and 4 the empty seed.
const CHECKED: usize = 73;

#[test]
fn what_cannot_be_keyed_is_refused_with_what_to_do() {
    let refused = |options: &str, expected: &str| {
        let error = hash(options, &tokens(16)).expect_err(options);
        assert!(error.contains(expected), "{options}: {error}");
    };
    let vllm = "--engine vllm --block-size 16";
    refused(&format!("{vllm} --algo sha256_sglang"), "it has sha256, sha256_cbor");
    refused(&format!("{vllm} --algo sha256_cbor_64bit"), "vLLM 0.33.0 has no such algorithm");
    refused(&format!("{vllm} --algo xxhash_cbor"), "random seed for xxhash_cbor");
    refused(&format!("{vllm} --engine-version 0.28.0"), "random seed for sha256_cbor");
    refused(&format!("{vllm} --engine-version 0.32.0 --lookahead 1"), "since 0.33.0");
    refused(&format!("{vllm} --engine-version newest"), "expected a version");
    refused(&format!("{vllm} --lora sql"), "/v1/models");
    refused(&format!("{vllm} --lora =/sql"), "NAME=PATH");
    refused(&format!("{vllm} --lora-id 1"), "--lora");
    refused(&format!("{vllm} --bigrams"), "--bigrams: vLLM has no such thing");
    refused(&format!("{vllm} --extra-key a"), "--extra-key");
    refused("--engine vllm --block-size 0", "block-size");
    refused("--engine vllm", "block-size");
    refused("--engine llamacpp --block-size 16", "engine");
    let sglang = "--engine sglang --block-size 16";
    refused(&format!("{sglang} --seed 0"), "--seed: SGLang");
    refused(&format!("{sglang} --algo sha256"), "it has sha256_sglang");
    refused(&format!("{sglang} --engine-version 0.5.5.post3"), "upgrade");
    refused(&format!("{sglang} --lora sql"), "private");
    let trtllm = "--engine trtllm --block-size 16";
    refused(&format!("{trtllm} --algo sha256_cbor"), "it has blockhash_trtllm and v1_block_key");
    refused(&format!("{trtllm} --engine-version 1.2.0"), "--engine-version");
    refused(&format!("{trtllm} --algo v1_block_key --lora sql"), "integer id");
}

#[test]
fn sglangs_options_reach_its_contract() {
    // Vectors of SGLang: salt_p16_two_pages, dynamo_a_bc, eagle_p4_router_golden.
    let page: Vec<u32> = (0..16).collect();
    let page = serde_json::to_vec(&page).expect("JSON");
    let decimal = |options: &str, input: &[u8]| {
        let lines = hash(options, input).expect("keys");
        lines.lines().map(|line| line.split_once(' ').expect("two columns").0.to_owned()).collect::<Vec<_>>()
    };
    let sglang = "--engine sglang --block-size 16";
    assert_eq!(decimal(&format!("{sglang} --salt tenant-a"), &page), ["3748403516937365244"]);
    assert_eq!(decimal(&format!("{sglang} --salt tenant-a --engine-version 0.5.17"), &page), ["6738917275443968386"]);
    assert_eq!(decimal(&format!("{sglang} --dynamo --extra-key a --salt bc"), &page), ["211620326378743566"]);
    let eagle = decimal("--engine sglang --block-size 4 --bigrams", b"[5, 6, 7, 8, 9, 10, 11, 12, 13]");
    assert_eq!(eagle, ["15546175558935562053", "18124308477428892704"]);
}

#[test]
fn input_that_is_no_list_of_tokens_is_refused_with_its_place() {
    let refused = |input: &[u8], expected: &str| {
        let error = hash("--engine vllm --block-size 1", input).expect_err("refused");
        assert!(error.starts_with("standard input: ") && error.contains(expected), "{error}");
        assert!(error.contains("JSON array of token ids"), "{error}");
    };
    refused(b"", "EOF");
    refused(b"[1, -1]", "`-1`");
    refused(b"[1, 4294967296]", "column 14");
    refused(b"[1.5]", "1.5");
    refused(b"{\"tokens\": []}", "map");
    refused(b"[1] [2]", "trailing");
    refused(b"[\xff]", "line 1");
}

#[test]
fn input_beyond_the_limit_is_refused() {
    let command = Command::try_parse_from(["hash", "--engine", "vllm", "--block-size", "1"]).expect("options");
    let refused = run(&command.args, std::io::repeat(b' '), Vec::new());
    assert!(matches!(refused, Err(HashError::TooLong)), "{refused:?}");
}
