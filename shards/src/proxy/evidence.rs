//! Why a request went where it went, in one header of its answer: `x-kvlane-route`.
//!
//! The value is a list of `name=value`, divided by `; `, in this order; what does not apply is left out. It says nothing of the
//! prompt's text.
//!
//! | name | value |
//! |---|---|
//! | `rule` | number of the rule |
//! | `tier` | which stage decided: `tier0` session, `tier1` text trie, `tier15` KV-exact, `sel` the rule's own selection, `tier2` least load, `rescue` any healthy endpoint |
//! | `ep_idx`, `ep` | the endpoint: its place in the rule, its address |
//! | `rank` | the rank that the engine was told to use |
//! | `blocks` | matched/possible: blocks predicted to come from the endpoint's cache, and those of the prompt that can at most |
//! | `tokens` | predicted to come from the cache/in the prompt |
//! | `load` | requests in flight at the endpoint before this one |
//! | `reason` | `overlap`; `spill` or `seed` with `from`, the `ep_idx` of the winner passed over; else why Tier 1.5 did not decide |
//! | `tried` | endpoints that refused the request before |

use std::fmt::Write;

use crate::ids::Rank;
use crate::route::{Decision, Tier};
use crate::service::Service;

use super::score::Score;

/// The header's name.
pub const HEADER: &str = "x-kvlane-route";

/// The header's value. `rank` is what the engine is told, `load` is that of the endpoint before this request.
#[must_use]
pub fn text(
    service: &Service,
    score: &Score,
    decision: &Decision,
    rank: Option<Rank>,
    load: u32,
    tried: usize,
) -> String {
    let endpoint = &service.endpoints[decision.endpoint.index()];
    let (rule, tier, index) = (service.id.0, tier_name(decision.tier), decision.endpoint.0);
    let mut text = format!("rule={rule}; tier={tier}; ep_idx={index}; ep={}", endpoint.address);
    let mut put = |part: std::fmt::Arguments<'_>| {
        // Writing to a text does not fail.
        let _written = write!(text, "; {part}");
    };
    if let Some(Rank(rank)) = rank {
        put(format_args!("rank={rank}"));
    }
    if let (Some(kv), Score::Runs { prompt_tokens, .. }) = (&service.kv, score) {
        let possible = prompt_tokens.saturating_sub(1) / u64::from(kv.block_tokens.max(1));
        put(format_args!("blocks={}/{possible}", decision.hit_blocks));
        put(format_args!("tokens={}/{prompt_tokens}", decision.hit_tokens));
    }
    put(format_args!("load={load}"));
    match (decision.seeded_from, decision.spilled_from, decision.miss) {
        (Some(from), _, _) => put(format_args!("reason=seed; from={}", from.0)),
        (None, Some(from), _) => put(format_args!("reason=spill; from={}", from.0)),
        (None, None, Some(miss)) => put(format_args!("reason={}", miss.name())),
        (None, None, None) => put(format_args!("reason=overlap")),
    }
    if tried > 0 {
        put(format_args!("tried={tried}"));
    }
    text
}

/// As metrics call it.
fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::KvExact => "tier15",
        Tier::Session => "tier0",
        Tier::Trie => "tier1",
        Tier::Claim => "claim",
        Tier::Select => "sel",
        Tier::LeastLoad => "tier2",
        Tier::Rescue => "rescue",
    }
}
