//! What a running gateway knows of its engines: verdicts, alarms, and the drains of TensorRT-LLM.

use serde_json::Value;

use super::report::Report;
use crate::cli::inquiry::Gateway;

/// Asks the gateway for what it knows, and reports.
pub(super) fn check(gateway: &Gateway, report: &mut Report) {
    let subject = format!("gateway {}", gateway.url);
    let parity = match gateway.get("/config/ai/kv/parity") {
        Ok(parity) => parity,
        Err(why) => {
            let fix = "give the address of [admin] listen, --token-file where it has tokens, and --cacert where it speaks TLS";
            return report.wrong(&subject, "reach", why, fix);
        }
    };
    if !["parity", "endpoints", "drains"].iter().all(|member| parity[member].is_array()) {
        let fix = "give the address of a kvlane gateway's [admin] listen, of this release";
        return report.wrong(&subject, "reach", "what answers there is no kvlane gateway", fix);
    }
    report.right(&subject, "reach", "its management API answers");
    if let Ok(rules) = gateway.get("/config/loadbalancer/all") {
        list(&rules, "lbAttr").iter().for_each(|rule| report_address(&rule["serviceArguments"], report));
    }
    for endpoint in list(&parity, "endpoints") {
        report_endpoint(endpoint, report);
    }
    for rank in list(&parity, "parity") {
        report_rank(rank, report);
    }
    for drain in list(&parity, "drains") {
        report_drain(drain, report);
    }
}

fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().map_or(&[], Vec::as_slice)
}

fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_default()
}

/// An endpoint as the gateway numbers it.
fn subject(value: &Value) -> String {
    let name = text(value, "name");
    let rule = if name.is_empty() { format!("rule {}", value["service_id"]) } else { name.to_owned() };
    format!("gateway: {rule} → {}", text(value, "endpoint"))
}

/// An address that the gateway's host does not hold is right before a failover, and wrong for ever.
fn report_address(service: &Value, report: &mut Report) {
    let subject = format!("gateway: rule {}", service["service_id"]);
    for warning in list(service, "warnings").iter().filter_map(Value::as_str) {
        let says = format!("{}: {warning}", text(service, "externalIP"));
        report.unknown(&subject, "address", says, "give the host the address, unless it comes with a failover");
    }
}

fn report_endpoint(endpoint: &Value, report: &mut Report) {
    let subject = subject(endpoint);
    if endpoint["up"] == false {
        report.wrong(&subject, "up", "it is taken out: it does not answer", "start the engine");
    }
    for fault in list(endpoint, "details") {
        let (leg, detail) = (text(fault, "leg"), text(fault, "detail"));
        report.wrong(&subject, "endpoint", leg, detail);
    }
    if list(endpoint, "faults").is_empty() && endpoint["up"] != false {
        report.right(&subject, "endpoint", format!("{} {}", text(endpoint, "engine"), text(endpoint, "version")));
    }
}

fn report_rank(rank: &Value, report: &mut Report) {
    let subject = format!("{} rank {}", subject(rank), rank["rank"]);
    let faults: Vec<&str> = list(rank, "faults").iter().filter_map(Value::as_str).collect();
    let says = match faults.is_empty() {
        true => text(rank, "verdict").to_owned(),
        false => format!("{}: {}", text(rank, "verdict"), faults.join(", ")),
    };
    match (text(rank, "verdict"), faults.is_empty()) {
        ("believed", _) => report.unknown(&subject, "keys", says, "no first block of a prompt was seen yet"),
        ("exact", true) => report.right(&subject, "keys", format!("{says}: {}", text(rank, "detail"))),
        _ => report.wrong(&subject, "keys", says, text(rank, "detail")),
    }
    match (text(rank, "start"), rank["degraded"] == true) {
        ("", false) => {}
        ("", true) => report.unknown(&subject, "history", "degraded", "some of what is held is not proven"),
        (start, _) => report.unknown(&subject, "history", start, "a replay socket would tell what it held before"),
    }
    if rank["complete"] == false {
        let says = format!("{} blocks began before the gateway listened", rank["orphans"]);
        report.unknown(&subject, "history", says, "they are not routed by; a replay socket would tell them");
    }
}

fn report_drain(drain: &Value, report: &mut Report) {
    let subject = subject(drain);
    let phase = text(drain, "phase");
    let says = format!("{phase}, routed by {}", text(drain, "routed_by"));
    match phase {
        "draining" => {
            report.right(&subject, "drain", format!("{says}, {} events, {} lost", drain["events"], drain["lost"]))
        }
        "admitting" => report.unknown(&subject, "drain", says, "the engine is being asked what it is"),
        _ => report.wrong(&subject, "drain", says, text(drain, "detail")),
    }
}
