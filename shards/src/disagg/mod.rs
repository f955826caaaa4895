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
            _ => false,
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
