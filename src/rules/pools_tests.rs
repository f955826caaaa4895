//! How a rule says that endpoints are chosen: `sel`, sessions, pools, and the blend.

use serde_json::{Value, json};
use shards::ids::ServiceId;

use super::tests::{accepted, body, refused, request, two};
use super::*;
use crate::fields::{Kind, from_json};

#[test]
fn every_sel_is_taken_and_shown_and_one_left_out_stays_left_out() {
    for (sel, expected) in [
        (json!(0), Select::RoundRobin),
        (json!(1), Select::ClientHash),
        (json!(2), Select::Weighted),
        (json!(3), Select::Persist),
        (json!(4), Select::LeastConnections),
        (json!(8), Select::BoundedHash),
        (json!(9), Select::PrefixHash),
        (json!(10), Select::WeightedHash),
        (json!(null), Select::Expected),
    ] {
        let rule = accepted(&body(json!({"sel": sel}), two()));
        assert_eq!(rule.select, expected, "{sel}");
        let shown = readback(&rule, ServiceId(0), &[]);
        assert_eq!(shown["serviceArguments"]["sel"], if sel.is_null() { json!(0) } else { sel.clone() });
        assert_eq!(accepted(&shown), rule, "{sel}: a readback posted again is the same rule");
    }
}

#[test]
fn hashing_is_read_where_a_sel_asks_for_it_and_named_elsewhere() {
    let options = json!({"sel": 8, "chwbl_prefix_hash_level": 3, "chwbl_prefix_hash_flags": 255,
        "chwbl_mean_load_factor": 150, "chwbl_replication": 7});
    let (rule, warnings) = request(&body(options.clone(), two())).expect("accepted");
    assert_eq!(
        rule.hashing,
        PrefixHashing { level: 3, flags: 255, mean_load_factor: 150, replication: 7, user_bytes: 256 }
    );
    assert_eq!(warnings, []);
    assert_eq!(accepted(&readback(&rule, ServiceId(0), &[])), rule);
    let mut unused = options;
    unused["sel"] = json!(0);
    let (_, warnings) = request(&body(unused, two())).expect("accepted");
    assert_eq!(warnings.len(), 4, "{warnings:?}");
    let defaults = accepted(&body(json!({"sel": 8}), two())).hashing;
    assert_eq!(
        defaults,
        PrefixHashing { level: 1, flags: 0, mean_load_factor: 125, replication: 100, user_bytes: 256 }
    );
    for (name, low, high) in [
        ("chwbl_prefix_hash_level", 0, 4),
        ("chwbl_prefix_hash_flags", -1, 256),
        ("chwbl_mean_load_factor", 99, 301),
        ("chwbl_replication", 0, 1025),
    ] {
        for value in [low, high] {
            refused(
                &body(json!({"sel": 8, name: value}), two()),
                Kind::Invalid,
                &format!("{name}: {value} is not within"),
            );
        }
    }
}

#[test]
fn sessions_are_kept_where_something_uses_them() {
    use shards::service::SessionSource;
    use std::time::Duration;

    let sessions = |changes: Value| {
        let (rule, warnings) = request(&body(changes, two())).expect("accepted");
        assert_eq!(accepted(&readback(&rule, ServiceId(0), &[])), rule);
        (rule.sessions, warnings.len())
    };
    let of = |source, seconds, max| Some(Sessions { source, ttl: Duration::from_secs(seconds), max });
    assert_eq!(sessions(json!({})), (None, 0));
    assert_eq!(sessions(json!({"sel": 3})), (of(None, 10_800, 65_536), 0));
    for (text, source) in [
        ("X-Session", SessionSource::Header("x-session".into())),
        ("cookie:SID", SessionSource::Cookie("SID".into())),
        ("query:sid", SessionSource::Query("sid".into())),
        ("basic-auth", SessionSource::BasicAuth),
    ] {
        for sel in [json!(null), json!(0), json!(3)] {
            let changes =
                json!({"sel": sel, "session_header_name": text, "pd_session_ttl_sec": 60, "pd_session_max": 9});
            assert_eq!(sessions(changes), (of(Some(source.clone()), 60, 9), 0), "{text}");
        }
        assert_eq!(sessions(json!({"sel": 4, "session_header_name": text})), (None, 1), "{text}: it is named");
    }
    for text in ["two words", "cookie:", "query:a b", "header:x", ":x"] {
        let posted = body(json!({"session_header_name": text}), two());
        refused(&posted, Kind::Invalid, &format!("session_header_name: {text:?} is none of"));
    }
}

