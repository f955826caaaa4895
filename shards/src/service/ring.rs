//! The ring of consistent hashing with bounded load (`sel` 8).
//!
//! **Invariant.** An endpoint's points hang on its address alone, so that every gateway in front of the same endpoints
//! has the same ring, and an endpoint that comes or goes moves only the keys between its points and their predecessors.

#![forbid(unsafe_code)]

use std::net::SocketAddr;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::ids::EndpointIndex;

/// Points looked at for one key. Beyond it the key's owner and its neighbours are full or masked, and the caller goes by
/// load alone.
const STEPS_MAX: usize = 1024;

/// Points of endpoints on a circle of 64 bits, in ascending order.
#[derive(Debug)]
pub struct Ring(Box<[(u64, EndpointIndex)]>);

impl Ring {
    /// A ring with `replication` points per endpoint.
    #[must_use]
    pub fn new(endpoints: impl Iterator<Item = (EndpointIndex, SocketAddr)>, replication: u16) -> Self {
        let mut points = Vec::new();
        for (index, address) in endpoints {
            let name = address.to_string();
            points.extend((0..replication).map(|copy| (xxh3_64_with_seed(name.as_bytes(), copy.into()), index)));
        }
        points.sort_unstable();
        Ring(points.into_boxed_slice())
    }

    /// The endpoints from the key's point on, in order of the ring; one may come several times.
    pub fn from(&self, key: u64) -> impl Iterator<Item = EndpointIndex> {
        let start = self.0.partition_point(|(point, _)| *point < key);
        self.0[start..].iter().chain(&self.0[..start]).take(STEPS_MAX).map(|(_, index)| *index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(ports: &[u16], replication: u16) -> Ring {
        let address = |port: &u16| (EndpointIndex(*port), SocketAddr::from(([10, 0, 0, 1], *port)));
        Ring::new(ports.iter().map(address), replication)
    }

    fn owners(ring: &Ring) -> Vec<EndpointIndex> {
        (0..4096_u64).map(|key| ring.from(key << 52).next().expect("a point")).collect()
    }

    #[test]
    fn an_endpoint_that_leaves_moves_its_own_keys_and_no_others() {
        let before = owners(&ring(&[1, 2, 3, 4], 100));
        let after = owners(&ring(&[1, 2, 4], 100));
        for (before, after) in before.iter().zip(&after) {
            assert!(before == after || *before == EndpointIndex(3));
        }
    }

    #[test]
    fn more_points_make_shares_more_equal() {
        let spread = |replication| {
            let owners = owners(&ring(&[1, 2, 3, 4], replication));
            let shares = [1, 2, 3, 4].map(|port| owners.iter().filter(|owner| owner.0 == port).count());
            shares.iter().max().expect("four shares") - shares.iter().min().expect("four shares")
        };
        assert!(spread(1) > spread(100), "{} with one point each, {} with 100", spread(1), spread(100));
        assert!(spread(1024) < 256, "{}", spread(1024));
    }

    #[test]
    fn keys_beyond_the_last_point_go_on_at_the_first() {
        let ring = ring(&[1, 2], 2);
        assert_eq!(ring.from(u64::MAX).take(4).collect::<Vec<_>>(), ring.from(0).take(4).collect::<Vec<_>>());
        assert_eq!(Ring::new(std::iter::empty(), 100).from(7).count(), 0);
    }
}
