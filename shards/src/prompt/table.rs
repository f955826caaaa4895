//! Models by slug, as of the last look at the tokenizer directory.
//!
//! **Invariant.** A table never changes but for the `wanted` marks: the loader makes a new one. A look-up touches no
//! file and grows nothing, whatever names clients send.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::service::MissReason;

use super::model::Model;

/// Longest slug, bytes: one component of a path.
pub const SLUG_BYTES_MAX: usize = 255;

/// What is known of one directory of tokenizer files.
#[derive(Debug)]
pub enum Entry {
    /// Loaded.
    Ready(Arc<Model>),
    /// On disk, not loaded.
    Staged {
        /// A request has asked for it.
        wanted: AtomicBool,
    },
    /// Its files are missing, unreadable or damaged.
    Failed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// Models by slug.
#[derive(Debug, Default)]
pub struct ModelTable {
    entries: HashMap<Box<str>, Entry>,
}

/// What the table knows of a model name.
#[derive(Debug)]
pub enum Lookup<'a> {
    /// Loaded.
    Ready(&'a Arc<Model>),
    /// Staged on disk, not loaded yet: the look-up has asked for it.
    Loading,
    /// Not staged, or its files are unreadable or damaged.
    Missing,
}

impl<'a> Lookup<'a> {
    /// The model that is loaded.
    ///
    /// # Errors
    /// Why a request for it is routed without keys.
    pub fn ready(self) -> Result<&'a Arc<Model>, MissReason> {
        match self {
            Lookup::Ready(model) => Ok(model),
            Lookup::Loading => Err(MissReason::TokenizerLoading),
            Lookup::Missing => Err(MissReason::Tokenizer),
        }
    }
}

impl ModelTable {
    /// A table of the entries given, by slug.
    #[must_use]
    pub fn new(entries: impl IntoIterator<Item = (String, Entry)>) -> Self {
        ModelTable { entries: entries.into_iter().map(|(slug, entry)| (slug.into(), entry)).collect() }
    }

    /// Looks the model up by the name a client gave: no file-system call, no growth.
    #[must_use]
    pub fn lookup(&self, model: &str) -> Lookup<'_> {
        let mut buffer = [0; SLUG_BYTES_MAX];
        match slug_in(model, &mut buffer).and_then(|slug| self.entries.get(slug)) {
            Some(Entry::Ready(model)) => Lookup::Ready(model),
            Some(Entry::Staged { wanted }) => {
                if !wanted.load(Ordering::Relaxed) {
                    wanted.store(true, Ordering::Relaxed);
                }
                Lookup::Loading
            }
            Some(Entry::Failed { .. }) | None => Lookup::Missing,
        }
    }

    /// The entries, in no order.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.entries.iter().map(|(slug, entry)| (&**slug, entry))
    }

    /// The entry of a slug.
    #[must_use]
    pub fn get(&self, slug: &str) -> Option<&Entry> {
        self.entries.get(slug)
    }
}

/// The slug of a model name: `/` replaced by `__`; none when that is no plain path component.
#[must_use]
pub fn slug(model: &str) -> Option<String> {
    slug_in(model, &mut [0; SLUG_BYTES_MAX]).map(str::to_owned)
}

fn slug_in<'b>(model: &'b str, buffer: &'b mut [u8; SLUG_BYTES_MAX]) -> Option<&'b str> {
    let slug = if model.contains('/') {
        let mut length = 0;
        for (n, part) in model.split('/').enumerate() {
            for piece in [if n > 0 { "__" } else { "" }, part] {
                buffer.get_mut(length..length + piece.len())?.copy_from_slice(piece.as_bytes());
                length += piece.len();
            }
        }
        std::str::from_utf8(&buffer[..length]).ok()?
    } else {
        model
    };
    let plain = !slug.is_empty() && slug != "." && slug != ".." && slug.len() <= SLUG_BYTES_MAX && !slug.contains('\0');
    plain.then_some(slug)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slugs_are_one_plain_path_component() {
        for (model, expected) in [
            ("Qwen/Qwen3-0.6B", Some("Qwen__Qwen3-0.6B")),
            ("a/b/c", Some("a__b__c")),
            ("../../etc/passwd", Some("..__..__etc__passwd")),
            ("/", Some("__")),
            ("", None),
            (".", None),
            ("..", None),
            ("a\0b", None),
        ] {
            assert_eq!(slug(model).as_deref(), expected, "{model:?}");
        }
        assert!(slug(&"x".repeat(255)).is_some());
        assert!(slug(&"x".repeat(256)).is_none());
        assert!(slug(&format!("{}/y", "x".repeat(253))).is_none());
        assert!(slug(&"é/".repeat(60)).is_some());
    }

    #[test]
    fn a_look_up_asks_for_what_is_staged() {
        let table = ModelTable::new([
            ("a__b".to_owned(), Entry::Staged { wanted: AtomicBool::new(false) }),
            ("bad".to_owned(), Entry::Failed { path: "p".into(), reason: "r".into() }),
        ]);
        let asked = || matches!(table.get("a__b"), Some(Entry::Staged { wanted }) if wanted.load(Ordering::Relaxed));
        assert!(matches!(table.lookup("bad"), Lookup::Missing));
        assert!(matches!(table.lookup("unknown/model"), Lookup::Missing));
        assert!(!asked());
        assert!(matches!(table.lookup("a/b"), Lookup::Loading));
        assert!(asked());
        // Who reads the counters can tell a model that is about to come from one that never will.
        let reason = |model| table.lookup(model).ready().expect_err("nothing is loaded").name();
        assert_eq!((reason("a/b"), reason("bad")), ("tokenizer_loading", "tokenizer_missing"));
    }
}
