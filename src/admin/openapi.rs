//! The OpenAPI document: made from the list of operations and the table of a rule's options, so that it says what is.

use std::sync::LazyLock;

use axum::body::Bytes;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use crate::rules::table::{self, Kind, Member};

use super::BASE;
use super::routes::{Operation, operations};

/// The document never changes, and making it takes milliseconds.
pub(super) async fn document() -> Response {
    static MADE: LazyLock<Bytes> = LazyLock::new(|| whole().to_string().into());
    ([(header::CONTENT_TYPE, "application/json")], MADE.clone()).into_response()
}

/// The document.
pub(super) fn whole() -> Value {
    let mut paths = Map::new();
    for operation in operations() {
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        path[operation.method] = show(&operation);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "kvlane management API",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Rules, endpoints and caches of a kvlane gateway. Names of members match in any case; \
                            unknown ones are passed over and named in `warnings`."
        },
        "servers": [{"url": BASE}],
        "security": [{}, {"bearer": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas(),
        },
    })
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

fn show(operation: &Operation) -> Value {
    let in_path = operation.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    let path = in_path.map(|name| {
        let kind = if matches!(name, "port" | "portmax") { "integer" } else { "string" };
        json!({"name": name, "in": "path", "required": true, "schema": {"type": kind}})
    });
    let query = operation.query.iter().map(|query| {
        json!({"name": query.name, "in": "query", "required": query.required, "description": query.says,
               "schema": {"type": query.kind}})
    });
    let answer = match operation.answer {
        Some(name) => json!({"description": "Done", "content": {"application/json": {"schema": reference(name)}}}),
        None => {
            json!({"description": "A text", "content": {"application/openmetrics-text": {"schema": {"type": "string"}}}})
        }
    };
    let refusal = |description: &str| json!({"description": description, "content": {"application/json": {"schema": reference("Error")}}});
    let mut value = json!({
        "summary": operation.summary,
        "operationId": operation_id(operation),
        "parameters": path.chain(query).collect::<Vec<_>>(),
        "responses": {"200": answer, "default": refusal("Refused")},
    });
    if let Some(when) = operation.unavailable {
        value["responses"]["503"] = refusal(when);
    }
    if let Some(body) = operation.body {
        value["requestBody"] = json!({"required": true, "content": {"application/json": {"schema": reference(body)}}});
    }
    value
}

fn operation_id(operation: &Operation) -> String {
    let path = operation.path.replace(['/', '.'], "_").replace(['{', '}'], "");
    format!("{}{path}", operation.method)
}

fn object(properties: Value, required: &[&str]) -> Value {
    json!({"type": "object", "properties": properties, "required": required})
}

fn list_of(items: Value) -> Value {
    json!({"type": "array", "items": items})
}

