//! The route decision: values in, a decision with its reasons out. No I/O, no clock, no randomness of its own.

use crate::ids::{EndpointIndex, Rank, ShardId};
use crate::inventory::Run;
use crate::load::LoadTable;
use crate::service::{MissReason, Service};

/// What is known of a prompt when the decision is made.
#[derive(Clone, Copy, Debug)]
pub enum Evidence<'a> {
    /// Tier 1.5 cannot say anything, and why.
    None(MissReason),
    /// Runs of the holders, possibly none.
    Scored {
        /// Tokens in the prompt, exact or estimated.
        prompt_tokens: u64,
        /// Contiguous runs from block 0.
        runs: &'a [Run],
    },
}

/// The tier that decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Tier 1.5: KV-exact.
    KvExact,
    /// The rule's own `sel`.
    Select,
}

/// Where a request goes, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The endpoint.
    pub endpoint: EndpointIndex,
    /// The rank whose cache counts, where Tier 1.5 decided and did not divert.
    pub rank: Option<Rank>,
    /// The tier.
    pub tier: Tier,
    /// Blocks predicted to hit at the chosen endpoint.
    pub hit_blocks: u32,
    /// Why Tier 1.5 did not decide.
    pub miss: Option<MissReason>,
    /// The winner that spill relief passed over.
    pub spilled_from: Option<EndpointIndex>,
    /// The winner that cold seeding passed over.
    pub seeded_from: Option<EndpointIndex>,
}

/// What a shard brings to its decisions.
#[derive(Debug)]
pub struct Chooser<'a> {
    /// The shard.
    pub shard: ShardId,
    /// In-flight counts.
    pub loads: &'a LoadTable,
    /// Round-robin position of this shard in this service; each shard starts at an offset of its own.
    pub turn: &'a mut u32,
}

/// Chooses an endpoint; none when no endpoint is a candidate. `tried` are endpoints that already refused this
/// request. Counts nothing but the service's seed tick: the caller counts the decision it carries out.
pub fn decide(
    _service: &Service,
    _evidence: Evidence<'_>,
    _tried: &[EndpointIndex],
    _chooser: &mut Chooser<'_>,
) -> Option<Decision> {
    None
}
