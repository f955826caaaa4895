//! The scheduler's clock: takes commands between steps, waits as long as a step takes, hands out what it made.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::announce::{self, Announcer};
use super::cache::Change;
use super::fault::Fault;
use super::options::EngineKind;
use super::publisher::{Delivery, Publisher};
use super::scheduler::{Output, Request, RequestId, Scheduler, copies_by_key};
use super::shared::{EngineStats, Shared};
use super::{sglang_wire, trtllm_wire, wire};

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
    /// Do something wrong; answers what is odd about the order.
    Fault(Fault, oneshot::Sender<Result<(), String>>),
}

/// What goes wrong with the events to come.
#[derive(Debug, Default)]
struct Trouble {
    /// Batches still to be dropped.
    drop: u64,
    /// Whether replay lacks them too.
    lost: bool,
    /// Whether nothing is published.
    silent: bool,
    /// Whether the next batch has a malformed event.
    bad_event: bool,
    /// Whether the next batch is preceded by one that is not MessagePack.
    bad_payload: bool,
}

/// One rank: the scheduler with what it talks to.
pub struct Driver {
    shared: Arc<Shared>,
    rank: u16,
    scheduler: Scheduler,
    announcer: Announcer,
    /// None for kinds that do not publish.
    publisher: Option<Publisher>,
    inbox: UnboundedReceiver<Command>,
    answers: HashMap<RequestId, UnboundedSender<Output>>,
    batches: u64,
    trouble: Trouble,
}

impl Driver {
    /// A driver over an empty cache.
    pub fn new(
        shared: Arc<Shared>,
        rank: u16,
        publisher: Option<Publisher>,
        inbox: UnboundedReceiver<Command>,
    ) -> Self {
        let options = shared.options();
        let scheduler = Scheduler::new(options.scheduler_model(), options.blocks);
        let announcer = Announcer::new(&options);
        let (answers, trouble) = (HashMap::new(), Trouble::default());
        let mut driver = Self { shared, rank, scheduler, announcer, publisher, inbox, answers, batches: 0, trouble };
        driver.say_created();
        driver
    }

    /// Runs until the future is dropped.
    pub async fn run(mut self) {
        let mut due = Instant::now();
        loop {
            while let Ok(command) = self.inbox.try_recv() {
                self.obey(command);
            }
            let options = self.shared.options();
            let Some(duration) = self.scheduler.begin_step() else {
                // vLLM tells nothing between steps.
                if options.kind != EngineKind::Vllm {
                    let changes = self.scheduler.take_changes();
                    self.announce(changes);
                }
                self.report();
                let Some(command) = self.inbox.recv().await else { return };
                self.obey(command);
                due = Instant::now();
                continue;
            };
            self.report();
            // Steps shorter than a timer's grain end on time on average, because each is counted from the one before.
            due += duration.mul_f64(options.time_scale);
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
            Command::Fault(fault, reply) => drop(reply.send(self.suffer(&fault))),
        }
    }

    /// Does what goes wrong with one rank. The other faults are the engine's.
    fn suffer(&mut self, fault: &Fault) -> Result<(), String> {
        match *fault {
            Fault::Drop { batches, lost, .. } => (self.trouble.drop, self.trouble.lost) = (batches, lost),
            Fault::Restart { .. } => self.restart(),
            Fault::Clear { .. } if !self.scheduler.clear() => {
                return Err("requests run: the cache cannot be cleared".to_owned());
            }
            Fault::Silence { on, .. } => self.trouble.silent = on,
            Fault::Malformed { payload: true, .. } => self.trouble.bad_payload = true,
            Fault::Malformed { payload: false, .. } => self.trouble.bad_event = true,
            Fault::PhantomClear { .. } => self.publish_lie(),
            Fault::Huge { tokens, .. } => {
                let id_max = self.shared.text().id_max().max(1) as usize;
                let ids: Vec<u32> = (0..tokens).map(|place| (place * 7919 % id_max) as u32).collect();
                if !self.scheduler.insert(&ids) {
                    return Err(format!("the cache has no room for {tokens} tokens: start with more --blocks"));
                }
                let changes = self.scheduler.take_changes();
                self.announce(changes);
            }
            _ => {}
        }
        Ok(())
    }

    /// Starts over as a new process does.
    fn restart(&mut self) {
        let options = self.shared.options();
        self.scheduler = Scheduler::new(options.scheduler_model(), options.blocks);
        self.announcer = Announcer::new(&options);
        self.answers.clear();
        if let Some(publisher) = &mut self.publisher {
            publisher.restart();
        }
        if let Some(drain) = &self.shared.drain {
            drain.restart(self.rank);
        }
        self.say_created();
    }

