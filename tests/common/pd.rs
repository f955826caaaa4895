//! A gateway over prefill and decode engines, simulated in this process so that tests read both engines' own accounts.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Instant;

use loadgen::engine::{Engine, EngineHandle, EngineKind, EngineOptions, LegEnd, LegKind, LegView, Role};
use serde_json::{Value, json};

use super::client::{self, Answer};
use super::gateway::{Gateway, Options};
use super::{Scratch, free_address, free_port, wait_for};

/// Engines of one kind and a gateway with a P/D rule over them, their roles alternating in the rule.
pub struct Fleet {
    /// Engines that compute prompts.
    pub prefill: Vec<EngineHandle>,
    /// Engines that go on from there.
    pub decode: Vec<EngineHandle>,
    /// The gateway.
    pub gateway: Gateway,
    /// Where clients connect to.
    pub listen: SocketAddr,
    /// The rule's number.
    pub service: u32,
    _tokenizers: Scratch,
}

/// What a fleet is like.
pub struct Plan {
    /// Which engines.
    pub kind: EngineKind,
    /// How many of each role.
    pub pairs: usize,
    /// What is special of all engines.
    pub engine: fn(&mut EngineOptions),
    /// More members of `serviceArguments`.
    pub rule: Value,
    /// More members of prefill endpoints, by their engine.
    pub prefill_endpoint: fn(&EngineHandle) -> Value,
    /// More members of decode endpoints, by their engine.
    pub decode_endpoint: fn(&EngineHandle) -> Value,
    /// The gateway's environment.
    pub environment: Vec<(&'static str, String)>,
    /// More of the gateway's configuration.
    pub config: String,
}

impl Plan {
    /// Three of each role, nothing special.
    pub fn of(kind: EngineKind) -> Self {
        Plan {
            kind,
            pairs: 3,
            engine: |_| (),
            rule: json!({}),
            prefill_endpoint: |_| json!({}),
            decode_endpoint: |_| json!({}),
            environment: Vec::new(),
            config: String::new(),
        }
    }
}

/// What a rule says of a prefill engine that pushes: where its side channel is, and its name.
pub fn push_endpoint(engine: &EngineHandle) -> Value {
    let side = engine.side_addr().expect("a prefill engine has one");
    json!({"nixl_port": side.port(), "nixl_engine_id": format!("engine-{side}")})
}

/// The kind's name in rules.
pub fn name_of(kind: EngineKind) -> &'static str {
    match kind {
        EngineKind::Vllm => "vllm",
        EngineKind::Sglang => "sglang",
        EngineKind::Trtllm => "trtllm",
        EngineKind::Llamacpp => "llamacpp",
    }
}

fn start_engine(plan: &Plan, role: Role, host: IpAddr, side_port: u16) -> EngineHandle {
    let mut options = EngineOptions { kind: plan.kind, role, host, ..EngineOptions::ephemeral() };
    if plan.kind == EngineKind::Trtllm {
        options.block_size = 32;
    }
    options.pd_wait_ms = 5_000;
    options.side_port = side_port;
    (plan.engine)(&mut options);
    Engine::start(&options).expect("free ports and the embedded model need nothing")
}

/// Prefill and decode engines of one kind.
pub struct Pairs {
    /// Engines that compute prompts.
    pub prefill: Vec<EngineHandle>,
    /// Engines that go on from there.
    pub decode: Vec<EngineHandle>,
    /// The port that SGLang's bootstrap servers share; else 0.
    pub side_port: u16,
}

impl Pairs {
    /// Starts as many as the plan says.
    pub fn start(plan: &Plan) -> Self {
        // SGLang's bootstrap servers share a port, so that each engine has a host of its own.
        let side_port = if plan.kind == EngineKind::Sglang { free_port() } else { 0 };
        let host = |index: usize| match plan.kind {
            EngineKind::Sglang => IpAddr::from(Ipv4Addr::new(127, 0, 0, 2 + index as u8)),
            _ => IpAddr::from(Ipv4Addr::LOCALHOST),
        };
        let prefill = (0..plan.pairs).map(|index| start_engine(plan, Role::Prefill, host(index), side_port)).collect();
        let decode = (0..plan.pairs).map(|index| start_engine(plan, Role::Decode, host(index), 0)).collect();
        Pairs { prefill, decode, side_port }
    }
}

impl Fleet {
    /// Starts it, and posts its rule.
    pub fn start(plan: &Plan) -> Self {
        let Pairs { prefill, decode, side_port } = Pairs::start(plan);
        let tokenizers = super::fleet::tokenizers();
        let config = format!(
            "files = [\"{}\"]\n[limits]\nprompt_cache_bytes = 262144\n{}\n[tokenizers]\ndir = \"{}\"\n",
            std::env::temp_dir().display(),
            plan.config,
            tokenizers.path().display()
        );
        let gateway = Gateway::start(Options { config, environment: plan.environment.clone(), ..Options::default() });
        let listen = free_address();
        let mut fleet = Fleet { prefill, decode, gateway, listen, service: 0, _tokenizers: tokenizers };
        fleet.post_rule(plan, side_port);
        fleet
    }

