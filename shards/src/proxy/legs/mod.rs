//! One request through two engines: a prefill leg and a decode leg, sent one after the other or at once, and nothing left
//! running when either fails or the client leaves.
//!
//! ```text
//!  one after the other (NIXL pull, TensorRT-LLM):
//!    client ─▶ P: whole answer ─▶ what it hands over ─▶ D: relayed ─▶ client
//!  at once (NIXL push, SGLang):
//!    client ─▶ P: whole answer, beside ───────────────┐ fails: D is given up, the client is told
//!          └─▶ D: relayed ─▶ client                   ┘ client leaves, D fails: P is given up
//! ```
//!
//! **Invariant.** A leg lives in a future of this request's task, or beside it as the connection's companion: whatever ends
//! the request drops both, and with them their connections, which is how engines learn of it. After the first byte of
//! the decode answer nothing is tried again.
//!
//! Where a rule allows it, a decode endpoint does a request alone that it is sooner done with so; see
//! [`choose_straight`](crate::route::choose_straight).
//!
//! | what goes wrong | before the client has a byte | after |
//! |---|---|---|
//! | a connect is refused | another endpoint, nothing lost | – |
//! | a kept connection was dead | the same endpoint on a fresh one, once | – |
//! | the prefill leg dies or answers 5xx | another endpoint once, then 502 | the stream ends with an error event |
//! | the prefill leg answers 3xx or 4xx | the client gets that | as above |
//! | the prefill leg is too slow | 504 | as above |
//! | the decode leg dies | 502; what it was handed over may be gone | the stream ends with an error event |
//! | the decode leg answers an error | the client gets that | – |
//! | a decode endpoint that does it alone fails, or answers 5xx | both legs do it | the stream ends with an error event |

mod admit;
mod at_once;
mod bypass;
mod in_turn;
mod leg;
mod message;
mod relayed;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Proxy;
use super::answer::Refusal;
use super::client::{Client, Request};
use super::exchange::{self, Attempt, Failure, Next};
use super::score::Score;
use super::watch::Interrupt;
use crate::disagg::refusal::LegRefusal;
use crate::disagg::stats::{LegOutcome, PdStats};
use crate::disagg::{self, Dialect, LegError};
use crate::ids::{EndpointIndex, ShardId};
use crate::load::Reservation;
use crate::prompt::{Api, Outline, Splice, SpliceError};
use crate::rates::FirstByte;
use crate::route::{Decision, Pin, Straight};
use crate::service::{Disagg, Endpoint, Service, count};
use crate::usage::Tail;

/// Prefill legs that one request may see fail before it is refused.
const FAILURES_MAX: u32 = 2;

/// Endpoints that one request may find dead, as in requests with one leg.
const CONNECTS_MAX: usize = 16;

/// Bytes of a body looked through in one slice.
const SCAN_BYTES: usize = 64 * 1024;

/// A request to be carried through its legs.
pub struct Errand<'a> {
    /// The request, with what is known of it; the one-legged way is not gone.
    pub attempt: &'a Attempt<'a>,
    /// How its service parts requests.
    pub pd: &'a Disagg,
    /// What is known of its prompt.
    pub score: &'a Score,
    /// Whether it asks for a stream.
    pub stream: bool,
}

