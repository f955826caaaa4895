//! What is counted of a decision, and what its answer proves: predictions that came true, and those that did not.

use std::sync::atomic::Ordering;

use super::Attempt;
use crate::belief;
use crate::feedback::Change;
use crate::ids::{EndpointIndex, Rank};
use crate::predictions::PromptKind;
use crate::prompt::Api;
use crate::proxy::score::Score;
use crate::route::{Decision, Reason, Tier};
use crate::service::{Endpoint, Role, add, count};
use crate::usage::{Tail, Usage};

/// Bytes of a body that are searched for a system message and tools, for a diagnosis.
const PARTS_SOUGHT: usize = 16 * 1024;

impl Attempt<'_> {
    /// Whether the end of the endpoint's answer is kept, for what it says of the cache.
    pub(in crate::proxy) fn wants_usage(&self, endpoint: &Endpoint) -> bool {
        let statements = &endpoint.shared.usage;
        let compares = self.local.service.kv.is_some() && statements.tells();
        self.api.is_some() && !self.skips_cache && (compares || statements.look())
    }

    /// Says what the endpoint that has answered must hold now, for parity by use.
    pub(in crate::proxy) fn predict(&self, score: &Score, endpoint: EndpointIndex, rank: Option<Rank>) {
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
        if let Some(prediction) = score.predict(reader, endpoint, rank, kind) {
            predictions.offer(prediction);
        }
    }

    /// Says what the answer's `usage` proves or denies of the endpoint's blocks.
    pub(super) fn compare_usage(&self, score: &Score, endpoint: EndpointIndex, rank: Option<Rank>) {
        if let Some(usage) = self.tail.as_ref().and_then(Tail::usage) {
            self.compare(score, endpoint, rank, usage);
        }
    }

    /// The same of an answer that was read here.
    pub(in crate::proxy) fn compare(&self, score: &Score, endpoint: EndpointIndex, rank: Option<Rank>, usage: Usage) {
        let statements = &self.local.service.endpoints[endpoint.index()].shared.usage;
        if usage.cached_tokens.is_some() {
            statements.set_tells();
        }
        if statements.wanted()
            && let Some(statement) = score.compare(self.local, endpoint, rank, usage)
        {
            statements.offer(statement);
        }
        self.judge(score, endpoint, rank, usage);
    }

    /// Compares what the engine took from its cache with what was predicted, and demotes one that keeps having less.
    fn judge(&self, score: &Score, index: EndpointIndex, rank: Option<Rank>, usage: Usage) {
        let service = &self.local.service;
        let endpoint = &service.endpoints[index.index()];
        let tells = endpoint.shared.usage.tells();
        let Some(cached) = usage.cached_tokens.or(tells.then_some(0)) else { return };
        let Some(compared) = score.compared(self.local, index, rank, self.named_rank, usage.prompt_tokens, cached)
        else {
            return;
        };
        let stats = endpoint.shared.stats_of(self.proxy.id);
        count(&stats.compared);
        add(&stats.compared_predicted, compared.predicted);
        add(&stats.compared_cached, cached);
        add(&stats.compared_missing, compared.missing());
        // With several ranks and nobody who knows which one answered, one answer says nothing.
        if service.kv.as_ref().is_some_and(|kv| kv.ranks > 1) && rank.is_none() {
            return;
        }
        if compared.is_wrong() {
            count(&stats.compared_wrong);
        }
        let (rule, at) = (service.id.0, endpoint.address);
        match endpoint.shared.trust.note(compared) {
            Some(Change::Demoted) => {
                service.shared.demoted.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(rule, endpoint = %at, "its answers keep reporting fewer cached tokens than predicted: what it \
                    announces counts less until they agree again");
            }
            Some(Change::Restored) => {
                service.shared.demoted.fetch_sub(1, Ordering::Relaxed);
                tracing::info!(rule, endpoint = %at, "its answers report the predicted cached tokens again");
            }
            None => {}
        }
    }

    /// The request goes to the decision's endpoint. It is counted when its answer begins, and not if it goes elsewhere
    /// before that: a request counts once.
    pub(in crate::proxy) fn dispatched(&self, decision: &Decision) {
        self.uncounted.set(Some(decision.clone()));
        if decision.seed_tick.is_some() {
            self.seed_spent.set(true);
        }
    }

    /// Counts the decision that the request went by, if that has not been done: its answer has begun.
    pub(in crate::proxy) fn settle(&self, score: &Score) {
        if let Some(decision) = self.uncounted.take() {
            self.count_decision(score, &decision);
        }
    }

    /// The request is over: what was sent counts, with or without an answer, and what was not is undone.
    pub(super) fn close(&self, score: &Score) {
        self.settle(score);
        // Who got a request has had its turn, whatever became of it: else a cold endpoint that dies would get every hit.
        if let Some(tick) = self.seed_tick.take().filter(|_| !self.seed_spent.get()) {
            self.local.service.shared.undo_seed_tick(tick);
        }
    }

    fn count_decision(&self, score: &Score, decision: &Decision) {
        let service = &self.local.service;
        let shared = service.shared.stats_of(self.proxy.id);
        count(&shared.tiers[decision.tier as usize]);
        let Some(kv) = &service.kv else { return };
        if matches!(score, Score::NotAsked) {
            return;
        }
        let routed = || service.endpoints.iter().filter(|endpoint| endpoint.role != Role::Decode);
        let knows_blocks = || routed().any(|e| e.shared.kv_blocks() > 0);
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
            count(&shared.misses[reason as usize]);
        }
        if let Score::Runs { prompt_tokens, runs, .. } = score {
            let held = belief::held_anywhere(kv, *prompt_tokens, runs);
            add(&shared.oracle_gap_tokens, held.saturating_sub(decision.hit_tokens));
            add(&shared.regret_tokens, decision.best_tokens.saturating_sub(decision.hit_tokens));
        }
        if decision.reason == Reason::Claim {
            count(&shared.claims);
        }
        if decision.tier == Tier::KvExact {
            let stats = service.endpoints[decision.endpoint.index()].shared.stats_of(shard);
            count(&stats.hits);
            add(&stats.hit_tokens, decision.hit_tokens);
            if decision.spilled_from.is_some() {
                count(&stats.spills);
            }
            if decision.seeded_from.is_some() {
                count(&stats.cold_seeds);
            }
        }
    }
}
