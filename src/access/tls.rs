//! The certificate of the management API.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::durable;

/// Largest file, bytes: the roots of a system have a quarter of a megabyte. A larger one is refused.
const BYTES_MAX: u64 = 8 << 20;

/// Where the certificate and its key are, both PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// `tls_certificate`: the certificate, and those between it and its root.
    pub certificate: PathBuf,
    /// `tls_key`.
    pub key: PathBuf,
}

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file is unreadable.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is no PEM, or has not what it should have. Its text is not told, it may be a key.
    #[error("{} has no whole {what} in PEM", path.display())]
    NoPem {
        /// The file.
        path: PathBuf,
        /// What it should have.
        what: &'static str,
    },
    /// The certificate and the key do not go together, or are of a kind that is not known.
    #[error("{}: {source}", path.display())]
    Unusable {
        /// The certificate's file.
        path: PathBuf,
        /// Why.
        source: rustls::Error,
    },
}

impl TlsFiles {
    /// Reads both into what a listener serves with: TLS 1.2 and 1.3, HTTP/1.1.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn read(&self) -> Result<Arc<ServerConfig>, TlsError> {
        let unusable = |source| TlsError::Unusable { path: self.certificate.clone(), source };
        let key = PrivateKeyDer::from_pem_slice(&read(&self.key)?)
            .map_err(|_| TlsError::NoPem { path: self.key.clone(), what: "private key" })?;
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(unusable)?
            .with_no_client_auth()
            .with_single_cert(certificates(&self.certificate)?, key)
            .map_err(unusable)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

/// All certificates of a PEM file.
///
/// # Errors
/// [`TlsError::Unreadable`], [`TlsError::NoPem`].
pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    let found = found.ok().filter(|found| !found.is_empty());
    found.ok_or_else(|| TlsError::NoPem { path: path.to_owned(), what: "certificate" })
}

/// The bytes of a file. One that is none would block whoever reads it, and one without end take all memory.
fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    let unreadable = |source| TlsError::Unreadable { path: path.to_owned(), source };
    let absent = || io::Error::from(io::ErrorKind::NotFound);
    durable::read(path, BYTES_MAX, "it has more than 8 MiB")
        .and_then(|bytes| bytes.ok_or_else(absent))
        .map_err(unreadable)
}
