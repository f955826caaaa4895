//! What an endpoint's first bytes say of its speed: how long it takes until an answer begins, learned from its answers.
//!
//! **Invariant.** Nothing but atomics, each of which means something by itself: shards read and write them in any
//! order, a lost lesson is one lesson less, and the estimate is always finite and positive.
//!
//! **Model.** `seconds = start + work × per_token + work × decoding × per_token_decoding`, where `work` is the tokens
//! that wait at the endpoint before the request plus its own uncached ones, and `decoding` the answers that the engine
//! streams meanwhile: engines share each step between prompts and answers. A short prompt teaches `start`, a long one
//! `per_token`: each lesson moves every term by its share of the prediction, so none spoils what it has no say in.
//!
//! **Rule.** The terms are factors of a median: a first byte later than predicted makes each term longer by
//! `gain × its share`, an earlier one shorter by as much. How *much* later plays no part, so that a stall of a minute
//! teaches no more than one of a second. The gain falls from ½ to 1/16 over the first lessons; a run of lessons on one
//! side makes it grow again, by which an engine that has become three times as fast is believed within a dozen answers.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::load::Load;

/// The largest change that one lesson makes, as a logarithm.
const GAIN_FIRST: f32 = 0.5;
/// The smallest.
const GAIN_LAST: f32 = 1.0 / 16.0;
/// A run of lessons on one side longer than this is no chance.
const RUN_OF_CHANCE: u32 = 4;
/// What is taken for granted of an endpoint that nobody knows anything of.
const UNKNOWN: Terms = Terms { start: 0.02, per_token: 1e-4, per_token_decoding: 1e-6 };
/// Terms never leave these bounds (seconds), whatever answers say: a term of 0 could not grow again.
const START: (f32, f32) = (1e-4, 60.0);
const PER_TOKEN: (f32, f32) = (1e-8, 1.0);
const PER_TOKEN_DECODING: (f32, f32) = (1e-10, 0.01);

/// One answer that began.
#[derive(Clone, Copy, Debug)]
pub struct FirstByte {
    /// Tokens of its prompt that hit no cache, as far as is known.
    pub uncached_tokens: u64,
    /// What was in flight at the endpoint when it was sent.
    pub ahead: Load,
    /// Time from its dispatch.
    pub elapsed: Duration,
}

/// How fast an endpoint is, as values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    /// Seconds until a prompt without work begins to be answered.
    pub start: f32,
    /// Seconds per uncached token.
    pub per_token: f32,
    /// Seconds by which each answer that is being streamed delays each token.
    pub per_token_decoding: f32,
}

impl Terms {
    /// Seconds until the first byte of an answer before which `work` tokens have to be computed.
    #[must_use]
    pub fn seconds(&self, work: u64, decoding: u32) -> f32 {
        self.parts(work, decoding).iter().sum()
    }

    fn parts(&self, work: u64, decoding: u32) -> [f32; 3] {
        let work = work as f32;
        [self.start, work * self.per_token, work * decoding as f32 * self.per_token_decoding]
    }
}

/// What is learned of one endpoint, on a cache line of its own: what stands beside it is read at every decision.
#[repr(align(128))]
#[derive(Debug)]
pub struct Rates {
    start: AtomicU32,
    per_token: AtomicU32,
    per_token_decoding: AtomicU32,
    /// Lessons so far; saturates in effect, as only its first values matter.
    lessons: AtomicU64,
    /// Lessons on one side since the last on the other; the lowest bit is the side.
    run: AtomicU32,
}

impl Default for Rates {
    fn default() -> Self {
        let bits = |seconds: f32| AtomicU32::new(seconds.to_bits());
        Rates {
            start: bits(UNKNOWN.start),
            per_token: bits(UNKNOWN.per_token),
            per_token_decoding: bits(UNKNOWN.per_token_decoding),
            lessons: AtomicU64::new(0),
            run: AtomicU32::new(0),
        }
    }
}

impl Rates {
    /// What is known; before the first lesson, what is assumed of any endpoint.
    #[must_use]
    pub fn terms(&self) -> Terms {
        let value = |atomic: &AtomicU32| f32::from_bits(atomic.load(Ordering::Relaxed));
        Terms {
            start: value(&self.start),
            per_token: value(&self.per_token),
            per_token_decoding: value(&self.per_token_decoding),
        }
    }

    /// Answers that it was learned from.
    #[must_use]
    pub fn lessons(&self) -> u64 {
        self.lessons.load(Ordering::Relaxed)
    }

