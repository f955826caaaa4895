//! `create lb`: the command line of `loxicmd` into the bodies that it sends, one per protocol and port.

use std::collections::BTreeSet;

use clap::Args;
use serde_json::{Map, Value, json};

use super::Ended;
use super::client::{Client, ServerArgs};
use super::flags::Given;
use super::ports::{Ports, each_port};

/// What `create lb` is told.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct CreateLb {
    /// Address that clients connect to.
    #[arg(value_name = "IP")]
    ip: String,
    #[command(flatten)]
    ports: Ports,
    /// Endpoints and their weights: IP:WEIGHT, separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "IP:WEIGHT")]
    endpoints: Vec<String>,
    /// Roles of the endpoints, in their order: normal, prefill, decode, or 0, 1, 2.
    #[arg(long, value_delimiter = ',', value_name = "ROLE")]
    ep_role: Vec<String>,
    /// NIXL ports of the endpoints, in their order.
    #[arg(long, value_delimiter = ',', value_name = "PORT")]
    nixl_port: Vec<u16>,
    /// Secondary addresses.
    #[arg(long, value_delimiter = ',', value_name = "IP")]
    secips: Vec<String>,
    /// Sources that are let in.
    #[arg(long, value_delimiter = ',', value_name = "PREFIX")]
    sources: Vec<String>,
    /// Attach the endpoints to the rule that is there.
    #[arg(long = "attachEP", conflicts_with = "detach_ep")]
    attach_ep: bool,
    /// Detach the endpoints from the rule that is there.
    #[arg(long = "detachEP")]
    detach_ep: bool,
    /// Selection: rr, hash, priority, persist, lc, n2, n3, chwbl, gpuaware or wrr-hash.
    #[arg(long, default_value = "rr", value_name = "NAME")]
    select: String,
    /// Mode: onearm, fullnat, dsr, fullproxy or hostonearm.
    #[arg(long, value_name = "NAME")]
    mode: Option<String>,
    /// Security: https or tls, e2ehttps or e2etls.
    #[arg(long, value_name = "NAME")]
    security: Option<String>,
    #[command(flatten)]
    given: Given,
    #[command(flatten)]
    pub(super) server: ServerArgs,
}

/// Numbers of selections by name; `wrr-hash` has two.
const SELECTIONS: [(&str, u8); 11] = [
    ("rr", 0),
    ("hash", 1),
    ("priority", 2),
    ("persist", 3),
    ("lc", 4),
    ("n2", 5),
    ("n3", 6),
    ("chwbl", 8),
    ("gpuaware", 9),
    ("wrr-hash", 10),
    ("chwbl-wrr", 10),
];
const MODES: [(&str, u8); 6] =
    [("default", 0), ("onearm", 1), ("fullnat", 2), ("dsr", 3), ("fullproxy", 4), ("hostonearm", 5)];
const SECURITIES: [(&str, u8); 4] = [("https", 1), ("tls", 1), ("e2ehttps", 2), ("e2etls", 2)];
const ROLES: [(&str, u8); 6] = [("normal", 0), ("prefill", 1), ("decode", 2), ("0", 0), ("1", 1), ("2", 2)];

fn number_of(table: &[(&str, u8)], flag: &str, name: &str) -> Result<u8, Ended> {
    let found = table.iter().find(|(known, _)| name.eq_ignore_ascii_case(known));
    let names = || table.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    found
        .map(|(_, number)| *number)
        .ok_or_else(|| Ended::Usage(format!("--{flag} {name}: expected one of {}", names())))
}

/// Name of a number, for tables.
pub(super) fn name_in(table: &'static [(&'static str, u8)], number: u64) -> &'static str {
    table.iter().find(|(_, known)| u64::from(*known) == number).map_or("-", |(name, _)| name)
}

/// Names of `sel` and `mode`, for tables.
pub(super) fn selection_name(number: u64) -> &'static str {
    name_in(&SELECTIONS, number)
}

/// See [`selection_name`].
pub(super) fn mode_name(number: u64) -> &'static str {
    name_in(&MODES, number)
}

pub(super) fn run(args: &CreateLb) -> Result<String, Ended> {
    let bodies = bodies(args)?;
    let client = Client::new(&args.server)?;
    let (mut said, mut told) = (Vec::new(), BTreeSet::new());
    for (done, body) in bodies.iter().enumerate() {
        match client.ask("POST", "/config/loadbalancer", Some(body)) {
            Ok(answer) => said.push(said_of(&answer, &mut told)),
            Err(why) if done > 0 => return Err(Ended::Partial(format!("{done} of {} rules: {why}", bodies.len()))),
            Err(why) => return Err(why),
        }
    }
    Ok(said.join("\n"))
}

/// An answer's result; its warnings go to standard error, each that was not told already.
pub(super) fn said_of(answer: &Value, told: &mut BTreeSet<String>) -> String {
    for warning in answer["warnings"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if told.insert(warning.to_owned()) {
            eprintln!("kvlane: warning: {warning}");
        }
    }
    answer["result"].as_str().unwrap_or("Success").to_owned()
}

