use super::*;

fn texts(problems: &[Problem]) -> Vec<String> {
    problems.iter().map(|p| format!("{}: {p}", p.line.unwrap_or(0))).collect()
}

#[test]
fn a_file_reports_wrong_types_ranges_and_unknown_keys_with_their_lines() {
    let node = from_toml("port = 70000\nname = 3\n\n[[rule]]\nweight = \"1\"\n[[rule]]\nwieght = 1\n").expect("TOML");
    let mut report = Report::new(Dialect::File);
    let mut fields = Fields::root(&mut report, &node);
    assert_eq!(fields.int_in(&mut report, "port", 1..=65535), None);
    assert_eq!(fields.text(&mut report, "name"), None);
    for mut rule in fields.tables(&mut report, "rule") {
        rule.int(&mut report, "weight");
        rule.finish(&mut report);
    }
    fields.finish(&mut report);
    assert_eq!(
        texts(&report.problems),
        [
            "1: port: 70000 is not within 1 to 65535",
            "2: name: expected a text, found a whole number (3)",
            "5: rule[0].weight: expected a whole number, found a text (\"1\")",
            "7: rule[1].wieght: unknown key",
        ]
    );
}

#[test]
fn a_request_matches_names_in_any_case_takes_null_as_absent_and_warns_of_unknown_names() {
    let node = from_json(br#"{"BGP":true,"Monitor":null,"count":2.0,"odd":1.5,"new":[]}"#).expect("JSON");
    let mut report = Report::new(Dialect::Api);
    let mut fields = Fields::root(&mut report, &node);
    assert_eq!(fields.flag(&mut report, "bgp"), Some(true));
    assert_eq!(fields.flag(&mut report, "monitor"), None);
    assert_eq!(fields.int(&mut report, "count"), Some(2));
    assert_eq!(fields.int(&mut report, "odd"), None);
    fields.finish(&mut report);
    assert_eq!(
        texts(&report.problems),
        ["0: odd: expected a whole number, found a value that is no whole number (1.5)"]
    );
    assert_eq!(texts(&report.warnings), ["0: new: unknown member, ignored"]);
}

#[test]
fn every_syntax_error_of_a_file_is_reported() {
    let problems = from_toml("a = \nb = 1\nc = = 2\n").expect_err("no TOML");
    let lines: Vec<_> = problems.iter().map(|p| p.line).collect();
    assert!(lines.contains(&Some(1)) && lines.contains(&Some(3)), "{problems:?}");
}

#[test]
fn deep_nesting_is_refused_not_followed() {
    let deep = format!("{}1{}", "[".repeat(40), "]".repeat(40));
    assert_eq!(from_json(deep.as_bytes()).expect_err("too deep").message, "nested deeper than 32 levels");
    let beyond = "[".repeat(100_000);
    assert!(from_json(beyond.as_bytes()).is_err());
}
