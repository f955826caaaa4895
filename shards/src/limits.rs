//! Every bound of the data plane in one place, with what happens when it is reached.

use std::time::Duration;

/// The bounds a shard works within; the defaults are those of the configuration file.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Request line and headers together, bytes. Beyond it: 431 and the connection is closed.
    pub head_bytes_max: usize,
    /// Headers in one head. Beyond it: 431 and the connection is closed.
    pub headers_max: usize,
    /// Request body, bytes. Beyond it: 413 and the connection is closed.
    pub body_bytes_max: usize,
    /// Bytes held per direction of a relay before its source is no longer read.
    pub relay_bytes_max: usize,
    /// Open client connections per shard. Beyond it: the oldest idle one is closed, else the new one is refused.
    pub connections_max: usize,
    /// Time for a client to finish its head once it began, and to begin one on a fresh connection. Then: 408.
    pub head_timeout: Duration,
    /// Longest silence while a client sends its body. Then: 408.
    pub body_timeout: Duration,
    /// Longest silence of an idle client connection between requests. Then: closed.
    pub idle_timeout: Duration,
    /// Time to connect to an endpoint. Then: it is masked and the request goes elsewhere.
    pub connect_timeout: Duration,
    /// Longest wait for the first byte of an endpoint's answer; none by default, prefill may take minutes. Then: 504.
    pub first_byte_timeout: Option<Duration>,
    /// Longest silence inside an endpoint's answer. Then: the answer is ended as broken.
    pub stream_idle_timeout: Duration,
    /// Longest silence of a client that does not take the bytes it is owed. Then: closed.
    pub write_timeout: Duration,
    /// Age after which an idle upstream connection is not used again (engines close at 5 s).
    pub upstream_idle_max: Duration,
    /// Idle upstream connections kept per endpoint and shard. Beyond it: closed after use.
    pub upstream_idle_connections_max: usize,
    /// Bytes of prompts that a shard remembers, so that the next turn of a conversation pays for its end only. Beyond it
    /// the one that was not used for longest is forgotten; 0 = nothing is remembered.
    pub prompt_cache_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            head_bytes_max: 64 * 1024,
            headers_max: 100,
            body_bytes_max: 64 * 1024 * 1024,
            relay_bytes_max: 64 * 1024,
            connections_max: 16_384,
            head_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(75),
            connect_timeout: Duration::from_secs(1),
            first_byte_timeout: None,
            stream_idle_timeout: Duration::from_secs(600),
            write_timeout: Duration::from_secs(60),
            upstream_idle_max: Duration::from_secs(3),
            upstream_idle_connections_max: 128,
            prompt_cache_bytes: crate::prompt::PREFIX_CACHE_BYTES,
        }
    }
}
