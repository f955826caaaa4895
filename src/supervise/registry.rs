//! Which rules there are, with their numbers and the identity of their endpoints.
//!
//! **Invariant.** A service number is never used again. An endpoint keeps its index and its state as long as its
//! service lives, found by the address or name that the rule gives it; one that leaves the rule keeps its place,
//! retired. An [`Entry`] never changes: a change makes a new one, and nothing is changed before
//! [`Registry::commit`].

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher as _, RandomState};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use shards::ids::{EndpointIndex, ServiceId};
use shards::inventory::{self, ReaderFactory, Writer};
use shards::load::LoadTable;
use shards::service::{EndpointShared, Service, ServiceShared};

use crate::discovery::ServiceFacts;
use crate::ingest::Pool;
use crate::rules::compile::{Inventories, Place, compile};
use crate::rules::{Host, Rule, RuleKey};

use super::slots::Slots;

/// Endpoints that one service may have seen in its life. Beyond it a change is refused: delete and create the rule.
const PLACES_MAX: usize = 8192;
/// Keys an inventory is sized for at most; more still work.
const BLOCKS_EXPECTED_MAX: usize = 4_000_000;

/// One rule in force.
#[derive(Debug)]
pub struct Entry {
    /// Its number.
    pub id: ServiceId,
    /// The rule.
    pub rule: Rule,
    /// Its endpoints and those that left it, by index.
    pub places: Vec<Place>,
    /// Which endpoint of the rule each place was made for.
    identities: Vec<(Host, u16)>,
    /// Its inventory, where it routes by KV cache.
    pub inventory: Option<ReaderFactory>,
    /// What its decode endpoints hold, where it looks at that.
    pub decode_inventory: Option<ReaderFactory>,
    /// What shards route with.
    pub service: Arc<Service>,
    /// State carried over updates.
    pub shared: Arc<ServiceShared>,
    /// What its engines say of themselves.
    pub facts: Arc<ServiceFacts>,
    /// Its `id` in the management API: a UUID, or what its maker named.
    pub uuid: Arc<str>,
    /// Who made it, and may change it.
    pub origin: Origin,
    /// When it was made or last changed.
    pub changed: SystemTime,
}

/// Where a rule came from.
#[derive(Clone, Debug, PartialEq)]
pub enum Origin {
    /// The configuration file, which alone changes or removes it.
    File,
    /// The management API: the body that makes the rule again.
    Api(Arc<serde_json::Value>),
}

impl Origin {
    /// Whether the configuration file has the rule.
    #[must_use]
    pub fn is_file(&self) -> bool {
        matches!(self, Origin::File)
    }
}

/// What stays of a rule when it changes.
#[derive(Clone, Debug)]
struct Standing {
    id: ServiceId,
    uuid: Arc<str>,
    origin: Origin,
    changed: SystemTime,
    shared: Arc<ServiceShared>,
    facts: Arc<ServiceFacts>,
}

impl Entry {
    /// The places of the rule's endpoints, in the order of the rule.
    pub fn in_rule(&self) -> impl Iterator<Item = &Place> {
        let mut places: Vec<&Place> = self.places.iter().filter(|place| place.in_rule.is_some()).collect();
        places.sort_by_key(|place| place.in_rule);
        places.into_iter()
    }

    /// Endpoints that requests may go to and that are known to answer.
    #[must_use]
    pub fn usable(&self) -> usize {
        self.service.endpoints.iter().filter(|one| one.is_candidate() && one.shared.known_since().is_some()).count()
    }

    /// Endpoints that requests may go to though nothing is known of them yet.
    #[must_use]
    pub fn untried(&self) -> usize {
        self.service.endpoints.iter().filter(|one| one.is_candidate() && one.shared.known_since().is_none()).count()
    }

    /// When the rule was made or last changed, or the state of an endpoint of its did.
    #[must_use]
    pub fn updated(&self) -> SystemTime {
        self.in_rule().filter_map(|place| place.shared.known_since()).fold(self.changed, SystemTime::max)
    }

    /// Whether the rule is what this one makes: their `id` is not compared.
    pub(super) fn is_made_by(&self, rule: &Rule) -> bool {
        let mut rule = rule.clone();
        rule.inert.remove("id");
        self.rule == rule
    }

