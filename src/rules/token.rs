//! The token that a rule's engines want on the gateway's own calls (`engineTokenFile`).
//!
//! **Invariant.** The token stands in no log, answer or error: only the file's path does. A file that others than its
//! owner may read is refused, since a token that is not secret protects nothing.

use std::fmt;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use super::{FileError, RuleFile};

/// Longest token, bytes. A longer one is refused.
const TOKEN_BYTES_MAX: u64 = 4096;

/// A token, and the file it is read from. Equal when the file is the same.
pub struct EngineToken {
    file: RuleFile,
    token: RwLock<Arc<str>>,
}

impl EngineToken {
    /// Reads the file.
    ///
    /// # Errors
    /// Why the file is no token that can be used.
    pub fn read(file: RuleFile) -> Result<Self, TokenError> {
        let token = RwLock::new(read(&file)?);
        Ok(EngineToken { file, token })
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The value of an `Authorization` header.
    #[must_use]
    pub fn authorization(&self) -> String {
        format!("Bearer {}", self.token())
    }

    /// Reads the file again; true if the token is another one.
    ///
    /// # Errors
    /// Why it cannot be used now; the token stays as it was.
    pub fn refresh(&self) -> Result<bool, TokenError> {
        let token = read(&self.file)?;
        if token == self.token() {
            return Ok(false);
        }
        *self.token.write().unwrap_or_else(PoisonError::into_inner) = token;
        Ok(true)
    }

    /// The token itself.
    pub(super) fn token(&self) -> Arc<str> {
        Arc::clone(&self.token.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl PartialEq for EngineToken {
    fn eq(&self, other: &Self) -> bool {
        self.file == other.file
    }
}

impl Eq for EngineToken {}

impl fmt::Debug for EngineToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineToken").field("path", &self.path()).finish_non_exhaustive()
    }
}

/// Why a token file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// It cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// Others than its owner may use it.
    #[error("{path} has mode {mode:04o}: group or others have access to it; chmod 600 {path}")]
    NotSecret {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Its content is no token.
    #[error("{path} must hold one line of 1 to {TOKEN_BYTES_MAX} visible ASCII characters, and nothing else")]
    NoToken {
        /// The file.
        path: PathBuf,
    },
}

fn read(file: &RuleFile) -> Result<Arc<str>, TokenError> {
    let path = || file.path().to_owned();
    let unreadable = |source| FileError::Unreadable { path: path(), source };
    // Checks are made on what was opened, so that nothing changes in between.
    let opened = file.open()?;
    let meta = opened.metadata().map_err(unreadable)?;
    let mode = meta.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(TokenError::NotSecret { path: path(), mode });
    }
    let mut text = Vec::new();
    // Two more for the end of the line.
    opened.take(TOKEN_BYTES_MAX + 3).read_to_end(&mut text).map_err(unreadable)?;
    let token = std::str::from_utf8(&text).unwrap_or_default().trim_end_matches(['\r', '\n']);
    let usable =
        !token.is_empty() && token.len() as u64 <= TOKEN_BYTES_MAX && token.bytes().all(|byte| byte.is_ascii_graphic());
    if usable { Ok(token.into()) } else { Err(TokenError::NoToken { path: path() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            Scratch(std::env::temp_dir().join(format!("kvlane-token-{name}-{}", std::process::id())))
        }

        fn write(&self, text: &[u8], mode: u32) {
            std::fs::write(&self.0, text).expect("the temporary directory is writable");
            std::fs::set_permissions(&self.0, std::fs::Permissions::from_mode(mode)).expect("it is ours");
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn only_the_owner_may_have_access_and_the_content_is_one_token() {
        let file = Scratch::new("content");
        let long = [b'x'; TOKEN_BYTES_MAX as usize + 1];
        let cases: [(&[u8], u32, &str); 9] = [
            (b"s3cr3t\n", 0o600, ""),
            (b"s3cr3t\r\n", 0o400, ""),
            (b"s3cr3t", 0o640, "mode 0640"),
            (b"s3cr3t", 0o604, "chmod 600"),
            (b"s3cr3t", 0o620, "mode 0620"),
            (b"\n", 0o600, "one line"),
            (b"two words", 0o600, "one line"),
            (b"a\r\nX-Evil: 1", 0o600, "one line"),
            (&long, 0o600, "one line"),
        ];
        for (text, mode, expected) in cases {
            file.write(text, mode);
            match EngineToken::read(RuleFile::anywhere(&file.0)) {
                Ok(token) => {
                    assert_eq!((expected, &*token.authorization()), ("", "Bearer s3cr3t"));
                    assert!(!format!("{token:?}").contains("s3cr3t"));
                }
                Err(error) => {
                    let text = error.to_string();
                    assert!(!expected.is_empty() && text.contains(expected), "{text:?} lacks {expected:?}");
                    assert!(!text.contains("s3cr3t"));
                }
            }
        }
        let error = EngineToken::read(RuleFile::anywhere(Path::new("/dev/null"))).expect_err("a device");
        assert_eq!(error.to_string(), "/dev/null is no regular file");
        let absent = EngineToken::read(RuleFile::anywhere(Path::new("/nonexistent/t")));
        assert!(matches!(absent, Err(TokenError::File(FileError::Unreadable { .. }))));
    }

    #[test]
    fn a_changed_file_is_taken_over_and_a_spoiled_one_is_not() {
        let file = Scratch::new("change");
        file.write(b"one", 0o600);
        let token = EngineToken::read(RuleFile::anywhere(&file.0)).expect("a token");
        assert!(!token.refresh().expect("still there"));
        file.write(b"two", 0o600);
        assert!(token.refresh().expect("still there"));
        assert_eq!(token.authorization(), "Bearer two");
        file.write(b"three", 0o644);
        token.refresh().expect_err("not secret");
        assert_eq!(token.authorization(), "Bearer two");
    }
}
