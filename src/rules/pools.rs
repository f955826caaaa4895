//! How a rule's endpoints are chosen where their caches do not decide: `sel`, sessions, prefill and decode.

use std::time::Duration;

use shards::service::{Disagg, Engine, PrefixHashing, Select, SessionSource, Sessions};

use crate::fields::{Fields, Report};

use super::check::Facts;
use super::{KvDefaults, legs, ranges};

/// `pd_session_ttl_sec` of P/D rules that do not say, seconds.
const PD_SESSION_TTL: u64 = 300;
/// The same of other rules: the reference's time of `sel` 3.
const SESSION_TTL: u64 = 10_800;
/// `pd_session_max` of rules that do not say.
const SESSIONS: i64 = 65_536;
/// Longest name of a header, cookie or parameter, bytes. A longer one is refused.
const NAME_BYTES_MAX: usize = 127;
/// Where SGLang's prefill engines are met in rules that do not say.
const BOOTSTRAP_PORT: u16 = 8998;
/// `pd_cache_threshold` of rules that do not say, percent.
const CACHE_THRESHOLD: i64 = 20;
/// `pd_balance_abs_threshold` of rules that do not say, requests.
const BALANCE_THRESHOLD: i64 = 3;

pub(super) fn read_select(fields: &mut Fields<'_>, report: &mut Report) -> Select {
    // A readback says so beside the number it shows, so that it can be posted again.
    let left_out = fields.flag(report, "selDefault") == Some(true);
    let Some(number) = fields.int(report, "sel").filter(|_| !left_out) else { return Select::Expected };
    let known = Select::ALL.into_iter().skip(1).find(|select| i64::from(select.number()) == number);
    known.unwrap_or_else(|| {
        let message = match number {
            5 => "5 (n2) is refused: it balances N2 signalling over SCTP, and kvlane proxies HTTP; write 0 or 4"
                .to_owned(),
            6 => "6 (n3) works with udp only".to_owned(),
            7 => "7 is reserved".to_owned(),
            _ => format!("{number} is not within {} to {}", ranges::SEL.start(), ranges::SEL.end()),
        };
        fields.invalid(report, "sel", message);
        Select::Expected
    })
}

pub(super) fn read_hashing(
    fields: &mut Fields<'_>,
    report: &mut Report,
    select: Select,
    defaults: &KvDefaults,
) -> PrefixHashing {
    let default = PrefixHashing::default();
    let read = PrefixHashing {
        level: fields
            .int_in(report, "chwbl_prefix_hash_level", ranges::HASH_LEVEL)
            .map_or(default.level, |level| level as u8),
        flags: fields
            .int_in(report, "chwbl_prefix_hash_flags", ranges::HASH_FLAGS)
            .map_or(default.flags, |flags| flags as u8),
        mean_load_factor: fields
            .int_in(report, "chwbl_mean_load_factor", ranges::HASH_LOAD_FACTOR)
            .map_or(default.mean_load_factor, |percent| percent as u16),
        replication: fields
            .int_in(report, "chwbl_replication", ranges::HASH_REPLICATION)
            .map_or(default.replication, |points| points as u16),
        user_bytes: defaults.hash_bytes,
    };
    let differs = [
        ("chwbl_prefix_hash_level", read.level != default.level, select.asks_prefix()),
        ("chwbl_prefix_hash_flags", read.flags != default.flags, select.asks_prefix()),
        ("chwbl_mean_load_factor", read.mean_load_factor != default.mean_load_factor, select == Select::BoundedHash),
        ("chwbl_replication", read.replication != default.replication, select == Select::BoundedHash),
    ];
    for (name, differs, used) in differs {
        if differs && !used {
            let sels = if name.contains("prefix") { "sel 8, 9 and 10" } else { "sel 8" };
            fields.warn(report, name, format!("is accepted and has no effect: it concerns {sels}"));
        }
    }
    read
}

