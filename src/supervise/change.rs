//! Changes of rules: any number of them at once, all of them or none.
//!
//! Prepare (resolve, work out, bind), write what is to outlive the process, hand the new tables to every shard, commit.
//! A change that fails in any step leaves everything as it was, the state file included.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shards::ids::ServiceId;
use tracing::{error, info};

use crate::rules::{Rule, RuleKey};

use super::registry::{Events, Prepared};
use super::{
    ApplyError, CONFIRM_TIMEOUT, Entry, Listeners, Origin, RegistryError, Selector, Supervisor, resolve, sockets,
};

/// Pause before a busy address is tried again.
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// Longest time from the beginning of a change until the last shard has confirmed it.
const CHANGE_MAX: Duration = CONFIRM_TIMEOUT;
/// What shards have of it at least, however long names and the disk took.
const CONFIRM_MIN: Duration = Duration::from_millis(200);
/// Longest wait for the addresses of new names. What comes later is taken up when names are resolved the next time.
const RESOLVE_MAX: Duration = Duration::from_millis(400);

/// What a change is about.
#[derive(Default)]
pub(super) struct Change {
    /// Rules to put in force, new or in place of those with the same keys.
    pub(super) put: Vec<(Rule, Origin)>,
    /// Rules to take out of force.
    pub(super) drop: Vec<ServiceId>,
}

/// Whose rules are replaced as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The configuration file's. What the file has now becomes its own, whoever made it.
    File,
    /// The management API's.
    Api,
}

impl Scope {
    fn has(self, origin: &Origin) -> bool {
        (self == Scope::File) == origin.is_file()
    }
}

/// What replacing all rules of a scope changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// Rules that were not there before.
    pub added: Vec<RuleKey>,
    /// Rules that are others now, each with the members that differ.
    pub changed: Vec<(RuleKey, Vec<String>)>,
    /// Rules that are gone.
    pub removed: Vec<RuleKey>,
}

impl Difference {
    /// Whether nothing was changed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.changed.is_empty() && self.removed.is_empty()
    }
}

impl Supervisor {
    /// Puts a rule in force, new or in place of the one with the same key.
    ///
    /// # Errors
    /// Why not; nothing was changed.
    pub async fn apply(&mut self, rule: Rule, origin: Origin) -> Result<Arc<Entry>, ApplyError> {
        let key = rule.key.clone();
        self.change(Change { put: vec![(rule, origin)], drop: Vec::new() }).await?;
        Ok(Arc::clone(self.registry.find(&key).expect("a change puts what it is given in force")))
    }

    /// As [`Supervisor::apply`], at the start: the kernel lets go of a killed process's listening sockets a moment after it
    /// is gone, while its rings are still taken down, so a busy address is tried again until `patience` is over.
    ///
    /// # Errors
    /// Why not; nothing was changed.
    pub async fn apply_at_start(&mut self, rule: &Rule, origin: &Origin, patience: Instant) -> Result<(), ApplyError> {
        loop {
            match self.apply(rule.clone(), origin.clone()).await {
                Err(ApplyError::Bind(bind)) if bind.is_busy() && Instant::now() < patience => {
                    tokio::time::sleep(BUSY_PAUSE).await;
                }
                result => return result.map(|_| ()),
            }
        }
    }

    pub(super) async fn remove(&mut self, selector: &Selector) -> Result<usize, ApplyError> {
        let matching: Vec<&Arc<Entry>> =
            self.registry.entries().iter().filter(|entry| selector.matches(entry)).collect();
        if matches!(selector, Selector::Key(_)) && matching.iter().any(|entry| entry.origin.is_file()) {
            return Err(RegistryError::FromFile.into());
        }
        let drop: Vec<ServiceId> =
            matching.iter().filter(|entry| !entry.origin.is_file()).map(|entry| entry.id).collect();
        let count = drop.len();
        self.change(Change { put: Vec::new(), drop }).await?;
        let waiting = match selector {
            Selector::Key(key) => self.drop_waiting(Some(key)),
            Selector::All => self.drop_waiting(None),
            Selector::Name(_) => 0,
        };
        if waiting > 0 {
            let entries = self.registry.entries().to_vec();
            self.keep(&entries).await?;
            self.publish();
        }
        Ok(count + waiting)
    }

    /// Makes the rules of a scope these, all of them or none; `dry` only says what would change.
    pub(super) async fn replace(
        &mut self,
        rules: Vec<(Rule, Origin)>,
        scope: Scope,
        dry: bool,
    ) -> Result<Difference, ApplyError> {
        let mut difference = Difference::default();
        let mut change = Change::default();
        let wanted: HashSet<RuleKey> = rules.iter().map(|(rule, _)| rule.key.clone()).collect();
        for entry in self.registry.entries().iter().filter(|entry| scope.has(&entry.origin)) {
            if !wanted.contains(&entry.rule.key) {
                difference.removed.push(entry.rule.key.clone());
                change.drop.push(entry.id);
            }
        }
        for (rule, origin) in rules {
            match self.registry.find(&rule.key) {
                Some(old) if scope.has(&old.origin) && old.is_made_by(&rule) => continue,
                Some(old) if old.rule.engine == rule.engine => {
                    difference.changed.push((rule.key.clone(), differences(&old.rule, &rule)));
                }
                // Another kind of engine: another rule at the same place.
                Some(old) => {
                    difference.removed.push(old.rule.key.clone());
                    difference.added.push(rule.key.clone());
                    change.drop.push(old.id);
                }
                None => difference.added.push(rule.key.clone()),
            }
            change.put.push((rule, origin));
        }
        if !dry {
            self.change(change).await?;
        }
        Ok(difference)
    }

