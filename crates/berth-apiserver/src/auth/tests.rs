//! Credentials on disk and in hand.

use std::os::unix::fs::PermissionsExt;

use jiff::ToSpan;

use super::token::Bindings;
use super::*;

fn claims(exp: i64) -> Claims {
    let account = Bound { name: "builder".to_owned(), uid: "u1".to_owned() };
    Claims {
        aud: vec!["api".to_owned()],
        exp,
        iat: 0,
        iss: token::ISSUER.to_owned(),
        jti: "1".to_owned(),
        kubernetes: Bindings {
            namespace: "work".to_owned(),
            serviceaccount: account,
            pod: None,
            secret: None,
            node: None,
        },
        nbf: 0,
        sub: "system:serviceaccount:work:builder".to_owned(),
    }
}

#[test]
fn credentials_are_private_and_stay_the_same_until_they_are_about_to_expire() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pki");
    let now = Timestamp::now();
    let first = Credentials::ensure(&path, now).unwrap();
    for entry in std::fs::read_dir(&path).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{:?}", entry.path());
    }
    let again = Credentials::ensure(&path, now + (24 * 100).hours()).unwrap();
    assert_eq!(first.server.certificate, again.server.certificate);
    assert_eq!(first.admin_token(), again.admin_token());
    let later = Credentials::ensure(&path, now + (24 * 300).hours()).unwrap();
    assert_ne!(first.server.certificate, later.server.certificate);
    assert_eq!(first.authority, later.authority);
}

#[test]
fn a_certificate_says_whose_it_is() {
    use rustls::pki_types::{CertificateDer, pem::PemObject};
    let directory = tempfile::tempdir().unwrap();
    let credentials = Credentials::ensure(directory.path(), Timestamp::now()).unwrap();
    let der = CertificateDer::from_pem_slice(credentials.admin.certificate.as_bytes()).unwrap();
    let identity = Credentials::certificate_identity(&der).unwrap();
    assert_eq!(identity.user, "berth-admin");
    assert!(identity.groups.iter().any(|group| group == MASTERS));
    assert_eq!(Credentials::certificate_identity(&der[..der.len() / 4]), None);
}

#[test]
fn a_token_is_refused_when_changed_expired_or_meant_for_others() {
    let directory = tempfile::tempdir().unwrap();
    let credentials = Credentials::ensure(directory.path(), Timestamp::now()).unwrap();
    let signer = credentials.tokens();
    let api = ["api".to_owned()];
    let token = signer.sign(&claims(100)).unwrap();
    let read = signer.verify(&token, &api, 50).unwrap();
    assert_eq!(read.identity().user, "system:serviceaccount:work:builder");
    assert_eq!(signer.verify(&token, &api, 100), Err(Refused::Expired));
    assert_eq!(signer.verify(&token, &["vault".to_owned()], 50), Err(Refused::Audience));
    let changed = token.replacen('.', ".e", 1);
    assert_eq!(signer.verify(&changed, &api, 50), Err(Refused::Foreign));
    assert_eq!(signer.verify("x", &api, 50), Err(Refused::Foreign));
}

#[test]
fn only_the_administrators_token_is_the_administrators() {
    let directory = tempfile::tempdir().unwrap();
    let credentials = Credentials::ensure(directory.path(), Timestamp::now()).unwrap();
    assert!(credentials.static_token(credentials.admin_token()).is_some());
    assert_eq!(credentials.static_token("guess"), None);
}

#[test]
fn a_damaged_file_is_named() {
    let directory = tempfile::tempdir().unwrap();
    Credentials::ensure(directory.path(), Timestamp::now()).unwrap();
    std::fs::write(directory.path().join("server.crt"), "nonsense").unwrap();
    let error = Credentials::ensure(directory.path(), Timestamp::now()).unwrap_err();
    assert!(error.to_string().contains("server.crt"), "{error}");
}

#[test]
fn a_short_or_empty_administrators_token_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    Credentials::ensure(directory.path(), Timestamp::now()).unwrap();
    for token in ["", " \n", "secret"] {
        std::fs::write(directory.path().join("admin.token"), token).unwrap();
        let error = Credentials::ensure(directory.path(), Timestamp::now()).unwrap_err();
        assert!(error.to_string().contains("admin.token"), "{error}");
    }
}

#[test]
fn an_authority_without_its_key_is_an_error_that_says_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let other = tempfile::tempdir().unwrap();
    Credentials::ensure(directory.path(), Timestamp::now()).unwrap();
    Credentials::ensure(other.path(), Timestamp::now()).unwrap();
    let key = directory.path().join("ca.key");
    let refused = || {
        let error = Credentials::ensure(directory.path(), Timestamp::now()).unwrap_err().to_string();
        assert!(error.contains("ca.key") && error.contains("remove both"), "{error}");
    };
    std::fs::remove_file(&key).unwrap();
    refused();
    std::fs::write(&key, "").unwrap();
    refused();
    std::fs::copy(other.path().join("ca.key"), &key).unwrap();
    refused();
}

#[test]
fn certificates_that_do_not_fit_their_key_or_authority_are_made_anew() {
    let directory = tempfile::tempdir().unwrap();
    let now = Timestamp::now();
    let first = Credentials::ensure(directory.path(), now).unwrap();
    std::fs::remove_file(directory.path().join("server.key")).unwrap();
    let second = Credentials::ensure(directory.path(), now).unwrap();
    assert_ne!(first.server.certificate, second.server.certificate);
    assert_eq!(first.admin.certificate, second.admin.certificate);
    for name in ["ca.key", "ca.crt"] {
        std::fs::remove_file(directory.path().join(name)).unwrap();
    }
    let third = Credentials::ensure(directory.path(), now).unwrap();
    assert_ne!(first.admin.certificate, third.admin.certificate);
    // A clock that was set back: what was made in its future does not hold yet.
    let earlier = Credentials::ensure(directory.path(), now - (24 * 30).hours()).unwrap();
    assert_ne!(third.server.certificate, earlier.server.certificate);
    assert_eq!(third.server.key, earlier.server.key);
}
