//! Legs one after the other: the prefill leg's answer says what the decode leg is given.

use std::cell::RefCell;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::admit::Admitted;
use super::leg::{self, LegFault, Whole};
use super::message::{self, Leg};
use super::relayed::{DecodeFault, Relaying, id_line};
use super::{Counted, Dispatched, Errand, FAILURES_MAX, PrefillTime, Route, Task, Tried};
use crate::disagg::context::{self, ContextError, Handover};
use crate::disagg::refusal::LegRefusal;
use crate::disagg::stats::LegOutcome;
use crate::disagg::{ANSWER_BYTES_MAX, Dialect, auth, nixl};
use crate::ids::EndpointIndex;
use crate::load::Reservation;
use crate::prompt::Splice;
use crate::proxy::client::Client;
use crate::proxy::exchange::{self, Failure, Next};
use crate::proxy::outgoing::push_line;
use crate::proxy::watch::Interrupt;
use crate::route::{Decision, Tier};
use crate::service::count;

/// How long a prefill engine keeps what nobody has come for, at least: vLLM's `kv_lease_duration`. Beyond it no other decode
/// endpoint is tried.
const LEASE: Duration = Duration::from_secs(30);

/// What a prefill leg came to.
enum Prefilled {
    /// Its answer, and how long it took.
    Done(Whole, Duration),
    /// Its answer is the client's: a refusal.
    Refused(Whole),
    /// Another endpoint may do better; which one failed has been noted.
    Again,
}

impl Task<'_, '_> {
    /// Carries the request through, one leg after the other.
    pub(super) async fn in_turn(&self, client: &mut Client) -> Result<Next, Failure> {
        let errand = self.errand;
        let mut tried = Tried::default();
        loop {
            let Admitted { decision, place } = errand.admit(client, &tried).await?;
            if decision.tier == Tier::Rescue {
                return errand.rescued(client, decision).await;
            }
            let Some(decode) = errand.choose_decode(&[]) else { return Err(errand.nobody(&tried)) };
            // Before the prefill leg: other requests must see that this one will come there.
            let slot = errand.endpoint(decode).shared.slot;
            let reservation = errand.proxy().loads.reserve(errand.proxy().id, slot, 0);
            let id = self.id(decision.endpoint, decode);
            match self.prefill(client, &decision, id.as_deref(), &mut tried).await? {
                Prefilled::Again => {}
                Prefilled::Refused(whole) => return errand.pass_on(client, &whole).await,
                Prefilled::Done(whole, time) => {
                    drop(place);
                    errand.attempt.settle(errand.score);
                    errand.sent(&decision, decode);
                    let reservation = RefCell::new(reservation);
                    let after = After { decision, decode, reservation, id, whole, time };
                    return self.go_on(client, after).await;
                }
            }
        }
    }

