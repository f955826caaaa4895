//! Names of endpoints into addresses.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::time::Duration;

use crate::rules::{Host, Rule};

/// How often names are resolved again.
pub(super) const PERIOD: Duration = Duration::from_secs(5);
/// Longest wait for one answer. Then the name has no address for now.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The address of every endpoint of the rule; none where a name has no address. `known` are the addresses so far:
/// a name that still has its address keeps it, however many others it has got.
pub(super) async fn resolve(rule: &Rule, known: &[Option<SocketAddr>]) -> Vec<Option<SocketAddr>> {
    let mut addresses = Vec::with_capacity(rule.endpoints.len());
    let mut names: HashMap<(&str, u16), Vec<SocketAddr>> = HashMap::new();
    for (at, endpoint) in rule.endpoints.iter().enumerate() {
        let address = match &endpoint.host {
            Host::Ip(ip) => Some(SocketAddr::new(*ip, endpoint.port)),
            Host::Name(name) => {
                let found = match names.entry((name, endpoint.port)) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(unknown) => unknown.insert(look_up(name, endpoint.port).await),
                };
                let before = known.get(at).copied().flatten();
                before.filter(|address| found.contains(address)).or_else(|| found.first().copied())
            }
        };
        addresses.push(address);
    }
    addresses
}

async fn look_up(name: &str, port: u16) -> Vec<SocketAddr> {
    match tokio::time::timeout(TIMEOUT, tokio::net::lookup_host((name, port))).await {
        Ok(Ok(addresses)) => {
            let mut addresses: Vec<SocketAddr> = addresses.collect();
            // IPv4 first, as engines listen at 0.0.0.0 unless told otherwise.
            addresses.sort_by_key(|address| (address.is_ipv6(), *address));
            addresses
        }
        Ok(Err(_)) | Err(_) => Vec::new(),
    }
}

/// Two endpoints whose names lead to one address: their requests and events could not be told apart.
pub(super) fn collision(addresses: &[Option<SocketAddr>]) -> Option<SocketAddr> {
    let mut seen = HashSet::new();
    addresses.iter().flatten().find(|address| !seen.insert(**address)).copied()
}
