//! The outcome of a decision, and what it stood on.

use crate::ids::{EndpointIndex, Rank};
use crate::service::{MissReason, Select};

/// The tier that decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Tier 0 of P/D rules: the session's endpoint.
    Session,
    /// Tier 1 of P/D rules: the tree of texts that were sent.
    Trie,
    /// Tier 1.5: KV-exact.
    KvExact,
    /// Nothing is held, and a request under way will have stored the prompt's beginning soon. No Tier 1.5 hit.
    Claim,
    /// The rule's own `sel`.
    Select,
    /// Tier 2 of P/D rules: the least load.
    LeastLoad,
    /// P/D rules without a usable pair of endpoints: one that does whole requests.
    Rescue,
}

impl Tier {
    /// Every tier.
    pub const ALL: [Tier; 7] =
        [Tier::Session, Tier::Trie, Tier::KvExact, Tier::Claim, Tier::Select, Tier::LeastLoad, Tier::Rescue];

    /// As evidence and commands spell it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Tier::Session => "session",
            Tier::Trie => "trie",
            Tier::KvExact => "kv_exact",
            Tier::Claim => "claim",
            Tier::Select => "select",
            Tier::LeastLoad => "least_load",
            Tier::Rescue => "rescue",
        }
    }
}

/// Which step of the tier named the endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The session was there before.
    Session,
    /// The text's beginning was sent there before.
    Trie,
    /// It has most of the prompt.
    Overlap,
    /// Load weighed more than what another one has.
    Blend,
    /// The winner was at the fleet-wide cap.
    Relief,
    /// It is cold, and its turn.
    Seed,
    /// It will have the prompt's beginning soon.
    Claim,
    /// The rule's `sel`.
    Sel(Select),
    /// It has the least to do.
    LeastLoad,
    /// No pair of prefill and decode endpoints is usable.
    Rescue,
}

impl Reason {
    /// As evidence and commands spell it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Reason::Session => "session",
            Reason::Trie => "trie",
            Reason::Overlap => "overlap",
            Reason::Blend => "blend",
            Reason::Relief => "relief",
            Reason::Seed => "seed",
            Reason::Claim => "claim",
            Reason::Sel(select) => select.name(),
            Reason::LeastLoad => "least_load",
            Reason::Rescue => "rescue",
        }
    }
}

/// The load that a decision saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Requests in flight at the chosen endpoint, before this one.
    pub load: u32,
    /// Requests in flight at all candidates.
    pub total: u64,
    /// Candidates.
    pub candidates: u32,
    /// Requests from which on the winner was too busy; 0 = nothing bounded it.
    pub cap: u64,
    /// What the choice costs in the blend's unit; 0 = the blend counts no cost.
    pub cost: u64,
}

/// Where a request goes, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The endpoint.
    pub endpoint: EndpointIndex,
    /// The rank whose cache counts, where Tier 1.5 or a claim decided and did not divert.
    pub rank: Option<Rank>,
    /// The tier.
    pub tier: Tier,
    /// Which step of it.
    pub reason: Reason,
    /// Blocks predicted to hit at the chosen endpoint, also where the request was diverted to it; of its own size.
    pub hit_blocks: u32,
    /// The tokens in them.
    pub hit_tokens: u64,
    /// Blocks that the prompt has, of the rule's size; 0 where it was not scored.
    pub possible_blocks: u32,
    /// Tokens that would hit at the best candidate.
    pub best_tokens: u64,
    /// Tokens beyond `hit_tokens` that the chosen endpoint will have stored soon.
    pub claimed_tokens: u64,
    /// Why Tier 1.5 did not decide.
    pub miss: Option<MissReason>,
    /// The winner that the blend or spill relief passed over.
    pub spilled_from: Option<EndpointIndex>,
    /// The winner that cold seeding passed over.
    pub seeded_from: Option<EndpointIndex>,
    /// Its number among the hits that seeding counts, where it is one of them.
    pub seed_tick: Option<u64>,
    /// The load it saw.
    pub terms: Terms,
}

impl Decision {
    /// A decision for the endpoint at `place` that nothing more is known of.
    pub(super) fn new(place: usize, tier: Tier, reason: Reason) -> Self {
        Decision {
            endpoint: EndpointIndex(place as u16),
            rank: None,
            tier,
            reason,
            hit_blocks: 0,
            hit_tokens: 0,
            possible_blocks: 0,
            best_tokens: 0,
            claimed_tokens: 0,
            miss: None,
            spilled_from: None,
            seeded_from: None,
            seed_tick: None,
            terms: Terms::default(),
        }
    }
}
