//! Service account tokens: signed claims (JWT, ES256) that say who a program is and until when.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair, UnparsedPublicKey,
};
use rustls::pki_types::{PrivatePkcs8KeyDer, pem::PemObject};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::Identity;

/// Who issues the tokens.
pub const ISSUER: &str = "https://kubernetes.default.svc";

/// Signs and checks tokens.
pub struct Signer {
    key: EcdsaKeyPair,
    id: String,
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Signer").field("id", &self.id).finish_non_exhaustive()
    }
}

/// What a token says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    /// For whom the token is meant.
    pub aud: Vec<String>,
    /// When it ends, in seconds since 1970.
    pub exp: i64,
    /// When it was made.
    pub iat: i64,
    /// The issuer, which is [`ISSUER`] in every token that is accepted.
    pub iss: String,
    /// A number of its own.
    pub jti: String,
    /// The objects it is bound to.
    #[serde(rename = "kubernetes.io")]
    pub kubernetes: Bindings,
    /// When the token begins to hold, in seconds since 1970: the time when it was made.
    pub nbf: i64,
    /// The user that the bearer is, such as `system:serviceaccount:default:builder`.
    pub sub: String,
}

/// The objects a token lives and dies with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bindings {
    /// The namespace of the service account.
    pub namespace: String,
    /// The service account that the token was issued for.
    pub serviceaccount: Bound,
    /// The pod, if it is bound to one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<Bound>,
    /// The secret, if it is bound to one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<Bound>,
    /// The node, if it is bound to one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<Bound>,
}

/// An object by name and uid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bound {
    /// The name of the object.
    pub name: String,
    /// The uid of the object: another object of the same name does not count as this one.
    pub uid: String,
}

/// Why a token is not accepted.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Refused {
    /// It is no token of this server.
    #[error("the token is not one of this server's")]
    Foreign,
    /// The time in [`Claims::exp`] has come.
    #[error("the token has expired")]
    Expired,
    /// It is meant for others.
    #[error("the token is meant for other audiences")]
    Audience,
    /// The service account, or what the token is bound to, is gone.
    #[error("the token is bound to an object that is gone")]
    Unbound,
}

impl Signer {
    /// Reads the signing key from a private key in PEM text (PKCS #8, P-256); the error is a phrase for messages.
    pub(super) fn from_pem(pem: &str) -> Result<Self, String> {
        let der = PrivatePkcs8KeyDer::from_pem_slice(pem.as_bytes()).map_err(|error| error.to_string())?;
        let random = ring::rand::SystemRandom::new();
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, der.secret_pkcs8_der(), &random)
            .map_err(|error| error.to_string())?;
        let id = URL_SAFE_NO_PAD.encode(Sha256::digest(key.public_key().as_ref()));
        Ok(Self { key, id })
    }

    /// Signs claims; `None` when the system gives no random numbers.
    pub fn sign(&self, claims: &Claims) -> Option<String> {
        let header = json!({ "alg": "ES256", "kid": self.id });
        let header = URL_SAFE_NO_PAD.encode(header.to_string());
        let claims = URL_SAFE_NO_PAD.encode(serde_json::to_string(claims).ok()?);
        let signed = format!("{header}.{claims}");
        let signature = self.key.sign(&ring::rand::SystemRandom::new(), signed.as_bytes()).ok()?;
        Some(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature.as_ref())))
    }

    /// Checks signature, time and audience; whether the objects still exist is the caller's to check.
    pub fn verify(&self, token: &str, audiences: &[String], now: i64) -> Result<Claims, Refused> {
        let (signed, signature) = token.rsplit_once('.').ok_or(Refused::Foreign)?;
        let (_, claims) = signed.split_once('.').ok_or(Refused::Foreign)?;
        let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|_| Refused::Foreign)?;
        // The algorithm is ours and not the header's to choose.
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, self.key.public_key().as_ref())
            .verify(signed.as_bytes(), &signature)
            .map_err(|_| Refused::Foreign)?;
        let claims = URL_SAFE_NO_PAD.decode(claims).map_err(|_| Refused::Foreign)?;
        let claims: Claims = serde_json::from_slice(&claims).map_err(|_| Refused::Foreign)?;
        if claims.iss != ISSUER {
            return Err(Refused::Foreign);
        }
        if claims.exp <= now {
            return Err(Refused::Expired);
        }
        if !audiences.iter().any(|audience| claims.aud.contains(audience)) {
            return Err(Refused::Audience);
        }
        Ok(claims)
    }

    /// The public key, as a set of JSON web keys.
    pub fn keys(&self) -> Value {
        // An uncompressed point: 0x04, then x and y of 32 bytes each.
        let point = self.key.public_key().as_ref();
        let part =
            |range: std::ops::Range<usize>| URL_SAFE_NO_PAD.encode(point.get(range).unwrap_or_default());
        json!({ "keys": [{
            "use": "sig", "kty": "EC", "kid": self.id, "crv": "P-256", "alg": "ES256",
            "x": part(1..33), "y": part(33..65),
        }] })
    }
}

impl Claims {
    /// Who the token's bearer is.
    pub fn identity(&self) -> Identity {
        let namespace = &self.kubernetes.namespace;
        let groups = ["system:serviceaccounts".to_owned(), format!("system:serviceaccounts:{namespace}")];
        let mut identity = Identity::new(self.sub.clone(), groups);
        identity.uid.clone_from(&self.kubernetes.serviceaccount.uid);
        identity
    }
}
