//! `POST /config/loadbalancer`: a rule made, changed, or given and relieved of endpoints (`oper` 0, 1 and 2).

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::Value;
use tracing::{info, warn};

use crate::fields::{Kind, Problem, from_json};
use crate::rules::{Oper, Purpose, check_request, purpose_of};
use crate::supervise::{Control, Entry, Origin, RegistryError, Selector};

use super::Context;
use super::answers::{done, not_applied, problems, refusal, success};
use super::ask::Whole;

/// Why a body is refused before the supervisor is asked.
enum Refusal {
    /// It cannot be used.
    Problems(Vec<Problem>),
    /// There is no such rule, or it has no such endpoint.
    Missing(String),
    /// The rule that is there may not become that.
    Conflict(String),
}

impl From<Vec<Problem>> for Refusal {
    fn from(problems: Vec<Problem>) -> Self {
        Refusal::Problems(problems)
    }
}

pub(super) async fn create(State(context): State<Context>, Whole(body): Whole) -> Response {
    // What a body is merged with must still be so when the merged rule is put in force.
    let _turn = context.changes.lock().await;
    match plan(&context, &body) {
        Ok(Plan::Put(body)) => put(&context, body).await,
        Ok(Plan::Remove(purpose)) => match context.control.remove(Selector::Key(purpose.key)).await {
            Ok(_) => success(&[]),
            Err(error) => not_applied(&error),
        },
        Err(refused) => refuse(refused),
    }
}

fn refuse(refused: Refusal) -> Response {
    match refused {
        Refusal::Problems(found) => problems(&found),
        Refusal::Missing(what) => refusal(StatusCode::NOT_FOUND, &what),
        Refusal::Conflict(what) => refusal(StatusCode::CONFLICT, &what),
    }
}

/// What a body comes to.
enum Plan {
    /// This whole body is put in force.
    Put(Value),
    /// The rule has no endpoint left.
    Remove(Purpose),
}

fn plan(context: &Context, body: &[u8]) -> Result<Plan, Refusal> {
    let node = from_json(body).map_err(|problem| vec![problem])?;
    let mut body: Value = serde_json::from_slice(body).unwrap_or_default();
    let purpose = match purpose_of(&node) {
        Ok(purpose) => purpose,
        // The whole check says more of it.
        Err(found) => return Err(check_request(&node, &context.defaults).err().unwrap_or(found).into()),
    };
    let old = find(&context.control, &purpose);
    take_member(member_mut(&mut body, "serviceArguments"), "oper");
    match (purpose.oper, old) {
        (Oper::Replace, old) => {
            check_request(&node, &context.defaults).map_err(|found| refused_change(found, old.is_some()))?;
            Ok(Plan::Put(body))
        }
        (Oper::Attach, None) => Ok(Plan::Put(body)),
        (Oper::Detach, None) => Err(Refusal::Missing(format!("no-rule: there is no rule for {}", purpose.key))),
        (Oper::Attach, Some(old)) => attach(&old, &purpose, &mut body).map(Plan::Put),
        (Oper::Detach, Some(old)) => detach(&old, purpose),
    }
}

fn find(control: &Control, purpose: &Purpose) -> Option<Arc<Entry>> {
    control.view().entries.iter().find(|entry| entry.rule.key == purpose.key).cloned()
}

/// A rule that is there and would become what is not done here is a conflict; as a new rule it would be malformed.
fn refused_change(found: Vec<Problem>, there: bool) -> Refusal {
    let unchangeable =
        |problem: &Problem| problem.kind == Kind::NotYet || problem.key.ends_with("serviceArguments.mode");
    if there && found.iter().all(unchangeable) {
        let texts: Vec<String> = found.iter().map(ToString::to_string).collect();
        return Refusal::Conflict(format!("lbrule-exist error: cant modify rule: {}", texts.join("; ")));
    }
    Refusal::Problems(found)
}

/// The body that makes a rule again.
fn body_of(entry: &Entry) -> Result<Value, Refusal> {
    match &entry.origin {
        Origin::Api(body) => Ok(Value::clone(body)),
        Origin::File => Err(Refusal::Conflict(RegistryError::FromFile.to_string())),
    }
}

/// The rule's body with the endpoints of another in place of its own of the same address, or behind them.
fn attach(old: &Entry, purpose: &Purpose, body: &mut Value) -> Result<Value, Refusal> {
    let mut whole = body_of(old)?;
    let given = std::mem::take(member_mut(body, "endpoints"));
    let known: Vec<_> = old.rule.endpoints.iter().map(|endpoint| endpoint.identity()).collect();
    if let (Some(endpoints), Value::Array(given)) = (member_mut(&mut whole, "endpoints").as_array_mut(), given) {
        for (identity, endpoint) in purpose.endpoints.iter().zip(given) {
            match known.iter().position(|other| other == identity).and_then(|at| endpoints.get_mut(at)) {
                Some(place) => *place = endpoint,
                None => endpoints.push(endpoint),
            }
        }
    }
    Ok(whole)
}

/// The rule's body without the endpoints of another.
fn detach(old: &Entry, purpose: Purpose) -> Result<Plan, Refusal> {
    let leaves: Vec<bool> =
        old.rule.endpoints.iter().map(|endpoint| purpose.endpoints.contains(&endpoint.identity())).collect();
    if !leaves.contains(&true) {
        return Err(Refusal::Missing(format!("no-endpoint: the rule for {} has none of these endpoints", purpose.key)));
    }
    if !leaves.contains(&false) {
        return Ok(Plan::Remove(purpose));
    }
    let mut whole = body_of(old)?;
    if let Some(endpoints) = member_mut(&mut whole, "endpoints").as_array_mut() {
        let mut leaves = leaves.iter();
        endpoints.retain(|_| leaves.next() != Some(&true));
    }
    Ok(Plan::Put(whole))
}

async fn put(context: &Context, body: Value) -> Response {
    let checked = from_json(body.to_string().as_bytes()).map_err(|problem| vec![problem]);
    let (rule, warnings) = match checked.and_then(|node| check_request(&node, &context.defaults)) {
        Ok(checked) => checked,
        Err(found) => return problems(&found),
    };
    let key = rule.key.to_string();
    for warning in &warnings {
        warn!(rule = %key, %warning, "rule posted");
    }
    match context.control.apply(rule, Origin::Api(Arc::new(body))).await {
        Ok(_) => {
            let passing = context.control.view().kept.passing();
            done(&warnings.iter().map(Problem::to_string).chain(passing.map(str::to_owned)).collect::<Vec<_>>())
        }
        Err(error) => {
            info!(rule = %key, %error, "rule refused");
            not_applied(&error)
        }
    }
}

/// A member of an object by its name in any case; a null to be thrown away where there is none.
fn member_mut<'a>(value: &'a mut Value, name: &str) -> &'a mut Value {
    let exact = value.get(name).is_some();
    let any_case = || value.as_object()?.keys().find(|key| key.eq_ignore_ascii_case(name)).cloned();
    let found = if exact { None } else { any_case() };
    &mut value[found.as_deref().unwrap_or(name)]
}

fn take_member(value: &mut Value, name: &str) {
    if let Some(map) = value.as_object_mut() {
        map.retain(|key, _| !key.eq_ignore_ascii_case(name));
    }
}
