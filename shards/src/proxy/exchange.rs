//! One request and its answer: which service, which endpoint, and what is done when an endpoint fails.

mod outcome;

use std::cell::Cell;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Proxy;
use super::answer::{BROKEN_EVENTS, Refusal};
use super::claiming::Claiming;
use super::client::{Client, Request, is_ours};
use super::evidence;
use super::handed;
use super::known::Known;
use super::legs::Errand;
use super::models;
use super::outgoing::{ID_HEADER, Outgoing, announce_length, id_of, push_line};
use super::relay::{self, CLOSE_LINE, Fault, Heard, Progress, Terms};
use super::routes::{LocalService, Pick, RequestView, Routes};
use super::score::{self, Score};
use super::upstream::{Pool, Upstream};
use super::watch::Interrupt;
use crate::belief::{self, NamedRank};
use crate::ids::{EndpointIndex, Rank, ShardId};
use crate::load::Reservation;
use crate::prompt::Api;
use crate::rates::FirstByte;
use crate::route::{self, Chooser, Decision, Evidence, Facts, Pin};
use crate::service::{Endpoint, Service, add, count};
use crate::usage::Tail;

/// Endpoints that one request may find dead; beyond it the request is refused. Each costs up to a connect time-out.
const CONNECTS_MAX: usize = 16;

/// Times a request may be sent: on a kept connection that turns out to be dead, on a fresh one to the same endpoint that
/// dies with its process, and to another endpoint. Not more, or a request that kills engines would kill them all.
const SENDS_MAX: u32 = 3;

/// The header by which vLLM and SGLang let a request choose its rank.
pub(super) const RANK_HEADER: &str = "x-data-parallel-rank";

/// Bytes of a request's body per token of its prompt, where nobody has counted.
const BYTES_PER_TOKEN: u64 = 4;

/// What becomes of the client connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It may carry another request.
    Request,
    /// It is closed.
    Close,
}

/// Serves one request to the end of its answer.
pub async fn exchange(proxy: &Proxy, client: &mut Client, mut request: Request, listen: SocketAddr) -> Next {
    if request.head.request_id.is_none() {
        request.made_id = Some(proxy.request_ids.next());
    }
    let routes = proxy.routes();
    let view = RequestView::new(&request.head, &request.bytes);
    if routes.asks_body(listen, &view)
        && let Err(interrupt) = client.guard(None, view.look_through(&proxy.ticket)).await
    {
        tracing::debug!(?interrupt, "a client left before its request was read");
        return Next::Close;
    }
    let refusal = if request.head.upgrade {
        Refusal::NotImplemented("this gateway does not switch protocols".into())
    } else {
        match routes.pick(listen, &view) {
            Pick::Service(local) => {
                if models::is_asked(&view) {
                    return models::answer(proxy, client, &local, &view).await;
                }
                return serve(proxy, client, request, &routes, &local).await;
            }
            Pick::NoRules => Refusal::NoRules,
            Pick::NoRoute => Refusal::NoRoute,
            Pick::NoModel(model) => Refusal::ModelUnavailable(model),
        }
    };
    refuse(proxy, client, &request, &refusal).await
}

async fn serve(
    proxy: &Proxy,
    client: &mut Client,
    mut request: Request,
    routes: &Routes,
    local: &LocalService,
) -> Next {
    let view = RequestView::new(&request.head, &request.bytes);
    let score = match client.guard(None, score::score(proxy, local, &routes.models, &view)).await {
        Ok(score) => score,
        Err(interrupt) => return left(local, proxy, interrupt),
    };
    let resendable = is_resendable(&view);
    let api = Api::of(view.method(), view.path());
    let known = Known::of(proxy, &local.service, &view, client.address());
    let known = match client.guard(None, known).await {
        Ok(known) => known,
        Err(interrupt) => return left(local, proxy, interrupt),
    };
    let (named_rank, skips_cache) = (view.named_rank(), view.skips_cache());
    if local.service.pd.is_some()
        && let Err(interrupt) = client.guard(None, view.look_through(&proxy.ticket)).await
    {
        return left(local, proxy, interrupt);
    }
    let stream = local.service.pd.is_some() && view.body().is_some_and(|body| body.stream);
    announce_length(&mut request);
    let mut attempt = Attempt {
        proxy,
        local,
        request,
        api,
        known,
        named_rank,
        skips_cache,
        evidence: None,
        sends: 0,
        resendable,
        began: false,
        status: 0,
        tail: None,
        uncounted: Cell::default(),
        seed_tick: Cell::default(),
        seed_spent: Cell::default(),
    };
    let outcome = match &local.service.pd {
        Some(pd) => Errand { attempt: &attempt, pd, score: &score, stream }.carry(client).await,
        None => attempt.run(client, &score).await,
    };
    attempt.close(&score);
    let request = attempt.request;
    end(proxy, local, client, request, outcome).await
}

