//! Tokenizers and chat templates as the supervisor handles them.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use shards::prompt::ModelTable;
use tokio::sync::mpsc;

use crate::admin::Families;
use crate::config::Config;
use crate::models::{self, Control as Loader, ModelState, ModelStatus};
use crate::supervise::Entry;

use super::PartError;

/// The way to the tokenizer loader.
#[derive(Clone, Debug)]
pub struct ModelsPart(Arc<Loader>, Arc<Path>);

impl ModelsPart {
    /// Starts the loader; what is returned beside it hears of every change of its table.
    pub(super) fn start(config: &Config) -> Result<(Self, mpsc::Receiver<()>), PartError> {
        // One notice is enough: who hears it takes the newest table.
        let (notices, changes) = mpsc::channel(1);
        let loader = Loader::new();
        // The thread inherits the control core from the thread that starts it.
        let on_change = move |_| {
            // Full means that a notice waits already; closed, that the process ends.
            let _ = notices.try_send(());
        };
        models::spawn(config.tokenizers_dir.clone(), Arc::clone(&loader), || (), on_change)
            .map_err(PartError::ModelsStart)?;
        Ok((ModelsPart(loader, Arc::from(config.tokenizers_dir.as_path())), changes))
    }

    /// The models as of the last change.
    pub(crate) fn table(&self) -> Arc<ModelTable> {
        self.0.table()
    }

    /// Names the models that rules are for, and those that their engines say they serve.
    pub(crate) fn set_wanted(&self, entries: &[Arc<Entry>]) {
        let routed = entries.iter().filter(|entry| entry.rule.kv.is_some());
        let named = routed.clone().map(|entry| entry.rule.key.model.clone()).filter(|model| !model.is_empty());
        let served = routed.flat_map(|entry| entry.facts.models.iter().cloned());
        self.0.set_wanted(named.chain(served));
    }

    /// The tokenizer directory.
    pub(crate) fn directory(&self) -> &Path {
        &self.1
    }

    /// State of every model.
    pub(crate) fn status(&self) -> Vec<ModelStatus> {
        self.0.status()
    }

    /// State of every model, for the API.
    #[must_use]
    pub fn report(&self) -> Vec<Value> {
        self.0.status().iter().map(show).collect()
    }

    /// Models whose files cannot be used, for Prometheus.
    pub(crate) fn encode(&self, families: &mut Families<'_>) -> std::fmt::Result {
        let faults = self.0.status().into_iter().filter_map(|model| {
            let in_use = match model.state {
                ModelState::Ready { files_problem, .. } => files_problem.map(|_| "earlier"),
                ModelState::Failed { .. } => Some("none"),
                ModelState::Staged => None,
            };
            Some((vec![("model", model.slug), ("in_use", in_use?.to_owned())], 1))
        });
        let help = "Models whose files cannot be used, by which ones are";
        families.gauge("kvlane_model_files_unusable", help, faults)
    }

    pub(super) fn stop(&self) {
        self.0.stop();
    }
}

fn show(model: &ModelStatus) -> Value {
    let mut value = json!({"model": model.slug, "path": model.path, "named_by_rule": model.named_by_rule});
    match &model.state {
        ModelState::Ready { template, template_assumed, template_problem, digest, files_problem } => {
            value["state"] = json!("ready");
            value["template"] = json!(template);
            value["template_assumed"] = json!(template_assumed);
            value["template_problem"] = json!(template_problem);
            value["digest"] = json!(**digest);
            value["files_problem"] = json!(files_problem);
        }
        ModelState::Staged => value["state"] = json!("staged"),
        ModelState::Failed { reason } => {
            value["state"] = json!("failed");
            value["reason"] = json!(reason);
        }
    }
    value
}
