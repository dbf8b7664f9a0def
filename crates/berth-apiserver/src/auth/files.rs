//! The files of the credentials: made once, private, renewed in time.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use jiff::{Timestamp, ToSpan, tz::TimeZone};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::{CertificateDer, pem::PemObject};

use super::{AuthError, MASTERS, x509};

const AUTHORITY_YEARS: i64 = 10;
const LEAF_DAYS: i64 = 365;
/// A certificate that holds for less than this is made anew.
const RENEW_DAYS: i64 = 90;

/// A certificate and its key, as PEM.
#[derive(Clone)]
pub struct Pair {
    /// The certificate.
    pub certificate: String,
    /// The private key.
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
pub(super) fn authority(directory: &Path, now: Timestamp) -> Result<Pair, AuthError> {
    let key = secret(&directory.join("ca.key"), new_key)?;
    let path = directory.join("ca.crt");
    if let Some(certificate) = read(&path)?
        && not_after(&path, &certificate)? > now + (RENEW_DAYS * 24).hours()
    {
        return Ok(Pair { certificate, key });
    }
    let made = |source| AuthError::Certificate { name: "the authority", source };
    let mut params = authority_params().map_err(made)?;
    (params.not_before, params.not_after) = validity(now, AUTHORITY_YEARS * 365);
    let pair = KeyPair::from_pem(&key).map_err(made)?;
    let certificate = params.self_signed(&pair).map_err(made)?.pem();
    write_private(&path, &certificate)?;
    Ok(Pair { certificate, key })
}

/// Reads a certificate that the authority signed, or makes it.
pub(super) fn leaf(
    directory: &Path,
    authority: &Pair,
    leaf: &Leaf,
    now: Timestamp,
) -> Result<Pair, AuthError> {
    let key = secret(&directory.join(format!("{}.key", leaf.name)), new_key)?;
    let path = directory.join(format!("{}.crt", leaf.name));
    if let Some(certificate) = read(&path)?
        && not_after(&path, &certificate)? > now + (RENEW_DAYS * 24).hours()
    {
        return Ok(Pair { certificate, key });
    }
    let certificate = sign(authority, leaf, &key, now)
        .map_err(|source| AuthError::Certificate { name: leaf.name, source })?;
    write_private(&path, &certificate)?;
    Ok(Pair { certificate, key })
}

fn sign(authority: &Pair, leaf: &Leaf, key: &str, now: Timestamp) -> Result<String, rcgen::Error> {
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
    Ok(params.signed_by(&KeyPair::from_pem(key)?, &issuer)?.pem())
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

fn not_after(path: &Path, certificate: &str) -> Result<Timestamp, AuthError> {
    let damaged = |why: &str| AuthError::Damaged { path: path.to_owned(), why: why.to_owned() };
    let der = CertificateDer::from_pem_slice(certificate.as_bytes()).map_err(|_| damaged("it is not PEM"))?;
    Ok(x509::read(&der).ok_or_else(|| damaged("it is not a certificate"))?.not_after)
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

pub(super) fn random_token() -> Result<String, AuthError> {
    use std::fmt::Write;
    let bytes: [u8; 32] = super::random()?;
    Ok(bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    }))
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
    let at = |source| AuthError::File { path: path.to_owned(), source };
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    let mut options = fs::OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&new).map_err(at)?;
    file.set_permissions(fs::Permissions::from_mode(0o600)).map_err(at)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(at)?;
    fs::rename(&new, path).map_err(at)
}
