//! How many descriptors the process may open.

use crate::rules::Rule;
use crate::{admin, supervise};

/// Event streams that there is room for, whatever the configuration names.
const STREAMS_SPARE: usize = 32;

/// Current and highest limit on open descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Descriptors {
    /// In force.
    pub(super) soft: u64,
    /// What this process may raise it to.
    pub(super) hard: u64,
}

/// Reads the limits.
pub(super) fn read() -> std::io::Result<Descriptors> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a live, writable rlimit, which is all getrlimit asks for.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    if result != 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(Descriptors { soft: limit.rlim_cur, hard: limit.rlim_max })
}

/// Raises the limit in force to the highest.
pub(super) fn raise() -> std::io::Result<Descriptors> {
    let found = read()?;
    let limit = libc::rlimit { rlim_cur: found.hard, rlim_max: found.hard };
    // SAFETY: the pointer is to a live rlimit, which setrlimit only reads.
    let result = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
    if result != 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(Descriptors { soft: found.hard, hard: found.hard })
}

/// Most descriptors that shards with this bound on connections and that many event streams can have open at once.
pub(super) fn needed(shards: usize, connections_max: usize, streams: usize) -> u64 {
    // Each client connection may have one to an engine.
    let clients = (shards as u64).saturating_mul(connections_max as u64).saturating_mul(2);
    clients.saturating_add(beside_clients(streams))
}

/// The bound on client connections per shard that `allowed` descriptors leave room for, at least 1. What else the
/// process opens is served first, but gets no more than half.
pub(super) fn connections_that_fit(shards: usize, allowed: u64, streams: usize) -> usize {
    let clients = allowed.saturating_sub(beside_clients(streams)).max(allowed / 2);
    usize::try_from(clients / 2 / shards.max(1) as u64).unwrap_or(usize::MAX).max(1)
}

/// Event streams of these rules.
pub(super) fn streams(rules: &[Rule]) -> usize {
    let of_rule = |rule: &Rule| rule.kv.as_ref().map_or(0, |kv| usize::from(kv.ranks) * rule.endpoints.len());
    rules.iter().map(of_rule).sum()
}

/// What is open beside client connections and those to engines that serve them.
fn beside_clients(streams: usize) -> u64 {
    // A stream has two descriptors of its own, one of its connection and one of its monitor; rules that are posted
    // later bring more of them. The rest of the process needs a few dozen.
    let streams = 4 * streams.max(STREAMS_SPARE) as u64;
    streams + 2 * admin::CONNECTIONS_MAX as u64 + supervise::PROBES_MAX as u64 + 64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_to_the_hard_one() {
        let raised = raise().expect("lowering nothing is always allowed");
        assert_eq!(raised.soft, raised.hard);
        assert_eq!(read().expect("readable"), raised);
    }

    #[test]
    fn the_need_counts_both_sides_of_every_connection() {
        assert_eq!(needed(2, 100, 300) - needed(2, 0, 300), 400);
        assert_eq!(needed(2, 100, 300) - needed(2, 100, 200), 400);
    }

    #[test]
    fn the_bound_that_fits_is_the_largest_that_needs_no_more_than_is_allowed() {
        for (shards, allowed, streams) in [(1, 4096, 0), (2, 20_000, 3), (64, 1 << 20, 1000)] {
            let fits = connections_that_fit(shards, allowed, streams);
            assert!(needed(shards, fits, streams) <= allowed);
            assert!(needed(shards, fits + 1, streams) > allowed);
        }
        assert_eq!(connections_that_fit(2, 256, 0), 32, "half is for clients, however little there is");
        assert_eq!(connections_that_fit(64, 10, 0), 1);
    }
}
