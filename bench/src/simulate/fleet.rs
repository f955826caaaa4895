//! One trace through one fleet under one policy, in virtual time.
//!
//! **Invariant.** The policy sees what a gateway sees: its own dispatches, first bytes when they come, and the engines'
//! events of their caches when they arrive, 50 to 500 ms late and in order. It is not told speeds, service noise, or what
//! the caches really hold. Equal setups give equal outcomes.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use shards::ids::ShardId;
use shards::load::{LoadTable, Reservation};
use shards::rates::FirstByte;
use shards::service::Service;

use super::cache::{Cache, Change, Taken, matched};
use super::engine::{Engine, Happened, Speed};
use super::policy::{Choice, Policy};
use super::prefixes::{Prefixes, Segment};
use super::trace::{Trace, unit};
use crate::ingest::fleet::Rng;

/// The one shard that decides.
pub const SHARD: ShardId = ShardId(0);
/// Service times differ by so much, each way.
const NOISE: f64 = 0.2;
/// How long a dispatch counts for what it will have stored.
const CLAIM_SECONDS: f64 = 2.0;
/// Seconds after which it is looked again whether a worker can restart.
const RESTART_RETRY: f64 = 1.0;
/// Work of a prompt beyond its tokens.
const WORK_PER_REQUEST: f64 = 32.0;

/// Something done to the fleet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Incident {
    /// The worker is so many times as fast as the others from now on.
    Speed { worker: usize, factor: f64 },
    /// The worker gets no requests from now on.
    Down(usize),
    /// It is back, with an empty cache: as soon as the last of its answers has ended.
    Restarted(usize),
}

/// What a run is made of.
#[derive(Clone, Debug)]
pub struct Setup {
    pub workers: usize,
    /// Blocks of each worker's cache.
    pub cache_blocks: u64,
    /// The trace is replayed so many times as fast as it was recorded.
    pub pace: f64,
    pub speed: Speed,
    /// Seconds by which events come late, at least and at most.
    pub delay: (f64, f64),
    /// What is done to the fleet, by time from the start of the replay.
    pub incidents: Vec<(f64, Incident)>,
    pub seed: u64,
    /// What work costs later requests, in `ttft`, percent.
    pub throughput: u32,
}

/// What the gateway knows of one worker's cache.
#[derive(Clone, Debug)]
pub struct View {
    held: Vec<u32>,
    /// Until when a segment counts as there, because a request with it was sent.
    claimed: Vec<f32>,
    blocks: u64,
    late: VecDeque<(f64, Option<Change>)>,
    last: f64,
}

impl View {
    fn new(segments: usize) -> Self {
        View { held: vec![0; segments], claimed: vec![0.0; segments], blocks: 0, late: VecDeque::new(), last: 0.0 }
    }

    /// Blocks of the path that the worker's events tell of.
    pub fn matched(&self, prefixes: &Prefixes, path: &[Segment]) -> u32 {
        matched(prefixes, path, |segment| self.held[segment.index()])
    }

    /// The same, with what requests sent not long ago will have stored.
    pub fn claimed(&self, prefixes: &Prefixes, path: &[Segment], now: f64) -> u32 {
        matched(prefixes, path, |segment| {
            let claimed = f64::from(self.claimed[segment.index()]) > now;
            if claimed { prefixes.blocks(segment) } else { self.held[segment.index()] }
        })
    }

    /// Claims the path for a while; what is claimed already is so no longer.
    fn claim(&mut self, path: &[Segment], now: f64) {
        for segment in path {
            let until = &mut self.claimed[segment.index()];
            if f64::from(*until) <= now {
                *until = (now + CLAIM_SECONDS) as f32;
            }
        }
    }

    /// Takes note of the events that have come by now.
    fn hear(&mut self, now: f64) {
        while let Some((_, change)) = self.late.pop_front_if(|(at, _)| *at <= now) {
            match change {
                Some(Change { segment, held }) => {
                    let before = std::mem::replace(&mut self.held[segment.index()], held);
                    self.blocks = self.blocks + u64::from(held) - u64::from(before);
                }
                None => {
                    self.held.fill(0);
                    self.blocks = 0;
                }
            }
        }
    }

