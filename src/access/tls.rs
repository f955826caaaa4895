//! The certificate of the management API.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

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
    /// A file is unreadable or no PEM.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: pem::Error,
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
        let key = PrivateKeyDer::from_pem_file(&self.key)
            .map_err(|source| TlsError::Unreadable { path: self.key.clone(), source })?;
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
/// [`TlsError::Unreadable`].
pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let unreadable = |source| TlsError::Unreadable { path: path.to_owned(), source };
    CertificateDer::pem_file_iter(path).and_then(Iterator::collect).map_err(unreadable)
}
