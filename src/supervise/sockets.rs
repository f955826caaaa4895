//! Listening sockets: made here, duplicated to the shards, kept over rule changes on the same address.

use std::net::{SocketAddr, TcpListener};

use socket2::{Domain, Protocol, Socket, Type};

/// Why an address cannot be listened at.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen at {address}: {source}")]
pub struct BindError {
    /// The address.
    pub address: SocketAddr,
    /// Why.
    pub source: std::io::Error,
}

impl BindError {
    /// Whether someone else has the address.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.source.kind() == std::io::ErrorKind::AddrInUse
    }
}

/// One listening socket per shard. `ours` are the addresses this process listens at already.
///
/// # Errors
/// [`BindError`]: the address is busy, or may not be used.
pub(super) fn listen(
    address: SocketAddr,
    shards: usize,
    backlog: u32,
    ours: &[SocketAddr],
) -> Result<Vec<Option<TcpListener>>, BindError> {
    let error = |source| BindError { address, source };
    // Sockets that share a port with SO_REUSEPORT also share it with another process of this user, each getting a
    // part of the connections: so ask first, without it. A port that we hold ourselves at another address of which
    // one is a wildcard would answer "busy" too.
    if !ours.iter().any(|other| other.port() == address.port()) {
        socket(address, false).map_err(error)?;
    }
    (0..shards).map(|_| join(address, backlog).map(Some)).collect::<std::io::Result<_>>().map_err(error)
}

/// One more listening socket at an address that this process listens at.
pub(super) fn join(address: SocketAddr, backlog: u32) -> std::io::Result<TcpListener> {
    let socket = socket(address, true)?;
    socket.listen(i32::try_from(backlog).unwrap_or(i32::MAX))?;
    Ok(socket.into())
}

fn socket(address: SocketAddr, shared: bool) -> std::io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    socket.set_reuse_address(true)?;
    if shared {
        socket.set_reuse_port(true)?;
    }
    // An address that this host does not hold yet may be listened at: it arrives with a failover.
    if address.is_ipv4() {
        socket.set_freebind_v4(true)?;
    } else {
        socket.set_freebind_v6(true)?;
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_of_another_socket_is_busy_even_if_that_shares_it() {
        let address = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port");
        let sockets = listen(address, 2, 16, &[]).expect("free");
        assert_eq!(sockets.len(), 2);
        let error = listen(address, 2, 16, &[]).expect_err("busy");
        assert!(error.is_busy());
        assert!(error.to_string().starts_with(&format!("cannot listen at {address}: ")), "{error}");
        drop(sockets);
        listen(address, 1, 16, &[]).expect("free again");
    }

    #[test]
    fn an_address_that_this_host_does_not_hold_can_be_listened_at() {
        listen("192.0.2.1:18080".parse().expect("an address"), 1, 16, &[]).expect("IP_FREEBIND");
    }
}
