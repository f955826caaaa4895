//! Tokenizers and chat templates as the supervisor handles them.

use std::sync::{Arc, Mutex, PoisonError};

use shards::prompt::ModelTable;
use tokio::sync::mpsc;

use crate::config::Config;
use crate::supervise::Entry;

use super::PartError;

/// The models that were found on disk after a change there.
pub(crate) type ModelsChange = Arc<ModelTable>;

/// The way to the tokenizer loader.
#[derive(Clone, Debug)]
pub struct ModelsPart {
    table: Arc<Mutex<Arc<ModelTable>>>,
}

impl ModelsPart {
    pub(super) fn start(_config: &Config) -> Result<(Self, mpsc::UnboundedReceiver<ModelsChange>), PartError> {
        let (_changes_in, changes) = mpsc::unbounded_channel();
        Ok((ModelsPart { table: Arc::default() }, changes))
    }

    /// The models as of the last change.
    pub(crate) fn table(&self) -> Arc<ModelTable> {
        Arc::clone(&self.table.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn take(&self, change: ModelsChange) {
        *self.table.lock().unwrap_or_else(PoisonError::into_inner) = change;
    }

    /// Names the models that rules are for.
    pub(crate) fn set_wanted(&self, _entries: &[Arc<Entry>]) {}

    /// State of every model, for the API.
    #[must_use]
    pub fn report(&self) -> Vec<serde_json::Value> {
        Vec::new()
    }

    pub(super) fn stop(&self) {}
}
