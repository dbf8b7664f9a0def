//! Connecting to a server, from a reserved port where we may.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use tokio::{
    net::{TcpSocket, TcpStream, lookup_host},
    time::timeout,
};

use crate::status::Fault;

/// Ports that servers take as proof of a privileged client; lower ones belong to services.
const RESERVED: std::ops::Range<u16> = 665..1024;
/// So many reserved ports are tried before an ordinary one is taken.
const TRIES: u16 = 32;

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Endpoint {
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Whether our port must (or must not) be a reserved one.
    pub(crate) reserved: Option<bool>,
    pub(crate) timeout: Duration,
}

impl Endpoint {
    /// Connects, and returns whether our port is a reserved one.
    pub(super) async fn dial(&self) -> Result<(TcpStream, bool), Fault> {
        match timeout(self.timeout, self.dial_any()).await {
            Ok(Ok(dialled)) => Ok(dialled),
            Ok(Err(error)) => Err(self.unreachable(&error.to_string())),
            Err(_) => Err(self.unreachable(&format!("no answer within {} s", self.timeout.as_secs_f32()))),
        }
    }

    fn unreachable(&self, why: &str) -> Fault {
        Fault::Unreachable(format!("cannot connect to {} port {}: {why}", self.host, self.port))
    }

    async fn dial_any(&self) -> io::Result<(TcpStream, bool)> {
        let addresses: Vec<_> = lookup_host((self.host.as_str(), self.port)).await?.collect();
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        let share = self.timeout / u32::try_from(addresses.len().max(1)).unwrap_or(u32::MAX);
        for address in addresses {
            match timeout(share, self.dial_one(address)).await {
                Ok(Ok((stream, reserved))) => {
                    stream.set_nodelay(true)?;
                    return Ok((stream, reserved));
                }
                Ok(Err(error)) => last = error,
                Err(_) => {
                    last = io::Error::new(io::ErrorKind::TimedOut, format!("{address} does not answer"));
                }
            }
        }
        Err(last)
    }

    async fn dial_one(&self, address: SocketAddr) -> io::Result<(TcpStream, bool)> {
        if self.reserved != Some(false) {
            match dial_reserved(address).await {
                Ok(stream) => return Ok((stream, true)),
                Err(error) if no_port(&error) && self.reserved.is_none() => {}
                Err(error) => return Err(error),
            }
        }
        TcpStream::connect(address).await.map(|stream| (stream, false))
    }
}

async fn dial_reserved(address: SocketAddr) -> io::Result<TcpStream> {
    let count = RESERVED.end - RESERVED.start;
    let start = u16::try_from(random() % u64::from(count)).expect("a port's offset is small");
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for offset in 0..TRIES {
        let port = RESERVED.start + (start + offset) % count;
        match dial_from(port, address).await {
            Err(error)
                if matches!(error.kind(), io::ErrorKind::AddrInUse | io::ErrorKind::AddrNotAvailable) =>
            {
                last = error;
            }
            done => return done,
        }
    }
    Err(last)
}

async fn dial_from(port: u16, to: SocketAddr) -> io::Result<TcpStream> {
    let (socket, any) = match to {
        SocketAddr::V4(_) => (TcpSocket::new_v4()?, IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
        SocketAddr::V6(_) => (TcpSocket::new_v6()?, IpAddr::V6(Ipv6Addr::UNSPECIFIED)),
    };
    // A port that was used a minute ago may be used again for another connection.
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::new(any, port))?;
    socket.connect(to).await
}

/// There is no reserved port for us: we may not, or none is free.
fn no_port(error: &io::Error) -> bool {
    use io::ErrorKind::{AddrInUse, AddrNotAvailable, PermissionDenied};
    matches!(error.kind(), PermissionDenied | AddrInUse | AddrNotAvailable)
}

/// A number that nobody can foretell.
pub fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
