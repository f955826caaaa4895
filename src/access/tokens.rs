//! The token file: a line `NAME ROLE sha256:HEX` per token; `#` begins a comment.
//!
//! Only hashes are stored. Tokens are 32 random bytes, so that a plain SHA-256 cannot be searched.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConditionallySelectable as _, ConstantTimeEq as _};

/// Largest file, bytes. A larger one is refused.
const BYTES_MAX: u64 = 1 << 20;
/// How a hash begins.
const SCHEME: &str = "sha256:";

/// What a token's owner may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Everything.
    Admin,
    /// GET only.
    Viewer,
}

impl Role {
    /// Every role.
    pub const ALL: [Role; 2] = [Role::Admin, Role::Viewer];

    /// The word in the file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Role::Admin => "admin",
            Role::Viewer => "viewer",
        }
    }

    /// The role of a word.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == name)
    }
}

/// All tokens of a file.
#[derive(Debug)]
pub struct Tokens(Vec<Known>);

#[derive(Debug)]
struct Known {
    name: String,
    role: Role,
    digest: [u8; 32],
}

/// Why a token file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokensError {
    /// It cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Others than its owner may read or write it.
    #[error("{} has mode {mode:03o}: others may read or write it; chmod 600 it", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// A line is none; its text is not told, it may be a token.
    #[error("{}:{line}: expected NAME ROLE sha256:HEX, with ROLE admin or viewer", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
    },
}

impl Tokens {
    /// Reads a file.
    ///
    /// # Errors
    /// [`TokensError`].
    pub fn read(path: &Path) -> Result<Self, TokensError> {
        let unreadable = |source| TokensError::Unreadable { path: path.to_owned(), source };
        // A pipe would keep the opener waiting for its other end.
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(unreadable)?;
        let about = file.metadata().map_err(unreadable)?;
        if !about.is_file() {
            return Err(unreadable(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file")));
        }
        if about.mode() & 0o077 != 0 {
            return Err(TokensError::Open { path: path.to_owned(), mode: about.mode() & 0o777 });
        }
        let mut text = String::new();
        file.take(BYTES_MAX + 1).read_to_string(&mut text).map_err(unreadable)?;
        if text.len() as u64 > BYTES_MAX {
            return Err(unreadable(io::Error::new(io::ErrorKind::FileTooLarge, "it has more than 1 MiB")));
        }
        Self::parse(&text).map_err(|line| TokensError::Line { path: path.to_owned(), line })
    }

    /// Reads a text; the number of the first line that is none otherwise.
    fn parse(text: &str) -> Result<Self, usize> {
        let mut known = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if !line.is_empty() {
                known.push(Known::parse(line).ok_or(at + 1)?);
            }
        }
        Ok(Tokens(known))
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none, so that nobody is let in.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whose token it is, and what they may do. Takes as long whoever's it is, and whatever is wrong with it.
    #[must_use]
    pub fn who(&self, token: &str) -> Option<(&str, Role)> {
        let digest: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        let mut found = u32::MAX;
        for (at, known) in (0u32..).zip(&self.0) {
            let same: Choice = known.digest.ct_eq(&digest);
            found.conditional_assign(&at, same);
        }
        self.0.get(found as usize).map(|known| (known.name.as_str(), known.role))
    }
}

impl Known {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let (name, role, hash) = (words.next()?, Role::of_name(words.next()?)?, words.next()?);
        let hex = hash.strip_prefix(SCHEME).filter(|hex| hex.len() == 64 && words.next().is_none())?;
        let mut digest = [0; 32];
        for (at, byte) in digest.iter_mut().enumerate() {
            *byte = u8::from_str_radix(hex.get(2 * at..2 * at + 2)?, 16).ok()?;
        }
        Some(Known { name: name.to_owned(), role, digest })
    }
}

/// A new token.
///
/// # Errors
/// The system has no random numbers to give.
pub fn mint() -> io::Result<String> {
    let mut bytes = [0u8; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(format!("kvl_{}", hex(&bytes)))
}

/// The line of the file that lets a token in.
#[must_use]
pub fn line_of(name: &str, role: Role, token: &str) -> String {
    format!("{name} {} {SCHEME}{}", role.name(), hex(&Sha256::digest(token.as_bytes())))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_its_owners_and_nobody_elses() {
        let (first, second) = (mint().expect("random"), mint().expect("random"));
        assert_ne!(first, second);
        let text = format!(
            "# ours\n{}\n\n{} # reads\n",
            line_of("ops", Role::Admin, &first),
            line_of("watch", Role::Viewer, &second)
        );
        assert!(!text.contains(&first), "only the hash is stored");
        let tokens = Tokens::parse(&text).expect("right");
        assert_eq!(tokens.who(&first), Some(("ops", Role::Admin)));
        assert_eq!(tokens.who(&second), Some(("watch", Role::Viewer)));
        for wrong in ["", "ops", &first[1..], &format!("{first} "), &first.to_uppercase()] {
            assert_eq!(tokens.who(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn lines_that_are_none_are_named_by_number() {
        let right = line_of("a", Role::Admin, "t");
        for wrong in ["x", "a admin", "a root sha256:00", "a admin md5:00", "a admin sha256:0é", &format!("{right} b")]
        {
            assert_eq!(Tokens::parse(&format!("{right}\n{wrong}\n")).err(), Some(2), "{wrong:?}");
        }
    }

    #[test]
    fn a_file_that_others_may_read_is_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        let path = std::env::temp_dir().join(format!("kvlane-tokens-{}", std::process::id()));
        std::fs::write(&path, line_of("a", Role::Admin, "t")).expect("writable");
        let mode = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("ours");
        mode(0o600);
        assert_eq!(Tokens::read(&path).expect("ours alone").len(), 1);
        for open in [0o640, 0o604, 0o660] {
            mode(open);
            let error = Tokens::read(&path).expect_err("open to others").to_string();
            assert!(error.contains("chmod 600"), "{error}");
        }
        std::fs::remove_file(path).expect("ours");
    }
}
