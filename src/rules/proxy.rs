//! How a rule's requests are carried, beside where to.

use serde_json::{Value, json};
use shards::service::ProxyOptions;

use crate::fields::{Fields, Report};

/// Reads the options.
pub(super) fn read(fields: &mut Fields<'_>, report: &mut Report) -> ProxyOptions {
    ProxyOptions { route_header: fields.flag(report, "routeHeader").unwrap_or(false) }
}

/// Shows what is in force and is not the default.
pub(super) fn show(options: &ProxyOptions, put: &mut impl FnMut(&str, Value)) {
    if options.route_header {
        put("routeHeader", json!(true));
    }
}
