//! May an engine be drained, by what `GET /server_info` says of it?

#![forbid(unsafe_code)]

use serde::Deserialize;

/// What is to be done with an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// Drain it.
    Admitted,
    /// Leave it alone, for a reason that may go away.
    Refused(String),
    /// Not reachable, or not ready.
    Later(String),
}

#[derive(Deserialize)]
struct ServerInfo {
    kv_cache_hash_algo: Option<String>,
    tokens_per_block: Option<u32>,
}

/// Judges an answer. Releases that say nothing of their cache, or have no such endpoint, are admitted: their events
/// speak for themselves.
pub(super) fn judge(status: u16, body: &[u8], block_tokens: u32) -> Admission {
    match status {
        200..=299 => {}
        401 | 403 => return Admission::Refused(unauthorized(status)),
        404 | 405 | 501 => return Admission::Admitted,
        _ => return Admission::Later(format!("GET /server_info: {status}")),
    }
    let info: ServerInfo = match serde_json::from_slice(body) {
        Ok(info) => info,
        Err(error) => return Admission::Later(format!("GET /server_info: {error}")),
    };
    if let Some(tokens) = info.tokens_per_block.filter(|tokens| *tokens != block_tokens) {
        return Admission::Refused(format!(
            "block_size_mismatch: the engine's tokens_per_block is {tokens}, the rule's kvBlockSize {block_tokens}; \
             set kvBlockSize to {tokens}"
        ));
    }
    match info.kv_cache_hash_algo.as_deref() {
        None | Some("auto" | "v1_block_key" | "v2_sha256" | "v2_sha256_64") => Admission::Admitted,
        Some(other) => Admission::Refused(format!(
            "the engine's kv_cache_event_hash_algo is {other}, whose keys are not known; set it to v1_block_key"
        )),
    }
}

/// What is said where the engine wants another token.
pub(super) fn unauthorized(status: u16) -> String {
    format!("the engine answers {status}: the gateway's own calls need a token; correct engineTokenFile")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_drained_only_where_its_blocks_can_be_understood() {
        let check = |status, body: &str, expected: fn(&Admission) -> bool| {
            let admission = judge(status, body.as_bytes(), 32);
            assert!(expected(&admission), "{status} {body}: {admission:?}");
        };
        let admitted: fn(&Admission) -> bool = |admission| *admission == Admission::Admitted;
        let later: fn(&Admission) -> bool = |admission| matches!(admission, Admission::Later(_));
        check(200, r#"{"disaggregated_params":{}}"#, admitted);
        check(200, r#"{"kv_cache_hash_algo":"v1_block_key","tokens_per_block":32}"#, admitted);
        check(200, r#"{"kv_cache_hash_algo":"v2_sha256_64"}"#, admitted);
        check(404, "", admitted);
        check(503, "", later);
        check(200, "no json", later);
        check(200, r#"{"tokens_per_block":64}"#, |admission| match admission {
            Admission::Refused(why) => why.contains("64") && why.contains("32"),
            _ => false,
        });
        check(200, r#"{"kv_cache_hash_algo":"v9"}"#, |a| matches!(a, Admission::Refused(why) if why.contains("v9")));
        check(401, "", |a| matches!(a, Admission::Refused(why) if why.contains("engineTokenFile")));
    }
}
