use serde_json::{Value, json};
use shards::ids::ServiceId;

use super::*;
use crate::fields::{Fields, Kind, Problem, Report, from_json, from_toml};

/// A single-pool rule that is right, with members of `serviceArguments` replaced or added.
pub(super) fn body(changes: Value, endpoints: Value) -> Value {
    let mut service = json!({"externalIP": "127.0.0.1", "port": 8080, "protocol": "tcp", "sel": 0, "mode": 4,
        "kvExactMode": 3, "kvBlockSize": 16, "kvHashAlgo": "sha256_cbor", "kvZmqPort": 5557});
    for (name, value) in changes.as_object().expect("changes are an object") {
        service[name] = value.clone();
    }
    json!({"serviceArguments": service, "endpoints": endpoints})
}

pub(super) fn two() -> Value {
    json!([{"endpointIP": "10.0.0.1", "targetPort": 8000, "weight": 1},
           {"endpointIP": "10.0.0.2", "targetPort": 8000, "weight": 1}])
}

pub(super) fn request(body: &Value) -> Result<(Rule, Vec<Problem>), Vec<Problem>> {
    let files = RuleFiles::new(&[std::env::temp_dir()], std::path::Path::new(TOKENIZERS_DIR));
    check_request(
        &from_json(body.to_string().as_bytes()).expect("JSON"),
        &KvDefaults { files, ..KvDefaults::default() },
    )
}

pub(super) fn accepted(body: &Value) -> Rule {
    request(body).unwrap_or_else(|problems| panic!("refused: {problems:?}")).0
}

#[track_caller]
pub(super) fn refused(body: &Value, kind: Kind, expected: &str) {
    let problems = request(body).expect_err("the rule must be refused");
    let texts: Vec<String> = problems.iter().map(ToString::to_string).collect();
    assert!(
        problems.iter().any(|p| p.kind == kind && p.to_string().contains(expected)),
        "{texts:?} lacks {expected:?}"
    );
}

#[test]
fn values_left_out_have_the_reference_defaults_in_the_readback() {
    let rule = accepted(&json!({"serviceArguments": {"externalIP": "127.0.0.1", "port": 8080, "mode": 4,
        "kvExactMode": 3}, "endpoints": two()}));
    let shown = readback(&rule, ServiceId(7), &[true, false]);
    let service = &shown["serviceArguments"];
    for (name, value) in [
        ("service_id", json!(7)),
        ("kvExactMode", json!(3)),
        ("kvBlockSize", json!(16)),
        ("kvHashAlgo", json!("sha256_cbor")),
        ("kvHashAlgoDefault", json!(true)),
        ("kvZmqPort", json!(5557)),
        ("kvWarmupSec", json!(30)),
        ("kvEngineType", json!("vllm")),
        ("kvDpRankCount", json!(1)),
        ("sel", json!(0)),
        ("mode", json!(4)),
        ("protocol", json!("tcp")),
        ("kvNoneHashSeed", json!("vllm-none-hash")),
    ] {
        assert_eq!(service[name], value, "{name}");
    }
    assert_eq!(shown["endpoints"][0]["state"], "active");
    assert_eq!(shown["endpoints"][1]["state"], "inactive");
}

#[test]
fn a_readback_posted_again_is_the_same_rule() {
    let endpoints = json!([
        {"endpointIP": "127.0.0.1", "targetPort": 8001, "weight": 2, "kvZmqPort": 6001, "kvReplayPort": 7001},
        {"endpointIP": "127.0.0.1", "targetPort": 8002, "weight": 1, "kvZmqBind": "tcp://127.0.0.1:6002"},
        {"endpointIP": "engine.example", "targetPort": 8002, "backup": true}]);
    let rule = accepted(&body(
        json!({"kvNoneHashSeed": "42", "host": "A.example", "path_prefix": "/v1", "path_match_mode": "prefix",
               "model_name": "Qwen/Qwen3", "kvDpRankCount": 0, "monitor": true, "name": "pool"}),
        endpoints,
    ));
    let (again, warnings) = request(&readback(&rule, ServiceId(0), &[])).expect("accepted");
    assert_eq!(again, rule);
    assert_eq!(warnings, []);
}

