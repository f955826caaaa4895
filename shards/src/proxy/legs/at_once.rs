//! Legs at once: the prefill leg goes on beside the decode leg, as the connection's companion.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::admit::Admitted;
use super::leg::{self, LegFault, Whole};
use super::message::{self, Leg};
use super::relayed::{DecodeFault, Relaying, id_line};
use super::{Counted, Dispatched, PrefillTime, Route, Side, Task, Tried};
use crate::disagg::bootstrap::{self, Meeting};
use crate::disagg::nixl::{self, Coordinates};
use crate::disagg::refusal::LegRefusal;
use crate::disagg::stats::LegOutcome;
use crate::disagg::{ANSWER_BYTES_MAX, Dialect, LegError};
use crate::executor;
use crate::ids::{EndpointIndex, ShardId};
use crate::prompt::Splice;
use crate::proxy::client::Client;
use crate::proxy::exchange::{Failure, Next};
use crate::proxy::upstream::{Pool, Upstream};
use crate::proxy::watch::Verdict;
use crate::route::{Decision, Tier};
use crate::service::{Service, count};

/// How long a prefill answer is read on after the decode answer has come to its end.
const DRAIN_MAX: Duration = Duration::from_secs(30);
/// Time that a leg has beyond its own to end itself.
const DRAIN_SLACK: Duration = Duration::from_millis(500);

/// How a prefill leg ended.
pub enum PrefillEnd {
    /// Well; its answer, and how long it took.
    Done(Box<Whole>, Duration),
    /// Its answer is the client's: a refusal.
    Refused(Box<Whole>),
    /// It failed.
    Failed(LegFault),
    /// It took too long.
    TimedOut,
}

impl Task<'_, '_> {
    /// Carries the request through, both legs at once.
    pub(super) async fn at_once(&self, client: &mut Client) -> Result<Next, Failure> {
        let errand = self.errand;
        let mut tried = Tried::default();
        loop {
            if tried.is_over() {
                return Err(errand.nobody(&tried));
            }
            let Admitted { decision, place } = errand.admit(client, &tried).await?;
            if decision.tier == Tier::Rescue {
                return errand.rescued(client, decision).await;
            }
            let Some(decode) = errand.choose_decode(&tried.decode) else { return Err(errand.nobody(&tried)) };
            let dispatched = Dispatched::new(errand, &decision);
            let slot = errand.endpoint(decode).shared.slot;
            let mut reservation = errand.proxy().loads.reserve(errand.proxy().id, slot, 0);
            // Both are there before either is sent: a refused connect costs nothing then.
            let fresh = tried.stale > 0;
            let Some(to_decode) = self.open(client, decode, fresh).await? else {
                tried.decode.push(decode);
                continue;
            };
            let Some(to_prefill) = self.open(client, decision.endpoint, fresh).await? else {
                tried.prefill.push(decision.endpoint);
                let keep = errand.proxy().limits.upstream_idle_connections_max;
                errand.attempt.local.pools[decode.index()].put(to_decode, keep);
                continue;
            };
            errand.attempt.dispatched(&decision);
            errand.sent(&decision, decode);
            let (first, second) = self.messages(&decision, decode).await?;
            let side: Rc<Side> = Rc::default();
            let kept = to_prefill.reused;
            let (at, budget) = (dispatched.at, dispatched.budget);
            let over = at + budget;
            let beside = self.beside(&decision, to_prefill, first, dispatched, place, Rc::clone(&side));
            client.set_companion(Some(Box::pin(beside)));
            reservation.first_byte();
            let route =
                Route { decision: Some(&decision), decode, prefill: PrefillTime::Beside(&side, at), straight: None };
            let relaying = Relaying::of(route, self.dialect, budget + self.first_byte_budget());
            match errand.relay_from(client, to_decode, second, &relaying).await {
                Ok(relayed) => {
                    if fresh {
                        count(&errand.stats().connect_retry_same_ep_ok);
                    }
                    self.drain(client, over);
                    if let Some(PrefillEnd::Done(whole, time)) = side.end.take()
                        && relayed.status == 200
                    {
                        if let Some(began) = relayed.began {
                            errand.moved(decode, began.saturating_sub(time));
                        }
                        errand.proved(&decision, whole.body());
                    }
                    return Ok(relayed.next);
                }
                Err(DecodeFault::OtherLeg) => {
                    self.count_abort();
                    match side.end.take() {
                        Some(PrefillEnd::Refused(whole)) => {
                            if self.dialect == Dialect::Bootstrap {
                                count(&errand.stats().sg_prefill_reject_relay);
                            }
                            return errand.pass_on(client, &whole).await;
                        }
                        Some(PrefillEnd::TimedOut) => return Err(errand.refuse(LegRefusal::PrefillTimeout)),
                        Some(PrefillEnd::Failed(fault)) => self.again(decision.endpoint, fault, kept, &mut tried)?,
                        Some(PrefillEnd::Done(..)) | None => return Err(errand.failed(DecodeFault::Died)),
                    }
                }
                Err(DecodeFault::Stale(_)) if !fresh => {
                    // As for a prefill leg: see [`Task::again`].
                    client.set_companion(None);
                    count(&errand.stats().connect_retry_same_ep);
                    errand.attempt.local.pools[decode.index()].clear();
                    tried.stale += 1;
                }
                Err(fault) => {
                    client.set_companion(None);
                    if side.end.take().is_some_and(|end| !matches!(end, PrefillEnd::Done(..))) {
                        self.count_abort();
                    }
                    return Err(errand.failed(fault));
                }
            }
        }
    }

