//! What this gateway believes of its engines' keys, for the other gateway of a pair: `GET
//! /netlox/v1/config/ai/kv/contract?nonce=HEX` (64 hex digits of the asker's own) answers `{"rules": […], "models": […]}`.
//!
//! Of the seed there is only its seal under the nonce; tokenizer files show as digests.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::models::ModelState;
use crate::rules::{Nonce, contract_of};

use super::ask::Asked;
use super::{Context, answers};

pub(super) async fn report(State(context): State<Context>, Asked(query): Asked) -> Response {
    let Some(nonce) = query.get("nonce").and_then(|text| Nonce::from_hex(text)) else {
        return answers::refusal(
            StatusCode::BAD_REQUEST,
            "nonce: expected 64 hex digits, drawn at random by the asker",
        );
    };
    let view = context.control.view();
    let rules: Vec<Value> = view.entries.iter().filter_map(|entry| contract_of(&entry.rule, nonce)).collect();
    let digest = |model: &crate::models::ModelStatus| match &model.state {
        ModelState::Ready { digest, .. } => Some(json!({"model": model.slug, "digest": **digest})),
        ModelState::Staged | ModelState::Failed { .. } => None,
    };
    let models: Vec<Value> = context.control.models.status().iter().filter_map(digest).collect();
    Json(json!({ "rules": rules, "models": models })).into_response()
}
