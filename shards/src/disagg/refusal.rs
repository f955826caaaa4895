//! What clients are told when a request cannot go through its two legs: statuses and names of the reference.

use super::{Dialect, LegError};

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LegRefusal {
    /// 429: all prefill endpoints have as many requests as they may, and nobody may wait.
    Overloaded,
    /// 429: the rule has as many requests under way as it may.
    TotalReached,
    /// 503: no prefill or no decode endpoint is up.
    PoolUnavailable,
    /// 502: the prefill leg failed, on another endpoint too where there was one.
    PrefillFailed(Dialect, &'static str),
    /// 502: the decode endpoint died before its answer began.
    DecodeDied,
    /// 504: the prefill leg took longer than its work lets expect.
    PrefillTimeout,
    /// 504: the decode leg did not begin to answer.
    DecodeTimeout,
    /// 504: no prefill endpoint had a place in time.
    ParkTimeout,
    /// 400 or 503: the body cannot be given what its legs need.
    Unsplittable(Dialect, LegError),
}

impl LegRefusal {
    /// The status code.
    #[must_use]
    pub fn status(&self) -> u16 {
        match self {
            LegRefusal::Unsplittable(_, LegError::OwnMember(_)) => 400,
            LegRefusal::Overloaded | LegRefusal::TotalReached => 429,
            LegRefusal::PrefillFailed(..) | LegRefusal::DecodeDied => 502,
            LegRefusal::PoolUnavailable | LegRefusal::Unsplittable(..) => 503,
            LegRefusal::PrefillTimeout | LegRefusal::DecodeTimeout | LegRefusal::ParkTimeout => 504,
        }
    }

    /// The name that scripts match.
    #[must_use]
    pub fn error(&self) -> &'static str {
        match self {
            LegRefusal::Overloaded | LegRefusal::TotalReached => "pd_overloaded",
            LegRefusal::PoolUnavailable => "pd_pool_unavailable",
            LegRefusal::PrefillFailed(dialect, _) => prefill_failed(*dialect),
            LegRefusal::DecodeDied => "pd_decode_backend_died",
            LegRefusal::PrefillTimeout => "pd_prefill_timeout",
            LegRefusal::DecodeTimeout => "pd_decode_timeout",
            LegRefusal::ParkTimeout => "pd_admission_park_timeout",
            LegRefusal::Unsplittable(_, LegError::OwnMember(_)) => "bad_request",
            LegRefusal::Unsplittable(Dialect::Bootstrap, _) => "pd_sg_oversize_unroutable",
            LegRefusal::Unsplittable(..) => "pd_oversize_unroutable",
        }
    }

    /// What happened, and what to do.
    #[must_use]
    pub fn detail(&self) -> String {
        match self {
            LegRefusal::Overloaded => "all prefill endpoints at in-flight capacity".into(),
            LegRefusal::TotalReached => "the rule at in-flight capacity".into(),
            LegRefusal::PoolUnavailable => "no prefill endpoint or no decode endpoint of the rule is up".into(),
            LegRefusal::PrefillFailed(_, what) => format!("the prefill leg failed: {what}"),
            LegRefusal::DecodeDied => "the decode endpoint ended the connection without an answer".into(),
            LegRefusal::PrefillTimeout => "the prefill endpoint did not answer in time".into(),
            LegRefusal::DecodeTimeout => "the decode endpoint did not begin to answer in time".into(),
            LegRefusal::ParkTimeout => "no prefill endpoint had room in time".into(),
            LegRefusal::Unsplittable(_, error) => error.to_string(),
        }
    }

    /// Seconds after which it may be tried again, where that is known.
    #[must_use]
    pub fn retry_after(&self) -> Option<u32> {
        matches!(self, LegRefusal::Overloaded | LegRefusal::TotalReached).then_some(1)
    }
}

fn prefill_failed(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Bootstrap { "pd_sg_prefill_failed" } else { "pd_prefill_failed" }
}

/// Events that end a stream which broke after it had begun.
#[derive(Clone, Copy, Debug)]
pub struct BrokenEvents {
    /// The endpoint ended it.
    pub died: &'static str,
    /// Nothing came for too long.
    pub idle: &'static str,
    /// The other leg failed.
    pub other_leg: &'static str,
}

const DIED: &str = "\n\ndata: {\"error\":\"pd_decode_backend_died\",\"detail\":\"the decode endpoint ended the answer before its end\"}\n\n";
const IDLE: &str = "\n\ndata: {\"error\":\"pd_idle_timeout\",\"detail\":\"the decode endpoint fell silent\"}\n\n";

/// Those of a dialect.
#[must_use]
pub fn broken_events(dialect: Dialect) -> BrokenEvents {
    let other_leg = match dialect {
        Dialect::Bootstrap => {
            "\n\ndata: {\"error\":\"pd_sg_prefill_failed\",\"detail\":\"the prefill leg failed\"}\n\n"
        }
        _ => "\n\ndata: {\"error\":\"pd_prefill_failed\",\"detail\":\"the prefill leg failed\"}\n\n",
    };
    BrokenEvents { died: DIED, idle: IDLE, other_leg }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::SpliceError;

    #[test]
    fn statuses_and_names_are_the_references() {
        let oversize = LegError::Splice(SpliceError::TooLong);
        for (refusal, status, error) in [
            (LegRefusal::Overloaded, 429, "pd_overloaded"),
            (LegRefusal::PoolUnavailable, 503, "pd_pool_unavailable"),
            (LegRefusal::PrefillFailed(Dialect::Bootstrap, "x"), 502, "pd_sg_prefill_failed"),
            (LegRefusal::DecodeDied, 502, "pd_decode_backend_died"),
            (LegRefusal::PrefillTimeout, 504, "pd_prefill_timeout"),
            (LegRefusal::DecodeTimeout, 504, "pd_decode_timeout"),
            (LegRefusal::ParkTimeout, 504, "pd_admission_park_timeout"),
            (LegRefusal::Unsplittable(Dialect::Bootstrap, oversize), 503, "pd_sg_oversize_unroutable"),
            (LegRefusal::Unsplittable(Dialect::NixlPull, LegError::OwnMember("x")), 400, "bad_request"),
        ] {
            assert_eq!((refusal.status(), refusal.error()), (status, error));
        }
        assert_eq!(LegRefusal::Overloaded.retry_after(), Some(1));
        for dialect in [Dialect::Bootstrap, Dialect::Context] {
            let events = broken_events(dialect);
            for event in [events.died, events.idle, events.other_leg] {
                let json = event.trim().strip_prefix("data: ").expect("an event");
                assert!(serde_json::from_str::<serde_json::Value>(json).is_ok(), "{event}");
            }
        }
    }
}
