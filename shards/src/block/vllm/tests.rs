use std::num::NonZeroU32;

use serde_json::Value;

use super::*;
use crate::block::vectors::{self, hex, unhex};
use crate::block::{Contract, EmbedRows, HashAlgo, KeyStream, Lora, MmItem, PromptExtras};

const CASES: usize = 107;

fn algorithm(case: &Value) -> Algorithm {
    Algorithm::parse(case["algo"].as_str().expect("algo")).expect("an algorithm of vLLM")
}

fn none_hash(case: &Value) -> NoneHash {
    let newest = Release::new(0, 33, 0);
    NoneHash::of_engine(algorithm(case), case["pythonhashseed"].as_str(), newest).expect("no vector has a random seed")
}

/// Releases whose own code made the case; for the cases without that list, the one in its source.
fn releases(case: &Value) -> Vec<Release> {
    let named = case["source"].as_str().expect("source").split_whitespace().nth(1).expect("vllm RELEASE");
    match case["identical_in_releases"].as_array() {
        Some(list) => {
            list.iter().map(|release| Release::parse(release.as_str().expect("text")).expect("one")).collect()
        }
        None => vec![Release::parse(named).expect("a release")],
    }
}

fn prompt_extras(case: &Value) -> PromptExtras {
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let number = |value: &Value| value.as_u64().expect("a number");
    PromptExtras {
        lora: case.get("lora").map(|lora| Lora {
            name: text(&lora["name"]),
            path: Some(text(&lora["path"])),
            id: Some(number(&lora["int_id"])),
        }),
        cache_salt: case.get("cache_salt").map(text),
        mm: case.get("mm").and_then(Value::as_array).into_iter().flatten().map(mm_item).collect(),
        embeds: case.get("prompt_embeds_rows_hex").map(|rows| {
            let rows: Vec<_> = rows.as_array().expect("rows").iter().map(|row| unhex(&text(row))).collect();
            EmbedRows { row_bytes: rows[0].len(), bytes: rows.concat() }
        }),
        extra_key: None,
    }
}

fn mm_item(item: &Value) -> MmItem {
    let number = |name: &str| u32::try_from(item[name].as_u64().expect("a number")).expect("a u32");
    MmItem {
        identifier: item["identifier"].as_str().expect("identifier").to_owned(),
        offset: number("offset"),
        length: number("length"),
    }
}

/// Every block of a case by the chain and by the stream, under one form of extra keys. Returns how many.
fn check_blocks(case: &Value, tagging: Tagging) -> usize {
    let id = case["id"].as_str().expect("id");
    let tokens = vectors::tokens(&case["token_ids"]);
    let size = case["block_size"].as_u64().expect("block_size") as usize;
    let ahead = case["lookahead_tokens"].as_u64().unwrap_or(0) as usize;
    let expected = case["blocks"].as_array().expect("blocks");
    let keyed = tokens.len().saturating_sub(ahead) / size;
    assert_eq!(keyed, expected.len(), "{id}: only full blocks are hashed, and only once their lookahead is there");

    let anchor = none_hash(case);
    let extras = Extras::new(tagging, &prompt_extras(case)).expect("the vector says all that is hashed");
    let mut chain = Chain::new(algorithm(case), &anchor);
    let mut preimage = Vec::new();
    let contract = Contract::Vllm { none_hash: anchor, tagging, lookahead: ahead as u8 };
    let block = NonZeroU32::new(size as u32).expect("a block has tokens");
    let mut stream = KeyStream::new(&contract, &prompt_extras(case), block).expect("as above");
    let mut rest = &tokens[..];
    for (index, expected) in expected.iter().enumerate() {
        let (start, end) = (index * size, (index + 1) * size);
        let keys = extras.keys(start as u64, (end + ahead) as u64);
        let extras = BlockExtras { tagging, keys: &keys, lookahead: &tokens[end..end + ahead] };
        let mut plain = chain;
        let key = chain.push_with(&tokens[start..end], &extras, &mut preimage);
        assert_eq!(hex(&preimage), expected["preimage_hex"].as_str().expect("preimage"), "{id} block {index}");
        assert_eq!(hex(chain.as_bytes()), expected["digest_hex"].as_str().expect("digest"), "{id} block {index}");
        assert_eq!(key.0.to_string(), expected["event_key_u64"].as_str().expect("key"), "{id} block {index}");
        assert_eq!(stream.next_key(&mut rest), Some(key), "{id} block {index}: the stream makes the same key");
        if extras.is_none() {
            assert_eq!(plain.push(&tokens[start..end]), key, "{id} block {index}: the short way makes the same key");
            assert_eq!(plain, chain, "{id} block {index}");
        }
    }
    assert_eq!(stream.next_key(&mut rest), None, "{id}: the tail has no key");
    assert_eq!(stream.tail_tokens(), tokens.len() - keyed * size, "{id}");
    expected.len()
}