    /// Sends the prefill leg and reads its answer.
    async fn prefill(
        &self,
        client: &mut Client,
        decision: &Decision,
        id: Option<&str>,
        tried: &mut Tried,
    ) -> Result<Prefilled, Failure> {
        let errand = self.errand;
        let index = decision.endpoint;
        let mut dispatched = Dispatched::new(errand, decision);
        let Some(mut upstream) = errand.connect(client, index).await? else {
            tried.prefill.push(index);
            return Ok(Prefilled::Again);
        };
        errand.attempt.dispatched(decision);
        let counted = Counted::begin(errand, true);
        let mut retried = false;
        loop {
            let message = self.prefill_message(decision, id).await?;
            count(&errand.endpoint(index).shared.stats_of(errand.proxy().id).requests);
            let left = dispatched.budget.saturating_sub(dispatched.at.elapsed());
            let leg = leg::whole(&mut upstream, message, ANSWER_BYTES_MAX);
            let fault = match client.guard(Some(left), leg).await {
                Err(Interrupt::TimedOut) => {
                    counted.set(LegOutcome::TimedOut);
                    return Err(errand.refuse(LegRefusal::PrefillTimeout));
                }
                Err(interrupt) => return Err(errand.left(interrupt)),
                Ok(Err(LegFault::Died { without_a_byte: true })) if upstream.reused => {
                    // A kept connection that had ended: the engine has not seen the request.
                    count(&errand.stats().connect_retry_same_ep);
                    errand.attempt.local.pools[index.index()].clear();
                    retried = true;
                    match errand.connect_fresh(client, index).await? {
                        Some(fresh) => upstream = fresh,
                        None => {
                            tried.prefill.push(index);
                            return Ok(Prefilled::Again);
                        }
                    }
                    continue;
                }
                Ok(Err(fault)) => {
                    if matches!(fault, LegFault::Died { .. }) {
                        count(&errand.stats().prefill_ep_died);
                    }
                    fault
                }
                Ok(Ok(whole)) if whole.head.status >= 500 => {
                    errand.heard(errand.endpoint(index), whole.head.status);
                    errand.keep(index, upstream, &whole);
                    LegFault::Malformed("the endpoint answered with an error of its own")
                }
                Ok(Ok(whole)) => {
                    errand.heard(errand.endpoint(index), whole.head.status);
                    errand.keep(index, upstream, &whole);
                    if retried {
                        count(&errand.stats().connect_retry_same_ep_ok);
                    }
                    if whole.head.status >= 300 {
                        counted.set(LegOutcome::Rejected);
                        return Ok(Prefilled::Refused(whole));
                    }
                    counted.set(LegOutcome::Ok);
                    let time = dispatched.answered(errand.service(), index, errand.stats());
                    return Ok(Prefilled::Done(whole, time));
                }
            };
            counted.set(LegOutcome::Failed);
            self.note_failure(index, fault, tried)?;
            return Ok(Prefilled::Again);
        }
    }

    /// Notes a prefill leg that failed; refuses the request if it was not the first.
    pub(super) fn note_failure(&self, index: EndpointIndex, fault: LegFault, tried: &mut Tried) -> Result<(), Failure> {
        let stats = self.errand.stats();
        let what = match fault {
            LegFault::Died { .. } => "the endpoint ended the connection without an answer",
            LegFault::TooLong => "the endpoint's answer is beyond the limit",
            LegFault::Malformed(reason) => reason,
        };
        tried.prefill.push(index);
        tried.failures += 1;
        tried.failed = Some((self.dialect, what));
        if tried.failures >= FAILURES_MAX || tried.is_over() {
            return Err(self.errand.refuse(LegRefusal::PrefillFailed(self.dialect, what)));
        }
        count(&stats.prefill_retry);
        if self.dialect == Dialect::Bootstrap {
            count(&stats.sg_room_retry);
        }
        Ok(())
    }

