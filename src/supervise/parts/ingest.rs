//! Ingest as the supervisor handles it.

use std::sync::Arc;

use shards::ids::ServiceId;
use shards::inventory::Writer;
use shards::load::LoadTable;

use crate::config::Config;
use crate::cores::Plan;
use crate::supervise::Entry;

use super::PartError;

/// The way to ingest: changes of subscriptions, and the state of event streams.
#[derive(Clone, Debug)]
pub struct IngestPart;

impl IngestPart {
    pub(super) fn start(_config: &Config, _plan: &Plan, _loads: &Arc<LoadTable>) -> Result<Self, PartError> {
        Ok(IngestPart)
    }

    pub(crate) fn add(&self, _entry: &Entry, _writer: Writer) {}

    pub(crate) fn update(&self, _entry: &Entry) {}

    pub(crate) fn remove(&self, _id: ServiceId) {}

    /// State of every event stream, for the API.
    #[must_use]
    pub fn report(&self) -> Vec<serde_json::Value> {
        Vec::new()
    }

    /// State of every event stream, for Prometheus.
    pub(crate) fn encode(&self, _families: &mut crate::admin::Families<'_>) -> std::fmt::Result {
        Ok(())
    }

    pub(super) fn stop(&self) {}
}
