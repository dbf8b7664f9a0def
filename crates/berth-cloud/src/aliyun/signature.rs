//! The two ways in which requests to Alibaba Cloud are signed: HMAC-SHA1 over the parameters, as its older SDKs do it, and
//! `ACS3-HMAC-SHA256` over the whole request.

use std::fmt::Write as _;

use base64::Engine as _;
use berth_core::hex;
use http::StatusCode;
use ring::hmac;
use sha2::{Digest as _, Sha256};

use super::Failure;
use crate::server::Call;

const ALGORITHM: &str = "ACS3-HMAC-SHA256";

/// What a request says of who signed it.
pub(super) struct Signed {
    pub(super) access_key_id: String,
    /// When it was signed, as the request writes it.
    pub(super) at: String,
    /// No two requests have the same.
    pub(super) nonce: String,
    signature: String,
    kind: Kind,
}

enum Kind {
    /// Of the parameters alone.
    Parameters(Vec<(String, String)>),
    /// Of these headers and of everything else.
    Request(Vec<String>),
}

/// Reads who signed a request, with the parameters of its query and of its form.
pub(super) fn read(call: &Call, parameters: &[(String, String)]) -> Result<Signed, Failure> {
    match call.header("authorization").strip_prefix(ALGORITHM) {
        Some(credentials) => read_header(call, credentials),
        None => read_parameters(parameters),
    }
}

fn read_header(call: &Call, credentials: &str) -> Result<Signed, Failure> {
    let part = |name: &str| {
        let mut parts = credentials.split(',').filter_map(|part| part.trim().split_once('='));
        parts.find(|(known, _)| *known == name).map(|(_, value)| value.to_owned())
    };
    let incomplete = || {
        Failure::new(
            StatusCode::BAD_REQUEST,
            "IncompleteSignature",
            "The Authorization header is incomplete.",
        )
    };
    let headers: Vec<_> =
        part("SignedHeaders").ok_or_else(incomplete)?.split(';').map(str::to_owned).collect();
    // What is not signed could be changed on the way.
    let needed = ["host", "x-acs-action", "x-acs-version", "x-acs-date", "x-acs-content-sha256"];
    if !needed.iter().all(|name| headers.iter().any(|signed| signed == name)) {
        return Err(incomplete());
    }
    if call.header("x-acs-content-sha256") != hex(&Sha256::digest(&call.body)) {
        return Err(Failure::new(
            StatusCode::BAD_REQUEST,
            "InvalidContentSha256",
            "The hash in x-acs-content-sha256 is not that of the body.",
        ));
    }
    Ok(Signed {
        access_key_id: part("Credential").ok_or_else(incomplete)?,
        at: call.header("x-acs-date").to_owned(),
        nonce: call.header("x-acs-signature-nonce").to_owned(),
        signature: part("Signature").ok_or_else(incomplete)?,
        kind: Kind::Request(headers),
    })
}

fn read_parameters(parameters: &[(String, String)]) -> Result<Signed, Failure> {
    let get = |name: &str| {
        let found = parameters.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
        found.ok_or_else(|| Failure::missing(name))
    };
    let (method, version) = (get("SignatureMethod")?, get("SignatureVersion")?);
    if method != "HMAC-SHA1" || version != "1.0" {
        return Err(Failure::new(
            StatusCode::BAD_REQUEST,
            "InvalidParameter.SignatureMethod",
            "Only HMAC-SHA1 with version 1.0 is known here.",
        ));
    }
    Ok(Signed {
        access_key_id: get("AccessKeyId")?,
        at: get("Timestamp")?,
        nonce: get("SignatureNonce")?,
        signature: get("Signature")?,
        kind: Kind::Parameters(parameters.to_vec()),
    })
}

impl Signed {
    /// Whether the signature was made with this secret.
    pub(super) fn is_by(&self, call: &Call, secret: &str) -> Result<(), Failure> {
        let (text, is_right) = match &self.kind {
            Kind::Parameters(parameters) => {
                let text = parameters_to_sign(call.method.as_str(), parameters);
                let key =
                    hmac::Key::new(hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, format!("{secret}&").as_bytes());
                let signature = base64::engine::general_purpose::STANDARD.decode(&self.signature);
                let is_right =
                    signature.is_ok_and(|given| hmac::verify(&key, text.as_bytes(), &given).is_ok());
                (text, is_right)
            }
            Kind::Request(headers) => {
                let text = format!("{ALGORITHM}\n{}", hex(&Sha256::digest(canonical_request(call, headers))));
                let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
                let expected = hex(hmac::sign(&key, text.as_bytes()).as_ref());
                (text, expected == self.signature)
            }
        };
        if is_right {
            return Ok(());
        }
        Err(Failure::new(
            StatusCode::BAD_REQUEST,
            "SignatureDoesNotMatch",
            format!(
                "Specified signature is not matched with our calculation. server string to sign is:{text}"
            ),
        ))
    }
}

