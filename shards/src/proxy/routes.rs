//! What a shard makes of the tables it is handed: services by address, each with its round-robin position, its reading
//! end of the inventory and its upstream connections.

use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use super::models::ModelsCache;
use super::upstream::{Pool, Pools};
use crate::executor::Ticket;
use crate::http::RequestHead;
use crate::ids::{ServiceId, ShardId};
use crate::inventory::Reader;
use crate::prompt::{BodyScan, BodyView, ModelTable};
use crate::route::Turn;
use crate::service::{PathMatch, Service, Tables};

/// A service as one shard uses it.
pub struct LocalService {
    /// The service.
    pub service: Arc<Service>,
    /// Whose turn it is on this shard, kept over updates.
    pub turn: Rc<RefCell<Turn>>,
    /// Reading end of the inventory, where the service routes by KV cache.
    pub reader: Option<Reader>,
    /// Idle upstream connections, by endpoint.
    pub pools: Vec<Rc<Pool>>,
    /// The union of the endpoints' model lists, for a moment.
    pub models: ModelsCache,
}

/// Bytes of a body looked through in one slice: some ten microseconds.
const SCAN_BYTES: usize = 32 * 1024;

/// The tables of a shard; a request keeps the ones it began with.
pub struct Routes {
    by_address: HashMap<SocketAddr, Vec<Rc<LocalService>>>,
    /// Tokenizers and templates.
    pub models: Arc<ModelTable>,
}

/// Which service a request is for.
pub enum Pick {
    /// This one.
    Service(Rc<LocalService>),
    /// There are no rules on the address.
    NoRules,
    /// No rule has the request's host and path.
    NoRoute,
    /// Rules have the host and path, but none the model (which may be empty: the request names none).
    NoModel(String),
}

/// A request as far as choosing needs it; the body is looked into once, and only if something asks for it.
pub struct RequestView<'a> {
    /// The request's head.
    pub head: &'a RequestHead,
    /// Head and body.
    pub bytes: &'a [u8],
    body: OnceCell<Option<BodyView<'a>>>,
}

impl<'a> RequestView<'a> {
    /// A view of a request whose body has not been looked into.
    #[must_use]
    pub fn new(head: &'a RequestHead, bytes: &'a [u8]) -> Self {
        RequestView { head, bytes, body: OnceCell::new() }
    }

    /// The request's body.
    #[must_use]
    pub fn body_bytes(&self) -> &'a [u8] {
        &self.bytes[self.head.len..]
    }

    /// The body's members; none when it is no JSON object.
    #[must_use]
    pub fn body(&self) -> Option<&BodyView<'a>> {
        self.body.get_or_init(|| BodyView::parse(self.body_bytes())).as_ref()
    }

    /// Looks through the body in slices that give way, so that [`RequestView::body`] has it at hand afterwards.
    pub async fn look_through(&self, ticket: &Ticket) {
        if self.body.get().is_some() || self.body_bytes().len() <= SCAN_BYTES {
            return;
        }
        let ticket = ticket.take().await;
        let mut scan = BodyScan::new(self.body_bytes());
        let view = loop {
            match scan.step(SCAN_BYTES) {
                Some(true) => break Some(scan.into_view()),
                Some(false) => ticket.breathe().await,
                None => break None,
            }
        };
        // Nobody else looks: the view belongs to one task.
        let _first = self.body.set(view);
    }

    /// The model that chooses the rule: `X-Model`, else the body's `model`.
    #[must_use]
    pub fn model(&self) -> Option<&str> {
        match self.head.model {
            Some(span) => std::str::from_utf8(span.of(self.bytes)).ok(),
            None => self.body()?.model.as_deref(),
        }
    }

    fn text(&self, span: crate::http::Span) -> &'a str {
        std::str::from_utf8(span.of(self.bytes)).unwrap_or("")
    }

    /// The method.
    #[must_use]
    pub fn method(&self) -> &'a str {
        self.text(self.head.method)
    }

    /// The path, without query.
    #[must_use]
    pub fn path(&self) -> &'a str {
        self.text(self.head.path)
    }
}

