//! The API, operation by operation: the router and the OpenAPI document are both made from this list.

use axum::extract::DefaultBodyLimit;
use axum::handler::Handler;
use axum::routing::{MethodRouter, delete, get, patch, post};

use super::{
    Context, SNAPSHOT_BYTES_MAX, contract, explain, hosts, inventory, metrics, openapi, parity, post, process, rules,
    settings, snapshot, status,
};

/// One method of one path.
pub(super) struct Operation {
    /// The method, lower case.
    pub(super) method: &'static str,
    /// The path under the base, with names in braces.
    pub(super) path: &'static str,
    /// What it does, a sentence.
    pub(super) summary: &'static str,
    /// What its query may say.
    pub(super) query: &'static [Query],
    /// The schema of its body, where it takes one.
    pub(super) body: Option<&'static str>,
    /// The schema of its answer with status 200; none for a text.
    pub(super) answer: Option<&'static str>,
    /// When it is answered 503.
    pub(super) unavailable: Option<&'static str>,
    /// What carries it out.
    pub(super) route: MethodRouter<Context>,
}

/// A name that a query may have.
pub(super) struct Query {
    pub(super) name: &'static str,
    /// The JSON type of its value.
    pub(super) kind: &'static str,
    pub(super) required: bool,
    pub(super) says: &'static str,
}

const fn query(name: &'static str, kind: &'static str, says: &'static str) -> Query {
    Query { name, kind, required: false, says }
}

const fn needed(name: &'static str, kind: &'static str, says: &'static str) -> Query {
    Query { name, kind, required: true, says }
}

/// When a change of rules is answered 503.
const UNCONFIRMED: &str = "A shard did not confirm the change in time, or it could not be kept: nothing was changed";

/// What tells rules of one address apart.
const RULE: &[Query] = &[
    query("block", "integer", "The rule's block"),
    query("bgp", "boolean", "Accepted and without effect"),
    query("path_prefix", "string", "The rule's path_prefix"),
    query("path_match_mode", "string", "disabled, prefix or exact"),
    query("model_name", "string", "The rule's model_name"),
];

impl Operation {
    fn new(method: &'static str, path: &'static str, route: MethodRouter<Context>) -> Self {
        Operation {
            method,
            path,
            summary: "",
            query: &[],
            body: None,
            answer: Some("Success"),
            unavailable: None,
            route,
        }
    }

    fn says(mut self, summary: &'static str) -> Self {
        self.summary = summary;
        self
    }

    fn asks(mut self, query: &'static [Query]) -> Self {
        self.query = query;
        self
    }

    fn takes(mut self, body: &'static str) -> Self {
        self.body = Some(body);
        self
    }

    fn answers(mut self, answer: &'static str) -> Self {
        self.answer = Some(answer);
        self
    }

    fn unavailable(mut self, when: &'static str) -> Self {
        self.unavailable = Some(when);
        self
    }

    fn answers_text(mut self) -> Self {
        self.answer = None;
        self
    }
}

fn reads<H: Handler<T, Context>, T: 'static>(path: &'static str, handler: H) -> Operation {
    Operation::new("get", path, get(handler))
}

fn writes<H: Handler<T, Context>, T: 'static>(path: &'static str, handler: H) -> Operation {
    Operation::new("post", path, post(handler))
}

fn removes<H: Handler<T, Context>, T: 'static>(path: &'static str, handler: H) -> Operation {
    Operation::new("delete", path, delete(handler))
}

/// Every operation.
pub(super) fn operations() -> Vec<Operation> {
    let mut all = of_rules();
    all.extend(of_named_rules());
    all.extend(of_caches());
    all.extend(of_hosts());
    all.extend(of_the_process());
    all
}

fn of_rules() -> Vec<Operation> {
    vec![
        writes("/config/loadbalancer", post::create)
            .takes("LoadbalanceEntry")
            .says("Make or change a rule (oper 0), attach endpoints (1), or detach them (2)")
            .unavailable(UNCONFIRMED),
        reads("/config/loadbalancer", rules::list).answers("LoadbalanceList").says("Every rule"),
        reads("/config/loadbalancer/all", rules::list).answers("LoadbalanceList").says("Every rule"),
        removes("/config/loadbalancer/all", rules::delete_all)
            .says("Remove every rule but the configuration file's")
            .unavailable(UNCONFIRMED),
        reads("/config/loadbalancer/name/{lb_name}", rules::get_name)
            .answers("LoadbalanceList")
            .says("The rules of a name"),
        removes("/config/loadbalancer/name/{lb_name}", rules::delete_name)
            .says("Remove the rules of a name")
            .unavailable(UNCONFIRMED),
        reads("/config/loadbalancer/id/{id}", rules::get_id).answers("LoadbalanceEntry").says("The rule of an id"),
    ]
}