/// The 64-bit chain's case: it has fields of its own.
fn check_legacy(case: &Value) -> usize {
    let anchor = none_hash(case);
    let anchor_key = u64::from_be_bytes(anchor.as_bytes().try_into().expect("8 bytes link this chain"));
    assert_eq!(anchor_key.to_string(), case["none_hash_u64"].as_str().expect("none_hash_u64"));
    let mut chain = Chain::new(Algorithm::Sha256Cbor64, &anchor);
    let mut preimage = Vec::new();
    let blocks = case["legacy_blocks"].as_array().expect("legacy_blocks");
    for (block, expected) in vectors::tokens(&case["token_ids"]).chunks_exact(4).zip(blocks) {
        let mut plain = chain;
        let key = chain.push_with(block, &BlockExtras::NONE, &mut preimage);
        assert_eq!(hex(&preimage), expected["preimage_hex"].as_str().expect("preimage"));
        assert_eq!(key.0.to_string(), expected["event_key_u64"].as_str().expect("key"));
        assert_eq!((plain.push(block), plain), (key, chain));
    }
    blocks.len()
}

/// A hybrid group's case: the chain's digests, and the group's view of them in all forms.
fn check_group(case: &Value) -> usize {
    let id = case["id"].as_str().expect("id");
    let size = case["block_size"].as_u64().expect("block_size") as u32;
    let group = case["group_block_size"].as_u64().expect("group_block_size") as u32;
    let blocks = NonZeroU32::new(group / size).expect("at least 1");
    let mut chain = Chain::new(algorithm(case), &none_hash(case));
    let mut views: Vec<_> = [KeyForm::Int, KeyForm::bytes_of(releases(case)[0])]
        .map(|form| (GroupView::new(form, blocks), Vec::new()))
        .into();
    let fine = case["fine_digests_hex"].as_array().expect("fine_digests_hex");
    for (block, digest) in vectors::tokens(&case["token_ids"]).chunks_exact(size as usize).zip(fine) {
        let _ = chain.push(block);
        assert_eq!(hex(chain.as_bytes()), digest.as_str().expect("hex"), "{id}");
        views.iter_mut().for_each(|(view, keys)| keys.extend(view.after(&chain)));
    }
    let expected = case["group_blocks"].as_array().expect("group_blocks");
    for (index, expected) in expected.iter().enumerate() {
        let key: u64 = expected["event_key_u64"].as_str().expect("key").parse().expect("u64");
        let digest = unhex(expected["digest_hex"].as_str().expect("digest"));
        assert_eq!(views[0].1[index], WireKey::Int(key), "{id}");
        assert_eq!(views[1].1[index], WireKey::Bytes(digest), "{id}");
        assert!(views.iter().all(|(_, keys)| keys[index].block_key() == Some(BlockKey(key))), "{id}: filed as one");
    }
    assert!(views.iter().all(|(_, keys)| keys.len() == expected.len()), "{id}");
    expected.len()
}

#[test]
fn every_vector_of_the_engines_own_code_is_reproduced() {
    let file = vectors::load("vllm_hash.json");
    let cases = file["cases"].as_array().expect("cases");
    let (mut plain, mut legacy, mut groups) = ((0, 0), (0, 0), (0, 0));
    for case in cases {
        let id = case["id"].as_str().expect("id");
        if case.get("legacy_blocks").is_some() {
            legacy = (legacy.0 + 1, legacy.1 + check_legacy(case));
            continue;
        }
        let anchor = none_hash(case);
        assert_eq!(hex(anchor.as_bytes()), case["none_hash_hex"].as_str().expect("none_hash_hex"), "{id}");
        if case.get("group_blocks").is_some() {
            groups = (groups.0 + 1, groups.1 + check_group(case));
            continue;
        }
        let mut preimage = Vec::new();
        let seed = case["pythonhashseed"].as_str().unwrap_or(FIXED_SEED);
        algorithm(case).serialise(&mut preimage, seed);
        assert_eq!(hex(&preimage), case["none_hash_preimage_hex"].as_str().expect("none_hash_preimage_hex"), "{id}");
        // All releases that the case names, though most share one form.
        let mut taggings: Vec<Tagging> = releases(case).into_iter().map(Tagging::of).collect();
        taggings.dedup();
        let blocks: Vec<usize> = taggings.into_iter().map(|tagging| check_blocks(case, tagging)).collect();
        plain = (plain.0 + 1, plain.1 + blocks[0]);
    }
    assert_eq!(cases.len(), CASES, "the file lost cases, or grew");
    assert_eq!(plain.0 + legacy.0 + groups.0, CASES, "a filter that lost cases would pass in silence");
    assert_eq!((plain, legacy, groups), ((104, BLOCKS), (1, 2), (2, 4)));
}