    /// The address of an endpoint that is or was in the rule.
    pub(super) fn address_of(&self, identity: &(Host, u16)) -> Option<SocketAddr> {
        self.identities.iter().position(|known| known == identity).and_then(|index| self.places[index].address)
    }

    /// The same rule with the endpoints' names resolved to other addresses (by endpoint of the rule).
    #[must_use]
    pub(super) fn moved(&self, addresses: &[Option<SocketAddr>]) -> Entry {
        let mut places = self.places.clone();
        for place in &mut places {
            if let Some(at) = place.in_rule {
                place.address = addresses[at];
            }
        }
        Entry::new(self.standing(), self.rule.clone(), places, self.identities.clone(), self.inventories())
    }

    /// The same rule whose engines say something else of themselves.
    #[must_use]
    pub(super) fn learned(&self, facts: ServiceFacts) -> Entry {
        let (rule, places, identities) = (self.rule.clone(), self.places.clone(), self.identities.clone());
        let standing = Standing { facts: Arc::new(facts), ..self.standing() };
        Entry::new(standing, rule, places, identities, self.inventories())
    }

    /// Its tables of blocks.
    pub(super) fn pools(&self) -> impl Iterator<Item = Pool> {
        let prompts = self.inventory.as_ref().map(|_| Pool::Prompts);
        prompts.into_iter().chain(self.decode_inventory.as_ref().map(|_| Pool::Decode))
    }

    /// What they are read by.
    pub(crate) fn inventories(&self) -> Inventories {
        Inventories { prompts: self.inventory.clone(), decode: self.decode_inventory.clone() }
    }

    fn standing(&self) -> Standing {
        Standing {
            id: self.id,
            uuid: Arc::clone(&self.uuid),
            origin: self.origin.clone(),
            changed: self.changed,
            shared: Arc::clone(&self.shared),
            facts: Arc::clone(&self.facts),
        }
    }

    fn new(
        standing: Standing,
        rule: Rule,
        places: Vec<Place>,
        identities: Vec<(Host, u16)>,
        inventories: Inventories,
    ) -> Entry {
        let Standing { id, uuid, origin, changed, shared, facts } = standing;
        let service = Arc::new(compile(&rule, id, &places, Arc::clone(&shared), inventories.clone(), &facts));
        let Inventories { prompts: inventory, decode: decode_inventory } = inventories;
        Entry {
            id,
            rule,
            places,
            identities,
            inventory,
            decode_inventory,
            service,
            shared,
            facts,
            uuid,
            origin,
            changed,
        }
    }
}

/// What a change does to the event subscriptions of one of a service's tables.
#[derive(Debug)]
pub(super) enum Events {
    /// The rule does not and did not look at it.
    None,
    /// It begins to: the writing end of its new inventory.
    Start(Box<Writer>),
    /// It goes on, with possibly other sources.
    Update,
    /// It no longer does.
    Stop,
}

/// A change that is worked out and not in force yet.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) entry: Arc<Entry>,
    /// By table.
    pub(super) events: [(Pool, Events); 2],
    /// State of endpoints that this change added.
    added: Vec<Arc<EndpointShared>>,
    /// The number that a new rule was given.
    number: Option<u32>,
}

/// What a rule that was there before the process started is known by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Remembered {
    pub(super) id: ServiceId,
    pub(super) uuid: Arc<str>,
}

/// Why a rule cannot be taken in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// The very same rule is in force.
    #[error("lbrule-exists error: the rule is there already, without any difference")]
    Exists,
    /// The rule's engines would be of another kind, whose keys are others.
    #[error("lbrule-exist error: cant modify rule kv engine type (delete and recreate)")]
    EngineChanged,
    /// No place left in the load table.
    #[error("no room for more endpoints: delete rules, or wait for their requests to end")]
    Full,
    /// The configuration file's rule was to be changed by someone else.
    #[error(
        "the rule is the configuration file's, which alone changes it: edit the file, and it is taken up at once, or at SIGHUP"
    )]
    FromFile,
    /// The rule's `id` was to be another.
    #[error("lbrule-exist error: cant modify rule id (delete and recreate)")]
    IdChanged,
    /// Another rule has that `id`.
    #[error("lbrule-exist error: another rule exists with this id: leave id out, and one is made up")]
    IdTaken,
    /// The rule's endpoints changed too often.
    #[error("the rule has had {PLACES_MAX} different endpoints: delete and create it")]
    Worn,
}

