//! What became of predictions: the tokens that an engine says it took from its cache, beside those that were predicted.
//!
//! Only fewer than predicted speak against an endpoint: more come of caches that announce nothing, and of blocks that were
//! stored meanwhile. An answer is *wrong* when more than one block less was cached than was predicted: engines compute
//! the last token of a prompt always, and with speculation the last block. Each wrong answer fills a bucket by
//! [`WRONG`], each other one empties it by one: an endpoint whose bucket reaches [`DEMOTED_AT`] is *demoted*, and no longer
//! when it is back at [`RESTORED_AT`]. What a demoted endpoint holds counts as much as it was right lately: a mean of
//! cached ÷ predicted in which each answer has the weight of an eighth.
//!
//! **Invariant.** The state is one word, changed whole. An endpoint that is always right is only read.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering};

/// A wrong answer fills the bucket by so many.
const WRONG: u32 = 2;
/// The bucket holds so many at most.
const BUCKET_MAX: u32 = 32;
/// An endpoint is demoted when its bucket reaches so many: eight wrong answers in a row do it.
pub const DEMOTED_AT: u32 = 16;
/// It is no longer when its bucket is back at so many.
const RESTORED_AT: u32 = 4;
/// A mean of 1, in the word.
const ONE: u32 = 1 << 12;
/// The weight of one answer in the mean, as a divisor.
const MEAN_WEIGHT: u32 = 8;

/// How far an endpoint's predictions are believed.
#[derive(Debug)]
pub struct Trust(AtomicU32);

/// [`Trust`]'s word, apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State {
    bucket: u32,
    demoted: bool,
    /// Mean of cached ÷ predicted, of [`ONE`].
    mean: u32,
}

impl State {
    fn of(word: u32) -> Self {
        State { bucket: word & 0xff, demoted: word & 0x100 != 0, mean: word >> 16 }
    }

    fn word(self) -> u32 {
        self.mean << 16 | u32::from(self.demoted) << 8 | self.bucket
    }

    fn after(self, compared: Compared) -> Self {
        let bucket =
            if compared.is_wrong() { (self.bucket + WRONG).min(BUCKET_MAX) } else { self.bucket.saturating_sub(1) };
        let demoted = if self.demoted { bucket > RESTORED_AT } else { bucket >= DEMOTED_AT };
        // Rounded towards the new value, so that it can be reached.
        let share = compared.share();
        let step = share.abs_diff(self.mean).div_ceil(MEAN_WEIGHT);
        let mean = if share > self.mean { self.mean + step } else { self.mean - step };
        State { bucket, demoted, mean }
    }
}

/// One prompt: what was predicted, and what the engine says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compared {
    /// Tokens predicted to come from the cache.
    pub predicted: u64,
    /// Tokens that came from the cache.
    pub cached: u64,
    /// Tokens per block of the endpoint.
    pub block_tokens: u64,
}

impl Compared {
    /// Whether it speaks against the endpoint.
    #[must_use]
    pub fn is_wrong(self) -> bool {
        let missing = self.missing();
        if self.cached == 0 { missing > 0 } else { missing > self.block_tokens }
    }

    /// Tokens that were predicted and not cached.
    #[must_use]
    pub fn missing(self) -> u64 {
        self.predicted.saturating_sub(self.cached)
    }

    /// Cached ÷ predicted, at most 1, of [`ONE`].
    fn share(self) -> u32 {
        if !self.is_wrong() {
            return ONE;
        }
        // Wrong means that something was predicted, and less than that was cached.
        (u128::from(self.cached) * u128::from(ONE) / u128::from(self.predicted.max(1))) as u32
    }
}

/// What an answer changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The endpoint is demoted from now on.
    Demoted,
    /// It no longer is.
    Restored,
}

impl Default for Trust {
    fn default() -> Self {
        Trust(AtomicU32::new(State { bucket: 0, demoted: false, mean: ONE }.word()))
    }
}

impl Trust {
    /// Takes an answer into account. Something must have been predicted: what was not says nothing.
    pub fn note(&self, compared: Compared) -> Option<Change> {
        if compared.predicted == 0 {
            return None;
        }
        let step = |word: u32| {
            let next = State::of(word).after(compared).word();
            (next != word).then_some(next)
        };
        let before = State::of(self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, step).ok()?);
        match (before.demoted, before.after(compared).demoted) {
            (false, true) => Some(Change::Demoted),
            (true, false) => Some(Change::Restored),
            _ => None,
        }
    }

    /// Whether the endpoint is demoted.
    #[must_use]
    pub fn is_demoted(&self) -> bool {
        State::of(self.0.load(Ordering::Relaxed)).demoted
    }

    /// How much of what the endpoint holds counts, in percent: all of it, unless it is demoted.
    #[must_use]
    pub fn percent(&self) -> u32 {
        let State { demoted, mean, .. } = State::of(self.0.load(Ordering::Relaxed));
        if demoted { mean * 100 / ONE } else { 100 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(predicted: u64, cached: u64) -> Compared {
        Compared { predicted, cached, block_tokens: 16 }
    }

    #[test]
    fn only_fewer_tokens_than_predicted_speak_against_an_endpoint_and_one_block_is_no_difference() {
        for (predicted, cached, wrong) in [
            (160, 160, false),
            (160, 1_600, false),
            (160, 144, false),
            (160, 128, true),
            (16, 0, true),
            (0, 0, false),
            (0, 160, false),
        ] {
            assert_eq!(of(predicted, cached).is_wrong(), wrong, "{predicted} {cached}");
        }
    }

    #[test]
    fn an_endpoint_that_keeps_being_wrong_is_demoted_and_comes_back_when_it_is_right_again() {
        let trust = Trust::default();
        let changes: Vec<_> = (0..8).map(|_| trust.note(of(160, 0))).collect();
        assert_eq!(changes.iter().position(|change| *change == Some(Change::Demoted)), Some(7));
        assert!(trust.is_demoted() && trust.percent() < 40, "{}", trust.percent());
        let restored = (1..).find(|_| trust.note(of(160, 160)) == Some(Change::Restored));
        assert_eq!((restored, trust.is_demoted(), trust.percent()), (Some(12), false, 100));
    }

    #[test]
    fn what_a_demoted_endpoint_holds_counts_as_much_as_it_was_right() {
        let trust = Trust::default();
        (0..100).for_each(|_| _ = trust.note(of(160, 80)));
        assert_eq!((trust.is_demoted(), trust.percent()), (true, 50));
        (0..100).for_each(|_| _ = trust.note(of(160, 0)));
        assert_eq!(trust.percent(), 0);
    }

    #[test]
    fn a_few_wrong_answers_among_right_ones_change_nothing() {
        let trust = Trust::default();
        for answer in 0..1_000 {
            assert_eq!(trust.note(of(160, if answer % 4 == 0 { 0 } else { 160 })), None);
        }
        assert_eq!(trust.percent(), 100);
        assert_eq!(trust.note(of(0, 0)), None);
    }
}