    /// The prefill leg's request; a number in it is new each time.
    async fn prefill_message(&self, decision: &Decision, id: Option<&str>) -> Result<Vec<u8>, Failure> {
        let errand = self.errand;
        let mut body = self.body.clone();
        let edited = match self.dialect {
            Dialect::Context => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                context::prefill(&mut body, errand.proxy().disagg_numbers.next(now.as_millis() as u64))
            }
            _ => nixl::prefill(&mut body, self.api),
        };
        edited.map_err(|error| errand.unsplittable(self.dialect, error.into()))?;
        let mut lines = id_line(id);
        if let Some(rank) = errand.attempt.conveyed_rank(decision) {
            push_line(&mut lines, exchange::RANK_HEADER, rank.0);
        }
        Ok(message::make(errand, Leg::Prefill, Some(body), &lines, id.is_some()).await)
    }

    /// Sends the decode leg with what the prefill leg's answer says, and relays its answer.
    async fn go_on(&self, client: &mut Client, after: After) -> Result<Next, Failure> {
        let errand = self.errand;
        let mut body = self.body.clone();
        let mut lines = id_line(after.id.as_deref());
        let mut handed_over = true;
        let answer = after.whole.body();
        let edited = match self.dialect {
            Dialect::Context => {
                let read = client.guard(None, errand.read_context(answer)).await;
                match read.map_err(|interrupt| errand.left(interrupt))? {
                    Ok(Context::Finished(answer, choice)) => return self.early(client, &after, answer, choice).await,
                    Ok(Context::Generate(handover)) => {
                        if let Some(key) = &errand.pd.auth_key {
                            push_line(&mut lines, auth::HEADER, key.header_value(&handover.params));
                        }
                        context::decode(&mut body, self.api, &handover)
                    }
                    Err(error) => {
                        let endpoint = errand.endpoint(after.decision.endpoint).address;
                        tracing::warn!(%error, %endpoint, "prefill leg");
                        return Err(self.broken_protocol());
                    }
                }
            }
            _ => {
                let outlined = client.guard(None, errand.outline_of(answer)).await;
                let outlined = outlined.map_err(|interrupt| errand.left(interrupt))?;
                let params = outlined.ok().as_ref().and_then(nixl::params);
                errand.service().shared.pd_parting.note(self.api, params.is_some());
                match params {
                    Some(params) => {
                        count(&errand.stats().params_found);
                        nixl::decode(&mut body, params)
                    }
                    None => {
                        count(&errand.stats().params_missing);
                        handed_over = false;
                        Ok(())
                    }
                }
            }
        };
        edited.map_err(|error| errand.unsplittable(self.dialect, error.into()))?;
        self.decode(client, &after, body, lines, handed_over).await
    }

    fn broken_protocol(&self) -> Failure {
        let what = "the context server's answer breaks the protocol";
        self.errand.refuse(LegRefusal::PrefillFailed(self.dialect, what))
    }

    async fn decode(
        &self,
        client: &mut Client,
        after: &After,
        body: Splice<'_>,
        lines: Vec<u8>,
        handed_over: bool,
    ) -> Result<Next, Failure> {
        let errand = self.errand;
        let After { decision, decode, whole, time, id, .. } = after;
        let made = || message::make(errand, Leg::Decode, Some(body.clone()), &lines, id.is_some());
        let mut message = made().await;
        let since = Instant::now();
        let (mut index, mut tried) = (*decode, Tried::default());
        loop {
            let mut opened = errand.connect(client, index).await?;
            if let Some(upstream) = opened.take() {
                after.reservation.borrow_mut().first_byte();
                if index != *decode {
                    errand.attempt.known.decodes_at(errand.proxy(), errand.service(), index);
                }
                let route = Route {
                    decision: Some(decision),
                    decode: index,
                    prefill: PrefillTime::Took(*time),
                    straight: None,
                };
                let reservation = Some(&after.reservation);
                let relaying = Relaying { reservation, ..Relaying::of(route, self.dialect, self.first_byte_budget()) };
                let sent = std::mem::take(&mut message);
                match errand.send(client, upstream, sent, &relaying).await {
                    Ok(relayed) => {
                        if relayed.status == 200 {
                            if handed_over && let Some(began) = relayed.began {
                                errand.moved(index, began);
                            }
                            errand.proved(decision, whole.body());
                        }
                        return Ok(relayed.next);
                    }
                    // Nothing was sent: what the prefill engine keeps is still there.
                    Err(DecodeFault::Stale(given_back)) => message = given_back,
                    Err(DecodeFault::Died) if !handed_over && tried.failures == 0 => {
                        tried.failures += 1;
                        count(&errand.stats().decode_ep_died);
                        message = made().await;
                    }
                    Err(fault) => return Err(errand.failed(fault)),
                }
            }
            // Another one comes for the same blocks, as long as they are kept.
            tried.decode.push(index);
            let another = errand.choose_decode(&tried.decode).filter(|_| !tried.is_over() && since.elapsed() < LEASE);
            index = another.ok_or_else(|| errand.nobody(&tried))?;
            let slot = errand.endpoint(index).shared.slot;
            drop(after.reservation.replace(errand.proxy().loads.reserve(errand.proxy().id, slot, 0)));
        }
    }

    /// Longest wait for the first byte of a decode leg: a whole answer comes when all of it is made.
    pub(super) fn first_byte_budget(&self) -> Duration {
        let errand = self.errand;
        let made = if errand.stream { Duration::ZERO } else { errand.proxy().limits.stream_idle_timeout };
        errand.pd.prefill_floor + made
    }

    /// The context ended the answer: the client gets it, in the form it asked for.
    async fn early(
        &self,
        client: &mut Client,
        after: &After,
        answer: Splice<'_>,
        choice: Splice<'_>,
    ) -> Result<Next, Failure> {
        let errand = self.errand;
        count(&errand.stats().trt_ctx_early_exit);
        let usage = self.body.value("stream_options").is_some_and(context::asks_usage);
        let finished = context::finished(answer, choice, self.api, errand.stream, usage);
        let body = finished.ok_or_else(|| self.broken_protocol())?;
        let kind = if errand.stream { "text/event-stream" } else { "application/json" };
        let close = !errand.request().head.keep_alive || errand.proxy().draining.get();
        let mut head = format!("HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n", body.len());
        if close {
            head.push_str("Connection: close\r\n");
        }
        head.push_str("\r\n");
        let answer = [head.as_bytes(), &body].concat();
        count(&errand.service().shared.stats_of(errand.proxy().id).responses[2]);
        let written = client.write(answer, 0, errand.proxy().limits.write_timeout).await;
        written.map_err(|interrupt| errand.left(interrupt))?;
        errand.proved(&after.decision, after.whole.body());
        Ok(if close { Next::Close } else { Next::Request })
    }
}

