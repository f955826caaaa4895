//! What engines say of themselves, read from their answers.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use shards::block::sglang::EventFormat;
use shards::block::vllm::Tagging;
use shards::block::{Lora, Release};
use shards::service::{Adapter, Engine};

/// Most models, and most adapters, of one endpoint and of one service that are taken notice of. Further adapters are
/// routed without keys; further models are loaded when a request asks for them.
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
    /// SGLang: its ranks have HTTP ports of their own (the Rust frontend), so that no header chooses one.
    pub ports_by_rank: bool,
}

/// vLLM before does not know the header that chooses a rank.
const VLLM_RANK_HEADER: Release = Release::new(0, 11, 1);
/// SGLang before does not know it.
const SGLANG_RANK_HEADER: Release = Release::new(0, 5, 10);

impl EndpointFacts {
    /// Whether `X-data-parallel-rank` chooses the rank that serves a request. An engine that has not said its release is
    /// not relied on.
    #[must_use]
    pub fn conveys_rank(&self, engine: Engine) -> bool {
        let since = match engine {
            Engine::Vllm => VLLM_RANK_HEADER,
            Engine::Sglang if !self.ports_by_rank => SGLANG_RANK_HEADER,
            Engine::Sglang | Engine::Trtllm | Engine::Llamacpp => return false,
        };
        self.release().is_some_and(|release| release >= since)
    }

    /// Its release, where its version names one.
    #[must_use]
    pub fn release(&self) -> Option<Release> {
        self.version.as_deref().and_then(Release::parse)
    }

    /// Whether its release takes the ids of a chat's prompt along with the chat, checks them, and leaves those out that
    /// it cannot use: vLLM 0.32 in `kv_transfer_params`, SGLang 0.5.13, TensorRT-LLM 1.3 (older ones refuse members that
    /// they do not know).
    #[must_use]
    pub fn takes_ids(&self, engine: Engine) -> bool {
        let since = match engine {
            Engine::Vllm => Release::new(0, 32, 0),
            Engine::Sglang => Release::new(0, 5, 13),
            Engine::Trtllm => Release::new(1, 3, 0),
            Engine::Llamacpp => return false,
        };
        self.release().is_some_and(|release| release >= since)
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
        self.ports_by_rank = answer["frontend"] == "rust";
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
    /// keyed as its own release does.
    pub release: Option<Release>,
    /// The forms of extra keys in their releases, as vLLM's; of several where releases are mixed.
    pub forms: BTreeSet<Tagging>,
    /// Models by the names that requests ask for.
    pub models: BTreeSet<String>,
    /// Adapters by the names that requests ask for. One that endpoints describe differently has no path, so that it is
    /// keyed only where the path does not matter; one of two bases, or that is a model elsewhere, is left out.
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
                facts.forms.insert(Tagging::of(release));
                facts.release = facts.release.max(Some(release));
            }
            let room = CARDS_MAX - facts.models.len();
            let new = endpoint.models.iter().filter(|model| !facts.models.contains(*model)).take(room);
            let new: Vec<String> = new.cloned().collect();
            facts.models.extend(new);
            facts.bigrams |= endpoint.bigrams;
            if endpoint.format == EventFormat::Dynamo {
                facts.format = EventFormat::Dynamo;
            }
            for (name, adapter) in &endpoint.adapters {
                if facts.adapters.len() >= CARDS_MAX && !facts.adapters.contains_key(name) {
                    break;
                }
                let known = facts.adapters.entry(name.clone()).or_insert_with(|| adapter.clone());
                if known.base != adapter.base {
                    two_bases.insert(name.clone());
                }
                if known.lora.path != adapter.lora.path {
                    known.lora.path = None;
                }
            }
        }
        let models = &facts.models;
        facts.adapters.retain(|name, _| !two_bases.contains(name) && !models.contains(name));
        facts
    }

    /// The model that they all serve, if that is one.
    #[must_use]
    pub fn only_model(&self) -> Option<&str> {
        let mut models = self.models.iter();
        models.next().filter(|_| models.next().is_none()).map(String::as_str)
    }

    /// The forms of extra keys beside that of the newest release: some engines key adapters and salts so.
    #[must_use]
    pub fn other_forms(&self) -> Vec<Tagging> {
        let newest = self.release.map(Tagging::of);
        self.forms.iter().copied().filter(|form| Some(*form) != newest).collect()
    }
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
        assert_eq!((facts.release, facts.other_forms()), (Some(Release::new(0, 31, 0)), vec![Tagging::MmOffset]));
        assert_eq!(facts.adapters["sql"].lora.path, None);
        let other_base = endpoint("0.31.0", r#"{"data":[{"id":"sql","root":"/adapters/sql","parent":"other"}]}"#);
        assert!(ServiceFacts::of([&one, &other_base, &one]).adapters.is_empty());
        let model = endpoint("0.30.1", r#"{"data":[{"id":"sql","parent":null}]}"#);
        assert!(ServiceFacts::of([&one, &model]).adapters.is_empty());
        let same = ServiceFacts::of([&one, &endpoint("0.30.2", CARDS)]);
        assert_eq!((same.other_forms(), same.adapters), (vec![], one.adapters.clone()));
        assert_eq!(ServiceFacts::of([]), ServiceFacts::default());
    }

    #[test]
    fn no_engine_makes_the_gateway_keep_more_than_the_limit() {
        let cards = |from: usize| {
            let of = |n: usize| format!(r#"{{"id":"m{n}"}},{{"id":"a{n}","parent":"m{n}","root":"/a"}}"#);
            let cards: Vec<String> = (from..from + CARDS_MAX).map(of).collect();
            endpoint("0.32.0", &format!(r#"{{"data":[{}]}}"#, cards.join(",")))
        };
        let (one, other) = (cards(0), cards(CARDS_MAX));
        assert_eq!(one.models.len() + one.adapters.len(), CARDS_MAX);
        let facts = ServiceFacts::of([&one, &other, &cards(2 * CARDS_MAX)]);
        assert_eq!((facts.models.len(), facts.adapters.len()), (CARDS_MAX, CARDS_MAX));
    }

    #[test]
    fn a_header_chooses_the_rank_from_certain_releases_on() {
        let of = |engine, version: &str| endpoint(version, r#"{"data":[]}"#).conveys_rank(engine);
        for (engine, before, since) in [(Engine::Vllm, "0.11.0", "0.11.1"), (Engine::Sglang, "0.5.9", "0.5.10")] {
            assert!(!of(engine, before) && of(engine, since) && of(engine, "1.0.0"), "{engine:?}");
            assert!(!EndpointFacts::default().conveys_rank(engine), "it has not said its release");
        }
        assert!(!of(Engine::Trtllm, "1.2.0"));
        let mut rust = EndpointFacts::default();
        assert!(rust.read_server_info(br#"{"version":"0.5.23","frontend":"rust"}"#));
        assert!(!rust.conveys_rank(Engine::Sglang), "a port for each rank");
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
