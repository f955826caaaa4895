//! What of rules not everybody who may look is shown.
//!
//! The seed of a rule's engines is part of the rule: who makes rules must get it back, to post it again. Who only looks is
//! not shown it: with the seed one can make prompts whose keys are those of others.

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use serde_json::Value;

use crate::access::Role;

use super::Context;
use super::guard::token_of;

/// Whether whoever asks is shown all of a rule: an admin, or anybody where nobody is asked who they are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sees(bool);

impl FromRequestParts<Context> for Sees {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, context: &Context) -> Result<Self, Infallible> {
        let Some(tokens) = context.access.as_ref().and_then(|access| access.tokens()) else { return Ok(Sees(true)) };
        let role = token_of(&parts.headers).and_then(|token| tokens.who(token)).map(|(_, role)| role);
        Ok(Sees(role == Some(Role::Admin)))
    }
}

/// What viewers are not shown of a rule.
const WITHHELD: &str = "kvNoneHashSeed";

impl Sees {
    /// Names of what they are not shown.
    pub(super) fn withheld(self) -> &'static [&'static str] {
        if self.0 { &[] } else { &[WITHHELD] }
    }

    /// The rule as it is shown to them.
    pub(super) fn of(self, mut rule: Value) -> Value {
        if !self.0 {
            // A body shown as it came has its own spelling of names.
            let members = rule.as_object_mut().into_iter().flat_map(|rule| rule.values_mut());
            for member in members.filter_map(Value::as_object_mut) {
                member.retain(|name, _| !name.eq_ignore_ascii_case(WITHHELD));
            }
        }
        rule
    }
}
