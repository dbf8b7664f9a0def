//! Who asks: certificates, bearer tokens, and the files that hold them.
//!
//! Everything is made at the first start below one directory, readable by its owner only. Leaf certificates are made
//! anew well before they expire; the authority and the keys stay.

mod files;
mod token;

use std::io;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use sha2::{Digest, Sha256};
use x509_parser::certificate::X509Certificate;
use x509_parser::x509::AttributeTypeAndValue;

pub use files::Pair;
pub use token::{Bindings, Bound, Claims, ISSUER, Refused};

/// The group that may do everything.
pub const MASTERS: &str = "system:masters";

/// What failed while credentials were made or read.
#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    /// A file cannot be read or written.
    #[error("cannot use {}", path.display())]
    File {
        /// The file or directory that could not be used.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A certificate cannot be made.
    #[error("cannot make the certificate for {name}")]
    Certificate {
        /// Which certificate or key was being made, for an operator, such as `server` or `admin`.
        name: &'static str,
        /// What the library says.
        source: rcgen::Error,
    },
    /// A key or certificate on disk is not what it should be.
    #[error("{} is damaged: {why}; remove it to have it made anew", path.display())]
    Damaged {
        /// The file whose contents were not understood; nothing overwrites it.
        path: PathBuf,
        /// A phrase that says what is wrong with the contents, for the message of this error.
        why: String,
    },
    /// The key of the authority is missing, or is not the one of its certificate.
    #[error(
        "{} is not the key of ca.crt beside it: restore it, or remove both to make a new authority and new certificates \
         (clients then need the new kubeconfig)",
        path.display()
    )]
    Authority {
        /// The file of the key.
        path: PathBuf,
    },
    /// The TLS library refuses the certificates.
    #[error("cannot set up TLS")]
    Tls(#[from] rustls::Error),
    /// The system gives no random numbers.
    #[error("cannot get random numbers")]
    Random,
}

/// Who asks, as Kubernetes names people and programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The user's name, for instance the common name of a client certificate or the subject of a token.
    pub user: String,
    /// The user's uid, if known.
    pub uid: String,
    /// The groups, `system:authenticated` among them.
    pub groups: Vec<String>,
}

impl Identity {
    /// A user in groups, besides the one of all that are known.
    pub fn new(user: impl Into<String>, groups: impl IntoIterator<Item = String>) -> Self {
        let mut groups: Vec<String> = groups.into_iter().collect();
        groups.push("system:authenticated".to_owned());
        Self { user: user.into(), uid: String::new(), groups }
    }

    /// The program itself, which calls without a socket.
    pub fn in_process() -> Self {
        Self::new("system:apiserver", [MASTERS.to_owned()])
    }
}

/// The keys, certificates and tokens of one API server: the authority, the server's own, the administrator's, and the
/// key that signs service account tokens. All of them are files below one directory.
#[derive(Debug)]
pub struct Credentials {
    directory: PathBuf,
    /// The authority that signs certificates, as PEM.
    pub authority: String,
    /// The server's certificate and key.
    pub server: Pair,
    /// The administrator's certificate and key.
    pub admin: Pair,
    admin_token: String,
    admin_token_hash: [u8; 32],
    signer: token::Signer,
}

impl Credentials {
    /// Reads the credentials from `directory`, making what is missing or about to expire.
    pub fn ensure(directory: &Path, now: Timestamp) -> Result<Self, AuthError> {
        files::make_directory(directory)?;
        let authority = files::authority(directory, now)?;
        let server = files::leaf(directory, &authority, &files::SERVER, now)?;
        let admin = files::leaf(directory, &authority, &files::ADMIN, now)?;
        let admin_token = files::admin_token(&directory.join("admin.token"))?;
        let key = files::secret(&directory.join("service-account.key"), files::new_key)?;
        let signer = token::Signer::from_pem(&key)
            .map_err(|why| AuthError::Damaged { path: directory.join("service-account.key"), why })?;
        Ok(Self {
            directory: directory.to_owned(),
            authority: authority.certificate,
            server,
            admin,
            admin_token_hash: Sha256::digest(admin_token.as_bytes()).into(),
            admin_token,
            signer,
        })
    }

    /// Where the files lie.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The administrator's bearer token.
    pub fn admin_token(&self) -> &str {
        &self.admin_token
    }

    /// The administrator, if that is whose token it is.
    pub fn static_token(&self, token: &str) -> Option<Identity> {
        // Hashes are compared, so that the time it takes reveals nothing about the token.
        let hash: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        (hash == self.admin_token_hash).then(|| Identity::new("berth-admin", [MASTERS.to_owned()]))
    }

    /// What signs and checks service account tokens.
    pub fn tokens(&self) -> &token::Signer {
        &self.signer
    }

    /// Who a verified client certificate belongs to: its last common name, and its organizations as groups. `None` if
    /// one of these is not a text.
    pub fn certificate_identity(der: &[u8]) -> Option<Identity> {
        let certificate = parse_certificate(der)?;
        let subject = certificate.subject();
        let user = subject.iter_common_name().last().map_or(Ok(""), AttributeTypeAndValue::as_str).ok()?;
        let groups: Result<Vec<_>, _> =
            subject.iter_organization().map(|name| name.as_str().map(str::to_owned)).collect();
        Some(Identity::new(user, groups.ok()?))
    }

    /// The administrator's kubeconfig for a server at `url`.
    pub fn kubeconfig(&self, url: &str) -> String {
        use base64::Engine;
        let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
        format!(
            "apiVersion: v1\nkind: Config\nclusters:\n- name: berth\n  cluster:\n    server: {url}\n    \
             certificate-authority-data: {}\nusers:\n- name: berth-admin\n  user:\n    \
             client-certificate-data: {}\n    client-key-data: {}\ncontexts:\n- name: berth\n  context:\n    \
             cluster: berth\n    user: berth-admin\ncurrent-context: berth\n",
            encode(&self.authority),
            encode(&self.admin.certificate),
            encode(&self.admin.key),
        )
    }

    /// Writes the kubeconfig, readable by its owner only, and only when it says something else than before.
    pub fn write_kubeconfig(&self, path: &Path, url: &str) -> Result<(), AuthError> {
        let text = self.kubeconfig(url);
        if std::fs::read_to_string(path).is_ok_and(|have| have == text) {
            return Ok(());
        }
        files::write_private(path, &text)
    }
}

/// Reads a certificate; `None` if the bytes are something else, or have something else behind it.
fn parse_certificate(der: &[u8]) -> Option<X509Certificate<'_>> {
    let (rest, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
    rest.is_empty().then_some(certificate)
}

/// Random bytes from the system.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], AuthError> {
    use ring::rand::SecureRandom;
    let mut bytes = [0; N];
    ring::rand::SystemRandom::new().fill(&mut bytes).map_err(|_| AuthError::Random)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests;
