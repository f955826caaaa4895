//! The options outside `[[rule]]`: each is named, bounded and given its default here and nowhere else.

use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use shards::executor::Rung;
use shards::http::HEADERS_CEILING;
use shards::limits::Limits;

use crate::access::{AccessOptions, TlsFiles};
use crate::cores::Wish;
use crate::fields::{Fields, Node, Report, Value};
use crate::rules::RuleFiles;

use super::{Config, overlaps};

/// Most cores a list may name.
const CORES_MAX: usize = 1024;
/// Longest time an option may set.
const HOUR_MS: i64 = 3_600_000;
/// Most directories that `[admin] files` may name.
const FILES_MAX: usize = 64;

pub(super) fn read(config: &mut Config, root: &mut Fields<'_>, report: &mut Report) {
    if let Some(level) = root.text_set(report, "log") {
        match level.parse::<tracing_subscriber::EnvFilter>() {
            Ok(_) => level.clone_into(&mut config.log),
            Err(error) => root.invalid(report, "log", format!("{level:?} is no level or filter: {error}")),
        }
    }
    if let Some(fields) = root.table(report, "shards") {
        read_shards(config, fields, report);
    }
    if let Some(mut fields) = root.table(report, "ingest") {
        if let Some(wish) = read_cores(&mut fields, report, "cores") {
            config.cores.ingest = wish;
        }
        fields.finish(report);
    }
    if let Some(mut fields) = root.table(report, "control") {
        config.cores.control = read_control_core(&mut fields, report);
        fields.finish(report);
    }
    if let Some(fields) = root.table(report, "limits") {
        read_limits(&mut config.limits, fields, report);
    }
    if let Some(mut fields) = root.table(report, "tokenizers") {
        if let Some(dir) = fields.text_set(report, "dir") {
            config.tokenizers_dir = PathBuf::from(dir);
        }
        fields.finish(report);
    }
    if let Some(mut fields) = root.table(report, "state") {
        config.state_directory = fields.text_set(report, "directory").map(PathBuf::from);
        if let Some(ms) = fields.int_in(report, "period_ms", 100..=HOUR_MS) {
            config.state_period = Duration::from_millis(ms as u64);
        }
        fields.finish(report);
    }
    let mut files = Vec::new();
    if let Some(mut fields) = root.table(report, "admin") {
        if let Some(address) = read_listen(&mut fields, report) {
            config.admin_listen = address;
        }
        config.access = read_access(&mut fields, report, config.admin_listen);
        files = read_files(&mut fields, report);
        fields.finish(report);
    }
    config.kv_defaults.files = RuleFiles::new(&files, &config.tokenizers_dir);
    if let Some(mut fields) = root.table(report, "metrics") {
        config.metrics_listen = read_listen(&mut fields, report);
        let admin = config.admin_listen;
        if config.metrics_listen.is_some_and(|address| overlaps(address, admin) || overlaps(admin, address)) {
            fields.invalid(report, "listen", "is already that of [admin] listen");
        }
        fields.finish(report);
    }
}

fn read_shards(config: &mut Config, mut fields: Fields<'_>, report: &mut Report) {
    if let Some(wish) = read_cores(&mut fields, report, "cores") {
        config.cores.shards = wish;
    }
    if let Some(count) = fields.int_in(report, "count", 1..=CORES_MAX as i64) {
        match &mut config.cores.shards {
            Wish::Auto(most) => *most = Some(count as usize),
            Wish::List(_) => fields.invalid(report, "count", "goes with cores = \"auto\": a list counts itself"),
        }
    }
    if let Some(backlog) = fields.int_in(report, "listen_backlog", 1..=65_535) {
        config.listen_backlog = backlog as u32;
    }
    if let Some(entries) = fields.int_in(report, "ring_entries", 64..=32_768) {
        if entries.count_ones() != 1 {
            fields.invalid(report, "ring_entries", format!("{entries} is no power of two"));
        }
        config.ring_entries = entries as u32;
    }
    match fields.text_set(report, "driver") {
        None | Some("auto") => {}
        Some("epoll") => config.first_rung = Rung::Epoll,
        Some(other) => {
            fields.invalid(report, "driver", format!("expected \"auto\" or \"epoll\", found {other:?}"));
        }
    }
    if let Some(ms) = fields.int_in(report, "drain_timeout_ms", 0..=HOUR_MS) {
        config.drain_timeout = Duration::from_millis(ms as u64);
    }
    fields.finish(report);
}

/// `"auto"` or a list of cores.
fn read_cores(fields: &mut Fields<'_>, report: &mut Report, name: &str) -> Option<Wish> {
    let node = fields.take(name)?;
    let wish = match &node.value {
        Value::Text(text) if text == "auto" => Some(Wish::Auto(None)),
        Value::List(items) if items.len() <= CORES_MAX => {
            items.iter().map(core_of).collect::<Option<_>>().map(Wish::List)
        }
        _ => None,
    };
    if wish.is_none() {
        fields.invalid(
            report,
            name,
            format!("expected \"auto\" or a list of cores such as [2, 3], found {}", node.value),
        );
    }
    wish
}

fn core_of(node: &Node) -> Option<usize> {
    match node.value {
        Value::Int(core) => usize::try_from(core).ok(),
        _ => None,
    }
}

fn read_control_core(fields: &mut Fields<'_>, report: &mut Report) -> Option<usize> {
    let node = fields.take("core")?;
    match &node.value {
        Value::Text(text) if text == "auto" => None,
        other => {
            let core = core_of(node);
            if core.is_none() {
                fields.invalid(report, "core", format!("expected \"auto\" or a core such as 1, found {other}"));
            }
            core
        }
    }
}

