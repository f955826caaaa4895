//! Load-balancer rules over the API.

use std::collections::HashMap;
use std::net::IpAddr;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tracing::{info, warn};

use crate::fields::from_json;
use crate::rules::{PathMatchMode, RuleKey, check_request, readback};
use crate::supervise::Selector;

use super::Context;
use super::answers::{not_applied, problems, refusal, success};

/// Names in a path or a query.
type Names = HashMap<String, String>;

pub(super) async fn create(State(context): State<Context>, body: Result<Bytes, BytesRejection>) -> Response {
    let body = match body {
        Ok(body) => body,
        Err(rejection) => return refusal(rejection.status(), &rejection.body_text()),
    };
    let checked = from_json(&body).map_err(|problem| vec![problem]);
    let (rule, warnings) = match checked.and_then(|node| check_request(&node, &context.defaults)) {
        Ok(checked) => checked,
        Err(found) => return problems(&found),
    };
    let key = rule.key.to_string();
    for warning in &warnings {
        warn!(rule = %key, %warning, "rule posted");
    }
    match context.control.apply(rule).await {
        Ok(_) => success(&warnings),
        Err(error) => {
            info!(rule = %key, %error, "rule refused");
            not_applied(&error)
        }
    }
}

pub(super) async fn list(State(context): State<Context>) -> Response {
    let view = context.control.view();
    let rules: Vec<Value> = view
        .entries
        .iter()
        .map(|entry| {
            let up: Vec<bool> = entry.in_rule().map(|place| place.address.is_some() && place.shared.is_up()).collect();
            readback(&entry.rule, entry.id, &up)
        })
        .collect();
    Json(json!({ "lbAttr": rules })).into_response()
}

pub(super) async fn delete_all(State(context): State<Context>) -> Response {
    match context.control.remove(Selector::All).await {
        Ok(_) => success(&[]),
        Err(error) => not_applied(&error),
    }
}

pub(super) async fn delete_name(State(context): State<Context>, name: Result<Path<String>, PathRejection>) -> Response {
    let Path(name) = match name {
        Ok(name) => name,
        Err(rejection) => return refusal(rejection.status(), &rejection.body_text()),
    };
    // As the reference has it, success does not depend on whether there was such a rule.
    match context.control.remove(Selector::Name(name)).await {
        Ok(_) => success(&[]),
        Err(error) => not_applied(&error),
    }
}

pub(super) async fn delete_key(
    State(context): State<Context>,
    path: Result<Path<Names>, PathRejection>,
    Query(query): Query<Names>,
) -> Response {
    let Path(path) = match path {
        Ok(path) => path,
        Err(rejection) => return refusal(rejection.status(), &rejection.body_text()),
    };
    let key = match key_of(&path, &query) {
        Ok(key) => key,
        Err(what) => return refusal(StatusCode::BAD_REQUEST, &what),
    };
    let text = key.to_string();
    let last = match last_port_of(&path) {
        Ok(last) => last,
        Err(what) => return refusal(StatusCode::BAD_REQUEST, &what),
    };
    // No rule is for more than one port.
    if last != 0 && last != key.port {
        return refusal(StatusCode::NOT_FOUND, &format!("no-rule: there is no rule for {text} up to port {last}"));
    }
    match context.control.remove(Selector::Key(key)).await {
        Ok(0) => refusal(StatusCode::NOT_FOUND, &format!("no-rule: there is no rule for {text}")),
        Ok(_) => success(&[]),
        Err(error) => not_applied(&error),
    }
}

/// The `portmax` of a path; 0 where it has none, or means none.
fn last_port_of(path: &Names) -> Result<u16, String> {
    path.get("portmax").map_or(Ok(0), |text| text.parse().map_err(|_| format!("portmax {text:?} is no port")))
}

/// The key that a path and its query name; what is wrong with them otherwise.
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