#[test]
fn refusals_name_the_value_and_what_is_expected() {
    let invalid = [
        (json!({"mode": null}), "mode: kv-exact single-role mode requires mode=fullproxy"),
        (json!({"mode": 2}), "mode: kv-exact single-role mode requires mode=fullproxy"),
        (json!({"mode": 0, "kvExactMode": 0}), "mode: 0 is refused: kvlane proxies HTTP or nothing"),
        (json!({"pd_disagg_mode": true, "mode": 0, "kvExactMode": 1}), "pd-disagg requires mode=fullproxy"),
        (
            json!({"pd_disagg_mode": true, "kvExactMode": 1}),
            "pd-disagg requires at least 1 prefill (ep_role=1) and 1 decode (ep_role=2) endpoint",
        ),
        (json!({"pd_cache_aware_mode": true}), "pd-cache-aware requires pd_disagg_mode=true"),
        (
            json!({"pd_disagg_mode": true}),
            "kv-exact single-role mode is incompatible with pd-disagg (use kvExactMode=1 for P/D)",
        ),
        (
            json!({"kvExactMode": 1}),
            "kv-exact zmq mode requires pd_disagg_mode=true (use kvExactMode=3 for a single pool)",
        ),
        (json!({"kvExactMode": 2}), "kvExactMode: 2 is reserved"),
        (json!({"kvExactMode": 4}), "kvExactMode: 4 is not within 0 to 3"),
        (json!({"kvEngineType": "ollama"}), "kv-engine-type must be one of \"vllm\", \"sglang\", \"trtllm\""),
        (json!({"kvDpRankCount": 9}), "kv-dp-rank-count must be within 1..8 (0 = default 1)"),
        (json!({"kvDpRankCount": -1}), "kv-dp-rank-count must be within 1..8 (0 = default 1)"),
        (json!({"kvZmqPort": 65530, "kvDpRankCount": 8}), "kvZmqPort: 65530 with 8 ranks ends beyond port 65535"),
        (json!({"kvHashAlgo": "sha256"}), "write \"sha256_cbor\""),
        (json!({"kvHashAlgo": "xxhash"}), "write \"xxhash_cbor\""),
        (json!({"kvHashAlgo": "xxhash128"}), "write \"xxhash_cbor\""),
        (json!({"kvHashAlgo": "md5"}), "kv-hash-algo must be one of"),
        (json!({"kvHashAlgo": "sha256_sglang"}), "incompatible with kv-engine-type \"vllm\" (omit kvHashAlgo to get"),
        (json!({"kvBlockSize": 1}), "kvBlockSize: 1 is not within 4 to 65536 tokens"),
        (json!({"kvBlockSize": 0}), "kvBlockSize: 0 is not within 4 to 65536 tokens"),
        (json!({"kvBlockSize": "16"}), "kvBlockSize: expected a whole number, found a text (\"16\")"),
        (json!({"kvNoneHashSeed": "123456789012345678901234"}), "kvNoneHashSeed: has 24 bytes, at most 23"),
        (json!({"kvChatTemplate": "/nonexistent/chat.jinja"}), "kvChatTemplate: /nonexistent/chat.jinja is in none of"),
        (json!({"kvChatTemplate": "/etc/passwd"}), "files under [admin] in the configuration file"),
        (json!({"engineTokenFile": "/etc/passwd"}), "engineTokenFile: /etc/passwd is in none of the directories"),
        (json!({"kvMeanLoadFactor": 99}), "kvMeanLoadFactor: 99 is not within 100 to 1000"),
        (json!({"pdBootstrapPort": 8998}), "pd-bootstrap-port requires pd_disagg_mode=true and kv-engine-type sglang"),
        (json!({"protocol": "udp"}), "protocol: \"udp\" is refused"),
        (json!({"sel": 5}), "sel: 5 (n2) is refused"),
        (json!({"sel": 6}), "sel: 6 (n3) works with udp only"),
        (json!({"sel": 7}), "sel: 7 is reserved"),
        (json!({"sel": 11}), "sel: 11 is not within 0 to 10"),
        (json!({"port": 65536}), "port: 65536 is not within 1 to 65535"),
        (json!({"port": null}), "port: missing"),
        (json!({"externalIP": "gateway"}), "externalIP: \"gateway\" is no IP address"),
        (json!({"externalIP": null}), "externalIP: missing"),
        (json!({"security": 3}), "security: 3 is not within 0 to 2"),
        (json!({"path_match_mode": "regex"}), "path_match_mode: \"regex\" is none of"),
        (json!({"path_match_mode": "exact"}), "path_prefix: \"\" must begin with \"/\""),
        (json!({"probeRetries": 101}), "probeRetries: 101 is not within 0 to 100"),
        (json!({"kvEngineType": "trtllm", "kvHashAlgo": null, "kvZmqPort": 6000}), "kvZmqPort is meaningless"),
    ];
    for (changes, expected) in invalid {
        refused(&body(changes, two()), Kind::Invalid, expected);
    }
}

#[test]
fn what_is_right_but_not_built_is_told_apart() {
    let later = [
        (json!({"security": 1}), "security: 1 is refused: TLS is not built yet"),
        (json!({"adminStateUp": false}), "adminStateUp: false is not built yet"),
        (json!({"portMax": 8090}), "portMax: 8090: port ranges are not built yet"),
        (json!({"api_key_auth": "required"}), "api_key_auth: \"required\" is refused"),
        (json!({"backend_protocol": "http2"}), "backend_protocol: \"http2\" is refused"),
        (json!({"mtls_frontend": {"client_cert_mode": "required"}}), "mtls_frontend"),
    ];
    for (changes, expected) in later {
        let problems = request(&body(changes, two())).expect_err("refused");
        assert!(problems.iter().all(|p| p.kind == Kind::NotYet), "{problems:?}");
        assert!(problems[0].to_string().contains(expected), "{problems:?} lacks {expected:?}");
    }
    let nothing = json!({"security": 0, "oper": 0, "portMax": 8080, "api_key_auth": "disabled", "fc_mode": "off",
        "backend_protocol": "http1", "mtls_frontend": {}, "adminStateUp": true, "egress": false});
    accepted(&body(nothing, two()));
}

