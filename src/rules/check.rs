//! The checks of a rule, in one place for the file and the API.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use shards::service::Engine;

use crate::fields::{Dialect, Fields, Node, Problem, Report, Value};

use super::files::Purpose;
use super::{
    EngineToken, KvDefaults, PathMatchMode, Rule, RuleFile, RuleKey, TEXT_BYTES_MAX, endpoints, kv, others, pools,
    proxy, ranges,
};

/// The load-balancer mode in which connections are ended and requests are read.
const FULLPROXY: i64 = 4;

/// What the parts of a rule must know of each other.
pub(super) struct Facts {
    pub(super) exact_mode: i64,
    pub(super) pd: bool,
    pub(super) listen: SocketAddr,
}

/// Checks a `[[rule]]` of a file: the options of `serviceArguments` directly, and `[[rule.endpoints]]`.
/// None where something keeps the rule from being used.
pub fn check_file(mut fields: Fields<'_>, report: &mut Report, defaults: &KvDefaults) -> Option<Rule> {
    let before = report.problems.len();
    let lists = fields.tables(report, "endpoints");
    let rule = check(&mut fields, lists, report, defaults);
    others::read_lists(&mut fields, report);
    fields.finish(report);
    (report.problems.len() == before).then_some(rule)
}

/// Checks an API body: `serviceArguments` and `endpoints`.
///
/// # Errors
/// Everything that keeps the rule from being used.
pub fn check_request(node: &Node, defaults: &KvDefaults) -> Result<(Rule, Vec<Problem>), Vec<Problem>> {
    let mut report = Report::new(Dialect::Api);
    let mut body = Fields::root(&mut report, node);
    let lists = body.tables(&mut report, "endpoints");
    let Some(mut fields) = body.table(&mut report, "serviceArguments") else {
        if report.is_usable() {
            body.invalid(&mut report, "serviceArguments", "missing: a rule needs externalIP, port and mode");
        }
        return Err(report.problems);
    };
    let rule = check(&mut fields, lists, &mut report, defaults);
    fields.finish(&mut report);
    others::read_lists(&mut body, &mut report);
    body.finish(&mut report);
    if report.is_usable() { Ok((rule, report.warnings)) } else { Err(report.problems) }
}

/// Checks the options of one rule and its endpoints; the rule is good only if the report gained no problem.
pub fn check(
    fields: &mut Fields<'_>,
    endpoint_fields: Vec<Fields<'_>>,
    report: &mut Report,
    defaults: &KvDefaults,
) -> Rule {
    let key = read_key(fields, report);
    let facts = read_facts(fields, report, key.listen());
    check_mode(fields, report, &facts);
    check_pd(fields, report, &facts);
    check_refusals(fields, report);
    warn_of_unused(fields, report, &facts, &kv::KV_OPTIONS);
    let (engine, kv) = kv::read(fields, report, &facts, defaults);
    let select = pools::read_select(fields, report);
    let mut rule = Rule {
        key,
        name: text(fields, report, "name"),
        select,
        hashing: pools::read_hashing(fields, report, select, defaults),
        sessions: pools::read_sessions(fields, report, &facts, select),
        pd: pools::read_disagg(fields, report, &facts, engine, defaults),
        pd_auth_key_file: fields.text_set(report, "pdAuthKeyFile").map(PathBuf::from),
        engine,
        proxy: proxy::read(fields, report, engine, &facts, defaults),
        kv,
        engine_token: read_token(fields, report, defaults),
        endpoints: Vec::new(),
        inert: BTreeMap::new(),
    };
    others::read_others(fields, report, &mut rule);
    let decode = rule.looks_at_decode();
    rule.endpoints = endpoints::read(fields, endpoint_fields, report, &facts, engine, (rule.kv.as_ref(), decode));
    rule
}

fn read_token(fields: &mut Fields<'_>, report: &mut Report, defaults: &KvDefaults) -> Option<Arc<EngineToken>> {
    let path = fields.text_set(report, "engineTokenFile")?;
    match EngineToken::read(RuleFile::named(path, report.dialect, &defaults.files, Purpose::Secret)) {
        Ok(token) => Some(Arc::new(token)),
        Err(error) => {
            fields.invalid(report, "engineTokenFile", error.to_string());
            None
        }
    }
}

