//! One ingest thread: waits for its streams, applies what they bring, publishes, and sums up the shards' load.
//!
//! A cycle: take what is ready (each source up to a bound, the rest in the next cycle) → commands → overdue replays →
//! publish every inventory that has something pending → the loads. Nothing in it waits but the poller.

mod keep;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam::channel::Receiver;
use shards::ids::{EndpointIndex, Rank};
use shards::inventory::Writer;
use shards::load::LoadTable;
use shards::service::{EndpointShared, Engine, MediumWeights};

use super::calibrate::Believed;
use super::copies::Copies;
use super::parity::UseStats;
use super::persist::Files;
use super::poller::Poller;
use super::sockets::{Contexts, Frames};
use super::source::{Io, Left, Source};
use super::status::StreamName;
use super::trtllm::{DrainBlocks, DrainFrom, DrainSource};
use super::{EndpointSources, Mode, RankSource, ServiceSources, Shared, TableId};
use keep::{Keeper, TICK_USAGE};

/// How often loads are published, and a refused publish repeated.
const TICK: Duration = Duration::from_micros(200);
/// No change for so long is a pause: loads are not published until a shard says that its own have changed.
const IDLE_AFTER: Duration = Duration::from_micros(400);
/// How often overdue replays are looked for.
const TICK_REPLAY: Duration = Duration::from_millis(10);
/// How often what shards predicted is looked at, and what is kept of engines that are gone.
const TICK_PREDICTIONS: Duration = Duration::from_millis(500);
/// Publishes of one inventory per cycle; what is left is published in the next, which does not wait.
const PUBLISHES_PER_CYCLE: usize = 4;
/// Operations pending beyond which a service's sources are not read: its readers hold up every publish.
const PENDING_MAX: usize = 1 << 18;

/// What the control thread wants.
pub(crate) enum Command {
    Add(ServiceSources, Box<Writer>),
    Update(ServiceSources),
    Remove(TableId),
    Stop,
}

struct Service {
    engine: Engine,
    block_tokens: u32,
    weights: MediumWeights,
    believed: Option<Arc<Believed>>,
    writer: Writer,
    endpoints: BTreeMap<EndpointIndex, Endpoint>,
    /// Something was read since the counts of blocks were last told.
    touched: bool,
    /// Some source waits for a slot of the inventory.
    lacks_holder: bool,
}

impl Service {
    fn new(sources: &ServiceSources, writer: Writer) -> Self {
        Service {
            engine: sources.engine,
            block_tokens: sources.block_tokens,
            weights: sources.weights,
            believed: sources.believed.clone(),
            writer,
            endpoints: BTreeMap::new(),
            touched: false,
            lacks_holder: false,
        }
    }

    /// Asks for the slots that some sources lack.
    fn repair(&mut self) {
        self.lacks_holder = false;
        for endpoint in self.endpoints.values_mut() {
            for source in &mut endpoint.sources {
                source.repair(&endpoint.copies, &mut self.writer);
                self.lacks_holder |= source.lacks_holder();
            }
        }
    }
}

struct Endpoint {
    shared: Arc<EndpointShared>,
    label: String,
    by_use: Arc<UseStats>,
    copies: Copies,
    sources: Vec<Source>,
    drain: Option<DrainSource>,
}

impl Endpoint {
    /// Times that a cache of it was emptied.
    fn emptied(&self) -> u32 {
        let drained = self.drain.as_ref().map_or(0, DrainSource::clears);
        self.sources.iter().map(Source::clears).fold(drained, u64::wrapping_add) as u32
    }

    /// Takes what shards predicted, and judges what is due.
    fn check_predictions(&mut self, now: Instant, writer: &Writer) {
        while let Some(prediction) = self.shared.predictions.take() {
            self.copies.by_use.predicted(prediction, now);
        }
        if !self.sources.iter().all(Source::is_eligible) || !self.drain.iter().all(DrainSource::is_eligible) {
            self.copies.by_use.forget();
        }
        let change = match &mut self.drain {
            Some(drain) => {
                drain.tell(&mut self.copies.by_use);
                self.copies.by_use.judge(now, &self.by_use, &self.shared.bos, |key| drain.holds(key, writer))
            }
            None => self.copies.judge(now, &self.by_use, &self.shared.bos),
        };
        match change {
            Some(Some(leg)) => {
                tracing::warn!(endpoint = self.label, leg = leg.name(), "parity by use: {}", leg.detail())
            }
            Some(None) => {
                tracing::info!(endpoint = self.label, "parity by use: prompts have their predicted blocks again")
            }
            None => {}
        }
    }
}

