//! Endpoint hosts: what is registered of them, and an operator's word on their state.
//!
//! In the reference a registration says how a host is probed. Here every endpoint of a rule is asked `GET /health` each
//! second, so a registration is shown again and changes nothing, which its answer says.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::fields::{Fields, Kind, Problem, Report};
use crate::rules::{Host, TEXT_BYTES_MAX};
use crate::supervise::{HostState, View};

use super::Context;
use super::answers::{problems, refusal, success};
use super::ask::{Asked, Whole};
use super::rule_path::{Taken, taken};
use super::settings::parsed;

/// Registrations at once. Beyond it new ones are refused.
const HOSTS_MAX: usize = 4096;
/// `probeType` as the reference knows it.
const PROBE_TYPES: [&str; 8] = ["ping", "tcp", "udp", "sctp", "http", "https", "tls-hello", "none"];

/// Registered hosts; they end with the process.
#[derive(Clone, Debug, Default)]
pub(super) struct Hosts(Arc<Mutex<Vec<Registered>>>);

/// One registration.
#[derive(Clone, Debug, PartialEq)]
struct Registered {
    host: String,
    name: String,
    probe_type: String,
    probe_port: u16,
    retries: i64,
    duration: i64,
    request: String,
    response: String,
}

impl Registered {
    fn is_same_as(&self, other: &Self) -> bool {
        (&self.host, &self.name, &self.probe_type, self.probe_port)
            == (&other.host, &other.name, &other.probe_type, other.probe_port)
    }

    fn show(&self, state: &str) -> Value {
        json!({
            "hostName": self.host, "name": self.name, "inactiveReTries": self.retries, "probeType": self.probe_type,
            "probeReq": self.request, "probeResp": self.response, "probeDuration": self.duration,
            "probePort": self.probe_port, "minDelay": "", "avgDelay": "", "maxDelay": "", "currState": state,
        })
    }
}

impl Hosts {
    /// Only a list is touched under the lock.
    fn lock(&self) -> MutexGuard<'_, Vec<Registered>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) async fn list(State(context): State<Context>) -> Response {
    let view = context.control.view();
    let mut shown: Vec<Value> = in_rules(&view);
    let state = |host: &str| if any_up(&view, host) { "ok" } else { "nok" };
    shown.extend(context.hosts.lock().iter().map(|registered| registered.show(state(&registered.host))));
    Json(json!({ "Attr": shown })).into_response()
}

/// The endpoints of rules, each address once.
fn in_rules(view: &View) -> Vec<Value> {
    let mut states: Vec<(String, u16, bool)> = Vec::new();
    for entry in &view.entries {
        for place in entry.in_rule() {
            let Some(endpoint) = place.in_rule.and_then(|at| entry.rule.endpoints.get(at)) else { continue };
            let up = place.address.is_some() && place.shared.is_up();
            let host = endpoint.host.to_string();
            match states.iter_mut().find(|(known, port, _)| *known == host && *port == endpoint.port) {
                Some((.., known)) => *known &= up,
                None => states.push((host, endpoint.port, up)),
            }
        }
    }
    let show = |(host, port, up): (String, u16, bool)| {
        let name = format!("{host}_{port}");
        let known = Registered {
            host,
            name,
            probe_type: "http".to_owned(),
            probe_port: port,
            retries: 2,
            duration: 1,
            request: "/health".to_owned(),
            response: String::new(),
        };
        known.show(if up { "ok" } else { "nok" })
    };
    states.into_iter().map(show).collect()
}

fn any_up(view: &View, host: &str) -> bool {
    let of_host = |endpoint: &crate::rules::RuleEndpoint| endpoint.host.to_string() == host;
    view.entries.iter().any(|entry| {
        entry.in_rule().any(|place| {
            let endpoint = place.in_rule.and_then(|at| entry.rule.endpoints.get(at));
            endpoint.is_some_and(of_host) && place.address.is_some() && place.shared.is_up()
        })
    })
}

pub(super) async fn register(State(context): State<Context>, Whole(body): Whole) -> Response {
    let (registered, mut warnings) = match parsed(&body, read) {
        Ok(read) => read,
        Err(found) => return problems(&found),
    };
    let mut hosts = context.hosts.lock();
    if let Some(known) = hosts.iter_mut().find(|known| known.is_same_as(&registered)) {
        if *known == registered {
            return refusal(
                StatusCode::CONFLICT,
                "host-exists error: it is registered already, without any difference",
            );
        }
        *known = registered;
    } else if hosts.len() >= HOSTS_MAX {
        return refusal(StatusCode::FORBIDDEN, &format!("{HOSTS_MAX} hosts are registered: delete some"));
    } else {
        hosts.push(registered);
    }
    let message = "kvlane asks every endpoint of a rule GET /health each second: a registration is shown, and changes \
                   nothing";
    warnings.push(Problem { kind: Kind::Invalid, line: None, key: String::new(), message: message.into() });
    success(&warnings)
}

