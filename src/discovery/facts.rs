//! What engines say of themselves, read from their answers.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use shards::block::sglang::EventFormat;
use shards::block::{Lora, Release};
use shards::service::Adapter;

/// Most models and adapters of one endpoint that are taken notice of. Further ones are routed without keys.
const CARDS_MAX: usize = 4096;

/// What one endpoint says of itself. What it has not said is as in a default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointFacts {
    /// Its version, as it spells it.
    pub version: Option<String>,
    /// Models by the names that requests ask for.
    pub models: BTreeSet<String>,
    /// Adapters by the names that requests ask for.
    pub adapters: BTreeMap<String, Adapter>,
    /// SGLang: whether it speculates over pairs of tokens (EAGLE and its kin).
    pub bigrams: bool,
    /// SGLang: the format of its events.
    pub format: EventFormat,
}

impl EndpointFacts {
    /// Its release, where its version names one.
    #[must_use]
    pub fn release(&self) -> Option<Release> {
        self.version.as_deref().and_then(Release::parse)
    }

    /// Reads `GET /version`; false when it is no such answer.
    pub fn read_version(&mut self, body: &[u8]) -> bool {
        let Ok(answer) = serde_json::from_slice::<Value>(body) else { return false };
        let Some(version) = answer["version"].as_str() else { return false };
        self.version = Some(version.to_owned());
        true
    }

    /// Reads `GET /v1/models`; false when it is no such answer. A card with a parent is an adapter of it, loaded from
    /// its root.
    pub fn read_models(&mut self, body: &[u8]) -> bool {
        let Ok(answer) = serde_json::from_slice::<Value>(body) else { return false };
        let Some(cards) = answer["data"].as_array() else { return false };
        self.models.clear();
        self.adapters.clear();
        for card in cards.iter().take(CARDS_MAX) {
            let text = |name: &str| card[name].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
            let Some(name) = text("id") else { continue };
            match text("parent") {
                Some(base) if base != name => {
                    let lora = Lora { name: name.clone(), path: text("root"), id: None };
                    self.adapters.insert(name, Adapter { base, lora });
                }
                _ => {
                    self.models.insert(name);
                }
            }
        }
        true
    }

    /// Reads SGLang's `GET /server_info`; false when it is no such answer.
    pub fn read_server_info(&mut self, body: &[u8]) -> bool {
        let Ok(answer) = serde_json::from_slice::<Value>(body) else { return false };
        let Some(version) = answer["version"].as_str() else { return false };
        self.version = Some(version.to_owned());
        let speculation = answer["speculative_algorithm"].as_str().unwrap_or_default();
        self.bigrams = ["EAGLE", "EAGLE3", "FROZEN_KV_MTP"].contains(&speculation);
        // The option's own text, which is JSON again.
        let config = answer["kv_events_config"].as_str().unwrap_or_default();
        let config: Value = serde_json::from_str(config).unwrap_or_default();
        self.format = if config["format"] == "dynamo" { EventFormat::Dynamo } else { EventFormat::Default };
        true
    }
}

/// What the endpoints of a service say together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceFacts {
    /// The newest release among them. Plain prompts have the same keys in all of a contract's releases; extras are
    /// keyed as this one does.
    pub release: Option<Release>,
    /// Whether they are of releases that key extras differently.
    pub mixed: bool,
    /// Models by the names that requests ask for.
    pub models: BTreeSet<String>,
    /// Adapters by the names that requests ask for. One that endpoints describe differently has no path, so that it is
    /// keyed only where the path does not matter; one of two bases is left out.
    pub adapters: BTreeMap<String, Adapter>,
    /// SGLang: whether they speculate over pairs of tokens.
    pub bigrams: bool,
    /// SGLang: the format of their events.
    pub format: EventFormat,
}

