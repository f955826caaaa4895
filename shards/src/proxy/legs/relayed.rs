//! The leg whose answer the client gets.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use super::message::{self, Leg};
use super::{Counted, Errand, PrefillTime, Route, Tried};
use crate::disagg::Dialect;
use crate::disagg::refusal::{LegRefusal, broken_events};
use crate::disagg::stats::LegOutcome;
use crate::http::ResponseBody;
use crate::ids::EndpointIndex;
use crate::limits::Limits;
use crate::load::Reservation;
use crate::proxy::answer::{BROKEN_EVENTS, Refusal};
use crate::proxy::client::Client;
use crate::proxy::evidence;
use crate::proxy::exchange::{self, Failure, Next, NotOpened};
use crate::proxy::outgoing::{ID_HEADER, id_of, push_line};
use crate::proxy::relay::{self, CLOSE_LINE, Fault, Heard, Progress, StreamEnd, Terms};
use crate::proxy::upstream::Upstream;
use crate::proxy::watch::Interrupt;
use crate::route::{Decision, Tier};
use crate::service::{add, count};

/// Where a whole request goes, and the decision that says so, where it was one.
type Whereto = (EndpointIndex, Option<Decision>);

/// How long a decode leg that failed waits to hear whether the prefill leg is to blame.
const BLAME_WAIT: Duration = Duration::from_millis(100);

/// How a leg is relayed.
#[derive(Clone, Copy)]
pub struct Relaying<'r> {
    /// Where it goes and why.
    pub route: Route<'r>,
    /// The dialect whose words the client is told; none for undivided requests.
    pub dialect: Option<Dialect>,
    /// Longest wait for the answer's first byte; none = as the proxy's limits say.
    pub first_byte: Option<Duration>,
    /// It may have been sent before, on a connection that died: what it was handed over may be gone, and the endpoint's
    /// error says no more than that.
    pub again: bool,
    /// What the request counts for at the endpoint, where its prompt is computed there too: until its answer begins.
    pub reservation: Option<&'r RefCell<Reservation>>,
}

impl<'r> Relaying<'r> {
    /// A leg of a dialect whose answer is waited for so long.
    pub fn of(route: Route<'r>, dialect: Dialect, first_byte: Duration) -> Self {
        Relaying { route, dialect: Some(dialect), first_byte: Some(first_byte), again: false, reservation: None }
    }
}

/// Why a leg was not relayed to its end.
pub enum DecodeFault {
    /// A kept connection was dead: nothing was sent. The message is given back.
    Stale(Vec<u8>),
    /// The endpoint ended the connection without a byte of a body.
    Died,
    /// No answer began in time.
    TimedOut,
    /// The other leg failed before the client had a byte.
    OtherLeg,
    /// What came is no answer.
    Malformed(&'static str),
    /// The request is over.
    Over(Failure),
}

/// A leg that was relayed.
pub struct Relayed {
    /// What becomes of the client's connection.
    pub next: Next,
    /// Its status.
    pub status: u16,
    /// Time from its dispatch to the first byte of a stream; none for other answers, which come when all of them is made.
    pub began: Option<Duration>,
}

impl Errand<'_> {
    /// A connection to an endpoint, kept or new; none when it refused.
    pub(super) async fn connect(&self, client: &mut Client, index: EndpointIndex) -> Result<Option<Upstream>, Failure> {
        match self.attempt.local.pools[index.index()].take(self.proxy().limits.upstream_idle_max) {
            Some(upstream) => Ok(Some(upstream)),
            None => self.connect_fresh(client, index).await,
        }
    }

    /// A new connection; none when the endpoint refused it.
    pub(super) async fn connect_fresh(
        &self,
        client: &mut Client,
        index: EndpointIndex,
    ) -> Result<Option<Upstream>, Failure> {
        let (endpoint, pool) = (self.endpoint(index), &self.attempt.local.pools[index.index()]);
        let opened = exchange::open(self.proxy(), self.attempt.local, client, endpoint, pool).await;
        opened.map_err(|error| match error {
            NotOpened::OutOfSockets(refusal) => Failure::Refuse(refusal),
            NotOpened::Interrupted(interrupt) => self.left(interrupt),
        })
    }