/// The reference documentation's prefill/decode rule and its SGLang rule.
#[test]
fn the_documented_examples_are_understood() {
    let roles: Vec<Value> = (0..6)
        .map(|i| json!({"endpointIP": format!("10.0.0.{}", i + 1), "targetPort": 8080, "weight": 1, "ep_role": i % 2 + 1}))
        .collect();
    let disaggregated = json!({"serviceArguments": {"externalIP": "10.1.1.1", "port": 8080, "protocol": "tcp",
        "sel": 0, "mode": 4, "pd_disagg_mode": true, "kvExactMode": 1, "kvZmqPort": 5557,
        "kvHashAlgo": "sha256_cbor", "kvWarmupSec": 30, "kvBlockSize": 16}, "endpoints": roles});
    let sglang = json!({"serviceArguments": {"externalIP": "10.1.1.1", "port": 9090, "protocol": "tcp", "sel": 0,
        "mode": 4, "kvExactMode": 3, "kvEngineType": "sglang", "kvDpRankCount": 3, "kvZmqPort": 5561,
        "kvWarmupSec": 30, "kvBlockSize": 16}, "endpoints": two()});
    let (rule, warnings) = request(&disaggregated).expect("accepted");
    assert_eq!(warnings, []);
    assert_eq!(rule.endpoints.iter().map(|endpoint| endpoint.role.number()).collect::<Vec<_>>(), [1, 2, 1, 2, 1, 2]);
    let events: Vec<_> = rule.endpoints.iter().map(|endpoint| endpoint.events.is_some()).collect();
    assert_eq!(events, [true, false, true, false, true, false], "decode endpoints are not listened to");
    assert!(!rule.kv.as_ref().expect("a KV rule").spill_relief, "off in mode 1");
    let shown = readback(&rule, ServiceId(0), &[]);
    assert_eq!((&shown["serviceArguments"]["kvExactMode"], &shown["endpoints"][1]["ep_role"]), (&json!(1), &json!(2)));
    assert_eq!(request(&shown).expect("accepted").0, rule, "a readback posted again is the same rule");
    let (rule, warnings) = request(&sglang).expect("accepted");
    let kv = rule.kv.expect("a KV rule");
    assert_eq!((rule.engine, kv.algo, kv.ranks, kv.zmq_port), (Engine::Sglang, KvAlgo::Sha256Sglang, 3, 5561));
    assert_eq!(warnings, []);
}

#[test]
fn endpoints_are_checked_one_by_one_and_together() {
    let one = |more: Value| {
        let mut endpoint = json!({"endpointIP": "10.0.0.1", "targetPort": 8000});
        for (name, value) in more.as_object().expect("an object") {
            endpoint[name] = value.clone();
        }
        endpoint
    };
    let cases = [
        (json!([]), "endpoints: missing: a rule needs at least one endpoint"),
        (json!(null), "endpoints: missing: a rule needs at least one endpoint"),
        (json!([one(json!({"ep_role": 1}))]), "endpoints[0].ep_role: 1 is refused: kvExactMode 3 is a single pool"),
        (json!([one(json!({"endpointIP": "10.0.0.256"}))]), "malformed-lbep error: \"10.0.0.256\""),
        (json!([one(json!({"endpointIP": "0.0.0.0"}))]), "names no host to connect to"),
        (json!([one(json!({"targetPort": null}))]), "endpoints[0].targetPort: missing"),
        (json!([one(json!({"weight": -1}))]), "endpoints[0].weight: -1 is not within 0 to 65535"),
        (json!([one(json!({})), one(json!({}))]), "endpoints[1].endpointIP: 10.0.0.1:8000 is already endpoints[0]"),
        (
            json!([one(json!({})), one(json!({"targetPort": 8001}))]),
            "the events of rank 0 would come from tcp://10.0.0.1:5557, as those of endpoints[0] rank 0 do",
        ),
        (json!([one(json!({"kvZmqBind": "udp://1.2.3.4:5"}))]), "is not of the form \"tcp://ADDRESS:PORT\""),
        (
            json!([one(json!({"kvZmqBind": "tcp://127.0.0.1:6000", "kvZmqPort": 6000}))]),
            "cannot stand beside kvZmqPort",
        ),
        (json!([one(json!({"kvZmqPort": 8000}))]), "kvZmqPort: 8000 is also the targetPort"),
        (json!([one(json!({"targetPort": 5557}))]), "kvZmqPort: 5557 is also the targetPort"),
        (json!([one(json!({"kvReplayPort": 8000}))]), "kvReplayPort: 8000 is also the targetPort"),
        (json!([one(json!({"kvReplayPort": 5557}))]), "kvReplayPort: 5557 is also the event port 5557"),
        (
            json!([one(json!({"endpointIP": "127.0.0.1", "targetPort": 8080}))]),
            "endpoints[0].endpointIP: 127.0.0.1:8080 is the rule's own address, 127.0.0.1:8080",
        ),
        (json!([one(json!({"endpointIP": "localhost", "targetPort": 8080}))]), "is the rule's own address"),
    ];
    for (endpoints, expected) in cases {
        refused(&body(json!({}), endpoints), Kind::Invalid, expected);
    }
    // Two ranks of neighbours meet at one port.
    let neighbours = json!([one(json!({"kvZmqPort": 6000})), one(json!({"targetPort": 8001, "kvZmqPort": 6001}))]);
    accepted(&body(json!({}), neighbours.clone()));
    refused(
        &body(json!({"kvDpRankCount": 2}), neighbours),
        Kind::Invalid,
        "tcp://10.0.0.1:6001, as those of endpoints[0] rank 1",
    );
    // So do the ranks of one engine: events at 5557 and 5558, replays at 5558 and 5559.
    let close = json!([one(json!({"kvReplayPort": 5558}))]);
    accepted(&body(json!({}), close.clone()));
    refused(
        &body(json!({"kvDpRankCount": 2}), close),
        Kind::Invalid,
        "5558 (with 2 ranks) is also the event port 5557",
    );
}