/// A P/D rule over one endpoint of each role, with members of `serviceArguments` replaced or added.
fn pd(changes: Value) -> Value {
    let mut endpoints = two();
    (endpoints[0]["ep_role"], endpoints[1]["ep_role"]) = (json!(1), json!(2));
    let mut posted = body(json!({"pd_disagg_mode": true, "kvExactMode": 1}), endpoints);
    for (name, value) in changes.as_object().expect("an object") {
        posted["serviceArguments"][name] = value.clone();
    }
    posted
}

#[test]
fn pools_have_the_reference_defaults_and_what_a_rule_says() {
    let disagg = |changes: Value| {
        let rule = accepted(&pd(changes));
        assert_eq!(accepted(&readback(&rule, ServiceId(0), &[])), rule);
        (rule.pd.expect("a P/D rule"), rule.sessions.expect("P/D rules keep sessions"))
    };
    let by_default = Disagg::default();
    let stated = (by_default.cache_aware, by_default.cache_threshold, by_default.balance_threshold);
    assert_eq!((stated, by_default.bootstrap_port), ((false, 20, 3), 8998));
    let (pools, sessions) = disagg(json!({}));
    assert_eq!((pools, sessions.ttl.as_secs(), sessions.source), (by_default, 300, None));
    let zeros = json!({"pd_cache_aware_mode": true, "pd_cache_threshold": 0, "pd_balance_abs_threshold": 0,
        "pd_session_ttl_sec": 0});
    let (pools, sessions) = disagg(zeros);
    assert_eq!((pools, sessions.ttl.as_secs()), (Disagg { cache_aware: true, ..Disagg::default() }, 300));
    let own = json!({"pd_cache_aware_mode": true, "pd_cache_threshold": 100, "pd_balance_abs_threshold": 255,
        "pd_session_ttl_sec": 7, "session_header_name": "x-s"});
    let (pools, sessions) = disagg(own);
    assert_eq!(pools, Disagg { cache_aware: true, cache_threshold: 100, balance_threshold: 255, ..Disagg::default() });
    assert_eq!(sessions.ttl.as_secs(), 7);
    let sglang = json!({"kvEngineType": "sglang", "kvHashAlgo": null, "pdBootstrapPort": 9000});
    assert_eq!(disagg(sglang).0, Disagg { bootstrap_port: 9000, ..Disagg::default() });
    for (changes, text) in [
        (json!({"pdBootstrapPort": 9000}), "pd-bootstrap-port requires pd_disagg_mode=true and kv-engine-type sglang"),
        (json!({"pd_cache_threshold": 101}), "pd_cache_threshold: 101 is not within 0 to 100"),
        (json!({"pd_balance_abs_threshold": 256}), "pd_balance_abs_threshold: 256 is not within 0 to 255"),
        (json!({"pd_session_ttl_sec": -1}), "pd_session_ttl_sec: -1 is not within 0 to"),
        (json!({"mode": 0}), "pd-disagg requires mode=fullproxy"),
    ] {
        refused(&pd(changes), Kind::Invalid, text);
    }
    let bypass = |name: &str, tokens: u32| disagg(json!({"pdBypass": name, "pdBypassTokens": tokens})).0;
    assert_eq!(bypass("short", 0), Disagg { bypass: Bypass::Short, ..Disagg::default() });
    assert_eq!(bypass("held", 64), Disagg { bypass: Bypass::Held, bypass_tokens: 64, ..Disagg::default() });
    for (changes, text) in [
        (json!({"pdBypass": "yes"}), "pdBypass: \"yes\" is none of \"off\", \"short\", \"held\""),
        (json!({"pdBypass": "short", "kvEngineType": "sglang", "kvHashAlgo": null}), "pdBypass: is refused for this"),
        (
            json!({"pdBypass": "held", "kvEngineType": "trtllm", "kvHashAlgo": null}),
            "pdBypass: \"held\" is refused for kv-engine-type trtllm",
        ),
        (json!({"pdBypass": "held", "kvExactMode": 0}), "pdBypass: \"held\" requires kvExactMode=1"),
        (json!({"pdBypass": "short", "pd_disagg_mode": false}), "pdBypass: requires pd_disagg_mode=true"),
        (json!({"pdBypassTokens": 1 << 21}), "pdBypassTokens: 2097152 is not within 0 to 1048576"),
    ] {
        refused(&pd(changes), Kind::Invalid, text);
    }
    // Events of decode endpoints are read for nothing else.
    for (name, reads) in [("off", false), ("short", false), ("held", true)] {
        let rule = accepted(&pd(json!({"pdBypass": name})));
        assert_eq!((rule.looks_at_decode(), rule.endpoints[1].events.is_some()), (reads, reads), "{name}");
        assert!(rule.endpoints[0].events.is_some());
    }
    // Without Tier 1.5 too, and the KV options are then named.
    let rule = accepted(&pd(json!({"kvExactMode": 0})));
    assert!(rule.kv.is_none() && rule.pd.is_some());
    let mut one = pd(json!({}));
    one["endpoints"][1]["ep_role"] = json!(0);
    refused(&one, Kind::Invalid, "pd-disagg requires at least 1 prefill (ep_role=1) and 1 decode (ep_role=2) endpoint");
    one["endpoints"][0]["ep_role"] = json!(3);
    refused(&one, Kind::Invalid, "endpoints[0].ep_role: 3 is not within 0 to 2");
}

