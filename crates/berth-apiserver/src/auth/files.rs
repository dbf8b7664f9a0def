//! The files of the credentials: made once, private, renewed in time.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use jiff::{Timestamp, ToSpan, tz::TimeZone};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData,
};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use x509_parser::certificate::X509Certificate;

use super::{AuthError, MASTERS, parse_certificate};

const AUTHORITY_YEARS: i64 = 10;
const LEAF_DAYS: i64 = 365;
/// A certificate that holds for less than this is made anew.
const RENEW_DAYS: i64 = 90;
/// As many characters of base64 as hold 128 bits.
const SHORTEST_TOKEN: usize = 22;

/// A certificate and its key, as PEM.
#[derive(Clone)]
pub struct Pair {
    /// The certificate as PEM text, which may be shown to everybody.
    pub certificate: String,
    /// The private key as PEM text. It does not appear in `Debug`.
    pub key: String,
}

impl std::fmt::Debug for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pair").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

/// Whose certificate to make.
pub(super) struct Leaf {
    name: &'static str,
    common_name: &'static str,
    organization: Option<&'static str>,
    alternatives: &'static [&'static str],
    usage: ExtendedKeyUsagePurpose,
}

pub(super) const SERVER: Leaf = Leaf {
    name: "server",
    common_name: "berth-apiserver",
    organization: None,
    alternatives: &[
        "localhost",
        "127.0.0.1",
        "::1",
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
    ],
    usage: ExtendedKeyUsagePurpose::ServerAuth,
};

pub(super) const ADMIN: Leaf = Leaf {
    name: "admin",
    common_name: "berth-admin",
    organization: Some(MASTERS),
    alternatives: &[],
    usage: ExtendedKeyUsagePurpose::ClientAuth,
};

pub(super) fn make_directory(directory: &Path) -> Result<(), AuthError> {
    let at = |source| AuthError::File { path: directory.to_owned(), source };
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(at)
}

/// Reads the authority or makes it.
///
/// What the authority signed is in the hands of clients, so neither its key nor its certificate is made anew to
/// match the other: a key that is missing, or belongs to another certificate, is an error.
pub(super) fn authority(directory: &Path, now: Timestamp) -> Result<Pair, AuthError> {
    let (key_path, path) = (directory.join("ca.key"), directory.join("ca.crt"));
    let key = match read(&path)? {
        None => secret(&key_path, new_key)?,
        Some(_) => read(&key_path)?.ok_or_else(|| AuthError::Authority { path: key_path.clone() })?,
    };
    let pair = KeyPair::from_pem(&key).map_err(|_| AuthError::Authority { path: key_path.clone() })?;
    if let Some(certificate) = read(&path)? {
        let der = certificate_der(&path, &certificate)?;
        let parsed = parse(&path, &der)?;
        if !belongs(&parsed, &pair) {
            return Err(AuthError::Authority { path: key_path });
        }
        if holds(&parsed, now) {
            return Ok(Pair { certificate, key });
        }
    }
    let made = |source| AuthError::Certificate { name: "the authority", source };
    let mut params = authority_params().map_err(made)?;
    (params.not_before, params.not_after) = validity(now, AUTHORITY_YEARS * 365);
    let certificate = params.self_signed(&pair).map_err(made)?.pem();
    write_private(&path, &certificate)?;
    Ok(Pair { certificate, key })
}

/// Reads a certificate that the authority signed, or makes it. One that does not belong to its key or to the authority,
/// or does not hold now and for some time, is made anew.
pub(super) fn leaf(
    directory: &Path,
    authority: &Pair,
    leaf: &Leaf,
    now: Timestamp,
) -> Result<Pair, AuthError> {
    let key_path = directory.join(format!("{}.key", leaf.name));
    let key = secret(&key_path, new_key)?;
    let pair = KeyPair::from_pem(&key)
        .map_err(|_| AuthError::Damaged { path: key_path, why: "it is not a private key".to_owned() })?;
    let path = directory.join(format!("{}.crt", leaf.name));
    if let Some(certificate) = read(&path)? {
        let authority_path = directory.join("ca.crt");
        let authority_der = certificate_der(&authority_path, &authority.certificate)?;
        let authority_key = parse(&authority_path, &authority_der)?.tbs_certificate.subject_pki;
        let der = certificate_der(&path, &certificate)?;
        let parsed = parse(&path, &der)?;
        let signed = parsed.verify_signature(Some(&authority_key)).is_ok();
        if signed && belongs(&parsed, &pair) && holds(&parsed, now) {
            return Ok(Pair { certificate, key });
        }
    }
    let certificate = sign(authority, leaf, &pair, now)
        .map_err(|source| AuthError::Certificate { name: leaf.name, source })?;
    write_private(&path, &certificate)?;
    Ok(Pair { certificate, key })
}