/// Sessions are kept by P/D rules, by `sel` 3, and by `sel` 0 where the rule says what names a session.
pub(super) fn read_sessions(
    fields: &mut Fields<'_>,
    report: &mut Report,
    facts: &Facts,
    select: Select,
) -> Option<Sessions> {
    let source = read_source(fields, report);
    // 0 means the default, as the reference has it.
    let ttl = fields.int_in(report, "pd_session_ttl_sec", ranges::I32).filter(|seconds| *seconds != 0);
    let max = fields.int_in(report, "pd_session_max", ranges::SESSIONS);
    let sticky = source.is_some() && matches!(select, Select::RoundRobin | Select::Expected);
    if facts.pd || select == Select::Persist || sticky {
        let default = if facts.pd { PD_SESSION_TTL } else { SESSION_TTL };
        let ttl = Duration::from_secs(ttl.map_or(default, |seconds| seconds as u64));
        return Some(Sessions { source, ttl, max: max.unwrap_or(SESSIONS) as u32 });
    }
    let given = [
        ("session_header_name", source.is_some()),
        ("pd_session_ttl_sec", ttl.is_some()),
        ("pd_session_max", max.is_some()),
    ];
    for (name, _) in given.into_iter().filter(|(_, given)| *given) {
        let message = "is accepted and has no effect: sessions are kept by P/D rules, by sel 3, and by sel 0 with a \
                       session_header_name";
        fields.warn(report, name, message);
    }
    None
}

fn read_source(fields: &mut Fields<'_>, report: &mut Report) -> Option<SessionSource> {
    const NAME: &str = "session_header_name";
    let text = fields.text_set(report, NAME)?;
    let (kind, name) = text.split_once(':').map_or((None, text), |(kind, name)| (Some(kind), name));
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    let right = !name.is_empty() && name.len() <= NAME_BYTES_MAX && name.bytes().all(is_token);
    match kind {
        None if text == "basic-auth" => Some(SessionSource::BasicAuth),
        None if right => Some(SessionSource::Header(name.to_ascii_lowercase().into())),
        Some("cookie") if right => Some(SessionSource::Cookie(name.into())),
        Some("query") if right => Some(SessionSource::Query(name.into())),
        _ => {
            let message = format!(
                "{text:?} is none of a header's name, \"cookie:NAME\", \"query:NAME\" and \"basic-auth\", the name of \
                 at most {NAME_BYTES_MAX} letters, digits and signs of a token"
            );
            fields.invalid(report, NAME, message);
            None
        }
    }
}

/// `session_header_name` of a source.
pub(super) fn show_source(source: &SessionSource) -> String {
    match source {
        SessionSource::Header(name) => name.to_string(),
        SessionSource::Cookie(name) => format!("cookie:{name}"),
        SessionSource::Query(name) => format!("query:{name}"),
        SessionSource::BasicAuth => "basic-auth".to_owned(),
    }
}

pub(super) fn read_disagg(
    fields: &mut Fields<'_>,
    report: &mut Report,
    facts: &Facts,
    engine: Engine,
    defaults: &KvDefaults,
) -> Option<Disagg> {
    let legs = legs::read(fields, report, facts, engine, defaults);
    // 0 means the default, as the reference has it.
    let some = |value: Option<i64>, default: i64| value.filter(|value| *value != 0).unwrap_or(default);
    let threshold = fields.int_in(report, "pd_cache_threshold", ranges::PERCENT);
    let balance = fields.int_in(report, "pd_balance_abs_threshold", ranges::BALANCE);
    let bootstrap_port = read_bootstrap_port(fields, report, engine, facts);
    let cache_aware = fields.flag(report, "pd_cache_aware_mode").unwrap_or(false);
    if !facts.pd || !cache_aware {
        for (name, value) in [("pd_cache_threshold", threshold), ("pd_balance_abs_threshold", balance)] {
            if value.is_some_and(|value| value != 0) {
                fields.warn(report, name, "is accepted and has no effect: it concerns pd_cache_aware_mode");
            }
        }
    }
    facts.pd.then(|| Disagg {
        cache_aware,
        cache_threshold: some(threshold, CACHE_THRESHOLD) as u8,
        balance_threshold: some(balance, BALANCE_THRESHOLD) as u8,
        bootstrap_port,
        push: legs.push,
        bypass: legs.bypass,
        bypass_tokens: legs.bypass_tokens,
        auth_key: legs.auth_key,
        prefill_floor: defaults.pd.prefill_floor,
        ladder: defaults.pd.ladder,
    })
}

fn read_bootstrap_port(fields: &mut Fields<'_>, report: &mut Report, engine: Engine, facts: &Facts) -> u16 {
    let port = fields.int_in(report, "pdBootstrapPort", ranges::PORT_OR_NONE).filter(|port| *port != 0);
    if port.is_some() && !(facts.pd && engine == Engine::Sglang) {
        let message = "pd-bootstrap-port requires pd_disagg_mode=true and kv-engine-type sglang";
        fields.invalid(report, "pdBootstrapPort", message);
    }
    port.map_or(BOOTSTRAP_PORT, |port| port as u16)
}