    fn tell(&mut self, at: f64, changes: impl Iterator<Item = Option<Change>>) {
        self.last = self.last.max(at);
        let at = self.last;
        self.late.extend(changes.map(|change| (at, change)));
    }
}

/// A worker as it really is.
#[derive(Clone, Debug)]
pub struct Worker {
    pub engine: Engine,
    /// Work of the prompts in line, as it was when they came.
    pub work_in_line: f64,
    /// Number of the last change of what happens next.
    version: u32,
}

/// What became of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Served {
    /// Seconds from the trace's start, at the run's pace.
    pub at: f64,
    pub worker: u16,
    /// Seconds to the first token.
    pub first_token: f64,
    /// Seconds per further token of the answer; 0 = it has none.
    pub per_token: f64,
    /// Tokens that hit, and that were predicted to.
    pub hit_tokens: u32,
    pub predicted_tokens: u32,
}

/// What came of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub served: Vec<Served>,
    /// Part of the second half of the time that engines computed prompts.
    pub busy: f64,
    pub spills: u64,
    pub seeds: u64,
}

/// A request under way.
struct Flight {
    reservation: Reservation,
    uncached: u64,
    taken: Taken,
    first_token_at: f64,
    /// Its service noise.
    noise: f64,
    work: f64,
}

/// The run itself.
pub struct Fleet<'a> {
    trace: &'a Trace,
    setup: &'a Setup,
    pub service: Service,
    pub loads: Arc<LoadTable>,
    pub workers: Vec<Worker>,
    /// One each, or one for all where the policy may dream.
    pub caches: Vec<Cache>,
    pub views: Vec<View>,
    flights: Vec<Option<Flight>>,
    agenda: BinaryHeap<Reverse<(u64, usize, u32)>>,
    /// Of the delays of events.
    rng: Rng,
    /// Of service noise: in the order of requests, so that it is the same under every policy.
    noise: Rng,
    outcome: Outcome,
    changed: Vec<Change>,
}

/// Runs the trace.
pub fn run(trace: &Trace, setup: &Setup, policy: &mut Policy<'_>) -> Outcome {
    let mut fleet = Fleet::new(trace, setup, policy);
    let mut incidents: VecDeque<_> = setup.incidents.iter().copied().collect();
    let half = trace.duration() / setup.pace / 2.0;
    let mut busy_before = None;
    for (number, request) in trace.requests.iter().enumerate() {
        let now = request.at / setup.pace;
        while let Some((at, incident)) = incidents.pop_front_if(|(at, _)| *at <= now) {
            fleet.run_until(at);
            if !fleet.carry_out(at, incident) {
                incidents.push_front((at + RESTART_RETRY, incident));
            }
        }
        if now >= half && busy_before.is_none() {
            busy_before = Some(fleet.busy());
        }
        fleet.run_until(now);
        fleet.views.iter_mut().for_each(|view| view.hear(now));
        for (view, endpoint) in fleet.views.iter().zip(&fleet.service.endpoints) {
            endpoint.shared.set_kv_blocks(view.blocks);
        }
        let choice = policy.choose(&fleet, number, now);
        fleet.dispatch(number, now, choice);
    }
    fleet.outcome.busy = (fleet.busy() - busy_before.unwrap_or(0.0)) / (half.max(1e-9) * setup.workers as f64);
    fleet.run_until(f64::INFINITY);
    debug_assert!(fleet.flights.iter().all(Option::is_none), "every request has ended");
    fleet.outcome
}

