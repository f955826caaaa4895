//! Who computes the prompt: the decision, within the bounds of admission, waiting for a place where that is allowed.

use std::time::Instant;

use super::{Errand, Tried};
use crate::disagg::ladder::{Taken, Waiting};
use crate::disagg::refusal::LegRefusal;
use crate::ids::EndpointIndex;
use crate::proxy::client::Client;
use crate::proxy::exchange::Failure;
use crate::route::{self, Chooser, Decision, Tier};
use crate::service::{Role, count};

/// How often a request that waits looks whether it is first, and for a place.
const LOOK_EVERY: std::time::Duration = std::time::Duration::from_millis(5);

/// The endpoint that computes the prompt.
pub struct Admitted {
    /// The decision.
    pub decision: Decision,
    /// Its place there; none where nothing bounds them.
    pub place: Option<Taken>,
}

impl Errand<'_> {
    /// Decides, and takes a place. A request that has to wait does so here.
    pub(super) async fn admit(&self, client: &mut Client, tried: &Tried) -> Result<Admitted, Failure> {
        let ladder = &self.pd.ladder;
        let began = Instant::now();
        loop {
            let mut passed_over = tried.prefill.clone();
            while let Some(decision) = self.decide(&passed_over) {
                if ladder.per_endpoint == 0 || decision.tier == Tier::Rescue {
                    return Ok(Admitted { decision, place: None });
                }
                let places = &self.endpoint(decision.endpoint).shared.places;
                // Those who wait come first.
                let waited_for = ladder.queue > 0 && places.queue.count() > 0;
                if let Some(place) = (!waited_for).then(|| places.inflight.take(ladder.per_endpoint)).flatten() {
                    return Ok(Admitted { decision, place: Some(place) });
                }
                passed_over.push(decision.endpoint);
            }
            if passed_over.len() == tried.prefill.len() {
                // Nobody is full: nobody is there.
                return Err(self.nobody(tried));
            }
            let (endpoint, waiting) = self.queue(&tried.prefill)?;
            match self.wait(client, endpoint, &waiting, began).await? {
                Some(place) => {
                    if let Some(decision) = self.decision_for(endpoint, &tried.prefill) {
                        return Ok(Admitted { decision, place: Some(place) });
                    }
                }
                // The endpoint is gone: whoever waited for it is placed anew.
                None => drop(waiting),
            }
        }
    }

    /// The shortest queue with room.
    fn queue(&self, tried: &[EndpointIndex]) -> Result<(EndpointIndex, Waiting), Failure> {
        let ladder = &self.pd.ladder;
        let stats = self.stats();
        if ladder.queue == 0 {
            count(&stats.admission_shed);
            return Err(self.refuse(LegRefusal::Overloaded));
        }
        let mut places: Vec<EndpointIndex> = self.waitable(tried).collect();
        places.sort_by_key(|index| self.endpoint(*index).shared.places.queue.count());
        for index in places {
            if let Some(waiting) = self.endpoint(index).shared.places.queue.join(ladder.queue) {
                count(&stats.admission_queued);
                return Ok((index, waiting));
            }
        }
        count(&stats.admission_overflow_shed);
        Err(self.refuse(LegRefusal::Overloaded))
    }

    /// Prefill endpoints that may be waited for.
    fn waitable(&self, tried: &[EndpointIndex]) -> impl Iterator<Item = EndpointIndex> {
        let endpoints = self.service().endpoints.iter();
        let usable = endpoints.filter(|endpoint| endpoint.role == Role::Prefill && endpoint.is_candidate());
        usable.map(|endpoint| endpoint.shared.index).filter(|index| !tried.contains(index))
    }

    /// Waits for a place; none when the endpoint may no longer be used.
    async fn wait(
        &self,
        client: &mut Client,
        index: EndpointIndex,
        waiting: &Waiting,
        began: Instant,
    ) -> Result<Option<Taken>, Failure> {
        let ladder = &self.pd.ladder;
        let endpoint = self.endpoint(index);
        loop {
            if !endpoint.is_candidate() {
                return Ok(None);
            }
            if waiting.is_first()
                && let Some(place) = endpoint.shared.places.inflight.take(ladder.per_endpoint)
            {
                return Ok(Some(place));
            }
            if began.elapsed() >= ladder.park_max() {
                return Err(self.refuse(LegRefusal::ParkTimeout));
            }
            client.guard(None, monoio::time::sleep(LOOK_EVERY)).await.map_err(|interrupt| self.left(interrupt))?;
        }
    }

    pub(super) fn decide(&self, tried: &[EndpointIndex]) -> Option<Decision> {
        self.attempt.decide(self.score, tried)
    }

    /// The decision for an endpoint that was waited for: what it would be if there were no other.
    fn decision_for(&self, endpoint: EndpointIndex, tried: &[EndpointIndex]) -> Option<Decision> {
        let others = self.service().endpoints.iter().filter(|other| other.role == Role::Prefill);
        let mut passed_over: Vec<EndpointIndex> = others.map(|other| other.shared.index).collect();
        passed_over.retain(|other| *other != endpoint);
        passed_over.extend_from_slice(tried);
        self.decide(&passed_over).filter(|decision| decision.endpoint == endpoint)
    }

    /// The decode endpoint.
    pub(super) fn choose_decode(&self, tried: &[EndpointIndex]) -> Option<EndpointIndex> {
        let mut turn = self.attempt.local.turn.borrow_mut();
        let mut chooser = Chooser { shard: self.proxy().id, loads: &self.proxy().loads, turn: &mut turn };
        let pinned = self.attempt.known.pin(self.proxy()).and_then(|pin| pin.decode);
        route::choose_decode(self.service(), pinned, tried, &mut chooser)
    }

    /// What is said when no endpoint is left.
    pub(super) fn nobody(&self, tried: &Tried) -> Failure {
        if let Some((dialect, what)) = tried.failed {
            return self.refuse(LegRefusal::PrefillFailed(dialect, what));
        }
        self.refuse(LegRefusal::PoolUnavailable)
    }
}