pub(super) async fn unregister(State(context): State<Context>, host: Taken<String>, Asked(query): Asked) -> Response {
    let host = match taken(host) {
        Ok(host) => host,
        Err(response) => return *response,
    };
    let is = |name: &str, value: &str| query.get(name).is_none_or(|wanted| wanted.is_empty() || wanted == value);
    let mut hosts = context.hosts.lock();
    let before = hosts.len();
    hosts.retain(|known| {
        let port = known.probe_port.to_string();
        !(known.host.eq_ignore_ascii_case(&host)
            && is("name", &known.name)
            && is("probe_type", &known.probe_type)
            && (is("probe_port", &port) || query.get("probe_port").is_some_and(|port| port == "0")))
    });
    if hosts.len() == before {
        return refusal(StatusCode::NOT_FOUND, &format!("host-notfound: {host} is not registered so"));
    }
    success(&[])
}

pub(super) async fn set_state(State(context): State<Context>, Whole(body): Whole) -> Response {
    let ((host, port, state), warnings) = match parsed(&body, read_state) {
        Ok(read) => read,
        Err(found) => return problems(&found),
    };
    let addresses = addresses_of(&context.control.view(), &host);
    if addresses.is_empty() {
        return refusal(StatusCode::NOT_FOUND, &format!("host-notfound: no rule has an endpoint at {host}"));
    }
    for ip in addresses {
        if !context.control.hold((ip, port), state) {
            return refusal(StatusCode::FORBIDDEN, "too many hosts are held out: set some of them green");
        }
    }
    success(&warnings)
}

/// The addresses of a host that some rule names.
fn addresses_of(view: &View, host: &str) -> Vec<IpAddr> {
    let mut found: Vec<IpAddr> = Vec::new();
    for entry in &view.entries {
        for place in entry.in_rule() {
            let named =
                place.in_rule.and_then(|at| entry.rule.endpoints.get(at)).is_some_and(|endpoint| {
                    match &endpoint.host {
                        Host::Ip(ip) => ip.to_string() == host,
                        Host::Name(name) => name.eq_ignore_ascii_case(host),
                    }
                });
            if let Some(address) = place.address.filter(|_| named)
                && !found.contains(&address.ip())
            {
                found.push(address.ip());
            }
        }
    }
    found
}

fn read_host(fields: &mut Fields<'_>, report: &mut Report) -> String {
    let host = text(fields, report, "hostName");
    if host.is_empty() {
        fields.invalid(report, "hostName", "missing: the address or name of an engine's host");
    }
    host
}

fn text(fields: &mut Fields<'_>, report: &mut Report, name: &str) -> String {
    let value = fields.text(report, name).unwrap_or_default();
    if value.len() > TEXT_BYTES_MAX {
        fields.invalid(report, name, format!("has {} bytes, at most {TEXT_BYTES_MAX} are taken", value.len()));
    }
    value.to_owned()
}

fn read(fields: &mut Fields<'_>, report: &mut Report) -> Registered {
    let probe_type = text(fields, report, "probeType");
    if !probe_type.is_empty() && !PROBE_TYPES.contains(&probe_type.as_str()) {
        let known = PROBE_TYPES.join(", ");
        fields.invalid(report, "probeType", format!("{probe_type:?} is none of {known}"));
    }
    for name in ["httpMethod", "urlPath", "expectedCodes", "httpVersion", "domainName"] {
        text(fields, report, name);
    }
    Registered {
        host: read_host(fields, report),
        name: text(fields, report, "name"),
        probe_port: fields.int_in(report, "probePort", 0..=65_535).map_or(0, |port| port as u16),
        retries: fields.int_in(report, "inactiveReTries", 0..=100).unwrap_or(2),
        duration: fields.int_in(report, "probeDuration", 0..=86_400).unwrap_or(60),
        request: text(fields, report, "probeReq"),
        response: text(fields, report, "probeResp"),
        probe_type,
    }
}

fn read_state(fields: &mut Fields<'_>, report: &mut Report) -> (String, Option<u16>, HostState) {
    let port = fields.int_in(report, "epPort", 0..=65_535).filter(|port| *port != 0).map(|port| port as u16);
    let protocol = fields.text_set(report, "epProto");
    if port.is_some() != protocol.is_some() {
        fields.invalid(report, "epPort", "goes with epProto: give both, or neither for every port of the host");
    }
    if protocol.is_some_and(|protocol| !protocol.eq_ignore_ascii_case("tcp")) {
        fields.invalid(report, "epProto", "engines are reached over \"tcp\"");
    }
    let name = text(fields, report, "state");
    let state = HostState::of_name(&name).unwrap_or_else(|| {
        fields.invalid(report, "state", format!("{name:?} is none of \"green\", \"yellow\", \"red\""));
        HostState::Green
    });
    (read_host(fields, report), port, state)
}
