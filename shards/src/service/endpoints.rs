//! The endpoints of one compiled service, with a number that tells whether they are still the same.

#![forbid(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};

use super::Endpoint;
use super::vitals::changes;

/// Endpoints by [`EndpointIndex`](crate::ids::EndpointIndex).
#[derive(Debug)]
pub struct Endpoints {
    list: Vec<Endpoint>,
    /// No other list of the process has it, nor had this one while it was another.
    number: u64,
}

/// A state of a service's endpoints: what was worked out from their settings and vitals holds while it is the same, but for
/// how many blocks each holds, of which it tells no more than the [magnitude](super::vitals::magnitude).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edition {
    number: u64,
    vitals: u64,
}

fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Endpoints {
    /// The state they are in. It is to be read before what it is to tell of.
    #[must_use]
    pub fn edition(&self) -> Edition {
        Edition { number: self.number, vitals: changes() }
    }
}

impl From<Vec<Endpoint>> for Endpoints {
    fn from(list: Vec<Endpoint>) -> Self {
        Endpoints { list, number: next_number() }
    }
}

impl Deref for Endpoints {
    type Target = [Endpoint];

    fn deref(&self) -> &[Endpoint] {
        &self.list
    }
}

/// Whoever can change them is taken to have done so.
impl DerefMut for Endpoints {
    fn deref_mut(&mut self) -> &mut [Endpoint] {
        self.number = next_number();
        &mut self.list
    }
}

impl<'a> IntoIterator for &'a Endpoints {
    type Item = &'a Endpoint;
    type IntoIter = std::slice::Iter<'a, Endpoint>;

    fn into_iter(self) -> Self::IntoIter {
        self.list.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::EndpointIndex;
    use crate::load::LoadSlot;
    use crate::service::EndpointShared;

    #[test]
    fn whatever_a_decision_keeps_of_them_makes_another_edition_when_it_changes() {
        let shared = EndpointShared::new(EndpointIndex(0), LoadSlot(0), 1);
        let mut endpoints = Endpoints::from(vec![Endpoint::at(([127, 0, 0, 1], 80).into(), shared)]);
        type Change = fn(&mut Endpoints);
        let changes: [(&str, Change); 6] = [
            ("down", |all| _ = all[0].shared.mark_down()),
            ("up", |all| _ = all[0].shared.mark_up()),
            ("the first block", |all| all[0].shared.set_kv_blocks(1)),
            ("many blocks", |all| all[0].shared.set_kv_blocks(1_000)),
            ("another cache", |all| all[0].shared.set_cache_blocks(Some(9))),
            ("drained", |all| all[0].weight = 0),
        ];
        for (what, change) in changes {
            let before = endpoints.edition();
            change(&mut endpoints);
            assert_ne!(endpoints.edition(), before, "{what}");
        }
        let other = Endpoints::from(Vec::new());
        assert_ne!(other.edition().number, endpoints.edition().number);
    }
}
