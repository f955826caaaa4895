//! Adapters that a rule names itself (`kvAdapters`), for engines whose `/v1/models` does not list them.

use std::collections::BTreeMap;

use serde_json::json;
use shards::block::Lora;
use shards::service::Adapter;

use crate::fields::{Fields, Node, Report, Value};

const NAME: &str = "kvAdapters";
/// Most adapters of a rule.
const ADAPTERS_MAX: usize = 256;

/// A table of adapters: each by the name that requests ask for, with its `base` and, where the engine keys by it
/// (vLLM 0.31 and later), the `path` it was loaded from.
pub(super) fn read(fields: &mut Fields<'_>, report: &mut Report) -> BTreeMap<String, Adapter> {
    let Some(node) = fields.take(NAME) else { return BTreeMap::new() };
    let Value::Table(members) = &node.value else {
        fields.invalid(report, NAME, "expected a table of adapters, such as { sql = { base = \"Qwen/Qwen3-8B\" } }");
        return BTreeMap::new();
    };
    if members.len() > ADAPTERS_MAX {
        fields.invalid(report, NAME, format!("has {} adapters, at most {ADAPTERS_MAX} are taken", members.len()));
        return BTreeMap::new();
    }
    let mut adapters = BTreeMap::new();
    for (name, node) in members {
        match adapter(name, node) {
            Ok(adapter) => drop(adapters.insert(name.clone(), adapter)),
            Err(wrong) => fields.invalid(report, NAME, format!("{name:?}: {wrong}")),
        }
    }
    adapters
}

fn adapter(name: &str, node: &Node) -> Result<Adapter, &'static str> {
    const EXPECTED: &str = "expected a table with the name of its \"base\" and, if the engine keys by it, its \"path\"";
    let Value::Table(members) = &node.value else { return Err(EXPECTED) };
    let (mut base, mut path) = (None, None);
    for (key, node) in members {
        match (key.as_str(), &node.value) {
            ("base", Value::Text(text)) if !text.is_empty() => base = Some(text.clone()),
            ("path", Value::Text(text)) if !text.is_empty() => path = Some(text.clone()),
            _ => return Err(EXPECTED),
        }
    }
    let base = base.ok_or(EXPECTED)?;
    Ok(Adapter { base, lora: Lora { name: name.to_owned(), path, id: None } })
}

/// The table again.
pub(super) fn show(adapters: &BTreeMap<String, Adapter>) -> serde_json::Value {
    let one = |adapter: &Adapter| match &adapter.lora.path {
        Some(path) => json!({"base": adapter.base, "path": path}),
        None => json!({"base": adapter.base}),
    };
    adapters.iter().map(|(name, adapter)| (name.clone(), one(adapter))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::{Dialect, from_toml};

    fn adapters(toml: &str) -> (BTreeMap<String, Adapter>, usize) {
        let mut report = Report::new(Dialect::File);
        let node = from_toml(toml).expect("the test's TOML is right");
        let mut fields = Fields::root(&mut report, &node);
        let adapters = read(&mut fields, &mut report);
        (adapters, report.problems.len())
    }

    #[test]
    fn adapters_have_a_base_and_may_have_a_path() {
        let toml = r#"kvAdapters = { sql = { base = "org/m", path = "/a" }, "x/y" = { base = "org/n" } }"#;
        let (told, problems) = adapters(toml);
        assert_eq!(problems, 0);
        let lora = |name: &str, path: Option<&str>| Lora { name: name.into(), path: path.map(Into::into), id: None };
        assert_eq!(told["sql"], Adapter { base: "org/m".into(), lora: lora("sql", Some("/a")) });
        assert_eq!(told["x/y"], Adapter { base: "org/n".into(), lora: lora("x/y", None) });
        assert_eq!(show(&told), json!({"sql": {"base": "org/m", "path": "/a"}, "x/y": {"base": "org/n"}}));
        assert_eq!(adapters(""), (BTreeMap::new(), 0));
    }

    #[test]
    fn what_is_no_adapter_is_a_problem() {
        for toml in [
            "kvAdapters = 'sql'",
            "kvAdapters = { sql = 'org/m' }",
            "kvAdapters = { sql = { path = '/a' } }",
            "kvAdapters = { sql = { base = '' } }",
            "kvAdapters = { sql = { base = 'm', rank = 8 } }",
        ] {
            assert_eq!(adapters(toml), (BTreeMap::new(), 1), "{toml}");
        }
    }
}