/// All rules in force.
#[derive(Debug)]
pub(super) struct Registry {
    entries: Vec<Arc<Entry>>,
    next: u32,
    slots: Slots,
    shards: usize,
    /// Most blocks of one endpoint, from which inventories are sized.
    blocks_per_endpoint: usize,
    /// Numbers and ids of rules before the last restart, until the rule is there again.
    remembered: HashMap<RuleKey, Remembered>,
}

impl Registry {
    pub(super) fn new(loads: Arc<LoadTable>, shards: usize, blocks_per_endpoint: usize) -> Self {
        let remembered = HashMap::new();
        Registry { entries: Vec::new(), next: 0, slots: Slots::new(loads), shards, blocks_per_endpoint, remembered }
    }

    /// Takes up what was known before a restart: rules that come again get their numbers again, and new ones get
    /// numbers from `next` on.
    pub(super) fn remember(&mut self, next: u32, remembered: HashMap<RuleKey, Remembered>) {
        self.next = self.next.max(next);
        self.remembered = remembered;
    }

    /// Forgets rules that nobody waits for any more: their numbers stay used.
    pub(super) fn forget_all_but(&mut self, waiting: &HashSet<RuleKey>) {
        self.remembered.retain(|key, _| waiting.contains(key));
    }

    /// The number that the next new rule gets.
    pub(super) fn next(&self) -> u32 {
        self.next
    }

    /// The rules in force, in order of their numbers.
    pub(super) fn entries(&self) -> &[Arc<Entry>] {
        &self.entries
    }

    pub(super) fn find(&self, key: &RuleKey) -> Option<&Arc<Entry>> {
        self.entries.iter().find(|entry| entry.rule.key == *key)
    }

    /// Works out a new rule or a change of one. `addresses` is by endpoint of the rule; rules that the same change
    /// drops are as good as gone.
    pub(super) fn prepare(
        &mut self,
        mut rule: Rule,
        origin: Origin,
        addresses: &[Option<SocketAddr>],
        dropped: &[ServiceId],
    ) -> Result<Prepared, RegistryError> {
        let old = self.find(&rule.key).filter(|entry| !dropped.contains(&entry.id)).cloned();
        let uuid = self.uuid_of(&mut rule, old.as_deref(), dropped)?;
        if let Some(old) = &old {
            check_change(old, &rule, &origin)?;
        }
        let (mut places, mut identities) =
            old.as_ref().map(|old| (old.places.clone(), old.identities.clone())).unwrap_or_default();
        let added = self.place(&rule, addresses, &mut places, &mut identities)?;
        let of_old = |read: fn(&Entry) -> &Option<ReaderFactory>| old.as_deref().and_then(|old| read(old).clone());
        let (prompts, of_prompts) = self.inventory(of_old(|old| &old.inventory), rule.kv.is_some(), &rule);
        let (decode, of_decode) = self.inventory(of_old(|old| &old.decode_inventory), rule.looks_at_decode(), &rule);
        let inventories = Inventories { prompts, decode };
        let events = [(Pool::Prompts, of_prompts), (Pool::Decode, of_decode)];
        let number = if old.is_none() { self.number(&rule.key) } else { None };
        let standing = match old {
            Some(old) => old.standing(),
            None => Standing {
                id: ServiceId(number.unwrap_or(self.remembered.get(&rule.key).map_or(self.next, |known| known.id.0))),
                uuid: Arc::clone(&uuid),
                origin: origin.clone(),
                changed: SystemTime::UNIX_EPOCH,
                shared: Arc::new(ServiceShared::new(self.shards)),
                facts: Arc::default(),
            },
        };
        let standing = Standing { uuid, origin, changed: SystemTime::now(), ..standing };
        let entry = Arc::new(Entry::new(standing, rule, places, identities, inventories));
        Ok(Prepared { entry, events, added, number })
    }

    /// The number of a new rule, counted as used; none where the rule had one before the restart.
    fn number(&mut self, key: &RuleKey) -> Option<u32> {
        if self.remembered.contains_key(key) {
            return None;
        }
        self.next += 1;
        Some(self.next - 1)
    }

