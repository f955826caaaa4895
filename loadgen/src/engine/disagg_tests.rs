//! The three dialects played by hand against simulated engines: what goes well, and what is refused.

use std::net::IpAddr;

use serde_json::{Value, json};

use super::client::{call, connect, eventually, receive, send, send_with, start};
use super::{EngineHandle, EngineKind, EngineOptions, LegEnd, LegKind, Role};

const CHAT: &str = "/v1/chat/completions";

fn engine(kind: EngineKind, role: Role, change: fn(&mut EngineOptions)) -> EngineHandle {
    start(|options| {
        (options.kind, options.role, options.block_size) = (kind, role, 16);
        options.pd_wait_ms = 2000;
        change(options);
    })
}

fn request(more: &[(&str, Value)]) -> Vec<u8> {
    let mut body = json!({"messages": [{"role": "user", "content": "the lake is deep"}], "max_tokens": 5});
    more.iter().for_each(|(name, value)| body[*name] = value.clone());
    body.to_string().into_bytes()
}

fn with_id(engine: &EngineHandle, id: &str, body: &[u8]) -> (u16, String) {
    let mut stream = connect(engine.http_addr);
    send_with(&mut stream, "POST", CHAT, &format!("X-Request-Id: {id}\r\n"), body);
    let (status, body) = receive(stream);
    (status, String::from_utf8(body).expect("an answer is text"))
}

fn member<'a>(answer: &'a str, name: &str) -> &'a str {
    let from = answer.find(&format!("\"{name}\":")).expect("the member is there") + name.len() + 3;
    let mut depth = 0;
    for (at, byte) in answer[from..].bytes().enumerate() {
        depth += i32::from(byte == b'{') - i32::from(byte == b'}');
        if depth == 0 {
            return &answer[from..=from + at];
        }
    }
    panic!("{answer} ends inside {name}");
}

fn pull() -> Vec<u8> {
    let params = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_host": null});
    let mut body: Value = serde_json::from_slice(&request(&[("kv_transfer_params", params)])).expect("JSON");
    body["max_tokens"] = json!(1);
    body.to_string().into_bytes()
}

fn spliced(params: &str) -> Vec<u8> {
    let mut body = request(&[]);
    body.pop();
    [&body[..], b",\"kv_transfer_params\":", params.as_bytes(), b"}"].concat()
}

#[test]
fn a_nixl_pull_hands_its_params_over_once_and_verbatim() {
    for change in [(|_| ()) as fn(&mut EngineOptions), |options| options.nested_params = true] {
        let prefill = engine(EngineKind::Vllm, Role::Prefill, change);
        let decode = engine(EngineKind::Vllm, Role::Decode, |_| ());
        let (status, answer) = with_id(&prefill, "a", &pull());
        assert_eq!(status, 200, "{answer}");
        let params = member(&answer, "kv_transfer_params");
        let (altered, _) = with_id(&decode, "a", &spliced(&params.replace(" : ", ":")));
        assert_eq!((altered, decode.stats().pd_violations), (500, 1), "other spelling is another thing");
        assert_eq!(with_id(&decode, "b", &spliced(params)).0, 500, "the legs have one X-Request-Id");
        let (status, answer) = with_id(&decode, "a", &spliced(params));
        let alone = engine(EngineKind::Vllm, Role::None, |_| ());
        let whole: Value = serde_json::from_str(&answer).expect("JSON");
        let same: Value = serde_json::from_str(&with_id(&alone, "a", &request(&[])).1).expect("JSON");
        assert_eq!((status, &whole["choices"]), (200, &same["choices"]), "both legs make one engine's answer");
        assert_eq!(with_id(&decode, "a", &spliced(params)).0, 500, "it is taken once");
        let invented = params.replace("-00000000", "-0000ffff");
        assert_eq!(with_id(&decode, "a", &spliced(&invented)).0, 500, "it was never issued");
        assert_eq!(decode.stats().pd_violations, 4);
        let kinds: Vec<_> = decode.legs().iter().map(|leg| (leg.kind, leg.ended.map(|(_, end)| end))).collect();
        assert_eq!(kinds[2], (LegKind::Decode, Some(LegEnd::Finished)));
        assert_eq!(prefill.stats().pd_held, 0);
    }
}

#[test]
fn a_nixl_prefill_leg_that_is_not_cut_down_is_refused() {
    let prefill = engine(EngineKind::Vllm, Role::Prefill, |options| options.nixl_port = Some(5600));
    let good: Value = serde_json::from_slice(&pull()).expect("JSON");
    let id = "___prefill_addr_127.0.0.1:5600___decode_addr_127.0.0.1_0123456789abcdef0123456789abcdef";
    for (name, value) in
        [("stream", json!(true)), ("max_tokens", json!(5)), ("stream_options", json!({})), ("min_tokens", json!(3))]
    {
        let mut body = good.clone();
        body[name] = value;
        assert_eq!(with_id(&prefill, id, body.to_string().as_bytes()).0, 400, "{name}");
    }
    assert_eq!(with_id(&prefill, id, &pull()).0, 200);
    assert_eq!(with_id(&prefill, "plain", &pull()).0, 400);
}

