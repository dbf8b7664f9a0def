//! TLS to a container that is probed: encrypted, and whatever certificate it has, as the kubelet does it.
//!
//! A probe asks whether a server answers, and sends it no secret; certificates of pods are rarely made for their addresses.
//! HTTP/2 is not offered.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, InvalidMessage, SignatureScheme};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Makes connections by TLS without checking whom they lead to.
pub(super) struct Connector(TlsConnector);

impl Connector {
    pub(super) fn new() -> Self {
        let provider = Arc::new(ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .expect("the provider has cipher suites for TLS 1.2 and 1.3");
        let mut config = config
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
            .with_no_client_auth();
        // Every probe is a new connection, to one of many pods with the same address.
        config.resumption = Resumption::disabled();
        Self(TlsConnector::from(Arc::new(config)))
    }

    /// Makes the connection one by TLS; a server of several names learns which of them is asked for.
    pub(super) async fn connect(&self, host: &str, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let address = stream.peer_addr()?;
        let name = ServerName::try_from(host.to_owned());
        let name = name.unwrap_or_else(|_| ServerName::IpAddress(SocketAddr::ip(&address).into()));
        self.0.connect(name, stream).await
    }
}

/// Whether a server has answered the beginning of TLS with something else, such as HTTP.
pub(super) fn is_no_tls(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    matches!(inner, Some(rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType)))
}

/// Takes every certificate for the right one.
struct AnyCertificate(Arc<CryptoProvider>);

impl fmt::Debug for AnyCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AnyCertificate")
    }
}

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
