//! What runs, and how it changes: the one owner of rules, listening sockets, shards, ingest and models.
//!
//! **Invariant.** One task ([`Supervisor::run`]) makes every change, one at a time: prepare (resolve, work out,
//! bind), then hand the new tables to every shard, then commit. A change that fails in any step leaves everything as
//! it was. Everyone else asks through a [`Control`] and reads the [`View`] that the last change published.

#![forbid(unsafe_code)]

mod background;
mod change;
mod engines;
mod findings;
mod holds;
mod kept;
mod parts;
mod registry;
mod rehearsal;
mod resolve;
mod scrape;
mod silence;
mod slots;
mod sockets;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shards::affinity::{Affinity, AffinityWriter, seconds};
use shards::executor::now_ns;
use shards::ids::ServiceId;
use shards::load::LoadTable;
use shards::service::Tables;
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{error, info, warn};

use crate::config::Config;
use crate::cores::Plan;
use crate::discovery::{Discovery, ServiceFacts};
use crate::rules::{KvDefaults, Rule, RuleKey};

pub(crate) use background::PROBES_MAX;
pub use change::{Difference, Scope};
pub(crate) use findings::events_option;
pub use findings::{EndpointFinding, EndpointLeg, Findings};
use holds::Held;
pub use holds::Holds;
pub(crate) use holds::HostState;
use kept::Store;
pub use kept::{KeepError, KeptReport};
use parts::{CONFIRM_TIMEOUT, Listeners, Parts};
pub use parts::{IngestPart, ModelsPart, PartError, ShardView};
use registry::Registry;
pub use registry::{Entry, Origin, RegistryError};
pub(crate) use rehearsal::Rehearsal;
pub use slots::LOAD_SLOTS;
pub use sockets::BindError;

/// Requests to the supervisor that wait. Beyond it the askers wait.
const REQUESTS_MAX: usize = 64;
/// How often shards are looked after and unused places freed.
const WATCH_PERIOD: Duration = Duration::from_secs(1);

/// How often the pins that shards made of sessions are shown to the others.
const SESSIONS_PERIOD: Duration = Duration::from_millis(50);

/// Why a rule was not taken in; nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The rules do not allow it.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// Its address cannot be listened at.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// Two of its endpoints have one address.
    #[error("two endpoints of the rule resolve to {0}")]
    Collision(SocketAddr),
    /// A part of the process did not do its share.
    #[error(transparent)]
    Part(#[from] PartError),
    /// Rules could not be written where they outlive the process.
    #[error(transparent)]
    Keep(#[from] KeepError),
    /// The process is shutting down.
    #[error("the gateway is shutting down")]
    Stopping,
}

/// Which rules are meant.
#[derive(Clone, Debug)]
pub enum Selector {
    /// The rule with this key.
    Key(RuleKey),
    /// Every rule of this name.
    Name(String),
    /// Every rule.
    All,
}

impl Selector {
    fn matches(&self, entry: &Entry) -> bool {
        match self {
            Selector::Key(key) => entry.rule.key == *key,
            Selector::Name(name) => entry.rule.name == *name,
            Selector::All => true,
        }
    }
}

/// What others may know: replaced whole after every change.
#[derive(Debug)]
pub struct View {
    /// Rules in force, in order of their numbers.
    pub entries: Vec<Arc<Entry>>,
    /// Shards.
    pub shards: Vec<ShardView>,
    /// Whether the process is on its way out.
    pub draining: bool,
    /// The rules that outlive the process.
    pub kept: KeptReport,
}

impl View {
    /// The rule of a number.
    #[must_use]
    pub fn entry(&self, id: ServiceId) -> Option<&Arc<Entry>> {
        self.entries.iter().find(|entry| entry.id == id)
    }

    /// Whether new requests are taken, and a rule has an endpoint that they may go to and that is known to answer.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        !self.draining && self.entries.iter().any(|entry| entry.usable() > 0)
    }
}

