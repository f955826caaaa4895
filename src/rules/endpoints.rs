//! The endpoints of a rule, and where their cache events come from.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use shards::service::{Engine, Role};

use crate::fields::{Fields, Report, Value};

use super::check::{self, Facts, warn_of_unused};
use super::{ENDPOINTS_MAX, EventPlace, EventSource, Host, KvRule, RuleEndpoint, ranges};

/// Reads all endpoints and checks what they say together. Events of decode endpoints are read where `of_decode` says so.
pub(super) fn read(
    rule: &Fields<'_>,
    list: Vec<Fields<'_>>,
    report: &mut Report,
    facts: &Facts,
    engine: Engine,
    (kv, of_decode): (Option<&KvRule>, bool),
) -> Vec<RuleEndpoint> {
    if list.is_empty() {
        rule.invalid(report, "endpoints", "missing: a rule needs at least one endpoint");
    }
    if list.len() > ENDPOINTS_MAX {
        rule.invalid(report, "endpoints", format!("{} endpoints, at most {ENDPOINTS_MAX} are taken", list.len()));
        return Vec::new();
    }
    let (mut prefill, mut decode) = (false, false);
    let mut warned = false;
    let mut seen = Seen::default();
    let mut endpoints = Vec::with_capacity(list.len());
    for (index, mut fields) in list.into_iter().enumerate() {
        let role = read_role(&mut fields, report, facts);
        (prefill, decode) = (prefill || role == Role::Prefill, decode || role == Role::Decode);
        let before = report.problems.len();
        refuse_options(&mut fields, report, engine);
        let has_events = kv.filter(|_| role != Role::Decode || of_decode);
        let endpoint = RuleEndpoint { role, ..read_one(&mut fields, report, engine, has_events) };
        if report.problems.len() == before {
            check_loop(&fields, report, facts, &endpoint);
            check_ports(&fields, report, &endpoint, kv.map_or(1, |kv| kv.ranks));
            seen.check(&fields, report, index, &endpoint, kv.map_or(1, |kv| kv.ranks));
        }
        // Said of the first of them: what holds for one holds for all.
        warned = warned || warn_of_unused(&mut fields, report, facts, &["kvZmqPort", "kvReplayPort", "kvZmqBind"]);
        read_inert(&mut fields, report);
        fields.finish(report);
        endpoints.push(endpoint);
    }
    if facts.pd && !(prefill && decode) {
        let message = "pd-disagg requires at least 1 prefill (ep_role=1) and 1 decode (ep_role=2) endpoint";
        rule.invalid(report, "pd_disagg_mode", message);
    }
    endpoints
}

fn read_role(fields: &mut Fields<'_>, report: &mut Report, facts: &Facts) -> Role {
    let role = match fields.int_in(report, "ep_role", ranges::ROLE) {
        Some(1) => Role::Prefill,
        Some(2) => Role::Decode,
        _ => Role::Normal,
    };
    if role != Role::Normal && !facts.pd {
        let number = role.number();
        let message = if facts.is_exact() {
            format!("{number} is refused: kvExactMode 3 is a single pool, in which every endpoint has ep_role 0")
        } else {
            format!("{number} is refused: only rules with pd_disagg_mode have prefill and decode endpoints")
        };
        fields.invalid(report, "ep_role", message);
    }
    role
}

/// Refuses event options of an engine that publishes none.
fn refuse_options(fields: &mut Fields<'_>, report: &mut Report, engine: Engine) {
    for name in ["kvZmqPort", "kvReplayPort", "kvZmqBind", "nixl_port"] {
        if engine == Engine::Llamacpp && fields.take(name).is_some_and(|node| node.value != Value::Int(0)) {
            let message =
                format!("is refused for kv-engine-type llamacpp: it publishes no cache events; leave {name} out");
            fields.invalid(report, name, message);
        }
    }
}

/// An endpoint at which the rule itself listens would be sent its own requests again and again.
fn check_loop(fields: &Fields<'_>, report: &mut Report, facts: &Facts, endpoint: &RuleEndpoint) {
    let listen = facts.listen;
    let here = match &endpoint.host {
        Host::Ip(ip) => *ip == listen.ip() || (listen.ip().is_unspecified() && is_loopback(*ip, listen)),
        Host::Name(name) => name == "localhost" && (listen.ip().is_loopback() || listen.ip().is_unspecified()),
    };
    if here && endpoint.port == listen.port() {
        fields.invalid(report, "endpointIP", format!("{endpoint} is the rule's own address, {listen}: it would loop"));
    }
}

