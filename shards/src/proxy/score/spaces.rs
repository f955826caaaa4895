//! The key spaces that a prompt is walked through: the service's own, those of holders with other keys, and the table of decode
//! endpoints.

use std::num::NonZeroU32;

use crate::block::Contract;
use crate::block::vllm::Tagging;
use crate::ids::BlockKey;
use crate::inventory::{Guard, Reader, Run, Space, SpaceIndex, Walk};
use crate::prompt::{BodyView, Job};
use crate::proxy::routes::RequestView;
use crate::service::KvExact;

/// Whether some holder's keys are not the rule's.
pub(super) fn has_other_spaces(reader: &Reader) -> bool {
    reader.enter().is_some_and(|guard| guard.other_spaces().next().is_some())
}

/// The forms that the engines key the request's adapter or salt in, the contract's own first; none for a request that
/// says nothing of the kind, whose keys are the same in all of them.
pub(super) fn forms(kv: &KvExact, body: &BodyView<'_>, request: &RequestView<'_>) -> Vec<Tagging> {
    let adapted = || {
        let model = body.model.as_deref().or_else(|| request.model());
        model.is_some_and(|model| kv.adapters.contains_key(model))
    };
    match kv.contract {
        Contract::Vllm { tagging, .. } if body.is_salted() || adapted() => {
            std::iter::once(tagging).chain(kv.other_forms.iter().copied()).collect()
        }
        _ => Vec::new(),
    }
}

/// Adds the key streams of holders that do not have the rule's keys; for most services there are none.
pub(super) fn other_walks(job: &mut Job<'_>, reader: &Reader, kv: &KvExact, forms: &[Tagging]) -> Vec<InSpace> {
    let Some(guard) = reader.enter() else { return Vec::new() };
    let own = NonZeroU32::new(kv.block_tokens).map(|block_tokens| Space { contract: kv.contract, block_tokens });
    let own_forms = own.into_iter().flat_map(|space| in_forms(space, forms.get(1..).unwrap_or_default()));
    let mut walks: Vec<_> = own_forms.map(|space| (SpaceIndex::OWN, space)).collect();
    for (index, space) in guard.other_spaces() {
        match space.contract {
            Contract::Vllm { .. } if !forms.is_empty() => {
                walks.extend(in_forms(space, forms).map(|space| (index, space)));
            }
            _ => walks.push((index, space)),
        }
    }
    // A contract that cannot key what the request says has no holder for it.
    walks.retain(|(_, space)| job.also(&space.contract, space.block_tokens).is_ok());
    walks.into_iter().map(|(index, space)| InSpace::new(index, Some(space.block_tokens))).collect()
}

/// A key space as engines of releases with these forms of extra keys fill it.
fn in_forms(space: Space, forms: &[Tagging]) -> impl Iterator<Item = Space> {
    forms.iter().filter_map(move |tagging| match space.contract {
        Contract::Vllm { none_hash, lookahead, .. } => {
            Some(Space { contract: Contract::Vllm { none_hash, tagging: *tagging, lookahead }, ..space })
        }
        _ => None,
    })
}

/// A walk among the holders of one key space.
#[derive(Debug)]
pub(super) struct InSpace {
    pub(super) space: SpaceIndex,
    pub(super) walk: Walk,
    /// Tokens per block; none = the rule's.
    pub(super) block_tokens: Option<NonZeroU32>,
    /// Some holder may go further.
    pub(super) open: bool,
    /// Keys shown, in spaces beside the service's own.
    pub(super) keys: Vec<BlockKey>,
    /// Runs in blocks of the space, known at the end.
    pub(super) runs: Vec<Run>,
}

impl InSpace {
    pub(super) fn new(space: SpaceIndex, block_tokens: Option<NonZeroU32>) -> Self {
        let walk = Walk::in_space(space);
        InSpace { space, walk, block_tokens, open: true, keys: Vec::new(), runs: Vec::new() }
    }

    /// Notes its runs, and adds them to those of all spaces.
    pub(super) fn add_runs(&mut self, guard: &Guard<'_>, runs: &mut Vec<Run>) {
        let block_tokens = self.block_tokens;
        self.runs.extend(self.walk.runs(guard).map(|run| Run { block_tokens, ..run }));
        runs.extend_from_slice(&self.runs);
    }
}

/// A walk among decode endpoints, in their table.
pub(super) struct AtDecode<'a> {
    reader: &'a Reader,
    walk: Walk,
    /// Some of them may go further.
    pub(super) open: bool,
}

impl<'a> AtDecode<'a> {
    pub(super) fn new(reader: &'a Reader) -> Self {
        AtDecode { reader, walk: Walk::in_space(SpaceIndex::OWN), open: true }
    }

    pub(super) fn advance(&mut self, keys: &[BlockKey]) {
        self.open = self.open && self.reader.enter().is_some_and(|guard| guard.advance(&mut self.walk, keys));
    }

    pub(super) fn runs(&self) -> Vec<Run> {
        self.reader.enter().map_or_else(Vec::new, |guard| self.walk.runs(&guard).collect())
    }
}
