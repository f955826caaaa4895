use shards::block::PageChain;

use super::*;
use crate::ingest::copies::tests::{Spec, Wire, batch_at};
use crate::ingest::events::{Batch, Event};

const TOKENS: [u32; 32] = {
    let mut tokens = [0; 32];
    let mut place = 0;
    while place < 32 {
        tokens[place] = 1_000 + place as u32;
        place += 1;
    }
    tokens
};

fn rule(algorithm: Algorithm, algorithm_given: bool, seed: &str) -> Calibrator {
    let believed = Believed::Vllm { algorithm, algorithm_given, seed: seed.to_owned(), tagging: Tagging::Tagged };
    Calibrator::new(Arc::new(believed), 16)
}

/// The first block's key of an engine, over so many tokens.
fn key(algorithm: Algorithm, seed: &str, size: usize) -> u64 {
    Chain::new(algorithm, &NoneHash::from_seed(algorithm, seed)).push(&TOKENS[..size]).0
}

fn root(key: u64, size: u32) -> Wire {
    let tokens = &TOKENS[..size as usize];
    let (group, medium, kind) = (0, "GPU", "full_attention");
    Spec { keys: &[key], parent: None, tokens, block: size, group, medium, kind, salts: Some(&[None]) }.wire()
}

fn show(calibrator: &mut Calibrator, store: &Wire) -> Option<Way> {
    let payload = batch_at(0, std::slice::from_ref(store));
    let event = Batch::open(&payload).expect("a batch").next().expect("an event").expect("well formed");
    let Event::Stored(stored) = event else { panic!("a store was built") };
    calibrator.observe(&stored, &mut Vec::new())
}

/// The verdict on one root block, and where it leads.
fn judge(mut calibrator: Calibrator, key: u64, size: u32) -> (Option<Way>, Finding) {
    let way = show(&mut calibrator, &root(key, size));
    (way, calibrator.finding().clone())
}

fn derived(size: u32) -> Option<Way> {
    NonZeroU32::new(size).map(Way::Derived)
}

#[test]
fn an_engine_that_hashes_as_the_rule_says_is_exact_at_its_first_root_block() {
    for algorithm in Algorithm::ALL {
        let (way, finding) = judge(rule(algorithm, true, "0"), key(algorithm, "0", 16), 16);
        assert_eq!((way, finding.verdict), (None, Verdict::Exact), "{algorithm:?}: nothing changes");
        assert!(finding.faults.is_empty() && finding.hints.is_empty());
    }
}

#[test]
fn the_leg_at_fault_is_named_and_our_own_keys_serve_meanwhile() {
    use Algorithm::{Sha256Cbor, XxhashCbor};
    let check = |key, size, faults: &[Leg], words: &[&str]| {
        let (way, finding) = judge(rule(Sha256Cbor, true, "0"), key, size);
        assert_eq!((way, finding.verdict), (derived(size), Verdict::Derived), "{finding}");
        assert_eq!(finding.faults, faults, "{finding}");
        words.iter().for_each(|word| assert!(finding.detail.contains(word), "{word:?} in {finding}"));
    };
    check(key(Sha256Cbor, "42", 16), 16, &[Leg::Seed], &["\"42\"", "kvNoneHashSeed"]);
    check(key(Sha256Cbor, FIXED_SEED, 16), 16, &[Leg::Seed], &[FIXED_SEED]);
    check(key(Sha256Cbor, "a text that nobody guesses", 16), 16, &[Leg::Seed], &["random"]);
    check(key(XxhashCbor, "0", 16), 16, &[Leg::Algorithm], &["xxhash_cbor", "sha256_cbor"]);
    check(key(Algorithm::Sha256, "7", 16), 16, &[Leg::Seed, Leg::Algorithm], &["sha256", "\"7\""]);
    check(key(Sha256Cbor, "0", 32), 32, &[Leg::BlockSize], &["kvBlockSize is 16", "32 tokens"]);
    check(key(XxhashCbor, "1", 8), 8, &[Leg::BlockSize, Leg::Seed, Leg::Algorithm], &["8 tokens", "xxhash_cbor"]);
    check(key(Sha256Cbor, "0", 16) & 0xffff_ffff, 16, &[Leg::KeyWidth], &["last 4 bytes"]);
}

