//! Which addresses this host holds.

use std::net::{IpAddr, SocketAddr, UdpSocket};

/// Whether the host holds the address now: a rule may be for one that only comes with a failover, and until then
/// nobody can connect to it. Asking the kernel costs one socket that sends nothing.
pub(super) fn is_held(address: IpAddr) -> bool {
    // Without IP_FREEBIND, which a fresh socket does not have, only an address of the host can be bound.
    address.is_unspecified() || UdpSocket::bind(SocketAddr::new(address, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_held_and_a_documentation_address_is_not() {
        for (address, held) in [("127.0.0.1", true), ("0.0.0.0", true), ("::", true), ("192.0.2.7", false)] {
            assert_eq!(is_held(address.parse().expect("an address")), held, "{address}");
        }
    }
}
