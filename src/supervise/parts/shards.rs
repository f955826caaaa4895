//! The shards as the supervisor handles them.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use shards::ids::ShardId;
use shards::load::LoadTable;
use shards::service::Tables;

use crate::config::Config;
use crate::cores::Plan;

use super::PartError;

/// What others may know of one shard.
#[derive(Clone, Debug)]
pub struct ShardView {
    /// Its number.
    pub id: ShardId,
    /// The core it runs on.
    pub core: usize,
}

impl ShardView {
    /// The shard's state for the status page.
    #[must_use]
    pub fn report(&self) -> serde_json::Value {
        serde_json::json!({"shard": self.id.0, "core": self.core})
    }
}

#[derive(Debug)]
pub(crate) struct Shards {
    cores: Vec<usize>,
}

impl Shards {
    pub(super) fn start(_config: &Config, plan: &Plan, _loads: &Arc<LoadTable>) -> Result<Self, PartError> {
        Ok(Shards { cores: plan.shards.clone() })
    }

    pub(crate) fn len(&self) -> usize {
        self.cores.len()
    }

    pub(crate) fn views(&self) -> Vec<ShardView> {
        self.cores.iter().enumerate().map(|(i, core)| ShardView { id: ShardId(i as u16), core: *core }).collect()
    }

    /// Gives every shard the tables and waits until all serve with them.
    pub(crate) async fn tables(&self, _tables: Arc<Tables>) -> Result<(), PartError> {
        Ok(())
    }

    /// Lets every shard accept on a socket of its own.
    pub(crate) async fn listen(&self, _address: SocketAddr, _sockets: &[TcpListener]) -> Result<(), PartError> {
        Ok(())
    }

    /// Lets no shard accept at the address any more.
    pub(crate) async fn unlisten(&self, _address: SocketAddr) {}

    /// Reports shards that stand still and replaces those that died; true if any was replaced.
    pub(crate) async fn look_after(
        &mut self,
        _tables: &Arc<Tables>,
        _listeners: &HashMap<SocketAddr, Vec<TcpListener>>,
    ) -> bool {
        false
    }

    pub(super) async fn drain(self, _timeout: Duration) {}
}