impl Routes {
    /// No rules.
    #[must_use]
    pub fn empty() -> Self {
        Routes { by_address: HashMap::new(), models: Arc::default() }
    }

    /// Compiles tables for a shard, taking over from `before` what outlives them.
    #[must_use]
    pub fn compile(tables: &Tables, before: &Routes, shard: ShardId, pools: &Pools) -> Self {
        let turns: HashMap<ServiceId, &Rc<RefCell<Turn>>> =
            before.services().map(|local| (local.service.id, &local.turn)).collect();
        let local = |service: Arc<Service>| {
            let turn = turns.get(&service.id).map(|turn| Rc::clone(turn));
            Rc::new(LocalService {
                turn: turn.unwrap_or_else(|| Rc::new(RefCell::new(Turn::starting_at(shard)))),
                reader: service.kv.as_ref().map(|kv| kv.inventory.reader()),
                pools: service.endpoints.iter().map(|endpoint| pools.of(endpoint.address)).collect(),
                models: ModelsCache::default(),
                service,
            })
        };
        let by_address = tables.by_address().into_iter();
        Routes {
            by_address: by_address.map(|(at, services)| (at, services.into_iter().map(local).collect())).collect(),
            models: Arc::clone(&tables.models),
        }
    }

    /// All services.
    pub fn services(&self) -> impl Iterator<Item = &Rc<LocalService>> {
        self.by_address.values().flatten()
    }

    /// Whether choosing the service at `listen` hangs on the body of such a request.
    #[must_use]
    pub fn asks_body(&self, listen: SocketAddr, head: &RequestHead) -> bool {
        let asks = |services: &Vec<Rc<LocalService>>| services.iter().any(|local| local.service.model.is_some());
        head.model.is_none() && self.by_address.get(&listen).is_some_and(asks)
    }

    /// Chooses the service for a request that came in at `listen`.
    #[must_use]
    pub fn pick(&self, listen: SocketAddr, request: &RequestView<'_>) -> Pick {
        let Some(services) = self.by_address.get(&listen) else { return Pick::NoRules };
        let mut model_missed = false;
        for local in services {
            let service = &local.service;
            if !host_matches(service.host.as_deref(), request) || !path_matches(service.path.as_ref(), request.path()) {
                continue;
            }
            match service.model.as_deref() {
                Some(model) if request.model() != Some(model) => model_missed = true,
                _ => return Pick::Service(Rc::clone(local)),
            }
        }
        if model_missed { Pick::NoModel(request.model().unwrap_or("").to_owned()) } else { Pick::NoRoute }
    }
}

fn host_matches(wanted: Option<&str>, request: &RequestView<'_>) -> bool {
    let Some(wanted) = wanted else { return true };
    let Some(host) = request.head.host else { return false };
    without_port(request.text(host)).eq_ignore_ascii_case(wanted)
}

/// A host without its port; the colons of an IPv6 address stand in brackets.
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !name.ends_with(':') => {
            if name.contains(':') && !name.ends_with(']') { host } else { name }
        }
        _ => host,
    }
}

fn path_matches(wanted: Option<&PathMatch>, path: &str) -> bool {
    match wanted {
        None => true,
        Some(PathMatch::Prefix(prefix)) => path.starts_with(prefix.as_str()),
        Some(PathMatch::Exact(exact)) => path == exact,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_compared_without_its_port() {
        for (host, expected) in
            [("a", "a"), ("a:80", "a"), ("[::1]:80", "[::1]"), ("[::1]", "[::1]"), ("::1", "::1"), ("a:b", "a:b")]
        {
            assert_eq!(without_port(host), expected);
        }
    }

    #[test]
    fn paths_match_by_prefix_or_whole() {
        let prefix = PathMatch::Prefix("/v1/".into());
        let exact = PathMatch::Exact("/v1/models".into());
        assert!(path_matches(Some(&prefix), "/v1/models") && !path_matches(Some(&prefix), "/v2"));
        assert!(path_matches(Some(&exact), "/v1/models") && !path_matches(Some(&exact), "/v1/models/x"));
        assert!(path_matches(None, ""));
    }
}
