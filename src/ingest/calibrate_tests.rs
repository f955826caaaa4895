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
    check(key(Sha256Cbor, "42", 16), 16, &[Leg::Seed], &["\"42\"", "\"0\"", "kvNoneHashSeed"]);
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
