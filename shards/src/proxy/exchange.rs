//! One request and its answer: which service, which endpoint, and what is done when an endpoint fails.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Proxy;
use super::answer::Refusal;
use super::client::{Client, Request, is_ours};
use super::handed;
use super::models;
use super::relay::{self, Fault, Heard, Terms};
use super::routes::{LocalService, Pick, RequestView, Routes};
use super::score::{self, Score};
use super::upstream::{Pool, Upstream};
use super::watch::Interrupt;
use crate::http::{RequestBody, RequestHead, edit};
use crate::ids::EndpointIndex;
use crate::load::Reservation;
use crate::predictions::PromptKind;
use crate::prompt::Api;
use crate::rates::FirstByte;
use crate::route::{self, Chooser, Decision, Facts, Tier};
use crate::service::{Endpoint, count};
use crate::usage::Tail;

/// Endpoints that one request may find dead; beyond it the request is refused. Each costs up to a connect time-out.
const CONNECTS_MAX: usize = 16;

/// Times a request may be sent: on a kept connection that turns out to be dead, on a fresh one to the same endpoint that
/// dies with its process, and to another endpoint. Not more, or a request that kills engines would kill them all.
const SENDS_MAX: u32 = 3;

/// Bytes of a request's body per token of its prompt, where nobody has counted.
const BYTES_PER_TOKEN: u64 = 4;

/// Bytes of a body that are searched for a system message and tools, for a diagnosis.
const PARTS_SOUGHT: usize = 16 * 1024;

/// What becomes of the client connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It may carry another request.
    Request,
    /// It is closed.
    Close,
}

