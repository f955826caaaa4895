//! The policies that are compared: the gateway's own decision in all its modes, and what others do.

use shards::block::{Contract, FIXED_SEED, HashAlgo, NoneHash};
use shards::ids::{EndpointIndex, Rank, ServiceId};
use shards::inventory::{self, Medium, Run};
use shards::load::LoadSlot;
use shards::route::{Chooser, Claimed, Evidence, Facts, Turn, decide};
use shards::service::{Blend, Endpoint, EndpointShared, KvExact, MissReason, Select, Service};

use super::cache::Cache;
use super::fleet::{Fleet, SHARD, Setup};

/// A policy, as it is named in tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `sel` 0.
    RoundRobin,
    /// `sel` 4.
    LeastConnections,
    /// `sel` 9 on the session.
    SessionHash,
    /// The longest match whatever the load: `off` without relief and seeding.
    LongestMatch,
    /// What gateways without events do: a tree of the prompts that they sent, whose longest match is followed where it is
    /// 30 % of the prompt or more, else the smallest tree; the shortest queue while loads differ by more than 64 requests
    /// and by half.
    Tree,
    /// A blend with relief and seeding as they are by default, and nothing stated of misses.
    Blend(Blend),
    /// `ttft` without spill relief.
    TtftNoRelief,
    /// No policy: every worker has every cached block of the fleet, and each prompt goes where it is really soonest.
    Oracle,
    /// Where recorded decisions sent it.
    Recorded,
}

impl Kind {
    /// The rows of a table.
    pub const ALL: [Kind; 13] = [
        Kind::RoundRobin,
        Kind::LeastConnections,
        Kind::SessionHash,
        Kind::LongestMatch,
        Kind::Tree,
        Kind::Blend(Blend::Off),
        Kind::Blend(Blend::Hard),
        Kind::Blend(Blend::Soft),
        Kind::Blend(Blend::Adaptive),
        Kind::Blend(Blend::AdaptiveSoft),
        Kind::Blend(Blend::Ttft),
        Kind::TtftNoRelief,
        Kind::Oracle,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Kind::RoundRobin => "round robin",
            Kind::LeastConnections => "least connections",
            Kind::SessionHash => "session hash",
            Kind::LongestMatch => "longest match",
            Kind::Tree => "approximate tree",
            Kind::Blend(blend) => blend.name(),
            Kind::TtftNoRelief => "ttft, no relief",
            Kind::Oracle => "oracle bound",
            Kind::Recorded => "as recorded",
        }
    }
}

/// Where a request goes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Choice {
    pub worker: usize,
    /// Tokens predicted to hit.
    pub hit_tokens: u64,
    /// Tokens beyond them that requests under way were predicted to store.
    pub claimed_tokens: u64,
    pub spilled: bool,
    pub seeded: bool,
}

/// A policy with what it remembers in one run.
pub struct Policy<'a> {
    kind: Kind,
    turn: Turn,
    runs: Vec<Run>,
    claims: Vec<Claimed>,
    /// Trees of prompts sent, one per worker.
    trees: Vec<Cache>,
    /// Endpoints of recorded decisions, by request.
    recorded: &'a [u16],
}

impl<'a> Policy<'a> {
    pub fn new(kind: Kind, recorded: &'a [u16]) -> Self {
        let (runs, claims, trees) = (Vec::new(), Vec::new(), Vec::new());
        Policy { kind, turn: Turn::starting_at(SHARD), runs, claims, trees, recorded }
    }

    /// Whether it is allowed to see the caches of all workers as one.
    pub fn pools_caches(&self) -> bool {
        self.kind == Kind::Oracle
    }

    /// The service that it decides for.
    pub fn service(&self, setup: &Setup, block_tokens: u32) -> Service {
        let (_, inventory) = inventory::new(&inventory::Options { blocks_expected: 1 });
        let contract = Contract::vllm(NoneHash::from_seed(HashAlgo::Sha256Cbor, FIXED_SEED));
        let kv = KvExact { throughput: setup.throughput, ..KvExact::with_defaults(block_tokens, contract, inventory) };
        let endpoint = |index: u16| {
            let shared = EndpointShared::new(EndpointIndex(index), LoadSlot(u32::from(index)), 1);
            shared.set_cache_blocks(u32::try_from(setup.cache_blocks).ok());
            Endpoint::at(([127, 0, 0, 1], 9_000).into(), shared)
        };
        let endpoints = (0..setup.workers as u16).map(endpoint).collect();
        let service = Service::plain(ServiceId(0), ([127, 0, 0, 1], 8_000).into(), endpoints, 1);
        let (select, kv) = match self.kind {
            Kind::LeastConnections => (Select::LeastConnections, None),
            Kind::SessionHash => (Select::PrefixHash, None),
            Kind::LongestMatch => {
                (Select::Expected, Some(KvExact { blend: Blend::Off, spill_relief: false, seed_every: 0, ..kv }))
            }
            Kind::Blend(blend) => (Select::Expected, Some(KvExact { blend, ..kv })),
            Kind::TtftNoRelief => (Select::Expected, Some(KvExact { blend: Blend::Ttft, spill_relief: false, ..kv })),
            Kind::RoundRobin | Kind::Tree | Kind::Oracle | Kind::Recorded => (Select::RoundRobin, None),
        };
        Service { select, kv, ..service }
    }

