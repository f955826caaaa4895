//! Files that rules name: chat templates, tokens, keys.
//!
//! **Invariant.** Nothing else opens one. The configuration file is written by the host's operator, so its rules may name
//! any regular file. A rule that came over the API, however often it is replayed from the state file or a snapshot, may
//! name only what lies in directories that the configuration says (`[admin] files`, for templates also `[tokenizers] dir`):
//! what is in the file goes to engines of the poster's choosing. Where a file lies is asked of what was opened, symlinks
//! resolved, and again at every reading; a path elsewhere is not looked at, so that no answer tells whether it exists.

#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use crate::fields::Dialect;

/// Where tokenizers are unless the configuration says.
pub const TOKENIZERS_DIR: &str = "/etc/loxilb/tokenizers";

/// Where files lie that rules made over the API may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleFiles {
    secrets: Arc<[PathBuf]>,
    templates: Arc<[PathBuf]>,
}

impl RuleFiles {
    /// `directories` is `[admin] files`, `tokenizers` is `[tokenizers] dir`.
    #[must_use]
    pub fn new(directories: &[PathBuf], tokenizers: &Path) -> Self {
        let templates = directories.iter().cloned().chain([tokenizers.to_owned()]);
        RuleFiles { secrets: directories.into(), templates: templates.collect() }
    }
}

impl Default for RuleFiles {
    fn default() -> Self {
        RuleFiles::new(&[], Path::new(TOKENIZERS_DIR))
    }
}

/// What a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A token or a key.
    Secret,
    /// A chat template.
    Template,
}

/// A file that a rule names, and where it must lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleFile {
    path: PathBuf,
    /// None = anywhere.
    within: Option<Arc<[PathBuf]>>,
}

/// Why a file that a rule names cannot be used. No text has anything of its content.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It is not where rules of the API may name files.
    #[error(
        "{} is in none of the directories that rules made over the API may name files in: add its directory to files under \
         [admin] in the configuration file, or write the rule there", path.display()
    )]
    Outside {
        /// The file.
        path: PathBuf,
    },
    /// It could not be opened or read.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A device, pipe or directory.
    #[error("{} is no regular file", path.display())]
    NoFile {
        /// The file.
        path: PathBuf,
    },
    /// It is larger than anything of its kind.
    #[error("{} has more than {bytes_max} bytes", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// What is read at most.
        bytes_max: u64,
    },
}

impl RuleFile {
    /// A file that the host's operator names.
    #[must_use]
    pub fn anywhere(path: &Path) -> Self {
        RuleFile { path: path.to_owned(), within: None }
    }

    /// A file that a rule of this door names.
    pub(super) fn named(path: &str, dialect: Dialect, files: &RuleFiles, purpose: Purpose) -> Self {
        let within = match (dialect, purpose) {
            (Dialect::File, _) => None,
            (Dialect::Api, Purpose::Secret) => Some(&files.secrets),
            (Dialect::Api, Purpose::Template) => Some(&files.templates),
        };
        RuleFile { path: PathBuf::from(path), within: within.cloned() }
    }

    /// Its path, as the rule has it.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens it: a regular file, and where it must lie. Waits for nobody at the other end of a pipe.
    ///
    /// # Errors
    /// [`FileError`]
    pub(super) fn open(&self) -> Result<File, FileError> {
        let pinned = match &self.within {
            None => {
                File::options().read(true).custom_flags(libc::O_PATH).open(&self.path).map_err(self.unreadable())?
            }
            Some(within) => self.pin(within)?,
        };
        if !pinned.metadata().map_err(self.unreadable())?.is_file() {
            return Err(FileError::NoFile { path: self.path.clone() });
        }
        // What was looked at, whatever its path leads to by now.
        File::options().read(true).custom_flags(libc::O_NONBLOCK).open(handle(&pinned)).map_err(self.unreadable())
    }

    /// Its bytes, at most so many.
    ///
    /// # Errors
    /// [`FileError`]
    pub(super) fn read(&self, bytes_max: u64) -> Result<Vec<u8>, FileError> {
        let mut bytes = Vec::new();
        self.open()?.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes).map_err(self.unreadable())?;
        match bytes.len() as u64 > bytes_max {
            true => Err(FileError::TooLarge { path: self.path.clone(), bytes_max }),
            false => Ok(bytes),
        }
    }

    fn unreadable(&self) -> impl FnOnce(std::io::Error) -> FileError + use<> {
        let path = self.path.clone();
        |source| FileError::Unreadable { path, source }
    }

    /// Holds on to what lies in one of these directories. `O_PATH` opens nothing: a device does not notice.
    fn pin(&self, within: &[PathBuf]) -> Result<File, FileError> {
        let outside = || FileError::Outside { path: self.path.clone() };
        let real: Vec<PathBuf> = within.iter().filter_map(|directory| fs::canonicalize(directory).ok()).collect();
        let lies_in = |path: &Path, directories: &[PathBuf]| directories.iter().any(|at| path.starts_with(at));
        if !is_plain(&self.path) || !(lies_in(&self.path, within) || lies_in(&self.path, &real)) {
            return Err(outside());
        }
        match File::options().read(true).custom_flags(libc::O_PATH).open(&self.path) {
            Ok(pinned) => {
                let found = fs::read_link(handle(&pinned)).map_err(self.unreadable())?;
                if lies_in(&found, &real) { Ok(pinned) } else { Err(outside()) }
            }
            // A symlink that leads out must not tell what is there.
            Err(source) => {
                let parents =
                    self.path.ancestors().skip(1).filter(|parent| lies_in(parent, within) || lies_in(parent, &real));
                let mut found = parents.filter_map(|parent| fs::canonicalize(parent).ok());
                let leads_out = fs::read_link(&self.path).is_ok() || found.any(|parent| !lies_in(&parent, &real));
                Err(if leads_out { outside() } else { self.unreadable()(source) })
            }
        }
    }
}