impl Errand<'_> {
    /// Carries the request through.
    ///
    /// # Errors
    /// There is no answer from an endpoint, or it broke.
    pub async fn carry(&self, client: &mut Client) -> Result<Next, Failure> {
        let carried = self.carry_on(client).await;
        // Whatever is left of the other leg ends with the request.
        client.set_companion(None);
        carried
    }

    async fn carry_on(&self, client: &mut Client) -> Result<Next, Failure> {
        let dialect = Dialect::of(self.service().engine, self.pd.push);
        let parting = &self.service().shared.pd_parting;
        let parted =
            dialect.zip(self.attempt.api).filter(|(dialect, api)| dialect.serves(*api) && parting.is_wanted(*api));
        let Some((dialect, api)) = parted else { return self.undivided(client).await };
        let outlined = client.guard(None, self.outline()).await.map_err(|interrupt| self.left(interrupt))?;
        let body = match outlined {
            Ok(body) => body,
            // The engine says what is wrong with it.
            Err(SpliceError::NotAnObject) => return self.undivided(client).await,
            Err(error) => return Err(self.unsplittable(dialect, error.into())),
        };
        if !disagg::can_be_parted(api, &body) {
            return self.undivided(client).await;
        }
        disagg::check_own(dialect, &body).map_err(|error| self.unsplittable(dialect, error))?;
        let total = self.service().shared.pd_total.take(self.pd.ladder.total);
        let Some(_total) = total else {
            count(&self.stats().admission_shed);
            return Err(self.refuse(LegRefusal::TotalReached));
        };
        let task = Task { errand: self, dialect, api, body };
        if let Some(next) = task.straight(client).await? {
            return Ok(next);
        }
        if dialect.is_concurrent() { task.at_once(client).await } else { task.in_turn(client).await }
    }

    /// Looks through the client's body.
    async fn outline(&self) -> Result<Splice<'_>, SpliceError> {
        self.outline_of(&self.request().bytes[self.request().head.len..]).await
    }

    /// Looks through a JSON object in slices.
    async fn outline_of<'b>(&self, object: &'b [u8]) -> Result<Splice<'b>, SpliceError> {
        if object.len() <= SCAN_BYTES {
            return Splice::of(object);
        }
        let ticket = self.proxy().ticket.take().await;
        let mut outline = Outline::new(object);
        while !outline.step(SCAN_BYTES)? {
            ticket.breathe().await;
        }
        Ok(outline.into_splice())
    }

    fn proxy(&self) -> &Proxy {
        self.attempt.proxy
    }

    fn request(&self) -> &Request {
        &self.attempt.request
    }

    fn service(&self) -> &Service {
        &self.attempt.local.service
    }

    fn stats(&self) -> &PdStats {
        &self.service().shared.stats_of(self.proxy().id).pd
    }

    fn endpoint(&self, index: EndpointIndex) -> &Endpoint {
        &self.service().endpoints[index.index()]
    }

    fn refuse(&self, refusal: LegRefusal) -> Failure {
        Failure::Refuse(Refusal::Legs(refusal))
    }

    fn unsplittable(&self, dialect: Dialect, error: LegError) -> Failure {
        if dialect == Dialect::Bootstrap && !matches!(error, LegError::OwnMember(_)) {
            count(&self.stats().sg_oversize_reject);
        }
        self.refuse(LegRefusal::Unsplittable(dialect, error))
    }

    /// The client left, stalled, or is cut, before it had a byte.
    fn left(&self, interrupt: Interrupt) -> Failure {
        let stats = self.service().shared.stats_of(self.proxy().id);
        count(&stats.responses[0]);
        if matches!(interrupt, Interrupt::ClientGone | Interrupt::TimedOut) {
            count(&stats.client_gone);
        }
        Failure::Close
    }

    /// A pair of endpoints has the request, or will have it: what is remembered of that.
    fn sent(&self, decision: &Decision, decode: EndpointIndex) {
        let pin = Pin { prefill: decision.endpoint, decode: Some(decode) };
        self.attempt.known.sent(self.proxy(), self.attempt.local, pin);
    }

    /// The request has been answered well: what that proves of the prefill engine's cache. The decode engine reports the
    /// whole prompt as cached, as that came from the other.
    fn proved(&self, decision: &Decision, prefill_answer: &[u8]) {
        let rank = self.attempt.conveyed_rank(decision);
        self.attempt.predict(self.score, decision.endpoint, rank);
        if self.attempt.wants_usage(self.endpoint(decision.endpoint)) {
            let mut tail = Tail::default();
            tail.push(prefill_answer);
            if let Some(usage) = tail.usage() {
                self.attempt.compare(self.score, decision.endpoint, rank, usage);
            }
        }
    }

    /// An endpoint has answered: its breaker counts how.
    fn heard(&self, endpoint: &Endpoint, status: u16) {
        heard(self.service(), self.proxy().id, endpoint, status);
    }

    /// Whether the client is told where its request went.
    fn explains(&self) -> bool {
        self.service().proxy.route_header || self.request().head.explain
    }
}

/// A request that can be parted.
struct Task<'e, 'a> {
    errand: &'e Errand<'a>,
    dialect: Dialect,
    api: Api,
    body: Splice<'e>,
}

