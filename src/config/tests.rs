use super::*;

use crate::cores::Wish;

fn parse(text: &str) -> Result<Config, Vec<Problem>> {
    Config::parse(text, &KvDefaults::default(), None).map(|(config, _)| config)
}

fn listing(text: &str) -> Vec<String> {
    let problems = parse(text).expect_err("the file must be refused");
    let path = Path::new("kvlane.toml");
    Listing { path, problems: &problems }.to_string().lines().map(str::to_owned).collect()
}

const RULE: &str = "[[rule]]\nexternalIP = \"127.0.0.1\"\nport = 8080\nkvExactMode = 3\n\
                    [[rule.endpoints]]\nendpointIP = \"127.0.0.1\"\ntargetPort = 8001\n";

#[test]
fn every_file_in_configs_is_right() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
    let mut seen = 0;
    for entry in std::fs::read_dir(&dir).expect("configs is there") {
        let path = entry.expect("a directory entry").path();
        let result = Config::read(&path, &KvDefaults::default(), None);
        let (config, warnings) = result.unwrap_or_else(|error| panic!("{error}"));
        assert!(warnings.is_empty(), "{}: {warnings:?}", path.display());
        if path.ends_with("lab.toml") {
            assert_eq!(config.admin_listen.to_string(), "0.0.0.0:11111");
        }
        seen += 1;
    }
    assert!(seen >= 3, "configs holds the examples");
}

#[test]
fn an_empty_file_is_the_defaults() {
    let config = parse("").expect("right");
    assert_eq!(config.admin_listen.to_string(), "127.0.0.1:11111");
    assert_eq!(config.metrics_listen, None);
    assert_eq!(config.tokenizers_dir, Path::new("/etc/loxilb/tokenizers"));
    assert_eq!(config.cores, Wishes::default());
    assert!(config.rules.is_empty());
}

#[test]
fn what_engines_hold_is_remembered_where_a_directory_is_named() {
    let config = parse("[state]\ndirectory = \"/var/lib/kvlane\"\n").expect("right");
    assert_eq!(config.state_directory.as_deref(), Some(Path::new("/var/lib/kvlane")));
    assert_eq!(config.state_period, Duration::from_secs(30));
    assert_eq!(parse("").expect("right").state_directory, None);
    assert_eq!(listing("[state]\nperiod_ms = 5\n"), ["kvlane.toml:2: state.period_ms: 5 is not within 100 to 3600000"]);
}

#[test]
fn all_problems_come_with_file_line_key_and_reason() {
    let text = "\
log = \"\"
logs = \"info\"
[shards]
cores = \"all\"
count = 0
ring_entries = 1000
[ingest]
cores = [1, -2]
[control]
core = \"first\"
[limits]
body_bytes_max = 1
head_timeout_ms = \"10s\"
upstream_idle_max_ms = 5000
[admin]
listen = \"11111\"
[[rule]]
externalIP = \"127.0.0.1\"
port = 0
[[rule.endpoints]]
endpointIP = \"127.0.0.1\"
targetPort = 8000
wieght = 1
";
    assert_eq!(
        listing(text),
        [
            "kvlane.toml:2: logs: unknown key",
            "kvlane.toml:4: shards.cores: expected \"auto\" or a list of cores such as [2, 3], found \"all\"",
            "kvlane.toml:5: shards.count: 0 is not within 1 to 1024",
            "kvlane.toml:6: shards.ring_entries: 1000 is no power of two",
            "kvlane.toml:8: ingest.cores: expected \"auto\" or a list of cores such as [2, 3], found a list",
            "kvlane.toml:10: control.core: expected \"auto\" or a core such as 1, found \"first\"",
            "kvlane.toml:12: limits.body_bytes_max: 1 is not within 1024 to 1073741824",
            "kvlane.toml:13: limits.head_timeout_ms: expected a whole number, found a text (\"10s\")",
            "kvlane.toml:14: limits.upstream_idle_max_ms: must be at most 4000: engines close idle connections at 5 s",
            "kvlane.toml:16: admin.listen: \"11111\" is not of the form \"127.0.0.1:11111\"",
            "kvlane.toml:19: rule[0].port: 0 is not within 1 to 65535",
            "kvlane.toml:23: rule[0].endpoints[0].wieght: unknown key",
        ]
    );
}

