//! How soon answers begin: what the first bytes of a service's answers say of its endpoints' speed.
//!
//! **Invariant.** Nothing but atomics, each of which means something by itself: shards read and write them in any
//! order, a lost lesson is one lesson less, and every estimate is always finite and positive.
//!
//! **Model.** `seconds = factor × (start + per_token × work)`. The *pace* (`start`, `per_token`) is the service's: what
//! most of its endpoints are like. The *factor* is the endpoint's: how many times as long it takes. Engines share each
//! step between prompts and answers, so `work` is the prompt's uncached tokens, and one more for each
//! [`TOKENS_PER_STEP`] of them and answer under way.
//!
//! **Who teaches.** Only requests that found no other prompt waiting at their endpoint: the time of those that waited
//! depends on what turned out to be cached of the prompts before them, and an endpoint whose queue was shorter than it
//! seemed would look fast, be given more, and seem faster still.
//!
//! **Rule.** Medians, by steps: a first byte that comes later than predicted makes what was predicted longer, an earlier
//! one shorter. How *much* later plays no part, so that a stall of a minute teaches no more than one of a second. A
//! short prompt moves `start` and a long one `per_token`, each by its share of the prediction. The steps of the pace
//! fall from ½ to 1/64. Those of a factor are 1/32, and grow when lessons keep coming from one side, by which an engine
//! that has become three times as fast is believed within two dozen. Factors near 1 count as 1: endpoints that are alike
//! should not be told apart by noise. And one that was slow, and teaches nothing since because others are preferred, is
//! forgotten by halves, or it would be passed over for ever.

#![forbid(unsafe_code)]

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::load::Load;

/// Tokens of an engine's step, about: each answer under way takes the place of one.
pub const TOKENS_PER_STEP: f32 = 1024.0;
/// Steps of the pace, as logarithms: the first and the last.
const PACE_STEP: (f32, f32) = (0.5, 1.0 / 64.0);
/// Lessons within which the pace's steps fall by half.
const PACE_LESSONS: f32 = 16.0;
/// Steps of a factor: usually, and at most.
const FACTOR_STEP: (f32, f32) = (1.0 / 32.0, 0.25);
/// A run of lessons on one side longer than this is no chance.
const RUN_OF_CHANCE: u32 = 4;
/// Factors that are taken for noise: less than 0.3 from 1, as logarithms.
const NOISE: RangeInclusive<f32> = 0.740_818_26..=1.349_858_8;
/// Lessons of a service within which half of what is known of a silent endpoint is forgotten, and the most halves.
const FORGOTTEN_BY: u32 = 256;
const HALVES_MOST: u32 = 16;
/// What is assumed before the first lesson.
const UNKNOWN: Pace = Pace { start: 0.02, per_token: 1e-4 };
/// Bounds of what is learned, whatever answers say: what is 0 could not grow again, and a start that grew beyond a
/// fraction of a second would make all prompts look alike.
const START: (f32, f32) = (1e-5, 0.1);
const PER_TOKEN: (f32, f32) = (1e-8, 0.1);
const FACTOR: (f32, f32) = (0.05, 20.0);

/// One answer that began.
#[derive(Clone, Copy, Debug)]
pub struct FirstByte {
    /// Tokens of its prompt that were expected to hit no cache.
    pub uncached_tokens: u64,
    /// What was in flight at the endpoint when it was sent.
    pub ahead: Load,
    /// Time from its dispatch.
    pub elapsed: Duration,
}

/// How fast a service's endpoints are, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// Until the answer to a prompt that is cached begins.
    pub start: f32,
    /// For each token that is not.
    pub per_token: f32,
}

/// What is learned of a service.
#[derive(Debug)]
pub struct Rates {
    start: AtomicU32,
    per_token: AtomicU32,
    lessons: AtomicU32,
}

/// What is learned of one endpoint, on a cache line of its own: what stands beside it is read at every decision.
#[repr(align(128))]
#[derive(Debug)]
pub struct Slowness {
    factor: AtomicU32,
    /// Lessons on one side since the last on the other, times two; the lowest bit is the side.
    run: AtomicU32,
    /// The service's lessons at its last one.
    taught_at: AtomicU32,
}

