//! Where tests find data that is not in the repository, and how they say that it is absent.

use std::path::{Path, PathBuf};

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_path_buf).unwrap_or_default()
}

fn present(test: &str, path: PathBuf, remedy: &str) -> Option<PathBuf> {
    if path.exists() {
        return Some(path);
    }
    assert!(std::env::var_os("CI").is_none(), "{test}: {} is missing: {remedy}", path.display());
    eprintln!("skipped: {test}: {} is missing: {remedy}", path.display());
    None
}

/// A file of the shared material (`KVLANE_SHARED`, else `../shared` beside the workspace).
pub(crate) fn shared(test: &str, file: &str) -> Option<PathBuf> {
    let root = std::env::var_os("KVLANE_SHARED").map_or_else(|| workspace().join("../shared"), PathBuf::from);
    present(test, root.join(file), "set KVLANE_SHARED to the directory of the shared material")
}

/// The directory of a real tokenizer (`KVLANE_TOKENIZERS`, else `target/tokenizers`); the small one is shared material.
pub(crate) fn tokenizer(test: &str, slug: &str) -> Option<PathBuf> {
    if slug == "qwen3-mini-8k" {
        return shared(test, "data/tokenizers/qwen3-mini-8k");
    }
    let root =
        std::env::var_os("KVLANE_TOKENIZERS").map_or_else(|| workspace().join("target/tokenizers"), PathBuf::from);
    present(test, root.join(slug), "get it with shared/tools/get-tokenizers.sh, set KVLANE_TOKENIZERS")
}
