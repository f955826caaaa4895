use proptest::prelude::*;
use serde_json::Value;

use super::*;

const VECTORS: &str = include_str!("../../tests/vectors/vllm_events.json");

fn bytes_of(hex: &str) -> Vec<u8> {
    (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).expect("vectors are hex")).collect()
}

fn key_of(value: &Value) -> Option<u64> {
    match value {
        Value::Null => None,
        Value::Object(map) => Some(match (map.get("u64"), map.get("bytes_hex")) {
            (Some(decimal), _) => decimal.as_str().unwrap().parse().unwrap(),
            (_, Some(hex)) => {
                let hex = hex.as_str().unwrap();
                u64::from_str_radix(&hex[hex.len() - 16..], 16).unwrap()
            }
            other => panic!("{other:?}"),
        }),
        number => Some(number.as_u64().unwrap()),
    }
}

fn keys_of(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|key| key_of(key).unwrap()).collect()
}

fn text<'a>(event: &'a Value, field: &str) -> Option<&'a str> {
    event.get(field).and_then(Value::as_str)
}

fn number(event: &Value, field: &str) -> u64 {
    event.get(field).and_then(Value::as_u64).unwrap_or(0)
}

fn check(id: &str, decoded: Event<'_>, input: &Value) {
    match decoded {
        Event::Stored(stored) => {
            assert_eq!(text(input, "type"), Some("BlockStored"), "{id}");
            assert_eq!(
                stored.keys.iter().map(|key| key.0).collect::<Vec<_>>(),
                keys_of(&input["block_hashes"]),
                "{id}"
            );
            assert_eq!(stored.keys.len() as usize, keys_of(&input["block_hashes"]).len(), "{id}");
            assert_eq!(stored.keys.last().map(|key| key.0), keys_of(&input["block_hashes"]).last().copied(), "{id}");
            assert_eq!(stored.parent.map(|key| key.0), key_of(&input["parent_block_hash"]), "{id}");
            let tokens = input["token_ids"].as_array().unwrap();
            assert_eq!(stored.tokens.len() as usize, tokens.len(), "{id}");
            let mut ids = Vec::new();
            assert!(stored.tokens.decode(&mut ids), "{id}");
            assert!(tokens.iter().map(|token| token.as_u64().unwrap()).eq(ids.iter().map(|id| u64::from(*id))), "{id}");
            let marked = |extra: &Value| extra.as_array().is_some_and(|keys| !keys.is_empty());
            let expected = input["extra_keys"].as_array().cloned().unwrap_or_default();
            let told = stored.marks.extra_keys().map(|extra| extra.is_some()).collect::<Vec<_>>();
            assert_eq!(told, expected.iter().map(marked).collect::<Vec<_>>(), "{id}");
            assert_eq!(stored.marks.lora_name(), text(input, "lora_name"), "{id}");
            assert_eq!(u64::from(stored.block_tokens), number(input, "block_size"), "{id}");
            assert_eq!(stored.medium, text(input, "medium"), "{id}");
            assert_eq!(u64::from(stored.group), number(input, "group_idx"), "{id}");
            assert_eq!(stored.kind, text(input, "kv_cache_spec_kind"), "{id}");
        }
        Event::Removed(removed) => {
            assert_eq!(text(input, "type"), Some("BlockRemoved"), "{id}");
            assert_eq!(
                removed.keys.iter().map(|key| key.0).collect::<Vec<_>>(),
                keys_of(&input["block_hashes"]),
                "{id}"
            );
            assert_eq!(removed.medium, text(input, "medium"), "{id}");
            assert_eq!(u64::from(removed.group), number(input, "group_idx"), "{id}");
        }
        Event::Cleared => assert_eq!(text(input, "type"), Some("AllBlocksCleared"), "{id}"),
    }
}

#[test]
fn every_payload_of_every_release_decodes_as_it_was_encoded() {
    let vectors: Value = serde_json::from_str(VECTORS).unwrap();
    let cases = vectors["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 191, "the vectors are complete");
    for case in cases {
        let id = case["id"].as_str().unwrap();
        let payload = bytes_of(case["payload_hex"].as_str().unwrap());
        let events: Vec<_> = Batch::open(&payload).unwrap().map(|event| event.unwrap()).collect();
        let inputs = case["input"]["events"].as_array().unwrap();
        assert_eq!(events.len(), inputs.len(), "{id}");
        for (event, input) in events.into_iter().zip(inputs) {
            check(id, event, input);
        }
        check_any_bytes(&payload);
    }
}

/// `[1.0, events, 0]` around events that are already msgpack.
fn batch(events: &[&[u8]]) -> Vec<u8> {
    let mut bytes = vec![0x93, 0xca, 0x3f, 0x80, 0, 0, 0x90 | events.len() as u8];
    for event in events {
        bytes.extend_from_slice(event);
    }
    bytes.push(0);
    bytes
}

fn outline(payload: &[u8]) -> Vec<Result<&'static str, Reject>> {
    let name = |event: Event<'_>| match event {
        Event::Stored(_) => "stored",
        Event::Removed(_) => "removed",
        Event::Cleared => "cleared",
    };
    Batch::open(payload).map_or_else(|why| vec![Err(why)], |batch| batch.map(|event| event.map(name)).collect())
}

