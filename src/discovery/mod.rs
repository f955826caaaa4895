//! What engines say of themselves: release, models, adapters.
//!
//! The control core asks every endpoint of a KV rule every few seconds. Three things follow from the answers: the
//! tokenizers of the models are loaded before the first request for them; a request for an adapter uses its base's
//! tokenizer and the adapter's extra keys; and extras are keyed in the form of the engines' release.
//!
//! **Invariant.** An answer that is missing or makes no sense changes nothing that was known: engines that restart or
//! hide their paths are taken for what they were. No path asked here changes anything at an engine.

#![forbid(unsafe_code)]

mod facts;
mod http;
mod load;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use shards::ids::{EndpointIndex, ServiceId};
use shards::service::Engine;

pub use facts::{EndpointFacts, ServiceFacts};
pub use http::{Call, Reply, get, request};
pub use load::{EngineMetrics, has_metrics, read_metrics};

/// How often an endpoint is asked.
pub const PERIOD: Duration = Duration::from_secs(5);
/// How often SGLang's server info is asked for, which costs every scheduler of the engine a message.
const SERVER_INFO_PERIOD: Duration = Duration::from_secs(60);
/// Longest wait for one answer.
const TIMEOUT: Duration = Duration::from_secs(2);

/// An endpoint of a service.
pub type Key = (ServiceId, EndpointIndex);

/// What became of the gateway's last call to an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// There was none yet.
    #[default]
    Untried,
    /// It answered.
    Open,
    /// It answered 401 or 403: the engine is well, and wants another `engineTokenFile`.
    Denied(u16),
    /// It did not answer, or not what it was asked.
    Failed(String),
}

/// What is known of one endpoint.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// What it says of itself.
    pub facts: EndpointFacts,
    /// What became of the last call about itself.
    pub access: Access,
    /// What became of the last `GET /health`.
    pub health: Access,
    server_info_at: Option<Instant>,
}

/// What is known of every endpoint; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Discovery(Arc<Mutex<BTreeMap<Key, Found>>>);

impl Discovery {
    /// What is known of an endpoint.
    #[must_use]
    pub fn found(&self, key: Key) -> Found {
        self.lock().get(&key).cloned().unwrap_or_default()
    }

    /// Keeps what an endpoint answered.
    pub fn put(&self, key: Key, found: Found) {
        let mut all = self.lock();
        let health = all.get(&key).map(|known| known.health.clone()).unwrap_or_default();
        all.insert(key, Found { health, ..found });
    }

    /// Keeps what became of a health probe; true if it is another outcome than before.
    pub fn put_health(&self, key: Key, health: Access) -> bool {
        let mut all = self.lock();
        let known = all.entry(key).or_default();
        let changed = known.health != health;
        known.health = health;
        changed
    }

    /// Forgets endpoints that are in no rule any more.
    pub fn retain(&self, keep: impl Fn(&Key) -> bool) {
        self.lock().retain(|key, _| keep(key));
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, Found>> {
        // Every change is one insertion; a thread that died with the lock left whole values.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks an endpoint about itself, and returns what is known of it then.
pub async fn ask(engine: Engine, address: SocketAddr, authorization: Option<&str>, known: Found) -> Found {
    let mut found = known;
    let mut asking = Asking { address, authorization, access: Access::Open };
    match engine {
        Engine::Sglang => {
            let due = found.server_info_at.is_none_or(|at| at.elapsed() >= SERVER_INFO_PERIOD);
            if due && asking.answer("/server_info", |body| found.facts.read_server_info(body)).await {
                found.server_info_at = Some(Instant::now());
            }
        }
        Engine::Vllm | Engine::Trtllm => {
            asking.answer("/version", |body| found.facts.read_version(body)).await;
        }
        Engine::Llamacpp => {}
    }
    asking.answer("/v1/models", |body| found.facts.read_models(body)).await;
    if asking.access != Access::Open {
        // It may come back as another release.
        found.server_info_at = None;
    }
    Found { access: asking.access, ..found }
}

/// Calls to one endpoint; the first failure stands for all.
struct Asking<'a> {
    address: SocketAddr,
    authorization: Option<&'a str>,
    access: Access,
}

impl Asking<'_> {
    /// Asks for a path, unless an earlier one failed for good; true when the answer could be read.
    async fn answer(&mut self, path: &str, read: impl FnOnce(&[u8]) -> bool) -> bool {
        let outcome = match get(self.address, path, self.authorization, TIMEOUT).await {
            Ok(reply) if reply.status == 200 && read(&reply.body) => return true,
            Ok(Reply { status: status @ (401 | 403), .. }) => Access::Denied(status),
            Ok(reply) => Access::Failed(format!("GET {path}: an answer of status {} that says nothing", reply.status)),
            Err(error) => Access::Failed(format!("GET {path}: {error}")),
        };
        if self.access == Access::Open {
            self.access = outcome;
        }
        false
    }
}

#[cfg(test)]
mod tests;
