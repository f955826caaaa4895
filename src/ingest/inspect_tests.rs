use serde_json::json;
use shards::service::Engine;

use super::*;

/// `[1.5, [["BlockRemoved", [5, -1, <8 bytes>], "GPU"], ["Mystery"], 7], 3]`
fn batch() -> Vec<u8> {
    let mut bytes = vec![0x93, 0xcb];
    bytes.extend(1.5_f64.to_be_bytes());
    bytes.extend([0x93, 0x93, 0xac]);
    bytes.extend(b"BlockRemoved");
    bytes.extend([0x93, 5, 0xff, 0xc4, 16]);
    bytes.extend((1..=16).collect::<Vec<u8>>());
    bytes.extend([0xa3, b'G', b'P', b'U', 0x91, 0xa7]);
    bytes.extend(b"Mystery");
    bytes.extend([7, 3]);
    bytes
}

#[test]
fn a_batch_is_shown_with_its_time_rank_keys_and_what_is_rejected() {
    let bytes = batch();
    let seq = 9_u64.to_be_bytes();
    let shown = message(Engine::Vllm, &[b"kv", &seq, &bytes], false);
    assert_eq!(
        (&shown["seq"], &shown["topic"], &shown["time"], &shown["rank"]),
        (&json!(9), &json!("kv"), &json!(1.5), &json!(3))
    );
    let keys = &shown["events"][0]["keys"];
    assert_eq!(keys[0], json!({"u64": "5", "hex": "0000000000000005"}));
    assert_eq!(keys[1], json!({"u64": "18446744073709551615", "hex": "ffffffffffffffff"}));
    assert_eq!(
        (&keys[2]["hex"], &keys[2]["digest"]),
        (&json!("090a0b0c0d0e0f10"), &json!("0102030405060708090a0b0c0d0e0f10"))
    );
    assert_eq!(shown["events"][1], json!({"rejected": "tag", "bytes": "91a74d797374657279"}));
    assert_eq!(shown["events"][2], json!({"rejected": "event", "bytes": "07"}));
    let trtllm = message(Engine::Trtllm, &[b"kv", &seq, &bytes], false);
    assert_eq!(trtllm["events"][0]["keys"][2]["hex"], "0102030405060708", "its digests count by their first bytes");
}

#[test]
fn replayed_messages_their_end_and_what_is_no_message_are_told_apart() {
    let (bytes, seq) = (batch(), 4_u64.to_be_bytes());
    let topic = message(Engine::Vllm, &[b"", b"kv", &seq, &bytes], true);
    assert_eq!((&topic["seq"], &topic["topic"]), (&json!(4), &json!("kv")));
    assert_eq!(message(Engine::Vllm, &[b"", &[0xff; 8], b""], true), json!({"replay_end": true}));
    assert_eq!(message(Engine::Vllm, &[b"kv", b"1"], false), json!({"rejected": "frames", "frames": ["6b76", "31"]}));
    let broken = payload(Engine::Vllm, &bytes[..30]);
    assert_eq!(broken["events"][0]["rejected"], "framing");
    assert!(broken.get("rank").is_none());
    assert_eq!(payload(Engine::Vllm, b"\xc1")["rejected"], "batch");
}

#[test]
fn a_drain_is_shown_event_by_event() {
    let body =
        br#"[{"event_id": 3, "data": {"type": "removed", "block_hashes": [1, 18446744073709551615]}}, {"data": 1}]"#;
    let shown = drained(body);
    assert_eq!((&shown[0]["event_id"], &shown[0]["type"]), (&json!(3), &json!("removed")));
    assert_eq!(shown[0]["keys"][1]["u64"], "18446744073709551615");
    assert!(shown[1]["rejected"].is_string(), "{shown:?}");
}