enum Request {
    Apply(Box<Rule>, Origin, oneshot::Sender<Result<Arc<Entry>, ApplyError>>),
    Remove(Selector, oneshot::Sender<Result<usize, ApplyError>>),
    /// The rules of a scope are to be these; true = only say what would change.
    Replace(Vec<(Rule, Origin)>, Scope, bool, oneshot::Sender<Result<Difference, ApplyError>>),
    /// The names of this entry's endpoints lead elsewhere now.
    Moved(Arc<Entry>, Vec<Option<SocketAddr>>),
    /// The engines of this rule say something new of themselves.
    Learned(ServiceId, ServiceFacts),
}

/// The way to the supervisor, for everyone else.
#[derive(Clone, Debug)]
pub struct Control {
    requests: mpsc::Sender<Request>,
    view: watch::Receiver<Arc<View>>,
    /// In-flight counts.
    pub loads: Arc<LoadTable>,
    /// Where sessions were sent.
    pub affinity: Arc<Affinity>,
    /// Event streams.
    pub ingest: IngestPart,
    /// Tokenizers.
    pub models: ModelsPart,
    /// What engines say of themselves.
    pub discovery: Discovery,
    /// What is wrong with endpoints beyond the keys of their ranks.
    pub findings: Findings,
    /// Hosts that an operator has taken out.
    pub holds: Holds,
}

impl Control {
    /// What is in force now.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        Arc::clone(&self.view.borrow())
    }

    /// Puts a rule in force, new or in place of the one with the same key.
    ///
    /// # Errors
    /// Why not; nothing was changed.
    pub async fn apply(&self, rule: Rule, origin: Origin) -> Result<Arc<Entry>, ApplyError> {
        self.ask(|answer| Request::Apply(Box::new(rule), origin, answer)).await
    }

    /// Takes rules out of force and says how many there were. The configuration file's stay: one that is named is an
    /// error, others are passed over.
    ///
    /// # Errors
    /// Why not; nothing was changed.
    pub async fn remove(&self, selector: Selector) -> Result<usize, ApplyError> {
        self.ask(|answer| Request::Remove(selector, answer)).await
    }

    /// Makes the rules of a scope these, all of them or none, and says what was changed; `dry` only says it. Rules of the
    /// other scope stay, but for those that the configuration file has now.
    ///
    /// # Errors
    /// Why not; nothing was changed.
    pub async fn replace(&self, rules: Vec<(Rule, Origin)>, scope: Scope, dry: bool) -> Result<Difference, ApplyError> {
        self.ask(|answer| Request::Replace(rules, scope, dry, answer)).await
    }

    /// Takes a host's engines out, or leaves them to their probes again; false where there is no room for more holds.
    pub(crate) fn hold(&self, held: Held, state: HostState) -> bool {
        if !self.holds.set(held, state) {
            return false;
        }
        for entry in &self.view().entries {
            for place in entry.in_rule() {
                // Probes bring back what may come back.
                if place.address.is_some_and(|address| self.holds.has(address)) {
                    place.shared.mark_down();
                }
            }
        }
        true
    }

    async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<Result<T, ApplyError>>) -> Request,
    ) -> Result<T, ApplyError> {
        let (answer, answered) = oneshot::channel();
        self.requests.send(request(answer)).await.map_err(|_| ApplyError::Stopping)?;
        answered.await.unwrap_or(Err(ApplyError::Stopping))
    }

    async fn moved(&self, entry: Arc<Entry>, addresses: Vec<Option<SocketAddr>>) {
        // The supervisor is gone only when the process is about to be.
        let _ = self.requests.send(Request::Moved(entry, addresses)).await;
    }
}

