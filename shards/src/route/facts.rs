//! What a decision stands on.

use crate::ids::{EndpointIndex, Rank};
use crate::inventory::Run;
use crate::service::MissReason;

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

/// What a decision knows of a request.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// What Tier 1.5 knows of its prompt.
    pub evidence: Evidence<'a>,
    /// Endpoints that already refused it.
    pub tried: &'a [EndpointIndex],
    /// Hash of the client's IP address.
    pub client: u64,
    /// Hash of the prompt's beginning, as the service's [`PrefixHashing`](crate::service::PrefixHashing) says; asked for
    /// by selections that [need it](crate::service::Select::asks_prefix).
    pub prefix: Option<u64>,
    /// Hash of the id of its conversation or session.
    pub conversation: Option<u64>,
    /// Where its conversation or session was sent before.
    pub session: Option<Pin>,
    /// Where the longest beginning of its text was sent before.
    pub trie: Option<TrieMatch>,
    /// What other requests under way will have stored of its prompt.
    pub claims: &'a [Claimed],
    /// Tokens of its prompt as far as they can be guessed, where the evidence does not say; 0 = nothing is known.
    pub speculative_tokens: u64,
    /// Its number among the hits that seeding counts, where an earlier decision that was not carried out has drawn it: a
    /// request is counted once.
    pub seed_tick: Option<u64>,
}

impl<'a> Facts<'a> {
    /// A request of which only the evidence is known.
    #[must_use]
    pub fn of(evidence: Evidence<'a>) -> Self {
        Facts {
            evidence,
            tried: &[],
            client: 0,
            prefix: None,
            conversation: None,
            session: None,
            trie: None,
            claims: &[],
            speculative_tokens: 0,
            seed_tick: None,
        }
    }

    /// Tokens of the prompt, exact or guessed; 0 = nothing is known.
    #[must_use]
    pub fn prompt_tokens(&self) -> u64 {
        match self.evidence {
            Evidence::Scored { prompt_tokens, .. } => prompt_tokens,
            Evidence::None(_) => self.speculative_tokens,
        }
    }
}

/// Where a session was sent (Tier 0).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pin {
    /// Its endpoint; in P/D rules the prefill endpoint.
    pub prefill: EndpointIndex,
    /// Its decode endpoint, in P/D rules.
    pub decode: Option<EndpointIndex>,
}

/// Where the beginning of a text was sent (Tier 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrieMatch {
    /// The endpoint.
    pub endpoint: EndpointIndex,
    /// How much of the text it was sent before, 0 to 100 percent.
    pub matched_percent: u8,
}

/// A beginning of the prompt that an endpoint will have stored soon, because a request with it is under way there. It
/// decides where a request is placed and is never a hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claimed {
    /// The endpoint.
    pub endpoint: EndpointIndex,
    /// The rank that was asked for; none where the engine chose.
    pub rank: Option<Rank>,
    /// Tokens from the prompt's beginning on.
    pub tokens: u64,
}
