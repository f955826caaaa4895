//! Parity by use: after an endpoint has answered, does it hold the blocks that its prompt was predicted to have?
//!
//! What calibration cannot see shows here: a wrong template, tokenizer or special token makes keys that are right for
//! the wrong tokens. A prediction is judged a moment after the answer, by the blocks announced until then. One that is
//! fulfilled clears everything; [`MISSES_MAX`] in a row that are not raise one alarm for the endpoint, which names the
//! leg by where they first differ. An engine that holds a prompt since before we listened announces nothing of it:
//! without as many *new* first blocks as misses, none of them counts. A prompt whose first block is stored as it would be
//! with the other begin-of-text is evidence for that ([`shards::bos`]).
//!
//! No I/O; the clock comes in.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use shards::bos::BosEvidence;
use shards::ids::BlockKey;
use shards::predictions::{Prediction, PromptKind};

use super::status::add;

/// How long after the answer a block may be announced.
const GRACE: Duration = Duration::from_secs(1);
/// Predictions waiting for their time. Beyond it new ones are dropped.
const WAITING_MAX: usize = 64;
/// Predictions in a row not fulfilled that raise the alarm.
const MISSES_MAX: u32 = 8;
/// Blocks remembered that were evicted last: one of them was there.
const EVICTED_MAX: usize = 1024;

/// A leg that only use can prove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UseLeg {
    /// Prompts differ from their first block on.
    Template,
    /// Conversations with tools or a system message differ further on.
    TemplateInput,
    /// Other prompts differ further on.
    Tokenizer,
}

impl UseLeg {
    const ALL: [UseLeg; 3] = [UseLeg::Template, UseLeg::TemplateInput, UseLeg::Tokenizer];

    fn of(prediction: &Prediction, held: usize) -> Self {
        match (prediction.first as usize + held, prediction.kind) {
            (0, _) => UseLeg::Template,
            (_, PromptKind::ChatWithParts) => UseLeg::TemplateInput,
            (_, PromptKind::Chat | PromptKind::Completion) => UseLeg::Tokenizer,
        }
    }

    /// The label value.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            UseLeg::Template => "template",
            UseLeg::TemplateInput => "template_input",
            UseLeg::Tokenizer => "tokenizer",
        }
    }

    /// What to look at.
    #[must_use]
    pub fn detail(self) -> &'static str {
        match self {
            UseLeg::Template => {
                "the engine's blocks differ from the prompts' first block on: compare the begin-of-text token, the \
                 head of the chat template (kvChatTemplate, the engine's --chat-template) and the tokenizer's files"
            }
            UseLeg::TemplateInput => {
                "the engine's blocks differ after the beginning of conversations with tools or a system message: \
                 compare how the chat template is given them (tool and system parts, content format, added arguments)"
            }
            UseLeg::Tokenizer => {
                "the engine's blocks differ after the beginning of prompts: compare the tokenizer's files with those of \
                 the engine's model"
            }
        }
    }
}

/// What the control thread sees of it; written by the ingest thread alone.
#[derive(Debug, Default)]
pub(crate) struct UseStats {
    fulfilled: AtomicU64,
    missed: AtomicU64,
    /// 0 = no alarm, else the leg's place + 1.
    alarm: AtomicU32,
    /// The leg of the last miss in the same way; 0 = the last prediction was fulfilled, or there was none.
    last_missed: AtomicU32,
}

/// How far an endpoint's blocks are what its prompts were predicted to have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UseStatus {
    /// Predictions fulfilled.
    pub fulfilled: u64,
    /// Predictions not fulfilled.
    pub missed: u64,
    /// The leg that a run of misses points to.
    pub alarm: Option<UseLeg>,
    /// The leg that the last miss points to, unless a prediction was fulfilled after it.
    pub last_missed: Option<UseLeg>,
}

impl UseStats {
    pub(crate) fn status(&self) -> UseStatus {
        let leg = |place: &AtomicU32| {
            (place.load(Ordering::Relaxed) as usize).checked_sub(1).and_then(|leg| UseLeg::ALL.get(leg).copied())
        };
        UseStatus {
            fulfilled: self.fulfilled.load(Ordering::Relaxed),
            missed: self.missed.load(Ordering::Relaxed),
            alarm: leg(&self.alarm),
            last_missed: leg(&self.last_missed),
        }
    }
}

