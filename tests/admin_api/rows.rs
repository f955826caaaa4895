//! The management API, row by row of the reference, against one gateway process; every answer is compared with the
//! OpenAPI document that the gateway serves.

use crate::common::engines::StubEngine;
use crate::common::gateway::{Gateway, Options};
use crate::common::schema::Document;
use crate::common::{client, free_port, wait_for};
use serde_json::{Value, json};

const BASE: &str = "/netlox/v1";
const LB: &str = "/config/loadbalancer";

/// A gateway and the document that its answers must fit.
struct Api {
    gateway: Gateway,
    document: Document,
}

impl Api {
    fn start(options: Options) -> Self {
        let gateway = Gateway::start(options);
        let document = Document::of(gateway.api("/openapi.json").json());
        Api { gateway, document }
    }

    /// Asks, and compares the answer with the document.
    #[track_caller]
    fn ask(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let bytes = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let answer = client::call(self.gateway.admin, method, &format!("{BASE}{path}"), &bytes).expect("an answer");
        let value = answer.json();
        self.document.check(method, path, answer.status, &value);
        (answer.status, value)
    }

    #[track_caller]
    fn done(&self, method: &str, path: &str, body: &Value) {
        let (status, answer) = self.ask(method, path, body);
        assert!(status == 200 && client::is_success(&answer), "{method} {path}: {status} {answer}");
    }

    /// An error with its status, its fixed text, and a part of what happened.
    #[track_caller]
    fn refused(&self, method: &str, path: &str, body: &Value, status: u16, text: &str) {
        let (found, answer) = self.ask(method, path, body);
        assert_eq!(found, status, "{method} {path}: {answer}");
        let message = match status {
            400 => "Malformed arguments for API call",
            403 => "Capacity insufficient",
            404 => "Resource not found",
            409 => "Resource conflict: Resource already exists OR dependency not found",
            other => panic!("no text is known for {other}"),
        };
        assert_eq!((&answer["code"], &answer["message"]), (&json!(status), &json!(message)), "{answer}");
        assert!(answer["result"].as_str().is_some_and(|result| result.contains(text)), "{answer} lacks {text:?}");
    }

    #[track_caller]
    fn get(&self, path: &str) -> Value {
        let (status, value) = self.ask("GET", path, &Value::Null);
        assert_eq!(status, 200, "{path}: {value}");
        value
    }

    fn rules(&self) -> Vec<Value> {
        self.get(&format!("{LB}/all"))["lbAttr"].as_array().expect("a list").clone()
    }
}

fn endpoint(engine: &StubEngine) -> Value {
    json!({"endpointIP": "127.0.0.1", "targetPort": engine.address.port(), "weight": 1, "state": "", "counter": ""})
}

/// The same with an event port of its own, in rules that route by KV cache.
fn kv_endpoint(engine: &StubEngine) -> Value {
    let mut value = endpoint(engine);
    value["kvZmqPort"] = json!(engine.event_port);
    value
}

fn rule(port: u16, endpoints: &[Value], more: &Value) -> Value {
    let mut arguments = json!({"externalIP": "127.0.0.1", "port": port, "protocol": "tcp", "sel": 0, "mode": 4});
    for (name, value) in more.as_object().expect("an object") {
        arguments[name] = value.clone();
    }
    json!({"serviceArguments": arguments, "endpoints": endpoints})
}

/// The four forms of path that name a rule without a host.
fn forms(port: u16) -> [String; 4] {
    [
        format!("{LB}/externalipaddress/127.0.0.1/port/{port}/protocol/tcp"),
        format!("{LB}/externalipaddress/127.0.0.1/port/{port}/portmax/0/protocol/tcp"),
        format!("{LB}/hosturl/any/externalipaddress/127.0.0.1/port/{port}/protocol/tcp"),
        format!("{LB}/hosturl/any/externalipaddress/127.0.0.1/port/{port}/portmax/{port}/protocol/tcp"),
    ]
}