#[test]
fn a_group_of_coarser_blocks_over_the_rules_chain_is_a_matter_of_block_size() {
    let algorithm = Algorithm::Sha256Cbor;
    let mut chain = Chain::new(algorithm, &NoneHash::from_seed(algorithm, "0"));
    chain.push(&TOKENS[..16]);
    let (way, finding) = judge(rule(algorithm, true, "0"), chain.push(&TOKENS[16..]).0, 32);
    assert_eq!((way, &finding.faults[..]), (derived(32), &[Leg::BlockSize][..]));
    assert!(finding.detail.contains("chain is over blocks of 16"), "{finding}");
}

#[test]
fn an_algorithm_that_the_rule_does_not_name_is_taken_over() {
    let (way, finding) = judge(rule(Algorithm::Sha256Cbor, false, "0"), key(Algorithm::Sha256, "0", 16), 16);
    let Some(Way::Engine(Space { contract: Contract::Vllm { none_hash, .. }, .. })) = way else { panic!("{way:?}") };
    assert_eq!(none_hash, NoneHash::from_seed(Algorithm::Sha256, "0"));
    assert_eq!((finding.verdict, &finding.hints[..]), (Verdict::Exact, &[Leg::Algorithm][..]));
    assert!(finding.faults.is_empty() && finding.detail.contains("sha256"), "{finding}");
}

#[test]
fn an_engine_that_becomes_another_is_judged_anew() {
    let mut calibrator = rule(Algorithm::Sha256Cbor, true, "0");
    assert_eq!(show(&mut calibrator, &root(key(Algorithm::Sha256Cbor, "0", 16), 16)), None);
    assert!(calibrator.is_proved());
    let other = root(key(Algorithm::Sha256Cbor, "9", 16), 16);
    assert_eq!(show(&mut calibrator, &other), None, "one odd block in a proved stream proves nothing");
    calibrator.begin_again();
    assert!(!calibrator.is_proved());
    assert_eq!(show(&mut calibrator, &other), derived(16));
    calibrator.begin_again();
    assert_eq!(show(&mut calibrator, &root(key(Algorithm::Sha256Cbor, "0", 16), 16)), Some(Way::Rule));
}

#[test]
fn releases_that_say_nothing_of_salts_are_given_the_benefit_of_three_doubts() {
    let untold = |number: u64| {
        let (group, medium, kind) = (0, "GPU", "");
        Spec { keys: &[number], parent: None, tokens: &TOKENS[..16], block: 16, group, medium, kind, salts: None }
            .wire()
    };
    let mut calibrator = rule(Algorithm::Sha256Cbor, true, "0");
    for number in [1, 1, 1, 2] {
        assert_eq!(show(&mut calibrator, &untold(number)), None, "{number}");
    }
    assert_eq!(calibrator.finding().verdict, Verdict::Believed);
    assert_eq!(show(&mut calibrator, &untold(3)), derived(16));
    // A plain block that fits shows that the others were salted.
    assert_eq!(show(&mut calibrator, &untold(key(Algorithm::Sha256Cbor, "0", 16))), Some(Way::Rule));
}