#[test]
fn an_endpoint_at_the_rules_wildcard_address_is_a_loop_only_on_this_host() {
    let rule = |external: &str, host: &str, port: u16| {
        let endpoints = json!([{"endpointIP": host, "targetPort": port}]);
        body(json!({"externalIP": external, "kvZmqPort": 6000}), endpoints)
    };
    for (external, host) in [("0.0.0.0", "127.0.0.1"), ("0.0.0.0", "localhost"), ("::", "::1")] {
        refused(&rule(external, host, 8080), Kind::Invalid, "it would loop");
        accepted(&rule(external, host, 8081));
    }
    accepted(&rule("0.0.0.0", "10.0.0.1", 8080));
    accepted(&rule("::", "127.0.0.1", 8080));
}

#[test]
fn kv_options_without_kv_exact_mode_are_named_once() {
    let endpoints = json!([{"endpointIP": "10.0.0.1", "targetPort": 8000, "kvReplayPort": 7001},
                           {"endpointIP": "10.0.0.2", "targetPort": 8000, "kvReplayPort": 7001}]);
    let changes = json!({"kvExactMode": 0, "kvHashAlgo": "", "kvSpillRelief": false});
    let (_, warnings) = request(&body(changes, endpoints)).expect("accepted");
    let warnings: Vec<String> = warnings.iter().map(ToString::to_string).collect();
    assert_eq!(
        warnings,
        [
            "serviceArguments.kvBlockSize: without kvExactMode 3 these have no effect: kvBlockSize, kvZmqPort",
            "endpoints[0].kvReplayPort: without kvExactMode 3 these have no effect: kvReplayPort",
        ]
    );
}

#[test]
fn event_and_replay_ports_follow_endpoint_then_rule_then_offset() {
    let endpoints = json!([
        {"endpointIP": "10.0.0.1", "targetPort": 8000},
        {"endpointIP": "10.0.0.2", "targetPort": 8000, "kvZmqPort": 7000},
        {"endpointIP": "10.0.0.3", "targetPort": 8000, "kvReplayPort": 9000},
        {"endpointIP": "10.0.0.4", "targetPort": 8000, "kvZmqPort": 65000},
        {"endpointIP": "10.0.0.5", "targetPort": 8000, "kvZmqBind": "tcp://*:6100"}]);
    let rule = accepted(&body(json!({}), endpoints));
    let events: Vec<_> = rule.endpoints.iter().map(|e| e.events.expect("a KV rule")).collect();
    let places: Vec<_> = events.iter().map(|e| (e.live, e.replay_port)).collect();
    let bound = EventPlace::Bind("0.0.0.0:6100".parse().expect("an address"));
    assert_eq!(
        places,
        [
            (EventPlace::Connect(5557), Some(6557)),
            (EventPlace::Connect(7000), Some(8000)),
            (EventPlace::Connect(5557), Some(9000)),
            (EventPlace::Connect(65000), None),
            (bound, Some(7100)),
        ]
    );
}

#[test]
fn a_rule_may_say_where_replay_sockets_are_and_that_there_are_none() {
    let ports = |offset: u16| {
        let rule = accepted(&body(json!({"kvReplayPortOffset": offset}), two()));
        let (again, _) = request(&readback(&rule, ServiceId(0), &[])).expect("accepted");
        assert_eq!(again, rule);
        rule.endpoints.iter().map(|endpoint| endpoint.events.expect("a KV rule").replay_port).collect::<Vec<_>>()
    };
    assert_eq!(ports(1), [Some(5558); 2]);
    assert_eq!(ports(0), [None; 2]);
    assert_eq!(ports(60_000), [None; 2], "beyond the last port there is none");
}

#[test]
fn clients_of_the_reference_are_understood() {
    let posted = json!({"serviceArguments": {"externalIP": "127.0.0.1", "port": 8080, "protocol": "tcp", "sel": 0,
        "mode": 4, "BGP": false, "Monitor": false, "inactiveTimeOut": 0, "block": 0, "proxyprotocolv2": false,
        "egress": false, "future": 1},
        "secondaryIPs": null, "allowedSources": null,
        "endpoints": [{"endpointIP": "10.0.0.1", "targetPort": 8080, "weight": 1, "state": "", "counter": ""}]});
    let (rule, warnings) = request(&posted).expect("accepted");
    assert_eq!(rule.kv, None);
    let warnings: Vec<String> = warnings.iter().map(ToString::to_string).collect();
    assert_eq!(warnings, ["serviceArguments.future: unknown member, ignored"]);
}

