//! The parts of the process that are not this thread: shards, ingest, models. What each is asked to do, and how.

mod ingest;
mod models;
mod shards;

use std::sync::Arc;
use std::time::Duration;

use ::shards::affinity::Affinity;
use ::shards::load::LoadTable;
use ::shards::shard::{CommandError, ShardError};
use tokio::sync::mpsc;

use crate::config::Config;
use crate::cores::Plan;

pub use self::ingest::IngestPart;
pub(super) use self::ingest::sources;
pub use self::models::ModelsPart;
pub use self::shards::ShardView;
pub(super) use self::shards::{CONFIRM_TIMEOUT, Listeners, Shards};

/// A part that did not do its share.
#[derive(Debug, thiserror::Error)]
pub enum PartError {
    /// A shard did not start.
    #[error(transparent)]
    ShardStart(#[from] ShardError),
    /// A shard did not do what it was told.
    #[error("shard {shard}: {source}")]
    ShardCommand {
        /// Which.
        shard: u16,
        /// Why.
        source: CommandError,
    },
    /// A shard did not confirm a command in time.
    #[error("shard {shard} did not confirm the change within a second: nothing was changed")]
    ShardSilent {
        /// Which.
        shard: u16,
    },
    /// Ingest did not start.
    #[error("ingest does not start: {0}")]
    IngestStart(std::io::Error),
    /// The tokenizer loader did not start.
    #[error("the tokenizer loader does not start: {0}")]
    ModelsStart(std::io::Error),
    /// The thread that does for shards what cannot be sliced did not start.
    #[error("the thread for large prompts does not start: {0}")]
    AsideStart(std::io::Error),
}

/// All of them.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) shards: Shards,
    pub(super) ingest: IngestPart,
    pub(super) models: ModelsPart,
}

impl Parts {
    /// Starts all of them, and gives the end at which changes of the tokenizer directory arrive.
    pub(super) fn start(
        config: &Config,
        plan: &Plan,
        loads: &Arc<LoadTable>,
        affinity: &Arc<Affinity>,
    ) -> Result<(Self, mpsc::Receiver<()>), PartError> {
        let (models, changes) = ModelsPart::start(config)?;
        let shards = Shards::start(config, plan, loads, affinity)?;
        let ingest = IngestPart::start(config, plan, loads)?;
        Ok((Parts { shards, ingest, models }, changes))
    }

    /// Drains the shards, then stops the rest; what engines hold is written last.
    pub(super) async fn stop(self, timeout: Duration) {
        self.shards.drain(timeout).await;
        self.models.stop();
        self.ingest.stop().await;
    }
}
