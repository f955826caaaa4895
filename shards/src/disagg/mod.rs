//! Prefill and decode on separate engines: what each leg of a request is sent, and what a prefill leg's answer says, in
//! the words of each engine. No I/O: the proxy sends, waits and cancels.
//!
//! **Invariant.** A leg's body is the client's own with members set, added or taken out; every other byte is as it came.
//! What a prefill engine answers for the decode engine is handed on verbatim. A number that names a transfer is used once.
//!
//! | dialect | prefill leg | decode leg | sent |
//! |---|---|---|---|
//! | [`nixl`] pull | one token, `kv_transfer_params` that ask | the answer's `kv_transfer_params` | one after the other |
//! | [`nixl`] push | as pull | coordinates of the prefill engine | at once |
//! | [`bootstrap`] (SGLang) | room | the same room | at once |
//! | [`context`] (TensorRT-LLM) | `context_only` | the answer's `disaggregated_params` and ids | one after the other |
//!
//! A request that brings a member of these itself is refused: it would name an engine to fetch from, or a transfer of
//! somebody else's.

#![forbid(unsafe_code)]

pub mod auth;
pub mod bootstrap;
pub mod context;
pub mod ladder;
pub mod nixl;
pub mod refusal;
pub mod stats;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::prompt::{Api, Splice, SpliceError};
use crate::service::Engine;

/// Bytes of a prefill leg's answer that are read: TensorRT-LLM's repeats the prompt's ids. A longer one is a failure of the
/// leg.
pub const ANSWER_BYTES_MAX: usize = 32 * 1024 * 1024;

/// How two engines of a service are made to work on one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// vLLM's NixlConnector: the decode engine comes for the blocks.
    NixlPull,
    /// vLLM's NixlPushConnector: the prefill engine brings them.
    NixlPush,
    /// SGLang's bootstrap rooms.
    Bootstrap,
    /// TensorRT-LLM's context and generation phases, context first.
    Context,
}

impl Dialect {
    /// Whether both legs are sent at once.
    #[must_use]
    pub fn is_concurrent(self) -> bool {
        matches!(self, Dialect::NixlPush | Dialect::Bootstrap)
    }

    /// The dialect of an engine kind; none for kinds that cannot be parted.
    #[must_use]
    pub fn of(engine: Engine, push: bool) -> Option<Dialect> {
        match engine {
            Engine::Vllm if push => Some(Dialect::NixlPush),
            Engine::Vllm => Some(Dialect::NixlPull),
            Engine::Sglang => Some(Dialect::Bootstrap),
            Engine::Trtllm => Some(Dialect::Context),
            Engine::Llamacpp => None,
        }
    }

    /// Whether requests of this kind go through two legs; others are served whole by a decode engine.
    #[must_use]
    pub fn serves(self, api: Api) -> bool {
        match api {
            Api::Completions | Api::ChatCompletions => true,
            Api::Generate => self == Dialect::Bootstrap,
            // vLLM takes and gives `kv_transfer_params` there too, from some release on.
            Api::Responses | Api::Messages => matches!(self, Dialect::NixlPull | Dialect::NixlPush),
        }
    }

    /// Members of a body that are the gateway's alone.
    #[must_use]
    pub fn own_members(self) -> &'static [&'static str] {
        match self {
            Dialect::NixlPull | Dialect::NixlPush => &["kv_transfer_params"],
            Dialect::Bootstrap => &["bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"],
            Dialect::Context => &["disaggregated_params"],
        }
    }
}