    /// The `id` of a rule: what it says, or had, or one made up. It is no part of what a change compares.
    fn uuid_of(&self, rule: &mut Rule, old: Option<&Entry>, dropped: &[ServiceId]) -> Result<Arc<str>, RegistryError> {
        let taken = |id: &str| self.entries.iter().any(|entry| *entry.uuid == *id && !dropped.contains(&entry.id));
        let said = rule.inert.remove("id");
        let said = said.as_ref().and_then(serde_json::Value::as_str).filter(|id| !id.is_empty());
        match (said, old) {
            (Some(said), Some(old)) if *said != *old.uuid => Err(RegistryError::IdChanged),
            (_, Some(old)) => Ok(Arc::clone(&old.uuid)),
            (Some(said), None) if taken(said) => Err(RegistryError::IdTaken),
            (Some(said), None) => Ok(Arc::from(said)),
            (None, None) => Ok(self.remembered.get(&rule.key).map_or_else(mint, |known| Arc::clone(&known.uuid))),
        }
    }

    /// Gives each endpoint of the rule its place, old or new; returns the state of the new ones.
    fn place(
        &mut self,
        rule: &Rule,
        addresses: &[Option<SocketAddr>],
        places: &mut Vec<Place>,
        identities: &mut Vec<(Host, u16)>,
    ) -> Result<Vec<Arc<EndpointShared>>, RegistryError> {
        for place in places.iter_mut() {
            place.in_rule = None;
        }
        let mut added = Vec::new();
        for (at, endpoint) in rule.endpoints.iter().enumerate() {
            let identity = endpoint.identity();
            let place = match identities.iter().position(|known| *known == identity) {
                Some(index) => &mut places[index],
                None => {
                    let Some(place) = self.new_place(places.len()) else {
                        added.iter().for_each(|shared| self.slots.give_back(shared));
                        return Err(if places.len() >= PLACES_MAX { RegistryError::Worn } else { RegistryError::Full });
                    };
                    added.push(Arc::clone(&place.shared));
                    identities.push(identity);
                    places.push(place);
                    places.last_mut().expect("one was pushed")
                }
            };
            place.in_rule = Some(at);
            place.address = addresses[at];
        }
        Ok(added)
    }

    fn new_place(&mut self, index: usize) -> Option<Place> {
        if index >= PLACES_MAX {
            return None;
        }
        let index = EndpointIndex(u16::try_from(index).expect("PLACES_MAX is below 65,536"));
        let slot = self.slots.take()?;
        let shared = Arc::new(EndpointShared::with(self.slots.vitals(slot), index, self.shards));
        Some(Place { address: None, shared, in_rule: None })
    }

    fn inventory(&self, old: Option<ReaderFactory>, wanted: bool, rule: &Rule) -> (Option<ReaderFactory>, Events) {
        match (old, wanted) {
            (None, false) => (None, Events::None),
            (Some(_), false) => (None, Events::Stop),
            (Some(inventory), true) => (Some(inventory), Events::Update),
            (None, true) => {
                let blocks = self.blocks_per_endpoint.saturating_mul(rule.endpoints.len()).min(BLOCKS_EXPECTED_MAX);
                let (writer, readers) = inventory::new(&inventory::Options { blocks_expected: blocks });
                (Some(readers), Events::Start(Box::new(writer)))
            }
        }
    }

    /// Takes prepared changes back, all that were prepared since the last commit.
    pub(super) fn abandon(&mut self, prepared: Vec<Prepared>) {
        for prepared in prepared {
            prepared.added.iter().for_each(|shared| self.slots.give_back(shared));
            self.next = prepared.number.map_or(self.next, |number| self.next.min(number));
        }
    }

