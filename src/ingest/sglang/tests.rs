use std::collections::BTreeSet;

use proptest::prelude::*;
use serde_json::{Value, json};
use shards::block::sglang::{Contract, EventFormat, Namespace, salt_seed};
use shards::block::{PageChain, Release};
use shards::ids::BlockKey;

use super::super::events::{Batch, Event, Stored, check_any_bytes};
use super::super::framing::{Framed, published, replayed};
use super::super::tokens::Spelling;
use super::*;

const VECTORS: &str = include_str!("../../../tests/vectors/sglang_events.json");

/// Cases that are no KV event.
const LISTED: [(&str, &str); 1] =
    [("LoadStat@0.5.20", "a message of the load socket, which the gateway does not subscribe to: it counts its own")];

fn cases() -> Vec<Value> {
    let vectors: Value = serde_json::from_str(VECTORS).unwrap();
    vectors["cases"].as_array().unwrap().clone()
}

fn bytes_of(hex: &Value) -> Vec<u8> {
    let hex = hex.as_str().unwrap();
    (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect()
}

/// `[1.0, [event], 0]`.
fn batch_of(event: &[u8]) -> Vec<u8> {
    [&[0x93, 0xca, 0x3f, 0x80, 0, 0, 0x91], event, &[0]].concat()
}

fn key(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| value.as_i64().unwrap().cast_unsigned())
}

fn keys(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(key).collect()
}

/// An event as people write it, whichever way the release encodes it.
fn named(event: &Value) -> Value {
    let Value::Array(fields) = event else { return event.clone() };
    let names = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"];
    let names: &[&str] = if fields[0] == "BlockRemoved" { &["type", "block_hashes", "medium"] } else { &names };
    let mut map: serde_json::Map<String, Value> =
        names.iter().map(|name| (*name).to_owned()).zip(fields.iter().cloned()).collect();
    if let Some(Value::Object(metadata)) = fields.get(7) {
        map.extend(metadata.clone());
    }
    Value::Object(map)
}

fn tokens(value: &Value) -> (Spelling, Vec<u64>) {
    let units = value.as_array().unwrap();
    let pairs: Vec<&Vec<Value>> = units.iter().filter_map(Value::as_array).collect();
    match pairs.first() {
        Some(first) => {
            let ids = std::iter::once(&first[0]).chain(pairs.iter().map(|pair| &pair[1])).map(key).collect();
            (Spelling::Bigrams, ids)
        }
        None => (Spelling::Ids, keys(value)),
    }
}

fn check(id: &str, decoded: Event<'_>, expected: &Value) {
    let expected = named(expected);
    let text = |field: &str| expected.get(field).and_then(Value::as_str);
    match decoded {
        Event::Stored(stored) => {
            assert_eq!(text("type"), Some("BlockStored"), "{id}");
            assert_eq!(
                stored.keys.iter().map(|key| key.0).collect::<Vec<_>>(),
                keys(&expected["block_hashes"]),
                "{id}"
            );
            let parent = &expected["parent_block_hash"];
            assert_eq!(stored.parent.map(|key| key.0), (!parent.is_null()).then(|| key(parent)), "{id}");
            let (spelling, ids) = tokens(&expected["token_ids"]);
            assert_eq!((stored.tokens.spelling(), stored.tokens.ids().collect()), (spelling, ids), "{id}");
            assert_eq!(u64::from(stored.block_tokens), expected["block_size"].as_u64().unwrap(), "{id}");
            assert_eq!(u64::from(stored.tokens.len()), u64::from(stored.keys.len() * stored.block_tokens), "{id}");
            assert_eq!(stored.medium, text("medium"), "{id}");
            assert_eq!(stored.marks.cache_salt(), text("cache_salt"), "{id}");
            assert_eq!(stored.marks.lora_name(), text("lora_name"), "{id}");
            let marked = text("cache_salt").is_some() || text("lora_name").is_some();
            assert_eq!(stored.marks.adapter().iter().any(|part| !part.is_empty()), marked, "{id}");
            assert_eq!((stored.group, stored.kind), (0, None), "{id}");
        }
        Event::Removed(removed) => {
            assert_eq!(text("type"), Some("BlockRemoved"), "{id}");
            let held: Vec<u64> = removed.keys.iter().map(|key| key.0).collect();
            assert_eq!(held, keys(&expected["block_hashes"]), "{id}");
            assert_eq!((removed.medium, removed.group), (text("medium"), 0), "{id}");
        }
        Event::Cleared => assert_eq!(text("type"), Some("AllBlocksCleared"), "{id}"),
    }
}

fn check_payload(id: &str, payload: &[u8], expected: &[Value]) {
    let events: Vec<_> = Batch::open(payload).unwrap().collect();
    assert_eq!(events.len(), expected.len(), "{id}");
    for (event, expected) in events.into_iter().zip(expected) {
        check(id, event.unwrap(), expected);
    }
    check_any_bytes(payload);
}

