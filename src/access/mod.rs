//! Who may use the management API: bearer tokens with a role each, and TLS, both from files that are read again when
//! they change.
//!
//! **Invariant.** A file that has become unusable changes nothing: what was read before stays in force, and the log says
//! why. Without a token file everybody is let in, which the configuration allows on loopback only, or where it says
//! `insecure = true`.

#![forbid(unsafe_code)]

mod tls;
mod tokens;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::ServerConfig;
use tokio::sync::watch;
use tracing::{error, info};

pub(crate) use tls::certificates;
pub use tls::{TlsError, TlsFiles};
pub use tokens::{Role, Tokens, TokensError, line_of, mint};

/// How often the files are looked at.
const PERIOD: Duration = Duration::from_secs(1);

/// `[admin]` beside its address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessOptions {
    /// `tokens`: the file with the tokens' hashes; none = everybody is let in.
    pub tokens: Option<PathBuf>,
    /// `tls_certificate` and `tls_key`; none = plain HTTP.
    pub tls: Option<TlsFiles>,
    /// `insecure`: whether an address beyond loopback may do without either.
    pub insecure: bool,
}

/// Why the management API cannot be protected as asked.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The token file.
    #[error("[admin] tokens: {0}")]
    Tokens(#[from] TokensError),
    /// The certificate or its key.
    #[error("[admin] tls_certificate, tls_key: {0}")]
    Tls(#[from] TlsError),
}

/// What is in force.
#[derive(Clone, Debug)]
pub struct Access {
    options: AccessOptions,
    tokens: watch::Sender<Option<Arc<Tokens>>>,
    tls: watch::Sender<Option<Arc<ServerConfig>>>,
}

impl Access {
    /// Reads the files.
    ///
    /// # Errors
    /// [`AccessError`]: a file that cannot be used.
    pub fn open(options: AccessOptions) -> Result<Self, AccessError> {
        let tokens = options.tokens.as_deref().map(Tokens::read).transpose()?.map(Arc::new);
        let tls = options.tls.as_ref().map(TlsFiles::read).transpose()?;
        Ok(Access { options, tokens: watch::Sender::new(tokens), tls: watch::Sender::new(tls) })
    }

    /// The tokens in force; none = everybody is let in.
    #[must_use]
    pub fn tokens(&self) -> Option<Arc<Tokens>> {
        self.tokens.borrow().clone()
    }

    /// The certificate in force; none = plain HTTP.
    #[must_use]
    pub fn tls(&self) -> Option<Arc<ServerConfig>> {
        self.tls.borrow().clone()
    }

    /// Reads files again when they change, until dropped.
    pub async fn watch(self) {
        let mut seen = self.marks();
        let mut tick = tokio::time::interval(PERIOD);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            let now = self.marks();
            if now != seen {
                seen = now;
                self.read_again();
            }
        }
    }

    fn read_again(&self) {
        if let Some(path) = &self.options.tokens {
            match Tokens::read(path) {
                // An editor may be about to write it.
                Ok(tokens) if tokens.is_empty() => {
                    error!(file = %path.display(), "it has no token: the tokens so far stay in force");
                }
                Ok(tokens) => {
                    info!(file = %path.display(), tokens = tokens.len(), "tokens read again");
                    self.tokens.send_replace(Some(Arc::new(tokens)));
                }
                Err(error) => error!(%error, "the tokens so far stay in force"),
            }
        }
        if let Some(files) = &self.options.tls {
            match files.read() {
                Ok(config) => {
                    info!(file = %files.certificate.display(), "certificate read again");
                    self.tls.send_replace(Some(config));
                }
                Err(error) => error!(%error, "the certificate so far stays in force"),
            }
        }
    }

    fn marks(&self) -> Vec<Mark> {
        let tls = self.options.tls.iter().flat_map(|files| [&files.certificate, &files.key]);
        self.options.tokens.iter().chain(tls).map(|path| Mark::of(path)).collect()
    }
}

/// What tells that a file has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(Option<(SystemTime, u64, u64)>);

impl Mark {
    /// The mark of a file as it is now.
    #[must_use]
    pub fn of(path: &Path) -> Self {
        use std::os::unix::fs::MetadataExt as _;
        let mark = |data: std::fs::Metadata| Some((data.modified().ok()?, data.len(), data.ino()));
        Mark(std::fs::metadata(path).ok().and_then(mark))
    }
}