/// Whether a certificate is of this key.
fn belongs(certificate: &X509Certificate<'_>, key: &KeyPair) -> bool {
    certificate.public_key().raw == key.subject_public_key_info()
}

/// Whether a certificate holds now and for long enough.
fn holds(certificate: &X509Certificate<'_>, now: Timestamp) -> bool {
    let validity = certificate.validity();
    let renew = now + (RENEW_DAYS * 24).hours();
    validity.not_before.timestamp() <= now.as_second() && validity.not_after.timestamp() > renew.as_second()
}

fn sign(authority: &Pair, leaf: &Leaf, key: &KeyPair, now: Timestamp) -> Result<String, rcgen::Error> {
    let issuer = Issuer::new(authority_params()?, KeyPair::from_pem(&authority.key)?);
    let alternatives: Vec<String> = leaf.alternatives.iter().map(|&name| name.to_owned()).collect();
    let mut params = CertificateParams::new(alternatives)?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, leaf.common_name);
    if let Some(organization) = leaf.organization {
        params.distinguished_name.push(DnType::OrganizationName, organization);
    }
    params.extended_key_usages = vec![leaf.usage.clone()];
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.use_authority_key_identifier_extension = true;
    (params.not_before, params.not_after) = validity(now, LEAF_DAYS);
    Ok(params.signed_by(key, &issuer)?.pem())
}

fn authority_params() -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "berth-ca");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages =
        vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
    Ok(params)
}

/// From yesterday, for clocks that are behind, to so many days from now.
fn validity(now: Timestamp, days: i64) -> (time::OffsetDateTime, time::OffsetDateTime) {
    let day = |shift: i64| {
        let date = (now + (shift * 24).hours()).to_zoned(TimeZone::UTC).date();
        let month = u8::try_from(date.month()).unwrap_or(1);
        rcgen::date_time_ymd(i32::from(date.year()), month, u8::try_from(date.day()).unwrap_or(1))
    };
    (day(-1), day(days))
}

fn certificate_der(path: &Path, pem: &str) -> Result<CertificateDer<'static>, AuthError> {
    let damaged = |_| AuthError::Damaged { path: path.to_owned(), why: "it is not PEM".to_owned() };
    CertificateDer::from_pem_slice(pem.as_bytes()).map_err(damaged)
}

fn parse<'a>(path: &Path, der: &'a [u8]) -> Result<X509Certificate<'a>, AuthError> {
    let damaged = || AuthError::Damaged { path: path.to_owned(), why: "it is not a certificate".to_owned() };
    parse_certificate(der).ok_or_else(damaged)
}

/// Reads a private file, or fills it with what `make` gives.
pub(super) fn secret(path: &Path, make: fn() -> Result<String, AuthError>) -> Result<String, AuthError> {
    if let Some(text) = read(path)? {
        return Ok(text);
    }
    let text = make()?;
    write_private(path, &text)?;
    Ok(text)
}

pub(super) fn new_key() -> Result<String, AuthError> {
    let key = KeyPair::generate().map_err(|source| AuthError::Certificate { name: "a key", source })?;
    Ok(key.serialize_pem())
}

/// Reads the administrator's token, or makes it.
pub(super) fn admin_token(path: &Path) -> Result<String, AuthError> {
    let text = secret(path, || Ok(berth_core::hex(&super::random::<32>()?)))?;
    let token = text.trim();
    if token.len() < SHORTEST_TOKEN {
        let why = format!("it holds fewer than {SHORTEST_TOKEN} characters, which can be guessed");
        return Err(AuthError::Damaged { path: path.to_owned(), why });
    }
    Ok(token.to_owned())
}

fn read(path: &Path) -> Result<Option<String>, AuthError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(AuthError::File { path: path.to_owned(), source }),
    }
}

/// Writes a file that only its owner may read, whole or not at all.
pub(super) fn write_private(path: &Path, text: &str) -> Result<(), AuthError> {
    berth_host::files::write_private(path, text.as_bytes())
        .map_err(|source| AuthError::File { path: path.to_owned(), source })
}