    /// Sends the leg and passes its answer on.
    pub(super) async fn relay_from(
        &self,
        client: &mut Client,
        upstream: Upstream,
        message: Vec<u8>,
        relaying: &Relaying<'_>,
    ) -> Result<Relayed, DecodeFault> {
        let counted = Counted::begin(self, false);
        let relayed = self.relay_counted(client, upstream, message, relaying, &counted).await;
        counted.set(match &relayed {
            Ok(relayed) if relayed.status < 300 => LegOutcome::Ok,
            Ok(relayed) if relayed.status < 500 => LegOutcome::Rejected,
            Err(DecodeFault::TimedOut) => LegOutcome::TimedOut,
            Ok(_) | Err(DecodeFault::Died | DecodeFault::Malformed(_) | DecodeFault::Stale(_)) => LegOutcome::Failed,
            // Said where it happened: the client left, or the answer broke.
            Err(DecodeFault::Over(_)) => counted.outcome.get(),
            Err(DecodeFault::OtherLeg) => LegOutcome::Cancelled,
        });
        relayed
    }

    async fn relay_counted(
        &self,
        client: &mut Client,
        mut upstream: Upstream,
        message: Vec<u8>,
        relaying: &Relaying<'_>,
        counted: &Counted,
    ) -> Result<Relayed, DecodeFault> {
        let (proxy, at, reused) = (self.proxy(), Instant::now(), upstream.reused);
        let index = relaying.route.decode;
        let endpoint = self.endpoint(index);
        count(&endpoint.shared.stats_of(proxy.id).requests);
        let limits = Limits {
            first_byte_timeout: relaying.first_byte.or(proxy.limits.first_byte_timeout),
            ..proxy.limits.clone()
        };
        let write = client.guard(Some(limits.write_timeout), upstream.write(message, 0)).await;
        let (written, message) = write.map_err(|interrupt| self.fault(interrupt))?;
        let (is_head, is_http10) = (self.request().head.is_head, self.request().head.is_http10);
        let headroom = HEADROOM;
        let begun = relay::begin(client, &mut upstream, is_head, headroom, &limits, &proxy.buffers).await;
        let mut begun = match begun {
            Ok(begun) => begun,
            Err(Fault::Died) if reused => return Err(DecodeFault::Stale(message)),
            Err(fault) => return Err(self.of_fault(fault)),
        };
        drop(message);
        let (status, event_stream) = (begun.head.status, begun.head.event_stream);
        if relaying.again && status >= 500 {
            return Err(DecodeFault::Died);
        }
        if status >= 500 && client.has_companion() {
            // A decode engine says so when its prefill engine failed: then that one's word counts.
            let heard = client.guard(Some(BLAME_WAIT), std::future::pending::<()>()).await;
            match heard {
                Err(Interrupt::TimedOut) => {}
                Err(interrupt) => return Err(self.fault(interrupt)),
                Ok(()) => {}
            }
        }
        // Only now: an engine is not to blame for what the other did.
        self.heard(endpoint, status);
        self.attempt.settle(self.score);
        if status >= 300 {
            // Nobody comes for what the other leg computes.
            client.set_companion(None);
        }
        if status == 200 && event_stream {
            let waited = relay::first_of_body(client, &mut upstream, &mut begun, &limits).await;
            waited.map_err(|fault| self.of_body_fault(fault))?;
        }
        let stats = self.service().shared.stats_of(proxy.id);
        count(&stats.responses[usize::from(status / 100).min(5)]);
        let counters = endpoint.shared.stats_of(proxy.id);
        add(&counters.bytes_in, self.request().bytes.len() as u64);
        let close =
            !self.request().head.keep_alive || proxy.draining.get() || begun.head.body == ResponseBody::UntilClose;
        let added = self.lines_for_client(relaying, at, begun.head.has_request_id, close);
        let added = if added.len() <= headroom { added } else { close_line(close) };
        let terms = Terms {
            added: &added,
            is_http10,
            broken: relaying.dialect.map_or(BROKEN_EVENTS, broken_events),
            ends_with: relaying.dialect.and(self.attempt.api).map(StreamEnd::of),
            stats: counters,
        };
        let began = Cell::new(None);
        let progress = |progress| {
            if let Some(reservation) = relaying.reservation {
                match progress {
                    Progress::Began => reservation.borrow_mut().first_byte(),
                    Progress::Ended => reservation.borrow_mut().end(),
                }
            }
            if event_stream && matches!(progress, Progress::Began) {
                began.set(Some(at.elapsed()));
                stats.pd.decode_ttft.note(at.elapsed());
            }
        };
        let heard = Heard { progress, tail: None };
        match relay::relay(client, &mut upstream, begun, terms, heard, &limits, &proxy.buffers).await {
            Ok(reusable) => {
                if reusable && written.is_ok() && !is_http10 {
                    self.attempt.local.pools[index.index()].put(upstream, limits.upstream_idle_connections_max);
                }
                let next = if close { Next::Close } else { Next::Request };
                Ok(Relayed { next, status, began: began.get() })
            }
            Err(Fault::Malformed(reason)) => Err(DecodeFault::Malformed(reason)),
            Err(Fault::Died) => Err(DecodeFault::Died),
            Err(fault) => Err(DecodeFault::Over(self.broke(fault, counted))),
        }
    }