fn is_loopback(ip: IpAddr, listen: SocketAddr) -> bool {
    ip.is_loopback() && ip.is_ipv4() == listen.is_ipv4()
}

/// One port of an engine cannot serve requests, events and replays.
fn check_ports(fields: &Fields<'_>, report: &mut Report, endpoint: &RuleEndpoint, ranks: u8) {
    let Some(events) = &endpoint.events else { return };
    let near = |a: u16, b: u16, room: u8| a.abs_diff(b) < u16::from(room);
    let serving = |first: u16| endpoint.port >= first && near(endpoint.port, first, ranks);
    let live = match events.live {
        EventPlace::Connect(port) => Some(port),
        EventPlace::Bind(_) => None,
    };
    // A replay port that the endpoint does not name is a guess, which nobody answers where it is wrong.
    let replay = events.replay_port.filter(|_| events.own_replay);
    let with_ranks = if ranks > 1 { format!(" (with {ranks} ranks)") } else { String::new() };
    for (name, port) in [("kvZmqPort", live), ("kvReplayPort", replay)] {
        if let Some(port) = port.filter(|port| serving(*port)) {
            let message = format!("{port}{with_ranks} is also the targetPort: the engine serves requests there");
            fields.invalid(report, name, message);
        }
    }
    if let (Some(live), Some(replay)) = (live, replay)
        && near(live, replay, ranks)
    {
        let message = format!("{replay}{with_ranks} is also the event port {live}: an engine has a port for each");
        fields.invalid(report, "kvReplayPort", message);
    }
}

fn read_one(fields: &mut Fields<'_>, report: &mut Report, engine: Engine, kv: Option<&KvRule>) -> RuleEndpoint {
    if engine == Engine::Llamacpp {
        return read_place(fields, report, None);
    }
    let own_port = fields.int_in(report, "kvZmqPort", ranges::PORT);
    let own_replay = fields.int_in(report, "kvReplayPort", ranges::PORT);
    let bind = read_bind(fields, report);
    if own_port.is_some() && bind.is_some() {
        fields.invalid(report, "kvZmqBind", "cannot stand beside kvZmqPort: an engine either listens or connects");
    }
    // TensorRT-LLM is asked at its serving port, unless the endpoint says where it pushes its events.
    let pushes = engine != Engine::Trtllm || own_port.is_some() || bind.is_some();
    let events = kv.filter(|_| pushes).map(|kv| {
        let port = own_port.map_or(kv.zmq_port, |port| port as u16);
        let live = bind.map_or(EventPlace::Connect(port), EventPlace::Bind);
        let event_port = match live {
            EventPlace::Connect(port) => port,
            EventPlace::Bind(address) => address.port(),
        };
        let last = u16::from(kv.ranks) - 1;
        for (name, port) in [("kvZmqPort", Some(i64::from(event_port))), ("kvReplayPort", own_replay)] {
            if port.is_some_and(|port| port + i64::from(last) > 65_535) {
                fields.invalid(report, name, format!("with {} ranks ends beyond port 65535", kv.ranks));
            }
        }
        let default_replay = || {
            let offset = Some(kv.replay_port_offset).filter(|offset| *offset != 0);
            let port = offset.and_then(|offset| event_port.checked_add(offset));
            port.filter(|port| port.checked_add(last).is_some())
        };
        EventSource {
            live,
            replay_port: own_replay.map(|port| port as u16).or_else(default_replay),
            own: own_port.is_some() || bind.is_some(),
            own_replay: own_replay.is_some(),
        }
    });
    read_place(fields, report, events)
}

fn read_place(fields: &mut Fields<'_>, report: &mut Report, events: Option<EventSource>) -> RuleEndpoint {
    RuleEndpoint {
        host: read_host(fields, report),
        port: read_port(fields, report),
        // A list of addresses alone means that all of them count.
        weight: fields.int_in(report, "weight", ranges::WEIGHT).map_or(1, |weight| weight as u32),
        backup: fields.flag(report, "backup").unwrap_or(false),
        role: Role::Normal,
        nixl_port: fields.int_in(report, "nixl_port", ranges::PORT_OR_NONE).map_or(0, |port| port as u16),
        nixl_engine_id: check::text(fields, report, "nixl_engine_id"),
        events,
    }
}

