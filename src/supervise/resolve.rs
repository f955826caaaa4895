//! Names of endpoints into addresses.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::time::Duration;

use tokio::task::JoinSet;

use crate::rules::{Host, Rule};

/// How often names are resolved again.
pub(super) const PERIOD: Duration = Duration::from_secs(5);
/// Longest wait for one answer where nobody waits for it. Then the name has no address for now.
pub(super) const TIMEOUT: Duration = Duration::from_secs(2);

/// The address of every endpoint of the rule; none where a name has no address. `known` are the addresses so far:
/// a name that still has its address keeps it, however many others it has got. All names are looked up at once.
pub(super) async fn resolve(rule: &Rule, known: &[Option<SocketAddr>], timeout: Duration) -> Vec<Option<SocketAddr>> {
    let mut questions = JoinSet::new();
    let mut asked = HashSet::new();
    for endpoint in &rule.endpoints {
        if let Host::Name(name) = &endpoint.host
            && asked.insert((name.clone(), endpoint.port))
        {
            questions.spawn(look_up(name.clone(), endpoint.port, timeout));
        }
    }
    let found: HashMap<(String, u16), Vec<SocketAddr>> = questions.join_all().await.into_iter().collect();
    let address = |at: usize| {
        let endpoint = &rule.endpoints[at];
        match &endpoint.host {
            Host::Ip(ip) => Some(SocketAddr::new(*ip, endpoint.port)),
            Host::Name(name) => {
                let found = found.get(&(name.clone(), endpoint.port))?;
                let before = known.get(at).copied().flatten();
                before.filter(|address| found.contains(address)).or_else(|| found.first().copied())
            }
        }
    };
    (0..rule.endpoints.len()).map(address).collect()
}

async fn look_up(name: String, port: u16, timeout: Duration) -> ((String, u16), Vec<SocketAddr>) {
    let mut addresses = match tokio::time::timeout(timeout, tokio::net::lookup_host((name.as_str(), port))).await {
        Ok(Ok(addresses)) => addresses.collect(),
        Ok(Err(_)) | Err(_) => Vec::new(),
    };
    // IPv4 first, as engines listen at 0.0.0.0 unless told otherwise.
    addresses.sort_by_key(|address: &SocketAddr| (address.is_ipv6(), *address));
    ((name, port), addresses)
}

/// Two endpoints whose names lead to one address: their requests and events could not be told apart.
pub(super) fn collision(addresses: &[Option<SocketAddr>]) -> Option<SocketAddr> {
    let mut seen = HashSet::new();
    addresses.iter().flatten().find(|address| !seen.insert(**address)).copied()
}