impl ServiceFacts {
    /// Joins what the endpoints say.
    #[must_use]
    pub fn of<'a>(endpoints: impl IntoIterator<Item = &'a EndpointFacts>) -> Self {
        let mut facts = ServiceFacts::default();
        let mut two_bases = BTreeSet::new();
        for endpoint in endpoints {
            if let Some(release) = endpoint.release() {
                facts.mixed |= facts.release.is_some_and(|known| extras_form(known) != extras_form(release));
                facts.release = facts.release.max(Some(release));
            }
            facts.models.extend(endpoint.models.iter().cloned());
            facts.bigrams |= endpoint.bigrams;
            if endpoint.format == EventFormat::Dynamo {
                facts.format = EventFormat::Dynamo;
            }
            for (name, adapter) in &endpoint.adapters {
                let known = facts.adapters.entry(name.clone()).or_insert_with(|| adapter.clone());
                if known.base != adapter.base {
                    two_bases.insert(name.clone());
                }
                if known.lora.path != adapter.lora.path {
                    known.lora.path = None;
                }
            }
        }
        facts.adapters.retain(|name, _| !two_bases.contains(name));
        facts
    }
}

/// How a vLLM release keys extras; releases of other engines only differ by number.
fn extras_form(release: Release) -> shards::block::vllm::Tagging {
    shards::block::vllm::Tagging::of(release)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(version: &str, models: &str) -> EndpointFacts {
        let mut facts = EndpointFacts::default();
        assert!(facts.read_version(format!(r#"{{"version":"{version}"}}"#).as_bytes()));
        assert!(facts.read_models(models.as_bytes()));
        facts
    }

    const CARDS: &str = r#"{"object":"list","data":[
        {"id":"Qwen/Qwen3","root":"/models/qwen","parent":null,"max_model_len":4096},
        {"id":"sql","root":"/adapters/sql","parent":"Qwen/Qwen3"},
        {"id":"self","root":"x","parent":"self"},
        {"noid":1}]}"#;

    #[test]
    fn cards_with_a_parent_are_adapters() {
        let facts = endpoint("0.32.0", CARDS);
        assert_eq!(facts.models.iter().map(String::as_str).collect::<Vec<_>>(), ["Qwen/Qwen3", "self"]);
        let adapter = &facts.adapters["sql"];
        assert_eq!((adapter.base.as_str(), adapter.lora.path.as_deref()), ("Qwen/Qwen3", Some("/adapters/sql")));
        assert_eq!(facts.release(), Some(Release::new(0, 32, 0)));
        let mut facts = facts;
        for other in [&b"<html>"[..], b"{}", b"[]", br#"{"version":1,"data":{}}"#] {
            let taken = (facts.read_models(other), facts.read_version(other), facts.read_server_info(other));
            assert_eq!(taken, (false, false, false));
        }
        assert_eq!(facts.models.len(), 2, "what is no answer changes nothing");
    }

    #[test]
    fn endpoints_that_disagree_leave_only_what_is_sure() {
        let one = endpoint("0.30.1", CARDS);
        let moved = endpoint("0.31.0", &CARDS.replace("/adapters/sql", "/elsewhere/sql"));
        let facts = ServiceFacts::of([&one, &moved]);
        assert_eq!((facts.release, facts.mixed), (Some(Release::new(0, 31, 0)), true));
        assert_eq!(facts.adapters["sql"].lora.path, None);
        let other_base = endpoint("0.31.0", r#"{"data":[{"id":"sql","root":"/adapters/sql","parent":"other"}]}"#);
        assert!(ServiceFacts::of([&one, &other_base, &one]).adapters.is_empty());
        let same = ServiceFacts::of([&one, &endpoint("0.30.2", CARDS)]);
        assert_eq!((same.mixed, same.adapters), (false, one.adapters.clone()));
        assert_eq!(ServiceFacts::of([]), ServiceFacts::default());
    }

    #[test]
    fn sglang_says_how_it_speculates_and_publishes() {
        let mut facts = EndpointFacts::default();
        let info = r#"{"version":"0.5.23","speculative_algorithm":"EAGLE3",
            "kv_events_config":"{\"publisher\":\"zmq\",\"format\":\"dynamo\"}"}"#;
        assert!(facts.read_server_info(info.as_bytes()));
        assert_eq!((facts.bigrams, facts.format), (true, EventFormat::Dynamo));
        assert!(
            facts.read_server_info(br#"{"version":"0.5.23","speculative_algorithm":"NGRAM","kv_events_config":null}"#)
        );
        assert_eq!((facts.bigrams, facts.format), (false, EventFormat::Default));
        assert_eq!(ServiceFacts::of([&facts]).release, Some(Release::new(0, 5, 23)));
    }
}
