//! What P/D rules say of the legs themselves, beyond the reference: `pdNixlPush`, `pdAuthKeyFile`, `pdBypass` and
//! `pdBypassTokens`.

use shards::disagg::auth::AuthKey;
use shards::service::{Bypass, Engine};

use crate::fields::{Fields, Report};

use super::check::Facts;
use super::files::Purpose;
use super::{EngineToken, KvDefaults, RuleFile, ranges};

/// What the legs go by.
#[derive(Default)]
pub(super) struct Legs {
    pub push: bool,
    pub auth_key: Option<AuthKey>,
    pub bypass: Bypass,
    pub bypass_tokens: u32,
}

/// Reads the options; each is refused where nothing would come of it.
pub(super) fn read(
    fields: &mut Fields<'_>,
    report: &mut Report,
    facts: &Facts,
    engine: Engine,
    defaults: &KvDefaults,
) -> Legs {
    let push = fields.flag(report, "pdNixlPush").unwrap_or(false);
    if push && !(facts.pd && engine == Engine::Vllm) {
        fields.invalid(report, "pdNixlPush", "requires pd_disagg_mode=true and kv-engine-type vllm");
    }
    let bypass = read_bypass(fields, report, facts, engine);
    let tokens = fields.int_in(report, "pdBypassTokens", ranges::BYPASS_TOKENS).unwrap_or(0);
    if tokens != 0 && bypass == Bypass::Off {
        fields.warn(report, "pdBypassTokens", "is accepted and has no effect: it concerns pdBypass short and held");
    }
    let legs = Legs { push, auth_key: None, bypass, bypass_tokens: tokens as u32 };
    let file = fields.text_set(report, "pdAuthKeyFile");
    if file.is_some() && !(facts.pd && engine == Engine::Trtllm) {
        fields.invalid(report, "pdAuthKeyFile", "requires pd_disagg_mode=true and kv-engine-type trtllm");
        return legs;
    }
    let file = file.map(|path| RuleFile::named(path, report.dialect, &defaults.files, Purpose::Secret));
    let auth_key = file.and_then(|file| match EngineToken::read(file) {
        Ok(key) => Some(AuthKey::new(key.token().as_bytes())),
        Err(error) => {
            fields.invalid(report, "pdAuthKeyFile", error.to_string());
            None
        }
    });
    Legs { auth_key, ..legs }
}

/// A decode engine must be able to compute prompts, and, to be known to hold something, must say what it holds.
fn read_bypass(fields: &mut Fields<'_>, report: &mut Report, facts: &Facts, engine: Engine) -> Bypass {
    const NAME: &str = "pdBypass";
    let Some(name) = fields.text_set(report, NAME) else { return Bypass::Off };
    let Some(bypass) = Bypass::ALL.into_iter().find(|bypass| bypass.name() == name) else {
        fields.invalid(report, NAME, format!("{name:?} is none of \"off\", \"short\", \"held\""));
        return Bypass::Off;
    };
    let problem = match (bypass, engine) {
        (Bypass::Off, _) => return bypass,
        _ if !facts.pd => "requires pd_disagg_mode=true",
        (_, Engine::Sglang | Engine::Llamacpp) => {
            "is refused for this kv-engine-type: an SGLang engine in disaggregation mode refuses a request without a room, so \
             its decode engines compute no prompts; write \"off\""
        }
        (Bypass::Held, Engine::Trtllm) => {
            "\"held\" is refused for kv-engine-type trtllm: generation servers tell no events; write \"short\""
        }
        (Bypass::Held, _) if !facts.is_exact() => "\"held\" requires kvExactMode=1: it goes by the keys of blocks",
        (Bypass::Short | Bypass::Held, _) => return bypass,
    };
    fields.invalid(report, NAME, problem);
    Bypass::Off
}