fn read_listen(fields: &mut Fields<'_>, report: &mut Report) -> Option<SocketAddr> {
    let text = fields.text_set(report, "listen")?;
    let address = text.parse().ok();
    if address.is_none() {
        fields.invalid(report, "listen", format!("{text:?} is not of the form \"127.0.0.1:11111\""));
    }
    address
}

/// Who may use the management API. Beyond loopback it must be protected, or be said not to be.
fn read_access(fields: &mut Fields<'_>, report: &mut Report, listen: SocketAddr) -> AccessOptions {
    let mut path = |report: &mut Report, name| fields.text_set(report, name).map(PathBuf::from);
    let tokens = path(report, "tokens");
    let (certificate, key) = (path(report, "tls_certificate"), path(report, "tls_key"));
    if certificate.is_some() != key.is_some() {
        let missing = if key.is_none() { "tls_key" } else { "tls_certificate" };
        fields.invalid(report, missing, "missing: a certificate and its key go together");
    }
    let tls = certificate.zip(key).map(|(certificate, key)| TlsFiles { certificate, key });
    let insecure = fields.flag(report, "insecure").unwrap_or(false);
    if !listen.ip().is_loopback() && !insecure && (tls.is_none() || tokens.is_none()) {
        let message = format!(
            "{listen} can be reached from other hosts: give tokens, tls_certificate and tls_key, or write insecure = true \
             where everybody who reaches it may change every rule"
        );
        fields.invalid(report, "listen", message);
    }
    AccessOptions { tokens, tls, insecure }
}

/// Directories in which rules made over the API may name files.
fn read_files(fields: &mut Fields<'_>, report: &mut Report) -> Vec<PathBuf> {
    const NAME: &str = "files";
    let Some(node) = fields.take(NAME) else { return Vec::new() };
    let directory = |node: &Node| match &node.value {
        Value::Text(text) if is_directory_of_files(Path::new(text)) => Some(PathBuf::from(text)),
        _ => None,
    };
    let read = match &node.value {
        Value::List(items) if items.len() <= FILES_MAX => items.iter().map(directory).collect::<Option<_>>(),
        _ => None,
    };
    read.unwrap_or_else(|| {
        let message = format!(
            "expected a list of at most {FILES_MAX} directories such as [\"/etc/kvlane/rules.d\"], each absolute, without .., \
             and neither / nor in /proc, /sys or /dev"
        );
        fields.invalid(report, NAME, message);
        Vec::new()
    })
}

/// Whether a directory may be one in which anybody who makes rules may have files read.
fn is_directory_of_files(path: &Path) -> bool {
    let plain = path.components().skip(1).all(|part| matches!(part, Component::Normal(_)));
    let of_the_kernel = ["/proc", "/sys", "/dev"].iter().any(|root| path.starts_with(root));
    path.is_absolute() && plain && path != Path::new("/") && !of_the_kernel
}

fn read_limits(limits: &mut Limits, mut fields: Fields<'_>, report: &mut Report) {
    let default = limits.clone();
    let f = &mut fields;
    *limits = Limits {
        head_bytes_max: size(f, report, "head_bytes_max", 1024..=1 << 20, default.head_bytes_max),
        headers_max: size(f, report, "headers_max", 8..=HEADERS_CEILING as i64, default.headers_max),
        body_bytes_max: size(f, report, "body_bytes_max", 1024..=1 << 30, default.body_bytes_max),
        relay_bytes_max: size(f, report, "relay_bytes_max", 4096..=1 << 20, default.relay_bytes_max),
        connections_max: size(f, report, "connections_max", 1..=1 << 20, default.connections_max),
        head_timeout: time(f, report, "head_timeout_ms", default.head_timeout),
        body_timeout: time(f, report, "body_timeout_ms", default.body_timeout),
        idle_timeout: time(f, report, "idle_timeout_ms", default.idle_timeout),
        connect_timeout: time(f, report, "connect_timeout_ms", default.connect_timeout),
        first_byte_timeout: fields_time(f, report, "first_byte_timeout_ms").or(default.first_byte_timeout),
        stream_idle_timeout: time(f, report, "stream_idle_timeout_ms", default.stream_idle_timeout),
        write_timeout: time(f, report, "write_timeout_ms", default.write_timeout),
        upstream_idle_max: time(f, report, "upstream_idle_max_ms", default.upstream_idle_max),
        upstream_idle_connections_max: size(
            f,
            report,
            "upstream_idle_connections_max",
            0..=65_535,
            default.upstream_idle_connections_max,
        ),
        prompt_cache_bytes: size(f, report, "prompt_cache_bytes", 0..=1 << 40, default.prompt_cache_bytes),
    };
    if limits.upstream_idle_max > Duration::from_secs(4) {
        fields.invalid(report, "upstream_idle_max_ms", "must be at most 4000: engines close idle connections at 5 s");
    }
    fields.finish(report);
}

fn size(
    fields: &mut Fields<'_>,
    report: &mut Report,
    name: &str,
    range: std::ops::RangeInclusive<i64>,
    default: usize,
) -> usize {
    fields.int_in(report, name, range).map_or(default, |value| value as usize)
}

fn time(fields: &mut Fields<'_>, report: &mut Report, name: &str, default: Duration) -> Duration {
    fields_time(fields, report, name).unwrap_or(default)
}

fn fields_time(fields: &mut Fields<'_>, report: &mut Report, name: &str) -> Option<Duration> {
    fields.int_in(report, name, 1..=HOUR_MS).map(|ms| Duration::from_millis(ms as u64))
}