/// What a context server's answer comes to.
enum Context<'a> {
    /// The generation server goes on.
    Generate(Handover<'a>),
    /// The answer is complete, with its choice.
    Finished(Splice<'a>, Splice<'a>),
}

/// What stands when the prefill leg has ended well.
struct After {
    decision: Decision,
    decode: EndpointIndex,
    /// What the request counts for at its decode endpoint.
    reservation: RefCell<Reservation>,
    id: Option<String>,
    whole: Whole,
    time: Duration,
}

impl Errand<'_> {
    /// Reads a context server's answer in slices.
    async fn read_context<'b>(&self, answer: &'b [u8]) -> Result<Context<'b>, ContextError> {
        let outer = self.outline_of(answer).await.map_err(|_| context::NO_OBJECT)?;
        let choice = self.outline_of(context::choice(&outer)?).await.map_err(|_| context::NO_CHOICE)?;
        let Some(params) = context::params(&choice)? else { return Ok(Context::Finished(outer, choice)) };
        let params = self.outline_of(params).await.map_err(|_| context::NO_PARAMS)?;
        context::handover(&outer, params).map(Context::Generate)
    }

    /// Gives the client a leg's own answer.
    pub(super) async fn pass_on(&self, client: &mut Client, whole: &Whole) -> Result<Next, Failure> {
        let close = !self.request().head.keep_alive || self.proxy().draining.get();
        let id = crate::proxy::outgoing::id_of(self.request());
        let answer = whole.to_client(&id_line(id), close);
        let status = whole.head.status;
        count(&self.service().shared.stats_of(self.proxy().id).responses[usize::from(status / 100).min(5)]);
        let written = client.write(answer, 0, self.proxy().limits.write_timeout).await;
        written.map_err(|interrupt| self.left(interrupt))?;
        Ok(if close { Next::Close } else { Next::Request })
    }

    /// Keeps a connection whose answer is complete.
    fn keep(&self, index: EndpointIndex, upstream: crate::proxy::upstream::Upstream, whole: &Whole) {
        if whole.reusable {
            self.attempt.local.pools[index.index()].put(upstream, self.proxy().limits.upstream_idle_connections_max);
        }
    }
}
