//! Where cells are played: engines of every dialect, two gateways over them, and many rules, so that cells go side by side
//! and each finds its own counters.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};

use loadgen::engine::{EngineHandle, EngineKind, LegFault, LegView};
use serde_json::{Value, json};
use shards::disagg::Dialect;

use super::super::common::gateway::{Gateway, Options};
use super::super::common::pd::{Pairs, Plan, name_of, push_endpoint};
use super::super::common::{Scratch, client, free_address, wait_for};
use super::table::{DIALECTS, Leg};

/// The least time of a prefill leg at the hasty gateway, seconds.
pub const PATIENCE_SEC: u64 = 2;
/// The longest silence of an answer there: longer, so that it is always the prefill leg whose time is up first.
const SILENCE_MS: u64 = 3_000;

/// What of a rule's counters is looked at: all of P/D, and what the proxy counts of answers. Not
/// `loxilb_pd_sg_decode_close_drain_total`: which leg of SGLang ends first, where both end well, is nobody's choice.
pub const COUNTED: [&str; 22] = [
    "loxilb_ai_pd_kv_params_found_total",
    "loxilb_ai_pd_kv_params_missing_total",
    "loxilb_pd_admission_shed_total",
    "loxilb_pd_admission_queued_total",
    "loxilb_pd_admission_overflow_shed_total",
    "loxilb_pd_connect_failover_total",
    "loxilb_pd_connect_retry_same_ep_total",
    "loxilb_pd_connect_retry_same_ep_ok_total",
    "loxilb_pd_prefill_ep_died_total",
    "loxilb_pd_decode_ep_died_total",
    "loxilb_pd_decode_zero_byte_eof_total",
    "loxilb_pd_fallback_to_normal_total",
    "loxilb_pd_prefill_retry_total",
    "loxilb_pd_sg_room_retry_total",
    "loxilb_pd_sg_prefill_abort_decode_total",
    "loxilb_pd_sg_prefill_reject_relay_total",
    "loxilb_pd_sg_oversize_reject_total",
    "loxilb_pd_trt_ctx_early_exit_total",
    "kvlane_broken_answers_total",
    "kvlane_client_gone_total",
    "loxilb_ai_pd_prefill_duration_seconds_count",
    "loxilb_ai_pd_decode_ttft_seconds_count",
];

/// A rule's counters that are not 0, by short names: legs as `prefill ok`, others without prefix and suffix.
pub type Counters = BTreeMap<String, u64>;

/// Engines and gateways.
pub struct Stage {
    /// A gateway that waits long: what happens in it is what was done to it.
    pub patient: Gateway,
    /// One whose waits come to their end.
    pub hasty: Gateway,
    pairs: Vec<Pairs>,
    _tokenizers: Scratch,
}

/// Where cells of one dialect are played one after the other: a rule.
pub struct Lane<'s> {
    pub gateway: &'s Gateway,
    pub pairs: &'s Pairs,
    pub listen: SocketAddr,
    name: String,
    service: u32,
    /// What the rule has counted so far.
    counted: Counters,
}

/// The engines of a dialect.
fn kind_of(dialect: Dialect) -> EngineKind {
    match dialect {
        Dialect::NixlPull | Dialect::NixlPush => EngineKind::Vllm,
        Dialect::Bootstrap => EngineKind::Sglang,
        Dialect::Context => EngineKind::Trtllm,
    }
}

impl Stage {
    pub fn set() -> Self {
        let pairs = DIALECTS.map(|dialect| {
            let engine = match dialect {
                Dialect::NixlPush => |options: &mut loadgen::engine::EngineOptions| {
                    (options.pd_wait_ms, options.nixl_push) = (60_000, true);
                },
                _ => |options: &mut loadgen::engine::EngineOptions| options.pd_wait_ms = 60_000,
            };
            Pairs::start(&Plan { pairs: 2, engine, ..Plan::of(kind_of(dialect)) })
        });
        let tokenizers = super::super::common::fleet::tokenizers();
        let start = |patience_sec: u64, silence_ms: u64| {
            // Every connection is a new one: one that was kept could be dead, and be tried again.
            let config = format!(
                "[shards]\ncores = [0, 1]\n\n[limits]\nprompt_cache_bytes = 262144\nupstream_idle_connections_max = 0\n\
                 stream_idle_timeout_ms = {silence_ms}\n\n[tokenizers]\ndir = \"{}\"\n",
                tokenizers.path().display()
            );
            let environment = vec![
                ("LLB_PD_PREFILL_TIMEOUT_SEC", patience_sec.to_string()),
                // Engines fail here again and again, and are to be asked all the same.
                ("LLB_PD_ORIGIN_ERR_THRESHOLD", "0".to_owned()),
            ];
            Gateway::start(Options { config, environment, ..Options::default() })
        };
        let (patient, hasty) = (start(60, 60_000), start(PATIENCE_SEC, SILENCE_MS));
        Stage { patient, hasty, pairs: pairs.into(), _tokenizers: tokenizers }
    }

