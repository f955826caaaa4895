use std::num::NonZeroU32;

use serde_json::Value;

use super::*;
use crate::block::vectors::{self, hex, u64_text, unhex};
use crate::block::{Contract as Any, KeyStream, Lora, MmItem};

/// Cases that no gateway can meet, with the reason.
const NOT_FOR_A_GATEWAY: [(&str, &str); 9] = [
    ("l3_storage_extra=None_salt=None", L3),
    ("l3_storage_extra=ns1_salt=None", L3),
    ("l3_storage_extra=None_salt=tenant-a", L3),
    ("l3_storage_extra=a_salt=bc", L3),
    ("l3_storage_extra=ab_salt=c", L3),
    ("mm_pad_1", PAD),
    ("mm_pad_deadbeefcafebabe", PAD),
    ("mm_pad_10000000000000005", PAD),
    ("mm_pad_ffffffffffffffffffff", PAD),
];
const L3: &str = "names of objects in a storage tier; no event and no request carries them";
const PAD: &str = "stand-ins of image tokens: their hash and their number are the engine's processor's; events bring \
                   them as (wide) tokens, which are hashed as given";

fn text(value: &Value) -> Option<&str> {
    value.as_str()
}

fn contract(case: &Value) -> Contract {
    let format = match text(&case["inputs"]["event_format"]) {
        Some("dynamo") => EventFormat::Dynamo,
        _ => EventFormat::Default,
    };
    let since = Release::parse(text(&case["since"]).expect("since")).expect("a release");
    Contract::new(since, case["inputs"]["is_bigram"] == true, format).expect("a chain since 0.5.6")
}

/// One chain: every page the function hashes, the partial one at the end too, by tokens of both widths. Returns
/// how many pages.
fn check_chain(case: &Value) -> usize {
    let id = text(&case["id"]).expect("id");
    let (inputs, expected) = (&case["inputs"], &case["expected"]);
    let contract = contract(case);
    let tokens = vectors::wide_tokens(&inputs["token_ids"]);
    let size = inputs["page_size"].as_u64().expect("page_size") as usize;
    let extras = PromptExtras {
        cache_salt: text(&inputs["cache_salt"]).map(str::to_owned),
        extra_key: text(&inputs["extra_key"]).map(str::to_owned),
        ..PromptExtras::default()
    };
    let mut chain = contract.chain(&extras);
    assert_eq!(hex(chain.as_bytes()), text(&expected["seed_hex"]).unwrap_or(""), "{id}: seed");

    let pages = expected["pages"].as_array().expect("pages");
    let mut keys: Vec<BlockKey> = Vec::new();
    for (index, page) in pages.iter().enumerate() {
        let end = tokens.len().min((index + 1) * size + usize::from(contract.bigrams));
        let before = keys.last().map_or(Value::Null, |key| Value::from(key.0 as i64));
        assert_eq!(page["parent_i64"], before, "{id} page {index}");
        let key = contract.push(&mut chain, &tokens[index * size..end]).expect("tokens of this release");
        assert_eq!(hex(chain.as_bytes()), text(&page["digest_hex"]).expect("digest_hex"), "{id} page {index}");
        assert_eq!(key.0, u64_text(&page["u64"]), "{id} page {index}");
        assert_eq!(key.0 as i64, page["i64"].as_i64().expect("i64"), "{id} page {index}: the same bits, signed");
        keys.push(key);
    }
    check_published(case, contract, &extras, &keys);
    check_stream(case, contract, &extras, &tokens);
    pages.len()
}