#[test]
fn contradictions_between_parts_are_found() {
    let cases = [
        ("[shards]\ncores = [0]\ncount = 1\n".to_owned(), "shards.count: goes with cores = \"auto\""),
        (format!("{RULE}{RULE}"), "kvlane.toml:8: rule[1]: an earlier rule is for 127.0.0.1:8080 already"),
        (format!("[admin]\nlisten = \"127.0.0.1:8080\"\n{RULE}"), "rule[0]: 127.0.0.1:8080 is already that of [admin]"),
        (
            format!("[admin]\nlisten = \"0.0.0.0:8080\"\n{RULE}"),
            "kvlane.toml:3: rule[0]: 127.0.0.1:8080 is already part",
        ),
        (format!("[metrics]\nlisten = \"[::]:8080\"\n{RULE}"), "rule[0]: 127.0.0.1:8080 is already part of [::]:8080"),
        (
            format!("[admin]\nlisten = \"127.0.0.1:8080\"\n{}", RULE.replacen("127.0.0.1", "0.0.0.0", 1)),
            "rule[0]: 0.0.0.0:8080 is already part of 127.0.0.1:8080, that of [admin] listen, or the other way round",
        ),
        (
            "[admin]\nlisten = \"127.0.0.1:9000\"\n[metrics]\nlisten = \"0.0.0.0:9000\"\n".to_owned(),
            "kvlane.toml:4: metrics.listen: is already that of [admin] listen",
        ),
        ("[limits]\nheaders_max = 257\n".to_owned(), "limits.headers_max: 257 is not within 8 to 256"),
        (
            "[admin]\nlisten = \"127.0.0.1:9000\"\n[metrics]\nlisten = \"127.0.0.1:9000\"\n".to_owned(),
            "metrics.listen: is already that of [admin] listen",
        ),
        ("port = \n".to_owned(), "kvlane.toml:1: not TOML"),
        ("rule = 3\n".to_owned(), "rule: expected a list of tables, found a whole number"),
    ];
    for (text, expected) in cases {
        let lines = listing(&text);
        assert!(lines.iter().any(|line| line.contains(expected)), "{lines:?} lacks {expected:?}");
    }
}

#[test]
fn listeners_that_share_a_port_only_by_number_are_right() {
    for door in ["127.0.0.2:8080", "[::1]:8080", "0.0.0.0:8081", "127.0.0.1:0"] {
        parse(&format!("[admin]\nlisten = \"{door}\"\ninsecure = true\n{RULE}"))
            .unwrap_or_else(|problems| panic!("{door}: {problems:?}"));
    }
    let six = RULE.replacen("127.0.0.1", "::", 1);
    parse(&format!("[admin]\nlisten = \"127.0.0.1:8080\"\n{six}")).expect("a rule at :: is for IPv6 alone");
}

#[test]
fn cores_that_the_machine_lacks_stand_among_the_other_problems() {
    let machine = Machine { online: [0, 1].into(), ..Machine::default() };
    let text = "[shards]\ncores = [4095]\nlisten_backlog = 0\n[ingest]\ncores = [4094]\n[control]\ncore = 4093\n";
    let problems = Config::parse(text, &KvDefaults::default(), Some(&machine)).expect_err("refused");
    let lines: Vec<_> = problems.iter().map(|p| (p.line, p.key.as_str())).collect();
    assert_eq!(
        lines,
        [
            (Some(2), "shards.cores"),
            (Some(3), "shards.listen_backlog"),
            (Some(5), "ingest.cores"),
            (Some(7), "control.core"),
        ]
    );
    assert!(problems[0].message.starts_with("core 4095 is not online"), "{problems:?}");
}

#[test]
fn options_reach_their_places() {
    let config = parse(&format!(
        "log = \"debug\"\n[shards]\ncores = [0, 1]\nlisten_backlog = 128\nring_entries = 256\ndrain_timeout_ms = 5\n\
         [ingest]\ncores = \"auto\"\n[control]\ncore = 1\n[limits]\nbody_bytes_max = 4096\nfirst_byte_timeout_ms = 7\n\
         [tokenizers]\ndir = \"/tmp/t\"\n[metrics]\nlisten = \"[::1]:9090\"\n{RULE}"
    ))
    .expect("right");
    assert_eq!(config.cores.shards, Wish::List(vec![0, 1]));
    assert_eq!((config.cores.ingest, config.cores.control), (Wish::Auto(None), Some(1)));
    assert_eq!((config.listen_backlog, config.ring_entries), (128, 256));
    assert_eq!(config.drain_timeout, Duration::from_millis(5));
    assert_eq!(config.limits.body_bytes_max, 4096);
    assert_eq!(config.limits.first_byte_timeout, Some(Duration::from_millis(7)));
    assert_eq!(config.metrics_listen, Some("[::1]:9090".parse().expect("an address")));
    assert_eq!(config.rules.len(), 1);
    assert!(config.rules[0].kv.is_some());
}

