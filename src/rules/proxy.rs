//! How a rule's requests are carried, beside where to.

use serde_json::{Value, json};
use shards::service::{Engine, ProxyOptions};

use crate::discovery::has_metrics;
use crate::fields::{Fields, Report};

use super::check::Facts;
use super::{KvDefaults, ranges};

/// Connects in a row whose failure opens the breaker, where a rule asks for one (`cb_enable`).
const BREAKER_FAILURES: u32 = 5;
/// The same in P/D rules, which have one in any case.
const PD_BREAKER_FAILURES: u32 = 3;

/// Reads the options.
pub(super) fn read(
    fields: &mut Fields<'_>,
    report: &mut Report,
    engine: Engine,
    facts: &Facts,
    defaults: &KvDefaults,
) -> ProxyOptions {
    let scrape = fields.flag(report, "scrapeMetrics").unwrap_or(false);
    if scrape && !has_metrics(engine) {
        let message = format!(
            "is refused for kv-engine-type {}: {}; leave scrapeMetrics out",
            engine.name(),
            if engine == Engine::Trtllm { "reading its /metrics empties them" } else { "it says nothing of its queue" }
        );
        fields.invalid(report, "scrapeMetrics", message);
    }
    let default = ProxyOptions::default();
    ProxyOptions {
        route_header: fields.flag(report, "routeHeader").unwrap_or(default.route_header),
        scrape,
        breaker_failures: match fields.flag(report, "cb_enable") {
            Some(true) => BREAKER_FAILURES,
            _ if facts.pd => PD_BREAKER_FAILURES,
            _ => 0,
        },
        breaker_errors: if facts.pd { defaults.origin_errors_max } else { 0 },
        trie_nodes_max: fields
            .int_in(report, "pd_trie_nodes_max", ranges::TRIE_NODES)
            .map_or(default.trie_nodes_max, |nodes| nodes as u32),
    }
}

/// Shows what is in force and is not the default.
pub(super) fn show(options: &ProxyOptions, put: &mut impl FnMut(&str, Value)) {
    for (name, value) in [("routeHeader", options.route_header), ("scrapeMetrics", options.scrape)] {
        if value {
            put(name, json!(true));
        }
    }
    if options.breaker_failures == BREAKER_FAILURES {
        put("cb_enable", json!(true));
    }
    if options.trie_nodes_max != ProxyOptions::default().trie_nodes_max {
        put("pd_trie_nodes_max", json!(options.trie_nodes_max));
    }
}