    /// The answer broke after the client had a part of it.
    fn broke(&self, fault: Fault, counted: &Counted) -> Failure {
        let stats = self.service().shared.stats_of(self.proxy().id);
        match fault {
            Fault::Client(Interrupt::OtherLeg) => count(&stats.broken_answers),
            Fault::Client(Interrupt::ClientGone | Interrupt::TimedOut) => count(&stats.client_gone),
            Fault::Client(_) => {}
            _ => {
                count(&stats.broken_answers);
                count(&stats.pd.decode_ep_died);
                counted.set(LegOutcome::Failed);
            }
        }
        Failure::Close
    }

    fn fault(&self, interrupt: Interrupt) -> DecodeFault {
        match interrupt {
            Interrupt::OtherLeg => DecodeFault::OtherLeg,
            Interrupt::TimedOut => DecodeFault::TimedOut,
            interrupt => DecodeFault::Over(self.left(interrupt)),
        }
    }

    fn of_fault(&self, fault: Fault) -> DecodeFault {
        match fault {
            Fault::Died | Fault::Broken => DecodeFault::Died,
            Fault::FirstByteTimeout => DecodeFault::TimedOut,
            Fault::Malformed(reason) => DecodeFault::Malformed(reason),
            Fault::Client(interrupt) => self.fault(interrupt),
        }
    }

    fn of_body_fault(&self, fault: Fault) -> DecodeFault {
        if fault == Fault::Died {
            count(&self.stats().decode_zero_byte_eof);
        }
        self.of_fault(fault)
    }

    /// Lines of the gateway's own in the head that the client gets.
    fn lines_for_client(&self, relaying: &Relaying<'_>, at: Instant, has_id: bool, close: bool) -> Vec<u8> {
        let mut lines = Vec::new();
        if let Some(id) = id_of(self.request()).filter(|_| !has_id) {
            push_line(&mut lines, ID_HEADER, id);
        }
        if self.explains() {
            push_line(&mut lines, evidence::HEADER, self.evidence(relaying, at));
        }
        lines.extend(close_line(close));
        lines
    }

    fn evidence(&self, relaying: &Relaying<'_>, at: Instant) -> String {
        let route = &relaying.route;
        let decode = self.endpoint(route.decode);
        let decode_ms = at.elapsed().as_millis();
        let mut text = match route.decision {
            Some(decision) => {
                let rank = self.attempt.conveyed_rank(decision);
                evidence::text(self.service(), self.score, decision, rank, 0)
            }
            None => format!("rule={}; tier=undivided", self.service().id.0),
        };
        if let Some(straight) = route.straight {
            text = format!(
                "rule={}; tier=bypass; reason={}; tokens={}/{}",
                self.service().id.0,
                straight.why.name(),
                straight.held,
                straight.held + straight.missing
            );
        }
        match route.prefill {
            PrefillTime::None => {}
            PrefillTime::Took(time) => text.push_str(&format!("; prefill_ms={}", time.as_millis())),
            PrefillTime::Beside(side, at) => match side.time.get() {
                Some(time) => text.push_str(&format!("; prefill_ms={}", time.as_millis())),
                // It goes on: so long at least.
                None => text.push_str(&format!("; prefill_ms={}+", at.elapsed().as_millis())),
            },
        }
        text.push_str(&format!("; decode_idx={}; decode={}; decode_ms={decode_ms}", route.decode.0, decode.address));
        text
    }

    /// Serves a request that cannot be parted whole, at a decode endpoint, else at one for whole requests.
    pub(super) async fn undivided(&self, client: &mut Client) -> Result<Next, Failure> {
        self.whole(client, |tried| match self.choose_decode(tried) {
            Some(decode) => Some((decode, None)),
            None => self.rescue(tried),
        })
        .await
    }