    pub fn pairs(&self, dialect: Dialect) -> &Pairs {
        let place = DIALECTS.iter().position(|other| *other == dialect).expect("all dialects are there");
        &self.pairs[place]
    }

    /// Posts a rule over all engines of a dialect.
    pub fn lane<'s>(&'s self, gateway: &'s Gateway, dialect: Dialect, name: &str) -> Lane<'s> {
        let pairs = self.pairs(dialect);
        let prefill = pairs.prefill.iter().map(|engine| prefill_endpoint(dialect, engine));
        let decode = pairs.decode.iter().map(|engine| endpoint(engine.http_addr, 2));
        let endpoints = prefill.zip(decode).flat_map(|(prefill, decode)| [prefill, decode]).collect();
        self.lane_over(gateway, dialect, name, endpoints)
    }

    /// Posts a rule over these endpoints.
    pub fn lane_over<'s>(
        &'s self,
        gateway: &'s Gateway,
        dialect: Dialect,
        name: &str,
        endpoints: Vec<Value>,
    ) -> Lane<'s> {
        let (pairs, listen) = (self.pairs(dialect), free_address());
        let mut arguments = json!({
            "externalIP": listen.ip().to_string(), "port": listen.port(), "protocol": "tcp", "mode": 4, "name": name,
            "pd_disagg_mode": true, "kvEngineType": name_of(kind_of(dialect)),
        });
        match dialect {
            Dialect::NixlPush => arguments["pdNixlPush"] = json!(true),
            Dialect::Bootstrap => arguments["pdBootstrapPort"] = json!(pairs.side_port),
            _ => {}
        }
        let rule = json!({"serviceArguments": arguments, "endpoints": endpoints});
        let answer = client::post(gateway.admin, "/netlox/v1/config/loadbalancer", &rule);
        assert_eq!(answer.status, 200, "{}", answer.text());
        let all = gateway.api("/config/loadbalancer/all").json();
        let rules = all["lbAttr"].as_array().expect("a list").iter().map(|rule| &rule["serviceArguments"]);
        let mut named = rules.filter(|rule| rule["name"] == name);
        let service = named.next().and_then(|rule| rule["service_id"].as_u64()).expect("the rule is there");
        let service = u32::try_from(service).expect("a small number");
        Lane { gateway, pairs, listen, name: name.to_owned(), service, counted: Counters::new() }
    }

    /// Checks that nothing is left of anything, at the engines and in the gateways, and that no engine saw its dialect
    /// broken; `sockets` are those of either gateway before there was a rule.
    pub fn assert_nothing_is_left(&self, sockets: [usize; 2]) {
        for (gateway, sockets) in [&self.patient, &self.hasty].into_iter().zip(sockets) {
            for gauge in
                ["kvlane_endpoint_in_flight", "kvlane_pd_in_flight", "kvlane_pd_parked", "kvlane_shard_connections"]
            {
                wait_for(&format!("{gauge} is 0"), || (gateway.metric_sum(gauge) == 0.0).then_some(()));
            }
            assert_eq!(gateway.metric_sum("kvlane_shard_panics_total"), 0.0);
            let gone = client::call(gateway.admin, "DELETE", "/netlox/v1/config/loadbalancer/all", b"");
            assert_eq!(gone.expect("an answer").status, 200);
            wait_for("the gateway has the sockets that it began with", || {
                (sockets_of(gateway) <= sockets).then_some(())
            });
        }
        for engine in self.pairs.iter().flat_map(|pairs| pairs.prefill.iter().chain(&pairs.decode)) {
            let at = engine.http_addr;
            wait_for(&format!("nobody is connected with {at}"), || (connections_with(at) == 0).then_some(()));
            let stats = engine.stats();
            assert_eq!((stats.running, stats.waiting, stats.used_blocks), (0, 0, 0), "{at}");
            assert_eq!(stats.pd_violations, 0, "{at} refused a leg");
            assert!(engine.legs().iter().all(|leg| leg.ended.is_some()), "{at}");
        }
    }
}

/// An endpoint of a rule.
pub fn endpoint(at: SocketAddr, role: u8) -> Value {
    json!({"endpointIP": at.ip().to_string(), "targetPort": at.port(), "weight": 1, "ep_role": role})
}

/// A prefill endpoint, with what its dialect wants to know of it.
pub fn prefill_endpoint(dialect: Dialect, engine: &EngineHandle) -> Value {
    let mut endpoint = endpoint(engine.http_addr, 1);
    if dialect == Dialect::NixlPush {
        let more = push_endpoint(engine);
        more.as_object().into_iter().flatten().for_each(|(name, value)| endpoint[name] = value.clone());
    }
    endpoint
}

/// An address that refuses connections for as long as it is held.
pub fn refusing() -> (socket2::Socket, SocketAddr) {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    socket.bind(&any.into()).expect("loopback has a free port");
    let address = socket.local_addr().ok().and_then(|address| address.as_socket()).expect("a bound socket has one");
    (socket, address)
}