#[test]
fn salted_root_blocks_decide_nothing_but_the_form_of_extra_keys() {
    let salted = |tagging, seed: &str, salt: &str| {
        let none_hash = NoneHash::from_seed(Algorithm::Sha256Cbor, seed);
        let extras = BlockExtras { tagging, keys: &[ExtraKey::CacheSalt(salt)], lookahead: &[] };
        let key = Chain::new(Algorithm::Sha256Cbor, &none_hash).push_with(&TOKENS[..16], &extras, &mut Vec::new());
        let (keys, salts) = ([key.0], [Some(salt)]);
        let (group, medium, kind, salts) = (0, "GPU", "", Some(&salts[..]));
        Spec { keys: &keys, parent: None, tokens: &TOKENS[..16], block: 16, group, medium, kind, salts }.wire()
    };
    let plain = root(key(Algorithm::Sha256Cbor, "0", 16), 16);
    let after_plain = |stores: &[Wire]| {
        let mut calibrator = rule(Algorithm::Sha256Cbor, true, "0");
        assert_eq!(show(&mut calibrator, &stores[0]), None);
        assert_eq!(calibrator.finding().verdict, Verdict::Believed, "a salted block alone says nothing");
        show(&mut calibrator, &plain);
        stores.iter().for_each(|store| assert_eq!(show(&mut calibrator, store), None));
        calibrator.finding().clone()
    };
    let same = after_plain(&[salted(Tagging::Tagged, "0", "a")]);
    assert_eq!((same.verdict, same.faults, same.hints), (Verdict::Exact, vec![], vec![]));
    let older = after_plain(&[salted(Tagging::MmOffset, "0", "a")]);
    assert_eq!((older.verdict, older.faults, older.hints), (Verdict::Exact, vec![], vec![Leg::Tagging]));
    let odd: Vec<_> = ["a", "b", "c"].iter().map(|salt| salted(Tagging::Tagged, "unknown", salt)).collect();
    let odd = after_plain(&odd);
    assert_eq!((odd.verdict, odd.faults), (Verdict::Exact, vec![Leg::Tagging]));
}

#[test]
fn sglang_before_0_5_6_is_refused_and_later_ones_are_exact() {
    let release = shards::block::Release::new(0, 5, 20);
    let contract = sglang::Contract::new(release, false, sglang::EventFormat::Default).expect("a chain");
    let rule = || Calibrator::new(Arc::new(Believed::Sglang(contract)), 16);
    let (way, finding) = judge(rule(), PageChain::root().push(&TOKENS[..16]).0, 16);
    assert_eq!((way, finding.verdict), (None, Verdict::Exact));
    let (way, finding) = judge(rule(), PageChain::root().push(&TOKENS).0, 32);
    assert_eq!((way, &finding.faults[..]), (derived(32), &[Leg::BlockSize][..]));
    let (way, finding) = judge(rule(), sglang::tuple_hash(&TOKENS[..16], false).0, 16);
    assert_eq!((way, finding.verdict), (Some(Way::Refused), Verdict::Refused));
    assert!(finding.detail.contains("0.5.6"), "{finding}");
}

/// One page of SGLang as its map form tells it.
fn page(key: BlockKey, tokens: &[u32], bigrams: bool, size: u8, salt: Option<&str>) -> Wire {
    let mut bytes = vec![if salt.is_some() { 0x86 } else { 0x85 }];
    let text = |bytes: &mut Vec<u8>, text: &str| {
        bytes.push(0xa0 | text.len() as u8);
        bytes.extend_from_slice(text.as_bytes());
    };
    let id = |bytes: &mut Vec<u8>, id: u32| {
        bytes.push(0xce);
        bytes.extend_from_slice(&id.to_be_bytes());
    };
    text(&mut bytes, "type");
    text(&mut bytes, "BlockStored");
    text(&mut bytes, "block_hashes");
    bytes.extend_from_slice(&[0x91, 0xd3]);
    bytes.extend_from_slice(&key.0.to_be_bytes());
    text(&mut bytes, "parent_block_hash");
    bytes.push(0xc0);
    text(&mut bytes, "token_ids");
    if bigrams {
        bytes.extend_from_slice(&[0xdc, 0, (tokens.len() - 1) as u8]);
        for pair in tokens.windows(2) {
            bytes.push(0x92);
            pair.iter().for_each(|token| id(&mut bytes, *token));
        }
    } else {
        bytes.extend_from_slice(&[0xdc, 0, tokens.len() as u8]);
        tokens.iter().for_each(|token| id(&mut bytes, *token));
    }
    text(&mut bytes, "block_size");
    bytes.push(size);
    if let Some(salt) = salt {
        text(&mut bytes, "cache_salt");
        text(&mut bytes, salt);
    }
    Wire::of(bytes)
}

