//! Do the names fit: the rule's model, the models that an engine serves, and the directories of tokenizers?
//!
//! A request names the model as the engine does, and the gateway looks for a directory of that name. Where there is none,
//! every such request is routed without its cache, and nothing else shows it.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::path::Path;

use shards::prompt::slug;

use crate::discovery::EndpointFacts;

/// Directories that a message names at most.
const NAMED_MAX: usize = 8;

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameLeg {
    /// The names of rule, engine and tokenizers do not meet.
    Model,
    /// They do, and the files cannot be used.
    TokenizerFiles,
}

/// A fault, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameFault {
    /// What is wrong.
    pub leg: NameLeg,
    /// What was found, a sentence.
    pub found: String,
    /// What to do, a sentence.
    pub fix: String,
}

/// What is known of a model's tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Staged {
    /// It is there, or may be: nothing speaks against it.
    There,
    /// There is no such directory.
    Absent,
    /// Its files cannot be used, with the reason.
    Unusable(String),
}

/// The names to be compared.
#[derive(Clone, Copy, Debug)]
pub struct Names<'a> {
    /// `model_name` of the rule; empty = any.
    pub rule: &'a str,
    /// What the engine says of itself.
    pub engine: &'a EndpointFacts,
    /// Requests that named a model without a tokenizer.
    pub missed: u64,
    /// The tokenizer directory.
    pub directory: &'a Path,
}

impl Names<'_> {
    /// The names that requests to this engine may give, those of adapters by their base; empty while the engine says
    /// nothing.
    #[must_use]
    pub fn requested(&self) -> BTreeSet<&str> {
        let base = self.engine.adapters.get(self.rule).map(|adapter| adapter.base.as_str());
        match (self.rule, base) {
            ("", _) => self.engine.models.iter().map(String::as_str).collect(),
            (_, Some(base)) => BTreeSet::from([base]),
            (rule, None) => self.engine.models.get(rule).map(String::as_str).into_iter().collect(),
        }
    }

    /// Compares them. `staged` tells of a directory by its name; `there` are the directories that exist.
    #[must_use]
    pub fn judge(&self, staged: impl Fn(&str) -> Staged, there: &[String]) -> Option<NameFault> {
        if self.engine.models.is_empty() {
            return None;
        }
        let served = quoted(self.engine.models.iter().map(String::as_str));
        let requested = self.requested();
        if requested.is_empty() {
            let rule = self.rule;
            return Some(NameFault {
                leg: NameLeg::Model,
                found: format!("the rule is for model {rule:?}, the engine serves {served}"),
                fix: format!(
                    "set model_name to a name that is served, or start the engine with --served-model-name {rule}"
                ),
            });
        }
        let known: Vec<(&str, Staged)> =
            requested.iter().map(|name| (*name, slug(name).map_or(Staged::Absent, |slug| staged(&slug)))).collect();
        let usable = known.iter().any(|(_, staged)| *staged == Staged::There);
        if let Some((_, Staged::Unusable(why))) = known.iter().find(|(_, staged)| matches!(staged, Staged::Unusable(_)))
            && !usable
        {
            let fix = "replace the file by that of the engine's model".to_owned();
            return Some(NameFault { leg: NameLeg::TokenizerFiles, found: why.clone(), fix });
        }
        let absent: Vec<&str> = known.iter().filter(|(_, s)| *s == Staged::Absent).map(|(name, _)| *name).collect();
        // A further name that nobody asks for needs no tokenizer.
        let first = absent.first().filter(|_| !usable || self.missed > 0)?;
        Some(self.without_directory(first, &absent, there))
    }

    fn without_directory(&self, first: &str, absent: &[&str], there: &[String]) -> NameFault {
        let directory = slug(first).unwrap_or_else(|| "?".to_owned());
        let path = self.directory.display();
        let has = match there {
            [] => "none".to_owned(),
            there => there.iter().take(NAMED_MAX).cloned().collect::<Vec<_>>().join(", "),
        };
        let missed = match self.missed {
            0 => String::new(),
            n => format!("; {n} requests named a model without a tokenizer"),
        };
        let other = there.first().map_or_else(String::new, |there| {
            let name = there.replace("__", "/");
            format!(
                "; if {there} is the same model, link it (ln -s {there} {path}/{directory}) or start the engine with \
                 --served-model-name {name}"
            )
        });
        NameFault {
            leg: NameLeg::Model,
            found: format!("the engine serves {}, {path} has {has}{missed}", quoted(absent.iter().copied())),
            fix: format!("put the model's tokenizer.json and its chat template into {path}/{directory}{other}"),
        }
    }
}

fn quoted<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.take(NAMED_MAX).map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(rule: &str, served: &[&str], there: &[&str], missed: u64) -> Option<NameFault> {
        let models = served.iter().map(|name| (*name).to_owned()).collect();
        let engine = EndpointFacts { models, ..EndpointFacts::default() };
        let there: Vec<String> = there.iter().map(|name| (*name).to_owned()).collect();
        let staged = |slug: &str| match slug {
            "broken" => Staged::Unusable("t/broken/tokenizer.json: not UTF-8".to_owned()),
            slug if there.iter().any(|name| name == slug) => Staged::There,
            _ => Staged::Absent,
        };
        Names { rule, engine: &engine, missed, directory: Path::new("t") }.judge(staged, &there)
    }

    #[test]
    fn names_that_meet_are_no_fault() {
        assert_eq!(judge("", &["a/b"], &["a__b"], 9), None);
        assert_eq!(judge("a/b", &["a/b", "other"], &["a__b"], 9), None);
        assert_eq!(judge("", &["a/b", "alias"], &["a__b"], 0), None, "nobody asks for the alias");
        assert_eq!(judge("", &[], &[], 9), None, "the engine says nothing");
    }

    #[test]
    fn an_engine_of_another_name_is_named_with_both_names_and_the_fix() {
        for (rule, served, there, missed, found, fix) in [
            ("", &["x/y"][..], &["a__b"][..], 3, "serves \"x/y\", t has a__b; 3 requests", "ln -s a__b t/x__y"),
            ("", &["x/y"], &[], 0, "t has none", "into t/x__y"),
            ("a/b", &["x/y"], &["a__b"], 0, "for model \"a/b\", the engine serves \"x/y\"", "--served-model-name a/b"),
            ("", &["a/b", "alias"], &["a__b"], 1, "serves \"alias\"", "t/alias"),
        ] {
            let fault = judge(rule, served, there, missed).expect("a fault");
            assert_eq!(fault.leg, NameLeg::Model);
            assert!(fault.found.contains(found) && fault.fix.contains(fix), "{fault:?}");
        }
    }

    #[test]
    fn files_that_cannot_be_used_are_another_fault() {
        let fault = judge("", &["broken"], &["broken"], 0).expect("a fault");
        assert_eq!((fault.leg, fault.found.contains("not UTF-8")), (NameLeg::TokenizerFiles, true));
    }
}
