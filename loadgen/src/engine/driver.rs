//! The scheduler's clock: takes commands between steps, waits as long as a step takes, hands out what it made.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::cache::Change;
use super::hash::Digest;
use super::options::EngineOptions;
use super::publisher::Publisher;
use super::scheduler::{Output, Request, RequestId, Scheduler, copies_by_key};
use super::shared::{EngineStats, Shared};
use super::wire::{BlockHash, Event, ExtraKey, Stored, encode_batch};

/// How far the clock may be behind before lost time is given up instead of caught up.
const LAG_MAX: Duration = Duration::from_millis(50);

/// An order to the scheduler, carried out between two steps.
pub enum Command {
    /// Queue a request; its tokens go to the sender, at most as many as its answer has.
    Add(Request, UnboundedSender<Output>),
    /// Forget a request.
    Abort(RequestId),
    /// Drop the cache; answers whether that was possible.
    Clear(oneshot::Sender<bool>),
    /// Tell the copies per key.
    Contents(Box<dyn FnOnce(HashMap<u64, usize>) + Send>),
}

/// The scheduler with what it talks to.
pub struct Driver {
    shared: Arc<Shared>,
    scheduler: Scheduler,
    publisher: Publisher,
    inbox: UnboundedReceiver<Command>,
    answers: HashMap<RequestId, UnboundedSender<Output>>,
    batches: u64,
}

impl Driver {
    /// A driver over an empty cache.
    pub fn new(shared: Arc<Shared>, publisher: Publisher, inbox: UnboundedReceiver<Command>) -> Self {
        let scheduler = Scheduler::new(shared.options.scheduler_model(), shared.options.blocks);
        Self { shared, scheduler, publisher, inbox, answers: HashMap::new(), batches: 0 }
    }

    /// Runs until the future is dropped.
    pub async fn run(mut self) {
        let mut due = Instant::now();
        loop {
            while let Ok(command) = self.inbox.try_recv() {
                self.obey(command);
            }
            let Some(duration) = self.scheduler.begin_step() else {
                self.report();
                let Some(command) = self.inbox.recv().await else { return };
                self.obey(command);
                due = Instant::now();
                continue;
            };
            self.report();
            // Steps shorter than a timer's grain end on time on average, because each is counted from the one before.
            due += duration.mul_f64(self.shared.options.time_scale);
            let now = Instant::now();
            if due > now {
                tokio::time::sleep_until(due).await;
            } else {
                if now - due > LAG_MAX {
                    due = now;
                }
                tokio::task::yield_now().await;
            }
            self.end_step();
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Add(request, answer) => {
                self.answers.insert(request.id, answer);
                self.scheduler.add(request);
            }
            Command::Abort(id) => {
                self.answers.remove(&id);
                self.scheduler.abort(id);
            }
            // The one who asked may have left.
            Command::Clear(reply) => drop(reply.send(self.scheduler.clear())),
            Command::Contents(reply) => reply(copies_by_key(self.scheduler.cache())),
        }
    }

    /// Publishes what happened to the cache, then hands out the tokens.
    fn end_step(&mut self) {
        let (outputs, changes) = self.scheduler.end_step();
        if !changes.is_empty() {
            let options = &self.shared.options;
            let events: Vec<Event> = changes.into_iter().map(|change| event(change, options)).collect();
            let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
            let payload = encode_batch(options.wire, time, &events, Some(0));
            self.batches += 1;
            self.publisher.publish(payload);
        }
        for output in outputs {
            if let Some(answer) = self.answers.get(&output.id) {
                // Whoever dropped the receiver has an abort on its way.
                let _ = answer.send(output);
            }
            if output.last {
                self.answers.remove(&output.id);
            }
        }
    }

    /// Makes the scheduler's counts readable.
    fn report(&self) {
        let totals = self.scheduler.totals();
        let stats = EngineStats {
            prompt_tokens: totals.prompt_tokens,
            cached_tokens: totals.cached_tokens,
            answer_tokens: totals.answer_tokens,
            preemptions: totals.preemptions,
            running: self.scheduler.running() as u64,
            waiting: self.scheduler.waiting() as u64,
            used_blocks: self.scheduler.cache().used() as u64,
            batches: self.batches,
            ..EngineStats::default()
        };
        if let Ok(mut shared) = self.shared.scheduled.lock() {
            *shared = stats;
        }
    }
}

/// What an engine with these options says of a change.
pub fn event(change: Change, options: &EngineOptions) -> Event {
    let name = |digest: &Digest| {
        if options.bytes_hashes { BlockHash::Bytes(digest.as_bytes().to_vec()) } else { BlockHash::Key(digest.key()) }
    };
    match change {
        Change::Cleared => Event::Cleared,
        Change::Removed(digest) => Event::Removed(name(&digest)),
        Change::Stored { parent, digests, tokens, salt } => {
            // A run is never empty; only the first block of a sequence can have a salt.
            let mut extra_keys = vec![None; digests.len()];
            extra_keys[0] = salt.map(|salt| vec![ExtraKey::Text(salt)]);
            Event::Stored(Stored {
                hashes: digests.iter().map(name).collect(),
                parent: parent.as_ref().map(name),
                tokens,
                block_tokens: options.block_size as u64,
                extra_keys,
                ..Stored::default()
            })
        }
    }
}
