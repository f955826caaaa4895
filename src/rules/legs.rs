//! What P/D rules say of the legs themselves, beyond the reference: `pdNixlPush` and `pdAuthKeyFile`.

use std::path::Path;

use shards::disagg::auth::AuthKey;
use shards::service::Engine;

use crate::fields::{Fields, Report};

use super::EngineToken;
use super::check::Facts;

/// What the legs go by.
#[derive(Default)]
pub(super) struct Legs {
    pub push: bool,
    pub auth_key: Option<AuthKey>,
}

/// Reads the options; each is refused where nothing would come of it.
pub(super) fn read(fields: &mut Fields<'_>, report: &mut Report, facts: &Facts, engine: Engine) -> Legs {
    let push = fields.flag(report, "pdNixlPush").unwrap_or(false);
    if push && !(facts.pd && engine == Engine::Vllm) {
        fields.invalid(report, "pdNixlPush", "requires pd_disagg_mode=true and kv-engine-type vllm");
    }
    let file = fields.text_set(report, "pdAuthKeyFile");
    if file.is_some() && !(facts.pd && engine == Engine::Trtllm) {
        fields.invalid(report, "pdAuthKeyFile", "requires pd_disagg_mode=true and kv-engine-type trtllm");
        return Legs { push, auth_key: None };
    }
    let auth_key = file.and_then(|path| match EngineToken::read(Path::new(path)) {
        Ok(key) => Some(AuthKey::new(key.token().as_bytes())),
        Err(error) => {
            fields.invalid(report, "pdAuthKeyFile", error.to_string());
            None
        }
    });
    Legs { push, auth_key }
}