/// The predictions of one endpoint.
#[derive(Debug, Default)]
pub(crate) struct ByUse {
    waiting: VecDeque<(Instant, Prediction)>,
    evicted: VecDeque<BlockKey>,
    /// Since the last one that was fulfilled: misses by leg, and new first blocks.
    misses: [u32; UseLeg::ALL.len()],
    firsts: u32,
}

impl ByUse {
    /// What was predicted is no longer comparable: blocks were cleared, or are keyed in another way.
    pub(crate) fn forget(&mut self) {
        self.waiting.clear();
        self.evicted.clear();
    }

    /// What the endpoint announces is not all that it stores: nothing is judged, and what was judged meant nothing.
    pub(crate) fn suspend(&mut self, stats: &UseStats) {
        self.forget();
        (self.misses, self.firsts) = Default::default();
        stats.alarm.store(0, Ordering::Relaxed);
        stats.last_missed.store(0, Ordering::Relaxed);
    }

    /// The endpoint announced the first block of some prompt.
    pub(crate) fn first_block(&mut self) {
        self.firsts = self.firsts.saturating_add(1);
    }

    /// The endpoint gave a block up.
    pub(crate) fn evicted(&mut self, key: BlockKey) {
        if self.evicted.len() == EVICTED_MAX {
            self.evicted.pop_front();
        }
        self.evicted.push_back(key);
    }

    /// An endpoint has answered, and must hold these blocks soon.
    pub(crate) fn predicted(&mut self, prediction: Prediction, now: Instant) {
        if self.waiting.len() < WAITING_MAX {
            self.waiting.push_back((now + GRACE, prediction));
        }
    }

    /// Judges the predictions whose time has come; a change of the alarm.
    pub(crate) fn judge(
        &mut self,
        now: Instant,
        stats: &UseStats,
        bos: &BosEvidence,
        holds: impl Fn(BlockKey) -> bool,
    ) -> Option<Option<UseLeg>> {
        let before = stats.alarm.load(Ordering::Relaxed);
        while let Some((_, prediction)) = self.waiting.pop_front_if(|(due, _)| *due <= now) {
            let there = |key: &&BlockKey| holds(**key) || self.evicted.contains(key);
            let held = prediction.keys().iter().take_while(there).count();
            if let Some(other) = prediction.other_bos.filter(|_| prediction.first == 0) {
                match held {
                    // It stores what the prompt would be with the other beginning.
                    0 if there(&&other.first) => bos.confirm(&other),
                    0 => {}
                    _ => bos.refute(&other),
                }
            }
            if held == prediction.keys().len() {
                add(&stats.fulfilled, 1);
                (self.misses, self.firsts) = Default::default();
                stats.alarm.store(0, Ordering::Relaxed);
                stats.last_missed.store(0, Ordering::Relaxed);
                continue;
            }
            add(&stats.missed, 1);
            let leg = UseLeg::of(&prediction, held);
            stats.last_missed.store(leg as u32 + 1, Ordering::Relaxed);
            self.misses[leg as usize] += 1;
            let run: u32 = self.misses.iter().sum();
            if run >= MISSES_MAX && self.firsts >= MISSES_MAX && stats.alarm.load(Ordering::Relaxed) == 0 {
                let most = (0..UseLeg::ALL.len()).rev().max_by_key(|leg| self.misses[*leg]).unwrap_or(0);
                stats.alarm.store(most as u32 + 1, Ordering::Relaxed);
            }
        }
        (stats.alarm.load(Ordering::Relaxed) != before).then(|| stats.status().alarm)
    }
}

#[cfg(test)]
mod tests {
    use shards::bos::{BosSettings, OtherBos};

    use super::*;

    struct Bench {
        by_use: ByUse,
        stats: UseStats,
        bos: BosEvidence,
        now: Instant,
    }

    impl Bench {
        fn new() -> Self {
            Bench {
                by_use: ByUse::default(),
                stats: UseStats::default(),
                bos: BosEvidence::default(),
                now: Instant::now(),
            }
        }

        /// One prompt of eight blocks of which the endpoint had the first `had`, and has `holds` when judged.
        fn prompt(&mut self, had: u32, kind: PromptKind, holds: std::ops::Range<u64>) -> Option<Option<UseLeg>> {
            let keys: Vec<_> = (0..8).map(BlockKey).collect();
            self.by_use.predicted(Prediction::new(&keys, had, kind).expect("some are not held"), self.now);
            self.by_use.first_block();
            assert_eq!(self.by_use.judge(self.now, &self.stats, &self.bos, |_| false), None, "its time has not come");
            self.now += GRACE;
            self.by_use.judge(self.now, &self.stats, &self.bos, |key| holds.contains(&key.0))
        }
    }

