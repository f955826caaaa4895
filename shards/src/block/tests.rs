use super::*;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn every_vector_of_the_engines_own_code_is_reproduced() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/vllm_hash.json");
    let text = std::fs::read_to_string(path).expect("the vectors are part of the repository");
    let file: serde_json::Value = serde_json::from_str(&text).expect("the vectors are JSON");
    let mut cases = 0;
    let mut blocks_seen = 0;
    for case in file["cases"].as_array().expect("cases") {
        let id = case["id"].as_str().expect("id");
        let algo = match case["algo"].as_str().expect("algo") {
            "sha256_cbor" => HashAlgo::Sha256Cbor,
            "xxhash_cbor" => HashAlgo::XxhashCbor,
            other => panic!("{id}: no contract named {other}"),
        };
        let seed = case["pythonhashseed"].as_str().unwrap_or(FIXED_SEED);
        let none_hash = NoneHash::from_seed(algo, seed);
        assert_eq!(hex(none_hash.as_bytes()), case["none_hash_hex"].as_str().expect("none_hash_hex"), "{id}");

        let tokens: Vec<u32> = case["token_ids"]
            .as_array()
            .expect("token_ids")
            .iter()
            .map(|token| token.as_u64().expect("a token") as u32)
            .collect();
        let size = case["block_size"].as_u64().expect("block_size") as usize;
        let mut chain = Chain::new(algo, &none_hash);
        let expected = case["blocks"].as_array().expect("blocks");
        assert_eq!(tokens.chunks_exact(size).len(), expected.len(), "{id}: only full blocks are hashed");
        for (index, (block, expected)) in tokens.chunks_exact(size).zip(expected).enumerate() {
            let key = chain.push(block);
            assert_eq!(key.0.to_string(), expected["event_key_u64"].as_str().expect("key"), "{id} block {index}");
            assert_eq!(hex(chain.as_bytes()), expected["digest_hex"].as_str().expect("digest"), "{id} block {index}");
            blocks_seen += 1;
        }
        cases += 1;
    }
    assert_eq!((cases, blocks_seen), (25, 73), "a filter that lost cases would pass in silence");
}

#[test]
fn heads_take_their_shortest_form_at_every_edge() {
    let check = |major, argument, expected: &[u8]| {
        let mut out = [0xee; WORD_BYTES];
        let length = put_head(&mut out, major, argument);
        assert_eq!(&out[..length], expected, "argument {argument}");
    };
    check(MAJOR_UNSIGNED, 0, &[0x00]);
    check(MAJOR_UNSIGNED, 23, &[0x17]);
    check(MAJOR_UNSIGNED, 24, &[0x18, 24]);
    check(MAJOR_UNSIGNED, 255, &[0x18, 255]);
    check(MAJOR_UNSIGNED, 256, &[0x19, 1, 0]);
    check(MAJOR_UNSIGNED, 65_535, &[0x19, 255, 255]);
    check(MAJOR_UNSIGNED, 65_536, &[0x1a, 0, 1, 0, 0]);
    check(MAJOR_UNSIGNED, u32::MAX, &[0x1a, 255, 255, 255, 255]);
    check(MAJOR_BYTES, 16, &[0x50]);
    check(MAJOR_BYTES, 32, &[0x58, 0x20]);
    check(MAJOR_ARRAY, 3, &[0x83]);
    check(MAJOR_ARRAY, 784, &[0x99, 0x03, 0x10]);
    check(MAJOR_TEXT, 0, &[0x60]);
}

/// The obvious encoder: grows a vector, one branch per width.
fn preimage_of(parent: &[u8], tokens: &[u32]) -> Vec<u8> {
    fn head(out: &mut Vec<u8>, major: u8, argument: u32) {
        match argument {
            0..24 => out.push(major | argument as u8),
            24..0x100 => out.extend([major | 24, argument as u8]),
            0x100..0x1_0000 => {
                out.push(major | 25);
                out.extend((argument as u16).to_be_bytes());
            }
            _ => {
                out.push(major | 26);
                out.extend(argument.to_be_bytes());
            }
        }
    }
    let mut out = Vec::new();
    head(&mut out, 0x80, 3);
    head(&mut out, 0x40, parent.len() as u32);
    out.extend_from_slice(parent);
    head(&mut out, 0x80, tokens.len() as u32);
    for &token in tokens {
        head(&mut out, 0, token);
    }
    out.push(0xf6);
    out
}

#[test]
fn a_preimage_in_chunks_equals_the_preimage_in_one_piece_for_every_block_size() {
    for algo in [HashAlgo::Sha256Cbor, HashAlgo::XxhashCbor] {
        let none_hash = NoneHash::from_seed(algo, "0");
        for size in (1..400).chain([784, 4_096, 70_000]) {
            // Widths change from token to token, so that chunks end at every offset.
            let tokens: Vec<u32> = (0..size).map(|i: u32| i.wrapping_mul(2_654_435_761) >> (i % 29)).collect();
            let mut chain = Chain::new(algo, &none_hash);
            let _ = chain.push(&tokens);
            let whole = Digest::of(algo, &preimage_of(none_hash.as_bytes(), &tokens));
            assert_eq!(chain.0, whole, "{algo:?}, {size} tokens");
        }
    }
}

#[test]
fn a_seed_is_literal_text() {
    let of = |seed| NoneHash::from_seed(HashAlgo::Sha256Cbor, seed);
    assert_ne!(of("42"), of("042"));
    assert_ne!(of("0"), of(" 0"));
    // Contract §1.5.
    assert_eq!(hex(of(FIXED_SEED).as_bytes()), "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0");
    assert_eq!(hex(NoneHash::from_seed(HashAlgo::XxhashCbor, "1234").as_bytes()), "0fd12ee6a63390842c413be31a6766db");
}

#[test]
#[should_panic(expected = "the rule's algorithm")]
fn an_anchor_of_the_other_algorithm_is_a_bug_that_shows() {
    let _ = Chain::new(HashAlgo::XxhashCbor, &NoneHash::from_seed(HashAlgo::Sha256Cbor, "0"));
}