/// The owner of everything that runs.
#[derive(Debug)]
pub struct Supervisor {
    registry: Registry,
    store: Store,
    listeners: Listeners,
    parts: Parts,
    backlog: u32,
    drain_timeout: Duration,
    /// What a rule made over the API has where its body says nothing.
    defaults: KvDefaults,
    requests: mpsc::Receiver<Request>,
    view: watch::Sender<Arc<View>>,
    control: Control,
    models_changed: mpsc::Receiver<()>,
    affinity_writer: AffinityWriter,
}

impl Supervisor {
    /// Starts shards, ingest and models; no rules yet.
    ///
    /// # Errors
    /// A part that does not start.
    pub fn start(config: &Config, plan: &Plan) -> Result<Self, PartError> {
        let loads = Arc::new(LoadTable::new(plan.shards.len(), LOAD_SLOTS));
        let (affinity, affinity_writer) = Affinity::new();
        let (parts, models_changed) = Parts::start(config, plan, &loads, &affinity)?;
        let (requests_in, requests) = mpsc::channel(REQUESTS_MAX);
        let (store, next, remembered) = Store::open(config.state_directory.as_deref());
        let mut registry = Registry::new(Arc::clone(&loads), plan.shards.len(), config.kv_defaults.max_blocks as usize);
        registry.remember(next, remembered);
        let view =
            View { entries: Vec::new(), shards: parts.shards.views(), draining: false, kept: KeptReport::default() };
        let (view, view_out) = watch::channel(Arc::new(view));
        let control = Control {
            requests: requests_in,
            view: view_out,
            loads: Arc::clone(&loads),
            affinity,
            ingest: parts.ingest.clone(),
            models: parts.models.clone(),
            discovery: Discovery::default(),
            findings: Findings::default(),
            holds: Holds::default(),
        };
        Ok(Supervisor {
            registry,
            store,
            listeners: Listeners::new(),
            parts,
            backlog: config.listen_backlog,
            drain_timeout: config.drain_timeout,
            defaults: config.kv_defaults.clone(),
            requests,
            view,
            control,
            models_changed,
            affinity_writer,
        })
    }

    /// The way to ask for changes.
    #[must_use]
    pub fn control(&self) -> Control {
        self.control.clone()
    }

    /// Serves until `stop` is done, then drains: nothing new is accepted, and what runs may finish.
    pub async fn run(mut self, stop: impl Future<Output = ()>) {
        let background = background::start(&self.control);
        let mut sessions = tokio::time::interval(SESSIONS_PERIOD);
        sessions.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut watch = tokio::time::interval(WATCH_PERIOD);
        watch.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        tokio::pin!(stop);
        loop {
            tokio::select! {
                () = &mut stop => break,
                Some(request) = self.requests.recv() => self.handle(request).await,
                Some(()) = self.models_changed.recv() => self.models_changed().await,
                _ = watch.tick() => self.look_after().await,
                _ = sessions.tick() => self.affinity_writer.apply(seconds(now_ns())),
            }
        }
        drop(background);
        // From here on whoever asks for a change hears that the process stops.
        self.requests.close();
        self.show(true);
        info!(timeout_ms = self.drain_timeout.as_millis() as u64, "draining: no new connections");
        self.listeners.clear();
        self.parts.stop(self.drain_timeout).await;
    }

    async fn handle(&mut self, request: Request) {
        match request {
            Request::Apply(rule, origin, answer) => {
                let result = self.apply(*rule, origin).await;
                // An asker that left does not undo the change.
                let _ = answer.send(result);
            }
            Request::Remove(selector, answer) => {
                let result = self.remove(&selector).await;
                let _ = answer.send(result);
            }
            Request::Replace(rules, scope, dry, answer) => {
                let result = self.replace(rules, scope, dry).await;
                let _ = answer.send(result);
            }
            Request::Moved(entry, addresses) => self.move_endpoints(&entry, &addresses).await,
            Request::Learned(id, facts) => self.learn(id, facts).await,
        }
    }