    #[test]
    fn a_run_of_misses_raises_one_alarm_that_names_where_prompts_differ_and_parity_clears_it() {
        for (had, kind, holds, leg) in [
            (0, PromptKind::Chat, 20..30, UseLeg::Template),
            (0, PromptKind::Completion, 0..3, UseLeg::Tokenizer),
            (2, PromptKind::ChatWithParts, 0..2, UseLeg::TemplateInput),
        ] {
            let mut bench = Bench::new();
            assert_eq!(bench.prompt(0, kind, 0..8), None);
            for _ in 1..MISSES_MAX {
                assert_eq!(bench.prompt(had, kind, holds.clone()), None);
            }
            assert_eq!(bench.prompt(had, kind, holds.clone()), Some(Some(leg)));
            assert_eq!(bench.prompt(had, kind, holds.clone()), None, "one alarm");
            let status = bench.stats.status();
            assert_eq!((status.fulfilled, status.missed, status.alarm), (1, u64::from(MISSES_MAX) + 1, Some(leg)));
            assert_eq!(bench.prompt(had, kind, 0..8), Some(None), "it clears by itself");
        }
    }

    #[test]
    fn a_miss_now_and_then_raises_nothing() {
        let mut bench = Bench::new();
        for number in 0..200 {
            let holds = if number % MISSES_MAX == 0 { 0..8 } else { 0..0 };
            assert_eq!(bench.prompt(0, PromptKind::Chat, holds), None);
        }
    }

    #[test]
    fn the_other_beginning_is_noticed_by_the_block_that_it_leads_to() {
        let mut bench = Bench::new();
        let settings = BosSettings::default();
        let model = settings.place("m").expect("there is room");
        let other = OtherBos { model, adds: true, first: BlockKey(77) };
        let mut prompt = |first: u32, holds: u64| {
            let keys: Vec<_> = (0..8).map(BlockKey).collect();
            let mut prediction = Prediction::new(&keys, first, PromptKind::Completion).expect("some are not held");
            prediction.other_bos = Some(other);
            bench.by_use.predicted(prediction, bench.now);
            bench.now += GRACE;
            bench.by_use.judge(bench.now, &bench.stats, &bench.bos, |key| key.0 == holds);
            settings.learn(&bench.bos).count()
        };
        let learned: Vec<usize> = [77, 77, 5, 77].map(|holds| prompt(0, holds)).into();
        assert_eq!(learned, [0, 0, 0, 1], "what holds neither shows nothing");
        assert_eq!([0, 0, 77, 77, 0, 77].map(|holds| prompt(0, holds)), [0; 6], "as expected in between");
        assert_eq!([77, 77, 77].map(|holds| prompt(2, holds)), [0; 3], "the first block was held before");
    }

    #[test]
    fn what_was_evicted_was_there() {
        let mut bench = Bench::new();
        for number in 0..5_000 {
            bench.by_use.evicted(BlockKey(100 + number));
        }
        (3..8).for_each(|key| bench.by_use.evicted(BlockKey(key)));
        for _ in 0..2 * MISSES_MAX {
            assert_eq!(bench.prompt(0, PromptKind::Chat, 0..3), None);
        }
        assert_eq!(bench.stats.status().missed, 0);
    }

    #[test]
    fn an_engine_that_announces_nothing_new_held_the_prompts_before() {
        let mut bench = Bench::new();
        for _ in 0..10 * MISSES_MAX {
            bench.by_use.firsts = 0;
            assert_eq!(bench.prompt(0, PromptKind::Chat, 0..0), None);
        }
    }

    #[test]
    fn what_waits_is_bounded_and_forgotten_when_blocks_are_cleared() {
        let mut bench = Bench::new();
        let keys = [BlockKey(1)];
        let prediction = Prediction::new(&keys, 0, PromptKind::Chat).expect("a key");
        (0..10 * WAITING_MAX).for_each(|_| bench.by_use.predicted(prediction, bench.now));
        assert_eq!(bench.by_use.waiting.len(), WAITING_MAX);
        bench.by_use.forget();
        bench.by_use.judge(bench.now + GRACE, &bench.stats, &bench.bos, |_| false);
        assert_eq!(bench.stats.status(), UseStatus::default());
    }
}