impl Default for Rates {
    fn default() -> Self {
        let bits = |seconds: f32| AtomicU32::new(seconds.to_bits());
        Rates { start: bits(UNKNOWN.start), per_token: bits(UNKNOWN.per_token), lessons: AtomicU32::new(0) }
    }
}

#[cfg(test)]
impl Rates {
    /// As if this pace had been learned from so many answers.
    pub fn known(pace: Pace, lessons: u32) -> Self {
        let bits = |seconds: f32| AtomicU32::new(seconds.to_bits());
        Rates { start: bits(pace.start), per_token: bits(pace.per_token), lessons: AtomicU32::new(lessons) }
    }
}

impl Rates {
    /// The pace as far as it is known.
    #[must_use]
    pub fn pace(&self) -> Pace {
        let value = |atomic: &AtomicU32| f32::from_bits(atomic.load(Ordering::Relaxed));
        Pace { start: value(&self.start), per_token: value(&self.per_token) }
    }

    /// Seconds until an answer begins at the endpoint of this slowness that computes so many tokens beside so many answers.
    #[must_use]
    pub fn expected_seconds(&self, endpoint: &Slowness, tokens: u64, answers: u32) -> f32 {
        let Pace { start, per_token } = self.pace();
        endpoint.factor(self.lessons()) * (start + per_token * work(tokens, answers))
    }

    /// Answers that it was learned from; stays where it is at 2³¹.
    #[must_use]
    pub fn lessons(&self) -> u32 {
        self.lessons.load(Ordering::Relaxed)
    }

    /// Learns from one answer that began at the endpoint of this slowness.
    pub fn learn(&self, endpoint: &Slowness, answer: &FirstByte) {
        if answer.ahead.prefill > 0 {
            return;
        }
        let Pace { start, per_token } = self.pace();
        let computing = per_token * work(answer.uncached_tokens, answer.ahead.decode);
        let (predicted, elapsed) = (start + computing, answer.elapsed.as_secs_f32());
        let lessons = self.lessons().min(1 << 31);
        self.lessons.store(lessons.saturating_add(1), Ordering::Relaxed);
        let (first, last) = PACE_STEP;
        let step = (first / (1.0 + lessons as f32 / PACE_LESSONS)).max(last);
        let step = if elapsed > predicted { step } else { -step };
        let moved = |value: f32, part: f32, (least, most): (f32, f32)| {
            (value * (step * part / predicted).exp()).clamp(least, most).to_bits()
        };
        self.start.store(moved(start, start, START), Ordering::Relaxed);
        self.per_token.store(moved(per_token, computing, PER_TOKEN), Ordering::Relaxed);
        endpoint.learn(lessons, predicted, elapsed);
    }

    /// Learns from one answer how slow the endpoint is, and nothing of the pace: endpoints that mostly do something else do
    /// not tell what the others are like.
    pub fn compare(&self, endpoint: &Slowness, answer: &FirstByte) {
        if answer.ahead.prefill == 0 {
            let Pace { start, per_token } = self.pace();
            let predicted = start + per_token * work(answer.uncached_tokens, answer.ahead.decode);
            endpoint.learn(self.lessons(), predicted, answer.elapsed.as_secs_f32());
        }
    }
}

impl Default for Slowness {
    fn default() -> Self {
        Slowness { factor: AtomicU32::new(1.0_f32.to_bits()), run: AtomicU32::new(0), taught_at: AtomicU32::new(0) }
    }
}

impl Slowness {
    /// How many times as long as the service's pace says the endpoint takes, after so many lessons of the service; exactly
    /// 1 for what may be noise.
    #[must_use]
    pub fn factor(&self, lessons: u32) -> f32 {
        let factor = self.remembered(lessons);
        if NOISE.contains(&factor) { 1.0 } else { factor }
    }

