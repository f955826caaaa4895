//! How many descriptors the process may open.

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

/// Most descriptors that shards with these bounds and that many event streams can have open at once.
pub(super) fn needed(shards: usize, connections_max: usize, streams: usize) -> u64 {
    // Each client connection may have one to an engine; a stream has two of its own, one of its connection and one
    // of its monitor; the rest of the process needs a few dozen.
    let clients = (shards as u64).saturating_mul(connections_max as u64).saturating_mul(2);
    clients.saturating_add(4 * streams as u64).saturating_add(64)
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
        assert_eq!(needed(2, 100, 3), 400 + 12 + 64);
    }
}