/// The bodies, in loxicmd's order of members.
pub(super) fn bodies(args: &CreateLb) -> Result<Vec<Value>, Ended> {
    let mode = args.mode.as_deref().map_or(Ok(0), |name| number_of(&MODES, "mode", name))?;
    check(args, mode)?;
    let ports = each_port(&args.ports)?;
    if ports.is_empty() {
        return Err(Ended::Usage("give a port: --tcp=PORT:TARGET".to_owned()));
    }
    ports
        .iter()
        .map(|port| {
            let service = service(args, mode, port.protocol, (port.first, port.last))?;
            let list = |values: &[String], name: &str| match values {
                [] => Value::Null,
                values => values.iter().map(|value| json!({ name: value })).collect(),
            };
            Ok(json!({
                "serviceArguments": service,
                "secondaryIPs": list(&args.secips, "secondaryIP"),
                "allowedSources": list(&args.sources, "prefix"),
                "endpoints": endpoints(args, port.target)?,
            }))
        })
        .collect()
}

fn service(args: &CreateLb, mode: u8, protocol: &str, ports: (u16, u16)) -> Result<Value, Ended> {
    let mut map = Map::new();
    let given = &args.given.any;
    let value = |name: &str, default: Value| given.get(name).cloned().unwrap_or(default);
    let mut put = |name: &str, value: Value| {
        map.insert(name.to_owned(), value);
    };
    put("externalIP", json!(args.ip));
    put("port", json!(ports.0));
    if ports.1 != 0 {
        put("portMax", json!(ports.1));
    }
    put("protocol", json!(protocol));
    put("sel", json!(number_of(&SELECTIONS, "select", &args.select)?));
    put("mode", json!(mode));
    for (name, default) in
        [("BGP", json!(false)), ("Monitor", json!(false)), ("inactiveTimeOut", json!(0)), ("block", json!(0))]
    {
        put(name, value(name, default));
    }
    if let Some(name) = given.get("name") {
        put("name", name.clone());
    }
    match (args.attach_ep, args.detach_ep) {
        (true, _) => put("oper", json!(1)),
        (_, true) => put("oper", json!(2)),
        _ => {}
    }
    if let Some(security) = &args.security {
        put("security", json!(number_of(&SECURITIES, "security", security)?));
    }
    if let Some(host) = given.get("host") {
        put("host", host.clone());
    }
    for name in ["proxyprotocolv2", "egress"] {
        put(name, value(name, json!(false)));
    }
    for (name, value) in given.iter().filter(|(name, _)| name.starts_with("probe")).chain(&args.given.fullproxy) {
        put(name, value.clone());
    }
    Ok(Value::Object(map))
}

fn endpoints(args: &CreateLb, target: u16) -> Result<Vec<Value>, Ended> {
    let endpoint = |(at, text): (usize, &String)| {
        let (ip, weight) = match text.rsplit_once(':') {
            // An IPv6 address in brackets may stand alone.
            Some((ip, weight)) if !weight.ends_with(']') => (ip, weight),
            _ => (text.as_str(), "1"),
        };
        let weight: u32 =
            weight.parse().map_err(|_| Ended::Usage(format!("--endpoints {text}: expected IP:WEIGHT")))?;
        let mut value = json!({"endpointIP": ip, "targetPort": target, "weight": weight, "state": "", "counter": ""});
        if let Some(role) = args.ep_role.get(at) {
            value["ep_role"] = json!(number_of(&ROLES, "ep-role", role)?);
        }
        if let Some(port) = args.nixl_port.get(at) {
            value["nixl_port"] = json!(port);
        }
        Ok(value)
    };
    args.endpoints.iter().enumerate().map(endpoint).collect()
}

/// What is plain from the command line alone.
fn check(args: &CreateLb, mode: u8) -> Result<(), Ended> {
    let usage = |text: String| Err(Ended::Usage(text));
    let given = &args.given.fullproxy;
    if let Some((name, _)) = given.iter().next().filter(|_| mode != 4) {
        return usage(format!("{name} needs --mode=fullproxy"));
    }
    if args.endpoints.is_empty() {
        return usage("give endpoints: --endpoints=IP:WEIGHT,…".to_owned());
    }
    for (flag, count) in [("ep-role", args.ep_role.len()), ("nixl-port", args.nixl_port.len())] {
        if count != 0 && count != args.endpoints.len() {
            return usage(format!("--{flag} names {count}, and there are {} endpoints", args.endpoints.len()));
        }
    }
    let number = |name: &str| given.get(name).and_then(Value::as_i64);
    let pd = given.get("pd_disagg_mode") == Some(&json!(true));
    match (number("kvExactMode"), pd) {
        (Some(1), false) => return usage("--kv-exact-mode=1 needs --pd-disagg".to_owned()),
        (Some(3), true) => return usage("--kv-exact-mode=3 excludes --pd-disagg".to_owned()),
        _ => {}
    }
    let last = number("kvZmqPort").unwrap_or(5557).saturating_add(number("kvDpRankCount").unwrap_or(1).max(1) - 1);
    if last > 65_535 {
        return usage(format!("--kv-zmq-port with --kv-dp-ranks ends at {last}, beyond 65535"));
    }
    Ok(())
}
