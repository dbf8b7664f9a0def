//! Signatures of requests: `ACS3-HMAC-SHA256`, over the parameters, the headers and the body.
//!
//! It is the signature of Alibaba Cloud's current SDKs. Upstream's driver has two, this one and the older HMAC-SHA1 over the
//! parameters alone; every action of ECS takes this one.

use std::fmt::Write as _;

use berth_core::hex;
use hyper::header::{AUTHORIZATION, HOST, HeaderName};
use ring::{hmac, rand::SecureRandom as _};
use sha2::{Digest as _, Sha256};

use crate::{Error, Result, cloud::Secret};

const ALGORITHM: &str = "ACS3-HMAC-SHA256";
/// The version of the ECS API.
const VERSION: &str = "2014-05-26";

/// The key of an account or of a role, by which requests are signed.
#[derive(Debug, Clone)]
pub struct AccessKey {
    /// The id of the key, which is sent.
    pub id: String,
    /// What requests are signed with.
    pub secret: Secret,
    /// The token of a temporary key.
    pub security_token: Option<Secret>,
}

impl AccessKey {
    /// A key of these parts; an error names the one that cannot be right.
    pub fn new(id: &str, secret: &str, security_token: Option<&str>) -> Result<Self> {
        let id = id.trim();
        if id.is_empty() || !id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)) {
            return Err(Error::invalid("the access key id is empty, or has characters that no id has"));
        }
        let security_token = security_token.map(|token| Secret::new("security token", token)).transpose()?;
        Ok(Self { id: id.to_owned(), secret: Secret::new("access key secret", secret)?, security_token })
    }
}

/// When a request is signed, and the number that no other request has.
pub(super) struct Stamp {
    /// The time in UTC, such as `2026-01-02T03:04:05Z`.
    pub(super) date: String,
    pub(super) nonce: String,
}

impl Stamp {
    /// The stamp of a request that is signed now.
    pub(super) fn now() -> Self {
        let mut nonce = [0; 16];
        ring::rand::SystemRandom::new().fill(&mut nonce).expect("the kernel has random numbers");
        let date = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        Self { date, nonce: hex(&nonce) }
    }
}

/// A request that was signed: a POST without a body.
pub(super) struct Signed {
    pub(super) query: String,
    pub(super) headers: Vec<(HeaderName, String)>,
}

/// Signs a call of an action to that host.
pub(super) fn sign(
    key: &AccessKey,
    host: &str,
    action: &str,
    parameters: &[(String, String)],
    stamp: &Stamp,
) -> Signed {
    let mut parameters: Vec<_> = parameters.iter().collect();
    parameters.sort();
    let query: Vec<_> =
        parameters.iter().map(|(name, value)| format!("{}={}", escape(name), escape(value))).collect();
    let query = query.join("&");
    let nothing = hex(&Sha256::digest(b""));

    // In the order of their names, as the signature wants them.
    let mut headers = vec![(HOST, host.to_owned())];
    let header = |name: &'static str, value: &str| (HeaderName::from_static(name), value.to_owned());
    if key.security_token.is_some() {
        headers.push(header("x-acs-accesskey-id", &key.id));
    }
    headers.push(header("x-acs-action", action));
    headers.push(header("x-acs-content-sha256", &nothing));
    headers.push(header("x-acs-date", &stamp.date));
    if let Some(token) = &key.security_token {
        headers.push(header("x-acs-security-token", token.reveal()));
    }
    headers.push(header("x-acs-signature-nonce", &stamp.nonce));
    headers.push(header("x-acs-version", VERSION));

    let lines: Vec<_> = headers.iter().map(|(name, value)| format!("{name}:{value}\n")).collect();
    let names: Vec<_> = headers.iter().map(|(name, _)| name.as_str()).collect();
    let names = names.join(";");
    let request = format!("POST\n/\n{query}\n{}\n{names}\n{nothing}", lines.concat());
    let text = format!("{ALGORITHM}\n{}", hex(&Sha256::digest(request)));
    let by = hmac::Key::new(hmac::HMAC_SHA256, key.secret.reveal().as_bytes());
    let signature = hex(hmac::sign(&by, text.as_bytes()).as_ref());
    let authorization =
        format!("{ALGORITHM} Credential={},SignedHeaders={names},Signature={signature}", key.id);
    headers.push((AUTHORIZATION, authorization));
    Signed { query, headers }
}