/// What a request leaves behind.
async fn end(
    proxy: &Proxy,
    local: &LocalService,
    client: &mut Client,
    request: Request,
    outcome: Result<Next, Failure>,
) -> Next {
    let stats = local.service.shared.stats_of(proxy.id);
    match outcome {
        Ok(next) => {
            proxy.buffers.give_back(request.bytes);
            next
        }
        Err(Failure::Refuse(refusal)) => {
            if refusal == Refusal::NoHealthyBackend {
                count(&stats.no_healthy_backend);
            }
            count(&stats.responses[usize::from(refusal.status() / 100)]);
            refuse(proxy, client, &request, &refusal).await
        }
        Err(Failure::Close) => Next::Close,
    }
}

/// A client left, or was cut, before its request was sent.
fn left(local: &LocalService, proxy: &Proxy, interrupt: Interrupt) -> Next {
    if interrupt == Interrupt::ClientGone {
        count(&local.service.shared.stats_of(proxy.id).client_gone);
    }
    Next::Close
}

async fn refuse(proxy: &Proxy, client: &mut Client, request: &Request, refusal: &Refusal) -> Next {
    let keep_alive = request.head.keep_alive && !proxy.draining.get();
    let mut lines = Vec::new();
    if let Some(id) = id_of(request) {
        push_line(&mut lines, ID_HEADER, id);
    }
    let answer = refusal.to_bytes_with(keep_alive, request.head.is_head, &lines);
    match client.write(answer, 0, proxy.limits.write_timeout).await {
        Ok(_) if keep_alive => Next::Request,
        _ => Next::Close,
    }
}

/// Whether the request may be sent again after an endpoint took it and died without a byte of an answer. Inference
/// changes nothing at an engine, and neither do reads.
fn is_resendable(view: &RequestView<'_>) -> bool {
    matches!(view.method(), "GET" | "HEAD" | "OPTIONS") || Api::of(view.method(), view.path()).is_some()
}

/// Why there is no answer from an endpoint.
pub(super) enum Failure {
    /// The gateway answers instead.
    Refuse(Refusal),
    /// The client's connection is closed: it left, or its answer broke.
    Close,
}

/// Why no connection was tried to its end.
pub(super) enum NotOpened {
    /// For want of something here; what the client is told.
    OutOfSockets(Refusal),
    /// The client left, or is cut.
    Interrupted(Interrupt),
}

