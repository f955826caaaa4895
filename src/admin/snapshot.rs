//! All rules of the API at once: taken out as a document, put back, and written down.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::fields::{Problem, from_json};
use crate::rules::{Rule, check_request, stated};
use crate::supervise::{Difference, Entry, Origin, Scope};

use super::answers::{not_applied, problems, refusal, success};
use super::ask::{Asked, Whole};
use super::secrets::Sees;
use super::{Context, SNAPSHOT_BYTES_MAX};

/// The version of the document.
const VERSION: u64 = 1;

/// The rules of the API as bodies that make them again, with what was said of them and no defaults; the configuration file
/// has its own. Rules that wait to be put in force are named, and so is what the asker is not shown.
pub(super) async fn snapshot(State(context): State<Context>, sees: Sees) -> Response {
    let view = context.control.view();
    let again = |entry: &Arc<Entry>| match &entry.origin {
        Origin::File => None,
        Origin::Api(body) => {
            let mut body = stated(body);
            body["serviceArguments"]["id"] = json!(*entry.uuid);
            Some(sees.of(body))
        }
    };
    let rules: Vec<Value> = view.entries.iter().filter_map(again).collect();
    let waiting: Vec<_> = view.kept.waiting.iter().map(|(key, _)| key.to_string()).collect();
    Json(json!({"version": VERSION, "lbAttr": rules, "waiting": waiting, "withheld": sees.withheld()})).into_response()
}

/// Makes the rules of the API those of a document, all of them or none.
pub(super) async fn restore(
    State(context): State<Context>,
    Asked(query): Asked,
    Whole(body): Whole<SNAPSHOT_BYTES_MAX>,
) -> Response {
    let dry = match query.get("mode").map_or("commit", String::as_str) {
        "commit" => false,
        "dry-run" => true,
        other => return refusal(StatusCode::BAD_REQUEST, &format!("mode {other:?} is neither dry-run nor commit")),
    };
    let rules = match read(&context, &body) {
        Ok(rules) => rules,
        Err(found) => return problems(&found),
    };
    let _turn = context.changes.lock().await;
    match context.control.replace(rules, Scope::Api, dry).await {
        Ok(difference) => {
            let (mode, difference) = (if dry { "dry-run" } else { "commit" }, show(&difference));
            Json(json!({"result": "Success", "mode": mode, "difference": difference})).into_response()
        }
        Err(error) => not_applied(&error),
    }
}

fn show(difference: &Difference) -> Value {
    let texts = |keys: &[crate::rules::RuleKey]| keys.iter().map(ToString::to_string).collect::<Vec<_>>();
    let changed = difference.changed.iter().map(|(key, members)| json!({"rule": key.to_string(), "members": members}));
    json!({
        "added": texts(&difference.added),
        "changed": changed.collect::<Vec<_>>(),
        "removed": texts(&difference.removed),
    })
}

fn read(context: &Context, body: &[u8]) -> Result<Vec<(Rule, Origin)>, Vec<Problem>> {
    let problem = |key: String, message: &str| {
        vec![Problem { kind: crate::fields::Kind::Invalid, line: None, key, message: message.to_owned() }]
    };
    // Reads it with the bound on depth.
    from_json(body).map_err(|found| vec![found])?;
    let document: Value = serde_json::from_slice(body).unwrap_or_default();
    match document.get("version") {
        None | Some(Value::Null) => {}
        Some(version) if *version == json!(VERSION) => {}
        Some(_) => return Err(problem("version".to_owned(), "is another than 1, which this kvlane writes and reads")),
    }
    let Some(list) = document.get("lbAttr").and_then(Value::as_array) else {
        return Err(problem("lbAttr".to_owned(), "missing: a list of rules, as GET /config/snapshot answers"));
    };
    let mut rules: Vec<(Rule, Origin)> = Vec::with_capacity(list.len());
    for (at, value) in list.iter().enumerate() {
        let within = |mut found: Vec<Problem>| {
            for problem in &mut found {
                problem.key = format!("lbAttr[{at}].{}", problem.key);
            }
            found
        };
        let node = from_json(value.to_string().as_bytes()).map_err(|found| within(vec![found]))?;
        let (rule, _) = check_request(&node, &context.defaults).map_err(within)?;
        if rules.iter().any(|(other, _)| other.key == rule.key) {
            return Err(problem(format!("lbAttr[{at}]"), "is for the same as an earlier one"));
        }
        rules.push((rule, Origin::Api(Arc::new(value.clone()))));
    }
    Ok(rules)
}

/// Every acknowledged change is written down already; whoever asks hears where.
pub(super) async fn persist(State(context): State<Context>) -> Response {
    match context.control.view().kept.passing() {
        None => success(&[]),
        Some(why) => refusal(StatusCode::CONFLICT, why),
    }
}