/// Escapes everything but letters, digits and `-_.~`.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            escaped.push(char::from(byte));
        } else {
            // Writing to a String cannot fail.
            let _ = write!(escaped, "%{byte:02X}");
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signature(
        key: &AccessKey,
        host: &str,
        action: &str,
        parameters: &[(&str, &str)],
        (date, nonce): (&str, &str),
    ) -> (String, String) {
        let stamp = Stamp { date: date.to_owned(), nonce: nonce.to_owned() };
        let parameters: Vec<_> =
            parameters.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let signed = sign(key, host, action, &parameters, &stamp);
        let (name, authorization) = signed.headers.last().unwrap();
        assert_eq!(*name, AUTHORIZATION);
        (signed.query, authorization.clone())
    }

    /// The first is the example of Alibaba Cloud's description of this signature. The others were computed with the modules hmac,
    /// hashlib and urllib.parse of Python.
    #[test]
    fn signatures_are_those_of_another_program() {
        let names = "host;x-acs-action;x-acs-content-sha256;x-acs-date;x-acs-signature-nonce;x-acs-version";
        let example = AccessKey::new("YourAccessKeyId", "YourAccessKeySecret", None).unwrap();
        let image = "win2019_1809_x64_dtc_zh-cn_40G_alibase_20230811.vhd";
        let (query, authorization) = signature(
            &example,
            "ecs.cn-shanghai.aliyuncs.com",
            "RunInstances",
            &[("RegionId", "cn-shanghai"), ("ImageId", image)],
            ("2023-10-26T10:22:32Z", "3156853299f313e23d1673dc12e1703d"),
        );
        assert_eq!(query, format!("ImageId={image}&RegionId=cn-shanghai"));
        let expected = "06563a9e1b43f5dfe96b81484da74bceab24a1d853912eee15083a6f0f3283c0";
        assert_eq!(
            authorization,
            format!("ACS3-HMAC-SHA256 Credential=YourAccessKeyId,SignedHeaders={names},Signature={expected}")
        );

        let stamp = ("2026-01-02T03:04:05Z", "0123456789abcdef0123456789abcdef");
        let key = AccessKey::new("berth", "berth-secret", None).unwrap();
        let (query, authorization) = signature(
            &key,
            "127.0.0.1:8080",
            "DescribeDisks",
            &[
                ("RegionId", "cn-hangzhou"),
                ("DiskIds", r#"["d-1","d 2*~"]"#),
                ("Tag.1.Key", "träger/名"),
                ("Tag.1.Value", ""),
                ("Tag.2.Key", "a"),
                ("Tag.10.Key", "+&="),
            ],
            stamp,
        );
        assert_eq!(
            query,
            "DiskIds=%5B%22d-1%22%2C%22d%202%2A~%22%5D&RegionId=cn-hangzhou&Tag.1.Key=tr%C3%A4ger%2F%E5%90%8D&\
             Tag.1.Value=&Tag.10.Key=%2B%26%3D&Tag.2.Key=a"
        );
        let expected = "4992b18bc1f434790cbb3287f5f1fac4f537c5da9b20a7b186911e7a07001912";
        assert!(authorization.ends_with(&format!("{names},Signature={expected}")), "{authorization}");

        let temporary = AccessKey::new("STS.key", "sts-secret", Some("CAIS/token+with=signs")).unwrap();
        let (_, authorization) = signature(
            &temporary,
            "ecs-vpc.cn-beijing.aliyuncs.com",
            "AttachDisk",
            &[("InstanceId", "i-bp1"), ("DiskId", "d-bp1")],
            stamp,
        );
        let names = "host;x-acs-accesskey-id;x-acs-action;x-acs-content-sha256;x-acs-date;x-acs-security-token;\
                     x-acs-signature-nonce;x-acs-version";
        let expected = "544e136df01e94a467ccc94972a3889c9b9f4192cd3430cdab06257032866de7";
        assert!(authorization.ends_with(&format!("{names},Signature={expected}")), "{authorization}");
    }

    #[test]
    fn no_secret_is_formatted_and_no_number_is_used_twice() {
        let key = AccessKey::new("berth", " hush ", Some("hush-too")).unwrap();
        assert!(!format!("{key:?}").contains("hush"));
        for (id, secret, token) in
            [("", "a", None), ("a b", "a", None), ("a", "", None), ("a", "a", Some("\n"))]
        {
            assert!(AccessKey::new(id, secret, token).is_err(), "{id:?} {secret:?} {token:?}");
        }
        assert_ne!(Stamp::now().nonce, Stamp::now().nonce);
        assert!(Stamp::now().date.ends_with('Z'), "{}", Stamp::now().date);
    }
}