const BLOCKS: usize = 290;

#[test]
fn a_seed_is_literal_text() {
    let of = |seed| NoneHash::from_seed(HashAlgo::Sha256Cbor, seed);
    assert_ne!(of("42"), of("042"));
    assert_ne!(of("0"), of(" 0"));
    // Contract §1.5, the table's other columns too.
    let check = |algorithm, seed, expected: &str| {
        assert_eq!(hex(NoneHash::from_seed(algorithm, seed).as_bytes()), expected, "{algorithm:?} {seed:?}");
    };
    check(Algorithm::Sha256Cbor, FIXED_SEED, "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0");
    check(Algorithm::Sha256, "1234", "8a7c43e934778270f0241e4efb933334518a7ad06e0070742b3f802652a2e249");
    check(Algorithm::XxhashCbor, "1234", "0fd12ee6a63390842c413be31a6766db");
    check(Algorithm::Xxhash, "random", "c65c9b784048f08f9df9ee060f014076");
}

#[test]
fn an_unset_seed_is_known_only_where_the_engine_fixed_it() {
    let known = |algorithm, release| NoneHash::of_engine(algorithm, None, release).is_some();
    let check = |algorithm, since_0_29| {
        assert!(!known(algorithm, Release::new(0, 28, 1)), "{algorithm:?}: random before");
        assert_eq!(known(algorithm, Release::new(0, 29, 0)), since_0_29, "{algorithm:?}");
    };
    check(Algorithm::Sha256, true);
    check(Algorithm::Sha256Cbor, true);
    check(Algorithm::Xxhash, false);
    check(Algorithm::XxhashCbor, false);
    let empty = NoneHash::of_engine(Algorithm::Xxhash, Some(""), Release::new(0, 13, 0));
    assert_eq!(empty, Some(NoneHash::from_seed(Algorithm::Xxhash, "")), "the empty text is a seed");
}

#[test]
#[should_panic(expected = "the rule's algorithm")]
fn an_anchor_of_the_other_algorithm_is_a_bug_that_shows() {
    let _ = Chain::new(HashAlgo::XxhashCbor, &NoneHash::from_seed(HashAlgo::Sha256Cbor, "0"));
}

#[test]
fn the_plain_chain_equals_the_general_one_for_every_block_size() {
    for algorithm in Algorithm::ALL {
        let anchor = NoneHash::from_seed(algorithm, "0");
        for size in (0..400).chain([784, 4_096, 70_000]) {
            // Widths change from token to token, so that chunks end at every offset.
            let tokens: Vec<u32> = (0..size).map(|i: u32| i.wrapping_mul(2_654_435_761) >> (i % 29)).collect();
            let (mut plain, mut general) = (Chain::new(algorithm, &anchor), Chain::new(algorithm, &anchor));
            let key = general.push_with(&tokens, &BlockExtras::NONE, &mut vec![1, 2, 3]);
            assert_eq!((plain.push(&tokens), plain), (key, general), "{algorithm:?}, {size} tokens");
        }
    }
}

#[test]
fn names_of_algorithms_are_the_engines() {
    for algorithm in Algorithm::ALL {
        assert_eq!(Algorithm::parse(algorithm.name()), Some(algorithm));
    }
    assert_eq!(Algorithm::parse("sha256_sglang"), None);
    assert_eq!(Algorithm::from(HashAlgo::Sha256Cbor).name(), "sha256_cbor");
    assert_eq!(Algorithm::from(HashAlgo::XxhashCbor).name(), "xxhash_cbor");
}

#[test]
fn every_vector_names_only_releases_that_have_its_algorithm() {
    for case in vectors::load("vllm_hash.json")["cases"].as_array().expect("cases") {
        let algorithm = algorithm(case);
        for release in releases(case) {
            assert!(algorithm.exists_in(release), "{algorithm:?} in {release}, by {}", case["id"]);
        }
    }
    let none = |release| Algorithm::ALL.iter().all(|algorithm| !algorithm.exists_in(release));
    assert!(none(Release::new(0, 9, 2)));
    assert!(!Algorithm::Xxhash.exists_in(Release::new(0, 12, 0)));
    assert!(!Algorithm::Sha256Cbor64.exists_in(Release::new(0, 10, 2)));
}

#[test]
fn a_wire_key_of_fewer_than_8_bytes_is_no_key() {
    assert_eq!(WireKey::Bytes(vec![1; 7]).block_key(), None);
    assert_eq!(WireKey::Bytes(vec![0, 0, 0, 0, 0, 0, 1, 0]).block_key(), Some(BlockKey(256)));
    assert_eq!(WireKey::Int(u64::MAX).block_key(), Some(BlockKey(u64::MAX)));
}