/// The forms of path that name one rule.
fn of_named_rules() -> Vec<Operation> {
    const PLAIN: &str = "/config/loadbalancer/externalipaddress/{ip}/port/{port}/protocol/{protocol}";
    const FORMS: [&str; 4] = [
        PLAIN,
        "/config/loadbalancer/externalipaddress/{ip}/port/{port}/portmax/{portmax}/protocol/{protocol}",
        "/config/loadbalancer/hosturl/{host}/externalipaddress/{ip}/port/{port}/protocol/{protocol}",
        "/config/loadbalancer/hosturl/{host}/externalipaddress/{ip}/port/{port}/portmax/{portmax}/protocol/{protocol}",
    ];
    let mut all = Vec::new();
    for path in FORMS {
        all.push(reads(path, rules::get_key).asks(RULE).answers("LoadbalanceEntry").says("One rule"));
        all.push(removes(path, rules::delete_key).asks(RULE).says("Remove a rule").unavailable(UNCONFIRMED));
    }
    all.push(
        Operation::new("patch", PLAIN, patch(rules::patch))
            .asks(RULE)
            .takes("Anything")
            .says("Refused: rules of mode fullproxy are changed by POST"),
    );
    all.push(
        reads("/config/loadbalancer/externalipaddress/{ip}/port/{port}/protocol/{protocol}/status", rules::status)
            .asks(RULE)
            .answers("LoadbalanceStatus")
            .says("Whether a rule's endpoints can take requests"),
    );
    all.push(
        reads("/config/loadbalancer/externalipaddress/{ip}/port/{port}/protocol/{protocol}/stats", rules::stats)
            .asks(RULE)
            .answers("LoadbalanceStats")
            .says("What a rule has had to do"),
    );
    all
}

fn of_caches() -> Vec<Operation> {
    const INVENTORY: &[Query] = &[
        needed("service_id", "integer", "The rule's number; 0 is the oldest KV rule once rule 0 is gone"),
        needed("ep_idx", "integer", "The endpoint's place in the rule, from 0"),
        query("limit", "integer", "Most keys of the answer, which is then a page"),
        query("cursor", "string", "next_cursor of the page before"),
        query("summary", "integer", "1 leaves out the keys"),
    ];
    const REQUEST: &[Query] = &[
        query("path", "string", "The request's path; /v1/chat/completions where absent"),
        query("host", "string", "The request's host"),
        query("service_id", "integer", "The rule; else the oldest that fits"),
    ];
    const ONE_RULE: &[Query] = &[query("service_id", "integer", "Only this rule")];
    const NONCE: &[Query] = &[needed("nonce", "string", "64 hex digits, drawn at random")];
    vec![
        Operation {
            route: get(inventory::dump).fallback(inventory::no_such_method),
            ..reads("/config/ai/kv/inventory", inventory::dump)
        }
        .asks(INVENTORY)
        .answers("Inventory")
        .says("The keys that an endpoint's engine has announced")
        .unavailable("Others are being read, and took too long"),
        writes("/config/ai/kv/explain", explain::explain)
            .asks(REQUEST)
            .takes("Anything")
            .answers("Anything")
            .says("What would be done with a request, which is the body; nothing is sent"),
        reads("/config/ai/kv/parity", parity::report)
            .asks(ONE_RULE)
            .answers("Anything")
            .says("Whether the gateway's keys are the engines'"),
        reads("/config/ai/kv/streams", status::streams).answers("Anything").says("The engines' event streams"),
        reads("/config/ai/kv/models", status::models).answers("Anything").says("Tokenizers"),
        reads("/config/ai/kv/contract", contract::report)
            .asks(NONCE)
            .answers("Anything")
            .says("What is believed of the engines' keys, for another gateway"),
    ]
}

fn of_hosts() -> Vec<Operation> {
    const REGISTERED: &[Query] = &[
        query("name", "string", "Only the registration of this name"),
        query("probe_type", "string", "Only of this probeType"),
        query("probe_port", "integer", "Only of this probePort"),
    ];
    vec![
        reads("/config/endpoint/all", hosts::list).answers("EndpointList").says("The hosts of engines"),
        writes("/config/endpoint", hosts::register).takes("EndpointHost").says("Register a host"),
        removes("/config/endpoint/epipaddress/{ip_address}", hosts::unregister)
            .asks(REGISTERED)
            .says("Forget a registered host"),
        writes("/config/endpointhoststate", hosts::set_state)
            .takes("EndpointHostState")
            .says("Take a host's engines out (yellow, red), or leave them to their probes again (green)"),
    ]
}

fn of_the_process() -> Vec<Operation> {
    const MODE: &[Query] = &[query("mode", "string", "dry-run or commit")];
    vec![
        reads("/metrics", metrics::scrape)
            .answers_text()
            .says("Metrics in the text format of Prometheus")
            .unavailable("They are switched off: POST /config/metrics"),
        reads("/config/metrics", settings::metrics).answers("MetricsSetting").says("Whether metrics are shown"),
        writes("/config/metrics", settings::set_metrics).takes("MetricsSetting").says("Show metrics or not"),
        removes("/config/metrics", settings::hide_metrics).says("Show no metrics"),
        reads("/config/params", settings::params).answers("Params").says("The log's level"),
        writes("/config/params", settings::set_params).takes("Params").says("Change the log's level"),
        reads("/config/snapshot", snapshot::snapshot).answers("Snapshot").says("The rules of the API as a document"),
        Operation {
            route: post(snapshot::restore).layer(DefaultBodyLimit::max(SNAPSHOT_BYTES_MAX)),
            ..writes("/config/restore", snapshot::restore)
        }
        .asks(MODE)
        .takes("Snapshot")
        .answers("Restored")
        .says("Make the rules of the API those of a document, all or none")
        .unavailable(UNCONFIRMED),
        writes("/config/persist", snapshot::persist).says("See to it that rules outlive the process"),
        reads("/status/ready", status::ready).answers("Ready").says("What could take requests now"),
        reads("/status/capabilities", status::capabilities)
            .answers("Capabilities")
            .says("Kinds of engine that rules can route by"),
        reads("/status/process", process::report).answers("Anything").says("What the process uses"),
        reads("/version", status::version).answers("Version").says("What this is"),
        reads("/meta", status::meta).answers("Meta").says("What this is, and how to talk to it"),
        reads("/openapi.json", openapi::document).answers("Anything").says("This document"),
    ]
}