/// A row of a table of `docs/configuration.md`: names, default, range.
fn rows_of_the_page(table: &str) -> Vec<(Vec<String>, String, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/configuration.md");
    let page = std::fs::read_to_string(path).expect("the page is there");
    let after = page.split(&format!("| {table} |")).nth(1).expect("the page has the table");
    let lines = after.lines().skip(2).take_while(|line| line.starts_with('|'));
    let row = |line: &str| {
        let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
        let names = cells[0].split(", ").map(|name| name.trim_matches('`').to_owned()).collect();
        (names, cells[1].trim_matches('`').to_owned(), cells[2].to_owned())
    };
    lines.map(row).collect()
}

/// The least and the most of `1 to 9` at the cell's beginning.
fn range_of(cell: &str) -> Option<(i64, i64)> {
    let (min, rest) = cell.split_once(" to ")?;
    let most = rest.split(|other: char| !other.is_ascii_digit()).next()?;
    Some((min.parse().ok()?, most.parse().ok()?))
}

/// Whether a file with this one key is accepted.
fn takes(key: &str, value: &str) -> bool {
    let text = match key.split_once('.') {
        Some((table, key)) => format!("[{table}]\n{key} = {value}\n"),
        None => format!("{key} = {value}\n"),
    };
    parse(&text).is_ok()
}

#[test]
fn the_page_of_the_file_has_its_names_defaults_and_ranges() {
    let rows = rows_of_the_page("key");
    assert!(rows.len() > 25, "{rows:?}");
    let mut defaults = std::collections::BTreeMap::<String, Vec<String>>::new();
    for (names, default, holds) in &rows {
        for name in names {
            if let Some((min, max)) = range_of(holds) {
                let outside = [min - 1, max + 1].map(|value| takes(name, &value.to_string()));
                assert_eq!(outside, [false, false], "{name} takes less than {min} or more than {max}");
                let inside = [min, max].map(|value| takes(name, &value.to_string()));
                assert_eq!(inside, [true, true], "{name} refuses {min} or {max}");
            }
            let (table, key) = name.split_once('.').unwrap_or(("", name));
            if !default.is_empty() {
                defaults.entry(table.to_owned()).or_default().push(format!("{key} = {default}"));
            }
        }
    }
    let tables = defaults.iter().map(|(table, keys)| {
        let head = if table.is_empty() { String::new() } else { format!("[{table}]\n") };
        format!("{head}{}\n", keys.join("\n"))
    });
    let stated = parse(&tables.collect::<String>()).expect("the page's defaults are right");
    assert_eq!(format!("{stated:?}"), format!("{:?}", Config::default()));
}

#[test]
fn the_page_of_the_file_has_the_variables_their_defaults_and_ranges() {
    let rows = rows_of_the_page("variable");
    let read = |name: &str, value: &str| KvDefaults::from_env(|other| (other == name).then(|| value.to_owned()));
    for (names, default, range) in &rows {
        let name = &names[0];
        assert_eq!(read(name, default).ok(), Some(KvDefaults::default()), "{name} is {default:?} by default");
        assert!(read(name, "\u{7f}nonsense that is longer than a seed").is_err(), "{name} is read");
        let Some((min, max)) = range_of(range) else { continue };
        for (value, right) in [(min, true), (max, true), (min - 1, false), (max + 1, false)] {
            assert_eq!(read(name, &value.to_string()).is_ok(), right, "{name} = {value}");
        }
    }
    let asked = std::cell::RefCell::new(std::collections::BTreeSet::new());
    let _ = KvDefaults::from_env(|name| {
        asked.borrow_mut().insert(name.to_owned());
        None
    });
    let named: std::collections::BTreeSet<_> = rows.into_iter().flat_map(|(names, ..)| names).collect();
    assert_eq!(asked.into_inner(), named, "the page has all variables");
}

#[test]
fn shards_may_be_told_to_do_without_io_uring() {
    let driver = |text| parse(&format!("[shards]\ndriver = \"{text}\"\n")).map(|config| config.first_rung);
    assert_eq!((driver("auto").ok(), driver("epoll").ok()), (Some(Rung::DeferTaskrun), Some(Rung::Epoll)));
    assert_eq!(
        listing("[shards]\ndriver = \"poll\"\n"),
        ["kvlane.toml:2: shards.driver: expected \"auto\" or \"epoll\", found \"poll\""]
    );
}