    fn remembered(&self, lessons: u32) -> f32 {
        let factor = f32::from_bits(self.factor.load(Ordering::Relaxed));
        let halves = lessons.saturating_sub(self.taught_at.load(Ordering::Relaxed)) / FORGOTTEN_BY;
        if halves == 0 { factor } else { factor.powf(0.5_f32.powi(halves.min(HALVES_MOST) as i32)) }
    }

    fn learn(&self, lessons: u32, predicted: f32, elapsed: f32) {
        let factor = self.remembered(lessons);
        self.taught_at.store(lessons, Ordering::Relaxed);
        let later = elapsed > predicted * factor;
        let before = self.run.load(Ordering::Relaxed);
        let run = if (before & 1 == 1) == later { (before >> 1).saturating_add(1).min(1 << 20) } else { 1 };
        self.run.store(run << 1 | u32::from(later), Ordering::Relaxed);
        let doublings = (run.saturating_sub(RUN_OF_CHANCE) / 2).min(3);
        let (usual, most) = FACTOR_STEP;
        let step = (usual * (1 << doublings) as f32).min(most);
        let (least, most) = FACTOR;
        let factor = (factor * (if later { step } else { -step }).exp()).clamp(least, most);
        self.factor.store(factor.to_bits(), Ordering::Relaxed);
    }
}