    pub fn choose(&mut self, fleet: &Fleet<'_>, number: usize, now: f64) -> Choice {
        match self.kind {
            Kind::Oracle => by_truth(fleet),
            Kind::Tree => self.by_tree(fleet, number),
            Kind::Recorded => Choice { worker: usize::from(self.recorded[number]), ..Choice::default() },
            _ => self.by_decision(fleet, number, now),
        }
    }

    /// What the gateway decides.
    fn by_decision(&mut self, fleet: &Fleet<'_>, number: usize, now: f64) -> Choice {
        let trace = fleet.trace();
        let (request, path) = (&trace.requests[number], trace.path(number));
        self.runs.clear();
        self.claims.clear();
        let evidence = if fleet.service.kv.is_some() {
            for (worker, view) in fleet.views.iter().enumerate() {
                let (endpoint, rank) = (EndpointIndex(worker as u16), Rank(0));
                let blocks = view.matched(&trace.prefixes, path);
                if blocks > 0 {
                    self.runs.push(Run { endpoint, rank, medium: Medium::Device, blocks, block_tokens: None });
                }
                let claimed = view.claimed(&trace.prefixes, path, now);
                if claimed > blocks {
                    let tokens = u64::from(claimed) * u64::from(trace.block_tokens);
                    self.claims.push(Claimed { endpoint, rank: Some(rank), tokens });
                }
            }
            Evidence::Scored { prompt_tokens: request.tokens.into(), runs: &self.runs }
        } else {
            Evidence::None(MissReason::ModeOff)
        };
        let conversation = Some(request.session.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20);
        let facts = Facts { claims: &self.claims, conversation, ..Facts::of(evidence) };
        let mut chooser = Chooser { shard: SHARD, loads: &fleet.loads, turn: &mut self.turn };
        let decision = decide(&fleet.service, &facts, &mut chooser).expect("a worker is up at any time");
        Choice {
            worker: decision.endpoint.index(),
            hit_tokens: decision.hit_tokens.min(u64::from(request.tokens - 1)),
            claimed_tokens: decision.claimed_tokens,
            spilled: decision.spilled_from.is_some(),
            seeded: decision.seeded_from.is_some(),
        }
    }

    fn by_tree(&mut self, fleet: &Fleet<'_>, number: usize) -> Choice {
        const LEAST_MATCH_PERCENT: u64 = 30;
        const SPREAD_MOST: u32 = 64;
        let trace = fleet.trace();
        let (request, path) = (&trace.requests[number], trace.path(number));
        if self.trees.is_empty() {
            self.trees.extend(fleet.caches.iter().cloned());
        }
        let up = |worker: &usize| fleet.service.endpoints[*worker].is_candidate();
        let workers = || (0..fleet.workers.len()).filter(up);
        let load = |worker: usize| fleet.loads.seen_by(SHARD, LoadSlot(worker as u32)).requests();
        let least = workers().min_by_key(|worker| load(*worker)).unwrap_or(0);
        let most = workers().map(load).max().unwrap_or(0);
        let matched = |worker: usize| self.trees[worker].matched(&trace.prefixes, path);
        let longest = workers().max_by_key(|worker| matched(*worker)).unwrap_or(0);
        let hit_tokens = u64::from(matched(longest)) * u64::from(trace.block_tokens);
        let worker = if most - load(least) > SPREAD_MOST && most * 2 > load(least) * 3 {
            least
        } else if hit_tokens * 100 > u64::from(request.tokens) * LEAST_MATCH_PERCENT {
            longest
        } else {
            workers().min_by_key(|worker| self.trees[*worker].used()).unwrap_or(0)
        };
        let tree = &mut self.trees[worker];
        if let Some(taken) = tree.admit(&trace.prefixes, path, 0, &mut Vec::new()) {
            tree.store(&trace.prefixes, path, &mut Vec::new());
            tree.finish(path, taken);
        }
        Choice { worker, ..Choice::default() }
    }
}

/// The worker where the prompt's turn really comes first.
fn by_truth(fleet: &Fleet<'_>) -> Choice {
    let wait = |worker: usize| {
        let engine = &fleet.workers[worker].engine;
        (engine.work_left() + fleet.workers[worker].work_in_line) / engine.factor
    };
    let answers = |worker: usize| fleet.loads.seen_by(SHARD, LoadSlot(worker as u32)).decode;
    let up = (0..fleet.workers.len()).filter(|worker| fleet.service.endpoints[*worker].is_candidate());
    let worker = up.min_by(|a, b| wait(*a).total_cmp(&wait(*b)).then(answers(*a).cmp(&answers(*b))));
    Choice { worker: worker.unwrap_or(0), ..Choice::default() }
}

/// Of a name, as [`Kind::name`] writes it, with dashes for blanks.
pub fn parse(name: &str) -> Result<Kind, String> {
    let dashed = |kind: &Kind| kind.name().replace(", ", "-").replace(' ', "-");
    Kind::ALL.into_iter().find(|kind| dashed(kind) == name).ok_or_else(|| {
        let names: Vec<_> = Kind::ALL.iter().map(dashed).collect();
        format!("no policy `{name}`; there are {}", names.join(" "))
    })
}