pub(super) fn read_port(fields: &mut Fields<'_>, report: &mut Report) -> u16 {
    let before = report.problems.len();
    match fields.int_in(report, "targetPort", ranges::PORT) {
        Some(port) => port as u16,
        None => {
            if report.problems.len() == before {
                fields.invalid(report, "targetPort", "missing: the port that the engine listens at");
            }
            0
        }
    }
}

pub(super) fn read_host(fields: &mut Fields<'_>, report: &mut Report) -> Host {
    let nowhere = Host::Ip(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    let before = report.problems.len();
    let Some(text) = fields.text_set(report, "endpointIP") else {
        if report.problems.len() == before {
            fields.invalid(report, "endpointIP", "missing: the engine's address or DNS name");
        }
        return nowhere;
    };
    let literal = text.trim_start_matches('[').trim_end_matches(']');
    if let Ok(ip) = literal.parse::<IpAddr>() {
        if ip.is_unspecified() {
            fields.invalid(report, "endpointIP", format!("{text:?} names no host to connect to"));
        }
        return Host::Ip(ip);
    }
    if is_dns_name(text) {
        return Host::Name(text.trim_end_matches('.').to_ascii_lowercase());
    }
    fields.invalid(
        report,
        "endpointIP",
        format!("malformed-lbep error: {text:?} is neither an address nor a DNS name"),
    );
    nowhere
}

fn is_dns_name(text: &str) -> bool {
    let name = text.strip_suffix('.').unwrap_or(text);
    let label = |label: &str| {
        !label.is_empty()
            && label.len() <= 63
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    // A name of digits and dots alone is a mistyped address.
    name.len() <= 253 && name.split('.').all(label) && name.bytes().any(|b| b.is_ascii_alphabetic())
}

fn read_bind(fields: &mut Fields<'_>, report: &mut Report) -> Option<SocketAddr> {
    let text = fields.text_set(report, "kvZmqBind")?;
    let address = text.strip_prefix("tcp://").map(|rest| rest.replace('*', "0.0.0.0"));
    let address = address.and_then(|rest| rest.parse::<SocketAddr>().ok()).filter(|address| address.port() != 0);
    if address.is_none() {
        fields.invalid(report, "kvZmqBind", format!("{text:?} is not of the form \"tcp://ADDRESS:PORT\""));
    }
    address
}

/// Members that clients send and a readback shows, without effect here.
fn read_inert(fields: &mut Fields<'_>, report: &mut Report) {
    for name in ["state", "counter", "ep_idx"] {
        fields.take(name);
    }
    for name in ["subnetId", "monitorAddress", "httpMethod", "urlPath", "expectedCodes", "httpVersion", "domainName"] {
        if let Some(value) = fields.text_set(report, name) {
            let message = format!("{value:?} is accepted and has no effect: kvlane asks every endpoint GET /health");
            fields.warn(report, name, message);
        }
    }
}

/// What the endpoints so far have taken.
#[derive(Default)]
struct Seen {
    addresses: HashMap<(Host, u16), usize>,
    events: HashMap<String, (usize, u8)>,
}

impl Seen {
    fn check(&mut self, fields: &Fields<'_>, report: &mut Report, index: usize, endpoint: &RuleEndpoint, ranks: u8) {
        if let Some(first) = self.addresses.insert(endpoint.identity(), index) {
            fields.invalid(report, "endpointIP", format!("{endpoint} is already endpoints[{first}]"));
        }
        let Some(events) = &endpoint.events else { return };
        for rank in 0..ranks {
            let address = events.address(&endpoint.host, rank);
            if let Some((other, other_rank)) = self.events.insert(address.clone(), (index, rank)) {
                let message = format!(
                    "the events of rank {rank} would come from {address}, as those of endpoints[{other}] rank \
                     {other_rank} do: give each engine a kvZmqPort of its own"
                );
                fields.invalid(report, "kvZmqPort", message);
                return;
            }
        }
    }
}

impl EventSource {
    /// Where the events of a rank of an endpoint on `host` come from, for comparing and for reading.
    #[must_use]
    pub fn address(&self, host: &Host, rank: u8) -> String {
        match self.live {
            EventPlace::Bind(address) => {
                let port = address.port().saturating_add(u16::from(rank));
                format!("tcp://{} (bound here)", SocketAddr::new(address.ip(), port))
            }
            EventPlace::Connect(port) => {
                let port = port.saturating_add(u16::from(rank));
                match host {
                    Host::Ip(ip) => format!("tcp://{}", SocketAddr::new(*ip, port)),
                    Host::Name(name) => format!("tcp://{name}:{port}"),
                }
            }
        }
    }
}