/// The work of so many uncached tokens beside so many answers under way, in tokens.
#[must_use]
pub fn work(tokens: u64, answers: u32) -> f32 {
    tokens as f32 * (1.0 + answers as f32 / TOKENS_PER_STEP)
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Load = Load { prefill: 0, decode: 0, tokens: 0 };

    fn answer(uncached_tokens: u64, seconds: f32) -> FirstByte {
        FirstByte { uncached_tokens, ahead: IDLE, elapsed: Duration::from_secs_f32(seconds) }
    }

    /// An engine of this pace answers prompts of many lengths, up to a factor of `noise` early or late, in turn.
    fn teach(rates: &Rates, endpoint: &Slowness, engine: Pace, answers: usize, noise: f32) {
        for n in 0..answers {
            let tokens = [200, 3_000, 900, 40_000, 8_000][n % 5];
            let seconds = engine.start + engine.per_token * tokens as f32;
            let factor = if n / 5 % 2 == n % 2 { 1.0 + noise } else { 1.0 / (1.0 + noise) };
            rates.learn(endpoint, &answer(tokens, seconds * factor));
        }
    }

    fn assert_close(learned: f32, truth: f32, within: f32) {
        assert!((learned / truth).ln().abs() < within, "{learned} for {truth}");
    }

    #[test]
    fn answers_under_way_take_their_part_of_each_step() {
        assert_close(work(1_000, 0), 1_000.0, 1e-6);
        assert_close(work(1_000, 512), 1_500.0, 1e-6);
    }

    #[test]
    fn noise_ends_at_three_tenths_as_a_logarithm() {
        let is_noise = |factor: f32| factor.ln().abs() < 0.3;
        for bits in (0.05_f32.to_bits()..20.0_f32.to_bits()).step_by(4_999) {
            let factor = f32::from_bits(bits);
            assert_eq!(NOISE.contains(&factor), is_noise(factor), "{factor}");
        }
        for end in [*NOISE.start(), *NOISE.end()] {
            let beside = [end.next_down(), end, end.next_up()];
            assert_eq!(beside.map(|factor| NOISE.contains(&factor)), beside.map(is_noise));
        }
    }

    #[test]
    fn the_pace_is_learned_within_a_few_dozen_answers() {
        for per_token in [2e-5, 1e-4, 1e-3] {
            let engine = Pace { start: 0.03, per_token };
            let (rates, endpoint) = (Rates::default(), Slowness::default());
            teach(&rates, &endpoint, engine, 60, 0.0);
            assert_close(rates.pace().per_token, per_token, 0.3);
            teach(&rates, &endpoint, engine, 600, 0.2);
            assert_close(rates.pace().per_token, per_token, 0.25);
            assert_eq!((rates.lessons(), endpoint.factor(660)), (660, 1.0));
        }
    }

    #[test]
    fn a_slow_endpoint_among_others_is_told_apart_and_believed_when_it_becomes_fast() {
        let fast = Pace { start: 0.03, per_token: 1e-4 };
        let slow = Pace { start: 0.09, per_token: 3e-4 };
        let rates = Rates::default();
        let endpoints = [(); 4].map(|()| Slowness::default());
        let round = |of_first: Pace, rounds: usize| {
            for _ in 0..rounds {
                endpoints.iter().enumerate().for_each(|(n, endpoint)| {
                    teach(&rates, endpoint, if n == 0 { of_first } else { fast }, 5, 0.2);
                });
            }
        };
        let factor = |of: usize| endpoints[of].factor(rates.lessons());
        round(slow, 60);
        assert_close(factor(0), 3.0, 0.3);
        assert!((1..4).all(|of| factor(of) == 1.0), "{endpoints:?}");
        rates.learn(&endpoints[1], &answer(5_000, 600.0));
        assert_eq!(factor(1), 1.0, "one stall is one lesson");
        round(fast, 5);
        assert_eq!(factor(0), 1.0, "25 answers later");
    }

    #[test]
    fn a_slow_endpoint_that_is_passed_over_is_tried_again_some_time() {
        let (rates, slow, other) = (Rates::default(), Slowness::default(), Slowness::default());
        let engine = |times: f32| Pace { start: 0.03 * times, per_token: 1e-4 * times };
        let both = |rounds: usize| {
            for _ in 0..rounds {
                teach(&rates, &other, engine(1.0), 20, 0.0);
                teach(&rates, &slow, engine(3.0), 5, 0.0);
            }
        };
        both(60);
        let known = slow.factor(rates.lessons());
        assert!(known > 2.0, "{known}");
        teach(&rates, &other, engine(1.0), 300, 0.0);
        let half = slow.factor(rates.lessons());
        assert_close(half, known.sqrt(), 1e-3);
        teach(&rates, &other, engine(1.0), 300, 0.0);
        assert_eq!(slow.factor(rates.lessons()), 1.0);
        both(8);
        assert!(slow.factor(rates.lessons()) > 2.0, "and is slow still");
    }

    #[test]
    fn an_endpoint_that_is_compared_changes_its_factor_and_nobody_else_s() {
        let (rates, endpoint) = (Rates::default(), Slowness::default());
        // 0.02 + 1,000 × 1e-4 = 0.12 s are expected.
        (0..64).for_each(|_| rates.compare(&endpoint, &answer(1_000, 0.6)));
        assert_close(endpoint.factor(0), 5.0, 0.2);
        assert_eq!((rates.pace(), rates.lessons()), (UNKNOWN, 0));
        let waited = FirstByte { ahead: Load { prefill: 1, ..IDLE }, ..answer(1_000, 0.0) };
        let before = endpoint.factor(0);
        rates.compare(&endpoint, &waited);
        assert_eq!(endpoint.factor(0), before);
    }

    #[test]
    fn requests_that_waited_for_others_teach_nothing() {
        let (rates, endpoint) = (Rates::default(), Slowness::default());
        let ahead = Load { prefill: 1, ..IDLE };
        rates.learn(&endpoint, &FirstByte { ahead, ..answer(1_000, 50.0) });
        assert_eq!((rates.pace(), rates.lessons()), (UNKNOWN, 0));
    }

    #[test]
    fn nothing_that_an_endpoint_does_makes_the_estimate_absurd() {
        let (rates, endpoint) = (Rates::default(), Slowness::default());
        for elapsed in [Duration::ZERO, Duration::MAX] {
            for uncached_tokens in [0, 1, u64::MAX] {
                (0..2_000).for_each(|_| {
                    rates.learn(&endpoint, &FirstByte { uncached_tokens, ahead: IDLE, elapsed });
                });
                let Pace { start, per_token } = rates.pace();
                let all = [start, per_token, endpoint.factor(rates.lessons())];
                assert!(all.iter().all(|value| value.is_finite() && *value > 0.0), "{all:?}");
            }
        }
    }
}
