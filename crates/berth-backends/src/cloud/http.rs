//! One HTTP request to a provider: its address, its time limit, and what is known when it fails.

use std::{fmt, net::IpAddr, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{HeaderMap, Method, Request, StatusCode, Uri, header::HeaderName};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};

use crate::{Error, Result};

/// No answer of a provider is longer.
const LONGEST_ANSWER: usize = 32 << 20;
/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(10);

/// The address of a provider's service. What travels there carries credentials, so plain HTTP is for this machine alone.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Endpoint {
    base: String,
    /// The host, with the port if the URL has one.
    host: String,
    is_plain: bool,
}

impl Endpoint {
    /// Reads `https://host/path/`; plain `http://` only to loopback, and to the addresses in `plain`, which are those of
    /// metadata services on the link.
    pub(crate) fn parse(what: &str, url: &str, plain: &[IpAddr]) -> Result<Self> {
        let wrong = |why: &str| Error::Invalid(format!("{what} {}: {why}", without_user(url)));
        let uri: Uri = url.parse().map_err(|_| wrong("this is no URL"))?;
        let host = uri.host().ok_or_else(|| wrong("the URL names no host"))?;
        if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err(wrong("a URL with a user name or password is not taken"));
        }
        if uri.query().is_some() {
            return Err(wrong("the URL has a query"));
        }
        let is_plain = match uri.scheme_str() {
            Some("https") => false,
            Some("http") if is_near(host, plain) => true,
            Some("http") => {
                return Err(wrong("credentials travel only by https, or by http to a loopback address"));
            }
            _ => return Err(wrong("the URL begins neither with https:// nor with http://")),
        };
        let mut base = url.to_owned();
        if !base.ends_with('/') {
            base.push('/');
        }
        let host = uri.authority().map(ToString::to_string).unwrap_or_default();
        Ok(Self { base, host, is_plain })
    }

    /// The host that requests name, with the port if the URL has one.
    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    /// The path that the URL has, `/` if none.
    pub(crate) fn path(&self) -> &str {
        let after = self.base.split_once("://").map_or("", |(_, rest)| rest);
        &after[self.host.len()..]
    }

    /// The URL of a path below, which may have a query.
    pub(crate) fn join(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.base)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.base)
    }
}

/// Loopback, or one of the given addresses.
fn is_near(host: &str, plain: &[IpAddr]) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    match host.parse::<IpAddr>() {
        Ok(address) => address.is_loopback() || plain.contains(&address),
        Err(_) => host == "localhost",
    }
}

/// The URL without what may be a password.
fn without_user(url: &str) -> String {
    match (url.split_once("://"), url.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, rest))) => format!("{scheme}://…@{rest}"),
        _ => url.to_owned(),
    }
}

/// What a provider answered, whatever its status.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    /// A header's value, where it is text.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// A header's value, where it is a number.
    pub(crate) fn number(&self, name: &str) -> Option<u64> {
        self.header(name).and_then(|value| value.trim().parse().ok())
    }
}

/// Why there is no answer.
#[derive(Debug, Clone)]
pub(crate) struct Unsent {
    /// Whether the request reached the provider is not known; if false, it certainly did not.
    pub(crate) maybe_sent: bool,
    pub(crate) why: String,
}

/// A client with connections that are kept.
#[derive(Clone)]
pub(crate) struct Http {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
}

impl fmt::Debug for Http {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Http")
    }
}

impl Http {
    /// A client for that endpoint. Certificates are judged by the roots of this machine.
    pub(crate) fn new(endpoint: &Endpoint) -> Result<Self> {
        let provider = rustls::crypto::ring::default_provider();
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_connect_timeout(Some(CONNECT));
        tcp.set_nodelay(true);
        let builder = HttpsConnectorBuilder::new();
        let connector = if endpoint.is_plain {
            // Nothing is encrypted, so no roots are needed, which a container without certificates does not have.
            let config = rustls::ClientConfig::builder_with_provider(provider.into())
                .with_safe_default_protocol_versions()
                .map_err(|error| Error::State(format!("set up TLS: {error}")))?
                .with_root_certificates(rustls::RootCertStore::empty())
                .with_no_client_auth();
            builder.with_tls_config(config).https_or_http().enable_http1().wrap_connector(tcp)
        } else {
            builder
                .with_provider_and_native_roots(provider)
                .map_err(|error| {
                    Error::State(format!("read the root certificates of this machine: {error}"))
                })?
                .https_only()
                .enable_http1()
                .wrap_connector(tcp)
        };
        let client =
            Client::builder(TokioExecutor::new()).pool_idle_timeout(Duration::from_secs(60)).build(connector);
        Ok(Self { client })
    }

    /// Sends one request, and reads the whole answer in that time. No header's value appears in an error.
    pub(crate) async fn send(
        &self,
        method: Method,
        url: &str,
        headers: &[(HeaderName, String)],
        body: Option<Vec<u8>>,
        time: Duration,
    ) -> std::result::Result<Answer, Unsent> {
        let not_sent = |why: String| Unsent { maybe_sent: false, why };
        let maybe_sent = |why: String| Unsent { maybe_sent: true, why };
        let mut request = Request::builder().method(method).uri(url);
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let request = request
            .body(Full::new(Bytes::from(body.unwrap_or_default())))
            .map_err(|_| not_sent("the request cannot be written in HTTP".to_owned()))?;
        let exchange = async {
            let answer = self.client.request(request).await.map_err(|error| {
                let why = berth_core::error_chain(&error);
                if error.is_connect() { not_sent(why) } else { maybe_sent(why) }
            })?;
            let (parts, body) = answer.into_parts();
            let body = Limited::new(body, LONGEST_ANSWER)
                .collect()
                .await
                .map_err(|error| maybe_sent(format!("the answer broke off: {error}")))?;
            Ok(Answer { status: parts.status, headers: parts.headers, body: body.to_bytes() })
        };
        match tokio::time::timeout(time, exchange).await {
            Ok(outcome) => outcome,
            Err(_) => Err(maybe_sent(format!("no answer within {time:?}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_http_goes_to_this_machine_and_to_metadata_alone() {
        let metadata: IpAddr = "169.254.169.254".parse().unwrap();
        let parse = |url| Endpoint::parse("--url", url, &[metadata]);
        for url in [
            "https://api.example.com",
            "https://api.example.com/base/",
            "http://127.0.0.1:8080/",
            "http://localhost:8080",
            "http://[::1]:8080/",
            "http://169.254.169.254/metadata/v1/",
        ] {
            assert!(parse(url).is_ok(), "{url}");
        }
        for (url, word) in [
            ("http://api.example.com/", "loopback"),
            ("http://10.0.0.1/", "loopback"),
            ("http://127.0.0.1.example.com/", "loopback"),
            ("https://me:hush@api.example.com/", "password"),
            ("ftp://127.0.0.1/", "https://"),
            ("/v2", "host"),
            ("https://api.example.com/?a=b", "query"),
        ] {
            let said = parse(url).unwrap_err().to_string();
            assert!(said.contains(word), "{said}");
            assert!(!said.contains("hush"), "{said}");
        }
        assert!(Endpoint::parse("--url", "http://169.254.169.254/", &[]).is_err());
        let endpoint = parse("https://api.example.com:444/base").unwrap();
        assert_eq!(endpoint.join("v2/x?y=z"), "https://api.example.com:444/base/v2/x?y=z");
        assert_eq!((endpoint.host(), endpoint.path()), ("api.example.com:444", "/base/"));
    }
}