/// Sockets of a gateway that lead somewhere else: those of a pair, which a shard makes with its first turn and keeps, do not.
pub fn sockets_of(gateway: &Gateway) -> usize {
    let pairs = std::fs::read_to_string("/proc/net/unix").expect("the kernel tells");
    let pairs: Vec<&str> = pairs.lines().filter_map(|line| line.split_whitespace().nth(6)).collect();
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", gateway.pid())).expect("the gateway runs");
    let targets = descriptors.flatten().filter_map(|descriptor| std::fs::read_link(descriptor.path()).ok());
    let inodes =
        targets.filter_map(|target| target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']').map(str::to_owned));
    inodes.filter(|inode| !pairs.contains(&inode.as_str())).count()
}

/// Connections of others with an address, as the kernel knows them: established ones, and those that one side has closed.
fn connections_with(at: SocketAddr) -> usize {
    let std::net::IpAddr::V4(ip) = at.ip() else { panic!("loopback of version 4") };
    let local = format!("{:08X}:{:04X}", u32::from_le_bytes(ip.octets()), at.port());
    let table = std::fs::read_to_string("/proc/net/tcp").expect("the kernel tells");
    // ESTABLISHED and CLOSE_WAIT.
    let open = |line: &&str| {
        let mut fields = line.split_whitespace().skip(1);
        let (own, state) = (fields.next(), fields.nth(1));
        own == Some(local.as_str()) && matches!(state, Some("01" | "08"))
    };
    table.lines().filter(open).count()
}

impl Lane<'_> {
    pub fn engines(&self, leg: Leg) -> &[EngineHandle] {
        match leg {
            Leg::Prefill => &self.pairs.prefill,
            Leg::Decode => &self.pairs.decode,
        }
    }

    /// Says what goes wrong with one leg of requests with a mark.
    pub fn order(&self, leg: Leg, mark: &str, fault: Option<LegFault>) {
        self.engines(leg).iter().for_each(|engine| engine.set_leg_fault_of(mark, fault).expect("few marks"));
    }

    /// One leg of requests with a mark, as the engines saw them, in order of their beginning.
    pub fn legs(&self, leg: Leg, mark: &str) -> Vec<LegView> {
        let all = self.engines(leg).iter().flat_map(EngineHandle::legs);
        let mut legs: Vec<_> = all.filter(|leg| leg.mark.as_deref() == Some(mark)).collect();
        legs.sort_by_key(|leg| leg.began);
        legs
    }

    /// What the rule counted since it was last asked to settle.
    pub fn counted(&self) -> Counters {
        let mut counted = self.read();
        for (name, before) in &self.counted {
            *counted.entry(name.clone()).or_default() -= before;
        }
        counted.retain(|_, count| *count > 0);
        counted
    }

    /// Waits until exactly this was counted, and begins anew.
    ///
    /// # Errors
    /// What was counted instead.
    pub fn settle(&mut self, expected: &[(String, u64)]) -> Result<(), String> {
        let expected: Counters = expected.iter().filter(|(_, count)| *count > 0).cloned().collect();
        let deadline = std::time::Instant::now() + super::super::common::PATIENCE;
        loop {
            let counted = self.counted();
            if counted == expected {
                self.forget();
                return Ok(());
            }
            if std::time::Instant::now() > deadline {
                return Err(format!("counted {counted:?}, expected {expected:?}"));
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// Begins to count anew.
    pub fn forget(&mut self) {
        self.counted = self.read();
    }

    fn read(&self) -> Counters {
        let text = self.gateway.api("/metrics").text();
        let own = format!("service=\"{}\"", self.service);
        let lines = text.lines().filter(|line| !line.starts_with('#') && line.contains(&own));
        let counted = lines.filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let (name, labels) = series.split_once('{')?;
            let label = |label: &str| labels.split(&format!("{label}=\"")).nth(1)?.split('"').next();
            let key = match name {
                "loxilb_ai_pd_requests_total" => format!("{} {}", label("phase")?, label("status")?),
                name if COUNTED.contains(&name) => short(name).to_owned(),
                _ => return None,
            };
            let value: f64 = value.parse().ok()?;
            (value > 0.0).then_some((key, value as u64))
        });
        counted.collect()
    }

    /// Takes the rule away.
    pub fn close(self) {
        let path = format!("/netlox/v1/config/loadbalancer/name/{}", self.name);
        let answer = client::call(self.gateway.admin, "DELETE", &path, b"").expect("an answer");
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
}

fn short(name: &str) -> &str {
    let name = name.strip_suffix("_total").or(name.strip_suffix("_seconds_count")).unwrap_or(name);
    let found = match name {
        "loxilb_ai_pd_prefill_duration" | "loxilb_ai_pd_decode_ttft" => name.strip_prefix("loxilb_ai_pd_"),
        _ => name.strip_prefix("loxilb_pd_").or(name.strip_prefix("kvlane_")).or(name.strip_prefix("loxilb_")),
    };
    found.unwrap_or(name)
}