#[test]
fn sglang_pages_of_pairs_salts_and_formats_are_followed_whatever_the_server_has_said() {
    use sglang::EventFormat::{Default, Dynamo};
    let newest = sglang::Contract::new(shards::block::Release::new(0, 5, 23), false, Default).expect("a chain");
    let key = |bigrams, format, salt: Option<&str>| {
        let extras = PromptExtras { cache_salt: salt.map(str::to_owned), ..PromptExtras::default() };
        let contract = Contract::Sglang(newest.with(bigrams, format));
        let mut stream = KeyStream::new(&contract, &extras, NonZeroU32::new(16).expect("16")).expect("keys");
        stream.next_key(&mut &TOKENS[..17]).expect("one page")
    };
    for said in [false, true] {
        for bigrams in [false, true] {
            for (format, salt) in [(Default, None), (Default, Some("tenant-a")), (Dynamo, Some("tenant-a"))] {
                let mut calibrator = Calibrator::new(Arc::new(Believed::Sglang(newest.with(said, Default))), 16);
                let tokens = &TOKENS[..if bigrams { 17 } else { 16 }];
                let way = show(&mut calibrator, &page(key(bigrams, format, salt), tokens, bigrams, 16, salt));
                let finding = calibrator.finding();
                assert_eq!((finding.verdict, &finding.faults[..]), (Verdict::Exact, &[][..]), "{finding}");
                let live = newest.with(bigrams, format);
                match way {
                    None => assert_eq!((said, format), (bigrams, Default)),
                    Some(Way::Engine(space)) => assert_eq!(space.contract, Contract::Sglang(live)),
                    other => panic!("{other:?}"),
                }
                assert_eq!(finding.hints.contains(&Leg::Algorithm), said != bigrams, "{finding}");
                assert_eq!(finding.hints.contains(&Leg::Tagging), format == Dynamo, "{finding}");
            }
        }
    }
    let rule = || Calibrator::new(Arc::new(Believed::Sglang(newest)), 16);
    let old = sglang::tuple_hash(&TOKENS[..17], true);
    let mut calibrator = rule();
    assert_eq!(show(&mut calibrator, &page(old, &TOKENS[..17], true, 16, None)), Some(Way::Refused));
    let mut calibrator = rule();
    assert_eq!(show(&mut calibrator, &page(BlockKey(7), &TOKENS[..16], false, 16, Some("s"))), None);
    assert_eq!(calibrator.finding().verdict, Verdict::Believed, "an odd page of a salt decides nothing");
    let ways: Vec<_> =
        (1..=4).map(|odd| show(&mut calibrator, &page(BlockKey(odd), &TOKENS[..16], false, 16, None))).collect();
    assert_eq!(ways.iter().flatten().collect::<Vec<_>>(), [&Way::Derived(NonZeroU32::new(16).expect("16"))]);
    let finding = calibrator.finding();
    assert_eq!((finding.verdict, &finding.faults[..]), (Verdict::Derived, &[Leg::Algorithm][..]));
    assert!(finding.detail.contains("0.5.23"), "{finding}");
}

#[test]
fn nothing_that_is_no_root_block_is_judged() {
    let mut calibrator = rule(Algorithm::Sha256Cbor, true, "0");
    let base = Spec {
        keys: &[5],
        parent: None,
        tokens: &TOKENS[..16],
        block: 16,
        group: 0,
        medium: "GPU",
        kind: "",
        salts: Some(&[None]),
    };
    for odd in [
        Spec { parent: Some(1), ..base.clone() },
        Spec { tokens: &[], ..base.clone() },
        Spec { tokens: &TOKENS[..15], ..base.clone() },
        Spec { block: 0, ..base.clone() },
        Spec { keys: &[], ..base.clone() },
    ] {
        assert_eq!(show(&mut calibrator, &odd.wire()), None, "{odd:?}");
    }
    assert_eq!(calibrator.finding(), &Finding::default());
    assert_eq!(show(&mut calibrator, &base.wire()), derived(16), "and the same block as a root is");
}
