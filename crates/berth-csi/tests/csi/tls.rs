//! TLS over TCP: who is answered, and which files are refused.

use std::error::Error as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use berth_csi::v1::ProbeRequest;
use berth_csi::{Client, Endpoint, Tls, TlsError};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use tempfile::TempDir;
use tonic::Code;

use crate::plugin::Served;

/// An authority, and the files of the certificates that it signs for 127.0.0.1.
struct Authority {
    dir: TempDir,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("ca.crt"), issuer.pem()).unwrap();
        Self { dir, issuer }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn sign(&self, name: &str) -> (PathBuf, PathBuf) {
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let files = (self.path(&format!("{name}.crt")), self.path(&format!("{name}.key")));
        fs::write(&files.0, certificate.pem()).unwrap();
        fs::write(&files.1, key.serialize_pem()).unwrap();
        files
    }

    fn tls(&self, name: &str, trusted: &Self) -> Tls {
        let (certificate, key) = self.sign(name);
        Tls::read(&certificate, &key, &trusted.path("ca.crt")).unwrap()
    }
}

async fn probe(endpoint: &Endpoint) -> Code {
    let answer = Client::connect(endpoint).call(Duration::from_secs(60), ProbeRequest {}).await;
    answer.err().map_or(Code::Ok, |status| status.code())
}

#[tokio::test]
async fn only_clients_with_a_certificate_of_the_authority_are_answered() {
    let (ours, others) = (Authority::new(), Authority::new());
    let plain: Endpoint = "tcp://127.0.0.1:0".parse().unwrap();
    let endpoint = plain.with_tls(ours.tls("server", &ours)).unwrap();
    let served = Served::at(&endpoint, tempfile::tempdir().unwrap(), None).await;
    let Endpoint::Tcp { port, .. } = served.endpoint else { panic!("{}", served.endpoint) };

    let at = |host: &str| format!("tcp://{host}:{port}").parse::<Endpoint>().unwrap();
    let with = |host: &str, tls| at(host).with_tls(tls).unwrap();
    assert_eq!(probe(&with("127.0.0.1", ours.tls("client", &ours))).await, Code::Ok);
    assert_eq!(probe(&at("127.0.0.1")).await, Code::Unavailable, "without TLS");
    let stranger = others.tls("stranger", &ours);
    assert_eq!(probe(&with("127.0.0.1", stranger)).await, Code::Unavailable, "another's certificate");
    let trusts_others = ours.tls("client", &others);
    assert_eq!(
        probe(&with("127.0.0.1", trusts_others)).await,
        Code::Unavailable,
        "a server of another authority"
    );
    assert_eq!(probe(&with("localhost", ours.tls("client", &ours))).await, Code::Unavailable, "another host");
}

#[test]
fn files_that_do_not_fit_each_other_are_refused_by_name() {
    let authority = Authority::new();
    let (certificate, key) = authority.sign("one");
    let (_, other) = authority.sign("two");
    let ca = authority.path("ca.crt");
    let refused = |certificate: &Path, key: &Path, ca: &Path| {
        let error = Tls::read(certificate, key, ca).unwrap_err();
        (error.to_string(), error)
    };
    let (text, error) = refused(&certificate, &other, &ca);
    assert!(matches!(error, TlsError::Pair { .. }) && error.source().is_some(), "{error:?}");
    assert!(text.contains("one.crt") && text.contains("two.key"), "{text}");
    let (text, error) = refused(&authority.path("none"), &key, &ca);
    assert!(matches!(error, TlsError::Read { .. }) && text.contains("none"), "{text}");
    let empty = authority.path("empty");
    fs::write(&empty, "").unwrap();
    for (certificate, ca) in [(&empty, &ca), (&certificate, &empty)] {
        let (text, error) = refused(certificate, &key, ca);
        assert!(matches!(error, TlsError::NoCertificate(_)) && text.contains("empty"), "{text}");
    }
    let unix: Endpoint = "unix:///run/csi.sock".parse().unwrap();
    let tls = Tls::read(&certificate, &key, &ca).unwrap();
    assert!(!format!("{tls:?}").contains("PRIVATE"), "the key is not for logs");
    assert!(unix.with_tls(tls).unwrap_err().to_string().contains("/run/csi.sock"));
}
