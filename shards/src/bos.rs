//! Whether engines put a begin-of-text token before texts, where use shows otherwise than model files and rule say.
//!
//! A prompt of text has one of two beginnings. Shards say of some prompts how their first block would be keyed with the
//! other one ([`OtherBos`]); the ingest thread notes an endpoint that stores that block and not the expected one
//! ([`BosEvidence`]); the control thread corrects the service's setting for the model ([`BosSettings`]), by which shards
//! key from then on. Nothing here is locked.

#![forbid(unsafe_code)]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use crate::ids::BlockKey;

/// Models of one service whose setting can be corrected. Further ones stay as files and rule say.
pub const MODELS_MAX: usize = 16;
/// Prompts in a row, of one endpoint and model, that must have the other beginning before the setting is corrected.
pub const PROOFS_MIN: u32 = 3;
/// Times that a setting is changed. Endpoints of one service that differ would have it change for ever.
const CHANGES_MAX: u8 = 3;

/// A model's place among those of its service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelPlace(u8);

/// A prompt's first block if it began the other way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherBos {
    /// Whose tokens they are.
    pub model: ModelPlace,
    /// The other way is with the token.
    pub adds: bool,
    /// The block's key then.
    pub first: BlockKey,
}

/// What is corrected of a service's models.
#[derive(Debug, Default)]
pub struct BosSettings([Setting; MODELS_MAX]);

#[derive(Debug, Default)]
struct Setting {
    model: OnceLock<Box<str>>,
    /// 0 = not corrected, 1 = without the token, 2 = with it.
    corrected: AtomicU8,
    /// Written by the control thread alone.
    changes: AtomicU8,
}

impl BosSettings {
    /// A model's place, which it keeps; none where all are taken.
    pub fn place(&self, model: &str) -> Option<ModelPlace> {
        let is_its = |setting: &Setting| &**setting.model.get_or_init(|| model.into()) == model;
        self.0.iter().position(is_its).map(|place| ModelPlace(place as u8))
    }

    /// Whether the token is put before texts of a model; none where nothing is corrected.
    #[must_use]
    pub fn corrected(&self, model: &str) -> Option<bool> {
        let mut named = self.0.iter().map_while(|setting| Some((setting, setting.model.get()?)));
        let (setting, _) = named.find(|(_, name)| &***name == model)?;
        setting.state()
    }

    /// Every model with a corrected setting, and whether the token is put before its texts.
    pub fn all(&self) -> impl Iterator<Item = (&str, bool)> {
        self.0.iter().filter_map(|setting| Some((&**setting.model.get()?, setting.state()?)))
    }

    /// Takes over what an endpoint has shown; the models whose setting this changes. For one thread.
    pub fn learn<'s>(&'s self, evidence: &'s BosEvidence) -> impl Iterator<Item = (&'s str, bool)> {
        let judge = |(setting, shown): (&'s Setting, &'s AtomicU32)| {
            let adds = proved(shown.load(Ordering::Relaxed))?;
            let model = setting.model.get()?;
            shown.store(0, Ordering::Relaxed);
            let changes = setting.changes.load(Ordering::Relaxed);
            if setting.state() == Some(adds) || changes >= CHANGES_MAX {
                return None;
            }
            setting.changes.store(changes + 1, Ordering::Relaxed);
            setting.corrected.store(1 + u8::from(adds), Ordering::Relaxed);
            Some((&**model, adds))
        };
        self.0.iter().zip(&evidence.0).filter_map(judge)
    }
}

impl Setting {
    fn state(&self) -> Option<bool> {
        self.corrected.load(Ordering::Relaxed).checked_sub(1).map(|adds| adds == 1)
    }
}

/// What the prompts of one endpoint have shown, by model. Written by the ingest thread, and reset by the control thread;
/// what is lost between the two costs a few prompts more.
#[derive(Debug, Default)]
pub struct BosEvidence([AtomicU32; MODELS_MAX]);

/// The bit that tells which way a run of proofs points.
const ADDS: u32 = 1 << 31;

/// The way that enough proofs point.
fn proved(shown: u32) -> Option<bool> {
    (shown & !ADDS >= PROOFS_MIN).then_some(shown & ADDS != 0)
}

impl BosEvidence {
    /// A prompt has the other beginning.
    pub fn confirm(&self, other: &OtherBos) {
        let Some(shown) = self.0.get(usize::from(other.model.0)) else { return };
        let way = if other.adds { ADDS } else { 0 };
        let before = shown.load(Ordering::Relaxed);
        let run = if before & ADDS == way { before & !ADDS } else { 0 };
        shown.store(way | (run + 1).min(PROOFS_MIN), Ordering::Relaxed);
    }

    /// A prompt has the beginning that it was expected to have.
    pub fn refute(&self, other: &OtherBos) {
        if let Some(shown) = self.0.get(usize::from(other.model.0)) {
            shown.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn other(settings: &BosSettings, model: &str, adds: bool) -> OtherBos {
        OtherBos { model: settings.place(model).expect("there is room"), adds, first: BlockKey(1) }
    }

    #[test]
    fn a_run_of_proofs_corrects_one_model() {
        let (settings, evidence) = (BosSettings::default(), BosEvidence::default());
        let (a, b) = (other(&settings, "a", true), other(&settings, "b", false));
        let learned = || settings.learn(&evidence).map(|(m, adds)| (m.to_owned(), adds)).collect::<Vec<_>>();
        for _ in 1..PROOFS_MIN {
            evidence.confirm(&a);
        }
        evidence.refute(&a);
        for _ in 1..PROOFS_MIN {
            evidence.confirm(&a);
        }
        evidence.confirm(&b);
        assert_eq!(learned(), []);
        evidence.confirm(&a);
        assert_eq!(learned(), [("a".to_owned(), true)]);
        assert_eq!(learned(), [], "once");
        assert_eq!(
            (settings.corrected("a"), settings.corrected("b"), settings.corrected("c")),
            (Some(true), None, None)
        );
        assert_eq!(settings.all().collect::<Vec<_>>(), [("a", true)]);
    }

    #[test]
    fn endpoints_that_differ_do_not_have_a_setting_change_for_ever() {
        let (settings, evidence) = (BosSettings::default(), BosEvidence::default());
        let mut changes = 0;
        for round in 0..10 {
            let shown = other(&settings, "a", round % 2 == 0);
            (0..PROOFS_MIN).for_each(|_| evidence.confirm(&shown));
            changes += settings.learn(&evidence).count();
        }
        assert_eq!((changes, settings.corrected("a")), (usize::from(CHANGES_MAX), Some(true)));
    }

    #[test]
    fn models_beyond_the_limit_stay_as_they_are() {
        let settings = BosSettings::default();
        let places: Vec<_> = (0..MODELS_MAX + 3).map(|n| settings.place(&n.to_string())).collect();
        assert!(places[..MODELS_MAX].iter().all(Option::is_some) && places[MODELS_MAX..].iter().all(Option::is_none));
        assert_eq!(settings.place("3"), Some(ModelPlace(3)), "a place is kept");
    }
}
