use super::*;

#[test]
fn urls_are_parsed_or_refused() {
    let target = Target::parse("http://127.0.0.1:8000").unwrap();
    assert_eq!((target.address.to_string().as_str(), target.prefix.as_str()), ("127.0.0.1:8000", ""));
    let target = Target::parse("http://127.0.0.1/api/").unwrap();
    assert_eq!((target.address.port(), target.prefix.as_str()), (80, "/api"));
    assert_eq!(Target::parse("http://[::1]").unwrap().address.port(), 80);
    assert_eq!(Target::parse("http://[::1]:81/").unwrap().address.port(), 81);
    for bad in
        ["127.0.0.1:80", "https://127.0.0.1", "http://", "http://a b", "http://u@127.0.0.1/", "http://127.0.0.1/?q"]
    {
        assert!(matches!(Target::parse(bad), Err(TargetError::Form(_))), "`{bad}`");
    }
    assert!(matches!(Target::parse("http://127.0.0.1:99999"), Err(TargetError::Resolve { .. })));
}

#[test]
fn every_error_kind_has_a_name_and_a_place_of_its_own() {
    for (place, kind) in ErrorKind::ALL.into_iter().enumerate() {
        assert_eq!(kind as usize, place);
        assert_eq!(ErrorKind::ALL.iter().filter(|other| other.name() == kind.name()).count(), 1);
    }
}