/// Where the source behind a token is.
#[derive(Clone, Copy)]
struct Place {
    service: TableId,
    endpoint: EndpointIndex,
    source: usize,
}

/// The duty of the one thread that publishes loads.
struct Loads {
    table: Arc<LoadTable>,
    published: Instant,
    busy: Instant,
}

/// The state of one ingest thread.
pub(crate) struct Worker {
    poller: Poller,
    contexts: Contexts,
    frames: Frames,
    commands: Receiver<Command>,
    shared: Arc<Shared>,
    services: BTreeMap<TableId, Service>,
    places: BTreeMap<u64, Place>,
    /// Endpoints with a drain.
    drains: Vec<(TableId, EndpointIndex)>,
    token_next: u64,
    /// Tokens of sources with messages left to read.
    ready: BTreeSet<u64>,
    /// Tokens of sources with a replay under way.
    replaying: BTreeSet<u64>,
    loads: Option<Loads>,
    blocks_max: usize,
    replay_timeout: Duration,
    aside: Duration,
    /// When predictions were looked at last.
    predictions_checked: Instant,
    /// The same for what engines said of their caches, and whether that is wanted of any.
    usage_checked: Instant,
    usage_wanted: bool,
    /// None where nothing is to be remembered.
    keeper: Option<Keeper>,
}

/// What a worker is made from.
pub(crate) struct WorkerOptions {
    pub(crate) poller: Poller,
    pub(crate) commands: Receiver<Command>,
    pub(crate) shared: Arc<Shared>,
    /// The load table, for the one thread that publishes it.
    pub(crate) loads: Option<Arc<LoadTable>>,
    pub(crate) blocks_max: usize,
    pub(crate) replay_timeout: Duration,
    pub(crate) aside: Duration,
    /// The helper of the state directory, and how often ranks are written.
    pub(crate) state: Option<(Files, Duration)>,
}

impl Worker {
    pub(crate) fn new(options: WorkerOptions) -> Self {
        let now = Instant::now();
        if let Some(table) = &options.loads {
            let waker = options.poller.waker();
            table.wake_with(move || waker.wake());
        }
        Worker {
            poller: options.poller,
            contexts: Contexts::default(),
            frames: Frames::new(),
            commands: options.commands,
            shared: options.shared,
            services: BTreeMap::new(),
            places: BTreeMap::new(),
            drains: Vec::new(),
            token_next: 0,
            ready: BTreeSet::new(),
            replaying: BTreeSet::new(),
            loads: options.loads.map(|table| Loads { table, published: now, busy: now }),
            blocks_max: options.blocks_max,
            replay_timeout: options.replay_timeout,
            aside: options.aside,
            predictions_checked: now,
            usage_checked: now,
            usage_wanted: false,
            keeper: options.state.map(|(files, period)| Keeper::new(files, period)),
        }
    }

    /// Runs until it is told to stop.
    pub(crate) fn run(mut self) {
        let mut tokens = Vec::new();
        let mut pending = Pending::Nothing;
        let (mut drains, mut keep) = (Left::Nothing, Left::Nothing);
        loop {
            self.poller.tick_every(self.tick(pending));
            tokens.extend(std::mem::take(&mut self.ready));
            let left = drains == Left::More || keep == Left::More;
            let at_once = !tokens.is_empty() || pending == Pending::Work || left;
            self.poller.wait(at_once, &mut tokens);
            tokens.sort_unstable();
            tokens.dedup();
            for token in tokens.drain(..) {
                self.visit(token);
            }
            drains = self.visit_drains();
            while let Ok(command) = self.commands.try_recv() {
                if !self.obey(command) {
                    return self.stop();
                }
            }
            self.check_replays();
            self.check_predictions();
            self.check_usage();
            keep = self.keep();
            pending = self.publish();
            self.publish_loads();
        }
    }

