//! What shards say they expect of engines, and whether repeated prompts ever hit: the evidence that the whole way from
//! a request to its block keys is right, which nothing but use can show.
//!
//! A [`Prediction`] goes to the ingest thread once an endpoint has answered; by then the engine holds the prompt's
//! blocks, and has announced them under the keys that it made itself. The queue is short and lossy: a sample is enough.

#![forbid(unsafe_code)]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam::queue::ArrayQueue;

use crate::bos::OtherBos;
use crate::ids::BlockKey;

/// Keys of one prediction: the first ones that the endpoint did not hold.
pub const PREDICTED_MAX: usize = 16;
/// Predictions of one endpoint that wait for the ingest thread. Beyond it new ones are dropped.
const WAITING_MAX: usize = 16;
/// First blocks remembered of one service. Beyond it newer ones take their places.
const SENT_MAX: usize = 1024;

/// What a prompt was, as far as it matters for where a difference may come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptKind {
    /// Text or token ids.
    Completion,
    /// A conversation.
    Chat,
    /// A conversation with tools or a system message.
    ChatWithParts,
}

/// Blocks that an endpoint must hold after it has answered.
#[derive(Clone, Copy, Debug)]
pub struct Prediction {
    /// Which block of the prompt the first key is of; those before it were held when the request was routed.
    pub first: u32,
    keys: [BlockKey; PREDICTED_MAX],
    len: usize,
    /// The prompt.
    pub kind: PromptKind,
    /// The first block, had the prompt begun with the begin-of-text token, or without it, unlike the keys say.
    pub other_bos: Option<OtherBos>,
}

impl Prediction {
    /// Predicts the blocks of a prompt from number `held` on; none where no such key is known.
    #[must_use]
    pub fn new(prompt: &[BlockKey], held: u32, kind: PromptKind) -> Option<Self> {
        let rest = prompt.get(held as usize..)?;
        let len = rest.len().min(PREDICTED_MAX);
        let mut keys = [BlockKey(0); PREDICTED_MAX];
        keys[..len].copy_from_slice(&rest[..len]);
        (len > 0).then_some(Prediction { first: held, keys, len, kind, other_bos: None })
    }

    /// The keys, in order.
    #[must_use]
    pub fn keys(&self) -> &[BlockKey] {
        &self.keys[..self.len]
    }
}

/// Predictions for one endpoint, from all shards to the one ingest thread.
#[derive(Debug, Default)]
pub struct Predictions(OnceLock<ArrayQueue<Prediction>>);

impl Predictions {
    /// Whether a prediction would be taken: somebody listens, and there is room.
    #[must_use]
    pub fn wanted(&self) -> bool {
        self.0.get().is_some_and(|queue| !queue.is_full())
    }

    /// Offers a prediction; dropped where it is not [`wanted`](Predictions::wanted).
    pub fn offer(&self, prediction: Prediction) {
        if let Some(queue) = self.0.get() {
            // Full means that enough of them are waiting.
            let _ = queue.push(prediction);
        }
    }

    /// The next prediction, for the ingest thread; asking for the first time begins to listen.
    pub fn take(&self) -> Option<Prediction> {
        self.0.get_or_init(|| ArrayQueue::new(WAITING_MAX)).pop()
    }
}

/// Watches for prompts that come again and never hit. A prompt that comes once proves nothing and is not counted.
#[derive(Debug, Default)]
pub struct ZeroHits {
    /// First blocks of prompts that were sent to the pool, each at the place that its key gives it.
    sent: OnceLock<Box<[AtomicU64]>>,
    /// Repeated prompts in a row that hit nothing.
    run: AtomicU64,
    /// Times the run was as long as is bearable.
    pub fired: AtomicU64,
}

impl ZeroHits {
    /// Notes a prompt by its first block, and whether anybody held it; true when this makes `every` repeated prompts in
    /// a row without a hit. Where `counts` says no (nobody could have hit) it is only remembered. Counts of several shards may be lost to each other: the run is then a little longer.
    pub fn note(&self, first: BlockKey, hit: bool, every: u32, counts: impl FnOnce() -> bool) -> bool {
        let sent = self.sent.get_or_init(|| (0..SENT_MAX).map(|_| AtomicU64::new(0)).collect());
        let place = &sent[first.0 as usize % SENT_MAX];
        if hit {
            self.run.store(0, Ordering::Relaxed);
        } else if first.0 != 0 && place.load(Ordering::Relaxed) == first.0 && counts() {
            let run = self.run.load(Ordering::Relaxed) + 1;
            let fires = run >= u64::from(every.max(1));
            self.run.store(if fires { 0 } else { run }, Ordering::Relaxed);
            if fires {
                self.fired.fetch_add(1, Ordering::Relaxed);
                return true;
            }
        }
        place.store(first.0, Ordering::Relaxed);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(numbers: std::ops::Range<u64>) -> Vec<BlockKey> {
        numbers.map(BlockKey).collect()
    }

    #[test]
    fn a_prediction_is_of_what_is_not_held_and_of_no_more_than_its_room() {
        let of = |held| Prediction::new(&keys(0..40), held, PromptKind::Chat).map(|p| (p.first, p.keys().to_vec()));
        assert_eq!(of(0), Some((0, keys(0..16))));
        assert_eq!(of(38), Some((38, keys(38..40))));
        assert_eq!(of(40), None);
        assert_eq!(of(99), None);
    }

    #[test]
    fn predictions_are_dropped_while_nobody_listens_and_when_enough_wait() {
        let predictions = Predictions::default();
        let prediction = |number| Prediction::new(&keys(number..number + 1), 0, PromptKind::Chat).expect("one key");
        predictions.offer(prediction(1));
        assert!(!predictions.wanted() && predictions.take().is_none());
        (0..100).for_each(|number| predictions.offer(prediction(number)));
        assert!(!predictions.wanted());
        let taken: Vec<_> = std::iter::from_fn(|| predictions.take()).map(|p| p.keys()[0].0).collect();
        assert_eq!(taken, (0..WAITING_MAX as u64).collect::<Vec<_>>());
        assert!(predictions.wanted());
    }

    #[test]
    fn prompts_that_come_once_never_fire_and_repeated_ones_do() {
        let watch = ZeroHits::default();
        assert!(!(0..100_000).any(|number| watch.note(BlockKey(number), false, 3, || true)));
        let again = |hit| watch.note(BlockKey(99_999), hit, 3, || true);
        assert_eq!(
            [again(false), again(false), again(true), again(false), again(false), again(false)],
            [false, false, false, false, false, true]
        );
        assert_eq!([again(false), again(false), again(false)], [false, false, true], "and begins anew");
        assert_eq!(watch.fired.load(Ordering::Relaxed), 2);
        assert!((0..9).all(|_| !watch.note(BlockKey(99_999), false, 3, || false)), "nobody could have hit");
    }
}