#[test]
fn all_problems_come_at_once() {
    let problems = request(&body(json!({"kvBlockSize": 0, "sel": 12, "kvHashAlgo": "md5"}), json!([{"weight": -1}])))
        .expect_err("refused");
    let keys: Vec<&str> = problems.iter().map(|p| p.key.as_str()).collect();
    for key in ["kvBlockSize", "sel", "kvHashAlgo"] {
        assert!(keys.contains(&format!("serviceArguments.{key}").as_str()), "{keys:?} lacks {key}");
    }
    for key in ["endpointIP", "targetPort", "weight"] {
        assert!(keys.contains(&format!("endpoints[0].{key}").as_str()), "{keys:?} lacks {key}");
    }
}

#[test]
fn in_a_file_mode_is_fullproxy_by_default_and_unknown_keys_are_errors() {
    let text = "externalIP = \"127.0.0.1\"\nport = 8080\nkvExactMode = 3\nkvzmqport = 5557\n\
                [[endpoints]]\nendpointIP = \"10.0.0.1\"\ntargetPort = 8000\n";
    let read = |text: &str| {
        let node = from_toml(text).expect("TOML");
        let mut report = Report::new(crate::fields::Dialect::File);
        let fields = Fields::root(&mut report, &node);
        (check_file(fields, &mut report, &KvDefaults::default()), report)
    };
    let (rule, report) = read(text);
    assert_eq!(rule, None);
    assert_eq!(report.problems[0].to_string(), "kvzmqport: unknown key");
    assert_eq!(report.problems[0].line, Some(4));
    let (rule, report) = read(&text.replace("kvzmqport", "kvZmqPort"));
    assert!(rule.is_some(), "{report:?}");
}

