//! Why a request went where it went, in one header of its answer: `x-kvlane-route`.
//!
//! The value is a list of `name=value`, divided by `; `, in this order; what does not apply is left out. It says nothing of the
//! prompt's text.
//!
//! | name | value |
//! |---|---|
//! | `rule` | number of the rule |
//! | `tier` | which stage decided: `tier0` session, `tier1` text tree, `tier15` KV-exact, `claim` what is being stored, `sel` the rule's own selection, `tier2` least load, `rescue` any healthy endpoint |
//! | `reason` | which step of it: `overlap`, `blend`, `relief`, `seed`, `claim`, `session`, `trie`, a `sel` by its name, `least_load`, `rescue` |
//! | `ep_idx`, `ep` | the endpoint: its place in the rule, its address |
//! | `rank` | the rank that the engine was told to use |
//! | `blocks` | matched/possible: blocks of the rule's size predicted to come from the endpoint's cache, and those of the prompt |
//! | `tokens` | predicted to come from the cache/in the prompt |
//! | `claimed` | tokens beyond them that the endpoint will have stored soon |
//! | `load` | requests in flight at the endpoint before this one/at all candidates |
//! | `cap` | requests from which on the winner was too busy |
//! | `cost` | what the choice costs, in the blend's unit |
//! | `from` | `ep_idx` of the winner that blend, relief or seed passed over |
//! | `miss` | why Tier 1.5 did not decide |
//! | `tried` | endpoints that refused the request before |

use std::fmt::Write;

use crate::ids::Rank;
use crate::route::{Decision, Tier};
use crate::service::Service;

use super::score::Score;

/// The header's name.
pub const HEADER: &str = "x-kvlane-route";

/// The header's value. `rank` is what the engine is told.
#[must_use]
pub fn text(service: &Service, score: &Score, decision: &Decision, rank: Option<Rank>, tried: usize) -> String {
    let endpoint = &service.endpoints[decision.endpoint.index()];
    let (rule, tier, reason) = (service.id.0, tier_name(decision.tier), decision.reason.name());
    let index = decision.endpoint.0;
    let mut text = format!("rule={rule}; tier={tier}; reason={reason}; ep_idx={index}; ep={}", endpoint.address);
    let mut put = |part: std::fmt::Arguments<'_>| {
        // Writing to a text does not fail.
        let _written = write!(text, "; {part}");
    };
    if let Some(Rank(rank)) = rank {
        put(format_args!("rank={rank}"));
    }
    if let (Some(kv), Score::Runs { prompt_tokens, .. }) = (&service.kv, score) {
        // A mean over ranks has parts of blocks, and engines may have blocks of another size.
        let matched = decision.hit_tokens / u64::from(kv.block_tokens.max(1));
        put(format_args!("blocks={matched}/{}", decision.possible_blocks));
        put(format_args!("tokens={}/{prompt_tokens}", decision.hit_tokens));
    }
    let terms = &decision.terms;
    if decision.claimed_tokens > 0 {
        put(format_args!("claimed={}", decision.claimed_tokens));
    }
    put(format_args!("load={}/{}", terms.load, terms.total));
    for (name, value) in [("cap", terms.cap), ("cost", terms.cost)] {
        if value > 0 {
            put(format_args!("{name}={value}"));
        }
    }
    if let Some(from) = decision.seeded_from.or(decision.spilled_from) {
        put(format_args!("from={}", from.0));
    }
    if let Some(miss) = decision.miss {
        put(format_args!("miss={}", miss.name()));
    }
    if tried > 0 {
        put(format_args!("tried={tried}"));
    }
    text
}

/// As metrics call it.
#[must_use]
pub fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Session => "tier0",
        Tier::Trie => "tier1",
        Tier::KvExact => "tier15",
        Tier::Claim => "claim",
        Tier::Select => "sel",
        Tier::LeastLoad => "tier2",
        Tier::Rescue => "rescue",
    }
}