fn parameters_to_sign(method: &str, parameters: &[(String, String)]) -> String {
    let mut pairs: Vec<_> = parameters.iter().filter(|(name, _)| name != "Signature").collect();
    pairs.sort();
    let pairs: Vec<_> =
        pairs.iter().map(|(name, value)| format!("{}={}", encode(name), encode(value))).collect();
    format!("{method}&%2F&{}", encode(&pairs.join("&")))
}

fn canonical_request(call: &Call, headers: &[String]) -> String {
    let mut pairs = call.parameters();
    pairs.sort();
    let query: Vec<_> =
        pairs.iter().map(|(name, value)| format!("{}={}", encode(name), encode(value))).collect();
    let lines: Vec<_> = headers.iter().map(|name| format!("{name}:{}\n", call.header(name).trim())).collect();
    format!(
        "{}\n{}\n{}\n{}\n{}\n{}",
        call.method,
        call.path,
        query.join("&"),
        lines.concat(),
        headers.join(";"),
        call.header("x-acs-content-sha256"),
    )
}

/// Escapes everything but letters, digits and `-_.~`.
fn encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            // Writing to a String cannot fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue, Method};

    use super::*;

    const DISKS: &str = "RegionId=cn-hangzhou&DiskIds=%5B%22d-1%22%2C%22d%202%2A~%22%5D";
    const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn call(query: &str, headers: &[(&'static str, &str)]) -> Call {
        let mut all = HeaderMap::new();
        for (name, value) in headers {
            all.insert(*name, HeaderValue::from_str(value).unwrap());
        }
        Call {
            method: Method::POST,
            path: "/".to_owned(),
            query: query.to_owned(),
            headers: all,
            body: bytes::Bytes::new(),
            request_id: String::new(),
        }
    }

    /// The signatures were computed with the hmac, hashlib and urllib modules of Python.
    #[test]
    fn signatures_of_parameters_are_those_of_another_program() {
        let query = format!(
            "Action=DescribeDisks&Version=2014-05-26&Format=JSON&Timestamp=2026-01-02T03%3A04%3A05Z&SignatureMethod=HMAC-SHA1&\
             SignatureVersion=1.0&SignatureType=&SignatureNonce=n-1&AccessKeyId=berth&{DISKS}&\
             Signature=V%2FJfDSTMr1PfpGD%2B2LEB5Xwp4ag%3D"
        );
        let call = call(&query, &[]);
        let signed = read(&call, &call.parameters()).unwrap();
        signed.is_by(&call, "berth-secret").unwrap();
        assert_eq!(signed.is_by(&call, "other").unwrap_err().code, "SignatureDoesNotMatch");
    }

    #[test]
    fn signatures_of_requests_are_those_of_another_program() {
        let signed_headers =
            "host;x-acs-action;x-acs-content-sha256;x-acs-date;x-acs-signature-nonce;x-acs-version";
        let authorization = format!(
            "ACS3-HMAC-SHA256 Credential=berth,SignedHeaders={signed_headers},\
             Signature=e07823c6e36fd0f968b9cf46a0c754a1907111b412d5c3e854eb0d33d69fc3d4"
        );
        let mut headers = vec![
            ("authorization", authorization.as_str()),
            ("host", "127.0.0.1:1"),
            ("x-acs-action", "DescribeDisks"),
            ("x-acs-content-sha256", EMPTY),
            ("x-acs-date", "2026-01-02T03:04:05Z"),
            ("x-acs-signature-nonce", "n-1"),
            ("x-acs-version", "2014-05-26"),
        ];
        let right = call(DISKS, &headers);
        let signed = read(&right, &right.parameters()).unwrap();
        assert_eq!(signed.access_key_id, "berth");
        signed.is_by(&right, "berth-secret").unwrap();
        assert_eq!(signed.is_by(&right, "other").unwrap_err().code, "SignatureDoesNotMatch");
        headers[2].1 = "DeleteDisk";
        let changed = call(DISKS, &headers);
        let signed = read(&changed, &changed.parameters()).unwrap();
        assert_eq!(signed.is_by(&changed, "berth-secret").unwrap_err().code, "SignatureDoesNotMatch");
        headers[3].1 = "0";
        let changed = call(DISKS, &headers);
        assert_eq!(read(&changed, &[]).err().unwrap().code, "InvalidContentSha256");
    }
}