    async fn open(&self, client: &mut Client, index: EndpointIndex, fresh: bool) -> Result<Option<Upstream>, Failure> {
        if fresh { self.errand.connect_fresh(client, index).await } else { self.errand.connect(client, index).await }
    }

    /// Notes a prefill leg that failed, and whether it may be tried again.
    fn again(&self, index: EndpointIndex, fault: LegFault, kept: bool, tried: &mut Tried) -> Result<(), Failure> {
        if fault == (LegFault::Died { without_a_byte: true }) && kept {
            // It was a kept connection that had ended: the same pair again, on fresh ones and under a new name.
            count(&self.errand.stats().connect_retry_same_ep);
            self.errand.attempt.local.pools[index.index()].clear();
            tried.stale += 1;
            return Ok(());
        }
        self.note_failure(index, fault, tried)
    }

    fn count_abort(&self) {
        if self.dialect == Dialect::Bootstrap {
            count(&self.errand.stats().sg_prefill_abort_decode);
        }
    }

    /// What both legs are sent.
    async fn messages(&self, decision: &Decision, decode: EndpointIndex) -> Result<(Vec<u8>, Vec<u8>), Failure> {
        let errand = self.errand;
        let id = self.id(decision.endpoint, decode);
        let bodies = match self.dialect {
            Dialect::Bootstrap => self.in_a_room(decision),
            _ => self.under_an_id(decision, id.as_deref().unwrap_or_default()),
        };
        let (first, second) = bodies.map_err(|error| errand.unsplittable(self.dialect, error))?;
        let lines = id_line(id.as_deref());
        let first = message::make(errand, Leg::Prefill, Some(first), &lines, id.is_some()).await;
        let second = message::make(errand, Leg::Decode, Some(second), &lines, id.is_some()).await;
        Ok((first, second))
    }

    fn in_a_room(&self, decision: &Decision) -> Result<(Splice<'_>, Splice<'_>), LegError> {
        let errand = self.errand;
        let ranks = errand.service().kv.as_ref().map_or(1, |kv| kv.ranks);
        let rank = decision.rank.filter(|_| ranks > 1);
        let room = bootstrap::room(errand.proxy().request_ids.random(), rank, ranks);
        let host = errand.endpoint(decision.endpoint).address.ip();
        let meeting = Meeting { host, port: errand.pd.bootstrap_port, room, rank, ranks };
        bootstrap::both(self.body.clone(), self.api, meeting)
    }

    fn under_an_id(&self, decision: &Decision, id: &str) -> Result<(Splice<'_>, Splice<'_>), LegError> {
        let endpoint = self.errand.endpoint(decision.endpoint);
        let engine_id = endpoint.nixl_engine_id.as_deref().unwrap_or_default();
        let at = Coordinates { engine_id, host: endpoint.address.ip(), port: endpoint.nixl_port };
        let (mut first, mut second) = (self.body.clone(), self.body.clone());
        nixl::prefill(&mut first, self.api)?;
        nixl::decode(&mut second, nixl::push_params(at, id))?;
        Ok((first, second))
    }