/// Opens a connection; none when the endpoint refused it, which takes the endpoint out.
pub(super) async fn open(
    proxy: &Proxy,
    local: &LocalService,
    client: &mut Client,
    endpoint: &Endpoint,
    pool: &Pool,
) -> Result<Option<Upstream>, NotOpened> {
    let error = match client.guard(Some(proxy.limits.connect_timeout), pool.connect()).await {
        Ok(Ok(upstream)) => return Ok(Some(upstream)),
        Ok(Err(error)) if is_ours(&error) => {
            tracing::error!(%error, endpoint = %endpoint.address, "no connection could be opened, for want of resources here");
            return Err(NotOpened::OutOfSockets(Refusal::BackendUnreachable("this gateway is out of sockets")));
        }
        Ok(Err(error)) => error,
        Err(Interrupt::TimedOut) => io::ErrorKind::TimedOut.into(),
        Err(interrupt) => return Err(NotOpened::Interrupted(interrupt)),
    };
    pool.clear();
    endpoint.shared.connect_failures.fetch_add(1, Ordering::Relaxed);
    count(&endpoint.shared.stats_of(proxy.id).connect_failures);
    count(&local.service.shared.stats_of(proxy.id).connect_failovers);
    let breaker = local.service.proxy.breaker_failures;
    if breaker > 0 && endpoint.shared.connect_failures.load(Ordering::Relaxed) >= breaker {
        trip(proxy.id, &local.service, endpoint, "so many connects in a row failed");
    }
    if endpoint.shared.mark_down() {
        tracing::warn!(%error, endpoint = %endpoint.address, rule = local.service.id.0,
            "endpoint refused a connection and is out until a probe finds it again");
    }
    Ok(None)
}

/// Why a breaker opens that counts answers.
pub(super) const ERRORS_IN_A_ROW: &str = "so many answers in a row were errors of its own";

/// Opens an endpoint's breaker.
pub(super) fn trip(shard: ShardId, service: &Service, endpoint: &Endpoint, why: &str) {
    if endpoint.shared.trip() {
        count(&endpoint.shared.stats_of(shard).trips);
        tracing::warn!(endpoint = %endpoint.address, rule = service.id.0, "breaker open: {why}");
    }
}

/// What a request counts for at the endpoint that it is sent to.
struct Sent<'a> {
    reservation: &'a mut Reservation,
    /// Tokens of its prompt that the endpoint will have to compute.
    uncached: u64,
    /// The rank that the endpoint is told to use.
    rank: Option<Rank>,
    /// The ids of its prompt as a JSON list, where the rule hands them on.
    ids: Option<&'a [u8]>,
    /// What its decision stood on.
    score: &'a Score,
}

impl Sent<'_> {
    /// The answer to a request sent at a time has begun or ended. When it begins, its prompt waits no longer, and the
    /// endpoint's speed may be learned from how long it did.
    fn progress(&mut self, progress: Progress, service: &Service, endpoint: &Endpoint, teaches: bool, at: Instant) {
        if progress == Progress::Ended {
            return self.reservation.end();
        }
        self.reservation.first_byte();
        if teaches {
            let (uncached_tokens, ahead) = (self.uncached, self.reservation.ahead());
            let answer = FirstByte { uncached_tokens, ahead, elapsed: at.elapsed() };
            service.shared.rates.learn(&endpoint.shared.slowness, &answer);
        }
    }
}

/// A request on its way to an endpoint that answers it.
pub(super) struct Attempt<'a> {
    pub(super) proxy: &'a Proxy,
    pub(super) local: &'a LocalService,
    pub(super) request: Request,
    /// What the request asks for, where it has a prompt.
    pub(super) api: Option<Api>,
    /// What is known of it beside its prompt's blocks.
    pub(super) known: Known,
    /// What the client says of the rank that is to serve it.
    pub(super) named_rank: NamedRank,
    /// The engine looks up nothing of the prompt in its cache.
    pub(super) skips_cache: bool,
    /// Why the request goes where it goes, where somebody wants to know.
    evidence: Option<String>,
    /// Times the request was sent.
    sends: u32,
    resendable: bool,
    /// The answer's head has come.
    began: bool,
    /// Its status.
    status: u16,
    /// The end of its body, where somebody wants to know what it says.
    tail: Option<Tail>,
    /// The decision that was carried out last, until it is counted.
    uncounted: Cell<Option<Decision>>,
    /// The number among the seed's hits that a decision has drawn.
    seed_tick: Cell<Option<u64>>,
    /// A decision that has that number was carried out.
    seed_spent: Cell<bool>,
}