/// What events carry: the keys, or their form in a namespace.
fn check_published(case: &Value, contract: Contract, extras: &PromptExtras, keys: &[BlockKey]) {
    let (id, expected) = (text(&case["id"]).expect("id"), &case["expected"]);
    let namespace = if case["inputs"].get("lora").is_some() {
        // Only the server knows the adapter's id, which is in the vector's extra_key. By default, the salt is not
        // in an adapter's namespace.
        let salt = extras.salt().map(String::as_str).filter(|_| contract.format == EventFormat::Dynamo);
        Some(Namespace::new(extras.extra_key.as_deref(), salt))
    } else {
        contract.namespace(extras).expect("no adapter")
    };
    let digest = namespace.map(|namespace| hex(namespace.as_bytes()));
    assert_eq!(digest.as_deref(), text(&expected["namespace_seed_hex"]), "{id}: namespace");
    let published: Vec<u64> =
        keys.iter().map(|&key| namespace.map_or(key, |namespace| namespace.published(key)).0).collect();
    let unsigned: Vec<u64> =
        expected["published_u64"].as_array().expect("published_u64").iter().map(u64_text).collect();
    assert_eq!(published, unsigned, "{id}");
}

/// A prompt's stream: the pages that the tree stores, and no more.
fn check_stream(case: &Value, contract: Contract, extras: &PromptExtras, tokens: &[u64]) {
    let (id, inputs, expected) = (text(&case["id"]).expect("id"), &case["inputs"], &case["expected"]);
    let Ok(tokens) = tokens.iter().map(|&token| u32::try_from(token)).collect::<Result<Vec<u32>, _>>() else {
        return; // Wide tokens stand for images; prompts have none.
    };
    let size = NonZeroU32::new(inputs["page_size"].as_u64().expect("page_size") as u32).expect("not 0");
    let lora = inputs.get("lora").map(|lora| Lora {
        name: text(&lora["lora_name"]).expect("lora_name").to_owned(),
        path: None,
        id: None,
    });
    let adapted = PromptExtras { lora: lora.clone(), ..extras.clone() };
    let stream = KeyStream::new(&Any::Sglang(contract), &adapted, size);
    if let Some(lora) = lora {
        assert_eq!(stream.err(), Some(ContractError::LoraPrivate { name: lora.name }), "{id}");
        return;
    }
    let (mut stream, mut rest) = (stream.expect("plain, salted or named"), &tokens[..]);
    let keys: Vec<u64> = std::iter::from_fn(|| stream.next_key(&mut rest)).map(|key| key.0).collect();
    let stored = expected["full_pages_in_tree"].as_u64().expect("full_pages_in_tree") as usize;
    let published = expected["published_u64"].as_array().expect("published_u64");
    assert_eq!(keys, published[..stored].iter().map(u64_text).collect::<Vec<_>>(), "{id}");
}

fn check_continuation(case: &Value) {
    let prior = unhex(text(&case["inputs"]["prior_digest_hex"]).expect("prior_digest_hex"));
    let mut chain = PageChain::after(prior.try_into().expect("32 bytes"));
    let key = chain.push(&vectors::tokens(&case["inputs"]["token_ids"]));
    let page = &case["expected"]["pages"][0];
    assert_eq!(key.0, u64_text(&page["u64"]));
    assert_eq!(hex(chain.as_bytes()), text(&page["digest_hex"]).expect("digest_hex"));
}

fn check_tuple_hash(case: &Value) {
    let tokens = vectors::tokens(&case["inputs"]["token_ids"]);
    let key = tuple_hash(&tokens, false);
    assert_eq!(key.0, u64_text(&case["expected"]["u64"]), "{}", case["id"]);
    assert_ne!(key, PageChain::root().push(&tokens), "{}: never mistaken for the chain's", case["id"]);
    let until = Release::parse(text(&case["until"]).expect("until")).expect("a release");
    let refused = Contract::new(until, false, EventFormat::Default);
    assert_eq!(refused, Err(ContractError::TupleHashes { release: until }));
}

