//! SGLang, releases 0.5.7 to 0.5.23: what of its event stream is its own.
//!
//! Its batches are read as vLLM's ([`super::events`]): arrays up to 0.5.19, maps since; keys as signed integers; tokens
//! as pairs under EAGLE. Here is how a server describes its stream, since 0.5.13, and the proof that every payload of
//! every release is read.

#![forbid(unsafe_code)]

use serde::Deserialize;

#[cfg(test)]
mod tests;

/// What `GET /server_info` says of the server's event stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// Host to connect to; none = the server's own.
    pub host: Option<String>,
    /// Port of rank 0; rank r is at `port + r`.
    pub port: u16,
    /// Port of rank 0's replay socket, since 0.5.22.
    pub replay_port: Option<u16>,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Data-parallel ranks, each with a stream of its own.
    pub ranks: u16,
}

/// Why an answer describes no stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotDescribed {
    /// Events are off, or the release is too old to say.
    #[error(
        "the server describes no KV events; start it with --kv-events-config '{{\"publisher\":\"zmq\"}}' (releases before 0.5.13 have events but do not describe them)"
    )]
    Off,
    /// The answer cannot be read.
    #[error("GET /server_info: {0}")]
    Unreadable(String),
}

#[derive(Deserialize)]
struct ServerInfo {
    kv_events: Option<KvEvents>,
}

#[derive(Deserialize)]
struct KvEvents {
    endpoint_host: String,
    endpoint_port_base: u16,
    replay_endpoint_port_base: Option<u16>,
    block_size: u32,
    dp_size: u16,
}

/// Reads the answer of `GET /server_info`.
///
/// # Errors
/// [`NotDescribed`], which says what to do.
pub fn described(server_info: &[u8]) -> Result<Described, NotDescribed> {
    let info: ServerInfo =
        serde_json::from_slice(server_info).map_err(|error| NotDescribed::Unreadable(error.to_string()))?;
    let events = info.kv_events.ok_or(NotDescribed::Off)?;
    let any_host = matches!(events.endpoint_host.as_str(), "*" | "0.0.0.0" | "::" | "[::]");
    Ok(Described {
        host: (!any_host).then_some(events.endpoint_host),
        port: events.endpoint_port_base,
        replay_port: events.replay_endpoint_port_base,
        block_tokens: events.block_size,
        ranks: events.dp_size,
    })
}