fn check_capture(id: &str, case: &Value) {
    let messages = |field: &str| case[field].as_array().unwrap().clone();
    let outline = |frames: &Value, read: fn(&[&[u8]]) -> Option<Option<u64>>| {
        let frames: Vec<Vec<u8>> = frames.as_array().unwrap().iter().map(bytes_of).collect();
        read(&frames.iter().map(Vec::as_slice).collect::<Vec<_>>())
    };
    fn seq_of(framed: &Framed<'_>) -> Option<Option<u64>> {
        match framed {
            Framed::Batch(seq, payload) => {
                let events: Vec<_> = Batch::open(payload).unwrap().map(|event| event.unwrap()).collect();
                assert!(matches!(events[..], [Event::Cleared]));
                Some(Some(*seq))
            }
            Framed::End => Some(None),
            Framed::Malformed => None,
        }
    }
    let live: Vec<_> = messages("live_sub_frames_hex").iter().map(|m| outline(m, |f| seq_of(&published(f)))).collect();
    assert_eq!(live, (0..5).map(|seq| Some(Some(seq))).collect::<Vec<_>>(), "{id}");
    let answers = |field| messages(field).iter().map(|m| outline(m, |f| seq_of(&replayed(f)))).collect::<Vec<_>>();
    assert_eq!(answers("replay_dealer_reply_frames_hex"), [Some(Some(3)), Some(Some(4)), Some(None)], "{id}");
    let from_0 = answers("replay_from_0_with_3_step_buffer_hex");
    assert_eq!(from_0, [Some(Some(2)), Some(Some(3)), Some(Some(4)), Some(None)], "{id}");
    // The request that such an engine answers is the one that is sent.
    assert_eq!(case["replay_dealer_request_frames_hex"], json!(["", "0000000000000003"]), "{id}");
}

/// The keys that a store's own tokens lead to, and the chain after each page.
fn recomputed(stored: &Stored<'_>, chain: &mut PageChain) -> (Vec<BlockKey>, Vec<PageChain>) {
    let bigrams = stored.tokens.spelling() == Spelling::Bigrams;
    let contract = Contract::new(Release::new(0, 5, 23), bigrams, EventFormat::Default).unwrap();
    let ids: Vec<u64> = stored.tokens.ids().collect();
    let size = stored.block_tokens as usize;
    let window = size + usize::from(bigrams);
    let pages = (0..stored.keys.len() as usize).map(|page| &ids[page * size..page * size + window]);
    pages.map(|page| (contract.push(chain, page).unwrap(), *chain)).unzip()
}

fn check_scenario(id: &str, case: &Value) {
    // Chains by the key of their last page.
    let mut chains: Vec<(BlockKey, PageChain)> = Vec::new();
    for step in case["steps"].as_array().unwrap() {
        for event in step["events"].as_array().unwrap() {
            let payload = batch_of(&bytes_of(&event["payload_hex"]));
            check_payload(id, &payload, std::slice::from_ref(&event["decoded"]));
            let Some(Ok(Event::Stored(stored))) = Batch::open(&payload).unwrap().next() else { continue };
            let mut chain = match (stored.parent, stored.marks.cache_salt()) {
                (Some(parent), _) => chains.iter().find(|(key, _)| *key == parent).unwrap().1,
                (None, Some(salt)) => PageChain::after(salt_seed(salt)),
                (None, None) => PageChain::root(),
            };
            // A store may begin after any page of another.
            let (keys, pages) = recomputed(&stored, &mut chain);
            assert_eq!(keys, stored.keys.iter().collect::<Vec<_>>(), "{id}: {}", step["step"]);
            chains.extend(keys.into_iter().zip(pages));
        }
    }
}

fn check_descriptor(id: &str, case: &Value) {
    let events = &case["kv_events"];
    let answer = json!({ "version": "0.5.23", "page_size": case["server_args"]["page_size"], "kv_events": events });
    let read = described(answer.to_string().as_bytes());
    if events.is_null() {
        return assert_eq!(read, Err(NotDescribed::Off), "{id}");
    }
    let any = ["*", "0.0.0.0", "::"].contains(&events["endpoint_host"].as_str().unwrap());
    let expected = Described {
        host: (!any).then(|| events["endpoint_host"].as_str().unwrap().to_owned()),
        port: events["endpoint_port_base"].as_u64().unwrap() as u16,
        replay_port: events["replay_endpoint_port_base"].as_u64().map(|port| port as u16),
        block_tokens: case["server_args"]["page_size"].as_u64().unwrap() as u32,
        ranks: 1,
    };
    assert_eq!(read, Ok(expected), "{id}");
}

