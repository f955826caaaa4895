//! The demo model's tokenizer, embedded: the demo and the tests need no download.
//!
//! Trained by us on our own text (`assets/tokenizer/`), with our own ChatML template.

use std::io;
use std::path::{Path, PathBuf};

/// Name of the model the embedded tokenizer belongs to.
pub const DEMO_MODEL: &str = "kvlane/demo";

/// The embedded `tokenizer.json`.
pub const DEMO_TOKENIZER: &str = include_str!("../assets/tokenizer/kvlane-demo/tokenizer.json");

/// The embedded `tokenizer_config.json`, chat template included.
pub const DEMO_TOKENIZER_CONFIG: &str = include_str!("../assets/tokenizer/kvlane-demo/tokenizer_config.json");

/// Writes the demo tokenizer below `directory` as a gateway or an engine looks for it,
/// `<directory>/kvlane__demo/{tokenizer.json,tokenizer_config.json}`, and returns the model's directory.
///
/// # Errors
/// The directory cannot be made, or a file cannot be written.
pub fn stage(directory: &Path) -> io::Result<PathBuf> {
    let model = directory.join(DEMO_MODEL.replace('/', "__"));
    std::fs::create_dir_all(&model)?;
    std::fs::write(model.join("tokenizer.json"), DEMO_TOKENIZER)?;
    std::fs::write(model.join("tokenizer_config.json"), DEMO_TOKENIZER_CONFIG)?;
    Ok(model)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staged_files_are_the_embedded_ones() {
        let directory = std::env::temp_dir().join(format!("kvlane-assets-{}", std::process::id()));
        let model = stage(&directory).expect("the temporary directory can be written");
        assert_eq!(model.file_name().and_then(|name| name.to_str()), Some("kvlane__demo"));
        assert_eq!(std::fs::read_to_string(model.join("tokenizer.json")).ok().as_deref(), Some(DEMO_TOKENIZER));
        assert!(model.join("tokenizer_config.json").is_file());
        std::fs::remove_dir_all(&directory).expect("our own directory can be removed");
    }
}
