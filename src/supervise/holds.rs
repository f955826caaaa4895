//! Endpoints that an operator has taken out, whatever their probes say (`POST /config/endpointhoststate`).

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Holds at once. Beyond it new ones are refused.
pub(crate) const HOLDS_MAX: usize = 4096;

/// What is held: a host's engines, or the one at a port.
pub(crate) type Held = (IpAddr, Option<u16>);

/// All holds; they end with the process.
#[derive(Clone, Debug, Default)]
pub struct Holds(Arc<Mutex<HashMap<Held, HostState>>>);

/// An operator's word on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostState {
    /// As its probes say.
    Green,
    /// Takes nothing new.
    Yellow,
    /// Takes nothing new.
    Red,
}

impl HostState {
    /// The state of a name, in any case.
    pub(crate) fn of_name(name: &str) -> Option<Self> {
        let all = [("green", HostState::Green), ("yellow", HostState::Yellow), ("red", HostState::Red)];
        all.into_iter().find(|(known, _)| name.eq_ignore_ascii_case(known)).map(|(_, state)| state)
    }
}

impl Holds {
    /// Only maps are touched under the lock, so it is never held for long, and never poisoned.
    fn lock(&self) -> MutexGuard<'_, HashMap<Held, HostState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the state of a host or of one of its ports; false where there is no room.
    pub(crate) fn set(&self, held: Held, state: HostState) -> bool {
        let mut holds = self.lock();
        if state == HostState::Green {
            // A host that is well is so at every port.
            holds.retain(|(ip, port), _| *ip != held.0 || (held.1.is_some() && *port != held.1));
            return true;
        }
        if holds.len() >= HOLDS_MAX && !holds.contains_key(&held) {
            return false;
        }
        holds.insert(held, state);
        true
    }

    /// Whether an engine is held out.
    #[must_use]
    pub fn has(&self, address: SocketAddr) -> bool {
        let holds = self.lock();
        !holds.is_empty()
            && (holds.contains_key(&(address.ip(), None)) || holds.contains_key(&(address.ip(), Some(address.port()))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hold_is_for_a_host_or_a_port_and_green_ends_it() {
        let holds = Holds::default();
        let ip: IpAddr = "10.0.0.1".parse().expect("an address");
        let at = |port| SocketAddr::new(ip, port);
        assert!(holds.set((ip, Some(8000)), HostState::Red));
        assert!(holds.has(at(8000)) && !holds.has(at(8001)));
        assert!(holds.set((ip, None), HostState::Yellow));
        assert!(holds.has(at(8001)));
        assert!(holds.set((ip, Some(8000)), HostState::Green));
        assert!(holds.has(at(8000)), "the host is held still");
        assert!(holds.set((ip, None), HostState::Green));
        assert!(!holds.has(at(8000)) && !holds.has(at(8001)));
    }
}