    /// What would be in force without the entries of some numbers, and with others in place of their predecessors.
    pub(super) fn with<'a>(
        &self,
        dropped: &[ServiceId],
        put: impl IntoIterator<Item = &'a Arc<Entry>>,
    ) -> Vec<Arc<Entry>> {
        let mut entries: Vec<Arc<Entry>> =
            self.entries.iter().filter(|entry| !dropped.contains(&entry.id)).cloned().collect();
        for entry in put {
            match entries.iter_mut().find(|known| known.id == entry.id) {
                Some(known) => *known = Arc::clone(entry),
                None => entries.push(Arc::clone(entry)),
            }
        }
        entries.sort_by_key(|entry| entry.id);
        entries
    }

    /// Puts entries in force instead of those so far, and gives back the places of the rules that are gone.
    pub(super) fn commit(&mut self, entries: Vec<Arc<Entry>>) {
        let kept: HashSet<ServiceId> = entries.iter().map(|entry| entry.id).collect();
        let before = std::mem::replace(&mut self.entries, entries);
        let gone = before.iter().filter(|entry| !kept.contains(&entry.id));
        for place in gone.flat_map(|entry| &entry.places) {
            self.slots.give_back(&place.shared);
        }
        for entry in &self.entries {
            self.remembered.remove(&entry.rule.key);
        }
    }

    /// Places of the load table in use, from the first on.
    pub(super) fn slots_used(&self) -> usize {
        self.slots.used()
    }

    /// Frees what nothing uses any more. Called now and then.
    pub(super) fn sweep(&mut self) {
        self.slots.sweep();
    }
}

/// Whether a rule may become another: the same again is no change, and keys of another kind of engine are others.
fn check_change(old: &Entry, new: &Rule, origin: &Origin) -> Result<(), RegistryError> {
    let by_file = origin.is_file();
    match old.origin {
        // What is asked for is in force, whoever made it; but the file makes its own what only the API had.
        _ if old.rule == *new && (old.origin.is_file() || !by_file) => Err(RegistryError::Exists),
        Origin::File if !by_file => Err(RegistryError::FromFile),
        _ if old.rule.engine != new.engine => Err(RegistryError::EngineChanged),
        _ => Ok(()),
    }
}