/// Names the options among `names` that a rule without KV-exact routing gives for nothing; true if there are any.
/// Zero, false and the empty text ask for nothing.
pub(super) fn warn_of_unused(fields: &mut Fields<'_>, report: &mut Report, facts: &Facts, names: &[&str]) -> bool {
    let asks = |node: &Node| match &node.value {
        Value::Int(number) => *number != 0,
        Value::Bool(flag) => *flag,
        Value::Text(text) => !text.is_empty(),
        _ => true,
    };
    let given = names.iter().copied().filter(|name| fields.take(name).is_some_and(asks)).collect::<Vec<_>>();
    if facts.exact_mode != 0 || given.is_empty() {
        return false;
    }
    let mode = if facts.pd { 1 } else { 3 };
    fields.warn(report, given[0], format!("without kvExactMode {mode} these have no effect: {}", given.join(", ")));
    true
}

fn read_facts(fields: &mut Fields<'_>, report: &mut Report, listen: SocketAddr) -> Facts {
    let exact_mode = fields.int_in(report, "kvExactMode", ranges::EXACT_MODE).unwrap_or(0);
    let pd = fields.flag(report, "pd_disagg_mode").unwrap_or(false);
    if exact_mode == 2 {
        fields.invalid(report, "kvExactMode", "2 is reserved: write 3 for a single pool, 1 for P/D");
    }
    Facts { exact_mode, pd, listen }
}

fn check_mode(fields: &mut Fields<'_>, report: &mut Report, facts: &Facts) {
    // The API's default is the reference's, packet forwarding; a file of ours can only mean the one thing we do.
    let default = if report.dialect == Dialect::File { FULLPROXY } else { 0 };
    let before = report.problems.len();
    let mode = fields.int_in(report, "mode", ranges::MODE).unwrap_or(default);
    if mode == FULLPROXY || report.problems.len() > before {
        return;
    }
    let message = match (facts.pd, facts.exact_mode) {
        (true, _) => "pd-disagg requires mode=fullproxy".to_owned(),
        (false, 3) => "kv-exact single-role mode requires mode=fullproxy".to_owned(),
        _ => format!("{mode} is refused: kvlane proxies HTTP or nothing, so mode must be 4 (fullproxy)"),
    };
    fields.invalid(report, "mode", message);
}

fn check_pd(fields: &mut Fields<'_>, report: &mut Report, facts: &Facts) {
    if fields.flag(report, "pd_cache_aware_mode") == Some(true) && !facts.pd {
        fields.invalid(report, "pd_cache_aware_mode", "pd-cache-aware requires pd_disagg_mode=true");
    }
    match (facts.pd, facts.exact_mode) {
        (true, 3) => fields.invalid(
            report,
            "kvExactMode",
            "kv-exact single-role mode is incompatible with pd-disagg (use kvExactMode=1 for P/D)",
        ),
        (false, 1) => fields.invalid(
            report,
            "kvExactMode",
            "kv-exact zmq mode requires pd_disagg_mode=true (use kvExactMode=3 for a single pool)",
        ),
        (_, _) => {}
    }
}

/// Options with a meaning here that allow one value so far.
fn check_refusals(fields: &mut Fields<'_>, report: &mut Report) {
    if let Some(security) = fields.int_in(report, "security", ranges::SECURITY)
        && security != 0
    {
        let message =
            format!("{security} is refused: TLS is not built yet, and what asks for it is not served in clear");
        fields.not_yet(report, "security", message);
    }
    if let Some(oper) = fields.int_in(report, "oper", ranges::OPER)
        && oper != 0
        && report.dialect == Dialect::File
    {
        fields.invalid(report, "oper", format!("{oper} is refused: a file has whole rules, so leave oper out"));
    }
    if fields.flag(report, "adminStateUp") == Some(false) {
        fields.not_yet(
            report,
            "adminStateUp",
            "false is not built yet: delete the rule, or give its endpoints weight 0",
        );
    }
    if let Some(protocol) = fields.text_set(report, "protocol")
        && !protocol.eq_ignore_ascii_case("tcp")
    {
        fields.invalid(report, "protocol", format!("{protocol:?} is refused: kvlane proxies HTTP over \"tcp\""));
    }
}