    fn tick(&self, pending: Pending) -> Option<Duration> {
        let loads = self.loads.as_ref().filter(|loads| !loads.table.is_asleep()).map(|_| TICK);
        let refused = (pending == Pending::Refused).then_some(TICK);
        let replays = (!self.replaying.is_empty()).then_some(TICK_REPLAY);
        let predictions = (!self.services.is_empty()).then_some(TICK_PREDICTIONS);
        let usage = self.usage_wanted.then_some(TICK_USAGE);
        let keep = self.keeper.as_ref().map(Keeper::tick);
        [loads, refused, replays, predictions, usage, keep].into_iter().flatten().min()
    }

    fn visit(&mut self, token: u64) {
        let Some(place) = self.places.get(&token).copied() else { return };
        let Worker { contexts, poller, frames, .. } = self;
        let mut io = Io { contexts, poller, frames, replay_timeout: self.replay_timeout };
        let Some(service) = self.services.get_mut(&place.service) else { return };
        let Some(endpoint) = service.endpoints.get_mut(&place.endpoint) else { return };
        let Some(source) = endpoint.sources.get_mut(place.source) else { return };
        if service.writer.pending() > PENDING_MAX && !service.writer.try_publish() {
            self.ready.insert(token);
            return;
        }
        if source.visit(&mut endpoint.copies, &mut service.writer, &mut io) == Left::More {
            self.ready.insert(token);
        }
        service.touched = true;
        // It may have begun, or been proven: whether answers are looked at is found out soon, whatever else happens.
        self.usage_wanted = true;
        service.lacks_holder |= source.lacks_holder();
        if source.is_replaying() {
            self.replaying.insert(token);
        }
    }

    /// Applies what the drains brought, up to a bound.
    fn visit_drains(&mut self) -> Left {
        let mut left = Left::Nothing;
        for (id, index) in &self.drains {
            let Some(service) = self.services.get_mut(id) else { continue };
            let Some(endpoint) = service.endpoints.get_mut(index) else { continue };
            let Some(drain) = endpoint.drain.as_mut().filter(|drain| drain.is_ready()) else { continue };
            if service.writer.pending() > PENDING_MAX && !service.writer.try_publish() {
                continue;
            }
            drain.visit(&mut service.writer);
            service.touched = true;
            if drain.is_ready() {
                left = Left::More;
            }
        }
        left
    }

    /// The source of a token, with the copies of its endpoint.
    fn source(&mut self, token: u64) -> Option<(&mut Source, &mut Copies)> {
        let place = self.places.get(&token)?;
        let endpoint = self.services.get_mut(&place.service)?.endpoints.get_mut(&place.endpoint)?;
        Some((endpoint.sources.get_mut(place.source)?, &mut endpoint.copies))
    }