#[test]
fn a_rule_is_found_by_every_form_of_path_and_its_id() {
    let api = Api::start(Options::default());
    let engine = StubEngine::start();
    let port = free_port();
    for form in forms(port) {
        api.refused("GET", &form, &Value::Null, 404, "no-rule");
        api.refused("DELETE", &form, &Value::Null, 404, "no-rule");
        api.done("POST", LB, &rule(port, &[endpoint(&engine)], &json!({"name": "mine"})));
        let shown = api.get(&form);
        assert_eq!(shown, api.rules()[0]);
        let id = shown["serviceArguments"]["id"].as_str().expect("an id").to_owned();
        assert_eq!((id.len(), id.as_bytes()[14]), (36, b'4'), "a UUID of version 4: {id}");
        assert_eq!(api.get(&format!("{LB}/id/{id}")), shown);
        assert_eq!(api.get(&format!("{LB}/name/mine"))["lbAttr"], json!([shown]));
        api.done("DELETE", &form, &Value::Null);
        api.refused("GET", &format!("{LB}/id/{id}"), &Value::Null, 404, "no-rule");
    }
    // Removing by a name that nobody has is a success, as in the reference.
    api.done("DELETE", &format!("{LB}/name/nobody"), &Value::Null);
    api.done("DELETE", &format!("{LB}/all"), &Value::Null);
    assert_eq!(api.rules(), Vec::<Value>::new());
    for (path, text) in [
        (format!("{LB}/externalipaddress/x/port/1/protocol/tcp"), "\"x\" is no IP address"),
        (format!("{LB}/externalipaddress/::1/port/x/protocol/tcp"), "\"x\" is no port"),
        (format!("{LB}/externalipaddress/[::1]/port/1/protocol/udp"), "rules here are for \"tcp\""),
        (format!("{LB}/externalipaddress/::1/port/1/protocol/tcp?block=x"), "is no number"),
        (format!("{LB}/externalipaddress/::1/port/1/protocol/tcp?path_match_mode=x"), "is unknown"),
    ] {
        api.refused("DELETE", &path, &Value::Null, 400, text);
    }
}

/// Sends bytes and reads to the end: how many went each way.
fn ask_raw(port: u16, request: &[u8]) -> (usize, usize) {
    use std::io::{Read as _, Write as _};
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).expect("the rule listens");
    stream.write_all(request).expect("sent");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer");
    (request.len(), answer.len())
}