impl<'a> Fleet<'a> {
    fn new(trace: &'a Trace, setup: &'a Setup, policy: &Policy<'_>) -> Self {
        let segments = trace.prefixes.len();
        let pooled = policy.pools_caches();
        let (caches, blocks) =
            if pooled { (1, setup.cache_blocks * setup.workers as u64) } else { (setup.workers, setup.cache_blocks) };
        let worker = Worker { engine: Engine::new(setup.speed), work_in_line: 0.0, version: 0 };
        Fleet {
            trace,
            setup,
            service: policy.service(setup, trace.block_tokens),
            loads: Arc::new(LoadTable::new(1, setup.workers)),
            workers: vec![worker; setup.workers],
            caches: vec![Cache::new(blocks, segments); caches],
            views: vec![View::new(segments); setup.workers],
            flights: trace.requests.iter().map(|_| None).collect(),
            agenda: BinaryHeap::new(),
            rng: Rng::new(setup.seed),
            noise: Rng::new(setup.seed ^ 0x0157),
            outcome: Outcome { served: vec![Served::default(); trace.requests.len()], busy: 0.0, spills: 0, seeds: 0 },
            changed: Vec::new(),
        }
    }

    fn busy(&self) -> f64 {
        self.workers.iter().map(|worker| worker.engine.busy()).sum()
    }