    /// TensorRT-LLM's first events.
    fn say_created(&mut self) {
        let (Some(drain), options) = (&self.shared.drain, self.shared.options()) else { return };
        if options.push {
            return;
        }
        announce::windows(&options)
            .for_each(|window| drain.push(self.rank, &announce::created(&options), window, false));
    }

    /// Says that the cache is empty while it is not.
    fn publish_lie(&mut self) {
        let options = self.shared.options();
        let (time, rank) = (now(), Some(u64::from(self.rank)));
        match options.kind {
            EngineKind::Vllm => {
                self.publish(wire::encode_batch(options.wire, time, &[wire::Event::Cleared], rank));
            }
            EngineKind::Sglang => {
                let event = sglang_wire::Event::Cleared;
                self.publish(sglang_wire::encode_batch(options.sglang_release, time, &[event], rank));
            }
            EngineKind::Trtllm | EngineKind::Llamacpp => {}
        }
    }

    /// Publishes what happened to the cache, then hands out the tokens.
    fn end_step(&mut self) {
        let (outputs, changes) = self.scheduler.end_step();
        self.announce(changes);
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

    /// Tells what happened to the cache, as the engine kind does it.
    fn announce(&mut self, changes: Vec<Change>) {
        if changes.is_empty() {
            return;
        }
        let options = self.shared.options();
        let (time, rank) = (now(), Some(u64::from(self.rank)));
        match options.kind {
            EngineKind::Vllm => {
                let mut events = self.announcer.vllm(changes, &options);
                self.spoil(&mut events, wire::Event::Malformed);
                self.publish(wire::encode_batch(options.wire, time, &events, rank));
            }
            EngineKind::Sglang => {
                let mut events = self.announcer.sglang(changes, &options);
                self.spoil(&mut events, sglang_wire::Event::Malformed);
                self.publish(sglang_wire::encode_batch(options.sglang_release, time, &events, rank));
            }
            EngineKind::Trtllm if options.push => {
                let mut events = self.announcer.pushed(changes, &options);
                if events.is_empty() {
                    return;
                }
                self.spoil(&mut events, sglang_wire::Event::Malformed);
                self.publish(sglang_wire::encode_batch(options.sglang_release, time, &events, rank));
            }
            EngineKind::Trtllm => {
                let mut events = self.announcer.trtllm(changes, &options);
                if let Some(window) = announce::windows(&options).next() {
                    self.spoil(&mut events, (trtllm_wire::Event::Malformed, window));
                }
                self.queue(&events);
            }
            EngineKind::Llamacpp => {}
        }
    }

    /// Puts a malformed event among the others, if that was ordered.
    fn spoil<E>(&mut self, events: &mut Vec<E>, malformed: E) {
        if std::mem::take(&mut self.trouble.bad_event) {
            events.insert(events.len().div_ceil(2), malformed);
        }
    }

    /// Publishes a batch, unless that goes wrong.
    fn publish(&mut self, payload: Vec<u8>) {
        let Some(publisher) = &mut self.publisher else { return };
        if self.trouble.silent {
            return;
        }
        if std::mem::take(&mut self.trouble.bad_payload) {
            publisher.publish(b"\xc1 is no MessagePack".to_vec(), Delivery::Whole);
        }
        let delivery = match (self.trouble.drop, self.trouble.lost) {
            (0, _) => Delivery::Whole,
            (_, false) => Delivery::ReplayOnly,
            (_, true) => Delivery::Lost,
        };
        self.trouble.drop = self.trouble.drop.saturating_sub(1);
        self.batches += 1;
        publisher.publish(payload, delivery);
    }

    /// Queues events for the drain, unless that goes wrong; dropped ones leave a gap in the numbers.
    fn queue(&mut self, events: &[(trtllm_wire::Event, u64)]) {
        let Some(drain) = self.shared.drain.as_ref().filter(|_| !self.trouble.silent) else { return };
        let lost = self.trouble.drop > 0;
        self.trouble.drop = self.trouble.drop.saturating_sub(1);
        self.batches += 1;
        for (event, window) in events {
            drain.push(self.rank, event, *window, lost);
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
        if let Ok(mut shared) = self.shared.ranks[usize::from(self.rank)].scheduled.lock() {
            *shared = stats;
        }
    }
}

/// Unix seconds.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