#[test]
fn a_rules_key_wins_over_the_variable_and_the_variable_over_the_default() {
    let env = |pairs: &[(&str, &str)]| {
        KvDefaults::from_env(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
    };
    let defaults = env(&[
        ("LLB_KV_NONE_HASH_SEED", "7"),
        ("LLB_KV_MIN_MATCH_TOKENS", "64"),
        ("LOXILB_KV_SPILL_RELIEF", "Off"),
        ("LLB_KV_REPLAY_PORT_OFFSET", "0"),
        ("LOXILB_KV_COLDSTART_SEED_N", ""),
        ("LOXILB_KV_TRTLLM_POLL_MIN_MS", "7"),
    ])
    .expect("all in range");
    assert_eq!(defaults.drain_poll, DrainPoll { min_ms: 7, max_ms: 20 });
    let poll = |changes: Value| {
        let node = from_json(of_engine("trtllm", changes).to_string().as_bytes()).expect("JSON");
        let poll = check_request(&node, &defaults).expect("accepted").0.kv.expect("a KV rule").drain_poll;
        (poll.min_ms, poll.max_ms)
    };
    assert_eq!(poll(json!({"kvExactMode": 3})), (7, 20));
    assert_eq!(poll(json!({"kvExactMode": 3, "kvTrtllmPollMinMs": 50})), (50, 50), "one alone moves the other along");
    assert_eq!(poll(json!({"kvExactMode": 3, "kvTrtllmPollMaxMs": 2})), (2, 2));
    assert_eq!(poll(json!({"kvExactMode": 3, "kvTrtllmPollMinMs": 1, "kvTrtllmPollMaxMs": 9})), (1, 9));
    let node = from_json(body(json!({"kvMinMatchTokens": 0}), two()).to_string().as_bytes()).expect("JSON");
    let rule = check_request(&node, &defaults).expect("accepted").0;
    let kv = rule.kv.expect("a KV rule");
    assert_eq!((kv.seed.as_deref(), kv.min_match_tokens, kv.spill_relief, kv.seed_every), (Some("7"), 0, false, 16));
    assert_eq!(rule.endpoints[0].events.expect("a KV rule").replay_port, None);

    let problems = env(&[
        ("LLB_KV_NONE_HASH_SEED", "123456789012345678901234"),
        ("LLB_KV_MIN_MATCH_TOKENS", "4097"),
        ("LOXILB_KV_MEAN_LOAD_FACTOR", "many"),
        ("LOXILB_KV_SPILL_RELIEF", "maybe"),
        ("LOXILB_KV_TRTLLM_POLL_MIN_MS", "0"),
        ("LOXILB_KV_TRTLLM_POLL_MAX_MS", "10001"),
    ])
    .expect_err("all out of range");
    let texts: Vec<String> = problems.iter().map(ToString::to_string).collect();
    assert_eq!(texts.len(), 6, "{texts:?}");
    for (name, value) in [("LOXILB_KV_TRTLLM_POLL_MIN_MS", "0"), ("LOXILB_KV_TRTLLM_POLL_MAX_MS", "10001")] {
        let text = format!("{name}: \"{value}\" is not a whole number within 1 to 10000");
        assert!(texts.contains(&text), "{texts:?}");
    }
    let swapped = env(&[("LOXILB_KV_TRTLLM_POLL_MIN_MS", "30"), ("LOXILB_KV_TRTLLM_POLL_MAX_MS", "10")]);
    let swapped = swapped.expect_err("the shorter is longer")[0].to_string();
    assert!(swapped.contains("LOXILB_KV_TRTLLM_POLL_MIN_MS") && swapped.contains("30") && swapped.contains("10"));
    assert!(texts.contains(&"LLB_KV_MIN_MATCH_TOKENS: \"4097\" is not a whole number within 0 to 4096".to_owned()));
}

/// A rule of an engine, with nothing else said about its cache.
fn of_engine(engine: &str, changes: Value) -> Value {
    let mut service = json!({"externalIP": "127.0.0.1", "port": 8080, "mode": 4, "kvEngineType": engine});
    for (name, value) in changes.as_object().expect("changes are an object") {
        service[name] = value.clone();
    }
    json!({"serviceArguments": service, "endpoints": two()})
}

#[test]
fn an_engine_has_its_own_algorithm_and_no_other() {
    let all = ["sha256_cbor", "xxhash_cbor", "sha256_sglang", "blockhash_trtllm"];
    for (engine, default, fits) in [
        ("vllm", "sha256_cbor", &all[..2]),
        ("sglang", "sha256_sglang", &all[2..3]),
        ("trtllm", "blockhash_trtllm", &all[3..]),
    ] {
        let rule = accepted(&of_engine(engine, json!({"kvExactMode": 3})));
        let shown = readback(&rule, ServiceId(0), &[]);
        assert_eq!(shown["serviceArguments"]["kvHashAlgo"], default);
        assert_eq!(request(&shown).expect("accepted").0, rule, "a readback posted again is the same rule");
        for algo in all {
            let posted = of_engine(engine, json!({"kvExactMode": 3, "kvHashAlgo": algo}));
            if fits.contains(&algo) {
                let kv = accepted(&posted).kv.expect("a KV rule");
                assert_eq!((kv.algo.name(), kv.algo_given), (algo, true));
            } else {
                let text = format!(
                    "kvHashAlgo: kv-hash-algo \"{algo}\" is incompatible with kv-engine-type \"{engine}\" (omit \
                     kvHashAlgo to get \"{default}\")"
                );
                refused(&posted, Kind::Invalid, &text);
            }
        }
    }
}

#[test]
fn engines_take_and_refuse_ranks_ports_and_modes_as_the_schema_says() {
    let kv = |changes: Value| {
        let mut all = json!({"kvExactMode": 3});
        for (name, value) in changes.as_object().expect("an object") {
            all[name] = value.clone();
        }
        all
    };
    let cases = [
        ("sglang", json!({"kvDpRankCount": 8}), ""),
        ("sglang", json!({"kvBlockSize": 1}), ""),
        ("sglang", json!({"kvBlockSize": 0}), "0 is not within 1 to 65536 tokens: write the engines' --page-size"),
        ("sglang", json!({"kvDpRankCount": 8, "kvZmqPort": 65530}), "with 8 ranks ends beyond port 65535"),
        ("sglang", json!({"kvExactMode": 2}), "2 is reserved"),
        ("vllm", json!({"kvDpRankCount": 8}), ""),
        ("vllm", json!({"kvExactMode": 2}), "2 is reserved"),
        ("trtllm", json!({"kvZmqPort": 0}), ""),
        ("trtllm", json!({"kvZmqPort": 5557, "kvDpRankCount": 1}), ""),
        ("trtllm", json!({"kvZmqPort": 5558}), "kvZmqPort is meaningless for kv-engine-type trtllm"),
        ("trtllm", json!({"kvDpRankCount": 2}), "kvDpRankCount is meaningless for kv-engine-type trtllm"),
        ("trtllm", json!({"kvDpRankCount": 9}), "kv-dp-rank-count must be within 1..8 (0 = default 1)"),
        ("trtllm", json!({"kvExactMode": 2}), "2 is reserved"),
        ("trtllm", json!({"pdBootstrapPort": 1}), "pd-bootstrap-port requires pd_disagg_mode=true"),
        ("trtllm", json!({"kvTrtllmPollMinMs": 1, "kvTrtllmPollMaxMs": 10_000}), ""),
        ("trtllm", json!({"kvTrtllmPollMinMs": 0}), "kvTrtllmPollMinMs: 0 is not within 1 to 10000"),
        ("trtllm", json!({"kvTrtllmPollMaxMs": 10_001}), "kvTrtllmPollMaxMs: 10001 is not within 1 to 10000"),
        ("trtllm", json!({"kvTrtllmPollMinMs": 9, "kvTrtllmPollMaxMs": 8}), "9 is more than kvTrtllmPollMaxMs, 8"),
        ("sglang", json!({"kvMediumWeights": {"cpu": 100, "storage": 0}}), ""),
        ("vllm", json!({"kvMediumWeights": {"cpu": 101}}), "kvMediumWeights.cpu: 101 is not within 0 to 100"),
        (
            "vllm",
            json!({"kvMediumWeights": {"cpu": 20, "storage": 30}}),
            "kvMediumWeights.storage: 30 is more than cpu, 20",
        ),
        ("vllm", json!({"kvMediumWeights": 50}), "kvMediumWeights"),
        ("vllm", json!({"kvReplayPortOffset": 65_536}), "kvReplayPortOffset: 65536 is not within 0 to 65535"),
        ("vllm", json!({"kvHashAlgo": "sha256_cbor"}), ""),
        ("vllm", json!({"kvHashAlgo": "xxhash_cbor"}), ""),
        ("vllm", json!({"kvHashAlgo": "sha256"}), "start the engines with --prefix-caching-hash-algo sha256_cbor"),
        ("vllm", json!({"kvHashAlgo": "xxhash"}), "start the engines with --prefix-caching-hash-algo xxhash_cbor"),
        ("vllm", json!({"kvHashAlgo": "xxhash128"}), "write \"xxhash_cbor\""),
        ("sglang", json!({"kvHashAlgo": "sha256"}), "kv-hash-algo must be one of"),
        ("vllm", json!({"kvWarmupSec": 0}), ""),
        ("vllm", json!({"kvWarmupSec": -1}), "kvWarmupSec: -1 is not within 0 to"),
        ("vllm", json!({"kvNoneHashSeed": "0"}), ""),
        ("vllm", json!({"kvZmqPort": 65_535}), ""),
        ("vllm", json!({"kvZmqPort": 65_536}), "kvZmqPort: 65536 is not within 1 to 65535"),
        ("sglang", json!({"kvZmqPort": 65_535, "kvDpRankCount": 2}), "with 2 ranks ends beyond port 65535"),
    ];
    for (engine, changes, expected) in cases {
        let posted = of_engine(engine, kv(changes));
        match expected {
            "" => drop(accepted(&posted)),
            text => refused(&posted, Kind::Invalid, text),
        }
    }
    let endpoints = json!([{"endpointIP": "10.0.0.1", "targetPort": 8000},
        {"endpointIP": "10.0.0.2", "targetPort": 8000, "kvZmqPort": 5600}]);
    let mut pushing = of_engine("trtllm", json!({"kvExactMode": 3}));
    pushing["endpoints"] = endpoints;
    let live: Vec<_> = accepted(&pushing).endpoints.iter().map(|endpoint| endpoint.events.map(|e| e.live)).collect();
    assert_eq!(live, [None, Some(EventPlace::Connect(5600))], "an endpoint that pushes its events may say where");
}

#[test]
fn llamacpp_is_balanced_and_nothing_else() {
    let rule = accepted(&of_engine("llamacpp", json!({"kvExactMode": 0, "pd_disagg_mode": false})));
    assert_eq!((rule.engine, &rule.kv), (Engine::Llamacpp, &None));
    let shown = readback(&rule, ServiceId(0), &[]);
    assert_eq!(shown["serviceArguments"]["kvHashAlgo"], Value::Null);
    assert_eq!(request(&shown).expect("accepted").0, rule);
    for (name, value) in [
        ("kvExactMode", json!(3)),
        ("kvBlockSize", json!(16)),
        ("kvHashAlgo", json!("sha256_cbor")),
        ("kvZmqPort", json!(5557)),
        ("kvWarmupSec", json!(30)),
        ("kvDpRankCount", json!(1)),
        ("kvNoneHashSeed", json!("0")),
        ("kvChatTemplate", json!("/t.jinja")),
        ("kvMinMatchTokens", json!(16)),
        ("kvSpillRelief", json!(true)),
        ("kvColdstartSeedN", json!(16)),
        ("kvColdstartMinBlocks", json!(16)),
        ("kvMeanLoadFactor", json!(175)),
        ("kvReplayPortOffset", json!(1000)),
        ("kvTrtllmPollMinMs", json!(5)),
        ("kvTrtllmPollMaxMs", json!(20)),
        ("kvMediumWeights", json!({"cpu": 50})),
        ("kvExactApiMode", json!("chat")),
        ("kvModelProfile", json!("small")),
        ("pd_disagg_mode", json!(true)),
        ("pd_cache_aware_mode", json!(true)),
        ("pdBootstrapPort", json!(8998)),
        ("pd_cache_threshold", json!(5)),
        ("kvLbMode", json!("hard")),
        ("kvThroughput", json!(200)),
        ("kvLoadPenalty", json!(32)),
        ("kvZeroHitN", json!(50)),
        ("kvClaimMs", json!(2_000)),
    ] {
        let text = format!("{name}: is refused for kv-engine-type llamacpp: it ");
        refused(&of_engine("llamacpp", json!({name: value})), Kind::Invalid, &text);
    }
    for name in ["kvZmqPort", "kvReplayPort", "nixl_port"] {
        let mut posted = of_engine("llamacpp", json!({}));
        posted["endpoints"][1][name] = json!(6000);
        let text = format!("endpoints[1].{name}: is refused for kv-engine-type llamacpp");
        refused(&posted, Kind::Invalid, &text);
    }
}

#[test]
fn what_has_no_effect_or_needs_more_is_said() {
    let told = |engine: &str, changes: Value| -> Vec<String> {
        let (_, warnings) = request(&of_engine(engine, changes)).expect("accepted");
        warnings.iter().map(ToString::to_string).collect()
    };
    for (engine, changes, expected) in [
        ("vllm", json!({"kvExactMode": 3, "kvWarmupSec": 5}), "kvWarmupSec: 5 is accepted and has no effect"),
        ("sglang", json!({"kvExactMode": 3, "kvWarmupSec": 0}), "kvWarmupSec: 0 is accepted and has no effect"),
        (
            "vllm",
            json!({"kvExactMode": 3, "kvDpRankCount": 4}),
            "kvDpRankCount: 4: rank r is expected at kvZmqPort + r",
        ),
        ("sglang", json!({"kvExactMode": 3, "kvNoneHashSeed": "0"}), "kv-engine-type sglang hashes no seed"),
        ("sglang", json!({"kvExactMode": 3, "kvTrtllmPollMaxMs": 50}), "kv-engine-type sglang is not polled"),
        ("vllm", json!({"kvExactMode": 3, "kvHashAlgo": "xxhash_cbor"}), "hash a random seed"),
    ] {
        let warnings = told(engine, changes);
        assert!(warnings.len() == 1 && warnings[0].contains(expected), "{warnings:?} lacks {expected:?}");
    }
    let quiet = json!({"kvExactMode": 3, "kvHashAlgo": "xxhash_cbor", "kvNoneHashSeed": "0", "kvWarmupSec": 30});
    assert_eq!(told("vllm", quiet), [""; 0]);
    assert_eq!(told("sglang", json!({"kvExactMode": 3, "kvDpRankCount": 4})), [""; 0]);
}

#[test]
fn a_seed_is_the_rules_own_else_the_environments_else_unset() {
    let seed = |engine: &str, own: Option<&str>, env: Option<&str>| {
        let changes = own.map_or(json!({"kvExactMode": 3}), |own| json!({"kvExactMode": 3, "kvNoneHashSeed": own}));
        let defaults = KvDefaults { seed: env.map(str::to_owned), ..KvDefaults::default() };
        let node = from_json(of_engine(engine, changes).to_string().as_bytes()).expect("JSON");
        check_request(&node, &defaults).expect("accepted").0.kv.expect("a KV rule").seed
    };
    let text = |text: &str| Some(text.to_owned());
    assert_eq!(seed("vllm", Some("42"), Some("7")), text("42"));
    assert_eq!(seed("vllm", Some(""), Some("7")), text(""), "the empty text is a seed of its own");
    assert_eq!(seed("vllm", None, Some("7")), text("7"));
    assert_eq!(seed("vllm", Some("vllm-none-hash"), Some("7")), None, "as the readback spells an unset seed");
    assert_eq!(seed("vllm", None, None), None);
    assert_eq!(seed("sglang", None, Some("7")), None);
}

#[test]
fn a_token_file_is_read_with_the_rule_and_shown_by_its_path_alone() {
    let path = std::env::temp_dir().join(format!("kvlane-rule-token-{}", std::process::id()));
    let posted = of_engine("llamacpp", json!({"engineTokenFile": path}));
    refused(&posted, Kind::Invalid, "engineTokenFile: cannot read");
    std::fs::write(&path, "s3cr3t\n").expect("the temporary directory is writable");
    let set_mode = |mode| {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(&path, mode).expect("the file is ours");
    };
    set_mode(0o644);
    refused(&posted, Kind::Invalid, "chmod 600");
    set_mode(0o600);
    let rule = accepted(&posted);
    let shown = readback(&rule, ServiceId(0), &[]);
    assert_eq!(shown["serviceArguments"]["engineTokenFile"], json!(path));
    assert!(!shown.to_string().contains("s3cr3t") && !format!("{rule:?}").contains("s3cr3t"));
    assert_eq!(accepted(&shown), rule);
    std::fs::remove_file(&path).expect("the file is ours");
}

#[test]
fn contracts_follow_the_rule_and_what_the_engines_say() {
    use shards::block::vllm::{Algorithm, Tagging};
    use shards::block::{Contract, NoneHash, Release};

    use crate::discovery::ServiceFacts;

    let of = |engine: &str, changes: Value, release: Option<Release>| {
        let kv = accepted(&of_engine(engine, changes)).kv.expect("a KV rule");
        let facts = ServiceFacts { release, ..ServiceFacts::default() };
        (contract(&kv, &facts), release.and_then(|release| unknowable(&kv, release)))
    };
    let exact = || json!({"kvExactMode": 3});
    let vllm = |tagging, seed: &str| Contract::Vllm {
        none_hash: NoneHash::from_seed(Algorithm::Sha256Cbor, seed),
        tagging,
        lookahead: 0,
    };
    assert_eq!(of("vllm", exact(), None), (vllm(Tagging::Tagged, "vllm-none-hash"), None));
    assert_eq!(of("vllm", exact(), Some(Release::new(0, 30, 0))), (vllm(Tagging::MmOffset, "vllm-none-hash"), None));
    let seeded = json!({"kvExactMode": 3, "kvNoneHashSeed": "0"});
    assert_eq!(of("vllm", seeded, Some(Release::new(0, 12, 0))), (vllm(Tagging::LoraName, "0"), None));
    let problem = |engine: &str, changes: Value, release| of(engine, changes, Some(release)).1.unwrap_or_default();
    assert!(problem("vllm", exact(), Release::new(0, 28, 0)).contains("draws a random seed for sha256_cbor"));
    let xxhash = || json!({"kvExactMode": 3, "kvHashAlgo": "xxhash_cbor"});
    assert!(problem("vllm", xxhash(), Release::new(0, 33, 0)).contains("PYTHONHASHSEED=0"));
    assert!(problem("vllm", xxhash(), Release::new(0, 12, 0)).contains("has no xxhash_cbor"));
    assert!(problem("sglang", exact(), Release::new(0, 5, 5)).contains("upgrade"));
    assert_eq!(problem("trtllm", exact(), Release::new(1, 2, 0)), "");
    assert!(matches!(of("sglang", exact(), None).0, Contract::Sglang(_)));
    assert_eq!(of("trtllm", exact(), None).0, Contract::TrtllmTokens);
}