    /// Gives every shard tables of these entries; if one does not take them in time, gives all of them the present ones.
    async fn hand_out(&self, entries: &[Arc<Entry>], until: Instant) -> Result<(), PartError> {
        let result = self.parts.shards.tables(self.tables(entries), until).await;
        if result.is_err() {
            self.take_back(std::iter::empty());
        }
        result
    }

    /// Has the shards be as they were before a change that failed.
    fn take_back(&self, addresses: impl Iterator<Item = SocketAddr>) {
        self.parts.shards.take_back(&self.tables(self.registry.entries()), addresses);
    }

    fn tables(&self, entries: &[Arc<Entry>]) -> Arc<Tables> {
        let services = entries.iter().map(|entry| Arc::clone(&entry.service)).collect();
        Arc::new(Tables { services, models: self.parts.models.table() })
    }

    async fn move_endpoints(&mut self, seen: &Arc<Entry>, addresses: &[Option<SocketAddr>]) {
        // The rule may have changed while its names were looked up; the next look-up is for the new one.
        if !self.registry.entries().iter().any(|entry| Arc::ptr_eq(entry, seen)) {
            return;
        }
        if let Some(address) = resolve::collision(addresses) {
            warn!(rule = %seen.rule.key, %address, "two endpoints resolve to one address: addresses stay as they were");
            return;
        }
        let entry = Arc::new(seen.moved(addresses));
        let entries = self.registry.with(&[], [&entry]);
        if let Err(error) = self.hand_out(&entries, Instant::now() + CONFIRM_TIMEOUT).await {
            warn!(rule = %seen.rule.key, %error, "new addresses of endpoints could not be handed out");
            return;
        }
        self.registry.commit(entries);
        self.parts.ingest.update_all(&entry);
        self.publish();
        info!(rule = %entry.rule.key, ?addresses, "endpoints resolve to new addresses");
    }

    async fn learn(&mut self, id: ServiceId, facts: ServiceFacts) {
        // The rule may be gone by now.
        let Some(seen) = self.registry.entries().iter().find(|entry| entry.id == id).cloned() else { return };
        if facts.forms.len() > 1 && seen.facts.forms.len() <= 1 {
            info!(rule = %seen.rule.key, "engines of different releases: salts and adapters are keyed in each one's form");
        }
        let entry = Arc::new(seen.learned(facts));
        let entries = self.registry.with(&[], [&entry]);
        if let Err(error) = self.hand_out(&entries, Instant::now() + CONFIRM_TIMEOUT).await {
            warn!(rule = %seen.rule.key, %error, "what engines say of themselves could not be handed out");
            return;
        }
        self.registry.commit(entries);
        // A no-op unless the engines' keys are now believed to be others.
        self.parts.ingest.update_all(&entry);
        self.publish();
        let (models, adapters) = (entry.facts.models.len(), entry.facts.adapters.len());
        let release = entry.facts.release.map(|release| release.to_string());
        info!(rule = %entry.rule.key, release, models, adapters, "engines describe themselves");
    }

    async fn models_changed(&mut self) {
        if let Err(error) = self.hand_out(self.registry.entries(), Instant::now() + CONFIRM_TIMEOUT).await {
            error!(%error, "new tokenizers could not be handed out");
        }
    }

    async fn look_after(&mut self) {
        self.registry.sweep();
        self.retry_waiting().await;
        let tables = self.tables(self.registry.entries());
        if self.parts.shards.look_after(&tables, &mut self.listeners).await {
            self.publish();
        }
    }

    fn publish(&self) {
        let entries = self.registry.entries().to_vec();
        self.parts.ingest.set_load_slots(self.registry.slots_used());
        self.parts.ingest.keep_files(self.store.some_wait());
        self.parts.models.set_wanted(&entries);
        self.show(false);
    }

    fn show(&self, draining: bool) {
        let (entries, shards) = (self.registry.entries().to_vec(), self.parts.shards.views());
        self.view.send_replace(Arc::new(View { entries, shards, draining, kept: self.kept_report() }));
    }
}