/// Errors of the engine. A negative token has no type here: it is refused where numbers are read.
fn check_error(case: &Value) {
    match text(&case["id"]).expect("id") {
        "err_negative" => assert!(serde_json::from_value::<Vec<u32>>(case["inputs"]["token_ids"].clone()).is_err()),
        "err_wide_before_0_5_23" => {
            let until = Release::parse(text(&case["until"]).expect("until")).expect("a release");
            let contract = Contract::new(until, false, EventFormat::Default).expect("a chain");
            let mut chain = PageChain::root();
            let refused = contract.push(&mut chain, &vectors::wide_tokens(&case["inputs"]["token_ids"]));
            assert_eq!(refused, Err(ContractError::WideToken { token: 1 << 32 }));
            assert_eq!(chain, PageChain::root(), "nothing was appended");
        }
        other => panic!("{other}: an error that no test knows"),
    }
}

#[test]
fn every_vector_of_the_engines_own_code_is_reproduced_or_listed() {
    let file = vectors::load("sglang_hash.json");
    let cases = file["cases"].as_array().expect("cases");
    let (mut chains, mut pages, mut continuations, mut tuples, mut errors) = (0, 0, 0, 0, 0);
    let mut listed = Vec::new();
    for case in cases {
        match text(&case["contract"]).expect("contract") {
            "sha256-chain" => (chains, pages) = (chains + 1, pages + check_chain(case)),
            "sha256-chain-continuation" => (continuations, ()) = (continuations + 1, check_continuation(case)),
            "python-tuple-hash" => (tuples, ()) = (tuples + 1, check_tuple_hash(case)),
            "error" => (errors, ()) = (errors + 1, check_error(case)),
            _ => listed.push(text(&case["id"]).expect("id")),
        }
    }
    assert_eq!(listed, NOT_FOR_A_GATEWAY.map(|(id, _)| id), "exactly the cases listed are left out");
    assert_eq!((chains, pages, continuations, tuples, errors), (44, 74, 1, 5, 2));
    assert_eq!(cases.len(), 61, "the file lost cases, or grew");
}

#[test]
fn a_salt_is_hashed_only_by_releases_that_hash_it() {
    let salted = PromptExtras { cache_salt: Some("tenant-a".into()), ..PromptExtras::default() };
    let chain = |patch| {
        let contract = Contract::new(Release::new(0, 5, patch), false, EventFormat::Default).expect("a chain");
        contract.chain(&salted)
    };
    assert_eq!(chain(17), PageChain::root());
    assert_eq!(chain(18), PageChain::after(salt_seed("tenant-a")));
}

#[test]
fn the_last_release_before_the_chain_is_refused_by_name() {
    let of = |patch| Contract::new(Release::new(0, 5, patch), false, EventFormat::Default);
    assert!(of(6).is_ok());
    let refused = of(5).expect_err("tuple hashes").to_string();
    assert!(refused.contains("SGLang 0.5.5") && refused.contains("upgrade"), "{refused}");
}

#[test]
fn tokens_beyond_63_bits_are_refused_by_every_release() {
    let contract = Contract::new(Release::new(0, 5, 23), true, EventFormat::Default).expect("a chain");
    let refused = contract.push(&mut PageChain::root(), &[1, 1 << 63]);
    assert_eq!(refused, Err(ContractError::WideToken { token: 1 << 63 }));
}

#[test]
fn images_and_embeddings_have_no_key_of_a_prompt() {
    let contract = Contract::new(Release::new(0, 5, 23), false, EventFormat::Default).expect("a chain");
    let item = MmItem { identifier: "a".into(), offset: 0, length: 1 };
    let image = PromptExtras { mm: vec![item], ..PromptExtras::default() };
    assert_eq!(contract.namespace(&image), Err(ContractError::Unkeyed { what: "multimodal items" }));
}

#[test]
fn a_bigram_page_of_an_old_release_is_a_tuple_of_pairs() {
    // CPython 3.11: hash(((1, 2), (2, 3))) & (2**64 - 1).
    assert_eq!(tuple_hash(&[1, 2, 3], true).0, 8374439192799522889);
}