fn schemas() -> Value {
    let (text, int, flag) = (json!({"type": "string"}), json!({"type": "integer"}), json!({"type": "boolean"}));
    let texts = list_of(text.clone());
    let mut rule = object(
        json!({
            "serviceArguments": options(table::SERVICE, &["externalIP", "port"]),
            "endpoints": {"type": "array", "items": options(table::ENDPOINT, &["endpointIP", "targetPort"])},
            "secondaryIPs": {"type": ["array", "null"]},
            "allowedSources": {"type": ["array", "null"]},
        }),
        &["serviceArguments", "endpoints"],
    );
    rule["examples"] = examples();
    json!({
        "Anything": {},
        "Success": object(json!({"result": {"type": "string"}, "warnings": texts}), &["result"]),
        "Error": {"anyOf": [
            object(json!({"code": int, "message": text, "result": text}), &["code", "message", "result"]),
            object(json!({"error": text}), &["error"]),
        ]},
        "LoadbalanceEntry": rule,
        "LoadbalanceList": object(json!({"lbAttr": list_of(reference("LoadbalanceEntry"))}), &["lbAttr"]),
        "LoadbalanceStatus": object(json!({
            "adminStateUp": flag,
            "operatingStatus": {"type": "string", "enum": ["ONLINE", "OFFLINE", "DEGRADED", "ERROR", "NO_MONITOR"]},
            "lastUpdated": text,
        }), &["adminStateUp", "operatingStatus", "lastUpdated"]),
        "LoadbalanceStats": object(
            json!({"activeConnections": int, "bytesIn": int, "bytesOut": int, "totalConnections": int}),
            &["activeConnections", "bytesIn", "bytesOut", "totalConnections"],
        ),
        "Inventory": object(json!({
            "service_id": int, "ep_idx": int, "hash_algo": text, "total": int, "next_cursor": text,
            "blocks": list_of(object(json!({"block_idx": int, "hash_uint64": int}), &["block_idx", "hash_uint64"])),
        }), &["service_id", "ep_idx", "hash_algo", "total"]),
        "EndpointHost": object(json!({
            "hostName": text, "name": text, "inactiveReTries": int, "probeType": text, "probeReq": text,
            "probeResp": text, "probeDuration": int, "probePort": int, "minDelay": text, "avgDelay": text,
            "maxDelay": text, "currState": text,
        }), &["hostName"]),
        "EndpointList": object(json!({"Attr": list_of(reference("EndpointHost"))}), &["Attr"]),
        "EndpointHostState": object(json!({
            "hostName": text, "epPort": int, "epProto": text,
            "state": {"type": "string", "enum": ["green", "yellow", "red"]},
        }), &["hostName", "state"]),
        "MetricsSetting": object(json!({"prometheus": flag}), &["prometheus"]),
        "Params": object(json!({"logLevel": text}), &["logLevel"]),
        "Snapshot": object(
            json!({
                "version": int,
                "lbAttr": list_of(reference("LoadbalanceEntry")),
                "waiting": list_of(json!({"type": "string"})),
                "withheld": list_of(json!({"type": "string"})),
            }),
            &["lbAttr"],
        ),
        "Restored": object(json!({
            "result": text, "mode": text,
            "difference": object(json!({"added": texts, "removed": texts, "changed": {"type": "array"}}),
                &["added", "changed", "removed"]),
        }), &["result", "mode", "difference"]),
        "Ready": object(json!({"ready": flag, "draining": flag, "rules": {"type": "array"},
            "shards": {"type": "array"}}), &["ready", "draining", "rules", "shards"]),
        "Capabilities": object(json!({"capabilities": list_of(object(json!({
            "name": text, "ready": flag, "reason": text, "reason_code": text,
        }), &["name", "ready", "reason", "reason_code"]))}), &["capabilities"]),
        "Version": object(json!({"version": text, "buildInfo": text, "product": text}), &["version", "buildInfo"]),
        "Meta": object(json!({"product": text, "version": text, "apiVersion": text, "authentication": text}),
            &["product", "version", "apiVersion", "authentication"]),
    })
}

/// Rules as people write them: prefill and decode pools, and a single pool.
fn examples() -> Value {
    let endpoint = |host: u8, role: u8| json!({"endpointIP": format!("192.168.80.{host}"), "targetPort": 8080, "weight": 1, "ep_role": role});
    json!([
        {
            "serviceArguments": {
                "externalIP": "127.0.0.1", "port": 8080, "protocol": "tcp", "sel": 0, "mode": 4, "pd_disagg_mode": true,
                "kvExactMode": 1, "kvZmqPort": 5557, "kvHashAlgo": "sha256_cbor", "kvWarmupSec": 30, "kvBlockSize": 16
            },
            "endpoints": [endpoint(10, 1), endpoint(11, 2)],
        },
        {
            "serviceArguments": {
                "externalIP": "127.0.0.1", "port": 9090, "protocol": "tcp", "sel": 0, "mode": 4, "kvExactMode": 3,
                "kvEngineType": "sglang", "kvDpRankCount": 3, "kvZmqPort": 5561, "kvWarmupSec": 30, "kvBlockSize": 16
            },
            "endpoints": [endpoint(12, 0), endpoint(13, 0)],
        },
    ])
}

/// The schema of a table of options.
fn options(options: &[Member], required: &[&str]) -> Value {
    let property = |option: &Member| (option.name.to_owned(), schema(option));
    object(Value::Object(options.iter().map(property).collect()), required)
}

fn schema(option: &Member) -> Value {
    let mut schema = match option.kind {
        Kind::IntOfEngine { usual, sglang } => {
            json!({"type": "integer", "minimum": usual.0.min(sglang.0), "maximum": usual.1.max(sglang.1)})
        }
        Kind::Int(min, max) => json!({"type": "integer", "minimum": min, "maximum": max}),
        Kind::Flag => json!({"type": "boolean"}),
        Kind::Text => json!({"type": "string"}),
        Kind::OneOf(values) => json!({"type": "string", "enum": values}),
        Kind::List => json!({"type": ["array", "null"]}),
        Kind::Object => json!({"type": ["object", "null"]}),
    };
    schema["description"] = json!(option.says);
    schema
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::from_json;
    use crate::rules::{KvDefaults, check_request};

    #[test]
    fn the_rules_that_stand_as_examples_can_be_posted() {
        for example in examples().as_array().expect("a list") {
            let node = from_json(example.to_string().as_bytes()).expect("JSON");
            let (_, warnings) = check_request(&node, &KvDefaults::default()).expect("a rule");
            assert!(warnings.is_empty(), "{warnings:?}");
        }
    }
}
