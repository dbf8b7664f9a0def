//! Whether anybody listens at an address, from the kernel's tables of sockets: asking by a connection would be noticed.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use super::Protocol;

/// What is found at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Listening {
    /// A socket at this very address.
    There,
    /// A socket at all addresses.
    Everywhere,
    Nobody,
}

/// The state of a TCP socket that listens, and of a UDP socket without a peer.
const LISTEN: &str = "0A";
const UNCONNECTED: &str = "07";

/// Whether somebody listens at an address.
pub(super) fn listening(protocol: Protocol, at: SocketAddr) -> io::Result<Listening> {
    let (tables, state) = match protocol {
        Protocol::Tcp => (["/proc/net/tcp", "/proc/net/tcp6"], LISTEN),
        Protocol::Udp => (["/proc/net/udp", "/proc/net/udp6"], UNCONNECTED),
    };
    let mut found = Listening::Nobody;
    for table in tables {
        let text = match std::fs::read_to_string(table) {
            Ok(text) => text,
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        match find(&text, at, state) {
            Listening::There => return Ok(Listening::There),
            Listening::Everywhere => found = Listening::Everywhere,
            Listening::Nobody => {}
        }
    }
    Ok(found)
}

/// Looks for a socket in the text of a table: `sl local_address rem_address st …`, addresses in hexadecimal as the processor has
/// them in memory.
fn find(table: &str, at: SocketAddr, state: &str) -> Listening {
    let SocketAddr::V4(v4) = at else { return Listening::Nobody };
    let own = format!("{:08X}", u32::from_ne_bytes(v4.ip().octets()));
    let mapped = format!("0000000000000000{:08X}{own}", u32::from_ne_bytes([0, 0, 0xff, 0xff]));
    let any = format!("{:08X}", u32::from(Ipv4Addr::UNSPECIFIED));
    let mut found = Listening::Nobody;
    for line in table.lines().skip(1) {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (Some(local), Some(_), Some(known)) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        let Some((address, port)) = local.split_once(':') else { continue };
        if known != state || u16::from_str_radix(port, 16) != Ok(at.port()) {
            continue;
        }
        if address == own || address == mapped {
            return Listening::There;
        }
        if address == any || address.bytes().all(|byte| byte == b'0') {
            found = Listening::Everywhere;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, UdpSocket};

    use super::*;

    #[test]
    fn the_kernel_says_who_listens() {
        let there = TcpListener::bind("127.1.2.3:0").unwrap();
        let at = there.local_addr().unwrap();
        assert_eq!(listening(Protocol::Tcp, at).unwrap(), Listening::There);
        let elsewhere = SocketAddr::from(([127, 1, 2, 4], at.port()));
        assert_eq!(listening(Protocol::Tcp, elsewhere).unwrap(), Listening::Nobody);
        drop(there);
        assert_eq!(listening(Protocol::Tcp, at).unwrap(), Listening::Nobody);
        let everywhere = TcpListener::bind("0.0.0.0:0").unwrap();
        let at = SocketAddr::from(([127, 1, 2, 3], everywhere.local_addr().unwrap().port()));
        assert_eq!(listening(Protocol::Tcp, at).unwrap(), Listening::Everywhere);
        let datagrams = UdpSocket::bind("127.1.2.3:0").unwrap();
        assert_eq!(listening(Protocol::Udp, datagrams.local_addr().unwrap()).unwrap(), Listening::There);
        if let Ok(both) = TcpListener::bind("[::]:0") {
            let at = SocketAddr::from(([127, 1, 2, 3], both.local_addr().unwrap().port()));
            assert_eq!(listening(Protocol::Tcp, at).unwrap(), Listening::Everywhere);
        }
    }
}
