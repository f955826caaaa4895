//! The rule that a path and its query name.

use std::collections::HashMap;
use std::net::IpAddr;

use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use axum::http::StatusCode;
use axum::response::Response;

use crate::rules::{PathMatchMode, RuleKey};

use super::answers::refusal;

/// Names in a path or a query.
pub(super) type Names = HashMap<String, String>;

/// A path as the router gives it.
pub(super) type Taken<T> = Result<Path<T>, PathRejection>;

/// What a path holds, or the answer to one that cannot be read.
pub(super) fn taken<T>(path: Taken<T>) -> Result<T, Box<Response>> {
    path.map(|Path(value)| value).map_err(|rejection| Box::new(refusal(rejection.status(), &rejection.body_text())))
}

/// The key that a path and its query name, or the answer to one that names none.
pub(super) fn named(path: Taken<Names>, query: &Names) -> Result<RuleKey, Box<Response>> {
    let path = taken(path)?;
    let malformed = |what: String| Box::new(refusal(StatusCode::BAD_REQUEST, &what));
    let key = key_of(&path, query).map_err(malformed)?;
    let last = last_port_of(&path).map_err(malformed)?;
    // No rule is for more than one port.
    if last != 0 && last != key.port {
        return Err(Box::new(no_rule(&format!("{key} up to port {last}"))));
    }
    Ok(key)
}

/// The answer to who names a rule that is not there.
pub(super) fn no_rule(what: &str) -> Response {
    refusal(StatusCode::NOT_FOUND, &format!("no-rule: there is no rule for {what}"))
}

/// The `portmax` of a path; 0 where it has none, or means none.
fn last_port_of(path: &Names) -> Result<u16, String> {
    path.get("portmax").map_or(Ok(0), |text| text.parse().map_err(|_| format!("portmax {text:?} is no port")))
}

fn key_of(path: &Names, query: &Names) -> Result<RuleKey, String> {
    let get = |names: &Names, name: &str| names.get(name).cloned().unwrap_or_default();
    let ip = get(path, "ip");
    let ip: IpAddr =
        ip.trim_start_matches('[').trim_end_matches(']').parse().map_err(|_| format!("{ip:?} is no IP address"))?;
    let port = get(path, "port");
    let port = port.parse().map_err(|_| format!("{port:?} is no port"))?;
    let protocol = get(path, "protocol");
    if !protocol.eq_ignore_ascii_case("tcp") {
        return Err(format!("{protocol:?} is refused: rules here are for \"tcp\""));
    }
    let block = query.get("block").filter(|text| !text.is_empty());
    let block = block.map_or(Ok(0), |text| text.parse().map_err(|_| format!("block {text:?} is no number")))?;
    let mode = query.get("path_match_mode").filter(|text| !text.is_empty());
    let path_match = mode.map_or(Ok(PathMatchMode::Disabled), |text| {
        PathMatchMode::of_name(text).ok_or_else(|| format!("path_match_mode {text:?} is unknown"))
    })?;
    let host = path.get("host").filter(|host| *host != "any").map(|host| host.to_ascii_lowercase()).unwrap_or_default();
    Ok(RuleKey {
        ip,
        port,
        block,
        host,
        path_prefix: get(query, "path_prefix"),
        path_match,
        model: get(query, "model_name"),
    })
}
