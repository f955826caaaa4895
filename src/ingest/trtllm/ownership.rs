//! Are we the only one who drains an engine?
//!
//! Each event goes to one caller alone, so a second one shows as numbers that are missing at the beginning of our
//! answers. Numbers are also missing where an answer got lost on its way to us, which we know, and where the engine's
//! buffer ran over, which only happens between answers that are large.
//!
//! Two gateways would both see it, and must not both give up: whoever had the events to itself for a while stays for
//! [`GRACE`], the other goes; of two that began together, each has a patience of its own, drawn at random: so many
//! losses, and a while after them, so that equal draws do not end in both going at once. Who goes does not come back by
//! itself: each of its tries would rob the other of a batch.
//!
//! No clock and no I/O: times are given as time since the start.

#![forbid(unsafe_code)]

use std::time::Duration;

/// Events in an answer from which on the engine's buffer may have run over.
const OVERFLOW_EVENTS_MIN: usize = 1_024;
/// Time and answers without an unexplained loss that make a drainer the elder.
const ELDER_AFTER: Duration = Duration::from_secs(5);
const ELDER_ANSWERS: u32 = 8;
/// The elder gives up when losses go on for so long.
const GRACE: Duration = Duration::from_secs(10);
/// Quiet time after which a contest is over.
const QUIET: Duration = Duration::from_secs(30);
/// Unexplained losses that the least patient bears.
const PATIENCE_MIN: u32 = 2;
const PATIENCE_STEP: u32 = 3;
const PATIENCE_STEPS: u64 = 8;
/// Longest time borne beyond them.
const LINGER_MS: u64 = 2_000;

/// Who drains, as far as is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// We alone.
    We,
    /// We and another, who should go.
    Contested,
    /// Another: we have to go.
    Other,
}

/// What is known of the contest for one engine.
#[derive(Debug)]
pub(super) struct Ownership {
    patience: u32,
    linger: Duration,
    /// When the losses that are borne were over.
    spent: Option<Duration>,
    /// Ranks (a bit each) that said nothing yet since an answer of ours got lost: what they miss next went with it.
    excused: u64,
    /// When the first answer with events came.
    since: Option<Duration>,
    /// Answers with events and without an unexplained loss.
    whole: u32,
    elder: bool,
    /// First and last unexplained loss of the contest, and how many.
    contest: Option<(Duration, Duration)>,
    losses: u32,
}

impl Ownership {
    /// At the start; `chance` is any number, another one for each drainer.
    pub(super) fn new(chance: u64) -> Self {
        let patience = PATIENCE_MIN + PATIENCE_STEP * (chance % PATIENCE_STEPS) as u32;
        let linger = Duration::from_millis(chance / PATIENCE_STEPS % LINGER_MS);
        Ownership {
            patience,
            linger,
            spent: None,
            excused: 0,
            since: None,
            whole: 0,
            elder: false,
            contest: None,
            losses: 0,
        }
    }

    /// An answer of ours may have got lost.
    pub(super) fn answer_lost(&mut self) {
        self.excused = u64::MAX;
    }

    /// An answer came with so many events, of those ranks (a bit each); of some, numbers are missing before the first.
    pub(super) fn answered(&mut self, now: Duration, events: usize, ranks: u64, missing: u64) -> Owner {
        if events > 0 {
            let gap = missing & !self.excused != 0;
            self.excused &= !ranks;
            let explained = events >= OVERFLOW_EVENTS_MIN;
            let since = *self.since.get_or_insert(now);
            if !gap || explained {
                self.whole += 1;
                self.elder |= self.contest.is_none() && self.whole >= ELDER_ANSWERS && now >= since + ELDER_AFTER;
            } else {
                self.losses += 1;
                let first = self.contest.map_or(now, |(first, _)| first);
                self.contest = Some((first, now));
                if self.losses >= self.patience {
                    self.spent.get_or_insert(now);
                }
            }
        }
        match self.contest {
            Some((_, last)) if now > last + QUIET => {
                self.contest = None;
                self.losses = 0;
                self.spent = None;
                Owner::We
            }
            Some((first, last)) => {
                let over = if self.elder {
                    last >= first + GRACE
                } else {
                    self.spent.is_some_and(|spent| last >= spent + self.linger)
                };
                if over { Owner::Other } else { Owner::Contested }
            }
            None => Owner::We,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn elder() -> Ownership {
        let mut ownership = Ownership::new(0);
        for second in 0..10 {
            assert_eq!(ownership.answered(at(second * 1_000), 3, 1, 0), Owner::We);
        }
        ownership
    }

    #[test]
    fn a_newcomer_names_the_other_at_once_and_goes_when_its_patience_ends() {
        for chance in 0..8 {
            let mut ownership = Ownership::new(chance);
            let patience = 2 + 3 * chance;
            for loss in 1..=patience {
                let expected = if loss < patience { Owner::Contested } else { Owner::Other };
                assert_eq!(ownership.answered(at(loss * 10), 1, 1, 1), expected);
                assert_eq!(ownership.answered(at(loss * 10 + 5), 0, 1, 0), expected);
            }
        }
    }

    #[test]
    fn of_two_with_equal_patience_the_one_that_lingers_less_goes_and_the_other_stays() {
        let mut short = Ownership::new(0);
        let mut long = Ownership::new(8 * 500);
        assert_eq!(short.answered(at(10), 1, 1, 1), Owner::Contested);
        assert_eq!(long.answered(at(11), 1, 1, 1), Owner::Contested);
        assert_eq!(short.answered(at(20), 1, 1, 1), Owner::Other);
        assert_eq!(long.answered(at(21), 1, 1, 1), Owner::Contested);
        assert_eq!(long.answered(at(5_000), 1, 1, 0), Owner::Contested, "the other has gone: nothing is lost any more");
        assert_eq!(long.answered(at(40_000), 1, 1, 0), Owner::We);
    }

    #[test]
    fn the_elder_stays_while_the_other_may_go_and_goes_when_it_does_not() {
        let mut ownership = elder();
        for ms in (10_000..20_000).step_by(500) {
            assert_eq!(ownership.answered(at(ms), 1, 1, 1), Owner::Contested);
        }
        assert_eq!(ownership.answered(at(20_000), 1, 1, 1), Owner::Other);
        let mut ownership = elder();
        assert_eq!(ownership.answered(at(10_000), 1, 1, 1), Owner::Contested);
        assert_eq!(ownership.answered(at(30_000), 1, 1, 0), Owner::Contested);
        assert_eq!(ownership.answered(at(40_001), 1, 1, 0), Owner::We);
    }

    #[test]
    fn our_own_failures_and_a_buffer_that_ran_over_accuse_nobody() {
        let mut ownership = Ownership::new(0);
        for ms in 0..100 {
            ownership.answer_lost();
            assert_eq!(ownership.answered(at(ms), 0, 1, 0), Owner::We);
            assert_eq!(ownership.answered(at(ms), 5, 1, 1), Owner::We);
            assert_eq!(ownership.answered(at(ms), 1_024, 1, 1), Owner::We);
        }
        assert_eq!(ownership.answered(at(100), 5, 1, 1), Owner::Contested);
    }

    #[test]
    fn what_a_lost_answer_took_from_each_rank_accuses_nobody_whenever_it_shows() {
        let mut ownership = Ownership::new(0);
        ownership.answer_lost();
        for rank in 0..8 {
            assert_eq!(ownership.answered(at(rank), 1, 1 << rank, 1 << rank), Owner::We, "rank {rank}");
        }
        assert_eq!(ownership.answered(at(8), 1, 1, 1), Owner::Contested, "each is excused once");
    }
}