#[test]
fn status_and_stats_follow_the_endpoints() {
    let api = Api::start(Options::default());
    let engine = StubEngine::start();
    let port = free_port();
    let nobody = json!({"endpointIP": "127.0.0.1", "targetPort": free_port(), "weight": 1});
    let path = &forms(port)[0];
    let status = || api.get(&format!("{path}/status"))["operatingStatus"].clone();
    api.refused("GET", &format!("{path}/status"), &Value::Null, 404, "no-rule");
    api.refused("GET", &format!("{path}/stats"), &Value::Null, 404, "no-rule");

    api.done("POST", LB, &rule(port, &[endpoint(&engine)], &json!({})));
    assert_eq!(api.get(&format!("{path}/status"))["adminStateUp"], true);
    wait_for("the endpoint was probed", || (status() == "ONLINE").then_some(()));
    let updated = || api.get(&format!("{path}/status"))["lastUpdated"].as_str().expect("a text").to_owned();
    let online = updated();
    let stats = || api.get(&format!("{path}/stats"));
    let nothing = json!({"activeConnections": 0, "bytesIn": 0, "bytesOut": 0, "totalConnections": 0});
    assert_eq!(stats(), nothing);
    assert_eq!(api.rules()[0]["endpoints"][0]["counter"], "0:0");
    let (request, answer) = ask_raw(port, b"GET /anything HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
    let counted = json!({"activeConnections": 0, "bytesIn": request, "bytesOut": answer, "totalConnections": 1});
    assert_eq!(stats(), counted);
    assert_eq!(api.rules()[0]["endpoints"][0]["counter"], format!("1:{}", request + answer));

    api.done("POST", LB, &rule(port, &[endpoint(&engine), nobody.clone()], &json!({})));
    wait_for("a probe finds that nobody is there", || (status() == "DEGRADED").then_some(()));
    wait_for("a state that changed is an update", || (updated() > online).then_some(()));
    api.done("POST", LB, &rule(port, &[nobody], &json!({})));
    wait_for("no endpoint is up", || (status() == "ERROR").then_some(()));
    let mut drained = endpoint(&engine);
    drained["weight"] = json!(0);
    api.done("POST", LB, &rule(port, &[drained], &json!({})));
    assert_eq!(status(), "OFFLINE");
}

#[test]
fn a_post_makes_changes_and_refuses() {
    let api = Api::start(Options::default());
    let (one, two) = (StubEngine::start(), StubEngine::start());
    let port = free_port();
    let whole = rule(port, &[kv_endpoint(&one)], &json!({"kvExactMode": 3}));
    api.done("POST", LB, &whole);
    api.refused("POST", LB, &whole, 409, "lbrule-exists error");
    let shown = api.rules()[0].clone();
    api.refused("POST", LB, &shown, 409, "lbrule-exists error");

    // Changes in place keep number and id.
    api.done("POST", LB, &rule(port, &[kv_endpoint(&one), kv_endpoint(&two)], &json!({"kvExactMode": 3, "sel": 4})));
    let changed = api.rules()[0].clone();
    assert_eq!(changed["serviceArguments"]["sel"], 4);
    for name in ["service_id", "id"] {
        assert_eq!(changed["serviceArguments"][name], shown["serviceArguments"][name], "{name}");
    }
    // What may not change.
    for (more, text) in [
        (json!({"kvExactMode": 3, "kvEngineType": "sglang"}), "cant modify rule kv engine type"),
        (json!({"kvExactMode": 3, "id": "another"}), "cant modify rule id"),
        (json!({"kvExactMode": 3, "security": 1}), "cant modify rule: serviceArguments.security"),
        (json!({"kvExactMode": 3, "egress": true}), "cant modify rule: serviceArguments.egress"),
        (json!({"mode": 2}), "cant modify rule: serviceArguments.mode"),
    ] {
        api.refused("POST", LB, &rule(port, &[kv_endpoint(&one)], &more), 409, text);
    }
    let mut secondary = rule(port, &[kv_endpoint(&one)], &json!({"kvExactMode": 3}));
    secondary["secondaryIPs"] = json!([{"secondaryIP": "10.0.0.1"}]);
    api.refused("POST", LB, &secondary, 409, "cant modify rule: secondaryIPs");
    api.refused("PATCH", &forms(port)[0], &json!({"sel": 0}), 409, "POST the whole rule");
    api.refused("PATCH", &forms(free_port())[0], &json!({"sel": 0}), 404, "no-rule");
    assert_eq!(api.rules(), [changed]);

    // As new rules the same are malformed, with the reference's texts, whatever status the reference gives them.
    for (more, text) in [
        (json!({"security": 1}), "security"),
        (json!({"mode": 0, "pd_disagg_mode": true}), "pd-disagg requires mode=fullproxy"),
        (
            json!({"pd_disagg_mode": true}),
            "pd-disagg requires at least 1 prefill (ep_role=1) and 1 decode (ep_role=2) endpoint",
        ),
        (
            json!({"pd_disagg_mode": true, "kvExactMode": 3}),
            "kv-exact single-role mode is incompatible with pd-disagg (use kvExactMode=1 for P/D)",
        ),
        (json!({"pd_cache_aware_mode": true}), "pd-cache-aware requires pd_disagg_mode=true"),
        (json!({"kvExactMode": 1}), "kv-exact zmq mode requires pd_disagg_mode=true"),
        (json!({"kvExactMode": 3, "mode": 1}), "kv-exact single-role mode requires mode=fullproxy"),
        (json!({"kvExactMode": 3, "kvEngineType": "x"}), "kv-engine-type must be one of"),
        (json!({"kvExactMode": 3, "kvHashAlgo": "md5"}), "kv-hash-algo must be one of"),
        (json!({"kvExactMode": 3, "kvHashAlgo": "sha256_sglang"}), "is incompatible with kv-engine-type"),
        (json!({"kvExactMode": 3, "kvEngineType": "trtllm", "kvZmqPort": 5558}), "kvZmqPort is meaningless"),
        (json!({"kvExactMode": 3, "kvEngineType": "trtllm", "kvDpRankCount": 2}), "kvDpRankCount is meaningless"),
        (json!({"kvExactMode": 2, "kvEngineType": "trtllm"}), "kvExactMode"),
        (json!({"kvExactMode": 3, "kvZmqPort": 65_535, "kvDpRankCount": 2}), "65535"),
        (json!({"protocol": "udp"}), "protocol"),
        (json!({"kvExactMode": 3, "kvDpRankCount": 9}), "kv-dp-rank-count must be within 1..8 (0 = default 1)"),
        (json!({"pdBootstrapPort": 1}), "pd-bootstrap-port requires pd_disagg_mode=true and kv-engine-type sglang"),
    ] {
        api.refused("POST", LB, &rule(free_port(), &[endpoint(&one)], &more), 400, text);
    }
    for body in [json!([]), json!({}), json!({"serviceArguments": 1}), json!({"serviceArguments": {"port": 1}})] {
        api.refused("POST", LB, &body, 400, "");
    }
}

#[test]
fn more_endpoints_than_there_is_room_for_are_refused_and_change_nothing() {
    let api = Api::start(Options::default());
    let of = |number: usize| {
        let one =
            |at: usize| json!({"endpointIP": format!("127.{number}.{}.{}", at / 250, 1 + at % 250), "targetPort": 9});
        rule(free_port(), &(0..1000).map(one).collect::<Vec<_>>(), &json!({}))
    };
    // 8,192 in all.
    for number in 1..=8 {
        api.done("POST", LB, &of(number));
    }
    api.refused("POST", LB, &of(9), 403, "no room for more endpoints");
    assert_eq!(api.rules().len(), 8);
}

#[test]
fn endpoints_are_attached_and_detached_and_the_last_takes_the_rule_with_it() {
    let api = Api::start(Options::default());
    let (one, two) = (StubEngine::start(), StubEngine::start());
    let port = free_port();
    let ports = || {
        let rules = api.rules();
        let endpoints = rules.first().map(|rule| rule["endpoints"].as_array().expect("a list").clone());
        endpoints.unwrap_or_default().iter().map(|e| (e["targetPort"].clone(), e["weight"].clone())).collect::<Vec<_>>()
    };
    // As loxicmd sends them: the selection of the rule is not repeated, and must stay.
    let oper = |oper: u8, endpoints: &[Value]| {
        let mut body = rule(port, endpoints, &json!({"oper": oper, "BGP": false, "Monitor": false}));
        body["serviceArguments"].as_object_mut().expect("an object").remove("sel");
        body
    };
    api.refused("POST", LB, &oper(2, &[kv_endpoint(&one)]), 404, "no-rule");
    api.done("POST", LB, &rule(port, &[kv_endpoint(&one)], &json!({"sel": 4, "kvExactMode": 3})));
    api.done("POST", LB, &oper(1, &[kv_endpoint(&two)]));
    let port_of = |engine: &StubEngine| json!(engine.address.port());
    assert_eq!(ports(), [(port_of(&one), json!(1)), (port_of(&two), json!(1))]);
    let shown = api.rules()[0]["serviceArguments"].clone();
    assert_eq!((&shown["sel"], &shown["kvExactMode"]), (&json!(4), &json!(3)));
    api.refused("POST", LB, &oper(1, &[kv_endpoint(&two)]), 409, "lbrule-exists error");
    let mut heavier = kv_endpoint(&two);
    heavier["weight"] = json!(7);
    api.done("POST", LB, &oper(1, &[heavier]));
    assert_eq!(ports()[1].1, json!(7));

    let stranger = json!({"endpointIP": "127.0.0.9", "targetPort": 1});
    api.refused("POST", LB, &oper(2, &[stranger]), 404, "none of these endpoints");
    api.done("POST", LB, &oper(2, &[kv_endpoint(&one)]));
    assert_eq!(ports(), [(port_of(&two), json!(7))]);
    api.done("POST", LB, &oper(2, &[kv_endpoint(&two)]));
    assert_eq!(api.rules(), Vec::<Value>::new(), "the last endpoint takes the rule with it");
    api.done("POST", LB, &oper(1, &[endpoint(&one)]));
    assert_eq!(ports(), [(port_of(&one), json!(1))], "attaching to no rule makes it");
}

#[test]
fn names_match_in_any_case_nulls_are_absent_and_unknown_names_are_named() {
    let api = Api::start(Options::default());
    let engine = StubEngine::start();
    let body = json!({
        "SERVICEARGUMENTS": {"ExternalIP": "127.0.0.1", "PORT": free_port(), "Protocol": "TCP", "Mode": 4, "BGP": false,
            "KVEXACTMODE": 3, "colour": "blue", "name": null},
        "secondaryIPs": null, "allowedSources": null,
        "Endpoints": [{"endpointip": "127.0.0.1", "TARGETPORT": engine.address.port(), "State": "", "taste": 1}],
    });
    let (status, answer) = api.ask("POST", LB, &body);
    assert_eq!((status, &answer["result"]), (200, &json!("Success")));
    let warnings = ["serviceArguments.colour: unknown member, ignored", "endpoints[0].taste: unknown member, ignored"];
    let named = answer["warnings"].as_array().expect("warnings");
    for warning in warnings {
        assert!(named.contains(&json!(warning)), "{answer}");
    }
    assert_eq!(api.rules()[0]["serviceArguments"]["kvExactMode"], 3);
}

#[test]
fn rules_are_counted_from_zero_and_the_oldest_kv_rule_answers_for_rule_zero() {
    let api = Api::start(Options::default());
    let engine = StubEngine::start();
    let post = |more: &Value| {
        let port = free_port();
        api.done("POST", LB, &rule(port, &[endpoint(&engine)], more));
        port
    };
    let kv = json!({"kvExactMode": 3});
    let first = post(&kv);
    post(&json!({}));
    post(&json!({"kvExactMode": 3, "kvEngineType": "sglang"}));
    let ids: Vec<Value> = api.rules().iter().map(|rule| rule["serviceArguments"]["service_id"].clone()).collect();
    assert_eq!(ids, [0, 1, 2]);
    let inventory =
        |service: u8| api.ask("GET", &format!("/config/ai/kv/inventory?service_id={service}&ep_idx=0"), &Value::Null);
    let empty = |service: u8, algo: &str| {
        (200, json!({"service_id": service, "ep_idx": 0, "hash_algo": algo, "blocks": [], "total": 0}))
    };
    assert_eq!(inventory(0), empty(0, "sha256_cbor"));
    assert_eq!(inventory(1), (404, json!({"error": "service or endpoint not found"})), "no KV rule");
    api.done("DELETE", &forms(first)[0], &Value::Null);
    assert_eq!(inventory(0), empty(0, "sha256_sglang"), "the oldest KV rule answers");
    post(&kv);
    assert_eq!(api.rules().last().expect("three")["serviceArguments"]["service_id"], 3, "0 is not used again");
    for (query, text) in [
        ("", "invalid service_id: "),
        ("?service_id=x&ep_idx=0", "invalid service_id: "),
        ("?service_id=2", "invalid ep_idx: "),
        ("?service_id=2&ep_idx=0&limit=0", "invalid limit: "),
        ("?service_id=2&ep_idx=0&cursor=x", "invalid cursor: "),
        ("?service_id=2&ep_idx=0&summary=x", "invalid summary: "),
    ] {
        let (status, answer) = api.ask("GET", &format!("/config/ai/kv/inventory{query}"), &Value::Null);
        assert!(status == 400 && answer["error"].as_str().is_some_and(|error| error.starts_with(text)), "{answer}");
    }
    let path = format!("{BASE}/config/ai/kv/inventory?service_id=2&ep_idx=0");
    let refused = client::call(api.gateway.admin, "DELETE", &path, b"").expect("an answer");
    assert_eq!((refused.status, refused.text().as_str()), (405, "method not allowed\n"), "a text, as in the reference");
    assert_eq!(refused.header("allow"), Some("GET, HEAD"));
    let summary = api.get("/config/ai/kv/inventory?service_id=2&ep_idx=0&summary=1");
    assert_eq!(summary, json!({"service_id": 2, "ep_idx": 0, "hash_algo": "sha256_sglang", "total": 0}));
}

#[test]
fn a_decision_is_explained_and_nothing_is_sent() {
    let api = Api::start(Options::default());
    let engine = StubEngine::start();
    let request = json!({"model": "m", "prompt": "a planted prompt"});
    api.refused("POST", "/config/ai/kv/explain", &request, 404, "no-rule");
    for more in [json!({}), json!({"kvExactMode": 3})] {
        api.done("POST", LB, &rule(free_port(), &[endpoint(&engine)], &more));
    }
    for (service, miss) in [(0, "mode_off"), (1, "tokenizer_missing")] {
        let path = format!("/config/ai/kv/explain?service_id={service}&path=/v1/completions");
        let (status, answer) = api.ask("POST", &path, &request);
        assert_eq!((status, &answer["prompt"]["miss"]), (200, &json!(miss)), "{answer}");
        assert_eq!((&answer["decision"]["ep_idx"], &answer["decision"]["miss"]), (&json!(0), &json!(miss)));
        assert_eq!(answer["endpoints"][0]["candidate"], true);
        assert!(!answer.to_string().contains("planted"), "{answer}");
    }
    api.refused("POST", "/config/ai/kv/explain?service_id=9", &request, 404, "no-rule");
    api.refused("POST", "/config/ai/kv/explain?service_id=x", &request, 400, "is no number");
    api.refused("POST", "/config/ai/kv/explain", &json!([1]), 400, "no JSON object");
    assert!(engine.seen().is_empty(), "nothing was sent");
}

#[test]
fn an_address_may_come_later_and_rules_may_share_one() {
    let api = Api::start(Options::default());
    let (one, two) = (StubEngine::start(), StubEngine::start());
    let mut later = rule(free_port(), &[endpoint(&one)], &json!({}));
    later["serviceArguments"]["externalIP"] = json!("192.0.2.7");
    api.done("POST", LB, &later);
    assert_eq!(api.rules()[0]["serviceArguments"]["warnings"], json!(["address not on host"]));
    api.refused("POST", LB, &api.rules()[0], 409, "lbrule-exists error");
    let port = free_port();
    for (engine, model) in [(&one, "a"), (&two, "b")] {
        api.done("POST", LB, &rule(port, &[endpoint(engine)], &json!({"model_name": model})));
    }
    assert_eq!(api.rules()[1]["serviceArguments"]["warnings"], Value::Null);
    for (engine, model) in [(&one, "a"), (&two, "b")] {
        let before = engine.seen().len();
        let answer =
            client::post(([127, 0, 0, 1], port).into(), "/v1/completions", &json!({"model": model, "prompt": "x"}));
        assert_eq!((answer.status, engine.seen().len()), (200, before + 1), "{model}");
    }
    api.done("DELETE", &format!("{}?model_name=a", forms(port)[0]), &Value::Null);
    let answer = client::post(([127, 0, 0, 1], port).into(), "/v1/completions", &json!({"model": "b", "prompt": "x"}));
    assert_eq!(answer.status, 200, "the other rule goes on");
}

#[test]
fn a_rule_listens_at_ipv6_and_at_every_address() {
    let api = Api::start(Options::default());
    let (one, two) = (StubEngine::start(), StubEngine::start());
    let port = free_port();
    let at = |address: &str, engine: &StubEngine| {
        let mut body = rule(port, &[endpoint(engine)], &json!({}));
        body["serviceArguments"]["externalIP"] = json!(address);
        body
    };
    let seen = |address: std::net::IpAddr, engine: &StubEngine| {
        let before = engine.seen().len();
        assert_eq!(client::get((address, port).into(), "/anything").status, 200);
        assert_eq!(engine.seen().len(), before + 1, "{address}");
    };
    api.done("POST", LB, &at("0.0.0.0", &one));
    seen([127, 0, 0, 9].into(), &one);
    // An address of its own beside the rule for all of them.
    api.done("POST", LB, &at("127.0.0.1", &two));
    seen([127, 0, 0, 1].into(), &two);
    seen([127, 0, 0, 9].into(), &one);
    let host_has_ipv6 = std::net::TcpListener::bind("[::1]:0").is_ok();
    for address in ["::1", "::"] {
        api.done("POST", LB, &at(address, &two));
        let path = format!("{LB}/externalipaddress/[{address}]/port/{port}/protocol/tcp");
        assert_eq!(api.get(&path)["serviceArguments"]["externalIP"], address);
        if host_has_ipv6 {
            seen(std::net::Ipv6Addr::LOCALHOST.into(), &two);
        }
        api.done("DELETE", &path, &Value::Null);
    }
    api.done("DELETE", &forms(port)[0], &Value::Null);
    seen([127, 0, 0, 9].into(), &one);
}

#[test]
fn rules_of_one_address_may_have_different_engines() {
    let api = Api::start(Options::default());
    let engines = [StubEngine::start(), StubEngine::start(), StubEngine::start()];
    let port = free_port();
    for (engine, kind) in engines.iter().zip(["vllm", "sglang", "trtllm"]) {
        let more = json!({"kvExactMode": 3, "kvEngineType": kind, "model_name": kind});
        api.done("POST", LB, &rule(port, &[endpoint(engine)], &more));
    }
    for (engine, kind) in engines.iter().zip(["vllm", "sglang", "trtllm"]) {
        let body = json!({"model": kind, "prompt": "x"});
        assert_eq!(client::post(([127, 0, 0, 1], port).into(), "/v1/completions", &body).status, 200);
        assert_eq!(engine.seen().len(), 1, "{kind}");
    }
    let kinds: Vec<Value> = api.rules().iter().map(|rule| rule["serviceArguments"]["kvEngineType"].clone()).collect();
    assert_eq!(kinds, ["vllm", "sglang", "trtllm"]);
}

#[test]
fn hosts_are_registered_shown_taken_out_and_left_to_their_probes_again() {
    let api = Api::start(Options::default());
    let engine = StubEngine::start();
    let port = free_port();
    assert_eq!(api.get("/config/endpoint/all"), json!({"Attr": []}));
    let host = json!({"hostName": "10.9.9.9", "name": "h", "inactiveReTries": 2, "probeType": "ping", "probeReq": "",
        "probeResp": "", "probeDuration": 60, "probePort": 0});
    let (status, answer) = api.ask("POST", "/config/endpoint", &host);
    assert_eq!((status, &answer["result"]), (200, &json!("Success")));
    assert!(answer["warnings"][0].as_str().is_some_and(|warning| warning.contains("GET /health")), "{answer}");
    api.refused("POST", "/config/endpoint", &host, 409, "host-exists error");
    api.refused("POST", "/config/endpoint", &json!({"probeType": "x"}), 400, "\"x\" is none of ping");
    assert_eq!(api.get("/config/endpoint/all")["Attr"][0]["hostName"], "10.9.9.9");
    let gone = "/config/endpoint/epipaddress/10.9.9.9";
    api.refused("DELETE", &format!("{gone}?name=other"), &Value::Null, 404, "host-notfound");
    api.done("DELETE", &format!("{gone}?name=h&probe_type=ping&probe_port=0"), &Value::Null);
    api.refused("DELETE", gone, &Value::Null, 404, "host-notfound");

    api.done("POST", LB, &rule(port, &[endpoint(&engine)], &json!({})));
    let state = |state: &str| json!({"hostName": "127.0.0.1", "epPort": engine.address.port(), "epProto": "tcp", "state": state});
    let shown = || api.get("/config/endpoint/all")["Attr"][0]["currState"].clone();
    assert_eq!(shown(), "ok");
    api.done("POST", "/config/endpointhoststate", &state("red"));
    assert_eq!(shown(), "nok");
    let ask = || client::get(([127, 0, 0, 1], port).into(), "/anything").status;
    assert_eq!(ask(), 503, "nothing is sent to a host that was taken out");
    api.done("POST", "/config/endpointhoststate", &state("green"));
    wait_for("probes bring it back", || (shown() == "ok").then_some(()));
    assert_eq!(ask(), 200);
    for (body, status, text) in [
        (json!({"hostName": "127.0.0.1", "state": "blue"}), 400, "\"blue\" is none of"),
        (json!({"hostName": "127.0.0.1", "epPort": 1, "state": "red"}), 400, "goes with epProto"),
        (json!({"state": "red"}), 400, "hostName: missing"),
        (json!({"hostName": "10.8.8.8", "state": "red"}), 404, "host-notfound"),
    ] {
        api.refused("POST", "/config/endpointhoststate", &body, status, text);
    }
}

#[test]
fn the_process_describes_itself_and_takes_its_settings_live() {
    let api = Api::start(Options::default());
    assert_eq!(api.get("/version")["product"], "kvlane");
    assert_eq!(api.get("/meta")["authentication"], "none");
    assert_eq!(api.get("/status/ready")["ready"], false);
    let capabilities = api.get("/status/capabilities");
    assert_eq!(capabilities["capabilities"][0]["name"], "kv_exact_vllm");
    let process = api.get("/status/process");
    assert_eq!(process["processAttr"][0]["pid"], api.gateway.pid().to_string());

    assert_eq!(api.get("/config/params"), json!({"logLevel": "info"}));
    api.done("POST", "/config/params", &json!({"logLevel": "debug"}));
    assert_eq!(api.get("/config/params"), json!({"logLevel": "debug"}));
    api.done("POST", "/config/params", &json!({"logLevel": "error"}));
    let before = api.gateway.log().len();
    api.done("POST", LB, &rule(free_port(), &[json!({"endpointIP": "127.0.0.1", "targetPort": 1})], &json!({})));
    assert_eq!(api.gateway.log().len(), before, "nothing but errors is logged");
    api.refused("POST", "/config/params", &json!({"logLevel": "loud"}), 400, "\"loud\" is no level");
    api.refused("POST", "/config/params", &json!({}), 400, "logLevel: missing");

    assert_eq!(api.get("/config/metrics"), json!({"prometheus": true}));
    assert_eq!(api.gateway.api("/metrics").status, 200);
    api.done("DELETE", "/config/metrics", &Value::Null);
    let answer = api.gateway.api("/metrics");
    assert!(answer.status == 503 && answer.text().contains("Prometheus option is disabled"), "{}", answer.text());
    api.done("POST", "/config/metrics", &json!({"prometheus": true}));
    assert_eq!(api.gateway.api("/metrics").status, 200);
    api.refused("POST", "/config/persist", &Value::Null, 409, "[state] directory");
}

#[test]
fn a_snapshot_is_restored_whole_or_not_at_all() {
    let api = Api::start(Options::default());
    let engine = StubEngine::start();
    let ports = [free_port(), free_port()];
    for port in ports {
        api.done("POST", LB, &rule(port, &[endpoint(&engine)], &json!({"kvExactMode": 3, "kvZmqPort": 5600})));
    }
    let snapshot = api.get("/config/snapshot");
    let nothing = json!({"added": [], "changed": [], "removed": []});
    let (status, answer) = api.ask("POST", "/config/restore?mode=dry-run", &snapshot);
    assert_eq!((status, &answer["difference"]), (200, &nothing), "{answer}");

    api.done("DELETE", &forms(ports[0])[0], &Value::Null);
    let third = free_port();
    api.done("POST", LB, &rule(third, &[endpoint(&engine)], &json!({})));
    let (_, dry) = api.ask("POST", "/config/restore?mode=dry-run", &snapshot);
    assert_eq!(dry["difference"]["added"], json!([format!("127.0.0.1:{}", ports[0])]));
    assert_eq!(dry["difference"]["removed"], json!([format!("127.0.0.1:{third}")]));
    let before = api.rules();

    let mut broken = snapshot.clone();
    broken["lbAttr"][1]["serviceArguments"]["kvBlockSize"] = json!(1);
    api.refused("POST", "/config/restore", &broken, 400, "lbAttr[1].serviceArguments.kvBlockSize");
    let busy = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let mut taken = snapshot.clone();
    taken["lbAttr"][0]["serviceArguments"]["port"] = json!(busy.local_addr().expect("bound").port());
    api.refused("POST", "/config/restore", &taken, 409, "cannot listen at");
    assert_eq!(api.rules(), before, "nothing was changed");

    let (status, answer) = api.ask("POST", "/config/restore?mode=commit", &snapshot);
    assert_eq!((status, &answer["difference"]), (200, &dry["difference"]));
    let by_port = |snapshot: &Value| {
        let mut rules = snapshot["lbAttr"].as_array().expect("a list").clone();
        rules.sort_by_key(|rule| rule["serviceArguments"]["port"].as_u64());
        rules
    };
    assert_eq!(by_port(&api.get("/config/snapshot")), by_port(&snapshot));
    assert_eq!(client::get(([127, 0, 0, 1], ports[0]).into(), "/anything").status, 200);
    api.refused("POST", "/config/restore?mode=x", &snapshot, 400, "neither dry-run nor commit");
    api.refused("POST", "/config/restore", &json!({"lbAttr": [], "version": 2}), 400, "version");
}

#[test]
fn the_document_knows_every_operation_and_every_operation_is_there() {
    let api = Api::start(Options::default());
    let operations = api.document.operations();
    assert!(operations.len() > 30, "{operations:?}");
    for (method, path) in operations {
        let filled = path.replace("{port}", "1").replace("{portmax}", "0").replace("{ip}", "127.0.0.1");
        let filled = filled.replace("{protocol}", "tcp").replace("{host}", "any");
        let filled = filled.replace("{lb_name}", "n").replace("{id}", "i").replace("{ip_address}", "10.0.0.1");
        let method = method.to_ascii_uppercase();
        let answer = client::call(api.gateway.admin, &method, &format!("{BASE}{filled}"), b"").expect("an answer");
        assert!(![405, 500, 501].contains(&answer.status), "{method} {path}: {}", answer.text());
        let unknown = answer.status == 404 && answer.text().contains("no such path");
        assert!(!unknown, "{method} {path}");
    }
    assert_eq!(client::call(api.gateway.admin, "PUT", &format!("{BASE}{LB}"), b"").expect("an answer").status, 405);
}
