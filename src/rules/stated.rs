//! What a rule's maker said of it, of which the same rule can be made again.

use serde_json::{Map, Value};

use super::table::{ENDPOINT, Kind, Member, SERVICE};

/// Members of endpoints that only a moment has.
const MOMENT: [&str; 2] = ["state", "counter"];

/// What a readback has beside members of which nothing was said.
pub(super) const MARKS: [&str; 2] = ["kvHashAlgoDefault", "selDefault"];

/// An API body by the names of the documentation, without members that it does not have, and without those that were left
/// empty by a null. What follows from defaults is not in it: it may be another where the rule is made again.
#[must_use]
pub fn stated(body: &Value) -> Value {
    let mut whole = Map::new();
    let given = member(body, "serviceArguments");
    let mut service = known(given, SERVICE);
    for name in MARKS {
        if let (Some(map), Some(mark)) = (service.as_object_mut(), given.and_then(|given| member(given, name))) {
            map.insert(name.to_owned(), mark.clone());
        }
    }
    whole.insert("serviceArguments".to_owned(), service);
    let endpoint = |given: &Value| {
        let mut endpoint = known(Some(given), ENDPOINT);
        if let Some(map) = endpoint.as_object_mut() {
            MOMENT.iter().for_each(|name| drop(map.remove(*name)));
        }
        endpoint
    };
    let endpoints = member(body, "endpoints").and_then(Value::as_array).into_iter().flatten().map(endpoint);
    whole.insert("endpoints".to_owned(), endpoints.collect());
    Value::Object(whole)
}

fn known(given: Option<&Value>, members: &[Member]) -> Value {
    let named = |option: &Member| Some((option.name.to_owned(), as_listed(option, member(given?, option.name)?)));
    Value::Object(members.iter().filter_map(named).collect())
}

/// A value as the documentation writes it: words match in any case.
fn as_listed(option: &Member, value: &Value) -> Value {
    let listed = match option.kind {
        Kind::OneOf(words) => {
            value.as_str().and_then(|word| words.iter().find(|listed| listed.eq_ignore_ascii_case(word)))
        }
        _ => None,
    };
    listed.map_or_else(|| value.clone(), |word| Value::from(*word))
}

/// A member by its name in any case, as bodies are read.
fn member<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    let any_case = || value.as_object()?.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value);
    value.get(name).or_else(any_case).filter(|value| !value.is_null())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_was_said_is_kept_by_its_name_and_nothing_else() {
        let body = json!({
            "ServiceArguments": {"EXTERNALIP": "127.0.0.1", "port": 80, "protocol": "TCP", "kvHashAlgo": null, "seldefault": true,
                "apikey": "a secret"},
            "endpoints": [{"endpointIP": "127.0.0.1", "targetPort": 81, "state": "", "counter": "", "more": 1}],
            "allowedSources": null,
        });
        let expected = json!({
            "serviceArguments": {"externalIP": "127.0.0.1", "port": 80, "protocol": "tcp", "selDefault": true},
            "endpoints": [{"endpointIP": "127.0.0.1", "targetPort": 81}],
        });
        assert_eq!(stated(&body), expected);
    }
}