/// Serves one request to the end of its answer.
pub async fn exchange(proxy: &Proxy, client: &mut Client, request: Request, listen: SocketAddr) -> Next {
    let routes = proxy.routes();
    let view = RequestView::new(&request.head, &request.bytes);
    if routes.asks_body(listen, &request.head)
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
                if local.service.pd.is_some() {
                    let refusal =
                        Refusal::NotImplemented("prefill and decode on separate endpoints are not built yet".into());
                    return refuse(proxy, client, &request, &refusal).await;
                }
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

async fn serve(proxy: &Proxy, client: &mut Client, request: Request, routes: &Routes, local: &LocalService) -> Next {
    let stats = local.service.shared.stats_of(proxy.id);
    let view = RequestView::new(&request.head, &request.bytes);
    let score = match client.guard(None, score::score(proxy, local, &routes.models, &view)).await {
        Ok(score) => score,
        Err(interrupt) => {
            if interrupt == Interrupt::ClientGone {
                count(&stats.client_gone);
            }
            return Next::Close;
        }
    };
    let resendable = is_resendable(&view);
    // Asked now: the head is edited before it is sent.
    let api = Api::of(view.method(), view.path());
    let mut attempt =
        Attempt { proxy, local, request, api, from: None, sends: 0, resendable, began: false, status: 0, tail: None };
    let outcome = attempt.run(client, &score).await;
    let request = attempt.request;
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

async fn refuse(proxy: &Proxy, client: &mut Client, request: &Request, refusal: &Refusal) -> Next {
    let keep_alive = request.head.keep_alive && !proxy.draining.get();
    let answer = refusal.to_bytes(keep_alive, request.head.is_head);
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
enum Failure {
    /// The gateway answers instead.
    Refuse(Refusal),
    /// The client's connection is closed: it left, or its answer broke.
    Close,
}

/// What a request counts for at the endpoint that it is sent to.
struct Sent<'a> {
    reservation: &'a mut Reservation,
    /// Tokens of its prompt that the endpoint will have to compute.
    uncached: u64,
    /// The ids of its prompt as a JSON list, where the rule hands them on.
    ids: Option<&'a [u8]>,
}

impl Sent<'_> {
    /// The answer to a request sent at a time has begun: its prompt waits no longer, and the endpoint's speed may be
    /// learned from how long it did.
    fn began(self, endpoint: &Endpoint, teaches: bool, at: Instant) {
        self.reservation.first_byte();
        if teaches {
            let (uncached_tokens, ahead) = (self.uncached, self.reservation.ahead());
            endpoint.shared.rates.learn(FirstByte { uncached_tokens, ahead, elapsed: at.elapsed() });
        }
    }
}

/// A request on its way to an endpoint that answers it.
struct Attempt<'a> {
    proxy: &'a Proxy,
    local: &'a LocalService,
    request: Request,
    /// What the request asks for, where it has a prompt.
    api: Option<Api>,
    /// Where the forwarded head begins in the request's bytes, once it has been made.
    from: Option<usize>,
    /// Times the request was sent.
    sends: u32,
    resendable: bool,
    /// The answer's head has come.
    began: bool,
    /// Its status.
    status: u16,
    /// The end of its body, where somebody wants to know what it says.
    tail: Option<Tail>,
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
            // Before anything is awaited: the next decision must see this one.
            let uncached = self.uncached_tokens(score, &decision);
            let mut reservation = self.proxy.loads.reserve(self.proxy.id, endpoint.shared.slot, uncached);
            let mut connected = match pool.take(self.proxy.limits.upstream_idle_max) {
                Some(upstream) => Some(upstream),
                None => self.connect(client, endpoint, pool).await?,
            };
            if connected.is_some() {
                self.count_decision(score, &decision);
            }
            while let Some(upstream) = connected.take() {
                let reused = upstream.reused;
                let sent = Sent { reservation: &mut reservation, uncached, ids: score.ids() };
                match self.forward(client, endpoint, pool, upstream, sent).await {
                    Ok(next) => {
                        if self.status == 200 {
                            self.predict(score, decision.endpoint);
                            self.compare_usage(score, decision.endpoint);
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

    fn decide(&self, score: &Score, tried: &[EndpointIndex]) -> Option<Decision> {
        // Nothing is awaited while it is borrowed.
        let mut turn = self.local.turn.borrow_mut();
        let mut chooser = Chooser { shard: self.proxy.id, loads: &self.proxy.loads, turn: &mut turn };
        let facts = Facts { tried, ..Facts::of(score.evidence()) };
        route::decide(&self.local.service, &facts, &mut chooser)
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
        let result = client.guard(Some(self.proxy.limits.connect_timeout), pool.connect()).await;
        let error = match result {
            Ok(Ok(upstream)) => return Ok(Some(upstream)),
            Ok(Err(error)) if is_ours(&error) => {
                tracing::error!(%error, endpoint = %endpoint.address, "no connection could be opened, for want of resources here");
                return Err(Failure::Refuse(Refusal::BackendUnreachable("this gateway is out of sockets")));
            }
            Ok(Err(error)) => error,
            Err(Interrupt::TimedOut) => io::ErrorKind::TimedOut.into(),
            Err(interrupt) => return Err(self.failure(Fault::Client(interrupt))),
        };
        pool.clear();
        endpoint.shared.connect_failures.fetch_add(1, Ordering::Relaxed);
        count(&endpoint.shared.stats_of(self.proxy.id).connect_failures);
        count(&self.local.service.shared.stats_of(self.proxy.id).connect_failovers);
        if endpoint.shared.mark_down() {
            tracing::warn!(%error, endpoint = %endpoint.address, rule = self.local.service.id.0,
                "endpoint refused a connection and is out until a probe finds it again");
        }
        Ok(None)
    }

    async fn forward(
        &mut self,
        client: &mut Client,
        endpoint: &Endpoint,
        pool: &Pool,
        mut upstream: Upstream,
        sent: Sent<'_>,
    ) -> Result<Next, Fault> {
        let proxy = self.proxy;
        self.sends += 1;
        let at = Instant::now();
        count(&endpoint.shared.stats_of(proxy.id).requests);
        let from = *self.from.get_or_insert_with(|| prepare(&mut self.request));
        let handed = self.handed(sent.ids, endpoint, from);
        let is_own = handed.is_none();
        let (bytes, from) = handed.map_or_else(|| (std::mem::take(&mut self.request.bytes), from), |bytes| (bytes, 0));
        let write = client.guard(Some(proxy.limits.write_timeout), upstream.write(bytes, from)).await;
        let (written, bytes) = write.map_err(|interrupt| match interrupt {
            Interrupt::TimedOut => Fault::FirstByteTimeout,
            interrupt => Fault::Client(interrupt),
        })?;
        if is_own {
            self.request.bytes = bytes;
        }
        // An endpoint that stopped reading may have answered all the same: what comes decides, not the write.
        let begun =
            relay::begin(client, &mut upstream, self.request.head.is_head, &proxy.limits, &proxy.buffers).await?;
        if endpoint.shared.connect_failures.load(Ordering::Relaxed) != 0 {
            endpoint.shared.connect_failures.store(0, Ordering::Relaxed);
        }
        self.began = true;
        self.status = begun.head.status;
        let stats = self.local.service.shared.stats_of(proxy.id);
        count(&stats.responses[usize::from(begun.head.status / 100).min(5)]);
        let head = &self.request.head;
        let ends_with_connection = begun.head.body == crate::http::ResponseBody::UntilClose;
        let terms = Terms {
            close: !head.keep_alive || proxy.draining.get() || ends_with_connection,
            is_http10: head.is_http10,
        };
        self.tail = (self.api.is_some() && endpoint.shared.usage.look()).then(Tail::default);
        let tail = self.tail.as_mut();
        // Another answer comes whole when it is complete, and a refusal at once.
        let teaches = self.api.is_some() && begun.head.status == 200 && begun.head.event_stream;
        let heard = Heard { body_began: || sent.began(endpoint, teaches, at), tail };
        let reusable = relay::relay(client, &mut upstream, begun, terms, heard, &proxy.limits, &proxy.buffers).await?;
        if reusable && written.is_ok() && !head.is_http10 {
            pool.put(upstream, proxy.limits.upstream_idle_connections_max);
        }
        Ok(if terms.close { Next::Close } else { Next::Request })
    }

    /// Tokens of the prompt that the endpoint will have to compute: where the prompt is not known, as many as its bytes
    /// usually are.
    fn uncached_tokens(&self, score: &Score, decision: &Decision) -> u64 {
        match score {
            Score::Runs { prompt_tokens, .. } => prompt_tokens.saturating_sub(decision.hit_tokens),
            _ if self.api.is_some() => {
                let body = self.request.bytes.len().saturating_sub(self.request.head.len);
                body as u64 / BYTES_PER_TOKEN
            }
            _ => 0,
        }
    }

    /// The request with the ids of its prompt, where the rule hands them on and the endpoint's engine takes them.
    fn handed(&self, ids: Option<&[u8]>, endpoint: &Endpoint, from: usize) -> Option<Vec<u8>> {
        let list = ids.filter(|_| endpoint.shared.takes_ids())?;
        let Request { bytes, head, .. } = &self.request;
        handed::with_ids(self.local.service.engine, &bytes[from..head.len], &bytes[head.len..], list)
    }

    /// Says what the endpoint that has answered must hold now, for parity by use.
    fn predict(&self, score: &Score, endpoint: EndpointIndex) {
        let Some(reader) = &self.local.reader else { return };
        let predictions = &self.local.service.endpoints[endpoint.index()].shared.predictions;
        if !predictions.wanted() {
            return;
        }
        let body = &self.request.bytes[self.request.head.len..];
        let begins = &body[..body.len().min(PARTS_SOUGHT)];
        let has = |part: &str| begins.windows(part.len()).any(|at| at == part.as_bytes());
        let kind = match self.api {
            Some(Api::ChatCompletions) if has("\"tools\"") || has("\"system\"") => PromptKind::ChatWithParts,
            Some(Api::ChatCompletions) => PromptKind::Chat,
            _ => PromptKind::Completion,
        };
        if let Some(prediction) = score.predict(reader, endpoint, kind) {
            predictions.offer(prediction);
        }
    }

    /// Says what the answer's `usage` proves or denies of the endpoint's blocks.
    fn compare_usage(&self, score: &Score, endpoint: EndpointIndex) {
        let Some(usage) = self.tail.as_ref().and_then(Tail::usage) else { return };
        let statements = &self.local.service.endpoints[endpoint.index()].shared.usage;
        if usage.cached_tokens.is_some() {
            statements.set_tells();
        }
        if statements.wanted()
            && let Some(statement) = score.compare(self.local, endpoint, usage)
        {
            statements.offer(statement);
        }
    }

    fn failure(&self, fault: Fault) -> Failure {
        let stats = self.local.service.shared.stats_of(self.proxy.id);
        if matches!(fault, Fault::Client(_)) && !self.began {
            count(&stats.responses[0]);
        }
        match fault {
            Fault::Client(Interrupt::ClientGone | Interrupt::TimedOut) => count(&stats.client_gone),
            Fault::Client(Interrupt::Cut | Interrupt::CloseIdle) => {}
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

    fn count_decision(&self, score: &Score, decision: &Decision) {
        let service = &self.local.service;
        let Some(kv) = &service.kv else { return };
        if matches!(score, Score::NotAsked) {
            return;
        }
        let knows_blocks = || service.endpoints.iter().any(|e| e.shared.kv_blocks.load(Ordering::Relaxed) > 0);
        if let Some((first, hit)) = score.first_block()
            && service.shared.zero_hits.note(first, hit, kv.zero_hit_every, knows_blocks)
        {
            tracing::warn!(
                rule = service.id.0,
                prompts = kv.zero_hit_every,
                "so many prompts that were sent before hit no cache: see /netlox/v1/config/ai/kv/parity"
            );
        }
        let shard = self.proxy.id;
        if let Some(reason) = decision.miss {
            count(&service.shared.stats_of(shard).misses[reason as usize]);
        }
        if decision.tier == Tier::KvExact {
            let stats = service.endpoints[decision.endpoint.index()].shared.stats_of(shard);
            count(&stats.hits);
            let tokens = stats.hit_tokens.load(Ordering::Relaxed) + decision.hit_tokens;
            stats.hit_tokens.store(tokens, Ordering::Relaxed);
            if decision.spilled_from.is_some() {
                count(&stats.spills);
            }
            if decision.seeded_from.is_some() {
                count(&stats.cold_seeds);
            }
        }
    }
}

/// Edits the head for the endpoint, in place: lines of the client's connection are left out, and a body that came in
/// chunks, decoded by now, is announced by its length. Returns where the head now begins.
fn prepare(request: &mut Request) -> usize {
    let Request { bytes, head } = request;
    if head.body == RequestBody::Chunked {
        announce_length(bytes, head);
    }
    edit::edit_head(bytes, 0, head.len, &head.dropped, b"")
}

/// Writes the body's length over the end of the `Transfer-Encoding` line, and leaves the rest of the line to be dropped.
fn announce_length(bytes: &mut [u8], head: &mut RequestHead) {
    let Some(line) = head.transfer_encoding else { return };
    let length = format!("Content-Length: {}\r\n", bytes.len() - head.len);
    // The shortest such line, "transfer-encoding:chunked", is as long as that of a length of nine digits.
    let start = line.end - length.len();
    assert!(start >= line.start, "a chunked body is below CHUNKED_BYTES_MAX");
    bytes[start..line.end].copy_from_slice(length.as_bytes());
    if let Some(dropped) = head.dropped.iter_mut().find(|dropped| dropped.start == line.start) {
        dropped.end = start;
    }
}