#[test]
fn every_case_of_every_release_is_read_as_it_was_made() {
    let cases = cases();
    assert_eq!(cases.len(), 90, "the vectors are complete");
    let (mut passed, mut listed) = (0, BTreeSet::new());
    for case in &cases {
        let id = case["id"].as_str().unwrap();
        if LISTED.iter().any(|(name, _)| *name == id) {
            listed.insert(id);
            continue;
        }
        passed += 1;
        let decoded = &case["decoded_generic"];
        match case["kind"].as_str().unwrap() {
            "msgpack" if id.starts_with("KVEventBatch") => {
                check_payload(id, &bytes_of(&case["payload_hex"]), decoded[1].as_array().unwrap());
            }
            "msgpack" => {
                check_payload(id, &batch_of(&bytes_of(&case["payload_hex"])), std::slice::from_ref(decoded));
            }
            "zmq-capture" => check_capture(id, case),
            "scenario" => check_scenario(id, case),
            "server_info" => check_descriptor(id, case),
            other => panic!("{id}: kind {other} is new"),
        }
    }
    assert_eq!((passed, listed.len()), (89, LISTED.len()));
}

#[test]
fn an_adapters_published_keys_are_known_to_be_its_own() {
    let case = cases().into_iter().find(|case| case["id"] == "BlockStored_lora_named@0.5.23").unwrap();
    let payload = batch_of(&bytes_of(&case["payload_hex"]));
    let Some(Ok(Event::Stored(stored))) = Batch::open(&payload).unwrap().next() else { panic!("a store") };
    let keys: Vec<BlockKey> = stored.keys.iter().collect();
    let (chain, _) = recomputed(&stored, &mut PageChain::root());
    assert_ne!(chain, keys);
    let namespace = Namespace::new(Some(&"0123456789abcdef".repeat(2)), None);
    assert_eq!(chain.into_iter().map(|key| namespace.published(key)).collect::<Vec<_>>(), keys);
}

#[test]
fn a_wide_token_is_read_and_a_bad_event_between_pages_of_bigrams_costs_only_itself() {
    let wide = batch_of(b"\x97\xabBlockStored\x91\x05\xc0\x91\xcf\x00\x00\x00\x01\x00\x00\x00\x00\x01\xc0\xa3GPU");
    let Some(Ok(Event::Stored(stored))) = Batch::open(&wide).unwrap().next() else { panic!("a store") };
    assert_eq!(stored.tokens.ids().collect::<Vec<_>>(), [1 << 32]);

    let cleared = cases().into_iter().find(|case| case["id"] == "BlockStored_bigram@0.5.22").unwrap();
    let bigram = bytes_of(&cleared["payload_hex"]);
    let bad = b"\x83\xa4type\xabBlockStored\xacblock_hashes\x91\xa1x\xaablock_size\xa1y";
    let payload = [&[0x93, 0xca, 0x3f, 0x80, 0, 0, 0x93][..], &bigram, bad, &bigram, &[0]].concat();
    let outline: Vec<bool> = Batch::open(&payload).unwrap().map(|event| event.is_ok()).collect();
    assert_eq!(outline, [true, false, true]);
}

#[test]
fn a_hundred_thousand_tokens_in_one_event_are_read() {
    let mut event = b"\x97\xabBlockStored\xdd\x00\x01\x86\xa0".to_vec();
    (0..100_000_u32).for_each(|key| event.extend([&[0xd2][..], &(-1 - key.cast_signed()).to_be_bytes()].concat()));
    event.extend(b"\xc0\xdd\x00\x01\x86\xa0");
    (0..100_000_u32).for_each(|token| event.extend([&[0xce][..], &token.to_be_bytes()].concat()));
    event.extend(b"\x01\xc0\xa3GPU");
    let payload = batch_of(&event);
    let Some(Ok(Event::Stored(stored))) = Batch::open(&payload).unwrap().next() else { panic!("a store") };
    assert_eq!((stored.keys.len(), stored.tokens.ids().count()), (100_000, 100_000));
    assert_eq!(stored.keys.last(), Some(BlockKey((-100_000_i64).cast_unsigned())));
}

#[test]
fn an_answer_that_cannot_be_read_says_so() {
    assert!(matches!(described(b"no json"), Err(NotDescribed::Unreadable(_))));
    assert!(matches!(described(br#"{"kv_events":{"endpoint_host":"*"}}"#), Err(NotDescribed::Unreadable(_))));
    assert_eq!(described(br#"{"version":"0.5.9"}"#), Err(NotDescribed::Off));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1_000) })]

    #[test]
    fn any_change_of_a_real_payload_is_read_without_panic(
        case in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)
    ) {
        static PAYLOADS: std::sync::LazyLock<Vec<Vec<u8>>> = std::sync::LazyLock::new(|| {
            cases().iter().filter(|case| case["kind"] == "msgpack").map(|case| bytes_of(&case["payload_hex"])).collect()
        });
        let mut payload = batch_of(&PAYLOADS[case.index(PAYLOADS.len())]);
        for (place, byte) in changes {
            let place = place.index(payload.len());
            payload[place] = byte;
        }
        check_any_bytes(&payload);
    }
}
