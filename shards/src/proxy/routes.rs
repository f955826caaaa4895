//! What a shard makes of the tables it is handed: services by address, each with its round-robin position, its reading
//! end of the inventory and its upstream connections.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::known::{LocalTrie, is_cache_aware};
use super::models::ModelsCache;
use super::upstream::{Pool, Pools};
use crate::belief::NamedRank;
use crate::disagg::ladder::Queues;
use crate::executor::Ticket;
use crate::http::RequestHead;
use crate::ids::{Rank, ServiceId, ShardId};
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
    /// Who waits for which prefill endpoint on this shard, kept over updates.
    pub queues: Rc<Queues>,
    /// Where texts were sent on this shard, where the service asks for it; kept over updates.
    pub trie: Option<Rc<LocalTrie>>,
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

    /// The body's members, if something has asked for them before.
    fn body_seen(&self) -> Option<&BodyView<'a>> {
        self.body.get()?.as_ref()
    }

    /// What the client says of the rank that is to serve it. A body that nothing has asked for is not looked into.
    #[must_use]
    pub fn named_rank(&self) -> NamedRank {
        let in_header = self.head.rank.map(|span| self.text(span).trim());
        match in_header.or_else(|| self.body_seen()?.rank) {
            None => NamedRank::No,
            Some(rank) => NamedRank::Yes(rank.parse().ok().map(Rank)),
        }
    }

    /// The body's `user`, if something has looked into the body before.
    #[must_use]
    pub fn user(&self) -> Option<&str> {
        self.body_seen()?.user.as_deref()
    }

    /// Whether the engine looks up nothing of the prompt in its cache, as far as the body has been looked into.
    #[must_use]
    pub fn skips_cache(&self) -> bool {
        self.body_seen().is_some_and(BodyView::skips_cache)
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

    /// The model that is asked for: that of `X-Model`, else the body's `model`.
    #[must_use]
    pub fn model(&self) -> Option<&str> {
        match self.head.model {
            Some(_) => self.header_model(),
            None => self.body()?.model.as_deref(),
        }
    }

    /// The model of `X-Model`.
    fn header_model(&self) -> Option<&'a str> {
        std::str::from_utf8(self.head.model?.of(self.bytes)).ok()
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
        let queues: HashMap<ServiceId, &Rc<Queues>> =
            before.services().map(|local| (local.service.id, &local.queues)).collect();
        let tries: HashMap<ServiceId, &Rc<LocalTrie>> =
            before.services().filter_map(|local| Some((local.service.id, local.trie.as_ref()?))).collect();
        let local = |service: Arc<Service>| {
            let known = tries.get(&service.id).filter(|_| is_cache_aware(&service));
            let waiting = queues.get(&service.id).map(|queues| Rc::clone(queues));
            let turn = turns.get(&service.id).map(|turn| Rc::clone(turn));
            Rc::new(LocalService {
                turn: turn.unwrap_or_else(|| Rc::new(RefCell::new(Turn::starting_at(shard)))),
                reader: service.kv.as_ref().map(|kv| kv.inventory.reader()),
                pools: service.endpoints.iter().map(|endpoint| pools.of(endpoint.address)).collect(),
                queues: waiting.unwrap_or_default(),
                trie: known.map(|trie| Rc::clone(trie)).or_else(|| LocalTrie::of(&service)),
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

    /// What must be done now and then: trees forget what was sent to endpoints that are down, and show their size.
    pub fn look_after(&self, shard: ShardId) {
        for local in self.services() {
            if let Some(trie) = &local.trie {
                trie.look_after(&local.service);
                let nodes = trie.borrow().nodes() as u64;
                local.service.shared.stats_of(shard).trie_nodes.store(nodes, Ordering::Relaxed);
            }
        }
    }

    /// Whether choosing the service of a request that came in at `listen` hangs on its body.
    #[must_use]
    pub fn asks_body(&self, listen: SocketAddr, request: &RequestView<'_>) -> bool {
        let asked = Cell::new(false);
        let ask = || {
            asked.set(true);
            None
        };
        // What comes out of it without the body is of no use.
        let _unsure = self.find(listen, request, ask);
        asked.get()
    }

    /// Chooses the service for a request that came in at `listen`.
    #[must_use]
    pub fn pick(&self, listen: SocketAddr, request: &RequestView<'_>) -> Pick {
        self.find(listen, request, || request.body()?.model.as_deref())
    }

    /// Among the services of the most specific host and path that have one for the request: that of the model in
    /// `X-Model`, else of the body's, else the one for any model. A request that names none, as SGLang's `/generate`
    /// never does, is also for the only service there is.
    fn find<'a>(
        &self,
        listen: SocketAddr,
        request: &RequestView<'_>,
        body_model: impl Fn() -> Option<&'a str>,
    ) -> Pick {
        let Some(services) = self.by_address.get(&listen) else { return Pick::NoRules };
        let matches = |local: &&Rc<LocalService>| {
            let service = &local.service;
            host_matches(service.host.as_deref(), request) && path_matches(service.path.as_ref(), request.path())
        };
        let mut rest = services.iter().filter(matches).peekable();
        if rest.peek().is_none() {
            return Pick::NoRoute;
        }
        let by_header = request.header_model();
        let by_body = OnceCell::new();
        while let Some(first) = rest.peek().copied() {
            let same_place = |local: &&Rc<LocalService>| {
                (&local.service.host, &local.service.path) == (&first.service.host, &first.service.path)
            };
            let group = rest.clone().take_while(same_place);
            let of = |model: Option<&str>| group.clone().find(|local| local.service.model.as_deref() == model);
            let of_body = || {
                group.clone().find(|local| local.service.model.is_some())?;
                of(Some((*by_body.get_or_init(&body_model))?))
            };
            let of_header = by_header.and_then(|model| of(Some(model)));
            let only = || {
                let is_only = group.clone().nth(1).is_none();
                let names_none = by_header.is_none() && by_body.get_or_init(&body_model).is_none();
                (is_only && names_none).then_some(first)
            };
            if let Some(local) = of_header.or_else(of_body).or_else(|| of(None)).or_else(only) {
                return Pick::Service(Rc::clone(local));
            }
            while rest.next_if(same_place).is_some() {}
        }
        Pick::NoModel(by_header.or_else(|| by_body.into_inner().flatten()).unwrap_or("").to_owned())
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
    use crate::http::request::{HeadLimits, parse};

    #[test]
    fn a_host_is_compared_without_its_port() {
        for (host, expected) in
            [("a", "a"), ("a:80", "a"), ("[::1]:80", "[::1]"), ("[::1]", "[::1]"), ("::1", "::1"), ("a:b", "a:b")]
        {
            assert_eq!(without_port(host), expected);
        }
    }

    /// Host, path and model of a rule.
    type Place<'a> = (Option<&'a str>, Option<&'a str>, Option<&'a str>);

    fn pick(rules: &[Place<'_>], request: &str) -> String {
        let listen: SocketAddr = ([127, 0, 0, 1], 80).into();
        let text = |text: &Option<&str>| text.map(str::to_owned);
        let service = |(id, (host, path, model)): (usize, &Place<'_>)| {
            Arc::new(Service {
                host: text(host),
                path: text(path).map(PathMatch::Prefix),
                model: text(model),
                ..Service::plain(ServiceId(id as u32), listen, Vec::new(), 1)
            })
        };
        let services = rules.iter().enumerate().map(service).collect();
        let tables = Tables { services, models: Arc::default() };
        let routes = Routes::compile(&tables, &Routes::empty(), ShardId(0), &Pools::default());
        let limits = HeadLimits { bytes_max: 4096, headers_max: 16 };
        let head = parse(request.as_bytes(), 0, limits).expect("a good head").expect("a whole head");
        match routes.pick(listen, &RequestView::new(&head, request.as_bytes())) {
            Pick::Service(local) => local.service.id.0.to_string(),
            Pick::NoModel(model) => format!("no {model}"),
            Pick::NoRoute => "no route".to_owned(),
            Pick::NoRules => "no rules".to_owned(),
        }
    }

    #[test]
    fn the_header_names_the_model_before_the_body_and_a_rule_for_any_is_last() {
        let request = |header: Option<&str>, body: &str| {
            let header = header.map(|model| format!("X-Model: {model}\r\n")).unwrap_or_default();
            format!("POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 99\r\n{header}\r\n{body}")
        };
        let (a, other) = (r#"{"model":"a"}"#, r#"{"model":"other"}"#);
        let models = [(None, None, Some("a")), (None, None, Some("b"))];
        let with_any = [models[0], models[1], (None, None, None)];
        for (rules, header, body, expected) in [
            (&models[..], None, a, "0"),
            (&models, Some("b"), a, "1"),
            (&models, Some("c"), a, "0"),
            (&models, Some("c"), other, "no c"),
            (&models, None, other, "no other"),
            (&models, None, "no JSON", "no "),
            (&models[..1], None, "{}", "0"),
            (&models[..1], None, other, "no other"),
            (&models[..1], Some("c"), "{}", "no c"),
            (&with_any[1..], None, "{}", "1"),
            (&with_any, Some("c"), a, "0"),
            (&with_any, Some("c"), other, "2"),
            (&with_any, None, "no JSON", "2"),
        ] {
            assert_eq!(pick(rules, &request(header, body)), expected, "{header:?} {body}");
        }
    }

    #[test]
    fn the_most_specific_host_and_path_win_and_pass_on_what_they_have_no_model_for() {
        let rules = [
            (None, None, None),
            (None, Some("/v1"), None),
            (None, Some("/v1/chat"), Some("a")),
            (Some("h"), None, Some("a")),
            (Some("g"), Some("/v1/chat"), Some("b")),
        ];
        let request = |host: &str, path: &str, model: &str| {
            format!("POST {path} HTTP/1.1\r\nHost: {host}\r\nX-Model: {model}\r\n\r\n")
        };
        for (host, path, model, expected) in [
            ("h", "/v1/chat", "a", "3"),
            ("h", "/v1/chat", "b", "1"),
            ("h:80", "/x", "b", "0"),
            ("g", "/v1/chat/x", "b", "4"),
            ("g", "/v1/chat/x", "a", "2"),
            ("i", "/v1/x", "a", "1"),
        ] {
            assert_eq!(pick(&rules, &request(host, path, model)), expected, "{host} {path} {model}");
        }
        assert_eq!(pick(&rules[2..3], &request("h", "/v1", "a")), "no route");
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
