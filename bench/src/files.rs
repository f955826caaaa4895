//! The model whose prompts are measured: the demo's, or a real one; and the tokenizers that a measured gateway gets.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::Context;
use loadgen::assets::{self, DEMO_MODEL};
use shards::prompt::{Model, ModelFiles, slug};

/// Which tokenizer and template are used.
#[derive(Clone, Debug, clap::Args)]
pub struct ModelArgs {
    /// Directory of tokenizers; default: the environment's KVLANE_TOKENIZERS. The demo's is built in
    #[arg(long, requires = "model", value_name = "DIR")]
    pub tokenizers: Option<PathBuf>,
    /// Model named in the requests
    #[arg(long, default_value = DEMO_MODEL)]
    pub model: String,
    /// Chat template that overrides the model's own
    #[arg(long, value_name = "FILE")]
    pub template: Option<PathBuf>,
}

/// The tokenizers that were given, or the demo's, written below `directory`.
///
/// # Errors
/// Files that cannot be written.
pub fn tokenizers(given: Option<&Path>, directory: &Path) -> anyhow::Result<PathBuf> {
    if let Some(given) = given {
        return Ok(given.to_owned());
    }
    let staged = directory.join("tokenizers");
    assets::stage(&staged)?;
    Ok(staged)
}

impl ModelArgs {
    /// Reads the model's files.
    ///
    /// # Errors
    /// A file that is missing or cannot be used.
    pub fn load(&self) -> anyhow::Result<Arc<Model>> {
        let slug = slug(&self.model).context("--model: not a model's name")?;
        let mut files = ModelFiles { slug: slug.clone(), ..ModelFiles::default() };
        let from_environment = || std::env::var_os("KVLANE_TOKENIZERS").map(PathBuf::from);
        match self.tokenizers.clone().or_else(from_environment) {
            Some(directory) if self.model != DEMO_MODEL => {
                let path = directory.join(&slug);
                let read = |name: &str| std::fs::read_to_string(path.join(name));
                files.tokenizer = read("tokenizer.json").with_context(|| format!("{}", path.display()))?;
                files.config = read("tokenizer_config.json").ok();
                files.template = read("chat_template.jinja").ok();
            }
            None if self.model != DEMO_MODEL => {
                anyhow::bail!("--tokenizers: the directory that has {slug} is needed")
            }
            _ => {
                files.tokenizer = assets::DEMO_TOKENIZER.to_owned();
                files.config = Some(assets::DEMO_TOKENIZER_CONFIG.to_owned());
            }
        }
        if let Some(path) = &self.template {
            files.template = Some(std::fs::read_to_string(path).with_context(|| format!("{}", path.display()))?);
        }
        Ok(Arc::new(Model::load(&files, SystemTime::now)?))
    }
}

#[cfg(test)]
pub fn demo() -> ModelArgs {
    ModelArgs { tokenizers: None, model: DEMO_MODEL.into(), template: None }
}