/// See [`Errand::heard`].
fn heard(service: &Service, shard: ShardId, endpoint: &Endpoint, status: u16) {
    endpoint.shared.connect_failures.store(0, Ordering::Relaxed);
    if endpoint.shared.answered(status, service.proxy.breaker_errors) {
        exchange::trip(shard, service, endpoint, exchange::ERRORS_IN_A_ROW);
    }
}

/// Counts one leg, as cancelled unless its outcome was said.
struct Counted {
    service: Arc<Service>,
    shard: ShardId,
    prefill: bool,
    outcome: Cell<LegOutcome>,
}

impl Counted {
    fn begin(errand: &Errand<'_>, prefill: bool) -> Self {
        let service = Arc::clone(&errand.attempt.local.service);
        Counted { service, shard: errand.proxy().id, prefill, outcome: Cell::new(LegOutcome::Cancelled) }
    }

    fn set(&self, outcome: LegOutcome) {
        self.outcome.set(outcome);
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let stats = &self.service.shared.stats_of(self.shard).pd;
        let legs = if self.prefill { &stats.prefill } else { &stats.decode };
        count(&legs[self.outcome.get() as usize]);
    }
}

/// A prefill leg that was dispatched.
struct Dispatched {
    at: Instant,
    uncached: u64,
    budget: Duration,
    reservation: Reservation,
}

impl Dispatched {
    fn new(errand: &Errand<'_>, decision: &Decision) -> Self {
        let endpoint = errand.endpoint(decision.endpoint);
        let uncached = errand.attempt.uncached_tokens(errand.score, decision);
        // Before anything is awaited: the next decision must see this one.
        let reservation = errand.proxy().loads.reserve(errand.proxy().id, endpoint.shared.slot, uncached);
        let ahead = reservation.ahead();
        let tokens = ahead.tokens.saturating_add(uncached);
        let rates = &errand.service().shared.rates;
        let expected = rates.expected_seconds(&endpoint.shared.slowness, tokens, ahead.decode);
        let budget = disagg::prefill_budget(errand.pd.prefill_floor, expected);
        Dispatched { at: Instant::now(), uncached, budget, reservation }
    }

    /// Its answer has come: how long it took, of which the endpoint's speed is learned.
    fn answered(&mut self, service: &Service, index: EndpointIndex, stats: &PdStats) -> Duration {
        let elapsed = self.at.elapsed();
        let (uncached_tokens, ahead) = (self.uncached, self.reservation.ahead());
        self.reservation.first_byte();
        let answer = FirstByte { uncached_tokens, ahead, elapsed };
        service.shared.rates.learn(&service.endpoints[index.index()].shared.slowness, &answer);
        stats.prefill_time.note(elapsed);
        elapsed
    }
}

/// The endpoints that a request has been refused by.
#[derive(Default)]
struct Tried {
    prefill: Vec<EndpointIndex>,
    decode: Vec<EndpointIndex>,
    /// Prefill legs that failed.
    failures: u32,
    /// How the last of them did.
    failed: Option<(Dialect, &'static str)>,
    /// Connections that were found dead while they were kept.
    stale: u32,
}

impl Tried {
    fn is_over(&self) -> bool {
        self.prefill.len() + self.decode.len() >= CONNECTS_MAX
    }
}

/// Where the legs went, for the header that says so.
#[derive(Clone, Copy)]
struct Route<'r> {
    decision: Option<&'r Decision>,
    decode: EndpointIndex,
    prefill: PrefillTime<'r>,
    /// Why there is no prefill leg, where that was decided.
    straight: Option<&'r Straight>,
}

/// How long the prefill leg took.
#[derive(Clone, Copy)]
enum PrefillTime<'r> {
    /// There is none.
    None,
    /// So long.
    Took(Duration),
    /// It goes on beside, since then; or it has ended by now.
    Beside(&'r Side, Instant),
}

/// What is known of a prefill leg that goes on beside the decode leg.
#[derive(Default)]
struct Side {
    /// How it ended.
    end: Cell<Option<at_once::PrefillEnd>>,
    /// How long it took, where it ended well.
    time: Cell<Option<Duration>>,
}
