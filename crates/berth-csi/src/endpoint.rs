//! Where a plugin listens, as written on a command line.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::Tls;

/// `sun_path` has 108 bytes and the kernel wants room for the closing NUL.
const LONGEST_SOCKET_PATH: usize = 107;

/// The address of a CSI plugin.
///
/// | written                | means                                                      |
/// |------------------------|------------------------------------------------------------|
/// | `unix:///csi/csi.sock` | the socket `/csi/csi.sock`                                 |
/// | `unix://csi/csi.sock`  | the same: a `/` is put in front, as other CSI drivers do   |
/// | `unix:/csi/csi.sock`   | the same                                                   |
/// | `/csi/csi.sock`        | the same                                                   |
/// | `tcp://host:port`      | TCP, neither encrypted nor authenticated unless [`Endpoint::with_tls`]; an IPv6 host stands in brackets |
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// A Unix socket at an absolute path.
    Unix(PathBuf),
    /// A TCP port; the host is a name or an address without brackets.
    Tcp {
        /// What to listen on or connect to.
        host: String,
        /// 0 lets the kernel choose when listening.
        port: u16,
        /// How both sides prove who they are; without it nobody does.
        tls: Option<Tls>,
    },
}

/// TLS was asked for on a Unix socket, where it would have no effect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("TLS is for tcp:// endpoints only; {0} is protected by the permissions of its file")]
pub struct NotTcp(Endpoint);

impl Endpoint {
    /// The same endpoint, with TLS in which both sides show certificates.
    pub fn with_tls(self, tls: Tls) -> Result<Self, NotTcp> {
        match self {
            Self::Tcp { host, port, tls: _ } => Ok(Self::Tcp { host, port, tls: Some(tls) }),
            Self::Unix(_) => Err(NotTcp(self)),
        }
    }
}

/// What is wrong with the text of an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// The text is empty.
    #[error("the endpoint is empty; it looks like unix:///csi/csi.sock or tcp://host:port")]
    Empty,
    /// Neither a scheme we know nor an absolute path.
    #[error("the endpoint {0:?} begins neither with unix:, tcp:// nor /")]
    Scheme(String),
    /// `unix:` with nothing, or with a path that does not begin at the root.
    #[error("the endpoint {0:?} names no absolute path")]
    Relative(String),
    /// The path is that of a directory.
    #[error("the endpoint {0:?} ends like a directory; the name of the socket is missing")]
    Directory(String),
    /// A path with a NUL byte cannot be a path.
    #[error("the endpoint {0:?} has a NUL byte in its path")]
    Nul(String),
    /// The path does not fit into a socket address.
    #[error("the socket path {path:?} has {length} bytes; the kernel takes at most {LONGEST_SOCKET_PATH}")]
    TooLong {
        /// The path that was asked for.
        path: String,
        /// Its length in bytes.
        length: usize,
    },
    /// A TCP endpoint without a host, as in `tcp://:port`.
    #[error("the endpoint {0:?} has no host; write 0.0.0.0 or [::] to listen on every address")]
    EmptyHost(String),
    /// `tcp://host`, or a port that is not one.
    #[error("the endpoint {0:?} has no port between 0 and 65535 after its last colon")]
    Port(String),
    /// An IPv6 address without brackets, or brackets around something else.
    #[error("the host of the endpoint {0:?} is not a name or an address; an IPv6 address stands in brackets")]
    Host(String),
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        if text.is_empty() {
            return Err(EndpointError::Empty);
        }
        if text.starts_with('/') {
            return parse_socket_path(text, text);
        }
        match text.split_once(':') {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("unix") => match rest.strip_prefix("//") {
                Some("") => Err(EndpointError::Relative(text.to_owned())),
                Some(path) if path.starts_with('/') => parse_socket_path(text, path),
                Some(path) => parse_socket_path(text, &format!("/{path}")),
                None => parse_socket_path(text, rest),
            },
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("tcp") && rest.starts_with("//") => {
                parse_tcp(text, &rest[2..])
            }
            _ => Err(EndpointError::Scheme(text.to_owned())),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
            Self::Tcp { host, port, .. } if host.contains(':') => write!(f, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port, .. } => write!(f, "tcp://{host}:{port}"),
        }
    }
}