    /// Learns from one answer that began.
    pub fn learn(&self, answer: FirstByte) {
        let terms = self.terms();
        let (work, decoding) = (answer.ahead.tokens + answer.uncached_tokens, answer.ahead.decode);
        let parts = terms.parts(work, decoding);
        let predicted: f32 = parts.iter().sum();
        let later = answer.elapsed.as_secs_f32() > predicted;
        let gain = self.gain(later);
        let moved = |value: f32, part: f32, (least, most): (f32, f32)| {
            let step = gain * part / predicted;
            (value * (if later { step } else { -step }).exp()).clamp(least, most).to_bits()
        };
        self.start.store(moved(terms.start, parts[0], START), Ordering::Relaxed);
        self.per_token.store(moved(terms.per_token, parts[1], PER_TOKEN), Ordering::Relaxed);
        let decoding = moved(terms.per_token_decoding, parts[2], PER_TOKEN_DECODING);
        self.per_token_decoding.store(decoding, Ordering::Relaxed);
    }

    /// How much this lesson counts.
    fn gain(&self, later: bool) -> f32 {
        let lessons = self.lessons.fetch_add(1, Ordering::Relaxed);
        let before = self.run.load(Ordering::Relaxed);
        let run = if (before & 1 == 1) == later { (before >> 1).saturating_add(1).min(1 << 20) } else { 1 };
        self.run.store(run << 1 | u32::from(later), Ordering::Relaxed);
        let settled = (GAIN_FIRST / (1.0 + lessons as f32 / 4.0)).max(GAIN_LAST);
        let doublings = (run.saturating_sub(RUN_OF_CHANCE) / 2).min(3);
        (settled * (1 << doublings) as f32).min(GAIN_FIRST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An engine of these terms answers prompts of many lengths, up to a factor of `noise` early or late, in turn.
    fn teach(rates: &Rates, engine: Terms, answers: u32, noise: f32) {
        for n in 0..answers {
            let (uncached_tokens, decoding) = ([200, 3_000, 900, 40_000, 8_000][n as usize % 5], n / 5 % 7);
            let ahead = Load { prefill: 1, decode: decoding, tokens: u64::from(n % 3) * 4_000 };
            let seconds = engine.seconds(uncached_tokens + ahead.tokens, decoding);
            let factor = if n % 2 == 0 { 1.0 + noise } else { 1.0 / (1.0 + noise) };
            rates.learn(FirstByte { uncached_tokens, ahead, elapsed: Duration::from_secs_f32(seconds * factor) });
        }
    }

    fn assert_close(rates: &Rates, engine: Terms, within: f32) {
        for (work, decoding) in [(1_000, 3), (5_000, 0), (20_000, 3), (60_000, 6)] {
            let (learned, truth) = (rates.terms().seconds(work, decoding), engine.seconds(work, decoding));
            assert!(
                (learned / truth).ln().abs() < within,
                "{work} tokens, {decoding} decoding: {learned} for {truth} s"
            );
        }
    }

    #[test]
    fn the_formula_by_hand() {
        let terms = Terms { start: 0.5, per_token: 0.001, per_token_decoding: 0.0001 };
        assert!((terms.seconds(0, 10) - 0.5).abs() < 1e-6);
        assert!((terms.seconds(2_000, 0) - 2.5).abs() < 1e-5);
        assert!((terms.seconds(2_000, 10) - 4.5).abs() < 1e-5);
        assert_eq!(Rates::default().terms(), UNKNOWN);
    }

    #[test]
    fn fast_and_slow_engines_are_told_apart_by_the_time_of_a_few_dozen_answers() {
        for per_token in [2e-5, 1e-4, 1e-3] {
            let engine = Terms { start: 0.03, per_token, per_token_decoding: per_token / 50.0 };
            let rates = Rates::default();
            teach(&rates, engine, 60, 0.0);
            assert_close(&rates, engine, 0.3);
            teach(&rates, engine, 400, 0.2);
            assert_close(&rates, engine, 0.3);
            assert_eq!(rates.lessons(), 460);
        }
    }

    #[test]
    fn an_engine_that_becomes_three_times_as_fast_is_believed_soon_and_a_stall_is_not() {
        let slow = Terms { start: 0.03, per_token: 3e-4, per_token_decoding: 3e-6 };
        let fast = Terms { start: 0.03, per_token: 1e-4, per_token_decoding: 1e-6 };
        let rates = Rates::default();
        teach(&rates, slow, 300, 0.1);
        let stall = FirstByte { uncached_tokens: 5_000, ahead: Load::default(), elapsed: Duration::from_secs(600) };
        rates.learn(stall);
        assert_close(&rates, slow, 0.35);
        teach(&rates, fast, 25, 0.1);
        assert_close(&rates, fast, 0.35);
    }

    #[test]
    fn nothing_that_an_endpoint_does_makes_the_estimate_absurd() {
        let rates = Rates::default();
        for elapsed in [Duration::ZERO, Duration::MAX] {
            for uncached_tokens in [0, 1, u64::MAX / 2] {
                for _ in 0..2_000 {
                    rates.learn(FirstByte { uncached_tokens, ahead: Load::default(), elapsed });
                }
                let seconds = rates.terms().seconds(1_000, 1);
                assert!(seconds.is_finite() && seconds > 0.0, "{seconds}");
            }
        }
    }
}