/// Why a request cannot be parted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LegError {
    /// The body cannot be edited.
    #[error(transparent)]
    Splice(#[from] SpliceError),
    /// The body brings a member that is the gateway's.
    #[error("`{0}` is set by the gateway on this rule: leave it out")]
    OwnMember(&'static str),
    /// The list of prompts is too long to be looked through.
    #[error("the list of prompts has more than {} bytes", bootstrap::LIST_BYTES_MAX)]
    LongList,
}

/// Whether a request that is of a kind that goes through two legs can: not one that is answered later, or that goes on from
/// what only the engine has stored that answered before.
#[must_use]
pub fn can_be_parted(api: Api, body: &Splice<'_>) -> bool {
    let says = |name: &str| body.value(name).is_some_and(|value| !matches!(value, b"null" | b"false"));
    api != Api::Responses || !["background", "previous_response_id", "conversation"].into_iter().any(says)
}

/// Whether engines part requests of the kinds that not all releases do, as one service has seen.
#[derive(Debug, Default)]
pub struct Parting {
    /// Prefill answers in a row without anything for the decode leg, by [`Parting::place`].
    without: [AtomicU32; 2],
}

/// Prefill answers in a row without parameters, after which requests of the kind are no longer parted.
const WITHOUT_MAX: u32 = 3;
/// Every so many such requests one is parted all the same: engines get newer.
const TRIES_AGAIN: u32 = 256;

impl Parting {
    fn place(&self, api: Api) -> Option<&AtomicU32> {
        match api {
            Api::Responses => Some(&self.without[0]),
            Api::Messages => Some(&self.without[1]),
            Api::Completions | Api::ChatCompletions | Api::Generate => None,
        }
    }

    /// Whether the next request of a kind is to be parted. Counts it where it is not.
    #[must_use]
    pub fn is_wanted(&self, api: Api) -> bool {
        let Some(without) = self.place(api) else { return true };
        if without.load(Ordering::Relaxed) < WITHOUT_MAX {
            return true;
        }
        without.fetch_add(1, Ordering::Relaxed) % TRIES_AGAIN == TRIES_AGAIN - 1
    }

    /// A prefill answer had parameters for the decode leg, or had none.
    pub fn note(&self, api: Api, found: bool) {
        let Some(without) = self.place(api) else { return };
        if found {
            without.store(0, Ordering::Relaxed);
        } else {
            without.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Checks that the client did not set what the gateway sets.
///
/// # Errors
/// The first member that it did.
pub fn check_own(dialect: Dialect, body: &Splice<'_>) -> Result<(), LegError> {
    let set = |name: &&&'static str| body.value(name).is_some_and(|value| value != b"null");
    match dialect.own_members().iter().find(set) {
        Some(name) => Err(LegError::OwnMember(name)),
        None => Ok(()),
    }
}

/// A text as a JSON string, for addresses and names: what would have to be escaped is left out.
fn quoted(text: &str) -> Vec<u8> {
    let plain = text.chars().filter(|letter| !letter.is_control() && !matches!(letter, '"' | '\\'));
    format!("\"{}\"", plain.collect::<String>()).into_bytes()
}

/// How long a prefill leg may take: `factor` times what the engine's speed lets expect, and never less than the floor.
///
/// A flat time-out fails long prompts on small engines; none at all hangs with a dead engine.
#[must_use]
pub fn prefill_budget(floor: Duration, expected_seconds: f32) -> Duration {
    let expected = Duration::try_from_secs_f32(expected_seconds * BUDGET_FACTOR).unwrap_or(BUDGET_MAX);
    expected.max(floor).min(BUDGET_MAX.max(floor))
}

/// Times the expectation that a prefill leg is waited for.
const BUDGET_FACTOR: f32 = 4.0;
/// Longest wait for a prefill leg, whatever is expected of it.
const BUDGET_MAX: Duration = Duration::from_secs(1800);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_follows_the_work_and_keeps_its_floor() {
        let floor = Duration::from_secs(30);
        assert_eq!(prefill_budget(floor, 0.2), floor);
        assert_eq!(prefill_budget(floor, 20.0), Duration::from_secs(80));
        assert_eq!(prefill_budget(floor, f32::INFINITY), BUDGET_MAX);
        assert_eq!(prefill_budget(Duration::from_secs(3600), 1.0), Duration::from_secs(3600));
    }

    #[test]
    fn what_only_one_engine_can_answer_is_not_parted() {
        let check = |api, body: &str| can_be_parted(api, &Splice::of(body.as_bytes()).expect("an object"));
        assert!(check(Api::Responses, r#"{"input":"x","background":false,"previous_response_id":null}"#));
        for member in [r#""background":true"#, r#""previous_response_id":"r""#, r#""conversation":"c""#] {
            assert!(!check(Api::Responses, &format!("{{\"input\":\"x\",{member}}}")), "{member}");
        }
        assert!(check(Api::Messages, r#"{"conversation":"c"}"#));
    }

    #[test]
    fn kinds_that_engines_do_not_part_are_left_whole_and_tried_now_and_then() {
        let parting = Parting::default();
        for api in [Api::Responses, Api::Messages] {
            (0..2).for_each(|_| parting.note(api, false));
            assert!(parting.is_wanted(api));
            parting.note(api, true);
            (0..3).for_each(|_| parting.note(api, false));
            let parted = (0..512).filter(|_| parting.is_wanted(api)).count();
            assert_eq!(parted, 2, "{api:?}");
            parting.note(api, true);
            assert!(parting.is_wanted(api));
        }
        (0..10).for_each(|_| parting.note(Api::ChatCompletions, false));
        assert!(parting.is_wanted(Api::ChatCompletions));
    }

    #[test]
    fn members_of_the_gateway_are_refused_and_nulls_are_not() {
        let check = |dialect, body: &str| check_own(dialect, &Splice::of(body.as_bytes()).expect("an object"));
        assert_eq!(check(Dialect::NixlPull, r#"{"prompt":"x","kv_transfer_params":null}"#), Ok(()));
        assert_eq!(
            check(Dialect::NixlPull, r#"{"kv\u005ftransfer_params":{}}"#),
            Err(LegError::OwnMember("kv_transfer_params"))
        );
        assert_eq!(check(Dialect::Bootstrap, r#"{"bootstrap_room":1}"#), Err(LegError::OwnMember("bootstrap_room")));
        assert_eq!(check(Dialect::Context, r#"{"kv_transfer_params":{}}"#), Ok(()));
    }
}