pub(super) fn read_key(fields: &mut Fields<'_>, report: &mut Report) -> RuleKey {
    let port = read_port(fields, report);
    let port_max = fields.int_in(report, "portMax", ranges::PORT_OR_NONE).unwrap_or(0);
    if port_max != 0 && port_max != i64::from(port) {
        fields.not_yet(
            report,
            "portMax",
            format!("{port_max}: port ranges are not built yet, write one rule per port"),
        );
    }
    let path_prefix = text(fields, report, "path_prefix");
    RuleKey {
        ip: read_address(fields, report),
        port,
        block: fields.int_in(report, "block", ranges::U32).map_or(0, |block| block as u32),
        host: text(fields, report, "host").to_ascii_lowercase(),
        path_match: read_path_match(fields, report, &path_prefix),
        path_prefix,
        model: text(fields, report, "model_name"),
    }
}

fn read_port(fields: &mut Fields<'_>, report: &mut Report) -> u16 {
    let before = report.problems.len();
    match fields.int_in(report, "port", ranges::PORT) {
        Some(port) => port as u16,
        None => {
            if report.problems.len() == before {
                fields.invalid(report, "port", "missing: the port that clients connect to");
            }
            0
        }
    }
}

fn read_address(fields: &mut Fields<'_>, report: &mut Report) -> IpAddr {
    let before = report.problems.len();
    let text = fields.text_set(report, "externalIP");
    let address = text.and_then(|text| text.trim_start_matches('[').trim_end_matches(']').parse().ok());
    if address.is_none() && report.problems.len() == before {
        let message = match text {
            Some(text) => format!("{text:?} is no IP address, such as \"10.0.0.1\" or \"::\""),
            None => "missing: the address that clients connect to, such as \"0.0.0.0\"".to_owned(),
        };
        fields.invalid(report, "externalIP", message);
    }
    address.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
}

fn read_path_match(fields: &mut Fields<'_>, report: &mut Report, path_prefix: &str) -> PathMatchMode {
    let name = fields.text_set(report, "path_match_mode").unwrap_or("disabled");
    let Some(mode) = PathMatchMode::of_name(name) else {
        fields.invalid(report, "path_match_mode", format!("{name:?} is none of \"disabled\", \"prefix\", \"exact\""));
        return PathMatchMode::Disabled;
    };
    match mode {
        PathMatchMode::Disabled if !path_prefix.is_empty() => fields.warn(
            report,
            "path_prefix",
            "has no effect while path_match_mode is \"disabled\": write \"prefix\" or \"exact\"",
        ),
        PathMatchMode::Prefix | PathMatchMode::Exact if !path_prefix.starts_with('/') => fields.invalid(
            report,
            "path_prefix",
            format!("{path_prefix:?} must begin with \"/\" when path_match_mode is {name:?}"),
        ),
        _ => {}
    }
    mode
}

/// A text of bounded length without control characters; empty where absent.
pub(super) fn text(fields: &mut Fields<'_>, report: &mut Report, name: &str) -> String {
    let value = fields.text(report, name).unwrap_or_default();
    if value.len() > TEXT_BYTES_MAX {
        fields.invalid(report, name, format!("has {} bytes, at most {TEXT_BYTES_MAX} are taken", value.len()));
    }
    if value.chars().any(char::is_control) {
        fields.invalid(report, name, format!("{value:?} has control characters"));
    }
    value.to_owned()
}

impl Facts {
    /// Whether the rule routes by KV cache.
    pub(super) fn is_exact(&self) -> bool {
        self.exact_mode == if self.pd { 1 } else { 3 }
    }
}

/// The engine of rules that do not say.
pub(super) const ENGINE_DEFAULT: Engine = Engine::Vllm;