    /// Serves a request that no pair is there for, at an endpoint for whole requests: decode engines may refuse those.
    pub(super) async fn rescued(&self, client: &mut Client, decision: Decision) -> Result<Next, Failure> {
        let first = Cell::new(Some((decision.endpoint, Some(decision))));
        self.whole(client, |tried| first.take().or_else(|| self.rescue(tried))).await
    }

    /// Serves the request whole at one endpoint of those that `choose` gives, who is told which were tried.
    async fn whole(
        &self,
        client: &mut Client,
        choose: impl Fn(&[EndpointIndex]) -> Option<Whereto>,
    ) -> Result<Next, Failure> {
        count(&self.stats().fallback_to_normal);
        let mut tried = Tried::default();
        loop {
            let Some((index, decision)) = choose(&tried.decode) else { return Err(self.nobody(&tried)) };
            let slot = self.endpoint(index).shared.slot;
            let mut reservation = self.proxy().loads.reserve(self.proxy().id, slot, 0);
            let Some(upstream) = self.connect(client, index).await? else {
                tried.decode.push(index);
                continue;
            };
            if let Some(decision) = &decision {
                self.attempt.dispatched(decision);
            }
            reservation.first_byte();
            let id = self.request().made_id.clone();
            let lines = id_line(id.as_deref());
            let message = message::make(self, Leg::Decode, None, &lines, id.is_some()).await;
            let route =
                Route { decision: decision.as_ref(), decode: index, prefill: PrefillTime::None, straight: None };
            let relaying = Relaying { route, dialect: None, first_byte: None, again: false, reservation: None };
            match self.send(client, upstream, message, &relaying).await {
                Ok(relayed) => return Ok(relayed.next),
                // Nothing was sent.
                Err(DecodeFault::Stale(_)) if !tried.is_over() => tried.decode.push(index),
                Err(DecodeFault::Died) if tried.failures == 0 && self.attempt.api.is_some() && !tried.is_over() => {
                    tried.failures += 1;
                    tried.decode.push(index);
                }
                Err(fault) => return Err(self.failed(fault)),
            }
        }
    }

    /// An endpoint that does whole requests.
    fn rescue(&self, tried: &[EndpointIndex]) -> Option<Whereto> {
        let decision = self.decide(tried).filter(|decision| decision.tier == Tier::Rescue)?;
        Some((decision.endpoint, Some(decision)))
    }

    /// As [`Errand::relay_from`], once again where a kept connection was dead.
    pub(super) async fn send(
        &self,
        client: &mut Client,
        upstream: Upstream,
        message: Vec<u8>,
        relaying: &Relaying<'_>,
    ) -> Result<Relayed, DecodeFault> {
        let index = relaying.route.decode;
        match self.relay_from(client, upstream, message, relaying).await {
            Err(DecodeFault::Stale(message)) => {
                count(&self.stats().connect_retry_same_ep);
                self.attempt.local.pools[index.index()].clear();
                let fresh = self.connect_fresh(client, index).await.map_err(DecodeFault::Over)?;
                let Some(upstream) = fresh else { return Err(DecodeFault::Stale(message)) };
                let again = Relaying { again: relaying.dialect.is_some(), ..*relaying };
                let relayed = self.relay_from(client, upstream, message, &again).await;
                if relayed.is_ok() {
                    count(&self.stats().connect_retry_same_ep_ok);
                }
                relayed
            }
            relayed => relayed,
        }
    }

    /// What the client is told of a leg that failed before it had a byte.
    pub(super) fn failed(&self, fault: DecodeFault) -> Failure {
        let stats = self.stats();
        match fault {
            DecodeFault::Over(failure) => failure,
            DecodeFault::TimedOut => self.refuse(LegRefusal::DecodeTimeout),
            DecodeFault::Malformed(reason) => Failure::Refuse(Refusal::BackendUnreachable(reason)),
            DecodeFault::Stale(_) | DecodeFault::Died | DecodeFault::OtherLeg => {
                count(&stats.decode_ep_died);
                self.refuse(LegRefusal::DecodeDied)
            }
        }
    }
}

/// Room kept in front of an answer's head for the gateway's own lines; lines that do not fit are left out.
const HEADROOM: usize = 1024;

fn close_line(close: bool) -> Vec<u8> {
    if close { CLOSE_LINE.to_vec() } else { Vec::new() }
}

/// The line of an id that is not the client's own.
pub(super) fn id_line(id: Option<&str>) -> Vec<u8> {
    let mut lines = Vec::new();
    if let Some(id) = id {
        push_line(&mut lines, ID_HEADER, id);
    }
    lines
}