#[test]
fn the_blend_is_the_rules_else_the_variables_else_the_older_switchs() {
    let env = |pairs: &[(&str, &str)]| {
        KvDefaults::from_env(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
    };
    let blend = |pairs: &[(&str, &str)]| env(pairs).expect("all in range").blend;
    const MODE: &str = "LOXILB_KV_LB_MODE";
    const UNIFIED: &str = "LOXILB_KV_UNIFIED_MODE";
    let default = KvDefaults::default().blend;
    assert_eq!(blend(&[]), default);
    for mode in Blend::ALL {
        assert_eq!(blend(&[(MODE, mode.name())]), mode);
        assert_eq!(blend(&[(MODE, mode.name()), (UNIFIED, "0")]), mode, "the older switch counts only without it");
        let rule = accepted(&body(json!({"kvLbMode": mode.name()}), two()));
        assert_eq!(rule.kv.as_ref().expect("a KV rule").blend, mode);
        assert_eq!(accepted(&readback(&rule, ServiceId(0), &[])), rule);
    }
    assert_eq!((blend(&[(UNIFIED, "off")]), blend(&[(UNIFIED, "1")])), (Blend::Off, default));
    let defaults = env(&[
        (MODE, "soft"),
        ("LOXILB_KV_LOAD_PENALTY", "100000"),
        ("LOXILB_KV_CAP_SUM_MILLI", "1910539"),
        ("LOXILB_KV_ZERO_HIT_N", "7"),
    ])
    .expect("all in range");
    let of = |changes: Value| {
        let node = from_json(body(changes, two()).to_string().as_bytes()).expect("JSON");
        let kv = check_request(&node, &defaults).expect("accepted").0.kv.expect("a KV rule");
        (kv.blend, kv.load_penalty, kv.capacity_sum_milli, kv.zero_hit_every)
    };
    assert_eq!(of(json!({})), (Blend::Soft, 100_000, Some(1_910_539), 7));
    let own = json!({"kvLbMode": "adaptive", "kvLoadPenalty": 1, "kvCapSumMilli": 122_274_480, "kvZeroHitN": 9});
    assert_eq!(of(own), (Blend::Adaptive, 1, Some(122_274_480), 9));
    for (name, value, range) in [
        (MODE, "best", "none of off, hard, soft, adaptive, adaptive-soft, ttft"),
        (UNIFIED, "maybe", "none of 1, true, on, yes, 0, false, off, no"),
        ("LOXILB_KV_LOAD_PENALTY", "0", "not a whole number within 1 to 100000"),
        ("LLB_LLM_USER_PREFIX_FALLBACK_LEN", "0", "not a whole number within 1 to 4096"),
        ("LLB_LLM_USER_PREFIX_FALLBACK_LEN", "4097", "not a whole number within 1 to 4096"),
        ("LOXILB_KV_CAP_SUM_MILLI", "1910538", "not a whole number within 1910539 to 122274480"),
        ("LOXILB_KV_ZERO_HIT_N", "0", "not a whole number within 1 to 1000000"),
        ("LOXILB_KV_COLDSTART_SEED_N", "-1", "not a whole number within 0 to 1000000"),
    ] {
        let problems = env(&[(name, value)]).expect_err("out of range");
        assert_eq!(problems[0].to_string(), format!("{name}: {value:?} is {range}"));
    }
    for (name, value, text) in [
        ("kvLbMode", json!("best"), "\"best\" is none of \"off\", \"hard\""),
        ("kvLoadPenalty", json!(100_001), "100001 is not within 1 to 100000"),
        ("kvCapSumMilli", json!(1), "1 is not within 1910539 to 122274480"),
        ("kvZeroHitN", json!(0), "0 is not within 1 to 1000000"),
    ] {
        refused(&body(json!({name: value}), two()), Kind::Invalid, &format!("{name}: {text}"));
    }
}

#[test]
fn variables_of_the_reference_are_gone_by_or_named() {
    let of_the_reference = [
        "LLB_KV_NONE_HASH_SEED",
        "LLB_KV_MIN_MATCH_TOKENS",
        "LOXILB_KV_LB_MODE",
        "LOXILB_KV_MEAN_LOAD_FACTOR",
        "LOXILB_KV_LOAD_PENALTY",
        "LOXILB_KV_CAP_SUM_MILLI",
        "LOXILB_KV_UNIFIED_MODE",
        "LOXILB_KV_SPILL_RELIEF",
        "LOXILB_KV_COLDSTART_SEED_N",
        "LOXILB_KV_COLDSTART_MIN_BLOCKS",
        "LOXILB_KV_ZERO_HIT_N",
        "LOXILB_KV_MAX_BLOCKS",
        "LLB_KV_REPLAY_PORT_OFFSET",
        "LOXILB_KV_TRTLLM_POLL_MIN_MS",
        "LOXILB_KV_TRTLLM_POLL_MAX_MS",
        "LLB_PD_PREFILL_TIMEOUT_SEC",
        "LLB_PD_MAX_INFLIGHT_PER_EP",
        "LLB_PD_QUEUE_DEPTH_PER_EP",
        "LLB_PD_MAX_PARK_SEC",
        "LLB_PD_MAX_TOTAL_INFLIGHT",
        "LLB_PD_ORIGIN_ERR_THRESHOLD",
        "LLB_LLM_USER_PREFIX_FALLBACK_LEN",
    ];
    let named = |names: &[&str]| -> Vec<String> {
        let unused = KvDefaults::unused(names.iter().map(|name| (*name).to_owned()));
        unused.iter().map(ToString::to_string).collect()
    };
    assert_eq!(named(&of_the_reference), Vec::<String>::new());
    // Each of them is read: what none can be is refused.
    for name in of_the_reference {
        let other = "x".repeat(99);
        let read = KvDefaults::from_env(|asked| (asked == name).then(|| other.clone()));
        assert!(read.is_err_and(|problems| problems.iter().any(|problem| problem.key == name)), "{name}");
    }
    let without_effect = [
        "PATH",
        "LLB_FC_MODE",
        "LLB_KV_HASH_DEBUG",
        "LLB_KV_LOADGUARD",
        "LLB_KV_MIN_MATCH_TOKEN",
        "LOXILB_AI_CTRL_ADDR",
        "LOXILB_AI_CTRL_DECAY_WINDOW_SEC",
        "LOXILB_KV_TLOAD_LOG",
    ];
    let said = named(&without_effect);
    assert_eq!(said.len(), without_effect.len() - 1, "{said:?}");
    for (said, name) in said.iter().zip(&without_effect[1..]) {
        assert!(said.starts_with(&format!("{name}: is set and has no effect")), "{said}");
    }
    assert!(said[3].contains("no variable of this name is known"), "{said:?}");
}