/// Absolute, and without steps back.
fn is_plain(path: &Path) -> bool {
    path.is_absolute() && path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
}

fn handle(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A directory that may be named and one that may not, removed when dropped.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("kvlane-files-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            for directory in ["open/deep", "closed"] {
                fs::create_dir_all(path.join(directory)).expect("the temporary directory is writable");
            }
            fs::write(path.join("open/here"), "here").expect("writable");
            fs::write(path.join("closed/there"), "there").expect("writable");
            Scratch(path)
        }

        fn at(&self, name: &str) -> String {
            self.0.join(name).to_str().expect("a text").to_owned()
        }

        fn named(&self, path: &str) -> RuleFile {
            let files = RuleFiles::new(&[self.0.join("open")], Path::new("/nonexistent"));
            RuleFile::named(path, Dialect::Api, &files, Purpose::Secret)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn is_outside(result: &Result<Vec<u8>, FileError>) -> bool {
        matches!(result, Err(FileError::Outside { .. }))
    }

    #[test]
    fn rules_of_the_api_name_files_of_the_directories_alone() {
        let scratch = Scratch::new("directories");
        for (link, target) in [
            ("open/link", "open/here"),
            ("open/out", "closed/there"),
            ("open/gone", "closed/none"),
            ("open/way", "closed"),
        ] {
            symlink(scratch.at(target), scratch.at(link)).expect("writable");
        }
        symlink("/proc/self/environ", scratch.at("open/environ")).expect("writable");
        let read = |path: &str| scratch.named(path).read(100);
        for inside in ["open/here", "open/link"] {
            assert_eq!(read(&scratch.at(inside)).expect("readable"), b"here", "{inside}");
        }
        for outside in [
            "closed/there",
            "closed/none",
            "open/../closed/there",
            "open/../open/here",
            "open/out",
            "open/gone",
            "open/way/there",
            "open/way/none",
            "open/way/none/none",
            "open/environ",
        ] {
            let result = read(&scratch.at(outside));
            assert!(is_outside(&result), "{outside}: {result:?}");
        }
        for outside in ["here", "open/here", "/etc/passwd", "/proc/self/environ", "/dev/zero", "/", "", "//etc/passwd"]
        {
            let result = read(outside);
            assert!(is_outside(&result), "{outside}: {result:?}");
        }
        assert!(matches!(read(&scratch.at("open/none")), Err(FileError::Unreadable { .. })));
        assert!(matches!(read(&scratch.at("open/deep")), Err(FileError::NoFile { .. })));
        assert_eq!(RuleFile::anywhere(&scratch.0.join("closed/there")).read(5).expect("the operator's"), b"there");
        assert!(matches!(
            RuleFile::anywhere(&scratch.0.join("closed/there")).read(4),
            Err(FileError::TooLarge { bytes_max: 4, .. })
        ));
    }

    #[test]
    fn a_file_that_becomes_a_way_out_is_refused_at_the_next_reading() {
        let scratch = Scratch::new("later");
        let file = scratch.named(&scratch.at("open/here"));
        assert_eq!(file.read(100).expect("readable"), b"here");
        fs::remove_file(scratch.0.join("open/here")).expect("ours");
        symlink(scratch.at("closed/there"), scratch.at("open/here")).expect("writable");
        assert!(is_outside(&file.read(100)));
    }

    #[test]
    fn templates_may_lie_with_the_tokenizers_and_secrets_may_not() {
        let scratch = Scratch::new("tokenizers");
        let files = RuleFiles::new(&[], &scratch.0.join("open"));
        let read =
            |dialect, purpose| RuleFile::named(&scratch.at("open/here"), dialect, &files, purpose).read(9).is_ok();
        assert!(read(Dialect::Api, Purpose::Template));
        assert!(!read(Dialect::Api, Purpose::Secret));
        assert!(read(Dialect::File, Purpose::Secret));
    }
}
