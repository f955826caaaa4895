//! What a decision is told of a request beside what caches hold of its prompt: who sends it, which conversation it belongs
//! to, how it begins, and where such requests went before.

use std::cell::RefCell;
use std::net::IpAddr;
use std::rc::Rc;

use xxhash_rust::xxh3::xxh3_64;

use super::Proxy;
use super::routes::{LocalService, RequestView};
use super::session;
use crate::affinity::{PinTerms, seconds};
use crate::executor::visit_ns;
use crate::ids::EndpointIndex;
use crate::route::{Evidence, Facts, Pin};
use crate::service::{Endpoint, Select, Service};
use crate::trie::{Trie, pieces};

/// What is known of one request; what its service does not ask for is none.
#[derive(Debug, Default)]
pub struct Known {
    /// Hash of the client's address.
    client: u64,
    /// Hash of the prompt's beginning.
    prefix: Option<u64>,
    /// Hash of the conversation's id.
    conversation: Option<u64>,
    /// What its session is remembered by.
    session: Option<u64>,
    /// The prompt's text in pieces, for the tree of texts.
    text: Vec<u64>,
}

/// Whether the service asks for something that stands in the body.
fn asks_body(service: &Service) -> bool {
    let by_user = service.sessions.as_ref().is_some_and(|sessions| sessions.source.is_none());
    by_user || service.select.asks_prefix() || is_cache_aware(service)
}

/// Whether texts that were sent are remembered.
pub fn is_cache_aware(service: &Service) -> bool {
    service.pd.as_ref().is_some_and(|pd| pd.cache_aware)
}

impl Known {
    /// Looks at a request as far as its service asks for.
    pub async fn of(proxy: &Proxy, service: &Service, view: &RequestView<'_>, client: Option<IpAddr>) -> Self {
        let wants_client = matches!(service.select, Select::ClientHash | Select::Persist);
        if asks_body(service) {
            view.look_through(&proxy.ticket).await;
            // What follows finds it looked through.
            let _body = view.body();
        }
        let mut known = Known::default();
        if let Some(address) = client.filter(|_| wants_client) {
            known.client = match address {
                IpAddr::V4(address) => xxh3_64(&address.octets()),
                IpAddr::V6(address) => xxh3_64(&address.octets()),
            };
        }
        if service.sessions.is_some() || service.select.asks_prefix() {
            known.conversation = session::conversation(service, view);
        }
        if let Some(sessions) = &service.sessions {
            let by_client = service.select == Select::Persist && service.pd.is_none();
            let own = known.conversation.filter(|_| !by_client || sessions.source.is_some());
            known.session = own.or_else(|| (by_client && client.is_some()).then_some(known.client));
        }
        if service.select.asks_prefix() && service.pd.is_none() {
            known.prefix = view.body().and_then(|body| body.prefix_hash(service.hashing, known.conversation));
        }
        if is_cache_aware(service) {
            known.text =
                view.body().and_then(|body| body.raw_prompt()).map_or(Vec::new(), |text| pieces(text.as_bytes()));
        }
        known
    }

    /// Where its session was sent before.
    pub fn pin(&self, proxy: &Proxy) -> Option<Pin> {
        self.session.and_then(|key| proxy.affinity.borrow().get(key, now_s()))
    }

    /// As the decision takes it; where sessions and texts went before is looked up now.
    pub fn facts<'a>(
        &self,
        proxy: &Proxy,
        local: &LocalService,
        evidence: Evidence<'a>,
        tried: &'a [EndpointIndex],
    ) -> Facts<'a> {
        let session = self.pin(proxy);
        let trie = local.trie.as_ref().and_then(|trie| trie.borrow().find(&self.text));
        Facts {
            tried,
            client: self.client,
            prefix: self.prefix,
            conversation: self.conversation,
            session,
            trie,
            ..Facts::of(evidence)
        }
    }

    /// The decode endpoint of its session, which has one already, is this one: the request has been sent there.
    pub fn decodes_at(&self, proxy: &Proxy, service: &Service, decode: EndpointIndex) {
        if let (Some(pin), Some(key), Some(sessions)) = (self.pin(proxy), self.session, &service.sessions) {
            let terms = PinTerms { service: service.id, ttl: sessions.ttl, max: sessions.max, now_s: now_s() };
            proxy.affinity.borrow_mut().put(key, Pin { decode: Some(decode), ..pin }, terms);
        }
    }

    /// The pin of its session, which goes on or moves, and the place of its text: the request has been sent there.
    pub fn sent(&self, proxy: &Proxy, local: &LocalService, pin: Pin) {
        let service = &local.service;
        if let (Some(key), Some(sessions)) = (self.session, &service.sessions) {
            let terms = PinTerms { service: service.id, ttl: sessions.ttl, max: sessions.max, now_s: now_s() };
            proxy.affinity.borrow_mut().put(key, pin, terms);
        }
        if let Some(trie) = &local.trie {
            trie.borrow_mut().insert(&self.text, pin.prefill);
        }
    }
}

/// Seconds on the clock of sessions.
fn now_s() -> u32 {
    seconds(visit_ns())
}

/// The tree of a service, with what it has seen of the endpoints' health.
#[derive(Debug)]
pub struct LocalTrie {
    trie: RefCell<Trie>,
    /// Endpoints that were down at the last look.
    down: RefCell<Vec<EndpointIndex>>,
}

impl LocalTrie {
    /// An empty tree for the service, if it remembers texts.
    pub fn of(service: &Service) -> Option<Rc<Self>> {
        is_cache_aware(service).then(|| {
            Rc::new(LocalTrie {
                trie: RefCell::new(Trie::new(service.proxy.trie_nodes_max as usize)),
                down: RefCell::default(),
            })
        })
    }

    /// The tree.
    pub fn borrow(&self) -> std::cell::Ref<'_, Trie> {
        self.trie.borrow()
    }

    /// The tree, to be changed.
    pub fn borrow_mut(&self) -> std::cell::RefMut<'_, Trie> {
        self.trie.borrow_mut()
    }

    /// Forgets what was sent to endpoints that went down since the last look: they may come back empty.
    pub fn look_after(&self, service: &Service) {
        let is_down = |endpoint: &&Endpoint| !endpoint.retired && !endpoint.shared.is_up();
        let now: Vec<_> = service.endpoints.iter().filter(is_down).map(|endpoint| endpoint.shared.index).collect();
        let mut down = self.down.borrow_mut();
        for endpoint in now.iter().filter(|endpoint| !down.contains(endpoint)) {
            self.trie.borrow_mut().forget(*endpoint);
        }
        *down = now;
    }
}
