//! TLS for CSI over TCP, in which each side shows a certificate.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, fs, io};

use tonic::transport::{self, Certificate, Channel, ClientTlsConfig, Identity, Server, ServerTlsConfig};

/// A certificate with its key, and the authority that signed the other side's certificate.
///
/// Guarantees: certificate and key belong together; a server accepts only clients whose certificate the authority signed, and
/// a client only servers whose certificate it signed for the host of their endpoint. The files are read once.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Tls(Arc<Pem>);

#[derive(PartialEq, Eq, Hash)]
struct Pem {
    certificate: Vec<u8>,
    key: Vec<u8>,
    authority: Vec<u8>,
}

/// The key stays out of logs.
impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").finish_non_exhaustive()
    }
}

/// Why files cannot be used for TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("reading {path}")]
    Read {
        /// The file that was named.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A file that should have certificates has none.
    #[error("{0} has no certificate in PEM format")]
    NoCertificate(PathBuf),
    /// The certificate is not that of the key, or one of them is unusable.
    #[error("the certificate {certificate} and the key {key} cannot be used together")]
    Pair {
        /// The file of the certificate.
        certificate: PathBuf,
        /// The file of the key.
        key: PathBuf,
        /// What is wrong with them.
        source: transport::Error,
    },
    /// The authority's certificate is unusable.
    #[error("the authority's certificate {path} cannot be used")]
    Authority {
        /// The file of the authority's certificate.
        path: PathBuf,
        /// What is wrong with it.
        source: transport::Error,
    },
}

impl Tls {
    /// Reads a certificate, its key and the authority of the other side, in PEM format, and checks that they can be used.
    pub fn read(certificate: &Path, key: &Path, authority: &Path) -> Result<Self, TlsError> {
        let read =
            |path: &Path| fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source });
        let pem = Pem { certificate: read(certificate)?, key: read(key)?, authority: read(authority)? };
        // Without any, nobody would be accepted, and nothing would say why.
        for (path, text) in [(certificate, &pem.certificate), (authority, &pem.authority)] {
            let marker = b"-----BEGIN CERTIFICATE-----";
            if !text.windows(marker.len()).any(|window| window == marker) {
                return Err(TlsError::NoCertificate(path.to_owned()));
            }
        }
        let tls = Self(Arc::new(pem));
        let alone = ServerTlsConfig::new().identity(tls.identity());
        Server::builder().tls_config(alone).map_err(|source| TlsError::Pair {
            certificate: certificate.to_owned(),
            key: key.to_owned(),
            source,
        })?;
        tls.server(Server::builder())
            .map_err(|source| TlsError::Authority { path: authority.to_owned(), source })?;
        Ok(tls)
    }

    /// A server that speaks only to clients with a certificate.
    pub(crate) fn server(&self, server: Server) -> Result<Server, transport::Error> {
        let authority = Certificate::from_pem(&self.0.authority);
        server.tls_config(ServerTlsConfig::new().identity(self.identity()).client_ca_root(authority))
    }

    /// What a client of the server at `host` connects by.
    pub(crate) fn client(&self, host: &str) -> Result<transport::Endpoint, transport::Error> {
        let authority = Certificate::from_pem(&self.0.authority);
        let config =
            ClientTlsConfig::new().identity(self.identity()).ca_certificate(authority).domain_name(host);
        Channel::from_static("https://localhost").tls_config(config)
    }

    fn identity(&self) -> Identity {
        Identity::from_pem(&self.0.certificate, &self.0.key)
    }
}