    pub fn trace(&self) -> &'a Trace {
        self.trace
    }

    /// The blocks of the path that the worker really has.
    pub fn cache_of(&self, worker: usize) -> &Cache {
        &self.caches[worker.min(self.caches.len() - 1)]
    }

    fn dispatch(&mut self, number: usize, now: f64, choice: Choice) {
        let (request, path) = (&self.trace.requests[number], self.trace.path(number));
        let worker = choice.worker;
        let uncached = u64::from(request.tokens).saturating_sub(choice.hit_tokens + choice.claimed_tokens);
        let noise = 1.0 + NOISE * (2.0 * unit(&mut self.noise) - 1.0);
        let hit = self.cache_of(worker).matched(&self.trace.prefixes, path) * self.trace.block_tokens;
        let work = self.work(number, hit.min(request.tokens - 1), noise);
        let reservation = self.loads.reserve(SHARD, self.service.endpoints[worker].shared.slot, uncached);
        let taken = Taken { hit_blocks: 0, own_blocks: 0 };
        self.flights[number] = Some(Flight { reservation, uncached, taken, first_token_at: now, noise, work });
        self.views[worker].claim(path, now);
        self.outcome.served[number] =
            Served { at: now, worker: worker as u16, predicted_tokens: choice.hit_tokens as u32, ..Served::default() };
        self.outcome.spills += u64::from(choice.spilled);
        self.outcome.seeds += u64::from(choice.seeded);
        let at = &mut self.workers[worker];
        at.work_in_line += work;
        at.engine.advance(now);
        at.engine.enqueue(number as u32, request.answer);
        self.go_on(worker, now);
    }

    fn work(&self, number: usize, hit_tokens: u32, noise: f64) -> f64 {
        let tokens = f64::from(self.trace.requests[number].tokens);
        (self.setup.speed.work(f64::from(hit_tokens), tokens) + WORK_PER_REQUEST) * noise
    }

    /// Lets everything happen that happens up to a time.
    fn run_until(&mut self, until: f64) {
        while let Some(&Reverse((bits, worker, version))) = self.agenda.peek() {
            let at = f64::from_bits(bits);
            if at > until {
                return;
            }
            self.agenda.pop();
            if version != self.workers[worker].version {
                continue;
            }
            self.workers[worker].engine.advance(at);
            while let Some(happened) = self.workers[worker].engine.happened() {
                match happened {
                    Happened::FirstToken(request) => self.first_token(worker, request as usize, at),
                    Happened::End(request) => self.end(worker, request as usize, at),
                }
            }
            self.go_on(worker, at);
            if self.caches.len() < self.workers.len() {
                // Room in the one cache of all is room for everyone.
                (0..self.workers.len()).filter(|other| *other != worker).for_each(|other| self.retry(other, at));
            }
        }
    }

    fn retry(&mut self, worker: usize, now: f64) {
        if self.workers[worker].engine.next_in_line().is_some() {
            self.workers[worker].engine.advance(now);
            self.go_on(worker, now);
        }
    }

    fn first_token(&mut self, worker: usize, number: usize, now: f64) {
        let path = self.trace.path(number);
        let cache = worker.min(self.caches.len() - 1);
        self.caches[cache].store(&self.trace.prefixes, path, &mut self.changed);
        self.announce(worker, now);
        let served = &mut self.outcome.served[number];
        served.first_token = now - served.at;
        if let Some(flight) = &mut self.flights[number] {
            flight.first_token_at = now;
            flight.reservation.first_byte();
            let elapsed = Duration::from_secs_f64(served.first_token);
            let answer = FirstByte { uncached_tokens: flight.uncached, ahead: flight.reservation.ahead(), elapsed };
            self.service.shared.rates.learn(&self.service.endpoints[worker].shared.slowness, &answer);
        }
    }

    fn end(&mut self, worker: usize, number: usize, now: f64) {
        let Some(flight) = self.flights[number].take() else { return };
        let cache = worker.min(self.caches.len() - 1);
        self.caches[cache].finish(self.trace.path(number), flight.taken);
        let further = self.trace.requests[number].answer.saturating_sub(1);
        if further > 0 {
            self.outcome.served[number].per_token = (now - flight.first_token_at) / f64::from(further);
        }
    }

    /// Begins with the next prompt if it can be, and notes when something happens next.
    fn go_on(&mut self, worker: usize, now: f64) {
        if let Some(number) = self.workers[worker].engine.next_in_line().map(|number| number as usize) {
            self.admit(worker, number, now);
        }
        let at = &mut self.workers[worker];
        at.version = at.version.wrapping_add(1);
        if let Some(next) = at.engine.next_event() {
            // Times are not negative: their bits are in their order.
            self.agenda.push(Reverse((next.to_bits(), worker, at.version)));
        }
    }

    fn admit(&mut self, worker: usize, number: usize, now: f64) {
        let (request, path) = (&self.trace.requests[number], self.trace.path(number));
        let block = self.trace.block_tokens;
        let more = u64::from((request.tokens % block + request.answer).div_ceil(block));
        let cache = worker.min(self.caches.len() - 1);
        let taken = self.caches[cache].admit(&self.trace.prefixes, path, more, &mut self.changed);
        self.announce(worker, now);
        let (Some(taken), Some(flight)) = (taken, &mut self.flights[number]) else { return };
        let hit_tokens = (taken.hit_blocks * block).min(request.tokens - 1);
        flight.taken = taken;
        self.outcome.served[number].hit_tokens = hit_tokens;
        let (noise, work_in_line) = (flight.noise, flight.work);
        let work = self.work(number, hit_tokens, noise);
        self.workers[worker].work_in_line -= work_in_line;
        self.workers[worker].engine.begin(work);
    }

    /// Sends what changed in a cache on its way to the gateway.
    fn announce(&mut self, worker: usize, now: f64) {
        if !self.changed.is_empty() {
            let (least, most) = self.setup.delay;
            let at = now + least + (most - least) * unit(&mut self.rng);
            self.views[worker].tell(at, self.changed.drain(..).map(Some));
        }
    }

    /// False if it has to wait.
    fn carry_out(&mut self, now: f64, incident: Incident) -> bool {
        match incident {
            Incident::Speed { worker, factor } => {
                self.workers[worker].engine.advance(now);
                self.workers[worker].engine.factor = factor;
                self.go_on(worker, now);
            }
            Incident::Down(worker) => _ = self.service.endpoints[worker].shared.mark_down(),
            Incident::Restarted(worker) => {
                if self.workers[worker].engine.requests() > 0 {
                    return false;
                }
                self.caches[worker].clear();
                self.views[worker].tell(now, std::iter::once(None));
                self.service.endpoints[worker].shared.mark_up();
            }
        }
        true
    }
}