const CLEAR: &[u8] = b"\x91\xb0AllBlocksCleared";
/// A removal of key 5 whose map is spelled with a 32-bit header, keys in another order and two unknown entries.
const ODD_REMOVAL: &[u8] =
    b"\xdf\x00\x00\x00\x04\xacblock_hashes\x91\x05\xa1x\x92\xc0\x81\xa1y\x01\x07\xc3\xa4type\xacBlockRemoved";

#[test]
fn one_bad_event_costs_no_neighbour() {
    let cases: [(&[u8], Reject); 9] = [
        (b"\x07", Reject::Event),
        (b"\x90", Reject::Event),
        (b"\x91\x05", Reject::Event),
        (b"\x81\xa1x\xc0", Reject::Event),
        (b"\x92\xa5Later\xc0", Reject::Tag),
        (b"\x91\xacBlockRemoved", Reject::Field),
        (b"\x92\xacBlockRemoved\xa1x", Reject::Field),
        (b"\x92\xacBlockRemoved\x91\xc4\x07\x01\x02\x03\x04\x05\x06\x07", Reject::Field),
        (b"\x93\xacBlockRemoved\x91\x05\x05", Reject::Field),
    ];
    for (bad, why) in cases {
        let payload = batch(&[CLEAR, bad, ODD_REMOVAL]);
        assert_eq!(outline(&payload), [Ok("cleared"), Err(why), Ok("removed")], "{bad:02x?}");
        check_any_bytes(&payload);
    }
}

#[test]
fn bytes_that_end_inside_an_event_lose_only_what_follows() {
    let mut payload = batch(&[CLEAR, ODD_REMOVAL, CLEAR]);
    payload.truncate(7 + CLEAR.len() + 20);
    assert_eq!(outline(&payload), [Ok("cleared"), Err(Reject::Framing)]);
}

#[test]
fn what_is_no_batch_is_refused_whole() {
    for payload in [&b""[..], b"\xc0", b"\x90", b"\x91\x01", b"\x92\xc0\x90", b"\x92\x01\x05", b"\x81\x01\x02"] {
        assert_eq!(outline(payload), [Err(Reject::Batch)], "{payload:02x?}");
    }
    assert_eq!(outline(b"\x92\x01\x90"), []);
    let mut junk_behind = batch(&[CLEAR]);
    junk_behind.extend_from_slice(b"\xc1junk");
    assert_eq!(outline(&junk_behind), [Ok("cleared")]);
}

#[test]
fn negative_and_small_integers_are_keys() {
    let payload = batch(&[b"\x92\xacBlockRemoved\x93\xff\xcc\x80\xcf\xff\xff\xff\xff\xff\xff\xff\xfe"]);
    let Some(Ok(Event::Removed(removed))) = Batch::open(&payload).unwrap().next() else { panic!("a removal") };
    assert_eq!(removed.keys.iter().map(|key| key.0).collect::<Vec<_>>(), [u64::MAX, 128, u64::MAX - 1]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1_000) })]

    #[test]
    fn any_bytes_are_read_without_panic(payload in prop::collection::vec(any::<u8>(), 0..64)) {
        check_any_bytes(&payload);
        check_any_bytes(&batch(&[CLEAR, &payload, CLEAR]));
    }

    #[test]
    fn any_change_of_a_real_payload_is_read_without_panic(
        case in 0_usize..191, changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)
    ) {
        static PAYLOADS: std::sync::LazyLock<Vec<Vec<u8>>> = std::sync::LazyLock::new(|| {
            let vectors: Value = serde_json::from_str(VECTORS).unwrap();
            let cases = vectors["cases"].as_array().unwrap();
            cases.iter().map(|case| bytes_of(case["payload_hex"].as_str().unwrap())).collect()
        });
        let mut payload = PAYLOADS[case].clone();
        for (place, byte) in changes {
            let place = place.index(payload.len());
            payload[place] = byte;
        }
        check_any_bytes(&payload);
    }
}