#[test]
fn a_nixl_push_waits_for_the_prefill_leg_of_its_id() {
    let prefill = engine(EngineKind::Vllm, Role::Prefill, |options| options.nixl_push = true);
    let decode = engine(EngineKind::Vllm, Role::Decode, |_| ());
    let side = prefill.side_addr().expect("a prefill engine has one");
    let params = json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": format!("engine-{side}"),
        "remote_host": side.ip().to_string(), "remote_port": side.port(), "remote_request_id": "p", "tp_size": 1,
    });
    let mut waiting = connect(decode.http_addr);
    let body = request(&[("kv_transfer_params", params)]);
    send_with(&mut waiting, "POST", CHAT, "X-Request-Id: p\r\n", &body);
    assert_eq!(with_id(&prefill, "p", &pull()).0, 200);
    assert_eq!(receive(waiting).0, 200);
    assert_eq!(with_id(&prefill, "p", &pull()).0, 400, "an id is used once");
    assert_eq!(with_id(&decode, "nobody", &body).0, 500);
}

fn rooms(prefill: &EngineHandle, room: u64) -> Vec<u8> {
    let side = prefill.side_addr().expect("a prefill engine has one");
    request(&[
        ("bootstrap_host", json!(side.ip().to_string())),
        ("bootstrap_port", json!(side.port())),
        ("bootstrap_room", json!(room)),
    ])
}

#[test]
fn an_sglang_room_joins_two_legs_and_is_used_once() {
    let host = |options: &mut EngineOptions| {
        options.host = IpAddr::from([127, 0, 0, 2]);
        options.dp = 2;
    };
    let prefill = engine(EngineKind::Sglang, Role::Prefill, host);
    let decode = engine(EngineKind::Sglang, Role::Decode, |_| ());
    assert_eq!(call(&prefill, "POST", CHAT, &request(&[])).0, 400, "a room is needed");
    let body = rooms(&prefill, 41);
    let mut waiting = connect(prefill.http_addr);
    send(&mut waiting, "POST", CHAT, &body);
    assert_eq!(call(&decode, "POST", CHAT, &body).0, 200);
    assert_eq!(receive(waiting).0, 200);
    assert_eq!(prefill.cached_keys_of(0).map(|keys| keys.len()), Some(0), "room 41 is of rank 1");
    assert!(prefill.cached_keys_of(1).is_some_and(|keys| !keys.is_empty()));
    assert_eq!(call(&prefill, "POST", CHAT, &body).0, 400, "a room is used once");
    assert_eq!(call(&decode, "POST", CHAT, &body).0, 500);
    assert!(prefill.stats().pd_violations >= 2 && decode.stats().pd_violations == 1);
}

#[test]
fn an_sglang_prefill_leg_that_is_given_up_fails_its_decode_leg() {
    let prefill = engine(EngineKind::Sglang, Role::Prefill, |_| ());
    let decode = engine(EngineKind::Sglang, Role::Decode, |_| ());
    let body = rooms(&prefill, 7);
    let mut leaves = connect(prefill.http_addr);
    send(&mut leaves, "POST", CHAT, &body);
    eventually("it has begun", || prefill.stats().pd_held == 1);
    drop(leaves);
    eventually("it was given up", || prefill.stats().disconnects == 1);
    assert_eq!(call(&decode, "POST", CHAT, &body).0, 500);
    assert_eq!(prefill.legs()[0].ended.map(|(_, end)| end), Some(LegEnd::Cancelled));
}

fn generation(params: &str, ids: &Value) -> Vec<u8> {
    let mut body = request(&[]);
    body.pop();
    let params = params.replacen("context_only", "generation_only", 1);
    let ids = ids.to_string();
    [&body[..], b",\"disaggregated_params\":", params.as_bytes(), b",\"prompt_token_ids\":", ids.as_bytes(), b"}"]
        .concat()
}

#[test]
fn a_trtllm_context_leg_is_gone_on_from_with_its_params_ids_and_signature() {
    let context = engine(EngineKind::Trtllm, Role::Prefill, |_| ());
    let generate = engine(EngineKind::Trtllm, Role::Decode, |options| options.disagg_auth_key = Some("k3y".to_owned()));
    let ask = |id: u64| json!({"request_type": "context_only", "disagg_request_id": id});
    let leg = |id: u64, more: &[(&str, Value)]| {
        let members = [&[("disaggregated_params", ask(id))], more].concat();
        with_id(&context, "x", &request(&members))
    };
    assert_eq!(leg(5 << 42, &[("stream", json!(true))]).0, 400);
    assert_eq!(leg(7, &[]).0, 400, "small ids are the engine's own");
    let (status, answer) = leg(5 << 42, &[]);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(leg(5 << 42, &[]).0, 400, "an id is used once");
    let params = member(&answer, "disaggregated_params");
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let body = generation(params, &answer["prompt_token_ids"]);
    assert_eq!(with_id(&generate, "x", &body).0, 400, "it is not signed");
    let unsigned = engine(EngineKind::Trtllm, Role::Decode, |_| ());
    assert_eq!(with_id(&unsigned, "x", &generation(params, &json!([1, 2, 3]))).0, 500, "other ids");
    assert_eq!(with_id(&unsigned, "x", &body).0, 200);
    assert_eq!(with_id(&unsigned, "x", &body).0, 500, "it is taken once");
}