    /// Does something to the source of a token; none where it is gone.
    fn with_source<T>(
        &mut self,
        token: u64,
        act: impl FnOnce(&mut Source, &mut Copies, &mut Writer, &mut Io<'_>) -> T,
    ) -> Option<T> {
        let place = self.places.get(&token).copied()?;
        let Worker { contexts, poller, frames, .. } = self;
        let mut io = Io { contexts, poller, frames, replay_timeout: self.replay_timeout };
        let service = self.services.get_mut(&place.service)?;
        let endpoint = service.endpoints.get_mut(&place.endpoint)?;
        let source = endpoint.sources.get_mut(place.source)?;
        service.touched = true;
        Some(act(source, &mut endpoint.copies, &mut service.writer, &mut io))
    }

    fn check_replays(&mut self) {
        if self.replaying.is_empty() {
            return;
        }
        let now = Instant::now();
        for token in std::mem::take(&mut self.replaying) {
            let under_way =
                self.with_source(token, |source, copies, writer, io| source.check_replay(now, copies, writer, io));
            if under_way == Some(true) {
                self.replaying.insert(token);
            }
        }
    }

    fn publish(&mut self) -> Pending {
        let mut left = Pending::Nothing;
        for service in self.services.values_mut() {
            if service.lacks_holder {
                service.repair();
                left = left.max(Pending::Refused);
            }
            let mut publish = || service.writer.pending() == 0 || service.writer.try_publish();
            let published = (0..PUBLISHES_PER_CYCLE).all(|_| publish());
            if std::mem::take(&mut service.touched) {
                for endpoint in service.endpoints.values() {
                    let drained = endpoint.drain.as_ref().map_or(0, DrainSource::distinct);
                    endpoint.shared.emptied.store(endpoint.emptied(), Ordering::Relaxed);
                    endpoint.shared.set_kv_blocks(endpoint.copies.distinct() + drained);
                }
            }
            if service.writer.pending() > 0 {
                left = left.max(if published { Pending::Work } else { Pending::Refused });
            }
        }
        left
    }

    fn check_predictions(&mut self) {
        let now = Instant::now();
        if now.duration_since(self.predictions_checked) < TICK_PREDICTIONS {
            return;
        }
        self.predictions_checked = now;
        for Service { endpoints, writer, touched, .. } in self.services.values_mut() {
            for endpoint in endpoints.values_mut() {
                endpoint.check_predictions(now, writer);
                for source in &mut endpoint.sources {
                    *touched |= source.expire(now, self.aside, &mut endpoint.copies, writer);
                }
            }
        }
    }

    fn publish_loads(&mut self) {
        let Some(loads) = &mut self.loads else { return };
        if loads.table.is_asleep() {
            return;
        }
        let now = Instant::now();
        if now.duration_since(loads.published) < TICK {
            return;
        }
        loads.published = now;
        let slots = self.shared.load_slots.load(Ordering::Relaxed);
        if loads.table.publish(slots) {
            loads.busy = now;
        } else if now.duration_since(loads.busy) > IDLE_AFTER {
            loads.table.sleep();
        }
    }

    /// Carries out a command; false to stop.
    fn obey(&mut self, command: Command) -> bool {
        match command {
            Command::Add(sources, writer) => {
                let id = sources.table();
                self.remove(id);
                self.services.insert(id, Service::new(&sources, *writer));
                self.update(sources);
            }
            Command::Update(sources) => self.update(sources),
            Command::Remove(id) => {
                let endpoints =
                    self.services.get(&id).map(|service| service.endpoints.keys().copied().collect::<Vec<_>>());
                endpoints.unwrap_or_default().into_iter().for_each(|index| self.forget_files(id, index));
                self.remove(id);
            }
            Command::Stop => return false,
        }
        true
    }

    fn stop(mut self) {
        self.write_all();
        let ids: Vec<_> = self.services.keys().copied().collect();
        ids.into_iter().for_each(|id| self.remove(id));
    }

    fn remove(&mut self, id: TableId) {
        let Some(service) = self.services.get(&id) else { return };
        let endpoints: Vec<_> = service.endpoints.keys().copied().collect();
        endpoints.into_iter().for_each(|endpoint| self.close_endpoint(id, endpoint));
        self.services.remove(&id);
    }

    /// Makes the sources of a service those that are given; what is the same stays undisturbed.
    fn update(&mut self, sources: ServiceSources) {
        let id = sources.table();
        let ServiceSources { engine, block_tokens, weights, believed, endpoints, .. } = sources;
        let Some(service) = self.services.get_mut(&id) else { return };
        let before = (service.block_tokens, service.weights, &service.believed);
        let same_keys = before == (block_tokens, weights, &believed);
        let known: Vec<_> = service.endpoints.keys().copied().collect();
        for index in known {
            let stays = endpoints.iter().any(|endpoint| endpoint.index == index);
            if !stays {
                self.forget_files(id, index);
            }
            if !same_keys || !stays {
                self.close_endpoint(id, index);
            }
        }
        if let Some(service) = self.services.get_mut(&id) {
            (service.engine, service.block_tokens) = (engine, block_tokens);
            (service.weights, service.believed) = (weights, believed);
        }
        for wanted in endpoints {
            self.update_endpoint(id, wanted);
        }
    }

    fn update_endpoint(&mut self, id: TableId, wanted: EndpointSources) {
        let EndpointSources { index, shared, label, ranks, drain } = wanted;
        let known = self.services.get(&id).and_then(|service| service.endpoints.get(&index));
        // A source whose address was refused is tried again.
        let same = known.is_some_and(|endpoint| {
            endpoint.sources.iter().all(Source::is_open)
                && endpoint.sources.iter().map(|source| &source.from).eq(&ranks)
                && endpoint.drain.as_ref().map(|drain| &drain.from) == drain.as_ref()
        });
        if !same {
            self.close_endpoint(id, index);
        }
        let Some(service) = self.services.get_mut(&id) else { return };
        if let Some(endpoint) = service.endpoints.get_mut(&index) {
            endpoint.shared = shared;
            return;
        }
        let copies = Copies::new(ranks.len(), service.block_tokens, self.blocks_max, service.believed.as_ref());
        let copies = copies.weigh(service.weights);
        // What was predicted before somebody listened is of no use; from now on it is.
        while shared.predictions.take().is_some() {}
        let by_use = Arc::default();
        let endpoint = Endpoint { shared, label: label.clone(), by_use, copies, sources: Vec::new(), drain: None };
        service.endpoints.insert(index, endpoint);
        for from in ranks {
            self.open_source(id, index, &label, from);
        }
        if let Some(from) = drain {
            self.open_drain(id, index, label, from);
        }
    }

    fn open_drain(&mut self, id: TableId, index: EndpointIndex, label: String, from: DrainFrom) {
        let Some(service) = self.services.get_mut(&id) else { return };
        let Some(endpoint) = service.endpoints.get_mut(&index) else { return };
        let address = format!("http://{}/kv_cache_events", from.address);
        let name = StreamName { service: id.service, endpoint: index, label, rank: Rank(0), address };
        let Service { block_tokens, weights, .. } = *service;
        let blocks = DrainBlocks { block_tokens, weights, blocks_max: self.blocks_max };
        match DrainSource::open(name, from, blocks, &endpoint.by_use, self.poller.waker()) {
            Ok(drain) => {
                self.shared.register_drain(&drain);
                self.drains.push((id, index));
                endpoint.drain = Some(drain);
            }
            Err(error) => {
                tracing::error!(%error, "no thread can be had for an engine's KV events; raise the limit of threads")
            }
        }
    }

    fn open_source(&mut self, id: TableId, index: EndpointIndex, label: &str, from: RankSource) {
        let Some(service) = self.services.get_mut(&id) else { return };
        let Some(endpoint) = service.endpoints.get_mut(&index) else { return };
        let (Mode::Connect(address) | Mode::Bind(address)) = &from.mode;
        let name = StreamName {
            service: id.service,
            endpoint: index,
            label: label.to_owned(),
            rank: from.rank,
            address: address.clone(),
        };
        let token = self.token_next;
        self.token_next += 1;
        let source = endpoint.sources.len();
        let by_use = Arc::clone(&endpoint.by_use);
        endpoint.sources.push(Source::new(name, from, source, token, &by_use, &mut service.writer));
        self.shared.register(&endpoint.sources[source]);
        self.places.insert(token, Place { service: id, endpoint: index, source });
        self.begin_source(token);
    }

    fn close_endpoint(&mut self, id: TableId, index: EndpointIndex) {
        self.leave_files(id, index, |files, share| files.leave(&share));
        let Some(service) = self.services.get_mut(&id) else { return };
        let Some(endpoint) = service.endpoints.remove(&index) else { return };
        for source in endpoint.sources {
            self.shared.unregister(&source);
            source.close(&mut service.writer, &self.poller);
        }
        if let Some(drain) = endpoint.drain {
            self.shared.unregister_drain(&drain);
            drain.close(&mut service.writer);
            self.drains.retain(|place| *place != (id, index));
        }
        self.places.retain(|_, place| place.service != id || place.endpoint != index);
        endpoint.shared.set_kv_blocks(0);
    }
}

/// Whether inventories have something left to publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Pending {
    Nothing,
    /// A reader still reads the other side.
    Refused,
    Work,
}