/// A random UUID of version 4.
fn mint() -> Arc<str> {
    // Each state is seeded by the system's random numbers.
    let random = [0u8, 1].map(|half| RandomState::new().hash_one(half));
    let high = (random[0] & !0xf000) | 0x4000;
    let low = (random[1] & (u64::MAX >> 2)) | (1 << 63);
    let text = format!("{high:016x}{low:016x}");
    Arc::from([&text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..]].join("-"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fields::from_json;
    use crate::rules::{KvDefaults, check_request};

    fn rule(port: u16, mode: u8, endpoints: &[u16]) -> Rule {
        let endpoints: Vec<_> = endpoints
            .iter()
            .map(|port| json!({"endpointIP": "10.0.0.1", "targetPort": port, "kvZmqPort": port + 1000}))
            .collect();
        let body = json!({"serviceArguments": {"externalIP": "127.0.0.1", "port": port, "mode": 4, "kvExactMode": mode},
            "endpoints": endpoints});
        let node = from_json(body.to_string().as_bytes()).expect("JSON");
        check_request(&node, &KvDefaults::default()).expect("a right rule").0
    }

    fn apply(registry: &mut Registry, rule: Rule) -> Result<(Arc<Entry>, Events), RegistryError> {
        let addresses: Vec<_> = rule.endpoints.iter().map(|e| format!("10.0.0.1:{}", e.port).parse().ok()).collect();
        let prepared = registry.prepare(rule, Origin::File, &addresses, &[])?;
        registry.commit(registry.with(&[], [&prepared.entry]));
        let [(_, events), _] = prepared.events;
        Ok((prepared.entry, events))
    }

    fn registry(slots: usize) -> Registry {
        Registry::new(Arc::new(LoadTable::new(1, slots)), 1, 1000)
    }

    #[test]
    fn numbers_count_from_zero_and_are_never_used_again() {
        let mut registry = registry(16);
        let ids = |registry: &Registry| registry.entries().iter().map(|e| e.id.0).collect::<Vec<_>>();
        apply(&mut registry, rule(1, 0, &[1])).expect("new");
        apply(&mut registry, rule(2, 0, &[1])).expect("new");
        registry.commit(registry.with(&[ServiceId(1)], []));
        apply(&mut registry, rule(2, 0, &[1])).expect("new");
        apply(&mut registry, rule(1, 0, &[1, 2])).expect("a change");
        assert_eq!(ids(&registry), [0, 2]);
        assert_eq!(apply(&mut registry, rule(1, 0, &[1, 2])).expect_err("no change"), RegistryError::Exists);
    }

    #[test]
    fn endpoints_keep_their_index_over_changes_and_new_ones_are_appended() {
        let mut registry = registry(16);
        let (first, _) = apply(&mut registry, rule(1, 3, &[11, 12, 13])).expect("new");
        let (second, events) = apply(&mut registry, rule(1, 3, &[14, 13, 11])).expect("a change");
        assert!(matches!(events, Events::Update));
        let ports: Vec<_> = second.service.endpoints.iter().map(|e| (e.address.port(), e.retired)).collect();
        assert_eq!(ports, [(11, false), (12, true), (13, false), (14, false)]);
        assert!(Arc::ptr_eq(&first.places[2].shared, &second.places[2].shared));
        assert!(Arc::ptr_eq(&first.shared, &second.shared));
        let order: Vec<_> = second.in_rule().map(|p| p.shared.index.0).collect();
        assert_eq!(order, [3, 2, 0]);
        let (third, _) = apply(&mut registry, rule(1, 3, &[12])).expect("a change");
        assert_eq!(third.places.len(), 4);
        assert!(!third.service.endpoints[1].retired, "an endpoint that returns has its place again");
    }

    #[test]
    fn event_subscriptions_follow_the_rules_mode() {
        let mut registry = registry(16);
        let (entry, events) = apply(&mut registry, rule(1, 0, &[11])).expect("new");
        assert!(matches!(events, Events::None) && entry.inventory.is_none());
        let (entry, events) = apply(&mut registry, rule(1, 3, &[11])).expect("a change");
        assert!(matches!(events, Events::Start(_)) && entry.service.kv.is_some());
        let (entry, events) = apply(&mut registry, rule(1, 0, &[11])).expect("a change");
        assert!(matches!(events, Events::Stop) && entry.service.kv.is_none());
    }

    #[test]
    fn an_engine_of_another_kind_needs_another_rule() {
        let mut registry = registry(16);
        apply(&mut registry, rule(1, 3, &[11])).expect("new");
        let changed = Rule { engine: shards::service::Engine::Sglang, ..rule(1, 3, &[11]) };
        let error = apply(&mut registry, changed).expect_err("the keys would be others");
        assert_eq!(error, RegistryError::EngineChanged);
        assert!(error.to_string().contains("cant modify rule kv engine type (delete and recreate)"));
        assert_eq!(registry.entries()[0].rule.engine, shards::service::Engine::Vllm);
    }

    #[test]
    fn what_engines_say_reaches_the_service_and_stays_over_changes() {
        let mut registry = registry(16);
        let (entry, _) = apply(&mut registry, rule(1, 3, &[11])).expect("new");
        let lora = shards::block::Lora { name: "a".into(), path: None, id: None };
        let adapter = shards::service::Adapter { base: "m".into(), lora };
        let facts = ServiceFacts { adapters: [("a".to_owned(), adapter.clone())].into(), ..ServiceFacts::default() };
        registry.commit(registry.with(&[], [&Arc::new(entry.learned(facts))]));
        let (entry, _) = apply(&mut registry, rule(1, 3, &[11, 12])).expect("a change");
        assert_eq!(entry.service.kv.as_ref().expect("a KV rule").adapters["a"], adapter);
    }

    #[test]
    fn a_rule_without_room_for_its_endpoints_changes_nothing() {
        let mut registry = registry(2);
        apply(&mut registry, rule(1, 0, &[11])).expect("new");
        assert_eq!(apply(&mut registry, rule(2, 0, &[11, 12])).expect_err("no room"), RegistryError::Full);
        assert_eq!(registry.entries().len(), 1);
        registry.sweep();
        apply(&mut registry, rule(2, 0, &[11])).expect("the place came back");
    }

    #[test]
    fn an_endpoint_whose_name_has_no_address_gets_nothing() {
        let mut registry = registry(2);
        let prepared = registry.prepare(rule(1, 0, &[11]), Origin::File, &[None], &[]).expect("new");
        assert!(!prepared.entry.service.endpoints[0].is_candidate());
        let moved = prepared.entry.moved(&["10.0.0.9:11".parse().ok()]);
        assert!(moved.service.endpoints[0].is_candidate());
        assert_eq!(moved.service.endpoints[0].address.to_string(), "10.0.0.9:11");
    }
}