impl Attempt<'_> {
    async fn run(&mut self, client: &mut Client, score: &Score) -> Result<Next, Failure> {
        let mut tried: Vec<EndpointIndex> = Vec::new();
        loop {
            let Some(decision) = self.decide(score, &tried) else {
                return Err(Failure::Refuse(self.nobody()));
            };
            let endpoint = &self.local.service.endpoints[decision.endpoint.index()];
            let pool = &self.local.pools[decision.endpoint.index()];
            let rank = self.conveyed_rank(&decision);
            if self.local.service.proxy.route_header || self.request.head.explain {
                self.evidence = Some(evidence::text(&self.local.service, score, &decision, rank, tried.len()));
            }
            // Before anything is awaited: the next decision must see this one.
            let uncached = self.uncached_tokens(score, &decision);
            let mut reservation = self.proxy.loads.reserve(self.proxy.id, endpoint.shared.slot, uncached);
            let mut connected = match pool.take(self.proxy.limits.upstream_idle_max) {
                Some(upstream) => Some(upstream),
                None => self.connect(client, endpoint, pool).await?,
            };
            if connected.is_some() {
                self.dispatched(&decision);
                self.known.sent(self.proxy, self.local, Pin { prefill: decision.endpoint, decode: None });
            }
            while let Some(upstream) = connected.take() {
                let reused = upstream.reused;
                let sent = Sent { reservation: &mut reservation, uncached, rank, ids: score.ids(), score };
                match self.forward(client, endpoint, pool, upstream, sent).await {
                    Ok(next) => {
                        if self.status == 200 {
                            self.predict(score, decision.endpoint, rank);
                            self.compare_usage(score, decision.endpoint, rank);
                        }
                        drop(reservation);
                        return Ok(next);
                    }
                    Err(Fault::Died) if self.resendable && self.sends < SENDS_MAX => {
                        pool.clear();
                        if reused {
                            // The endpoint may just have closed a connection that was idle for too long.
                            connected = self.connect(client, endpoint, pool).await?;
                        }
                    }
                    Err(fault) => return Err(self.failure(fault)),
                }
            }
            tried.push(decision.endpoint);
            if tried.len() >= CONNECTS_MAX {
                return Err(Failure::Refuse(self.nobody()));
            }
        }
    }

    pub(super) fn decide(&self, score: &Score, tried: &[EndpointIndex]) -> Option<Decision> {
        // Nothing is awaited while it is borrowed.
        let mut turn = self.local.turn.borrow_mut();
        let mut chooser = Chooser { shard: self.proxy.id, loads: &self.proxy.loads, turn: &mut turn };
        let turn = self.proxy.turns.get();
        self.proxy.turns.set(turn.wrapping_add(1));
        let evidence = score.evidence();
        let believed = match evidence {
            Evidence::Scored { prompt_tokens, runs } => {
                belief::believed(&self.local.service, prompt_tokens, runs, self.named_rank, turn)
            }
            Evidence::None(_) => None,
        };
        let evidence = match (evidence, &believed) {
            (Evidence::Scored { prompt_tokens, .. }, Some(runs)) => Evidence::Scored { prompt_tokens, runs },
            (evidence, _) => evidence,
        };
        let body = &self.request.bytes[self.request.head.len..];
        let claiming = Claiming::of(&self.proxy.claims, &self.local.service, score, body);
        let claims = claiming.as_ref().map(Claiming::found).unwrap_or_default();
        let speculative_tokens = self.guessed_tokens();
        let facts = Facts {
            speculative_tokens,
            claims: &claims,
            seed_tick: self.seed_tick.get(),
            ..self.known.facts(self.proxy, self.local, evidence, tried)
        };
        let decision = route::decide(&self.local.service, &facts, &mut chooser)?;
        self.seed_tick.set(decision.seed_tick.or(self.seed_tick.get()));
        // Before anything is awaited: the next decision must see it.
        claiming.inspect(|claiming| claiming.claim(&decision));
        Some(decision)
    }

    /// What is said when no endpoint is left.
    fn nobody(&self) -> Refusal {
        if self.sends > 0 {
            Refusal::BackendUnreachable("the endpoint ended the connection without an answer")
        } else {
            Refusal::NoHealthyBackend
        }
    }

    /// A new connection; none when the endpoint refused it, which takes the endpoint out.
    async fn connect(
        &self,
        client: &mut Client,
        endpoint: &Endpoint,
        pool: &Pool,
    ) -> Result<Option<Upstream>, Failure> {
        open(self.proxy, self.local, client, endpoint, pool).await.map_err(|error| match error {
            NotOpened::OutOfSockets(refusal) => Failure::Refuse(refusal),
            NotOpened::Interrupted(interrupt) => self.failure(Fault::Client(interrupt)),
        })
    }

    async fn forward(
        &mut self,
        client: &mut Client,
        endpoint: &Endpoint,
        pool: &Pool,
        mut upstream: Upstream,
        mut sent: Sent<'_>,
    ) -> Result<Next, Fault> {
        let proxy = self.proxy;
        self.sends += 1;
        let at = Instant::now();
        count(&endpoint.shared.stats_of(proxy.id).requests);
        let outgoing = self.outgoing(&sent, endpoint);
        let bytes = std::mem::take(&mut self.request.bytes);
        let write = client.guard(Some(proxy.limits.write_timeout), outgoing.send(&mut upstream, bytes)).await;
        let (written, buffer, bytes) = write.map_err(|interrupt| match interrupt {
            Interrupt::TimedOut => Fault::FirstByteTimeout,
            interrupt => Fault::Client(interrupt),
        })?;
        proxy.buffers.give_back(buffer);
        self.request.bytes = bytes;
        let mut added = self.lines_for_client();
        let headroom = added.len() + CLOSE_LINE.len();
        // An endpoint that stopped reading may have answered all the same: what comes decides, not the write.
        let is_head = self.request.head.is_head;
        let begun = relay::begin(client, &mut upstream, is_head, headroom, &proxy.limits, &proxy.buffers).await?;
        if endpoint.shared.connect_failures.load(Ordering::Relaxed) != 0 {
            endpoint.shared.connect_failures.store(0, Ordering::Relaxed);
        }
        self.began = true;
        self.status = begun.head.status;
        self.settle(sent.score);
        if endpoint.shared.answered(self.status, self.local.service.proxy.breaker_errors) {
            trip(proxy.id, &self.local.service, endpoint, ERRORS_IN_A_ROW);
        }
        let stats = self.local.service.shared.stats_of(proxy.id);
        count(&stats.responses[usize::from(begun.head.status / 100).min(5)]);
        let counters = endpoint.shared.stats_of(proxy.id);
        add(&counters.bytes_in, self.request.bytes.len() as u64);
        let head = &self.request.head;
        let ends_with_connection = begun.head.body == crate::http::ResponseBody::UntilClose;
        let close = !head.keep_alive || proxy.draining.get() || ends_with_connection;
        if begun.head.has_request_id {
            // The endpoint says it itself.
            added.drain(..self.id_line_len());
        }
        if close {
            added.extend_from_slice(CLOSE_LINE);
        }
        let terms =
            Terms { added: &added, is_http10: head.is_http10, broken: BROKEN_EVENTS, ends_with: None, stats: counters };
        self.tail = self.wants_usage(endpoint).then(Tail::default);
        let tail = self.tail.as_mut();
        // Another answer comes whole when it is complete, and a refusal at once.
        let teaches = self.api.is_some() && begun.head.status == 200 && begun.head.event_stream;
        let heard =
            Heard { progress: |progress| sent.progress(progress, &self.local.service, endpoint, teaches, at), tail };
        let reusable = relay::relay(client, &mut upstream, begun, terms, heard, &proxy.limits, &proxy.buffers).await?;
        if reusable && written.is_ok() && !head.is_http10 {
            pool.put(upstream, proxy.limits.upstream_idle_connections_max);
        }
        Ok(if close { Next::Close } else { Next::Request })
    }

    /// What the endpoint is sent: the client's body as it came, or with the ids of its prompt, where the rule hands them
    /// on and the endpoint's engine takes them.
    fn outgoing(&self, sent: &Sent<'_>, endpoint: &Endpoint) -> Outgoing {
        let (lines, buffer) = (self.lines_for_endpoint(sent.rank), self.proxy.buffers.small());
        let list = sent.ids.filter(|_| endpoint.shared.takes_ids());
        let body = &self.request.bytes[self.request.head.len..];
        match list.and_then(|list| handed::with_ids(self.local.service.engine, body, list)) {
            Some(body) => Outgoing::with_body(&self.request, &lines, &body, buffer),
            None => Outgoing::new(&self.request, &lines, buffer),
        }
    }

    /// The rank that the endpoint is told by a header; none where it has but one, follows no header, or the client names one.
    pub(super) fn conveyed_rank(&self, decision: &Decision) -> Option<Rank> {
        let service = &self.local.service;
        let several = service.kv.as_ref().is_some_and(|kv| kv.ranks > 1);
        let follows = several && service.endpoints[decision.endpoint.index()].shared.conveys_rank();
        decision.rank.filter(|_| follows && self.named_rank == NamedRank::No)
    }

    /// Lines of the gateway's own in the head that the endpoint gets.
    fn lines_for_endpoint(&self, rank: Option<Rank>) -> Vec<u8> {
        let mut lines = Vec::new();
        if let Some(id) = &self.request.made_id {
            push_line(&mut lines, ID_HEADER, id);
        }
        if let Some(Rank(rank)) = rank {
            push_line(&mut lines, RANK_HEADER, rank);
        }
        lines
    }

    /// Lines of the gateway's own in the head that the client gets: the id's comes first.
    fn lines_for_client(&self) -> Vec<u8> {
        let mut lines = Vec::new();
        if let Some(id) = id_of(&self.request) {
            push_line(&mut lines, ID_HEADER, id);
        }
        if let Some(evidence) = &self.evidence {
            push_line(&mut lines, evidence::HEADER, evidence);
        }
        lines
    }

    /// Bytes of the line that says the id.
    fn id_line_len(&self) -> usize {
        id_of(&self.request).map_or(0, |id| ID_HEADER.len() + ": ".len() + id.len() + "\r\n".len())
    }

    /// Tokens of the prompt that the endpoint will have to compute: where the prompt is not known, as many as its bytes
    /// usually are.
    pub(super) fn uncached_tokens(&self, score: &Score, decision: &Decision) -> u64 {
        match score {
            Score::Runs { prompt_tokens, .. } => {
                prompt_tokens.saturating_sub(decision.hit_tokens + decision.claimed_tokens)
            }
            Score::NotAsked | Score::Miss(_) => self.guessed_tokens(),
        }
    }

    /// Tokens of the prompt, exact or as far as its bytes tell.
    pub(super) fn prompt_tokens(&self, score: &Score) -> u64 {
        match score {
            Score::Runs { prompt_tokens, .. } => *prompt_tokens,
            Score::NotAsked | Score::Miss(_) => self.guessed_tokens(),
        }
    }

    /// Tokens of the prompt as far as its bytes tell; 0 where the request has none.
    fn guessed_tokens(&self) -> u64 {
        let body = self.request.bytes.len().saturating_sub(self.request.head.len);
        self.api.map_or(0, |_| body as u64 / BYTES_PER_TOKEN)
    }

    fn failure(&self, fault: Fault) -> Failure {
        let stats = self.local.service.shared.stats_of(self.proxy.id);
        if matches!(fault, Fault::Client(_)) && !self.began {
            count(&stats.responses[0]);
        }
        match fault {
            Fault::Client(Interrupt::ClientGone | Interrupt::TimedOut) => count(&stats.client_gone),
            Fault::Client(Interrupt::Cut | Interrupt::CloseIdle | Interrupt::OtherLeg) => {}
            Fault::Broken => count(&stats.broken_answers),
            Fault::Died => {
                return Failure::Refuse(Refusal::BackendUnreachable(
                    "the endpoint ended the connection without an answer",
                ));
            }
            Fault::Malformed(reason) => return Failure::Refuse(Refusal::BackendUnreachable(reason)),
            Fault::FirstByteTimeout => return Failure::Refuse(Refusal::FirstByteTimeout),
        }
        Failure::Close
    }
}