fn parse_socket_path(text: &str, path: &str) -> Result<Endpoint, EndpointError> {
    if !path.starts_with('/') {
        return Err(EndpointError::Relative(text.to_owned()));
    }
    if path.contains('\0') {
        return Err(EndpointError::Nul(text.to_owned()));
    }
    if path.ends_with('/') || Path::new(path).file_name().is_none() {
        return Err(EndpointError::Directory(text.to_owned()));
    }
    if path.len() > LONGEST_SOCKET_PATH {
        return Err(EndpointError::TooLong { path: path.to_owned(), length: path.len() });
    }
    Ok(Endpoint::Unix(path.into()))
}

fn parse_tcp(text: &str, address: &str) -> Result<Endpoint, EndpointError> {
    let (host, port) = address.rsplit_once(':').ok_or_else(|| EndpointError::Port(text.to_owned()))?;
    if host.is_empty() {
        return Err(EndpointError::EmptyHost(text.to_owned()));
    }
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let port = port.parse().ok().filter(|_| digits).ok_or_else(|| EndpointError::Port(text.to_owned()))?;
    let host = match host.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')) {
        Some(inner) if inner.parse::<std::net::Ipv6Addr>().is_ok() => inner,
        Some(_) => return Err(EndpointError::Host(text.to_owned())),
        None if host.contains([':', '/', '[', ']', '@']) => return Err(EndpointError::Host(text.to_owned())),
        None => host,
    };
    Ok(Endpoint::Tcp { host: host.to_owned(), port, tls: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_write_a_socket_path_means_the_same_socket() {
        for text in [
            "unix:///csi/csi.sock",
            "unix://csi/csi.sock",
            "unix:/csi/csi.sock",
            "/csi/csi.sock",
            "UNIX:///csi/csi.sock",
        ] {
            let endpoint: Endpoint = text.parse().unwrap();
            assert_eq!(endpoint, Endpoint::Unix("/csi/csi.sock".into()), "{text}");
            assert_eq!(endpoint.to_string(), "unix:///csi/csi.sock");
        }
    }

    #[test]
    fn a_tcp_endpoint_reads_back_as_it_was_written() {
        for (text, host, port) in [
            ("tcp://localhost:10000", "localhost", 10000),
            ("tcp://0.0.0.0:0", "0.0.0.0", 0),
            ("tcp://[::1]:65535", "::1", 65535),
        ] {
            let endpoint: Endpoint = text.parse().unwrap();
            assert_eq!(endpoint, Endpoint::Tcp { host: host.to_owned(), port, tls: None }, "{text}");
            assert_eq!(endpoint.to_string(), text);
        }
    }

    #[test]
    fn a_wrong_endpoint_is_refused_with_what_is_wrong() {
        let own = str::to_owned;
        for (text, error) in [
            ("", EndpointError::Empty),
            ("csi.sock", EndpointError::Scheme(own("csi.sock"))),
            ("http://host:1", EndpointError::Scheme(own("http://host:1"))),
            ("tcp:host:1", EndpointError::Scheme(own("tcp:host:1"))),
            ("unix:", EndpointError::Relative(own("unix:"))),
            ("unix://", EndpointError::Relative(own("unix://"))),
            ("unix:csi.sock", EndpointError::Relative(own("unix:csi.sock"))),
            ("unix:///", EndpointError::Directory(own("unix:///"))),
            ("/csi/", EndpointError::Directory(own("/csi/"))),
            ("/csi/..", EndpointError::Directory(own("/csi/.."))),
            ("/a\0b", EndpointError::Nul(own("/a\0b"))),
            ("tcp://:10000", EndpointError::EmptyHost(own("tcp://:10000"))),
            ("tcp://host", EndpointError::Port(own("tcp://host"))),
            ("tcp://host:", EndpointError::Port(own("tcp://host:"))),
            ("tcp://host:+1", EndpointError::Port(own("tcp://host:+1"))),
            ("tcp://host:65536", EndpointError::Port(own("tcp://host:65536"))),
            ("tcp://::1:10", EndpointError::Host(own("tcp://::1:10"))),
            ("tcp://[host]:10", EndpointError::Host(own("tcp://[host]:10"))),
            ("tcp://a/b:10", EndpointError::Host(own("tcp://a/b:10"))),
        ] {
            assert_eq!(text.parse::<Endpoint>(), Err(error), "{text:?}");
        }
    }

    #[test]
    fn the_longest_path_the_kernel_takes_is_taken_and_one_byte_more_is_not() {
        let longest = format!("/{}", "a".repeat(106));
        assert_eq!(longest.parse::<Endpoint>(), Ok(Endpoint::Unix(longest.clone().into())));
        let path = format!("{longest}a");
        assert_eq!(path.parse::<Endpoint>(), Err(EndpointError::TooLong { path, length: 108 }));
    }
}