    fn post_rule(&mut self, plan: &Plan, side_port: u16) {
        let mut endpoints = Vec::new();
        for (prefill, decode) in self.prefill.iter().zip(&self.decode) {
            let endpoint = |engine: &EngineHandle, role: u8| {
                let at = engine.http_addr;
                json!({"endpointIP": at.ip().to_string(), "targetPort": at.port(), "weight": 1, "ep_role": role})
            };
            let mut first = endpoint(prefill, 1);
            if let Some(events) = prefill.event_addr {
                first["kvZmqPort"] = json!(events.port());
            }
            if let Some(replay) = prefill.replay_addr {
                first["kvReplayPort"] = json!(replay.port());
            }
            merge(&mut first, &(plan.prefill_endpoint)(prefill));
            let mut second = endpoint(decode, 2);
            merge(&mut second, &(plan.decode_endpoint)(decode));
            endpoints.extend([first, second]);
        }
        let mut arguments = json!({
            "externalIP": self.listen.ip().to_string(), "port": self.listen.port(), "protocol": "tcp", "sel": 0,
            "mode": 4, "name": "pd", "pd_disagg_mode": true, "kvExactMode": 1, "kvBlockSize": 16,
            "kvEngineType": name_of(plan.kind), "routeHeader": true,
        });
        match plan.kind {
            EngineKind::Vllm => arguments["kvNoneHashSeed"] = json!("0"),
            EngineKind::Sglang => arguments["pdBootstrapPort"] = json!(side_port),
            _ => arguments["kvBlockSize"] = json!(32),
        }
        merge(&mut arguments, &plan.rule);
        let rule = json!({"serviceArguments": arguments, "endpoints": endpoints});
        let admin = self.gateway.admin;
        let answer = client::post(admin, "/netlox/v1/config/loadbalancer", &rule);
        assert_eq!(answer.status, 200, "{}", answer.text());
        wait_for("the rule is served", || client::call(self.listen, "GET", "/v1/models", b"").ok());
    }

    /// One request on a connection of its own.
    pub fn ask(&self, path: &str, body: &[u8]) -> Answer {
        client::call(self.listen, "POST", path, body).expect("the gateway answers")
    }

    /// Legs of all prefill or decode engines, in order of their beginning.
    pub fn legs(&self, kind: LegKind) -> Vec<LegView> {
        let engines = if kind == LegKind::Prefill { &self.prefill } else { &self.decode };
        let mut legs: Vec<LegView> = engines.iter().flat_map(EngineHandle::legs).collect();
        legs.sort_by_key(|leg| leg.began);
        legs
    }

    /// Every engine.
    pub fn engines(&self) -> impl Iterator<Item = &EngineHandle> {
        self.prefill.iter().chain(&self.decode)
    }

    /// Checks that nothing is left of any request, at the engines and in the gateway.
    pub fn assert_idle(&self, what: &str) {
        wait_for(&format!("{what}: nothing is left running"), || {
            let running = self.engines().flat_map(EngineHandle::legs).filter(|leg| leg.ended.is_none()).count();
            let loaded = self.engines().map(|engine| engine.stats().running + engine.stats().waiting).sum::<u64>();
            (running == 0 && loaded == 0).then_some(())
        });
        wait_for(&format!("{what}: nothing counts as in flight"), || {
            (self.gateway.metric_sum("kvlane_endpoint_in_flight") == 0.0).then_some(())
        });
    }

    /// Checks that no engine saw its dialect broken, and that every prefilled prompt was fetched.
    pub fn assert_clean(&self) {
        for engine in self.engines() {
            assert_eq!(engine.stats().pd_violations, 0, "{} refused a leg", engine.http_addr);
            assert_eq!(engine.stats().pd_held, 0, "{} keeps a prompt that nobody came for", engine.http_addr);
        }
    }

    /// Waits until the gateway knows what the prefill engines hold.
    pub fn wait_for_inventory(&self) {
        for (place, engine) in self.prefill.iter().enumerate() {
            wait_for("the inventory follows the engine", || {
                let held = engine.cached_keys()?.len();
                let path = format!("/config/ai/kv/inventory?service_id={}&ep_idx={}", self.service, 2 * place);
                let answer = self.gateway.api(&path);
                (answer.status == 200 && answer.json()["total"] == held).then_some(())
            });
        }
    }
}

fn merge(into: &mut Value, more: &Value) {
    for (name, value) in more.as_object().into_iter().flatten() {
        into[name] = value.clone();
    }
}

/// How a leg ended.
pub fn end_of(leg: &LegView) -> Option<LegEnd> {
    leg.ended.map(|(_, end)| end)
}

/// When a leg ended.
pub fn ended_at(leg: &LegView) -> Option<Instant> {
    leg.ended.map(|(at, _)| at)
}

/// The data of a stream of events.
pub fn events(body: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(body);
    text.split("\n\n").filter_map(|event| event.trim_start().strip_prefix("data: ")).map(str::to_owned).collect()
}

/// The text that a chat's stream or whole answer says.
pub fn said(answer: &Answer) -> String {
    let piece = |json: &Value| {
        let choice = &json["choices"][0];
        let content = choice["delta"]["content"].as_str().or_else(|| choice["message"]["content"].as_str());
        content.or_else(|| choice["text"].as_str()).unwrap_or_default().to_owned()
    };
    if answer.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream")) {
        let data = events(&answer.body);
        let chunks = data.iter().filter_map(|data| serde_json::from_str::<Value>(data).ok());
        return chunks.map(|chunk| piece(&chunk)).collect();
    }
    piece(&answer.json())
}
