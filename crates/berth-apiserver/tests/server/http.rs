//! A client that speaks HTTP/1.1 over TLS and little else, so that the server is what is tested and measured.

use std::{io, net::SocketAddr, sync::Arc};

use berth_apiserver::auth::Credentials;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

/// A server, and what proves to it that the administrator asks.
#[derive(Clone)]
pub(crate) struct Endpoint {
    /// The address that the server listens on.
    pub(crate) address: SocketAddr,
    connector: TlsConnector,
}

impl Endpoint {
    /// The server at an address that has these credentials.
    pub(crate) fn new(address: SocketAddr, credentials: &Credentials) -> Result<Self, rustls::Error> {
        let pem = |error: rustls::pki_types::pem::Error| rustls::Error::General(error.to_string());
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(credentials.authority.as_bytes()).map_err(pem)?)?;
        let certificate =
            CertificateDer::from_pem_slice(credentials.admin.certificate.as_bytes()).map_err(pem)?;
        let key = PrivateKeyDer::from_pem_slice(credentials.admin.key.as_bytes()).map_err(pem)?;
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![certificate], key)?;
        Ok(Self { address, connector: TlsConnector::from(Arc::new(config)) })
    }

    /// A connection on which nothing was said yet.
    pub(crate) async fn raw(&self) -> io::Result<TlsStream<TcpStream>> {
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        self.connector.connect(ServerName::from(self.address.ip()), stream).await
    }

    /// A connection for requests, one after the other.
    pub(crate) async fn connect(&self) -> io::Result<Connection> {
        Ok(Connection { stream: BufReader::with_capacity(64 << 10, self.raw().await?) })
    }
}

/// An answer that has been read to its end.
#[derive(Debug)]
pub(crate) struct Reply {
    /// The status code of the answer.
    pub(crate) status: u16,
    /// The body without the framing of chunks.
    pub(crate) body: Vec<u8>,
}

impl Reply {
    /// The body as JSON; null if it is none.
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

enum Length {
    Known(usize),
    Chunked,
}

/// A connection that is kept alive between requests.
pub(crate) struct Connection {
    stream: BufReader<TlsStream<TcpStream>>,
}

impl Connection {
    /// Sends a request and reads the whole answer.
    pub(crate) async fn send(
        &mut self,
        method: &str,
        path: &str,
        media: &str,
        body: &[u8],
    ) -> io::Result<Reply> {
        self.request(method, path, media, body).await?;
        let (status, length) = self.head().await?;
        let mut answer = Vec::new();
        match length {
            Length::Known(length) => {
                answer.resize(length, 0);
                self.stream.read_exact(&mut answer).await?;
            }
            Length::Chunked => while self.chunk(&mut answer).await? {},
        }
        Ok(Reply { status, body: answer })
    }

    /// Sends a GET request for `path` and waits for the whole answer.
    pub(crate) async fn get(&mut self, path: &str) -> io::Result<Reply> {
        self.send("GET", path, "application/json", b"").await
    }

    /// Sends a JSON body.
    pub(crate) async fn json(
        &mut self,
        method: &str,
        path: &str,
        body: &serde_json::Value,
    ) -> io::Result<Reply> {
        self.send(method, path, "application/json", body.to_string().as_bytes()).await
    }

    /// Asks for a stream of lines.
    pub(crate) async fn watch(mut self, path: &str) -> io::Result<Lines> {
        self.request("GET", path, "application/json", b"").await?;
        let (status, length) = self.head().await?;
        if status != 200 || !matches!(length, Length::Chunked) {
            return Err(io::Error::other(format!("a watch was answered with {status}")));
        }
        Ok(Lines { connection: self, buffer: Vec::new(), read: 0 })
    }

    async fn request(&mut self, method: &str, path: &str, media: &str, body: &[u8]) -> io::Result<()> {
        let mut bytes = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\nContent-Type: {media}\r\n\
             Content-Length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        bytes.extend_from_slice(body);
        let stream = self.stream.get_mut();
        stream.write_all(&bytes).await?;
        stream.flush().await
    }

    async fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.stream.read_line(&mut line).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        line.truncate(line.trim_end().len());
        Ok(line)
    }

    async fn head(&mut self) -> io::Result<(u16, Length)> {
        let bad = |line: &str| io::Error::new(io::ErrorKind::InvalidData, format!("not HTTP: {line:?}"));
        let first = self.line().await?;
        let status = first.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.ok_or_else(|| bad(&first))?;
        let mut length = Length::Known(0);
        loop {
            let line = self.line().await?.to_ascii_lowercase();
            if line.is_empty() {
                return Ok((status, length));
            }
            match line.split_once(':') {
                Some(("content-length", value)) => {
                    length = Length::Known(value.trim().parse().map_err(|_| bad(&line))?);
                }
                Some(("transfer-encoding", _)) => length = Length::Chunked,
                Some(_) => {}
                None => return Err(bad(&line)),
            }
        }
    }

    /// Reads one chunk; says whether there may be more.
    async fn chunk(&mut self, into: &mut Vec<u8>) -> io::Result<bool> {
        let head = self.line().await?;
        let length = usize::from_str_radix(&head, 16)
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, format!("not a chunk: {head:?}")))?;
        let old = into.len();
        into.resize(old + length, 0);
        self.stream.read_exact(&mut into[old..]).await?;
        self.line().await?;
        Ok(length > 0)
    }
}

/// The lines of an answer that goes on.
pub(crate) struct Lines {
    connection: Connection,
    buffer: Vec<u8>,
    read: usize,
}

impl Lines {
    /// The next line, or `None` at the proper end.
    pub(crate) async fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some(end) = self.buffer[self.read..].iter().position(|&byte| byte == b'\n') {
                let line = self.buffer[self.read..self.read + end].to_vec();
                self.read += end + 1;
                return Ok(Some(line));
            }
            self.buffer.drain(..self.read);
            self.read = 0;
            if !self.connection.chunk(&mut self.buffer).await? {
                return Ok(None);
            }
        }
    }

    /// Reads what has arrived and counts its lines.
    pub(crate) async fn count(&mut self) -> io::Result<usize> {
        self.buffer.clear();
        self.read = 0;
        self.connection.chunk(&mut self.buffer).await?;
        Ok(self.buffer.split(|&byte| byte == b'\n').count() - 1)
    }
}
