//! No legs at all: a decode endpoint does a request alone that it is sooner done with so.

use std::cell::RefCell;
use std::time::Duration;

use super::message::{self, Leg};
use super::relayed::{DecodeFault, Relaying, id_line};
use super::{Errand, PrefillTime, Route, Task};
use crate::belief::NamedRank;
use crate::ids::EndpointIndex;
use crate::load::Load;
use crate::proxy::client::Client;
use crate::proxy::exchange::{self, Failure, Next};
use crate::proxy::outgoing::push_line;
use crate::proxy::score::Score;
use crate::rates::{FirstByte, Slowness};
use crate::route::{self, Alone, Chooser, Straight};
use crate::service::{Bypass, MissReason, count};

/// Every so many requests that a decode endpoint would do alone, one goes through both legs all the same, where it is
/// learned which is better: what nobody does teaches nothing.
const EXPLORES: u64 = 64;

impl Task<'_, '_> {
    /// Has a decode endpoint do it, if one is sooner done so; none where both legs are to do it, because nobody is or the
    /// endpoint failed before it said a word.
    pub(super) async fn straight(&self, client: &mut Client) -> Result<Option<Next>, Failure> {
        let errand = self.errand;
        let Some(straight) = errand.choose_straight() else { return Ok(None) };
        let (shard, stats) = (errand.proxy().id, errand.stats());
        if errand.pd.bypass_tokens == 0 && stats.bypass_chosen() % EXPLORES == EXPLORES - 1 {
            count(&stats.bypass_explored);
            return Ok(None);
        }
        let endpoint = errand.endpoint(straight.endpoint);
        // Before anything is awaited: the next decision must see this one.
        let reservation = errand.proxy().loads.reserve(shard, endpoint.shared.slot, straight.missing);
        let ahead = reservation.ahead();
        let reservation = RefCell::new(reservation);
        count(&stats.bypassed[straight.why as usize]);
        let Some(upstream) = errand.connect(client, straight.endpoint).await? else {
            count(&stats.bypass_failed);
            return Ok(None);
        };
        errand.attempt.known.decodes_at(errand.proxy(), errand.service(), straight.endpoint);
        let id = errand.request().made_id.clone();
        let mut lines = id_line(id.as_deref());
        if let Some(rank) = straight.rank {
            push_line(&mut lines, exchange::RANK_HEADER, rank.0);
        }
        let message = message::make(errand, Leg::Decode, None, &lines, id.is_some()).await;
        let route =
            Route { decision: None, decode: straight.endpoint, prefill: PrefillTime::None, straight: Some(&straight) };
        // An error of its own is not passed on: two legs may do better.
        let relaying = Relaying {
            reservation: Some(&reservation),
            again: true,
            ..Relaying::of(route, self.dialect, self.first_byte_budget())
        };
        match errand.send(client, upstream, message, &relaying).await {
            Ok(relayed) => {
                if let Some(elapsed) = relayed.began.filter(|_| relayed.status == 200) {
                    let answer = FirstByte { uncached_tokens: straight.missing, ahead, elapsed };
                    errand.service().shared.rates.compare(&endpoint.shared.slowness, &answer);
                }
                Ok(Some(relayed.next))
            }
            Err(DecodeFault::Stale(_) | DecodeFault::Died | DecodeFault::Malformed(_)) => {
                count(&stats.bypass_failed);
                Ok(None)
            }
            Err(fault) => Err(errand.failed(fault)),
        }
    }
}

impl Errand<'_> {
    fn choose_straight(&self) -> Option<Straight> {
        // What stands before the first certain block may be any number of tokens.
        if self.pd.bypass == Bypass::Off || matches!(self.score, Score::Miss(MissReason::Media | MissReason::Stored)) {
            return None;
        }
        let runs = if self.attempt.skips_cache { &[] } else { self.score.at_decode() };
        let alone = Alone {
            prompt_tokens: self.attempt.prompt_tokens(self.score),
            runs,
            pinned: self.attempt.known.pin(self.proxy()).and_then(|pin| pin.decode),
            names_rank: self.attempt.named_rank != NamedRank::No,
        };
        let mut turn = self.attempt.local.turn.borrow_mut();
        let mut chooser = Chooser { shard: self.proxy().id, loads: &self.proxy().loads, turn: &mut turn };
        route::choose_straight(self.service(), &alone, &mut chooser)
    }

    /// The decode leg's answer has begun so long after the prompt was computed: how fast blocks are moved is learned of that.
    pub(super) fn moved(&self, decode: EndpointIndex, elapsed: Duration) {
        let moves = &self.service().shared.moves;
        let here = self.score.at_decode().iter().filter(|run| run.endpoint == decode).map(|run| run.blocks).max();
        let block_tokens = self.service().kv.as_ref().map_or(0, |kv| kv.block_tokens);
        let held = u64::from(here.unwrap_or(0)) * u64::from(block_tokens);
        let uncached_tokens = self.attempt.prompt_tokens(self.score).saturating_sub(held);
        moves.learn(&Slowness::default(), &FirstByte { uncached_tokens, ahead: Load::default(), elapsed });
    }
}