    /// The prefill leg, to go on beside. It owns all it needs, its connection too.
    fn beside(
        &self,
        decision: &Decision,
        upstream: Upstream,
        message: Vec<u8>,
        dispatched: Dispatched,
        place: Option<crate::disagg::ladder::Taken>,
        side: Rc<Side>,
    ) -> impl Future<Output = Verdict> + 'static {
        let errand = self.errand;
        let beside = PrefillBeside {
            service: Arc::clone(&errand.attempt.local.service),
            shard: errand.proxy().id,
            index: decision.endpoint,
            pool: Rc::clone(&errand.attempt.local.pools[decision.endpoint.index()]),
            idle_max: errand.proxy().limits.upstream_idle_connections_max,
            counted: Counted::begin(errand, true),
            dispatched,
            _place: place,
        };
        count(&errand.endpoint(decision.endpoint).shared.stats_of(errand.proxy().id).requests);
        async move {
            let ended = beside.run(upstream, message).await;
            let verdict = if matches!(ended, PrefillEnd::Done(..)) { Verdict::Well } else { Verdict::Interrupts };
            if let PrefillEnd::Done(_, time) = &ended {
                side.time.set(Some(*time));
            }
            side.end.set(Some(ended));
            verdict
        }
    }

    /// Has the rest of the prefill answer read, where it has not come to its end: the engine waits for that.
    fn drain(&self, client: &mut Client, over: Instant) {
        if let Some(companion) = client.take_companion() {
            if self.dialect == Dialect::Bootstrap {
                count(&self.errand.stats().sg_decode_close_drain);
            }
            // The leg's own timer wakes the task that asked it first, which is not this one.
            // The leg ends itself when its own time is over, and is counted by how; this is for one that does not.
            let left = (over.saturating_duration_since(Instant::now()) + DRAIN_SLACK).min(DRAIN_MAX);
            executor::spawn(async move {
                // An engine that does not end it is left.
                let _ended = monoio::time::timeout(left, companion).await;
            });
        }
    }
}

/// A prefill leg that goes on beside.
struct PrefillBeside {
    service: Arc<Service>,
    shard: ShardId,
    index: EndpointIndex,
    pool: Rc<Pool>,
    idle_max: usize,
    counted: Counted,
    dispatched: Dispatched,
    _place: Option<crate::disagg::ladder::Taken>,
}

impl PrefillBeside {
    async fn run(mut self, mut upstream: Upstream, message: Vec<u8>) -> PrefillEnd {
        let leg = leg::whole(&mut upstream, message, ANSWER_BYTES_MAX);
        match monoio::time::timeout(self.dispatched.budget, leg).await {
            Err(_) => {
                self.counted.set(LegOutcome::TimedOut);
                PrefillEnd::TimedOut
            }
            Ok(Err(fault)) => {
                self.counted.set(LegOutcome::Failed);
                // A kept connection that had ended is no death.
                let kept = upstream.reused && fault == (LegFault::Died { without_a_byte: true });
                if matches!(fault, LegFault::Died { .. }) && !kept {
                    count(&self.service.shared.stats_of(self.shard).pd.prefill_ep_died);
                }
                PrefillEnd::Failed(fault)
            }
            Ok(Ok(whole)) => {
                if whole.reusable {
                    self.pool.put(upstream, self.idle_max);
                }
                super::heard(&self.service, self.shard, &self.service.endpoints[self.index.index()], whole.head.status);
                match whole.head.status {
                    200..300 => {
                        self.counted.set(LegOutcome::Ok);
                        let stats = &self.service.shared.stats_of(self.shard).pd;
                        let time = self.dispatched.answered(&self.service, self.index, stats);
                        PrefillEnd::Done(Box::new(whole), time)
                    }
                    300..500 => {
                        self.counted.set(LegOutcome::Rejected);
                        PrefillEnd::Refused(Box::new(whole))
                    }
                    _ => {
                        self.counted.set(LegOutcome::Failed);
                        PrefillEnd::Failed(LegFault::Malformed("the endpoint answered with an error of its own"))
                    }
                }
            }
        }
    }
}
