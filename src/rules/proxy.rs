//! How a rule's requests are carried, beside where to.

use serde_json::{Value, json};
use shards::service::{Engine, ProxyOptions};

use crate::discovery::has_metrics;
use crate::fields::{Fields, Report};

/// Reads the options.
pub(super) fn read(fields: &mut Fields<'_>, report: &mut Report, engine: Engine) -> ProxyOptions {
    let scrape = fields.flag(report, "scrapeMetrics").unwrap_or(false);
    if scrape && !has_metrics(engine) {
        let message = format!(
            "is refused for kv-engine-type {}: {}; leave scrapeMetrics out",
            engine.name(),
            if engine == Engine::Trtllm { "reading its /metrics empties them" } else { "it says nothing of its queue" }
        );
        fields.invalid(report, "scrapeMetrics", message);
    }
    ProxyOptions { route_header: fields.flag(report, "routeHeader").unwrap_or(false), scrape }
}

/// Shows what is in force and is not the default.
pub(super) fn show(options: &ProxyOptions, put: &mut impl FnMut(&str, Value)) {
    for (name, value) in [("routeHeader", options.route_header), ("scrapeMetrics", options.scrape)] {
        if value {
            put(name, json!(true));
        }
    }
}
