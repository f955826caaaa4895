//! The event streams of rules without a gateway around them: `kvlane doctor` listens with the gateway's own ingest, so
//! that what it finds is what the gateway would find.
//!
//! **Invariant.** It only subscribes, and asks for replays: TensorRT-LLM's drain, which takes events away from others, and
//! addresses of ours that engines connect to, which the running gateway has, are left out.

use std::net::SocketAddr;
use std::sync::Arc;

use shards::load::LoadTable;

use crate::discovery::ServiceFacts;
use crate::ingest::{Ingest, IngestOptions, Mode, StreamStatus};
use crate::rules::Rule;

use super::parts;
use super::registry::{Entry, Events, Origin, Registry, RegistryError};
use super::resolve;

/// Endpoints that there is room for.
const SLOTS: usize = 4096;
/// Keys an inventory is sized for, per endpoint; more still work.
const BLOCKS_EXPECTED: usize = 1000;

/// Ingest and what it fills.
#[derive(Debug)]
pub(crate) struct Rehearsal {
    registry: Registry,
    ingest: Ingest,
}

impl Rehearsal {
    /// Starts the thread.
    pub(crate) fn start() -> std::io::Result<Self> {
        let loads = Arc::new(LoadTable::new(1, SLOTS));
        let ingest = Ingest::start(IngestOptions::new(Arc::clone(&loads)))?;
        Ok(Rehearsal { registry: Registry::new(loads, 1, BLOCKS_EXPECTED), ingest })
    }

    /// The addresses of a rule's endpoints; none where a name has no address.
    pub(crate) async fn resolve(rule: &Rule) -> Vec<Option<SocketAddr>> {
        resolve::resolve(rule, &vec![None; rule.endpoints.len()], resolve::TIMEOUT).await
    }

    /// Begins to listen to a rule's engines, of which `facts` are known.
    pub(crate) fn add(
        &mut self,
        rule: Rule,
        addresses: &[Option<SocketAddr>],
        facts: ServiceFacts,
    ) -> Result<Arc<Entry>, RegistryError> {
        let prepared = self.registry.prepare(rule, Origin::File, addresses, &[])?;
        let entry = Arc::new(prepared.entry.learned(facts));
        self.registry.commit(self.registry.with(&[], [&entry]));
        if let Events::Start(writer) = prepared.events {
            let mut sources = parts::sources(&entry);
            for endpoint in &mut sources.endpoints {
                endpoint.drain = None;
                endpoint.ranks.retain(|rank| matches!(rank.mode, Mode::Connect(_)));
            }
            // Gone would mean that nothing is heard, which the streams say.
            let _ = self.ingest.add_service(sources, *writer);
        }
        Ok(entry)
    }

    /// What was heard so far.
    pub(crate) fn streams(&self) -> Vec<StreamStatus> {
        self.ingest.status()
    }
}