    /// Carries out a change.
    ///
    /// # Errors
    /// Why not; nothing was changed.
    pub(super) async fn change(&mut self, change: Change) -> Result<(), ApplyError> {
        if change.put.is_empty() && change.drop.is_empty() {
            return Ok(());
        }
        let until = Instant::now() + CHANGE_MAX;
        let mut prepared = Vec::with_capacity(change.put.len());
        for (rule, origin) in change.put {
            match self.prepare(rule, origin, &change.drop).await {
                Ok(one) => prepared.push(one),
                Err(error) => {
                    self.registry.abandon(prepared);
                    return Err(error);
                }
            }
        }
        let entries = self.registry.with(&change.drop, prepared.iter().map(|one| &one.entry));
        if let Err(error) = self.switch_to(&entries, until).await {
            self.undo(prepared).await;
            return Err(error);
        }
        self.commit(entries, prepared, &change.drop).await;
        Ok(())
    }

    async fn prepare(&mut self, rule: Rule, origin: Origin, dropped: &[ServiceId]) -> Result<Prepared, ApplyError> {
        let old = self.registry.find(&rule.key).filter(|entry| !dropped.contains(&entry.id));
        let known: Vec<Option<SocketAddr>> = old
            .map(|entry| rule.endpoints.iter().map(|endpoint| entry.address_of(&endpoint.identity())).collect())
            .unwrap_or_default();
        let addresses = resolve::resolve(&rule, &known, RESOLVE_MAX).await;
        if let Some(address) = resolve::collision(&addresses) {
            return Err(ApplyError::Collision(address));
        }
        Ok(self.registry.prepare(rule, origin, &addresses, dropped)?)
    }

    /// Keeps the entries over a restart, binds what they need and hands them to the shards; on failure shards and sockets are
    /// as before.
    async fn switch_to(&mut self, entries: &[Arc<Entry>], until: Instant) -> Result<(), ApplyError> {
        let sockets = self.bind(entries)?;
        self.keep(entries).await?;
        let result = self.switch_shards(entries, &sockets, until.max(Instant::now() + CONFIRM_MIN)).await;
        result?;
        self.listeners.extend(sockets);
        Ok(())
    }

    /// Gives back what was prepared for a change that failed, in the state file too.
    async fn undo(&mut self, prepared: Vec<Prepared>) {
        self.registry.abandon(prepared);
        let entries = self.registry.entries().to_vec();
        if let Err(error) = self.keep(&entries).await {
            error!(%error, "the state file may have a change that was refused: it is in force after a restart");
        }
    }

    /// Sockets for the addresses that nobody listens at yet.
    fn bind(&self, entries: &[Arc<Entry>]) -> Result<Listeners, ApplyError> {
        let mut ours: Vec<SocketAddr> = self.listeners.keys().copied().collect();
        let mut sockets = Listeners::new();
        for listen in entries.iter().map(|entry| entry.rule.key.listen()) {
            if !ours.contains(&listen) {
                sockets.insert(listen, sockets::listen(listen, self.parts.shards.len(), self.backlog, &ours)?);
                ours.push(listen);
            }
        }
        Ok(sockets)
    }

    async fn switch_shards(
        &mut self,
        entries: &[Arc<Entry>],
        sockets: &Listeners,
        until: Instant,
    ) -> Result<(), ApplyError> {
        self.hand_out(entries, until).await?;
        for (listen, ours) in sockets {
            if let Err(error) = self.parts.shards.listen(*listen, ours, until).await {
                self.take_back(sockets.keys().copied());
                return Err(error.into());
            }
        }
        Ok(())
    }

    async fn commit(&mut self, entries: Vec<Arc<Entry>>, prepared: Vec<Prepared>, dropped: &[ServiceId]) {
        for entry in self.registry.entries().iter().filter(|entry| dropped.contains(&entry.id)) {
            if entry.inventory.is_some() {
                self.parts.ingest.remove(entry.id);
            }
            info!(service_id = entry.id.0, rule = %entry.rule.key, "rule removed");
        }
        let needed: HashSet<SocketAddr> = entries.iter().map(|entry| entry.rule.key.listen()).collect();
        let unneeded: Vec<SocketAddr> = self.listeners.keys().copied().filter(|at| !needed.contains(at)).collect();
        for listen in unneeded {
            self.listeners.remove(&listen);
            self.parts.shards.unlisten(listen).await;
        }
        self.registry.commit(entries);
        self.forget_waiting();
        for Prepared { entry, events, .. } in prepared {
            match events {
                Events::None => {}
                Events::Start(writer) => self.parts.ingest.add(&entry, *writer),
                Events::Update => self.parts.ingest.update(&entry),
                Events::Stop => self.parts.ingest.remove(entry.id),
            }
            let (service_id, endpoints) = (entry.id.0, entry.rule.endpoints.len());
            info!(service_id, rule = %entry.rule.key, endpoints, "rule in force");
        }
        self.publish();
    }
}

/// Names of the members in which two rules differ, as a readback shows them.
fn differences(old: &Rule, new: &Rule) -> Vec<String> {
    let shown = |rule: &Rule| crate::rules::readback(rule, ServiceId(0), &[]);
    let (old, new) = (shown(old), shown(new));
    let service = "serviceArguments";
    let names = [&old, &new].into_iter().filter_map(|shown| shown[service].as_object()).flat_map(|map| map.keys());
    let mut names: Vec<String> = names.filter(|name| old[service][name] != new[service][name]).cloned().collect();
    if old["endpoints"] != new["endpoints"] {
        names.push("endpoints".to_owned());
    }
    names.sort_unstable();
    names.dedup();
    names
}
